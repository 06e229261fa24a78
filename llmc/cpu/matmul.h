// Linear layers: three matrix products, everything else of a transformer is small beside them.
//   forward          out  (N, OC)  = inp (N, IC) weight (OC, IC)^T (+ bias)
//   backward_input   dinp (N, IC)  = dout (N, OC) weight (OC, IC)
//   backward_weight  dweight (OC, IC) (+)= dout^T inp,  dbias (OC) (+)= column sums of dout
// From out_no = sum_i inp_ni w_oi + b_o follow  d/dinp_ni = sum_o dout_no w_oi,  d/dw_oi = sum_n dout_no inp_ni,
// d/db_o = sum_n dout_no.
// Sums are kept in fp32 and rounded to floatX once. The plain loops are the specification. Fast paths, whichever comes first:
//   a few rows (generation)   reading the weight once is all there is to do: few_rows_forward
//   gemm_bf16.h               bf16
//   oneDNN                    fp32; bf16 of shapes that fit no matrix unit, widened
// Cost: 2 N IC OC FLOPs each; bound by the matrix unit for N above a few hundred.
// Determinism: the plain loops, few rows and bias gradients give the same bits for any number of threads; oneDNN gives the same
// bits for the same shapes, CPU and number of threads.
#pragma once
#include <algorithm>
#include <type_traits>

#include "../ops.h"
#include "gemm_bf16.h"
#include "mlp.h"
#include "parallel.h"

