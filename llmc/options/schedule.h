// Quantities that change over a run (learning rate, weight decay, global batch size) as functions of the samples consumed so
// far, with Megatron-LM's exact semantics. Options in steps are multiplied by the final global batch size.
//   n <= warm-up W          init + (lr - init) n / W
//   n > decay end D         min_lr        (constant: lr; inverse-square-root: max(min, lr sqrt(W) / sqrt(n)))
//   between                 with r = (n - W) / (D - W): cosine min + (cos(pi r) + 1) / 2 (lr - min),
//                           linear min + (1 - r)(lr - min)
//   WSD                     lr until the tail of length A starts, then with x = (n - (D - A)) / A: exponential 2 * 0.5^x - 1,
//                           linear 1 - x, cosine (cos(pi x) + 1) / 2, minus_sqrt 1 - sqrt(x), times (lr - min) plus min
// The schedule is evaluated before a step with the samples consumed before it, so the first step has the warm-up's initial
// value.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "../base/check.h"
#include "cli.h"
#include "options.h"
#include "../parallel/pipeline_schedule.h"
#include "skip.h"

struct Rampup {
    int64_t start = 0, increment = 0, samples = 0;  // samples = 0: no ramp-up
};

// The progress of a run.
struct Counters {
    int64_t step = 0;               // completed global batches, applied or not
    int64_t consumed = 0;           // samples of these batches
    int64_t discarded = 0;          // batches that were drawn and dropped, which do not count as steps
    int64_t discarded_samples = 0;  // samples of these batches

    int64_t batch() const { return step + discarded + 1; }           // index of the next batch
    int64_t sample() const { return consumed + discarded_samples; }  // index of its first sample
};

// True if something due every `interval` steps (0: never) is due at this one.
inline bool due(int64_t interval, int64_t step) { return interval > 0 && step % interval == 0; }
// True if it is due at a step after `before`, up to `step`.
inline bool due_after(int64_t interval, int64_t before, int64_t step) {
    return interval > 0 && step / interval > before / interval;
}

struct Schedule {
    double max_lr = 0, min_lr = 0, init_lr = 0;
    int64_t warmup = 0, decay = 0, wsd_tail = 0;  // samples
    std::string style = "cosine", wsd_style = "exponential";
    double wd_start = 0, wd_end = 0;
    std::string wd_style = "constant";
    int64_t wd_samples = 0;  // samples over which weight decay changes
    int64_t final_batch = 1;
    int64_t micro_batch = 1;  // samples of one micro-batch on all data-parallel ranks
    Rampup rampup;
    int64_t total_samples = 0, total_steps = 0;
    bool open = false;  // the length is chosen later (--time-budget); total_steps then counts steps with ordered samples
    int64_t most_samples = (int64_t)1 << 62;  // limit of counters
    int64_t valid_samples = 0;                // samples per validation
    int64_t eval_interval = 1;                // steps between validations

    void plan_until(int64_t steps) {
        total_steps = steps;
        total_samples = samples_for(steps);
    }
    // Chooses the length of an open schedule.
    void end_after(int64_t steps, int64_t decay_steps) {
        open = false;
        plan_until(steps);
        decay = total_samples;
        wsd_tail = decay_steps * final_batch;
    }

    double lr(int64_t n) const {
        if (warmup > 0 && n <= warmup) return init_lr + (max_lr - init_lr) * (double)n / (double)warmup;
        if (style == "constant") return max_lr;
        if (n > decay) return min_lr;
        if (style == "inverse-square-root") {
            const double w = std::sqrt((double)std::max<int64_t>(warmup, 1)), s = std::sqrt((double)std::max<int64_t>(n, 1));
            return std::max(min_lr, max_lr * w / s);
        }
        double factor;
        if (style == "WSD") {
            const int64_t tail = decay - wsd_tail;
            if (n <= tail) factor = 1;
            else {
                const double x = (double)(n - tail) / (double)wsd_tail;
                factor = wsd_style == "linear"       ? 1 - x
                         : wsd_style == "cosine"     ? 0.5 * (std::cos(M_PI * x) + 1)
                         : wsd_style == "minus_sqrt" ? 1 - std::sqrt(x)
                                                     : 2 * std::pow(0.5, x) - 1;
            }
        } else {
            const double ratio = decay > warmup ? (double)(n - warmup) / (double)(decay - warmup) : 1;
            factor = style == "linear" ? 1 - ratio : 0.5 * (std::cos(M_PI * ratio) + 1);
        }
        return min_lr + factor * (max_lr - min_lr);
    }

