// Directories of adapters (model/adapters.h) in PEFT's format, which PEFT reads and writes:
//   adapter_config.json           their kind; rank, alpha and matrices, or the number of virtual tokens; and the path of the
//                                 adapted model (the base)
//   adapter_model.safetensors     A and B of each matrix, or the virtual tokens
//   base.json                     our own: sizes and checksums of the base's weights, and the format to which the run quantized
//                                 them
// Adapters are only valid with the weights that they were trained on: base.json lets others be rejected. PEFT's own directories
// have none; for them only names and shapes can be compared.
#pragma once
#include <algorithm>
#include <cmath>
#include <cctype>
#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "../base/check.h"
#include "../base/file.h"
#include "../base/json.h"
#include "../base/safetensors.h"
#include "../model/adapters.h"
#include "../parallel/world.h"
#include "checkpoint.h"
#include "model_texts.h"
#include "run_directory.h"
#include "load_state.h"
#include "training_state.h"

// ---- the base ---------------------------------------------------------------------------------------------------------------

// Size and CRC-32C of each of a model's weight files; each rank reads a share of them.
inline nlohmann::ordered_json identity_of_base(World& world, const std::string& dir) {
    if (is_gguf_file(dir)) return to_json({{"model.gguf", sum_file(dir)}});
    Strings names;
    for (const std::string& name : names_in(dir))
        if (ends_with(name, ".safetensors")) names.push_back(name);
    std::string all;
    for (const std::string& lines : world.all_gather(sum_lines(dir, names, world.rank(), world.size()))) all += lines;
    return to_json(sums_of(all));
}

// The format into which a run quantized the base that its adapters were trained on.
inline WeightFormat format_of_base(const std::string& adapter) try {
    const std::string path = adapter + "/base.json";
    if (!file_exists(path)) return WeightFormat::none;
    const std::string word = read_json(path).value("quantized", std::string("none"));
    for (const WeightFormatRow& row : weight_formats)
        if (word == row.word) return row.value;
    fail("%s: the base was quantized to '%s'; supported are %s", path.c_str(), word.c_str(),
         joined(weight_format_words()).c_str());
} catch (const nlohmann::json::exception& e) {
    fail_damaged(adapter + "/base.json", json_problem(e));
}

inline void refuse_quantized_mixture(const ModelConfig& c) {
    refuse_together(c.quantized() && c.mixture.on(), format("--quantize-base %s", weight_format_row(c.base_format).word),
                    "a mixture of experts", "its experts cannot be quantized yet", "omit --quantize-base");
}

// Rejects a base whose weights differ from the ones that the adapters were trained on.
inline void check_base(World& world, const std::string& adapter, const std::string& base) try {
    const std::string path = adapter + "/base.json";
    if (!file_exists(path)) return;
    const auto recorded = nlohmann::ordered_json(read_json(path));
    if (recorded.value("files", nlohmann::ordered_json()) == identity_of_base(world, base)) return;
    fail(
        "the weights of %s are not the ones that the adapters %s were trained on (%s, by the checksums in %s); HINT: --model "
        "with that model",
        base.c_str(), adapter.c_str(), recorded.value("path", std::string("a model without a name")).c_str(), path.c_str());
} catch (const nlohmann::json::exception& e) {
    fail_damaged(adapter + "/base.json", json_problem(e));
}

// ---- adapter_config.json ----------------------------------------------------------------------------------------------------

// The directory of the adapters' base, by its path or by its name in Hugging Face's cache.
inline std::string base_of_adapter(const std::string& dir) {
    const nlohmann::json j = read_json(dir + adapter_config_file);
    const nlohmann::json name = j.is_object() ? j.value("base_model_name_or_path", nlohmann::json()) : nlohmann::json();
    const std::string base = name.is_string() ? name.get<std::string>() : "";
    if (is_folder(base)) return base;
    if (is_gguf_file(base)) return gguf_directory(base);
    if (const std::string snapshot = hub_snapshot(base); !snapshot.empty()) return snapshot;
    fail("the base model of the adapters %s is missing at %.500s; HINT: --model DIR", dir.c_str(), name.dump().c_str());
}

