# train_gpt: training language models in one readable program.
#
# make quickstart   from raw text to a model that generates text, in minutes
#                   TEXT="a.txt b.txt"  OUT=quickstart  STEPS=600  VOCAB=4096
#                   PRESET=quickstart  TUNE=1 TUNE_BUDGET=5m: first a sweep
# make train_gpt    the program for this machine, as ./train_gpt
# make dev          the same for development: a change compiles in a fraction of
#                   the time, with -j3; slow to run. make debug: for a debugger
# make install      program, manual page, completion  PREFIX=/usr/local  DESTDIR=
# make test         every test, in ten minutes; ends with `N passed, N failed`
#                   FILTER=attention: only tests with this in their names
# make test-all     a longer version: more layouts, kills, ladders, chaos, pairs
# make coverage     runs the tests, reports lines and branches that none ran
# make test-sass    checks Hopper's machine code, dev/kernels/resources.md WRITE=1
# make test-interop exchanges models, adapters, tokens with transformers, PEFT,
#                   llama.cpp (pip: 6 GB)  TRANSFORMERS=5  INTEROP="models gguf"
# make chaos        kills, full disks and damage must leave a run's bits equal
#                   CHAOS_SECONDS=600 CHAOS_SEED= CHAOS_FAULTS= (test/README.md)
# make pairs        rules checked on random pairs of options PAIRS=300 PAIRS_SEED=
# make simulate     supervised jobs on failing nodes, in simulated time JOBS=20000
# make fuzz         fuzzes every file reader  FUZZ_SECONDS=60 each
# make bench        speed of a training step and of each kernel on this machine
# make bench-cpu    our training step on this CPU and PyTorch's best, installed
#                   in build/  CONFIGS="gpt2-124m:1x1024 quickstart:8x256"
#                   PRECISIONS="bf16 fp32" UNITS="AVX2 AVX-512"|all LLMC=FOLDER
# make bench-data   text to tokens: ours, tiktoken, Hugging Face's tokenizers
# make bench-inference  tokens read and generated per second, and llama.cpp's
# make bench-ranks  speed on 1, 2, 4 CPU ranks, and the cost of communication
# make ladders      checks kernels from naive to the trainer's; on GPUs times them
# make check-gpu    tests, training, speed of a GPU, in a table (check-gpu-STAGE)
# make gpu-pack     build/gpu-pack: everything for gpu_minutes.sh on a GPU
# make deps         installs missing packages; targets do so unless NODEPS=1
# make lint format clean compile_commands.json    STAGES="format shell prose"
# Variables: BACKEND=cpu|cuda|emu (default cuda if nvcc and a GPU exist; emu: the
#            CUDA sources on an emulator)  PRECISION=bf16|fp32  MPI=0 (one rank)
#            SAN=address,undefined|thread  WERROR=1 (as in CI)
#            CXX=g++|clang++|aarch64-linux-gnu-g++ (for another CPU)
#            ARCHS="80 90a" (GPUs to build for)  MARCH=native (CPU to build for)
# Every program has a path: make build/BACKEND-PRECISION[-SAN][-COMPILER]/NAME
help: ; @awk '/^\#/ { sub(/^\# ?/, ""); print; next } { exit }' Makefile
.PHONY: compile_commands.json $(shell sed -n 's/^\([a-z][a-z_ -]*\):.*/\1/p' Makefile)
PRECISION ?= bf16
MAKEFLAGS += --no-builtin-rules
CXX       := $(if $(filter default,$(origin CXX)),$(if $(shell command -v ccache),ccache) g++,$(CXX))
NVCC      ?= $(or $(shell command -v nvcc),$(wildcard /usr/local/cuda/bin/nvcc))
BACKEND   ?= $(if $(and $(NVCC),$(shell nvidia-smi -L >/dev/null 2>&1 && echo 1)),cuda,cpu)
$(if $(filter bf16 fp32,$(PRECISION)),,$(error PRECISION is '$(PRECISION)'; it must be bf16 or fp32))
$(if $(filter cpu emu cuda,$(BACKEND)),,$(error BACKEND is '$(BACKEND)'; it must be cpu, cuda, or emu (an emulator)))

