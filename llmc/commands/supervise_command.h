// train_gpt supervise [OPTIONS] -- COMMAND: runs a job of many ranks until it is finished. A job that ends by itself, or whose
// log has no news for too long, is started again, without the machine that caused it if that is known; run/supervisor.h
// decides. The job's command resumes by itself (--resume auto).
//   signals   Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 end the job in order, as SIGUSR1 if it is mpirun, then this command
//   records   OUT/supervise.jsonl has a line for each ending
// The job is a process group of its own; processes that it leaves behind are ended, too. Its stderr passes through this
// process, which reads the cause of the end from it.
#pragma once
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "../base/check.h"
#include "../base/clock.h"
#include "../base/file.h"
#include "../base/json.h"
#include "../base/numbers.h"
#include "../base/process.h"
#include "../base/terminal.h"
#include "../base/text.h"
#include "../checkpoint/run_directory.h"
#include "../model/mesh.h"
#include "../options/options.h"
#include "../report/run_log.h"
#include "../run/supervisor.h"

namespace detail {

// "node1:8": 8 ranks on node1; "node1": one.
inline Node read_node(const std::string& word, const char* option) {
    const size_t colon = word.rfind(':');
    const double slots = colon == std::string::npos ? 1 : atof(word.c_str() + colon + 1);
    refuse_value(colon == 0 || word.empty() || slots < 1 || slots > 1e6 || slots != std::floor(slots), option, word,
                 "HOST or HOST:RANKS, such as node1:8");
    return {word.substr(0, colon), (int)slots};
}

inline std::string replace_all(std::string text, const std::string& from, const std::string& to) {
    for (size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size()) text.replace(at, from.size(), to);
    return text;
}
// The command with its placeholders filled in.
inline Strings filled_in(const Strings& words, const Supervisor& supervisor) {
    std::string hosts, names;
    for (const Node& node : supervisor.nodes()) {
        hosts += format("%s%s:%d", hosts.empty() ? "" : ",", node.host.c_str(), node.slots);
        names += (names.empty() ? "" : ",") + node.host;
    }
    Strings filled;
    for (std::string word : words) {
        word = replace_all(word, "{hosts}", hosts);
        word = replace_all(word, "{nodes}", names);
        word = replace_all(word, "{node-count}", std::to_string(supervisor.nodes().size()));
        filled.push_back(replace_all(word, "{ranks}", std::to_string(supervisor.ranks())));
    }
    return filled;
}

// The state of a run, from its log.
struct RunProgress {
    int64_t step = -1;       // the newest; -1: none
    double seconds = 0;      // of all steps that count
    nlohmann::json options;  // of the run; null: unknown
};
inline RunProgress read_progress(const std::string& out) {
    RunProgress progress;
    std::ifstream log(out + "/log.jsonl");
    StepNumbers step;
    for (std::string line; std::getline(log, line);) {
        if (scan_step(line, step)) {
            progress.step = (int64_t)step["step"];
            if (step["step_ms"] > 0) progress.seconds += step["step_ms"] / 1e3;
        } else if (begins_with(line, "{\"kind\":\"run\"") || begins_with(line, "{\"kind\":\"change\"")) {
            const auto record = nlohmann::json::parse(line, nullptr, false);
            if (record.is_object() && record.contains("options")) progress.options = record["options"];
        }
    }
    return progress;
}
// Whether the run's layout works on this number of ranks, which share each global batch evenly.
inline bool layout_fits(const nlohmann::json& options, int ranks) try {
    const auto size = [&](const char* name) { return std::max(1, options.value(name, 1)); };
    const Mesh mesh = make_mesh(ranks, 0, size("tensor-model-parallel-size"), size("pipeline-model-parallel-size"), 1,
                                size("expert-model-parallel-size"), size("context-parallel-size"));
    return size("global-batch-size") % (size("micro-batch-size") * mesh.samples.size) == 0;
} catch (const std::exception&) {  // ranks that cannot be divided, or unknown options
    return false;
}

// Signals that end the job, and this command with it.
class StopRequests {
public:
    StopRequests() {
        struct sigaction action = {};
        action.sa_handler = [](int signal) {
            if (signal == SIGINT) interrupts_ = interrupts_ + 1;
            pending_ = signal;
        };
        sigemptyset(&action.sa_mask);
        for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGUSR1}) sigaction(signal, &action, nullptr);
    }
    static int take() {
        const int signal = pending_;
        pending_ = 0;
        return signal;
    }
    static int interrupts() { return interrupts_; }

