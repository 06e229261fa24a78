// Detects outliers of loss and gradient norm before the update, so that it can be skipped, and whether a run is steady.
//   Guard guard(options);
//   const Verdict v = guard.judge(step, batch, loss, grad_norm);    // every step, before its update
//   if (v.apply) update();
//   if (v.give_up) fail("%s", v.reason.c_str());
//   if (v.rollback) ...   // load the checkpoint of plan_rollback(), skip rollback_range(), then guard.rolled_back()
// Its inputs are reduced over all ranks, and its computations have a fixed order: every rank makes the same decision.
//
// A non-finite loss or norm is always an outlier. A spike is a loss above median + k x 1.4826 x MAD, or a norm above f x
// median, over a window of the latest normal steps. MAD, the median of |x - median|, times 1.4826 is the standard deviation of
// normal noise (Hampel 1974); unlike mean and variance, medians barely move until half of the window is bad, and outliers are
// excluded from it anyway. Only high values count. MAD is at least 0.5% of the median loss, so that a very quiet window gives
// no false alarms. Until the window holds `least` steps, only non-finite values are detected.
//   policy      spike                        `patience` outliers in a row
//   warn        applied, not in the window   spikes: a new level, at which the window restarts; non-finite: the run ends
//   skip        not applied                  the run ends
//   rollback    not applied                  back to an older checkpoint, without the batches around the first of them (PaLM,
//                                            Chowdhery et al. 2022, section 5.1); after `max_rollbacks` the run ends
// A non-finite step is never applied. Under warn, a row of outliers is consecutive steps. Otherwise a row ends after 4 x
// `patience` normal steps, because not every batch uses a corrupted weight.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "../base/check.h"
#include "../base/math.h"
#include "../options/skip.h"

struct GuardOptions {           // their defaults are in options.h
    std::string policy;         // warn, skip or rollback
    int window;                 // normal steps over which medians are taken
    double loss_deviations;     // k: robust standard deviations above the median that make a spike
    double norm_factor;         // f: multiple of the median gradient norm that makes a spike
    int patience;               // outliers in a row that are skipped before a stronger action
    int max_rollbacks;          // in the whole run
    int64_t rollback_distance;  // minimum steps from that checkpoint to the first outlier
    int64_t rollback_batches;   // skipped, centred on the first outlier's
    int least = 32;             // normal steps before spikes are detected (or a full window)
};

struct Verdict {
    enum Kind { normal, nonfinite, spike };
    Kind kind = normal;
    bool apply = true;                                        // do the update
    bool rollback = false;                                    // go back to an older checkpoint
    bool give_up = false;                                     // end the run with `reason`
    std::string reason;                                       // for people; empty for a normal step
    int64_t first_outlier_step = 0, first_outlier_batch = 0;  // of this row of outliers; 0 if normal
};

// The median distance from `center`.
inline double median_deviation(std::vector<double> x, double center) {
    for (double& value : x) value = std::abs(value - center);
    return median(std::move(x));
}

// Losses and gradient norms of several steps, oldest first.
struct LossesAndNorms {
    std::vector<double> losses, norms;

    size_t size() const { return losses.size(); }
    void push(double loss, double norm) {
        losses.push_back(loss);
        norms.push_back(norm);
    }
    void keep_latest(size_t n) {
        if (size() <= n) return;
        const auto excess = (int64_t)(size() - n);
        losses.erase(losses.begin(), losses.begin() + excess);
        norms.erase(norms.begin(), norms.begin() + excess);
    }
    nlohmann::ordered_json state() const { return {{"losses", losses}, {"grad_norms", norms}}; }
};

