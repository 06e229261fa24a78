// What a run tells: console, log.jsonl, report.html, loss curve; and the text helpers below them.
#include <gtest/gtest.h>
#include <fcntl.h>
#include <malloc.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <termios.h>
#include <csignal>

#include <atomic>
#include <cfloat>
#include <filesystem>
#include <fstream>
#include <random>

#include "../llmc/report/logger.h"

// As training does (stop.h).
[[maybe_unused]] static const auto ignored = {std::signal(SIGPIPE, SIG_IGN), std::signal(SIGXFSZ, SIG_IGN)};

// Memory that is counted, and refused in pieces larger than a test says.
static std::atomic<size_t> largest_piece{SIZE_MAX}, used{0}, peak{0};
void* operator new(size_t bytes) {
    void* p = bytes > largest_piece ? nullptr : malloc(bytes);
    if (!p) throw std::bad_alloc();
    const size_t now = used += malloc_usable_size(p);
    if (now > peak) peak = now;
    return p;
}
void operator delete(void* p) noexcept {
    if (p) used -= malloc_usable_size(p);
    free(p);
}
void operator delete(void* p, size_t) noexcept { operator delete(p); }

namespace test_logger {

namespace fs = std::filesystem;
using json = nlohmann::ordered_json;

// A directory that lives as long as the test.
struct Scratch {
    std::string dir;
    Scratch() {
        char name[] = "/tmp/test_logger_XXXXXX";
        if (mkdtemp(name)) dir = name;
    }
    ~Scratch() { fs::remove_all(dir); }
    std::string operator/(const std::string& name) const { return dir + "/" + name; }
};

// A console that remembers.
struct Console {
    char* text = nullptr;
    size_t size = 0;
    FILE* f = open_memstream(&text, &size);
    ~Console() {
        fclose(f);
        free(text);
    }
    std::string str() { return fflush(f), std::string(text, size); }
};

StepStats step_at(int64_t i, double loss) {
    StepStats s;
    s.step = i;
    s.consumed_samples = 4 * i;
    s.tokens = 64 * i;
    s.global_batch = 4;
    s.loss = loss;
    s.z_loss = 1e-3;
    s.grad_norm = 0.5;
    s.lr = 1e-3;
    s.step_ms = 12.5;
    s.tokens_per_s = 5120;
    s.model_tflops = 0.05;
    s.lse_mean = 3;
    s.lse_max = 5;
    return s;
}

RunInfo run_info(int64_t steps) {
    RunInfo run;
    run.name = "a <name> & \"more\"";
    run.total_steps = steps;
    run.unigram_loss = 6.5;
    run.z_loss = true;
    run.summary = {{"Model", "tiny"}};
    run.options = {{"lr", 1e-3}, {"data-path", {"a", "b"}}};
    return run;
}

// Every line parsed, strictly.
std::vector<json> lines_of(const std::string& path) {
    std::vector<json> lines;
    std::ifstream in(path);
    std::string line;
    while (std::getline(in, line)) lines.push_back(json::parse(line));
    return lines;
}

// What a terminal of any width shows in the end, without colours, and the most columns that it ever needed.
struct Screen {
    std::vector<std::string> lines = {""};
    size_t widest = 0;
    explicit Screen(const std::string& text) {
        size_t at = 0;  // column
        for (size_t i = 0; i < text.size(); i++) {
            std::string& line = lines.back();
            if (text[i] == '\n') {
                lines.emplace_back();
                at = 0;
            } else if (text[i] == '\r') at = 0;
            else if (text.compare(i, 2, "\x1b[") == 0) {
                while (!isalpha((unsigned char)text[i])) i++;
                if (text[i] == 'K') line.resize(at);
            } else {
                if (((unsigned char)text[i] & 0xc0) == 0x80) continue;  // within a character
                line.resize(std::max(line.size(), at + 1));
                line[at++] = text[i];
                widest = std::max(widest, at);
            }
        }
    }
};

size_t count(const std::string& text, const std::string& what) {
    size_t n = 0;
    for (size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + what.size())) n++;
    return n;
}

// Every element that is opened is closed, in order; void elements aside. Scripts and styles are passed over.
void expect_balanced(const std::string& html) {
    std::vector<std::string> open;
    for (size_t i = html.find('<'); i != std::string::npos; i = html.find('<', i)) {
        const size_t close = html.find('>', i);
        ASSERT_NE(close, std::string::npos);
        std::string tag = html.substr(i + 1, close - i - 1);
        const bool ends = tag[0] == '/', alone = tag.back() == '/';
        const std::string name = tag.substr(ends, tag.find_first_of(" /", ends) - ends);
        i = close;
        if (tag[0] == '!' || alone || name == "meta" || name == "input") continue;
        if (ends) {
            ASSERT_FALSE(open.empty()) << "</" << name << ">";
            ASSERT_EQ(open.back(), name);
            open.pop_back();
            continue;
        }
        open.push_back(name);
        if (name == "script" || name == "style") i = html.find("</" + name, i);
    }
    EXPECT_TRUE(open.empty()) << open.back();
}

