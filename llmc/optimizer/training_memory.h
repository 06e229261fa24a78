// The part of a model that training keeps from step to step, for any architecture: this rank's parameters, their gradients, the
// lower halves of their fp32 weights, and AdamW's moments; their layout, and their shards over ranks. Parts of a run that treat
// all parameters alike (checkpoints, checks of memory, ZeRO) take one of these. When training adapters (adapters.h), these are
// the adapters' parameters, and the model's own are stored separately, frozen, without other state.
#pragma once
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "../elements.h"
#include "../model/adapters.h"
#include "../model/arena.h"
#include "../model/gradients.h"
#include "../model/model_config.h"
#include "../model/parameters.h"
#include "expert_biases.h"
#include "muon.h"
#include "optimizer_state.h"
#include "optimizers.h"
#include "../parallel/ranks.h"
#include "shard.h"
#include "sharded_gradients.h"
#include "sharded_parameters.h"
#include "zero.h"

// This rank's shards (shards.size) of weights and moments.
struct Parts : OptimizerState {
    floatX* params = nullptr;
};

// A moment that the optimizer keeps.
struct Moment {
    const char* name;              // in checkpoints
    Elements OptimizerState::*of;  // of a TrainingMemory or of Parts
    size_t n;                      // elements on this rank
};

// A model with frozen parameters.
struct FrozenModel {
    ParameterTable table;
    floatX* params = nullptr;      // (table.size)
    uint8_t* quantized = nullptr;  // (table.quantized_bytes)
};

// The optimizer's state is (shards.size) each, exp_avg_sq (size_of_exp_avg_sq()); its types, and the type of grads, are set
// before planning.
struct TrainingMemory : OptimizerState {
    ModelConfig c;
    std::shared_ptr<Ranks> ranks;
    std::vector<int> stages;  // layers of each stage of the pipeline
    ParameterTable table;     // of the trained tensors: the model's, or its adapters'
    std::optional<FrozenModel> frozen;
    VirtualTokens virtual_tokens;
    ExpertBiases expert_biases;
    Shards shards;
    std::vector<Range> not_duplicated;  // elements of the buffer that this rank includes in sums over all ranks
    floatX* params = nullptr;           // (table.size); with ZeRO-3 (shards.size)
    ShardedParameters sharded_params;   // for ZeRO-3: whole, of two blocks
    Elements grads;                     // (table.size) summed over the micro-batches of a step; with ZeRO-2 (shards.size)
    ShardedGradients sharded_grads;     // for ZeRO-2: of a micro-batch in two blocks
    BlockGradients micro_grads;         // for bf16 grads: of a micro-batch in a block
    const OptimizerRow* optimizer =
        &row_of(optimizers, OptimizerKind::adamw);  // this and Muon's recipe are set before planning
    Muon muon;
    std::unique_ptr<StateStream> stream = std::make_unique<StateStream>();  // streams the optimizer's state during updates
    bool offloads = false;            // the state is in page-locked host memory; set before memory is planned
    bool offloads_gradients = false;  // the gradients, too
    bool averages = false;            // keep an average of the weights; set before memory is planned
    bool examines = false;            // log the layers' health; set before memory is planned
    real* before = nullptr;           // (shards.size) in host memory: the fp32 weights before an update that is examined
    Parts copy;                       // host memory from which a checkpoint is saved; null: saved from the tensor itself
    bool copies = false;              // save everything from the copy; else at most the parameters

    TrainingMemory(const ModelConfig& config, std::shared_ptr<Ranks> r, std::vector<int> stage_layers)
        : c(config),
          ranks(std::move(r)),
          stages(std::move(stage_layers)),
          table(trained_table(c, part_of(c, ranks->mesh, stages), (size_t)ranks->mesh.dp.size * 64)),
          shards(table, ranks->mesh, ranks->zero, ranks->bucket_elements, ranks->whole_matrices),
          not_duplicated(shards.not_duplicated(table)) {
        if (c.frozen()) frozen = FrozenModel{frozen_table(c, table.part)};
    }

    // The model's own parameters.
    const ParameterTable& model_table() const { return frozen ? frozen->table : table; }
    floatX* model_params() const { return frozen ? frozen->params : params; }

    // Elements of exp_avg_sq: Muon has none for its matrices, and checkpoints store zeros there.
    size_t size_of_exp_avg_sq() const {
        if (!optimizer->second_moment()) return 0;
        return muon.recipe.on && !muon.recipe.neurons ? shards.size_of_cut : shards.size;
    }
    std::vector<Moment> moments() const {
        std::vector<Moment> all = {{names_of_moments[0], &OptimizerState::exp_avg, shards.size}};
        if (optimizer->second_moment()) all.push_back({names_of_moments[1], &OptimizerState::exp_avg_sq, size_of_exp_avg_sq()});
        return all;
    }

    const OptimizerState& state() const { return *this; }

