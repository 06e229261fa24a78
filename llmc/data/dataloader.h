// Makes batches from token datasets, in exactly the order of Megatron-Core's GPT dataset, blend and sequential sampler, so that
// runs here and there with the same data, sizes and seed see the same samples. Nothing is cached on disk: the indices are built
// in memory at the start, and sample k is a function of the options and k alone, so a resume needs only a number.
//
// Split     "969, 30, 1" cuts the documents, in order, at round(share * documents) into training, validation and test. Where
//           that leaves training or validation less than one sample, the tokens are cut in these shares instead (Megatron
//           fails there), and where they do not suffice for both, training gets all of them.
// Epochs    With n tokens per epoch and N samples wanted, E = the least number of epochs with E n >= N T + 1.
// Documents E copies of the document indices, shuffled together. If the last epoch would give less than 80% of an epoch's
//           samples, it is shuffled separately: E-1 copies are shuffled, then one copy is shuffled and appended.
// Samples   Over the stream of documents in that order, sample s is tokens [s T, s T + T]: T inputs and the T tokens that
//           follow each. Samples cross the ends of documents. There are (E n - 1) / T of them, in an order shuffled likewise
//           (those of a separate last epoch separately). The document in which sample s begins is found by binary search in
//           the prefix sum of lengths, which replaces Megatron's table with a row per sample.
//           With reshuffle_each_epoch, which Megatron has not, documents and samples of every epoch are shuffled separately, one
//           epoch after another: each text is seen once before any is seen again, and a longer run has the order of a shorter
//           one. Of a single epoch the order is Megatron's.
// Random    One MT19937 with NumPy's RandomState rules: documents first, then samples.
// Blend     Weights w are normalised; dataset j is asked for ceil(ceil(N w_j) 1.005) samples; sample i of the blend is the next
//           one of the dataset with the largest w_j max(i, 1) - (samples taken from j); ties go to the first.
//           Without weights, a dataset's weight is its number of samples in one epoch; no dataset is repeated as long as all
//           together suffice.
// Conversations (data with a mask) are packed into samples instead, whole ones, and always masked as documents: packing.h. The
//           split is by conversations; training and validation get at least one each where there are two. Of pairs of answers
//           (model/preference.h) a sample has whole pairs.
// Masks     reset_position_ids: positions restart at 0 after each end-of-document token (EOD). reset_attention_mask: a row
//           sees no key before its document. eod_mask_loss: no loss where the input is EOD, which would train guessing how the
//           next document begins. The target EOD is always trained.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <numeric>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "../base/check.h"
#include "../base/crc32c.h"
#include "../base/terminal.h"
#include "../model/preference.h"
#include "dataset.h"
#include "numpy_random.h"
#include "packing.h"

struct Batch {
    std::vector<int> tokens;        // (B, T)
    std::vector<int> targets;       // (B, T) the next token; -1: masked
    std::vector<int> positions;     // (B, T)
    std::vector<int> doc_start;     // (B, T) the first key that a row sees; empty if attention is not reset at documents
    std::vector<AnswerPair> pairs;  // in their rows, where answers are compared
    int B = 0, T = 0;
    bool begins = true;  // sequences begin here: virtual tokens, where a model has them, come before

    // The same sequences behind n virtual tokens each: places without a token (-1) and without a target.
    Batch behind(int n) const {
        CHECK(doc_start.empty(), "documents that are masked do not see virtual tokens");
        const auto longer = [&](const std::vector<int>& x) {
            std::vector<int> all((size_t)B * (n + T), -1);
            for (int b = 0; b < B; b++) std::copy_n(x.begin() + (int64_t)b * T, T, all.begin() + (int64_t)b * (n + T) + n);
            return all;
        };
        Batch all;
        all.B = B;
        all.T = n + T;
        all.tokens = longer(tokens);
        all.positions = longer(positions);
        if (!targets.empty()) all.targets = longer(targets);
        for (size_t i = 0; i < all.positions.size(); i++) {
            const int place = (int)(i % (size_t)all.T);
            all.positions[i] = place < n ? place : all.positions[i] + n;
        }
        return all;
    }

    // (B, T) the first key that a row sees where a query sees no more than `window` keys, itself included.
    std::vector<int> first_keys(int window) const {
        std::vector<int> first = doc_start;
        first.resize(tokens.size());
        for (size_t i = 0; i < first.size(); i++) first[i] = std::max(first[i], (int)(i % (size_t)T) - window + 1);
        return first;
    }
};

// ---- splits ----------------------------------------------------------------------------------------------------------------
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

