// The table that a run prints before it starts, and that --dry-run ends with: model, batch, ranks, memory, and for a plan also
// the time.
#pragma once
#include <algorithm>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "../base/table.h"
#include "../base/terminal.h"
#include "../base/text.h"
#include "../data/dataloader.h"
#include "../model/choices.h"
#include "../model/flops.h"
#include "../model/hf_config.h"
#include "../model/parameters.h"
#include "../ops.h"
#include "../parallel/pipeline_schedule.h"
#include "../plan/from_options.h"
#include "../plan/guard.h"
#include "../plan/machine.h"
#include "../plan/nccl_memory.h"
#include "../plan/planner.h"
#include "../plan/remedies.h"
#include "run.h"
#include "../checkpoint/run_directory.h"

// The end of the table's row on precision: tensors stored in fewer bits than fp32.
inline std::string what_is_narrow(const Elements& gradients, const Elements& exp_avg, const Elements& exp_avg_sq) {
    std::string text;
    for (const size_t bytes : {2, 1}) {
        const bool first = exp_avg.element_bytes() == bytes, second = exp_avg_sq.element_bytes() == bytes;
        std::string names = gradients.element_bytes() == bytes ? "gradients" : "";
        if (first || second)
            names += std::string(names.empty() ? "" : " and ") + (first && second ? "both moments"
                                                                  : first         ? "exp_avg"
                                                                                  : "exp_avg_sq");
        if (!names.empty()) text += (text.empty() ? ", but " : ", ") + names + (bytes == 2 ? " in bf16" : " in 8 bits");
    }
    return text;
}

// The planned memory of this rank's model.
struct PlannedModel {
    size_t messages;     // data-parallel messages for all parameters
    std::string narrow;  // what_is_narrow of gradients and moments
    std::vector<std::pair<std::string, size_t>> purposes;
    size_t bytes;
    size_t in_libraries;  // of a GPU's memory, already allocated: contexts and buffers of communicators
    size_t checkpoint_bytes;
};

