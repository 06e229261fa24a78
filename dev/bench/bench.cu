// One training step, and each of its ops, compared with the machine's limits, measured in the same run: on a GPU a large
// matrix product, on a CPU its multiply-add rate; and a large copy. Medians.
//   make bench            BACKEND=cpu|cuda  PRECISION=bf16|fp32
//   build/.../bench [--ops | --steps | PRESET B T [none|selective|full] [LAYERS]]
//   build/.../bench --profile PRESET B[,B...] T [none|selective|full] [LAYERS] [--fp8]   the ops of a step: share and bound
//   build/.../bench --generate PRESET        tokens per second, by batch size
//   build/.../bench --units                  on a CPU: each available matrix unit, GFLOP/s of layers and attention
//   build/.../bench --bounds | --gemms | --attention    on a GPU: see gemms.h, attention_bench.h; with these and --profile:
//                                            --seconds N, --json
// A mixture of experts PRESET is also measured as PRESET-dense, with dense MLPs of the same FLOPs per token.
// For dev/bench/cpu.py, which alternates other programs' steps with ours; descriptions are lines of KEY=VALUE:
//   bench --machine               this program and the machine's limits
//   bench --describe PRESET B T   the model's sizes, its parameters, FLOPs of a step; needs no memory
//   bench --serve PRESET B T      prints "ready"; for each count read from stdin runs that many steps and prints the
//                                 milliseconds of each; at the end of the input prints the peak memory of the process
// On a GPU ops come first, and products use the algorithms chosen by timing, as in training. The calls of a round are
// launched back to back with one wait, so that launching is not measured; ops read random data larger than the caches.
#define TRAIN_GPT_NO_MAIN
#include <algorithm>
#include <chrono>
#include <fstream>
#include <iostream>
#include <map>
#include <optional>

#if !defined(BACKEND_CUDA) && !defined(BACKEND_EMU)
#define BENCH_ON_CPU
#endif
#include "timed_ops.h"
#define be timed  // used by train_gpt.cu
#include "../../train_gpt.cu"
#undef be
#include "measure.h"
#include "experts_bench.h"
#ifndef BENCH_ON_CPU
#include "attention_bench.h"
#include "gemms.h"
#endif

