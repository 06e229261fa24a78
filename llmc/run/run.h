// A training run without its model: derived from options, checkpoint and data. In this order, on all ranks:
//   watch_ranks          handles signals, and reports ranks that wait too long
//   set_up               resolves checkpoint, tokenizer, model, ranks and schedule
//   lock_run_directory   takes the output directory: before set_up if that reads a checkpoint there, else after it, when the
//                        options have been checked
//   (the model's memory is planned)
//   open_data            the samples in their order; a resumed run must have the checkpoint's
// All errors that can be detected before memory is allocated for a model are reported here.
#pragma once
#include <algorithm>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "../base/progress.h"
#include "../base/table.h"
#include "../base/terminal.h"
#include "../base/text.h"
#include "../cpu/threads.h"
#include "../data/dataloader.h"
#include "../tokenizer/tokenizer.h"
#include "../model/model_config.h"
#include "../ops.h"
#include "../parallel/memory_of_node.h"
#include "../parallel/ranks.h"
#include "../parallel/world.h"
#include "../checkpoint/adapter_files.h"
#include "../checkpoint/checkpoint.h"
#include "../options/options.h"
#include "../plan/from_options.h"
#include "../plan/machine.h"
#include "../checkpoint/model_texts.h"
#include "resume.h"
#include "../checkpoint/run_directory.h"
#include "../options/schedule.h"
#include "../options/skip.h"
#include "stop.h"
#include "time_budget.h"
#include "timetable.h"
#include "../checkpoint/agreement.h"
#include "../checkpoint/saver.h"
#include "../checkpoint/training_state.h"
#include "../infer/training_tasks.h"

// The description of the run, for the console and as rows of the report.
struct RunTable {
    Table table;
    nlohmann::ordered_json rows = nlohmann::ordered_json::object();
    Strings summary;      // the lines before the table
    std::string picture;  // picture of the planned pipeline
    void exact(nlohmann::ordered_json value) { table.exact(std::move(value)); }
    void row(const std::string& label, const std::string& value, const std::string& prefix = "") {
        table.row(label, value);
        std::string key = prefix + label;
        for (int n = 2; rows.contains(key); n++) key = format("%s%s (%d)", prefix.c_str(), label.c_str(), n);
        rows[key] = value;
    }
    void print(bool json) const {
        if (json) return print_json(table.json());
        for (const std::string& line : summary) puts(line.c_str());
        table.print();
        fputs(picture.c_str(), stdout);
    }
};

// The log-probabilities under the reference, for pairs of answers (preference_reference.h).
struct Reference {
    nlohmann::ordered_json identity{};  // of the model and of the data; null: no pairs of answers
    std::string file{};                 // content of the file in each checkpoint
};

struct Run {
    World& world;
    TrainOptions o;
    be::Ctx ctx;
    std::string resumed_from{};              // a checkpoint, or empty
    TrainingState state{};                   // the checkpoint's, or a new run's
    Strings matrix_unit{};                   // matrix units, recorded in checkpoints
    std::unique_ptr<Tokenizer> tokenizer{};  // may be null
    ModelTexts texts{};                      // text files of checkpoints
    std::vector<DerivedRow> from_size{};     // options derived from --size
    ModelConfig c{};
    std::shared_ptr<Ranks> ranks{};
    Schedule schedule{};
    BatchRanges discards{};  // batches to draw and drop
    std::unique_ptr<DataLoader> train{}, valid{};
    int64_t valid_samples = 0;      // samples per validation
    nlohmann::ordered_json data{};  // data_identity
    Reference reference{};
    TrainingTasks tasks{};
    Peak peak{};
    size_t free_before_groups = 0;  // of a GPU's memory, in bytes
    // True if it generates text while it trains, for which the stages of a pipeline sum logits.
    bool generates() const { return tasks.any_written() || o.sample_interval > 0; }
    RunTable table{};
    PhaseStatus phase{};  // on rank 0

