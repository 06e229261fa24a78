// Shared by the fuzz targets. A target is LLVMFuzzerTestOneInput: it makes files of the input, reads them like the program and
// touches everything that was read. Rejecting a file is an Error, the only exception that is caught; every other exception, a
// crash, undefined behavior, a leak, 5 seconds or 2 GB are findings.
//   read_part   cuts fields off the input
//   Files       a directory in memory, removed when this process ends
//   refused     runs a reader; true if it threw Error
#pragma once
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>

// Replaces a mapping, which extends to the end of its last page, by memory of exactly the file's size: AddressSanitizer then
// detects a read of the first byte after it.
inline void* read_instead_of_mapping(void*, size_t size, int, int, int fd, off_t) {
    char* p = (char*)malloc(size);
    if (!p || read(fd, p, size) != (ssize_t)size) abort();
    return p;
}
inline int free_instead_of_unmapping(void* p, size_t) { return free(p), 0; }
#define mmap read_instead_of_mapping
#define munmap free_instead_of_unmapping
#include "../../llmc/base/file.h"
#undef mmap
#undef munmap

inline std::string_view view(const uint8_t* data, size_t size) { return {(const char*)data, size}; }

// The first n bytes of the input, or all remaining ones.
inline std::string_view read_part(std::string_view& input, size_t n) {
    const std::string_view part = input.substr(0, n);
    input.remove_prefix(part.size());
    return part;
}
// The bytes up to a separator, which belongs to neither part.
inline std::string_view read_until(std::string_view& input, char separator) {
    const std::string_view part = read_part(input, input.find(separator));
    if (!input.empty()) input.remove_prefix(1);
    return part;
}
inline unsigned read_byte(std::string_view& input) {
    const std::string_view part = read_part(input, 1);
    return part.empty() ? 0 : (uint8_t)part[0];
}

class Files {
public:
    Files() : path_("/dev/shm/train_gpt_fuzz_" + std::to_string(getpid())) { std::filesystem::create_directories(path_); }
    ~Files() { std::filesystem::remove_all(path_); }
    std::string operator/(const std::string& name) const { return path_ + "/" + name; }
    void write(const std::string& name, std::string_view bytes) const {
        std::ofstream out(path_ + "/" + name, std::ios::binary);
        out << bytes;
        CHECK(out.flush(), "cannot write %s/%s", path_.c_str(), name.c_str());
    }

private:
    std::string path_;
};

template <class F>
bool refused(F read) {
    try {
        read();
    } catch (const Error&) {
        return true;
    }
    return false;
}
