// Which of a block's activations are kept for its backward pass under each recomputation policy; the rest is recomputed.
#pragma once
#include <algorithm>
#include <iterator>
#include <string>

#include "../fp8.h"
#include "../base/check.h"
#include "../base/types.h"

// Ordered by decreasing storage: Storage compares them, and recompute_words has the same order.
enum class Recompute {
    none,       // every block keeps all of its activations
    selective,  // norms and activation functions are recomputed: cheap, and about a third of a block's activations
    mlp,        // fc1 as well: with SwiGLU half of the remaining activations, for about 15% of a step's products
    full,       // only the block's input is kept; backward runs the whole block forward again
    inference,  // nothing is kept: there is no backward
};
// The words of --recompute-granularity; none is for inference.
inline constexpr const char* recompute_words[] = {"none", "selective", "mlp", "full"};
static_assert(std::size(recompute_words) == (size_t)Recompute::inference);
inline Recompute recompute_policy(const std::string& name) {
    const auto found = std::find(std::begin(recompute_words), std::end(recompute_words), name);
    refuse_value<Error>(found == std::end(recompute_words), "--recompute-granularity", name, "none, selective, mlp or full");
    return (Recompute)(found - std::begin(recompute_words));
}

// When each block keeps its own copy of a tensor. Otherwise all blocks share one buffer, which backward recomputes.
enum class Kept {
    unless_selective,  // unless recomputation is selective or more: outputs of norms and activation functions
    unless_mlp,        // unless it is mlp or full: the output of fc1
    unless_full,
    never,      // backward does not read it
    elsewhere,  // equal to the residual stream, which is kept anyway; only its FP8 is kept here
};

// The input of one of a block's four matrices: in bf16, in FP8, or both.
struct LinearInput {
    floatX* bf16;           // in floatX, the build's storage type
    uint8_t* fp8;           // codes, with the same shape
    ScaleInverse* inverse;  // factor that decodes the codes, if each micro-batch has its own scale
};
// A tensor in bf16, and in FP8 if it is a LinearInput.
template <class E>
E*& bf16_of(E*& tensor) {
    return tensor;
}
inline floatX*& bf16_of(LinearInput& tensor) { return tensor.bf16; }
template <class E>
uint8_t** fp8_of(E*&) {
    return nullptr;
}
inline uint8_t** fp8_of(LinearInput& tensor) { return &tensor.fp8; }

// FP8 training keeps the inputs of qkv, fc1 and fc2 only in FP8: their bf16 is in the shared block. It keeps both forms of the
// input of proj, because attention's backward pass reads bf16, and of all inputs of low-rank adapters, which read bf16 too.
constexpr bool fp8_suffices(Kept kept, bool adapters) { return kept == Kept::unless_selective && !adapters; }

// Whether each block keeps its own copy of a tensor in bf16 and in FP8, and which of these the shared block has. If blocks have
// different policies, the shared block has every tensor that the strongest one shares.
struct Storage {
    bool own_bf16, own_fp8, shared_bf16, shared_fp8;
    bool fp8_in_bf16;  // the block keeps the codes in the memory of its bf16

    // after_bf16: the run has bf16 steps, which keep bf16, before FP8 ones; then the codes reuse that memory.
    Storage(Kept when, Recompute recompute, bool fp8, bool adapters, bool after_bf16) {
        const Recompute last = when == Kept::unless_full  ? Recompute::mlp
                               : when == Kept::unless_mlp ? Recompute::selective
                                                          : Recompute::none;
        const bool here = when != Kept::elsewhere, kept = when != Kept::never && recompute <= last;
        const bool fp8_only = fp8 && fp8_suffices(when, adapters);
        own_bf16 = here && kept && (!fp8_only || after_bf16);
        fp8_in_bf16 = fp8_only && after_bf16 && recompute == Recompute::none;
        own_fp8 = fp8 && recompute == Recompute::none && !fp8_in_bf16;
        shared_bf16 = here && (!kept || fp8_only);
        shared_fp8 = fp8 && recompute != Recompute::none;
    }
};
