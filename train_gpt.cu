/*
train_gpt: pretraining of decoder-only language models (GPT-2/3, BLOOM, Llama/LLM-jp) in one readable program.

Everything that knows it is a GPT is here; what would be equally true of another model is in llmc/. In reading order:
  1  the model's memory           Activations, Model, plan_memory
  2  initialisation               initialize
  3  one block                    block_forward next to block_backward
  4  the whole model              embed, head, model_forward, model_backward
  5  one training step            train_step: micro-batches, loss scale, clipping, update
  6  inference                    evaluate; Generator with its key/value cache
  7  commands                     train, eval, generate, prepare, tokenizer; main

Dimensions: B micro-batch, T sequence, N = B*T rows, C width, L layers, NH query heads, NKV key/value heads, HS head size,
QKV = (NH + 2 NKV) HS, F feed-forward width, F1 rows of fc1 (2F with SwiGLU), V vocabulary, Vp padded. What one of several ranks
holds of a size ends in l: NHl heads, Fl columns, Nl rows of the residual stream. Shapes stand at the right, slowest first. `d`
prefixes a gradient. floatX is the storage type (bf16 or fp32), real what accumulates (fp32).
*/
#include <array>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

// The rooms of llmc/, from the lowest up; each line says what its headers define.
// base: floatX, real | fail, CHECK, format | rope_table, alibi_slope | normal_at
#include "llmc/base/types.h"
#include "llmc/base/check.h"
#include "llmc/base/math.h"
#include "llmc/base/rng.h"
// cpu, gpu: be::Ctx and every op: be::linear_forward, be::attention_backward, ...
#include "llmc/ops.h"
#include "llmc/cpu/embed.h"
#include "llmc/cpu/fp8.h"
#include "llmc/cpu/norm.h"
#include "llmc/cpu/matmul.h"
#include "llmc/cpu/fp8_linear.h"
#include "llmc/cpu/rope.h"
#include "llmc/cpu/attention.h"
#include "llmc/cpu/mlp.h"
#include "llmc/cpu/loss.h"
#include "llmc/cpu/optimizer.h"
#include "llmc/cpu/reduce.h"
#include "llmc/cpu/memory.h"
#if defined(BACKEND_CUDA) || defined(BACKEND_EMU)
#include "llmc/gpu/ops.cuh"
#endif
// model: Arena, HostSide | ModelConfig, presets | Mesh, Part, LocalSizes | ParameterTable, Params | Fp8Recipe, Fp8State, Matrix,
// Operand | BlockGradients | model_flops_per_token | sample_token
#include "llmc/model/arena.h"
#include "llmc/model/model_config.h"
#include "llmc/model/mesh.h"
#include "llmc/model/parameters.h"
#include "llmc/model/fp8_state.h"
#include "llmc/model/gradients.h"
#include "llmc/model/flops.h"
#include "llmc/model/sampler.h"
// data: Batch, DataLoader | Tokenizer | Task, make_requests, task_metrics
#include "llmc/data/dataloader.h"
#include "llmc/data/tokenizer.h"
#include "llmc/data/tasks.h"
// parallel: World | be::Comm, be::all_reduce, ... | Shards | GradientReducer, ParameterGatherer | pipeline_schedule, split_layers
// | Ranks, join_groups, reduce_sums | PipelineLinks
#include "llmc/parallel/world.h"
#include "llmc/parallel/comm.h"
#include "llmc/parallel/shard.h"
#include "llmc/parallel/zero.h"
#include "llmc/parallel/pipeline.h"
#include "llmc/parallel/ranks.h"
#include "llmc/parallel/pipeline_links.h"
// report: Logger, StepStats, Table, human_count
#include "llmc/report/logger.h"
// run: TrainOptions, ... | configure_model, layout_of, data_options | cli::parse | Schedule | Guard, Verdict | PlantedFaults,
// GradientHashes, LayerHealth | read_config, read_parameters | ModelTexts | RunLock, find_checkpoints | TrainingState, Saver |
// find_resumed, check_same_everywhere | MemoryCheck | hear_stop_signals, StopVote | Timetable, decide_together |
// score_requests, tables of an evaluation | make_plan, add_rows | Peak, peak_of_all, make_ctx | the commands that need no model
#include "llmc/run/config.h"
#include "llmc/run/from_options.h"
#include "llmc/run/cli.h"
#include "llmc/run/schedule.h"
#include "llmc/run/guard.h"
#include "llmc/run/diagnostics.h"
#include "llmc/run/checkpoint.h"
#include "llmc/run/model_texts.h"
#include "llmc/run/run_directory.h"
#include "llmc/run/training_state.h"
#include "llmc/run/resume.h"
#include "llmc/run/memory_check.h"
#include "llmc/run/stop.h"
#include "llmc/run/timetable.h"
#include "llmc/run/evaluation.h"
#include "llmc/run/planner.h"
#include "llmc/run/machine.h"
#include "llmc/run/text_commands.h"
#include "llmc/run/inspect.h"
#include "llmc/run/version.h"
#include "llmc/run/report_command.h"

// ---------------------------------------------------------------------------------------------------------------------------
// 1  The model's memory

// What a block's forward pass leaves for its backward pass. The recompute policy decides which of these each layer keeps and
// which live in one buffer that all layers share and backward fills again.
struct BlockActs {
    floatX* norm1;        // (Nl, C)
    floatX* qkv;          // (N, QKVl) after rope
    floatX* att;          // (N, NHl HS)
    floatX* mid;          // (Nl, C) the residual stream between attention and MLP
    floatX* norm2;        // (Nl, C)
    floatX* fc1;          // (N, F1l)
    floatX* act;          // (N, Fl)
    real *mean1, *rstd1;  // (Nl) (Nl)
    real *mean2, *rstd2;  // (Nl) (Nl)
    real* lse;            // (B, NHl, T)
    uint8_t* codes[4];    // of the inputs of qkv, proj, fc1, fc2 in FP8: of norm1, att, norm2, act, with their shapes
    float* inverse;       // (4, 4) what they are to be multiplied by, in the first of each four
};

enum class Recompute {
    none,       // every layer keeps everything
    selective,  // norms and activations are computed again: cheap, and they are a third of the memory
    full,       // only the block's input is kept; backward runs the whole block forward again
    inference,  // nothing is kept: there is no backward
};

static Recompute recompute_policy(const std::string& name) {
    return name == "full" ? Recompute::full : name == "selective" ? Recompute::selective : Recompute::none;
}

// Keys and values of all rows so far, for generation.
struct KeyValueCache {
    floatX *keys, *values;  // (layers, T, NKVl, HS)
    size_t layer_size;      // T NKVl HS
    int length;             // rows so far
    floatX* keys_of(int l) { return keys + l * layer_size; }
    floatX* values_of(int l) { return values + l * layer_size; }
};

// What one micro-batch leaves in a chunk of this rank's layers until its backward pass. Without a pipeline there is one chunk
// and one slot; with it a chunk has as many slots as micro-batches are on their way.
struct Slot {
    int first_block = 0;                            // the chunk's first layer, of this rank's
    bool first = true, last = true;                 // the chunk begins with the embedding, ends with the head
    std::vector<floatX*> x;                         // layers+1 of (Nl, C): x[i] enters block i, the last one leaves the chunk
    std::vector<BlockActs> blocks;                  // layers
    floatX* embedded = nullptr;                     // (Nl, C) input of the embedding norm
    real *emb_mean = nullptr, *emb_rstd = nullptr;  // (Nl) (Nl)
    int *tokens, *targets, *positions, *doc_start;  // (N)
    floatX* out() const { return x.back(); }
};

struct Activations {
    int B, T;                               // the largest micro-batch that fits
    int head_rows;                          // rows of logits at a time
    std::vector<std::vector<Slot>> chunks;  // of this rank, and their slots
    BlockActs shared;                       // what no layer keeps for itself
    floatX* full;                           // (N, C) all rows of what tp ranks hold Nl rows of; then a rank's summand of it
    floatX* final_norm;                     // (Nl, C)
    real *final_mean, *final_rstd;          // (Nl) (Nl)
    floatX* logits;                         // (head_rows, Vpl), turned into their gradient in place
    real* statistics;                       // (tp, 2, head_rows) of the vocabulary's shards
    real *loss, *zloss, *lse;               // (N) each
    uint8_t *codes, *inputs, *gradients;    // (N, widest) FP8 scratch: all rows; transposed inputs and gradients
    floatX* next_logits;                    // (Vp) of one row, for generation
    LossSums* sums;                         // of what the head has seen since they were cleared
    floatX* branch;                         // (Nl, C) what attention or MLP adds to the residual stream
    real* dq_sums = nullptr;                // (dq_sums_size) attention_backward's; null: it is deterministic
    size_t dq_sums_size = 0;                // set before memory is planned
    floatX* dx;                             // (Nl, C) gradient of the residual stream, walking from the head to the embedding
    floatX* dnorm;                          // (Nl, C) gradient of a norm's output
    floatX* dnarrow;  // (N, max(Fl, NHl HS)), with GeLU (N, NHl HS): gradient of SwiGLU's act, then of att
    floatX* dwide;    // (N, max(F1l, QKVl)) gradient of fc1, then of qkv
    Slot& slot(int chunk = 0, int micro_batch = 0) {
        std::vector<Slot>& slots = chunks[(size_t)chunk];
        return slots[(size_t)micro_batch % slots.size()];
    }
};

// The layers of this rank, chunk after chunk: chunk k is stage k pp + rank of the whole pipeline.
static Part part_of(const ModelConfig& c, const Mesh& mesh, const std::vector<int>& stages) {
    if (mesh.pp.size == 1 && mesh.tp.size == 1) return whole_model(c);
    Part part;
    part.tp = mesh.tp, part.first = mesh.pp.rank == 0, part.last = mesh.pp.rank == mesh.pp.size - 1;
    for (int stage = 0, layer = 0; stage < (int)stages.size(); stage++)
        for (int i = 0; i < stages[(size_t)stage]; i++, layer++)
            if (stage % mesh.pp.size == mesh.pp.rank) part.layers.push_back(layer);
    return part;
}

// The FP8 side of a model: which blocks take part, in which way now, their weights' codes and all tensors' scales.
struct EightBit {
    Fp8Recipe recipe;
    bool after_bf16 = false;  // steps in bf16 come before
    bool fast_accumulation = true;
    std::vector<char> blocks;                 // of this rank: which are computed in FP8 when `on`
    bool on = false;                          // now; what generates or evaluates is computed in bf16
    bool measuring = false;                   // bf16, but amax is recorded
    bool current = false;                     // scales come from the tensors themselves
    std::vector<char> prepared;               // blocks whose weights were quantised or measured in this step
    float *scale = nullptr, *amax = nullptr;  // (blocks, 12) see fp8_index
    float* inverse = nullptr;  // (blocks, 12, 4) of which cuBLASLt reads the first: it wants multiples of 16 bytes
    struct Count {
        int64_t codes = 0, zero = 0, largest = 0;
    };
    std::vector<Count> counts;                                 // (blocks, 12), while every layer is examined; else empty
    float* now = nullptr;                                      // (2) amax and scale of one tensor
    std::vector<std::array<uint8_t*, 4>> weights, transposed;  // (OC, IC), (IC, OC) of each block's matrices
};

struct Model {
    ModelConfig c;
    std::shared_ptr<Ranks> ranks;
    std::vector<int> stages;  // layers of each stage of the pipeline
    LocalSizes n;             // what of the matrices this rank holds
    ParameterTable table;
    Shards shards;
    std::vector<Range> counted;  // elements of the buffer that this rank counts in sums over all ranks
    Recompute recompute = Recompute::inference;
    floatX* params = nullptr;    // (table.size)
    Elements grads;              // (table.size) summed over the micro-batches of a step
    BlockGradients of_block;     // where these are bf16: of a micro-batch in a block
    LowerHalf* lower = nullptr;  // (shards.size) of the fp32 weights that AdamW updates; null where params are these
    Elements m, v;               // (shards.size) each; their types, and that of grads, are set before memory is planned
    Parts copy;                  // where a checkpoint's contents wait to be written; null: written in place
    Params<floatX> p;            // views of params
    Params<real> g;              // views of grads, or of of_block: what ops set or add to
    Activations a{};
    EightBit fp8;
    KeyValueCache cache{};
    real* slopes = nullptr;   // (NHl) ALiBi; null: none
    real* cos_sin = nullptr;  // (T, HS/2, 2) rope; null: none
    Arena arena;

    explicit Model(const ModelConfig& config) : Model(config, std::make_shared<Ranks>(), {config.L}) {}
    Model(const ModelConfig& config, std::shared_ptr<Ranks> r, std::vector<int> stage_layers)
        : c(config),
          ranks(std::move(r)),
          stages(std::move(stage_layers)),
          n(c, ranks->mesh.tp),
          table(c, part_of(c, ranks->mesh, stages), (size_t)ranks->mesh.dp.size * 64),
          shards(table, ranks->mesh.dp, ranks->zero, ranks->bucket_elements),
          counted(shards.counted(table, ranks->mesh.dp)) {}
    real attention_scale() const { return (real)(1.0 / std::sqrt((double)c.HS())); }
};

// FLOPs of training per token, causal attention counted as half.
static double model_flops_per_token(const ModelConfig& c, int T) {
    return model_flops_per_token({c.L, c.C, c.NH, c.NKV, c.HS(), c.F, c.Vp, T, c.activation == Activation::swiglu},
                                 AttentionCount::causal);
}

