// Encoders of GGUF's blocks of 256 numbers (quantized.h decodes them). A group of a block has an integer scale, relative to the
// block's; in Q4_K and Q5_K also a minimum. Both are searched: for several steps, each number is rounded to its nearest code,
// and the scale and the minimum are the least squares fit to these codes. The best fit is then rounded to the integers next to
// it that have the smallest error. Errors are weighted: a large weight contributes more to the products.
#pragma once
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "../base/safetensors.h"
#include "../quantized.h"

namespace detail {

// Weights of the errors of a group: |x| plus its root mean square. Returns false if a number is not finite.
template <int n>
bool error_weights(const float* x, float* w) {
    float squares = 0;
    for (int i = 0; i < n; i++) squares += x[i] * x[i];
    const float typical = std::sqrt(squares / n);
    for (int i = 0; i < n; i++) w[i] = typical + std::fabs(x[i]);
    return std::isfinite(squares);
}

// The codes of x = scale q - minimum, q from 0 to most, and their error.
template <int n>
float choose_codes(const float* x, const float* w, float scale, float minimum, int most, int* q) {
    const float inverse = scale != 0 ? 1 / scale : 0;
    float error = 0;
    for (int i = 0; i < n; i++) {
        q[i] = (int)std::lround(std::min(std::max((x[i] + minimum) * inverse, 0.0f), (float)most));
        const float off = scale * (float)q[i] - minimum - x[i];
        error += w[i] * off * off;
    }
    return error;
}

// The scale and the minimum, both at least 0, of a group.
struct AffineFit {
    float scale, minimum;
};
template <int n>
AffineFit fit_affine(const float* x, const float* w, int most) {
    float low = 0, high = x[0], sum_w = 0, sum_x = 0;
    for (int i = 0; i < n; i++) {
        low = std::min(low, x[i]);
        high = std::max(high, x[i]);
        sum_w += w[i];
        sum_x += w[i] * x[i];
    }
    if (!(high > low)) return {0, -low};
    AffineFit best = {(high - low) / (float)most, -low};
    int q[n];
    float least = choose_codes<n>(x, w, best.scale, best.minimum, most, q);
    for (int step = -10; step <= 10; step++) {
        choose_codes<n>(x, w, (high - low) / ((float)most + 0.1f * (float)step), -low, most, q);
        float sum_q = 0, sum_qq = 0, sum_qx = 0;
        for (int i = 0; i < n; i++) {
            const float wq = w[i] * (float)q[i];
            sum_q += wq;
            sum_qq += wq * (float)q[i];
            sum_qx += wq * x[i];
        }
        const float determinant = sum_w * sum_qq - sum_q * sum_q;
        if (!(determinant > 0)) continue;
        AffineFit fit = {(sum_w * sum_qx - sum_x * sum_q) / determinant, (sum_q * sum_qx - sum_qq * sum_x) / determinant};
        if (fit.minimum < 0) fit = {sum_qx / sum_qq, 0};
        if (!(fit.scale > 0)) continue;
        const float error = choose_codes<n>(x, w, fit.scale, fit.minimum, most, q);
        if (error < least) {
            least = error;
            best = fit;
        }
    }
    return best;
}

// Sets integer to the one of its neighbors from lowest to highest whose error(integer) is least.
template <class Error>
void improve(int& integer, int lowest, int highest, Error error) {
    const int middle = integer;
    float least = error(middle);
    for (const int other : {middle - 1, middle + 1}) {
        if (other < lowest || other > highest) continue;
        if (const float e = error(other); e < least) {
            least = e;
            integer = other;
        }
    }
}

inline bool is_finite_half(uint16_t half) { return (half & 0x7c00) != 0x7c00; }

// A block of Q4_K or Q5_K without its codes: fp16 scale and minimum, then of each of 8 groups in 6 bits. Sets the codes q.
inline bool quantize_affine(const float* x, int most, uint8_t* out, int* q) {
    constexpr int groups = 8, n = 32;
    float w[groups * n], largest_scale = 0, largest_minimum = 0;
    std::array<AffineFit, groups> fits;
    for (int g = 0; g < groups; g++) {
        if (!error_weights<n>(x + g * n, w + g * n)) return false;
        fits[(size_t)g] = fit_affine<n>(x + g * n, w + g * n, most);
        largest_scale = std::max(largest_scale, fits[(size_t)g].scale);
        largest_minimum = std::max(largest_minimum, fits[(size_t)g].minimum);
    }
    const uint16_t halves[] = {float_to_half(largest_scale / 63), float_to_half(largest_minimum / 63)};
    if (!is_finite_half(halves[0]) || !is_finite_half(halves[1])) return false;
    const float d = half_to_float(halves[0]), m = half_to_float(halves[1]);
    memcpy(out, halves, sizeof halves);
    uint8_t* const packed = out + 4;
    memset(packed, 0, 12);
    for (int g = 0; g < groups; g++) {
        const float *xs = x + g * n, *ws = w + g * n;
        int* const qs = q + g * n;
        const auto nearest = [](float fit, float unit) { return unit > 0 ? (int)std::min(std::lround(fit / unit), 63L) : 0; };
        int scale = nearest(fits[(size_t)g].scale, d), minimum = nearest(fits[(size_t)g].minimum, m);
        const auto error = [&](int s, int least) { return choose_codes<n>(xs, ws, d * (float)s, m * (float)least, most, qs); };
        const auto of_best_scale = [&](int least) {
            int s = scale;
            improve(s, 0, 63, [&](int each) { return error(each, least); });
            return error(s, least);
        };
        improve(minimum, 0, 63, of_best_scale);
        improve(scale, 0, 63, [&](int s) { return error(s, minimum); });
        error(scale, minimum);
        const auto byte = [](int bits) { return (uint8_t)bits; };
        if (g < 4) {
            packed[g] |= byte(scale);
            packed[g + 4] |= byte(minimum);
        } else {
            packed[g + 4] = byte((scale & 15) | (minimum & 15) << 4);
            packed[g - 4] |= byte(scale >> 4 << 6);
            packed[g] |= byte(minimum >> 4 << 6);
        }
    }
    return true;
}
inline bool quantize_q4_k(const float* x, uint8_t* out) {
    int q[256];
    if (!quantize_affine(x, 15, out, q)) return false;
    for (int i = 0; i < 128; i++) {
        const int* const low = q + i / 32 * 64 + i % 32;
        out[16 + i] = (uint8_t)(low[0] | low[32] << 4);
    }
    return true;
}
inline bool quantize_q5_k(const float* x, uint8_t* out) {
    int q[256];
    if (!quantize_affine(x, 31, out, q)) return false;
    memset(out + 16, 0, 32);
    for (int i = 0; i < 256; i++) out[16 + i % 32] |= (uint8_t)(q[i] >> 4 << i / 32);
    for (int i = 0; i < 128; i++) {
        const int* const low = q + i / 32 * 64 + i % 32;
        out[48 + i] = (uint8_t)((low[0] & 15) | (low[32] & 15) << 4);
    }
    return true;
}

// The scale of a group of Q6_K, of either sign: x = scale q, q from -32 to 31.
inline float fit_scale(const float* x, const float* w) {
    constexpr int n = 16;
    float extreme = 0;
    for (int i = 0; i < n; i++)
        if (std::fabs(x[i]) > std::fabs(extreme)) extreme = x[i];
    if (extreme == 0) return 0;
    float best = 0, least = INFINITY;
    int q[n];
    for (int step = -10; step <= 10; step++) {
        const float tried = -extreme / (32 + 0.1f * (float)step);
        choose_codes<n>(x, w, tried, 32 * tried, 63, q);
        float sum_qq = 0, sum_qx = 0;
        for (int i = 0; i < n; i++) {
            const float wq = w[i] * (float)(q[i] - 32);
            sum_qq += wq * (float)(q[i] - 32);
            sum_qx += wq * x[i];
        }
        const float scale = sum_qq > 0 ? sum_qx / sum_qq : 0;
        if (const float error = choose_codes<n>(x, w, scale, 32 * scale, 63, q); error < least) {
            least = error;
            best = scale;
        }
    }
    return best;
}
inline bool quantize_q6_k(const float* x, uint8_t* out) {
    constexpr int groups = 16, n = 16;
    float w[groups * n], scales[groups], extreme = 0;
    for (int g = 0; g < groups; g++) {
        if (!error_weights<n>(x + g * n, w + g * n)) return false;
        scales[g] = fit_scale(x + g * n, w + g * n);
        if (std::fabs(scales[g]) > std::fabs(extreme)) extreme = scales[g];
    }
    const uint16_t half = float_to_half(extreme / -128);
    if (!is_finite_half(half)) return false;
    const float d = half_to_float(half);
    int q[groups * n];
    for (int g = 0; g < groups; g++) {
        const auto error = [&](int s) {
            return choose_codes<n>(x + g * n, w + g * n, d * (float)s, 32 * d * (float)s, 63, q + g * n);
        };
        int scale = d != 0 ? (int)std::round(std::min(std::max(scales[g] / d, -128.0f), 127.0f)) : 0;
        improve(scale, -128, 127, error);
        error(scale);
        out[192 + g] = (uint8_t)(int8_t)scale;
    }
    for (int i = 0; i < 128; i++) {
        const int* const low = q + i / 64 * 128 + i % 64;
        out[i] = (uint8_t)((low[0] & 15) | (low[64] & 15) << 4);
    }
    for (int i = 0; i < 64; i++) {
        const int* const high = q + i / 32 * 128 + i % 32;
        out[128 + i] = (uint8_t)(high[0] >> 4 | high[32] >> 4 << 2 | high[64] >> 4 << 4 | high[96] >> 4 << 6);
    }
    memcpy(out + 208, &half, 2);
    return true;
}

}  // namespace detail
