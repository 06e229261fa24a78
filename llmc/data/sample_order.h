// The order of one dataset's samples, exactly as in Megatron-Core's GPT dataset:
//
// Epochs    With n tokens per epoch and N samples needed, E = the least number of epochs with E n >= N T + 1.
// Documents E copies of the document indices, shuffled together. If the last epoch would give less than 80% of an epoch's
//           samples, it is shuffled separately: E-1 copies are shuffled, then one copy is shuffled and appended.
// Samples   Over the stream of documents in that order, sample s is tokens [s T, s T + T]: T inputs and the T tokens that
//           follow each. Samples cross the ends of documents. There are (E n - 1) / T of them, shuffled in the same way
//           (a separate last epoch's separately). The document in which sample s starts is found by binary search in
//           the prefix sum of lengths, kept for every 16th document, which replaces Megatron's table with a row per sample.
//           With reshuffle_each_epoch, which Megatron lacks, documents and samples of every epoch are shuffled separately,
//           one epoch after another: each text is seen once before any is seen again, and a longer run has the order of a
//           shorter one. For a single epoch the order is Megatron's.
// Random    One MT19937 with NumPy's RandomState rules: documents first, then samples.
// Memory    4 bytes per sample and 4.5 per document and epoch, in memory that the ranks of a node share and one of them fills
//           (parallel/memory_of_node.h): shuffling reaches all of it in random order, about 30 ns each.
#pragma once
#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "../base/check.h"
#include "../base/text.h"
#include "../cpu/node_memory.h"
#include "dataset.h"
#include "numpy_random.h"
#include "split.h"

// The number of epochs. With the seed and the data, it determines the order of samples.
struct Epochs {
    int64_t n = 1;
    bool last_apart = false;  // the last epoch is shuffled separately
    bool operator==(const Epochs& e) const { return n == e.n && last_apart == e.last_apart; }
    std::string text() const {
        return format("%lld epoch%s", (long long)n, last_apart ? "s, the last apart" : n > 1 ? "s" : "");
    }
};

// Epochs over `tokens` tokens that give n_wanted samples of T+1 (0: one epoch).
inline Epochs epochs_for(int64_t tokens, int T, int64_t n_wanted, const std::string& name) {
    if (n_wanted > (INT64_MAX - tokens) / T) fail("%s: %lld samples are too many", name.c_str(), (long long)n_wanted);
    Epochs e;
    if (n_wanted > 0) e.n = (n_wanted * T + tokens) / tokens;
    const int64_t before_last = ((e.n - 1) * tokens - 1) / T, per_epoch = (tokens - 1) / T;
    e.last_apart = e.n > 1 && n_wanted - before_last < (int64_t)(0.80 * (double)per_epoch);
    return e;
}

class SampleOrder {
public:
    // Samples of T+1 tokens over `part`, at least n_wanted of them (0: one epoch). each_epoch: shuffle each epoch separately.
    SampleOrder(const TokenDataset& data, const DocumentRange& part, int T, int64_t n_wanted, uint32_t seed,
                bool each_epoch = false, const NodeMemory& node = NodeMemory())
        : part_(part), T_(T), tokens_per_epoch_(part.tokens(data)) {
        const int64_t begin = part.begin, end = part.end;
        CHECK(tokens_per_epoch_ > T, "%lld tokens for samples of %d", (long long)tokens_per_epoch_, T + 1);
        if (end > INT32_MAX) fail("%s: %lld documents are too many", data.name().c_str(), (long long)end);
        const Epochs epochs = epochs_for(tokens_per_epoch_, T, n_wanted, data.name());
        n_epochs_ = epochs.n;
        n_samples_ = (n_epochs_ * tokens_per_epoch_ - 1) / T;
        if (n_samples_ > UINT32_MAX)
            fail("%s: %lld samples were requested; the maximum is %u", data.name().c_str(), (long long)n_samples_, UINT32_MAX);

        n_entries_ = (end - begin) * n_epochs_;
        const auto n_starts = (size_t)(n_entries_ / starts_every + 1);
        const size_t starts_bytes = n_starts * sizeof *starts_, samples_bytes = (size_t)n_samples_ * sizeof *samples_;
        memory_ = node.filled(starts_bytes + samples_bytes + (size_t)n_entries_ * sizeof *documents_,
                              format("%s: the order of %s samples", data.name().c_str(), with_commas(n_samples_).c_str()),
                              [&](char* memory, const std::function<void()>& tick) {
                                  point_into(memory, starts_bytes, samples_bytes);
                                  fill(data, epochs.last_apart, seed, each_epoch, tick);
                              });
        point_into(const_cast<char*>(memory_.get()), starts_bytes, samples_bytes);
    }

