// Attention of sequences whose rows are cut over the ranks of cp, with --context-parallel-method alltoall, as in
// DeepSpeed-Ulysses (arXiv:2309.14509). A rank sends the queries, keys and values of its rows to the ranks of their heads, and
// receives all rows of its own heads, NHl / cp of NHl. Attention then sees whole sequences, with the bits of one rank; the
// output is sent back to the ranks of its rows. In backward qkv, the output and its gradient are exchanged in the same way, and
// the gradient of qkv is sent back. Heads of a rank: cp.rank NHl / cp and the following ones.
//   row, packed   numbers in a row of all heads; of a rank's heads
//   exchanged[0], exchanged[1]   (cp, N, packed) sent, received; or (B, cp T, packed)
//   whole_att, whole_datt        (B, cp T, NHl / cp, HS) in backward
#pragma once
#include <cstddef>
#include <numeric>
#include <utility>
#include <vector>

#include "../base/types.h"
#include "../ops.h"
#include "../parallel/comm.h"
#include "model.h"
#include "pass.h"

namespace detail {

// Moves rows of a tensor whose columns are sections of heads: qkv, or attention's output.
class HeadExchange {
public:
    HeadExchange(const Pass& p, std::vector<int> heads)
        : p_(p),
          cp_(p.in.part.cp.size),
          N_((size_t)p.N()),
          heads_(std::move(heads)),
          row_((size_t)std::accumulate(heads_.begin(), heads_.end(), 0) * (size_t)p.m.c.HS()),
          packed_(row_ / (size_t)cp_) {}

    // whole (B, cp T, packed): all rows of this rank's heads. rows (N, row): this rank's rows of all heads. whole may be
    // exchanged[0].
    void to_heads(floatX* whole, const floatX* rows) const {
        floatX *const sent = p_.m.a.exchanged[0], *const received = p_.m.a.exchanged[1];
        for_each_part([&](size_t in_packed, size_t in_row, size_t numbers) {
            copy(sent + in_packed, packed_, rows + in_row, row_, numbers, N_);
        });
        exchange(received, sent);
        for_each_chunk([&](size_t in_whole, size_t in_ranks, size_t numbers) {
            copy(whole + in_whole, whole_row(numbers), received + in_ranks, 2 * numbers, numbers, (size_t)p_.in.B);
        });
    }
    // The reverse. whole may be exchanged[1].
    void to_rows(floatX* rows, const floatX* whole) const {
        floatX *const sent = p_.m.a.exchanged[0], *const received = p_.m.a.exchanged[1];
        for_each_chunk([&](size_t in_whole, size_t in_ranks, size_t numbers) {
            copy(sent + in_ranks, 2 * numbers, whole + in_whole, whole_row(numbers), numbers, (size_t)p_.in.B);
        });
        exchange(received, sent);
        for_each_part([&](size_t in_packed, size_t in_row, size_t numbers) {
            copy(rows + in_row, row_, received + in_packed, packed_, numbers, N_);
        });
    }

private:
    // Each rank's part of each section of a row.
    template <class F>
    void for_each_part(F f) const {
        for (int rank = 0; rank < cp_; rank++) {
            size_t in_packed = (size_t)rank * N_ * packed_, section = 0;
            for (const int heads : heads_) {
                const size_t all = (size_t)heads * (size_t)p_.m.c.HS(), numbers = all / (size_t)cp_;
                f(in_packed, section + (size_t)rank * numbers, numbers);
                in_packed += numbers;
                section += all;
            }
        }
    }
    // Each chunk of the first sequence, in its order and by the rank that has its rows (Zigzag, mesh.h).
    template <class F>
    void for_each_chunk(F f) const {
        const Zigzag& part = p_.in.part;
        const size_t numbers = (size_t)(p_.in.T / 2) * packed_;
        for (int i = 0; i < part.chunks(); i++)
            f((size_t)i * numbers, (size_t)part.rank_of(i) * N_ * packed_ + (size_t)part.half_of(i) * numbers, numbers);
    }
    size_t whole_row(size_t chunk) const { return (size_t)p_.in.part.chunks() * chunk; }
    void copy(floatX* to, size_t to_stride, const floatX* from, size_t from_stride, size_t numbers, size_t rows) const {
        const size_t each = sizeof(floatX);
        be::copy_rows(p_.ctx, to, to_stride * each, from, from_stride * each, numbers * each, rows);
    }
    void exchange(floatX* received, const floatX* sent) const {
        std::vector<int> ends((size_t)cp_ + 1);
        for (int rank = 0; rank <= cp_; rank++) ends[(size_t)rank] = rank * (int)N_;
        be::all_to_all(p_.ctx, p_.m.ranks->cp, received, ends, sent, ends, packed_ * sizeof(floatX));
    }

    const Pass& p_;
    int cp_;
    size_t N_;
    std::vector<int> heads_;
    size_t row_, packed_;
};

// This rank's heads on all rows.
struct OwnHeads {
    AttentionShape shape;
    AttentionMask mask;
    HeadExchange qkv, att;
    int first;

    // shape: of chunks of rows, all heads.
    OwnHeads(const Pass& p, AttentionShape s, const AttentionMask& of_all)
        : shape(s), mask(of_all), qkv(p, {s.NH, s.NKV, s.NKV}), att(p, {s.NH}) {
        const Axis& cp = p.in.part.cp;
        shape.B = p.in.B;
        shape.T = p.in.whole_T();
        shape.NH /= cp.size;
        shape.NKV /= cp.size;
        first = cp.rank * shape.NH;
        shape.dropout = s.dropout.from((size_t)first * (size_t)shape.T * (size_t)shape.T);
        if (mask.slopes) mask.slopes += first;
    }
};

}  // namespace detail

// lse: (B, NHl / cp, cp T). sinks: (NHl) or null.
inline void exchanged_attention_forward(const Pass& p, floatX* att, real* lse, const floatX* qkv, const floatX* sinks,
                                        const AttentionMask& mask, const AttentionShape& shape) {
    const detail::OwnHeads own(p, shape, mask);
    floatX *const whole_qkv = p.m.a.exchanged[0], *const whole_att = p.m.a.exchanged[1];
    own.qkv.to_heads(whole_qkv, qkv);
    be::attention_forward(p.ctx, whole_att, lse, whole_qkv, own.mask, own.shape);
    if (sinks) be::sinks_forward(p.ctx, whole_att, lse, sinks + own.first, own.shape);
    own.att.to_rows(att, whole_att);
}

// sets dqkv, of queries and keys after their rotation; adds to dsinks.
inline void exchanged_attention_backward(const Pass& p, floatX* dqkv, real* dsinks, const floatX* datt,
                                         const AttentionActs& acts, const floatX* sinks, const AttentionMask& mask,
                                         const AttentionShape& shape) {
    const Activations& a = p.m.a;
    const detail::OwnHeads own(p, shape, mask);
    own.att.to_heads(a.whole_att, acts.out);
    own.att.to_heads(a.whole_datt, datt);
    own.qkv.to_heads(a.exchanged[0], acts.qkv);
    const AttentionActs whole = {a.exchanged[0], a.whole_att, acts.lse};
    if (sinks) be::sinks_backward(p.ctx, dsinks + own.first, a.whole_datt, whole, sinks + own.first, own.shape);
    be::attention_backward(p.ctx, a.exchanged[1], a.whole_datt, whole, own.mask, own.shape, nullptr);
    own.qkv.to_rows(dqkv, a.exchanged[1]);
}
