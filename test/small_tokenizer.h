// A tokenizer of 256 bytes, a few merges and special tokens, learned in DIR/tok.
#pragma once
#include <string>
#include <vector>

#include "../llmc/commands/text_commands.h"
#include "files.h"

namespace test {

inline Tokenizer small_tokenizer(const TemporaryDirectory& dir,
                                 const std::vector<std::string>& special_tokens = TokenizerOptions().special_tokens) {
    write_file(dir / "text.txt", "the cat sat on the mat and the dog sat on the log, the end of the cat and the dog\n");
    TokenizerOptions o;
    o.input = {dir / "text.txt"};
    o.output = dir / "tok";
    o.vocab_size = 280;
    o.special_tokens = special_tokens;
    output_of([&] { tokenizer_command(o, nullptr); });
    return Tokenizer::load(dir / "tok");
}

}  // namespace test
