# train_gpt: pretraining of GPT, BLOOM and Llama models in one readable program.
#
#   make quickstart     from raw text to a model that writes, in minutes
#                       TEXT="a.txt b.txt"  OUT=quickstart  STEPS=600  VOCAB=4096
#                       PRESET=quickstart (train_gpt help presets lists them)
#   make train_gpt      the program for this machine, as ./train_gpt
#   make install        program, manual page and bash completion, built as above
#                       PREFIX=/usr/local  DESTDIR=
#   make test           every test; ends with `N passed, N failed`
#                       FILTER=attention: those with that in their names
#   make test-all       the same, every layout of 8 ranks, machine code for
#                       other GPUs and of tests, ten minutes of chaos
#   make test-sass      Hopper's machine code and what kernels take, against
#                       dev/kernels/resources.md (WRITE=1 writes it); needs nvcc
#   make test-interop   models and tokens exchanged with transformers (which pip
#                       puts under build/; 6 GB)
#   make chaos          short trainings under injected faults (kills, full disks,
#                       damaged files) end with the bits of undisturbed ones
#                       CHAOS_SECONDS=600 or CHAOS_RUNS=N  CHAOS_SEED=
#                       CHAOS_BUILDS="cpu-bf16 emu-bf16"  CHAOS_LEAVE_OUT=
#                       CHAOS_FAULTS=
#   make fuzz           damaged and hostile files to every reader of files, each
#                       for FUZZ_SECONDS=60 seconds (with clang++)
#   make bench          speed of a training step and of each kernel, here
#   make bench-cpu      our training step on this CPU beside PyTorch's best, which
#                       pip puts under build/, and llm.c's in LLMC=FOLDER
#                       CONFIGS="gpt2-124m:1x1024 quickstart:8x256"
#                       PRECISIONS="bf16 fp32"  UNITS="AVX2 AVX-512" (or all)
#   make bench-ranks    speed on 1, 2, 4 CPU ranks, and what communication costs
#   make ladders        kernels from naive to the trainer's (dev/kernels): each
#                       checked, and on a GPU timed
#   make check-gpu      on a machine with a GPU: every kernel test, a training,
#                       benchmarks, compute-sanitizer; one table (or its stages:
#                       check-gpu-build, -tests, -train, -bench, -speed, -ladders,
#                       -sanitize)
#   make deps           install the Debian/Ubuntu packages that are missing (the
#                       targets above do it themselves; NODEPS=1: they do not)
#   make format clean
#
# Variables: BACKEND=cpu|cuda|emu (cuda where there are nvcc and a GPU; emu: the
#            CUDA sources on a CPU emulator)  PRECISION=bf16|fp32
#            SAN=address,undefined|thread  CXX=g++|clang++  WERROR=1 (as in CI)
#            ARCHS="80 90a" (GPUs to build for)  MARCH=native (CPU to build for)
# Programs lie in build/<configuration>/; ./train_gpt links to the one built last.

PRECISION ?= bf16
SAN       ?=
CXX       := $(if $(filter default,$(origin CXX)),g++,$(CXX))
NVCC      ?= $(or $(shell command -v nvcc),$(wildcard /usr/local/cuda/bin/nvcc))
BACKEND   ?= $(if $(and $(NVCC),$(shell nvidia-smi -L 2>/dev/null)),cuda,cpu)
comma     := ,
SUFFIX    :=
compiler  := $(notdir $(lastword $(CXX)))
config    := $(BACKEND)-$(PRECISION)$(if $(SAN),-$(subst $(comma),-,$(SAN)))$(if $(filter-out g++,$(compiler)),-$(compiler))$(SUFFIX)
build     := build/$(config)

ifeq ($(filter $(PRECISION),bf16 fp32),)
$(error PRECISION is '$(PRECISION)'; it must be bf16 or fp32)
endif
ifeq ($(filter $(BACKEND),cpu emu cuda),)
$(error BACKEND is '$(BACKEND)'; it must be cpu, cuda, or emu (the CUDA sources on an emulator))
endif

