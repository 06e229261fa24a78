// Tasks that a model is measured on while it trains (--eval-tasks): the questions, prompts and metrics of `eval --tasks`, without
// solved examples, tokenised once. Weights, moments and the order of the data know nothing of it: a run gives the same bits with
// and without.
#pragma once
#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "../base/check.h"
#include "../data/tasks.h"
#include "../data/tokenizer.h"
#include "config.h"
#include "schedule.h"

// Refuses --eval-tasks where questions cannot be scored. tokenizer: may be null.
inline void check_options_of_tasks(const TrainOptions& o, const Tokenizer* tokenizer) {
    if (o.eval_tasks.empty() && o.eval_tasks_interval)
        fail_usage("--eval-tasks-interval measures --eval-tasks, and none are given; HINT: --eval-tasks FILE");
    if (o.eval_tasks.empty()) return;
    if (!tokenizer) fail_usage("--eval-tasks needs a tokenizer; HINT: --tokenizer DIR");
    if (o.tensor_model_parallel_size > 1 && !o.no_sequence_parallel)
        fail_usage(
            "--eval-tasks takes single rows out of a pass, which sequence parallelism has split over ranks; HINT: "
            "--no-sequence-parallel, or --eval-tasks on the checkpoints: train_gpt eval --tasks");
}

class TrainingTasks {
public:
    // T: the longest sequence.
    TrainingTasks(const TrainOptions& o, const Tokenizer* tokenizer, int T) : interval_(o.eval_tasks_interval) {
        check_options_of_tasks(o, tokenizer);
        for (const std::string& file : o.eval_tasks) {
            Task task = read_task(file);
            const std::string name = std::filesystem::path(file).stem().string();
            for (const Measured& other : tasks_)
                if (other.name == name)
                    fail_usage("--eval-tasks: %s and %s have the same name in the log, %s; HINT: rename one",
                               other.task.file.c_str(), file.c_str(), name.c_str());
            TaskRequests all = make_requests(*tokenizer, task, nullptr, 0, 0, task.size(), T);
            tasks_.push_back({name, std::move(task), std::move(all)});
        }
    }

    bool any() const { return !tasks_.empty(); }
    int64_t interval() const { return interval_; }
    bool due_after(int64_t step, bool last) const { return any() && (last || due(interval_, step)); }
    int64_t tokens() const {
        int64_t n = 0;
        for (const Measured& t : tasks_)
            for (const Request& r : t.all.requests) n += r.n_inputs();
        return n;
    }

    // score(requests): their scores, on all ranks. Sets values and standard errors, {task: {metric: number}}.
    template <class ScoreRequests>
    void measure(nlohmann::ordered_json& values, nlohmann::ordered_json& errors, ScoreRequests score) const {
        for (const Measured& t : tasks_)
            for (const Metric& metric : task_metrics(t.task, t.all.examples, score(t.all.requests))) {
                values[t.name][metric.name] = metric.value;
                errors[t.name][metric.name] = metric.error;
            }
    }

private:
    struct Measured {
        std::string name;
        Task task;
        TaskRequests all;
    };
    int64_t interval_;
    std::vector<Measured> tasks_;
};
