// An estimate of NCCL's memory on a GPU, for plans of other machines; a run on GPUs lets NCCL allocate first (warm_up) and then
// plans with the remaining memory.
//
// A connection to a neighbor has buffers on each of NCCL's channels: 10 MiB at its receiving end (0.5 MiB for the protocol LL,
// 4.7 for LL128, 4 for Simple, in whole pages of 2 MiB), 2 MiB at the sending one (sizes in NCCL's src/init.cc; allocations
// counted on 8 H100 in NVIDIA/nccl issue 1685). An H100 on NVSwitch has 24 channels for collectives, which use a ring and a
// tree: about three neighbors. A communicator of an edge has at most as many channels as its limit of blocks (edge_blocks):
// NCCL uses no more channels for messages than its configuration allows for kernels (src/graph/paths.cc,
// ncclTopoComputeP2pChannels). So a communicator for collectives uses 864 MiB, and one that carries messages one way 40 MiB or
// 8 MiB. For comparison: NVIDIA/nccl issue 864 reports 1.6 GB for one communicator with the CUDA context, and 6 GB for three
// and more. Not yet measured here.
#pragma once
#include <string>

#include "../base/text.h"
#include "../model/mesh.h"
#include "../model/model_config.h"
#include "../parallel/comm.h"

struct NcclMemory {
    static constexpr double mib = 1048576, received = 10 * mib, sent = 2 * mib;
    static constexpr double of_group = 24 * 3 * (received + sent), of_edge = edge_blocks * (received + sent) / 2;
    int groups = 0;  // communicators for collectives
    int edges = 0;   // communicators for messages one way; this rank receives on half of them
    double bytes() const { return groups * of_group + edges * of_edge; }
    std::string in_words() const {
        std::string words = format("%s of %s", counted(groups, "communicator").c_str(), human_bytes(of_group).c_str());
        if (edges) words += format(", %d for messages of %s", edges, human_bytes(of_edge).c_str());
        return words;
    }
};

// The memory that a rank needs on its device, and on the host of a GPU.
struct RankMemory {
    size_t bytes, host;
    NcclMemory nccl{};  // on GPUs that are planned for
    double device() const { return (double)bytes + nccl.bytes(); }
};

// The estimate for the rank with the most communicators. generates: the run generates text, for which stages sum logits.
// all_to_all, exchanges_heads: ranks of experts, and of context parallelism, send each other rows; each pair has the memory of
// two edges.
inline NcclMemory nccl_memory(const ModelConfig& c, const Mesh& mesh, bool generates, bool all_to_all = false,
                              bool exchanges_heads = false) {
    const bool stages = mesh.pp.size > 1;
    NcclMemory n;
    n.groups = (mesh.tp.size > 1) + (mesh.dp.size > 1) + (mesh.cp.size > 1) + (mesh.ep.size > 1) +
               (mesh.ep.size > 1 && mesh.edp.size > 1) + (LocalSizes(c, mesh.tp).replicas > 1) + (stages && c.tied) +
               (stages && generates);
    // Forward from the previous stage and to the next one, backward the other way; one each if there are two and no ring.
    n.edges = !stages ? 0 : mesh.pp.size == 2 && mesh.vpp == 1 ? 2 : 4;
    if (all_to_all) n.edges += 2 * (mesh.ep.size - 1);
    if (exchanges_heads) n.edges += 2 * (mesh.cp.size - 1);
    return n;
}
