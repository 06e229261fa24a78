// World: the processes of a run, how they find each other, and the host's small messages between them (a few bytes to some MB:
// where to meet, counts, verdicts). Tensors go through Comm (cpu/comm.h, gpu/comm.cuh).
//
// World::join() finds out how this process was started, in this order:
//   mpirun, srun --mpi     OMPI_COMM_WORLD_SIZE, PMI_SIZE or PMIX_RANK is set: over MPI. Only then is MPI started at all.
//   torchrun and the like  RANK, WORLD_SIZE: over TCP, at MASTER_ADDR and MASTER_PORT, where rank 0 listens; torchrun itself
//                          listens there too, so with TORCHELASTIC_RUN_ID it is the next port
//   srun                   SLURM_PROCID, SLURM_STEP_NUM_TASKS: the same. Address: MASTER_ADDR, else the step's first node, else
//                          SLURM_LAUNCH_NODE_IPADDR. Port: MASTER_PORT, else one made from the job's number
//   none of these          alone
// Over TCP without MASTER_ADDR, TRAIN_GPT_WORLD_FILE names a file that all ranks see; rank 0 writes its address there. Ranks
// wait TRAIN_GPT_JOIN_TIMEOUT seconds for each other (120).
//
// Over TCP the ranks are a star around rank 0. Each has two connections to it: one for messages, and a lifeline, on which
// nothing is said until the end. A thread watches the lifelines: a rank that closes its own without a goodbye has died, and
// then all others end, wherever they are, with a line that names it.
//
// An operation is called by all ranks in the same order; each tells which one it is in, so that a mix-up is an error that names
// the ranks. Waiting for other ranks is unlimited as such. watch() starts a thread that reports a wait longer than a limit,
// with what each rank is doing, and ends the run.
//
// Errors. A rank that fails must end all: catch Error where the World still lives, print it, call abort(1). If the exception
// leaves the World's scope instead, the others end as well (over TCP at once; under a launcher when this process has ended).
// Cost: 2 messages over MPI or TCP a rank and operation; over TCP rank 0 has them all.
#pragma once
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sched.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <climits>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
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
// The C++ interface, which MPI dropped long ago, is only in the way.
#if !defined(OMPI_SKIP_MPICXX)
#define OMPI_SKIP_MPICXX 1
#endif
#if !defined(MPICH_SKIP_MPICXX)
#define MPICH_SKIP_MPICXX 1
#endif
#include <mpi.h>
#endif

#include "check.h"

// ---- what a rank is doing --------------------------------------------------------------------------------------------------
// Seconds, to be subtracted from each other.
inline double steady_seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct Activity {
    bool waiting = false;  // in this operation; else computing since the end of it
    const char* operation = nullptr;
    std::string group;
    int64_t sequence = 0;  // how many operations the group has had
    double since = steady_seconds();
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
    Activity current() const {
        std::lock_guard<std::mutex> lock(mutex_);
        return current_;
    }

private:
    mutable std::mutex mutex_;
    Activity current_;
};

class World;