// Plans all memory of a run with micro-batches of B x T in m.arena; allocate() then gets it. `micro_batches`: of a step, every
// number that occurs in the run, which decide how many a pipeline has on their way. `generates` adds room for the keys and
// values of a whole context.
static void plan_memory(Model& m, Recompute recompute, int B, int T, int head_rows, bool generates = false,
                        const std::vector<int>& micro_batches = {1}) {
    if ((int64_t)B * T > INT_MAX)
        fail_usage(
            "--micro-batch-size %d x --seq-length %d are more tokens at a time than can be counted, %d; HINT: a smaller one", B,
            T, INT_MAX);
    const ModelConfig& c = m.c;
    const Mesh& mesh = m.ranks->mesh;
    const LocalSizes& n = m.n;
    const size_t N = (size_t)B * T, Nl = m.ranks->sequence_parallel ? N / mesh.tp.size : N, C = c.C,
                 heads = (size_t)n.NHl * c.HS();
    const bool training = recompute != Recompute::inference;
    Arena& arena = m.arena;
    Activations& a = m.a;
    m.recompute = recompute;
    a.B = B, a.T = T, a.head_rows = std::min((size_t)head_rows, N);

    arena.add("parameters", &m.params, m.table.size);
    if (training) {
        arena.add(m.grads.is_bf16 ? "gradients (bf16)" : "gradients (fp32)", &m.grads, m.table.size);
        if (m.grads.is_bf16) m.of_block.plan(arena, m.table);
        if (has_lower_halves) arena.add("master weights (lower 16 bits)", &m.lower, m.shards.size);
        for (Elements* x : {&m.m, &m.v})
            arena.add(x->is_bf16 ? "Adam moments (bf16)" : "Adam moments (fp32)", x, m.shards.size);
    }

    const bool fp8 = training && m.fp8.recipe.on;
    // Inputs of matrices are kept as codes where there is nothing but FP8; after a part in bf16 the codes take its place.
    const auto in_bits8 = [&](size_t block) { return fp8 && m.fp8.blocks[block]; };
    // One row per kept activation: elements, and the strongest policy under which a layer still keeps its own.
    struct Row {
        floatX* BlockActs::*field;
        size_t count;
        Recompute kept_until;
    };
    // clang-format off
    const Row rows[] = {
        {&BlockActs::norm1, Nl * C, Recompute::none},
        {&BlockActs::qkv, N * n.QKVl, Recompute::selective},
        {&BlockActs::att, N * heads, Recompute::selective},
        {&BlockActs::mid, Nl * C, Recompute::selective},
        {&BlockActs::norm2, Nl * C, Recompute::none},
        {&BlockActs::fc1, N * n.F1l, Recompute::selective},
        {&BlockActs::act, N * n.Fl, Recompute::none},
    };
    // clang-format on
    const auto code_count = [&](Matrix matrix) {
        return matrix == Matrix::proj ? N * heads : matrix == Matrix::fc2 ? N * (size_t)n.Fl : Nl * C;
    };
    const std::pair<real * BlockActs::*, size_t> statistics[] = {{&BlockActs::mean1, Nl},
                                                                 {&BlockActs::rstd1, Nl},
                                                                 {&BlockActs::mean2, Nl},
                                                                 {&BlockActs::rstd2, Nl},
                                                                 {&BlockActs::lse, N * n.NHl}};
    // add() remembers the address of each pointer, so the vectors must have their final size by now.
    a.chunks.assign((size_t)mesh.vpp, {});
    for (int chunk = 0, block = 0; chunk < mesh.vpp; chunk++) {
        const int stage = virtual_stage(mesh.pp.size, mesh.pp.rank, chunk), layers = m.stages[(size_t)stage];
        Slot slot;
        slot.first_block = block, slot.first = stage == 0, slot.last = stage == (int)m.stages.size() - 1;
        slot.x.assign((size_t)layers + 1, nullptr), slot.blocks.assign((size_t)layers, BlockActs{});
        const int slots = training ? pipeline_slots(mesh.pp.size, mesh.pp.rank, mesh.vpp, micro_batches, chunk) : 1;
        a.chunks[(size_t)chunk].assign((size_t)slots, slot);
        block += layers;
    }
    for (auto& slots : a.chunks)
        for (Slot& slot : slots) {
            const size_t own_x =
                training ? slot.x.size() : std::min<size_t>(2, slot.x.size());  // inference alternates between two
            for (size_t i = 0; i < own_x; i++) arena.add("activations: block inputs", &slot.x[i], Nl * C);
            for (size_t i = 0; i < slot.blocks.size(); i++) {
                BlockActs& block = slot.blocks[i];
                const bool bits8 = in_bits8((size_t)slot.first_block + i);
                for (const Row& row : rows) {
                    const bool as_codes = bits8 && !m.fp8.after_bf16 && row.kept_until == Recompute::none;
                    if (recompute <= row.kept_until && !as_codes)
                        arena.add("activations: kept per block", &(block.*row.field), row.count);
                }
                for (const auto& [field, count] : statistics)
                    if (recompute < Recompute::full) arena.add("activations: kept per block", &(block.*field), count);
                if (!bits8) continue;
                arena.add("activations: kept per block", &block.inverse, 4 * 4);
                for (const Matrix matrix : all_matrices) {
                    const bool own = !m.fp8.after_bf16 || matrix == Matrix::proj;  // else where the bf16 input was
                    if (recompute == Recompute::none && own)
                        arena.add("activations: kept per block", &block.codes[(size_t)matrix], code_count(matrix));
                }
            }
            if (c.embedding_norm && slot.first) {
                arena.add("activations: embedding, head", &slot.embedded, Nl * C);
                arena.add("activations: embedding, head", &slot.emb_mean, Nl);
                arena.add("activations: embedding, head", &slot.emb_rstd, Nl);
            }
            for (int** ids : {&slot.tokens, &slot.targets, &slot.positions, &slot.doc_start})
                arena.add("activations: embedding, head", ids, N);
        }
    for (const Row& row : rows)
        if (recompute > row.kept_until || (fp8 && row.kept_until == Recompute::none))
            arena.add("activations: shared block", &(a.shared.*row.field), row.count);
    if (fp8) {
        if (recompute > Recompute::none)
            for (const Matrix matrix : all_matrices)
                arena.add("activations: shared block", &a.shared.codes[(size_t)matrix], code_count(matrix));
        const size_t widest = N * (size_t)std::max({c.C, n.QKVl, n.F1l, (int)heads});
        for (uint8_t** scratch : {&a.codes, &a.inputs, &a.gradients}) arena.add("activations: shared block", scratch, widest);
        const size_t blocks = m.fp8.blocks.size();
        for (float** numbers : {&m.fp8.scale, &m.fp8.amax}) arena.add("FP8 weights", numbers, blocks * fp8_tensors);
        arena.add("FP8 weights", &m.fp8.inverse, blocks * fp8_tensors * 4);
        arena.add("FP8 weights", &m.fp8.now, 2);
        m.fp8.weights.assign(blocks, {}), m.fp8.transposed.assign(blocks, {}), m.fp8.prepared.assign(blocks, false);
        const size_t sizes[] = {(size_t)n.QKVl * C, C * heads, (size_t)n.F1l * C, C * n.Fl};
        for (size_t block = 0; block < blocks; block++)
            for (size_t i = 0; i < 4 && m.fp8.blocks[block]; i++)
                for (auto* codes : {&m.fp8.weights, &m.fp8.transposed}) arena.add("FP8 weights", &(*codes)[block][i], sizes[i]);
    }
    for (const auto& [field, count] : statistics)
        if (recompute >= Recompute::full) arena.add("activations: shared block", &(a.shared.*field), count);
    arena.add("activations: shared block", &a.branch, Nl * C);
    a.full = nullptr;
    if (m.ranks->sequence_parallel) arena.add("activations: shared block", &a.full, N * C);
    if (m.table.part.last) {
        arena.add("activations: embedding, head", &a.final_norm, Nl * C);
        for (real** rstd : {&a.final_mean, &a.final_rstd}) arena.add("activations: embedding, head", rstd, Nl);
        for (real** s : {&a.loss, &a.zloss, &a.lse}) arena.add("activations: embedding, head", s, N);
        arena.add("activations: embedding, head", &a.statistics, mesh.tp.size > 1 ? (size_t)mesh.tp.size * 2 * a.head_rows : 0);
        arena.add("logits (a chunk of rows)", &a.logits, (size_t)a.head_rows * n.Vpl);
    }
    arena.add("activations: embedding, head", &a.sums, 1);
    if (c.position == Position::alibi) arena.add("activations: embedding, head", &m.slopes, n.NHl);
    if (c.position == Position::rope) arena.add("activations: embedding, head", &m.cos_sin, (size_t)c.T * c.HS());
    if (training) {
        arena.add("activation gradients", &a.dx, Nl * C);
        arena.add("activation gradients", &a.dnorm, Nl * C);
        arena.add("activation gradients", &a.dnarrow,
                  N * (c.activation == Activation::swiglu ? std::max<size_t>(n.Fl, heads) : heads));
        arena.add("activation gradients", &a.dwide, N * std::max(n.F1l, n.QKVl));
        if (a.dq_sums_size) arena.add("sums of queries' gradients (fp32)", &a.dq_sums, a.dq_sums_size);
    }
    m.cache.layer_size = (size_t)c.T * n.NKVl * c.HS();
    if (generates) arena.add("key/value cache", &a.next_logits, c.Vp);
    if (generates)
        for (floatX** rows : {&m.cache.keys, &m.cache.values})
            arena.add("key/value cache", rows, m.table.part.layers.size() * m.cache.layer_size);
}

// Rows of logits at a time for N rows: equal parts of whole tiles, each at most what suits the device.
static int choose_head_rows(const be::Ctx& ctx, const LocalSizes& n, int64_t N) {
    const size_t most = be::logits_rows(ctx, (size_t)n.Vpl * sizeof(floatX)), parts = ceil_div((size_t)N, most);
    return (int)std::min<size_t>(most, round_up(ceil_div((size_t)N, parts), 128));
}

// Room for a copy of all that a checkpoint holds, so that training goes on while it is written. In the foreground it is written
// from where it is, but for parameters whose parts lie apart.
static void plan_checkpoint_copy(Model& m, bool foreground) {
    const bool in_place = foreground && be::memory_is_host;
    const auto copy = [&](auto* part) { m.arena.add_on_host("copy for checkpoints", part, m.shards.size); };
    m.copy.m.is_bf16 = m.m.is_bf16, m.copy.v.is_bf16 = m.v.is_bf16;
    if (!in_place || m.shards.cut) copy(&m.copy.params);
    if (in_place) return;
    if (has_lower_halves) copy(&m.copy.lower);
    copy(&m.copy.m), copy(&m.copy.v);
}

// Gets the planned memory, fills in constants, and sets every pointer that is a view of another.
static void allocate(be::Ctx& ctx, Model& m) {
    m.arena.allocate();
    const ModelConfig& c = m.c;
    std::vector<real> slopes, cos_sin;
    if (m.slopes)
        for (int h = 0; h < m.n.NHl; h++) slopes.push_back(alibi_slope(m.ranks->mesh.tp.rank * m.n.NHl + h, c.NH));
    if (m.cos_sin) rope_table(cos_sin, c.T, c.HS(), c.rope_base);
    be::upload(ctx, m.slopes, slopes.data(), slopes.size() * sizeof(real));
    be::upload(ctx, m.cos_sin, cos_sin.data(), cos_sin.size() * sizeof(real));
    bind_parameters(m.c, m.table, m.p, m.params);
    if (m.of_block.used()) m.of_block.bind(m.c, m.table, m.g);
    else if (m.grads.data) bind_parameters(m.c, m.table, m.g, (real*)m.grads.data);
    Activations& a = m.a;
    floatX* BlockActs::*const fields[] = {&BlockActs::norm1, &BlockActs::qkv, &BlockActs::att, &BlockActs::mid,
                                          &BlockActs::norm2, &BlockActs::fc1, &BlockActs::act};
    real* BlockActs::*const statistics[] = {&BlockActs::mean1, &BlockActs::rstd1, &BlockActs::mean2, &BlockActs::rstd2,
                                            &BlockActs::lse};
    for (auto& slots : a.chunks)
        for (Slot& slot : slots) {
            for (size_t i = 2; i < slot.x.size(); i++)
                if (!slot.x[i]) slot.x[i] = slot.x[i - 2];
            for (BlockActs& block : slot.blocks) {
                uint8_t* const instead[] = {(uint8_t*)block.norm1, nullptr, (uint8_t*)block.norm2, (uint8_t*)block.act};
                for (int i = 0; i < 4; i++)
                    if (!block.codes[i]) block.codes[i] = a.shared.codes[i] ? a.shared.codes[i] : instead[i];
                for (auto field : fields)
                    if (!(block.*field)) block.*field = a.shared.*field;
                for (auto field : statistics)
                    if (!(block.*field)) block.*field = a.shared.*field;
            }
        }
}

// What training keeps from step to step; all weights that this rank holds.
static Parts memory_of(const Model& m) { return {m.params, m.lower, m.m, m.v}; }

// Sets parameters of the table from `first` on, and this rank's lower halves, to fp32 weights.
static void set_weights(const Model& m, HostSide<floatX>& params, HostSide<LowerHalf>& lower, size_t first,
                        const std::vector<real>& weights) {
    floatX* to = params.data() + first;
    // In parallel, so that on a machine of several nodes the pages of what all threads read come to lie on all of them.
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < weights.size(); i++) {
        LowerHalf half;
        store_weight(&to[i], &half, 0, weights[i]);
    }
    if (!m.lower) return;
    m.shards.for_each_part(first, weights.size(), [&](size_t from, size_t shard, size_t n) {
        LowerHalf* halves = lower.data() + shard;
#pragma omp parallel for schedule(static)
        for (size_t i = 0; i < n; i++) store_weight(to + from, halves, i, weights[from + i]);
    });
}

// ---------------------------------------------------------------------------------------------------------------------------
// 2  Initialisation: a counter RNG keyed by (seed, tensor, element) gives the same weights on any machine and layout.
//    N(0, std) for embeddings and linears, N(0, std / sqrt(2L)) for the two projections into the residual stream, gains 1.
static void initialize(be::Ctx& ctx, Model& m, uint64_t seed) {
    for (const TensorSpec& t : m.table.rows) {
        const double std = t.init == Init::scaled_normal ? m.c.init_std / std::sqrt(2.0 * m.c.L) : m.c.init_std;
        InitialWeights w{seed, (uint32_t)t.id, std, 0, 0, 0, t.first_col, t.cols, t.whole_cols};
        if (t.init == Init::ones || t.init == Init::zeros) w.std = 0, w.constant = t.init == Init::ones;
        // Padded vocabulary rows are zero and stay zero: they take part in nothing.
        w.live = t.hf.size() == 1 ? t.hf[0].rows : t.whole_rows;
        for (const RowBlock& block : t.blocks) {
            w.whole_row = block.whole_row;
            const size_t begin = t.offset + (size_t)block.row * t.cols, size = (size_t)block.rows * t.cols;
            be::initialize_weights(ctx, m.params + begin, nullptr, w, 0, size);
            if (m.lower)
                m.shards.for_each_part(begin, size, [&](size_t from, size_t shard, size_t n) {
                    be::initialize_weights(ctx, m.params + begin + from, m.lower + shard, w, from, n);
                });
        }
    }
}

// Weights from a model's directory; those that are trained are these as they are stored, rounded to floatX.
static void load_parameters(be::Ctx& ctx, Model& m, const std::string& dir) {
    HostSide<floatX> params(ctx, m.params, m.table.size);
    read_parameters(dir, m.c, m.table, params.data());
    params.upload();
    if (m.lower) be::clear(ctx, m.lower, m.shards.size * sizeof(LowerHalf));
}

// fp32 weights and moments from a checkpoint; moments that were fp32 and are now bf16 are rounded to the nearest.
static void load_optimizer(be::Ctx& ctx, Model& m, const std::string& dir) {
    std::vector<real> whole(m.table.size);  // of this rank's tensors, of which its parts are kept
    const auto keep_parts = [&](auto* memory) {
        HostSide parts(ctx, memory, m.shards.size);
        m.shards.for_each_part(0, m.table.size, [&](size_t from, size_t shard, size_t n) {
            for (size_t i = 0; i < n; i++) parts.data()[shard + i] = whole[from + i];
        });
        parts.upload();
    };
    read_tensors(dir + "/training/exp_avg.safetensors", m.c, m.table, whole.data());
    m.m.visit(keep_parts);
    read_tensors(dir + "/training/exp_avg_sq.safetensors", m.c, m.table, whole.data());
    m.v.visit(keep_parts);
    read_masters(dir, m.c, m.table, whole.data());
    HostSide<floatX> params(ctx, m.params, m.table.size);
    HostSide<LowerHalf> lower(ctx, m.lower, m.lower ? m.shards.size : 0);
    set_weights(m, params, lower, 0, whole);
    params.upload(), lower.upload();
}

// ---------------------------------------------------------------------------------------------------------------------------
// 3  One block: x += Attention(Norm1(x)); x += MLP(Norm2(x))

// The micro-batch that a pass works on, and the slot in which it lies. doc_start is null when nothing but causality masks
// attention.
struct Rows {
    const int *tokens, *targets, *positions, *doc_start;  // (B, T) each
    int B, T;
    Slot* slot;
    KeyValueCache* cache = nullptr;  // not null: one new token, which attends to the cached rows before it
    Acc gradients = Acc::Add;        // of what begin_gradients() did not clear: a step's first micro-batch sets them
    uint64_t rounding_key = 0;       // of what it adds to bf16 gradients
    int N() const { return B * T; }
};

// Rows of the residual stream on this rank: with sequence parallelism a part of them. What generates has too few to be cut.
static bool cut_rows(const Model& m, const Rows& in) { return m.ranks->sequence_parallel && in.N() % m.n.tp_size == 0; }
static int local_rows(const Model& m, const Rows& in) { return cut_rows(m, in) ? in.N() / m.n.tp_size : in.N(); }

// Tensor parallelism (Shoeybi et al., 2019) with sequence parallelism (Korthikanti et al., 2022), the same forward and
// backward: all rows of x (Nl, C) before a matrix that is cut by columns of its output,
static const floatX* gather(be::Ctx& ctx, Model& m, const floatX* x, const Rows& in) {
    if (!cut_rows(m, in)) return x;
    be::all_gather(ctx, m.ranks->tp, m.a.full, x, (size_t)local_rows(m, in) * m.c.C);
    return m.a.full;
}
// and after a matrix that is cut by rows of its input, where each rank has a summand of all rows, their sum: this is where the
// summand goes, and reduce() then leaves the sum of this rank's rows in out (Nl, C).
static floatX* summand(Model& m, floatX* out, const Rows& in) { return cut_rows(m, in) ? m.a.full : out; }
static void reduce(be::Ctx& ctx, Model& m, floatX* out, const Rows& in) {
    const size_t n = (size_t)local_rows(m, in) * m.c.C;
    if (cut_rows(m, in)) be::reduce_scatter(ctx, m.ranks->tp, out, m.a.full, n);
    else be::all_reduce(ctx, m.ranks->tp, out, n);
}
// What all ranks would add to such a sum is added by the first.
template <class E>
static E* once(const Model& m, E* bias) {
    return m.ranks->mesh.tp.rank == 0 ? bias : nullptr;
}

// Sends a micro-batch to where the ops read it.
static Rows stage(be::Ctx& ctx, const Batch& batch, Slot& slot) {
    const auto send = [&](int* to, const std::vector<int>& from) {
        be::upload(ctx, to, from.data(), from.size() * sizeof(int));
        return from.empty() ? nullptr : to;
    };
    return {send(slot.tokens, batch.tokens),
            send(slot.targets, batch.targets),
            send(slot.positions, batch.positions),
            send(slot.doc_start, batch.doc_start),
            batch.B,
            batch.T,
            &slot};
}

// out = norm(inp), or with `add`: sum = inp + add, out = norm(sum)
static void norm_forward(be::Ctx& ctx, const ModelConfig& c, const Output& out, real* mean, real* rstd, floatX* sum,
                         const floatX* inp, const floatX* add, const floatX* w, const floatX* b, int N) {
    if (c.norm == Norm::layernorm) be::layernorm_forward(ctx, out, mean, rstd, sum, inp, add, w, b, N, c.C, (real)c.eps);
    else be::rmsnorm_forward(ctx, out, rstd, sum, inp, add, w, N, c.C, (real)c.eps);
}

static void norm_backward(be::Ctx& ctx, const ModelConfig& c, floatX* dinp, real* dw, real* db, const floatX* dout,
                          const floatX* inp, const floatX* w, const real* mean, const real* rstd, int N, Acc acc) {
    if (c.norm == Norm::layernorm) be::layernorm_backward(ctx, dinp, dw, db, dout, inp, w, mean, rstd, N, c.C, acc);
    else be::rmsnorm_backward(ctx, dinp, dw, dout, inp, w, rstd, N, c.C, acc);
}

static void activation_forward(be::Ctx& ctx, const Model& m, const Output& out, const floatX* inp, int N) {
    if (m.c.activation == Activation::swiglu) be::swiglu_forward(ctx, out, inp, N, m.n.Fl);
    else be::gelu_forward(ctx, out, inp, N, m.n.Fl);
}

// One of a block's four matrices, this rank's part of it.
struct Linear {
    Matrix matrix;
    int block;
    const floatX *w, *b;  // (out, in) (out) or null
    real *dw, *db;
    int in, out;
};
template <class E>
static std::pair<E*, E*> weight_and_bias(const BlockParams<E>& p, Matrix matrix) {
    switch (matrix) {
        case Matrix::qkv:
            return {p.qkv_w, p.qkv_b};
        case Matrix::proj:
            return {p.proj_w, p.proj_b};
        case Matrix::fc1:
            return {p.fc1_w, p.fc1_b};
        default:
            return {p.fc2_w, p.fc2_b};
    }
}
static Linear linear_of(const Model& m, int block, Matrix matrix) {
    const int C = m.c.C, heads = m.n.NHl * m.c.HS();
    const int in[] = {C, heads, C, m.n.Fl}, out[] = {m.n.QKVl, C, m.n.F1l, C};
    Linear l{matrix, block, nullptr, nullptr, nullptr, nullptr, in[(int)matrix], out[(int)matrix]};
    std::tie(l.w, l.b) = weight_and_bias(m.p.blocks[(size_t)block], matrix);
    if (m.grads.data) std::tie(l.dw, l.db) = weight_and_bias(m.g.blocks[(size_t)block], matrix);
    return l;
}

