// Muon (Jordan et al., 2024, kellerjordan.github.io/posts/muon; Liu et al., 2025, arXiv 2502.16982) and NorMuon (Li et al.,
// 2025, arXiv 2510.05491): an optimizer for the matrices of blocks, while AdamW updates embedding, head, biases and norms. For
// a matrix W (m, n) with gradient G (clipped), as torch.optim.Muon computes it:
//   M <- mu M + (1 - mu) G                    the momentum, stored as exp_avg
//   X0 = ((1 - mu) G + mu M) / norm           Nesterov; norm: the root of the sum of squares, at least 1e-7
//   X <- a X + b (X X^T) X + c (X X^T)^2 X    five Newton-Schulz steps: singular values become 0.7 .. 1.2, vectors are kept
//   W <- (1 - lr wd) W - lr s X               wd: weight decay
// s = 0.2 sqrt(max(m, n)) gives the update the root mean square of AdamW's, so that both use the same learning rate (Liu et
// al.; torch: match_rms_adamw; Megatron-LM: scale mode spectral with extra scale factor 0.2); or s = sqrt(max(1, m / n))
// (Jordan; torch: original; Megatron-LM: shape_scaling).
// NorMuon divides each row of X, a neuron, by the root of a running mean v of its mean square, then scales X to the norm of an
// orthogonal matrix: with the first s the step is 0.2 lr sqrt(m n) X / |X|, as in the paper. v is stored in the first column
// of exp_avg_sq, whose other columns stay zero: a checkpoint has the same tensors as AdamW's, and any layout can resume it.
// Plain Muon needs no exp_avg_sq of its matrices, 4 bytes per parameter less than AdamW; checkpoints have zeros in their
// place.
//
// With muP and CompleteP (model/parametrization.h) an update's largest singular value must stay in proportion to sqrt(m / n)
// while the width grows, that is constant (Yang et al., 2023, "A Spectral Condition for Feature Learning", arXiv:2310.17813). X
// has largest singular values of 1: s = sqrt(max(1, m / n)) is right for every width, s = sqrt(max(m, n)) is divided by the
// root of the width relative to the base model's, and a factor that is folded into W multiplies both. lr wd is unchanged.
// NorMuon's X has no known singular values, so NorMuon is rejected with them.
//
// Queries, keys, values, SwiGLU's gate and up, and experts are separate matrices, though stored in one; with `heads` so is each
// head of queries, keys and values. Products are as in linear layers (matmul.h), in floatX with sums in fp32. The step is one
// product after X X^T: (a I + b A + c A^2) X with A = X X^T, or with A = X^T X from the right if X has more rows than columns.
//
// Ranks. With ZeRO-1 each matrix belongs to one data-parallel rank (shard.h), which has all of its weights and momentum and is
// the only one to update it: given the same gradients and algorithms of products, the bits are the same for any number of
// data-parallel ranks, and no more is sent than with AdamW. Without ZeRO each rank computes the whole update, so a GPU then
// times no algorithms (gpu/README.md): the bits equal ZeRO-1's with --gemm-cache none. A matrix sharded by tensor
// parallelism is gathered on one tp rank, which sends back the shards of the result; the tp ranks take turns, so that each
// works on another matrix. This is exact, too, and moves 4 bytes per element; summing X X^T over the ranks in every step would
// move 10 min(m, n)^2 / (m n) times 2 bytes, and add in another order.
// Cost per step: 5 (4 m n k + 2 k^3) FLOPs with k = min(m, n), on one rank of the data- and tensor-parallel ones. With blocks
// of width C (F = 4 C) that is 25 C per parameter, against 6 per parameter and token of forward and backward passes: 3% of a
// step for C = 4096 and half a million tokens on one rank, and divided by the ranks that share the matrices.
#pragma once
#include <algorithm>
#include <cmath>
#include <type_traits>
#include <utility>
#include <vector>