// The sum in the order in which numpy.sum adds, so that normalised weights have the same bits as Megatron's.
inline double numpy_sum(const double* x, size_t n) {
    if (n < 8) return std::accumulate(x, x + n, 0.0);
    if (n > 128) {
        const size_t half = n / 2 - n / 2 % 8;
        return numpy_sum(x, half) + numpy_sum(x + half, n - half);
    }
    double r[8];
    std::copy_n(x, 8, r);
    size_t i = 8;
    for (; i + 8 <= n; i += 8)
        for (int k = 0; k < 8; k++) r[k] += x[i + k];
    const double sum = ((r[0] + r[1]) + (r[2] + r[3])) + ((r[4] + r[5]) + (r[6] + r[7]));
    return std::accumulate(x + i, x + n, sum);
}

inline std::vector<double> normalized(std::vector<double> weights) {
    const double sum = numpy_sum(weights.data(), weights.size());
    for (double& w : weights) w /= sum;
    return weights;
}

// The number that `s` spells as a whole; NaN if it does not.
inline double parse_number(const std::string& s) {
    char* end = nullptr;
    const double x = s.empty() ? NAN : strtod(s.c_str(), &end);
    return !s.empty() && *end == '\0' ? x : NAN;
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
    // Python rounds halves to even, as nearbyint does.
    return {(int64_t)std::nearbyint(border[i] * (double)n), (int64_t)std::nearbyint(border[i + 1] * (double)n)};
}

inline bool has_share(const std::string& split, DataSplit part) { return split_range(split, part, 1 << 30).second > 0; }

// Documents [begin, end) of a dataset. The first may lack tokens at its start, the last at its end.
struct DocumentRange {
    int64_t begin = 0, end = 0;
    int64_t skipped = 0, cut = 0;  // tokens left out of the first and of the last document

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

// The documents for training, validation and test in a dataset, and a note about how they were cut.
struct SplitParts {
    DocumentRange parts[3];
    std::string note;
};

// Of conversations or pairs of them, none of which is cut.
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
    const int64_t learned = trains ? std::clamp<int64_t>(split_range(split, DataSplit::train, n).second, 1, n - validates) : 0;
    if (trains && validates && n == 1) {
        s.parts[0] = range(0, 1);
        s.parts[1] = {};
        s.note = "its one conversation is for training";
    } else {
        s.parts[0] = learned > 0 ? range(0, learned) : DocumentRange();
        s.parts[1] =
            validates ? range(learned, std::max(learned + 1, split_range(split, DataSplit::valid, n).second)) : DocumentRange();
        s.note = "at least one conversation for training and for validation, which their shares would not give";
    }
    s.parts[2] = {};
    return s;
}

// For samples of T+1 tokens. validates: validation data is wanted, if the split gives it a share.
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
        if (all >= 4) s.note += format(", which --seq-length %lld would leave some", (long long)all / 2 - 1);
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

// ---- the order of one dataset's samples ------------------------------------------------------------------------------------
// How often a dataset is read. With the seed and the data, this determines the order of its samples.
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
    // Samples of T+1 tokens over `part`, at least n_wanted of them (0: one epoch). each_epoch: every epoch is shuffled by itself.
    SampleOrder(const TokenDataset& data, const DocumentRange& part, int T, int64_t n_wanted, uint32_t seed,
                bool each_epoch = false)
        : part_(part), T_(T), tokens_per_epoch_(part.tokens(data)) {
        const int64_t begin = part.begin, end = part.end;
        CHECK(tokens_per_epoch_ > T, "%lld tokens for samples of %d", (long long)tokens_per_epoch_, T + 1);
        if (end > INT32_MAX) fail("%s: %lld documents are too many", data.name().c_str(), (long long)end);
        const Epochs epochs = epochs_for(tokens_per_epoch_, T, n_wanted, data.name());
        n_epochs_ = epochs.n;
        n_samples_ = (n_epochs_ * tokens_per_epoch_ - 1) / T;
        if (n_samples_ > UINT32_MAX)
            fail("%s: %lld samples are asked for; at most %u can be", data.name().c_str(), (long long)n_samples_, UINT32_MAX);

        documents_.reserve((size_t)((end - begin) * n_epochs_));
        for (int64_t e = 0; e < n_epochs_; e++)
            for (int64_t d = begin; d < end; d++) documents_.push_back((int32_t)d);
        samples_.resize((size_t)n_samples_);
        std::iota(samples_.begin(), samples_.end(), 0u);
        NumpyRandom random(seed);
        for (int64_t e = 0; each_epoch && e < n_epochs_; e++) {
            shuffle_documents(e, e + 1, random);
            shuffle_samples(e, e + 1, random);
        }
        if (!each_epoch) {
            const int64_t together = epochs.last_apart ? n_epochs_ - 1 : n_epochs_;
            shuffle_documents(0, together, random);
            shuffle_documents(together, n_epochs_, random);
            shuffle_samples(0, together, random);
            shuffle_samples(together, n_epochs_, random);
        }
        sum_lengths(data);
    }

    int64_t n_samples() const { return n_samples_; }
    int64_t n_epochs() const { return n_epochs_; }
    int64_t tokens_per_epoch() const { return tokens_per_epoch_; }

    // A position in the stream: entry e of the document order, and an offset into the part of that document that is read.
    struct Place {
        int64_t entry, token;
    };
    Place place_of(int64_t stream_token) const {
        const int64_t entry = std::upper_bound(starts_.begin(), starts_.end(), stream_token) - starts_.begin() - 1;
        return {entry, stream_token - starts_[entry]};
    }
    int document(int64_t entry) const { return documents_[entry]; }
    int64_t shuffled(int64_t i) const { return samples_[i]; }

    // The T+1 tokens of sample i.
    void read(const TokenDataset& data, int64_t i, int* out) const {
        auto [entry, token] = place_of(shuffled(i) * T_);
        for (int64_t left = T_ + 1; left > 0; entry++, token = 0) {
            const int d = documents_[entry];
            const int64_t n = std::min(left, part_.length(data, d) - token);
            data.read(d, part_.first_token(d) + token, n, out);
            out += n;
            left -= n;
        }
    }

