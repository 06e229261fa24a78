# The CPU to build for: included by the Makefile, which has set `compiler`.
# A cross compiler (CXX=aarch64-linux-gnu-g++) uses the libraries that scripts/sysroot.sh unpacks or, with NODEPS=1 and
# without its folder, those of the system for that CPU (libpcre2-dev:arm64, ...).
triple    := $(filter-out $(shell uname -m)-%,$(patsubst %-g++,%,$(filter %-linux-gnu-g++,$(compiler))))
other     := $(triple:-linux-gnu=)
sysroot   := $(if $(triple),$(if $(NODEPS),$(wildcard build/sysroot-$(triple)),build/sysroot-$(triple)))
other_include := $(if $(sysroot),$(sysroot)/usr/include/$(triple) $(sysroot)/usr/include)
other_link    := $(if $(sysroot),$(foreach f,-L -Wl$(comma)-rpath-link=,$f$(sysroot)/usr/lib/$(triple)))
other_mpi     := $(if $(triple),| sed 's|\(-[IL]\)/|\1$(sysroot)/|g; s/$(shell uname -m)-linux-gnu/$(triple)/g')
# What is -march elsewhere is -mcpu on ARM. Its -march has versions of the architecture: MARCH=armv8.2-a.
march      = $(or $(findstring x86-64-v3,$(@D)),$(findstring x86-64-v4,$(@D)),$(MARCH),$(if $(triple),,native))
on_arm    := $(filter aarch64%,$(or $(triple),$(shell uname -m)))
for_cpu    = $(addprefix $(if $(on_arm),$(if $(filter armv%,$(march)),-march,-mcpu),-march)=,$(march))
