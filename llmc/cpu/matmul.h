// Linear layers: three matrix products, which dominate the cost of a transformer.
//   forward          out  (N, OC)  = inp (N, IC) weight (OC, IC)^T (+ bias)
//   backward_input   dinp (N, IC)  = dout (N, OC) weight (OC, IC)
//   backward_weight  dweight (OC, IC) (+)= dout^T inp,  dbias (OC) (+)= column sums of dout
// From out_no = sum_i inp_ni w_oi + b_o follow  d/dinp_ni = sum_o dout_no w_oi,  d/dw_oi = sum_n dout_no inp_ni,
// d/db_o = sum_n dout_no.
// Sums are in fp32 and rounded to floatX once. The plain loops are the specification, and the only path in the fp64 build. Fast
// paths:
//   a few rows (generation)   bound by reading the weight once: few_rows_forward
//   gemm.h                    everything else, on the CPU's matrix unit
// Cost: 2 N IC OC FLOPs each; bound by the matrix unit for N above a few hundred.
// Determinism: the same bits on every run and for any number of threads.
#pragma once
#include <algorithm>
#include <array>

#include "../ops.h"
#include "mlp.h"
#include "parallel.h"
#include "quantized.h"
#include "reduce.h"
#include "rope.h"
#include "gemm.h"

