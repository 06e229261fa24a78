// A run's log.jsonl, read by report, runs and a resumed run. The first byte of the input, times 4, is the step after which the
// resumed run cuts it; the rest is the log. A report of any log can be written, and cutting a second time changes nothing.
#include "fuzz.h"

#include "../../llmc/report/report.h"
#include "../../llmc/report/run_log.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static const Files files;
    std::string_view input = view(data, size);
    const int64_t step = 4 * (int64_t)read_byte(input);
    const std::string path = files / "log.jsonl";
    files.write("log.jsonl", input);
    RunLog before;
    if (refused([&] { before = read_log(path); })) return 0;
    const std::string page = render_report(before, 1700000000, 10);
    CHECK(render_comparison({{"one", &before}, {"<b>", &before}}, 1700000000).size() > page_start.size(), "no comparison");
    CHECK(page.compare(0, page_start.size(), page_start) == 0, "no page");

    const LogCut cut = cut_log(path, step);
    const std::string once = read_whole_file(path);
    CHECK(cut.kept.empty() || read_whole_file(cut.kept) == input, "%s is no copy", cut.kept.c_str());
    if (!cut.kept.empty()) std::filesystem::remove(cut.kept);
    const LogCut again = cut_log(path, step);
    CHECK(again.kept.empty() && read_whole_file(path) == once, "cutting again after step %lld changes it", (long long)step);
    return 0;
}
