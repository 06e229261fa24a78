// The output of a run while it trains, in its log and on the console; only rank 0 writes.
#pragma once
#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../base/clock.h"
#include "../base/terminal.h"
#include "../base/text.h"
#include "../data/dataloader.h"
#include "../report/logger.h"
#include "../plan/guard.h"
#include "../plan/machine.h"
#include "expert_watch.h"
#include "run.h"
#include "../checkpoint/run_directory.h"
#include "../checkpoint/saver.h"
#include "../checkpoint/training_state.h"

inline RunInfo run_info(const Run& r) {
    RunInfo info;
    info.name = run_name(r.o);
    if (!r.schedule.open) info.total_steps = r.schedule.total_steps;
    else info.ends_at = program_start + time_budget_seconds(r.o) - r.state.budget.seconds;
    info.z_loss = r.o.z_loss_strength > 0;
    info.batch_ramp = r.schedule.rampup.samples > 0;
    if (info.batch_ramp) info.total_samples = r.schedule.total_samples;
    if (r.valid && !r.o.dpo_beta)
        info.unigram_loss = unigram_loss(*r.train, *r.valid, r.o.eval_fixed ? r.valid_samples : r.valid->n_samples(), r.c.V);
    info.summary = r.table.rows;
    info.options = options_to_json(r.o);
    info.machine = describe_machine(r.world, r.ctx, r.peak);
    return info;
}

// Waiting times by group.
inline std::map<std::string, double> differences_ms(const std::map<std::string, double>& before,
                                                    std::map<std::string, double> after) {
    for (auto& [group, seconds] : after) seconds = 1e3 * (seconds - (before.count(group) ? before.at(group) : 0));
    return after;
}

// The results of a finished run. NaN: unknown.
struct RunResult {
    double valid_loss = NAN, bits_per_byte = NAN;  // of the last validation
    int64_t parameters = 0, tokens = 0, steps = 0;
    double seconds = NAN;  // of --time-budget, from the start of the program and with earlier parts of the run
    double joules = NAN, grams_of_co2 = NAN;  // of rank 0's machine

    std::string text() const {
        std::string quality;
        if (std::isfinite(valid_loss)) quality = format("validation loss %.4f, ", valid_loss);
        if (std::isfinite(bits_per_byte)) quality = format("%.4f bits per byte, ", bits_per_byte) + quality;
        std::string cost;
        if (std::isfinite(joules)) cost = format(", %.3g Wh", joules / 3600);
        if (std::isfinite(grams_of_co2)) cost += format(", %.3g g of CO2", grams_of_co2);
        const std::string time = std::isfinite(seconds) ? format(" and %.1f s", seconds) : "";
        return format("result: %s%s parameters, %s tokens in %s%s%s", quality.c_str(), human_count((double)parameters).c_str(),
                      human_count((double)tokens).c_str(), counted(steps, "step").c_str(), time.c_str(), cost.c_str());
    }
    nlohmann::ordered_json json() const {
        nlohmann::ordered_json j = {{"parameters", parameters}, {"tokens", tokens}};
        if (std::isfinite(valid_loss)) j["valid_loss"] = valid_loss;
        if (std::isfinite(bits_per_byte)) j["bits_per_byte"] = bits_per_byte;
        if (std::isfinite(joules)) j["energy_joules"] = joules;
        if (std::isfinite(grams_of_co2)) j["grams_of_co2"] = grams_of_co2;
        return j;
    }
};

class TrainingLog {
public:
    // hold: called before a file in OUT is replaced; throws if the directory now belongs to another run. overrides: the
    // differences from the checkpoint.
    void open(Run& run, const TrainingState& state, const std::string& overrides, std::function<void()> hold) {
        const TrainOptions& o = run.o;
        out_ = o.out;
        if (!run.main_rank()) return;
        if (!run.same_directory()) make_room_for_new_run(o.out);
        logger_ = std::make_unique<Logger>(o.out, o.quiet, is_terminal(stdout), o.log_interval, stdout, std::move(hold));
        if (o.tensorboard || !o.tensorboard_dir.empty())
            logger_->also_tensorboard(o.tensorboard_dir.empty() ? o.out + "/tensorboard" : o.tensorboard_dir, state.step);
        if (!o.prometheus.empty()) logger_->also_prometheus(o.prometheus, run_name(o));
        run.begin("reading data for the loss of a unigram model");
        const RunInfo info = run_info(run);
        total_steps_ = info.total_steps;
        run.phase.done();
        logger_->run(info, run.resumes() ? std::optional(state.step) : std::nullopt);
        if (std::isfinite(info.unigram_loss))
            logger_->say(format("a unigram model of the same tokens has validation loss %.4f", info.unigram_loss));
        if (run.resumes()) event(state.step, "info", "resume", "resumed from " + run.resumed_from);
        if (!overrides.empty()) event(state.step, "info", "override", "overridden: " + overrides);
    }

