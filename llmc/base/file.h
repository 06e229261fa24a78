// Files: read-only mappings, and writing that never leaves an incomplete file under its final name.
//   MappedFile   a file mapped into memory, unmapped when it goes out of scope. If the file is truncated while mapped, pages
//                are lost, and the process ends with an error that names the file
//   InputStream  a file, a pipe or another source of bytes, read once from its start
//   FileWriter   writes NAME.tmp.PID next to NAME; commit() syncs and renames it; without commit() the temporary file is
//                removed. check() does everything in commit() that can fail for lack of space or by lost writes: it
//                compares the disk's bytes with the written ones. A set of files is checked before the first is renamed.
//                Until then, written data can be read back and overwritten (a header with counts)
// Every failure is an Error that names the file and the reason (disk full, no permission, ...), except that a file which exists
// but cannot be read is Unreadable, after reading was tried again for some seconds (patiently).
#pragma once
#include <fcntl.h>
#include <pwd.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "check.h"
#include "crc32c.h"
#include "similar.h"
#include "terminal.h"
#include "text.h"

// ---- files that are truncated while they are mapped ------------------------------------------------------------------------
// The current mappings: a list that grows at its front, whose entries are reused and never freed, so that a signal handler can
// walk it at any time.
class MappedPlaces {
public:
    static void add(const char* data, size_t size, const std::string& path) {
        const std::lock_guard<std::mutex> lock(mutex_);
        static const bool handled = handle_lost_pages();
        (void)handled;
        MappedRange* place = first_;
        while (place && place->begin) place = place->next;
        if (!place) {
            place = new MappedRange;
            place->next = first_;
            first_ = place;
        }
        place->path = printable(path);
        place->end = data + size;
        place->begin = data;
    }
    static void remove(const char* data) {
        const std::lock_guard<std::mutex> lock(mutex_);
        for (MappedRange* place = first_; place; place = place->next)
            if (place->begin == data) place->begin = nullptr;
    }

private:
    struct MappedRange {
        std::atomic<const char*> begin{nullptr}, end{nullptr};  // null: free
        std::string path;
        MappedRange* next = nullptr;
    };
    inline static std::atomic<MappedRange*> first_{nullptr};
    inline static std::mutex mutex_;
    inline static struct sigaction before_;

    static bool handle_lost_pages() {
        struct sigaction action {};
        action.sa_sigaction = end_without_pages;
        action.sa_flags = SA_SIGINFO;
        return sigaction(SIGBUS, &action, &before_) == 0;
    }
    // Calls only functions that POSIX allows in a signal handler. The exit status makes a launcher end the other ranks.
    static void end_without_pages(int signal, siginfo_t* info, void*) {
        const char* lost = (const char*)info->si_addr;
        const MappedRange* place = first_;
        while (place && !(place->begin && place->begin <= lost && lost < place->end)) place = place->next;
        if (!place || info->si_code <= 0) {  // not our mapping, or sent by a process: the default action
            sigaction(signal, &before_, nullptr);
            raise(signal);
            return;
        }
        static std::atomic_flag told = ATOMIC_FLAG_INIT;
        while (told.test_and_set()) pause();  // another thread ends the process
        print_in_signal_handler({"error: ", place->path.c_str(),
                                 " became shorter while it was read, or its disk failed; HINT: restore it; a training run "
                                 "then resumes with --resume auto\n"});
        _exit(1);
    }
};

[[noreturn]] inline void fail_to_write(const std::string& path, int error, const std::string& hint = "") {
    throw Error("cannot write " + path + ": " + strerror(error) + (hint.empty() ? "" : "; HINT: ") + hint);
}

// ---- locking ---------------------------------------------------------------------------------------------------------------
// Locks a file during the object's lifetime, creating it if missing. The constructor waits for the lock, so locked work must be
// short (milliseconds).
class FileLock {
public:
    explicit FileLock(const std::string& path) : fd_(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644)) {
        if (fd_ < 0 || flock(fd_, LOCK_EX) != 0) {
            const int error = errno;
            if (fd_ >= 0) close(fd_);
            fail_to_write(path, error);
        }
    }
    ~FileLock() { close(fd_); }
    FileLock(const FileLock&) = delete;
    FileLock& operator=(const FileLock&) = delete;

private:
    int fd_;
};

