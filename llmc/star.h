// How this process was started, and, where no MPI carries the ranks' messages, a star of TCP connections that does. For World
// (world.h), which says what the environment may hold.
//
// Over TCP the ranks are a star around rank 0. Each has two connections to it: one for messages, and a lifeline, on which
// nothing is said until the end. A thread watches the lifelines: a rank that closes its own without a goodbye has died, and
// then all others end, wherever they are, with a line that names it.
#pragma once
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "terminal.h"

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
    // False if the other end has closed, or at the deadline (monotonic_seconds).
    bool receive(void* data, size_t bytes, double deadline) const {
        for (size_t done = 0; done < bytes;) {
            pollfd p = {fd_, POLLIN, 0};
            const double left = deadline - monotonic_seconds();
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
        for (const double start = monotonic_seconds(); !all_gone_ && monotonic_seconds() - start < 5;) usleep(1000);
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
        const double timeout = join_timeout(), deadline = monotonic_seconds() + timeout;
        for (int left = 2 * (size_ - 1); left > 0;) {
            pollfd knock = {door.fd(), POLLIN, 0};
            const double patience = deadline - monotonic_seconds();
            if (patience <= 0) give_up_waiting(port, timeout);
            if (poll(&knock, 1, (int)(std::min(patience, 1.0) * 1000) + 1) <= 0) continue;
            const int fd = accept4(door.fd(), nullptr, nullptr, SOCK_CLOEXEC);
            if (fd < 0) continue;
            Socket s(fd);
            Hello hello;
            const Hello reference;
            if (!s.receive(&hello, sizeof hello, std::min(deadline, monotonic_seconds() + 5)) ||
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
        const double start = monotonic_seconds(), timeout = join_timeout(), deadline = start + timeout;
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
            if (monotonic_seconds() + pause > deadline)
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
            Socket s = connect_to(address, port, std::max(0.1, std::min(5.0, deadline - monotonic_seconds())), why_not);
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

}  // namespace world_detail