    bool main_rank() const { return world.rank() == 0; }  // prints, logs, and holds the directory
    bool resumes() const { return !resumed_from.empty(); }
    // The directory that describes the model: the checkpoint's, or, for adapters, their base's.
    const std::string& model_directory() const { return resumes() && !is_adapter(resumed_from) ? resumed_from : o.model; }
    // True if the resumed checkpoint is in OUT or is its snapshot; then the other files in OUT belong to this run, too.
    bool same_directory() const {
        const std::string snapshots = snapshots_of(o.out);
        return resumes() && (in_out(resumed_from) || (!snapshots.empty() && begins_with(resumed_from, snapshots + "/")));
    }
    bool in_out(const std::string& checkpoint) const {
        namespace fs = std::filesystem;
        return fs::canonical(checkpoint).parent_path() == fs::canonical(o.out);
    }
    // True if it plans for other machines' ranks or GPUs.
    bool plans_elsewhere() const { return o.world || !ctx.has_device(); }
    void begin(const std::string& what) {
        if (main_rank() && !o.quiet) phase.begin(what);
    }
};

// Fails if the command line lacks a model, a length or data, and names all that is missing, before any file is read.
inline void check_nothing_is_missing(const TrainOptions& o) {
    std::string missing;
    const auto require = [&](bool given, const char* text) {
        if (!given) missing += (missing.empty() ? "" : "\n  ") + std::string(text);
    };
    const bool model = !o.preset.empty() || !o.model.empty() || !o.size.empty() || o.num_layers || !o.resume.empty();
    const bool adapts = o.lora_rank || o.prompt_tokens || o.dpo_beta;  // their own errors name the missing model
    require(model || adapts, no_model);
    try {
        if (!o.preset.empty()) config_from_preset(o.preset);
    } catch (const UsageError& e) {
        require(false, e.what());
    }
    require(o.train_iters || o.train_samples || !o.time_budget.empty() || !o.size.empty(), detail::no_length);
    require(o.dry_run || !o.data_path.empty(), "no data is given; HINT: --data-path PREFIX, which train_gpt prepare writes");
    if (!missing.empty()) fail_usage("%s", missing.c_str());
}

inline void watch_ranks(World& world, const TrainOptions& o) {
    install_stop_signals(world.rank() == 0, !parse_save_interval(o.save_every).never, world.processes_here());
    world.watch(parse_timeout(o.distributed_timeout), "");
}

// Locks the directory against other runs. A new run must not find another one in it, nor a model, which --model and --adapter
// would read instead of the run's checkpoints.
inline void lock_run_directory(World& world, const TrainOptions& o, std::optional<RunLock>& lock) {
    if (world.rank() == 0) {
        const std::string snapshots = snapshots_of(o.out);
        if (is_model_or_adapter(o.out) && steps_to_try(o.out).empty() && snapshots.empty())
            fail("%s contains %s, which would be read in place of the run's checkpoints; HINT: give another --out",
                 o.out.c_str(), is_adapter(o.out) ? "adapters" : "a model");
        lock.emplace(o.out);
        if (const std::string done = adopt_copied_latest(o.out); !done.empty()) print_line(stderr, "note: " + done);
        // Parts may be on other nodes only. A run that ends well leaves no name of snapshots.
        const bool has_snapshots =
            is_of_nodes(snapshots_named_in(o.out)) || (!snapshots.empty() && !find_checkpoints(snapshots).empty());
        if (o.resume.empty() && (has_snapshots || !steps_to_try(o.out).empty()))
            fail("%s already holds a run; HINT: --resume auto resumes it; or give another --out", o.out.c_str());
    }
    world.watch(parse_timeout(o.distributed_timeout), world.size() > 1 ? ranks_file(o.out) : "");
}

