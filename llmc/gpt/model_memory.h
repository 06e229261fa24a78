// The memory of a GPT on one rank: plans the tensors of model.h in the arena and, once that is allocated, sets the pointers.
//   for_each_tensor      the one list of a block's activations, which determines planning, sharing and recomputation
//   plan_...             sizes, and places in the arena by purpose
//   bind_linears         each layer's parameters, and the buffers for their gradients
//   plan_memory          all of the plan
//   allocate             memory, constants and all pointers
#pragma once
#include <algorithm>
#include <climits>
#include <tuple>
#include <vector>

#include "../base/check.h"
#include "../base/math.h"
#include "../model/arena.h"
#include "../model/decoder.h"
#include "../model/recompute.h"
#include "../ops.h"
#include "../parallel/pipeline_schedule.h"
#include "../parallel/ranks.h"
#include "model.h"

// ---- planning ---------------------------------------------------------------------------------------------------------------

// Rows of this rank's residual stream for a micro-batch of N rows.
inline size_t planned_rows(const Model& m, size_t N) {
    return m.ranks->sequence_parallel ? N / (size_t)m.ranks->mesh.tp.size : N;
}

// The largest mixture of N rows on this rank: rows, of all ranks whose rows are gathered, and experts.
inline MixtureShape largest_mixture(const Model& m, size_t N) {
    return {1, (int)N * m.dispatching_ranks(), m.c.mixture.experts / m.ranks->mesh.ep.size, m.c.mixture.topk};
}
// Slots of a mixture for N rows. In the worst case all rows choose this rank's experts.
inline size_t mixture_slots(const Model& m, size_t N) { return m.c.mixture.on() ? (size_t)largest_mixture(m, N).slots() : 0; }

// Elements of the activations of a layer's MLP, of this kind, for N rows on this rank; or the largest of several layers, which
// may be of both kinds.
struct MlpSizes {
    bool dense, mixture;
    size_t fc1, act;
    size_t shared_fc1, shared_act;  // of the shared expert
};
inline MlpSizes mlp_sizes(const Model& m, size_t N, bool mixture) {
    const int F = (mixture ? m.c.expert_width() : m.c.F) / m.local.tp_size;
    const size_t rows = mixture ? mixture_slots(m, N) : N;
    const int shared = mixture ? m.c.mixture.shared / m.local.tp_size : 0;
    return {!mixture, mixture, rows * (size_t)m.c.F1(F), rows * (size_t)F, N * (size_t)m.c.F1(shared), N * (size_t)shared};
}
// The sizes of the buffers that all layers of the model share.
inline MlpSizes largest_mlp(const Model& m, size_t N) {
    const int mixtures = m.c.mixtures();
    if (mixtures == 0 || mixtures == m.c.L) return mlp_sizes(m, N, mixtures > 0);
    const MlpSizes dense = mlp_sizes(m, N, false), mixture = mlp_sizes(m, N, true);
    return {
        true, true, std::max(dense.fc1, mixture.fc1), std::max(dense.act, mixture.act), mixture.shared_fc1, mixture.shared_act};
}