// Locks a directory during the object's lifetime, or fail()s if another process holds it. Ignores file systems without locks.
class DirectoryLock {
public:
    explicit DirectoryLock(const std::string& dir) : fd_(open(dir.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)) {
        if (fd_ < 0 || flock(fd_, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK) return;
        close(fd_);
        fail("another process is writing to %s; HINT: wait for it, or give another folder", dir.c_str());
    }
    ~DirectoryLock() {
        if (fd_ >= 0) close(fd_);
    }
    DirectoryLock(const DirectoryLock&) = delete;
    DirectoryLock& operator=(const DirectoryLock&) = delete;

private:
    int fd_;
};

// ---- files in memory -------------------------------------------------------------------------------------------------------
// A folder of files in this process's memory. It has the name of a file on the disk (model.gguf), below which the disk has
// nothing, so that messages show where its files come from. Nothing of it remains after the process.
class FilesInMemory {
public:
    static void add(const std::string& folder, const std::map<std::string, std::string>& texts) {
        const std::lock_guard<std::mutex> lock(mutex_);
        folders_.insert(folder);
        for (const auto& [name, text] : texts) {
            const std::string path = folder + "/" + name;
            const int fd = memfd_create("train_gpt", MFD_CLOEXEC);  // stays open
            if (fd < 0 || ::write(fd, text.data(), text.size()) != (ssize_t)text.size())
                fail("no memory for %s: %s", path.c_str(), strerror(errno));
            files_[path] = fd;
        }
    }
    static bool is_folder(const std::string& path) {
        const std::lock_guard<std::mutex> lock(mutex_);
        return folders_.count(path) > 0;
    }
    // Its descriptor, which stays open; -1: no such file.
    static int find(const std::string& path) {
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto found = files_.find(path);
        return found == files_.end() ? -1 : found->second;
    }

private:
    inline static std::mutex mutex_;
    inline static std::set<std::string> folders_;
    inline static std::map<std::string, int> files_;
};

// ---- reading ---------------------------------------------------------------------------------------------------------------
// The path of a file that a list in `dir` names. The list is not trusted: a name outside the directory is rejected.
inline std::string inside(const std::string& dir, const std::string& name, const std::string& list) {
    const std::filesystem::path path(name);
    const bool leaves = name.empty() || path.is_absolute() || name.find('\0') != std::string::npos ||
                        std::find(path.begin(), path.end(), "..") != path.end();
    if (leaves) fail("%s names a file outside its directory: '%s'", list.c_str(), name.c_str());
    return dir + "/" + name;
}

// The folder of a file, which is "." for a plain name, and its name in it.
inline std::pair<std::string, std::string> folder_and_name(const std::string& path) {
    const std::filesystem::path file = path;
    return {file.has_parent_path() ? file.parent_path().string() : ".", file.filename().string()};
}

// Errors that say that there is no such file. All others say that it cannot be read now.
inline bool means_missing(int error) { return error == ENOENT || error == ENOTDIR || error == ELOOP || error == ENAMETOOLONG; }
// Errors that may be gone a moment later: of a disk, a network file system, or of a machine that is short of something.
inline bool may_pass(int error) {
    for (const int one : {EIO, ESTALE, ETIMEDOUT, EAGAIN, EBUSY, EINTR, EMFILE, ENFILE, ENOMEM, ENOTCONN, ECONNRESET,
                          ECONNABORTED, EHOSTDOWN, EHOSTUNREACH, ENETDOWN, ENETUNREACH, EREMOTEIO, EPROTO})
        if (error == one) return true;
    return false;
}
// Throws: the file `path` cannot be opened or read, for the reason `error`.
[[noreturn]] inline void fail_to_read(const std::string& path, int error) {
    if (means_missing(error))
        fail("cannot open %s: %s%s", path.c_str(), strerror(error), error == ENOENT ? did_you_mean_path(path).c_str() : "");
    throw Unreadable(
        format("cannot read %s: %s; HINT: the file may be intact: try again when its disk or network file system responds",
               path.c_str(), strerror(error)),
        error);
}

// Calls read(), which reads a file from its start. If the system refuses for a reason that may pass, waits and tries again,
// for four seconds in total: a network file system may lose a file handle (ESTALE) or a server, a disk may fail once (EIO).
template <class Read>
auto patiently(Read read) {
    for (const useconds_t ms : {50, 150, 500, 1300, 2000}) {
        try {
            return read();
        } catch (const Unreadable& e) {
            if (!may_pass(e.error)) throw;
            usleep(1000 * ms);
        }
    }
    return read();
}

// The type of a file, following links; not_found if there is none.
inline std::filesystem::file_type file_type(const std::string& path) {
    if (FilesInMemory::is_folder(path)) return std::filesystem::file_type::directory;
    if (FilesInMemory::find(path) >= 0) return std::filesystem::file_type::regular;
    return patiently([&] {
        std::error_code error;
        const auto type = std::filesystem::status(path, error).type();
        if (type == std::filesystem::file_type::none && !means_missing(error.value())) fail_to_read(path, error.value());
        return type == std::filesystem::file_type::none ? std::filesystem::file_type::not_found : type;
    });
}
inline bool file_exists(const std::string& path) { return file_type(path) != std::filesystem::file_type::not_found; }
inline bool is_folder(const std::string& path) { return file_type(path) == std::filesystem::file_type::directory; }
inline bool is_regular(const std::string& path) { return file_type(path) == std::filesystem::file_type::regular; }

// The names in a directory, sorted; none if there is no such directory.
inline std::vector<std::string> names_in(const std::string& dir) {
    return patiently([&] {
        std::vector<std::string> names;
        std::error_code error;
        std::filesystem::directory_iterator entry(dir, error), end;
        for (; !error && entry != end; entry.increment(error)) names.push_back(entry->path().filename().string());
        if (error && !means_missing(error.value())) fail_to_read(dir, error.value());
        std::sort(names.begin(), names.end());
        return names;
    });
}

// Rejects a Git LFS pointer, which `git clone` leaves in place of a large file if Git LFS is not installed.
inline void reject_lfs_pointer(int fd, size_t size, const std::string& path) {
    constexpr std::string_view start = "version https://git-lfs.github.com/spec/";
    char bytes[start.size()];
    if (size < start.size() || size > 1024 || pread(fd, bytes, sizeof bytes, 0) != (ssize_t)sizeof bytes) return;
    if (std::string_view(bytes, sizeof bytes) != start) return;
    close(fd);
    fail_unsupported("%s is a Git LFS pointer, not the file itself; HINT: git lfs install; git -C %s lfs pull", path.c_str(),
                     folder_and_name(path).first.c_str());
}
// Opens a file for reading and returns its descriptor and size. Symbolic links are followed; a pipe or device is rejected
// instead of waited for.
inline std::pair<int, size_t> open_once(const std::string& path) {
    const int in_memory = FilesInMemory::find(path);
    const int fd = in_memory >= 0 ? fcntl(in_memory, F_DUPFD_CLOEXEC, 0)
                                  : open(path.c_str(), O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    if (fd < 0 && errno == ENXIO) fail("%s is not a regular file", path.c_str());  // a socket
    if (fd < 0) fail_to_read(path, errno);
    struct stat st;
    const int error = fstat(fd, &st) == 0 ? 0 : errno;
    if (!error && S_ISREG(st.st_mode)) {
        reject_lfs_pointer(fd, (size_t)st.st_size, path);
        return {fd, (size_t)st.st_size};
    }
    close(fd);
    if (error) fail_to_read(path, error);
    fail("%s is %s", path.c_str(), S_ISDIR(st.st_mode) ? "a folder; it must be a file" : "not a regular file");
}
inline std::pair<int, size_t> open_regular_file(const std::string& path) {
    return patiently([&] { return open_once(path); });
}

// A file's bytes in order, in pieces: calls take(bytes, n). Gives up at once where the system refuses to read. `from_disk`:
// past the cache where the file system allows it, to read the disk itself.
template <class Take>
void read_in_pieces(const std::string& path, bool from_disk, Take take) {
    constexpr size_t piece = 1 << 20, alignment = 4096;
    struct File {
        int fd;
        ~File() { close(fd); }
    };
    const File file{open_once(path).first};
    bool direct = false;
    if (from_disk) {
        posix_fadvise(file.fd, 0, 0, POSIX_FADV_DONTNEED);  // drops synced pages from the cache
        direct = fcntl(file.fd, F_SETFL, O_DIRECT) == 0;
    }
    const std::unique_ptr<char, void (*)(void*)> buffer((char*)std::aligned_alloc(alignment, piece), std::free);
    if (!buffer) throw std::bad_alloc();
    for (size_t at = 0;;) {
        const ssize_t n = pread(file.fd, buffer.get(), piece, (off_t)at);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && direct && errno == EINVAL) {  // not at this offset, or not at all
            direct = fcntl(file.fd, F_SETFL, 0) != 0;
            if (!direct) continue;
        }
        if (n < 0) fail_to_read(path, errno);
        if (n == 0) return;
        if (!take((const char*)buffer.get(), (size_t)n)) return;
        at += (size_t)n;
        // An odd length is the end's, or a signal's: direct reads must start at a multiple.
        if (direct && at % alignment != 0) direct = fcntl(file.fd, F_SETFL, 0) != 0;
    }
}

// Size and CRC-32C of a file.
struct FileSum {
    size_t bytes = 0;
    uint32_t crc = 0;
};
// Read in pieces rather than mapped, so that a large file does not count as memory of the run. For a file longer than `most`,
// only the length is right. from_disk: past the cache, where that is possible. tick() is called after each piece.
inline FileSum sum_file(const std::string& path, size_t most = SIZE_MAX, bool from_disk = false,
                        const std::function<void()>& tick = nullptr) {
    return patiently([&] {
        FileSum sum;
        read_in_pieces(path, from_disk, [&](const char* bytes, size_t n) {
            if (tick) tick();
            sum.crc = crc32c(bytes, n, sum.crc);
            sum.bytes += n;
            return sum.bytes <= most;
        });
        if (sum.bytes > most) sum.bytes = std::filesystem::file_size(path);
        return sum;
    });
}

// A disk gave back other bytes than were written.
struct LostBytes : Error {
    using Error::Error;
};
inline void check_written(const std::string& path, const FileSum& written, const FileSum& found, const char* hint = "") {
    if (found.bytes == written.bytes && found.crc == written.crc) return;
    throw LostBytes(
        format("%s differs from the data written to it: %zu bytes with checksum %08x were written, but %zu with %08x are "
               "there; HINT: check the disk, its connection and its file system%s",
               path.c_str(), written.bytes, written.crc, found.bytes, found.crc, hint));
}

class MappedFile {
public:
    explicit MappedFile(const std::string& path) : path_(path) {
        int fd;
        std::tie(fd, size_) = open_regular_file(path);
        if (size_ > 0) {
            void* p = mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, fd, 0);
            if (p == MAP_FAILED) {
                const int error = errno;
                close(fd);
                throw Unreadable(format("cannot map %s into memory: %s", path.c_str(), strerror(error)), error);
            }
            data_ = (const char*)p;
            MappedPlaces::add(data_, size_, path_);
        }
        close(fd);
    }
    MappedFile(MappedFile&& other) noexcept
        : path_(std::move(other.path_)), data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
    MappedFile& operator=(MappedFile&&) = delete;
    ~MappedFile() {
        if (!data_) return;
        MappedPlaces::remove(data_);
        munmap((void*)data_, size_);
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

// Bytes in order, from a file or a decompressor.
class ByteSource {
public:
    virtual ~ByteSource() = default;
    virtual size_t read(char* out, size_t bytes) = 0;  // some of the next bytes; 0 only at the end
    virtual int64_t position() const = 0;              // bytes of the file read so far
};

// A file, a pipe, or standard input (by the name -).
class FileSource : public ByteSource {
public:
    explicit FileSource(const std::string& name) : name_(name) {
        fd_ = name == "-" ? STDIN_FILENO : patiently([&] {
            const int fd = open(name.c_str(), O_RDONLY | O_NOCTTY | O_CLOEXEC);
            if (fd < 0) fail_to_read(name, errno);
            return fd;
        });
        struct stat st;
        if (!fstat(fd_, &st) && S_ISREG(st.st_mode)) reject_lfs_pointer(fd_, (size_t)st.st_size, name);
    }
    FileSource(const FileSource&) = delete;
    FileSource& operator=(const FileSource&) = delete;
    ~FileSource() override {
        if (fd_ != STDIN_FILENO) close(fd_);
    }
    size_t read(char* out, size_t bytes) override {
        const size_t n = patiently([&] {  // a read that fails leaves the position where it is
            ssize_t some;
            do some = ::read(fd_, out, bytes);
            while (some < 0 && errno == EINTR);
            if (some < 0) fail_to_read(name_, errno);
            return (size_t)some;
        });
        position_ += (int64_t)n;
        return n;
    }
    int64_t position() const override { return position_; }

private:
    std::string name_;
    int fd_;
    int64_t position_ = 0;
};

// A source of bytes, read once from its start. The next bytes can be peeked at.
class InputStream {
public:
    explicit InputStream(const std::string& name) : InputStream(name, std::make_unique<FileSource>(name)) {}
    // `name` is for messages.
    InputStream(const std::string& name, std::unique_ptr<ByteSource> source)
        : name_(name), buffer_(1 << 16, '\0'), source_(std::move(source)) {}
    const std::string& name() const { return name_; }
    int64_t position() const { return source_->position(); }

    // The next bytes without consuming them: at least `bytes`, fewer only at the end of the input.
    std::string_view peek(size_t bytes) {
        while (end_ - begin_ < bytes && fill()) continue;
        return {buffer_.data() + begin_, end_ - begin_};
    }
    // Consumes peeked bytes.
    void skip(size_t bytes) { begin_ += bytes; }
    // The next bytes: `bytes` of them, fewer only at the end of the input.
    size_t read(char* out, size_t bytes) {
        size_t done = 0;
        while (done < bytes && (begin_ < end_ || fill())) {
            const size_t n = std::min(bytes - done, end_ - begin_);
            memcpy(out + done, buffer_.data() + begin_, n);
            done += n;
            begin_ += n;
        }
        return done;
    }
    // The next line with its newline, if it has one; false at the end. Truncates a line longer than `most` to most + 1 bytes.
    bool read_line(std::string& line, size_t most = SIZE_MAX - 1) {
        line.clear();
        while (begin_ < end_ || fill()) {
            const char* start = buffer_.data() + begin_;
            const char* newline = (const char*)memchr(start, '\n', end_ - begin_);
            const size_t n = newline ? (size_t)(newline + 1 - start) : end_ - begin_;
            line.append(start, std::min(n, most + 1 - line.size()));
            begin_ += n;
            if (newline) return true;
        }
        return !line.empty();
    }

private:
    // Reads more; false at the end.
    bool fill() {
        if (begin_ == end_) begin_ = end_ = 0;
        if (end_ == buffer_.size() && begin_ > 0) {
            memmove(buffer_.data(), buffer_.data() + begin_, end_ - begin_);
            end_ -= begin_;
            begin_ = 0;
        }
        if (end_ == buffer_.size()) buffer_.resize(2 * buffer_.size());
        const size_t n = source_->read(&buffer_[end_], buffer_.size() - end_);
        end_ += n;
        return n > 0;
    }

    std::string name_, buffer_;
    std::unique_ptr<ByteSource> source_;
    size_t begin_ = 0, end_ = 0;  // the part of buffer_ that is not consumed yet
};

// Reads a file that is small enough for memory: the largest tokenizers have 40 MB.
inline std::string read_whole_file(const std::string& path, bool from_disk = false) {
    constexpr size_t most = 256 << 20;
    return patiently([&] {
        std::string text;
        read_in_pieces(path, from_disk, [&](const char* bytes, size_t n) {
            if (text.size() + n > most)
                fail("%s has more than %zu bytes, the maximum for this kind of file", path.c_str(), most);
            text.append(bytes, n);
            return true;
        });
        return text;
    });
}

// A phrase that identifies files written by a command.
inline std::string written_by(const std::string& command) { return "Written by train_gpt " + command; }
inline std::string beginning_of(const std::string& path, size_t most = 400) {
    return patiently([&] {
        std::string start;
        read_in_pieces(path, false, [&](const char* bytes, size_t n) {
            start.append(bytes, std::min(n, most - start.size()));
            return start.size() < most;
        });
        return start;
    });
}
// Refuses to replace a file that the command did not write.
inline void check_replaceable(const std::string& path, const std::string& command, const char* option = "--out") {
    std::error_code error;
    if (!std::filesystem::exists(std::filesystem::symlink_status(path, error))) return;
    if (!is_regular(path) || beginning_of(path).find(written_by(command)) == std::string::npos)
        fail("%s exists and was not written by %s; HINT: give another %s", path.c_str(), command.c_str(), option);
}

// All of standard input, without its last newline.
inline std::string read_standard_input() {
    std::string text;
    char part[1 << 16];
    while (const size_t n = fread(part, 1, sizeof part, stdin)) text.append(part, n);
    if (ferror(stdin)) fail("cannot read standard input: %s", strerror(errno));
    if (!text.empty() && text.back() == '\n') text.pop_back();
    return text;
}

inline void sync_directory(const std::string& dir) {
    const int fd = open(dir.empty() ? "." : dir.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return;  // some file systems have no directories to sync
    fsync(fd);
    close(fd);
}

// Syncs a file's data to the disk, whichever process wrote it; where that is not possible, without an error.
inline void sync_file(const std::string& path) {
    const int fd = open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0) return;
    fdatasync(fd);
    close(fd);
}

// A file's name until the file is complete. A killed process leaves it behind, and a later process may have the same PID.
inline constexpr const char* temporary_mark = ".tmp.";
inline std::string temporary_name(const std::string& path) { return path + temporary_mark + std::to_string(getpid()); }
inline bool is_unfinished(const std::string& name) {
    const size_t at = name.rfind(temporary_mark);
    return at != std::string::npos && at + strlen(temporary_mark) < name.size() &&
           name.find_first_not_of("0123456789", at + strlen(temporary_mark)) == std::string::npos;
}
// The name of a directory that is being created or removed.
inline std::string hidden(const std::string& name, const char* ending) { return "." + name + ending; }

// Creates a new file. Removes an existing one under its name, without writing into it or following a link. Returns the
// descriptor, or -1 and errno.
inline int create_new_file(const std::string& path) {
    const auto create = [&] { return open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0644); };
    const int fd = create();
    return fd < 0 && errno == EEXIST && unlink(path.c_str()) == 0 ? create() : fd;
}

// Removes files of killed processes whose names start with `begin`: the temporary ones that no FileWriter holds.
inline void remove_unfinished_in(const std::string& dir, const std::string& begin) {
    std::error_code error;  // a missing directory has none
    for (const auto& entry : std::filesystem::directory_iterator(dir, error)) {
        const std::string name = entry.path().filename().string();
        if (name.compare(0, begin.size(), begin) != 0 || !is_unfinished(name)) continue;
        const int fd = open(entry.path().c_str(), O_RDWR | O_NOFOLLOW | O_CLOEXEC);
        if (fd < 0) continue;
        if (flock(fd, LOCK_EX | LOCK_NB) == 0) unlink(entry.path().c_str());
        close(fd);
    }
}
inline void remove_unfinished(const std::string& path) {
    const auto [dir, name] = folder_and_name(path);
    remove_unfinished_in(dir, name + temporary_mark);
}

// The same of one file, for any number of files in a directory: it is listed only once, as later processes leave nothing behind
// that this one could remove.
class LeftByKilledProcesses {
public:
    static void remove(const std::string& path) {
        const auto [dir, name] = folder_and_name(path);
        const std::string begin = name + temporary_mark;
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto [found, is_new] = unfinished_.emplace(dir, std::set<std::string>());
        std::error_code error;  // a missing directory has none
        if (is_new)
            for (std::filesystem::directory_iterator entry(dir, error), end; !error && entry != end; entry.increment(error))
                if (std::string other = entry->path().filename().string(); is_unfinished(other)) found->second.insert(other);
        const auto first = found->second.lower_bound(begin);
        if (first != found->second.end() && first->compare(0, begin.size(), begin) == 0) remove_unfinished(path);
    }

private:
    inline static std::mutex mutex_;
    inline static std::map<std::string, std::set<std::string>> unfinished_;  // of each directory, when it was listed
};

// Transfers `bytes` by system calls: some(done) transfers a part of the bytes after `done`, and returns its size. Retries after
// signals. Returns false with errno, which is ENOSPC if nothing was transferred.
template <class Some>
bool move_all(size_t bytes, Some some) {
    for (size_t done = 0; done < bytes;) {
        const ssize_t n = some(done);
        if (n < 0 && errno == EINTR) continue;
        if (n == 0) errno = ENOSPC;
        if (n <= 0) return false;
        done += (size_t)n;
    }
    return true;
}

class FileWriter {
public:
    // Removes leftovers of this file from killed processes.
    explicit FileWriter(const std::string& path) : path_(path), temporary_(temporary_name(path)) {
        LeftByKilledProcesses::remove(path);
        fd_ = create_new_file(temporary_);
        if (fd_ < 0) fail_to_write(path, errno, "its folder must exist and be writable");
        flock(fd_, LOCK_EX | LOCK_NB);  // for remove_unfinished
        buffer_.reserve(buffer_bytes);
    }
    // Writes to `kept`, which remains without commit(), so that a later process can resume. Keeps its first bytes, whose sum
    // was `sum` when they were written; 0 bytes start over.
    FileWriter(const std::string& path, const std::string& kept, const FileSum& sum)
        : path_(path), temporary_(kept), keeps_(true), sum_(sum) {
        const size_t bytes = sum.bytes;
        fd_ = open(kept.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0644);
        if (fd_ < 0) fail_to_write(kept, errno);
        struct stat st {};
        std::string problem;
        if (flock(fd_, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) problem = "another process is writing it";
        else if (fstat(fd_, &st) != 0 || (size_t)st.st_size < bytes) problem = format("it has fewer than %zu bytes", bytes);
        else if (ftruncate(fd_, (off_t)bytes) != 0 || lseek(fd_, 0, SEEK_END) < 0) problem = strerror(errno);
        if (!problem.empty()) {
            close(fd_);
            fail("cannot resume %s: %s; HINT: omit --resume to start over", kept.c_str(), problem.c_str());
        }
        buffer_.reserve(buffer_bytes);
    }
    FileWriter(const FileWriter&) = delete;
    FileWriter& operator=(const FileWriter&) = delete;
    ~FileWriter() {
        if (fd_ >= 0) close(fd_);
        if (!committed_ && !keeps_) unlink(temporary_.c_str());
    }

    void write(const void* data, size_t bytes) {
        sum_.crc = crc32c(data, bytes, sum_.crc);
        sum_.bytes += bytes;
        checked_ = false;
        if (buffer_.size() + bytes > buffer_bytes) flush();
        if (bytes >= buffer_bytes) write_out((const char*)data, bytes);
        else buffer_.insert(buffer_.end(), (const char*)data, (const char*)data + bytes);
    }
    void write(std::string_view text) { write(text.data(), text.size()); }
    size_t written() const { return sum_.bytes; }
    const FileSum& sum() const { return sum_; }
    // The ending of the file's name until commit().
    std::string unfinished_ending() const { return temporary_.substr(path_.size()); }
    // The destructor removes the file, also one that was to be kept.
    void discard() { keeps_ = false; }

    // Reads bytes [offset, offset + bytes), which were written before.
    void read_back(size_t offset, void* data, size_t bytes) {
        CHECK(offset <= written() && bytes <= written() - offset, "reading %zu bytes at %zu of %zu", bytes, offset, written());
        flush();
        const auto some = [&](size_t done) { return pread(fd_, (char*)data + done, bytes - done, (off_t)(offset + done)); };
        if (!move_all(bytes, some))
            fail("cannot read back %s: %s", temporary_.c_str(), errno == ENOSPC ? "it was cut off" : strerror(errno));
    }
    // Replaces `before`, as it was written.
    void overwrite(size_t offset, const void* before, const void* data, size_t bytes) {
        CHECK(offset <= written() && bytes <= written() - offset, "overwriting %zu bytes at %zu of %zu", bytes, offset,
              written());
        const uint32_t change = crc32c_linear(before, bytes) ^ crc32c_linear(data, bytes);
        sum_.crc ^= crc32c_shifted(change, written() - offset - bytes);
        checked_ = false;
        flush();
        const auto some = [&](size_t done) {
            return pwrite(fd_, (const char*)data + done, bytes - done, (off_t)(offset + done));
        };
        if (!move_all(bytes, some)) fail_to_write(path_, errno);
    }

    // Flushes everything to the disk. After a failure it fails again: the written part of the buffer is unknown.
    void keep() {
        if (failed_) fail("cannot write %s: an earlier part is missing", path_.c_str());
        flush();
        failed_ = fsync(fd_) != 0 && errno != EINVAL;  // EINVAL: a file system that cannot sync
        if (failed_) fail_to_write(path_, errno);
    }
    // keep(), then compares the disk's bytes with the written ones.
    void check() {
        keep();
        if (!checked_) check_written(path_, sum_, sum_file(temporary_, SIZE_MAX, true), keeps_ ? "; omit --resume" : "");
        checked_ = true;
    }
    // Completes the file: on the disk, and under its final name. Until then it is locked, and remove_unfinished ignores it.
    void commit() {
        check();
        if (rename(temporary_.c_str(), path_.c_str()) != 0)
            fail("cannot rename %s to %s: %s", temporary_.c_str(), path_.c_str(), strerror(errno));
        committed_ = true;
        if (close(std::exchange(fd_, -1)) != 0) fail_to_write(path_, errno);
        sync_directory(std::filesystem::path(path_).parent_path().string());
    }

private:
    static constexpr size_t buffer_bytes = 1 << 20;

    void flush() {
        write_out(buffer_.data(), buffer_.size());
        buffer_.clear();
    }
    void write_out(const char* data, size_t bytes) {
        failed_ |= !move_all(bytes, [&](size_t done) { return ::write(fd_, data + done, bytes - done); });
        if (failed_) fail("cannot write %s: %s (after %zu bytes)", path_.c_str(), strerror(errno), written());
    }

    std::string path_, temporary_;
    int fd_ = -1;
    bool committed_ = false, keeps_ = false, failed_ = false, checked_ = false;
    FileSum sum_;  // of the written bytes
    std::vector<char> buffer_;
};

inline void write_file_atomically(const std::string& path, std::string_view text) {
    FileWriter file(path);
    file.write(text);
    file.commit();
}

// Opens /dev/null in place of standard input, output or error if the process was started without it: otherwise a file opened
// later would get its number, and would receive printed text.
inline void open_standard_streams() {
    for (int fd = 0; fd <= 2; fd++)
        if (fcntl(fd, F_GETFD) < 0) (void)!open("/dev/null", O_RDWR);  // the lowest free number
}

// Appends a record to a file that others may read at the same time: the whole record or nothing.
inline void append_whole(int fd, const std::string& path, const std::string& record) {
    const off_t before = lseek(fd, 0, SEEK_END);
    const ssize_t n = ::write(fd, record.data(), record.size());
    if (n == (ssize_t)record.size()) return;
    const std::string reason = n < 0 ? strerror(errno) : "disk full";
    if (n > 0 && before >= 0) (void)!ftruncate(fd, before);  // removes the half-written record
    fail("cannot write %s: %s; these log lines are lost", path.c_str(), reason.c_str());
}

// The first free name among path.1, path.2, ...
inline std::string free_name_beside(const std::string& path) {
    std::error_code error;
    for (int i = 1;; i++) {
        const std::string name = path + "." + std::to_string(i);
        if (!std::filesystem::exists(std::filesystem::symlink_status(name, error))) return name;
    }
}
// Renames `path` to that name and returns it; "" if `path` does not exist.
inline std::string set_aside(const std::string& path) {
    std::error_code error;
    if (!std::filesystem::exists(std::filesystem::symlink_status(path, error))) return "";
    const std::string other = free_name_beside(path);
    if (rename(path.c_str(), other.c_str()) != 0)
        fail("cannot rename %s to %s: %s", path.c_str(), other.c_str(), strerror(errno));
    return other;
}

// ~, ~/PATH and ~USER/PATH with the home directory; any other path, and an unknown user's, as it is.
inline std::string expand_home(const std::string& path) {
    if (path.empty() || path[0] != '~') return path;
    const size_t slash = std::min(path.find('/'), path.size());
    const char* home = slash == 1 ? getenv("HOME") : nullptr;
    if (!home || !*home) {
        const passwd* const user = slash == 1 ? getpwuid(getuid()) : getpwnam(path.substr(1, slash - 1).c_str());
        home = user ? user->pw_dir : nullptr;
    }
    return home && *home ? home + path.substr(slash) : path;
}

inline std::string without_trailing_slashes(std::string path) {
    while (path.size() > 1 && path.back() == '/') path.pop_back();
    return path;
}

// Creates a directory and its parents; fail()s with the reason.
inline void make_directory(const std::string& dir) {
    const std::error_code error = patiently([&] {
        std::error_code problem;
        std::filesystem::create_directories(dir, problem);
        if (problem && may_pass(problem.value())) fail_to_read(dir, problem.value());
        return problem;
    });
    if (error) fail("cannot create directory %s: %s; HINT: give another name", dir.c_str(), error.message().c_str());
    if (access(dir.c_str(), W_OK) != 0) fail("directory %s is not writable: %s", dir.c_str(), strerror(errno));
}

// The directory for files that can be regenerated: $XDG_CACHE_HOME/train_gpt or ~/.cache/train_gpt, created if missing. Empty
// if neither is set: someone else could fill a predictable name in a world-writable directory.
inline std::string cache_directory() {
    const char *cache = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    std::error_code error;
    for (const std::string& base :
         {std::string(cache ? cache : ""), home && *home ? std::string(home) + "/.cache" : std::string()})
        if (!base.empty()) {
            std::filesystem::create_directories(base + "/train_gpt", error);
            if (!error) return base + "/train_gpt";
        }
    return "";
}
