// The time of a training step on this machine, from a second of steps on a part of one.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "../base/clock.h"
#include "../base/math.h"
#include "../model/adapters.h"
#include "../model/flops.h"
#include "../model/model_config.h"
#include "../model/parameters.h"

struct MicroBatchShape {
    ModelConfig c;
    int B, T;
    double flops() const { return model_flops_per_token(c, T) * B * T; }
};

// A micro-batch like `whole`, with fewer samples, layers and tokens, so that it needs at most `most_flops`, and if necessary
// with smaller matrices, so that bytes(part) are at most `most_bytes`.
template <class Bytes>
MicroBatchShape part_to_measure(const MicroBatchShape& whole, double most_flops, size_t most_bytes, Bytes bytes) {
    MicroBatchShape part = whole;
    ModelConfig& c = part.c;
    c.L = std::min(c.L, 4);
    while (part.B > 1 && part.flops() > most_flops) part.B /= 2;
    while (c.L > 1 && part.flops() > most_flops) c.L--;
    while (part.T > 64 && part.flops() > most_flops) part.T = (part.T + 1) / 2;
    while (c.L > 1 && bytes(part) > most_bytes) c.L--;
    while (c.C > 64 && bytes(part) > most_bytes) {
        c.V = ceil_div(c.V, 2);
        c.Vp = round_up(c.V, 128);
        c.F = round_up(ceil_div(c.F, 2), 64);
        if (c.mixture.width) c.mixture.width = round_up(ceil_div(c.mixture.width, 2), 64);
        if (c.NH % 2 == 0 && c.NKV % 2 == 0) {
            c.C /= 2;
            c.NH /= 2;
            c.NKV /= 2;
        } else if (c.V < 1024) {
            break;
        }
    }
    return part;
}

// Estimates the time of a step of `samples` here with such micro-batches: from a second of steps on a part of one, scaled by
// their rate. bytes(part): memory for these steps, at most `most_bytes`. begin(part): a pointer to steps, with run(), the
// seconds of the last one (forward, backward, update), and the number of parameters().
template <class Bytes, class Begin>
double measured_step_seconds(const MicroBatchShape& whole, int64_t samples, double peak_flops, size_t most_bytes, Bytes bytes,
                             Begin begin) {
    const double budget = 0.1 * std::max(peak_flops, 1e9);  // of a step: at a third of the peak 0.3 seconds
    const MicroBatchShape part = part_to_measure(whole, budget, most_bytes, bytes);
    const auto step = begin(part);
    step->run();
    std::vector<double> passes, updates;
    for (const double end = monotonic_seconds() + 1; passes.size() < 2 || (monotonic_seconds() < end && passes.size() < 100);) {
        step->run();
        passes.push_back(step->forward + step->backward);
        updates.push_back(step->update);
    }
    const double micro_batches = (double)samples / whole.B;
    return median(passes) * micro_batches * whole.flops() / part.flops() +
           median(updates) * (double)trained_table(whole.c).size / (double)step->parameters();
}