    double weight_decay(int64_t n) const {
        if (wd_style == "constant" || n >= wd_samples) return wd_end;
        const double ratio = (double)n / (double)wd_samples;
        return wd_start + (wd_style == "linear" ? ratio : 0.5 * (std::cos(M_PI * (1 - ratio)) + 1)) * (wd_end - wd_start);
    }

    // The global batch size of the step that starts after `consumed` samples.
    int64_t global_batch(int64_t consumed) const {
        if (rampup.samples == 0 || consumed > rampup.samples) return final_batch;
        const int64_t increments = (final_batch - rampup.start) / rampup.increment;
        if (increments == 0) return final_batch;
        const double per_increment = (double)rampup.samples / (double)increments;
        return std::min(final_batch, rampup.start + (int64_t)((double)consumed / per_increment) * rampup.increment);
    }

    // All sizes of the global batch, in the order of the ramp-up.
    std::vector<int64_t> global_batches() const {
        std::vector<int64_t> sizes;
        for (int64_t n = rampup.start; rampup.samples > 0 && n < final_batch; n += rampup.increment) sizes.push_back(n);
        sizes.push_back(final_batch);
        return sizes;
    }
    // The same in micro-batches per rank.
    std::vector<int> micro_batches() const {
        std::vector<int> counts;
        for (const int64_t n : global_batches()) counts.push_back((int)(n / micro_batch));
        return counts;
    }

    // Ramp-up steps from `consumed` samples on with the same batch size: at least one, at most `most`, not always all.
    int64_t equal_steps(int64_t consumed, int64_t most) const {
        const int64_t size = global_batch(consumed);
        int64_t n = 1;
        while (2 * n <= most && (rampup.samples - consumed) / size >= 2 * n && global_batch(consumed + 2 * n * size) == size)
            n *= 2;
        return n;
    }
    // Steps that consume `samples`: the ramp-up's, then whole final batches.
    int64_t steps_for(int64_t samples) const {
        int64_t steps = 0, consumed = 0;
        while (rampup.samples > 0 && consumed <= rampup.samples && consumed < samples) {
            const int64_t size = global_batch(consumed), n = equal_steps(consumed, (samples - consumed - 1) / size + 1);
            consumed += n * size;
            steps += n;
        }
        return steps + (samples > consumed ? (samples - consumed) / final_batch : 0);
    }
    // Samples consumed after `steps` more steps.
    int64_t samples_for(int64_t steps, int64_t consumed = 0) const {
        while (rampup.samples > 0 && consumed <= rampup.samples && steps > 0) {
            const int64_t n = equal_steps(consumed, steps);
            consumed += n * global_batch(consumed);
            steps -= n;
        }
        return consumed + steps * final_batch;
    }

    // As in Megatron, consecutive validations read consecutive samples of the validation data. The samples of a validation are
    // a function of its step.
    int64_t samples_of_all_validations() const {
        const int64_t validations = total_steps / eval_interval + 1;
        if (valid_samples > 0 && validations > UINT32_MAX / valid_samples)
            fail(
                "%lld validations of %lld samples are more than the %u samples that can be shuffled; HINT: a larger "
                "--eval-interval, a smaller --eval-iters, or --eval-fixed",
                (long long)validations, (long long)valid_samples, UINT32_MAX);
        return validations * valid_samples;
    }
    int64_t first_sample_of_validation(int64_t step) const { return (step - 1) / eval_interval * valid_samples; }

