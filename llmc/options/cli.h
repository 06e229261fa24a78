// The command line: `train_gpt COMMAND --name value ...` and --config FILE, read into the rows of options.h.
//   --name value, --name=value, --list a b c; a flag has no value, or =true or =false; _ in a name is equivalent to -
//   given twice: the later value wins; config files come first, in their order
//   --no-name revokes an earlier --name, and a flag --name an earlier --no-name; a revoked flag counts as given, so
//   that it is off even if a preset has it; --no-name without a value to revoke is an error
// A config file has lines in TOML's form `name = value`: "text", 'text', bare words, numbers, true, false, ["a", "b"] and #
// comments. Every error contains the given value and the allowed ones; for an unknown name it suggests our name. All mistakes
// are reported at once.
#pragma once
#include <algorithm>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "../base/check.h"
#include "../base/file.h"
#include "../base/similar.h"
#include "../base/text.h"
#include "../base/utf8.h"
#include "options.h"
#include "help.h"
#include "megatron_names.h"
#include "option_values.h"
#include "other_names.h"

namespace cli {

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
inline bool has_one_dash(const std::string& word) {
    return word.size() > 1 && word[0] == '-' && isalpha((unsigned char)word[1]);
}
inline std::string with_dashes(std::string name) {
    std::replace(name.begin(), name.end(), '_', '-');
    return name;
}

// The lines of a config file.
inline std::vector<Given> read_config_file(const std::string& file) {
    if (access(file.c_str(), R_OK) != 0) {
        const std::string why = strerror(errno);
        fail_usage("cannot read the config file %s: %s%s", file.c_str(), why.c_str(), did_you_mean_path(file).c_str());
    }
    if (!is_regular(file))
        fail_usage("--config is %s, %s; it must be a file with lines like micro-batch-size = 4", file.c_str(),
                   is_folder(file) ? "a folder" : "which is not a regular file");
    const std::string content = read_whole_file(file);
    const std::string_view text = without_byte_order_mark(content);
    std::vector<Given> all;
    size_t i = 0, line = 1;
    const auto at = [&] { return i < text.size() ? text[i] : '\n'; };
    const auto wrong = [&](const char* what) {
        fail_usage("%s:%zu %s; lines are NAME = VALUE, as in micro-batch-size = 4, out = \"run\", data-path = [\"a\", \"b\"]%s",
                   file.c_str(), line, what, foreign_config(file).c_str());
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
                if (at() == '\n') wrong("has a string without its closing quote");
                if (quote == '"' && at() == '\\') {
                    i++;
                    if (!strchr("nt\"\\", at()))
                        wrong("has an unknown escape; the known ones are \\n, \\t, \\\" and \\\\, and '...' keeps backslashes");
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
            const bool quoted = at() == '"' || at() == '\'';
            given.values.push_back(scalar("#\n"));
            if (given.values[0].empty() && !quoted) wrong("has no value");
        }
        if (skip(false); i < text.size() && text[i] != '\n') wrong("has text after its value");
        all.push_back(std::move(given));
    }
    return all;
}

// The options of one command.
struct Parser {
    const std::string command;
    std::vector<Slot> slots{};
    std::vector<Given> from_file{}, given{};
    Strings mistakes{}, notes{};
    std::string loaded{}, recompute_method{};  // of Megatron-LM's --load and --recompute-method
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
    const Slot* find_either(const std::string& name) const {
        const Slot* slot = find(name);
        return slot ? slot : find_inverse(name);
    }
    Strings names() const {
        Strings found = {"help", "config"};
        for (const Slot& slot : slots) {
            found.push_back(slot.row.name);
            if (!slot.row.alias.empty()) found.push_back(slot.row.alias);
        }
        return found;
    }
    std::string taker() const { return takes_options_of_train(command) ? "train" : command; }

    // Collects a mistake and continues; report() ends the program with all of them.
    void mistake(const std::string& text) {
        if (std::find(mistakes.begin(), mistakes.end(), text) == mistakes.end()) mistakes.push_back(text);
    }
    template <class Action>
    void attempt(const std::string& where, Action action) {
        try {
            action();
        } catch (const UsageError& e) {
            mistake(where.empty() ? e.what() : where + ": " + e.what());
        }
    }
    void report() const {
        if (mistakes.size() == 1) fail_usage("%s", mistakes[0].c_str());
        std::string list;
        for (const std::string& text : mistakes) list += "\n  " + text;
        if (!mistakes.empty()) fail_usage("%zu mistakes in the command line:%s", mistakes.size(), list.c_str());
    }

