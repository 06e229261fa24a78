// The grid of ranks (Narayanan et al., 2021): tensor parallelism innermost, so that its ranks share a machine, then context,
// then data, then pipeline:  rank = (pp * DP + dp) * TP + tp.
//   tp   shards each matrix: a rank holds some heads, some feed-forward columns, a part of the vocabulary
//   dp   each rank processes its own rows, and they sum their gradients; with ZeRO-1 it holds a shard of the optimizer's state
//   cp   part of data parallelism: cp consecutive dp ranks process different rows of the same samples
//        (gpt/context_parallel.h); `samples` ranks have different samples:  dp = samples * CP + cp
//   ep   part of data parallelism: ep consecutive dp ranks hold different experts of a mixture, and send each other the rows of
//        their samples (gpt/expert_parallel.h); edp ranks hold the same ones:  dp = edp * EP + ep
//   pp   each rank holds a stage: some of the layers; with vpp > 1 several chunks of them, assigned round-robin
// Sequence parallelism splits the activations between the matrices (norms and residual stream) by rows over the tp ranks. Part
// and LocalSizes describe the part of the model on a rank.
#pragma once
#include <cstdint>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "../base/check.h"
#include "../shapes.h"
#include "model_config.h"

struct Axis {
    int size = 1, rank = 0;
};

// Rows of a sequence over cp ranks, in zigzag: of 2 cp equal chunks, rank r has the chunks r and 2 cp - 1 - r, so that all
// ranks have equally many keys to attend to.
struct Zigzag {
    Axis cp;
    int chunks() const { return 2 * cp.size; }
    int chunk_of_half(int half) const { return half == 0 ? cp.rank : chunks() - 1 - cp.rank; }
    int rank_of(int chunk) const { return chunk < cp.size ? chunk : chunks() - 1 - chunk; }
    int half_of(int chunk) const { return chunk < cp.size ? 0 : 1; }
    // The row in the sequence of row t of this rank's T.
    int row(int t, int T) const {
        if (cp.size == 1) return t;
        const int half = t >= T / 2;
        return (chunk_of_half(half) - half) * (T / 2) + t;
    }
    // The same for row i of several sequences, of which this rank has T rows each.
    size_t row_of_batch(size_t i, size_t T) const { return i / T * T * (size_t)cp.size + (size_t)row((int)(i % T), (int)T); }
    // The reverse: which of this rank's T is row t of a cut sequence; -1: it is another rank's.
    int row_here(int t, int T) const {
        const int chunk = t / (T / 2);
        return rank_of(chunk) == cp.rank ? half_of(chunk) * (T / 2) + t % (T / 2) : -1;
    }
};

struct Mesh {
    Axis world, tp, dp, pp;
    Axis cp, samples;  // of dp
    Axis ep, edp;      // of dp
    int vpp = 1;

    int rank_of(int pp_rank, int dp_rank, int tp_rank) const { return (pp_rank * dp.size + dp_rank) * tp.size + tp_rank; }
    // World ranks along one axis through this rank, in the order of that axis.
    std::vector<int> tp_ranks() const {
        return along(tp, [&](int i) { return rank_of(pp.rank, dp.rank, i); });
    }
    std::vector<int> dp_ranks() const {
        return along(dp, [&](int i) { return rank_of(pp.rank, i, tp.rank); });
    }
    std::vector<int> pp_ranks() const {
        return along(pp, [&](int i) { return rank_of(i, dp.rank, tp.rank); });
    }
    std::vector<int> cp_ranks() const {
        return along(cp, [&](int i) { return rank_of(pp.rank, samples.rank * cp.size + i, tp.rank); });
    }
    std::vector<int> ep_ranks() const {
        return along(ep, [&](int i) { return rank_of(pp.rank, edp.rank * ep.size + i, tp.rank); });
    }
    std::vector<int> edp_ranks() const {
        return along(edp, [&](int i) { return rank_of(pp.rank, i * ep.size + ep.rank, tp.rank); });
    }
    std::string text() const {
        return format("%d rank%s = tensor %d x %sdata %d%s x pipeline %d", world.size, world.size == 1 ? "" : "s", tp.size,
                      cp.size > 1 ? format("context %d x ", cp.size).c_str() : "", samples.size,
                      ep.size > 1 ? format(" (expert %d)", ep.size).c_str() : "", pp.size) +
               (vpp > 1 ? format(" (%d chunks each)", vpp) : "");
    }

private:
    template <class F>
    static std::vector<int> along(const Axis& axis, F rank) {
        std::vector<int> ranks;
        for (int i = 0; i < axis.size; i++) ranks.push_back(rank(i));
        return ranks;
    }
};