private:
    static inline volatile sig_atomic_t pending_ = 0, interrupts_ = 0;
};

// The processes that descend from this one. With become_subreaper() these include those whose parents have ended.
inline std::vector<pid_t> descendants() {
    std::map<pid_t, pid_t> parents;
    std::error_code error;
    for (const auto& entry : std::filesystem::directory_iterator("/proc", error)) {
        const pid_t pid = atoi(entry.path().filename().c_str());
        std::ifstream file(entry.path() / "stat");
        std::string text;
        if (pid <= 0 || !std::getline(file, text)) continue;
        int parent = 0;
        char state = 0;  // "PID (NAME) STATE PARENT ..."; a name may contain anything
        if (sscanf(text.c_str() + std::min(text.size(), text.rfind(')') + 1), " %c %d", &state, &parent) == 2 && state != 'Z')
            parents[pid] = parent;
    }
    std::vector<pid_t> found;
    for (const auto& [pid, parent] : parents) {
        pid_t above = parent;
        while (above > 1 && above != getpid()) {
            const auto next = parents.find(above);
            above = next == parents.end() ? 0 : next->second;
        }
        if (above == getpid()) found.push_back(pid);
    }
    return found;
}
inline void become_subreaper() { prctl(PR_SET_CHILD_SUBREAPER, 1); }
inline bool signal_descendants(int signal) {
    const std::vector<pid_t> all = descendants();
    for (const pid_t pid : all) kill(pid, signal);
    return !all.empty();
}

// A running job.
class Job {
public:
    explicit Job(const Strings& words) : forwards_(is_mpirun(words[0])) {
        int ends[2];
        if (pipe2(ends, O_CLOEXEC) != 0) fail("cannot create a pipe: %s", strerror(errno));
        group_ = start_process(words, stop_signal_of_job(), [&] {
            setpgid(0, 0);
            redirect(STDIN_FILENO, "/dev/null", O_RDONLY);
            dup2(ends[1], STDERR_FILENO);
        });
        setpgid(group_, group_);
        close(ends[1]);
        errors_ = ends[0];
        fcntl(errors_, F_SETFL, O_NONBLOCK);
    }
    // Ends the processes that the job has left behind; kills those that are still there after 30 seconds.
    ~Job() {
        const double begin = monotonic_seconds();
        for (bool any = signal_descendants(SIGTERM); any; any = !descendants().empty()) {
            wait(0.1);
            while (waitpid(-1, nullptr, WNOHANG) > 0) {
            }
            if (monotonic_seconds() - begin > seconds_to_end) signal_descendants(SIGKILL);
        }
        close(errors_);
    }
    Job(const Job&) = delete;
    Job& operator=(const Job&) = delete;

    // Waits up to `seconds` for output or the end. Passes output on and keeps its last part.
    void wait(double seconds) {
        struct pollfd errors = {errors_, POLLIN, 0};
        if (closed_) usleep((useconds_t)(seconds * 1e6));
        else poll(&errors, 1, (int)(seconds * 1e3));
        char text[1 << 14];
        ssize_t n;
        while ((n = read(errors_, text, sizeof text)) > 0) {
            if (write(STDERR_FILENO, text, (size_t)n) < 0) continue;  // nobody reads it: the job is worth more
            tail_.append(text, (size_t)n);
            if (tail_.size() > 2 * kept) tail_.erase(0, tail_.size() - kept);
        }
        closed_ = closed_ || n == 0;
    }
    // Its exit status, or 128 plus the signal that ended it, once it has ended.
    std::optional<int> status() {
        int status = 0;
        const pid_t ended = waitpid(group_, &status, WNOHANG);
        if (ended != group_) return {};
        return exit_status(status);
    }
    void stop_in_order(int signal) { kill(-group_, forwards_ ? stop_signal_of_job() : signal); }
    void end() { kill(-group_, SIGTERM); }
    void end_at_once() { signal_descendants(SIGKILL); }
    const std::string& tail() const { return tail_; }

