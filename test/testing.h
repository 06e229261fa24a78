// Helpers for the tests of ops: reproducible random numbers, buffers that detect writes beyond their ends and elements never
// written, comparisons that fail on NaN, and finite differences.
//   Rng rng(1);
//   std::vector<floatX> x = rng.normals<floatX>(N * C);
//   Guarded<floatX> out(N * C);                                     // NaN until written; guards are checked at the end
//   cpu::some_op(ctx, out.data(), x.data(), N, C);
//   expect_close(out, expected, 0, 2 * roundoff<floatX>, "out");    // |actual - expected| <= atol + rtol |expected|
//   check_gradient([&] { return loss(); }, x.data(), x.size(), dx.data(), "dx");   // double builds
#pragma once
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "../llmc/base/types.h"

namespace test {

// The largest relative error of one rounding to T.
template <class T>
constexpr double roundoff = std::is_same<T, bf16>::value    ? 0x1p-8
                            : std::is_same<T, float>::value ? 0x1p-24
                                                            : 0x1p-53;

template <class T>
double as_double(T x) {
    if constexpr (std::is_same<T, bf16>::value) return (double)(float)x;
    else return (double)x;
}
template <class T>
T from_double(double x) {
    if constexpr (std::is_same<T, bf16>::value) return bf16((float)x);
    else return (T)x;
}

// ---- random numbers -------------------------------------------------------------------------------------------------------
// mt19937_64's output is fixed by the standard; the standard's distributions are not, so they are written out.
class Rng {
public:
    explicit Rng(uint64_t seed) : engine_(seed) {}
    double uniform(double low = 0, double high = 1) { return low + (high - low) * ((double)(engine_() >> 11) * 0x1p-53); }
    double normal() { return std::sqrt(-2 * std::log(1 - uniform())) * std::cos(6.283185307179586 * uniform()); }
    int below(int n) { return (int)(engine_() % (uint64_t)n); }

    template <class T>
    std::vector<T> normals(size_t n, double scale = 1, double mean = 0) {
        std::vector<T> x(n);
        for (T& value : x) value = from_double<T>(mean + scale * normal());
        return x;
    }
    std::vector<int> integers(size_t n, int low, int high) {  // in [low, high)
        std::vector<int> x(n);
        for (int& value : x) value = low + below(high - low);
        return x;
    }

private:
    std::mt19937_64 engine_;
};

// ---- guarded buffers ------------------------------------------------------------------------------------------------------
// n elements between two guards. Unwritten elements are NaN (integers: a large negative number), so that gaps in the output and
// reads of uninitialized elements are detected. The guards are compared in check(), which the destructor calls.
template <class T>
class Guarded {
public:
    explicit Guarded(size_t n, std::string name = "buffer")
        : n_(n), name_(std::move(name)), bytes_(2 * guard + n * sizeof(T), pattern) {
        std::fill_n(data(), n, poison());
    }
    explicit Guarded(const std::vector<T>& values, std::string name = "buffer") : Guarded(values.size(), std::move(name)) {
        if (n_ > 0) memcpy((void*)data(), values.data(), n_ * sizeof(T));
    }
    Guarded(const Guarded&) = delete;
    Guarded& operator=(const Guarded&) = delete;
    ~Guarded() { check(); }

    T* data() { return (T*)(bytes_.data() + guard); }
    const T* data() const { return (const T*)(bytes_.data() + guard); }
    size_t size() const { return n_; }
    T& operator[](size_t i) { return data()[i]; }
    const T& operator[](size_t i) const { return data()[i]; }
    std::vector<T> values() const { return std::vector<T>(data(), data() + n_); }

