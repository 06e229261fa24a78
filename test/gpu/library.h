// Expectations about cuBLASLt: about the emulated library, whose answers are known, and a GPU's, whose support, refusals and
// suggestions depend on version and GPU. Wrong numbers fail on both.
//   EXPECT_OF_LIBRARY(condition) << what;   fails on the emulator, is printed as a finding on a GPU
#pragma once
#include <gtest/gtest.h>

#include <cstdio>
#include <sstream>

#include "../../llmc/gpu/launch.cuh"

namespace test {

#ifdef __CUDACC__
constexpr bool library_is_emulated = false;
#else
constexpr bool library_is_emulated = true;
#endif

// During its lifetime, the emulated library refuses everything that it may refuse, or nothing. No effect on a GPU's library.
struct Refusals {
#ifndef __CUDACC__
    const unsigned before = emu::config().refusals;
    explicit Refusals(bool all) { emu::config().refusals = all; }
    ~Refusals() { emu::config().refusals = before; }
#else
    explicit Refusals(bool) {}
#endif
};

class Finding {
public:
    explicit Finding(const char* condition) { text_ << condition << ": "; }
    template <class T>
    Finding& operator<<(const T& x) {
        text_ << x;
        return *this;
    }
    ~Finding() {
        if (library_is_emulated) ADD_FAILURE() << text_.str();
        else printf("finding: not so with this library: %s\n", text_.str().c_str());
    }

private:
    std::ostringstream text_;
};
#define EXPECT_OF_LIBRARY(condition) \
    if (!(condition)) test::Finding(#condition)

}  // namespace test