    void refuse(const Given& g, const std::string& word) {
        const std::string bare = g.name.substr(std::min(g.name.size(), g.name.find_first_not_of('-')));
        const bool one_dash = has_one_dash(word);
        std::string advice = advice_on(taker(), one_dash ? "-" + bare : bare);  // -n and --n differ
        if (advice.empty()) advice = advice_on(taker(), one_dash ? bare : "-" + bare);
        if (advice.empty()) advice = advice_on(command, bare);
        const std::string last = bare.substr(bare.rfind('.') + 1);  // litgpt: --train.max_steps
        if (advice.empty() && last != bare) advice = find(last) ? "it is --" + last : advice_on(taker(), last);
        if (advice.empty() && one_dash && find(bare)) advice = "it has two dashes: --" + bare;
        if (advice.empty() && !g.where.empty() && bare != g.name && find(bare)) advice = "in a file it has no dashes: " + bare;
        const std::string where = g.where.empty() ? "" : g.where + ": ",
                          begin = where + "'" + word + "' is not an option of " + command;
        mistake(advice.empty() ? format("%s%s HINT: train_gpt %s --help%s lists them", begin.c_str(),
                                        did_you_mean(bare, names(), "--").c_str(), command.c_str(),
                                        takes_options_of_train(command) ? "-all" : "")
                               : begin + ": " + advice);
    }

    // A hint at the option that a word with a typographic dash, or without dashes, is meant to be; "": none.
    std::string option_in(const std::string& word) const {
        for (const char* dash : {"\u2014", "\u2013", "\u2212"})  // em dash, en dash, minus
            if (begins_with(word, dash)) {
                const size_t name = word.find_first_not_of('-', strlen(dash));
                return "options start with two hyphens: --" + word.substr(std::min(name, word.size()));
            }
        const size_t equals = word.find('=');
        return equals != std::string::npos && find_either(with_dashes(word.substr(0, equals))) ? "--" + word : "";
    }

    // Words that belong to no option; `before`: the option in front of them, or null.
    void refuse_words(const Strings& words, const Given* before) {
        const Slot* last = before ? find(before->name) : nullptr;
        const bool flag = before && (!last || last->row.flag);  // --no-name takes no value, even if --name does
        const bool has_model = std::any_of(given.begin(), given.end(), [](const Given& g) { return g.name == "model"; });
        const std::string meant = meant_by(command, words, has_model);
        std::string text = joined(words, [](const std::string& word) { return "'" + word + "'"; });
        text += words.size() == 1 ? " belongs to no option" : " belong to no option";
        if (!meant.empty() && !flag) text += "; did you mean " + meant + "?";
        else if (const std::string file = foreign_config(words[0]); !file.empty()) text += file;
        else if (const std::string form = option_in(words[0]); !form.empty()) text += "; HINT: " + form;
        else if (before) text += ": --" + before->name + (flag ? " takes no value" : " was already given a value");
        mistake(text);
    }

