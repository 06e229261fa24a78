// The tests of ops, for the backend that the including program has chosen before:
//   namespace backend = cpu;            // or gpu
//   template <class T> Buffer           // memory of that backend: guarded, poisoned; set(), get(), p()
// Ops in the program's precision (bf16 or fp32) against plain loops in double. Allowed errors: one rounding to floatX, plus a
// bound on the fp32 arithmetic inside, derived next to each test with u = 2^-24 (one fp32 rounding). Outputs are poisoned with
// NaN and placed between guards; sizes are odd or whole packs, all different, and exceed one vector, one block, one chunk.
#pragma once
#include "ops/activations.h"
#include "ops/losses.h"
#include "ops/norms.h"
#include "ops/optimizers.h"
#include "ops/quantized.h"