# ---- flags, from the target's folder and name; _fp32 or _fp64 in the name fixes the precision ----
comma     := ,
space     := $(subst ,, )
compiler  := $(notdir $(lastword $(CXX)))
given     := $(if $(filter command,$(origin MARCH)),-$(MARCH))
tail      := $(if $(SAN),-$(subst $(comma),-,$(SAN)))$(if $(filter-out g++,$(compiler)),-$(compiler))$(given)$(SUFFIX)
build     := build/$(BACKEND)-$(PRECISION)$(tail)
words      = $(subst -, ,$(notdir $(@D)))
backend    = $(firstword $(words))
precision  = $(firstword $(filter fp32 fp64,$(subst _, ,$(@F))) $(word 2,$(words)))
sanitizer  = $(subst $(space),$(comma),$(filter address leak thread undefined,$(words)))
include scripts/cpu.mk  # march, for_cpu
# Tests: -O1, or -Og where few kernels are called, without debug information. This, less frequent garbage collection and
# huge pages save an eighth of the compile time. For the emulator, test/emu replaces the toolkit's headers.
quick      = $(if $(filter host_tests,$(@F)),-Og,$(if $(filter %_tests %_check,$(@F:kernel_tests=)),-O1))
kind       = $(filter coverage debug dev,$(words))
opt_coverage := -O1 --coverage -fprofile-update=atomic
opt_debug := -O0 -g3
opt_dev    = -O$(if $(filter ops.o,$(@F)),1,0) -g1
OPT       ?= $(or $(opt_$(kind)),$(or $(quick),-O3) -g$(if $(is_test),0,1)) $(for_cpu)
CXXFLAGS  += -std=c++17 $(OPT) $(if $(filter g++%,$(compiler)),--param ggc-min-heapsize=1000000) -Wall -Wextra $(math) \
             -I. $(if $(WERROR),-Werror) -fopenmp $(vendored) $(mpi_include) $(flags_$(backend)) $(precise) -Wno-psabi \
             $(if $(sanitizer),-fsanitize=$(sanitizer) -fno-sanitize-recover=all -fno-omit-frame-pointer -O1 -g)
flags_emu  = -DBACKEND_EMU -Itest/emu -Wno-unknown-pragmas -rdynamic \
             $(if $(filter coverage debug,$(kind)),,-Og $(if $(filter train_gpt test_%,$(@F)),-g))
NVCCFLAGS += -std=c++17 -O3 -lineinfo -t 2 -DBACKEND_CUDA -I. $(vendored) $(mpi_include) $(precise) \
             $(if $(WERROR),-Werror all-warnings) $(foreach a,$(ARCHS:90=90a),-gencode=arch=compute_$a,code=sm_$a) \
             -Xcompiler $(for_cpu),-fopenmp,-Wall,-Wextra,-Wno-parentheses,$(subst $(space),$(comma),$(math))
precise    = $(patsubst %,-DPRECISION_%,$(subst fp,FP,$(filter fp32 fp64,$(precision))))
# Nothing reads errno or traps; without them, loops with sqrt vectorize. Never -ffast-math: isfinite(NaN) would be true.
math      := -fno-math-errno -fno-trapping-math
# For this machine's GPU or, without one, Ampere, Hopper and Blackwell if nvcc supports them; 90 becomes 90a (wgmma).
gpu_here   = $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>&1 | grep -x "[0-9.]*"|tr -d .|sort -u)
ARCHS     ?= $(or $(gpu_here),$(foreach a,80 90 100 120,$(if $(findstring sm_$a,$(shell $(NVCC) --list-gpu-code)),$a)))
# Libraries; the optional ones of scripts/libraries.txt if installed. Without packages they are from scripts/vendor.sh.
vendored  := $(addprefix -isystem ,$(or $(other_include),$(if $(NODEPS),$(wildcard build/deps/include))))
LDFLAGS   += $(or $(other_link),$(if $(vendored),-Lbuild/deps/lib))
LDLIBS    += $(if $(is_test),-lgtest) -lpcre2-8 -lpthread \
             $(if $(filter cuda,$(backend)),$(libs_cuda) $(subst -Wl$(comma),-Xlinker=,$(mpi_link)),$(mpi_link))
optional   = $(shell awk '!/^\#/ { print "\043if __has_include(<" $$2 ">)\n" $$3 "\n\043endif" }' \
             scripts/libraries.txt | $(CXX) -x c++ -E -P $(vendored) -)
