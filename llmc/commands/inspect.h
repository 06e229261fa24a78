// `train_gpt inspect PATH` describes a directory of a model or of adapters, or a checkpoint (and verifies every checksum), a
// run's output directory (its checkpoints, the newest in full), prepared data (.bin/.idx or llm.c's shards), a tokenizer.json
// or a .safetensors or .gguf file. Exit status 1 if anything is damaged.
#pragma once
#include <map>
#include <optional>
#include <string>

#include "../data/dataset.h"
#include "../base/progress.h"
#include "../base/table.h"
#include "../base/text.h"
#include "../tokenizer/tokenizer.h"
#include "../checkpoint/training_state.h"

namespace detail {

using TensorsByType = std::map<std::string, std::pair<int64_t, size_t>>;  // type -> tensors, bytes
inline void describe_types(Table& table, const TensorsByType& by_type) {
    for (const auto& [type, sum] : by_type) {
        table.row("tensors of type " + type, format("%lld, %s", (long long)sum.first, human_bytes((double)sum.second).c_str()));
        table.exact({{"tensors", sum.first}, {"bytes", sum.second}});
    }
}
inline void describe_tensors(Table& table, const SafetensorsReader& file, bool each) {
    TensorsByType by_type;
    std::map<std::string, const TensorView*> sorted;
    for (const auto& [name, t] : file.tensors()) {
        by_type[t.dtype].first++;
        by_type[t.dtype].second += t.bytes;
        sorted[name] = &t;
    }
    describe_types(table, by_type);
    if (!each) return;
    table.section("Tensors");
    for (const auto& [name, t] : sorted) table.row(name, t->dtype + " " + shape_string(t->shape));
}

// Returns true if all files match the manifest; `intact`: they are known to match.
inline bool describe_files(Table& table, const std::string& dir, bool intact) {
    table.section("Files");
    const bool has_manifest = file_exists(dir + "/" + manifest_name);
    const nlohmann::json manifest = has_manifest ? read_json(dir + "/" + manifest_name) : nlohmann::json::object();
    for (const std::string& name : files_below(dir)) {
        const auto bytes = std::filesystem::file_size(dir + "/" + name);
        table.row(name, human_bytes((double)bytes));
        table.exact(bytes);
    }
    const bool checkpoint = file_exists(dir + "/training");
    const std::string problem = !has_manifest || intact ? "" : checkpoint ? verify_checkpoint(dir) : verify_directory(dir);
    table.row("checksums", !has_manifest     ? "no manifest.json: nothing to compare with"
                           : problem.empty() ? "all files are as they were written"
                                             : problem);
    return problem.empty();
}

// "cpu, bf16, 4 ranks (tp 2, pp 2), 1 thread"
inline std::string layout_text(const nlohmann::ordered_json& layout) {
    const auto number = [&](const char* key) {
        const bool known = layout.contains(key) && layout[key].is_number_integer();
        return known ? std::clamp<int64_t>(layout[key].get<int64_t>(), 1, 1000000) : 1;
    };
    std::string text, axes;
    for (const char* key : {"backend", "precision"})
        if (layout.contains(key) && layout[key].is_string()) text += layout[key].get<std::string>() + ", ";
    for (const char* key : {"dp", "cp", "tp", "pp", "vpp", "ep"})
        if (number(key) > 1) axes += format("%s%s %lld", axes.empty() ? " (" : ", ", key, (long long)number(key));
    text += counted(number("dp") * number("cp") * number("tp") * number("pp"), "rank") + (axes.empty() ? "" : axes + ")");
    return text + (layout.contains("threads") ? ", " + counted(number("threads"), "thread") : "");
}

// An option's value as it would be typed.
inline std::string option_text(const nlohmann::ordered_json& value) {
    if (value.is_string()) return shell_word(value.get<std::string>());
    if (!value.is_array()) return value.dump();
    std::string text;
    for (const nlohmann::ordered_json& word : value) text += (text.empty() ? "" : " ") + option_text(word);
    return text;
}

inline void describe_state(Table& table, const TrainingState& s) {
    const auto number = [](double x) { return std::isfinite(x) ? format("%.4f", x) : std::string("none yet"); };
    const auto exact = [&](double x) {
        if (std::isfinite(x)) table.exact(x);
    };
    table.section("Training");
    table.row("step", with_commas(s.step) +
                          (s.step != s.updates ? format(" (%s not applied)", with_commas(s.step - s.updates).c_str()) : ""));
    table.exact(s.step);
    table.row("samples", with_commas(s.consumed));
    table.exact(s.consumed);
    table.row("tokens", human_count((double)s.tokens));
    table.exact(s.tokens);
    table.row("loss", number(s.loss));
    exact(s.loss);
    table.row("validation loss", number(s.valid_loss));
    exact(s.valid_loss);
    if (std::isfinite(s.lr)) {
        table.row("learning rate", format("%.4g", s.lr));
        table.exact(s.lr);
    }
    table.row("written on", layout_text(s.layout));
    table.exact(s.layout);
    const Strings shown = {"data-path",
                           "optimizer",
                           "lr",
                           "micro-batch-size",
                           "global-batch-size",
                           "seq-length",
                           "train-iters",
                           "seed",
                           "train-samples",
                           "parametrization",
                           "mup-base-width",
                           "mup-base-depth",
                           "mup-base-head-size"};
    for (const auto& [key, value] : s.options.items())
        if (std::find(shown.begin(), shown.end(), key) != shown.end())
            if (value != "standard" && (value != 0 || key == "seed")) {
                table.row("--" + key, option_text(value));
                table.exact(value);
            }
}

inline void describe_parameters(Table& table, const ModelConfig& c, const std::string& dir) {
    const ParameterTable parameters(c);
    table.row("family", c.family);
    table.row("shape", format("%d layers, width %d, %d heads of %d (%d for keys and values), feed-forward %d", c.L, c.C, c.NH,
                              c.HS(), c.NKV, c.F));
    table.exact({{"layers", c.L}, {"width", c.C}, {"heads", c.NH}, {"key_value_heads", c.NKV}, {"feed_forward", c.F}});
    table.row("longest sequence", with_commas(c.T));
    table.exact(c.T);
    table.row("vocabulary", with_commas(c.V));
    table.exact(c.V);
    table.row("parameters", format("%s (%s)", with_commas((int64_t)parameters.trained).c_str(),
                                   human_count((double)parameters.trained).c_str()));
    table.exact(parameters.trained);
    if (c.mixture.on()) {
        table.row("experts", mixture_in_words(c));
        table.exact(mixture_in_json(c));
    }
    if (is_gguf_file(dir)) return;
    if (const std::string keys = unknown_keys_of(dir); !keys.empty()) table.row("keys without effect", keys);
    describe_tensors(table, SafetensorsReader::open(dir), false);
}
// A model in a GGUF file, and its tensors by type.
inline bool inspect_gguf(Table& table, const std::string& path) {
    const GgufModel& model = *gguf_model_in(path);
    table.section("Model " + path);
    describe_parameters(table, model.c, path);
    TensorsByType by_type;
    for (const GgufTensor& t : model.file.tensors()) {
        const GgufTypeRow& type = gguf_type(t.type);
        auto& [tensors, bytes] = by_type[type.name];
        tensors++;
        bytes += t.elements / type.elements * type.bytes;
    }
    describe_types(table, by_type);
    const GgufTokenizer tokenizer = read_gguf_tokenizer(model.file.metadata(), path);
    table.row("tokenizer", tokenizer.model.empty() ? "none" : counted((int64_t)tokenizer.tokens.size(), "token"));
    return true;
}
inline void describe_adapters(Table& table, const std::string& dir) {
    const nlohmann::ordered_json config = read_json(dir + adapter_config_file);
    const std::pair<const char*, const char*> rows[] = {
        {"kind", "peft_type"},   {"base", "base_model_name_or_path"}, {"rank", "r"},
        {"alpha", "lora_alpha"}, {"matrices", "target_modules"},      {"virtual tokens", "num_virtual_tokens"}};
    for (const auto& [name, key] : rows)
        if (config.contains(key)) {
            table.row(name, option_text(config[key]));
            table.exact(config[key]);
        }
    describe_tensors(table, SafetensorsReader::open(dir + "/adapter_model.safetensors"), false);
}

// verified: its files are known to match the manifest.
inline bool inspect_model(Table& table, const std::string& dir, bool verified = false) {
    bool intact = true;
    try {
        const bool adapters = is_adapter(dir), checkpoint = file_exists(state_file(dir));
        table.section((checkpoint ? "Checkpoint " : adapters ? "Adapters " : "Model ") + dir);
        if (adapters) describe_adapters(table, dir);
        else describe_parameters(table, read_config(dir), dir);
        if (checkpoint) describe_state(table, read_state(dir));
    } catch (const Unsupported& e) {
        table.row("not supported", e.what());
    } catch (const Error& e) {
        intact = false;
        table.row("damaged", e.what());
    }
    return describe_files(table, dir, verified) && intact;
}

inline bool inspect_run(Table& table, const std::string& out) {
    table.section("Run " + out);
    bool intact = true;
    std::string first;
    for (const std::string& dir : checkpoints_to_try(out)) {
        const std::string problem = verify_checkpoint(dir);
        table.row(std::filesystem::path(dir).filename().string(), problem.empty() ? "intact" : problem);
        intact = intact && problem.empty();
        if (problem.empty() && first.empty()) first = dir;
    }
    return first.empty() ? intact : inspect_model(table, first, true) && intact;
}

// The starts of the first documents as text, decoded with the given tokenizer or the one that made the data.
inline void describe_texts(Table& table, const TokenDataset& data, const std::string& given) {
    constexpr int64_t most_documents = 3, most_tokens = 40;
    const TokenizerIdentity& made = data.tokenizer();
    table.row("tokenizer", made.known() ? made.text() : "unknown: the data has no PREFIX.meta.json");
    std::optional<Tokenizer> tokenizer;
    try {
        if (!given.empty() || made.known()) tokenizer = Tokenizer::load(tokenizer_path(given.empty() ? made.path : given));
    } catch (const Error& e) {
        if (!given.empty()) throw;
        table.row("text", std::string(e.what()) + "; HINT: --tokenizer DIR");
    }
    if (tokenizer && made.known() && tokenizer->identity().hash != made.hash) {
        if (!given.empty()) fail("%s is not the data's tokenizer", tokenizer->identity().text().c_str());
        table.row("text",
                  "the tokenizer's file has changed since: hash " + tokenizer->identity().hash + "; HINT: --tokenizer DIR");
        return;
    }
    if (!tokenizer) return;
    table.section("Texts");
    for (int64_t d = 0; d < std::min(most_documents, data.n_documents()); d++) {
        std::vector<int> tokens((size_t)std::min<int64_t>(most_tokens, data.length(d)));
        data.read(d, 0, (int64_t)tokens.size(), tokens.data());
        std::string text;
        for (const char c : tokenizer->decode(tokens)) text += c == '\n' ? std::string("\\n") : std::string(1, c);
        table.row(format("document %lld", (long long)d), text + (data.length(d) > most_tokens ? " ..." : ""));
    }
}

inline bool inspect_data(Table& table, const std::string& path, const std::string& tokenizer) {
    const TokenDataset data = TokenDataset::open(path);
    table.section("Data " + data.name());
    int64_t shortest = INT64_MAX, longest = 0, in_loss = 0;
    int largest = 0, smallest = INT_MAX;
    std::vector<int> tokens;
    Progress progress("reading", data.n_tokens(), "tokens");
    int64_t done = 0;
    for (int64_t d = 0; d < data.n_documents(); d++) {
        const int64_t length = data.length(d);
        shortest = std::min(shortest, length);
        longest = std::max(longest, length);
        if (data.has_mask()) in_loss += std::count(data.loss_mask(d), data.loss_mask(d) + length, 1);
        for (int64_t at = 0; at < length; at += 1 << 20) {
            tokens.resize((size_t)std::min<int64_t>(1 << 20, length - at));
            data.read(d, at, (int64_t)tokens.size(), tokens.data());
            for (const int token : tokens) {
                largest = std::max(largest, token);
                smallest = std::min(smallest, token);
            }
        }
        progress.update(done += length);
    }
    progress.finish();
    table.row("kind", data.is_shards() ? "llm.c token shard" : "Megatron-LM .bin/.idx");
    table.row("documents", with_commas(data.n_documents()));
    table.exact(data.n_documents());
    table.row("tokens", format("%s (%s)", with_commas(data.n_tokens()).c_str(), human_count((double)data.n_tokens()).c_str()));
    table.exact(data.n_tokens());
    if (data.has_mask()) {
        const std::string& name = data.chat_template();
        const std::string by = name.empty() ? "with an unknown template" : "with the template " + label_of_recorded(name);
        if (data.has_pairs()) table.row("pairs of answers", with_commas(data.n_documents() / 2) + ", " + by);
        else table.row("conversations", by);
        table.row("learned", format("%s tokens (%.1f%%)", with_commas(in_loss).c_str(),
                                    100.0 * (double)in_loss / (double)std::max<int64_t>(1, data.n_tokens())));
        table.exact(in_loss);
    }
    if (data.n_tokens() > 0) {
        table.row("tokens per document",
                  format("%s to %s, %.1f on average", with_commas(shortest).c_str(), with_commas(longest).c_str(),
                         (double)data.n_tokens() / (double)data.n_documents()));
        table.exact({{"shortest", shortest}, {"longest", longest}});
        table.row("token ids", format("%d to %d", smallest, largest));
        table.exact({smallest, largest});
    }
    describe_texts(table, data, tokenizer);
    return smallest >= 0;
}

// Whether a path names shards of llm.c, as --data-path takes them: a file by its first bytes, without its .bin, or a pattern.
inline bool is_shard(const std::string& path) {
    if (!file_exists(path)) return is_regular(path + ".bin") || path.find_first_of("*?[") != std::string::npos;
    return is_regular(path) && has_shard_magic(beginning_of(path, 4));
}

inline bool inspect_tokenizer(Table& table, const std::string& path) {
    const Tokenizer tokenizer = Tokenizer::load(path);
    int special = 0;
    size_t longest = 0;
    for (int id = 0; id < tokenizer.vocab_size(); id++) {
        special += tokenizer.is_special(id);
        longest = std::max(longest, tokenizer.token_bytes(id).size());
    }
    const auto name = [&](int id) {
        return id < 0 ? std::string("none") : format("%d, %s", id, tokenizer.token_bytes(id).c_str());
    };
    table.section("Tokenizer " + tokenizer.source());
    table.row("tokens", with_commas(tokenizer.vocab_size()) + format(", %d of them special", special));
    table.exact(tokenizer.vocab_size());
    table.row("end of document", name(tokenizer.eod_id()));
    table.row("start", name(tokenizer.bos_id()));
    table.row("longest token", format("%zu bytes", longest));
    table.row("hash", tokenizer.identity().hash);
    return true;
}

}  // namespace detail

