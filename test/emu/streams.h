// Streams and events. Work on a stream runs late: when the host waits for something, in an order that CUDA allows.
//
// Order. Work of one stream runs in the order in which it was submitted. The legacy stream (null) and the streams of
// cudaStreamCreate wait for each other; streams made with cudaStreamNonBlocking wait only for events. When the host waits, a
// stream whose next work may run is drawn, until the awaited work is complete; other work remains for later. EMU_ORDER=random
// draws from EMU_SEED; reverse prefers the newest stream; forward runs all work as soon as it is submitted, so that a debugger
// still shows the caller.
// Calls of several host threads must not overlap, and this program's do not, except that any thread may query an event. hang()
// blocks a stream; waiting for it never ends. Remaining work does not run when the program ends.
//
// Connections. Work reaches the device through CUDA_DEVICE_MAX_CONNECTIONS queues (1 to 32; 8 if it is not set), which streams
// share if there are more of them: then work also waits for earlier work of the streams that it shares with. CUDA does not say
// which ones; here a new stream gets a queue with the fewest streams.
//
// Transfers are work that waits for other processes, NCCL's operations (nccl.h): once a transfer's turn has come it is advanced
// between the work of other streams, and blocks only its own. Streams have no processor, so transfers advance only while the
// host waits, for the device or for other ranks (progress()).
//
// Time. A stream's clock counts work instead of seconds: each piece takes 1 ms, or the time set by takes(). So choices that a
// program makes by measuring do not depend on the load of this machine. A stream that waits for another continues when that
// one's clock permits. Transfers take their real time.
#pragma once
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <thread>
#include <vector>

#include "block.h"

namespace emu {

struct Work {
    enum class Step { waits, moves, ends };
    std::function<void()> run;
    std::function<Step()> transfer;                    // instead of run: called until it ends
    std::chrono::steady_clock::time_point begin = {};  // of the transfer, once its turn has come
    std::vector<std::shared_ptr<Work>> after;          // work that must also be complete, besides earlier work on its stream
    std::atomic<bool> over{false};
    double ms = 0;  // completion time, by its stream's clock

    double ready_ms() const {
        double ms = 0;
        for (const auto& other : after) ms = std::max(ms, other->ms);
        return ms;
    }
    void end(double now_ms) {
        ms = now_ms;
        over = true;
        run = nullptr;
        transfer = nullptr;
        after.clear();
    }
    bool ready() const {
        for (const auto& other : after)
            if (!other->over) return false;
        return true;
    }
};
using Ticket = std::shared_ptr<Work>;

}  // namespace emu

struct emu_stream {
    bool waits_for_legacy = true, destroyed = false;
    double ms = 0;  // its clock
    std::deque<emu::Ticket> queue = {};
    size_t connection = 0;
};
struct emu_event {
    emu::Ticket mark = nullptr;  // null: never recorded
};
using cudaStream_t = emu_stream*;
using cudaEvent_t = emu_event*;

namespace emu {

class Streams {
public:
    emu_stream* create(bool waits_for_legacy) {
        all_.push_back({waits_for_legacy});
        emu_stream* const s = &all_.back();
        const auto fewest = [](const Connection& a, const Connection& b) { return a.streams < b.streams; };
        const auto connection = std::min_element(connections_.begin(), connections_.end(), fewest);
        connection->streams++;
        s->connection = (size_t)(connection - connections_.begin());
        return s;
    }
    // Work on the stream still runs.
    void destroy(emu_stream* s) {
        s->destroyed = true;
        connections_[s->connection].streams--;
        forget_destroyed();
    }

    Ticket put(emu_stream* s, std::function<void()> run, const Ticket& after = nullptr) {
        auto work = std::make_shared<Work>();
        work->run = std::move(run);
        return put_work(s, std::move(work), {after});
    }
    // after: null where there is none.
    Ticket put_transfer(emu_stream* s, std::function<Work::Step()> transfer, const std::vector<Ticket>& after) {
        auto work = std::make_shared<Work>();
        work->transfer = std::move(transfer);
        return put_work(s, std::move(work), after);
    }
    Ticket put_work(emu_stream* s, Ticket work, const std::vector<Ticket>& after) {
        emu_stream* const legacy = &all_.front();
        if (!s) s = legacy;
        for (const Ticket& other : after)
            if (other) work->after.push_back(other);
        for (emu_stream& other : all_) {
            const bool ordered = s == legacy ? other.waits_for_legacy : s->waits_for_legacy && &other == legacy;
            if (&other != s && ordered && !other.queue.empty()) work->after.push_back(other.queue.back());
        }
        if (s != legacy) {
            Connection& connection = connections_[s->connection];
            if (connection.user != s && connection.last && !connection.last->over) work->after.push_back(connection.last);
            connection.user = s;
            connection.last = work;
        }
        const bool event = !work->run && !work->transfer;
        if (event && s->queue.empty() && work->ready()) return end(*work, *s), work;  // nothing precedes it
        s->queue.push_back(work);
        if (config().order == Order::forward) run_all();
        return work;
    }
    // Blocks the stream until the caller sets the result's `over`.
    Ticket hang(emu_stream* s) {
        auto never = std::make_shared<Work>();
        return put(s, nullptr, never), never;
    }
    // Runs work until this is complete.
    void finish(const Ticket& work) {
        for (begin_draw(); !work->over;)
            if (!run_one()) rest();
    }
    void finish(emu_stream* s) { finish(put(s, nullptr)); }
    void finish_all() {
        const auto busy = [](const emu_stream& s) { return !s.queue.empty(); };
        for (begin_draw(); std::any_of(all_.begin(), all_.end(), busy);)
            if (!run_one()) rest();
    }
    bool is_idle(const emu_stream* s) const { return (s ? s : &all_.front())->queue.empty(); }
    // Runs everything that can run without waiting.
    void run_all() {
        for (begin_draw(); run_one();) {
        }
    }
    // While the host waits elsewhere, for other ranks.
    void progress() {
        if (!owns_this_thread() || running_) return;
        for (begin_draw(); run_one();) {
        }
    }
    // Called by the running work.
    void takes(double ms) { takes_ms_ = ms; }
    // Other threads may query events, but not run their work.
    bool owns_this_thread() const { return std::this_thread::get_id() == owner_; }
    // Returns false if there is none.
    bool run_one() {
        if (advance_transfers()) return moved();
        if (emu_stream* s = draw()) return pop(*s), moved();
        return false;
    }
    static double ms_since(std::chrono::steady_clock::time_point t) {
        return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - t).count();
    }

private:
    struct Connection {
        int streams = 0;
        Ticket last = nullptr;  // put on one of them, `user`
        const emu_stream* user = nullptr;
    };
    static size_t number_of_connections() {
        const char* text = getenv("CUDA_DEVICE_MAX_CONNECTIONS");
        return (size_t)std::clamp(text ? atoi(text) : 8, 1, 32);
    }

