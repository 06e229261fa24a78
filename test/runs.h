// Helpers for tests of a run's output: records of steps, a recording console, validation of pages.
#pragma once
#include <gtest/gtest.h>

#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

#include "../llmc/report/logger.h"
#include "files.h"

namespace test_runs {

namespace fs = std::filesystem;
using json = nlohmann::ordered_json;
using Scratch = test::TemporaryDirectory;

// A console that records its output.
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

inline StepStats step_at(int64_t i, double loss) {
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

inline RunInfo run_info(int64_t steps) {
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
inline std::vector<json> lines_of(const std::string& path) {
    std::vector<json> lines;
    std::ifstream in(path);
    std::string line;
    while (std::getline(in, line)) lines.push_back(json::parse(line));
    return lines;
}

inline size_t count(const std::string& text, const std::string& what) {
    size_t n = 0;
    for (size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + what.size())) n++;
    return n;
}

// Every opened element is closed, in order, except void elements. Ignores scripts and styles.
inline void expect_balanced(const std::string& html) {
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

inline std::string step_line(int64_t step, double loss = 3) {
    StepStats s = step_at(step, loss);
    s.waiting_ms = {{"data", 0.5}};
    return to_json(s).dump() + "\n";
}
inline std::string event_line(int64_t step, const std::string& name) {
    return json{{"kind", "event"}, {"step", step}, {"level", "info"}, {"event", name}, {"message", name}}.dump() + "\n";
}
inline const std::string run_line = "{\"kind\":\"run\",\"name\":\"x\",\"total_steps\":100}\n";

}  // namespace test_runs
