// The model of a training run from its options: planned, described, and loaded.
#pragma once
#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "../base/check.h"
#include "../base/terminal.h"
#include "../checkpoint/adapter_files.h"
#include "../checkpoint/checkpoint.h"
#include "../checkpoint/load_state.h"
#include "../checkpoint/saver.h"
#include "../checkpoint/training_state.h"
#include "../data/dataloader.h"
#include "../gpt/context_parallel.h"
#include "../gpt/gpt.h"
#include "../options/options.h"
#include "../options/schedule.h"
#include "../parallel/node_text.h"
#include "../parallel/ranks.h"
#include "../optimizer/weight_average.h"
#include "../plan/from_options.h"
#include "../plan/machine.h"
#include "../plan/nccl_memory.h"
#include "../plan/measured_step.h"
#include "../plan/random_step.h"
#include "describe_run.h"
#include "resume.h"
#include "run.h"

// Chooses this rank's blocks that are computed in FP8, and how.
inline void choose_fp8_blocks(const be::Ctx& ctx, Model& m, const TrainOptions& o, bool after_bf16) {
    Fp8Training& f = m.fp8;
    f.recipe = fp8_recipe(o);
    f.after_bf16 = after_bf16;
    f.fast_accumulation = !o.no_fp8_fast_accumulation;
    f.fast_backward = o.fp8_fast_backward;
    f.keeps_transposes = o.fp8_weight_transpose != "on-the-fly";
    if (f.recipe.on) f.blocks = blocks_in_fp8(ctx, o, m.c, m.table.part);
}

// The memory of one rank for a run of `steps` with the options `o`: the run's own, or alternatives that it plans with.
inline std::unique_ptr<Model> plan_model(const Run& run, const TrainOptions& o, const Schedule& steps, const ModelConfig& c,
                                         std::shared_ptr<Ranks> ranks) {
    const std::vector<int> stages = layers_of_stages(o, c, ranks->mesh);
    auto m = std::make_unique<Model>(c, std::move(ranks), stages);
    m->grads.type = element_type(o.main_grads_dtype, ElementType::bf16);
    m->exp_avg.type = element_type(o.exp_avg_dtype, ElementType::signed8);
    m->exp_avg_sq.type = element_type(o.exp_avg_sq_dtype, ElementType::unsigned8);
    m->optimizer = &optimizer_row(o.optimizer);
    m->muon.recipe = muon_recipe(o);
    m->preference = preference_of(o);
    if (o.recompute_num_layers) m->recomputed = o.recompute_num_layers;
    m->recompute_others = recompute_policy(o.recompute_other_layers);
    m->offloads = offloads_optimizer(o);
    m->offloads_gradients = offloads_gradients(o, m->ranks->mesh.world.size);
    m->averages = o.ema_decay > 0;
    m->expert_capacity = {o.moe_expert_capacity_factor, o.moe_token_drop_policy == "position"};
    m->balances_micro_batches = balances_micro_batches(o);
    m->all_to_all = sends_all_to_all(o, c);
    m->examines = o.log_health_interval > 0;
    // A rollback may lead back to steps in bf16.
    const int64_t start = fp8_start(o, run.state);
    choose_fp8_blocks(run.ctx, *m, o, run.state.step < start || (start > 0 && o.on_spike == "rollback"));
    const int B = o.micro_batch_size, T = o.seq_length;
    AttentionShape attention = m->attention(B, T + c.virtual_tokens.count);
    attention.dropout.rate = (real)c.attention_dropout;
    if (o.nondeterministic_attention) m->a.dq_sums_size = be::attention_sums(run.ctx, attention);
    const size_t row_bytes = m->local.logits_row_bytes();
    const size_t most = run.plans_elsewhere() ? cpu::logits_rows_on_gpu((size_t)planned_memory_bytes(o), row_bytes)
                                              : be::logits_rows(run.ctx, row_bytes);
    const int head_rows = o.head_rows ? o.head_rows : choose_head_rows(most, (int64_t)B * T / m->ranks->mesh.cp.size);
    // Rows of several sequences are not divided over ranks: with sequence parallelism answers are written one by one.
    const int sequences = run.tasks.any_written() && !m->ranks->sequence_parallel ? B : run.generates() ? 1 : 0;
    plan_memory(*m, recompute_policy(o.recompute_granularity), B, T, head_rows, {sequences, 0}, steps.micro_batches());
    if (!run.plans_elsewhere()) {
        m->arena.count("sums over ranks: messages", memory_of_sums(*m));
        m->arena.count("attention: packed operands", be::attention_scratch(run.ctx, largest_call(attention, *m->ranks)));
    }
    m->plan_copy(m->arena, o.save_in_foreground);
    return m;
}

