// The services of the loop over a run's steps (training_loop() in train_gpt.cu), for any architecture: decisions of all ranks,
// skipped batches, rollback after spikes, checkpoints, logs, and the end of the run. Every rank calls the same functions in the
// same order.
#pragma once
#include <cmath>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../base/check.h"
#include "../base/clock.h"
#include "../base/terminal.h"
#include "../model/flops.h"
#include "../model/parameters.h"
#include "../ops.h"
#include "../optimizer/training_memory.h"
#include "../report/logger.h"
#include "../plan/energy.h"
#include "../infer/evaluation.h"
#include "../plan/guard.h"
#include "../plan/machine.h"
#include "resume.h"
#include "run.h"
#include "../checkpoint/run_directory.h"
#include "stop.h"
#include "stragglers.h"
#include "time_budget.h"
#include "timetable.h"
#include "trainer.h"
#include "training_log.h"
#include "../checkpoint/load_state.h"
#include "../checkpoint/saver.h"
#include "../checkpoint/node_snapshots.h"
#include "../checkpoint/training_state.h"
#include "../infer/training_tasks.h"

class TrainingLoop {
public:
    // lock: of the output directory; held by the first rank only.
    TrainingLoop(Run& run, TrainerBase& trainer, TrainingMemory& m, Timetable& timetable, TrainingLog& log, RunLock* lock)
        : run_(run),
          o_(run.o),
          t_(trainer),
          m_(m),
          state_(trainer.state),
          timetable_(timetable),
          budget_(o_, state_.budget),
          stragglers_(run.world.hosts(), run.ranks->mesh.pp.size),
          tasks_(run.tasks),
          log_(log),
          saver_(run.ctx,
                 {o_.out,
                  {o_.keep, o_.keep_every, trainer.history.guard.way_back()},
                  run.texts,
                  run.reference.file,
                  lock,
                  run.world.monitor()},
                 m),
          saved_step_(run.resumes() && run.in_out(run.resumed_from) ? state_.step : 0),
          vote_(run.world, run.ranks->mesh.pp.size + 1) {
        t_.stop = [this] { return stop_here(); };
        if (o_.snapshot_every) {
            const bool nodes = NodeRing(run.world.nodes()).size() > 1;
            std::string root = nodes             ? make_snapshots_of_nodes(run.world, o_.out, o_.snapshot_directory)
                               : run.main_rank() ? make_snapshots_of(o_.out, o_.snapshot_directory)
                                                 : "";
            if (!nodes) root = run.world.all_gather(root)[0];
            const Saver::Settings settings = {root, {1}, run.texts, run.reference.file, lock, run.world.monitor()};
            if (nodes) snapshots_ = std::make_unique<NodeSnapshots>(run.ctx, settings, m, run.world);
            else snapshots_ = std::make_unique<Saver>(run.ctx, settings, m);
        }
        if (run_.main_rank()) energy_.emplace();
        const double of_step = 1.0 / 3 / (double)run_.schedule.final_batch;  // a sample's forward pass, in steps
        if (run_.valid)
            budget_.expect(TimeBudget::validation, o_.eval_interval,
                           (m_.average ? 2 : 1) * of_step * (double)run_.valid_samples);
        if (samples()) budget_.expect(TimeBudget::sample, o_.sample_interval, o_.sample_tokens * of_step);
        if (tasks_.any())
            budget_.expect(TimeBudget::tasks, tasks_.interval() ? tasks_.interval() : INT64_MAX,
                           of_step * (double)tasks_.tokens() / o_.seq_length);
    }

    void begin() {
        run_.begin(be::memory_is_host ? "the first step" : "the first step, which times algorithms for products");
        t_.memory_check.remember();
        fix_length({});
    }

