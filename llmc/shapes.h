// Arguments of ops that belong together, as plain structs: sizes and tensors. Shapes are at the right, row-major, slowest
// first; a pointer marked `or null` may be null. All memory is the backend's.
#pragma once
#include <climits>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "base/enum_table.h"
#include "base/types.h"
#include "dropout.h"
#include "fp8.h"

// The functions between the two matrices of the MLP, a row each: value; type of its formulas (activations.h); whether it gates
// its output, so that fc1 has rows [gate | up]; its word in --activation, in config.json of model_type "train_gpt", and its
// title in the plan; its words in other config.json files, of which the first is written.
//   gelu by tanh; gelu_exact by erf; relu max(x, 0); relu2 max(x, 0)^2; swiglu silu(gate) up; geglu gelu(gate) up, by tanh;
//   clamped_swiglu gate sigmoid(1.702 gate) (up + 1) of clamped gate and up (math.h): GPT-OSS, whose files have no word for it
#define ACTIVATIONS(X)                                                                         \
    X(gelu, Gelu, false, "gelu", "gelu", "GeLU", "gelu_new", "gelu_pytorch_tanh", "gelu_fast") \
    X(gelu_exact, GeluExact, false, "gelu-exact", "gelu_exact", "exact GeLU", "gelu")          \
    X(relu, Relu, false, "relu", "relu", "ReLU", "relu")                                       \
    X(relu2, Relu2, false, "relu2", "relu2", "squared ReLU", "relu2")                          \
    X(swiglu, Swiglu, true, "swiglu", "swiglu", "SwiGLU", "silu", "swish")                     \
    X(geglu, Geglu, true, "geglu", "geglu", "GeGLU", "gelu_pytorch_tanh", "gelu_new")          \
    X(clamped_swiglu, ClampedSwiglu, true, "clamped-swiglu", "clamped_swiglu", "clamped SwiGLU", nullptr)
#define VALUE(value, ...) value,
enum class Activation { ACTIVATIONS(VALUE) };
#undef VALUE
struct ActivationRow {
    Activation value;
    bool gated;
    const char *option, *in_config, *title, *in_files[3];
};
#define ROW(value, type, gated, option, in_config, title, ...) \
    {Activation::value, gated, option, in_config, title, {__VA_ARGS__}},
inline constexpr ActivationRow activations[] = {ACTIVATIONS(ROW)};
#undef ROW
constexpr bool gated(Activation a) { return row_of(activations, a).gated; }

// Rows [v0, v0 + V) of a vocabulary, in matrices of Vp rows or columns: those after the first V are padding. An unsharded
// vocabulary has v0 = 0.
struct VocabularyShard {
    int v0, V, Vp;
    real scale = 1;  // factor of the embedding's rows
};

// Means of rows that are split over ranks: sums[row] * scale. Without sums each rank has whole rows and computes their means.
struct RowMeans {
    const real* sums = nullptr;
    real scale = 0;
    HD real of(size_t row) const { return sums[row] * scale; }
};

// Parameters of LayerNorm or RMSNorm over rows of C numbers.
struct NormParams {
    const floatX* weight;  // (C)
    const floatX* bias;    // (C); null for RMSNorm
    int C;
    real eps;
    real offset = 0;      // the factor is offset + weight; Gemma: 1
    RowMeans means = {};  // from the sums of head_norm_squares or, backward, of head_norm_products
};
struct NormGrads {
    real* weight;  // (C)
    real* bias;    // (C); null for RMSNorm
    // (C) or null: adds the sums of dinp's columns, as stored, here: the bias gradient of the layer whose output gradient is
    // dinp. Only where norm_sums_columns(C).
    real* dinp_columns = nullptr;
};
struct NormStatistics {
    real* mean;  // (N); null for RMSNorm
    real* rstd;  // (N)
};

// Rows of C numbers within longer ones: each of N rows, which are `stride` numbers apart, starts with `segments` of them, next
// to each other. They are the query or the key heads of the fused projection; or all query heads, or all key heads, as one.
struct HeadRows {
    int N;
    size_t stride;
    int segments;

    HD int count() const { return N * segments; }
    HD size_t at(int row, int C) const {
        return segments == 1 ? (size_t)row * stride : (size_t)(row / segments) * stride + (size_t)(row % segments) * C;
    }
};

// Some columns of a matrix: x points to the first of them in the first row; rows are `stride` numbers apart.
struct Columns {
    const floatX* x;
    int stride;
};

// The summands besides a product: a matrix, and a row that is added to each of its rows.
struct Addends {
    const floatX* residual;  // (N, OC)
    const floatX* bias;      // (OC) or null
};

