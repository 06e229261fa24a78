// Where the time of every rank goes, its own work or waiting for others, and the rank for which the others wait: one whose own
// work takes over a tenth longer than the median of the ranks with the same layers. Stages of a pipeline are not compared, as
// their work differs. What counts as waiting: on CPUs the host's time in operations of several ranks; on GPUs that and, by
// events, the time in which these keep the stream of the ops (comm_gpu.cuh).
#pragma once
#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../base/math.h"
#include "../base/terminal.h"
#include "../report/logger.h"

class Stragglers {
public:
    // hosts: of all ranks. stages: of the pipeline, each of as many ranks in a row.
    Stragglers(std::vector<std::string> hosts, int stages)
        : in_stage_(hosts.size() / (size_t)stages), sums_{0, std::move(hosts), {}, -1} {
        sums_.ranks.resize(sums_.hosts.size());
    }

    // Adds a step: the times of every rank. Every ten seconds and `enough` steps at least, returns their means.
    std::optional<RankTimes> add(const std::vector<RankTime>& ranks, double now) {
        if (sums_.steps++ == 0) since_ = now;
        for (size_t r = 0; r < ranks.size(); r++) {
            sums_.ranks[r].worked_ms += ranks[r].worked_ms;
            sums_.ranks[r].waited_ms += ranks[r].waited_ms;
        }
        if (sums_.steps < enough || now - since_ < 10) return {};
        return means();
    }
    // At the end of a run: the means of the steps that are left, unless they are few after others. Few name no slowest rank.
    std::optional<RankTimes> rest() {
        if (sums_.steps < (told_ ? enough : 1)) return {};
        return means();
    }

    // About the slowest rank; empty if it is hardly slower than others, or if the last sentence was about the same.
    std::string sentence(const RankTimes& means) {
        const int rank = means.slowest;
        const double worked = rank < 0 ? 0 : means.ranks[(size_t)rank].worked_ms, usual = rank < 0 ? 0 : usual_ms(means, rank);
        if (std::exchange(last_, rank) == rank || rank < 0) return "";
        return format(
            "rank %d on %s is the slowest: its own work takes %.1f ms a step, %.0f%% more than the median %.1f ms of those "
            "with the same layers, who wait for it",
            rank, means.hosts[(size_t)rank].c_str(), worked, 100 * (worked / usual - 1), usual);
    }

private:
    RankTimes means() {
        RankTimes means = sums_;
        for (RankTime& t : means.ranks) {
            t.worked_ms /= (double)means.steps;
            t.waited_ms /= (double)means.steps;
        }
        double most = 1.1;
        for (int r = 0; r < (int)means.ranks.size() && means.steps >= enough; r++)
            if (const double ratio = means.ranks[(size_t)r].worked_ms / usual_ms(means, r); ratio > most) {
                most = ratio;
                means.slowest = r;
            }
        std::fill(sums_.ranks.begin(), sums_.ranks.end(), RankTime());
        sums_.steps = 0;
        told_ = true;
        return means;
    }
    // The median of the ranks with this one's layers.
    double usual_ms(const RankTimes& means, int rank) const {
        std::vector<double> worked;
        const size_t first = (size_t)rank / in_stage_ * in_stage_;
        for (size_t r = first; r < first + in_stage_; r++) worked.push_back(means.ranks[r].worked_ms);
        return median(std::move(worked));
    }

    static constexpr int64_t enough = 16;
    size_t in_stage_;
    RankTimes sums_;  // since `since_`
    double since_ = 0;
    bool told_ = false;  // means, at least once
    int last_ = -1;
};
