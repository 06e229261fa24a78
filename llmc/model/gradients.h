// Gradients in bf16 (--main-grads-dtype bf16): 2 instead of 4 bytes per parameter.
//
// A step's gradients are sums over its micro-batches. Rounded to the nearest bf16, they would lose every summand below half an
// ulp, 1/512 to 1/256 of the sum. So ops write a micro-batch's contribution in fp32, into a buffer that blocks, the head and
// the embedding share. It is then added to the stored gradients with one rounding: to the nearest where a step's first
// micro-batch sets them, else stochastically (elements.h). With fp32 gradients, ops accumulate in place, and this class does
// nothing.
//
// The matrices of blocks and the head are computed and added some rows at a time, as many as have 16 MiB of sums. These stay in
// a GPU's second-level cache or a CPU's third-level cache, so that memory transfers only the bf16 gradients. The bits do not
// depend on the number of rows, if the library's products do not. If the logits are computed in several parts (--head-rows),
// each part is a contribution to the head, with its own rounding. The embedding's op rounds the sum of a token when it is
// complete.
//
// The random numbers are functions of the seed, the micro-batch's first sample and the rank's place in context parallelism,
// the tensor and the element's index in the whole tensor: the bits do not depend on the number of threads, the rank's part of
// the tensor, or a resume. Cost: per parameter of a matrix and contribution 2 bytes are written or, to add, 4 moved, in the
// embedding only for the tokens that occur; of vectors 4 more are written and 4 read. With fp32 gradients 4 are written or, to
// add, 8 moved. Where matrix products can round (on a GPU), a step's first contribution sets a matrix by a whole product,
// except in mixtures of experts.
#pragma once
#include <algorithm>
#include <map>
#include <vector>

#include "../elements.h"
#include "arena.h"
#include "parameters.h"

// The key of a micro-batch's contribution, by its first sample. The ranks of cp have rows of the same samples: if they shared
// random numbers, their rounding errors would correlate, and the variance of a sum over n ranks be (n + 1) / 2 times as large.
inline uint64_t contribution_key(uint64_t seed, int64_t sample, const Axis& cp) {
    return rounding_key(seed, sample * cp.size + cp.rank, RngPurpose::gradients);
}

class BlockGradients {
public:
    // The elements of a matrix that are summed at a time: 16 MiB.
    size_t elements_at_a_time = (size_t)4 << 20;
    // All rows, or a multiple of 128, for the tiles of matrix products, or of 16, which FP8 requires.
    int rows_at_a_time(int all_rows, int columns) const {
        const size_t rows = elements_at_a_time / (size_t)columns;
        return (int)std::min((size_t)all_rows, rows < 128 ? std::max<size_t>(16, rows / 16 * 16) : rows / 128 * 128);
    }
    // For stacked experts: some whole matrices, or rows of one. For a router: all rows.
    int rows_at_a_time(const TensorSpec& t) const {
        if (t.router()) return t.rows;
        const int each = t.rows / t.experts, rows = rows_at_a_time(each, t.cols);
        if (rows < each) return rows;
        return each * (int)std::clamp<size_t>(elements_at_a_time / ((size_t)each * (size_t)t.cols), 1, (size_t)t.experts);
    }

    // The buffer starts with the vectors, which ops add to; matrices follow. Blocks share both areas in turn; head and
    // embedding have separate vectors. A model's matrices share an area: add_product() uses it for some rows at a time.
    // (Gradients of adapters (lora.h) need more than one product, so adapters have whole matrices.)
    void plan(Arena& arena, const ParameterTable& table, bool of_model, bool tied, bool on_host) {
        of_model_ = of_model;
        on_host_ = on_host;
        tied_ = tied && table.part.first && table.part.last;
        offsets_.resize(table.rows.size());
        const auto place = [&](bool vectors, size_t begin) {
            std::map<int, size_t> ends;
            size_t end = begin;
            for (size_t i = 0; i < offsets_.size(); i++) {
                const TensorSpec& t = table.rows[i];
                if (t.vector() != vectors) continue;
                const bool with_embedding = vectors && t.block == TensorSpec::head;
                size_t& next = ends.emplace(with_embedding ? TensorSpec::embedding : t.block, begin).first->second;
                offsets_[i] = next;
                if (in_parts(t)) {
                    offsets_[i] = begin;
                    end = std::max(end, begin + round_up((size_t)rows_at_a_time(t) * t.cols, 64));
                    continue;
                }
                next += round_up(t.size(), 64);
                end = std::max(end, next);
                if (t.block == TensorSpec::embedding) embedding_ = next;
            }
            return end;
        };
        vectors_ = place(true, 0);
        arena.add("gradients of a block (fp32)", &memory_, place(false, vectors_));
    }
    bool used() const { return memory_; }
    // The buffer into which ops write the gradient of a row of the table.
    real* gradient(size_t row) const { return memory_ + offsets_[row]; }
    // True if products set the stored gradient of a model's matrix directly, with the same rounding. The products of experts
    // and routers cannot.
    bool set_by_products(const TensorSpec& t, Acc acc) const {
        return of_model_ && !on_host_ && !t.of_mixture && acc == Acc::Set && be::sets_bf16_gradients;
    }

