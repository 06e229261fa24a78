// Tokenized text on disk: sequences of tokens ("documents"), mapped into memory and read in place.
//   TokenDataset          reads either format below, distinguished by magic number and by which files exist
//   TokenDatasetWriter    writes Megatron's, with PREFIX.meta.json (see tokenizer_identity.h) and, for conversations, a mask
//
// Megatron's indexed dataset, PREFIX.bin and PREFIX.idx, little endian:
//   .bin  the tokens of all sequences back to back
//   .idx  "MMIDIDX\0\0" (9 bytes) | u64 version = 1 | u8 type | u64 S | u64 D | i32 lengths[S] | i64 byte offsets in .bin [S]
//         | i64 doc_idx[D], the first sequence of each document, and S at the end | optional: i8 mode[S]
//   type  1 u8, 2 i8, 3 i16, 4 i32, 5 i64, 6 f64, 7 f32, 8 u16; tokens are u16 if the vocabulary is below 65500, else i32.
//   A GPT corpus has one sequence per document. Like Megatron's GPT dataset, the reader treats every sequence as a document.
// llm.c's shards: 256 x i32 {magic, version, number of tokens, 0 ...}, then the tokens.
//   magic 20240520, version 1: u16 (GPT-2); magic 20240801, version 7: u32 (Llama 3). Documents in a shard are separated by a
//   token (GPT-2: 50256); here the whole shard counts as one document.
//
// Conversations have a mask, PREFIX.mask: one byte for each token of PREFIX.bin, 1 if it is in the loss (an answer), 0 if it is
// only read. Megatron does not see it. A pair of answers is two consecutive documents: the prompt with the chosen answer, then
// with the rejected one.
//
// Every count and offset is checked against the sizes of the files before it is used, so that a truncated, foreign or hostile
// file gives an Error that names it. Numbers are loaded with memcpy, because the .idx does not align them.
#pragma once
#include <glob.h>

#include <algorithm>
#include <climits>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../base/check.h"
#include "../base/crc32c.h"
#include "../base/file.h"
#include "../base/text.h"
#include "../base/utf8.h"
#include "../tokenizer/tokenizer_identity.h"

// ---- numbers in files ------------------------------------------------------------------------------------------------------
template <class T>
T load_number(const char* p) {
    T value;
    memcpy(&value, p, sizeof value);
    return value;
}

// Megatron's type codes, and u32, which only llm.c's shards have.
enum class TokenType : uint8_t { u8 = 1, i8 = 2, i16 = 3, i32 = 4, i64 = 5, u16 = 8, u32 = 255 };

inline size_t bytes_per_token(TokenType type) {
    switch (type) {
        case TokenType::u8:
        case TokenType::i8: return 1;
        case TokenType::i16:
        case TokenType::u16: return 2;
        case TokenType::i32:
        case TokenType::u32: return 4;
        case TokenType::i64: return 8;
    }
    return 0;  // not a type of tokens
}

// out[i] = stored[i] as int. Numbers outside int become -1 or INT_MAX, which are outside any vocabulary.
template <class Stored>
void widen_tokens(const char* stored, size_t n, int* out) {
    for (size_t i = 0; i < n; i++) {
        // NOLINTNEXTLINE(bugprone-signed-char-misuse): a number, no character
        const int64_t token = load_number<Stored>(stored + i * sizeof(Stored));
        out[i] = (int)std::min<int64_t>(std::max<int64_t>(token, -1), INT_MAX);
    }
}

inline void read_tokens(TokenType type, const char* stored, size_t n, int* out) {
    switch (type) {
        case TokenType::u8: return widen_tokens<uint8_t>(stored, n, out);
        case TokenType::i8: return widen_tokens<int8_t>(stored, n, out);
        case TokenType::i16: return widen_tokens<int16_t>(stored, n, out);
        case TokenType::u16: return widen_tokens<uint16_t>(stored, n, out);
        case TokenType::i32: return widen_tokens<int32_t>(stored, n, out);
        case TokenType::u32: return widen_tokens<uint32_t>(stored, n, out);
        case TokenType::i64: return widen_tokens<int64_t>(stored, n, out);
    }
}

