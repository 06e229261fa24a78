// tokenizer.json. In the input, $BYTES is replaced by the 256 single-byte tokens with the ids 0 .. 255, which every
// accepted file must have, so that inputs are short and mutations effective. After loading, a text must survive encode and
// decode.
#include "fuzz.h"

#include "../../llmc/tokenizer/tokenizer.h"

static std::string byte_tokens() {
    nlohmann::json tokens;
    for (int b = 0; b < 256; b++) tokens[utf8(byte_characters()[b])] = b;
    const std::string text = tokens.dump();
    return text.substr(1, text.size() - 2);
}

// Words, digits, white space, several scripts, a run that is merged in the other order, invalid UTF-8, NUL.
static const std::string text =
    "The cat's 12345 hats, we'll see...  \t\n\n  (int x = 0;)\r\n日本語、テキスト。 Ünïcödé café Ελλάδα "
    "\u200d🙂 "
    "ا،۔ "
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaab \xff\xc0\xaf\xe3\x81 <|endoftext|>" +
    std::string(2, '\0') + "ab ab abab";

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static const Files files;
    static const std::string placeholder = "$BYTES", bytes = byte_tokens();
    std::string json(view(data, size));
    if (const size_t at = json.find(placeholder); at != std::string::npos) json.replace(at, placeholder.size(), bytes);
    files.write("tokenizer.json", json);
    refused([&] {
        const Tokenizer tokenizer = Tokenizer::load(files / "tokenizer.json");
        size_t total = 0;
        for (int id = 0; id < tokenizer.vocab_size(); id++)
            total += tokenizer.token_bytes(id).size() + tokenizer.is_special(id);
        CHECK(total >= 256 || !tokenizer.of_bytes(), "%zu bytes in all tokens", total);
        for (const int id : {tokenizer.eod_id(), tokenizer.bos_id()})
            CHECK(id >= -1 && id < tokenizer.vocab_size(), "token %d of %d", id, tokenizer.vocab_size());
        const std::vector<int> tokens = tokenizer.encode(text);
        CHECK(tokenizer.decode(tokens) == text || !tokenizer.keeps_every_byte(), "the text has become '%s'",
              tokenizer.decode(tokens).c_str());
        for (const int id : tokenizer.encode_prompt(text))
            CHECK(id >= 0 && id < tokenizer.vocab_size(), "token %d of %d", id, tokenizer.vocab_size());
    });
    return 0;
}
