// The state of a training run besides its tensors: counters, and the properties that a resumed run must share; state.json.
// run_directory.h manages the location of checkpoints. Weights and moments are exact copies, random numbers are functions of
// (seed, purpose, index), batches of the number of samples consumed: a resumed run computes the same bits as one that was never
// interrupted.
#pragma once
#include <cmath>
#include <cstdint>
#include <string>

#include "../base/json.h"
#include "../options/options.h"
#include "../options/schedule.h"
#include "../options/skip.h"
#include "run_directory.h"

// Steps of a run with --time-budget, chosen while it trains: total, and of its decay. 0: not chosen yet.
struct RunLength {
    int64_t steps = 0, decay = 0;
};
// The cost of a run with --time-budget so far, and its timed steps, with the seconds of each of the last ones.
struct BudgetSpent {
    double seconds = 0;
    int64_t steps = 0;
    double step_seconds = 0;
};

struct TrainingState : Counters {
    int64_t updates = 0;    // applied steps: AdamW's step
    int64_t scheduled = 0;  // samples of applied steps: the position of the learning rate
    int64_t tokens = 0;
    double loss = NAN, valid_loss = NAN;            // of the last step and validation
    double lr = NAN;                                // of the last step
    nlohmann::ordered_json options, data, layout;   // as given; documents and tokens per dataset; writer
    nlohmann::ordered_json fp8, guard, steadiness;  // of Fp8State (null: no FP8), Guard, Steadiness
    int64_t fp8_start = -1;                         // --fp8-start auto: the chosen step; -1: none yet
    nlohmann::ordered_json reference;               // for pairs of answers (preference_reference.h); null: none
    BatchRanges skips;                              // batches to skip, a step each
    int64_t planned = 0;                            // samples for which the order of the data was computed
    Strings iterations;                             // LLM-jp's ranges, whose batches are drawn and dropped
    RunLength length;                               // with --time-budget
    BudgetSpent budget;                             // for --time-budget
};

inline nlohmann::ordered_json to_json(const TrainingState& s) {
    const auto number = [](double x) { return std::isfinite(x) ? nlohmann::ordered_json(x) : nlohmann::ordered_json(nullptr); };
    return {{"format", 1},
            {"step", s.step},
            {"updates", s.updates},
            {"consumed_samples", s.consumed},
            {"scheduled_samples", s.scheduled},
            {"skipped_steps", s.step - s.updates},
            {"tokens", s.tokens},
            {"loss", number(s.loss)},
            {"valid_loss", number(s.valid_loss)},
            {"lr", number(s.lr)},
            {"fp8", s.fp8},
            {"fp8_start", s.fp8_start},
            {"guard", s.guard},
            {"steadiness", s.steadiness},
            {"discarded_batches", s.discarded},
            {"discarded_samples", s.discarded_samples},
            {"planned_samples", s.planned},
            {"skip_batches", s.skips.state()},
            {"skip_iterations", s.iterations},
            {"time_budget",
             {{"seconds", s.budget.seconds},
              {"measured_steps", s.budget.steps},
              {"step_seconds", s.budget.step_seconds},
              {"steps", s.length.steps},
              {"decay_steps", s.length.decay}}},
            {"layout", s.layout},
            {"data", s.data},
            {"reference", s.reference},
            {"options", s.options}};
}

// Earlier versions counted the samples of discarded batches as consumed. The samples consumed without being trained on are
// these plus, batch for batch, the skipped ones.
inline void part_from_consumed(TrainingState& s) {
    if (s.discarded == 0) return;
    const int64_t seq_length = s.options.at("seq-length"), skipped = s.consumed - s.tokens / std::max<int64_t>(seq_length, 1);
    const double share = (double)s.discarded / (double)(s.discarded + s.skips.count_before(s.batch()));
    s.discarded_samples = std::clamp((int64_t)std::llround((double)skipped * share), (int64_t)0, s.consumed);
    s.consumed -= s.discarded_samples;
}

// The number of samples planned by earlier versions, which they did not record.
inline int64_t planned_by_options(const TrainingState& s) {
    TrainOptions o;
    o.micro_batch_size = s.options.at("micro-batch-size");
    o.global_batch_size = s.options.at("global-batch-size");
    o.rampup_batch_size = s.options.at("rampup-batch-size").get<Strings>();
    o.train_iters = s.options.at("train-iters");
    o.train_samples = s.options.at("train-samples");
    return make_schedule(o, s.layout.value("dp", 1)).total_samples;
}

