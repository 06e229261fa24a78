// What identifies or reaches a person, or opens an account: each place is masked by a placeholder (<EMAIL>, <PHONE>, ...), or
// its document is dropped. ROOTS (Laurençon et al. 2022, section 3.3) and StarCoder (Li et al. 2023, section 4) masked the same
// kinds by regular expressions and models; checksums and context distinguish them from other numbers and words here:
//   email   local part, @, a domain with a top level of letters; not image@2x.png. Also spelled out (pii_secrets.h)
//   card    13 to 19 digits of an issuer's range and length, with Luhn's checksum (ISO/IEC 7812)
//   ip      v4: four numbers up to 255 without leading zeros; not what follows "version". Four single digits (1.2.3.4) are more
//           often a version or a section: they count if they are a public resolver's (8.8.8.8), if a word like "server" or
//           "ping" is near, or if a port or a URL is around them. v6: what inet_pton() reads, of three groups or more with a
//           digit in them. Addresses that are not of the Internet (private, loopback, link-local, documentation, multicast: RFC
//           6890) are kept unless asked otherwise
//   phone   +, then 8 to 15 digits (E.164); North American 3-3-4 digits; national numbers that start with 0, of 10 or 11
//           digits in groups. Not what follows "ISBN" or "ISSN", not dates, not groups of thousands
//   iban, id   bank accounts and numbers of the state, by their checksums (pii_numbers.h)
//   key, user  keys and tokens; handles, which are looked for only if requested (pii_secrets.h)
// Names and postal addresses are not found: rules cannot.
#pragma once
#include <arpa/inet.h>

#include <array>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "document.h"
#include "pii_numbers.h"
#include "pii_secrets.h"
#include "pii_text.h"

struct PiiKind {
    const char *name, *rule, *placeholder;
};
inline constexpr PiiKind pii_kinds[] = {{"email", "pii-email", "<EMAIL>"}, {"phone", "pii-phone", "<PHONE>"},
                                        {"card", "pii-card", "<CARD>"},    {"ip", "pii-ip", "<IP>"},
                                        {"iban", "pii-iban", "<IBAN>"},    {"id", "pii-id", "<ID>"},
                                        {"key", "pii-key", "<KEY>"},       {"user", "pii-user", "<USER>"}};

struct PiiOptions {
    bool email = true, phone = true, card = true, ip = true, iban = true, id = true, key = true, user = false;
    bool private_addresses = false;  // those too
    bool drop = false;               // drop the document instead of masking

    // The switch of a kind; null: no such kind.
    bool* of(const std::string& kind) {
        bool* const switches[] = {&email, &phone, &card, &ip, &iban, &id, &key, &user};
        for (size_t i = 0; i < std::size(pii_kinds); i++)
            if (kind == pii_kinds[i].name) return switches[i];
        return nullptr;
    }
};

