// Inputs that are not files of this machine. An address (https://host/file.jsonl.zst, s3://bucket/key) is read from the
// standard output of a command: --input-command with {} replaced by the address or, for http and https, curl. No shell sees the
// address.
//
// A download by curl that breaks off continues at the byte reached: it is requested from a little before that byte, and these
// bytes must be the same again. Other commands are not repeated. A failed command ends the run; it is never mistaken for the
// end of the input.
#pragma once
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>

#include "../base/check.h"
#include "../base/file.h"
#include "../base/process.h"
#include "../base/terminal.h"
#include "../base/text.h"

// A name with a scheme (https://), unless there is such a file.
inline bool is_address(const std::string& name) {
    const size_t at = name.find("://");
    const auto in_scheme = [](char c) { return isalnum((unsigned char)c) || c == '+' || c == '-' || c == '.'; };
    if (at == std::string::npos || !std::all_of(name.begin(), name.begin() + (std::ptrdiff_t)at, in_scheme)) return false;
    if (!isalpha((unsigned char)name[0])) return false;  // a "-" would be an option of --input-command
    std::error_code error;
    return !std::filesystem::exists(name, error);
}
// The address's path, without a query and a fragment; other names unchanged.
inline std::string without_query(const std::string& name) {
    return is_address(name) ? name.substr(0, name.find_first_of("?#")) : name;
}

// A download failed. No option skips it: the address may be intact.
struct AddressUnreadable : Error {
    using Error::Error;
};

// The command that writes an address's bytes to its standard output.
class InputCommand {
public:
    // text: the value of --input-command, or "": curl.
    explicit InputCommand(const std::string& text = "") {
        if (text.empty()) return;
        const std::string option = "--input-command", example = "HINT: --input-command 'aws s3 cp {} -'";
        std::string problem;
        words_ = split_words(text, problem);
        if (!problem.empty())
            fail_usage("%s is '%s', which %s; HINT: no shell runs it; to use one: sh -c 'aws s3 cp \"$1\" - | xzcat' sh {}",
                       option.c_str(), text.c_str(), problem.c_str());
        const auto has_place = [](const std::string& word) { return word.find("{}") != std::string::npos; };
        if (std::none_of(words_.begin(), words_.end(), has_place))
            fail_usage("%s is '%s', which has no {} for the address; %s", option.c_str(), text.c_str(), example.c_str());
        if (!is_program(words_[0]))
            fail_usage("%s: there is no program %s; HINT: install it, or give its path", option.c_str(), words_[0].c_str());
    }
    bool is_curl() const { return words_.empty(); }

    // Fails if the address cannot be read by this command.
    void check(const std::string& address) const {
        if (!is_curl()) return;
        const std::string scheme = lower_ascii(address.substr(0, address.find("://")));
        if (scheme != "http" && scheme != "https") {
            static constexpr std::pair<const char*, const char*> known[] = {
                {"s3", "aws s3 cp {} -"},     {"gs", "gcloud storage cat {}"}, {"az", "azcopy cp {} --from-to BlobPipe"},
                {"hdfs", "hdfs dfs -cat {}"}, {"ftp", "curl -sSf {}"},         {"file", "curl -sSf {}"}};
            std::string command = "PROGRAM {}";
            for (const auto& [name, one] : known)
                if (scheme == name) command = one;
            fail_usage(
                "%s is an address of %s, which needs a command that writes its bytes to standard output; HINT: "
                "--input-command %s",
                address.c_str(), scheme.c_str(), shell_word(command).c_str());
        }
        if (!is_program("curl"))
            fail_usage("%s is read by curl, which is not installed; HINT: install curl, or --input-command 'wget -qO- {}'",
                       address.c_str());
    }
    // The command that writes the bytes from `begin` on. A speed below one byte per second for a minute ends curl.
    Strings words(const std::string& address, int64_t begin) const {
        if (is_curl()) {
            Strings words = {"curl",          "-sSfL", "--globoff",         "--proto", "=http,https", "--speed-time", "60",
                             "--speed-limit", "1",     "--connect-timeout", "30",      "--url",       as_url(address)};
            if (begin > 0) words.insert(words.end(), {"--continue-at", std::to_string(begin)});
            return words;
        }
        Strings words = words_;
        for (std::string& word : words)
            for (size_t at = word.find("{}"); at != std::string::npos; at = word.find("{}", at + address.size()))
                word.replace(at, 2, address);
        return words;
    }

private:
    // Characters that no URL may hold, such as blanks, are written as %20, as browsers do.
    static std::string as_url(const std::string& address) {
        std::string url;
        for (const char c : address)
            url += (unsigned char)c <= ' ' || (unsigned char)c >= 0x7f || strchr("\"<>\\^`{|}", c)
                       ? format("%%%02X", (unsigned)(unsigned char)c)
                       : std::string(1, c);
        return url;
    }

