// World: the processes of a run, how they find each other, and small messages between their hosts (from a few bytes to some MB:
// rendezvous, counts, decisions). Tensors are sent through Comm (comm_cpu.h, comm_gpu.cuh).
//
// World::join() detects how this process was started:
//   mpirun, srun --mpi=pmix   OMPI_COMM_WORLD_SIZE, PMI_SIZE or PMIX_RANK is set. Only then is MPI started.
//   torchrun, plain srun      WORLD_SIZE or SLURM_STEP_NUM_TASKS is above 1: refused, as ranks could not find each other and
//                             each would do all of the work
//   otherwise                 a single process, also in a SLURM batch script, which is not a step of several tasks
//
// All ranks call each operation in the same order; each message names its operation, so that a mismatch is an error that names
// the ranks. join(timeout) starts a thread that reports a wait, of the host, of its GPU or for a disk, that exceeds a limit,
// with each rank's current activity, and ends the run; the first wait is for the other ranks to start.
//
// Errors. A rank that fails must end all ranks: catch Error while the World is alive, print it, call abort(1). If the exception
// leaves the World's scope instead, or the process is killed, the launcher ends the others after this process; mpirun names the
// rank. Cost: 2 MPI collectives per operation.
#pragma once
#include <fcntl.h>
#include <sched.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <climits>
#include <condition_variable>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <exception>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#if !defined(HAVE_MPI)
#if __has_include(<mpi.h>)
#define HAVE_MPI 1
#else
#define HAVE_MPI 0
#endif
#endif
#if HAVE_MPI
// MPI's C++ interface was removed from the standard long ago and only slows compilation.
#if !defined(OMPI_SKIP_MPICXX)
#define OMPI_SKIP_MPICXX 1
#endif
#if !defined(MPICH_SKIP_MPICXX)
#define MPICH_SKIP_MPICXX 1
#endif
#include <mpi.h>
#endif

#include "../base/check.h"
#include "../base/clock.h"
#include "../base/terminal.h"

// ---- the activity of a rank
// --------------------------------------------------------------------------------------------------
struct Activity {
    bool waiting = false;  // waiting in this operation, or computing since its end
    const char* operation = nullptr;
    std::string group;
    int64_t sequence = 0;  // operations of the group so far
    double since = monotonic_seconds();
    const char* hint = "look at the rank that is not waiting, or is waiting for something else";
    // "all_reduce number 17 of group tensor"
    std::string name() const {
        if (!operation) return "the start";
        return group.empty() ? operation : format("%s number %lld of group %s", operation, (long long)sequence, group.c_str());
    }
};

class Monitor {
public:
    Activity set(Activity next) {
        std::lock_guard<std::mutex> lock(mutex_);
        std::swap(next, current_);
        return next;
    }
    // Ends the wait that set() started.
    void end_wait() {
        std::lock_guard<std::mutex> lock(mutex_);
        const double now = monotonic_seconds();
        waited_[current_.group] += now - current_.since;
        current_.waiting = false;
        current_.since = now;
    }
    // For a group whose operations run on a device: work of the host in the meantime is not a wait.
    void add_wait_of_device(const std::string& group, double seconds) {
        std::lock_guard<std::mutex> lock(mutex_);
        waited_on_device_[group] += seconds;
    }
    // Seconds that this rank has waited for others so far, by group. Includes a device's waits once they are over.
    std::map<std::string, double> waited() {
        look_at_devices();
        std::lock_guard<std::mutex> lock(mutex_);
        std::map<std::string, double> all = waited_on_device_;
        all.insert(waited_.begin(), waited_.end());
        return all;
    }
    Activity current() const {
        std::lock_guard<std::mutex> lock(mutex_);
        return current_;
    }
    // Registers a function that returns a device's wait, for the watchdog and waited(). look() may throw an Error, which ends
    // the run.
    void add(const void* owner, std::function<Activity()> look) {
        std::lock_guard<std::mutex> lock(looks_mutex_);
        looks_[owner] = std::move(look);
    }
    void remove(const void* owner) {
        std::lock_guard<std::mutex> lock(looks_mutex_);
        looks_.erase(owner);
    }
    // The longest current wait of the host and its device; without one, the host's current work.
    Activity longest_wait() {
        const Activity host = current(), device = look_at_devices();
        return device.waiting && (!host.waiting || device.since < host.since) ? device : host;
    }

private:
    // The longest current wait, if there is one.
    Activity look_at_devices() {
        Activity longest;
        std::lock_guard<std::mutex> lock(looks_mutex_);
        for (const auto& [owner, look] : looks_)
            if (const Activity a = look(); a.waiting && (!longest.waiting || a.since < longest.since)) longest = a;
        return longest;
    }

