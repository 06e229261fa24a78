// A user's shares, for splits and blends: as numbers, and normalized to a sum of 1 with Megatron-LM's bits.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <numeric>
#include <string>
#include <vector>

#include "../base/check.h"

// The number spelled by the whole of `s`; NaN if it is not a number.
inline double parse_number(const std::string& s) {
    char* end = nullptr;
    const double x = s.empty() ? NAN : strtod(s.c_str(), &end);
    return !s.empty() && *end == '\0' ? x : NAN;
}

// The sum in numpy.sum's order, so that normalized weights have the same bits as Megatron's.
inline double numpy_sum(const double* x, size_t n) {
    if (n < 8) return std::accumulate(x, x + n, 0.0);
    if (n > 128) {
        const size_t half = n / 2 - n / 2 % 8;
        return numpy_sum(x, half) + numpy_sum(x + half, n - half);
    }
    double r[8];
    std::copy_n(x, 8, r);
    size_t i = 8;
    for (; i + 8 <= n; i += 8)
        for (int k = 0; k < 8; k++) r[k] += x[i + k];
    const double sum = ((r[0] + r[1]) + (r[2] + r[3])) + ((r[4] + r[5]) + (r[6] + r[7]));
    return std::accumulate(x + i, x + n, sum);
}

inline std::vector<double> normalized(std::vector<double> weights) {
    const double sum = numpy_sum(weights.data(), weights.size());
    if (!std::isfinite(sum)) fail_usage("the sum of the weights is not finite; HINT: smaller ones in the same proportions");
    for (double& w : weights) w /= sum;
    return weights;
}
