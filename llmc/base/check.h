// Errors, of four separate kinds:
//   fail(...)         a fault of the user or the environment: a wrong file, a mismatch, no memory. The message has the given
//                     value, the allowed ones, and the fix. Thrown as Error, printed once by main(), exit status 1.
//   fail_usage(...)   an invalid command line: the same, with exit status 2.
//   Unreadable        the system cannot read a file, because of its disk, a network file system or permissions. This says
//                     nothing about the contents, so it is not an Error: code that catches Error to judge a file ignores it.
//   CHECK(cond, ...)  a fault of the program: a broken assumption. On in release builds; prints file:line and aborts.
// Errors are exceptions rather than exit() calls: destructors run, so that temporary files are removed and no half-written file
// remains. Never call fail() inside an OpenMP region or a task of cpu::Team (parallel_for, parallel_tasks), which an exception
// must not leave: record the error there and call fail() after it.
#pragma once
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>

struct Error : std::runtime_error {
    using std::runtime_error::runtime_error;
};
struct UsageError : Error {
    using Error::Error;
};
struct Unreadable : std::runtime_error {
    Unreadable(const std::string& text, int error) : std::runtime_error(text), error(error) {}
    int error;  // errno
};
// A file that is intact and cannot be read here: another format, or a feature that does not exist here.
struct Unsupported : Error {
    using Error::Error;
};

inline std::string format_list(const char* fmt, va_list arguments) {
    va_list again;
    va_copy(again, arguments);
    std::string s((size_t)vsnprintf(nullptr, 0, fmt, arguments), '\0');
    vsnprintf(s.data(), s.size() + 1, fmt, again);
    va_end(again);
    return s;
}

// Like printf, into a std::string.
__attribute__((format(printf, 1, 2))) inline std::string format(const char* fmt, ...) {
    va_list arguments;
    va_start(arguments, fmt);
    const std::string s = format_list(fmt, arguments);
    va_end(arguments);
    return s;
}

// fail("seq-length is %d; HINT: ...", T): throws Error with the formatted message.
[[noreturn]] __attribute__((format(printf, 1, 2))) inline void fail(const char* fmt, ...) {
    va_list arguments;
    va_start(arguments, fmt);
    const std::string s = format_list(fmt, arguments);
    va_end(arguments);
    throw Error(s);
}
[[noreturn]] __attribute__((format(printf, 1, 2))) inline void fail_usage(const char* fmt, ...) {
    va_list arguments;
    va_start(arguments, fmt);
    const std::string s = format_list(fmt, arguments);
    va_end(arguments);
    throw UsageError(s);
}

// ---- refusals of options ---------------------------------------------------------------------------------------------------
// One wording for each kind; they throw if `wrong` is true. Options are given with their dashes.
// "the output is missing; HINT: --output DIR"
inline void refuse_missing(bool wrong, const std::string& what, const std::string& hint) {
    if (wrong) throw UsageError(what + " is missing; HINT: " + hint);
}
// "--json requires --dry-run; HINT: add that, or omit --json"
inline void refuse_without(bool wrong, const std::string& option, const std::string& needed, const std::string& hint = "") {
    if (wrong)
        throw UsageError(option + " requires " + needed + "; HINT: " + (hint.empty() ? "add that, or omit " + option : hint));
}
// "--encoding has no effect without --text; HINT: add that, or omit --encoding"
inline void refuse_idle(bool wrong, const std::string& option, const std::string& needed) {
    if (wrong) throw UsageError(option + " has no effect without " + needed + "; HINT: add that, or omit " + option);
}
// "--chat and --preference cannot be combined: conversations, or pairs of answers; HINT: omit one of them"
inline void refuse_together(bool wrong, const std::string& a, const std::string& b, const std::string& why = "",
                            const std::string& hint = "omit one of them") {
    if (wrong) throw UsageError(a + " and " + b + " cannot be combined" + (why.empty() ? "" : ": ") + why + "; HINT: " + hint);
}
// "--exit-after is 'soon'; it must be a duration (90s, 30m, 5h30m)". E: Error, if the value may come from a file.
template <class E = UsageError, class T>
void refuse_value(bool wrong, const std::string& name, const T& value, const std::string& allowed,
                  const std::string& hint = "") {
    if (!wrong) return;
    std::string shown;
    if constexpr (std::is_integral_v<T>) shown = std::to_string(value);
    else if constexpr (std::is_floating_point_v<T>) shown = format("%g", (double)value);
    else shown = "'" + std::string(value) + "'";
    throw E(name + " is " + shown + "; it must be " + allowed + (hint.empty() ? "" : "; HINT: ") + hint);
}
// "latest.json is damaged: it has no 'step'"
[[noreturn]] inline void fail_damaged(const std::string& file, const std::string& why) {
    throw Error(file + " is damaged: " + why);
}

// Runs f; its errors come from options, so an Error becomes a UsageError.
template <class F>
auto as_usage(F f) {
    try {
        return f();
    } catch (const UsageError&) {
        throw;
    } catch (const Error& e) {
        throw UsageError(e.what());
    }
}
[[noreturn]] __attribute__((format(printf, 1, 2))) inline void fail_unsupported(const char* fmt, ...) {
    va_list arguments;
    va_start(arguments, fmt);
    const std::string s = format_list(fmt, arguments);
    va_end(arguments);
    throw Unsupported(s);
}

// The exit status of a process after this error.
inline int exit_status(const std::exception& e) { return dynamic_cast<const UsageError*>(&e) ? 2 : 1; }

#define CHECK(cond, ...)                                                                                                       \
    do {                                                                                                                       \
        if (!(cond)) {                                                                                                         \
            fprintf(stderr, "%s:%d: internal check failed: %s: %s\n", __FILE__, __LINE__, #cond, format(__VA_ARGS__).c_str()); \
            abort();                                                                                                           \
        }                                                                                                                      \
    } while (0)