namespace pii {

// ---- e-mail: called at an @ ------------------------------------------------------------------------------------------------
inline bool find_email(const Text& t, size_t at, Found& found) {
    const auto local = [](char c) { return is_word(c) ? !(c & 0x80) : c && strchr(".!#$%&'*+/=?^`{|}~-", c); };
    size_t begin = at;
    while (begin > 0 && at - begin < 64 && local(t[begin - 1])) begin--;
    while (begin < at && strchr(".'/=`{|?&*#$-", t[begin])) begin++;  // text before it: mailto=x@y.z, 'x@y.z'
    if (begin == at || t[at - 1] == '.') return false;
    size_t end = at + 1, label = end, top = 0;
    int labels = 0;
    for (;; end++) {
        const char c = t[end];
        if (is_ascii_letter(c) || is_digit_character(c) || (c == '-' && end > label)) continue;
        if (end > label) {
            labels++;
            top = label;
        }
        if (c != '.' || end == label || !(is_ascii_letter(t[end + 1]) || is_digit_character(t[end + 1]))) break;
        label = end + 1;
    }
    if (labels < 2 || end - top < 2 || end == label) return false;
    std::string top_level;
    for (size_t i = top; i < end; i++) {
        if (!is_ascii_letter(t[i])) return false;
        top_level += (char)(t[i] | 32);
    }
    for (const char* ending : {"png", "jpg", "jpeg", "gif", "svg", "webp"})
        if (top_level == ending) return false;
    found = {"email", begin, end};
    return true;
}

// ---- IP addresses ----------------------------------------------------------------------------------------------------------
// True if the address is public on the Internet (RFC 6890).
inline bool is_public(const std::array<int, 4>& a) {
    return !(a[0] == 0 || a[0] == 10 || a[0] == 127 || a[0] >= 224 || (a[0] == 100 && a[1] >= 64 && a[1] < 128) ||
             (a[0] == 169 && a[1] == 254) || (a[0] == 172 && a[1] >= 16 && a[1] < 32) ||
             (a[0] == 192 && (a[1] == 168 || (a[1] == 0 && (a[2] == 0 || a[2] == 2)))) ||
             (a[0] == 198 && (a[1] == 18 || a[1] == 19 || (a[1] == 51 && a[2] == 100))) ||
             (a[0] == 203 && a[1] == 0 && a[2] == 113));
}
inline bool is_public(const unsigned char (&a)[16]) {
    static const unsigned char none[15] = {};
    const bool global = (a[0] & 0xe0) == 0x20;  // 2000::/3
    const bool documentation = a[0] == 0x20 && a[1] == 1 && a[2] == 0xd && a[3] == 0xb8;
    return global && !documentation && memcmp(a, none, 15) != 0;
}

// Four single digits that are an address: a known one, or one by its context.
inline bool is_address_of_single_digits(const Text& t, size_t begin, size_t end, const std::array<int, 4>& a) {
    static constexpr std::array<int, 4> resolvers[] = {{8, 8, 8, 8}, {8, 8, 4, 4}, {1, 1, 1, 1}, {1, 0, 0, 1}, {9, 9, 9, 9},
                                                       {4, 2, 2, 1}, {4, 2, 2, 2}, {4, 2, 2, 3}, {4, 2, 2, 4}};
    for (const auto& resolver : resolvers)
        if (a == resolver) return true;
    const bool port = t[end] == ':' && is_digit_character(t[end + 1]), prefix = t[end] == '/' && is_digit_character(t[end + 1]);
    const bool url = begin >= 2 && t[begin - 1] == '/' && t[begin - 2] == '/';
    return port || prefix || url || t.has_before(begin, {"ip",         "ips",  "ipv4",   "address", "addr",   "host",  "server",
                                                         "nameserver", "dns",  "ping",   "gateway", "router", "ssh",   "telnet",
                                                         "traceroute", "inet", "subnet", "client",  "peer",   "remote"});
}

// Called at the first digit of a run of digits.
inline bool find_ip4(const Text& t, size_t begin, bool private_too, Found& found) {
    if (t.is_word_before(begin) || (begin > 0 && (t[begin - 1] == '.' || t[begin - 1] == '-'))) return false;
    std::array<int, 4> a{};
    size_t at = begin;
    bool single = true;
    for (size_t k = 0; k < 4; k++) {
        if (k > 0 && t[at++] != '.') return false;
        const size_t first = at;
        while (is_digit_character(t[at]) && at - first < 4) a[k] = 10 * a[k] + t[at++] - '0';
        if (at == first || a[k] > 255 || (t[first] == '0' && at - first > 1)) return false;
        single &= at - first == 1;
    }
    if (is_word(t[at]) || (t[at] == '.' && is_digit_character(t[at + 1]))) return false;
    if (single && !is_address_of_single_digits(t, begin, at, a)) return false;
    const std::string before = t.word_before(begin);
    for (const char* word : {"v", "version", "ver", "release", "revision", "section", "build", "firmware"})
        if (before == word) return false;
    if (!private_too && !is_public(a)) return false;
    found = {"ip", begin, at};
    return true;
}
// Called at a colon.
inline bool find_ip6(const Text& t, size_t colon, size_t least, bool private_too, Found& found) {
    const auto part = [](char c) { return is_digit_character(c) || ((c | 32) >= 'a' && (c | 32) <= 'f') || c == ':'; };
    size_t begin = colon, end = colon;
    while (begin > least && colon - begin < 45 && part(t[begin - 1])) begin--;
    while (end - begin < 46 && part(t[end])) end++;
    if (t.is_word_before(begin) || is_word(t[end])) return false;
    while (end > begin && t[end - 1] == ':' && !(end - begin >= 2 && t[end - 2] == ':')) end--;  // "see 2001:db8::1:"
    const std::string text(t.s.substr(begin, end - begin));
    int groups = 0;
    bool digit = false;
    for (size_t i = 0; i < text.size(); i++) {
        groups += text[i] != ':' && (i == 0 || text[i - 1] == ':');
        digit |= is_digit_character(text[i]);
    }
    unsigned char address[16];
    if (groups < 3 || !digit || inet_pton(AF_INET6, text.c_str(), address) != 1) return false;
    if (!private_too && !is_public(address)) return false;
    found = {"ip", begin, end};
    return true;
}

// ---- numbers in groups -----------------------------------------------------------------------------------------------------
// Digits with single separators: "4111 1111-1111 1111", "(555) 010-9999".
struct Number {
    size_t begin, end;
    std::string digits;
    std::vector<int> groups;   // their lengths
    std::vector<size_t> ends;  // and ends
    std::string separators;    // between them, one each; ')' for ") "
};
// The longest such number from `begin` on, of at most 19 digits.
inline Number read_number(const Text& t, size_t begin) {
    Number n = {begin, begin, {}, {}, {}, {}};
    size_t at = begin;
    bool open = false;
    if (t[at] == '(') {
        open = true;
        at++;
    }
    while (is_digit_character(t[at])) {
        const size_t first = at;
        while (is_digit_character(t[at])) n.digits += t[at++];
        n.groups.push_back((int)(at - first));
        n.ends.push_back(at);
        n.end = at;
        const char separator = t[at];
        size_t next = at + 1;
        if (separator == ')' && open) {
            open = false;
            if (t[next] == ' ' || t[next] == '-') next++;
        } else if (!separator || !strchr(" -.", separator)) break;
        if (t[next] == '(' && separator == ' ' && !open) {  // +44 (20) 7946
            open = true;
            next++;
        }
        if (!is_digit_character(t[next]) || n.digits.size() > 19) break;
        n.separators += separator;
        at = next;
    }
    return n;
}

// Issuers' first digits and lengths.
inline bool is_card(const std::string& d) {
    struct Issuer {
        int digits, low, high, shortest, longest;  // first `digits` digits from low to high
    };
    static constexpr Issuer issuers[] = {
        {1, 4, 4, 13, 19},     {2, 51, 55, 16, 16},     {4, 2221, 2720, 16, 16}, {2, 34, 34, 15, 15},
        {2, 37, 37, 15, 15},   {4, 6011, 6011, 16, 19}, {3, 644, 659, 16, 19},   {4, 3528, 3589, 16, 19},
        {3, 300, 305, 14, 19}, {2, 36, 36, 14, 19},     {2, 38, 39, 14, 19},     {2, 62, 62, 16, 19},
    };
    for (const Issuer& issuer : issuers) {
        const int first = atoi(d.substr(0, (size_t)issuer.digits).c_str()), n = (int)d.size();
        if (first >= issuer.low && first <= issuer.high && n >= issuer.shortest && n <= issuer.longest)
            return !(d[0] == '4' && n != 13 && n != 16 && n != 19) && has_luhn_checksum(d);
    }
    return false;
}
inline bool same_separators(const Number& n) {
    return n.separators.find_first_not_of(n.separators.substr(0, 1)) == std::string::npos;
}

inline bool is_phone(const Number& n, bool plus) {
    const size_t digits = n.digits.size();
    const auto& g = n.groups;
    if (plus) return digits >= 8 && digits <= 15 && n.digits[0] != '0';
    // 1-555-010-9999, (555) 010-9999, 555.010.9999: neither area nor exchange starts with 0 or 1
    const size_t country = g.size() == 4 && g[0] == 1 && n.digits[0] == '1';
    if (g.size() == 3 + country && g[country] == 3 && g[country + 1] == 3 && g[country + 2] == 4) {
        const bool bracket = n.separators[country] == ')';
        const bool alike = n.separators[country] == n.separators[country + 1];
        return (bracket || alike) && n.digits[country] >= '2' && n.digits[country + 3] >= '2';
    }
    // 03-1234-5678, 020 7946 0958, (0123) 456789, 01 23 45 67 89
    if (n.digits[0] != '0' || digits < 10 || digits > 11 || g.size() < 2) return false;
    const bool pairs = g == std::vector<int>{2, 2, 2, 2, 2};
    const bool bracket = n.separators[0] == ')';
    if (pairs) return same_separators(n);
    if (g.size() > 4 || g[0] < 2 || g[0] > 5) return false;
    for (size_t i = 1; i < g.size(); i++)
        if (g[i] < 3) return false;
    return bracket || same_separators(n);
}

}  // namespace pii

