// Scalar formulas that the kernels of every backend share, each with its derivative.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <type_traits>
#include <vector>

#include "types.h"

template <class A, class B>
HD constexpr auto ceil_div(A a, B b) {
    return (a + b - 1) / b;
}
template <class A, class B>
HD constexpr auto round_up(A a, B to) {
    return ceil_div(a, to) * to;
}

// True if all n numbers are finite.
template <class E>
bool all_finite(const E* x, size_t n) {
    bool finite = true;
#pragma omp parallel for schedule(static) reduction(& : finite) if (n > 1 << 15)
    for (int64_t i = 0; i < (int64_t)n; i++) finite &= std::isfinite((float)x[i]);
    return finite;
}

// Median of at least one value; of an even number of them, halfway between the middle two.
inline double median(std::vector<double> x) {
    const auto middle = x.begin() + (int64_t)(x.size() / 2);
    std::nth_element(x.begin(), middle, x.end());
    if (x.size() % 2 == 1) return *middle;
    const double below = *std::max_element(x.begin(), middle);
    return below + (*middle - below) / 2;
}

// Mean of at least one value, and its standard error, which is NaN for a single value.
struct MeanWithError {
    double mean, error;
};
inline MeanWithError mean_with_error(const std::vector<double>& x) {
    const double n = (double)x.size(), mean = std::accumulate(x.begin(), x.end(), 0.0) / n;
    double squares = 0;
    for (const double value : x) squares += (value - mean) * (value - mean);
    return {mean, std::sqrt(squares / (n - 1) / n)};
}

// The unsigned integer type with the bits of F, which is a float or a vector of floats (specialized where the vector is
// defined).
template <class F>
struct BitsOf {
    using type = uint32_t;
};

