// Personal data: whatever a text is, the places that are found are in order and inside it.
#include "fuzz.h"

#include "../../llmc/curate/pii.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    PiiOptions o;
    o.user = true;
    o.private_addresses = size % 2;
    // A copy of exactly the text's size: a read behind it is seen.
    const std::vector<char> copy(data, data + size);
    size_t done = 0;
    for (const pii::Found& f : find_pii({copy.data(), copy.size()}, o)) {
        CHECK(f.begin >= done && f.end > f.begin && f.end <= size, "a place from %zu to %zu after %zu", f.begin, f.end, done);
        CHECK(o.of(f.kind), "kind %s", f.kind);
        done = f.end;
    }
    return 0;
}