#include "../elements.h"
#include "../model/arena.h"
#include "../model/parameters.h"
#include "../ops.h"
#include "optimizer_state.h"
#include "../parallel/ranks.h"
#include "shard.h"

struct MuonRecipe {
    bool on = false;
    bool neurons = false;  // NorMuon
    bool heads = false;    // heads of queries, keys and values are separate matrices
    real momentum = real(0.95), beta2 = real(0.95);
    int iterations = 5;
    bool shape_scaling = false;  // s = factor sqrt(max(1, m / n)) instead of factor sqrt(max(m, n))
    double factor = 0.2;

    // The factor of the learning rate of a matrix whose factor with AdamW is `lr`.
    double learning_rate(double lr, const Parametrization& p) const {
        return lr * (shape_scaling ? p.width : std::sqrt(p.width));
    }
};
// The constants of a step.
struct MuonStep {
    real lr, weight_decay;
    real grad_scale;  // factor of the gradients
    uint64_t rounding_key;
};

// A separately orthogonalized matrix: rows of a tensor. This rank holds `rows` x `cols` of it, from (row, col) on.
struct MuonMatrix {
    size_t bucket;         // of the shards
    size_t tensor, first;  // row of the table, and the first element in the buffer
    int rows, cols, row, col;
    int whole_rows, whole_cols;
    double lr;          // factor of AdamW's learning rate
    bool first_holder;  // of the tp ranks that hold the same rows

    size_t elements() const { return (size_t)rows * (size_t)cols; }
    size_t whole_elements() const { return (size_t)whole_rows * (size_t)whole_cols; }
    bool cut() const { return elements() < whole_elements(); }
};

class Muon {
public:
    MuonRecipe recipe;

    // The matrices of this rank's blocks, in the order of the buffer.
    static std::vector<MuonMatrix> matrices(const ModelConfig& c, const ParameterTable& table, const Shards& shards,
                                            bool heads) {
        Params<const TensorSpec> specs;
        bind_rows(c, table, specs, [&](size_t row) { return &table.rows[row]; });
        std::vector<MuonMatrix> all;
        for (size_t b = 0; b < shards.buckets.size(); b++) {
            if (!shards.buckets[b].whole_matrix()) continue;
            const size_t row = (size_t)shards.buckets[b].matrix;
            const TensorSpec& t = table.rows[row];
            const bool qkv = specs.blocks[(size_t)t.block].qkv_w == &t;
            for (const RowBlock& part : t.blocks) {
                const bool by_columns = t.cols < t.whole_cols;
                const int replicas = part.row >= t.rows - t.replicated_rows ? t.replicas : 1;
                const int height = heads && qkv ? c.HS() : part.rows;  // of each matrix
                for (int r = 0; r < part.rows; r += height) {
                    MuonMatrix m = {};
                    m.bucket = b;
                    m.tensor = row;
                    m.first = t.offset + (size_t)(part.row + r) * (size_t)t.cols;
                    m.rows = m.whole_rows = height;
                    m.cols = t.cols;
                    m.col = t.first_col;
                    m.whole_cols = t.whole_cols;
                    m.lr = t.factors.folded(part.fold).lr;
                    if (!by_columns && height == part.rows && !(heads && qkv) && !t.router()) {
                        m.whole_rows = part.rows * table.part.tp.size / replicas;
                        m.row = table.part.tp.rank / replicas * part.rows;
                    }
                    m.first_holder = by_columns || table.part.tp.rank % replicas == 0;
                    all.push_back(m);
                }
            }
        }
        return all;
    }