    // The counters at the next batch used for training. Before it, batches in `discards` are drawn and dropped, with the size
    // of the next step's batch; batches in `skips` are steps without update. Past the end: the run's last step. Not beyond step
    // `until`.
    Counters next(Counters p, const BatchRanges& skips, const BatchRanges& discards, int64_t until = INT64_MAX) const {
        while (p.step < std::min(total_steps, until)) {
            const int64_t size = global_batch(p.consumed), dropped = discards.next(p.batch()) - p.batch();
            if (dropped) {
                p.discarded += dropped;
                p.discarded_samples += dropped * size;
            } else if (skips.contains(p.batch())) {
                p.step++;
                p.consumed += size;
            } else break;
        }
        return p;
    }

    // Samples read by a run up to p: in its steps, and in the batches drawn and dropped between them.
    int64_t samples_read(Counters p, const BatchRanges& discards) const {
        for (const BatchRanges::Range& r : discards.ranges()) {
            const int64_t first = std::max(r.first, p.batch()), dropped = r.last + 1 - first, steps = first - p.batch();
            if (dropped <= 0) continue;
            if (p.step + steps >= total_steps) break;
            p.consumed = samples_for(steps, p.consumed);
            p.step += steps;
            const int64_t size = global_batch(p.consumed);
            if (dropped > (most_samples - p.discarded_samples) / size)
                fail(
                    "--skip-train-iteration-range: before step %lld %lld batches of %lld samples are to be dropped, more than "
                    "can be counted; the maximum is %lld",
                    (long long)p.step + 1, (long long)dropped, (long long)size, (long long)(most_samples / size));
            p.discarded += dropped;
            p.discarded_samples += dropped * size;
        }
        return samples_for(std::max<int64_t>(total_steps - p.step, 0), p.consumed) + p.discarded_samples;
    }
};

