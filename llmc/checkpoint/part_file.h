// A rank's part of a snapshot that the memory of several nodes holds (node_snapshots.h): pieces of the files of a checkpoint,
// in one file that can be sent to another node as it is. Its end identifies it and has the checksum of everything before, so
// that a part that is torn, damaged or of another save is recognized wherever it is found.
//   the pieces' bytes | Piece of each | the names and sizes of the files, as JSON | PartEnd
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "../base/check.h"
#include "../base/crc32c.h"
#include "../base/file.h"
#include "../base/json.h"
#include "../base/text.h"

// The parts 0 to parts - 1 of one save, which has a random number, are a whole checkpoint.
struct PartId {
    int64_t step = 0;
    uint64_t save = 0;
    uint32_t part = 0, parts = 0;
};
inline std::string part_name(const PartId& id) { return format("step_%08lld.%u-of-%u", (long long)id.step, id.part, id.parts); }
// Step, part and parts from a file's name; a step of -1 for any other name.
inline PartId part_of_name(const std::string& name) {
    PartId id;
    long long step = -1;
    if (sscanf(name.c_str(), "step_%lld.%u-of-%u", &step, &id.part, &id.parts) == 3) id.step = step;
    return id.parts > 0 && part_name(id) == name ? id : PartId{-1};
}

namespace part_detail {
struct Piece {
    uint64_t offset;       // in its file
    uint32_t bytes, file;  // file: index in the names, or `replaced`
};
inline constexpr uint32_t replaced = UINT32_MAX;
struct PartEnd {
    char magic[8] = {'t', 'g', 'p', 't', 'p', 'a', 'r', 't'};
    PartId id;
    uint64_t data = 0, pieces = 0, names = 0;  // bytes, number, bytes
    uint32_t crc = 0;                          // of everything before
    uint32_t own_crc = 0;                      // of the fields above
    uint32_t sum() const { return crc32c(this, offsetof(PartEnd, own_crc)); }
};
static_assert(sizeof(PartEnd) == 64 && sizeof(Piece) == 16);
}  // namespace part_detail

// Writes a part. Any thread may add pieces.
class PartWriter {
public:
    void open(const std::string& path) { file_.emplace(path_ = path); }
    // A piece at `offset` of a file of file_bytes.
    void add(const std::string& name, size_t offset, const void* data, size_t bytes, size_t file_bytes) {
        constexpr size_t most = 1 << 30;
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto [found, is_new] = numbers_.try_emplace(name, (uint32_t)names_.size());
        if (is_new) names_.push_back({name, file_bytes});
        for (size_t done = 0; done < bytes; done += most)
            pieces_.push_back({offset + done, (uint32_t)std::min(most, bytes - done), found->second});
        file_->write(data, bytes);
    }
    // A whole file; replaces an earlier one of its name.
    void write(const std::string& name, std::string_view text) {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            if (const auto old = numbers_.find(name); old != numbers_.end()) {
                for (part_detail::Piece& p : pieces_)
                    if (p.file == old->second) p.file = part_detail::replaced;
                names_[old->second][1] = text.size();
            }
        }
        add(name, 0, text.data(), text.size(), text.size());
    }
    // Adds the end, and returns the part's size.
    size_t finish(const PartId& id) {
        part_detail::PartEnd end;
        end.id = id;
        end.data = file_->written();
        const std::string names = names_.dump();
        end.pieces = pieces_.size();
        end.names = names.size();
        file_->write(pieces_.data(), pieces_.size() * sizeof(part_detail::Piece));
        file_->write(names);
        end.crc = file_->sum().crc;
        end.own_crc = end.sum();
        file_->write(&end, sizeof end);
        file_->keep();
        return file_->written();
    }
    std::string unfinished_path() const { return path_ + file_->unfinished_ending(); }  // until commit()
    void commit() { file_->commit(); }

private:
    std::optional<FileWriter> file_;
    std::string path_;
    std::mutex mutex_;
    std::vector<part_detail::Piece> pieces_;
    nlohmann::json names_ = nlohmann::json::array();
    std::map<std::string, uint32_t> numbers_;
};

// A finished part. The constructor fails if it is damaged; `whole`: also compares the checksum, which reads all of it and calls
// tick() now and then.
class PartFile {
public:
    explicit PartFile(const std::string& path, bool whole = true, const std::function<void()>& tick = nullptr) : file_(path) {
        const auto check = [&](bool good, const char* what) {
            if (!good) fail("%s is damaged: %s", path.c_str(), what);
        };
        check(file_.size() >= sizeof end_, "it is cut off");
        const size_t before = file_.size() - sizeof end_;
        memcpy(&end_, file_.data() + before, sizeof end_);
        const part_detail::PartEnd good;
        check(!memcmp(end_.magic, good.magic, sizeof good.magic) && end_.own_crc == end_.sum(), "its end is missing");
        const size_t piece = sizeof(part_detail::Piece);
        check(end_.data <= before && end_.pieces <= (before - end_.data) / piece &&
                  end_.names == before - end_.data - end_.pieces * piece,
              "its sizes disagree");
        if (!whole) return;
        uint32_t crc = 0;
        for (size_t at = 0, n; at < before; at += n) {
            n = std::min<size_t>(before - at, 64 << 20);
            crc = crc32c(file_.data() + at, n, crc);
            if (tick) tick();
        }
        check(crc == end_.crc, "its checksum differs");
    }
    const PartId& id() const { return end_.id; }
    size_t bytes() const { return end_.data; }
    // Names and sizes of the files.
    std::vector<std::pair<std::string, size_t>> files() const {
        const size_t at = end_.data + end_.pieces * sizeof(part_detail::Piece);
        return parse_json(std::string(file_.data() + at, end_.names), file_.path())
            .get<std::vector<std::pair<std::string, size_t>>>();
    }
    // Calls take(file, offset, data, bytes) for each piece.
    template <class Take>
    void for_each_piece(Take take) const {
        const char* data = file_.data();
        for (size_t i = 0; i < end_.pieces; i++) {
            part_detail::Piece piece;
            memcpy(&piece, file_.data() + end_.data + i * sizeof piece, sizeof piece);
            CHECK(piece.bytes <= (size_t)(file_.data() + end_.data - data), "%s", file_.path().c_str());
            if (piece.file != part_detail::replaced) take((size_t)piece.file, (size_t)piece.offset, data, (size_t)piece.bytes);
            data += piece.bytes;
        }
    }

private:
    MappedFile file_;
    part_detail::PartEnd end_;
};
