// The command line: values, lists, aliases, configuration files, and error messages.
#include <gtest/gtest.h>

#include <sstream>

#include "../llmc/options/cli.h"
#include "../llmc/checkpoint/hub.h"
#include "../llmc/plan/planner.h"
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
    refused({"--no-window-size"}, {"--no-window-size", "an earlier --window-size", "HINT"});
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
    refused({"--out", "--quiet"}, {"--out has no value; HINT: --out DIR; a value that starts", "--out='--quiet'"});
    refused({"--lr-decay-style"}, {"--lr-decay-style has no value; HINT: --lr-decay-style NAME, one of ", "cosine"});
    refused({"--config"}, {"--config has no value; HINT: --config FILE.toml"});
    EXPECT_EQ(parsed({"--out=--quiet"}).out, "--quiet");
    refused({"--out="}, {"--out is ''"});
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
        {"--dtype", "PRECISION=bf16"},
        {"--wandb-run-name", "report.html"},
        {"--block_size", "--seq-length"},
        {"--n_embd", "--hidden-size"},
        {"--output-dir", "--out"},
        {"--train.max_steps", "--train-iters"},
        {"--train.global_batch_size", "--global-batch-size"},
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
            const auto add_options_of = [&](const std::string& command) {
                for (const cli::OptionRow& row : cli::options_of(command)) {
                    known.push_back("--" + row.name);
                    known.push_back("--" + row.alias);
                }
            };
            const auto exists = [&](const std::string& name) {
                return std::find(known.begin(), known.end(), name) != known.end();
            };
            add_options_of(c.name);
            std::stringstream advice(o.here), names(o.names);
            for (std::string name; names >> name;) EXPECT_FALSE(exists("--" + name)) << c.name << ": " << name;
            if (strstr(o.here, "train_gpt generate ")) add_options_of("generate");
            for (std::string word; advice >> word;) {
                while (!word.empty() && strchr(":,;)", word.back())) word.pop_back();
                if (word[0] == '(') word.erase(0, 1);
                EXPECT_TRUE(word.compare(0, 2, "--") != 0 || exists(word)) << c.name << ": " << word;
            }
        }
}

// What `arguments` of a command are answered with.
template <class Options>
std::string answer_of(const std::string& command, const std::vector<std::string>& arguments) {
    Options o;
    try {
        cli::parse(command, o, arguments);
    } catch (const UsageError& e) {
        return e.what();
    }
    return "accepted";
}

TEST(Cli, NamesOfOtherProgramsLeadToOursInAllCommands) {
    const auto expect = [](const std::string& text, const std::string& ours) {
        EXPECT_NE(text.find(ours), std::string::npos) << text;
    };
    expect(answer_of<GenerateOptions>("generate", {"-m", "run", "-p", "Hello"}), "--model");  // llama.cpp
    expect(answer_of<GenerateOptions>("generate", {"-m", "run", "-p", "Hello"}), "--prompt");
    expect(answer_of<GenerateOptions>("generate", {"-ngl", "99"}), "nothing to choose");
    expect(answer_of<GenerateOptions>("generate", {"--checkpoint_dir", "run"}), "--model");  // litgpt
    expect(answer_of<GenerateOptions>("generate", {"--start", "Hello"}), "--prompt");        // nanoGPT
    expect(answer_of<ServeOptions>("serve", {"--max-model-len", "512"}), "--seq-length");    // vLLM
    expect(answer_of<ServeOptions>("serve", {"--tensor-parallel-size", "2"}), "one process");
    expect(answer_of<EvalOptions>("eval", {"--model_args", "pretrained=run"}), "--tasks");    // lm-eval
    expect(answer_of<TokenizerOptions>("tokenizer", {"--model_prefix", "tok"}), "--output");  // SentencePiece
    expect(answer_of<TokenizerOptions>("tokenizer", {"--model", "unigram"}), "--type");
    expect(answer_of<GenerateOptions>("generate", {"--n", "3"}), "--num-samples");     // vLLM
    expect(answer_of<GenerateOptions>("generate", {"-n", "64"}), "--max-new-tokens");  // llama.cpp
    expect(answer_of<ExportOptions>("export", {"--outfile", "x.gguf"}), "--gguf");     // llama.cpp
    expect(answer_of<PrepareOptions>("prepare", {"--num-proc", "8"}), "--workers");
    expect(answer_of<CurateOptions>("curate", {"--minhash"}), "--near-duplicates");
    expect(answer_of<ServeOptions>("serve", {"--tls-cert", "x"}), "put a proxy before it");
    expect(answer_of<GenerateOptions>("generate", {"--tensor-split", "1"}), "nothing to choose");
    expect(answer_of<EvalOptions>("eval", {"--hf-model", "run", "--perplexity", "x.txt"}), "--text");
    expect(answer_of<EvalOptions>("eval", {"--stride", "8"}), "follow each other");
    expect(answer_of<ExportOptions>("export", {"--format", "gguf"}), "--gguf FILE.gguf");
    expect(answer_of<SweepOptions>("sweep", {"--search", "lr=1e-4..1e-2"}), "--over");
    expect(answer({"--lora-r", "8"}), "--lora-rank");
    expect(answer({"--n_gpu", "8"}), "mpirun");             // Hugging Face's Trainer
    expect(answer({"--tokens", "5B"}), "--train-samples");  // torchtitan
    expect(answer({"--early_stopping_patience", "3"}), "--keep");
    expect(answer_of<GenerateOptions>("generate", {"--tokenizer", "t"}), "in the directory of --model");
    expect(answer_of<GenerateOptions>("generate", {"--output", "a.txt"}), "> FILE");
    expect(answer({"--target-modules", "q_proj"}), "--lora-targets");
}

