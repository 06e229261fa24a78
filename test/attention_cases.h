// Shared by the tests of attention on CPU and GPU: sizes and layouts, documents.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <ostream>
#include <vector>

#include "../llmc/shapes.h"

namespace test {

struct Case {
    int B, T, NH, NKV, HS;
    bool alibi, documents;
    int window = 0;  // keys that a query sees; 0: all
    double softcap = 0, dropout = 0;
    bool sinks = false;
    int group() const { return NH / NKV; }
    size_t rows() const { return (size_t)B * T; }
    size_t width() const { return (size_t)(NH + 2 * NKV) * HS; }
    size_t index(int b, int t, int head, int c) const { return ((size_t)b * T + t) * width() + (size_t)head * HS + c; }
    size_t statistic(int b, int t, int h) const { return ((size_t)b * NH + h) * T + t; }
    size_t output(int b, int t, int h, int c) const { return (((size_t)b * T + t) * NH + h) * HS + c; }
    int key_head(int h) const { return NH + h / group(); }
    int value_head(int h) const { return key_head(h) + NKV; }
    bool masked() const { return documents || window; }
    std::vector<int> first_keys() const;
    AttentionShape shape(real scale) const {
        AttentionShape s{B, T, NH, NKV, HS, scale, (real)softcap};
        s.dropout.rate = (real)dropout;
        s.dropout.draws.key = 99;
        s.dropout.draws.first = (1ull << 34) - 1001;
        s.all_heads = 2 * NH;
        return s;
    }
};

inline void PrintTo(const Case& k, std::ostream* os) {
    *os << "B " << k.B << ", T " << k.T << ", NH " << k.NH << ", NKV " << k.NKV << ", HS " << k.HS << (k.alibi ? ", ALiBi" : "")
        << (k.documents ? ", documents" : "") << ", window " << k.window << ", softcap " << k.softcap << ", dropout "
        << k.dropout << (k.sinks ? ", sinks" : "");
}

// Document starts: documents of one token, of two, at the edge of a tile, at its last token, within it, several in one tile,
// and longer than a tile.
inline std::vector<int> document_starts(int B, int T) {
    const std::vector<int> lengths[] = {{1, 2, 61, 64, 1, 1000}, {5, 1, 1, 7, 30, 90, 70, 1000}, {63, 1000}};
    std::vector<int> starts;
    for (int b = 0; b < B; b++)
        for (int t = 0, start = 0, document = 0; t < T; t++) {
            if (t == start + lengths[b % 3][document]) {
                start = t;
                document++;
            }
            starts.push_back(start);
        }
    return starts;
}

// The rows of a step in which sequences get one token each: sequence b starts b steps after the first one, and occupies place B
// - b of the cache.
struct DecodedRows {
    std::vector<int> sequences, t;
    const Case& k;
    DecodedRows(const Case& k, int step) : k(k) {
        for (int b = k.B - 1; b >= 0; b--)
            if (step >= b && step - b < k.T) {
                sequences.push_back(k.B - b);
                t.push_back(step - b);
            }
    }
    size_t row(int i) const { return (size_t)(k.B - sequences[i]) * k.T + t[i]; }  // of all sequences, concatenated
};

// The first key that each row sees.
inline std::vector<int> Case::first_keys() const {
    std::vector<int> first = documents ? document_starts(B, T) : std::vector<int>(rows());
    for (size_t i = 0; window && i < first.size(); i++) first[i] = std::max(first[i], (int)i % T + 1 - window);
    return first;
}

}  // namespace test
