// This rank among the others: the grid (mesh.h), its groups for exchanging tensors, and a step's sums over all ranks. A single
// rank is a group of one everywhere.
#pragma once
#include <algorithm>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "../base/json.h"
#include "../base/numbers.h"
#include "../model/mesh.h"
#include "../ops.h"
#include "comm.h"
#include "world.h"

// The default number of elements of a data-parallel message for dp ranks, as in Megatron-LM.
inline size_t default_bucket_elements(int dp) { return std::max<size_t>(40000000, (size_t)1000000 * dp); }

// The options that lay out a run over its ranks.
struct RankLayout {
    int tp = 1, pp = 1, vpp = 1, ep = 1, cp = 1;
    bool sequence_parallel = false;  // if tp > 1
    bool exchanges_heads = false;    // if cp > 1: attention of whole sequences for some heads
    int zero = 1;                    // stage of ZeRO
    bool whole_matrices = false;     // the optimizer needs the blocks' matrices unsharded
    bool trains = false, generates = true;
    bool overlap = true;         // tensor-parallel communication during backward's products; needs a buffer
    size_t bucket_elements = 0;  // parameters per data-parallel message; 0: default_bucket_elements
    int64_t rows = 0;            // rows of a sequence, which context and sequence parallelism split
};

struct Ranks {
    World* world = nullptr;
    Mesh mesh;
    bool sequence_parallel = false;  // norms and residual stream are split by rows over tp
    bool exchanges_heads = false;    // cp ranks exchange rows for heads in attention (gpt/head_exchange.h)
    bool overlap = false;            // gathers and reductions over tp overlap with backward's products
    int zero = 1;                    // sharded over dp: 1 the optimizer's state, 2 also the gradients, 3 also the parameters
    bool whole_matrices = false;     // and each of the blocks' matrices belongs to one dp rank
    size_t bucket_elements = default_bucket_elements(1);
    be::Comm tp, dp;
    be::Comm cp;                 // of dp: ranks with different rows of the same samples
    be::Comm ep, edp;            // of dp: ranks with different experts; with the same ones
    be::Comm pp;                 // for generation
    be::Comm forward, backward;  // messages between neighboring stages: activations, gradients
    be::Comm kv;                 // tp ranks that hold the same key/value heads
    be::Comm ends;               // first and last stage, which both hold a tied embedding

    // The data-parallel ranks that share a tensor.
    be::Comm& that_share(bool of_experts) { return of_experts ? edp : dp; }
};

inline Mesh make_mesh(int n, int rank, const RankLayout& layout) {
    return make_mesh(n, rank, layout.tp, layout.pp, layout.vpp, layout.ep, layout.cp);
}

// Rank `rank` of `n` in the grid, without communication.
inline std::shared_ptr<Ranks> place_rank(int n, int rank, const RankLayout& layout, const ModelConfig& c) {
    auto ranks = std::make_shared<Ranks>();
    const Mesh& mesh = ranks->mesh = make_mesh(n, rank, layout);
    check_expert_parallel(c, mesh.ep.size);
    check_context_parallel(c, mesh.cp.size, mesh.ep.size, layout.rows);
    check_tensor_parallel(c, mesh.tp.size, layout.sequence_parallel, layout.rows / mesh.cp.size);
    ranks->exchanges_heads = mesh.cp.size > 1 && layout.exchanges_heads;
    if (ranks->exchanges_heads) check_exchange_of_heads(c, mesh.cp.size, mesh.tp.size);
    ranks->sequence_parallel = mesh.tp.size > 1 && layout.sequence_parallel;
    ranks->overlap = layout.trains && layout.overlap && ranks->sequence_parallel;
    ranks->zero = layout.zero;
    ranks->whole_matrices = layout.whole_matrices;
    ranks->bucket_elements = layout.bucket_elements ? layout.bucket_elements : default_bucket_elements(mesh.dp.size);
    return ranks;
}

