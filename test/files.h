// Helpers for tests that work with files: a temporary directory, whole files, expected errors, output.
#pragma once
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <vector>

#include "../llmc/base/check.h"

namespace test {

class TemporaryDirectory {
public:
    TemporaryDirectory() {
        std::string pattern = (std::filesystem::temp_directory_path() / "train_gpt_test_XXXXXX").string();
        path_ = mkdtemp(&pattern[0]);
    }
    TemporaryDirectory(const TemporaryDirectory&) = delete;
    TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;
    ~TemporaryDirectory() { std::filesystem::remove_all(path_); }
    std::string operator/(const std::string& name) const { return path_ + "/" + name; }
    // The names of its entries.
    std::set<std::string> names() const {
        std::set<std::string> found;
        for (const auto& entry : std::filesystem::directory_iterator(path_)) found.insert(entry.path().filename().string());
        return found;
    }

private:
    std::string path_;
};

inline void write_file(const std::string& path, const std::string& bytes) {
    std::ofstream out(path, std::ios::binary);
    out << bytes;
    ASSERT_TRUE(out.flush()) << path;
}

inline std::string read_file(const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    EXPECT_TRUE(in) << path;
    return std::string(std::istreambuf_iterator<char>(in), {});
}

// The bytes of a number, as in memory.
template <class T>
std::string bytes_of(T value) {
    return std::string(reinterpret_cast<const char*>(&value), sizeof value);
}
template <class T>
std::string array_of(const std::vector<T>& values) {
    std::string s;
    for (const T& v : values) s += bytes_of(v);
    return s;
}

// The message of the Error that f throws; it must contain every one of `parts`.
template <class F>
std::string expect_error(F f, const std::vector<std::string>& parts) {
    try {
        f();
    } catch (const Error& e) {
        const std::string message = e.what();
        for (const std::string& part : parts)
            EXPECT_NE(message.find(part), std::string::npos) << "'" << part << "' is not in: " << message;
        return message;
    }
    ADD_FAILURE() << "no error was thrown" << (parts.empty() ? "" : "; one with '" + parts[0] + "' was expected");
    return "";
}

// What f prints, on stdout and then on stderr. An Error of f is thrown again.
template <class F>
std::string output_of(F f) {
    testing::internal::CaptureStdout();
    testing::internal::CaptureStderr();
    std::string failure;
    try {
        f();
    } catch (const Error& e) {
        failure = e.what();
    }
    const std::string said = testing::internal::GetCapturedStdout() + testing::internal::GetCapturedStderr();
    if (!failure.empty()) throw Error(failure);
    return said;
}

}  // namespace test
