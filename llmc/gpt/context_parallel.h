// Attention of sequences whose rows are cut over the ranks of cp (Zigzag, mesh.h), by one of two methods: exchanged heads
// (head_exchange.h), or gathered keys, as in the training of Llama 3 (arXiv:2407.21783, 3.3.2). There a rank has the queries of
// its two chunks; keys and values of all ranks are gathered, in backward again. With grouped queries they are a small part of
// the rows. Masks, ALiBi and rotary positions count rows in the whole sequence. In backward a rank has gradients of all keys
// and values that its queries see; their sums are reduce-scattered.
//   all_keys  (cp, B, 2, chunk, 2 NKVl, HS)  as gathered, by rank; in backward then the gradients
//   keys, dkeys  (2 cp, chunk, 2 NKVl, HS)   of one sequence, in its order
// Each chunk of queries is a call: its rows, and all keys up to its end.
#pragma once
#include <cstddef>

#include "../base/types.h"
#include "../ops.h"
#include "../parallel/comm.h"
#include "head_exchange.h"
#include "model.h"
#include "pass.h"

namespace detail {

// A sequence of the micro-batch, and where its chunks are.
struct CutSequence {
    const Pass& p;
    const AttentionShape& shape;  // of chunks
    int b;

    size_t row() const { return 2 * (size_t)shape.NKV * shape.HS; }  // keys and values
    size_t chunk() const { return (size_t)shape.T * row(); }
    floatX* gathered(int i) const {
        const Zigzag& part = p.in.part;
        return p.m.a.all_keys + (((size_t)part.rank_of(i) * p.in.B + b) * 2 + part.half_of(i)) * chunk();
    }
    // Copies keys and values into the order of the sequence.
    void order() const {
        const size_t bytes = chunk() * sizeof(floatX);
        for (int i = 0; i < p.in.part.chunks(); i++)
            be::copy_rows(p.ctx, p.m.a.keys + i * chunk(), bytes, gathered(i), bytes, bytes, 1);
    }
    // The chunk of a half of this rank's rows, as the arguments of attention.
    int chunk_of(int half) const { return p.in.part.chunk_of_half(half); }
    int in_batch(int half) const { return 2 * b + half; }
    AttentionShape shape_of(int half) const {
        AttentionShape s = shape;
        s.B = 1;
        s.first = chunk_of(half) * shape.T;
        s.T = s.first + shape.T;
        s.apart = true;
        s.whole_T = p.in.whole_T();
        s.dropout = shape.dropout.from((size_t)b * s.all_heads * s.whole_T * s.whole_T);
        return s;
    }
    AttentionMask mask_of(int half, AttentionMask mask) const {
        if (mask.doc_start) mask.doc_start += in_batch(half) * shape.T;
        return mask;
    }
};

// Gathers the keys and values of all ranks.
inline void gather_keys(const Pass& p, const floatX* qkv, const AttentionShape& shape) {
    const size_t row = 2 * (size_t)shape.NKV * shape.HS, bytes = row * sizeof(floatX), n = (size_t)p.N() * row;
    floatX* const mine = p.m.a.all_keys + (size_t)p.in.part.cp.rank * n;
    be::copy_rows(p.ctx, mine, bytes, qkv + shape.output_row(), shape.row() * sizeof(floatX), bytes, (size_t)p.N());
    be::all_gather(p.ctx, p.m.ranks->cp, p.m.a.all_keys, mine, n);
}

}  // namespace detail

// This rank's call of attention that uses the most scratch memory: the later of its chunks, or whole sequences of the heads
// that it receives (head_exchange.h). shape: of whole sequences, all heads.
inline AttentionShape largest_call(AttentionShape shape, const Ranks& ranks) {
    const Axis& cp = ranks.mesh.cp;
    if (ranks.exchanges_heads) {
        shape.NH /= cp.size;
        shape.NKV /= cp.size;
    } else if (cp.size > 1) {
        const Zigzag part = {cp};
        const int chunk = shape.T / part.chunks();
        shape.B = 1;
        shape.first = part.chunk_of_half(1) * chunk;
        shape.T = shape.first + chunk;
        shape.apart = true;
    }
    return shape;
}

