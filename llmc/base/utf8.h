// What is valid UTF-8 (RFC 3629): no overlong forms, no surrogates, nothing above U+10FFFF.
#pragma once
#include <cstddef>

// Length of the valid UTF-8 sequence at the start of s; 0 if it does not begin with one.
inline size_t valid_utf8_length(const unsigned char* s, size_t n) {
    const auto follows = [&](size_t i, unsigned low = 0x80, unsigned high = 0xbf) {
        return i < n && s[i] >= low && s[i] <= high;
    };
    const unsigned c = s[0];
    if (c < 0x80) return 1;
    if (c >= 0xc2 && c <= 0xdf) return follows(1) ? 2 : 0;
    if (c >= 0xe0 && c <= 0xef) return follows(1, c == 0xe0 ? 0xa0 : 0x80, c == 0xed ? 0x9f : 0xbf) && follows(2) ? 3 : 0;
    if (c >= 0xf0 && c <= 0xf4)
        return follows(1, c == 0xf0 ? 0x90 : 0x80, c == 0xf4 ? 0x8f : 0xbf) && follows(2) && follows(3) ? 4 : 0;
    return 0;
}
