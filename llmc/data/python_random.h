// Python's random.Random, which draws the solved examples of CORE.
#pragma once
#include <cmath>
#include <cstdint>
#include <numeric>
#include <random>
#include <set>
#include <utility>
#include <vector>

class PythonRandom {
public:
    explicit PythonRandom(uint64_t seed) {
        Seeding seeding{seed};
        mt_.seed(seeding);
    }

    // random.sample(range(n), k): k different numbers below n. Python chooses the method by memory.
    std::vector<int64_t> sample(int64_t n, int64_t k) {
        std::vector<int64_t> drawn;
        const double set_size = 21 + (k > 5 ? std::pow(4, std::ceil(std::log((double)k * 3) / std::log(4))) : 0);
        if ((double)n <= set_size) {
            std::vector<int64_t> pool((size_t)n);
            std::iota(pool.begin(), pool.end(), 0);
            for (; k > 0; k--, n--) {
                const int64_t i = below(n);
                drawn.push_back(std::exchange(pool[(size_t)i], pool[(size_t)n - 1]));
            }
            return drawn;
        }
        for (std::set<int64_t> seen; k > 0; k--) {
            int64_t i = below(n);
            while (!seen.insert(i).second) i = below(n);
            drawn.push_back(i);
        }
        return drawn;
    }

private:
    // The generator's state for a seed: init_by_array() of the Mersenne Twister, with the seed's 32-bit words, lowest first.
    struct Seeding {
        using result_type = uint32_t;
        uint64_t seed;

        void generate(uint32_t* begin, uint32_t* end) const {
            const uint32_t words[] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
            const size_t n = (size_t)(end - begin), n_words = words[1] ? 2 : 1;
            begin[0] = 19650218;
            const auto mixed = [&](size_t i) { return begin[i - 1] ^ begin[i - 1] >> 30; };
            for (size_t i = 1; i < n; i++) begin[i] = 1812433253U * mixed(i) + (uint32_t)i;
            size_t i = 1;
            const auto advance = [&] {
                if (++i < n) return;
                begin[0] = begin[n - 1];
                i = 1;
            };
            for (size_t step = 0; step < n; step++, advance()) {
                const size_t word = step % n_words;
                begin[i] = (begin[i] ^ mixed(i) * 1664525U) + words[word] + (uint32_t)word;
            }
            for (size_t step = 0; step + 1 < n; step++, advance()) begin[i] = (begin[i] ^ mixed(i) * 1566083941U) - (uint32_t)i;
            begin[0] = 0x80000000U;
        }
    };

    // n < 2^32.
    int64_t below(int64_t n) {
        int bits = 0;
        while (n >> bits) bits++;
        int64_t drawn;
        do drawn = (int64_t)(mt_() >> (32 - bits));
        while (drawn >= n);
        return drawn;
    }

    std::mt19937 mt_;
};
