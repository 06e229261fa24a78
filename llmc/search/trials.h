// Trials of layouts: short trainings by this same program, each in separate processes, so that one that dies, hangs or runs out
// of memory is counted and the next one is tried.
#pragma once
#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "../base/check.h"
#include "../base/file.h"
#include "../base/math.h"
#include "../base/clock.h"
#include "../base/process.h"
#include "../parallel/world.h"
#include "../report/run_log.h"

// True if there is a launcher of ranks and this program was built to use it.
inline bool can_start_ranks() { return HAVE_MPI && is_program("mpirun"); }

// A command in its own session, with input and output in files. It ends with this process, however that ends.
class Apart {
public:
    Apart(const std::vector<std::string>& words, const std::string& input, const std::string& output, double limit_seconds)
        : limit_(limit_seconds), begin_(monotonic_seconds()) {
        child_ = start_process(words, SIGKILL, [&] {
            setsid();
            redirect(STDIN_FILENO, input.c_str(), O_RDONLY);
            redirect(STDOUT_FILENO, output.c_str(), O_WRONLY | O_CREAT | O_TRUNC);
            dup2(STDOUT_FILENO, STDERR_FILENO);
        });
    }
    double seconds() const { return monotonic_seconds() - begin_; }
    void end() { limit_ = std::min(limit_, seconds()); }
    // Its exit status once it has ended, or 128 plus the signal that ended it; -1: it was ended after `limit_seconds`, with all
    // its children.
    std::optional<int> status() {
        int status = 0;
        const pid_t ended = waitpid(child_, &status, WNOHANG);
        if (ended == child_) return asked_ ? -1 : exit_status(status);
        if (ended < 0 && errno != EINTR) fail("a trial cannot be waited for: %s", strerror(errno));
        if (seconds() > limit_ && !asked_) asked_ = kill(-child_, SIGTERM) == 0;  // mpirun forwards it to its ranks
        if (seconds() > limit_ + 5) kill(-child_, SIGKILL);
        return {};
    }

private:
    double limit_, begin_;
    pid_t child_ = 0;
    bool asked_ = false;
};
inline void wait_a_little() { std::this_thread::sleep_for(std::chrono::milliseconds(20)); }

// While it exists, Ctrl-C, SIGTERM and SIGHUP only end trials, with all their ranks, so that they leave no shared memory
// behind; its destructor ends this process by the received signal.
class SignalsHeld {
public:
    SignalsHeld() {
        struct sigaction action = {};
        action.sa_handler = [](int signal) { signal_ = signal; };
        action.sa_flags = SA_RESTART;
        sigemptyset(&action.sa_mask);
        for (size_t i = 0; i < signals.size(); i++) {
            sigaction(signals[i], nullptr, &before_[i]);
            if (before_[i].sa_handler != SIG_IGN) sigaction(signals[i], &action, nullptr);
        }
    }
    ~SignalsHeld() {
        for (size_t i = 0; i < signals.size(); i++) sigaction(signals[i], &before_[i], nullptr);
        if (signal_) raise(signal_);
    }
    SignalsHeld(const SignalsHeld&) = delete;
    SignalsHeld& operator=(const SignalsHeld&) = delete;

    static bool any() { return signal_ != 0; }
    // The exit status of a process once it has ended, as in status(); a signal ends it.
    static std::optional<int> status_of(Apart& process) {
        if (any()) process.end();
        return process.status();
    }
    static int wait_for(Apart& process) {
        while (true) {
            if (const std::optional<int> status = status_of(process)) return *status;
            wait_a_little();
        }
    }

private:
    static constexpr std::array<int, 3> signals = {SIGINT, SIGTERM, SIGHUP};
    static inline std::atomic<int> signal_{0};  // the received signal
    std::array<struct sigaction, 3> before_;
};

// A folder that exists for one trial; after a signal it is removed before this process ends.
class TrialFolder {
    const SignalsHeld held_;

public:
    const std::string path;

    explicit TrialFolder(const std::string& out) : path(format("%s/trials-%d", out.c_str(), (int)getpid())) {
        make_directory(path);
    }
    ~TrialFolder() {
        std::error_code ignored;
        std::filesystem::remove_all(path, ignored);
    }
    TrialFolder(const TrialFolder&) = delete;
    TrialFolder& operator=(const TrialFolder&) = delete;
};

// Why a command failed whose status is not 0, with the error that it printed.
inline std::string why_failed(int status, const std::string& output, double limit_seconds) {
    const std::string why = status == -1   ? format("no end in %.0f s", limit_seconds)
                            : status > 128 ? format("ended by signal %d", status - 128)
                                           : format("exit status %d", status);
    std::ifstream text(output);
    for (std::string line; std::getline(text, line);)
        if (const size_t at = line.find("error"); at != std::string::npos && line.find(": ", at) != std::string::npos)
            return why + ": " + line.substr(line.find(": ", at) + 2);
    return why;
}

inline std::string path_of_this_program() {
    std::error_code error;
    const std::string self = std::filesystem::read_symlink("/proc/self/exe", error).string();
    if (error) fail("this program cannot find itself in /proc: %s", error.message().c_str());
    return self;
}

// The median time of the steps in a run's log except the first; NaN: there are none.
inline double median_step_seconds(const std::string& log) {
    std::vector<double> steps;
    if (std::filesystem::exists(log))
        for_each_line(log, [&](std::string_view line, int64_t) {
            if (StepNumbers step; scan_step(line, step)) steps.push_back(step["step_ms"] / 1e3);
        });
    return steps.size() > 1 ? median(std::vector<double>(steps.begin() + 1, steps.end())) : NAN;
}

// This program with these arguments, on `ranks` ranks.
inline std::vector<std::string> words_on_ranks(int ranks, const std::vector<std::string>& arguments) {
    std::vector<std::string> words;
    if (ranks > 1) words = {"mpirun", "-n", std::to_string(ranks), "--bind-to", "none"};
    words.push_back(path_of_this_program());
    words.insert(words.end(), arguments.begin(), arguments.end());
    return words;
}

struct Trial {
    double seconds = NAN;  // of a step, the median of all but the first; NaN: it failed
    std::string why;       // it failed
};

// Trains with `config` on `ranks` ranks. The file and all output of the training are in `folder`.
inline Trial run_trial(const std::string& config, int ranks, const std::string& folder, double limit_seconds) {
    Trial trial;
    const std::string out = folder + "/run", output = folder + "/output.txt";
    const std::vector<std::string> words = words_on_ranks(ranks, {"train", "--config", config, "--out", out});
    Apart process(words, "/dev/null", output, limit_seconds);
    const int status = SignalsHeld::wait_for(process);
    const double seconds = median_step_seconds(out + "/log.jsonl");
    if (status == 0 && std::isfinite(seconds)) trial.seconds = seconds;
    else trial.why = why_failed(status, output, limit_seconds);
    return trial;
}
