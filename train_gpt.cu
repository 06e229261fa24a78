/*
train_gpt: training of decoder-only language models (GPT-2, BLOOM, Llama, Qwen, Gemma, ...) in one readable program.

The model's computation is here, from tokens to updated weights; its building blocks are in llmc/: kernels, tensors, data,
files, processes, options. In reading order:
  1  initialization               initialize
  2  one block                    block_forward next to block_backward
  3  the whole model              embed, head, model_forward, model_backward
  4  one training step            train_step: micro-batches, loss scale, clipping, update
  5  the loop over steps          training_loop: step, validation, tasks, sample of text, checkpoint
  6  a run                        train, main
Generation, scoring and the other commands use these functions through llmc/gpt/gpt.h.

Dimensions: B micro-batch, T sequence, N = B*T rows, C width, L layers, NH query heads, NKV key/value heads, HS head size,
QKV = (NH + 2 NKV) HS, F feed-forward width, F1 rows of fc1 (2F with a gate), V vocabulary, Vp padded. A suffix l marks this
rank's part of a size (tensor parallelism): NHl heads, Fl columns, Nl rows of the residual stream. Shapes are written at the
right, slowest dimension first. The prefix `d` marks a gradient. floatX is the storage type (bf16 or fp32), real the type of
sums (fp32).
The functions of a pass take p, a Pass: p.m is its Model, p.in its MicroBatch. In a Model m, m.c is the configuration, m.local
the sizes on this rank, m.p the parameters, m.g their gradients, m.a the activations. In a block b, b.qkv(), b.proj(), b.fc1()
and b.fc2() are its four matrices, b.norm1 and b.norm2 its norms; s has the activations that it stores for backward.
*/
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

// The rooms of llmc/, from the lowest up; each include names the declarations used here.
#include "llmc/base/types.h"  // floatX, real, Acc
#include "llmc/base/rng.h"    // InitialWeights
#include "llmc/ops.h"         // be::Ctx, every op (be::linear_forward, ...), their arguments (Output, ...), rounding_key
#include "llmc/cpu/ops.h"
#if defined(BACKEND_CUDA) || defined(BACKEND_EMU)
#include "llmc/gpu/ops.cuh"
#endif
#include "llmc/model/model_config.h"          // ModelConfig, Norm
#include "llmc/model/mesh.h"                  // Mesh, Axis, LocalSizes
#include "llmc/model/parameters.h"            // TensorSpec, RowBlock; of model_tensors.h: Init
#include "llmc/model/fp8_training.h"          // Fp8Training, begin_step_in_fp8
#include "llmc/model/preference.h"            // AnswerPair, Model::preference
#include "llmc/model/recompute.h"             // Recompute, Kept, LinearInput, fp8_suffices, bf16_of
#include "llmc/data/dataloader.h"             // Batch, DataLoader
#include "llmc/parallel/world.h"              // World: the processes
#include "llmc/parallel/comm.h"               // be::all_reduce, ...
#include "llmc/parallel/pipeline_schedule.h"  // pipeline_schedule, Direction
#include "llmc/parallel/ranks.h"              // Ranks, reduce_sums
#include "llmc/parallel/pipeline_links.h"     // PipelineLinks
#include "llmc/optimizer/zero.h"              // GradientReducer
#include "llmc/optimizer/adamw.h"             // update_elementwise
#include "llmc/optimizer/weight_average.h"    // update_average
#include "llmc/gpt/model.h"                   // Model, MicroBatch, Block, Linear
#include "llmc/gpt/model_memory.h"            // plan_memory, allocate
#include "llmc/gpt/pass.h"                    // Pass, upload, clear_sums, read_sums
#include "llmc/gpt/head_norms.h"              // head_norms_forward, head_norms_backward
#include "llmc/gpt/answers.h"                 // compare_answers
#include "llmc/gpt/context_parallel.h"        // context_attention_forward, context_attention_backward
#include "llmc/gpt/expert_parallel.h"         // dispatch, gather_for_experts, reduce_from_experts
#include "llmc/gpt/expert_layer.h"            // expert_layer_forward, router_backward, ..., the shared expert
#include "llmc/gpt/linear.h"                  // linear_forward, linear_backward, output_for
#include "llmc/gpt/gpt.h"                     // declarations of the functions here that other headers call
#include "llmc/gpt/generator.h"               // Generator, with its key/value cache
#include "llmc/report/logger.h"               // StepStats
#include "llmc/options/options.h"             // TrainOptions
#include "llmc/options/schedule.h"            // Schedule
#include "llmc/checkpoint/run_directory.h"    // RunLock
#include "llmc/checkpoint/snapshots.h"        // remove_snapshots_after
#include "llmc/checkpoint/agreement.h"        // describe_overrides
#include "llmc/checkpoint/training_state.h"   // TrainingState
#include "llmc/infer/scoring.h"               // task_functions
#include "llmc/run/diagnostics.h"             // hash_gradients
#include "llmc/run/timetable.h"               // Timetable
#include "llmc/run/run.h"                     // Run, set_up
#include "llmc/run/preference_reference.h"    // find_reference
#include "llmc/run/trainer.h"                 // TrainerBase, which Trainer extends
#include "llmc/run/plan_run.h"                // plan_run, load_model
#include "llmc/run/training_log.h"            // TrainingLog
#include "llmc/run/sample_text.h"             // sample_prompt, generate_sample
#include "llmc/run/training_loop.h"           // TrainingLoop: decisions, saves, logs
#include "llmc/commands/model_commands.h"     // tune, sweep, generate, serve, eval
#include "llmc/commands/program.h"            // run_program, with the commands that need no model

