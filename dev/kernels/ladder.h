// Shared by all ladders. A ladder is one op written several times, from the obvious kernel to the trainer's; each version is a
// rung. Every rung is first compared with the op's definition (cpu::, plain loops) on small odd sizes, then, on a GPU, also at
// a large size, and timed there.
//
// A ladder is a Problem and a list of rungs:
//   struct Problem {
//       Problem(ladder::Run&, const Shape&);    // inputs, and cpu::'s results
//       std::string name() const;               // of its shape
//       double work() const;                    // bytes that must be moved, or FLOPs
//       void restore(gpu::Ctx&);                // everything that rungs write, as it was before
//       void check(ladder::Verdict&);           // a rung's output against cpu::'s
//   };
//   ladder::climb<Problem>(run, "adamw", ladder::copy_bound, {{"the first rung", [](gpu::Ctx& ctx, Problem& p) { ... }}, ...},
//                          small_shapes, large_shapes);
//
// Differences. A tensor is compared row by row: |actual - expected| <= rtol |expected| + atol sqrt(row), lengths of the rows
// as vectors; a row of one element compares element by element. NaN never passes. Outputs are NaN until written, are between
// guards, and must have the same bits in two runs, unless a rung declares that it cannot guarantee that.
// Time: the median of single runs between CUDA events. Before each run, outside of the events, overwritten inputs are restored
// (so that each run has the same random numbers) and the L2 cache is filled with other data.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "../../llmc/gpu/memory.cuh"
#include "../../llmc/ops.h"

namespace ladder {

// Largest relative error of one rounding to T.
template <class T>
constexpr double roundoff = std::is_same<T, bf16>::value ? 0x1p-8 : 0x1p-24;
constexpr double u = roundoff<float>;

// Uniform in [low, high), a function of seed and index (SplitMix64, Steele et al., 2014).
inline double uniform(uint64_t seed, uint64_t i, double low, double high) {
    uint64_t x = (i + (seed << 40) + 1) * 0x9E3779B97F4A7C15u;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return low + (high - low) * ((double)((x ^ x >> 31) >> 11) * 0x1p-53);
}
template <class T>
std::vector<T> random(size_t n, uint64_t seed, double low, double high) {
    std::vector<T> x(n);
#pragma omp parallel for
    for (size_t i = 0; i < n; i++) x[i] = (T)(real)uniform(seed, i, low, high);
    return x;
}

// ---- memory ----------------------------------------------------------------------------------------------------------------
// An array that a rung reads or writes, on the device between guards; its initial values are kept there for restore().
template <class T>
class Array {
public:
    // An output: NaN until written.
    explicit Array(size_t n) : n_(n) {
        CUDA(cudaMalloc(&memory_, bytes() + 2 * guard));
        CUDA(cudaMemset(memory_, pattern, bytes() + 2 * guard));
        CUDA(cudaDeviceSynchronize());
    }
    // An input, or an array that a rung changes.
    explicit Array(const std::vector<T>& values) : Array(values.size()) {
        CUDA(cudaMalloc(&first_, bytes()));
        CUDA(cudaMemcpy(first_, values.data(), bytes(), cudaMemcpyHostToDevice));
        CUDA(cudaMemcpy(p(), first_, bytes(), cudaMemcpyDeviceToDevice));
        CUDA(cudaDeviceSynchronize());
    }
    Array(const Array&) = delete;
    Array& operator=(const Array&) = delete;
    ~Array() {
        cudaFree(memory_);
        cudaFree(first_);
    }

    T* p() const { return (T*)(memory_ + guard); }
    size_t size() const { return n_; }
    size_t bytes() const { return n_ * sizeof(T); }

