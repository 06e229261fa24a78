// The tests of test_experts.cpp in fp32.
#include "test_experts.cpp"