// ---------------------------------------------------------------------------------------------------------------------------
// 1  Initialization: a counter RNG keyed by (seed, tensor, element) gives the same weights on any machine and layout.
//    N(0, std) for embeddings and linears, N(0, std / sqrt(2L)) for the two projections into the residual stream, gains 1; each
//    times the tensor's factor (parametrization.h).
void initialize(be::Ctx& ctx, Model& m, uint64_t seed, bool only_routers) {
    if (m.frozen) initialize_adapters(ctx, m, seed);
    for (const TensorSpec& t : m.model_table().rows) {
        if (only_routers && !t.router()) continue;
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
            const size_t first = (size_t)block.row * t.cols, begin = t.offset + first, size = (size_t)block.rows * t.cols;
            if (!m.shards.cut_params)
                be::initialize_weights(ctx, t.quantized() ? m.a.dequantized + first : m.model_params() + begin, nullptr, w, 0,
                                       size);
            if (m.frozen || (!m.master_low_bits && !m.shards.cut_params)) continue;
            m.shards.for_each_part(begin, size, [&](size_t from, size_t shard, size_t n) {
                LowerHalf* const lower = m.master_low_bits ? m.master_low_bits + shard : nullptr;
                be::initialize_weights(ctx, m.own_weights(begin + from, shard), lower, w, from, n);
            });
        }
        if (t.quantized()) quantize_tensor(ctx, m, t, m.a.dequantized);
    }
}

// ---------------------------------------------------------------------------------------------------------------------------
// 2  One block: x += Attention(Norm1(x)); x += MLP(Norm2(x)). NormPlace selects norms before attention and MLP, after them, or
// in both places; or parallel branches, whose norms both read the same x, or which share one: then norm2 is norm1. The block's
// parts come first, each forward next to its backward; their arguments are the tensors that they write, then those that they
// read. To see how they connect, read block_forward and block_backward first. linear.h has linear_forward and linear_backward.

// ---- Norms ------------------------------------------------------------------------------------------------------------------

// sum = inp + add, out = norm(sum). Without this norm, computes only the sum.
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
// Adds the gradient of the norm's input to dx. Returns the gradient of attn: dx after the addition or, where attention and MLP
// are parallel, a copy in dattn of dx before it.
static const floatX* add_norm2_backward(const Pass& p, const Block& b, floatX* dx, floatX* dattn, const floatX* dnorm2,
                                        const NormStatistics& stats, const floatX* inp) {
    const bool parallel = p.m.c.parallel();
    const size_t bytes = p.stream_size() * sizeof(floatX);
    if (parallel) be::copy_rows(p.ctx, dattn, bytes, dx, bytes, bytes, 1);
    norm_backward(p, b.norm2, dx, p.summed_bias(b.proj()), dnorm2, stats, inp, Acc::Add);
    return parallel ? dattn : dx;
}

// ---- Attention --------------------------------------------------------------------------------------------------------------

// qkv = norm1 w^T + b, with queries and keys normalized if they have norms, and rotated if positions are rotary. Sets heads,
// the inputs of their norms.
static void qkv_forward(const Pass& p, const Block& b, floatX* qkv, const HeadNormInput* heads, const LinearInput& norm1) {
    const Linear& l = b.qkv();
    const bool norms = b.head_norms[0].exists(), rope = p.rotates(l.block);
    const AttentionShape shape = p.attention(l.block);
    if (rope && !norms && fuses(p, l))
        return be::linear_rope_forward(p.ctx, qkv, whole_input(p, l, norm1), weights_of(p, l), l.b, l.in, p.rope(l.block),
                                       shape);
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
    if (p.cut_context()) return context_attention_forward(p, att, lse, qkv, b.sinks, mask, shape);
    be::attention_forward(p.ctx, att, lse, qkv, mask, shape);
    if (b.sinks) be::sinks_forward(p.ctx, att, lse, b.sinks, shape);
}
// dqkv is the gradient of queries and keys before their rotation.
static void attention_backward(const Pass& p, const Block& b, floatX* dqkv, const floatX* datt, const AttentionActs& acts) {
    const int block = b.qkv().block;
    const AttentionMask mask = p.mask(block);
    const AttentionShape shape = p.attention(block);
    if (p.cut_context()) {
        context_attention_backward(p, dqkv, b.dsinks, datt, acts, b.sinks, mask, shape);
        return p.rotates(block) ? be::rope_backward(p.ctx, dqkv, p.rope(block), shape) : void();
    }
    if (b.sinks) be::sinks_backward(p.ctx, b.dsinks, datt, acts, b.sinks, shape);
    if (p.rotates(block)) be::attention_rope_backward(p.ctx, dqkv, datt, acts, mask, p.rope(block), shape, p.m.a.dq_sums);
    else be::attention_backward(p.ctx, dqkv, datt, acts, mask, shape, p.m.a.dq_sums);
}

