// While some ranks work for longer than the limit on waiting, all ranks exchange messages once a second: working ones at their
// next tick, the others at once.
#pragma once
#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "../base/clock.h"
#include "world.h"

class Rounds {
public:
    explicit Rounds(World& world) : world_(world) {}
    std::function<void()> tick() {
        return [this] {
            const double most = world_.timeout() > 0 ? std::min(1.0, world_.timeout() / 4) : 1;
            if (monotonic_seconds() - last_ < most) return;
            world_.all_gather(busy);
            last_ = monotonic_seconds();
        };
    }
    // The results of all ranks, when the last one has ended its work.
    std::vector<std::string> end(const std::string& result) {
        while (true) {
            std::vector<std::string> all = world_.all_gather(result);
            if (std::find(all.begin(), all.end(), busy) == all.end()) return all;
        }
    }

private:
    inline static const std::string busy = "busy";
    World& world_;
    double last_ = monotonic_seconds();
};