// ---- Megatron's .idx -------------------------------------------------------------------------------------------------------
constexpr char megatron_magic[9] = {'M', 'M', 'I', 'D', 'I', 'D', 'X', 0, 0};
constexpr size_t megatron_header_bytes = 9 + 8 + 1 + 8 + 8;

// A checked .idx: the token type, and the position of sequence i in the .bin.
class MegatronIndex {
public:
    // bin_path and bin_bytes: the file that must contain the sequences.
    MegatronIndex(const std::string& path, const std::string& bin_path, size_t bin_bytes) : file_(path) {
        check_header();
        check_sequences(bin_path, bin_bytes);
        check_documents();
    }
    TokenType type() const { return type_; }
    int64_t size() const { return (int64_t)n_; }
    int64_t n_tokens() const { return n_tokens_; }
    int length(int64_t i) const { return load_number<int32_t>(lengths_ + 4 * i); }
    uint64_t offset(int64_t i) const { return load_number<uint64_t>(offsets_ + 8 * i); }

private:
    void check_header() {
        const char *path = file_.path().c_str(), *p = file_.data();
        const size_t size = file_.size();
        if (size < sizeof megatron_magic || memcmp(p, megatron_magic, sizeof megatron_magic) != 0)
            fail(
                "%s is not a Megatron dataset index: it does not start with MMIDIDX; HINT: `train_gpt prepare` creates one "
                "from text",
                path);
        if (size < megatron_header_bytes)
            fail("%s is truncated: it has %zu bytes, but its header needs %zu", path, size, megatron_header_bytes);
        const uint64_t version = load_number<uint64_t>(p + 9);
        if (version != 1) fail("%s has version %llu; this program reads version 1", path, (unsigned long long)version);
        const int code = (uint8_t)p[17];
        type_ = (TokenType)code;
        if (code == 6 || code == 7) fail("%s holds floating point numbers (type %d), not tokens", path, code);
        if (code > 8 || bytes_per_token(type_) == 0) fail("%s has the unknown token type %d; known are 1-5 and 8", path, code);

        n_ = load_number<uint64_t>(p + 18);
        n_documents_ = load_number<uint64_t>(p + 26);
        // Compared by division, so that no count can overflow.
        size_t left = size - megatron_header_bytes;
        const bool sequences_fit = n_ <= left / 12;
        if (sequences_fit) left -= 12 * n_;
        if (!sequences_fit || n_documents_ > left / 8)
            fail(
                "%s is truncated or damaged: its header declares %llu sequences and %llu document borders, which exceed its "
                "%zu bytes; HINT: copy or prepare it again",
                path, (unsigned long long)n_, (unsigned long long)n_documents_, size);
        left -= 8 * n_documents_;
        if (left != 0 && left != n_)
            fail("%s has %zu bytes more than its header declares; HINT: copy or prepare it again", path, left);
        lengths_ = p + megatron_header_bytes;
        offsets_ = lengths_ + 4 * n_;
    }

    // Sequences must be in order without overlap, inside the .bin, and end where it ends.
    void check_sequences(const std::string& bin_path, size_t bin_bytes) {
        const uint64_t width = bytes_per_token(type_);
        const auto end = [&](int64_t i) { return offset(i) + width * (uint64_t)(int64_t)length(i); };
        int64_t bad = size(), total = 0;
#pragma omp parallel for schedule(static) reduction(min : bad) reduction(+ : total)
        for (int64_t i = 0; i < size(); i++) {
            const bool fits =
                length(i) >= 0 && offset(i) <= bin_bytes && (uint64_t)length(i) <= (bin_bytes - offset(i)) / width;
            if (!fits || (i > 0 && offset(i) < end(i - 1))) bad = std::min(bad, i);
            total += length(i);
        }
        if (bad < size())
            fail(
                "%s and %s do not match, or one is truncated: sequence %lld should have %d tokens at byte %llu, but %s has "
                "%zu bytes; HINT: copy or prepare both again",
                file_.path().c_str(), bin_path.c_str(), (long long)bad, length(bad), (unsigned long long)offset(bad),
                bin_path.c_str(), bin_bytes);
        const uint64_t used = n_ > 0 ? end(size() - 1) : 0;
        if (used != bin_bytes)
            fail("%s and %s do not match: the index ends at byte %llu of the %zu; HINT: copy or prepare both again",
                 file_.path().c_str(), bin_path.c_str(), (unsigned long long)used, bin_bytes);
        n_tokens_ = total;
    }

