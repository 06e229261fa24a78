// Ranks that work on their shares of an input at their own pace (text/input_share.h). In rounds, all ranks report how far they
// are: a rank joins the next round after a batch, if the last round is over, and reads on without waiting for it. A rank that
// fails reports so in its next round: all ranks end in the same round and remove their unfinished files, and rank 0 prints the
// error.
#pragma once
#include <unistd.h>

#include <array>
#include <cstdint>
#include <functional>
#include <new>
#include <string>
#include <vector>

#include "../base/check.h"
#include "../base/json.h"
#include "../base/terminal.h"
#include "../text/input_share.h"
#include "world.h"

class SharedInput : public InputShare {
public:
    explicit SharedInput(World& world) : world_(world) {}
    int rank() const override { return world_.rank(); }
    int size() const override { return world_.size(); }

    int64_t read(int64_t bytes) override {
        if (pending_ && is_over()) end_round();
        if (!pending_) start_round({bytes, working});
        return bytes_of_all_;
    }
    void finish(int64_t bytes, const std::function<void(int64_t)>& tick) override {
        bool all = false;
        while (!all) {
            all = whole_round({bytes, finished});
            tick(bytes_of_all_);
        }
    }
    Strings gather(const std::string& mine) override {
        wait_for_all();
        return world_.all_gather(mine);
    }

    // Runs a command on all ranks, and returns its exit status, the same on all: also if one fails after the others have ended.
    template <class Command>
    int run(Command command) {
        try {
            command();
            wait_for_all();
            return 0;
        } catch (const OtherRankFailed&) {
            return report("", 0);
        } catch (const std::bad_alloc&) {
            return fail_all("out of memory; HINT: fewer ranks on a machine, or fewer --threads", 1);
        } catch (const std::exception& e) {
            return fail_all(in_words(e), exit_status(e));
        }
    }

private:
    enum State : int64_t { working, finished, failed };
    using Report = std::array<int64_t, 2>;  // bytes, State
    struct OtherRankFailed : Error {
        using Error::Error;
    };

    // Lets the other ranks know; returns the exit status.
    int fail_all(const std::string& problem, int status) {
        try {
            whole_round({0, failed});
        } catch (const OtherRankFailed&) {
        }
        return report(problem, status);
    }
    // The first problem of all ranks, printed by rank 0; returns its exit status.
    int report(const std::string& problem, int status) {
        const std::string mine =
            problem.empty() ? "" : std::to_string(status) + "error on " + world_.description() + ": " + problem;
        const std::string first = first_problem(world_, mine);
        if (rank() == 0) print_line(stderr, first.substr(1));
        return first[0] - '0';
    }

    // Waits for the round in which this report is; true if all ranks have finished then.
    bool whole_round(const Report& mine) {
        if (pending_) wait();
        start_round(mine);
        wait();
        bool all = true;
        for (const Report& report : reports_) all &= report[1] == finished;
        return all;
    }
    void wait_for_all() {
        while (!whole_round({0, finished})) continue;
    }
    void wait() {
        const Waiting waiting(world_, "the end of other ranks' input");
        for (useconds_t us = 10; !is_over(); us = std::min<useconds_t>(2 * us, 2000)) usleep(us);
        end_round();
    }
    void end_round() {
        pending_ = false;
        bytes_of_all_ = 0;
        bool any_failed = false;
        for (const Report& report : reports_) {
            bytes_of_all_ += report[0];
            any_failed |= report[1] == failed;
        }
        if (any_failed) throw OtherRankFailed("another rank has failed");
    }
    void start_round(const Report& mine) {
        mine_ = mine;
        reports_.assign((size_t)size(), {});
        pending_ = true;
#if HAVE_MPI
        MPI(MPI_Iallgather(mine_.data(), sizeof mine_, MPI_BYTE, reports_.data(), sizeof mine_, MPI_BYTE, world_.mpi(),
                           &request_));
#endif
    }
    bool is_over() {
        int done = 1;
#if HAVE_MPI
        MPI(MPI_Test(&request_, &done, MPI_STATUS_IGNORE));
#endif
        return done != 0;
    }

    World& world_;
    Report mine_{};
    std::vector<Report> reports_;
    bool pending_ = false;  // a round has started and is not over
    int64_t bytes_of_all_ = 0;
#if HAVE_MPI
    MPI_Request request_ = MPI_REQUEST_NULL;
#endif
};