// Where a product leaves a weight's gradient, whether it adds, and what follows a backward pass through a block (gradients.h).
static Elements weight_gradient(const Model& m, const Rows& in, const Linear& l) {
    return m.of_block.set_by_products(in.gradients) ? m.grads.from((size_t)(l.w - m.params)) : Elements(l.dw);
}
static Acc of_product(const Model& m, const Rows& in) { return m.of_block.used() ? Acc::Set : in.gradients; }
static void end_block(be::Ctx& ctx, const Model& m, int block, const Rows& in) {
    m.of_block.end(ctx, m.table, m.grads, block, in.gradients, in.rounding_key);
}

// Whether a block's matrices are multiplied in FP8 now (fp8_state.h).
static bool in_fp8(const Model& m, int block) { return m.fp8.on && m.fp8.blocks[(size_t)block]; }

// The activations of block i: in FP8 what its matrices read is kept as codes alone.
static BlockActs activations(const Model& m, const Rows& in, int i) {
    BlockActs s = in.slot->blocks[(size_t)i];
    if (!in_fp8(m, in.slot->first_block + i)) return s;
    s.norm1 = m.a.shared.norm1, s.norm2 = m.a.shared.norm2, s.act = m.a.shared.act;
    return s;
}

// Whether the op that computes a tensor makes its codes: where the scale is known before, and no other op reads the numbers.
// (Attention's backward pass reads its output; the gradient of proj's and fc2's output is the residual stream's.)
static bool made_as_codes(const Model& m, const Linear& l, Operand operand) {
    if (!in_fp8(m, l.block) || m.fp8.current) return false;
    return operand == Operand::input ? l.matrix != Matrix::proj : operand == Operand::gradient && l.matrix == Matrix::fc1;
}
static Codes codes_of(Model& m, const Linear& l, Operand operand, uint8_t* codes, uint8_t* transposed) {
    const size_t index = fp8_index(l.block, l.matrix, operand);
    return {codes, transposed, m.fp8.amax + index, m.fp8.scale + index, m.fp8.recipe.format(operand)};
}
// Where the op before a matrix puts the matrix's input; and the one before fc1, on the way back, the gradient of its output.
static Output input_of(Model& m, const Linear& l, const BlockActs& s, floatX* x) {
    if (!made_as_codes(m, l, Operand::input)) return x;
    return codes_of(m, l, Operand::input, s.codes[(size_t)l.matrix], nullptr);
}
static Output gradient_of(Model& m, const Linear& l, floatX* dout) {
    if (!made_as_codes(m, l, Operand::gradient)) return dout;
    return {codes_of(m, l, Operand::gradient, m.a.codes, m.a.gradients), l.db ? dout : nullptr};
}

// How many elements became zero, and how many the largest number.
static void count_codes(be::Ctx& ctx, EightBit::Count& count, const uint8_t* codes, size_t n, Fp8 format) {
    std::vector<uint8_t> host(n);
    be::download(ctx, host.data(), codes, n);
    const uint8_t largest = fp8_encode(fp8_max(format), format);
    count.codes += (int64_t)n;
    for (const uint8_t c : host) count.zero += (c & 0x7f) == 0, count.largest += (c & 0x7f) == largest;
}
// Codes of x (rows, columns), unless they are there already; also transposed if wanted. With scales from the tensors
// themselves, *inverse becomes what the codes are to be multiplied by.
static void quantize(be::Ctx& ctx, Model& m, const Linear& l, Operand operand, uint8_t* codes, uint8_t* transposed,
                     float* inverse, const floatX* x, int rows, int columns) {
    EightBit& f = m.fp8;
    const size_t index = fp8_index(l.block, l.matrix, operand);
    const Fp8 format = f.recipe.format(operand);
    if (f.current) {
        be::clear(ctx, f.now, sizeof *f.now);
        be::absolute_max(ctx, f.now, x, (size_t)rows * columns);
        be::all_reduce_max(ctx, m.ranks->tp, f.now, 1);
        be::set_scale(ctx, f.scale + index, inverse, f.now, format, f.recipe.margin);
    }
    if (!made_as_codes(m, l, operand)) be::quantize(ctx, codes_of(m, l, operand, codes, transposed), x, rows, columns);
    if (!f.counts.empty()) count_codes(ctx, f.counts[index], codes, (size_t)rows * columns, format);
}
static float* scale_inverse(Model& m, const Linear& l, Operand operand) {
    return m.fp8.inverse + 4 * fp8_index(l.block, l.matrix, operand);
}
// Each micro-batch has its own, if scales come from the tensors themselves.
static float* input_inverse(Model& m, const BlockActs& s, const Linear& l) {
    return m.fp8.current ? s.inverse + 4 * (size_t)l.matrix : scale_inverse(m, l, Operand::input);
}
// Input x (rows, in), kept for backward.
static void quantize_input(be::Ctx& ctx, Model& m, const Linear& l, const BlockActs& s, const floatX* x, int rows) {
    quantize(ctx, m, l, Operand::input, s.codes[(size_t)l.matrix], nullptr, input_inverse(m, s, l), x, rows, l.in);
}
// In bf16, before FP8: the amax of what would be quantised.
static void measure(be::Ctx& ctx, Model& m, const Linear& l, Operand operand, const floatX* x, size_t n) {
    if (m.fp8.measuring && m.fp8.blocks[(size_t)l.block])
        be::absolute_max(ctx, m.fp8.amax + fp8_index(l.block, l.matrix, operand), x, n);
}
// A block's weights, once a step: quantised, or measured.
static void prepare_weights(be::Ctx& ctx, Model& m, int block) {
    EightBit& f = m.fp8;
    if (!(f.on || f.measuring) || !f.blocks[(size_t)block] || f.prepared[(size_t)block]) return;
    f.prepared[(size_t)block] = true;
    for (const Matrix matrix : all_matrices) {
        const Linear l = linear_of(m, block, matrix);
        measure(ctx, m, l, Operand::weight, l.w, (size_t)l.out * l.in);
        if (!f.on) continue;
        quantize(ctx, m, l, Operand::weight, f.weights[(size_t)block][(size_t)matrix],
                 f.transposed[(size_t)block][(size_t)matrix], scale_inverse(m, l, Operand::weight), l.w, l.out, l.in);
    }
}
// All rows of codes, where this rank has `rows` of them: gathered into `all`, as gather() does.
static const uint8_t* all_codes(be::Ctx& ctx, Model& m, void* all, const uint8_t* codes, int rows, int columns,
                                const Rows& in) {
    if (rows == in.N()) return codes;
    be::all_gather(ctx, m.ranks->tp, (uint8_t*)all, codes, (size_t)rows * columns);
    return (uint8_t*)all;
}

// out (N, l.out) from `rows` rows of x on this rank, all of them or those of sequence parallelism.
static void forward_in_fp8(be::Ctx& ctx, Model& m, const Rows& in, const Linear& l, const BlockActs& s, floatX* out,
                           const floatX* x, int rows, const floatX* bias) {
    quantize_input(ctx, m, l, s, x, rows);
    be::fp8_linear_forward(ctx, out, all_codes(ctx, m, m.a.full, s.codes[(size_t)l.matrix], rows, l.in, in),
                           m.fp8.weights[(size_t)l.block][(size_t)l.matrix], bias, input_inverse(m, s, l),
                           scale_inverse(m, l, Operand::weight), in.N(), l.in, l.out, m.fp8.fast_accumulation);
}
// dinp (N, l.in) and the parameters' gradients from `rows` rows of dout on this rank; the input has input_rows. Where rows are
// cut, so is the bias's gradient.
static void backward_in_fp8(be::Ctx& ctx, Model& m, const Rows& in, const Linear& l, const BlockActs& s, floatX* dinp,
                            const floatX* dout, int rows, int input_rows) {
    const int N = in.N();
    Activations& a = m.a;
    const Fp8 format = m.fp8.recipe.gradient;
    float* inverse = scale_inverse(m, l, Operand::gradient);
    if (l.db) be::bias_backward(ctx, l.db, dout, rows, l.out);
    be::transpose_codes(ctx, a.inputs, all_codes(ctx, m, a.full, s.codes[(size_t)l.matrix], input_rows, l.in, in), N, l.in);

    const bool whole = rows == N;  // then they are transposed as they are made
    uint8_t* mine = a.codes + (whole ? 0 : (size_t)m.ranks->mesh.tp.rank * rows * l.out);
    quantize(ctx, m, l, Operand::gradient, mine, whole ? a.gradients : nullptr, inverse, dout, rows, l.out);
    const uint8_t* codes = all_codes(ctx, m, a.codes, mine, rows, l.out, in);
    if (!whole) be::transpose_codes(ctx, a.gradients, codes, N, l.out);

    be::fp8_linear_backward_weight(ctx, weight_gradient(m, in, l), a.gradients, a.inputs, inverse, input_inverse(m, s, l), N,
                                   l.in, l.out, format, of_product(m, in));
    be::fp8_linear_backward_input(ctx, dinp, codes, m.fp8.transposed[(size_t)l.block][(size_t)l.matrix], inverse,
                                  scale_inverse(m, l, Operand::weight), N, l.in, l.out, format);
}

// All rows of x (Nl, l.in).
static const floatX* column_input(be::Ctx& ctx, Model& m, const Rows& in, const Linear& l, const floatX* x) {
    measure(ctx, m, l, Operand::input, x, (size_t)local_rows(m, in) * l.in);
    return gather(ctx, m, x, in);
}
// A matrix that is cut by columns of its output (qkv, fc1): out (N, l.out) from all rows of x (Nl, C), and back.
static void column_forward(be::Ctx& ctx, Model& m, const Rows& in, const Linear& l, const BlockActs& s, floatX* out,
                           const floatX* x) {
    const int N = in.N(), Nl = local_rows(m, in);
    if (in_fp8(m, l.block)) return forward_in_fp8(ctx, m, in, l, s, out, x, Nl, l.b);
    be::linear_forward(ctx, out, column_input(ctx, m, in, l, x), l.w, l.b, N, l.in, l.out);
}
static void column_backward(be::Ctx& ctx, Model& m, const Rows& in, const Linear& l, const BlockActs& s, floatX* dinp,
                            const floatX* dout, const floatX* x) {
    const int N = in.N();
    floatX* sum = summand(m, dinp, in);
    if (in_fp8(m, l.block)) {
        backward_in_fp8(ctx, m, in, l, s, sum, dout, N, local_rows(m, in));
    } else {
        measure(ctx, m, l, Operand::gradient, dout, (size_t)N * l.out);
        be::linear_backward_weight(ctx, weight_gradient(m, in, l), l.db, dout, gather(ctx, m, x, in), N, l.in, l.out,
                                   of_product(m, in));
        be::linear_backward_input(ctx, sum, dout, l.w, N, l.in, l.out);
    }
    reduce(ctx, m, dinp, in);
}

// One that is cut by rows of its input (proj, fc2): out (Nl, C), this rank's rows of the sum, from x (N, l.in), and back.
static void row_forward(be::Ctx& ctx, Model& m, const Rows& in, const Linear& l, const BlockActs& s, floatX* out,
                        const floatX* x) {
    const int N = in.N();
    floatX* sum = summand(m, out, in);
    if (in_fp8(m, l.block)) {
        forward_in_fp8(ctx, m, in, l, s, sum, x, N, once(m, l.b));
    } else {
        measure(ctx, m, l, Operand::input, x, (size_t)N * l.in);
        be::linear_forward(ctx, sum, x, l.w, once(m, l.b), N, l.in, l.out);
    }
    reduce(ctx, m, out, in);
}
// All rows of dout; sets the weight's gradient. The bias's is summed over tp where rows are cut, so one rank adds it.
static const floatX* row_backward_weight(be::Ctx& ctx, Model& m, const Rows& in, const Linear& l, const floatX* dout,
                                         const floatX* x) {
    measure(ctx, m, l, Operand::gradient, dout, (size_t)local_rows(m, in) * l.out);
    const floatX* full = gather(ctx, m, dout, in);
    be::linear_backward_weight(ctx, weight_gradient(m, in, l), cut_rows(m, in) ? once(m, l.db) : l.db, full, x, in.N(), l.in,
                               l.out, of_product(m, in));
    return full;
}
static void row_backward(be::Ctx& ctx, Model& m, const Rows& in, const Linear& l, const BlockActs& s, floatX* dinp,
                         const floatX* dout, const floatX* x) {
    if (in_fp8(m, l.block)) return backward_in_fp8(ctx, m, in, l, s, dinp, dout, local_rows(m, in), in.N());
    const floatX* full = row_backward_weight(ctx, m, in, l, dout, x);
    be::linear_backward_input(ctx, dinp, full, l.w, in.N(), l.in, l.out);
}

// qkv, its queries and keys turned where positions are rotary.
static void qkv_forward(be::Ctx& ctx, Model& m, const Rows& in, const Linear& l, const BlockActs& s) {
    const LocalSizes& n = m.n;
    const int N = in.N(), HS = m.c.HS();
    const bool rope = m.c.position == Position::rope;
    if (rope && !in_fp8(m, l.block)) {
        const floatX* x = column_input(ctx, m, in, l, s.norm1);
        return be::linear_rope_forward(ctx, s.qkv, x, l.w, l.b, in.positions, m.cos_sin, N, l.in, n.NHl, n.NKVl, HS);
    }
    column_forward(ctx, m, in, l, s, s.qkv, s.norm1);
    if (rope) be::rope_forward(ctx, s.qkv, in.positions, m.cos_sin, N, n.NHl, n.NKVl, HS);
}
// fc1, act = activation(fc1). A GeLU in the product may differ from the op's own by a rounding, so not where backward computes
// act again.
static void fc1_forward(be::Ctx& ctx, Model& m, const Rows& in, const Linear& l, const BlockActs& s) {
    const int N = in.N();
    const bool swiglu = m.c.activation == Activation::swiglu;
    if (in_fp8(m, l.block) || (!swiglu && m.recompute == Recompute::selective)) {
        column_forward(ctx, m, in, l, s, s.fc1, s.norm2);
        return activation_forward(ctx, m, input_of(m, linear_of(m, l.block, Matrix::fc2), s, s.act), s.fc1, N);
    }
    const floatX* x = column_input(ctx, m, in, l, s.norm2);
    if (swiglu) be::linear_swiglu_forward(ctx, s.act, s.fc1, x, l.w, l.b, N, l.in, m.n.Fl);
    else be::linear_gelu_forward(ctx, s.act, s.fc1, x, l.w, l.b, N, l.in, l.out);
}
// out = mid + fc2; branch is scratch.
static void fc2_forward(be::Ctx& ctx, Model& m, const Rows& in, const Linear& l, const BlockActs& s, floatX* out,
                        floatX* branch) {
    if (m.n.tp_size == 1 && !in_fp8(m, l.block)) {
        measure(ctx, m, l, Operand::input, s.act, (size_t)in.N() * l.in);
        return be::linear_residual_forward(ctx, out, s.mid, s.act, l.w, l.b, in.N(), l.in, l.out);
    }
    row_forward(ctx, m, in, l, s, branch, s.act);
    be::residual_forward(ctx, out, s.mid, branch, (size_t)local_rows(m, in) * l.out);
}
// dfc1 from the gradient of fc2's output; dact is scratch.
static void fc2_backward(be::Ctx& ctx, Model& m, const Rows& in, const Linear& l, const BlockActs& s, floatX* dfc1,
                         floatX* dact, const floatX* dout) {
    const int N = in.N();
    const bool swiglu = m.c.activation == Activation::swiglu;
    if (in_fp8(m, l.block)) {
        floatX* d = swiglu ? dact : dfc1;
        row_backward(ctx, m, in, l, s, d, dout, s.act);
        const Output for_fc1 = gradient_of(m, linear_of(m, l.block, Matrix::fc1), dfc1);
        if (swiglu) return be::swiglu_backward(ctx, for_fc1, d, s.fc1, N, l.in);
        return be::gelu_backward(ctx, for_fc1, d, s.fc1, N, l.in);
    }
    const floatX* full = row_backward_weight(ctx, m, in, l, dout, s.act);
    if (swiglu) be::linear_swiglu_backward_input(ctx, dfc1, dact, full, l.w, s.fc1, N, l.in, l.out);
    else be::linear_gelu_backward_input(ctx, dfc1, full, l.w, s.fc1, N, l.in, l.out);
}

// Block i of the slot's chunk.
static void block_forward(be::Ctx& ctx, Model& m, int i, const Rows& in) {
    const ModelConfig& c = m.c;
    const LocalSizes& n = m.n;
    const int block = in.slot->first_block + i, Nl = local_rows(m, in);
    const BlockParams<floatX>& p = m.p.blocks[(size_t)block];
    const BlockActs s = activations(m, in, i);
    const floatX* x = in.slot->x[(size_t)i];
    floatX *branch = m.a.branch, *out = in.slot->x[(size_t)i + 1];
    const auto linear = [&](Matrix matrix) { return linear_of(m, block, matrix); };

    norm_forward(ctx, c, input_of(m, linear(Matrix::qkv), s, s.norm1), s.mean1, s.rstd1, nullptr, x, nullptr, p.norm1_w,
                 p.norm1_b, Nl);
    qkv_forward(ctx, m, in, linear(Matrix::qkv), s);
    if (in.cache)
        be::attention_decode(ctx, s.att, in.cache->keys_of(block), in.cache->values_of(block), s.qkv, m.slopes, 1,
                             in.cache->length, c.T, n.NHl, n.NKVl, c.HS(), m.attention_scale());
    else
        be::attention_forward(ctx, s.att, s.lse, s.qkv, m.slopes, in.doc_start, in.B, in.T, n.NHl, n.NKVl, c.HS(),
                              m.attention_scale());
    row_forward(ctx, m, in, linear(Matrix::proj), s, branch, s.att);
    norm_forward(ctx, c, input_of(m, linear(Matrix::fc1), s, s.norm2), s.mean2, s.rstd2, s.mid, x, branch, p.norm2_w, p.norm2_b,
                 Nl);  // mid = x + branch
    fc1_forward(ctx, m, in, linear(Matrix::fc1), s);
    fc2_forward(ctx, m, in, linear(Matrix::fc2), s, out, branch);
}

