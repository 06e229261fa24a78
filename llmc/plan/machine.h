// The machine of a run, as log and report describe it: processor, host, memory, and the peak that MFU is relative to.
#pragma once
#include <sys/resource.h>
#include <unistd.h>

#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "../cpu/peak.h"
#include "../ops.h"
#include "planner.h"
#include "../base/clock.h"
#include "../base/terminal.h"
#include "../base/text.h"
#include "../parallel/world.h"
#if !defined(BACKEND_CUDA) && !defined(BACKEND_EMU)
#include "../cpu/unit_choice.h"
#endif

// The peak FLOP/s of all ranks in this precision, the denominator of MFU; 0: not known.
struct Peak {
    double flops = 0, flops_in_fp8 = 0;  // flops_in_fp8 0: FP8 is not faster
    std::string name;                    // of the device
    double of_step(bool in_fp8) const { return in_fp8 && flops_in_fp8 > 0 ? flops_in_fp8 : flops; }
    std::string text() const { return flops > 0 ? human_flops(flops) + ", " + name : "not known"; }
};

// The peak of a GPU that is planned for.
inline Peak planned_peak(const TrainOptions& o) {
    const Device device = find_device(o.device);
    const double flops = 1e12 * o.device_tflops.value_or(device.tflops);
    return {flops, device.capability >= 89 ? 2 * flops : 0,
            std::string("dense bf16 by ") + (o.device_tflops ? "--device-tflops" : "the vendor")};
}

// The peak of this rank. A CPU's is measured in a few milliseconds; a GPU's is its vendor's figure.
inline Peak peak_of(const cpu::Ctx& ctx) {
    const cpu::RegisterRates rates = cpu::measure_registers(ctx.threads, 0.003);
    return {rates.best(), 0, format("%s registers, measured", rates.best_name())};
}
inline size_t memory_of_device(const cpu::Ctx&) { return cpu::available_memory(); }
inline std::string processor_of(const cpu::Ctx&) { return cpu::processor_name(); }
inline void plan_for(cpu::Ctx&, const TrainOptions&) {}
inline std::string slow_attention_note(const cpu::Ctx&, const ModelConfig&) { return ""; }
#if defined(BACKEND_CUDA) || defined(BACKEND_EMU)
inline Peak peak_of(const gpu::Ctx& ctx) {
    const double flops = gpu_tflops(ctx.name) * 1e12;
    return {flops, ctx.capability >= 89 ? 2 * flops : 0, "dense bf16 by the vendor"};
}
inline std::string processor_of(const gpu::Ctx& ctx) { return ctx.name; }
inline size_t memory_of_device(const gpu::Ctx& ctx) { return ctx.memory_bytes; }
inline std::string slow_attention_note(const gpu::Ctx& ctx, const ModelConfig& c) {
    return slow_attention_note(c, ctx.capability, std::is_same<floatX, bf16>::value);
}
inline Strings choose_matrix_unit(World&, gpu::Ctx&, const std::string& asked, const Strings& /*before*/) {
    if (!asked.empty()) fail_usage("--matrix-unit is only for CPUs; HINT: on a GPU, use --gemm-cache");
    return {};
}
// Without a GPU, plans use --device.
inline void plan_for(gpu::Ctx& ctx, const TrainOptions& o) {
    if (ctx.has_device()) return;
    std::string name = o.device;
    std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return (char)toupper(c); });
    ctx.name = name + " of the plan (--device); there is no GPU here";
    ctx.capability = find_device(o.device).capability;
    ctx.memory_bytes = (size_t)planned_memory_bytes(o);
}
#else
// Chooses the matrix unit of this rank. Returns the record for a checkpoint; `before`: the resumed checkpoint's record.
inline Strings choose_matrix_unit(World& world, cpu::Ctx& ctx, const std::string& asked, const Strings& before) {
    const auto all_gather = [&](const std::string& mine) { return world.all_gather(mine); };
    return cpu::choose_matrix_unit(ctx, asked, before, world.rank(), all_gather);
}
#endif

