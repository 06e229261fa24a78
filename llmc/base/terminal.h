// The terminal: its width and colors, a status line, and lines for people. Control characters and colors are written only to
// a terminal.
#pragma once
#include <poll.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <mutex>
#include <string>
#include <vector>

#include "check.h"
#include "text.h"

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

// Colors, named by their meaning. When off, text is unchanged.
struct Paint {
    bool on = false;
    // Colors on for a terminal, unless NO_COLOR (no-color.org) is set.
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

// In a process whose notes and progress another one prints: a rank above 0 of a command on text.
inline bool& is_quiet() {
    static bool quiet = false;
    return quiet;
}

// A line for people, wrapped at words on a terminal. It may quote untrusted text: a file name, a tensor's name, a model's
// output.
inline void print_line(FILE* f, const std::string& line) {
    if (is_quiet()) return;
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

// At the end of a command: fails if part of its output could not be written, as on a full disk. A reader that closed the pipe
// early, like head, is not an error.
inline void check_output() {
    const bool failed = fflush(stdout) != 0 || ferror(stdout);
    struct pollfd out = {STDOUT_FILENO, POLLOUT, 0};
    if (!failed || (poll(&out, 1, 0) == 1 && (out.revents & POLLERR))) return;
    fail("cannot write to standard output: the output is incomplete; HINT: is the disk full?");
}
