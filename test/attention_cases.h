// Shared by the tests of attention on CPU and GPU: sizes and layouts, documents.
#pragma once
#include <cstddef>
#include <ostream>
#include <vector>

namespace test {

struct Case {
    int B, T, NH, NKV, HS;
    bool alibi, documents;
    int group() const { return NH / NKV; }
    size_t rows() const { return (size_t)B * T; }
    size_t width() const { return (size_t)(NH + 2 * NKV) * HS; }
    size_t index(int b, int t, int head, int c) const { return ((size_t)b * T + t) * width() + (size_t)head * HS + c; }
    size_t statistic(int b, int t, int h) const { return ((size_t)b * NH + h) * T + t; }
    size_t output(int b, int t, int h, int c) const { return (((size_t)b * T + t) * NH + h) * HS + c; }
    int key_head(int h) const { return NH + h / group(); }
    int value_head(int h) const { return key_head(h) + NKV; }
};

inline void PrintTo(const Case& k, std::ostream* os) {
    *os << "B " << k.B << ", T " << k.T << ", NH " << k.NH << ", NKV " << k.NKV << ", HS " << k.HS << (k.alibi ? ", ALiBi" : "")
        << (k.documents ? ", documents" : "");
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

}  // namespace test
