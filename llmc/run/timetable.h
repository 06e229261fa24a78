// Decides, together with all ranks, when a run saves and when it ends before its last step; the reason and the command to
// resume.
#pragma once
#include <algorithm>
#include <cmath>
#include <fstream>
#include <string>
#include <vector>

#include "../base/check.h"
#include "../base/clock.h"
#include "../base/text.h"
#include "../parallel/world.h"
#include "../report/logger.h"
#include "../options/options.h"
#include "stop.h"
#include "../checkpoint/saver.h"
#include "../checkpoint/training_state.h"

// When the next checkpoint and the end of this process are due.
class Timetable {
public:
    explicit Timetable(const TrainOptions& o) : every_(parse_save_interval(o.save_every)), keep_every_(o.keep_every) {
        const char *const never = "--save-every never", *const why = "it needs checkpoints";
        refuse_together(every_.never && !o.exit_after.empty(), "--exit-after", never, why);
        refuse_together(every_.never && o.keep_every > 0, "--keep-every", never, why);
        refuse_together(every_.never && o.on_spike == "rollback", "--on-spike rollback", never, why);
        refuse_together(every_.never && o.snapshot_every > 0, "--snapshot-every", never, why);
        if (!o.exit_after.empty()) exit_at_ = program_start + duration_of("--exit-after", o.exit_after);
    }
    bool due_at(int64_t step) const { return due(every_.steps, step) || due(keep_every_, step); }
    bool save_now(int64_t step) const {
        if (due_at(step)) return true;
        return every_.seconds > 0 && monotonic_seconds() - saved_at_ >= every_.seconds;
    }
    bool saves_at_all() const { return !every_.never; }
    bool exit_now() const { return monotonic_seconds() >= exit_at_; }
    void saved() { saved_at_ = monotonic_seconds(); }

private:
    SaveInterval every_;
    int64_t keep_every_;  // steps whose checkpoints are kept permanently, so they must be saved
    double saved_at_ = monotonic_seconds(), exit_at_ = INFINITY;
};

// A joint decision of the ranks after a step: by a signal to any rank, and by rank 0's clock.
struct Decision {
    bool stop, save;
    RunLength length{};  // with --time-budget, when it is chosen
    RankTime time{};     // of the step: reported, not part of the decision
};
// times: receives each rank's.
inline Decision decide_together(World& world, Decision mine, std::vector<RankTime>& times) {
    times = {mine.time};
    if (world.size() == 1) return mine;
    std::vector<Decision> all((size_t)world.size());
    world.all_gather(&mine, sizeof mine, all.data());
    times.clear();
    for (const Decision& d : all) times.push_back(d.time);
    return {std::any_of(all.begin(), all.end(), [](const Decision& d) { return d.stop; }), all[0].save, all[0].length};
}

// The reason why the run stops early, from the first rank that has one.
inline std::string reason_to_stop(World& world, const TrainOptions& o) {
    const std::vector<std::string> signals = world.all_gather(stop_signal());
    for (int r = 0; r < world.size(); r++)
        if (const std::string& signal = signals[r]; !signal.empty())
            return "by " + signal + (world.size() > 1 ? format(" to rank %d", r) : "");
    return "by --exit-after " + o.exit_after;
}

// The command that resumes this run: the one that started it, with --resume auto.
inline std::string resume_command(World& world) {
    std::ifstream words("/proc/self/cmdline");
    Strings command;
    for (std::string word; std::getline(words, word, '\0');) {
        if (word == "--resume" && std::getline(words, word, '\0')) continue;
        if (begins_with(word, "--resume=")) continue;
        command.push_back(word);
    }
    return (world.size() > 1 ? format("%d ranks of ", world.size()) : "") + shell_command(command) + " --resume auto";
}