cuda_root  = $(abspath $(dir $(realpath $(NVCC)))..)
libs_cuda  = -lcublasLt -lgomp $(nccl) $(patsubst %,-Xlinker=-rpath=%,$(wildcard $(cuda_root)/lib*))
nccl       = $(shell printf '\043if __has_include(<nccl.h>)\n-lnccl\n\043endif' | $(CXX) -E -P -I$(cuda_root)/include -)
# MPI, for several ranks. Only programs that use it load it.
MPI       ?= $(shell command -v mpicxx >/dev/null && echo 1)
mpi_words  = $(if $(filter 1,$(MPI)),$(shell mpicxx -show 2>/dev/null $(other_mpi)))
mpi_include= $(if $(mpi_words),$(patsubst -I%,-isystem %,$(filter -I%,$(mpi_words))),-DHAVE_MPI=0)
mpi_link   = -Wl,--as-needed $(optional) $(filter-out %mpi_cxx %mpicxx %mpichcxx,$(filter -L% -l% -Wl%,$(mpi_words)))

# ---- programs, by name. Tests of one kind share a program, which builds in a third of the time of separate ones; the
#      emulator's includes the trainer (test/main.cpp); fp32 has only tests that depend on the storage type ----
main         := test/main.cpp
train_gpt    := train_gpt.cu
unit_tests   := $(wildcard test/test_*.cpp)
kernel_tests := $(patsubst %,test/test_%.cpp,attention elements experts fp8 matmul ops threads unit_choice) $(main)
fp32_tests   := $(filter %_fp32.cpp,$(unit_tests)) test/parity_check.cu $(main)
fp64_tests   := $(filter %_fp64.cpp,$(unit_tests)) $(main)
host_tests   := $(filter-out $(kernel_tests) $(fp32_tests) $(fp64_tests),$(unit_tests)) test/comm_check.cu $(main)
test_gpu_golden := test/test_golden_fp32.cpp $(main)
of_gpu_fp32  := $(filter-out %hopper.cu %cublaslt.cu %language.cu,$(wildcard test/gpu/*.cu))
gpu_tests     = $(if $(filter fp32,$(precision)),$(of_gpu_fp32),$(wildcard test/*_check.cu test/gpu/*.cu)) $(main)
of_dev        = $(wildcard test/$(@F).cpp dev/*/$(@F).c* $(patsubst ladder_%,dev/kernels/%.c*,$(filter ladder_%,$(@F))))
test          = $(patsubst test_%,test/test_%.cpp,$(patsubst test_gpu_%,test/gpu/test_%.cu,$(@F:%_check=test/$(@F).cu)))
is_test       = $(filter test_% %_tests %_check,$(@F))
sources       = $(or $($(@F)),$(if $(is_test),$(test) $(main)),$(of_dev),$(error no program is called $@; make help))
version       = -DGIT_VERSION='"$(or $(shell git describe --always --dirty 2>/dev/null),not built from git)"'
command       = $(if $(filter cuda,$(backend)),$(NVCC) $1 $(NVCCFLAGS),$(CXX) $2 $(CXXFLAGS))

.SECONDEXPANSION .DELETE_ON_ERROR:
build/%: $$(sources) Makefile | deps$$(if $$(is_test),-test)
	@scripts/build_step.sh $@ $(call command,-x cu,-x c++) $(if $(filter train_gpt,$(@F)),$(version)) \
	    -MMD -MP -MF $@.d -MT $@ -c -o $@.o $(addprefix -include ,$(filter-out $(lastword $(sources)),$(sources))) \
	    $(lastword $(sources))
	@$(command) $@.o -o $@ $(LDFLAGS) $(LDLIBS) && rm $@.o
# Development on a CPU: three units, which train_gpt.cu includes otherwise
dev_build := $(if $(filter cpu,$(BACKEND)),$(build:-dev=)-dev)
units     := $(if $(dev_build),$(patsubst %,$(dev_build)/%.o,train_gpt ops host_commands))
$(units): $(dev_build)/%.o: $$(or $$(wildcard dev/units/$$*.cpp),train_gpt.cu) Makefile | deps
	@scripts/build_step.sh $@ $(call command,,-x c++) $(if $(filter train_gpt.o,$(@F)),-DSEVERAL_UNITS $(version)) \
	    -MMD -MP -MF $@.d -MT $@ -c -o $@ $<
$(addsuffix /train_gpt,$(dev_build)): $(units)
	@$(command) $(units) -o $@ $(LDFLAGS) $(LDLIBS)
fuzzers := $(patsubst test/fuzz/%.cpp,build/fuzz/%,$(wildcard test/fuzz/fuzz_*.cpp))
$(fuzzers): build/fuzz/%: test/fuzz/%.cpp Makefile | deps-clang
	@echo "building $@" && mkdir -p $(@D) && clang++ $< -std=c++17 -fopenmp -O1 -g -Wall -Wextra -Werror -MMD -MP -o $@ \
	    -fno-omit-frame-pointer -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all -lpcre2-8 $(optional)
build/%.d: ;
-include $(wildcard build/*/*.d)

deps: deps-build
deps-%:
	$(if $(NODEPS)$(DEPS_ARE_HERE),,@scripts/install_deps.sh $(subst +, ,$*) $(findstring clang,$(compiler)) $(other))
train_gpt: $(build)/train_gpt ; @ln -sf $< $@
dev debug: %: $(build)-%/train_gpt ; @ln -sf $< train_gpt
compile_commands.json: ; @scripts/compile_commands.py
install: $(or $(TRAIN_GPT),$(build)/train_gpt) ; @scripts/install.sh $< "$(DESTDIR)$(or $(PREFIX),/usr/local)"
quickstart: deps-quickstart train_gpt ; @TRAIN_GPT=./train_gpt scripts/quickstart.sh

# ---- tests; the GPU's run on the emulator or, with BACKEND=cuda, on a GPU, where each is a program of its own ----
on_cpu       := $(filter cpu,$(BACKEND))
on_gpu       := $(filter cuda,$(BACKEND))
gpu_bf16     := build/$(or $(on_gpu),emu)-bf16$(tail)
gpu_fp32     := build/$(or $(on_gpu),emu)-fp32$(tail)
gpu_programs := $(patsubst test/gpu/test_%.cu,$(gpu_bf16)/test_gpu_%,$(wildcard test/gpu/*.cu)) \
                $(of_gpu_fp32:test/gpu/test_%.cu=$(gpu_fp32)/test_gpu_%) $(gpu_fp32)/test_gpu_golden
gpu_trainer  := $(gpu_bf16)/$(if $(on_gpu),train_gpt,tests/train_gpt)
ladders      := $(patsubst dev/kernels/%.cu,$(gpu_bf16)/ladder_%,$(wildcard dev/kernels/*.cu)) \
                $(if $(on_cpu),$(patsubst dev/kernels/%.cpp,$(build)/ladder_%,$(wildcard dev/kernels/*.cpp)))
parity       := build/cpu-fp32$(tail)/fp32_tests $(gpu_bf16)/$(if $(on_gpu),parity_check,gpu_tests)
comm         := $(if $(on_cpu),$(build)/host_tests) $(gpu_bf16)/$(if $(on_gpu),comm_check,gpu_tests)
programs     := $(if $(on_cpu),$(addprefix $(build)/,host_tests kernel_tests) $(foreach p,fp32 fp64,\
                build/cpu-$p$(tail)/$p_tests)) $(if $(on_gpu),$(gpu_programs),$(gpu_bf16)/gpu_tests \
                $(if $(filter test-all,$(MAKECMDGOALS)),$(addprefix $(gpu_fp32)/,gpu_tests test_gpu_golden)))
at_length    := $(if $(filter test-all,$(MAKECMDGOALS))$(FILTER),,aarch64 ladders long_context)
scripts      := $(filter-out $(patsubst %,test/%_test.sh,$(LEAVE_OUT) $(at_length)),$(wildcard test/*_test.sh))
ifneq ($(FILTER),)  # one program per file
named         = $(strip $(foreach f,$1,$(if $(findstring $(FILTER),$(notdir $f)),$f)))
programs     := $(call named,$(if $(on_cpu),$(patsubst test/%.cpp,$(build)/%,$(unit_tests))) $(gpu_programs))
scripts      := $(call named,$(scripts))
endif
$(gpu_bf16)/tests/train_gpt: $(gpu_bf16)/gpu_tests ; @mkdir -p $(@D) && ln -f $< $@
for_scripts  := $(if $(scripts),$(gpu_trainer) $(build)/train_gpt $(parity) $(comm)) \
                $(if $(findstring ladders,$(scripts)),$(ladders))

test test-all: deps-test+quickstart+chaos
	@$(if $(strip $(programs) $(scripts)),,$(error FILTER=$(FILTER): no test has that in its name))
	@$(MAKE) -s --no-print-directory -j2 DEPS_ARE_HERE=1 $(for_scripts) $(programs)
	@TRAIN_GPT=$(build)/train_gpt GPU_TRAIN_GPT=$(gpu_trainer) COMM_CHECK="$(comm)" PARITY_CHECK="$(parity)" \
	    LADDERS="$(ladders)" SAN=$(SAN) CXX=$(lastword $(CXX)) NVCC=$(NVCC) ALL=$(filter test-all,$@) \
	    test/run.sh $(programs) $(scripts)
	@$(if $(filter test-all,$@),$(MAKE) -s chaos)
coverage: ; @$(MAKE) -s SUFFIX=-coverage LEAVE_OUT="check_gpu gpu_minutes cuda_build emulator nccl source" test; \
            test/coverage.py build/*-coverage
test-sass: ; @NVCC=$(NVCC) WRITE=$(WRITE) ONLY=sass test/run.sh test/cuda_build_test.sh
chaos: deps-chaos $(patsubst %,build/%/train_gpt,$(or $(CHAOS_BUILDS),cpu-bf16 emu-bf16))
	@test/chaos/chaos.py $(if $(CHAOS_RUNS),--runs $(CHAOS_RUNS),--seconds $(or $(CHAOS_SECONDS),600)) \
	    $(addprefix --seed ,$(CHAOS_SEED)) --leave-out "$(CHAOS_LEAVE_OUT)" --faults "$(CHAOS_FAULTS)" $(filter build/%,$^)
pairs: $(patsubst %,build/%/train_gpt,$(or $(PAIRS_BUILDS),cpu-bf16)) ; @test/pairs/pairs.py $(filter build/%,$^)
simulate: build/cpu-bf16/simulate ; @$< $(or $(JOBS),20000)
fuzz: $(fuzzers) ; @test/fuzz/run.sh $(or $(FUZZ_SECONDS),60) $^
interop-programs: $(foreach p,fp32 bf16,$(addprefix build/cpu-$p$(tail)/,train_gpt dump_logits dump_scores dump_tokens))
test-interop: deps-interop+quickstart interop-programs $(addprefix build/cpu-bf16$(tail)/,near_duplicates render_jinja)
	@dev/interop/test.sh $(or $(TRANSFORMERS),5) build/cpu-fp32$(tail) build/cpu-bf16$(tail)

# ---- speed ----
bench: $(build)/bench ; @$<
bench-ranks: build/cpu-$(PRECISION)$(tail)/train_gpt ; @TRAIN_GPT=$< dev/bench/ranks.sh
# A vector unit is measured in a program compiled for that unit only.
export PRECISIONS ?= bf16 fp32
marchs     := / $(if $(filter AVX2 all,$(UNITS)),-x86-64-v3/) $(if $(filter AVX-512 all,$(UNITS)),-x86-64-v4/)
bench-cpu: deps-interop $(foreach p,$(PRECISIONS),$(marchs:%=build/cpu-$p$(tail)%bench))
	@$$(dev/interop/venv.sh torch transformers) dev/bench/cpu.py --bench 'build/cpu-{precision}$(tail){march}/bench'
bench-data: deps-interop deps-quickstart $(build)/train_gpt $(build)/encode_bench ; @dev/bench/data.py $(build)
bench-inference: deps-interop $(PRECISIONS:%=build/cpu-%$(tail)/train_gpt)
	@$$(dev/interop/venv.sh llama-cpp-python) dev/bench/inference.py --program 'build/cpu-{precision}$(tail)/train_gpt'
ladders: $(ladders) ; @failed=0; for program in $^; do $$program || failed=1; done; exit $$failed
check-gpu gpu-pack: ; @scripts/$(subst -,_,$@).sh
check-gpu-%: ; @scripts/check_gpu.sh $*
trainer    := $(build)/train_gpt
benchmark  := $(build)/bench
gpu-programs: $(gpu_programs) $(ladders) $(trainer) $(benchmark)
print-%: ; @echo $($*)
clean: ; rm -rf $(filter-out build/deps,$(wildcard build/*)) train_gpt
lint: deps-lint ; @scripts/lint.sh $(STAGES)
format: ; clang-format -i $(wildcard *.cu $(foreach d,llmc llmc/* test test/* dev/*,$(addprefix $d/*.,h cuh cpp cu)))
