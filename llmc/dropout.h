// Counter-based dropout: whether an element is kept is a function of only the run's seed, the place in the model and the
// element's index in the whole run. So masks need no memory, and they are the same when activations are recomputed, after a
// resume, on both backends and in every parallel layout.
//   out = kept ? inp / (1 - rate) : 0;  gradients likewise
// An element is dropped if its 32 random bits (Draws, rng.h) are below rate 2^32. Its index counts from the run's first sample,
// as if one rank computed everything: for activations (sample T + t) C + c; for attention probabilities ((sample NH + head) T +
// t) T + j with the heads of the whole model.
#pragma once
#include <cstdint>

#include "base/rng.h"
#include "base/types.h"

struct Dropout {
    real rate = 0;                     // below 1; 0: everything is kept
    Draws<RngPurpose::dropout> draws;  // key: the run's seed; tensor: a distinct number for each dropout of the model

    HD real factor() const { return 1 / (1 - rate); }  // of kept elements
    HD uint32_t threshold() const { return (uint32_t)(rate * real(4294967296.0)); }
    HD bool keeps(size_t i) const { return draws.word(i) >= threshold(); }
    // Applies dropout to x, element i, with a weight of 1. A dropped element becomes 0, even if it was not finite.
    HD real apply(size_t i, real x) const { return rate > 0 && !keeps(i) ? real(0) : x * factor(); }
    HD real of(size_t i) const { return apply(i, 1); }
    // The same dropout for the elements from i on.
    Dropout from(size_t i) const {
        Dropout rest = *this;
        if (draws.cols) rest.draws.at += i;
        else rest.draws.first += i;
        return rest;
    }
};