// ---- text ----
TEST(Text, Counts) {
    EXPECT_EQ(human_count(0), "0");
    EXPECT_EQ(human_count(999), "999");
    EXPECT_EQ(human_count(12.34), "12.3");
    EXPECT_EQ(human_count(1000), "1.00K");
    EXPECT_EQ(human_count(1234567), "1.23M");
    EXPECT_EQ(human_count(999999), "1.00M");  // not 1000K
    EXPECT_EQ(human_count(172394557440.0), "172B");
    EXPECT_EQ(human_count(NAN), "nan");
    EXPECT_EQ(human_bytes(512), "512 B");
    EXPECT_EQ(human_bytes(1536), "1.50 KiB");
    EXPECT_EQ(human_bytes(1023.9 * 1024), "1.00 MiB");
    EXPECT_EQ(with_commas(0), "0");
    EXPECT_EQ(with_commas(1234567), "1,234,567");
    EXPECT_EQ(with_commas(-123456), "-123,456");
}

TEST(Text, Durations) {
    const std::pair<double, const char*> cases[] = {{0, "0s"},        {0.012, "12 ms"},  {4.24, "4.2s"},     {9.97, "10s"},
                                                    {59.4, "59s"},    {59.6, "1m 00s"},  {725, "12m 05s"},   {3599.6, "1h 00m"},
                                                    {3720, "1h 02m"}, {86390, "1d 00h"}, {273600, "3d 04h"}, {NAN, "-"},
                                                    {-1, "-"},        {INFINITY, "-"}};
    for (const auto& [seconds, text] : cases) EXPECT_EQ(human_duration(seconds), text) << seconds;
}

TEST(Text, AxisNumbers) {
    const std::pair<double, const char*> cases[] = {{0, "0"},       {3e-4, "3e-4"}, {1.59e-3, "1.59e-3"}, {2e-10, "2e-10"},
                                                    {0.25, "0.25"}, {-1.5, "-1.5"}, {12000, "12,000"},    {150000, "150K"}};
    for (const auto& [value, text] : cases) EXPECT_EQ(short_number(value), text);
    EXPECT_EQ(linear_ticks(0, 1, 5), (std::vector<double>{0, 0.2, 0.4, 3 * 0.2, 0.8, 1}));
    EXPECT_EQ(linear_ticks(2.7, 6.6, 5), (std::vector<double>{3, 4, 5, 6}));
    EXPECT_EQ(log_ticks(0.15, 12, 5), (std::vector<double>{0.2, 0.5, 1, 2, 5, 10}));
    EXPECT_LE(log_ticks(1e-12, 1e6, 5).size(), 6u);
}

TEST(Text, Utf8) {
    EXPECT_EQ(display_width("日本 é"), 6);
    EXPECT_EQ(printable("a\x1b[31mb\r\nc\xff"
                        "d\xc2\x9b"
                        "e\xe2\x80\xaeg"),
              "a\xef\xbf\xbd[31mb\nc\xef\xbf\xbd"
              "d\xef\xbf\xbd"
              "e\xef\xbf\xbdg");
    EXPECT_EQ(printable("\xed\xa0\x80"), "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd");  // a surrogate is no character
    EXPECT_EQ(printable(std::string("\xf0\x9f\x98\x80\0", 5)), "\xf0\x9f\x98\x80\xef\xbf\xbd");
    EXPECT_EQ(printable("\xe3\x81"), "\xef\xbf\xbd\xef\xbf\xbd");  // cut off
    EXPECT_EQ(wrap_text("the quick brown fox", 10), (std::vector<std::string>{"the quick", "brown fox"}));
    EXPECT_EQ(wrap_text("abcdefgh\n\nx", 3), (std::vector<std::string>{"abc", "def", "gh", "", "x"}));
    EXPECT_EQ(wrap_text("日本語文", 5), (std::vector<std::string>{"日本", "語文"}));
}

// A terminal of so many columns, and what it was sent.
struct Terminal {
    int master = posix_openpt(O_RDWR | O_NOCTTY);
    FILE* f = nullptr;
    explicit Terminal(unsigned short columns) {
        CHECK(master >= 0 && grantpt(master) == 0 && unlockpt(master) == 0, "no terminal");
        f = fopen(ptsname(master), "w");
        CHECK(f, "no terminal");
        termios raw;
        const winsize size = {24, columns, 0, 0};
        CHECK(tcgetattr(fileno(f), &raw) == 0 && ioctl(master, TIOCSWINSZ, &size) == 0, "no terminal");
        cfmakeraw(&raw);
        CHECK(tcsetattr(fileno(f), TCSANOW, &raw) == 0, "no terminal");
    }
    ~Terminal() {
        fclose(f);
        close(master);
    }
    std::string read_line() {
        std::string shown;
        char buffer[4096];
        while (shown.find('\n') == std::string::npos) {
            const ssize_t n = read(master, buffer, sizeof buffer);
            CHECK(n > 0, "the terminal was sent no line");
            shown.append(buffer, (size_t)n);
        }
        return shown;
    }
};

