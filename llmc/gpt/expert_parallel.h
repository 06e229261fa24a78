// Expert parallelism (Lepikhin et al., 2020, "GShard"): the ranks of ep, a part of data parallelism, hold different experts of
// a mixture; everything else of a model is the same on all of them. A rank's experts process the rows of all of them:
//
//   own rows        (N, C)         router, choices and weights
//   all-gather      (ep, N, C)     rows, choices and weights of all ranks; sorted by this rank's experts only
//   experts                        slots of this rank's experts
//   combine         (ep, N, C)     each row's sum over this rank's experts; 0 if it chose none of them
//   reduce-scatter  (N, C)         the sums of the own rows over all ranks
//
// Backward gathers the output's gradients and, for the gradient of fc1's weight, the rows again; the inputs' gradients and the
// routing weights' are reduce-scattered. This is Megatron-LM's --moe-token-dispatcher-type allgather. Shapes do not depend on
// the routing, so no rank waits for another one's counts; all-to-all messages would carry only chosen rows, min(1, K / ep) of
// these bytes.
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

// Sets s.dispatched, without logits, from the own rows' choices and weights.
inline void dispatch(const Pass& p, const MlpActivations& s) {
    const Axis& ep = p.m.ranks->mesh.ep;
    if (ep.size == 1) return;
    be::Comm& comm = p.m.ranks->ep;
    const size_t n = (size_t)p.N() * p.m.c.mixture.topk;
    const size_t bytes = n * sizeof(int), weight_bytes = n * sizeof(real);
    if (p.dispatches()) {
        be::all_gather(p.ctx, comm, (uint8_t*)s.dispatched.experts, (const uint8_t*)s.routing.experts, bytes);
        be::all_gather(p.ctx, comm, s.dispatched.weights, s.routing.weights, n);
    } else {
        be::copy_rows(p.ctx, s.dispatched.experts, bytes, s.routing.experts, bytes, bytes, 1);
        be::copy_rows(p.ctx, s.dispatched.weights, weight_bytes, s.routing.weights, weight_bytes, weight_bytes, 1);
    }
    const MixtureShape shape = p.experts();
    be::sort_choices(p.ctx, s.dispatched, shape, ep.rank * shape.E);
}

// The rows of all ranks; own: (N, C).
inline const floatX* gather_for_experts(const Pass& p, const floatX* own) {
    if (!p.dispatches()) return own;
    be::all_gather(p.ctx, p.m.ranks->ep, p.m.a.dispatched_rows, own, (size_t)p.N() * p.m.c.C);
    return p.m.a.dispatched_rows;
}

// out (N, C) = the sums over all ranks' experts, of which combine(x) sets this rank's in x, for the rows of all ranks.
template <class Combine>
void reduce_from_experts(const Pass& p, floatX* out, Combine combine) {
    const size_t n = (size_t)p.N() * p.m.c.C;
    if (!p.dispatches()) {
        combine(out);
        return be::all_reduce(p.ctx, p.m.ranks->ep, out, n);
    }
    combine(p.m.a.dispatched_rows);
    be::reduce_scatter(p.ctx, p.m.ranks->ep, out, p.m.a.dispatched_rows, n);
}

// Sets drouting (N, K), of which compute(x) sets the elements that belong to choices of this rank's experts, for the rows of
// all ranks.
template <class Compute>
void reduce_drouting(const Pass& p, Compute compute) {
    Activations& a = p.m.a;
    const size_t n = (size_t)p.N() * p.m.c.mixture.topk;
    CHECK(p.dispatches() || p.m.ranks->mesh.ep.size == 1, "a backward pass over rows that all ranks of ep have");
    if (!p.dispatches()) return compute(a.drouting);
    be::clear(p.ctx, a.dispatched_drouting, n * (size_t)p.m.ranks->mesh.ep.size * sizeof(real));
    compute(a.dispatched_drouting);
    be::reduce_scatter(p.ctx, p.m.ranks->ep, a.drouting, a.dispatched_drouting, n);
}
