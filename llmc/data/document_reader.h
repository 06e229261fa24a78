// The documents of an input, file by file, in order. They are read in batches of bounded size, and all threads work on each
// batch: memory does not grow with the corpus, and the output does not depend on the number of threads. The next files are read
// and decompressed ahead, each in a separate thread.
//   input_files     folders and patterns become files
//   DocumentReader  the documents of all files (document_source.h: of one file)
//   open_chunk      the document in a line of JSON or a response of a WARC file
//   InputJudge      NUL and invalid UTF-8 are kept, counted and reported; an unusable line is skipped, counted and
//                   shown; with too many of either, the input is refused
//   for_each_chunk  reads, opens, judges, and calls the work on each batch
// text_format.h detects the format and refuses all others.
#pragma once
#include <glob.h>

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
#include <vector>

#include "../base/check.h"
#include "../base/terminal.h"
#include "../base/utf8.h"
#include "dataset.h"
#include "document_source.h"
#include "json_scan.h"
#include "parquet.h"
#include "text_format.h"
#include "warc.h"

// ---- files -----------------------------------------------------------------------------------------------------------------
struct InputFile {
    std::string path;
    bool from_folder = false;  // found in a folder, not named by the user
};

// Unread files of folders, counted by kind; the key has the kind's name in singular and plural.
using LeftOut = std::map<std::pair<std::string, std::string>, int64_t>;

inline std::string in_words(const LeftOut& left_out) {
    return joined(left_out, [](const auto& row) { return counted(row.second, row.first.first, row.first.second); });
}

// A file matched by several names is read once per name: that may be intended, or a pattern may match too much.
inline void note_repeated(const std::vector<InputFile>& files) {
    std::set<std::string> seen;
    Strings repeated;
    for (const InputFile& file : files) {
        std::error_code error;
        const auto path = std::filesystem::canonical(file.path, error);
        if (!error && !seen.insert(path.string()).second) repeated.push_back(file.path);
    }
    if (repeated.empty()) return;
    print_line(stderr, format("note: %s will be read more than once, %s among them",
                              counted((int64_t)repeated.size(), "file").c_str(), repeated[0].c_str()));
}

// The data set that a command writes at a prefix, complete or not; the command does not read its files.
class OwnDataSet {
public:
    explicit OwnDataSet(const std::string& prefix) : prefix_(prefix.empty() ? "" : whole(prefix)) {}
    bool has(const std::filesystem::path& file) const {
        if (prefix_.empty()) return false;
        const std::string name = whole(file);
        if (name.compare(0, prefix_.size(), prefix_) != 0) return false;
        std::string ending = name.substr(prefix_.size());
        const size_t at = ending.rfind(partial_ending);
        if (at != std::string::npos && at + strlen(partial_ending) == ending.size()) ending.resize(at);
        return ending == ".bin" || ending == ".idx" || ending == mask_ending || ending == origin_ending ||
               ending == resume_ending;
    }

private:
    static std::string whole(const std::filesystem::path& path) {
        std::error_code error;
        return std::filesystem::weakly_canonical(std::filesystem::absolute(path, error), error).string();
    }
    std::string prefix_;
};