// A terminal gets whole characters and none that it would obey; a file gets every byte.
TEST(Text, OutputInPieces) {
    const std::vector<std::string> pieces = {
        "a\x1b[2", "J\xe3",    "\x81", "\x82 \xf0\x9f",      "\x98",     "\x80", "\xff", "\xc2", "\x9b", "\xe2\x80",
        "\xae",    "\xf0\x9f", "x",    std::string("\0", 1), "\xe3\x81", "\n"};
    std::string all, shown;
    for (const std::string& piece : pieces) all += piece;
    {
        Terminal terminal(80);
        TextOutput to_terminal(terminal.f);
        for (const std::string& piece : pieces) to_terminal.write(piece);
        shown = terminal.read_line();
    }
    EXPECT_EQ(shown, printable(all));
    EXPECT_NE(shown.find("あ 😀"), std::string::npos) << shown;
    for (const char* bad : {"\x1b", "\xc2\x9b", "\xe2\x80\xae"}) EXPECT_EQ(shown.find(bad), std::string::npos);

    const Scratch dir;
    FILE* file = fopen((dir / "text").c_str(), "w");
    TextOutput to_file(file);
    for (const std::string& piece : pieces) to_file.write(piece);
    print_line(file, "error: cannot open \x1b]0;x\a\x7f\xff");
    Table table;
    table.section("Model \x1b[31m");
    table.row("a", "b");
    table.print(file);
    fclose(file);
    std::ifstream in(dir / "text", std::ios::binary);
    EXPECT_EQ(std::string(std::istreambuf_iterator<char>(in), {}), all + "error: cannot open �]0;x���\nModel �[31m\n  a  b\n");
}

TEST(Text, Table) {
    Table t;
    t.section("Memory", Table::Values::amounts);
    t.row("weights", "5.73 MiB", "4%");
    t.row("moments", "117 MiB", "80%");
    t.section("Model");
    t.row("a", "one two three four five six seven");
    EXPECT_EQ(t.str(Paint{}, 34),
              "Memory\n  weights  5.73 MiB  4%\n  moments   117 MiB  80%\nModel\n  a        one two three four five\n          "
              " six seven\n");
}

TEST(Text, ProgressWithoutTerminal) {
    Console console;
    {
        Progress p("reading", 1000, "B", console.f);
        for (int i = 0; i <= 1000; i++) p.update(i);
        EXPECT_EQ(console.str(), "");  // a short job is not worth a line
        p.finish();
    }
    EXPECT_EQ(console.str().rfind("reading: 1000 B in ", 0), 0u) << console.str();
    EXPECT_EQ(count(console.str(), "\n"), 1u);
    EXPECT_EQ(console.str().find_first_of("\r\x1b"), std::string::npos);
}

TEST(Text, ProgressOnATerminal) {
    const auto shown = [](unsigned short columns, int64_t total) {
        Terminal terminal(columns);
        Progress p("reading", total, "B", terminal.f);
        usleep(150000);  // as a rate is known
        p.update(250000);
        p.update(500000);  // too soon for another
        p.finish();
        return terminal.read_line();
    };
    const std::string wide = shown(100, 1000000), narrow = shown(40, 1000000), unknown = shown(100, 0);
    EXPECT_NE(wide.find(" 25%  244 KiB / 977 KiB  "), std::string::npos) << wide;
    EXPECT_NE(wide.find("iB/s"), std::string::npos) << wide;
    EXPECT_EQ(wide.find("50%"), std::string::npos) << wide;
    const auto cells = [](const std::string& s) { return count(s, "━") + count(s, "─") + count(s, "#") + count(s, "-"); };
    EXPECT_EQ(cells(wide), 24u) << wide;
    EXPECT_EQ(count(wide, "━") + count(wide, "#"), 6u) << wide;
    EXPECT_EQ(cells(narrow), 0u) << narrow;
    EXPECT_NE(narrow.find("reading"), std::string::npos) << narrow;
    EXPECT_NE(narrow.find(" 25%  244 KiB / 977 KiB"), std::string::npos) << narrow;
    EXPECT_NE(unknown.find("reading  244 KiB  "), std::string::npos) << unknown;
    EXPECT_EQ(unknown.find("%"), std::string::npos) << unknown;
    for (const std::string& s : {wide, narrow, unknown}) EXPECT_NE(s.find("reading: 488 KiB in "), std::string::npos) << s;
}

TEST(Text, AStageIsNamedOnlyIfItLasts) {
    Scratch scratch;
    const std::string path = scratch / "console";
    FILE* console = fopen(path.c_str(), "w");
    {
        PhaseStatus phase(console, 0.001), patient(console, 60);
        patient.begin("short");
        phase.begin("loading\x1b[2J");
        while (fs::file_size(path) == 0) usleep(1000);
        phase.done();
    }
    fclose(console);
    EXPECT_EQ(read_whole_file(path), "loading\xef\xbf\xbd[2J ...\n");
}

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
        c.add(i, NAN);  // is left out
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
    // parts hold 256 points each, but for the first (255) and the last
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

// Numbers that axes have trouble with.
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

// Numbers in attributes and in the script are numbers, and not long.
void expect_drawable(const std::string& text) {
    for (const char* none : {"nan", "inf", "NaN", "Inf"}) EXPECT_EQ(text.find(none), std::string::npos) << none << text;
    size_t run = 0;
    for (const char c : text) {
        run = c >= '0' && c <= '9' ? run + 1 : 0;
        ASSERT_LT(run, 16u) << text;
    }
}

// What the page's script reads is JSON: it has no other numbers.
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

