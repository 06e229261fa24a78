// The tests of test_offload.cpp with the GPU kernels and streams.
#include "../test_offload.cpp"
