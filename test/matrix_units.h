// Every matrix unit that tests can run on this machine: those it has, and AMX's stand-in.
#pragma once
#include <type_traits>

#include "../llmc/cpu/matrix_unit.h"

namespace test {

template <class E>
std::vector<const cpu::MatrixUnit<E>*> all_matrix_units() {
    std::vector<const cpu::MatrixUnit<E>*> units = cpu::matrix_units<E>();
    if constexpr (std::is_same<E, bf16>::value) units.push_back(cpu::emulated_amx());
    return units;
}

}  // namespace test
