// Batches that training skips: around a loss spike (PaLM skipped 200 to 500 of them), or known to be bad.
//   const BatchRanges skip = BatchRanges::parse({"101-200", "351-400,512"}, "--skip-batches");
//   batch = skip.next(batch);    // the batch to read instead
// Batches are numbered from 1 in the order of an undisturbed run: batch n is read by step n of a run without skips. As a number
// means the same batch whatever was skipped before it, ranges can be added, saved and resumed at any time. Ranges are closed,
// [first, last], and kept sorted; overlapping and touching ones are merged. Numbers go up to 2^53, which every JSON reader
// represents exactly.
#pragma once
#include <algorithm>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "../base/check.h"
#include "options.h"
#include "../base/json.h"

class BatchRanges {
public:
    struct Range {
        int64_t first, last;
        bool operator==(const Range& r) const { return first == r.first && last == r.last; }
    };
    static constexpr int64_t largest = 1ll << 53;

    // Each string holds one or more of "first-last" or "batch", separated by commas. `option` is named in errors.
    static BatchRanges parse(const Strings& ranges, const char* option) {
        BatchRanges result;
        for (const Range& r : split(ranges, option)) result.add(r.first, r.last);
        return result;
    }

    // The ranges of LLM-jp's --skip-train-iteration-range, which count iterations: when the next iteration is in a range, as
    // many batches as the range is long are drawn and discarded, and the iteration counter does not advance. So a range starts
    // as many batches later as were discarded before it: 101-200 251-300 skips the batches 101-200 and 351-400. Overlapping
    // ranges are merged; touching ones are not, since between 3-5 and 6-9 the iterations 3 to 5 still run.
    static BatchRanges from_iterations(const Strings& ranges, const char* option) {
        std::vector<Range> given = split(ranges, option);
        std::sort(given.begin(), given.end(), [](const Range& a, const Range& b) { return a.first < b.first; });
        BatchRanges result;
        int64_t discarded = 0;
        for (size_t i = 0; i < given.size();) {
            Range r = given[i++];
            while (i < given.size() && given[i].first <= r.last) r.last = std::max(r.last, given[i++].last);
            if (r.last > largest - discarded)
                fail("%s: %lld-%lld comes after %lld discarded batches, and batches are counted up to %lld", option,
                     (long long)r.first, (long long)r.last, (long long)discarded, (long long)largest);
            result.add(r.first + discarded, r.last + discarded);
            discarded += r.last - r.first + 1;
        }
        return result;
    }

    void add(int64_t first, int64_t last) {
        CHECK(1 <= first && first <= last && last <= largest, "batches %lld to %lld", (long long)first, (long long)last);
        const auto from = ending_at_or_after(first - 1);
        auto to = from;  // [from, to) overlap or touch the new range
        for (; to != ranges_.end() && to->first <= last + 1; ++to) {
            first = std::min(first, to->first);
            last = std::max(last, to->last);
        }
        ranges_.insert(ranges_.erase(from, to), Range{first, last});
    }

    void add(const BatchRanges& other) {
        for (const Range& r : other.ranges_) add(r.first, r.last);
    }

    bool empty() const { return ranges_.empty(); }
    const std::vector<Range>& ranges() const { return ranges_; }
    bool operator==(const BatchRanges& other) const { return ranges_ == other.ranges_; }
    bool operator!=(const BatchRanges& other) const { return !(*this == other); }

    bool contains(int64_t batch) const { return next(batch) != batch; }

    // The first batch from `batch` on that is not skipped.
    int64_t next(int64_t batch) const {
        const auto r = ending_at_or_after(batch);
        return r != ranges_.end() && r->first <= batch ? r->last + 1 : batch;
    }

    // The number of skipped batches before `batch`.
    int64_t count_before(int64_t batch) const {
        int64_t n = 0;
        for (const Range& r : ranges_)
            if (r.first < batch) n += std::min(r.last + 1, batch) - r.first;
        return n;
    }

    // The first batch of the range that ends right before `batch`; `batch` itself if there is none.
    int64_t first_of_row_before(int64_t batch) const {
        const auto r = ending_at_or_after(batch - 1);
        return r != ranges_.end() && r->first < batch ? r->first : batch;
    }

    // The form that parse() reads: "3-5,9".
    std::string text() const {
        std::string s;
        for (const Range& r : ranges_) {
            if (!s.empty()) s += ",";
            s += std::to_string(r.first);
            if (r.last > r.first) s += "-" + std::to_string(r.last);
        }
        return s;
    }

    // As JSON: [[3, 5], [9, 9]]. restore()'s `where` names the origin of `state` in messages.
    nlohmann::ordered_json state() const {
        auto j = nlohmann::ordered_json::array();
        for (const Range& r : ranges_) j.push_back({r.first, r.last});
        return j;
    }
    static BatchRanges restore(const nlohmann::json& state, const std::string& where) {
        const auto number = [](const nlohmann::json& j) {  // 0 if it is not a valid batch number
            if (!j.is_number_integer()) return (int64_t)0;
            return j.is_number_unsigned() ? (int64_t)std::min(j.get<uint64_t>(), (uint64_t)INT64_MAX) : j.get<int64_t>();
        };
        BatchRanges result;
        if (!state.is_array()) fail_damaged(where, "ranges of batches are a list, not " + shown(state).substr(0, 100));
        for (const nlohmann::json& pair : state) {
            const bool is_pair = pair.is_array() && pair.size() == 2;
            const Range r = is_pair ? Range{number(pair[0]), number(pair[1])} : Range{0, 0};
            if (!(1 <= r.first && r.first <= r.last && r.last <= largest))
                fail_damaged(where, shown(pair).substr(0, 100) + " is not a range of batches, [first, last]");
            result.add(r.first, r.last);
        }
        return result;
    }

private:
    std::vector<Range> ranges_;

    std::vector<Range>::const_iterator ending_at_or_after(int64_t batch) const {
        return std::lower_bound(ranges_.begin(), ranges_.end(), batch, [](const Range& r, int64_t b) { return r.last < b; });
    }

    static std::string shown(const nlohmann::json& j) { return json_text(j); }

    // The ranges as written, in their order.
    static std::vector<Range> split(const Strings& texts, const char* option) {
        std::vector<Range> ranges;
        for (const std::string& text : texts)
            for (size_t begin = 0, end; begin <= text.size(); begin = end + 1) {
                end = std::min(text.find(',', begin), text.size());
                ranges.push_back(read_range(text.substr(begin, end - begin), text, option));
            }
        return ranges;
    }
    static Range read_range(const std::string& part, const std::string& text, const char* option) {
        const size_t dash = part.find('-');
        const int64_t first = read_number(part.substr(0, dash));
        const int64_t last = dash == std::string::npos ? first : read_number(part.substr(dash + 1));
        const char* wrong = first < 1 || last < 1 || first > largest || last > largest ? "is not a range of batches"
                            : last < first                                             ? "ends before it starts"
                                                                                       : nullptr;
        if (wrong)
            fail(
                "%s has '%s': '%s' %s. HINT: ranges are written 101-200 or, for a single one, 57, with blanks or commas "
                "between them; batches are numbered from 1 to at most %lld",
                option, text.c_str(), part.c_str(), wrong, (long long)largest);
        return {first, last};
    }
    // Digits only; -1 if it is not a number up to `largest`.
    static int64_t read_number(const std::string& digits) {
        int64_t value = digits.empty() ? -1 : 0;
        for (const char c : digits) {
            if (c < '0' || c > '9') return -1;
            value = value * 10 + (c - '0');
            if (value > largest) return -1;
        }
        return value;
    }
};
