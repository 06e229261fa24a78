// Programs within a program of tests, because compiled once is compiled faster: what test scripts start as processes of their
// own.
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
