// From text to tokens on disk, and from text to a tokenizer. Input is read in batches of bounded size, each batch is encoded by
// all threads, results are written in order: memory does not grow with the corpus, output does not depend on the threads.
//   .txt, and - for standard input   documents are the file, its parts between blank lines, or its lines
//   .jsonl                           one JSON object per line, its text under a key
// Texts may hold any bytes; NUL and bytes that are not UTF-8 are kept, counted and reported.
#pragma once
#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <exception>
#include <functional>
#include <string>
#include <vector>

#include "check.h"
#include "config.h"
#include "dataset.h"
#include "terminal.h"
#include "tokenizer.h"
#include "tokenizer_trainer.h"

// A document, or a part of a long one.
struct Chunk {
    std::string text;
    bool ends_document = true;
    std::string where;  // for messages: the file, and the line at which it begins
};

// Reads the documents of files one after another.
class DocumentReader {
public:
    DocumentReader(std::vector<std::string> files, std::string json_key, std::string split)
        : files_(std::move(files)), json_key_(std::move(json_key)), split_(std::move(split)) {
        if (files_.empty()) fail("there is no text to read; HINT: --input FILE ...");
        for (const std::string& file : files_) {
            if (file == "-") continue;
            std::error_code error;
            const auto size = std::filesystem::file_size(file, error);
            if (error) fail("cannot read %s: %s", file.c_str(), error.message().c_str());
            total_bytes_ += (int64_t)size;
        }
    }
    DocumentReader(const DocumentReader&) = delete;
    ~DocumentReader() { close(); }

    int64_t total_bytes() const { return total_bytes_; }  // of all files; what standard input brings is not known
    int64_t bytes_read() const { return bytes_read_; }

    // The next document or part; false at the end of the last file.
    bool next(Chunk& chunk) {
        while (true) {
            if (!in_ && !open_next()) return false;
            const bool found = json_lines_        ? next_json(chunk)
                               : split_ == "file" ? next_part(chunk)
                                                  : next_lines(chunk, split_ == "line");
            if (found) return true;
            close();
        }
    }

private:
    // Longest part of a document that is encoded as one. A part ends before a newline that follows an ASCII letter or digit:
    // there every pre-tokenizer cuts anyway, so the tokens are those of the whole. Text that offers no such place is cut at any
    // newline, or anywhere, once it is much longer.
    static constexpr size_t part_bytes = 1 << 20, longest_part_bytes = 16 << 20;

    bool open_next() {
        if (file_index_ >= files_.size()) return false;
        name_ = files_[file_index_++];
        in_ = name_ == "-" ? stdin : fopen(name_.c_str(), "rb");
        if (!in_) fail("cannot read %s: %s", name_.c_str(), strerror(errno));
        const std::string ending = ".jsonl";
        json_lines_ = name_.size() > ending.size() && name_.compare(name_.size() - ending.size(), ending.size(), ending) == 0;
        line_ = 0, carried_.clear();
        return true;
    }
    void close() {
        if (in_ && in_ != stdin) fclose(in_);
        in_ = nullptr;
    }

    // The next line with its newline, if it has one.
    bool read_line(std::string& line) {
        char* buffer = nullptr;
        size_t capacity = 0;
        const ssize_t n = getline(&buffer, &capacity, in_);
        if (n > 0) line.assign(buffer, (size_t)n);
        free(buffer);
        if (n <= 0 && ferror(in_)) fail("cannot read %s: %s", name_.c_str(), strerror(errno));
        if (n <= 0) return false;
        bytes_read_ += n, line_++;
        return true;
    }

