// Every matrix unit that tests can run on this machine: the CPU's, and the emulation of AMX.
#pragma once
#include <type_traits>

#include "../llmc/cpu/matrix_unit.h"

namespace test {

inline std::vector<cpu::AnyUnit> all_matrix_units(cpu::Products kind) {
    std::vector<cpu::AnyUnit> units = cpu::matrix_units<floatX>(kind);
    if (std::is_same<floatX, bf16>::value || kind == cpu::Products::layers) units.push_back(cpu::emulated_amx());
    return units;
}

}  // namespace test
