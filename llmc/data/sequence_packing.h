// Conversations in samples of T tokens. A sample holds whole conversations, as many as fit, followed by padding; none sees
// another, positions start at 0 in each, and only the tokens of answers are targets.
//
// A conversation of n tokens occupies n - 1 places: its last token is only a target. One that is longer than a sample keeps its
// first T + 1 tokens; if no answer starts in these, it is skipped. The others are packed by best fit, the longest first: each
// goes where it leaves the least room, else into a new sample. Two conversations that are a pair of answers are packed as one,
// so that a sample has both; a pair that is longer than a sample is skipped. With virtual tokens in front of every
// conversation, the first one's are outside the T tokens (Batch::behind), the others have places between conversations.
//
// Conversations are shuffled before they are packed, and samples are shuffled in each epoch, all by one MT19937 (NumPy's
// rules), so that sample k of a run does not depend on the length of the run.
#pragma once
#include <algorithm>
#include <cstdint>
#include <map>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "../base/check.h"
#include "../base/text.h"
#include "dataset.h"
#include "numpy_random.h"

class Packing {
public:
    // Packs the documents [begin, end) of a dataset with a mask.
    Packing(const TokenDataset& data, int64_t begin, int64_t end, int T, int virtual_tokens, uint32_t seed)
        : T_(T), before_(virtual_tokens), random_(seed) {
        if (end > INT32_MAX) fail("%s: %lld conversations are too many", data.name().c_str(), (long long)end);
        const auto together = (int32_t)data.documents_together();
        pairs_ = data.has_pairs();
        std::vector<int32_t> shuffled((size_t)((end - begin) / together));
        for (size_t i = 0; i < shuffled.size(); i++) shuffled[i] = (int32_t)begin + together * (int32_t)i;
        random_.shuffle(shuffled.data(), (int64_t)shuffled.size());
        std::vector<PackedDocument> found;
        for (const int32_t document : shuffled) {
            const int length = data.length(document), n = std::min(length, T + 1);
            const int64_t both = pairs_ ? (int64_t)length - 1 + data.length(document + 1) - 1 : n - 1;
            longest_ = std::max(longest_, pairs_ ? both : (int64_t)length - 1);
            if (!has_answer(data, document, n) || (pairs_ && !has_answer(data, document + 1, data.length(document + 1))) ||
                both > T) {
                left_out_++;
                continue;
            }
            cut_ += length > n;
            found.push_back({document, (int)both, n - 1});
        }
        std::stable_sort(found.begin(), found.end(),
                         [](const PackedDocument& a, const PackedDocument& b) { return a.places > b.places; });
        pack(found);
        count(data);
    }

    // Samples in an epoch, and their contents.
    int64_t n_samples() const { return (int64_t)rows_.size(); }
    int64_t longest() const { return longest_; }  // places of the longest conversation or pair, untruncated
    int64_t in_loss_of_epoch() const { return std::accumulate(in_loss_.begin(), in_loss_.end(), (int64_t)0); }
    std::string text() const {
        const double full = 100.0 * (double)places_ / (double)std::max<int64_t>(1, n_samples() * (T_ + before_));
        const auto n = (int64_t)pieces_.size();
        const std::string what = pairs_ ? counted(n, "pair of answers", "pairs of answers") : counted(n, "conversation");
        std::string text = format("%s in %s, %.1f%% full; %s of answers", what.c_str(), counted(n_samples(), "sample").c_str(),
                                  full, counted(in_loss_of_epoch(), "token").c_str());
        if (cut_)
            text += format("; %s cut at --seq-length %d, all fit in %lld",
                           counted(cut_, "conversation was", "conversations were").c_str(), T_, (long long)longest_);
        if (left_out_ && pairs_)
            text += format("; %s dropped, longer than --seq-length %d including their prompts; all fit in %lld",
                           counted(left_out_, "pair was", "pairs were").c_str(), T_, (long long)longest_);
        else if (left_out_)
            text += format("; %s dropped, without an answer in the first %d tokens",
                           counted(left_out_, "conversation was", "conversations were").c_str(), T_ + 1);
        return text;
    }

