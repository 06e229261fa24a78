// The keys of config.json: how each kind of key reads and writes a part of the configuration, and the keys that several
// families share. hf_config.h lists them per family.
#pragma once
#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "../base/check.h"
#include "../base/text.h"
#include "choices.h"
#include "families.h"

namespace detail {

using Json = nlohmann::ordered_json;

// Reads the values of a config.json; names the key in errors for wrong types and unsupported values.
struct HfReader {
    const nlohmann::json& j;
    const std::string& source;              // names the file
    std::set<std::string>* read = nullptr;  // collects the keys that are read, unless null

    bool absent(const char* key) const {
        if (read) read->insert(key);
        return !j.contains(key) || j[key].is_null();
    }
    [[noreturn]] void wrong(const char* key, const char* expected) const {
        fail("%s: '%s' is %.200s; %s is expected", source.c_str(), key, j[key].dump().c_str(), expected);
    }
    [[noreturn]] void unsupported(const char* key, const std::string& supported) const {
        fail_unsupported("%s: '%s' is %.200s; only %s is supported", source.c_str(), key, j[key].dump().c_str(),
                         supported.c_str());
    }
    int count(const char* key) const {
        if (absent(key)) fail("%s has no '%s'", source.c_str(), key);
        if (!j[key].is_number_integer() || j[key] < 0 || j[key] > 1 << 28) wrong(key, "a whole number from 0 to 268435456");
        return j[key];
    }
    int count(const char* key, int otherwise) const { return absent(key) ? otherwise : count(key); }
    double number(const char* key, double otherwise) const {
        if (!absent(key) && !j[key].is_number()) wrong(key, "a number");
        return absent(key) ? otherwise : j[key].get<double>();
    }
    std::string text(const char* key, const char* otherwise) const {
        if (!absent(key) && !j[key].is_string()) wrong(key, "a text");
        return absent(key) ? std::string(otherwise) : j[key].get<std::string>();
    }
    bool flag(const char* key, bool otherwise) const {
        if (!absent(key) && !j[key].is_boolean()) wrong(key, "true or false");
        return absent(key) ? otherwise : j[key].get<bool>();
    }
    std::vector<double> numbers(const char* key, const std::vector<double>& otherwise) const {
        if (absent(key)) return otherwise;
        if (!j[key].is_array()) wrong(key, "a list of numbers");
        std::vector<double> list;
        for (const nlohmann::json& x : j[key]) {
            if (!x.is_number()) wrong(key, "a list of numbers");
            list.push_back(x);
        }
        return list;
    }
    // Rejects a feature unless it is absent, null, or has the one supported value.
    void only(const char* key, const nlohmann::json& allowed) const {
        if (!absent(key) && j[key] != allowed) unsupported(key, allowed.dump());
    }
};

struct Key {
    std::function<void(const HfReader&, ModelConfig&)> read;
    std::function<void(Json&, const ModelConfig&)> write;
};
using Keys = std::vector<Key>;

// ---- kinds of keys ----------------------------------------------------------------------------------------------------------
constexpr int required = -1;
// older: a second name of the key.
inline Key size(const char* key, int ModelConfig::*field, int otherwise = required, const char* older = nullptr) {
    return {[=](const HfReader& in, ModelConfig& c) {
                const char* const name = older && in.absent(key) ? older : key;
                c.*field = otherwise == required ? in.count(name) : in.count(name, otherwise);
            },
            [=](Json& j, const ModelConfig& c) { j[key] = c.*field; }};
}
// A size that is null if it is 0; a missing key means `missing`.
inline Key size_or_null(const char* key, int ModelConfig::*field, int missing) {
    return {[=](const HfReader& in, ModelConfig& c) { c.*field = in.count(key, in.j.contains(key) ? 0 : missing); },
            [=](Json& j, const ModelConfig& c) { j[key] = c.*field ? Json(c.*field) : Json(nullptr); }};
}
// A size whose default is a multiple of another one.
inline Key size_or(const char* key, int ModelConfig::*field, int ModelConfig::*other, int times) {
    return {[=](const HfReader& in, ModelConfig& c) {
                c.*field = in.absent(key) ? (int)std::min<int64_t>((int64_t)times * c.*other, INT_MAX) : in.count(key);
            },
            [=](Json& j, const ModelConfig& c) { j[key] = c.*field; }};
}
// A size without a key, always a multiple of another one.
inline Key follows(int ModelConfig::*field, int ModelConfig::*other, int times) {
    return {[=](const HfReader&, ModelConfig& c) { c.*field = (int)std::min<int64_t>((int64_t)times * c.*other, INT_MAX); },
            [](Json&, const ModelConfig&) {}};
}
inline Key number(const char* key, double ModelConfig::*field, double otherwise) {
    return {[=](const HfReader& in, ModelConfig& c) { c.*field = in.number(key, otherwise); },
            [=](Json& j, const ModelConfig& c) { j[key] = c.*field; }};
}
inline Key number_or_null(const char* key, double ModelConfig::*field, double missing) {
    return {[=](const HfReader& in, ModelConfig& c) { c.*field = in.number(key, in.j.contains(key) ? 0 : missing); },
            [=](Json& j, const ModelConfig& c) { j[key] = c.*field > 0 ? Json(c.*field) : Json(nullptr); }};
}
// A number of which the field is a function: field = to(x, c), x = from(field, c). Writes the shortest x that reads back as
// this field.
using Conversion = double (*)(double, const ModelConfig&);
inline Key converted(const char* key, double ModelConfig::*field, double otherwise, Conversion to, Conversion from) {
    return {[=](const HfReader& in, ModelConfig& c) { c.*field = to(in.number(key, otherwise), c); },
            [=](Json& j, const ModelConfig& c) {
                double x = from(c.*field, c);
                for (int digits = 1; digits <= 17; digits++)
                    if (const double shorter = strtod(format("%.*g", digits, x).c_str(), nullptr); to(shorter, c) == c.*field) {
                        x = shorter;
                        break;
                    }
                j[key] = x;
            }};
}
inline Key flag(const char* key, bool ModelConfig::*field, bool otherwise) {
    return {[=](const HfReader& in, ModelConfig& c) { c.*field = in.flag(key, otherwise); },
            [=](Json& j, const ModelConfig& c) { j[key] = c.*field; }};
}
// One of several words. Writes the first word of a value; a value without a word is not written.
template <class E>
Key choice(const char* key, E ModelConfig::*field, const std::vector<std::pair<const char*, E>>& words) {
    return {[=](const HfReader& in, ModelConfig& c) {
                if (in.absent(key)) return;
                const std::string given = in.text(key, "");
                std::string known;
                for (const auto& [word, value] : words) {
                    if (given == word) return void(c.*field = value);
                    known += (known.empty() ? "\"" : ", \"") + std::string(word) + "\"";
                }
                in.unsupported(key, known);
            },
            [=](Json& j, const ModelConfig& c) {
                for (const auto& [word, value] : words)
                    if (c.*field == value) return void(j[key] = word);
            }};
}
// Several keys as one.
inline Key together(const Keys& keys) {
    return {[=](const HfReader& in, ModelConfig& c) {
                for (const Key& key : keys) key.read(in, c);
            },
            [=](Json& j, const ModelConfig& c) {
                for (const Key& key : keys) key.write(j, c);
            }};
}
// Keys of an object inside config.json.
inline Key within(const char* object, const Keys& keys) {
    const Key inside = together(keys);
    return {[=](const HfReader& in, ModelConfig& c) {
                static const nlohmann::json none = nlohmann::json::object();
                const bool absent = in.absent(object);
                if (!absent && !in.j[object].is_object()) in.wrong(object, "an object");
                inside.read({absent ? none : in.j[object], in.source, in.read}, c);
            },
            [=](Json& j, const ModelConfig& c) { inside.write(j[object] = Json::object(), c); }};
}
// Keys that files of the model's own code have by other names: {theirs, transformers'}. Writes both.
inline Key renamed(const std::vector<std::pair<const char*, const char*>>& names, const Keys& keys) {
    const Key all = together(keys);
    return {[=](const HfReader& in, ModelConfig& c) {
                nlohmann::json j = in.j;
                for (const auto& [theirs, ours] : names) {
                    if (in.absent(theirs)) continue;
                    if (!in.absent(ours) && j[ours] != j[theirs])
                        fail("%s: '%s' and '%s' contradict each other; HINT: remove one of them", in.source.c_str(), theirs,
                             ours);
                    j[ours] = j[theirs];
                }
                all.read({j, in.source, in.read}, c);
            },
            [=](Json& j, const ModelConfig& c) {
                all.write(j, c);
                for (const auto& [theirs, ours] : names) j[theirs] = j[ours];
            }};
}
// A setting with one supported value.
inline Key only(const char* key, const nlohmann::json& value) {
    return {[=](const HfReader& in, ModelConfig&) { in.only(key, value); }, [](Json&, const ModelConfig&) {}};
}
inline Key only_written(const char* key, const nlohmann::json& value) {
    return {only(key, value).read, [=](Json& j, const ModelConfig&) { j[key] = value; }};
}

// The class's own padding token may be beyond the vocabulary, where the gradient of its embedding is dropped.
inline Key no_padding_token() {
    return {[](const HfReader&, ModelConfig&) {}, [](Json& j, const ModelConfig&) { j["pad_token_id"] = nullptr; }};
}

// ---- keys of several families -----------------------------------------------------------------------------------------------
inline std::vector<std::pair<const char*, Activation>> words_of_activations(bool gated) {
    std::vector<std::pair<const char*, Activation>> words;
    for (const ActivationRow& row : activations)
        for (const char* word : row.in_files)
            if (word && row.gated == gated) words.emplace_back(word, row.value);
    return words;
}
inline Key plain_activation(const char* key) {
    return choice<Activation>(key, &ModelConfig::activation, words_of_activations(false));
}
// gelu: also accepts this word; files of Gemma 1 have it and mean the tanh form.
inline Key gated_activation(const char* key, bool gelu = false) {
    std::vector<std::pair<const char*, Activation>> words = words_of_activations(true);
    if (gelu) words.emplace_back("gelu", Activation::geglu);
    return choice<Activation>(key, &ModelConfig::activation, words);
}
inline Key head_dim(int otherwise) {
    return {[=](const HfReader& in, ModelConfig& c) { c.head_size = in.count("head_dim", otherwise); },
            [](Json& j, const ModelConfig& c) { j["head_dim"] = c.HS(); }};
}
// One key for the biases of qkv and proj.
inline Key attention_bias(bool otherwise, const char* key = "attention_bias") {
    return {[=](const HfReader& in, ModelConfig& c) { c.qkv_bias = c.proj_bias = in.flag(key, otherwise); },
            [=](Json& j, const ModelConfig& c) { j[key] = c.qkv_bias; }};
}
// The factor of q.k is 1 / sqrt(this number).
inline Key query_pre_attn_scalar() {
    const char* const key = "query_pre_attn_scalar";
    return {[=](const HfReader& in, ModelConfig& c) { c.attention_scale = 1 / std::sqrt(in.number(key, 256)); },
            [=](Json& j, const ModelConfig& c) {
                j[key] = c.attention_scale > 0 ? (int64_t)std::llround(1 / (c.attention_scale * c.attention_scale)) : c.HS();
            }};
}
// The factors of Granite: of embedding, scores and residual terms, and the divisor of logits.
inline Key multipliers() {
    const char* const scores = "attention_multiplier";
    const Key of_scores = {[=](const HfReader& in, ModelConfig& c) { c.attention_scale = in.number(scores, 1); },
                           [=](Json& j, const ModelConfig& c) {
                               j[scores] = c.attention_scale > 0 ? c.attention_scale : 1 / std::sqrt((double)c.HS());
                           }};
    return together({number("embedding_multiplier", &ModelConfig::embedding_scale, 1),
                     number("residual_multiplier", &ModelConfig::residual_scale, 1),
                     number("logits_scaling", &ModelConfig::logit_divisor, 1), of_scores});
}
// MiniCPM's: a factor of the embedding, a factor of residual terms that is divided by the root of the number of layers, and the
// width that logits are scaled as for.
inline Key depth_multipliers() {
    const Conversion by_depth = [](double x, const ModelConfig& c) { return x / std::sqrt((double)c.L); };
    const Conversion to_depth = [](double r, const ModelConfig& c) { return r * std::sqrt((double)c.L); };
    const Conversion of_width = [](double x, const ModelConfig& c) { return c.C / x; };
    return together({number("scale_emb", &ModelConfig::embedding_scale, 1),
                     converted("scale_depth", &ModelConfig::residual_scale, 1, by_depth, to_depth),
                     converted("dim_model_base", &ModelConfig::logit_divisor, 1, of_width, of_width)});
}
// Cohere's factor of logits.
inline Key logit_scale() {
    const Conversion inverse = [](double x, const ModelConfig&) { return 1 / x; };
    return converted("logit_scale", &ModelConfig::logit_divisor, 0.0625, inverse, inverse);
}
// One key for the biases of all matrices.
inline Key use_bias(bool otherwise, const char* key = "use_bias") {
    return {[=](const HfReader& in, ModelConfig& c) { c.qkv_bias = c.proj_bias = c.mlp_bias = in.flag(key, otherwise); },
            [=](Json& j, const ModelConfig& c) { j[key] = c.qkv_bias; }};
}
// A second key for the width; another one is refused.
inline Key width_again(const char* key) {
    return {[=](const HfReader& in, ModelConfig& c) { in.only(key, c.C); },
            [=](Json& j, const ModelConfig& c) { j[key] = c.C; }};
}
inline Key scale_attn_weights() {
    const char* const key = "scale_attn_weights";
    return {[=](const HfReader& in, ModelConfig& c) { c.attention_scale = in.flag(key, true) ? 0 : 1; },
            [=](Json& j, const ModelConfig& c) {
                if (c.attention_scale == 1) j[key] = false;
            }};
}
inline Key root_of_width() {
    return {[](const HfReader&, ModelConfig& c) { c.embedding_scale = std::sqrt((double)c.C); },
            [](Json&, const ModelConfig&) {}};
}
inline Key parallel_residual() {
    const char* const key = "use_parallel_residual";
    return {[=](const HfReader& in, ModelConfig& c) {
                c.norm_place = in.flag(key, true) ? NormPlace::parallel : NormPlace::before;
            },
            [=](Json& j, const ModelConfig& c) { j[key] = c.norm_place == NormPlace::parallel; }};
}

// GPT-J: the number of dimensions of each head that are rotated. Published files have two keys that its class ignores.
inline Key rotary_dim() {
    const char* const key = "rotary_dim";
    return {[=](const HfReader& in, ModelConfig& c) {
                if (in.absent(key) && in.j.contains(key)) in.unsupported(key, "a number");
                for (const char* other : {"rotary", "scale_attn_weights"}) in.only(other, true);
                c.rotary_fraction = c.HS() > 0 ? (double)in.count(key, 64) / c.HS() : 1;
            },
            [=](Json& j, const ModelConfig& c) { j[key] = c.rotated(); }};
}
// The width must be a multiple of the shards of TensorNames.
inline Key width_in_shards(int shards) {
    return {[=](const HfReader& in, ModelConfig& c) {
                if (c.C % shards) in.unsupported("n_embd", "a multiple of " + std::to_string(shards));
            },
            [](Json&, const ModelConfig&) {}};
}
// Falcon: the new architecture has groups of heads and one or two norms of both branches, the old one one key/value head, or as
// many as query heads, and one norm of both branches, or two in turn.
inline Key falcon_block() {
    const char *const grouped = "new_decoder_architecture", *const one = "multi_query", *const parallel = "parallel_attn";
    const char *const heads = "num_kv_heads", *const norms = "num_ln_in_parallel_attn";
    return {[=](const HfReader& in, ModelConfig& c) {
                const bool newer = in.flag(grouped, false), alone = in.flag(one, true), at_once = in.flag(parallel, true);
                const int n_norms = in.count(norms, newer ? 2 : 1), n_heads = in.count(heads, c.NH);
                c.NKV = newer ? n_heads : alone ? 1 : c.NH;
                if (n_norms != 1 && (n_norms != 2 || !newer)) in.unsupported(norms, newer ? "1 or 2" : "1");
                if (newer && !at_once) in.unsupported(parallel, "true");
                c.norm_place = !at_once ? NormPlace::before : n_norms == 2 ? NormPlace::parallel : NormPlace::shared;
            },
            [=](Json& j, const ModelConfig& c) {
                const bool newer = c.norm_place == NormPlace::parallel || (c.NKV != 1 && c.NKV != c.NH);
                j[grouped] = newer;
                j[one] = c.NKV == 1;
                j[parallel] = c.parallel();
                j[heads] = c.NKV;
                if (newer) j[norms] = c.norm_place == NormPlace::parallel ? 2 : 1;
            }};
}

// Rotary positions. transformers 5 nests them: {"rope_parameters": {"rope_theta": ..., "rope_type": "default"}}. We write the
// form of version 4, which both versions read.
struct RopeKeys {
    const char* base = "rope_theta";
    double otherwise = 10000;
    const char* fraction = nullptr;  // null: the whole head is rotated
    double whole = 1;                // the fraction if the key is missing
    const char* local = nullptr;     // base in layers with a window
    bool by_kind = false;            // layers with a window have the same base, without scaling
};
inline RopeScaling::Type read_rope_type(const HfReader& in, const char* key) {
    const char* const name = in.absent("rope_type") ? "type" : "rope_type";
    const std::string given = in.text(name, "default");
    std::string known;
    for (const auto& row : choices_of_rope_scaling) {
        if (given == row.in_config) return row.value;
        known += (known.empty() ? "" : ", ") + std::string(row.in_config);
    }
    fail_unsupported("%s: '%s' is '%.200s' in '%s'; supported are %s", in.source.c_str(), name, given.c_str(), key,
                     known.c_str());
}
// The longest sequence, in our own files, if a reader would otherwise assume another length.
inline constexpr const char* longest_key = "max_sequence_length";
// Keys that belong to one type of scaling; absent ones keep their defaults.
inline void read_rope_details(const HfReader& in, RopeScaling& s) {
    using Type = RopeScaling::Type;
    if (s.type == Type::llama3) {
        s.low_freq_factor = in.number("low_freq_factor", s.low_freq_factor);
        s.high_freq_factor = in.number("high_freq_factor", s.high_freq_factor);
    }
    if (s.type == Type::yarn) {
        s.beta_fast = in.number("beta_fast", s.beta_fast);
        s.beta_slow = in.number("beta_slow", s.beta_slow);
        s.mscale = in.number("mscale", s.mscale);
        s.mscale_all_dim = in.number("mscale_all_dim", s.mscale_all_dim);
        s.truncate = in.flag("truncate", s.truncate);
    }
    if (s.type == Type::longrope) {
        s.short_factor = in.numbers("short_factor", s.short_factor);
        s.long_factor = in.numbers("long_factor", s.long_factor);
    }
    if (s.type == Type::yarn || s.type == Type::longrope)
        s.attention_factor = in.number("attention_factor", s.attention_factor);
}
inline void read_rope_scaling(const HfReader& in, const HfReader& outside, const char* key, ModelConfig& c) {
    using Type = RopeScaling::Type;
    RopeScaling& s = c.rope_scaling;
    s = {};
    s.type = read_rope_type(in, key);
    if (s.type == Type::none) return;
    const char* const original = "original_max_position_embeddings";
    s.original = s.type == Type::dynamic || s.type == Type::linear ? c.T : outside.count(original, in.count(original, c.T));
    s.factor = in.number("factor", s.original > 0 ? (double)c.T / s.original : 1);
    read_rope_details(in, s);
    // The longest-sequence key holds the length before scaling, and no key the length after it; with YaRN it may be the latter.
    const int longest = (int)std::min(1e8, std::max(1.0, s.factor) * s.original);
    if (s.type == Type::dynamic) c.T = outside.count(longest_key, longest);
    if (s.type == Type::yarn) c.T = outside.count(longest_key, std::max(c.T, longest));
    if (s.type == Type::linear) s.original = 0;
}
// Reads the object under one of the two keys.
inline void read_rope_object(const HfReader& in, const RopeKeys& keys, const char* key, ModelConfig& c) {
    if (!in.j[key].is_object()) in.wrong(key, "an object");
    const std::string source = in.source + ": '" + key + "'";
    const nlohmann::json* all = &in.j[key];
    const auto part = [&](const char* layers) -> const nlohmann::json* {
        if (!(keys.local || keys.by_kind) || !all->contains(layers)) return nullptr;
        if (!(*all)[layers].is_object()) in.wrong(key, "an object of objects");
        return &(*all)[layers];
    };
    if (const nlohmann::json* windowed = part("sliding_attention")) {
        const HfReader local{*windowed, source, in.read};
        if (read_rope_type(local, key) != RopeScaling::Type::none) in.unsupported(key, "no scaling in layers with a window");
        c.local_rope_base = local.number("rope_theta", c.local_rope_base);
    }
    if (const nlohmann::json* full = part("full_attention")) all = full;
    else if (part("sliding_attention")) return;
    const HfReader inside{*all, source, in.read};
    c.rope_base = inside.number("rope_theta", c.rope_base);
    if (keys.fraction) c.rotary_fraction = inside.number("partial_rotary_factor", c.rotary_fraction);
    else inside.only("partial_rotary_factor", 1.0);
    read_rope_scaling(inside, in, key, c);
}
inline void write_rope(Json& j, const RopeKeys& keys, const ModelConfig& c);
inline void read_rope(const HfReader& in, const RopeKeys& keys, ModelConfig& c) {
    c.rope_base = in.number(keys.base, keys.otherwise);
    if (keys.fraction) c.rotary_fraction = in.number(keys.fraction, keys.whole);
    else in.only("partial_rotary_factor", 1.0);
    if (keys.local) c.local_rope_base = in.number(keys.local, 10000);
    if (keys.by_kind) c.local_rope_base = c.rope_base;
    const auto given = [&](const char* key) { return !in.absent(key) && !(in.j[key].is_object() && in.j[key].empty()); };
    const char *const older = "rope_scaling", *const newer = "rope_parameters";
    if (!given(older) && !given(newer)) return;
    const ModelConfig plain = c;
    read_rope_object(in, keys, given(older) ? older : newer, c);
    if (!given(older) || !given(newer)) return;
    // transformers reads only the older key; a file whose newer key differs was edited by hand.
    ModelConfig other = plain;
    read_rope_object(in, keys, newer, other);
    if (other.rope_scaling.type == RopeScaling::Type::none) {
        other.rope_scaling = c.rope_scaling;
        other.T = c.T;
    }
    Json used, unused;
    write_rope(used, keys, c);
    write_rope(unused, keys, other);
    if (used != unused)
        fail("%s: '%s' and '%s' contradict each other; HINT: remove the one that does not apply", in.source.c_str(), older,
             newer);
}
inline void write_rope(Json& j, const RopeKeys& keys, const ModelConfig& c) {
    using Type = RopeScaling::Type;
    const RopeScaling& s = c.rope_scaling;
    j[keys.base] = c.rope_base;
    if (keys.fraction) j[keys.fraction] = c.rotary_fraction;
    if (keys.local) j[keys.local] = c.local_rope_base > 0 ? c.local_rope_base : c.rope_base;
    if (keys.by_kind) {  // transformers 5 ignores "rope_theta" in layers with a window
        const Json plain = {{"rope_type", "default"}, {"rope_theta", c.rope_base}};
        j["rope_parameters"] = {{"full_attention", plain}, {"sliding_attention", plain}};
    }
    if (s.type == Type::none) return;
    Json scaling;
    scaling["rope_type"] = row_of(choices_of_rope_scaling, s.type).in_config;
    scaling["factor"] = s.factor;
    const auto given = [&](const char* key, double value, double otherwise) {
        if (value != otherwise) scaling[key] = value;
    };
    if (s.type == Type::llama3) {
        scaling["low_freq_factor"] = s.low_freq_factor;
        scaling["high_freq_factor"] = s.high_freq_factor;
    }
    if (s.type == Type::yarn) {
        given("beta_fast", s.beta_fast, 32);
        given("beta_slow", s.beta_slow, 1);
        given("mscale", s.mscale, 0);
        given("mscale_all_dim", s.mscale_all_dim, 0);
        if (!s.truncate) scaling["truncate"] = false;
        if (c.T < s.factor * s.original) j[longest_key] = c.T;
    }
    if (s.type == Type::longrope) {
        scaling["short_factor"] = s.short_factor;
        scaling["long_factor"] = s.long_factor;
    }
    given("attention_factor", s.attention_factor, 0);
    if (s.type == Type::dynamic) {
        j["max_position_embeddings"] = s.original;
        j[longest_key] = c.T;
    } else if (s.type != Type::linear) {
        scaling["original_max_position_embeddings"] = s.original;
    }
    j["rope_scaling"] = scaling;
    if (keys.by_kind) j["rope_parameters"]["full_attention"].update(scaling);
}
inline Key rope(const RopeKeys& keys = {}) {
    return {[=](const HfReader& in, ModelConfig& c) { read_rope(in, keys, c); },
            [=](Json& j, const ModelConfig& c) { write_rope(j, keys, c); }};
}

// Phi-3's form: its class accepts no other keys in "rope_scaling" than these three, and computes the factor from the lengths.
inline Key phi3_scaling() {
    return {[](const HfReader& in, ModelConfig& c) {
                const RopeScaling::Type type = c.rope_scaling.type;
                if (type != RopeScaling::Type::none && type != RopeScaling::Type::longrope)
                    in.unsupported(in.absent("rope_scaling") ? "rope_parameters" : "rope_scaling", "longrope");
            },
            [](Json& j, const ModelConfig& c) {
                const RopeScaling& s = c.rope_scaling;
                if (s.type != RopeScaling::Type::longrope) return;
                j["rope_scaling"] = {{"type", "longrope"}, {"short_factor", s.short_factor}, {"long_factor", s.long_factor}};
                j["original_max_position_embeddings"] = s.original;
            }};
}

// From a list of all layers: n if every n-th layer lacks the feature; 0 if none lacks it.
inline int interval_of(const HfReader& in, const char* key, const std::vector<bool>& lacks) {
    int n = 0;
    for (int l = 0; l < (int)lacks.size(); l++) {
        if (lacks[l] && n == 0) n = l + 1;
        if (lacks[l] != (n > 0 && (l + 1) % n == 0)) in.unsupported(key, "every n-th layer being another (n, 2n, ...)");
    }
    return n;
}
inline std::vector<bool> layers_with(const HfReader& in, const char* key, const ModelConfig& c, const nlohmann::json& lacking,
                                     const nlohmann::json& having) {
    if (!in.j[key].is_array() || in.j[key].size() < (size_t)c.L) in.wrong(key, "a list with a value for each layer");
    std::vector<bool> lacks;
    for (int l = 0; l < c.L; l++) {
        const nlohmann::json& x = in.j[key][(size_t)l];
        if (x != lacking && x != having) in.unsupported(key, lacking.dump() + " or " + having.dump() + " per layer");
        lacks.push_back(x == lacking);
    }
    return lacks;
}

// Layers with a window. Any form may list each layer's kind in "layer_types".
struct WindowKeys {
    int missing = 0;           // the window if the key is missing
    bool switched = false;     // "use_sliding_window" turns the window on
    bool after_first = false;  // "max_window_layers" layers have none, unless "layer_types" exists
    int interval = 0;          // every n-th layer sees all keys, unless "layer_types" exists
    bool pattern = false;      // "sliding_window_pattern" gives n
    bool writes_types = false;
    bool needed = false;      // not null: the class builds the mask in every pass, even if no layer has a window
    bool everywhere = false;  // "use_sliding_window" turns it on in all layers
};
inline Key window(const WindowKeys& keys) {
    const char *const size = "sliding_window", *const on = "use_sliding_window", *const types = "layer_types";
    return {[=](const HfReader& in, ModelConfig& c) {
                c.window = in.count(size, in.j.contains(size) ? 0 : keys.missing);
                if (keys.switched && !in.flag(on, false)) c.window = 0;
                c.full_interval = keys.pattern ? in.count("sliding_window_pattern", keys.interval) : keys.interval;
                if (!in.absent(types)) {
                    const std::vector<bool> full = layers_with(in, types, c, "full_attention", "sliding_attention");
                    c.full_interval = interval_of(in, types, full);
                    if (c.full_interval == 1) c.window = 0;
                    else if (!c.window) {
                        const char* const off = keys.switched && !in.flag(on, false) ? on : size;
                        fail("%s: '%s' has sliding-window layers, but '%s' disables windows; HINT: change one of them",
                             in.source.c_str(), types, off);
                    }
                } else if (keys.switched && c.window && !keys.everywhere) {
                    if (!keys.after_first) in.unsupported(on, "false, or true together with 'layer_types',");
                    const int first = in.count("max_window_layers", 28);
                    if (first >= c.L) c.window = 0;
                    else if (first > 0) in.unsupported("max_window_layers", "0 or the number of layers");
                }
            },
            [=](Json& j, const ModelConfig& c) {
                const int written = c.window ? c.window : keys.needed ? keys.missing : 0;
                j[size] = written ? Json(written) : Json(nullptr);
                if (keys.switched) j[on] = c.window > 0;
                if (keys.after_first) j["max_window_layers"] = c.window ? 0 : c.L;
                if (!keys.writes_types) return;
                j[types] = Json::array();
                for (int l = 0; l < c.L; l++) j[types].push_back(c.sees_all(l) ? "full_attention" : "sliding_attention");
            }};
}
// GPT-Neo: layers with a window are "local", in a list of lists of words and how often each is repeated. Published files also
// have the whole list.
inline Key local_layers() {
    const char *const types = "attention_types", *const size = "window_size", *const layers = "attention_layers";
    return {[=](const HfReader& in, ModelConfig& c) {
                using List = nlohmann::json;
                const nlohmann::json usual = List::array({List::array({List::array({"global", "local"}), (c.L + 1) / 2})});
                const nlohmann::json& given = in.absent(types) ? usual : in.j[types];
                nlohmann::json words = List::array();
                for (const auto& part : given) {
                    if (!part.is_array() || part.size() != 2 || !part[0].is_array() || part[0].empty() ||
                        !part[1].is_number_integer())
                        in.wrong(types, "a list of [[words], times]");
                    for (int i = 0; i < part[1] && words.size() < 2 * (size_t)c.L; i++)
                        words.insert(words.end(), part[0].begin(), part[0].end());
                }
                if (!in.absent(layers)) in.only(layers, words);
                nlohmann::json list;
                list[types] = words;
                const std::vector<bool> full = layers_with({list, in.source}, types, c, "global", "local");
                c.window = in.count(size, 256);
                const auto full_from = [&](int first) {  // every second layer from this one on
                    for (int l = 0; l < c.L; l++)
                        if (full[(size_t)l] != (l % 2 == first)) return false;
                    return true;
                };
                c.full_interval = full_from(0) ? 2 : interval_of(in, types, full);
                c.full_offset = full_from(0) ? 1 : 0;
                if (c.full_interval == 1 || (full_from(0) && c.L == 1)) c.window = 0;
            },
            [=](Json& j, const ModelConfig& c) {
                j[size] = c.window ? c.window : 256;
                j[layers] = Json::array();
                for (int l = 0; l < c.L; l++) j[layers].push_back(c.sees_all(l) ? "global" : "local");
                j[types] = Json::array({Json::array({j[layers], 1})});
            }};
}
// EXAONE 4, Cohere 2: with "sliding_window", layers that see all keys have no positions.
inline Key positions_in_windows(int missing) {
    const char* const pattern = "sliding_window_pattern";
    return {[=](const HfReader& in, ModelConfig& c) {
                const bool any = in.count("sliding_window", in.j.contains("sliding_window") ? 0 : missing) > 0;
                c.nope_interval = !any ? 0 : c.window ? c.full_interval : 1;
                if (!in.absent(pattern) && in.absent("layer_types") && any && in.j[pattern] != 4 && in.j[pattern] != "LLLG")
                    in.unsupported(pattern, "4, or \"LLLG\", or another one together with 'layer_types',");
            },
            [](Json&, const ModelConfig&) {}};
}
// A Llama has no window; one in its config.json is refused unless it is switched off.
inline Key no_window() {
    return {[](const HfReader& in, ModelConfig&) {
                const bool off = !in.flag("use_sliding_window", true);
                if (!in.absent("sliding_window") && !off) in.only("sliding_window", nullptr);
            },
            [](Json&, const ModelConfig&) {}};
}
inline Key no_rope_layers() {
    const char *const list = "no_rope_layers", *const interval = "no_rope_layer_interval";
    return {[=](const HfReader& in, ModelConfig& c) {
                c.nope_interval = in.count(interval, 4);
                if (!in.absent(list)) c.nope_interval = interval_of(in, list, layers_with(in, list, c, 0, 1));
            },
            [=](Json& j, const ModelConfig& c) {
                j[list] = Json::array();
                for (int l = 0; l < c.L; l++) j[list].push_back(c.has_positions(l) ? 1 : 0);
                if (c.nope_interval) j[interval] = c.nope_interval;
            }};
}

// The number of experts, and of those that process each row. transformers 5 writes the first key of some classes as
// "num_local_experts".
inline Key experts(const char* key) {
    const char *const other = "num_local_experts", *const topk = "num_experts_per_tok";
    return {[=](const HfReader& in, ModelConfig& c) {
                const char* const name = in.absent(key) && !in.absent(other) ? other : key;
                c.mixture.experts = in.count(name, c.mixture.experts);
                if (c.mixture.experts < 1) in.wrong(name, "at least 1");
                if (!in.absent(other) && in.count(other) != c.mixture.experts)
                    fail("%s: '%s' and '%s' contradict each other; HINT: remove one of them", in.source.c_str(), key, other);
                c.mixture.topk = in.count(topk, c.mixture.topk);
            },
            [=](Json& j, const ModelConfig& c) {
                j[key] = c.mixture.experts;
                j[topk] = c.mixture.topk;
            }};
}
// GPT-OSS's activation has no word of its own: the constants of a clamped SwiGLU, which transformers 4 does not read.
inline Key clamped_swiglu() {
    return {[](const HfReader& in, ModelConfig&) {
                in.only("hidden_act", "silu");
                in.only("swiglu_limit", clamped_swiglu_limit);
                in.only("swiglu_alpha", clamped_swiglu_slope);
            },
            [](Json& j, const ModelConfig&) {
                j["hidden_act"] = "silu";
                j["swiglu_limit"] = clamped_swiglu_limit;
            }};
}
// Without keys of rope scaling, a GPT-OSS has its class's default.
inline Key default_yarn() {
    const char *const older = "rope_scaling", *const newer = "rope_parameters";
    return {[=](const HfReader& in, ModelConfig& c) {
                if (!in.absent(older) || !in.absent(newer)) return;
                RopeScaling& s = c.rope_scaling;
                s.type = RopeScaling::Type::yarn;
                s.factor = 32;
                s.original = 4096;
                s.truncate = false;
                c.T = std::max(c.T, 32 * 4096);
            },
            [=](Json& j, const ModelConfig&) {
                if (!j.contains(older)) j[older] = {{"rope_type", "default"}};
            }};
}
inline Key norm_topk_prob() {
    const char* const key = "norm_topk_prob";
    return {[=](const HfReader& in, ModelConfig& c) { c.mixture.normalize = in.flag(key, false); },
            [=](Json& j, const ModelConfig& c) { j[key] = c.mixture.normalize; }};
}
inline Key expert_width(int otherwise) {
    const char* const key = "moe_intermediate_size";
    return {[=](const HfReader& in, ModelConfig& c) { c.mixture.width = in.count(key, otherwise); },
            [=](Json& j, const ModelConfig& c) { j[key] = c.expert_width(); }};
}
inline Key shared_expert(int otherwise) {
    const char* const key = "shared_expert_intermediate_size";
    return {[=](const HfReader& in, ModelConfig& c) {
                c.mixture.shared = in.count(key, otherwise);
                if (otherwise && !c.mixture.shared) in.wrong(key, "at least 1");
            },
            [=](Json& j, const ModelConfig& c) { j[key] = c.mixture.shared; }};
}
// Layers without a mixture: those in a list, and all but every n-th one (n - 1, 2n - 1, ...).
inline Key dense_layers() {
    const char *const list = "mlp_only_layers", *const step = "decoder_sparse_step";
    return {[=](const HfReader& in, ModelConfig& c) {
                const int n = in.count(step, 1);
                if (n < 1) in.wrong(step, "at least 1");
                std::vector<int>& dense = c.mixture.dense_layers;
                dense.clear();
                for (const double layer : in.numbers(list, {})) {
                    if (!(layer >= 0 && layer < 1 << 28) || layer != std::floor(layer)) in.wrong(list, "a list of layers");
                    dense.push_back((int)layer);
                }
                for (int layer = 0; layer < c.L; layer++)
                    if ((layer + 1) % n) dense.push_back(layer);
            },
            [=](Json& j, const ModelConfig& c) {
                j[list] = c.mixture.dense_layers;
                j[step] = 1;
            }};
}
// Any mixture, or none. The names of the scores and of their factor, of groups, and of the biases of experts ("noaux_tc") are
// DeepSeek-V3's; groups and biases are written only where they are used.
inline Key own_mixture() {
    const char *const scores = "scoring_func", *const scale = "routed_scaling_factor", *const gate = "shared_expert_gate";
    const char* const method = "topk_method";
    const Key of_every_mixture =
        together({experts("num_experts"), norm_topk_prob(), expert_width(0), dense_layers(), shared_expert(0)});
    return {[=](const HfReader& in, ModelConfig& c) {
                if (in.count("num_experts", 0) == 0) return;
                of_every_mixture.read(in, c);
                c.mixture.sigmoid = in.text(scores, "softmax") == "sigmoid";
                if (!c.mixture.sigmoid) in.only(scores, "softmax");
                c.mixture.scale = in.number(scale, 1);
                c.mixture.shared_gate = in.flag(gate, false);
                c.mixture.groups = in.count("n_group", 1);
                c.mixture.group_topk = in.count("topk_group", 1);
                c.mixture.bias = in.text(method, "") == "noaux_tc";
                if (!c.mixture.bias) in.only(method, nullptr);
            },
            [=](Json& j, const ModelConfig& c) {
                if (!c.mixture.on()) return;
                of_every_mixture.write(j, c);
                j[scores] = c.mixture.sigmoid ? "sigmoid" : "softmax";
                j[scale] = c.mixture.scale;
                j[gate] = c.mixture.shared_gate;
                if (c.mixture.groups > 1) j["n_group"] = c.mixture.groups;
                if (c.mixture.groups > 1) j["topk_group"] = c.mixture.group_topk;
                if (c.mixture.bias) j[method] = "noaux_tc";
            }};
}

}  // namespace detail