// Around everything in which the host may wait for other ranks:  { Waiting waiting(world, "reading the loss"); download(...); }
class Waiting {
public:
    Waiting(World& world, const char* what);
    Waiting(Monitor* monitor /*or null*/, const char* operation, const std::string& group, int64_t sequence)
        : monitor_(monitor) {
        if (monitor_) before_ = monitor_->set({true, operation, group, sequence, steady_seconds()});
    }
    ~Waiting() {
        if (!monitor_) return;
        if (before_.waiting) {
            monitor_->set(before_);  // within a longer wait
        } else {
            Activity done = monitor_->current();
            done.waiting = false, done.since = steady_seconds();
            monitor_->set(done);
        }
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

// Looks until done() says so. Messages move only while someone looks, so that pauses make large ones slow (3 times with 20 us,
// measured). MPI's own waiting does not let others run; this does, and pauses when a wait has become long.
template <class Done>
void wait_until(Done done) {
    for (const double start = steady_seconds(); !done();)
        if (steady_seconds() - start < 1) sched_yield();
        else usleep(50);
}
// Waits for all of them and empties the list.
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
inline int number(const char* name, long low, long high) {
    const char* text = variable(name);
    if (!text) fail("%s is not set, other variables of the same launcher are; HINT: set it, or none of them", name);
    char* end;
    errno = 0;
    const long value = strtol(text, &end, 10);
    if (*end || errno || value < low || value > high)
        fail("the environment variable %s is '%s'; it must be a whole number in [%ld, %ld]", name, text, low, high);
    return (int)value;
}

struct Placement {
    enum Way { alone, mpi, tcp } way = alone;
    int rank = 0, size = 1;
    int local_rank = -1;        // -1: to be counted
    std::string address, file;  // of rank 0; where it is written
    int port = 0;
    uint64_t run = 0;  // what tells this run's ranks from another's at the same port
};

// The first of "node[003-007,9],other3": node003.
inline std::string first_node(const std::string& list) {
    const size_t open = list.find('['), comma = list.find(',');
    if (open == std::string::npos || comma < open) return list.substr(0, comma);
    return list.substr(0, open) + list.substr(open + 1, list.find_first_of(",-]", open) - open - 1);
}

inline Placement find_placement() {
    Placement p;
    for (const char* name : {"LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"})
        if (p.local_rank < 0 && variable(name)) p.local_rank = number(name, 0, INT_MAX);
    if (variable("OMPI_COMM_WORLD_SIZE") || variable("PMI_SIZE") || variable("PMIX_RANK")) {
        p.way = Placement::mpi;
        for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"})
            if (variable(name)) {
                p.size = number(name, 1, INT_MAX);
                break;
            }
        return p;
    }
    const bool torchrun = variable("RANK") || variable("WORLD_SIZE");
    const bool srun = !torchrun && variable("SLURM_PROCID") && variable("SLURM_STEP_NUM_TASKS");
    if (!torchrun && !srun) return p.local_rank = 0, p;
    const char *rank_name = torchrun ? "RANK" : "SLURM_PROCID", *size_name = torchrun ? "WORLD_SIZE" : "SLURM_STEP_NUM_TASKS";
    p.size = number(size_name, 1, 1 << 20), p.rank = number(rank_name, 0, INT_MAX);
    if (p.rank >= p.size)
        fail("%s is %d and %s is %d; ranks count from 0, so the rank must be in [0, %d]", rank_name, p.rank, size_name, p.size,
             p.size - 1);
    if (p.size == 1) return p;

    p.way = Placement::tcp;
    const char *address = variable("MASTER_ADDR"), *file = variable("TRAIN_GPT_WORLD_FILE"),
               *run_id = variable("TORCHELASTIC_RUN_ID");
    if (!address && file) return p.file = file, p;
    const char *nodes = variable("SLURM_STEP_NODELIST"), *launch = variable("SLURM_LAUNCH_NODE_IPADDR");
    if (address) p.address = address;
    else if (srun && nodes) p.address = first_node(nodes);
    else if (srun && launch) p.address = launch;
    else
        fail(
            "%s is %d of %d, but where rank 0 is does not follow from the environment; HINT: set MASTER_ADDR and MASTER_PORT, "
            "or TRAIN_GPT_WORLD_FILE to a file that all ranks see",
            rank_name, p.rank, p.size);
    const char* job = srun ? variable("SLURM_JOB_ID") : nullptr;
    if (job && !variable("MASTER_PORT")) p.port = 20000 + number("SLURM_JOB_ID", 0, INT_MAX) % 20000;
    else p.port = number("MASTER_PORT", 1, 65534) + (run_id != nullptr);
    if (run_id || job) p.run = std::hash<std::string>()(run_id ? run_id : job);
    return p;
}

inline std::string host_name() {
    char name[65] = "";
    return gethostname(name, sizeof name - 1) == 0 && *name ? name : "unknown";
}
inline double join_timeout() { return variable("TRAIN_GPT_JOIN_TIMEOUT") ? number("TRAIN_GPT_JOIN_TIMEOUT", 1, 1 << 20) : 120; }

// ---- TCP -------------------------------------------------------------------------------------------------------------------
class Socket {
public:
    Socket() = default;
    explicit Socket(int fd) : fd_(fd) {
        const int on = 1, idle = 10, interval = 5, probes = 4;  // half a minute until a machine that is gone is noticed
        setsockopt(fd_, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        setsockopt(fd_, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
        setsockopt(fd_, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
        setsockopt(fd_, IPPROTO_TCP, TCP_KEEPINTVL, &interval, sizeof interval);
        setsockopt(fd_, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
    }
    Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
    Socket& operator=(Socket&& other) noexcept {
        std::swap(fd_, other.fd_);
        return *this;
    }
    ~Socket() {
        if (fd_ >= 0) close(fd_);
    }
    int fd() const { return fd_; }
    explicit operator bool() const { return fd_ >= 0; }

    bool send(const void* data, size_t bytes) const {
        for (size_t done = 0; done < bytes;) {
            const ssize_t n = ::send(fd_, (const char*)data + done, bytes - done, MSG_NOSIGNAL);
            if (n < 0 && errno == EINTR) continue;
            if (n <= 0) return false;
            done += (size_t)n;
        }
        return true;
    }
    // False if the other end has closed, or at the deadline (steady_seconds).
    bool receive(void* data, size_t bytes, double deadline) const {
        for (size_t done = 0; done < bytes;) {
            pollfd p = {fd_, POLLIN, 0};
            const double left = deadline - steady_seconds();
            if (left <= 0) return false;
            if (poll(&p, 1, (int)std::min(1000.0, left * 1000 + 1)) <= 0) continue;
            const ssize_t n = recv(fd_, (char*)data + done, bytes - done, 0);
            if (n < 0 && errno == EINTR) continue;
            if (n <= 0) return false;
            done += (size_t)n;
        }
        return true;
    }

private:
    int fd_ = -1;
};
constexpr double no_deadline = 1e300;

// Connects, or returns an empty socket and says why not. `patience` in seconds.
inline Socket connect_to(const std::string& host, int port, double patience, std::string& why_not) {
    addrinfo hints{}, *found = nullptr;
    hints.ai_socktype = SOCK_STREAM;
    if (const int e = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found)) {
        why_not = format("the name '%s' is not known: %s", host.c_str(), gai_strerror(e));
        return Socket();
    }
    const std::unique_ptr<addrinfo, void (*)(addrinfo*)> guard(found, freeaddrinfo);
    for (const addrinfo* a = found; a; a = a->ai_next) {
        const int fd = socket(a->ai_family, a->ai_socktype | SOCK_CLOEXEC | SOCK_NONBLOCK, a->ai_protocol);
        if (fd < 0) continue;
        Socket s(fd);
        int error = connect(fd, a->ai_addr, a->ai_addrlen) == 0 ? 0 : errno;
        if (error == EINPROGRESS) {
            pollfd p = {fd, POLLOUT, 0};
            socklen_t length = sizeof error;
            if (poll(&p, 1, (int)(patience * 1000) + 1) <= 0) error = ETIMEDOUT;
            else getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length);
        }
        if (error == 0) {
            fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) & ~O_NONBLOCK);
            return s;
        }
        why_not = strerror(error);
    }
    return Socket();
}

// What an operation of the World begins with.
struct Header {
    int64_t kind, sequence;
    uint64_t bytes;
};
inline const char* name_of(int64_t kind) {
    static const char* const names[] = {"all_gather", "broadcast", "barrier", "end of the run"};
    return kind >= 0 && kind < 4 ? names[kind] : "something unknown";
}
inline void check_header(const Header& here, int rank, const Header& there, int other) {
    if (here.kind != there.kind || here.sequence != there.sequence)
        fail("ranks do not do the same: rank %d is in %s number %lld of the world, rank %d in %s number %lld", rank,
             name_of(here.kind), (long long)here.sequence, other, name_of(there.kind), (long long)there.sequence);
}

class Star {
public:
    Star(const Placement& p, const std::string& host) : rank_(p.rank), size_(p.size), hosts_((size_t)p.size) {
        hosts_[rank_] = host;
        if (rank_ == 0) gather_ranks(p);
        else reach_rank_0(p);
        if (pipe2(stop_, O_CLOEXEC) != 0) fail("cannot make a pipe: %s", strerror(errno));
        guard_ = std::thread([this] { guard_lifelines(); });
    }
    ~Star() {
        if (guard_.joinable()) stop_guard();
        for (const int fd : stop_)
            if (fd >= 0) close(fd);
    }
    const std::vector<std::string>& hosts() const { return hosts_; }

    std::vector<std::string> exchange(Header header, const std::string& mine) {
        header.bytes = mine.size();
        std::vector<std::string> all((size_t)size_);
        std::vector<uint64_t> lengths((size_t)size_);
        if (rank_ > 0) {
            const Socket& s = messages_[0];
            if (!s.send(&header, sizeof header) || !s.send(mine.data(), mine.size())) lost(0);
            if (!s.receive(lengths.data(), lengths.size() * sizeof(uint64_t), no_deadline)) lost(0);
            for (int r = 0; r < size_; r++) {
                all[r].resize(lengths[r]);
                if (!s.receive(&all[r][0], lengths[r], no_deadline)) lost(0);
            }
            return all;
        }
        all[0] = mine;
        for (int r = 1; r < size_; r++) {
            Header there;
            if (!messages_[r].receive(&there, sizeof there, no_deadline)) lost(r);
            check_header(header, 0, there, r);
            all[r].resize(there.bytes);
            if (!messages_[r].receive(&all[r][0], there.bytes, no_deadline)) lost(r);
        }
        std::string everything;
        for (int r = 0; r < size_; r++) lengths[r] = all[r].size();
        everything.assign((const char*)lengths.data(), lengths.size() * sizeof(uint64_t));
        for (const std::string& s : all) everything += s;
        for (int r = 1; r < size_; r++)
            if (!messages_[r].send(everything.data(), everything.size())) lost(r);
        return all;
    }

    // Tells all others to end. `who`: the rank that is the reason.
    void tell_abort(int status, int who, const std::string& why) {
        ending_ = true;
        const Word word(Word::abort, status, who, why);
        for (size_t r = 0; r < lifelines_.size(); r++)
            if (lifelines_[r] && !(rank_ == 0 && (int)r == who)) lifelines_[r].send(&word, sizeof word);
    }
    // Called by all ranks after their last operation. Rank 0 closes when it has read every goodbye: a connection closed before
    // that takes along what the other end has not read yet.
    void say_goodbye() {
        const Word word(Word::goodbye, 0, rank_, "");
        for (const Socket& s : lifelines_)
            if (s) s.send(&word, sizeof word);
        for (const double start = steady_seconds(); !all_gone_ && steady_seconds() - start < 5;) usleep(1000);
        stop_guard();
    }

private:
    struct Hello {
        char magic[16] = "train_gpt world";
        uint64_t run = 0;
        int32_t rank = 0, size = 0, channel = 0;  // 0: messages, 1: lifeline
        char host[68] = "";
    };
    struct Answer {
        enum : int32_t { welcome, refused, other_run };
        int32_t verdict, bytes;  // of the text, or of the host names
    };
    struct Word {
        enum : int32_t { goodbye, abort };
        int32_t kind, status, who;
        char why[244];
        Word() = default;
        Word(int32_t k, int32_t s, int32_t w, const std::string& text) : kind(k), status(s), who(w) {
            memset(why, 0, sizeof why);
            memcpy(why, text.data(), std::min(text.size(), sizeof why - 1));
        }
    };

    // ---- meeting ----
    void gather_ranks(const Placement& p) {
        const int listener = socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0);  // IPv4 as well
        const bool v6 = listener >= 0;
        const Socket door(v6 ? listener : socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
        const int on = 1, off = 0;
        setsockopt(door.fd(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
        sockaddr_in6 a6{};
        sockaddr_in a4{};
        a6.sin6_family = AF_INET6, a6.sin6_port = htons((uint16_t)p.port), a6.sin6_addr = in6addr_any;
        a4.sin_family = AF_INET, a4.sin_port = htons((uint16_t)p.port);
        if (v6) setsockopt(door.fd(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
        sockaddr* address = v6 ? (sockaddr*)&a6 : (sockaddr*)&a4;
        socklen_t length = v6 ? sizeof a6 : sizeof a4;
        if (bind(door.fd(), address, length) != 0 || listen(door.fd(), 1024) != 0)
            fail(
                "rank 0 of %d (host %s) cannot listen at port %d: %s; HINT: another program or an earlier run may use it; "
                "choose another MASTER_PORT",
                size_, hosts_[0].c_str(), p.port, strerror(errno));
        getsockname(door.fd(), address, &length);
        const int port = ntohs(v6 ? a6.sin6_port : a4.sin_port);
        uint64_t run = p.run;
        if (!p.file.empty()) {
            run = ((uint64_t)std::random_device()() << 32 | std::random_device()()) + 1;
            write_file(p.file, format("%s:%d %llu\n", hosts_[0].c_str(), port, (unsigned long long)run));
        }

        messages_.resize((size_t)size_), lifelines_.resize((size_t)size_);
        const double timeout = join_timeout(), deadline = steady_seconds() + timeout;
        for (int left = 2 * (size_ - 1); left > 0;) {
            pollfd knock = {door.fd(), POLLIN, 0};
            const double patience = deadline - steady_seconds();
            if (patience <= 0) give_up_waiting(port, timeout);
            if (poll(&knock, 1, (int)(std::min(patience, 1.0) * 1000) + 1) <= 0) continue;
            const int fd = accept4(door.fd(), nullptr, nullptr, SOCK_CLOEXEC);
            if (fd < 0) continue;
            Socket s(fd);
            Hello hello;
            const Hello reference;
            if (!s.receive(&hello, sizeof hello, std::min(deadline, steady_seconds() + 5)) ||
                memcmp(hello.magic, reference.magic, sizeof hello.magic) != 0)
                continue;  // not one of us
            if (hello.run != run) {
                answer(s, Answer::other_run, "another run listens there");
                continue;
            }
            hello.host[sizeof hello.host - 1] = 0;
            const std::string who = format("rank %d of %d (host %s)", hello.rank, hello.size, hello.host);
            if (hello.size != size_ || hello.rank < 1 || hello.rank >= size_)
                refuse(s, format("%s came to rank 0 of %d (host %s); HINT: every rank needs the same WORLD_SIZE and a RANK of "
                                 "its own in [0, WORLD_SIZE)",
                                 who.c_str(), size_, hosts_[0].c_str()));
            auto& place = (hello.channel ? lifelines_ : messages_)[(size_t)hello.rank];
            if (place)
                refuse(s,
                       format("rank %d of %d came twice, from host %s and host %s; HINT: every process needs a RANK of its own",
                              hello.rank, size_, hosts_[(size_t)hello.rank].c_str(), hello.host));
            hosts_[(size_t)hello.rank] = hello.host;
            place = std::move(s);
            left--;
        }
        std::string names;
        for (const std::string& h : hosts_) names += h + "\n";
        for (int r = 1; r < size_; r++)
            if (!answer(messages_[r], Answer::welcome, names))
                fail("rank %d of %d (host %s) has gone again", r, size_, hosts_[r].c_str());
        if (!p.file.empty()) unlink(p.file.c_str());  // nobody needs it any more, and the next run must not find it
    }
    static bool answer(const Socket& s, int32_t verdict, const std::string& text) {
        const Answer a = {verdict, (int32_t)text.size()};
        return s.send(&a, sizeof a) && s.send(text.data(), text.size());
    }
    // Refuses everyone who has come: a run that lacks one rank cannot begin.
    [[noreturn]] void refuse(const Socket& newcomer, const std::string& why) {
        if (newcomer) answer(newcomer, Answer::refused, why);
        for (const Socket& s : messages_)
            if (s) answer(s, Answer::refused, why);
        fail("%s", why.c_str());
    }
    [[noreturn]] void give_up_waiting(int port, double timeout) {
        std::string missing, here;
        int n_missing = 0;
        for (int r = 1; r < size_; r++) {
            const bool come = messages_[r] && lifelines_[r];
            if (come) here += format("%s%d (%s)", here.empty() ? "" : ", ", r, hosts_[r].c_str());
            else if (++n_missing <= 20) missing += format("%s%d", missing.empty() ? "" : ", ", r);
        }
        if (n_missing > 20) missing += ", ...";
        refuse(Socket(), format("rank%s %s of %d did not come to rank 0 (host %s, port %d) within %.0f s; here: 0%s%s; HINT: "
                                "see what these processes say, and whether a firewall is between the machines",
                                n_missing == 1 ? "" : "s", missing.c_str(), size_, hosts_[0].c_str(), port, timeout,
                                here.empty() ? "" : ", ", here.c_str()));
    }
    static void write_file(const std::string& path, const std::string& text) {
        const std::string temporary = path + ".tmp." + std::to_string(getpid());
        FILE* f = fopen(temporary.c_str(), "w");
        const bool ok = f && fputs(text.c_str(), f) >= 0;
        if ((f && fclose(f) != 0) || !ok || rename(temporary.c_str(), path.c_str()) != 0)
            fail("rank 0 cannot write TRAIN_GPT_WORLD_FILE %s: %s", path.c_str(), strerror(errno));
    }

    void reach_rank_0(const Placement& p) {
        const double start = steady_seconds(), timeout = join_timeout(), deadline = start + timeout;
        std::string why_not = "it was not tried", where;
        for (double pause = 0.02;; pause = std::min(0.5, pause * 1.5)) {
            std::string address = p.address;
            int port = p.port;
            Hello hello;
            hello.run = p.run, hello.rank = rank_, hello.size = size_;
            memcpy(hello.host, hosts_[rank_].data(), std::min(hosts_[rank_].size(), sizeof hello.host - 1));
            where = format("%s:%d", address.c_str(), port);
            bool known = true;
            if (!p.file.empty()) {
                where = "the address in " + p.file;
                known = read_file(p.file, address, port, hello.run);
                if (known) where += format(" (%s:%d)", address.c_str(), port);
                else why_not = "rank 0 has not written the file";
            }
            if (address == hosts_[rank_]) address = "localhost";  // a machine need not know its own name
            if (known && meet(address, port, hello, deadline, why_not)) return;
            if (steady_seconds() + pause > deadline)
                fail(
                    "rank %d of %d (host %s) did not reach rank 0 at %s within %.0f s: %s; HINT: is rank 0 running, and is "
                    "the address right?",
                    rank_, size_, hosts_[rank_].c_str(), where.c_str(), timeout, why_not.c_str());
            usleep((useconds_t)(pause * 1e6));
        }
    }
    static bool read_file(const std::string& path, std::string& address, int& port, uint64_t& run) {
        FILE* f = fopen(path.c_str(), "r");
        if (!f) return false;
        char name[256];
        unsigned long long number = 0;
        const bool ok = fscanf(f, "%255[^:]:%d %llu", name, &port, &number) == 3;
        fclose(f);
        address = name, run = number;
        return ok;
    }
    // Both connections, and the word of rank 0 that everyone is there. False: to be tried again.
    bool meet(const std::string& address, int port, Hello hello, double deadline, std::string& why_not) {
        messages_.clear(), lifelines_.clear();
        for (hello.channel = 0; hello.channel < 2; hello.channel++) {
            Socket s = connect_to(address, port, std::max(0.1, std::min(5.0, deadline - steady_seconds())), why_not);
            if (!s) return false;
            if (!s.send(&hello, sizeof hello)) return why_not = "the connection was closed", false;
            (hello.channel ? lifelines_ : messages_).push_back(std::move(s));
        }
        Answer a;
        // Rank 0 may have begun to wait later than this rank.
        const double patience = deadline + join_timeout() + 5;
        std::string text;
        bool heard = messages_[0].receive(&a, sizeof a, patience);
        if (heard && a.bytes >= 0) {
            text.resize((size_t)a.bytes);
            heard = messages_[0].receive(&text[0], text.size(), patience);
        }
        if (!heard) return why_not = "rank 0 closed the connection", false;
        if (a.verdict == Answer::other_run) return why_not = text, false;
        if (a.verdict != Answer::welcome)
            fail("rank %d of %d (host %s) was refused: %s", rank_, size_, hosts_[rank_].c_str(), text.c_str());
        for (int r = 0; r < size_; r++) {
            const size_t end = text.find('\n');
            hosts_[r] = text.substr(0, end);
            text.erase(0, end + 1);
        }
        return true;
    }

    // ---- the lifelines ----
    std::string describe(int r) const { return format("rank %d of %d (host %s)", r, size_, hosts_[r].c_str()); }
    void guard_lifelines() {
        std::vector<pollfd> polls = {{stop_[0], POLLIN, 0}};
        std::vector<int> ranks = {-1};
        for (size_t i = 0; i < lifelines_.size(); i++)
            if (lifelines_[i]) polls.push_back({lifelines_[i].fd(), POLLIN, 0}), ranks.push_back((int)i);
        for (size_t left = polls.size() - 1;;) {
            if (left == 0) all_gone_ = true;
            if (poll(polls.data(), polls.size(), -1) < 0) continue;
            if (polls[0].revents) return;
            for (size_t i = 1; i < polls.size(); i++) {
                if (!polls[i].revents) continue;
                if (ending_) return;  // this rank has ended the run: that the others leave is no news
                Word word;
                if (!lifelines_[(size_t)ranks[i]].receive(&word, sizeof word, no_deadline))
                    word = Word(Word::abort, 1, ranks[i], "it was killed, or crashed, or left without a word");
                if (word.kind == Word::goodbye) {
                    polls[i].fd = -1;  // poll() passes over it
                    left--;
                    continue;
                }
                word.why[sizeof word.why - 1] = 0;
                if (rank_ == 0) tell_abort(word.status, word.who, word.why);
                fprintf(stderr, "%s ends because of %s: %s\n", describe(rank_).c_str(),
                        describe(std::max(0, std::min(size_ - 1, (int)word.who))).c_str(), word.why);
                fflush(nullptr);
                _exit(word.status ? word.status : 1);
            }
        }
    }
    void stop_guard() {
        if (!guard_.joinable()) return;
        if (write(stop_[1], "", 1) != 1) guard_.detach();
        else guard_.join();
    }
    // A connection has broken. The lifeline says more: its thread ends this process.
    [[noreturn]] void lost(int r) const {
        sleep(3);
        fail("%s lost the connection to %s", describe(rank_).c_str(), describe(r).c_str());
    }

    int rank_, size_;
    std::vector<std::string> hosts_;
    std::vector<Socket> messages_, lifelines_;  // of rank 0: one for each rank, its own empty; of others: to rank 0
    int stop_[2] = {-1, -1};
    std::atomic<bool> all_gone_{false}, ending_{false};
    std::thread guard_;
};

// ---- the world -------------------------------------------------------------------------------------------------------------
// What a World is, at an address that does not move.
struct WorldState {
    static constexpr size_t slot_bytes = 256;
    Placement::Way way;
    int rank, size, local_rank;
    std::vector<std::string> hosts;
    std::shared_ptr<Monitor> monitor = std::make_shared<Monitor>();
    int64_t sequence = 0;
    const int exceptions = std::uncaught_exceptions();
    std::unique_ptr<Star> star;
#if HAVE_MPI
    MPI_Comm mpi = MPI_COMM_NULL;
#endif
    std::thread watcher;
    std::mutex mutex;
    std::condition_variable wake;
    bool stop = false;
    int status_fd = -1;

    explicit WorldState(const Placement& p) : way(p.way), rank(p.rank), size(p.size), local_rank(p.local_rank) {
        const std::string host = host_name();
        if (way == Placement::mpi) {
            start_mpi(p);
            hosts = exchange(0, host);
        } else if (way == Placement::tcp) {
            star = std::make_unique<Star>(p, host);
            hosts = star->hosts();
        } else {
            hosts = {host};
        }
        if (local_rank < 0) local_rank = (int)std::count(hosts.begin(), hosts.begin() + rank, hosts[(size_t)rank]);
    }
    std::string describe(int r) const { return format("rank %d of %d (host %s)", r, size, hosts[(size_t)r].c_str()); }
    void check_rank(int r) const { CHECK(r >= 0 && r < size, "rank %d of %d", r, size); }

    void start_mpi(const Placement& p) {
#if HAVE_MPI
#if defined(BACKEND_EMU)
        const int wanted = MPI_THREAD_MULTIPLE;  // the emulated GPU sends from threads of its own (gpu/comm.cuh)
#else
        const int wanted = MPI_THREAD_FUNNELED;
#endif
        int level = 0;
        MPI(MPI_Init_thread(nullptr, nullptr, wanted, &level));
        MPI(MPI_Comm_dup(MPI_COMM_WORLD, &mpi));
        MPI(MPI_Comm_set_errhandler(mpi, MPI_ERRORS_RETURN));
        MPI(MPI_Comm_rank(mpi, &rank));
        MPI(MPI_Comm_size(mpi, &size));
        if (size != p.size)
            fail(
                "the launcher started %d processes, but MPI sees %d; HINT: mpirun or srun belongs to another MPI than the "
                "one this program was built with; srun --mpi=pmix may fit, or --mpi=none, which goes over TCP",
                p.size, size);
        if (level < wanted) fail("this MPI was built without the support for threads that the program asks for");
#else
        if (p.size > 1)
            fail(
                "%d processes were started by mpirun or srun, but this program was built without MPI; HINT: install its "
                "headers (libopenmpi-dev) and build again, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT",
                p.size);
        way = Placement::alone;
#endif
    }

    // The one operation that all others are made of: everyone gets everyone's string.
    std::vector<std::string> exchange(int kind, const std::string& mine) {
        const Header header = {kind, ++sequence, mine.size()};
        CHECK(mine.size() < (1u << 30), "%zu bytes are not a small message", mine.size());
        if (size == 1) return {mine};
        const Waiting waiting(monitor.get(), name_of(kind), "world", sequence);
        if (star) return star->exchange(header, mine);
#if HAVE_MPI
        std::vector<Header> headers((size_t)size);
        MPI_Request request;
        MPI(MPI_Iallgather(&header, sizeof header, MPI_BYTE, headers.data(), sizeof header, MPI_BYTE, mpi, &request));
        wait_for(request);
        std::vector<int> lengths((size_t)size), starts((size_t)size);
        size_t total = 0;
        for (int r = 0; r < size; r++) {
            check_header(header, rank, headers[r], r);
            lengths[r] = (int)headers[r].bytes, starts[r] = (int)total;
            total += headers[r].bytes;
        }
        CHECK(total <= INT_MAX, "%zu bytes are not a small message", total);
        std::string everything(total, '\0');
        if (total) {
            MPI(MPI_Iallgatherv(mine.data(), (int)mine.size(), MPI_BYTE, &everything[0], lengths.data(), starts.data(),
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

    [[noreturn]] void end_run(int status, const std::string& why) {
        alarm(20);  // whatever hangs below, this process ends
        if (status == 0) status = 1;
        fflush(nullptr);
        if (star) star->tell_abort(status, rank, why);
#if HAVE_MPI
        if (way == Placement::mpi) MPI_Abort(MPI_COMM_WORLD, status);
#endif
        _exit(status);
    }

    // All well: waits for the others to be done as well. On the way out of an error: nobody can be waited for.
    void leave() {
        const bool well = std::uncaught_exceptions() <= exceptions;
        if (well) exchange(3, "");
        if (star && well) star->say_goodbye();
        if (star && !well) star->tell_abort(1, rank, "an error");
#if HAVE_MPI
        // Only now that all are well: mpirun (Open MPI 4.1.4) crashes when a rank aborts while another is in MPI_Finalize.
        if (way == Placement::mpi && well) {
            const Waiting waiting(monitor.get(), "MPI_Finalize", "", 0);
            MPI_Comm_free(&mpi);
            MPI_Finalize();
        }
#endif
        if (watcher.joinable()) {
            {
                std::lock_guard<std::mutex> lock(mutex);
                stop = true;
            }
            wake.notify_all();
            watcher.join();
        }
        if (status_fd >= 0) close(status_fd);
    }

    // ---- the watchdog ----
    void watch(double timeout, const std::string& status_file) {
        CHECK(!watcher.joinable(), "watch() is called once");
        if (!status_file.empty()) {
            if (rank == 0) open_status(status_file, O_CREAT | O_TRUNC);
            exchange(2, "");
            if (rank > 0) open_status(status_file, O_CREAT);
        }
        const Activity at_start = monitor->current();
        write_status(at_start);
        watcher = std::thread([=] {
            Activity last = at_start;
            std::unique_lock<std::mutex> lock(mutex);
            while (!wake.wait_for(lock, std::chrono::duration<double>(std::min(1.0, timeout / 4)), [&] { return stop; })) {
                const Activity now = monitor->current();
                if (now.since != last.since || now.waiting != last.waiting) write_status(now);
                last = now;
                if (now.waiting && steady_seconds() - now.since > timeout) report(now);
            }
            Activity end = last;
            end.operation = "the end", end.group.clear(), end.waiting = false;
            write_status(end);
        });
    }
    void open_status(const std::string& path, int flags) {
        status_fd = open(path.c_str(), O_RDWR | O_CLOEXEC | flags, 0644);
        if (status_fd < 0) fail("%s cannot write %s: %s", describe(rank).c_str(), path.c_str(), strerror(errno));
    }
    static double unix_seconds() {
        return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
    }
    void write_status(const Activity& a) const {
        if (status_fd < 0) return;
        std::string slot = format("%s: %s since %.3f %s %s", describe(rank).c_str(), a.waiting ? "waiting" : "computing",
                                  unix_seconds() - (steady_seconds() - a.since), a.waiting ? "in" : "after", a.name().c_str());
        slot.resize(slot_bytes - 1, ' ');
        slot += '\n';
        // A report without this slot is better than a run that ends because of it.
        if (pwrite(status_fd, slot.data(), slot.size(), (off_t)(slot_bytes * (size_t)rank)) < 0) return;
    }
    // What rank r has written, with "since T" turned into "for S s".
    std::string read_status(int r) const {
        std::string slot(slot_bytes, '\0');
        const ssize_t n = pread(status_fd, &slot[0], slot_bytes, (off_t)(slot_bytes * (size_t)r));
        slot.resize((size_t)std::max<ssize_t>(0, n));
        const size_t since = slot.find(" since ");
        if (since == std::string::npos || slot[0] == 0) return describe(r) + ": nothing is known";
        char* end;
        const double time = strtod(slot.c_str() + since + 7, &end);
        const std::string rest = end;
        slot = slot.substr(0, since) + format(" for %.0f s", unix_seconds() - time) + rest;
        slot.erase(slot.find_last_not_of(" \n") + 1);
        return slot;
    }
    // All ranks may come here at once. The first one to lock the status file speaks; the others leave it some time.
    [[noreturn]] void report(const Activity& a) {
        if (status_fd >= 0 && flock(status_fd, LOCK_EX | LOCK_NB) != 0) sleep(5);
        std::string text =
            format("%s: waited %.0f s in %s\n", describe(rank).c_str(), steady_seconds() - a.since, a.name().c_str());
        for (int r = 0; r < size && status_fd >= 0; r++)
            if (r != rank) text += "  " + read_status(r) + "\n";
        fprintf(stderr, "error: %sHINT: look at the rank that does not wait, or waits for something else\n", text.c_str());
        end_run(1, format("it waited %.0f s in %s", steady_seconds() - a.since, a.name().c_str()));
    }
};

}  // namespace world_detail

class World {
public:
    static World join() { return World(std::make_unique<State>(world_detail::find_placement())); }
    World(World&&) = default;
    World& operator=(World&&) = delete;
    ~World() {
        try {
            if (state_) state_->leave();
        } catch (const Error& e) {
            fprintf(stderr, "error: %s\n", e.what());
            state_->end_run(1, "it could not end the run in order");
        }
    }

    int rank() const { return state_->rank; }
    int size() const { return state_->size; }
    int local_rank() const { return state_->local_rank; }  // among the ranks of this machine
    const std::string& host() const { return state_->hosts[(size_t)rank()]; }
    const std::vector<std::string>& hosts() const { return state_->hosts; }
    bool has_mpi() const { return state_->way == world_detail::Placement::mpi; }
    // "rank 3 of 8 (host node2)"
    std::string description() const { return state_->describe(rank()); }

    // Of any lengths, one from each rank.
    std::vector<std::string> all_gather(const std::string& mine) { return state_->exchange(0, mine); }
    void all_gather(const void* mine, size_t bytes, void* all /*(size, bytes)*/) {
        const std::vector<std::string> parts = all_gather(std::string((const char*)mine, bytes));
        for (int r = 0; r < size(); r++) {
            if (parts[r].size() != bytes)
                fail("ranks do not do the same: rank %d gathers %zu bytes, rank %d %zu", rank(), bytes, r, parts[r].size());
            if (bytes) memcpy((char*)all + (size_t)r * bytes, parts[r].data(), bytes);
        }
    }
    void broadcast(void* data, size_t bytes, int root) {
        state_->check_rank(root);
        const auto parts = state_->exchange(1, rank() == root ? std::string((const char*)data, bytes) : std::string());
        if (parts[root].size() != bytes)
            fail("ranks do not do the same: rank %d expects %zu bytes from rank %d, which sends %zu", rank(), bytes, root,
                 parts[root].size());
        if (bytes) memcpy(data, parts[root].data(), bytes);
    }
    void barrier() { state_->exchange(2, ""); }

    // Ends every rank with this status (1 for 0). Does not return, does not wait, runs no destructors.
    [[noreturn]] void abort(int status) { state_->end_run(status, "it gave up"); }

    // From now on a wait of more than `timeout` seconds is reported and ends the run. Called by all ranks. status_file: a file
    // that all see, where each says once a second what it is doing, in 256 bytes; or empty.
    void watch(double timeout, const std::string& status_file) { state_->watch(timeout, status_file); }

    std::shared_ptr<Monitor> monitor() const { return state_->monitor; }
#if HAVE_MPI
    MPI_Comm mpi() const { return state_->mpi; }  // of all ranks, the World's own
#endif

private:
    using State = world_detail::WorldState;

    explicit World(std::unique_ptr<State> state) : state_(std::move(state)) {}
    std::unique_ptr<State> state_;
};

inline Waiting::Waiting(World& world, const char* what) : Waiting(world.monitor().get(), what, "", 0) {}