inline int inspect_command(const InspectOptions& o) {
    namespace fs = std::filesystem;
    refuse_missing(o.path.empty(), "the path", "train_gpt inspect PATH");
    const std::string snapshot = file_exists(o.path) || file_exists(o.path + ".idx") ? "" : hub_snapshot(o.path);
    const fs::path path = through_latest(without_trailing_slashes(snapshot.empty() ? o.path : snapshot));
    Table table;
    bool intact = true, is_data = false;
    if (is_folder(path.string()) && is_model_or_adapter(path.string())) intact = detail::inspect_model(table, path.string());
    else if (is_folder(path.string()) && !find_checkpoints(path.string()).empty())
        intact = detail::inspect_run(table, path.string());
    else if (is_folder(path.string()) ? !tokenizer_file_in(path.string()).empty() : path.extension() == ".model")
        intact = detail::inspect_tokenizer(table, path.string());
    else if (is_gguf_file(path.string())) intact = detail::inspect_gguf(table, path.string());
    else if (path.extension() == ".json" && path.stem().extension() != ".meta")
        intact = detail::inspect_tokenizer(table, path.string());
    else if (path.extension() == ".safetensors") {
        table.section("Tensors in " + path.string());
        detail::describe_tensors(table, SafetensorsReader::open(path.string()), true);
    } else if (file_exists(path.string() + ".idx") || path.extension() == ".idx" || path.extension() == ".bin" ||
               path.extension() == ".json" || detail::is_shard(path.string())) {
        is_data = true;
        intact = detail::inspect_data(table, path.string(), o.tokenizer);
    } else if (!file_exists(o.path)) {
        fail("%s does not exist%s", o.path.c_str(), hint_on_missing_path(o.path).c_str());
    } else
        fail(
            "cannot inspect %s: it is not a directory of a model or adapters, a run's output directory, PREFIX of .bin/.idx, "
            "a tokenizer.json, tokenizer.model, a .safetensors or a .gguf file",
            o.path.c_str());
    refuse_without(!o.tokenizer.empty() && !is_data, "--tokenizer", "prepared data, which " + o.path + " is not");
    if (o.json) {
        nlohmann::ordered_json j = {{"path", o.path}, {"intact", intact}};
        j.update(table.json());
        print_json(j);
    } else table.print();
    return intact ? 0 : 1;
}
