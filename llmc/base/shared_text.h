// Text that several processes append to and read, under a lock: with std::lock_guard.
#pragma once
#include <string>

class SharedText {
public:
    virtual ~SharedText() = default;
    virtual void lock() = 0;
    virtual void unlock() = 0;
    // The text from byte `from` on.
    virtual std::string text(size_t from) = 0;
    // All or nothing, if there is no room.
    virtual void append(const std::string& more) = 0;
};
