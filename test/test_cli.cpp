// The command line: values, lists, aliases, configuration files, and what a refusal says.
#include <gtest/gtest.h>

#include "../llmc/cli.h"
#include "files.h"

namespace {

TrainOptions parsed(const std::vector<std::string>& arguments) {
    TrainOptions o;
    EXPECT_TRUE(cli::parse("train", "Trains.", o, arguments));
    return o;
}
void refused(const std::vector<std::string>& arguments, const std::vector<std::string>& parts) {
    TrainOptions o;
    test::expect_error([&] { cli::parse("train", "Trains.", o, arguments); }, parts);
}

TEST(Cli, Values) {
    const TrainOptions o =
        parsed({"--num-layers", "3", "--lr=1e-3", "--train-samples", "2M", "--swiglu", "--data-path", "0.5", "a", "0.5", "b",
                "--rampup-batch-size", "8", "4", "100", "--norm-epsilon", "1e-6", "--lr-decay-style", "linear"});
    EXPECT_EQ(o.num_layers, 3);
    EXPECT_DOUBLE_EQ(o.lr, 1e-3);
    EXPECT_EQ(o.train_samples, 2000000);
    EXPECT_TRUE(o.swiglu);
    EXPECT_EQ(o.data_path, (Strings{"0.5", "a", "0.5", "b"}));
    EXPECT_EQ(o.rampup_batch_size, (Strings{"8", "4", "100"}));
    EXPECT_EQ(o.norm_epsilon, 1e-6);
    EXPECT_EQ(o.lr_decay_style, "linear");
    EXPECT_FALSE(o.rotary_base.has_value());
}

TEST(Cli, AliasesAreTheSameOption) {
    const TrainOptions o = parsed(
        {"--seq", "64", "--micro-batch", "2", "--steps", "5", "--kv-heads", "2", "--recompute", "full", "--z-loss", "1e-4"});
    EXPECT_EQ(o.seq_length, 64);
    EXPECT_EQ(o.micro_batch_size, 2);
    EXPECT_EQ(o.train_iters, 5);
    EXPECT_EQ(o.num_query_groups, 2);
    EXPECT_EQ(o.recompute_granularity, "full");
    EXPECT_DOUBLE_EQ(o.z_loss_strength, 1e-4);
}

TEST(Cli, BracketsCommasAndBracesAreOfTheValue) {
    const Strings odd = {"[MASK]", "[a,b]", "{}", "c,d", "[]", "%%", "<|end|>"};
    std::vector<std::string> arguments = {"--data-path"};
    arguments.insert(arguments.end(), odd.begin(), odd.end());
    EXPECT_EQ(parsed(arguments).data_path, odd);
    for (const std::string& value : odd) {
        EXPECT_EQ(parsed({"--data-path", value}).data_path, Strings{value});
        EXPECT_EQ(parsed({"--data-path=" + value}).data_path, Strings{value});
        EXPECT_EQ(parsed({"--sample-prompt", value}).sample_prompt, value);
        EXPECT_EQ(parsed({"--sample-prompt=" + value}).sample_prompt, value);
    }
    const test::TemporaryDirectory dir;
    test::write_file(dir / "run.toml",
                     "data-path = [\"[MASK]\", \"a,b\"]\nsample-prompt = \"[a, b]\"\nsplit = \"90, 10, 0\"\n");
    const TrainOptions o = parsed({"--config", dir / "run.toml"});
    EXPECT_EQ(o.data_path, (Strings{"[MASK]", "a,b"}));
    EXPECT_EQ(o.sample_prompt, "[a, b]");
    EXPECT_EQ(o.split, "90, 10, 0");
}

TEST(Cli, ALaterValueWins) { EXPECT_EQ(parsed({"--num-layers", "3", "--num-layers", "4"}).num_layers, 4); }

TEST(Cli, ConfigurationFileAndCommandLine) {
    const test::TemporaryDirectory dir;
    test::write_file(
        dir / "run.toml",
        "# a run\nnum-layers = 5\nlr = 0.01\nswiglu = true\ndata-path = [\"a\", \"b\"]\nlr-decay-style = \"linear\"\n");
    const TrainOptions o = parsed({"--config", dir / "run.toml", "--num-layers", "7"});
    EXPECT_EQ(o.num_layers, 7) << "the command line wins";
    EXPECT_DOUBLE_EQ(o.lr, 0.01);
    EXPECT_TRUE(o.swiglu);
    EXPECT_EQ(o.data_path, (Strings{"a", "b"}));
    EXPECT_EQ(o.lr_decay_style, "linear");
    test::write_file(dir / "bad.toml", "num-layer = 5\n");
    refused({"--config", dir / "bad.toml"}, {"num-layer", "did you mean num-layers"});
    refused({"--config", dir / "none.toml"}, {"none.toml"});
}

TEST(Cli, RefusalsNameTheValueAndWhatIsAllowed) {
    refused({"--micro-batch-sise", "2"}, {"--micro-batch-sise", "did you mean --micro-batch-size", "--help"});
    refused({"--num-layers", "12x"}, {"'12x'", "a whole number from 1 to 10000"});
    refused({"--num-layers", "1.5"}, {"'1.5'", "whole"});
    refused({"--num-layers", "0"}, {"'0'", "from 1"});
    refused({"--num-layers", "nan"}, {"'nan'"});
    refused({"--lr", "inf"}, {"'inf'", "above 0"});
    refused({"--lr", "0"}, {"'0'", "above 0"});
    refused({"--lr", "1e-3,"}, {"'1e-3,'"});
    refused({"--train-samples", "1e30"}, {"1e30"});
    refused({"--seed", "-1"}, {"'-1'", "at least 0"});
    refused({"--hidden-dropout", "0.1"}, {"'0.1'", "only 0"});
    refused({"--lr-decay-style", "cosinus"}, {"'cosinus'", "cosine", "WSD"});
    refused({"--num-layers"}, {"num-layers"});
    refused({"--rampup-batch-size", "1", "2"}, {"rampup-batch-size"});
    refused({"stray"}, {"stray"});
}

TEST(Cli, EveryOptionIsInTheHelpAndInTheLog) {
    TrainOptions o;
    const auto json = options_to_json(o);
    testing::internal::CaptureStdout();
    EXPECT_FALSE(cli::parse("train", "Trains.", o, {"--help"}));
    const std::string help = testing::internal::GetCapturedStdout();
    for_each_option(o, [&](const char* field, const char*, auto&, const Allowed&, const char*, const char*) {
        EXPECT_NE(help.find("--" + option_name(field)), std::string::npos) << field;
        EXPECT_TRUE(json.contains(option_name(field))) << field;
    });
}

}  // namespace