// shape: of all chunks, (2 B, T / 2); so lse is (2 B, NH, T / 2).
inline void gathered_attention_forward(const Pass& p, floatX* att, real* lse, const floatX* qkv, const floatX* sinks,
                                       const AttentionMask& mask, const AttentionShape& shape) {
    detail::gather_keys(p, qkv, shape);
    for (int b = 0; b < p.in.B; b++) {
        const detail::CutSequence sequence = {p, shape, b};
        sequence.order();
        for (const int half : {0, 1}) {
            const int i = sequence.in_batch(half);
            be::attention_rows_forward(p.ctx, att + shape.output(i, 0, 0), lse + shape.statistic(i, 0, 0),
                                       qkv + shape.query(i, 0, 0), p.m.a.keys, sequence.mask_of(half, mask),
                                       sequence.shape_of(half));
        }
    }
    if (sinks) be::sinks_forward(p.ctx, att, lse, sinks, shape);
}

// sets dqkv, of queries and keys after their rotation; adds to dsinks.
inline void gathered_attention_backward(const Pass& p, floatX* dqkv, real* dsinks, const floatX* datt,
                                        const AttentionActs& acts, const floatX* sinks, const AttentionMask& mask,
                                        const AttentionShape& shape) {
    Activations& a = p.m.a;
    if (sinks) be::sinks_backward(p.ctx, dsinks, datt, acts, sinks, shape);
    detail::gather_keys(p, acts.qkv, shape);
    for (int b = 0; b < p.in.B; b++) {
        const detail::CutSequence sequence = {p, shape, b};
        const size_t chunk = sequence.chunk(), bytes = chunk * sizeof(floatX);
        sequence.order();
        // The later chunk sees more keys: it sets their gradients, to which the earlier one adds.
        for (const int half : {1, 0}) {
            const int i = sequence.in_batch(half);
            const AttentionActs of_half = {acts.qkv + shape.query(i, 0, 0), acts.out + shape.output(i, 0, 0),
                                           acts.lse + shape.statistic(i, 0, 0), a.keys};
            be::attention_rows_backward(p.ctx, dqkv + shape.query(i, 0, 0), a.dkeys, datt + shape.output(i, 0, 0), of_half,
                                        sequence.mask_of(half, mask), sequence.shape_of(half));
            for (int k = 0; k < p.in.part.chunks(); k++) {
                floatX* const sum = sequence.gathered(k);
                const floatX* const dkeys = a.dkeys + k * chunk;
                const bool seen = k <= sequence.chunk_of(half);
                if (half == 1 && seen) be::copy_rows(p.ctx, sum, bytes, dkeys, bytes, bytes, 1);
                else if (half == 1) be::clear(p.ctx, sum, bytes);
                else if (seen) be::residual_forward(p.ctx, sum, sum, dkeys, chunk);
            }
        }
    }
    const size_t row = 2 * (size_t)shape.NKV * shape.HS, bytes = row * sizeof(floatX), n = (size_t)p.N() * row;
    floatX* const mine = a.all_keys + (size_t)p.in.part.cp.rank * n;
    be::reduce_scatter(p.ctx, p.m.ranks->cp, mine, (const floatX*)a.all_keys, n);
    be::copy_rows(p.ctx, dqkv + shape.output_row(), shape.row() * sizeof(floatX), mine, bytes, bytes, (size_t)p.N());
}

// Attention of cut sequences, by the method that was chosen.
inline void context_attention_forward(const Pass& p, floatX* att, real* lse, const floatX* qkv, const floatX* sinks,
                                      const AttentionMask& mask, const AttentionShape& shape) {
    (p.exchanges_heads() ? exchanged_attention_forward : gathered_attention_forward)(p, att, lse, qkv, sinks, mask, shape);
}
inline void context_attention_backward(const Pass& p, floatX* dqkv, real* dsinks, const floatX* datt, const AttentionActs& acts,
                                       const floatX* sinks, const AttentionMask& mask, const AttentionShape& shape) {
    const auto backward = p.exchanges_heads() ? exchanged_attention_backward : gathered_attention_backward;
    backward(p, dqkv, dsinks, datt, acts, sinks, mask, shape);
}
