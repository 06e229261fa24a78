// Text, JSON, tables, pages and articles of every encoding, by name or by their bytes: whatever a file holds, its documents are
// read or it is refused, and a bad file never ends a folder that is read with --skip-bad-files.
#include "fuzz.h"

#include "../../llmc/text/document_reader.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static const Files files;
    static constexpr const char *names[] = {"a.csv", "a.tsv", "a.html", "a.txt", "a.jsonl", "a.json", "a"},
                                *encodings[] = {"", "auto", "cp932", "utf-16"}, *splits[] = {"file", "blank", "line"};
    std::string_view rest = view(data, size);
    const unsigned how = read_byte(rest), more = read_byte(rest);
    const std::string name = names[how % 7];
    files.write(name, rest);
    TextInput input;
    input.files = {files / name};
    input.encoding = encodings[more % 4];
    input.split = splits[more / 4 % 3];
    input.keep_fields = more & 16;
    input.allow_binary = more & 32;
    input.skip_bad_files = more & 64;
    refused([&] {
        DocumentReader reader(input);
        InputJudge judge = reader.judge();
        Chunk chunk;
        while (reader.next(chunk)) {
            open_chunk(chunk, reader.input());
            chunk.odd = count_odd_bytes(chunk.text);
            CHECK(chunk.odd.tags <= 2 * chunk.odd.bytes, "more tags than text");
            judge.take(chunk);
        }
        judge.end();
    });
    std::filesystem::remove(files / name);
    return 0;
}
