// The threads that share an op, and how they wait.
//
// An op consists of one or more loops over independent tasks; the tasks of a loop start when the previous loop is complete.
// Each thread has its own part of a loop, the same one every time, so that its data is likely in its caches; when that is
// finished it steals remaining tasks from the other parts. No thread waits for a thread without a task in progress, whether
// another process occupies its CPU or it is still waking up: the others run its tasks. Tasks write to disjoint memory, and no
// sum spans several tasks, so results have the same bits whichever thread runs a task.
//
// A waiting thread spins for a while before it sleeps: a step has hundreds of loops, and sleeping and waking takes longer than
// most of these waits. But if two threads of a team are on one CPU because another process occupies the other one, a spinning
// thread keeps the one it waits for from running; in this case it sleeps at once. Figures: dev/log/cpu-speed.md.
#pragma once
#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "threads.h"

namespace cpu {

class Team {
    struct alignas(64) Seat {
        std::atomic<int64_t> taken{0};  // tasks taken from this thread's parts, in all loops of the op
        std::atomic<int> cpu{-1};       // CPU on which the thread last ran
        std::vector<int64_t> before;    // private: tasks of earlier loops in each thread's parts
    };

public:
    // A thread's view of an op.
    class Member {
    public:
        const int number;
        // f(task) for tasks below n, shared by all members. They are complete when the next loop starts, and when the op ends.
        template <class F>
        void share(int64_t n, F f) {
            if (!team_) {
                for (int64_t task = 0; task < n; task++) f(task);
                return;
            }
            const int threads = team_->size();
            for (int i = 0; i < threads; i++) {
                const int owner = number + i < threads ? number + i : number + i - threads;
                const int64_t first = n * owner / threads, end = n * (owner + 1) / threads;
                int64_t& before = team_->seats_[(size_t)number].before[(size_t)owner];
                for (int64_t k; (k = team_->take(owner, before, end - first)) >= 0;) {
                    team_->wait_for_tasks(before_, number);
                    f(first + k);
                    team_->finish_task(number);
                }
                before += end - first;
            }
            before_ += n;
        }

    private:
        friend Team;
        explicit Member(Team* team, int i) : number(i), team_(team) {
            if (!team) return;
            team->seats_[(size_t)i].before.assign((size_t)team->size(), 0);
            team->note_cpu(i);
        }
        Team* const team_;    // null: single-threaded
        int64_t before_ = 0;  // tasks of earlier loops
    };

    // Calls f(member) on `threads` threads, including this one. Each calling thread has its own team; nested calls are
    // single-threaded.
    template <class F>
    static void run(int threads, F f) {
        if (threads <= 1 || within_op()) {
            Member alone(nullptr, 0);
            return f(alone);
        }
        auto& team = mine();
        if (!team || team->size() != threads || team->process_ != getpid()) {
            team.reset();
            team.reset(new Team(threads));
        }
        team->work_together([](void* op, Member& member) noexcept { (*(F*)op)(member); }, &f);
    }
    ~Team() {
        stop_ = true;
        ops_++;
        for_op_.wake();
        for (std::thread& t : threads_) t.join();
    }

private:
    // A place where threads sleep until another one changes a condition and calls wake().
    class Waiting {
    public:
        template <class Done, class MaySpin>
        void until(Done done, MaySpin may_spin) {
            using clock = std::chrono::steady_clock;
            const auto end = clock::now() + std::chrono::microseconds(100);
            while (may_spin() && clock::now() < end)
                for (int i = 0; i < 32; i++) {
                    if (done()) return;
                    pause();
                }
            std::unique_lock<std::mutex> lock(mutex_);
            sleepers_++;
            changed_.wait(lock, done);
            sleepers_--;
        }
        void wake() {
            if (sleepers_ == 0) return;
            { const std::lock_guard<std::mutex> lock(mutex_); }  // a sleeper has either seen the change or waits already
            changed_.notify_all();
        }

