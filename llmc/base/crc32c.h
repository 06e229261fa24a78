// CRC-32C (Castagnoli, polynomial 0x1EDC6F41 reflected; RFC 3720 B.4), the checksum of checkpoint manifests. Uses the CPU's CRC
// instruction if there is one, else a table. crc32c("123456789") = 0xE3069283.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

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

inline uint32_t crc32c(const void* data, size_t bytes, uint32_t crc = 0) {
#if defined(__SSE4_2__) && defined(__x86_64__)
    const char* p = (const char*)data;
    uint64_t c = ~crc;
    for (; bytes >= 8; p += 8, bytes -= 8) {
        uint64_t word;
        memcpy(&word, p, 8);
        c = __builtin_ia32_crc32di(c, word);
    }
    for (; bytes > 0; p++, bytes--) c = __builtin_ia32_crc32qi((uint32_t)c, (unsigned char)*p);
    return ~(uint32_t)c;
#else
    return crc32c_by_table(data, bytes, crc);
#endif
}
