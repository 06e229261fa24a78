// Months of supervised jobs in seconds: nodes that die, hang, or compute wrong results, networks that fail, programs with a
// fault of their own. The decisions are the program's (run/supervisor.h, and checkpoint/part_choice.h about snapshots in the
// nodes' memory), and so is the reading of the messages with which real jobs end; only jobs, memory and time are simulated.
// Everything follows from a seed.
//   simulate [RUNS [SEED]]   RUNS random jobs, each checked after every ending, then a table of jobs of published sizes
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "../llmc/checkpoint/part_choice.h"
#include "../llmc/run/supervisor.h"

struct Rates {              // per hour
    double crash = 1e-3;    // of a node: its processes die, and the launcher names it
    double hang = 1e-4;     // of a node: it stops working, the others wait for it
    double network = 1e-3;  // of the job: it fails, and nobody knows where
    double lemons = 0.01;   // fraction of nodes that crash 300 times as often
    double sick = 0.0;      // fraction of nodes that compute wrong results, some time
};
struct JobSize {
    int nodes = 8, spares = 2, slots = 8, replica = 8;  // replica: ranks that share one copy of the model
    double hours = 1000, step_seconds = 10, save_every = 1800, start_seconds = 180, notice_seconds = 30, hang_seconds = 600;
    int64_t program_fault = -1;  // the step at which the program itself fails; -1: none
    double snapshot_every = 0;   // seconds; 0: no snapshots
};

struct Result {
    bool finished = false;
    std::string why, problem;  // problem: the broken rule; empty: none
    double hours = 0, effective = 0;
    int restarts = 0, excluded = 0, excluded_well = 0;  // the last: nodes that were neither lemons nor sick
};

class SimulatedJob {
public:
    SimulatedJob(const JobSize& size, const Rates& rates, uint64_t seed) : size_(size), rates_(rates), random_(seed) {
        for (int i = 0; i < size.nodes + size.spares; i++) {
            const std::string host = "n" + std::to_string(i);
            (i < size.nodes ? nodes_ : spares_).push_back({host, size.slots});
            if (chance(rates.lemons)) lemons_.insert(host);
            if (chance(rates.sick)) sick_.insert(host);
        }
    }

    Result run() {
        Supervisor supervisor(
            nodes_, spares_, [this](int ranks) { return fits(ranks); }, rules_);
        Result result;
        const int64_t steps = (int64_t)(size_.hours * 3600 / size_.step_seconds);
        int64_t step = 0, saved = 0, first_saved = 0;  // the last: when the command was started
        while (true) {
            if (!(result.problem = problem_of(supervisor)).empty()) break;
            Ending ending = next_ending(supervisor, steps, step, saved);
            ending.step = step > 0 ? step : -1;
            ending.saved = saved > first_saved;
            const NextStart next = supervisor.after(ending, time_);
            result.problem = problem_of(ending, next, supervisor);
            if (!next.excluded.empty()) {
                result.excluded++;
                result.excluded_well += lemons_.count(next.excluded) + sick_.count(next.excluded) == 0;
                gone_.insert(next.excluded);
            }
            if (!result.problem.empty() || !next.start) {
                result.finished = ending.cause == Cause::done;
                result.why = next.why;
                break;
            }
            time_ += next.wait;
            first_saved = saved;
            step = saved = resumed_step(supervisor, saved);  // in memory: written to the disk
            if (!(result.problem = memory_problem_).empty()) break;
        }
        result.restarts = supervisor.restarts();
        result.hours = time_ / 3600;
        result.effective = (double)step * size_.step_seconds / time_;
        return result;
    }

private:
    bool fits(int ranks) const { return ranks % size_.replica == 0; }
    bool chance(double p) { return std::uniform_real_distribution<double>(0, 1)(random_) < p; }
    double seconds_to(double per_hour) {
        return per_hour > 0 ? 3600 * std::exponential_distribution<double>(per_hour)(random_) : INFINITY;
    }
    size_t pick(size_t n) { return std::uniform_int_distribution<size_t>(0, n - 1)(random_); }

