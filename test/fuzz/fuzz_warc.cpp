// WARC files: for any records, reading ends or is refused; any page gives text in UTF-8 or is dropped.
#include "fuzz.h"

#include "../../llmc/text/warc.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static const Files files;
    files.write("a.warc", view(data, size));
    TextInput input;
    input.keep_fields = true;
    refused([&] {
        WarcDocuments documents(open_input(files / "a.warc"), input);
        Chunk chunk;
        for (int record = 1; documents.next(chunk); record++) {
            CHECK(chunk.line == record, "record %d says %lld", record, (long long)chunk.line);
            if (chunk.holds == Chunk::response && chunk.left_out.empty()) {
                open_page(chunk, "a.warc");
                CHECK(is_utf8(chunk.text) && chunk.text.empty() == !chunk.left_out.empty(), "text or a reason");
            }
            chunk = {};
        }
    });
    return 0;
}
