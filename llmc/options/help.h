// Help on commands and options: on the console, as manual page, as bash completion. Everything is generated from the rows of
// options.h and the commands below.
#pragma once
#include <cstdlib>
#include <string>
#include <vector>

#include "options.h"
#include "../curate/heuristics.h"
#include "../model/parameters.h"
#include "../model/presets.h"
#include "../base/terminal.h"
#include "../base/text.h"

namespace cli {

inline const char* const program_purpose =
    "pretraining and fine-tuning of language models: GPT, BLOOM, Llama, Mistral, Qwen, Gemma and others";

struct Command {
    const char *name, *purpose, *usage;
    std::vector<std::vector<const char*>> examples;  // description, then the lines to type
};
// A table: long, but without branches.
inline const std::vector<Command>& commands() {
    static const std::vector<Command> rows = {
        {"train",
         "train a model on prepared data",
         "(--preset NAME | --model DIR) --data-path PREFIX ... "
         "(--train-iters N | --time-budget 5m) [OPTIONS]",
         {{"Pretrain GPT-2 124M on prepared data:",
           "train_gpt train --preset gpt2-124m --tokenizer tok --data-path data/web \\",
           "    --global-batch-size 512 --train-iters 20k --lr 6e-4 --out run"},
          {"Resume: the same command with", "    ... --resume auto"},
          {"Continue a downloaded model, or train adapters (LoRA) on it:",
           "train_gpt train --model DIR --data-path data/web --train-iters 500 \\", "    --lr 2e-5 --out tuned",
           "train_gpt train --model DIR --data-path data/web --train-iters 500 \\",
           "    --lr 2e-4 --lora-rank 16 --out adapted"},
          {"Train on 8 GPUs, or CPUs; Ctrl-C saves and ends the run:",
           "scripts/launch.sh mpirun -n 8 --bind-to none ./train_gpt train ..."},
          {"Plan a run on 64 GPUs without having them:", "train_gpt train --preset llama2-7b --world 64 --tp 8 \\",
           "    --global-batch-size 512 --train-iters 100k --dry-run"}}},
        {"init",
         "write options of train to a file for --config, with explanations",
         "(--size N | --preset NAME | --model DIR) OPTIONS OF train [--file run.toml]",
         {{"A model of 15M parameters, with everything that its size determines:",
           "train_gpt init --size 15m --tokenizer tok --data-path data/web --out run", "train_gpt train --config run.toml"}}},
        {"tune",
         "find the fastest layout for training or for generation, on any GPUs or on this machine",
         "[--inference] OPTIONS OF train [--world N --device NAME] [--trials N] --out DIR",
         {{"A 7B model on 64 H100s; options that you set stay fixed:",
           "train_gpt tune --preset llama2-7b --vocab-size 32000 --world 64 \\",
           "    --global-batch-size 512 --train-iters 100k", "train_gpt train --config tune/tune-1.toml ..."},
          {"This machine, with the five fastest layouts measured:",
           "train_gpt tune --preset quickstart --tokenizer tok --data-path data \\",
           "    --global-batch-size 32 --train-iters 600 --trials 5"},
          {"The highest generation throughput of a 70B model within 20 ms per token:",
           "train_gpt tune --inference --preset llama2-70b --vocab-size 32000 \\",
           "    --world 8 --seq-length 4096 --max-latency 20"}}},
        {"sweep",
         "search learning rate, batch size, weight decay, ... with short training runs",
         "OPTIONS OF train --over NAME=LOW..HIGH|A,B,C ... [--budget 20m] --out DIR",
         {{"Two options, in twenty minutes; if interrupted, the same command resumes:",
           "train_gpt sweep --preset quickstart --tokenizer tok --data-path data \\",
           "    --train-iters 600 --over lr=5e-4..2e-2 --over weight-decay=0.1,0.2 \\", "    --budget 20m --out sweep",
           "train_gpt train --config sweep/best.toml --out run"}}},
        {"prepare",
         "turn text into tokens on disk (Megatron-LM's .bin and .idx)",
         "--input FILE ... --tokenizer DIR --output PREFIX [OPTIONS]",
         {{"A document per line of JSON, with its text under \"text\":",
           "train_gpt prepare --input web.jsonl --tokenizer tok --output data/web"},
          {"Plain text, its documents between blank lines:",
           "train_gpt prepare --input book.txt --split-documents blank --tokenizer tok \\", "    --output data/book"},
          {"Conversations; only answers are in the loss:",
           "train_gpt prepare --chat --input chats.jsonl --tokenizer DIR --output chats"}}},
        {"curate",
         "filter, repair and deduplicate raw text for training",
         "--input FILE|DIR ... --output DIR [STAGES] [OPTIONS]",
         {{"Rules of Gopher and FineWeb; report.html shows the dropped documents:",
           "train_gpt curate --input raw/ --output clean --normalize \\", "    --heuristics gopher fineweb"},
          {"Duplicates, questions of an evaluation, shares of sources:",
           "train_gpt curate --input web/ books/ --output mixed \\",
           "    --exact-duplicates documents --near-duplicates fineweb \\",
           "    --decontaminate hellaswag.jsonl --weights web=0.7 books=0.3"}}},
        {"tokenizer",
         "train a tokenizer (byte-level BPE or unigram) on text, or measure one",
         "--input FILE ... --output DIR [OPTIONS]",
         {{"Train one with 32,000 tokens:", "train_gpt tokenizer --input *.txt --vocab-size 32000 --output tok"},
          {"Measure one on other text:", "train_gpt tokenizer --report tok --input other.txt"}}},
        {"generate",
         "generate text with a model",
         "--model DIR [--prompt TEXT] [OPTIONS]",
         {{"Continue a text with the newest checkpoint of a run:",
           "train_gpt generate --model run --prompt \"Once upon a time\""},
          {"Read the prompt from another program:", "cat prompt.txt | train_gpt generate --model run --prompt -"},
          {"Chat with a model that was tuned on conversations:", "train_gpt generate --model DIR --chat"}}},
        {"serve",
         "serve a model over HTTP: OpenAI's API, and a page for generation",
         "--model DIR [--port N] [OPTIONS]",
         {{"For this machine, at http://127.0.0.1:8080/:", "train_gpt serve --model run"},
          {"For others, too:", "train_gpt serve --model run --host 0.0.0.0 --port 80"}}},
        {"eval",
         "measure a model: loss, perplexity and bits per byte, or accuracy on questions",
         "--model DIR --data-path PREFIX ... | --text FILE | --tasks FILE ... [OPTIONS]",
         {{"On a text file:", "train_gpt eval --model run --text book.txt"},
          {"On questions with answers:", "train_gpt eval --model run --tasks hellaswag.jsonl"}}},
        {"export",
         "write a model as one GGUF file, for llama.cpp, or merge adapters into it",
         "--model DIR --gguf FILE | --merge --adapter DIR --out DIR [OPTIONS]",
         {{"The newest checkpoint of a run, its matrices in 8 bits:",
           "train_gpt export --model run --gguf run.gguf --type q8_0"},
          {"A run's adapters merged into the model that they were trained on:",
           "train_gpt export --merge --adapter run --out merged"}}},
        {"import",
         "convert a GGUF file of llama.cpp to a model directory",
         "--gguf FILE --out DIR",
         {{"To generate, evaluate or train on:", "train_gpt import --gguf model.gguf --out model"}}},
        {"inspect",
         "show the contents of a checkpoint, dataset or tokenizer, and check that it is intact",
         "PATH",
         {{"A run and its newest checkpoint:", "train_gpt inspect run"}, {"Prepared data:", "train_gpt inspect data/web"}}},
        {"report",
         "rewrite the report of a run, or write one that compares several runs",
         "RUN ... [--output FILE]",
         {{"The report of a run, from its log:", "train_gpt report run"},
          {"Several runs in one report, with the options in which they differ:",
           "train_gpt report run-1 run-2 run-3 --output runs.html"}}},
        {"runs",
         "list the training runs in a folder",
         "[FOLDER ...]",
         {{"The best ones first:", "train_gpt runs out --sort valid"}}},
        {"supervise",
         "run a training job until it is finished, restarting it after failures without broken nodes",
         "[OPTIONS] -- COMMAND",
         {{"On one machine:", "train_gpt supervise -- mpirun -n 8 ./train_gpt train ... --out run \\", "    --resume auto"},
          {"On two nodes of a cluster, with one in reserve:", "train_gpt supervise --hosts n1:8 n2:8 --spare n3:8 -- \\",
           "    mpirun -n {ranks} --host {hosts} ./train_gpt train ... --out run \\", "    --resume auto"}}},
        {"check-node",
         "check that this machine computes, stores and transfers the right bits",
         "[OPTIONS]",
         {{"All GPUs of a node and the links between them, for a minute each:",
           "mpirun -n 8 --host n3:8 ./train_gpt check-node --seconds 1m"}}},
    };
    return rows;
}

// An option's row without its C++ type.
struct OptionRow {
    std::string name, alias, group, help, metavar, default_value;
    Allowed allowed;
    bool flag, several;
};

inline std::string default_text(const std::string& s) { return s; }
inline std::string default_text(const Strings& s) { return s.empty() ? "" : s[0]; }
inline std::string default_text(const OptionalDouble&) { return ""; }
template <class Number>
std::string default_text(Number x) {
    return x == 0 ? "" : format("%.10g", (double)x);
}

template <class Value>
OptionRow option_row(const Option& option, const Value& value) {
    const Allowed& allowed = option.allowed;
    OptionRow row = {
        option_name(option.field), option.alias, option.group, option.help, allowed.metavar, "", allowed, false, false};
    row.flag = std::is_same_v<Value, bool>;
    row.several = std::is_same_v<Value, Strings>;
    if (row.flag) return row;
    const bool number = std::is_same_v<Value, double> || std::is_same_v<Value, OptionalDouble>;
    if (row.metavar.empty())
        row.metavar = !allowed.choices.empty() ? "NAME" : number ? "X" : std::is_same_v<Value, std::string> ? "TEXT" : "N";
    if (row.several && allowed.values != 1 && row.metavar.find(' ') == std::string::npos) row.metavar += " ...";
    row.default_value = default_text(value);
    return row;
}
template <class Options>
std::vector<OptionRow> option_rows() {
    std::vector<OptionRow> rows;
    Options defaults;
    for_each_option(defaults, [&](const Option& option, auto& value) { rows.push_back(option_row(option, value)); });
    return rows;
}
// Commands that accept all options of train, and more.
inline bool takes_options_of_train(const std::string& command) {
    return command == "train" || command == "init" || command == "tune" || command == "sweep";
}
// Every option of a command; options common to all commands come last.
inline std::vector<OptionRow> options_of(const std::string& command) {
    std::vector<OptionRow> rows = command == "train"        ? option_rows<TrainOptions>()
                                  : command == "init"       ? option_rows<InitOptions>()
                                  : command == "tune"       ? option_rows<TuneOptions>()
                                  : command == "sweep"      ? option_rows<SweepOptions>()
                                  : command == "prepare"    ? option_rows<PrepareOptions>()
                                  : command == "curate"     ? option_rows<CurateOptions>()
                                  : command == "tokenizer"  ? option_rows<TokenizerOptions>()
                                  : command == "generate"   ? option_rows<GenerateOptions>()
                                  : command == "serve"      ? option_rows<ServeOptions>()
                                  : command == "eval"       ? option_rows<EvalOptions>()
                                  : command == "report"     ? option_rows<ReportOptions>()
                                  : command == "runs"       ? option_rows<RunsOptions>()
                                  : command == "check-node" ? option_rows<CheckNodeOptions>()
                                  : command == "supervise"  ? option_rows<SuperviseOptions>()
                                  : command == "export"     ? option_rows<ExportOptions>()
                                  : command == "import"     ? option_rows<ImportOptions>()
                                                            : option_rows<InspectOptions>();
    const Strings refused = command == "init"    ? Strings{"dry-run", "json"}
                            : command == "tune"  ? Strings{"resume", "time-budget"}
                            : command == "sweep" ? Strings{"resume",
                                                           "world",
                                                           "time-budget",
                                                           "rampup-batch-size",
                                                           "tensor-model-parallel-size",
                                                           "pipeline-model-parallel-size"}
                                                 : Strings{};
    const auto is_one_of = [](const Strings& names, const std::string& name) {
        return std::find(names.begin(), names.end(), name) != names.end();
    };
    rows.erase(std::remove_if(rows.begin(), rows.end(),
                              [&](const OptionRow& row) {
                                  return is_one_of(refused, row.name) || (command == "sweep" && row.group.find("Plan") == 0);
                              }),
               rows.end());
    for (OptionRow& row : rows)
        if (command == "tune" && is_one_of(searched_options(), row.name) && !row.flag && row.name != "fp8-format") {
            row.help.resize(std::min(row.help.size(), row.help.find("; default:")));
            row.default_value = "searched";
        }
    rows.push_back({"config", "", "Help", "file of options, one per line, such as lr = 6e-4", "FILE", "", {}, false, false});
    rows.push_back({"help", "", "Help", "this text", "", "", {}, true, false});
    if (takes_options_of_train(command))
        rows.push_back({"help-all", "", "Help", "all options, not only common ones", "", "", {}, true, false});
    return rows;
}

// The label of an option, such as "--train-iters N", and its help.
inline std::string label_of(const OptionRow& row) {
    return "--" + row.name + (row.alias.empty() ? "" : ", --" + row.alias) + (row.metavar.empty() ? "" : " " + row.metavar);
}
inline std::string text_of(const OptionRow& row) {
    std::string choices, text = row.help;
    for (const std::string& choice : row.allowed.choices) choices += (choices.empty() ? "; one of " : ", ") + choice;
    text.insert(std::min({text.size(), text.find("; default:"), text.find(" (Megatron: ")}), choices);
    if (!row.default_value.empty())
        text.insert(std::min(text.size(), text.find(" (Megatron: ")), "; default: " + row.default_value);
    return text;
}

// The groups in the order of their first rows, with their rows.
inline std::vector<std::pair<std::string, std::vector<OptionRow>>> grouped(const std::vector<OptionRow>& rows) {
    std::vector<std::pair<std::string, std::vector<OptionRow>>> groups;
    for (const OptionRow& row : rows) {
        auto group = std::find_if(groups.begin(), groups.end(), [&](const auto& g) { return g.first == row.group; });
        if (group == groups.end()) group = groups.insert(group, {row.group, {}});
        group->second.push_back(row);
    }
    return groups;
}

// Help on options in general.
inline const char* const about_options =
    "If an option is given twice, the later value wins; the command line wins over --config. --no-NAME revokes an earlier "
    "--NAME. Numbers of steps, samples and tokens may end in k, M, B or T.";

// Columns to fill: $COLUMNS, else the terminal's width, else 80.
inline int help_width() {
    const char* columns = getenv("COLUMNS");
    const int given = columns ? atoi(columns) : 0;
    return std::clamp(given > 0 ? given : isatty(STDOUT_FILENO) ? terminal_width(stdout) : 80, 40, 120);
}

inline std::string indented(const std::string& text, int indent, int width) {
    std::string out;
    for (const std::string& line : wrap_text(text, width - indent)) out += std::string((size_t)indent, ' ') + line + "\n";
    return out;
}
// A label and its text, next to it or, if the label is long, below.
inline std::string entry(const std::string& label, const std::string& text, int column, int width) {
    const std::string left = "  " + label;
    const std::string right = indented(text, column, width);
    return (int)left.size() + 2 <= column ? left + right.substr(left.size()) : left + "\n" + right;
}

inline std::string help_of(const Command& command, bool all, int width) {
    std::string out = indented(format("train_gpt %s: %s", command.name, command.purpose), 0, width) + "\nUsage:\n" +
                      indented(format("train_gpt %s %s", command.name, command.usage), 2, width) + "\nExamples:\n";
    for (const std::vector<const char*>& example : command.examples)
        for (const char* line : example) out += std::string(line == example[0] ? "  " : "    ") + line + "\n";
    const std::string name = command.name;
    const bool some = !all && takes_options_of_train(name);
    const Strings& everyday = everyday_options();
    for (const auto& [group, rows] : grouped(options_of(command.name))) {
        std::string entries;
        for (const OptionRow& row : rows)
            if (!some || group == "Help" || std::find(everyday.begin(), everyday.end(), row.name) != everyday.end())
                entries += entry(label_of(row), text_of(row), 30, width);
        if (!entries.empty()) out += "\n" + group + ":\n" + entries;
    }
    out += "\n" + indented(about_options, 0, width);
    if (some) out += "\n" + indented("These are the common options; train_gpt " + name + " --help-all shows all.", 0, width);
    return out;
}

inline std::string help_overview(int width) {
    std::string out =
        indented(format("train_gpt: %s", program_purpose), 0, width) + "\nUsage: train_gpt COMMAND [OPTIONS]\n\nCommands:\n";
    for (const Command& c : commands()) out += entry(c.name, c.purpose, 14, width);
    out +=
        entry(
            "help",
            "help on a command: train_gpt help train; the models' shapes: train_gpt help presets; rules: train_gpt help rules",
            14, width) +
        entry("--version", "the program's version, its compiler and its target", 14, width);
    return out +
           "\nFrom text to a model that generates text:\n"
           "  train_gpt tokenizer --input book.txt --vocab-size 4096 --output tok\n"
           "  train_gpt prepare --input book.txt --split-documents blank \\\n"
           "      --tokenizer tok --output data\n"
           "  train_gpt train --preset quickstart --tokenizer tok --data-path data \\\n"
           "      --seq-length 256 --train-iters 300 --out run\n"
           "  train_gpt generate --model run --prompt \"In the beginning\"\n"
           "\nFrom a downloaded model to one trained on more text, and to llama.cpp:\n"
           "  train_gpt prepare --input book.txt --split-documents blank \\\n"
           "      --tokenizer DIR --output data\n"
           "  train_gpt train --model DIR --data-path data --train-iters 300 --lr 2e-5 \\\n"
           "      --out tuned\n"
           "  train_gpt export --model tuned --gguf tuned.gguf\n";
}

inline std::string help_presets(int width) {
    const int vocabulary = 4096;  // assumed if the tokenizer determines it
    std::string out = "Shapes of models, for --preset:\n";
    for (const Preset& p : presets()) {
        ModelConfig c = config_from_preset(p.name);
        if (!p.V) c.V = vocabulary;
        pad_vocabulary(c, 1);
        out += entry(p.name,
                     format("%s%s, %d layers, width %d, %s", pad_left(parameters_in_words(c), 16).c_str(), p.V ? "" : "*", c.L,
                            c.C, p.family),
                     16, width);
    }
    return out + "\n" +
           indented(format("* with a vocabulary of %s tokens; the tokenizer sets its size", with_commas(vocabulary).c_str()), 0,
                    width);
}

inline std::string help_rules(int width) {
    std::string out = "Rules of train_gpt curate --heuristics; --set RULE=VALUE changes a threshold:\n";
    for (const HeuristicRule& rule : heuristic_rules()) {
        const char* kept = rule.kind == HeuristicRule::Kind::at_least  ? "at least "
                           : rule.kind == HeuristicRule::Kind::at_most ? "at most "
                                                                       : "";
        const std::string threshold = rule.threshold == 1 && !*kept ? "on" : kept + format("%.10g", rule.threshold);
        out += entry(rule.name, format("%s: %s (%s)", rule.measured, threshold.c_str(), rule.source), 26, width);
    }
    return out + "\n" +
           indented("Rules that count words or the letters of a line do not apply to text in scripts without spaces.", 0,
                    width);
}

// The manual page, for man(1).
inline std::string manual_page() {
    const auto plain = [](const std::string& text) {
        std::string out;
        for (const char c : text) out += c == '\\' ? "\\e" : c == '-' ? "\\-" : c == '\'' ? "\\(aq" : std::string(1, c);
        return out[0] == '.' ? "\\&" + out : out;
    };
    std::string out = ".TH TRAIN_GPT 1 \"\" \"train_gpt\" \"User Commands\"\n.SH NAME\ntrain_gpt \\- " +
                      plain(program_purpose) +
                      "\n.SH SYNOPSIS\n.B train_gpt\n.I COMMAND\n[\\fIOPTIONS\\fR]\n.SH DESCRIPTION\n" + plain(about_options) +
                      "\n.SH COMMANDS\n";
    for (const Command& c : commands()) out += format(".TP\n.B %s\n", c.name) + plain(c.purpose) + "\n";
    for (const Command& c : commands()) {
        std::string title = c.name;
        for (char& letter : title) letter = (char)toupper(letter);
        out += ".SH \"OPTIONS OF " + title + "\"\n.B train_gpt " + c.name + "\n" + plain(c.usage) + "\n";
        for (const auto& [group, rows] : grouped(options_of(c.name))) {
            out += ".SS " + plain(group) + "\n";
            for (const OptionRow& row : rows) out += ".TP\n.B " + plain(label_of(row)) + "\n" + plain(text_of(row)) + "\n";
        }
    }
    out += ".SH EXAMPLES\n";
    for (const Command& c : commands())
        for (const std::vector<const char*>& example : c.examples) {
            out += ".PP\n" + plain(example[0]) + "\n.PP\n.nf\n.RS\n";
            for (size_t i = 1; i < example.size(); i++) out += plain(example[i]) + "\n";
            out += ".RE\n.fi\n";
        }
    return out +
           ".SH \"EXIT STATUS\"\n0: success. 1: an error while running, or an inspected file is damaged. 2: invalid command "
           "line; nothing was done.\n";
}

// ---- completion of the shells ----

// The values of an option: words, or files (-f), directories (-d), or unknown.
struct Completion {
    std::string words, files;
};
inline Completion completion_of(const OptionRow& row) {
    Completion values;
    const auto add = [&](const std::string& word) { values.words += (values.words.empty() ? "" : " ") + word; };
    for (const std::string& choice : row.allowed.choices) add(choice);
    if (row.metavar == "PRESET")
        for (const Preset& p : presets()) add(p.name);
    const std::string word = row.metavar.substr(0, row.metavar.find(' '));
    if (word == "DIR" || word == "DIR|auto") values.files = "-d";
    if (word == "FILE" || word == "PREFIX" || word == "PATH" || word == "RUN") values.files = "-f";
    return values;
}
// The values of a command's main option, whose name may be left out.
inline Completion completion_of(const Command& c) {
    const OptionRow first = options_of(c.name)[0];
    return first.group == "What" ? completion_of(first) : Completion{};
}
inline std::string names_of_commands() {
    std::string names;
    for (const Command& c : commands()) names += (names.empty() ? "" : " ") + std::string(c.name);
    return names;
}

// For bash and zsh, whose arrays and completers differ: sets options, known and files from the words of the command line.
// at_command: the condition that the current word is the first.
inline std::string cases_of_completion(const std::string& at_command) {
    std::string options, values;
    for (const Command& c : commands()) {
        std::string all;
        for (const OptionRow& row : options_of(c.name)) {
            all += (all.empty() ? "--" : " --") + row.name + (row.alias.empty() ? "" : " --" + row.alias);
            if (row.flag) continue;
            std::string pattern = format("\"%s --%s\"", c.name, row.name.c_str());
            if (!row.alias.empty()) pattern += format(" | \"%s --%s\"", c.name, row.alias.c_str());
            const Completion known = completion_of(row);
            values += "        " + pattern + ") " +
                      (!known.words.empty()   ? "known=\"" + known.words + "\" files=\"\""
                       : !known.files.empty() ? "files=" + known.files
                                              : ":") +
                      " ;;\n";
        }
        const std::string files = completion_of(c).files;
        options +=
            format("        %s) options=\"%s\"%s ;;\n", c.name, all.c_str(), (files.empty() ? "" : " files=" + files).c_str());
    }
    return "    case $command in\n" + options + "        help) known=\"" + names_of_commands() +
           " presets rules\" ;;\n"
           "    esac\n"
           "    case \"$command $option\" in\n" +
           values + "    esac\n    if " + at_command +
           " && [[ $current != -* ]]; then\n"
           "        known=\"" +
           names_of_commands() +
           " help version\" files=\"\"\n"
           "    elif [[ $current == -* ]]; then\n"
           "        known=$options files=\"\"\n"
           "    fi\n";
}

inline std::string bash_completion() {
    return "# bash completion of train_gpt; written by `train_gpt help --bash`\n"
           "_train_gpt() {\n"
           "    local current=${COMP_WORDS[COMP_CWORD]} command=train option=\"\" options=\"\" known=\"\" files=\"\" i\n"
           "    if ((COMP_CWORD > 1)) && [[ ${COMP_WORDS[1]} != -* ]]; then command=${COMP_WORDS[1]}; fi\n"
           "    for ((i = COMP_CWORD - 1; i > 0; i--)); do\n"
           "        if [[ ${COMP_WORDS[i]} == --* ]]; then option=${COMP_WORDS[i]}; break; fi\n"
           "    done\n" +
           cases_of_completion("((COMP_CWORD == 1))") +
           "    COMPREPLY=()\n"
           "    if [[ -n $files ]]; then\n"
           "        compopt -o filenames 2>/dev/null\n"
           "        mapfile -t COMPREPLY < <(compgen \"$files\" -- \"$current\")\n"
           "    else\n"
           "        mapfile -t COMPREPLY < <(compgen -W \"$known\" -- \"$current\")\n"
           "    fi\n"
           "}\n"
           "complete -F _train_gpt train_gpt\n";
}

inline std::string zsh_completion() {
    return "#compdef train_gpt\n"
           "# zsh completion of train_gpt; written by `train_gpt help --zsh`\n"
           "_train_gpt() {\n"
           "    local current=${words[CURRENT]} command=train option=\"\" options=\"\" known=\"\" files=\"\" i\n"
           "    if ((CURRENT > 2)) && [[ ${words[2]} != -* ]]; then command=${words[2]}; fi\n"
           "    for ((i = CURRENT - 1; i > 1; i--)); do\n"
           "        if [[ ${words[i]} == --* ]]; then option=${words[i]}; break; fi\n"
           "    done\n" +
           cases_of_completion("((CURRENT == 2))") +
           "    case $files in\n"
           "        -d) _files -/ ;;\n"
           "        -f) _files ;;\n"
           "        *) compadd -- ${=known} ;;\n"
           "    esac\n"
           "}\n"
           "# In a folder of fpath it is called, elsewhere it is sourced.\n"
           "if [[ ${funcstack[1]} == _train_gpt ]]; then _train_gpt \"$@\"; else compdef _train_gpt train_gpt; fi\n";
}

// fish shows an explanation next to each command and option.
inline std::string fish_completion() {
    const auto quoted = [](const std::string& text) {
        std::string out;
        for (const char c : text) out += (c == '\'' || c == '\\' ? "\\" : "") + std::string(1, c);
        return "'" + out + "'";
    };
    const std::string start = "complete -c train_gpt ";
    std::string out = "# fish completion of train_gpt; written by `train_gpt help --fish`\n" + start + "-f\n";
    for (const Command& c : commands())
        out += start + "-n __fish_use_subcommand -a " + c.name + " -d " + quoted(c.purpose) + "\n";
    out += start + "-n __fish_use_subcommand -a 'help version'\n";
    out += start + "-n '__fish_seen_subcommand_from help' -a " + quoted(names_of_commands() + " presets rules") + "\n";
    // -F: files; -x: a value, and no files.
    const auto values_of = [&](const Completion& values) {
        return !values.words.empty()  ? " -x -a " + quoted(values.words)
               : values.files == "-d" ? std::string(" -x -a '(__fish_complete_directories)'")
               : values.files == "-f" ? " -r -F"
                                      : " -x";
    };
    for (const Command& c : commands()) {
        // Without a command, options are train's.
        const std::string here = start + "-n '__fish_seen_subcommand_from " + c.name +
                                 (c.name == std::string("train") ? "; or __fish_use_subcommand'" : "'");
        if (const std::string files = completion_of(c).files; !files.empty())
            out += here + (files == "-d" ? " -a '(__fish_complete_directories)'" : " -F") + "\n";
        for (const OptionRow& row : options_of(c.name))
            out += here + " -l " + row.name + (row.alias.empty() ? "" : " -l " + row.alias) +
                   (row.flag ? "" : values_of(completion_of(row))) + " -d " + quoted(row.help) + "\n";
    }
    return out;
}

}  // namespace cli