TEST(Cli, WordsWithoutAnOptionAreExplained) {
    const auto expect = [](const std::string& text, const std::string& meant) {
        EXPECT_NE(text.find(meant), std::string::npos) << text;
    };
    expect(answer_of<GenerateOptions>("generate", {"run1", "Hello"}), "did you mean --model run1 --prompt Hello?");
    expect(answer_of<GenerateOptions>("generate", {"run1", "Hello you"}), "did you mean --model run1 --prompt \"Hello you\"?");
    expect(answer_of<ServeOptions>("serve", {"run1"}), "did you mean --model run1?");
    expect(answer_of<EvalOptions>("eval", {"run1", "book.txt"}), "did you mean --model run1 --text book.txt?");
    expect(answer_of<PrepareOptions>("prepare", {"a.txt", "b.txt", "--tokenizer", "t"}), "did you mean --input a.txt b.txt?");
    expect(answer_of<ImportOptions>("import", {"m.gguf", "dir"}), "did you mean --gguf m.gguf --out dir?");
    expect(answer_of<GenerateOptions>("generate", {"--model", "run1", "Hello", "you"}), "did you mean --prompt \"Hello you\"?");
    expect(answer_of<EvalOptions>("eval", {"--model", "run1", "book.txt"}), "did you mean --text book.txt?");
    expect(answer_of<ServeOptions>("serve", {"--model", "run1", "run2"}), "--model was already given a value");
    expect(answer({"run.toml"}), "did you mean --config run.toml?");
    expect(answer({"gpt2-124m"}), "did you mean --preset gpt2-124m?");
    expect(answer({"--lr", "1e-3", "data/web.bin"}), "did you mean --data-path data/web?");
    expect(answer({"stray"}), "'stray' belongs to no option");
    expect(answer({"--seed", "1", "\u2014lr", "3"}), "HINT: options start with two hyphens: --lr");
    expect(answer({"\u2013-lr", "3"}), "HINT: options start with two hyphens: --lr");
    expect(answer({"lr=3"}), "HINT: --lr=3");
    expect(answer({"train_iters=3"}), "HINT: --train_iters=3");
    expect(answer_of<ExportOptions>("export", {"run1", "dir"}), "did you mean --model run1 --out dir?");
    expect(answer({"--lr", "1e-3", "2e-3"}), "'2e-3' belongs to no option: --lr was already given a value");
    expect(answer({"--lr", "1e-3", "--no-lr", "2e-3"}), "'2e-3' belongs to no option: --no-lr takes no value");
}