namespace detail {

inline std::string base_name(const nlohmann::json& j) {
    const nlohmann::json name = j.value("base_model_name_or_path", nlohmann::json());
    return name.is_string() ? name.get<std::string>() : "BASE";
}
// "rank_pattern" or "alpha_pattern" of PEFT: values by the ends of matrices' names; the first that fits counts. PEFT reads keys
// as regular expressions; here they are names, perhaps with a ^ or .*\. in front or with escaped dots.
class LoraPattern {
public:
    LoraPattern(const nlohmann::ordered_json& config, const char* key, const std::string& path) {
        const nlohmann::ordered_json j = config.value(key, nlohmann::ordered_json());
        if (j.is_null()) return;
        if (!j.is_object()) fail("%s: '%s' is %.200s; it must be an object", path.c_str(), key, j.dump().c_str());
        for (const auto& [name, value] : j.items()) {
            std::string plain;
            for (size_t i = name[0] == '^' ? 1 : begins_with(name, ".*\\.") ? 4 : 0; i < name.size(); i++)
                if (name[i] != '\\' || name[i + 1] != '.') plain += name[i];
            if (plain.find_first_of("\\*+?[](){}|^$") != std::string::npos)
                fail_unsupported("%s: '%s' has the regular expression '%.200s'; only names of matrices are supported",
                                 path.c_str(), key, name.c_str());
            const bool rank = std::string(key) == "rank_pattern";
            const double x = value.is_number() ? value.get<double>() : NAN;
            if (!(rank ? x >= 1 && x <= 1e6 && x == std::floor(x) : std::abs(x) <= 1e6))
                fail("%s: '%s' has the value %.200s; it must be %s", path.c_str(), key, value.dump().c_str(),
                     rank ? "a whole number from 1 to 1000000" : "from -1000000 to 1000000");
            values_.push_back({plain, name[0] == '^', x});
        }
    }
    // matrix: its name in the file.
    double of(const std::string& matrix, double usual) const {
        const std::string front = "base_model.model.";
        const std::string name = begins_with(matrix, front) ? matrix.substr(front.size()) : matrix;
        for (const Value& v : values_)
            if (name == v.name || (!v.whole && ends_with(name, "." + v.name))) return v.value;
        return usual;
    }

private:
    struct Value {
        std::string name;
        bool whole;  // not only its end
        double value;
    };
    std::vector<Value> values_;
};

// The layers that have adapters, by PEFT's "layers_to_transform": a number or several; null and [] leave it to the matrices.
inline std::optional<std::set<int>> listed_layers(const HfReader& in) {
    const char* key = "layers_to_transform";
    if (in.absent(key) || (in.j[key].is_array() && in.j[key].empty())) return std::nullopt;
    std::set<int> layers;
    for (const nlohmann::json& layer : in.j[key].is_array() ? in.j[key] : nlohmann::json::array({in.j[key]})) {
        if (!layer.is_number_integer() || layer < 0 || layer > 1 << 28) in.wrong(key, "a list of layers, from 0");
        layers.insert((int)layer);
    }
    return layers;
}

// Whether a name in "target_modules" is this matrix of a layer. matrix: its layer and its name, "3.self_attn.q_proj".
inline bool names_matrix(const nlohmann::json& target, const std::string& matrix) {
    const std::string name = "." + target.get<std::string>(), whole = "." + matrix;
    return ends_with(whole, name) || ends_with(name, whole);
}
inline bool names_matrix_of_list(const nlohmann::json& targets, const std::string& matrix) {
    return std::any_of(targets.begin(), targets.end(), [&](const auto& target) { return names_matrix(target, matrix); });
}
// Whether "target_modules" names this matrix. False for a regular expression, which leaves it to the file.
inline bool is_target(const nlohmann::json& config, const std::string& matrix) {
    const nlohmann::json targets = config.value("target_modules", nlohmann::json());
    if (targets == "all-linear") return true;
    const bool excludes = config.contains("exclude_modules") && !config["exclude_modules"].empty();
    return targets.is_array() && !excludes && names_matrix_of_list(targets, matrix);
}
// Names of matrices in PEFT's form: a list, or a text that is a regular expression.
inline void check_names(const HfReader& in, const char* key) {
    if (in.absent(key)) return;
    const nlohmann::json& names = in.j[key];
    const auto is_name = [](const nlohmann::json& name) {
        return name.is_string() && !name.get_ref<const std::string&>().empty();
    };
    if (!is_name(names) && !(names.is_array() && std::all_of(names.begin(), names.end(), is_name)))
        in.wrong(key, "a list of names of matrices, or a string");
}

[[noreturn]] inline void refuse_adapters_of(const HfReader& in, const char* key) {
    const std::string dir = std::filesystem::path(in.source).parent_path().string();
    fail_unsupported(
        "%s: '%s' %.200s is not supported; HINT: PEFT merges such adapters into their model: python3 -c \"from peft "
        "import AutoPeftModelForCausalLM as M; M.from_pretrained('%s').merge_and_unload().save_pretrained('%s-merged')"
        "\"; cp %s/*token* %s-merged; then --model %s-merged, without --adapter",
        in.source.c_str(), key, in.j[key].dump().c_str(), dir.c_str(), dir.c_str(), base_name(in.j).c_str(), dir.c_str(),
        dir.c_str());
}
// Rejects features of PEFT that adapters here do not have.
inline void refuse_other_adapters(const HfReader& in) {
    const nlohmann::json& j = in.j;
    in.only("bias", "none");
    for (const char* key : {"use_dora", "use_qalora", "lora_bias"}) in.only(key, false);
    for (const char* key : {"modules_to_save", "layer_replication", "trainable_token_indices", "alora_invocation_tokens",
                            "use_bdlora", "arrow_config", "kasa_config", "velora_config", "monteclora_config"})
        if (!in.absent(key) && !j[key].empty()) refuse_adapters_of(in, key);
    in.text("base_model_name_or_path", "");  // reports another type
    for (const char* key : {"target_modules", "exclude_modules"}) check_names(in, key);
    if (!in.absent("init_lora_weights") && !j["init_lora_weights"].is_boolean() && !j["init_lora_weights"].is_string())
        in.wrong("init_lora_weights", "true, false or a string");
    if (const nlohmann::json start = j.value("init_lora_weights", nlohmann::json()); start.is_string())
        for (const char* changes : {"pissa", "olora", "loftq", "corda", "lora_ga"})  // these also change the base
            if (start.get<std::string>().find(changes) == 0)
                fail("%s: 'init_lora_weights' is \"%s\", which changes the model that is adapted; it is not supported",
                     in.source.c_str(), start.get<std::string>().c_str());
}
inline LoraConfig read_lora_numbers(const HfReader& in) {
    LoraConfig lora;
    lora.rank = in.count("r");
    refuse_value<Error>(lora.rank < 1, in.source + ": 'r'", lora.rank, "at least 1");
    lora.alpha = in.number("lora_alpha", 8);
    refuse_value<Error>(!(std::abs(lora.alpha) <= 1e6), in.source + ": 'lora_alpha'", lora.alpha, "from -1000000 to 1000000");
    lora.dropout = in.number("lora_dropout", 0);
    refuse_value<Error>(!(lora.dropout >= 0 && lora.dropout <= 0.99), in.source + ": 'lora_dropout'", lora.dropout,
                        "from 0 to 0.99");
    lora.rank_stabilized = in.flag("use_rslora", false);
    return lora;
}

// The modules of c that "target_parameters" names, in the order of the layer. Each must have its adapter in all layers, so that
// the names of their tensors, which depend on it (lora.h), do not differ between layers.
inline std::vector<std::string> target_parameters(const HfReader& in, const ModelConfig& c) {
    const char* key = "target_parameters";
    if (in.absent(key) || in.j[key].empty()) return {};
    const std::vector<LoraTarget> targets = lora_targets(c);
    std::map<std::string, std::set<int>> layers;
    for (const nlohmann::json& parameter : in.j[key]) {
        size_t fits = 0;
        for (const LoraTarget& t : targets)
            for (const int layer : t.layers) {
                const std::string matrix = "model.layers." + std::to_string(layer) + "." + t.module;
                if (!t.parameter || !parameter.is_string() || !names_matrix(parameter, matrix)) continue;
                layers[t.module].insert(layer);
                fits++;
            }
        if (!fits) refuse_adapters_of(in, key);
    }
    std::vector<std::string> modules;
    for (const LoraTarget& t : targets) {
        if (!layers.count(t.module)) continue;
        if (layers[t.module].size() != t.layers.size()) refuse_adapters_of(in, key);
        modules.push_back(t.module);
    }
    return modules;
}

// The matrix A of an adapter in a file: the names of the tensor and of the matrix that it adapts.
struct LoraA {
    std::string name, matrix;
    int64_t rank;
};
// All of them by the layer and the name of the matrix, "3.self_attn.q_proj". Each must have its other half.
inline std::map<std::string, LoraA> adapters_in(const SafetensorsReader& files, const std::string& weights) {
    std::map<std::string, LoraA> found;
    for (const auto& [name, view] : files.tensors()) {
        for (const auto& [one, other] : {std::pair(".lora_A.", ".lora_B."), {".lora_B.", ".lora_A."}})
            if (const size_t at = name.find(one); at != std::string::npos)
                if (const std::string pair = std::string(name).replace(at, strlen(other), other); !files.find(pair))
                    fail("%s has the tensor '%s', but no '%s'; HINT: copy or download it again", weights.c_str(), name.c_str(),
                         pair.c_str());
        const size_t end = name.find(".lora_A.");
        if (end == std::string::npos) continue;
        const std::string matrix = name.substr(0, end);
        for (size_t dot = matrix.find('.'); dot != std::string::npos; dot = matrix.find('.', dot + 1))
            if (isdigit(matrix[dot + 1])) {
                found[matrix.substr(dot + 1)] = {name, matrix, view.shape.empty() ? 0 : view.shape[0]};
                break;  // the number of an expert may follow
            }
    }
    return found;
}

// LoRA's configuration from adapter_config.json, and the adapters that the file `weights` has for the model c.
inline LoraConfig read_lora(const HfReader& in, const std::string& weights, const ModelConfig& c) {
    const nlohmann::json& j = in.j;
    const std::string& path = in.source;
    refuse_other_adapters(in);
    LoraConfig lora = read_lora_numbers(in);
    ModelConfig adapted = c;
    adapted.lora.on_parameters = !in.absent("target_parameters") && !j["target_parameters"].empty();
    lora.on_parameters = adapted.lora.on_parameters && !family_of(c).names.stacks_experts;
    adapted.lora.modules = target_parameters(in, adapted);
    const nlohmann::ordered_json ordered = nlohmann::ordered_json::parse(read_whole_file(path));
    const LoraPattern ranks(ordered, "rank_pattern", path), alphas(ordered, "alpha_pattern", path);
    const std::optional<std::set<int>> listed = listed_layers(in);
    const double usual = lora.scale() != 0 ? lora.scale() : 1;
    const std::map<std::string, LoraA> in_file = adapters_in(SafetensorsReader::open(weights), weights);
    if (const nlohmann::json targets = j.value("target_modules", nlohmann::json());
        targets.is_array() && !adapted.lora.on_parameters)
        for (const auto& [matrix, a] : in_file)  // PEFT ignores such adapters, with a warning
            if (!names_matrix_of_list(targets, matrix))
                fail(
                    "%s: 'target_modules' is %.200s, which does not name %s, but %s has an adapter of it; "
                    "HINT: correct the list",
                    path.c_str(), targets.dump().c_str(), matrix.c_str(), weights.c_str());
    // The adapter of a matrix; its rank is 0 if the file has none.
    const auto adapter_of = [&](int layer, const std::string& module, const LoraTarget& t) {
        LoraInFile adapter = {std::to_string(layer) + "." + (t.parameter ? module_of_parameter(adapted, module) : module)};
        const bool named =
            t.parameter ? is_adapted(adapted, module) : (!listed || listed->count(layer)) && is_target(j, adapter.matrix);
        const auto found = t.parameter && !named ? in_file.end() : in_file.find(adapter.matrix);
        if (found == in_file.end() && named)
            fail("%s has no adapter for %s of layer %d, which '%s' in %s names; HINT: copy or download it again",
                 weights.c_str(), module.c_str(), layer, t.parameter ? "target_parameters" : "target_modules", path.c_str());
        if (found == in_file.end()) return adapter;
        const LoraA& a = found->second;
        const std::string matrix = t.parameter ? "model.layers." + std::to_string(layer) + "." + module : a.matrix;
        adapter.rank = (int)ranks.of(matrix, lora.rank);
        const int many = t.parameter ? c.mixture.experts : 1;
        if (a.rank != (int64_t)many * adapter.rank)  // before the model is planned for a rank that it lacks
            fail("%s: tensor '%s' has rank %lld; %s gives it rank %d%s", weights.c_str(), a.name.c_str(), (long long)a.rank,
                 path.c_str(), adapter.rank, many > 1 ? format(" for each of %d experts", many).c_str() : "");
        adapter.factor = alphas.of(matrix, lora.alpha) / lora.divisor(adapter.rank) / usual;
        return adapter;
    };
    std::vector<LoraInFile> adapters;
    for (const LoraTarget& t : lora_targets(adapted)) {
        std::vector<LoraInFile> of_target;
        for (const int layer : t.layers)
            for (const std::string& module : t.matrices()) of_target.push_back(adapter_of(layer, module, t));
        if (std::none_of(of_target.begin(), of_target.end(), [](const LoraInFile& a) { return a.rank > 0; })) continue;
        lora.modules.push_back(t.module);
        for (const LoraInFile& adapter : of_target) {
            if (listed && !t.parameter && (listed->count(atoi(adapter.matrix.c_str())) > 0) != (adapter.rank > 0))
                fail("%s: 'layers_to_transform' is %.200s, but %s has %s adapter of %s", path.c_str(),
                     j["layers_to_transform"].dump().c_str(), weights.c_str(), adapter.rank > 0 ? "an" : "no",
                     adapter.matrix.c_str());
            adapters.push_back(adapter);
        }
    }
    if (lora.modules.empty())
        fail("%s has no adapter for a layer of this %s model; HINT: --model with the model that it adapts", weights.c_str(),
             c.family.c_str());
    const auto differs = [&](const LoraInFile& a) { return a.rank != lora.rank || a.factor != 1; };
    if (std::any_of(adapters.begin(), adapters.end(), differs)) {
        lora.rank = std::max_element(adapters.begin(), adapters.end(), [](const LoraInFile& a, const LoraInFile& b) {
                        return a.rank < b.rank;
                    })->rank;
        lora.alpha = usual * lora.divisor(lora.rank);
        lora.in_files = adapters;
    }
    return lora;
}

inline VirtualTokensConfig read_virtual_tokens(const HfReader& in, bool encoded, const ModelConfig& c) {
    in.only("task_type", "CAUSAL_LM");
    in.only("num_transformer_submodules", 1);
    if (!in.absent("modules_to_save") && !in.j["modules_to_save"].empty()) in.unsupported("modules_to_save", "null");
    VirtualTokensConfig found;
    found.count = in.count("num_virtual_tokens");
    check_virtual_tokens_of(c);
    if (found.count < 1 || found.count >= c.T)
        fail("%s: 'num_virtual_tokens' is %d; it must be at least 1 and leave room in the model's longest sequence, %d",
             in.source.c_str(), found.count, c.T);
    if (encoded) {
        const std::string type = in.text("encoder_reparameterization_type", "MLP");
        found.lstm = type == "LSTM";
        if (!found.lstm && type != "MLP") in.unsupported("encoder_reparameterization_type", "MLP and LSTM");
        found.encoder_width = in.count("encoder_hidden_size");
    } else found.text = in.text("prompt_tuning_init_text", "");
    return found;
}

}  // namespace detail

