// Stop requests for a training run, and how its ranks agree on when to stop.
//   SIGINT (Ctrl-C), SIGTERM, SIGHUP, SIGUSR1   end the run in order: the current micro-batch is completed, its step is
//            dropped, a checkpoint of the last complete step is saved (unless --save-every is never), and the process ends with
//            status 0. Repeated signals have no further effect, except a second SIGINT, which ends the process at once,
//            without a checkpoint. SIGHUP is still ignored if it was ignored before (nohup).
//   SIGPIPE, SIGXFSZ   are ignored: if nobody reads the output any more, or files must not grow, a write fails and training
//            continues.
// Until begin_training() there is nothing to save, and the four signals end the process at once. If the checkpoint is not
// complete 30 seconds after the signal, a warning is printed: a launcher may soon kill the process.
#pragma once
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "../base/terminal.h"
#include "../parallel/world.h"

// State of the signal handlers: only lock-free atomic globals, as any thread may be interrupted.
namespace stop_detail {

enum Phase { loading, training, done };
inline std::atomic<int> first{0};        // the first signal received; 0: none
inline std::atomic<int> interrupts{0};   // number of SIGINTs
inline std::atomic<int> phase{loading};  // whether there is something to save
inline std::atomic<bool> speaks{false};  // whether this rank prints messages
inline std::atomic<bool> saves{true};    // whether the run writes checkpoints
constexpr int most_others = 256;
inline std::atomic<int> others[most_others];  // processes of the other ranks of this machine; 0: none
static_assert(std::atomic<int>::is_always_lock_free && std::atomic<bool>::is_always_lock_free);

inline const char* name_of_signal(int signal) {
    return signal == SIGINT    ? "SIGINT"
           : signal == SIGTERM ? "SIGTERM"
           : signal == SIGHUP  ? "SIGHUP"
           : signal == SIGUSR1 ? "SIGUSR1"
                               : "no signal";
}

// A launcher that finds a rank dead ends the others by SIGTERM, and kills them soon after.
inline bool has_lost_a_rank() {
    for (const auto& process : others)
        if (process && kill(process, 0) != 0 && errno == ESRCH) return true;
    return false;
}
inline void hear(int signal) {
    const int before = errno;
    if (signal == SIGINT) interrupts++;
    if (phase == loading || (phase == training && interrupts > 1)) {
        if (speaks) print_in_signal_handler({"\n", name_of_signal(signal), ": ended at once; no checkpoint was written\n"});
        _exit(128 + signal);
    }
    if (int none = 0; phase == training && first.compare_exchange_strong(none, signal)) {
        const bool lost = has_lost_a_rank();
        if (saves && !lost) alarm(30);
        if (speaks && lost)
            print_in_signal_handler(
                {"\n", name_of_signal(signal),
                 ": another rank has died, so that nothing more can be saved; --resume auto resumes from the "
                 "newest checkpoint\n"});
        else if (speaks)
            print_in_signal_handler({"\n", name_of_signal(signal), ": stopping after this micro-batch; ",
                                     saves ? "the last complete step will be saved. A second Ctrl-C exits without saving\n"
                                           : "nothing is saved (--save-every never). A second Ctrl-C exits at once\n"});
    }
    errno = before;
}
inline void hear_alarm(int) {
    const int before = errno;
    if (speaks)
        print_in_signal_handler(
            {"\nwarning: 30 s after the signal the checkpoint is not complete; if the process is killed "
             "now, the run resumes from the one before\n"});
    errno = before;
}

}  // namespace stop_detail

// From now on signals are handled as described above. speaks: whether this rank prints messages; saves: whether the run writes
// checkpoints; others: processes of the other ranks of this machine.
inline void install_stop_signals(bool speaks, bool saves, const std::vector<int>& others = {}) {
    for (size_t i = 0; i < others.size() && i < (size_t)stop_detail::most_others; i++)
        if (kill(others[i], 0) == 0) stop_detail::others[i] = others[i];  // one that this process can see
    stop_detail::speaks = speaks;
    stop_detail::saves = saves;
    struct sigaction action = {};
    action.sa_flags = SA_RESTART;
    sigemptyset(&action.sa_mask);
    for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGUSR1}) {
        struct sigaction before;
        sigaction(signal, nullptr, &before);
        if (signal == SIGHUP && before.sa_handler == SIG_IGN) continue;
        action.sa_handler = stop_detail::hear;
        sigaction(signal, &action, nullptr);
    }
    action.sa_handler = stop_detail::hear_alarm;
    sigaction(SIGALRM, &action, nullptr);
    action.sa_handler = SIG_IGN;
    for (const int signal : {SIGPIPE, SIGXFSZ}) sigaction(signal, &action, nullptr);
}
inline void begin_training() { stop_detail::phase = stop_detail::training; }
// After the last checkpoint is complete, a signal has no effect.
inline void end_training() {
    stop_detail::phase = stop_detail::done;
    alarm(0);
}
inline bool has_trained() { return stop_detail::phase != stop_detail::loading; }
// "SIGTERM", or "" if no signal was received.
inline std::string stop_signal() { return stop_detail::first ? stop_detail::name_of_signal(stop_detail::first) : ""; }

// Whether any rank has a reason to stop, checked often and without making ranks wait for each other: all ranks call ask()
// equally often, and each call starts a vote and returns the result of the vote started `lag` calls before, which has usually
// arrived by then. So it becomes true in the same call on all ranks. If ranks depend on each other, `lag` must be at least the
// number of calls by which one may be ahead of another.
class StopVote {
public:
    StopVote(World& world, int lag) : world_(world), lag_((size_t)lag) {
#if HAVE_MPI
        if (world.size() > 1) MPI(MPI_Comm_dup(world.mpi(), &mpi_));
#endif
    }
    StopVote(const StopVote&) = delete;
    StopVote& operator=(const StopVote&) = delete;
    ~StopVote() {
#if HAVE_MPI
        // After an error MPI may still write into open votes, so their memory is kept.
        if (!votes_.empty()) new std::deque<Vote>(std::move(votes_));
#endif
    }

    bool ask(bool mine) {
        if (world_.size() == 1) return mine;
#if HAVE_MPI
        votes_.emplace_back();  // a deque's elements do not move
        Vote& v = votes_.back();
        v.mine = mine;
        MPI(MPI_Iallreduce(&v.mine, &v.result, 1, MPI_CHAR, MPI_MAX, mpi_, &v.request));
        if (votes_.size() <= lag_) return false;
        return close_oldest();
#else
        return mine;
#endif
    }
    // Completes the open votes. Called by all ranks; not after an error, when the others cannot be waited for.
    void finish() {
#if HAVE_MPI
        while (!votes_.empty()) close_oldest();
        if (mpi_ != MPI_COMM_NULL) MPI(MPI_Comm_free(&mpi_));
#endif
    }

private:
#if HAVE_MPI
    struct Vote {
        char mine = 0, result = 0;
        MPI_Request request = MPI_REQUEST_NULL;
    };
    bool close_oldest() {
        const Waiting waiting(world_, "the vote whether to stop");
        wait_for(votes_.front().request);
        const bool result = votes_.front().result != 0;
        votes_.pop_front();
        return result;
    }
    MPI_Comm mpi_ = MPI_COMM_NULL;
    std::deque<Vote> votes_;
#endif
    World& world_;
    size_t lag_;
};