    // Before a micro-batch's backward pass through a block: clears the gradients that ops add to, which are the vectors and
    // virtual tokens. Products set the matrices.
    void begin(be::Ctx& ctx, int block) const {
        const size_t n = block == TensorSpec::embedding ? embedding_ : vectors_;
        if (used() && n > 0) be::clear(ctx, memory_, n * sizeof(real));
    }
    // After the backward pass: sets `grads` or adds to it.
    void end(be::Ctx& ctx, const ParameterTable& table, const Elements& grads, int block, Acc acc, uint64_t key) const {
        for (size_t i = 0; i < table.rows.size() && used(); i++) {
            const TensorSpec& t = table.rows[i];
            if (t.block != block || in_parts(t)) continue;
            for_each_rounding(t, t.offset, t.offset + t.size(), key + (block == TensorSpec::embedding),
                              [&](size_t first, size_t n, const Rounding& r) {
                                  be::accumulate(ctx, (bf16*)grads.data + first, memory_ + offsets_[i] + first - t.offset, n,
                                                 acc, r);
                              });
        }
    }

    // During the backward pass of a block or of the head: sets the gradient of a matrix or adds to it. product(sums, row, rows)
    // sets `sums` to the contribution to these rows.
    template <class Product>
    void add_product(be::Ctx& ctx, const TensorSpec& t, const Elements& grads, Acc acc, uint64_t key, Product product) const {
        real* const sums = memory_ + vectors_;
        const int most = rows_at_a_time(t), each = t.rows / t.experts;
        for (int row = 0, rows; row < t.rows; row += rows) {
            rows = std::min(most, most < each ? each - row % each : t.rows - row);
            product(sums, row, rows);
            const size_t begin = t.offset + (size_t)row * t.cols;
            for_each_rounding(t, begin, begin + (size_t)rows * t.cols, key, [&](size_t first, size_t n, const Rounding& r) {
                be::accumulate(ctx, (bf16*)grads.data + first, sums + (first - begin), n, acc, r);
            });
        }
    }
    // The key of a contribution to the head: of the logits of some rows, or of all if part is 0.
    static uint64_t key_of_head(uint64_t key, int part) { return part ? key + 1 + (uint64_t)part : key; }
    // The same for the embedding of tokens or of positions: row ids[n] of the whole table receives row n of dout (N, cols),
    // times scale.
    void add_rows(be::Ctx& ctx, const TensorSpec& t, const Elements& grads, Acc acc, uint64_t key, const floatX* dout,
                  const int* ids, int N, const VocabularyShard& shard) const {
        const Acc after_head = tied_ && t.id == 0 ? Acc::Add : acc;
        for_each_rounding(t, t.offset, t.offset + t.size(), key + 1, [&](size_t first, size_t n, const Rounding& r) {
            const int row = (int)((first - t.offset) / (size_t)t.cols), rows = (int)(n / (size_t)t.cols);
            be::embedding_backward_rounded(ctx, (bf16*)grads.data + first, dout, ids, N, t.cols,
                                           {shard.v0 + row, rows, rows, shard.scale}, after_head, r);
        });
    }

private:
    bool in_parts(const TensorSpec& t) const { return of_model_ && !t.vector(); }

    std::vector<size_t> offsets_;         // offset of each row of the table
    size_t vectors_ = 0, embedding_ = 0;  // end of the vectors, and of the embedding's vectors or virtual tokens
    real* memory_ = nullptr;              // null where gradients are fp32
    bool of_model_ = false;               // the table has the model's own parameters
    bool on_host_ = false;                // the gradients are in page-locked host memory (--offload gradients)
    bool tied_ = false;                   // head and embedding are the same matrix on this rank
};
