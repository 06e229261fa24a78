// A run with a time limit instead of a length: `train --time-budget 5m` runs as many steps as fit, and ends on time with its
// last validation and its last checkpoint.
//
// While the learning rate warms up and is then constant, nothing depends on the length (schedule WSD: warm-up, stable, decay;
// Hu et al., 2024, MiniCPM), so the length is decided as late as possible, at the start of the decay: as soon as the number of
// steps that fit in the remaining time is no more than the decay's, a fifth of all steps (Haegele et al., 2024, "Scaling Laws
// and Compute-Optimal Training Beyond Fixed Training Durations"), or --lr-wsd-decay-iters. From then on the run is an ordinary
// one: with the chosen --train-iters and --lr-wsd-decay-iters it gives the same bits on another day, since
// --reshuffle-each-epoch, which is implied, makes the order of the data independent of the length as well. The other schedules
// with such a start are constant and inverse-square-root, which have no decay: their run ends when the time is over.
//
// Rank 0's clock decides for all ranks (timetable.h). Estimates non-step work from its past cost: validations, tasks and
// samples of text by their mean, the checkpoint by one that is saved at half time for this purpose.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "../base/check.h"
#include "../base/enum_table.h"
#include "../base/clock.h"
#include "../options/options.h"
#include "../checkpoint/training_state.h"

// Seconds of --time-budget; 0: there is none.
inline double time_budget_seconds(const TrainOptions& o) {
    return o.time_budget.empty() ? 0 : duration_of("--time-budget", o.time_budget);
}

// Sets the options that --time-budget implies, and rejects ones that need the length of the run before it is known.
inline void apply_time_budget(TrainOptions& o) {
    if (time_budget_seconds(o) == 0) return;
    if (!o.given.count("lr-decay-style")) o.lr_decay_style = "WSD";
    o.reshuffle_each_epoch = true;
    const bool falls_from_the_start = o.lr_decay_style == "cosine" || o.lr_decay_style == "linear";
    const struct {
        bool wrong;
        const char *what, *hint;
    } rows[] = {
        {o.train_iters || o.train_samples, "--train-iters and --train-samples would set another length", "omit one of them"},
        {!o.size.empty(), "--size also chooses the length, and derives the learning rate from it",
         "--preset, or --num-layers and --hidden-size"},
        {falls_from_the_start, "--lr-decay-style cosine and linear need the length from the first step on",
         "--lr-decay-style WSD, which falls at the end"},
        {o.lr_decay_iters || o.lr_decay_samples, "--lr-decay-iters sets the end of the decay, which is the end of the time",
         "--lr-wsd-decay-iters sets its length"},
        {o.lr_wsd_decay_samples > 0, "--lr-wsd-decay-samples may not be a whole number of steps", "--lr-wsd-decay-iters"},
        {o.lr_warmup_fraction.has_value(), "--lr-warmup-fraction needs the length, which is not yet known",
         "--lr-warmup-iters"},
        {o.weight_decay_incr_style != "constant", "--weight-decay-incr-style needs the length from the first step on",
         "omit it"},
        {!o.rampup_batch_size.empty(), "--rampup-batch-size needs --train-samples", "omit it"},
        {o.on_spike == "rollback", "--on-spike rollback repeats steps, which the time does not allow", "--on-spike skip"},
        {o.world > 0, "--world plans for machines that are not here, whose steps cannot be measured", "--train-iters"},
    };
    for (const auto& [wrong, what, hint] : rows)
        if (wrong)
            fail_usage("--time-budget %s chooses the length of the run: %s; HINT: %s", o.time_budget.c_str(), what, hint);
}

// The options that give the same bits without a clock, once the length is chosen.
inline std::string options_of_length(const TrainOptions& o, const RunLength& length) {
    std::string text = format("--train-iters %lld --reshuffle-each-epoch --lr-decay-style %s", (long long)length.steps,
                              o.lr_decay_style.c_str());
    if (o.lr_decay_style == "WSD") text += format(" --lr-wsd-decay-iters %lld", (long long)length.decay);
    return text;
}

