// FP8 training of this rank's blocks: which blocks use it, whether FP8 is on now, and the scales of their tensors in the
// backend's memory. Fp8State (fp8_state.h) has the scales of all layers and their history. Codes are stored next to the weights
// and activations that they encode.
#pragma once
#include <cmath>
#include <vector>

#include "../base/check.h"
#include "../fp8.h"
#include "../ops.h"
#include "fp8_state.h"

// One of a Linear's three quantized tensors (fp8_state.h): its format, and its scale and amax in the backend's memory.
struct Fp8Tensor {
    Operand operand = Operand::input;
    size_t index = 0;  // among this rank's tensors
    Fp8 format = Fp8::e4m3;
    float *scale = nullptr, *amax = nullptr;
    ScaleInverse* inverse = nullptr;
    // The destination of its codes, for ops.
    Codes codes(uint8_t* to, uint8_t* transposed) const { return {to, transposed, amax, scale, format}; }
};

struct Fp8Training {
    Fp8Recipe recipe;
    bool after_bf16 = false;        // the run starts with steps in bf16
    bool fast_accumulation = true;  // forward; on a GPU sums then have about 14 bits
    bool fast_backward = false;
    bool keeps_transposes = true;             // of the weights' codes; else each is made before its product, in `transposed`
    uint8_t* transposed = nullptr;            // (largest weight)
    std::vector<char> blocks;                 // by block of this rank: computed in FP8 when `on`
    bool on = false;                          // for this step; evaluation and generation use bf16
    bool measuring = false;                   // bf16, but amax is recorded
    bool current = false;                     // scales come from the tensors themselves
    std::vector<char> prepared;               // blocks whose weights were quantized or measured in this step
    float *scale = nullptr, *amax = nullptr;  // (blocks, 12) see fp8_index
    ScaleInverse* inverse = nullptr;          // (blocks, 12)
    float* now = nullptr;                     // amax of one tensor
    struct Count {
        int64_t codes = 0, zero = 0, largest = 0;
    };
    std::vector<Count> counts;  // (blocks, 12) while every layer is examined; else empty

    size_t tensors() const { return blocks.size() * fp8_tensors; }
    Fp8Tensor tensor(int block, Matrix matrix, Operand operand) const {
        const size_t i = fp8_index(block, matrix, operand);
        return {operand, i, recipe.format(operand), scale + i, amax + i, inverse + i};
    }
};

// The index of this rank's i-th FP8 tensor among the tensors of all layers. layers: this rank's.
inline size_t among_all_layers(const std::vector<int>& layers, size_t i) {
    return (size_t)layers[i / fp8_tensors] * fp8_tensors + i % fp8_tensors;
}

// Counts the elements that became zero, and those clipped to the largest number, of codes and of the numbers of codes.
inline void count_numbers(be::Ctx& ctx, Fp8Training::Count& count, const floatX* numbers, FilledRows rows, Fp8 format) {
    int filled = rows.rows;
    if (rows.filled) be::download(ctx, &filled, rows.filled, sizeof filled);
    std::vector<floatX> host((size_t)filled * (size_t)rows.columns);
    be::download(ctx, host.data(), numbers, host.size() * sizeof(floatX));
    count.codes += (int64_t)host.size();
    for (const floatX x : host) {
        count.zero += (float)x == 0;
        count.largest += std::abs((float)x) == fp8_max(format);
    }
}
inline void count_codes(be::Ctx& ctx, Fp8Training::Count& count, const uint8_t* codes, size_t n, Fp8 format) {
    std::vector<uint8_t> host(n);
    be::download(ctx, host.data(), codes, n);
    const uint8_t largest = fp8_encode(fp8_max(format), format);
    count.codes += (int64_t)n;
    for (const uint8_t code : host) {
        count.zero += (code & 0x7f) == 0;
        count.largest += (code & 0x7f) == largest;
    }
}
// Decides whether this step is in FP8 or measures amax for later steps; sets its scales. start: the first step in FP8.
inline void begin_step_in_fp8(be::Ctx& ctx, Fp8Training& f, const Fp8State& state, const std::vector<int>& layers, int64_t step,
                              int64_t start, int64_t calibration_steps) {
    if (!f.recipe.on) return;
    f.on = step >= start;
    CHECK(f.on || f.after_bf16, "no memory was planned for step %lld in bf16", (long long)step);
    f.measuring = !f.on && step >= start - calibration_steps;
    f.current = f.recipe.current || state.measured() == 0;
    f.prepared.assign(f.prepared.size(), false);
    be::clear(ctx, f.amax, f.tensors() * sizeof(float));
    if (!f.on || f.current) return;
    std::vector<float> scales;
    std::vector<ScaleInverse> inverses;
    for (size_t i = 0; i < f.tensors(); i++) {
        scales.push_back(state.scales[among_all_layers(layers, i)]);
        inverses.push_back({1.0f / scales.back()});
    }
    be::upload(ctx, f.scale, scales.data(), scales.size() * sizeof(float));
    be::upload(ctx, f.inverse, inverses.data(), inverses.size() * sizeof(ScaleInverse));
}

// amax of all layers' tensors: this rank's entries; 0 where a tensor was not measured.
inline std::vector<float> measured_amax(be::Ctx& ctx, const Fp8Training& f, const std::vector<int>& layers,
                                        size_t all_tensors) {
    std::vector<float> mine(f.tensors()), all(all_tensors, 0.0f);
    be::download(ctx, mine.data(), f.amax, mine.size() * sizeof(float));
    for (size_t i = 0; i < mine.size(); i++) all[among_all_layers(layers, i)] = mine[i];
    return all;
}
