// train_gpt check-node: whether this machine computes, stores and transfers the right bits. For a node that a run suspects, or
// before a long run; under mpirun for all its devices at once, and the links between them. Each check has known results, so
// that one machine is enough:
//   products  of whole numbers, whose sums are exact in fp32 in any order; the same product over and over
//   memory    two patterns, of which each bit is once 0 and once 1, in as much memory as there is time for
//   disk      a file, written, synced, and read back past the cache
//   links     sums over all ranks, of whole numbers
#pragma once
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "../base/check.h"
#include "../base/clock.h"
#include "../base/crc32c.h"
#include "../base/file.h"
#include "../base/numbers.h"
#include "../base/terminal.h"
#include "../base/text.h"
#include "../model/arena.h"
#include "../options/options.h"
#include "../parallel/comm.h"
#include "../parallel/ranks.h"
#include "../plan/machine.h"
#include "../run/faults.h"

namespace detail {

// Memory of the backend, released at the end.
template <class E>
struct CheckedMemory {
    explicit CheckedMemory(size_t n) : n(n), data((E*)be::allocate_memory(n * sizeof(E))) {}
    ~CheckedMemory() { be::release_memory(data, n * sizeof(E)); }
    CheckedMemory(const CheckedMemory&) = delete;
    CheckedMemory& operator=(const CheckedMemory&) = delete;
    size_t n;
    E* data;
};

struct NodeCheck {
    be::Ctx& ctx;
    World& world;
    double seconds;  // for each check
    Faults faults;
    bool faulty(const char* kind) { return faults.once(kind, 1, world.rank()); }

    // Each returns a line of the table, and sets `problem` to the first fault.
    std::string products(std::string& problem) {
        // Entries repeat with a period, so the result does, too: n / period times the sums over one period.
        constexpr int period = 64;
        const int n = be::memory_is_host ? 1024 : 8192;
        const auto entry = [](int i, int k, int of) { return (i * 7 + k * (3 + of) + i * k) % 7 - 3; };
        const int repeats = n / period;
        std::vector<floatX> a((size_t)n * n), b(a.size()), c(a.size());
        int sums[period][period] = {};
        for (int i = 0; i < period; i++)
            for (int j = 0; j < period; j++)
                for (int k = 0; k < period; k++) sums[i][j] += entry(i, k, 0) * entry(j, k, 1);
#pragma omp parallel for
        for (int i = 0; i < n; i++)
            for (int k = 0; k < n; k++) {
                const size_t at = (size_t)i * n + k;
                a[at] = (floatX)(real)entry(i % period, k % period, 0);
                b[at] = (floatX)(real)entry(i % period, k % period, 1);
                c[at] = (floatX)(real)(repeats * sums[i % period][k % period]);
            }
        CheckedMemory<floatX> x(a.size()), w(a.size()), y(a.size());
        be::upload(ctx, x.data, a.data(), a.size() * sizeof(floatX));
        be::upload(ctx, w.data, b.data(), b.size() * sizeof(floatX));
        const size_t words = c.size() * sizeof(floatX) / sizeof(uint32_t);
        const uint64_t expected = expected_sum(c.data(), words);
        int64_t done = 0;
        const double begin = monotonic_seconds();
        double spent = 0;
        for (; done == 0 || spent < seconds; done++) {
            be::linear_forward(ctx, y.data, x.data, w.data, nullptr, n, n, n);
            if (faulty("flip-product")) flip(y.data, c.size() / 3);
            if (be::word_sum(ctx, y.data, words, 0) != expected && problem.empty())
                problem = format("product %s of %d x %d x %d is wrong", with_commas(done + 1).c_str(), n, n, n);
            spent = monotonic_seconds() - begin;
        }
        return format("%s of %d x %d x %d in %s, %.3g TFLOP/s", counted(done, "product").c_str(), n, n, n, precision_name,
                      2e-12 * done * n * n * n / spent);
    }

    std::string memory(std::string& problem) {
        constexpr size_t piece = (size_t)1 << 28, words = piece / sizeof(uint32_t);
        std::vector<uint32_t> pattern(words), inverse(words);
#pragma omp parallel for
        for (size_t i = 0; i < words; i++) {
            pattern[i] = (uint32_t)(i * 2654435761u) ^ (uint32_t)(i >> 7);
            inverse[i] = ~pattern[i];
        }
        const uint64_t sums[] = {expected_sum(pattern.data(), words), expected_sum(inverse.data(), words)};
        std::vector<std::unique_ptr<CheckedMemory<uint32_t>>> pieces;  // kept, so that each is another part of the memory
        const double begin = monotonic_seconds();
        const size_t most =
            be::available_memory() / 10 * 9 / std::max<size_t>(1, be::memory_is_host ? world.size() : 1) / piece;
        while (pieces.size() < std::max<size_t>(1, most) && (pieces.empty() || monotonic_seconds() - begin < seconds)) {
            pieces.push_back(std::make_unique<CheckedMemory<uint32_t>>(words));
            uint32_t* const there = pieces.back()->data;
            for (const bool second : {false, true}) {
                be::upload(ctx, there, (second ? inverse : pattern).data(), piece);
                if (faulty("flip-memory")) flip(there, words / 3);
                if (be::word_sum(ctx, there, words, 0) != sums[second] && problem.empty())
                    problem = format("block %zu of 256 MiB does not keep its bits", pieces.size());
            }
        }
        const double bytes = 4.0 * piece * pieces.size();
        return format("%s written and read twice, %.3g GB/s", human_bytes(pieces.size() * piece).c_str(),
                      bytes / (monotonic_seconds() - begin) / 1e9);
    }