    // Goes to the next batch that is not skipped. A skipped batch is a step without update, after which a validation, a sample
    // and a checkpoint are due as after any other: after_step(now) does them. Returns whether the run is to stop.
    template <class AfterStep>
    bool skip_batches(AfterStep after_step) {
        step_begin_ = monotonic_seconds();
        const int64_t first = t_.batch(), step = t_.next_batch().step;
        bool stop = false;
        while (!stop && state_.step < step) {
            static_cast<Counters&>(state_) = run_.schedule.next(state_, state_.skips, t_.discards, state_.step + 1);
            if (is_due()) stop = after_step(Decision{false, timetable_.due_at(state_.step)});
        }
        if (!stop) static_cast<Counters&>(state_) = t_.next_batch();
        if (t_.batch() > first) log_.skipped(state_.step, first, t_.batch() - 1);
        return stop;
    }

    void begin_step() {
        in_fp8_ = !o_.fp8_format.empty() && state_.step >= fp8_start(o_, state_);
        if (in_fp8_ && state_.step == fp8_start(o_, state_)) log_.begin_fp8(state_.step);
        waited_ = run_.world.monitor()->waited();
    }
    // stats: nothing if the step was stopped.
    void end_step(std::optional<StepStats>& stats) {
        run_.phase.done();
        if (!stats) return;
        stats->waiting_ms = differences_ms(waited_, run_.world.monitor()->waited());
        add_rates(*stats, in_fp8_);
        log_.step(*stats, std::exchange(t_.health, nullptr));
    }

    // Applies the guard's verdict on the last step; returns true if the run was rolled back.
    bool roll_back_after_spike() {
        const Verdict& v = t_.verdict;
        if (v.kind != Verdict::normal) log_.outlier(state_.step, v);
        if (!v.give_up && !v.rollback) return false;
        t_.gatherer.finish();
        wait_for_saves();
        if (v.give_up) fail("the run ends at step %lld: %s", (long long)state_.step, v.reason.c_str());
        roll_back(v);
        return true;
    }

    // All ranks agree whether to stop and to save after this step.
    Decision decide(const StepStats& stats) {
        budget_.took(TimeBudget::step, monotonic_seconds() - step_begin_);
        const bool saves = timetable_.save_now(state_.step) || (budget_.wants_save() && !std::exchange(save_asked_, true));
        std::vector<RankTime> times;
        const Decision now =
            decide_together(run_.world,
                            {told_to_stop(), saves, run_.schedule.open ? budget_.decide(state_.step) : RunLength(),
                             stats.rank_time(!be::memory_is_host)},
                            times);
        if (run_.world.size() > 1) log_ranks(stragglers_.add(times, monotonic_seconds()));
        fix_length(now.length);
        return now;
    }

    // The work that is due after a step; last: the run's last one. Waits for the new parameters if something reads them.
    struct Due {
        bool validation = false, tasks = false, sample = false;
    };
    Due due_after_step(bool last, const Decision& now) {
        const Due work = now.stop ? Due() : due_by_number(last);
        const bool compares = compares_hashes();
        if (work.validation || work.tasks || work.sample || last || now.stop || now.save || snapshot_due() || compares)
            t_.gatherer.finish();
        if (compares) t_.memory_check.require_agreement(state_.step);
        return work;
    }
    // Runs f, work that is not a step, and measures its time.
    template <class F>
    auto timed(TimeBudget::Work work, F f) {
        const double begin = monotonic_seconds();
        const auto result = f();
        budget_.took(work, monotonic_seconds() - begin);
        return result;
    }
    // Saves if it is due after a step, or continues to write an earlier checkpoint.
    void save_after_step(bool last, const Decision& now) {
        const bool saves = (last || now.stop || now.save) && timetable_.saves_at_all();
        if (saves) {
            saver_.wait();
            report_save();
            if (snapshots_) snapshots_->wait_for_memory();  // sending needs no copy
        }
        if (saves && saved_step_ != state_.step) save();
        else saver_.proceed();
        report_save();
        if (!snapshots_) return;
        snapshots_->proceed();
        report_snapshot();
        // A snapshot shares the copy of the training memory with a checkpoint: it is omitted while another save continues.
        if (!saves && snapshot_due() && saver_.idle() && snapshots_->idle()) {
            prepare_state();
            snapshots_->save(state_);
        }
    }