    void check() const {
        for (size_t i = 0; i < guard; i++) {
            ASSERT_EQ(bytes_[i], pattern) << name_ << ": written " << guard - i << " bytes before its start";
            ASSERT_EQ(bytes_[bytes_.size() - guard + i], pattern) << name_ << ": written " << i << " bytes after its end";
        }
    }

private:
    static constexpr size_t guard = 256;
    static constexpr uint8_t pattern = 0xFF;  // NaN in every float type, so that reads beyond the ends are detected, too
    static T poison() {
        if constexpr (std::is_integral<T>::value) return std::numeric_limits<T>::min() / 2;
        else return from_double<T>(std::nan(""));
    }
    size_t n_;
    std::string name_;
    std::vector<uint8_t> bytes_;
};

// ---- comparisons ----------------------------------------------------------------------------------------------------------
// Every |actual - expected| <= allowed[i], else one failure that names the worst element. NaN never passes; an expected
// infinity requires the same infinity.
template <class Buffer>
void expect_close(const Buffer& actual, const std::vector<double>& expected, const std::vector<double>& allowed,
                  const std::string& name) {
    ASSERT_EQ(actual.size(), expected.size()) << name;
    ASSERT_EQ(allowed.size(), expected.size()) << name;
    size_t worst = 0, failures = 0;
    double worst_excess = 0;
    for (size_t i = 0; i < expected.size(); i++) {
        const double a = as_double(actual[i]), difference = std::abs(a - expected[i]);
        if (difference <= allowed[i] || (std::isinf(expected[i]) && a == expected[i])) continue;
        const double excess =
            std::isnan(difference) || allowed[i] == 0 ? std::numeric_limits<double>::infinity() : difference / allowed[i];
        if (failures++ == 0 || excess > worst_excess) {
            worst = i;
            worst_excess = excess;
        }
    }
    if (failures > 0)
        ADD_FAILURE() << name << ": " << failures << " of " << expected.size() << " differ; worst at [" << worst
                      << "]: " << as_double(actual[worst]) << ", expected " << expected[worst] << ", difference "
                      << as_double(actual[worst]) - expected[worst] << ", allowed " << allowed[worst];
}

// allowed = atol + rtol |expected|
template <class Buffer>
void expect_close(const Buffer& actual, const std::vector<double>& expected, double atol, double rtol,
                  const std::string& name) {
    std::vector<double> allowed(expected.size());
    for (size_t i = 0; i < allowed.size(); i++)
        allowed[i] = atol + rtol * (std::isinf(expected[i]) ? 0 : std::abs(expected[i]));
    expect_close(actual, expected, allowed, name);
}

template <class Buffer>
std::vector<double> doubles(const Buffer& x) {
    std::vector<double> y(x.size());
    for (size_t i = 0; i < y.size(); i++) y[i] = as_double(x[i]);
    return y;
}

// The same bits, NaN included.
template <class A, class B>
void expect_same_bits(const A& a, const B& b, const std::string& name) {
    ASSERT_EQ(a.size(), b.size()) << name;
    static_assert(sizeof(a[0]) == sizeof(b[0]), "buffers of one type");
    for (size_t i = 0; i < a.size(); i++)
        ASSERT_EQ(memcmp(&a[i], &b[i], sizeof(a[0])), 0)
            << name << "[" << i << "]: " << as_double(a[i]) << " and " << as_double(b[i]);
}

using Doubles = std::vector<double>;

inline double dot(const Doubles& a, const Doubles& b) {
    double sum = 0;
    for (size_t i = 0; i < a.size(); i++) sum += a[i] * b[i];
    return sum;
}

// ---- finite differences ---------------------------------------------------------------------------------------------------
// Compares grad with (f(x + h) - f(x - h)) / 2h, f = loss(), which reads x. The truncation error is h^2 f'''/6 and the rounding
// error about eps |f| / h, with h = 1e-5 both near 1e-10 for functions of order 1. Each element when n <= max_elements, else as
// many random elements and, so that no element escapes, eight random directions d: (f(x + hd) - f(x - hd)) / 2h = grad . d.
// rtol is relative to the element plus the gradient's root mean square (of the norm for directions). x is restored exactly.
template <class Loss>
void check_gradient(Loss&& loss, double* x, size_t n, const double* grad, const std::string& name, double rtol = 1e-6,
                    size_t max_elements = 300) {
    const double h = 1e-5;
    double square_sum = 0;
    for (size_t i = 0; i < n; i++) square_sum += grad[i] * grad[i];
    const double norm = std::sqrt(square_sum), rms = norm / std::sqrt((double)n), noise = 16 * 0x1p-52 * std::abs(loss()) / h;
    ASSERT_FALSE(std::isnan(norm)) << name << ": the gradient holds NaN";
    Rng rng(n);
    int failures = 0;
    const bool all = n <= max_elements;
    for (size_t k = 0; k < (all ? n : max_elements) && failures < 5; k++) {
        const size_t i = all ? k : (size_t)(rng.uniform() * (double)n);
        const double saved = x[i];
        x[i] = saved + h;
        const double above = loss(), upper = x[i];
        x[i] = saved - h;
        const double below = loss(), numeric = (above - below) / (upper - x[i]);
        x[i] = saved;
        const double allowed = rtol * (std::abs(grad[i]) + rms) + noise;
        if (!(std::abs(numeric - grad[i]) <= allowed)) {
            failures++;
            ADD_FAILURE() << name << "[" << i << "]: gradient " << grad[i] << ", finite difference " << numeric
                          << ", difference " << grad[i] - numeric << ", allowed " << allowed;
        }
    }
    const std::vector<double> saved(x, x + n);
    for (int k = 0; k < 8 && !all; k++) {
        const std::vector<double> d = rng.normals<double>(n);
        double analytic = 0;
        for (size_t i = 0; i < n; i++) {
            analytic += grad[i] * d[i];
            x[i] = saved[i] + h * d[i];
        }
        const double above = loss();
        for (size_t i = 0; i < n; i++) x[i] = saved[i] - h * d[i];
        const double numeric = (above - loss()) / (2 * h);
        EXPECT_TRUE(std::abs(numeric - analytic) <= rtol * norm + noise)
            << name << ": along a random direction " << analytic << ", finite difference " << numeric;
    }
    std::copy(saved.begin(), saved.end(), x);
}

// |got - want| <= relative * want
inline void expect_within(double got, double want, double relative) {
    EXPECT_TRUE(std::abs(got - want) <= relative * want) << "got " << got << ", want " << want;
}

}  // namespace test
