// Files: read-only mappings and writing that never leaves half a file under its final name.
//   MappedFile   a file in memory, unmapped when it goes out of scope
//   FileWriter   writes NAME.tmp.PID beside NAME; commit() syncs and renames; without commit() the temporary is removed.
//                sync() does all of commit() that can fail for want of space: files that belong together are synced first and
//                renamed after. What was written can be read back and overwritten until then (a header that needs the counts).
// Every failure is an Error that names the file and the reason (disk full, no permission, ...).
#pragma once
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "check.h"

class MappedFile {
public:
    explicit MappedFile(const std::string& path) : path_(path) {
        const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
        if (fd < 0) fail("cannot open %s: %s", path.c_str(), strerror(errno));
        struct stat st;
        if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode)) {
            close(fd);
            fail("%s is not a regular file", path.c_str());
        }
        size_ = (size_t)st.st_size;
        if (size_ > 0) {
            void* p = mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, fd, 0);
            if (p == MAP_FAILED) {
                close(fd);
                fail("cannot map %s into memory: %s", path.c_str(), strerror(errno));
            }
            data_ = (const char*)p;
        }
        close(fd);
    }
    MappedFile(MappedFile&& other) noexcept
        : path_(std::move(other.path_)), data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
    MappedFile& operator=(MappedFile&&) = delete;
    ~MappedFile() {
        if (data_) munmap((void*)data_, size_);
    }
    const std::string& path() const { return path_; }
    const char* data() const { return data_; }
    size_t size() const { return size_; }
    std::string_view text() const { return {data_, size_}; }

private:
    std::string path_;
    const char* data_ = nullptr;
    size_t size_ = 0;
};

inline std::string read_whole_file(const std::string& path) { return std::string(MappedFile(path).text()); }

inline void sync_directory(const std::string& dir) {
    const int fd = open(dir.empty() ? "." : dir.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return;  // some file systems have no directories to sync
    fsync(fd);
    close(fd);
}

class FileWriter {
public:
    explicit FileWriter(const std::string& path) : path_(path), temporary_(path + ".tmp." + std::to_string(getpid())) {
        fd_ = open(temporary_.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
        if (fd_ < 0) fail("cannot write %s: %s", path.c_str(), strerror(errno));
        buffer_.reserve(buffer_bytes);
    }
    FileWriter(const FileWriter&) = delete;
    FileWriter& operator=(const FileWriter&) = delete;
    ~FileWriter() {
        if (fd_ >= 0) close(fd_);
        if (!committed_) unlink(temporary_.c_str());
    }

    void write(const void* data, size_t bytes) {
        written_ += bytes;
        if (buffer_.size() + bytes > buffer_bytes) flush();
        if (bytes >= buffer_bytes) write_out((const char*)data, bytes);
        else buffer_.insert(buffer_.end(), (const char*)data, (const char*)data + bytes);
    }
    void write(std::string_view text) { write(text.data(), text.size()); }
    size_t written() const { return written_; }

    // Bytes [offset, offset + bytes), written before.
    void read_back(size_t offset, void* data, size_t bytes) {
        CHECK(offset <= written_ && bytes <= written_ - offset, "reading %zu bytes at %zu of %zu", bytes, offset, written_);
        flush();
        for (size_t done = 0; done < bytes;) {
            const ssize_t n = pread(fd_, (char*)data + done, bytes - done, (off_t)(offset + done));
            if (n < 0 && errno == EINTR) continue;
            if (n <= 0) fail("cannot read back %s: %s", temporary_.c_str(), n < 0 ? strerror(errno) : "it was cut off");
            done += (size_t)n;
        }
    }
    void overwrite(size_t offset, const void* data, size_t bytes) {
        CHECK(offset <= written_ && bytes <= written_ - offset, "overwriting %zu bytes at %zu of %zu", bytes, offset, written_);
        flush();
        for (size_t done = 0; done < bytes;) {
            const ssize_t n = pwrite(fd_, (const char*)data + done, bytes - done, (off_t)(offset + done));
            if (n < 0 && errno == EINTR) continue;
            if (n <= 0) fail("cannot write %s: %s", path_.c_str(), n < 0 ? strerror(errno) : "disk full");
            done += (size_t)n;
        }
    }

    // Everything is on the disk, still under the temporary name.
    void sync() {
        flush();
        const bool synced = fsync(fd_) == 0 || errno == EINVAL;  // EINVAL: a file system that cannot sync
        if (!synced) fail("cannot write %s: %s", path_.c_str(), strerror(errno));
        if (close(std::exchange(fd_, -1)) != 0) fail("cannot write %s: %s", path_.c_str(), strerror(errno));
    }
    // The file is complete: on the disk, and under its name.
    void commit() {
        if (fd_ >= 0) sync();
        if (rename(temporary_.c_str(), path_.c_str()) != 0)
            fail("cannot rename %s to %s: %s", temporary_.c_str(), path_.c_str(), strerror(errno));
        committed_ = true;
        sync_directory(std::filesystem::path(path_).parent_path().string());
    }

private:
    static constexpr size_t buffer_bytes = 1 << 20;

    void flush() {
        write_out(buffer_.data(), buffer_.size());
        buffer_.clear();
    }
    void write_out(const char* data, size_t bytes) {
        while (bytes > 0) {
            const ssize_t n = ::write(fd_, data, bytes);
            if (n < 0 && errno == EINTR) continue;
            if (n <= 0)
                fail("cannot write %s: %s (after %zu bytes)", path_.c_str(), n < 0 ? strerror(errno) : "disk full", written_);
            data += n, bytes -= (size_t)n;
        }
    }

    std::string path_, temporary_;
    int fd_ = -1;
    bool committed_ = false;
    size_t written_ = 0;
    std::vector<char> buffer_;
};

inline void write_file_atomically(const std::string& path, std::string_view text) {
    FileWriter file(path);
    file.write(text);
    file.commit();
}

// Creates a directory and its parents; fail()s with the reason.
inline void make_directory(const std::string& dir) {
    std::error_code error;
    std::filesystem::create_directories(dir, error);
    if (error) fail("cannot create directory %s: %s", dir.c_str(), error.message().c_str());
    if (access(dir.c_str(), W_OK) != 0) fail("directory %s is not writable: %s", dir.c_str(), strerror(errno));
}

// Where this user's programs keep what can be made again: $XDG_CACHE_HOME/train_gpt or ~/.cache/train_gpt, made if need be; the
// directory for temporary files where there is neither.
inline std::string cache_directory() {
    const char *cache = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    std::error_code error;
    for (const std::string& base : {std::string(cache ? cache : ""), home ? std::string(home) + "/.cache" : std::string()})
        if (!base.empty() && (std::filesystem::create_directories(base + "/train_gpt", error), !error))
            return base + "/train_gpt";
    return std::filesystem::temp_directory_path().string();
}