// An operand of an FP8 product: codes represent code * inverse_scale.
struct Fp8Matrix {
    const uint8_t* codes;
    const float* inverse_scale;  // one number
    Fp8 format = Fp8::e4m3;
};
// The inverse scales of both factors of a product, single numbers in the backend's memory, by which its sums are multiplied;
// null: the factors are not in FP8.
struct Fp8Scales {
    const float *a = nullptr, *b = nullptr;
    HD float product() const { return a ? *a * *b : 1.0f; }
};
// A matrix (rows, columns); with `filled`, a number in the backend's memory, only its first *filled rows have values.
struct FilledRows {
    int rows, columns;
    const int* filled = nullptr;
    HD size_t size() const { return (size_t)(filled ? *filled : rows) * (size_t)columns; }
};

// The columns of a linear layer's output (rows of its weight) that low-rank adapters add to (model/lora.h): ranges, each with
// the index of its adapter, `part`. A fused projection has several adapters: queries, keys, values. The matrices B of all
// adapters are stacked, (rows of all blocks, rank). In a mixture each expert has these ranges, and everything is stacked.
struct LoraRows {
    struct Block {
        int row, rows;  // the range: the first row of the layer's weight, and how many
        int packed;     // the row of B that adds to the first row
        int part;       // the adapter
    };
    Block block[3];
    int blocks, parts, rank;  // ranges, adapters, columns of B
    int OC;                   // rows of the layer's weight
    int experts = 1;          // layers of equal shape, next to each other
    int packed = 0;           // rows of B of each, if there are several

    HD int width() const { return parts * rank; }  // columns of the block-diagonal matrix of all B
};

// Sizes of attention, and the layout of heads in the fused projection qkv (B, T, NH + 2*NKV, HS). With context parallelism
// (gpt/context_parallel.h) a rank has only some rows of a sequence as queries: rows [first, T). Keys and values of rows [0, T)
// are then `apart`, in kv (B, T, 2*NKV, HS), and tensors of queries have T - first rows. Rows are counted in the sequence.
struct AttentionShape {
    int B, T, NH, NKV, HS;
    real scale = 0;        // scale of scores; not used by rope
    real softcap = 0;      // scaled scores x become softcap tanh(x / softcap); 0: no cap
    Dropout dropout = {};  // of the attention probabilities; indexed like `weight`
    int all_heads = 0;     // query heads of the whole model, for dropout
    bool apart = false;
    int first = 0;
    int whole_T = 0;  // rows of the whole sequence, for dropout; 0: T

    HD int N() const { return B * T; }
    HD int queries() const { return T - first; }
    HD int query_row(int b, int t) const { return b * queries() + t - first; }
    HD int group() const { return NH / NKV; }
    HD size_t row() const { return (size_t)(NH + 2 * NKV) * HS; }
    HD size_t key_row() const { return apart ? (size_t)(2 * NKV) * HS : row(); }
    HD size_t query(int b, int t, int h) const { return (size_t)query_row(b, t) * row() + (size_t)h * HS; }
    HD size_t key(int b, int t, int g) const { return ((size_t)b * T + t) * key_row() + (size_t)(apart ? g : NH + g) * HS; }
    HD size_t value(int b, int t, int g) const { return key(b, t, NKV + g); }
    HD size_t output_row() const { return (size_t)NH * HS; }
    HD size_t output(int b, int t, int h) const { return (size_t)query_row(b, t) * output_row() + (size_t)h * HS; }
    HD size_t statistic(int b, int t, int h) const { return ((size_t)b * NH + h) * queries() + (t - first); }
    HD bool capped_or_dropped() const { return softcap > 0 || dropout.rate > 0; }
    HD int weight_rows() const { return whole_T ? whole_T : T; }
    HD uint64_t weight(int b, int h, int t, int j) const {
        const uint64_t rows = (uint64_t)weight_rows();
        return (((uint64_t)b * all_heads + h) * rows + t) * rows + j;
    }
};
// The kernels that compute attention on a GPU (gpu/attention.cuh).
enum class AttentionKernels {
    simple,  // without tensor cores
    mma,     // tensor cores of compute capability 8.0 and later
    hopper   // tensor cores of compute capability 9.0
};
// Head sizes, of which kernels are compiled for each. call(f) calls f(integral_constant) for the one that equals HS, if any.
template <int... sizes>
struct HeadSizes {
    static constexpr bool has(int HS) { return ((HS == sizes) || ...); }
    template <class F>
    static void call(int HS, F f) {
        (void)((HS == sizes && (f(std::integral_constant<int, sizes>{}), true)) || ...);
    }
};
using MmaHeads = HeadSizes<32, 64, 80, 96, 128, 160, 192, 256>;
using HopperHeads = HeadSizes<64, 128>;
// Selects them by head size, compute capability, and whether activations are stored in bf16.
inline AttentionKernels attention_kernels(int HS, int capability, bool in_bf16) {
    if (in_bf16 && capability == 90 && HopperHeads::has(HS)) return AttentionKernels::hopper;
    return in_bf16 && MmaHeads::has(HS) ? AttentionKernels::mma : AttentionKernels::simple;
}
// Whether the mma kernels compute dk and dv in a launch each.
constexpr bool dk_dv_apart(int HS) { return HS > 160; }
// Which keys a query sees, and biases of its scores. Default: all keys up to its own position, no biases.
struct AttentionMask {
    const int* doc_start = nullptr;  // (B, queries) or null: the first key that a row sees; does not decrease in a sequence
    const real* slopes = nullptr;    // (NH) or null: ALiBi
};
// The results of the forward pass that the backward pass reads.
struct AttentionActs {
    const floatX* qkv;           // (B, T, NH + 2*NKV, HS)
    const floatX* out;           // (B, T, NH, HS)
    const real* lse;             // (B, NH, T)
    const floatX* kv = nullptr;  // keys and values that are apart; null: in qkv
    HD const floatX* keys() const { return kv ? kv : qkv; }
};
// The keys that each row's new token attends to: rows first .. t of its sequence in the cache, the last of which is its own;
// and the bias of its scores.
struct DecodeMask {
    const int* sequences;           // (B) sequences of the cache, all different
    const int* t;                   // (B)
    int window;                     // rows that a token sees, its own included; 0: all
    const real* slopes = nullptr;   // (NH) or null: ALiBi
    const floatX* sinks = nullptr;  // (NH) or null

