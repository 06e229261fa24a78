// The tests of test_muon.cpp with the kernels of GPUs.
#include "../test_muon.cpp"
