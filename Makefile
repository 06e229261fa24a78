# train_gpt: pretraining of GPT, BLOOM and Llama models in one readable program.
#
#   make quickstart   from raw text to a trained model that writes text, in minutes   TEXT="a.txt b.txt"  OUT=quickstart
#   make train_gpt    the program for this machine, as ./train_gpt
#   make test         every test; ends with `N passed, N failed`
#   make test-interop  models and tokens exchanged with transformers (which pip puts under build/; 6 GB)
#   make fuzz         damaged and hostile files to every reader of files, each for FUZZ_SECONDS=60 seconds (with clang++)
#   make bench        speed of a training step and of each kernel on this CPU
#   make deps         install the Debian/Ubuntu packages that are missing (the targets above do it themselves)
#   make format clean
#
# Variables: PRECISION=bf16|fp32   SAN=address,undefined|thread   CXX=g++|clang++
# Programs lie in build/<configuration>/; ./train_gpt is a link to the one built last.

PRECISION ?= bf16
SAN       ?=
CXX       := $(if $(filter default,$(origin CXX)),g++,$(CXX))
NVCC      ?= $(or $(shell command -v nvcc),$(wildcard /usr/local/cuda/bin/nvcc))
BACKEND   ?= $(if $(and $(NVCC),$(shell nvidia-smi -L 2>/dev/null)),cuda,cpu)
comma     := ,
config    := $(BACKEND)-$(PRECISION)$(if $(SAN),-$(subst $(comma),-,$(SAN)))$(if $(filter-out g++,$(CXX)),-$(notdir $(CXX)))
build     := build/$(config)

ifeq ($(filter $(PRECISION),bf16 fp32),)
$(error PRECISION is '$(PRECISION)'; it must be bf16 or fp32)
endif
ifeq ($(filter $(BACKEND),cpu emu cuda),)
$(error BACKEND is '$(BACKEND)'; it must be cpu, cuda, or emu (the CUDA sources on an emulator))
endif

# -ffast-math is not used anywhere: it folds isfinite(NaN) to true. The two flags below only say that nobody reads errno or
# floating point traps, so that loops with sqrt and comparisons can be vectorised.
OPT      ?= -O3 -march=native
CXXFLAGS += -std=c++17 $(OPT) -g1 -Wall -Wextra -Werror -fopenmp -fno-math-errno -fno-trapping-math -MMD -MP -I. -Illmc
LDLIBS   += -ldnnl -lpcre2-8 -lpthread
ifneq ($(SAN),)
# Sanitizers with -O1, so that reports have lines; frame pointers for whole stacks.
CXXFLAGS += -fsanitize=$(SAN) -fno-sanitize-recover=all -fno-omit-frame-pointer -O1 -g
LDFLAGS  += -fsanitize=$(SAN)
endif

# The emulator stands in for the toolkit's headers (test/emu); #pragma unroll means nothing to g++.
EMUFLAGS := -DBACKEND_EMU -Itest/emu -Wno-unknown-pragmas -O2 -g
ifeq ($(BACKEND),emu)
CXXFLAGS += $(EMUFLAGS)
endif

flag_bf16 :=
flag_fp32 := -DPRECISION_FP32
flag_fp64 := -DPRECISION_FP64

.PHONY: help deps train_gpt quickstart test test-interop interop-programs bench fuzz format clean
.DEFAULT_GOAL := help

help:
	@awk '/^#/ { sub(/^# ?/, ""); print; next } { exit }' Makefile

dep_groups := build $(if $(findstring clang,$(notdir $(CXX))),clang)
deps:
	@scripts/install_deps.sh $(dep_groups)
deps-%:
	@scripts/install_deps.sh $(dep_groups) $*

# ---- the trainer ----
train_gpt: $(build)/train_gpt
	@ln -sf $(build)/train_gpt train_gpt

$(build)/train_gpt: train_gpt.cu Makefile | deps $(build)
	@echo "building $@"
	@$(CXX) -x c++ train_gpt.cu $(CXXFLAGS) $(flag_$(PRECISION)) -o $@ $(LDFLAGS) $(LDLIBS)

quickstart: deps-quickstart $(build)/train_gpt
	@TRAIN_GPT=$(build)/train_gpt TEXT="$(TEXT)" scripts/quickstart.sh

bench: $(build)/bench_cpu
	$<

$(build)/bench_cpu: dev/bench/bench_cpu.cpp Makefile | deps $(build)
	@echo "building $@"
	@$(CXX) $< $(CXXFLAGS) $(flag_$(PRECISION)) -o $@ $(LDFLAGS) $(LDLIBS)

$(build):
	@mkdir -p $@

