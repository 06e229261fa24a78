// The commands that need no model. Only declared where another unit has them (dev/units).
#pragma once
#include "../options/options.h"
#include "../parallel/world.h"

struct HostCommands {
    int (*curate)(const CurateOptions&);
    int (*prepare)(const PrepareOptions&);
    int (*tokenizer)(const TokenizerOptions&);
    int (*report)(const ReportOptions&);
    int (*inspect)(const InspectOptions&);
    int (*import_model)(const ImportOptions&);
    int (*export_model)(World&, const ExportOptions&);
};
extern const HostCommands host_commands;

#ifndef SEVERAL_UNITS
#include "../base/check.h"
#include "curate_command.h"
#include "gguf_command.h"
#include "inspect.h"
#include "merge.h"
#include "report_command.h"
#include "text_commands.h"

namespace detail {
inline int export_either(World& world, const ExportOptions& o) {
    if (!o.merge && !o.adapter.empty())
        fail_usage("--adapter requires --merge; HINT: --merge --adapter %s --out DIR%s", o.adapter.c_str(),
                   o.gguf.empty() ? "" : " first, then --model DIR --gguf FILE");
    if (o.merge && !o.gguf.empty())
        fail_usage(
            "--merge and --gguf cannot be combined: one writes a directory, the other a file; HINT: --merge --out DIR "
            "first, then --model DIR --gguf FILE");
    if (!o.out.empty() && !o.gguf.empty())
        fail_usage("--out is a directory and --gguf a file; HINT: --out DIR first, then --model DIR --gguf FILE");
    if ((o.merge || !o.out.empty()) && (!o.type.empty() || o.weights_only || o.overwrite))
        fail_usage("--type, --weights-only and --overwrite require --gguf; HINT: omit them, or use --gguf after --merge");
    if (o.merge) return export_merged(world, o);
    return o.out.empty() ? export_command(world, o) : export_model_files(world, o);
}
}  // namespace detail

inline const HostCommands host_commands = {curate_command,  prepare_command, tokenizer_command,    report_command,
                                           inspect_command, import_command,  detail::export_either};
#endif
