// More records than fit in memory: sorted, kept in order, or looked up by number, in files of a work directory.
//   WorkFile       bytes in a file without a name: it is unlinked when it is created, so that nothing is left behind,
//                  however the process ends, and no other file is touched
//   ExternalSort   records in ascending order: sorted runs of as many records as fit in memory, then merges. Each pass
//                  reads and writes everything once; one merge suffices for memory^2 / 64 KiB bytes (16 GB for 32 MiB, 1 TB
//                  for 256 MiB)
//   Spool          records in the order in which they were added
//   DiskArray      an array of zeros that grows; the kernel keeps the pages in memory that are in use
// A full disk is an error that names the directory. Records are copied as bytes.
#pragma once
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <queue>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "../base/check.h"
#include "../base/file.h"

class WorkFile {
public:
    explicit WorkFile(std::string directory) : directory_(std::move(directory)) {}  // created on the first write
    WorkFile(WorkFile&& other) noexcept
        : directory_(std::move(other.directory_)), fd_(std::exchange(other.fd_, -1)), size_(std::exchange(other.size_, 0)) {}
    WorkFile& operator=(WorkFile&& other) noexcept {
        std::swap(directory_, other.directory_);
        std::swap(fd_, other.fd_);
        std::swap(size_, other.size_);
        return *this;
    }
    ~WorkFile() {
        if (fd_ >= 0) close(fd_);
    }
    const std::string& directory() const { return directory_; }
    int descriptor() const { return fd_; }
    size_t size() const { return size_; }

    void append(const void* data, size_t bytes) {
        if (bytes > 0) make();
        const auto some = [&](size_t done) {
            return pwrite(fd_, (const char*)data + done, bytes - done, (off_t)(size_ + done));
        };
        if (!move_all(bytes, some)) stop("write to", errno);
        size_ += bytes;
    }
    void read(size_t offset, void* data, size_t bytes) const {
        CHECK(offset <= size_ && bytes <= size_ - offset, "reading %zu bytes at %zu of %zu", bytes, offset, size_);
        const auto some = [&](size_t done) { return pread(fd_, (char*)data + done, bytes - done, (off_t)(offset + done)); };
        if (!move_all(bytes, some)) stop("read from", errno == ENOSPC ? EIO : errno);
    }
    // Reserves space on the disk, so that writes through a mapping cannot fail.
    void reserve(size_t bytes) {
        if (bytes <= size_) return;
        make();
        if (const int error = posix_fallocate(fd_, (off_t)size_, (off_t)(bytes - size_))) stop("write to", error);
        size_ = bytes;
    }

private:
    void make() {
        if (fd_ >= 0) return;
        make_directory(directory_);
        static std::atomic<int> number{0};
        const std::string path = directory_ + "/.work." + std::to_string(getpid()) + "." + std::to_string(number++);
        fd_ = create_new_file(path);
        if (fd_ < 0 || unlink(path.c_str()) != 0) stop("write to", errno);
    }
    [[noreturn]] void stop(const char* what, int error) const {
        fail("cannot %s the work directory %s: %s (after %zu bytes of one file)%s", what, directory_.c_str(), strerror(error),
             size_,
             error == ENOSPC || error == EDQUOT || error == EFBIG ? "; HINT: name a directory on a disk with more space" : "");
    }
    std::string directory_;
    int fd_ = -1;
    size_t size_ = 0;
};

// ---- records in the order in which they were added -------------------------------------------------------------------------
template <class Record>
class Spool {
    static_assert(std::is_trivially_copyable<Record>::value, "records are copied as bytes");

public:
    explicit Spool(const std::string& directory) : file_(directory) {}
    void add(const Record& record) {
        buffer_.push_back(record);
        size_++;
        if (buffer_.size() == most) flush();
    }
    size_t size() const { return size_; }
    // f(record) for all.
    template <class F>
    void for_each(F f) {
        flush();
        std::vector<Record> some(std::min(most, size_));
        for (size_t first = 0; first < size_; first += some.size()) {
            some.resize(std::min(some.size(), size_ - first));
            file_.read(first * sizeof(Record), (void*)some.data(), some.size() * sizeof(Record));
            for (const Record& record : some) f(record);
        }
    }

private:
    static constexpr size_t most = (1 << 18) / sizeof(Record);
    void flush() {
        file_.append(buffer_.data(), buffer_.size() * sizeof(Record));
        buffer_.clear();
    }
    WorkFile file_;
    std::vector<Record> buffer_;
    size_t size_ = 0;
};

// ---- sorting ---------------------------------------------------------------------------------------------------------------
template <class Record>
class ExternalSort {
    static_assert(std::is_trivially_copyable<Record>::value, "records are copied as bytes");

public:
    ExternalSort(const std::string& directory, size_t memory_bytes)
        : directory_(directory), most_(std::max<size_t>(memory_bytes / sizeof(Record), 2 * reading)) {}
    void add(const Record& record) {
        if (size_ == 0) records_.reserve(most_);  // uses memory only where it is written
        if (records_.size() == most_) write_run();
        records_.push_back(record);
        size_++;
    }
    size_t size() const { return size_; }
    size_t runs() const { return runs_.size(); }