// ---- set_up ----------------------------------------------------------------------------------------------------------------
namespace detail {

inline void check_recomputation(const TrainOptions& o) {
    const char *const policy = o.recompute_granularity.c_str(), *const others = o.recompute_other_layers.c_str();
    refuse_without(o.recompute_num_layers && o.recompute_granularity == "none", "--recompute-num-layers",
                   "--recompute-granularity selective, mlp or full");
    if (o.recompute_other_layers == "none") return;
    refuse_without(!o.recompute_num_layers, "--recompute-other-layers", "--recompute-num-layers",
                   "--recompute-granularity " + o.recompute_other_layers);
    if (recompute_policy(o.recompute_other_layers) >= recompute_policy(o.recompute_granularity))
        fail_usage(
            "--recompute-other-layers %s must recompute less than --recompute-granularity %s, the policy of the first %s; "
            "HINT: choose a weaker policy",
            others, policy, counted(o.recompute_num_layers, "layer").c_str());
}

// Values that are allowed, because experiments may need them, but are usually mistakes.
inline void warn_of_unusual_values(const TrainOptions& o) {
    const auto warn = [](bool unusual, const std::string& why) {
        if (unusual) print_line(stderr, "warning: " + why);
    };
    warn(o.adam_eps > 1e-7,
         format("--adam-eps %g is above 1e-7; with 1e-5 an early LLM-jp 172B failed, as its authors reported", o.adam_eps));
    warn(o.lr > 0.1,
         format("--lr %g is above 0.1: an update moves a weight by about this much, and weights start at about 0.02; "
                "HINT: 1e-4 to 6e-3 are usual",
                o.lr));
    const double decay = std::max(o.weight_decay, o.end_weight_decay.value_or(0));
    warn(o.lr * decay > 0.1, format("--lr %g times --weight-decay %g shrinks the weights by %.3g%% in each update; HINT: "
                                    "--weight-decay 0.1 is usual",
                                    o.lr, decay, 100 * o.lr * decay));
    warn(o.init_method_std.value_or(0) > 1,
         format("--init-method-std %g is above 1; HINT: 0.02 is usual", o.init_method_std.value_or(0)));
    warn(o.eval_iters / 10 > o.eval_interval,
         format("a validation reads --eval-iters %s batches, and training only --eval-interval %s before the next: most of the "
                "time goes to validation",
                with_commas(o.eval_iters).c_str(), with_commas(o.eval_interval).c_str()));
    if (be::memory_is_host)
        warn(o.threads > 4 * (int)cpu::usable_cpus().size(),
             format("--threads %d on %s that this process may use: threads wait for each other; HINT: omit it", o.threads,
                    counted((int)cpu::usable_cpus().size(), "CPU").c_str()));
}

inline void adjust_options(Run& run) {
    TrainOptions& o = run.o;
    run.ctx.plain = o.plain;
    apply_time_budget(o);
    plan_for(run.ctx, o);
    refuse_gguf_on_ranks(run.world, o.model);
    if (!o.model.empty()) o.model = model_directory(o.model);
    if (!o.given.count("quantize-base") && (o.lora_rank || o.prompt_tokens) && !o.model.empty() && gguf_model_in(o.model))
        o.quantize_base = "gguf";
    o.optimizer = optimizer_row(o.optimizer).word;
    check_recomputation(o);
    check_optimizer(o);
    check_overrides(o);
    TrainingState unused;
    add_skips(unused, o);  // these two report malformed values
    has_share(o.split, DataSplit::train);
    refuse_value(!o.prometheus.empty() && !ends_with(o.prometheus, ".prom"), "--prometheus", o.prometheus,
                 "a file whose name ends with .prom, which is replaced");
    offloads_optimizer(o);  // rejects it with some optimizers
    if (o.use_z_loss && o.z_loss_strength == 0) o.z_loss_strength = 1e-4;
    if (run.main_rank()) warn_of_unusual_values(o);
}

inline void find_checkpoint(Run& run) {
    run.begin("checking the checkpoints in " + run.o.out);
    run.resumed_from = find_resumed(run.world, run.o);
    if (run.resumes()) run.state = read_state(run.resumed_from);
    if (run.resumes() && is_adapter(run.resumed_from) && run.o.model.empty()) run.o.model = base_of_adapter(run.resumed_from);
    const Strings before = run.resumes() ? run.state.layout.value("matrix_unit", Strings()) : Strings();
    run.matrix_unit = choose_matrix_unit(run.world, run.ctx, run.o.matrix_unit, before);
}

// Loads the given tokenizer, else the checkpoint's or the model's.
inline void load_tokenizer(Run& run) {
    const TrainOptions& o = run.o;
    run.begin("loading the tokenizer");
    if (!o.tokenizer.empty()) {
        run.tokenizer = std::make_unique<Tokenizer>(Tokenizer::load(tokenizer_path(o.tokenizer)));
        check_tokenizer_of_model(run.model_directory(), *run.tokenizer);
        if (run.main_rank()) run.tokenizer->warn_of_missing_end();
        if (!run.model_directory().empty()) run.tokenizer->fit(read_config(run.model_directory()).V, run.main_rank());
        return;
    }
    for (const std::string& dir : {run.model_directory(), o.model})
        if (!run.tokenizer && !dir.empty() && !tokenizer_file_in(dir).empty())
            run.tokenizer = tokenizer_of_model(dir, read_config(dir).V, o.sample_interval > 0, run.main_rank());
}

inline void check_options_of_backend(const Run& run) {
    const TrainOptions& o = run.o;
    if (be::memory_is_host && !o.gemm_cache.empty())
        fail_usage("--gemm-cache is for GPUs; HINT: --matrix-unit is the choice for CPUs");
    if (be::memory_is_host && o.nondeterministic_attention)
        fail_usage("--nondeterministic-attention is for GPUs; on the CPU attention is deterministic");
    if (be::memory_is_host && o.offload != "none" && !run.plans_elsewhere())
        fail_usage(
            "--offload %s is for GPUs; on the CPU everything is in host memory; HINT: omit it, or plan for GPUs "
            "with --dry-run --world N",
            o.offload.c_str());
    refuse_together(o.nondeterministic_attention && o.detect_nondeterminism, "--detect-nondeterminism",
                    "--nondeterministic-attention", "the one would report the other");
    refuse_together(o.zero > 1 && o.detect_nondeterminism, "--detect-nondeterminism", format("--zero %d", o.zero),
                    "it compares whole gradients, which no rank keeps", "--zero 1");
    refuse_without(o.sample_interval > 0 && !run.tokenizer, "--sample-interval", "a tokenizer", "--tokenizer DIR");
}

inline void derive_from_size(Run& run) {
    TrainOptions& o = run.o;
    if (o.size.empty()) return;
    const int ranks = o.world ? o.world : run.world.size();
    const int replicas = ranks / (o.tensor_model_parallel_size * o.pipeline_model_parallel_size);
    run.from_size =
        apply_size(o, std::max(1, replicas), [&](const TrainOptions& p) { return configure_model(p, run.tokenizer.get()); });
}

// Options that a checkpoint of adapters determines: ones that are not given are set, others must agree.
inline void find_adapters(Run& run) {
    TrainOptions& o = run.o;
    const char* const trains = o.lora_rank ? "--lora-rank" : o.prompt_tokens ? "--prompt-tokens" : nullptr;
    if (trains && !o.dry_run) refuse_without(o.model.empty(), trains, "--model DIR, the model that gets the adapters");
    refuse_without(!o.prompt_init_text.empty() && !run.tokenizer, "--prompt-init-text", "a tokenizer", "--tokenizer DIR");
    if (!run.resumes()) return;
    if (!is_adapter(run.resumed_from)) {
        if (trains)
            fail(
                "the checkpoint %s is from a run that trains the whole model; HINT: start adapters on it with --model %s and "
                "another --out",
                run.resumed_from.c_str(), run.resumed_from.c_str());
        return;
    }
    ModelConfig saved = read_config(o.model), now = saved;
    read_adapter_config(run.resumed_from, saved);
    take_adapter_options(o, saved);
    if (!o.given.count("quantize-base")) o.quantize_base = weight_format_row(format_of_base(run.resumed_from)).word;
    set_adapters(o, now);
    if (now.lora != saved.lora || now.virtual_tokens != saved.virtual_tokens)
        fail("the adapters differ from the checkpoint's (%s), which are: %s%s; HINT: omit the options",
             run.resumed_from.c_str(), adapters_in_words(saved).c_str(),
             now.lora.dropout > 0 && saved.lora.dropout == 0 ? ", without dropout" : "");
    check_base(run.world, run.resumed_from, o.model);
}

inline void set_up_model(Run& run) {
    TrainOptions& o = run.o;
    refuse_without(o.dpo_beta && o.model.empty() && !run.resumes() && !o.dry_run, "--dpo-beta",
                   "--model DIR, whose answers are the reference");
    const bool unnamed = o.preset.empty() && o.model.empty() && !o.num_layers && !o.hidden_size;
    if (run.resumes() && unnamed) o.model = run.resumed_from;  // the checkpoint determines the model
    find_adapters(run);
    run.texts = model_texts(run.model_directory(), run.tokenizer.get());
    if (!o.model.empty() && run.main_rank()) note_odd_keys(o.model);
    run.c = configure_model(o, run.tokenizer.get());
    if (run.c.family == "train_gpt" && run.main_rank())
        print_line(
            stderr,
            "warning: no transformers class supports this combination of options; config.json gets model_type \"train_gpt\", "
            "which only this program can load");
    if (run.resumes() && !run.c.adapted()) {
        const std::string difference = config_difference(read_config(run.resumed_from), run.c);
        if (!difference.empty())
            fail("the model differs from the checkpoint's (%s): %s", run.resumed_from.c_str(), difference.c_str());
        const std::string before = run.state.options.value("model", std::string());
        if (run.main_rank() && o.given.count("model") && o.model != before)
            print_line(stderr, format("note: --model %s is not read: resuming %s, whose run started from %s", o.model.c_str(),
                                      run.resumed_from.c_str(), before.empty() ? "random weights" : before.c_str()));
    }
    if (o.seq_length == 0) o.seq_length = run.c.room();
    if (o.seq_length > run.c.room() && run.c.virtual_tokens.on())
        fail_usage("--seq-length %d and %d virtual tokens are above the model's longest sequence %d; HINT: --seq-length %d",
                   o.seq_length, run.c.virtual_tokens.count, run.c.T, run.c.room());
    if (o.seq_length > run.c.T)
        fail_usage(
            "--seq-length %d is above the model's longest sequence %d; HINT: --max-position-embeddings sets the length of a "
            "new model",
            o.seq_length, run.c.T);
}

inline void check_options_of_plan(const Run& run) {
    const TrainOptions& o = run.o;
    refuse_without(o.json && !o.dry_run, "--json", "--dry-run", "a run's figures are lines of JSON in " + o.out + "/log.jsonl");
    refuse_without(o.expert_imbalance > 1 && !run.c.mixture.on(), "--expert-imbalance", "a mixture of experts");
    refuse_without(o.world && !o.dry_run, "--world", "--dry-run", format("mpirun -n %d starts a run of that size", o.world));
    if (o.world && run.world.size() > 1) fail_usage("--world plans without starting ranks; HINT: omit mpirun");
    const int tp = o.tensor_model_parallel_size, virtual_tokens = run.c.virtual_tokens.count;
    if (o.sample_interval > 0 && !o.no_sequence_parallel && virtual_tokens % tp)
        fail_usage(
            "--sample-interval requires the %d virtual tokens to be divisible by %d ranks; HINT: --prompt-tokens %d, or "
            "--no-sequence-parallel",
            virtual_tokens, tp, (virtual_tokens + tp - 1) / tp * tp);
}

}  // namespace detail

