// train_gpt runs [FOLDER ...]: the training runs in these folders, a line each, from their log.jsonl. Reads only.
#pragma once
#include <sys/stat.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "../base/check.h"
#include "../base/file.h"
#include "../base/json.h"
#include "../base/similar.h"
#include "../base/terminal.h"
#include "../base/text.h"
#include "../options/options.h"
#include "../report/report.h"
#include "../report/run_log.h"

namespace detail {

struct ListedRun {
    std::string path;
    RunLog log;
};

// Adds the runs in a folder, at most `depth` folders below it. A run's own folders hold no other runs.
inline void find_runs(const std::string& folder, int depth, std::vector<ListedRun>& runs) {
    namespace fs = std::filesystem;
    std::error_code error;
    const std::string log = folder + "/log.jsonl";
    if (struct stat st; stat(log.c_str(), &st) == 0 && S_ISREG(st.st_mode)) {
        try {
            runs.push_back({folder, read_log(log)});
            runs.back().log.last_news = st.st_mtime;
        } catch (const std::exception& e) {
            print_line(stderr, "warning: " + std::string(e.what()) + "; it is not listed");
        }
        return;
    }
    if (depth == 0) return;
    std::vector<std::string> inner;
    for (const auto& entry : fs::directory_iterator(folder, fs::directory_options::skip_permission_denied, error))
        if (const std::string name = entry.path().filename().string();
            name[0] != '.' && entry.is_directory(error) && !entry.is_symlink(error))
            inner.push_back(folder == "." ? name : folder + "/" + name);
    std::sort(inner.begin(), inner.end());
    for (const std::string& next : inner) find_runs(next, depth - 1, runs);
}

inline nlohmann::ordered_json run_as_json(const ListedRun& run) {
    const auto number = [](double x) { return std::isfinite(x) ? nlohmann::ordered_json(x) : nlohmann::ordered_json(nullptr); };
    const RunLog& log = run.log;
    return {{"path", run.path},
            {"name", RunLog::text(log.run, "name")},
            {"status", status_of(log)},
            {"step", log.step()},
            {"total_steps", RunLog::whole(log.run, "total_steps")},
            {"tokens", number(log.newest["tokens"])},
            {"loss", number(log.newest["loss"])},
            {"valid_loss", number(log.valid.empty() ? NAN : log.valid.last())},
            {"seconds", number(seconds_of(log))},
            {"last_news", (int64_t)log.last_news}};
}

// Columns, left-aligned if their first cell below the head is text, with two blanks in between.
inline std::string aligned(const std::vector<Strings>& rows) {
    std::vector<int> widths(rows[0].size());
    for (const Strings& row : rows)
        for (size_t i = 0; i < row.size(); i++) widths[i] = std::max(widths[i], display_width(row[i]));
    std::string out;
    for (const Strings& row : rows) {
        std::string line;
        for (size_t i = 0; i < row.size(); i++) {
            const std::string pad((size_t)(widths[i] - display_width(row[i])), ' ');
            line += (i ? "  " : "") + (i < 2 ? row[i] + pad : pad + row[i]);
        }
        out += line.substr(0, line.find_last_not_of(' ') + 1) + "\n";
    }
    return out;
}

}  // namespace detail

inline int runs_command(const RunsOptions& o) {
    using namespace detail;
    std::vector<ListedRun> runs;
    for (const std::string& given : o.folders.empty() ? Strings{"."} : o.folders) {
        const auto [parent, name] = folder_and_name(given);
        const std::string& folder = name == "log.jsonl" && is_regular(given) ? parent : given;
        if (is_regular(folder)) fail("%s is a file; HINT: give the folder of a run, or of several", folder.c_str());
        if (!is_folder(folder)) fail("there is no folder %s%s", folder.c_str(), did_you_mean_path(folder).c_str());
        find_runs(folder, 3, runs);
    }
    const auto key = [&](const ListedRun& run) {
        if (o.sort == "news") return -(double)run.log.last_news;
        const double loss = run.log.valid.empty() ? NAN : run.log.valid.last();
        return std::isfinite(loss) ? loss : INFINITY;
    };
    if (!o.sort.empty())
        std::stable_sort(runs.begin(), runs.end(), [&](const ListedRun& a, const ListedRun& b) { return key(a) < key(b); });
    if (o.json) {
        nlohmann::ordered_json all = nlohmann::ordered_json::array();
        for (const ListedRun& run : runs) all.push_back(run_as_json(run));
        print_line(stdout, json_text(all, 2));
        return 0;
    }
    if (runs.empty()) fail("there are no runs in %s", joined(o.folders.empty() ? Strings{"this folder"} : o.folders).c_str());
    std::vector<Strings> rows = {{"run", "status", "step", "tokens", "loss", "valid", "time", "last news"}};
    for (const ListedRun& run : runs) {
        const RunLog& log = run.log;
        const auto loss = [](double x) { return std::isfinite(x) ? with_decimals(x, 3) : std::string("-"); };
        rows.push_back({printable(run.path), status_of(log), progress_of(log), human_count(log.newest["tokens"]),
                        loss(log.newest["loss"]), loss(log.valid.empty() ? NAN : log.valid.last()),
                        human_duration(seconds_of(log)), human_duration(difftime(time(nullptr), log.last_news)) + " ago"});
    }
    printf("%s", aligned(rows).c_str());
    return 0;
}
