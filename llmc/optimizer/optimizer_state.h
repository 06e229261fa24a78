// The optimizer's state of this rank's shards, one element for each parameter: the lower halves of the fp32 weights, the
// moments and the average of the weights. It is in the backend's memory, or, with --offload optimizer, in page-locked memory of
// the host, and updates stream it through slots in the device's memory, chunk by chunk:
//
//   upload     chunk k + 1            the two directions of the link, each on its own stream, and the ops on ctx work at
//   update     chunk k                the same time; a slot holds a chunk from its upload to the end of its download
//   download   chunk k - 1
//
// Updates are elementwise, so a chunk has the same bits as with resident state. Between begin() and end() the state on the host
// may be in any order; later ops on ctx see all of it, and so does the host once these are finished. Kernels can also read the
// state on the host directly, at the rate of the link; rare operations do so (checksums, norms, initial weights).
#pragma once
#include <algorithm>
#include <utility>

#include "../cpu/memory.h"
#include "../elements.h"
#include "../model/arena.h"
#include "../ops.h"
#if defined(BACKEND_CUDA) || defined(BACKEND_EMU)
#include "../gpu/host_link.cuh"
#endif

struct OptimizerState {
    LowerHalf* master_low_bits = nullptr;  // null if params are the whole weights
    Elements exp_avg, exp_avg_sq;          // exp_avg_sq has no data if the optimizer keeps only the first moment
    real* average = nullptr;               // null without an average of the weights

    // The elements from index i on.
    OptimizerState from(size_t i) const {
        return {master_low_bits ? master_low_bits + i : nullptr, exp_avg.from(i),
                exp_avg_sq.data ? exp_avg_sq.from(i) : exp_avg_sq, average ? average + i : nullptr};
    }
};

// The parts of the state that an update reads, and those that it changes.
struct StateUse {
    bool master_low_bits = false, exp_avg = false, exp_avg_sq = false, average = false;
    bool changes_low_bits = true;  // all other parts in use are changed

    static StateUse adamw() { return {true, true, true, false}; }
    static StateUse momentum() { return {false, true, false, false}; }
    static StateUse weights() { return {true, false, false, false}; }
    static StateUse averaging() { return {true, false, false, true, false}; }
    static StateUse swapping() { return {true, false, false, true}; }
};

class StateStream {
public:
    static constexpr size_t most_chunk = 4 << 20;  // elements of a chunk: 40 MB with fp32 moments, 1 ms on a fast link

    // Plans the slots, for state of these types, of which no update covers more than `size` elements.
    void plan(Arena& arena, const OptimizerState& types, bool second_moment, bool averages, size_t size) {
        on_ = true;
        chunk_ = std::min(chunk_, round_up(size, (size_t)8));
        for (OptimizerState& slot : slots_) {
            slot.exp_avg.type = types.exp_avg.type;
            slot.exp_avg_sq.type = types.exp_avg_sq.type;
            const auto add = [&](auto* part, size_t n) { arena.add("optimizer's state in transit", part, n); };
            if (has_lower_halves) add(&slot.master_low_bits, chunk_);
            add(&slot.exp_avg, chunk_);
            if (second_moment) add(&slot.exp_avg_sq, chunk_);
            if (averages) add(&slot.average, chunk_);
        }
    }
    bool on() const { return on_; }
    // A multiple of 8, so that kernels split elements into packs as they do without chunks. For tests; before plan().
    void limit_chunk(size_t elements) { chunk_ = elements; }

    void begin(be::Ctx& ctx) {
        if (on_) link_.begin(ctx);
    }
    void end(be::Ctx& ctx) {
        if (on_) link_.end(ctx);
    }
    // Calls update(state, first, n) for all of elements [begin, begin + n) of `whole`, with the state of elements begin + first
    // and later ones: one call if it is resident, else one for each chunk. No two calls between begin() and end() may change
    // the same elements of the same part.
    template <class Update>
    void run(be::Ctx& ctx, const OptimizerState& whole, const StateUse& use, size_t begin, size_t n, Update update) {
        if (!on_) return n > 0 ? update(whole.from(begin), (size_t)0, n) : void();
        for (size_t first = 0; first < n; first += chunk_) {
            const size_t count = std::min(chunk_, n - first);
            const OptimizerState host = whole.from(begin + first), &device = slots_[turn_];
            link_.begin_upload(turn_);
            for_each_part(host, device, use, [&](void* there, void* here, size_t element_bytes, bool) {
                link_.upload(here, there, count * element_bytes);
            });
            link_.end_upload(ctx, turn_);
            update(device, first, count);
            link_.begin_download(ctx);
            for_each_part(host, device, use, [&](void* there, void* here, size_t element_bytes, bool changes) {
                if (changes) link_.download(there, here, count * element_bytes);
            });
            link_.end_download(turn_);
            turn_ = (turn_ + 1) % be::HostLink::n_slots;
        }
    }

private:
    template <class Visit>
    static void for_each_part(const OptimizerState& host, const OptimizerState& device, const StateUse& use, Visit visit) {
        if (use.master_low_bits && host.master_low_bits)
            visit(host.master_low_bits, device.master_low_bits, sizeof(LowerHalf), use.changes_low_bits);
        if (use.exp_avg) visit(host.exp_avg.data, device.exp_avg.data, host.exp_avg.element_bytes(), true);
        if (use.exp_avg_sq && host.exp_avg_sq.data)
            visit(host.exp_avg_sq.data, device.exp_avg_sq.data, host.exp_avg_sq.element_bytes(), true);
        if (use.average && host.average) visit(host.average, device.average, sizeof(real), true);
    }

    bool on_ = false;
    size_t chunk_ = most_chunk;
    OptimizerState slots_[be::HostLink::n_slots];  // (chunk) each, in the backend's memory
    int turn_ = 0;                                 // the slot of the next chunk
    be::HostLink link_;
};