    // Determines the order of n samples (0: one epoch).
    void order(int64_t n) {
        const int64_t before = n_ordered() / n_samples(), epochs = n == 0 ? 1 : (n + n_samples() - 1) / n_samples();
        if (epochs <= before) return;
        order_.resize((size_t)(epochs * n_samples()));
        for (int64_t e = before; e < epochs; e++) {
            uint32_t* epoch = order_.data() + e * n_samples();
            std::iota(epoch, epoch + n_samples(), 0u);
            random_.shuffle(epoch, n_samples());
        }
    }
    int64_t n_ordered() const { return (int64_t)order_.size(); }
    int64_t in_loss(int64_t sample) const { return in_loss_[order_[(size_t)sample]]; }
    int64_t pieces(int64_t sample) const { return rows_[order_[(size_t)sample]].second; }  // conversations, or pairs of them

    // Calls each(document, first place in the sample, number of places) for the conversations of a sample; returns the total
    // number of places.
    template <class F>
    int each_conversation(int64_t sample, F each) const {
        int place = 0;
        const auto [first, n] = rows_[order_[(size_t)sample]];
        for (uint32_t i = first; i < first + n; i++) {
            each_document(pieces_[i], [&](int64_t document, int from, int places) { each(document, place + from, places); });
            place += pieces_[i].places + before_;
        }
        return place - before_;
    }

private:
    struct PackedDocument {
        int32_t document, places;
        int32_t first;  // places of the first document; a pair's second one follows
    };
    template <class F>
    static void each_document(const PackedDocument& piece, F each) {
        each((int64_t)piece.document, 0, (int)piece.first);
        if (piece.first < piece.places) each((int64_t)piece.document + 1, (int)piece.first, (int)(piece.places - piece.first));
    }
    // True if one of the first n tokens of a document is a target.
    static bool has_answer(const TokenDataset& data, int64_t document, int n) {
        return std::count(data.loss_mask(document) + std::min(n, 1), data.loss_mask(document) + n, 1) > 0;
    }

    void pack(const std::vector<PackedDocument>& found) {
        std::vector<uint32_t> row_of;                    // of each piece
        std::map<int, std::vector<uint32_t>> with_room;  // rows by remaining places
        for (const PackedDocument& piece : found) {
            const int places = before_ + piece.places;
            const auto best = with_room.lower_bound(places);
            const bool fits = best != with_room.end();
            const int left = (fits ? best->first : before_ + T_) - places;
            uint32_t row = (uint32_t)rows_.size();
            if (fits) {
                row = best->second.back();
                best->second.pop_back();
                if (best->second.empty()) with_room.erase(best);
            } else rows_.emplace_back(0, 0);
            if (left > 0) with_room[left].push_back(row);
            row_of.push_back(row);
            rows_[row].second++;
        }
        uint32_t first = 0;
        for (auto& [begin, n] : rows_) {
            begin = first;
            first += std::exchange(n, 0);
        }
        pieces_.resize(found.size());
        for (size_t i = 0; i < found.size(); i++) {
            auto& [begin, n] = rows_[row_of[i]];
            pieces_[begin + n++] = found[i];
        }
    }
    void count(const TokenDataset& data) {
        for (const auto& [first, n] : rows_) {
            int64_t in_loss = 0;
            for (uint32_t i = first; i < first + n; i++) {
                each_document(pieces_[i], [&](int64_t document, int, int places) {
                    const char* mask = data.loss_mask(document);
                    in_loss += std::count(mask + 1, mask + places + 1, 1);
                });
                places_ += before_ + pieces_[i].places;
            }
            in_loss_.push_back((int32_t)in_loss);
        }
    }

    int T_, before_;  // virtual tokens before each piece
    bool pairs_ = false;
    NumpyRandom random_;
    std::vector<PackedDocument> pieces_;               // by row
    std::vector<std::pair<uint32_t, uint32_t>> rows_;  // the first piece of each sample, and their number
    std::vector<int32_t> in_loss_;                     // targets of each row
    std::vector<uint32_t> order_;                      // rows in the order of samples
    int64_t places_ = 0, cut_ = 0, left_out_ = 0, longest_ = 0;
};