// Reads the adapters of a directory for this model into c. Rejects by name any setting that would compute something else here.
inline void read_adapter_config(const std::string& dir, ModelConfig& c) {
    const std::string path = dir + adapter_config_file, weights = dir + "/adapter_model.safetensors";
    const nlohmann::json j = read_json(path);
    if (!j.is_object()) fail("%s does not hold a JSON object", path.c_str());
    if (!file_exists(weights))
        fail_unsupported(
            "%s has no adapter_model.safetensors%s; HINT: python3 -c \"from peft import AutoPeftModelForCausalLM as M; "
            "M.from_pretrained('%s').save_pretrained('%s-safetensors')\" writes it",
            dir.c_str(), file_exists(dir + "/adapter_model.bin") ? " but a pickle, adapter_model.bin" : "", dir.c_str(),
            dir.c_str());
    const detail::HfReader in{j, path};
    const std::string type = in.text("peft_type", "");
    if (type == "LORA") c.lora = detail::read_lora(in, weights, c);
    else if (type == "PROMPT_TUNING" || type == "P_TUNING")
        c.virtual_tokens = detail::read_virtual_tokens(in, type == "P_TUNING", c);
    else fail("%s: peft_type is '%s'; LORA, PROMPT_TUNING and P_TUNING are supported", path.c_str(), type.c_str());
}

