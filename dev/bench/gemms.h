// bench --gemms: every matrix product of a layer and of the head of five models, in isolation, on random operands: cuBLASLt's
// first suggestion and the fastest of 32; if the trainer may use an epilogue, the fastest with it, and the fastest without it
// followed by our kernel; weights' gradients that are added to bf16 ones (model/gradients.h), whole and in parts; in FP8 with
// sums that stay in the tensor cores ("fast") and sums that are split.
// bench --bounds: a single product of 8192^3, and repeated for two seconds, during which the clock settles; and a copy.
#pragma once
#include <functional>
#include <optional>

#include "../../llmc/model/gradients.h"
#include "measure.h"

namespace bench {

class Gemms {
    using Key = gpu::GemmKey;

public:
    Gemms(be::Ctx& ctx, const Machine& machine, Figures& figures) : ctx_(ctx), machine_(machine), figures_(figures) {}

    void run() {
        constexpr struct {
            const char* preset;
            int rows;  // of a micro-batch
        } models[] = {
            {"gpt2-124m", 65536}, {"gpt2-1558m", 16384}, {"llama-1b", 32768}, {"llama2-7b", 8192}, {"llm-jp-172b", 4096}};
        for (const auto& [preset, rows] : models) {
            ModelConfig c = config_from_preset(preset);
            pad_vocabulary(c, 128);
            model(preset, c, scaled(rows, 1024));
        }
    }

    void bounds() {
        const int n = emulated ? 64 : 8192;
        constexpr cudaDataType e4m3 = CUDA_R_8F_E4M3, x = gpu::cublas_type<floatX>();
        square("8192^3 " + std::string(precision_name), gpu::detail::forward_key({}, n, n, n, plain));
        if (const std::string no = be::fp8_limits(ctx_); !no.empty()) return figures_.note("8192^3 FP8", "skipped: " + no);
        for (const bool fast : {true, false})
            square(fast ? "8192^3 FP8 fast" : "8192^3 FP8 split",
                   Key{n, n, n, true, false, e4m3, e4m3, x, plain, false, gpu::GemmPointers{}, fast});
    }

private:
    static constexpr cublasLtEpilogue_t plain = CUBLASLT_EPILOGUE_DEFAULT;
    enum class Then { nothing, gelu, residual };  // the operation after a layer's product in the forward pass
    struct Layer {
        std::string name;
        int IC, OC;
        bool bias;
        Then then;
        bool after_gelu;  // its input is GeLU's output
    };

    // Sizes on the emulator, multiples of 16.
    static int scaled(int size, int divisor) { return emulated ? std::max(16, size / divisor / 16 * 16) : size; }

    void model(const std::string& preset, const ModelConfig& c, int N) {
        const bool gelu = c.activation == Activation::gelu;
        const int C = scaled(c.C, 64), F = scaled(c.F, 64);
        const Layer layers[] = {{"qkv", C, scaled(c.QKV(), 64), c.qkv_bias, Then::nothing, false},
                                {"proj", scaled(c.NH * c.HS(), 64), C, c.proj_bias, Then::residual, false},
                                {"fc1", C, scaled(c.F1(), 64), c.mlp_bias, gelu ? Then::gelu : Then::nothing, false},
                                {"fc2", F, C, c.mlp_bias, Then::residual, gelu}};
        const int rows = (int)std::min<size_t>(N, be::logits_rows(ctx_, (size_t)c.Vp * sizeof(floatX)));
        for (const Layer& l : layers) layer(preset + " " + l.name, l, N);
        layer(preset + " head", {"head", C, scaled(c.Vp, 64), false, Then::nothing, false}, rows);
        if (gelu || !be::fp8_limits(ctx_).empty()) return;
        for (const Layer& l : layers) layer_in_fp8(preset + " " + l.name, l, N);
    }