private:
    // Those of epochs [first, last).
    void shuffle_documents(int64_t first, int64_t last, NumpyRandom& random) {
        const int64_t n = part_.end - part_.begin;
        random.shuffle(documents_.data() + first * n, (last - first) * n);
    }
    void shuffle_samples(int64_t first, int64_t last, NumpyRandom& random) {
        const auto samples_before = [&](int64_t epoch) { return std::max<int64_t>(0, epoch * tokens_per_epoch_ - 1) / T_; };
        random.shuffle(samples_.data() + samples_before(first), samples_before(last) - samples_before(first));
    }
    void sum_lengths(const TokenDataset& data) {
        starts_.resize(documents_.size() + 1);
        for (size_t e = 0; e < documents_.size(); e++) starts_[e + 1] = starts_[e] + part_.length(data, documents_[e]);
    }

    DocumentRange part_;
    int64_t T_, tokens_per_epoch_, n_epochs_ = 1, n_samples_ = 0;
    std::vector<int32_t> documents_;  // Megatron's document_index
    std::vector<int64_t> starts_;     // starts_[e]: tokens of the stream before documents_[e]; one more at the end
    std::vector<uint32_t> samples_;   // Megatron's shuffle_index
};

// ---- blending --------------------------------------------------------------------------------------------------------------
// The value of --data-path: PATH ..., or WEIGHT PATH WEIGHT PATH ...
struct Blend {
    std::vector<std::string> paths;
    std::vector<double> weights;  // empty: by size
};

inline Blend parse_data_path(const std::vector<std::string>& words) {
    Blend blend;
    std::vector<bool> is_number;
    for (const std::string& word : words) is_number.push_back(!std::isnan(parse_number(word)));
    bool pairs = !words.empty() && words.size() % 2 == 0;
    for (size_t i = 0; i < words.size(); i += 2) pairs = pairs && is_number[i];
    for (size_t i = 0; i < words.size(); i++) {
        if (pairs && i % 2 == 0) {
            const double weight = parse_number(words[i]);
            if (!(weight > 0) || !std::isfinite(weight))
                fail_usage("--data-path: the weight %s of %s must be above 0; HINT: leave out data that is not wanted",
                           words[i].c_str(), words[i + 1].c_str());
            blend.weights.push_back(weight);
            continue;
        }
        std::error_code ignored;
        const bool exists = std::filesystem::exists(words[i], ignored) || std::filesystem::exists(words[i] + ".idx", ignored);
        if (!pairs && is_number[i] && !exists)
            fail_usage(
                "--data-path: '%s' looks like a weight; give a weight before every path (WEIGHT PATH WEIGHT PATH ...) or "
                "before none",
                words[i].c_str());
        blend.paths.push_back(words[i]);
    }
    return blend;
}

// Sample i of the blend is sample `index` of dataset `dataset`; dataset j has available[j] samples. Greedy: each sample comes
// from the dataset that lags most behind its share.
struct BlendEntry {
    uint32_t dataset, index;
};

inline std::vector<BlendEntry> blend_samples(const std::vector<double>& weights, const std::vector<int64_t>& available,
                                             int64_t n) {
    std::vector<BlendEntry> blend((size_t)n);
    std::vector<int64_t> taken(weights.size(), 0);
    for (int64_t i = 0; i < n; i++) {
        const double i_or_1 = (double)std::max<int64_t>(i, 1);
        size_t best = 0;
        double most = -INFINITY;
        for (size_t j = 0; j < weights.size(); j++) {
            // Rounded before the subtraction, as Megatron does (volatile: no fused multiply-add): lags often differ only by
            // this rounding.
            const volatile double due = weights[j] * i_or_1;
            const double lag = due - (double)taken[j];
            if (lag > most && taken[j] < available[j]) {
                most = lag;
                best = j;
            }
        }
        blend[i] = {(uint32_t)best, (uint32_t)taken[best]++};
    }
    return blend;
}