    std::string disk(const std::string& folder, std::string& problem) {
        constexpr size_t piece = (size_t)1 << 24;
        const std::string path = format("%s/.train_gpt-check-%d", folder.c_str(), (int)getpid());
        std::string bytes(piece, '\0');
        for (size_t i = 0; i < piece; i++) bytes[i] = (char)(i * 2654435761u >> 13);
        struct Removed {
            const std::string& path;
            ~Removed() { unlink(path.c_str()); }
        } removed{path};
        const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
        if (fd < 0) fail("cannot write %s: %s", path.c_str(), strerror(errno));
        uint32_t crc = 0;
        size_t written = 0;
        const double begin = monotonic_seconds();
        std::string error;
        for (; written < piece * 64 && (written == 0 || monotonic_seconds() - begin < seconds / 2); written += piece) {
            const ssize_t n = write(fd, bytes.data(), piece);
            if (n != (ssize_t)piece) error = n < 0 ? strerror(errno) : "disk full";
            if (!error.empty()) break;
            crc = crc32c(bytes.data(), piece, crc);
        }
        if (error.empty() && fsync(fd) != 0) error = strerror(errno);
        if (faulty("flip-disk")) (void)!pwrite(fd, "?", 1, 4096);
        close(fd);
        if (!error.empty()) fail("cannot write %s: %s", path.c_str(), error.c_str());
        const double middle = monotonic_seconds();
        const FileSum found = sum_file(path, SIZE_MAX, true);
        if (found.bytes != written || found.crc != crc) problem = "the file reads back with other bytes";
        return format("%s in %s: written at %.3g MB/s, read at %.3g", human_bytes(written).c_str(), folder.c_str(),
                      written / (middle - begin) / 1e6, written / (monotonic_seconds() - middle) / 1e6);
    }

    std::string links(std::string& problem) {
        constexpr size_t n = (size_t)1 << 22;  // 16 MiB
        std::vector<int> ranks;
        for (int r = 0; r < world.size(); r++) ranks.push_back(r);
        be::Comm comm(ctx, world, ranks, "check");
        std::vector<real> mine(n), sums(n);
        for (size_t i = 0; i < n; i++) {
            mine[i] = (real)((i + (size_t)world.rank()) % 1000);
            for (int r = 0; r < world.size(); r++) sums[i] += (real)((i + (size_t)r) % 1000);
        }
        CheckedMemory<real> x(n);
        const size_t words = n * sizeof(real) / sizeof(uint32_t);
        const uint64_t expected = expected_sum(sums.data(), words);
        double spent = 0;
        int64_t done = 0;
        for (uint8_t more = 1; more;) {
            be::upload(ctx, x.data, mine.data(), n * sizeof(real));
            wait_for_device(ctx);
            world.barrier();
            const double begin = monotonic_seconds();
            all_reduce(ctx, comm, x.data, n);
            wait_for_device(ctx);
            spent += monotonic_seconds() - begin;
            done++;
            if (faulty("flip-link")) flip(x.data, n / 3);
            if (be::word_sum(ctx, x.data, words, 0) != expected && problem.empty())
                problem = format("the sum %s over %d ranks is wrong", with_commas(done).c_str(), world.size());
            more = world.all_gather(spent < seconds ? "1" : "")[0] == "1";  // rank 0's clock
        }
        return format("%s of %s over %d ranks, %.3g GB/s", counted(done, "sum").c_str(), human_bytes(n * sizeof(real)).c_str(),
                      world.size(), 2e-9 * done * n * sizeof(real) * (world.size() - 1) / world.size() / spent);
    }

private:
    // The expected be::word_sum, computed by a loop of its own.
    static uint64_t expected_sum(const void* x, size_t words) {
        uint64_t sum = 0;
        for (size_t i = 0; i < words; i++) {
            uint32_t word;
            memcpy(&word, (const char*)x + i * sizeof word, sizeof word);
            sum += (uint64_t)word * (uint32_t)(2 * i + 1);
        }
        return sum;
    }
    template <class E>
    void flip(E* x, size_t i) {
        uint8_t byte;
        be::download(ctx, &byte, x + i, 1);
        byte ^= 1;
        be::upload(ctx, x + i, &byte, 1);
    }
};

}  // namespace detail

inline void check_node(World& world, const CheckNodeOptions& o) {
    const double seconds = duration_of("--seconds", o.seconds);
    be::Ctx ctx = make_ctx(world, o.threads);
    detail::NodeCheck check{ctx, world, seconds, Faults::from_environment()};
    std::string problems;
    const auto run = [&](const char* name, auto part) {
        std::string problem, line = part(problem);
        if (!problem.empty()) problem = std::string(name) + ": " + problem;
        if (!problem.empty()) problems += (problems.empty() ? "" : "; ") + problem;
        const std::vector<std::string> all = world.all_gather(problem.empty() ? line : "WRONG: " + problem);
        for (int r = 0; r < world.size() && world.rank() == 0; r++)
            print_line(stdout,
                       format("%-10s %s%s", name,
                              world.size() > 1 ? format("rank %d (host %s): ", r, world.hosts()[r].c_str()).c_str() : "",
                              all[r].c_str()));
    };
    run("products", [&](std::string& p) { return check.products(p); });
    run("memory", [&](std::string& p) { return check.memory(p); });
    run("disk", [&](std::string& p) { return check.disk(o.path, p); });
    if (world.size() > 1) run("links", [&](std::string& p) { return check.links(p); });
    const std::string place = world.size() > 1 ? world.description() + ": " : "";
    const std::string first = first_problem(world, problems.empty() ? "" : place + problems);
    if (!first.empty()) fail("%s; HINT: do not use that machine", first.c_str());
}
inline int check_node_command(const CheckNodeOptions& o) { return on_all_ranks(o, check_node); }
