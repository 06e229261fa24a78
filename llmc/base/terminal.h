// Text for people: numbers, bytes and durations, characters that are safe to print, aligned tables, status lines and progress.
// Control characters and colours are written only to a terminal.
#pragma once
#include <poll.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <iterator>
#include <mutex>
#include <nlohmann/json.hpp>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "json.h"
#include "utf8.h"

using Strings = std::vector<std::string>;

// ---- the terminal ----------------------------------------------------------------------------------------------------------
// Open MPI's mpirun gives its ranks a pseudo-terminal and forwards their output: the launcher's own output decides.
inline bool launcher_has_terminal(int fd) {
    if (!getenv("OMPI_COMM_WORLD_RANK")) return true;
    char target[256] = "";
    (void)!readlink(format("/proc/%d/fd/%d", (int)getppid(), fd).c_str(), target, sizeof target - 1);
    return strncmp(target, "/dev/pts/", 9) == 0 || strncmp(target, "/dev/tty", 8) == 0;
}
inline bool is_terminal(FILE* f) {
    const char* term = getenv("TERM");
    return isatty(fileno(f)) && launcher_has_terminal(fileno(f)) && !(term && std::string(term) == "dumb");
}

// Current width of the terminal behind f, in columns; $COLUMNS or 100 if there is no terminal or its width is unknown.
inline int terminal_width(FILE* f) {
    winsize size{};
    if (ioctl(fileno(f), TIOCGWINSZ, &size) == 0 && size.ws_col > 0) return size.ws_col;
    const char* columns = getenv("COLUMNS");
    return columns && atoi(columns) > 0 ? atoi(columns) : 100;
}

// True if the locale's encoding is UTF-8; if not, lines are drawn in ASCII.
inline bool utf8_locale() {
    for (const char* name : {"LC_ALL", "LC_CTYPE", "LANG"}) {
        const char* value = getenv(name);
        if (!value || !*value) continue;
        const std::string s = value;
        return s.find("UTF-8") != std::string::npos || s.find("utf8") != std::string::npos;
    }
    return false;
}

inline double monotonic_seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
inline const double program_start = monotonic_seconds();

// Colours, named by their meaning. When off, text is unchanged.
struct Paint {
    bool on = false;
    // Colours on for a terminal, unless NO_COLOR (no-color.org) is set.
    static Paint for_terminal(bool terminal) {
        const char* no_color = getenv("NO_COLOR");
        return {terminal && !(no_color && *no_color)};
    }
    std::string code(const char* sgr, const std::string& s) const {
        return on ? format("\x1b[%sm%s\x1b[0m", sgr, s.c_str()) : s;
    }
    std::string bold(const std::string& s) const { return code("1", s); }
    std::string dim(const std::string& s) const { return code("2", s); }
    std::string good(const std::string& s) const { return code("32", s); }
    std::string warning(const std::string& s) const { return code("33", s); }
    std::string bad(const std::string& s) const { return code("1;31", s); }
    std::string accent(const std::string& s) const { return code("36", s); }
};

// ---- numbers ---------------------------------------------------------------------------------------------------------------
// x in three significant digits, in the largest unit that keeps it at 1 or above; units step by `base`.
inline std::string three_digits(double x, double base, const std::vector<const char*>& units) {
    if (!std::isfinite(x)) return std::isnan(x) ? "nan" : x > 0 ? "inf" : "-inf";
    size_t u = 0;
    // half a unit below the base would be printed as the base: 1000K
    while (std::fabs(x) >= base - 0.5 && u + 1 < units.size()) {
        x /= base;
        u++;
    }
    const double size = std::fabs(x);
    if (size >= 1e6) return format("%.2e%s", x, units[u]);  // there is no larger unit
    const int decimals = (u == 0 && x == std::floor(x)) || size >= 99.95 ? 0 : size >= 9.995 ? 1 : 2;
    return format("%.*f%s", decimals, x, units[u]);
}

// x with this many decimals; in scientific notation if that would be long: 1.23e+45.
inline std::string with_decimals(double x, int decimals) { return format(std::fabs(x) < 1e9 ? "%.*f" : "%.*e", decimals, x); }