    // Plans memory for one matrix at a time.
    void plan(Arena& arena, const ModelConfig& c, const ParameterTable& table, const Shards& shards) {
        if (!recipe.on) return;
        matrices_ = matrices(c, table, shards, recipe.heads);
        size_t part = 0, whole = 0, square = 0, rows = 0;
        for (const MuonMatrix& m : matrices_) {
            if (m.cut()) part = std::max(part, m.elements());
            whole = std::max(whole, m.whole_elements());
            square =
                std::max(square, (size_t)std::min(m.whole_rows, m.whole_cols) * (size_t)std::min(m.whole_rows, m.whole_cols));
            rows = std::max(rows, (size_t)m.whole_rows);
        }
        const char* const purpose = "Muon: a matrix at a time";
        if (part) arena.add(purpose, &part_, part);
        for (floatX** x : {&x_, &y_}) arena.add(purpose, x, whole);
        for (floatX** x : {&gram_, &square_}) arena.add(purpose, x, square);
        if (!sets_gram) arena.add(purpose, &sums_, square);
        arena.add(purpose, &squares_, 1);
        if (recipe.neurons)
            for (real** v : {&neurons_, &others_neurons_}) arena.add(purpose, v, rows);
    }

    // Updates the matrices that belong to this rank, and calls updated(bucket) for all buckets with one of the blocks'
    // matrices, in the same order on all ranks. M: TrainingMemory.
    template <class M, class Updated>
    void update(be::Ctx& ctx, const M& m, const MuonStep& step, Updated updated) {
        std::vector<const MuonMatrix*> mine;
        for (const MuonMatrix& matrix : matrices_)
            if (m.shards.buckets[matrix.bucket].n > 0) mine.push_back(&matrix);
        size_t bucket = 0;
        const auto finish_before = [&](size_t end) {
            for (; bucket < end; bucket++)
                if (m.shards.buckets[bucket].whole_matrix()) updated(m.shards.buckets[bucket]);
        };
        const size_t turns = (size_t)m.ranks->mesh.tp.size;
        m.stream->begin(ctx);
        for (size_t i = 0; i < mine.size();) {
            std::vector<const MuonMatrix*> at_once = {mine[i++]};  // one, or one for each tp rank
            while (at_once[0]->cut() && at_once.size() < turns && i < mine.size() && mine[i]->cut())
                at_once.push_back(mine[i++]);
            if (at_once[0]->cut()) update_cut(ctx, m, at_once, step);
            else update_whole(ctx, m, *at_once[0], step);
            finish_before(i < mine.size() ? mine[i]->bucket : m.shards.buckets.size());
        }
        finish_before(m.shards.buckets.size());
        m.stream->end(ctx);
    }

    // Returns the result of the Newton-Schulz steps for the matrix (rows, cols) in x: it is in x or in y, which is as large;
    // the other is scratch. Sets both.
    floatX* orthogonalize(be::Ctx& ctx, floatX* x, floatX* y, int rows, int cols) const {
        const int n = std::min(rows, cols);
        const size_t elements = (size_t)rows * (size_t)cols;
        be::clear(ctx, squares_, sizeof *squares_);
        be::add_squares(ctx, squares_, x, elements);
        be::divide_by_norm(ctx, x, elements, squares_);
        for (int i = 0; i < recipe.iterations; i++, std::swap(x, y)) {
            if (rows > cols) gram_of_columns(ctx, x, rows, cols);
            else be::linear_forward(ctx, gram_, x, x, nullptr, rows, cols, rows);
            be::linear_forward(ctx, square_, gram_, gram_, nullptr, n, n, n);
            be::newton_schulz_polynomial(ctx, square_, gram_, n);
            if (rows > cols) be::linear_forward(ctx, y, x, square_, nullptr, rows, cols, cols);
            else be::linear_backward_input(ctx, y, square_, x, rows, cols, rows);
        }
        return x;
    }

private:
    // True if the product of columns can be set directly in floatX.
    static constexpr bool sets_gram = std::is_same_v<floatX, real> || be::sets_bf16_gradients;

