// Parts of snapshots on several nodes: writing and reading, damage, and the choices of keepers and readers.
#include <gtest/gtest.h>

#include <thread>

#include "../llmc/checkpoint/part_choice.h"
#include "../llmc/checkpoint/part_file.h"
#include "files.h"
#include "testing.h"

namespace test_part_file {

using test::expect_error;
using test::TemporaryDirectory;

const PartId id = {12, 0x123456789abcdef0, 1, 4};

void write_part(const std::string& path) {
    PartWriter part;
    part.open(path);
    part.write("config.json", "the first");
    std::thread other([&] { part.add("a/model", 5, "world", 5, 10); });
    part.add("a/model", 0, "hello", 5, 10);
    other.join();
    part.write("config.json", "last");
    const size_t bytes = part.finish(id);
    EXPECT_EQ(std::filesystem::file_size(part.unfinished_path()), bytes);
    part.commit();
}

TEST(PartFile, HasThePiecesOfAllThreads) {
    const TemporaryDirectory dir;
    const std::string path = dir / part_name(id);
    write_part(path);
    EXPECT_EQ(dir.names(), std::set<std::string>{"step_00000012.1-of-4"});
    const PartFile part(path);
    EXPECT_EQ(part.id().save, id.save);
    EXPECT_EQ(part_name(part.id()), part_name(id));
    std::map<std::string, std::string> files;
    const auto names = part.files();
    for (const auto& [name, bytes] : names) files[name] = std::string(bytes, '?');
    part.for_each_piece([&](size_t file, size_t offset, const char* data, size_t bytes) {
        files.at(names[file].first).replace(offset, bytes, data, bytes);
    });
    EXPECT_EQ(files, (std::map<std::string, std::string>{{"a/model", "helloworld"}, {"config.json", "last"}}));
}

TEST(PartFile, DamageAndTearsAreFound) {
    const TemporaryDirectory dir;
    write_part(dir / "part");
    const std::string good = test::read_file(dir / "part");
    for (size_t i = 0; i < good.size(); i++) {
        std::string bad = good;
        bad[i] ^= 4;
        test::write_file(dir / "bad", bad);
        expect_error([&] { PartFile(dir / "bad"); }, {"bad is damaged"});
        test::write_file(dir / "torn", good.substr(0, i));
        expect_error([&] { PartFile(dir / "torn", false); }, {"torn is damaged"});
    }
}

TEST(PartFile, Names) {
    EXPECT_EQ(part_of_name("step_00000012.1-of-4").part, 1u);
    EXPECT_EQ(part_of_name("step_00000012.1-of-4").parts, 4u);
    for (const char* other : {"step_00000012", "step_12.1-of-4", "step_00000012.1-of-4.tmp.7", "step_00000012.1-of-0", "run"})
        EXPECT_EQ(part_of_name(other).step, -1) << other;
}

// Each rank's part has one keeper, on the next node, whatever the numbers of ranks.
TEST(NodeRing, EveryPartHasAKeeperOnTheNextNode) {
    for (const std::vector<int>& nodes :
         {std::vector<int>{0, 1}, {0, 0, 2, 2}, {5, 3, 5, 3}, {0, 0, 0, 1, 2, 2}, {0, 1, 1, 1, 1}}) {
        const NodeRing ring(nodes);
        std::vector<int> kept(nodes.size());
        for (int r = 0; r < (int)nodes.size(); r++) {
            EXPECT_EQ(ring.node_of(ring.partner(r)), (ring.node_of(r) + 1) % ring.size());
            for (const int sender : ring.senders(r)) {
                EXPECT_EQ(ring.partner(sender), r);
                kept[(size_t)sender]++;
            }
        }
        EXPECT_EQ(kept, std::vector<int>(nodes.size(), 1));
    }
}

TEST(Choice, ReadersShareTheWork) {
    const auto readers = choose_readers({{0, {{0, 10}, {1, 10}}}, {1, {{0, 10}, {1, 10}}}, {2, {{0, 30}}}, {3, {}}});
    EXPECT_EQ(readers, (std::map<uint32_t, int>{{0, 1}, {1, 1}, {2, 0}}));
}
TEST(Choice, NewestFirst) {
    std::vector<int64_t> steps;
    for (const Resumable& r :
         order_to_resume({8, 4, 16}, {{6, Resumable::nodes}, {12, Resumable::node}, {14, Resumable::nodes}}))
        steps.push_back(r.step);
    EXPECT_EQ(steps, (std::vector<int64_t>{14, 12, 8, 6, 4, 16}));
}

}  // namespace test_part_file
