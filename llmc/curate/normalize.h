// Restores text as it was meant, by removing the traces of encodings, files and screens. In this order:
//   invalid-utf8         bytes that are not UTF-8 are read as Windows-1252, the most likely encoding
//   encoding-repair      mojibake: UTF-8 that was read as Windows-1252 or Latin-1 ("cafÃ©"), once or several times
//   control-characters   C0, C1, DEL, byte-order marks, noncharacters and terminal colors (ESC [ ... m) are removed
//   line-ends            CR LF, CR, NEL, U+2028 and U+2029 become newlines; blanks before a newline are removed
//   blank-lines          several blank lines become one; none at the text's start and end
//   nfc                  Unicode's normal form C (UAX 15): é is one character, not e and an accent
//
// Encoding repair. The idea is ftfy's (Speer 2019): text that looks like mojibake is converted back to its bytes, and read as
// UTF-8 again. A place is a run of characters whose Windows-1252 bytes are whole UTF-8 sequences. Such runs occur in correct
// text too ("Spaß“", "perché»…"), so a run must be bad enough:
//   strong   two sequences or more; or one that starts with â (the quotes and dashes of â€™ â€“), of four bytes (ðŸ˜€), or
//            with Ã or Â, unless correct text may have it: after a capital letter (AMANHÃ”), or before a closing quote, dash or
//            ellipsis
//   weak     any other; repaired only if the same document has a strong one that starts with the same letter
// Repair is repeated while it finds something, at most four times, for as many consecutive wrong readings.
#pragma once
#include <array>
#include <cstdint>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "../base/unicode.h"
#include "document.h"