    // Weights of which this rank has the shard: from this element of the buffer on, which is at `shard` in this rank's shards;
    // or of a bucket.
    floatX* own_weights(size_t element, size_t shard) const { return params + (shards.cut_params ? shard : element); }
    floatX* weights_of(const Bucket& b) const { return own_weights(b.mine, b.shard); }
    // Where ops read a row of model_table().
    floatX* weights_to_read(size_t row) const {
        const TensorSpec& t = model_table().rows[row];
        return sharded_params.used() ? sharded_params.parameter(t) : model_params() + t.offset;
    }
    // The gradients of this rank's shard of a bucket, from its first element on.
    Elements gradients_of(const Bucket& b) const { return grads.from(shards.cut_gradients ? b.shard : b.mine); }
    // Calls visit(gradients, n) for all gradients that this rank includes in sums over all ranks.
    template <class Visit>
    void for_each_own_gradient(Visit visit) const {
        for (const Range& r : not_duplicated) {
            if (!shards.cut_gradients) visit(grads.from(r.begin), r.end - r.begin);
            else
                shards.for_each_part(r.begin, r.end - r.begin,
                                     [&](size_t, size_t shard, size_t n) { visit(grads.from(shard), n); });
        }
    }
    // Where ops write the gradient of a row of the table; null without gradients.
    real* gradient_to_write(size_t row) const {
        const TensorSpec& t = table.rows[row];
        if (sharded_grads.used()) return sharded_grads.gradient(t);
        if (!grads.data) return nullptr;
        return micro_grads.used() ? micro_grads.gradient(row) : (real*)grads.from(t.offset).data;
    }
    // Before they are reduced over data-parallel ranks: this rank's gradients of a tensor, or of vectors from this element on.
    Elements own_gradient(const TensorSpec& t) const {
        return shards.cut_gradients ? Elements(sharded_grads.gradient(t)) : grads.from(t.offset);
    }
    Elements own_gradients_of_vectors(size_t begin) const {
        return shards.cut_gradients ? Elements(sharded_grads.vector(begin)) : grads.from(begin);
    }
    bool state_on_host() const { return be::memory_is_host || offloads; }

    // Plans everything, or without training only the parameters.
    void plan(Arena& arena, bool training) {
        if (frozen) arena.add("parameters (frozen)", &frozen->params, frozen->table.size);
        if (frozen && frozen->table.quantized_bytes)
            arena.add(format("parameters (frozen, %s)", weight_format_row(c.base_format).word).c_str(), &frozen->quantized,
                      frozen->table.quantized_bytes);
        const size_t n_params = shards.cut_params ? shards.size : table.size;
        if (!frozen || c.adapted()) arena.add(frozen ? "adapters" : "parameters", &params, n_params);
        if (shards.cut_params) sharded_params.plan(arena, table, c.tied);
        expert_biases.plan(arena, c, table.part);
        if (!training) return;
        const char* const gradients = grads.is_bf16() ? "gradients (bf16)" : "gradients (fp32)";
        const size_t n_gradients = shards.cut_gradients ? shards.size : table.size;
        offloads_gradients ? arena.add_locked(gradients, &grads, n_gradients) : arena.add(gradients, &grads, n_gradients);
        if (shards.cut_gradients) sharded_grads.plan(arena, table, !frozen && c.tied);
        else if (grads.is_bf16()) micro_grads.plan(arena, table, !frozen, c.tied, offloads_gradients);
        const auto add = [&](const char* purpose, auto* part, size_t n) {
            offloads ? arena.add_locked(purpose, part, n) : arena.add(purpose, part, n);
        };
        if (has_lower_halves) add("master weights (lower 16 bits)", &master_low_bits, shards.size);
        for (const Moment& moment : moments()) {
            Elements& x = this->*moment.of;
            const char* const type = !x.rounded() ? "fp32" : x.is_bf16() ? "bf16" : "8 bits";
            add(format("%s (%s)", optimizer->in_memory, type).c_str(), &x, moment.n);
        }
        muon.plan(arena, c, table, shards);
        if (averages) add("EMA of the weights (fp32)", &average, shards.size);
        if (offloads) stream->plan(arena, state(), optimizer->second_moment(), averages, shards.largest());
        if (examines) arena.add_on_host("weights before an update (health)", &before, shards.size);
    }

    static constexpr const char* copy_purpose = "copy for checkpoints";
    // Plans the copy, in host memory, from which a checkpoint is saved while training continues. A save in the foreground needs
    // no copy of tensors in host memory, except of parameters that are not in the order of the shards.
    void plan_copy(Arena& arena, bool foreground) {
        const bool in_place = foreground && state_on_host();
        const auto add = [&](auto* part, size_t n) { arena.add_on_host(copy_purpose, part, n); };
        copy.exp_avg.type = exp_avg.type;
        copy.exp_avg_sq.type = exp_avg_sq.type;
        if (!in_place || !shards.in_order || !be::memory_is_host || offloads) add(&copy.params, shards.size);
        copies = !in_place;  // also if this rank trains nothing and a copy has no bytes
        if (in_place) return;
        if (has_lower_halves) add(&copy.master_low_bits, shards.size);
        for (const Moment& moment : moments()) add(&(copy.*moment.of), moment.n);
        if (averages) add(&copy.average, shards.size);
    }
};

