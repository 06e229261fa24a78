// The ops of ops.inl, declared in each backend's namespace. `be` is the backend of this build: the model code calls be:: and
// knows nothing else about it. A GPU build (BACKEND_CUDA; BACKEND_EMU: the same sources on the emulator) holds both backends.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "cpu/ctx.h"
#include "fp8.h"
#include "elements.h"
#include "quantized.h"
#include "shapes.h"
#include "base/shared_text.h"
#include "base/types.h"

namespace cpu {
#include "ops.inl"
}

#if defined(BACKEND_CUDA) || defined(BACKEND_EMU)
#include "gpu/ctx.cuh"
namespace gpu {
#include "ops.inl"
}
namespace be = gpu;
#else
namespace be = cpu;
#endif