    // The losses of validation samples from `first` on; of_average: with the average of the weights, if there is one. Both are
    // empty if the run is to stop, then returns false.
    bool report_validation(const std::optional<std::vector<LossSums>>& sums,
                           const std::optional<std::vector<LossSums>>& of_average, int64_t first, double start, bool last) {
        run_.phase.done();
        if (!sums) {
            log_.no_validation(state_.step);
            return false;
        }
        const LossSums all = sum_of(*sums);
        state_.valid_loss = all.loss();
        log_.validation(state_.step, state_.valid_loss, all.n, (monotonic_seconds() - start) * 1e3,
                        set_losses(*run_.valid, *sums), of_average ? sum_of(*of_average).loss() : NAN,
                        rewards_of(all.pair_sums));
        if (last) result_.valid_loss = all.loss();
        if (last && run_.main_rank() && run_.tokenizer && !all.pair_sums.n)
            result_.bits_per_byte =
                bits_per_byte(all, bytes_of_targets(*run_.tokenizer, *run_.valid, first, run_.valid_samples));
        return true;
    }
    // Returns false if the run is to stop.
    bool measure_tasks(const TaskFunctions& functions) {
        const double start = monotonic_seconds();
        run_.begin("measuring tasks");
        nlohmann::ordered_json values, errors;
        const bool whole = tasks_.measure(values, errors, functions);
        run_.phase.done();
        if (whole) log_.tasks(state_.step, values, errors, (monotonic_seconds() - start) * 1e3);
        else log_.no_tasks(state_.step);
        return whole;
    }

    void finish() {
        run_.begin("writing the checkpoint");
        wait_for_saves();
        run_.phase.done();
        if (save_error_.empty()) remove_snapshots(run_.world, o_.out);
        log_ranks(stragglers_.rest());
        vote_.finish();
        end_training();
        const bool done = t_.finished();
        const std::string reason = done ? "" : reason_to_stop(run_.world, o_);
        const std::string command = done || !timetable_.saves_at_all() ? "" : resume_command(run_.world);
        std::string problem;
        if (!save_error_.empty()) problem = "the last checkpoint could not be written: " + save_error_;
        else if (done && !std::isfinite(state_.loss))
            problem =
                "the last loss is not finite; HINT: training diverged: resume from an older checkpoint with a lower --lr, or "
                "with --on-spike rollback";
        result_.parameters = (int64_t)ParameterTable(m_.c).trained;
        result_.tokens = state_.tokens;
        result_.steps = state_.step;
        if (budget_.on()) result_.seconds = budget_.spent();
        if (energy_) result_.joules = energy_->joules_now();
        if (o_.carbon_intensity) result_.grams_of_co2 = grams_of_co2(result_.joules, *o_.carbon_intensity);
        if (!problem.empty()) fail("%s", problem.c_str());
        log_.end(done, reason, command, result_);
    }

private:
    bool samples() const { return o_.sample_interval != 0; }
    void log_ranks(const std::optional<RankTimes>& times) {
        if (times) log_.ranks(state_.step, *times, stragglers_.sentence(*times));
    }
    bool told_to_stop() const { return !stop_signal().empty() || timetable_.exit_now(); }
    // Returns the same on every rank.
    bool stop_here() { return vote_.ask(told_to_stop()); }

    void add_rates(StepStats& stats, bool in_fp8) {
        stats.model_tflops = model_flops_per_token(m_.c, o_.seq_length) * stats.tokens_per_s / 1e12;
        if (const double peak = run_.peak.of_step(in_fp8); peak > 0) stats.mfu = stats.model_tflops * 1e12 / peak;
        stats.memory_bytes = (int64_t)memory_in_use(run_.ctx);
        if (energy_) stats.energy_joules = energy_->joules();
    }

    // With --time-budget: ends the schedule where rank 0 chose to. Until then, samples are ordered further ahead than the next
    // step.
    void fix_length(const RunLength& chosen) {
        Schedule& s = run_.schedule;
        if (!s.open) return;
        if (chosen.steps) {
            s.end_after(chosen.steps, chosen.decay);
            state_.length = chosen;
            log_.length(state_.step, chosen, s.warmup < s.total_samples ? options_of_length(o_, chosen) : "");
        } else {
            const int64_t ordered = s.total_steps;
            while (t_.next_batch().step + 1 >= s.total_steps) s.plan_until(2 * s.total_steps);
            if (s.total_steps == ordered) return;
        }
        order_data(run_, state_);
    }

