// The split of a dataset's documents into training, validation and test (--split "969, 30, 1"), as in Megatron-LM: in order, at
// round(share * documents). If this leaves training or validation less than one sample, the tokens are split in these shares
// instead (Megatron fails there), and if they do not suffice for both, training gets all of them. Conversations are never
// split; training and validation get at least one each if there are two.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "../base/check.h"
#include "../base/enum_table.h"
#include "../base/text.h"
#include "dataset.h"
#include "shares.h"

enum class DataSplit { train, valid, test, whole };

inline const char* split_name(DataSplit part) {
    switch (part) {
        case DataSplit::train: return "training";
        case DataSplit::valid: return "validation";
        case DataSplit::test: return "test";
        case DataSplit::whole: break;
    }
    return "whole";
}

// The range [first, second) of n documents (or tokens) that belongs to one part of "969, 30, 1".
inline std::pair<int64_t, int64_t> split_range(const std::string& split, DataSplit part, int64_t n) {
    if (part == DataSplit::whole) return {0, n};
    std::vector<double> shares;
    for (size_t i = 0; i < split.size();) {
        const size_t begin = split.find_first_not_of(", ", i);
        if (begin == std::string::npos) break;
        i = std::min(split.find_first_of(", ", begin), split.size());
        shares.push_back(parse_number(split.substr(begin, i - begin)));
    }
    const bool numbers = std::all_of(shares.begin(), shares.end(), [](double s) { return s >= 0 && std::isfinite(s); });
    if (!numbers || shares.size() > 3 || !(numpy_sum(shares.data(), shares.size()) > 0))
        fail_usage(
            "--split '%s' must be one to three shares for training, validation and test, not negative and not all 0, like "
            "\"969, 30, 1\"",
            split.c_str());
    shares.resize(3);
    shares = normalized(shares);
    double border[4] = {0};
    for (int i = 0; i < 3; i++) border[i + 1] = border[i] + shares[i];
    const int i = (int)part;
    if (border[i + 1] <= border[i]) return {0, 0};
    // Python rounds halves to even, like nearbyint.
    return {(int64_t)std::nearbyint(border[i] * (double)n), (int64_t)std::nearbyint(border[i + 1] * (double)n)};
}

inline bool has_share(const std::string& split, DataSplit part) { return split_range(split, part, 1 << 30).second > 0; }

// Documents [begin, end) of a dataset. The first may lack tokens at its start, the last at its end.
struct DocumentRange {
    int64_t begin = 0, end = 0;
    int64_t skipped = 0, cut = 0;  // tokens dropped from the first and from the last document

    bool empty() const { return begin == end; }
    int64_t first_token(int64_t d) const { return d == begin ? skipped : 0; }
    int64_t length(const TokenDataset& data, int64_t d) const {
        return data.length(d) - first_token(d) - (d == end - 1 ? cut : 0);
    }
    int64_t tokens(const TokenDataset& data) const {
        int64_t n = 0;
        for (int64_t d = begin; d < end; d++) n += length(data, d);
        return n;
    }
};

// Tokens [first, last) of the dataset, as a range of documents.
inline DocumentRange part_of_tokens(const TokenDataset& data, int64_t first, int64_t last) {
    DocumentRange p;
    if (first == last) return p;
    int64_t before = 0;  // tokens before document d
    int64_t d = 0;
    for (; before + data.length(d) <= first; d++) before += data.length(d);
    p.begin = d;
    p.skipped = first - before;
    for (; before + data.length(d) < last; d++) before += data.length(d);
    p.end = d + 1;
    p.cut = before + data.length(d) - last;
    return p;
}

// The documents for training, validation and test in a dataset, and a note about the split.
struct SplitParts {
    DocumentRange parts[number_of_values<DataSplit>() - 1];  // by DataSplit, without the last, `whole`
    std::string note;
};

// For conversations or pairs of them, which are never split.
inline SplitParts split_conversations(const TokenDataset& data, const std::string& split, bool validates) {
    const int64_t together = data.documents_together(), n = data.n_documents() / together;
    const auto range = [&](int64_t begin, int64_t end) { return DocumentRange{together * begin, together * end}; };
    const auto documents = [&](DataSplit p) {
        const auto [begin, end] = split_range(split, p, n);
        return begin < end ? range(begin, end) : DocumentRange();
    };
    SplitParts s = {{documents(DataSplit::train), documents(DataSplit::valid), documents(DataSplit::test)}, ""};
    const bool trains = has_share(split, DataSplit::train);
    validates = validates && has_share(split, DataSplit::valid);
    if ((!trains || !s.parts[0].empty()) && (!validates || !s.parts[1].empty())) return s;
    const int64_t trained =
        trains ? std::clamp<int64_t>(split_range(split, DataSplit::train, n).second, 1, std::max<int64_t>(1, n - validates))
               : 0;
    if (trains && validates && n == 1) {
        s.parts[0] = range(0, 1);
        s.parts[1] = {};
        s.note = "its one conversation is for training";
    } else {
        s.parts[0] = trained > 0 ? range(0, trained) : DocumentRange();
        s.parts[1] =
            validates ? range(trained, std::max(trained + 1, split_range(split, DataSplit::valid, n).second)) : DocumentRange();
        s.note = "at least one conversation each for training and validation, although their shares are smaller";
    }
    s.parts[2] = {};
    return s;
}

// For samples of T+1 tokens. validates: validation data is needed, if the split gives it a share.
inline SplitParts split_data(const TokenDataset& data, const std::string& split, int T, bool validates) {
    const auto documents = [&](DataSplit p) {
        const auto [begin, end] = split_range(split, p, data.n_documents());
        return begin < end ? DocumentRange{begin, end} : DocumentRange();
    };
    const auto suffices = [&](const DocumentRange& p) {
        int64_t n = 0;
        for (int64_t d = p.begin; d < p.end && n <= T; d++) n += data.length(d);
        return n > T;
    };
    const bool trains = has_share(split, DataSplit::train);
    validates = validates && has_share(split, DataSplit::valid);
    SplitParts s = {{documents(DataSplit::train), documents(DataSplit::valid), documents(DataSplit::test)}, ""};
    if ((!trains || suffices(s.parts[0])) && (!validates || suffices(s.parts[1]))) return s;

    const int64_t all = data.n_tokens(), least = (int64_t)T + 1;
    int64_t first, last;  // validation's tokens
    if (trains && validates && all < 2 * least) {
        first = last = all;
        s.note = format("all %s tokens are for training: too few for validation as well", with_commas(all).c_str());
        if (all >= 4) s.note += format("; with --seq-length %lld validation would have some", (long long)all / 2 - 1);
    } else {
        std::tie(first, last) = split_range(split, validates ? DataSplit::valid : DataSplit::train, all);
        if (!validates) first = last = std::max(last, std::min(least, all));
        else if (!trains) {
            last = std::max(last, std::min(least, all));
            first = std::clamp<int64_t>(last - least, 0, first);
        } else {
            last = std::max(last, 2 * least);
            first = std::clamp(first, least, last - least);
        }
        s.note = format(
            "by tokens, since its %s cannot give training and validation a sample each: training has the first %s tokens, "
            "validation the next %s",
            data.n_documents() == 1 ? "one document" : counted(data.n_documents(), "document").c_str(),
            with_commas(trains ? first : 0).c_str(), with_commas(last - first).c_str());
    }
    s.parts[0] = part_of_tokens(data, 0, trains ? first : 0);
    s.parts[1] = part_of_tokens(data, first, last);
    s.parts[2] = part_of_tokens(data, last, all);
    return s;
}