    private:
        static void pause() {
#if defined(__x86_64__)
            __builtin_ia32_pause();
#elif defined(__aarch64__)
            asm volatile("yield");
#endif
        }
        std::mutex mutex_;
        std::condition_variable changed_;
        std::atomic<int> sleepers_{0};
    };

    // A forked copy of the process has none of the threads: they cannot be joined, nor their synchronization objects destroyed.
    struct Delete {
        void operator()(Team* team) const {
            if (team->process_ == getpid()) delete team;
        }
    };
    static std::unique_ptr<Team, Delete>& mine() {
        thread_local std::unique_ptr<Team, Delete> team;
        return team;
    }
    static bool& within_op() {
        thread_local bool within = false;
        return within;
    }
    explicit Team(int threads) : seats_((size_t)threads) {
        omp_pause_resource_all(omp_pause_soft);  // OpenMP's threads would otherwise spin for ever with OMP_WAIT_POLICY=active
        try {
            for (int i = 1; i < threads; i++) threads_.emplace_back([this, i] { follow(i); });
        } catch (const std::system_error&) {  // no more threads: the existing ones do the work
        }
    }
    int size() const { return (int)seats_.size(); }

    int note_cpu(int i) {
        const int cpu = sched_getcpu();
        seats_[(size_t)i].cpu.store(cpu, std::memory_order_relaxed);
        return cpu;
    }
    bool alone_on_cpu(int i) {
        const int cpu = note_cpu(i);
        for (int other = 0; other < size(); other++)
            if (other != i && seats_[(size_t)other].cpu.load(std::memory_order_relaxed) == cpu) return false;
        return true;
    }

    void work_together(void (*op)(void*, Member&), void* data) {
        within_op() = true;
        for (Seat& seat : seats_) seat.taken = 0;
        done_ = 0;
        op_ = op;
        data_ = data;
        inside_ &= ~over;
        ops_++;
        for_op_.wake();
        Member me(this, 0);
        op(data, me);
        wait_for_tasks(me.before_, 0);
        inside_ |= over;  // threads still looking for a task must leave: op and data end with this call
        for_tasks_.until([this] { return inside_ == over; }, [this] { return alone_on_cpu(0); });
        within_op() = false;
    }
    // The loop of the other threads.
    void follow(int i) {
        within_op() = true;
        bind_as_asked(i, size());
        for (uint64_t op = 0;;) {
            for_op_.until([&] { return ops_ != op; }, [this, i] { return alone_on_cpu(i); });
            op = ops_;
            if (stop_) return;
            if (!(inside_++ & over)) {
                Member me(this, i);
                op_(data_, me);
            }
            if (--inside_ == over) for_tasks_.wake();
        }
    }

    // Takes the next free task below n of that part; -1 if there is none.
    int64_t take(int part, int64_t before, int64_t n) {
        std::atomic<int64_t>& taken = seats_[(size_t)part].taken;
        int64_t task = taken.load(std::memory_order_relaxed);
        while (task < before + n)
            if (taken.compare_exchange_weak(task, task + 1, std::memory_order_relaxed)) return task - before;
        return -1;
    }
    void finish_task(int i) {
        note_cpu(i);
        done_++;
        for_tasks_.wake();
    }
    void wait_for_tasks(int64_t n, int i) {
        if (done_ >= n) return;
        for_tasks_.until([this, n] { return done_ >= n; }, [this, i] { return alone_on_cpu(i); });
    }

    static constexpr uint32_t over = 1u << 31;  // flag in inside_: the op is closed to latecomers
    std::vector<Seat> seats_;
    Waiting for_op_, for_tasks_;
    std::atomic<uint64_t> ops_{0};        // number of ops so far
    std::atomic<uint32_t> inside_{over};  // other threads inside the op, and the flag `over`
    std::atomic<int64_t> done_{0};        // completed tasks of the op
    void (*op_)(void*, Member&) = nullptr;
    void* data_ = nullptr;
    std::atomic<bool> stop_{false};
    const pid_t process_ = getpid();
    std::vector<std::thread> threads_;
};

}  // namespace cpu
