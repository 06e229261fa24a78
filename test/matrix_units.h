// Every matrix unit that tests can run on this machine: those it has, and AMX's stand-in.
#pragma once
#include "../llmc/cpu/matrix_unit.h"

namespace test {

inline std::vector<const cpu::MatrixUnit*> all_matrix_units() {
    std::vector<const cpu::MatrixUnit*> units = cpu::matrix_units();
    units.push_back(cpu::emulated_amx());
    return units;
}

}  // namespace test