    void check_documents() const {
        const char* borders = offsets_ + 8 * n_;
        const auto border = [&](int64_t i) { return load_number<uint64_t>(borders + 8 * i); };
        const int64_t n = (int64_t)n_documents_;
        bool ok = n > 0 && border(0) == 0 && border(n - 1) == n_;
        int64_t falling = 0;
#pragma omp parallel for schedule(static) reduction(+ : falling)
        for (int64_t i = 1; i < n; i++) falling += border(i) < border(i - 1);
        if (!ok || falling)
            fail_damaged(file_.path(), format("its document borders do not increase from 0 to %llu", (unsigned long long)n_));
    }

    MappedFile file_;
    TokenType type_{};
    uint64_t n_ = 0, n_documents_ = 0;
    int64_t n_tokens_ = 0;
    const char *lengths_ = nullptr, *offsets_ = nullptr;
};

// ---- llm.c's shards --------------------------------------------------------------------------------------------------------
constexpr size_t shard_header_bytes = 1024;

// By the first bytes of a file.
inline bool has_shard_magic(std::string_view begin) {
    if (begin.size() < 4) return false;
    const int32_t magic = load_number<int32_t>(begin.data());
    return magic == 20240520 || magic == 20240801;
}

// Checks a shard's header; returns its type and number of tokens.
inline std::pair<TokenType, int> read_shard_header(const MappedFile& file) {
    const char* path = file.path().c_str();
    if (!has_shard_magic(file.text())) fail("%s is not an llm.c token shard (magic number 20240520 or 20240801)", path);
    if (file.size() < shard_header_bytes)
        fail("%s is truncated: it has %zu bytes, but its header needs %zu", path, file.size(), shard_header_bytes);
    const bool wide = load_number<int32_t>(file.data()) == 20240801;
    const int version = load_number<int32_t>(file.data() + 4), n = load_number<int32_t>(file.data() + 8), known = wide ? 7 : 1;
    if (version != known)
        fail("%s is an llm.c token shard of version %d; this program reads version %d of its kind", path, version, known);
    const TokenType type = wide ? TokenType::u32 : TokenType::u16;
    const size_t in_file = (file.size() - shard_header_bytes) / bytes_per_token(type);
    if (n < 0 || (size_t)n != in_file || file.size() != shard_header_bytes + in_file * bytes_per_token(type))
        fail("%s is truncated or damaged: its header declares %d tokens, the file has room for %zu", path, n, in_file);
    return {type, n};
}

// The name of a dataset without the ending of one of its files.
inline std::string without_extension(const std::string& path) {
    for (const std::string ending : {".bin", ".idx", mask_ending, origin_ending})
        if (path.size() > ending.size() && ends_with(path, ending)) return path.substr(0, path.size() - ending.size());
    return path;
}

