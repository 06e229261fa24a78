// Tasks that measure a model while it trains (--eval-tasks): the questions, prompts and metrics of `eval --tasks`, with solved
// examples only for tasks of CORE, tokenized once; for generative tasks (one pass per token), only the first 64 questions by
// default. Weights, moments and the order of the data are unaffected: a run gives the same bits with and without.
#pragma once
#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "../base/check.h"
#include "../data/tasks.h"
#include "../tokenizer/tokenizer.h"
#include "../options/options.h"
#include "evaluation.h"
#include "../plan/from_options.h"
#include "../options/schedule.h"

// Rejects --eval-tasks if questions cannot be scored. tokenizer: may be null.
inline void check_options_of_tasks(const TrainOptions& o, const Tokenizer* tokenizer) {
    refuse_without(o.eval_tasks.empty() && o.eval_tasks_interval, "--eval-tasks-interval", "--eval-tasks");
    refuse_without(o.eval_tasks.empty() && o.eval_tasks_samples, "--eval-tasks-samples", "--eval-tasks");
    refuse_without(!o.eval_tasks.empty() && !tokenizer, "--eval-tasks", "a tokenizer", "--tokenizer DIR");
}

class TrainingTasks {
public:
    struct Measured {
        std::string name;
        Task task;
        TaskRequests all;
        const TaskExample& example(size_t i) const { return task.examples[all.examples[i]]; }
    };

    TrainingTasks() = default;
    TrainingTasks(std::vector<Measured> tasks, int64_t interval) : interval_(interval), tasks_(std::move(tasks)) {}

    bool any() const { return !tasks_.empty(); }
    // True if some tasks are generative.
    bool any_written() const {
        return std::any_of(tasks_.begin(), tasks_.end(), [](const Measured& t) { return t.task.kind == TaskKind::written; });
    }
    int64_t interval() const { return interval_; }
    bool due_after(int64_t step, bool last) const { return any() && (last || due(interval_, step)); }
    // Maximum number of tokens computed in a measurement.
    int64_t tokens() const {
        int64_t n = 0;
        for (const Measured& t : tasks_)
            for (size_t i = 0; i < t.all.requests.size(); i++)
                n += t.all.requests[i].n_inputs() + (t.task.kind == TaskKind::written ? t.example(i).max_new_tokens : 0);
        return n;
    }

    // Sets values and standard errors, {task: {metric: number}}; for several tasks also the mean that `eval` reports. All ranks
    // call it. Returns false if it was stopped.
    bool measure(nlohmann::ordered_json& values, nlohmann::ordered_json& errors, const TaskFunctions& functions) const {
        std::vector<double> centred;
        for (const Measured& t : tasks_) {
            const auto metrics = functions.measure(t.task, t.all, nullptr, nullptr);
            if (!metrics) return false;
            for (const Metric& metric : *metrics) {
                values[t.name][metric.name] = metric.value;
                errors[t.name][metric.name] = metric.error;
            }
            if (const auto accuracy = centred_accuracy(t.task, t.all.examples, *metrics)) centred.push_back(*accuracy);
        }
        if (centred.size() > 1) values["mean of tasks"]["centred"] = mean_with_error(centred).mean;
        return true;
    }

private:
    int64_t interval_ = 0;
    std::vector<Measured> tasks_;
};

// The tasks of --eval-tasks. T: the longest sequence. tokenizer: may be null without tasks.
inline TrainingTasks read_training_tasks(const TrainOptions& o, const Tokenizer* tokenizer, int T) {
    check_options_of_tasks(o, tokenizer);
    std::vector<TrainingTasks::Measured> tasks;
    for (const std::string& file : o.eval_tasks) {
        Task task = limited(read_task(file), o.eval_tasks_samples);
        const std::string name = std::filesystem::path(file).stem().string();
        for (const auto& other : tasks)
            if (other.name == name)
                fail_usage("--eval-tasks: %s and %s have the same name in the log, %s; HINT: rename one",
                           other.task.file.c_str(), file.c_str(), name.c_str());
        const bool written = task.kind == TaskKind::written;
        const int64_t most = o.eval_tasks_samples ? o.eval_tasks_samples : written ? 64 : task.size();
        TaskRequests all = make_requests(*tokenizer, task, nullptr, task.core ? task.core->num_fewshot : 0,
                                         (uint64_t)EvalOptions().seed, std::min(most, task.size()), T);
        tasks.push_back({name, std::move(task), std::move(all)});
    }
    return {std::move(tasks), o.eval_tasks_interval};
}
