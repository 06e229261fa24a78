// train_gpt report RUN ...: the report of a run again, or a comparison of several. Reads their log.jsonl, also of running runs,
// and writes nothing but the page.
#pragma once
#include <filesystem>
#include <string>
#include <vector>

#include "../base/check.h"
#include "../options/options.h"
#include "../base/file.h"
#include "../report/report.h"
#include "../base/terminal.h"
#include "../base/text.h"

// The log of a run, given by its output directory, its log.jsonl or its report.html.
inline std::string log_of_run(const std::string& given) {
    namespace fs = std::filesystem;
    const bool directory = fs::is_directory(given), page = fs::path(given).extension() == ".html";
    const fs::path beside = fs::path(given).replace_filename("log.jsonl");
    const std::string log = directory ? given + "/log.jsonl" : page ? beside.string() : given;
    if (fs::exists(log)) return log;
    if (directory || (page && fs::exists(given)))
        fail("%s has no log.jsonl %s; HINT: give a run's --out directory", given.c_str(), directory ? "in it" : "next to it");
    fail("there is no %s%s; HINT: give a run's --out directory", given.c_str(), did_you_mean_path(given).c_str());
}

// Names that distinguish the runs: a run's own or, if another has the same, the path given for it.
inline std::vector<std::string> names_of_runs(const std::vector<RunLog>& logs, const std::vector<std::string>& given) {
    std::vector<std::string> names;
    for (size_t i = 0; i < logs.size(); i++) {
        const std::string name = RunLog::text(logs[i].run, "name");
        const auto same = [&](const RunLog& other) { return RunLog::text(other.run, "name") == name; };
        names.push_back(name.empty() || std::count_if(logs.begin(), logs.end(), same) > 1
                            ? std::filesystem::path(log_of_run(given[i])).parent_path().string()
                            : name);
    }
    return names;
}

inline int report_command(const ReportOptions& o) {
    namespace fs = std::filesystem;
    constexpr size_t most = 32;
    Strings given_runs = o.runs;  // a pattern such as runs/* may match the page of an earlier call
    given_runs.erase(std::remove(given_runs.begin(), given_runs.end(), o.output), given_runs.end());
    refuse_missing(given_runs.empty(), "the run", "train_gpt report RUN rewrites the report of the run in RUN");
    if (given_runs.size() > most) fail_usage("%zu runs are given; a page shows at most %zu", given_runs.size(), most);
    std::vector<RunLog> logs;
    std::vector<NamedRun> runs;
    time_t newest = 0;  // time of the newest record
    for (const std::string& given : given_runs) {
        const std::string log = log_of_run(given);
        int64_t others = 0;
        logs.push_back(read_log(log, &others));
        if (others > 0)
            print_line(stderr, format("warning: %s lines of %s are not records of a run: ignored", with_commas(others).c_str(),
                                      log.c_str()));
        struct stat st;
        if (stat(log.c_str(), &st) != 0) continue;
        logs.back().last_news = st.st_mtime;
        newest = std::max(newest, st.st_mtime);
    }
    const std::vector<std::string> names = names_of_runs(logs, given_runs);
    for (size_t i = 0; i < logs.size(); i++) runs.push_back({names[i], &logs[i]});

    std::string path = o.output;
    if (path.empty() && runs.size() > 1 && fs::exists("log.jsonl"))
        fail_usage("report.html is the run's own page in this folder; HINT: --output compared.html");
    if (path.empty())
        path = runs.size() > 1 ? "report.html" : fs::path(log_of_run(given_runs[0])).replace_filename("report.html").string();
    if (std::error_code error; fs::exists(path, error)) {
        const std::string start = beginning_of(path);
        if (!begins_with(start, page_start) || start.find(written_by("")) != std::string::npos)
            fail("%s exists and is not the report of a run; HINT: give another --output", path.c_str());
    }
    write_file_atomically(path, runs.size() > 1 ? render_comparison(runs, time(nullptr))
                                                : render_report(logs[0], newest, o.output.empty() ? 10 : 0));
    print_line(stdout, path);
    return 0;
}
