// Which of a block's activations are kept for its backward pass under each recomputation policy; the rest is recomputed.
#pragma once
#include <string>

#include "../fp8.h"
#include "../base/types.h"

// Ordered by decreasing storage: Storage compares them.
enum class Recompute {
    none,       // every block keeps all of its activations
    selective,  // norms and activation functions are recomputed: cheap, and about a third of a block's activations
    mlp,        // fc1 as well: with SwiGLU half of the remaining activations, for about 15% of a step's products
    full,       // only the block's input is kept; backward runs the whole block forward again
    inference,  // nothing is kept: there is no backward
};
inline Recompute recompute_policy(const std::string& name) {
    return name == "full"        ? Recompute::full
           : name == "mlp"       ? Recompute::mlp
           : name == "selective" ? Recompute::selective
                                 : Recompute::none;
}

// When each block keeps its own copy of a tensor. Otherwise all blocks share one buffer, which backward recomputes.
enum class Kept {
    unless_selective,  // unless recomputation is selective or more: outputs of norms and activation functions
    unless_mlp,        // unless it is mlp or full: the output of fc1
    unless_full,
    never,      // backward does not read it
    elsewhere,  // equal to the residual stream, which is kept anyway; only its codes are kept here
};

// The input of one of a block's four matrices: numbers, FP8 codes of them, or both.
struct LinearInput {
    floatX* x;
    uint8_t* codes;         // in FP8, with the shape of x
    ScaleInverse* inverse;  // factor that decodes the codes, if each micro-batch has its own scale
};
// A tensor's numbers, and its codes if it is a LinearInput.
template <class E>
E*& numbers(E*& tensor) {
    return tensor;
}
inline floatX*& numbers(LinearInput& tensor) { return tensor.x; }
template <class E>
uint8_t** codes_of(E*&) {
    return nullptr;
}
inline uint8_t** codes_of(LinearInput& tensor) { return &tensor.codes; }

// In FP8 the inputs of qkv, fc1 and fc2 are kept only as codes: their numbers are in the shared block. The input of proj is
// kept as both, because attention's backward pass reads its numbers; so are all inputs of low-rank adapters, which read
// numbers.
constexpr bool codes_suffice(Kept kept, bool adapters) { return kept == Kept::unless_selective && !adapters; }

// Which of a tensor's numbers and codes each block keeps for itself, and which are in the shared block. If blocks have
// different policies, the shared block has every tensor that the strongest one shares.
struct Storage {
    bool own_numbers, own_codes, shared_numbers, shared_codes;
    bool codes_in_numbers;  // the block keeps codes in the memory of its numbers

    // after_bf16: the run has bf16 steps, which keep the numbers, before FP8 ones; then the codes reuse the numbers' memory.
    Storage(Kept when, Recompute recompute, bool fp8, bool adapters, bool after_bf16) {
        const Recompute last = when == Kept::unless_full  ? Recompute::mlp
                               : when == Kept::unless_mlp ? Recompute::selective
                                                          : Recompute::none;
        const bool here = when != Kept::elsewhere, kept = when != Kept::never && recompute <= last;
        const bool codes_alone = fp8 && codes_suffice(when, adapters);
        own_numbers = here && kept && (!codes_alone || after_bf16);
        codes_in_numbers = codes_alone && after_bf16 && recompute == Recompute::none;
        own_codes = fp8 && recompute == Recompute::none && !codes_in_numbers;
        shared_numbers = here && (!kept || codes_alone);
        shared_codes = fp8 && recompute != Recompute::none;
    }
};
