// Every op of namespace cpu, except where another unit has them (dev/units).
#pragma once
#ifndef SEVERAL_UNITS
#include "attention.h"
#include "embed.h"
#include "experts.h"
#include "fp8.h"
#include "fp8_linear.h"
#include "lora.h"
#include "loss.h"
#include "matmul.h"
#include "memory.h"
#include "mlp.h"
#include "norm.h"
#include "optimizer.h"
#include "quantized.h"
#include "reduce.h"
#include "rope.h"
#endif
