// Datasets whose tokens encode their position, and a slow transcription of Megatron's order of samples.
#pragma once
#include <numeric>
#include <string>
#include <vector>

#include "../llmc/data/dataset.h"
#include "../llmc/data/numpy_random.h"
#include "files.h"

namespace test {

using Ints = std::vector<int>;

inline void write_dataset(const std::string& prefix, int vocab_size, const std::vector<Ints>& documents) {
    TokenDatasetWriter writer(prefix, vocab_size);
    for (const Ints& d : documents) {
        writer.add(d.data(), d.size());
        writer.end_document();
    }
    writer.commit();
}

// Token t of document d is base + 1000 d + t, so that a token identifies its position.
inline std::vector<Ints> numbered_documents(const Ints& lengths, int base = 0) {
    std::vector<Ints> documents;
    for (size_t d = 0; d < lengths.size(); d++) {
        documents.emplace_back(lengths[d]);
        std::iota(documents[d].begin(), documents[d].end(), base + 1000 * (int)d);
    }
    return documents;
}

class NumberedDataset {
public:
    explicit NumberedDataset(const Ints& lengths) : data_(open(dir_ / "d", lengths)) {}
    const TokenDataset& operator*() const { return data_; }

private:
    static TokenDataset open(const std::string& prefix, const Ints& lengths) {
        write_dataset(prefix, 1 << 20, numbered_documents(lengths));
        return TokenDataset::open(prefix);
    }
    TemporaryDirectory dir_;
    TokenDataset data_;
};

struct OrderGolden {
    Ints lengths;
    int begin, end, T, n_wanted;
    uint32_t seed;
    int n_epochs;
    Ints documents, shuffled, first_tokens;
};

// From NumPy: document_index, shuffle_index, and the first token of every sample in their order.
inline const OrderGolden orders[] = {
    // one epoch, with an empty document
    {{5, 3, 9, 4, 0, 7, 1},
     0,
     7,
     4,
     0,
     1234,
     1,
     {2, 1, 6, 0, 4, 5, 3},
     {5, 0, 3, 4, 2, 6, 1},
     {5002, 2000, 6000, 3, 2008, 5006, 2004}},
    // the last epoch gives 6 of its 7 samples, over 80%: all epochs are shuffled together
    {{5, 3, 9, 4, 0, 7, 1},
     0,
     7,
     4,
     20,
     1234,
     3,
     {3, 6, 2, 2, 0, 5, 4, 0, 1, 4, 3, 4, 3, 2, 0, 1, 6, 5, 6, 5, 1},
     {8, 19, 14, 1, 4, 11, 20, 17, 13, 9, 0, 7, 3, 10, 6, 2, 5, 12, 16, 18, 15},
     {5004, 6000, 2005, 6000, 2002, 3001, 5003, 6000, 2001, 1, 3000, 5000, 2007, 1000, 1, 2003, 2006, 3001, 4, 5003, 0}},
    // it gives 2 of 7: shuffled separately
    {{5, 3, 9, 4, 0, 7, 1},
     0,
     7,
     4,
     16,
     1234,
     3,
     {5, 3, 0, 4, 6, 2, 2, 0, 1, 1, 4, 5, 6, 3, 5, 1, 3, 4, 0, 6, 2},
     {8, 1, 12, 4, 3, 7, 11, 10, 5, 13, 2, 6, 9, 0, 18, 15, 19, 16, 20, 14, 17},
     {2006, 5004, 5002, 6000, 1, 2002, 1001, 1000, 2003, 5006, 3001, 2007, 1, 5000, 0, 5002, 4, 5006, 2002, 3002, 3000}},
    // one document
    {{11}, 0, 1, 3, 8, 7, 3, {0, 0, 0}, {2, 5, 0, 6, 3, 1, 4, 7, 8, 9}, {6, 4, 0, 7, 9, 3, 1, 10, 2, 5}},
    // samples longer than documents, of a part of the dataset
    {{2, 3, 1, 2, 4, 3, 2, 1},
     2,
     8,
     6,
     5,
     99,
     3,
     {7, 3, 2, 2, 3, 6, 2, 7, 6, 7, 6, 4, 4, 5, 4, 5, 5, 3},
     {1, 4, 2, 0, 5, 3},
     {3001, 5000, 6001, 7000, 4003, 4002}},
};

// Megatron's GPTDataset, transcribed: epochs by repeated addition, recursion for the last epoch, a stream of all tokens instead
// of sample_index.
struct SlowOrder {
    int64_t n_epochs = 1;
    bool apart = false;
    std::vector<Ints> samples;

    SlowOrder(const std::vector<Ints>& documents, int begin, int end, int T, int n_wanted, uint32_t seed) {
        int64_t per_epoch = 0;
        for (int d = begin; d < end; d++) per_epoch += (int64_t)documents[d].size();
        for (int64_t n = per_epoch; n < (int64_t)n_wanted * T + 1 && n_wanted > 0; n += per_epoch) n_epochs++;
        const int64_t total = (n_epochs * per_epoch - 1) / T, without_last = ((n_epochs - 1) * per_epoch - 1) / T;
        if (n_epochs > 1) apart = n_wanted - without_last < (int64_t)(0.80 * (double)((per_epoch - 1) / T));

        NumpyRandom random(seed);
        Ints stream;
        const auto append = [&](int64_t n) {
            Ints index;
            for (int64_t e = 0; e < n; e++)
                for (int d = begin; d < end; d++) index.push_back(d);
            random.shuffle(index.data(), (int64_t)index.size());
            for (const int d : index) stream.insert(stream.end(), documents[d].begin(), documents[d].end());
        };
        append(apart ? n_epochs - 1 : n_epochs);
        if (apart) append(1);
        std::vector<int64_t> index;
        const auto append_samples = [&](int64_t first, int64_t last) {
            std::vector<int64_t> part;
            for (int64_t s = first; s < last; s++) part.push_back(s);
            random.shuffle(part.data(), (int64_t)part.size());
            index.insert(index.end(), part.begin(), part.end());
        };
        append_samples(0, apart ? without_last : total);
        if (apart) append_samples(without_last, total);
        for (const int64_t s : index) samples.emplace_back(stream.begin() + s * T, stream.begin() + s * T + T + 1);
    }
};

}  // namespace test
