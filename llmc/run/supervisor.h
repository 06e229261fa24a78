// Decides what happens when a job of many ranks has ended by itself: start it again, on which nodes, after which wait, or give
// up. Pure decisions, without processes, files or clocks: commands/supervise_command.h applies them to real jobs,
// test/simulate.cpp to months of simulated ones.
//   read_ending   from the exit status and the last lines on stderr: the cause, and the host that caused it
//   Supervisor    the decisions
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "../base/check.h"
#include "../base/text.h"

// A machine and the ranks that it can run.
struct Node {
    std::string host;
    int slots = 1;
};

enum class Cause {
    done,          // the run is finished, or stopped as it was asked to
    command_line,  // the options are wrong
    bad_node,      // memory changed by itself, replicas differ, or the node failed its check
    hung,          // a wait took too long
    killed,        // a process or its node disappeared
    failed,        // anything else
};

struct Ending {
    Cause cause = Cause::failed;
    std::string suspect;   // the host that caused it; empty: unknown
    std::string evidence;  // the line that says so
    int64_t step = -1;     // the newest step in the log; -1: none
    bool saved = false;    // since its start the job has saved a checkpoint
};

namespace detail {

// The text between `before` and `after`; empty if they are not there.
inline std::string text_between(const std::string& line, const std::string& before, const std::string& after) {
    const size_t begin = line.find(before);
    if (begin == std::string::npos) return "";
    const size_t from = begin + before.size(), to = line.find(after, from);
    return to == std::string::npos ? "" : line.substr(from, to - from);
}
inline bool has_text(const std::string& line, const char* text) { return line.find(text) != std::string::npos; }

// The host that a launcher names as the place of a process that died, or of its own lost daemon. Formats: Open MPI 4 and 5,
// srun.
inline std::string host_of_death(const std::string& line) {
    if (has_text(line, "exited on signal")) return text_between(line, "on node ", " ");
    if (has_text(line, "Remote daemon:")) return text_between(line + " ", "on node ", " ");
    if (has_text(line, "Node failure on ")) return text_between(line + " ", "Node failure on ", " ");
    const bool dies = has_text(line, ": Killed") || has_text(line, ": Segmentation fault") || has_text(line, ": Bus error");
    return dies ? text_between(line, "srun: error: ", ":") : "";
}

// The host named in a message after "error: " or "error on RANK: "; empty if there are several, or none.
inline std::string only_host_in(const std::string& line) {
    std::string found;
    for (size_t at = line.find(": "); at != std::string::npos && (at = line.find("(host ", at)) != std::string::npos; at++) {
        const std::string host = text_between(line.substr(at), "(host ", ")");
        if (!found.empty() && found != host) return "";
        found = host;
    }
    return found;
}
// The host of the rank that reports an error about itself: "error on rank 3 of 8 (host n2): ..."
inline std::string host_of_reporter(const std::string& line) {
    return text_between(line.substr(0, line.find(": ")), "(host ", ")");
}

// The host of the ranks that do not wait in the report of a hang (world.h); empty if they are on several hosts, or none is.
inline std::string host_of_hang(const std::vector<std::string>& lines) {
    std::string found;
    for (const std::string& line : lines) {
        const std::string host = text_between(line, "(host ", ")");
        if (line.compare(0, 7, "  rank ") != 0 || host.empty() || has_text(line, "waiting for ")) continue;
        if (!found.empty() && found != host) return "";
        found = host;
    }
    return found;
}

}  // namespace detail

// status: the job's exit status. tail: the end of its output on stderr.
inline Ending read_ending(int status, const std::string& tail) {
    using namespace detail;
    Ending ending;
    if (status == 0) {
        ending.cause = Cause::done;
        return ending;
    }
    std::vector<std::string> lines;
    std::istringstream text(tail);
    for (std::string line; std::getline(text, line);) lines.push_back(line);
    // The first line that explains most: a bad node before a hang, a hang before a death that may follow from it.
    const auto explain = [&](Cause cause, const std::string& host, const std::string& line) {
        const bool explained = ending.cause < cause || (ending.cause == cause && (host.empty() || !ending.suspect.empty()));
        if (!ending.evidence.empty() && explained) return;
        ending.cause = cause;
        ending.suspect = host;
        ending.evidence = line;
    };
    for (const std::string& line : lines) {
        const bool error = begins_with(line, "error: ") || begins_with(line, "error on rank ");
        const bool wrong = has_text(line, "without that machine") || has_text(line, "nondeterministic: replace it");
        if (error && wrong) explain(Cause::bad_node, only_host_in(line), line);
        else if (error && has_text(line, ": waited ")) explain(Cause::hung, host_of_hang(lines), line);
        else if (const std::string died = host_of_death(line); !died.empty()) explain(Cause::killed, died, line);
        else if (error && has_text(line, "CUDA") && !has_text(line, "out of memory"))
            explain(Cause::failed, host_of_reporter(line), line);
        else if (error) explain(Cause::failed, "", line);
    }
    if (status == 2) ending.cause = Cause::command_line;
    if (ending.evidence.empty() && status > 128) ending.cause = Cause::killed;
    if (ending.evidence.empty()) ending.evidence = format("exit status %d, without an error message", status);
    return ending;
}