// ---- the loader ------------------------------------------------------------------------------------------------------------
struct DataOptions {
    Blend blend;
    std::string split = "969, 30, 1";
    DataSplit part = DataSplit::train;  // whole: all documents, regardless of split
    bool validates = true;              // the run needs validation data
    int T = 0;
    uint32_t seed = 1234;
    int64_t n_samples = 0;  // how many will be read; 0: one pass over the data, each sample once, whatever the weights
    bool reshuffle_each_epoch = false;
    bool reset_position_ids = false, reset_attention_mask = false, eod_mask_loss = false;
    bool pairs = false;           // answers are compared: the data must hold pairs of them, and must not otherwise
    int eod = -1;                 // needed by the three above
    int vocab_size = 0;           // larger tokens are refused when read; 0: not checked
    int virtual_tokens = 0;       // that will stand before each sample, for all of it
    TokenizerIdentity tokenizer;  // the run's, or else that of the first dataset where it is known
};

// One row of the start-up table.
struct DataSummary {
    std::string name;
    std::string note;           // how it was split, if that is noteworthy
    double share;               // fraction of all samples
    int64_t documents, tokens;  // in this part of the split
    int64_t samples;            // to be read
    double epochs;              // passes over the tokens
    std::string packing;        // of conversations: how they were packed
    int64_t learned = 0;        // and how many of an epoch's tokens are targets
};

class DataLoader {
public:
    explicit DataLoader(const DataOptions& options) : DataLoader(options, open_all(options.blend.paths)) {}
    // Reads datasets that are already open, instead of the paths in options.
    DataLoader(const DataOptions& options, std::vector<TokenDataset> data) : o_(options) {
        CHECK(o_.T > 0 && o_.n_samples >= 0, "T %d, %lld samples", o_.T, (long long)o_.n_samples);
        if (o_.eod < 0 && (o_.reset_position_ids || o_.reset_attention_mask || o_.eod_mask_loss))
            fail_usage(
                "--reset-position-ids, --reset-attention-mask and --eod-mask-loss need to know the end-of-document token; "
                "HINT: give --tokenizer");
        if (data.empty()) fail_usage("no data is given; HINT: --data-path PREFIX, as `train_gpt prepare` made it");
        CHECK(o_.blend.weights.empty() || o_.blend.weights.size() == data.size(), "weights and paths");
        for (const TokenDataset& d : data) check_tokenizer(d);
        for (TokenDataset& d : data) add(std::move(d));
        take_split();
        if (o_.virtual_tokens > 0 && has_conversations())
            fail(
                "conversations, of which a sample holds several, do not see the virtual tokens before it; HINT: --lora-rank 16 "
                "adapts a model to them");
        if (sources_.empty()) return;  // no validation
        for (Source& s : sources_) {
            s.first_pair = n_pairs_;
            if (o_.pairs) n_pairs_ += s.data.n_documents() / 2;
        }
        order(o_.n_samples);
    }

    // Orders n samples (0: one epoch), more or fewer than before, where the order does not depend on their number (order_problem).
    void order(int64_t n) {
        o_.n_samples = n;
        const std::vector<int64_t> wanted = samples_wanted(n);
        for (size_t j = 0; j < sources_.size(); j++) {
            Source& s = sources_[j];
            if (s.packing) s.packing->order(wanted[j]);
            else s.order.emplace(s.data, s.part, o_.T, wanted[j], o_.seed, o_.reshuffle_each_epoch);
        }
        if (single()) n_samples_ = n > 0 ? n : sources_[0].n_ordered();
        else plan_blend();
    }