TEST(Eta, FollowsTheRate) {
    Eta eta;
    EXPECT_TRUE(std::isnan(eta.seconds_left(10)));
    eta.add(0, 100);
    eta.add(1, 150);  // the first step is slow
    for (int i = 2; i <= 10; i++) eta.add(i, 150 + 2 * (i - 1));
    EXPECT_NEAR(eta.seconds_left(20), 20, 1e-9);
    EXPECT_EQ(eta.seconds_left(10), 0);
    EXPECT_TRUE(std::isnan(eta.seconds_left(0)));  // how much there is to do is not known
}

// ---- the logger ----
TEST(Logger, EveryLineIsJson) {
    Scratch scratch;
    Console console;
    {
        Logger log(scratch / "a/b", false, false, 1, console.f);
        log.run(run_info(5));
        for (int i = 1; i <= 5; i++) {
            StepStats s = step_at(i, i == 2 ? NAN : 5.0 / i);
            if (i == 2) {
                s.grad_norm = INFINITY;
                s.lse_mean = -INFINITY;
                s.skipped = 1;
                s.applied = false;
            }
            if (i > 2) s.skipped = 1;
            log.step(s);
        }
        log.event(2, "warning", "skip", "quote \" backslash \\ newline \n escape \x1b[31m");
        log.valid(4, 4.5, 1000, 12, {{"books", 4}, {"web\n", NAN}});
        log.valid(5, INFINITY, 1000, 12);
        log.sample(5, "prompt\t", "not UTF-8: \xff\xc3 </script> \x01");
        log.end("finished");
    }
    const std::vector<json> lines = lines_of(scratch / "a/b/log.jsonl");
    ASSERT_EQ(lines.size(), 1 + 5 + 1 + 2 + 1 + 1u);
    EXPECT_EQ(lines[0]["kind"], "run");
    EXPECT_EQ(lines[0]["name"], "a <name> & \"more\"");
    EXPECT_EQ(lines[0]["options"]["lr"], 1e-3);
    EXPECT_EQ(lines[1]["loss"], 5.0);
    EXPECT_EQ(lines[1].count("nonfinite"), 0u);
    EXPECT_TRUE(lines[2]["loss"].is_null());
    EXPECT_TRUE(lines[2]["grad_norm"].is_null());
    EXPECT_EQ(lines[2]["nonfinite"], (json{{"loss", "nan"}, {"grad_norm", "inf"}, {"lse_mean", "-inf"}}));
    EXPECT_EQ(lines[3]["skipped"], 1);
    EXPECT_EQ(lines[6]["message"], "quote \" backslash \\ newline \n escape \x1b[31m");
    EXPECT_EQ(lines[7]["sets"], (json{{"books", 4.0}, {"web\n", nullptr}}));
    EXPECT_NE(console.str().find("    4.0000  books\n"), std::string::npos) << console.str();
    EXPECT_EQ(lines[8].count("sets"), 0u);
    EXPECT_EQ(lines[8]["nonfinite"]["loss"], "inf");
    EXPECT_EQ(lines[9]["prompt"], "prompt\t");
    EXPECT_NE(lines[9]["text"].get<std::string>().find("\xef\xbf\xbd"), std::string::npos);
    EXPECT_EQ(lines[10]["status"], "finished");
    for (const char* key :
         {"step", "tokens", "lr", "z_loss", "global_batch", "step_ms", "tokens_per_s", "model_tflops", "seconds"})
        EXPECT_TRUE(lines[5].contains(key)) << key;
}

TEST(Logger, PlainConsoleHasNoControlCharacters) {
    Scratch scratch;
    Console console;
    Logger log(scratch.dir, false, false, 0, console.f);
    log.run(run_info(300));
    for (int i = 1; i <= 300; i++) log.step(step_at(i, 3));
    log.sample(300, "a\x1b[2J", "b\rc");
    log.event(300, "warning", "w", "careful\x07");
    log.end("finished");
    const std::string text = console.str();
    for (const char c : text) ASSERT_FALSE(((unsigned char)c < 0x20 && c != '\n') || c == 0x7f) << text;
    EXPECT_EQ(count(text, "step 1/300  loss 3.0000"), 1u);
    EXPECT_EQ(count(text, "step 300/300"), 1u);
    EXPECT_EQ(count(text, "/300  loss"), 2u) << "at most one line per 10 s, and the last";
    EXPECT_NE(text.find("GFLOP/s 50"), std::string::npos) << text;
}

TEST(Logger, TerminalHasAHeaderNowAndThenAndAlignedLines) {
    unsetenv("NO_COLOR");
    Scratch scratch;
    Console colored, plain;
    for (Console* console : {&colored, &plain}) {
        if (console == &plain) setenv("NO_COLOR", "1", 1);
        Logger log(scratch.dir, false, true, 1, console->f);
        log.run(run_info(70));
        for (int i = 1; i <= 70; i++) log.step(step_at(i, 3));
        log.end("finished");
    }
    unsetenv("NO_COLOR");
    EXPECT_NE(colored.str().find("\x1b["), std::string::npos);
    EXPECT_EQ(plain.str().find('\x1b'), std::string::npos);
    EXPECT_EQ(count(plain.str(), "grad norm"), 3u);
    std::istringstream lines(plain.str());
    std::string line;
    size_t width = 0;
    for (int i = 0; i < 73 && std::getline(lines, line); i++) {
        if (i == 0) width = line.size();
        EXPECT_EQ(line.size(), width) << line;
    }
}