    std::vector<Connection> connections_ = std::vector<Connection>(number_of_connections());
    const std::thread::id owner_ = std::this_thread::get_id();
    std::list<emu_stream> all_{1};  // the legacy stream is the first
    emu_stream* last_ = nullptr;    // drawn
    double takes_ms_ = 1;           // of the running work
    unsigned rng_ = 1, n_draws_ = 0, change_ = 1;
    bool running_ = false;  // work is running, which must not start other work
    std::chrono::steady_clock::time_point moved_ = std::chrono::steady_clock::now();

    bool moved() { return moved_ = std::chrono::steady_clock::now(), true; }
    // Yields the processor, for longer while nothing moves.
    void rest() { usleep((unsigned)std::min(15 + ms_since(moved_) * 1e3 / 8, 150.0)); }
    void pop(emu_stream& s) {
        const Ticket work = s.queue.front();
        s.queue.pop_front();
        end(*work, s);
        if (s.destroyed) forget_destroyed();
    }
    void end(Work& work, emu_stream& s) {
        s.ms = std::max(s.ms, work.ready_ms());
        if (work.run) {
            takes_ms_ = 1;
            running_ = true;
            work.run();
            running_ = false;
            s.ms += takes_ms_;
        }
        if (work.transfer) s.ms += ms_since(work.begin);
        work.end(s.ms);
    }
    // Returns true if one of the transfers whose turn has come moved.
    bool advance_transfers() {
        bool moved = false;
        for (auto s = all_.begin(); s != all_.end();) {
            emu_stream& stream = *s++;  // may be erased below
            if (stream.queue.empty() || !stream.queue.front()->transfer || !stream.queue.front()->ready()) continue;
            Work& work = *stream.queue.front();
            if (work.begin == std::chrono::steady_clock::time_point()) work.begin = std::chrono::steady_clock::now();
            const Work::Step step = work.transfer();
            moved |= step != Work::Step::waits;
            if (step == Work::Step::ends) pop(stream);
        }
        return moved;
    }
    unsigned random() {
        rng_ ^= rng_ << 13;
        rng_ ^= rng_ >> 17;
        rng_ ^= rng_ << 5;
        return rng_;
    }
    // The frequency of changing streams is also drawn: from after each work to hardly ever.
    void begin_draw() {
        // Consecutive seeds must not give similar draws: each product spreads the bits that the shift before it folds.
        unsigned mixed = config().seed * 2654435761u + ++n_draws_ * 40503u;
        mixed = (mixed ^ mixed >> 16) * 0x7feb352du;
        mixed = (mixed ^ mixed >> 15) * 0x846ca68bu;
        rng_ = (mixed ^ mixed >> 16) | 1;
        random();
        change_ = 1u << random() % 4 * 2;
        last_ = nullptr;
    }
    emu_stream* draw() {
        std::vector<emu_stream*>& ready = ready_;
        ready.clear();
        for (emu_stream& s : all_)
            if (!s.queue.empty() && !s.queue.front()->transfer && s.queue.front()->ready()) ready.push_back(&s);
        if (ready.empty()) return nullptr;
        if (config().order == Order::forward) return ready.front();
        if (config().order == Order::reverse) return ready.back();
        const bool stays = last_ && random() % change_ != 0 && std::count(ready.begin(), ready.end(), last_);
        return last_ = stays ? last_ : ready[random() % ready.size()];
    }
    std::vector<emu_stream*> ready_;
    void forget_destroyed() {
        all_.remove_if([](const emu_stream& s) { return s.destroyed && s.queue.empty(); });
    }
};
inline Streams& streams() {
    static Streams s;
    return s;
}

}  // namespace emu