    bool next_json(Chunk& chunk) {
        std::string line;
        while (read_line(line)) {
            if (line.find_first_not_of(" \t\r\n") == std::string::npos) continue;
            try {
                const auto j = nlohmann::json::parse(line);
                if (!j.is_object() || !j.contains(json_key_))
                    fail("%s:%lld has no key '%s'; HINT: --json-keys", name_.c_str(), (long long)line_, json_key_.c_str());
                if (!j[json_key_].is_string())
                    fail("%s:%lld: '%s' is not a text", name_.c_str(), (long long)line_, json_key_.c_str());
                chunk.text = j[json_key_].get<std::string>();
            } catch (const nlohmann::json::exception& e) {
                fail("%s:%lld is not valid JSON: %s", name_.c_str(), (long long)line_, e.what());
            }
            chunk.ends_document = true, chunk.where = format("%s:%lld", name_.c_str(), (long long)line_);
            if (!chunk.text.empty()) return true;
        }
        return false;
    }

    bool next_part(Chunk& chunk) {
        chunk.text = std::move(carried_), chunk.where = name_;
        carried_.clear();
        bool end = false;
        while (!end) {
            const size_t before = chunk.text.size();
            chunk.text.resize(before + part_bytes);
            const size_t n = fread(&chunk.text[before], 1, part_bytes, in_);
            if (n < part_bytes && ferror(in_)) fail("cannot read %s: %s", name_.c_str(), strerror(errno));
            chunk.text.resize(before + n), bytes_read_ += (int64_t)n;
            end = n < part_bytes;
            if (!end && cut(chunk.text)) break;
        }
        chunk.ends_document = end;
        // After the last part comes nothing: an empty text only means that the file ended before.
        return !chunk.text.empty();
    }

    // Moves what lies behind a good place to cut into carried_.
    bool cut(std::string& text) {
        const auto at = [&](size_t i) {
            carried_ = text.substr(i), text.resize(i);
            return true;
        };
        for (size_t i = text.size() - 1; i > text.size() / 2; i--)
            if (text[i] == '\n' && (unsigned char)text[i - 1] < 0x80 && isalnum((unsigned char)text[i - 1])) return at(i);
        if (text.size() < longest_part_bytes) return false;
        const size_t newline = text.rfind('\n');
        return at(newline != std::string::npos && newline > 0 ? newline : text.size() - 1);
    }

    // A line, or the lines up to the next blank one. The last newline is dropped: it separates, it is not text.
    bool next_lines(Chunk& chunk, bool single) {
        chunk.text.clear(), chunk.ends_document = true;
        std::string line;
        while (read_line(line)) {
            const bool blank = line.find_first_not_of(" \t\r\n") == std::string::npos;
            if (blank && (single || chunk.text.empty())) continue;
            if (blank) break;
            if (chunk.text.empty()) chunk.where = format("%s:%lld", name_.c_str(), (long long)line_);
            chunk.text += line;
            if (single) break;
        }
        while (!chunk.text.empty() && (chunk.text.back() == '\n' || chunk.text.back() == '\r')) chunk.text.pop_back();
        return !chunk.text.empty();
    }

    std::vector<std::string> files_;
    std::string json_key_, split_, name_, carried_;
    size_t file_index_ = 0;
    FILE* in_ = nullptr;
    bool json_lines_ = false;
    int64_t line_ = 0, total_bytes_ = 0, bytes_read_ = 0;
};

// Calls work(chunk, index) for all chunks of a batch in parallel, then finish(chunk, index) in order, batch by batch.
inline void for_each_chunk(DocumentReader& reader, int threads, const std::string& label,
                           const std::function<void(const Chunk&, size_t)>& work,
                           const std::function<void(const Chunk&, size_t)>& finish, const std::function<void(size_t)>& resize) {
    constexpr size_t batch_bytes = 16 << 20;
    Progress progress(label, reader.total_bytes(), "B");
    std::vector<Chunk> batch;
    bool more = true;
    while (more) {
        batch.clear();
        size_t bytes = 0;
        Chunk chunk;
        while (bytes < batch_bytes && (more = reader.next(chunk)))
            bytes += chunk.text.size() + 64, batch.push_back(std::move(chunk));
        resize(batch.size());
        // An exception must not leave a parallel region, and after one the rest is of no use.
        std::atomic<bool> failed{false};
        std::exception_ptr failure;
#pragma omp parallel for schedule(dynamic, 8) num_threads(threads)
        for (size_t i = 0; i < batch.size(); i++) try {
                if (!failed) work(batch[i], i);
            } catch (const Error& e) {
                if (!failed.exchange(true)) failure = std::make_exception_ptr(Error(batch[i].where + ": " + e.what()));
            } catch (...) {
                if (!failed.exchange(true)) failure = std::current_exception();
            }
        if (failure) std::rethrow_exception(failure);
        for (size_t i = 0; i < batch.size(); i++) finish(batch[i], i);
        progress.update(reader.bytes_read());
    }
    progress.finish();
}