// Copies to and from the optimizer's state, in order with the ops on ctx; `to` and `from` on the other side are host memory.
inline void read_state(be::Ctx& ctx, const TrainingMemory& m, void* to, const void* state, size_t bytes) {
    if (!m.offloads) return be::download(ctx, to, state, bytes);
    wait_for_device(ctx);
    cpu::copy_in_parallel(to, state, bytes);
}
inline void write_state(be::Ctx& ctx, const TrainingMemory& m, void* state, const void* from, size_t bytes) {
    if (!m.offloads) return be::upload(ctx, state, from, bytes);
    wait_for_device(ctx);
    cpu::copy_in_parallel(state, from, bytes);
}

// The same for the gradients.
inline void read_gradients(be::Ctx& ctx, const TrainingMemory& m, void* to, const void* gradients, size_t bytes) {
    m.offloads_gradients ? read_state(ctx, m, to, gradients, bytes) : be::download(ctx, to, gradients, bytes);
}
inline void write_gradients(be::Ctx& ctx, const TrainingMemory& m, void* gradients, const void* from, size_t bytes) {
    m.offloads_gradients ? write_state(ctx, m, gradients, from, bytes) : be::upload(ctx, gradients, from, bytes);
}
// n of them from index `first` of grads on.
inline std::vector<real> gradients_at(be::Ctx& ctx, const TrainingMemory& m, size_t first, size_t n) {
    return m.grads.from(first).visit([&](const auto* x) {
        std::vector<std::decay_t<decltype(*x)>> values(n);
        read_gradients(ctx, m, values.data(), x, n * sizeof *x);
        return std::vector<real>(values.begin(), values.end());
    });
}

// ---- gradients of parameters that several ranks hold, each with a partial sum ----------------------------------------------
// These are called before the data-parallel reduction. The first sums gradients of key/value heads that several tp ranks hold,
// and of replicated matrices: adapters', routers.
inline void reduce_replicas(be::Ctx& ctx, const TrainingMemory& m, const TensorSpec& t) {
    const Elements gradient = m.own_gradient(t);
    if (t.partial_sum) all_reduce(ctx, m.ranks->tp, gradient, t.size());
    if (t.replicated_rows)
        all_reduce(ctx, m.ranks->kv, gradient.from((size_t)(t.rows - t.replicated_rows) * t.cols),
                   (size_t)t.replicated_rows * t.cols);
}
inline void reduce_replicas(be::Ctx& ctx, const TrainingMemory& m, int block) {
    for (const TensorSpec& t : m.table.rows)
        if (t.block == block) reduce_replicas(ctx, m, t);
}
// Sums gradients of norms of query and key heads and of routers' biases; with sequence parallelism, of all norms and whole
// biases; and of a tied embedding at both ends of the pipeline.
inline void reduce_shared(be::Ctx& ctx, const TrainingMemory& m) {
    const size_t summed = m.ranks->sequence_parallel ? m.table.shared : m.table.partial;
    if (summed < m.table.size) all_reduce(ctx, m.ranks->tp, m.own_gradients_of_vectors(summed), m.table.size - summed);
    for (const TensorSpec& t : m.table.rows) {
        if (!m.c.tied || t.id != 0) continue;
        if (!m.shards.cut_gradients) all_reduce(ctx, m.ranks->ends, m.grads.from(t.offset), t.size());
        else
            m.shards.for_each_part(t.offset, t.size(), [&](size_t, size_t shard, size_t n) {
                all_reduce(ctx, m.ranks->ends, m.grads.from(shard), n);
            });
    }
}

// With ZeRO-2, after a micro-batch's backward pass through a block, the head or the embedding: reduces the matrices' gradients.
inline void reduce_section(be::Ctx& ctx, TrainingMemory& m, int block, Acc acc, uint64_t key) {
    for (const TensorSpec& t : m.table.rows)
        if (t.block == block && block >= 0 && !t.vector()) reduce_replicas(ctx, m, t);
    m.sharded_grads.end(ctx, m, block, acc, key);
}
// And after the last micro-batch: completes all gradients.
inline void finish_sections(be::Ctx& ctx, TrainingMemory& m) {
    for (const TensorSpec& t : m.table.rows)
        if (t.block >= 0 && t.vector()) reduce_replicas(ctx, m, t);
    m.sharded_grads.finish_matrices(ctx, m);
    reduce_shared(ctx, m);
    m.sharded_grads.reduce_vectors(ctx, m);
}