// visit(elements, kept, tensor...) for every tensor of a block's activations, or for the same tensor of several blocks.
// Planning, sharing and pointers all follow from this list.
template <class Visit, class... S>
inline void for_each_tensor(const Model& m, const MlpSizes& mlp, Visit visit, S&... s) {
    const size_t N = (size_t)m.a.B * m.a.T, Nl = planned_rows(m, N), C = (size_t)m.c.C;
    const size_t experts = (size_t)m.c.mixture.experts;
    const Kept of_norm = m.c.norm_before() ? Kept::unless_selective : Kept::elsewhere;
    const auto statistics = [&](auto&... stats) {
        visit(Nl, Kept::unless_full, stats.mean...);
        visit(Nl, Kept::unless_full, stats.rstd...);
    };
    const auto sorted = [&](size_t ranks, size_t E, size_t K, auto&... r) {
        const size_t choices = ranks * N * K;
        visit(choices, Kept::unless_full, r.experts...);
        visit(choices, Kept::unless_full, r.slots...);
        visit(choices, Kept::unless_full, r.choices...);
        visit(E + 1, Kept::unless_full, r.offsets...);
        visit(ranks * (size_t)m.a.B * E, Kept::unless_full, r.counts...);
    };
    const auto routing = [&](size_t ranks, size_t E, size_t K, auto&... r) {
        visit(ranks * N * K, Kept::unless_full, r.weights...);
        sorted(ranks, E, K, r...);
    };
    // Experts multiply in FP8 without keeping codes (expert_layer.h).
    const auto input_of_mlp = [&](size_t n, Kept kept, auto&... inp) {
        if (mlp.dense) visit(n, kept, inp...);
        else visit(n, kept, inp.bf16...);
    };
    visit(Nl * C, of_norm, s.norm1...);
    visit(N * m.local.QKVl, Kept::unless_full, s.qkv...);
    for (int k = 0; m.c.qk_norm != QkNorm::none && k < 2; k++) {
        const size_t heads = k ? m.local.NKVl : m.local.NHl;
        visit(N * heads * m.c.HS(), Kept::unless_full, s.heads[k].x...);
        visit(N * (m.c.qk_norm == QkNorm::whole ? 1 : heads), Kept::unless_full, s.heads[k].rstd...);
    }
    visit(N * m.local.NHl * m.c.HS(), Kept::unless_full, s.att...);
    visit(Nl * C, m.c.parallel() ? Kept::never : Kept::unless_full, s.mid...);
    input_of_mlp(Nl * C, of_norm, s.norm2...);
    if (mlp.mixture) {
        const size_t topk = (size_t)m.c.mixture.topk, ep = (size_t)m.ranks->mesh.ep.size;
        visit(N * experts, Kept::unless_full, s.mlp.routing.logits...);
        routing(1, experts, topk, s.mlp.routing...);
        if (ep > 1) routing((size_t)m.dispatching_ranks(), experts / ep, topk, s.mlp.dispatched...);
        if (m.sends_all_to_all()) sorted(1, ep, std::min(topk, ep), s.mlp.sent...);
    }
    if (mlp.shared_fc1) {
        if (m.c.mixture.shared_gate) {
            visit(N, Kept::unless_full, s.mlp.shared.gate.logits...);
            routing(1, 1, 1, s.mlp.shared.gate...);
        }
        visit(mlp.shared_fc1, Kept::unless_mlp, s.mlp.shared.fc1...);
        visit(mlp.shared_act, Kept::unless_selective, s.mlp.shared.act...);
    }
    visit(mlp.fc1, Kept::unless_mlp, s.mlp.fc1...);
    input_of_mlp(mlp.act, Kept::unless_selective, s.mlp.act...);
    if (m.c.norm_before()) {
        statistics(s.stats1...);
        statistics(s.stats2...);
    }
    if (m.c.norm_after()) {
        visit(Nl * C, Kept::unless_full, s.proj.x...);
        visit(Nl * C, Kept::unless_full, s.mlp.fc2.x...);
        statistics(s.proj.stats...);
        statistics(s.mlp.fc2.stats...);
    }
    visit(N * m.local.NHl, Kept::unless_full, s.lse...);
}

// Plans the sizes of all layers, and memory for the codes of their weights.
inline void plan_linears(Model& m, bool fp8) {
    const ParameterTable& table = m.model_table();
    m.specs = {};
    bind_rows(m.c, table, m.specs, [&](size_t row) { return &table.rows[row]; });
    Block block{};
    block.linears.resize(number_of_values<Matrix>());
    m.blocks.assign(m.specs.blocks.size(), block);
    const auto set_sizes = [](Linear& l, Matrix matrix, size_t block, const TensorSpec& w) {
        l.matrix = matrix;
        l.block = (int)block;
        l.in = w.cols;
        l.out = w.rows / w.experts;
        l.tensor = &w;
    };
    for (size_t i = 0; i < m.blocks.size(); i++) {
        const BlockParams<const TensorSpec>& specs = m.specs.blocks[i];
        SharedExpert& shared = m.blocks[i].shared;
        m.blocks[i].router.tensor = specs.router_w;
        shared.gate.tensor = specs.shared_gate_w;
        if (specs.shared_fc1_w) {
            set_sizes(shared.fc1, Matrix::fc1, i, *specs.shared_fc1_w);
            set_sizes(shared.fc2, Matrix::fc2, i, *specs.shared_fc2_w);
        }
        for (const Matrix matrix : all_matrices) {
            const TensorSpec& w = *specs.weight_and_bias(matrix).first;
            Linear& l = m.blocks[i][matrix];
            set_sizes(l, matrix, i, w);
            l.of_experts = specs.router_w && (matrix == Matrix::fc1 || matrix == Matrix::fc2);
            if (!fp8 || !m.fp8.blocks[i] || l.of_experts) continue;
            m.arena.add("FP8 weights", &l.fp8, w.size());
            if (m.fp8.keeps_transposes) m.arena.add("FP8 weights", &l.fp8_t, w.size());
        }
    }
}