// Reads a saved state; rejects one that state() cannot have written. `where` names its origin in messages.
class GuardStateReader {
public:
    GuardStateReader(const nlohmann::json& state, std::string where) : state_(state), where_(std::move(where)) {
        require(state_.is_object(), "it is not an object");
    }
    void require(bool holds, const char* otherwise) const {
        if (!holds) fail_damaged(where_, otherwise);
    }
    int64_t count(const char* key) const {
        const nlohmann::json& j = at(key);
        const bool valid = j.is_number_unsigned() ? j.get<uint64_t>() <= (uint64_t)BatchRanges::largest
                                                  : j.is_number_integer() && j.get<int64_t>() >= 0;
        require(valid, format("'%s' is not a count", key).c_str());
        return j.get<int64_t>();
    }
    bool flag(const char* key) const {
        require(at(key).is_boolean(), format("'%s' is neither true nor false", key).c_str());
        return at(key).get<bool>();
    }
    LossesAndNorms losses_and_norms(const char* key) const {
        const GuardStateReader inner = object(key);
        const LossesAndNorms x = {inner.numbers("losses"), inner.numbers("grad_norms")};
        require(x.losses.size() == x.norms.size(), format("'%s' has different numbers of losses and norms", key).c_str());
        return x;
    }
    std::vector<double> numbers(const char* key) const {
        const nlohmann::json& list = at(key);
        require(list.is_array(), format("'%s' is not a list", key).c_str());
        std::vector<double> values;
        for (const nlohmann::json& j : list) {
            require(j.is_number() && std::isfinite(j.get<double>()), format("'%s' holds a non-number", key).c_str());
            values.push_back(j.get<double>());
        }
        return values;
    }
    GuardStateReader object(const char* key) const { return GuardStateReader(at(key), where_); }

private:
    const nlohmann::json& state_;
    std::string where_;

    const nlohmann::json& at(const char* key) const {
        require(state_.contains(key), format("it has no '%s'", key).c_str());
        return state_[key];
    }
};

class Guard {
public:
    explicit Guard(GuardOptions options) : o_(std::move(options)) {
        CHECK(o_.policy == "warn" || o_.policy == "skip" || o_.policy == "rollback", "policy '%s'", o_.policy.c_str());
        CHECK(o_.window >= 1 && o_.least >= 1 && o_.patience >= 1, "window %d, least %d, patience %d", o_.window, o_.least,
              o_.patience);
        CHECK(o_.loss_deviations > 0 && o_.norm_factor > 0, "%g deviations, factor %g", o_.loss_deviations, o_.norm_factor);
        CHECK(o_.max_rollbacks >= 0 && o_.rollback_distance >= 0 && o_.rollback_batches >= 1,
              "%d rollbacks by %lld, %lld batches", o_.max_rollbacks, (long long)o_.rollback_distance,
              (long long)o_.rollback_batches);
    }

    Verdict judge(int64_t step, int64_t batch, double loss, double grad_norm) {
        Verdict v;
        if (!std::isfinite(loss) || !std::isfinite(grad_norm)) {
            v.kind = Verdict::nonfinite;
            v.reason = format("loss %g, gradient norm %g", loss, grad_norm);
        } else if (window_.size() >= (size_t)std::min(o_.least, o_.window)) {
            v.reason = spike(loss, grad_norm);
            if (!v.reason.empty()) v.kind = Verdict::spike;
        }
        if (v.kind == Verdict::normal) {
            window_.push(loss, grad_norm);
            window_.keep_latest((size_t)o_.window);
            if (o_.policy == "warn" || ++row_.normal >= 4 * o_.patience) row_ = {};
            return v;
        }

        if (row_.length++ == 0) {
            row_.step = step;
            row_.batch = batch;
        }
        row_.normal = 0;
        v.first_outlier_step = row_.step;
        v.first_outlier_batch = row_.batch;
        if (row_.length > 1) v.reason += format("; outlier %lld since step %lld", (long long)row_.length, (long long)row_.step);
        v.apply = v.kind == Verdict::spike && o_.policy == "warn";
        if (!v.apply) skipped_++;
        if (v.kind == Verdict::spike) {
            spikes_++;
            row_.nonfinite = 0;
        } else {
            nonfinite_++;
            row_.nonfinite++;
        }

        if (o_.policy == "warn") judge_row_of_warnings(v, loss, grad_norm);
        else if (row_.length >= o_.patience) judge_row(v);
        return v;
    }

