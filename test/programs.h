// Programs inside a program of tests, which saves compile time: test scripts start them as separate processes.
#pragma once
#include <map>
#include <string>

namespace test {

using Main = int (*)(int argc, char** argv);
inline std::map<std::string, Main>& programs() {
    static std::map<std::string, Main> all;
    return all;
}
inline bool add_program(const char* name, Main main) { return programs().emplace(name, main).second; }

}  // namespace test
