// Finds the rank for which the others wait: one whose own work (a step without its waiting) takes over a tenth longer than the
// median of the ranks with the same layers. Stages of a pipeline are not compared, as their work differs. On CPUs; on a GPU the
// streams wait, not the host, which measures.
#pragma once
#include <algorithm>
#include <string>
#include <vector>

#include "../base/math.h"
#include "../base/terminal.h"

class Stragglers {
public:
    // hosts: of all ranks. stages: of the pipeline, each of as many ranks in a row.
    Stragglers(std::vector<std::string> hosts, int stages)
        : hosts_(std::move(hosts)), in_stage_(hosts_.size() / (size_t)stages), worked_ms_(hosts_.size()) {}

    // Adds a step: the milliseconds of every rank's own work. Every ten seconds and 16 steps at least, looks at their means;
    // returns a sentence about the rank that is furthest behind, unless the last one was about the same.
    std::string add(const std::vector<double>& worked_ms, double now) {
        if (steps_++ == 0) since_ = now;
        for (size_t r = 0; r < worked_ms.size(); r++) worked_ms_[r] += worked_ms[r];
        if (steps_ < 16 || now - since_ < 10) return "";
        const Found found = furthest_behind();
        for (double& ms : worked_ms_) ms /= (double)steps_;
        std::string sentence;
        if (found.rank >= 0 && found.rank != last_)
            sentence = format(
                "rank %d on %s is the slowest: its own work takes %.1f ms a step, %.0f%% more than the median %.1f ms of those "
                "with the same layers, who wait for it",
                found.rank, hosts_[(size_t)found.rank].c_str(), worked_ms_[(size_t)found.rank], 100 * (found.ratio - 1),
                worked_ms_[(size_t)found.rank] / found.ratio);
        last_ = found.rank;
        std::fill(worked_ms_.begin(), worked_ms_.end(), 0);
        steps_ = 0;
        return sentence;
    }

private:
    struct Found {
        int rank = -1;  // none
        double ratio = 1.1;
    };
    Found furthest_behind() const {
        Found found;
        for (size_t first = 0; first < worked_ms_.size(); first += in_stage_) {
            const auto begin = worked_ms_.begin() + (std::ptrdiff_t)first;
            const double usual = median({begin, begin + (std::ptrdiff_t)in_stage_});
            for (size_t r = first; r < first + in_stage_; r++)
                if (worked_ms_[r] > found.ratio * usual) found = {(int)r, worked_ms_[r] / usual};
        }
        return found;
    }

    std::vector<std::string> hosts_;
    size_t in_stage_;
    std::vector<double> worked_ms_;  // since `since_`, in `steps_` steps
    double since_ = 0;
    int64_t steps_ = 0;
    int last_ = -1;
};
