// GPUs that plans know: peak, memory, links, power, and the fraction of the peak that layers reach.
#pragma once
#include <algorithm>
#include <cctype>
#include <cmath>
#include <iterator>
#include <string>
#include <vector>

#include "../base/check.h"
#include "../base/text.h"
#include "../cpu/memory.h"
#include "../options/options.h"

// The peak of a GPU for dense bf16 products with fp32 sums, in TFLOP/s, by the name that its driver reports: vendors' figures.
// 0: not known. The first row whose words all occur in the name is used. GPUs from compute capability 8.9 on reach twice that
// in FP8.
inline double gpu_tflops(const std::string& name) {
    struct Row {
        const char *word, *other;  // other: another word, or ""
        double tflops;
    };
    static constexpr Row rows[] = {
        {"GB200", "", 2500},        {"B200", "", 2250},      {"GH200", "", 989},      {"H200", "NVL", 835},
        {"H200", "", 989},          {"H100", "PCIe", 756},   {"H100", "NVL", 835},    {"H100", "", 989},
        {"H800", "PCIe", 756},      {"H800", "", 989},       {"H20", "", 148},        {"A100", "", 312},
        {"A800", "", 312},          {"A30", "", 165},        {"A40", "", 149.7},      {"A10G", "", 70},
        {"A10", "", 125},           {"L40S", "", 362},       {"L40", "", 181},        {"L4", "", 121},
        {"RTX 3090", "", 71},       {"RTX 4090", "", 165.2}, {"RTX 5090", "", 209.5}, {"RTX A6000", "", 154.8},
        {"RTX 6000", "Ada", 364.2}, {"MI300X", "", 1307},
    };
    // Only whole words match: the L4 is not the L40. A GeForce's name must end with its number, or it is a different GPU: RTX
    // 4090 Laptop GPU.
    const auto has = [&](const std::string& word, bool last) {
        const size_t at = name.find(word), end = at + word.size();
        return at != std::string::npos && (at == 0 || !isalnum((unsigned char)name[at - 1])) &&
               (end == name.size() || (!last && !isalnum((unsigned char)name[end])));
    };
    for (const Row& r : rows)
        if (has(r.word, r.word[0] == 'R' && !*r.other) && (!*r.other || has(r.other, false))) return r.tflops;
    return 0;
}

// Vendors' figures: the peak above; memory and its bandwidth; links of one GPU each way, within a node and between nodes of the
// usual machine of its generation (8 ports per node of 200 Gb/s for A100, of 400 Gb/s for the others); its maximum power;
// memory of the host per GPU: NVIDIA's DGX A100 (80 GB GPUs), H100, H200 and B200 have 2 TB for 8.
struct Device {
    const char* name;
    double tflops, memory_gib, memory_gbs, intra_gbs, inter_gbs, watts;
    int capability;   // CUDA compute capability
    double host_gbs;  // of the link to the host, each way: PCIe 4 or 5 with 16 lanes
    double host_gib = 2e12 / 8 / 1073741824.0;
};

inline const std::vector<Device>& devices() {
    static const std::vector<Device> rows = {
        {"a100", gpu_tflops("A100"), 80, 2039, 300, 25, 400, 80, 25},       // SXM, 80 GB; NVLink 3
        {"h100", gpu_tflops("H100"), 80, 3350, 450, 50, 700, 90, 50},       // SXM; NVLink 4
        {"h200", gpu_tflops("H200"), 140, 4800, 450, 50, 700, 90, 50},      // SXM, 141 GB
        {"b200", gpu_tflops("B200"), 179, 7700, 900, 50, 1000, 100, 50},    // as shown by its driver, of 192 GB; NVLink 5
        {"mi300x", gpu_tflops("MI300X"), 192, 5300, 448, 50, 750, 90, 50},  // 7 links of 64 GB/s
        {"h100-pcie", gpu_tflops("H100 PCIe"), 79.6, 2000, 25, 25, 350, 90, 50},
        {"h100-nvl", gpu_tflops("H100 NVL"), 93.6, 3938, 300, 50, 400, 90, 50},  // a bridge between two
        {"h20", gpu_tflops("H20"), 95.6, 4000, 450, 50, 500, 90, 50},
        {"a100-40gb", gpu_tflops("A100"), 40, 1555, 300, 25, 400, 80, 25, 1e12 / 8 / 1073741824.0},
        // Cards in PCIe slots, without NVLink: GPUs of a node exchange through PCIe; between nodes one port of 100 Gb/s for 8;
        // host memory of 64 GB per GPU.
        {"l40s", gpu_tflops("L40S"), 45, 864, 25, 1.6, 350, 89, 25, 60},
        {"l40", gpu_tflops("L40"), 45, 864, 25, 1.6, 300, 89, 25, 60},
        {"l4", gpu_tflops("L4"), 22.5, 300, 25, 1.6, 72, 89, 25, 60},
        {"a40", gpu_tflops("A40"), 45, 696, 25, 1.6, 300, 86, 25, 60},
        {"a30", gpu_tflops("A30"), 24, 933, 25, 1.6, 165, 80, 25, 60},
        {"a10", gpu_tflops("A10"), 22.5, 600, 25, 1.6, 150, 86, 25, 60},
        {"a6000", gpu_tflops("RTX A6000"), 48, 768, 25, 1.6, 300, 86, 25, 60},
        {"rtx-6000-ada", gpu_tflops("RTX 6000 Ada"), 48, 960, 25, 1.6, 300, 89, 25, 60},
        // GeForce: by NVIDIA's whitepapers of GA102, Ada and Blackwell, FP16 tensor cores with fp32 sums, dense
        {"rtx-3090", gpu_tflops("RTX 3090"), 24, 936, 25, 1.6, 350, 86, 25, 60},
        {"rtx-4090", gpu_tflops("RTX 4090"), 24, 1008, 25, 1.6, 450, 89, 25, 60},
        {"rtx-5090", gpu_tflops("RTX 5090"), 31.8, 1792, 50, 1.6, 575, 120, 50, 60},
    };
    return rows;
}

