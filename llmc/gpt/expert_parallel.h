// Expert parallelism (Lepikhin et al., 2020, "GShard"): the ranks of ep, a subset of the data-parallel ranks, hold different
// experts of a mixture; everything else of a model is the same on all of them. A rank's experts process the rows of all:
//
//   own rows        (N, C)         router, choices and weights
//   all-gather      (ep, N, C)     rows, choices and weights of all ranks; sorted by this rank's experts only
//   experts                        slots of this rank's experts
//   combine         (ep, N, C)     each row's sum over this rank's experts; 0 if it chose none of them
//   reduce-scatter  (N, C)         the sums of the own rows over all ranks
//
// Backward gathers the output's gradients and, for the gradient of fc1's weight, the rows again; the inputs' gradients and the
// routing weights' are reduce-scattered. This is Megatron-LM's --moe-token-dispatcher-type allgather: sizes do not depend on
// the routing. With alltoall a rank sends a row only to the ranks that have an expert of its choice, once to each:
//
//   ranks of experts  (N, min(K, ep))  each row's, sorted by rank like choices by expert: the rows for a rank are consecutive
//   counts            (ep, ep + 1)     all-gathered and read by the host, which must know the sizes of messages
//   all-to-all        (M, C)           M rows with choices and weights from all ranks, in the order of ranks and rows
//   experts, combine  (M, C)           as above
//   all-to-all        (N, min(K, ep), C)  the sums go back; a row adds them in the order of ranks
//
// M <= ep N; memory is planned for this. Slots are the same in both, so results differ only in how the sums over ranks round:
// not at all on CPUs, where both add in fp32 in the order of ranks.
//
// Gradients. Each rank sums the gradients of its experts over the rows of all ep ranks; ranks with the same experts (edp) then
// add theirs, as ranks of dp do for all other tensors. Every term has the factors of the global batch, so the sums equal one
// rank's, up to the order of addition; outputs and inputs' gradients are also rounded to floatX on each rank before their sum.
//
// If all ranks have the same rows (generation, questions of tasks), nothing is gathered: each computes its experts' sums, and
// an all-reduce adds them. With a single rank nothing is sent or copied.
#pragma once
#include <cstdint>

#include "../ops.h"
#include "../parallel/comm.h"
#include "pass.h"

// The routing of the rows that this rank's experts process, with its sizes.
inline const Routing& routing_of_experts(const Pass& p, const MlpActivations& s) {
    return p.m.ranks->mesh.ep.size > 1 ? s.dispatched : s.routing;
}

// ---- all-to-all messages ----------------------------------------------------------------------------------------------------

// Sets s.sent and the messages of the block, from the own rows' choices; experts: (N, K).
inline void exchange_counts(const Pass& p, const Block& b, const MlpActivations& s, const int* experts) {
    const Axis& ep = p.m.ranks->mesh.ep;
    const MixtureConfig& c = p.m.c.mixture;
    const MixtureShape ranks = p.m.mixture_of_ranks(p.N());
    be::ranks_of_experts(p.ctx, s.sent.experts, experts, ranks, c.topk, c.experts / ep.size);
    be::sort_choices(p.ctx, s.sent, ranks, 0);
    const size_t ends = (size_t)ep.size + 1;
    std::vector<int> all(ends * (size_t)ep.size);
    int* const gathered = p.m.a.message_ends;
    be::all_gather(p.ctx, p.m.ranks->ep, (uint8_t*)gathered, (const uint8_t*)s.sent.offsets, ends * sizeof(int));
    be::download(p.ctx, all.data(), gathered, all.size() * sizeof(int));
    RowMessages& messages = p.messages(b.fc1().block);
    messages.received = {0};
    for (size_t r = 0; r < (size_t)ep.size; r++) {
        const int* const first = &all[r * ends];
        if ((int)r == ep.rank) messages.sent.assign(first, first + ends);
        messages.received.push_back(messages.received.back() + first[ep.rank + 1] - first[ep.rank]);
    }
}

// out (M, row_bytes) = the rows that other ranks send to this rank's experts; own: (N, row_bytes).
inline void send_to_experts(const Pass& p, const Block& b, const MlpActivations& s, void* out, const void* own,
                            size_t row_bytes) {
    const RowMessages& messages = p.messages(b.fc1().block);
    const int per_row = p.m.mixture_of_ranks(p.N()).K;
    be::gather_rows(p.ctx, p.m.a.sent_rows, own, s.sent.choices, per_row, messages.sent.back(), row_bytes);
    be::all_to_all(p.ctx, p.m.ranks->ep, out, messages.received, p.m.a.sent_rows, messages.sent, row_bytes);
}
// The reverse: sent_rows = the results of other ranks' experts for each row that this rank sent them; of: (M, row_bytes).
inline floatX* return_from_experts(const Pass& p, const Block& b, const void* of, size_t row_bytes) {
    const RowMessages& messages = p.messages(b.fc1().block);
    be::all_to_all(p.ctx, p.m.ranks->ep, p.m.a.sent_rows, messages.sent, of, messages.received, row_bytes);
    return p.m.a.sent_rows;
}