    // Trains from `step` to the next end of the job, whose message it reads as the real command would.
    Ending next_ending(const Supervisor& s, int64_t steps, int64_t& step, int64_t& saved) {
        time_ += size_.start_seconds;
        enum { none, crash, hang, network, wrong, own } kind = none;
        std::string host;
        double seconds = (double)(steps - step) * size_.step_seconds;
        const auto sooner = [&](double at, auto what, const std::string& where) {
            if (at >= seconds) return;
            seconds = at;
            kind = what;
            host = where;
        };
        for (const Node& node : s.nodes()) {
            sooner(seconds_to(rates_.crash * (lemons_.count(node.host) ? 300 : 1)), crash, node.host);
            sooner(seconds_to(rates_.hang), hang, node.host);
            if (sick_.count(node.host)) sooner(seconds_to(0.05), wrong, node.host);
        }
        sooner(seconds_to(rates_.network), network, "");
        if (size_.program_fault > step) sooner((double)(size_.program_fault - step) * size_.step_seconds, own, "");
        const int64_t from = step;
        step += std::llround(seconds / size_.step_seconds);
        const int64_t each = std::max<int64_t>(1, std::llround(size_.save_every / size_.step_seconds));
        if (step / each > from / each) saved = step / each * each;
        remember(s, from, step, kind == crash ? host : "");
        time_ += seconds + (kind == hang ? size_.hang_seconds : kind == none ? 0 : size_.notice_seconds);
        faulty_ = kind == own;
        accused_ = host;
        const int rank = (int)pick((size_t)s.ranks()), all = s.ranks();
        switch (kind) {
            case none: return read_ending(0, "");
            case own: return read_ending(1, "error: loss is not finite three times in a row\n");
            case network:
                return read_ending(1, format("error on rank %d of %d (host %s): ncclRemoteError\n", rank, all,
                                             s.nodes()[pick(s.nodes().size())].host.c_str()));
            case wrong:
                return read_ending(1,
                                   format("error on rank 0 of %d (host n0): since step %lld the weights on rank %d (host %s) "
                                          "have changed in memory without being written; HINT: resume from a checkpoint, "
                                          "without that machine\n",
                                          all, (long long)step, rank, host.c_str()));
            case hang: {
                const std::string other = s.nodes()[pick(s.nodes().size())].host;
                return read_ending(1, format("error: rank 0 of %d (host %s): waited 600 s in reduce_scatter\n"
                                             "  rank 1 of %d (host %s): waiting for 600 s in reduce_scatter\n"
                                             "  rank %d of %d (host %s): computing for 602 s after reduce_scatter\nHINT: \n",
                                             all, other.c_str(), all, other.c_str(), rank, all, host.c_str()));
            }
            case crash: break;
        }
        switch (pick(4)) {
            case 0:
                return read_ending(137, format("mpirun noticed that process rank %d with PID 0 on node %s exited on signal 9 "
                                               "(Killed).\n",
                                               rank, host.c_str()));
            case 1:
                return read_ending(1, format("ORTE has lost communication with a remote daemon.\n"
                                             "  HNP daemon   : [[1,0],0] on node n0\n"
                                             "  Remote daemon: [[1,0],2] on node %s\n",
                                             host.c_str()));
            case 2: return read_ending(137, format("srun: error: %s: task %d: Killed\n", host.c_str(), rank));
            default: return read_ending(1, format("srun: error: Node failure on %s\n", host.c_str()));
        }
    }