// This rank and its groups. Every rank makes all groups, in this order, except those that this run does not use, since each
// needs memory and, on GPUs, a communicator.
inline std::shared_ptr<Ranks> join_groups(be::Ctx& ctx, World& world, const RankLayout& layout, const ModelConfig& c) {
    const auto ranks = place_rank(world.size(), world.rank(), layout, c);
    const Mesh& mesh = ranks->mesh;
    if (world.size() == 1) return ranks;
    ranks->world = &world;
    const int replicas = LocalSizes(c, mesh.tp).replicas, first = mesh.tp.rank / replicas * replicas;
    std::vector<int> same_heads;
    for (int i = first; i < first + replicas; i++) same_heads.push_back(mesh.rank_of(mesh.pp.rank, mesh.dp.rank, i));
    std::vector<int> ends = {world.rank()};
    if (mesh.pp.rank == 0 || mesh.pp.rank == mesh.pp.size - 1) {
        ends = {mesh.rank_of(0, mesh.dp.rank, mesh.tp.rank)};
        if (mesh.pp.size > 1) ends.push_back(mesh.rank_of(mesh.pp.size - 1, mesh.dp.rank, mesh.tp.rank));
    }
    const bool ring = mesh.vpp > 1;  // the last rank sends to the first one's next chunk
    if (mesh.tp.size > 1) ranks->tp = be::Comm(ctx, world, mesh.tp_ranks(), "tensor");
    if (mesh.dp.size > 1 && layout.trains) ranks->dp = be::Comm(ctx, world, mesh.dp_ranks(), "data");
    if (mesh.cp.size > 1) ranks->cp = be::Comm(ctx, world, mesh.cp_ranks(), "context");
    if (mesh.ep.size > 1) ranks->ep = be::Comm(ctx, world, mesh.ep_ranks(), "experts");
    if (mesh.ep.size > 1 && mesh.edp.size > 1 && layout.trains)
        ranks->edp = be::Comm(ctx, world, mesh.edp_ranks(), "data, same experts");
    if (mesh.pp.size > 1 && layout.generates) ranks->pp = be::Comm(ctx, world, mesh.pp_ranks(), "stages");
    if (mesh.pp.size > 1) ranks->forward = be::Comm(ctx, world, mesh.pp_ranks(), "pipeline", {1, ring});
    if (mesh.pp.size > 1 && layout.trains)
        ranks->backward = be::Comm(ctx, world, mesh.pp_ranks(), "pipeline, backward", {-1, ring});
    if (replicas > 1 && layout.trains) ranks->kv = be::Comm(ctx, world, same_heads, "key/value heads");
    if (mesh.pp.size > 1 && c.tied && layout.trains) ranks->ends = be::Comm(ctx, world, ends, "embedding");
    return ranks;
}

// Makes a library allocate its memory for messages from each rank to each other one.
inline void warm_up_all_to_all(be::Ctx& ctx, be::Comm& comm) {
    std::vector<int> one_each((size_t)comm.size() + 1);
    std::iota(one_each.begin(), one_each.end(), 0);
    const size_t row_bytes = 1 << 20, bytes = row_bytes * (size_t)comm.size();
    auto* const memory = (char*)be::allocate_memory(2 * bytes);
    be::all_to_all(ctx, comm, memory, one_each, memory + bytes, one_each, row_bytes);
    char done;
    be::download(ctx, &done, memory, 1);
    be::release_memory(memory, 2 * bytes);
}
// Makes the libraries allocate their memory for the collectives of a run, before its memory is planned.
// all_to_all: expert-parallel ranks send each other rows.
inline void warm_up(be::Ctx& ctx, Ranks& ranks, bool all_to_all = false) {
    for (be::Comm* comm : {&ranks.tp, &ranks.dp, &ranks.cp, &ranks.ep, &ranks.edp, &ranks.pp, &ranks.kv, &ranks.ends})
        be::warm_up(ctx, *comm);
    if (be::memory_is_host) return;
    if (all_to_all) warm_up_all_to_all(ctx, ranks.ep);
    if (ranks.exchanges_heads) warm_up_all_to_all(ctx, ranks.cp);
}

// ---- sums over all ranks: identical on every rank, added in the same order -------------------------------------------------
inline LossSums sum_of(const std::vector<LossSums>& all) {
    LossSums sums;
    for (const LossSums& s : all) {
        sums.ce += s.ce;
        sums.z += s.z;
        sums.lse += s.lse;
        sums.n += s.n;
        sums.squares += s.squares;
        sums.pair_sums.loss += s.pair_sums.loss;
        sums.pair_sums.chosen += s.pair_sums.chosen;
        sums.pair_sums.rejected += s.pair_sums.rejected;
        sums.pair_sums.right += s.pair_sums.right;
        sums.pair_sums.n += s.pair_sums.n;
        if (!(s.lse_max <= sums.lse_max) && !std::isnan(sums.lse_max)) sums.lse_max = s.lse_max;
    }
    return sums;
}

