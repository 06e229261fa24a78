// Which layers have a mixture of experts, as in Megatron-LM's --moe-layer-freq: n for layers 0, n, 2n, ..., or a list with 1
// for a mixture and 0 for a dense MLP: "[0,1,1]", "[0]*2+[1]*22", "([0]*3+[1])*6".
#pragma once
#include <cctype>
#include <cstdlib>
#include <string>
#include <vector>

#include "../base/check.h"

class LayerPattern {
public:
    LayerPattern(const std::string& text, int L) : text_(text) {
        for (const char c : text)
            if (c != ' ') rest_ += c;
        std::vector<int> kinds;
        if (!rest_.empty() && std::isdigit((unsigned char)rest_[0])) {
            const int n = number(1, most_layers);
            for (int layer = 0; layer < L; layer++) kinds.push_back(layer % n == 0);
        } else {
            kinds = sum();
        }
        if (at_ < rest_.size()) wrong();
        if ((int)kinds.size() != L)
            fail("--moe-layer-freq '%s' lists %zu layers; the model has %d", text.c_str(), kinds.size(), L);
        for (int layer = 0; layer < L; layer++)
            if (!kinds[(size_t)layer]) dense.push_back(layer);
        if ((int)dense.size() == L)
            fail("--moe-layer-freq '%s' makes all layers dense; HINT: omit --num-experts", text.c_str());
    }

    std::vector<int> dense;  // the layers without a mixture, in order

private:
    static constexpr int most_layers = 10000;

    [[noreturn]] void wrong() const {
        fail(
            "--moe-layer-freq is '%s'; expected N, for a mixture in every N-th layer, or a list of 0 (dense) and 1 (mixture) "
            "such as [0]*1+[1]*23",
            text_.c_str());
    }
    bool next(char c) {
        if (at_ >= rest_.size() || rest_[at_] != c) return false;
        at_++;
        return true;
    }
    int number(int least, int most) {
        if (at_ >= rest_.size() || !std::isdigit((unsigned char)rest_[at_])) wrong();
        char* end = nullptr;
        const long n = std::strtol(rest_.c_str() + at_, &end, 10);
        if (n < least || n > most) wrong();
        at_ = (size_t)(end - rest_.c_str());
        return (int)n;
    }
    // sum: product, or product + product + ...
    std::vector<int> sum() {
        std::vector<int> all;
        do {
            const std::vector<int> more = product();
            all.insert(all.end(), more.begin(), more.end());
            if (all.size() > most_layers) wrong();
        } while (next('+'));
        return all;
    }
    // product: list, or list * number
    std::vector<int> product() {
        const std::vector<int> once = list();
        std::vector<int> all;
        for (int n = next('*') ? number(0, most_layers) : 1; n > 0 && all.size() <= most_layers; n--)
            all.insert(all.end(), once.begin(), once.end());
        return all;
    }
    // list: [0,1,...], or (sum)
    std::vector<int> list() {
        const bool nested = next('(');
        std::vector<int> all;
        if (nested) all = sum();
        else if (!next('[')) wrong();
        else do
                all.push_back(number(0, 1));
            while (next(','));
        if (!next(nested ? ')' : ']')) wrong();
        return all;
    }

    std::string text_, rest_;  // with and without spaces
    size_t at_ = 0;            // position in rest_
};