    // ---- snapshots in the nodes' memory ----
    // Hosts of the ranks that have parts: one per node or three, which takes less time than all.
    std::vector<std::string> hosts_of_parts(const Supervisor& s) const {
        std::vector<std::string> hosts;
        for (const Node& node : s.nodes())
            for (int k = 0; k < std::min(node.slots, s.nodes().size() > 3 ? 1 : 3) && (int)hosts.size() < s.ranks(); k++)
                hosts.push_back(node.host);
        return hosts;
    }
    static NodeRing ring_of(const std::vector<std::string>& hosts) {
        std::map<std::string, int> numbers;
        std::vector<int> nodes;
        for (const std::string& host : hosts) nodes.push_back(numbers.try_emplace(host, (int)numbers.size()).first->second);
        return NodeRing(nodes);
    }
    // Training from step `from` ends at `step`: sets the parts that nodes have then. Each start has a new, empty directory.
    void remember(const Supervisor& s, int64_t from, int64_t step, const std::string& crashed) {
        memory_.clear();
        published_ = -1;
        if (!size_.snapshot_every) return;
        hosts_ = hosts_of_parts(s);
        const NodeRing ring = ring_of(hosts_);
        const int64_t each = std::max<int64_t>(1, std::llround(size_.snapshot_every / size_.step_seconds));
        const auto save = [&](int64_t at, double fraction) {  // of the ranks, which have published it
            const PartSave id = {at, random_(), (uint32_t)hosts_.size()};
            for (size_t r = 0; r < hosts_.size(); r++) {
                if (!chance(fraction)) continue;
                memory_[hosts_[r]][id].insert((uint32_t)r);
                if (ring.size() == 1) continue;
                for (const int sender : ring.senders((int)r)) memory_[hosts_[r]][id].insert((uint32_t)sender);
            }
        };
        const int64_t newest = step / each * each;
        const bool ends_in_save = newest > from && chance(0.3);
        if (ends_in_save) save(newest, chance(0.5) ? 0 : 0.7);
        const int64_t whole = ends_in_save ? newest - each : newest;
        if (whole > from) save(published_ = whole, 1);
        died_ = chance(0.5) ? crashed : "";  // the machine, with its memory; else only its processes
        memory_.erase(died_);
    }
    // The step from which the next start resumes.
    int64_t resumed_step(const Supervisor& s, int64_t saved) {
        if (!size_.snapshot_every) return saved;
        PartsOfNodes found;
        std::set<std::string> here;
        for (const Node& node : s.nodes()) here.insert(node.host);
        const std::vector<std::string> now(here.begin(), here.end());
        for (size_t n = 0; n < now.size(); n++)
            for (const auto& [id, parts] : memory_[now[n]])
                for (const uint32_t part : parts) found.add(id, part, n);
        std::vector<Resumable> snapshots;
        const std::vector<PartSave> complete = found.complete();
        for (size_t i = 0; i < complete.size(); i++) snapshots.push_back({complete[i].step, Resumable::nodes, i});
        const Resumable first = order_to_resume({saved}, snapshots)[0];
        memory_problem_ = problem_of(first, saved, found, complete, here);
        return first.step;
    }
    std::string problem_of(const Resumable& first, int64_t saved, const PartsOfNodes& found,
                           const std::vector<PartSave>& complete, const std::set<std::string>& here) {
        if (first.step < saved) return "an older step than the newest checkpoint is resumed";
        if (first.where == Resumable::nodes) {
            const PartSave& save = complete[first.save];
            std::map<uint32_t, std::map<int, size_t>> intact;
            std::set<uint32_t> there;
            for (const std::string& host : here)
                if (host != died_) there.insert(memory_[host][save].begin(), memory_[host][save].end());
            for (uint32_t part = 0; part < save.parts; part++) {
                if (!there.count(part)) return "a snapshot with a missing part is resumed";
                for (const size_t node : found.of(save).at(part)) intact[part][(int)node] = 1;
            }
            const auto readers = choose_readers(intact);
            std::map<int, size_t> work;
            for (const auto& [part, reader] : readers) {
                if (!intact[part].count(reader)) return "a rank reads a part that it does not have";
                work[reader]++;
            }
            if (readers.size() != save.parts) return "a part is not read";
        }
        // The newest snapshot that all had published must survive, unless a node and its partner are gone.
        std::vector<std::string> ring;
        for (const std::string& host : hosts_)
            if (ring.empty() || ring.back() != host) ring.push_back(host);
        bool both = false;
        for (size_t i = 0; i < ring.size(); i++) {
            const auto gone = [&](const std::string& host) { return host == died_ || !here.count(host); };
            both |= gone(ring[i]) && gone(ring[(i + 1) % ring.size()]);
        }
        return !both && first.step < published_ ? "a snapshot of which a copy is left is not resumed" : "";
    }

    // ---- the rules ----
    std::string problem_of(const Supervisor& s) const {
        int slots = 0;
        std::set<std::string> used;
        for (const Node& node : s.nodes()) {
            slots += node.slots;
            if (gone_.count(node.host)) return "a node that was excluded is used again";
            if (!used.insert(node.host).second) return "a node is used twice";
        }
        if (s.ranks() > slots) return "there are more ranks than places";
        if (s.ranks() < 1 || !fits(s.ranks())) return "the layout does not fit the ranks";
        if (s.ranks() + size_.replica <= slots && s.ranks() < size_.nodes * size_.slots)
            return "a replica could run and does not";
        return "";
    }
    std::string problem_of(const Ending& e, const NextStart& next, const Supervisor& s) {
        if (e.cause == Cause::done) return next.start ? "a finished run is started again" : "";
        if (e.suspect != accused_) return "the evidence '" + e.evidence + "' accuses " + e.suspect + " instead of " + accused_;
        in_a_row_ = faulty_ ? in_a_row_ + 1 : 0;
        here_ = e.step == at_ ? here_ + 1 : 1;  // several faults at one step by chance look like one of the program
        at_ = e.step;
        if (in_a_row_ > rules_.same_step) return "a fault of the program is started once more";
        idle_ = e.saved ? 0 : idle_ + 1;
        if (next.start && idle_ > rules_.restarts) return "there are too many restarts without a checkpoint";
        if (!next.start && here_ < rules_.same_step && idle_ <= rules_.restarts && e.cause != Cause::bad_node)
            return "the job is given up: " + next.why;
        if (!next.start) return "";
        if (next.wait < rules_.first_wait || next.wait > rules_.longest_wait) return format("a wait of %g s", next.wait);
        if (e.saved && next.wait > rules_.first_wait) return "a long wait after progress";
        if (idle_ > 1 && next.wait < std::min(2 * waited_, rules_.longest_wait)) return "a wait that does not grow";
        waited_ = next.wait;
        if (e.cause == Cause::bad_node && next.excluded != e.suspect) return "a node with wrong results is used again";
        if (!next.excluded.empty() && next.excluded != e.suspect) return "another node than the accused one is excluded";
        if (!accused_.empty()) {
            auto& times = accusations_[accused_];
            times.push_back(time_);
            const bool twice = times.size() > 1 && times.back() - times[times.size() - 2] <= rules_.strikes_expire;
            if (!next.excluded.empty() && !twice && e.cause != Cause::bad_node)
                return "a node is excluded for one failure a day";
            if (next.excluded.empty() && twice && could_replace(s)) return "a node that fails again and again is kept";
        }
        return "";
    }
    bool could_replace(const Supervisor& s) const {
        return s.ranks() > size_.replica * ((size_.slots + size_.replica - 1) / size_.replica);
    }

