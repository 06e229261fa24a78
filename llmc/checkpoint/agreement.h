// Which options a resumed run may change, and the refusal of others.
#pragma once
#include <map>
#include <string>

#include "../base/json.h"
#include "../base/similar.h"
#include "../base/text.h"
#include "../model/hf_config.h"
#include "../model/model_config.h"
#include "../options/options.h"
#include "training_state.h"

inline const Strings types_of_elements = {"main-grads-dtype", "exp-avg-dtype", "exp-avg-sq-dtype"};
inline bool is_type_of_elements(const std::string& name) {
    return std::find(types_of_elements.begin(), types_of_elements.end(), name) != types_of_elements.end();
}
// An option's value in the checkpoint; `discarded` if it has none. Earlier versions had gradients and moments in fp32 only, no
// optimizer but AdamW, and the standard parametrization; they wrote no global batch if it was a micro-batch of each rank.
inline nlohmann::ordered_json saved_option(const TrainingState& saved, const std::string& name) {
    if (name == "global-batch-size" && saved.options.value(name, 0) == 0)
        return saved.options.value("micro-batch-size", 1) * saved.layout.value("dp", 1);
    if (saved.options.contains(name)) return saved.options[name];
    if (name == "optimizer") return "adamw";
    if (name == "parametrization") return "standard";
    if (name == "quantize-base") return "none";
    return is_type_of_elements(name) ? "fp32" : nlohmann::ordered_json(nlohmann::ordered_json::value_t::discarded);
}
// True if the option changes gradients or a moment to a type that represents all previous values, so that nothing is lost.
inline bool widens(const std::string& name, const nlohmann::ordered_json& before, const nlohmann::ordered_json& now) {
    return is_type_of_elements(name) && (now == "fp32" || (now == "bf16" && before == "fp8"));
}

// True if the loss that balances a mixture's experts is computed per micro-batch, as in Megatron-LM.
inline bool balances_micro_batches(const TrainOptions& o) {
    return o.moe_router_load_balancing_type == "aux_loss" && o.moe_aux_loss_coeff > 0;
}

// Compares data_identity (resume.h). Checkpoints older than its checksums are compared without them.
inline bool same_data(const nlohmann::ordered_json& saved, nlohmann::ordered_json now) {
    if (saved.is_array() && saved.size() == now.size())
        for (size_t i = 0; i < now.size(); i++)
            if (!saved[i].contains("crc32c")) now[i].erase("crc32c");
    return saved == now;
}

// Options that must agree with the checkpoint's: ones that change the computation.
inline bool must_agree(const std::string& name, const std::string& group) {
    const bool dropout = name == "attention-dropout" || name == "hidden-dropout" || name == "embedding-dropout";
    return dropout || group == "Data" || group == "Batch and length" || group == "Optimizer" || group == "FP8" ||
           group == "Preferences" || name == "quantize-base";
}
inline void check_overrides(const TrainOptions& o) {
    Strings known = {"data-path", "data-order", "precision"};
    TrainOptions walked = o;
    for_each_option(walked, [&](const Option& option, auto&) {
        if (const std::string name = option_name(option.field); must_agree(name, option.group)) known.push_back(name);
    });
    for (const std::string& name : o.override)
        if (std::find(known.begin(), known.end(), name) == known.end())
            fail_usage(
                "--override names '%s', which is not an option that must agree with a checkpoint%s HINT: lr, for example",
                name.c_str(), did_you_mean(name, known).c_str());
}