// Each target and each parameter is counted once.
inline LossSums reduce_sums(const Ranks& ranks, LossSums mine) {
    const Mesh& mesh = ranks.mesh;
    if (mesh.world.size == 1) return mine;
    if (mesh.tp.rank > 0 || mesh.pp.rank < mesh.pp.size - 1) {  // each tp rank of the last stage knows the loss: count it once
        const double squares = mine.squares;
        mine = LossSums();
        mine.squares = squares;
    }
    std::vector<LossSums> all((size_t)mesh.world.size);
    ranks.world->all_gather(&mine, sizeof mine, all.data());
    return sum_of(all);
}

// The elementwise maximum over all ranks.
inline std::vector<float> largest_of_all_ranks(const Ranks& ranks, const std::vector<float>& mine) {
    if (ranks.mesh.world.size == 1) return mine;
    std::vector<float> all(mine.size() * (size_t)ranks.mesh.world.size), largest = mine;
    ranks.world->all_gather(mine.data(), mine.size() * sizeof(float), all.data());
    for (size_t i = 0; i < all.size(); i++) largest[i % mine.size()] = std::max(largest[i % mine.size()], all[i]);
    return largest;
}
// The numbers of each rank, as many as it gives.
inline std::vector<std::vector<double>> from_all_ranks(const Ranks& ranks, const std::vector<double>& mine) {
    if (!ranks.world) return {mine};
    std::vector<std::vector<double>> all;
    for (const std::string& bytes :
         ranks.world->all_gather(std::string((const char*)mine.data(), mine.size() * sizeof(double)))) {
        all.emplace_back(bytes.size() / sizeof(double));
        memcpy(all.back().data(), bytes.data(), all.back().size() * sizeof(double));
    }
    return all;
}
inline std::vector<double> sum_of_all_ranks(const Ranks& ranks, const std::vector<double>& mine) {
    if (!ranks.world) return mine;
    std::vector<double> all(mine.size() * (size_t)ranks.mesh.world.size), sums(mine.size());
    ranks.world->all_gather(mine.data(), mine.size() * sizeof(double), all.data());
    for (size_t i = 0; i < all.size(); i++) sums[i % sums.size()] += all[i];
    return sums;
}

// The host memory available to this rank, after the allocations of other ranks on the same machine; `bytes`: this rank's own
// allocation. All ranks call it before the first one allocates.
inline size_t memory_for_rank(const Ranks& ranks, size_t bytes, size_t available) {
    if (!ranks.world || ranks.world->size() == 1) return available;
    World& world = *ranks.world;
    const size_t mine[2] = {bytes, available};
    std::vector<size_t> all(2 * (size_t)world.size());
    world.all_gather(mine, sizeof mine, all.data());
    size_t others = 0;
    for (int r = 0; r < world.size(); r++) {
        if (!world.is_here(r)) continue;
        available = std::min(available, all[2 * (size_t)r + 1]);
        if (r != world.rank()) others += all[2 * (size_t)r];
    }
    return available - std::min(available, others);
}

// Fails on all ranks if any rank has a problem, with the first one's message.
inline void agree_that_all_is_well(World* world, const std::string& problem) {
    const std::string first = world ? first_problem(*world, problem) : problem;
    if (!first.empty()) fail("%s", first.c_str());
}

inline double parse_timeout(const std::string& text) { return duration_of("--distributed-timeout", text); }

// A rank that fails ends all ranks. An error in options or files occurs on every rank: rank 0 reports it.
template <class Options>
int on_all_ranks(const Options& o, void (*command)(World&, const Options&)) {
    World world = World::join(parse_timeout(o.distributed_timeout));
    if (world.rank() == 0) print_notes(o);  // of options.h
    try {
        command(world, o);
        return 0;
    } catch (const std::exception& e) {
        if (world.size() == 1) throw;
        if (world.rank() > 0) std::this_thread::sleep_for(std::chrono::seconds(1));
        print_line(stderr, "error on " + world.description() + ": " + in_words(e));
        world.abort(exit_status(e));
    }
}
