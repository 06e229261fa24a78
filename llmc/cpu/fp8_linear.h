// Linear layers with FP8 codes as operands (../fp8.h; derivations in matmul.h). The arithmetic matches a GPU's: codes represent
// exact numbers, their products are summed in fp32, and the sum is multiplied by both inverse scales and rounded once.
//   forward          out  (N, OC)  = inp (N, IC) weight (OC, IC)^T (+ bias)
//   backward_input   dinp (N, IC)  = dout (N, OC) weight_transposed (IC, OC)^T
//   backward_weight  dweight (OC, IC) (+)= dout_transposed (OC, N) inp_transposed (IC, N)^T
// All three have the form c (M, K') = a (M, K) b (K', K)^T, which GPU tensor cores require. No CPU multiplies FP8 numbers: the
// fast path decodes them to floatX, which is exact, and multiplies the result. This allows FP8 training to be studied anywhere,
// but not faster: it costs as much as bf16 plus the conversion.
#pragma once
#include <array>
#include <vector>

#include "../ops.h"
#include "fp8.h"
#include "matmul.h"
#include "parallel.h"

namespace cpu {
namespace detail {

#if CPU_FAST_PATHS
// (rows, K) decoded numbers in ctx.copies[i], zero-padded to whole tiles of the matrix unit.
inline const floatX* decode(Ctx& ctx, int i, const Fp8Matrix& x, int rows, int K, int all_rows, int all_K) {
    std::array<floatX, 256> numbers;
    for (size_t code = 0; code < 256; code++) numbers[code] = (floatX)numbers_of_codes(x.format)[code];
    std::vector<floatX>& out = ctx.copies[i];
    if (out.size() < (size_t)all_rows * all_K) out.resize((size_t)all_rows * all_K);
    parallel_for(all_rows, [&](int r) {
        floatX* row = &out[(size_t)r * all_K];
        const int there = r < rows ? K : 0;
        for (int k = 0; k < there; k++) row[k] = numbers[x.codes[(size_t)r * K + k]];
        std::fill(row + there, row + all_K, floatX(0));
    });
    return out.data();
}

template <class Set>
void decoded_product(Ctx& ctx, const Fp8Matrix& a, const Fp8Matrix& b, int M, int N, int K, Set set) {
    const int all_K = gemm::on_unit(ctx, [=](const auto& unit) { return round_up(K, gemm::k_multiple_of(unit)); });
    const floatX* left = decode(ctx, 1, a, M, K, M, all_K);
    const floatX* right = decode(ctx, 2, b, N, K, round_up(N, 16), all_K);
    const gemm::RightOperand operand{gemm::RightOperand::transposed, right, (size_t)all_K};
    const auto epilogue = [&](int m, int first, int columns, const float* sums) {
        for (int n = 0; n < columns; n++) set(m, first + n, sums[n]);
    };
    gemm::on_unit(ctx, [&](const auto& unit) {
        gemm::rows_times(ctx, unit, nullptr, {}, left, M, all_K, N, operand, gemm::finished_by(epilogue));
    });
}
#endif

// set(m, n, sum) for every element of the codes of a (M, K) b (N, K)^T.
template <class Set>
void fp8_product([[maybe_unused]] Ctx& ctx, const Fp8Matrix& a, const Fp8Matrix& b, int M, int N, int K, Set set) {
#if CPU_FAST_PATHS
    if (!ctx.plain) return decoded_product(ctx, a, b, M, N, K, set);
#endif
    const auto &a_numbers = numbers_of_codes(a.format), &b_numbers = numbers_of_codes(b.format);
    parallel_for(M, [&](int m) {
        for (int n = 0; n < N; n++) {
            real sum = 0;
            for (int k = 0; k < K; k++)
                sum += (real)a_numbers[a.codes[(size_t)m * K + k]] * (real)b_numbers[b.codes[(size_t)n * K + k]];
            set(m, n, sum);
        }
    });
}

}  // namespace detail

inline std::string fp8_limits(const Ctx&) { return ""; }

inline void fp8_linear_forward(Ctx& ctx, floatX* out, const Fp8Matrix& inp, const Fp8Matrix& weight, const floatX* bias, int N,
                               int IC, int OC, bool /*fast*/) {
    const real inverse = (real)*inp.inverse_scale * (real)*weight.inverse_scale;
    detail::fp8_product(ctx, inp, weight, N, OC, IC, [=](int n, int o, real sum) {
        out[(size_t)n * OC + o] = (floatX)(sum * inverse + (bias ? (real)bias[o] : real(0)));
    });
}

inline void fp8_linear_residual_forward(Ctx& ctx, floatX* out, const Addends& addends, const Fp8Matrix& inp,
                                        const Fp8Matrix& weight, int N, int IC, int OC, bool fast) {
    const floatX *residual = addends.residual, *bias = addends.bias;
    fp8_linear_forward(ctx, out, inp, weight, bias, N, IC, OC, fast);
    residual_forward(ctx, out, residual, out, (size_t)N * OC);
}

inline void fp8_linear_backward_input(Ctx& ctx, floatX* dinp, const Fp8Matrix& dout, const Fp8Matrix& weight_transposed, int N,
                                      int IC, int OC, bool /*fast*/) {
    const real inverse = (real)*dout.inverse_scale * (real)*weight_transposed.inverse_scale;
    detail::fp8_product(ctx, dout, weight_transposed, N, IC, OC,
                        [=](int n, int i, real sum) { dinp[(size_t)n * IC + i] = (floatX)(sum * inverse); });
}

inline void fp8_linear_backward_weight(Ctx& ctx, const Elements& dweight, const Fp8Matrix& dout_transposed,
                                       const Fp8Matrix& inp_transposed, int N, int IC, int OC, Acc acc, bool /*fast*/) {
    const real inverse = (real)*dout_transposed.inverse_scale * (real)*inp_transposed.inverse_scale;
    real* const sums = detail::in_fp32(dweight);
    detail::fp8_product(ctx, dout_transposed, inp_transposed, OC, IC, N, [=](int o, int i, real sum) {
        real& d = sums[(size_t)o * IC + i];
        d = acc == Acc::Add ? d + sum * inverse : sum * inverse;
    });
}

inline void bias_backward(Ctx&, real* dbias, const floatX* dout, int N, int OC) {
    detail::column_sums(dbias, dout, (size_t)OC, N, OC, Acc::Add);
}

}  // namespace cpu
