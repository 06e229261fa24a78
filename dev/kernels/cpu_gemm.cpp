// Ladder: a linear layer's forward pass on a CPU, out (N, OC) = inp (N, IC) weight (OC, IC)^T, bf16 with fp32 sums.
// (llmc/cpu/matmul.h has the derivatives, llmc/cpu/gemm.h the end of the ladder.) 2 N IC OC operations on (N + OC) IC numbers:
// bound by the arithmetic units, if the numbers are in a near cache when needed.
//
//   1  the definition                one chain of additions: each waits for the one before, and nothing is vectorized
//   2  sixteen sums at once          vectors; but each pair of numbers is loaded, widened to fp32 and used once
//   3  tiles in registers            4 rows and 64 columns of out stay in registers, so that a number that was loaded and
//                                    widened is used for 64 or 4 of them; widened copies of a panel of weights stay cached
//   4  the matrix unit               if it multiplies bf16: half the bytes, no widening, two products (AVX512-BF16) or 32
//                                    (AMX) instead of one
//   5  the trainer's                 packing by vectors; blocks of rows, columns and k for each cache; both threads pack
//   6  oneDNN                        for comparison, if the program is built with it
//
//   make ladders     build/cpu-bf16/ladder_cpu_gemm [--sizes small|full] [--kernel N]
// Each rung is compared with the first one's sums in double, with the bound of fp32 sums; then timed: medians of alternating
// runs.
#include <array>
#include <chrono>
#include <cstdio>
#include <map>

#ifdef LADDER_ONEDNN  // CXXFLAGS=-DLADDER_ONEDNN LDLIBS=-ldnnl make ladders
#include <oneapi/dnnl/dnnl.hpp>
#define HAVE_ONEDNN 1
#endif

#include "../../llmc/cpu/attention.h"
#include "../../llmc/cpu/fp8.h"
#include "../../llmc/cpu/matmul.h"
#include "../../llmc/cpu/memory.h"