# ---- tests: test/test_X.cpp is one GoogleTest program; a name ending in _fp32 or _fp64 fixes its precision ----
test_sources  := $(wildcard test/test_*.cpp)
test_scripts  := $(wildcard test/*_test.sh)
test_programs := $(patsubst test/%.cpp,$(build)/%,$(test_sources))
precision_of   = $(if $(filter %_fp64,$1),fp64,$(if $(filter %_fp32,$1),fp32,$(PRECISION)))

$(build)/test_%: test/test_%.cpp Makefile | deps-test $(build)
	@echo "building $@"
	@$(CXX) $< $(CXXFLAGS) $(TEST_OPT) $(flag_$(call precision_of,test_$*)) -o $@ $(LDFLAGS) -lgtest -lgtest_main $(LDLIBS)

# ---- tests of the GPU's kernels: test/gpu/test_X.cu, on the emulator, in both precisions ----
gpu_tests := $(patsubst test/gpu/test_%.cu,%,$(wildcard test/gpu/test_*.cu))
emu_suffix := $(patsubst $(BACKEND)-$(PRECISION)%,%,$(config))
emu_programs := $(foreach p,bf16 fp32,$(patsubst %,build/emu-$p$(emu_suffix)/test_gpu_%,$(gpu_tests)))

define emu_rule
build/emu-$1$(emu_suffix)/test_gpu_%: test/gpu/test_%.cu Makefile | deps-test
	@echo "building $$@"
	@mkdir -p $$(@D)
	@$(CXX) -x c++ $$< $(CXXFLAGS) $(if $(filter emu,$(BACKEND)),,$(EMUFLAGS)) $(flag_$1) -o $$@ $(LDFLAGS) -lgtest -lgtest_main $(LDLIBS)
endef
$(foreach p,bf16 fp32,$(eval $(call emu_rule,$p)))

# Programs are built two at a time whatever -j says to the outer make, then run one after another.
test: deps-test deps-quickstart
	@$(MAKE) -s --no-print-directory -j2 $(test_programs) $(emu_programs) $(build)/train_gpt
	@TRAIN_GPT=$(build)/train_gpt SAN=$(SAN) test/run.sh $(test_programs) $(emu_programs) $(test_scripts)

# ---- fuzzing: test/fuzz/fuzz_X.cpp is a libFuzzer target; findings go to build/fuzz/X ----
FUZZ_SECONDS  ?= 60
fuzz_programs := $(patsubst test/fuzz/%.cpp,build/fuzz/%,$(wildcard test/fuzz/fuzz_*.cpp))

fuzz: $(fuzz_programs)
	@test/fuzz/run.sh $(FUZZ_SECONDS) $(fuzz_programs)

build/fuzz/%: test/fuzz/%.cpp Makefile | deps-clang
	@echo "building $@"
	@mkdir -p $(@D)
	@clang++ $< -std=c++17 -O1 -g -Wall -Wextra -Werror -MMD -MP -fno-omit-frame-pointer \
	    -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all -o $@ -lpcre2-8

# ---- exchange with transformers and tokenizers, in both precisions; TRANSFORMERS=4 tests with the last of the older line ----
TRANSFORMERS   ?= 5
interop_builds := $(foreach p,fp32 bf16,$(patsubst cpu-$(PRECISION)%,build/cpu-$p%,$(config)))
interop_venv   := build/interop-venv

test-interop: $(interop_venv)/transformers-$(TRANSFORMERS)
	@$(MAKE) -s --no-print-directory PRECISION=fp32 interop-programs
	@$(MAKE) -s --no-print-directory PRECISION=bf16 interop-programs
	@PYTHONPATH=$(CURDIR)/$< $(interop_venv)/bin/python dev/interop/test_interop.py $(interop_builds)
	@$(MAKE) -s --no-print-directory $(interop_venv)/harness.installed
	@$(interop_venv)/bin/python dev/interop/test_harness.py $(word 1,$(interop_builds)) 2>/dev/null

interop-programs: $(build)/train_gpt $(build)/dump_logits

$(build)/dump_logits: dev/interop/dump_logits.cpp Makefile | deps $(build)
	@echo "building $@"
	@$(CXX) $< $(CXXFLAGS) $(flag_$(PRECISION)) -o $@ $(LDFLAGS) $(LDLIBS)

# transformers in a folder of its own, so that both lines share one torch.
$(interop_venv)/transformers-%: | $(interop_venv)/torch.installed
	@echo "installing transformers $* into $@"
	@$(interop_venv)/bin/pip install -q --target $@.tmp 'transformers==$*.*'
	@mv $@.tmp $@

$(interop_venv)/torch.installed: | deps-interop
	@echo "installing torch into $(interop_venv)"
	@python3 -m venv $(interop_venv)
	@$(interop_venv)/bin/pip install -q torch
	@touch $@

$(interop_venv)/harness.installed: | $(interop_venv)/torch.installed
	@echo "installing lm-evaluation-harness into $(interop_venv)"
	@$(interop_venv)/bin/pip install -q 'lm-eval[hf]==0.4.13'
	@touch $@

clean:
	rm -rf build train_gpt

format:
	clang-format -i train_gpt.cu llmc/*.h llmc/cpu/*.h test/*.cpp test/*.h test/fuzz/*.cpp test/fuzz/*.h dev/bench/*.cpp dev/interop/*.cpp

-include $(wildcard $(build)/*.d build/emu-*/*.d build/fuzz/*.d)
