// Shared by the benchmarks: clocks and medians, random operands, the machine's bounds, and figures as rows of text or lines of
// JSON, within a time limit.
#pragma once
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string>
#include <vector>

namespace bench {

constexpr bool on_gpu = !be::memory_is_host;
#ifdef BACKEND_EMU
constexpr bool emulated = true;  // small sizes: they check the program, and time nothing
#else
constexpr bool emulated = false;
#endif

inline double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// Median seconds of f, after two warm-up calls: at least 3 rounds and about `budget` seconds.
template <class F>
double median_seconds(be::Ctx& ctx, F f, double budget = on_gpu ? 0.2 : 1.0) {
    if (emulated) budget = 0;
    f();
    f();
    wait_for_device(ctx);
    const auto round = [&](int calls) {
        const double start = now();
        for (int i = 0; i < calls; i++) f();
        wait_for_device(ctx);
        return (now() - start) / calls;
    };
    const int calls = on_gpu ? (int)std::min(1000.0, std::max(1.0, 0.02 / round(1))) : 1;
    std::vector<double> times;
    const double end = now() + budget;
    while (times.size() < 3 || (now() < end && times.size() < 1000)) times.push_back(round(calls));
    std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
    return times[times.size() / 2];
}

// Random numbers in the backend's memory.
template <class E>
class Numbers {
public:
    Numbers(be::Ctx& ctx, size_t n) : n_(n), p_((E*)be::allocate_memory(n * sizeof(E))) {
        std::vector<E> v(n);
#pragma omp parallel for
        for (size_t i = 0; i < n; i++) v[i] = (E)(real)(((i * 2654435761u >> 12) % 1000) / 1000.0 - 0.5);
        be::upload(ctx, p_, v.data(), n * sizeof(E));
    }
    Numbers(const Numbers&) = delete;
    Numbers& operator=(const Numbers&) = delete;
    ~Numbers() { be::release_memory(p_, n_ * sizeof(E)); }
    operator E*() const { return p_; }
    size_t size() const { return n_; }

private:
    size_t n_;
    E* p_;
};

struct Machine {
    double flops;  // the bound that rows are printed against
    const char* flops_name;
    double fp32, bf16;  // measured on a CPU's registers; bf16: 0 without such instructions
    const char* bf16_name = "no bf16";
    double bytes;       // copied per second
    double read_bytes;  // read per second
};

// --json: each figure is a line of JSON instead of a row. --seconds: nothing starts after the limit; the names of skipped
// figures are printed at the end.
class Figures {
public:
    Figures(bool json, double seconds) : json_(json), end_(seconds > 0 ? now() + seconds : INFINITY), seconds_(seconds) {}

    bool json() const { return json_; }
    // Returns false if the time is over, and adds the figure to the skipped ones.
    bool begin(const std::string& name) {
        if (now() < end_) return true;
        if (skipped_.empty() || skipped_.back() != name) skipped_.push_back(name);
        return false;
    }
    bool time_left() const { return now() < end_; }
    // A time, and the rate for `work` (FLOPs).
    void add(const std::string& name, const std::string& variant, double seconds, double work, const Machine& machine) {
        const double rate = work / seconds / 1e12;
        if (json_) line({{"name", name}, {"variant", variant}, {"ms", seconds * 1e3}, {"value", rate}, {"unit", "TFLOP/s"}});
        else
            printf("%-44s %-28s %10.4f ms %8.1f TFLOP/s %5.0f%% of %s\n", name.c_str(), variant.c_str(), seconds * 1e3, rate,
                   100 * work / seconds / machine.flops, machine.flops_name);
        fflush(stdout);
    }
    void note(const std::string& name, const std::string& why) {
        if (json_) line({{"name", name}, {"note", why}});
        else printf("%-44s %s\n", name.c_str(), why.c_str());
    }
    void line(const nlohmann::ordered_json& fields) {
        printf("%s\n", fields.dump().c_str());
        fflush(stdout);
    }
    // The last line: the figures skipped because of the limit.
    void end() {
        for (const std::string& name : skipped_) note(name, format("skipped: the %g seconds were over", seconds_));
    }

private:
    bool json_;
    double end_, seconds_;
    std::vector<std::string> skipped_;
};

}  // namespace bench
