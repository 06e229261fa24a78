// The number of threads for the CPU's ops, their CPUs, their treatment of denormals, and the processor's name.
#pragma once
#include <omp.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <string>
#include <vector>
#ifdef __SSE__
#include <xmmintrin.h>
#endif

#include "cgroup.h"

namespace cpu {

namespace detail {

inline std::vector<int> affinity() {
    std::vector<int> cpus;
#ifdef __linux__
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0)
        for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
            if (CPU_ISSET(cpu, &set)) cpus.push_back(cpu);
#endif
    if (cpus.empty())
        for (int cpu = 0; cpu < omp_get_num_procs(); cpu++) cpus.push_back(cpu);
    return cpus;
}

}  // namespace detail

// The CPUs on which this process may run. With OMP_PROC_BIND these are its places; this thread is bound to the first of them.
inline std::vector<int> usable_cpus() {
    std::vector<int> cpus;
    for (int place = 0; place < omp_get_num_places(); place++) {
        std::vector<int> more((size_t)omp_get_place_num_procs(place));
        omp_get_place_proc_ids(place, more.data());
        cpus.insert(cpus.end(), more.begin(), more.end());
    }
    return cpus.empty() ? detail::affinity() : cpus;
}

// The CPUs on which it could run without a binding, such as mpirun's.
inline std::vector<int> possible_cpus() {
#ifdef __linux__
    cpu_set_t before, all;
    memset(&all, 0xff, sizeof all);
    if (sched_getaffinity(0, sizeof before, &before) == 0 && sched_setaffinity(0, sizeof all, &all) == 0) {
        const std::vector<int> cpus = detail::affinity();
        sched_setaffinity(0, sizeof before, &before);
        return cpus;
    }
#endif
    return detail::affinity();
}

// Their cores, each given by its first CPU. Hyperthreads share a core's arithmetic units and caches; one thread of a matrix
// product saturates them, so a second one would only compete for the cache.
inline std::vector<int> cores_of(const std::vector<int>& cpus, const std::string& system = "/sys/devices/system/cpu") {
    std::vector<int> cores;
    for (const int cpu : cpus) {
        int first = cpu;  // also if the system does not report it
        if (FILE* f = fopen((system + "/cpu" + std::to_string(cpu) + "/topology/thread_siblings_list").c_str(), "r")) {
            if (fscanf(f, "%d", &first) != 1) first = cpu;  // "0,32" or "0-1"
            fclose(f);
        }
        cores.push_back(first);
    }
    std::sort(cores.begin(), cores.end());
    cores.erase(std::unique(cores.begin(), cores.end()), cores.end());
    return cores;
}

// CPU time per wall time that the process's control groups may use, rounded, at least 1; 0: no limit. Containers with a limit
// show all of the machine's CPUs, and throttle a process that exceeds its quota for the rest of each period.
inline int rounded_quota(double cores) { return cores > 0 ? std::max(1, (int)std::lround(cores)) : 0; }
inline int cpu_quota() {
    static const int quota = rounded_quota(cgroup_limits().cores);
    return quota;
}

// The given number of threads, or OpenMP's default within the quota; for work on text.
inline int thread_count(int asked) {
    const int quota = cpu_quota(), all = omp_get_max_threads();
    return asked > 0 ? asked : quota > 0 ? std::min(quota, all) : all;
}

// A rank's share of its machine's cores, given the cores that each rank there may use, including its own: the cores that only
// it may use, and an equal part of the cores it shares with others.
inline int share_of_cores(const std::vector<int>& mine, const std::vector<std::vector<int>>& ranks, int quota) {
    double share = 0;
    for (const int core : mine) {
        int users = 0;
        for (const auto& cores : ranks) users += (int)std::count(cores.begin(), cores.end(), core);
        share += 1.0 / std::max(1, users);
    }
    if (quota) share = std::min(share, (double)quota / (double)ranks.size());
    return std::max(1, (int)(share + 1e-6));
}

// The number of threads requested from OpenMP by the user, or one per core that this process may use.
inline int default_threads() {
    if (getenv("OMP_NUM_THREADS")) return omp_get_max_threads();
    const std::vector<int> cores = cores_of(usable_cpus());
    return share_of_cores(cores, {cores}, cpu_quota());
}

// The number of threads for ops called by this thread.
inline int& op_threads() {
    thread_local int threads = default_threads();
    return threads;
}

// Binds this thread, number i of an op, according to OpenMP's variables (OMP_PROC_BIND, OMP_PLACES); otherwise it may run
// wherever the process may. OpenMP itself binds the first thread.
inline void bind_as_asked([[maybe_unused]] int i, [[maybe_unused]] int threads) {
#ifdef __linux__
    const int places = omp_get_num_places();
    if (omp_get_proc_bind() == omp_proc_bind_false || places == 0) return;
    const int place = threads <= places ? i * places / threads : i % places;
    std::vector<int> cpus((size_t)omp_get_place_num_procs(place));
    omp_get_place_proc_ids(place, cpus.data());
    cpu_set_t set;
    CPU_ZERO(&set);
    for (const int cpu : cpus) CPU_SET(cpu, &set);
    sched_setaffinity(0, sizeof set, &set);
#endif
}

// Treats numbers below 2^-126 (denormals) as zero. CPUs compute with them several times slower: AdamW's update took 3.7 times
// as long on an AMD EPYC (Zen 4). Moments of a token that no longer occurs decay to denormals and stay there, because 0.9
// times the smallest ones is rounded to the same number. bf16 instructions treat them as zero anyway (vectors.h). A thread
// inherits the setting of the thread that starts it, so a program calls this first.
inline void flush_denormals() {
#ifdef __SSE__
    _mm_setcsr(_mm_getcsr() | 0x8040);  // results (FTZ) and operands (DAZ)
#elif defined(__aarch64__)
    uint64_t control;
    asm volatile("mrs %0, fpcr" : "=r"(control));
    asm volatile("msr fpcr, %0" : : "r"(control | 1ull << 24));
#endif
}

// The name of the CPU for logs. ARM's kernel reports only the numbers of the designer and of the core.
inline std::string processor_name(const char* path = "/proc/cpuinfo") {
    static const std::map<std::string, std::string> arm_names = {
        {"0x41 0xd0c", "Arm Neoverse N1"}, {"0x41 0xd40", "Arm Neoverse V1"}, {"0x41 0xd49", "Arm Neoverse N2"},
        {"0x41 0xd4f", "Arm Neoverse V2"}, {"0xc0 0xac3", "Ampere-1"},        {"0xc0 0xac4", "Ampere-1a"}};
    std::ifstream lines(path);
    std::string designer, name = "CPU";
    for (std::string line; std::getline(lines, line);) {
        const size_t colon = line.find(": ");
        if (colon == std::string::npos) continue;
        const std::string value = line.substr(colon + 2);
        const auto is = [&](const char* wanted) { return line.rfind(wanted, 0) == 0; };
        if (is("model name") || is("Model") || is("cpu\t")) return value;
        if (is("CPU implementer")) designer = value;
        if (!is("CPU part")) continue;
        const auto known = arm_names.find(designer + " " + value);
        name = known != arm_names.end() ? known->second
                                        : (designer == "0x61" ? "Apple CPU " : "ARM CPU " + designer + " ") + value;
    }
    return name;
}

}  // namespace cpu
