// Sizes and CRC-32C of the files of a directory, as its manifest lists them: of the bytes passed to write, summed in memory,
// and of the bytes read back from the disk. Only where both agree was the directory written.
//   sum_file, sum_lines   of the bytes read back
//   WrittenFiles          of the bytes passed to write: whole texts, and pieces of files in any order, by any number of ranks;
//                         or the pieces themselves, in a part (part_file.h) in place of the directory
// Ranks exchange both as lines of "name bytes crc".
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <vector>

#include "../base/check.h"
#include "../base/crc32c.h"
#include "../base/file.h"
#include "../base/clock.h"
#include "part_file.h"

using FileSums = std::map<std::string, FileSum>;

inline std::string line_of(const std::string& name, const FileSum& sum) {
    return format("%s\t%zu\t%08x\n", name.c_str(), sum.bytes, sum.crc);
}
// Calls take(name, sum) for each line.
template <class Take>
void for_each_sum(const std::string& text, Take take) {
    std::istringstream lines(text);
    for (std::string name, bytes, crc;
         std::getline(lines, name, '\t') && std::getline(lines, bytes, '\t') && std::getline(lines, crc);)
        take(name, FileSum{std::stoull(bytes), (uint32_t)std::stoul(crc, nullptr, 16)});
}
inline FileSums sums_of(const std::string& text) {
    FileSums sums;
    for_each_sum(text, [&](const std::string& name, const FileSum& sum) { sums[name] = sum; });
    return sums;
}

// Lines of those files of dir whose index modulo ranks is rank: this rank's share of the reading.
inline std::string sum_lines(const std::string& dir, const std::vector<std::string>& names, int rank, int ranks,
                             bool from_disk = false, const std::function<void()>& tick = nullptr) {
    std::string lines;
    for (size_t i = (size_t)rank; i < names.size(); i += (size_t)ranks)
        lines += line_of(names[i], sum_file(dir + "/" + names[i], SIZE_MAX, from_disk, tick));
    return lines;
}

// Sums of the bytes passed to write for the files of a directory. A CRC without its two inversions is linear: a file's is the
// XOR of its pieces', each as if followed by zeros up to the file's end. So each writer keeps a number per file, whatever the
// order of its pieces and whichever rank writes the others. Any thread may add.
class WrittenFiles {
public:
    // part: gets the pieces, in place of the directory.
    explicit WrittenFiles(const std::string& dir, PartWriter* part = nullptr) : dir_(dir + "/"), part_(part) {}
    bool in_part() const { return part_; }

    // A piece of the file `path` in the directory, which the caller writes there unless it is in_part(); bytes_after: the
    // number of bytes of the file after it.
    void add(const std::string& path, size_t offset, const void* data, size_t bytes, size_t bytes_after) {
        tick();
        CHECK(path.compare(0, dir_.size(), dir_) == 0, "%s is not in %s", path.c_str(), dir_.c_str());
        if (part_) return part_->add(path.substr(dir_.size()), offset, data, bytes, offset + bytes + bytes_after);
        const FileSum piece = {bytes, crc32c_shifted(crc32c_linear(data, bytes), bytes_after)};
        const std::lock_guard<std::mutex> lock(mutex_);
        add(path.substr(dir_.size()), piece);
    }
    // A whole file; replaces an earlier one of its name.
    void write(const std::string& path, std::string_view text) {
        if (part_) return part_->write(path.substr(dir_.size()), text);
        write_file_atomically(path, text);
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            pieces_.erase(path.substr(std::min(path.size(), dir_.size())));
        }
        add(path, 0, text.data(), text.size(), 0);
    }

    // Called when something was done; since when nothing was. Any thread may ask, so that a disk that hangs is noticed.
    void tick() { ticked_ = monotonic_seconds(); }
    double ticked() const { return ticked_; }

    // The pieces as lines, and the pieces in another writer's lines.
    std::string lines() const {
        std::string text;
        for (const auto& [name, pieces] : pieces_) text += line_of(name, pieces);
        return text;
    }
    void add_lines(const std::string& text) {
        for_each_sum(text, [&](const std::string& name, const FileSum& pieces) { add(name, pieces); });
    }

    // The files' sums; all pieces must have been added.
    FileSums sums() const {
        FileSums files;
        for (const auto& [name, pieces] : pieces_) files[name] = {pieces.bytes, crc32c_of_linear(pieces.crc, pieces.bytes)};
        return files;
    }

private:
    void add(const std::string& name, const FileSum& piece) {
        FileSum& file = pieces_[name];
        file.bytes += piece.bytes;
        file.crc ^= piece.crc;
    }

    std::string dir_;
    PartWriter* const part_;
    std::atomic<double> ticked_{monotonic_seconds()};
    FileSums pieces_;
    std::mutex mutex_;
};

inline std::vector<std::string> names_of(const FileSums& sums) {
    std::vector<std::string> names;
    for (const auto& [name, sum] : sums) names.push_back(name);
    return names;
}

// Throws if the files differ from the data passed to write.
inline void check_against_disk(const std::string& dir, const FileSums& given, const FileSums& there) {
    for (const auto& [name, sum] : given) {
        const auto found = there.find(name);
        CHECK(found != there.end(), "cannot read back %s/%s", dir.c_str(), name.c_str());
        check_written(dir + "/" + name, sum, found->second);
    }
}
inline void check_against_disk(const std::string& dir, const FileSums& given) {
    check_against_disk(dir, given, sums_of(sum_lines(dir, names_of(given), 0, 1, true)));
}