// Plans the adapters and their activations.
inline void plan_adapters(Model& m) {
    m.virtual_tokens.plan(m.arena, m.c, m.table.part, m.a.B, m.recompute != Recompute::inference);
    if (!m.c.lora.on()) return;
    const size_t widest = (size_t)std::max({m.c.C, m.local.QKVl, m.local.NHl * m.c.HS(), m.c.F1() / m.local.tp_size});
    const size_t N = (size_t)m.a.B * m.a.T;
    m.lora.plan(m.arena, m.c, m.table.part, N, mixture_slots(m, N), widest, m.recompute != Recompute::inference);
    for (LoraLayer& adapters : m.lora.layers) m.blocks[(size_t)adapters.block][adapters.matrix].lora = &adapters;
}

// Plans the micro-batches of every chunk. arena.add() stores the address of each pointer, so the vectors get their final size
// first.
inline void plan_micro_batches(Model& m, const std::vector<int>& micro_batches) {
    const Mesh& mesh = m.ranks->mesh;
    const bool training = m.recompute != Recompute::inference;
    m.a.micro_batches.assign((size_t)mesh.vpp, {});
    for (int chunk = 0, block = 0; chunk < mesh.vpp; chunk++) {
        const int stage = virtual_stage(mesh.pp.size, mesh.pp.rank, chunk), layers = m.stages[stage];
        MicroBatch one;
        one.first_block = block;
        one.first = stage == 0;
        one.last = stage == (int)m.stages.size() - 1;
        one.x.assign((size_t)layers + 1, nullptr);
        one.blocks.assign((size_t)layers, BlockActivations{});
        one.messages.assign((size_t)layers, RowMessages());
        const int n = training ? micro_batches_in_flight(mesh.pp.size, mesh.pp.rank, mesh.vpp, micro_batches, chunk) : 1;
        m.a.micro_batches[chunk].assign((size_t)n, one);
        block += layers;
    }
}

// Plans the tensors that a block keeps.
inline void plan_block(Model& m, BlockActivations& s, bool mixture, Recompute recompute, bool fp8) {
    const char* const purpose = "activations: kept per block";
    const auto plan = [&](size_t count, Kept kept, auto& tensor) {
        const Storage storage(kept, recompute, fp8 && fp8_of(tensor), m.c.lora.on(), m.fp8.after_bf16);
        if (storage.own_bf16) m.arena.add(purpose, &bf16_of(tensor), count);
        if (uint8_t** fp8_codes = fp8_of(tensor); fp8_codes && storage.own_fp8) m.arena.add(purpose, fp8_codes, count);
    };
    for_each_tensor(m, mlp_sizes(m, (size_t)m.a.B * m.a.T, mixture), plan, s);
    if (fp8) m.arena.add(purpose, &s.inverses, 4);
}