    int64_t n_samples() const { return n_samples_; }  // 0: no data has enough tokens for validation
    int64_t samples_of_one_pass() const {
        const std::vector<double> one_epoch = samples_of_one_epoch();
        return (int64_t)std::accumulate(one_epoch.begin(), one_epoch.end(), 0.0);
    }
    const TokenizerIdentity& tokenizer() const { return o_.tokenizer; }
    // Whether the split was by tokens, unlike Megatron's, because a split by documents was not possible.
    bool split_by_tokens() const {
        return std::any_of(sources_.begin(), sources_.end(), [](const Source& s) { return !s.note.empty(); });
    }
    int T() const { return o_.T; }
    // Pairs of answers in all data, whichever part of the split they are in.
    int64_t n_pairs() const { return n_pairs_; }
    // Log-probabilities of their chosen and rejected answers by the reference, which batches then have; NaN: not known.
    void set_reference(std::vector<double> log_p /*(n_pairs, 2)*/) {
        CHECK(log_p.size() == 2 * (size_t)n_pairs_, "%zu log-probabilities of %lld pairs", log_p.size(), (long long)n_pairs_);
        reference_ = std::move(log_p);
    }
    uint32_t checksum_of_pairs() const {
        uint32_t sum = 0;
        std::vector<int> text;
        for (const Source& s : sources_)
            for (int64_t d = 0; d < s.data.n_documents(); d++) {
                const auto n = (size_t)s.data.length(d);
                text.resize(n);
                s.data.read(d, 0, (int64_t)n, text.data());
                sum = crc32c(s.data.learned(d), n, crc32c(text.data(), n * sizeof(int), sum));
            }
        return sum;
    }
    // That of the first conversations, as far as known.
    std::string chat_template() const {
        for (const Source& s : sources_)
            if (!s.data.chat_template().empty()) return s.data.chat_template();
        return "";
    }
    bool has_conversations() const {
        return std::any_of(sources_.begin(), sources_.end(), [](const Source& s) { return s.packing.has_value(); });
    }

    // The name of each dataset in logs: the last component of its path where these differ, else the path.
    std::vector<std::string> set_names() const {
        std::vector<std::string> paths, names;
        for (const Source& s : sources_) {
            paths.push_back(s.data.name());
            names.push_back(std::filesystem::path(s.data.name()).filename().string());
        }
        std::vector<std::string> sorted = names;
        std::sort(sorted.begin(), sorted.end());
        return std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end() ? names : paths;
    }
    // The samples [first, first + n), grouped by dataset, in their order.
    std::vector<std::vector<int64_t>> samples_by_set(int64_t first, int64_t n) const {
        std::vector<std::vector<int64_t>> samples(sources_.size());
        for (int64_t i = first; i < first + n; i++) samples[locate(i).dataset].push_back(i);
        return samples;
    }

    // Reads samples [first, first + B). Thread-safe.
    void fetch(int64_t first, int B, Batch& out) const {
        std::vector<int64_t> samples((size_t)B);
        std::iota(samples.begin(), samples.end(), first);
        gather(samples.data(), B, out);
    }
    void gather(const int64_t* samples, int B, Batch& out) const {
        const int T = o_.T;
        out.B = B;
        out.T = T;
        out.pairs.clear();
        for (std::vector<int>* x : {&out.tokens, &out.targets, &out.positions}) x->resize((size_t)B * T);
        out.doc_start.resize(o_.reset_attention_mask || has_conversations() ? (size_t)B * T : 0);
        std::vector<int> text(T + 1);
        for (int b = 0; b < B; b++) {
            const BlendEntry e = locate(samples[b]);
            const Source& source = sources_[e.dataset];
            const size_t row = (size_t)b * T;
            if (source.packing) {
                read_conversations(source, e.index, out, row);
                continue;
            }
            source.order->read(source.data, e.index, text.data());
            check_tokens(source, e.index, text);
            std::copy_n(text.begin(), T, out.tokens.begin() + row);
            std::copy_n(text.begin() + 1, T, out.targets.begin() + row);
            mask(out, row);
        }
    }

    // Unmasked targets in the samples [first, first + n).
    int64_t unmasked(int64_t first, int64_t n) const {
        int64_t count = n * o_.T;
        if (!o_.eod_mask_loss && !has_conversations()) return count;
        std::vector<int> text(o_.T + 1);
        for (int64_t i = first; i < first + n; i++) {
            const BlendEntry e = locate(i);
            const Source& source = sources_[e.dataset];
            if (source.packing) count -= o_.T - source.packing->learned(e.index);
            if (source.packing || !o_.eod_mask_loss) continue;
            source.order->read(source.data, e.index, text.data());
            count -= std::count(text.begin(), text.end() - 1, o_.eod);
        }
        return count;
    }

    // What the loss of the samples [first, first + n) is a mean of: pairs of answers, if they are compared, else targets.
    int64_t terms(int64_t first, int64_t n) const {
        if (!o_.pairs) return unmasked(first, n);
        int64_t pairs = 0;
        for (int64_t i = first; i < first + n; i++) {
            const BlendEntry e = locate(i);
            pairs += sources_[e.dataset].packing->pieces(e.index);
        }
        return pairs;
    }

    // Why the order of the samples differs from that of a run planned for n samples; empty if it does not. Megatron's order
    // depends on how often each dataset is read over the whole run, so extending a run may change it.
    std::string order_problem(int64_t n) const {
        const std::vector<Epochs> before = epochs(n), now = epochs(o_.n_samples);
        for (size_t j = 0; j < sources_.size(); j++) {
            if (before[j] == now[j]) continue;
            int64_t kept = n, lost = o_.n_samples;  // the order is kept up (or down) to a number between them
            while (std::abs(lost - kept) > 1) {
                const int64_t middle = kept + (lost - kept) / 2;
                (epochs(middle) == before ? kept : lost) = middle;
            }
            return format(
                "the order of the samples changes: %s is now read in %s for %lld samples in all, the checkpoint's %lld took "
                "%s; some that were trained on would come again, others never. HINT: with at %s %lld samples in all it is kept",
                sources_[j].data.name().c_str(), now[j].text().c_str(), (long long)o_.n_samples, (long long)n,
                before[j].text().c_str(), lost > kept ? "most" : "least", (long long)kept);
        }
        return "";
    }