    mutable std::mutex mutex_;
    Activity current_;
    std::map<std::string, double> waited_, waited_on_device_;
    std::mutex looks_mutex_;  // a separate one: a look may be slow, and the host's next wait must be recorded meanwhile
    std::map<const void*, std::function<Activity()>> looks_;
};

// The start of the last uninterrupted run of a thread that looks every `pause`: while a job is suspended, nobody waits.
class RunningSince {
public:
    explicit RunningSince(std::chrono::duration<double> pause) : longest_(10 * pause.count()) {}
    double look() {
        const double now = monotonic_seconds();
        if (now - last_ > longest_) since_ = now;
        last_ = now;
        return since_;
    }

private:
    const double longest_;
    double last_ = monotonic_seconds(), since_ = last_;
};

class World;

// Marks a scope in which the host may wait for other ranks:  { Waiting waiting(world, "reading the loss"); download(...); }
class Waiting {
public:
    Waiting(World& world, const char* what);
    Waiting(Monitor* monitor /*or null*/, const char* operation, const std::string& group, int64_t sequence)
        : monitor_(monitor) {
        if (monitor_) before_ = monitor_->set({true, operation, group, sequence});
    }
    ~Waiting() {
        if (!monitor_) return;
        if (before_.waiting) monitor_->set(before_);  // nested in a longer wait
        else monitor_->end_wait();
    }
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;

private:
    Monitor* monitor_;
    Activity before_;
};

// ---- MPI -------------------------------------------------------------------------------------------------------------------
#if HAVE_MPI
[[noreturn]] inline void mpi_failed(int code, const char* what, const char* file, int line) {
    char text[MPI_MAX_ERROR_STRING] = "";
    int length = 0;
    MPI_Error_string(code, text, &length);
    fail("%s failed: %s at %s:%d", what, text, file, line);
}
#define MPI(call)                                                                       \
    do {                                                                                \
        const int mpi_code_ = (call);                                                   \
        if (mpi_code_ != MPI_SUCCESS) mpi_failed(mpi_code_, #call, __FILE__, __LINE__); \
    } while (0)

// Polls until done() returns true. Messages progress only while polling, so pauses make large ones slow (3 times with 20 us,
// measured). MPI's own waiting does not yield the core; this does, and pauses once a wait has become long. A yield to a process
// that only computes lasts for its time slice of some milliseconds: for a while after such a yield, waits sleep instead,
// because a sleeper is woken at once. Next to one busy process on two cores a barrier of two ranks then takes 0.05 ms, not 4
// ms. With OMP_WAIT_POLICY=passive, for a machine that does other work as well, every wait soon sleeps, for an eighth of its
// duration so far at a time: four ranks on two cores next to compilers need a third to half of the time (32 s instead of 58 to
// 100 s of layouts' parity).
inline bool waits_asleep() {
    const char* policy = getenv("OMP_WAIT_POLICY");
    const bool passive = policy && !strcasecmp(policy, "passive");
    if (passive) prctl(PR_SET_TIMERSLACK, 1000);  // ns; by default a sleep of 1 us lasts 55
    return passive;
}
template <class Done>
void wait_until(Done done) {
    constexpr double slice = 0.002, crowded_for = 0.1;
    static thread_local double crowded_until = 0;
    static thread_local const bool asleep = waits_asleep();
    const double awake = asleep ? 30e-6 : 1, start = monotonic_seconds();
    for (double now = start; !done();) {
        const double before = now;
        const bool yields = now - start < awake && now > crowded_until;
        if (yields) sched_yield();
        else usleep(asleep ? (unsigned)std::min(15 + (now - start) * 1e6 / 8, 150.0) : now - start < 1 ? 1 : 50);
        now = monotonic_seconds();
        if (yields && now - before > slice) {
            crowded_until = now + crowded_for;
            prctl(PR_SET_TIMERSLACK, 1000);
        }
    }
}
// Waits for all requests and empties the list.
inline void wait_for(std::vector<MPI_Request>& requests) {
    wait_until([&] {
        int done = 0;
        MPI(MPI_Testall((int)requests.size(), requests.data(), &done, MPI_STATUSES_IGNORE));
        return done != 0;
    });
    requests.clear();
}
inline void wait_for(MPI_Request request) {
    std::vector<MPI_Request> one = {request};
    wait_for(one);
}
#endif

namespace world_detail {

// ---- how this process was started ------------------------------------------------------------------------------------------
inline const char* variable(const char* name) {
    const char* value = getenv(name);
    return value && *value ? value : nullptr;
}
// The value of an environment variable, which must be set.
inline int number(const char* name, long low, long high) {
    const char* text = variable(name);
    char* end;
    errno = 0;
    const long value = strtol(text, &end, 10);
    if (*end || errno || value < low || value > high)
        fail("the environment variable %s is '%s'; it must be a whole number in [%ld, %ld]", name, text, low, high);
    return (int)value;
}

struct Placement {
    bool mpi = false;
    int size = 1;  // as given by the launcher; 0: not given
};

inline Placement find_placement() {
    if (variable("OMPI_COMM_WORLD_SIZE") || variable("PMI_SIZE") || variable("PMIX_RANK")) {
        for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"})
            if (variable(name)) return {true, number(name, 1, INT_MAX)};
        return {true, 0};
    }
    for (const char* name : {"WORLD_SIZE", "SLURM_STEP_NUM_TASKS"})
        if (const int n = variable(name) ? number(name, 1, INT_MAX) : 1; n > 1)
            fail(
                "%s is %d, so this is one of %d processes, but MPI did not start them and they cannot find each other; HINT: "
                "mpirun -n %d ./train_gpt ..., or under SLURM srun --mpi=pmix ./train_gpt ...; to run a single process, unset "
                "%s",
                name, n, n, n, name);
    return {};
}

// TRAIN_GPT_TEST_NODE=NAME: for tests, the ranks with this name are a node of their own on this machine.
inline std::string host_name() {
    if (const char* name = variable("TRAIN_GPT_TEST_NODE")) return name;
    char name[65] = "";
    return gethostname(name, sizeof name - 1) == 0 && *name ? name : "unknown";
}

// Identifies the machine independently of its name: nodes made from one image share a name, and containers on one have several.
inline std::string machine_id() {
    std::string id;
    std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), id);
    return id.empty() ? host_name() : id;
}

