// CPU benchmark: one training step of GPT-2 124M, and its ops alone, each against what this machine can do, measured in the
// same run: fp32/bf16 multiply-add rate of the registers, and the bandwidth of a large copy. Medians.
//   make bench            PRECISION=bf16|fp32
//   build/.../bench_cpu [preset] [B] [T]     one more step benchmark
#define TRAIN_GPT_NO_MAIN
#include <algorithm>
#include <chrono>

#include "../../train_gpt.cu"

namespace {

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// Median seconds of f, after one warm-up call: at least 3 calls and about `budget` seconds.
template <class F>
double median_seconds(F f, double budget = 1.0) {
    f();
    std::vector<double> times;
    const double end = now() + budget;
    while (times.size() < 3 || (now() < end && times.size() < 1000)) {
        const double start = now();
        f();
        times.push_back(now() - start);
    }
    std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
    return times[times.size() / 2];
}

// Fused multiply-add rate of fp32 registers, all threads: 12 independent chains hide the latency.
double fma_peak(int threads) {
    typedef float vec __attribute__((vector_size(64)));
    constexpr long rounds = 4000000;
    static vec sink;
    const double seconds = median_seconds([&] {
#pragma omp parallel num_threads(threads)
        {
            vec sum[12], x = vec{} + 1e-3f;
            for (int k = 0; k < 12; k++) sum[k] = vec{} + (float)k;  // different chains, or the compiler keeps one
            for (long i = 0; i < rounds; i++) {
                for (vec& s : sum) s = s * x + x;
            }
#pragma omp critical
            for (const vec& s : sum) sink += s;
        }
    });
    if (sink[3] == 42) printf(" ");  // the sums must be seen to be used
    return 2.0 * rounds * 12 * 16 * threads / seconds;
}

struct Machine {
    double flops, bytes;
};

void row(const char* name, double seconds, double flops, double bytes, const Machine& machine) {
    printf("%-34s %10.2f ms", name, seconds * 1e3);
    if (flops > 0) printf("  %8.1f GFLOP/s %5.0f%% of fp32 FMA", flops / seconds / 1e9, 100 * flops / seconds / machine.flops);
    if (bytes > 0) printf("  %8.1f GB/s    %5.0f%% of copy", bytes / seconds / 1e9, 100 * bytes / seconds / machine.bytes);
    printf("\n");
    fflush(stdout);
}

template <class E>
std::vector<E> filled(size_t n) {
    std::vector<E> v(n);
    for (size_t i = 0; i < n; i++) v[i] = (E)(real)(((i * 2654435761u >> 12) % 1000) / 1000.0 - 0.5);
    return v;
}

void bench_ops(be::Ctx& ctx, const Machine& machine) {
    constexpr size_t X = sizeof(floatX), R = sizeof(real);
    const int N = 1024, C = 768, F = 3072, V = 50257, Vp = 50304, NH = 12, HS = 64;
    for (auto [IC, OC] : {std::pair<int, int>{C, F}, {F, C}, {C, Vp}}) {
        auto x = filled<floatX>((size_t)N * IC), w = filled<floatX>((size_t)OC * IC), y = filled<floatX>((size_t)N * OC);
        auto dw = filled<real>((size_t)OC * IC);
        const double flops = 2.0 * N * IC * OC;
        const std::string shape = format(" %dx%dx%d", N, IC, OC);
        row(("linear_forward" + shape).c_str(),
            median_seconds([&] { be::linear_forward(ctx, y.data(), x.data(), w.data(), nullptr, N, IC, OC); }), flops, 0,
            machine);
        row(("linear_backward_input" + shape).c_str(),
            median_seconds([&] { be::linear_backward_input(ctx, x.data(), y.data(), w.data(), N, IC, OC); }), flops, 0,
            machine);
        row(("linear_backward_weight" + shape).c_str(), median_seconds([&] {
                be::linear_backward_weight(ctx, dw.data(), nullptr, y.data(), x.data(), N, IC, OC, Acc::Add);
            }),
            flops, 0, machine);
    }
    {
        auto qkv = filled<floatX>((size_t)N * 3 * C), out = filled<floatX>((size_t)N * C), dqkv = qkv;
        auto lse = filled<real>((size_t)N * NH);
        const double flops = 2.0 * N * N * C;  // 2 products of T^2/2 x HS per head
        row("attention_forward 1x1024 12x64", median_seconds([&] {
                be::attention_forward(ctx, out.data(), lse.data(), qkv.data(), nullptr, nullptr, 1, N, NH, NH, HS, 0.125);
            }),
            flops, 0, machine);
        row("attention_backward 1x1024 12x64", median_seconds([&] {
                be::attention_backward(ctx, dqkv.data(), out.data(), out.data(), lse.data(), qkv.data(), nullptr, nullptr, 1, N,
                                       NH, NH, HS, 0.125);
            }),
            2.5 * flops, 0, machine);
    }
    {
        const int rows = 16384;
        auto x = filled<floatX>((size_t)rows * C), y = x, dx = x, w = filled<floatX>(C), b = w;
        auto mean = filled<real>(rows), rstd = mean, dw = filled<real>(C), db = dw;
        row("layernorm_forward 16384x768", median_seconds([&] {
                be::layernorm_forward(ctx, y.data(), mean.data(), rstd.data(), nullptr, x.data(), nullptr, w.data(), b.data(),
                                      rows, C, 1e-5f);
            }),
            0, 2.0 * rows * C * X, machine);
        row("layernorm_backward 16384x768", median_seconds([&] {
                be::layernorm_backward(ctx, dx.data(), dw.data(), db.data(), y.data(), x.data(), w.data(), mean.data(),
                                       rstd.data(), rows, C, Acc::Set);
            }),
            0, 3.0 * rows * C * X, machine);
    }
    {
        auto x = filled<floatX>((size_t)N * F), y = x, dx = x;
        row("gelu_forward 1024x3072", median_seconds([&] { be::gelu_forward(ctx, y.data(), x.data(), x.size()); }), 0,
            2.0 * x.size() * X, machine);
        row("gelu_backward 1024x3072", median_seconds([&] { be::gelu_backward(ctx, dx.data(), y.data(), x.data(), x.size()); }),
            0, 3.0 * x.size() * X, machine);
    }
    {
        auto logits = filled<floatX>((size_t)N * Vp);
        std::vector<real> loss(N), z(N), lse(N);
        std::vector<int> targets(N, 17);
        row("classifier 1024x50257", median_seconds([&] {
                be::classifier(ctx, logits.data(), loss.data(), z.data(), lse.data(), targets.data(), N, V, Vp, 1e-3f, 1e-4f,
                               true);
            }),
            0, 2.0 * N * Vp * X, machine);
    }
    {
        const size_t n = 32 << 20;
        auto p = filled<floatX>(n);
        auto master = filled<real>(n), m = master, v = std::vector<real>(n), g = master;
        row("adamw 32M", median_seconds([&] {
                be::adamw(ctx, p.data(), master.data(), m.data(), v.data(), g.data(), n, 1e-4f, 0.9f, 0.95f, 1e-8f, 0.1f, 1.0f,
                          10);
            }),
            0, n * (7.0 * R + X), machine);
        row("sum_of_squares 32M", median_seconds([&] { be::sum_of_squares(ctx, g.data(), n); }), 0, n * (double)R, machine);
    }
}

// A whole step on random tokens: forward, backward, norm, AdamW.
void bench_step(be::Ctx& ctx, const std::string& preset, int B, int T) {
    ModelConfig c = config_from_preset(preset);
    if (!c.V) c.V = 4096;
    c.T = std::max(c.T, T);
    pad_vocabulary(c, 128);
    Model m(c);
    plan_memory(m, Recompute::none, B, T, 1024);
    allocate(ctx, m);
    initialize(ctx, m, 1);
    Batch batch;
    batch.B = B, batch.T = T;
    for (int i = 0; i < B * T; i++) {
        batch.tokens.push_back((int)(i * 2654435761u % c.V)), batch.targets.push_back((int)((i + 1) * 2654435761u % c.V));
        batch.positions.push_back(i % T);
    }
    const Rows rows = stage(ctx, m, batch);
    double forward = 0, backward = 0, update = 0;
    int64_t step = 0;
    const double seconds = median_seconds(
        [&] {
            const double t0 = now();
            be::clear(ctx, m.grads, m.table.size * sizeof(real));
            model_forward(ctx, m, rows);
            const double t1 = now();
            head(ctx, m, rows, real(1.0 / (B * T)), 0, true);
            model_backward(ctx, m, rows);
            const double t2 = now();
            const double norm = std::sqrt(be::sum_of_squares(ctx, m.grads, m.table.size));
            be::adamw(ctx, m.params, m.master, m.m, m.v, m.grads, m.table.size, 1e-4f, 0.9f, 0.95f, 1e-8f, 0.1f,
                      (real)std::min(1.0, 1 / norm), ++step);
            forward = t1 - t0, backward = t2 - t1, update = now() - t2;
        },
        10.0);
    const double flops = model_flops_per_token(c, T) * B * T;
    printf(
        "%-14s %s %dx%d: %8.0f tok/s  %8.1f GFLOP/s  %8.1f ms a step (forward %.0f, head and backward %.0f, update %.0f)  %.2f "
        "GiB\n",
        preset.c_str(), precision_name, B, T, B * T / seconds, flops / seconds / 1e9, seconds * 1e3, forward * 1e3,
        backward * 1e3, update * 1e3, m.arena.bytes() / 1073741824.0);
    fflush(stdout);
}

// What a checkpoint costs: training waits for the copy, then shares the cores with the writer until it is done. At the default
// interval of 30 minutes the cost is at most (copy + writing) / 30 minutes.
void bench_checkpoint(be::Ctx& ctx, const std::string& preset) {
    Model m([&] {
        ModelConfig c = config_from_preset(preset);
        pad_vocabulary(c, 128);
        return c;
    }());
    plan_memory(m, Recompute::none, 1, 64, 64);
    plan_checkpoint_copy(m);
    allocate(ctx, m);
    initialize(ctx, m, 1);
    std::string out = "build/bench_checkpoint_XXXXXX";
    if (!mkdtemp(&out[0])) fail("cannot make a directory in build: %s", strerror(errno));
    std::vector<double> copies, writes;
    {
        Saver saver(ctx, out, m.c, m.table, {}, 1, 0, m.copy);
        for (int i = 0; i < 4; i++) {  // the first save also touches the memory for the first time
            TrainingState state;
            state.step = i;
            const double start = now();
            saver.save({m.params, m.master, m.m, m.v}, state);
            copies.push_back(now() - start);
            saver.wait();
            writes.push_back(now() - start - copies.back());
            if (const auto outcome = saver.outcome(); !outcome || !outcome->error.empty())
                fail("the checkpoint was not written: %s", outcome ? outcome->error.c_str() : "?");
        }
    }
    std::filesystem::remove_all(out);
    std::sort(copies.begin() + 1, copies.end()), std::sort(writes.begin() + 1, writes.end());
    printf(
        "checkpoint of %s: training waits %.0f ms (first time %.0f ms), written in %.1f s, %.2f GiB: at most %.2f%% of 30 "
        "minutes on %d threads\n",
        preset.c_str(), copies[2] * 1e3, copies[0] * 1e3, writes[2], (double)checkpoint_bytes(m.table, {}) / 1073741824.0,
        100 * (copies[2] + writes[2]) / 1800, ctx.threads);
}

}  // namespace

int main(int argc, char** argv) {
    be::Ctx ctx;
    Machine machine;
    machine.flops = fma_peak(ctx.threads);
    auto from = filled<float>(64 << 20), to = from;
    machine.bytes = 2.0 * from.size() * sizeof(float) / median_seconds([&] {
#pragma omp parallel for schedule(static)
                        for (size_t i = 0; i < from.size(); i++) to[i] = from[i];
                    });
    printf("%d threads, %s, storage %s: fp32 FMA %.0f GFLOP/s, copy %.1f GB/s\n", ctx.threads, be::Ctx::isa_name(),
           precision_name, machine.flops / 1e9, machine.bytes / 1e9);
    if (argc >= 4) {
        bench_step(ctx, argv[1], atoi(argv[2]), atoi(argv[3]));
        return 0;
    }
    bench_step(ctx, "gpt2-124m", 1, 1024);
    bench_step(ctx, "gpt2-124m", 4, 64);
    bench_step(ctx, "quickstart", 8, 256);
    bench_checkpoint(ctx, "gpt2-124m");
    bench_ops(ctx, machine);
}