    std::vector<DataSummary> summary() const {
        std::vector<int64_t> used(sources_.size(), 0);
        if (blend_.empty()) used[0] = n_samples_;
        for (const BlendEntry& e : blend_) used[e.dataset]++;
        std::vector<DataSummary> rows;
        for (size_t j = 0; j < sources_.size(); j++) {
            const Source& s = sources_[j];
            const double epochs =
                s.packing ? (double)used[j] / (double)s.packing->n_samples() : (double)used[j] * o_.T / (double)s.tokens;
            rows.push_back({s.data.name(), s.note, (double)used[j] / (double)n_samples_, s.part.end - s.part.begin, s.tokens,
                            used[j], epochs, s.packing ? s.packing->text() : "",
                            s.packing ? s.packing->learned_of_epoch() : 0});
        }
        return rows;
    }

private:
    struct Source {
        TokenDataset data;
        DocumentRange part{};
        int64_t tokens = 0;  // in this part of the split
        std::string note{};
        std::optional<SampleOrder> order{};  // of text
        std::optional<Packing> packing{};    // of conversations
        int64_t first_pair = 0;              // number of its first pair of answers

        int64_t n_ordered() const { return packing ? packing->n_ordered() : order->n_samples(); }
    };

    static std::vector<TokenDataset> open_all(const std::vector<std::string>& paths) {
        std::vector<TokenDataset> data;
        for (const std::string& path : paths) data.push_back(TokenDataset::open(path));
        return data;
    }

    void check_tokenizer(const TokenDataset& data) {
        const TokenizerIdentity& made = data.tokenizer();
        if (!o_.tokenizer.known()) o_.tokenizer = made;
        if (!made.known() || made.hash == o_.tokenizer.hash) return;
        fail(
            "%s was prepared with another tokenizer than this run's, so that its ids mean other texts:\n  the data's  %s\n"
            "  the run's   %s\nHINT: train_gpt prepare --tokenizer %s ... makes data for this run; a new model can be trained "
            "with the data's tokenizer instead. Where the ids are known to agree, removing the data's %s ends the comparison",
            data.name().c_str(), made.text().c_str(), o_.tokenizer.text().c_str(), shell_word(o_.tokenizer.path).c_str(),
            origin_ending);
    }

    // Adds a dataset; shards without weights are joined into one stream of tokens.
    void add(TokenDataset data) {
        if (data.has_pairs() && !o_.pairs)
            fail_usage("%s holds pairs of answers, which are compared, not imitated; HINT: train --model DIR --dpo-beta 0.1",
                       data.name().c_str());
        if (!data.has_pairs() && o_.pairs)
            fail_usage(
                "%s holds no pairs of answers, which --dpo-beta compares; HINT: train_gpt prepare --preference makes them",
                data.name().c_str());
        if (o_.blend.weights.empty() && !sources_.empty() && data.is_shards() && sources_.back().data.is_shards())
            sources_.back().data.append_shards(std::move(data));
        else sources_.push_back({std::move(data)});
    }

    // Selects this part of the split in every source. A source that gives no sample is refused; one with too few tokens for
    // training and validation is left out of validation.
    void take_split() {
        for (Source& s : sources_) {
            const char* name = s.data.name().c_str();
            const int64_t n = s.data.n_documents();
            if (s.data.n_tokens() == 0) fail("%s is empty: it holds no tokens", name);
            if (o_.part == DataSplit::whole) s.part = {0, n};
            else {
                const SplitParts split = s.data.has_mask() ? split_conversations(s.data, o_.split, o_.validates)
                                                           : split_data(s.data, o_.split, o_.T, o_.validates);
                s.part = split.parts[(int)o_.part];
                s.note = split.note;
            }
            s.tokens = s.part.tokens(s.data);
            if (s.part.empty() && !s.note.empty()) continue;
            if (s.part.empty())
                fail("%s has nothing for %s: --split \"%s\" gives that no share; HINT: another --split", name,
                     split_name(o_.part), o_.split.c_str());
            if (s.data.has_mask()) {
                s.packing.emplace(s.data, s.part.begin, s.part.end, o_.T, o_.seed);
                if (s.packing->n_samples() == 0 && o_.pairs)
                    fail(
                        "%s has no pair of answers for %s that is no longer than %d tokens; HINT: all fit in --seq-length %lld",
                        name, split_name(o_.part), o_.T, (long long)s.packing->longest());
                if (s.packing->n_samples() == 0)
                    fail("%s has no conversation%s with an answer in its first %d tokens; HINT: a longer --seq-length", name,
                         o_.part == DataSplit::whole ? "" : format(" for %s", split_name(o_.part)).c_str(), o_.T + 1);
                continue;
            }
            if (s.tokens <= o_.T)
                fail("%s has %s token%s, fewer than one sample of --seq-length %d and the token after it; HINT: %s", name,
                     with_commas(s.tokens).c_str(), s.tokens == 1 ? "" : "s", o_.T,
                     s.tokens < 2 ? "more text" : format("more text, or --seq-length %lld", (long long)s.tokens - 1).c_str());
        }
        for (size_t j = sources_.size(); j-- > 0;) {
            if (!sources_[j].part.empty()) continue;
            sources_.erase(sources_.begin() + (ptrdiff_t)j);
            if (!o_.blend.weights.empty()) o_.blend.weights.erase(o_.blend.weights.begin() + (ptrdiff_t)j);
        }
    }

