// Detects memory corruption: bit flips in the weights and the optimizer's state between steps. --check-replicas N enables two
// checks.
//
// 1. Ranks are compared after every Nth step. Data held by several ranks must have the same bits on each: weights over
//    data-parallel ranks; norms, biases and shared key/value heads over tensor-parallel ranks; a tied embedding at both ends of
//    the pipeline; and the replicated parts of the optimizer's state. This finds a rank whose results differ. It
//    misses most flipped bits:
//   - With ZeRO-1, only one data-parallel rank has the fp32 weights and moments of its shard. A flipped bit there is updated
//     like any other, and the new weight goes to all ranks, which then agree on it.
//   - A weight that flips on a rank that does not update it is used once, then overwritten by the owner's.
//   - Data sharded by tensor parallelism, without ZeRO and other replicas, is on one rank only. With one rank, everything is.
//
// 2. Therefore memory is checksummed. Nothing writes to it between two updates: the result of an update must be unchanged
//    before the next one is applied, and when a checkpoint is saved. And all weights on a rank
//    must equal their owners'. This is done at every step: an update rewrites everything, so checksums
//    around only every Nth update would find one of N flips. A flipped bit can then only have spoiled a gradient, which is not
//    applied.
//
// The checksum is the sum of 32-bit words, each times an odd number that depends on its index, modulo 2^64. One or two flipped
// bits always change it (unless 8 GiB are between them), more do except once in 2^32; and it does not depend on the order of
// addition.
// Cost per step, for any number of micro-batches: 12 bytes per parameter of this rank's shard are read twice (8 with both
// moments in bf16), and with ZeRO 2 bytes of every weight; AdamW moves 28 (20). Two small messages per rank.
// Not detected: changes between a store and its checksum, and in memory that is not kept from step to step. For gradients
// there is --detect-nondeterminism.
#pragma once
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "../base/crc32c.h"
#include "../model/mesh.h"
#include "../ops.h"
#include "../optimizer/training_memory.h"
#include "../parallel/world.h"

class MemoryCheck {
public:
    MemoryCheck(bool on, be::Ctx& ctx, const TrainingMemory& m)
        : on_(on), ctx_(ctx), m_(m), world_(m.ranks->world), mesh_(m.ranks->mesh) {}

    // Takes the checksums of memory in a good state: after an update, or when it was loaded.
    void remember() {
        if (on_) stored_ = sums();
    }

    // Returns the changes since memory was stored, and where; empty if there are none. Called by all ranks, when all parameters
    // have been gathered.
    std::string change() {
        if (!on_) return "";
        struct {
            Sums stored, now;
        } mine = {stored_, sums()};
        const bool copied = m_.shards.cut && !m_.shards.cut_params;  // from the ranks of the shards to all
        mine.now.copies = copied ? sum(m_.params, 0, m_.table.size) : mine.now.weights + mine.now.experts;
        std::vector<decltype(mine)> all = {mine};
        if (world_) {
            all.resize((size_t)mesh_.world.size);
            world_->all_gather(&mine, sizeof mine, all.data());
        }
        for (size_t r = 0; r < all.size(); r++) {
            const Sums &stored = all[r].stored, &now = all[r].now;
            for (const auto& [name, sum] : {std::pair("the weights", &Sums::weights),
                                            {"the experts' weights", &Sums::experts},
                                            {"the lower halves of the fp32 weights", &Sums::lower},
                                            {"the moments exp_avg", &Sums::exp_avg},
                                            {"the moments exp_avg_sq", &Sums::exp_avg_sq},
                                            {"the weights' EMA", &Sums::average}})
                if (stored.*sum != now.*sum) return name + on_rank(r);
        }
        for (size_t r = 0; r < all.size(); r++) {
            const int tp = (int)r % mesh_.tp.size, pp = (int)r / (mesh_.tp.size * mesh_.dp.size);
            const int ep = mesh_.ep.size, rank_of_ep = (int)r / mesh_.tp.size % ep;
            uint64_t stored = copied ? 0 : all[r].stored.weights + all[r].stored.experts;
            for (int dp = 0; copied && dp < mesh_.dp.size; dp++) {
                const Sums& of_rank = all[(size_t)mesh_.rank_of(pp, dp, tp)].stored;
                stored += of_rank.weights + (dp % ep == rank_of_ep ? of_rank.experts : 0);
            }
            if (stored != all[r].now.copies) return "the copies of other ranks' weights" + on_rank(r);
        }
        return "";
    }

    // Returns the differences between two ranks' copies; empty if there are none. Called by all ranks, when all parameters have
    // been gathered.
    std::string difference() const {
        if (!world_) return "";
        struct Seen {
            std::string hash;
            size_t rank;
        };
        std::map<std::string, Seen> seen;
        const std::vector<std::string> all = world_->all_gather(hashes());
        for (size_t rank = 0; rank < all.size(); rank++) {
            std::istringstream lines(all[rank]);
            for (std::string name, place, hash;
                 std::getline(lines, name, '\t') && std::getline(lines, place, '\t') && std::getline(lines, hash);) {
                const Seen& first = seen.emplace(place, Seen{hash, rank}).first->second;
                if (first.hash != hash) return name + " has other bits" + on_rank(rank) + " than" + on_rank(first.rank);
            }
        }
        return "";
    }