inline std::string human_count(double n) { return three_digits(n, 1000, {"", "K", "M", "B", "T", "Q"}); }
inline std::string human_flops(double n) {
    return three_digits(n, 1000, {" FLOP/s", " KFLOP/s", " MFLOP/s", " GFLOP/s", " TFLOP/s", " PFLOP/s", " EFLOP/s"});
}
inline std::string human_bytes(double n) { return three_digits(n, 1024, {" B", " KiB", " MiB", " GiB", " TiB", " PiB"}); }

// 1234567 -> "1,234,567"
inline std::string with_commas(int64_t n) {
    std::string s = std::to_string(n);
    for (int i = (int)s.size() - 3; i > (n < 0 ? 1 : 0); i -= 3) s.insert(i, ",");
    return s;
}

// "a, b, c": name_of(row) for each row; names are listed as they are
template <class Rows, class F>
std::string joined(const Rows& rows, F name_of) {
    std::string text;
    for (const auto& row : rows) text += (text.empty() ? "" : ", ") + std::string(name_of(row));
    return text;
}
inline std::string joined(const std::vector<std::string>& names) {
    return joined(names, [](const std::string& name) { return name; });
}
// "1 document", "12,000 documents"; `several`: a plural other than noun + s
inline std::string counted(int64_t n, const std::string& noun, const std::string& several = "") {
    return with_commas(n) + " " + (n == 1 ? noun : several.empty() ? noun + "s" : several);
}

// "12 ms", "4.2s", "42s", "12m 05s", "1h 02m", "3d 04h"; "-" for an unknown duration
inline std::string human_duration(double seconds) {
    if (!(seconds >= 0 && seconds < 1e15)) return "-";
    if (seconds < 0.0005) return "0s";
    if (seconds < 0.0995) return format("%.0f ms", seconds * 1e3);
    if (seconds < 9.95) return format("%.1fs", seconds);
    const long long s = std::llround(seconds), m = (s + 30) / 60, h = (s + 1800) / 3600;
    if (s < 60) return format("%llds", s);
    if (s < 3600) return format("%lldm %02llds", s / 60, s % 60);
    if (m < 24 * 60) return format("%lldh %02lldm", m / 60, m % 60);
    return format("%lldd %02lldh", h / 24, h % 24);
}

// ---- characters ------------------------------------------------------------------------------------------------------------
// The UTF-8 character at s[i], which moves past it. An invalid byte gives U+FFFD and moves by one.
inline uint32_t next_codepoint(const std::string& s, size_t& i) {
    const Utf8Character c = first_character(std::string_view(s).substr(i));
    i += c.length;
    return c.code < 0 ? 0xfffd : (uint32_t)c.code;
}

// Width of a character on a terminal, in columns: 0 for combining marks, 2 for East Asian wide characters and emoji.
inline int columns_of(uint32_t c) {
    struct Range {
        uint32_t first, last;
    };
    static const Range marks[] = {{0x300, 0x36f}, {0x200b, 0x200f}, {0x3099, 0x309a}, {0xfe00, 0xfe0f}};
    static const Range wide[] = {{0x1100, 0x115f},   {0x2e80, 0xa4cf},  {0xac00, 0xd7a3}, {0xf900, 0xfaff},
                                 {0xfe30, 0xfe6f},   {0xff00, 0xff60},  {0xffe0, 0xffe6}, {0x1f300, 0x1f64f},
                                 {0x1f900, 0x1f9ff}, {0x20000, 0x3fffd}};
    const auto in = [c](const Range& r) { return c >= r.first && c <= r.last; };
    if (std::any_of(std::begin(marks), std::end(marks), in)) return 0;
    return std::any_of(std::begin(wide), std::end(wide), in) ? 2 : 1;
}

inline int display_width(const std::string& s) {
    int width = 0;
    for (size_t i = 0; i < s.size();) width += columns_of(next_codepoint(s, i));
    return width;
}

// Untrusted text (from a model, a file name) made safe to show: valid UTF-8 without control characters except newline (a
// terminal would obey them), without characters that change the writing direction or that XML forbids. Each one becomes U+FFFD.
inline std::string printable(const std::string& text) {
    std::string out;
    for (size_t i = 0; i < text.size();) {
        const size_t start = i;
        const uint32_t c = next_codepoint(text, i);
        if (c == '\r') continue;
        const bool control = (c < 0x20 && c != '\n' && c != '\t') || (c >= 0x7f && c < 0xa0) || (c >= 0x202a && c <= 0x202e) ||
                             (c >= 0x2066 && c <= 0x2069) || (c & 0xfffe) == 0xfffe;
        if (c == '\t') out += ' ';
        else if (control || c == 0xfffd) out += replacement_character;
        else out.append(text, start, i - start);
    }
    return out;
}