// The end of a branch: multiplies by the last matrix of attention (proj) or MLP (fc2), and computes the term that the branch
// adds to the residual stream: term = dropout(norm(y)), y = inp w^T + b. y is stored in s.x if a norm follows, else in term.
template <class Product>
static void branch_forward(const Pass& p, const Linear& l, floatX* term, const BranchOutput& s, Product set_y) {
    set_y(l.after.exists() ? s.x : term);
    if (l.after.exists()) norm_forward(p, l.after, term, s.stats, s.x);
    const Dropout dropout = p.hidden_dropout(l);
    if (dropout.rate > 0) p.drop(term, term, dropout);
}
static void branch_forward(const Pass& p, const Linear& l, floatX* term, const BranchOutput& s, const LinearInput& inp) {
    branch_forward(p, l, term, s, [&](floatX* y) { linear_forward(p, l, y, inp); });
}
// Returns the gradient of y: in dy, or dterm itself if there is neither norm nor dropout. dy may be dterm.
static const floatX* branch_backward(const Pass& p, const Linear& l, floatX* dy, const floatX* dterm, const BranchOutput& s) {
    const Dropout dropout = p.hidden_dropout(l);
    if (dropout.rate > 0) {
        p.drop(dy, dterm, dropout);
        dterm = dy;
    }
    if (!l.after.exists()) return dterm;
    norm_backward(p, l.after, dy, nullptr, dterm, s.stats, s.x, Acc::Set);
    return dy;
}

// ---- MLP --------------------------------------------------------------------------------------------------------------------

static void activation_forward(const Pass& p, const Block& b, const MlpActivations& s) {
    be::activation_forward(p.ctx, output_for(p, b.fc2(), s.act), s.fc1, p.N(), b.fc2().in, p.m.c.activation);
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
        return activation_forward(p, b, s);
    }
    const floatX* all_inp = whole_input(p, l, inp);
    if (swiglu) be::linear_swiglu_forward(p.ctx, s.act.bf16, s.fc1, all_inp, weights_of(p, l), l.b, p.N(), l.in, b.fc2().in);
    else be::linear_gelu_forward(p.ctx, s.act.bf16, s.fc1, all_inp, weights_of(p, l), l.b, p.N(), l.in, l.out);
}

// out = mid + mlp, mlp = dropout(norm(fc2(act(fc1(inp)))))
static void dense_forward(const Pass& p, const Block& b, floatX* out, const MlpActivations& s, const LinearInput& inp,
                          const floatX* mid) {
    const Linear& l = b.fc2();
    floatX* const mlp = p.m.a.branch_out;
    fc1_forward(p, b, s, inp);
    const bool adds_residual = p.fp8(l.block) ? !l.lora : fuses(p, l);
    if (p.m.local.tp_size == 1 && adds_residual && !l.after.exists() && p.hidden_dropout(l).rate == 0) {
        if (p.fp8(l.block)) return fp8_forward(p, l, out, mid, s.act, l.b);
        return be::linear_residual_forward(p.ctx, out, mid, whole_input(p, l, s.act), weights_of(p, l), l.b, p.N(), l.in,
                                           l.out);
    }
    branch_forward(p, l, mlp, s.fc2, s.act);
    be::residual_forward(p.ctx, out, mid, mlp, p.stream_size());
}
static void dense_backward(const Pass& p, const Block& b, floatX* dinp, const floatX* dmlp, const MlpActivations& s,
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
        if (gated(activation))
            be::linear_swiglu_backward_input(p.ctx, dfc1, dact, all_dfc2, weights_of(p, l), s.fc1, p.N(), l.in, l.out);
        else be::linear_gelu_backward_input(p.ctx, dfc1, all_dfc2, weights_of(p, l), s.fc1, p.N(), l.in, l.out);
    }
    linear_backward(p, b.fc1(), dinp, dfc1, inp);
}

// ---- Mixture of experts -----------------------------------------------------------------------------------------------------
// Instead of one MLP, E smaller ones, the experts. A router chooses K of them for each row x (Shazeer et al., 2017):
//   out = sum over the chosen e of weight_e fc2_e(act(fc1_e(x))),  weights from router x
// If experts have biases, the router has one, too. fc2's bias is also multiplied by the weight, and with tensor parallelism
// only the first rank adds it.
// Row n and its k-th expert are choice number n K + k. The choices sorted by expert are slots, so an expert's rows are
// consecutive: its matrices are multiplied with all of them at once, and products read rows of x through the list of choices.
// Unless a capacity drops some, every choice has a slot. If, with K = 2, rows 0, 1 and 2 choose experts (2, 0), (0, 1) and (2,
// 1), the slots are the choices 1 2 | 3 5 | 0 4.
// A weight multiplies the activation, before fc2: its gradient needs no output of fc2. With tensor parallelism every rank has
// some columns of each expert, and routes all rows, with the same result (on GPUs by the same algorithms, see
// choose_gemm_cache). With expert parallelism every rank has some experts, and the rows of several ranks (expert_parallel.h).

