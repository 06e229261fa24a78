// Scales of FP8 training (Transformer Engine's delayed scaling, per tensor). Each of a block's four matrices has three
// quantized tensors: its input, the weight, and the gradient of its output; in a mixture all experts have one of each (FP8.md
// says why). A tensor's scale follows from the largest absolute elements (amax) of earlier steps:
//   scale = largest number of the format / amax / 2^margin,   amax = the largest in the history, or its newest entry
// An amax covers a whole step: all micro-batches, tensor- and data-parallel ranks. So the parallel layout changes nothing, and
// a skipped step leaves no trace. (Transformer Engine and Megatron advance with every micro-batch: their history of 1024
// micro-batches corresponds to some tens of steps here.) Every rank has the state of all layers, so any layout can resume any
// other's checkpoint.
#pragma once
#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "../base/check.h"
#include "../base/json.h"
#include "../fp8.h"
#include "parameters.h"

enum class Operand { input, weight, gradient };
constexpr int fp8_tensors = 12;  // per block
constexpr size_t fp8_index(int block, Matrix matrix, Operand operand) {
    return (size_t)block * fp8_tensors + (size_t)matrix * 3 + (size_t)operand;
}

struct Fp8Recipe {
    bool on = false;
    bool current = false;          // current scaling: from the tensor itself, not from its history
    Fp8 gradient = Fp8::e5m2;      // hybrid; inputs and weights are e4m3
    int margin = 0, history = 16;  // steps
    bool most_recent = false;      // only the newest amax of the history counts
    Fp8 format(Operand operand) const { return operand == Operand::gradient ? gradient : Fp8::e4m3; }
};

class Fp8State {
public:
    std::vector<float> scales;  // (layers, 12); 1: not measured yet

    Fp8State() = default;
    Fp8State(const Fp8Recipe& recipe, int layers)
        : scales((size_t)layers * fp8_tensors, 1.0f), recipe_(recipe), history_(scales.size()) {}

    // The number of steps with a known amax, at most the history's length; at 0 there are no scales yet.
    int measured() const { return measured_; }

    // After an applied step: records the amax of all tensors; 0 where a tensor was not quantized.
    void update(const std::vector<float>& amax) {
        CHECK(amax.size() == scales.size(), "%zu amax for %zu tensors", amax.size(), scales.size());
        for (size_t i = 0; i < amax.size(); i++) {
            std::vector<float>& history = history_[i];  // newest first
            history.insert(history.begin(), amax[i]);
            if (history.size() > (size_t)recipe_.history) history.pop_back();
            const float largest = recipe_.most_recent ? amax[i] : *std::max_element(history.begin(), history.end());
            const float scale = fp8_scale(largest, recipe_.format((Operand)(i % 3)), recipe_.margin);
            if (scale > 0) scales[i] = scale;
        }
        measured_ = std::min(measured_ + 1, recipe_.history);
    }

    nlohmann::ordered_json to_json() const {
        if (scales.empty()) return nullptr;
        return {{"measured", measured_}, {"scales", scales}, {"amax_history", history_}};
    }
    // Loads a checkpoint's state; null: there is none. Drops entries beyond the recipe's history length.
    void from_json(const nlohmann::json& j, const std::string& file) {
        if (j.is_null() || scales.empty()) return;
        try {
            const std::vector<float> saved = j.at("scales");
            const std::vector<std::vector<float>> history = j.at("amax_history");
            if (saved.size() != scales.size() || history.size() != scales.size())
                fail("%s: scales of %zu tensors, the model has %zu", file.c_str(), saved.size(), scales.size());
            for (size_t i = 0; i < saved.size(); i++)
                if (!(saved[i] > 0)) fail("%s: the scale of tensor %zu is %g", file.c_str(), i, saved[i]);
            scales = saved;
            history_ = history;
            measured_ = std::min((int)j.at("measured"), recipe_.history);
            for (auto& h : history_) h.resize(std::min(h.size(), (size_t)recipe_.history));
        } catch (const nlohmann::json::exception& e) {
            fail_damaged("the FP8 state in " + file, json_problem(e));
        }
    }

private:
    Fp8Recipe recipe_;
    std::vector<std::vector<float>> history_;
    int measured_ = 0;
};
