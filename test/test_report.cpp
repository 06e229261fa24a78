// The report page of a run and its parts: curves, charts, records of log.jsonl, report.html, the loss curve.
#include <gtest/gtest.h>

#include <cfloat>
#include <filesystem>
#include <fstream>
#include <random>

#include "../llmc/report/logger.h"
#include "runs.h"

namespace test_report {

using namespace test_runs;

// ---- curves ----
TEST(Curve, KeepsExtremesAndMeans) {
    std::mt19937 rng(1);
    std::normal_distribution<double> noise;
    Curve c;
    double sum = 0;
    const int n = 123457;
    for (int i = 1; i <= n; i++) {
        const double y = i == 77777 ? 99 : i == 4242 ? -99 : noise(rng);
        c.add(i, y);
        c.add(i, NAN);  // is skipped
        sum += y;
    }
    const std::vector<CurvePart> m = c.parts();
    EXPECT_LE(m.size(), Curve::max_parts);
    EXPECT_GT(m.size(), 350u);
    EXPECT_EQ(
        std::count_if(m.begin(), m.end(), [](const CurvePart& p) { return std::fabs(p.x - 77777) < 256 && p.high == 99; }), 1);
    EXPECT_EQ(std::count_if(m.begin(), m.end(), [](const CurvePart& p) { return std::fabs(p.x - 4242) < 256 && p.low == -99; }),
              1);
    for (size_t i = 1; i < m.size(); i++) ASSERT_LT(m[i - 1].x, m[i].x);
    // parts have 256 points each, except the first (255) and the last
    double weighted = 0;
    for (size_t i = 0; i < m.size(); i++) weighted += m[i].y * (i == 0 ? 255 : std::min(256, n + 1 - (int)i * 256));
    EXPECT_NEAR(weighted, sum, 1e-8);  // sums of 1e5 numbers near 1: about 1e5 * 1e-16 * sqrt(1e5)
    // fewer parts have the same extremes
    const std::vector<CurvePart> few = thinned(m, 100);
    EXPECT_LE(few.size(), 100u);
    EXPECT_GT(few.size(), 90u);
    EXPECT_EQ(std::count_if(few.begin(), few.end(), [](const CurvePart& p) { return p.high == 99 || p.low == -99; }), 2);
    EXPECT_EQ(thinned({}, 5).size(), 0u);
}

TEST(Curve, FewPointsAreKeptAsTheyAre) {
    Curve c;
    for (int i = 0; i < 700; i++) c.add(1000000ll * i, i);
    EXPECT_EQ(c.parts().size(), 700u);
    for (const CurvePart& p : c.parts()) EXPECT_EQ(p.x, 1e6 * p.y);
    Curve constant;
    for (int i = 0; i < 5000; i++) constant.add(i, 3.5);
    for (const CurvePart& p : smoothed(constant.parts())) ASSERT_NEAR(p.y, 3.5, 1e-12);
}

TEST(Curve, StepsThatComeAgainAreNew) {
    Curve c;
    for (int i = 1; i <= 9; i++) c.add(i, i);
    for (int i = 4; i <= 6; i++) c.add(i, -i);
    const std::vector<CurvePart> m = c.parts();
    ASSERT_EQ(m.size(), 6u);
    for (int i = 1; i <= 6; i++) {
        EXPECT_EQ(m[i - 1].x, i);
        EXPECT_EQ(m[i - 1].y, i < 4 ? i : -i);
    }
    for (const CurvePart& p : smoothed(c.parts())) EXPECT_TRUE(std::isfinite(p.y));
}

// Difficult numbers for axes.
const double hostile[] = {0,       -0.0, 1,     1 + 1e-15, -1,    6.05,   1e-13,   1e-300,   5e-324,   -5e-324,   1e9,
                          1e9 + 1, 9e15, 1e100, -1e100,    1e308, -1e308, DBL_MAX, -DBL_MAX, INFINITY, -INFINITY, NAN};

TEST(Axis, TicksAreFewAndFiniteWhateverTheEnds) {
    for (const double lo : hostile)
        for (const double hi : hostile)
            for (const int n : {1, 3, 5, 10}) {
                const std::vector<double> linear = linear_ticks(lo, hi, n), logarithmic = log_ticks(lo, hi, n);
                EXPECT_LE(linear.size(), n + 1u) << lo << " " << hi;
                EXPECT_LE(logarithmic.size(), std::max(12u, n + 1u)) << lo << " " << hi;
                for (const auto& ticks : {linear, logarithmic})
                    for (size_t i = 0; i < ticks.size(); i++) {
                        ASSERT_TRUE(std::isfinite(ticks[i])) << lo << " " << hi;
                        ASSERT_TRUE(i == 0 || ticks[i] > ticks[i - 1]) << lo << " " << hi;
                        ASSERT_LE(tick_label(ticks[i]).size(), 16u);
                    }
            }
    EXPECT_EQ(linear_ticks(6.05, 6.05, 5).size(), 3u);  // 6.2, 6.4, 6.6
}

// Numbers in attributes and in the script are valid, and not long.
void expect_drawable(const std::string& text) {
    for (const char* none : {"nan", "inf", "NaN", "Inf"}) EXPECT_EQ(text.find(none), std::string::npos) << none << text;
    size_t run = 0;
    for (const char c : text) {
        run = c >= '0' && c <= '9' ? run + 1 : 0;
        ASSERT_LT(run, 16u) << text;
    }
}

// The page's script reads JSON, which has no other numbers.
void expect_numbers(const std::string& text) { EXPECT_TRUE(json::accept(text)) << text; }

TEST(Chart, IsDrawnWhateverTheNumbers) {
    const double start = monotonic_seconds();
    const RunLog none;
    for (const double a : hostile)
        for (const double b : hostile)
            for (const double c : {a, 0.0, 1e308, (double)NAN})
                for (const bool logarithmic : {false, true}) {
                    Chart chart;
                    chart.id = "x";
                    chart.lo = b;
                    chart.hi = c;
                    chart.baseline = a;
                    chart.logarithmic = logarithmic;
                    chart.direct_labels = true;
                    chart.series = {{"s", "train", {{1, a, a, a}, {2, b, b, a}, {3, c, a, b}}, true, true},
                                    {"t", "valid", {{a, b, b, b}, {b, c, a, c}}, true},
                                    {"one", "valid", {{a, c, c, c}}},
                                    {"", "abandoned", {{a, b, c, c}, {b, c, a, a}}, false, false, true, true},
                                    {"none", "other", {}}};
                    chart.marks = {0, INT64_MAX};
                    chart.notes = {{INT64_MAX, "far"}};
                    const std::string svg = draw_chart(chart) + chart_card(chart);
                    ASSERT_LT(svg.size(), 30000u) << a << " " << b << " " << c;
                    expect_drawable(svg.substr(0, svg.find("<title>")));
                    expect_numbers(PageData({{"", &none}}, {chart}).text());
                    if (HasFailure()) return;
                }
    EXPECT_LT(monotonic_seconds() - start, 30);
}

TEST(Report, IsDrawnWhateverTheNumbers) {
    std::mt19937 rng(3);
    for (int trial = 0; trial < 300; trial++) {
        RunLog log;
        const auto pick = [&] { return hostile[rng() % std::size(hostile)]; };
        const int records = trial % 7, kinds = trial % 3;
        log.add(json{{"kind", "run"}, {"total_steps", pick()}, {"unigram_loss", pick()}});
        for (int i = 1; i <= records; i++)
            log.add(json{{"kind", kinds == 1 && i % 2 ? "valid" : "step"},
                         {"step", kinds == 2 ? pick() : i},
                         {"loss", pick()},
                         {"grad_norm", pick()},
                         {"lr", pick()},
                         {"tokens_per_s", pick()},
                         {"global_batch", pick()},
                         {"tokens", pick()},
                         {"eta_s", pick()},
                         {"seconds", pick()},
                         {"step_ms", pick()},
                         {"mfu", pick()}});
        const std::string page = render_report(log, 0, 10), svg = render_loss_svg(log);
        expect_balanced(page);
        expect_balanced(svg);
        expect_numbers(PageData({{"", &log}}, small_charts({{"", &log}})).text());
        ASSERT_LT(page.size(), 100000u);
        for (size_t at = page.find("<svg"); at != std::string::npos; at = page.find("<svg", at + 1))
            expect_drawable(page.substr(at, page.find("</svg>", at) - at));
        expect_drawable(svg);
        ASSERT_FALSE(HasFailure()) << trial;
    }
}

// ---- the report ----
TEST(Report, IsWholeAndReferencesNothingOutside) {
    Scratch scratch;
    Console console;
    Logger log(scratch / "", true, false, 1, console.f);
    RunInfo run = run_info(2000);
    run.options["evil"] = "</script><script>alert(1)</script>";
    log.run(run);
    expect_balanced(read_whole_file(scratch / "report.html"));  // before the first step
    for (int i = 1; i <= 2000; i++) {
        StepStats s = step_at(i, i == 1500 ? NAN : 3 + 5 * std::exp(-i / 200.0));
        s.global_batch = i < 500 ? 4 : 8;
        s.skipped = i >= 1500;
        s.applied = i != 1500;
        log.step(s);
        if (i % 100 == 0) {
            log.valid(i, 3.1 + 5 * std::exp(-i / 200.0), 100, 1);
            log.sample(i, "<b>prompt</b>", "text & more \xff <i>");
        }
    }
    log.event(1500, "warning", "skip", "loss is not finite <here>");
    const std::string running = render_report(log.records(), time(nullptr), 10);
    EXPECT_NE(running.find("<meta http-equiv=\"refresh\" content=\"10\">"), std::string::npos);
    log.end("finished");
    const std::string html = read_whole_file(scratch / "report.html");
    for (const std::string& page : {running, html}) {
        expect_balanced(page);
        for (const char* outside : {"http:", "https:", "src=", "href=", "@import", "nan,", "inf,", "\"nan", "\"inf",
                                    "<b>prompt", "<i>", "alert(1)</script>"})
            EXPECT_EQ(page.find(outside), std::string::npos) << outside;
        for (const char* inside : {"id=\"loss\"", "id=\"lr\"", "id=\"grad_norm\"", "id=\"tokens_per_s\"", "id=\"z_loss\"",
                                   "id=\"global_batch\"", "unigram", "&lt;b&gt;prompt", "loss is not finite &lt;here&gt;",
                                   "step 1500: not finite", "prefers-color-scheme: dark"})
            EXPECT_NE(page.find(inside), std::string::npos) << inside;
    }
    EXPECT_EQ(html.find("http-equiv"), std::string::npos);
    EXPECT_LT(html.size(), 400000u);
    EXPECT_EQ(count(html, "<article"), (size_t)log.records().samples.size());
}

TEST(Report, FromTheFileAsFromMemory) {
    Scratch scratch;
    Console console;
    for (int run = 0; run < 2; run++) {  // the second run in the same directory counts
        Logger log(scratch / "", true, false, 1, console.f);
        log.run(run_info(50));
        for (int i = 1; i <= 50; i++) log.step(step_at(i, run + 10.0 / i));
        log.valid(50, 4, 10, 1);
        log.sample(50, "p", "t");
        log.event(50, "info", "e", "m");
        log.end("stopped", "by the user");
        const RunLog back = read_log(scratch / "log.jsonl");
        EXPECT_EQ(render_report(back, 0, 10), render_report(log.records(), 0, 10));
        std::ofstream(scratch / "log.jsonl", std::ios::app) << "{\"kind\":\"st";  // truncated by a crash
    }
    EXPECT_EQ(read_log(scratch / "log.jsonl").step(), 50);
}

TEST(Report, ReadsOddFilesOrRefusesThem) {
    Scratch scratch;
    EXPECT_THROW(read_log(scratch / "missing"), Error);
    std::ofstream(scratch / "empty.jsonl") << "\n[1]\nno json\n";
    EXPECT_THROW(read_log(scratch / "empty.jsonl"), Error);
    std::ofstream(scratch / "odd.jsonl")
        << "{\"kind\":3}\n{\"kind\":\"step\",\"step\":\"x\"}\n{\"kind\":\"step\",\"step\":1e300}\n{\"kind\":\"step\",\"step\":-"
           "1}\n"
           "{\"kind\":\"valid\"}\n{\"kind\":\"run\",\"name\":[],\"summary\":7}\n{\"kind\":\"sample\"}\n{\"kind\":\"event\"}\n";
    expect_balanced(render_report(read_log(scratch / "odd.jsonl"), 0, 10));
    EXPECT_THROW(write_loss_svg(read_log(scratch / "odd.jsonl"), scratch / "x.svg"), Error);
    EXPECT_FALSE(fs::exists(scratch / "x.svg"));
    std::ofstream(scratch / "one.jsonl") << "{\"kind\":\"step\",\"step\":1,\"loss\":2.5}\n";
    expect_balanced(render_report(read_log(scratch / "one.jsonl"), 0, 10));
    write_loss_svg(read_log(scratch / "one.jsonl"), scratch / "x.svg");
    const std::string svg = read_whole_file(scratch / "x.svg");
    expect_balanced(svg);
    EXPECT_EQ(svg.rfind("<svg xmlns=\"http://www.w3.org/2000/svg\"", 0), 0u);
    EXPECT_EQ(count(svg, "http"), 1u);
    EXPECT_NE(svg.find("train 2.500"), std::string::npos);
}

// The data for the page's script.
json page_data(const std::string& page) {
    const std::string start = "const page = ";
    const size_t at = page.find(start) + start.size();
    return json::parse(page.substr(at, page.find(", refreshSeconds = ") - at));
}

// A long run, with the maximum number of parts in every curve, and a lowest and a highest loss somewhere.
RunLog long_run(const std::string& name, int64_t steps) {
    std::mt19937 rng(7);
    RunLog log;
    log.add(json{{"kind", "run"}, {"name", name}, {"total_steps", 1000000}});
    for (int64_t i = 1; i <= steps; i++) {
        StepNumbers s;
        for (const std::string_view field : StepNumbers::names) s.set(field, 1e3 + 1e-4 * (double)(rng() % 10000000));
        s.set("step", (double)(i * 1000000 / steps));
        s.set("tokens", 4096.0 * (double)i);
        s.set("seconds", 0.1 * (double)i);
        if (i == steps / 3) s.set("loss", 9999);
        if (i == steps / 2) s.set("loss", -9999);
        log.add_numbers(s);
    }
    log.add(json{{"kind", "end"}, {"step", 1000000}, {"status", "finished"}});
    return log;
}

// llmc/report/report.h states the maximum size of a page, and that no spike is lost.
TEST(Report, IsSmallHoweverLongTheRun) {
    for (const int64_t steps : {740, 1490, 100000}) {
        const RunLog log = long_run("long", steps);
        const std::string page = render_report(log, 0, 10);
        EXPECT_LT(page.size(), 460000u) << steps;
        const json loss = page_data(page)["charts"][0]["series"][0];
        EXPECT_LE(loss["y"].size(), Curve::max_parts);
        EXPECT_EQ(*std::max_element(loss["high"].begin(), loss["high"].end()), 9999);
        EXPECT_EQ(*std::min_element(loss["low"].begin(), loss["low"].end()), -9999);
    }
    const RunLog log = long_run("long", 740);
    for (const size_t n : {2, 5, 32}) {
        const std::string page = render_comparison(std::vector<NamedRun>(n, {"x", &log}), 0);
        EXPECT_LT(page.size(), 2800000u) << n;
        const json chart = page_data(page)["charts"][0];
        ASSERT_EQ(chart["series"].size(), n);
        for (const json& loss : chart["series"]) {
            EXPECT_EQ(*std::max_element(loss["high"].begin(), loss["high"].end()), 9999);
            EXPECT_EQ(*std::min_element(loss["low"].begin(), loss["low"].end()), -9999);
        }
    }
}

TEST(Report, OfSeveralRunsShowsWhatDiffers) {
    RunLog a, b, none;
    a.add(json{{"kind", "run"}, {"options", {{"lr", 1}, {"seed", 2}, {"new", true}, {"out", "a"}}}});
    b.add(json{{"kind", "run"}, {"options", {{"lr", 1.5}, {"seed", 2}, {"out", "b"}}}, {"machine", {{"host", "<h>"}}}});
    a.add(json{{"kind", "step"}, {"step", 1}, {"loss", 3}, {"mfu", 0.4}, {"memory_bytes", 3 << 20}});
    b.add(json{{"kind", "step"}, {"step", 1}, {"loss", 4}, {"tokens", 8}, {"seconds", 2}});
    a.add(json{{"kind", "valid"}, {"step", 1}, {"loss", 3.5}});
    b.add(json{{"kind", "sample"}, {"step", 1}, {"prompt", "p"}, {"text", "t"}});
    b.add(json{{"kind", "end"}, {"step", 1}, {"status", "failed"}});
    const std::string page = render_comparison({{"first", &a}, {"second", &b}, {"empty", &none}}, 0);
    expect_balanced(page);
    for (const char* inside :
         {"<th>lr</th><td>1</td><td>1.5</td><td>-</td>", "<th>new</th><td>true</td><td>-</td><td>-</td>",
          "<th>host</th><td>-</td><td>&lt;h&gt;</td>", "status running", "status failed", "id=\"valid0\"", "id=\"mfu\"",
          "Memory in use, MiB", "second, step 1", "<th>seed</th><td>2</td><td>2</td><td>-</td>"})
        EXPECT_NE(page.find(inside), std::string::npos) << inside;
    EXPECT_EQ(page.find("<th>out</th>"), std::string::npos);
    EXPECT_EQ(page.find("http-equiv"), std::string::npos);
    // several datasets: a curve each
    const std::string sets = "{\"kind\":\"valid\",\"step\":2,\"loss\":3,\"sets\":{\"<w>\":2.5,\"b\":null,\"c\":\"x\"}}";
    RunLog one = a;
    EXPECT_TRUE(one.add_line(sets));
    const std::string alone = render_report(one, 0, 10), together = render_comparison({{"s", &one}, {"a", &a}}, 0);
    expect_balanced(alone);
    expect_balanced(together);
    EXPECT_NE(alone.find("aria-label=\"Loss over steps: train 3.000 at step 1, validation 3.000 at step 2\""),
              std::string::npos);
    EXPECT_NE(alone.find("Validation loss by data set"), std::string::npos);
    EXPECT_NE(together.find("Validation loss, &lt;w&gt;"), std::string::npos);
    EXPECT_EQ(page_data(alone)["charts"][1]["series"][0]["y"], json({2.5}));
    EXPECT_EQ(page_data(alone)["charts"][1]["series"].size(), 3u);
    one.add(json{{"kind", "event"}, {"step", 1}, {"event", "rollback"}});
    EXPECT_TRUE(one.valid_sets[0].second.empty());
    const json data = page_data(page);
    EXPECT_FALSE(data["runs"][0].contains("tokens"));
    EXPECT_EQ(data["runs"][1]["tokens"]["y"], json({8}));
    EXPECT_EQ(data["charts"][0]["series"].size(), 3u);
    const std::string same = render_comparison({{"first", &a}, {"again", &a}}, 0);
    EXPECT_NE(same.find("None: the runs had the same options"), std::string::npos);
    expect_balanced(render_comparison({{"", &none}, {"", &none}}, 0));
}

// Records of an older or a newer version: unknown ones are ignored, missing ones have no curve.
TEST(Report, ReadsLogsOfOtherVersions) {
    RunLog log;
    for (const char* line :
         {"{\"kind\":\"run\",\"name\":\"x\",\"color\":[1],\"options\":{\"--lr\":{\"a\":1}},\"machine\":[]}",
          "{\"kind\":\"step\",\"step\":1,\"loss\":3,\"seconds\":10,\"entropy2\":7,\"Rank\":[1,2],\"memory_bytes\":null}",
          "{\"kind\":\"step\",\"step\":2,\"loss\":2,\"seconds\":20,\"memory_bytes\":2048}",
          "{\"kind\":\"step\",\"step\":3,\"loss\":2,\"seconds\":1}", "{\"kind\":\"step\",\"step\":4,\"loss\":2,\"seconds\":2}"})
        EXPECT_TRUE(log.add_line(line)) << line;
    EXPECT_FALSE(log.add_line("{\"kind\":\"weather\",\"step\":2}"));
    const std::string page = render_report(log, 0, 10);
    expect_balanced(page);
    EXPECT_NE(page.find("id=\"memory_bytes\""), std::string::npos);
    for (const char* none : {"id=\"lr\"", "id=\"mfu\"", "id=\"tokens_per_s\""}) EXPECT_EQ(page.find(none), std::string::npos);
    // in older versions the clock restarted when a run was resumed
    EXPECT_EQ(page_data(page)["runs"][0]["seconds"]["y"], json({10, 20, 21, 22}));
}

TEST(Report, WhereTheRanksTimeGoes) {
    RunLog log;
    log.add(json::parse(run_line));
    log.add(json::parse(step_line(1)));
    EXPECT_EQ(render_report(log, 0, 10).find("<h2 class=\"part\">Ranks"), std::string::npos);
    RankTimes times = {17, {"a", "a", "b"}, {{10, 30}, {12, 28}, {39, 1}}, 2};
    json record = {{"kind", "ranks"}, {"step", 40}};
    record.update(to_json(times));
    EXPECT_TRUE(log.add_line(record.dump()));
    const std::string page = render_report(log, 0, 10);
    expect_balanced(page);
    const size_t at = page.find("Ranks: a step's time, mean of 17 steps up to step 40");
    ASSERT_NE(at, std::string::npos);
    const std::string rows = page.substr(at, page.find("</table>", at) - at);
    const size_t first = rows.find("<tr class=\"slowest\"><th>2 on b, the slowest</th><td>39 ms</td><td>1 ms</td>"),
                 second = rows.find("<th>1 on a</th><td>12 ms</td>"), third = rows.find("<th>0 on a</th><td>10 ms</td>");
    EXPECT_TRUE(first < second && second < third && third != std::string::npos) << rows;
    EXPECT_NE(rows.find("<i class=\"train\" style=\"width:25.0%\"></i><i class=\"baseline\" style=\"width:75.0%\"></i>"),
              std::string::npos)
        << rows;

    times = {16, std::vector<std::string>(1000, "host"), std::vector<RankTime>(1000, {1, 2}), -1};
    record.update(to_json(times));
    record.erase("slowest");
    log.add(record);
    const std::string many = render_report(log, 0, 10);
    EXPECT_EQ(many.find(", the slowest"), std::string::npos);
    EXPECT_NE(many.find("<th>63 on host</th>"), std::string::npos);
    EXPECT_EQ(many.find("<th>64 on host</th>"), std::string::npos);
    EXPECT_NE(many.find("936 others are in log.jsonl"), std::string::npos);
}

// Untrusted text in every field that has text.
TEST(Report, TextStaysText) {
    const std::string evil =
        "</script></style></title><script>alert(1)</script><img src=x onerror='alert(2)'>\" \x1b[2J\x9b\xff";
    const json layers = json::array({{{"layer", evil}, {"fp8_zero", json::array({1, evil})}}});
    RunLog log;
    log.add(json{{"kind", "run"},
                 {"name", evil},
                 {"summary", {{evil, evil}}},
                 {"machine", {{evil, {evil}}}},
                 {"options", {{evil, {{evil, evil}}}}}});
    log.add(json{{"kind", "step"}, {"step", 1}, {"loss", 3}, {evil, 3}});
    log.add(json{{"kind", "health"}, {"step", 1}, {"layers", layers}});
    const json ranks = json::array({evil, {{"rank", evil}}, {{"rank", 0}, {"host", evil}, {"worked_ms", 1}, {"waited_ms", 1}}});
    log.add(json{{"kind", "ranks"}, {"step", 1}, {"slowest", evil}, {"ranks", ranks}});
    log.add(json{{"kind", "sample"}, {"step", 1}, {"prompt", evil}, {"text", evil}});
    for (const char* name : {"fp8", "rollback", "x"})
        log.add(json{{"kind", "event"}, {"step", 1}, {"level", evil}, {"event", name}, {"message", evil}});
    log.add(json{{"kind", "end"}, {"step", 1}, {"status", evil}, {"message", evil}});
    RunLog other = log;
    other.add(json{{"kind", "step"}, {"step", 2}, {"loss", 3}});
    other.run["options"] = {{evil, 2}};
    const std::string page = render_report(log, 0, 10), several = render_comparison({{evil, &log}, {evil, &other}}, 0);
    expect_balanced(page);
    expect_balanced(several);
    expect_balanced(render_loss_svg(log));
    EXPECT_EQ(page_data(several)["runs"][0]["name"], printable(evil));
    for (const std::string& text : {page, several, render_loss_svg(log)}) {
        EXPECT_EQ(text.find("<img"), std::string::npos);
        EXPECT_EQ(text.find("alert(1)</script>"), std::string::npos);
        EXPECT_EQ(text.find_first_of("\x1b\x07"), std::string::npos);
        EXPECT_EQ(json(text).dump().find("\\ufffd") + 1, 0u);  // valid UTF-8: dump() throws otherwise
    }
    for (const std::string& text : {page, several})
        for (const char* once : {"<script>", "</script>", "</style>"}) EXPECT_EQ(count(text, once), 1u) << once;
}

TEST(Report, SaysWhyTheRunHasEnded) {
    Scratch scratch;
    Console console;
    {
        Logger log(scratch / "", true, false, 1, console.f);
        log.run(run_info(10));
        log.step(step_at(1, 3));
        log.end("stopped", "by SIGTERM; train_gpt train --out '<run>' --resume auto goes on\x1b[31m");
    }
    const std::string page = read_whole_file(scratch / "report.html");
    EXPECT_NE(page.find(">by SIGTERM; train_gpt train --out &#39;&lt;run&gt;&#39; --resume auto goes on"), std::string::npos);
    EXPECT_NE(console.str().find(": by SIGTERM; train_gpt train --out '<run>' --resume auto goes on"), std::string::npos);
    EXPECT_EQ(console.str().find('\x1b'), std::string::npos);
    RunLog on = read_log(scratch / "log.jsonl");
    on.add(json{{"kind", "step"}, {"step", 2}, {"loss", 3}});
    EXPECT_EQ(render_report(on, 0, 10).find("by SIGTERM"), std::string::npos) << "it has gone on";
}

// ---- records ----
// The fast parser of a step gives the JSON parser's result, and refuses the same lines.
TEST(RunLog, ScansStepsAsTheParserReadsThem) {
    std::mt19937 rng(5);
    StepNumbers fast;
    for (int i = 0; i < 20000; i++) {
        std::string line = step_line(rng() % 1000000, std::pow(10, rng() % 20 - 10.0) * rng());
        line.pop_back();
        const bool damaged = i % 2;
        for (unsigned n = damaged ? 1 + rng() % 3 : 0; n > 0; n--) {
            const size_t at = rng() % line.size(), how = rng() % 3;
            if (how == 0) line[at] = "{}[],:\"e.-+0n\\"[rng() % 15];
            if (how == 1) line.erase(at, 1 + rng() % 20);
            if (how == 2) line.insert(at, line.substr(rng() % line.size(), rng() % 9));
            if (line.empty()) line = "x";
        }
        if (!scan_step(line, fast)) {
            ASSERT_TRUE(damaged) << line;
            continue;
        }
        const json j = json::parse(line, nullptr, false);
        ASSERT_TRUE(damaged || j.is_object()) << line;
        if (!j.is_object()) continue;  // such as 01: read as a number
        for (const std::string_view name : StepNumbers::names) {
            const double slow = RunLog::number(j, std::string(name).c_str());
            if (count(line, "\"" + std::string(name) + "\"") != 1) continue;  // twice: either is valid
            ASSERT_TRUE(slow == fast[name] || (std::isnan(slow) && std::isnan(fast[name]))) << name << " " << line;
        }
    }
    for (const char* line :
         {"{\"kind\":\"step\",\"step\":nan}", "{\"kind\":\"step\",\"step\":1", "{\"kind\":\"step\",\"step\":1}}",
          "{\"kind\":\"step\",", "{\"kind\":\"step\",\"a\":{\"b\":1}", "{\"kind\":\"step\",\"step\":1,}"})
        EXPECT_FALSE(scan_step(line, fast)) << line;
}

TEST(CutLog, LeavesWhatWasBeforeAndWhatCameLate) {
    Scratch scratch;
    const std::string path = scratch / "log.jsonl", end = "{\"kind\":\"end\",\"step\":5,\"status\":\"stopped\"}\n";
    const auto cut = [&](const std::string& text, int64_t step) {
        std::ofstream(path) << text;
        cut_log(path, step);
        return read_whole_file(path);
    };
    const std::string five =
        run_line + step_line(1) + step_line(2) + event_line(2, "x") + step_line(3) + step_line(4) + step_line(5);
    EXPECT_EQ(cut(five + event_line(5, "x"), 5), five + event_line(5, "x"));
    EXPECT_EQ(cut(five + end, 5), five);
    EXPECT_EQ(cut(five + event_line(3, "checkpoint") + step_line(6) + "{\"kind\":\"st", 3),
              run_line + step_line(1) + step_line(2) + event_line(2, "x") + step_line(3) + event_line(3, "checkpoint"));
    EXPECT_EQ(cut(five, 0), run_line);
    EXPECT_EQ(cut(run_line + end, 0), run_line);
    // steps undone by a rollback stay in the log before kept steps
    const std::string back = five + event_line(3, "rollback") + step_line(4);
    EXPECT_EQ(cut(back + step_line(5) + step_line(6), 4), back);
    EXPECT_EQ(cut(back + step_line(5) + step_line(6), 3), cut(five, 3) + event_line(3, "rollback"));
    // in a file with two runs only the last is cut
    EXPECT_EQ(cut(five + run_line + step_line(1) + step_line(2), 1), five + run_line + step_line(1));
    EXPECT_EQ(cut("", 3), "");
    EXPECT_EQ(cut("junk\n\n[]\n", 3), "");
    // if the cut removes a later checkpoint's record, a copy is kept
    EXPECT_FALSE(std::filesystem::exists(path + ".1"));
    const std::string saved = five + event_line(5, "checkpoint") + step_line(6);
    EXPECT_EQ(cut(saved, 3), cut(five, 3));
    EXPECT_EQ(read_whole_file(path + ".1"), saved);
    EXPECT_EQ(cut(saved, 5), five + event_line(5, "checkpoint"));
    EXPECT_FALSE(std::filesystem::exists(path + ".2"));
}

// Steps undone by a rollback are removed from the curves, and shown separately.
TEST(RunLog, RollbackTakesItsStepsFromTheCurves) {
    RunLog log;
    const auto step = [&](int i, double loss) {
        log.add(json{{"kind", "step"}, {"step", i}, {"loss", loss}, {"grad_norm", 1}});
    };
    const auto event = [&](int i, const char* name) {
        log.add(json{{"kind", "event"}, {"step", i}, {"level", "info"}, {"event", name}, {"message", name}});
    };
    for (int i = 1; i <= 12; i++) {
        if (i == 6) event(6, "fp8");
        step(i, i < 10 ? 5 : 100);
        log.add(json{{"kind", "valid"}, {"step", i}, {"loss", i == 3 ? 4.5 : i == 9 ? 4.0 : 5}});
    }
    EXPECT_EQ(log.best_step, 9);
    event(8, "rollback");
    EXPECT_EQ(log.best_step, 3);
    EXPECT_EQ(log.best_valid, 4.5);
    for (int i = 9; i <= 11; i++) step(i, 4);
    const std::vector<CurvePart> loss = log.curve("loss").parts();
    ASSERT_EQ(loss.size(), 11u);
    for (size_t i = 0; i < loss.size(); i++) {
        EXPECT_EQ(loss[i].x, (double)i + 1);
        EXPECT_EQ(loss[i].y, i < 8 ? 5 : 4);
    }
    EXPECT_EQ(log.valid.parts().size(), 8u);
    ASSERT_EQ(log.abandoned.size(), 1u);
    ASSERT_EQ(log.abandoned[0].size(), 4u);
    EXPECT_EQ(log.abandoned[0][0].x, 9);
    EXPECT_EQ(log.abandoned[0][3].y, 100);
    EXPECT_EQ(log.notes, (std::vector<std::pair<int64_t, std::string>>{{6, "FP8"}, {12, "rollback"}}));
    const std::string page = render_report(log, 0, 0);
    EXPECT_NE(page.find("pale abandoned"), std::string::npos);
    EXPECT_NE(page.find(">rollback</text>"), std::string::npos);
}

}  // namespace test_report