namespace detail {

// Adds a row if future checkpoints do not fit on the disk.
inline void describe_space(RunTable& t, const TrainOptions& o, size_t checkpoint_bytes) {
    const KeptCheckpoints kept = {o.keep, o.keep_every, Guard(guard_options(o)).way_back()};
    const int64_t most = (o.keep == 0 ? 0 : kept.most()) + 1;  // a new one is saved before others are removed
    const int64_t more = most - std::min<int64_t>(most - 1, (int64_t)find_checkpoints(o.out).size());
    const double free = free_space(o.out);
    if (free >= (double)more * (double)checkpoint_bytes) return;
    t.row("free space", format("%s, less than %s of %s, which --keep %lld may need; HINT: %s", human_bytes(free).c_str(),
                               counted(more, "more checkpoint").c_str(), human_bytes((double)checkpoint_bytes).c_str(),
                               (long long)o.keep, o.keep > 1 ? "a smaller --keep" : "make space there"));
}

// The snapshots, which need memory of the node; refuses them if it has too little. A node of several has its ranks' parts and a
// copy of the parts of the node before, each twice for a moment.
inline void describe_snapshots(RunTable& t, const Run& run, size_t checkpoint_bytes) {
    const TrainOptions& o = run.o;
    if (!o.snapshot_every) return;
    const NodeRing ring(run.world.nodes());
    const size_t ranks = o.world ? (size_t)o.world : (size_t)run.world.size();
    const size_t nodes = o.world ? (ranks + (size_t)o.node_size - 1) / (size_t)o.node_size : ring.size();
    const auto part_of = [&](size_t on_node) { return (double)checkpoint_bytes * (double)on_node / (double)ranks; };
    const double own = part_of(o.world ? std::min(ranks, (size_t)o.node_size) : ring.with(run.world.rank()).size()),
                 copy = nodes == 1 ? 0
                        : o.world  ? own
                                   : part_of(ring.before(run.world.rank()).size());
    if (!is_folder(o.snapshot_directory) && !run.plans_elsewhere())
        fail_usage("--snapshot-directory %s is not a directory; HINT: /dev/shm", o.snapshot_directory.c_str());
    const std::string root = snapshots_of(o.out), &place = root.empty() ? o.snapshot_directory : root;
    const size_t kept = root.empty() || nodes > 1 ? 0 : std::min<size_t>(2, find_checkpoints(root).size());
    double free = free_space(place);
    if (nodes > 1 || is_of_nodes(root)) free += bytes_in(root);  // that the new run removes, an unfinished snapshot included
    const double needed = (double)(2 - kept) * (own + copy);
    t.row("snapshots", format("every %s in %s%s, at most 2 of %s", counted(o.snapshot_every, "step").c_str(), place.c_str(),
                              nodes > 1 ? format(" of %zu nodes, with a copy on the next node", nodes).c_str() : "",
                              human_bytes(own + copy).c_str()));
    if (free < needed && !run.plans_elsewhere())
        fail("--snapshot-every needs %s in %s, %s are free; HINT: make space there, or omit it", human_bytes(needed).c_str(),
             place.c_str(), human_bytes(free).c_str());
}

// The choices of the block, in words.
inline std::string block_in_words(const ModelConfig& c) {
    std::string text = std::string(row_of(choices_of_norm, c.norm).title) + (c.norm_plus_one ? " by 1 + w" : "") +
                       row_of(choices_of_norm_place, c.norm_place).title;
    if (c.embedding_norm) text += " also after the embedding";
    const auto also = [&](bool used, const std::string& words) {
        if (used) text += ", " + words;
    };
    also(c.qk_norm != QkNorm::none, row_of(choices_of_qk_norm, c.qk_norm).title);
    also(true, row_of(choices_of_position, c.position).title);
    also(c.position == Position::rope && c.rotary_fraction != 1, format("%g of each head", c.rotary_fraction));
    also(c.rope_scaling.type != RopeScaling::Type::none, format("scaled by %g", c.rope_scaling.factor));
    also(c.nope_interval, format("none in 1 of %d layers", c.nope_interval));
    also(true, row_of(activations, c.activation).title);
    also(c.window, format("windows of %d tokens", c.window) +
                       (c.full_interval ? format(" except in 1 of %d layers", c.full_interval) : ""));
    also(c.attention_softcap > 0, "capped scores");
    also(c.logit_softcap > 0, "capped logits");
    also(c.residual_scale != 1, format("outputs of attention and MLP times %g", c.residual_scale));
    also(c.logit_divisor != 1, format("logits divided by %g", c.logit_divisor));
    also(c.sinks, "attention sinks");
    const bool all = c.qkv_bias && c.proj_bias && c.mlp_bias, none = !c.qkv_bias && !c.proj_bias && !c.mlp_bias;
    also(true, all ? "biases" : none ? "no biases" : "biases of some matrices");
    return text;
}

// How the command line was read, where that may surprise.
inline void describe_command_line(RunTable& t, const TrainOptions& o) {
    if (!o.notes.empty()) t.table.section("Options of other programs", Table::Values::text, "other_programs");
    for (const std::string& note : o.notes) {
        const size_t end = note.find(' ', note.find("--"));
        t.row(note.substr(0, end), note.substr(end + 1));
    }
    if (!o.replaced.empty()) t.table.section("Replaced values of --config", Table::Values::text, "replaced");
    for (const Replaced& r : o.replaced) t.row(r.option, r.text(), "replaced: ");
}

inline void describe_size(RunTable& t, const Run& run) {
    if (run.from_size.empty()) return;
    t.table.section("From --size " + run.o.size, Table::Values::text, "size");
    for (const DerivedRow& row : run.from_size) {
        t.row(row.label, row.text, "size: ");
        t.exact(row.value);
    }
}

inline void describe_model(RunTable& t, const TrainOptions& o, const ModelConfig& c) {
    t.table.section("Model");
    t.row("family", c.family + (o.preset.empty() ? "" : ", preset " + o.preset) + (o.model.empty() ? "" : ", from " + o.model));
    t.row("block", format("%s, %s head", block_in_words(c).c_str(), c.tied ? "tied" : "own"));
    t.row("shape", format("%d layers, width %d, %d heads of %d%s, feed-forward %d", c.L, c.C, c.NH, c.HS(),
                          c.NKV != c.NH ? format(" (%d for keys and values)", c.NKV).c_str() : "", c.F));
    t.exact({{"layers", c.L}, {"width", c.C}, {"heads", c.NH}, {"key_value_heads", c.NKV}, {"feed_forward", c.F}});
    t.row("vocabulary", format("%s (padded to %s)", with_commas(c.V).c_str(), with_commas(c.Vp).c_str()));
    t.exact({{"tokens", c.V}, {"padded", c.Vp}});
    const size_t parameters = ParameterTable(c).trained;
    t.row("parameters", format("%s (%s)", with_commas((int64_t)parameters).c_str(), human_count((double)parameters).c_str()));
    t.exact(parameters);
    if (c.mixture.on()) {
        t.row("experts", mixture_in_words(c));
        t.exact(mixture_in_json(c));
    }
    if (c.adapted()) {
        const size_t trained = trained_table(c).trained;
        t.row("adapters", format("%s; %s parameters (%.2f%%)", adapters_in_words(c).c_str(),
                                 human_count((double)trained).c_str(), 100.0 * (double)trained / (double)parameters));
        t.exact(trained);
        if (c.quantized()) t.row("frozen matrices", format("in %s", o.quantize_base.c_str()));
    }
    t.row("FLOPs per token", human_count(model_flops_per_token(c, o.seq_length)) + " (forward and backward, causal attention)");
    t.exact(model_flops_per_token(c, o.seq_length));
}

// The factors of tensors inside and outside blocks, if the options are for another model size.
inline void describe_parametrization(RunTable& t, const TrainOptions& o, const ModelConfig& c) {
    if (o.parametrization == "standard") return;
    const Parametrization& p = c.parametrization;
    t.table.section("Parametrization");
    t.row("kind", format("%s: width %d is %g times the base's %d", o.parametrization.c_str(), c.C, p.width, o.mup_base_width) +
                      (o.mup_base_depth ? format(", %d layers are %g times %d", c.L, p.depth, o.mup_base_depth) : "") +
                      (o.mup_base_head_size ? format(", heads %g times %d", p.head_size, o.mup_base_head_size) : ""));
    const MuonRecipe muon = muon_recipe(o);
    std::vector<std::pair<TensorFactors, Strings>> groups;
    for (const TensorSpec& row : ParameterTable(c).rows) {
        if (row.block > 0) continue;
        const bool by_muon = muon.on && row.block == 0 && !row.vector();
        for (const RowBlock& rows : row.blocks) {
            TensorFactors f = row.factors.folded(rows.fold);
            if (row.init == Init::scaled_normal) f.init /= std::sqrt(p.depth);  // for comparison with the base model's
            if (const double lr = muon.learning_rate(f.lr, p); by_muon) f = {f.init, lr, 1 / lr, 0};
            if (!optimizer_row(o.optimizer).second_moment()) f.eps = 0;
            if (row.vector()) f.weight_decay = 0;
            const std::string name = row.name.substr(row.name.rfind('.') + 1) + (rows.fold != 1 ? " (queries)" : "");
            const auto same = std::find_if(groups.begin(), groups.end(), [&](const auto& g) { return g.first == f; });
            if (same == groups.end()) groups.push_back({f, {name}});
            else if (same->second.back() != name) same->second.push_back(name);
        }
    }
    for (const auto& [f, names] : groups) {
        t.row(names[0], format("initial values x %g, learning rate x %g", f.init, f.lr) +
                            (f.weight_decay > 0 ? format(", weight decay x %g", f.weight_decay) : "") +
                            (f.eps > 0 ? format(", epsilon x %g", f.eps) : "") +
                            (names.size() > 1 ? "; as " + joined(Strings(names.begin() + 1, names.end())) : ""));
        t.exact({{"tensors", names},
                 {"initial_values", f.init},
                 {"learning_rate", f.lr},
                 {"weight_decay", f.weight_decay},
                 {"epsilon", f.eps}});
    }
}

inline void describe_batch(RunTable& t, const TrainOptions& o, const Schedule& schedule, int replicas) {
    t.table.section("Batch");
    const int64_t batch = schedule.final_batch;
    t.row("step",
          format("%s of %s = %s, in %s of %d%s", counted(batch, "sample").c_str(), counted(o.seq_length, "token").c_str(),
                 counted(batch * o.seq_length, "token").c_str(),
                 counted(batch / o.micro_batch_size / replicas, "micro-batch", "micro-batches").c_str(), o.micro_batch_size,
                 replicas > 1 ? format(" on each of %d data-parallel ranks", replicas).c_str() : ""));
    t.exact({{"samples", batch},
             {"tokens_per_sample", o.seq_length},
             {"micro_batch", o.micro_batch_size},
             {"data_parallel_ranks", replicas}});
    if (schedule.rampup.samples)
        t.row("ramp-up", format("from %lld by %lld over %s samples", (long long)schedule.rampup.start,
                                (long long)schedule.rampup.increment, with_commas(schedule.rampup.samples).c_str()));
    if (schedule.open) {
        t.row("run", "as many steps as fit into " + o.time_budget);
    } else {
        t.row("run", format("%s, %s, %s tokens", counted(schedule.total_steps, "step").c_str(),
                            counted(schedule.total_samples, "sample").c_str(),
                            human_count((double)schedule.total_samples * o.seq_length).c_str()));
        t.exact({{"steps", schedule.total_steps},
                 {"samples", schedule.total_samples},
                 {"tokens", (double)schedule.total_samples * o.seq_length}});
    }
    if (o.ema_decay > 0)
        t.row("EMA of the weights",
              format("decay %g: about the last %s", o.ema_decay, counted(std::llround(1 / (1 - o.ema_decay)), "step").c_str()));
    const std::string warmup = o.lr_warmup_iters ? counted(o.lr_warmup_iters, "step") : counted(schedule.warmup, "sample");
    const std::string end = schedule.style == "constant" ? "" : format(" to %g", schedule.min_lr);
    t.row("learning rate", format("%s %g%s, ", schedule.style.c_str(), schedule.max_lr, end.c_str()) +
                               (schedule.warmup ? "warm-up over " + warmup : "no warm-up"));
}

// The grid of ranks, and how the model is split over it.
inline void describe_ranks(RunTable& t, const Run& run, size_t messages) {
    const Ranks& ranks = *run.ranks;
    const Mesh& mesh = ranks.mesh;
    const LocalSizes n(run.c, mesh.tp);
    t.row("ranks", mesh.text());
    if (mesh.tp.size > 1)
        t.row("tensor parallel", format("%d heads, %d feed-forward columns per rank%s", n.NHl, run.c.F / n.tp_size,
                                        ranks.sequence_parallel ? ", rows split over tp (sequence parallel)" : ""));
    if (mesh.dp.size > 1)
        t.row("data parallel", format("%s, %zu message%s of at most %s parameters",
                                      ranks.zero > 2   ? "optimizer state, gradients and parameters sharded (ZeRO-3)"
                                      : ranks.zero > 1 ? "optimizer state and gradients sharded (ZeRO-2)"
                                      : ranks.zero     ? "optimizer state sharded (ZeRO-1)"
                                                       : "full optimizer state on each rank (ZeRO off)",
                                      messages, messages == 1 ? "" : "s", human_count((double)ranks.bucket_elements).c_str()));
    if (mesh.cp.size > 1)
        t.row("context parallel",
              format("%d of %d rows of a sequence per rank, %s", run.o.seq_length / mesh.cp.size, run.o.seq_length,
                     run.ranks->exchanges_heads ? "exchanged for heads in attention" : "keys and values gathered"));
    if (mesh.ep.size > 1)
        t.row("expert parallel", format("%d of %d experts per rank, for the rows of %d ranks, sent %s",
                                        run.c.mixture.experts / mesh.ep.size, run.c.mixture.experts, mesh.ep.size,
                                        sends_all_to_all(run.o, run.c) ? "to the ranks of their experts (alltoall)"
                                                                       : "to all of them (allgather)"));
    if (mesh.pp.size > 1) {
        std::string layers;
        for (const int count : layers_of_stages(run.o, run.c, mesh))
            layers += (layers.empty() ? "" : " ") + std::to_string(count);
        t.row("pipeline", "layers of the stages: " + layers);
    }
}

inline void machine_rows(RunTable& t, const Run& run, const PlannedModel& planned) {
    const TrainOptions& o = run.o;
    t.table.section("Machine");
    const std::string here = std::string(be::backend_name) + ", " + run.ctx.description();
    const bool other_machine = run.plans_elsewhere() && (be::memory_is_host || run.ctx.has_device());
    t.row("backend", other_machine ? o.device + " of the plan (--device), not this machine: " + here : here);
    t.row("peak", run.peak.text());
    t.row("precision", format("%s storage, %s sums, gradients and optimizer%s", precision_name,
                              sizeof(real) == 4 ? "fp32" : "fp64", planned.narrow.c_str()));
    if (!o.fp8_format.empty())
        t.row("FP8", format("%s, %s scales, from step %s on%s; transposes %s", o.fp8_format.c_str(), o.fp8_recipe.c_str(),
                            o.fp8_start.c_str(),
                            o.first_last_layers_bf16 ? format(", but the first %d and the last %d layers",
                                                              o.num_layers_at_start_in_bf16, o.num_layers_at_end_in_bf16)
                                                           .c_str()
                                                     : "",
                            o.fp8_weight_transpose == "keep" ? "kept" : "on the fly"));
    if (const std::string note = slow_attention_note(run.ctx, run.c); !note.empty()) t.row("attention", note);
    t.row("recompute", o.recompute_num_layers
                           ? format("%s in the first %s of each stage, %s in the others", o.recompute_granularity.c_str(),
                                    counted(o.recompute_num_layers, "layer").c_str(), o.recompute_other_layers.c_str())
                           : o.recompute_granularity);
    if (const Preference p = preference_of(o); p.on())
        t.row("preference training",
              format("DPO, %s loss, beta %g%s", o.dpo_loss.c_str(), p.beta,
                     p.label_smoothing > 0 ? format(", label smoothing %g", p.label_smoothing).c_str() : ""));
    if (run.ranks->mesh.world.size > 1) describe_ranks(t, run, planned.messages);
}

inline void describe_memory(RunTable& t, const PlannedModel& planned, bool elsewhere) {
    t.table.section("Memory", Table::Values::amounts);
    const auto memory = [&](const std::string& purpose, size_t bytes) {
        t.row(purpose, human_bytes((double)bytes), "memory: ");
        t.exact(bytes);
    };
    for (const auto& [purpose, bytes] : planned.purposes) memory(purpose, bytes);
    const size_t resident = elsewhere ? 0 : resident_memory_bytes();
    if (!elsewhere) memory("program, libraries, data order", resident);
    if (be::memory_is_host) memory("total", planned.bytes + resident);
    else memory("total on the GPU", planned.bytes);
    if (planned.in_libraries) memory("NCCL, already allocated", planned.in_libraries);
}

// A note where the data with the most epochs is read more than 4 times, with the length that suffices. Repetitions beyond about
// 4 add little (Muennighoff et al., 2023, arXiv:2305.16264).
inline std::string note_on_epochs(const Run& run, const DataSummary& longest) {
    constexpr double most = 4;
    if (run.schedule.open || longest.epochs < most + 0.05) return "";
    const double fraction = most / longest.epochs;
    const auto part = [&](int64_t n) { return std::max<int64_t>(1, (int64_t)(fraction * (double)n)); };
    const bool in_samples = run.o.train_samples > 0;
    const int64_t samples = part(run.schedule.total_samples);
    return format(
        "the run reads %s %.*f times; repetitions beyond 4 add little. HINT: --train-%s %lld (%s tokens) reads it 4 times, "
        "or give more text",
        longest.name.c_str(), longest.epochs < 99.5 ? 1 : 0, longest.epochs, in_samples ? "samples" : "iters",
        (long long)(in_samples ? samples : part(run.schedule.total_steps)),
        human_count((double)samples * run.o.seq_length).c_str());
}

// Summarizes a run in two lines before the table: the model and its machine, and the length.
inline void summarize(Run& run, const PlannedModel& planned) {
    const TrainOptions& o = run.o;
    const int ranks = o.world ? o.world : run.world.size();
    const std::string model = !o.preset.empty()  ? o.preset
                              : !o.model.empty() ? o.model
                              : !o.size.empty()  ? "--size " + o.size
                                                 : run.c.family;
    const std::string machine = run.plans_elsewhere() ? o.device : be::backend_name;
    run.table.summary.push_back(format("%s: %s in %s on %s, %s per rank, into %s", model.c_str(),
                                       parameters_in_words(run.c).c_str(), precision_name,
                                       (ranks > 1 ? format("%d x ", ranks) + machine : machine).c_str(),
                                       human_bytes((double)planned.bytes).c_str(), o.out.c_str()));
    const std::string step = human_count((double)run.schedule.final_batch * o.seq_length) + " tokens";
    run.table.summary.push_back(run.schedule.open
                                    ? "as many steps of " + step + " as fit into " + o.time_budget
                                    : counted(run.schedule.total_steps, "step") + " of " + step + ": " +
                                          human_count((double)run.schedule.total_samples * o.seq_length) + " tokens");
}

inline std::string describe(const DataSummary& s) {
    return format("%s tokens in %s document%s, %.1f%% of the samples", human_count((double)s.tokens).c_str(),
                  human_count((double)s.documents).c_str(), s.documents == 1 ? "" : "s", 100 * s.share);
}

}  // namespace detail

