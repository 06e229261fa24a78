// --size: models, batches, rates and lengths derived from a number of parameters.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "../llmc/options/cli.h"
#include "../llmc/plan/planner.h"
#include "../llmc/options/schedule.h"
#include "../llmc/options/size_rule.h"
#include "files.h"

namespace test_size_rule {

// The model of these options, as set by configure_model (from_options.h).
ModelConfig model_of(const TrainOptions& o) {
    ModelConfig c = family_of_size(o.size);
    c.L = o.num_layers;
    c.C = o.hidden_size;
    c.NH = o.num_attention_heads;
    c.NKV = o.num_query_groups;
    c.F = o.ffn_hidden_size ? o.ffn_hidden_size : (8 * c.C / 3 + 63) / 64 * 64;
    c.T = o.seq_length;
    c.V = o.vocab_size;
    if (o.untie_embeddings_and_output_weights) c.tied = false;
    check_config(c);
    return c;
}
// The options of a command line after --size has filled in unset ones.
TrainOptions sized(const Strings& arguments, int replicas = 1, std::vector<DerivedRow>* rows = nullptr) {
    TrainOptions o;
    EXPECT_TRUE(cli::parse("train", o, arguments));
    const auto derived = apply_size(o, replicas, model_of);
    if (rows) *rows = derived;
    return o;
}
double parameters_of(const TrainOptions& o) { return (double)ParameterTable(model_of(o)).trained; }

TEST(SizeRule, EachSizeIsReachedAndLargerOnesAreLarger) {
    TrainOptions last;
    double last_parameters = 0;
    for (const double size :
         {1e6, 3e6, 7e6, 15e6, 30e6, 60e6, 124e6, 350e6, 760e6, 1.3e9, 2.7e9, 7e9, 13e9, 34e9, 70e9, 172e9}) {
        for (const char* vocabulary : {"4096", "32000", "99574"}) {
            if (size < 300 * atof(vocabulary)) continue;
            const std::string text = format("%.0f", size);
            SCOPED_TRACE("--size " + text + " --vocab-size " + vocabulary);
            const TrainOptions o = sized({"--size", text, "--vocab-size", vocabulary});
            EXPECT_NEAR(parameters_of(o) / size, 1, 0.1);
            EXPECT_EQ(o.hidden_size % o.num_attention_heads, 0);
            EXPECT_EQ(o.hidden_size / o.num_attention_heads % 32, 0);
            EXPECT_EQ(o.num_attention_heads % o.num_query_groups, 0);
            EXPECT_EQ(o.hidden_size % 64, 0);
            EXPECT_EQ(o.global_batch_size % o.micro_batch_size, 0);
            EXPECT_LE(o.micro_batch_size * o.seq_length, 8192);
            EXPECT_GE(o.hidden_size / o.num_layers, 8);
            EXPECT_LE(o.hidden_size / o.num_layers, 160);
            // 20 tokens per parameter, except for rounding to whole steps
            EXPECT_NEAR((double)o.train_iters * o.global_batch_size * o.seq_length / (20 * parameters_of(o)), 1, 0.01);
            // The two papers, which tuned independently, agree at 20 tokens per parameter: Step Law's runs used 0.1.
            EXPECT_GT(o.weight_decay, 0.04);
            EXPECT_LT(o.weight_decay, size < 60e6 ? 0.8 : 0.2);
            EXPECT_LT(o.lr_warmup_iters, o.train_iters / 5);
            make_schedule(o, 1);
            if (std::string("4096") != vocabulary) continue;
            if (last_parameters > 0) {
                EXPECT_GT(parameters_of(o), last_parameters);
                EXPECT_GE(o.hidden_size, last.hidden_size);
                EXPECT_GE(o.num_layers, last.num_layers - 1);
                EXPECT_GE((double)o.global_batch_size * o.seq_length, (double)last.global_batch_size * last.seq_length);
                EXPECT_LE(o.lr, last.lr);
            }
            last = o;
            last_parameters = parameters_of(o);
        }
    }
}

// 1B parameters without embeddings and 100B tokens, Step Law's own example: 0.58 (1e11)^0.571 = 1.1M tokens, and 1.79
// (1e9)^-0.713 (1e11)^0.307 = 1.64e-3.
TEST(SizeRule, LawsByHand) {
    EXPECT_NEAR(detail::tokens_of_step(1e11), 1.1077e6, 100);
    const TrainOptions o = sized({"--size", "1.1b", "--vocab-size", "32000", "--train-samples", "48828125"});
    const ModelConfig c = model_of(o);
    const double N = parameters_of(o) - (double)c.V * c.C, B = (double)o.global_batch_size * 2048;
    EXPECT_EQ(o.global_batch_size, 512);  // of 2048 tokens: 1,048,576, near 1.1M
    EXPECT_NEAR(o.lr, 1.79 * std::pow(N, -0.713) * std::pow(1e11, 0.307) * std::sqrt(B / 1.1077e6), 0.01 * o.lr);
    EXPECT_NEAR(o.lr, 1.6e-3, 1e-4);
    EXPECT_EQ(o.min_lr, 1e-5);
}

TEST(SizeRule, WhatIsGivenWinsAndTheRestFollows) {
    const TrainOptions plain = sized({"--size", "15m", "--vocab-size", "4096"});
    struct Case {
        Strings arguments;
        std::function<bool(const TrainOptions&)> holds;
    };
    const Case cases[] = {
        {{"--num-layers", "4"}, [&](auto& o) { return o.num_layers == 4 && o.hidden_size > plain.hidden_size; }},
        {{"--hidden-size", "512"}, [&](auto& o) { return o.hidden_size == 512 && o.num_layers < plain.num_layers; }},
        {{"--num-attention-heads", "4"}, [](auto& o) { return o.num_attention_heads == 4; }},
        {{"--num-query-groups", "1"}, [](auto& o) { return o.num_query_groups == 1; }},
        {{"--seq-length", "128"}, [](auto& o) { return o.seq_length == 128; }},
        {{"--ffn-hidden-size", "640"}, [](auto& o) { return o.ffn_hidden_size == 640; }},
        {{"--micro-batch-size", "4"}, [&](auto& o) { return o.micro_batch_size == 4 && o.lr == plain.lr; }},  // the default
        {{"--global-batch-size", "6"}, [&](auto& o) { return o.global_batch_size == 6 && o.lr < plain.lr; }},
        {{"--train-iters", "300"}, [](auto& o) { return o.train_iters == 300 && o.lr_warmup_iters == 30; }},
        {{"--train-samples", "9k"}, [](auto& o) { return o.train_samples == 9000 && o.train_iters == 0; }},
        {{"--lr", "3e-4"}, [&](auto& o) { return o.lr == 3e-4 && o.weight_decay > plain.weight_decay; }},  // the default
        {{"--min-lr", "0"}, [](auto& o) { return o.min_lr == 0; }},
        {{"--weight-decay", "0.1"}, [](auto& o) { return o.weight_decay == 0.1; }},
        {{"--lr-warmup-iters", "7"}, [](auto& o) { return o.lr_warmup_iters == 7; }},
        {{"--lr-warmup-fraction", "0.02"}, [](auto& o) { return o.lr_warmup_iters == 0; }},
        {{"--untie-embeddings-and-output-weights"}, [&](auto& o) { return !model_of(o).tied; }},
    };
    for (const Case& c : cases) {
        Strings arguments = {"--size", "15m", "--vocab-size", "4096"};
        arguments.insert(arguments.end(), c.arguments.begin(), c.arguments.end());
        std::vector<DerivedRow> rows;
        const TrainOptions o = sized(arguments, 1, &rows);
        EXPECT_TRUE(c.holds(o)) << c.arguments[0];
        EXPECT_NEAR(parameters_of(o) / 15e6, 1, 0.15) << c.arguments[0];
        make_schedule(o, 1);
        EXPECT_EQ(rows.size(), 11u);
    }
    // The user sets both sizes: no other size is refused.
    EXPECT_EQ(sized({"--size", "15m", "--vocab-size", "4096", "--num-layers", "2", "--hidden-size", "128"}).hidden_size, 128);
    // Any layout gets a batch that it can divide, the same one if it is divisible.
    for (const int replicas : {1, 2, 3, 8, 12}) {
        const TrainOptions o = sized({"--size", "15m", "--vocab-size", "4096"}, replicas);
        EXPECT_EQ(o.global_batch_size % (o.micro_batch_size * replicas), 0) << replicas;
        if (replicas % 3) {
            EXPECT_EQ(o.global_batch_size, plain.global_batch_size);
        }
        make_schedule(o, replicas);
    }
    const TrainOptions interleaved = sized({"--size", "60m", "--vocab-size", "4096", "--pp", "4", "--vpp", "2"}, 2);
    make_schedule(interleaved, 2);
}

TEST(SizeRule, Refusals) {
    const auto refused = [](const Strings& arguments, const Strings& parts) {
        test::expect_error([&] { sized(arguments); }, parts);
    };
    refused({"--size", "15m", "--preset", "quickstart"}, {"--size 15m and --preset quickstart", "omit one"});
    refused({"--size", "15m", "--model", "some"}, {"--size 15m and --model some", "omit one"});
    for (const char* wrong : {"", "m", "15x", "-3m", "0", "nan", "15mm", "1e20"})
        refused({std::string("--size=") + wrong, "--vocab-size", "4096"}, {"--size is '" + std::string(wrong) + "'", "15m"});
    refused({"--size", "1m", "--vocab-size", "50257"}, {"nearest model has 3.27M", "embeddings", "--size 3265"});
    refused({"--size", "15m", "--vocab-size", "4096", "--num-attention-heads", "7000"}, {"no width up to 65536", "7000"});
}

}  // namespace test_size_rule
