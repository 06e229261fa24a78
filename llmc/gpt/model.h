// A rank's part of a GPT: the tensors of its blocks with their shapes, the activations of a micro-batch, and the key/value
// cache for generation. model_memory.h plans them in the arena and sets the pointers.
#pragma once
#include <climits>
#include <cmath>
#include <memory>
#include <utility>
#include <vector>

#include "../model/arena.h"
#include "../model/decoder.h"
#include "../model/fp8_training.h"
#include "../model/lora.h"
#include "../model/mesh.h"
#include "../model/model_config.h"
#include "../model/parameters.h"
#include "../model/preference.h"
#include "../model/recompute.h"
#include "../ops.h"
#include "../parallel/ranks.h"
#include "../optimizer/training_memory.h"

// The output of the last matrix of attention or MLP, before it enters the residual stream.
struct BranchOutput {
    floatX* x;             // (Nl, C) for the norm after it; null without one
    NormStatistics stats;  // of that norm
};

// Activations of the norm of all query heads, or of all key heads.
struct HeadNormInput {
    floatX* x;   // (N, NHl HS) or (N, NKVl HS)
    real* rstd;  // (N, NHl) or (N, NKVl); with a norm of all heads together (N)
};

// Activations of a mixture's shared expert.
struct SharedExpertActivations {
    Routing gate;  // of one expert
    floatX* fc1;   // (N, F1l)
    floatX* act;   // (N, Fl) input of fc2
};
// All-to-all messages of a mixture's rows (expert_parallel.h): rows sent[r] .. sent[r + 1] - 1 of those that this rank sends go
// to rank r of ep, and rows received[r] .. received[r + 1] - 1 of those that its experts process come from it.
struct RowMessages {
    std::vector<int> sent, received;
};
// Activations of the MLP. In a mixture of experts, each row of fc1 and act is a slot (mixture_slots in
// model_memory.h).
struct MlpActivations {
    Routing routing;     // of a mixture
    Routing dispatched;  // with expert parallelism: of the rows that this rank's experts process; without logits
    Routing sent;        // with all-to-all messages: own rows and the ranks of their experts; without logits and weights
    SharedExpertActivations shared;
    floatX* fc1;       // (N, F1l)
    LinearInput act;   // (N, Fl) input of fc2
    BranchOutput fc2;  // of the MLP
};

// The activations that a block's forward pass stores for its backward pass.
struct BlockActivations {
    floatX* x;               // (Nl, C) residual stream at the block's input
    LinearInput norm1;       // (Nl, C) input of qkv; without a norm before it x
    floatX* qkv;             // (N, QKVl) after rope
    HeadNormInput heads[2];  // queries and keys before their norm
    LinearInput att;         // (N, NHl HS) input of proj
    BranchOutput proj;       // of attention
    floatX* mid;             // (Nl, C) the residual stream between attention and MLP
    LinearInput norm2;       // (Nl, C) input of fc1; without a norm before it mid
    MlpActivations mlp;
    NormStatistics stats1, stats2;  // of the norms before attention and MLP
    real* lse;                      // (B, NHl, T)
    ScaleInverse* inverses;         // (4) of the inputs of qkv, proj, fc1, fc2
};

// Keys and values of all tokens so far of some sequences, for generation.
struct KeyValueCache {
    KvCacheShape shape;     // S sequences of P tokens
    floatX *keys, *values;  // (layers, S, P, NKVl, HS)
    size_t row;             // NKVl HS
    int* sequences;         // (S) row i of a pass continues sequence sequences[i]
    AttentionCache of(int layer, int sequence) const {
        const size_t at = ((size_t)layer * shape.sequences + sequence) * shape.tokens * row;
        return {keys + at, values + at, shape.tokens};
    }
};

