// The commands that turn text into tokens on disk, or learn a tokenizer from it: prepare, tokenizer; and the tokens of a file for
// eval --text. Documents come from document_reader.h in batches of bounded size, each batch is encoded by all threads, and results
// are written in order.
#pragma once
#include <omp.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <vector>

#include "../base/check.h"
#include "../base/terminal.h"
#include "../data/dataset.h"
#include "../data/document_reader.h"
#include "../data/tokenizer.h"
#include "../data/tokenizer_trainer.h"
#include "config.h"
#include "prepare_state.h"

template <class Options>
TextInput text_input(const Options& o, const std::string& reading, const std::string& split) {
    return {o.input, reading, o.json_keys, split, o.format, o.on_bad_line == "fail" ? "0" : o.max_bad_lines, o.allow_binary};
}

inline int thread_count(int asked) { return asked > 0 ? asked : omp_get_max_threads(); }

// The tokens of a file's whole text, in memory. Each document is encoded as transformers encodes a text: with the tokens of the
// tokenizer's template around it, and with special tokens recognised.
inline std::vector<int> encode_file(const std::string& file, const Tokenizer& tokenizer, int threads) {
    DocumentReader reader({{file}, "eval --text"});
    std::vector<int> all;
    std::vector<std::vector<int>> tokens;
    const auto append = [&](const std::vector<int>& more) { all.insert(all.end(), more.begin(), more.end()); };
    bool begins = true;
    for_each_chunk(
        reader, thread_count(threads), "preparing",
        [&](const Chunk& chunk, size_t i) {
            tokens[i].clear();
            tokenizer.encode_append(chunk.text, tokens[i], true, chunk.continues);
        },
        [&](const Chunk& chunk, size_t i) {
            if (begins) append(tokenizer.template_before());
            append(tokens[i]);
            if (chunk.ends_document) append(tokenizer.template_after());
            begins = chunk.ends_document;
        },
        [&](size_t n) { tokens.resize(n); });
    return all;
}

inline int prepare_command(const PrepareOptions& o) {
    if (o.output_prefix.empty())
        fail_usage("the output is missing; HINT: --output-prefix PREFIX writes PREFIX.bin and PREFIX.idx");
    if (const auto name = std::filesystem::path(o.output_prefix).filename(); name.empty() || name == "." || name == "..")
        fail_usage(
            "--output-prefix is '%s'; PREFIX must end with a name; HINT: --output-prefix DIR/text writes DIR/text.bin "
            "and DIR/text.idx",
            o.output_prefix.c_str());
    if (o.tokenizer.empty()) fail_usage("the tokenizer is missing; HINT: --tokenizer DIR, as written by train_gpt tokenizer");
    const Tokenizer tokenizer = Tokenizer::load(o.tokenizer);
    if (!o.no_append_eod && tokenizer.eod_id() < 0)
        fail(
            "%s has no end-of-document token (<|endoftext|>, <|end_of_text|> or </s>); HINT: --no-append-eod leaves documents "
            "without one",
            tokenizer.source().c_str());
    DocumentReader reader(text_input(o, "prepare --input", o.split_documents));
    if (const auto dir = std::filesystem::path(o.output_prefix).parent_path(); !dir.empty()) make_directory(dir.string());
    PrepareCounts counts;
    std::optional<PrepareState> state;
    if (o.resume) state.emplace(o, tokenizer.identity().hash, reader, counts);
    TokenDatasetWriter writer(o.output_prefix, tokenizer.identity(), state ? std::optional(state->kept()) : std::nullopt);
    std::vector<std::vector<int>> tokens;
    std::vector<std::array<int64_t, 2>> noted;  // places that spell a special token; bytes without a token
    try {
        for_each_chunk(
            reader, thread_count(o.workers), "preparing",
            [&](const Chunk& chunk, size_t i) {
                tokens[i].clear();
                tokenizer.encode_append(chunk.text, tokens[i], o.parse_special_tokens, chunk.continues);
                noted[i] = {tokenizer.count_special(chunk.text), 0};
                noted[i][1] = tokenizer.count_lost(chunk.text, tokens[i]);
                if (chunk.ends_document && !o.no_append_eod) tokens[i].push_back(tokenizer.eod_id());
            },
            [&](const Chunk& chunk, size_t i) {
                writer.add(tokens[i].data(), tokens[i].size());
                if (chunk.ends_document) writer.end_document();
                counts.tokens += (int64_t)tokens[i].size();
                counts.bytes += chunk.odd.bytes;
                counts.spelled += noted[i][0];
                counts.lost += noted[i][1];
                if (state && chunk.ends_document) state->done(chunk, writer);
            },
            [&](size_t n) {
                tokens.resize(n);
                noted.resize(n);
            });
    } catch (const Error&) {
        if (state) state->save(writer);
        throw;
    }
    if (writer.n_documents() == 0)
        fail("the input is empty: no document was found in %s%s", o.input[0].c_str(),
             o.input.size() > 1 ? " and the others" : "");
    writer.commit();
    if (state) state->finish();
    if (counts.spelled)
        print_line(stderr, format("note: %s a special token and %s",
                                  counted(counts.spelled, "place in the text spells", "places in the text spell").c_str(),
                                  o.parse_special_tokens
                                      ? "became that token"
                                      : "stayed text. HINT: --parse-special-tokens makes it that token, as in transformers"));
    if (counts.lost > 0) {
        const std::string places = tokenizer.of_bytes() ? counted(counts.lost, "byte")
                                                        : counted(counts.lost, "place in the text", "places in the text");
        print_line(stderr,
                   format("note: %s without a token in this tokenizer: dropped or made its unknown token, as in transformers",
                          places.c_str()));
    }
    print_line(stdout, format("%s.bin, %s.idx: %s, %s, %.3f bytes per token", o.output_prefix.c_str(), o.output_prefix.c_str(),
                              counted(writer.n_documents(), "document").c_str(), counted(counts.tokens, "token").c_str(),
                              (double)counts.bytes / (double)std::max<int64_t>(1, counts.tokens)));
    return 0;
}

