// Groups of ranks that exchange tensors, for this build's backend: be::Comm and its operations (ops.inl). Over MPI between
// CPUs, over NCCL between GPUs.
#pragma once
#include "comm_cpu.h"
#if defined(BACKEND_CUDA) || defined(BACKEND_EMU)
#include "comm_gpu.cuh"
#endif