// PEFT finds matrices by the ends of their names: uses the last word of a module unless a matrix without adapter also ends in
// it, such as one of a shared expert. (With transformers 5, which stacks experts, PEFT 0.21 converts names and files of
// adapters on all matrices of experts.)
inline std::vector<std::string> peft_modules(const ModelConfig& c) {
    const std::vector<LoraTarget> targets = lora_targets(c);
    const auto target_of = [&](const std::string& module) {
        return *std::find_if(targets.begin(), targets.end(), [&](const LoraTarget& t) { return t.module == module; });
    };
    std::vector<std::string> names;
    const ParameterTable model(c);
    for (const std::string& module : c.lora.modules) {
        if (target_of(module).parameter) continue;
        const std::string last = module.substr(module.find_last_of('.') + 1);
        bool unique = true;
        for (const LoraTarget& t : targets) {
            const bool chosen = std::find(c.lora.modules.begin(), c.lora.modules.end(), t.module) != c.lora.modules.end();
            unique = unique && (chosen || t.names[1] != last);
        }
        for (const TensorSpec& spec : model.rows)
            for (const HfTensor& t : spec.hf)
                unique = unique && !(spec.of_mixture && !detail::matrix_of(spec) && ends_with(t.name, "." + last + ".weight"));
        for (const std::string& name : unique ? std::vector<std::string>{last} : target_of(module).matrices())
            if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
    }
    return names;
}