// Brings back what the forward pass did not keep, from what it did: the same ops on the same inputs, so the same bits.
static void block_recompute(be::Ctx& ctx, Model& m, int i, const Rows& in) {
    const ModelConfig& c = m.c;
    const int block = in.slot->first_block + i, N = in.N(), Nl = local_rows(m, in);
    const BlockParams<floatX>& p = m.p.blocks[(size_t)block];
    const BlockActs s = activations(m, in, i);
    if (m.recompute == Recompute::full) block_forward(ctx, m, i, in);
    if (m.recompute == Recompute::selective) {
        const auto linear = [&](Matrix matrix) { return linear_of(m, block, matrix); };
        norm_forward(ctx, c, input_of(m, linear(Matrix::qkv), s, s.norm1), s.mean1, s.rstd1, nullptr, in.slot->x[(size_t)i],
                     nullptr, p.norm1_w, p.norm1_b, Nl);
        norm_forward(ctx, c, input_of(m, linear(Matrix::fc1), s, s.norm2), s.mean2, s.rstd2, nullptr, s.mid, nullptr, p.norm2_w,
                     p.norm2_b, Nl);
        activation_forward(ctx, m, input_of(m, linear(Matrix::fc2), s, s.act), s.fc1, N);
        if (!in_fp8(m, block)) return;
        quantize_input(ctx, m, linear(Matrix::qkv), s, s.norm1, Nl);
        quantize_input(ctx, m, linear(Matrix::proj), s, s.att, N);
        quantize_input(ctx, m, linear(Matrix::fc1), s, s.norm2, Nl);
        quantize_input(ctx, m, linear(Matrix::fc2), s, s.act, N);
    }
}

// On entry dx is the gradient of the block's output, on return that of its input. Both halves have the same shape: through the
// branch from its last op to its norm, whose gradient is added to what flows past the branch.
static void block_backward(be::Ctx& ctx, Model& m, int i, const Rows& in) {
    const ModelConfig& c = m.c;
    const LocalSizes& n = m.n;
    const int block = in.slot->first_block + i, Nl = local_rows(m, in);
    const BlockParams<floatX>& p = m.p.blocks[(size_t)block];
    const BlockParams<real>& g = m.g.blocks[(size_t)block];
    const BlockActs s = activations(m, in, i);
    floatX *dx = m.a.dx, *dnorm = m.a.dnorm, *dnarrow = m.a.dnarrow, *dwide = m.a.dwide;
    const auto linear = [&](Matrix matrix) { return linear_of(m, block, matrix); };

    block_recompute(ctx, m, i, in);
    m.of_block.begin(ctx, block);

    fc2_backward(ctx, m, in, linear(Matrix::fc2), s, dwide, dnarrow, dx);
    column_backward(ctx, m, in, linear(Matrix::fc1), s, dnorm, dwide, s.norm2);
    norm_backward(ctx, c, dx, g.norm2_w, g.norm2_b, dnorm, s.mid, p.norm2_w, s.mean2, s.rstd2, Nl, Acc::Add);

    row_backward(ctx, m, in, linear(Matrix::proj), s, dnarrow, dx, s.att);
    if (c.position == Position::rope)
        be::attention_rope_backward(ctx, dwide, dnarrow, s.att, s.lse, s.qkv, in.doc_start, in.positions, m.cos_sin, in.B, in.T,
                                    n.NHl, n.NKVl, c.HS(), m.attention_scale(), m.a.dq_sums);
    else
        be::attention_backward(ctx, dwide, dnarrow, s.att, s.lse, s.qkv, m.slopes, in.doc_start, in.B, in.T, n.NHl, n.NKVl,
                               c.HS(), m.attention_scale(), m.a.dq_sums);
    column_backward(ctx, m, in, linear(Matrix::qkv), s, dnorm, dwide, s.norm1);
    norm_backward(ctx, c, dx, g.norm1_w, g.norm1_b, dnorm, in.slot->x[(size_t)i], p.norm1_w, s.mean1, s.rstd1, Nl, Acc::Add);
    end_block(ctx, m, block, in);
}

// ---------------------------------------------------------------------------------------------------------------------------
// 4  The whole model

static void clear_sums(be::Ctx& ctx, Model& m) {
    const LossSums none;
    be::upload(ctx, m.a.sums, &none, sizeof none);
}
// Waits for the ops before it.
static LossSums read_sums(be::Ctx& ctx, const Model& m) {
    LossSums sums;
    be::download(ctx, &sums, m.a.sums, sizeof sums);
    return sums;
}

// Clears the gradients that a step only adds to: vectors and embeddings. Those of matrices in blocks and of the head, most of
// the memory, are set by the first micro-batch's products (Rows::gradients), which saves clearing and reading them. In bf16 the
// first micro-batch sets all.
static void begin_gradients(be::Ctx& ctx, Model& m) {
    if (m.of_block.used()) return;
    const bool set_by_head = m.c.tied && m.table.part.last;
    if (m.g.wte && !set_by_head) be::clear(ctx, m.g.wte, (size_t)m.n.Vpl * m.c.C * sizeof(real));
    if (m.g.wpe) be::clear(ctx, m.g.wpe, (size_t)m.c.T * m.c.C * sizeof(real));
    be::clear(ctx, m.grads.from(m.table.decayed).data, (m.table.size - m.table.decayed) * sizeof(real));
}

// Each tp rank has rows of the vocabulary, and zero for the other tokens; the first adds the positions.
static void embed_forward(be::Ctx& ctx, Model& m, const Rows& in) {
    const ModelConfig& c = m.c;
    const Slot& s = *in.slot;
    floatX* embedded = c.embedding_norm ? s.embedded : s.x[0];
    be::embedding_forward(ctx, summand(m, embedded, in), in.tokens, in.positions, m.p.wte, once(m, m.p.wpe), in.N(), c.C,
                          m.n.v0, m.n.Vpl);
    reduce(ctx, m, embedded, in);
    if (c.embedding_norm)
        be::layernorm_forward(ctx, s.x[0], s.emb_mean, s.emb_rstd, nullptr, embedded, nullptr, m.p.emb_norm_w, m.p.emb_norm_b,
                              local_rows(m, in), c.C, (real)c.eps);
}

static void embed_backward(be::Ctx& ctx, Model& m, const Rows& in) {
    const ModelConfig& c = m.c;
    const Slot& s = *in.slot;
    floatX* dembedded = m.a.dx;
    m.of_block.begin(ctx, TensorSpec::embedding);
    if (c.embedding_norm) {
        dembedded = m.a.dnorm;
        be::layernorm_backward(ctx, dembedded, m.g.emb_norm_w, m.g.emb_norm_b, m.a.dx, s.embedded, m.p.emb_norm_w, s.emb_mean,
                               s.emb_rstd, local_rows(m, in), c.C, Acc::Set);
    }
    be::embedding_backward(ctx, m.g.wte, m.g.wpe, gather(ctx, m, dembedded, in), in.tokens, in.positions, in.N(), c.C, m.n.v0,
                           m.n.Vpl);
    end_block(ctx, m, TensorSpec::embedding, in);
}

// Loss of a chunk of rows, whose logits become their gradient; of vocabulary shards after an exchange of their statistics.
static void classify(be::Ctx& ctx, Model& m, const int* targets, int row, int rows, real loss_scale, real z_coef,
                     bool training) {
    Activations& a = m.a;
    const LocalSizes& n = m.n;
    const Axis& tp = m.ranks->mesh.tp;
    if (tp.size == 1)
        return be::classifier(ctx, a.logits, a.loss + row, a.zloss + row, a.lse + row, targets, rows, m.c.V, n.Vpl, loss_scale,
                              z_coef, training);
    real* mine = a.statistics + (size_t)tp.rank * 2 * rows;
    be::classifier_statistics(ctx, mine, a.logits, targets, rows, n.v0, n.Vl, n.Vpl);
    be::all_gather(ctx, m.ranks->tp, a.statistics, mine, (size_t)2 * rows);
    be::classifier_shard(ctx, a.logits, a.loss + row, a.zloss + row, a.lse + row, targets, a.statistics, tp.size, rows, n.v0,
                         n.Vl, n.Vpl, loss_scale, z_coef, training);
}

// Final norm, logits in chunks of rows, loss. With `training`, each chunk's logits become their gradient in place and are sent
// back through the head at once, so a (N, V) matrix never exists; dx is then the gradient of the last block's output. Adds to
// the sums of the model.
static void head(be::Ctx& ctx, Model& m, const Rows& in, real loss_scale, real z_coef, bool training) {
    const ModelConfig& c = m.c;
    Activations& a = m.a;
    const floatX* x = in.slot->out();
    const int N = in.N(), Nl = local_rows(m, in), C = c.C;
    norm_forward(ctx, c, a.final_norm, a.final_mean, a.final_rstd, nullptr, x, nullptr, m.p.final_norm_w, m.p.final_norm_b, Nl);
    const floatX* normed = gather(ctx, m, a.final_norm, in);
    floatX* dnormed = summand(m, a.dnorm, in);
    if (training) m.of_block.begin(ctx, TensorSpec::head);
    for (int row = 0; row < N; row += a.head_rows) {
        const int rows = std::min(a.head_rows, N - row);
        const floatX* chunk = normed + (size_t)row * C;
        be::linear_forward(ctx, a.logits, chunk, m.p.head, nullptr, rows, C, m.n.Vpl);
        classify(ctx, m, in.targets + row, row, rows, loss_scale, z_coef, training);
        if (!training) continue;
        be::linear_backward_weight(ctx, m.g.head, nullptr, a.logits, chunk, rows, C, m.n.Vpl,
                                   row ? Acc::Add : of_product(m, in));
        be::linear_backward_input(ctx, dnormed + (size_t)row * C, a.logits, m.p.head, rows, C, m.n.Vpl);  // may overwrite chunk
    }
    if (training) {
        reduce(ctx, m, a.dnorm, in);
        norm_backward(ctx, c, a.dx, m.g.final_norm_w, m.g.final_norm_b, a.dnorm, x, m.p.final_norm_w, a.final_mean,
                      a.final_rstd, Nl, Acc::Set);
        end_block(ctx, m, TensorSpec::head, in);
    }
    be::loss_sums(ctx, a.sums, a.loss, a.zloss, a.lse, in.targets, N);
}

// Through the slot's chunk of layers: from tokens or the activations in x[0] to out(). `need(end)` is called before matrices
// that lie before this element are read.
template <class Need>
static void model_forward(be::Ctx& ctx, Model& m, const Rows& in, Need need) {
    const auto begin_of = [&](size_t block) {
        return block < m.p.blocks.size() ? (size_t)(m.p.blocks[block].qkv_w - m.params) : m.table.decayed;
    };
    need(begin_of(0));
    if (in.slot->first) embed_forward(ctx, m, in);
    for (int i = 0; i < (int)in.slot->blocks.size(); i++) {
        need(begin_of((size_t)(in.slot->first_block + i + 1)));
        prepare_weights(ctx, m, in.slot->first_block + i);
        block_forward(ctx, m, i, in);
    }
}
static void model_forward(be::Ctx& ctx, Model& m, const Rows& in) {
    model_forward(ctx, m, in, [](size_t) {});
}

// Back, from dx to dx. `finished(block)` is called when a block's gradients have their last summand of this micro-batch.
template <class Finished>
static void model_backward(be::Ctx& ctx, Model& m, const Rows& in, Finished finished) {
    for (int i = (int)in.slot->blocks.size() - 1; i >= 0; i--) {
        block_backward(ctx, m, i, in);
        finished(in.slot->first_block + i);
    }
    if (in.slot->first) embed_backward(ctx, m, in);
}

// ---------------------------------------------------------------------------------------------------------------------------
// 5  One training step

// fp32 weights, moments and counters live in Model; this is what a step needs besides.
struct Trainer {
    be::Ctx& ctx;
    Model& m;
    const TrainOptions& o;
    const Schedule& schedule;
    const DataLoader& data;
    TrainingState state;  // counters: the position in the run
    Batch micro_batch;    // the current one
    Fp8State fp8;         // of all layers, the same on every rank
    Guard guard;
    Verdict verdict;  // on the last step
    Steadiness steadiness;
    nlohmann::ordered_json health;  // of the last step's layers; null: they were not examined
    BatchRanges discards;           // batches that are drawn and dropped
    ParameterGatherer gatherer;
    MemoryCheck memory;
    PlantedFaults faults;
    LayerHealth layers;
    std::function<bool()> stop = [] { return false; };  // asked before each micro-batch, with the same answer on every rank

    Trainer(be::Ctx& c, Model& model, const TrainOptions& options, const Schedule& s, const DataLoader& loader,
            const TrainingState& position)
        : ctx(c),
          m(model),
          o(options),
          schedule(s),
          data(loader),
          state(position),
          guard(guard_options(o)),
          gatherer(ctx, m.ranks->dp, m.shards, !o.no_overlap),
          memory(o.check_weight_hash_across_dp_replicas_interval > 0, ctx, m.ranks->world, m.ranks->mesh, m.table, m.shards),
          faults(ctx, m.table, m.shards, m.ranks->mesh.world.rank),
          layers(ctx, *m.ranks, m.table, m.shards, m.counted, m.c.L) {}
    int64_t batch() const { return state.batch(); }  // the next one's number
};

// Elements of the residual stream that this rank has of a micro-batch.
static size_t stream_size(const Model& m, const Rows& in) { return (size_t)local_rows(m, in) * m.c.C; }

static PipelineLinks pipeline_links(be::Ctx& ctx, Model& m) {
    std::vector<size_t> slots;
    for (const auto& chunk : m.a.chunks) slots.push_back(chunk.size());
    return PipelineLinks(ctx, *m.ranks, (int)m.stages.size(), slots);
}

// Forward and backward over this rank's micro-batches of a global batch, in the pipeline's order: sets grads and the sums.
// finished(block) is called when a block's gradients have their last summand. False if the run is to stop: then the
// micro-batches that had begun are done, on every rank the same, and the gradients are of no use.
template <class Finished>
static bool run_micro_batches(Trainer& t, int64_t global_batch, real loss_scale, Finished finished) {
    Model& m = t.m;
    begin_gradients(t.ctx, m);
    clear_sums(t.ctx, m);
    const Mesh& mesh = m.ranks->mesh;
    const int B = t.o.micro_batch_size, micro_batches = (int)(global_batch / ((int64_t)B * mesh.dp.size));
    std::vector<std::vector<Rows>> rows;
    for (const auto& slots : m.a.chunks) rows.emplace_back(slots.size());
    PipelineLinks links = pipeline_links(t.ctx, m);

    int end = micro_batches;  // of those that are to be done
    for (const PipelineEvent& e : pipeline_schedule(mesh.pp.size, mesh.pp.rank, mesh.vpp, micro_batches)) {
        if (e.pass == Pass::forward && e.chunk == 0 && e.micro_batch < end && t.stop()) end = e.micro_batch;
        if (e.micro_batch >= end) continue;
        Slot& slot = m.a.slot(e.chunk, e.micro_batch);
        Rows& in = rows[(size_t)e.chunk][(size_t)e.micro_batch % rows[(size_t)e.chunk].size()];
        if (e.pass == Pass::forward) {
            const int64_t first = t.state.sample() + ((int64_t)e.micro_batch * mesh.dp.size + mesh.dp.rank) * B;
            t.data.fetch(first, B, t.micro_batch);
            t.faults.in_tokens(t.micro_batch, m.c.V, first, t.batch());
            in = stage(t.ctx, t.micro_batch, slot);
            in.gradients = e.micro_batch ? Acc::Add : Acc::Set;
            in.rounding_key = rounding_key((uint64_t)t.o.seed, first, RngPurpose::gradients);
            links.receive_input(slot.x[0], stream_size(m, in), e.chunk, e.micro_batch);
            model_forward(t.ctx, m, in, [&](size_t end) {
                links.progress();
                t.gatherer.need(end);
            });
            links.send_output(slot.out(), stream_size(m, in), e.chunk, e.micro_batch);
        } else {
            links.receive_gradient(m.a.dx, stream_size(m, in), e.chunk, e.micro_batch);
            t.gatherer.finish();
            if (slot.last) head(t.ctx, m, in, loss_scale, (real)t.o.z_loss_strength, true);
            model_backward(t.ctx, m, in, [&](int block) {
                links.progress();
                if (e.micro_batch == micro_batches - 1) finished(block);
            });
            links.send_gradient(slot.x[0], m.a.dx, stream_size(m, in), e.chunk, e.micro_batch);
        }
    }
    links.finish();
    return end == micro_batches;
}

// Then this rank's parts of grads are sums over all ranks. False if the run is to stop.
static bool accumulate_gradients(Trainer& t, int64_t global_batch, real loss_scale) {
    Model& m = t.m;
    GradientReducer reducer(t.ctx, m.ranks->dp, m.shards, m.table, m.grads, !t.o.no_overlap);
    const bool done = run_micro_batches(t, global_batch, loss_scale, [&](int block) {
        reduce_replicas(t.ctx, *m.ranks, m.table, m.grads, block);
        reducer.ready((size_t)(m.p.blocks[(size_t)block].qkv_w - m.params));
    });
    if (!done) return false;
    reduce_shared(t.ctx, *m.ranks, m.table, m.grads, m.c.tied);
    reducer.finish();
    return true;
}

// The same with each rank's own gradients computed twice, which must have the same bits: if they have not, the machine computes
// wrong, and the run ends with the rank, its host and the first tensor.
static bool accumulate_gradients_twice(Trainer& t, int64_t global_batch, real loss_scale) {
    Model& m = t.m;
    Ranks& ranks = *m.ranks;
    GradientHashes once, again;
    for (GradientHashes* hashes : {&once, &again}) {
        if (!run_micro_batches(t, global_batch, loss_scale, [](int) {})) return false;
        t.faults.in_own_gradients(m.grads, t.batch());
        *hashes = hash_gradients(t.ctx, m.table, m.grads, read_sums(t.ctx, m));
    }
    require_equal(once, again, m.table, ranks.world, t.batch());
    for (int block = 0; block < (int)m.g.blocks.size(); block++) reduce_replicas(t.ctx, ranks, m.table, m.grads, block);
    reduce_shared(t.ctx, ranks, m.table, m.grads, m.c.tied);
    GradientReducer(t.ctx, ranks.dp, m.shards, m.table, m.grads, false).finish();
    return true;
}