    // ---- going back -----------------------------------------------------------------------------------------------------
    // The checkpoint to roll back to, from these steps: the newest that is more than rollback_distance steps before the first
    // outlier; else the oldest before it, if any.
    std::optional<int64_t> plan_rollback(const std::vector<int64_t>& checkpoints, int64_t first_outlier_step) const {
        std::optional<int64_t> far, oldest;
        for (const int64_t step : checkpoints) {
            if (step <= first_outlier_step - 1 - o_.rollback_distance) far = std::max(far.value_or(step), step);
            if (step < first_outlier_step) oldest = std::min(oldest.value_or(step), step);
        }
        return far ? far : oldest;
    }

    // The maximum number of steps between a rollback's checkpoint, as planned, and the last outlier of the row; -1: no rollback
    // is planned.
    int64_t way_back() const {
        const int64_t longest_row = (o_.patience - 1) * int64_t{4} * o_.patience;
        return o_.policy == "rollback" ? longest_row + 1 + o_.rollback_distance : -1;
    }

    // The batches to skip.
    BatchRanges::Range rollback_range(int64_t first_outlier_batch) const {
        const int64_t first = first_outlier_batch - o_.rollback_batches / 2;
        return {std::max<int64_t>(first, 1), first + o_.rollback_batches - 1};
    }

    // After a rollback: the window is restored from the guard saved with the checkpoint (else empty), because losses were
    // higher then; the row of outliers is cleared; the counts continue and include the retry.
    void rolled_back(const Guard& saved) {
        window_ = saved.window_;
        window_.keep_latest((size_t)o_.window);
        row_ = {};
        rollbacks_++;
    }

    // ---- counts of the whole run, state ---------------------------------------------------------------------------------
    int64_t spikes() const { return spikes_; }  // applied or not
    int64_t nonfinite() const { return nonfinite_; }
    int64_t skipped() const { return skipped_; }  // outliers that were not applied
    int64_t rollbacks() const { return rollbacks_; }

    // The state as JSON; every number is restored with the same bits, also from text.
    nlohmann::ordered_json state() const {
        return {{"window", window_.state()},
                {"row",
                 {{"length", row_.length},
                  {"normal", row_.normal},
                  {"nonfinite", row_.nonfinite},
                  {"step", row_.step},
                  {"batch", row_.batch},
                  {"spikes", row_.spikes.state()}}},
                {"spikes", spikes_},
                {"nonfinite", nonfinite_},
                {"skipped", skipped_},
                {"rollbacks", rollbacks_}};
    }
    void restore(const nlohmann::json& state, const std::string& where) {
        const GuardStateReader in(state, where), row = in.object("row");
        Guard g(o_);
        g.window_ = in.losses_and_norms("window");
        g.window_.keep_latest((size_t)o_.window);
        g.row_.length = row.count("length");
        g.row_.normal = row.count("normal");
        g.row_.nonfinite = row.count("nonfinite");
        g.row_.step = row.count("step");
        g.row_.batch = row.count("batch");
        g.row_.spikes = row.losses_and_norms("spikes");
        g.spikes_ = in.count("spikes");
        g.nonfinite_ = in.count("nonfinite");
        g.skipped_ = in.count("skipped");
        g.rollbacks_ = in.count("rollbacks");
        in.require(g.row_.nonfinite + (int64_t)g.row_.spikes.size() <= g.row_.length, "its row is shorter than its outliers");
        in.require(g.row_.length <= g.spikes_ + g.nonfinite_, "its row is longer than all outliers");
        *this = std::move(g);
    }

private:
    static constexpr double deviation_per_mad = 1.4826;                     // for normal noise
    static constexpr double least_relative_mad = 0.005, least_mad = 0.001;  // least_mad: for losses near 0

    struct Row {
        int64_t length = 0, step = 0, batch = 0;  // step and batch: the first outlier's
        int64_t normal = 0;                       // steps since the last outlier
        int64_t nonfinite = 0;                    // non-finite outliers at its end
        LossesAndNorms spikes;                    // under warn: candidates for a new level
    };

    GuardOptions o_;
    LossesAndNorms window_;
    Row row_;
    int64_t spikes_ = 0, nonfinite_ = 0, skipped_ = 0, rollbacks_ = 0;

