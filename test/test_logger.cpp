// A run's output during training: console and log.jsonl, whatever happens to them; a resumed log.
#include <gtest/gtest.h>
#include <malloc.h>
#include <sys/resource.h>
#include <csignal>

#include <atomic>
#include <filesystem>
#include <fstream>

#include "../llmc/report/logger.h"
#include "runs.h"

// As in training (stop.h).
[[maybe_unused]] static const auto ignored = {std::signal(SIGPIPE, SIG_IGN), std::signal(SIGXFSZ, SIG_IGN)};

// Counted memory, which refuses blocks larger than a test allows.
static std::atomic<size_t> largest_piece{SIZE_MAX}, used{0}, peak{0};
void* operator new(size_t bytes) {
    void* p = bytes > largest_piece ? nullptr : malloc(bytes);
    if (!p) throw std::bad_alloc();
    const size_t now = used += malloc_usable_size(p);
    if (now > peak) peak = now;
    return p;
}
void* operator new(size_t bytes, const std::nothrow_t&) noexcept try {
    return operator new(bytes);
} catch (const std::bad_alloc&) {
    return nullptr;
}
void operator delete(void* p) noexcept {
    if (p) used -= malloc_usable_size(p);
    free(p);
}
void operator delete(void* p, size_t) noexcept { operator delete(p); }

namespace test_logger {

using namespace test_runs;

// A terminal's final content at any width, without colors, and the largest number of columns it needed.
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

TEST(Eta, FollowsTheRate) {
    Eta eta;
    EXPECT_TRUE(std::isnan(eta.seconds_left(10)));
    eta.add(0, 100);
    eta.add(1, 150);  // the first step is slow
    for (int i = 2; i <= 10; i++) eta.add(i, 150 + 2 * (i - 1));
    EXPECT_NEAR(eta.seconds_left(20), 20, 1e-9);
    EXPECT_EQ(eta.seconds_left(10), 0);
    EXPECT_TRUE(std::isnan(eta.seconds_left(0)));  // the total is unknown
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
    Logger log(scratch / "", false, false, 0, console.f);
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
        Logger log(scratch / "", false, true, 1, console->f);
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
        Logger log(scratch / "", true, true, 1, quiet.f);
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
    Logger log(scratch / "", false, true, 4, sparse.f);
    log.run(run_info(10));
    for (int i = 1; i <= 10; i++) log.step(step_at(i, 3));
    std::string stay;
    for (const std::string& line : Screen(sparse.str()).lines) stay += line + "\n";
    EXPECT_EQ(count(stay, "/10  "), 4u) << stay;  // 1, 4, 8, 10
}

// At any width, no line of any kind is wider, and rewriting a line leaves no characters behind.
TEST(Logger, LinesFitTheTerminal) {
    for (const int width : {40, 80, 120, 200}) {
        setenv("COLUMNS", std::to_string(width).c_str(), 1);
        Scratch scratch;
        Console console;
        int live = 0;
        {
            Logger log(scratch / "", false, true, 0, console.f);
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
             {"step ", "loss ", "tok/s", "stopped after 1,000,000 steps", "/report.html\n", "to resume:\n  train_gpt train"})
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

// A limit on file sizes simulates a full disk.
TEST(Logger, FullDiskIsReportedOnceAndTrainingGoesOn) {
    Scratch scratch;
    Console console;
    rlimit before;
    ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
    {
        Logger log(scratch / "", true, false, 1, console.f);
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
    const json layers(4, json{{"layer", "block"}});  // few, as JSON needs memory even for destruction
    for (const size_t bytes : {500, 1000, 3000, 20000, 90000}) {
        Console console;
        {
            Logger log(scratch / "", false, false, 1, console.f);
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
    // A write error is reported once.
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
        Logger log(scratch / "", false, false, 1, console);
        log.run(run_info(10));
        close(ends[0]);
        log.event(1, "info", "x", "nobody reads this");
        log.end("finished");
    }
    fclose(console);
    EXPECT_EQ(lines_of(scratch / "log.jsonl").back()["status"], "finished");
}

// By others, during the run.
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
            for (int i = 1; i <= 20; i++) log.step(step_at(i, 3));  // the first step refreshes the report
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

// Meanwhile the directory belongs to another run.
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
    EXPECT_EQ(count(console.str(), "another run is writing there"), 3u);  // once per file
}

TEST(Logger, AnExceptionMarksTheRunAsFailed) {
    Scratch scratch;
    Console console;
    try {
        Logger log(scratch / "", false, false, 1, console.f);
        log.run(run_info(10));
        log.step(step_at(1, 3));
        throw Error("something");
    } catch (const Error&) {
    }
    EXPECT_EQ(lines_of(scratch / "log.jsonl").back()["status"], "failed");
    EXPECT_EQ(read_whole_file(scratch / "report.html").find("http-equiv"), std::string::npos);
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
            Logger log(scratch / "", true, false, 1, console.f);
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

// A long run keeps only the page's data in memory, and the page is the same whether the run was resumed or not.
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

}  // namespace test_logger