// The header of every operation of the World.
struct Header {
    int64_t kind, sequence;
    uint64_t bytes;
};
inline const char* name_of(int64_t kind) {
    static const char* const names[] = {"all_gather", "barrier", "end of the run"};
    return kind >= 0 && kind < 3 ? names[kind] : "something unknown";
}
inline void check_header(const Header& here, int rank, const Header& there, int other) {
    if (here.kind != there.kind || here.sequence != there.sequence)
        fail("ranks disagree: rank %d is in %s number %lld of the world, rank %d in %s number %lld", rank, name_of(here.kind),
             (long long)here.sequence, other, name_of(there.kind), (long long)there.sequence);
}

// ---- the world -------------------------------------------------------------------------------------------------------------
// The state of a World, at a fixed address.
struct WorldState {
    static constexpr size_t slot_bytes = 256;
    bool has_mpi;
    int rank = 0, size = 1, local_rank = 0;
    std::vector<std::string> hosts, machines;
    std::vector<int> processes;  // of the ranks
    std::shared_ptr<Monitor> monitor = std::make_shared<Monitor>();
    int64_t sequence = 0;
    const int exceptions = std::uncaught_exceptions();
#if HAVE_MPI
    MPI_Comm mpi = MPI_COMM_NULL;
#endif
    std::thread watcher, watcher_of_watcher;
    std::mutex mutex;  // protects the members down to `asked`
    std::condition_variable wake;
    bool stop = false, watcher_ended = false;
    double asked = 0;  // when the watcher's pending question to the device started; 0: none
    int status_fd = -1;
    std::atomic<double> timeout{0};
    std::atomic<bool> together{false};  // the ranks have found each other

    // timeout: of a wait, in seconds; 0: none is watched.
    WorldState(const Placement& p, double timeout) : has_mpi(p.mpi) {
        if (has_mpi && timeout > 0) start_watching(timeout);
        try {
            find_others(p);
        } catch (...) {
            end_watching();
            throw;
        }
    }
    void find_others(const Placement& p) {
        if (has_mpi) start_mpi(p);
        for (const std::string& all : exchange(0, host_name() + '\n' + machine_id() + '\n' + std::to_string(getpid()))) {
            const size_t first = all.find('\n'), second = all.find('\n', first + 1);
            hosts.push_back(all.substr(0, first));
            machines.push_back(all.substr(first + 1, second - first - 1));
            processes.push_back(atoi(all.c_str() + second + 1));
        }
        for (int r = 0; r < rank; r++) local_rank += is_here(r);
        together = true;
    }
    bool is_one_node(int a, int b) const { return hosts[a] == hosts[b] && machines[a] == machines[b]; }
    bool is_here(int r) const { return is_one_node(r, rank); }
    std::string describe(int r) const {
        return together ? format("rank %d of %d (host %s)", r, size, hosts[r].c_str())
                        : format("process %d on host %s", (int)getpid(), host_name().c_str());
    }

