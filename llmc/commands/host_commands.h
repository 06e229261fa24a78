// The commands that need no model. Only declared where another unit has them (dev/units).
#pragma once
#include "../options/options.h"
#include "../parallel/world.h"

struct HostCommands {
    int (*curate)(World&, const CurateOptions&);
    int (*prepare)(World&, const PrepareOptions&);
    int (*tokenizer)(World&, const TokenizerOptions&);
    int (*report)(const ReportOptions&);
    int (*inspect)(const InspectOptions&);
    int (*runs)(const RunsOptions&);
    int (*init)(const InitOptions&);
    int (*supervise)(const SuperviseOptions&, const Strings&);
    int (*import_model)(const ImportOptions&);
    int (*export_model)(World&, const ExportOptions&);
};
extern const HostCommands host_commands;

#ifndef SEVERAL_UNITS
#include "../base/check.h"
#include "curate_command.h"
#include "gguf_command.h"
#include "init_command.h"
#include "inspect.h"
#include "merge.h"
#include "report_command.h"
#include "runs_command.h"
#include "supervise_command.h"
#include "text_commands.h"

namespace detail {
inline int export_either(World& world, const ExportOptions& o) {
    const std::string then = " first, then --model DIR --gguf FILE", both = "one writes a directory, the other a file";
    refuse_without(!o.merge && !o.adapter.empty(), "--adapter", "--merge",
                   "--merge --adapter " + o.adapter + " --out DIR" + (o.gguf.empty() ? "" : then));
    refuse_together(o.merge && !o.gguf.empty(), "--merge", "--gguf", both, "--merge --out DIR" + then);
    refuse_together(!o.out.empty() && !o.gguf.empty(), "--out", "--gguf", both, "--out DIR" + then);
    for (const auto& [given, option] :
         {std::pair(!o.type.empty(), "--type"), {o.weights_only, "--weights-only"}, {o.overwrite, "--overwrite"}})
        refuse_without(given && (o.merge || !o.out.empty()), option, "--gguf");
    if (o.merge) return export_merged(world, o);
    return o.out.empty() ? export_command(world, o) : export_model_files(world, o);
}
}  // namespace detail

inline const HostCommands host_commands = {curate_on_ranks, prepare_on_ranks,     tokenizer_on_ranks, report_command,
                                           inspect_command, runs_command,         init_command,       supervise_command,
                                           import_command,  detail::export_either};
#endif