// Makes the mesh; fails if the sizes do not fit the number of ranks, and shows the arithmetic.
inline Mesh make_mesh(int world, int rank, int tp, int pp, int vpp, int ep, int cp = 1) {
    if (const int64_t model = (int64_t)tp * pp * cp, below = world / model * model; below != world)
        fail_usage(
            "%d rank%s cannot be divided by --tensor-model-parallel-size %d x %s--pipeline-model-parallel-size %d = %lld; "
            "HINT: %s",
            world, world == 1 ? "" : "s", tp, cp > 1 ? format("--context-parallel-size %d x ", cp).c_str() : "", pp,
            (long long)model,
            world == 1
                ? format("start it with mpirun -n %lld", (long long)model).c_str()
                : format("%s%lld ranks, or sizes whose product divides %d",
                         below ? format("%lld or ", (long long)below).c_str() : "", (long long)below + (long long)model, world)
                      .c_str());
    const int dp = world / (tp * pp);
    if (dp % ep)
        fail_usage("--expert-model-parallel-size %d does not divide the %d data-parallel rank%s; HINT: choose a divisor of %d",
                   ep, dp, dp == 1 ? "" : "s", dp);
    Mesh mesh;
    mesh.world = {world, rank};
    mesh.vpp = vpp;
    mesh.tp = {tp, rank % tp};
    mesh.dp = {dp, rank / tp % dp};
    mesh.cp = {cp, mesh.dp.rank % cp};
    mesh.samples = {dp / cp, mesh.dp.rank / cp};
    mesh.ep = {ep, mesh.dp.rank % ep};
    mesh.edp = {dp / ep, mesh.dp.rank / ep};
    mesh.pp = {pp, rank / (world / pp)};
    return mesh;
}

// Rejects a model that cannot be sharded into `tp` parts. rows: of one sequence, which sequence parallelism splits: each
// sequence must be divisible, so that a smaller last micro-batch can be split too.
inline void check_tensor_parallel(const ModelConfig& c, int tp, bool sequence_parallel, int64_t rows) {
    const WeightFormatRow& row = weight_format_row(c.base_format);
    size_t block = row.block;
    if (c.base_format == WeightFormat::gguf && tp > 1)
        for (const auto& [name, formats] : c.coded)
            for (const WeightFormat format : formats) block = std::max(block, weight_format_row(format).block);
    for (const auto& [columns, of] : {std::pair(c.C, "the model's width"),
                                      {c.NH * c.HS() / tp, "columns of proj (heads x their size)"},
                                      {c.F / tp, "columns of fc2 (feed-forward width)"}})
        if ((size_t)columns % block)
            fail_usage(
                "--quantize-base %s requires rows in whole blocks of %zu; on each of %d tensor-parallel ranks, %s: %d; "
                "HINT: %s",
                row.word, block, tp, of, columns,
                tp > 1 ? "a smaller --tensor-model-parallel-size" : "another format, or none");
    if (tp == 1) return;
    if (codes_whole_matrices(c.base_format))
        fail_usage(
            "--quantize-base %s requires whole matrices, of which %d tensor-parallel ranks each have a part; HINT: "
            "--quantize-base nf4, or --pipeline-model-parallel-size",
            row.word, tp);
    const auto divides = [&](int n, const char* what) {
        if (n % tp == 0) return;
        fail_usage("--tensor-model-parallel-size %d does not divide the model's %d %s; HINT: choose a divisor of %d", tp, n,
                   what, n);
    };
    divides(c.NH, "attention heads");
    if (c.mixtures() < c.L) divides(c.F, "feed-forward columns");
    if (c.mixture.on()) divides(c.expert_width(), "feed-forward columns of an expert");
    divides(c.mixture.shared, "feed-forward columns of the shared expert");
    if (c.NKV % tp && tp % c.NKV)
        fail_usage(
            "--tensor-model-parallel-size %d and --num-query-groups %d: one must divide the other, so that each rank holds "
            "whole key/value heads",
            tp, c.NKV);
    if (sequence_parallel && rows % tp)
        fail_usage(
            "sequence parallelism cannot split the %lld rows of a sequence (--seq-length and virtual tokens) into %d equal "
            "parts; HINT: another --seq-length, or --no-sequence-parallel",
            (long long)rows, tp);
}

// For layouts in which a rank's choices of experts are not consecutive choices of the run, from which their dropout is drawn.
inline void refuse_dropout_of_experts(const ModelConfig& c, const std::string& option) {
    for (const std::string& module : c.lora.modules)
        if (module.find(".experts.") != std::string::npos && c.lora.dropout > 0)
            fail_usage(
                "%s and --lora-dropout cannot be combined for adapters on experts, such as %s; HINT: --lora-dropout 0, or "
                "--lora-targets without experts' matrices",
                option.c_str(), module.c_str());
}