// AdamW on this rank's parts, whose new parameters then go to all: first the vectors, which every block needs, then the
// matrices in the order of the forward pass.
static void update(Trainer& t, double lr, double weight_decay, double grad_scale) {
    Model& m = t.m;
    const int64_t step = t.state.updates + 1;
    for (const bool decay : {false, true})
        for (const Bucket& b : m.shards.buckets) {
            if (b.decay != decay) continue;
            const auto update_part = [&](size_t first, size_t n, const Rounding& rounding) {
                const size_t shard = b.shard + first - b.mine;
                be::adamw(t.ctx, m.params + first, m.lower ? m.lower + shard : nullptr, m.m.from(shard), m.v.from(shard),
                          m.grads.from(first), n, (real)lr, (real)t.o.adam_beta1, (real)t.o.adam_beta2, (real)t.o.adam_eps,
                          decay ? (real)weight_decay : real(0), (real)grad_scale, step, rounding);
            };
            if (m.m.is_bf16 || m.v.is_bf16)
                for_each_rounding(m.table, b.mine, b.mine + b.n, rounding_key((uint64_t)t.o.seed, step), update_part);
            else update_part(b.mine, b.n, {});
            t.gatherer.start(b, m.params);
        }
    t.faults.in_update(m.m, t.batch());
    t.memory.remember(memory_of(m));
}

// The i-th of this rank's FP8 tensors among those of all layers.
static size_t among_all_layers(const Model& m, size_t i) {
    return (size_t)m.table.part.layers[i / fp8_tensors] * fp8_tensors + i % fp8_tensors;
}
// Whether this step is in FP8, or measures for steps that will be; its scales.
static void begin_step_in_fp8(Trainer& t) {
    EightBit& f = t.m.fp8;
    if (!f.recipe.on) return;
    const int64_t start = fp8_start(t.o, t.state);
    f.on = t.state.step >= start;
    CHECK(f.on || f.after_bf16, "no memory was planned for step %lld in bf16", (long long)t.state.step);
    f.measuring = !f.on && t.state.step >= start - t.o.fp8_calibration_steps;
    f.current = f.recipe.current || t.fp8.measured() == 0;
    f.prepared.assign(f.prepared.size(), false);
    const size_t tensors = f.blocks.size() * fp8_tensors;
    be::clear(t.ctx, f.amax, tensors * sizeof(float));
    if (!f.on || f.current) return;
    std::vector<float> scales, inverses;
    for (size_t i = 0; i < tensors; i++) {
        scales.push_back(t.fp8.scales[among_all_layers(t.m, i)]);
        inverses.insert(inverses.end(), 4, 1.0f / scales.back());
    }
    be::upload(t.ctx, f.scale, scales.data(), scales.size() * sizeof(float));
    be::upload(t.ctx, f.inverse, inverses.data(), inverses.size() * sizeof(float));
}
// The size of Adam's second moments, bias corrected, in the gradient's units: the square root of their norm over all ranks.
static double second_moments(Trainer& t) {
    Model& m = t.m;
    clear_sums(t.ctx, m);
    for (const Range& r : m.counted)
        m.shards.for_each_part(r.begin, r.end - r.begin, [&](size_t, size_t shard, size_t n) {
            be::add_squares(t.ctx, &m.a.sums->squares, m.v.from(shard), n);
        });
    const double squares = reduce_sums(*m.ranks, read_sums(t.ctx, m)).squares;
    return std::sqrt(std::sqrt(squares) / (1 - std::pow(t.o.adam_beta2, (double)(t.state.updates + 1))));
}
// After an update: the next step's scales, from the largest elements over all ranks; when FP8 is to begin.
static void end_step_in_fp8(Trainer& t, double loss, double norm) {
    EightBit& f = t.m.fp8;
    if (f.recipe.on && t.o.fp8_start == "auto" && t.state.fp8_start < 0 && t.state.scheduled >= t.schedule.warmup) {
        if (t.verdict.kind == Verdict::normal) t.steadiness.observe(t.state.step, loss, norm, second_moments(t));
        if (t.steadiness.steady()) t.state.fp8_start = t.state.step + 1 + (f.recipe.current ? 0 : t.o.fp8_calibration_steps);
    }
    if (f.on || f.measuring) {
        std::vector<float> mine(f.blocks.size() * fp8_tensors), all(t.fp8.scales.size(), 0.0f);
        be::download(t.ctx, mine.data(), f.amax, mine.size() * sizeof(float));
        for (size_t i = 0; i < mine.size(); i++) all[among_all_layers(t.m, i)] = mine[i];
        t.fp8.update(largest_of_all_ranks(*t.m.ranks, all));
    }
}

// The counters at the next batch that is not left out. On the way weights, moments and learning rate stay as they are.
static Counters next_batch(const Trainer& t) { return t.schedule.next(t.state, t.state.skips, t.discards); }

// In FP8, of each tensor's elements, how many became zero and how many the largest number.
static CodeShares code_shares(const Model& m) {
    CodeShares shares((size_t)m.c.L * fp8_tensors);
    for (size_t i = 0; i < m.fp8.counts.size(); i++) {
        const EightBit::Count& count = m.fp8.counts[i];
        shares.set(among_all_layers(m, i), count.codes, count.zero, count.largest);
    }
    return shares;
}

// One global batch: forward and backward over its micro-batches, then norm, clipping and update. Every unmasked target of the
// global batch counts the same: loss_scale is one over their number, known before the first backward, and everything sums.
// New parameters are still on their way when it returns: t.gatherer.finish() before anything but the next step reads them.
// Nothing is returned, and nothing but the gradients has changed, if the run is to stop before the step is done.
static std::optional<StepStats> train_step(Trainer& t) {
    const auto start = std::chrono::steady_clock::now();
    const int64_t global_batch = t.schedule.global_batch(t.state.consumed);
    const double lr = t.schedule.lr(t.state.scheduled), weight_decay = t.schedule.weight_decay(t.state.scheduled);
    const int64_t targets = t.data.unmasked(t.state.sample(), global_batch);
    const real loss_scale = targets > 0 ? (real)(1.0 / targets) : real(0);

    begin_step_in_fp8(t);
    const bool examines = due(t.o.log_health_interval, t.state.step + 1);
    t.m.fp8.counts.assign(examines && t.m.fp8.on ? t.m.fp8.blocks.size() * fp8_tensors : 0, {});
    t.faults.in_memory(memory_of(t.m), t.batch(), [&] { t.gatherer.finish(); });
    const bool twice = due(t.o.detect_nondeterminism, t.state.step + 1);
    if (!(twice ? accumulate_gradients_twice : accumulate_gradients)(t, global_batch, loss_scale)) {
        t.m.fp8.on = t.m.fp8.measuring = false;
        return {};
    }
    t.faults.in_summed_gradients(t.m.grads, t.batch());
    t.memory.require_unchanged(memory_of(t.m), t.state.step);
    for (const Range& r : t.m.counted) be::add_squares(t.ctx, &t.m.a.sums->squares, t.m.grads.from(r.begin), r.end - r.begin);
    const LossSums sums = reduce_sums(*t.m.ranks, read_sums(t.ctx, t.m));
    const double norm = std::sqrt(sums.squares), ce = sums.ce / sums.n, z = sums.z / sums.n;
    // Clipping (Megatron): all gradients times clip / (norm + 1e-6), if that is below 1.
    const double clip = t.o.clip_grad > 0 ? std::min(1.0, t.o.clip_grad / (norm + 1e-6)) : 1.0;
    t.verdict = t.guard.judge(t.state.step + 1, t.batch(), ce + z, norm);
    if (t.verdict.apply) {
        if (examines) t.layers.before_update(memory_of(t.m));
        update(t, lr, weight_decay, clip);
        t.health = nlohmann::ordered_json();
        if (examines) t.health = t.layers.after_update(memory_of(t.m), t.m.grads, t.m.fp8.on ? code_shares(t.m) : CodeShares());
        end_step_in_fp8(t, ce, norm);
        t.state.updates++;
        t.state.scheduled += global_batch;
    }
    t.m.fp8.on = t.m.fp8.measuring = false;  // what evaluates and generates reads the weights as they are written to files
    t.state.step++;
    t.state.consumed += global_batch;

    t.state.loss = ce;

    StepStats s;
    s.step = t.state.step, s.consumed_samples = t.state.consumed, s.global_batch = (int)global_batch;
    s.tokens = t.state.tokens += global_batch * t.o.seq_length;
    s.loss = ce, s.z_loss = z, s.grad_norm = norm, s.lr = lr;
    s.lse_mean = sums.lse / sums.n, s.lse_max = sums.lse_max;
    s.skipped = t.state.step - t.state.updates, s.applied = t.verdict.apply;
    s.step_ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
    s.tokens_per_s = global_batch * t.o.seq_length / (s.step_ms * 1e-3);
    return s;
}

static void wait_for_device(be::Ctx& ctx) {
    char byte;
    static void* const memory = be::allocate_memory(1);
    be::download(ctx, &byte, memory, 1);
}

// A whole step on random tokens, to be timed: forward, backward, norm, clipping, AdamW.
class RandomStep {
public:
    double forward = 0, backward = 0, update = 0;  // seconds of the last step

    // random: the weights as well; zeros take as long, but for their making
    RandomStep(be::Ctx& ctx, const ModelConfig& c, int B, int T, Recompute recompute, bool random = true) : ctx_(ctx), m_(c) {
        plan_memory(m_, recompute, B, T, choose_head_rows(ctx, m_.n, (int64_t)B * T));
        allocate(ctx, m_);
        if (random) initialize(ctx, m_, 1);
        batch_.B = B, batch_.T = T;
        for (int i = 0; i < B * T; i++) {
            batch_.tokens.push_back((int)(i * 2654435761u % c.V));
            batch_.targets.push_back((int)((i + 1) * 2654435761u % c.V));
            batch_.positions.push_back(i % T);
        }
    }

    // A micro-batch; the first of a step sets the gradients, later ones add to them.
    void micro_batch(Acc gradients = Acc::Set) {
        double start = monotonic_seconds();
        Rows rows = stage(ctx_, batch_, m_.a.slot());
        rows.gradients = gradients;
        if (gradients == Acc::Set) begin_gradients(ctx_, m_);
        clear_sums(ctx_, m_);
        model_forward(ctx_, m_, rows);
        lap(forward, start);
        head(ctx_, m_, rows, real(1.0 / (batch_.B * batch_.T)), 0, true);
        model_backward(ctx_, m_, rows, [](int) {});
        lap(backward, start);
    }
    void run() {
        micro_batch();
        double start = monotonic_seconds();
        const double norm = std::sqrt(be::sum_of_squares(ctx_, m_.grads, m_.table.size));
        be::adamw(ctx_, m_.params, m_.lower, m_.m, m_.v, m_.grads, m_.table.size, 1e-4f, 0.9f, 0.95f, 1e-8f, 0.1f,
                  (real)std::min(1.0, 1 / norm), ++steps_, Rounding());
        lap(update, start);
    }

    size_t planned_bytes() const { return m_.arena.bytes(); }
    size_t parameters() const { return m_.table.size; }

private:
    void lap(double& part, double& start) {  // also waits, which costs a GPU some microseconds of a step
        wait_for_device(ctx_);
        part = monotonic_seconds() - start, start = monotonic_seconds();
    }

    be::Ctx& ctx_;
    Model m_;
    Batch batch_;
    int64_t steps_ = 0;
};

// About how long a step of `samples` takes here, from a second of steps of a model with fewer layers, shorter sequences or, if
// it must be, smaller matrices, at the rate at which that one computes.
static double measured_step_seconds(be::Ctx& ctx, const ModelConfig& whole, const TrainOptions& o, int64_t samples, Peak peak) {
    ModelConfig c = whole;
    int B = o.micro_batch_size, T = o.seq_length;
    const Recompute recompute = recompute_policy(o.recompute_granularity);
    const auto flops = [](const ModelConfig& config, int64_t rows, int length) {
        return model_flops_per_token(config, length) * (double)rows;
    };
    const auto bytes = [&] {
        Model m(c);
        plan_memory(m, recompute, B, T, choose_head_rows(ctx, m.n, (int64_t)B * T));
        return m.arena.bytes();
    };
    c.L = std::min(c.L, 4);
    const double budget = 0.1 * std::max(peak.flops, 1e9);  // of a step: at a third of the peak 0.3 seconds
    while (B > 1 && flops(c, (int64_t)B * T, T) > budget) B /= 2;
    while (c.L > 1 && flops(c, (int64_t)B * T, T) > budget) c.L--;
    while (T > 64 && flops(c, (int64_t)B * T, T) > budget) T = (T + 1) / 2;
    while (c.C > 64 && bytes() > be::available_memory() / 4) {
        c.V = ceil_div(c.V, 2), c.Vp = round_up(c.V, 128), c.F = round_up(ceil_div(c.F, 2), 64);
        if (c.NH % 2 == 0 && c.NKV % 2 == 0) c.C /= 2, c.NH /= 2, c.NKV /= 2;
        else if (c.V < 1024) break;
    }
    RandomStep step(ctx, c, B, T, recompute, false);
    step.run();
    std::vector<double> passes, updates;
    for (const double end = monotonic_seconds() + 1; passes.size() < 2 || (monotonic_seconds() < end && passes.size() < 100);) {
        step.run();
        passes.push_back(step.forward + step.backward), updates.push_back(step.update);
    }
    const auto median = [](std::vector<double>& x) { return std::sort(x.begin(), x.end()), x[x.size() / 2]; };
    return median(passes) * flops(whole, samples * o.seq_length, o.seq_length) / flops(c, (int64_t)B * T, T) +
           median(updates) * (double)ParameterTable(whole).size / (double)step.parameters();
}

// ---------------------------------------------------------------------------------------------------------------------------
// 6  Inference

// Losses over samples [first, first + n), one for each data set, forward only; data-parallel ranks take micro-batches in turn.
// stop() is asked before each of them, and must answer the same on every rank: if it is true nothing is returned.
template <class Stop>
static std::optional<std::vector<LossSums>> evaluate(be::Ctx& ctx, Model& m, const DataLoader& data, int64_t first, int64_t n,
                                                     Stop stop) {
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
            data.gather(&samples[(size_t)mine], (int)std::min<int64_t>(m.a.B, all - mine), batch);
            for (int chunk = 0; chunk < mesh.vpp; chunk++) {
                Slot& slot = m.a.slot(chunk, (int)i);
                const Rows rows = stage(ctx, batch, slot);
                links.receive_input(slot.x[0], stream_size(m, rows), chunk, (int)i);
                model_forward(ctx, m, rows);
                links.send_output(slot.out(), stream_size(m, rows), chunk, (int)i);
                if (slot.last) head(ctx, m, rows, 0, 0, false);
            }
        }
        links.finish();
        sums.push_back(reduce_sums(*m.ranks, read_sums(ctx, m)));
    }
    return sums;
}

// Writes text one token at a time. The activations of `m` serve as scratch. All ranks that share a model take part, and get the
// same logits.
class Generator {
public:
    Generator(be::Ctx& ctx, Model& m) : ctx_(ctx), m_(m), links_(pipeline_links(ctx, m)), cache_(m.cache) {
        CHECK(cache_.keys, "no key/value cache was planned");
    }

    int length() const { return cache_.length; }
    int capacity() const { return m_.c.T; }

    // Starts afresh with a prompt of 1 .. capacity tokens: one pass over as many as the activations hold, then one by one.
    void prompt(const std::vector<int>& tokens) {
        const int n = (int)tokens.size();
        int at_once = std::min(n, m_.a.B * m_.a.T);
        if (at_once > m_.n.tp_size) at_once -= at_once % m_.n.tp_size;  // rows that can be cut
        CHECK(n >= 1 && n <= capacity(), "a prompt of %d tokens", n);
        cache_.length = 0;
        pass(tokens.data(), at_once, nullptr);
        cache_.length = at_once;
        for (int i = at_once; i < n; i++) append(tokens[i]);
    }

    void append(int token) {
        CHECK(length() < capacity(), "the context is full");
        pass(&token, 1, &cache_);
        cache_.length++;
    }

    // (V) logits of the token that comes next.
    const std::vector<float>& logits() {
        const ModelConfig& c = m_.c;
        Activations& a = m_.a;
        floatX* mine = a.next_logits + (size_t)m_.ranks->mesh.tp.rank * m_.n.Vpl;
        be::clear(ctx_, a.next_logits, (size_t)c.Vp * sizeof(floatX));
        if (m_.table.part.last) {
            norm_forward(ctx_, c, a.final_norm, a.final_mean, a.final_rstd, nullptr, a.branch, nullptr, m_.p.final_norm_w,
                         m_.p.final_norm_b, 1);
            be::linear_forward(ctx_, mine, a.final_norm, m_.p.head, nullptr, 1, c.C, m_.n.Vpl);
            be::all_gather(ctx_, m_.ranks->tp, a.next_logits, mine, (size_t)m_.n.Vpl);
        }
        be::all_reduce(ctx_, m_.ranks->pp, a.next_logits, (size_t)c.Vp);  // the other stages add zero
        HostSide<floatX> row(ctx_, a.next_logits, c.V);
        row.download();
        logits_.assign(row.data(), row.data() + c.V);
        return logits_;
    }

private:
    // n tokens through all layers; leaves the last one's row of the residual stream in branch, on the last stage.
    void pass(const int* tokens, int n, KeyValueCache* cache) {
        positions_.resize(n);
        for (int i = 0; i < n; i++) positions_[i] = length() + i;
        for (int chunk = 0; chunk < (int)m_.a.chunks.size(); chunk++) {
            Slot& slot = m_.a.slot(chunk);
            be::upload(ctx_, slot.tokens, tokens, n * sizeof(int));
            be::upload(ctx_, slot.positions, positions_.data(), n * sizeof(int));
            const Rows in = {slot.tokens, nullptr, slot.positions, nullptr, 1, n, &slot, cache};
            links_.receive_input(slot.x[0], stream_size(m_, in), chunk, passes_);
            if (slot.first) embed_forward(ctx_, m_, in);
            for (int i = 0; i < (int)slot.blocks.size(); i++) {
                block_forward(ctx_, m_, i, in);
                if (!cache) keep_keys_and_values(slot, i, n);
            }
            links_.send_output(slot.out(), stream_size(m_, in), chunk, passes_);
            if (slot.last) keep_last_row(in);
        }
        passes_ = (passes_ + 1) % 1000;
    }

