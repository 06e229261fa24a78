// The products of mixtures of experts on a matrix unit: gemm.h's for the rows of each expert, in one parallel loop. A task
// is a block of one expert's result, at most 512 rows high, smaller if there would be few tasks: experts have few rows and some
// have many, and threads that finish early take the others' tasks (team.h). Rows are gathered while they are copied into the
// thread's cache. Memory is the bound of experts with few rows: each weight is read once, each gradient read and written, for
// 2 FLOPs per row. So the next task's weights or rows of the gradient are prefetched during the products of this one.
//   rows_times_each     out rows (+)= scale rows of a times the expert's b: forward, backward_input
//   columns_times_each  c_e (+)= scale a_e^T b_e, one matrix per expert: backward_weight. A task packs both operands of its
//                       block of c, which are short: as many rows as the expert has
// The scale is 1 except in FP8.
// Every sum runs over k in order, as in gemm.h: results depend on no other expert and not on threads.
#pragma once
#include <algorithm>
#include <vector>

#include "gemm.h"

#if CPU_FAST_PATHS

namespace cpu {
namespace detail {
namespace gemm {

// x (E, rows, columns), or a copy in ctx.copies[1], each matrix zero-padded to all_rows and all_columns.
inline const floatX* padded_stack(Ctx& ctx, const floatX* x, int E, int rows, int columns, int all_rows, int all_columns) {
    if (rows == all_rows && columns == all_columns) return x;
    ctx.copies[1].resize((size_t)E * all_rows * all_columns);
    floatX* const copy = ctx.copies[1].data();
    parallel_for(E * all_rows, [=](int i) {
        const int e = i / all_rows, r = i % all_rows, there = r < rows ? columns : 0;
        floatX* const row = copy + (size_t)i * all_columns;
        std::copy_n(x + ((size_t)e * rows + (size_t)r) * (size_t)columns, there, row);
        std::fill(row + there, row + all_columns, floatX(0));
    });
    return copy;
}

// Calls f(expert, first, end) for pieces of at most `high` rows of the experts that have more than `few` rows.
template <class F>
void for_pieces(const ExpertGroups& groups, int few, int high, F f) {
    for (int e = 0; e < groups.E; e++) {
        const int end = groups.offsets[e + 1];
        if (end - groups.offsets[e] > few)
            for (int row = groups.offsets[e]; row < end; row += high) f(e, row, std::min(row + high, end));
    }
}

// out (slots, C) (+)= scale times rows of a (.., K) times the expert's b (K, C), each `next` elements after the previous
// expert's; only for experts with more than `few` rows.
inline void rows_times_each(Ctx& ctx, floatX* out, const ExpertRows& a, const ExpertGroups& groups, int few, int K, int C,
                            const RightOperand& b, size_t next, const ExpertBias& bias, Acc acc, float scale) {
    const bool add = acc == Acc::Add, streamed = !add && streams_rows(ctx, out, C);
    const auto epilogue = [=](int n, int first, auto columns, const float* sums) {
        floatX* const row = out + (size_t)n * C + first;
        const auto store_row = [=](auto value) {
            if (add) put(false, row, columns, [=](int c, auto there) { return load(row + c, there) + value(c, there); });
            else put(streamed, row, columns, value);
        };
        if (!bias.x) return store_row([=](int c, auto) { return scale * load(sums + c); });
        const auto e = (size_t)(std::upper_bound(groups.offsets, groups.offsets + groups.E, n) - groups.offsets - 1);
        const floatX* const of_expert = bias.x + e * (size_t)C + first;
        const float factor = bias.factor(n);
        if (scale == 1)
            return store_row([=](int c, auto there) { return load(sums + c) + factor * load(of_expert + c, there); });
        store_row([=](int c, auto there) { return scale * load(sums + c) + factor * load(of_expert + c, there); });
    };
    on_unit(ctx, [&](const auto& unit) {
        const int deep = round_up(K, k_multiple_of(unit)), wide = round_up(C, 16);
        const auto blocking = blocking_of_rows(unit, deep);
        const int panel = round_up(ceil_div(wide, ceil_div(wide, blocking.columns)), strip_columns);
        std::vector<Block> blocks;
        for (int high = 512; high >= 64 && (int)blocks.size() < 4 * ctx.threads; high /= 2) {
            blocks.clear();
            for_pieces(groups, few, high, [&](int e, int row, int end) {
                for (int c = 0; c < wide; c += panel)
                    blocks.push_back({row, round_up(end - row, unit.row_multiple()), end - row, c, std::min(panel, wide - c),
                                      (size_t)e * next});
            });
        }
        if (blocks.empty()) return;
        multiply_blocks(ctx, unit, streamed ? nullptr : out, {}, {a, K, false}, deep, C, b, blocks, blocking,
                        finished_by(epilogue));
    });
}

inline void expert_linear_forward(Ctx& ctx, floatX* out, const ExpertRows& inp, const floatX* weight, const ExpertBias& bias,
                                  const ExpertGroups& groups, int few, int IC, int OC, Acc acc, float scale) {
    const int K = on_unit(ctx, [=](const auto&unit) { return round_up(IC, k_multiple_of(unit)); }), C = round_up(OC, 16);
    const floatX* const right = padded_stack(ctx, weight, groups.E, OC, IC, C, K);
    rows_times_each(ctx, out, inp, groups, few, IC, OC, {RightOperand::transposed, right, (size_t)K}, (size_t)C * K, bias, acc,
                    scale);
}

inline void expert_linear_backward_input(Ctx& ctx, floatX* dinp, const ExpertRows& dout, const floatX* weight,
                                         const ExpertGroups& groups, int IC, int OC, Acc acc, float scale) {
    const int K = on_unit(ctx, [=](const auto&unit) { return round_up(OC, k_multiple_of(unit)); }), C = round_up(IC, 16);
    const floatX* const right = padded_stack(ctx, weight, groups.E, OC, IC, K, C);
    rows_times_each(ctx, dinp, dout, groups, 0, OC, IC, {RightOperand::as_rows, right, (size_t)C}, (size_t)C * K, {}, acc,
                    scale);
}

// A task of a weight's gradient: some rows and columns of an expert's matrix; `to` is their first element.
struct WeightBlock {
    int e, row, rows, column, columns;
    float* to;
};

// The blocks of the gradient, at most high x wide.
inline std::vector<WeightBlock> weight_blocks(const StackedRows& dweight, int IC, int OC, int high, int wide) {
    std::vector<WeightBlock> blocks;
    for (int i = 0, rows; i < dweight.rows; i += rows) {
        const int row = dweight.row + i;
        rows = std::min({high, OC - row % OC, dweight.rows - i});
        for (int c = 0; c < IC; c += wide)
            blocks.push_back({row / OC, row % OC, rows, c, std::min(wide, IC - c), dweight.x + (size_t)i * IC + c});
    }
    return blocks;
}

template <class E>
void columns_times_each(Ctx& ctx, const MatrixUnit<E>& unit, const StackedRows& dweight, const ExpertRows& dout,
                        const ExpertRows& inp, const ExpertGroups& groups, int IC, int OC, Acc acc, float scale) {
    int most = 0;
    for (int e = 0; e < groups.E; e++) most = std::max(most, groups.offsets[e + 1] - groups.offsets[e]);
    most = round_up(most, k_multiple<E>);
    // Both operands of a block fit in the L2 cache.
    constexpr size_t cache = 384 << 10;
    const int deepest = std::min(most, slab<E>);
    int high = 1024, wide = 1024;
    while (high > 128 && parts<E> * sizeof(E) * deepest * high > cache) high /= 2;
    while (wide > 128 && parts<E> * sizeof(E) * deepest * wide > cache) wide /= 2;
    std::vector<WeightBlock> blocks;
    for (;;) {
        blocks = weight_blocks(dweight, IC, OC, high, wide);
        if ((int)blocks.size() >= 4 * ctx.threads || (high == 128 && wide == 128)) break;
        (wide > high ? wide : high) /= 2;
    }
    high = round_up(std::min(high, OC), 16);
    wide = round_up(std::min(wide, IC), 16);
    const size_t left_size = (size_t)spread<E>(deepest) * high, right_size = (size_t)deepest * wide;
    const size_t gathered_size = (size_t)deepest * std::max(high, wide);
    const size_t per_thread =
        round_up(parts<E> * (left_size + right_size) * sizeof(E) + gathered_size * sizeof(floatX), (size_t)64);
    char* const memory = (char*)ctx.scratch(per_thread * (size_t)ctx.threads);
    Team::run(ctx.threads, [&](Team::Member& me) {
        E *const left = (E*)(memory + per_thread * (size_t)me.number), *const right = left + parts<E> * left_size;
        floatX* const gathered = (floatX*)(right + parts<E> * right_size);
        constexpr int strip = strip_columns;
        alignas(64) float sums_in_turn[2][strip_rows * strip];
        float* to = nullptr;
        bool add = false, streamed = false;
        const auto epilogue = [&to, &add, &streamed, IC, scale](int m, int first, auto columns, const float* sums) {
            float* row = to + (size_t)m * IC + first;
            if (add) put(false, row, columns, [=](int i, auto there) { return load(row + i, there) + scale * load(sums + i); });
            else put(streamed, row, columns, [=](int i, auto) { return scale * load(sums + i); });
        };
        PendingEpilogue pending(finished_by(epilogue));
        int turn = 0;
        unit.begin();
        me.share((int64_t)blocks.size(), [&](int64_t task) {
            const WeightBlock& block = blocks[(size_t)task];
            const int first = groups.offsets[block.e], N = groups.offsets[block.e + 1] - first;
            const int M = round_up(block.rows, 16), C = round_up(block.columns, 16);
            const Blocking<E> blocking(unit, deepest, slab<E>);
            to = block.to;
            streamed = fills_lines(to) && IC % k_step<float> == 0;  // nothing reads it soon
            if (N == 0 && acc == Acc::Set)
                for (int m = 0; m < block.rows; m++) std::fill_n(to + (size_t)m * IC, block.columns, 0.0f);
            for (int k0 = 0; k0 < N; k0 += slab<E>) {
                const int there = std::min(slab<E>, N - k0), K = round_up(there, k_multiple<E>), stride = spread<E>(K);
                // The operand's rows in place, or a copy.
                const auto rows_of = [&](const ExpertRows& x, int columns, int column, int some) {
                    struct Rows {
                        const floatX* x;
                        size_t stride;
                    };
                    if (!x.choices && column + some <= columns)
                        return Rows{x.x + (size_t)(first + k0) * (size_t)columns + column, (size_t)columns};
                    gather_rows(gathered, (size_t)some, x, columns, first + k0, there, there, column, some);
                    return Rows{gathered, (size_t)some};
                };
                add = k0 > 0 || acc == Acc::Add;
                const auto b = rows_of(inp, IC, block.column, C);
                pack_rows_in_parts(unit, right, right_size, 16 * (size_t)K, b.x, b.stride, C, K, there);
                const auto a = rows_of(dout, OC, block.row, M);
                pack_left_in_parts(unit, left, left_size, (size_t)stride, a.x, a.stride, M, K, there);
                // Rows of the gradient in order, which memory reads and writes fastest; the next ones are prefetched.
                const int used = unit.tiles ? K : round_up(there, of_word<E>);  // of K
                for (int m = 0; m < M; m += strip_rows) {
                    const int rows = std::min(strip_rows, M - m), rows_there = std::min(rows, block.rows - m);
                    if (add) {
                        const bool same = m + strip_rows < M;
                        const WeightBlock& later = blocks[std::min((size_t)task + !same, blocks.size() - 1)];
                        const int first_row = same ? m + strip_rows : 0;
                        pending.later = Prefetch(later.to + (size_t)first_row * IC, (size_t)IC,
                                                 std::min((int)strip_rows, later.rows - first_row), later.columns);
                        pending.lines = ceil_div(pending.later.left(), unit.steps(rows, C, used));
                    }
                    for (int n = 0; n < C; n += strip, turn ^= 1) {
                        const int width = std::min((int)strip, C - n), columns = std::min(width, block.columns - n);
                        float* const sums = sums_in_turn[turn];
                        multiply_strip(unit, sums, {{left + (size_t)m * stride, left_size}, stride},
                                       {right + right_index<E>(0, n, K), right_size}, K, rows, width, used, blocking, false,
                                       Prefetch(), pending);
                        pending.begin_strip(rows_there, m, n, columns, sums);
                    }
                }
                pending.finish();
            }
            fence();
        });
        unit.end();
    });
}

inline void expert_linear_backward_weight(Ctx& ctx, const StackedRows& dweight, const ExpertRows& dout, const ExpertRows& inp,
                                          const ExpertGroups& groups, int IC, int OC, Acc acc, float scale) {
    on_unit(ctx, [&](const auto& unit) { columns_times_each(ctx, unit, dweight, dout, inp, groups, IC, OC, acc, scale); });
}

}  // namespace gemm
}  // namespace detail
}  // namespace cpu
#endif  // CPU_FAST_PATHS
