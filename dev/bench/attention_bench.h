// bench --attention: causal attention over 65,536 tokens in sequences of 512 to 8192, heads of 64 and of 128, and the common
// benchmark shape (batch 4, 48 heads of 128): forward, backward in two kernels and in one, and cuDNN's if its headers were
// available at compile time and it is installed. The variants of a shape alternate, so a changing clock affects all of them
// alike.
#pragma once
#include <functional>
#include <memory>

#include "../kernels/cudnn_attention.h"
#include "measure.h"

namespace bench {

class AttentionBench {
public:
    AttentionBench(be::Ctx& ctx, const Machine& machine, Figures& figures) : ctx_(ctx), machine_(machine), figures_(figures) {}

    void run() {
        if (!no_cudnn_.empty()) figures_.note("cuDNN", "skipped: " + no_cudnn_);
        const std::vector<int> lengths = {512, 1024, 2048, 4096, 8192};
        const int tokens = emulated ? 128 : 65536;
        heads(12, 64, tokens, lengths);
        heads(16, 128, tokens, lengths);
        heads(48, 128, emulated ? 64 : 16384, {4096});
    }

private:
    struct Variant {
        const char* name;
        double flops;
        std::function<void()> call;
        std::vector<double> us;
    };

    void heads(int NH, int HS, int tokens, const std::vector<int>& lengths) {
        const std::string name = format("%d heads of %d", NH, HS);
        if (!figures_.begin(name)) return;
        if (emulated) NH = 2;
        const size_t rows = (size_t)tokens;
        const Numbers<floatX> qkv(ctx_, rows * 3 * NH * HS), out(ctx_, rows * NH * HS), dout(ctx_, rows * NH * HS),
            dqkv(ctx_, rows * 3 * NH * HS);
        const Numbers<real> lse(ctx_, rows * NH);
        for (const int length : lengths) {
            const int T = emulated ? length / 64 : length;
            const AttentionShape shape = {tokens / T, T, NH, NH, HS, (real)(1 / std::sqrt((double)HS))};
            const std::string of_shape = format("%dx%d, ", tokens / T, T) + name;
            const double flops = 2.0 * (double)rows * T * NH * HS;  // causal: two products of T^2/2 x HS per head
            if (!figures_.begin(of_shape)) continue;
            std::vector<Variant> variants;
            const auto add = [&](const char* variant, double work, std::function<void()> call) {
                variants.push_back({variant, work, std::move(call), {}});
            };
            const AttentionActs acts = {qkv, out, lse};
            add("forward", flops, [&] { be::attention_forward(ctx_, out, lse, qkv, {}, shape); });
            add("backward in two kernels", 2.5 * flops,
                [&] { be::attention_backward(ctx_, dqkv, dout, acts, {}, shape, nullptr); });
            const size_t n_sums = be::attention_sums(ctx_, shape);
            const Numbers<real> sums(ctx_, std::max<size_t>(n_sums, 1));
            if (n_sums)
                add("backward in one kernel", 2.5 * flops,
                    [&] { be::attention_backward(ctx_, dqkv, dout, acts, {}, shape, sums); });
#ifdef HAVE_CUDNN
            std::unique_ptr<cudnn_attention::Plan> cudnn, cudnn_backward;
            if (no_cudnn_.empty()) try {
                    cudnn = std::make_unique<cudnn_attention::Plan>(ctx_, shape, false);
                    cudnn_backward = std::make_unique<cudnn_attention::Plan>(ctx_, shape, true);
                    cudnn->forward(out, lse, qkv);  // fails here, before it is timed
                    cudnn_backward->backward(dqkv, dout, out, lse, qkv);
                    add("cuDNN forward", flops, [&] { cudnn->forward(out, lse, qkv); });
                    add("cuDNN backward", 2.5 * flops, [&] { cudnn_backward->backward(dqkv, dout, out, lse, qkv); });
                } catch (const std::exception& e) {
                    figures_.note(of_shape, std::string("cuDNN skipped: ") + e.what());
                }
#endif
            take_turns(variants);
            for (Variant& v : variants) figures_.add(of_shape, v.name, median(v.us) * 1e-6, v.flops, machine_);
        }
    }

    void take_turns(std::vector<Variant>& variants) {
        gpu::detail::Stopwatch stopwatch(ctx_);
        std::vector<int> runs;
        for (Variant& v : variants) {
            v.call();
            runs.push_back(std::clamp((int)(3000 / stopwatch.time(1, v.call)), 1, 20));
        }
        for (int round = 0; round < (emulated ? 1 : 15); round++)
            for (size_t i = 0; i < variants.size(); i++) variants[i].us.push_back(stopwatch.time(runs[i], variants[i].call));
    }
    static double median(std::vector<double> x) {
        std::nth_element(x.begin(), x.begin() + x.size() / 2, x.end());
        return x[x.size() / 2];
    }

    be::Ctx& ctx_;
    const Machine& machine_;
    Figures& figures_;
#ifdef HAVE_CUDNN
    const std::string no_cudnn_ = cudnn_attention::lacks(ctx_);
#else
    const std::string no_cudnn_ = "this program was compiled without cudnn_frontend.h";
#endif
};

}  // namespace bench