    void keep_keys_and_values(const Slot& slot, int i, int n) {
        const ModelConfig& c = m_.c;
        const size_t kv = (size_t)m_.n.NKVl * c.HS(), bytes = kv * sizeof(floatX), stride = m_.n.QKVl * sizeof(floatX);
        const floatX* keys = slot.blocks[(size_t)i].qkv + (size_t)m_.n.NHl * c.HS();
        be::copy_rows(ctx_, cache_.keys_of(slot.first_block + i), bytes, keys, stride, bytes, n);
        be::copy_rows(ctx_, cache_.values_of(slot.first_block + i), bytes, keys + kv, stride, bytes, n);
    }

    // Where rows are cut, the last one is the last tp rank's.
    void keep_last_row(const Rows& in) {
        const size_t bytes = (size_t)m_.c.C * sizeof(floatX);
        const int rows = local_rows(m_, in);
        const bool mine = !cut_rows(m_, in) || m_.ranks->mesh.tp.rank == m_.n.tp_size - 1;
        if (mine) be::copy_rows(ctx_, m_.a.branch, bytes, in.slot->out() + (size_t)(rows - 1) * m_.c.C, bytes, bytes, 1);
        else be::clear(ctx_, m_.a.branch, bytes);
        if (cut_rows(m_, in)) be::all_reduce(ctx_, m_.ranks->tp, m_.a.branch, (size_t)m_.c.C);
    }

    be::Ctx& ctx_;
    Model& m_;
    PipelineLinks links_;
    KeyValueCache& cache_;
    int passes_ = 0;
    std::vector<int> positions_;
    std::vector<float> logits_;
};

// Samples up to max_new_tokens after `prompt`, calling emit(token) for each; stops at any of `ends`, or where emit answers false.
// The n-th token of sample k is a function of (seed, k, n) and the model alone.
template <class Emit>
static int sample_text(Generator& generator, const std::vector<int>& prompt, int max_new_tokens,
                       const SamplingOptions& sampling, uint64_t seed, uint32_t sample, const std::vector<int>& ends,
                       Emit emit) {
    generator.prompt(prompt);
    int n = 0;
    while (n < max_new_tokens && generator.length() < generator.capacity()) {
        const std::vector<float>& logits = generator.logits();
        const double uniform = uniform_at(seed, RngPurpose::sampling, sample, n);
        const int token = sample_token(logits.data(), (int)logits.size(), sampling, uniform);
        if (std::find(ends.begin(), ends.end(), token) != ends.end()) break;
        n++;
        if (!emit(token)) break;
        generator.append(token);
    }
    return n;
}

// ---------------------------------------------------------------------------------------------------------------------------
// 7  Commands

// What the run is, for the console, and as rows for the report.
struct RunTable {
    Table table;
    nlohmann::ordered_json rows = nlohmann::ordered_json::object();
    void exact(nlohmann::ordered_json value) { table.exact(std::move(value)); }
    void row(const std::string& label, const std::string& value, const std::string& prefix = "") {
        table.row(label, value);
        std::string key = prefix + label;
        for (int n = 2; rows.contains(key); n++) key = format("%s%s (%d)", prefix.c_str(), label.c_str(), n);
        rows[key] = value;
    }
};

// The grid, and how the model is dealt out.
static void describe_ranks(RunTable& t, const Model& m) {
    const Ranks& ranks = *m.ranks;
    const Mesh& mesh = ranks.mesh;
    t.row("ranks", mesh.text());
    if (mesh.tp.size > 1)
        t.row("tensor parallel", format("%d heads, %d feed-forward columns a rank%s", m.n.NHl, m.n.Fl,
                                        ranks.sequence_parallel ? ", rows between matrices cut (sequence parallel)" : ""));
    if (mesh.dp.size > 1)
        t.row("data parallel",
              format("%s, %zu message%s of at most %s parameters",
                     ranks.zero ? "optimizer state shared (ZeRO-1)" : "optimizer state on each rank (ZeRO off)",
                     m.shards.buckets.size(), m.shards.buckets.size() == 1 ? "" : "s",
                     human_count((double)ranks.bucket_elements).c_str()));
    if (mesh.pp.size > 1) {
        std::string layers;
        for (const int n : m.stages) layers += (layers.empty() ? "" : " ") + std::to_string(n);
        t.row("pipeline", "layers of the stages: " + layers);
    }
}

// Which of a model's blocks on this rank are computed in FP8, and how.
static void plan_8_bits(const be::Ctx& ctx, Model& m, const TrainOptions& o, bool after_bf16) {
    EightBit& f = m.fp8;
    f.recipe = fp8_recipe(o);
    f.after_bf16 = after_bf16;
    f.fast_accumulation = !o.no_fp8_fast_accumulation;
    if (f.recipe.on) f.blocks = blocks_in_fp8(ctx, o, m.c, m.table.part);
}

static RunTable describe_run(const Model& m, const TrainOptions& o, const Schedule& schedule, const be::Ctx& ctx,
                             const Peak& peak) {
    const ModelConfig& c = m.c;
    RunTable t;
    t.table.section("Run");
    t.row("name", run_name(o));
    t.row("output", o.out);
    t.table.section("Model");
    t.row("family", c.family + (o.preset.empty() ? "" : ", preset " + o.preset) + (o.model.empty() ? "" : ", from " + o.model));
    t.row("block", format("%s, %s head", family_description(c), c.tied ? "tied" : "own"));
    t.row("shape", format("%d layers, width %d, %d heads of %d%s, feed-forward %d", c.L, c.C, c.NH, c.HS(),
                          c.NKV != c.NH ? format(" (%d for keys and values)", c.NKV).c_str() : "", c.F));
    t.exact({{"layers", c.L}, {"width", c.C}, {"heads", c.NH}, {"key_value_heads", c.NKV}, {"feed_forward", c.F}});
    t.row("vocabulary", format("%s (padded to %s)", with_commas(c.V).c_str(), with_commas(c.Vp).c_str()));
    t.exact({{"tokens", c.V}, {"padded", c.Vp}});
    const size_t parameters = ParameterTable(c).trained;
    t.row("parameters", format("%s (%s)", with_commas((int64_t)parameters).c_str(), human_count((double)parameters).c_str()));
    t.exact(parameters);
    t.row("FLOPs per token", human_count(model_flops_per_token(c, o.seq_length)) + " (forward and backward, causal attention)");
    t.exact(model_flops_per_token(c, o.seq_length));
    t.table.section("Batch");
    const int64_t batch = schedule.final_batch;
    t.row("step",
          format("%s of %s = %s, in %s of %d%s", counted(batch, "sample").c_str(), counted(o.seq_length, "token").c_str(),
                 counted(batch * o.seq_length, "token").c_str(),
                 counted(batch / o.micro_batch_size / m.ranks->mesh.dp.size, "micro-batch", "micro-batches").c_str(),
                 o.micro_batch_size,
                 m.ranks->mesh.dp.size > 1 ? format(" on each of %d data-parallel ranks", m.ranks->mesh.dp.size).c_str() : ""));
    t.exact({{"samples", batch},
             {"tokens_per_sample", o.seq_length},
             {"micro_batch", o.micro_batch_size},
             {"data_parallel_ranks", m.ranks->mesh.dp.size}});
    if (schedule.rampup.samples)
        t.row("ramp-up", format("from %lld by %lld over %s samples", (long long)schedule.rampup.start,
                                (long long)schedule.rampup.increment, with_commas(schedule.rampup.samples).c_str()));
    t.row("run", format("%s, %s, %s tokens", counted(schedule.total_steps, "step").c_str(),
                        counted(schedule.total_samples, "sample").c_str(),
                        human_count((double)schedule.total_samples * o.seq_length).c_str()));
    t.exact({{"steps", schedule.total_steps},
             {"samples", schedule.total_samples},
             {"tokens", (double)schedule.total_samples * o.seq_length}});
    const std::string warmup = o.lr_warmup_iters ? counted(o.lr_warmup_iters, "step") : counted(schedule.warmup, "sample");
    t.row("learning rate", format("%s %g to %g, ", schedule.style.c_str(), schedule.max_lr, schedule.min_lr) +
                               (schedule.warmup ? "warm-up over " + warmup : "no warm-up"));
    t.table.section("Machine");
    t.row("backend", std::string(be::backend_name) + ", " + ctx.description());
    t.row("peak", peak.text());
    t.row("precision", format("%s storage, %s sums, gradients and optimizer%s", precision_name,
                              sizeof(real) == 4 ? "fp32" : "fp64", what_is_bf16(m.grads, m.m, m.v).c_str()));
    if (m.fp8.recipe.on)
        t.row("FP8", format("%s, %s scales, from step %s on%s", o.fp8_format.c_str(), o.fp8_recipe.c_str(), o.fp8_start.c_str(),
                            o.first_last_layers_bf16 ? format(", but the first %d and the last %d layers",
                                                              o.num_layers_at_start_in_bf16, o.num_layers_at_end_in_bf16)
                                                           .c_str()
                                                     : ""));
    t.row("recompute", o.recompute_granularity);
    if (m.ranks->mesh.world.size > 1) describe_ranks(t, m);
    t.table.section("Memory", Table::Values::amounts);
    const auto memory = [&](const std::string& purpose, size_t bytes) {
        t.row(purpose, human_bytes((double)bytes), "memory: "), t.exact(bytes);
    };
    for (const auto& [purpose, bytes] : m.arena.purposes()) memory(purpose, bytes);
    const size_t resident = resident_memory_bytes();
    memory("program, libraries, data order", resident);
    if (be::memory_is_host) memory("in all", m.arena.bytes() + resident);
    else memory("in all on the GPU", m.arena.bytes());
    return t;
}

static std::string describe(const DataSummary& s) {
    return format("%s tokens in %s document%s, %.1f%% of the samples", human_count((double)s.tokens).c_str(),
                  human_count((double)s.documents).c_str(), s.documents == 1 ? "" : "s", 100 * s.share);
}

// Takes over what the checkpoint `dir` ("": a new run) says of scales and outliers.
static void take_over_state(Trainer& t, const std::string& dir) {
    const TrainingState& s = t.state;
    t.fp8 = t.m.fp8.recipe.on ? Fp8State(t.m.fp8.recipe, t.m.c.L) : Fp8State();
    t.fp8.from_json(s.fp8, dir);
    t.guard = Guard(guard_options(t.o));
    if (!s.guard.is_null()) t.guard.restore(s.guard, dir);
    t.steadiness = Steadiness();
    if (!s.steadiness.is_null()) t.steadiness.restore(s.steadiness, dir);
}

// Weights of a new run, or weights and moments of the checkpoint `from`.
static void load_weights(be::Ctx& ctx, Model& m, const TrainOptions& o, const std::string& from) {
    if (!from.empty()) load_optimizer(ctx, m, from);
    else if (!o.model.empty()) load_parameters(ctx, m, o.model);
    else initialize(ctx, m, (uint64_t)o.seed);
}

// A run from its options to the moment before its first step: everything that can be refused is refused here, and the table of
// what will happen is printed.
struct Run {
    World& world;
    TrainOptions o;
    be::Ctx ctx;
    std::unique_ptr<Tokenizer> tokenizer;
    ModelTexts texts;          // that checkpoints get beside the weights
    std::string resumed_from;  // a checkpoint, or empty
    TrainingState state;       // the checkpoint's, or that of a new run
    Strings matrix_unit;       // what multiplies, for checkpoints
    Schedule schedule;
    BatchRanges discards;  // batches to draw and drop
    std::unique_ptr<Model> m;
    std::unique_ptr<DataLoader> train, valid;
    int64_t valid_samples = 0;    // of a validation
    nlohmann::ordered_json data;  // data_identity
    Peak peak;
    RunTable table;
    std::string picture;  // of the planned pipeline
    PhaseStatus phase;    // of the first rank
    void begin(const std::string& what) {
        if (world.rank() == 0 && !o.quiet) phase.begin(what);
    }

    Run(World& w, const TrainOptions& given) : world(w), o(given), ctx(make_ctx(w, given.threads, given.dry_run)) {
        ctx.plain = o.plain;
        plan_for(ctx, o);
        if (!o.model.empty()) o.model = model_directory(o.model);
        if (o.use_z_loss && o.z_loss_strength == 0) o.z_loss_strength = 1e-4;
        if (o.adam_eps > 1e-7 && world.rank() == 0)
            print_line(stderr,
                       format("warning: --adam-eps %g is above 1e-7; an early LLM-jp 172B, trained with 1e-5, was published "
                              "as its failure",
                              o.adam_eps));
        begin("checking the checkpoints in " + o.out);
        resumed_from = find_resumed(world, o);
        if (!resumed_from.empty()) state = read_state(resumed_from);
        const Strings before = resumed_from.empty() ? Strings() : state.layout.value("matrix_unit", Strings());
        matrix_unit = choose_matrix_unit(world, ctx, o.matrix_unit, before);
        begin("loading the tokenizer");
        load_tokenizer();
        if (be::memory_is_host && !o.gemm_cache.empty())
            fail_usage("--gemm-cache is for GPUs; HINT: --matrix-unit says what multiplies on a CPU");
        if (be::memory_is_host && o.nondeterministic_attention)
            fail_usage("--nondeterministic-attention is for GPUs; on the CPU attention is deterministic");
        if (o.nondeterministic_attention && o.detect_nondeterminism)
            fail_usage("--detect-nondeterminism would find --nondeterministic-attention; give one of them");
        if (o.sample_interval > 0 && !tokenizer) fail_usage("--sample-interval needs a tokenizer; HINT: --tokenizer DIR");

        const bool unnamed = o.preset.empty() && o.model.empty() && !o.num_layers && !o.hidden_size;
        if (!resumed_from.empty() && unnamed) o.model = resumed_from;  // the checkpoint says what the model is
        texts = model_texts(!resumed_from.empty() ? resumed_from : o.model, tokenizer.get());
        const ModelConfig c = configure_model(o, tokenizer.get());
        if (!resumed_from.empty()) {
            const std::string difference = config_difference(read_config(resumed_from), c);
            if (!difference.empty())
                fail("the model is not that of the checkpoint %s: %s", resumed_from.c_str(), difference.c_str());
        }
        if (o.seq_length == 0) o.seq_length = c.T;
        if (o.seq_length > c.T)
            fail_usage(
                "--seq-length %d is above the model's longest sequence %d; HINT: --max-position-embeddings sets that of a new "
                "model",
                o.seq_length, c.T);
        if (o.json && !o.dry_run)
            fail_usage("--json is for --dry-run; a run's figures are lines of JSON in %s/log.jsonl", o.out.c_str());
        if (o.world && !o.dry_run)
            fail_usage("--world %d plans a run of %d ranks: it goes with --dry-run; HINT: mpirun -n %d starts one", o.world,
                       o.world, o.world);
        if (o.world && world.size() > 1) fail_usage("--world plans without starting ranks; HINT: leave mpirun out");
        const auto ranks = o.world ? place_rank(o.world, 0, layout_of(o), c) : join_groups(ctx, world, layout_of(o), c);
        const Mesh& mesh = ranks->mesh;
        schedule = make_schedule(o, mesh.dp.size);
        discards = add_left_out(state, o);
        begin("planning the memory");
        m = plan_model(o, schedule, c, ranks);
        if (o.nondeterministic_attention && !m->a.dq_sums_size && world.rank() == 0)
            print_line(stderr,
                       format("note: --nondeterministic-attention changes nothing here: it is for bf16 on GPUs of compute "
                              "capability 9.0 and heads of 64 or 128, not for heads of %d on %s",
                              c.HS(), ctx.description().c_str()));
        begin("opening the data and ordering its samples");
        open_data();
        check_same_everywhere(world, o, m->a.head_rows, data);
        begin("measuring how fast this machine computes");
        peak = peak_of_all(world, ctx, o.device_tflops);
        table = describe_run(*m, o, schedule, ctx, peak);
        const bool elsewhere = o.world || !ctx.has_device();
        if (elsewhere) describe_plan(c, std::max(1, o.world));
        else if (o.dry_run && be::memory_is_host && world.size() == 1 && !o.fp8_format.size()) describe_time_here(c);
        if (train) table.table.section("Data");
        if (train)
            for (const DataSummary& s : train->summary()) {
                if (!s.note.empty()) table.row("split of " + s.name, s.note);
                table.row("training " + s.name, describe(s) + format(", %.2f epochs", s.epochs));
            }
        if (valid) describe_validation();
        if (o.dry_run) describe_shortage();
        phase.done();
    }

private:
    // The memory of one rank, here or in a plan by other options.
    std::unique_ptr<Model> plan_model(const TrainOptions& p, const Schedule& steps, const ModelConfig& c,
                                      std::shared_ptr<Ranks> ranks) {
        std::vector<int> given;
        for (const std::string& n : p.pipeline_layers)
            given.push_back((int)cli::number_in_range("pipeline-layers", n, between(0, 10000), true));
        const std::vector<int> stages =
            split_layers(c.L, ranks->mesh.pp.size * ranks->mesh.vpp, p.account_for_embedding_in_pipeline_split,
                         p.account_for_loss_in_pipeline_split, given);
        auto model = std::make_unique<Model>(c, std::move(ranks), stages);
        model->grads.is_bf16 = p.main_grads_dtype == "bf16";
        model->m.is_bf16 = p.exp_avg_dtype == "bf16", model->v.is_bf16 = p.exp_avg_sq_dtype == "bf16";
        // A rollback may lead back to steps in bf16.
        const int64_t start = fp8_start(p, state);
        plan_8_bits(ctx, *model, p, state.step < start || (start > 0 && p.on_spike == "rollback"));
        if (p.nondeterministic_attention)
            model->a.dq_sums_size = be::attention_sums(ctx, p.micro_batch_size, p.seq_length, model->n.NHl, c.HS());
        const int head_rows =
            p.head_rows ? p.head_rows : choose_head_rows(ctx, model->n, (int64_t)p.micro_batch_size * p.seq_length);
        plan_memory(*model, recompute_policy(p.recompute_granularity), p.micro_batch_size, p.seq_length, head_rows,
                    p.sample_interval > 0, steps.micro_batches());
        plan_checkpoint_copy(*model, p.save_in_foreground);
        return model;
    }