TEST(Logger, QuietAndInterval) {
    Scratch scratch;
    Console quiet, sparse;
    {
        Logger log(scratch.dir, true, true, 1, quiet.f);
        log.run(run_info(10));
        for (int i = 1; i <= 10; i++) log.step(step_at(i, 3));
        log.valid(10, 3, 10, 1);
        log.sample(10, "a", "b");
        log.event(10, "info", "x", "calm");
        EXPECT_EQ(quiet.str(), "");
        log.event(10, "warning", "x", "attention");
        EXPECT_NE(quiet.str().find("attention"), std::string::npos);
        log.end("finished");
    }
    Logger log(scratch.dir, false, true, 4, sparse.f);
    log.run(run_info(10));
    for (int i = 1; i <= 10; i++) log.step(step_at(i, 3));
    std::string stay;
    for (const std::string& line : Screen(sparse.str()).lines) stay += line + "\n";
    EXPECT_EQ(count(stay, "/10  "), 4u) << stay;  // 1, 4, 8, 10
}

// Whatever the width, no line of any kind needs more, and what is rewritten leaves nothing behind.
TEST(Logger, LinesFitTheTerminal) {
    for (const int width : {40, 80, 120, 200}) {
        setenv("COLUMNS", std::to_string(width).c_str(), 1);
        Scratch scratch;
        Console console;
        int live = 0;
        {
            Logger log(scratch.dir, false, true, 0, console.f);
            RunInfo run = run_info(1000000);
            run.batch_ramp = true;
            log.run(run);
            for (int i = 1; i <= 40; i++) {
                StepStats s = step_at(i * 25000, i == 7 ? INFINITY : 3);
                s.mfu = 0.412;
                s.grad_norm = 1e10;
                s.applied = i != 7;
                log.step(s);
                if (i == 3) usleep(110000);
                if (i < 5) live += Screen(console.str()).lines.back().find("0/1000000 ") != std::string::npos;
            }
            log.valid(1000000, 2, 123456789, 123456);
            log.event(1000000, "info", "checkpoint",
                      "checkpoint in a folder with a long name: " + std::string(60, 'x') + " in 2 s");
            log.event(1000000, "warning", "skip", "a loss far above the median of what came before it; its update was dropped");
            log.sample(1000000, "once upon a time", std::string(150, 'w') + " and so on");
            log.end("stopped", "by SIGTERM",
                    "train_gpt train --preset quickstart --data-path somewhere/data --lr 0.001 --resume auto");
        }
        EXPECT_EQ(live, 1) << "after 0.1 s the newest step is shown, in a line that does not end";
        const Screen screen(console.str());
        EXPECT_LE(screen.widest, (size_t)width) << console.str();
        std::string all;
        for (const std::string& line : screen.lines) all += line + "\n";
        for (const char* shown :
             {"step ", "loss ", "tok/s", "stopped after 1,000,000 steps", "/report.html\n", "to go on:\n  train_gpt train"})
            EXPECT_NE(all.find(shown), std::string::npos) << shown << " at " << width << ":\n" << all;
        EXPECT_EQ(all.find("ETA") != std::string::npos, width >= 80) << all;
        EXPECT_EQ(all.find("z-loss") != std::string::npos, width >= 120) << all;
        EXPECT_EQ(count(all, "100000/1000000 "), 0u) << "a line that was rewritten stayed:\n" << all;
    }
    unsetenv("COLUMNS");
}

TEST(Logger, UnwritableDirectoryIsRefused) {
    Scratch scratch;
    std::ofstream(scratch / "file") << "x";
    EXPECT_THROW(Logger(scratch / "file", false, false), Error);
    EXPECT_THROW(Logger(scratch / "file/below", false, false), Error);
    fs::create_directories(scratch / "taken/log.jsonl");
    EXPECT_THROW(Logger(scratch / "taken", false, false), Error);
}

// A limit on file sizes stands in for a full disk.
TEST(Logger, FullDiskIsReportedOnceAndTrainingGoesOn) {
    Scratch scratch;
    Console console;
    rlimit before;
    ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
    {
        Logger log(scratch.dir, true, false, 1, console.f);
        log.run(run_info(100));
        const rlimit small = {8000, before.rlim_max};
        ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
        for (int i = 1; i <= 100; i++) log.step(step_at(i, 3));
        ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
        log.event(100, "info", "x", "space again");
        log.end("finished");
    }
    EXPECT_EQ(count(console.str(), "log.jsonl: "), 1u) << console.str();
    const std::vector<json> lines = lines_of(scratch / "log.jsonl");  // no half lines
    EXPECT_LT(lines.size(), 100u);
    EXPECT_GT(lines.size(), 10u);
    EXPECT_EQ(lines[lines.size() - 2]["message"], "space again");
}

