// The tests of ops, for whatever backend the program that includes this has chosen before:
//   namespace backend = cpu;            // or gpu
//   template <class T> Buffer           // memory of that backend: guarded, poisoned; set(), get(), p()
// Ops in the program's precision (bf16 or fp32) against plain loops in double. What is allowed: one rounding to floatX, plus a
// bound on the fp32 arithmetic inside, derived beside each test with u = 2^-24 (one fp32 rounding). Outputs are poisoned with
// NaN and lie between guards; sizes are odd or whole packs, all different, and reach past one vector, one block, one chunk.
#pragma once
#include "ops/activations.h"
#include "ops/losses.h"
#include "ops/norms.h"
#include "ops/optimizers.h"
