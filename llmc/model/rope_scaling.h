// Rotary positions beyond the length of a model's first training: frequencies of the pairs, and the factor on cos and sin, as
// in transformers' ROPE_INIT_FUNCTIONS. Pair j of a head with `rotated` rotated numbers turns by base^(-2j / rotated) per
// position; f is a frequency, T0 the length of the first training.
//   linear    f / factor: positions are interpolated (Chen et al., 2023)
//   dynamic   for a sequence of T > T0 tokens the base grows by (factor T / T0 - (factor - 1))^(rotated / (rotated - 2))
//             ("NTK-aware")
//   yarn      f / factor for slow pairs, f for fast ones, a ramp between; cos and sin grow (Peng et al., 2023)
//   llama3    f / factor for wavelengths above T0 / low_freq_factor, f below T0 / high_freq_factor, smooth between
//   longrope  f / short_factor[j] up to T0 tokens, f / long_factor[j] for longer sequences; cos and sin grow (Ding et al.,
//             2024)
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "../base/math.h"

struct RopeScaling {
    enum class Type { none, linear, dynamic, yarn, llama3, longrope };
    Type type = Type::none;
    double factor = 1;
    int original = 0;                                         // T0
    double low_freq_factor = 1, high_freq_factor = 4;         // llama3
    double beta_fast = 32, beta_slow = 1;                     // yarn: turns within T0 at the two ends of the ramp
    double mscale = 0, mscale_all_dim = 0;                    // yarn: if both are above 0, another attention factor
    bool truncate = true;                                     // yarn: the ramp starts and ends at whole pairs
    double attention_factor = 0;                              // yarn, longrope: on cos and sin; 0: derived from the factor
    std::vector<double> short_factor = {}, long_factor = {};  // (rotated / 2) longrope
};

// Cos and sin for sequences of up to T tokens: the run's length, which may be less than the model's longest.
struct RopeTable {
    int T, rotated;
    double base;
    RopeScaling scaling;
};

namespace detail {

inline double yarn_attention(double factor, double mscale) { return factor <= 1 ? 1 : 0.1 * mscale * std::log(factor) + 1; }

// The pair that turns `turns` times in the length of the first training.
inline double yarn_pair(const RopeTable& r, double turns) {
    return r.rotated * std::log(r.scaling.original / (turns * 2 * M_PI)) / (2 * std::log(r.base));
}

inline void scale_yarn(const RopeTable& r, std::vector<double>& frequencies) {
    const RopeScaling& s = r.scaling;
    double low = yarn_pair(r, s.beta_fast), high = yarn_pair(r, s.beta_slow);
    if (s.truncate) {
        low = std::floor(low);
        high = std::ceil(high);
    }
    low = std::max(low, 0.0);
    high = std::min(high, r.rotated - 1.0);
    if (low == high) high += 0.001;
    for (size_t j = 0; j < frequencies.size(); j++) {
        const double slow = std::min(1.0, std::max(0.0, ((double)j - low) / (high - low)));
        frequencies[j] = frequencies[j] / s.factor * slow + frequencies[j] * (1 - slow);
    }
}

inline void scale_llama3(const RopeScaling& s, std::vector<double>& frequencies) {
    for (double& f : frequencies) {
        const double turns = s.original * f / (2 * M_PI);  // in the length of the first training
        if (turns < s.low_freq_factor) f /= s.factor;
        else if (turns <= s.high_freq_factor) {
            const double smooth = (turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor);
            f = (1 - smooth) * f / s.factor + smooth * f;
        }
    }
}

}  // namespace detail

// The angle per position of each pair, (rotated / 2).
inline std::vector<double> rope_frequencies(const RopeTable& r) {
    using Type = RopeScaling::Type;
    const RopeScaling& s = r.scaling;
    double base = r.base;
    if (s.type == Type::dynamic && r.T > s.original && r.rotated > 2)
        base *= std::pow(s.factor * r.T / s.original - (s.factor - 1), r.rotated / (r.rotated - 2.0));
    std::vector<double> frequencies;
    for (int j = 0; j < r.rotated / 2; j++) frequencies.push_back(std::pow(base, -2.0 * j / r.rotated));
    if (s.type == Type::yarn) detail::scale_yarn(r, frequencies);
    if (s.type == Type::llama3) detail::scale_llama3(s, frequencies);
    const std::vector<double>& factors = r.T > s.original ? s.long_factor : s.short_factor;
    for (size_t j = 0; j < frequencies.size(); j++) {
        if (s.type == Type::linear) frequencies[j] /= s.factor;
        if (s.type == Type::longrope) frequencies[j] /= factors[j];
    }
    return frequencies;
}

// The factor on cos and sin.
inline double rope_attention_factor(const RopeScaling& s) {
    using Type = RopeScaling::Type;
    if (s.attention_factor != 0) return s.attention_factor;
    if (s.type == Type::longrope && s.factor > 1) return std::sqrt(1 + std::log(s.factor) / std::log((double)s.original));
    if (s.type != Type::yarn) return 1;
    if (s.mscale > 0 && s.mscale_all_dim > 0)
        return detail::yarn_attention(s.factor, s.mscale) / detail::yarn_attention(s.factor, s.mscale_all_dim);
    return detail::yarn_attention(s.factor, 1);
}

// table (T, rotated / 2, 2): cos and sin of each position's angles.
inline void rope_table(std::vector<real>& table, const RopeTable& r) {
    rope_table(table, r.T, rope_frequencies(r), rope_attention_factor(r.scaling));
}
