// Every op of namespace gpu.
#pragma once
#include "memory.cuh"
#include "embed.cuh"
#include "norm.cuh"
#include "matmul.cuh"
#include "fp8.cuh"
#include "fp8_linear.cuh"
#include "rope.cuh"
#include "attention.cuh"
#include "mlp.cuh"
#include "loss.cuh"
#include "optimizer.cuh"
#include "reduce.cuh"