    HD int first(int b) const { return window && t[b] >= window ? t[b] + 1 - window : 0; }
};
// Keys and values of the tokens so far of S sequences, with capacity P each.
struct AttentionCache {
    floatX* keys;    // (S, P, NKV, HS)
    floatX* values;  // (S, P, NKV, HS)
    int P;
};
// Rotary positions: the position of each row, and cos and sin of the angles of each position (position * base^(-2j/rotated)).
// The first `rotated` numbers of a head are rotated (HS: all), in pairs (j, j + rotated/2).
struct Rope {
    const int* positions;  // (N)
    const real* cos_sin;   // (P, rotated/2, 2)
    int rotated;

    HD const real* angles(int n) const { return cos_sin + (size_t)positions[n] * rotated; }
};

// Sizes of a mixture of experts: each of N rows, B sequences of T, is processed by K of E experts. A row and its k-th expert
// are a choice, which has a slot if this rank computes it: the experts' slots follow each other, and an expert's are in the
// order of the rows.
struct MixtureShape {
    int B, T, E, K;
    int weight = 1;  // of a sequence in the balance loss: the number of sequences it represents
    int cut = 1;     // ranks over which the sequences are cut, T rows each
    HD int N() const { return B * T; }
    HD int slots() const { return B * T * (K < E ? K : E); }  // at most
    // The factor of the balance loss (router_backward).
    HD double balance_factor() const { return weight * E / ((double)K * T * T * cut * cut); }
};
// The slots of E experts: expert e has the rows offsets[e] .. offsets[e + 1] - 1 of `slots`.
struct ExpertGroups {
    const int* offsets;  // (E + 1), in the backend's memory
    int E, slots;
};
// The routing of a micro-batch in one mixture. A choice is numbered row * K + k.
struct Routing {
    real* logits;   // (N, E)
    int* experts;   // (N, K) chosen experts, best first, the lower index first where equal
    real* weights;  // (N, K) factors of their outputs
    int* slots;     // (N, K) the slot of each choice; -1: none, it is dropped or its expert is on another rank
    int* choices;   // (slots) the choice of each slot
    int* offsets;   // (E + 1) the first slot of each expert, then the number of slots
    // (B, E) rows of each sequence that chose each expert, dropped or not; for router_backward of the whole sequence
    int* counts;

    ExpertGroups groups(const MixtureShape& shape) const { return {offsets, shape.E, shape.slots()}; }
};
// How a router chooses: the K largest scores, which are softmax(logits) or sigmoid(logits), plus `bias` if given. Weights are
// the scores of the chosen experts without the bias, divided by their sum if `normalize` is set, times `scale`. (A softmax over
// the chosen experts' logits only is the same as a normalized softmax over all.)
//   groups    the experts form `groups` equal groups; only experts of the `group_topk` best can be chosen (DeepSeek-V3). A
//             group's value is the sum of its K / group_topk largest scores plus bias; of its logits for a normalized softmax
//   capacity  an expert has at most this many slots; it keeps the choices with the largest weights, the lower row first where
//             weights are equal, or, with `by_position`, of the first rows. The others are dropped: they add nothing to
//             their rows' outputs, and the weights of the rows' other choices stay the same
struct RouterRule {
    bool sigmoid = false, normalize = true;
    real scale = 1;
    const real* bias = nullptr;      // (E) or null
    int groups = 1, group_topk = 1;  // at most 32 groups
    int capacity = 0;                // 0: none
    bool by_position = false;