class TimeBudget {
public:
    enum Work : int { step, validation, tasks, sample, save };

    // earlier: the costs of earlier parts of the run. The last of their steps count like this process's own: its first step,
    // which may be slow, must not end the run.
    TimeBudget(const TrainOptions& o, const BudgetSpent& earlier)
        : limit_(time_budget_seconds(o)),
          before_(earlier.seconds),
          wsd_(o.lr_decay_style == "WSD"),
          decay_(o.lr_wsd_decay_iters) {
        for (int64_t i = 0; i < std::min<int64_t>(earlier.steps, 256); i++) took(step, earlier.step_seconds);
    }
    bool on() const { return limit_ > 0; }
    // Seconds so far, from the start of the program.
    double spent() const { return before_ + monotonic_seconds() - program_start; }
    double seconds_left() const { return limit_ - spent(); }
    BudgetSpent so_far() const { return on() ? BudgetSpent{spent(), (int64_t)steps_.size(), step_seconds()} : BudgetSpent(); }

    // Registers work that is due every `interval` steps and after the last one, with an estimated duration of `steps` steps,
    // until it is measured.
    void expect(Work work, int64_t interval, double steps) {
        of_(work).interval = interval;
        of_(work).guess = steps;
    }
    void took(Work work, double seconds) {
        if (!on()) return;
        if (work == step) return steps_.push_back((steps_.empty() ? 0 : steps_.back()) + seconds);
        of_(work).seconds += seconds;
        of_(work).times++;
    }

    // The length of the run, if it must be decided now, after `done` steps; otherwise 0.
    RunLength decide(int64_t done) const {
        const int64_t fit = steps_that_fit(done), decay = !wsd_ ? 0 : decay_ ? decay_ : done / 4;
        if (fit > decay || (fit > 0 && steps_.size() < 3)) return {};  // the first step is slow and not representative
        return {done + fit, std::max<int64_t>(fit, 1)};  // a decay of one step does not change that step's learning rate
    }
    // True if a checkpoint should be saved to measure its time.
    bool wants_save() const { return on() && costs_[save].times == 0 && spent() > limit_ / 2; }

    // Seconds from now to the end of a run after `done` steps, with their validation and so on still due, whose last step is
    // `last`.
    double seconds_until_end(int64_t done, int64_t last) const {
        const double each = step_seconds();
        double seconds = (double)(last - done) * each + costs_[save].mean(each) + closing_s;
        for (const Work work : {validation, tasks, sample}) {
            const Cost& c = costs_[work];
            if (c.interval == 0) continue;
            const int64_t times = last / c.interval - (done - 1) / c.interval + (last % c.interval != 0);
            seconds += (double)times * c.mean(each);
        }
        return seconds;
    }
    // Mean of the last quarter of the steps, which ignores a slow start and follows a machine that has become slower.
    double step_seconds() const {
        const size_t n = steps_.size(), before = n - (n + 3) / 4;
        return n == 0 ? 0 : (steps_.back() - (before ? steps_[before - 1] : 0)) / (double)(n - before);
    }

private:
    static constexpr double closing_s = 0.1;  // the last report, and releasing memory
    struct Cost {
        int64_t interval = 0, times = 0;
        double guess = 0, seconds = 0;
        double mean(double step_seconds) const { return times ? seconds / (double)times : guess * step_seconds; }
    };
    Cost& of_(Work work) { return costs_[work]; }

    int64_t steps_that_fit(int64_t done) const {
        const double left = seconds_left();
        int64_t fit = 0, most = (int64_t)std::clamp(left / std::max(step_seconds(), 1e-9), 0.0, 1e12) + 1;  // most does not fit
        while (most - fit > 1) {
            const int64_t middle = fit + (most - fit) / 2;
            (seconds_until_end(done, done + middle) <= left ? fit : most) = middle;
        }
        return fit;
    }

    double limit_, before_;
    bool wsd_;
    int64_t decay_;
    std::vector<double> steps_;  // total seconds of the first 1, 2, ... steps
    std::array<Cost, number_of_values<Work>()> costs_{};
};