// ---- either format ---------------------------------------------------------------------------------------------------------
class TokenDataset {
public:
    // Opens the dataset at a user's path: a prefix (x for x.bin and x.idx), x.bin or x.idx, a shard, or a pattern of shards.
    static TokenDataset open(const std::string& path) {
        TokenDataset d;
        d.name_ = path;
        const std::string prefix = without_extension(path);
        if (is_file(prefix + ".idx")) d.open_megatron(prefix);
        else if (is_file(path)) d.add_shard(path);
        else if (is_file(prefix + ".bin")) d.add_shard(prefix + ".bin");
        else if (path.find_first_of("*?[") != std::string::npos) d.open_pattern(path);
        else {
            if (is_folder(path)) refuse_folder(path);
            std::string similar = similar_path(prefix + ".idx");
            if (similar.empty()) similar = similar_path(prefix + ".bin");
            fail(
                "no data at '%s': there is no %s.idx with %s.bin, and no token shard of this name%s; HINT: `train_gpt prepare "
                "--input TEXT --output %s` makes them",
                path.c_str(), prefix.c_str(), prefix.c_str(),
                similar.empty() ? "" : ("; did you mean " + without_extension(similar) + "?").c_str(), prefix.c_str());
        }
        return d;
    }

    // Appends `other`, a dataset of shards like this one, to the stream.
    void append_shards(TokenDataset other) {
        CHECK(is_shards() && other.is_shards(), "appending %s to %s", other.name_.c_str(), name_.c_str());
        if (n_documents() > 0 && other.n_documents() > 0 && other.files_[0].type != files_[0].type)
            fail("%s and %s hold tokens of different tokenizers (GPT-2 and Llama 3)", name_.c_str(), other.name_.c_str());
        for (File& f : other.files_) files_.push_back(std::move(f));
        n_tokens_ += other.n_tokens_;
        name_ = format("%s and %zu more shards", files_[0].map.path().c_str(), files_.size() - 1);
    }

    const std::string& name() const { return name_; }
    bool is_shards() const { return !index_; }
    int64_t n_documents() const { return index_ ? index_->size() : (int64_t)files_.size(); }
    int64_t n_tokens() const { return n_tokens_; }
    int length(int64_t document) const { return index_ ? index_->length(document) : files_[document].n_tokens; }

    // Reads tokens [first, first + n) of a document. Numbers outside int become -1 or INT_MAX.
    void read(int64_t document, int64_t first, int64_t n, int* out) const {
        CHECK(document >= 0 && document < n_documents() && first >= 0 && n >= 0 && first + n <= length(document),
              "%s: tokens [%lld, %lld) of document %lld", name_.c_str(), (long long)first, (long long)(first + n),
              (long long)document);
        const File& file = files_[index_ ? 0 : document];
        const uint64_t start = index_ ? index_->offset(document) : shard_header_bytes;
        read_tokens(file.type, file.map.data() + start + first * bytes_per_token(file.type), n, out);
    }

    // CRC-32C of the first and of the last 65,536 tokens, which distinguishes data of the same size.
    uint32_t checksum_of_ends() const {
        constexpr int64_t most = 1 << 16;
        uint32_t sum = 0;
        std::vector<int> tokens;
        const auto add = [&](int64_t document, int64_t first, int64_t n) {
            tokens.resize((size_t)n);
            read(document, first, n, tokens.data());
            sum = crc32c(tokens.data(), (size_t)n * sizeof(int), sum);
            return n;
        };
        int64_t left = most;
        for (int64_t d = 0; d < n_documents() && left > 0; d++) left -= add(d, 0, std::min<int64_t>(left, length(d)));
        left = most;
        for (int64_t d = n_documents() - 1; d >= 0 && left > 0; d--) {
            const int64_t n = std::min<int64_t>(left, length(d));
            left -= add(d, length(d) - n, n);
        }
        return sum;
    }

    // The tokenizer that made the data, if known.
    const TokenizerIdentity& tokenizer() const { return tokenizer_; }

    // For conversations: the name of their template, if known, and for each token of a document 1 if it is in the loss, else 0.
    bool has_mask() const { return mask_ != nullptr; }
    const std::string& chat_template() const { return chat_template_; }
    bool has_pairs() const { return pairs_; }                      // of answers
    int64_t documents_together() const { return pairs_ ? 2 : 1; }  // that no split and no sample separates
    const char* loss_mask(int64_t document) const {
        return mask_->data() + index_->offset(document) / bytes_per_token(index_->type());
    }