namespace normalizing {

// The characters of Windows-1252 for the bytes 0x80 to 0x9f; its five undefined ones are Latin-1's.
inline constexpr std::array<int32_t, 32> windows_1252 = {
    0x20ac, 0x81,   0x201a, 0x192,  0x201e, 0x2026, 0x2020, 0x2021, 0x2c6, 0x2030, 0x160, 0x2039, 0x152, 0x8d, 0x17d, 0x8f,
    0x90,   0x2018, 0x2019, 0x201c, 0x201d, 0x2022, 0x2013, 0x2014, 0x2dc, 0x2122, 0x161, 0x203a, 0x153, 0x9d, 0x17e, 0x178};

// The byte that was misread as this character; -1: none above ASCII.
inline int byte_of(int32_t c) {
    if (c < 0x80) return -1;
    if (c < 0x100) return c;
    if (c < 0x152 || c > 0x2122) return -1;
    for (int i = 0; i < 32; i++)
        if (windows_1252[(size_t)i] == c) return 0x80 + i;
    return -1;
}

inline bool is_ascii(std::string_view text) {
    unsigned char all = 0;
    for (const char c : text) all |= (unsigned char)c;
    return all < 0x80;
}

// Converts bytes that are not UTF-8 to characters. Returns their number.
inline int64_t repair_bytes(std::string& text) {
    std::string out;
    int64_t repaired = 0;
    each_valid_part(text, [&](std::string_view part, bool valid) {
        if (valid && part.size() == text.size()) return;
        if (valid) out += part;
        else
            for (const unsigned char byte : part)
                out += utf8(byte < 0xa0 ? (uint32_t)windows_1252[(size_t)(byte - 0x80)] : byte);
        repaired += valid ? 0 : (int64_t)part.size();
    });
    if (repaired > 0) text = std::move(out);
    return repaired;
}

// A run of mojibake: its bytes in the text, and the original.
struct Run {
    size_t begin, end;
    std::string meant;
    int sequences = 0;
    int32_t lead = 0;  // the first character
    bool strong = false;
};

// The sequence of UTF-8 whose bytes were misread as the characters at `at`. Returns its end in the text, or `at` if there is
// none.
inline size_t misread_sequence(std::string_view text, size_t at, std::string& bytes) {
    const size_t begin = bytes.size();
    size_t end = at;
    for (size_t wanted = 4; end < text.size() && bytes.size() < begin + wanted;) {
        const Utf8Character c = first_character(text.substr(end));
        const int byte = byte_of(c.code);
        if (byte < 0) break;
        if (bytes.size() == begin) wanted = byte >= 0xf0 ? 4 : byte >= 0xe0 ? 3 : 2;
        bytes += (char)byte;
        end += c.length;
    }
    const size_t n = bytes.size() - begin;
    if (n >= 2 && valid_utf8_length((const unsigned char*)bytes.data() + begin, n) == n) return end;
    bytes.resize(begin);
    return at;
}

inline std::vector<Run> misread_runs(std::string_view text) {
    std::vector<Run> runs;
    for (size_t at = 0; at < text.size();) {
        if ((unsigned char)text[at] != 0xc3) {  // common first byte of all of Â to ô, the lead bytes of sequences
            at++;
            continue;
        }
        Run run = {at, at, {}, 0, 0, false};
        run.lead = first_character(text.substr(at)).code;
        for (size_t next; (next = misread_sequence(text, run.end, run.meant)) > run.end; run.end = next) run.sequences++;
        if (run.sequences == 0) {
            at += first_character(text.substr(at)).length;
            continue;
        }
        const auto second = (unsigned char)run.meant[1];
        const char before = at > 0 ? text[at - 1] : ' ';
        const bool closing = second == 0x85 || (second >= 0x91 && second <= 0x97) || second == 0x9b || second == 0xbb;
        const bool sign = run.lead == 0xc2 ? !closing && second >= 0xa0
                          : run.lead == 0xc3
                              ? (before >= 'a' && before <= 'z') || (!closing && !(before >= 'A' && before <= 'Z'))
                          : run.lead == 0xe2 ? second < 0xa0
                                             : run.meant.size() >= 4;
        run.strong = run.sequences >= 2 || sign;
        at = run.end;
        runs.push_back(std::move(run));
    }
    return runs;
}

// Repairs mojibake once. Returns the number of places.
inline int64_t repair_encoding(std::string& text) {
    std::vector<Run> runs = misread_runs(text);
    std::set<int32_t> leads;
    for (const Run& run : runs)
        if (run.strong) leads.insert(run.lead);
    if (leads.empty()) return 0;
    std::string out;
    int64_t repaired = 0;
    size_t done = 0;
    for (const Run& run : runs) {
        if (!run.strong && leads.count(run.lead) == 0) continue;
        out.append(text, done, run.begin - done);
        out += run.meant;
        done = run.end;
        repaired++;
    }
    out.append(text, done, std::string::npos);
    text = std::move(out);
    return repaired;
}

struct LineCounts {
    int64_t controls = 0, ends = 0, blanks = 0;
};
// Control characters, line ends, blanks before them, and runs of blank lines, in one pass.
inline LineCounts clean_lines(std::string& text) {
    LineCounts n;
    std::string out;
    out.reserve(text.size());
    int64_t newlines = 0;  // at the end of out
    const auto newline = [&](bool other) {
        n.ends += other;
        while (!out.empty() && (out.back() == ' ' || out.back() == '\t')) {
            out.pop_back();
            n.ends++;
        }
        if (out.empty() || newlines >= 2) n.blanks++;
        else {
            out += '\n';
            newlines++;
        }
    };
    for (size_t i = 0; i < text.size();) {
        const auto c = (unsigned char)text[i];
        if (c >= 0x20 && c < 0x7f) {
            // plain stretches are copied as a whole
            size_t end = i + 1;
            while (end < text.size() && (unsigned char)text[end] >= 0x20 && (unsigned char)text[end] < 0x7f) end++;
            const bool blank = text.find_first_not_of(' ', i) >= end;
            out.append(text, i, end - i);
            if (!blank) newlines = 0;
            i = end;
            continue;
        }
        if (c < 0x80) {
            i++;
            if (c == '\n') newline(false);
            else if (c == '\t') out += '\t';
            else if (c == '\r') {
                i += i < text.size() && text[i] == '\n';
                newline(true);
            } else {
                n.controls++;
                if (c != 0x1b || i >= text.size() || text[i] != '[') continue;
                size_t end = i + 1;  // ESC [ 1;31m
                while (end < text.size() && (isdigit((unsigned char)text[end]) || text[end] == ';')) end++;
                if (end < text.size() && text[end] == 'm') i = end + 1;
            }
            continue;
        }
        const Utf8Character at = first_character(std::string_view(text).substr(i));
        const int32_t code = at.code;
        if (code == 0x85 || code == 0x2028 || code == 0x2029) newline(true);
        else if (code < 0xa0 || code == 0xfeff || (code >= 0xfff9 && code <= 0xfffb) || (code & 0xfffe) == 0xfffe ||
                 (code >= 0xfdd0 && code <= 0xfdef))
            n.controls++;
        else {
            out.append(text, i, at.length);
            newlines = 0;
        }
        i += at.length;
    }
    while (!out.empty() && strchr(" \t\n", out.back())) {
        n.blanks += out.back() == '\n';
        out.pop_back();
    }
    text = std::move(out);
    return n;
}

// Characters below U+0300, and characters of the large scripts that neither decompose nor compose: a text of only these is in
// NFC.
inline bool is_surely_nfc(std::string_view text) {
    for (size_t i = 0; i < text.size();) {
        if ((unsigned char)text[i] < 0xcc) {
            i++;
            continue;
        }
        const Utf8Character at = first_character(text.substr(i));
        const int32_t c = at.code;
        const bool stays = (c >= 0x38e && c <= 0x482) || (c >= 0x48a && c <= 0x590) || (c >= 0x5d0 && c <= 0x5ea) ||
                           (c >= 0x2010 && c <= 0x2027) || (c >= 0x3001 && c <= 0x3029) || (c >= 0x3041 && c <= 0x3096) ||
                           (c >= 0x309d && c <= 0x30ff) || (c >= 0x3400 && c <= 0x9fff) || (c >= 0xac00 && c <= 0xd7a3) ||
                           (c >= 0xff01 && c <= 0xff9d) || (c >= 0x1f300 && c <= 0x1faff);
        if (!stays) return false;
        i += at.length;
    }
    return true;
}

}  // namespace normalizing

// The stage: changes the text and reports the number of changes by each rule. Drops a document that becomes empty.
inline DocumentVerdict normalize(Document& d, Changes& changes) {
    using namespace normalizing;
    const auto note = [&](const char* rule, int64_t times) {
        if (times > 0) changes.push_back({rule, times});
    };
    const bool ascii = is_ascii(d.text);
    if (!ascii) {
        note("invalid-utf8", repair_bytes(d.text));
        int64_t repaired = 0;
        for (int round = 0; round < 4; round++) {
            const int64_t now = repair_encoding(d.text);
            if (now == 0) break;
            repaired += now;
        }
        note("encoding-repair", repaired);
    }
    const LineCounts lines = clean_lines(d.text);
    note("control-characters", lines.controls);
    note("line-ends", lines.ends);
    note("blank-lines", lines.blanks);
    if (!ascii && !is_surely_nfc(d.text)) {
        std::string normal = normalize_unicode(d.text, NormalForm::nfc);
        if (normal != d.text) {
            note("nfc", 1);
            d.text = std::move(normal);
        }
    }
    if (d.text.empty()) return {false, "empty", "nothing but blanks and control characters"};
    return {};
}
