// The documents of an input, file by file, in order. They are read in batches of bounded size, and all threads work on each
// batch: memory does not grow with the corpus, and the output does not depend on the number of threads. The next files are read
// and decompressed ahead, each in a separate thread.
//   DocumentReader  the documents of all files (input_files.h: which; document_source.h: the documents of one). All files are
//                   judged by their first bytes before the first one is read
//   open_chunk      the document in a line of JSON, a page or a response of a WARC file
//   for_each_chunk  reads, opens, judges, and calls the work on each batch. Ranks may share the files (input_share.h)
// text_format.h detects the format and refuses all others.
#pragma once
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <system_error>
#include <thread>
#include <tuple>
#include <vector>

#include "../base/check.h"
#include "../base/progress.h"
#include "../base/terminal.h"
#include "../base/text.h"
#include "../base/utf8.h"
#include "document_source.h"
#include "encoding.h"
#include "input_files.h"
#include "input_judge.h"
#include "input_share.h"
#include "json_scan.h"
#include "parquet_documents.h"
#include "table_documents.h"
#include "text_format.h"
#include "warc.h"

// ---- reading ---------------------------------------------------------------------------------------------------------------
// Reads a source ahead in a thread, into a queue of at most queue_bytes and one document.
class ReadAhead : public DocumentSource {
public:
    // stop: ends a source that waits for a command, when this object ends.
    explicit ReadAhead(std::unique_ptr<DocumentSource> source, StopReading stop)
        : source_(std::move(source)), stop_(std::move(stop)) {
        try {
            thread_ = std::thread([this] { read(); });
        } catch (const std::system_error&) {  // no more threads: next() reads
        }
    }
    ~ReadAhead() override {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            stopped_ = true;
        }
        *stop_ = true;
        changed_.notify_all();
        if (thread_.joinable()) thread_.join();
    }
    int64_t position() const override { return thread_.joinable() ? position_ : source_->position(); }

    bool next(Chunk& chunk) override {
        if (!thread_.joinable()) return source_->next(chunk);
        while (at_ == batch_.chunks.size()) {
            std::unique_lock<std::mutex> lock(mutex_);
            changed_.wait(lock, [&] { return !queue_.empty() || ended_; });
            if (queue_.empty()) {
                if (failure_) std::rethrow_exception(failure_);
                return false;
            }
            batch_ = std::move(queue_.front());
            queue_.pop_front();
            queued_ -= batch_.bytes;
            position_ = batch_.position;
            at_ = 0;
            changed_.notify_all();
        }
        chunk = std::move(batch_.chunks[at_++]);
        return true;
    }

private:
    static constexpr size_t queue_bytes = 8 << 20, batch_bytes = 1 << 20;
    struct Batch {
        std::vector<Chunk> chunks;
        size_t bytes = 0;
        int64_t position = 0;
    };

    void read() {
        bool more = true;
        while (more) {
            Batch batch;
            std::exception_ptr failure;
            try {
                while (more && batch.bytes < batch_bytes) {
                    Chunk chunk;
                    more = source_->next(chunk);
                    if (!more) break;
                    batch.bytes += chunk.bytes();
                    batch.chunks.push_back(std::move(chunk));
                }
                batch.position = source_->position();
            } catch (...) {
                failure = std::current_exception();
                more = false;
            }
            std::unique_lock<std::mutex> lock(mutex_);
            changed_.wait(lock, [&] { return queued_ < queue_bytes || stopped_; });
            if (stopped_) return;
            queued_ += batch.bytes;
            queue_.push_back(std::move(batch));
            failure_ = failure;
            ended_ = !more;
            changed_.notify_all();
        }
    }

    std::unique_ptr<DocumentSource> source_;
    StopReading stop_;
    Batch batch_;  // in use
    size_t at_ = 0;
    int64_t position_ = 0;
    std::thread thread_;
    std::mutex mutex_;  // guards all members below
    std::condition_variable changed_;
    std::deque<Batch> queue_;
    size_t queued_ = 0;
    std::exception_ptr failure_;
    bool ended_ = false, stopped_ = false;
};