inline int thread_count(int asked) { return asked > 0 ? asked : omp_get_max_threads(); }

// NUL bytes and bytes that are not part of valid UTF-8.
inline std::pair<int64_t, int64_t> count_odd_bytes(std::string_view text) {
    int64_t nul = 0, invalid = 0;
    for (size_t i = 0; i < text.size();) {
        nul += text[i] == 0;
        const size_t n = valid_utf8_length((const unsigned char*)text.data() + i, text.size() - i);
        invalid += n == 0, i += std::max<size_t>(n, 1);
    }
    return {nul, invalid};
}

// The tokens of a file's whole text, in memory.
inline std::vector<int> encode_file(const std::string& file, const Tokenizer& tokenizer, int threads) {
    DocumentReader reader({file}, "text", "file");
    std::vector<int> all;
    std::vector<std::vector<int>> tokens;
    for_each_chunk(
        reader, thread_count(threads), "preparing",
        [&](const Chunk& chunk, size_t i) { tokens[i].clear(), tokenizer.encode_append(chunk.text, tokens[i]); },
        [&](const Chunk&, size_t i) { all.insert(all.end(), tokens[i].begin(), tokens[i].end()); },
        [&](size_t n) { tokens.resize(n); });
    return all;
}

inline int prepare_command(const PrepareOptions& o) {
    if (o.output_prefix.empty()) fail("the output is missing; HINT: --output-prefix PREFIX writes PREFIX.bin and PREFIX.idx");
    if (o.tokenizer.empty()) fail("the tokenizer is missing; HINT: --tokenizer DIR, as written by train_gpt tokenizer");
    const Tokenizer tokenizer = Tokenizer::load(o.tokenizer);
    if (!o.no_append_eod && tokenizer.eod_id() < 0)
        fail(
            "%s has no end-of-document token (<|endoftext|>, <|end_of_text|> or </s>); HINT: --no-append-eod leaves documents "
            "without one",
            tokenizer.source().c_str());
    DocumentReader reader(o.input, o.json_keys, o.split_documents);
    if (const auto dir = std::filesystem::path(o.output_prefix).parent_path(); !dir.empty()) make_directory(dir.string());
    TokenDatasetWriter writer(o.output_prefix, tokenizer.vocab_size());
    std::vector<std::vector<int>> tokens;
    std::vector<std::pair<int64_t, int64_t>> odd;
    int64_t total = 0, nul = 0, invalid = 0;
    for_each_chunk(
        reader, thread_count(o.workers), "preparing",
        [&](const Chunk& chunk, size_t i) {
            tokens[i].clear();
            tokenizer.encode_append(chunk.text, tokens[i]);
            if (chunk.ends_document && !o.no_append_eod) tokens[i].push_back(tokenizer.eod_id());
            odd[i] = count_odd_bytes(chunk.text);
        },
        [&](const Chunk& chunk, size_t i) {
            writer.add(tokens[i].data(), tokens[i].size());
            if (chunk.ends_document) writer.end_document();
            total += (int64_t)tokens[i].size(), nul += odd[i].first, invalid += odd[i].second;
        },
        [&](size_t n) { tokens.resize(n), odd.resize(n); });
    if (writer.n_documents() == 0)
        fail("the input is empty: no document was found in %s%s", o.input[0].c_str(),
             o.input.size() > 1 ? " and the others" : "");
    writer.commit();
    if (nul || invalid)
        print_line(stdout, format("note: %s NUL bytes and %s bytes that are not UTF-8 were kept as they are",
                                  with_commas(nul).c_str(), with_commas(invalid).c_str()));
    print_line(stdout, format("%s.bin, %s.idx: %s documents, %s tokens, %.3f bytes per token", o.output_prefix.c_str(),
                              o.output_prefix.c_str(), with_commas(writer.n_documents()).c_str(), with_commas(total).c_str(),
                              (double)reader.bytes_read() / (double)std::max<int64_t>(1, total)));
    return 0;
}