    bool single() const { return sources_.size() == 1 && o_.blend.weights.empty(); }
    bool weighted(int64_t n) const { return !o_.blend.weights.empty() && n > 0; }
    std::vector<double> samples_of_one_epoch() const {
        std::vector<double> samples;
        for (const Source& s : sources_) {
            const int64_t whole = s.packing ? s.packing->n_samples() : (s.tokens - 1) / o_.T;
            samples.push_back((double)whole);
        }
        return samples;
    }
    // The sources' parts of n samples. Megatron normalises given weights twice; the second time can change the last bit.
    std::vector<double> shares(int64_t n) const { return normalized(weighted(n) ? o_.blend.weights : samples_of_one_epoch()); }

    // The number of samples to plan from each source, for n samples in all (0: one epoch).
    std::vector<int64_t> samples_wanted(int64_t n) const {
        if (single()) return {n};
        const std::vector<double> one_epoch = samples_of_one_epoch(), share = shares(n);
        const double all = std::accumulate(one_epoch.begin(), one_epoch.end(), 0.0);
        const bool once = n == 0 || (!weighted(n) && (double)n <= all);
        std::vector<int64_t> wanted;
        for (const double x : share) wanted.push_back(once ? 0 : (int64_t)std::ceil(std::ceil((double)n * x) * (1 + 0.005)));
        return wanted;
    }
    std::vector<Epochs> epochs(int64_t n) const {
        std::vector<Epochs> epochs;
        const std::vector<int64_t> wanted = samples_wanted(n);
        for (size_t j = 0; j < sources_.size(); j++)
            epochs.push_back(sources_[j].packing || o_.reshuffle_each_epoch
                                 ? Epochs()  // their order does not depend on how often they are read
                                 : epochs_for(sources_[j].tokens, o_.T, wanted[j], sources_[j].data.name()));
        return epochs;
    }

    void plan_blend() {
        const std::vector<double> share = shares(o_.n_samples);
        n_samples_ = o_.n_samples > 0 ? o_.n_samples : samples_of_one_pass();
        std::vector<int64_t> available;
        for (const Source& s : sources_) available.push_back(s.n_ordered());
        blend_ = blend_samples(weighted(o_.n_samples) ? normalized(share) : share, available, n_samples_);
    }

    // The dataset of a sample and the sample's index there.
    BlendEntry locate(int64_t sample) const {
        if (sample < 0 || sample >= n_samples_)
            fail(
                "sample %lld is asked for, the data is planned for %lld; HINT: the counters in training/state.json are damaged",
                (long long)sample, (long long)n_samples_);
        return blend_.empty() ? BlendEntry{0, (uint32_t)sample} : blend_[sample];
    }
    // The conversations of a sample, each from position 0, and behind them padding, which is no target.
    void read_conversations(const Source& source, int64_t sample, Batch& out, size_t row) const {
        std::vector<int> text;
        const auto fill = [&](int place, int places) {
            for (int t = place; t < place + places; t++) {
                out.positions[row + t] = t - place;
                out.doc_start[row + t] = place;
            }
        };
        const int used = source.packing->each_conversation(sample, [&](int64_t document, int place, int places) {
            text.resize((size_t)places + 1);
            source.data.read(document, 0, places + 1, text.data());
            check_tokens(source, document, 0, text);
            const char* learned = source.data.learned(document) + 1;
            fill(place, places);
            if (o_.pairs) add_answer(source, document, (int)row + place, places, out.pairs);
            for (int t = 0; t < places; t++) {
                out.tokens[row + place + t] = text[(size_t)t];
                out.targets[row + place + t] = learned[t] ? text[(size_t)t + 1] : -1;
            }
        });
        fill(used, o_.T - used);
        std::fill_n(out.tokens.begin() + (std::ptrdiff_t)(row + used), o_.T - used, 0);
        std::fill_n(out.targets.begin() + (std::ptrdiff_t)(row + used), o_.T - used, -1);
    }

