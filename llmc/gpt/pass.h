// A micro-batch's pass through this rank's layers: the context that the functions of train_gpt.cu share. It answers questions
// about rows and layers: how many rows of the residual stream this rank has, which positions and mask a layer's attention uses,
// which random numbers its dropout draws. Blocks are counted on this rank, layers in the whole model. upload() starts a pass.
#pragma once
#include <algorithm>

#include "../base/check.h"
#include "../data/dataloader.h"
#include "../dropout.h"
#include "../ops.h"
#include "model.h"
#include "model_memory.h"

struct Pass {
    be::Ctx& ctx;
    Model& m;
    MicroBatch& in;
    int N() const { return in.N(); }
    // Sequence parallelism (Korthikanti et al., 2022) splits the residual stream by rows. Generation may have too few
    // rows to split.
    bool cut_rows() const { return m.ranks->sequence_parallel && N() % m.local.tp_size == 0; }
    int local_rows() const { return cut_rows() ? N() / m.local.tp_size : N(); }
    // Rows of a layer's input and output on this rank.
    int input_rows(const Linear& l) const { return l.row_parallel() ? N() : local_rows(); }
    int output_rows(const Linear& l) const { return l.row_parallel() ? local_rows() : N(); }
    size_t stream_size() const { return (size_t)local_rows() * m.c.C; }  // elements of the residual stream on this rank
    // The bias gradient of proj or fc2 if the preceding backward norm can compute it: the column sums of the stream's gradient,
    // which saves a pass over the gradient. Null: the layer's own backward computes it. That is necessary if the branch changes
    // the gradient (a norm after it, dropout), if rows are split over ranks, and for fc2 if the gradients of two blocks share a
    // buffer (gradients.h), or in a mixture, whose experts have a bias each.
    real* summed_bias(const Linear& l) const {
        const bool has_same_gradient = l.row_parallel() && !l.after.exists() && hidden_dropout(l).rate == 0;
        if (!l.dw || !has_same_gradient || cut_rows() || !be::norm_sums_columns(m.c.C)) return nullptr;
        if (l.matrix == Matrix::fc2 && m.blocks[l.block].router.tensor) return nullptr;
        if (l.matrix == Matrix::proj) return !m.c.parallel() && m.blocks[l.block].norm2.exists() ? l.db : nullptr;
        if (m.micro_grads.used()) return nullptr;
        const int end = in.first_block + (int)in.blocks.size();
        if (l.block + 1 < end) return m.blocks[(size_t)l.block + 1].norm1.exists() ? l.db : nullptr;
        return in.last && m.final_norm.exists() ? l.db : nullptr;
    }
    // Before ops read parameters of the embedding, the chunk's block i or the head. With ZeRO-3 these gather them, and start to
    // gather the next ones of the pass (sharded_parameters.h).
    void need_embedding() const { need(TensorSpec::embedding, in.blocks.empty() ? (int)TensorSpec::head : in.first_block); }
    void need_block_forward(int i) const {
        const int block = in.first_block + i;
        need(block, i + 1 < (int)in.blocks.size() ? block + 1 : in.last ? (int)TensorSpec::head : ShardedParameters::none);
    }
    void need_block_backward(int i) const {
        need(in.first_block + i, i > 0 ? in.first_block + i - 1 : ShardedParameters::none);
    }
    void need_head() const { need(TensorSpec::head, ShardedParameters::none); }
    void need(int block, int next) const { m.sharded_params.need(ctx, m, block, next); }
    bool fp8(int block) const { return m.fp8.on && m.fp8.blocks[block]; }
    // The layer's index in the model: layers may differ in their attention masks and positions.
    int layer(int block) const { return m.table.part.layers[block]; }
    bool rotates(int block) const { return m.cos_sin && m.c.has_positions(layer(block)); }
    Rope rope(int block) const {
        const bool windowed = m.window_cos_sin && !m.c.sees_all(layer(block));
        return {in.positions, windowed ? m.window_cos_sin : m.cos_sin, m.c.rotated()};
    }
    AttentionMask mask(int block) const {
        const real* slopes = m.c.has_positions(layer(block)) ? m.slopes : nullptr;
        return {m.c.sees_all(layer(block)) ? in.documents() : in.window_start, slopes};
    }
    // Only the balance loss distinguishes sequences, unless it is the whole micro-batch's. Generation may have more of them, of
    // one token each, than are planned.
    MixtureShape mixture() const {
        const bool as_one = in.B > m.a.B || m.balances_micro_batches;
        const MixtureConfig& c = m.c.mixture;
        return {as_one ? 1 : in.B, as_one ? N() : in.T, c.experts, c.topk, as_one ? in.B : 1, in.part.cp.size};
    }
    // True if this rank's experts process rows of several ranks (expert_parallel.h).
    bool dispatches() const { return in.own_rows && m.ranks->mesh.ep.size > 1; }
    // The rows and the experts of this rank's products. With all-to-all messages a rank without rows has one without slots.
    MixtureShape experts(int block) const {
        const int ep = m.ranks->mesh.ep.size;
        MixtureShape shape = mixture();
        shape.E /= ep;
        if (!dispatches()) return shape;
        if (m.all_to_all) return {1, std::max(1, messages(block).received.back()), shape.E, shape.K};
        shape.B *= ep;
        return shape;
    }
    RowMessages& messages(int block) const { return in.messages[(size_t)(block - in.first_block)]; }
    // Only training, which also applies dropout, drops choices.
    RouterRule router_rule(int block) const {
        RouterRule rule = m.c.mixture.rule(m.expert_biases.of_block(block));
        rule.capacity = in.drops && m.expert_capacity.factor > 0 ? m.expert_capacity.of(mixture()) : 0;
        rule.by_position = m.expert_capacity.by_position;
        return rule;
    }
    // If sequences are cut over ranks, each of their two chunks counts as a sequence.
    bool cut_context() const { return in.part.cp.size > 1; }
    bool exchanges_heads() const { return cut_context() && m.ranks->exchanges_heads; }
    AttentionShape attention(int block) const {
        AttentionShape shape = cut_context() ? m.attention(2 * in.B, in.T / 2) : m.attention(in.B, in.T);
        const int64_t head = in.sample * m.c.NH + m.ranks->mesh.tp.rank * m.local.NHl, T = in.whole_T();
        shape.dropout = dropout(m.c.attention_dropout, 1 + 3 * layer(block), head * T * T);
        return shape;
    }
    // `site`: a number that gives each dropout of the model its own draws: 0 after the embedding; in layer l 1 + 3 l for
    // attention, 2 + 3 l after proj, 3 + 3 l after fc2; 1 + 3 L + 4 l + matrix before adapters. A number never changes, or
    // resumed runs would draw others. `first`: the index of the first element in the run (dropout.h), by default of this rank's
    // rows of the residual stream.
    Dropout dropout(double rate, int site, int64_t first) const {
        if (!in.drops) return {};
        return {(real)rate, {in.seed, (uint32_t)site, (uint64_t)first}};
    }
    Dropout dropout(double rate, int site) const { return dropout(rate, site, in.sample * in.whole_T() * m.c.C); }
    // Applies dropout to this rank's rows of the residual stream. out may be inp.
    void drop(floatX* out, const floatX* inp, const Dropout& of_samples) const {
        const int begin = cut_rows() ? m.ranks->mesh.tp.rank * local_rows() : 0;
        RowDropout{of_samples, in.part, in.T}.forward(ctx, out, inp, begin, local_rows(), m.c.C);
    }
    Dropout hidden_dropout(const Linear& l) const {
        return dropout(m.c.hidden_dropout, (l.matrix == Matrix::proj ? 2 : 3) + 3 * layer(l.block));
    }
    // Dropout of the input of a layer's adapters: all rows, or all choices for fc2 of experts; this rank may have only some
    // columns.
    RowDropout adapter_dropout(const Linear& l) const {
        const bool choices = l.lora->experts && l.matrix == Matrix::fc2;
        const size_t whole = (size_t)l.lora->whole_cols, rows = (size_t)(choices ? m.c.mixture.topk : 1);
        const size_t first = (size_t)(in.sample * in.whole_T()) * rows * whole + (size_t)l.lora->first_col;
        Dropout d = dropout(m.c.lora.dropout, 1 + 3 * m.c.L + 4 * layer(l.block) + (int)l.matrix, (int64_t)first);
        if ((size_t)l.in < whole) {
            d.draws.cols = (size_t)l.in;
            d.draws.whole_cols = whole;
        }
        return {d, in.part, in.T};
    }
};