// A word quoted for a shell.
inline std::string shell_word(const std::string& word) {
    const auto plain = [](char c) { return isalnum((unsigned char)c) || strchr("_-+=./:,@%", c) != nullptr; };
    if (!word.empty() && std::all_of(word.begin(), word.end(), plain)) return word;
    std::string quoted = "'";
    for (const char c : word) quoted += c == '\'' ? "'\\''" : std::string(1, c);
    return quoted + "'";
}

// Length of the text in bytes without an incomplete character at its end.
inline size_t whole_characters(const std::string& text) {
    for (size_t back = 1; back <= std::min<size_t>(3, text.size()); back++) {
        const unsigned char c = (unsigned char)text[text.size() - back];
        if ((c & 0xc0) == 0x80) continue;  // a continuation byte
        const size_t length = c >= 0xf0 ? 4 : c >= 0xe0 ? 3 : c >= 0xc0 ? 2 : 1;
        return text.size() - (length > back ? back : 0);
    }
    return text.size();
}

// Text that arrives in pieces which may end within a character, like tokens. A terminal gets safe text as soon as a character
// is complete; a file or pipe gets the bytes unchanged.
class TextOutput {
public:
    explicit TextOutput(FILE* f) : f_(f), terminal_(isatty(fileno(f)) && launcher_has_terminal(fileno(f))) {}
    void write(const std::string& bytes) {
        pending_ += bytes;
        const std::string whole = pending_.substr(0, terminal_ ? whole_characters(pending_) : pending_.size());
        pending_.erase(0, whole.size());
        const std::string shown = terminal_ ? printable(whole) : whole;
        fwrite(shown.data(), 1, shown.size(), f_);
        fflush(f_);
    }

private:
    FILE* f_;
    bool terminal_;
    std::string pending_;
};

// Lines of at most `width` columns, broken at spaces if there are any, else between characters (Japanese has no spaces).
inline std::vector<std::string> wrap_text(const std::string& text, int width) {
    std::vector<std::string> lines(1);
    int columns = 0;
    size_t space = std::string::npos;  // where the current line can be broken
    for (size_t i = 0; i < text.size();) {
        const size_t start = i;
        const uint32_t c = next_codepoint(text, i);
        if (c == '\n') {
            lines.emplace_back();
            columns = 0;
            space = std::string::npos;
            continue;
        }
        if (columns + columns_of(c) > width && columns > 0) {
            std::string rest;
            if (c != ' ' && space != std::string::npos) {
                rest = lines.back().substr(space + 1);
                lines.back().resize(space);
            }
            lines.push_back(rest);
            columns = display_width(rest);
            space = std::string::npos;
            if (c == ' ') continue;
        }
        if (c == ' ') space = lines.back().size();
        lines.back().append(text, start, i - start);
        columns += columns_of(c);
    }
    return lines;
}

inline std::string pad_right(const std::string& s, int width) {
    return s + std::string(std::max(0, width - display_width(s)), ' ');
}
inline std::string pad_left(const std::string& s, int width) {
    return std::string(std::max(0, width - display_width(s)), ' ') + s;
}

// A line of text cut to this many columns.
inline std::string cut_text(const std::string& text, int width) {
    if (display_width(text) <= width) return text;
    std::string out;
    for (size_t i = 0, columns = 0; i < text.size();) {
        const size_t start = i;
        columns += (size_t)columns_of(next_codepoint(text, i));
        if ((int)columns > std::max(0, width)) break;
        out.append(text, start, i - start);
    }
    return out;
}

