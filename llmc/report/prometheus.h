// The newest figures of a run in a file for Prometheus, in its text format, which node_exporter's textfile collector reads.
// The file is replaced as a whole, at most every five seconds.
// https://prometheus.io/docs/instrumenting/exposition_formats
#pragma once
#include <cmath>
#include <ctime>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "../base/check.h"
#include "../base/clock.h"
#include "../base/file.h"

// The number `key` of records of a kind, times `factor`, is a metric.
struct PrometheusSource {
    const char *kind, *key, *metric, *help;
    double factor = 1;
};

class PrometheusFile {
public:
    // run: the label that distinguishes this run from others.
    PrometheusFile(const std::string& path, const std::string& run) : path_(path) {
        for (const char c : run) run_ += c == '\n' ? "\\n" : (c == '"' || c == '\\' ? "\\" : "") + std::string(1, c);
        write();  // a path that cannot be written is an error now
    }

    // Takes the numbers of a record of log.jsonl (logger.h).
    void add(const nlohmann::ordered_json& record) {
        const std::string kind = record.value("kind", "");
        if (kind == "event" && record.value("level", "") != "info") problems_++;
        for (const PrometheusSource& source : sources)
            if (const auto value = record.find(source.key); kind == source.kind && value != record.end())
                values_[source.metric] = value->is_number() ? source.factor * value->get<double>() : NAN;
        running_ = kind != "end";
        if (!running_ || monotonic_seconds() - written_ >= 5) write();
    }

private:
    static constexpr PrometheusSource sources[] = {
        {"step", "step", "step", "completed steps"},
        {"step", "tokens", "tokens", "tokens trained on"},
        {"step", "loss", "loss", "cross-entropy per token of the newest step"},
        {"valid", "loss", "validation_loss", "loss of the newest validation"},
        {"step", "grad_norm", "gradient_norm", "norm of the gradients before clipping"},
        {"step", "lr", "learning_rate", "learning rate"},
        {"step", "skipped", "skipped_steps", "steps whose update was skipped"},
        {"step", "step_ms", "step_seconds", "time of the newest step", 1e-3},
        {"step", "tokens_per_s", "tokens_per_second", "tokens per second in the newest step"},
        {"step", "mfu", "mfu_ratio", "model FLOPs utilization"},
        {"step", "memory_bytes", "memory_bytes", "memory in use"},
        {"step", "eta_s", "eta_seconds", "estimated time to the end of the run"}};

    void write() {
        std::string text;
        const auto metric = [&](const char* name, const char* help, double value) {
            const std::string number = std::isnan(value) ? "NaN" : format("%.12g", value);
            text += format("# HELP train_gpt_%s %s\n# TYPE train_gpt_%s gauge\ntrain_gpt_%s{run=\"%s\"} %s\n", name, help, name,
                           name, run_.c_str(), number.c_str());
        };
        for (const PrometheusSource& source : sources)
            if (const auto value = values_.find(source.metric); value != values_.end())
                metric(source.metric, source.help, value->second);
        metric("problems", "warnings and errors since the program started", (double)problems_);
        metric("running", "1 until the run ends; a run that was killed stays at 1", running_);
        metric("written_timestamp_seconds", "time of this file, since 1970", (double)time(nullptr));
        write_file_atomically(path_, text);
        written_ = monotonic_seconds();
    }

    std::string path_, run_;
    std::map<std::string, double> values_;
    int64_t problems_ = 0;
    bool running_ = true;
    double written_ = 0;
};
