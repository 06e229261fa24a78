// The files of an input, shared by ranks that read at their own pace: each reads a range of the files, of about the same size,
// in order. The implementation is parallel/shared_input.h.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "../base/text.h"

class InputShare {
public:
    virtual ~InputShare() = default;
    virtual int rank() const = 0;
    virtual int size() const = 0;
    // After this rank has read so many bytes: returns the bytes that all ranks have read, as far as known; fails if another
    // rank has failed. Does not wait.
    virtual int64_t read(int64_t bytes) = 0;
    // At the end of this rank's files: waits for the others, and calls tick(bytes that all have read).
    virtual void finish(int64_t bytes, const std::function<void(int64_t)>& tick) = 0;
    // One text of each rank. Waits for the others; fails if one has failed.
    virtual Strings gather(const std::string& mine) = 0;

    // The files of a rank, [first, second): the one with a file's middle in its equal part of all bytes.
    static std::pair<size_t, size_t> files_of(const std::vector<int64_t>& sizes, int rank, int ranks) {
        double total = 0, before = 0;
        for (const int64_t bytes : sizes) total += (double)bytes + 1;
        size_t first = 0, end = 0;
        for (const int64_t bytes : sizes) {
            const double part = (before + ((double)bytes + 1) / 2) * ranks / total;
            first += part < rank;
            end += part < rank + 1;
            before += (double)bytes + 1;
        }
        return {first, end};
    }
};