inline void plan_activations(Model& m, bool fp8) {
    const bool training = m.recompute != Recompute::inference;
    const size_t N = (size_t)m.a.B * m.a.T, Nl = planned_rows(m, N), C = (size_t)m.c.C;
    Arena& arena = m.arena;
    for (auto& chunk : m.a.micro_batches)
        for (MicroBatch& in : chunk) {
            // Without a backward pass, two buffers alternate.
            const size_t own_x = training ? in.x.size() : std::min<size_t>(2, in.x.size());
            for (size_t i = 0; i < own_x; i++) arena.add("activations: block inputs", &in.x[i], Nl * C);
            for (size_t i = 0; i < in.blocks.size(); i++) {
                const size_t block = (size_t)in.first_block + i;
                plan_block(m, in.blocks[i], m.blocks[block].has_mixture(), m.recompute_of((int)i), fp8 && m.fp8.blocks[block]);
            }
            if (m.c.embedding_norm && in.first) {
                arena.add("activations: embedding, head", &in.embedded, Nl * C);
                arena.add("activations: embedding, head", &in.embedding_stats.mean, Nl);
                arena.add("activations: embedding, head", &in.embedding_stats.rstd, Nl);
            }
            for (int** ids : {&in.tokens, &in.targets, &in.positions}) arena.add("activations: embedding, head", ids, N);
            const size_t attending = m.ranks->exchanges_heads ? N * (size_t)m.ranks->mesh.cp.size : N;
            arena.add("activations: embedding, head", &in.doc_start, attending);
            if (m.c.window) arena.add("activations: embedding, head", &in.window_start, attending);
        }
    const char* const shared = "activations: shared block";
    const auto plan_shared = [&](size_t count, Kept kept, auto& tensor) {
        const Storage storage(kept, m.recompute, fp8 && fp8_of(tensor), m.c.lora.on(), m.fp8.after_bf16);
        if (storage.shared_bf16) arena.add(shared, &bf16_of(tensor), count);
        if (uint8_t** fp8_codes = fp8_of(tensor); fp8_codes && storage.shared_fp8) arena.add(shared, fp8_codes, count);
    };
    for_each_tensor(m, largest_mlp(m, N), plan_shared, m.a.shared);
    arena.add(shared, &m.a.branch_out, Nl * C);
    if (m.c.mixture.on()) arena.add(shared, &m.a.expert_rows, mixture_slots(m, N) * C);
    if (m.dispatching_ranks() > 1) arena.add(shared, &m.a.dispatched_rows, (size_t)m.dispatching_ranks() * N * C);
    if (m.dispatching_ranks() > 1 && m.expert_capacity.factor > 0)
        arena.add(shared, &m.a.kept_experts, N * (size_t)m.c.mixture.topk);
    if (m.sends_all_to_all()) {
        const size_t ep = (size_t)m.ranks->mesh.ep.size, K = (size_t)m.c.mixture.topk;
        const size_t of_routing = ceil_div(K * sizeof(real), sizeof(floatX));  // a row's experts, weights or their gradients
        arena.add(shared, &m.a.sent_rows, (size_t)m.mixture_of_ranks((int)N).slots() * std::max(C, of_routing));
        arena.add(shared, &m.a.message_ends, ep * (ep + 1));
    }
    if (m.cuts_head_norms()) arena.add(shared, &m.a.head_sums, 2 * N);
    size_t largest = 0;
    for (const TensorSpec& t : m.model_table().rows)
        if (t.quantized()) largest = std::max(largest, t.size());
    if (largest) arena.add("weights of a layer (dequantized)", &m.a.dequantized, largest);
    m.a.all_rows = m.a.all_inputs = nullptr;
    if (m.ranks->sequence_parallel) arena.add(shared, &m.a.all_rows, N * C);
    if (m.ranks->overlap && !m.frozen) arena.add(shared, &m.a.all_inputs, N * C);
    if (const size_t cp = (size_t)m.ranks->mesh.cp.size; m.ranks->exchanges_heads) {
        for (floatX*& rows : m.a.exchanged) arena.add(shared, &rows, N * (size_t)m.local.QKVl);
        for (floatX** rows : {&m.a.whole_att, &m.a.whole_datt})
            if (training) arena.add(shared, rows, N * (size_t)(m.local.NHl * m.c.HS()));
    } else if (cp > 1) {
        const size_t row = 2 * (size_t)m.local.NKVl * m.c.HS();
        arena.add(shared, &m.a.all_keys, cp * N * row);
        for (floatX** keys : {&m.a.keys, &m.a.dkeys}) arena.add(shared, keys, cp * (size_t)m.a.T * row);
    }
}

// Plans scratch memory for codes, and the scales of all tensors.
inline void plan_fp8(Model& m) {
    const size_t N = (size_t)m.a.B * m.a.T;
    const int dense = m.c.mixtures() < m.c.L ? m.c.F1() / m.local.tp_size : 0;
    const size_t widest = N * (size_t)std::max({m.c.C, m.local.QKVl, dense, m.local.NHl * m.c.HS()});
    for (uint8_t** scratch : {&m.a.fp8_codes, &m.a.fp8_inputs, &m.a.fp8_gradients})
        m.arena.add("activations: shared block", scratch, widest);
    for (float** numbers : {&m.fp8.scale, &m.fp8.amax}) m.arena.add("FP8 weights", numbers, m.fp8.tensors());
    m.arena.add("FP8 weights", &m.fp8.inverse, m.fp8.tensors());
    m.arena.add("FP8 weights", &m.fp8.now, 1);
    size_t largest = 0, of_experts = 0;
    for (const Block& b : m.blocks) {
        if (!m.fp8.blocks[(size_t)b.fc1().block]) continue;
        for (const Linear& l : b.linears) {
            size_t& size = l.of_experts ? of_experts : largest;
            size = std::max(size, l.tensor->size());
        }
        if (b.shared.exists()) of_experts = std::max({of_experts, b.shared.fc1.tensor->size(), b.shared.fc2.tensor->size()});
    }
    if (!m.fp8.keeps_transposes) m.arena.add("FP8 weights", &m.fp8.transposed, largest);
    if (of_experts) {
        const MlpSizes mlp = mlp_sizes(m, N, true);
        const size_t rows = (size_t)m.dispatching_ranks() * N * (size_t)m.c.C;
        m.arena.add("FP8 weights", &m.a.fp8_expert_weights, of_experts);
        m.arena.add("activations: shared block", &m.a.fp8_experts[0], std::max({rows, mlp.act, mlp.shared_act}));
        m.arena.add("activations: shared block", &m.a.fp8_experts[1], std::max({rows, mlp.fc1, mlp.shared_fc1}));
        if (m.c.mixture.shared) m.arena.add("activations: shared block", &m.a.one_group, 2);
    }
    m.fp8.prepared.assign(m.fp8.blocks.size(), false);
}

