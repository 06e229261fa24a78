// Gradients of a whole model against central differences of its loss, in double.
#pragma once
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <string>

#include "../llmc/model/parameters.h"

namespace test {

// Checks `of_each` random elements of every tensor of a table; loss() uses the current parameters in `params`, and each tensor
// must have a gradient. The bound: truncation is about h^2 = 1e-10, rounding about 1e-16 / h = 1e-11.
template <class Loss>
void expect_finite_differences(const ParameterTable& table, floatX* params, const real* grads, int of_each,
                               const std::string& name, Loss loss) {
    std::mt19937 rng(11);
    for (const TensorSpec& t : table.rows) {
        double largest = 0;
        for (size_t i = 0; i < t.size(); i++) largest = std::max(largest, std::abs((double)grads[t.offset + i]));
        EXPECT_GT(largest, 0) << name << " " << t.name << " gets no gradient";
        for (int n = 0; n < of_each; n++) {
            const size_t i = t.offset + rng() % t.size();
            const double kept = params[i], h = 1e-5;
            params[i] = kept + h;
            const double up = loss();
            params[i] = kept - h;
            const double down = loss();
            params[i] = kept;
            const double numeric = (up - down) / (2 * h), error = std::abs(numeric - grads[i]);
            EXPECT_TRUE(error <= 1e-9 + 1e-6 * std::abs(numeric))
                << name << " " << t.name << "[" << i - t.offset << "]: " << grads[i] << " but differences give " << numeric;
        }
    }
}

}  // namespace test