# -ffast-math is not used anywhere: it folds isfinite(NaN) to true. The two flags below only say that nobody reads errno or
# floating point traps, so that loops with sqrt and comparisons can be vectorised.
MARCH    ?= native
OPT      ?= -O3 -march=$(MARCH)
CXXFLAGS += -std=c++17 $(OPT) -g1 -Wall -Wextra $(if $(WERROR),-Werror) -Wno-psabi -fopenmp -fno-math-errno -fno-trapping-math -MMD -MP -I.
LDLIBS   += -lpcre2-8 -lpthread
# For comparison, in a ladder, if it is installed: looked for when a recipe runs.
have_dnnl = $(shell printf '\043include <oneapi/dnnl/dnnl.hpp>\n' | $(CXX) -E -x c++ - >/dev/null 2>&1 && echo yes)
# Libraries from scripts/vendor.sh, on a machine that has no packages.
ifneq ($(wildcard build/deps/include),)
ifneq ($(NODEPS),)
CXXFLAGS  += -isystem build/deps/include
NVCCFLAGS += -isystem build/deps/include
LDFLAGS   += -Lbuild/deps/lib
endif
endif
ifneq ($(SAN),)
# Sanitizers with -O1, so that reports have lines; frame pointers for whole stacks.
CXXFLAGS += -fsanitize=$(SAN) -fno-sanitize-recover=all -fno-omit-frame-pointer -O1 -g
LDFLAGS  += -fsanitize=$(SAN)
endif

# For the GPU: nvcc, for the GPU of this machine or, without one, for all that the toolkit knows of Ampere, Hopper, Blackwell.
ifeq ($(BACKEND),cuda)
arch_here  = $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | tr -d . | sort -u | sed 's/^\(90\|100\)$$/&a/')
ARCHS     ?= $(or $(arch_here),80 90a 100a 120)
NVCCFLAGS += -std=c++17 -O3 -lineinfo -t 2 -DBACKEND_CUDA -I. -MMD -MP $(if $(WERROR),-Werror all-warnings) -Xcompiler -march=$(MARCH),-fopenmp,-Wall,-Wextra,-Wno-parentheses,-fno-math-errno,-fno-trapping-math \
             $(foreach a,$(ARCHS),-gencode=arch=compute_$a,code=sm_$a)
LDLIBS    += -lcublasLt -lgomp $(addprefix -Xlinker=-rpath=,$(wildcard $(abspath $(dir $(realpath $(NVCC)))..)/lib64 $(abspath $(dir $(realpath $(NVCC)))..)/lib))
endif

# MPI: the ranks of one run. Only programs that use it load it. MPI=0 leaves it out, for one rank alone.
MPI       ?= $(shell command -v mpicxx >/dev/null && echo 1)
mpi_words  = $(shell mpicxx --showme:compile 2>/dev/null && mpicxx --showme:link 2>/dev/null || (mpicxx -compile-info; mpicxx -link-info) 2>/dev/null)
mpi_flags  = $(if $(filter 1,$(MPI)),$(patsubst -I%,-isystem %,$(filter -I%,$(mpi_words))),-DHAVE_MPI=0)
mpi_link   = $(if $(filter 1,$(MPI)),-Wl$(comma)--as-needed $(filter-out -lmpi_cxx -lmpicxx -lmpichcxx,$(filter -L% -l% -Wl%,$(mpi_words))) -Wl$(comma)--no-as-needed)
CXXFLAGS  += $(mpi_flags)
NVCCFLAGS += $(mpi_flags)
LDLIBS    += $(if $(filter cuda,$(BACKEND)),$(subst -Wl$(comma),-Xlinker=,$(mpi_link)),$(mpi_link))
ifeq ($(BACKEND),cuda)
have_nccl  = $(shell printf '\043include <nccl.h>\n' | $(CXX) -E -x c++ $(if $(NODEPS),-isystem build/deps/include) -I$(dir $(NVCC))../include - >/dev/null 2>&1 && echo yes)
LDLIBS    += $(if $(have_nccl),-lnccl)
endif

# The emulator stands in for the toolkit's headers (test/emu); #pragma unroll means nothing to g++.
EMUFLAGS := -DBACKEND_EMU -Itest/emu -Wno-unknown-pragmas -O1 -g -rdynamic

flag_bf16 :=
flag_fp32 := -DPRECISION_FP32
flag_fp64 := -DPRECISION_FP64

.PHONY: help deps train_gpt quickstart test test-interop interop-programs bench fuzz format clean
.DEFAULT_GOAL := help

help:
	@awk '/^#/ { sub(/^# ?/, ""); print; next } { exit }' Makefile

