// The trainer's own source, without its main: one that tests include together has it once.
#pragma once
#define TRAIN_GPT_NO_MAIN
#include "../train_gpt.cu"
