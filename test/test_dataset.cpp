// Token datasets: the formats byte by byte, and every way in which a file can be truncated, foreign or hostile.
#include <gtest/gtest.h>

#include <csignal>
#include <sys/resource.h>

#include "../llmc/data/dataset.h"
#include "files.h"

namespace test_dataset {

using test::array_of;
using test::bytes_of;
using test::expect_error;
using test::read_file;
using test::TemporaryDirectory;
using test::write_file;

const std::string magic("MMIDIDX\0\0", 9);

std::string index_header(uint64_t version, int type, uint64_t n, uint64_t borders) {
    return magic + bytes_of(version) + bytes_of((uint8_t)type) + bytes_of(n) + bytes_of(borders);
}

// The index of documents of 3, 0 and 2 tokens of 2 bytes each.
std::string good_index() {
    return index_header(1, 8, 3, 4) + array_of<int32_t>({3, 0, 2}) + array_of<int64_t>({0, 6, 6}) +
           array_of<int64_t>({0, 1, 2, 3});
}
std::string good_bin() { return array_of<uint16_t>({10, 20, 65535, 30, 40}); }

std::vector<int> document(const TokenDataset& d, int64_t i) {
    std::vector<int> tokens(d.length(i));
    d.read(i, 0, d.length(i), tokens.data());
    return tokens;
}

void write_dataset(const std::string& prefix, int vocab_size, const std::vector<std::vector<int>>& documents) {
    TokenDatasetWriter writer(prefix, vocab_size);
    for (const auto& d : documents) {
        writer.add(d.data(), d.size() / 2);  // in two parts, which makes no difference
        writer.add(d.data() + d.size() / 2, d.size() - d.size() / 2);
        writer.end_document();
    }
    writer.commit();
}

std::string shard(int magic, int version, int n, const std::string& tokens) {
    return bytes_of<int32_t>(magic) + bytes_of<int32_t>(version) + bytes_of<int32_t>(n) + std::string(1024 - 12, '\0') + tokens;
}

// ---- Megatron's format -----------------------------------------------------------------------------------------------------
TEST(Writer, BytesAreMegatrons) {
    TemporaryDirectory dir;
    write_dataset(dir / "small", 65499, {{10, 20, 65498}, {}, {30, 40}});
    EXPECT_EQ(read_file(dir / "small.bin"), array_of<uint16_t>({10, 20, 65498, 30, 40}));
    EXPECT_EQ(read_file(dir / "small.idx"), good_index());

    write_dataset(dir / "large", 65500, {{10, 65499}, {7}});
    EXPECT_EQ(read_file(dir / "large.bin"), array_of<int32_t>({10, 65499, 7}));
    EXPECT_EQ(read_file(dir / "large.idx"),
              index_header(1, 4, 2, 3) + array_of<int32_t>({2, 1}) + array_of<int64_t>({0, 8}) + array_of<int64_t>({0, 1, 2}));
    EXPECT_EQ(dir.names(), (std::set<std::string>{"large.bin", "large.idx", "small.bin", "small.idx"}));
}

TEST(Writer, ReadsBackManyDocuments) {
    TemporaryDirectory dir;
    std::vector<std::vector<int>> documents(70000);  // more than a block of lengths
    for (size_t i = 0; i < documents.size(); i++)
        for (size_t k = 0; k < i % 4; k++) documents[i].push_back((int)((i * 7 + k) % 100000));
    write_dataset(dir / "d", 100000, documents);
    const TokenDataset d = TokenDataset::open(dir / "d");
    ASSERT_EQ(d.n_documents(), 70000);
    EXPECT_EQ(d.n_tokens(), 70000 / 4 * 6);
    for (size_t i = 0; i < documents.size(); i++) ASSERT_EQ(document(d, i), documents[i]) << i;
}

TEST(Writer, LeavesNothingWithoutCommit) {
    TemporaryDirectory dir;
    {
        TokenDatasetWriter writer(dir / "d", 100);
        const std::vector<int> tokens(3 << 20, 1);  // more than the buffer
        writer.add(tokens.data(), tokens.size());
        writer.end_document();
    }
    EXPECT_TRUE(dir.names().empty());
    expect_error([&] { TokenDatasetWriter(dir / "no/such/place", 100); }, {"no/such/place.bin", "No such file"});
}

// ---- the dataset's tokenizer -----------------------------------------------------------------------------------------------
void write_origin_dataset(const std::string& prefix, const TokenizerIdentity& tokenizer) {
    TokenDatasetWriter writer(prefix, tokenizer);
    const std::vector<int> tokens = {1, 2, 3};
    writer.add(tokens.data(), tokens.size());
    writer.end_document();
    writer.commit();
}

// Files left by a killed process are removed, but not a live process's, and no file with another name.
TEST(Writer, RemovesWhatAKilledOneLeft) {
    const TemporaryDirectory dir;
    for (const char* name : {"a.bin.tmp.1", "a.idx.tmp.22", "a.bin.tmp.x", "aa.bin.tmp.1", "a.bin.partial"})
        write_file(dir / name, "left");
    const int other = open((dir / "a.bin.tmp.3").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    ASSERT_EQ(flock(other, LOCK_EX | LOCK_NB), 0);
    {
        TokenDatasetWriter one(dir / "a", 100);
        EXPECT_EQ(dir.names().count(std::filesystem::path(temporary_name("a.bin")).string()), 1u);
        EXPECT_EQ(dir.names().count("a.bin.tmp.1") + dir.names().count("a.idx.tmp.22"), 0u);
    }
    EXPECT_EQ(dir.names(), (std::set<std::string>{"a.bin.tmp.x", "aa.bin.tmp.1", "a.bin.partial", "a.bin.tmp.3"}));
    close(other);
}

TEST(Origin, LiesBesideThePairAndGoesWithIt) {
    TemporaryDirectory dir;
    write_origin_dataset(dir / "d", {"00ff", "/some/\"tokenizer\xff.json", 100});
    EXPECT_EQ(dir.names(), (std::set<std::string>{"d.bin", "d.idx", "d.meta.json"}));
    for (const char* path : {"d", "d.idx", "d.meta.json"}) {
        const TokenDataset d = TokenDataset::open(dir / path);
        EXPECT_EQ(d.tokenizer().hash, "00ff");
        EXPECT_EQ(d.tokenizer().path, "/some/\"tokenizer\xef\xbf\xbd.json");
        EXPECT_EQ(d.tokenizer().vocab_size, 100);
    }
    const std::string origin = read_file(dir / "d.meta.json");
    write_dataset(dir / "d", 100, {{1, 2}});  // unknown tokenizer: the old description was about other data
    EXPECT_FALSE(TokenDataset::open(dir / "d").tokenizer().known());
    EXPECT_EQ(dir.names(), (std::set<std::string>{"d.bin", "d.idx"}));
    write_file(dir / "d.meta.json", origin);
    expect_error([&] { TokenDataset::open(dir / "d"); }, {"d.meta.json", "3 tokens", "does not match the data", "HINT"});
}

TEST(Origin, AFileOfTheUsersIsLeftAsItIs) {
    TemporaryDirectory dir;
    for (const std::string text : {"", "my notes", "{}", "[1]", "{\"tokenizer\": 3}", "{\"tokenizer\": {\"hash\": 1}}"}) {
        write_file(dir / "d.meta.json", text);
        expect_error([&] { write_origin_dataset(dir / "d", {"00ff", "t", 100}); }, {"d.meta.json"});
        EXPECT_EQ(read_file(dir / "d.meta.json"), text);
        EXPECT_EQ(dir.names(), (std::set<std::string>{"d.meta.json"}));
    }
}

// A size limit makes write() fail as on a full disk.
TEST(Writer, FullDiskLeavesNothingNewAndKeepsTheOld) {
    TemporaryDirectory dir;
    write_dataset(dir / "d", 100, {{1, 2, 3}});
    const auto previous = std::signal(SIGXFSZ, SIG_IGN);
    rlimit old, limit;
    getrlimit(RLIMIT_FSIZE, &old);
    limit = old;
    limit.rlim_cur = 1 << 16;
    setrlimit(RLIMIT_FSIZE, &limit);
    const std::vector<int> tokens(1 << 20, 1);
    const auto write = [&](size_t n_documents, size_t length) {
        TokenDatasetWriter writer(dir / "d", 100);
        for (size_t i = 0; i < n_documents; i++) {
            writer.add(tokens.data(), length);
            writer.end_document();
        }
        writer.commit();
    };
    expect_error([&] { write(1, tokens.size()); }, {"d.bin", "File too large"});
    expect_error([&] { write(10000, 1); }, {"d.idx", "File too large"});  // here the .bin fits and the .idx does not
    setrlimit(RLIMIT_FSIZE, &old);
    std::signal(SIGXFSZ, previous);
    EXPECT_EQ(dir.names(), (std::set<std::string>{"d.bin", "d.idx"}));
    EXPECT_EQ(document(TokenDataset::open(dir / "d"), 0), (std::vector<int>{1, 2, 3}));
}

// ---- mappings --------------------------------------------------------------------------------------------------------------
void touch(const char* data, size_t size) {
    for (size_t i = 0; i < size; i += 512) (void)*(volatile const char*)(data + i);
}

TEST(MappedFile, OneThatBecomesShorterEndsTheProcessByName) {
    TemporaryDirectory dir;
    write_file(dir / "other", std::string(5000, 'o'));
    write_file(dir / "tokens\x1b[31m.bin", std::string(50000, 't'));
    const MappedFile other(dir / "other");
    { const MappedFile gone(dir / "other"); }
    MappedFile file(dir / "tokens\x1b[31m.bin");
    const MappedFile moved(std::move(file));
    touch(moved.data(), moved.size());
    std::filesystem::resize_file(dir / "tokens\x1b[31m.bin", 4096);
    touch(moved.data(), 4096);
    EXPECT_EXIT(touch(moved.data(), moved.size()), testing::ExitedWithCode(1),
                "error: .*/tokens\xef\xbf\xbd.31m.bin became shorter while it was read.*HINT: .*--resume auto");
}

TEST(MappedFile, OtherBusErrorsAreNotItsBusiness) {
#ifdef __SANITIZE_ADDRESS__
    GTEST_SKIP() << "the sanitizer has a handler of its own, which ends in another way";
#endif
    TemporaryDirectory dir;
    write_file(dir / "other", "text");
    write_file(dir / "foreign", std::string(50000, 'f'));
    const MappedFile other(dir / "other");
    const int fd = open((dir / "foreign").c_str(), O_RDONLY);
    const char* foreign = (const char*)mmap(nullptr, 50000, PROT_READ, MAP_PRIVATE, fd, 0);
    ASSERT_NE(foreign, MAP_FAILED);
    close(fd);
    std::filesystem::resize_file(dir / "foreign", 0);
    EXPECT_EXIT(touch(foreign, 50000), testing::KilledBySignal(SIGBUS), "^$");
    EXPECT_EXIT(raise(SIGBUS), testing::KilledBySignal(SIGBUS), "^$");
    munmap((void*)foreign, 50000);
}

// A temporary file left by a killed process, or planted there, is removed instead of written to.
TEST(FileWriter, NothingIsWrittenThroughALink) {
    TemporaryDirectory dir;
    const std::string temporary = dir / ("x.tmp." + std::to_string(getpid()));
    write_file(dir / "precious", "mine");
    std::filesystem::create_symlink(dir / "precious", temporary);
    write_file_atomically(dir / "x", "text");
    EXPECT_EQ(read_file(dir / "precious"), "mine");
    EXPECT_EQ(read_file(dir / "x"), "text");
    EXPECT_FALSE(std::filesystem::is_symlink(dir / "x"));
    std::filesystem::create_hard_link(dir / "precious", temporary);
    write_file_atomically(dir / "x", "again");
    EXPECT_EQ(read_file(dir / "precious"), "mine");
    std::filesystem::create_symlink(dir / "nothing", temporary);
    write_file_atomically(dir / "x", "and again");
    EXPECT_EQ(read_file(dir / "x"), "and again");
    EXPECT_EQ(dir.names(), (std::set<std::string>{"precious", "x"}));
    std::filesystem::create_directory(temporary);  // the name is not available
    expect_error([&] { write_file_atomically(dir / "x", "text"); }, {dir / "x"});
    EXPECT_EQ(read_file(dir / "x"), "and again");
}

// The cache is the user's own directory or none: a shared one is not used.
TEST(CacheDirectory, IsTheUsersOrNone) {
    TemporaryDirectory dir;
    const auto with = [&](const char* cache, const char* home) {
        const std::string before_cache = getenv("XDG_CACHE_HOME") ? getenv("XDG_CACHE_HOME") : "",
                          before_home = getenv("HOME") ? getenv("HOME") : "";
        setenv("XDG_CACHE_HOME", cache, 1);
        setenv("HOME", home, 1);
        const std::string found = cache_directory();
        setenv("XDG_CACHE_HOME", before_cache.c_str(), 1);
        setenv("HOME", before_home.c_str(), 1);
        return found;
    };
    EXPECT_EQ(with("", ""), "");
    EXPECT_EQ(with("/proc/none", "/proc/none"), "");
    EXPECT_EQ(with("", (dir / "home").c_str()), dir / "home/.cache/train_gpt");
    EXPECT_EQ(with((dir / "cache").c_str(), (dir / "home").c_str()), dir / "cache/train_gpt");
    EXPECT_TRUE(std::filesystem::is_directory(dir / "cache/train_gpt"));
}

TEST(FileWriter, OverwritesAndReadsBack) {
    TemporaryDirectory dir;
    FileWriter file(dir / "x");
    file.write("head");
    const std::string body(3 << 20, 'b');
    file.write(body);
    file.overwrite(1, "ea", "EA", 2);
    std::string back(6, ' ');
    file.read_back(0, &back[0], 6);
    EXPECT_EQ(back, "hEAdbb");
    file.write("tail");
    file.commit();
    EXPECT_EQ(read_file(dir / "x"), "hEAd" + body + "tail");
}

TEST(FileWriter, NoticesLostBytesOfAKeptPart) {
    TemporaryDirectory dir;
    const std::string path = dir / "x", kept = dir / "kept";
    FileSum sum;
    for (const char* found : {"", "one ", "One "}) {
        if (*found) test::write_file(kept, found);
        FileWriter file(path, kept, sum);
        file.write(*found ? "two" : "one ");
        if (!*found) file.keep(), sum = file.sum();
        else if (*found == 'o') file.commit();
        else EXPECT_THROW(file.commit(), LostBytes);
    }
    EXPECT_EQ(read_file(path), "one two");
}

// After a partial write the position is unknown, so nothing more may be written after it.
TEST(FileWriter, FailsOnceForAll) {
    TemporaryDirectory dir;
    FileWriter file(dir / "x");
    struct rlimit before {};
    getrlimit(RLIMIT_FSIZE, &before);
    const struct rlimit small = {1500 << 10, before.rlim_max};
    const auto handler = signal(SIGXFSZ, SIG_IGN);
    setrlimit(RLIMIT_FSIZE, &small);
    expect_error([&] { file.write(std::string(2 << 20, 'a')); }, {dir / "x", "too large"});
    setrlimit(RLIMIT_FSIZE, &before);
    signal(SIGXFSZ, handler);
    expect_error([&] { file.write(std::string(2 << 20, 'b')); }, {dir / "x"});
    expect_error([&] { file.keep(); }, {dir / "x", "an earlier part is missing"});
    expect_error([&] { file.commit(); }, {dir / "x"});
}

// A finished file keeps its temporary name while others of its dataset are written: no other process may remove it.
TEST(FileWriter, IsLockedUntilItHasItsName) {
    TemporaryDirectory dir;
    FileWriter file(dir / "x");
    file.write("text");
    file.keep();
    remove_unfinished(dir / "x");
    file.commit();
    EXPECT_EQ(read_file(dir / "x"), "text");
    write_file(dir / "x.tmp.1", "of a killed process");
    write_file(dir / "x.tmp.backup", "mine");
    write_file(dir / "xy.tmp.1", "of another file");
    remove_unfinished(dir / "x");
    EXPECT_EQ(dir.names(), (std::set<std::string>{"x", "x.tmp.backup", "xy.tmp.1"}));
    remove_unfinished_in(dir / ".", "x");
    EXPECT_EQ(dir.names(), (std::set<std::string>{"x", "x.tmp.backup"}));
}

TEST(Reader, HandWrittenBytes) {
    TemporaryDirectory dir;
    write_file(dir / "d.bin", good_bin());
    write_file(dir / "d.idx", good_index());
    for (const char* path : {"d", "d.bin", "d.idx"}) {
        const TokenDataset d = TokenDataset::open(dir / path);
        ASSERT_EQ(d.n_documents(), 3);
        EXPECT_EQ(d.n_tokens(), 5);
        EXPECT_EQ(document(d, 0), (std::vector<int>{10, 20, 65535}));
        EXPECT_EQ(d.length(1), 0);
        EXPECT_EQ(document(d, 2), (std::vector<int>{30, 40}));
        int token;
        d.read(2, 1, 1, &token);
        EXPECT_EQ(token, 40);
    }
    // with modes, as in multimodal data
    write_file(dir / "d.idx", good_index() + std::string(3, '\0'));
    EXPECT_EQ(TokenDataset::open(dir / "d").n_documents(), 3);
}

TEST(Reader, EveryTokenType) {
    TemporaryDirectory dir;
    const auto read = [&](int type, const std::string& bin, int width) {
        const int n = (int)bin.size() / width;
        write_file(dir / "d.bin", bin);
        write_file(dir / "d.idx",
                   index_header(1, type, 1, 2) + bytes_of<int32_t>(n) + bytes_of<int64_t>(0) + array_of<int64_t>({0, 1}));
        return document(TokenDataset::open(dir / "d"), 0);
    };
    EXPECT_EQ(read(1, array_of<uint8_t>({1, 255}), 1), (std::vector<int>{1, 255}));
    EXPECT_EQ(read(2, array_of<int8_t>({1, -5}), 1), (std::vector<int>{1, -1}));
    EXPECT_EQ(read(3, array_of<int16_t>({300, -300}), 2), (std::vector<int>{300, -1}));
    EXPECT_EQ(read(4, array_of<int32_t>({70000, INT_MIN}), 4), (std::vector<int>{70000, -1}));
    EXPECT_EQ(read(5, array_of<int64_t>({70000, int64_t{1} << 32, INT64_MIN}), 8), (std::vector<int>{70000, INT_MAX, -1}));
    EXPECT_EQ(read(8, array_of<uint16_t>({0, 65535}), 2), (std::vector<int>{0, 65535}));
    for (int type : {6, 7})
        expect_error([&] { read(type, std::string(8, '\0'), type == 6 ? 8 : 4); }, {"d.idx", "floating point"});
    for (int type : {0, 9, 255}) expect_error([&] { read(type, std::string(8, '\0'), 4); }, {"d.idx", "unknown token type"});
}

TEST(Reader, TruncatedAtEveryByte) {
    TemporaryDirectory dir;
    write_file(dir / "d.bin", good_bin());
    const std::string index = good_index(), bin = good_bin();
    for (size_t n = 0; n < index.size(); n++) {
        write_file(dir / "d.idx", index.substr(0, n));
        expect_error([&] { TokenDataset::open(dir / "d"); }, {"d.idx"});
    }
    write_file(dir / "d.idx", index);
    for (size_t n = 0; n < bin.size(); n++) {
        write_file(dir / "d.bin", bin.substr(0, n));
        expect_error([&] { TokenDataset::open(dir / "d"); }, {"d.bin", "do not match", "HINT"});
    }
    write_file(dir / "d.bin", bin + "x");
    expect_error([&] { TokenDataset::open(dir / "d"); }, {"d.bin", "do not match"});
    write_file(dir / "d.bin", bin);
    for (const size_t more : {1, 2, 4, 8}) {
        write_file(dir / "d.idx", index + std::string(more, '\0'));
        expect_error([&] { TokenDataset::open(dir / "d"); }, {"d.idx", "more than its header"});
    }
}

TEST(Reader, HostileIndices) {
    TemporaryDirectory dir;
    write_file(dir / "d.bin", good_bin());
    const uint64_t huge[] = {UINT64_MAX, UINT64_MAX / 12 + 2, uint64_t{1} << 63, uint64_t{1} << 62, 1000};
    const auto refuse = [&](const std::string& index, const std::string& what) {
        write_file(dir / "d.idx", index);
        expect_error([&] { TokenDataset::open(dir / "d"); }, {"d.idx", what});
    };
    const std::string body = good_index().substr(megatron_header_bytes);
    for (const uint64_t n : huge) {
        refuse(index_header(1, 8, n, 4) + body, "truncated or damaged");
        refuse(index_header(1, 8, 3, n) + body, "truncated or damaged");
        refuse(index_header(1, 8, n, n) + body, "truncated or damaged");
    }
    refuse(index_header(2, 8, 3, 4) + body, "version 2");
    refuse(std::string(4096, '\0'), "MMIDIDX");
    refuse("TNTIDX\0\0" + std::string(100, '\0'), "MMIDIDX");
    const auto with = [&](const std::vector<int32_t>& lengths, const std::vector<int64_t>& offsets,
                          const std::vector<int64_t>& borders) {
        return index_header(1, 8, lengths.size(), borders.size()) + array_of(lengths) + array_of(offsets) + array_of(borders);
    };
    const std::string together = "do not match";
    refuse(with({3, 0, -1}, {0, 6, 6}, {0, 1, 2, 3}), together);
    refuse(with({3, 0, INT32_MAX}, {0, 6, 6}, {0, 1, 2, 3}), together);
    refuse(with({3, 0, 2}, {0, 6, -6}, {0, 1, 2, 3}), together);
    refuse(with({3, 0, 2}, {0, 6, INT64_MAX}, {0, 1, 2, 3}), together);
    refuse(with({3, 0, 2}, {0, INT64_MAX - 3, 6}, {0, 1, 2, 3}), together);
    refuse(with({3, 0, 2}, {0, 4, 6}, {0, 1, 2, 3}), together);  // overlapping
    refuse(with({2, 3, 2}, {6, 0, 6}, {0, 1, 2, 3}), together);  // out of order
    refuse(with({3, 0, 1}, {0, 6, 6}, {0, 1, 2, 3}), together);  // ends early
    const std::string borders = "document borders";
    refuse(with({3, 0, 2}, {0, 6, 6}, {1, 1, 2, 3}), borders);
    refuse(with({3, 0, 2}, {0, 6, 6}, {0, 1, 2, 2}), borders);
    refuse(with({3, 0, 2}, {0, 6, 6}, {0, 2, 1, 3}), borders);
    refuse(with({3, 0, 2}, {0, 6, 6}, {0, -1, 2, 3}), borders);
    refuse(with({3, 0, 2}, {0, 6, 6}, {}), borders);
}

TEST(Reader, MissingFiles) {
    TemporaryDirectory dir;
    expect_error([&] { TokenDataset::open(dir / "nothere"); }, {"nothere", "HINT", "prepare"});
    write_file(dir / "d.idx", good_index());
    expect_error([&] { TokenDataset::open(dir / "d"); }, {"d.bin", "missing"});
    write_file(dir / "text.txt", "some text that is no data");
    expect_error([&] { TokenDataset::open(dir / "text.txt"); }, {"text.txt", "prepare"});
    write_file(dir / "alone.bin", good_bin());
    expect_error([&] { TokenDataset::open(dir / "alone"); }, {"alone.bin", ".idx"});
    expect_error([&] { TokenDataset::open(dir / ""); }, {"is a folder, and data is named by its PREFIX", "/d"});
}

// ---- llm.c's shards --------------------------------------------------------------------------------------------------------
TEST(Shards, BothKinds) {
    TemporaryDirectory dir;
    write_file(dir / "gpt2.bin", shard(20240520, 1, 3, array_of<uint16_t>({50256, 1, 65535})));
    write_file(dir / "llama.bin", shard(20240801, 7, 2, array_of<uint32_t>({128000, 0x90000000u})));
    for (const char* path : {"gpt2.bin", "gpt2"}) {
        const TokenDataset d = TokenDataset::open(dir / path);
        EXPECT_EQ(d.n_documents(), 1);
        EXPECT_EQ(document(d, 0), (std::vector<int>{50256, 1, 65535}));
    }
    EXPECT_EQ(document(TokenDataset::open(dir / "llama.bin"), 0), (std::vector<int>{128000, INT_MAX}));
}

TEST(Shards, PatternInOrder) {
    TemporaryDirectory dir;
    for (int i : {2, 0, 1})
        write_file(dir / format("train_%06d.bin", i),
                   shard(20240520, 1, i + 1, array_of(std::vector<uint16_t>(i + 1, (uint16_t)i))));
    TokenDataset d = TokenDataset::open(dir / "train_*.bin");
    ASSERT_EQ(d.n_documents(), 3);
    EXPECT_EQ(d.n_tokens(), 6);
    for (int i = 0; i < 3; i++) EXPECT_EQ(document(d, i), std::vector<int>(i + 1, i));
    write_file(dir / "more.bin", shard(20240520, 1, 1, bytes_of<uint16_t>(9)));
    d.append_shards(TokenDataset::open(dir / "more.bin"));
    EXPECT_EQ(d.n_documents(), 4);
    EXPECT_EQ(d.n_tokens(), 7);
    EXPECT_EQ(document(d, 3), std::vector<int>{9});

    expect_error([&] { TokenDataset::open(dir / "valid_*.bin"); }, {"valid_*.bin", "no files match"});
    write_file(dir / "train_000003.bin", shard(20240801, 7, 1, bytes_of<uint32_t>(9)));
    expect_error([&] { TokenDataset::open(dir / "train_*.bin"); }, {"different tokenizers"});
    write_file(dir / "m_0.bin", good_bin());
    write_file(dir / "m_0.idx", good_index());
    expect_error([&] { TokenDataset::open(dir / "m_?.bin"); }, {"m_0.bin", "not an llm.c token shard"});
}

TEST(Shards, Damaged) {
    TemporaryDirectory dir;
    const std::string tokens = array_of<uint16_t>({1, 2, 3});
    const auto refuse = [&](const std::string& bytes, const std::string& what) {
        write_file(dir / "s.bin", bytes);
        expect_error([&] { TokenDataset::open(dir / "s.bin"); }, {"s.bin", what});
    };
    const std::string good = shard(20240520, 1, 3, tokens);
    refuse("", "is not an llm.c token shard");
    refuse(good.substr(0, 3), "is not an llm.c token shard");
    refuse(good.substr(0, 1023), "truncated");
    for (const int n : {0, 2, 4, -1, INT_MIN, INT_MAX}) refuse(shard(20240520, 1, n, tokens), "truncated or damaged");
    refuse(good.substr(0, good.size() - 1), "truncated or damaged");
    refuse(good + "x", "truncated or damaged");
    refuse(shard(20240520, 2, 3, tokens), "version 2");
    refuse(shard(20240801, 1, 3, tokens), "version 1");
    refuse(shard(20240521, 1, 3, tokens), "is not an llm.c token shard");
}

}  // namespace test_dataset
