// Checks that examine a run while it trains:
//   PlantedFaults     injects the faults requested by TRAIN_GPT_FAULTS (faults.h) into tokens, memory and gradients
//   GradientHashes    gradients that are computed twice must have the same bits (--detect-nondeterminism)
//   LayerHealth       norms of every layer's weights, gradients and update (--log-health-interval)
// memory_check.h checks memory between two steps.
#pragma once
#include <chrono>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../base/check.h"
#include "../base/crc32c.h"
#include "../data/dataloader.h"
#include "../model/arena.h"
#include "../model/fp8_training.h"
#include "../model/parameters.h"
#include "../ops.h"
#include "../parallel/ranks.h"
#include "../optimizer/training_memory.h"
#include "faults.h"

// ---- fault injection --------------------------------------------------------------------------------------------------------
// Each function is called where its faults can occur; `batch`: the number of the step's batch.
class PlantedFaults {
public:
    PlantedFaults(be::Ctx& ctx, const TrainingMemory& m) : ctx_(ctx), m_(m), rank_(m.ranks->mesh.world.rank) {}

    // Simulates a rank that is slower than the others.
    void in_time(int64_t batch) {
        if (faults_.slow(batch, rank_)) std::this_thread::sleep_for(std::chrono::milliseconds(500));
    }
    // Replaces the tokens of a micro-batch by random ones.
    void in_tokens(Batch& micro_batch, int64_t first_sample, int64_t batch) {
        if (!faults_.noise(batch)) return;
        const auto token = [&](size_t i) {
            return (int)(((uint64_t)first_sample * 1000003 + i) * 0x9e3779b97f4a7c15u >> 33) % m_.c.V;
        };
        for (size_t i = 0; i < micro_batch.tokens.size(); i++) {
            micro_batch.tokens[i] = token(i);
            micro_batch.targets[i] = token(i + 1);
        }
    }

    // Flips bits of weights and moments. wait(): called before, so that no parameters are in flight.
    template <class Wait>
    void in_memory(int64_t batch, Wait wait) {
        if (faults_.none()) return;
        floatX* const weight = m_.weights_of(m_.shards.buckets[0]);
        struct FaultTarget {
            const char* kind;
            void* memory;
            bool of_state;
        };
        for (const FaultTarget& place :
             {FaultTarget{"flip-norm", m_.shards.cut_params ? weight : m_.params + m_.table.shared, false},
              {"flip-lower", m_.master_low_bits ? (void*)m_.master_low_bits : weight, m_.master_low_bits != nullptr},
              {"flip-exp-avg", m_.exp_avg.data, true},
              {"flip-exp-avg-sq", (m_.exp_avg_sq.data ? m_.exp_avg_sq : m_.exp_avg).data, true}}) {
            if (!once(place.kind, batch)) continue;
            wait();
            place.of_state ? flip_last_bit_of_state(place.memory) : flip_last_bit(place.memory);
        }
        if (!once("flip-weight", batch)) return;
        floatX value;
        be::download(ctx_, &value, weight, sizeof value);
        value = (real)value * real(0x1p64);  // flips the exponent's highest bit but one
        be::upload(ctx_, weight, &value, sizeof value);
    }
    // Before the gradients are summed over the ranks.
    void in_own_gradients(int64_t batch) {
        if (!once("flaky-gradient", batch)) return;
        m_.offloads_gradients ? flip_last_bit_of_state(m_.grads.data) : flip_last_bit(m_.grads.data);
    }
    void in_summed_gradients(int64_t batch) {
        if (faults_.none() || !faults_.nan_gradient(batch, rank_)) return;
        m_.gradients_of(m_.shards.buckets[0]).visit([&](auto* x) {
            const std::decay_t<decltype(*x)> nan = (float)NAN;
            write_gradients(ctx_, m_, x, &nan, sizeof nan);
        });
    }
    // After an update, before its checksums: flips the last bit of a bf16, or one of an fp32 number's middle bits.
    void in_update(int64_t batch) {
        if (once("wrong-update", batch))
            flip_last_bit_of_state((char*)m_.exp_avg.from(m_.shards.buckets.back().shard).data +
                                   (m_.exp_avg.rounded() ? 0 : 2));
    }

private:
    bool once(const char* kind, int64_t batch) { return !faults_.none() && faults_.once(kind, batch, rank_); }
    void flip_last_bit(void* place) {
        char byte;
        be::download(ctx_, &byte, place, 1);
        byte ^= 1;
        be::upload(ctx_, place, &byte, 1);
    }
    void flip_last_bit_of_state(void* place) {
        char byte;
        read_state(ctx_, m_, &byte, place, 1);
        byte ^= 1;
        write_state(ctx_, m_, place, &byte, 1);
    }

