// Options as a file for `train --config`, written by tune and sweep.
#pragma once
#include <filesystem>
#include <fstream>
#include <set>
#include <string>

#include "../base/check.h"
#include "../base/text.h"
#include "options.h"

inline std::string toml_value(const std::string& text) {
    std::string out = "\"";
    for (const char c : text)
        out += c == '\n' ? "\\n" : c == '\t' ? "\\t" : c == '"' || c == '\\' ? std::string("\\") + c : std::string(1, c);
    return out + "\"";
}
inline std::string toml_value(bool value) { return value ? "true" : "false"; }
// The shortest decimal that parses to the same number.
inline std::string toml_value(double value) {
    const std::string few = format("%.15g", value);
    return strtod(few.c_str(), nullptr) == value ? few : format("%.17g", value);
}

inline std::string toml_value(const OptionalDouble& value) { return toml_value(value.value_or(0)); }
inline std::string toml_value(int value) { return std::to_string(value); }
inline std::string toml_value(int64_t value) { return std::to_string(value); }
inline std::string toml_value(const Strings& values) {
    return "[" + joined(values, [](const std::string& value) { return toml_value(value); }) + "]";
}

// The options given in `o`, as lines of a config file, except options of plans and of the search itself.
inline std::string config_text(TrainOptions o) {
    const std::set<std::string> left_out = {"out", "dry-run", "json"};
    std::string text;
    for_each_option(o, [&](const Option& option, auto& value) {
        const std::string name = option_name(option.field);
        if (o.given.count(name) && !left_out.count(name) && std::string(option.group).find("Plan") != 0)
            text += name + " = " + toml_value(value) + "\n";
    });
    return text;
}

// Removes options that apply to a whole run and not to a short trial, which saves nothing.
inline void leave_out_of_trials(TrainOptions& o) {
    for (const char* name : {"resume", "name", "tensorboard", "tensorboard-dir", "prometheus", "exit-after", "keep-every",
                             "snapshot-every", "sample-interval", "eval-tasks", "eval-tasks-interval", "eval-tasks-samples"})
        o.given.erase(name);
    o.save_every = "never";
    o.given.insert("save-every");
    if (o.on_spike == "rollback") o.on_spike = "skip";  // trials have no checkpoint to roll back to
}
