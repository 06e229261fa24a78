// Which files and addresses an input's names stand for: files, folders, patterns, addresses, lists of these.
#pragma once
#include <glob.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "../base/check.h"
#include "../base/file.h"
#include "../base/terminal.h"
#include "../base/text.h"
#include "../tokenizer/tokenizer_identity.h"
#include "text_format.h"

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
        const bool known = !error || is_address(file.path);
        if (known && !seen.insert(error ? file.path : path.string()).second) repeated.push_back(file.path);
    }
    if (repeated.empty()) return;
    print_line(stderr, format("note: %s will be read more than once, %s among them",
                              counted((int64_t)repeated.size(), "file").c_str(), repeated[0].c_str()));
}

// The name of a rank's part of a data set, until all parts are joined: PREFIX.rank-1-of-4.
inline constexpr const char* rank_mark = ".rank-";
inline std::string part_prefix(const std::string& prefix, int rank, int ranks) {
    return rank == 0 ? prefix : prefix + rank_mark + std::to_string(rank) + "-of-" + std::to_string(ranks);
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
        if (begins_with(ending, rank_mark)) ending.erase(0, ending.find('.', 1));  // of a rank
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

// Refuses a folder that the library datasets wrote by save_to_disk: its files are Arrow streams.
inline void refuse_saved_dataset(const std::string& dir) {
    std::error_code error;
    const auto has = [&](const char* file) { return std::filesystem::exists(dir + "/" + file, error); };
    const bool several = has("dataset_dict.json");
    if (!several && !(has("state.json") && has("dataset_info.json"))) return;
    fail(
        "%s was written by datasets' save_to_disk, as Arrow streams; HINT: python3 -c 'import datasets, sys; "
        "datasets.load_from_disk(sys.argv[1])%s.to_json(\"text.jsonl\")' %s writes text.jsonl, which can be given",
        dir.c_str(), several ? "[\"train\"]" : "", shell_word(dir).c_str());
}

// The names with each list, @FILE, replaced by the lines in it. Blank lines and those that start with # are skipped.
inline Strings with_lists(const Strings& names) {
    std::error_code error;
    Strings all;
    for (const std::string& name : names) {
        if (name[0] != '@' || std::filesystem::exists(name, error)) {
            all.push_back(name);
            continue;
        }
        const std::string list = name.substr(1);
        if (list.empty() || is_address(list))
            fail_usage("%s is not a list; HINT: @FILE, where FILE has a path or address per line; @- is standard input",
                       name.c_str());
        const size_t before = all.size();
        InputStream in(list);
        int64_t n = 0;
        for (std::string line; in.read_line(line, 1 << 16);) {
            n++;
            line.erase(line.find_last_not_of(" \t\r\n") + 1);
            line.erase(0, line.find_first_not_of(" \t"));
            if (line.empty() || line[0] == '#') continue;
            const bool nests = line[0] == '@' && !std::filesystem::exists(line, error);
            const bool itself = std::filesystem::equivalent(nests ? line.substr(1) : line, list, error);
            if (itself || nests)
                fail("%s:%lld names %s; HINT: give each list to the command, as @FILE", input_name(list).c_str(), (long long)n,
                     itself ? "the list itself" : "a list, and lists do not nest");
            all.push_back(line);
        }
        if (all.size() == before)
            fail("the list %s names no file; HINT: one path or address per line", input_name(list).c_str());
    }
    return all;
}

// The files that the names match, in order. A folder matches all files in it and below, sorted by their names' bytes; a
// pattern (*.jsonl, quoted from the shell) and a list are expanded; addresses stay as they are. Folders and patterns exclude
// the files of the data set `writes`. Other contents of a folder are counted in `left_out`; a folder that cannot be read to
// its end is refused.
inline std::vector<InputFile> input_files(const Strings& names, LeftOut& left_out, const std::string& writes = "") {
    namespace fs = std::filesystem;
    const std::pair<std::string, std::string> written = {"file of the data that are written",
                                                         "files of the data that are written"};
    const OwnDataSet own(writes);
    std::vector<InputFile> files;
    std::error_code error;
    const auto add = [&](const std::string& name) {
        if (is_address(name) || !fs::is_directory(name, error)) {
            files.push_back({name, false});
            return;
        }
        refuse_saved_dataset(name);
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
        if (error) fail("cannot read folder %s, or one in it: %s", name.c_str(), error.message().c_str());
        if (files.size() == before)
            fail("folder %s holds no file that could be read%s%s", name.c_str(), rest.empty() ? "" : ", only ",
                 in_words(rest).c_str());
        for (const auto& [what, count] : rest) left_out[what] += count;
        std::sort(files.begin() + (std::ptrdiff_t)before, files.end(),
                  [](const InputFile& a, const InputFile& b) { return a.path < b.path; });
    };
    for (const std::string& name : with_lists(names)) {
        const bool pattern =
            !is_address(name) && name.find_first_of("*?[") != std::string::npos && !fs::exists(fs::symlink_status(name, error));
        if (!pattern) {
            add(name);
            continue;
        }
        glob_t found{};
        if (glob(name.c_str(), 0, nullptr, &found) != 0) {
            globfree(&found);
            fail("no file is called %s, and none matches it as a pattern%s", name.c_str(), did_you_mean_path(name).c_str());
        }
        for (size_t i = 0; i < found.gl_pathc; i++)
            if (own.has(found.gl_pathv[i])) left_out[written]++;
            else add(found.gl_pathv[i]);
        globfree(&found);
    }
    note_repeated(files);
    return files;
}