// Python writes NaN, Infinity and -Infinity, which JSON does not have; they become null. False: there are none.
inline bool replace_nan(std::string& json) {
    bool found = false, in_string = false;
    std::string out;
    for (size_t i = 0; i < json.size(); i++) {
        if (json[i] == '"') in_string = !in_string;
        if (in_string && json[i] == '\\' && i + 1 < json.size()) out += json[i++];
        if (!in_string && (json[i] == 'N' || json[i] == 'I' || json[i] == '-')) {
            size_t length = 0;
            for (const std::string_view word : {"NaN", "Infinity", "-Infinity"})
                if (json.compare(i, word.size(), word) == 0) length = word.size();
            if (length > 0) {
                out += "null";
                i += length - 1;
                found = true;
                continue;
            }
        }
        out += json[i];
    }
    json = std::move(out);
    return found;
}
inline nlohmann::json parse_record(const Chunk& chunk) {
    std::string text = chunk.text.substr(0, chunk.text.find_last_not_of("\r\n") + 1);
    try {
        return nlohmann::json::parse(text);
    } catch (const nlohmann::json::exception&) {
        if (!replace_nan(text)) throw;
    }
    return nlohmann::json::parse(text);
}
// A record that would take a hundred times its size in memory becomes a bad line.
inline bool is_too_large(Chunk& chunk, const TextInput& input) {
    constexpr size_t most_values = 1000000;
    const int levels = input.keep_fields || input.open_record ? JsonScan::most_levels : 512;  // of brackets in a value
    if (json_exceeds(chunk.text, levels + 1, SIZE_MAX)) chunk.problem = format("it is nested more than %d levels deep", levels);
    else if (json_exceeds(chunk.text, levels + 1, most_values))
        chunk.problem = format("it has more than %s values", with_commas(most_values).c_str());
    return !chunk.problem.empty();
}
inline std::string why_invalid(const nlohmann::json::exception& e) {
    std::string reason = json_problem(e);
    const std::string line = "line 1, ";  // refers to this text, which is one line of the file
    if (const size_t at = reason.find(line); at != std::string::npos) reason.erase(at, line.size());
    return "it is not valid JSON: " + reason;
}

// Replaces JSON by its document, or sets `problem`.
inline void open_json(Chunk& chunk, const TextInput& input) {
    const std::string& key = input.json_key;
    std::string text;
    JsonFields fields;
    if (JsonScan::find(chunk.text, key, text, input.keep_fields ? &fields : nullptr)) {
        chunk.text = std::move(text);
        chunk.fields = std::move(fields);
        return;
    }
    if (is_too_large(chunk, input)) return;
    try {
        auto j = parse_record(chunk);
        if (!j.is_object()) chunk.problem = format("it is not a JSON object but %s", j.type_name());
        else if (!j.contains(key)) {
            chunk.problem = format("it has no key '%s'", key.c_str());
            const char* next = "; its keys are ";
            for (const auto& [name, value] : j.items()) {
                chunk.problem += next + name.substr(0, 40);
                next = ", ";
            }
            if (chunk.problem.size() > 300) chunk.problem = chunk.problem.substr(0, 300) + " ...";
        } else if (!j[key].is_string()) chunk.problem = format("'%s' is not a string but %s", key.c_str(), j[key].type_name());
        else {
            chunk.text = std::move(j[key].get_ref<std::string&>());
            if (!input.keep_fields) return;
            for (const auto& [name, value] : j.items())
                if (name != key) chunk.fields.add(name, json_text(value));
        }
    } catch (const nlohmann::json::exception& e) {
        chunk.problem = why_invalid(e);
    }
}

// Replaces a record, from JSON or a row of Parquet, by its conversation, or sets `problem`.
inline void open_record(Chunk& chunk, const TextInput& input) {
    nlohmann::json record;
    if (chunk.holds == Chunk::json && is_too_large(chunk, input)) return;
    if (chunk.holds == Chunk::json) try {
            record = parse_record(chunk);
        } catch (const nlohmann::json::exception& e) {
            chunk.problem = why_invalid(e);
        }
    else {
        chunk.is_record = true;
        for (const auto& [name, value] : chunk.fields.members()) record[name] = nlohmann::json::parse(value);
    }
    if (chunk.problem.empty()) input.open_record(record, chunk);
}

