// The trainer's own source: one program that tests include together has it once. Without its main; or with it, as the program
// train_gpt within the emulator's tests, which takes longest to compile.
#pragma once
#ifdef BACKEND_EMU
#include "programs.h"
#define main trainer_main
#include "../train_gpt.cu"
#undef main
static const bool trainer_added = test::add_program("train_gpt", trainer_main);
#else
#define TRAIN_GPT_NO_MAIN
#include "../train_gpt.cu"
#endif
