// The program's version: `train_gpt --version`.
#pragma once
#include <cstdio>
#include <string>

#include "../base/build.h"
#include "../parallel/comm.h"
#include "../ops.h"
#include "../parallel/world.h"

#if !defined(GIT_VERSION)  // set by the Makefile from `git describe`
#define GIT_VERSION "not built from git"
#endif

inline int print_version() {
    const auto line = [](const char* label, const std::string& value) { printf("  %-11s %s\n", label, value.c_str()); };
    printf("train_gpt 0.1 (%s)\n", GIT_VERSION);
    line("backend", be::backend_name);
    line("precision", format("%s storage, %s sums", precision_name, sizeof(real) == 4 ? "fp32" : "fp64"));
    line("compiler", build_compiler() + build_checks());
#if CPU_FAST_PATHS
    line("CPU", "built for " + build_cpu() + "; this one multiplies with " + cpu::unit_names<floatX>());
#else
    line("CPU", "built for " + build_cpu());
#endif
#if defined(CUDART_VERSION)
    line("CUDA", format("%d.%d", CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10));
#else
    line("CUDA", "no");
#endif
#if defined(NCCL_MAJOR)
    line("NCCL", format("%d.%d.%d", NCCL_MAJOR, NCCL_MINOR, NCCL_PATCH));
#else
    line("NCCL", "no");
#endif
#if !HAVE_MPI
    line("MPI", "no: one rank only");
#elif defined(OMPI_MAJOR_VERSION)
    line("MPI", format("Open MPI %d.%d.%d", OMPI_MAJOR_VERSION, OMPI_MINOR_VERSION, OMPI_RELEASE_VERSION));
#else
    line("MPI", format("MPI %d.%d", MPI_VERSION, MPI_SUBVERSION));
#endif
    return 0;
}
