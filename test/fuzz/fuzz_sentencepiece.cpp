// SentencePiece's .model files. After loading, a text is encoded and decoded, and every token is read.
#include "fuzz.h"

#include "../../llmc/tokenizer/tokenizer.h"

// Words, runs of spaces, several scripts, accents separate from their letters, invalid UTF-8, NUL, names of tokens.
static const std::string text =
    "The cat's 12345 hats, we'll  see...  \t\n\n \u2581\u2581x\r\n日本語、ﾃｷｽﾄ。 e\u0301 Ünïcödé \u200d🙂 aaaaaaaaaaaaaaaaaaaaaaaaab "
    "\xff\xc0\xaf\xe3\x81 <s></s><unk><0x0A> " +
    std::string(2, '\0') + "ab abab ";

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static const Files files;
    // Files that start differently are treated as tokenizer.json, which fuzz_tokenizer tests.
    std::string bytes(view(data, size));
    if (bytes.size() < 3) return 0;
    bytes[0] = bytes[2] = '\n';
    files.write("tokenizer.model", bytes);
    refused([&] {
        const Tokenizer tokenizer = Tokenizer::load(files / "tokenizer.model");
        size_t total = 0;
        for (int id = 0; id < tokenizer.vocab_size(); id++)
            total += tokenizer.token_bytes(id).size() + tokenizer.is_special(id);
        CHECK(total > 0, "no token has a text");
        for (const bool special : {false, true}) {
            std::vector<int> tokens;
            tokenizer.encode_append(text, tokens, special, special);
            for (const int id : tokens)
                CHECK(id >= 0 && id < tokenizer.vocab_size(), "token %d of %d", id, tokenizer.vocab_size());
            (void)tokenizer.decode(tokens);
        }
    });
    return 0;
}