inline void describe_run(Run& run, const PlannedModel& planned) {
    RunTable& t = run.table;
    detail::summarize(run, planned);
    t.table.section("Run");
    t.row("name", run_name(run.o));
    t.row("output", run.o.out);
    detail::describe_space(t, run.o, planned.checkpoint_bytes);
    detail::describe_snapshots(t, run, planned.checkpoint_bytes);
    detail::describe_command_line(t, run.o);
    detail::describe_size(t, run);
    detail::describe_model(t, run.o, run.c);
    detail::describe_parametrization(t, run.o, run.c);
    detail::describe_batch(t, run.o, run.schedule, run.ranks->mesh.samples.size);
    detail::machine_rows(t, run, planned);
    detail::describe_memory(t, planned, run.plans_elsewhere());
}

inline void describe_data(Run& run) {
    RunTable& t = run.table;
    if (!run.train) return;
    const std::vector<DataSummary> sources = run.train->summary();  // passes over all samples
    DataSummary longest = {};
    for (const DataSummary& s : sources)
        if (s.epochs > longest.epochs) longest = s;
    if (!run.schedule.open && t.summary.size() < 3)
        t.summary.push_back(format("%.3g epochs of %s", longest.epochs, joined(run.o.data_path).c_str()));
    t.table.section("Data");
    for (const DataSummary& s : sources) {
        if (!s.note.empty()) t.row("split of " + s.name, s.note);
        if (!s.packing.empty()) t.row("packing of " + s.name, s.packing);
        t.row("training " + s.name, detail::describe(s) + format(", %.2f epochs", s.epochs));
    }
    if (const std::string note = detail::note_on_epochs(run, longest); !note.empty() && run.main_rank())
        print_line(stderr, "note: " + note);
    if (!run.valid) return;
    for (const DataSummary& s : run.valid->summary()) t.row("validation " + s.name, detail::describe(s));
    const double passes = (double)run.valid_samples / (double)run.valid->samples_of_one_pass();
    t.row("a validation",
          format("%s, %s", counted(run.valid_samples, "sample").c_str(),
                 run.o.eval_fixed ? "the same samples each time" : "the next samples each time (--eval-fixed: the same)") +
              (passes > 1 ? format(": %.1f passes over the data; fewer --eval-iters suffice", passes) : ""));
}