inline void plan_head(Model& m) {
    const size_t N = (size_t)m.a.B * m.a.T, Nl = planned_rows(m, N), tp = (size_t)m.ranks->mesh.tp.size;
    const char* const purpose = "activations: embedding, head";
    Activations& a = m.a;
    m.arena.add(purpose, &a.final_norm, Nl * (size_t)m.c.C);
    for (real** statistic : {&a.final_stats.mean, &a.final_stats.rstd}) m.arena.add(purpose, statistic, Nl);
    for (real** loss : {&a.loss, &a.zloss, &a.lse}) m.arena.add(purpose, loss, N);
    if (m.preference.on()) m.arena.add(purpose, &a.weight, N);
    if (const size_t cp = (size_t)m.ranks->mesh.cp.size; m.preference.on() && cp > 1)
        m.arena.add(purpose, &a.all_losses, cp * N);
    m.arena.add(purpose, &a.statistics, tp > 1 ? tp * 2 * (size_t)a.head_rows : 0);
    m.arena.add("logits (some rows at a time)", &a.logits, (size_t)a.head_rows * m.local.Vpl);
}

inline void plan_activation_gradients(Model& m) {
    const size_t N = (size_t)m.a.B * m.a.T, Nl = planned_rows(m, N), C = (size_t)m.c.C, heads = (size_t)m.local.NHl * m.c.HS();
    const char* const purpose = "activation gradients";
    m.arena.add(purpose, &m.a.dx, Nl * C);
    m.arena.add(purpose, &m.a.dnorm, Nl * C);
    const MixtureConfig& mixture = m.c.mixture;
    const MlpSizes mlp = largest_mlp(m, N);
    const size_t dact = gated(m.c.activation) || mixture.on() ? std::max(mlp.act, mlp.shared_act) : 0;
    m.arena.add(purpose, &m.a.datt, std::max(dact, N * heads));
    m.arena.add(purpose, &m.a.dqkv, std::max(mlp.fc1, N * m.local.QKVl));
    if (mixture.on()) {
        m.arena.add(purpose, &m.a.dlogits, N * (size_t)mixture.experts);
        const size_t choices = N * (size_t)mixture.topk;
        m.arena.add(purpose, &m.a.drouting, choices);
        if (m.dispatching_ranks() > 1) m.arena.add(purpose, &m.a.dispatched_drouting, (size_t)m.dispatching_ranks() * choices);
        if (const size_t cp = (size_t)m.ranks->mesh.cp.size; cp > 1) {
            for (int** all : {&m.a.of_sequences.experts, &m.a.of_sequences.slots, &m.a.of_sequences.choices})
                m.arena.add(purpose, all, cp * choices);
            m.arena.add(purpose, &m.a.of_sequences.offsets, (size_t)mixture.experts + 1);
            m.arena.add(purpose, &m.a.of_sequences.counts, (size_t)m.a.B * (size_t)mixture.experts);
        }
        if (mlp.shared_fc1) m.arena.add(purpose, &m.a.dshared_fc1, mlp.shared_fc1);
        if (mixture.shared_gate) m.arena.add(purpose, &m.a.dshared_gate, N);
        m.arena.add(purpose, &m.a.router_sums, m.blocks.size() * RouterSums::size(mixture.experts));
    }
    if (m.frozen || m.c.lacks_norm_bias()) m.arena.add(purpose, &m.unused_gradients, 2 * std::max(C, heads));
    if (m.a.dq_sums_size) m.arena.add("sums of queries' gradients (fp32)", &m.a.dq_sums, m.a.dq_sums_size);
}

// Plans the key/value cache for concurrently generated sequences.
inline void plan_cache(Model& m) {
    const size_t S = (size_t)m.cache.shape.sequences, tokens = m.table.part.layers.size() * S * m.cache.shape.tokens;
    m.arena.add("key/value cache", &m.a.next_logits, S * m.c.Vp);
    m.arena.add("key/value cache", &m.cache.sequences, S);
    for (floatX** rows : {&m.cache.keys, &m.cache.values}) m.arena.add("key/value cache", rows, tokens * m.cache.row);
}

