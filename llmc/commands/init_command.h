// train_gpt init OPTIONS OF train [--file run.toml]: writes a file for `train --config` and explains each option in it: the
// given ones, those that --size derives from them and, as comments, the common ones that keep their defaults.
#pragma once
#include <algorithm>
#include <cstdio>
#include <map>
#include <memory>
#include <string>

#include "../base/file.h"
#include "../base/terminal.h"
#include "../base/text.h"
#include "../options/config_file.h"
#include "../options/help.h"
#include "../options/options.h"
#include "../options/size_rule.h"
#include "../plan/from_options.h"
#include "../tokenizer/tokenizer.h"

namespace detail {

inline std::map<std::string, std::string> toml_values(TrainOptions o) {
    std::map<std::string, std::string> values;
    for_each_option(o, [&](const Option& option, auto& value) { values[option_name(option.field)] = toml_value(value); });
    return values;
}

inline std::string comment(const std::string& text, const std::string& indent = "") {
    std::string out;
    for (const std::string& line : wrap_text(text, 98)) out += "# " + (out.empty() ? "" : indent) + line + "\n";
    return out;
}

// False for options of plans and of the console.
inline bool is_of_a_run(const Option& option) {
    const std::string name = option_name(option.field);
    return name != "json" && name != "dry-run" && name != "file" && std::string(option.group).find("Plan") != 0;
}

// The options of `o`, in groups. Those that differ from `before` are set, as are the given ones.
inline std::string commented_options(TrainOptions o, const std::map<std::string, std::string>& before) {
    const Strings& common = everyday_options();
    std::map<std::string, cli::OptionRow> rows;
    for (const cli::OptionRow& row : cli::options_of("train")) rows[row.name] = row;
    const auto is_common = [&](const std::string& name) {
        return std::find(common.begin(), common.end(), name) != common.end();
    };
    std::string out, group;
    for_each_option(o, [&](const Option& option, auto& value) {
        const std::string name = option_name(option.field), text = toml_value(value);
        const bool set = o.given.count(name) || text != before.at(name);
        if (!is_of_a_run(option) || !(set || is_common(name))) return;
        if (group != option.group) out += "\n# ---- " + (group = option.group) + " ----\n";
        const cli::OptionRow& row = rows.at(name);
        const bool has_default = row.flag || !row.default_value.empty();
        out += comment(cli::text_of(row)) + (set ? "" : "# ") + name + " = " + (set || has_default ? text : row.metavar) + "\n";
    });
    return out;
}

}  // namespace detail

inline int init_command(const InitOptions& given) {
    check_replaceable(given.file, "init", "--file");
    TrainOptions o = given;
    for_each_option(o, [&](const Option& option, auto&) {  // --world is for the batch
        const std::string name = option_name(option.field);
        if (o.given.count(name) && name != "world" && !detail::is_of_a_run(option))
            fail_usage("--%s is for a start of the run, not for its file; HINT: leave it out, and add it to train --config",
                       name.c_str());
    });
    std::unique_ptr<Tokenizer> tokenizer;
    if (!o.tokenizer.empty()) tokenizer = std::make_unique<Tokenizer>(Tokenizer::load(tokenizer_path(o.tokenizer)));
    const auto configure = [&](const TrainOptions& p) { return configure_model(p, tokenizer.get()); };
    const std::string train = "train_gpt train --config " + shell_word(given.file);
    std::string text =
        "# " + written_by("init") + " for\n#   " + train +
        "\n# The command line overrides it; with --dry-run the run is only planned. Lines like `# name = value` are defaults,"
        "\n# and N, NAME and other words in capitals are for a value.\n";
    if (o.size.empty()) {
        configure(o);  // refuses a model that does not exist
    } else {
        const int replicas = o.world / (o.tensor_model_parallel_size * o.pipeline_model_parallel_size);
        text += "#\n# Derived from the size, by published rules (llmc/OPTIONS.md):\n";
        for (const DerivedRow& row : apply_size(o, std::max(1, replicas), configure))
            text += detail::comment(row.label + ": " + row.text, "  ");
    }
    write_file_atomically(given.file, text + detail::commented_options(o, detail::toml_values(given)));
    printf("%s: options for\n  %s\n", printable(given.file).c_str(), train.c_str());
    return 0;
}
