// The command line: `train_gpt COMMAND --name value ...` and --config FILE, read into the rows of config.h.
//   --name value, --name=value, --list a b c; a flag has no value, or =true or =false; _ in a name is equivalent to -
//   given twice: the later value wins; the config file comes first
//   --no-name revokes an earlier --name, and a flag --name an earlier --no-name; a revoked flag counts as given, so
//   that it is off even if a preset has it; --no-name without a value to revoke is an error
// A config file has lines in TOML's form `name = value`: "text", 'text', bare words, numbers, true, false, ["a", "b"] and #
// comments. Every error contains the given value and the allowed ones; for an unknown name it suggests our name.
#pragma once
#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "../base/check.h"
#include "config.h"
#include "../base/file.h"
#include "../base/utf8.h"
#include "help.h"
#include "other_names.h"

namespace cli {

// ---- values ----------------------------------------------------------------------------------------------------------------
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
    size_t used = 0;
    double value = NAN;
    try {
        value = std::stod(text, &used);
    } catch (const std::exception&) {
    }
    if (whole && used + 1 == text.size() && used > 0) {  // 10k, 2M, 1B
        const size_t suffix = std::string("kMB").find(text.back());
        if (suffix != std::string::npos) {
            value *= std::pow(1000.0, (double)suffix + 1);
            used++;
        }
    }
    const bool malformed = used == 0 || used != text.size() || !std::isfinite(value) || (whole && value != std::floor(value));
    const bool outside = (value < allowed.low || value > allowed.high) && !(allowed.or_zero && value == 0);
    if (malformed || outside || (whole && std::abs(value) > largest_count))
        fail_usage("--%s is '%s'; it must be %s", name.c_str(), text.c_str(), describe(allowed, whole).c_str());
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
        fail_usage("--%s is '%s'; it must be %s", name.c_str(), text.c_str(), describe(a).c_str());
    value = text;
}

inline void set_value(const OptionRow& row, const Strings& given, bool& value) {
    const std::string text = given.empty() ? "true" : given[0];
    if (text != "true" && text != "false") fail_usage("--%s is '%s'; it must be true or false", row.name.c_str(), text.c_str());
    value = text == "true";
}
inline void set_value(const OptionRow& row, const Strings& given, Strings& value) {
    if (!row.allowed.gathers) value.clear();
    value.insert(value.end(), given.begin(), given.end());
}
template <class Value>
void set_value(const OptionRow& row, const Strings& given, Value& value) {
    parse_into(row.name, given[0], row.allowed, value);
}

// ---- from words to values --------------------------------------------------------------------------------------------------
// An option in the parser: its row, and functions that set and unset its field; unset returns false if that did nothing.
struct Slot {
    OptionRow row;
    std::function<void(const Strings&)> set;
    std::function<bool()> unset;
};

// An option from the command line or a config file.
struct Given {
    std::string name, where;  // where: the config file's line, or empty
    Strings values;
};

inline bool is_option(const std::string& word) {
    const size_t end = std::min(word.find('='), word.size());
    return word == "-h" ||
           (end > 2 && word.compare(0, 2, "--") == 0 && isalpha((unsigned char)word[2]) && word.find_first_of(" \n") >= end);
}
inline std::string with_dashes(std::string name) {
    std::replace(name.begin(), name.end(), '_', '-');
    return name;
}