    int64_t n_samples() const { return n_samples_; }
    int64_t n_epochs() const { return n_epochs_; }
    int64_t tokens_per_epoch() const { return tokens_per_epoch_; }

    // A position in the stream: entry e of the document order, and an offset into the part of that document in use.
    struct StreamPosition {
        int64_t entry, token;
    };
    StreamPosition place_of(const TokenDataset& data, int64_t stream_token) const {
        const int64_t *starts = starts_, *end = starts + n_entries_ / starts_every + 1;
        const int64_t block = std::upper_bound(starts, end, stream_token) - starts - 1;
        StreamPosition place = {block * starts_every, stream_token - starts_[block]};
        for (; place.entry < n_entries_; place.entry++) {
            const int64_t length = part_.length(data, documents_[place.entry]);
            if (place.token < length) break;
            place.token -= length;
        }
        return place;
    }
    int document(int64_t entry) const { return documents_[entry]; }
    int64_t shuffled(int64_t i) const { return samples_[i]; }

    // The T+1 tokens of sample i.
    void read(const TokenDataset& data, int64_t i, int* out) const {
        auto [entry, token] = place_of(data, shuffled(i) * T_);
        for (int64_t left = T_ + 1; left > 0; entry++, token = 0) {
            const int d = documents_[entry];
            const int64_t n = std::min(left, part_.length(data, d) - token);
            data.read(d, part_.first_token(d) + token, n, out);
            out += n;
            left -= n;
        }
    }

private:
    static constexpr int64_t starts_every = 16;

    void point_into(char* memory, size_t starts_bytes, size_t samples_bytes) {
        starts_ = (int64_t*)memory;
        samples_ = (uint32_t*)(memory + starts_bytes);
        documents_ = (int32_t*)(memory + starts_bytes + samples_bytes);
    }
    void fill(const TokenDataset& data, bool last_apart, uint32_t seed, bool each_epoch, const std::function<void()>& tick) {
        constexpr int64_t ticks = 1 << 20;
        const int64_t n_documents = part_.end - part_.begin;
        for (int64_t e = 0; e < n_entries_; e++) {
            documents_[e] = (int32_t)(part_.begin + e % n_documents);
            if (e % ticks == 0) tick();
        }
        for (int64_t i = 0; i < n_samples_; i++) {
            samples_[i] = (uint32_t)i;
            if (i % ticks == 0) tick();
        }
        NumpyRandom random(seed);
        // Shuffles epochs [first, last).
        const auto shuffle_documents = [&](int64_t first, int64_t last) {
            random.shuffle(documents_ + first * n_documents, (last - first) * n_documents, tick);
        };
        const auto shuffle_samples = [&](int64_t first, int64_t last) {
            const auto before = [&](int64_t epoch) { return std::max<int64_t>(0, epoch * tokens_per_epoch_ - 1) / T_; };
            random.shuffle(samples_ + before(first), before(last) - before(first), tick);
        };
        for (int64_t e = 0; each_epoch && e < n_epochs_; e++) {
            shuffle_documents(e, e + 1);
            shuffle_samples(e, e + 1);
        }
        if (!each_epoch) {
            const int64_t together = last_apart ? n_epochs_ - 1 : n_epochs_;
            shuffle_documents(0, together);
            shuffle_documents(together, n_epochs_);
            shuffle_samples(0, together);
            shuffle_samples(together, n_epochs_);
        }
        int64_t start = 0;
        for (int64_t e = 0; e <= n_entries_; e++) {
            if (e % ticks == 0) tick();
            if (e % starts_every == 0) starts_[e / starts_every] = start;
            if (e < n_entries_) start += part_.length(data, documents_[e]);
        }
    }
    DocumentRange part_;
    int64_t T_, tokens_per_epoch_, n_epochs_ = 1, n_samples_ = 0;
    int64_t n_entries_ = 0;  // documents of all epochs
    std::shared_ptr<const char> memory_;
    int64_t* starts_ = nullptr;     // starts_[i]: tokens of the stream before entry i * starts_every
    uint32_t* samples_ = nullptr;   // Megatron's shuffle_index
    int32_t* documents_ = nullptr;  // Megatron's document_index
};