// ---- plans -----------------------------------------------------------------------------------------------------------------
// For one rank of each pipeline stage, with these options and number of ranks.
using MemoryOfStages = std::function<std::vector<RankMemory>(const TrainOptions&, int ranks)>;

namespace detail {

// Splits of L layers over n stages with fewer of them at the ends, which also compute the embedding and the head.
inline std::vector<std::vector<int>> splits_with_short_ends(int L, int n) {
    std::vector<std::vector<int>> splits;
    const int even = L / n;
    for (int last = 0; last <= even; last++)
        for (int first = std::max(0, even - 1); first <= L - last; first++) {
            const int between = L - first - last;
            if (n == 2 ? between != 0 : first > between / (n - 2) + 1 || between < n - 2) continue;
            std::vector<int> layers(n, n == 2 ? 0 : between / (n - 2));
            for (int i = 0; n > 2 && i < between % (n - 2); i++) layers[n - 2 - i]++;
            layers.front() = first;
            layers.back() = last;
            splits.push_back(layers);
        }
    return splits;
}

// A split of the layers with which a step is at least 2% faster than `plan`, if one fits: the head of a large vocabulary takes
// as long as several layers.
inline void describe_better_split(RunTable& t, const TrainOptions& o, const ModelConfig& c, int64_t batch, const Plan& plan,
                                  const MemoryOfStages& memory_of_stages) {
    struct Split {
        Plan plan;
        std::vector<int> layers;
    };
    std::vector<Split> better;
    const int ranks = std::max(1, o.world);
    for (const std::vector<int>& layers : splits_with_short_ends(c.L, plan.in.pp * plan.in.vpp)) {
        Plan p = make_plan(plan_input(o, c, ranks, layers, batch, sizeof(floatX)));
        if (p.step_seconds < 0.98 * plan.step_seconds) better.push_back({std::move(p), layers});
    }
    std::stable_sort(better.begin(), better.end(),
                     [](const Split& a, const Split& b) { return a.plan.step_seconds < b.plan.step_seconds; });
    for (const Split& split : better) {
        TrainOptions p = o;
        p.account_for_embedding_in_pipeline_split = p.account_for_loss_in_pipeline_split = false;
        p.pipeline_layers.clear();
        for (const int n : split.layers) p.pipeline_layers.push_back(std::to_string(n));
        const std::vector<RankMemory> stages = memory_of_stages(p, ranks);
        const bool fits = std::all_of(stages.begin(), stages.end(),
                                      [&](const RankMemory& m) { return m.device() <= planned_memory_bytes(o); });
        if (!fits) continue;
        std::string option = "--pipeline-layers";
        for (const std::string& n : p.pipeline_layers) option += " " + n;
        if (o.account_for_embedding_in_pipeline_split) option += " --no-account-for-embedding-in-pipeline-split";
        if (o.account_for_loss_in_pipeline_split) option += " --no-account-for-loss-in-pipeline-split";
        t.row("faster split", format("%s: %.3g instead of %.3g s per step, bubble %.1f%%; train_gpt tune searches whole "
                                     "layouts",
                                     option.c_str(), split.plan.step_seconds, plan.step_seconds, 100 * split.plan.bubble));
        t.exact({{"options", option}, {"layers", split.layers}, {"seconds", split.plan.step_seconds}});
        return;
    }
}

}  // namespace detail

