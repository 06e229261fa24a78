// The tests of test_offload.cpp with the kernels and streams of GPUs.
#include "../test_offload.cpp"