// The memory of one rank of a pipeline stage, for options `o` on n ranks. A CPU build that plans for GPUs (--world) excludes
// tensors that they keep in host memory.
inline RankMemory memory_of_stage(const Run& run, const TrainOptions& o, const ModelConfig& c, int n, int stage) {
    const Mesh mesh = make_mesh(n, 0, layout_of(o));
    const Schedule steps = make_schedule(o, mesh.samples.size);
    const auto m = plan_model(run, o, steps, c, place_rank(n, mesh.rank_of(stage, 0, 0), layout_of(o), c));
    const size_t on_host = m->arena.bytes_for_host();
    const bool on_gpus = o.world || !be::memory_is_host, elsewhere = on_gpus && n > run.world.size();
    return {m->arena.bytes() - (be::memory_is_host && o.world ? on_host : 0), on_host,
            elsewhere ? nccl_memory(c, mesh, run.generates(), sends_all_to_all(o, c), exchanges_heads(o)) : NcclMemory()};
}

inline std::vector<RankMemory> memory_of_stages(const Run& run, const TrainOptions& o, int n) {
    const ModelConfig c = configure_model(o, run.tokenizer.get());
    std::vector<RankMemory> memory;
    for (int stage = 0; stage < layout_of(o).pp; stage++) memory.push_back(memory_of_stage(run, o, c, n, stage));
    return memory;
}

// Decides --fp8-weight-transpose auto, the same on all ranks: the transposes are kept if they fit on each. `m`: this rank's
// plan with transposes kept; it is replaced if they are not.
inline void choose_fp8_transposes(Run& run, std::unique_ptr<Model>& m) {
    if (run.o.fp8_format.empty() || run.o.fp8_weight_transpose != "auto") return;
    bool fits = true;
    if (run.plans_elsewhere()) {
        for (const RankMemory& needed : memory_of_stages(run, run.o, std::max(1, run.o.world)))
            fits = fits && needed.device() <= planned_memory_bytes(run.o);
    } else {
        const size_t bytes = m->arena.bytes();
        fits =
            bytes <= (be::memory_is_host ? memory_for_rank(*run.ranks, bytes, be::available_memory()) : be::available_memory());
        fits = largest_of_all_ranks(*run.ranks, {fits ? 0.0f : 1.0f})[0] == 0;
    }
    run.o.fp8_weight_transpose = fits ? "keep" : "on-the-fly";
    if (!fits) m = plan_model(run, run.o, run.schedule, run.c, run.ranks);
}

// The time of a step of this run on this machine, measured with random tokens.
inline double measured_step_seconds(Run& run, Recompute recompute) {
    const auto bytes = [&](const MicroBatchShape& part) { return RandomStep::planned_bytes(run.ctx, part, recompute); };
    const auto begin = [&](const MicroBatchShape& part) {
        return std::make_unique<RandomStep>(run.ctx, part.c, part.B, part.T, recompute, false);
    };
    return measured_step_seconds({run.c, run.o.micro_batch_size, run.o.seq_length}, run.schedule.final_batch, run.peak.flops,
                                 std::min(be::available_memory() / 4, (size_t)2 << 30), bytes, begin);
}

// Plans the model of a run that is set up, opens its data, and describes both in run.table.
inline std::unique_ptr<Model> plan_run(Run& run) {
    const TrainOptions& o = run.o;
    run.begin("planning the memory");
    warm_up(run.ctx, *run.ranks, sends_all_to_all(run.o, run.c));
    const size_t before = run.free_before_groups;  // 0: the GPU that is planned for is not this machine's
    const size_t in_libraries = before ? before - std::min(before, be::available_memory()) : 0;
    std::unique_ptr<Model> m = plan_model(run, o, run.schedule, run.c, run.ranks);
    choose_fp8_transposes(run, m);
    const bool changed = run.c.attention_softcap > 0 || run.c.attention_dropout > 0;
    const bool sums_to_one = run.c.mixture.normalize && run.c.mixture.scale == 1;
    if (o.moe_use_upcycling && !sums_to_one && !run.resumes() && run.main_rank())
        print_line(stderr,
                   "note: the weights of a token's experts do not sum to 1, so the mixture does not start with the "
                   "outputs of the dense model; they do without --moe-router-pre-softmax and a scaling factor");
    if (o.nondeterministic_attention && !m->a.dq_sums_size && run.main_rank())
        print_line(stderr, format("note: --nondeterministic-attention has no effect here: it requires bf16 on GPUs of compute "
                                  "capability 9.0 and heads of 64 or 128, not heads of %d%s on %s",
                                  run.c.HS(), changed ? " with a soft cap or dropout" : "", run.ctx.description().c_str()));
    if (!o.dry_run) m->arena.check(host_memory_for(*m), advice_training);  // before minutes of ordering samples
    open_data(run);
    check_same_everywhere(run.world, o, m->a.head_rows, run.data);
    run.begin("measuring how fast this machine computes");
    run.peak = run.plans_elsewhere() ? planned_peak(o) : peak_of_all(run.world, run.ctx, o.device_tflops);
    describe_run(run, {m->shards.buckets.size(), what_is_narrow(m->grads, m->exp_avg, m->exp_avg_sq), m->arena.purposes(),
                       m->arena.bytes(), in_libraries,
                       checkpoint_bytes(trained_table(run.c), run.texts, bytes_in_files(*m), o.ema_decay > 0)});
    const MemoryOfStages plan = [&](const TrainOptions& p, int n) { return memory_of_stages(run, p, n); };
    if (run.plans_elsewhere()) describe_plan(run, plan);
    else if (o.dry_run && be::memory_is_host && run.world.size() == 1 && o.fp8_format.empty())
        describe_time_here(run, measured_step_seconds(run, m->recompute));
    describe_data(run);
    if (o.dry_run) describe_shortage(run, plan);
    run.phase.done();
    return m;
}

