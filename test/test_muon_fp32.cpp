// The tests of test_muon.cpp in fp32.
#include "test_muon.cpp"