namespace {

using namespace bench;

void row(const std::string& name, double seconds, double flops, double bytes, const Machine& machine) {
    printf("%-40s %10.3f ms", name.c_str(), seconds * 1e3);
    if (flops > 0)
        printf("  %8.*f TFLOP/s %5.0f%% of %s", on_gpu ? 1 : 3, flops / seconds / 1e12, 100 * flops / seconds / machine.flops,
               machine.flops_name);
    if (bytes > 0) printf("  %8.1f GB/s    %5.0f%% of copy", bytes / seconds / 1e9, 100 * bytes / seconds / machine.bytes);
    printf("\n");
    fflush(stdout);
}

struct Sizes {
    int N, C, F, V, Vp;     // rows, widths and vocabulary of the linear layers and the classifier
    int B, T, NH, NKV, HS;  // attention
    size_t parameters;      // AdamW, norm
};

void bench_linear(be::Ctx& ctx, const Machine& machine, int N, int IC, int OC) {
    const Numbers<floatX> x(ctx, (size_t)N * IC), w(ctx, (size_t)OC * IC), y(ctx, (size_t)N * OC);
    const Numbers<real> dw(ctx, (size_t)OC * IC);
    const double flops = 2.0 * N * IC * OC;
    const std::string shape = format(" %dx%dx%d", N, IC, OC);
    row("linear_forward" + shape, median_seconds(ctx, [&] { be::linear_forward(ctx, y, x, w, nullptr, N, IC, OC); }), flops, 0,
        machine);
    row("linear_backward_weight" + shape,
        median_seconds(ctx, [&] { be::linear_backward_weight(ctx, (real*)dw, nullptr, y, x, N, IC, OC, Acc::Add); }), flops, 0,
        machine);
    row("linear_backward_input" + shape, median_seconds(ctx, [&] { be::linear_backward_input(ctx, x, y, w, N, IC, OC); }),
        flops, 0, machine);
}

// A linear layer in bf16 and in FP8: products, quantization, and both together for a training step: three products; the
// input is quantized for one and transposed for another, the output gradient is quantized for both backward products.
// Weights are quantized once per step, for many micro-batches.
void bench_in_fp8(be::Ctx& ctx, const Machine& machine, int N, int IC, int OC) {
    const Numbers<floatX> x(ctx, (size_t)N * IC), w(ctx, (size_t)OC * IC), y(ctx, (size_t)N * OC), out(ctx, (size_t)N * OC),
        dx(ctx, (size_t)N * IC);
    const Numbers<real> dw(ctx, (size_t)OC * IC);
    const Numbers<uint8_t> xq(ctx, (size_t)N * IC), xt(ctx, (size_t)N * IC), yq(ctx, (size_t)N * OC), yt(ctx, (size_t)N * OC),
        wq(ctx, (size_t)OC * IC), wt(ctx, (size_t)OC * IC);
    const Numbers<float> numbers(ctx, 8);  // amax, scale, inverse at multiples of 16 bytes
    float *amax = numbers, *scale = amax + 1, *inverse = amax + 4;
    const Fp8 e4m3 = Fp8::e4m3, e5m2 = Fp8::e5m2;
    be::absolute_max(ctx, amax, x, x.size());
    be::set_scale(ctx, scale, inverse, amax, e4m3, 0);
    be::quantize(ctx, {wq, wt, amax, scale, e4m3}, w, OC, IC);
    const auto quantize_input = [&] { be::quantize(ctx, {xq, nullptr, amax, scale, e4m3}, x, N, IC); };
    const auto quantize_gradient = [&] { be::quantize(ctx, {yq, yt, amax, scale, e5m2}, y, N, OC); };
    const auto transpose_input = [&] { be::transpose_codes(ctx, xt, xq, N, IC); };
    const auto forward = [&] { be::fp8_linear_forward(ctx, out, {xq, inverse}, {wq, inverse}, nullptr, N, IC, OC, true); };
    const auto weight = [&] {
        be::fp8_linear_backward_weight(ctx, (real*)dw, {yt, inverse, e5m2}, {xt, inverse}, N, IC, OC, Acc::Add, false);
    };
    const auto input = [&] { be::fp8_linear_backward_input(ctx, dx, {yq, inverse, e5m2}, {wt, inverse}, N, IC, OC, false); };
    quantize_input();
    transpose_input();
    quantize_gradient();

    const double flops = 2.0 * N * IC * OC, X = sizeof(floatX);
    const std::string shape = format(" %dx%dx%d", N, IC, OC);
    const auto bench = [&](const char* name, double f, double bytes, auto call) {
        const double seconds = median_seconds(ctx, call);
        row(name + shape, seconds, f, bytes, machine);
        return seconds;
    };
    bench("quantize", 0, (X + 1) * N * IC, quantize_input);
    bench("quantize, transposed too", 0, (X + 2) * N * OC, quantize_gradient);
    bench("transpose_codes", 0, 2.0 * N * IC, transpose_input);
    bench("fp8_linear_forward", flops, 0, forward);
    bench("fp8_linear_backward_weight", flops, 0, weight);
    bench("fp8_linear_backward_input", flops, 0, input);
    const double wide = bench("three products", 3 * flops, 0, [&] {
        be::linear_forward(ctx, out, x, w, nullptr, N, IC, OC);
        be::linear_backward_weight(ctx, (real*)dw, nullptr, y, x, N, IC, OC, Acc::Add);
        be::linear_backward_input(ctx, dx, y, w, N, IC, OC);
    });
    const double narrow = bench("in FP8, with quantizing", 3 * flops, 0, [&] {
        quantize_input();
        forward();
        quantize_gradient();
        transpose_input();
        weight();
        input();
    });
    printf("%-40s %10.2f times as fast as %s\n", ("FP8" + shape).c_str(), wide / narrow, precision_name);
}

// The ops that GPT-2's layers fuse with their products.
void bench_linear_gelu(be::Ctx& ctx, const Machine& machine, int N, int IC, int OC) {
    const Numbers<floatX> x(ctx, (size_t)N * IC), w(ctx, (size_t)OC * IC), b(ctx, OC), y(ctx, (size_t)N * OC),
        pre(ctx, (size_t)N * OC);
    const Numbers<real> dw(ctx, (size_t)OC * IC), db(ctx, OC);
    const double flops = 2.0 * N * IC * OC;
    const auto bench = [&](const char* name, auto f) {
        row(name + format(" %dx%dx%d", N, IC, OC), median_seconds(ctx, f), flops, 0, machine);
    };
    bench("linear_gelu_forward + bias", [&] { be::linear_gelu_forward(ctx, y, pre, x, w, b, N, IC, OC); });
    bench("linear_gelu_backward_input", [&] { be::linear_gelu_backward_input(ctx, y, x, w, pre, N, OC, IC); });
    bench("linear_backward_weight + bias", [&] { be::linear_backward_weight(ctx, (real*)dw, db, y, x, N, IC, OC, Acc::Add); });
}

void bench_attention(be::Ctx& ctx, const Machine& machine, int B, int T, int NH, int NKV, int HS) {
    const size_t rows = (size_t)B * T;
    const Numbers<floatX> qkv(ctx, rows * (NH + 2 * NKV) * HS), out(ctx, rows * NH * HS), dout(ctx, rows * NH * HS),
        dqkv(ctx, rows * (NH + 2 * NKV) * HS);
    const Numbers<real> lse(ctx, rows * NH);
    const real scale = (real)(1 / std::sqrt((double)HS));
    const double flops = 2.0 * rows * T * NH * HS;  // causal: two products of T^2/2 x HS per head
    const std::string shape = format(" %dx%d %d/%dx%d", B, T, NH, NKV, HS);
    const AttentionShape sizes = {B, T, NH, NKV, HS, scale};
    const AttentionActs acts = {qkv, out, lse};
    const auto forward = [&] { be::attention_forward(ctx, out, lse, qkv, {}, sizes); };
    const auto backward = [&](real* dq_sums) { be::attention_backward(ctx, dqkv, dout, acts, {}, sizes, dq_sums); };
    row("attention_forward" + shape, median_seconds(ctx, forward), flops, 0, machine);
    row("attention_backward" + shape, median_seconds(ctx, [&] { backward(nullptr); }), 2.5 * flops, 0, machine);
    AttentionShape capped = sizes;
    capped.softcap = 50;
    row("with a soft cap: forward" + shape, median_seconds(ctx, [&] { be::attention_forward(ctx, out, lse, qkv, {}, capped); }),
        flops, 0, machine);
    row("with a soft cap: backward" + shape,
        median_seconds(ctx, [&] { be::attention_backward(ctx, dqkv, dout, acts, {}, capped, nullptr); }), 2.5 * flops, 0,
        machine);
    const size_t n_sums = be::attention_sums(ctx, sizes);
    if (!n_sums) return;
    const Numbers<real> sums(ctx, n_sums);
    row("not deterministic: backward" + shape, median_seconds(ctx, [&] { backward(sums); }), 2.5 * flops, 0, machine);
}

#ifdef BENCH_ON_CPU
// A row per matrix unit: GFLOP/s of layers (forward, gradients of input and weight) and of attention (forward, backward).
void bench_units(be::Ctx& ctx) {
    constexpr int layers[][3] = {{1024, 768, 3072}, {1024, 768, 768}, {2048, 192, 1024}, {2048, 512, 192}};
    constexpr int attention[][4] = {{1, 1024, 12, 64}, {8, 256, 6, 32}};  // B, T, NH, HS
    constexpr size_t most = 1024 * 3072;
    const Numbers<floatX> x(ctx, most), w(ctx, most), y(ctx, most), z(ctx, most);
    const Numbers<real> dw(ctx, most), lse(ctx, 8 * 256 * 12);
    printf("| %s |", precision_name);
    for (const auto& l : layers) printf(" %dx%dx%d |", l[0], l[1], l[2]);
    for (const auto& a : attention) printf(" attention %dx%d, %d heads of %d |", a[0], a[1], a[2], a[3]);
    printf("\n| --- | --- | --- | --- | --- | --- | --- |\n");
    for (const cpu::AnyUnit unit : cpu::matrix_units<floatX>(cpu::Products::layers)) {
        ctx.layers = unit;
        ctx.attention = cpu::unit_named<floatX>(cpu::Products::attention, name_of(unit)).value_or(ctx.attention);
        printf("| %s |", name_of(unit));
        const auto rate = [&](double flops, auto f) {
            printf(" %.0f", flops / median_seconds(ctx, f, 0.3) / 1e9);
            fflush(stdout);
        };
        for (const auto& [N, IC, OC] : layers) {
            const double flops = 2.0 * N * IC * OC;
            rate(flops, [&, N = N, IC = IC, OC = OC] { be::linear_forward(ctx, z, x, w, nullptr, N, IC, OC); });
            rate(flops, [&, N = N, IC = IC, OC = OC] { be::linear_backward_input(ctx, z, y, w, N, IC, OC); });
            rate(flops, [&, N = N, IC = IC, OC = OC] {
                be::linear_backward_weight(ctx, (real*)dw, nullptr, y, x, N, IC, OC, Acc::Add);
            });
            printf(" |");
        }
        for (const auto& [B, T, NH, HS] : attention) {
            const double flops = 2.0 * B * T * T * NH * HS;
            rate(flops, [&, B = B, T = T, NH = NH, HS = HS] {
                be::attention_forward(ctx, z, lse, y, {}, {B, T, NH, NH, HS, 0.1f});
            });
            rate(2.5 * flops, [&, B = B, T = T, NH = NH, HS = HS] {
                be::attention_backward(ctx, w, x, {y, z, lse}, {}, {B, T, NH, NH, HS, 0.1f}, nullptr);
            });
            printf(" |");
        }
        printf("\n");
    }
}
#endif

// Ops limited by memory bandwidth: the bytes to move, each once.
void bench_memory_bound(be::Ctx& ctx, const Machine& machine, const Sizes& s) {
    constexpr double X = sizeof(floatX), R = sizeof(real);
    const double NC = (double)s.N * s.C, NF = (double)s.N * s.F;
    const std::string shape = format(" %dx%d", s.N, s.C), wide = format(" %dx%d", s.N, s.F);
    const Numbers<float> numbers(ctx, 3);
    float *amax = numbers, *scale = amax + 1;
    be::set_scale(ctx, scale, amax + 2, amax, Fp8::e4m3, 0);
    const auto bench = [&](const std::string& name, double bytes, auto f) {
        row(name, median_seconds(ctx, f), 0, bytes, machine);
    };
    {
        const Numbers<floatX> x(ctx, (size_t)NC), add(ctx, (size_t)NC), sum(ctx, (size_t)NC), y(ctx, (size_t)NC), w(ctx, s.C),
            b(ctx, s.C);
        const Numbers<real> mean(ctx, s.N), rstd(ctx, s.N), dw(ctx, s.C), db(ctx, s.C);
        const NormParams params = {w, b, s.C, 1e-5f};
        bench("layernorm_forward + residual" + shape, 4 * NC * X, [&] {
            be::layernorm_forward(ctx, (floatX*)y, {mean, rstd}, sum, x, add, params, s.N);
        });
        bench("layernorm_backward, adding" + shape, 4 * NC * X, [&] {
            be::layernorm_backward(ctx, add, {dw, db}, y, x, params, {mean, rstd}, s.N, Acc::Add);
        });
        bench("rmsnorm_forward + residual" + shape, 4 * NC * X, [&] {
            be::rmsnorm_forward(ctx, (floatX*)y, {nullptr, rstd}, sum, x, add, params, s.N);
        });
        bench("rmsnorm_backward, adding" + shape, 4 * NC * X, [&] {
            be::rmsnorm_backward(ctx, add, {dw, nullptr}, y, x, params, {nullptr, rstd}, s.N, Acc::Add);
        });
        bench("residual_forward" + shape, 3 * NC * X, [&] { be::residual_forward(ctx, y, x, add, x.size()); });
        const Numbers<uint8_t> codes(ctx, (size_t)NC);
        bench("rmsnorm_forward into codes" + shape, NC * (X + 1), [&] {
            be::rmsnorm_forward(ctx, Codes{codes, nullptr, amax, scale, Fp8::e4m3}, {nullptr, rstd}, nullptr, x, nullptr,
                                params, s.N);
        });
    }
    {
        const Numbers<floatX> x(ctx, 2 * (size_t)NF), dx(ctx, 2 * (size_t)NF), y(ctx, (size_t)NF);
        const std::pair<const char*, Activation> activations[] = {{"gelu", Activation::gelu},
                                                                  {"gelu_exact", Activation::gelu_exact},
                                                                  {"relu2", Activation::relu2},
                                                                  {"swiglu", Activation::swiglu},
                                                                  {"geglu", Activation::geglu}};
        for (const auto& [name, activation] : activations) {
            const std::string op = std::string("activation_") + name;
            const int inputs = gated(activation) ? 2 : 1;
            bench(op + " forward" + wide, (1 + inputs) * NF * X,
                  [&, act = activation] { be::activation_forward(ctx, (floatX*)y, x, s.N, s.F, act); });
            bench(op + " backward" + wide, (1 + 2 * inputs) * NF * X,
                  [&, act = activation] { be::activation_backward(ctx, (floatX*)dx, y, x, s.N, s.F, act); });
        }
        Dropout dropout;
        dropout.rate = 0.1f;
        bench("dropout_forward" + wide, 2 * NF * X, [&] { be::dropout_forward(ctx, y, x, (size_t)NF, dropout); });
        const Numbers<uint8_t> codes(ctx, 2 * (size_t)NF), transposed(ctx, 2 * (size_t)NF);
        bench("swiglu_forward into codes" + wide, NF * (2 * X + 1), [&] {
            be::activation_forward(ctx, Codes{codes, nullptr, amax, scale, Fp8::e4m3}, x, s.N, s.F, Activation::swiglu);
        });
        bench("swiglu_backward into codes, transposed too" + wide, NF * (3 * X + 4), [&] {
            be::activation_backward(ctx, Codes{codes, transposed, amax, scale, Fp8::e5m2}, y, x, s.N, s.F, Activation::swiglu);
        });
    }
    {
        const int heads = s.NH + 2 * s.NKV;
        const Numbers<floatX> qkv(ctx, (size_t)s.N * heads * s.HS);
        const Numbers<real> cos_sin(ctx, (size_t)s.T * s.HS);
        const Numbers<int> positions(ctx, s.N);
        be::clear(ctx, positions, s.N * sizeof(int));
        bench(format("rope_forward %dx%dx%d", s.N, heads, s.HS), 2.0 * s.N * (s.NH + s.NKV) * s.HS * X, [&] {
            be::rope_forward(ctx, qkv, {positions, cos_sin, s.HS}, {1, s.N, s.NH, s.NKV, s.HS});
        });
        const Numbers<floatX> kept(ctx, (size_t)s.N * s.NH * s.HS), w(ctx, s.HS);
        const Numbers<real> rstd(ctx, (size_t)s.N * s.NH), dw(ctx, s.HS);
        const NormParams params = {w, nullptr, s.HS, 1e-5f};
        const HeadRows queries = {s.N, (size_t)heads * s.HS, s.NH};
        const std::string of_heads = format(" %dx%dx%d", s.N, s.NH, s.HS);
        bench("head_norm_forward" + of_heads, 3.0 * s.N * s.NH * s.HS * X,
              [&] { be::head_norm_forward(ctx, qkv, kept, rstd, params, queries); });
        bench("head_norm_backward" + of_heads, 3.0 * s.N * s.NH * s.HS * X, [&] {
            be::head_norm_backward(ctx, qkv, {dw, nullptr}, kept, params, rstd, queries);
        });
    }
    {
        const Numbers<floatX> out(ctx, (size_t)NC), wte(ctx, (size_t)s.Vp * s.C);
        const Numbers<real> dwte(ctx, (size_t)s.Vp * s.C);
        const Numbers<int> tokens(ctx, s.N);
        std::vector<int> random(s.N);
        for (int i = 0; i < s.N; i++) random[i] = (int)((unsigned)i * 2654435761u % (unsigned)s.V);
        be::upload(ctx, tokens, random.data(), random.size() * sizeof(int));
        bench("embedding_forward" + shape, 2 * NC * X, [&] {
            be::embedding_forward(ctx, out, tokens, nullptr, wte, nullptr, s.N, s.C, {0, s.V, s.Vp});
        });
        bench("embedding_backward" + shape, NC * (X + 2 * R), [&] {
            be::embedding_backward(ctx, dwte, nullptr, out, tokens, nullptr, s.N, s.C, {0, s.V, s.Vp});
        });
    }
    {
        const int rows = std::min(s.N, 8192);
        const Numbers<floatX> logits(ctx, (size_t)rows * s.Vp);
        const Numbers<real> loss(ctx, rows), z(ctx, rows), lse(ctx, rows);
        const Numbers<int> targets(ctx, rows);
        be::clear(ctx, targets, rows * sizeof(int));
        bench(format("classifier %dx%d", rows, s.V), 2.0 * rows * s.Vp * X, [&] {
            be::classifier(ctx, logits, {loss, z, lse}, targets, rows, {0, s.V, s.Vp}, {1e-3f, 1e-4f, true});
        });
        bench(format("classifier with soft cap %dx%d", rows, s.V), 2.0 * rows * s.Vp * X, [&] {
            be::classifier(ctx, logits, {loss, z, lse}, targets, rows, {0, s.V, s.Vp}, {1e-3f, 1e-4f, true, 30});
        });
    }
    {
        const size_t n = s.parameters;
        const Numbers<floatX> p(ctx, n);
        const Numbers<LowerHalf> lower(ctx, has_lower_halves ? n : 0);
        const Numbers<real> m(ctx, n), v(ctx, n), g(ctx, n);
        be::clear(ctx, v, n * sizeof(real));
        const std::string size = " " + human_count((double)n);
        const auto adamw = [&](const char* name, const Elements& first, const Elements& second, const Elements& gradient) {
            const double moments = 2.0 * (double)(first.element_bytes() + second.element_bytes());
            bench(name + size, (double)n * (2 * R + moments + (double)gradient.element_bytes()), [&] {
                be::adamw(ctx, p, lower, first, second, gradient, n, {1e-4f, 0.9f, 0.95f, 1e-8f, 0.1f, 1.0f, 10}, Rounding());
            });
        };
        adamw("adamw", (real*)m, (real*)v, (real*)g);
        adamw("adamw, bf16 moments", (bf16*)(real*)m, (bf16*)(real*)v, (real*)g);
        adamw("adamw, bf16 moments and gradients", (bf16*)(real*)m, (bf16*)(real*)v, (bf16*)(real*)g);
        bench("accumulate in bf16" + size, (double)n * (R + 4),
              [&] { be::accumulate(ctx, (bf16*)(real*)v, m, n, Acc::Add, Rounding()); });
        bench("sum_of_squares" + size, (double)n * R, [&] { be::sum_of_squares(ctx, (real*)g, n); });
    }
}

// layers: 0, or fewer than the preset has.
ModelConfig config_for(const std::string& preset, int T, int layers) {
    const size_t dense = preset.rfind("-dense");
    ModelConfig c = config_from_preset(preset.substr(0, dense));
    if (dense != std::string::npos) {
        if (!c.mixture.on()) fail_usage("preset '%s': only a mixture of experts has a variant with -dense", preset.c_str());
        c.F = c.mixture.topk * c.expert_width();
        c.mixture = {};
    }
    if (layers) c.L = layers;
    if (!c.V) c.V = 4096;
    c.T = std::max(c.T, T);
    pad_vocabulary(c, 128);
    return c;
}

// Halves a size that does not fit, sequences first, then layers, until it fits; the row has the actual sizes.
void bench_step(be::Ctx& ctx, const Machine& machine, const std::string& preset, int B, int T, Recompute recompute,
                int layers) {
    ModelConfig c = config_for(preset, T, layers);
    const size_t available = be::available_memory() - be::available_memory() / 32;  // scratch memory is needed in addition
    const auto fits = [&] { return RandomStep::planned_bytes(ctx, {c, B, T}, recompute) <= available; };
    while (B > 1 && !fits()) B /= 2;
    while (c.L > 1 && !fits()) layers = c.L = (c.L + 1) / 2;
    RandomStep step(ctx, c, B, T, recompute);
    const double seconds = median_seconds(
        ctx, [&] { step.run(); }, on_gpu ? 2.0 : 10.0);
    const double flops = model_flops_per_token(c, T);
    printf(
        "%-14s %s %dx%d: %8.0f tok/s  %8.3f TFLOP/s (%.0f%% of %s)  %8.1f ms a step (forward %.1f, head and backward %.1f, "
        "update %.1f)  %.2f GiB\n",
        (preset + (layers ? format(" %d layers", layers) : "")).c_str(), precision_name, B, T, B * T / seconds,
        flops * B * T / seconds / 1e12, 100 * flops * B * T / seconds / machine.flops, machine.flops_name, seconds * 1e3,
        step.forward * 1e3, step.backward * 1e3, step.update * 1e3, (double)step.planned_bytes() / 1073741824.0);
    if (on_gpu) {  // as in training: many micro-batches, one update
        const double later = median_seconds(
            ctx, [&] { step.micro_batch(Acc::Add); }, 1.0);
        const double tokens = 524288, rate = tokens / (seconds + later * (tokens / (B * T) - 1));
        printf("%-14s in steps of 524,288 tokens: %8.0f tok/s  %8.3f TFLOP/s (%.0f%% of %s, %.1f%% of 989)\n", "", rate,
               flops * rate / 1e12, 100 * flops * rate / machine.flops, machine.flops_name, flops * rate / 989e10);
    }
    fflush(stdout);
}

// The ops of a step: time, share, and the machine's limit, the larger of the FLOPs at the bound's rate and the bytes at the
// rate of a copy (on a CPU, of reading); above 100% if data come from a cache. B: several are profiled in turn.
struct Profile {
    std::string preset;
    std::vector<int> B;
    int T = 0, layers = 0;
    Recompute recompute = Recompute::none;
    bool fp8 = false;