    // The position of a token, for messages.
    std::string describe_position(int64_t document, int64_t token) const {
        if (!index_) return format("%s, token %lld", files_[document].map.path().c_str(), (long long)token);
        return format("%s, token %lld of document %lld", files_[0].map.path().c_str(), (long long)token, (long long)document);
    }

private:
    struct File {
        MappedFile map;
        TokenType type;
        int n_tokens;  // in a shard
    };

    static bool is_file(const std::string& path) { return is_regular(path); }
    [[noreturn]] static void refuse_folder(const std::string& path) {
        Strings inside;
        for (const std::string& name : names_in(path))
            if (ends_with(name, ".idx") && inside.size() < 5) inside.push_back(path + "/" + without_extension(name));
        fail("%s is a folder, and data is named by its PREFIX; HINT: %s", path.c_str(),
             inside.empty() ? "`train_gpt prepare --input TEXT --output PREFIX` makes data" : joined(inside).c_str());
    }
    void open_megatron(const std::string& prefix) {
        const std::string bin = prefix + ".bin";
        if (!is_file(bin)) fail("%s.idx exists, but %s, which contains the tokens, is missing", prefix.c_str(), bin.c_str());
        MappedFile map(bin);
        index_ = std::make_unique<MegatronIndex>(prefix + ".idx", bin, map.size());
        n_tokens_ = index_->n_tokens();
        files_.push_back({std::move(map), index_->type(), 0});
        const std::string file = prefix + origin_ending;
        if (is_file(prefix + mask_ending)) open_mask(prefix + mask_ending);
        if (!is_file(file)) return;
        const DataOrigin origin = read_origin(file);
        if (origin.documents != n_documents() || origin.tokens != n_tokens())
            fail(
                "%s does not match the data: it describes %lld documents and %lld tokens, %s.idx %lld and %lld; HINT: prepare "
                "again, or remove it if another program created the data",
                file.c_str(), (long long)origin.documents, (long long)origin.tokens, prefix.c_str(), (long long)n_documents(),
                (long long)n_tokens());
        tokenizer_ = origin.tokenizer;
        chat_template_ = origin.chat_template;
        pairs_ = origin.pairs;
        if (pairs_ && (chat_template_.empty() || n_documents() % 2))
            fail_damaged(file, "pairs of answers need an even number of conversations");
        if (!chat_template_.empty() && !mask_)
            fail(
                "%s%s is missing: it marks the tokens in the loss of these conversations; HINT: copy it, too, or prepare again",
                prefix.c_str(), mask_ending);
        if (chat_template_.empty() && mask_)
            fail("stale mask file: %s%s does not match the data, and %s does not contain conversations; HINT: move it away",
                 prefix.c_str(), mask_ending, file.c_str());
    }

    void open_mask(const std::string& path) {
        mask_ = std::make_unique<MappedFile>(path);
        const size_t tokens = files_[0].map.size() / bytes_per_token(index_->type());
        if (mask_->size() != tokens)
            fail("%s has %zu bytes, one for each of %zu tokens is expected; HINT: copy or prepare it again", path.c_str(),
                 mask_->size(), tokens);
        const std::string_view bytes = mask_->text();
        const auto bad = std::find_if(bytes.begin(), bytes.end(), [](char c) { return c != 0 && c != 1; });
        if (bad != bytes.end())
            fail("%s: byte %zu is %d; it must be 1 (in the loss) or 0; HINT: copy or prepare it again", path.c_str(),
                 (size_t)(bad - bytes.begin()), (uint8_t)*bad);
    }

    void add_shard(const std::string& path) {
        MappedFile map(path);
        if (!has_shard_magic(map.text()))
            fail(
                "%s is not an llm.c token shard and has no .idx next to it; HINT: `train_gpt prepare --input TEXT --output "
                "PREFIX` converts text to data",
                path.c_str());
        const auto [type, n] = read_shard_header(map);
        if (!files_.empty() && type != files_[0].type)
            fail("%s and %s hold tokens of different tokenizers (GPT-2 and Llama 3)", files_[0].map.path().c_str(),
                 path.c_str());
        files_.push_back({std::move(map), type, n});
        n_tokens_ += n;
    }