// The files that the names match, in order. A folder matches all files in it and below, sorted by their names' bytes; a pattern
// (*.jsonl, quoted from the shell) is expanded; both exclude the files of the data set `writes`. Other contents of a folder are
// counted in `left_out`; a folder that cannot be read to its end is refused.
inline std::vector<InputFile> input_files(const Strings& names, LeftOut& left_out, const std::string& writes = "") {
    namespace fs = std::filesystem;
    const std::pair<std::string, std::string> written = {"file of the data that are written",
                                                         "files of the data that are written"};
    const OwnDataSet own(writes);
    std::vector<InputFile> files;
    std::error_code error;
    const auto add = [&](const std::string& name) {
        if (!fs::is_directory(name, error)) {
            files.push_back({name, false});
            return;
        }
        const size_t before = files.size();
        LeftOut rest;
        auto it = fs::recursive_directory_iterator(name, error);
        while (!error && it != fs::recursive_directory_iterator()) {
            std::error_code ignored;
            const std::string file = it->path().filename().string();
            const bool is_folder = it->is_directory(ignored), is_link = it->is_symlink(ignored);
            if (file[0] == '.') {
                if (is_folder) it.disable_recursion_pending();
                rest[{"hidden file or folder", "hidden files or folders"}]++;
            } else if (is_folder && is_link) rest[{"link to a folder", "links to folders"}]++;
            else if (is_link && !it->exists(ignored)) rest[{"link to nothing", "links to nothing"}]++;
            else if (!is_folder && !it->is_regular_file(ignored)) rest[{"pipe or device", "pipes or devices"}]++;
            else if (is_unfinished(file)) rest[{"unfinished file", "unfinished files"}]++;
            else if (!is_folder && own.has(it->path())) rest[written]++;
            else if (!is_folder) files.push_back({it->path().string(), true});
            it.increment(error);
        }
        if (error) throw Unreadable("cannot read folder " + name + ", or one in it: " + error.message(), error.value());
        if (files.size() == before)
            fail("folder %s holds no file that could be read%s%s", name.c_str(), rest.empty() ? "" : ", only ",
                 in_words(rest).c_str());
        for (const auto& [what, count] : rest) left_out[what] += count;
        std::sort(files.begin() + (std::ptrdiff_t)before, files.end(),
                  [](const InputFile& a, const InputFile& b) { return a.path < b.path; });
    };
    for (const std::string& name : names) {
        const bool pattern = name.find_first_of("*?[") != std::string::npos && !fs::exists(fs::symlink_status(name, error));
        if (!pattern) {
            add(name);
            continue;
        }
        glob_t found{};
        if (glob(name.c_str(), 0, nullptr, &found) != 0) {
            globfree(&found);
            fail("no file is called %s, and none matches it as a pattern", name.c_str());
        }
        for (size_t i = 0; i < found.gl_pathc; i++)
            if (own.has(found.gl_pathv[i])) left_out[written]++;
            else add(found.gl_pathv[i]);
        globfree(&found);
    }
    note_repeated(files);
    return files;
}

// Judges the input in order, file by file, and refuses it if too much of a file is unusable. Odd bytes and bad lines are judged
// at the end of a file; in a long file, also after every megabyte or hundred bad lines.
class InputJudge {
public:
    // before: counts up to the start of the input.
    explicit InputJudge(const TextInput& input, size_t first_file = 0, const JudgedLines& before = {})
        : input_(input), file_(first_file), now_(before), some_good_(first_file > 0 || before.lines > before.bad) {
        size_t used = 0;
        try {
            limit_ = std::stod(input.max_bad_lines, &used);
        } catch (const std::exception&) {
        }
        share_ = input.max_bad_lines.substr(used) == "%";
        const bool valid = used > 0 && limit_ >= 0 && (share_ ? limit_ <= 100 : used == input.max_bad_lines.size());
        if (!valid)
            fail_usage("--max-bad-lines is '%s'; it must be a number of lines or a percentage: 20, 0.5%%",
                       input.max_bad_lines.c_str());
    }

    // Returns false if the chunk must be skipped.
    bool take(Chunk& chunk) {
        if (chunk.file != file_) {
            end_file();
            file_ = chunk.file;
        }
        chunk.before = now_;
        const bool good = judge(chunk);
        some_good_ |= good;
        return good;
    }
    // At the end of the input, which must contain something usable.
    void end() {
        check_bytes();
        if (!some_good_ && now_.bad_of_all > 0) refuse_lines();
        end_file();
    }
    // If the user gives an absolute number of lines, all of them may be bad.
    void end_file() {
        check_bytes();
        if (share_ && limit_ < 100) {
            if (now_.lines > 0 && now_.bad == now_.lines) refuse_lines();
            if (now_.bad > (limit_ > 0) && above_share()) refuse_lines();
        }
        odd_ += now_.odd;
        const int64_t bad_of_all = now_.bad_of_all;
        now_ = {};
        now_.bad_of_all = bad_of_all;
    }

    std::string where(const Chunk& chunk) const {
        const std::string name = input_name(input_.files[chunk.file]);
        return chunk.line > 0 ? name + ":" + std::to_string(chunk.line) : name;
    }
    // Notes about accepted input, as lines for people.
    Strings notes() const {
        Strings lines;
        if (odd_.nul || odd_.invalid)
            lines.push_back(format("note: %s and %s that are not UTF-8 %s", counted(odd_.nul, "NUL byte").c_str(),
                                   counted(odd_.invalid, "byte").c_str(), input_.invalid_bytes_become.c_str()));
        std::string left_out;
        for (const auto& [what, count] : left_out_)
            left_out += (left_out.empty() ? "" : ", ") + with_commas(count) + " " + what;
        if (!left_out.empty()) lines.push_back("note: left out: " + left_out);
        const int64_t bad = now_.bad_of_all;
        if (bad == 0) return lines;
        lines.push_back("note: " + counted(bad, "line was", "lines were") + " left out:");
        for (const std::string& line : shown_) lines.push_back("  " + line);
        if (bad > (int64_t)shown_.size())
            lines.push_back(format("  and %s more", with_commas(bad - (int64_t)shown_.size()).c_str()));
        return lines;
    }

private:
    static constexpr size_t most_shown = 5;

