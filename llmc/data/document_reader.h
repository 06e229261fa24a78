// The documents of an input, file by file, in order. They are read in batches of bounded size, and each batch is worked on by
// all threads: memory does not grow with the corpus, and what comes out does not depend on the number of threads.
//   text         documents are the file, its parts between blank lines, or its lines
//   JSON lines   one JSON object per line, with a document under a key
// text_format.h detects the format and refuses all others. NUL and invalid UTF-8 are kept, counted and reported; a line that
// cannot be used is skipped, counted and shown; too many of either, and the input is refused.
#pragma once
#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "../base/check.h"
#include "../base/terminal.h"
#include "../base/utf8.h"
#include "text_format.h"

// What is read, and how.
struct TextInput {
    Strings files;
    std::string reading = "prepare --input";  // the command and its option that name the files, for messages
    std::string json_key = "text", split = "file", format = "";
    std::string max_bad_lines = "1%";
    bool allow_binary = false;
};

// A document, or a part of a long one.
struct Chunk {
    std::string text;
    bool ends_document = true;
    size_t file = 0;
    int64_t line = 0;  // line of its beginning; 0: (part of) a file that is one document
    bool is_json = false;
    std::string problem;  // why a line cannot be used
    OddBytes odd;
};

// Judges the input in order, file by file, and refuses it when too much of a file cannot be used. Odd bytes and bad lines are
// judged at the end of a file; in a long file, also after every megabyte or hundred bad lines.
class InputJudge {
public:
    explicit InputJudge(const TextInput& input) : input_(input) {
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
    bool take(const Chunk& chunk) {
        if (chunk.file != file_) {
            end_file();
            file_ = chunk.file;
        }
        now_.odd += chunk.odd;
        if (now_.odd.bytes >= 1 << 20) check_bytes();
        if (!chunk.is_json) return true;
        now_.lines++;
        if (chunk.problem.empty()) return !chunk.text.empty();
        now_.bad++;
        n_bad_++;
        if (shown_.size() < most_shown) shown_.push_back(where(chunk) + ": " + chunk.problem);
        if (!share_ ? (double)n_bad_ > limit_ : now_.bad >= 100 && above_share()) refuse_lines();
        return false;
    }
    // Also called at the end of the input.
    void end_file() {
        check_bytes();
        if (now_.lines > 0 && now_.bad == now_.lines) refuse_lines();
        if (share_ && now_.bad > (limit_ > 0) && above_share()) refuse_lines();
        odd_ += now_.odd;
        now_ = {};
    }

    std::string where(const Chunk& chunk) const {
        const std::string name = input_name(input_.files[chunk.file]);
        return chunk.line > 0 ? name + ":" + std::to_string(chunk.line) : name;
    }
    // What was accepted with a note, as lines for people.
    Strings notes() const {
        Strings lines;
        if (odd_.nul || odd_.invalid)
            lines.push_back(format("note: %s and %s that are not UTF-8 were kept unchanged",
                                   counted(odd_.nul, "NUL byte").c_str(), counted(odd_.invalid, "byte").c_str()));
        if (n_bad_ == 0) return lines;
        lines.push_back("note: " + counted(n_bad_, "line was", "lines were") + " left out:");
        for (const std::string& line : shown_) lines.push_back("  " + line);
        if (n_bad_ > (int64_t)shown_.size())
            lines.push_back(format("  and %s more", with_commas(n_bad_ - (int64_t)shown_.size()).c_str()));
        return lines;
    }

private:
    static constexpr size_t most_shown = 5;

    bool above_share() const { return (double)now_.bad > limit_ / 100 * (double)now_.lines; }
    void check_bytes() const {
        if (now_.odd.too_many() && !input_.allow_binary) refuse_odd_bytes(now_.odd, input_.files[file_], input_.reading);
    }
    [[noreturn]] void refuse_lines() const {
        std::string shown;
        for (const std::string& line : shown_) shown += (shown.empty() ? "" : "\n  ") + line;
        if (input_.max_bad_lines == "0") fail("%s; HINT: --on-bad-line skip skips lines that cannot be used", shown.c_str());
        std::string limit = now_.bad == now_.lines ? "" : ", more than --max-bad-lines " + input_.max_bad_lines;
        if (n_bad_ > now_.bad) limit = format(" (%s with those of other files)", with_commas(n_bad_).c_str()) + limit;
        fail(
            "%s of %s of %s cannot be used%s:\n  %s\nHINT: --json-keys KEY names the text's key, --max-bad-lines N "
            "leaves "
            "out more lines, --format text takes lines as they are",
            with_commas(now_.bad).c_str(), counted(now_.lines, "line").c_str(), input_name(input_.files[file_]).c_str(),
            limit.c_str(), shown.c_str());
    }

    struct Count {
        OddBytes odd;
        int64_t lines = 0, bad = 0;  // lines of JSON
    };
    TextInput input_;
    double limit_ = -1;  // in lines, or in % of a file's lines
    bool share_ = false;
    size_t file_ = 0;
    Count now_;     // of the current file
    OddBytes odd_;  // of all earlier files
    int64_t n_bad_ = 0;
    Strings shown_;
};

// Reads the documents of several files in order. JSON lines are passed on unparsed: open_line() finds the documents in them.
class DocumentReader {
public:
    explicit DocumentReader(TextInput input) : input_(std::move(input)) {
        if (input_.files.empty()) fail_usage("there is no text to read; HINT: --input FILE ...");
        // All files are checked before the first one is read, so that the last one is not refused after hours. Pipes are
        // checked later.
        for (const std::string& file : input_.files) {
            std::error_code error;
            const auto status = std::filesystem::status(file, error);
            if (file == "-" || (std::filesystem::exists(status) && !std::filesystem::is_regular_file(status))) {
                only_files_ = false;
                continue;
            }
            InputStream in(file);
            find_format(in);
            total_bytes_ += (int64_t)std::filesystem::file_size(file);
        }
    }