// ---- lines -----------------------------------------------------------------------------------------------------------------
// The last line of a terminal, rewritten in place until it is kept or cleared. The process has at most one: other output clears
// it first, so that it starts at the left. Any thread may call.
class StatusLine {
public:
    explicit StatusLine(FILE* f) : f_(f) {}
    StatusLine(const StatusLine&) = delete;
    StatusLine& operator=(const StatusLine&) = delete;
    ~StatusLine() { clear(); }
    // At most terminal_width - 1 columns: a line that wraps cannot be rewritten.
    void show(const std::string& line) {
        const std::lock_guard<std::recursive_mutex> guard(lock());
        if (open() && open() != this) open()->clear();
        fprintf(f_, open() ? "\r%s\x1b[K" : "%s", line.c_str());
        fflush(f_);
        open() = this;
    }
    void keep() { end("\n"); }
    void clear() { end("\r\x1b[K"); }
    static void clear_any() {
        const std::lock_guard<std::recursive_mutex> guard(lock());
        if (open()) open()->clear();
    }

private:
    void end(const char* how) {
        const std::lock_guard<std::recursive_mutex> guard(lock());
        if (open() != this) return;
        fputs(how, f_);
        fflush(f_);
        open() = nullptr;
    }
    static std::recursive_mutex& lock() {
        static std::recursive_mutex mutex;
        return mutex;
    }
    static StatusLine*& open() {
        static StatusLine* line = nullptr;
        return line;
    }
    FILE* f_;
};

// A line for people, wrapped at words on a terminal. It may quote untrusted text: a file name, a tensor's name, a model's
// output.
inline void print_line(FILE* f, const std::string& line) {
    std::string text = printable(line);
    if (is_terminal(f)) {
        StatusLine::clear_any();
        const std::vector<std::string> lines = wrap_text(text, std::max(20, terminal_width(f)));
        text.clear();
        for (const std::string& part : lines) text += (text.empty() ? "" : "\n") + part;
    }
    fputs((text + "\n").c_str(), f);
    fflush(f);
}

// print_line for signal handlers, with one write(2) of all pieces, since POSIX allows little there; lines of two ranks do not
// mix.
inline void print_in_signal_handler(std::initializer_list<const char*> pieces) {
    char line[4096];
    size_t length = 0;
    for (const char* piece : pieces) {
        const size_t bytes = std::min(strlen(piece), sizeof line - length);
        memcpy(line + length, piece, bytes);
        length += bytes;
    }
    (void)!write(STDERR_FILENO, line, length);
}

// ---- tables ----------------------------------------------------------------------------------------------------------------
// Sections of rows `label  value  note`. Labels align over the whole table; values are left-aligned and wrapped, or
// right-aligned in a section of amounts. The JSON form for programs has one object per section, named by the first word of its
// title, with the rows' values; exact() replaces a row's text there.
class Table {
public:
    enum class Values { text, amounts };

    // key: the section's name in JSON; by default the first word of its title
    void section(const std::string& title, Values values = Values::text, const std::string& key = "") {
        sections_.push_back({printable(title), values, key.empty() ? title.substr(0, title.find(' ')) : key, {}});
    }
    void row(const std::string& label, const std::string& value, const std::string& note = "") {
        if (sections_.empty()) section("");
        sections_.back().rows.push_back({printable(label), printable(value), printable(note), nullptr});
    }
    void exact(nlohmann::ordered_json value) { sections_.back().rows.back().exact = std::move(value); }

    nlohmann::ordered_json json() const {
        nlohmann::ordered_json all = nlohmann::ordered_json::object();
        for (const Section& s : sections_) {
            std::string key = s.key;
            for (char& c : key) c = (char)tolower((unsigned char)c);
            nlohmann::ordered_json& rows = all[key];
            for (const Row& r : s.rows) {
                const std::string once = key_of(r.label);
                std::string name = once;
                for (int n = 2; rows.contains(name); n++) name = once + "_" + std::to_string(n);
                rows[name] = r.exact.is_null() ? nlohmann::ordered_json(r.value) : r.exact;
            }
        }
        return all;
    }

