// Parquet files: for any file, reading rows ends or is refused, and no byte outside of it is read.
#include "fuzz.h"

#include "../../llmc/text/parquet_documents.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static const Files files;
    files.write("a.parquet", view(data, size));
    TextInput input;
    input.keep_fields = size % 2;
    if (size % 4 >= 2) input.open_record = [](const nlohmann::json&, Chunk&) {};
    refused([&] {
        ParquetDocuments documents(files / "a.parquet", input);
        Chunk chunk;
        for (int row = 0; row < 10000 && documents.next(chunk); row++) {
            CHECK(chunk.line == row + 1, "row %d says %lld", row, (long long)chunk.line);
            chunk = {};
        }
    });
    return 0;
}