// ---- pointers ---------------------------------------------------------------------------------------------------------------

// Sets all layers' pointers to their parameters, and to the buffers into which ops write gradients.
inline void bind_linears(Model& m) {
    bind_rows(m.c, m.model_table(), m.p, [&](size_t row) { return m.weights_to_read(row); });
    m.g.blocks.assign(m.blocks.size(), {});
    const auto gradient = [&](size_t row) { return m.gradient_to_write(row); };
    m.virtual_tokens.bind(m.table, m.params, gradient);
    if (m.frozen) m.lora.bind(m.table, m.params, gradient);
    else if (m.recompute != Recompute::inference) bind_rows(m.c, m.table, m.g, gradient);
    real* const unused = m.frozen ? m.unused_gradients : nullptr;
    const auto norm_of = [&](int C, double eps, const floatX* w, const floatX* b, real* dw, real* db) -> NormLayer {
        return {{w, b, C, (real)eps, m.c.norm_plus_one ? real(1) : real(0)}, {unused ? unused : dw, unused ? unused + C : db}};
    };
    const auto norm = [&](const floatX* w, const floatX* b, real* dw, real* db) {
        if (m.no_bias && w) b = m.no_bias;
        if (m.no_bias && dw) db = m.unused_gradients + m.c.C;
        return norm_of(m.c.C, m.c.stream_eps(), w, b, dw, db);
    };
    for (size_t i = 0; i < m.blocks.size(); i++) {
        const BlockParams<floatX>& p = m.p.blocks[i];
        const BlockParams<real>& g = m.g.blocks[i];
        Block& b = m.blocks[i];
        b.norm1 = norm(p.norm1_w, p.norm1_b, g.norm1_w, g.norm1_b);
        b.norm2 = m.c.norm_place == NormPlace::shared ? b.norm1 : norm(p.norm2_w, p.norm2_b, g.norm2_w, g.norm2_b);
        b[Matrix::proj].after = norm(p.norm1_after_w, p.norm1_after_b, g.norm1_after_w, g.norm1_after_b);
        b[Matrix::fc2].after = norm(p.norm2_after_w, p.norm2_after_b, g.norm2_after_w, g.norm2_after_b);
        const bool whole = m.c.qk_norm == QkNorm::whole;
        b.head_norms[0] = norm_of((whole ? m.local.NHl : 1) * m.c.HS(), m.c.eps, p.q_norm_w, nullptr, g.q_norm_w, nullptr);
        b.head_norms[1] = norm_of((whole ? m.local.NKVl : 1) * m.c.HS(), m.c.eps, p.k_norm_w, nullptr, g.k_norm_w, nullptr);
        b.router.w = p.router_w;
        b.router.dw = g.router_w;
        b.router.b = p.router_b;
        b.router.db = g.router_b;
        b.shared.gate.w = p.shared_gate_w;
        b.shared.gate.dw = g.shared_gate_w;
        b.shared.fc1.w = p.shared_fc1_w;
        b.shared.fc1.dw = g.shared_fc1_w;
        b.shared.fc2.w = p.shared_fc2_w;
        b.shared.fc2.dw = g.shared_fc2_w;
        b.shared.fc1.b = p.shared_fc1_b;
        b.shared.fc1.db = g.shared_fc1_b;
        b.shared.fc2.b = p.shared_fc2_b;
        b.shared.fc2.db = g.shared_fc2_b;
        b.sinks = p.sinks;
        b.dsinks = unused ? unused : g.sinks;
        const auto bind_fp8 = [&](Linear& l) {
            if (!m.fp8.scale) return;
            l.fp8_inp = m.fp8.tensor(l.block, l.matrix, Operand::input);
            l.fp8_w = m.fp8.tensor(l.block, l.matrix, Operand::weight);
            l.fp8_dout = m.fp8.tensor(l.block, l.matrix, Operand::gradient);
        };
        for (Linear* l : {&b.shared.fc1, &b.shared.fc2})
            if (l->tensor) bind_fp8(*l);
        for (Linear& l : b.linears) {
            std::tie(l.w, l.b) = p.weight_and_bias(l.matrix);
            std::tie(l.dw, l.db) = g.weight_and_bias(l.matrix);
            if (l.tensor->quantized()) {
                l.coded.clear();
                for (const CodedRows& r : coded_rows(*l.tensor))
                    l.coded.push_back({{r.format, m.frozen->quantized + l.tensor->offset + r.offset}, r.row, r.rows});
                l.w = nullptr;
            }
            bind_fp8(l);
        }
    }
    m.embedding_norm = norm(m.p.emb_norm_w, m.p.emb_norm_b, m.g.emb_norm_w, m.g.emb_norm_b);
    m.final_norm = norm(m.p.final_norm_w, m.p.final_norm_b, m.g.final_norm_w, m.g.final_norm_b);
}