// Reads the documents of several files in order. JSON is passed on unparsed: open_chunk() finds the documents in it.
class DocumentReader {
public:
    explicit DocumentReader(TextInput input) : input_(std::move(input)) {
        refuse_missing(input_.files.empty(), "the text to read", "--input FILE ...");
        check_encoding(input_.encoding);
        const Strings named = std::move(input_.files);
        input_.files.clear();
        // All files are judged by their first bytes before the first one is read, so that the last one is not refused after
        // hours, nor one after another. Pipes are judged when they are read.
        const std::vector<InputFile> files = input_files(named, left_out_, input_.writes);
        several_ = files.size() > 1;
        for (const InputFile& file : files) try {
                add(file);
            } catch (const Error& e) {
                refused_.emplace_back(file.path, e.what());
                if (refused_.size() == 1) is_usage_error_ = dynamic_cast<const UsageError*>(&e) != nullptr;
            } catch (const Unreadable& e) {
                if (may_pass(e.error)) throw;  // its disk or its network does not answer now
                refused_.emplace_back(file.path, e.what());
            }
        n_refused_at_start_ = refused_.size();
        if (!refused_.empty() && !input_.skip_bad_files) refuse_files(named);
        if (input_.files.empty())
            fail("%s holds no text: %s", named[0].c_str(),
                 (!refused_.empty()   ? refused_[0].second
                  : not_text_.empty() ? in_words(left_out_)
                                      : not_text_)
                     .c_str());
        if (const std::string unused = is_local() ? unused_option() : ""; !unused.empty())
            fail_usage("%s; HINT: omit it", unused.c_str());
    }

    // With folders and patterns replaced by their files.
    const TextInput& input() const { return input_; }
    int64_t total_bytes() const {
        return is_local() ? total_bytes_ : 0;
    }  // of the files on disk, compressed or not; 0: not known
    int64_t bytes_read() const { return bytes_of_read_files_ + (open_.empty() ? 0 : open_.front().source->position()); }
    // Some files are neither text nor JSON, or in another encoding.
    bool converts() const { return converts_; }
    bool can_be_read_again() const { return !has_pipes_; }
    bool is_local() const { return !has_pipes_ && !has_addresses_; }  // files only, whose sizes are known

    // Before the first next(): starts with this chunk of this file; before: an InputJudge's counts up to there.
    void begin_at(size_t file, int64_t chunk, const JudgedLines& before = {}) {
        next_file_ = file;
        begin_file_ = file;
        begin_chunk_ = chunk;
        before_ = before;
        for (size_t i = first_of_share_; i < file; i++) bytes_of_read_files_ += std::max<int64_t>(0, sizes_[i]);
    }
    // Before begin_at() and next(): reads only a rank's files.
    void read_share(InputShare& share) {
        if (has_pipes_)
            fail_usage("%s has a pipe, which ranks cannot share; HINT: give files, or omit mpirun", input_.reading.c_str());
        share_ = &share;
        const std::vector<int64_t> equal(sizes_.size(), 1);  // sizes of addresses are not known
        std::tie(first_of_share_, end_of_share_) =
            InputShare::files_of(has_addresses_ ? equal : sizes_, share.rank(), share.size());
        begin_at(first_of_share_, 0);
    }
    InputShare* share() const { return share_; }
    std::pair<size_t, size_t> files_of_share() const { return {first_of_share_, std::min(end_of_share_, sizes_.size())}; }
    InputJudge judge() const { return InputJudge(input_, begin_file_, before_, first_of_share_, share_ != nullptr); }
    const std::vector<int64_t>& file_sizes() const { return sizes_; }  // in bytes; -1: a pipe or an address

