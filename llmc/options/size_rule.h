// `--size 15m`: one number that sets the model, the batch, the learning rate, the weight decay, the warm-up and the length of a
// run. A given option takes precedence, and others are derived from it. With P parameters in total, N without embeddings, D
// tokens of training, B tokens in a step:
//   layers            sqrt(width) / 2, from width 4096 on width / 128: the ladder of LLM-jp v3, 512 x 12 to 5120 x 40.
//                     Candidates have a whole number of layers within 5% of the size; the one nearest this rule is chosen
//   heads             of 32 up to width 256, of 64 below 2048, then of 128
//   key/value heads   1, 2, 4 or 8: the most that leave 3 query heads or more to each (Ainslie et al., 2023; Llama 3: 8)
//   head              tied to the token embedding below 4B parameters (as Llama 3.2, Qwen2.5, SmolLM2)
//   length            D = 20 P (Hoffmann et al., 2022, "Chinchilla")
//   batch             B = 0.58 D^0.571 (Li et al., 2025, "Step Law", arXiv:2503.04715), to the nearest power of two in samples
//   learning rate     1.79 N^-0.713 D^0.307 to 1e-5, cosine (the same), times sqrt(B / the law's) for another batch
//                     (Malladi et al., 2022); at most 3e-3, the law's for its smallest model
//   weight decay      B / (lr D tau) with tau = 1.084 (D / P)^-0.527, the time scale of AdamW's average as a fraction of the
//                     run (Bergsma et al., 2025, "Power Lines", arXiv:2505.13738); near 0.1 if no options are given
//   warm-up           a tenth of the run, at most 2000 steps
// The laws were measured from 60M to 1B parameters (Step Law) and 111M to 3.3B (Power Lines); llmc/OPTIONS.md describes how
// they fit below.
#pragma once
#include <algorithm>
#include <cmath>
#include <functional>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "../base/check.h"
#include "../base/numbers.h"
#include "../base/text.h"
#include "../model/families.h"
#include "../model/model_config.h"
#include "../model/parameters.h"
#include "options.h"

// 15000000 for "15m", "15M" and "0.015B".
inline double parse_size(const std::string& text) {
    const double size = typed_count(text);
    refuse_value(!(size >= 1 && size <= 1e13), "--size", text, "a number of parameters, as in 15m, 350M or 1.5b");
    return size;
}

// The model before its sizes are set.
inline ModelConfig family_of_size(const std::string& size) {
    ModelConfig c;
    set_family(c, "llama");
    c.tied = parse_size(size) < 4e9;
    return c;
}

// A row of the table at the start of a run.
struct DerivedRow {
    std::string label, text;
    nlohmann::ordered_json value;
};

