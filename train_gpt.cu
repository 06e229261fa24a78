/*
train_gpt: training of decoder-only language models (GPT-2, BLOOM, Llama, Qwen, Gemma, ...) in one readable program.

The model's computation is here, from tokens to updated weights; what it computes with is in llmc/: kernels, tensors, data,
files, processes, options. In reading order:
  1  the model's memory           plan_memory, allocate; its parts are in llmc/gpt/model_memory.h
  2  initialisation               initialize
  3  one block                    block_forward next to block_backward
  4  the whole model              embed, head, model_forward, model_backward
  5  one training step            train_step: micro-batches, loss scale, clipping, update
  6  inference                    evaluate; Generator with its key/value cache
  7  commands                     train, tune, sweep, generate, serve, eval; main

Dimensions: B micro-batch, T sequence, N = B*T rows, C width, L layers, NH query heads, NKV key/value heads, HS head size,
QKV = (NH + 2 NKV) HS, F feed-forward width, F1 rows of fc1 (2F with a gate), V vocabulary, Vp padded. What one of several ranks
holds of a size ends in l: NHl heads, Fl columns, Nl rows of the residual stream. Shapes stand at the right, slowest first. `d`
prefixes a gradient. floatX is the storage type (bf16 or fp32), real what accumulates (fp32).
The functions of a pass take p, a Pass: p.m is its Model, p.in its MicroBatch. Of a Model m, m.c is the configuration, m.local
the sizes on this rank, m.p the parameters, m.g their gradients, m.a the activations.
*/
#include <algorithm>
#include <array>
#include <climits>
#include <cmath>
#include <cstdio>
#include <functional>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

// The rooms of llmc/, from the lowest up; each include names the declarations used here.
#include "llmc/base/types.h"  // floatX, real, Acc
#include "llmc/base/check.h"  // fail, fail_usage, CHECK, format
#include "llmc/base/math.h"   // rope_table, alibi_slope, ceil_div, round_up
#include "llmc/base/rng.h"    // InitialWeights, RngPurpose
#include "llmc/ops.h"         // be::Ctx, every op (be::linear_forward, ...), what ops take (Output, ...), rounding_key
#include "llmc/cpu/ops.h"
#if defined(BACKEND_CUDA) || defined(BACKEND_EMU)
#include "llmc/gpu/ops.cuh"
#endif
#include "llmc/model/arena.h"                 // HostSide, wait_for_device
#include "llmc/model/model_config.h"          // ModelConfig, Norm, Position, QkNorm
#include "llmc/model/mesh.h"                  // Mesh, Axis, LocalSizes
#include "llmc/model/parameters.h"            // TensorSpec, RowBlock, Init, Matrix
#include "llmc/model/lora.h"                  // the adapters of Model::lora
#include "llmc/model/adapters.h"              // Model::virtual_tokens
#include "llmc/model/fp8_training.h"          // Fp8Training, fp8_index, begin_step_in_fp8
#include "llmc/model/preference.h"            // AnswerPair, Model::preference
#include "llmc/model/recompute.h"             // Recompute, Kept, LinearInput, fp8_suffices, bf16_of
#include "llmc/model/decoder.h"               // generate, KvCacheShape, NextToken
#include "llmc/tokenizer/tokenizer.h"         // Tokenizer
#include "llmc/data/dataloader.h"             // Batch, DataLoader
#include "llmc/data/tasks.h"                  // Request, Score, Task, TaskRequests
#include "llmc/parallel/world.h"              // World: the processes
#include "llmc/parallel/comm.h"               // be::all_reduce, ...
#include "llmc/parallel/node_text.h"          // text_of_node
#include "llmc/optimizer/zero.h"              // GradientReducer
#include "llmc/parallel/pipeline_schedule.h"  // pipeline_schedule, Direction, split_layers
#include "llmc/parallel/ranks.h"              // Ranks, join_groups, place_rank, reduce_sums
#include "llmc/parallel/pipeline_links.h"     // PipelineLinks
#include "llmc/optimizer/elementwise.h"       // update_elementwise
#include "llmc/optimizer/weight_average.h"    // update_average
#include "llmc/gpt/model.h"                   // Model, MicroBatch, Block, Linear
#include "llmc/gpt/model_memory.h"            // plan_linears, bind_linears, ...
#include "llmc/gpt/pass.h"                    // Pass
#include "llmc/gpt/linear.h"                  // linear_forward, linear_backward, output_for
#include "llmc/report/logger.h"               // StepStats
#include "llmc/options/config.h"              // TrainOptions, ...
#include "llmc/options/schedule.h"            // Schedule
#include "llmc/checkpoint/run_directory.h"    // RunLock
#include "llmc/checkpoint/agreement.h"        // describe_overrides
#include "llmc/checkpoint/load_state.h"       // load_parameters, load_weights_and_moments
#include "llmc/checkpoint/training_state.h"   // TrainingState
#include "llmc/plan/from_options.h"           // configure_model, layout_of, fp8_start
#include "llmc/plan/measured_step.h"          // MicroBatchShape, measured_step_seconds
#include "llmc/plan/machine.h"                // peak_of_all
#include "llmc/infer/training_tasks.h"        // TrainingTasks
#include "llmc/infer/inference.h"             // InferenceRun, read_prompts, generate_completions
#include "llmc/infer/serve.h"                 // ModelServer
#include "llmc/infer/evaluation.h"            // score_requests, evaluate_tasks
#include "llmc/infer/written_answers.h"       // generate_answers
#include "llmc/run/diagnostics.h"             // hash_gradients
#include "llmc/run/resume.h"                  // check_same_everywhere
#include "llmc/run/timetable.h"               // Timetable
#include "llmc/run/run.h"                     // Run, set_up, open_data
#include "llmc/run/reference.h"               // find_reference
#include "llmc/run/describe_run.h"            // describe_run, describe_plan
#include "llmc/run/trainer.h"                 // TrainerBase, which Trainer extends
#include "llmc/run/training_log.h"            // TrainingLog
#include "llmc/run/training_loop.h"           // TrainingLoop: decisions, saves, logs
#include "llmc/search/sweep.h"                // Sweep
#include "llmc/search/tune.h"                 // tune_layouts
#include "llmc/search/tune_inference.h"       // tune_inference
#include "llmc/commands/program.h"            // run_program, with the commands that need no model

// ---------------------------------------------------------------------------------------------------------------------------
// 1  The model's memory: planned by purpose, allocated at once, then pointed to. model.h has the structs, with each tensor's
//    shape: a block's activations of a micro-batch, its matrices and norms, and buffers shared by all blocks.

// Plans all memory of a run in m.arena, for allocate(). B x T: the largest micro-batch, without virtual tokens, which are added
// to T. head_rows: rows of logits in memory at a time. cache: shape of the key/value cache; by default none. micro_batches:
// all numbers of micro-batches per step that occur in the run, which determine how many a pipeline has in flight. Refuses more
// than INT_MAX rows.
static void plan_memory(Model& m, Recompute recompute, int B, int T, int head_rows, KvCacheShape cache = {},
                        const std::vector<int>& micro_batches = {1}) {
    T += m.c.virtual_tokens.count;
    if ((int64_t)B * T > INT_MAX)
        fail_usage("--micro-batch-size %d x --seq-length %d exceeds the maximum of %d tokens per pass; HINT: a smaller one", B,
                   T, INT_MAX);
    CHECK(B * T >= cache.sequences, "%d sequences in passes of %d rows", cache.sequences, B * T);
    const bool training = recompute != Recompute::inference, fp8 = training && m.fp8.recipe.on;
    m.recompute = recompute;
    m.a.B = B;
    m.a.T = T;
    m.a.head_rows = std::min(head_rows, B * T);
    m.cache.shape = {cache.sequences, cache.tokens ? cache.tokens : m.c.T};
    m.cache.row = (size_t)m.local.NKVl * m.c.HS();

    m.plan(m.arena, training);
    plan_linears(m, fp8);
    plan_adapters(m);
    plan_micro_batches(m, micro_batches);
    plan_activations(m, fp8);
    if (fp8) plan_fp8(m);
    if (m.table.part.last) plan_head(m);
    m.arena.add("activations: embedding, head", &m.a.sums, 1);
    if (m.c.position == Position::alibi) m.arena.add("activations: embedding, head", &m.slopes, m.local.NHl);
    const bool rope = m.c.position == Position::rope;
    const size_t angles = (size_t)m.c.T * m.c.rotated();
    if (rope) m.arena.add("activations: embedding, head", &m.cos_sin, angles);
    if (rope && m.c.window && m.c.local_rope_base > 0) m.arena.add("activations: embedding, head", &m.window_cos_sin, angles);
    if (training) plan_activation_gradients(m);
    if (cache.sequences) plan_cache(m);
}

// Rows of logits at a time for N rows: equal parts in whole tiles, each within the device's limit.
static int choose_head_rows(const be::Ctx& ctx, const LocalSizes& n, int64_t N) {
    const size_t most = be::logits_rows(ctx, (size_t)n.Vpl * sizeof(floatX)), parts = ceil_div((size_t)N, most);
    return (int)std::min<size_t>(most, round_up(ceil_div((size_t)N, parts), 128));
}

// Advice for when memory does not suffice: in training, and in scoring or generation.
constexpr const char* advice_training =
    be::memory_is_host
        ? "a smaller --micro-batch-size or --seq-length, --recompute full, --save-in-foreground, or a smaller model"
        : "a smaller --micro-batch-size or --seq-length, --recompute full, --offload optimizer, fewer --head-rows, or a "
          "smaller model";
constexpr const char* advice_inference =
    "fewer or shorter texts at a time, a smaller model or, with generate and eval, more ranks (--tp)";

static size_t host_memory_for(const Model& m) {
    return memory_for_rank(*m.ranks, m.arena.bytes_on_host(), cpu::available_memory());
}
// Allocates the planned memory, fills in constants, and sets all pointers that are views of other tensors.
static void allocate(be::Ctx& ctx, Model& m) {
    const bool trains = m.recompute != Recompute::inference;
    m.arena.allocate(host_memory_for(m), trains ? advice_training : advice_inference);
    const ModelConfig& c = m.c;
    const auto send = [&](real* place, const std::vector<real>& from) {
        be::upload(ctx, place, from.data(), from.size() * sizeof(real));
    };
    std::vector<real> slopes, cos_sin;
    if (m.slopes)
        for (int h = 0; h < m.local.NHl; h++) slopes.push_back(alibi_slope(m.ranks->mesh.tp.rank * m.local.NHl + h, c.NH));
    send(m.slopes, slopes);
    // Rotary tables cover the longest sequence that this run can reach: for a conversation or the server, the cache's whole
    // capacity.
    const int longest = trains || !m.cache.shape.sequences ? m.a.T : std::max(m.a.T, m.cache.shape.tokens);
    for (real* table : {m.cos_sin, m.window_cos_sin}) {
        if (!table) continue;
        const RopeTable rope = c.rope(table == m.window_cos_sin, longest);
        rope_table(cos_sin, c.T, rope_frequencies(rope), rope_attention_factor(rope.scaling));
        send(table, cos_sin);
    }
    bind_linears(m);
    m.a.dfc1 = m.a.dqkv;
    m.a.dact = gated(c.activation) ? m.a.datt : m.a.dfc1;
    for (auto& chunk : m.a.micro_batches)
        for (MicroBatch& in : chunk) {
            for (size_t i = 2; i < in.x.size(); i++)
                if (!in.x[i]) in.x[i] = in.x[i - 2];
            for (size_t i = 0; i < in.blocks.size(); i++) share_tensors(m, in, i);
        }
}