static void mixture_forward(const Pass& p, const Block& b, floatX* out, const MlpActivations& s, const LinearInput& inp,
                            const floatX* mid) {
    const Routing& routing = routing_of_experts(p, s);
    const Linear& fc2 = b.fc2();
    floatX *const rows = p.m.a.expert_rows, *const mlp = p.m.a.branch_out;
    const floatX* all_inp = gather_from_sequence_parallel(p, inp.bf16, p.local_rows(), p.m.c.C);
    be::router_logits(p.ctx, s.routing.logits, all_inp, b.router.w, b.router.b, p.mixture(), p.m.c.C);
    be::route(p.ctx, s.routing, p.mixture(), p.router_rule(fc2.block));
    dispatch(p, b, s);
    const MixtureShape shape = p.experts(fc2.block);
    expert_fc1_forward(p, b, s, all_inp);
    expert_activation_forward(p, b, s);  // times the routing weights
    expert_layer_forward(p, fc2, rows, {s.act.bf16}, fc2_bias(p, b, routing), routing);
    if (b.shared.exists()) shared_hidden_forward(p, b.shared, s.shared, all_inp);
    branch_forward(p, fc2, mlp, s.fc2, [&](floatX* y) {
        floatX* const sum = partial_sum(p, y);
        reduce_from_experts(p, b, s, sum,
                            [&](floatX* sums) { be::expert_combine(p.ctx, sums, rows, routing, shape, p.m.c.C); });
        if (b.shared.exists()) add_shared_output(p, b.shared, s.shared, sum);
        reduce_from_tensor_parallel(p, y);
    });
    be::residual_forward(p.ctx, out, mid, mlp, p.stream_size());
}

// Recomputes act and, if fc1 is not kept, fc1, with the kept routing. (Full recomputation routes again, to the same bits.)
static void recompute_mixture(const Pass& p, const Block& b, const MlpActivations& s, const LinearInput& inp,
                              Recompute recompute) {
    const bool shared = b.shared.exists();
    if (recompute == Recompute::mlp) {
        const floatX* all_inp = gather_from_sequence_parallel(p, inp.bf16, p.local_rows(), p.m.c.C);
        expert_fc1_forward(p, b, s, all_inp);
        if (shared) shared_fc1_forward(p, b.shared, s.shared, all_inp);
    }
    expert_activation_forward(p, b, s);
    if (shared) shared_activation_forward(p, b.shared, s.shared);
}

static void mixture_backward(const Pass& p, const Block& b, floatX* dinp, const floatX* dmlp, const MlpActivations& s,
                             const LinearInput& inp) {
    const Model& m = p.m;
    const MixtureShape shape = p.experts(b.fc1().block);
    const Routing& routing = routing_of_experts(p, s);
    const Linear &fc1 = b.fc1(), &fc2 = b.fc2();
    const int C = m.c.C;
    floatX *const dact = m.a.dact, *const dfc1 = m.a.dfc1, *const drows = m.a.expert_rows;
    const floatX* dfc2 = branch_backward(p, fc2, m.a.branch_out, dmlp, s.fc2);

    const floatX* all_dfc2 = gather_from_sequence_parallel(p, dfc2, p.local_rows(), C);
    const ExpertRows dout = rows_for_experts(p, b, s, fc2.fp8_dout, all_dfc2);
    expert_layer_backward(p, fc2, dact, dout, {s.act.bf16}, routing);
    reduce_drouting(p, b, s, [&](real* drouting) {
        be::expert_activation_backward(p.ctx, dfc1, drouting, dact, s.fc1, routing, shape, fc2.in, m.c.activation);
        fc2_bias_backward(p, b, drouting, dout, routing);
    });
    router_backward(p, b, s.routing);
    if (b.shared.exists()) shared_output_backward(p, b.shared, s.shared, all_dfc2);

    if (fc1.db) be::expert_bias_backward(p.ctx, fc1.db, {dfc1}, {}, routing.groups(shape), fc1.out);
    const bool reads_inp = fc1.dw || fc1.lora;
    const floatX* all_inp = reads_inp ? gather_from_sequence_parallel(p, inp.bf16, p.local_rows(), C) : nullptr;
    if (fc1.dw) add_router_gradient(p, b.router, m.a.dlogits, all_inp, p.mixture());
    if (fc1.dw && b.shared.exists()) shared_weights_backward(p, b.shared, all_inp);
    const ExpertRows rows = rows_for_experts(p, b, s, fc1.fp8_inp, all_inp, Measured::before);
    expert_layer_backward(p, fc1, drows, {dfc1}, rows, routing);
    floatX* const all_dinp = partial_sum(p, dinp);  // may be the memory of all_inp
    reduce_from_experts(p, b, s, all_dinp, [&](floatX* sums) { be::expert_combine(p.ctx, sums, drows, routing, shape, C); });
    be::router_backward_input(p.ctx, all_dinp, m.a.dlogits, b.router.w, p.mixture(), C);
    if (b.shared.exists()) shared_input_backward(p, b.shared, all_dinp);
    reduce_from_tensor_parallel(p, dinp);
}

// The mixture or the dense MLP, by the kind of the layer.
static void mlp_forward(const Pass& p, const Block& b, floatX* out, const MlpActivations& s, const LinearInput& inp,
                        const floatX* mid) {
    (b.has_mixture() ? mixture_forward : dense_forward)(p, b, out, s, inp, mid);
}
static void mlp_backward(const Pass& p, const Block& b, floatX* dinp, const floatX* dmlp, const MlpActivations& s,
                         const LinearInput& inp) {
    (b.has_mixture() ? mixture_backward : dense_backward)(p, b, dinp, dmlp, s, inp);
}

// ---- The block --------------------------------------------------------------------------------------------------------------

