// Bounds the work that a file of unknown origin can cause. A few bytes may claim 2^40 rows or gigabytes of text; a file that
// makes more of its bytes than real data does is refused instead of filling the disk.
#pragma once
#include <cstdint>
#include <limits>

class Budget {
public:
    // Allowed in total: at_least + per_byte * the bytes that were read.
    constexpr Budget(uint64_t at_least, uint64_t per_byte) : at_least_(at_least), per_byte_(per_byte) {}

    uint64_t allowed(uint64_t bytes) const {
        uint64_t product = 0, sum = 0;
        if (__builtin_mul_overflow(per_byte_, bytes, &product) || __builtin_add_overflow(product, at_least_, &sum))
            return std::numeric_limits<uint64_t>::max();
        return sum;
    }
    // Adds to the spent amount; false if it exceeds the budget for `bytes`.
    bool spend(uint64_t amount, uint64_t bytes) {
        if (__builtin_add_overflow(spent_, amount, &spent_)) spent_ = std::numeric_limits<uint64_t>::max();
        return spent_ <= allowed(bytes);
    }
    uint64_t spent() const { return spent_; }

private:
    uint64_t at_least_, per_byte_, spent_ = 0;
};

// Text that comes out of compression or of a table. gzip makes at most 1,032 bytes of one; of real text no codec makes 200.
inline constexpr Budget output_budget{(uint64_t)1 << 30, 2000};
// Rows of a table: real ones take more than a byte, but a column may repeat one value.
inline constexpr Budget row_budget{(uint64_t)1 << 20, 1000};