    const TextInput& input() const { return input_; }
    int64_t total_bytes() const { return only_files_ ? total_bytes_ : 0; }  // 0: not known
    int64_t bytes_read() const { return bytes_read_; }
    bool only_files() const { return only_files_; }  // no pipes: the input can be read again

    // The next document, JSON line, or part of a document; false at the end of the last file.
    bool next(Chunk& chunk) {
        while (in_ || open_next()) {
            chunk = {};
            chunk.file = file_index_ - 1;
            const bool found = json_lines_              ? next_json(chunk)
                               : input_.split == "file" ? next_part(chunk)
                                                        : next_lines(chunk, input_.split == "line");
            if (found) return true;
            in_.reset();
        }
        return false;
    }

    // What was read so far, for people: "a.txt as text, 2 files as JSON lines (the text under 'text')".
    std::string taken() const {
        std::string text;
        for (const TextFormat f : {TextFormat::text, TextFormat::json_lines}) {
            const auto& [count, first] = taken_[f == TextFormat::json_lines];
            if (count == 0) continue;
            text += (text.empty() ? "" : ", ") + (count == 1 ? input_name(first) : format("%d files", count));
            text += f == TextFormat::text ? " as text" : " as JSON lines (the text under '" + input_.json_key + "')";
        }
        return text;
    }

private:
    // The maximum size of a part of a document that is encoded at once. A part ends before a newline that follows an ASCII
    // letter or digit: every pre-tokenizer splits there anyway, so the tokens are those of the whole. Text without such a place
    // is split at any newline, or anywhere, once it is much longer.
    static constexpr size_t part_bytes = 1 << 20, longest_part_bytes = 16 << 20;

    TextFormat find_format(InputStream& in) const {
        if (!input_.allow_binary) refuse_other_formats(in.peek(first_bytes), in.name(), input_.reading);
        return find_text_format(in, input_.format, input_.reading);
    }
    bool open_next() {
        if (file_index_ >= input_.files.size()) return false;
        in_ = std::make_unique<InputStream>(input_.files[file_index_++]);
        const TextFormat found = find_format(*in_);
        json_lines_ = found == TextFormat::json_lines;
        if (taken_[json_lines_].first++ == 0) taken_[json_lines_].second = in_->name();
        line_ = 0;
        carried_.clear();
        return true;
    }

    // The next line with its newline, if it has one.
    bool read_line(std::string& line) {
        if (!in_->read_line(line)) return false;
        bytes_read_ += (int64_t)line.size();
        line_++;
        return true;
    }

    bool next_json(Chunk& chunk) {
        do
            if (!read_line(chunk.text)) return false;
        while (chunk.text.find_first_not_of(" \t\r\n") == std::string::npos);
        chunk.is_json = true;
        chunk.line = line_;
        return true;
    }

    bool next_part(Chunk& chunk) {
        chunk.text = std::move(carried_);
        carried_.clear();
        bool end = false;
        while (!end) {
            const size_t before = chunk.text.size();
            chunk.text.resize(before + part_bytes);
            const size_t n = in_->read(&chunk.text[before], part_bytes);
            chunk.text.resize(before + n);
            bytes_read_ += (int64_t)n;
            end = n < part_bytes;
            if (!end && cut(chunk.text)) break;
        }
        chunk.ends_document = end;
        // The last part may be followed by nothing: an empty text only means that the file has ended.
        return !chunk.text.empty();
    }