    // Both end the run on a mismatch; `step`: the last one.
    void require_unchanged(int64_t step) {
        if (const std::string what = change(); !what.empty())
            fail(
                "since step %lld %s have changed in memory without being written; HINT: resume from a checkpoint, without "
                "that machine",
                (long long)step, what.c_str());
    }
    void require_agreement(int64_t step) const {
        if (const std::string problem = difference(); !problem.empty())
            fail("at step %lld %s; HINT: resume from a checkpoint, without that machine", (long long)step, problem.c_str());
    }

private:
    // Checksums of this rank's shards; experts: of weights that only ranks of edp share; copies: of all weights on this rank.
    struct Sums {
        uint64_t weights = 0, experts = 0, lower = 0, exp_avg = 0, exp_avg_sq = 0, average = 0, copies = 0;
    };

    // The checksum of n elements from x on, which is number `first` of the buffer or of this rank's shards.
    template <class E>
    uint64_t sum(const E* x, size_t first, size_t n) const {
        constexpr size_t word = sizeof(uint32_t);
        return be::word_sum(ctx_, x, n * sizeof(E) / word, first * sizeof(E) / word);
    }
    Sums sums() const {
        Sums s;
        for (const Bucket& b : m_.shards.buckets) (b.of_experts ? s.experts : s.weights) += sum(m_.weights_of(b), b.mine, b.n);
        if (m_.master_low_bits) s.lower = sum(m_.master_low_bits, 0, m_.shards.size);
        if (m_.average) s.average = sum(m_.average, 0, m_.shards.size);
        s.exp_avg = m_.exp_avg.visit_moment([&](const auto* moment) { return sum(moment, 0, m_.shards.size); });
        if (m_.exp_avg_sq.data)
            s.exp_avg_sq =
                m_.exp_avg_sq.visit_moment([&](const auto* moment) { return sum(moment, 0, m_.size_of_exp_avg_sq()); });
        return s;
    }

    std::string on_rank(size_t r) const {
        return world_ ? format(" on rank %zu (host %s)", r, world_->hosts()[r].c_str()) : " on this machine";
    }

    // Lines of "name of a tensor, key that is the same on all ranks for the same elements, CRC-32C".
    std::string hashes() const {
        std::string text;
        for (const TensorSpec& t : m_.table.rows) {
            const size_t shared = (size_t)t.replicated_rows * t.cols, own = t.size() - shared;
            const std::string experts = t.of_experts ? format(" ep %d", mesh_.ep.rank) : "";
            add_hashes(text, t, 0, own, (t.replicated ? "all" : format("tp %d", mesh_.tp.rank)) + experts);
            if (shared) add_hashes(text, t, own, shared, format("heads %d", mesh_.tp.rank / t.replicas));
        }
        return text;
    }
    // Adds elements [begin, begin + n) of a tensor, held by all ranks with the same `holders`.
    void add_hashes(std::string& text, const TensorSpec& t, size_t begin, size_t n, const std::string& holders) const {
        const auto add = [&](const char* what, const auto* x, size_t from, size_t count, bool of_state = true) {
            std::vector<std::decay_t<decltype(*x)>> values(count);
            if (of_state) read_state(ctx_, m_, values.data(), x, count * sizeof *x);
            else be::download(ctx_, values.data(), x, count * sizeof *x);
            text += format("%s%s\t%s%d %s %zu %zu\t%08x\n", what, t.name.c_str(), what, t.id, holders.c_str(), begin + from,
                           count, crc32c(values.data(), count * sizeof *x));
        };
        if (!m_.shards.cut_params) add("", m_.params + t.offset + begin, 0, n, false);
        m_.shards.for_each_part(t.offset + begin, n, [&](size_t from, size_t shard, size_t count) {
            if (m_.shards.cut_params) add("", m_.params + shard, from, count, false);
            if (m_.master_low_bits) add("the lower half of ", m_.master_low_bits + shard, from, count);
            if (m_.average) add("the EMA of ", m_.average + shard, from, count);
            m_.exp_avg.from(shard).visit_moment([&](const auto* x) { add("exp_avg of ", x, from, count); });
            if (shard >= m_.size_of_exp_avg_sq()) return;
            m_.exp_avg_sq.from(shard).visit_moment([&](const auto* x) { add("exp_avg_sq of ", x, from, count); });
        });
    }

    bool on_;
    be::Ctx& ctx_;
    const TrainingMemory& m_;
    World* world_;  // null for one rank
    const Mesh& mesh_;
    Sums stored_;
};
