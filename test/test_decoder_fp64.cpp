// The tests of test_decoder_fp32.cpp in fp64, with the plain loops.
#include "test_decoder_fp32.cpp"