    void start_mpi(const Placement& p) {
#if HAVE_MPI
        int level = 0;
        const Waiting waiting(monitor.get(), "MPI_Init, for the other ranks to start", "", 0);
        MPI(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &level));
        MPI(MPI_Comm_dup(MPI_COMM_WORLD, &mpi));
        MPI(MPI_Comm_set_errhandler(mpi, MPI_ERRORS_RETURN));
        MPI(MPI_Comm_rank(mpi, &rank));
        MPI(MPI_Comm_size(mpi, &size));
        if (p.size && size != p.size)
            fail(
                "the launcher started %d processes, but MPI sees %d; HINT: mpirun or srun is from another MPI than the "
                "program was built with; try srun --mpi=pmix",
                p.size, size);
        if (level < MPI_THREAD_FUNNELED)
            fail("this MPI was built without the threads that the program needs: MPI_THREAD_FUNNELED");
#else
        if (p.size > 1)
            fail(
                "%d processes were started by mpirun or srun, but this program was built without MPI; HINT: install its "
                "headers (libopenmpi-dev) and build again",
                p.size);
        has_mpi = false;
#endif
    }

    // The operation on which all others are built: an all-gather of strings of any length.
    std::vector<std::string> exchange(int kind, const std::string& mine) {
        ++sequence;
        CHECK(mine.size() < (1u << 30), "%zu bytes are not a small message", mine.size());
        if (size == 1) return {mine};
        const Waiting waiting(monitor.get(), name_of(kind), "world", sequence);
#if HAVE_MPI
        const Header header = {kind, sequence, mine.size()};
        std::vector<Header> headers((size_t)size);
        MPI_Request request;
        MPI(MPI_Iallgather(&header, sizeof header, MPI_BYTE, headers.data(), sizeof header, MPI_BYTE, mpi, &request));
        wait_for(request);
        std::vector<int> lengths((size_t)size), starts((size_t)size);
        size_t total = 0;
        for (int r = 0; r < size; r++) {
            check_header(header, rank, headers[r], r);
            lengths[r] = (int)headers[r].bytes;
            starts[r] = (int)total;
            total += headers[r].bytes;
        }
        CHECK(total <= INT_MAX, "%zu bytes are not a small message", total);
        std::string everything(total, '\0');
        if (total) {
            MPI(MPI_Iallgatherv(mine.data(), (int)mine.size(), MPI_BYTE, everything.data(), lengths.data(), starts.data(),
                                MPI_BYTE, mpi, &request));
            wait_for(request);
        }
        std::vector<std::string> all;
        for (int r = 0; r < size; r++) all.push_back(everything.substr((size_t)starts[r], (size_t)lengths[r]));
        return all;
#else
        return {};
#endif
    }

    [[noreturn]] void end_run(int status) {
        signal(SIGALRM, SIG_DFL);
        alarm(20);  // this process ends even if something below hangs
        if (status == 0) status = 1;
        fflush(nullptr);
#if HAVE_MPI
        int started = 0;
        if (has_mpi) MPI_Initialized(&started);
        if (started) MPI_Abort(MPI_COMM_WORLD, status);
#endif
        _exit(status);
    }

    // Even in a process that is otherwise quiet, because no other one may know the error.
    [[noreturn]] void end_by_error(const std::string& error) {
        is_quiet() = false;
        print_line(stderr, "error: " + error);
        end_run(1);
    }

    // Normally waits until the other ranks are done, too. After an error no rank can be waited for.
    void leave() {
        const bool well = std::uncaught_exceptions() <= exceptions;
        if (well) exchange(2, "");
#if HAVE_MPI
        // Only when all ranks are well: mpirun (Open MPI 4.1.4) crashes when a rank aborts while another is in MPI_Finalize.
        if (has_mpi && well) {
            const Waiting waiting(monitor.get(), "MPI_Finalize", "", 0);
            MPI_Comm_free(&mpi);
            MPI_Finalize();
        }
#endif
        end_watching();
        if (status_fd >= 0) close(status_fd);
    }
    void end_watching() {
        end(watcher, stop);
        end(watcher_of_watcher, watcher_ended);
    }

    // ---- the watchdog: one thread asks the host and the device for their waits. The device's driver may hang together with
    //      the operation, so a second thread, which asks nobody, watches the first ----
    void watch(double seconds, const std::string& status_file) {
        if (!status_file.empty()) {
            CHECK(status_fd < 0, "watch() gets a status file once");
            if (rank == 0) open_status(status_file, O_CREAT | O_TRUNC);
            exchange(1, "");
            if (rank > 0) open_status(status_file, O_CREAT);
            const std::lock_guard<std::mutex> lock(mutex);
            write_status(monitor->current());
        }
        if (watcher.joinable()) timeout = seconds;
        else start_watching(seconds);
    }
    void start_watching(double seconds) {
        timeout = seconds;
        const Activity at_start = monitor->current();
        const std::chrono::duration<double> pause(std::min(1.0, seconds / 4));
        watcher_of_watcher = std::thread([=] {
            RunningSince running(pause);
            std::unique_lock<std::mutex> lock(mutex);
            while (!wake.wait_for(lock, pause, [&] { return watcher_ended; })) {
                const double since = std::max(asked, running.look());
                if (asked > 0 && monotonic_seconds() - since > timeout)
                    report({true, "a question to the GPU's driver", "", 0, asked});
            }
        });
        watcher = std::thread([=] {
            Activity last = at_start;
            RunningSince running(pause);
            std::unique_lock<std::mutex> lock(mutex);
            while (!wake.wait_for(lock, pause, [&] { return stop; })) {
                asked = monotonic_seconds();
                lock.unlock();
                const Activity now = look();
                lock.lock();
                asked = 0;
                if (now.since != last.since || now.waiting != last.waiting) write_status(now);
                last = now;
                const double since = std::max(now.since, running.look());
                if (now.waiting && monotonic_seconds() - since > timeout) report(now);
            }
            Activity end = last;
            end.operation = "the end";
            end.group.clear();
            end.waiting = false;
            write_status(end);
        });
    }
    void end(std::thread& thread, bool& asked_to) {
        if (!thread.joinable()) return;
        {
            std::lock_guard<std::mutex> lock(mutex);
            asked_to = true;
        }
        wake.notify_all();
        thread.join();
    }
    Activity look() {
        try {
            return monitor->longest_wait();
        } catch (const Error& e) {
            end_by_error(describe(rank) + ": " + e.what());
        }
    }
    void open_status(const std::string& path, int flags) {
        const int fd = open(path.c_str(), O_RDWR | O_NOFOLLOW | O_CLOEXEC | flags, 0644);
        if (fd < 0) fail("%s cannot write %s: %s", describe(rank).c_str(), path.c_str(), strerror(errno));
        const std::lock_guard<std::mutex> lock(mutex);
        status_fd = fd;
    }
    static double unix_seconds() {
        return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
    }
    void write_status(const Activity& a) const {
        if (status_fd < 0) return;
        std::string slot =
            format("%s: %s since %.3f %s %s", describe(rank).c_str(), a.waiting ? "waiting" : "computing",
                   unix_seconds() - (monotonic_seconds() - a.since), a.waiting ? "in" : "after", a.name().c_str());
        slot.resize(slot_bytes - 1, ' ');
        slot += '\n';
        // A failed write only loses this line of the report; it must not end the run.
        if (pwrite(status_fd, slot.data(), slot.size(), (off_t)(slot_bytes * (size_t)rank)) < 0) return;
    }
    // The line written by rank r, with "since T" converted to "for S s".
    std::string read_status(int r) const {
        std::string slot(slot_bytes, '\0');
        const ssize_t n = pread(status_fd, slot.data(), slot_bytes, (off_t)(slot_bytes * (size_t)r));
        slot.resize((size_t)std::max<ssize_t>(0, n));
        const size_t since = slot.find(" since ");
        if (since == std::string::npos || slot[0] == 0) return describe(r) + ": no status";
        char* end;
        const double time = strtod(slot.c_str() + since + 7, &end);
        const std::string rest = end;
        slot = slot.substr(0, since) + format(" for %.0f s", unix_seconds() - time) + rest;
        slot.erase(slot.find_last_not_of(" \n") + 1);
        return slot;
    }
    // All ranks may call this at once. The first one to lock the status file reports; the others give it some time.
    [[noreturn]] void report(const Activity& a) {
        if (status_fd >= 0 && flock(status_fd, LOCK_EX | LOCK_NB) != 0) sleep(5);
        std::string text =
            format("%s: waited %.0f s in %s\n", describe(rank).c_str(), monotonic_seconds() - a.since, a.name().c_str());
        for (int r = 0; r < size && status_fd >= 0; r++)
            if (r != rank) text += "  " + read_status(r) + "\n";
        end_by_error(text + "HINT: " + a.hint);
    }
};

}  // namespace world_detail