    // The length of a run with --time-budget is chosen. options: give the same bits without a clock; empty: there are none,
    // because the warm-up is longer than the run.
    void length(int64_t step, const RunLength& length, const std::string& options) {
        if (!logger_) return;
        logger_->length(step, length.steps);
        total_steps_ = length.steps;
        const int64_t left = length.steps - step;
        const std::string text = counted(length.steps, "step") + " fit into the time, " +
                                 (left > 0 ? format("the last %lld start; ", (long long)left) : "no more; ");
        if (options.empty()) event(step, "warning", "length", text + "the time ends before the warm-up");
        else event(step, "info", "length", text + "the same bits without a clock: " + options);
    }
    // sentence: about the slowest rank; may be empty.
    void ranks(int64_t step, const RankTimes& times, const std::string& sentence) {
        if (logger_) logger_->ranks(step, times);
        if (!sentence.empty()) event(step, "info", "straggler", sentence);
    }
    void begin_fp8(int64_t step) { event(step, "info", "fp8", "products are in FP8 from this step"); }
    // layers: from LayerHealth; null if they were not examined.
    void step(const StepStats& stats, const nlohmann::ordered_json& layers) {
        if (!logger_) return;
        logger_->step(stats);
        if (stats.mixture) experts(*stats.mixture, stats.step);
        if (!layers.is_null()) logger_->health(stats.step, layers);
    }
    // Batches skipped after a step.
    void skipped(int64_t step, int64_t first, int64_t last) {
        event(step, "info", "skip-batches", format("batches %lld to %lld are skipped", (long long)first, (long long)last));
    }
    // The guard's verdict on a step.
    void outlier(int64_t step, const Verdict& v) {
        event(step, "warning", v.apply ? "spike" : "skip", v.reason + (v.apply ? "" : "; its update was dropped"));
    }
    void rollback(int64_t step, const std::string& checkpoint, const BatchRanges& skipped) {
        event(step, "warning", "rollback",
              format("back to %s; skipped batches: %s", checkpoint.c_str(), skipped.text().c_str()));
    }
    // sets: names and losses, if there are several datasets. average_loss: with the weights' EMA, or NaN. rewards: for pairs of
    // answers.
    void validation(int64_t step, double loss, int64_t tokens, double ms,
                    const std::vector<std::pair<std::string, double>>& sets, double average_loss,
                    const std::optional<Rewards>& rewards) {
        if (logger_) logger_->valid(step, loss, tokens, ms, sets, average_loss, rewards);
    }
    void no_validation(int64_t step) {
        event(step, "warning", "valid", format("the validation at step %lld was interrupted by a stop", (long long)step));
    }
    void no_tasks(int64_t step) {
        event(step, "warning", "tasks", format("the tasks at step %lld were interrupted by a stop", (long long)step));
    }
    void tasks(int64_t step, const nlohmann::ordered_json& values, const nlohmann::ordered_json& errors, double ms) {
        if (logger_) logger_->tasks(step, values, errors, ms);
    }
    void sample(int64_t step, const std::string& prompt, const std::string& text) {
        if (logger_) logger_->sample(step, prompt, text);
    }
    void checkpoint(const Saver::Outcome& saved) {
        if (saved.error.empty())
            event(
                saved.step, "info", "checkpoint",
                format("checkpoint %s in %s", step_directory(out_, saved.step).c_str(), human_duration(saved.seconds).c_str()));
        else
            event(
                saved.step, "error", "checkpoint",
                format("the checkpoint of step %lld was NOT saved: %s; training continues and tries again at the next interval",
                       (long long)saved.step, saved.error.c_str()));
    }

    void no_snapshot(const Saver::Outcome& saved) {
        event(saved.step, "warning", "snapshot",
              format("the snapshot of step %lld was not saved: %s; training continues", (long long)saved.step,
                     saved.error.c_str()));
    }

    // The end of the run: finished, or stopped for a reason, with the command that resumes it.
    void end(bool finished, const std::string& reason, const std::string& command, const RunResult& result) {
        if (!logger_) return;
        logger_->say("peak memory " + human_bytes((double)peak_memory_bytes()));
        if (finished) {
            logger_->say(result.text());
            logger_->end("finished", "", "", result.json());
        } else logger_->end("stopped", reason, command);
    }

    // After an error that ends the run.
    void failed(const std::string& why) {
        if (logger_) logger_->end("failed", why);
    }

private:
    void event(int64_t step, const std::string& level, const std::string& name, const std::string& message) {
        if (logger_) logger_->event(step, level, name, message);
    }
    void experts(const MixtureLoad& load, int64_t step) {
        const auto record = expert_watch_.step(load, step, total_steps_);
        if (!record) return;
        logger_->experts(record->json);
        if (!record->starving.empty())
            event(step, "warning", "starving",
                  "experts have less than 1/8 of an even share of the rows: " + record->starving +
                      "; HINT: --moe-aux-loss-coeff, or --moe-router-enable-expert-bias");
        if (!record->recovered.empty())
            event(step, "info", "recovered", "experts have at least 1/8 of an even share again: " + record->recovered);
    }
    std::string out_;
    ExpertWatch expert_watch_;
    int64_t total_steps_ = 0;         // 0: not known yet
    std::unique_ptr<Logger> logger_;  // null on the other ranks
};