// Card and phone numbers: called at a digit, a + or a bracket. Returns the end of a number that is neither, or 0.
namespace pii {
inline size_t find_number(const Text& t, size_t i, const PiiOptions& o, Found& found) {
    const char c = t[i];
    const bool digit = is_digit_character(c), plus = c == '+';
    const size_t begin = i + plus;
    const char before = i > 0 ? t[i - 1] : ' ';
    const bool decimal =
        (before == '.' || before == ',' || before == '-' || before == '/') && i > 1 && is_digit_character(t[i - 2]);
    const Number n = read_number(t, begin);
    const std::string word = t.word_before(i);
    if (c == '(' && n.separators.find(')') == std::string::npos) return 0;  // the bracket is around more than the number
    const bool book = word == "isbn" || word == "issn" || word == "doi";
    const auto bounded = [&](size_t end) {
        return !is_word(t[end]) && !(strchr(".,-/", t[end]) && t[end] && is_digit_character(t[end + 1]));
    };
    if (!n.groups.empty() && !decimal && !book) {
        // A card may be followed by other digits: 4111 1111 1111 1111 123.
        size_t digits = n.digits.size();
        for (size_t k = n.groups.size(); o.card && !plus && c != '(' && k-- > 0; digits -= (size_t)n.groups[k])
            if (digits >= 13 && bounded(n.ends[k]) && is_card(n.digits.substr(0, digits))) {
                found = {"card", i, n.ends[k]};
                break;
            }
        if (!found.kind && o.phone && bounded(n.end) && is_phone(n, plus)) found = {"phone", i, n.end};
    }
    // Nothing in the middle of a number is one.
    if (found.kind || n.end <= i + 1 || !digit) return 0;
    size_t end = i;
    while (is_digit_character(t[end])) end++;
    return end;
}
}  // namespace pii

