// Reads the training memory from a checkpoint, a model, or adapters.
#pragma once
#include <algorithm>
#include <string>
#include <vector>

#include "../model/arena.h"
#include "../ops.h"
#include "../optimizer/training_memory.h"
#include "agreement.h"
#include "checkpoint.h"
#include "training_state.h"
#include "upcycling.h"

// The path of the trained weights of a checkpoint.
inline std::string weights_path(const std::string& dir, const ModelConfig& c) {
    return c.adapted() ? dir + "/adapter_model.safetensors" : dir;
}

// The fp32 weights of a checkpoint's model, which the model's directory has in rounded form: in a separate file or, if the
// model's are fp32, in its directory.
inline void read_masters(const std::string& file, const std::string& model, const ModelConfig& c, const ParameterTable& table,
                         real* master) {
    const bool separate = file_exists(file) || file_exists(file + ".index.json");
    read_tensors(separate ? file : weights_path(model, c), c, table, master);
}

// Host memory for this rank's part of all tensors of a table, from which upload() sets m's parameters: all of them or, with
// ZeRO-3, this rank's shards.
class HostWeights {
public:
    HostWeights(be::Ctx& ctx, const TrainingMemory& m, floatX* params, const ParameterTable& table)
        : m_(m),
          whole_(m.shards.cut_params ? table.size : 0),
          kept_(ctx, params, m.shards.cut_params ? m.shards.size : table.size) {}
    floatX* data() { return m_.shards.cut_params ? whole_.data() : kept_.data(); }
    void upload() {
        m_.shards.for_each_part(0, whole_.size(), [&](size_t from, size_t shard, size_t n) {
            std::copy_n(whole_.data() + from, n, kept_.data() + shard);
        });
        kept_.upload();
    }

private:
    const TrainingMemory& m_;
    std::vector<floatX> whole_;
    HostSide<floatX> kept_;
};

// Sets the parameters of the table, and this rank's lower halves, to fp32 weights.
inline void set_weights(be::Ctx& ctx, const TrainingMemory& m, const std::vector<real>& weights) {
    HostWeights params(ctx, m, m.params, m.table);
    HostSide<LowerHalf> lower(ctx, m.master_low_bits, m.master_low_bits ? m.shards.size : 0, m.state_on_host());
    floatX* to = params.data();
    LowerHalf* halves = lower.data();
    // In parallel, so that on a NUMA machine the pages that all threads read are spread over all nodes (first touch).
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < weights.size(); i++) {
        LowerHalf half;
        store_weight(&to[i], &half, 0, weights[i]);
    }
    if (m.master_low_bits)
        m.shards.for_each_part(0, weights.size(), [&](size_t from, size_t shard, size_t n) {
#pragma omp parallel for schedule(static)
            for (size_t i = 0; i < n; i++) store_weight(to + from, halves + shard, i, weights[from + i]);
        });
    params.upload();
    lower.upload();
}

// The biases of a mixture's experts, if it has them.
inline void load_expert_biases(be::Ctx& ctx, TrainingMemory& m, const std::string& dir) {
    if (m.c.mixture.bias) m.expert_biases.set(ctx, read_expert_biases(dir, m.c));
}

// Loads weights from a model's directory; the fp32 weights of training start as these. If experts become copies of a dense
// model's MLP, the fraction drop_ratio of their dimensions is redrawn (upcycling.h).
inline void load_parameters(be::Ctx& ctx, TrainingMemory& m, const std::string& dir, double drop_ratio, uint64_t seed) {
    m.sharded_params.drop(ctx);
    load_expert_biases(ctx, m, dir);
    if (m.master_low_bits && !m.frozen && finer_than_floatX(dir)) {
        std::vector<real> weights(m.table.size);
        read_parameters(dir, m.c, m.table, weights.data());
        if (drop_ratio > 0) redraw_experts(dir, m.c, m.table, weights.data(), drop_ratio, seed);
        return set_weights(ctx, m, weights);
    }
    HostWeights params(ctx, m, m.model_params(), m.model_table());
    HostSide<uint8_t> quantized(ctx, m.frozen ? m.frozen->quantized : nullptr, m.model_table().quantized_bytes);
    read_parameters(dir, m.c, m.model_table(), params.data(), quantized.data());
    if (drop_ratio > 0) redraw_experts(dir, m.c, m.model_table(), params.data(), drop_ratio, seed);
    params.upload();
    quantized.upload();
    if (!m.master_low_bits || m.frozen) return;
    HostSide<LowerHalf> lower(ctx, m.master_low_bits, m.shards.size, m.state_on_host());
    cpu::clear_in_parallel(lower.data(), m.shards.size * sizeof(LowerHalf));
    lower.upload();
}

inline void load_parameters(be::Ctx& ctx, TrainingMemory& m, const std::string& dir) { load_parameters(ctx, m, dir, 0, 0); }

