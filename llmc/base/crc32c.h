// CRC-32C (Castagnoli, polynomial 0x1EDC6F41 reflected; RFC 3720 B.4), the checksum of checkpoint manifests. Uses the CPU's CRC
// instruction if there is one, else a table. crc32c("123456789") = 0xE3069283.
//
// Without the inversions before and after, a CRC is linear: crc(0) = 0 and crc(A xor B) = crc(A) xor crc(B). So the
// checksum of a file can be computed from its pieces in any order (crc32c_linear, crc32c_shifted, crc32c_of_linear).
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#if defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#endif

// Continues `crc`, the checksum of the bytes before; 0 to start.
inline uint32_t crc32c_by_table(const void* data, size_t bytes, uint32_t crc = 0) {
    static const std::array<uint32_t, 256> table = [] {
        std::array<uint32_t, 256> t{};
        for (uint32_t i = 0; i < 256; i++) {
            uint32_t c = i;
            for (int k = 0; k < 8; k++) c = c & 1 ? 0x82F63B78u ^ c >> 1 : c >> 1;
            t[i] = c;
        }
        return t;
    }();
    crc = ~crc;
    for (size_t i = 0; i < bytes; i++) crc = table[(crc ^ ((const unsigned char*)data)[i]) & 0xff] ^ crc >> 8;
    return ~crc;
}

// The next 8 bytes, or one, by an instruction.
#if defined(__SSE4_2__) && defined(__x86_64__)
inline uint64_t crc32c_next(uint64_t c, uint64_t word) { return __builtin_ia32_crc32di(c, word); }
inline uint64_t crc32c_next(uint64_t c, unsigned char byte) { return __builtin_ia32_crc32qi((uint32_t)c, byte); }
#elif defined(__ARM_FEATURE_CRC32)
inline uint64_t crc32c_next(uint64_t c, uint64_t word) { return __crc32cd((uint32_t)c, word); }
inline uint64_t crc32c_next(uint64_t c, unsigned char byte) { return __crc32cb((uint32_t)c, byte); }
#else
#define CRC32C_BY_TABLE
#endif

inline uint32_t crc32c(const void* data, size_t bytes, uint32_t crc = 0) {
#if defined(CRC32C_BY_TABLE)
    return crc32c_by_table(data, bytes, crc);
#else
    const char* p = (const char*)data;
    uint64_t c = ~crc;
    for (; bytes >= 8; p += 8, bytes -= 8) {
        uint64_t word;
        memcpy(&word, p, 8);
        c = crc32c_next(c, word);
    }
    for (; bytes > 0; p++, bytes--) c = crc32c_next(c, (unsigned char)*p);
    return ~(uint32_t)c;
#endif
}

// a b and x^(8 bytes) modulo the polynomial; the highest bit is the coefficient of 1.
inline uint32_t crc32c_product(uint32_t a, uint32_t b) {
    uint32_t product = 0;
    for (uint32_t bit = 1u << 31; bit; bit >>= 1) {
        if (a & bit) product ^= b;
        b = b & 1 ? 0x82F63B78u ^ b >> 1 : b >> 1;
    }
    return product;
}
inline uint32_t crc32c_power(size_t bytes) {
    static const std::array<uint32_t, 64> powers = [] {  // x^(8 2^k)
        std::array<uint32_t, 64> p{};
        p[0] = 1u << 23;
        for (size_t k = 1; k < p.size(); k++) p[k] = crc32c_product(p[k - 1], p[k - 1]);
        return p;
    }();
    uint32_t power = 1u << 31;
    for (size_t k = 0; bytes; k++, bytes >>= 1)
        if (bytes & 1) power = crc32c_product(powers[k], power);
    return power;
}
// The linear sum of a piece, the same as if `zeros` bytes of 0 followed, and the CRC-32C of a text of `bytes` from the XOR of
// its pieces' sums, each with as many zeros as the text has bytes behind it.
inline uint32_t crc32c_linear(const void* data, size_t bytes) { return ~crc32c(data, bytes, ~0u); }
inline uint32_t crc32c_shifted(uint32_t linear, size_t zeros) { return crc32c_product(linear, crc32c_power(zeros)); }
inline uint32_t crc32c_of_linear(uint32_t linear, size_t bytes) { return ~(linear ^ crc32c_shifted(~0u, bytes)); }