inline Device find_device(const std::string& name) {
    for (const Device& d : devices())
        if (name == d.name) return d;
    fail_usage("device '%s' is unknown; HINT: one of %s, or any with --device-tflops and the other figures", name.c_str(),
               joined(devices(), [](const Device& d) { return d.name; }).c_str());
}

// The fraction of its peak that a GPU reaches in whole layers of width C with micro-batches of `rows` tokens: for Hopper as
// measured on one H100 (dev/kernels/bench.md), interpolated between the measured widths by their logarithm. Tensor parallelism
// splits one side of each matrix, which counts as a square one of the same area, of width C / sqrt(tp). On A100 0.62 for the
// layer of width 6144 in arXiv:2205.05198, and the power 0.1 of other widths: on Hopper it is 0.12 from width 1600 to 12288,
// 0.09 from 2048. For other GPUs 0.62.
//
// A micro-batch has a fixed cost in addition to its rows: gradients are read and written once, kernels start and end. Below
// 8192 rows it is counted as the time of `fixed` rows. 590 follow from 12 layers of a 7B model, 568 TFLOP/s at 1x4096 and
// 609 at 2x4096. Wider layers seem to lose less: width 12288 reaches 0.647 at 1x4096, and NeMo's step of a 175B model, a
// width of 6144 by tp, is faster at 1x2048 than a plan without this cost; so it is 0 from there on.
constexpr double usual_efficiency = 0.62;
inline double efficiency_of(const Device& d, int width, double rows, int tp = 1) {
    const std::string name = d.name;
    if (name == "a100" || name == "a100-40gb") return usual_efficiency * std::pow(std::clamp(width, 768, 25600) / 6144.0, 0.1);
    if (name != "h100" && name != "h200") return usual_efficiency;
    struct Measured {
        double width, efficiency, fixed;  // efficiency at 8192 rows and more
    };
    constexpr Measured measured[] = {{768, 0.456, 590},  {1600, 0.507, 590}, {2048, 0.548, 590},
                                     {4096, 0.616, 590}, {6144, 0.6275, 0},  {12288, 0.647, 0}};
    const double C = std::clamp(width / std::sqrt(tp), measured[0].width, std::end(measured)[-1].width);
    size_t i = 1;
    while (C > measured[i].width) i++;
    const Measured &from = measured[i - 1], &to = measured[i];
    const double part = std::log(C / from.width) / std::log(to.width / from.width);
    const auto between = [&](double low, double high) { return low + (high - low) * part; };
    const double few = std::max(0.0, 1 / rows - 1 / 8192.0);
    return between(from.efficiency, to.efficiency) / (1 + between(from.fixed, to.fixed) * few);
}

// ---- memory of a planned GPU, in bytes -------------------------------------------------------------------------------------
inline double planned_memory_bytes(const TrainOptions& o) {
    if (o.device_memory_gib) return *o.device_memory_gib * 1073741824.0;
    const double bytes = find_device(o.device).memory_gib * 1073741824.0;
    return bytes - (double)cpu::reserve_on_gpu((size_t)bytes);
}
// A rank's share of its host's memory: --host-memory-gib divided among the GPUs of a node.
inline double planned_host_bytes(const TrainOptions& o, int ranks) {
    const double gib = 1073741824.0;
    if (!o.host_memory_gib) return find_device(o.device).host_gib * gib;
    return *o.host_memory_gib * gib / std::max(1, std::min(o.node_size, ranks));
}