// The activations of block i. If a block stores an input only in FP8, its bf16 is in the buffers that all blocks share.
static BlockActivations block_activations(const Pass& p, int i) {
    BlockActivations s = p.in.blocks[i];
    const auto share_bf16 = [&](size_t, Kept kept, auto& own, auto& shared) {
        if (fp8_of(own) && fp8_suffices(kept, p.m.c.lora.on())) bf16_of(own) = bf16_of(shared);
    };
    const bool mixture = p.m.blocks[p.in.first_block + i].has_mixture();
    const MlpSizes none = {!mixture, mixture, 0, 0, 0, 0};  // only pointers are set
    if (p.fp8(p.in.first_block + i)) for_each_tensor(p.m, none, share_bf16, s, p.m.a.shared);
    s.x = p.in.x[i];
    if (!p.m.c.norm_before()) {
        s.norm1.bf16 = s.x;
        s.norm2.bf16 = s.mid;
    }
    return s;
}

// Block i of the micro-batch's chunk, from x[i] to x[i+1].
void block_forward(const Pass& p, int i) {
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
    if (b.has_mixture()) recompute_mixture(p, b, s.mlp, s.norm2, recompute);
    else if (recompute == Recompute::mlp) fc1_forward(p, b, s.mlp, s.norm2);  // quantizes norm2 as well
    else activation_forward(p, b, s.mlp);
    if (!p.fp8(block)) return;
    quantize_input(p, b.qkv(), s.norm1);
    quantize_input(p, b.proj(), s.att);
    if (b.has_mixture()) return;
    if (recompute != Recompute::mlp) quantize_input(p, b.fc1(), s.norm2);
    quantize_input(p, b.fc2(), s.mlp.act);
}

// Before and after the backward pass of a block, the head or the embedding, for gradients that are not accumulated in place: in
// bf16 (gradients.h), or reduced in every micro-batch (sharded_gradients.h).
static void begin_block(const Pass& p, int block) {
    if (p.m.sharded_grads.used()) p.m.sharded_grads.begin(p.ctx, p.m, block);
    else p.m.micro_grads.begin(p.ctx, block);
}
static void end_block(const Pass& p, int block) {
    if (p.m.sharded_grads.used()) reduce_section(p.ctx, p.m, block, p.in.gradients, p.in.rounding_key);
    else p.m.micro_grads.end(p.ctx, p.m.table, p.m.grads, block, p.in.gradients, p.in.rounding_key);
}