TEST(Cli, AllMistakesAreReportedAtOnce) {
    const test::TemporaryDirectory dir;
    test::write_file(dir / "run.toml", "lr = 1\nnum-layer = 3\nseq-length = many\nlr-decay-style = \"cosin\"\n");
    refused({"--config", dir / "run.toml", "--learning-rate", "1e-3", "--num-layers", "0", "stray", "--seed"},
            {"7 mistakes", "run.toml:2: 'num-layer' is not an option of train; did you mean --num-layers?",
             "run.toml:3: --seq-length is 'many'", "run.toml:4: --lr-decay-style is 'cosin'", "did you mean cosine?",
             "the learning rate is --lr", "--num-layers is '0'", "'stray' belongs to no option", "--seed has no value"});
    EXPECT_EQ(answer({"--num-layers", "0"}), "--num-layers is '0'; it must be a whole number from 1 to 10000");
    refused({"--config", dir / "."}, {"--config is " + (dir / ".") + ", a folder; it must be a file"});
    test::write_file(dir / "run.yaml", "lr: 1\n");
    refused({"--config", dir / "run.yaml"}, {"run.yaml:1 has no value", "HINT: a file of options is TOML"});
    test::write_file(dir / "twice.toml", "lr = 1\nswiglu = true\nlr = 2\nno-swiglu = true\nrepeated = 1\nrepeated = 1\n");
    refused({"--config", dir / "twice.toml"}, {"twice.toml:3: lr has a value already, in " + (dir / "twice.toml:1"),
                                               "twice.toml:4: no-swiglu has", "twice.toml:6: repeated has"});
    test::write_file(dir / "good.toml", "lr = 1\n");
    refused({"--config", dir / "goo.toml"}, {"goo.toml", "did you mean " + (dir / "good.toml") + "?"});
    testing::internal::CaptureStdout();
    TrainOptions o;
    EXPECT_FALSE(cli::parse("train", o, {"--learning-rate", "1e-3", "--help"})) << "help in spite of mistakes";
    testing::internal::GetCapturedStdout();
}

TEST(Cli, NumbersAndChoicesAsPeopleTypeThem) {
    for (const char* ten : {"10k", "10K", "10_000", "10,000", "1e4", "0.01M"})
        EXPECT_EQ(parsed({"--train-iters", ten}).train_iters, 10000);
    EXPECT_EQ(parsed({"--train-samples", "1,234,567"}).train_samples, 1234567);
    EXPECT_EQ(parsed({"--train-samples", "2b"}).train_samples, 2000000000);
    for (const char* bad :
         {"1,5", "1,00", "10,00", ",100", "1,,000", "1_", "_1", "1,000,00", "10kk", "k", "1,0000", "1000,000"})
        refused({"--train-iters", bad}, {std::string("'") + bad + "'", "whole number"});
    for (const char* comma : {"0,001", "1,500"}) refused({"--lr", comma}, {"'" + std::string(comma) + "'", "a number"});
    refused({"--train-iters", "0,001"}, {"'0,001'"});
    EXPECT_EQ(parse_duration("5min"), 300);
    EXPECT_EQ(parse_duration("2 Hours 30 minutes"), 9000);
    EXPECT_EQ(parse_duration("1.5h"), 5400);
    for (const char* bad : {"5 fortnights", "5min30x", "min", "1 2h"}) EXPECT_TRUE(std::isnan(parse_duration(bad))) << bad;
    EXPECT_EQ(parsed({"--device", "H100"}).device, "h100");
    for (const char* same : {"RTX 4090", "rtx4090", "RTX_4090", "rtx-4090"})
        EXPECT_EQ(parsed({"--device", same}).device, "rtx-4090");
    refused({"--device", "4090"}, {"'4090'", "did you mean rtx-4090?"});
    refused({"--device", "cuda"}, {"'cuda'", "HINT: it names the GPU of a plan"});
    refused({"--device", "A100-80GB"}, {"HINT: the A100 with 80 GB is a100"});
    refused({"--zero", "4"}, {"from 0 to 3; HINT: ", "--zero 3", "is the last stage"});
    refused({"--eval-interval", "0"}, {"HINT: --eval-iters 0"});
    for (const cli::OptionRow& row : cli::options_of("train"))
        for (const std::string& device : row.name == "device" ? row.allowed.choices : Strings()) {
            const Device d = find_device(device);
            EXPECT_TRUE(d.tflops >= 50 && d.memory_gib >= 20 && d.memory_gbs >= 300 && d.watts >= 50) << device;
        }
    EXPECT_EQ(parsed({"--lr-decay-style", "wsd"}).lr_decay_style, "WSD");
    EXPECT_EQ(parsed({"--lr-decay-style", "Inverse_Square_Root"}).lr_decay_style, "inverse-square-root");
    EXPECT_FALSE(parsed({"--swiglu=False"}).swiglu);
    ExportOptions e;
    EXPECT_TRUE(cli::parse("export", e, {"--type", "Q8_0"}));
    EXPECT_EQ(e.type, "q8_0");
}