    void open_pattern(const std::string& pattern) {
        glob_t found;
        const int status = glob(pattern.c_str(), 0, nullptr, &found);
        std::vector<std::string> paths(found.gl_pathv, found.gl_pathv + (status == 0 ? found.gl_pathc : 0));  // sorted
        if (status == 0) globfree(&found);
        if (paths.empty()) fail("no files match '%s'", pattern.c_str());
        for (const std::string& path : paths) {
            if (is_file(without_extension(path) + ".idx"))
                fail(
                    "'%s' matches %s, which is not an llm.c token shard; HINT: patterns are for shards; name each Megatron "
                    "dataset",
                    pattern.c_str(), path.c_str());
            add_shard(path);
        }
    }

    std::string name_;
    std::unique_ptr<MegatronIndex> index_;  // null for shards
    std::vector<File> files_;               // the .bin, or the shards
    int64_t n_tokens_ = 0;
    TokenizerIdentity tokenizer_;
    std::unique_ptr<MappedFile> mask_;  // of conversations
    std::string chat_template_;
    bool pairs_ = false;
};

// ---- writing ---------------------------------------------------------------------------------------------------------------
// Writes PREFIX.bin and PREFIX.idx, byte for byte as Megatron's preprocess_data.py does (a sequence is a document), and, if the
// tokenizer is known, PREFIX.meta.json. Lengths are kept in the file, not in memory. Files get their final names in commit(),
// the .idx last: a dataset whose .idx exists is complete.
class TokenDatasetWriter {
public:
    // The position of an interruptible run, at the end of a document; a writer constructed with it resumes there.
    struct Kept {
        int64_t documents = 0, tokens = 0;
        FileSum bin, idx, mask;
    };
    // chat_template: of conversations, which are added with a mask. pairs: they are pairs of answers, each chosen one followed
    // by the rejected one.
    TokenDatasetWriter(const std::string& prefix, const TokenizerIdentity& tokenizer, const std::optional<Kept>& kept = {},
                       const std::string& chat_template = "", bool pairs = false)
        : owns_bin_(has_bin_of_killed_process(prefix)),
          bin_(writer(unclaimed(prefix, tokenizer.known()) + ".bin", kept ? &kept->bin : nullptr)),
          idx_(writer(prefix + ".idx", kept ? &kept->idx : nullptr)),
          bin_path_(prefix + ".bin"),
          idx_path_(prefix + ".idx"),
          origin_path_(prefix + origin_ending),
          mask_path_(prefix + mask_ending),
          tokenizer_(tokenizer),
          chat_template_(chat_template),
          pairs_(pairs),
          type_(tokenizer.vocab_size < 65500 ? TokenType::u16 : TokenType::i32) {
        for (const std::string& path : {bin_path_, idx_path_, origin_path_, mask_path_}) remove_unfinished(path);
        if (tokenizer.known()) origin_.emplace(origin_path_);
        if (!chat_template.empty() && kept) mask_.emplace(mask_path_, mask_path_ + partial_ending, kept->mask);
        else if (!chat_template.empty()) mask_.emplace(mask_path_);
        if (kept) {
            n_documents_ = kept->documents;
            n_tokens_ = kept->tokens;
        }
        if (idx_.written() == 0) idx_.write(no_header, sizeof no_header);
    }
    // For an unknown tokenizer.
    TokenDatasetWriter(const std::string& prefix, int vocab_size) : TokenDatasetWriter(prefix, {"", "", vocab_size}) {}