// Uploads a batch into the micro-batch `to` and returns its pass. Prepends the model's virtual tokens to sequences that start
// in the batch. Skips parts that the batch lacks. Defaults that callers may change: no dropout, no cache, gradients are added,
// all expert-parallel ranks have the same rows.
inline Pass upload(be::Ctx& ctx, Model& m, const Batch& given, MicroBatch& to) {
    const bool begins = given.begins && m.c.virtual_tokens.on();
    const Batch with_virtual_tokens = begins ? given.behind(m.c.virtual_tokens.count) : Batch();
    const Batch& batch = begins ? with_virtual_tokens : given;
    const auto send = [&](int* place, const std::vector<int>& from) {
        be::upload(ctx, place, from.data(), from.size() * sizeof(int));
    };
    send(to.tokens, batch.tokens);
    send(to.targets, batch.targets);
    send(to.positions, batch.positions);
    const bool all_rows = m.ranks->exchanges_heads && batch.part.cp.size > 1;
    const Batch of_all_rows = all_rows ? batch.keys_of_all_rows() : Batch();
    const Batch& keys = all_rows ? of_all_rows : batch;
    send(to.doc_start, keys.doc_start);
    if (m.c.window) send(to.window_start, keys.first_keys(m.c.window));
    to.pairs = batch.pairs;
    to.virtual_rows = begins ? batch.virtual_rows() : std::vector<int>();
    to.B = batch.B;
    to.T = batch.T;
    to.part = batch.part;
    to.masks_documents = !batch.doc_start.empty();
    to.cache = nullptr;
    to.gradients = Acc::Add;
    to.drops = false;
    to.own_rows = false;
    const int one_group[] = {0, to.N()};
    if (m.a.one_group) be::upload(ctx, m.a.one_group, one_group, sizeof one_group);
    const Pass pass = {ctx, m, to};
    CHECK((size_t)pass.local_rows() <= planned_rows(m, (size_t)m.a.B * m.a.T), "%d x %d rows", to.B, to.T);
    return pass;
}