    void layer(const std::string& name, const Layer& l, int N) {
        const int IC = l.IC, OC = l.OC;
        const double flops = 2.0 * N * IC * OC;
        const std::string shape = format(" %dx%dx%d", N, IC, OC);
        const auto forward = [&](cublasLtEpilogue_t e) { return gpu::detail::forward_key({}, N, IC, OC, e); };
        const auto input = [&](cublasLtEpilogue_t e) { return gpu::detail::backward_input_key({}, N, IC, OC, e); };
        const auto weight = [&](cublasLtEpilogue_t e) {
            return gpu::detail::backward_weight_key({}, OC, N, IC, OC, CUDA_R_32F, Acc::Add, e);
        };
        product(name + " forward" + shape, forward(plain), flops);
        product(name + " dgrad" + shape, input(plain), flops);
        product(name + " wgrad" + shape, weight(plain), flops);
        if (l.name != "head") weight_in_bf16(name + " wgrad" + shape, N, IC, OC);

        if (l.then == Then::nothing && !l.after_gelu && !l.bias) return;
        if (!figures_.begin(name + " epilogues" + shape)) return;
        const Numbers<floatX> x(ctx_, (size_t)N * IC), w(ctx_, (size_t)OC * IC), b(ctx_, OC), y(ctx_, (size_t)N * OC),
            pre(ctx_, (size_t)N * OC), dx(ctx_, l.after_gelu ? (size_t)N * IC : 1);
        const Numbers<real> dw(ctx_, (size_t)OC * IC), db(ctx_, OC);
        const floatX* const bias = l.bias ? (floatX*)b : nullptr;
        if (l.then == Then::gelu)
            epilogue(name + " forward" + shape, "GeLU",
                     forward(bias ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX), flops,
                     [&] { be::linear_gelu_forward(ctx_, y, pre, x, w, bias, N, IC, OC); });
        if (l.then == Then::residual) {
            Key key = forward(bias ? CUBLASLT_EPILOGUE_BIAS : plain);
            key.add = true;
            epilogue(name + " forward" + shape, "residual", key, flops,
                     [&] { be::linear_residual_forward(ctx_, y, pre, x, w, bias, N, IC, OC); });
        }
        if (l.after_gelu)
            epilogue(name + " dgrad" + shape, "GeLU's derivative", input(CUBLASLT_EPILOGUE_DGELU), flops,
                     [&] { be::linear_gelu_backward_input(ctx_, dx, y, w, x, N, IC, OC); });
        if (l.bias)
            epilogue(name + " wgrad" + shape, "bias sums", weight(CUBLASLT_EPILOGUE_BGRADB), flops,
                     [&] { be::linear_backward_weight(ctx_, (real*)dw, db, y, x, N, IC, OC, Acc::Add); });
    }

    // The whole gradient in fp32, then added to a bf16 one; and some rows at a time, as the trainer does it.
    void weight_in_bf16(const std::string& name, int N, int IC, int OC) {
        const BlockGradients gradients;
        if (sizeof(floatX) == 4 || !figures_.begin(name + " to bf16")) return;
        const Numbers<floatX> x(ctx_, (size_t)N * IC), y(ctx_, (size_t)N * OC);
        const Numbers<real> sums(ctx_, (size_t)OC * IC);
        const Numbers<bf16> gradient(ctx_, (size_t)OC * IC);
        for (const int most : {OC, emulated ? 16 : gradients.rows_at_a_time(OC, IC)}) {
            const auto run = [&] {
                for (int row = 0; row < OC; row += most) {
                    const int rows = std::min(most, OC - row);
                    const size_t n = (size_t)rows * IC;
                    be::linear_backward_weight_rows(ctx_, (real*)sums, nullptr, Columns{y + row, OC}, x, N, IC, rows, Acc::Set);
                    be::accumulate(ctx_, (bf16*)gradient + (size_t)row * IC, sums, n, Acc::Add, {});
                }
            };
            op(name, most == OC ? "added to bf16, whole" : format("added to bf16, %d rows at a time", most), 2.0 * N * IC * OC,
               run);
        }
    }