inline void set_up(Run& run) {
    detail::adjust_options(run);
    detail::find_checkpoint(run);
    detail::load_tokenizer(run);
    detail::check_options_of_backend(run);
    detail::derive_from_size(run);
    detail::set_up_model(run);
    detail::check_options_of_plan(run);
    run.tasks = read_training_tasks(run.o, run.tokenizer.get(), run.o.seq_length);
    const RankLayout layout = layout_of(run.o, run.generates());
    if (!be::memory_is_host && run.ctx.has_device()) run.free_before_groups = be::available_memory();
    run.ranks = run.o.world ? place_rank(run.o.world, 0, layout, run.c) : join_groups(run.ctx, run.world, layout, run.c);
    run.schedule = make_schedule(run.o, run.ranks->mesh.samples.size);
    if (run.schedule.open && run.state.length.steps) run.schedule.end_after(run.state.length.steps, run.state.length.decay);
    if (run.schedule.open) run.schedule.plan_until(std::max(run.schedule.total_steps, 2 * run.state.step));
    const int64_t next = run.state.batch(), skipped_before = run.state.skips.count_before(next);
    run.discards = add_skips(run.state, run.o);
    if (const int64_t late = run.state.skips.count_before(next) - skipped_before; late > 0 && run.main_rank())
        print_line(stderr, format("note: %s of --skip-batches came before step %lld and cannot be skipped any more; HINT: "
                                  "--resume an older checkpoint",
                                  counted(late, "batch", "batches").c_str(), (long long)run.state.step + 1));
    if (const auto& skipped = run.state.skips.ranges(); run.schedule.open && !skipped.empty())
        if (const int64_t last = skipped.back().last, most = UINT32_MAX / 4 / run.schedule.final_batch; last > most)
            fail_usage(
                "batches up to %lld are skipped; a run whose length --time-budget chooses orders its data for %lld at most; "
                "HINT: --train-iters",
                (long long)last, (long long)most);
    if (run.state.step == 0 && !run.schedule.open &&
        run.schedule.next(run.state, run.state.skips, run.discards).step >= run.schedule.total_steps)
        fail_usage("every batch of the run is skipped (%s): there is nothing to train on; HINT: fewer of them, or more steps",
                   run.state.skips.text().c_str());
}