namespace detail {

inline bool is_given(const TrainOptions& o, std::initializer_list<const char*> names) {
    return std::any_of(names.begin(), names.end(), [&](const char* name) { return o.given.count(name) > 0; });
}

inline int heads_of(const TrainOptions& o, int width) {
    const int size = width <= 256 ? 32 : width < 2048 ? 64 : 128;
    return o.num_attention_heads ? o.num_attention_heads : std::max(1, width / size);
}
inline int key_value_heads(int heads) {
    int best = 1;
    for (const int n : {2, 4, 8})
        if (heads % n == 0 && heads / n >= 3) best = n;
    return best;
}

// The model for `options`.
using Configure = std::function<ModelConfig(const TrainOptions& options)>;

// Sets layers, width and heads unless given. Returns the parameters of the model.
inline double choose_shape(TrainOptions& o, double size, const Configure& configure) {
    struct Shape {
        int layers, width, heads, groups;
        double parameters, distance;  // distance: from the rule of layers and width
        double miss(double asked) const { return std::abs(parameters / asked - 1); }
    };
    const auto shape_of_width = [&](int width) {
        TrainOptions p = o;
        Shape s = {1, width, heads_of(o, width), o.num_query_groups, 0, 0};
        if (!s.groups) s.groups = key_value_heads(s.heads);
        p.hidden_size = width;
        p.num_attention_heads = s.heads;
        p.num_query_groups = s.groups;
        const auto parameters = [&](int layers) {
            p.num_layers = layers;
            return (double)ParameterTable(configure(p)).trained;
        };
        const double one = parameters(1), layer = parameters(2) - one;
        s.layers = o.num_layers ? o.num_layers : (int)std::clamp(std::round((size - one) / layer) + 1, 1.0, 10000.0);
        s.parameters = one + (s.layers - 1) * layer;
        s.distance = std::abs(std::log(s.layers / std::max(std::sqrt((double)width) / 2, width / 128.0)));
        return s;
    };
    Shape best{};
    if (o.hidden_size) best = shape_of_width(o.hidden_size);
    for (int width = 64; !o.hidden_size && width <= 65536; width += width < 256 ? 64 : width < 2048 ? 128 : 256) {
        const int heads = heads_of(o, width), groups = std::max(1, o.num_query_groups);
        if (width % (2 * heads) || width / heads > 256 || heads % groups) continue;
        const Shape s = shape_of_width(width);
        const bool near = s.miss(size) <= 0.05, best_is_near = best.width && best.miss(size) <= 0.05;
        if (!best.width ||
            (near ? !best_is_near || s.distance < best.distance : !best_is_near && s.miss(size) < best.miss(size)))
            best = s;
        if (s.parameters > 1.5 * size) break;
    }
    if (!best.width)
        fail_usage("--size %s: no width up to 65536 suits --num-attention-heads %d and --num-query-groups %d (0: not given)",
                   o.size.c_str(), o.num_attention_heads, o.num_query_groups);
    const bool shape_given = o.hidden_size || o.num_layers || o.ffn_hidden_size || o.num_attention_heads || o.num_query_groups;
    if (!shape_given && best.miss(size) > 0.1)
        fail_usage("--size %s: the nearest model has %s parameters%s; HINT: --size %.0f", o.size.c_str(),
                   human_count(best.parameters).c_str(),
                   best.parameters > size ? ", most of them in its embeddings, which fewer tokens make smaller" : "",
                   best.parameters);
    o.num_layers = best.layers;
    o.hidden_size = best.width;
    o.num_attention_heads = best.heads;
    o.num_query_groups = best.groups;
    return best.parameters;
}

// The best number of tokens per step for a run of D tokens (Step Law).
inline double tokens_of_step(double D) { return 0.58 * std::pow(D, 0.571); }

// Sets micro-batch and global batch unless given; `tokens`: per step, by the rule.
inline void choose_batch(TrainOptions& o, double tokens, int replicas) {
    const int interleaved = o.num_virtual_stages_per_pipeline_rank > 1 ? o.pipeline_model_parallel_size : 1;
    const bool micro_given = is_given(o, {"micro-batch-size"}), given = o.global_batch_size > 0;
    const int64_t unit = (int64_t)replicas * interleaved * (micro_given ? o.micro_batch_size : 1);
    const double samples = std::max(1.0, std::exp2(std::round(std::log2(tokens / o.seq_length))));
    if (!given) o.global_batch_size = (int)(std::max<int64_t>(1, std::llround(samples / (double)unit)) * unit);
    if (micro_given) return;
    o.micro_batch_size = 1;
    while (2 * o.micro_batch_size * o.seq_length <= 8192 && o.global_batch_size % (2 * o.micro_batch_size * unit) == 0)
        o.micro_batch_size *= 2;
}

}  // namespace detail