namespace cpu {

// ---- plain loops -----------------------------------------------------------------------------------------------------------
namespace plain {

inline void linear_forward(floatX* out, const floatX* inp, const floatX* weight, const floatX* bias, int N, int IC, int OC) {
    parallel_for(N, [=](int n) {
        for (int o = 0; o < OC; o++) {
            real sum = bias ? (real)bias[o] : real(0);
            for (int i = 0; i < IC; i++) sum += (real)inp[(size_t)n * IC + i] * (real)weight[(size_t)o * IC + i];
            out[(size_t)n * OC + o] = (floatX)sum;
        }
    });
}

inline void linear_backward_input(floatX* dinp, const floatX* dout, const floatX* weight, int N, int IC, int OC) {
    parallel_for(N, [=](int n) {
        for (int i = 0; i < IC; i++) {
            real sum = 0;
            for (int o = 0; o < OC; o++) sum += (real)dout[(size_t)n * OC + o] * (real)weight[(size_t)o * IC + i];
            dinp[(size_t)n * IC + i] = (floatX)sum;
        }
    });
}

inline void linear_backward_weight(real* dweight, const floatX* dout, size_t stride, const floatX* inp, int N, int IC, int OC,
                                   Acc acc) {
    parallel_for(OC, [=](int o) {
        for (int i = 0; i < IC; i++) {
            real sum = 0;
            for (int n = 0; n < N; n++) sum += (real)dout[(size_t)n * stride + o] * (real)inp[(size_t)n * IC + i];
            real& d = dweight[(size_t)o * IC + i];
            d = acc == Acc::Add ? d + sum : sum;
        }
    });
}

}  // namespace plain

// ---- fast paths ------------------------------------------------------------------------------------------------------------
namespace detail {

constexpr int few_rows = 8;

#if CPU_FAST_PATHS
// x . w for each of the N rows of x, IC elements apart; wide: x in the order of widened(). Four vectors of sums hide the
// latency of additions; the order is fixed.
template <int N>
void dot_products(float* out, const floatX* x, const float* wide, const floatX* w, int IC) {
    constexpr int chains = 4, step = lanes * of_word<floatX>,
                  ahead = 32 * k_step<floatX>;  // 2 KiB: the rows of w are contiguous
    floats sum[N][chains] = {};
    int i = 0;
    for (; i + chains * step <= IC; i += chains * step)
        for (int k = 0; k < chains; k++) {
            __builtin_prefetch(w + i + k * step + ahead);
            for (int n = 0; n < N; n++) sum[n][k] += products(wide + (size_t)n * IC + i + k * step, w + i + k * step);
        }
    for (; i < IC; i += lanes)
        for (int n = 0; n < N; n++) sum[n][0] += load(x + (size_t)n * IC + i, IC - i) * load(w + i, IC - i);
    for (int n = 0; n < N; n++) out[n] = total((sum[n][0] + sum[n][1]) + (sum[n][2] + sum[n][3]));
}

// x (N, IC) in the form that products() expects with bf16, up to whole registers: widened once, not with every row of a weight.
inline const float* widened(float*, const float* x, int, int) { return x; }
inline const float* widened(float* wide, const bf16* x, int N, int IC) {
    for (size_t n = 0; n < (size_t)N; n++)
        for (int i = 0; i + 2 * lanes <= IC; i += 2 * lanes) {
            words both;
            memcpy(&both, x + n * IC + i, sizeof both);
            store(wide + n * IC + i, (floats)(both << 16));
            store(wide + n * IC + i + lanes, (floats)(both & 0xffff0000u));
        }
    return wide;
}

inline const float* widened(Ctx&, const float* x, int, int) { return x; }
inline const float* widened(Ctx& ctx, const bf16* x, int N, int IC) {
    return widened((float*)ctx.scratch((size_t)N * IC * sizeof(float)), x, N, IC);
}

// A few rows against the whole weight: each weight row is read once, and multiplied with all input rows while it is in cache,
// four at a time. Bound by memory bandwidth. A row's bits do not depend on the others. row(member, o): row o of the weight.
template <class Row>
void few_rows_forward(floatX* out, int stride, const floatX* inp, const float* wide, Row row, const floatX* bias, int N, int IC,
                      int OC) {
    constexpr std::array product{dot_products<1>, dot_products<2>, dot_products<3>, dot_products<4>};
    parallel_for(OC, [=](Team::Member& me, int o) {
        const floatX* const weight = row(me, o);
        float sums[few_rows];
        for (size_t n = 0; n < (size_t)N; n += product.size())
            product[std::min(product.size(), N - n) - 1](sums + n, inp + n * IC, wide + n * IC, weight, IC);
        for (int n = 0; n < N; n++) out[(size_t)n * stride + o] = (floatX)(sums[n] + (bias ? (float)bias[o] : 0.0f));
    });
}
#endif

inline real* in_fp32(const Elements& dweight) {
    CHECK(!dweight.is_bf16(), "a product that sets a gradient in bf16");
    return (real*)dweight.data;
}

}  // namespace detail

// ---- the ops ---------------------------------------------------------------------------------------------------------------
#if CPU_FAST_PATHS
namespace detail {
// Up to this number, rows are few. A tile unit multiplies 16 rows in little more than the time of one.
inline int most_few_rows(const Ctx& ctx) {
    const bool tiles = gemm::on_unit(ctx, [](const auto& unit) { return unit.tiles; });
    return tiles ? (ctx.steady_rows ? 0 : few_rows / 2) : (ctx.steady_rows <= few_rows ? few_rows : 0);
}
inline bool takes_few_rows(const Ctx& ctx, int N) { return N <= most_few_rows(ctx); }
}  // namespace detail
#endif

inline void linear_forward(Ctx& ctx, floatX* out, const floatX* inp, const floatX* weight, const floatX* bias, int N, int IC,
                           int OC) {
    if (ctx.plain) return plain::linear_forward(out, inp, weight, bias, N, IC, OC);
#if CPU_FAST_PATHS
    if (detail::takes_few_rows(ctx, N)) {
        const auto row = [=](const Team::Member&, int o) { return weight + (size_t)o * IC; };
        detail::few_rows_forward(out, OC, inp, detail::widened(ctx, inp, N, IC), row, bias, N, IC, OC);
    } else detail::gemm::linear_forward(ctx, out, {inp, weight, bias, N, IC, OC});
#endif
}

inline bool decodes_rows([[maybe_unused]] const Ctx& ctx, [[maybe_unused]] int N) {
#if CPU_FAST_PATHS
    return !ctx.plain && detail::takes_few_rows(ctx, N);
#else
    return false;
#endif
}
inline void quantized_linear_forward([[maybe_unused]] Ctx& ctx, [[maybe_unused]] floatX* out, [[maybe_unused]] int stride,
                                     [[maybe_unused]] const floatX* inp, [[maybe_unused]] const QuantizedWeights& weight,
                                     [[maybe_unused]] const floatX* bias, int N, [[maybe_unused]] int IC,
                                     [[maybe_unused]] int OC) {
    CHECK(decodes_rows(ctx, N), "%d rows", N);
#if CPU_FAST_PATHS
    const size_t wide = round_up((size_t)N * IC * sizeof(float), (size_t)64), of_row = (size_t)IC, n = (size_t)OC * IC;
    char* const memory = (char*)ctx.scratch(wide + (size_t)op_threads() * of_row * sizeof(floatX));
    floatX* const rows = (floatX*)(memory + wide);  // one for each thread
    const auto row = [=](const Team::Member& me, int o) {
        floatX* const decoded = rows + (size_t)me.number * of_row;
        detail::dequantize_part(decoded, weight, n, (size_t)o * of_row, of_row);
        return (const floatX*)decoded;
    };
    detail::few_rows_forward(out, stride, inp, detail::widened((float*)memory, inp, N, IC), row, bias, N, IC, OC);
#endif
}

inline void linear_backward_input(Ctx& ctx, floatX* dinp, const floatX* dout, const floatX* weight, int N, int IC, int OC) {
    if (ctx.plain) return plain::linear_backward_input(dinp, dout, weight, N, IC, OC);
#if CPU_FAST_PATHS
    detail::gemm::linear_backward_input(ctx, dinp, dout, weight, N, IC, OC);
#endif
}

inline void linear_gelu_forward(Ctx& ctx, floatX* out, floatX* pre, const floatX* inp, const floatX* weight, const floatX* bias,
                                int N, int IC, int OC) {
#if CPU_FAST_PATHS
    if (!ctx.plain && !detail::takes_few_rows(ctx, N))
        return detail::gemm::gelu_forward(ctx, out, pre, {inp, weight, bias, N, IC, OC});
#endif
    linear_forward(ctx, pre, inp, weight, bias, N, IC, OC);
    activation_forward(ctx, out, pre, N, OC, Activation::gelu);
}

inline void linear_swiglu_forward(Ctx& ctx, floatX* out, floatX* gate_up, const floatX* inp, const floatX* weight,
                                  const floatX* bias, int N, int IC, int F) {
#if CPU_FAST_PATHS
    if (!ctx.plain && !detail::takes_few_rows(ctx, N) && F % detail::gemm::RightOperand::each == 0)
        return detail::gemm::swiglu_forward(ctx, out, gate_up, {inp, weight, bias, N, IC, 2 * F});
#endif
    linear_forward(ctx, gate_up, inp, weight, bias, N, IC, 2 * F);
    activation_forward(ctx, out, gate_up, N, F, Activation::swiglu);
}

inline void linear_residual_forward(Ctx& ctx, floatX* out, const floatX* residual, const floatX* inp, const floatX* weight,
                                    const floatX* bias, int N, int IC, int OC) {
#if CPU_FAST_PATHS
    if (!ctx.plain && !detail::takes_few_rows(ctx, N))
        return detail::gemm::residual_forward(ctx, out, residual, {inp, weight, bias, N, IC, OC});
#endif
    linear_forward(ctx, out, inp, weight, bias, N, IC, OC);
    residual_forward(ctx, out, residual, out, (size_t)N * OC);
}

inline void linear_rope_forward(Ctx& ctx, floatX* qkv, const floatX* inp, const floatX* weight, const floatX* bias, int IC,
                                const Rope& rope, const AttentionShape& shape) {
    const int N = shape.N(), OC = (int)shape.row();
#if CPU_FAST_PATHS
    const int HS = shape.HS;
    if (!ctx.plain && !detail::takes_few_rows(ctx, N) && 128 % HS == 0) {
        const auto forward = HS == 128 ? detail::gemm::rope_forward<128> : detail::gemm::rope_forward<64>;
        return forward(ctx, qkv, {inp, weight, bias, N, IC, OC}, rope, HS, (shape.NH + shape.NKV) * HS);
    }
#endif
    linear_forward(ctx, qkv, inp, weight, bias, N, IC, OC);
    rope_forward(ctx, qkv, rope, shape);
}

inline void linear_gelu_backward_input(Ctx& ctx, floatX* dpre, const floatX* dout, const floatX* weight, const floatX* pre,
                                       int N, int IC, int OC) {
#if CPU_FAST_PATHS
    if (!ctx.plain) return detail::gemm::gelu_backward_input(ctx, dpre, dout, weight, pre, N, IC, OC);
#endif
    linear_backward_input(ctx, dpre, dout, weight, N, IC, OC);
    activation_backward(ctx, dpre, dpre, pre, N, IC, Activation::gelu);
}

inline void linear_swiglu_backward_input(Ctx& ctx, floatX* dgate_up, floatX* dact, const floatX* dout, const floatX* weight,
                                         const floatX* gate_up, int N, int F, int OC) {
#if CPU_FAST_PATHS
    if (!ctx.plain) return detail::gemm::swiglu_backward_input(ctx, dgate_up, dout, weight, gate_up, N, F, OC);
#endif
    linear_backward_input(ctx, dact, dout, weight, N, F, OC);
    activation_backward(ctx, dgate_up, dact, gate_up, N, F, Activation::swiglu);
}

inline void linear_backward_weight_rows(Ctx& ctx, const Elements& dweight, real* dbias, const Columns& columns,
                                        const floatX* inp, int N, int IC, int rows, Acc acc) {
    const floatX* const dout = columns.x;
    const size_t stride = (size_t)columns.stride;
    if (dbias) detail::column_sums(dbias, dout, stride, N, rows, acc);
    real* const sums = detail::in_fp32(dweight);
    if (ctx.plain) return plain::linear_backward_weight(sums, dout, stride, inp, N, IC, rows, acc);
#if CPU_FAST_PATHS
    detail::gemm::backward_weight(ctx, sums, dout, stride, inp, N, IC, rows, acc);
#endif
}

inline void linear_backward_weight(Ctx& ctx, const Elements& dweight, real* dbias, const floatX* dout, const floatX* inp, int N,
                                   int IC, int OC, Acc acc) {
    linear_backward_weight_rows(ctx, dweight, dbias, {dout, OC}, inp, N, IC, OC, acc);
}

}  // namespace cpu
