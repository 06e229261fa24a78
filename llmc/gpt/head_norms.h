// Norms of queries and keys (Henry et al., 2020), in place: one per head, or one over all heads.
#pragma once
#include <array>

#include "../ops.h"
#include "../parallel/comm.h"
#include "model.h"
#include "pass.h"

inline HeadRows heads_of(const Pass& p, bool keys) {
    const LocalSizes& n = p.m.local;
    return {p.N(), (size_t)n.QKVl, p.m.c.qk_norm == QkNorm::whole ? 1 : keys ? n.NKVl : n.NHl};
}
// Parameters of the norms of queries (0) and keys (1). If one norm spans heads of several tp ranks, params[k].means are over
// all of them: set_sums(k, sums) sets this rank's sums (N). Key heads held by several ranks are counted once.
template <class SetSums>
std::array<NormParams, 2> head_norm_params(const Pass& p, const Block& b, SetSums set_sums) {
    std::array<NormParams, 2> params = {b.head_norms[0].params, b.head_norms[1].params};
    if (!p.m.cuts_head_norms()) return params;
    const size_t N = (size_t)p.N();
    real* const sums = p.m.a.head_sums;
    for (int k = 0; k < 2; k++) set_sums(k, sums + k * N);
    be::all_reduce(p.ctx, p.m.ranks->tp, sums, 2 * N);
    const int heads[] = {p.m.c.NH, p.m.c.NKV * p.m.local.replicas};
    for (int k = 0; k < 2; k++) params[k].means = {sums + k * N, 1 / (real)(heads[k] * p.m.c.HS())};
    return params;
}
inline void head_norms_forward(const Pass& p, const Block& b, floatX* qkv, const HeadNormInput* heads) {
    floatX* qk[] = {qkv, qkv + (size_t)p.m.local.NHl * p.m.c.HS()};
    const auto params = head_norm_params(
        p, b, [&](int k, real* sums) { be::head_norm_squares(p.ctx, sums, qk[k], b.head_norms[k].params.C, heads_of(p, k)); });
    for (int k = 0; k < 2; k++) be::head_norm_forward(p.ctx, qk[k], heads[k].x, heads[k].rstd, params[k], heads_of(p, k));
}
inline void head_norms_backward(const Pass& p, const Block& b, floatX* dqkv, const HeadNormInput* heads) {
    floatX* qk[] = {dqkv, dqkv + (size_t)p.m.local.NHl * p.m.c.HS()};
    const auto params = head_norm_params(p, b, [&](int k, real* sums) {
        be::head_norm_products(p.ctx, sums, qk[k], heads[k].x, b.head_norms[k].params, heads[k].rstd, heads_of(p, k));
    });
    for (int k = 0; k < 2; k++)
        be::head_norm_backward(p.ctx, qk[k], b.head_norms[k].grads, heads[k].x, params[k], heads[k].rstd, heads_of(p, k));
}
