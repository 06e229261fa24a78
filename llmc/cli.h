// The command line: `train_gpt COMMAND --option value ...`, built from the rows of config.h with CLI11, which splits arguments,
// reads --config FILE (TOML, the same names; the command line wins) and lays out --help. Values are parsed and checked here, so
// that a refusal always says what was given and what is allowed; unknown names are answered with the nearest one that exists.
#pragma once
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "check.h"
#include "config.h"

namespace cli {

// Edit distance (Levenshtein), for suggestions.
inline size_t distance(const std::string& a, const std::string& b) {
    std::vector<size_t> row(b.size() + 1);
    for (size_t j = 0; j <= b.size(); j++) row[j] = j;
    for (size_t i = 1; i <= a.size(); i++) {
        size_t diagonal = row[0];
        row[0] = i;
        for (size_t j = 1; j <= b.size(); j++) {
            const size_t substituted = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[j];
            row[j] = std::min({substituted, row[j] + 1, row[j - 1] + 1});
        }
    }
    return row[b.size()];
}

inline std::string nearest(const std::string& given, const std::vector<std::string>& names) {
    return *std::min_element(names.begin(), names.end(), [&](const std::string& a, const std::string& b) {
        return distance(given, a) < distance(given, b);
    });
}

inline std::string describe(const Allowed& a, bool whole = false) {
    if (!a.choices.empty()) {
        std::string s = "one of";
        for (const std::string& c : a.choices) s += (s == "one of" ? " " : ", ") + c;
        return s;
    }
    if (a.low == a.high) return format("only %g", a.low);
    const std::string number = whole ? "a whole number" : "a number";
    if (std::isfinite(a.low) && std::isfinite(a.high)) return number + format(" from %.10g to %.10g", a.low, a.high);
    if (std::isfinite(a.low)) return number + format(a.above ? " above %.10g" : " of at least %.10g", a.low);
    return number;
}

inline double number_in_range(const std::string& name, const std::string& text, const Allowed& allowed, bool whole) {
    size_t used = 0;
    double value = NAN;
    try {
        value = std::stod(text, &used);
    } catch (const std::exception&) {
    }
    if (whole && used + 1 == text.size() && used > 0) {  // 10k, 2M, 1B
        const size_t suffix = std::string("kMB").find(text.back());
        if (suffix != std::string::npos) value *= std::pow(1000.0, (double)suffix + 1), used++;
    }
    const bool malformed = used == 0 || used != text.size() || !std::isfinite(value) || (whole && value != std::floor(value));
    const bool outside = value < allowed.low || value > allowed.high || (allowed.above && value == allowed.low);
    if (malformed || outside || (whole && std::abs(value) > 9e15))
        fail("--%s is '%s'; it must be %s", name.c_str(), text.c_str(), describe(allowed, whole).c_str());
    return value;
}

inline void parse_into(const std::string& name, const std::string& text, const Allowed& a, int& value) {
    Allowed narrowed = a;
    narrowed.high = std::min(a.high, (double)std::numeric_limits<int>::max());
    value = (int)number_in_range(name, text, narrowed, true);
}
inline void parse_into(const std::string& name, const std::string& text, const Allowed& a, int64_t& value) {
    value = (int64_t)number_in_range(name, text, a, true);
}
inline void parse_into(const std::string& name, const std::string& text, const Allowed& a, double& value) {
    value = number_in_range(name, text, a, false);
}
inline void parse_into(const std::string& name, const std::string& text, const Allowed& a, OptionalDouble& value) {
    value = number_in_range(name, text, a, false);
}
inline void parse_into(const std::string& name, const std::string& text, const Allowed& a, std::string& value) {
    if (!a.choices.empty() && std::find(a.choices.begin(), a.choices.end(), text) == a.choices.end())
        fail("--%s is '%s'; it must be %s", name.c_str(), text.c_str(), describe(a).c_str());
    value = text;
}

inline std::string default_text(const std::string& s) { return s; }
inline std::string default_text(const Strings& s) { return s.empty() ? "" : s[0]; }
inline std::string default_text(const OptionalDouble&) { return ""; }
template <class Number>
std::string default_text(Number x) {
    return x == 0 ? "" : format("%.10g", (double)x);
}

template <class Value>
void add_option(CLI::App& app, const std::string& name, const std::string& names, Value& value, const Allowed& allowed) {
    CLI::Option* option;
    if constexpr (std::is_same_v<Value, bool>) {
        option = app.add_flag(names, value);
    } else if constexpr (std::is_same_v<Value, Strings>) {
        // Filled here and not by CLI11, which takes brackets, commas and braces in a value for the borders of a list.
        option = app.add_option(names, [&value](const CLI::results_t& given) { return value = given, true; });
        if (allowed.values > 0) option->expected(allowed.values);
        else option->expected(1, 1 << 20);
        option->type_name(allowed.values > 1 ? "VALUE x " + std::to_string(allowed.values) : "VALUE ...");
    } else {
        option = app.add_option_function<std::string>(
            names, [&value, name, allowed](const std::string& text) { parse_into(name, text, allowed, value); });
        std::string type = std::is_same_v<Value, std::string>                                       ? "TEXT"
                           : std::is_same_v<Value, double> || std::is_same_v<Value, OptionalDouble> ? "NUMBER"
                                                                                                    : "COUNT";
        if (!allowed.choices.empty()) {
            type = "";
            for (const std::string& c : allowed.choices) type += (type.empty() ? "{" : ",") + c;
            type += "}";
        }
        option->type_name(type);
        option->take_last();  // a later value wins, so that a script's options can be overridden behind them
    }
    const std::string shown = default_text(value);
    if (!shown.empty() && !std::is_same_v<Value, bool>) option->default_str(shown);
}

// Fills `options` from the arguments after the command's name. Prints help and returns false if that was asked for.
template <class Options>
bool parse(const std::string& command, const std::string& purpose, Options& options, std::vector<std::string> arguments) {
    CLI::App app(purpose, "train_gpt " + command);
    app.get_formatter()->column_width(46);
    app.set_help_flag("-h,--help", "this text")->group("Run");
    app.set_config("--config", "", "file with options (TOML: micro-batch-size = 4)", false)->group("Run");
    app.allow_config_extras(CLI::config_extras_mode::error);
    std::vector<std::string> known = {"config", "help"};
    for_each_option(options, [&](const char* field, const char* alias, auto& value, const Allowed& allowed, const char* group,
                                 const char* help) {
        const std::string name = option_name(field);
        known.push_back(name);
        std::string names = "--" + name;
        if (*alias) names += std::string(",--") + alias, known.push_back(alias);
        add_option(app, name, names, value, allowed);
        app.get_option("--" + name)->description(help)->group(group);
    });
    std::reverse(arguments.begin(), arguments.end());  // CLI11 takes them from the back
    try {
        app.parse(arguments);
    } catch (const CLI::CallForHelp&) {
        printf("%s", app.help().c_str());
        return false;
    } catch (const CLI::ExtrasError&) {
        std::string extra = app.remaining().empty() ? "?" : app.remaining().front();
        const std::string bare = extra.substr(std::min(extra.size(), extra.find_first_not_of('-')));
        fail("'%s' is not an option of %s; did you mean --%s? HINT: train_gpt %s --help lists them all", extra.c_str(),
             command.c_str(), nearest(bare.substr(0, bare.find('=')), known).c_str(), command.c_str());
    } catch (const CLI::ConfigError& e) {
        const std::string text = e.what(), given = text.substr(text.find_last_of(' ') + 1);
        fail("the config file has an entry that is not an option of %s: '%s'; did you mean %s?", command.c_str(), given.c_str(),
             nearest(given, known).c_str());
    } catch (const CLI::FileError& e) {
        fail("cannot read the config file: %s", e.what());
    } catch (const CLI::ParseError& e) {
        fail("%s; HINT: train_gpt %s --help", e.what(), command.c_str());
    }
    return true;
}

}  // namespace cli