    void restore(gpu::Ctx& ctx) {
        CUDA(cudaMemsetAsync(memory_, pattern, guard, ctx.stream));
        CUDA(cudaMemsetAsync(memory_ + guard + bytes(), pattern, guard, ctx.stream));
        if (first_) CUDA(cudaMemcpyAsync(p(), first_, bytes(), cudaMemcpyDeviceToDevice, ctx.stream));
        else CUDA(cudaMemsetAsync(p(), pattern, bytes(), ctx.stream));
    }
    std::vector<T> download(gpu::Ctx& ctx) const {
        std::vector<T> values(n_);
        gpu::download(ctx, (void*)values.data(), p(), bytes());
        return values;
    }
    bool guards_are_whole(gpu::Ctx& ctx) const {
        std::vector<uint8_t> guards(2 * guard);
        gpu::download(ctx, guards.data(), memory_, guard);
        gpu::download(ctx, guards.data() + guard, memory_ + guard + bytes(), guard);
        return std::all_of(guards.begin(), guards.end(), [](uint8_t byte) { return byte == pattern; });
    }

private:
    static constexpr size_t guard = 256;
    static constexpr uint8_t pattern = 0xff;  // NaN in every float type
    size_t n_;
    uint8_t* memory_ = nullptr;
    T* first_ = nullptr;
};

// ---- right or wrong --------------------------------------------------------------------------------------------------------
class Verdict {
public:
    explicit Verdict(gpu::Ctx& ctx) : ctx_(ctx) {}

    // rows of `row` elements, see the top of this file
    template <class T>
    void close(const char* name, const Array<T>& array, const std::vector<T>& expected, size_t row, double rtol, double atol) {
        close(name, values(name, array), expected, row, rtol, atol);
    }
    template <class T>
    std::vector<T> values(const char* name, const Array<T>& array) {
        if (!array.guards_are_whole(ctx_)) complain(format("%s: written beyond its ends", name));
        return array.download(ctx_);
    }
    template <class T>
    void close(const char* name, const std::vector<T>& actual, const std::vector<T>& expected, size_t row, double rtol,
               double atol) {
        CHECK(actual.size() == expected.size() && expected.size() % row == 0, "%s", name);
        const auto difference_of = [&](size_t r, double& allowed) {
            double difference = 0, square = 0;
            for (size_t i = r * row; i < (r + 1) * row; i++) {
                const double a = (double)(real)actual[i], e = (double)(real)expected[i];
                difference += (a - e) * (a - e);
                square += e * e;
            }
            allowed = rtol * std::sqrt(square) + atol * std::sqrt((double)row);
            return std::sqrt(difference);
        };
        const size_t rows = expected.size() / row;
        double worst = 0;
        size_t wrong = 0;
        uint64_t bits = 0;
#pragma omp parallel for reduction(max : worst) reduction(+ : wrong, bits)
        for (size_t r = 0; r < rows; r++) {
            double allowed;
            const double difference = difference_of(r, allowed);
            if (!(difference <= allowed)) wrong++;
            if (difference > 0) worst = std::max(worst, difference / allowed);
            for (size_t i = r * row; i < (r + 1) * row; i++) {
                uint32_t word = 0;
                memcpy(&word, &actual[i], sizeof(T));
                bits += (word + 1) * ((2 * (uint64_t)i + 1) * 0x9E3779B97F4A7C15u);
            }
        }
        worst_ = std::max(worst_, worst);
        bits_ = bits_ * 31 + bits;
        if (wrong == 0) return;
        double allowed = 0, difference = 0;
        size_t r = 0;
        while ((difference = difference_of(r, allowed)) <= allowed) r++;
        complain(format("%s: %zu of %zu rows of %zu; row %zu differs by %g, allowed %g (its first element is %g, expected %g)",
                        name, wrong, rows, row, r, difference, allowed, (double)(real)actual[r * row],
                        (double)(real)expected[r * row]));
    }

    const std::string& complaint() const { return complaint_; }
    double worst() const { return worst_; }  // as a fraction of the allowed difference
    uint64_t bits() const { return bits_; }  // differ if anything compared does

private:
    void complain(const std::string& what) { complaint_ += (complaint_.empty() ? "" : "; ") + what; }
    gpu::Ctx& ctx_;
    std::string complaint_;
    double worst_ = 0;
    uint64_t bits_ = 0;
};

// ---- a run of the program --------------------------------------------------------------------------------------------------
struct Run {
#ifdef EMU_TSAN  // reports OpenMP's barriers as races, and needs milliseconds for each thread of a kernel
    static constexpr int host_threads = 1;
    static constexpr bool brief = true;
#else
    static constexpr int host_threads = 0;  // all
    static constexpr bool brief = false;
#endif
    gpu::Ctx ctx{host_threads};
    cpu::Ctx oracle{host_threads};
    bool large = !emulated();  // also check and time the large sizes
    int only = 0;              // a rung's number, or 0 for all
    bool wrong = false;
    bool climbed = false;    // an op with this rung was found;
    std::string lacks_rung;  // or the reason why it is missing