    std::string name(int batch) const {
        return format("%s%s, %s%s, %dx%d", preset.c_str(), layers ? format(", %d layers", layers).c_str() : "", precision_name,
                      fp8 ? " and FP8" : "", batch, T);
    }
};
void profile(be::Ctx& ctx, const Machine& machine, const Profile& p, int B, Figures& figures) {
    const std::string title = p.name(B);
    if (!figures.begin(title)) return;
    RandomStep step(ctx, config_for(p.preset, p.T, p.layers), B, p.T, p.recompute, true, p.fp8);
    constexpr int most = 10;
    step.run();
    step.run();
    timed::records.clear();
    timed::Record all;
    int steps = 0;
    {
        const timed::Stopwatch stopwatch(ctx, all);
        timed::recording = true;
        while (steps < most && (steps == 0 || figures.time_left())) step.run(), steps++;
        timed::recording = false;
    }
    timed::read_stopwatches(ctx);
    const double whole = all.seconds / steps;
    std::vector<std::pair<std::string, timed::Record>> rows(timed::records.begin(), timed::records.end());
    std::sort(rows.begin(), rows.end(), [](const auto& a, const auto& b) { return a.second.seconds > b.second.seconds; });
    const double memory = on_gpu ? machine.bytes : machine.read_bytes, unit = on_gpu ? 1e12 : 1e9;
    const char* const rate = on_gpu ? "TFLOP/s" : "GFLOP/s";
    if (!figures.json()) {
        printf("%s; %s %.0f %s, memory %.1f GB/s\n\n", title.c_str(), machine.flops_name, machine.flops / unit, rate,
               memory / 1e9);
        printf("| op | calls | ms | share | %s | GB/s | of bound |\n| --- | --- | --- | --- | --- | --- | --- |\n", rate);
    }
    double rest = whole, bounds = 0;
    for (const auto& [name, r] : rows) {
        const double seconds = r.seconds / steps, flops = r.work.flops / steps, bytes = r.work.bytes / steps;
        const double by_flops = flops / (machine.flops * (name.rfind("fp8_", 0) == 0 ? 2 : 1)), by_bytes = bytes / memory;
        const double bound = std::max(by_flops, by_bytes);
        rest -= seconds;
        bounds += bound;
        if (figures.json()) {
            figures.line({{"name", title},
                          {"op", name},
                          {"calls", r.calls / steps},
                          {"ms", seconds * 1e3},
                          {"share", seconds / whole},
                          {"TFLOP/s", flops / seconds / 1e12},
                          {"GB/s", bytes / seconds / 1e9},
                          {"of_bound", bound / seconds},
                          {"bound_by", by_flops > by_bytes ? "FLOPs" : "memory"}});
            continue;
        }
        printf("| %s | %d | %.2f | %.1f%% | %s | %.1f | %.0f%% %s |\n", name.c_str(), r.calls / steps, seconds * 1e3,
               100 * seconds / whole, flops > 0 ? format("%.0f", flops / seconds / unit).c_str() : "", bytes / seconds / 1e9,
               100 * bound / seconds, by_flops > by_bytes ? "of FLOPs" : "of memory");
    }
    if (figures.json()) {
        figures.line({{"name", title}, {"op", "everything else"}, {"ms", rest * 1e3}, {"share", rest / whole}});
        figures.line({{"name", title},
                      {"op", "step"},
                      {"ms", whole * 1e3},
                      {"tokens_per_s", B * p.T / whole},
                      {"steps", steps},
                      {"of_bound", bounds / whole}});
    } else {
        printf("| everything else | | %.2f | %.1f%% | | | |\n", rest * 1e3, 100 * rest / whole);
        printf("| step | | %.2f | | | | %.0f%% |\n", whole * 1e3, 100 * bounds / whole);
        if (steps < most) printf("%d steps instead of %d: the time was over\n", steps, most);
        printf("\n");
    }
    fflush(stdout);
}

// Batched generation, a token of each sequence per step: each step reads all matrices and the keys and values so far. Batch
// sizes alternate, so that a noisy machine slows all of them down.
void bench_generate(be::Ctx& ctx, const Machine& machine, const std::string& preset) {
    constexpr int prompt = 64, tokens = 64;
    const std::vector<int> batches = {1, 2, 4, 8};
    Model m(config_for(preset, 0, 0));
    plan_memory(m, Recompute::inference, 1, prompt, 1, {batches.back()});
    allocate(ctx, m);
    initialize(ctx, m, 1);
    Generator generator(ctx, m);
    std::map<int, std::vector<double>> times;
    for (int round = 0; round < 7; round++)
        for (const int batch : batches) {
            Decoder<Generator> decoder(generator);
            double start = 0;
            int last = 0;  // tokens of the last sequence, whose first token comes with its prompt
            for (int i = 0; i < batch; i++)
                decoder.add({std::vector<int>(prompt, 1), tokens, {}, (uint64_t)i, 0, {}, [&](int) {
                                 if (last == 0) start = now();
                                 return true;
                             }});
            while (decoder.step()) last++;
            times[batch].push_back((now() - start) / (tokens - 1));
        }
    const ModelConfig& c = m.c;
    const double of_block = (double)c.C * (c.QKV() + c.C + c.F1() + c.F), parameters = c.L * of_block + (double)c.Vp * c.C;
    const double cached = 2.0 * c.L * c.NKV * c.HS() * (prompt + tokens / 2.0);
    for (auto& [batch, of_batch] : times) {
        std::sort(of_batch.begin(), of_batch.end());
        const double bytes = (parameters + batch * cached) * sizeof(floatX), seconds = of_batch[of_batch.size() / 2];
        printf("%-14s %s generating %d: %.0f tok/s, %.2f ms each; %.1f GB/s, %.0f%% of reading memory\n", preset.c_str(),
               precision_name, batch, batch / seconds, seconds * 1e3, bytes / seconds / 1e9,
               100 * bytes / seconds / machine.read_bytes);
    }
    fflush(stdout);
}

// ---- for dev/bench/cpu.py ----
// V: with its padding, also for other programs, so that all multiply the same matrices.
void describe(const std::string& preset, int B, int T) {
    const ModelConfig c = config_for(preset, T, 0);
    size_t parameters = 0;
    for (const TensorSpec& spec : ParameterTable(c).rows) parameters += spec.size();
    printf("family=%s\nL=%d\nC=%d\nNH=%d\nNKV=%d\nF=%d\nV=%d\npositions=%d\neps=%g\nrope_base=%g\nexperts=%d\ntopk=%d\n",
           c.family.c_str(), c.L, c.C, c.NH, c.NKV, c.F, c.Vp, c.T, c.eps, c.rope_base, c.mixture.experts, c.mixture.topk);
    printf("parameters=%zu\nflops=%.0f\n", parameters, model_flops_per_token(c, T) * B * T);
}

size_t peak_memory() {
    std::ifstream status("/proc/self/status");
    size_t kib = 0;
    for (std::string line; std::getline(status, line);) sscanf(line.c_str(), "VmHWM: %zu", &kib);
    return kib * 1024;
}

void serve(be::Ctx& ctx, const std::string& preset, int B, int T) {
    RandomStep step(ctx, config_for(preset, T, 0), B, T, Recompute::none);
    printf("ready\n");
    fflush(stdout);
    for (int n; std::cin >> n;) {
        std::vector<double> seconds;
        for (int i = 0; i < n; i++) {
            const double start = now();
            step.run();
            seconds.push_back(now() - start);
        }
        for (const double s : seconds) printf("%.4f ", s * 1e3);
        printf("\n");
        fflush(stdout);
    }
    printf("%zu\n", peak_memory());
}

// Cost of a checkpoint: training waits for the copy, then shares the cores with the writer until it is done. At the default
// interval of 30 minutes the cost is at most (copy + writing) / 30 minutes.
void bench_checkpoint(be::Ctx& ctx, const std::string& preset) {
    Model m([&] {
        ModelConfig c = config_from_preset(preset);
        pad_vocabulary(c, 128);
        return c;
    }());
    plan_memory(m, Recompute::none, 1, 64, 64);
    m.plan_copy(m.arena, false);
    allocate(ctx, m);
    initialize(ctx, m, 1);
    std::string out = "build/bench_checkpoint_XXXXXX";
    if (!mkdtemp(&out[0])) fail("cannot make a directory in build: %s", strerror(errno));
    std::vector<double> copies, writes;
    {
        Saver saver(ctx, {out, KeptCheckpoints{1}, {}, ""}, m);
        for (int i = 0; i < 4; i++) {  // the first save also touches its memory for the first time
            TrainingState state;
            state.step = i;
            const double start = now();
            saver.save(state);
            copies.push_back(now() - start);
            saver.wait();
            writes.push_back(now() - start - copies.back());
            if (const auto outcome = saver.outcome(); !outcome || !outcome->error.empty())
                fail("the checkpoint was not written: %s", outcome ? outcome->error.c_str() : "?");
        }
    }
    std::filesystem::remove_all(out);
    std::sort(copies.begin() + 1, copies.end());
    std::sort(writes.begin() + 1, writes.end());
    printf(
        "checkpoint of %s: training waits %.0f ms (first time %.0f ms), written in %.1f s, %.2f GiB: at most %.2f%% of 30 "
        "minutes\n",
        preset.c_str(), copies[2] * 1e3, copies[0] * 1e3, writes[2],
        (double)checkpoint_bytes(m.table, {}, 2 * sizeof(real), false) / 1073741824.0, 100 * (copies[2] + writes[2]) / 1800);
}

// The GPU's bound is its own library's rate on a large product; the CPU's is the peak of its arithmetic units, in bf16 if
// the trainer stores that and the CPU is faster in it (Intel's without AMX are not).
Machine measure(be::Ctx& ctx) {
    Machine machine{};
    if (on_gpu) {
        const int n = emulated ? 64 : 8192;
        const Numbers<floatX> a(ctx, (size_t)n * n), b(ctx, (size_t)n * n), c(ctx, (size_t)n * n);
        machine.flops = 2.0 * n * n * n / median_seconds(ctx, [&] { be::linear_forward(ctx, c, a, b, nullptr, n, n, n); });
        machine.flops_name = "cuBLASLt 8192^3";
    } else {
        const cpu::RegisterRates rates = cpu::measure_registers(ctx.threads, 1);
        machine.bf16 = rates.bf16;
        machine.bf16_name = rates.bf16_name;
        machine.fp32 = rates.fp32;
        machine.flops = rates.best();
        machine.flops_name = rates.best_name();
    }
    const size_t n = emulated ? 1 << 16 : on_gpu ? (size_t)1 << 30 : 64 << 20;
    const Numbers<float> from(ctx, n / 4), to(ctx, n / 4);
    machine.bytes = 2.0 * (double)n / median_seconds(ctx, [&] { be::copy_rows(ctx, to, n / 64, from, n / 64, n / 64, 64); });
    const size_t much_bytes = on_gpu ? n : 4 * n;  // beyond the caches; more would only take longer
    const Numbers<real> much(ctx, much_bytes / sizeof(real));
    machine.read_bytes = (double)much_bytes / median_seconds(ctx, [&] { be::sum_of_squares(ctx, (real*)much, much.size()); });
    return machine;
}

void print_machine(const be::Ctx& ctx, const Machine& machine) {
    printf("threads=%d\nisa=%s\ncompiler=%s\n", ctx.threads, ctx.description().c_str(), build_compiler().c_str());
    printf("fp32=%.4g\nbf16=%.4g\nbf16_name=%s\ncopy=%.4g\n", machine.fp32, machine.bf16, machine.bf16_name, machine.bytes);
#ifdef BENCH_ON_CPU
    printf("units=%s\n", cpu::unit_names<floatX>().c_str());
#endif
}

void bench_steps(be::Ctx& ctx, const Machine& machine) {
    if (on_gpu) {
        bench_step(ctx, machine, "gpt2-124m", 64, 1024, Recompute::none, 0);
        bench_step(ctx, machine, "gpt2-1558m", 16, 1024, Recompute::none, 0);
        bench_step(ctx, machine, "llama-1b", 16, 2048, Recompute::none, 0);
        bench_step(ctx, machine, "llama2-7b", 1, 4096, Recompute::selective, 24);
        bench_step(ctx, machine, "llm-jp-172b", 1, 4096, Recompute::selective, 3);
    } else {
        bench_step(ctx, machine, "gpt2-124m", 1, 1024, Recompute::none, 0);
        bench_step(ctx, machine, "gpt2-124m", 4, 64, Recompute::none, 0);
        bench_step(ctx, machine, "quickstart", 8, 256, Recompute::none, 0);
        bench_generate(ctx, machine, "gpt2-124m");
        bench_checkpoint(ctx, "gpt2-124m");
    }
}

void bench_ops(be::Ctx& ctx, const Machine& machine) {
    const Sizes s = on_gpu ? Sizes{32768, 4096, 11008, 50257, 50304, 4, 4096, 32, 32, 128, (size_t)512 << 20}
                           : Sizes{1024, 768, 3072, 50257, 50304, 1, 1024, 12, 12, 64, (size_t)32 << 20};
    bench_linear(ctx, machine, s.N, s.C, s.F);
    bench_linear(ctx, machine, s.N, s.F, s.C);
    bench_linear(ctx, machine, std::min(s.N, 8192), s.C, s.Vp);
    bench_attention(ctx, machine, s.B, s.T, s.NH, s.NKV, s.HS);
    if (on_gpu) {
        bench_attention(ctx, machine, 64, 1024, 12, 12, 64);
        bench_attention(ctx, machine, 2, 8192, 32, 8, 128);
        bench_attention(ctx, machine, 1, 4096, 32, 32, 128);
        bench_attention(ctx, machine, 1, 4096, 96, 16, 128);
        bench_linear(ctx, machine, 65536, 768, 3072);
        bench_linear(ctx, machine, 65536, 3072, 768);
    }
    bench_linear_gelu(ctx, machine, on_gpu ? 65536 : s.N, 768, 3072);
    if (const std::string no_fp8 = be::fp8_limits(ctx); !no_fp8.empty()) {
        printf("%s\n", no_fp8.c_str());
    } else if (on_gpu) {  // fc1 of Llama-1B and 7B, and a rank's part of LLM-jp 172B's
        bench_in_fp8(ctx, machine, 32768, 2048, 16384);
        bench_in_fp8(ctx, machine, 32768, 4096, 22016);
        bench_in_fp8(ctx, machine, 4096, 12288, 19232);
    } else {
        bench_in_fp8(ctx, machine, s.N, s.C, s.F);
    }
    bench_memory_bound(ctx, machine, s);
    Figures figures(false, 0);
    ExpertsBench(ctx, machine, figures).run();
}

constexpr char usage[] =
    "bench [--ops | --steps | PRESET B T [none|selective|full] [LAYERS]]\n"
    "bench --profile PRESET B[,B...] T [none|selective|full] [LAYERS] [--fp8]   the ops of a step: time, share, bound\n"
    "bench --generate PRESET | --machine | --describe PRESET B T | --serve PRESET B T\n"
    "bench --experts                mixtures of experts next to a dense MLP of as many rows: the layer, its products\n"
    "on a CPU: bench --units\n"
    "on a GPU: bench --bounds       cuBLASLt's 8192^3 in bf16 and FP8, at once and for two seconds; a copy\n"
    "          bench --gemms        every matrix product of five models: first suggestion, best of 32, epilogues, FP8\n"
    "          bench --attention    forward, backward in two kernels and in one, cuDNN: heads of 64 and 128, T 512 to 8192\n"
    "With --profile, --experts, --bounds, --gemms and --attention:\n"
    "  --seconds N   start nothing after N seconds; skipped figures are listed\n"
    "  --json        a line of JSON per figure\n";

struct Call {
    std::string mode;  // empty: ops and steps
    std::vector<std::string> words;
    bool json = false, fp8 = false;
    double seconds = 0;