// The steps of block_forward in reverse. On entry dx is the gradient of the block's output, on return of its input. A residual
// addition passes its gradient unchanged to both summands, so dx is also the gradient of the term that the MLP added: 6 takes
// it back through the MLP, 5 through norm2, and adds the result to dx. 4 to 1 do the same for attention and norm1.
static void block_backward(const Pass& p, int i) {
    const int block = p.in.first_block + i;
    const Block& b = p.m.blocks[block];
    const BlockActivations s = block_activations(p, i);
    floatX *dx = p.m.a.dx, *dnorm = p.m.a.dnorm, *datt = p.m.a.datt, *dqkv = p.m.a.dqkv, *dbranch = p.m.a.branch_out;
    real* const dfc2_bias = i > 0 ? p.summed_bias(p.m.blocks[(size_t)block - 1].fc2()) : nullptr;  // preceding block's
    const floatX* norm2_inp = p.m.c.parallel() ? s.x : s.mid;
    p.need_block_backward(i);
    recompute_block(p, i);
    begin_block(p, block);

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
// 3  The whole model

// Clears the gradients that a step only adds to: vectors and embeddings. The first micro-batch's products set the gradients of
// the head and of the blocks' matrices, most of the memory (MicroBatch::gradients), which saves clearing and reading them. With
// gradients in bf16, the first micro-batch sets all of them.
void begin_gradients(be::Ctx& ctx, Model& m) {
    if (m.sharded_grads.used()) return m.sharded_grads.begin_step(ctx, m.table);
    if (m.micro_grads.used()) return;
    if (m.c.virtual_tokens.on()) return be::clear(ctx, m.grads.data, m.table.size * sizeof(real));
    const bool set_by_head = m.c.tied && m.table.part.last;
    if (m.g.wte && !set_by_head) be::clear(ctx, m.g.wte, (size_t)m.local.Vpl * m.c.C * sizeof(real));
    if (m.g.wpe) be::clear(ctx, m.g.wpe, m.specs.wpe->size() * sizeof(real));
    be::clear(ctx, m.grads.from(m.table.decayed).data, (m.table.size - m.table.decayed) * sizeof(real));
}

// Each tp rank has some rows of the vocabulary, and outputs zero for other tokens; the first rank adds the positions.
void embed_forward(const Pass& p) {
    const Model& m = p.m;
    const ModelConfig& c = m.c;
    floatX* embedded = c.embedding_norm ? p.in.embedded : p.in.x[0];
    p.need_embedding();
    be::embedding_forward(p.ctx, partial_sum(p, embedded), p.in.tokens, p.in.positions, m.p.wte,
                          on_first_tp_rank(p, m.first_position(m.p.wpe)), p.N(), c.C, m.local.vocabulary());
    if (!p.in.virtual_rows.empty() && m.ranks->mesh.tp.rank == 0)
        m.virtual_tokens.forward(p.ctx, partial_sum(p, embedded), p.in.virtual_rows);
    reduce_from_tensor_parallel(p, embedded);
    if (c.embedding_norm) norm_forward(p, m.embedding_norm, p.in.x[0], p.in.embedding_stats, embedded);
    const Dropout dropout = p.dropout(c.embedding_dropout, 0);
    if (dropout.rate > 0) p.drop(p.in.x[0], p.in.x[0], dropout);
}

// Adds all rows of the embedded tokens' gradient to the embeddings of tokens and positions.
static void add_embedding_gradients(const Pass& p, const floatX* dout) {
    const Model& m = p.m;
    const MicroBatch& in = p.in;
    const VocabularyShard vocabulary = m.local.vocabulary();
    if (!m.micro_grads.used())
        return be::embedding_backward(p.ctx, m.g.wte, m.first_position(m.g.wpe), dout, in.tokens, in.positions, p.N(), m.c.C,
                                      vocabulary);
    const auto add = [&](const TensorSpec& t, const int* ids, const VocabularyShard& rows) {
        m.micro_grads.add_rows(p.ctx, t, m.grads, in.gradients, in.rounding_key, dout, ids, p.N(), rows);
    };
    add(*m.specs.wte, in.tokens, vocabulary);
    const int before = m.c.position_offset, rows = before + m.c.T;
    if (m.g.wpe) add(*m.specs.wpe, in.positions, {-before, rows, rows});
}

static void embed_backward(const Pass& p) {
    Model& m = p.m;
    floatX* dembedded = m.c.embedding_norm ? m.a.dnorm : m.a.dx;
    const Dropout dropout = p.dropout(m.c.embedding_dropout, 0);
    begin_block(p, TensorSpec::embedding);
    if (dropout.rate > 0) p.drop(m.a.dx, m.a.dx, dropout);
    if (m.c.embedding_norm)
        norm_backward(p, m.embedding_norm, dembedded, nullptr, m.a.dx, p.in.embedding_stats, p.in.embedded, Acc::Set);
    const floatX* all = gather_from_sequence_parallel(p, dembedded, p.local_rows(), m.c.C);
    if (m.virtual_tokens.on()) m.virtual_tokens.backward(p.ctx, all, p.in.virtual_rows);
    else add_embedding_gradients(p, all);
    end_block(p, TensorSpec::embedding);
}

// Losses of `rows` rows; with `training` their gradient replaces the logits. Vocabulary shards first exchange their statistics.
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

// The gradient of the head's weight from the logits' gradient for rows [row, row + rows), which have inputs inp.
static void add_head_gradient(const Pass& p, int row, int rows, const floatX* inp) {
    const Model& m = p.m;
    const uint64_t key = BlockGradients::key_of_head(p.in.rounding_key, row / m.a.head_rows);
    add_weight_gradient(p, *m.specs.head, m.g.head, row ? Acc::Add : acc_of_matrices(p), key,
                        [&](const Elements& dweight, int first, int n, Acc acc) {
                            const Columns dlogits = {m.a.logits + first, m.local.Vpl};
                            be::linear_backward_weight_rows(p.ctx, dweight, nullptr, dlogits, inp, rows, m.c.C, n, acc);
                        });
}

// Divides the head's input, and in backward its gradient, by the divisor of the logits.
static void divide_by_logit_divisor(const Pass& p, floatX* x) {
    if (p.m.c.logit_divisor != 1) be::scale_elements(p.ctx, x, p.stream_size(), (real)(1 / p.m.c.logit_divisor));
}
void final_norm_forward(const Pass& p, const floatX* inp) {
    Activations& a = p.m.a;
    norm_forward(p, p.m.final_norm, a.final_norm, a.final_stats, inp);
    divide_by_logit_divisor(p, a.final_norm);
}

// Final norm, logits of head_rows rows at a time, loss. With `training`, these logits become their gradient in place and are
// propagated through the head at once, so that a (N, V) matrix never exists; dx is then the gradient of the last block's
// output. Adds to the model's sums. For pairs of answers a row's gradient depends on the losses of all rows, so a first pass
// computes them; logits that all fit in memory at once are not computed again.
void head(const Pass& p, real loss_scale, real z_coef, bool training) {
    Model& m = p.m;
    Activations& a = m.a;
    const int N = p.N(), C = m.c.C;
    p.need_head();
    final_norm_forward(p, p.in.out());
    const floatX* normed = gather_from_sequence_parallel(p, a.final_norm, p.local_rows(), C);
    floatX* dnormed = partial_sum(p, a.dnorm);
    const bool compares = !p.in.pairs.empty(), keeps_logits = training && compares && N <= a.head_rows;
    const auto logits = [&](int row) {
        const int rows = std::min(a.head_rows, N - row);
        be::linear_forward(p.ctx, a.logits, normed + (size_t)row * C, m.p.head, m.p.head_b, rows, C, m.local.Vpl);
        return rows;
    };
    if (training && compares) {
        for (int row = 0; row < N; row += a.head_rows) classify(p, row, logits(row), 0, 0, false);
        compare_answers(p);
    }
    if (training) begin_block(p, TensorSpec::head);
    for (int row = 0; row < N; row += a.head_rows) {
        const int rows = keeps_logits ? N : logits(row);
        const floatX* inp = normed + (size_t)row * C;
        classify(p, row, rows, loss_scale, z_coef, training);
        if (!training) continue;
        if (m.g.head) add_head_gradient(p, row, rows, inp);
        if (m.g.head_b) be::bias_backward(p.ctx, m.g.head_b, a.logits, rows, m.local.Vpl);
        floatX* dinp = dnormed + (size_t)row * C;  // may be the memory of inp
        be::linear_backward_input(p.ctx, dinp, a.logits, m.p.head, rows, C, m.local.Vpl);
    }
    if (training) {
        reduce_from_tensor_parallel(p, a.dnorm);
        divide_by_logit_divisor(p, a.dnorm);
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
        p.need_block_forward(i);
        prepare_weights(p, block);
        block_forward(p, i);
    }
}
void model_forward(const Pass& p) {
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
void model_backward(const Pass& p) {
    model_backward(p, [](int) {});
}

// ---------------------------------------------------------------------------------------------------------------------------
// 4  One training step

struct Trainer : TrainerBase {
    Model& m;
    Batch micro_batch;  // the current one

    Trainer(be::Ctx& ctx, Model& model, const TrainOptions& o, const Schedule& schedule, const DataLoader& data,
            const TrainingState& position, const std::string& checkpoint = "")
        : TrainerBase(ctx, model, o, schedule, data, position, checkpoint), m(model) {}
};

// Forward and backward over this rank's micro-batches of a global batch, in the pipeline's order: sets grads and the sums.
// Calls finished(block) when a block's gradients are complete. Returns false if the run is to stop: all micro-batches already
// started are then complete, the same ones on every rank, and the gradients are invalid.
template <class Finished>
static bool run_micro_batches(Trainer& t, int64_t global_batch, real loss_scale, Finished finished) {
    Model& m = t.m;
    begin_gradients(t.ctx, m);
    clear_sums(t.ctx, m);
    if (m.c.mixture.on()) clear_router_sums(t.ctx, m);
    const Mesh& mesh = m.ranks->mesh;
    const int B = t.o.micro_batch_size, micro_batches = (int)(global_batch / ((int64_t)B * mesh.samples.size));
    PipelineLinks links = pipeline_links(t.ctx, m);

    int stop_at = micro_batches;  // the first micro-batch not to run
    for (const PipelineEvent& e : pipeline_schedule(mesh.pp.size, mesh.pp.rank, mesh.vpp, micro_batches)) {
        if (e.direction == Direction::forward && e.chunk == 0 && e.micro_batch < stop_at && t.stop()) stop_at = e.micro_batch;
        if (e.micro_batch >= stop_at) continue;
        MicroBatch& in = m.a.micro_batch(e.chunk, e.micro_batch);
        const Pass pass = {t.ctx, m, in};
        if (e.direction == Direction::forward) {
            const int64_t first = t.state.sample() + ((int64_t)e.micro_batch * mesh.samples.size + mesh.samples.rank) * B;
            t.data.fetch(first, B, t.micro_batch);
            t.faults.in_tokens(t.micro_batch, first, t.batch());
            upload(t.ctx, m, mesh.cp.size > 1 ? t.micro_batch.cut(mesh.cp) : t.micro_batch, in);
            in.gradients = e.micro_batch ? Acc::Add : Acc::Set;
            in.rounding_key = contribution_key((uint64_t)t.o.seed, first, mesh.cp);
            in.drops = in.own_rows = true;
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
    if (m.sharded_grads.used()) {
        m.sharded_grads.overlap = m.sharded_params.overlap = !t.o.no_overlap;
        const bool done = run_micro_batches(t, global_batch, loss_scale, [](int) {});
        finish_sections(t.ctx, m);
        return done;
    }
    GradientReducer reducer(t.ctx, *m.ranks, m.shards, m.table, m.grads, !t.o.no_overlap);
    const bool done = run_micro_batches(t, global_batch, loss_scale, [&](int block) {
        reduce_replicas(t.ctx, m, block);
        reducer.ready(m.table.begin_of_block(block));
    });
    if (!done) return false;
    reduce_shared(t.ctx, m);
    reducer.finish();
    return true;
}

// The same, but computes each rank's own gradients twice. If the two results differ in any bit, the hardware is faulty: the run
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
    GradientReducer(t.ctx, *m.ranks, m.shards, m.table, m.grads, false).finish();
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
    m.sharded_params.drop(t.ctx);
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
    const double sequences = (double)global_batch, rows = sequences * t.m.whole_T();
    if (!t.m.frozen) t.m.router_losses = {(real)(t.o.moe_aux_loss_coeff / sequences), (real)(t.o.moe_z_loss_coeff / rows)};

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
    t.m.for_each_own_gradient([&](const Elements& x, size_t n) { be::add_squares(t.ctx, &t.m.a.sums->squares, x, n); });
    const LossSums sums = reduce_sums(*t.m.ranks, read_sums(t.ctx, t.m));
    const double norm = std::sqrt(sums.squares), loss = sums.loss(), z = sums.z / sums.n;
    // Clipping as in Megatron: all gradients times clip / (norm + 1e-6), if that factor is below 1.
    const double clip = t.o.clip_grad > 0 ? std::min(1.0, t.o.clip_grad / (norm + 1e-6)) : 1.0;
    t.verdict = t.history.guard.judge(t.state.step + 1, t.batch(), loss + z, norm);
    std::vector<double> router_sums;
    if (t.m.c.mixture.on()) router_sums = read_router_sums(t.ctx, t.m);
    if (t.verdict.apply) {
        if (examines) t.layer_health.before_update();
        update(t, lr, weight_decay, clip);
        if (t.m.c.mixture.bias && !t.m.frozen) t.m.expert_biases.move(t.ctx, router_sums, t.o.moe_router_bias_update_rate);
        if (examines) t.health = t.layer_health.after_update(fp8);
        end_step_in_fp8(t, loss, norm);
    }
    fp8.on = fp8.measuring = false;  // evaluation and generation compute in bf16, like any user of the checkpoint

    StepStats stats = t.count_step(global_batch, sums);
    const bool drops = t.m.expert_capacity.factor > 0;
    if (t.m.c.mixture.on()) stats.mixture = mixture_load(router_sums, t.m.c, sequences, rows, drops);
    stats.grad_norm = norm;
    stats.lr = t.state.lr = lr;
    stats.step_ms = (monotonic_seconds() - begin) * 1e3;
    stats.tokens_per_s = global_batch * t.o.seq_length / (stats.step_ms * 1e-3);
    return stats;
}

// ---------------------------------------------------------------------------------------------------------------------------
// 5  The loop over steps

std::optional<std::vector<LossSums>> evaluate(be::Ctx& ctx, Model& m, const DataLoader& data, int64_t first, int64_t n,
                                              const std::function<bool()>& stop,
                                              const std::function<void(const std::vector<AnswerPair>&)>& compared) {
    const Mesh& mesh = m.ranks->mesh;
    Batch batch;
    std::vector<LossSums> sums;
    for (const std::vector<int64_t>& samples : data.samples_by_set(first, n)) {
        PipelineLinks links = pipeline_links(ctx, m);
        clear_sums(ctx, m);
        const int64_t n_samples = (int64_t)samples.size();
        int i = 0;
        for (int64_t first_of_all = 0; first_of_all < n_samples; i++) {
            if (stop()) return {};
            // Expert-parallel ranks run each pass together: in training each with its own samples if there are enough, else
            // with the same ones; with context parallelism each with its rows of the same samples.
            const bool enough = m.dispatching_ranks() > 1 && first_of_all + mesh.samples.size * m.a.B <= n_samples;
            const bool own = mesh.ep.size == 1 || mesh.cp.size > 1 || enough;
            const Axis& ranks = own ? mesh.samples : mesh.edp;
            const int64_t first_of_rank = first_of_all + ranks.rank * m.a.B;
            first_of_all += ranks.size * m.a.B;
            if (first_of_rank >= n_samples) {
                gather_only(ctx, m, i);
                continue;
            }
            data.gather(&samples[first_of_rank], (int)std::min<int64_t>(m.a.B, n_samples - first_of_rank), batch);
            forward_only(ctx, m, links, mesh.cp.size > 1 ? batch.cut(mesh.cp) : batch, own, i, [&](const Pass& pass) {
                pass.need_head();
                if (!own && mesh.ep.rank > 0) return;  // the first one counts them
                head(pass, 0, 0, false);
                if (compared) compared(pass.in.pairs);
            });
        }
        links.finish();
        sums.push_back(reduce_sums(*m.ranks, read_sums(ctx, m)));
    }
    return sums;
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

// The loop over the steps of a run: each step, then validation, tasks, a sample of text and a checkpoint where they are due.
static void training_loop(Run& run, Trainer& t, TrainingLoop& loop, TrainingLog& log) {
    std::optional<Generator> generator;
    if (run.generates()) generator.emplace(t.ctx, t.m);
    const TaskFunctions tasks =
        task_functions(t.ctx, t.m, generator, run.tokenizer.get(), run.texts.end_ids, [&] { return t.stop(); });
    // Returns true if the run is to stop.
    const auto after_step = [&](bool last, Decision now) {
        const TrainingLoop::Due due = loop.due_after_step(last, now);
        const auto run_timed = [&](TimeBudget::Work kind, auto work) { now.stop = now.stop || !loop.timed(kind, work); };
        if (due.validation) run_timed(TimeBudget::validation, [&] { return validate(run, t, loop, last); });
        if (due.tasks && !now.stop) run_timed(TimeBudget::tasks, [&] { return loop.measure_tasks(tasks); });
        if (due.sample && !now.stop)
            run_timed(TimeBudget::sample, [&] { return generate_sample(run, t, t.m, log, *generator); });
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
    t.m.sharded_params.drop(t.ctx);
    loop.finish();
}

// ---------------------------------------------------------------------------------------------------------------------------
// 6  A run

static void train(World& world, const TrainOptions& given) {
    check_nothing_is_missing(given);
    if (!given.dry_run) watch_ranks(world, given);
    std::optional<RunLock> lock;
    if (!given.dry_run && !given.resume.empty()) lock_run_directory(world, given, lock);
    Run run = {world, given, make_ctx(world, given.threads, given.dry_run)};
    set_up(run);
    if (!given.dry_run && given.resume.empty()) lock_run_directory(world, given, lock);
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
        if (run.in_out(run.resumed_from)) remove_snapshots(world, run.o.out);  // else it is one of them
        if (run.main_rank()) {
            make_latest(run.o.out, run.resumed_from);
            printf("the run is finished: %s of %s are done\n", with_commas(trainer.state.step).c_str(),
                   counted(run.schedule.total_steps, "step").c_str());
        }
        return;
    }
    remove_snapshots_after(world, run.o.out, trainer.state.step);
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

#ifndef TRAIN_GPT_NO_MAIN
int main(int argc, char** argv) {
    return run_program(
        argc, argv,
        {train_command, tune_command, sweep_command, generate_command, eval_command, serve_command, check_node_command});
}
#endif