    // The reason why this is a spike; empty if it is not.
    std::string spike(double loss, double grad_norm) const {
        const double level = median(window_.losses);
        const double mad = std::max({median_deviation(window_.losses, level), least_relative_mad * std::abs(level), least_mad});
        const double highest = level + o_.loss_deviations * deviation_per_mad * mad;
        if (loss > highest)
            return format("loss %.5g is above %.5g = median %.5g + %g standard deviations of %.3g", loss, highest, level,
                          o_.loss_deviations, deviation_per_mad * mad);
        const double norm = median(window_.norms);
        if (norm > 0 && grad_norm > o_.norm_factor * norm)
            return format("gradient norm %.5g is above %.5g = %g x median %.5g", grad_norm, o_.norm_factor * norm,
                          o_.norm_factor, norm);
        return "";
    }

    void judge_row_of_warnings(Verdict& v, double loss, double grad_norm) {
        if (v.kind == Verdict::spike) row_.spikes.push(loss, grad_norm);
        if (row_.nonfinite >= o_.patience) {
            v.give_up = true;
            v.reason += ". HINT: a lower --lr or a longer warm-up; --on-spike rollback, which goes back to an older checkpoint";
        } else if (row_.spikes.size() >= (size_t)o_.patience) {
            v.reason += "; this is accepted as the new level";
            window_ = std::move(row_.spikes);
            window_.keep_latest((size_t)o_.window);
            row_ = {};
        }
    }

    void judge_row(Verdict& v) {
        v.rollback = o_.policy == "rollback" && rollbacks_ < o_.max_rollbacks;
        v.give_up = !v.rollback;
        if (v.rollback) v.reason += format("; rollback %lld of at most %d", (long long)rollbacks_ + 1, o_.max_rollbacks);
        else if (o_.policy == "rollback")
            v.reason += format("; %lld rollbacks have not helped. HINT: resume from an older checkpoint with a lower --lr",
                               (long long)rollbacks_);
        else
            v.reason +=
                ". HINT: --on-spike rollback, which goes back to an older checkpoint and skips these batches; a lower "
                "--lr or a longer warm-up";
    }
};

// Detects when a run has become steady: the medians of two successive windows of 64 steps are close to each other: the loss
// within 2% of the older one, the optimizer's second moments (any measure of their size) within 10%, the gradient norm between
// 0.5 and 1.5 times the older one. It then stays steady. observe() is called after the warm-up, for each normal step; a gap in
// the step numbers means that there was an outlier, and both windows restart.
class Steadiness {
public:
    static constexpr size_t window = 64;

    void observe(int64_t step, double loss, double grad_norm, double moments) {
        if (step != last_step_ + 1) {
            latest_ = {};
            moments_.clear();
        }
        last_step_ = step;
        latest_.push(loss, grad_norm);
        moments_.push_back(moments);
        latest_.keep_latest(2 * window);
        if (moments_.size() > 2 * window) moments_.erase(moments_.begin());
        if (latest_.size() < 2 * window) return;
        const auto near = [](const std::vector<double>& x, double least, double most) {
            const auto middle = x.begin() + (int64_t)window;
            const double before = median({x.begin(), middle}), now = median({middle, x.end()});
            return least * before <= now && now <= most * before;
        };
        if (near(latest_.losses, 0.98, 1.02) && near(latest_.norms, 0.5, 1.5) && near(moments_, 0.9, 1.1)) steady_ = true;
    }
    bool steady() const { return steady_; }

    nlohmann::ordered_json state() const {
        return {{"steady", steady_}, {"last_step", last_step_}, {"latest", latest_.state()}, {"moments", moments_}};
    }
    void restore(const nlohmann::json& state, const std::string& where) {
        const GuardStateReader in(state, where);
        Steadiness s;
        s.steady_ = in.flag("steady");
        s.last_step_ = in.count("last_step");
        s.latest_ = in.losses_and_norms("latest");
        s.moments_ = in.numbers("moments");
        in.require(s.latest_.size() <= 2 * window, "it has more steps than two windows");
        in.require(s.moments_.size() == s.latest_.size(), "it has moments for another number of steps");
        *this = std::move(s);
    }

private:
    LossesAndNorms latest_;  // at most two windows
    std::vector<double> moments_;
    int64_t last_step_ = 0;
    bool steady_ = false;
};