// ---- open_data -------------------------------------------------------------------------------------------------------------
namespace detail {

inline void open_validation(Run& run) {
    const Schedule& schedule = run.schedule;
    const auto open = [&] {
        DataOptions d = data_options(run.o, run.c, run.tokenizer.get(), DataSplit::valid,
                                     run.o.eval_fixed ? 0 : schedule.samples_of_all_validations());
        d.tokenizer = run.train->tokenizer();
        d.memory = memory_of_node(run.world);
        return std::make_unique<DataLoader>(d);
    };
    run.valid = open();
    if (run.valid->n_samples() == 0) return run.valid.reset();  // too little data for validation
    // If Megatron's split leaves no validation documents, there is no order to follow: avoids reading a few samples over and
    // over.
    if (!run.o.eval_fixed && run.valid->split_by_tokens() && run.valid->samples_of_one_pass() < schedule.valid_samples) {
        run.o.eval_fixed = true;
        run.valid = open();
    }
    run.valid_samples = std::min(run.valid->n_samples(), schedule.valid_samples);
}

}  // namespace detail

// The options with the resulting global batch, which a resumed run keeps, for any micro-batch size.
inline TrainOptions settled_options(const Run& run) {
    TrainOptions o = run.o;
    o.global_batch_size = (int)run.schedule.final_batch;
    return o;
}