    static bool emulated() { return strcmp(gpu::backend_name, "emu") == 0; }

    // Median seconds of only f; `before` runs ahead of each time, unmeasured.
    double seconds(const std::function<void()>& before, const std::function<void()>& f) {
        struct Event {
            cudaEvent_t event;
            Event() { CUDA(cudaEventCreate(&event)); }
            ~Event() { cudaEventDestroy(event); }
        } start, end;
        if (!flush_) {
            cudaDeviceProp device;
            CUDA(cudaGetDeviceProperties(&device, ctx.device));
            flush_ = std::make_unique<Array<char>>(2 * (size_t)device.l2CacheSize);
        }
        std::vector<double> times;
        double spent = 0;
        for (int i = 0; i < 100 && (i < 5 || spent < 1); i++) {
            before();
            flush_->restore(ctx);
            CUDA(cudaEventRecord(start.event, ctx.stream));
            f();
            CUDA(cudaEventRecord(end.event, ctx.stream));
            CUDA(cudaEventSynchronize(end.event));
            float ms;
            CUDA(cudaEventElapsedTime(&ms, start.event, end.event));
            if (i > 0) {
                times.push_back(ms * 1e-3);
                spent += ms * 1e-3;
            }  // the first one warms up
        }
        std::nth_element(times.begin(), times.begin() + (long)times.size() / 2, times.end());
        return times[times.size() / 2];
    }

private:
    std::unique_ptr<Array<char>> flush_;
};

// The bound that a ladder's figures are compared with: measured once in the same run.
struct Bound {
    const char *unit, *name;
    double scale;             // of the unit
    double (*measure)(Run&);  // per second
};
inline double copy_rate(Run& run) {  // bytes read and written
    const Array<float> from(random<float>((size_t)1 << 28, 1, -1, 1)), to((size_t)1 << 28);
    return 2.0 * (double)from.bytes() /
           run.seconds(
               [] {}, [&] { CUDA(cudaMemcpyAsync(to.p(), from.p(), from.bytes(), cudaMemcpyDeviceToDevice, run.ctx.stream)); });
}
constexpr Bound copy_bound{"GB/s", "copy", 1e9, copy_rate};

template <class Problem>
struct Rung {
    const char* teaches;
    void (*run)(gpu::Ctx&, Problem&);
    bool same_bits = true;                            // in every run
    std::string (*lacks)(const gpu::Ctx&) = nullptr;  // why this machine cannot run it, or empty
};

// Runs it twice, from the same start, on scratch memory that holds NaN. Returns the problem.
template <class Problem>
std::string check(Run& run, Problem& problem, const Rung<Problem>& rung, double& worst) {
    uint64_t bits[2];
    for (uint64_t& b : bits) {
        void* scratch = run.ctx.scratch(1);
        CUDA(cudaMemsetAsync(scratch, 0xff, run.ctx.scratch_bytes(), run.ctx.stream));
        problem.restore(run.ctx);
        try {
            rung.run(run.ctx, problem);
        } catch (const Error& e) {
            return problem.name() + ": " + e.what();
        }
        Verdict verdict(run.ctx);
        problem.check(verdict);
        worst = std::max(worst, verdict.worst());
        b = verdict.bits();
        if (!verdict.complaint().empty()) return problem.name() + ": " + verdict.complaint();
    }
    return rung.same_bits && bits[0] != bits[1] ? problem.name() + ": other bits the second time" : "";
}

template <class Problem, class Shape>
void climb(Run& run, const char* op, const Bound& bound, const std::vector<Rung<Problem>>& rungs,
           std::vector<Shape> small_shapes, const std::vector<Shape>& large_shapes) {
    const int n_rungs = (int)rungs.size();
    if (run.only > n_rungs) {  // another op of the ladder may have it
        run.lacks_rung = format("--kernel is %d; %s has rungs 1 to %d", run.only, op, n_rungs);
        return;
    }
    run.climbed = true;
    if (Run::brief) small_shapes.resize(1);
    const auto each_rung = [&](auto f) {
        for (int i = 0; i < n_rungs; i++) {
            if (run.only && run.only != i + 1) continue;
            const std::string lacks = rungs[i].lacks ? rungs[i].lacks(run.ctx) : "";
            f(i + 1, rungs[i], lacks);
        }
    };
    const auto report = [&](int number, const Rung<Problem>& rung, const std::string& wrong, double worst) {
        if (wrong.empty()) printf("ok: %s %d, %s (%.0f%% of the allowed difference)\n", op, number, rung.teaches, 100 * worst);
        else printf("FAILED: %s %d, %s: %s\n", op, number, rung.teaches, wrong.c_str());
        run.wrong |= !wrong.empty();
        fflush(stdout);
    };

    run.oracle.plain = true;
    std::vector<std::unique_ptr<Problem>> problems;
    for (const Shape& shape : small_shapes) problems.push_back(std::make_unique<Problem>(run, shape));
    each_rung([&](int number, const Rung<Problem>& rung, const std::string& lacks) {
        if (!lacks.empty()) return (void)printf("skipped: %s %d, %s: %s\n", op, number, rung.teaches, lacks.c_str());
        std::string wrong;
        double worst = 0;
        for (const auto& problem : problems)
            if (wrong.empty()) wrong = check(run, *problem, rung, worst);
        report(number, rung, wrong, worst);
    });
    problems.clear();
    if (Run::emulated()) return (void)printf("%s: not timed on the emulator\n\n", op);
    if (!run.large) return;

    run.oracle.plain = false;  // plain loops would take minutes; the tests of cpu:: compare its fast ones with them
    const double most = bound.measure(run);
    for (const Shape& shape : large_shapes) {
        Problem problem(run, shape);
        printf("\n%s, %s; %s: %.1f %s\n", op, problem.name().c_str(), bound.name, most / bound.scale, bound.unit);
        printf("%-60s %10s %10s  %s\n", "rung", "ms", bound.unit, "of the bound");
        each_rung([&](int number, const Rung<Problem>& rung, const std::string& lacks) {
            if (!lacks.empty()) return (void)printf("%2d  %-56s %s\n", number, rung.teaches, lacks.c_str());
            double worst = 0;
            const std::string wrong = check(run, problem, rung, worst);
            if (!wrong.empty()) return report(number, rung, wrong, worst);
            const double seconds = run.seconds([&] { problem.restore(run.ctx); }, [&] { rung.run(run.ctx, problem); });
            const double rate = problem.work() / seconds;
            printf("%2d  %-56s %10.3f %10.1f  %3.0f%%\n", number, rung.teaches, seconds * 1e3, rate / bound.scale,
                   100 * rate / most);
            fflush(stdout);
        });
    }
    printf("\n");
}

// The program: options, errors, exit status (1 if any rung is wrong).
inline int main(int argc, char** argv, const char* what, void (*climb_all)(Run&)) try {
    std::string sizes;
    int only = 0;
    for (int i = 1; i < argc; i += 2) {
        const std::string option = argv[i], value = i + 1 < argc ? argv[i + 1] : "";
        if (option == "--help" || option == "-h") {
            printf(
                "%s\n\n"
                "  --sizes small|full  small: check every rung on small odd sizes; full (on a GPU the default): then check\n"
                "                      and time them at large ones\n"
                "  --kernel N          only rung N\n",
                what);
            return 0;
        }
        if (option == "--sizes" && (value == "small" || value == "full")) sizes = value;
        else if (option == "--kernel" && !value.empty() && value.find_first_not_of("0123456789") == std::string::npos)
            only = atoi(value.c_str());
        else fail("'%s %s' is not understood; HINT: --help lists the options", option.c_str(), value.c_str());
    }
    Run run;
    run.only = only;
    if (!sizes.empty()) run.large = sizes == "full";
    printf("%s, %s, storage %s\n", gpu::backend_name, run.ctx.description().c_str(), precision_name);
    climb_all(run);
    if (!run.climbed) fail("%s", run.lacks_rung.c_str());
    return run.wrong;
} catch (const Error& e) {
    fprintf(stderr, "error: %s\n", e.what());
    return 1;
}

}  // namespace ladder
