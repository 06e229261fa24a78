// The time of every rank, split into its own work and waiting for others, and the rank for which the others wait: one whose own
// work takes over a tenth longer than the median of the ranks with the same layers. Stages of a pipeline are not compared, as
// their work differs. Waiting is, on CPUs, the host's time in operations of several ranks; on GPUs, measured by events, the
// time that these block the ops' stream (comm_gpu.cuh), or the host's time in the world's messages if that is longer.
#pragma once
#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../base/math.h"
#include "../report/logger.h"

class Stragglers {
public:
    // hosts: of all ranks. stages: of the pipeline, each with equally many consecutive ranks.
    Stragglers(std::vector<std::string> hosts, int stages)
        : in_stage_(hosts.size() / (size_t)stages), sums_{0, std::move(hosts), {}, -1} {
        sums_.ranks.resize(sums_.hosts.size());
    }

    // Adds a step: the times of every rank. Every ten seconds and at least `enough` steps, returns their means.
    std::optional<RankTimes> add(const std::vector<RankTime>& ranks, double now) {
        if (sums_.steps++ == 0) since_ = now;
        for (size_t r = 0; r < ranks.size(); r++) {
            sums_.ranks[r].worked_ms += ranks[r].worked_ms;
            sums_.ranks[r].waited_ms += ranks[r].waited_ms;
        }
        if (sums_.steps < enough || now - since_ < 10) return {};
        return means();
    }
    // At the end of a run: the means of the remaining steps, unless they are few after others. For few steps names no slowest
    // rank.
    std::optional<RankTimes> rest() {
        if (sums_.steps < (told_ ? enough : 1)) return {};
        return means();
    }

    // A sentence about the slowest rank; empty if it is hardly slower than others, or if the last sentence was about the same.
    std::string sentence(const RankTimes& means) {
        const int rank = means.slowest;
        if (std::exchange(last_, rank) == rank || rank < 0) return "";
        const double worked = means.ranks[(size_t)rank].worked_ms, usual = usual_ms(means, (size_t)rank / in_stage_);
        return format(
            "rank %d on %s is the slowest: its own work takes %.1f ms a step, %.0f%% more than the median %.1f ms of ranks "
            "with the same layers, which wait for it",
            rank, means.hosts[(size_t)rank].c_str(), worked, 100 * (worked / usual - 1), usual);
    }

private:
    RankTimes means() {
        RankTimes means = sums_;
        for (RankTime& t : means.ranks) {
            t.worked_ms /= (double)means.steps;
            t.waited_ms /= (double)means.steps;
        }
        if (means.steps >= enough) means.slowest = slowest(means);
        std::fill(sums_.ranks.begin(), sums_.ranks.end(), RankTime());
        sums_.steps = 0;
        told_ = true;
        return means;
    }
    // The rank that is furthest above the median of its stage; -1: none is a tenth above.
    int slowest(const RankTimes& means) const {
        int found = -1;
        double most = 1.1;
        for (size_t stage = 0; stage < means.ranks.size() / in_stage_; stage++) {
            const double usual = usual_ms(means, stage);
            for (size_t r = stage * in_stage_; r < (stage + 1) * in_stage_; r++)
                if (const double worked = means.ranks[r].worked_ms; usual > 0 && worked > most * usual) {
                    most = worked / usual;
                    found = (int)r;
                }
        }
        return found;
    }
    // The median of the ranks of a stage.
    double usual_ms(const RankTimes& means, size_t stage) const {
        std::vector<double> worked;
        for (size_t r = stage * in_stage_; r < (stage + 1) * in_stage_; r++) worked.push_back(means.ranks[r].worked_ms);
        return median(std::move(worked));
    }

    static constexpr int64_t enough = 16;
    size_t in_stage_;
    RankTimes sums_;  // since `since_`
    double since_ = 0;
    bool told_ = false;  // reported means at least once
    int last_ = -1;
};