// The sums of all routers since the last clear, over all ranks: RouterSums::size(E) numbers per layer of the model.
inline void clear_router_sums(be::Ctx& ctx, Model& m) {
    be::clear(ctx, m.a.router_sums, m.blocks.size() * RouterSums::size(m.c.mixture.experts) * sizeof(double));
}
inline std::vector<double> read_router_sums(be::Ctx& ctx, const Model& m) {
    const size_t each = RouterSums::size(m.c.mixture.experts);
    std::vector<double> mine(m.blocks.size() * each), all((size_t)m.c.L * each), with_layers;
    be::download(ctx, mine.data(), m.a.router_sums, mine.size() * sizeof(double));
    for (size_t i = 0; i < m.blocks.size() && m.ranks->mesh.tp.rank == 0; i++) {  // the other tp ranks have none
        with_layers.push_back(m.table.part.layers[i]);
        with_layers.insert(with_layers.end(), &mine[i * each], &mine[i * each] + each);
    }
    for (const std::vector<double>& of_rank : from_all_ranks(*m.ranks, with_layers))
        for (size_t i = 0; i < of_rank.size(); i += 1 + each)
            for (size_t k = 0; k < each; k++) all[(size_t)of_rank[i] * each + k] += of_rank[i + 1 + k];
    // Each of cp ranks counts the rows of whole sequences.
    for (size_t i = 0; i < all.size(); i++)
        if (i % each >= RouterSums::rows) all[i] /= m.ranks->mesh.cp.size;
    return all;
}

inline void clear_sums(be::Ctx& ctx, Model& m) {
    const LossSums none;
    be::upload(ctx, m.a.sums, &none, sizeof none);
    m.a.pair_sums = none.pair_sums;
}
// Waits for earlier ops.
inline LossSums read_sums(be::Ctx& ctx, const Model& m) {
    LossSums sums;
    be::download(ctx, &sums, m.a.sums, sizeof sums);
    sums.pair_sums = m.a.pair_sums;
    return sums;
}