// Quantizes a frozen tensor from `weights` in the backend's memory.
inline void quantize_tensor(be::Ctx& ctx, const TrainingMemory& m, const TensorSpec& t, const floatX* weights) {
    std::vector<floatX> stored(t.size());
    be::download(ctx, stored.data(), weights, stored.size() * sizeof(floatX));
    const std::vector<float> numbers(stored.begin(), stored.end());
    std::vector<uint8_t> to(coded_bytes(t));
    CHECK(quantize_tensor(t, numbers.data(), to.data()), "%s", t.name.c_str());
    be::upload(ctx, m.frozen->quantized + t.offset, to.data(), to.size());
}

// New adapters, initialized like PEFT's but without biases. The numbers are functions of the seed, the tensor and the element's
// index in the whole tensor.
inline void initialize_adapters(be::Ctx& ctx, const TrainingMemory& m, uint64_t seed) {
    std::vector<real> weights(m.table.size);
    for (const TensorSpec& t : m.table.rows) {
        const bool uniform = t.init == Init::kaiming;
        if (!uniform && t.init != Init::standard_normal) continue;
        const double bound = 1 / std::sqrt((double)t.whole_cols);
        for (size_t i = 0; i < t.size(); i++) {
            const size_t row = (size_t)t.whole_row((int)(i / (size_t)t.cols)),
                         column = (size_t)t.first_col + i % (size_t)t.cols, index = row * (size_t)t.whole_cols + column;
            weights[t.offset + i] = uniform
                                        ? (real)(bound * (2 * uniform_at(seed, RngPurpose::init, (uint32_t)t.id, index) - 1))
                                        : (real)normal_at(seed, RngPurpose::init, (uint32_t)t.id, index);
        }
    }
    set_weights(ctx, m, weights);
}

// New virtual tokens: the embeddings of these tokens (token by token) in the model in `base`.
inline void initialize_virtual_tokens(be::Ctx& ctx, const TrainingMemory& m, const std::string& base,
                                      const std::vector<int>& tokens) {
    if (m.table.rows.empty()) return;  // they are on another stage
    const ModelConfig stored = as_stored(base, m.c);
    TensorSpec rows = ParameterTable(stored).rows[0];  // of the token embedding
    rows.rows = (int)tokens.size();
    rows.blocks.clear();
    for (int i = 0; i < rows.rows; i++) rows.blocks.push_back({i, tokens[(size_t)i], 1});
    std::vector<real> weights(m.table.size);
    TensorSource(base, stored).read(rows, weights.data());
    for (real& x : weights) x *= (real)m.c.embedding_scale;
    set_weights(ctx, m, weights);
}

// Loads adapters that PEFT or a run has written.
inline void load_adapters(be::Ctx& ctx, const TrainingMemory& m, const std::string& dir) {
    std::vector<real> weights(m.table.size);
    read_tensors(weights_path(dir, m.c), m.c, m.table, weights.data());
    set_weights(ctx, m, weights);
}

// Loads fp32 weights and moments from a checkpoint; moments that had more bits are rounded to the nearest.
inline void load_weights_and_moments(be::Ctx& ctx, TrainingMemory& m, const std::string& dir) {
    if (!m.frozen) load_expert_biases(ctx, m, dir);
    std::vector<real> whole(m.table.size);  // this rank's tensors, of which it keeps its shards
    const bool on_host = m.state_on_host();
    const auto keep_parts = [&](const Elements& moment, size_t n_kept) {
        moment.visit_moment([&](auto* elements) {
            HostSide parts(ctx, elements, n_kept, on_host);
            m.shards.for_each_part(0, m.table.size, [&](size_t from, size_t shard, size_t n) {
                for (size_t i = 0; i < n && shard + i < n_kept; i++) parts.data()[shard + i] = whole[from + i];
            });
            parts.upload();
        });
    };
    // Another optimizer (--override optimizer), which keeps fewer moments, may have saved it: the others start at zero.
    int saved = optimizer_row(saved_option(read_state(dir), "optimizer")).moments;
    for (const Moment& moment : m.moments()) {
        if (saved-- > 0) read_tensors(dir + "/training/" + moment.name + ".safetensors", m.c, m.table, whole.data());
        else std::fill(whole.begin(), whole.end(), real(0));
        keep_parts(m.*moment.of, moment.n);
    }
    m.sharded_params.drop(ctx);
    read_masters(dir + "/training/master.safetensors", dir, m.c, m.table, whole.data());
    set_weights(ctx, m, whole);
    // A run without an average before starts it from the weights.
    if (!m.average) return;
    if (const std::string averages = dir + "/ema"; file_exists(averages))
        read_masters(dir + "/training/ema.safetensors", averages, m.c, m.table, whole.data());
    keep_parts(m.average, m.shards.size);
}
