// Limits of launches. EMU_RESOURCES=dev/kernels/resources.md has the registers and the shared memory that nvcc assigned to each
// of the trainer's kernels for an H100, in bf16. A launch that needs more registers than a multiprocessor has, or more static
// and dynamic shared memory than a block can get, is refused, as by the GPU; so is one of the trainer's kernels (gpu::detail)
// that the table lacks. Programs are linked with -rdynamic: the table is by name, a launch has an address.
#pragma once
#include <cxxabi.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <string>

namespace emu {

constexpr size_t registers_per_multiprocessor = 65536;
struct Limits {
    size_t registers, dynamic_shared;
};
// By name, as written by test/sass.py.
inline const std::map<std::string, Limits>& table_of_limits() {
    static const std::map<std::string, Limits> table = [] {
        std::map<std::string, Limits> rows;
        const char* path = getenv("EMU_RESOURCES");
#ifdef PRECISION_FP32
        path = nullptr;
#endif
        if (!path || !*path) return rows;
        std::ifstream file(path);
        for (std::string line; std::getline(file, line) && line.compare(0, 3, "## ") != 0;) {  // the first table
            const size_t end = line.find(" | ");
            size_t registers, dynamic;
            if (line.compare(0, 2, "| ") == 0 && end != std::string::npos &&
                sscanf(line.c_str() + end, " | %zu | %*[^|]| %*u | %*u | %zu |", &registers, &dynamic) == 2)
                rows[line.substr(2, end - 2)] = {registers, dynamic};
        }
        if (rows.empty()) {
            fprintf(stderr, "EMU_RESOURCES=%s has no table of kernels\n", path);
            exit(1);
        }
        return rows;
    }();
    return table;
}
// Demangled, without the common namespaces, result and parameters: like readable() in sass.py.
inline std::string readable_name(const char* symbol) {
    int status = 0;
    char* demangled = abi::__cxa_demangle(symbol, nullptr, nullptr, &status);
    std::string name = demangled ? demangled : symbol;
    free(demangled);
    int depth = 0;
    size_t end = 0;
    for (; end < name.size() && !(name[end] == '(' && depth == 0); end++) depth += (name[end] == '<') - (name[end] == '>');
    name = name.substr(name.compare(0, 5, "void ") == 0 ? 5 : 0, end - (name.compare(0, 5, "void ") == 0 ? 5 : 0));
    for (const auto& [from, to] : {std::pair<const char*, const char*>{"gpu::detail::", ""}, {"gpu::", ""}, {"> >", ">>"}})
        for (size_t at; (at = name.find(from)) != std::string::npos;) name.replace(at, strlen(from), to);
    return name;
}

// True if a launch is within the limits; reports exceeded limits on stderr.
inline bool within_limits(const void* kernel, size_t threads, size_t dynamic_shared) {
    if (table_of_limits().empty()) return true;
    struct Known {
        std::string name;
        bool ours;
        const Limits* limits;
    };
    static std::map<const void*, Known> seen;
    auto found = seen.find(kernel);
    if (found == seen.end()) {
        Dl_info info{};
        if (!dladdr(kernel, &info) || !info.dli_sname) info.dli_sname = "a kernel without a name";
        const std::string name = readable_name(info.dli_sname);
        const auto row = table_of_limits().find(name);
        const bool ours = strstr(info.dli_sname, "3gpu6detail") != nullptr;
        found = seen.insert({kernel, {name, ours, row == table_of_limits().end() ? nullptr : &row->second}}).first;
    }
    const auto& [name, ours, limits] = found->second;
    if (!limits) {
        if (ours) fprintf(stderr, "emulator: EMU_RESOURCES lacks %s; HINT: make test-sass WRITE=1\n", name.c_str());
        return !ours;
    }
    // Each thread of a warp gets a multiple of 8.
    const size_t registers = (limits->registers + 7) / 8 * 8 * ((threads + 31) / 32 * 32);
    if (registers <= registers_per_multiprocessor && dynamic_shared <= limits->dynamic_shared) return true;
    fprintf(stderr, "emulator: %s asks for %zu registers and %zu bytes of dynamic shared memory; there are %zu and %zu\n",
            name.c_str(), registers, dynamic_shared, registers_per_multiprocessor, limits->dynamic_shared);
    return false;
}

}  // namespace emu
