// How many threads a rank gets: cores behind CPUs, shares of ranks that are bound or not, limits of containers.
#include <gtest/gtest.h>

#include "../llmc/cpu/threads.h"
#include "files.h"

namespace {

using namespace test;
using Cores = std::vector<int>;

TEST(Threads, HyperthreadsAreOneCore) {
    TemporaryDirectory system;
    const auto siblings = [&](int cpu, const std::string& list) {
        const std::string topology = system / ("cpu" + std::to_string(cpu) + "/topology");
        std::filesystem::create_directories(topology);
        write_file(topology + "/thread_siblings_list", list + "\n");
    };
    siblings(0, "0,4"), siblings(1, "1,5"), siblings(4, "0,4"), siblings(5, "1,5"), siblings(2, "2-3"), siblings(3, "2-3");
    EXPECT_EQ(cpu::cores_of({0, 1, 2, 3, 4, 5}, system / ""), Cores({0, 1, 2}));
    EXPECT_EQ(cpu::cores_of({4, 5}, system / ""), Cores({0, 1}));
    EXPECT_EQ(cpu::cores_of({3, 7}, system / ""), Cores({2, 7}));  // of 7 the system says nothing
}

TEST(Threads, LimitsOfContainers) {
    TemporaryDirectory dir;
    const auto quota = [&](const char* text) {
        write_file(dir / "cpu.max", text);
        return cpu::cpu_quota((dir / "cpu.max").c_str());
    };
    EXPECT_EQ(quota("max 100000\n"), 0);
    EXPECT_EQ(quota("400000 100000\n"), 4);
    EXPECT_EQ(quota("350000 100000\n"), 4);
    EXPECT_EQ(quota("20000 100000\n"), 1);
    EXPECT_EQ(quota(""), 0);
    EXPECT_EQ(cpu::cpu_quota((dir / "none").c_str()), 0);
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
    EXPECT_EQ(cpu::usable_cpus(), usable);  // possible_cpus() has put them back
    EXPECT_LE(cpu::cores_of(usable).size(), usable.size());
}

}  // namespace