// Sets all options derived from --size that are not given; `replicas`: data-parallel ranks. Returns the settings, with reasons.
inline std::vector<DerivedRow> apply_size(TrainOptions& o, int replicas, const detail::Configure& configure) {
    refuse_together(!o.preset.empty(), "--size " + o.size, "--preset " + o.preset, "both name a model");
    refuse_together(!o.model.empty(), "--size " + o.size, "--model " + o.model, "both name a model");
    refuse_together(o.num_experts, "--size " + o.size, "--num-experts", "its rules are for dense models",
                    "--preset, or --num-layers and --hidden-size");
    const auto given = [&](std::initializer_list<const char*> names) { return detail::is_given(o, names); };
    const auto rounded = [](double x) { return std::stod(format("%.3g", x)); };
    std::vector<DerivedRow> rows;
    const auto row = [&](const char* label, const nlohmann::ordered_json& value, const std::string& text, bool is_given,
                         const std::string& why) {
        rows.push_back({label, text + (is_given ? ", given" : ": " + why), value});
    };

    const double size = parse_size(o.size);
    if (!o.seq_length)
        o.seq_length = o.max_position_embeddings ? o.max_position_embeddings : size < 1e8 ? 512 : size < 3e9 ? 2048 : 4096;
    row("sequence", o.seq_length, counted(o.seq_length, "token"), given({"seq-length", "max-position-embeddings"}),
        "512 below 100M parameters, 2048 below 3B, then 4096");
    const double P = detail::choose_shape(o, size, configure);
    const ModelConfig c = configure(o);
    const double N = P - (double)c.V * c.C * (c.tied ? 1 : 2);  // without embeddings
    row("layers x width", {o.num_layers, o.hidden_size}, format("%d x %d", o.num_layers, o.hidden_size),
        given({"num-layers"}) && given({"hidden-size"}),
        format("%s parameters, layers near sqrt(width) / 2", human_count(P).c_str()));
    row("heads", o.num_attention_heads, format("%d of %d", o.num_attention_heads, c.HS()), given({"num-attention-heads"}),
        "of 32 up to width 256, of 64 below 2048, then of 128");
    row("key/value heads", o.num_query_groups, std::to_string(o.num_query_groups), given({"num-query-groups"}),
        "the most of 1, 2, 4, 8 with 3 query heads or more to each");
    row("feed-forward", c.F, std::to_string(c.F), given({"ffn-hidden-size"}), "8/3 of the width");

    const int T = o.seq_length;
    const bool length_given = o.train_iters || o.train_samples;
    double D = o.train_samples ? (double)o.train_samples * T : 20 * P;
    detail::choose_batch(o, detail::tokens_of_step(D), replicas);
    const double B = (double)o.global_batch_size * T;
    if (o.train_iters) D = (double)o.train_iters * B;
    else if (!length_given && o.rampup_batch_size.empty()) o.train_iters = std::max<int64_t>(1, std::llround(D / B));
    else if (!length_given) o.train_samples = std::max<int64_t>(1, std::llround(D / T));
    const double best_B = detail::tokens_of_step(D), steps = std::max(1.0, D / B);
    row("length", D, format("%s tokens, %.1f per parameter", human_count(D).c_str(), D / P), length_given, "20 (Chinchilla)");
    row("global batch", o.global_batch_size, format("%s tokens", with_commas((int64_t)B).c_str()), given({"global-batch-size"}),
        format("a power of two of samples near 0.58 tokens^0.571 = %s (Step Law)", with_commas((int64_t)best_B).c_str()));
    row("micro-batch", o.micro_batch_size, counted(o.micro_batch_size, "sample"), given({"micro-batch-size"}),
        "a power of two, 8192 tokens at most, that divides the batch");

    constexpr double most_lr = 3e-3;
    if (!given({"lr"}))
        o.lr = rounded(std::min(most_lr, 1.79 * std::pow(N, -0.713) * std::pow(D, 0.307) * std::sqrt(B / best_B)));
    if (!given({"min-lr"})) o.min_lr = std::min(1e-5, o.lr);
    row("learning rate", {o.lr, o.min_lr}, format("%g to %g", o.lr, o.min_lr), given({"lr"}),
        format("1.79 N^-0.713 tokens^0.307 of N = %s without embeddings (Step Law)%s%s", human_count(N).c_str(),
               std::abs(std::log(B / best_B)) > 0.01 ? format(", times sqrt(%.3g) for the batch", B / best_B).c_str() : "",
               o.lr == most_lr ? ", at most 0.003" : ""));
    const bool warmup_given = given({"lr-warmup-iters", "lr-warmup-samples", "lr-warmup-fraction"});
    if (!warmup_given) o.lr_warmup_iters = (int64_t)std::min(2000.0, steps / 10);
    row("warm-up", o.lr_warmup_iters, warmup_given ? "its length" : counted(o.lr_warmup_iters, "step"), warmup_given,
        "a tenth of the run, at most 2000 steps");
    const double tau = 1.084 * std::pow(D / P, -0.527);
    const bool decay_given = given({"weight-decay", "start-weight-decay", "end-weight-decay"});
    if (!decay_given) o.weight_decay = rounded(std::min(1.0, B / (o.lr * D * tau)));
    row("weight decay", o.weight_decay, format("%g", o.weight_decay), decay_given,
        format("1 / (lr x steps x tau) with tau = 1.084 (tokens / parameters)^-0.527 = %.3g (Power Lines)", tau));
    return rows;
}
