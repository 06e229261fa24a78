// Tables that every rank of a node needs (the order of the samples), in memory that one rank fills. Here for a single rank;
// parallel/memory_of_node.h shares it.
#pragma once
#include <functional>
#include <memory>
#include <string>

#include "../base/check.h"
#include "memory.h"

class NodeMemory {
public:
    // tick() is called at least every few million elements.
    using Fill = std::function<void(char* memory, const std::function<void()>& tick)>;

    virtual ~NodeMemory() = default;
    // Zero-filled memory in which fill() has written; nothing writes to it afterwards. All ranks call it in the same order, for
    // the same bytes. Fails before it allocates if there is less memory; `what` needs it: "the order of the samples of DATA".
    virtual std::shared_ptr<const char> filled(size_t bytes, const std::string& what, const Fill& fill) const {
        check_available(bytes, 1, what);
        return filled_alone(bytes, fill);
    }

protected:
    static std::shared_ptr<const char> filled_alone(
        size_t bytes, const Fill& fill, const std::function<void()>& tick = [] {}) {
        char* memory = (char*)cpu::allocate_memory(std::max<size_t>(1, bytes));
        const std::shared_ptr<char> owned(memory, [bytes](char* p) { cpu::release_memory(p, std::max<size_t>(1, bytes)); });
        fill(memory, tick);
        return owned;
    }
    // copies: the number of processes here that allocate so much.
    static void check_available(size_t bytes, size_t copies, const std::string& what) {
        if (const size_t available = cpu::available_memory(); copies && bytes > available / copies)
            fail(
                "%s needs %.2f GiB of memory%s, but %.2f GiB are available; HINT: a shorter run, or fewer processes next to it",
                what.c_str(), (double)bytes / 1073741824.0,
                copies > 1 ? format(" in each of %zu processes that cannot share it", copies).c_str() : "",
                (double)available / 1073741824.0);
    }
};