    // The next document, JSON line, or part of a document; false at the end of the last file.
    bool next(Chunk& chunk) {
        while (true) {
            const size_t end = files_of_share().second;
            while (open_.size() < most_open && next_file_ < end && (open_.empty() || sizes_[next_file_] >= 0)) open_next();
            if (open_.empty()) return false;
            chunk = {};
            OpenFile& now = open_.front();
            if (next_of(now, chunk)) {
                chunk.file = now.file;
                chunk.number = now.n_chunks++;
                if (chunk.file != begin_file_ || chunk.number >= begin_chunk_) return true;
                continue;
            }
            bytes_of_read_files_ += open_.front().source->position();
            open_.pop_front();
        }
    }

    // The input read so far, for people: "a.txt as text, 2 files as JSON lines (the text under 'text')".
    std::string taken() const {
        std::string text;
        for (const auto& [kind, files] : taken_) {
            text +=
                (text.empty() ? "" : ", ") + (files.first == 1 ? input_name(files.second) : format("%d files", files.first));
            text += std::string(" as ") + format_name(kind.first);
            if (input_.open_record) text += " (conversations)";
            else if (!kind.second.empty()) text += " (the text in column '" + kind.second + "')";
            else if (is_json(kind.first)) text += " (the text under '" + input_.json_key + "')";
            if (kind.first == TextFormat::html) text += " (the text of pages, without boilerplate)";
        }
        return text;
    }
    // What taken() and notes() report of this rank's files, for add().
    nlohmann::json counts() const {
        nlohmann::json taken = nlohmann::json::array(), refused = nlohmann::json::array();
        for (const auto& [kind, files] : taken_) taken.push_back({(int)kind.first, kind.second, files.first, files.second});
        for (size_t i = n_refused_at_start_; i < refused_.size(); i++)
            refused.push_back({refused_[i].first, refused_[i].second});
        return {{"taken", taken}, {"refused", refused}};
    }
    // Adds later files.
    void add(const nlohmann::json& later) {
        for (const auto& row : later.at("taken")) {
            auto& taken = taken_[{(TextFormat)row.at(0).get<int>(), row.at(1).get<std::string>()}];
            if (taken.first == 0) taken.second = row.at(3).get<std::string>();
            taken.first += row.at(2).get<int>();
        }
        for (const auto& row : later.at("refused"))
            refused_.emplace_back(row.at(0).get<std::string>(), row.at(1).get<std::string>());
    }
    // The contents of folders that were left out.
    Strings notes() const {
        Strings lines;
        if (!left_out_.empty()) lines.push_back("note: skipped in folders: " + in_words(left_out_));
        if (!not_text_.empty()) lines.push_back("note: skipped in folders: " + not_text_);
        if (!guessed_.empty())
            lines.push_back("note: read in another encoding, as it was found in the text: " + guessed_ +
                            "; HINT: --encoding names it");
        if (const std::string unused = unused_option(); !unused.empty()) lines.push_back("note: " + unused);
        if (refused_.empty()) return lines;
        lines.push_back(format("note: %s left out:", counted((int64_t)refused_.size(), "file was", "files were").c_str()));
        for (size_t i = 0; i < std::min(refused_.size(), most_shown); i++) lines.push_back("  " + refused_[i].second);
        if (refused_.size() > most_shown)
            lines.push_back(format("  and %s more", with_commas((int64_t)(refused_.size() - most_shown)).c_str()));
        return lines;
    }

private:
    static constexpr size_t most_open = 4;  // files read at the same time, including those ahead
    struct OpenFile {
        size_t file;
        std::unique_ptr<DocumentSource> source;
        int64_t n_chunks = 0;
    };

