// The load of a mixture's experts over time: a record of every layer for the log, at most some 200 in a run, and events when an
// expert starves. An expert starves if its mean load is below 1/8 of an even share in three records in a row, and recovers with
// the first record that has at least that.
#pragma once
#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../base/check.h"
#include "../report/logger.h"

class ExpertWatch {
public:
    static constexpr double least_share = 1.0 / 8;
    static constexpr int records_to_starve = 3;

    struct Record {
        nlohmann::ordered_json json;
        std::string starving, recovered;  // experts since the last record, "layer 3: 0, 7; layer 5: 2"; empty: none
    };

    // total_steps: 0 if unknown. Returns a record if one is due.
    std::optional<Record> step(const MixtureLoad& load, int64_t step, int64_t total_steps) {
        steps_++;
        sums_.resize(load.layers.size());
        for (size_t i = 0; i < sums_.size(); i++) {
            sums_[i].layer = load.layers[i].layer;
            sums_[i].entropy += load.layers[i].entropy;
            sums_[i].dropped += load.layers[i].dropped;
            sums_[i].load.resize(load.layers[i].load.size());
            for (size_t e = 0; e < sums_[i].load.size(); e++) sums_[i].load[e] += load.layers[i].load[e];
        }
        if (step % (total_steps > 0 ? 1 + total_steps / 200 : 100) != 0 && step != total_steps) return {};
        return take(step);
    }

private:
    Record take(int64_t step) {
        Record r;
        r.json = {{"kind", "experts"}, {"step", step}, {"steps", steps_}, {"layers", nlohmann::ordered_json::array()}};
        const auto n = (double)std::exchange(steps_, 0);
        for (const MixtureLoad::Layer& sum : std::exchange(sums_, {})) {
            nlohmann::ordered_json load = nlohmann::ordered_json::array();
            std::string starving, recovered;
            for (size_t e = 0; e < sum.load.size(); e++) {
                const double share = sum.load[e] / n;
                load.push_back(std::llround(1000 * share));
                int& low = low_[{sum.layer, e}];  // records in a row
                if (share < least_share) starving += ++low == records_to_starve ? named(starving, e) : "";
                else if (std::exchange(low, 0) >= records_to_starve) recovered += named(recovered, e);
            }
            const auto rounded = [&](double x) { return std::round(x / n * 1e4) / 1e4; };
            r.json["layers"].push_back(
                {{"layer", sum.layer}, {"entropy", rounded(sum.entropy)}, {"dropped", rounded(sum.dropped)}, {"load", load}});
            for (const auto& [of_layer, all] : {std::pair(&starving, &r.starving), {&recovered, &r.recovered}})
                if (!of_layer->empty())
                    *all += format("%slayer %d: %s", all->empty() ? "" : "; ", sum.layer, of_layer->c_str());
        }
        return r;
    }
    static std::string named(const std::string& before, size_t e) { return (before.empty() ? "" : ", ") + std::to_string(e); }

    int64_t steps_ = 0;                          // since the last record
    std::vector<MixtureLoad::Layer> sums_;       // over these
    std::map<std::pair<int, size_t>, int> low_;  // of (layer, expert)
};
