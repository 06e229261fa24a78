// Checkpoints: checksum, manifest, sharded tensors, which checkpoint is found and which are kept, which options a resumed
// run must match, and when to save.
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "../llmc/checkpoint/agreement.h"
#include "../llmc/checkpoint/saver.h"
#include "../llmc/checkpoint/training_state.h"
#include "files.h"
#include "model_files.h"
#include "testing.h"

namespace test_checkpoint {

using test::expect_error;
using test::read_file;
using test::TemporaryDirectory;
using test::write_file;

ModelConfig tiny(const std::string& family) {
    ModelConfig c;
    set_family(c, family);
    c.L = 2;
    c.C = 16;
    c.NH = c.NKV = 2;
    c.F = 64;
    c.T = 8;
    c.V = 21;
    pad_vocabulary(c, 8);
    return c;
}

// RFC 3720 B.4 and the usual check value.
TEST(Crc32c, GoldenValues) {
    EXPECT_EQ(crc32c("123456789", 9), 0xE3069283u);
    EXPECT_EQ(crc32c("", 0), 0u);
    const std::string zeros(32, '\0'), ones(32, '\xff');
    EXPECT_EQ(crc32c(zeros.data(), 32), 0x8A9136AAu);
    EXPECT_EQ(crc32c(ones.data(), 32), 0x62A8AB43u);
}

TEST(Crc32c, InstructionEqualsTableAndPartsEqualTheWhole) {
    test::Rng rng(1);
    std::string bytes(1000, ' ');
    for (char& c : bytes) c = (char)rng.below(256);
    for (int n = 0; n < 40; n++)
        for (int from = 0; from < 9; from++)
            EXPECT_EQ(crc32c(bytes.data() + from, (size_t)n), crc32c_by_table(bytes.data() + from, (size_t)n)) << n;
    for (size_t cut : {0, 1, 7, 8, 500, 1000}) {
        const uint32_t first = crc32c(bytes.data(), cut);
        EXPECT_EQ(crc32c(bytes.data() + cut, 1000 - cut, first), crc32c(bytes.data(), 1000)) << cut;
    }
}

// A file that is written again has the checksum of its last content: generation_config.json of a model that is trained on
// conversations is copied, then changed.
TEST(Crc32c, AFileWrittenAgainReplacesTheFirst) {
    test::TemporaryDirectory dir;
    WrittenFiles written(dir / "x");
    std::filesystem::create_directory(dir / "x");
    written.write(dir / "x/config.json", "first");
    written.write(dir / "x/other.json", "other");
    written.write(dir / "x/config.json", "the second");
    const FileSums sums = written.sums();
    EXPECT_EQ(sums.at("config.json").bytes, 10u);
    EXPECT_EQ(sums.size(), 2u);
    check_against_disk(dir / "x", sums);
}

// The checksum of a file written in pieces, in any order, by several writers, with holes of zeros.
TEST(Crc32c, PiecesInAnyOrderGiveTheSumOfTheWhole) {
    test::Rng rng(2);
    std::string bytes(5000, '\0');
    for (size_t i = 0; i < bytes.size(); i++)
        if (i < 1000 || i > 3000) bytes[i] = (char)rng.below(256);
    std::vector<size_t> cuts = {0, 1, 7, 64, 999, 3001, 3002, 4096, 5000};
    WrittenFiles first("dir"), second("dir"), all("dir");
    for (const size_t k : {5, 0, 7, 2, 3, 1, 6, 4}) {
        const size_t n = cuts[k + 1] - cuts[k];
        (k % 2 ? first : second).add("dir/a/b", cuts[k], bytes.data() + cuts[k], n, bytes.size() - cuts[k + 1]);
    }
    all.add_lines(second.lines());
    all.add_lines(first.lines());
    const FileSums sums = all.sums();
    ASSERT_EQ(sums.count("a/b"), 1u);
    EXPECT_EQ(sums.at("a/b").bytes, 5000u);
    EXPECT_EQ(sums.at("a/b").crc, crc32c(bytes.data(), bytes.size()));
    expect_error([&] { check_against_disk("dir", sums, {{"a/b", {5000, 7}}}); }, {"dir/a/b differs from the data written"});
    const size_t far = ((size_t)1 << 40) + 12345;  // x^(8 (a + b)) = x^(8 a) x^(8 b), also for lengths beyond 32 bits
    EXPECT_EQ(crc32c_power(far), crc32c_product(crc32c_power(far - 999), crc32c_power(999)));
}

// A file is damaged, missing or unreadable; only the first two count as bad.
TEST(Reading, WhatCannotBeReadIsNotJudged) {
    const TemporaryDirectory dir;
    write_file(dir / "a", "text");
    EXPECT_EQ(read_whole_file(dir / "a"), "text");
    EXPECT_EQ(read_whole_file(dir / "a", true), "text");
    EXPECT_EQ(sum_file(dir / "a", SIZE_MAX, true).crc, crc32c("text", 4));
    EXPECT_EQ(sum_file(dir / "a", 2).bytes, 4u);
    EXPECT_FALSE(file_exists(dir / "b"));
    EXPECT_FALSE(file_exists(dir / "a/b"));
    EXPECT_TRUE(names_in(dir / "a").empty());
    expect_error([&] { read_whole_file(dir / "b"); }, {"cannot open"});
    std::string big(3 << 20, 'x');  // not a multiple of any block size
    big += "end";
    write_file(dir / "big", big);
    EXPECT_EQ(sum_file(dir / "big", SIZE_MAX, true).crc, crc32c(big.data(), big.size()));
    int calls = 0;
    EXPECT_EQ(patiently([&] { return ++calls < 3 ? throw Unreadable("once", EIO) : calls; }), 3);
    EXPECT_THROW(patiently([&] { return ++calls < 5 ? throw Unreadable("for ever", EACCES) : calls; }), Unreadable);
    EXPECT_EQ(calls, 4);
}

// bf16 weights that differ from the rounded fp32 weights, as after a lost write in versions that did not read back
// checksums.
TEST(Checkpoints, WeightsAreTheRoundedMasters) {
    const ModelConfig c = tiny("gpt2");
    const ParameterTable table(c);
    std::vector<float> masters(table.size);
    test::Rng rng(5);
    for (float& x : masters) x = (float)rng.normal();
    masters[3] = 1 + 0x1p-8f;  // a tie
    std::vector<bf16> rounded(table.size), even(table.size);
    for (size_t i = 0; i < masters.size(); i++) {
        rounded[i] = weight_halves(masters[i]).upper;
        even[i] = masters[i];
    }
    const TemporaryDirectory dir;
    const std::string model = dir / "model.safetensors", master = dir / "master.safetensors";
    const auto problem = [&](const std::vector<bf16>& weights, size_t shard_bytes = 5000000000) {
        for (const auto& entry : std::filesystem::directory_iterator(dir / "")) std::filesystem::remove(entry);
        write_tensors(model, table, weights.data(), shard_bytes);
        write_tensors(master, table, masters.data());
        return rounding_problem(model, master, 0, 1);
    };
    EXPECT_EQ(problem(rounded), "");
    EXPECT_EQ(problem(even), "");
    EXPECT_EQ(problem(rounded, 3000), "");
    rounded[table.rows[1].offset].bits ^= 1;
    EXPECT_NE(problem(rounded).find("1 numbers of 'transformer.wpe.weight' are not the fp32 weights rounded"),
              std::string::npos)
        << problem(rounded);
    EXPECT_EQ(rounding_problem(model, master, 0, 2) + rounding_problem(model, master, 1, 2), problem(rounded));
}

TEST(Manifest, EveryDamageIsSeenAndNamed) {
    const TemporaryDirectory dir;
    const std::string model = dir / "model";
    const auto write = [&] {
        publish_directory(model, [](const std::string& temporary) {
            make_directory(temporary + "/training");
            write_file(temporary + "/a.bin", std::string(3000000, 'a'));
            write_file(temporary + "/training/b.json", "{}");
        });
    };
    write();
    EXPECT_EQ(verify_directory(model), "");
    std::string bytes = read_file(model + "/a.bin");
    for (size_t at : {(size_t)0, (size_t)1048576, bytes.size() - 1}) {
        std::string flipped = bytes;
        flipped[at] ^= 4;
        write_file(model + "/a.bin", flipped);
        EXPECT_NE(verify_directory(model).find("a.bin is damaged"), std::string::npos) << verify_directory(model);
    }
    write_file(model + "/a.bin", bytes.substr(0, 100));
    EXPECT_NE(verify_directory(model).find("a.bin has 100 bytes"), std::string::npos);
    write_file(model + "/a.bin", bytes);
    EXPECT_EQ(verify_directory(model), "");
    std::filesystem::remove(model + "/training/b.json");
    EXPECT_NE(verify_directory(model).find("training/b.json"), std::string::npos);
    write();
    for (const char* text : {"", "{", "[]", "{\"files\": 3}", "{\"files\": {}}", "{\"files\": {\"a.bin\": 1}}"}) {
        write_file(model + "/manifest.json", text);
        EXPECT_NE(verify_directory(model).find("manifest.json"), std::string::npos) << text;
    }
    std::filesystem::remove(model + "/manifest.json");
    EXPECT_NE(verify_directory(model), "");
    EXPECT_NE(verify_directory(dir / "none"), "");
}

// A manifest may come from anyone. Whatever it names, reading ends soon and stays in the directory.
TEST(Manifest, HostileNamesAreRefused) {
    const TemporaryDirectory dir;
    const std::string model = dir / "model";
    std::filesystem::create_directories(model + "/training");
    write_file(dir / "secret", "s");
    write_file(model + "/a.bin", "a");
    alarm(60);  // instead of waiting forever for a pipe
    const auto problem = [&](const std::string& name, size_t bytes = 1) {
        nlohmann::json manifest = {{"files", {{name, {{"bytes", bytes}, {"crc32c", format("%08x", crc32c("s", 1))}}}}}};
        write_file(model + "/manifest.json", manifest.dump());
        return verify_directory(model);
    };
    for (const std::string name : {"../secret", "training/../../secret", "..", "/etc/passwd", "/dev/zero", ""}) {
        const std::string found = problem(name);
        EXPECT_NE(found.find(model + "/manifest.json names a file outside its directory: '" + name), std::string::npos)
            << found;
    }
    EXPECT_NE(problem(std::string("a.bin\0/../../secret", 20)).find("outside its directory"), std::string::npos);
    ASSERT_EQ(mkfifo((model + "/pipe").c_str(), 0600), 0);
    std::filesystem::create_symlink("/dev/zero", model + "/zeros");
    const int s = socket(AF_UNIX, SOCK_STREAM, 0);
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    snprintf(address.sun_path, sizeof address.sun_path, "%s/socket", model.c_str());
    ASSERT_EQ(bind(s, (sockaddr*)&address, sizeof address), 0);
    close(s);
    for (const std::string name : {"pipe", "zeros", "training", "socket"})
        EXPECT_NE(problem(name).find(model + "/" + name), std::string::npos) << problem(name);
    // A link to a file counts as one.
    std::filesystem::create_symlink(dir / "secret", model + "/link");
    EXPECT_EQ(problem("link"), "");
    write_file(model + "/manifest.json", R"({"files": {"a.bin": {"bytes": 1e300, "crc32c": "00000000"}}})");
    EXPECT_NE(verify_directory(model).find("the size of a.bin is 1e+300"), std::string::npos) << verify_directory(model);
    // Reads no more than the manifest's length: this file has 4 TiB.
    std::filesystem::resize_file(model + "/a.bin", (uintmax_t)1 << 42);
    EXPECT_NE(problem("a.bin").find("a.bin has 4398046511104 bytes; it was written with 1"), std::string::npos);
    alarm(0);
}

// Cut into shards of any size and read back: the same bits.
TEST(Tensors, ShardsHoldTheSame) {
    for (const char* family : {"gpt2", "bloom", "llama"}) {
        const ModelConfig c = tiny(family);
        const ParameterTable table(c);
        std::vector<float> values(table.size), found(table.size, NAN);
        test::Rng rng(3);
        for (const TensorSpec& spec : table.rows)  // padded rows and gaps are zero
            for (const HfTensor& t : spec.hf)
                for (size_t i = 0; i < (size_t)t.rows * spec.cols; i++)
                    values[spec.offset + (size_t)t.row * spec.cols + i] = (float)rng.normal();
        for (size_t shard_bytes : {(size_t)1, (size_t)3000, (size_t)20000, (size_t)1 << 30}) {
            const TemporaryDirectory dir;
            write_tensors(dir / "model.safetensors", table, values.data(), shard_bytes);
            const bool whole = shard_bytes == (size_t)1 << 30;
            EXPECT_EQ(std::filesystem::exists(dir / "model.safetensors"), whole);
            EXPECT_EQ(std::filesystem::exists(dir / "model.safetensors.index.json"), !whole);
            for (const std::string& path : {dir / "", dir / "model.safetensors"}) {
                std::fill(found.begin(), found.end(), 0.0f);
                read_tensors(path, c, table, found.data());
                test::expect_same_bits(found, values, family);
            }
        }
    }
}

// If a tied model's file also stores the head, it must equal the embedding: files of transformers 5 may have another one.
TEST(Tensors, TiedHeadIsTheEmbedding) {
    const ModelConfig c = tiny("gpt2");
    const ParameterTable table(c);
    std::vector<float> values(table.size), found(table.size);
    test::Rng rng(4);
    const TensorSpec& wte = table.rows[0];
    for (size_t i = 0; i < (size_t)c.V * c.C; i++) values[wte.offset + i] = (float)rng.normal();
    const auto read = [&](const std::vector<int64_t>& shape, size_t changed) {
        const TemporaryDirectory dir;
        write_tensors(dir / "model-a.safetensors", table, values.data());
        std::vector<float> head(values.begin() + (ptrdiff_t)wte.offset, values.begin() + (ptrdiff_t)wte.offset + c.V * c.C);
        if (changed < head.size()) head[changed] += 1;
        {
            SafetensorsWriter writer(dir / "model-b.safetensors");
            writer.declare("lm_head.weight", "F32", shape);
            writer.write("lm_head.weight", head.data(), head.size() * 4);
            writer.finish();
        }
        write_file(dir / "model.safetensors.index.json",
                   "{\"weight_map\": {\"a\": \"model-a.safetensors\", \"b\": \"model-b.safetensors\"}}");
        read_tensors(dir / "", c, table, found.data());
    };
    const size_t n = (size_t)c.V * c.C;
    read({c.V, c.C}, n);
    for (const size_t changed : {(size_t)0, n - 1})
        expect_error([&] { read({c.V, c.C}, changed); }, {"tie_word_embeddings", "lm_head.weight", "HINT"});
    expect_error([&] { read({c.C, c.V}, n); }, {"tie_word_embeddings"});
}

// A weight unknown to us means a different model; masks are not weights. An adapter on a tied head is not a copy of the
// head.
TEST(Tensors, UnknownOnesAreRefusedByName) {
    ModelConfig c = tiny("gpt2");
    ParameterTable table(c);
    std::vector<float> values(table.size, 0.5f), found(table.size);
    const auto with = [&](const std::string& name) {
        const TemporaryDirectory dir;
        write_tensors(dir / "model-a.safetensors", table, values.data());
        {
            SafetensorsWriter writer(dir / "model-b.safetensors");
            writer.declare(name, "F32", {1});
            const float one = 1;
            writer.write(name, &one, 4);
            writer.finish();
        }
        write_file(dir / "model.safetensors.index.json",
                   "{\"weight_map\": {\"a\": \"model-a.safetensors\", \"b\": \"model-b.safetensors\"}}");
        read_tensors(dir / "", c, table, found.data());
    };
    for (const char* name : {"transformer.h.0.attn.bias", "h.1.attn.masked_bias"}) with(name);
    for (const char* name : {"transformer.h.0.attn.q_proj.bias", "score.weight", "lm_head.weight_scale", "x.lm_head.weight"})
        expect_error([&] { with(name); }, {name, "does not have"});
    c.lora.rank = 2;
    c.lora.modules = lora_modules(c, {"all"});
    table = trained_table(c);
    values.assign(table.size, 0.5f);
    found.resize(table.size);
    with("transformer.h.0.attn.bias");
    for (const char* name : {"base_model.model.lm_head.lora_A.weight", "base_model.model.lm_head.base_layer.weight",
                             "base_model.model.lm_head.weight", "lm_head.weight"})
        expect_error([&] { with(name); }, {name, "does not have"});
}

std::string checkpoint_to_resume(const std::string& out, const std::function<void(const std::string&)>& report) {
    for (const std::string& dir : checkpoints_to_try(out)) {
        const std::string problem = verify_checkpoint(dir);
        if (problem.empty()) return dir;
        report(problem);
    }
    return "";
}

TEST(Checkpoints, TheLatestIntactIsResumedAndDamageReported) {
    const TemporaryDirectory out;
    EXPECT_EQ(checkpoint_to_resume(out / "", [](const std::string&) {}), "");
    for (int64_t step : {5, 100, 20})
        publish_directory(step_directory(out / "", step), [&](const std::string& temporary) {
            make_directory(temporary + "/training");
            for (const char* name :
                 {"a", "config.json", "model.safetensors", "training/exp_avg.safetensors", "training/exp_avg_sq.safetensors"})
                write_file(temporary + "/" + name, "abc");
            write_file(temporary + "/training/state.json",
                       format("{\"step\": %d, \"layout\": {\"precision\": \"fp32\"}}", (int)step));
        });
    std::filesystem::create_directory(out / "step_00000007.bak");
    std::filesystem::create_directory(out / "step_");
    std::filesystem::create_directory(out / "step_7");
    write_file(out / "step_00000008", "no directory");
    EXPECT_EQ(find_checkpoints(out / ""), (std::vector<int64_t>{100, 20, 5}));
    std::vector<std::string> reports;
    const auto report = [&](const std::string& problem) { reports.push_back(problem); };
    EXPECT_EQ(checkpoint_to_resume(out / "", report), step_directory(out / "", 100));
    EXPECT_TRUE(reports.empty());
    write_file(step_directory(out / "", 100) + "/a", "abd");
    EXPECT_EQ(checkpoint_to_resume(out / "", report), step_directory(out / "", 20));
    ASSERT_EQ(reports.size(), 1u);
    EXPECT_NE(reports[0].find("step_00000100/a"), std::string::npos);
    // A copy under another name is not that step's checkpoint.
    std::filesystem::copy(step_directory(out / "", 20), step_directory(out / "", 30), std::filesystem::copy_options::recursive);
    EXPECT_NE(verify_checkpoint(step_directory(out / "", 30)).find("holds the checkpoint of step 20"), std::string::npos);
    std::filesystem::remove_all(step_directory(out / "", 30));
    // A checkpoint chosen by going back has priority over later ones; if it is damaged, earlier ones follow.
    write_file(step_directory(out / "", 100) + "/a", "abc");
    make_latest(out / "", step_directory(out / "", 20));
    EXPECT_EQ(checkpoint_to_resume(out / "", report), step_directory(out / "", 20));
    make_latest(out / "", out / "latest");
    EXPECT_EQ(std::filesystem::read_symlink(out / "latest"), "step_00000020");
    for (const std::string& spelling : {std::string("./step_00000020/"), out / "step_00000020"}) {
        std::filesystem::remove(out / "latest");
        std::filesystem::create_symlink(spelling, out / "latest");
        EXPECT_EQ(checkpoint_to_resume(out / "", report), step_directory(out / "", 20)) << spelling;
    }
    write_file(step_directory(out / "", 20) + "/a", "abd");
    EXPECT_EQ(checkpoint_to_resume(out / "", report), step_directory(out / "", 5));
    write_file(step_directory(out / "", 5) + "/a", "abd");
    EXPECT_EQ(checkpoint_to_resume(out / "", report), step_directory(out / "", 100));
    const TemporaryDirectory elsewhere;
    make_latest(elsewhere / "", step_directory(out / "", 5));
    EXPECT_FALSE(std::filesystem::exists(elsewhere / "latest"));
}

TEST(Checkpoints, TheLastAndEveryMthAreKept) {
    const TemporaryDirectory out;
    for (int64_t step = 10; step <= 80; step += 10) {
        std::filesystem::create_directory(step_directory(out / "", step));
        write_file(step_directory(out / "", step) + "/manifest.json", "{}");
    }
    prune(out / "", 80, {0, 0});
    EXPECT_EQ(find_checkpoints(out / "").size(), 8u);
    prune(out / "", 80, {2, 30});
    EXPECT_EQ(find_checkpoints(out / ""), (std::vector<int64_t>{80, 70, 60, 30}));
    // Later checkpoints, from another course of the run, do not evict the one just written.
    prune(out / "", 60, {1, 0});
    EXPECT_EQ(find_checkpoints(out / ""), (std::vector<int64_t>{80, 70, 60}));
    prune(out / "", 80, {1, 0});
    EXPECT_EQ(find_checkpoints(out / ""), (std::vector<int64_t>{80}));
    // `latest` could not be updated to the newest one.
    for (int64_t step : {10, 20}) {
        std::filesystem::create_directory(step_directory(out / "", step));
        write_file(step_directory(out / "", step) + "/manifest.json", "{}");
    }
    std::filesystem::create_symlink("step_00000010", out / "latest");
    prune(out / "", 80, {1, 0});
    EXPECT_EQ(find_checkpoints(out / ""), (std::vector<int64_t>{80, 10}));
    std::filesystem::remove(out / "latest");
    std::filesystem::remove_all(step_directory(out / "", 10));
    // A user's directory with a checkpoint's name.
    std::filesystem::create_directory(step_directory(out / "", 75));
    prune(out / "", 80, {1, 0});
    EXPECT_EQ(find_checkpoints(out / ""), (std::vector<int64_t>{80, 75}));
}

// An empty checkpoint.
void put_checkpoint(const TemporaryDirectory& out, int64_t step) {
    std::filesystem::create_directory(step_directory(out / "", step));
    write_file(step_directory(out / "", step) + "/manifest.json", "{}");
}

TEST(Checkpoints, ARollbackAlwaysFindsOneThatIsFarEnoughBack) {
    for (const int64_t way_back : {0, 5, 9, 10, 11, 25, 40, 115}) {
        const TemporaryDirectory out;
        for (int64_t step = 10; step <= 500; step += 10) {
            put_checkpoint(out, step);
            prune(out / "", step, {2, 0, way_back});
            const std::vector<int64_t> kept = find_checkpoints(out / "");
            EXPECT_LE(kept.size(), 4u);
            EXPECT_EQ(kept[0], step);
            // From the first step at which a spike may be detected until the next checkpoint.
            for (int64_t now = step; now < step + 10; now++) {
                const auto far = std::find_if(kept.begin(), kept.end(), [&](int64_t s) { return s <= now - way_back; });
                if (now - way_back < 10) EXPECT_EQ(kept.back(), 10) << now;  // there was no other
                else ASSERT_NE(far, kept.end()) << now << ", " << way_back;
                // And not much farther than necessary.
                if (far == kept.end()) continue;
                EXPECT_GT(*far, now - 2 * way_back - 30) << now << ", " << way_back;
            }
        }
    }
}

TEST(Checkpoints, ThoseAfterTheOneThatTrainingGoesOnFromAreRenamed) {
    const TemporaryDirectory out, elsewhere;
    for (const int64_t step : {10, 20, 30, 40}) put_checkpoint(out, step);
    std::filesystem::create_directory(step_directory(out / "", 50));  // the user's
    std::filesystem::create_symlink("step_00000040", out / "latest");
    const std::string done = go_back_to(out / "", step_directory(out / "", 20), 20);
    EXPECT_EQ(find_checkpoints(out / ""), (std::vector<int64_t>{50, 20, 10}));
    EXPECT_EQ(latest_step(out / ""), 20);
    for (const char* name : {"step_00000030.1", "step_00000040.1"}) {
        EXPECT_TRUE(std::filesystem::exists(out / name + "/manifest.json"));
        EXPECT_NE(done.find(name), std::string::npos) << done;
    }
    EXPECT_EQ(go_back_to(out / "", step_directory(out / "", 20), 20), "");
    // To a checkpoint of another run, from which this one started: no checkpoint or link of this run is left.
    put_checkpoint(elsewhere, 5);
    std::filesystem::remove_all(step_directory(out / "", 50));
    EXPECT_NE(go_back_to(out / "", step_directory(elsewhere / "", 5), 5), "");
    EXPECT_TRUE(find_checkpoints(out / "").empty());
    EXPECT_FALSE(std::filesystem::is_symlink(out / "latest"));
    EXPECT_EQ(find_checkpoints(elsewhere / ""), (std::vector<int64_t>{5}));
}

TEST(Leftovers, AreExactlyWhatKilledRunsLeave) {
    using Type = std::filesystem::file_type;
    for (const char* name : {".step_00000010.tmp", ".step_00000010.old", ".step_123456789.tmp"})
        EXPECT_TRUE(is_leftover(name, Type::directory) && !is_leftover(name, Type::regular)) << name;
    for (const char* name : {"report.html.tmp.1", "log.jsonl.tmp.99", "loss.svg.tmp.4194304"})
        EXPECT_TRUE(is_leftover(name, Type::regular) && !is_leftover(name, Type::directory)) << name;
    EXPECT_TRUE(is_leftover("latest.tmp.12", Type::symlink) && !is_leftover("latest.tmp.12", Type::regular));
    for (const char* name : {".step_", ".step_1.tmp", ".step_00000010", ".step_00000010.tmp.1", ".step_00000010x.tmp",
                             ".step_mine", ".step_-0000001.tmp", "my.tmp.notes", "data.bin.tmp.7", "report.html.tmp.",
                             "report.html.tmp.x", "report.html.tmp.1.bak", "latest.tmp", "a.tmp", ".tmp", ""})
        for (const Type type : {Type::directory, Type::regular}) EXPECT_FALSE(is_leftover(name, type)) << name;
    EXPECT_FALSE(is_leftover("report.html.tmp.1", Type::symlink));
}

TEST(SetAside, TakesTheFirstFreeName) {
    const TemporaryDirectory dir;
    EXPECT_EQ(set_aside(dir / "log"), "");
    for (const char* text : {"a", "b", "c"}) {
        write_file(dir / "log", text);
        set_aside(dir / "log");
    }
    EXPECT_EQ(read_file(dir / "log.1") + read_file(dir / "log.2") + read_file(dir / "log.3"), "abc");
    std::filesystem::create_symlink("nowhere", dir / "log");
    EXPECT_EQ(set_aside(dir / "log"), dir / "log.4");
}

TEST(Checkpoints, ASecondRunInTheSameDirectoryIsRefused) {
    const TemporaryDirectory dir;
    const RunLock first(dir / "out");
    expect_error([&] { RunLock second(dir / "out"); }, {"another run", std::to_string(getpid())});
    const RunLock other(dir / "other");
}

TEST(RunLock, IsTakenAgainWhereItWasDeletedAndLeavesNoFolderOfARefusedRun) {
    const TemporaryDirectory dir;
    const std::string out = dir / "out";
    {
        RunLock lock(out);
        lock.hold();
        std::filesystem::remove_all(out);
        lock.hold();
        expect_error([&] { RunLock second(out); }, {"another run"});
        std::filesystem::remove_all(out);
        {
            const RunLock thief(out);
            expect_error([&] { lock.hold(); }, {"another run"});
        }
        lock.hold();  // the other one left nothing
        unlink((out + "/.lock").c_str());
        write_file(out + "/.lock", "1");  // another process was here, and has exited
        for (int i = 0; i < 2; i++) expect_error([&] { lock.hold(); }, {"another run", "process 1"});
        std::filesystem::remove_all(out);
    }
    EXPECT_FALSE(std::filesystem::exists(out));
    {
        const RunLock lock(out), other(dir / "b");
        write_file(out + "/mine", "");
    }
    EXPECT_TRUE(std::filesystem::exists(out + "/mine"));
    EXPECT_FALSE(std::filesystem::exists(dir / "b"));
}

TEST(Checkpoints, ALockThatIsALinkIsNotFollowed) {
    const TemporaryDirectory dir;
    write_file(dir / "precious", "mine");
    std::filesystem::create_symlink("precious", dir / ".lock");
    expect_error([&] { RunLock lock(dir / ""); }, {".lock"});
    EXPECT_EQ(read_file(dir / "precious"), "mine");
}

TEST(Agreement, OptionsThatChangeTheRunAreInsistedOn) {
    TrainOptions o;
    o.lr = 1e-3;
    o.train_iters = 100;
    o.global_batch_size = 16;
    TrainingState saved;
    saved.options = options_to_json(o);
    saved.data = {{{"documents", 3}, {"tokens", 50}}};
    saved.layout = {{"precision", precision_name}};
    std::string order;
    const auto agree = [&](const std::function<void(TrainOptions&)>& change, const Strings& overrides = {}) {
        TrainOptions now = o;
        change(now);
        check_agreement(saved, now, saved.data, order, overrides);
    };
    agree([](TrainOptions&) {});
    agree([](TrainOptions& n) {
        n.out = "elsewhere";
        n.threads = 7;
        n.micro_batch_size = 1;
        n.log_interval = 9;
        n.save_every = "5";
        n.data_path = {"moved"};
    });
    expect_error([&] { agree([](TrainOptions& n) { n.lr = 2e-3; }); }, {"--lr", "0.002", "0.001", "--override lr"});
    agree([](TrainOptions& n) { n.lr = 2e-3; }, {"lr"});
    expect_error([&] { agree([](TrainOptions& n) { n.train_iters = 200; }); }, {"--override train-iters"});
    expect_error([&] { agree([](TrainOptions& n) { n.seed = 9; }); }, {"--seed"});
    expect_error([&] { agree([](TrainOptions& n) { n.global_batch_size = 9; }, {"lr"}); }, {"--global-batch-size 16 keeps it"});
    TrainOptions free = o;
    free.override = {"threads"};
    expect_error([&] { check_overrides(free); }, {"'threads'"});
    // Earlier versions saved no global batch if it was one micro-batch per rank.
    saved.options["global-batch-size"] = 0;
    saved.options["micro-batch-size"] = 4;
    saved.layout["dp"] = 2;
    expect_error([&] { agree([](TrainOptions&) {}); }, {"16 samples, the checkpoint was written with 8"});
    agree([](TrainOptions& n) { n.global_batch_size = 8; });
    saved.options["global-batch-size"] = 16;
    // A length chosen by a time budget is kept.
    const auto an_hour = [](TrainOptions& n) { n.time_budget = "1h"; };
    agree(an_hour, {"time-budget"});
    saved.length.steps = 70;
    expect_error([&] { agree(an_hour, {"time-budget"}); }, {"has already chosen its length of 70 steps", "HINT"});
    saved.length = {};
    const auto narrow = [](TrainOptions& n) { n.exp_avg_sq_dtype = "bf16"; };
    for (const bool old_version : {false, true}) {  // a version with only fp32 moments, without the option
        if (old_version) {
            saved.options.erase("exp-avg-dtype");
            saved.options.erase("exp-avg-sq-dtype");
        }
        agree([](TrainOptions&) {});
        expect_error([&] { agree(narrow); }, {"--exp-avg-sq-dtype", "\"fp32\"", "--override exp-avg-sq-dtype"});
        agree(narrow, {"exp-avg-sq-dtype"});
        TrainOptions now = o;
        narrow(now);
        now.override = {"exp-avg-sq-dtype"};
        EXPECT_EQ(describe_overrides(saved, now), "exp-avg-sq-dtype is \"bf16\", it was \"fp32\"");
        EXPECT_EQ(describe_overrides(saved, o), "");
    }
    expect_error([&] { agree([](TrainOptions& n) { n.main_grads_dtype = "bf16"; }); }, {"--main-grads-dtype", "\"fp32\""});
    for (const char* name : {"exp-avg-dtype", "main-grads-dtype"}) {  // every bf16 is an fp32
        saved.options[name] = "bf16";
        agree([](TrainOptions&) {});
        EXPECT_EQ(describe_overrides(saved, o), std::string(name) + " is \"fp32\", it was \"bf16\"");
        saved.options[name] = "fp32";
    }
    expect_error(
        [&] {
            check_agreement(saved, o, {{{"documents", 4}, {"tokens", 50}}}, "", {});
        },
        {"documents", "--override data-path"});
    const auto with_sum = [](const char* sum) {
        return nlohmann::ordered_json{{{"documents", 3}, {"tokens", 50}, {"crc32c", sum}}};
    };
    check_agreement(saved, o, with_sum("01234567"), "", {});  // checkpoints of earlier versions have none
    saved.data = with_sum("01234567");
    check_agreement(saved, o, with_sum("01234567"), "", {});
    expect_error([&] { check_agreement(saved, o, with_sum("01234568"), "", {}); }, {"checksum", "--override data-path"});
    order = "the order changes";
    expect_error([&] { agree([](TrainOptions&) {}, {"train-iters"}); }, {order, "--override data-order"});
    agree([](TrainOptions&) {}, {"data-order"});
    agree([](TrainOptions&) {}, {"data-path"});
    saved.layout["precision"] = "fp4";
    expect_error([&] { check_agreement(saved, o, saved.data, "", {}); }, {"fp4", "--override precision"});
}

TEST(Agreement, TheFirstDifferingFieldOfTheModelIsNamed) {
    const ModelConfig c = tiny("llama");
    ModelConfig other = c;
    EXPECT_EQ(config_difference(c, other), "");
    other.C = 32;
    EXPECT_NE(config_difference(c, other).find("'hidden_size' is 16 in the checkpoint and 32"), std::string::npos);
    EXPECT_NE(config_difference(c, tiny("gpt2")), "");
}

TEST(When, DurationsAndIntervals) {
    const std::pair<const char*, double> good[] = {{"90", 90},      {"90s", 90},    {"30m", 1800},
                                                   {"1h30m", 5400}, {"2d", 172800}, {"0.5h", 1800}};
    for (const auto& [text, seconds] : good) EXPECT_DOUBLE_EQ(parse_duration(text), seconds) << text;
    for (const char* bad : {"", "x", "5x", "m", "-5m", "nan", "inf", "1h-3m", "1h30", "1m5", "0h30"})
        EXPECT_TRUE(std::isnan(parse_duration(bad))) << bad;
    EXPECT_EQ(parse_save_interval("500").steps, 500);
    EXPECT_EQ(parse_save_interval("500").seconds, 0);
    EXPECT_EQ(parse_save_interval("30m").seconds, 1800);
    EXPECT_EQ(parse_save_interval("5min").seconds, 300);
    EXPECT_EQ(parse_save_interval("1h30m").seconds, 5400);
    EXPECT_EQ(parse_save_interval("10k").steps, 10000);
    EXPECT_EQ(parse_save_interval("1,000").steps, 1000);
    EXPECT_EQ(parse_save_interval("0").steps, 0);
    for (const char* bad : {"", "often", "-5", "0s", "5 steps"})
        expect_error([&] { parse_save_interval(bad); }, {"--save-every"});
}

TEST(State, ComesBack) {
    const TemporaryDirectory dir;
    make_directory(dir / "training");
    TrainingState s;
    s.step = 7;
    s.updates = 6;
    s.consumed = 1ll << 40;
    s.planned = 1ll << 41;
    s.discarded = 3;
    s.discarded_samples = 48;
    s.planned = 1ll << 41;
    s.scheduled = 5;
    s.tokens = 123;
    s.loss = 0.1;
    s.options = {{"lr", 0.1}};
    s.data = nlohmann::ordered_json::array();
    s.layout = {{"dp", 1}};
    write_file(state_file(dir / ""), to_json(s).dump());
    const TrainingState t = read_state(dir / "");
    EXPECT_EQ(to_json(s), to_json(t));
    EXPECT_TRUE(std::isnan(t.valid_loss));
    // Counters out of range, and impossible relations.
    for (const auto& [name, value] : std::vector<std::pair<const char*, nlohmann::json>>{{"step", -1},
                                                                                         {"step", 1e300},
                                                                                         {"step", 7.5},
                                                                                         {"step", UINT64_MAX},
                                                                                         {"step", 1ll << 60},
                                                                                         {"updates", 8},
                                                                                         {"updates", "6"},
                                                                                         {"consumed_samples", 4},
                                                                                         {"consumed_samples", -4},
                                                                                         {"scheduled_samples", -1},
                                                                                         {"tokens", 1e19},
                                                                                         {"fp8_start", -2},
                                                                                         {"discarded_batches", -3},
                                                                                         {"discarded_batches", 1ll << 61}}) {
        auto damaged = to_json(s);
        damaged[name] = value;
        write_file(state_file(dir / ""), damaged.dump());
        expect_error([&] { read_state(dir / ""); }, {"state.json is damaged", "whole number"});
    }
    // A state of earlier versions: 100 steps of 8 samples of 16 tokens, with 5 dropped and 3 skipped batches.
    TrainingState old = s;
    old.step = 103;
    old.discarded = 5;
    old.consumed = 108 * 8;
    old.tokens = 100 * 8 * 16;
    old.options["seq-length"] = 16;
    old.skips.add(3, 5);
    nlohmann::ordered_json j = to_json(old);
    j.erase("discarded_samples");
    j.erase("planned_samples");
    j["options"].update({{"micro-batch-size", 2},
                         {"global-batch-size", 8},
                         {"rampup-batch-size", Strings()},
                         {"train-iters", 300},
                         {"train-samples", 0}});
    write_file(state_file(dir / ""), j.dump());
    const TrainingState parted = read_state(dir / "");
    EXPECT_EQ(parted.consumed, 103 * 8);
    EXPECT_EQ(parted.discarded_samples, 5 * 8);
    EXPECT_EQ(parted.planned, 300 * 8);
    EXPECT_EQ(parted.batch(), 109);
    EXPECT_EQ(parted.sample(), old.consumed);
    for (const auto& [part, value] :
         std::vector<std::pair<const char*, nlohmann::json>>{{"layout", {{"matrix_unit", {7}}}},
                                                             {"layout", {{"precision", 16}}},
                                                             {"layout", {{"dp", "1"}}},
                                                             {"options", {{"global-batch-size", "8"}}}}) {
        auto damaged = to_json(s);
        damaged[part].update(value);
        write_file(state_file(dir / ""), damaged.dump());
        expect_error([&] { read_state(dir / ""); }, {"state.json is damaged"});
    }
    write_file(state_file(dir / ""), "{\"format\": 1}");
    expect_error([&] { read_state(dir / ""); }, {"state.json is damaged"});
    write_file(state_file(dir / ""), "{\"format\": 2}");
    expect_error([&] { read_state(dir / ""); }, {"format 2"});
    std::filesystem::remove(state_file(dir / ""));
    expect_error([&] { read_state(dir / ""); }, {"no training state", "--model"});
}

}  // namespace test_checkpoint