    bool judge(const Chunk& chunk) {
        now_.odd += chunk.odd;
        if (now_.odd.bytes >= 1 << 20) check_bytes();
        if (!chunk.left_out.empty()) {
            left_out_[chunk.left_out]++;
            return false;
        }
        if (!chunk.is_json) return true;
        now_.lines++;
        if (chunk.problem.empty()) {
            if (chunk.text.empty()) left_out_["empty documents"]++;
            return !chunk.text.empty();
        }
        now_.bad++;
        now_.bad_of_all++;
        if (shown_.size() < most_shown) shown_.push_back(where(chunk) + ": " + chunk.problem);
        if (!share_ ? (double)now_.bad_of_all > limit_ : now_.bad >= 100 && above_share()) refuse_lines();
        return false;
    }
    bool above_share() const { return (double)now_.bad > limit_ / 100 * (double)now_.lines; }
    void check_bytes() const {
        if (now_.odd.too_many() && !input_.allow_binary) refuse_odd_bytes(now_.odd, input_.files[file_], input_.reading);
    }
    [[noreturn]] void refuse_lines() const {
        std::string shown;
        for (const std::string& line : shown_) shown += (shown.empty() ? "" : "\n  ") + line;
        if (input_.max_bad_lines == "0")
            fail("%s; HINT: --on-bad-line skip --max-bad-lines N leaves out N lines that cannot be used", shown.c_str());
        std::string limit = now_.bad == now_.lines ? "" : ", more than --max-bad-lines " + input_.max_bad_lines;
        if (now_.bad_of_all > now_.bad)
            limit = format(" (%s with those of other files)", with_commas(now_.bad_of_all).c_str()) + limit;
        fail(
            "%s of %s of %s cannot be used%s:\n  %s\nHINT: --json-keys KEY names the key of the %s, --max-bad-lines N leaves "
            "out more lines%s",
            with_commas(now_.bad).c_str(), counted(now_.lines, "line").c_str(), input_name(input_.files[file_]).c_str(),
            limit.c_str(), shown.c_str(), input_.open_record ? "messages" : "text",
            input_.open_record ? "" : ", --format text takes lines as they are");
    }

    TextInput input_;
    double limit_ = -1;  // in lines, or in % of a file's lines
    bool share_ = false;
    size_t file_;
    JudgedLines now_;
    bool some_good_;  // something is usable
    OddBytes odd_;    // of all earlier files
    Strings shown_;
    std::map<std::string, int64_t> left_out_;
};