TEST(Logger, NothingInItEndsTraining) {
    Scratch scratch;
    const std::string text(100000, 'x');
    const json layers(4, json{{"layer", "block"}});  // few, for JSON needs memory even to be destroyed
    for (const size_t bytes : {500, 1000, 3000, 20000, 90000}) {
        Console console;
        {
            Logger log(scratch.dir, false, false, 1, console.f);
            log.run(run_info(100));
            largest_piece = bytes;
            EXPECT_NO_THROW(log.step(step_at(1, 3)));
            EXPECT_NO_THROW(log.health(1, layers));
            EXPECT_NO_THROW(log.valid(1, 3, 10, 1));
            EXPECT_NO_THROW(log.sample(1, text, text));
            EXPECT_NO_THROW(log.event(1, "warning", "x", text));
            largest_piece = SIZE_MAX;
            log.step(step_at(2, 3));
            largest_piece = bytes;
            EXPECT_NO_THROW(log.end("finished"));
            largest_piece = SIZE_MAX;
        }
        EXPECT_GT(lines_of(scratch / "log.jsonl").size(), 1u);
        const size_t said = count(console.str(), "bad_alloc; training is not affected");
        EXPECT_GE(said, 1u) << bytes << console.str();
        EXPECT_LE(said, 4u) << "once for each: log, report, curve, console";
    }
    // What cannot be written is said once.
    Console console;
    fs::create_directories(scratch / "in/report.html");
    fs::create_directories(scratch / "in/loss.svg");
    Logger log(scratch / "in", false, false, 1, console.f);
    log.run(run_info(10));
    for (int i = 1; i <= 3; i++) log.step(step_at(i, 3));
    log.end("finished");
    EXPECT_EQ(count(console.str(), "error: the report: "), 1u) << console.str();
    EXPECT_EQ(count(console.str(), "error: the loss curve: "), 1u) << console.str();
    EXPECT_EQ(lines_of(scratch / "in/log.jsonl").back()["status"], "finished");
}

TEST(Logger, AConsoleThatIsClosedEndsNoRun) {
    Scratch scratch;
    int ends[2];
    ASSERT_EQ(pipe(ends), 0);
    FILE* console = fdopen(ends[1], "w");
    {
        Logger log(scratch.dir, false, false, 1, console);
        log.run(run_info(10));
        close(ends[0]);
        log.event(1, "info", "x", "nobody reads this");
        log.end("finished");
    }
    fclose(console);
    EXPECT_EQ(lines_of(scratch / "log.jsonl").back()["status"], "finished");
}

// By others, while the run goes on.
TEST(Logger, ALogThatIsDeletedIsWrittenAgainWhole) {
    Scratch scratch;
    const std::string out = scratch / "out", path = out + "/log.jsonl";
    const std::pair<const char*, std::function<void()>> cases[] = {
        {"deleted", [&] { fs::remove(path); }},
        {"folder deleted", [&] { fs::remove_all(out); }},
        {"folder moved",
         [&] {
             fs::remove_all(scratch / "away");
             fs::rename(out, scratch / "away");
         }},
        {"replaced", [&] { fs::rename(path, out + "/old"), std::ofstream(path) << "another file\n"; }},
        {"left alone", [] {}}};
    for (const auto& [name, damage] : cases) {
        fs::remove_all(out);
        Console console;
        const int expected = strcmp(name, "left alone") != 0;
        {
            Logger log(out, false, false, 1, console.f);
            log.run(run_info(40));
            damage();
            for (int i = 1; i <= 20; i++) log.step(step_at(i, 3));  // the first one refreshes the report
            EXPECT_EQ(lines_of(path).size(), 21u + expected) << name;
            damage();
            for (int i = 21; i <= 40; i++) log.step(step_at(i, 3));
            log.end("finished");
        }
        EXPECT_EQ(count(console.str(), "written again in full"), 2u * expected) << name;
        std::vector<json> lines = lines_of(path);
        EXPECT_EQ(lines.size(), 42u + 2 * expected) << name;
        EXPECT_EQ(lines[0]["kind"], "run") << name;
        EXPECT_EQ(lines.back()["status"], "finished") << name;
        lines.erase(std::remove_if(lines.begin(), lines.end(), [](const json& j) { return j["kind"] != "step"; }), lines.end());
        for (int i = 1; i <= 40; i++) EXPECT_EQ(lines[i - 1]["step"], i) << name;
        EXPECT_TRUE(fs::exists(out + "/report.html")) << name;
    }
}

// The directory is another run's by now.
TEST(Logger, WhatIsAnothersIsLeftAlone) {
    Scratch scratch;
    const std::string out = scratch / "out";
    Console console;
    bool taken = false;
    {
        Logger log(out, false, false, 1, console.f, [&] {
            if (taken) fail("another run is writing there");
        });
        log.run(run_info(40));
        fs::rename(out, scratch / "away");
        fs::create_directory(out);
        taken = true;
        for (const char* file : {"/log.jsonl", "/report.html", "/loss.svg"}) std::ofstream(out + file) << "another's";
        for (int i = 1; i <= 20; i++) log.step(step_at(i, 3));
        log.end("finished");
    }
    for (const char* file : {"/log.jsonl", "/report.html", "/loss.svg"})
        EXPECT_EQ(read_whole_file(out + file), "another's") << file;
    EXPECT_EQ(count(console.str(), "another run is writing there"), 3u);  // once for each
}

TEST(Logger, AnExceptionMarksTheRunAsFailed) {
    Scratch scratch;
    Console console;
    try {
        Logger log(scratch.dir, false, false, 1, console.f);
        log.run(run_info(10));
        log.step(step_at(1, 3));
        throw Error("something");
    } catch (const Error&) {
    }
    EXPECT_EQ(lines_of(scratch / "log.jsonl").back()["status"], "failed");
    EXPECT_EQ(read_whole_file(scratch / "report.html").find("http-equiv"), std::string::npos);
}

