// Time since the program started.
#pragma once
#include <chrono>

inline double monotonic_seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
inline const double program_start = monotonic_seconds();