// Finds and masks. Returns the places by kind, in the text's order.
inline std::vector<pii::Found> find_pii(std::string_view text, const PiiOptions& o) {
    using namespace pii;
    const Text t = {text};
    std::vector<Found> all;
    size_t done = 0;  // end of the last match
    static const auto interesting = [] {
        std::array<bool, 256> is{};
        for (const char c : {'@', ':', '=', '+', '(', '-'}) is[(unsigned char)c] = true;
        for (char c = '0'; c <= '9'; c++) is[(unsigned char)c] = true;
        return is;
    }();
    for (size_t i = 0; i < text.size();) {
        const char c = text[i];
        const bool letter = is_ascii_letter(c);
        if (!letter && !interesting[(unsigned char)c]) {
            i++;
            continue;
        }
        const bool inside = t.is_word_before(i);
        Found found = {nullptr, 0, 0};
        size_t skip = i + 1;
        if (letter && inside) {
        } else if (letter) {
            if (o.iban && find_iban(t, i, found)) {
            } else if (o.id && is_upper(c) && find_id(t, i, found)) {
            } else if (o.key) find_key(t, i, found);
            if (!found.kind) {  // to the end of the word
                while (is_word(t[skip])) skip++;
                if (o.email) find_spelled_email(t, skip, done, found);
            }
        } else if (c == '@') {
            if (o.email && find_email(t, i, found) && found.begin < done) found.kind = nullptr;
            if (!found.kind && o.user) find_user(t, i, found);
        } else if (c == ':' || c == '=') {
            if (c == ':' && o.ip) find_ip6(t, i, done, o.private_addresses, found);
            if (!found.kind && o.key) find_assigned_key(t, i, found);
        } else if (c == '-') {
            if (o.key && text[i + 1 < text.size() ? i + 1 : i] == '-') find_private_key(t, i, found);
        } else if (const bool digit = is_digit_character(c); digit && o.ip && find_ip4(t, i, o.private_addresses, found)) {
        } else if (!inside && !(o.id && digit && find_id(t, i, found))) {
            if (const size_t end = find_number(t, i, o, found)) skip = end;
            if (digit && !found.kind && o.email && !is_word(t[skip])) find_spelled_email(t, skip, done, found);
        }
        if (!found.kind) {
            i = skip;
            continue;
        }
        all.push_back(found);
        i = done = found.end;
    }
    return all;
}

class Pii {
public:
    explicit Pii(const PiiOptions& o) : o_(o) {}

    DocumentVerdict apply(Document& d, Changes& changes) const {
        const std::vector<pii::Found> found = find_pii(d.text, o_);
        if (found.empty()) return {};
        if (o_.drop) return {false, std::string("pii-") + found[0].kind, std::to_string(found.size()) + " places"};
        std::string out;
        size_t done = 0;
        for (const pii::Found& f : found)
            for (const PiiKind& kind : pii_kinds)
                if (strcmp(kind.name, f.kind) == 0) {
                    out.append(d.text, done, f.begin - done);
                    out += kind.placeholder;
                    done = f.end;
                    changes.push_back({kind.rule, 1});
                }
        out.append(d.text, done, std::string::npos);
        d.text = std::move(out);
        return {};
    }

private:
    PiiOptions o_;
};