    JobSize size_;
    Rates rates_;
    std::mt19937_64 random_;
    SupervisorRules rules_;
    std::vector<Node> nodes_, spares_;
    std::set<std::string> lemons_, sick_, gone_;
    std::map<std::string, std::vector<double>> accusations_;
    std::string accused_;
    std::map<std::string, std::map<PartSave, std::set<uint32_t>>> memory_;  // parts on each host
    std::vector<std::string> hosts_;                                        // of the parts
    std::string died_, memory_problem_;
    int64_t published_ = -1;  // the newest snapshot of which all have all
    bool faulty_ = false;
    int in_a_row_ = 0, here_ = 0, idle_ = 0;
    int64_t at_ = -2;
    double time_ = 0, waited_ = 0;
};

int main(int argc, char** argv) {
    const int runs = argc > 1 ? atoi(argv[1]) : 2000;
    const uint64_t seed = argc > 2 ? strtoull(argv[2], nullptr, 10) : 1;
    int finished = 0, given_up = 0;
    double hours = 0;
    for (int i = 0; i < runs; i++) {
        std::mt19937_64 random(seed + (uint64_t)i);
        const auto among = [&](std::initializer_list<double> values) { return values.begin()[random() % values.size()]; };
        JobSize size;
        size.nodes = (int)among({1, 2, 3, 8, 40});
        size.spares = (int)among({0, 1, 5});
        size.replica = (int)among({1, 4, 8, 16});
        if (size.nodes * size.slots % size.replica) size.replica = 8;
        size.hours = among({1, 50, 500});
        size.save_every = among({60, 1800, 7200});
        size.snapshot_every = among({0, 30, 300});
        if (size.snapshot_every > 0) size.hours = std::min(size.hours, 50.0);  // such jobs survive very many failures
        const Rates rates = {among({1e-4, 1e-2, 0.3}), among({0, 1e-3}), among({0, 1e-3, 0.3}), among({0, 0.1}),
                             among({0, 0.1})};
        if (random() % 4 == 0) size.program_fault = 1 + (int64_t)(random() % (uint64_t)(size.hours * 360));
        const Result r = SimulatedJob(size, rates, seed + (uint64_t)i).run();
        if (!r.problem.empty()) {
            printf("FAILED: simulated job of seed %llu: %s\n", (unsigned long long)(seed + (uint64_t)i), r.problem.c_str());
            return 1;
        }
        (r.finished ? finished : given_up)++;
        hours += r.hours;
    }
    printf("ok: %d simulated jobs, %.0f hours: %d finished, %d given up, every rule held\n", runs, hours, finished, given_up);

    // Llama 3 405B: 419 unexpected interruptions in 54 days on 2,048 nodes (its paper, section 3.3.4).
    JobSize llama;
    llama.nodes = 2048;
    llama.spares = 64;
    llama.replica = 128;
    llama.hours = 24 * 54;
    Rates rates;
    const double all = 419 / (54.0 * 24 * 2048);
    rates = {0.7 * all, 0.2 * all, 0.1 * all * 2048, 0.002, 0};
    printf("2,048 nodes, 54 days of steps; seconds for\n");
    printf("saving  snapshots  noticing a death, a hang  starting  restarts  effective\n");
    const double rows[][5] = {{1800, 0, 30, 600, 300}, {1800, 0, 30, 600, 60}, {1800, 60, 30, 600, 60}, {300, 0, 30, 600, 60},
                              {60, 0, 30, 600, 60},    {60, 0, 10, 60, 40},    {1800, 60, 10, 60, 40}};
    for (const auto& [save_every, snapshot_every, notice, hang, start] : rows) {
        llama.save_every = save_every;
        llama.snapshot_every = snapshot_every;
        llama.notice_seconds = notice;
        llama.hang_seconds = hang;
        llama.start_seconds = start;
        const Result r = SimulatedJob(llama, rates, seed).run();
        printf("%6.0f %10.0f %17.0f %7.0f %9.0f %9d %9.2f%%\n", save_every, snapshot_every, notice, hang, start, r.restarts,
               100 * r.effective);
    }
    return 0;
}