// ---------------------------------------------------------------------------------------------------------------------------
// 2  Initialisation: a counter RNG keyed by (seed, tensor, element) gives the same weights on any machine and layout.
//    N(0, std) for embeddings and linears, N(0, std / sqrt(2L)) for the two projections into the residual stream, gains 1; each
//    times the tensor's factor (parametrization.h).
static void initialize(be::Ctx& ctx, Model& m, uint64_t seed) {
    if (m.frozen) initialize_adapters(ctx, m, seed);
    for (const TensorSpec& t : m.model_table().rows) {
        const double std = t.init == Init::scaled_normal ? m.c.init_std / std::sqrt(2.0 * m.c.L) : m.c.init_std;
        InitialWeights w{seed, (uint32_t)t.id, 0, 0, 0, 0, t.first_col, t.cols, t.whole_cols};
        // Padded vocabulary rows are zero and stay zero: nothing reads them.
        w.live = t.hf.size() == 1 ? t.hf[0].rows : t.whole_rows;
        for (const RowBlock& block : t.blocks) {
            w.whole_row = block.whole_row;
            const double factor = t.factors.folded(block.fold).init;
            if (t.init == Init::normal || t.init == Init::scaled_normal) w.std = std * factor;
            else
                w.constant = t.init == Init::ones ? (real)factor : t.init == Init::gain_less_one ? (real)(factor - 1) : real(0);
            const size_t begin = t.offset + (size_t)block.row * t.cols, size = (size_t)block.rows * t.cols;
            be::initialize_weights(ctx, m.model_params() + begin, nullptr, w, 0, size);
            if (m.master_low_bits && !m.frozen)
                m.shards.for_each_part(begin, size, [&](size_t from, size_t shard, size_t n) {
                    be::initialize_weights(ctx, m.params + begin + from, m.master_low_bits + shard, w, from, n);
                });
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------------
// 3  One block: x += Attention(Norm1(x)); x += MLP(Norm2(x)). NormPlace: norms before attention and MLP, after them, both, or
// parallel: both norms read the same x. Its parts come first, each forward next to its backward; a part's arguments are the
// tensors that it writes, then those that it reads. linear.h has linear_forward and linear_backward.

// ---- Norms ------------------------------------------------------------------------------------------------------------------

// sum = inp + add, out = norm(sum). If the model lacks this norm, only the sum.
static void add_norm_forward(const Pass& p, const NormLayer& norm, floatX* sum, const Output& out, const NormStatistics& stats,
                             const floatX* inp, const floatX* add) {
    if (!norm.exists()) return add ? be::residual_forward(p.ctx, sum, inp, add, p.stream_size()) : void();
    const auto forward = p.m.c.norm == Norm::layernorm ? be::layernorm_forward : be::rmsnorm_forward;
    forward(p.ctx, out, stats, sum, inp, add, norm.params, p.local_rows());
}
// out = norm(inp)
static void norm_forward(const Pass& p, const NormLayer& norm, const Output& out, const NormStatistics& stats,
                         const floatX* inp) {
    add_norm_forward(p, norm, nullptr, out, stats, inp, nullptr);
}

// dinp (+)= the gradient of the norm's input; dinp may be dout. If the model lacks this norm, dinp += dout, regardless of acc.
// columns: null, or the bias gradient to which the sums of dinp's columns are added, see Pass::summed_bias.
static void norm_backward(const Pass& p, const NormLayer& norm, floatX* dinp, real* columns, const floatX* dout,
                          const NormStatistics& stats, const floatX* inp, Acc acc) {
    if (!norm.exists()) return be::residual_forward(p.ctx, dinp, dinp, dout, p.stream_size());
    const auto backward = p.m.c.norm == Norm::layernorm ? be::layernorm_backward : be::rmsnorm_backward;
    const NormGrads grads = {norm.grads.weight, norm.grads.bias, columns};
    backward(p.ctx, dinp, grads, dout, inp, norm.params, stats, p.local_rows(), acc);
}

// mid = x + attn, norm2 = norm(mid) or, where attention and MLP are parallel, norm(x).
static void add_norm2_forward(const Pass& p, const Block& b, floatX* mid, const Output& norm2, const NormStatistics& stats,
                              const floatX* x, const floatX* attn) {
    if (!p.m.c.parallel()) return add_norm_forward(p, b.norm2, mid, norm2, stats, x, attn);
    be::residual_forward(p.ctx, mid, x, attn, p.stream_size());
    norm_forward(p, b.norm2, norm2, stats, x);
}
// Adds the gradient of the norm's input to dx. Returns the gradient of attn, which is dx or, where attention and MLP are
// parallel, its value before the sum: a copy in dattn.
static const floatX* add_norm2_backward(const Pass& p, const Block& b, floatX* dx, floatX* dattn, const floatX* dnorm2,
                                        const NormStatistics& stats, const floatX* inp) {
    const bool parallel = p.m.c.parallel();
    const size_t bytes = p.stream_size() * sizeof(floatX);
    if (parallel) be::copy_rows(p.ctx, dattn, bytes, dx, bytes, bytes, 1);
    norm_backward(p, b.norm2, dx, p.summed_bias(b.proj()), dnorm2, stats, inp, Acc::Add);
    return parallel ? dattn : dx;
}

// Norms of queries and keys (Henry et al., 2020), in place: of every head, or of all heads together.
static HeadRows heads_of(const Pass& p, bool keys) {
    const LocalSizes& n = p.m.local;
    return {p.N(), (size_t)n.QKVl, p.m.c.qk_norm == QkNorm::whole ? 1 : keys ? n.NKVl : n.NHl};
}
// Parameters of the norms of queries (0) and keys (1). If one norm spans heads of several tp ranks, params[k].means are over
// all of them: set_sums(k, sums) sets this rank's sums (N). Key heads held by several ranks are counted once.
template <class SetSums>
std::array<NormParams, 2> head_norm_params(const Pass& p, const Block& b, SetSums set_sums) {
    std::array<NormParams, 2> params = {b.head_norms[0].params, b.head_norms[1].params};
    if (!p.m.cuts_head_norms()) return params;
    const size_t N = (size_t)p.N();
    real* const sums = p.m.a.head_sums;
    for (int k = 0; k < 2; k++) set_sums(k, sums + k * N);
    be::all_reduce(p.ctx, p.m.ranks->tp, sums, 2 * N);
    const int heads[] = {p.m.c.NH, p.m.c.NKV * p.m.local.replicas};
    for (int k = 0; k < 2; k++) params[k].means = {sums + k * N, 1 / (real)(heads[k] * p.m.c.HS())};
    return params;
}
static void head_norms_forward(const Pass& p, const Block& b, floatX* qkv, const HeadNormInput* heads) {
    floatX* of[] = {qkv, qkv + (size_t)p.m.local.NHl * p.m.c.HS()};
    const auto params = head_norm_params(
        p, b, [&](int k, real* sums) { be::head_norm_squares(p.ctx, sums, of[k], b.head_norms[k].params.C, heads_of(p, k)); });
    for (int k = 0; k < 2; k++) be::head_norm_forward(p.ctx, of[k], heads[k].x, heads[k].rstd, params[k], heads_of(p, k));
}
static void head_norms_backward(const Pass& p, const Block& b, floatX* dqkv, const HeadNormInput* heads) {
    floatX* of[] = {dqkv, dqkv + (size_t)p.m.local.NHl * p.m.c.HS()};
    const auto params = head_norm_params(p, b, [&](int k, real* sums) {
        be::head_norm_products(p.ctx, sums, of[k], heads[k].x, b.head_norms[k].params, heads[k].rstd, heads_of(p, k));
    });
    for (int k = 0; k < 2; k++)
        be::head_norm_backward(p.ctx, of[k], b.head_norms[k].grads, heads[k].x, params[k], heads[k].rstd, heads_of(p, k));
}

// ---- Attention --------------------------------------------------------------------------------------------------------------

// qkv = norm1 w^T + b, with queries and keys normalised if they have norms, and rotated if positions are rotary. Sets heads,
// the inputs of their norms.
static void qkv_forward(const Pass& p, const Block& b, floatX* qkv, const HeadNormInput* heads, const LinearInput& norm1) {
    const Linear& l = b.qkv();
    const bool norms = b.head_norms[0].exists(), rope = p.rotates(l.block);
    const AttentionShape shape = p.attention(l.block);
    if (rope && !norms && fuses(p, l))
        return be::linear_rope_forward(p.ctx, qkv, whole_input(p, l, norm1), l.w, l.b, l.in, p.rope(l.block), shape);
    linear_forward(p, l, qkv, norm1);
    if (norms) head_norms_forward(p, b, qkv, heads);
    if (rope) be::rope_forward(p.ctx, qkv, p.rope(l.block), shape);
}
// Changes dqkv in place: attention_backward has already rotated it back.
static void qkv_backward(const Pass& p, const Block& b, floatX* dnorm1, floatX* dqkv, const HeadNormInput* heads,
                         const LinearInput& norm1) {
    if (b.head_norms[0].exists()) head_norms_backward(p, b, dqkv, heads);
    linear_backward(p, b.qkv(), dnorm1, dqkv, norm1);
}

// att = softmax(q k^T / sqrt(HS)) v, and lse, the logsumexp of each row of scores.
static void attention_forward(const Pass& p, const Block& b, floatX* att, real* lse, const floatX* qkv) {
    const int block = b.qkv().block;
    const AttentionMask mask = p.mask(block);
    const AttentionShape shape = p.attention(block);
    if (const KeyValueCache* cache = p.in.cache) {
        const int window = p.m.c.sees_all(p.layer(block)) ? 0 : p.m.c.window;
        return be::attention_decode(p.ctx, att, cache->of(block, 0), qkv,
                                    {cache->sequences, p.in.positions, window, mask.slopes, b.sinks}, shape);
    }
    be::attention_forward(p.ctx, att, lse, qkv, mask, shape);
    if (b.sinks) be::sinks_forward(p.ctx, att, lse, b.sinks, shape);
}
// dqkv is the gradient of queries and keys before their rotation.
static void attention_backward(const Pass& p, const Block& b, floatX* dqkv, const floatX* datt, const AttentionActs& acts) {
    const int block = b.qkv().block;
    const AttentionMask mask = p.mask(block);
    const AttentionShape shape = p.attention(block);
    if (b.sinks) be::sinks_backward(p.ctx, b.dsinks, datt, acts, b.sinks, shape);
    if (p.rotates(block)) be::attention_rope_backward(p.ctx, dqkv, datt, acts, mask, p.rope(block), shape, p.m.a.dq_sums);
    else be::attention_backward(p.ctx, dqkv, datt, acts, mask, shape, p.m.a.dq_sums);
}

// The last matrix of attention (proj) or MLP (fc2), to the term that they add to the residual stream:
// term = dropout(norm(y)), y = inp w^T + b. y is kept in s.x if a norm follows, else it is the term itself.
static void branch_forward(const Pass& p, const Linear& l, floatX* term, const BranchOutput& s, const LinearInput& inp) {
    linear_forward(p, l, l.after.exists() ? s.x : term, inp);
    if (l.after.exists()) norm_forward(p, l.after, term, s.stats, s.x);
    const Dropout dropout = p.hidden_dropout(l);
    if (dropout.rate > 0) be::dropout_forward(p.ctx, term, term, p.stream_size(), dropout);
}
// The gradient of y: in dy, or dterm itself if there is neither norm nor dropout. dy may be dterm.
static const floatX* branch_backward(const Pass& p, const Linear& l, floatX* dy, const floatX* dterm, const BranchOutput& s) {
    const Dropout dropout = p.hidden_dropout(l);
    if (dropout.rate > 0) {
        be::dropout_forward(p.ctx, dy, dterm, p.stream_size(), dropout);
        dterm = dy;
    }
    if (!l.after.exists()) return dterm;
    norm_backward(p, l.after, dy, nullptr, dterm, s.stats, s.x, Acc::Set);
    return dy;
}

// ---- MLP --------------------------------------------------------------------------------------------------------------------

static void activation_forward(const Pass& p, const Output& out, const floatX* inp) {
    be::activation_forward(p.ctx, out, inp, p.N(), p.m.local.Fl, p.m.c.activation);
}
// True if there are fused ops for this activation.
static bool fused(Activation a) { return a == Activation::gelu || a == Activation::swiglu; }

// fc1 = inp w^T + b, act = activation(fc1). A fused GeLU may differ from the separate op by a rounding, so it is not used if
// backward recomputes act without fc1.
static void fc1_forward(const Pass& p, const Block& b, const MlpActivations& s, const LinearInput& inp) {
    const Linear& l = b.fc1();
    const bool swiglu = p.m.c.activation == Activation::swiglu;
    const bool act_again = p.m.recompute_of(l.block - p.in.first_block) == Recompute::selective;
    if (!fuses(p, l) || !fused(p.m.c.activation) || (!swiglu && act_again)) {
        linear_forward(p, l, s.fc1, inp);
        return activation_forward(p, output_for(p, b.fc2(), s.act), s.fc1);
    }
    const floatX* all_inp = whole_input(p, l, inp);
    if (swiglu) be::linear_swiglu_forward(p.ctx, s.act.bf16, s.fc1, all_inp, l.w, l.b, p.N(), l.in, p.m.local.Fl);
    else be::linear_gelu_forward(p.ctx, s.act.bf16, s.fc1, all_inp, l.w, l.b, p.N(), l.in, l.out);
}

// out = mid + mlp, mlp = dropout(norm(fc2(act(fc1(inp)))))
static void mlp_forward(const Pass& p, const Block& b, floatX* out, const MlpActivations& s, const LinearInput& inp,
                        const floatX* mid) {
    const Linear& l = b.fc2();
    floatX* const mlp = p.m.a.branch_out;
    fc1_forward(p, b, s, inp);
    if (p.m.local.tp_size == 1 && !l.lora && !l.after.exists() && p.hidden_dropout(l).rate == 0) {
        if (p.fp8(l.block)) return fp8_forward(p, l, out, mid, s.act, l.b);
        return be::linear_residual_forward(p.ctx, out, mid, whole_input(p, l, s.act), l.w, l.b, p.N(), l.in, l.out);
    }
    branch_forward(p, l, mlp, s.fc2, s.act);
    be::residual_forward(p.ctx, out, mid, mlp, p.stream_size());
}
static void mlp_backward(const Pass& p, const Block& b, floatX* dinp, const floatX* dmlp, const MlpActivations& s,
                         const LinearInput& inp) {
    const Linear& l = b.fc2();
    const Activation activation = p.m.c.activation;
    floatX *dact = p.m.a.dact, *dfc1 = p.m.a.dfc1;
    const floatX* dfc2 = branch_backward(p, l, p.m.a.branch_out, dmlp, s.fc2);
    if (!fuses(p, l) || !fused(activation)) {
        linear_backward(p, l, dact, dfc2, s.act);
        be::activation_backward(p.ctx, gradient_for(p, b.fc1(), dfc1), dact, s.fc1, p.N(), l.in, activation);
    } else {
        const floatX* all_dfc2 = linear_backward_weight(p, l, dfc2, s.act);
        if (gated(activation)) be::linear_swiglu_backward_input(p.ctx, dfc1, dact, all_dfc2, l.w, s.fc1, p.N(), l.in, l.out);
        else be::linear_gelu_backward_input(p.ctx, dfc1, all_dfc2, l.w, s.fc1, p.N(), l.in, l.out);
    }
    linear_backward(p, b.fc1(), dinp, dfc1, inp);
}

// ---- The block --------------------------------------------------------------------------------------------------------------

// The activations of block i. An input that is kept only in FP8 has its bf16 in the shared block.
static BlockActivations block_activations(const Pass& p, int i) {
    BlockActivations s = p.in.blocks[i];
    const auto share_bf16 = [&](size_t, Kept kept, auto& own, auto& shared) {
        if (fp8_suffices(kept, p.m.c.lora.on())) bf16_of(own) = bf16_of(shared);
    };
    if (p.fp8(p.in.first_block + i)) for_each_tensor(p.m, share_bf16, s, p.m.a.shared);
    s.x = p.in.x[i];
    if (!p.m.c.norm_before()) {
        s.norm1.bf16 = s.x;
        s.norm2.bf16 = s.mid;
    }
    return s;
}

// Block i of the micro-batch's chunk, from x[i] to x[i+1].
static void block_forward(const Pass& p, int i) {
    const Block& b = p.m.blocks[p.in.first_block + i];
    const BlockActivations s = block_activations(p, i);
    const Output norm1 = output_for(p, b.qkv(), s.norm1), norm2 = output_for(p, b.fc1(), s.norm2);
    floatX *attn = p.m.a.branch_out, *out = p.in.x[(size_t)i + 1];

    norm_forward(p, b.norm1, /*out*/ norm1, s.stats1, /*in*/ s.x);              // 1  norm1 = norm(x)
    qkv_forward(p, b, /*out*/ s.qkv, s.heads, /*in*/ s.norm1);                  // 2  q, k, v = norm1 Wqkv^T
    attention_forward(p, b, /*out*/ s.att.bf16, s.lse, /*in*/ s.qkv);           // 3  att = softmax(q k^T / sqrt(HS)) v
    branch_forward(p, b.proj(), /*out*/ attn, s.proj, /*in*/ s.att);            // 4  attn = att Wproj^T
    add_norm2_forward(p, b, /*out*/ s.mid, norm2, s.stats2, /*in*/ s.x, attn);  // 5  mid = x + attn, norm2 = norm(mid)
    mlp_forward(p, b, /*out*/ out, s.mlp, /*in*/ s.norm2, s.mid);               // 6  out = mid + act(norm2 W1^T) W2^T
}

// Recomputes the activations that forward did not keep: the same ops on the same inputs, so the same bits.
static void recompute_block(const Pass& p, int i) {
    const Recompute recompute = p.m.recompute_of(i);
    if (recompute == Recompute::full) return block_forward(p, i);
    if (recompute == Recompute::none) return;
    const int block = p.in.first_block + i;
    const Block& b = p.m.blocks[block];
    const BlockActivations s = block_activations(p, i);
    norm_forward(p, b.norm1, output_for(p, b.qkv(), s.norm1), s.stats1, s.x);
    norm_forward(p, b.norm2, output_for(p, b.fc1(), s.norm2), s.stats2, p.m.c.parallel() ? s.x : s.mid);
    if (recompute == Recompute::mlp) fc1_forward(p, b, s.mlp, s.norm2);  // quantises norm2 as well
    else activation_forward(p, output_for(p, b.fc2(), s.mlp.act), s.mlp.fc1);
    if (!p.fp8(block)) return;
    quantize_input(p, b.qkv(), s.norm1);
    quantize_input(p, b.proj(), s.att);
    if (recompute != Recompute::mlp) quantize_input(p, b.fc1(), s.norm2);
    quantize_input(p, b.fc2(), s.mlp.act);
}

// After the backward pass of a block, the head or the embedding: rounds bf16 gradients (gradients.h).
static void end_block(const Pass& p, int block) {
    p.m.micro_grads.end(p.ctx, p.m.table, p.m.grads, block, p.in.gradients, p.in.rounding_key);
}

// The steps of block_forward in reverse. On entry dx is the gradient of the block's output, on return of its input: each branch
// is differentiated back to its norm, whose input gradient is added to the gradient of the residual stream.
static void block_backward(const Pass& p, int i) {
    const int block = p.in.first_block + i;
    const Block& b = p.m.blocks[block];
    const BlockActivations s = block_activations(p, i);
    floatX *dx = p.m.a.dx, *dnorm = p.m.a.dnorm, *datt = p.m.a.datt, *dqkv = p.m.a.dqkv, *dbranch = p.m.a.branch_out;
    real* const dfc2_bias = i > 0 ? p.summed_bias(p.m.blocks[(size_t)block - 1].fc2()) : nullptr;  // of the block before
    const floatX* norm2_inp = p.m.c.parallel() ? s.x : s.mid;
    recompute_block(p, i);
    p.m.micro_grads.begin(p.ctx, block);

    mlp_backward(p, b, /*out*/ dnorm, /*in*/ dx, s.mlp, s.norm2);                                            // 6
    const floatX* dattn = add_norm2_backward(p, b, /*out*/ dx, dbranch, /*in*/ dnorm, s.stats2, norm2_inp);  // 5
    const floatX* dproj = branch_backward(p, b.proj(), /*out*/ dbranch, /*in*/ dattn, s.proj);               // 4
    linear_backward(p, b.proj(), /*out*/ datt, /*in*/ dproj, s.att);
    attention_backward(p, b, /*out*/ dqkv, /*in*/ datt, {s.qkv, s.att.bf16, s.lse});          // 3
    qkv_backward(p, b, /*out*/ dnorm, /*in*/ dqkv, s.heads, s.norm1);                         // 2
    norm_backward(p, b.norm1, /*out*/ dx, dfc2_bias, /*in*/ dnorm, s.stats1, s.x, Acc::Add);  // 1
    end_block(p, block);
}

// ---------------------------------------------------------------------------------------------------------------------------
// 4  The whole model

// Uploads a batch into the micro-batch `to`; returns its pass. Puts the model's virtual tokens in front of sequences that start
// in the batch. Parts that the batch lacks are not sent. Defaults that callers may change: no dropout, no cache, gradients are
// added.
static Pass upload(be::Ctx& ctx, Model& m, const Batch& given, MicroBatch& to) {
    const bool begins = given.begins && m.c.virtual_tokens.on();
    const Batch behind = begins ? given.behind(m.c.virtual_tokens.count) : Batch();
    const Batch& batch = begins ? behind : given;
    const auto send = [&](int* place, const std::vector<int>& from) {
        be::upload(ctx, place, from.data(), from.size() * sizeof(int));
    };
    send(to.tokens, batch.tokens);
    send(to.targets, batch.targets);
    send(to.positions, batch.positions);
    send(to.doc_start, batch.doc_start);
    if (m.c.window) send(to.window_start, batch.first_keys(m.c.window));
    to.pairs = batch.pairs;
    to.virtual_rows = begins ? batch.virtual_rows() : std::vector<int>();
    to.B = batch.B;
    to.T = batch.T;
    to.masks_documents = !batch.doc_start.empty();
    to.cache = nullptr;
    to.gradients = Acc::Add;
    to.drops = false;
    const Pass pass = {ctx, m, to};
    CHECK((size_t)pass.local_rows() <= planned_rows(m, (size_t)m.a.B * m.a.T), "%d x %d rows", to.B, to.T);
    return pass;
}

static void clear_sums(be::Ctx& ctx, Model& m) {
    const LossSums none;
    be::upload(ctx, m.a.sums, &none, sizeof none);
    m.a.pair_sums = none.pair_sums;
}
// Waits for the ops before it.
static LossSums read_sums(be::Ctx& ctx, const Model& m) {
    LossSums sums;
    be::download(ctx, &sums, m.a.sums, sizeof sums);
    sums.pair_sums = m.a.pair_sums;
    return sums;
}

// Clears the gradients that a step only adds to: vectors and embeddings. The first micro-batch's products set the gradients of
// the head and of the blocks' matrices, most of the memory (MicroBatch::gradients), which saves clearing and reading them. In
// bf16 the first micro-batch sets all.
static void begin_gradients(be::Ctx& ctx, Model& m) {
    if (m.micro_grads.used()) return;
    if (m.c.virtual_tokens.on()) return be::clear(ctx, m.grads.data, m.table.size * sizeof(real));
    const bool set_by_head = m.c.tied && m.table.part.last;
    if (m.g.wte && !set_by_head) be::clear(ctx, m.g.wte, (size_t)m.local.Vpl * m.c.C * sizeof(real));
    if (m.g.wpe) be::clear(ctx, m.g.wpe, (size_t)m.c.T * m.c.C * sizeof(real));
    be::clear(ctx, m.grads.from(m.table.decayed).data, (m.table.size - m.table.decayed) * sizeof(real));
}

// Each tp rank has some rows of the vocabulary, and outputs zero for other tokens; the first rank adds the positions.
static void embed_forward(const Pass& p) {
    const Model& m = p.m;
    const ModelConfig& c = m.c;
    floatX* embedded = c.embedding_norm ? p.in.embedded : p.in.x[0];
    be::embedding_forward(p.ctx, partial_sum(p, embedded), p.in.tokens, p.in.positions, m.p.wte, on_first_tp_rank(p, m.p.wpe),
                          p.N(), c.C, m.local.vocabulary());
    if (!p.in.virtual_rows.empty() && m.ranks->mesh.tp.rank == 0)
        m.virtual_tokens.forward(p.ctx, partial_sum(p, embedded), p.in.virtual_rows);
    reduce_from_tensor_parallel(p, embedded);
    if (c.embedding_norm) norm_forward(p, m.embedding_norm, p.in.x[0], p.in.embedding_stats, embedded);
    const Dropout dropout = p.dropout(c.embedding_dropout, 0);
    if (dropout.rate > 0) be::dropout_forward(p.ctx, p.in.x[0], p.in.x[0], p.stream_size(), dropout);
}

static void embed_backward(const Pass& p) {
    Model& m = p.m;
    floatX* dembedded = m.c.embedding_norm ? m.a.dnorm : m.a.dx;
    const Dropout dropout = p.dropout(m.c.embedding_dropout, 0);
    m.micro_grads.begin(p.ctx, TensorSpec::embedding);
    if (dropout.rate > 0) be::dropout_forward(p.ctx, m.a.dx, m.a.dx, p.stream_size(), dropout);
    if (m.c.embedding_norm)
        norm_backward(p, m.embedding_norm, dembedded, nullptr, m.a.dx, p.in.embedding_stats, p.in.embedded, Acc::Set);
    const floatX* all = gather_from_sequence_parallel(p, dembedded, p.local_rows(), m.c.C);
    if (m.virtual_tokens.on()) m.virtual_tokens.backward(p.ctx, all, p.in.virtual_rows);
    else be::embedding_backward(p.ctx, m.g.wte, m.g.wpe, all, p.in.tokens, p.in.positions, p.N(), m.c.C, m.local.vocabulary());
    end_block(p, TensorSpec::embedding);
}

// The loss of some rows; with `training` their gradient replaces the logits. Vocabulary shards first exchange their statistics.
static void classify(const Pass& p, int row, int rows, real loss_scale, real z_coef, bool training) {
    Activations& a = p.m.a;
    const real* weight = p.in.pairs.empty() ? nullptr : a.weight + row;
    const VocabularyShard shard = p.m.local.vocabulary();
    const RowLosses losses = {a.loss + row, a.zloss + row, a.lse + row};
    const LossConstants constants = {loss_scale, z_coef, training, (real)p.m.c.logit_softcap, weight};
    const Axis& tp = p.m.ranks->mesh.tp;
    const int* targets = p.in.targets + row;
    if (tp.size == 1) return be::classifier(p.ctx, a.logits, losses, targets, rows, shard, constants);
    real* mine = a.statistics + (size_t)tp.rank * 2 * rows;
    be::classifier_statistics(p.ctx, mine, a.logits, targets, rows, shard, constants.softcap);
    be::all_gather(p.ctx, p.m.ranks->tp, a.statistics, mine, (size_t)2 * rows);
    be::classifier_shard(p.ctx, a.logits, losses, targets, a.statistics, tp.size, rows, shard, constants);
}

// Compares the answers of a micro-batch by its rows' losses: sets the weights of their gradients, and adds to the sums. With
// tensor parallelism every rank knows all losses.
static void compare_answers(const Pass& p) {
    Activations& a = p.m.a;
    HostSide<real> loss(p.ctx, a.loss, (size_t)p.N()), weight(p.ctx, a.weight, (size_t)p.N());
    loss.download();
    p.m.preference.compare(p.in.pairs, loss.data(), weight.data(), a.pair_sums);
    weight.upload();
}

// Final norm, logits of head_rows rows at a time, loss. With `training`, these logits become their gradient in place and are
// propagated through the head at once, so that a (N, V) matrix never exists; dx is then the gradient of the last block's
// output. Adds to the model's sums. For pairs of answers a row's gradient depends on the losses of all rows, so a first pass
// computes them; logits that all fit in memory at once are not computed again.
static void head(const Pass& p, real loss_scale, real z_coef, bool training) {
    Model& m = p.m;
    Activations& a = m.a;
    const int N = p.N(), C = m.c.C;
    norm_forward(p, m.final_norm, a.final_norm, a.final_stats, p.in.out());
    const floatX* normed = gather_from_sequence_parallel(p, a.final_norm, p.local_rows(), C);
    floatX* dnormed = partial_sum(p, a.dnorm);
    const bool compares = !p.in.pairs.empty(), keeps_logits = training && compares && N <= a.head_rows;
    const auto logits = [&](int row) {
        const int rows = std::min(a.head_rows, N - row);
        be::linear_forward(p.ctx, a.logits, normed + (size_t)row * C, m.p.head, nullptr, rows, C, m.local.Vpl);
        return rows;
    };
    if (training && compares) {
        for (int row = 0; row < N; row += a.head_rows) classify(p, row, logits(row), 0, 0, false);
        compare_answers(p);
    }
    if (training) m.micro_grads.begin(p.ctx, TensorSpec::head);
    for (int row = 0; row < N; row += a.head_rows) {
        const int rows = keeps_logits ? N : logits(row);
        const floatX* inp = normed + (size_t)row * C;
        classify(p, row, rows, loss_scale, z_coef, training);
        if (!training) continue;
        const Acc acc = row ? Acc::Add : acc_of_products(p);
        if (m.g.head) be::linear_backward_weight(p.ctx, m.g.head, nullptr, a.logits, inp, rows, C, m.local.Vpl, acc);
        floatX* dinp = dnormed + (size_t)row * C;  // may be the memory of inp
        be::linear_backward_input(p.ctx, dinp, a.logits, m.p.head, rows, C, m.local.Vpl);
    }
    if (training) {
        reduce_from_tensor_parallel(p, a.dnorm);
        const size_t blocks = p.in.blocks.size(), last = (size_t)p.in.first_block + blocks - 1;
        real* const fc2_bias = blocks ? p.summed_bias(m.blocks[last].fc2()) : nullptr;
        norm_backward(p, m.final_norm, a.dx, fc2_bias, a.dnorm, a.final_stats, p.in.out(), Acc::Set);
        end_block(p, TensorSpec::head);
    }
    if (!training && compares) compare_answers(p);
    be::loss_sums(p.ctx, a.sums, {a.loss, a.zloss, a.lse}, p.in.targets, N);
}

// Forward through the chunk of layers: from tokens, or the activations in x[0], to out(). Calls need(end) before reading
// matrices that precede element `end`.
template <class Need>
static void model_forward(const Pass& p, Need need) {
    need(p.m.table.begin_of_block(0));
    if (p.in.first) embed_forward(p);
    for (int i = 0; i < (int)p.in.blocks.size(); i++) {
        const int block = p.in.first_block + i;
        need(p.m.table.begin_of_block(block + 1));
        prepare_weights(p, block);
        block_forward(p, i);
    }
}
static void model_forward(const Pass& p) {
    model_forward(p, [](size_t) {});
}

// Backward through the chunk of layers: on entry a.dx is the gradient of its output, on return of its input; then through the
// embedding, if it is in this chunk and trained. Calls finished(block) when a block's gradients are complete for this
// micro-batch.
template <class Finished>
static void model_backward(const Pass& p, Finished finished) {
    for (int i = (int)p.in.blocks.size() - 1; i >= 0; i--) {
        block_backward(p, i);
        finished(p.in.first_block + i);
    }
    if (p.in.first && (p.m.g.wte || p.m.virtual_tokens.on())) embed_backward(p);
}

// ---------------------------------------------------------------------------------------------------------------------------
// 5  One training step

struct Trainer : TrainerBase {
    Model& m;
    Batch micro_batch;  // the current one

    Trainer(be::Ctx& ctx, Model& model, const TrainOptions& o, const Schedule& schedule, const DataLoader& data,
            const TrainingState& position, const std::string& checkpoint = "")
        : TrainerBase(ctx, model, o, schedule, data, position, checkpoint), m(model) {}
};

static PipelineLinks pipeline_links(be::Ctx& ctx, Model& m) {
    std::vector<size_t> in_flight;  // micro-batches, by chunk
    for (const auto& chunk : m.a.micro_batches) in_flight.push_back(chunk.size());
    return PipelineLinks(ctx, *m.ranks, (int)m.stages.size(), in_flight);
}

// Forward and backward over this rank's micro-batches of a global batch, in the pipeline's order: sets grads and the sums.
// Calls finished(block) when a block's gradients are complete. Returns false if the run is to stop: all micro-batches already
// started are then complete, the same ones on every rank, and the gradients are invalid.
template <class Finished>
static bool run_micro_batches(Trainer& t, int64_t global_batch, real loss_scale, Finished finished) {
    Model& m = t.m;
    begin_gradients(t.ctx, m);
    clear_sums(t.ctx, m);
    const Mesh& mesh = m.ranks->mesh;
    const int B = t.o.micro_batch_size, micro_batches = (int)(global_batch / ((int64_t)B * mesh.dp.size));
    PipelineLinks links = pipeline_links(t.ctx, m);

    int stop_at = micro_batches;  // the first micro-batch not to run
    for (const PipelineEvent& e : pipeline_schedule(mesh.pp.size, mesh.pp.rank, mesh.vpp, micro_batches)) {
        if (e.direction == Direction::forward && e.chunk == 0 && e.micro_batch < stop_at && t.stop()) stop_at = e.micro_batch;
        if (e.micro_batch >= stop_at) continue;
        MicroBatch& in = m.a.micro_batch(e.chunk, e.micro_batch);
        const Pass pass = {t.ctx, m, in};
        if (e.direction == Direction::forward) {
            const int64_t first = t.state.sample() + ((int64_t)e.micro_batch * mesh.dp.size + mesh.dp.rank) * B;
            t.data.fetch(first, B, t.micro_batch);
            t.faults.in_tokens(t.micro_batch, first, t.batch());
            upload(t.ctx, m, t.micro_batch, in);
            in.gradients = e.micro_batch ? Acc::Add : Acc::Set;
            in.rounding_key = rounding_key((uint64_t)t.o.seed, first, RngPurpose::gradients);
            in.drops = true;
            in.seed = (uint64_t)t.o.seed;
            in.sample = first;
            links.receive_input(in.x[0], pass.stream_size(), e.chunk, e.micro_batch);
            model_forward(pass, [&](size_t end) {
                links.progress();
                t.gatherer.need(end);
            });
            links.send_output(in.out(), pass.stream_size(), e.chunk, e.micro_batch);
        } else {
            links.receive_gradient(m.a.dx, pass.stream_size(), e.chunk, e.micro_batch);
            t.gatherer.finish();
            if (in.last) head(pass, loss_scale, (real)t.o.z_loss_strength, true);
            model_backward(pass, [&](int block) {
                links.progress();
                if (e.micro_batch == micro_batches - 1) finished(block);
            });
            links.send_gradient(in.x[0], m.a.dx, pass.stream_size(), e.chunk, e.micro_batch);
        }
    }
    links.finish();
    return stop_at == micro_batches;
}

// Reduces this rank's shards of grads: sums over the data-parallel ranks, and over the tp ranks or the two ends of the pipeline
// that each compute a part of a tensor's gradient. Returns false if the run is to stop.
static bool accumulate_gradients(Trainer& t, int64_t global_batch, real loss_scale) {
    Model& m = t.m;
    GradientReducer reducer(t.ctx, m.ranks->dp, m.shards, m.table, m.grads, !t.o.no_overlap);
    const bool done = run_micro_batches(t, global_batch, loss_scale, [&](int block) {
        reduce_replicas(t.ctx, m, block);
        reducer.ready(m.table.begin_of_block(block));
    });
    if (!done) return false;
    reduce_shared(t.ctx, m);
    reducer.finish();
    return true;
}

// The same, with each rank's own gradients computed twice. If the two results differ in any bit the hardware is faulty: the run
// fails and names the rank, its host and the first tensor.
static bool accumulate_gradients_twice(Trainer& t, int64_t global_batch, real loss_scale) {
    Model& m = t.m;
    GradientHashes once, again;
    for (GradientHashes* hashes : {&once, &again}) {
        if (!run_micro_batches(t, global_batch, loss_scale, [](int) {})) return false;
        t.faults.in_own_gradients(t.batch());
        *hashes = hash_gradients(t.ctx, m, read_sums(t.ctx, m));
    }
    require_equal(once, again, m, t.batch());
    for (int block = 0; block < (int)m.g.blocks.size(); block++) reduce_replicas(t.ctx, m, block);
    reduce_shared(t.ctx, m);
    GradientReducer(t.ctx, m.ranks->dp, m.shards, m.table, m.grads, false).finish();
    return true;
}

// AdamW or Lion on this rank's shards, or Muon for whole matrices of blocks. With ZeRO, each bucket of new parameters is sent
// to the data-parallel ranks as soon as it is updated.
static void update(Trainer& t, double lr, double weight_decay, double grad_scale) {
    Model& m = t.m;
    const TrainOptions& o = t.o;
    const int64_t step = t.state.updates + 1;
    const uint64_t rounding = rounding_key((uint64_t)o.seed, step);
    const auto updated = [&](const Bucket& b) { t.gatherer.start(b, m.params); };
    const bool lion = m.optimizer->value == OptimizerKind::lion;
    const double beta1 = lion ? o.lion_beta1 : o.adam_beta1, beta2 = lion ? o.lion_beta2 : o.adam_beta2;
    update_elementwise(t.ctx, m, {lr, beta1, beta2, o.adam_eps, weight_decay, grad_scale, step, rounding}, updated);
    m.muon.update(t.ctx, m, {(real)lr, (real)weight_decay, (real)grad_scale, rounding}, updated);
    update_average(t.ctx, m, o.ema_decay, step);
    t.faults.in_update(t.batch());
    t.memory_check.remember();
}

// The size of AdamW's bias-corrected second moments in the gradient's units: the square root of the norm of exp_avg_sq over all
// ranks, without the matrices that Muon updates.
static double norm_of_exp_avg_sq(Trainer& t) {
    Model& m = t.m;
    clear_sums(t.ctx, m);
    for (const Range& r : m.not_duplicated)
        m.shards.for_each_part(
            r.begin, r.end - r.begin,
            [&](size_t, size_t shard, size_t n) { be::add_squares(t.ctx, &m.a.sums->squares, m.exp_avg_sq.from(shard), n); },
            false);
    const double squares = reduce_sums(*m.ranks, read_sums(t.ctx, m)).squares;
    return std::sqrt(std::sqrt(squares) / (1 - std::pow(t.o.adam_beta2, (double)(t.state.updates + 1))));
}
// After an update: sets the next step's scales from amax over all ranks, and decides whether FP8 starts.
static void end_step_in_fp8(Trainer& t, double loss, double norm) {
    Fp8Training& f = t.m.fp8;
    if (f.recipe.on && t.o.fp8_start == "auto" && t.state.fp8_start < 0 && t.state.scheduled >= t.schedule.warmup) {
        Steadiness& steadiness = t.history.steadiness;
        if (t.verdict.kind == Verdict::normal) steadiness.observe(t.state.step, loss, norm, norm_of_exp_avg_sq(t));
        if (steadiness.steady()) t.state.fp8_start = t.state.step + 1 + (f.recipe.current ? 0 : t.o.fp8_calibration_steps);
    }
    if (!f.on && !f.measuring) return;
    const std::vector<float> amax = measured_amax(t.ctx, f, t.m.table.part.layers, t.history.fp8.scales.size());
    t.history.fp8.update(largest_of_all_ranks(*t.m.ranks, amax));
}

// One global batch: forward and backward over its micro-batches, then norm, clipping and update. Every unmasked target of the
// global batch, or every pair of answers, has the same weight: loss_scale is one over their number, known before the first
// backward pass, and everything is summed. New parameters are still in flight on return: call t.gatherer.finish() before
// anything but the next step reads them. If the run is to stop before the step is complete, returns nothing and changes only
// the gradients.
static std::optional<StepStats> train_step(Trainer& t) {
    const double begin = monotonic_seconds();
    const int64_t global_batch = t.schedule.global_batch(t.state.consumed);
    const double lr = t.schedule.lr(t.state.scheduled), weight_decay = t.schedule.weight_decay(t.state.scheduled);
    const int64_t terms = t.data.terms(t.state.sample(), global_batch);
    const real loss_scale = terms > 0 ? (real)(1.0 / (double)terms) : real(0);

    Fp8Training& fp8 = t.m.fp8;
    const int64_t start = fp8_start(t.o, t.state);
    begin_step_in_fp8(t.ctx, fp8, t.history.fp8, t.m.table.part.layers, t.state.step, start, t.o.fp8_calibration_steps);
    const bool examines = t.due_in_step(t.o.log_health_interval);
    fp8.counts.assign(examines && fp8.on ? fp8.tensors() : 0, {});
    t.faults.in_time(t.batch());
    t.faults.in_memory(t.batch(), [&] { t.gatherer.finish(); });
    const bool twice = t.due_in_step(t.o.detect_nondeterminism);
    if (!(twice ? accumulate_gradients_twice : accumulate_gradients)(t, global_batch, loss_scale)) {
        fp8.on = fp8.measuring = false;
        return {};
    }
    t.faults.in_summed_gradients(t.batch());
    t.memory_check.require_unchanged(t.state.step);
    for (const Range& r : t.m.not_duplicated)
        be::add_squares(t.ctx, &t.m.a.sums->squares, t.m.grads.from(r.begin), r.end - r.begin);
    const LossSums sums = reduce_sums(*t.m.ranks, read_sums(t.ctx, t.m));
    const double norm = std::sqrt(sums.squares), loss = sums.loss(), z = sums.z / sums.n;
    // Clipping as in Megatron: all gradients times clip / (norm + 1e-6), if that factor is below 1.
    const double clip = t.o.clip_grad > 0 ? std::min(1.0, t.o.clip_grad / (norm + 1e-6)) : 1.0;
    t.verdict = t.history.guard.judge(t.state.step + 1, t.batch(), loss + z, norm);
    if (t.verdict.apply) {
        if (examines) t.layer_health.before_update();
        update(t, lr, weight_decay, clip);
        if (examines) t.health = t.layer_health.after_update(fp8);
        end_step_in_fp8(t, loss, norm);
    }
    fp8.on = fp8.measuring = false;  // evaluation and generation compute in bf16, like any user of the checkpoint

    StepStats stats = t.count_step(global_batch, sums);
    stats.grad_norm = norm;
    stats.lr = lr;
    stats.step_ms = (monotonic_seconds() - begin) * 1e3;
    stats.tokens_per_s = global_batch * t.o.seq_length / (stats.step_ms * 1e-3);
    return stats;
}

// A whole step on random tokens, for timing: forward, backward, norm, clipping, AdamW.
class RandomStep {
public:
    double forward = 0, backward = 0, update = 0;  // seconds of the last step

    // random: initialises the weights. Otherwise they are zero, which saves drawing them and does not change the time of a
    // step.
    // fp8: every step is in FP8 (hybrid), the first one with current scales, later ones with delayed scales, as in training.
    RandomStep(be::Ctx& ctx, const ModelConfig& c, int B, int T, Recompute recompute, bool random = true, bool fp8 = false)
        : ctx_(ctx), m_(c) {
        m_.fp8.recipe.on = fp8;
        if (fp8) m_.fp8.blocks.assign((size_t)c.L, true);
        if (fp8) scales_ = Fp8State(m_.fp8.recipe, c.L);
        plan_memory(m_, recompute, B, T, choose_head_rows(ctx, m_.local, (int64_t)B * T));
        allocate(ctx, m_);
        if (random) initialize(ctx, m_, 1);
        batch_.B = B;
        batch_.T = T;
        for (int i = 0; i < B * T; i++) {
            batch_.tokens.push_back((int)(i * 2654435761u % c.V));
            batch_.targets.push_back((int)((i + 1) * 2654435761u % c.V));
            batch_.positions.push_back(i % T);
        }
    }

    // One micro-batch; the first of a step sets the gradients, later ones add to them.
    void micro_batch(Acc gradients = Acc::Set) {
        double start = monotonic_seconds();
        const Pass pass = upload(ctx_, m_, batch_, m_.a.micro_batch());
        pass.in.gradients = gradients;
        pass.in.drops = true;
        if (gradients == Acc::Set) begin_gradients(ctx_, m_);
        clear_sums(ctx_, m_);
        model_forward(pass);
        lap(forward, start);
        head(pass, real(1.0 / (batch_.B * batch_.T)), 0, true);
        model_backward(pass, [](int) {});
        lap(backward, start);
    }
    void run() {
        const std::vector<int>& layers = m_.table.part.layers;
        begin_step_in_fp8(ctx_, m_.fp8, scales_, layers, steps_, 0, 0);
        micro_batch();
        double start = monotonic_seconds();
        const double norm = std::sqrt(be::sum_of_squares(ctx_, m_.grads, m_.table.size));
        be::adamw(ctx_, m_.params, m_.master_low_bits, m_.exp_avg, m_.exp_avg_sq, m_.grads, m_.table.size,
                  {1e-4f, 0.9f, 0.95f, 1e-8f, 0.1f, (real)std::min(1.0, 1 / norm), ++steps_}, Rounding());
        if (m_.fp8.recipe.on) scales_.update(measured_amax(ctx_, m_.fp8, layers, scales_.scales.size()));
        lap(update, start);
    }

    // The bytes that a RandomStep on micro-batches of this shape would allocate.
    static size_t planned_bytes(be::Ctx& ctx, const MicroBatchShape& shape, Recompute recompute) {
        Model m(shape.c);
        plan_memory(m, recompute, shape.B, shape.T, choose_head_rows(ctx, m.local, (int64_t)shape.B * shape.T));
        return m.arena.bytes();
    }
    size_t planned_bytes() const { return m_.arena.bytes(); }
    size_t parameters() const { return m_.table.size; }

private:
    void lap(double& part, double& start) {  // also waits, which costs a GPU some microseconds of a step
        wait_for_device(ctx_);
        part = monotonic_seconds() - start;
        start = monotonic_seconds();
    }

    be::Ctx& ctx_;
    Model m_;
    Fp8State scales_;
    Batch batch_;
    int64_t steps_ = 0;
};

// ---------------------------------------------------------------------------------------------------------------------------
// 6  Inference

// The forward pass of micro-batch i through this rank's chunks; then last(pass) on the ranks that have the model's last chunk.
template <class Last>
static void forward_only(be::Ctx& ctx, Model& m, PipelineLinks& links, const Batch& batch, int i, Last last) {
    for (int chunk = 0; chunk < m.ranks->mesh.vpp; chunk++) {
        const Pass pass = upload(ctx, m, batch, m.a.micro_batch(chunk, i));
        links.receive_input(pass.in.x[0], pass.stream_size(), chunk, i);
        model_forward(pass);
        links.send_output(pass.in.out(), pass.stream_size(), chunk, i);
        if (pass.in.last) last(pass);
    }
}

// Losses over samples [first, first + n), one per dataset, forward only; data-parallel ranks process micro-batches in turn.
// stop() is called before each, and must return the same on every rank: if it is true, nothing is returned. compared(pairs)
// receives the pairs of each micro-batch on the ranks that have the head.
template <class Stop>
static std::optional<std::vector<LossSums>> evaluate(be::Ctx& ctx, Model& m, const DataLoader& data, int64_t first, int64_t n,
                                                     Stop stop,
                                                     const std::function<void(const std::vector<AnswerPair>&)>& compared = {}) {
    const Mesh& mesh = m.ranks->mesh;
    Batch batch;
    std::vector<LossSums> sums;
    for (const std::vector<int64_t>& samples : data.samples_by_set(first, n)) {
        PipelineLinks links = pipeline_links(ctx, m);
        clear_sums(ctx, m);
        const int64_t all = (int64_t)samples.size();
        for (int64_t i = 0; i * mesh.dp.size * m.a.B < all; i++) {
            if (stop()) return {};
            const int64_t mine = (i * mesh.dp.size + mesh.dp.rank) * m.a.B;
            if (mine >= all) continue;
            data.gather(&samples[mine], (int)std::min<int64_t>(m.a.B, all - mine), batch);
            forward_only(ctx, m, links, batch, (int)i, [&](const Pass& pass) {
                head(pass, 0, 0, false);
                if (compared) compared(pass.in.pairs);
            });
        }
        links.finish();
        sums.push_back(reduce_sums(*m.ranks, read_sums(ctx, m)));
    }
    return sums;
}

// Moves n scored rows to the front of the head's input, `to`. They must ascend: then a row's destination never lies after its
// source, and none is overwritten before it is read. With sequence parallelism each rank copies the rows that it has, and a sum
// over the ranks, which leave the others zero, gives all of them to each; `to` must then be other memory.
static void move_scored_rows(const Pass& p, floatX* to, const ScoredRow* rows, size_t n) {
    const size_t C = p.m.c.C, row_bytes = C * sizeof(floatX);
    const auto copy = [&](floatX* out, const floatX* inp, size_t count) {
        if (out != inp) be::copy_rows(p.ctx, out, row_bytes, inp, row_bytes, row_bytes, count);
    };
    if (!p.m.ranks->sequence_parallel) {
        for (size_t i = 0; i < n; i++) copy(to + i * C, p.in.out() + rows[i].row * C, 1);
        return;
    }
    const size_t held = (size_t)p.local_rows(), rank = (size_t)p.m.ranks->mesh.tp.rank, tp = (size_t)p.m.local.tp_size;
    CHECK(p.cut_rows(), "%d rows are not divided over %zu ranks", p.N(), tp);
    be::clear(p.ctx, p.m.a.all_rows, n * row_bytes);
    for (size_t i = 0; i < n; i++)
        if (rows[i].row / held == rank) copy(p.m.a.all_rows + i * C, p.in.out() + rows[i].row % held * C, 1);
    be::all_reduce(p.ctx, p.m.ranks->tp, p.m.a.all_rows, n * C);
    const bool cut = n % tp == 0;  // as the head's pass will be
    copy(to, p.m.a.all_rows + (cut ? rank * (n / tp) * C : 0), cut ? n / tp : n);
}

// Only the scored rows go through the head, at most head_rows at a time.
static void score_rows(const Pass& p, const std::vector<ScoredRow>& rows, std::vector<Score>& scores) {
    be::Ctx& ctx = p.ctx;
    Model& m = p.m;
    const bool cut = m.ranks->sequence_parallel;
    const size_t most = cut ? std::min(m.a.head_rows, p.local_rows()) : m.a.head_rows;
    MicroBatch scored = p.in;
    if (cut) scored.x.back() = m.a.branch_out;
    Batch batch;
    batch.begins = false;
    batch.B = 1;
    std::vector<int>& targets = batch.targets;
    for (size_t first = 0; first < rows.size(); first += targets.size()) {
        const size_t n = std::min(most, rows.size() - first);
        move_scored_rows(p, scored.out(), &rows[first], n);
        targets.clear();
        for (size_t i = 0; i < n; i++) targets.push_back(rows[first + i].target);
        batch.T = (int)n;
        head(upload(ctx, m, batch, scored), 0, 0, false);
        HostSide<real> loss(ctx, m.a.loss, n);
        loss.download();
        const std::vector<int> best = most_likely_tokens(ctx, *m.ranks, m.local, m.a.logits, m.a.statistics, n);
        for (size_t i = 0; i < n; i++) {
            Score& s = scores[rows[first + i].request];
            s.log_likelihood -= loss.data()[i];
            s.greedy = s.greedy && best[i] == targets[i];
        }
    }
}

// The log-likelihoods of the requests' continuations; updates a progress line, if there is one.
static std::optional<std::vector<Score>> score_requests(be::Ctx& ctx, Model& m, const std::vector<Request>& requests,
                                                        Progress* progress, const std::function<bool()>& stop) {
    PipelineLinks links = pipeline_links(ctx, m);
    int i = 0;
    const auto run = [&](const ScoringPass& scored, std::vector<Score>& scores) {
        forward_only(ctx, m, links, scored.batch, i++, [&](const Pass& pass) { score_rows(pass, scored.rows, scores); });
    };
    return score_requests(*m.ranks, m.a.B, m.a.T, m.c.virtual_tokens.count, requests, progress, run, stop);
}

// Generates several sequences at a time, one token each per step, for a Decoder. The activations of `m` serve as scratch. All
// ranks that share a model take part and get the same logits.
class Generator {
public:
    Generator(be::Ctx& ctx, Model& m)
        : ctx_(ctx), m_(m), links_(pipeline_links(ctx, m)), cache_(m.cache), lengths_((size_t)cache_.shape.sequences) {
        CHECK(cache_.keys, "no key/value cache was planned");
        CHECK(sequences() == 1 || !m.ranks->sequence_parallel, "rows of several sequences are not cut");
    }

    int sequences() const { return cache_.shape.sequences; }
    int capacity() const { return cache_.shape.tokens; }
    int length(int sequence) const { return lengths_[(size_t)sequence]; }

    // Restarts a sequence with a prompt that fits the context (if it fills it, nothing can be appended): one pass over the
    // virtual tokens and as many prompt tokens as the activations hold, then the others one by one.
    void prompt(int sequence, const std::vector<int>& tokens) {
        const int n = (int)tokens.size(), before = m_.c.virtual_tokens.count;
        int at_once = std::min(before + n, m_.a.B * m_.a.T);
        if (m_.ranks->sequence_parallel) at_once = std::max(1, at_once - at_once % m_.local.tp_size);  // rows that can be split
        CHECK(n >= 1 && before + n <= capacity() && at_once >= before, "a prompt of %d tokens", n);
        batch_.begins = true;
        batch_.B = 1;
        batch_.T = at_once - before;
        batch_.tokens.assign(tokens.begin(), tokens.begin() + batch_.T);
        batch_.positions.resize((size_t)batch_.T);
        std::iota(batch_.positions.begin(), batch_.positions.end(), 0);
        pass(nullptr, sequence);
        lengths_[(size_t)sequence] = at_once;
        for (int i = batch_.T; i < n; i++) append({{sequence, tokens[(size_t)i]}});
    }

    // Appends one token to each of some sequences, in one pass.
    void append(const std::vector<NextToken>& next) {
        batch_.begins = false;
        batch_.B = (int)next.size();
        batch_.T = 1;
        batch_.tokens.clear();
        batch_.positions.clear();
        std::vector<int> sequences;
        for (const auto& [sequence, token] : next) {
            CHECK(length(sequence) < capacity(), "the context is full");
            sequences.push_back(sequence);
            batch_.tokens.push_back(token);
            batch_.positions.push_back(lengths_[(size_t)sequence]++);
        }
        be::upload(ctx_, cache_.sequences, sequences.data(), sequences.size() * sizeof(int));
        pass(&cache_, 0);
    }

    // (rows, V) logits of the next token after each row of the last append(), or after the last prompt.
    const std::vector<float>& logits() {
        const ModelConfig& c = m_.c;
        Activations& a = m_.a;
        const int Vpl = m_.local.Vpl;
        const size_t rows = (size_t)rows_, all = rows * (size_t)c.Vp;
        const SteadyRows steady(ctx_, sequences());
        if (m_.table.part.last) {
            MicroBatch in;
            in.B = rows_;
            in.T = 1;
            floatX* mine = a.next_logits + (size_t)m_.ranks->mesh.tp.rank * rows * Vpl;
            norm_forward({ctx_, m_, in}, m_.final_norm, a.final_norm, a.final_stats, a.branch_out);
            be::linear_forward(ctx_, mine, a.final_norm, m_.p.head, nullptr, rows_, c.C, Vpl);
            be::all_gather(ctx_, m_.ranks->tp, a.next_logits, mine, rows * Vpl);
        } else be::clear(ctx_, a.next_logits, all * sizeof(floatX));
        be::all_reduce(ctx_, m_.ranks->pp, a.next_logits, all);  // the other stages add zero
        HostSide<floatX> host(ctx_, a.next_logits, all);
        host.download();
        logits_.resize(rows * c.V);
        const float cap = (float)c.logit_softcap;
        cpu::parallel_tasks(rows, [&](size_t row) {
            float* out = &logits_[row * c.V];
            for (int first = 0; first < c.V; first += Vpl)
                std::copy_n(host.data() + first / Vpl * rows * Vpl + row * Vpl, std::min(Vpl, c.V - first), out + first);
            for (int i = 0; cap > 0 && i < c.V; i++) out[i] = cap * std::tanh(out[i] / cap);
        });
        return logits_;
    }

private:
    // While this exists, a row of several sequences has the same bits regardless of the other rows; and products of new shapes,
    // which few prompts share, are not timed.
    struct SteadyRows {
        SteadyRows(be::Ctx& c, int sequences) : ctx(c) {
            ctx.steady_rows = sequences > 1 ? sequences : 0;
            ctx.autotune = false;
        }
        ~SteadyRows() {
            ctx.steady_rows = 0;
            ctx.autotune = true;
        }
        be::Ctx& ctx;
    };

    // Runs the batch through all layers; leaves the last row of a prompt, or every row, of the residual stream in branch, on
    // the last stage. cache: null for a prompt of `sequence`.
    void pass(KeyValueCache* cache, int sequence) {
        rows_ = cache ? batch_.B : 1;
        const SteadyRows steady(ctx_, sequences());
        for (int chunk = 0; chunk < (int)m_.a.micro_batches.size(); chunk++) {
            const Pass pass = upload(ctx_, m_, batch_, m_.a.micro_batch(chunk, passes_));
            MicroBatch& in = pass.in;
            in.cache = cache;
            links_.receive_input(in.x[0], pass.stream_size(), chunk, passes_);
            if (in.first) embed_forward(pass);
            for (int i = 0; i < (int)in.blocks.size(); i++) {
                block_forward(pass, i);
                if (!cache) keep_keys_and_values(in, i, sequence);
            }
            links_.send_output(in.out(), pass.stream_size(), chunk, passes_);
            if (in.last) keep_last_rows(pass);
        }
        passes_ = (passes_ + 1) % 1000;
    }

    void keep_keys_and_values(const MicroBatch& in, int i, int sequence) {
        const size_t bytes = cache_.row * sizeof(floatX), stride = m_.local.QKVl * sizeof(floatX);
        const floatX* keys = in.blocks[i].qkv + (size_t)m_.local.NHl * m_.c.HS();
        const AttentionCache to = cache_.of(in.first_block + i, sequence);
        be::copy_rows(ctx_, to.keys, bytes, keys, stride, bytes, in.N());
        be::copy_rows(ctx_, to.values, bytes, keys + cache_.row, stride, bytes, in.N());
    }

    void keep_last_rows(const Pass& p) {
        const size_t C = (size_t)m_.c.C, bytes = C * sizeof(floatX);
        const floatX* last = gather_from_sequence_parallel(p, p.in.out(), p.local_rows(), m_.c.C) + (size_t)(p.N() - rows_) * C;
        be::copy_rows(ctx_, m_.a.branch_out, bytes, last, bytes, bytes, (size_t)rows_);
    }

    be::Ctx& ctx_;
    Model& m_;
    PipelineLinks links_;
    KeyValueCache& cache_;
    std::vector<int> lengths_;  // tokens in each sequence
    int rows_ = 0;              // rows whose logits are wanted
    int passes_ = 0;
    Batch batch_;
    std::vector<float> logits_;
};

// ---------------------------------------------------------------------------------------------------------------------------
// 7  Commands

// Chooses this rank's blocks that are computed in FP8, and how.
static void choose_fp8_blocks(const be::Ctx& ctx, Model& m, const TrainOptions& o, bool after_bf16) {
    Fp8Training& f = m.fp8;
    f.recipe = fp8_recipe(o);
    f.after_bf16 = after_bf16;
    f.fast_accumulation = !o.no_fp8_fast_accumulation;
    f.fast_backward = o.fp8_fast_backward;
    f.keeps_transposes = o.fp8_weight_transpose != "on-the-fly";
    if (f.recipe.on) f.blocks = blocks_in_fp8(ctx, o, m.c, m.table.part);
}

// The memory of one rank for a run of `steps` with the options `o`: the run's own, or alternatives that it plans with.
static std::unique_ptr<Model> plan_model(const Run& run, const TrainOptions& o, const Schedule& steps, const ModelConfig& c,
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
    m->examines = o.log_health_interval > 0;
    // A rollback may lead back to steps in bf16.
    const int64_t start = fp8_start(o, run.state);
    choose_fp8_blocks(run.ctx, *m, o, run.state.step < start || (start > 0 && o.on_spike == "rollback"));
    const int B = o.micro_batch_size, T = o.seq_length;
    AttentionShape attention = m->attention(B, T + c.virtual_tokens.count);
    attention.dropout.rate = (real)c.attention_dropout;
    if (o.nondeterministic_attention) m->a.dq_sums_size = be::attention_sums(run.ctx, attention);
    const int head_rows = o.head_rows ? o.head_rows : choose_head_rows(run.ctx, m->local, (int64_t)B * T);
    // Rows of several sequences are not divided over ranks: with sequence parallelism answers are written one by one.
    const int sequences = run.tasks.any_written() && !m->ranks->sequence_parallel ? B : run.generates() ? 1 : 0;
    plan_memory(*m, recompute_policy(o.recompute_granularity), B, T, head_rows, {sequences, 0}, steps.micro_batches());
    m->plan_copy(m->arena, o.save_in_foreground);
    return m;
}

// The memory of one rank of a pipeline stage, for options `o` on n ranks. A CPU build that plans for GPUs (--world) excludes
// tensors that they keep in host memory.
static RankMemory memory_of_stage(const Run& run, const TrainOptions& o, const ModelConfig& c, int n, int stage) {
    const Mesh mesh = make_mesh(n, 0, layout_of(o).tp, layout_of(o).pp, layout_of(o).vpp);
    const Schedule steps = make_schedule(o, mesh.dp.size);
    const auto m = plan_model(run, o, steps, c, place_rank(n, mesh.rank_of(stage, 0, 0), layout_of(o), c));
    const size_t on_host = m->arena.bytes_for_host();
    const bool on_gpus = o.world || !be::memory_is_host, elsewhere = on_gpus && n > run.world.size();
    return {m->arena.bytes() - (be::memory_is_host && o.world ? on_host : 0), on_host,
            elsewhere ? nccl_memory(c, mesh, run.generates()) : NcclMemory()};
}

static std::vector<RankMemory> memory_of_stages(const Run& run, const TrainOptions& o, int n) {
    const ModelConfig c = configure_model(o, run.tokenizer.get());
    std::vector<RankMemory> memory;
    for (int stage = 0; stage < layout_of(o).pp; stage++) memory.push_back(memory_of_stage(run, o, c, n, stage));
    return memory;
}

// Decides --fp8-weight-transpose auto, the same on all ranks: the transposes are kept if they fit on each. `m`: this rank's
// plan with transposes kept; it is replaced if they are not.
static void choose_fp8_transposes(Run& run, std::unique_ptr<Model>& m) {
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
static double measured_step_seconds(Run& run, Recompute recompute) {
    const auto bytes = [&](const MicroBatchShape& part) { return RandomStep::planned_bytes(run.ctx, part, recompute); };
    const auto begin = [&](const MicroBatchShape& part) {
        return std::make_unique<RandomStep>(run.ctx, part.c, part.B, part.T, recompute, false);
    };
    return measured_step_seconds({run.c, run.o.micro_batch_size, run.o.seq_length}, run.schedule.final_batch, run.peak.flops,
                                 std::min(be::available_memory() / 4, (size_t)2 << 30), bytes, begin);
}

// Plans the model of a run that is set up, opens its data, and describes both in run.table.
static std::unique_ptr<Model> plan_run(Run& run) {
    const TrainOptions& o = run.o;
    run.begin("planning the memory");
    warm_up(run.ctx, *run.ranks);
    const size_t before = run.free_before_groups;  // 0: the GPU that is planned for is not this machine's
    const size_t in_libraries = before ? before - std::min(before, be::available_memory()) : 0;
    std::unique_ptr<Model> m = plan_model(run, o, run.schedule, run.c, run.ranks);
    choose_fp8_transposes(run, m);
    const bool changed = run.c.attention_softcap > 0 || run.c.attention_dropout > 0;
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
static void choose_gemm_cache(Run& run, const Model& m) {
    if constexpr (!be::memory_is_host) {
        const std::string cache = cache_directory(), kept = cache.empty() ? "" : cache + "/gemm.txt";
        // Ranks that compute the same weights must choose the same algorithms, which timing does not guarantee: data-parallel
        // replicas that each orthogonalise all matrices; and, if they do not share a file, tensor-parallel ranks that each
        // compute whole bias gradients, or orthogonalise keys and values that several ranks hold.
        bool alone = kept.empty() && run.o.gemm_cache.empty();
        const Mesh& mesh = m.ranks->mesh;
        for (int i = 0; i < mesh.tp.size; i++) alone |= !run.world.is_here(mesh.rank_of(mesh.pp.rank, mesh.dp.rank, i));
        const bool replicas = (m.muon.recipe.on && !m.ranks->zero && m.ranks->mesh.dp.size > 1) ||
                              (alone && m.ranks->mesh.tp.size > 1 && (m.muon.recipe.on || !m.ranks->sequence_parallel));
        const std::string file = replicas ? "none" : run.o.gemm_cache.empty() ? kept : run.o.gemm_cache;
        be::use_gemm_cache(run.ctx, file == "none" ? "" : file, file != "none");
        // By all ranks, and kept until they end: allocating and freeing it are collective. Ranks without a file ignore it.
        be::share_gemm_choices(run.ctx, text_of_node(run.world));
    }
}

// Allocates the planned memory and fills it: with the checkpoint's weights and moments, a model's weights, or new ones.
static void load_model(Run& run, Model& m) {
    const TrainOptions& o = run.o;
    choose_gemm_cache(run, m);
    run.begin(run.resumes()      ? "loading the checkpoint " + run.resumed_from
              : !o.model.empty() ? "loading the model " + o.model
                                 : "initialising the weights");
    allocate(run.ctx, m);
    if (!o.model.empty() && !run.resumes()) check_weights(run.world, o.model);
    if (!o.model.empty() && (m.frozen || !run.resumes())) load_parameters(run.ctx, m, o.model);
    if (run.resumes()) load_weights_and_moments(run.ctx, m, run.resumed_from);
    else if (m.frozen) begin_adapters(run.ctx, m, o.model, run.tokenizer.get(), (uint64_t)o.seed);
    else if (o.model.empty()) initialize(run.ctx, m, (uint64_t)o.seed);
    if (!run.resumes()) update_average(run.ctx, m, o.ema_decay, 0);
}

// (n_pairs, 3) on this rank, to be summed over ranks (reference.h): for each pair of answers in its samples, log-probability of
// the chosen answer, of the rejected one, and 1; zeros for pairs of other ranks.
static std::vector<double> score_answers(be::Ctx& ctx, Model& m, const DataLoader& data) {
    std::vector<double> mine(3 * (size_t)data.n_pairs());
    const auto keep = [&](const std::vector<AnswerPair>& pairs) {
        if (m.ranks->mesh.tp.rank > 0) return;  // the first tensor-parallel rank's count
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

// Callbacks for measuring a model on tasks: one scores given continuations, the other generates answers, each up to a token of
// `ends`. Only the other uses tokenizer and generator. ctx, m, generator and tokenizer must outlive the result. stop: as for
// TrainerBase.
static TaskFunctions task_functions(be::Ctx& ctx, Model& m, std::optional<Generator>& generator, const Tokenizer* tokenizer,
                                    const std::vector<int>& ends, const std::function<bool()>& stop) {
    TaskFunctions functions;
    functions.score = [&ctx, &m, stop](const std::vector<Request>& requests, Progress* progress) {
        return score_requests(ctx, m, requests, progress, stop);
    };
    functions.answer = [&m, &generator, tokenizer, ends, stop](const Task& task, const TaskRequests& all, Progress* progress) {
        return generate_answers(*m.ranks, *generator, *tokenizer, ends, task, all, progress, stop);
    };
    return functions;
}

// The prompt of the samples that a run generates.
static std::vector<int> sample_prompt(const Run& run, const Model& m) {
    return prompt_tokens(*run.tokenizer, run.o.sample_prompt, std::min(m.c.room(), m.a.B * m.a.T), "--sample-prompt");
}

// Returns false if the run is to stop. last: after the run's last step.
static bool validate(Run& run, Trainer& t, TrainingLoop& loop, bool last) {
    const double start = monotonic_seconds();
    run.begin("validation");
    const int64_t first = run.o.eval_fixed ? 0 : run.schedule.first_sample_of_validation(t.state.step);
    const auto losses = [&] { return evaluate(t.ctx, t.m, *run.valid, first, run.valid_samples, t.stop); };
    const auto sums = losses();
    std::optional<std::vector<LossSums>> of_average;
    if (sums && t.m.average) {
        swap_average(t.ctx, t.m, t.gatherer);
        of_average = losses();
        swap_average(t.ctx, t.m, t.gatherer);
    }
    return loop.report_validation(sums, of_average, first, start, last);
}

// Generates --sample-tokens tokens into the log. Returns false if the run is to stop.
static bool generate_sample(Run& run, Trainer& t, TrainingLog& log, Generator& generator) {
    const TrainOptions& o = run.o;
    std::string text;
    bool stops = false;
    int asked = 0;
    const auto continues = [&] {
        asked++;
        return !(stops = t.stop());
    };
    const auto emit = [&](int token) {
        text += run.tokenizer->token_bytes(token);
        return continues();
    };
    const SamplingOptions sampling = {0.8, 0, 0.95, run.tokenizer->vocab_size()};
    const auto sample = (uint32_t)t.state.step;
    generate(generator,
             {sample_prompt(run, t.m), o.sample_tokens, sampling, (uint64_t)o.seed, sample, run.texts.end_ids, emit});
    // All ranks vote equally often, including ranks of a replica whose text ended before another one's.
    while (!stops && asked < o.sample_tokens) continues();
    if (!stops) log.sample(t.state.step, o.sample_prompt, text);
    return !stops;
}

// The loop over the steps of a run: each step, then validation, tasks, a sample of text and a checkpoint where they are due.
static void training_loop(Run& run, Trainer& t, TrainingLoop& loop, TrainingLog& log) {
    std::optional<Generator> generator;
    if (run.generates()) generator.emplace(t.ctx, t.m);
    const TaskFunctions tasks =
        task_functions(t.ctx, t.m, generator, run.tokenizer.get(), run.texts.end_ids, [&] { return t.stop(); });
    // Returns true if the run is to stop.
    const auto after_step = [&](bool last, Decision now) {
        const TrainingLoop::Due due = loop.due_after_step(last, now);
        const auto works = [&](TimeBudget::Work kind, auto work) { now.stop = now.stop || !loop.timed(kind, work); };
        if (due.validation) works(TimeBudget::validation, [&] { return validate(run, t, loop, last); });
        if (due.tasks && !now.stop) works(TimeBudget::tasks, [&] { return loop.measure_tasks(tasks); });
        if (due.sample && !now.stop) works(TimeBudget::sample, [&] { return generate_sample(run, t, log, *generator); });
        loop.save_after_step(last, now);
        return now.stop;
    };

    bool stop = false;
    loop.begin();
    while (!t.finished() && !stop) {
        if (loop.skip_batches([&](const Decision& now) { return after_step(false, now); })) break;
        loop.begin_step();
        std::optional<StepStats> stats = train_step(t);
        loop.end_step(stats);
        if (!stats) {  // told to stop
            after_step(false, {true, false});
            break;
        }
        if (loop.roll_back_after_spike()) {
            if (t.finished()) after_step(true, {});  // the rollback skips all other batches
            continue;
        }
        const Decision now = loop.decide(*stats);
        stop = after_step(t.finished(), now);
    }
    loop.finish();
}

static void train(World& world, const TrainOptions& given) {
    check_nothing_is_missing(given);
    std::optional<RunLock> lock;
    if (!given.dry_run) lock_run_directory(world, given, lock);
    Run run = {world, given, make_ctx(world, given.threads, given.dry_run)};
    set_up(run);
    const std::unique_ptr<Model> m = plan_run(run);
    if (run.o.sample_interval > 0) sample_prompt(run, *m);  // report errors now, not after hours of training
    Timetable timetable(run.o);
    if (run.main_rank() && (run.o.dry_run || !run.o.quiet)) run.table.print(run.o.json);
    if (run.o.dry_run) return;

    if (run.main_rank()) remove_leftovers(run.o.out);
    world.barrier();
    load_model(run, *m);
    find_reference(run, [&](const DataLoader& data) { return score_answers(run.ctx, *m, data); });
    Trainer trainer(run.ctx, *m, run.o, run.schedule, *run.train, run.state, run.resumed_from);
    trainer.discards = run.discards;
    if (run.resumes() && trainer.finished()) {
        run.phase.done();
        if (run.main_rank()) {
            make_latest(run.o.out, run.resumed_from);
            printf("the run is finished: %s of %s are done\n", with_commas(trainer.state.step).c_str(),
                   counted(run.schedule.total_steps, "step").c_str());
        }
        return;
    }
    if (run.main_rank() && run.resumes())
        if (const std::string done = go_back_to(run.o.out, run.resumed_from, trainer.state.step); !done.empty())
            print_line(stderr, "note: " + done);
    const std::string overrides = run.resumes() ? describe_overrides(trainer.state, settled_options(run)) : "";
    if (run.c.adapted() && !run.o.model.empty()) add_adapter_texts(world, run.texts, run.c, run.o.model);
    sign_state(run, trainer.state);
    begin_training();
    TrainingLog log;
    log.open(run, trainer.state, overrides, [&] { lock->hold(); });
    try {
        TrainingLoop loop(run, trainer, *m, timetable, log, lock ? &*lock : nullptr);
        training_loop(run, trainer, loop, log);
    } catch (const std::exception& e) {
        log.failed(e.what());
        throw;
    }
}
inline int train_command(const TrainOptions& o) { return on_all_ranks(o, train); }

static void tune(World& world, const TuneOptions& given) {
    const TuneOptions o = given.inference ? given : without_layout_of_files(given, world.rank() == 0);
    Run run = {world, o, make_ctx(world, o.threads, true)};
    if (o.inference)
        return tune_inference(run, o, [](const TrainOptions& p, const ModelConfig& c, int n, int stage, int texts, int T) {
            const Mesh mesh = make_mesh(n, 0, layout_of(p).tp, layout_of(p).pp, 1);
            Model m(c, place_rank(n, mesh.rank_of(stage, 0, 0), layout_of(p), c), layers_of_stages(p, c, mesh));
            plan_memory(m, Recompute::inference, ceil_div(texts, T), T, 1, {texts, c.virtual_tokens.count + T});
            return (double)m.arena.bytes();
        });
    tune_layouts(run, o, [&](const TrainOptions& p, const ModelConfig& c, int n, int stage) {
        return memory_of_stage(run, p, c, n, stage);
    });
}
inline int tune_command(const TuneOptions& o) { return on_all_ranks(o, tune); }

static void sweep(World& world, const SweepOptions& o) {
    Run run = {world, o, make_ctx(world, o.threads, true)};
    Sweep(run, o).run();
}
inline int sweep_command(const SweepOptions& o) { return on_all_ranks(o, sweep); }

// The model of `run`, loaded, with memory for passes of B x T tokens, for head_rows rows of logits at a time, and for the
// key/value cache. Refuses a T that is above the model's longest sequence.
static std::unique_ptr<Model> load_weights(InferenceRun& run, int B, int T, int head_rows, KvCacheShape cache = {}) {
    PhaseStatus phase;
    if (run.main_rank()) phase.begin("loading the model " + run.dir);
    if (T > run.c.room())
        fail_usage("--seq-length %d is above the model's longest sequence %d; HINT: --seq-length %d", T, run.c.room(),
                   run.c.room());
    run.layout.generates = cache.sequences > 0;
    auto ranks = join_groups(run.ctx, run.world, run.layout, run.c);
    warm_up(run.ctx, *ranks);
    const std::vector<int> stages = split_layers(run.c.L, ranks->mesh.pp.size, false, false, {});
    auto m = std::make_unique<Model>(run.c, std::move(ranks), stages);
    plan_memory(*m, Recompute::inference, B, T, head_rows, cache);
    allocate(run.ctx, *m);
    load_parameters(run.ctx, *m, run.dir);
    if (m->frozen) load_adapters(run.ctx, *m, run.adapter);
    return m;
}

// The same for generating `texts` sequences of up to T tokens at a time; any_length: the cache takes sequences as long as the
// model's context. Refuses more ranks than one copy of the model needs.
static std::unique_ptr<Model> load_for_generation(InferenceRun& run, int texts, int T, bool any_length = false) {
    const int ranks = run.world.size(), copies = ranks / (run.layout.tp * run.layout.pp);
    if (copies > 1 && ranks % copies == 0)
        fail_usage("%d ranks have %d copies of the model, but generation uses one; HINT: --tp %d, or --pp", ranks, copies,
                   ranks);
    return load_weights(run, ceil_div(texts, T), T, 1, {texts, any_length ? 0 : run.c.virtual_tokens.count + T});
}

// Generates 1, 2, 4, ... sequences at a time, each batch size with its own memory.
static void measure_batches(InferenceRun& run, const std::vector<int>& prompt, int T, const GenerateOptions& o) {
    std::vector<BatchSpeed> speeds;
    for (int batch = 1; batch <= o.batch; batch = batch < o.batch ? std::min(2 * batch, o.batch) : batch + 1) {
        const std::unique_ptr<Model> m = load_for_generation(run, batch, T);
        Generator generator(run.ctx, *m);
        speeds.push_back(measure_batch(generator, prompt, m->arena.bytes(), o));
    }
    if (run.main_rank()) print_batches(speeds, o);
}

static void generate_on_ranks(World& world, const GenerateOptions& o) {
    InferenceRun run(world, o.threads);
    open_model(run, o, true, o.tensor_model_parallel_size, o.pipeline_model_parallel_size);
    const Prompts prompts = read_prompts(run, o);
    const int T = std::min(run.c.room(), prompts.longest() + o.max_new_tokens);
    if (o.measure_batches) return measure_batches(run, prompts.all[0].tokens, T, o);
    const auto texts = (int)std::min<int64_t>(o.batch, (int64_t)prompts.all.size() * o.num_samples);
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
static void extend_to(InferenceRun& run, int T) {
    if (T <= run.c.room() || run.c.position == Position::learned) return;
    if (run.main_rank())
        print_line(stderr,
                   format("warning: --seq-length %d is above the model's longest sequence %d, beyond which it was not trained",
                          T, run.c.room()));
    run.c.T = run.c.virtual_tokens.count + T;
}

static void evaluate_model(World& world, const EvalOptions& o) {
    check_options_of_eval(o, world.size());
    const std::vector<TaskFile> tasks = read_tasks(o);
    InferenceRun run(world, o.threads);
    open_model(run, o, !tasks.empty() || !o.text.empty(), o.tensor_model_parallel_size, o.pipeline_model_parallel_size);
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

#ifndef TRAIN_GPT_NO_MAIN
int main(int argc, char** argv) {
    return run_program(argc, argv, {train_command, tune_command, sweep_command, generate_command, eval_command, serve_command});
}
#endif