    // Moves the text after a good place to split into carried_.
    bool cut(std::string& text) {
        const auto at = [&](size_t i) {
            carried_ = text.substr(i);
            text.resize(i);
            return true;
        };
        for (size_t i = text.size() - 1; i > text.size() / 2; i--)
            if (text[i] == '\n' && (unsigned char)text[i - 1] < 0x80 && isalnum((unsigned char)text[i - 1])) return at(i);
        if (text.size() < longest_part_bytes) return false;
        const size_t newline = text.rfind('\n');
        return at(newline != std::string::npos && newline > 0 ? newline : text.size() - 1);
    }

    // A line, or the lines up to the next blank one. The last newline is a separator and is dropped.
    bool next_lines(Chunk& chunk, bool single) {
        std::string line;
        while (read_line(line)) {
            const bool blank = line.find_first_not_of(" \t\r\n") == std::string::npos;
            if (blank && (single || chunk.text.empty())) continue;
            if (blank) break;
            if (chunk.text.empty()) chunk.line = line_;
            chunk.text += line;
            if (single) break;
        }
        while (!chunk.text.empty() && (chunk.text.back() == '\n' || chunk.text.back() == '\r')) chunk.text.pop_back();
        return !chunk.text.empty();
    }

    TextInput input_;
    std::string carried_;
    size_t file_index_ = 0;
    std::unique_ptr<InputStream> in_;
    bool json_lines_ = false, only_files_ = true;
    std::array<std::pair<int, std::string>, 2> taken_;  // text and JSON lines: number of files, and the first one
    int64_t line_ = 0, total_bytes_ = 0, bytes_read_ = 0;
};

// Replaces a line of JSON by its document, or sets `problem`.
inline void open_line(Chunk& chunk, const std::string& key) {
    try {
        const size_t end = chunk.text.find_last_not_of("\r\n") + 1;
        auto j = nlohmann::json::parse(chunk.text.begin(), chunk.text.begin() + (std::ptrdiff_t)end);
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
        else chunk.text = std::move(j[key].get_ref<std::string&>());
    } catch (const nlohmann::json::exception& e) {
        std::string reason = e.what();
        reason.erase(0, reason.find(' ') + 1);  // drop the library's error number
        const std::string line = "line 1, ";    // refers to this text, which is one line of the file
        if (const size_t at = reason.find(line); at != std::string::npos) reason.erase(at, line.size());
        chunk.problem = format("it is not valid JSON: %.300s", reason.c_str());
    }
}

inline OddBytes count_odd_bytes(std::string_view text) {
    OddBytes odd;
    odd.bytes = (int64_t)text.size();
    for (size_t i = 0; i < text.size();) {
        constexpr uint64_t ones = 0x0101010101010101;
        uint64_t eight = 0;
        if (i + 8 <= text.size()) memcpy(&eight, text.data() + i, 8);
        if (((eight | (eight - ones)) & 128 * ones) == 0) {  // ASCII without NUL
            i += 8;
            continue;
        }
        odd.nul += text[i] == 0;
        const size_t n = valid_utf8_length((const unsigned char*)text.data() + i, text.size() - i);
        odd.invalid += n == 0;
        i += std::max<size_t>(n, 1);
    }
    return odd;
}

// Calls work(chunk, index) for all chunks of a batch in parallel, then finish(chunk, index) in order, batch by batch. tells:
// prints at the end what was read and what was skipped.
inline void for_each_chunk(DocumentReader& reader, int threads, const std::string& label,
                           const std::function<void(const Chunk&, size_t)>& work,
                           const std::function<void(const Chunk&, size_t)>& finish, const std::function<void(size_t)>& resize,
                           bool tells = true) {
    constexpr size_t batch_bytes = 16 << 20;
    Progress progress(label, reader.total_bytes(), "B");
    InputJudge judge(reader.input());
    std::vector<Chunk> batch;
    // An exception must not leave a parallel region: it is kept, and the remaining work is skipped.
    const auto in_parallel = [&](const auto& what) {
        std::atomic<bool> failed{false};
        std::exception_ptr failure;
#pragma omp parallel for schedule(dynamic, 8) num_threads(threads)
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
        while (bytes < batch_bytes && (more = reader.next(chunk))) {
            bytes += chunk.text.size() + 64;
            batch.push_back(std::move(chunk));
        }
        in_parallel([&](Chunk& c, size_t) {
            if (c.is_json) open_line(c, reader.input().json_key);
            if (c.problem.empty()) c.odd = count_odd_bytes(c.text);
        });
        batch.erase(std::remove_if(batch.begin(), batch.end(), [&](const Chunk& c) { return !judge.take(c); }), batch.end());
        if (!more) judge.end_file();
        resize(batch.size());
        in_parallel([&](const Chunk& c, size_t i) { work(c, i); });
        for (size_t i = 0; i < batch.size(); i++) finish(batch[i], i);
        progress.update(reader.bytes_read());
    }
    progress.finish();
    if (!tells) return;
    print_line(stderr, "input: " + reader.taken());
    for (const std::string& note : judge.notes()) print_line(stderr, note);
}