// ---- fp32 weights in two halves --------------------------------------------------------------------------------------------
// `upper` is the nearest bf16, ties away from zero, so that the lower 16 bits show whether it was rounded up (Apex's
// DistributedFusedAdam stores remainders this way). Together they restore the weight bit for bit, with two exceptions: numbers
// below 2^-126 become zero, as in bf16 instructions, and all NaNs become the same one.
template <class F>
struct WeightHalves {
    F upper;
    typename BitsOf<F>::type lower;
};
template <class F>
HD inline WeightHalves<F> weight_halves(F x) {
    typename BitsOf<F>::type bits;
    memcpy(&bits, &x, sizeof bits);
    const auto size = bits & 0x7fffffffu;
    bits = size < 0x00800000u ? bits & 0x80000000u : bits;
    bits = size > 0x7f800000u ? (bits & 0u) + 0x7fff0000u : bits;
    const auto rounded = (bits + 0x8000u) & 0xffff0000u;
    WeightHalves<F> halves;
    memcpy(&halves.upper, &rounded, sizeof rounded);
    halves.lower = bits & 0xffffu;
    return halves;
}
template <class F>
HD inline F whole_weight(F upper, typename BitsOf<F>::type lower) {
    typename BitsOf<F>::type bits;
    memcpy(&bits, &upper, sizeof bits);
    bits = (bits - ((lower & 0x8000u) << 1)) | lower;
    F x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

// Weight i of a tensor stored in two halves.
HD inline float load_weight(const bf16* param, const LowerHalf* lower, size_t i) {
    return whole_weight((float)param[i], lower[i]);
}
HD inline void store_weight(bf16* param, LowerHalf* lower, size_t i, float x) {
    const WeightHalves<float> halves = weight_halves(x);
    param[i] = halves.upper;
    lower[i] = (LowerHalf)halves.lower;
}
template <class F>
HD F load_weight(const F* param, const LowerHalf*, size_t i) {
    return param[i];
}
template <class F>
HD void store_weight(F* param, LowerHalf*, size_t i, F x) {
    param[i] = x;
}

// The parameter that store_weight computes from x.
inline floatX nearest_weight(real x) {
    floatX weight;
    LowerHalf half;
    store_weight(&weight, &half, 0, x);
    return weight;
}

// All weights of a tensor stored in two halves, in host memory.
inline std::vector<real> whole_weights(const std::vector<floatX>& params, const std::vector<LowerHalf>& lower) {
    std::vector<real> weights(params.size());
    for (size_t i = 0; i < weights.size(); i++) weights[i] = load_weight(params.data(), lower.data(), i);
    return weights;
}

// e^x without branches or library calls, so that loops over it vectorize (the library's expf does so only under -ffast-math,
// which we do not use). Cody-Waite reduction x = n ln2 + r, |r| <= ln2/2, then a minimax polynomial of degree 7 in r, scaled by
// 2^n. Error: 1.2 ulp for x >= -86.6; 0 below that; infinity above 88.72; NaN stays NaN.
template <class F>
HD inline F exp_of(F x) {
    const float log2e = 1.44269504f, ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f;
    const float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer in the low mantissa bits
    const F shifted = x * log2e + shift, n = shifted - shift;
    const F r = (x - n * ln2_high) - n * ln2_low;
    F p = 2 * 1.9875691500e-4f * r + 2 * 1.3981999507e-3f;  // p = 2 e^r and 2^(n-1), not e^r and 2^n: 2^128 overflows
    p = p * r + 2 * 8.3334519073e-3f;
    p = p * r + 2 * 4.1665795894e-2f;
    p = p * r + 2 * 1.6666665459e-1f;
    p = p * r + 2 * 5.0000001201e-1f;
    p = p * r + 2.0f;
    p = p * r + 2.0f;
    typename BitsOf<F>::type bits;
    memcpy(&bits, &shifted, sizeof bits);
    bits = (bits + 126u) << 23;  // the high bits of `shift` are lost
    F scale;
    memcpy(&scale, &bits, sizeof scale);
    const F y = x > 88.722835f ? F{} + INFINITY : p * scale;  // NaN: both comparisons are false
    return x < -86.6f ? F{} : y;
}

// On a GPU the special function unit computes 2^x: two instructions instead of sixteen, which would bound elementwise kernels.
// Its error is 2 + 1.2 |x| ulp, as for an exponential with an argument rounded once more.
template <class F>
HD inline F exp_real(F x) {
#ifdef __CUDA_ARCH__
    return __expf(x);
#else
    if constexpr (std::is_same<F, double>::value) return std::exp(x);
    else return exp_of(x);
#endif
}

// Vectors on CPUs have their own version (cpu/vectors.h).
template <class F>
HD inline F sigmoid(F x) {
#ifdef __CUDA_ARCH__
    return __fdividef(1.0f, 1.0f + exp_real(-x));  // 2 ulp; 0 where the divisor is beyond 2^126
#else
    return real(1) / (real(1) + exp_real(-x));
#endif
}

// GeLU, tanh approximation: 0.5 x (1 + tanh u), u = k (x + 0.044715 x^3), k = sqrt(2/pi). As 1 + tanh u = 2 sigmoid(2u), it is
// x sigmoid(2u).
constexpr double gelu_linear = 2 * 0.7978845608028654, gelu_cubic = 0.044715 * gelu_linear;  // coefficients of 2u
template <class F>
HD inline F gelu(F x) {
    return x * sigmoid(x * (real(gelu_linear) + real(gelu_cubic) * (x * x)));
}
// Derivative: s + x s (1 - s) (2u)', s = sigmoid(2u). Beyond +-12 it is 1 or 0 to the last bit; x is clamped there because x^2
// would overflow and 0 * infinity give NaN.
template <class F>
HD inline F gelu_derivative(F x) {
    x = x < real(-12) ? F{} - real(12) : x;
    x = x > real(12) ? F{} + real(12) : x;
    const F x2 = x * x, s = sigmoid(x * (real(gelu_linear) + real(gelu_cubic) * x2));
    return s + s * ((1 - s) * x * (real(gelu_linear) + real(3 * gelu_cubic) * x2));
}

// x if it is positive, else 0; NaN stays NaN.
template <class F>
HD inline F positive(F x) {
    return x < real(0) ? F{} : x;
}

// Exact GeLU: x Phi(x), Phi(x) = (1 + erf(x / sqrt 2)) / 2; derivative Phi(x) + x phi(x), phi(x) = e^(-x^2/2) / sqrt(2 pi).
// Phi(-|x|) = e^(-x^2/2) t p(t), t = 1 / (1 + 0.33 |x| / sqrt 2), with a minimax polynomial p of degree 7: relative error 1e-7,
// for negative x as well.
template <class F>
struct NormalDistribution {
    F cumulative, density;
};
template <class F>
HD inline NormalDistribution<F> normal_distribution(F x) {
    if constexpr (std::is_same<F, double>::value) {
        return {std::erfc(-x * 0.7071067811865476) / 2, std::exp(-x * x / 2) * 0.3989422804014327};
    } else {
        const F size = x < 0.0f ? -x : x, bell = exp_real(-0.5f * x * x), t = 1.0f / (1.0f + size * 0.23334524f);
        F p = -0.067674376f * t + 0.23012511f;
        p = p * t - 0.17558649f;
        p = p * t + 0.20426114f;
        p = p * t + 0.023604205f;
        p = p * t + 0.10061389f;
        p = p * t + 0.09147764f;
        p = p * t + 0.09317891f;
        const F tail = bell * t * p;
        return {x < 0.0f ? tail : 1.0f - tail, bell * 0.3989423f};
    }
}

// tanh x = x p(x^2) / q(x^2) with minimax polynomials of degree 4; +-1 beyond +-9.02. Error: 2 ulp; NaN stays NaN.
template <class F>
HD inline F tanh_of(F x) {
    if constexpr (std::is_same<F, double>::value) {
        return std::tanh(x);
    } else {
        x = x < -9.02f ? F{} - 9.02f : x;
        x = x > 9.02f ? F{} + 9.02f : x;
        const F u = x * x;
        F p = 1.3319092495578388e-8f * u + 2.0583500372595154e-5f;
        p = p * u + 3.494035918265581e-3f;
        p = p * u + 0.13379719853401184f;
        p = p * u + 1.0f;
        F q = 7.762029099467327e-7f * u + 3.28309484757483e-4f;
        q = q * u + 2.587107941508293e-2f;
        q = q * u + 0.4671303331851959f;
        q = q * u + 1.0f;
        return x * p / q;
    }
}
// Soft-capping (Bello et al., 2016; Gemma 2): y = cap tanh(x / cap) stays between -cap and cap. Its derivative is a function of
// y: 1 - (y / cap)^2.
template <class F>
HD inline F soft_cap(F x, real cap) {
    return cap * tanh_of(x * (1 / cap));
}
template <class F>
HD inline F soft_cap_derivative(F y, real cap) {
    const F t = y * (1 / cap);
    return 1 - t * t;
}

// SwiGLU (Shazeer, 2020): silu(g) u with silu(g) = g s, s = sigmoid(g). With dy its gradient,
//   dg = dy u s (1 + g (1 - s)),  du = dy g s
template <class F>
HD inline F swiglu(F gate, F up) {
    return gate * sigmoid(gate) * up;
}
template <class F>
struct GateUp {
    F gate, up;
};
template <class F>
HD inline GateUp<F> swiglu_gradient(F gate, F up, F dy) {
    const F s = sigmoid(gate), ds = dy * s;
    return {ds * up * (1 + gate * (1 - s)), ds * gate};
}

// GeGLU: gelu(g) u, with GeLU by tanh. dg = dy u gelu'(g),  du = dy gelu(g)
template <class F>
HD inline GateUp<F> geglu_gradient(F gate, F up, F dy) {
    return {dy * up * gelu_derivative(gate), dy * gelu(gate)};
}

// Clamped SwiGLU (GPT-OSS): g s (u + 1), s = sigmoid(a g), with g clamped to at most the limit and u to -limit .. limit.
//   dg = dy (u + 1) s (1 + a g (1 - s)),  du = dy g s,  each 0 where its input is clamped
constexpr double clamped_swiglu_slope = 1.702, clamped_swiglu_limit = 7;
template <class F>
HD inline GateUp<F> clamped_gate_up(F gate, F up) {
    const auto limit = real(clamped_swiglu_limit);
    up = up < -limit ? F{} - limit : up;
    return {gate > limit ? F{} + limit : gate, up > limit ? F{} + limit : up};
}
template <class F>
HD inline F clamped_swiglu(F gate, F up) {
    const GateUp<F> x = clamped_gate_up(gate, up);
    return x.gate * sigmoid(real(clamped_swiglu_slope) * x.gate) * (x.up + 1);
}
template <class F>
HD inline GateUp<F> clamped_swiglu_gradient(F gate, F up, F dy) {
    const auto slope = real(clamped_swiglu_slope), limit = real(clamped_swiglu_limit);
    const GateUp<F> x = clamped_gate_up(gate, up);
    const F s = sigmoid(slope * x.gate), ds = dy * s;
    const F dgate = ds * (x.up + 1) * (1 + slope * x.gate * (1 - s)), dup = ds * x.gate;
    const F below = up < -limit ? F{} : dup;
    return {gate > limit ? F{} : dgate, up > limit ? F{} : below};
}

// ALiBi's slope of head h of n (Press et al., 2022): powers of 2^(-8/c) for the first c = 2^floor(log2 n) heads, and for the
// others every second power of the sequence for 2c heads.
inline real alibi_slope(int h, int n) {
    int c = 1;
    while (2 * c <= n) c *= 2;
    return (real)(h < c ? std::exp2(-8.0 * (h + 1) / c) : std::exp2(-4.0 * (2 * (h - c) + 1) / c));
}

// table (P, n, 2): cos and sin of position * frequency for n frequencies, times `factor`, computed in double and rounded once
// (Su et al., 2021).
inline void rope_table(std::vector<real>& table, int P, const std::vector<double>& frequencies, double factor) {
    const size_t n = frequencies.size();
    table.resize((size_t)P * n * 2);
    for (size_t j = 0; j < n; j++)
        for (int p = 0; p < P; p++) {
            table[((size_t)p * n + j) * 2] = (real)(std::cos(p * frequencies[j]) * factor);
            table[((size_t)p * n + j) * 2 + 1] = (real)(std::sin(p * frequencies[j]) * factor);
        }
}
// The same with frequencies base^(-2j/HS).
inline void rope_table(std::vector<real>& table, int P, int HS, double base) {
    std::vector<double> frequencies;
    for (int j = 0; j < HS / 2; j++) frequencies.push_back(std::pow(base, -2.0 * j / HS));
    rope_table(table, P, frequencies, 1);
}