    // True if a file of a folder is not text; notes it.
    bool leaves_out(InputStream& in) {
        const FileSignature* found =
            input_.allow_binary ? nullptr : find_signature(in.peek(first_bytes).substr(0, first_bytes));
        if (!found || found->bytes == parquet_magic) return false;
        if (++n_not_text_ <= 5) {
            not_text_ += (not_text_.empty() ? "" : ", ") + input_name(in.name()) + " (" + found->name + ")";
        } else {
            not_text_.resize(shown_length_);
            not_text_ += format(" and %s more", with_commas(n_not_text_ - 5).c_str());
        }
        if (n_not_text_ <= 5) shown_length_ = not_text_.size();
        return true;
    }
    // A given option without effect, as every file has another format than it applies to; "" if there is none.
    std::string unused_option() const {
        static constexpr std::tuple<const char*, bool (*)(TextFormat), const char*> rows[] = {
            {"json-keys", is_of_records, "JSON, Parquet, CSV or TSV"},
            {"on-bad-line", is_of_records, "JSON, Parquet, CSV or TSV"},
            {"max-bad-lines", is_of_records, "JSON, Parquet, CSV or TSV"},
            {"split-documents", [](TextFormat f) { return f == TextFormat::text; }, "plain text"},
            {"encoding", [](TextFormat f) { return f != TextFormat::parquet && f != TextFormat::warc; }, "text"}};
        for (const auto& [option, applies, to] : rows)
            if (std::count(input_.given.begin(), input_.given.end(), option) &&
                std::none_of(formats_.begin(), formats_.end(), applies))
                return format("--%s has no effect: no file of %s is %s", option, input_.reading.c_str(), to);
        return "";
    }
    static bool is_of_records(TextFormat f) { return is_json(f) || is_table(f); }
    // Judges a file by its first bytes and adds it.
    void add(const InputFile& file) {
        const bool address = is_address(file.path);
        if (address || file.path == "-" || (file_exists(file.path) && !is_regular(file.path))) {
            if (address) input_.command.check(file.path);
            (address ? has_addresses_ : has_pipes_) = true;
            converts_ |= address;
            input_.files.push_back(file.path);
            sizes_.push_back(-1);
            return;
        }
        auto in = open_input(file.path);
        if (file.from_folder && leaves_out(*in)) return;
        in = decoded(std::move(in), true);
        const TextFormat found = check_format(*in);
        formats_.insert(found);
        const auto bytes = (int64_t)std::filesystem::file_size(file.path);
        const bool one_document = found == TextFormat::text && input_.whole_documents && input_.split == "file";
        if (one_document && bytes > (int64_t)most_document_bytes) refuse_long_document(file.path, 1, input_.split);
        check_beginning(std::move(in), found);
        converts_ |= (found != TextFormat::text && !is_json(found)) || n_guessed_ > 0 ||
                     (!input_.encoding.empty() && input_.encoding != "auto");
        input_.files.push_back(file.path);
        sizes_.push_back(bytes);
        total_bytes_ += bytes;
    }
    // Refuses a file if its first bytes show a table of contents or a header without the text's column, bytes that are not
    // text, or JSON without the text's key.
    void check_beginning(std::unique_ptr<InputStream> in, TextFormat found) {
        const std::string_view first = in->peek(first_bytes);
        const bool at_end = first.size() < first_bytes;
        const bool text = found != TextFormat::parquet && found != TextFormat::warc && found != TextFormat::html;
        if (text && !input_.allow_binary) {
            const std::string_view whole = at_end ? first : first.substr(0, whole_characters(std::string(first)));
            const OddBytes odd = count_odd_bytes(whole);
            if (odd.too_many() && odd.nul + odd.invalid > 8)
                refuse_odd_bytes(odd, in->name(), input_.reading, guess_encoding(first));
        }
        if (found == TextFormat::json_lines && several_ && input_.max_bad_lines == "1%") check_lines(*in);
        if (is_table(found)) open_source(std::move(in), found);
    }
    // Refuses JSON if none of its first lines is usable. For a single file the judge shows more.
    void check_lines(InputStream& in) const {
        std::string_view first = without_byte_order_mark(in.peek(first_bytes));
        std::string problem;
        for (int n = 0; n < 16; n++) {
            const size_t end = first.find('\n');
            if (end == std::string_view::npos) break;
            Chunk chunk;
            chunk.text = first.substr(0, end);
            chunk.holds = Chunk::json;
            first.remove_prefix(end + 1);
            if (chunk.text.find_first_not_of(" \t\r") == std::string::npos) continue;
            input_.open_record ? open_record(chunk, input_) : open_json(chunk, input_);
            if (chunk.problem.empty()) return;
            if (problem.empty()) problem = chunk.problem;
        }
        if (!problem.empty())
            fail("%s: none of its first lines can be used: %s; HINT: --json-keys KEY names the key of the %s",
                 in.name().c_str(), problem.c_str(), input_.open_record ? "messages" : "text");
    }
    // The stream as UTF-8, if it is a text in an encoding that is named, or shows in it. checks: notes it.
    std::unique_ptr<InputStream> decoded(std::unique_ptr<InputStream> in, bool checks = false) {
        const std::string_view first = in->peek(first_bytes);
        std::string encoding = input_.encoding;
        if (encoding.empty() || begins_with(first, parquet_magic) || begins_with(first, "WARC/")) return in;
        const FileSignature* other = find_signature(first.substr(0, first_bytes));
        if (other && std::string_view(other->name).substr(0, 4) != "UTF-") return in;
        if (encoding == "auto") {
            const OddBytes odd = count_odd_bytes(first);
            encoding = other || odd.too_many() ? guess_encoding(first) : "";
            if (encoding.empty() || markup::begins_as_html(first)) return in;
            if (checks && ++n_guessed_ <= most_shown)
                guessed_ += (guessed_.empty() ? "" : ", ") + input_name(in->name()) + " (" + encoding + ")";
            else if (checks && n_guessed_ == most_shown + 1) guessed_ += " and others";
        }
        const std::string name = in->name();
        return std::make_unique<InputStream>(name, std::make_unique<EncodedSource>(std::move(in), encoding));
    }
    // Reports all of them at once, and how to continue without them.
    [[noreturn]] void refuse_files(const Strings& named) const {
        if (refused_.size() == 1) {
            const bool others = !input_.files.empty() || named.size() > 1 || named[0] != refused_[0].first;
            const std::string text = refused_[0].second + (others ? "; --skip-bad-files skips such files" : "");
            is_usage_error_ ? fail_usage("%s", text.c_str()) : fail("%s", text.c_str());
        }
        std::string rows;
        for (size_t i = 0; i < std::min(refused_.size(), most_listed); i++) rows += "\n  " + refused_[i].second;
        if (refused_.size() > most_listed)
            rows += format("\n  and %s more", with_commas((int64_t)(refused_.size() - most_listed)).c_str());
        fail("%s cannot be read:%s\nHINT: --skip-bad-files skips such files, with a note",
             counted((int64_t)refused_.size(), "file").c_str(), rows.c_str());
    }

