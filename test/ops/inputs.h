// Shared by all tests of ops: inputs in the backend's memory, shapes, and error bounds in double.
#pragma once
#include <gtest/gtest.h>

#include "../testing.h"

using namespace test;
using Doubles = std::vector<double>;

namespace {

constexpr double u = roundoff<real>;
constexpr double rounding = roundoff<floatX> * 1.01;  // of a value that was itself computed with small error
const double infinity = std::numeric_limits<double>::infinity(), not_a_number = std::nan("");

struct Shape {
    int N, C;
};
#ifdef EMU_TSAN  // slow, milliseconds per thread of a kernel: only tests that differ for it
constexpr bool thorough = false;
constexpr int most_rows = 300;
const Shape norm_shapes[] = {{1, 1}, {3, 15}, {9, 33}, {11, 264}};
#else
constexpr bool thorough = true;
constexpr int most_rows = 1 << 20;
const Shape norm_shapes[] = {{1, 1},   {1, 769},  {3, 15},   {150, 33},  {70, 512},
                             {37, 96}, {21, 776}, {3, 8208}, {2, 16384}, {2, 16392}};
#endif

// An op's input: on the host for the reference, and in the backend's memory.
template <class T>
class Input {
public:
    explicit Input(std::vector<T> values) : host_(std::move(values)), buffer_(host_, "input") {}
    const T* p() const { return buffer_.p(); }
    const T& operator[](size_t i) const { return host_[i]; }
    size_t size() const { return host_.size(); }
    const std::vector<T>& host() const { return host_; }

private:
    std::vector<T> host_;
    Buffer<T> buffer_;
};

[[maybe_unused]] Doubles plus(Doubles x, double offset) {
    for (double& value : x) value += offset;
    return x;
}

// target += extra, allowing the rounding of that sum.
[[maybe_unused]] void add_to(Doubles& target, Doubles& allowed, const Doubles& extra, double unit) {
    for (size_t i = 0; i < target.size(); i++) {
        target[i] += extra[i];
        allowed[i] += unit * std::abs(target[i]);
    }
}

}  // namespace