// A micro-batch in a chunk of this rank's layers: its tokens, and the activations between its forward and backward pass.
// Without a pipeline there is one chunk with one of these, which all micro-batches use in turn; in a pipeline a chunk has one
// per micro-batch in flight.
struct MicroBatch {
    // Planned once.
    int first_block = 0;             // the chunk's first block, counted on this rank
    bool first = true, last = true;  // the chunk contains the embedding, the head
    std::vector<floatX*> x;          // blocks+1 of (Nl, C): x[i] enters block i, the last one leaves the chunk
    std::vector<BlockActivations> blocks;
    std::vector<RowMessages> messages;    // of each block
    floatX* embedded = nullptr;           // (Nl, C) input of the embedding norm
    NormStatistics embedding_stats = {};  // of the embedding norm
    int *tokens, *targets, *positions;    // (N) each
    int* doc_start;                       // (N) the first key that a row sees; all rows', if cp ranks exchange heads
    int* window_start;                    // (N) the same in layers with a sliding window
    // The current micro-batch.
    std::vector<AnswerPair> pairs;  // pairs of answers (DPO), in rows of whole sequences
    int B = 0, T = 0;
    Zigzag part;                     // T are this rank's rows of sequences that are cut over ranks (context_parallel.h)
    std::vector<int> virtual_rows;   // first rows of virtual tokens
    bool masks_documents = false;    // use doc_start; else only causality masks attention
    KeyValueCache* cache = nullptr;  // not null: each row is a new token that attends to its sequence's cached ones
    Acc gradients = Acc::Add;        // Set in a step's first micro-batch, for products whose gradient is not cleared
    uint64_t rounding_key = 0;       // of its contribution to bf16 gradients
    bool drops = false;              // in training: apply dropout and experts' capacity
    bool own_rows = false;           // expert-parallel ranks have different rows; else all have the same
    uint64_t seed = 0;               // of the run, for dropout
    int64_t sample = 0;              // index of its first sample in the run, for dropout

    floatX* out() const { return x.back(); }
    int N() const { return B * T; }
    int whole_T() const { return T * part.cp.size; }
    const int* documents() const { return masks_documents ? doc_start : nullptr; }
};

// The micro-batches, and the buffers that all of them and all blocks use in turn.
struct Activations {
    int B, T;                                            // the largest micro-batch that fits, this rank's rows
    int head_rows;                                       // rows in the LM head, and of logits, at a time (--head-rows)
    std::vector<std::vector<MicroBatch>> micro_batches;  // [chunk of this rank][micro-batch]
    BlockActivations shared;                             // tensors that no block keeps for itself
    floatX* all_rows;                                    // (N, C) all rows of a tensor, of which each tp rank has Nl
    floatX* all_inputs;  // (N, C) a layer's whole input in backward, while all_rows has the gradient; null without overlap
    floatX* final_norm;  // (Nl, C)
    NormStatistics final_stats;
    floatX* logits;                                   // (head_rows, Vpl), turned into their gradient in place
    real* statistics;                                 // (tp, 2, head_rows) of the vocabulary's shards
    real *loss, *zloss, *lse;                         // (N) each
    real* weight;                                     // (N) factor of each row's loss gradient, in DPO
    real* all_losses;                                 // (cp, N) of the rows of all ranks, in DPO with context parallelism
    real* head_sums;                                  // (2, N) of each row's queries and keys, if tp shards their one norm
    PreferenceSums pair_sums;                         // over pairs of answers, since the last clear (DPO)
    uint8_t *fp8_codes, *fp8_inputs, *fp8_gradients;  // (N, widest) FP8 codes: all rows; transposed inputs and gradients
    int* one_group;                                   // 0 and N: all rows have the same expert, the shared one
    floatX *fp8_experts[2], *fp8_expert_weights;      // numbers of codes: both factors of experts' rows; all experts' weights
    floatX* next_logits;                              // (tp, S, Vpl) of the rows of a pass, for generation
    LossSums* sums;                                   // over all rows through the head since the last clear
    floatX* branch_out;  // (Nl, C) output of attention or MLP, added to the residual stream; its gradient
    // With context parallelism: keys and values of all ranks' rows, and their gradients, by rank; of a sequence, in its order.
    floatX* all_keys;      // (cp, B, T, 2 NKVl, HS)
    floatX *keys, *dkeys;  // (cp T, 2 NKVl, HS)
    // If they exchange heads instead (head_exchange.h):
    floatX* exchanged[2];            // (N, QKVl)
    floatX *whole_att, *whole_datt;  // (N, NHl HS)
    real* dq_sums = nullptr;         // (dq_sums_size) for attention_backward; null: it is deterministic
    size_t dq_sums_size = 0;         // set before memory is planned
    floatX* dequantized;             // the weights of a layer at a time, if they are quantized
    floatX* dx;                      // (Nl, C) gradient of the residual stream, from head to embedding
    floatX* dnorm;                   // (Nl, C) gradient of a norm's output
    floatX *datt, *dqkv;             // (N, NHl HS), (N, QKVl)
    floatX *dact, *dfc1;             // (N, Fl), (N, F1l) in the memory of datt and dqkv; without a gate dact is dfc1
    // In models with mixtures, whose dact and dfc1 are (slots, Fl), (slots, F1l) and different:
    floatX* expert_rows;        // (slots, C) outputs of all experts; gradients of their inputs; of the shared expert
    floatX* dshared_fc1;        // (N, F1l) of the shared expert
    real* dshared_gate;         // (N) of its gate's logits
    real *dlogits, *drouting;   // (N, E), (N, K) gradients of the router's logits and weights
    floatX* dispatched_rows;    // (ep, N, C) rows of all ranks for this rank's experts, and sums over these; with ep > 1
    real* dispatched_drouting;  // (ep, N, K)
    int* kept_experts;          // (N, K) of choices that are not dropped, else -1; with ep > 1 and a capacity
    floatX* sent_rows;          // (N, min(K, ep), C) own rows for the ranks of their experts; with all-to-all messages
    int* message_ends;          // (ep, ep + 1) of all ranks: the first row that each sends to each, and their number
    Routing of_sequences;       // of the rows of all ranks of cp, without logits and weights; with cp > 1
    double* router_sums;        // (blocks, RouterSums::size(E)) since the last clear