// Adapted parameters of all experts, which PEFT finds by the ends of their names.
inline std::vector<std::string> peft_parameters(const ModelConfig& c) {
    std::vector<std::string> names;
    for (const LoraTarget& t : lora_targets(c))
        if (t.parameter && detail::is_adapted(c, t.module)) names.push_back(t.module);
    return names;
}

inline nlohmann::ordered_json lora_json(const ModelConfig& c, const std::string& base) {
    const bool transposed = family_of(c).names.transposed;
    const std::vector<std::string> parameters = peft_parameters(c);
    return {{"peft_type", "LORA"},
            {"task_type", "CAUSAL_LM"},
            {"base_model_name_or_path", base},
            {"r", c.lora.rank},
            {"lora_alpha", c.lora.alpha},
            {"lora_dropout", c.lora.dropout},
            {"use_rslora", c.lora.rank_stabilized},
            {"target_modules", peft_modules(c)},
            {"target_parameters", parameters.empty() ? nlohmann::ordered_json() : nlohmann::ordered_json(parameters)},
            {"bias", "none"},
            {"fan_in_fan_out", transposed},
            {"init_lora_weights", true},
            {"modules_to_save", nullptr},
            {"inference_mode", true}};
}
inline nlohmann::ordered_json virtual_tokens_json(const ModelConfig& c, const std::string& base) {
    const VirtualTokensConfig& config = c.virtual_tokens;
    nlohmann::ordered_json j = {{"peft_type", config.encoded() ? "P_TUNING" : "PROMPT_TUNING"},
                                {"task_type", "CAUSAL_LM"},
                                {"base_model_name_or_path", base},
                                {"num_virtual_tokens", config.count},
                                {"token_dim", c.C},
                                {"num_transformer_submodules", 1},
                                {"num_attention_heads", c.NH},
                                {"num_layers", c.L}};
    if (config.encoded()) {
        j["encoder_reparameterization_type"] = config.lstm ? "LSTM" : "MLP";
        j["encoder_hidden_size"] = config.encoder_width;
        j["encoder_num_layers"] = 2;  // of the LSTM; PEFT also writes it for its MLP, regardless of the number of layers
        j["encoder_dropout"] = 0.0;
    } else if (config.text.empty()) j["prompt_tuning_init"] = "SAMPLE_VOCAB";
    else {
        j["prompt_tuning_init"] = "TEXT";
        j["prompt_tuning_init_text"] = config.text;
        j["tokenizer_name_or_path"] = base;
    }
    j["inference_mode"] = true;
    return j;
}