// The lines of a config file.
inline std::vector<Given> read_config_file(const std::string& file) {
    if (access(file.c_str(), R_OK) != 0) fail_usage("cannot read the config file %s: %s", file.c_str(), strerror(errno));
    const std::string content = read_whole_file(file);
    const std::string_view text = without_byte_order_mark(content);
    std::vector<Given> all;
    size_t i = 0, line = 1;
    const auto at = [&] { return i < text.size() ? text[i] : '\n'; };
    const auto wrong = [&](const char* what) {
        fail_usage("%s:%zu %s; lines are NAME = VALUE, as in micro-batch-size = 4, out = \"run\", data-path = [\"a\", \"b\"]",
                   file.c_str(), line, what);
    };
    const auto skip = [&](bool lines) {  // skips blanks and a comment, over several lines if `lines`
        for (; i < text.size() && (lines || text[i] != '\n'); i++) {
            if (text[i] == '#') i = std::min(text.find('\n', i), text.size()) - 1;
            else if (text[i] == '\n') line++;
            else if (!isspace((unsigned char)text[i])) return;
        }
    };
    const auto scalar = [&](const char* ends) {
        std::string value;
        if (const char quote = at(); quote == '"' || quote == '\'') {
            for (i++; at() != quote; i++) {
                if (at() == '\n') wrong("has a text without its closing quote");
                if (quote == '"' && at() == '\\') {
                    i++;
                    value += at() == 'n' ? '\n' : at() == 't' ? '\t' : at();
                } else value += at();
            }
            i++;
        } else {
            while (!strchr(ends, at())) value += text[i++];
            value.erase(value.find_last_not_of(" \t\r") + 1);
        }
        return value;
    };
    for (skip(true); i < text.size(); skip(true)) {
        const std::string where = format("%s:%zu", file.c_str(), line);
        Given given = {with_dashes(scalar("=\n#")), where, {}};
        if (skip(false); at() != '=') wrong("has no value");
        i++;
        skip(false);
        if (at() == '[') {
            for (i++, skip(true); at() != ']'; skip(true)) {
                if (i >= text.size()) wrong("has a list without its closing bracket");
                given.values.push_back(scalar(",]#\n"));
                if (skip(true); at() == ',') i++;
                else if (i < text.size() && at() != ']') wrong("has a list whose values are not separated by commas");
            }
            i++;
        } else {
            given.values.push_back(scalar("#\n"));
            if (given.values[0].empty()) wrong("has no value");
        }
        if (skip(false); i < text.size() && text[i] != '\n') wrong("has text after its value");
        all.push_back(std::move(given));
    }
    return all;
}

// The options of one command.
struct Parser {
    const std::string command;
    std::vector<Slot> slots;
    std::vector<Given> from_file, given;
    bool help = false, all = false;

    const Slot* find(const std::string& name) const {
        for (const Slot& slot : slots)
            if (name == slot.row.name || (!slot.row.alias.empty() && name == slot.row.alias)) return &slot;
        return nullptr;
    }
    // The option that `name` revokes.
    const Slot* find_inverse(const std::string& name) const {
        if (name.compare(0, 3, "no-") == 0) return find(name.substr(3));
        const Slot* slot = find("no-" + name);
        return slot && slot->row.flag ? slot : nullptr;
    }
    Strings names() const {
        Strings found = {"help", "config"};
        for (const Slot& slot : slots) {
            found.push_back(slot.row.name);
            if (!slot.row.alias.empty()) found.push_back(slot.row.alias);
        }
        return found;
    }

    [[noreturn]] void refuse(const Given& g, const std::string& word) const {
        const std::string bare = g.name.substr(std::min(g.name.size(), g.name.find_first_not_of('-')));
        const std::string taker = takes_options_of_train(command) ? "train" : command;
        std::string advice = advice_on(taker, bare.size() > 2 ? bare : "-" + bare);
        if (advice.empty()) advice = advice_on(taker, bare);
        const std::string where = g.where.empty() ? "" : g.where + ": ";
        if (!advice.empty())
            fail_usage("%s'%s' is not an option of %s: %s", where.c_str(), word.c_str(), command.c_str(), advice.c_str());
        fail_usage("%s'%s' is not an option of %s%s HINT: train_gpt %s --help%s lists them", where.c_str(), word.c_str(),
                   command.c_str(), did_you_mean(bare, names(), "--").c_str(), command.c_str(),
                   takes_options_of_train(command) ? "-all" : "");
    }

    // Splits the words into options and their values, and reads config files.
    void read(const Strings& words) {
        for (size_t i = 0; i < words.size();) {
            const std::string& word = words[i++];
            const size_t equals = std::min(word.find('='), word.size());
            Given g = {with_dashes(word.substr(std::min<size_t>(2, word.size()), equals - 2)), "", {}};
            if (!is_option(word)) {
                if (word.size() > 1 && word[0] == '-' && isalpha((unsigned char)word[1])) {
                    g.name = with_dashes(word.substr(0, equals));
                    refuse(g, word);
                }
                const Slot* last = given.empty() ? nullptr : find(given.back().name);
                const bool flag = !given.empty() && (last ? last->row.flag : find_inverse(given.back().name) != nullptr);
                const char* why = flag ? " takes no value" : " already has its value";
                fail_usage("'%s' belongs to no option%s", word.c_str(),
                           given.empty() ? "" : (": --" + given.back().name + why).c_str());
            }
            if (equals < word.size()) g.values.push_back(word.substr(equals + 1));
            if (word == "-h" || g.name == "help" || g.name == "help-all") {
                help = true;
                all = all || g.name == "help-all";
                continue;
            }
            const Slot* slot = find(g.name);
            const bool config = g.name == "config";
            if (!slot && !config && !find_inverse(g.name)) refuse(g, word.substr(0, equals));
            const size_t most = config ? 1 : !slot || slot->row.flag ? 0 : slot->row.several ? words.size() : 1;
            const size_t wanted =
                slot && slot->row.several && slot->row.allowed.values ? (size_t)slot->row.allowed.values : most;
            while (g.values.size() < std::min(most, wanted) && i < words.size() && !is_option(words[i]))
                g.values.push_back(words[i++]);
            if (most > 0 && g.values.empty())
                fail_usage("--%s has no value%s", g.name.c_str(),
                           i < words.size() ? format("; HINT: a value that begins with -- is written --%s='%s'", g.name.c_str(),
                                                     words[i].c_str())
                                                  .c_str()
                                            : "");
            if (!config) given.push_back(std::move(g));
            else
                for (Given& line : read_config_file(g.values[0])) from_file.push_back(std::move(line));
        }
    }