    Faults faults_ = Faults::from_environment();
    be::Ctx& ctx_;
    const TrainingMemory& m_;
    int rank_;
};

// ---- gradients computed twice -----------------------------------------------------------------------------------------------
struct GradientHashes {
    LossSums sums;
    std::vector<uint32_t> tensors;  // CRC-32C of each tensor's gradient
};

inline GradientHashes hash_gradients(be::Ctx& ctx, const TrainingMemory& m, const LossSums& sums) {
    GradientHashes hashes;
    hashes.sums = sums;
    std::vector<char> bytes;
    for (const TensorSpec& t : m.table.rows) {
        bytes.resize(t.size() * m.grads.element_bytes());
        read_gradients(ctx, m, bytes.data(), m.grads.from(t.offset).data, bytes.size());
        hashes.tensors.push_back(crc32c(bytes.data(), bytes.size()));
    }
    return hashes;
}

// Ends the run, on all ranks, if one of them has computed different bits the second time.
inline void require_equal(const GradientHashes& once, const GradientHashes& again, const TrainingMemory& m, int64_t batch) {
    World* const world = m.ranks->world;
    std::string problem;
    // NOLINTNEXTLINE(bugprone-suspicious-memory-comparison): the bits, so that a NaN equals itself
    if (memcmp(&once.sums, &again.sums, sizeof once.sums) != 0) problem = "the loss";
    for (size_t i = m.table.rows.size(); i-- > 0;)
        if (once.tensors[i] != again.tensors[i]) problem = "the gradient of " + m.table.rows[i].name;
    if (!problem.empty())
        problem = format(
            "%s of batch %lld has different bits when recomputed on %s; HINT: the hardware is faulty, or a library is "
            "nondeterministic: replace it, and resume from a checkpoint",
            problem.c_str(), (long long)batch, world ? world->description().c_str() : "this machine");
    agree_that_all_is_well(world, problem);
}

// ---- health of the layers ---------------------------------------------------------------------------------------------------
// n of the fp32 weights: starting at `first` in the parameters, at `shard` in this rank's shards.
inline std::vector<real> weights_at(be::Ctx& ctx, const TrainingMemory& m, size_t first, size_t shard, size_t n) {
    std::vector<floatX> params(n);
    be::download(ctx, params.data(), m.own_weights(first, shard), n * sizeof(floatX));
    std::vector<LowerHalf> lower(m.master_low_bits ? n : 0);
    if (m.master_low_bits) read_state(ctx, m, lower.data(), m.master_low_bits + shard, n * sizeof(LowerHalf));
    return whole_weights(params, lower);
}
// Copies the weights of this rank's shards (shards.size), part by part.
inline void copy_weights(be::Ctx& ctx, const TrainingMemory& m, real* to) {
    constexpr size_t most = 1 << 20;
    for (const Bucket& b : m.shards.buckets)
        for (size_t i = 0; i < b.n; i += most) {
            const std::vector<real> part = weights_at(ctx, m, b.mine + i, b.shard + i, std::min(most, b.n - i));
            std::copy(part.begin(), part.end(), to + b.shard + i);
        }
}