    // Splits the words into options and their values, and reads config files.
    void read(const Strings& words) {
        for (size_t i = 0; i < words.size();) {
            const std::string& word = words[i++];
            const auto values_to = [&](Given& g, size_t most) {
                while (g.values.size() < most && i < words.size() && !is_option(words[i])) g.values.push_back(words[i++]);
            };
            const size_t equals = std::min(word.find('='), word.size());
            Given g = {with_dashes(word.substr(std::min<size_t>(2, word.size()), equals - 2)), "", {}};
            const bool one_dash = !is_option(word) && has_one_dash(word);
            if (!is_option(word) && !one_dash) {
                Given stray = {"", "", {word}};
                values_to(stray, words.size());
                refuse_words(stray.values, given.empty() ? nullptr : &given.back());
                continue;
            }
            if (one_dash) g.name = with_dashes(word.substr(0, equals));
            if (equals < word.size()) g.values.push_back(word.substr(equals + 1));
            if (word == "-h" || g.name == "help" || g.name == "help-all") {
                help = true;
                all = all || g.name == "help-all";
                continue;
            }
            const auto values_of_other = [&](int values) {
                if (values == 0 && i < words.size() && folded_choice(words[i]) == "true") i++;
                else if (values != 0) values_to(g, values < 0 ? words.size() : 1);
            };
            if (!one_dash && take_other(g, values_of_other)) continue;
            const Slot* slot = find(g.name);
            const bool config = g.name == "config";
            if (one_dash || (!slot && !config && !find_inverse(g.name))) {
                refuse(g, word.substr(0, equals));
                while (i < words.size() && !is_option(words[i]) && !has_one_dash(words[i])) i++;  // its values
                continue;
            }
            const size_t most = config ? 1 : !slot || slot->row.flag ? 0 : slot->row.several ? words.size() : 1;
            const size_t wanted =
                slot && slot->row.several && slot->row.allowed.values ? (size_t)slot->row.allowed.values : most;
            values_to(g, std::min(most, wanted));
            if (most > 0 && g.values.empty()) {
                const std::string form = config ? "FILE.toml" : slot->row.metavar;
                const std::string choices =
                    config || slot->row.allowed.choices.empty() ? "" : ", " + describe(slot->row.allowed);
                mistake(
                    "--" + g.name + " has no value; HINT: --" + g.name + " " + form + choices +
                    (i < words.size() ? "; a value that starts with -- is written --" + g.name + "='" + words[i] + "'" : ""));
                continue;
            }
            if (!config) given.push_back(std::move(g));
            else
                attempt("", [&] {
                    std::vector<Given> lines = read_config_file(expand_home(g.values[0]));
                    refuse_repeated(lines);
                    for (Given& line : lines)
                        if (!take_other(line, [](int) {})) from_file.push_back(std::move(line));
                });
        }
        settle_others();
    }

    // A name has one line in a file, by TOML's rules, except options that gather their values.
    void refuse_repeated(const std::vector<Given>& lines) {
        std::map<std::string, std::string> first;
        for (const Given& line : lines) {
            const Slot* slot = find_either(line.name);
            if (slot && slot->row.allowed.gathers) continue;
            const auto [before, is_new] = first.insert({slot ? slot->row.name : line.name, line.where});
            if (!is_new) mistake(line.where + ": " + line.name + " has a value already, in " + before->second);
        }
    }

    // Takes an option of Megatron-LM that has another name here, or no effect, with a note; false for any other.
    // read_values(n): reads the value (1) or values (-1) behind the name.
    template <class ReadValues>
    bool take_other(Given& g, ReadValues read_values) {
        const MegatronName* const other = find_megatron_name(taker(), g.name);
        if (!other || find_either(g.name)) return false;
        read_values(other->values);
        attempt(g.where, [&] {
            const Renamed now = renamed(*other, g.name, g.values);
            notes.push_back((g.where.empty() ? "" : g.where + ": ") + now.note);
            for (const auto& [name, values] : now.options)
                (g.where.empty() ? given : from_file).push_back({name, g.where, values});
            if (g.name == "load") loaded = g.values[0];
            if (g.name == "recompute-method") recompute_method = g.values[0];
        });
        return true;
    }

    // Megatron-LM's --load starts a new run if the folder of --save has no checkpoint yet; the method uniform recomputes all
    // layers.
    void settle_others() {
        std::string out;
        for (const auto* source : {&from_file, &given})
            for (const Given& g : *source)
                if (g.name == "out" && !g.values.empty()) out = g.values[0];
        for (auto* source : {&from_file, &given}) {
            for (Given& g : *source)
                if (!loaded.empty() && g.name == "resume" && g.values == Strings{loaded} && loaded == out) g.values = {"auto"};
            if (recompute_method == "uniform")
                source->erase(std::remove_if(source->begin(), source->end(),
                                             [](const Given& g) { return g.name == "recompute-num-layers"; }),
                              source->end());
        }
        if (recompute_method == "uniform") notes.push_back("--recompute-method uniform recomputes all layers, each by itself");
        else if (!recompute_method.empty() && recompute_method != "block")
            mistake("--recompute-method is '" + recompute_method + "'; it must be one of uniform, block");
    }