    void apply(const Given& g) const {
        const Slot* slot = find(g.name);
        if (!slot) {
            slot = find_inverse(g.name);
            if (!slot) refuse(g, g.name);
            bool back = true;
            set_value({g.name, "", "", "", "", "", {}, true, false}, g.values, back);
            if (back && !slot->unset())
                fail_usage("%s--%s revokes no earlier --%s; HINT: leave it out, or give --%s a value",
                           g.where.empty() ? "" : (g.where + ": ").c_str(), g.name.c_str(), slot->row.name.c_str(),
                           slot->row.name.c_str());
            return;
        }
        const size_t n = g.values.size(), wanted = (size_t)slot->row.allowed.values;
        if (slot->row.several ? wanted > 0 && n != wanted && n > 0 : n > 1)
            fail_usage("--%s takes %zu value%s, not %zu%s", g.name.c_str(), slot->row.several ? wanted : 1,
                       slot->row.several && wanted > 1 ? "s" : "", n,
                       slot->row.several ? (": " + slot->row.metavar).c_str() : "");
        if (n == 0 && !slot->row.flag) slot->unset();  // an empty list in a config file
        else slot->set(g.values);
    }
};

// The command with this name.
inline const Command& command_named(const std::string& name) {
    Strings names = {"help", "version"};
    for (const Command& c : commands()) {
        if (name == c.name) return c;
        names.push_back(c.name);
    }
    fail_usage("'%s' is not a command%s HINT: train_gpt help", name.c_str(), did_you_mean(name, names).c_str());
}

// `train_gpt help [COMMAND] [--all | --man | --bash]`: help to read, the manual page, or bash's completion. asked: false if the
// command was missing.
inline int help_command(const Strings& words, bool asked) {
    const auto has = [&](const char* word) { return std::find(words.begin(), words.end(), word) != words.end(); };
    const Strings known = {"--all", "--man", "--bash", "--help", "-h"};
    std::string text = has("--man") ? manual_page() : has("--bash") ? bash_completion() : help_overview(help_width());
    for (const std::string& word : words) {
        if (std::find(known.begin(), known.end(), word) != known.end()) continue;
        if (word[0] == '-') fail_usage("'%s' is not an option of help; HINT: train_gpt help COMMAND", word.c_str());
        text = word == "presets" ? help_presets(help_width())
               : word == "rules" ? help_rules(help_width())
                                 : help_of(command_named(word), has("--all"), help_width());
    }
    fputs(text.c_str(), asked ? stdout : stderr);
    return asked ? 0 : 2;
}

// Fills `options` from the arguments after the command's name. For --help, prints it and returns false.
template <class Options>
bool parse(const std::string& command, Options& options, const Strings& arguments) {
    Parser parser = {command, {}, {}, {}};
    for_each_option(options, [&](const Option& option, auto& value) {
        const OptionRow row = option_row(option, value);
        const auto initial = value;
        const auto set = [row, &value, &options](const Strings& given) {
            set_value(row, given, value);
            options.given.insert(row.name);
        };
        const auto unset = [row, &value, &options, initial] {
            value = initial;
            if (row.flag) options.given.insert(row.name);
            return row.flag || options.given.erase(row.name) > 0;
        };
        parser.slots.push_back({row, set, unset});
    });
    parser.read(arguments);
    if (parser.help) {
        fputs(help_of(command_named(command), parser.all, help_width()).c_str(), stdout);
        return false;
    }
    for (const Given& g : parser.from_file) parser.apply(g);
    for (const Given& g : parser.given) parser.apply(g);
    return true;
}

}  // namespace cli