// On GPUs: chooses the file that keeps cuBLASLt's algorithms, and whether they are timed.
inline void choose_gemm_cache(Run& run, const Model& m) {
    if constexpr (!be::memory_is_host) {
        const std::string cache = cache_directory(), kept = cache.empty() ? "" : cache + "/gemm.txt";
        // Ranks that compute the same weights must choose the same algorithms, which timing does not guarantee: data-parallel
        // replicas that each orthogonalize all matrices; and, if they do not share a file, tensor-parallel ranks that each
        // compute whole bias gradients, choose experts, or orthogonalize keys and values that several ranks hold, and expert-
        // parallel ranks that each choose the experts of a generated text.
        bool alone = kept.empty() && run.o.gemm_cache.empty();
        const Mesh& mesh = m.ranks->mesh;
        for (const std::vector<int>& ranks : {mesh.tp_ranks(), mesh.ep_ranks()})
            for (const int rank : ranks) alone |= !run.world.is_here(rank);
        const bool of_tp = mesh.tp.size > 1 && (m.muon.recipe.on || !m.ranks->sequence_parallel || m.c.mixture.on());
        const bool replicas =
            (m.muon.recipe.on && !m.ranks->zero && mesh.dp.size > 1) || (alone && (of_tp || mesh.ep.size > 1));
        const std::string file = replicas ? "none" : run.o.gemm_cache.empty() ? kept : run.o.gemm_cache;
        be::use_gemm_cache(run.ctx, file == "none" ? "" : file, file != "none");
        // By all ranks, and kept until they end: allocating and freeing it are collective. Ranks without a file ignore it.
        be::share_gemm_choices(run.ctx, text_of_node(run.world));
    }
}

// Allocates the planned memory and fills it: with the checkpoint's weights and moments, a model's weights, or new ones.
inline void load_model(Run& run, Model& m) {
    const TrainOptions& o = run.o;
    choose_gemm_cache(run, m);
    run.begin(run.resumes()      ? "loading the checkpoint " + run.resumed_from
              : !o.model.empty() ? "loading the model " + o.model
                                 : "initializing the weights");
    allocate(run.ctx, m);
    if (!o.model.empty() && !run.resumes()) check_weights(run.world, o.model);
    if (!o.model.empty() && (m.frozen || !run.resumes()))
        load_parameters(run.ctx, m, o.model, o.moe_upcycling_drop_ratio, (uint64_t)o.seed);
    if (o.moe_use_upcycling && !run.resumes()) initialize(run.ctx, m, (uint64_t)o.seed, true);
    if (run.resumes()) load_weights_and_moments(run.ctx, m, run.resumed_from);
    else if (m.frozen) begin_adapters(run.ctx, m, o.model, run.tokenizer.get(), (uint64_t)o.seed);
    else if (o.model.empty()) initialize(run.ctx, m, (uint64_t)o.seed);
    if (!run.resumes()) update_average(run.ctx, m, o.ema_decay, 0);
}

// (n_pairs, 3) on this rank, to be summed over ranks (preference_reference.h): for each pair of answers in its samples, the
// log-probability of the chosen answer, of the rejected one, and 1; zeros for pairs of other ranks.
inline std::vector<double> score_answers(be::Ctx& ctx, Model& m, const DataLoader& data) {
    std::vector<double> mine(3 * (size_t)data.n_pairs());
    const auto keep = [&](const std::vector<AnswerPair>& pairs) {
        if (m.ranks->mesh.tp.rank > 0 || m.ranks->mesh.cp.rank > 0) return;  // the first ranks report them
        for (const AnswerPair& pair : pairs) {
            double* of_pair = mine.data() + 3 * pair.number;
            of_pair[0] = pair.chosen.log_p;
            of_pair[1] = pair.rejected.log_p;
            of_pair[2] = 1;
        }
    };
    evaluate(
        ctx, m, data, 0, data.n_samples(), [] { return false; }, keep);
    return mine;
}