// How well a tokenizer fits texts: bytes and characters per token, tokens per word (words are separated by white space).
inline void report_tokenizer(const Tokenizer& tokenizer, DocumentReader& reader, int threads) {
    std::vector<std::array<int64_t, 4>> counts;
    std::array<int64_t, 4> total{};  // tokens, bytes, characters, words
    for_each_chunk(
        reader, threads, "measuring",
        [&](const Chunk& chunk, size_t i) {
            std::vector<int> tokens;
            tokenizer.encode_append(chunk.text, tokens);
            int64_t characters = 0, words = 0;
            bool space = true;
            for (unsigned char c : chunk.text) {
                characters += (c & 0xc0) != 0x80;
                const bool now = isspace(c);
                words += space && !now, space = now;
            }
            counts[i] = {(int64_t)tokens.size(), (int64_t)chunk.text.size(), characters, words};
        },
        [&](const Chunk&, size_t i) {
            for (int k = 0; k < 4; k++) total[k] += counts[i][k];
        },
        [&](size_t n) { counts.resize(n); });
    if (total[0] == 0) fail("the input is empty");
    print_line(stdout,
               format("%s: %s tokens; %.3f bytes per token, %.3f characters per token, %.3f tokens per word",
                      tokenizer.source().c_str(), with_commas(tokenizer.vocab_size()).c_str(), (double)total[1] / total[0],
                      (double)total[2] / total[0], (double)total[0] / std::max<int64_t>(1, total[3])));
}

inline int tokenizer_command(const TokenizerOptions& o) {
    const int threads = thread_count(o.threads);
    DocumentReader reader(o.input, o.json_keys, "file");
    if (!o.report.empty()) {
        report_tokenizer(Tokenizer::load(o.report), reader, threads);
        return 0;
    }
    if (o.output.empty())
        fail("the output is missing; HINT: --output DIR gets tokenizer.json (or --report TOKENIZER measures one)");
    if (o.vocab_size < 256 + (int)o.special_tokens.size() + 1)
        fail("--vocab-size is %d; 256 bytes and %zu special tokens leave no room for a merge", o.vocab_size,
             o.special_tokens.size());
    for (size_t i = 0; i < o.special_tokens.size(); i++) {
        const std::string& token = o.special_tokens[i];
        if (token.size() < 2)
            fail("--special-tokens has '%s'; a special token needs two bytes or more: every single byte is a token already",
                 token.c_str());
        if (std::find(o.special_tokens.begin(), o.special_tokens.begin() + (long)i, token) !=
            o.special_tokens.begin() + (long)i)
            fail("--special-tokens has '%s' twice", token.c_str());
    }
    make_directory(o.output);
    const PreTokenizer pre_tokenizer(pretokenizer_pattern(o.pre_tokenizer));
    PieceCounts counts;
    std::vector<PieceCounts> parts;
    for_each_chunk(
        reader, threads, "counting words",
        [&](const Chunk& chunk, size_t i) { parts[i].clear(), count_pieces(pre_tokenizer, chunk.text, parts[i]); },
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
    DocumentReader again(o.input, o.json_keys, "file");
    if (again.total_bytes() > 0) report_tokenizer(Tokenizer::load(file), again, threads);
    return 0;
}