    MicroBatch& micro_batch(int chunk = 0, int i = 0) {
        std::vector<MicroBatch>& in_flight = micro_batches[chunk];
        return in_flight[(size_t)i % in_flight.size()];
    }
};

struct NormLayer {
    NormParams params;  // weight null: no norm
    NormGrads grads;
    bool exists() const { return params.weight; }
};

// Rows of a quantized matrix.
struct QuantizedRows {
    QuantizedWeights weights;
    int row, rows;
};

// One of a block's four matrices (this rank's part): its weights, their gradients, and their FP8 codes. In a mixture fc1 and
// fc2 have the matrices of all experts, next to each other.
struct Linear {
    Matrix matrix;
    int block;                           // index on this rank
    int in, out;                         // columns and rows of w; in a mixture of one expert's
    const TensorSpec* tensor;            // of w
    bool of_experts;                     // fc1 or fc2 of a mixture
    const floatX *w, *b;                 // (out, in) (out); b null: the family has no biases
    std::vector<QuantizedRows> coded;    // w, if it is quantized; w is then null
    real *dw, *db;                       // gradients as ops write them; null: frozen
    LoraLayer* lora;                     // null: no adapters
    uint8_t *fp8, *fp8_t;                // of w (out, in), and of its transpose (in, out); null: computed when needed
    Fp8Tensor fp8_inp, fp8_w, fp8_dout;  // scales of the input, w, and the gradient of the output
    NormLayer after;                     // of proj and fc2: the norm of their output
    // Tensor parallelism splits its input (linear.h).
    bool row_parallel() const { return matrix == Matrix::proj || matrix == Matrix::fc2; }
};

// The router of a mixture, or the gate of its shared expert.
struct Router {
    const TensorSpec* tensor;  // null: none; the block's MLP is dense
    const floatX *w, *b;       // (E, C) (E); b null: none
    real *dw, *db;             // null: frozen
};

// The shared expert of a mixture: an MLP for all rows. Its gate is a router of one expert.
struct SharedExpert {
    Linear fc1, fc2;
    Router gate;
    bool exists() const { return fc1.tensor; }
};