    // f(record) for all in ascending order. The sorter is empty afterwards.
    template <class F>
    void drain(F f) {
        if (runs_.empty()) {
            std::sort(records_.begin(), records_.end());
            for (const Record& record : records_) f(record);
        } else {
            write_run();
            std::vector<Record>().swap(records_);
            const size_t fan_in = std::max<size_t>(most_ / reading, 2);
            while (runs_.size() > fan_in) merge_some(fan_in);
            merge(runs_, f);
        }
        files_.clear();
        runs_.clear();
        std::vector<Record>().swap(records_);
        size_ = 0;
    }

private:
    static constexpr size_t reading = (64 << 10) / sizeof(Record);  // records that a merge reads at a time, from each run
    struct Run {
        size_t file, first, n;
    };

    void write_run() {
        std::sort(records_.begin(), records_.end());
        if (files_.empty()) files_.emplace_back(directory_);
        runs_.push_back({files_.size() - 1, files_.back().size() / sizeof(Record), records_.size()});
        files_.back().append(records_.data(), records_.size() * sizeof(Record));
        records_.clear();
    }

    // One pass: groups of runs become runs of a new file.
    void merge_some(size_t fan_in) {
        std::vector<WorkFile> merged;
        merged.emplace_back(directory_);
        std::vector<Run> longer;
        for (size_t i = 0; i < runs_.size(); i += fan_in) {
            const std::vector<Run> group(runs_.begin() + (long)i, runs_.begin() + (long)std::min(runs_.size(), i + fan_in));
            Run run{0, merged[0].size() / sizeof(Record), 0};
            std::vector<Record> out;
            out.reserve(reading);
            const auto flush = [&] {
                merged[0].append(out.data(), out.size() * sizeof(Record));
                out.clear();
            };
            merge(group, [&](const Record& record) {
                out.push_back(record);
                run.n++;
                if (out.size() == reading) flush();
            });
            flush();
            longer.push_back(run);
        }
        files_ = std::move(merged);
        runs_ = std::move(longer);
    }

    template <class F>
    void merge(const std::vector<Run>& runs, F&& f) {
        struct Input {
            std::vector<Record> records;
            size_t next = 0, first = 0, left = 0;  // left: on the disk
        };
        const size_t each = std::max<size_t>(most_ / runs.size(), reading);
        std::vector<Input> inputs(runs.size());
        const auto refill = [&](size_t i) {
            Input& input = inputs[i];
            input.records.resize(std::min(each, input.left));
            input.next = 0;
            if (input.left == 0) return false;
            const size_t n = input.records.size();
            files_[runs[i].file].read(input.first * sizeof(Record), (void*)input.records.data(), n * sizeof(Record));
            input.first += n;
            input.left -= n;
            return true;
        };
        using Head = std::pair<Record, size_t>;
        const auto later = [](const Head& a, const Head& b) {
            if (a.first < b.first) return false;
            return b.first < a.first || a.second > b.second;
        };
        std::priority_queue<Head, std::vector<Head>, decltype(later)> heads(later);
        for (size_t i = 0; i < runs.size(); i++) {
            inputs[i].first = runs[i].first;
            inputs[i].left = runs[i].n;
            if (refill(i)) heads.push({inputs[i].records[inputs[i].next++], i});
        }
        while (!heads.empty()) {
            const Head head = heads.top();
            heads.pop();
            f(head.first);
            Input& input = inputs[head.second];
            if (input.next < input.records.size() || refill(head.second))
                heads.push({input.records[input.next++], head.second});
        }
    }

    std::string directory_;
    size_t most_;  // records in memory
    std::vector<Record> records_;
    std::vector<WorkFile> files_;
    std::vector<Run> runs_;
    size_t size_ = 0;
};

// ---- an array that may be larger than memory -------------------------------------------------------------------------------
template <class T>
class DiskArray {
    static_assert(std::is_trivially_copyable<T>::value, "elements are copied as bytes");

public:
    explicit DiskArray(const std::string& directory) : file_(directory) {}
    DiskArray(DiskArray&& other) noexcept
        : file_(std::move(other.file_)), data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
    DiskArray& operator=(DiskArray&& other) noexcept {
        std::swap(file_, other.file_);
        std::swap(data_, other.data_);
        std::swap(size_, other.size_);
        return *this;
    }
    ~DiskArray() {
        if (data_) munmap((void*)data_, file_.size());
    }
    size_t size() const { return size_; }
    T& operator[](size_t i) { return data_[i]; }
    const T& operator[](size_t i) const { return data_[i]; }

    // New elements are zero.
    void resize(size_t n) {
        if (n * sizeof(T) > file_.size()) {
            const size_t before = file_.size();
            const size_t page = 1 << 16;
            file_.reserve((std::max(n * sizeof(T), before + before / 2) + page - 1) / page * page);
            void* p = data_ ? mremap((void*)data_, before, file_.size(), MREMAP_MAYMOVE)
                            : mmap(nullptr, file_.size(), PROT_READ | PROT_WRITE, MAP_SHARED, file_.descriptor(), 0);
            if (p == MAP_FAILED)
                fail("cannot map %zu bytes of %s into memory: %s", file_.size(), file_.directory().c_str(), strerror(errno));
            data_ = (T*)p;
        }
        size_ = n;
    }

private:
    WorkFile file_;
    T* data_ = nullptr;
    size_t size_ = 0;
};
