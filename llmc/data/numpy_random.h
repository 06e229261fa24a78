// NumPy's RandomState, which Megatron-LM uses for the order of documents and samples.
#pragma once
#include <cstdint>
#include <random>
#include <utility>

// numpy.random.RandomState(seed).shuffle: Fisher-Yates from the end, with numbers in [0, i] drawn by masking and rejection.
class NumpyRandom {
public:
    explicit NumpyRandom(uint32_t seed) : mt_(seed) {}

    // The numbers do not depend on x: they are drawn some places ahead, so that the memory that they select is on its way.
    // tick() is called every million elements.
    template <class T, class Tick>
    void shuffle(T* x, int64_t n, Tick tick) {
        constexpr int64_t ahead = 64, ticks = 1 << 20;
        uint64_t drawn[ahead];
        for (int64_t i = n - 1, next = i; i >= 1; i--) {
            for (; next >= 1 && next > i - ahead; next--) {
                drawn[next % ahead] = below_or_equal((uint64_t)next);
                __builtin_prefetch(x + drawn[next % ahead], 1);
            }
            std::swap(x[i], x[drawn[i % ahead]]);
            if (i % ticks == 0) tick();
        }
    }

    template <class T>
    void shuffle(T* x, int64_t n) {
        shuffle(x, n, [] {});
    }

private:
    uint64_t below_or_equal(uint64_t max) {
        uint64_t mask = max;
        for (int shift = 1; shift < 64; shift *= 2) mask |= mask >> shift;
        uint64_t value;
        do value = max <= UINT32_MAX ? mt_() & mask : next_64() & mask;
        while (value > max);
        return value;
    }
    uint64_t next_64() {
        const uint64_t high = mt_();
        return high << 32 | (uint32_t)mt_();
    }
    std::mt19937 mt_;
};
