// Documents, paragraphs or lines that occurred before, in a corpus of any size: the first one in order is kept.
//
// A unit is identified by a hash of 128 bits (MurmurHash3): two of a trillion different units have the same hash with
// probability 1.5e-15. Units are compared by their bytes, or folded: by their words in lower case, so that white space and
// punctuation are ignored (words.h; a word is a hash of 64 bits, so that two different words collide once in 2^64 times). A
// paragraph is a run of lines that are not blank. Units without a word or, unfolded, with only white space are never
// duplicates: they are unchanged.
//
// Three steps. sign: a pure function, on many threads. add: in the documents' order, on one thread. solve: sorts (hash,
// position), where equal units become neighbors, and then the positions of all but the first of them. Uses `memory_bytes` of
// memory; the remainder is on the disk: 24 bytes per unit, and 8 per duplicate.
#pragma once
#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "../base/check.h"
#include "../base/hash.h"
#include "external_sort.h"
#include "words.h"

struct ExactDuplicateOptions {
    std::string unit = "documents";  // or "paragraphs", "lines"
    bool folded = false;
    int64_t shortest_bytes = 0;  // shorter units are never duplicates: braces, headings
};

class ExactDuplicates {
public:
    ExactDuplicates(const ExactDuplicateOptions& options, const std::string& work_directory, size_t memory_bytes)
        : options_(options),
          directory_(work_directory),
          memory_bytes_(memory_bytes),
          records_(work_directory, memory_bytes),
          dropped_(work_directory) {
        check_unit(options.unit);
    }
    static void check_unit(const std::string& unit) {
        refuse_value(unit != "documents" && unit != "paragraphs" && unit != "lines", "--exact-duplicates", unit,
                     "documents, paragraphs or lines");
    }

    // The units that may be duplicates: their indices among the units of the text, and their hashes.
    using Signature = std::vector<std::pair<uint32_t, Hash128>>;
    Signature sign(std::string_view text) const {
        Signature signature;
        uint32_t index = 0;
        for_each_unit(text, [&](std::string_view unit, size_t, size_t) {
            if (index == most_units) return;  // per document; further units are kept
            if (Hash128 hash; (int64_t)unit.size() >= options_.shortest_bytes && hash_of(unit, hash))
                signature.push_back({index, hash});
            index++;
        });
        return signature;
    }

    // Documents in order, each number once.
    void add(int64_t number, const Signature& signature) {
        CHECK(number >= 0 && number < (int64_t)1 << (64 - unit_bits), "document %lld", (long long)number);
        for (const auto& [index, hash] : signature) records_.add({hash, (uint64_t)number << unit_bits | index});
    }

    void solve() {
        ExternalSort<uint64_t> again(directory_, memory_bytes_);
        Hash128 before;
        bool any = false;
        records_.drain([&](const Record& record) {
            if (any && record.hash == before) again.add(record.position);
            before = record.hash;
            any = true;
        });
        dropped_.resize(again.size());
        size_t i = 0;
        again.drain([&](uint64_t position) { dropped_[i++] = position; });
    }
    int64_t n_dropped() const { return (int64_t)dropped_.size(); }

    // The indices of the document's units that occurred before. For any document, from any thread.
    std::vector<uint32_t> dropped(int64_t number) const {
        std::vector<uint32_t> units;
        const uint64_t first = (uint64_t)number << unit_bits;
        size_t begin = 0, end = dropped_.size();
        while (begin < end) {
            const size_t middle = begin + (end - begin) / 2;
            if (dropped_[middle] < first) begin = middle + 1;
            else end = middle;
        }
        for (; begin < dropped_.size() && dropped_[begin] >> unit_bits == (uint64_t)number; begin++)
            units.push_back((uint32_t)(dropped_[begin] & most_units));
        return units;
    }

    // The text without these units and the blank lines after them.
    std::string without(std::string_view text, const std::vector<uint32_t>& units) const {
        std::string left;
        uint32_t index = 0;
        size_t copied = 0, next = 0;
        for_each_unit(text, [&](std::string_view, size_t begin, size_t end) {
            const uint32_t unit = index == most_units ? most_units : index++;
            if (next == units.size() || units[next] != unit) return;
            left += text.substr(copied, begin - copied);
            copied = end;
            next++;
        });
        left += text.substr(copied);
        return left;
    }

private:
    static constexpr int unit_bits = 24;
    static constexpr uint32_t most_units = (1u << unit_bits) - 1;
    struct Record {
        Hash128 hash;
        uint64_t position;  // document, unit
        bool operator<(const Record& other) const { return hash == other.hash ? position < other.position : hash < other.hash; }
    };

    static bool blank(std::string_view text) {
        for (size_t at = 0; at < text.size();) {
            const FoldedCharacter c = FoldingTable::instance().at(text, at);
            if (c.kind != CharacterKind::space) return false;
            at += c.length;
        }
        return true;
    }
    // Returns false if the unit has nothing to compare.
    bool hash_of(std::string_view unit, Hash128& hash) const {
        if (!options_.folded) {
            hash = murmur3_128(unit);
            return !blank(unit);
        }
        std::vector<uint64_t> words;
        for_each_word<Punctuation::removed, Digits::kept>(unit, [&](uint64_t word, size_t, size_t) { words.push_back(word); });
        hash = murmur3_128({(const char*)words.data(), words.size() * sizeof(uint64_t)});
        return !words.empty();
    }
    // f(unit, first, end): the unit without line ends around it; and its bytes including the separator from the next one.
    template <class F>
    void for_each_unit(std::string_view text, F f) const {
        if (options_.unit == "documents") return f(text, 0, text.size());
        const bool lines = options_.unit == "lines";
        size_t begin = 0, content_end = 0;
        bool within = false, after_blank = false;  // inside a unit; after a blank line
        const auto finish = [&](size_t end) {
            if (within) f(text.substr(begin, content_end - begin), begin, end);
            within = false;
        };
        for (size_t at = 0, next; at < text.size(); at = next) {
            const size_t newline = std::min(text.find('\n', at), text.size());
            next = std::min(newline + 1, text.size());
            const size_t end = newline > at && text[newline - 1] == '\r' ? newline - 1 : newline;
            const bool is_blank = blank(text.substr(at, end - at));
            if (!is_blank) {
                if (lines || after_blank) finish(at);
                if (!within) begin = at;
                within = true;
                content_end = end;
            }
            after_blank = is_blank;
        }
        finish(text.size());
    }

    const ExactDuplicateOptions options_;
    const std::string directory_;
    const size_t memory_bytes_;
    ExternalSort<Record> records_;
    DiskArray<uint64_t> dropped_;  // positions in ascending order
};
