// Hashes of bytes and of numbers, the same on every machine.
//   mix64        the finalizer of MurmurHash3 (Appleby, 2011): a bijection in which each bit of the input flips each bit of the
//                result with probability 1/2
//   murmur3_128  MurmurHash3_x64_128: 128 bits of any bytes, at several GB/s. It is not a cryptographic hash: an adversary can
//                construct two texts with the same hash
// The probability that any two of n different inputs share a hash is n^2 / 2^(bits + 1): 1.5e-15 for a trillion and 128 bits,
// 3% for a billion and 64 bits.
#pragma once
#include <cstdint>
#include <cstring>
#include <string_view>

inline uint64_t mix64(uint64_t x) {
    x ^= x >> 33;
    x *= 0xff51afd7ed558ccdu;
    x ^= x >> 33;
    x *= 0xc4ceb9fe1a85ec53u;
    return x ^ x >> 33;
}

struct Hash128 {
    uint64_t low = 0, high = 0;
    bool operator==(const Hash128& other) const { return low == other.low && high == other.high; }
    bool operator<(const Hash128& other) const { return low != other.low ? low < other.low : high < other.high; }
};

inline Hash128 murmur3_128(std::string_view bytes, uint64_t seed = 0) {
    constexpr uint64_t c1 = 0x87c37b91114253d5u, c2 = 0x4cf5ad432745937fu;
    const auto rotate = [](uint64_t x, int r) { return x << r | x >> (64 - r); };
    const auto first = [&](uint64_t k) { return rotate(k * c1, 31) * c2; };
    const auto second = [&](uint64_t k) { return rotate(k * c2, 33) * c1; };
    uint64_t low = seed, high = seed;
    uint64_t block[2];
    const char* p = bytes.data();
    size_t left = bytes.size();
    for (; left >= 16; p += 16, left -= 16) {
        memcpy(block, p, 16);
        low = rotate(low ^ first(block[0]), 27);
        low = (low + high) * 5 + 0x52dce729u;
        high = rotate(high ^ second(block[1]), 31);
        high = (high + low) * 5 + 0x38495ab5u;
    }
    block[0] = block[1] = 0;
    if (left > 0) memcpy(block, p, left);
    high ^= second(block[1]);
    low ^= first(block[0]);
    low ^= bytes.size();
    high ^= bytes.size();
    low += high;
    high += low;
    low = mix64(low);
    high = mix64(high);
    low += high;
    return {low, high + low};
}
