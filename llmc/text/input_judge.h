// Judges an input while it is read: whether too much of a file cannot be used.
#pragma once
#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "../base/check.h"
#include "../base/json.h"
#include "../base/text.h"
#include "document_source.h"

// An error's message up to its second line or its hint.
inline std::string reason_of(const Error& e) {
    const std::string text = e.what();
    return text.substr(0, std::min(text.find('\n'), text.find("; HINT")));
}

// Judges the input in order, file by file, and refuses it if too much of a file is unusable. Odd bytes and bad lines are judged
// at the end of a file; in a long file, also after every megabyte or hundred bad lines.
class InputJudge {
public:
    // before: the counts up to the start of the input, at first_file. first_of_share: the first of the files that this rank
    // reads. joined: other ranks read other files, whose counts add() adds before it judges.
    explicit InputJudge(const TextInput& input, size_t first_file = 0, const JudgedLines& before = {},
                        size_t first_of_share = 0, bool joined = false)
        : input_(input),
          joined_(joined),
          file_(first_file),
          now_(before),
          some_good_(first_file > first_of_share || before.lines > before.bad) {
        size_t used = 0;
        try {
            limit_ = std::stod(input.max_bad_lines, &used);
        } catch (const std::exception&) {
        }
        share_ = input.max_bad_lines.substr(used) == "%";
        const bool valid = used > 0 && limit_ >= 0 && (share_ ? limit_ <= 100 : used == input.max_bad_lines.size());
        refuse_value(!valid, "--max-bad-lines", input.max_bad_lines, "a number of lines or a percentage: 20, 0.5%");
    }

    // Returns false if the chunk must be skipped.
    bool take(Chunk& chunk) {
        if (chunk.file != file_) {
            end_file();
            file_ = chunk.file;
        }
        chunk.before = now_;
        if (left_out_files_.count(file_)) return false;
        const bool good = guarded([&] { return judge(chunk); }) && !left_out_files_.count(file_);
        some_good_ |= good;
        return good;
    }
    // At the end of the input, which must contain something usable.
    void end() {
        if (!input_.skip_bad_files) {
            check_bytes();
            if (!joined_ && !some_good_ && now_.bad_of_all > 0) refuse_lines();
        }
        end_file();
    }
    // If the user gives an absolute number of lines, all of them may be bad.
    void end_file() {
        if (!left_out_files_.count(file_))
            guarded([&] {
                check_bytes();
                if (share_ && limit_ < 100) {
                    if (now_.lines > 0 && now_.bad == now_.lines) refuse_lines();
                    if (now_.bad > (limit_ > 0) && above_share()) refuse_lines();
                }
                return true;
            });
        odd_ += now_.odd;
        const int64_t bad_of_all = now_.bad_of_all;
        now_ = {};
        now_.bad_of_all = bad_of_all;
    }

    // After end(): the counts of this rank's files, for add().
    nlohmann::json counts() const {
        return {{"odd", {odd_.bytes, odd_.nul, odd_.invalid, odd_.tags}},
                {"left_out", left_out_},
                {"left_out_files", left_out_files_},
                {"bad", now_.bad_of_all},
                {"shown", shown_},
                {"some_good", some_good_}};
    }
    // Adds the counts of later files.
    void add(const nlohmann::json& later) {
        const auto odd = later.at("odd").get<std::array<int64_t, 4>>();
        odd_ += {odd[0], odd[1], odd[2], odd[3]};
        for (const auto& [what, n] : later.at("left_out").get<std::map<std::string, int64_t>>()) left_out_[what] += n;
        left_out_files_.merge(later.at("left_out_files").get<std::map<size_t, std::string>>());
        now_.bad_of_all += later.at("bad").get<int64_t>();
        for (const std::string& line : later.at("shown").get<Strings>())
            if (shown_.size() < most_shown) shown_.push_back(line);
        some_good_ |= later.at("some_good").get<bool>();
    }
    // After the last add(): the limits that hold for all files together.
    void check_all() const {
        const bool too_many = !share_ && (double)now_.bad_of_all > limit_;
        if (!too_many && (some_good_ || now_.bad_of_all == 0)) return;
        std::string shown;
        for (const std::string& line : shown_) shown += "\n  " + line;
        fail(
            "%s of all files cannot be used%s:%s\nHINT: --json-keys KEY names the key of the %s, --max-bad-lines N skips "
            "more lines",
            counted(now_.bad_of_all, "line").c_str(),
            too_many ? (", more than --max-bad-lines " + input_.max_bad_lines).c_str() : "", shown.c_str(),
            input_.open_record ? "messages" : "text");
    }

