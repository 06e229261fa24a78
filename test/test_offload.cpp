// With the optimizer's state on the host, updated in chunks, training has the bits of a resident state. gpu/test_offload.cu
// includes this for the GPU kernels, with overlapped copies; complete runs are in gpu_test.sh.
#include <gtest/gtest.h>

#if defined(BACKEND_CUDA) || defined(BACKEND_EMU)
#include "../llmc/gpu/ops.cuh"
#else
#include "../llmc/cpu/matmul.h"
#include "../llmc/cpu/memory.h"
#include "../llmc/cpu/optimizer.h"
#include "../llmc/cpu/reduce.h"
#endif
#include "../llmc/optimizer/adamw.h"
#include "../llmc/optimizer/training_memory.h"
#include "../llmc/optimizer/weight_average.h"
#include "testing.h"

namespace test_offload {

using namespace test;

struct Case {
    OptimizerKind optimizer;
    ElementType first, second;
    size_t chunk;  // elements; 0: resident
    size_t bucket = 3000;
};

std::vector<char> bytes_of(const void* x, size_t n) { return {(const char*)x, (const char*)x + n}; }

// Weights and state after three updates, each followed by averaging the weights, and an exchange of weights and average.
std::vector<std::vector<char>> train(const Case& k) {
    be::Ctx ctx(2);
    ModelConfig c;
    set_family(c, "llama");
    c.L = 2;
    c.C = 32;
    c.NH = c.NKV = 2;
    c.F = 48;
    c.T = 4;
    c.V = 100;
    pad_vocabulary(c, 64);
    auto ranks = std::make_shared<Ranks>();
    const OptimizerRow& optimizer = row_of(optimizers, k.optimizer);
    ranks->whole_matrices = optimizer.whole_matrices;
    ranks->bucket_elements = k.bucket;
    TrainingMemory m(c, ranks, {c.L});
    m.optimizer = &optimizer;
    m.muon.recipe.on = optimizer.whole_matrices;
    m.exp_avg.type = k.first;
    m.exp_avg_sq.type = k.second;
    m.averages = true;
    m.offloads = k.chunk > 0;
    m.stream->limit_chunk(k.chunk);
    Arena arena;
    m.plan(arena, true);
    arena.allocate();

    Rng rng(7);
    const std::vector<real> weights = rng.normals<real>(m.table.size);
    HostSide<floatX> params(ctx, m.params, m.table.size);
    HostSide<LowerHalf> lower(ctx, m.master_low_bits, m.master_low_bits ? m.shards.size : 0, m.state_on_host());
    m.shards.for_each_part(0, m.table.size, [&](size_t from, size_t shard, size_t n) {
        LowerHalf none;
        for (size_t i = 0; i < n; i++)
            store_weight(params.data() + from + i, m.master_low_bits ? lower.data() + shard + i : &none, 0, weights[from + i]);
    });
    params.upload();
    lower.upload();
    HostSide<real> grads(ctx, (real*)m.grads.data, m.table.size);
    ParameterGatherer gatherer(ctx, *m.ranks, m.shards, true);
    for (int64_t step = 1; step <= 3; step++) {
        const std::vector<real> gradients = rng.normals<real>(m.table.size);
        std::copy(gradients.begin(), gradients.end(), grads.data());
        grads.upload();
        const uint64_t rounding = rounding_key(5, step);
        update_elementwise(ctx, m, {0.01, 0.9, 0.95, 1e-8, 0.1, 0.5, step, rounding}, [](const Bucket&) {});
        m.muon.update(ctx, m, {real(0.01), real(0.1), real(0.5), rounding}, [](const Bucket&) {});
        update_average(ctx, m, 0.9, step);
    }
    swap_average(ctx, m, gatherer);

    std::vector<std::vector<char>> all;
    params.download();
    all.push_back(bytes_of(params.data(), m.table.size * sizeof(floatX)));
    const size_t n = m.shards.size;
    const auto add = [&](const void* state, size_t bytes) {
        all.emplace_back(bytes);
        read_state(ctx, m, all.back().data(), state, bytes);
    };
    if (m.master_low_bits) add(m.master_low_bits, n * sizeof(LowerHalf));
    for (const Moment& moment : m.moments()) add((m.*moment.of).data, moment.n * (m.*moment.of).element_bytes());
    add(m.average, n * sizeof(real));
    return all;
}

TEST(Offload, ChunksHaveTheBitsOfResidentState) {
    for (const OptimizerKind optimizer : {OptimizerKind::adamw, OptimizerKind::muon, OptimizerKind::lion})
        for (const auto& [first, second] : {std::pair(ElementType::fp32, ElementType::fp32),
                                            {ElementType::bf16, ElementType::bf16},
                                            {ElementType::signed8, ElementType::unsigned8}}) {
            const auto resident = train({optimizer, first, second, 0});
            for (const size_t chunk : {(size_t)64, (size_t)1000, (size_t)1 << 20}) {
                // With fewer chunks than slots, a pass starts while downloads of the last one are in flight.
                const auto offloaded = train({optimizer, first, second, chunk, std::max(chunk, (size_t)3000)});
                ASSERT_EQ(offloaded.size(), resident.size());
                for (size_t i = 0; i < resident.size(); i++)
                    EXPECT_TRUE(offloaded[i] == resident[i])
                        << "part " << i << " differs with " << row_of(optimizers, optimizer).word << ", type " << (int)first
                        << ", chunks of " << chunk;
            }
        }
}

// The memory plan: the state in host memory, and three chunks of it on the device.
TEST(Offload, TheDeviceHoldsThreeChunks) {
    ModelConfig c;
    set_family(c, "gpt2");
    c.L = 2;
    c.C = 64;
    c.NH = c.NKV = 4;
    c.F = 256;
    c.T = 8;
    c.V = 1000;
    pad_vocabulary(c, 64);
    const auto planned = [&](bool offloads, size_t chunk) {
        TrainingMemory m(c, std::make_shared<Ranks>(), {c.L});
        m.offloads = offloads;
        m.stream->limit_chunk(chunk);
        Arena arena;
        m.plan(arena, true);
        return std::pair(arena.bytes() - (be::memory_is_host ? arena.bytes_for_host() : 0), arena.bytes_for_host());
    };
    const size_t n = trained_table(c).size, element = (has_lower_halves ? sizeof(LowerHalf) : 0) + 2 * sizeof(real);
    const auto [resident, nothing] = planned(false, 1024);
    const auto [device, host] = planned(true, 1024);
    EXPECT_EQ(nothing, 0u);
    const size_t pages = 12 * (4096 + 4096);  // at most: regions start at page boundaries
    EXPECT_NEAR((double)host, (double)(n * element), pages);
    EXPECT_NEAR((double)device, (double)(resident - n * element + be::HostLink::n_slots * 1024 * element), pages);
}

}  // namespace test_offload