// Sets the pointers of tensors that block i of a chunk does not keep to the shared buffers.
inline void share_tensors(Model& m, MicroBatch& in, size_t i) {
    BlockActivations& s = in.blocks[i];
    const bool fp8 = m.fp8.recipe.on && m.recompute != Recompute::inference && m.fp8.blocks[(size_t)in.first_block + i];
    const auto share = [&](size_t, Kept kept, auto& own, auto& shared) {
        const Storage storage(kept, m.recompute_of((int)i), fp8 && fp8_of(own), m.c.lora.on(), m.fp8.after_bf16);
        if (uint8_t** fp8_codes = fp8_of(own); fp8_codes && !*fp8_codes)
            *fp8_codes = storage.fp8_in_bf16 ? (uint8_t*)bf16_of(own) : *fp8_of(shared);
        if (!bf16_of(own)) bf16_of(own) = bf16_of(shared);
    };
    const bool mixture = m.blocks[(size_t)in.first_block + i].has_mixture();
    for_each_tensor(m, mlp_sizes(m, (size_t)m.a.B * m.a.T, mixture), share, s, m.a.shared);
    if (!s.inverses) return;
    LinearInput* const inputs[] = {&s.norm1, &s.att, &s.norm2, &s.mlp.act};
    for (size_t k = 0; k < 4; k++) inputs[k]->inverse = s.inverses + k;
}

// Memory for other ranks' contributions to sums (be::contribution_bytes), which each group of ranks keeps for its largest ones:
// two at a time of gradients, one of activations.
inline size_t memory_of_sums(const Model& m) {
    const Mesh& mesh = m.ranks->mesh;
    const size_t rows = (size_t)m.a.B * m.a.T, row = (size_t)m.c.C * sizeof(floatX);
    const size_t keys = 2 * (size_t)m.local.NKVl * m.c.HS() * sizeof(floatX);
    size_t gradients[2] = {};  // the larger one first
    for (const Bucket& b : m.shards.buckets) {
        const int size = (b.of_experts ? mesh.edp : mesh.dp).size;
        const size_t n = b.owner < 0 ? ceil_div(b.end - b.begin, (size_t)size) : b.end - b.begin;
        gradients[1] = std::max(gradients[1], be::contribution_bytes(size, n * m.grads.element_bytes()));
        if (gradients[1] > gradients[0]) std::swap(gradients[0], gradients[1]);
    }
    return gradients[0] + gradients[1] + be::contribution_bytes(mesh.tp.size, rows * row / (size_t)mesh.tp.size) +
           be::contribution_bytes(mesh.cp.size, m.ranks->exchanges_heads ? 0 : rows * keys) +
           be::contribution_bytes(mesh.ep.size, m.sends_all_to_all() ? 0 : rows * row);
}

// ---- sizes, and advice ------------------------------------------------------------------------------------------------------

// Rows of logits at a time for N rows: equal parts in whole tiles, each of at most max_rows.
inline int choose_head_rows(size_t max_rows, int64_t N) {
    const size_t parts = ceil_div((size_t)N, max_rows);
    return (int)std::min<size_t>(max_rows, round_up(ceil_div((size_t)N, parts), 128));
}
inline int choose_head_rows(const be::Ctx& ctx, const LocalSizes& n, int64_t N) {
    return choose_head_rows(be::logits_rows(ctx, n.logits_row_bytes()), N);
}

// Hints if memory does not suffice: in training, and in scoring or generation.
constexpr const char* advice_training =
    be::memory_is_host
        ? "a smaller --micro-batch-size or --seq-length, --recompute full, --save-in-foreground, or a smaller model"
        : "a smaller --micro-batch-size or --seq-length, --recompute full, --offload optimizer, fewer --head-rows, or a "
          "smaller model";
constexpr const char* advice_inference =
    "fewer or shorter texts at a time, a smaller model or, with generate and eval, more ranks (--tp)";

inline size_t host_memory_for(const Model& m) {
    return memory_for_rank(*m.ranks, m.arena.bytes_on_host(), cpu::available_memory());
}

// ---- all of it --------------------------------------------------------------------------------------------------------------

