// Number of threads of a rank: physical cores of CPUs, shares of bound and unbound ranks, limits of containers. And threads
// sharing an op: every task once, loops in order, whichever threads take part.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <atomic>
#include <chrono>
#include <fstream>
#include <functional>
#include <future>
#include <set>
#include <sstream>
#include <thread>

#include "../llmc/cpu/threads.h"
#include "../llmc/cpu/memory.h"
#include "../llmc/cpu/optimizer.h"
#include "../llmc/cpu/team.h"
#include "files.h"

namespace test_threads {

using namespace test;
using Cores = std::vector<int>;

TEST(Threads, HyperthreadsAreOneCore) {
    TemporaryDirectory system;
    const auto siblings = [&](int cpu, const std::string& list) {
        const std::string topology = system / ("cpu" + std::to_string(cpu) + "/topology");
        std::filesystem::create_directories(topology);
        write_file(topology + "/thread_siblings_list", list + "\n");
    };
    siblings(0, "0,4");
    siblings(1, "1,5");
    siblings(4, "0,4");
    siblings(5, "1,5");
    siblings(2, "2-3");
    siblings(3, "2-3");
    EXPECT_EQ(cpu::cores_of({0, 1, 2, 3, 4, 5}, system / ""), Cores({0, 1, 2}));
    EXPECT_EQ(cpu::cores_of({4, 5}, system / ""), Cores({0, 1}));
    EXPECT_EQ(cpu::cores_of({3, 7}, system / ""), Cores({2, 7}));  // the system has no information on 7
}

// A made-up /proc/self and the control groups that it names.
struct Cgroups {
    TemporaryDirectory dir;
    std::string root() const { return dir / ""; }
    void file(const std::string& path, const std::string& text) const {
        std::filesystem::create_directories(std::filesystem::path(dir / path).parent_path());
        write_file(dir / path, text);
    }
    // mounts: lines of "ROOT PLACE TYPE OPTIONS".
    Cgroups(const std::string& paths, const std::vector<std::string>& mounts) {
        file("proc/self/cgroup", paths);
        std::string lines = "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n";
        for (const std::string& m : mounts) {
            std::istringstream words(m);
            std::string top, place, type, options;
            words >> top >> place >> type >> options;
            lines += "31 23 0:28 " + top + " " + place + " rw,nosuid shared:9 - " + type + " " + type + " rw," + options + "\n";
        }
        file("proc/self/mountinfo", lines);
    }
    cpu::CgroupLimits limits() const { return cpu::cgroup_limits(root()); }
};

TEST(Threads, QuotasAreRounded) {
    EXPECT_EQ(cpu::rounded_quota(0), 0);
    EXPECT_EQ(cpu::rounded_quota(4), 4);
    EXPECT_EQ(cpu::rounded_quota(3.5), 4);
    EXPECT_EQ(cpu::rounded_quota(0.2), 1);
}

TEST(Cgroups, AContainerSeesItsGroupAsTheRoot) {
    const Cgroups c("0::/\n", {"/ /sys/fs/cgroup cgroup2 nsdelegate"});
    EXPECT_EQ(c.limits().cores, 0);
    EXPECT_EQ(c.limits().memory_left, SIZE_MAX);
    c.file("sys/fs/cgroup/cpu.max", "max 100000\n");
    c.file("sys/fs/cgroup/memory.max", "max\n");
    c.file("sys/fs/cgroup/memory.current", "700\n");
    EXPECT_EQ(c.limits().cores, 0);
    EXPECT_EQ(c.limits().memory_left, SIZE_MAX);
    c.file("sys/fs/cgroup/cpu.max", "350000 100000\n");
    c.file("sys/fs/cgroup/memory.max", "1000\n");
    EXPECT_EQ(c.limits().cores, 3.5);
    EXPECT_EQ(c.limits().memory_left, 300u);
    c.file("sys/fs/cgroup/memory.stat",
           "anon 4096\nfile 90\ninactive_anon 7\nactive_anon 9\ninactive_file 20\nactive_file 10\n");
    EXPECT_EQ(c.limits().memory_left, 330u);  // page cache is not used memory
    c.file("sys/fs/cgroup/memory.current", "2000\n");
    EXPECT_EQ(c.limits().memory_left, 0u);
}

TEST(Cgroups, ASystemdServiceHasTheLimitsOfItsSlices) {
    const Cgroups c("0::/user.slice/user-1000.slice/run-7.scope\n",
                    {"/ /sys/fs/cgroup cgroup2 nsdelegate,memory_recursiveprot"});
    const std::string slice = "sys/fs/cgroup/user.slice/user-1000.slice/";
    c.file(slice + "cpu.max", "200000 100000\n");
    c.file(slice + "run-7.scope/cpu.max", "max 100000\n");
    c.file("sys/fs/cgroup/user.slice/cpu.max", "800000 100000\n");
    c.file("sys/fs/cgroup/user.slice/memory.max", "9000\n");
    c.file("sys/fs/cgroup/user.slice/memory.current", "8500\n");
    c.file(slice + "run-7.scope/memory.max", "5000\n");
    c.file(slice + "run-7.scope/memory.current", "1000\n");
    EXPECT_EQ(c.limits().cores, 2);
    EXPECT_EQ(c.limits().memory_left, 500u);  // of user.slice, whose other scopes use the rest
    c.file(slice + "run-7.scope/memory.high", "1200\n");
    EXPECT_EQ(c.limits().memory_left, 200u);
}

TEST(Cgroups, ASlurmJobOfVersionOne) {
    const Cgroups c("11:memory:/slurm/uid_1000/job_5/step_0\n6:cpu,cpuacct:/slurm/uid_1000/job_5/step_0\n1:name=systemd:/x\n",
                    {"/ /sys/fs/cgroup/cpu,cpuacct cgroup cpu,cpuacct", "/ /sys/fs/cgroup/memory cgroup memory",
                     "/ /sys/fs/cgroup/systemd cgroup name=systemd"});
    const std::string memory = "sys/fs/cgroup/memory/slurm/uid_1000/job_5/", cpu = "sys/fs/cgroup/cpu,cpuacct/slurm/uid_1000/";
    c.file(memory + "memory.limit_in_bytes", "64000\n");
    c.file(memory + "memory.usage_in_bytes", "60000\n");
    c.file(memory + "memory.stat", "active_file 1\ninactive_file 2\ntotal_active_file 3000\ntotal_inactive_file 4000\n");
    c.file(memory + "step_0/memory.limit_in_bytes", "9223372036854771712\n");  // none
    c.file(memory + "step_0/memory.usage_in_bytes", "50000\n");
    c.file(cpu + "cpu.cfs_quota_us", "-1\n");
    c.file(cpu + "cpu.cfs_period_us", "100000\n");
    c.file(cpu + "job_5/cpu.cfs_quota_us", "1600000\n");
    c.file(cpu + "job_5/cpu.cfs_period_us", "100000\n");
    EXPECT_EQ(c.limits().cores, 16);
    EXPECT_EQ(c.limits().memory_left, 11000u);
}

TEST(Cgroups, AContainerOfVersionOneIsMountedBelowItsPath) {
    const Cgroups c("4:memory:/docker/abc\n3:cpu:/docker/abc\n",
                    {"/docker/abc /sys/fs/cgroup/memory cgroup memory", "/docker/abc /sys/fs/cgroup/my\\040cpu cgroup cpu"});
    c.file("sys/fs/cgroup/memory/memory.limit_in_bytes", "5000\n");
    c.file("sys/fs/cgroup/memory/memory.usage_in_bytes", "1000\n");
    c.file("sys/fs/cgroup/my cpu/cpu.cfs_quota_us", "150000\n");
    c.file("sys/fs/cgroup/my cpu/cpu.cfs_period_us", "100000\n");
    EXPECT_EQ(c.limits().cores, 1.5);
    EXPECT_EQ(c.limits().memory_left, 4000u);
}

TEST(Cgroups, HierarchiesOfBothVersions) {
    const Cgroups c("4:memory:/job\n0::/job\n",
                    {"/ /sys/fs/cgroup/unified cgroup2 nsdelegate", "/ /sys/fs/cgroup/memory cgroup memory"});
    c.file("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "5000\n");
    c.file("sys/fs/cgroup/memory/job/memory.usage_in_bytes", "4000\n");
    c.file("sys/fs/cgroup/unified/job/cpu.max", "300000 100000\n");
    EXPECT_EQ(c.limits().cores, 3);
    EXPECT_EQ(c.limits().memory_left, 1000u);
}

TEST(Cgroups, WithoutThemOrOutsideOfThemThereIsNoLimit) {
    TemporaryDirectory empty;
    EXPECT_EQ(cpu::cgroup_limits(empty / "").cores, 0);
    EXPECT_EQ(cpu::cgroup_limits(empty / "").memory_left, SIZE_MAX);
    const Cgroups c("0::/../../other\nnonsense\n", {"/ /sys/fs/cgroup cgroup2 x"});
    c.file("other/cpu.max", "100000 100000\n");
    EXPECT_EQ(c.limits().cores, 0);
    EXPECT_LE(cpu::available_memory(), SIZE_MAX - 1);  // of this machine
}

TEST(Threads, SharesOfRanks) {
    const Cores all = {0, 1, 2, 3, 4, 5, 6, 7};
    EXPECT_EQ(cpu::share_of_cores(all, {all}, 0), 8);
    EXPECT_EQ(cpu::share_of_cores(all, {all, all}, 0), 4);
    EXPECT_EQ(cpu::share_of_cores(all, {all, all, all}, 0), 2);
    EXPECT_EQ(cpu::share_of_cores({0, 1}, {{0, 1}, {0, 1}, {0, 1}}, 0), 1);
    EXPECT_EQ(cpu::share_of_cores({0, 1, 2, 3}, {{0, 1, 2, 3}, {4, 5, 6, 7}}, 0), 4);  // bound: each has its own
    EXPECT_EQ(cpu::share_of_cores({0, 1, 2}, {{0, 1, 2}, {2, 3, 4}}, 0), 2);
    EXPECT_EQ(cpu::share_of_cores(all, {all}, 3), 3);
    EXPECT_EQ(cpu::share_of_cores(all, {all, all}, 3), 1);
    EXPECT_EQ(cpu::share_of_cores({0}, {{0}}, 3), 1);
}

TEST(Threads, OfThisProcess) {
    const Cores usable = cpu::usable_cpus(), possible = cpu::possible_cpus();
    EXPECT_FALSE(usable.empty());
    EXPECT_TRUE(std::includes(possible.begin(), possible.end(), usable.begin(), usable.end()));
    EXPECT_EQ(cpu::usable_cpus(), usable);  // possible_cpus() has restored the mask
    EXPECT_LE(cpu::cores_of(usable).size(), usable.size());
}

// Loops of few and of many tasks; each task needs the results of all tasks of the previous loop.
void expect_loops_in_order(int threads, const std::function<void(int member, int loop, int64_t task)>& meanwhile = nullptr) {
    const std::vector<int64_t> sizes = {5, 1, 0, 64, 3, 1000, 2, 17};
    std::vector<std::vector<int>> done;
    for (const int64_t n : sizes) done.emplace_back((size_t)n);
    std::atomic<int> early{0};
    cpu::Team::run(threads, [&](cpu::Team::Member& me) {
        EXPECT_LT(me.number, threads);
        for (size_t loop = 0; loop < sizes.size(); loop++)
            me.share(sizes[loop], [&](int64_t task) {
                if (meanwhile) meanwhile(me.number, (int)loop, task);
                if (loop > 0)
                    for (const int n : done[loop - 1]) early += n != 1;
                done[loop][(size_t)task]++;
            });
    });
    EXPECT_EQ(early, 0) << threads << " threads";
    for (const auto& loop : done)
        for (const int n : loop) ASSERT_EQ(n, 1) << threads << " threads";
}

TEST(Team, DoesEveryTaskOnceAndLoopsInOrder) {
    for (const int threads : {1, 2, 3, 4, 7, 16})
        for (int round = 0; round < 20; round++) expect_loops_in_order(threads);
}

// The thread with the first task of the second part blocks until all others are done, including the rest of that part.
TEST(Team, OthersDoWhatALateThreadLeaves) {
    constexpr int64_t tasks = 100;
    std::atomic<int> done{0};
    bool others = false;
    cpu::Team::run(3, [&](cpu::Team::Member& me) {
        me.share(tasks, [&](int64_t task) {
            const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
            while (task == tasks / 3 && !others && std::chrono::steady_clock::now() < end) others = done == tasks - 1;
            done++;
        });
    });
    EXPECT_TRUE(others);
    EXPECT_EQ(done, tasks);
}

// A thread that is absent: it returns when the op is over, and takes part in the next one.
TEST(Team, NobodyWaitsForAThreadThatHasNoTask) {
    for (int round = 0; round < 3; round++)
        expect_loops_in_order(2, [&](int member, int, int64_t) {
            if (member == 1) std::this_thread::sleep_for(std::chrono::microseconds(100));
        });
    for (int op = 0; op < 2000; op++) {  // so short that the second thread often comes too late
        int64_t sum = 0;
        cpu::Team::run(2, [&](cpu::Team::Member& me) { me.share(1, [&](int64_t) { sum++; }); });
        ASSERT_EQ(sum, 1);
    }
}

TEST(Team, OneOfEachThreadThatCallsAnOp) {
    std::vector<std::thread> callers;
    for (int i = 0; i < 3; i++) callers.emplace_back([] { expect_loops_in_order(3); });
    for (std::thread& caller : callers) caller.join();
    std::atomic<int> inner{0};
    cpu::Team::run(2, [&](cpu::Team::Member& me) {
        me.share(1, [&](int64_t) {
            cpu::Team::run(2, [&](cpu::Team::Member& nested) { nested.share(10, [&](int64_t) { inner++; }); });
        });
    });
    EXPECT_EQ(inner, 10);
    // An op within an op creates no further threads, whichever thread of a team runs it.
    const auto threads = [] {
        namespace fs = std::filesystem;
        return std::distance(fs::directory_iterator("/proc/self/task"), fs::directory_iterator());
    };
    const auto before = threads();
    std::atomic<int> there{0};
    cpu::Team::run(2, [&](cpu::Team::Member& me) {
        me.share(2, [&](int64_t) {
            for (there++; there < 2;) std::this_thread::yield();  // a task each
            cpu::Team::run(2, [](cpu::Team::Member& nested) { nested.share(2, [](int64_t) {}); });
            EXPECT_EQ(threads(), before);
        });
    });
}

// How a forked copy of this process ends after calling f.
int end_of_copy(const std::function<void()>& f) {
    fflush(nullptr);
    const pid_t copy = fork();
    if (copy == 0) {
        alarm(30);
        f();
        exit(testing::Test::HasFailure());
    }
    int status = -1;
    waitpid(copy, &status, 0);
    return status;
}

TEST(Team, OfACopyOfTheProcess) {
    expect_loops_in_order(3);
    EXPECT_TRUE(WIFEXITED(end_of_copy([] {})));
    EXPECT_TRUE(WIFEXITED(end_of_copy([] {
        for (int round = 0; round < 3; round++) expect_loops_in_order(3);
        if (testing::Test::HasFailure()) abort();
    })));
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // which need memory for threads as well
TEST(Team, DoesWithFewerThreadsWhereThereAreNoMore) {
    EXPECT_EQ(end_of_copy([] {
                  long pages = 0;
                  std::ifstream("/proc/self/statm") >> pages;
                  const rlim_t most = (rlim_t)pages * (rlim_t)getpagesize() + (64 << 20);  // stacks of 8 threads
                  const rlimit limit{most, most};
                  if (setrlimit(RLIMIT_AS, &limit) != 0) abort();
                  expect_loops_in_order(64);
              }),
              0);
}
#endif

// With OMP_WAIT_POLICY=active, OpenMP's threads, used to load files, would spin forever next to a team's.
TEST(Team, OpenMpsThreadsEndWhereItBegins) {
    const auto threads = [] { return std::distance(std::filesystem::directory_iterator("/proc/self/task"), {}); };
    std::thread([&] {
        const auto before = threads();
#pragma omp parallel num_threads(3)
        EXPECT_GE(threads(), before + 2);
        cpu::Team::run(2, [](cpu::Team::Member&) {});
        EXPECT_EQ(threads(), before + 1);
    }).join();
}

// OpenMP reads its variables at program start, so this test starts its own program again.
TEST(Team, LiesApartWhereOpenMpBinds) {
    if (omp_get_proc_bind() == omp_proc_bind_false) {
        const std::string itself = std::filesystem::read_symlink("/proc/self/exe").string();
        EXPECT_EQ(system(("OMP_PROC_BIND=true '" + itself + "' --gtest_filter=Team.LiesApart* >/dev/null").c_str()), 0);
        return;
    }
    const int threads = omp_get_num_places();
    std::vector<std::vector<int>> cpus((size_t)threads);
    std::atomic<int> there{0};
    cpu::Team::run(threads, [&](cpu::Team::Member& me) {
        me.share(threads, [&](int64_t) {
            cpus[(size_t)me.number] = cpu::detail::affinity();
            for (there++; there < threads;) std::this_thread::yield();  // a task each
        });
    });
    std::set<int> all;
    for (const auto& own : cpus) all.insert(own.begin(), own.end());
    for (const auto& own : cpus) EXPECT_LT(own.size(), threads > 1 ? all.size() : 2);
    EXPECT_EQ(all.size(), cpu::usable_cpus().size());
}

// Threads inherit the setting from the one that starts them.
TEST(Denormals, AreZeroOnEveryThread) {
    std::atomic<int> checked{0};
    const auto check = [&checked] {
        volatile float tiny = 1e-30f, denormal = 1e-40f;
        EXPECT_EQ(tiny * 1e-10f, 0.0f);
        EXPECT_EQ(denormal * 1e30f, 0.0f);
        checked++;
    };
    std::thread([&] {
        cpu::flush_denormals();
        check();
#pragma omp parallel num_threads(3)
        check();
        cpu::Team::run(3, [&](cpu::Team::Member&) { check(); });
        std::thread(check).join();
        std::async(std::launch::async, check).get();
    }).join();
    EXPECT_GE(checked, 1 + 3 + 1 + 1 + 1);  // of a team at least one
}

// The moments of a token that no longer occurs decay to denormals, and stay there.
TEST(Denormals, AdamWTakesNoLonger) {
    std::thread([] {
        cpu::flush_denormals();
        cpu::op_threads() = 1;
        constexpr size_t n = 1 << 14;
        std::vector<floatX> weights(n, floatX(0.5f));
        std::vector<LowerHalf> lower(n);
        std::vector<real> grad(n), m(n), v(n);
        cpu::Ctx ctx;
        const auto seconds = [&](real start) {
            double best = 1;
            for (int i = 0; i < 40; i++) {
                std::fill(m.begin(), m.end(), start);
                std::fill(v.begin(), v.end(), start);
                const auto begin = std::chrono::steady_clock::now();
                cpu::adamw(ctx, weights.data(), has_lower_halves ? lower.data() : nullptr, m.data(), v.data(), grad.data(), n,
                           {1e-3f, 0.9f, 0.95f, 1e-8f, 0, 1, 5}, {});
                best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
            }
            return best;
        };
        const double normal = seconds(1e-3f), denormal = seconds(1e-40f);
        EXPECT_LT(denormal, 1.5 * normal);
    }).join();
}

}  // namespace test_threads