    // gram = x^T x
    void gram_of_columns(be::Ctx& ctx, const floatX* x, int rows, int cols) const {
        const auto set = [&](const Elements& gram) {
            be::linear_backward_weight(ctx, gram, nullptr, x, x, rows, cols, cols, Acc::Set);
        };
        if constexpr (sets_gram) {
            set(gram_);
        } else {
            set(sums_);
            be::accumulate(ctx, (bf16*)gram_, sums_, (size_t)cols * (size_t)cols, Acc::Set, {});
        }
    }

    // The first column of a matrix' exp_avg_sq is the neurons' second moment.
    template <class M>
    real* second_moment(const M& m, const MuonMatrix& matrix) const {
        const Bucket& b = m.shards.buckets[matrix.bucket];
        return (real*)m.exp_avg_sq.data + b.shard + (matrix.first - b.mine);
    }
    void copy_second_moment(be::Ctx& ctx, real* to, int to_stride, const real* from, int from_stride, int rows) const {
        be::copy_rows(ctx, to, (size_t)to_stride * sizeof(real), from, (size_t)from_stride * sizeof(real), sizeof(real),
                      (size_t)rows);
    }

    // x = Nesterov's momentum of this rank's part.
    template <class M>
    void momentum(be::Ctx& ctx, const M& m, const MuonMatrix& matrix, floatX* x, const MuonStep& step) const {
        const Bucket& b = m.shards.buckets[matrix.bucket];
        const auto update = [&](const auto& state, size_t from, size_t count) {
            const size_t begin = matrix.first + from;
            for_each_rounding(m.table.rows[matrix.tensor], begin, begin + count, step.rounding_key,
                              [&](size_t first, size_t n, const Rounding& rounding) {
                                  be::muon_momentum(ctx, x + (first - matrix.first), state.exp_avg.from(first - begin),
                                                    m.gradients_of(b).from(first - b.mine), n,
                                                    {recipe.momentum, step.grad_scale}, rounding);
                              });
        };
        m.stream->run(ctx, m.state(), StateUse::momentum(), b.shard + (matrix.first - b.mine), matrix.elements(), update);
    }
    // Updates this rank's part of the weights with its part x of the result.
    template <class M>
    void apply(be::Ctx& ctx, const M& m, const MuonMatrix& matrix, const floatX* x, const MuonStep& step) const {
        const Bucket& b = m.shards.buckets[matrix.bucket];
        const double rows = matrix.whole_rows, cols = matrix.whole_cols;
        const double shape = recipe.shape_scaling ? std::max(1.0, rows / cols) : std::max(rows, cols);
        const double lr = step.lr * recipe.learning_rate(matrix.lr, m.c.parametrization),
                     rate = lr * recipe.factor * std::sqrt(shape);
        const auto update = [&](const auto& state, size_t first, size_t n) {
            be::apply_update(ctx, m.weights_of(b) + (matrix.first - b.mine) + first, state.master_low_bits, x + first, n,
                             (real)rate, step.lr * step.weight_decay);
        };
        m.stream->run(ctx, m.state(), StateUse::weights(), b.shard + (matrix.first - b.mine), matrix.elements(), update);
    }

    template <class M>
    void update_whole(be::Ctx& ctx, const M& m, const MuonMatrix& matrix, const MuonStep& step) const {
        momentum(ctx, m, matrix, x_, step);
        floatX* const x = orthogonalize(ctx, x_, y_, matrix.rows, matrix.cols);
        if (recipe.neurons) {
            copy_second_moment(ctx, neurons_, 1, second_moment(m, matrix), matrix.cols, matrix.rows);
            be::normalize_neurons(ctx, x, neurons_, matrix.rows, matrix.cols, recipe.beta2);
            copy_second_moment(ctx, second_moment(m, matrix), matrix.cols, neurons_, 1, matrix.rows);
        }
        apply(ctx, m, matrix, x, step);
    }