// Plans all memory of a run in m.arena, for allocate(). B x T: the largest micro-batch, without virtual tokens, which are added
// to T. head_rows: rows of logits in memory at a time. cache: shape of the key/value cache; by default none. micro_batches: all
// numbers of micro-batches per step that occur in the run, which determine how many a pipeline has in flight. Fails for more
// than INT_MAX rows.
inline void plan_memory(Model& m, Recompute recompute, int B, int T, int head_rows, KvCacheShape cache = {},
                        const std::vector<int>& micro_batches = {1}) {
    T = (T + m.c.virtual_tokens.count) / m.ranks->mesh.cp.size;
    m.recompute = recompute;
    const int topk = m.c.mixture.on() ? m.c.mixture.topk : 1, ep = m.dispatching_ranks();
    if ((int64_t)B * T > INT_MAX / topk / ep)
        fail_usage("--micro-batch-size %d x --seq-length %d%s%s exceeds the maximum of %d tokens per pass; HINT: a smaller one",
                   B, T, m.c.mixture.on() ? format(" x %d experts", topk).c_str() : "",
                   ep > 1 ? format(" x %d expert-parallel ranks", ep).c_str() : "", INT_MAX);
    CHECK(B * T >= cache.sequences, "%d sequences in passes of %d rows", cache.sequences, B * T);
    const bool training = recompute != Recompute::inference, fp8 = training && m.fp8.recipe.on;
    m.a.B = B;
    m.a.T = T;
    m.a.head_rows = std::min(head_rows, B * T);
    m.cache.shape = {cache.sequences, cache.tokens ? cache.tokens : m.c.T};
    m.cache.row = (size_t)m.local.NKVl * m.c.HS();

    m.plan(m.arena, training);
    plan_linears(m, fp8);
    plan_adapters(m);
    plan_micro_batches(m, micro_batches);
    plan_activations(m, fp8);
    if (fp8) plan_fp8(m);
    if (m.table.part.last) plan_head(m);
    m.arena.add("activations: embedding, head", &m.a.sums, 1);
    if (m.c.position == Position::alibi) m.arena.add("activations: embedding, head", &m.slopes, m.local.NHl);
    if (m.c.lacks_norm_bias()) m.arena.add("activations: embedding, head", &m.no_bias, m.c.C);
    const bool rope = m.c.position == Position::rope;
    const size_t angles = (size_t)m.c.T * m.c.rotated();
    if (rope) m.arena.add("activations: embedding, head", &m.cos_sin, angles);
    if (rope && m.c.window && m.c.local_rope_base > 0) m.arena.add("activations: embedding, head", &m.window_cos_sin, angles);
    if (training) plan_activation_gradients(m);
    if (cache.sequences) plan_cache(m);
}

// Allocates the planned memory, fills in constants, and sets all pointers that are views of other tensors.
inline void allocate(be::Ctx& ctx, Model& m) {
    const bool trains = m.recompute != Recompute::inference;
    m.arena.allocate(host_memory_for(m), trains ? advice_training : advice_inference);
    const ModelConfig& c = m.c;
    const auto send = [&](real* place, const std::vector<real>& from) {
        be::upload(ctx, place, from.data(), from.size() * sizeof(real));
    };
    std::vector<real> slopes, cos_sin;
    if (m.slopes)
        for (int h = 0; h < m.local.NHl; h++) slopes.push_back(alibi_slope(m.ranks->mesh.tp.rank * m.local.NHl + h, c.NH));
    send(m.slopes, slopes);
    // Rotary tables cover the longest sequence that this run can reach: for a conversation or the server, the cache's whole
    // capacity.
    const int longest = trains || !m.cache.shape.sequences ? m.whole_T() : std::max(m.a.T, m.cache.shape.tokens);
    for (real* table : {m.cos_sin, m.window_cos_sin}) {
        if (!table) continue;
        const RopeTable rope = c.rope(table == m.window_cos_sin, longest);
        rope_table(cos_sin, c.T, rope_frequencies(rope), rope_attention_factor(rope.scaling));
        send(table, cos_sin);
    }
    if (m.no_bias) be::clear(ctx, m.no_bias, c.C * sizeof(floatX));
    bind_linears(m);
    m.a.dfc1 = m.a.dqkv;
    m.a.dact = gated(c.activation) || c.mixture.on() ? m.a.datt : m.a.dfc1;
    for (auto& chunk : m.a.micro_batches)
        for (MicroBatch& in : chunk) {
            for (size_t i = 2; i < in.x.size(); i++)
                if (!in.x[i]) in.x[i] = in.x[i - 2];
            for (size_t i = 0; i < in.blocks.size(); i++) share_tensors(m, in, i);
        }
}
