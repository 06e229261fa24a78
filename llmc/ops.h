// The ops of ops.inl, declared in each backend's namespace. `be` is the backend of this build: the model code says be:: and
// knows nothing else about it.
#pragma once
#include <cstddef>
#include <cstdint>

#include "cpu/ctx.h"
#include "types.h"

namespace cpu {
#include "ops.inl"
}
namespace be = cpu;