namespace cpu {

// ---- plain loops -----------------------------------------------------------------------------------------------------------
namespace plain {

inline void linear_forward(floatX* out, const floatX* inp, const floatX* weight, const floatX* bias, int N, int IC, int OC) {
#pragma omp parallel for collapse(2) schedule(static)
    for (int n = 0; n < N; n++)
        for (int o = 0; o < OC; o++) {
            real sum = bias ? (real)bias[o] : real(0);
            for (int i = 0; i < IC; i++) sum += (real)inp[(size_t)n * IC + i] * (real)weight[(size_t)o * IC + i];
            out[(size_t)n * OC + o] = (floatX)sum;
        }
}

inline void linear_backward_input(floatX* dinp, const floatX* dout, const floatX* weight, int N, int IC, int OC) {
#pragma omp parallel for collapse(2) schedule(static)
    for (int n = 0; n < N; n++)
        for (int i = 0; i < IC; i++) {
            real sum = 0;
            for (int o = 0; o < OC; o++) sum += (real)dout[(size_t)n * OC + o] * (real)weight[(size_t)o * IC + i];
            dinp[(size_t)n * IC + i] = (floatX)sum;
        }
}

inline void linear_backward_weight(real* dweight, const floatX* dout, const floatX* inp, int N, int IC, int OC, Acc acc) {
#pragma omp parallel for collapse(2) schedule(static)
    for (int o = 0; o < OC; o++)
        for (int i = 0; i < IC; i++) {
            real sum = 0;
            for (int n = 0; n < N; n++) sum += (real)dout[(size_t)n * OC + o] * (real)inp[(size_t)n * IC + i];
            real& d = dweight[(size_t)o * IC + i];
            d = acc == Acc::Add ? d + sum : sum;
        }
}

}  // namespace plain

// ---- oneDNN ----------------------------------------------------------------------------------------------------------------
namespace detail {

#if HAVE_ONEDNN
template <class E>
constexpr dnnl::memory::data_type dnnl_type() {
    static_assert(std::is_same<E, bf16>::value || std::is_same<E, float>::value, "oneDNN multiplies bf16 and fp32 here");
    return std::is_same<E, bf16>::value ? dnnl::memory::data_type::bf16 : dnnl::memory::data_type::f32;
}

// c (M, N) = a b + bias, or c += a b. Row-major as they lie; a_t: a is stored (K, M), b_t: b is stored (N, K).
// Compiling a product takes milliseconds, so each shape is compiled once and kept in ctx.gemms.
template <class In, class Out>
void gemm(Ctx& ctx, Out* c, const In* a, bool a_t, const In* b, bool b_t, const In* bias, int64_t M, int64_t N, int64_t K,
          Acc acc) {
    using dnnl::memory;
    const auto in = dnnl_type<In>(), out = dnnl_type<Out>();
    const memory::desc a_desc({M, K}, in, a_t ? memory::dims{1, M} : memory::dims{K, 1});
    const memory::desc b_desc({K, N}, in, b_t ? memory::dims{1, K} : memory::dims{N, 1});
    const memory::desc c_desc({M, N}, out, memory::dims{N, 1});
    const memory::desc bias_desc = bias ? memory::desc({1, N}, in, memory::dims{N, 1}) : memory::desc();
    const Ctx::GemmKey key = {M, N, K, a_t, b_t, bias != nullptr, acc == Acc::Add, (int64_t)in * 16 + (int64_t)out};
    auto found = ctx.gemms.find(key);
    if (found == ctx.gemms.end()) {
        dnnl::primitive_attr attributes;
        if (acc == Acc::Add) {
            dnnl::post_ops sum;
            sum.append_sum(1.0f);
            attributes.set_post_ops(sum);
        }
        const dnnl::matmul::desc desc =
            bias ? dnnl::matmul::desc(a_desc, b_desc, bias_desc, c_desc) : dnnl::matmul::desc(a_desc, b_desc, c_desc);
        found = ctx.gemms.emplace(key, dnnl::matmul({desc, attributes, ctx.engine})).first;
    }
    const auto memory_of = [&](const memory::desc& desc, const void* p) {
        return memory(desc, ctx.engine, const_cast<void*>(p));
    };
    std::unordered_map<int, memory> arguments = {
        {DNNL_ARG_SRC, memory_of(a_desc, a)}, {DNNL_ARG_WEIGHTS, memory_of(b_desc, b)}, {DNNL_ARG_DST, memory_of(c_desc, c)}};
    if (bias) arguments.insert({DNNL_ARG_BIAS, memory_of(bias_desc, bias)});
    found->second.execute(ctx.stream, arguments);
    ctx.stream.wait();
}

template <class From, class To>
void convert(To* to, const From* from, size_t n) {
    parallel_ranges(n, [=](size_t first, size_t last) {
        INDEPENDENT_ITERATIONS
        for (size_t i = first; i < last; i++) to[i] = (To)(float)from[i];
    });
}

// The same product of bf16 operands: copies in scratch, widened to fp32; the result is rounded once.
template <class Out>
void gemm_widened(Ctx& ctx, Out* c, const bf16* a, bool a_t, const bf16* b, bool b_t, const bf16* bias, int64_t M, int64_t N,
                  int64_t K, Acc acc) {
    const bool narrow = std::is_same<Out, bf16>::value;
    float* wide = (float*)ctx.scratch(sizeof(float) * (size_t)(M * K + K * N + (bias ? N : 0) + (narrow ? M * N : 0)));
    float *a32 = wide, *b32 = a32 + M * K, *c32 = b32 + K * N, *bias32 = narrow ? c32 + M * N : c32;
    convert(a32, a, (size_t)(M * K));
    convert(b32, b, (size_t)(K * N));
    if (bias) convert(bias32, bias, (size_t)N);
    if constexpr (std::is_same<Out, bf16>::value) {
        CHECK(acc == Acc::Set, "a bf16 result cannot be accumulated without rounding twice");
        gemm(ctx, c32, a32, a_t, b32, b_t, bias ? bias32 : nullptr, M, N, K, Acc::Set);
        convert(c, c32, (size_t)(M * N));
    } else {
        gemm(ctx, c, a32, a_t, b32, b_t, bias ? bias32 : nullptr, M, N, K, acc);
    }
}

template <class Out>
void product(Ctx& ctx, Out* c, const floatX* a, bool a_t, const floatX* b, bool b_t, const floatX* bias, int64_t M, int64_t N,
             int64_t K, Acc acc) {
    if constexpr (std::is_same<floatX, bf16>::value) gemm_widened(ctx, c, a, a_t, b, b_t, bias, M, N, K, acc);
    if constexpr (std::is_same<floatX, float>::value) gemm(ctx, c, a, a_t, b, b_t, bias, M, N, K, acc);
}

#else
// Declared, never called.
template <class Out>
void product(Ctx& ctx, Out* c, const floatX* a, bool a_t, const floatX* b, bool b_t, const floatX* bias, int64_t M, int64_t N,
             int64_t K, Acc acc);
#endif

// A few rows against the whole weight: each weight row is read once and meets all input rows while it is in cache. Bound by
// memory bandwidth. 16 partial sums let the compiler use vectors; they are added in a fixed order.
inline void few_rows_forward(floatX* out, const floatX* inp, const floatX* weight, const floatX* bias, int N, int IC, int OC) {
    constexpr int lanes = 16;
    const int whole = IC / lanes * lanes;
#pragma omp parallel for schedule(static)
    for (int o = 0; o < OC; o++) {
        const floatX* w = weight + (size_t)o * IC;
        for (int n = 0; n < N; n++) {
            const floatX* x = inp + (size_t)n * IC;
            real partial[lanes] = {};
            for (int i = 0; i < whole; i += lanes)
                for (int k = 0; k < lanes; k++) partial[k] += (real)x[i + k] * (real)w[i + k];
            real sum = 0;
            for (int i = whole; i < IC; i++) sum += (real)x[i] * (real)w[i];
            for (int k = 0; k < lanes; k++) sum += partial[k];
            out[(size_t)n * OC + o] = (floatX)(sum + (bias ? (real)bias[o] : real(0)));
        }
    }
}

// dbias (+)= column sums: a task owns 64 columns and adds their rows from first to last.
inline void column_sums(real* dbias, const floatX* dout, int N, int OC, Acc acc) {
    constexpr int width = 64;
#pragma omp parallel for schedule(static)
    for (int first = 0; first < OC; first += width) {
        const int columns = std::min(width, OC - first);
        real sum[width] = {};
        for (int n = 0; n < N; n++) {
            const floatX* row = dout + (size_t)n * OC + first;
            for (int k = 0; k < columns; k++) sum[k] += (real)row[k];
        }
        for (int k = 0; k < columns; k++) dbias[first + k] = acc == Acc::Add ? dbias[first + k] + sum[k] : sum[k];
    }
}

// The fp64 build has the plain loops only.
constexpr bool has_library = HAVE_ONEDNN && !std::is_same<floatX, double>::value;
constexpr int few_rows = 4;

}  // namespace detail

// ---- the ops ---------------------------------------------------------------------------------------------------------------
inline void linear_forward(Ctx& ctx, floatX* out, const floatX* inp, const floatX* weight, const floatX* bias, int N, int IC,
                           int OC) {
    if (!ctx.plain && !std::is_same<floatX, double>::value && N <= detail::few_rows)
        return detail::few_rows_forward(out, inp, weight, bias, N, IC, OC);
    if (detail::unit_gemm::forward<floatX>(ctx, out, nullptr, inp, weight, bias, N, IC, OC)) return;
    if constexpr (detail::has_library)
        if (!ctx.plain) return detail::product(ctx, out, inp, false, weight, true, bias, N, OC, IC, Acc::Set);
    plain::linear_forward(out, inp, weight, bias, N, IC, OC);
}

inline void linear_backward_input(Ctx& ctx, floatX* dinp, const floatX* dout, const floatX* weight, int N, int IC, int OC) {
    if (detail::unit_gemm::backward_input<floatX>(ctx, dinp, dout, weight, nullptr, N, IC, OC)) return;
    if constexpr (detail::has_library)
        if (!ctx.plain) return detail::product<floatX>(ctx, dinp, dout, false, weight, false, nullptr, N, IC, OC, Acc::Set);
    plain::linear_backward_input(dinp, dout, weight, N, IC, OC);
}

inline void linear_gelu_forward(Ctx& ctx, floatX* out, floatX* pre, const floatX* inp, const floatX* weight, const floatX* bias,
                                int N, int IC, int OC) {
    if (N > detail::few_rows && detail::unit_gemm::forward<floatX>(ctx, out, pre, inp, weight, bias, N, IC, OC)) return;
    linear_forward(ctx, pre, inp, weight, bias, N, IC, OC);
    gelu_forward(ctx, out, pre, N, OC);
}

inline void linear_gelu_backward_input(Ctx& ctx, floatX* dpre, const floatX* dout, const floatX* weight, const floatX* pre,
                                       int N, int IC, int OC) {
    if (detail::unit_gemm::backward_input<floatX>(ctx, dpre, dout, weight, pre, N, IC, OC)) return;
    linear_backward_input(ctx, dpre, dout, weight, N, IC, OC);
    gelu_backward(ctx, dpre, dpre, pre, N, IC);
}

inline void linear_backward_weight(Ctx& ctx, real* dweight, real* dbias, const floatX* dout, const floatX* inp, int N, int IC,
                                   int OC, Acc acc) {
    if (dbias) detail::column_sums(dbias, dout, N, OC, acc);
    if (detail::unit_gemm::backward_weight<floatX>(ctx, dweight, dout, inp, N, IC, OC, acc)) return;
    if constexpr (detail::has_library)
        if (!ctx.plain) return detail::product<real>(ctx, dweight, dout, true, inp, false, nullptr, OC, IC, N, acc);
    plain::linear_backward_weight(dweight, dout, inp, N, IC, OC, acc);
}

}  // namespace cpu