    // The values of experts in a group's: scores rather than logits.
    HD bool groups_by_scores() const { return sigmoid || !normalize; }
};
// A router's sums over rows: both losses without their factors, the entropy of the scores divided by their sum, in nats, and
// dropped choices; then, for each expert, the number of rows that chose it.
struct RouterSums {
    static constexpr int balance = 0, z = 1, entropy = 2, dropped = 3, rows = 4;
    static constexpr size_t size(int E) { return (size_t)rows + (size_t)E; }
};
// The capacity of experts in training: `factor` times an even share of a micro-batch's choices, rounded up, as in Megatron-LM.
struct ExpertCapacity {
    double factor = 0;  // 0: no limit
    bool by_position = false;
    int of(const MixtureShape& shape) const {
        const double slots = shape.slots();
        return (int)std::fmin(slots, std::ceil(slots / shape.E * factor));
    }
};
constexpr real smallest_scores_sum = 1e-20;  // added to sums of scores before a division by them, as in Megatron-LM
// The factors of the gradients of a router's two losses, which are sums over sequences, and over rows (router_backward).
struct RouterLossFactors {
    real balance = 0, z = 0;
};
// The rows of a product that experts share: row i is slot i's, or, with `choices`, the row of the mixture's input or output
// that belongs to slot i, choices[i] / K.
struct ExpertRows {
    const floatX* x;
    const int* choices = nullptr;
    int K = 1;
    HD size_t row(int slot) const { return choices ? (size_t)choices[slot] / (size_t)K : (size_t)slot; }
};
// Sets `ranks` to the ranks of a row's K experts, `each` of them per rank: n different ones in ascending order, then -1.
// Experts of -1 are skipped.
HD inline void set_ranks(int* ranks, int n, const int* experts, int K, int each) {
    for (int i = 0, last = -1; i < n; i++) {
        int next = INT_MAX;
        for (int k = 0; k < K; k++) {
            const int rank = experts[k] < 0 ? -1 : experts[k] / each;
            if (rank > last && rank < next) next = rank;
        }
        ranks[i] = next == INT_MAX ? -1 : next;
        last = next;
    }
}
// The bias of experts, a row each, which slots add times their choice's weight, or, without weights, as it is.
struct ExpertBias {
    const floatX* x = nullptr;      // (E, OC) or null
    const real* weights = nullptr;  // (N, K) or null
    const int* choices = nullptr;   // of slots; with weights
    HD real factor(int slot) const { return weights ? weights[choices[slot]] : real(1); }
};
// Rows [row, row + rows) of the gradient of E stacked matrices; x is the first of them.
struct StackedRows {
    real* x;
    int row, rows;
};

// Losses per row; lse is log Z.
struct RowLosses {
    real* loss;   // (N)
    real* zloss;  // (N)
    real* lse;    // (N)
};
struct LossConstants {
    real loss_scale;  // factor of the gradients
    real z_coef;
    bool write_gradient;
    real softcap = 0;              // logits x become softcap tanh(x / softcap); 0: no cap
    const real* weight = nullptr;  // (N) or null: a further factor of each row's gradient (DPO)
};

// Sums over pairs of answers (model/preference.h).
struct PreferenceSums {
    double loss = 0, chosen = 0, rejected = 0;  // the pairs' losses, and the rewards of their answers
    int64_t right = 0, n = 0;                   // pairs whose chosen answer has the higher reward; all pairs
};

// Sums over the unmasked targets of one or more micro-batches, and over the squares of their gradients.
struct LossSums {
    double ce = 0, z = 0;                 // cross-entropy, z-loss
    double lse = 0, lse_max = -INFINITY;  // log Z: sum and maximum
    int64_t n = 0;                        // unmasked targets
    double squares = 0;
    PreferenceSums pair_sums{};  // for pairs of answers; computed on the host

    // The training loss: the mean over the pairs of answers, if there are any, else over the targets.
    double loss() const { return pair_sums.n ? pair_sums.loss / (double)pair_sums.n : ce / (double)n; }
};

// The constants of a step of AdamW; `step` counts from 1.
struct AdamW {
    real lr, beta1, beta2, eps, weight_decay;
    real grad_scale;  // factor of the gradient
    int64_t step;
};

// The constants of a step's momentum in Muon.
struct MuonMomentum {
    real momentum;
    real grad_scale;  // factor of the gradient
};
// The quintic a x + b x^3 + c x^5 of the Newton-Schulz iteration, and epsilons (torch.optim.Muon, NorMuon).
constexpr real newton_schulz_a = 3.4445, newton_schulz_b = -4.7750, newton_schulz_c = 2.0315;
constexpr real smallest_norm = 1e-7, neuron_eps = 1e-10;