// The files of an adapter directory besides the tensors: includes the base's tokenizer.
inline void add_adapter_texts(World& world, ModelTexts& texts, const ModelConfig& c, const std::string& base) {
    const std::string path = lasting_path(base);
    texts.files.erase("generation_config.json");
    texts.files["adapter_config.json"] = (c.lora.on() ? lora_json(c, path) : virtual_tokens_json(c, path)).dump(2) + "\n";
    nlohmann::ordered_json identity = {{"path", path}, {"files", identity_of_base(world, base)}};
    if (c.quantized()) identity["quantized"] = weight_format_row(c.base_format).word;
    texts.files["base.json"] = identity.dump(2) + "\n";
}

// Initializes adapters on the model in `base`. Virtual tokens start as a text's token embeddings, repeated as needed, or as
// tokens drawn from the vocabulary.
inline void begin_adapters(be::Ctx& ctx, const TrainingMemory& m, const std::string& base, const Tokenizer* tokenizer,
                           uint64_t seed) {
    const VirtualTokensConfig& config = m.c.virtual_tokens;
    if (!config.on() || config.encoded()) return initialize_adapters(ctx, m, seed);
    const std::vector<int> text = config.text.empty() ? std::vector<int>() : tokenizer->encode_prompt(config.text);
    if (!config.text.empty() && text.empty()) fail_usage("--prompt-init-text has no tokens; HINT: another text");
    std::vector<int> tokens((size_t)config.count);
    for (size_t i = 0; i < tokens.size(); i++)
        tokens[i] = text.empty() ? (int)(m.c.V * uniform_at(seed, RngPurpose::init, 0, i)) : text[i % text.size()];
    initialize_virtual_tokens(ctx, m, base, tokens);
}

