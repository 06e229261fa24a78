// Extracts the text of a web page.
//   to_utf8              by the charset from a byte order mark, HTTP or the page's <meta>, through iconv
//   page_paragraphs      libgumbo parses the page as HTML5; the text of block elements becomes paragraphs, with the share
//                        of each inside links; script, style, navigation, forms and hidden elements are dropped
//   without_boilerplate  jusText (Pomikalek, "Removing Boilerplate and Duplicate Content from Web Corpora", Masaryk University,
//                        2011, chapter 3) in its mode without lists of stop words: short paragraphs and those full of links are
//                        bad, long ones good; those between are classified like their neighbors. If none is good, the longest
//                        run of nearly good ones is kept: pages of news have paragraphs of a sentence each
// A page cannot take more than its share of memory and time, however its tags are nested.
#pragma once
#include <algorithm>
#include <cctype>
#include <csetjmp>
#include <cstdint>
#include <ctime>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "../base/text.h"
#include "../base/utf8.h"
#include "encoding.h"

#if !defined(NO_OPTIONAL_LIBRARIES) && __has_include(<gumbo.h>)
#include <gumbo.h>
#define HAVE_GUMBO 1
#endif

namespace html {

// ---- characters -------------------------------------------------------------------------------------------------------------
// The name after "charset=" in HTTP's Content-Type or a <meta>; "" if there is none.
inline std::string charset_in(std::string_view text) {
    const std::string all = lower_ascii(text);
    size_t at = all.find("charset");
    if (at == std::string::npos) return "";
    at = all.find_first_not_of(" \t", at + 7);
    if (at == std::string::npos || all[at] != '=') return "";
    at = all.find_first_not_of(" \t\"'", at + 1);
    if (at == std::string::npos) return "";
    return all.substr(at, std::min<size_t>(40, all.find_first_of(" \t\"';/>\r\n", at) - at));
}

// The page in UTF-8. `from_http` is the charset from HTTP, or "". Bytes outside the charset become U+FFFD.
inline std::string to_utf8(std::string_view page, const std::string& from_http) {
    std::string charset = from_http;
    if (begins_with(page, byte_order_mark)) {
        page = without_byte_order_mark(page);
        charset = "utf-8";
    } else if (page.substr(0, 2) == "\xff\xfe" || page.substr(0, 2) == "\xfe\xff") charset = "utf-16";
    if (charset.empty()) {
        const std::string_view head = page.substr(0, 4096);
        for (size_t at = head.find('<'); at != std::string_view::npos && charset.empty(); at = head.find('<', at + 1))
            if (lower_ascii(head.substr(at, 5)) == "<meta") charset = charset_in(head.substr(at, head.find('>', at) - at));
    }
    if ((charset.empty() || charset == "utf-8" || charset == "utf8") && is_utf8(page)) return std::string(page);
    // As in browsers: Latin-1, or no charset, means Windows-1252.
    if (charset.empty() || charset == "iso-8859-1" || charset == "latin1" || charset == "us-ascii") charset = "windows-1252";
    if (charset == "shift_jis" || charset == "x-sjis") charset = "cp932";
    if (charset == "gb2312" || charset == "gbk") charset = "gb18030";
    std::optional<EncodingConverter> convert(std::in_place, charset);
    if (!convert->known()) convert.emplace(is_utf8(page) ? "UTF-8" : "WINDOWS-1252");
    if (!convert->known()) return std::string(page);
    std::string text, part(1 << 16, '\0');
    int64_t bad = 0;
    while (!page.empty()) {
        const auto [taken, made] = convert->convert(page, part.data(), part.size(), false, bad);
        text.append(part, 0, made);
        page.remove_prefix(taken);
        if (taken + made > 0) continue;
        text += replacement_character;  // a truncated character at the end
        break;
    }
    return text;
}

// ---- paragraphs -------------------------------------------------------------------------------------------------------------
struct Paragraph {
    std::string text;
    size_t width = 0, in_links = 0;  // in letters of English that say as much
    bool heading = false;
};

// How many letters of English say as much as a character. In translations, one of Chinese is about three, one of Japanese or
// Korean two; in the scripts of South and South-East Asia, marks are letters.
inline size_t letters_of(uint32_t c) {
    const bool han = (c >= 0x3400 && c <= 0x9fff) || (c >= 0xf900 && c <= 0xfaff) || (c >= 0x20000 && c <= 0x3ffff);
    if (han) return 3;
    const bool marks_are_letters = (c >= 0x900 && c <= 0xeff) || (c >= 0x1000 && c <= 0x109f) || (c >= 0x1780 && c <= 0x17ff);
    return marks_are_letters ? 1 : (size_t)columns_of(c);
}

// Collects characters, merging white space into one space.
class ParagraphMaker {
public:
    void add(std::string_view text, bool in_link) {
        const std::string s(text);
        for (size_t i = 0; i < s.size();) {
            const size_t start = i;
            const uint32_t c = next_codepoint(s, i);
            if (c == ' ' || (c >= 9 && c <= 13) || c == 0xa0 || c == 0x3000 || c == 0x200b) {
                space_ = true;
                continue;
            }
            if (space_ && !now_.text.empty()) count(" ", 1, in_link);
            space_ = false;
            count(std::string_view(s).substr(start, i - start), letters_of(c), in_link);
        }
    }
    void space() { space_ = true; }
    void end(bool heading) {
        if (!now_.text.empty()) {
            now_.heading = heading;
            all.push_back(std::move(now_));
        }
        now_ = {};
        space_ = false;
    }
    std::vector<Paragraph> all;

private:
    void count(std::string_view bytes, size_t width, bool in_link) {
        now_.text += bytes;
        now_.width += width;
        if (in_link) now_.in_links += width;
    }
    Paragraph now_;
    bool space_ = false;
};

#ifdef HAVE_GUMBO
// The CPU time of this thread, in seconds.
inline double thread_seconds() {
    timespec now{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

// All memory of one parse, freed at once: gumbo's own way to free is recursive, and a page may be nested a million deep. The
// arena also bounds the time: some steps of the parse search all open elements, so that a page made for it takes hours. Real
// pages take a fifteenth of `seconds` of CPU time; the clock of the thread does not run while others have the core.
class Arena {
public:
    Arena(size_t limit, double seconds) : limit_(limit), deadline_(thread_seconds() + seconds) {}
    std::jmp_buf full;  // jump target when the page exceeds its memory limit

    static void* allocate(void* arena, size_t bytes) { return ((Arena*)arena)->take(bytes); }
    static void free(void*, void*) {}

private:
    static constexpr size_t block_bytes = 1 << 20;
    void* take(size_t bytes) {
        if (++n_taken_ % 256 == 0 && thread_seconds() > deadline_) std::longjmp(full, 1);
        bytes = (bytes + 15) / 16 * 16;
        if (bytes > left_) {
            const size_t block = std::max(bytes, block_bytes);
            if (block > limit_) std::longjmp(full, 1);
            limit_ -= block;
            blocks_.push_back(std::make_unique<char[]>(block));
            at_ = blocks_.back().get();
            left_ = block;
        }
        char* p = at_;
        at_ += bytes;
        left_ -= bytes;
        return p;
    }
    size_t limit_, left_ = 0, n_taken_ = 0;
    double deadline_;
    char* at_ = nullptr;
    std::vector<std::unique_ptr<char[]>> blocks_;
};

inline bool is_dropped(const GumboElement& e) {
    switch (e.tag) {
        case GUMBO_TAG_HEAD:
        case GUMBO_TAG_SCRIPT:
        case GUMBO_TAG_STYLE:
        case GUMBO_TAG_NOSCRIPT:
        case GUMBO_TAG_TEMPLATE:
        case GUMBO_TAG_NAV:
        case GUMBO_TAG_IFRAME:
        case GUMBO_TAG_OBJECT:
        case GUMBO_TAG_SVG:
        case GUMBO_TAG_MATH:
        case GUMBO_TAG_CANVAS:
        case GUMBO_TAG_BUTTON:
        case GUMBO_TAG_SELECT:
        case GUMBO_TAG_TEXTAREA:
        case GUMBO_TAG_VIDEO:
        case GUMBO_TAG_AUDIO: return true;
        default: return gumbo_get_attribute(&e.attributes, "hidden") != nullptr;
    }
}
inline bool is_heading(GumboTag tag) {
    return tag == GUMBO_TAG_H1 || tag == GUMBO_TAG_H2 || tag == GUMBO_TAG_H3 || tag == GUMBO_TAG_H4 || tag == GUMBO_TAG_H5 ||
           tag == GUMBO_TAG_H6;
}
// Elements within a line of text; all others start a paragraph.
inline bool is_inline(GumboTag tag) {
    static constexpr GumboTag tags[] = {
        GUMBO_TAG_A,      GUMBO_TAG_ABBR, GUMBO_TAG_B,   GUMBO_TAG_BDI,  GUMBO_TAG_BDO,   GUMBO_TAG_BIG,  GUMBO_TAG_CITE,
        GUMBO_TAG_CODE,   GUMBO_TAG_DATA, GUMBO_TAG_DEL, GUMBO_TAG_DFN,  GUMBO_TAG_EM,    GUMBO_TAG_FONT, GUMBO_TAG_I,
        GUMBO_TAG_IMG,    GUMBO_TAG_INS,  GUMBO_TAG_KBD, GUMBO_TAG_MARK, GUMBO_TAG_Q,     GUMBO_TAG_RB,   GUMBO_TAG_RT,
        GUMBO_TAG_RP,     GUMBO_TAG_RUBY, GUMBO_TAG_S,   GUMBO_TAG_SAMP, GUMBO_TAG_SMALL, GUMBO_TAG_SPAN, GUMBO_TAG_STRIKE,
        GUMBO_TAG_STRONG, GUMBO_TAG_SUB,  GUMBO_TAG_SUP, GUMBO_TAG_TIME, GUMBO_TAG_TT,    GUMBO_TAG_U,    GUMBO_TAG_VAR,
        GUMBO_TAG_WBR,    GUMBO_TAG_LABEL};
    return std::find(std::begin(tags), std::end(tags), tag) != std::end(tags);
}

// Walks the tree without recursion.
inline std::vector<Paragraph> paragraphs_of(const GumboNode* root) {
    struct OpenNode {
        const GumboNode* node;
        unsigned child = 0;
    };
    ParagraphMaker out;
    std::vector<OpenNode> path;
    int links = 0, headings = 0, breaks = 0;
    const auto is_block = [](const GumboNode* n) { return n->type == GUMBO_NODE_ELEMENT && !is_inline(n->v.element.tag); };
    const auto enter = [&](const GumboNode* n) {
        if (n->type == GUMBO_NODE_TEXT || n->type == GUMBO_NODE_CDATA) {
            breaks = 0;
            out.add(n->v.text.text, links > 0);
        } else if (n->type == GUMBO_NODE_WHITESPACE) out.space();
        if (n->type != GUMBO_NODE_ELEMENT || is_dropped(n->v.element)) return;
        const GumboTag tag = n->v.element.tag;
        if (tag == GUMBO_TAG_BR) {  // two of them end a paragraph
            if (++breaks >= 2) out.end(headings > 0);
            out.space();
            return;
        }
        if (is_block(n)) out.end(headings > 0);
        links += tag == GUMBO_TAG_A;
        headings += is_heading(tag);
        path.push_back({n});
    };
    enter(root);
    while (!path.empty()) {
        OpenNode& place = path.back();
        const GumboNode* n = place.node;
        if (place.child < n->v.element.children.length) {
            enter((const GumboNode*)n->v.element.children.data[place.child++]);
            continue;
        }
        if (is_block(n)) out.end(headings > 0);
        links -= n->v.element.tag == GUMBO_TAG_A;
        headings -= is_heading(n->v.element.tag);
        path.pop_back();
    }
    out.end(false);
    return std::move(out.all);
}

// The maximum number of tags open at once, roughly: excludes tags without end tags, and end tags without a start.
inline int64_t open_tags(std::string_view page) {
    static constexpr std::string_view endless[] = {"area",   "base",  "br", "col",  "dd",    "dt",     "embed", "hr",
                                                   "img",    "input", "li", "link", "meta",  "option", "p",     "param",
                                                   "source", "td",    "th", "tr",   "track", "wbr",    "tbody"};
    std::unordered_map<std::string, int64_t> open_of;
    int64_t open = 0, most = 0;
    for (size_t at = page.find('<'); at != std::string_view::npos; at = page.find('<', at + 1)) {
        const bool end = at + 1 < page.size() && page[at + 1] == '/';
        size_t stop = at + 1 + end;
        while (stop < page.size() && stop < at + 12 && isalnum((unsigned char)page[stop])) stop++;
        const std::string name = lower_ascii(page.substr(at + 1 + end, stop - at - 1 - end));
        if (name.empty() || std::find(std::begin(endless), std::end(endless), name) != std::end(endless)) continue;
        int64_t& of_name = open_of[name];
        if (end && of_name == 0) continue;
        of_name += end ? -1 : 1;
        open += end ? -1 : 1;
        most = std::max(most, open);
    }
    return most;
}

// The most attributes in a tag, roughly. All <html> tags count as one, and all <body> tags: the parser merges them.
inline int64_t most_attributes(std::string_view page) {
    int64_t most = 0, merged = 0;
    for (size_t at = page.find('<'); at != std::string_view::npos; at = page.find('<', at)) {
        if (++at >= page.size() || !isalpha((unsigned char)page[at])) continue;
        const std::string name = lower_ascii(page.substr(at, 5));
        int64_t here = 0;
        bool after_equals = false;
        for (; at < page.size() && page[at] != '>'; at++) {
            const char c = page[at];
            if (after_equals && (c == '"' || c == '\'')) {
                at = std::min(page.find(c, at + 1), page.size() - 1);
                here++;
            }
            const bool space = isspace((unsigned char)c);
            here += space || c == '/';
            if (!space) after_equals = c == '=';
        }
        if (begins_with(name, "html") || begins_with(name, "body")) here = merged += here;
        most = std::max(most, here);
    }
    return most;
}

// False if the page is nested too deep, has a tag of too many attributes, or takes too much memory or time. The time of the
// parse grows with the depth, and with the square of the attributes.
inline bool page_paragraphs(const std::string& page, std::vector<Paragraph>& paragraphs) {
    if (open_tags(page) > 1000 || most_attributes(page) > 2000) return false;
    Arena arena(std::min<size_t>(512 << 20, (16 << 20) + 64 * page.size()), 0.5 + 0.5 * (double)page.size() / (1 << 20));
    GumboOptions options = kGumboDefaultOptions;
    options.allocator = Arena::allocate;
    options.deallocator = Arena::free;
    options.userdata = &arena;
    options.max_errors = 0;
    if (setjmp(arena.full) != 0) return false;
    const GumboOutput* output = gumbo_parse_with_options(&options, page.data(), page.size());
    paragraphs = paragraphs_of(output->root);
    return true;
}
#endif

// ---- boilerplate ------------------------------------------------------------------------------------------------------------
// jusText's defaults: link density 0.2, length 70 and 200, headings at most 200 before their text.
inline constexpr double most_in_links = 0.2;
inline constexpr size_t length_low = 70, length_high = 200, heading_distance = 200;

enum class Kind { bad, short_one, near_good, good };
inline bool ends_sentence(const std::string& text) {
    for (const std::string_view end : {".", "!", "?", "\"", "”", "»", "。", "！", "？", "」", "؟", "।", "…"})
        if (ends_with(text, end)) return true;
    return false;
}

// Makes the longest run of near-good paragraphs good, if it is longer than all good ones together: a page whose paragraphs are
// all short, or whose only long one is a notice. A run may hold short paragraphs and go over a single bad one. Where nothing is
// near good, short ones count that are sentences, not cells or items.
inline void keep_longest_run(const std::vector<Paragraph>& paragraphs, const std::vector<Kind>& alone,
                             std::vector<Kind>& kinds) {
    constexpr size_t least_of_short = 140, least_mean = 30;
    struct Run {
        size_t begin = 0, end = 0, width = 0, n = 0, near_good = 0;
    };
    Run best, now;
    size_t good = 0, bad_in_a_row = 0;
    const auto close = [&] {
        const bool takes =
            now.near_good > 0 || (best.near_good == 0 && now.width >= least_of_short && now.width >= least_mean * now.n);
        if (takes && (now.width > best.width || (now.near_good > 0 && best.near_good == 0))) best = now;
        now = {};
    };
    for (size_t i = 0; i < paragraphs.size(); i++) {
        if (kinds[i] == Kind::good) {
            good += paragraphs[i].width;
            close();
            continue;
        }
        if (alone[i] == Kind::bad) {
            if (++bad_in_a_row > 1) close();
            continue;
        }
        bad_in_a_row = 0;
        if (now.n == 0) now.begin = i;
        now.end = i + 1;
        now.n++;
        now.width += paragraphs[i].width;
        now.near_good += alone[i] != Kind::short_one;
    }
    close();
    if (best.width <= good || (good > 0 && best.near_good == 0)) return;
    // Short paragraphs at its ends are not part of it unless they are sentences, but a heading before it is.
    const auto is_edge = [&](size_t i) {
        return alone[i] == Kind::bad ||
               (alone[i] == Kind::short_one && (paragraphs[i].width < least_mean || !ends_sentence(paragraphs[i].text)));
    };
    if (best.near_good > 0) {
        while (is_edge(best.begin) && !paragraphs[best.begin].heading) best.begin++;
        while (is_edge(best.end - 1)) best.end--;
    }
    for (size_t i = best.begin; i < best.end; i++)
        if (alone[i] != Kind::bad) kinds[i] = Kind::good;
}

inline std::vector<Kind> classify(const std::vector<Paragraph>& paragraphs) {
    const size_t n = paragraphs.size();
    std::vector<Kind> alone(n), kinds;
    for (size_t i = 0; i < n; i++) {
        const Paragraph& p = paragraphs[i];
        const bool links = (double)p.in_links > most_in_links * (double)p.width;
        const bool copyright = p.text.find("\xc2\xa9") != std::string::npos;
        if (links || copyright) alone[i] = Kind::bad;
        else if (p.width < length_low) alone[i] = p.in_links > 0 ? Kind::bad : Kind::short_one;
        else alone[i] = p.width > length_high ? Kind::good : Kind::near_good;
    }
    // Headings within a short distance before good text: `from` becomes `to`.
    const auto headings = [&](Kind from, Kind to) {
        for (size_t i = 0; i < n; i++) {
            if (!paragraphs[i].heading || kinds[i] != from || alone[i] == Kind::bad) continue;
            size_t distance = 0;
            for (size_t k = i + 1; k < n && distance <= heading_distance;
                 distance += std::max<size_t>(1, paragraphs[k++].width))
                if (kinds[k] == Kind::good) {
                    kinds[i] = to;
                    break;
                }
        }
    };
    kinds = alone;
    headings(Kind::short_one, Kind::near_good);
    // For each paragraph the nearest good or bad (or near good) one on a side; beyond the ends everything is bad.
    const auto neighbors = [n](const std::vector<Kind>& all, bool to_the_left, bool near_good) {
        std::vector<Kind> next(n);
        Kind last = Kind::bad;
        for (size_t k = 0; k < n; k++) {
            const size_t i = to_the_left ? k : n - 1 - k;
            next[i] = last;
            if (all[i] == Kind::good || all[i] == Kind::bad || (near_good && all[i] == Kind::near_good)) last = all[i];
        }
        return next;
    };
    const std::vector<Kind> before = kinds;
    const std::vector<Kind> left = neighbors(before, true, false), right = neighbors(before, false, false);
    const std::vector<Kind> near_left = neighbors(before, true, true), near_right = neighbors(before, false, true);
    for (size_t i = 0; i < n; i++) {
        if (before[i] != Kind::short_one) continue;
        const bool near = (left[i] == Kind::bad && near_left[i] == Kind::near_good) ||
                          (right[i] == Kind::bad && near_right[i] == Kind::near_good);
        if (left[i] == right[i]) kinds[i] = left[i];
        else kinds[i] = near ? Kind::good : Kind::bad;
    }
    // In order: each decision affects the next ones.
    const std::vector<Kind> after = neighbors(kinds, false, false);
    Kind last = Kind::bad;
    for (size_t i = 0; i < n; i++) {
        if (kinds[i] == Kind::near_good) kinds[i] = last == Kind::bad && after[i] == Kind::bad ? Kind::bad : Kind::good;
        if (kinds[i] == Kind::good || kinds[i] == Kind::bad) last = kinds[i];
    }
    headings(Kind::bad, Kind::good);
    keep_longest_run(paragraphs, alone, kinds);
    return kinds;
}

// The good paragraphs, one line each.
inline std::string without_boilerplate(const std::vector<Paragraph>& paragraphs) {
    const std::vector<Kind> kinds = classify(paragraphs);
    std::string text;
    for (size_t i = 0; i < paragraphs.size(); i++)
        if (kinds[i] == Kind::good) text += paragraphs[i].text + "\n";
    return text;
}

}  // namespace html