class World {
public:
    // timeout: seconds after which a wait, the first one for the other ranks included, is reported and ends the run; 0: never.
    static World join(double timeout = 0) { return World(std::make_unique<State>(world_detail::find_placement(), timeout)); }
    World(World&&) = default;
    World& operator=(World&&) = delete;
    ~World() {
        try {
            if (state_) state_->leave();
        } catch (const Error& e) {
            state_->end_by_error(e.what());
        }
    }

    int rank() const { return state_->rank; }
    int size() const { return state_->size; }
    int local_rank() const { return state_->local_rank; }  // among the ranks of this machine
    const std::string& host() const { return state_->hosts[(size_t)rank()]; }
    const std::vector<std::string>& hosts() const { return state_->hosts; }
    bool on_one_machine(size_t a, size_t b) const { return state_->machines[a] == state_->machines[b]; }
    // True on this machine and in this container: rank r sees the same GPUs and has the same limits.
    bool is_here(int r) const { return state_->is_here(r); }
    // The node of each rank, as the number of its first rank.
    std::vector<int> nodes() const {
        std::vector<int> first((size_t)size());
        for (int r = 0; r < size(); r++)
            while (!state_->is_one_node(first[(size_t)r], r)) first[(size_t)r]++;
        return first;
    }
    bool has_mpi() const { return state_->has_mpi; }  // started by mpirun or srun
    // "rank 3 of 8 (host node2)"
    std::string description() const { return state_->describe(rank()); }