// Rejects sequences that cannot be cut over `cp` ranks, with experts on `ep` ranks.
inline void check_context_parallel(const ModelConfig& c, int cp, int ep, int64_t rows) {
    if (cp == 1) return;
    const std::string option = format("--context-parallel-size %d", cp);
    if (rows % (2 * cp))
        fail_usage(
            "%s cannot split the %lld rows of a sequence into %d equal parts; HINT: a --seq-length that is a multiple "
            "of %d",
            option.c_str(), (long long)rows, 2 * cp, 2 * cp);
    if (cp % ep)
        fail_usage(
            "%s and --expert-model-parallel-size %d, which does not divide it, cannot be combined: ranks with different "
            "samples would share experts; HINT: a divisor of %d",
            option.c_str(), ep, cp);
    if (c.virtual_tokens.on())
        fail_usage("%s is not available for virtual tokens (--prompt-tokens) yet; HINT: omit it", option.c_str());
    refuse_dropout_of_experts(c, option);
}

// Rejects a model whose experts cannot be spread over `ep` ranks.
inline void check_expert_parallel(const ModelConfig& c, int ep) {
    if (ep == 1) return;
    if (!c.mixture.on())
        fail_usage("--expert-model-parallel-size %d requires --num-experts, a mixture of experts; HINT: omit it", ep);
    if (c.mixture.experts % ep)
        fail_usage("--expert-model-parallel-size %d does not divide the model's %d experts; HINT: choose a divisor of %d", ep,
                   c.mixture.experts, c.mixture.experts);
    refuse_dropout_of_experts(c, format("--expert-model-parallel-size %d", ep));
}

// The fraction of rows that choose an expert of a given one of `ep` ranks, if each choice of experts is equally likely.
inline double fraction_for_rank(const MixtureConfig& m, int ep) {
    double none = 1;
    const int elsewhere = m.experts - m.experts / ep;
    for (int k = 0; k < m.topk; k++) none *= std::max(0.0, (double)(elsewhere - k) / (m.experts - k));
    return 1 - none;
}

// The part of the model that a rank holds.
struct Part {
    Axis tp, ep;
    std::vector<int> layers;         // in the model's order
    bool first = true, last = true;  // holds the embedding; holds the final norm and the head
};
inline Part whole_model(const ModelConfig& c) {
    Part part;
    part.layers.resize((size_t)c.L);
    std::iota(part.layers.begin(), part.layers.end(), 0);
    return part;
}

// The layers of this rank, chunk after chunk: chunk k is stage k pp + rank of the whole pipeline.
inline Part part_of(const ModelConfig& c, const Mesh& mesh, const std::vector<int>& stages) {
    if (mesh.pp.size == 1 && mesh.tp.size == 1 && mesh.ep.size == 1) return whole_model(c);
    Part part;
    part.tp = mesh.tp;
    part.ep = mesh.ep;
    part.first = mesh.pp.rank == 0;
    part.last = mesh.pp.rank == mesh.pp.size - 1;
    for (int stage = 0, layer = 0; stage < (int)stages.size(); stage++)
        for (int i = 0; i < stages[stage]; i++, layer++)
            if (stage % mesh.pp.size == mesh.pp.rank) part.layers.push_back(layer);
    return part;
}

// Sizes of one rank's matrices.
struct LocalSizes {
    int NHl, NKVl;  // query heads; key/value heads, held by `replicas` ranks each
    int replicas;
    int QKVl;
    int Vpl, v0, Vl;  // rows of the embedding; index of the first; rows without padding
    int tp_size;
    real embedding_scale;
    LocalSizes(const ModelConfig& c, const Axis& tp) {
        NHl = c.NH / tp.size;
        NKVl = std::max(1, c.NKV / tp.size);
        replicas = std::max(1, tp.size / c.NKV);
        tp_size = tp.size;
        embedding_scale = (real)c.stream_scale();
        QKVl = (NHl + 2 * NKVl) * c.HS();
        Vpl = c.Vp / tp.size;
        v0 = tp.rank * Vpl;
        Vl = std::max(0, std::min(Vpl, c.V - v0));
    }
    VocabularyShard vocabulary() const { return {v0, Vl, Vpl, embedding_scale}; }
    size_t logits_row_bytes() const { return (size_t)Vpl * sizeof(floatX); }
};

// Rejects heads that cp ranks cannot divide among themselves.
inline void check_exchange_of_heads(const ModelConfig& c, int cp, int tp) {
    const LocalSizes local(c, {tp, 0});
    if (local.NKVl % cp)
        fail_usage(
            "--context-parallel-method alltoall requires a --context-parallel-size that divides the %d key/value head%s%s; "
            "it is %d; HINT: --context-parallel-method allgather",
            local.NKVl, local.NKVl == 1 ? "" : "s", tp > 1 ? " of a tensor-parallel rank" : "", cp);
}