    // Appends tokens to the current document. loss_mask: theirs, for conversations.
    void add(const int* tokens, size_t n, const uint8_t* loss_mask = nullptr) {
        CHECK((loss_mask != nullptr) == mask_.has_value(), "a mask belongs to conversations, and to each of them");
        if (loss_mask) mask_->write(loss_mask, n);
        for (size_t i = 0; i < n; i++)
            CHECK(tokens[i] >= 0 && tokens[i] < tokenizer_.vocab_size, "token %d in a vocabulary of %d", tokens[i],
                  tokenizer_.vocab_size);
        if (type_ == TokenType::i32) bin_.write(tokens, 4 * n);
        else {
            narrow_.assign(tokens, tokens + n);
            bin_.write(narrow_.data(), 2 * n);
        }
        length_ += (int64_t)n;
        if (length_ > INT32_MAX)
            fail("document %s has more than %s tokens, which the format does not allow; HINT: --split-documents blank, or line",
                 with_commas(n_documents_ + 1).c_str(), with_commas(INT32_MAX).c_str());
    }
    void end_document() {
        const int32_t length = (int32_t)length_;
        idx_.write(&length, 4);
        n_documents_++;
        n_tokens_ += length_;
        length_ = 0;
    }
    int64_t n_documents() const { return n_documents_; }
    int64_t n_tokens() const { return n_tokens_ + length_; }

    // The current position, at the end of a document; keep() puts everything before it on the disk.
    Kept place() const { return {n_documents_, n_tokens_, bin_.sum(), idx_.sum(), mask_ ? mask_->sum() : FileSum()}; }
    void keep() {
        bin_.keep();
        idx_.keep();
        if (mask_) mask_->keep();
    }

    // The data of another writer, which kept its files without committing them, for appending to this writer's. tick(bytes) is
    // called after each piece of its tokens.
    struct Part {
        std::string prefix, ending;  // of its files
        Kept kept;
    };
    std::string unfinished_ending() const { return bin_.unfinished_ending(); }
    void append(const Part& part, const std::function<void(size_t)>& tick) {
        CHECK(length_ == 0, "the last document has not been ended");
        append_file(bin_, part.prefix + ".bin" + part.ending, part.kept.bin, 0, tick);
        append_file(idx_, part.prefix + ".idx" + part.ending, part.kept.idx, sizeof no_header);
        if (mask_) append_file(*mask_, part.prefix + mask_ending + part.ending, part.kept.mask, 0);
        n_documents_ += part.kept.documents;
        n_tokens_ += part.kept.tokens;
    }
    // The files are no longer needed: the destructor removes them.
    void discard() {
        bin_.discard();
        idx_.discard();
        if (mask_) mask_->discard();
    }