    static const char* format_name(TextFormat f) {
        switch (f) {
            case TextFormat::text: return "text";
            case TextFormat::json_lines: return "JSON lines";
            case TextFormat::json_array: return "a JSON array";
            case TextFormat::json_objects: return "JSON objects";
            case TextFormat::parquet: return "Parquet";
            case TextFormat::warc: return "WARC";
            case TextFormat::html: return "HTML";
            case TextFormat::csv: return "CSV";
            case TextFormat::tsv: return "TSV";
            case TextFormat::wiki: return "articles of WikiExtractor";
        }
        return "";
    }
    TextFormat check_format(InputStream& in) const {
        const std::string_view first = in.peek(first_bytes);
        if (input_.format.empty() && begins_with(first, parquet_magic)) return TextFormat::parquet;
        if (!input_.allow_binary && input_.format != "html") refuse_other_formats(first, in.name(), input_.reading);
        const TextFormat found = find_text_format(in, input_.format);
        if (found == TextFormat::text && input_.format.empty() && !input_.allow_binary)
            refuse_other_names(first, in.name(), input_.reading);
        if (input_.open_record && !is_json(found) && !is_table(found))
            fail(
                "%s holds no conversations: it is neither JSON nor a table; HINT: one object per line, with messages or prompt "
                "and completion; of pairs of answers with prompt, chosen and rejected",
                input_name(in.name()).c_str());
        return found;
    }
    // An address is checked only now. --skip-bad-files skips it like a file, but not because its download failed.
    void open_next() {
        const size_t file = next_file_++;
        try {
            open(file);
        } catch (const AddressUnreadable&) {
            throw;
        } catch (const Error& e) {
            if (!input_.skip_bad_files || !is_address(input_.files[file])) throw;
            refused_.emplace_back(input_.files[file], e.what());
        }
    }
    void open(size_t file) {
        const std::string& path = input_.files[file];
        const bool address = is_address(path);
        const auto stop = std::make_shared<std::atomic<bool>>(false);
        auto in =
            address
                ? decompressed(std::make_unique<InputStream>(path, std::make_unique<AddressSource>(path, input_.command, stop)))
                : open_input(path);
        in = decoded(std::move(in), address);
        const std::string name = in->name();
        const TextFormat found = check_format(*in);
        formats_.insert(found);
        if (found == TextFormat::parquet && sizes_[file] < 0)
            fail(
                "%s is Parquet, which has its table of contents at the end and cannot be read from a pipe or an address; HINT: "
                "give a file",
                input_name(name).c_str());
        std::string column;
        std::unique_ptr<DocumentSource> source = open_source(std::move(in), found, &column);
        auto& taken = taken_[{found, column}];
        if (taken.first++ == 0) taken.second = name;
        if (sizes_[file] >= 0 || address) source = std::make_unique<ReadAhead>(std::move(source), stop);
        open_.push_back({file, std::move(source)});
    }
    // column: gets the name of the text's column in a table.
    std::unique_ptr<DocumentSource> open_source(std::unique_ptr<InputStream> in, TextFormat found,
                                                std::string* column = nullptr) const {
        if (found == TextFormat::parquet) {
            if (column) *column = input_.json_key;
            return std::make_unique<ParquetDocuments>(in->name(), input_);
        }
        if (found == TextFormat::warc) return std::make_unique<WarcDocuments>(std::move(in), input_);
        if (found == TextFormat::html) return std::make_unique<PageDocuments>(std::move(in));
        if (begins_with(in->peek(3), byte_order_mark)) in->skip(byte_order_mark.size());
        if (found == TextFormat::text) return std::make_unique<TextDocuments>(std::move(in), input_);
        if (found == TextFormat::wiki) return std::make_unique<WikiDocuments>(std::move(in), input_);
        if (found == TextFormat::csv || found == TextFormat::tsv) {
            auto table = std::make_unique<TableDocuments>(std::move(in), input_, found == TextFormat::tsv ? '\t' : '\0');
            if (column) *column = table->column();
            return table;
        }
        if (found == TextFormat::json_lines) return std::make_unique<JsonLineDocuments>(std::move(in), input_.most_bytes);
        return std::make_unique<JsonValueDocuments>(std::move(in), found == TextFormat::json_array);
    }
    // Damage ends its file, if the user wants that.
    bool next_of(OpenFile& file, Chunk& chunk) {
        if (!input_.skip_bad_files) return file.source->next(chunk);
        try {
            return file.source->next(chunk);
        } catch (const AddressUnreadable&) {
            throw;
        } catch (const Error& e) {
            refused_.emplace_back(input_.files[file.file], "the rest of a file: " + std::string(e.what()));
            return false;
        }
    }