    std::string where(const Chunk& chunk) const {
        const std::string name = input_name(input_.files[chunk.file]);
        return chunk.line > 0 ? name + ":" + std::to_string(chunk.line) : name;
    }
    // Notes about input that was accepted with a note, as lines for people.
    Strings notes() const {
        Strings lines;
        if (odd_.nul || odd_.invalid)
            lines.push_back(format("note: %s and %s that are not UTF-8 %s", counted(odd_.nul, "NUL byte").c_str(),
                                   counted(odd_.invalid, "byte").c_str(), input_.invalid_bytes_become.c_str()));
        if (!left_out_.empty())
            lines.push_back("note: left out: " +
                            joined(left_out_, [](const auto& row) { return with_commas(row.second) + " " + row.first; }));
        if (odd_.tags > odd_.bytes / 50)
            lines.push_back(
                format("note: %.0f%% of the text is markup tags (<p>...</p>), which were kept; HINT: web pages are read as "
                       "text from .html and WARC files",
                       100.0 * (double)odd_.tags / (double)odd_.bytes));
        for (const auto& [file, why] : left_out_files_)
            lines.push_back("note: the rest of " + input_name(input_.files[file]) + " was left out: " + why);
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
        if (!chunk.is_record) return true;
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
    // If f refuses a file, skips the rest of the file if the user wants that.
    template <class F>
    bool guarded(F f) {
        if (!input_.skip_bad_files) return f();
        try {
            return f();
        } catch (const Error& e) {
            left_out_files_[file_] = reason_of(e);
            return false;
        }
    }
    bool above_share() const { return (double)now_.bad > limit_ / 100 * (double)now_.lines; }
    void check_bytes() const {
        if (now_.odd.too_many() && !input_.allow_binary) refuse_odd_bytes(now_.odd, input_.files[file_], input_.reading);
    }
    [[noreturn]] void refuse_lines() const {
        std::string shown;
        for (const std::string& line : shown_) shown += (shown.empty() ? "" : "\n  ") + line;
        if (input_.max_bad_lines == "0")
            fail("%s; HINT: --on-bad-line skip --max-bad-lines N skips up to N bad lines", shown.c_str());
        std::string limit = now_.bad == now_.lines ? "" : ", more than --max-bad-lines " + input_.max_bad_lines;
        if (now_.bad_of_all > now_.bad)
            limit = format(" (%s including other files)", with_commas(now_.bad_of_all).c_str()) + limit;
        const bool too_long = !shown_.empty() && ends_with(shown_[0], std::string("longer than ") + most_document_name);
        if (too_long)
            fail(
                "%s of %s of %s cannot be used%s:\n  %s\nHINT: jq -r .%s %s >text.txt writes the texts as a text file, of any "
                "length",
                with_commas(now_.bad).c_str(), counted(now_.lines, "line").c_str(), input_name(input_.files[file_]).c_str(),
                limit.c_str(), shown.c_str(), input_.json_key.c_str(), shell_word(input_.files[file_]).c_str());
        fail(
            "%s of %s of %s cannot be used%s:\n  %s\nHINT: --json-keys KEY names the key of the %s, --max-bad-lines N skips "
            "more lines%s",
            with_commas(now_.bad).c_str(), counted(now_.lines, "line").c_str(), input_name(input_.files[file_]).c_str(),
            limit.c_str(), shown.c_str(), input_.open_record ? "messages" : "text",
            input_.open_record ? "" : ", --format text uses lines unchanged");
    }

    TextInput input_;
    double limit_ = -1;  // in lines, or in % of a file's lines
    bool share_ = false, joined_;
    size_t file_;
    JudgedLines now_;
    bool some_good_;  // something is usable
    OddBytes odd_;    // of all earlier files
    Strings shown_;
    std::map<std::string, int64_t> left_out_;
    std::map<size_t, std::string> left_out_files_;  // and why
};