    // Lines are at most `width` columns wide if they have spaces to break at.
    std::string str(const Paint& paint, int width) const {
        int label_width = 0;  // a label wider than half of the line gets its own line
        for (const Section& s : sections_)
            for (const Row& r : s.rows)
                if (const int w = display_width(r.label); w <= width / 2) label_width = std::max(label_width, w);
        const std::string indent(label_width + 4, ' ');
        const int room = std::max(20, width - label_width - 4);
        std::string out;
        for (const Section& s : sections_) {
            if (!s.title.empty()) out += paint.bold(s.title) + "\n";
            int amount_width = 0;
            for (const Row& r : s.rows) amount_width = std::max(amount_width, display_width(r.value));
            for (const Row& r : s.rows) {
                if (display_width(r.label) > label_width) out += "  " + paint.dim(r.label) + "\n" + indent;
                else out += "  " + paint.dim(pad_right(r.label, label_width)) + "  ";
                const bool amounts = s.values == Values::amounts;
                const std::vector<std::string> lines = wrap_text(amounts ? pad_left(r.value, amount_width) : r.value, room);
                for (size_t i = 0; i < lines.size(); i++) out += (i ? "\n" + indent : "") + lines[i];
                if (!r.note.empty()) {
                    const bool beside = display_width(lines.back()) + 2 + display_width(r.note) <= room;
                    if (beside) out += "  " + paint.dim(r.note);
                    else
                        for (const std::string& part : wrap_text(r.note, room)) out += "\n" + indent + paint.dim(part);
                }
                out += "\n";
            }
        }
        return out;
    }
    void print(FILE* f = stdout) const {
        StatusLine::clear_any();
        fputs(str(Paint::for_terminal(is_terminal(f)), terminal_width(f)).c_str(), f);
        fflush(f);
    }

private:
    // The JSON key of a label: "gradients (fp32)" becomes gradients_fp32.
    static std::string key_of(const std::string& label) {
        std::string key;
        for (const char c : label)
            if (isalnum((unsigned char)c) || c == '.' || (c == '-' && !key.empty()) || (c & 0x80)) key += c;
            else if (!key.empty() && key.back() != '_') key += '_';
        while (!key.empty() && (key.back() == '_' || key.back() == '-')) key.pop_back();
        return key;
    }
    struct Row {
        std::string label, value, note;
        nlohmann::ordered_json exact;  // null: JSON gets `value`
    };
    struct Section {
        std::string title;
        Values values;
        std::string key;
        std::vector<Row> rows;
    };
    std::vector<Section> sections_;
};

// At the end of a command: fails if part of its output could not be written, as on a full disk. A reader that closed the pipe
// early, like head, is not an error.
inline void check_output() {
    const bool failed = fflush(stdout) != 0 || ferror(stdout);
    struct pollfd out = {STDOUT_FILENO, POLLOUT, 0};
    if (!failed || (poll(&out, 1, 0) == 1 && (out.revents & POLLERR))) return;
    fail("cannot write to standard output: the output is incomplete; HINT: is the disk full?");
}

// With --json, the only text on standard output.
inline void print_json(const nlohmann::ordered_json& j) { puts(json_text(j, 2).c_str()); }

// ---- progress --------------------------------------------------------------------------------------------------------------
// Progress of one long job. On a terminal it is one line, rewritten at most ten times a second; elsewhere a plain line now and
// then (none for short jobs). finish() leaves a one-line summary. A job that fails leaves its line and a newline, so that the
// error starts a new line. The unit "B" counts bytes. For one thread only.
class Progress {
public:
    // total = 0: not known
    Progress(const std::string& label, int64_t total, std::string unit, FILE* out = stderr)
        : label_(printable(label)),
          unit_(std::move(unit)),
          total_(total),
          out_(out),
          line_(out),
          terminal_(is_terminal(out)),
          paint_(Paint::for_terminal(terminal_)),
          start_(monotonic_seconds()),
          shown_at_(start_) {}
    Progress(const Progress&) = delete;
    Progress& operator=(const Progress&) = delete;
    ~Progress() { line_.keep(); }

    void update(int64_t done) {
        done_ = done;
        const double now = monotonic_seconds(), since = now - shown_at_;
        if (terminal_) {
            if (drawn_ && since < 0.1) return;
            draw(now - start_);
            drawn_ = true;
        } else {
            // at every tenth of the total or every minute, but never twice in ten seconds
            const bool tenth = total_ > 0 && done - shown_ >= total_ / 10;
            if (since < 10 || (!tenth && since < 60)) return;
            fprintf(out_, "%s: %s\n", label_.c_str(), plain(now - start_).c_str());
            fflush(out_);
        }
        shown_at_ = now;
        shown_ = done;
    }

    void finish() {
        const double seconds = monotonic_seconds() - start_;
        line_.clear();
        fprintf(out_, "%s: %s in %s%s\n", label_.c_str(), amount((double)done_).c_str(), human_duration(seconds).c_str(),
                seconds >= 0.1 ? paint_.dim(" (" + amount(done_ / seconds) + "/s)").c_str() : "");
        fflush(out_);
    }

private:
    std::string amount(double n) const { return unit_ == "B" ? human_bytes(n) : human_count(n) + " " + unit_; }
    std::string eta(double elapsed) const {
        return done_ > 0 && elapsed > 0.5 ? "ETA " + human_duration(elapsed * (total_ - done_) / done_) : "";
    }
    double fraction() const { return std::clamp((double)done_ / total_, 0.0, 1.0); }

