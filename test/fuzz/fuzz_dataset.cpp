// Tokenized datasets. The first byte of the input, modulo 3, selects the format of the rest:
//   '0'  two bytes with the size of a .bin, then a complete .idx
//   '1'  a complete llm.c shard
//   '2'  the 12 bytes of numbers in a shard's header, and its tokens
#include "fuzz.h"

#include "../../llmc/data/dataset.h"

static void read_all(const std::string& path) {
    const TokenDataset dataset = TokenDataset::open(path);
    int64_t total = 0;
    for (int64_t d = 0; d < dataset.n_documents(); d++) {
        const int64_t n = dataset.length(d);
        std::vector<int> tokens((size_t)n), middle((size_t)(n - n / 2));
        dataset.read(d, 0, n, tokens.data());
        dataset.read(d, n / 2, n - n / 2, middle.data());
        CHECK(std::equal(middle.begin(), middle.end(), tokens.begin() + n / 2), "two reads differ");
        for (const int token : tokens) CHECK(token >= -1, "token %d", token);
        total += n;
    }
    CHECK(total == dataset.n_tokens(), "%lld tokens, but the documents have %lld", (long long)dataset.n_tokens(),
          (long long)total);
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static const Files files;
    std::string_view input = view(data, size);
    const unsigned kind = read_byte(input) % 3;
    if (kind == 0) {
        const unsigned low = read_byte(input), bytes = low + 256 * read_byte(input);
        std::string bin;
        for (unsigned i = 0; i < bytes; i++) bin += (char)(i * 151);
        files.write("d.bin", bin);
        files.write("d.idx", input);
        refused([&] { read_all(files / "d"); });
    } else {
        std::string shard(kind == 1 ? std::string_view() : read_part(input, 12));
        if (kind == 2) shard.resize(shard_header_bytes);
        files.write("shard.bin", shard += input);
        refused([&] { read_all(files / "shard.bin"); });
    }
    return 0;
}