// The peak of all ranks. If a host's ranks have more CPU threads than cores, each counts as its share of a core. tflops: of one
// GPU, if given by the user.
inline Peak peak_of_all(World& world, const be::Ctx& ctx, std::optional<double> tflops) {
    Peak peak = peak_of(ctx);
    if (tflops && !be::memory_is_host)
        peak = {*tflops * 1e12, be::fp8_limits(ctx).empty() ? 2e12 * *tflops : 0, "dense bf16 by --device-tflops"};
    std::vector<int> threads((size_t)world.size());
    world.all_gather(&ctx.threads, sizeof ctx.threads, threads.data());
    double on_this_host = 0;
    for (int r = 0; r < world.size(); r++)
        if (world.on_one_machine((size_t)r, (size_t)world.rank())) on_this_host += threads[r];
    const double cores = (double)sysconf(_SC_NPROCESSORS_ONLN),
                 share = be::memory_is_host ? std::min(1.0, cores / on_this_host) : 1;
    const double mine[2] = {share * peak.flops, share * peak.flops_in_fp8};
    std::vector<double> all(2 * (size_t)world.size());
    world.all_gather(mine, sizeof mine, all.data());
    peak.flops = peak.flops_in_fp8 = 0;
    for (size_t i = 0; i < all.size(); i += 2) {
        peak.flops += all[i];
        peak.flops_in_fp8 += all[i + 1];
    }
    if (world.size() > 1) peak.name += format(", of %d ranks together", world.size());
    return peak;
}

// Peak physical memory of this process.
inline size_t peak_memory_bytes() {
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    return (size_t)usage.ru_maxrss * 1024;
}

// Physical memory of this process now.
inline size_t resident_memory_bytes() {
    size_t pages = 0;
    if (FILE* f = fopen("/proc/self/statm", "r")) {
        if (fscanf(f, "%*u %zu", &pages) != 1) pages = 0;
        fclose(f);
    }
    return pages * (size_t)sysconf(_SC_PAGESIZE);
}

// Memory in use by this process, or all memory in use on its GPU. Queried at most once a second: GPU drivers are slow to
// answer, and a step may take milliseconds.
inline size_t memory_in_use([[maybe_unused]] const be::Ctx& ctx) {
    static size_t bytes = 0;
    static double looked = -INFINITY;
    if (monotonic_seconds() - looked < 1) return bytes;
    looked = monotonic_seconds();
#if defined(BACKEND_CUDA) || defined(BACKEND_EMU)
    const size_t free = be::free_memory();
    return bytes = ctx.memory_bytes > free ? ctx.memory_bytes - free : 0;
#else
    return bytes = resident_memory_bytes();
#endif
}

// The machine, for the log's run record.
inline nlohmann::ordered_json describe_machine(const World& world, const be::Ctx& ctx, const Peak& peak) {
    std::map<std::string, int> ranks;
    for (const std::string& host : world.hosts()) ranks[host]++;
    std::string hosts;
    for (const auto& [host, n] : ranks) {
        if (hosts.size() > 400) {
            hosts += ", ...";
            break;
        }
        hosts += (hosts.empty() ? "" : ", ") + host + (world.size() > 1 ? format(" (%d)", n) : "");
    }
    const double pages = (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE);
    return {{"processor", processor_of(ctx)},
            {"host", hosts},
            {"ranks", world.size()},
            {"backend", std::string(be::backend_name) + ", " + ctx.description()},
            {"memory of the host", human_bytes(pages)},
            {"peak", peak.text()}};
}

// Threads of this rank, as ranks of one machine share its cores; 0 if the user has set OpenMP's.
inline int share_of_machine(World& world) {
    const std::vector<int> mine = cpu::cores_of(cpu::usable_cpus());
    const std::vector<std::string> all = world.all_gather(std::string((const char*)mine.data(), mine.size() * sizeof(int)));
    std::vector<std::vector<int>> here;
    std::set<int> used;
    for (int r = 0; r < world.size(); r++) {
        if (!world.is_here(r)) continue;
        const int* cores = (const int*)all[r].data();
        here.emplace_back(cores, cores + all[r].size() / sizeof(int));
        used.insert(here.back().begin(), here.back().end());
    }
    if (getenv("OMP_NUM_THREADS")) return 0;
    const size_t possible = cpu::cores_of(cpu::possible_cpus()).size();
    if (be::memory_is_host && world.has_mpi() && world.rank() == 0 && 2 * used.size() <= possible)
        print_line(stderr,
                   format("note: the %zu rank%s on %s may use %zu of %zu cores; HINT: mpirun --bind-to none shares all of them",
                          here.size(), here.size() == 1 ? "" : "s", world.host().c_str(), used.size(), possible));
    return cpu::share_of_cores(mine, here, cpu::cpu_quota());
}
// Each rank has a GPU. plans: a single process that only plans needs none.
inline be::Ctx make_ctx(World& world, int threads, bool plans = false) {
    if (!threads && (world.size() > 1 || world.has_mpi())) threads = share_of_machine(world);
    return be::Ctx(threads, world.local_rank(), plans && world.size() == 1);
}