// Predicts the time of a run on other machines' GPUs, and the memory that it needs on each.
inline void describe_plan(Run& run, const MemoryOfStages& memory_of_stages) {
    RunTable& t = run.table;
    const TrainOptions& o = run.o;
    const Mesh& mesh = run.ranks->mesh;
    const int ranks = std::max(1, o.world);
    t.table.section("Plan", Table::Values::text);
    const std::vector<RankMemory> stages = memory_of_stages(o, ranks);
    for (int stage = 0; stage < mesh.pp.size; stage++) {
        if (mesh.pp.size > 8 && stage >= 2 && stage < mesh.pp.size - 2) continue;
        const RankMemory& needed = stages[stage];
        t.row(mesh.pp.size == 1 ? "memory of a rank" : format("memory of stage %d", stage),
              format("%s of %s, and %s of %s on the host", human_bytes(needed.device()).c_str(),
                     human_bytes(planned_memory_bytes(o)).c_str(), human_bytes((double)needed.host).c_str(),
                     human_bytes(planned_host_bytes(o, ranks)).c_str()));
        t.exact({{"bytes", (size_t)needed.device()},
                 {"of", planned_memory_bytes(o)},
                 {"on_host", needed.host},
                 {"of_host", planned_host_bytes(o, ranks)}});
    }
    if (const NcclMemory& nccl = stages[0].nccl; nccl.bytes() > 0) {
        t.row("including NCCL, estimated", format("%s: %s", human_bytes(nccl.bytes()).c_str(), nccl.in_words().c_str()));
        t.exact({{"bytes", (size_t)nccl.bytes()}, {"communicators", nccl.groups}, {"edges", nccl.edges}});
    }
    const std::vector<int> layers = layers_of_stages(o, run.c, mesh);
    const Plan plan = make_plan(plan_input(o, run.c, ranks, layers, run.schedule.final_batch, sizeof(floatX)));
    add_rows(t, plan, run.schedule.open ? 0 : (double)run.schedule.total_samples * o.seq_length);
    if (mesh.pp.size > 1) detail::describe_better_split(t, o, run.c, run.schedule.final_batch, plan, memory_of_stages);
    if (!run.schedule.open)
        t.summary.push_back(
            format("a step takes %s and the run %s, by the plan", human_duration(plan.step_seconds).c_str(),
                   human_duration(86400 * plan.days((double)run.schedule.total_samples * o.seq_length)).c_str()));
    if (mesh.pp.size > 1)
        t.picture = draw_pipeline(mesh.pp.size, mesh.vpp, (int)plan.micro_batches, plan.bubble, terminal_width(stdout));
}