    Strings words_;  // none: curl
};

// Set by another thread to end a source that waits for its command.
using StopReading = std::shared_ptr<std::atomic<bool>>;

class AddressSource : public ByteSource {
public:
    AddressSource(std::string address, const InputCommand& command, StopReading stop)
        : address_(std::move(address)), command_(command), stop_(std::move(stop)) {
        start(0);
    }
    AddressSource(const AddressSource&) = delete;
    AddressSource& operator=(const AddressSource&) = delete;
    ~AddressSource() override { end(SIGKILL); }
    int64_t position() const override { return position_; }

    size_t read(char* out, size_t bytes) override {
        while (!ended_) {
            const size_t n = new_bytes(out, some(out, bytes));
            if (n > 0) {
                tries_ = 0;
                return n;
            }
            if (out_ >= 0) continue;  // all of it was known
            const int status = end(0);
            if (status == 0 && next_ < position_) fail_changed();
            if (status == 0) ended_ = true;
            else try_again(status);
        }
        return 0;
    }

private:
    static constexpr size_t repeated_bytes = 4096, most_said = 2048;
    static constexpr int most_tries = 9;  // without a new byte: for a minute

    void start(int64_t begin) {
        int out[2], err[2];
        if (pipe2(out, O_CLOEXEC) != 0) fail("cannot make a pipe: %s", strerror(errno));
        out_ = out[0];
        if (pipe2(err, O_CLOEXEC) != 0) fail("cannot make a pipe: %s", strerror(errno));
        err_ = err[0];
        for (const int fd : {out_, err_}) fcntl(fd, F_SETFL, O_NONBLOCK);
        next_ = begin;
        said_.clear();
        child_ = start_process(command_.words(address_, begin), SIGKILL, [&] {
            redirect(STDIN_FILENO, "/dev/null", O_RDONLY);
            dup2(out[1], STDOUT_FILENO);
            dup2(err[1], STDERR_FILENO);
            signal(SIGPIPE, SIG_DFL);
        });
        close(out[1]);
        close(err[1]);
    }
    // Waits for the command's end, or kills it; returns its exit status.
    int end(int kill_by) {
        if (child_ < 0) return 0;
        if (kill_by) kill(child_, kill_by);
        if (out_ >= 0) close(std::exchange(out_, -1));
        int status = 0;
        while (waitpid(child_, &status, kill_by ? 0 : WNOHANG) == 0) {
            if (is_stopped()) kill(child_, SIGKILL);
            wait_for_output(50);
        }
        listen();
        if (err_ >= 0) close(std::exchange(err_, -1));
        child_ = -1;
        return exit_status(status);
    }
    bool is_stopped() const { return stop_ && *stop_; }
    // Waits for the command to write something; keeps the end of its messages.
    void wait_for_output(int ms) {
        pollfd fds[] = {{out_, POLLIN, 0}, {err_, POLLIN, 0}};  // negative ones are ignored
        poll(fds, 2, ms);
        if (fds[1].revents) listen();
    }
    void listen() {
        char part[1024];
        while (err_ >= 0) {
            const ssize_t n = ::read(err_, part, sizeof part);
            if (n < 0 && errno == EINTR) continue;
            if (n == 0) close(std::exchange(err_, -1));
            if (n <= 0) return;
            said_.append(part, (size_t)n);
            if (said_.size() > most_said) said_.erase(0, said_.size() - most_said);
        }
    }
    // The next bytes of the command; 0 and a closed out_ at its end.
    size_t some(char* out, size_t bytes) {
        while (true) {
            const ssize_t n = ::read(out_, out, bytes);
            if (n > 0) return (size_t)n;
            if (n < 0 && errno != EAGAIN && errno != EINTR)
                fail("cannot read from the command for %s: %s", address_.c_str(), strerror(errno));
            if (n == 0) {
                close(std::exchange(out_, -1));
                return 0;
            }
            if (is_stopped()) throw AddressUnreadable(address_ + " is no longer read");
            wait_for_output(200);
        }
    }
    // Compares the bytes from next_ on that were read before, and moves the new ones to the front; returns their number.
    size_t new_bytes(char* out, size_t n) {
        const auto known = (size_t)std::min<int64_t>((int64_t)n, position_ - next_);
        for (size_t i = 0; i < known; i++) {
            const int64_t in_last = next_ + (int64_t)i - (position_ - (int64_t)last_.size());
            if (in_last >= 0 && out[i] != last_[(size_t)in_last]) fail_changed();
        }
        next_ += (int64_t)n;
        n -= known;
        if (n == 0) return 0;
        memmove(out, out + known, n);
        position_ += (int64_t)n;
        if (command_.is_curl()) {
            last_.append(out + (n - std::min(n, repeated_bytes)), std::min(n, repeated_bytes));
            if (last_.size() > repeated_bytes) last_.erase(0, last_.size() - repeated_bytes);
        }
        return n;
    }