    void commit() {
        CHECK(length_ == 0, "the last document has not been ended");
        write_offsets();
        for (int64_t i = 0; i <= n_documents_; i++) idx_.write(&i, 8);
        char header[megatron_header_bytes];
        const uint64_t version = 1, n = (uint64_t)n_documents_, borders = n + 1;
        memcpy(header, megatron_magic, 9);
        memcpy(header + 9, &version, 8);
        header[17] = (char)type_;
        memcpy(header + 18, &n, 8);
        memcpy(header + 26, &borders, 8);
        idx_.overwrite(0, no_header, header, sizeof header);
        if (origin_) origin_->write(origin_text({tokenizer_, n_documents_, n_tokens_, chat_template_, pairs_}));
        bin_.check();
        idx_.check();
        if (mask_) mask_->check();
        if (origin_) origin_->check();
        if (file_exists(idx_path_)) unlink(bin_path_.c_str());  // first: without its index it would look like a user's file
        else if (file_exists(bin_path_) && !owns_bin_)
            print_line(stderr, "note: " + bin_path_ + ", which is not prepared data, is now " + set_aside(bin_path_));
        unlink(idx_path_.c_str());  // an old index must not be paired with the new tokens
        unlink(mask_path_.c_str());
        unlink(origin_path_.c_str());
        bin_.commit();
        try {
            if (mask_) mask_->commit();
            if (origin_) origin_->commit();
            idx_.commit();
        } catch (...) {
            for (const std::string& path : {bin_path_, mask_path_, origin_path_}) unlink(path.c_str());
            throw;
        }
    }

private:
    static FileWriter writer(const std::string& path, const FileSum* kept) {
        return kept ? FileWriter(path, path + partial_ending, *kept) : FileWriter(path);
    }
    // The prefix; fails if one of its files belongs to another program. known: whether the tokenizer is known.
    static const std::string& unclaimed(const std::string& prefix, bool known) {
        const std::string idx = prefix + ".idx", origin = prefix + origin_ending, mask = prefix + mask_ending;
        std::error_code none;
        const auto exists = [&](const std::string& path) {
            return std::filesystem::exists(std::filesystem::symlink_status(path, none));
        };
        const bool had_mask = exists(origin) && !read_origin(origin).chat_template.empty();
        if (exists(mask) && !had_mask)
            fail("%s was not written by train_gpt prepare; HINT: move it, or choose another --output-prefix", mask.c_str());
        if (exists(idx) && !is_index(idx))
            fail("%s is not an index of prepared data; HINT: move it, or choose another --output-prefix", idx.c_str());
        if (exists(idx) && known && !exists(origin))
            fail("%s has no %s, so it may be another program's; HINT: move or remove it, or choose another --output-prefix",
                 idx.c_str(), origin.c_str());
        return prefix;
    }
    // Whether PREFIX.bin belongs to a process that was killed before it renamed the index, which is complete.
    static bool has_bin_of_killed_process(const std::string& prefix) {
        const std::string bin = prefix + ".bin", idx = prefix + ".idx";
        if (!is_regular(bin) || file_exists(idx)) return false;
        const auto [dir, index] = folder_and_name(idx);
        for (const std::string& name : names_in(dir))
            if (name == index + partial_ending || (is_unfinished(name) && begins_with(name, index + temporary_mark)))
                if (is_index_of(dir + "/" + name, bin)) return true;
        return false;
    }

public:
    // Whether a file is the complete index of these tokens.
    static bool is_index_of(const std::string& path, const std::string& bin) {
        try {
            const MegatronIndex complete(path, bin, (size_t)std::filesystem::file_size(bin));
            return true;
        } catch (const Error&) {  // of other tokens, or not complete
            return false;
        }
    }

private:
    static bool is_index(const std::string& path) {
        return beginning_of(path, sizeof megatron_magic) == std::string(megatron_magic, sizeof megatron_magic);
    }
    // Appends a file, which must have this sum, without its first bytes.
    static void append_file(FileWriter& out, const std::string& path, const FileSum& expected, size_t header,
                            const std::function<void(size_t)>& tick = nullptr) {
        FileSum found;
        read_in_pieces(path, false, [&](const char* bytes, size_t n) {
            found.crc = crc32c(bytes, n, found.crc);
            const size_t skip = found.bytes < header ? std::min(n, header - found.bytes) : 0;
            found.bytes += n;
            out.write(bytes + skip, n - skip);
            if (tick) tick(n);
            return found.bytes <= expected.bytes;
        });
        check_written(path, expected, found);
    }
    // Offsets are the prefix sums of the lengths, which are read back a block at a time.
    void write_offsets() {
        std::vector<int32_t> lengths;
        int64_t offset = 0;
        for (int64_t first = 0; first < n_documents_; first += (int64_t)lengths.size()) {
            lengths.resize((size_t)std::min<int64_t>(n_documents_ - first, 1 << 16));
            idx_.read_back(megatron_header_bytes + 4 * first, lengths.data(), 4 * lengths.size());
            for (const int32_t length : lengths) {
                idx_.write(&offset, 8);
                offset += (int64_t)bytes_per_token(type_) * length;
            }
        }
    }

    static constexpr char no_header[megatron_header_bytes] = {};  // until commit()
    const bool owns_bin_;                                         // an earlier process of this program has written PREFIX.bin
    FileWriter bin_, idx_;
    std::optional<FileWriter> origin_, mask_;
    std::string bin_path_, idx_path_, origin_path_, mask_path_;
    TokenizerIdentity tokenizer_;
    std::string chat_template_;
    bool pairs_;
    TokenType type_;
    std::vector<uint16_t> narrow_;
    int64_t length_ = 0, n_documents_ = 0, n_tokens_ = 0;
};