// Predicts the time on this CPU, given the seconds per step.
inline void describe_time_here(Run& run, double step_seconds) {
    RunTable& t = run.table;
    const int T = run.o.seq_length;
    const double tokens = (double)run.schedule.total_samples * T;
    const double rate = (double)run.schedule.final_batch * T / step_seconds;
    t.table.section("Plan", Table::Values::text);
    t.row("step", "about " + human_duration(step_seconds) + ", measured for a second on a part of the model");
    t.exact({{"seconds", step_seconds}});
    t.row("throughput", format("%s tokens/s, %.0f%% of the peak", human_count(rate).c_str(),
                               100 * rate * model_flops_per_token(run.c, T) / run.peak.flops));
    t.exact({{"tokens_per_second", rate}});
    if (run.schedule.open) return;
    t.summary.push_back("the run takes about " + human_duration(tokens / rate) + " on this machine, without validation");
    t.row("whole run", format("about %s for %s tokens, without validation", human_duration(tokens / rate).c_str(),
                              human_count(tokens).c_str()));
    t.exact({{"tokens", tokens}, {"days", tokens / rate / 86400}});
}

// If the plan exceeds the available memory, on the GPU or on its host, prints this and lists remedies.
inline void describe_shortage(Run& run, const MemoryOfStages& memory_of_stages) {
    const TrainOptions& o = run.o;
    Table& table = run.table.table;
    const bool on_cpu = be::memory_is_host && !o.world;
    const int ranks = o.world ? o.world : run.world.size();
    int sharing = 0;  // ranks on this machine, which share its memory
    for (int r = 0; r < run.world.size(); r++) sharing += run.world.is_here(r);
    const double resident = (double)resident_memory_bytes();
    const double here = ((double)cpu::available_memory() + resident) / std::max(1, sharing);
    const double of_device = run.plans_elsewhere() ? planned_memory_bytes(o) : on_cpu ? here : (double)be::available_memory();
    const double of_host = run.plans_elsewhere() ? planned_host_bytes(o, ranks) : here;
    const auto on_device = [&](const TrainOptions& p, int n) {
        double largest = 0;
        for (const RankMemory& r : memory_of_stages(p, n)) largest = std::max(largest, r.device());
        return largest + (on_cpu ? resident : 0);
    };
    const auto on_host = [&](const TrainOptions& p, int n) {
        double largest = 0;
        for (const RankMemory& r : memory_of_stages(p, n)) {
            if (r.device() > of_device) throw Error("the GPU has less memory");
            largest = std::max(largest, (double)r.host);
        }
        return largest + (run.plans_elsewhere() ? 0 : resident);
    };
    const auto report = [&](const char* name, const char* title, double needed, double most, bool host, auto bytes_of) {
        table.section(format("%s: a rank needs %s, but only %s are available. It would fit with", title,
                             human_bytes(needed).c_str(), human_bytes(most).c_str()),
                      Table::Values::amounts, name);
        const std::vector<Remedy> remedies = find_remedies(o, ranks, host, most, bytes_of);
        for (const Remedy& r : remedies) {
            table.row(r.options, human_bytes(r.bytes));
            table.exact({{"options", r.options}, {"bytes", r.bytes}});
        }
        if (remedies.empty()) table.row("a smaller model or --seq-length", "", "nothing else is enough");
    };
    if (const double bytes = on_device(o, ranks); bytes > of_device)
        return report("not_enough_memory", "NOT ENOUGH MEMORY", bytes, of_device, on_cpu, on_device);
    if (on_cpu) return;
    if (const double bytes = on_host(o, ranks); bytes > of_host)
        report("not_enough_host_memory", "NOT ENOUGH MEMORY ON THE HOST", bytes, of_host, true, on_host);
}