// ---- the report ----
TEST(Report, IsWholeAndReferencesNothingOutside) {
    Scratch scratch;
    Console console;
    Logger log(scratch.dir, true, false, 1, console.f);
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
    for (int run = 0; run < 2; run++) {  // the second run in the same directory is the one that counts
        Logger log(scratch.dir, true, false, 1, console.f);
        log.run(run_info(50));
        for (int i = 1; i <= 50; i++) log.step(step_at(i, run + 10.0 / i));
        log.valid(50, 4, 10, 1);
        log.sample(50, "p", "t");
        log.event(50, "info", "e", "m");
        log.end("stopped", "by the user");
        const RunLog back = read_log(scratch / "log.jsonl");
        EXPECT_EQ(render_report(back, 0, 10), render_report(log.records(), 0, 10));
        std::ofstream(scratch / "log.jsonl", std::ios::app) << "{\"kind\":\"st";  // cut off by a crash
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

// What the page's script gets to draw.
json page_data(const std::string& page) {
    const std::string start = "const page = ";
    const size_t at = page.find(start) + start.size();
    return json::parse(page.substr(at, page.find(", refreshSeconds = ") - at));
}

// A long run, every curve full of parts, with the lowest and the highest loss somewhere.
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

// llmc/report/report.h says how large a page may be, and that no spike is lost.
TEST(Report, IsSmallHoweverLongTheRun) {
    for (const int64_t steps : {740, 1490, 100000}) {
        const RunLog log = long_run("long", steps);
        const std::string page = render_report(log, 0, 10);
        EXPECT_LT(page.size(), 400000u) << steps;
        const json loss = page_data(page)["charts"][0]["series"][0];
        EXPECT_LE(loss["y"].size(), Curve::max_parts);
        EXPECT_EQ(*std::max_element(loss["high"].begin(), loss["high"].end()), 9999);
        EXPECT_EQ(*std::min_element(loss["low"].begin(), loss["low"].end()), -9999);
    }
    const RunLog log = long_run("long", 740);
    for (const size_t n : {2, 5, 32}) {
        const std::string page = render_comparison(std::vector<NamedRun>(n, {"x", &log}), 0);
        EXPECT_LT(page.size(), 2500000u) << n;
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
    // several data sets: a curve each
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

// Records of an older or a newer version: what is not known is passed over, what is missing has no curve.
TEST(Report, ReadsLogsOfOtherVersions) {
    RunLog log;
    for (const char* line :
         {"{\"kind\":\"run\",\"name\":\"x\",\"colour\":[1],\"options\":{\"--lr\":{\"a\":1}},\"machine\":[]}",
          "{\"kind\":\"step\",\"step\":1,\"loss\":3,\"seconds\":10,\"entropy2\":7,\"Rank\":[1,2],\"memory_bytes\":null}",
          "{\"kind\":\"step\",\"step\":2,\"loss\":2,\"seconds\":20,\"memory_bytes\":2048}",
          "{\"kind\":\"step\",\"step\":3,\"loss\":2,\"seconds\":1}", "{\"kind\":\"step\",\"step\":4,\"loss\":2,\"seconds\":2}"})
        EXPECT_TRUE(log.add_line(line)) << line;
    EXPECT_FALSE(log.add_line("{\"kind\":\"weather\",\"step\":2}"));
    const std::string page = render_report(log, 0, 10);
    expect_balanced(page);
    EXPECT_NE(page.find("id=\"memory_bytes\""), std::string::npos);
    for (const char* none : {"id=\"lr\"", "id=\"mfu\"", "id=\"tokens_per_s\""}) EXPECT_EQ(page.find(none), std::string::npos);
    // the clock of older versions began again where a run was resumed
    EXPECT_EQ(page_data(page)["runs"][0]["seconds"]["y"], json({10, 20, 21, 22}));
}

// Text from outside in every place where a record has text.
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
        Logger log(scratch.dir, true, false, 1, console.f);
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

// ---- a log that is resumed ----
std::string step_line(int64_t step, double loss = 3) {
    StepStats s = step_at(step, loss);
    s.waiting_ms = {{"data", 0.5}};
    return to_json(s).dump() + "\n";
}
std::string event_line(int64_t step, const std::string& name) {
    return json{{"kind", "event"}, {"step", step}, {"level", "info"}, {"event", name}, {"message", name}}.dump() + "\n";
}
const std::string run_line = "{\"kind\":\"run\",\"name\":\"x\",\"total_steps\":100}\n";

// The fast way to read a step gives what the JSON parser gives, and refuses what that refuses.
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
        if (!j.is_object()) continue;  // such as 01: what is read is a number all the same
        for (const std::string_view name : StepNumbers::names) {
            const double slow = RunLog::number(j, std::string(name).c_str());
            if (count(line, "\"" + std::string(name) + "\"") != 1) continue;  // twice: either counts
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
    // what a rollback undid stays before steps that stay
    const std::string back = five + event_line(3, "rollback") + step_line(4);
    EXPECT_EQ(cut(back + step_line(5) + step_line(6), 4), back);
    EXPECT_EQ(cut(back + step_line(5) + step_line(6), 3), cut(five, 3) + event_line(3, "rollback"));
    // of two runs in a file only the last is cut
    EXPECT_EQ(cut(five + run_line + step_line(1) + step_line(2), 1), five + run_line + step_line(1));
    EXPECT_EQ(cut("", 3), "");
    EXPECT_EQ(cut("junk\n\n[]\n", 3), "");
}

TEST(Logger, AHostileLogIsPassedOverAndCounted) {
    Scratch scratch;
    const std::string deep(200000, '['), deep_object = [] {
        std::string s;
        for (int i = 0; i < 100000; i++) s += "{\"kind\":";
        return s + "1" + std::string(100000, '}');
    }();
    const std::string long_line = "{\"kind\":\"event\",\"step\":1,\"message\":\"" + std::string(3 << 20, 'x') + "\"}";
    const std::vector<std::string> odd = {deep,
                                          deep + std::string(200000, ']'),
                                          "{\"kind\":\"event\",\"step\":1,\"message\":" + deep + std::string(200000, ']') + "}",
                                          deep_object,
                                          long_line,
                                          "{\"kind\":5}",
                                          "{\"kind\":\"step\",\"step\":\"x\"}",
                                          "{\"kind\":\"step\",\"step\":-1}",
                                          "{\"kind\":\"step\",\"step\":1e300}",
                                          "{\"kind\":\"step\",\"step\":18446744073709551615}",
                                          "{\"kind\":\"step\",\"step\":NaN}",
                                          "{\"kind\":\"step\",\"step\":2,\"loss\":3",
                                          "{\"kind\":\"step\",\"step\":2,\"loss\":1e999}",
                                          "{\"kind\":\"valid\",\"step\":[1]}",
                                          "{\"kind\":\"event\",\"step\":1,\"message\":\"\xff\xfe\"}",
                                          "{\"kind\":[\"run\"]}",
                                          std::string("\0{}", 3),
                                          "null",
                                          "\"text\"",
                                          ""};
    const std::string wrong_types =
        "{\"kind\":\"step\",\"step\":3,\"loss\":\"x\",\"lr\":[],\"tokens\":{\"a\":\"b\"},\"eta_s\":true}\n"
        "{\"kind\":\"valid\",\"step\":3,\"loss\":{}}\n{\"kind\":\"sample\",\"step\":3,\"text\":7}\n"
        "{\"kind\":\"event\",\"step\":3,\"level\":1,\"event\":null}\n{\"kind\":\"health\",\"step\":3,\"layers\":[3,{\"layer\":{"
        "}}]}\n";
    for (const bool at_end : {false, true}) {
        {
            std::ofstream file(scratch / "log.jsonl");
            file << run_line << step_line(1) << step_line(2);
            for (const std::string& line : odd) file << line << "\n";
            if (!at_end) file << wrong_types << step_line(3);
            file << step_line(4) << step_line(5) << "{\"kind\":\"end\",\"step\":5,\"status\":\"failed\"}\n";
        }
        Console console;
        {
            Logger log(scratch.dir, true, false, 1, console.f);
            log.run(run_info(10), at_end ? 2 : 3);
            for (int i = at_end ? 3 : 4; i <= 6; i++) log.step(step_at(i, 3));
            EXPECT_EQ(log.records().step(), 6);
            EXPECT_EQ(log.records().curve("grad_norm").parts().size(), 6u);
            expect_balanced(render_report(log.records(), 0, 10));
            log.end("finished");
        }
        EXPECT_EQ(count(console.str(), "warning: "), 1u) << console.str();
        EXPECT_NE(console.str().find(format("%zu lines of ", odd.size())), std::string::npos) << console.str();
        std::ifstream in(scratch / "log.jsonl");
        std::string line;
        int64_t next = 1;
        while (std::getline(in, line)) {
            StepNumbers step;
            if (!scan_step(line, step) || std::isnan(step["loss"]) || !RunLog::is_step(step["step"])) continue;
            EXPECT_EQ(step["step"], next++) << line;
        }
        EXPECT_EQ(next, 7);
    }
}

// Of a long run only what the page needs is in memory, and the page is the same whether the run was resumed or not.
TEST(RunLog, ALongRunTakesLittleMemory) {
    Scratch scratch;
    const int64_t steps = 30000;
    RunLog memory;
    {
        std::ofstream file(scratch / "log.jsonl");
        file << run_line;
        memory.add(json::parse(run_line));
        for (int64_t i = 1; i <= steps + 10; i++) {
            const std::string line = step_line(i, i == 777 ? 99 : 3 + 1.0 / (double)i);
            file << line;
            if (i <= steps) memory.add(json::parse(line));
        }
    }
    const size_t before = peak = used.load();
    cut_log(scratch / "log.jsonl", steps);
    const RunLog back = read_log(scratch / "log.jsonl");
    EXPECT_LT(peak - before, 4u << 20) << "for a file of " << fs::file_size(scratch / "log.jsonl");
    EXPECT_EQ(back.step(), steps);
    EXPECT_EQ(render_report(back, 0, 10), render_report(memory, 0, 10));
    EXPECT_EQ(count(read_whole_file(scratch / "log.jsonl"), "\n"), (size_t)steps + 1);
}

// What a rollback undoes leaves the curves, and is shown beside them.
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
        log.add(json{{"kind", "valid"}, {"step", i}, {"loss", 5}});
    }
    event(8, "rollback");
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

}  // namespace test_logger