// Measures how well a tokenizer fits texts: bytes and characters per token, tokens per word (words are separated by white
// space).
inline void report_tokenizer(const Tokenizer& tokenizer, DocumentReader& reader, int threads, bool tells) {
    std::vector<std::array<int64_t, 4>> counts;
    std::array<int64_t, 4> total{};  // tokens, bytes, characters, words
    for_each_chunk(
        reader, threads, "measuring",
        [&](const Chunk& chunk, size_t i) {
            std::vector<int> tokens;
            tokenizer.encode_append(chunk.text, tokens, false, chunk.continues);
            int64_t characters = 0, words = 0;
            bool space = true;
            for (unsigned char c : chunk.text) {
                characters += (c & 0xc0) != 0x80;
                const bool now = isspace(c);
                words += space && !now;
                space = now;
            }
            counts[i] = {(int64_t)tokens.size(), (int64_t)chunk.text.size(), characters, words};
        },
        [&](const Chunk&, size_t i) {
            for (int k = 0; k < 4; k++) total[k] += counts[i][k];
        },
        [&](size_t n) { counts.resize(n); }, tells);
    if (total[0] == 0) fail("the input is empty");
    print_line(stdout,
               format("%s: %s tokens; %.3f bytes per token, %.3f characters per token, %.3f tokens per word",
                      tokenizer.source().c_str(), with_commas(tokenizer.vocab_size()).c_str(), (double)total[1] / total[0],
                      (double)total[2] / total[0], (double)total[0] / std::max<int64_t>(1, total[3])));
}

inline int tokenizer_command(const TokenizerOptions& o) {
    const int threads = thread_count(o.threads);
    DocumentReader reader(text_input(o, o.report.empty() ? "tokenizer --input" : "tokenizer --report DIR --input", "file"));
    if (!o.report.empty()) {
        report_tokenizer(Tokenizer::load(o.report), reader, threads, true);
        return 0;
    }
    if (o.output.empty())
        fail_usage("the output is missing; HINT: --output DIR gets tokenizer.json (or --report TOKENIZER measures one)");
    if (o.vocab_size < 256 + (int)o.special_tokens.size() + 1)
        fail_usage("--vocab-size is %d; 256 bytes and %zu special tokens leave no room for a merge", o.vocab_size,
                   o.special_tokens.size());
    for (size_t i = 0; i < o.special_tokens.size(); i++) {
        const std::string& token = o.special_tokens[i];
        if (token.size() < 2)
            fail_usage(
                "--special-tokens has '%s'; a special token needs at least two bytes: every single byte is already a token",
                token.c_str());
        if (count_odd_bytes(token).invalid)
            fail_usage("--special-tokens has '%s', which is not UTF-8; tokenizer.json holds UTF-8 only",
                       printable(token).c_str());
        if (std::find(o.special_tokens.begin(), o.special_tokens.begin() + (long)i, token) !=
            o.special_tokens.begin() + (long)i)
            fail_usage("--special-tokens has '%s' twice", token.c_str());
    }
    make_directory(o.output);
    const PreTokenizer pre_tokenizer(pretokenizer_pattern(o.pre_tokenizer));
    PieceCounts counts;
    std::vector<PieceCounts> parts;
    for_each_chunk(
        reader, threads, "counting words",
        [&](const Chunk& chunk, size_t i) {
            parts[i].clear();
            count_pieces(pre_tokenizer, chunk.text, parts[i]);
        },
        [&](const Chunk&, size_t i) {
            for (const auto& [piece, count] : parts[i]) counts[piece] += count;
        },
        [&](size_t n) { parts.resize(n); });
    if (counts.empty())
        fail("the input is empty: nothing to learn a tokenizer from in %s%s", o.input[0].c_str(),
             o.input.size() > 1 ? " and the others" : "");
    BpeTrainer trainer(counts, o.special_tokens, o.pre_tokenizer);
    {
        Progress progress("learning merges", o.vocab_size, "tokens");
        trainer.train(o.vocab_size, o.min_frequency, &progress);
        progress.finish();
    }
    if (trainer.vocab_size() < o.vocab_size)
        print_line(stdout,
                   format("note: the text gave %s tokens of the %s asked for; HINT: more text, or a smaller --min-frequency",
                          with_commas(trainer.vocab_size()).c_str(), with_commas(o.vocab_size).c_str()));
    const std::string file = o.output + "/tokenizer.json";
    write_file_atomically(file, trainer.to_json().dump(1) + "\n");
    if (reader.only_files()) {
        DocumentReader again(reader.input());
        report_tokenizer(Tokenizer::load(file), again, threads, false);
    }
    return 0;
}