    // A rank of each pipeline stage among so many ranks: what it needs where it computes, and on the host of a GPU besides. A
    // CPU build that plans for GPUs (--world) leaves out the copy for checkpoints, which lies on their hosts.
    struct RankMemory {
        size_t bytes, host;
    };
    std::vector<RankMemory> plan_stages(const TrainOptions& p, int n) {
        const ModelConfig c = configure_model(p, tokenizer.get());
        const auto first = place_rank(n, 0, layout_of(p), c);
        const Schedule steps = make_schedule(p, first->mesh.dp.size);
        std::vector<RankMemory> memory;
        for (int stage = 0; stage < first->mesh.pp.size; stage++) {
            const auto model = plan_model(p, steps, c, place_rank(n, first->mesh.rank_of(stage, 0, 0), layout_of(p), c));
            size_t copy = 0;
            for (const auto& [purpose, bytes] : model->arena.purposes())
                if (purpose.find("copy for checkpoints") == 0) copy = bytes;
            memory.push_back({model->arena.bytes() - (be::memory_is_host && o.world ? copy : 0), copy});
        }
        return memory;
    }

    // How long a run on GPUs that are not here takes, and what it needs of each.
    void describe_plan(const ModelConfig& c, int n) {
        const Mesh& mesh = m->ranks->mesh;
        table.table.section("Plan", Table::Values::text);
        const std::vector<RankMemory> stages = plan_stages(o, n);
        for (int stage = 0; stage < mesh.pp.size; stage++)
            if (mesh.pp.size <= 8 || stage < 2 || stage >= mesh.pp.size - 2)
                table.row(mesh.pp.size == 1 ? "memory of a rank" : format("memory of stage %d", stage),
                          format("%s of %s, and %s on the host", human_bytes((double)stages[(size_t)stage].bytes).c_str(),
                                 human_bytes(planned_memory_bytes(o)).c_str(),
                                 human_bytes((double)stages[(size_t)stage].host).c_str())),
                    table.exact({{"bytes", stages[(size_t)stage].bytes},
                                 {"of", planned_memory_bytes(o)},
                                 {"on_host", stages[(size_t)stage].host}});
        const Plan plan = make_plan(plan_input(o, c, n, m->stages, schedule.final_batch, sizeof(floatX)));
        add_rows(table, plan, (double)schedule.total_samples * o.seq_length);
        if (mesh.pp.size > 1)
            picture = draw_pipeline(mesh.pp.size, mesh.vpp, (int)plan.micro_batches, plan.bubble, terminal_width(stdout));
    }

    // The same for a run on this CPU.
    void describe_time_here(const ModelConfig& c) {
        const double seconds = measured_step_seconds(ctx, c, o, schedule.final_batch, peak),
                     tokens = (double)schedule.total_samples * o.seq_length,
                     rate = (double)schedule.final_batch * o.seq_length / seconds;
        table.table.section("Plan", Table::Values::text);
        table.row("step", "about " + human_duration(seconds) + ", by a second's measurement of a part of the model");
        table.exact({{"seconds", seconds}});
        table.row("throughput", format("%s tokens/s, %.0f%% of the peak", human_count(rate).c_str(),
                                       100 * rate * model_flops_per_token(c, o.seq_length) / peak.flops));
        table.exact({{"tokens_per_second", rate}});
        table.row("whole run", format("about %s for %s tokens, without validation", human_duration(tokens / rate).c_str(),
                                      human_count(tokens).c_str()));
        table.exact({{"tokens", tokens}, {"days", tokens / rate / 86400}});
    }

    // Says so if the plan needs more memory than there is, and what would help.
    void describe_shortage() {
        const bool elsewhere = o.world || !ctx.has_device(), host = be::memory_is_host && !o.world;
        int sharing = 0;  // ranks of this machine, which share its memory
        for (const std::string& name : world.hosts()) sharing += host && name == world.host();
        const int n = o.world ? o.world : world.size();
        const double resident = host ? (double)resident_memory_bytes() : 0,
                     most = elsewhere ? planned_memory_bytes(o)
                                      : ((double)be::available_memory() + resident) / std::max(1, sharing);
        const auto needed = [&](const TrainOptions& p, int ranks) {
            double largest = 0;
            for (const RankMemory& r : plan_stages(p, ranks)) largest = std::max(largest, (double)r.bytes);
            return largest + resident;
        };
        const double bytes = needed(o, n);
        if (bytes <= most) return;
        table.table.section(format("NOT ENOUGH MEMORY: a rank needs %s, there are %s. It would fit with",
                                   human_bytes(bytes).c_str(), human_bytes(most).c_str()),
                            Table::Values::amounts, "not_enough_memory");
        const std::vector<Remedy> remedies = find_remedies(o, n, host, most, needed);
        for (const Remedy& r : remedies) {
            table.table.row(r.options, human_bytes(r.bytes));
            table.exact({{"options", r.options}, {"bytes", r.bytes}});
        }
        if (remedies.empty()) table.table.row("a smaller model or --seq-length", "", "nothing else is enough");
    }

    // The tokenizer given, else the one beside the checkpoint or the model.
    void load_tokenizer() {
        if (!o.tokenizer.empty()) {
            tokenizer = std::make_unique<Tokenizer>(Tokenizer::load(o.tokenizer));
            check_tokenizer_of_model(!resumed_from.empty() ? resumed_from : o.model, *tokenizer);
        }
        for (const std::string& dir : {resumed_from, o.model})
            if (o.tokenizer.empty() && !tokenizer && !dir.empty() && std::filesystem::exists(dir + "/tokenizer.json"))
                tokenizer = tokenizer_of_model(dir, read_config(dir).V, o.sample_interval > 0, world.rank() == 0);
    }

    void open_validation() {
        const auto open = [&] {
            DataOptions d = data_options(o, m->c, tokenizer.get(), DataSplit::valid,
                                         o.eval_fixed ? 0 : schedule.samples_of_all_validations());
            d.tokenizer = train->tokenizer();
            return std::make_unique<DataLoader>(d);
        };
        valid = open();
        if (valid->n_samples() == 0) return valid.reset();  // too little data to have some for validation
        // Where Megatron would find no documents at all, there is nothing to follow: a few samples are not read again and
        // again.
        if (!o.eval_fixed && valid->split_by_tokens() && valid->samples_of_one_pass() < schedule.valid_samples)
            o.eval_fixed = true, valid = open();
        valid_samples = std::min(valid->n_samples(), schedule.valid_samples);
    }

    void describe_validation() {
        for (const DataSummary& s : valid->summary()) table.row("validation " + s.name, describe(s));
        const double passes = (double)valid_samples / (double)valid->samples_of_one_pass();
        table.row("a validation",
                  format("%s, %s", counted(valid_samples, "sample").c_str(),
                         o.eval_fixed ? "the same each time" : "each time the next ones (--eval-fixed: the same)") +
                      (passes > 1 ? format(": %.1f passes over the data, fewer --eval-iters would do", passes) : ""));
    }

    void open_data() {
        if (o.dry_run && o.data_path.empty()) return;  // planning needs no data
        const DataOptions options =
            data_options(o, m->c, tokenizer.get(), DataSplit::train, schedule.samples_read(state, discards));
        train = std::make_unique<DataLoader>(options);
        data = data_identity(*train, options);
        if (has_validation(o)) open_validation();
        if (!resumed_from.empty()) check_agreement(state, o, data, train->order_problem(state.planned), o.override);
    }
};

static RunInfo run_info(const Run& r) {
    RunInfo info;
    info.name = run_name(r.o);
    info.total_steps = r.schedule.total_steps;
    info.z_loss = r.o.z_loss_strength > 0, info.batch_ramp = r.schedule.rampup.samples > 0;
    if (info.batch_ramp) info.total_samples = r.schedule.total_samples;
    if (r.valid)
        info.unigram_loss = unigram_loss(*r.train, *r.valid, r.o.eval_fixed ? r.valid_samples : r.valid->n_samples(), r.m->c.V);
    info.summary = r.table.rows, info.options = options_to_json(r.o);
    info.machine = describe_machine(r.world, r.ctx, r.peak);
    return info;
}

// Goes back to an older checkpoint, whose directory is returned. The guard's counts and the batches left out so far stay.
static std::string roll_back(World& world, Trainer& t, const Verdict& v) {
    const Guard before = t.guard;
    const std::string dir = checkpoint_to_go_back_to(world, t.o.out, before, v, t.state.step);
    t.state = state_after_rollback(t.state, dir, before.rollback_range(v.first_outlier_batch));
    load_optimizer(t.ctx, t.m, dir);
    take_over_state(t, dir);
    const Guard saved = t.guard;
    t.guard = before;
    t.guard.rolled_back(saved);
    t.memory.remember(memory_of(t.m));
    return dir;
}

// Times waited in each group. (On a GPU the streams wait, not the host.)
static std::map<std::string, double> differences_ms(const std::map<std::string, double>& before,
                                                    std::map<std::string, double> after) {
    for (auto& [group, seconds] : after) seconds = 1e3 * (seconds - (before.count(group) ? before.at(group) : 0));
    return after;
}

static void train(World& world, const TrainOptions& given) {
    const bool main_rank = world.rank() == 0;  // prints, logs, and holds the directory
    std::optional<RunLock> lock;               // before anything there is looked at
    if (!given.dry_run) {
        hear_stop_signals(main_rank);
        if (main_rank) lock.emplace(given.out);
        if (const std::string done = main_rank ? adopt_copied_latest(given.out) : ""; !done.empty())
            print_line(stderr, "note: " + done);
        world.watch(parse_timeout(given.distributed_timeout), world.size() > 1 ? ranks_file(given.out) : "");
    }
    Run run(world, given);
    const TrainOptions& o = run.o;
    Model& m = *run.m;
    Timetable timetable(o);
    if (main_rank && o.json) print_json(run.table.table.json());
    else if (main_rank) run.table.table.print(), fputs(run.picture.c_str(), stdout);
    if (o.dry_run) return;

    if (main_rank) remove_leftovers(o.out);
    world.barrier();
    if constexpr (!be::memory_is_host) {
        const std::string cache = cache_directory(), kept = cache.empty() ? "" : cache + "/gemm.txt",
                          file = o.gemm_cache.empty() ? kept : o.gemm_cache;
        be::use_gemm_cache(run.ctx, file == "none" ? "" : file, file != "none");
    }
    run.begin(!run.resumed_from.empty() ? "loading the checkpoint " + run.resumed_from
              : !o.model.empty()        ? "loading the model " + o.model
                                        : "initialising the weights");
    allocate(run.ctx, m);
    load_weights(run.ctx, m, o, run.resumed_from);
    Trainer trainer(run.ctx, m, o, run.schedule, *run.train, run.state);
    take_over_state(trainer, run.resumed_from);
    trainer.discards = run.discards;
    TrainingState& state = trainer.state;
    const bool resumed = !run.resumed_from.empty();
    const int64_t total_steps = run.schedule.total_steps;
    const auto finished = [&] { return next_batch(trainer).step >= total_steps; };
    if (main_rank && resumed) make_latest(o.out, run.resumed_from);
    if (resumed && finished()) {
        run.phase.done();
        if (main_rank)
            printf("the run is finished: %s of %s are done\n", with_commas(state.step).c_str(),
                   counted(total_steps, "step").c_str());
        return;
    }
    const Mesh& mesh = m.ranks->mesh;
    const std::string overrides = resumed ? describe_overrides(state, o) : "";
    state.options = options_to_json(o), state.data = run.data, state.planned = run.train->n_samples();
    state.layout = {{"precision", precision_name}, {"backend", be::backend_name},
                    {"threads", run.ctx.threads},  {"matrix_unit", run.matrix_unit},
                    {"dp", mesh.dp.size},          {"tp", mesh.tp.size},
                    {"pp", mesh.pp.size},          {"vpp", mesh.vpp}};

    begin_training();
    // What lies in OUT is of this run only if the checkpoint lies there as well.
    namespace fs = std::filesystem;
    const bool same_run = resumed && fs::canonical(run.resumed_from).parent_path() == fs::canonical(o.out);
    RunInfo info;
    std::unique_ptr<Logger> logger;
    if (main_rank) {
        if (!same_run) make_room_for_new_run(o.out);
        logger =
            std::make_unique<Logger>(o.out, o.quiet, is_terminal(stdout), (int)o.log_interval, stdout, [&] { lock->hold(); });
        if (o.tensorboard || !o.tensorboard_dir.empty())
            logger->also_tensorboard(o.tensorboard_dir.empty() ? o.out + "/tensorboard" : o.tensorboard_dir, state.step);
        run.begin("reading data for the loss of a unigram model");
        info = run_info(run);
        run.phase.done();
        logger->run(info, resumed ? std::optional(state.step) : std::nullopt);
        if (run.valid) logger->say(format("a unigram model of the same tokens has validation loss %.4f", info.unigram_loss));
        if (resumed) logger->event(state.step, "info", "resume", "going on from " + run.resumed_from);
        if (!overrides.empty()) logger->event(state.step, "info", "override", "overridden: " + overrides);
    }

    Saver saver(run.ctx, m.ranks->world, {o.out, o.keep, o.keep_every, run.texts, lock ? &*lock : nullptr}, m.c, m.table,
                m.shards, m.counted, m.copy);
    std::string save_error;                          // of the last save
    int64_t saved_step = same_run ? state.step : 0;  // of the last one in OUT; there is nothing to save of step 0
    const auto report_save = [&] {
        const auto outcome = saver.outcome();
        if (!outcome) return;
        save_error = outcome->error;
        if (save_error.empty()) saved_step = outcome->step;
        if (!logger) return;
        if (!save_error.empty())
            logger->event(
                outcome->step, "error", "checkpoint",
                format("the checkpoint of step %lld was NOT written: %s; training goes on and tries again at the next interval",
                       (long long)outcome->step, outcome->error.c_str()));
        else
            logger->event(outcome->step, "info", "checkpoint",
                          format("checkpoint %s in %s", step_directory(o.out, outcome->step).c_str(),
                                 human_duration(outcome->seconds).c_str()));
    };
    const auto save = [&] {
        state.fp8 = trainer.fp8.to_json(), state.guard = trainer.guard.state();
        state.steadiness = trainer.steadiness.state();
        saver.save(memory_of(m), state);
        if (o.save_in_foreground) saver.wait();
        timetable.saved();
    };
    StopVote vote(world, mesh.pp.size + 1);
    const auto stop_here = [&] { return vote.ask(!stop_signal().empty() || timetable.exit_now()); };
    trainer.stop = stop_here;
    const auto validate = [&] {  // false if the run is to stop
        const double start = monotonic_seconds();
        run.begin("validation");
        const int64_t first = o.eval_fixed ? 0 : run.schedule.first_sample_of_validation(state.step);
        const auto sums = evaluate(run.ctx, m, *run.valid, first, run.valid_samples, stop_here);
        run.phase.done();
        if (!sums) {
            if (logger)
                logger->event(state.step, "warning", "valid",
                              format("the validation at step %lld was left: told to stop", (long long)state.step));
            return false;
        }
        const LossSums all = sum_of(*sums);
        state.valid_loss = all.ce / (double)all.n;
        if (logger)
            logger->valid(state.step, state.valid_loss, all.n, (monotonic_seconds() - start) * 1e3,
                          set_losses(*run.valid, *sums));
        return true;
    };
    std::unique_ptr<Generator> generator;
    std::vector<int> prompt;
    if (o.sample_interval > 0) {
        generator = std::make_unique<Generator>(run.ctx, m);
        prompt = prompt_tokens(*run.tokenizer, o.sample_prompt,
                               std::min<int64_t>(m.c.T, (int64_t)o.micro_batch_size * o.seq_length));
    }
    const auto write_sample = [&] {  // false if the run is to stop
        std::string text;
        bool stops = false;
        sample_text(*generator, prompt, o.sample_tokens, {0.8, 0, 0.95}, (uint64_t)o.seed, (uint32_t)state.step,
                    run.texts.end_ids, [&](int token) {
                        text += run.tokenizer->token_bytes(token);
                        return !(stops = stop_here());
                    });
        if (logger && !stops) logger->sample(state.step, o.sample_prompt, text);
        return !stops;
    };

    const auto leave_out = [&] {
        const int64_t first = trainer.batch();
        static_cast<Counters&>(state) = next_batch(trainer);
        if (logger && trainer.batch() > first)
            logger->event(state.step, "info", "skip-batches",
                          format("batches %lld to %lld are left out", (long long)first, (long long)trainer.batch() - 1));
    };
    // What the guard says of the last step. Every rank comes to the same.
    const auto heed = [&](const Verdict& v) {  // returns whether the run has gone back
        if (v.kind != Verdict::normal && logger)
            logger->event(state.step, "warning", v.apply ? "spike" : "skip",
                          v.reason + (v.apply ? "" : "; its update was dropped"));
        if (!v.give_up && !v.rollback) return false;
        trainer.gatherer.finish();
        saver.wait();
        report_save();
        if (v.give_up) fail("the run ends at step %lld: %s", (long long)state.step, v.reason.c_str());
        const std::string dir = roll_back(world, trainer, v);
        saved_step = state.step;
        if (main_rank) make_latest(o.out, dir);
        if (logger)
            logger->event(state.step, "warning", "rollback",
                          format("back to %s; batches that are left out: %s", dir.c_str(), state.skips.text().c_str()));
        return true;
    };

    // After a step: validation, a sample and a checkpoint, where they are due.
    const auto follow_up = [&](bool last, Decision now) {
        const bool validates = run.valid && !now.stop && (state.step % o.eval_interval == 0 || last);
        const bool samples = generator && !now.stop && (state.step % o.sample_interval == 0 || last);
        const bool compares = due(o.check_weight_hash_across_dp_replicas_interval, state.step);
        if (validates || samples || last || now.stop || now.save || compares) trainer.gatherer.finish();
        if (compares) trainer.memory.require_agreement(memory_of(m), state.step);
        if (validates && !validate()) now.stop = true;
        if (samples && !now.stop && !write_sample()) now.stop = true;
        const bool saves = last || now.stop || now.save;
        if (saves) saver.wait(), report_save();
        if (saves && saved_step != state.step) trainer.memory.require_unchanged(memory_of(m), state.step), save();
        else saver.proceed();
        report_save();
        return now.stop;
    };

    run.begin(be::memory_is_host ? "the first step" : "the first step, in which ways to multiply are timed");
    trainer.memory.remember(memory_of(m));
    const double flops_per_token = model_flops_per_token(m.c, o.seq_length);
    bool stop = false;
    while (!finished() && !stop) {
        leave_out();
        const bool in_fp8 = m.fp8.recipe.on && state.step >= fp8_start(o, state);
        if (logger && in_fp8 && state.step == fp8_start(o, state))
            logger->event(state.step, "info", "fp8", "from here on products are in FP8");
        const auto waited = world.monitor()->waited();
        std::optional<StepStats> stats = train_step(trainer);
        run.phase.done();
        if (!stats) {
            follow_up(false, {true, false});
            break;
        }
        if (be::memory_is_host) stats->waiting_ms = differences_ms(waited, world.monitor()->waited());
        stats->model_tflops = flops_per_token * stats->tokens_per_s / 1e12;
        if (const double peak = run.peak.of_step(in_fp8); peak > 0) stats->mfu = stats->model_tflops * 1e12 / peak;
        stats->memory_bytes = (int64_t)memory_in_use(run.ctx);
        if (logger) logger->step(*stats);
        if (logger && !trainer.health.is_null()) logger->health(stats->step, std::exchange(trainer.health, nullptr));
        if (heed(trainer.verdict)) continue;
        const Decision decision =
            decide_together(world, {!stop_signal().empty() || timetable.exit_now(), timetable.save_now(state.step)});
        stop = follow_up(finished(), decision);
    }
    run.begin("writing the checkpoint");
    saver.wait();
    run.phase.done();
    report_save();
    vote.finish();
    end_training();
    const bool done = finished();
    const std::string reason = done ? "" : reason_to_stop(world, o), command = done ? "" : resume_command(world);
    const std::string problem =
        !save_error.empty() ? "the last checkpoint could not be written: " + save_error
        : done && !std::isfinite(state.loss)
            ? std::string(
                  "the last loss is not finite; HINT: training diverged: resume from an older checkpoint with a lower --lr, or "
                  "with --on-spike rollback")
            : "";
    if (logger) {
        logger->say("peak memory " + human_bytes((double)peak_memory_bytes()));
        if (!problem.empty()) logger->end("failed", problem);
        else if (done) logger->end("finished");
        else logger->end("stopped", reason, command);
    }
    if (!problem.empty()) fail("%s", problem.c_str());
}

