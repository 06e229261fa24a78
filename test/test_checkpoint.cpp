// Checkpoints: the checksum, the manifest, sharded tensors, which checkpoint is found, which are kept, what a resumed run must
// agree with, and when to save.
#include <gtest/gtest.h>

#include "../llmc/training_state.h"
#include "files.h"
#include "model_files.h"
#include "testing.h"

namespace {

using test::expect_error;
using test::read_file;
using test::TemporaryDirectory;
using test::write_file;

// RFC 3720 B.4 and the customary check value.
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

ModelConfig tiny(const std::string& family) {
    ModelConfig c;
    set_family(c, family);
    c.L = 2, c.C = 16, c.NH = c.NKV = 2, c.F = 64, c.T = 8, c.V = 21;
    pad_vocabulary(c, 8);
    return c;
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

// A weight without a place here means that the model is another one; masks and copies of a tied head are no weights.
TEST(Tensors, UnknownOnesAreRefusedByName) {
    const ModelConfig c = tiny("gpt2");
    const ParameterTable table(c);
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
    for (const char* name : {"transformer.h.0.attn.bias", "h.1.attn.masked_bias", "lm_head.weight"}) with(name);
    for (const char* name : {"transformer.h.0.attn.q_proj.bias", "score.weight"})
        expect_error([&] { with(name); }, {name, "no place"});
}

TEST(Checkpoints, TheLatestIntactIsResumedAndDamageReported) {
    const TemporaryDirectory out;
    EXPECT_EQ(checkpoint_to_resume(out / "", [](const std::string&) {}), "");
    for (int64_t step : {5, 100, 20})
        publish_directory(step_directory(out / "", step),
                          [](const std::string& temporary) { write_file(temporary + "/a", "abc"); });
    std::filesystem::create_directory(out / "step_00000007.bak"), std::filesystem::create_directory(out / "step_");
    EXPECT_EQ(find_checkpoints(out / ""), (std::vector<int64_t>{100, 20, 5}));
    std::vector<std::string> reports;
    const auto report = [&](const std::string& problem) { reports.push_back(problem); };
    EXPECT_EQ(checkpoint_to_resume(out / "", report), step_directory(out / "", 100));
    EXPECT_TRUE(reports.empty());
    write_file(step_directory(out / "", 100) + "/a", "abd");
    EXPECT_EQ(checkpoint_to_resume(out / "", report), step_directory(out / "", 20));
    ASSERT_EQ(reports.size(), 1u);
    EXPECT_NE(reports[0].find("step_00000100/a"), std::string::npos);
    // One that was gone back to comes before those after it; if it is damaged, those before it do.
    write_file(step_directory(out / "", 100) + "/a", "abc");
    make_latest(out / "", step_directory(out / "", 20));
    EXPECT_EQ(checkpoint_to_resume(out / "", report), step_directory(out / "", 20));
    make_latest(out / "", out / "latest");
    EXPECT_EQ(std::filesystem::read_symlink(out / "latest"), "step_00000020");
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
    for (int64_t step = 10; step <= 80; step += 10) std::filesystem::create_directory(step_directory(out / "", step));
    prune(out / "", 80, 0, 0);
    EXPECT_EQ(find_checkpoints(out / "").size(), 8u);
    prune(out / "", 80, 2, 30);
    EXPECT_EQ(find_checkpoints(out / ""), (std::vector<int64_t>{80, 70, 60, 30}));
    // Checkpoints after the one just written, of another course of the run, do not push it out.
    prune(out / "", 60, 1, 0);
    EXPECT_EQ(find_checkpoints(out / ""), (std::vector<int64_t>{80, 70, 60}));
    prune(out / "", 80, 1, 0);
    EXPECT_EQ(find_checkpoints(out / ""), (std::vector<int64_t>{80}));
}

TEST(Checkpoints, ASecondRunInTheSameDirectoryIsRefused) {
    const TemporaryDirectory dir;
    const RunLock first(dir / "out");
    expect_error([&] { RunLock second(dir / "out"); }, {"another run", std::to_string(getpid())});
    const RunLock other(dir / "other");
}

TEST(Agreement, OptionsThatChangeTheRunAreInsistedOn) {
    TrainOptions o;
    o.lr = 1e-3, o.train_iters = 100;
    TrainingState saved;
    saved.options = options_to_json(o), saved.data = {{{"documents", 3}, {"tokens", 50}}},
    saved.layout = {{"precision", precision_name}};
    const auto agree = [&](const std::function<void(TrainOptions&)>& change, const Strings& overrides = {}) {
        TrainOptions now = o;
        change(now);
        check_agreement(saved, now, saved.data, overrides);
    };
    agree([](TrainOptions&) {});
    agree([](TrainOptions& n) {
        n.out = "elsewhere", n.threads = 7, n.micro_batch_size = 1, n.log_interval = 9, n.save_every = "5",
        n.data_path = {"moved"};
    });
    expect_error([&] { agree([](TrainOptions& n) { n.lr = 2e-3; }); }, {"--lr", "0.002", "0.001", "--override lr"});
    agree([](TrainOptions& n) { n.lr = 2e-3; }, {"lr"});
    expect_error([&] { agree([](TrainOptions& n) { n.train_iters = 200; }); }, {"--override train-iters"});
    expect_error([&] { agree([](TrainOptions& n) { n.seed = 9; }); }, {"--seed"});
    expect_error([&] { agree([](TrainOptions& n) { n.global_batch_size = 9; }, {"lr"}); }, {"--global-batch-size"});
    expect_error([&] { agree([](TrainOptions&) {}, {"threads"}); }, {"'threads'"});
    expect_error(
        [&] {
            check_agreement(saved, o, {{{"documents", 4}, {"tokens", 50}}}, {});
        },
        {"documents", "--override data-path"});
    saved.layout["precision"] = "fp4";
    expect_error([&] { check_agreement(saved, o, saved.data, {}); }, {"fp4", "--override precision"});
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
    const std::pair<const char*, double> good[] = {{"90", 90},     {"90s", 90},    {"30m", 1800}, {"1h30m", 5400},
                                                   {"2d", 172800}, {"0.5h", 1800}, {"1m5", 65}};
    for (const auto& [text, seconds] : good) EXPECT_DOUBLE_EQ(parse_duration(text), seconds) << text;
    for (const char* bad : {"", "x", "5x", "m", "-5m", "nan", "inf", "1h-3m"})
        EXPECT_TRUE(std::isnan(parse_duration(bad))) << bad;
    EXPECT_EQ(parse_save_interval("500").steps, 500);
    EXPECT_EQ(parse_save_interval("500").seconds, 0);
    EXPECT_EQ(parse_save_interval("30m").seconds, 1800);
    EXPECT_EQ(parse_save_interval("0").steps, 0);
    for (const char* bad : {"", "often", "-5", "0s", "5 steps"})
        expect_error([&] { parse_save_interval(bad); }, {"--save-every"});
}

TEST(State, ComesBack) {
    const TemporaryDirectory dir;
    make_directory(dir / "training");
    TrainingState s;
    s.step = 7, s.updates = 6, s.consumed = 1ll << 40, s.scheduled = 5, s.tokens = 123, s.loss = 0.1, s.options = {{"lr", 0.1}};
    s.data = nlohmann::ordered_json::array(), s.layout = {{"dp", 1}};
    write_file(state_file(dir / ""), to_json(s).dump());
    const TrainingState t = read_state(dir / "");
    EXPECT_EQ(to_json(s), to_json(t));
    EXPECT_TRUE(std::isnan(t.valid_loss));
    write_file(state_file(dir / ""), "{\"format\": 1}");
    expect_error([&] { read_state(dir / ""); }, {"state.json is damaged"});
    write_file(state_file(dir / ""), "{\"format\": 2}");
    expect_error([&] { read_state(dir / ""); }, {"format 2"});
    std::filesystem::remove(state_file(dir / ""));
    expect_error([&] { read_state(dir / ""); }, {"no training state", "--model"});
}

}  // namespace