namespace detail {

// Samples of `iters` whole batches.
inline int64_t in_samples(const Schedule& s, const TrainOptions& o, const std::string& option, int64_t iters) {
    if (const int64_t most = s.most_samples / s.final_batch; iters > most)
        fail_usage(
            "--%s %lld steps of %lld samples of %d tokens are more than can be counted; the maximum is %lld steps, 2^62 tokens",
            option.c_str(), (long long)iters, (long long)s.final_batch, o.seq_length, (long long)most);
    return iters * s.final_batch;
}
// A length given in steps or in samples, as --NAME-iters or --NAME-samples; neither: `otherwise`.
inline int64_t samples_of(const Schedule& s, const TrainOptions& o, const std::string& name, int64_t iters, int64_t samples,
                          int64_t otherwise) {
    refuse_together(iters && samples, "--" + name + "-iters", "--" + name + "-samples", "",
                    "--no-" + name + "-samples revokes an earlier one");
    return samples ? samples : iters ? in_samples(s, o, name + "-iters", iters) : otherwise;
}

inline void read_batches(Schedule& s, const TrainOptions& o, int replicas) {
    const int64_t micro = s.micro_batch = (int64_t)o.micro_batch_size * replicas;
    s.final_batch = o.global_batch_size ? o.global_batch_size : micro;
    if (const int64_t below = s.final_batch / micro * micro; below != s.final_batch)
        fail_usage(
            "--global-batch-size %lld is not divisible by --micro-batch-size %d x %d data-parallel ranks = %lld; HINT: the "
            "nearest %s",
            (long long)s.final_batch, o.micro_batch_size, replicas, (long long)micro,
            below ? format("are %lld and %lld", (long long)below, (long long)below + micro).c_str()
                  : format("is %lld", (long long)micro).c_str());
    // Numbers of samples, up to 2^62 tokens: sums of a few of them are exact, too.
    s.most_samples = ((int64_t)1 << 62) / std::max(1, o.seq_length);
}

inline void read_rampup(Schedule& s, const TrainOptions& o) {
    if (o.rampup_batch_size.empty()) return;
    int64_t* const values[] = {&s.rampup.start, &s.rampup.increment, &s.rampup.samples};
    for (int i = 0; i < 3; i++) {
        Allowed count;
        count.low = 1;
        count.high = (double)s.most_samples;
        cli::parse_into("rampup-batch-size", o.rampup_batch_size[i], count, *values[i]);
    }
    const int64_t grow = s.final_batch - s.rampup.start;
    if (grow < 0 || grow % s.rampup.increment)
        fail_usage("--rampup-batch-size: --global-batch-size %lld - start %lld = %lld is not a multiple of the increment %lld",
                   (long long)s.final_batch, (long long)s.rampup.start, (long long)grow, (long long)s.rampup.increment);
    if (s.rampup.start % s.micro_batch || s.rampup.increment % s.micro_batch)
        fail_usage(
            "--rampup-batch-size: start %lld and increment %lld must be multiples of --micro-batch-size x ranks = %lld; HINT: "
            "--no-rampup-batch-size uses full batches from the start",
            (long long)s.rampup.start, (long long)s.rampup.increment, (long long)s.micro_batch);
    refuse_together(o.train_iters, "--rampup-batch-size", "--train-iters", "its length is in --train-samples",
                    "--no-rampup-batch-size, or --no-train-iters, revokes an earlier one");
}

// Every size of the global batch must suit the pipeline.
inline void check_pipeline(const Schedule& s, const TrainOptions& o) {
    const int pp = o.pipeline_model_parallel_size, vpp = o.num_virtual_stages_per_pipeline_rank;
    for (const int64_t size : s.global_batches()) {
        const std::string problem = pipeline_problem(pp, vpp, (int)(size / s.micro_batch));
        if (problem.empty()) continue;
        if (!s.rampup.samples) fail_usage("%s", problem.c_str());
        fail_usage(
            "--rampup-batch-size reaches a global batch of %lld, for which %s; with START, INCREMENT and --global-batch-size "
            "multiples of %lld every size of the ramp-up fits",
            (long long)size, problem.c_str(), (long long)s.micro_batch * pp);
    }
}

inline const char* const no_length =
    "the length of the run is missing; HINT: give --train-iters, --train-samples or --time-budget";
inline void read_length(Schedule& s, const TrainOptions& o) {
    refuse_together(o.train_iters && o.train_samples, "--train-iters", "--train-samples", "both set the length",
                    "--no-train-samples, or --no-train-iters, revokes an earlier one");
    if (!o.time_budget.empty()) {
        s.open = true;
        return s.plan_until(1024);
    }
    if (!o.train_iters && !o.train_samples) fail_usage("%s", no_length);
    if (o.train_samples > s.most_samples)
        fail_usage(
            "--train-samples %lld samples of %d tokens are more than can be counted; the maximum is %lld samples, 2^62 tokens",
            (long long)o.train_samples, o.seq_length, (long long)s.most_samples);
    in_samples(s, o, "train-iters", o.train_iters);
    s.plan_until(o.train_iters ? o.train_iters : s.steps_for(o.train_samples));
    if (s.total_steps == 0)
        fail_usage("--train-samples %lld is less than one global batch of %lld", (long long)o.train_samples,
                   (long long)s.final_batch);
}

// `length`: samples of the whole run.
inline void read_learning_rate(Schedule& s, const TrainOptions& o, int64_t length) {
    s.decay = samples_of(s, o, "lr-decay", o.lr_decay_iters, o.lr_decay_samples, length);
    s.warmup = samples_of(s, o, "lr-warmup", o.lr_warmup_iters, o.lr_warmup_samples, 0);
    if (o.lr_warmup_fraction) {
        refuse_together(s.warmup, "--lr-warmup-fraction", o.lr_warmup_iters ? "--lr-warmup-iters" : "--lr-warmup-samples");
        s.warmup = (int64_t)(*o.lr_warmup_fraction * (double)s.decay);
    }
    s.wsd_tail = samples_of(s, o, "lr-wsd-decay", o.lr_wsd_decay_iters, o.lr_wsd_decay_samples, 0);
    for (const char* option : {"lr-wsd-decay-iters", "lr-wsd-decay-samples", "lr-wsd-decay-style"})
        refuse_without(o.given.count(option) && o.lr_decay_style != "WSD" && !o.given.count("lr-decay-style"),
                       std::string("--") + option, "--lr-decay-style WSD");
    if (o.lr_decay_style == "WSD" && !s.open && (s.wsd_tail == 0 || s.wsd_tail > s.decay))
        fail_usage(
            "--lr-decay-style WSD needs a tail of 1 to %lld samples (the decay's end); HINT: --lr-wsd-decay-iters or "
            "--lr-wsd-decay-samples",
            (long long)s.decay);
    if (s.warmup >= s.decay && o.lr_decay_style != "constant")
        fail_usage(
            "%s is a warm-up of %lld samples; it must end before the decay of the learning rate, which ends at %lld (%s); "
            "HINT: a shorter warm-up, or --lr-decay-style constant",
            o.lr_warmup_fraction ? "--lr-warmup-fraction"
            : o.lr_warmup_iters  ? format("--lr-warmup-iters %lld", (long long)o.lr_warmup_iters).c_str()
                                 : "--lr-warmup-samples",
            (long long)s.warmup, (long long)s.decay,
            o.lr_decay_iters     ? format("--lr-decay-iters %lld", (long long)o.lr_decay_iters).c_str()
            : o.lr_decay_samples ? "--lr-decay-samples"
                                 : "the length of the run");
    s.max_lr = o.lr;
    s.min_lr = o.min_lr;
    s.init_lr = o.lr_warmup_init;
    if (s.min_lr > s.max_lr) fail_usage("--min-lr %g is above --lr %g", s.min_lr, s.max_lr);
    if (s.init_lr > s.max_lr) fail_usage("--lr-warmup-init %g is above --lr %g", s.init_lr, s.max_lr);
    s.style = o.lr_decay_style;
    s.wsd_style = o.lr_wsd_decay_style;
}

inline void read_weight_decay(Schedule& s, const TrainOptions& o, int64_t length) {
    s.wd_style = o.weight_decay_incr_style;
    const bool constant = s.wd_style == "constant";
    refuse_without(constant && o.start_weight_decay, "--start-weight-decay", "--weight-decay-incr-style linear or cosine");
    refuse_without(constant && o.end_weight_decay, "--end-weight-decay", "--weight-decay-incr-style linear or cosine");
    refuse_without(!constant && !(o.start_weight_decay && o.end_weight_decay), "--weight-decay-incr-style " + s.wd_style,
                   "--start-weight-decay and --end-weight-decay");
    s.wd_start = o.start_weight_decay.value_or(o.weight_decay);
    s.wd_end = o.end_weight_decay.value_or(o.weight_decay);
    s.wd_samples = length;
}

}  // namespace detail

// Parses and checks the options of the schedule. `replicas` is the number of data-parallel ranks.
inline Schedule make_schedule(const TrainOptions& o, int replicas) {
    Schedule s;
    detail::read_batches(s, o, replicas);
    detail::read_rampup(s, o);
    detail::check_pipeline(s, o);
    detail::read_length(s, o);
    const int64_t length = s.open ? s.most_samples : o.train_samples ? o.train_samples : s.total_samples;
    detail::read_learning_rate(s, o, length);
    detail::read_weight_decay(s, o, length);
    s.valid_samples = detail::in_samples(s, o, "eval-iters", o.eval_iters);
    s.eval_interval = o.eval_interval;
    return s;
}