    // One string of any length from each rank.
    std::vector<std::string> all_gather(const std::string& mine) { return state_->exchange(0, mine); }
    // In slices, each of which is a small message per rank.
    void all_gather(const void* mine, size_t bytes, void* all /*(size, bytes)*/) {
        const size_t most = std::max<size_t>(1, (1 << 24) / (size_t)size());
        size_t from = 0;
        do {
            const size_t n = std::min(most, bytes - from);
            const std::vector<std::string> parts = all_gather(std::string((const char*)mine + from, n));
            for (int r = 0; r < size(); r++) {
                if (parts[r].size() != n)
                    fail("ranks disagree: rank %d gathers %zu bytes, rank %d %zu", rank(), n, r, parts[r].size());
                if (n) memcpy((char*)all + (size_t)r * bytes + from, parts[r].data(), n);
            }
            from += n;
        } while (from < bytes);
    }
    void barrier() { state_->exchange(1, ""); }
    // The processes of the other ranks of this machine.
    std::vector<int> processes_here() const {
        std::vector<int> others;
        for (int r = 0; r < size(); r++)
            if (r != rank() && is_here(r)) others.push_back(state_->processes[(size_t)r]);
        return others;
    }

    // Ends every rank with this status (0 becomes 1). Does not return, does not wait, runs no destructors.
    [[noreturn]] void abort(int status) { state_->end_run(status); }

    // From now on, a wait of more than `timeout` seconds is reported and ends the run. All ranks call it. status_file: a file
    // that all ranks can reach, where each writes its current activity, in 256 bytes, at most once a second; or empty.
    void watch(double timeout, const std::string& status_file) { state_->watch(timeout, status_file); }

    double timeout() const { return state_->timeout; }  // of watch(); 0: never
    std::shared_ptr<Monitor> monitor() const { return state_->monitor; }
#if HAVE_MPI
    MPI_Comm mpi() const { return state_->mpi; }  // the World's own communicator of all ranks
#endif

private:
    using State = world_detail::WorldState;

    explicit World(std::unique_ptr<State> state) : state_(std::move(state)) {}
    std::unique_ptr<State> state_;
};

inline Waiting::Waiting(World& world, const char* what) : Waiting(world.monitor().get(), what, "", 0) {}

// The first rank's message that is not empty, identical on all ranks; empty: there is none. All ranks call it.
inline std::string first_problem(World& world, const std::string& mine) {
    for (const std::string& problem : world.all_gather(mine))
        if (!problem.empty()) return problem;
    return "";
}