struct SupervisorRules {
    int restarts = 20;                  // in a row without a new checkpoint, after which it gives up
    double first_wait = 10;             // seconds before a restart, doubled after each further start without a new checkpoint
    double longest_wait = 600;          // seconds
    int same_step = 3;                  // endings at one step, without one suspect, after which the program is at fault
    int strikes = 2;                    // endings that name a host, after which it is no longer used
    double strikes_expire = 24 * 3600;  // seconds
};

struct NextStart {
    bool start = false;
    double wait = 0;  // seconds before the start
    std::string why;
    std::string excluded, replaced_by;  // hosts; empty: none
};

class Supervisor {
public:
    // fits(n): whether the run's layout works on n ranks.
    Supervisor(std::vector<Node> nodes, std::vector<Node> spares, std::function<bool(int)> fits, SupervisorRules rules = {})
        : nodes_(std::move(nodes)), spares_(std::move(spares)), fits_(std::move(fits)), rules_(rules), ranks_(slots()) {}

    const std::vector<Node>& nodes() const { return nodes_; }
    int ranks() const { return ranks_; }
    int restarts() const { return restarts_; }

    // time: seconds, of a clock that only moves forward.
    NextStart after(const Ending& ending, double time) {
        NextStart next;
        if (ending.cause == Cause::done) return stop(next, "the run has ended");
        if (ending.cause == Cause::command_line) return stop(next, "the command line is wrong");
        idle_ = ending.saved ? 0 : idle_ + 1;
        if (idle_ > rules_.restarts)
            return stop(next, format("it was restarted %d times without a new checkpoint (--restarts)", rules_.restarts));
        if (repeats(ending) >= rules_.same_step)
            return stop(next, ending.step < 0
                                  ? format("it ended %d times in a row before its first step", repeats_)
                                  : format("it ended %d times in a row at step %lld", repeats_, (long long)ending.step));
        if (!ending.suspect.empty() && is_used(ending.suspect)) {
            std::vector<double>& strikes = strikes_[ending.suspect];
            strikes.push_back(time);
            strikes.erase(
                std::remove_if(strikes.begin(), strikes.end(), [&](double t) { return time - t > rules_.strikes_expire; }),
                strikes.end());
            const bool wrong = ending.cause == Cause::bad_node;
            if ((wrong || (int)strikes.size() >= rules_.strikes) && !exclude(ending.suspect, next) && wrong)
                return stop(next, "node " + ending.suspect + " is broken, and no other nodes fit the layout");
        }
        restarts_++;
        next.start = true;
        next.wait = std::min(std::ldexp(rules_.first_wait, std::max(0, idle_ - 1)), rules_.longest_wait);
        return next;
    }

private:
    int slots() const {
        int sum = 0;
        for (const Node& node : nodes_) sum += node.slots;
        return sum;
    }
    bool is_used(const std::string& host) const {
        return std::any_of(nodes_.begin(), nodes_.end(), [&](const Node& node) { return node.host == host; });
    }
    static NextStart stop(NextStart& next, const std::string& why) {
        next.why = why;
        return next;
    }
    // Endings in a row at the same step that do not all accuse the same host.
    int repeats(const Ending& ending) {
        const bool here = ending.step == last_.step && (ending.suspect.empty() || ending.suspect != last_.suspect);
        repeats_ = repeats_ > 0 && here ? repeats_ + 1 : 1;
        last_ = ending;
        return repeats_;
    }
    // Takes a host out of the job; a spare or fewer ranks replace it. Returns false and changes nothing if neither is possible.
    bool exclude(const std::string& host, NextStart& next) {
        const auto node = std::find_if(nodes_.begin(), nodes_.end(), [&](const Node& n) { return n.host == host; });
        const auto spare = std::find_if(spares_.begin(), spares_.end(), [&](const Node& n) { return n.slots >= node->slots; });
        if (spare != spares_.end()) {
            next.replaced_by = spare->host;
            *node = *spare;
            spares_.erase(spare);
        } else {
            int ranks = std::min(ranks_, slots() - node->slots);
            while (ranks > 0 && !fits_(ranks)) ranks--;
            if (ranks <= 0) return false;
            nodes_.erase(node);
            ranks_ = ranks;
        }
        next.excluded = host;
        return true;
    }

    std::vector<Node> nodes_, spares_;
    std::function<bool(int)> fits_;
    SupervisorRules rules_;
    int ranks_, restarts_ = 0, repeats_ = 0;
    int idle_ = 0;  // starts in a row that saved no checkpoint
    Ending last_;
    std::map<std::string, std::vector<double>> strikes_;
};