namespace {

// The trainer's allocation of tensors: huge pages, and rows that start at a cache line.
template <class E>
struct TrainersMemory {
    using value_type = E;
    E* allocate(size_t n) { return (E*)cpu::allocate_memory(n * sizeof(E)); }
    void deallocate(E* x, size_t n) { cpu::release_memory(x, n * sizeof(E)); }
    bool operator==(const TrainersMemory&) const { return true; }
    bool operator!=(const TrainersMemory&) const { return false; }
};
using Numbers = std::vector<bf16, TrainersMemory<bf16>>;

struct Layer {
    int N, IC, OC;
    Numbers inp, weight, out;
    Layer(int rows, int in, int wide) : N(rows), IC(in), OC(wide) {
        const auto fill = [](Numbers& x, size_t n, uint64_t seed) {
            x.resize(n);
            for (size_t i = 0; i < n; i++) x[i] = bf16((float)((i * 2654435761u + seed) >> 8 & 0xfff) / 2048.0f - 1.0f);
        };
        fill(inp, (size_t)N * IC, 1);
        fill(weight, (size_t)OC * IC, 2);
        out.resize((size_t)N * OC);
    }
    bf16* row_of_out(int n) { return &out[(size_t)n * OC]; }
    const bf16* row_of_inp(int n) const { return &inp[(size_t)n * IC]; }
    const bf16* row_of_weight(int o) const { return &weight[(size_t)o * IC]; }
};

// ---- 1: the definition -----------------------------------------------------------------------------------------------------
void definition(cpu::Ctx&, Layer& l) {
    cpu::plain::linear_forward(l.out.data(), l.inp.data(), l.weight.data(), nullptr, l.N, l.IC, l.OC);
}

// ---- 2: sixteen sums at once -----------------------------------------------------------------------------------------------
void sixteen_sums(cpu::Ctx&, Layer& l) {
    const int whole = l.IC / 16 * 16;
#pragma omp parallel for schedule(static)
    for (int n = 0; n < l.N; n++)
        for (int o = 0; o < l.OC; o++) {
            const bf16 *x = l.row_of_inp(n), *w = l.row_of_weight(o);
            float part[16] = {}, sum = 0;
            for (int i = 0; i < whole; i += 16)
                for (int k = 0; k < 16; k++) part[k] += (float)x[i + k] * (float)w[i + k];
            for (int i = whole; i < l.IC; i++) sum += (float)x[i] * (float)w[i];
            for (int k = 0; k < 16; k++) sum += part[k];
            l.row_of_out(n)[o] = bf16(sum);
        }
}

// ---- 3: tiles in registers -------------------------------------------------------------------------------------------------
typedef float vector_t __attribute__((vector_size(64)));
constexpr int panel = 64, tile_rows = 4, vectors = panel / 16;

// out (4 rows, 64 columns) from rows of inp as fp32 and a panel (IC, 64)
void register_tile(float* sums, const float* x, size_t stride, const float* columns, int IC) {
    vector_t sum[tile_rows][vectors] = {};
    for (int i = 0; i < IC; i++)
        for (int r = 0; r < tile_rows; r++)
            for (int v = 0; v < vectors; v++)
                sum[r][v] += x[(size_t)r * stride + i] * *(const vector_t*)(columns + (size_t)i * panel + v * 16);
    memcpy(sums, sum, sizeof sum);
}
void tiles_in_registers(cpu::Ctx& ctx, Layer& l) {
    const int rows = round_up(l.N, tile_rows);
    float* wide = (float*)ctx.scratch(sizeof(float) * ((size_t)rows * l.IC + (size_t)ctx.threads * l.IC * panel));
    std::fill(wide, wide + (size_t)rows * l.IC, 0.0f);
    for (size_t i = 0; i < l.inp.size(); i++) wide[i] = (float)l.inp[i];
#pragma omp parallel num_threads(ctx.threads)
    {
        float* columns = wide + (size_t)rows * l.IC + (size_t)omp_get_thread_num() * l.IC * panel;
#pragma omp for schedule(static)
        for (int o0 = 0; o0 < l.OC; o0 += panel) {
            const int width = std::min(panel, l.OC - o0);
            for (int i = 0; i < l.IC; i++)
                for (int o = 0; o < panel; o++)
                    columns[(size_t)i * panel + o] = o < width ? (float)l.row_of_weight(o0 + o)[i] : 0;
            for (int n0 = 0; n0 < l.N; n0 += tile_rows) {
                alignas(64) float sums[tile_rows * panel];
                register_tile(sums, wide + (size_t)n0 * l.IC, (size_t)l.IC, columns, l.IC);
                for (int n = n0; n < std::min(n0 + tile_rows, l.N); n++)
                    for (int o = 0; o < width; o++) l.row_of_out(n)[o0 + o] = bf16(sums[(n - n0) * panel + o]);
            }
        }
    }
}

// ---- 4: the matrix unit ----------------------------------------------------------------------------------------------------
// Right operands are packed word by word, as the unit multiplies them, and each 16 rows are multiplied with the whole panel.
template <class E>
void on_unit(const cpu::MatrixUnit<E>& unit, cpu::Ctx& ctx, Layer& l) {
    const size_t panel_size = (size_t)l.IC * panel, rows_size = (size_t)l.IC * 16;
    E* memory = (E*)ctx.scratch(sizeof(E) * (panel_size + rows_size) * (size_t)ctx.threads);
#pragma omp parallel num_threads(ctx.threads)
    {
        E *packed = memory + (panel_size + rows_size) * (size_t)omp_get_thread_num(), *rows = packed + panel_size;
        unit.begin();
#pragma omp for schedule(static)
        for (int o0 = 0; o0 < l.OC; o0 += panel) {
            const int width = std::min(panel, l.OC - o0);
            for (int o = 0; o < width; o++)
                for (int i = 0; i < l.IC; i++) packed[cpu::right_index<E>(i, o, l.IC)] = E((float)l.row_of_weight(o0 + o)[i]);
            for (int n0 = 0; n0 < l.N; n0 += 16) {
                const int there = std::min(16, l.N - n0);
                const bf16* inp = l.row_of_inp(n0);
                for (size_t i = 0; i < rows_size; i++) rows[i] = i < (size_t)there * l.IC ? E((float)inp[i]) : E(0);
                alignas(64) float sums[16 * panel];
                unit.product(sums, panel, rows, l.IC, packed, l.IC, 16, width, l.IC, false, cpu::Streamed::neither, nullptr);
                for (int n = 0; n < there; n++)
                    for (int o = 0; o < width; o++) l.row_of_out(n0 + n)[o0 + o] = bf16(sums[n * panel + o]);
            }
        }
        unit.end();
    }
}
void on_the_matrix_unit(cpu::Ctx& ctx, Layer& l) {
    std::visit([&](const auto* unit) { on_unit(*unit, ctx, l); }, ctx.layers);
}

// ---- 5: the trainer's ------------------------------------------------------------------------------------------------------
void the_trainers(cpu::Ctx& ctx, Layer& l) {
    cpu::linear_forward(ctx, l.out.data(), l.inp.data(), l.weight.data(), nullptr, l.N, l.IC, l.OC);
}

// ---- 6: oneDNN's -----------------------------------------------------------------------------------------------------------
#if HAVE_ONEDNN
void the_librarys(cpu::Ctx&, Layer& l) {
    using dnnl::memory;
    static dnnl::engine engine(dnnl::engine::kind::cpu, 0);
    static dnnl::stream stream(engine);
    const auto type = memory::data_type::bf16;
    const memory::desc inp({l.N, l.IC}, type, memory::format_tag::ab), weight({l.IC, l.OC}, type, memory::format_tag::ba),
        out({l.N, l.OC}, type, memory::format_tag::ab);
    static std::map<std::array<int, 3>, dnnl::matmul> compiled;  // compilation takes milliseconds
    const std::array<int, 3> key = {l.N, l.IC, l.OC};
    if (!compiled.count(key)) compiled.emplace(key, dnnl::matmul({dnnl::matmul::desc(inp, weight, out), engine}));
    compiled[key].execute(stream, {{DNNL_ARG_SRC, memory(inp, engine, l.inp.data())},
                                   {DNNL_ARG_WEIGHTS, memory(weight, engine, l.weight.data())},
                                   {DNNL_ARG_DST, memory(out, engine, l.out.data())}});
    stream.wait();
}
#endif

struct Rung {
    const char* teaches;
    void (*run)(cpu::Ctx&, Layer&);
    bool on_unit;
};
const std::vector<Rung> rungs = {
    {"the definition", definition, false},
    {"sixteen sums at once: vectors", sixteen_sums, false},
    {"tiles in registers: a number is used often", tiles_in_registers, false},
    {"the matrix unit", on_the_matrix_unit, true},
    {"the trainer's: packed by vectors, blocks for each cache", the_trainers, true},
#if HAVE_ONEDNN
    {"oneDNN, for comparison", the_librarys, false},
#endif
};

// The largest difference as a fraction of the allowed one; NaN if there is one in out.
double check(const Layer& l) {
    double worst = 0;
#pragma omp parallel for reduction(max : worst)
    for (int n = 0; n < l.N; n++)
        for (int o = 0; o < l.OC; o++) {
            double sum = 0, magnitude = 0;
            for (int i = 0; i < l.IC; i++) {
                const double x = (double)(float)l.row_of_inp(n)[i] * (double)(float)l.row_of_weight(o)[i];
                sum += x;
                magnitude += std::abs(x);
            }
            const double allowed = (l.IC + 2) * 0x1p-24 * magnitude + 0x1.01p-8 * std::abs(sum) + 1e-30;
            const double part = std::abs((double)(float)l.out[(size_t)n * l.OC + o] - sum) / allowed;
            worst = part <= worst ? worst : std::isnan(part) ? INFINITY : part;
        }
    return worst;
}

double seconds_of(const Rung& rung, cpu::Ctx& ctx, Layer& l) {
    const auto start = std::chrono::steady_clock::now();
    rung.run(ctx, l);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// The peak of the unit: a product whose factors stay in the L1 cache, repeatedly, on all threads.
template <class E>
double peak(const cpu::MatrixUnit<E>& unit, int threads) {
    constexpr int M = 32, N = 32, K = 128 * cpu::of_word<E>, rounds = 50000;
    const auto start = std::chrono::steady_clock::now();
#pragma omp parallel num_threads(threads)
    {
        alignas(64) E a[M * K], b[K * N];
        alignas(64) float c[M * N];
        std::fill(a, a + M * K, E(1));
        std::fill(b, b + K * N, E(1));
        unit.begin();
        for (int i = 0; i < rounds; i++) unit.product(c, N, a, K, b, K, M, N, K, false, cpu::Streamed::neither, nullptr);
        unit.end();
    }
    return 2.0 * M * N * K * rounds * threads / std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

int main(int argc, char** argv) try {
    bool large = true;
    size_t only = 0;
    for (int i = 1; i < argc; i += 2) {
        const std::string option = argv[i], value = i + 1 < argc ? argv[i + 1] : "";
        if (option == "--help" || option == "-h") {
            printf(
                "A linear layer on this CPU, from the definition to the trainer's.\n\n"
                "  --sizes small|full  small: check every rung on small odd sizes; full (default): then check and time them\n"
                "  --kernel N          only rung N\n");
            return 0;
        }
        if (option == "--sizes" && (value == "small" || value == "full")) large = value == "full";
        else if (option == "--kernel" && !value.empty() && value.find_first_not_of("0123456789") == std::string::npos)
            only = (size_t)atoi(value.c_str());
        else fail("'%s %s' is not understood; HINT: --help lists the options", option.c_str(), value.c_str());
    }
    if (only > rungs.size()) fail("--kernel is %zu; cpu_gemm has rungs 1 to %zu", only, rungs.size());
    cpu::Ctx ctx;
    printf("%s\n", ctx.description().c_str());
    bool wrong = false;
    const auto checked = [&](size_t i, Layer& l) {
        std::fill(l.out.begin(), l.out.end(), bf16(NAN));
        rungs[i].run(ctx, l);
        const double worst = check(l);
        if (worst <= 1) return true;
        printf("FAILED: cpu_gemm %zu, %s: (%d, %d, %d) is off by %g of what is allowed\n", i + 1, rungs[i].teaches, l.N, l.IC,
               l.OC, worst);
        wrong = true;
        return false;
    };
    for (size_t i = 0; i < rungs.size(); i++) {
        if (only && only != i + 1) continue;
        bool right = true;
        for (const auto& [N, IC, OC] : {std::array<int, 3>{7, 32, 16}, {16, 96, 80}, {133, 64, 144}, {33, 1056, 48}}) {
            Layer l(N, IC, OC);
            right = right && checked(i, l);
        }
        if (right) printf("ok: cpu_gemm %zu, %s\n", i + 1, rungs[i].teaches);
    }
    if (!large || wrong) return wrong;

    Layer l(1024, 768, 3072);
    const double operations = 2.0 * l.N * l.IC * l.OC,
                 most = std::visit([&](const auto*unit) { return peak(*unit, ctx.threads); }, ctx.layers);
    printf("\n%d x %d x %d; the matrix unit alone: %.0f GFLOP/s\n%-62s %10s %10s  %s\n", l.N, l.IC, l.OC, most / 1e9, "rung",
           "ms", "GFLOP/s", "of the unit");
    std::vector<std::vector<double>> times(rungs.size());
    for (int round = 0; round < 9; round++)
        for (size_t i = 0; i < rungs.size(); i++) {
            if ((only && only != i + 1) || (i == 0 && round > 2)) continue;
            if (round == 0 && !checked(i, l)) continue;
            times[i].push_back(seconds_of(rungs[i], ctx, l));
        }
    for (size_t i = 0; i < rungs.size(); i++) {
        if (times[i].empty()) continue;
        std::sort(times[i].begin(), times[i].end());
        const double seconds = times[i][times[i].size() / 2];
        printf("%zu  %-58s  %10.2f %10.1f  %3.0f%%\n", i + 1, rungs[i].teaches, seconds * 1e3, operations / seconds / 1e9,
               100 * operations / seconds / most);
    }
    return wrong;
} catch (const Error& e) {
    fprintf(stderr, "error: %s\n", e.what());
    return 1;
}
