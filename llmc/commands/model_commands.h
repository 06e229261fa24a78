// Commands that need a model besides train: tune, sweep, generate, serve, eval.
#pragma once
#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "../base/check.h"
#include "../base/progress.h"
#include "../base/terminal.h"
#include "../checkpoint/load_state.h"
#include "../checkpoint/model_texts.h"
#include "../gpt/generator.h"
#include "../gpt/gpt.h"
#include "../infer/evaluation.h"
#include "../infer/inference.h"
#include "../infer/scoring.h"
#include "../infer/serve.h"
#include "../options/options.h"
#include "../parallel/memory_of_node.h"
#include "../plan/from_options.h"
#include "check_node.h"
#include "../run/plan_run.h"
#include "../run/run.h"
#include "../search/sweep.h"
#include "../search/tune.h"
#include "../search/tune_inference.h"

inline void tune(World& world, const TuneOptions& given) {
    const TuneOptions o = given.inference ? given : without_layout_of_files(given, world.rank() == 0);
    Run run = {world, o, make_ctx(world, o.threads, true)};
    if (o.inference)
        return tune_inference(run, o, [](const TrainOptions& p, const ModelConfig& c, int n, int stage, int texts, int T) {
            const Mesh mesh = make_mesh(n, 0, layout_of(p));
            Model m(c, place_rank(n, mesh.rank_of(stage, 0, 0), layout_of(p), c), layers_of_stages(p, c, mesh));
            plan_memory(m, Recompute::inference, ceil_div(texts, T), T, 1, {texts, c.virtual_tokens.count + T});
            return (double)m.arena.bytes();
        });
    tune_layouts(run, o, [&](const TrainOptions& p, const ModelConfig& c, int n, int stage) {
        return memory_of_stage(run, p, c, n, stage);
    });
}
inline int tune_command(const TuneOptions& o) { return on_all_ranks(o, tune); }

inline void sweep(World& world, const SweepOptions& o) {
    Run run = {world, o, make_ctx(world, o.threads, true)};
    Sweep(run, o).run();
}
inline int sweep_command(const SweepOptions& o) { return on_all_ranks(o, sweep); }

// The model of `run`, loaded, with memory for passes of B x T tokens, for head_rows rows of logits at a time, and for the
// key/value cache. Refuses a T that is above the model's longest sequence.
inline std::unique_ptr<Model> load_weights(InferenceRun& run, int B, int T, int head_rows, KvCacheShape cache = {}) {
    PhaseStatus phase;
    if (run.main_rank()) phase.begin("loading the model " + run.dir);
    if (T > run.c.room())
        fail_usage("--seq-length %d is above the model's longest sequence %d; HINT: --seq-length %d", T, run.c.room(),
                   run.c.room());
    run.layout.generates = cache.sequences > 0;
    auto ranks = join_groups(run.ctx, run.world, run.layout, run.c);
    warm_up(run.ctx, *ranks);
    const std::vector<int> stages = split_layers(costs_of_layers(run.c, T), ranks->mesh.pp.size, false, false, {});
    auto m = std::make_unique<Model>(run.c, std::move(ranks), stages);
    plan_memory(*m, Recompute::inference, B, T, head_rows, cache);
    allocate(run.ctx, *m);
    load_parameters(run.ctx, *m, run.dir);
    if (run.c.adapted()) load_adapters(run.ctx, *m, run.adapter);
    return m;
}

// The same for generating `texts` sequences of up to T tokens at a time; any_length: the cache takes sequences as long as the
// model's context. Refuses more ranks than one copy of the model needs.
inline std::unique_ptr<Model> load_for_generation(InferenceRun& run, int texts, int T, bool any_length = false) {
    const int ranks = run.world.size(), copies = ranks / (run.layout.tp * run.layout.pp * run.layout.ep);
    if (copies > 1 && ranks % copies == 0)
        fail_usage("%d ranks have %d copies of the model, but generation uses one; HINT: --tp %d, or --pp", ranks, copies,
                   ranks / run.layout.ep);
    return load_weights(run, ceil_div(texts, T), T, 1, {texts, any_length ? 0 : run.c.virtual_tokens.count + T});
}