    // Of a pair's two documents the first is the chosen answer with its prompt.
    void add_answer(const Source& source, int64_t document, int row, int rows, std::vector<AnswerPair>& pairs) const {
        const bool chosen = document % 2 == 0;
        if (chosen) pairs.push_back({source.first_pair + document / 2, {}, {}});
        AnswerPair& pair = pairs.back();
        Answer& answer = chosen ? pair.chosen : pair.rejected;
        const char* learned = source.data.learned(document) + 1;
        answer = {row, rows, (int)std::count(learned, learned + rows, 1), 0, 0};
        if (reference_.empty()) return;
        answer.reference = reference_[2 * (size_t)pair.number + (chosen ? 0 : 1)];
        if (std::isnan(answer.reference))
            fail(
                "of the answers in %s the reference's log-probability is not known: the pair was left out when the run began, with a "
                "shorter --seq-length; HINT: that --seq-length, or a new run",
                source.data.describe_position(document, 0).c_str());
    }

    // The first token outside the vocabulary; the number of tokens if there is none.
    size_t find_foreign(const std::vector<int>& text) const {
        unsigned largest = 0;  // unsigned: a negative token counts as larger than any
        for (const int token : text) largest = std::max(largest, (unsigned)token);
        if (largest < limit()) return text.size();
        return (size_t)(std::find_if(text.begin(), text.end(), [&](int token) { return (unsigned)token >= limit(); }) -
                        text.begin());
    }
    unsigned limit() const { return o_.vocab_size > 0 ? (unsigned)o_.vocab_size : (unsigned)INT_MAX; }
    // Of `text`, which begins with this token of the document.
    void check_tokens(const Source& source, int64_t document, int64_t token, const std::vector<int>& text) const {
        const size_t i = find_foreign(text);
        if (i == text.size()) return;
        fail("%s is %d, outside the vocabulary of %u tokens; HINT: the data must be prepared with the model's own tokenizer",
             source.data.describe_position(document, token + (int64_t)i).c_str(), text[i], limit());
    }
    // Of a sample's text, which crosses documents.
    void check_tokens(const Source& source, int64_t sample, const std::vector<int>& text) const {
        const size_t i = find_foreign(text);
        if (i == text.size()) return;
        const SampleOrder& order = *source.order;
        const auto [entry, token] = order.place_of(order.shuffled(sample) * o_.T + (int64_t)i);
        const int64_t document = order.document(entry);
        check_tokens(source, document, source.part.first_token(document) + token, {text[i]});
    }

    // Positions, masked targets and the start of each token's document, for the T tokens at `row`.
    void mask(Batch& out, size_t row) const {
        const int* tokens = out.tokens.data() + row;
        int start = 0;  // first token of the current document
        for (int t = 0; t < o_.T; t++) {
            const bool ends = o_.eod >= 0 && tokens[t] == o_.eod;
            out.positions[row + t] = o_.reset_position_ids ? t - start : t;
            if (!out.doc_start.empty()) out.doc_start[row + t] = o_.reset_attention_mask ? start : 0;
            if (o_.eod_mask_loss && ends) out.targets[row + t] = -1;
            if (ends) start = t + 1;
        }
    }

    DataOptions o_;
    std::vector<Source> sources_;
    std::vector<BlendEntry> blend_;  // empty: the samples of the only source
    int64_t n_samples_ = 0, n_pairs_ = 0;
    std::vector<double> reference_;  // (n_pairs, 2), or empty
};

// Cross-entropy of the validation tokens under the frequencies of the training tokens (each count plus one): what can be known
// without any context. Reads at most 2000 samples of each, spread evenly.
inline double unigram_loss(const DataLoader& train, const DataLoader& valid, int64_t valid_samples, int V) {
    std::vector<double> count(V, 1.0);
    double total = V;
    Batch batch;
    int64_t reads = std::min<int64_t>(2000, train.n_samples());
    for (int64_t i = 0; i < reads; i++) {
        train.fetch(i * train.n_samples() / reads, 1, batch);
        for (const int token : train.has_conversations() ? batch.targets : batch.tokens) {
            if (token < 0) continue;
            count[token]++;
            total++;
        }
    }
    double loss = 0, n = 0;
    reads = std::min<int64_t>(2000, valid_samples);
    for (int64_t i = 0; i < reads; i++) {
        valid.fetch(i * valid_samples / reads, 1, batch);
        for (int target : batch.targets)
            if (target >= 0) {
                loss -= std::log(count[target] / total);
                n++;
            }
    }
    return loss / n;
}