TEST(Cli, PathsMayBeginWithAHomeDirectory) {
    const test::TemporaryDirectory dir;
    const std::string before = getenv("HOME") ? getenv("HOME") : "";
    setenv("HOME", "/home/me", 1);
    const TrainOptions o =
        parsed({"--out=~/run", "--data-path", "0.5", "~/a", "0.5", "~", "--sample-prompt", "~/x", "--resume", "~/r"});
    EXPECT_EQ(o.out, "/home/me/run");
    EXPECT_EQ(o.data_path, (Strings{"0.5", "/home/me/a", "0.5", "/home/me"}));
    EXPECT_EQ(o.resume, "/home/me/r");
    EXPECT_EQ(o.sample_prompt, "~/x") << "is no path";
    test::write_file(dir / "run.toml", "out = \"~/b\"\neval-tasks = ['~/t.jsonl']\n");
    EXPECT_EQ(parsed({"--config", dir / "run.toml"}).out, "/home/me/b");
    EXPECT_EQ(parsed({"--config", dir / "run.toml"}).eval_tasks[0], "/home/me/t.jsonl");
    CurateOptions c;
    EXPECT_TRUE(cli::parse("curate", c, {"--train-language", "en:~/en.txt", "~/all", "--input", "~/*.txt"}));
    EXPECT_EQ(c.train_language, (Strings{"en:/home/me/en.txt", "/home/me/all"}));
    EXPECT_EQ(c.input[0], "/home/me/*.txt");
    EXPECT_EQ(expand_home("~nobody_of_this_name/x"), "~nobody_of_this_name/x");
    EXPECT_EQ(expand_home("~root/x"), "/root/x");
    EXPECT_EQ(expand_home("a~/x"), "a~/x");
    // Every option whose help speaks of a directory or a file has a value that is known as a path.
    for (const cli::Command& command : cli::commands())
        for (const cli::OptionRow& row : cli::options_of(command.name)) {
            const bool speaks = row.help.find("directory") != std::string::npos || row.help.find(" file") != std::string::npos;
            if (row.flag || !speaks || !row.allowed.choices.empty() || row.metavar == "TEXT" || row.metavar == "N") continue;
            if (row.name == "max-bad-lines" || row.name == "name" || row.name == "chat-template" || row.name == "encoding" ||
                row.name == "served-model-name" || row.name == "lora-targets" || row.name == "rope-scaling-set" ||
                row.name == "languages")
                continue;  // no path
            EXPECT_EQ(cli::path_value(row, row.metavar == "LABEL:FILE ..." ? "a:~/x" : "~/x").find('~'), std::string::npos)
                << command.name << " --" << row.name << " " << row.metavar;
        }
    setenv("HOME", before.c_str(), 1);
}

// A missing path leads to the nearest existing one; only ORG/NAME is a model to download.
TEST(Cli, MissingPathsLeadToTheNearestName) {
    const test::TemporaryDirectory dir;
    make_directory(dir / "runs");
    make_directory(dir / "runs/first");
    test::write_file(dir / "runs/first/config.json", "{}");
    EXPECT_EQ(similar_path(dir / "runs/frist"), dir / "runs/first");
    EXPECT_EQ(similar_path(dir / "rns/first/config.json"), dir / "runs/first/config.json");
    EXPECT_EQ(similar_path(dir / "rns/second"), "");
    EXPECT_EQ(similar_path(dir / "runs/first"), "") << "it exists";
    EXPECT_EQ(similar_path(dir / "runs/first/config.json/x"), "") << "a file has no folder";
    EXPECT_EQ(hint_on_missing_path(dir / "runs/frist"), "; did you mean " + (dir / "runs/first") + "?");
    EXPECT_EQ(hint_on_missing_path("some-org/some-model"), "; HINT: hf download some-org/some-model");
    for (const char* path : {"some-model", "some-org/x/y", "./some-org/x", "some-org/data.jsonl", "tmp_of_nobody", "some-org/"})
        EXPECT_EQ(hint_on_missing_path(path), "") << path;
    test::expect_error([&] { read_whole_file(dir / "runs/first/confg.json"); },
                       {"cannot open", "did you mean", "config.json?"});
}

TEST(Cli, ValuesOfConfigurationFilesThatOthersReplaceAreKept) {
    const test::TemporaryDirectory dir;
    test::write_file(dir / "recipe.toml", "num-layers = 4\nlr = 0.1\nswiglu = true\nseed = 1\ntrain-samples = 5\n");
    test::write_file(dir / "tuned.toml", "num-layers = 8\nlr = 0.1\n");
    const TrainOptions o = parsed({"--seed", "2", "--config", dir / "recipe.toml", "--config", dir / "tuned.toml",
                                   "--no-swiglu", "--no-train-samples", "--hidden-size", "3", "--hidden-size", "4"});
    EXPECT_EQ(o.num_layers, 8);
    Strings texts;
    for (const Replaced& r : o.replaced) texts.push_back(r.option + " " + r.text());
    const std::string recipe = dir / "recipe.toml";
    EXPECT_EQ(texts, (Strings{"num-layers 8, instead of 4 in " + recipe + ":1; from " + (dir / "tuned.toml") + ":1",
                              "seed 2, instead of 1 in " + recipe + ":4", "swiglu false, instead of true in " + recipe + ":3",
                              "train-samples the default, instead of 5 in " + recipe + ":5"}));
}