// The model of --model and --adapter, for commands that do not train.
struct AdaptedModel {
    std::string dir{}, adapter{};  // adapter: empty if there is none
    ModelConfig c{};
};
// Resolves the model; either of --model and --adapter may be missing.
template <class Options>
AdaptedModel find_model(World& world, const Options& o) {
    AdaptedModel found;
    refuse_gguf_on_ranks(world, o.model);
    if (!o.adapter.empty()) {
        if (is_regular(o.adapter)) fail("--adapter is %s, a file; it must be a directory of adapters", o.adapter.c_str());
        found.adapter = model_directory(o.adapter);
        if (!is_adapter(found.adapter))
            fail("--adapter: %s holds no adapters (adapter_config.json)%s", found.adapter.c_str(),
                 file_exists(found.adapter + "/config.json")
                     ? ", but a model; HINT: --model takes it"
                     : "; HINT: give the output directory of a run with --lora-rank or --prompt-tokens, or PEFT's");
    }
    if (!o.model.empty()) found.dir = model_directory(o.model);
    else if (!found.adapter.empty()) found.dir = base_of_adapter(found.adapter);
    else refuse_missing(true, "the model", "--model DIR");
    found.c = read_config(found.dir);
    if (world.rank() == 0) note_odd_keys(found.dir);
    check_weights(world, found.dir);
    if (!found.c.coded.empty()) found.c.base_format = WeightFormat::gguf;
    if (found.adapter.empty()) return found;
    check_weights(world, found.adapter);
    check_base(world, found.adapter, found.dir);
    read_adapter_config(found.adapter, found.c);
    found.c.virtual_tokens = found.c.virtual_tokens.computed();
    found.c.base_format = format_of_base(found.adapter);
    return found;
}