    void apply(const Given& g) {
        const Slot* slot = find(g.name);
        if (!slot) {
            slot = find_inverse(g.name);
            if (!slot) return refuse(g, g.name);
            bool back = true;
            attempt(g.where, [&] {
                set_value({g.name, "", "", "", "", "", {}, true, false}, g.values, back);
                if (back && !slot->unset())
                    fail_usage("--%s does not follow an earlier --%s to revoke; HINT: omit it, or give --%s a value",
                               g.name.c_str(), slot->row.name.c_str(), slot->row.name.c_str());
            });
            return;
        }
        attempt(g.where, [&] {
            const size_t n = g.values.size(), wanted = (size_t)slot->row.allowed.values;
            if (slot->row.several ? wanted > 0 && n != wanted && n > 0 : n > 1)
                fail_usage("--%s takes %zu value%s, not %zu%s", g.name.c_str(), slot->row.several ? wanted : 1,
                           slot->row.several && wanted > 1 ? "s" : "", n,
                           slot->row.several ? (": " + slot->row.metavar).c_str() : "");
            if (n == 0 && !slot->row.flag) slot->unset();  // an empty list in a config file
            else slot->set(g.values);
        });
    }

    // The values of config files that later files or the command line replace by others.
    std::vector<Replaced> replaced() const {
        struct Value {
            std::string text, where;
        };
        std::map<std::string, Value> values;
        std::vector<Replaced> found;
        const auto follow = [&](const Given& g) {
            const Slot* slot = find_either(g.name);
            if (!slot || slot->row.allowed.gathers) return;
            std::string text;
            for (const std::string& value : g.values) text += (text.empty() ? "" : " ") + value;
            if (!slot->row.flag && g.values.empty()) text = "the default";
            if (slot->row.flag) text = g.values.empty() ? "true" : folded_choice(text);
            if (slot != find(g.name)) text = !slot->row.flag ? "the default" : text == "true" ? "false" : "true";
            const auto file = [](const std::string& where) { return where.substr(0, where.rfind(':')); };
            Value& before = values[slot->row.name];
            if (!before.where.empty() && file(before.where) != file(g.where) && before.text != text)
                found.push_back({slot->row.name, text, g.where, before.text, before.where});
            before = {text, g.where};
        };
        for (const Given& g : from_file) follow(g);
        for (const Given& g : given) follow(g);
        return found;
    }
};

// The command with this name.
inline const Command& command_named(const std::string& name) {
    Strings names = {"help", "version"};
    for (const Command& c : commands()) {
        if (name == c.name) return c;
        names.push_back(c.name);
    }
    const std::filesystem::path script = name;  // sample.py
    const std::string word = script.extension() == ".py" ? script.stem().string() : name, advice = advice_on("", word);
    if (const std::string file = foreign_config(name); !file.empty() && script.has_parent_path())
        fail_usage("'%s' is not a command%s", name.c_str(), file.c_str());
    fail_usage("'%s' is not a command%s HINT: train_gpt %s", name.c_str(),
               advice.empty() ? did_you_mean(word, names).c_str() : ";", advice.empty() ? "help" : advice.c_str());
}

// `train_gpt help [COMMAND] [--all | --man | --bash | --zsh | --fish]`: help to read, the manual page, or a shell's completion.
// asked: false if the command was missing.
inline int help_command(const Strings& words, bool asked) {
    const auto has = [&](const char* word) { return std::find(words.begin(), words.end(), word) != words.end(); };
    const Strings known = {"--all", "--man", "--bash", "--zsh", "--fish", "--help", "-h"};
    std::string text = has("--man")    ? manual_page()
                       : has("--bash") ? bash_completion()
                       : has("--zsh")  ? zsh_completion()
                       : has("--fish") ? fish_completion()
                                       : help_overview(help_width());
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
    Parser parser = {command};
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
    options.from_files = options.given;
    for (const Given& g : parser.given) {
        parser.apply(g);
        if (const Slot* slot = parser.find_either(g.name)) options.from_files.erase(slot->row.name);
    }
    parser.report();
    options.replaced = parser.replaced();
    options.notes = std::move(parser.notes);
    return true;
}

}  // namespace cli