// Notes on given options that do not apply to this run, or to its kind of data.
inline void note_idle_options(const Run& run) {
    const TrainOptions& o = run.o;
    const auto all_chats = [](const std::unique_ptr<DataLoader>& data) {
        const Strings templates = data ? data->chat_templates() : Strings();
        return std::find(templates.begin(), templates.end(), "") == templates.end();
    };
    const auto note = [&](const std::string& option, const char* why) {
        if (run.main_rank() && o.given.count(option))
            print_line(stderr, format("note: --%s has no effect: %s", option.c_str(), why));
    };
    const struct {
        bool idle;
        Strings options;
        const char* why;
    } rows[] = {
        {o.sample_interval == 0, {"sample-prompt", "sample-tokens"}, "no samples are generated; HINT: --sample-interval 100"},
        {o.snapshot_every == 0, {"snapshot-directory"}, "there are no snapshots; HINT: --snapshot-every 50"},
        {o.on_spike != "rollback", {"rollback-distance", "rollback-batches", "max-rollbacks"}, "it is for --on-spike rollback"},
        {run.schedule.warmup == 0, {"lr-warmup-init"}, "there is no warm-up; HINT: --lr-warmup-iters N"},
        {o.eval_iters == 0, {"eval-interval", "eval-fixed"}, "--eval-iters 0 disables validation"},
        {o.save_every == "never", {"keep", "save-in-foreground"}, "--save-every never writes no checkpoints"},
        {!o.valid_data_path.empty(), {"split"}, "--valid-data-path has the data for validation"},
        {all_chats(run.train) && all_chats(run.valid),
         {"eod-mask-loss", "reset-position-ids", "reset-attention-mask"},
         "each conversation has positions and attention of its own, with the loss on its answers"}};
    for (const auto& row : rows)
        for (const std::string& option : row.options)
            if (row.idle) note(option, row.why);
    TrainOptions walked = o;
    for_each_option(walked, [&](const Option& option, auto&) {  // --device-tflops is also the peak of MFU
        const std::string name = option_name(option.field);
        if (!o.dry_run && !run.plans_elsewhere() && name != "device-tflops" && begins_with(option.group, "Plan"))
            note(name, "it is for plans; HINT: add --dry-run, or omit it");
    });
}