inline TrainingState read_state(const std::string& dir) {
    const std::string path = state_file(dir);
    if (!file_exists(path))
        fail("%s contains no training state (training/state.json); HINT: --model %s starts a new run from its weights",
             dir.c_str(), dir.c_str());
    const nlohmann::json j = read_json(path);
    try {
        if (j.at("format") != 1)
            fail("%s has the format %s; this program reads format 1", path.c_str(), j["format"].dump().c_str());
        const auto count = [&](const char* name, const nlohmann::json& value, int64_t least, int64_t most) {
            if (!value.is_number_integer() || (value.is_number_unsigned() && value.get<uint64_t>() > (uint64_t)most) ||
                value.get<int64_t>() < least || value.get<int64_t>() > most)
                fail_damaged(path, format("%s is %s; it must be a whole number in [%lld, %lld]", name, value.dump().c_str(),
                                          (long long)least, (long long)most));
            return value.get<int64_t>();
        };
        constexpr int64_t most = (int64_t)1 << 53;
        TrainingState s;
        s.step = count("step", j.at("step"), 0, most);
        s.updates = count("updates", j.at("updates"), 0, s.step);
        s.consumed = count("consumed_samples", j.at("consumed_samples"), 0, most);
        s.scheduled = count("scheduled_samples", j.at("scheduled_samples"), 0, s.consumed);
        s.tokens = count("tokens", j.at("tokens"), 0, INT64_MAX);
        if (j.at("loss").is_number()) s.loss = j["loss"];
        if (j.at("valid_loss").is_number()) s.valid_loss = j["valid_loss"];
        // Later additions to the format may be missing.
        if (const auto lr = j.value("lr", nlohmann::json()); lr.is_number()) s.lr = lr;
        s.fp8 = j.value("fp8", nlohmann::json());
        s.guard = j.value("guard", nlohmann::json());
        s.steadiness = j.value("steadiness", nlohmann::json());
        s.reference = j.value("reference", nlohmann::json());
        s.fp8_start = count("fp8_start", j.value("fp8_start", nlohmann::json(-1)), -1, most);
        s.discarded = count("discarded_batches", j.value("discarded_batches", nlohmann::json(0)), 0, most);
        s.iterations = j.value("skip_iterations", Strings());
        if (j.contains("time_budget")) {
            const nlohmann::json& budget = j["time_budget"];
            s.length.steps = count("time_budget.steps", budget.at("steps"), 0, most);
            s.length.decay = count("time_budget.decay_steps", budget.at("decay_steps"), 0, s.length.steps);
            s.budget.seconds = std::max(0.0, budget.at("seconds").get<double>());
            s.budget.steps = count("time_budget.measured_steps", budget.value("measured_steps", nlohmann::json(0)), 0, most);
            s.budget.step_seconds = std::max(0.0, budget.value("step_seconds", 0.0));
        }
        s.skips = BatchRanges::restore(j.value("skip_batches", nlohmann::json::array()), path);
        s.options = j.at("options");
        s.data = j.at("data");
        s.layout = j.at("layout");
        if (!s.options.is_object() || !s.data.is_array() || !s.layout.is_object())
            fail_damaged(path, "options and layout must be objects, data a list");
        s.layout.value("matrix_unit", Strings());  // a wrong type is reported here, with the file's name
        s.layout.value("precision", "");
        for (auto* part : {&s.layout, &s.options})
            for (const char* name : {"dp", "micro-batch-size", "global-batch-size"})
                if (part->contains(name)) count(name, (*part)[name], 0, INT_MAX);
        if (j.contains("discarded_samples")) s.discarded_samples = count("discarded_samples", j["discarded_samples"], 0, most);
        else part_from_consumed(s);
        s.planned = j.contains("planned_samples") ? count("planned_samples", j["planned_samples"], 0, INT64_MAX)
                                                  : planned_by_options(s);
        if (s.sample() > s.planned)
            fail_damaged(path, format("its next sample is %lld, but consumed_samples can be at most %lld",
                                      (long long)s.sample(), (long long)s.planned));
        return s;
    } catch (const nlohmann::json::exception& e) {
        fail_damaged(path, json_problem(e));
    }
}
