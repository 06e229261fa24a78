// main of a program that contains other programs besides tests (test/programs.h): runs the one named by its first argument or
// by the name it was called with, otherwise GoogleTest.
//   build/cpu-bf16/host_tests comm_check world        build/cpu-bf16/host_tests --gtest_filter=Guard.*
#include "programs.h"

#include <gtest/gtest.h>

int main(int argc, char** argv) {
    const std::string called = argv[0];
    if (const auto main = test::programs().find(called.substr(called.rfind('/') + 1)); main != test::programs().end())
        return main->second(argc, argv);
    if (const auto main = argc > 1 ? test::programs().find(argv[1]) : test::programs().end(); main != test::programs().end())
        return main->second(argc - 1, argv + 1);
    testing::InitGoogleTest(&argc, argv);
    return RUN_ALL_TESTS();
}