int train_command(const TrainOptions& o) { return on_all_ranks(o, train); }

// A model for inference from a directory, with the tokenizer that lies beside it. With several ranks, each holds a part.
struct LoadedModel {
    std::string dir;
    ModelConfig c;
    std::unique_ptr<Tokenizer> tokenizer;
    std::unique_ptr<Model> m;  // once load_weights was called
};

// What can be refused without the weights is refused here.
static LoadedModel open_model(const World& world, const std::string& model, bool needs_tokenizer) {
    if (model.empty()) fail_usage("the model is missing; HINT: --model DIR");
    const std::string dir = model_directory(model);
    LoadedModel loaded;
    loaded.dir = dir, loaded.c = read_config(dir);
    check_config(loaded.c);
    check_backend_takes(loaded.c);
    loaded.tokenizer = tokenizer_of_model(dir, loaded.c.V, needs_tokenizer, world.rank() == 0);
    return loaded;
}

// With room for passes of B x T.
template <class Options>
static void load_weights(be::Ctx& ctx, World& world, const Options& o, LoadedModel& loaded, int B, int T, int head_rows,
                         bool generates) {
    ModelConfig& c = loaded.c;
    PhaseStatus phase;
    if (world.rank() == 0) phase.begin("loading the model " + loaded.dir);
    RankLayout layout;  // without sequence parallelism: passes have any number of rows
    layout.tp = o.tensor_model_parallel_size;
    layout.pp = o.pipeline_model_parallel_size;
    pad_vocabulary(c, 16 * o.tensor_model_parallel_size);
    if (T > c.T) fail_usage("--seq-length %d is above the model's longest sequence %d", T, c.T);
    auto ranks = join_groups(ctx, world, layout, c);
    const int stages = ranks->mesh.pp.size;
    loaded.m = std::make_unique<Model>(c, std::move(ranks), split_layers(c.L, stages, false, false, {}));
    plan_memory(*loaded.m, Recompute::inference, B, T ? T : c.T, head_rows, generates);
    allocate(ctx, *loaded.m);
    load_parameters(ctx, *loaded.m, loaded.dir);
}

static void generate(World& world, const GenerateOptions& o) {
    const bool main_rank = world.rank() == 0;  // prints; the others hold their parts of the model
    be::Ctx ctx = make_ctx(world, o.threads);
    ctx.plain = o.plain;
    choose_matrix_unit(world, ctx, o.matrix_unit, {});
    LoadedModel loaded = open_model(world, o.model, true);
    const Tokenizer& tokenizer = *loaded.tokenizer;
    const std::string text =
        o.prompt != "-" ? o.prompt : world.all_gather(main_rank ? read_standard_input() : std::string())[0];
    const std::vector<int> prompt = prompt_tokens(tokenizer, text, loaded.c.T);
    const std::vector<int> ends = model_texts(loaded.dir, &tokenizer).end_ids;
    load_weights(ctx, world, o, loaded, 1, 0, 1, true);
    if (const int copies = loaded.m->ranks->mesh.dp.size; copies > 1)
        fail("%d ranks hold %d copies of the model, one writes; HINT: --tp %d, or --pp", world.size(), copies, world.size());
    Generator generator(ctx, *loaded.m);
    TextOutput output(stdout);
    const auto print = [&](const std::string& bytes) {
        if (main_rank) output.write(bytes);
    };
    double seconds = 0;
    int tokens = 0;
    for (int k = 0; k < o.num_samples; k++) {
        print((k > 0 ? "\n---\n" : "") + text);
        const double start = monotonic_seconds();
        tokens += sample_text(generator, prompt, o.max_new_tokens, {o.temperature, o.top_k, o.top_p}, (uint64_t)o.seed,
                              (uint32_t)k, ends, [&](int token) { return print(tokenizer.token_bytes(token)), true; });
        seconds += monotonic_seconds() - start;
        print("\n");
        if (main_rank && generator.length() == generator.capacity())
            fprintf(stderr, "(the model's context of %d tokens is full)\n", generator.capacity());
    }
    if (main_rank)
        fprintf(stderr, "%s in %s, %.0f tokens/s\n", counted(tokens, "token").c_str(), human_duration(seconds).c_str(),
                tokens / seconds);
}
int generate_command(const GenerateOptions& o) { return on_all_ranks(o, generate); }

// The rows go through the head alone: they are gathered at the front of x[L], a chunk at a time. A row's place there is never
// behind its own, so that none is overwritten before it was used.
static void score_rows(be::Ctx& ctx, Model& m, const std::vector<ScoredRow>& rows, std::vector<Score>& scores) {
    Slot& slot = m.a.slot();
    floatX* x = slot.out();
    const size_t C = m.c.C, row_bytes = C * sizeof(floatX);
    std::vector<int> targets;
    for (size_t first = 0; first < rows.size(); first += targets.size()) {
        targets.clear();
        for (size_t i = 0; i < (size_t)m.a.head_rows && first + i < rows.size(); i++) {
            const ScoredRow& r = rows[first + i];
            if (r.row != i) be::copy_rows(ctx, x + i * C, row_bytes, x + r.row * C, row_bytes, row_bytes, 1);
            targets.push_back(r.target);
        }
        const size_t n = targets.size();
        be::upload(ctx, slot.targets, targets.data(), n * sizeof(int));
        head(ctx, m, {nullptr, slot.targets, nullptr, nullptr, 1, (int)n, &slot}, 0, 0, false);
        HostSide<real> loss(ctx, m.a.loss, n);
        loss.download();
        const std::vector<int> best = most_likely_tokens(ctx, *m.ranks, m.n, m.a.logits, m.a.statistics, n);
        for (size_t i = 0; i < n; i++) {
            Score& s = scores[rows[first + i].request];
            s.log_likelihood -= loss.data()[i];
            s.greedy = s.greedy && best[i] == targets[i];
        }
    }
}

// The log-likelihoods of the requests' continuations; a progress line, if there is one, follows.
static std::vector<Score> score_requests(be::Ctx& ctx, Model& m, const std::vector<Request>& requests, Progress* progress) {
    PipelineLinks links = pipeline_links(ctx, m);
    Slot& slot = m.a.slot();
    return score_requests(*m.ranks, m.a.B, m.a.T, requests, progress, [&](const ScoringPass& pass, std::vector<Score>& scores) {
        be::upload(ctx, slot.tokens, pass.tokens.data(), pass.tokens.size() * sizeof(int));
        be::upload(ctx, slot.positions, pass.positions.data(), pass.positions.size() * sizeof(int));
        const Rows in = {slot.tokens, nullptr, slot.positions, nullptr, pass.B, pass.T, &slot};
        links.receive_input(slot.x[0], stream_size(m, in), 0, 0);
        model_forward(ctx, m, in);
        links.send_output(slot.out(), stream_size(m, in), 0, 0);
        if (slot.last) score_rows(ctx, m, pass.rows, scores);
    });
}

static void evaluate_tasks(be::Ctx& ctx, World& world, const EvalOptions& o) {
    if (!o.fewshot.empty() && o.num_fewshot == 0)
        fail_usage("--fewshot needs --num-fewshot, how many examples to draw from it");
    if (!o.fewshot.empty() && o.fewshot.size() != o.tasks.size())
        fail_usage("--fewshot has %zu files, --tasks %zu; give one per task", o.fewshot.size(), o.tasks.size());
    std::vector<Task> tasks, pools;
    for (const std::string& file : o.tasks) tasks.push_back(read_task(file));
    for (const std::string& file : o.fewshot) pools.push_back(read_task(file));
    LoadedModel loaded = open_model(world, o.model, true);
    load_weights(ctx, world, o, loaded, o.micro_batch_size, o.seq_length, 1024, false);
    Model& m = *loaded.m;
    nlohmann::ordered_json results;
    for (size_t i = 0; i < tasks.size(); i++) {
        const Task& task = tasks[i];
        const int64_t n = o.max_samples ? std::min(o.max_samples, task.size()) : task.size();
        const TaskRequests all = make_requests(*loaded.tokenizer, task, pools.empty() ? nullptr : &pools[i], o.num_fewshot,
                                               (uint64_t)o.seed, n, m.a.T);
        int64_t tokens = 0;
        for (const Request& r : all.requests) tokens += r.n_inputs();
        std::optional<Progress> progress;
        if (world.rank() == 0) progress.emplace(std::filesystem::path(task.file).stem().string(), tokens, "tokens");
        const std::vector<Score> scores = score_requests(ctx, m, all.requests, progress ? &*progress : nullptr);
        if (!progress) continue;
        progress->finish();
        const Table table = task_table(task, all, task_metrics(task, all.examples, scores), o.num_fewshot);
        if (o.json) results[task.file] = table.json().begin().value();
        else table.print();
    }
    if (o.json && world.rank() == 0) print_json({{"tasks", results}});
}

static int64_t limited(int64_t samples, const EvalOptions& o) {
    return o.max_samples ? std::min(o.max_samples, samples) : samples;
}

// All of a text, which may be shorter than a sequence of the model's.
static Evaluation evaluate_text(be::Ctx& ctx, World& world, const EvalOptions& o, LoadedModel& loaded) {
    const std::vector<int> text = encode_file(o.text, *loaded.tokenizer, o.threads);
    if (text.size() < 2)
        fail("%s has %zu tokens; at least 2 are needed, one to predict after another", o.text.c_str(), text.size());
    const int T = (int)std::min<size_t>(o.seq_length ? o.seq_length : loaded.c.T, text.size() - 1);
    load_weights(ctx, world, o, loaded, o.micro_batch_size, T, 1024, false);
    std::vector<Request> requests = text_requests(text, T);
    Evaluation e;
    e.samples = limited((int64_t)requests.size(), o), requests.resize((size_t)e.samples);
    const double start = monotonic_seconds();
    for (const Score& score : score_requests(ctx, *loaded.m, requests, nullptr)) e.sums.ce -= score.log_likelihood;
    e.seconds = monotonic_seconds() - start;
    for (const Request& r : requests) {
        e.sums.n += r.n_scored;
        for (size_t t = 1; t < r.tokens.size(); t++) e.count_bytes(loaded.tokenizer.get(), r.tokens[t]);
    }
    return e;
}

static Evaluation evaluate_data(be::Ctx& ctx, World& world, const EvalOptions& o, LoadedModel& loaded) {
    load_weights(ctx, world, o, loaded, o.micro_batch_size, o.seq_length, 1024, false);
    DataOptions d;
    d.T = loaded.m->a.T, d.vocab_size = loaded.c.V;
    if (loaded.tokenizer) d.tokenizer = loaded.tokenizer->identity();
    d.blend = parse_data_path(o.data_path), d.split = o.split, d.part = DataSplit::valid;
    const DataLoader data(d);
    if (data.n_samples() == 0)
        fail("the data is too small to be split; HINT: --split \"0, 1, 0\" evaluates all of it, a smaller --seq-length a part");
    Evaluation e;
    e.samples = limited(data.n_samples(), o);
    const double start = monotonic_seconds();
    const std::vector<LossSums> of_sets = *evaluate(ctx, *loaded.m, data, 0, e.samples, [] { return false; });
    e.seconds = monotonic_seconds() - start;
    e.sums = sum_of(of_sets), e.sets = set_losses(data, of_sets);
    Batch batch;
    for (int64_t i = 0; loaded.tokenizer && world.rank() == 0 && i < e.samples; i++) {
        data.fetch(i, 1, batch);
        for (int target : batch.targets) e.count_bytes(loaded.tokenizer.get(), target);
    }
    return e;
}

static void evaluate_model(World& world, const EvalOptions& o) {
    be::Ctx ctx = make_ctx(world, o.threads);
    ctx.plain = o.plain;
    choose_matrix_unit(world, ctx, o.matrix_unit, {});
    if (!o.text.empty() + !o.data_path.empty() + !o.tasks.empty() != 1)
        fail_usage("give --data-path, --text or --tasks, one of the three");
    if (!o.tasks.empty()) return evaluate_tasks(ctx, world, o);
    if (!o.text.empty() && world.size() > 1) fail_usage("--text is for one rank; HINT: prepare the text and give --data-path");
    LoadedModel loaded = open_model(world, o.model, !o.text.empty());
    const Evaluation e = o.text.empty() ? evaluate_data(ctx, world, o, loaded) : evaluate_text(ctx, world, o, loaded);
    if (world.rank() > 0) return;
    const Table table = evaluation_table(e, o.model, loaded.m->a.T, loaded.tokenizer != nullptr);
    if (o.json) print_json(table.json());
    else table.print();
}
int eval_command(const EvalOptions& o) { return on_all_ranks(o, evaluate_model); }

#ifndef TRAIN_GPT_NO_MAIN
template <class Options>
static int run_command(const char* name, const Strings& arguments, int (*command)(const Options&)) {
    Options options;
    return cli::parse(name, options, arguments) ? command(options) : 0;
}

static int run_program(int argc, char** argv) {
    open_standard_streams();
    Strings arguments(argv + 1, argv + argc);
    std::string command = "train";
    if (arguments.empty() || arguments[0] == "--help" || arguments[0] == "-h") command = "help";
    else if (arguments[0] == "--version") command = "version";
    else if (arguments[0][0] != '-') command = arguments[0], arguments.erase(arguments.begin());
    if (command == "help") return cli::help_command(arguments, argc > 1);
    if (command == "version") return print_version();
    if (command == "train") return run_command("train", arguments, train_command);
    if (command == "generate") return run_command("generate", arguments, generate_command);
    if (command == "eval") return run_command("eval", arguments, eval_command);
    cli::command_named(command);
    if (const World world = World::join(); world.size() > 1) {
        if (world.rank() == 0)
            print_line(stderr, "error: train_gpt " + command +
                                   " is one process; train, generate and eval run on several ranks. HINT: leave mpirun out");
        return 2;
    }
    if (command == "prepare") return run_command("prepare", arguments, prepare_command);
    if (command == "tokenizer") return run_command("tokenizer", arguments, tokenizer_command);
    const bool bare = !arguments.empty() && arguments[0][0] != '-';  // the option's name is left out
    if (bare) arguments.insert(arguments.begin(), command == "report" ? "--runs" : "--path");
    if (command == "report") return run_command("report", arguments, report_command);
    return run_command("inspect", arguments, inspect_command);
}

int main(int argc, char** argv) try {
    const int status = run_program(argc, argv);
    if (status == 0 && !has_trained()) check_output();  // a run needs no console: it has its log
    return status;
} catch (const std::bad_alloc&) {
    print_line(stderr, "error: out of memory; HINT: a smaller --micro-batch-size, --seq-length or model");
    return 1;
} catch (const std::exception& e) {
    print_line(stderr, std::string("error: ") + e.what());
    return exit_status(e);
}
#endif