// Norms over all ranks of each layer's weights before an update, of its gradients, and of the update. For log.jsonl.
class LayerHealth {
public:
    LayerHealth(be::Ctx& ctx, const TrainingMemory& m) : ctx_(ctx), m_(m), layers_(m.c.L) {}

    void before_update() { copy_weights(ctx_, m_, m_.before); }

    // In FP8 also the fractions of each tensor's elements that became zero, and that became the largest number: the maximum
    // over the ranks is reported.
    nlohmann::ordered_json after_update(const Fp8Training& fp8) {
        const std::vector<double> squares = sum_of_all_ranks(*m_.ranks, squares_of_layers());
        std::vector<float> zero, largest;
        if (fp8.on) {
            zero = largest_of_all_ranks(*m_.ranks, shares(fp8, &Fp8Training::Count::zero));
            largest = largest_of_all_ranks(*m_.ranks, shares(fp8, &Fp8Training::Count::largest));
        }
        auto layers = nlohmann::ordered_json::array();
        for (int i = 0; i < layers_ + 2; i++) {
            const double* sum = &squares[(size_t)i * 3];
            const double weights = std::sqrt(sum[0]);
            layers.push_back({{"layer", i < layers_    ? std::to_string(i)
                                        : i == layers_ ? "embedding"
                                                       : "head"},
                              {"weight_norm", weights},
                              {"grad_norm", std::sqrt(sum[1])},
                              {"update_ratio", weights > 0 ? std::sqrt(sum[2]) / weights : 0}});
            if (i >= layers_ || !fp8.on) continue;
            const auto of_layer = [&](const std::vector<float>& all) {
                return std::vector<float>(all.begin() + i * fp8_tensors, all.begin() + (i + 1) * fp8_tensors);
            };
            layers.back()["fp8_zero"] = of_layer(zero);
            layers.back()["fp8_largest"] = of_layer(largest);
        }
        return layers;
    }

private:
    // (layers + 2, 3): weights, gradients and update of each layer, then of the embedding and of the head.
    std::vector<double> squares_of_layers() const {
        std::vector<double> squares((size_t)(layers_ + 2) * 3);
        for (const TensorSpec& spec : m_.table.rows)
            for (const Range& r : m_.not_duplicated) {
                const size_t first = std::max(r.begin, spec.offset), last = std::min(r.end, spec.offset + spec.size());
                if (first >= last) continue;
                double* sum = &squares[(size_t)place(spec) * 3];
                m_.shards.for_each_part(first, last - first, [&](size_t from, size_t shard, size_t n) {
                    const std::vector<real> gradient =
                                                gradients_at(ctx_, m_, m_.shards.cut_gradients ? shard : first + from, n),
                                            after = weights_at(ctx_, m_, first + from, shard, n);
                    for (size_t i = 0; i < n; i++) {
                        const double w = (double)m_.before[shard + i], g = (double)gradient[i];
                        const double d = (double)after[i] - w;
                        sum[0] += w * w;
                        sum[1] += g * g;
                        sum[2] += d * d;
                    }
                });
            }
        return squares;
    }
    // (layers, 12): fractions of a tensor's counted codes.
    std::vector<float> shares(const Fp8Training& fp8, int64_t Fp8Training::Count::*counted) const {
        std::vector<float> all((size_t)layers_ * fp8_tensors);
        for (size_t i = 0; i < fp8.counts.size(); i++) {
            const Fp8Training::Count& count = fp8.counts[i];
            if (count.codes > 0) all[among_all_layers(m_.table.part.layers, i)] = (float)(count.*counted) / (float)count.codes;
        }
        return all;
    }
    int place(const TensorSpec& spec) const {
        if (spec.block >= 0) return m_.table.part.layers[spec.block];
        return spec.block == TensorSpec::embedding ? layers_ : layers_ + 1;
    }

    be::Ctx& ctx_;
    const TrainingMemory& m_;
    int layers_;
};