    static constexpr double seconds_to_end = 30;

private:
    static constexpr size_t kept = 1 << 16;
    static bool is_mpirun(const std::string& word) {
        const std::string name = std::filesystem::path(word).filename().string();
        return name == "mpirun" || name == "mpiexec" || name == "orterun";
    }
    // mpirun forwards SIGUSR1 to its ranks, and kills them soon after any other signal.
    int stop_signal_of_job() const { return forwards_ ? SIGUSR1 : SIGTERM; }

    bool forwards_, closed_ = false;
    pid_t group_ = 0;
    int errors_ = -1;
    std::string tail_;
};

class SuperviseCommand {
public:
    SuperviseCommand(const SuperviseOptions& o, const Strings& command)
        : words_(command), out_(run_of(o, command)), check_(o.check) {
        const auto has = [&](const std::string& text) {
            return std::any_of(words_.begin(), words_.end(), [&](const std::string& w) { return has_text(w, text.c_str()); });
        };
        const bool placed = has("{hosts}") || has("{nodes}");
        refuse_without(placed && o.hosts.empty(), "{hosts}", "--hosts");
        refuse_without(!o.spare.empty() && o.hosts.empty(), "--spare", "--hosts");
        refuse_without(!o.hosts.empty() && (!placed || !has("{ranks}")), "--hosts", "{hosts} and {ranks} in the command",
                       "-- mpirun -n {ranks} --host {hosts} ./train_gpt train ...");
        refuse_without(has("train") && !has("--resume") && !has("--config") && !has(".sh"), "supervise",
                       "--resume auto in the command", "add it, otherwise every restart starts at step 1");
        refuse_without(!o.check.empty() && o.hosts.empty(), "--check", "--hosts");
        refuse_value(!o.check.empty() && !has_text(o.check, "{host}"), "--check", o.check, "a command with {host}");
        const auto nodes = [](const Strings& hosts, const char* option) {
            std::vector<Node> nodes;
            for (const std::string& host : hosts) nodes.push_back(read_node(host, option));
            return nodes;
        };
        const auto duration = [](const char* option, const std::string& text) {
            return parse_duration(text) == 0 ? 0 : duration_of(option, text);
        };
        stall_ = duration("--stall-timeout", o.stall_timeout);
        rules_.restarts = (int)o.restarts;
        rules_.first_wait = duration("--restart-wait", o.restart_wait);
        rules_.longest_wait = std::max(rules_.longest_wait, rules_.first_wait);
        supervisor_.emplace(
            nodes(o.hosts, "--hosts"), nodes(o.spare, "--spare"),
            [this](int ranks) { return layout_fits(progress_.options, ranks); }, rules_);
    }

    // Runs the job until it is finished, is stopped, or cannot continue. Returns the exit status of its last start.
    int run() {
        const StopRequests requests;
        become_subreaper();
        const double begin = monotonic_seconds(), before = progress_.seconds;
        int status = 0;
        while (true) {
            const int64_t saved = latest_step(out_);
            status = run_once();
            progress_ = read_progress(out_);
            if (stopped_) break;
            Ending ending = read_ending(status, tail_);
            if (stalled_) {
                ending.cause = Cause::hung;
                ending.evidence = stalled_text();
            }
            ending.step = progress_.step;
            ending.saved = latest_step(out_) > saved;
            if (ending.cause == Cause::done) break;
            if (!passes_check(ending.suspect)) {
                ending.cause = Cause::bad_node;
                ending.evidence += "; --check fails on " + ending.suspect;
            }
            const NextStart next = supervisor_->after(ending, monotonic_seconds());
            record(status, ending, next);
            if (!next.start) {
                print_line(stderr, "error: supervise gives up: " + next.why + "; the last cause: " + ending.evidence);
                return status ? status : 1;
            }
            pause(next.wait);
            if (stopped_) break;
        }
        const double all = monotonic_seconds() - begin, used = progress_.seconds - before;
        say(format("%s in %s; %.1f%% of that time in steps that count", counted(supervisor_->restarts(), "restart").c_str(),
                   human_duration(all).c_str(), 100 * std::clamp(used / all, 0.0, 1.0)));
        return status;
    }

private:
    // The run's output directory: --run, or --out in the command.
    static std::string run_of(const SuperviseOptions& o, const Strings& command) {
        std::string out = o.run;
        for (size_t i = 0; i < command.size() && o.run.empty(); i++) {
            if (command[i] == "--out" && i + 1 < command.size()) out = command[i + 1];
            if (begins_with(command[i], "--out=")) out = command[i].substr(6);
        }
        refuse_missing(out.empty(), "the run's directory", "--run DIR, or --out DIR in the command");
        return out;
    }
    static void say(const std::string& text) { print_line(stderr, "supervise: " + text); }