    // Matrix k of `at_once` is gathered on tp rank k, as the sum of all ranks' parts, each padded with zeros.
    template <class M>
    void update_cut(be::Ctx& ctx, const M& m, const std::vector<const MuonMatrix*>& at_once, const MuonStep& step) const {
        be::Comm& tp = m.ranks->tp;
        floatX *x = x_, *other = y_;  // of the matrix that this rank orthogonalizes, and of the others in turn
        for (size_t k = 0; k < at_once.size(); k++) {
            const MuonMatrix& part = *at_once[k];
            const bool own = (int)k == tp.rank();
            floatX* const whole = own ? x : other;
            momentum(ctx, m, part, part_, step);
            be::clear(ctx, whole, part.whole_elements() * sizeof(floatX));
            if (part.first_holder) copy_part(ctx, whole + place(part), part.whole_cols, part_, part.cols, part);
            sum_on(ctx, tp, whole, part.whole_elements(), (int)k);
            if (!recipe.neurons) continue;
            real* const neurons = own ? neurons_ : others_neurons_;
            be::clear(ctx, neurons, (size_t)part.whole_rows * sizeof(real));
            if (part.first_holder && part.col == 0)
                copy_second_moment(ctx, neurons + part.row, 1, second_moment(m, part), part.cols, part.rows);
            sum_on(ctx, tp, neurons, (size_t)part.whole_rows, (int)k);
        }
        if (tp.rank() < (int)at_once.size()) {
            const MuonMatrix& own = *at_once[(size_t)tp.rank()];
            x = orthogonalize(ctx, x_, y_, own.whole_rows, own.whole_cols);
            other = x == x_ ? y_ : x_;
            if (recipe.neurons) be::normalize_neurons(ctx, x, neurons_, own.whole_rows, own.whole_cols, recipe.beta2);
        }
        for (size_t k = 0; k < at_once.size(); k++) {
            const MuonMatrix& part = *at_once[k];
            const bool own = (int)k == tp.rank();
            floatX* const whole = own ? x : other;
            send_from(ctx, tp, whole, part.whole_elements(), (int)k);
            copy_part(ctx, part_, part.cols, whole + place(part), part.whole_cols, part);
            apply(ctx, m, part, part_, step);
            if (!recipe.neurons) continue;
            real* const neurons = own ? neurons_ : others_neurons_;
            send_from(ctx, tp, neurons, (size_t)part.whole_rows, (int)k);
            if (part.col == 0) copy_second_moment(ctx, second_moment(m, part), part.cols, neurons + part.row, 1, part.rows);
        }
    }

    // The offset of this rank's part in the whole matrix.
    static size_t place(const MuonMatrix& part) { return (size_t)part.row * (size_t)part.whole_cols + (size_t)part.col; }
    static void copy_part(be::Ctx& ctx, floatX* to, int to_cols, const floatX* from, int from_cols, const MuonMatrix& part) {
        be::copy_rows(ctx, to, (size_t)to_cols * sizeof(floatX), from, (size_t)from_cols * sizeof(floatX),
                      (size_t)part.cols * sizeof(floatX), (size_t)part.rows);
    }
    template <class E>
    static void sum_on(be::Ctx& ctx, be::Comm& comm, E* x, size_t n, int root) {
        be::Pending pending = be::start_reduce(ctx, comm, x, n, root);
        be::finish(ctx, pending);
    }
    template <class E>
    static void send_from(be::Ctx& ctx, be::Comm& comm, E* x, size_t n, int root) {
        be::Pending pending = be::start_broadcast(ctx, comm, x, n, root);
        be::finish(ctx, pending);
    }

    std::vector<MuonMatrix> matrices_;
    floatX* part_ = nullptr;              // this rank's part of a sharded matrix
    floatX *x_ = nullptr, *y_ = nullptr;  // whole matrices
    floatX *gram_ = nullptr, *square_ = nullptr;
    real* sums_ = nullptr;  // null where products can set gram_
    double* squares_ = nullptr;
    real *neurons_ = nullptr, *others_neurons_ = nullptr;  // second moments of the neurons of a whole matrix
};
