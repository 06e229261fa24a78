// The command line: values, lists, aliases, configuration files, and error messages.
#include <gtest/gtest.h>

#include <sstream>

#include "../llmc/run/cli.h"
#include "files.h"

namespace test_cli {

TrainOptions parsed(const std::vector<std::string>& arguments) {
    TrainOptions o;
    EXPECT_TRUE(cli::parse("train", o, arguments));
    return o;
}
void refused(const std::vector<std::string>& arguments, const std::vector<std::string>& parts) {
    TrainOptions o;
    test::expect_error([&] { cli::parse("train", o, arguments); }, parts);
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

TEST(Cli, ALaterValueWinsAndNoTakesItBack) {
    EXPECT_EQ(parsed({"--num-layers", "3", "--num-layers", "4"}).num_layers, 4);
    const std::vector<std::string> ramp = {"--rampup-batch-size", "1", "2", "3", "--data", "a", "b", "--swiglu", "--lr", "1"};
    const auto then = [&](const std::vector<std::string>& more) {
        std::vector<std::string> all = ramp;
        all.insert(all.end(), more.begin(), more.end());
        return parsed(all);
    };
    EXPECT_EQ(then({"--rampup-batch-size", "4", "5", "6"}).rampup_batch_size, (Strings{"4", "5", "6"}));
    EXPECT_EQ(then({"--data-path", "c"}).data_path, Strings{"c"});
    EXPECT_TRUE(then({"--no-rampup-batch-size"}).rampup_batch_size.empty());
    EXPECT_EQ(then({"--no-rampup-batch-size", "--rampup-batch-size", "7", "8", "9"}).rampup_batch_size,
              (Strings{"7", "8", "9"}));
    EXPECT_TRUE(then({"--no-data"}).data_path.empty());
    EXPECT_FALSE(then({"--no-swiglu"}).swiglu);
    EXPECT_FALSE(then({"--swiglu=false"}).swiglu);
    EXPECT_DOUBLE_EQ(then({"--no-lr"}).lr, TrainOptions().lr);
    refused({"--no-window-size"}, {"--no-window-size", "no earlier --window-size", "HINT"});
    EXPECT_FALSE(parsed({"--no-overlap", "--overlap"}).no_overlap) << "the flag's own name begins with no-";
    EXPECT_TRUE(parsed({"--overlap", "--no-overlap"}).no_overlap);
    EXPECT_EQ(parsed({"--micro_batch_size", "3"}).micro_batch_size, 3);

    const test::TemporaryDirectory dir;
    test::write_file(dir / "a.toml", "rampup-batch-size = [1, 2, 3]\ntrain-samples = 5 # a comment\nno-overlap = true\n");
    test::write_file(dir / "b.toml",
                     "train_samples = 6\ndata-path = [\n  \"x, y\",  # two lines\n  'z'\n]\nno-overlap = false\n");
    const std::vector<std::string> both = {"--config", dir / "a.toml", "--config=" + (dir / "b.toml")};
    EXPECT_EQ(parsed(both).train_samples, 6);
    EXPECT_EQ(parsed(both).data_path, (Strings{"x, y", "z"}));
    EXPECT_FALSE(parsed(both).no_overlap);
    EXPECT_EQ(parsed(both).rampup_batch_size, (Strings{"1", "2", "3"}));
    EXPECT_TRUE(parsed({"--no-rampup-batch-size", "--config", dir / "a.toml"}).rampup_batch_size.empty())
        << "the command line wins wherever it stands";
    EXPECT_EQ(parsed({"--rampup-batch-size", "4", "5", "6", "--config", dir / "a.toml"}).rampup_batch_size[0], "4");
}

TEST(Cli, ConfigurationFilesThatAreWrong) {
    const test::TemporaryDirectory dir;
    const auto wrong = [&](const std::string& text, const std::vector<std::string>& parts) {
        test::write_file(dir / "bad.toml", text);
        refused({"--config", dir / "bad.toml"}, parts);
    };
    wrong("lr = 1\nlr\n", {"bad.toml:2", "no value"});
    wrong("lr =\n", {"bad.toml:1", "no value"});
    wrong("out = \"a\n", {"bad.toml:1", "closing quote"});
    wrong("data-path = [\"a\"\n", {"closing bracket"});
    wrong("data-path = [\"a\" \"b\"]\n", {"commas"});
    wrong("out = \"a\" b\n", {"bad.toml:1", "text after its value"});
    wrong("[train]\n", {"bad.toml:1", "no value"});
    wrong("lr = [1, 2]\n", {"--lr", "1 value"});
    wrong("swiglu = maybe\n", {"--swiglu", "true or false"});
    wrong("learning_rate = 1\n", {"bad.toml:1", "--lr"});
}

TEST(Cli, ConfigurationFileAndCommandLine) {
    const test::TemporaryDirectory dir;
    const std::string mark = "\xef\xbb\xbf";  // as written by editors on Windows
    test::write_file(
        dir / "run.toml",
        mark + "# a run\nnum-layers = 5\nlr = 0.01\nswiglu = true\ndata-path = [\"a\", \"b\"]\nlr-decay-style = \"linear\"\n");
    const TrainOptions o = parsed({"--config", dir / "run.toml", "--num-layers", "7"});
    EXPECT_EQ(o.num_layers, 7) << "the command line wins";
    EXPECT_DOUBLE_EQ(o.lr, 0.01);
    EXPECT_TRUE(o.swiglu);
    EXPECT_EQ(o.data_path, (Strings{"a", "b"}));
    EXPECT_EQ(o.lr_decay_style, "linear");
    test::write_file(dir / "bad.toml", "num-layer = 5\n");
    refused({"--config", dir / "bad.toml"}, {"bad.toml:1", "num-layer", "did you mean --num-layers?"});
    refused({"--config", dir / "none.toml"}, {"none.toml"});
}

// Kernels compute in fp32, where 1e300 is infinite and 1e-300 is 0: no accepted number is either, nor is its inverse.
template <class Options>
void expect_bounds_within_fp32() {
    Options o;
    for_each_option(o, [&](const Option& option, auto& value) {
        using T = std::decay_t<decltype(value)>;
        const Allowed& a = option.allowed;
        if constexpr (std::is_same_v<T, double> || std::is_same_v<T, OptionalDouble>) {
            EXPECT_TRUE(a.low >= 0 && a.low <= a.high && a.high <= 1e30) << option.field << ": " << a.low << " to " << a.high;
            EXPECT_TRUE(a.low == 0 || a.low >= 1e-30) << option.field << ": " << a.low;
        }
    });
}
TEST(Cli, NumbersHaveBoundsWithinFp32) {
    expect_bounds_within_fp32<TuneOptions>();
    expect_bounds_within_fp32<SweepOptions>();
    expect_bounds_within_fp32<PrepareOptions>();
    expect_bounds_within_fp32<CurateOptions>();
    expect_bounds_within_fp32<TokenizerOptions>();
    expect_bounds_within_fp32<GenerateOptions>();
    expect_bounds_within_fp32<ServeOptions>();
    expect_bounds_within_fp32<EvalOptions>();
}

TEST(Cli, RefusalsNameTheValueAndWhatIsAllowed) {
    refused({"--micro-batch-sise", "2"}, {"--micro-batch-sise", "did you mean --micro-batch-size", "--help"});
    refused({"--num-layers", "12x"}, {"'12x'", "a whole number from 1 to 10000"});
    refused({"--num-layers", "1.5"}, {"'1.5'", "whole"});
    refused({"--num-layers", "0"}, {"'0'", "from 1"});
    refused({"--num-layers", "nan"}, {"'nan'"});
    refused({"--lr", "inf"}, {"'inf'", "from 1e-20 to 10"});
    refused({"--lr", "0"}, {"'0'", "a number from 1e-20 to 10"});
    refused({"--final-logit-softcapping", "1e-300"}, {"'1e-300'", "0 or a number from 0.01 to 1000000"});
    EXPECT_EQ(parsed({"--final-logit-softcapping", "0"}).final_logit_softcapping, 0.0);
    refused({"--lr", "1e-3,"}, {"'1e-3,'"});
    refused({"--train-samples", "1e30"}, {"1e30"});
    refused({"--seed", "-1"}, {"'-1'", "from 0 to 9000000000000000"});
    refused({"--hidden-dropout", "1"}, {"'1'", "0.99"});
    refused({"--lr-decay-style", "cosinus"}, {"'cosinus'", "cosine", "WSD"});
    refused({"--num-layers"}, {"num-layers", "no value"});
    refused({"--out", "--quiet"}, {"--out has no value", "--out='--quiet'"});
    EXPECT_EQ(parsed({"--out=--quiet"}).out, "--quiet");
    EXPECT_EQ(parsed({"--out="}).out, "");
    EXPECT_EQ(parsed({"--sample-prompt", "-- he said"}).sample_prompt, "-- he said");
    refused({"--quiet", "true"}, {"'true'"});
    refused({"--train-iters", "100000000000000000000"}, {"from 1 to 9000000000000000"});
    refused({"--train-iters", "1e400"}, {"from 1 to 9000000000000000"});
    refused({"--no-such-thing"}, {"--no-such-thing"});
    refused({"-lr", "1"}, {"'-lr'"});
    refused({"--rampup-batch-size", "1", "2"}, {"rampup-batch-size", "3 values, not 2", "START INCREMENT SAMPLES"});
    refused({"stray"}, {"stray"});
}

// train's answer to these arguments.
std::string answer(const std::vector<std::string>& arguments) {
    try {
        parsed(arguments);
    } catch (const UsageError& e) {
        return e.what();
    }
    return "accepted";
}

TEST(Cli, NamesOfOtherProgramsLeadToOurs) {
    const std::pair<const char*, const char*> pairs[] = {
        {"--learning-rate", "--lr"},
        {"--learning_rate=1e-3", "--lr"},
        {"--batch-size", "--micro-batch-size"},
        {"--per_device_train_batch_size", "--micro-batch-size"},
        {"--gradient-accumulation-steps", "--global-batch-size"},
        {"--epochs", "--train-iters"},
        {"--max-steps", "--train-iters"},
        {"--fp16", "PRECISION=fp32"},
        {"--bf16", "PRECISION=bf16"},
        {"--wandb-project", "report.html"},
        {"--block_size", "--seq-length"},
        {"--n_embd", "--hidden-size"},
        {"--save", "--out"},
        {"-b", "--micro-batch-size"},
        {"-l", "--lr"},
        {"--sequence-parallell", "did you mean"},
    };
    for (const auto& [given, ours] : pairs)
        EXPECT_NE(answer({given, "1"}).find(ours), std::string::npos) << answer({given, "1"});
    // Our option named in each hint exists; no foreign name is one of ours.
    for (const cli::OtherName& o : cli::other_names)
        for (const cli::Command& c : cli::commands()) {
            if ((" " + std::string(o.commands) + " ").find(" " + std::string(c.name) + " ") == std::string::npos) continue;
            Strings known = {"--version"};
            for (const cli::OptionRow& row : cli::options_of(c.name)) {
                known.push_back("--" + row.name);
                known.push_back("--" + row.alias);
            }
            const auto exists = [&](const std::string& name) {
                return std::find(known.begin(), known.end(), name) != known.end();
            };
            std::stringstream advice(o.here), names(o.names);
            for (std::string word; advice >> word;) {
                while (!word.empty() && strchr(":,;)", word.back())) word.pop_back();
                if (word[0] == '(') word.erase(0, 1);
                EXPECT_TRUE(word.compare(0, 2, "--") != 0 || exists(word)) << c.name << ": " << word;
            }
            for (std::string name; names >> name;) EXPECT_FALSE(exists("--" + name)) << c.name << ": " << name;
        }
}

TEST(Cli, SuggestionsAreNeverSilly) {
    const auto suggested = [](const std::string& option) {
        const std::string text = answer({option});
        const size_t at = text.find("did you mean ");
        return at == std::string::npos ? "" : text.substr(at + 13, text.find('?', at) - at - 13);
    };
    EXPECT_EQ(suggested("--micro-batch-sise"), "--micro-batch-size");
    EXPECT_EQ(suggested("--mircobatch-size"), "--micro-batch-size");
    EXPECT_EQ(suggested("--sead"), "--seed");
    EXPECT_EQ(suggested("--lr-warmup"), "--lr-warmup-iters, --lr-warmup-samples, --lr-warmup-fraction or --lr-warmup-init");
    EXPECT_EQ(suggested("--virtual"), "--num-virtual-stages-per-pipeline-rank");
    for (const char* nonsense : {"--foo", "--q", "--zzzzzzzzzzzz", "--banana", "--attention-heads-up-display"})
        EXPECT_EQ(suggested(nonsense), "") << nonsense;
    EXPECT_EQ(similar_names("trian", {"train", "eval"}), Strings{"train"});
    EXPECT_EQ(similar_names("gpt2-125m", {"gpt2-124m", "gpt2-350m"}), Strings{"gpt2-124m"});
}

TEST(Cli, HelpIsNoWiderThanTheTerminal) {
    for (const int width : {60, 80, 120})
        for (const cli::Command& c : cli::commands()) {
            std::stringstream help(cli::help_of(c, true, width));
            for (std::string line; std::getline(help, line);) EXPECT_LE(display_width(line), std::max(width, 80)) << line;
        }
    std::stringstream overview(cli::help_overview(80));
    for (std::string line; std::getline(overview, line);) EXPECT_LE(display_width(line), 80) << line;
}

TEST(Cli, HelpShowsTheUsualOptionsAndHelpAllTheRest) {
    const auto help = [](const char* option) {
        testing::internal::CaptureStdout();
        TrainOptions o;
        EXPECT_FALSE(cli::parse("train", o, {option}));
        return testing::internal::GetCapturedStdout();
    };
    const std::string usual = help("--help"), all = help("--help-all");
    const auto rows = cli::options_of("train");
    const auto shown = [&](const std::string& text) {
        return std::count_if(rows.begin(), rows.end(), [&](const cli::OptionRow& row) {
            return text.find("  " + cli::label_of(row) + " ") != std::string::npos ||
                   text.find("  " + cli::label_of(row) + "\n") != std::string::npos;
        });
    };
    EXPECT_EQ(shown(all), (int)rows.size());
    const auto& everyday = everyday_options();  // some exist only in tune
    const auto of_train = std::count_if(rows.begin(), rows.end(), [&](const cli::OptionRow& row) {
        return std::find(everyday.begin(), everyday.end(), row.name) != everyday.end();
    });
    EXPECT_EQ(shown(usual), of_train + 3) << "and --config, --help, --help-all";
    EXPECT_GE(shown(usual), 30);
    EXPECT_LE(shown(usual), 45);
    const auto row_of = [](const char* command, const char* name) {
        for (const cli::OptionRow& row : cli::options_of(command))
            if (row.name == name) return cli::text_of(row);
        return std::string("none");
    };
    for (const char* name : {"resume", "world", "time-budget"}) EXPECT_EQ(row_of("sweep", name), "none") << "sweep refuses it";
    EXPECT_EQ(row_of("tune", "resume"), "none");
    EXPECT_EQ(row_of("tune", "head-rows"), "rows (tokens) whose logits are in memory at a time; default: searched");
    // Self-contained sentences: each row says more than its name, and its default only once.
    for (const cli::Command& c : cli::commands())
        for (const cli::OptionRow& row : cli::options_of(c.name)) {
            EXPECT_GE(row.help.size(), 9u) << row.name;
            EXPECT_NE(row.help.find("the same, "), 0u) << row.name;
            EXPECT_EQ(row.help.find(" so many"), std::string::npos) << row.name;
            const std::string text = cli::text_of(row);
            EXPECT_EQ(text.find("default:"), text.rfind("default:")) << c.name << ": " << text;
        }
}

TEST(Cli, EveryOptionIsInTheLog) {
    TrainOptions o;
    const auto json = options_to_json(o);
    for_each_option(
        o, [&](const Option& option, auto&) { EXPECT_TRUE(json.contains(option_name(option.field))) << option.field; });
}

}  // namespace test_cli