// ---- dispatch ---------------------------------------------------------------------------------------------------------------

// The experts of the own rows' choices; -1 for choices that a capacity drops, which every rank applies to its own rows.
inline const int* experts_of_choices(const Pass& p, const Block& b, const MlpActivations& s) {
    if (!p.router_rule(b.fc1().block).capacity) return s.routing.experts;
    be::kept_experts(p.ctx, p.m.a.kept_experts, s.routing, p.mixture());
    return p.m.a.kept_experts;
}

// Sets s.dispatched, without logits, from the own rows' choices and weights.
inline void dispatch(const Pass& p, const Block& b, const MlpActivations& s) {
    const Axis& ep = p.m.ranks->mesh.ep;
    if (ep.size == 1) return;
    be::Comm& comm = p.m.ranks->ep;
    const size_t K = (size_t)p.m.c.mixture.topk, n = (size_t)p.N() * K;
    const size_t bytes = n * sizeof(int), weight_bytes = n * sizeof(real);
    const auto copy = [&](auto* to, const auto* from, size_t row) { be::copy_rows(p.ctx, to, row, from, row, row, 1); };
    if (!p.dispatches()) {
        copy(s.dispatched.experts, s.routing.experts, bytes);
        copy(s.dispatched.weights, s.routing.weights, weight_bytes);
    } else if (p.m.all_to_all) {
        const int* const experts = experts_of_choices(p, b, s);
        exchange_counts(p, b, s, experts);
        copy(s.dispatched.experts, experts, K * sizeof(int));  // for a rank without rows: a row that chose none
        send_to_experts(p, b, s, s.dispatched.experts, experts, K * sizeof(int));
        send_to_experts(p, b, s, s.dispatched.weights, s.routing.weights, K * sizeof(real));
    } else {
        be::all_gather(p.ctx, comm, (uint8_t*)s.dispatched.experts, (const uint8_t*)experts_of_choices(p, b, s), bytes);
        be::all_gather(p.ctx, comm, s.dispatched.weights, s.routing.weights, n);
    }
    const MixtureShape shape = p.experts(b.fc1().block);
    be::sort_choices(p.ctx, s.dispatched, shape, ep.rank * shape.E);
}

// The rows that this rank's experts process; own: (N, C).
inline const floatX* gather_for_experts(const Pass& p, const Block& b, const MlpActivations& s, const floatX* own) {
    if (!p.dispatches()) return own;
    const size_t C = (size_t)p.m.c.C;
    floatX* const rows = p.m.a.dispatched_rows;
    if (p.m.all_to_all) send_to_experts(p, b, s, rows, own, C * sizeof(floatX));
    else be::all_gather(p.ctx, p.m.ranks->ep, rows, own, (size_t)p.N() * C);
    return rows;
}

// out (N, C) = the sums over all ranks' experts, of which combine(x) sets this rank's in x, for the rows of all ranks.
template <class Combine>
void reduce_from_experts(const Pass& p, const Block& b, const MlpActivations& s, floatX* out, Combine combine) {
    const int C = p.m.c.C;
    const size_t n = (size_t)p.N() * C;
    if (!p.dispatches()) {
        combine(out);
        return be::all_reduce(p.ctx, p.m.ranks->ep, out, n);
    }
    floatX* const sums = p.m.a.dispatched_rows;
    combine(sums);
    if (!p.m.all_to_all) return be::reduce_scatter(p.ctx, p.m.ranks->ep, out, sums, n);
    const floatX* const returned = return_from_experts(p, b, sums, (size_t)C * sizeof(floatX));
    be::expert_combine(p.ctx, out, returned, s.sent, p.m.mixture_of_ranks(p.N()), C);
}

// Sets drouting (N, K), of which compute(x) sets the elements that belong to choices of this rank's experts, for the rows of
// all ranks.
template <class Compute>
void reduce_drouting(const Pass& p, const Block& b, const MlpActivations& s, Compute compute) {
    Activations& a = p.m.a;
    const int K = p.m.c.mixture.topk;
    CHECK(p.dispatches() || p.m.ranks->mesh.ep.size == 1, "a backward pass over rows that all ranks of ep have");
    if (!p.dispatches()) return compute(a.drouting);
    const size_t row_bytes = (size_t)K * sizeof(real);
    be::clear(p.ctx, a.dispatched_drouting, (size_t)p.experts(b.fc1().block).N() * row_bytes);
    compute(a.dispatched_drouting);
    if (!p.m.all_to_all) return be::reduce_scatter(p.ctx, p.m.ranks->ep, a.drouting, a.dispatched_drouting, (size_t)p.N() * K);
    const auto* const returned = (const real*)return_from_experts(p, b, a.dispatched_drouting, row_bytes);
    be::expert_combine_real(p.ctx, a.drouting, returned, s.sent, p.m.mixture_of_ranks(p.N()), K);
}