dep_groups := build $(if $(findstring clang,$(compiler)),clang)
deps:
	@$(if $(NODEPS),true,scripts/install_deps.sh $(dep_groups))
deps-%:
	@$(if $(NODEPS),true,scripts/install_deps.sh $(dep_groups) $*)

# ---- the trainer ----
train_gpt: $(build)/train_gpt
	@ln -sf $(build)/train_gpt train_gpt

# $(call compile,SOURCE,PRECISION) compiles CUDA sources with nvcc, or with the host's compiler.
compile = $(if $(filter cuda,$(BACKEND)),$(NVCC) -x cu $(NVCCFLAGS),$(CXX) -x c++ $(CXXFLAGS) $(if $(filter emu,$(BACKEND)),$(EMUFLAGS))) $1 $(flag_$2) -o $@ $(LDFLAGS)

# Of the commit at the time of the build; a later one alone makes nothing stale.
git_version = $(or $(shell git describe --always --dirty 2>/dev/null),not built from git)

$(build)/train_gpt: train_gpt.cu Makefile | deps $(build)
	@echo "building $@"
	@$(call compile,train_gpt.cu,$(PRECISION)) -DGIT_VERSION='"$(git_version)"' $(LDLIBS)

PREFIX    ?= /usr/local
installed := $(DESTDIR)$(PREFIX)
.PHONY: install
install: $(or $(TRAIN_GPT),$(build)/train_gpt)
	@$< help --man >$(build)/train_gpt.1 && $< help --bash >$(build)/train_gpt.bash
	@install -D $< "$(installed)/bin/train_gpt"
	@install -Dm644 $(build)/train_gpt.1 "$(installed)/share/man/man1/train_gpt.1"
	@install -Dm644 $(build)/train_gpt.bash "$(installed)/share/bash-completion/completions/train_gpt"
	@echo "installed train_gpt in $(installed)"

quickstart: deps-quickstart train_gpt
	@TRAIN_GPT=./train_gpt scripts/quickstart.sh

bench: $(build)/bench
	$<

.PHONY: bench-ranks
bench-ranks:
	@$(MAKE) -s --no-print-directory BACKEND=cpu build/cpu-$(PRECISION)/train_gpt
	@TRAIN_GPT=build/cpu-$(PRECISION)/train_gpt dev/bench/ranks.sh

$(build)/bench: dev/bench/bench.cu Makefile | deps $(build)
	@echo "building $@"
	@$(call compile,$<,$(PRECISION)) $(LDLIBS)

$(build):
	@mkdir -p $@