TEST(Cli, AJobLineOfMegatronIsTaken) {
    const TrainOptions o = parsed({"--tensor-model-parallel-size",
                                   "2",
                                   "--num-layers",
                                   "24",
                                   "--hidden-size",
                                   "1024",
                                   "--num-attention-heads",
                                   "16",
                                   "--bf16",
                                   "--use-flash-attn",
                                   "--use-mcore-models",
                                   "--transformer-impl",
                                   "transformer_engine",
                                   "--num-workers",
                                   "4",
                                   "--tokenizer-type",
                                   "Llama2Tokenizer",
                                   "--tokenizer-model",
                                   "~/tok",
                                   "--save",
                                   "ckpt",
                                   "--load",
                                   "ckpt",
                                   "--save-interval",
                                   "500",
                                   "--exit-duration-in-mins",
                                   "230",
                                   "--use-distributed-optimizer",
                                   "--overlap-grad-reduce",
                                   "--sequence-parallel",
                                   "--recompute-granularity",
                                   "full",
                                   "--recompute-method",
                                   "uniform",
                                   "--recompute-num-layers",
                                   "1",
                                   "--data-impl",
                                   "mmap",
                                   "--distributed-timeout-minutes",
                                   "30",
                                   "--context-parallel-size",
                                   "1",
                                   "--layernorm-epsilon",
                                   "1e-6",
                                   "--log-throughput"});
    EXPECT_EQ(o.out, "ckpt");
    EXPECT_EQ(o.resume, "auto") << "as --load where --save writes";
    EXPECT_EQ(o.save_every, "500");
    EXPECT_EQ(o.exit_after, "230m");
    EXPECT_EQ(o.distributed_timeout, "30m");
    EXPECT_EQ(o.norm_epsilon, 1e-6);
    EXPECT_EQ(o.tokenizer, expand_home("~/tok"));
    EXPECT_EQ(o.recompute_num_layers, 0) << "uniform recomputes all";
    EXPECT_FALSE(o.no_sequence_parallel);
    std::string notes;
    for (const std::string& note : o.notes) notes += note + "\n";
    for (const char* part :
         {"--bf16 has no effect: ", "--save is --out", "--transformer-impl has no effect", "uniform recomputes all"})
        EXPECT_NE(notes.find(part), std::string::npos) << notes;
    EXPECT_EQ(parsed({"--load", "other", "--out", "here"}).resume, "other");
    EXPECT_EQ(parsed({"--recompute-method", "block", "--recompute-num-layers", "3"}).recompute_num_layers, 3);
    EXPECT_EQ(parsed({"--context-parallel-size", "2"}).context_parallel_size, 2);
    EXPECT_NE(answer({"--recompute-method", "other"}).find("uniform, block"), std::string::npos);
    EXPECT_NE(answer({"--fp16"}).find("there is no fp16"), std::string::npos) << "it would change the result";
    // Names here exist, and none of the names taken is one of ours.
    for (const cli::MegatronName& row : cli::megatron_names)
        for (const cli::Command& c : cli::commands()) {
            if (!cli::is_listed(row.commands, c.name)) continue;
            const auto rows = cli::options_of(c.name);
            const auto exists = [&](const std::string& name) {
                return std::any_of(rows.begin(), rows.end(),
                                   [&](const cli::OptionRow& r) { return r.name == name || r.alias == name; });
            };
            const std::string here = row.here;
            EXPECT_TRUE(here.empty() || exists(here.substr(0, here.find('=')))) << c.name << ": " << here;
            std::stringstream names(row.names);
            for (std::string name; names >> name;) EXPECT_FALSE(exists(name)) << c.name << ": " << name;
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
            return text.find("\n  " + cli::label_of(row) + " ") != std::string::npos ||
                   text.find("\n  " + cli::label_of(row) + "\n") != std::string::npos;
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
    EXPECT_EQ(row_of("tune", "head-rows"), "number of rows (tokens) of logits in memory at once; default: searched");
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