// Refuses to resume with options that change the computation, unless --override names them. Options of the groups "Run" and
// "Checkpoint" may change, and so may options that only affect how the same result is computed or where files are; the model's
// are compared by the resulting configurations, which do not include dropout. `order_problem`: from DataLoader, for the planned
// number of samples.
inline void check_agreement(const TrainingState& saved, const TrainOptions& now, const nlohmann::ordered_json& data,
                            const std::string& order_problem, const Strings& overrides) {
    const auto overridden = [&](const std::string& name) {
        return std::find(overrides.begin(), overrides.end(), name) != overrides.end();
    };
    const Strings free = {"micro-batch-size",         "data-path",        "valid-data-path", "tokenizer",
                          "no-fp8-fast-accumulation", "fp8-fast-backward"};
    const nlohmann::ordered_json options = as_written(options_to_json(now));
    TrainOptions walked = now;
    for_each_option(walked, [&](const Option& option, auto&) {
        const std::string name = option_name(option.field);
        if (!must_agree(name, option.group)) return;
        const nlohmann::ordered_json before = saved_option(saved, name);
        // Which choices a capacity drops depends on the micro-batches, and so does a balance loss of each.
        const bool in_micro_batches =
            name == "micro-batch-size" && (now.moe_expert_capacity_factor > 0 || balances_micro_batches(now));
        const bool is_free = !in_micro_batches && std::find(free.begin(), free.end(), name) != free.end();
        if (is_free || before.is_discarded() || overridden(name)) return;
        if (before != options[name] && name == "global-batch-size")
            fail(
                "the global batch is %s, the checkpoint was written with %s, and changing it changes the run. HINT: "
                "--global-batch-size %s keeps it, --override %s continues with yours",
                counted(now.global_batch_size, "sample").c_str(), json_text(before).c_str(), json_text(before).c_str(),
                name.c_str());
        if (before != options[name] && !widens(name, before, options[name]))
            fail(
                "--%s is %s; the checkpoint was written with %s, and changing it changes the run. HINT: --override %s "
                "continues with your value",
                name.c_str(), json_text(options[name]).c_str(), json_text(before).c_str(), name.c_str());
    });
    if (saved.length.steps > 0 && !now.time_budget.empty() && saved_option(saved, "time-budget") != options["time-budget"])
        fail(
            "--time-budget is %s; the run was to end after %s and has already chosen its length of %lld steps for the decay. "
            "HINT: the original budget, or --resume an older checkpoint from before that choice",
            json_text(options["time-budget"]).c_str(), json_text(saved_option(saved, "time-budget")).c_str(),
            (long long)saved.length.steps);
    if (!same_data(saved.data, data) && !overridden("data-path"))
        fail(
            "the data differs from the checkpoint's: documents, tokens, the checksum of the first and last tokens, and "
            "weights are %s, were %s. HINT: --override data-path continues with yours",
            json_text(data).c_str(), json_text(saved.data).c_str());
    if (!order_problem.empty() && !overridden("data-path") && !overridden("data-order"))
        fail("%s; --override data-order resumes with the new one", order_problem.c_str());
    const std::string before = saved.layout.value("precision", precision_name);
    if (before != precision_name && !overridden("precision"))
        fail("this program computes in %s, the checkpoint was written in %s. HINT: --override precision continues",
             precision_name, before.c_str());
}

// For the log: differences from the checkpoint that --override allows, and former bf16 types: "lr is 0.001, it was 0.003".
inline std::string describe_overrides(const TrainingState& saved, const TrainOptions& now) {
    const nlohmann::ordered_json options = as_written(options_to_json(now));
    Strings names = now.override;
    for (const std::string& name : types_of_elements)
        if (saved_option(saved, name) != options[name] && std::find(names.begin(), names.end(), name) == names.end())
            names.push_back(name);
    std::string text;
    for (const std::string& name : names) {
        text += (text.empty() ? "" : "; ") + name;
        const nlohmann::ordered_json before = saved_option(saved, name);
        if (!options.contains(name) || before.is_discarded()) continue;
        if (options[name] == before) text += " is " + json_text(options[name]) + " as it was";
        else text += " is " + json_text(options[name]) + ", it was " + json_text(before);
    }
    return text;
}

// The first difference between two model configurations as written to files; empty if there is none.
inline std::string config_difference(const ModelConfig& saved, const ModelConfig& now) {
    ModelConfig as_now = saved;  // dropout is part of training, not of the model
    as_now.embedding_dropout = now.embedding_dropout;
    as_now.attention_dropout = now.attention_dropout;
    as_now.hidden_dropout = now.hidden_dropout;
    const auto a = to_hf_config(as_now, ""), b = to_hf_config(now, "");
    const auto text = [](const auto& config, const std::string& key) {
        return config.contains(key) ? config[key].dump() : "absent";
    };
    for (const auto* config : {&a, &b})  // a key may be in one of them only, such as rope_scaling
        for (const auto& [key, value] : config->items())
            if (text(a, key) != text(b, key))
                return format("'%s' is %s in the checkpoint and %s in the options", key.c_str(), text(a, key).c_str(),
                              text(b, key).c_str());
    return "";
}
