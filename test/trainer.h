// The trainer's source, included once for all tests of a program: without its main or, in the GPU's tests in bf16, with it as
// the program train_gpt, since it takes longest to compile.
#pragma once
#if (defined BACKEND_EMU || defined BACKEND_CUDA) && !defined PRECISION_FP32
#include "programs.h"
#define main trainer_main
#include "../train_gpt.cu"
#undef main
static const bool trainer_added = test::add_program("train_gpt", trainer_main);
#else
#define TRAIN_GPT_NO_MAIN
#include "../train_gpt.cu"
#endif
