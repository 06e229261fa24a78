// The values of options: text from the command line or a config file, read as the type of the option's field and checked
// against its allowed values. Every error contains the given value and the allowed ones.
//   numbers   10k, 10_000 and 10,000 are the same (numbers.h); a whole number may end in k, M, B or T
//   choices   in any case, with or without dashes: Q8_0 is q8_0, RTX 4090 is rtx-4090
//   paths     ~ and ~user are home directories, also where a shell has not expanded them: in quotes, behind =, in a config file
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "../base/check.h"
#include "../base/file.h"
#include "../base/numbers.h"
#include "../base/similar.h"
#include "../base/utf8.h"
#include "options.h"
#include "help.h"
#include "megatron_names.h"

namespace cli {

// Values of options in other programs, and what to give here instead.
struct OtherValue {
    const char *option, *values, *here;
};
inline const OtherValue other_values[] = {
    {"device", "cuda gpu cpu auto mps rocm cuda:0 cuda:1",
     "it names the GPU of a plan (--world); where the program computes was decided when it was built"},
    {"device", "a100-80gb a100-sxm a100-sxm4 a100-sxm4-80gb", "the A100 with 80 GB is a100"},
    {"device", "h100-80gb h100-sxm h100-sxm5 h100-sxm5-80gb", "the H100 for SXM is h100"},
    {"zero", "4", "--zero 3, which shards parameters, gradients and the optimizer's state, is the last stage"},
    {"eval-interval", "0", "--eval-iters 0 trains without validation"},
    {"top-k", "-1", "0 is every token"},
    {"moe-router-load-balancing-type", "global_aux_loss sinkhorn",
     "aux_loss balances each micro-batch, seq_aux_loss each sequence; balance over batches is not available yet"},
    {"optimizer", "adam adamw_torch adamw_torch_fused adamw_8bit paged_adamw", "adamw"},
};
inline std::string hint_on_value(const std::string& option, const std::string& value) {
    for (const OtherValue& o : other_values)
        if (option == o.option && is_listed(o.values, lower_ascii(value))) return std::string("; HINT: ") + o.here;
    return "";
}

constexpr double largest_count = 9e15;  // doubles are exact up to here

inline std::string describe(Allowed a, bool whole = false) {
    if (whole) a.high = std::min(a.high, largest_count);
    if (!a.choices.empty()) {
        std::string s = "one of";
        for (const std::string& c : a.choices) s += (s == "one of" ? " " : ", ") + c;
        return s;
    }
    if (a.low == a.high) return format("only %g", a.low);
    const std::string number = whole ? "a whole number" : "a number";
    const auto text = [](double x) { return format(x == std::floor(x) ? "%.16g" : "%.10g", x); };
    if (std::isfinite(a.low) && std::isfinite(a.high))
        return (a.or_zero ? "0 or " : "") + number + " from " + text(a.low) + " to " + text(a.high);
    if (std::isfinite(a.low)) return number + format(" of at least %.10g", a.low);
    return number;
}

inline double number_in_range(const std::string& name, const std::string& text, const Allowed& allowed, bool whole) {
    const double value = whole ? typed_count(text) : typed_number(text);
    const bool malformed = !std::isfinite(value) || (whole && value != std::floor(value));
    const bool outside = (value < allowed.low || value > allowed.high) && !(allowed.or_zero && value == 0);
    if (malformed || outside || (whole && std::abs(value) > largest_count))
        fail_usage("--%s is '%s'; it must be %s%s", name.c_str(), text.c_str(), describe(allowed, whole).c_str(),
                   hint_on_value(name, text).c_str());
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

// A choice in any spelling of it: without regard to case, dashes, underscores and blanks.
inline std::string folded_choice(const std::string& text) {
    std::string folded;
    for (const char c : text)
        if (c != '_' && c != '-' && c != ' ') folded += (char)tolower((unsigned char)c);
    return folded;
}
inline void parse_into(const std::string& name, const std::string& text, const Allowed& a, std::string& value) {
    value = text;
    if (a.choices.empty() || std::find(a.choices.begin(), a.choices.end(), text) != a.choices.end()) return;
    for (const std::string& choice : a.choices)
        if (folded_choice(choice) == folded_choice(text)) {
            value = choice;
            return;
        }
    const std::string similar = did_you_mean(lower_ascii(text), a.choices), hint = hint_on_value(name, text);
    fail_usage("--%s is '%s'; it must be %s%s", name.c_str(), text.c_str(), describe(a).c_str(),
               !hint.empty()    ? hint.c_str()
               : similar == ";" ? ""
                                : similar.c_str());
}

// `value` of a path option with its home directory written out; a label before it (LABEL:FILE) stays.
inline std::string path_value(const OptionRow& row, const std::string& value) {
    const std::string metavar = row.allowed.metavar;
    const size_t label = metavar == "LABEL:FILE" ? value.find(':') + 1 : 0;
    const bool path = label || metavar == "DIR" || metavar == "FILE" || metavar == "PATH" || metavar == "PREFIX" ||
                      metavar == "RUN" || metavar == "DIR|auto" || metavar == "LABEL:FILE";
    if (row.name == "out" && value.empty()) fail_usage("--%s is ''; it must be a name; HINT: omit it", row.name.c_str());
    return path ? value.substr(0, label) + expand_home(value.substr(label)) : value;
}

inline void set_value(const OptionRow& row, const Strings& given, bool& value) {
    const std::string text = given.empty() ? "true" : folded_choice(given[0]);
    if (text != "true" && text != "false")
        fail_usage("--%s is '%s'; it must be true or false", row.name.c_str(), given[0].c_str());
    value = text == "true";
}
inline void set_value(const OptionRow& row, const Strings& given, Strings& value) {
    if (!row.allowed.gathers) value.clear();
    for (const std::string& text : given) value.push_back(path_value(row, text));
}
template <class Value>
void set_value(const OptionRow& row, const Strings& given, Value& value) {
    parse_into(row.name, path_value(row, given[0]), row.allowed, value);
}

}  // namespace cli