// ---- reading ---------------------------------------------------------------------------------------------------------------
// Reads a source ahead in a thread, into a queue of at most queue_bytes and one document.
class ReadAhead : public DocumentSource {
public:
    explicit ReadAhead(std::unique_ptr<DocumentSource> source) : source_(std::move(source)) {
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

// Reads the documents of several files in order. JSON is passed on unparsed: open_chunk() finds the documents in it.
class DocumentReader {
public:
    explicit DocumentReader(TextInput input) : input_(std::move(input)) {
        if (input_.files.empty()) fail_usage("there is no text to read; HINT: --input FILE ...");
        const Strings named = std::move(input_.files);
        input_.files.clear();
        // All files are checked before the first one is read, so that the last one is not refused after hours. Pipes are
        // checked later.
        for (const InputFile& file : input_files(named, left_out_, input_.writes)) {
            if (file.path == "-" || (file_exists(file.path) && !is_regular(file.path))) {
                only_files_ = false;
                input_.files.push_back(file.path);
                sizes_.push_back(-1);
                continue;
            }
            auto in = open_input(file.path);
            if (file.from_folder && leaves_out(*in)) continue;
            const TextFormat found = check_format(*in);
            const bool one_document = found == TextFormat::text && input_.whole_documents && input_.split == "file";
            if (found == TextFormat::parquet) open_source(std::move(in), found);
            input_.files.push_back(file.path);
            sizes_.push_back((int64_t)std::filesystem::file_size(file.path));
            total_bytes_ += sizes_.back();
            if (one_document && sizes_.back() > (int64_t)most_document_bytes) refuse_long_document(file.path, 1, input_.split);
        }
        if (input_.files.empty())
            fail("%s holds no text: %s", named[0].c_str(), (not_text_.empty() ? in_words(left_out_) : not_text_).c_str());
    }

    // With folders and patterns replaced by their files.
    const TextInput& input() const { return input_; }
    int64_t total_bytes() const {
        return only_files_ ? total_bytes_ : 0;
    }  // of the files on disk, compressed or not; 0: not known
    int64_t bytes_read() const { return bytes_of_read_files_ + (open_.empty() ? 0 : open_.front().source->position()); }
    bool only_files() const { return only_files_; }  // no pipes: the input can be read again

    // Call before the first next(): starts with this chunk of this file; before: an InputJudge's counts at that point.
    void begin_at(size_t file, int64_t chunk, const JudgedLines& before = {}) {
        next_file_ = file;
        begin_file_ = file;
        begin_chunk_ = chunk;
        before_ = before;
        for (size_t i = 0; i < file; i++) bytes_of_read_files_ += sizes_[i];
    }
    InputJudge judge() const { return InputJudge(input_, begin_file_, before_); }
    const std::vector<int64_t>& file_sizes() const { return sizes_; }  // in bytes; -1: a pipe

    // The next document, JSON line, or part of a document; false at the end of the last file.
    bool next(Chunk& chunk) {
        while (true) {
            while (open_.size() < most_open && next_file_ < input_.files.size() && (open_.empty() || sizes_[next_file_] >= 0))
                open_next();
            if (open_.empty()) return false;
            chunk = {};
            OpenFile& now = open_.front();
            if (now.source->next(chunk)) {
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
        for (const auto& [format_found, files] : taken_) {
            text +=
                (text.empty() ? "" : ", ") + (files.first == 1 ? input_name(files.second) : format("%d files", files.first));
            text += format_found == TextFormat::text           ? " as text"
                    : format_found == TextFormat::json_lines   ? " as JSON lines"
                    : format_found == TextFormat::json_array   ? " as a JSON array"
                    : format_found == TextFormat::json_objects ? " as JSON objects"
                    : format_found == TextFormat::parquet      ? " as Parquet"
                                                               : " as WARC";
            if (input_.open_record) text += " (conversations)";
            else if (format_found == TextFormat::parquet) text += " (the text in column '" + input_.json_key + "')";
            else if (format_found != TextFormat::text && format_found != TextFormat::warc)
                text += " (the text under '" + input_.json_key + "')";
        }
        return text;
    }
    // The contents of folders that were left out.
    Strings notes() const {
        Strings lines;
        if (!left_out_.empty()) lines.push_back("note: left out of folders: " + in_words(left_out_));
        if (!not_text_.empty()) lines.push_back("note: left out of folders: " + not_text_);
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
    TextFormat check_format(InputStream& in) const {
        if (input_.format.empty() && in.peek(4).substr(0, 4) == parquet_magic) return TextFormat::parquet;
        if (!input_.allow_binary) refuse_other_formats(in.peek(first_bytes), in.name(), input_.reading);
        const TextFormat found = find_text_format(in, input_.format);
        if (input_.open_record && (found == TextFormat::text || found == TextFormat::warc))
            fail(
                "%s holds no conversations: it is neither JSON nor Parquet; HINT: one object per line, with messages or prompt "
                "and completion; of pairs of answers with prompt, chosen and rejected",
                input_name(in.name()).c_str());
        return found;
    }
    void open_next() {
        const size_t file = next_file_++;
        auto in = open_input(input_.files[file]);
        const std::string name = in->name();
        const TextFormat found = check_format(*in);
        if (found == TextFormat::parquet && sizes_[file] < 0)
            fail("%s is Parquet, whose table of contents is at its end, and cannot be read from a pipe; HINT: give the file",
                 input_name(name).c_str());
        auto& taken = taken_[found];
        if (taken.first++ == 0) taken.second = name;
        std::unique_ptr<DocumentSource> source = open_source(std::move(in), found);
        if (sizes_[file] >= 0) source = std::make_unique<ReadAhead>(std::move(source));
        open_.push_back({file, std::move(source)});
    }
    std::unique_ptr<DocumentSource> open_source(std::unique_ptr<InputStream> in, TextFormat found) const {
        if (found == TextFormat::parquet) return std::make_unique<ParquetDocuments>(in->name(), input_);
        if (found == TextFormat::warc) return std::make_unique<WarcDocuments>(std::move(in), input_);
        if (begins_with(in->peek(3), byte_order_mark)) in->skip(byte_order_mark.size());
        if (found == TextFormat::text) return std::make_unique<TextDocuments>(std::move(in), input_);
        if (found == TextFormat::json_lines) return std::make_unique<JsonLineDocuments>(std::move(in), input_.most_bytes);
        return std::make_unique<JsonValueDocuments>(std::move(in), found == TextFormat::json_array);
    }

    TextInput input_;
    std::vector<int64_t> sizes_;  // of each file; -1: a pipe
    std::deque<OpenFile> open_;   // the current file, and the ones ahead
    size_t next_file_ = 0, begin_file_ = 0, shown_length_ = 0;
    int64_t begin_chunk_ = 0;
    JudgedLines before_;
    bool only_files_ = true;
    std::map<TextFormat, std::pair<int, std::string>> taken_;  // number of files, and the first one
    int64_t total_bytes_ = 0, bytes_of_read_files_ = 0, n_not_text_ = 0;
    LeftOut left_out_;
    std::string not_text_;
};

inline nlohmann::json parse_record(const Chunk& chunk) {
    const size_t end = chunk.text.find_last_not_of("\r\n") + 1;
    return nlohmann::json::parse(chunk.text.begin(), chunk.text.begin() + (std::ptrdiff_t)end);
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
        } else if (!j[key].is_string()) chunk.problem = format("'%s' is not a text but %s", key.c_str(), j[key].type_name());
        else {
            if (input.keep_fields && nested_deeper_than(j, JsonScan::most_levels + 1)) {
                chunk.problem = format("it is nested more than %d levels deep", JsonScan::most_levels);
                return;
            }
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
    if (chunk.is_json) try {
            record = parse_record(chunk);
            if (nested_deeper_than(record, JsonScan::most_levels + 1))
                chunk.problem = format("it is nested more than %d levels deep", JsonScan::most_levels);
        } catch (const nlohmann::json::exception& e) {
            chunk.problem = why_invalid(e);
        }
    else {
        chunk.is_json = true;  // judged like a line of JSON
        for (const auto& [name, value] : chunk.fields.members()) record[name] = nlohmann::json::parse(value);
    }
    if (chunk.problem.empty()) input.open_record(record, chunk);
}

// Replaces a chunk from a source by the document in it, or sets `problem` or `left_out`.
inline void open_chunk(Chunk& chunk, const TextInput& input) {
    if (!chunk.problem.empty() || !chunk.left_out.empty()) return;
    if (input.open_record) open_record(chunk, input);
    else if (chunk.is_json) open_json(chunk, input);
    else if (chunk.is_html) open_page(chunk, input.files[chunk.file]);
}

// Calls work(chunk, index) for all chunks of a batch in parallel, then finish(chunk, index) in order, batch by batch. tells:
// print a summary of the read and skipped input at the end.
inline void for_each_chunk(DocumentReader& reader, int threads, const std::string& label,
                           const std::function<void(const Chunk&, size_t)>& work,
                           const std::function<void(const Chunk&, size_t)>& finish, const std::function<void(size_t)>& resize,
                           bool tells = true) {
    Progress progress(label, reader.total_bytes(), "B");
    InputJudge judge = reader.judge();
    std::vector<Chunk> batch;
    // An exception must not leave a parallel region: it is kept, and the remaining work is skipped.
    const auto in_parallel = [&](const auto& what) {
        std::atomic<bool> failed{false};
        std::exception_ptr failure;
        const int at_a_time = (int)std::clamp<size_t>(batch.size() / (8 * (size_t)threads), 1, 8);
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
            if (c.problem.empty()) c.odd = count_odd_bytes(c.text);
        });
        batch.erase(std::remove_if(batch.begin(), batch.end(), [&](Chunk& c) { return !judge.take(c); }), batch.end());
        if (!more && !failure) judge.end();
        resize(batch.size());
        in_parallel([&](const Chunk& c, size_t i) { work(c, i); });
        for (size_t i = 0; i < batch.size(); i++) finish(batch[i], i);
        if (failure) std::rethrow_exception(failure);
        progress.update(reader.bytes_read());
    }
    progress.finish();
    if (!tells) return;
    print_line(stderr, "input: " + reader.taken());
    for (const std::string& note : reader.notes()) print_line(stderr, note);
    for (const std::string& note : judge.notes()) print_line(stderr, note);
}