inline void open_data(Run& run) {
    run.begin("opening the data and ordering its samples");
    if (run.o.dry_run && run.o.data_path.empty()) return;  // planning needs no data
    DataOptions options =
        data_options(run.o, run.c, run.tokenizer.get(), DataSplit::train, run.schedule.samples_read(run.state, run.discards));
    options.memory = memory_of_node(run.world);
    run.train = std::make_unique<DataLoader>(options);
    run.data = data_identity(*run.train, options);
    if (has_validation(run.o)) detail::open_validation(run);
    note_idle_options(run);
    if (run.tokenizer) take_chat_template(run.texts, *run.tokenizer, run.train->chat_templates(), run.main_rank());
    if (run.resumes())
        check_agreement(run.state, settled_options(run), run.data, run.train->order_problem(run.state.planned), run.o.override);
}

// Orders as many samples as the schedule has after its length was chosen or postponed. state: the position in the run.
inline void order_data(Run& run, TrainingState& state) {
    run.train->order(run.schedule.samples_read(state, run.discards));
    state.planned = run.train->n_samples();
    if (run.valid && !run.o.eval_fixed) run.valid->order(run.schedule.samples_of_all_validations());
}

// Adds to a state the run's properties that its checkpoints record.
inline void sign_state(const Run& run, TrainingState& state) {
    const Mesh& mesh = run.ranks->mesh;
    state.options = options_to_json(settled_options(run));
    state.data = run.data;
    state.reference = run.reference.identity;
    state.planned = run.train->n_samples();
    state.layout = {{"precision", precision_name}, {"backend", be::backend_name},
                    {"threads", run.ctx.threads},  {"matrix_unit", run.matrix_unit},
                    {"dp", mesh.samples.size},     {"tp", mesh.tp.size},
                    {"pp", mesh.pp.size},          {"vpp", mesh.vpp},
                    {"ep", mesh.ep.size},          {"cp", mesh.cp.size}};
}