    int number(size_t i) const { return i < words.size() ? atoi(words[i].c_str()) : 0; }
    Recompute recompute(size_t i) const { return recompute_policy(i < words.size() ? words[i] : "none"); }
};

// Nothing if the arguments are invalid.
std::optional<Call> understood(int argc, char** argv) {
    struct Mode {
        size_t least, most;
        bool has_figures;  // --seconds, --json
    };
    static const std::map<std::string, Mode> modes = {
        {"", {0, 5, false}},           {"--ops", {0, 0, false}},     {"--steps", {0, 0, false}},  {"--profile", {3, 5, true}},
        {"--generate", {1, 1, false}}, {"--machine", {0, 0, false}}, {"--experts", {0, 0, true}},
#ifdef BENCH_ON_CPU
        {"--units", {0, 0, false}},
#else
        {"--bounds", {0, 0, true}},    {"--gemms", {0, 0, true}},    {"--attention", {0, 0, true}},
#endif
        {"--describe", {3, 3, false}}, {"--serve", {3, 3, false}}};
    Call call;
    bool figures = false;
    for (int i = 1; i < argc; i++) {
        const std::string word = argv[i];
        if (word == "--json") call.json = figures = true;
        else if (word == "--fp8") call.fp8 = true;
        else if (word == "--seconds" && i + 1 < argc && atof(argv[i + 1]) > 0) call.seconds = atof(argv[++i]), figures = true;
        else if (word[0] != '-') call.words.push_back(word);
        else if (call.mode.empty() && modes.count(word)) call.mode = word;
        else return {};
    }
    const Mode& mode = modes.at(call.mode);
    const size_t n = call.words.size();
    const bool right_number = mode.least <= n && n <= mode.most && (call.mode != "" || n == 0 || n >= 3);
    if (!right_number || (figures && !mode.has_figures) || (call.fp8 && call.mode != "--profile")) return {};
    return call;
}

void profile_all(be::Ctx& ctx, const Machine& machine, const Call& call, Figures& figures) {
    Profile p{call.words[0], {}, call.number(2), call.number(4), call.recompute(3), call.fp8};
    if (const std::string no = be::fp8_limits(ctx); p.fp8 && !no.empty()) fail("--fp8: %s", no.c_str());
    for (size_t at = 0; at != std::string::npos && at < call.words[1].size();) {
        const int B = atoi(call.words[1].c_str() + at);
        if (B < 1)
            fail("the micro-batch size is '%s'; it must be a number such as 4, or several: 1,2,4", call.words[1].c_str());
        profile(ctx, machine, p, B, figures);
        at = call.words[1].find(',', at);
        if (at != std::string::npos) at++;
    }
}

void print_bounds(const be::Ctx& ctx, const Machine& machine, Figures& figures) {
    const std::string device = ctx.description();
    if (figures.json())
        return figures.line({{"backend", be::backend_name},
                             {"device", device},
                             {"precision", precision_name},
                             {"bound", machine.flops_name},
                             {"TFLOP/s", machine.flops / 1e12},
                             {"copy_GB/s", machine.bytes / 1e9},
                             {"read_GB/s", machine.read_bytes / 1e9}});
    printf("%s, %s, storage %s: ", be::backend_name, device.c_str(), precision_name);
    if (on_gpu) printf("%s %.2f TFLOP/s", machine.flops_name, machine.flops / 1e12);
    else printf("fp32 %.3f TFLOP/s, %s %.3f", machine.fp32 / 1e12, machine.bf16_name, machine.bf16 / 1e12);
    printf(", copy %.1f GB/s, read %.1f\n", machine.bytes / 1e9, machine.read_bytes / 1e9);
}

}  // namespace