    // The three products in FP8 have both operands contiguous along k (gpu/fp8_linear.cuh).
    void layer_in_fp8(const std::string& name, const Layer& l, int N) {
        const int IC = l.IC, OC = l.OC;
        const double flops = 2.0 * N * IC * OC;
        const std::string shape = format(" %dx%dx%d", N, IC, OC);
        const gpu::GemmPointers aligned = {};
        constexpr cudaDataType e4m3 = CUDA_R_8F_E4M3, e5m2 = CUDA_R_8F_E5M2, x = gpu::cublas_type<floatX>();
        for (const bool fast : {true, false}) {
            const std::string sums = fast ? "FP8 fast, " : "FP8 split, ";
            product(name + " forward" + shape, Key{OC, N, IC, true, false, e4m3, e4m3, x, plain, false, aligned, fast}, flops,
                    sums);
            product(name + " dgrad" + shape, Key{IC, N, OC, true, false, e4m3, e5m2, x, plain, false, aligned, fast}, flops,
                    sums);
            product(name + " wgrad" + shape, Key{IC, OC, N, true, false, e4m3, e5m2, CUDA_R_32F, plain, true, aligned, fast},
                    flops, sums);
        }
    }

    // The library's first suggestion and its fastest; none if it has no algorithm, or memory does not suffice.
    std::optional<gpu::GemmChoice> choose(const Key& key) {
        gpu::GemmPlan plan;
        gpu::detail::describe(plan, key);
        const auto algorithms = gpu::detail::suggestions(ctx_, plan, key, 32);
        if (algorithms.empty()) return {};
        const gpu::detail::GemmScratch scratch(ctx_, key, {});
        gpu::GemmChoice choice;
        if (!scratch.obtained() || !gpu::detail::fastest(ctx_, plan, scratch, key, algorithms, choice)) return {};
        return choice;
    }
    void square(const std::string& name, const Key& key) {
        if (!figures_.begin(name)) return;
        const auto choice = choose(key);
        if (!choice) return figures_.note(name, "skipped: cuBLASLt has no algorithm, or memory is short");
        const double flops = 2.0 * key.m * key.n * key.k;
        figures_.add(name, "best of 32", choice->us * 1e-6, flops, machine_);
        gpu::GemmPlan plan;
        gpu::detail::describe(plan, key);
        const gpu::detail::GemmScratch scratch(ctx_, key, {});
        if (!scratch.obtained()) return figures_.note(name, "skipped: memory is short");
        const gpu::GemmPointers pointers = scratch.pointers(key.epilogue);
        gpu::detail::Stopwatch stopwatch(ctx_);
        const int runs = emulated ? 3 : (int)(2e6 / choice->us);
        const double us = stopwatch.time(runs, [&] { gpu::detail::start(ctx_, plan, choice->algo, pointers); });
        figures_.add(name, "for 2 s", us * 1e-6, flops, machine_);
    }
    void product(const std::string& name, const Key& key, double flops, const std::string& prefix = "") {
        if (!figures_.begin(prefix + name)) return;
        const auto choice = choose(key);
        if (!choice) return figures_.note(prefix + name, "skipped: cuBLASLt has no algorithm, or memory is short");
        if (choice->first_us > 0) figures_.add(name, prefix + "first suggestion", choice->first_us * 1e-6, flops, machine_);
        figures_.add(name, prefix + "best of 32", choice->us * 1e-6, flops, machine_);
    }
    // apart: the op, which then runs without the epilogue.
    template <class F>
    void epilogue(const std::string& name, const std::string& what, const Key& key, double flops, F apart) {
        if (const auto choice = choose(key)) figures_.add(name, what + " in the epilogue", choice->us * 1e-6, flops, machine_);
        else figures_.note(name, what + " in the epilogue: skipped: cuBLASLt has no algorithm, or memory is short");
        ctx_.plans->fusion = gpu::Fusion::never;
        op(name, what + " apart", flops, apart);
        ctx_.plans->fusion = gpu::Fusion::if_faster;
    }
    template <class F>
    void op(const std::string& name, const std::string& variant, double flops, F run) {
        gpu::detail::Stopwatch stopwatch(ctx_);
        run();  // chooses the algorithm
        const double us = stopwatch.median(stopwatch.time(1, run), run);
        figures_.add(name, variant, us * 1e-6, flops, machine_);
    }

    be::Ctx& ctx_;
    const Machine& machine_;
    Figures& figures_;
};

}  // namespace bench