    static constexpr size_t most_listed = 20, most_shown = 5;
    std::vector<std::pair<std::string, std::string>> refused_;  // files, and why
    bool is_usage_error_ = false, several_ = false, converts_ = false;
    size_t n_guessed_ = 0, n_refused_at_start_ = 0;
    std::string guessed_;
    std::set<TextFormat> formats_;  // of all files judged so far
    TextInput input_;
    std::vector<int64_t> sizes_;  // of each file; -1: a pipe or an address
    std::deque<OpenFile> open_;   // the current file, and the ones ahead
    size_t next_file_ = 0, begin_file_ = 0, shown_length_ = 0;
    int64_t begin_chunk_ = 0;
    InputShare* share_ = nullptr;  // null: one process reads all files
    size_t first_of_share_ = 0, end_of_share_ = SIZE_MAX;
    JudgedLines before_;
    bool has_pipes_ = false, has_addresses_ = false;
    std::map<std::pair<TextFormat, std::string>, std::pair<int, std::string>> taken_;  // by format and column: files, the first
    int64_t total_bytes_ = 0, bytes_of_read_files_ = 0, n_not_text_ = 0;
    LeftOut left_out_;
    std::string not_text_;
};

// Replaces a chunk from a source by the document in it, or sets `problem` or `left_out`.
inline void open_chunk(Chunk& chunk, const TextInput& input) {
    if (!chunk.problem.empty() || !chunk.left_out.empty()) return;
    if (input.open_record) open_record(chunk, input);
    else if (chunk.holds == Chunk::json) open_json(chunk, input);
    else if (chunk.holds == Chunk::response) open_page(chunk, input.files[chunk.file]);
    else if (chunk.holds == Chunk::page) {
        const std::string page = std::move(chunk.text);
        chunk.text.clear();
        open_html(chunk, page, "", input.files[chunk.file]);
    }
}