struct Block {
    NormLayer norm1, norm2;   // before attention and MLP
    NormLayer head_norms[2];  // of queries and keys
    const floatX* sinks;      // (NHl) null: none
    real* dsinks;
    Router router;                // of a mixture
    SharedExpert shared;          // of a mixture
    std::vector<Linear> linears;  // by Matrix
    bool has_mixture() const { return router.tensor; }
    Linear& operator[](Matrix m) { return linears[(size_t)m]; }
    const Linear& qkv() const { return linears[(size_t)Matrix::qkv]; }
    const Linear& proj() const { return linears[(size_t)Matrix::proj]; }
    const Linear& fc1() const { return linears[(size_t)Matrix::fc1]; }
    const Linear& fc2() const { return linears[(size_t)Matrix::fc2]; }
};

struct Model : TrainingMemory {
    LocalSizes local;  // this rank's part of the matrices
    Recompute recompute = Recompute::inference;
    int recomputed = INT_MAX;  // `recompute` applies to this many first blocks of each chunk; set before planning
    Recompute recompute_others = Recompute::none;  // a weaker policy for the other blocks; set before planning
    Params<floatX> p{};                            // views of params
    Params<real> g{};                              // views of grads, or of micro_grads: the gradients that ops write
    Params<const TensorSpec> specs{};              // rows of model_table()
    std::vector<Block> blocks;                     // this rank's blocks, as views of p and g
    NormLayer embedding_norm{}, final_norm{};
    Activations a{};
    Fp8Training fp8;
    Lora lora;
    Preference preference;
    RouterLossFactors router_losses;      // of the current step
    bool balances_micro_batches = false;  // the balance loss takes a micro-batch as one sequence (aux_loss)
    ExpertCapacity expert_capacity;       // in training passes
    bool all_to_all = false;  // expert-parallel ranks send rows only to the ranks of their experts; set before planning
    real* unused_gradients = nullptr;  // scratch for gradients of frozen norms and sinks, and of no_bias
    floatX* no_bias = nullptr;         // (C) zeros: the bias of LayerNorms without one; null: all have one, or are RMSNorms
    KeyValueCache cache{};
    real* slopes = nullptr;          // (NHl) ALiBi; null: none
    real* cos_sin = nullptr;         // (T, rotated/2, 2) rope; null: none
    real* window_cos_sin = nullptr;  // the same in layers with a window; null: as in the others
    Arena arena;

    // The row of the first position in wpe or its gradient.
    template <class E>
    E* first_position(E* wpe) const {
        return wpe ? wpe + (size_t)c.position_offset * (size_t)c.C : nullptr;
    }

    explicit Model(const ModelConfig& config) : Model(config, std::make_shared<Ranks>(), {config.L}) {}
    Model(const ModelConfig& config, std::shared_ptr<Ranks> r, std::vector<int> stage_layers)
        : TrainingMemory(config, std::move(r), std::move(stage_layers)), local(c, ranks->mesh.tp) {}
    // True if the heads under one norm are spread over tensor-parallel ranks.
    bool cuts_head_norms() const { return c.qk_norm == QkNorm::whole && local.tp_size > 1; }
    // The policy of a chunk's block i.
    Recompute recompute_of(int i) const {
        return i < recomputed || recompute == Recompute::inference ? recompute : recompute_others;
    }
    // Expert-parallel ranks whose rows are gathered.
    int dispatching_ranks() const { return recompute == Recompute::inference ? 1 : ranks->mesh.ep.size; }
    int whole_T() const { return a.T * ranks->mesh.cp.size; }  // rows of the longest sequence, over all ranks
    bool sends_all_to_all() const { return all_to_all && dispatching_ranks() > 1; }
    // For N rows: the ranks of their experts, as experts of a mixture.
    MixtureShape mixture_of_ranks(int N) const {
        const int ep = ranks->mesh.ep.size;
        return {1, N, ep, std::min(c.mixture.topk, ep)};
    }
    AttentionShape attention(int B, int T) const {
        const double scale = c.attention_scale ? c.attention_scale : 1.0 / std::sqrt((double)c.HS());
        return {B, T, local.NHl, local.NKVl, c.HS(), (real)scale, (real)c.attention_softcap, {}, c.NH};
    }
};