    std::string plain(double elapsed) const {
        const std::string rate = amount(done_ / elapsed) + "/s";
        if (total_ <= 0) return amount((double)done_) + ", " + rate;
        return format("%.0f%% (%s of %s), %s, %s", 100 * fraction(), amount((double)done_).c_str(),
                      amount((double)total_).c_str(), rate.c_str(), eta(elapsed).c_str());
    }

    void draw(double elapsed) {
        const std::string rate = elapsed > 0.1 ? amount(done_ / elapsed) + "/s" : "";
        std::string bar, text;
        if (total_ > 0) {
            const int cells = 24, full = (int)(fraction() * cells);
            const bool utf8 = utf8_locale();
            std::string done, rest;
            for (int i = 0; i < cells; i++) (i < full ? done : rest) += i < full ? (utf8 ? "━" : "#") : (utf8 ? "─" : "-");
            bar = paint_.accent(done) + paint_.dim(rest);
            text = format(" %3.0f%%  %s / %s  %s  %s", 100 * fraction(), amount((double)done_).c_str(),
                          amount((double)total_).c_str(), rate.c_str(), eta(elapsed).c_str());
            if (display_width(label_ + text) + 2 + cells >= terminal_width(out_)) bar.clear();
        } else {
            text = amount((double)done_) + "  " + rate;
        }
        if (bar.empty()) line_.show(cut_text(label_ + "  " + text, terminal_width(out_) - 1));
        else line_.show(label_ + "  " + bar + text);
    }

    std::string label_, unit_;
    int64_t total_, done_ = 0, shown_ = 0;  // done, and done when last shown
    FILE* out_;
    StatusLine line_;
    bool terminal_, drawn_ = false;
    Paint paint_;
    double start_, shown_at_;
};

// Names the current phase of the work, such as loading a model. On a terminal: one line with the elapsed seconds, removed at
// the end; elsewhere: a plain line after one second and then one a minute. A short phase prints nothing.
class PhaseStatus {
public:
    // patience: seconds before the first line
    explicit PhaseStatus(FILE* out = stderr, double patience = 1) : out_(out), patience_(patience), line_(out) {}
    PhaseStatus(const PhaseStatus&) = delete;
    PhaseStatus& operator=(const PhaseStatus&) = delete;
    ~PhaseStatus() {
        set("", true);
        if (ticker_.joinable()) ticker_.join();
    }
    void begin(const std::string& what) {
        set(printable(what), false);
        try {
            if (!ticker_.joinable()) ticker_ = std::thread([this] { tick(); });
        } catch (const std::system_error&) {  // no more threads
        }
    }
    void done() { set("", false); }

private:
    void set(const std::string& what, bool over) {
        {
            const std::lock_guard<std::mutex> guard(mutex_);
            what_ = what;
            over_ = over;
            start_ = monotonic_seconds();
            next_ = start_ + patience_;
            line_.clear();
        }
        changed_.notify_all();
    }
    void tick() {
        const Paint paint = Paint::for_terminal(terminal_);
        std::unique_lock<std::mutex> guard(mutex_);
        while (!over_) {
            if (what_.empty()) {
                changed_.wait(guard);
                continue;
            }
            const double now = monotonic_seconds();
            if (now < next_) {
                changed_.wait_for(guard, std::chrono::duration<double>(next_ - now));
                continue;
            }
            next_ = now + (terminal_ ? 1 : 60);
            const std::string text = what_ + (now - start_ < 2 ? " ..." : " ... " + human_duration(now - start_));
            if (terminal_) line_.show(paint.dim(cut_text(text, terminal_width(out_) - 1)));
            else {
                fprintf(out_, "%s\n", text.c_str());
                fflush(out_);
            }
        }
    }

    FILE* out_;
    double patience_;
    bool terminal_ = is_terminal(out_);
    StatusLine line_;
    std::mutex mutex_;  // guards all members below
    std::condition_variable changed_;
    std::string what_;
    bool over_ = false;
    double start_ = 0, next_ = 0;
    std::thread ticker_;
};