int main(int argc, char** argv) try {
    const std::optional<Call> understood_call = understood(argc, argv);
    if (!understood_call) {
        const bool asked = argc == 2 && std::string(argv[1]) == "--help";
        fputs(usage, asked ? stdout : stderr);
        return asked ? 0 : 2;
    }
    const Call& call = *understood_call;
    const std::string& mode = call.mode;
    be::Ctx ctx;
#ifdef BENCH_ON_CPU
    cpu::choose_matrix_unit(ctx, "", {}, 0, [](const std::string& mine) { return std::vector<std::string>{mine}; });
    if (mode == "--units") return bench_units(ctx), 0;
#endif
    if (mode == "--describe") return describe(call.words[0], call.number(1), call.number(2)), 0;
    if (mode == "--serve") return serve(ctx, call.words[0], call.number(1), call.number(2)), 0;

    Figures figures(call.json, call.seconds);
    if constexpr (on_gpu) be::use_gemm_cache(ctx, "", true);  // as by default in the trainer, but not saved
    const Machine machine = measure(ctx);
    if (mode == "--machine") return print_machine(ctx, machine), 0;
    print_bounds(ctx, machine, figures);
    if (mode == "--generate") return bench_generate(ctx, machine, call.words[0]), 0;
    if (mode == "--profile") return profile_all(ctx, machine, call, figures), figures.end(), 0;
    if (mode == "--experts") return ExpertsBench(ctx, machine, figures).run(), figures.end(), 0;
#ifndef BENCH_ON_CPU
    if (mode == "--bounds") return Gemms(ctx, machine, figures).bounds(), figures.end(), 0;
    if (mode == "--gemms") return Gemms(ctx, machine, figures).run(), figures.end(), 0;
    if (mode == "--attention") return AttentionBench(ctx, machine, figures).run(), figures.end(), 0;
#endif
    if (!call.words.empty()) {
        bench_step(ctx, machine, call.words[0], call.number(1), call.number(2), call.recompute(3), call.number(4));
        return 0;
    }
    // On a GPU a failed step makes the device unusable, so ops are measured first.
    if (on_gpu && mode != "--steps") bench_ops(ctx, machine);
    if (mode != "--ops") bench_steps(ctx, machine);
    if (!on_gpu && mode != "--steps") bench_ops(ctx, machine);
    return 0;
} catch (const Error& e) {
    fprintf(stderr, "error: %s\n", e.what());
    return 1;
}