// Rank 0 gets the counts of all ranks, and judges them together.
inline void join_counts(InputShare& share, DocumentReader& reader, InputJudge& judge) {
    const Strings all = share.gather(json_text(nlohmann::json{{"reader", reader.counts()}, {"judge", judge.counts()}}));
    if (share.rank() > 0) return;
    for (size_t r = 1; r < all.size(); r++) {
        const nlohmann::json j = nlohmann::json::parse(all[r]);
        reader.add(j.at("reader"));
        judge.add(j.at("judge"));
    }
    judge.check_all();
}

// Calls work(chunk, index) for all chunks of a batch in parallel, then finish(chunk, index) in order, batch by batch. tells:
// print a summary of the read and skipped input at the end.
inline void for_each_chunk(DocumentReader& reader, int threads, const std::string& label,
                           const std::function<void(const Chunk&, size_t)>& work,
                           const std::function<void(const Chunk&, size_t)>& finish, const std::function<void(size_t)>& resize,
                           bool tells = true) {
    InputShare* const share = reader.share();
    Progress progress(label, reader.total_bytes(), "B");
    InputJudge judge = reader.judge();
    std::vector<Chunk> batch;
    // An exception must not leave a parallel region: it is kept, and the remaining work is skipped.
    const auto in_parallel = [&](const auto& what) {
        std::atomic<bool> failed{false};
        std::exception_ptr failure;
        [[maybe_unused]] const int at_a_time = (int)std::clamp<size_t>(batch.size() / (8 * (size_t)threads), 1, 8);
#pragma omp parallel for schedule(dynamic, at_a_time) num_threads(threads)
        for (size_t i = 0; i < batch.size(); i++) try {
                if (!failed) what(batch[i], i);
            } catch (const Error& e) {
                if (!failed.exchange(true)) failure = std::make_exception_ptr(Error(judge.where(batch[i]) + ": " + e.what()));
            } catch (...) {
                if (!failed.exchange(true)) failure = std::current_exception();
            }
        if (failure) std::rethrow_exception(failure);
    };
    bool more = true;
    while (more) {
        batch.clear();
        size_t bytes = 0;
        Chunk chunk;
        std::exception_ptr failure;  // of reading: earlier chunks are processed first
        try {
            while (bytes < reader.input().batch_bytes && (more = reader.next(chunk))) {
                bytes += chunk.bytes();
                batch.push_back(std::move(chunk));
            }
        } catch (const Error&) {
            failure = std::current_exception();
        }
        in_parallel([&](Chunk& c, size_t) {
            open_chunk(c, reader.input());
            if (!c.problem.empty()) return;
            c.odd = count_odd_bytes(c.text);
            c.odd.tags = markup::count_markup(c.text);
        });
        batch.erase(std::remove_if(batch.begin(), batch.end(), [&](Chunk& c) { return !judge.take(c); }), batch.end());
        if (!more && !failure) judge.end();
        resize(batch.size());
        in_parallel([&](const Chunk& c, size_t i) { work(c, i); });
        for (size_t i = 0; i < batch.size(); i++) finish(batch[i], i);
        if (failure) std::rethrow_exception(failure);
        progress.update(share ? share->read(reader.bytes_read()) : reader.bytes_read());
    }
    if (share) share->finish(reader.bytes_read(), [&](int64_t bytes) { progress.update(bytes); });
    progress.finish();
    if (share) join_counts(*share, reader, judge);
    if (!tells) return;
    print_line(stderr, "input: " + reader.taken());
    for (const std::string& note : reader.notes()) print_line(stderr, note);
    for (const std::string& note : judge.notes()) print_line(stderr, note);
}