// Generates 1, 2, 4, ... sequences at a time, each batch size with its own memory.
inline void measure_batches(InferenceRun& run, const std::vector<int>& prompt, int T, const GenerateOptions& o) {
    std::vector<BatchSpeed> speeds;
    for (int batch = 1; batch <= o.batch; batch = batch < o.batch ? std::min(2 * batch, o.batch) : batch + 1) {
        const std::unique_ptr<Model> m = load_for_generation(run, batch, T);
        Generator generator(run.ctx, *m);
        speeds.push_back(measure_batch(generator, prompt, m->arena.bytes(), o));
    }
    if (run.main_rank()) print_batches(speeds, o);
}

inline void generate_on_ranks(World& world, const GenerateOptions& o) {
    InferenceRun run(world, o.threads);
    open_model(run, o, true, layout_of_inference(o));
    const Prompts prompts = read_prompts(run, o);
    const int T = std::min(run.c.room(), prompts.longest() + o.max_new_tokens);
    if (o.measure_batches) return measure_batches(run, prompts.all[0].tokens, T, o);
    const int texts =
        o.num_beams > 1 ? o.num_beams : (int)std::min<int64_t>(o.batch, (int64_t)prompts.all.size() * o.num_samples);
    const std::unique_ptr<Model> m = load_for_generation(run, texts, T, prompts.converses);
    Generator generator(run.ctx, *m);
    generate_completions(run, generator, prompts, o);
}
inline int generate_command(const GenerateOptions& o) { return on_all_ranks(o, generate_on_ranks); }

inline int serve_command(World& world, const ServeOptions& o) {
    check_serving();
    InferenceRun run(world, o.threads);
    open_model(run, o, true);
    ModelServer server(run, o);
    const std::unique_ptr<Model> m = load_for_generation(run, o.batch, o.seq_length ? o.seq_length : run.c.room());
    Generator generator(run.ctx, *m);
    server.run(generator);
    return 0;
}

// Lets samples exceed the model's longest sequence if positions are computed, not learned.
inline void extend_to(InferenceRun& run, int T) {
    if (T <= run.c.room() || run.c.position == Position::learned) return;
    if (run.main_rank())
        print_line(stderr,
                   format("warning: --seq-length %d is above the model's longest sequence %d, beyond which it was not trained",
                          T, run.c.room()));
    run.c.T = run.c.virtual_tokens.count + T;
}

inline void evaluate_model(World& world, const EvalOptions& o) {
    check_options_of_eval(o, world.size());
    const std::vector<TaskFile> tasks = read_tasks(o);
    InferenceRun run(world, o.threads);
    open_model(run, o, !tasks.empty() || !o.text.empty(), layout_of_inference(o));
    const Tokenizer* tokenizer = run.tokenizer.get();
    const std::vector<int> text = o.text.empty() ? std::vector<int>() : text_to_evaluate(o, *tokenizer);
    const int most = o.seq_length ? o.seq_length : run.c.room();
    const int T = o.text.empty() ? most : (int)std::min<size_t>((size_t)most, text.size() - 1);
    extend_to(run, T);
    const bool writes = any_written(tasks);
    const KvCacheShape cache = {writes ? o.micro_batch_size : 0, std::min(run.c.T, run.c.virtual_tokens.count + T)};
    const std::unique_ptr<Model> m = load_weights(run, o.micro_batch_size, T, 1024, cache);
    std::optional<Generator> generator;
    if (writes) generator.emplace(run.ctx, *m);
    const std::vector<int> ends = tokenizer ? adapted_texts(run.dir, tokenizer, run.adapter).end_ids : std::vector<int>();
    const TaskFunctions functions = task_functions(run.ctx, *m, generator, tokenizer, ends, [] { return false; });
    const auto losses = [&](const DataLoader& data, int64_t samples) {
        return *evaluate(run.ctx, *m, data, 0, samples, [] { return false; });
    };
    if (!tasks.empty()) return evaluate_tasks(tasks, o, *tokenizer, T, run.main_rank(), functions);
    const Evaluation e = o.text.empty()
                             ? evaluate_data(o, run.c, T, tokenizer, run.main_rank(), memory_of_node(run.world), losses)
                             : evaluate_text(text, o, T, *tokenizer, functions.score);
    if (run.main_rank())
        print_result(evaluation_table(e, o.model.empty() ? run.dir : o.model, run.adapter, T, tokenizer), o.json);
}
inline int eval_command(const EvalOptions& o) { return on_all_ranks(o, evaluate_model); }