    // Starts the job and waits for its end; a job without news is ended.
    int run_once() {
        const Strings words = filled_in(words_, *supervisor_);
        say(format("start %d: ", supervisor_->restarts() + 1) + shell_command(words));
        Job job(words);
        stalled_ = false;
        double news = monotonic_seconds(), killed_at = INFINITY;
        timespec seen = modified();
        std::optional<int> status;
        while (!(status = job.status())) {
            job.wait(0.1);
            if (const int signal = StopRequests::take()) {
                stopped_ = true;
                if (StopRequests::interrupts() > 1) job.end();
                else job.stop_in_order(signal);
            }
            const double now = monotonic_seconds();
            if (const timespec at = modified(); at.tv_sec != seen.tv_sec || at.tv_nsec != seen.tv_nsec) {
                seen = at;
                news = now;
            }
            if (!stalled_ && stall_ > 0 && now - news > stall_) {
                stalled_ = true;
                say(stalled_text() + ": ending the job");
                killed_at = now + Job::seconds_to_end;
                job.end();
            }
            if (now > killed_at) job.end_at_once();
        }
        job.wait(0);
        tail_ = job.tail();
        return *status;
    }
    timespec modified() const {
        struct stat st;
        return stat((out_ + "/log.jsonl").c_str(), &st) == 0 ? st.st_mtim : timespec{};
    }
    std::string stalled_text() const { return "log.jsonl has had no news for " + human_duration(stall_); }

    bool passes_check(const std::string& host) const {
        if (check_.empty() || host.empty()) return true;
        const std::string command = replace_all(check_, "{host}", host);
        say("checking: " + command);
        Job job({"/bin/sh", "-c", command});
        std::optional<int> status;
        while (!(status = job.status())) job.wait(0.1);
        return *status == 0;
    }

    void record(int status, const Ending& e, const NextStart& next) {
        const std::string named = e.suspect.empty() ? "" : " (host " + e.suspect + ")";
        say(format("ended with status %d at step %lld%s: ", status, (long long)e.step, named.c_str()) + e.evidence);
        if (!next.excluded.empty())
            say("node " + next.excluded + " is no longer used; " +
                (next.replaced_by.empty() ? format("%d ranks are left", supervisor_->ranks())
                                          : next.replaced_by + " takes its place"));
        const nlohmann::ordered_json line = {{"time", time(nullptr)},
                                             {"status", status},
                                             {"step", e.step},
                                             {"evidence", e.evidence},
                                             {"host", e.suspect},
                                             {"excluded", next.excluded},
                                             {"replaced_by", next.replaced_by},
                                             {"restarted", next.start},
                                             {"why", next.why},
                                             {"wait", next.wait}};
        std::ofstream(out_ + "/supervise.jsonl", std::ios::app) << json_text(line) << "\n";
    }
    void pause(double seconds) {
        const double end = monotonic_seconds() + seconds;
        if (seconds >= 1) say("restarting in " + human_duration(seconds));
        while (monotonic_seconds() < end && !stopped_) {
            usleep((useconds_t)(1e6 * std::min(0.1, std::max(0.0, end - monotonic_seconds()))));
            stopped_ = StopRequests::take() != 0;
        }
    }

    Strings words_;
    std::string out_, check_, tail_;
    RunProgress progress_ = read_progress(out_);
    SupervisorRules rules_;
    std::optional<Supervisor> supervisor_;
    double stall_ = 0;
    bool stopped_ = false, stalled_ = false;
};

}  // namespace detail

inline int supervise_command(const SuperviseOptions& o, const Strings& command) {
    return detail::SuperviseCommand(o, command).run();
}
