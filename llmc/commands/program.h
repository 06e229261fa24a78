// The program from its command line to its exit status: runs the command, and reports errors. Commands that run a model are
// passed in; host_commands.h has the others.
#pragma once
#include <cstdio>
#include <new>
#include <string>

#include "../base/check.h"
#include "../base/json.h"
#include "../base/terminal.h"
#include "../base/text.h"
#include "../cpu/threads.h"
#include "../ops.h"
#include "../parallel/world.h"
#include "../options/cli.h"
#include "../options/options.h"
#include "host_commands.h"
#include "../run/stop.h"
#include "../options/version.h"

struct ModelCommands {
    int (*train)(const TrainOptions&);
    int (*tune)(const TuneOptions&);
    int (*sweep)(const SweepOptions&);
    int (*generate)(const GenerateOptions&);
    int (*eval)(const EvalOptions&);
    int (*serve)(World&, const ServeOptions&);
    int (*check_node)(const CheckNodeOptions&);
};

namespace detail {

// A command that runs on all ranks.
template <class Options>
int run_command(const char* name, const Strings& arguments, int (*command)(const Options&)) {
    Options options;
    return cli::parse(name, options, arguments) ? command(options) : 0;
}

// A command for a single process, which may have been started by a launcher.
template <class Options>
int run_command(const char* name, const Strings& arguments, World& world, int (*command)(World&, const Options&)) {
    Options options;
    if (!cli::parse(name, options, arguments)) return 0;
    print_notes(options);
    return command(world, options);
}
template <class Options>
int run_alone(const char* name, const Strings& arguments, int (*command)(const Options&)) {
    Options options;
    if (!cli::parse(name, options, arguments)) return 0;
    print_notes(options);
    return command(options);
}

// The job's command follows "--".
inline int supervise(Strings arguments) {
    const auto dashes = std::find(arguments.begin(), arguments.end(), "--");
    const Strings job(dashes == arguments.end() ? dashes : dashes + 1, arguments.end());
    arguments.erase(dashes, arguments.end());
    const auto asks = [](const std::string& word) { return word == "-h" || begins_with(word, "--help"); };
    refuse_missing(job.empty() && std::none_of(arguments.begin(), arguments.end(), asks), "the command behind --",
                   "train_gpt supervise [OPTIONS] -- mpirun -n 8 ./train_gpt train ...");
    SuperviseOptions options;
    if (!cli::parse("supervise", options, arguments)) return 0;
    print_notes(options);
    return host_commands.supervise(options, job);
}

inline int run_command_line(Strings arguments, const ModelCommands& commands) {
    const bool given = !arguments.empty();
    std::string command = "train";
    if (!given || arguments[0] == "--help" || arguments[0] == "-h") command = "help";
    else if (arguments[0] == "--version" || (arguments.size() == 1 && lower_ascii(arguments[0]) == "-v")) command = "version";
    else if (arguments[0][0] != '-') {
        command = arguments[0];
        arguments.erase(arguments.begin());
    }
    if (command == "help") return cli::help_command(arguments, given);
    if (command == "version") return print_version();
    if (command == "train") return run_command("train", arguments, commands.train);
    if (command == "tune") return run_command("tune", arguments, commands.tune);
    if (command == "sweep") return run_command("sweep", arguments, commands.sweep);
    if (command == "generate") return run_command("generate", arguments, commands.generate);
    if (command == "eval") return run_command("eval", arguments, commands.eval);
    if (command == "check-node") return run_command("check-node", arguments, commands.check_node);
    cli::command_named(command);
    if (command == "supervise") return supervise(arguments);
    World world = World::join();
    if (world.size() > 1 && command != "prepare" && command != "curate" && command != "tokenizer") {
        if (world.rank() == 0)
            print_line(stderr, "error: train_gpt " + command +
                                   " runs as a single process; train, generate, eval, prepare, curate and tokenizer support "
                                   "several ranks; HINT: omit mpirun");
        return 2;
    }
    is_quiet() = world.rank() > 0;
    if (command == "serve") return run_command("serve", arguments, world, commands.serve);
    if (command == "curate") return run_command("curate", arguments, world, host_commands.curate);
    if (command == "prepare") return run_command("prepare", arguments, world, host_commands.prepare);
    if (command == "tokenizer") return run_command("tokenizer", arguments, world, host_commands.tokenizer);
    if (command == "export") return run_command("export", arguments, world, host_commands.export_model);
    if (command == "import") return run_alone("import", arguments, host_commands.import_model);
    const bool bare = command != "init" && !arguments.empty() && arguments[0][0] != '-';  // the option's name was omitted
    if (bare) arguments.insert(arguments.begin(), command == "report" ? "--runs" : command == "runs" ? "--folders" : "--path");
    if (command == "init") return run_alone("init", arguments, host_commands.init);
    if (command == "runs") return run_alone("runs", arguments, host_commands.runs);
    if (command == "report") return run_alone("report", arguments, host_commands.report);
    return run_alone("inspect", arguments, host_commands.inspect);
}

}  // namespace detail

inline int run_program(int argc, char** argv, const ModelCommands& commands) try {
    open_standard_streams();
    if (be::memory_is_host) cpu::flush_denormals();  // before there are other threads
    const int status = detail::run_command_line(Strings(argv + 1, argv + argc), commands);
    if (status == 0 && !has_trained()) check_output();  // a run does not need its console: it has a log
    return status;
} catch (const std::bad_alloc&) {
    print_line(stderr,
               "error: out of memory; HINT: a smaller --micro-batch-size, --batch or --memory-limit, fewer --threads, a "
               "smaller model");
    return 1;
} catch (const std::exception& e) {
    print_line(stderr, std::string("error: ") + in_words(e));
    return exit_status(e);
}
