// The losses of pairs of answers (preference.h) in a micro-batch.
#pragma once
#include <vector>

#include "../model/arena.h"
#include "../model/preference.h"
#include "../ops.h"
#include "../parallel/comm.h"
#include "model.h"
#include "pass.h"

// Compares the answers of a micro-batch by its rows' losses: sets the weights of their gradients, and adds to the sums. With
// tensor parallelism every rank knows all losses; with context parallelism all ranks compare whole answers, and the first one
// adds to the sums.
inline void compare_answers(const Pass& p) {
    Activations& a = p.m.a;
    const size_t N = (size_t)p.N(), T = (size_t)p.in.T;
    HostSide<real> weight(p.ctx, a.weight, N);
    if (!p.cut_context()) {
        HostSide<real> loss(p.ctx, a.loss, N);
        loss.download();
        p.m.preference.compare(p.in.pairs, loss.data(), weight.data(), a.pair_sums);
        return weight.upload();
    }
    const Axis& cp = p.in.part.cp;
    be::all_gather(p.ctx, p.m.ranks->cp, a.all_losses, a.loss, N);
    HostSide<real> gathered(p.ctx, a.all_losses, cp.size * N);
    gathered.download();
    std::vector<real> losses(cp.size * N), weights(cp.size * N);  // in the order of whole sequences
    for (int rank = 0; rank < cp.size; rank++)
        for (size_t i = 0; i < N; i++) losses[Zigzag{{cp.size, rank}}.row_of_batch(i, T)] = gathered.data()[rank * N + i];
    PreferenceSums counted_elsewhere;
    p.m.preference.compare(p.in.pairs, losses.data(), weights.data(), cp.rank == 0 ? a.pair_sums : counted_elsewhere);
    for (size_t i = 0; i < N; i++) weight.data()[i] = weights[p.in.part.row_of_batch(i, T)];
    weight.upload();
}