    // After the command has failed: starts it again where that may help.
    void try_again(int status) {
        constexpr int no_ranges = 33;  // curl's status: the server sends files from their start only
        const bool other_begin = command_.is_curl() && status == no_ranges && ranges_;
        if (other_begin) ranges_ = false;
        else if (!command_.is_curl() || !may_pass(status) || ++tries_ == most_tries) fail_command(status);
        else {
            const double seconds = 0.25 * (1 << (tries_ - 1));
            if (tries_ > 1)
                print_line(stderr, format("note: %s: %s; trying again in %s", address_.c_str(), last_lines(1).c_str(),
                                          human_duration(seconds).c_str()));
            for (int i = 0; i < (int)(seconds * 20) && !is_stopped(); i++) usleep(50000);
        }
        start(ranges_ ? position_ - (int64_t)last_.size() : 0);
    }
    // True if another try may succeed, by curl's exit status: a lost connection, a time-out, a busy server.
    bool may_pass(int status) const {
        if (status == 22) {
            const size_t at = said_.rfind("error: ");
            const int http = at == std::string::npos ? 0 : atoi(said_.c_str() + at + 7);
            return http == 408 || http == 425 || http == 429 || http >= 500;
        }
        for (const int one : {5, 6, 7, 16, 18, 28, 35, 52, 55, 56, 92, 95})
            if (status == one) return true;
        return false;
    }
    // The last lines of the command's messages.
    std::string last_lines(size_t most) const {
        std::string lines = said_;
        lines.erase(lines.find_last_not_of(" \t\r\n") + 1);
        size_t begin = lines.size();
        for (size_t i = 0; i < most && begin != std::string::npos && begin > 0; i++) begin = lines.rfind('\n', begin - 1);
        return lines.substr(begin == std::string::npos ? 0 : begin + (begin > 0));
    }
    [[noreturn]] void fail_command(int status) const {
        const std::string said = last_lines(4);
        throw AddressUnreadable(
            format("cannot read %s after %s: %s ended with status %d%s%s; HINT: run it in a shell: %s >/dev/null",
                   address_.c_str(), counted(position_, "byte").c_str(), command_.words(address_, 0)[0].c_str(), status,
                   said.empty() ? "" : ":\n  ", said.c_str(), shell_command(command_.words(address_, 0)).c_str()));
    }
    [[noreturn]] void fail_changed() const {
        throw AddressUnreadable(format("%s has changed while it was read, at byte %s; HINT: start again", address_.c_str(),
                                       with_commas(next_).c_str()));
    }

    std::string address_;
    const InputCommand command_;
    StopReading stop_;
    pid_t child_ = -1;
    int out_ = -1, err_ = -1;
    std::string said_;      // the end of the command's messages
    std::string last_;      // the last bytes that were read
    int64_t position_ = 0;  // bytes passed on
    int64_t next_ = 0;      // the command's next byte
    int tries_ = 0;
    bool ranges_ = true, ended_ = false;
};
