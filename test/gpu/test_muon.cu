// The tests of test_muon.cpp with the GPU kernels.
#include "../test_muon.cpp"