    // Whether something is due after this step by its number, which is the same on every rank.
    bool is_due() const {
        const Due work = due_by_number(false);
        return work.validation || work.tasks || work.sample || compares_hashes() ||
               (timetable_.saves_at_all() && timetable_.due_at(state_.step));
    }
    Due due_by_number(bool last) const {
        return {run_.valid && (due(o_.eval_interval, state_.step) || last), tasks_.due_after(state_.step, last),
                samples() && (due(o_.sample_interval, state_.step) || last)};
    }
    bool compares_hashes() const { return due(o_.check_weight_hash_across_dp_replicas_interval, state_.step); }

    // Rolls back to an older checkpoint. Keeps the skipped batches, and adds the ones around the first outlier.
    void roll_back(const Verdict& v) {
        const Guard& guard = t_.history.guard;
        const std::string dir =
            checkpoint_to_go_back_to(run_.world, o_.out, {run_.state.step, run_.resumed_from}, guard, v, state_.step);
        state_ = state_after_rollback(state_, dir, guard.rollback_range(v.first_outlier_batch));
        load_weights_and_moments(run_.ctx, m_, dir);
        t_.history.roll_back(StepHistory(o_, m_.c.L, state_, dir));
        t_.memory_check.remember();
        saved_step_ = run_.in_out(dir) ? state_.step : 0;
        remove_snapshots_after(run_.world, o_.out, state_.step);
        const std::string done = run_.main_rank() ? go_back_to(o_.out, dir, state_.step) : "";
        log_.rollback(state_.step, dir, state_.skips);
        if (!done.empty()) print_line(stderr, "note: " + done);
    }

    bool snapshot_due() const { return snapshots_ && due(o_.snapshot_every, state_.step); }
    void wait_for_saves() {
        saver_.wait();
        report_save();
        if (!snapshots_) return;
        snapshots_->wait();
        report_snapshot();
    }
    void report_snapshot() {
        const auto outcome = snapshots_->outcome();
        if (!outcome || outcome->error.empty()) return;
        log_.no_snapshot(*outcome);
        if (outcome->taken) fail("the run ends at step %lld: %s", (long long)state_.step, outcome->error.c_str());
    }
    void prepare_state() {
        t_.memory_check.require_unchanged(state_.step);
        t_.history.save(state_);
        state_.budget = budget_.so_far();
    }
    void save() {
        prepare_state();
        saver_.save(state_);
        if (o_.save_in_foreground) saver_.wait();
        timetable_.saved();
    }
    void report_save() {
        const auto outcome = saver_.outcome();
        if (!outcome) return;
        save_error_ = outcome->error;
        if (save_error_.empty()) saved_step_ = outcome->step;
        budget_.took(TimeBudget::save, outcome->seconds);
        log_.checkpoint(*outcome);
        if (outcome->taken) fail("the run ends at step %lld: %s", (long long)state_.step, save_error_.c_str());
    }

    Run& run_;
    const TrainOptions& o_;
    TrainerBase& t_;
    TrainingMemory& m_;
    TrainingState& state_;
    Timetable& timetable_;
    TimeBudget budget_;
    bool save_asked_ = false;  // for the budget
    double step_begin_ = 0;    // with the batches skipped before the step
    bool in_fp8_ = false;
    std::map<std::string, double> waited_;  // by other ranks, before the step
    std::optional<EnergyMeter> energy_;     // of the first rank's machine, on that rank
    Stragglers stragglers_;
    const TrainingTasks& tasks_;
    RunResult result_;
    TrainingLog& log_;
    Saver saver_;
    std::unique_ptr<Saver> snapshots_;
    std::string save_error_;  // of the last save
    int64_t saved_step_;      // of the last one in OUT; step 0 has nothing to save
    StopVote vote_;
};
