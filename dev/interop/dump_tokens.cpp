// Encodes texts and decodes the tokens, for comparison with other programs.
//   build/cpu-fp32/dump_tokens TOKENIZER TEXTS RESULT [prompt]
// TEXTS: the length of each text (4 bytes) and its bytes. RESULT: for each text the number of tokens (4 bytes), the tokens
// (4 bytes each), the length of the decoded text (4 bytes), its bytes. prompt: recognize special tokens in the texts.
#include <cstdio>

#include "../../llmc/tokenizer/tokenizer.h"

static void run(int argc, char** argv) {
    if (argc < 4) fail_usage("usage: dump_tokens TOKENIZER TEXTS RESULT [prompt]");
    const Tokenizer tokenizer = Tokenizer::load(argv[1]);
    const std::string texts = read_whole_file(argv[2]);
    std::string result;
    const auto add_number = [&](size_t n) {
        const auto number = (uint32_t)n;
        result.append((const char*)&number, 4);
    };
    for (size_t at = 0; at < texts.size();) {
        uint32_t length = 0;
        memcpy(&length, &texts[at], 4);
        std::vector<int> tokens;
        tokenizer.encode_append(std::string_view(texts).substr(at + 4, length), tokens, argc > 4);
        at += 4 + length;
        add_number(tokens.size());
        result.append((const char*)tokens.data(), 4 * tokens.size());
        const std::string text = tokenizer.decode(tokens);
        add_number(text.size());
        result += text;
    }
    write_file_atomically(argv[3], result);
}

int main(int argc, char** argv) {
    try {
        run(argc, argv);
    } catch (const std::exception& e) {
        fprintf(stderr, "error: %s\n", e.what());
        return exit_status(e);
    }
}
