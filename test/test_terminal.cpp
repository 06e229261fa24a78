// Text for people (llmc/base/terminal.h): numbers, times, tables, and progress on a terminal.
#include <gtest/gtest.h>
#include <fcntl.h>
#include <sys/ioctl.h>
#include <termios.h>

#include <fstream>
#include <string>

#include "../llmc/base/progress.h"
#include "../llmc/base/table.h"
#include "../llmc/base/terminal.h"
#include "../llmc/base/text.h"
#include "runs.h"

namespace test_terminal {

using namespace test_runs;

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
    EXPECT_EQ(printable("\xed\xa0\x80"), "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd");  // a surrogate is not a character
    EXPECT_EQ(printable(std::string("\xf0\x9f\x98\x80\0", 5)), "\xf0\x9f\x98\x80\xef\xbf\xbd");
    EXPECT_EQ(printable("\xe3\x81"), "\xef\xbf\xbd\xef\xbf\xbd");  // truncated
    EXPECT_EQ(wrap_text("the quick brown fox", 10), (std::vector<std::string>{"the quick", "brown fox"}));
    EXPECT_EQ(wrap_text("abcdefgh\n\nx", 3), (std::vector<std::string>{"abc", "def", "gh", "", "x"}));
    EXPECT_EQ(wrap_text("日本語文", 5), (std::vector<std::string>{"日本", "語文"}));
}

// A terminal with this number of columns, and its received output.
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

// A terminal gets whole characters and no control characters; a file gets every byte.
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
        EXPECT_EQ(console.str(), "");  // a short job prints no progress
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
        usleep(150000);  // until a rate is known
        p.update(250000);
        p.update(500000);  // too soon for an update
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

}  // namespace test_terminal