# ---- tests: test/test_X.cpp is one GoogleTest program; a name ending in _fp32 or _fp64 fixes its precision. make test compiles
#      those of one kind as one program, in a third of the time; make build/cpu-bf16/test_X is one alone ----
test_sources  := $(wildcard test/test_*.cpp)
test_scripts  := $(wildcard test/*_test.sh)
kernel_tests  := $(filter $(foreach t,attention elements fp8 matmul ops threads unit_choice,test/test_$t.cpp),$(test_sources))
fp32_tests    := $(filter %_fp32.cpp,$(test_sources))
fp64_tests    := $(filter %_fp64.cpp,$(test_sources))
host_tests    := $(filter-out $(kernel_tests) $(fp32_tests) $(fp64_tests),$(test_sources))
test_programs := $(foreach k,kernel fp32 fp64 host,$(build)/$k_tests)
precision_of   = $(if $(filter %_fp64,$1),fp64,$(if $(filter %_fp32,$1),fp32,$(PRECISION)))
# $(call include_all,SOURCES) writes a source that has them all, for a compiler's standard input.
include_all    = printf '\043include "%s"\n' $1 |

$(build)/test_%: test/test_%.cpp Makefile | deps-test $(build)
	@echo "building $@"
	@$(CXX) $< $(CXXFLAGS) $(TEST_OPT) $(flag_$(call precision_of,test_$*)) -o $@ $(LDFLAGS) -lgtest -lgtest_main $(LDLIBS)

# -O1 where no kernel's speed is waited for.
define tests_rule
$(build)/$1_tests: $($1_tests) Makefile | deps-test $(build)
	@echo "building $$@"
	@$$(call include_all,$($1_tests)) $(CXX) -x c++ - $(CXXFLAGS) $(if $(filter kernel,$1),,-O1) $(TEST_OPT) $(flag_$(or $(filter fp32 fp64,$1),$(PRECISION))) -MF $$@.d -o $$@ $(LDFLAGS) -lgtest -lgtest_main $(LDLIBS)
endef
$(foreach k,kernel fp32 fp64 host,$(eval $(call tests_rule,$k)))

# ---- tests of the GPU's kernels and of the whole trainer on them, in both precisions: test/gpu/test_X.cu, and the golden models.
#      On the emulator; with BACKEND=cuda on a GPU ----
gpu_backend  := $(if $(filter cuda,$(BACKEND)),cuda,emu)
gpu_suffix   := $(patsubst $(BACKEND)-$(PRECISION)%,%,$(config))
gpu_tests    := $(patsubst test/gpu/test_%.cu,test_gpu_%,$(wildcard test/gpu/test_*.cu))
gpu_programs := $(foreach p,bf16 fp32,$(addprefix build/$(gpu_backend)-$p$(gpu_suffix)/,$(gpu_tests))) \
                build/$(gpu_backend)-fp32$(gpu_suffix)/test_gpu_golden
# The emulator's as one program a precision; nvcc takes one at a time.
gpu_tested   := $(if $(filter emu,$(gpu_backend)),$(foreach p,bf16 fp32,build/emu-$p$(gpu_suffix)/gpu_tests) $(filter %_golden,$(gpu_programs)),$(gpu_programs))
gpu_trainer  := build/$(gpu_backend)-bf16$(gpu_suffix)/train_gpt
compile_gpu   = $(if $(filter cuda,$(BACKEND)),$(NVCC) -x cu $(NVCCFLAGS),$(CXX) -x c++ $(CXXFLAGS) $(EMUFLAGS)) $1 $(flag_$2) -o $@ \
                $(LDFLAGS) -lgtest -lgtest_main $(LDLIBS)

define gpu_rules
build/$(gpu_backend)-$1$(gpu_suffix)/test_gpu_%: test/gpu/test_%.cu Makefile | deps-test
	@echo "building $$@"
	@mkdir -p $$(@D)
	@$$(call compile_gpu,$$<,$1)
build/$(gpu_backend)-$1$(gpu_suffix)/test_gpu_golden: test/test_golden_fp32.cpp Makefile | deps-test
	@echo "building $$@"
	@mkdir -p $$(@D)
	@$$(call compile_gpu,$$<,$1)
build/$(gpu_backend)-$1$(gpu_suffix)/gpu_tests: $(wildcard test/gpu/test_*.cu) Makefile | deps-test
	@echo "building $$@"
	@mkdir -p $$(@D)
	@$$(call include_all,$$(filter %.cu,$$^)) $$(call compile_gpu,- -MF $$@.d,$1)
endef
$(foreach p,bf16 fp32,$(eval $(call gpu_rules,$p)))
ifeq ($(BACKEND),cpu)
$(gpu_trainer): train_gpt.cu Makefile | deps
	@$(MAKE) -s --no-print-directory BACKEND=$(gpu_backend) PRECISION=bf16 $@
endif

# ---- several ranks: what is exchanged (test/comm_test.sh), and every layout against one rank (test/parity_test.sh); on the CPU and
#      on the GPU's side ----
emu_build     := build/$(gpu_backend)-bf16$(gpu_suffix)
comm_programs := $(sort $(build)/comm_check $(emu_build)/comm_check)
parity_cpu    := $(patsubst build/$(BACKEND)-$(PRECISION)%,build/cpu-fp32%,$(build))/parity_check
parity_gpu    := $(emu_build)/parity_check
rank_programs := $(comm_programs) $(parity_cpu) $(parity_gpu)

$(build)/%_check: test/%_check.cu Makefile | deps $(build)
	@echo "building $@"
	@$(call compile,$<,$(PRECISION)) $(if $(filter cuda,$(BACKEND)),,-O1) $(LDLIBS)
ifneq ($(filter-out $(build)/%,$(rank_programs)),)
$(filter-out $(build)/%,$(rank_programs)): test/comm_check.cu test/parity_check.cu Makefile | deps
	@$(MAKE) -s --no-print-directory BACKEND=$(firstword $(subst -, ,$(notdir $(@D)))) PRECISION=$(word 2,$(subst -, ,$(notdir $(@D)))) $@
endif

# ---- ladders: dev/kernels/X.cu has one op several times, from naive to the trainer's; checked, and on a GPU timed.
#      A .cpp there is a ladder of the CPU's ----
ladder_programs := $(patsubst dev/kernels/%.cu,build/$(gpu_backend)-bf16$(gpu_suffix)/ladder_%,$(wildcard dev/kernels/*.cu)) \
                   $(if $(filter cpu,$(BACKEND)),$(patsubst dev/kernels/%.cpp,build/cpu-bf16$(gpu_suffix)/ladder_%,$(wildcard dev/kernels/*.cpp)))

.PHONY: ladders
ladders: $(ladder_programs)
	@failed=0; for program in $^; do $$program || failed=1; done; exit $$failed

# cuDNN's attention stands beside ours where its headers and library are found. CUDNN=1 insists on it, CUDNN=0 leaves it out;
# CUDNN_FRONTEND=DIR: where cudnn_frontend.h is.
cudnn_include := $(if $(CUDNN_FRONTEND),-isystem $(CUDNN_FRONTEND))
CUDNN         ?= $(shell printf '\043include <cudnn_frontend.h>\n' | $(CXX) -E -x c++ $(cudnn_include) -I$(dir $(NVCC))../include - >/dev/null 2>&1 && \
                   echo 'int main() {}' | $(CXX) -x c++ - -L$(dir $(NVCC))../lib64 -lcudnn -o /dev/null 2>/dev/null && echo 1)
ladder_cudnn   = $(if $(and $(filter cuda,$(BACKEND)),$(filter %ladder_attention,$@)),$(if $(filter 1,$(CUDNN)),-DLADDER_CUDNN $(cudnn_include) -lcudnn -lnvrtc))

build/$(gpu_backend)-bf16$(gpu_suffix)/ladder_%: dev/kernels/%.cu Makefile | deps
	@echo "building $@"
	@mkdir -p $(@D)
	@$(filter-out -lgtest -lgtest_main,$(call compile_gpu,$<,bf16)) $(ladder_cudnn)

build/cpu-bf16$(gpu_suffix)/ladder_%: dev/kernels/%.cpp Makefile | deps
	@echo "building $@"
	@mkdir -p $(@D)
	@$(CXX) $< $(CXXFLAGS) -o $@ $(LDFLAGS) $(if $(have_dnnl),-ldnnl) $(LDLIBS)

# ---- all tests. The CPU's are built for the CPU whatever BACKEND is; programs are built two at a time whatever -j says to the
#      outer make, then run one after another ----
# FILTER=attention: programs and scripts with that in their names.
FILTER           ?=
programs_to_test := $(if $(filter cpu,$(BACKEND)),$(test_programs)) $(gpu_tested)
scripts_to_test  := $(test_scripts)
ifneq ($(FILTER),)
programs_to_test := $(foreach p,$(if $(filter cpu,$(BACKEND)),$(patsubst test/%.cpp,$(build)/%,$(test_sources))) $(gpu_programs),$(if $(findstring $(FILTER),$(notdir $p)),$p))
scripts_to_test  := $(foreach s,$(test_scripts),$(if $(findstring $(FILTER),$(notdir $s)),$s))
endif
for_scripts      := $(if $(scripts_to_test),$(ladder_programs) $(rank_programs) $(build)/train_gpt $(gpu_trainer))

test: deps-test deps-quickstart deps-chaos
	@$(if $(strip $(programs_to_test) $(scripts_to_test)),,$(error FILTER=$(FILTER): no test has that in its name))
	@$(MAKE) -s --no-print-directory -j2 $(for_scripts) $(programs_to_test)
	@TRAIN_GPT=$(build)/train_gpt GPU_TRAIN_GPT=$(gpu_trainer) LADDERS="$(ladder_programs)" COMM_CHECK="$(comm_programs)" PARITY_CHECK="$(parity_cpu) $(parity_gpu)" SAN=$(SAN) CXX=$(lastword $(CXX)) NVCC=$(NVCC) test/run.sh $(scripts_to_test) $(programs_to_test)

.PHONY: test-all
test-all: test
	@RANKS=8 PARITY_CHECK="$(parity_cpu)" test/run.sh test/parity_test.sh
	@NVCC=$(NVCC) ONLY=rest test/run.sh test/cuda_build_test.sh
	@$(MAKE) -s --no-print-directory chaos

# ---- machine code; cuobjdump and nvdisasm are the toolkit's or, where it is not whole, pip's ----
cuda_tools := build/cuda-tools/installed

.PHONY: test-sass
test-sass: $(if $(and $(NVCC),$(if $(shell PATH=$$PATH:$(dir $(realpath $(NVCC))) command -v cuobjdump),,1)),$(cuda_tools))
	@NVCC=$(NVCC) WRITE=$(WRITE) ONLY=sass test/run.sh test/cuda_build_test.sh

$(cuda_tools): | deps-interop
	@echo "installing cuobjdump and nvdisasm into $(@D)"
	@python3 -m venv $(@D)
	@$(@D)/bin/pip install -q nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm
	@touch $@

# ---- chaos: tiny trainings while everything goes wrong ----
CHAOS_SECONDS ?= 600
CHAOS_BUILDS  ?= cpu-bf16 emu-bf16

.PHONY: chaos
chaos: deps-chaos
	@$(foreach b,$(CHAOS_BUILDS),$(MAKE) -s --no-print-directory BACKEND=$(word 1,$(subst -, ,$b)) PRECISION=$(word 2,$(subst -, ,$b)) build/$b/train_gpt &&) true
	@test/chaos/chaos.py $(if $(CHAOS_RUNS),--runs $(CHAOS_RUNS),--seconds $(CHAOS_SECONDS)) $(if $(CHAOS_SEED),--seed $(CHAOS_SEED)) \
	    --leave-out "$(CHAOS_LEAVE_OUT)" --faults "$(CHAOS_FAULTS)" $(CHAOS_BUILDS:%=build/%/train_gpt)

# ---- the whole of it on a GPU ----
.PHONY: check-gpu check-gpu-% gpu-programs print-gpu-programs print-train-gpt print-bench print-ladders
check-gpu:
	@scripts/check_gpu.sh
check-gpu-%:
	@scripts/check_gpu.sh $*
gpu-programs: $(gpu_programs) $(ladder_programs) $(build)/train_gpt $(build)/bench
print-gpu-programs:
	@echo $(gpu_programs)
print-train-gpt:
	@echo $(build)/train_gpt
print-bench:
	@echo $(build)/bench
print-ladders:
	@echo $(ladder_programs)

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
	@$(MAKE) -s --no-print-directory $(interop_venv)/tensorboard.installed
	@$(interop_venv)/bin/python dev/interop/test_tensorboard.py $(word 1,$(interop_builds))
	@dev/interop/report_in_browser.sh $(word 1,$(interop_builds))

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

$(interop_venv)/tensorboard.installed: | $(interop_venv)/torch.installed
	@echo "installing tensorboard into $(interop_venv)"
	@$(interop_venv)/bin/pip install -q tensorboard
	@touch $@

# ---- our training step beside PyTorch's, from the same folder, and llm.c's; CONFIGS, LLMC: see dev/bench/cpu.py ----
PRECISIONS  ?= bf16 fp32
# UNITS: each unit's program is compiled for no more than it.
bench_marchs := native $(if $(filter AVX2 all,$(UNITS)),x86-64-v3) $(if $(filter AVX-512 all,$(UNITS)),x86-64-v4)

.PHONY: bench-cpu
bench-cpu: $(interop_venv)/torch.installed
	@$(foreach p,$(PRECISIONS),$(foreach m,$(bench_marchs),$(MAKE) -s --no-print-directory BACKEND=cpu PRECISION=$p MARCH=$m SUFFIX=$(patsubst -native,,-$m) build/cpu-$p$(gpu_suffix)$(patsubst -native,,-$m)/bench &&)) true
	@$(interop_venv)/bin/python dev/bench/cpu.py --bench 'build/cpu-{precision}$(gpu_suffix){march}/bench' --precisions "$(PRECISIONS)" \
	    $(if $(CONFIGS),--configs "$(CONFIGS)") $(if $(LLMC),--llmc "$(LLMC)") $(if $(UNITS),--units "$(UNITS)")

clean:
	rm -rf build train_gpt

format:
	clang-format -i train_gpt.cu llmc/*.h llmc/*/*.h llmc/*/*.cuh test/*.cpp test/*.cu test/gpu/* test/*.h test/fuzz/*.cpp test/fuzz/*.h dev/bench/*.cu dev/kernels/*.cu dev/kernels/*.h dev/interop/*.cpp

-include $(wildcard $(build)/*.d build/emu-*/*.d build/cuda-*/*.d build/fuzz/*.d)
