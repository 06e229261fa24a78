// The peak FLOP/s of this CPU: multiply-adds on registers, in enough independent chains to hide latency. MFU is relative to
// this bound, and so are the benchmarks. Each function is compiled for the instructions it measures and called only where the
// CPU has them, so the bound does not depend on -march.
#pragma once
#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "ctx.h"

#if CPU_FAST_PATHS && defined(__x86_64__) && (__GNUC__ >= 11 || __clang_major__ >= 12)
#define CPU_BF16_RATES 1
#include <immintrin.h>
#else
#define CPU_BF16_RATES 0
#endif

namespace cpu {

// Total FLOP/s of all threads; 0: not known, or no such instructions.
struct RegisterRates {
    double fp32 = 0, bf16 = 0;
    const char *fp32_name = "fp32 FMA", *bf16_name = "no bf16";
    // Intel's bf16 dot product without AMX is slower than fp32; numbers stored as bf16 are then multiplied as fp32.
    bool by_bf16() const { return sizeof(floatX) == 2 && bf16 > fp32; }
    double best() const { return by_bf16() ? bf16 : fp32; }
    const char* best_name() const { return by_bf16() ? bf16_name : fp32_name; }
};

namespace detail {

#if CPU_FAST_PATHS
// Each function runs this many rounds and returns a number made of all its sums, so that none is optimized away.
template <int L>                          // floats per register
constexpr double fma_flops = 12 * L * 2;  // per round
template <int L>
__attribute__((always_inline)) inline float fma_rounds(long rounds) {
    typedef float vec __attribute__((vector_size(4 * L)));
    vec sum[12], x = vec{} + 1e-3f;
    for (int k = 0; k < 12; k++) sum[k] = vec{} + (float)k;  // distinct chains, or the compiler merges them
    for (long i = 0; i < rounds; i++) {
        for (vec& s : sum) s = s * x + x;
    }
    for (int k = 1; k < 12; k++) sum[0] += sum[k];
    float first;
    memcpy(&first, &sum[0], sizeof first);
    return first;
}
#if X86_UNITS
FOR_AVX512 inline float fma_rounds_avx512(long rounds) { return fma_rounds<16>(rounds); }
FOR_AVX2 inline float fma_rounds_avx2(long rounds) { return fma_rounds<8>(rounds); }
#endif

// The sum over threads of each one's best rate, in windows so short that no other process interrupts some of them: even on a
// busy machine this is the rate of the registers, not the remaining share.
template <class F>
double register_rate(int threads, double seconds, F work, double flops_of_a_round) {
    constexpr double window = 200e-6;
    double rate = 0;
#pragma omp parallel num_threads(threads) reduction(+ : rate)
    {
        volatile float seen;  // keeps the sums from being optimized away
        const auto timed = [&](long rounds) {
            const double start = omp_get_wtime();
            seen = work(rounds);
            return omp_get_wtime() - start;
        };
        long rounds = 1000;
        while (timed(rounds) < window && rounds < (1L << 30)) rounds *= 2;
        double least = window * 1e6;
#pragma omp barrier
        for (const double start = omp_get_wtime(); omp_get_wtime() - start < seconds;) least = std::min(least, timed(rounds));
        rate += flops_of_a_round * (double)rounds / least;
        (void)seen;
    }
    return rate;
}
#endif

#if CPU_BF16_RATES
constexpr double dot_flops = 12 * 16 * 2 * 2;  // vdpbf16ps: 16 sums of two products each
__attribute__((target("avx512f,avx512bf16"))) inline float dot_rounds(long rounds) {
    __m512 sum[12];
    for (int k = 0; k < 12; k++) sum[k] = _mm512_set1_ps((float)k);
    const __m512bh x = _mm512_cvtne2ps_pbh(_mm512_set1_ps(1e-3f), _mm512_set1_ps(1e-3f));
    for (long i = 0; i < rounds; i++) {
        for (__m512& s : sum) s = _mm512_dpbf16_ps(s, x, x);
    }
    for (int k = 1; k < 12; k++) sum[0] = _mm512_add_ps(sum[0], sum[k]);
    return _mm512_cvtss_f32(sum[0]);
}

constexpr double tile_flops = 4.0 * 16 * 16 * 32 * 2;  // four products of tiles: 16x32 by 32x16
inline float tile_rounds(long rounds) {
    using Tiles = AmxTiles;
    float sums[16 * 16];
    Tiles::begin();  // zeroes all tiles
    for (long i = 0; i < rounds; i++) {
        Tiles::multiply<0, 4, 6>();
        Tiles::multiply<1, 4, 7>();
        Tiles::multiply<2, 5, 6>();
        Tiles::multiply<3, 5, 7>();
    }
    Tiles::store<0>(sums, 64);
    Tiles::end();
    return sums[0];
}
#endif

#if ARM_UNITS
constexpr double mmla_flops = 12 * 2 * 2 * 4 * 2;  // BFMMLA: (2, 4) by (4, 2)
inline float mmla_rounds(long rounds) {
    const four_words x = four_words{} + 0x3a833a83u;  // about 0.001, twice
    four_floats sum[12];
    for (int k = 0; k < 12; k++) sum[k] = four_floats{} + (float)k;
    for (long i = 0; i < rounds; i++) {
        for (four_floats& s : sum) s = multiply_add(s, x, x);
    }
    for (int k = 1; k < 12; k++) sum[0] += sum[k];
    return sum[0][0];
}
#endif

}  // namespace detail

// Measures about `seconds` per type of number, on this many threads; if TRAIN_GPT_MATRIX_UNIT names a unit, only its
// instructions and older ones.
inline RegisterRates measure_registers([[maybe_unused]] int threads, [[maybe_unused]] double seconds) {
    RegisterRates rates;
#if CPU_FAST_PATHS
    const std::vector<AnyUnit> units = matrix_units<bf16>(Products::layers);  // the fastest kind first
    const std::string held_to = unit_of_environment();
    const auto first =
        std::find_if(units.begin(), units.end(), [&](AnyUnit u) { return held_to.empty() || held_to == name_of(u); });
    [[maybe_unused]] const auto may_use = [&](AnyUnit unit) { return std::find(first, units.end(), unit) != units.end(); };
#if X86_UNITS
    if (may_use(avx512()))
        rates.fp32 = detail::register_rate(threads, seconds, detail::fma_rounds_avx512, detail::fma_flops<16>);
    else if (may_use(avx2()))
        rates.fp32 = detail::register_rate(threads, seconds, detail::fma_rounds_avx2, detail::fma_flops<8>);
    else
#endif
        rates.fp32 = detail::register_rate(threads, seconds, detail::fma_rounds<4>, detail::fma_flops<4>);
#endif
#if ARM_UNITS && CPU_FAST_PATHS
    if (may_use(neon_bf16())) {
        rates.bf16 = detail::register_rate(threads, seconds, detail::mmla_rounds, detail::mmla_flops);
        rates.bf16_name = "NEON bf16";
    }
#endif
#if CPU_BF16_RATES
    if (may_use(amx())) {
        rates.bf16 = detail::register_rate(threads, seconds, detail::tile_rounds, detail::tile_flops);
        rates.bf16_name = "AMX bf16";
    } else if (may_use(avx512_bf16())) {
        rates.bf16 = detail::register_rate(threads, seconds, detail::dot_rounds, detail::dot_flops);
        rates.bf16_name = "AVX-512 bf16";
    }
    // An fp32 product on a bf16 unit needs six bf16 products.
    if (may_use(amx()) && rates.bf16 / 6 > rates.fp32) {
        rates.fp32 = rates.bf16 / 6;
        rates.fp32_name = "fp32 by AMX";
    }
#endif
    return rates;
}

}  // namespace cpu
