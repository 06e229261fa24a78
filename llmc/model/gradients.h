// Gradients in bf16 (--main-grads-dtype bf16): 2 instead of 4 bytes per parameter.
//
// A step's gradients are sums over its micro-batches. Rounded to the nearest bf16 they would lose each summand that is below
// half a unit in the last place, 1/512 to 1/256 of the sum. So ops leave in fp32 what a micro-batch contributes to a block, to
// the head or to the embedding, in memory that all of these use in turn. Then it is added to what is stored, with one rounding:
// to the nearest where a step's first micro-batch sets the gradients, else stochastically (elements.h). In fp32 ops add to the
// gradients in place, and nothing here does anything.
//
// The random numbers are functions of the seed, the micro-batch's first sample, the tensor and the element's place in the whole
// tensor: the same bits for any number of threads, whatever part of the tensor a rank holds, and after a resume.
// Cost: per parameter and micro-batch 4 bytes are written, 4 read, and 2 written or, to add, 4 moved; in fp32 4 are written or,
// to add, 8 moved. Where products can round (on a GPU), a step's first micro-batch writes the matrices of blocks as they are
// stored: 2 bytes.
#pragma once
#include <algorithm>
#include <map>
#include <vector>

#include "../elements.h"
#include "arena.h"
#include "parameters.h"

class BlockGradients {
public:
    // Vectors, which ops add to, lie in front, matrices behind them; blocks use both places in turn. So do head and embedding
    // with their matrices, which may be one, while each has its own place for vectors.
    void plan(Arena& arena, const ParameterTable& table) {
        offsets_.resize(table.rows.size());
        const auto place = [&](bool vectors, size_t begin) {
            std::map<int, size_t> ends;
            size_t end = begin;
            for (size_t i = 0; i < offsets_.size(); i++) {
                const TensorSpec& t = table.rows[i];
                if (t.vector() != vectors) continue;
                const bool beside = vectors && t.block == TensorSpec::head;
                size_t& next = ends.emplace(beside ? TensorSpec::embedding : t.block, begin).first->second;
                offsets_[i] = next, next += round_up(t.size(), 64), end = std::max(end, next);
                if (t.block == TensorSpec::embedding) embedding_ = next;
            }
            return end;
        };
        vectors_ = place(true, 0);
        arena.add("gradients of a block (fp32)", &memory_, place(false, vectors_));
    }
    // Once there is memory: g becomes where ops leave gradients.
    void bind(const ModelConfig& c, const ParameterTable& table, Params<real>& g) {
        bind_parameters(c, table, g, memory_, [&](size_t row) { return offsets_[row]; });
        tied_ = c.tied && table.part.first && table.part.last;
    }
    bool used() const { return memory_; }
    // Whether products set the stored gradients of a block's matrices themselves: the same rounding, half the bytes written.
    bool set_by_products(Acc acc) const { return used() && acc == Acc::Set && be::sets_bf16_gradients; }

    // Before a micro-batch's backward pass through a block: clears what ops add to, vectors and the embedding's matrices. Other
    // matrices are set by products.
    void begin(be::Ctx& ctx, int block) const {
        if (used()) be::clear(ctx, memory_, (block == TensorSpec::embedding ? embedding_ : vectors_) * sizeof(real));
    }
    // After it: sets `grads`, or adds to them.
    void end(be::Ctx& ctx, const ParameterTable& table, const Elements& grads, int block, Acc acc, uint64_t key) const {
        const bool embedding = block == TensorSpec::embedding;
        for (size_t i = 0; i < table.rows.size() && used(); i++) {
            const TensorSpec& t = table.rows[i];
            const bool of_both = tied_ && i == 0;  // the head sets it before the embedding adds to it
            if (t.block != block && !(of_both && block == TensorSpec::head)) continue;
            if (block >= 0 && !t.vector() && set_by_products(acc)) continue;
            for_each_rounding(t, t.offset, t.offset + t.size(), key + embedding,
                              [&](size_t first, size_t n, const Rounding& r) {
                                  be::accumulate(ctx, (bf16*)grads.data + first, memory_ + offsets_[i] + first - t.offset, n,
                                                 of_both && embedding ? Acc::Add : acc, r);
                              });
        }
    }

private:
    std::vector<size_t> offsets_;         // of each row of the table
    size_t vectors_ = 0, embedding_ = 0;  // where vectors end, and the embedding's matrices
    real* memory_ = nullptr;              // null where gradients are fp32
    bool tied_ = false;                   // head and embedding are one matrix of this rank
};
