// What identifies a person or opens an account: published examples of each kind and what only looks like it, one by one; then
// precision and recall on made sentences.
#include <gtest/gtest.h>

#include <chrono>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "../llmc/curate/pii.h"
#include "testing.h"

namespace test_pii {

std::string masked(const std::string& text, const PiiOptions& o = {}) {
    Document d;
    d.text = text;
    Changes changes;
    const DocumentVerdict j = Pii(o).apply(d, changes);
    return j.keep ? d.text : "dropped: " + j.rule;
}
TEST(Pii, MasksWhatReachesAPerson) {
    const std::pair<const char*, const char*> rows[] = {
        {"Write to jane.doe+x@mail.example.co.uk.", "Write to <EMAIL>."},
        {"<a href=\"mailto:a_b@c-d.org\">", "<a href=\"mailto:<EMAIL>\">"},
        {"a@b.co, 'c@d.org'; (e@f.net)", "<EMAIL>, '<EMAIL>'; (<EMAIL>)"},
        {"Call +44 20 7946 0958 or +1 (555) 010-9999!", "Call <PHONE> or <PHONE>!"},
        {"(555) 510-9999, 555-510-9999, 1-555-510-9999, 555.510.9999", "<PHONE>, <PHONE>, <PHONE>, <PHONE>"},
        {"Tel. 03-1234-5678, 020 7946 0958, (0123) 456789, 01 23 45 67 89", "Tel. <PHONE>, <PHONE>, <PHONE>, <PHONE>"},
        {"4111 1111 1111 1111, 378282246310005, 5555-5555-5555-4444 exp", "<CARD>, <CARD>, <CARD> exp"},
        {"4111 1111 1111 1111 123", "<CARD> 123"},
        {"from 8.8.4.14 and [2606:4700:4700::1111]:443", "from <IP> and [<IP>]:443"},
    };
    for (const auto& [text, expected] : rows) EXPECT_EQ(masked(text), expected);
    PiiOptions emails = {true, false, false, false};
    EXPECT_EQ(masked("a@b.co 8.8.4.14", emails), "<EMAIL> 8.8.4.14");
    emails.drop = true;
    EXPECT_EQ(masked("see a@b.co", emails), "dropped: pii-email");
    EXPECT_EQ(masked("see 8.8.4.14", emails), "see 8.8.4.14");
    PiiOptions all;
    all.private_addresses = true;
    EXPECT_EQ(masked("10.0.0.12, 192.168.1.20, fe80::1:2:3", all), "<IP>, <IP>, <IP>");
}

TEST(Pii, KeepsNumbersThatAreNoPersons) {
    for (const char* text : {"version 1.2.3.4",
                             "v10.20.30.40",
                             "release 12.0.1.15",
                             "section 1.2.3.4",
                             "1.2.3.4.50",
                             "256.1.1.10",
                             "10.0.0.12",
                             "192.168.1.20",
                             "127.0.0.1",
                             "fe80::1:2:3",
                             "2001:db8::1:2",
                             "::1",
                             "std::vector",
                             "face::add",
                             "12:34:56",
                             "00:1A:2B:3C:4D:5E",
                             "2024-01-02",
                             "2024-01-02 03:04:05",
                             "01.02.2024",
                             "1914-1918",
                             "1,234,567,890",
                             "12 345 678 901",
                             "3.14159265358979",
                             "ISBN 978-3-16-148410-0",
                             "ISBN 0-306-40615-2",
                             "ISBN 0 306 40615 2",
                             "ISSN 0317-8471",
                             "9783161484100",
                             "4111 1111 1111 1112",
                             "1234567812345670",
                             "6.02e23",
                             "image@2x.png",
                             "@decorator.name",
                             "user@host",
                             "a @ b.c",
                             "x@y.",
                             "100.200.3000",
                             "127-543-2109",
                             "C++11",
                             "f(0123456789)",
                             "0x1234567890",
                             "id4111111111111111",
                             "0.4111111111111111",
                             "doi:10.1000/182",
                             "$1,000,000.00",
                             "50-100-2000"})
        EXPECT_EQ(masked(text), text);
}

PiiOptions all_kinds() {
    PiiOptions o;
    o.user = true;
    return o;
}
// Token examples are joined here, so that no scanner takes them for real ones.
std::string key(const std::string& prefix, size_t n, const std::string& from = "aB3dE5gH7jK9mN2pQ4rS6tU8") {
    std::string s = prefix;
    for (size_t i = 0; i < n; i++) s += from[(i * 7 + 3) % from.size()];
    return s;
}

using Texts = std::vector<std::string>;
const std::map<std::string, Texts>& positives() {
    static const std::map<std::string, Texts> all = {
        {"email",
         {"jane.doe@example.org", "a_b+c@mail.example.co.uk", "john [at] example [dot] com", "john(at)example.com",
          "j.doe99 (at) mail (dot) example (dot) org", "john AT example DOT com", "john at example dot com",
          "info{at}example.de", "k.sato <at> example.co.jp", "x@y.museum"}},
        {"phone",
         {"+44 20 7946 0958", "(555) 510-9999", "555-510-9999", "03-1234-5678", "020 7946 0958", "+81 3 1234 5678",
          "01 23 45 67 89"}},
        {"card", {"4111 1111 1111 1111", "378282246310005", "5555-5555-5555-4444", "6011111111111117", "30569309025904"}},
        {"ip", {"8.8.8.8", "1.1.1.1", "8.8.4.14", "93.184.216.34", "2606:4700:4700::1111", "199.7.83.42"}},
        {"iban",
         {"DE89 3704 0044 0532 0130 00", "GB29 NWBK 6016 1331 9268 19", "FR14 2004 1010 0505 0001 3M02 606",
          "NL91ABNA0417164300", "CH93 0076 2011 6238 5295 7", "BR1800360305000010009795493C1",
          "ES91-2100-0418-4502-0005-1332"}},
        {"id",
         {"536-22-1234",
          "529.982.247-25",
          "111.444.777-35",
          "AB 12 34 56 C",
          "JG103759A",
          "2 55 08 14 168 025 38",
          "12345678Z",
          "X1234567L",
          "RSSMRA85T10A562S",
          "11010519491231002X",
          "900101-1234567",
          "HEGG560427MVZRRL04",
          "9999 4105 7058",
          "SIN 046 454 286",
          "Steuer-ID: 86 095 742 719",
          "BSN 111222333",
          "PESEL: 44051401359",
          "My Number 1234-5678-9018",
          "personnummer 811218-9876",
          "SSN 536 22 1234",
          "TC kimlik no 10000000146"}},
        {"key",
         {key("AKIA", 16, "B3D5G7J9N2P4QRSTUV"), key("ghp_", 36), key("github_pat_", 82), key("AIza", 35), key("xoxb-", 40),
          key("sk_live_", 24), key("sk-", 48), key("sk-ant-", 90), key("hf_", 34), key("glpat-", 20), key("npm_", 36),
          key("eyJ", 20) + "." + key("eyJ", 40) + "." + key("", 43), "password = \"" + key("", 12) + "\"",
          "\"api_key\": \"" + key("", 32) + "\"", "export AUTH_TOKEN=" + key("", 24), "db_passwd: " + key("", 9),
          "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\nIBAAKC\n-----END RSA PRIVATE KEY-----"}},
        {"user", {"@jane_doe", "@nasa", "@Jack99", "@some.one"}},
    };
    return all;
}
// What only looks like it, by the kind that it might be taken for.
const std::map<std::string, Texts>& negatives() {
    static const std::map<std::string, Texts> all = {
        {"email",
         {"image@2x.png", "a @ b", "look at example dot com", "meet [at] noon", "at the dot", "x = a@b", "sold (at) cost.",
          "foo@bar"}},
        {"phone", {"2024-11-27", "1,234,567", "ISBN 0-306-40615-2", "12:30:45", "3.14159265", "1234567890123", "0.0012345678"}},
        {"card", {"4111 1111 1111 1112", "1234 5678 9012 3456", "order 4000000000000000001"}},
        {"ip",
         {"version 10.4.2.17", "1.2.3.4", "v2.0.1.9", "section 3.1.4.1", "192.168.1.20", "12:30:45", "300.1.2.3",
          "5.4.3.2 release"}},
        {"iban",
         {"DE89 3704 0044 0532 0130 01", "GB30 NWBK 6016 1331 9268 19", "XX89 3704 0044 0532 0130 00", "DE89", "ISO 27001"}},
        {"id",
         {"000-12-3456", "666-12-3456", "900-12-3456", "529.982.247-26", "12345678A", "X1234567A", "RSSMRA85T10A562T",
          "110105194912310021", "991301-1234567", "9999 4105 7059", "046 454 286", "86095742719", "111222333", "44051401359",
          "123456789018", "BG 12 34 56 C", "2024-12-3456", "B0044051401359X"}},
        {"key",
         {"da39a3ee5e6b4b0d3255bfef95601890afd80709", "123e4567-e89b-12d3-a456-426614174000", "sk-learn", "password: ********",
          "api_key = \"YOUR_API_KEY\"", "password = getPassword(user)", "token = tokens[0]", "secret = os.environ[\"SECRET\"]",
          "the password is: correct horse", "hf_hub_download", "AKIA", "ghp_short1", "token: 5", "sk-1234", "import npm_config",
          "token == token12345678901", "the secret: he was born in 1984",
          "-----BEGIN PUBLIC KEY-----\nMIIB\n-----END PUBLIC KEY-----"}},
        {"user",
         {"@Override public", "@media (min-width: 1em)", "@param x", "npm i @babel/core", "a@b", "@ 5pm", "@app.route(\"/\")",
          "x @property\n", "@12345", "user@host", "@import url", "matrix A@B"}},
    };
    return all;
}

TEST(Pii, PublishedExamplesOfEachKind) {
    for (const auto& [kind, texts] : positives())
        for (const std::string& text : texts) {
            std::set<std::string> found;
            for (const pii::Found& f : find_pii(text, all_kinds())) found.insert(f.kind);
            EXPECT_EQ(found, std::set<std::string>{kind}) << text;
        }
    for (const auto& [kind, texts] : negatives())
        for (const std::string& text : texts)
            for (const pii::Found& f : find_pii(text, all_kinds()))
                EXPECT_NE(f.kind, kind) << text << ": " << text.substr(f.begin, f.end - f.begin);
}

TEST(Pii, MasksTheWholePlace) {
    const std::pair<std::string, std::string> rows[] = {
        {"Ask 8.8.8.8, not 1.2.3.4.", "Ask <IP>, not 1.2.3.4."},
        {"ping 1.2.3.4; http://2.3.4.5/x 5.6.7.8:80", "ping <IP>; http://<IP>/x <IP>:80"},
        {"Pay to DE89 3704 0044 0532 0130 00, please", "Pay to <IBAN>, please"},
        {"Mail john [at] example [dot] com.", "Mail <EMAIL>."},
        {"j.doe (at) mail.example.org is mine", "<EMAIL> is mine"},
        {"user99 [at] example.com", "<EMAIL>"},
        {"SSN: 536-22-1234.", "SSN: <ID>."},
        {"{\"password\": \"" + key("", 12) + "\", \"user\": 1}", "{\"password\": \"<KEY>\", \"user\": 1}"},
        {"電話03-1234-5678まで", "電話<PHONE>まで"},
        {"服务器8.8.4.14，", "服务器<IP>，"},
        {"é8.8.4.14", "é8.8.4.14"},
        {"thanks @jane_doe!", "thanks @jane_doe!"},  // only if requested
        {"a -----BEGIN PRIVATE KEY-----\nx\n-----END PRIVATE KEY----- b", "a <KEY> b"},
    };
    for (const auto& [text, expected] : rows) EXPECT_EQ(masked(text), expected);
    EXPECT_EQ(masked("thanks @jane_doe! @Override", all_kinds()), "thanks <USER>! @Override");
    PiiOptions emails;
    for (const PiiKind& kind : pii_kinds) *emails.of(kind.name) = std::string(kind.name) == "email";
    EXPECT_EQ(masked("a@b.co 8.8.4.14 DE89 3704 0044 0532 0130 00", emails), "<EMAIL> 8.8.4.14 DE89 3704 0044 0532 0130 00");
    // Texts made to take long.
    for (const std::string part :
         {"-----BEGIN PRIVATE KEY-----", "eyJ", "john [at] a", "a at b dot ", "AA00 ", "password=", "@a.", "1 "}) {
        std::string text;
        while (text.size() < 1 << 18) text += part;
        const auto start = std::chrono::steady_clock::now();
        find_pii(text, all_kinds());
        EXPECT_LT(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(), 20) << part;
    }
}

// Sentences with one place each, or with none: random numbers, versions, sums, codes. Every place that is found and is not the
// one that was put there is wrong.
TEST(Pii, PrecisionAndRecallOnMadeSentences) {
    test::Rng rng(5);
    struct Score {
        int right = 0, wrong = 0, missed = 0;
    };
    std::map<std::string, Score> scores;
    const Texts frames = {"Please note %s for the record.", "It says: %s", "(%s)", "see \"%s\", as before",
                          "今日は、%s です。"};
    for (const auto& [kind, texts] : positives())
        for (const std::string& text : texts)
            for (const std::string& frame : frames) {
                const size_t at = frame.find("%s");
                const std::string sentence = frame.substr(0, at) + text + frame.substr(at + 2);
                bool hit = false;
                for (const pii::Found& f : find_pii(sentence, all_kinds())) {
                    const bool right = f.kind == kind && f.begin >= at && f.end <= at + text.size();
                    hit |= right;
                    if (!right) scores[f.kind].wrong++;
                }
                hit ? scores[kind].right++ : scores[kind].missed++;
            }
    const auto digits = [&](int n) {
        std::string s;
        for (int i = 0; i < n; i++) s += (char)('0' + rng.below(10));
        return s;
    };
    const auto number = [&]() -> std::string {
        switch (rng.below(16)) {
            case 0: return digits(1 + rng.below(19));
            case 1: return "$" + digits(3) + "," + digits(3) + "." + digits(2);
            case 2:
                return "20" + digits(2) + "-0" + std::to_string(1 + rng.below(9)) + "-" + std::to_string(10 + rng.below(18));
            case 3: return "version " + digits(1) + "." + digits(1) + "." + digits(2) + "." + digits(1);
            case 4: return "order " + digits(3) + "-" + digits(7) + "-" + digits(7);
            case 5: return digits(2) + ":" + digits(2) + ":" + digits(2);
            case 6: return "0." + digits(12);
            case 7: return "ISBN 978-" + digits(1) + "-" + digits(3) + "-" + digits(5) + "-" + digits(1);
            case 8: return digits(8) + "-" + digits(4) + "-4" + digits(3) + "-a" + digits(3) + "-" + digits(12);
            case 9: return "page " + digits(2) + "-" + digits(2);
            case 10: return digits(4) + " " + digits(4);
            case 11: return "No. " + digits(6) + "/" + digits(2);
            case 12:
                return std::string(1, (char)('A' + rng.below(26))) + digits(7) + std::string(1, (char)('A' + rng.below(26)));
            case 13: return "#" + digits(6);
            case 14: return "RFC" + digits(4) + ", " + digits(1) + "." + digits(1) + "." + digits(1) + "." + digits(1);
            default: return "(" + digits(2) + ") " + digits(3);
        }
    };
    int sentences = 0;
    for (int i = 0; i < 3000; i++, sentences++)
        for (const pii::Found& f : find_pii("There were " + number() + " of them, and " + number() + " more.", all_kinds()))
            scores[f.kind].wrong++;
    for (const auto& [kind, texts] : negatives())
        for (const std::string& text : texts)
            for (const std::string& frame : frames) {
                const size_t at = frame.find("%s");
                sentences++;
                for (const pii::Found& f : find_pii(frame.substr(0, at) + text + frame.substr(at + 2), all_kinds()))
                    if (f.kind == kind) scores[f.kind].wrong++;
            }
    printf("%d sentences without a place\n", sentences);
    for (const auto& [kind, s] : scores) {
        const double precision = (double)s.right / (s.right + s.wrong), recall = (double)s.right / (s.right + s.missed);
        printf("%-6s %4d places: recall %.3f, precision %.3f\n", kind.c_str(), s.right + s.missed, recall, precision);
        EXPECT_GE(recall, 0.9) << kind;
        EXPECT_GE(precision, kind == "card" || kind == "id" ? 0.6 : 0.9) << kind;
    }
}

}  // namespace test_pii
