// The contents of a checkpoint besides the model, and how to save and load them.
//   TrainingState         counters, and the properties that a resumed run must share; state.json
//   load_weights_and_moments, load_parameters, load_adapters   read the training memory from a checkpoint, a model, adapters
//   Saver                 copies the training memory, then saves it in the background while training continues
// run_directory.h manages the location of checkpoints. Weights and moments are exact copies, random numbers are functions of
// (seed, purpose, index), batches of the number of samples consumed: a resumed run computes the same bits as one that was never
// interrupted.
#pragma once
#include <omp.h>
#include <sys/statvfs.h>

#include <atomic>
#include <functional>
#include <future>
#include <optional>
#include <thread>

#include "checkpoint.h"
#include "model_texts.h"
#include "../options/config.h"
#include "../base/json.h"
#include "../base/numbers.h"
#include "../model/arena.h"
#include "../model/hf_config.h"
#include "../model/model_config.h"
#include "../ops.h"
#include "run_directory.h"
#include "../options/schedule.h"
#include "../options/skip.h"
#include "../base/clock.h"
#include "../base/terminal.h"
#include "../base/text.h"
#include "../optimizer/training_memory.h"
#include "../parallel/world.h"

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
    nlohmann::ordered_json options, data, layout;   // as given; documents and tokens per dataset; writer
    nlohmann::ordered_json fp8, guard, steadiness;  // of Fp8State (null: no FP8), Guard, Steadiness
    int64_t fp8_start = -1;                         // --fp8-start auto: the chosen step; -1: none yet
    nlohmann::ordered_json reference;               // for pairs of answers (reference.h); null: none
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
                fail("%s is damaged: %s is %s; it must be a whole number in [%lld, %lld]", path.c_str(), name,
                     value.dump().c_str(), (long long)least, (long long)most);
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
            fail("%s is damaged: options and layout must be objects, data a list", path.c_str());
        if (j.contains("discarded_samples")) s.discarded_samples = count("discarded_samples", j["discarded_samples"], 0, most);
        else part_from_consumed(s);
        s.planned = j.contains("planned_samples") ? count("planned_samples", j["planned_samples"], 0, INT64_MAX)
                                                  : planned_by_options(s);
        if (s.sample() > s.planned)
            fail("%s is damaged: its next sample is %lld, but consumed_samples can be at most %lld", path.c_str(),
                 (long long)s.sample(), (long long)s.planned);
        return s;
    } catch (const nlohmann::json::exception& e) {
        fail("%s is damaged: %s", path.c_str(), json_problem(e).c_str());
    }
}

// ---- agreement -------------------------------------------------------------------------------------------------------------
inline const Strings types_of_elements = {"main-grads-dtype", "exp-avg-dtype", "exp-avg-sq-dtype"};
inline bool is_type_of_elements(const std::string& name) {
    return std::find(types_of_elements.begin(), types_of_elements.end(), name) != types_of_elements.end();
}
// An option's value in the checkpoint; `discarded` if it has none. Earlier versions had gradients and moments in fp32 only, no
// optimizer but AdamW, and the standard parametrization; they wrote no global batch if it was a micro-batch of each rank.
inline nlohmann::ordered_json saved_option(const TrainingState& saved, const std::string& name) {
    if (name == "global-batch-size" && saved.options.value(name, 0) == 0)
        return saved.options.value("micro-batch-size", 1) * saved.layout.value("dp", 1);
    if (saved.options.contains(name)) return saved.options[name];
    if (name == "optimizer") return "adamw";
    if (name == "parametrization") return "standard";
    return is_type_of_elements(name) ? "fp32" : nlohmann::ordered_json(nlohmann::ordered_json::value_t::discarded);
}
// True if the option changes gradients or a moment to a type that represents all previous values, so that nothing is lost.
inline bool widens(const std::string& name, const nlohmann::ordered_json& before, const nlohmann::ordered_json& now) {
    return is_type_of_elements(name) && (now == "fp32" || (now == "bf16" && before == "fp8"));
}

// Compares data_identity (resume.h). Checkpoints older than its checksums are compared without them.
inline bool same_data(const nlohmann::ordered_json& saved, nlohmann::ordered_json now) {
    if (saved.is_array() && saved.size() == now.size())
        for (size_t i = 0; i < now.size(); i++)
            if (!saved[i].contains("crc32c")) now[i].erase("crc32c");
    return saved == now;
}

// Refuses to resume with options that change the computation, unless --override names them. Options of the groups "Run" and
// "Checkpoint" may change, and so may options that only affect how the same result is computed or where files are; the model's
// are compared by the resulting configurations, which do not include dropout. `order_problem`: from DataLoader, for the planned
// number of samples.
inline void check_agreement(const TrainingState& saved, const TrainOptions& now, const nlohmann::ordered_json& data,
                            const std::string& order_problem, const Strings& overrides) {
    const auto overridden = [&](const std::string& name) {
        return std::find(overrides.begin(), overrides.end(), name) != overrides.end();
    };
    const Strings free = {"micro-batch-size",         "data-path",        "valid-data-path", "tokenizer",
                          "no-fp8-fast-accumulation", "fp8-fast-backward"};
    const nlohmann::ordered_json options = as_written(options_to_json(now));
    Strings known = {"data-path", "data-order", "precision"};
    TrainOptions walked = now;
    for_each_option(walked, [&](const Option& option, auto&) {
        const std::string name = option_name(option.field), group = option.group;
        const bool dropout = name == "attention-dropout" || name == "hidden-dropout" || name == "embedding-dropout";
        const bool compared = dropout || group == "Data" || group == "Batch and length" || group == "Optimizer" ||
                              group == "FP8" || group == "Preferences";
        if (!compared) return;
        known.push_back(name);
        const nlohmann::ordered_json before = saved_option(saved, name);
        if (std::find(free.begin(), free.end(), name) != free.end() || before.is_discarded() || overridden(name)) return;
        if (before != options[name] && name == "global-batch-size")
            fail(
                "the global batch is %s, the checkpoint was written with %s, and changing it changes the run. HINT: "
                "--global-batch-size %s keeps it, --override %s continues with yours",
                counted(now.global_batch_size, "sample").c_str(), json_text(before).c_str(), json_text(before).c_str(),
                name.c_str());
        if (before != options[name] && !widens(name, before, options[name]))
            fail(
                "--%s is %s; the checkpoint was written with %s, and changing it changes the run. HINT: --override %s "
                "continues with your value",
                name.c_str(), json_text(options[name]).c_str(), json_text(before).c_str(), name.c_str());
    });
    if (saved.length.steps > 0 && !now.time_budget.empty() && saved_option(saved, "time-budget") != options["time-budget"])
        fail(
            "--time-budget is %s; the run was to end after %s and has already chosen its length of %lld steps for the decay. "
            "HINT: the original budget, or --resume an older checkpoint from before that choice",
            json_text(options["time-budget"]).c_str(), json_text(saved_option(saved, "time-budget")).c_str(),
            (long long)saved.length.steps);
    for (const std::string& name : overrides)
        if (std::find(known.begin(), known.end(), name) == known.end())
            fail_usage("--override names '%s', which is not an option that must agree with a checkpoint", name.c_str());
    if (!same_data(saved.data, data) && !overridden("data-path"))
        fail(
            "the data differs from the checkpoint's: documents, tokens, the checksum of the first and last tokens, and "
            "weights are %s, were %s. HINT: --override data-path continues with yours",
            json_text(data).c_str(), json_text(saved.data).c_str());
    if (!order_problem.empty() && !overridden("data-path") && !overridden("data-order"))
        fail("%s; --override data-order resumes with the new one", order_problem.c_str());
    const std::string before = saved.layout.value("precision", precision_name);
    if (before != precision_name && !overridden("precision"))
        fail("this program computes in %s, the checkpoint was written in %s. HINT: --override precision continues",
             precision_name, before.c_str());
}

// For the log: differences from the checkpoint that --override allows, and former bf16 types: "lr is 0.001, it was 0.003".
inline std::string describe_overrides(const TrainingState& saved, const TrainOptions& now) {
    const nlohmann::ordered_json options = as_written(options_to_json(now));
    Strings names = now.override;
    for (const std::string& name : types_of_elements)
        if (saved_option(saved, name) != options[name] && std::find(names.begin(), names.end(), name) == names.end())
            names.push_back(name);
    std::string text;
    for (const std::string& name : names) {
        text += (text.empty() ? "" : "; ") + name;
        const nlohmann::ordered_json before = saved_option(saved, name);
        if (!options.contains(name) || before.is_discarded()) continue;
        if (options[name] == before) text += " is " + json_text(options[name]) + " as it was";
        else text += " is " + json_text(options[name]) + ", it was " + json_text(before);
    }
    return text;
}

// The first difference between two model configurations as written to files; empty if there is none.
inline std::string config_difference(const ModelConfig& saved, const ModelConfig& now) {
    ModelConfig as_now = saved;  // dropout is part of training, not of the model
    as_now.embedding_dropout = now.embedding_dropout;
    as_now.attention_dropout = now.attention_dropout;
    as_now.hidden_dropout = now.hidden_dropout;
    const auto a = to_hf_config(as_now, ""), b = to_hf_config(now, "");
    const auto text = [](const auto& config, const std::string& key) {
        return config.contains(key) ? config[key].dump() : "absent";
    };
    for (const auto* config : {&a, &b})  // a key may be in one of them only, such as rope_scaling
        for (const auto& [key, value] : config->items())
            if (text(a, key) != text(b, key))
                return format("'%s' is %s in the checkpoint and %s in the options", key.c_str(), text(a, key).c_str(),
                              text(b, key).c_str());
    return "";
}

// ---- writing ---------------------------------------------------------------------------------------------------------------
// Moments in 8 bits are stored in bf16, so that any other type can be resumed from them.
inline size_t bytes_in_files(const TrainingMemory& m) {
    size_t bytes = 0;
    for (const Moment& moment : m.moments()) bytes += (m.*moment.of).rounded() ? sizeof(bf16) : sizeof(real);
    return bytes;
}

// averages: the weights' average is saved, too.
inline size_t checkpoint_bytes(const ParameterTable& table, const ModelTexts& texts, size_t moment_bytes, bool averages) {
    const size_t models = averages ? 2 : 1, weights = (sizeof(floatX) == sizeof(real) ? 0 : sizeof(floatX)) + sizeof(real);
    return table.trained * (models * weights + moment_bytes) + models * (table.rows.size() * 1024 + texts.bytes()) + (64 << 10);
}

// Free bytes of the file system of OUT; infinite if unknown.
inline double free_space(const std::string& out) {
    struct statvfs fs;
    return statvfs(out.c_str(), &fs) == 0 ? (double)fs.f_bavail * (double)fs.f_frsize : INFINITY;
}

// Before the checkpoint of `step` is saved, which needs `needed` bytes: if space is short, first removes checkpoints that
// prune() would remove after it, except the newest, then checkpoints that a rollback might need. fail()s if that is not enough.
inline void make_space(const std::string& out, int64_t step, KeptCheckpoints kept, size_t needed) {
    const auto enough = [&] { return free_space(out) >= (double)needed; };
    if (!enough() && kept.newest > 0) {
        kept.newest = std::max<int64_t>(kept.newest - 1, 1);
        for (const int64_t way_back : {kept.way_back, int64_t{-1}}) {
            kept.way_back = way_back;
            for (const int64_t other : superfluous(out, step - 1, kept))
                if (!enough()) remove_checkpoint(out, other);
        }
    }
    if (!enough())
        fail("no space for a checkpoint in %s: it needs %s, %s are free; HINT: %s", out.c_str(),
             human_bytes((double)needed).c_str(), human_bytes(free_space(out)).c_str(),
             kept.newest == 1 ? "make space there" : "--keep 1, or make space there");
}

// The path of the trained weights of a checkpoint.
inline std::string weights_path(const std::string& dir, const ModelConfig& c) {
    return c.adapted() ? dir + "/adapter_model.safetensors" : dir;
}

// The fp32 weights of a checkpoint's model, which the model's directory has in rounded form: in a separate file or, if the
// model's are fp32, in its directory.
inline void read_masters(const std::string& file, const std::string& model, const ModelConfig& c, const ParameterTable& table,
                         real* master) {
    const bool separate = file_exists(file) || file_exists(file + ".index.json");
    read_tensors(separate ? file : weights_path(model, c), c, table, master);
}

// ---- reading ---------------------------------------------------------------------------------------------------------------
// Sets the parameters of the table, and this rank's lower halves, to fp32 weights.
inline void set_weights(be::Ctx& ctx, const TrainingMemory& m, const std::vector<real>& weights) {
    HostSide<floatX> params(ctx, m.params, weights.size());
    HostSide<LowerHalf> lower(ctx, m.master_low_bits, m.master_low_bits ? m.shards.size : 0, m.state_on_host());
    floatX* to = params.data();
    LowerHalf* halves = lower.data();
    // In parallel, so that on a NUMA machine the pages that all threads read are spread over all nodes (first touch).
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < weights.size(); i++) {
        LowerHalf half;
        store_weight(&to[i], &half, 0, weights[i]);
    }
    if (m.master_low_bits)
        m.shards.for_each_part(0, weights.size(), [&](size_t from, size_t shard, size_t n) {
#pragma omp parallel for schedule(static)
            for (size_t i = 0; i < n; i++) store_weight(to + from, halves + shard, i, weights[from + i]);
        });
    params.upload();
    lower.upload();
}

// Loads weights from a model's directory; the fp32 weights of training start as these.
inline void load_parameters(be::Ctx& ctx, const TrainingMemory& m, const std::string& dir) {
    if (m.master_low_bits && !m.frozen && finer_than_floatX(dir)) {
        std::vector<real> weights(m.table.size);
        read_parameters(dir, m.c, m.table, weights.data());
        return set_weights(ctx, m, weights);
    }
    HostSide<floatX> params(ctx, m.model_params(), m.model_table().size);
    read_parameters(dir, m.c, m.model_table(), params.data());
    params.upload();
    if (!m.master_low_bits || m.frozen) return;
    HostSide<LowerHalf> lower(ctx, m.master_low_bits, m.shards.size, m.state_on_host());
    cpu::clear_in_parallel(lower.data(), m.shards.size * sizeof(LowerHalf));
    lower.upload();
}

// New adapters, initialized like PEFT's but without biases. The numbers are functions of the seed, the tensor and the element's
// index in the whole tensor.
inline void initialize_adapters(be::Ctx& ctx, const TrainingMemory& m, uint64_t seed) {
    std::vector<real> weights(m.table.size);
    for (const TensorSpec& t : m.table.rows) {
        const bool uniform = t.init == Init::kaiming;
        if (!uniform && t.init != Init::standard_normal) continue;
        const double bound = 1 / std::sqrt((double)t.whole_cols);
        for (size_t i = 0; i < t.size(); i++) {
            const size_t row = (size_t)t.whole_row((int)(i / (size_t)t.cols)),
                         column = (size_t)t.first_col + i % (size_t)t.cols, index = row * (size_t)t.whole_cols + column;
            weights[t.offset + i] = uniform
                                        ? (real)(bound * (2 * uniform_at(seed, RngPurpose::init, (uint32_t)t.id, index) - 1))
                                        : (real)normal_at(seed, RngPurpose::init, (uint32_t)t.id, index);
        }
    }
    set_weights(ctx, m, weights);
}

// New virtual tokens: the embeddings of these tokens (token by token) in the model in `base`.
inline void initialize_virtual_tokens(be::Ctx& ctx, const TrainingMemory& m, const std::string& base,
                                      const std::vector<int>& tokens) {
    if (m.table.rows.empty()) return;  // they are on another stage
    const ModelConfig stored = as_stored(base, m.c);
    TensorSpec rows = ParameterTable(stored).rows[0];  // of the token embedding
    rows.rows = (int)tokens.size();
    rows.blocks.clear();
    for (int i = 0; i < rows.rows; i++) rows.blocks.push_back({i, tokens[(size_t)i], 1});
    std::vector<real> weights(m.table.size);
    TensorSource(base, stored).read(rows, weights.data());
    for (real& x : weights) x *= (real)m.c.embedding_scale;
    set_weights(ctx, m, weights);
}

// Loads adapters that PEFT or a run has written.
inline void load_adapters(be::Ctx& ctx, const TrainingMemory& m, const std::string& dir) {
    std::vector<real> weights(m.table.size);
    read_tensors(weights_path(dir, m.c), m.c, m.table, weights.data());
    set_weights(ctx, m, weights);
}

// Loads fp32 weights and moments from a checkpoint; moments that had more bits are rounded to the nearest.
inline void load_weights_and_moments(be::Ctx& ctx, const TrainingMemory& m, const std::string& dir) {
    std::vector<real> whole(m.table.size);  // this rank's tensors, of which it keeps its shards
    const bool on_host = m.state_on_host();
    const auto keep_parts = [&](const Elements& moment, size_t n_kept) {
        moment.visit_moment([&](auto* elements) {
            HostSide parts(ctx, elements, n_kept, on_host);
            m.shards.for_each_part(0, m.table.size, [&](size_t from, size_t shard, size_t n) {
                for (size_t i = 0; i < n && shard + i < n_kept; i++) parts.data()[shard + i] = whole[from + i];
            });
            parts.upload();
        });
    };
    // Another optimizer (--override optimizer), which keeps fewer moments, may have saved it: the others start at zero.
    int saved = optimizer_row(saved_option(read_state(dir), "optimizer")).moments;
    for (const Moment& moment : m.moments()) {
        if (saved-- > 0) read_tensors(dir + "/training/" + moment.name + ".safetensors", m.c, m.table, whole.data());
        else std::fill(whole.begin(), whole.end(), real(0));
        keep_parts(m.*moment.of, moment.n);
    }
    read_masters(dir + "/training/master.safetensors", dir, m.c, m.table, whole.data());
    set_weights(ctx, m, whole);
    // A run without an average before starts it from the weights.
    if (!m.average) return;
    if (const std::string averages = dir + "/ema"; file_exists(averages))
        read_masters(dir + "/training/ema.safetensors", averages, m.c, m.table, whole.data());
    keep_parts(m.average, m.shards.size);
}

// ---- the background ---------------------------------------------------------------------------------------------------------
// Saves checkpoints on separate threads: save() copies the training memory into m.copy (or, if no copy of the moments was
// planned, saves while training waits). Every rank writes its shards into files that the first rank has created, and computes
// checksums of them in memory; then all share reading them back from the disk, which must give the same checksums; then the
// first rank renames the directory. Between these phases ranks synchronize in proceed(), which all must call after each step. A
// failure on any rank never throws: outcome() reports it on every rank, and the next save tries again.
class Saver {
public:
    struct Settings {
        std::string out;
        KeptCheckpoints kept;
        ModelTexts texts;
        std::string reference;             // a file in each checkpoint (reference.h); empty: none
        RunLock* lock = nullptr;           // of out; held by the first rank only
        std::shared_ptr<Monitor> monitor;  // is told of a disk that hangs; may be null
    };
    struct Outcome {
        int64_t step;
        double seconds;
        std::string error;  // empty: success
        bool taken;         // the directory is another run's by now: this one must end
    };

    Saver(be::Ctx& ctx, Settings settings, const TrainingMemory& m)
        : ctx_(ctx), world_(m.ranks->world), settings_(std::move(settings)), m_(m), whole_(trained_table(m.c)) {
        if (settings_.monitor) settings_.monitor->add(this, [this] { return wait_for_disk(); });
    }
    Saver(const Saver&) = delete;
    Saver& operator=(const Saver&) = delete;
    ~Saver() {
        if (settings_.monitor) settings_.monitor->remove(this);
        if (thread_.joinable()) thread_.join();
    }

    // If parameters are not in the order of the shards, there must be a copy of this rank's shards of them.
    void save(const TrainingState& state) {
        wait();
        state_ = state;
        start_ = monotonic_seconds();
        tries_ = 0;
        parts_ = {m_.state(), m_.params};
        if (encoded()) virtual_tokens_ = m_.virtual_tokens.computed(ctx_);
        const Parts& copy = m_.copy;
        if (copy.params) {
            parts_.params = copy.params;
            for (const Bucket& b : m_.shards.buckets)
                be::download(ctx_, copy.params + b.shard, m_.params + b.mine, b.n * sizeof(floatX));
        }
        if (m_.copies) {
            const size_t n = m_.shards.size;
            parts_ = copy;
            const auto read = [&](void* to, const void* from, size_t bytes) { read_state(ctx_, m_, to, from, bytes); };
            if (m_.master_low_bits) read(copy.master_low_bits, m_.master_low_bits, n * sizeof(LowerHalf));
            for (const Moment& moment : m_.moments()) {
                const Elements& from = m_.*moment.of;
                read((copy.*moment.of).data, from.data, moment.n * from.element_bytes());
            }
            if (m_.average) read(copy.average, m_.average, n * sizeof(real));
        } else {
            wait_for_device(ctx_);
        }
        begin();
        if (!m_.copies) wait();
    }

    // For the watchdog, which asks on a thread of its own: since when the disk has not taken or given anything of a save.
    Activity wait_for_disk() {
        if (done_) return {};
        return {true, "a save that makes no progress", "", 0, ticked(), "look at the disk or the file system of --out"};
    }
    // Enters the next phase if all ranks have finished the last. wait() repeats this until the checkpoint is saved, so that a
    // rank that saves for longer than --distributed-timeout is not considered lost.
    void proceed() {
        while (phase_ != Phase::idle && everyone(done_)) next_phase();
    }
    void wait() {
        for (proceed(); phase_ != Phase::idle; proceed()) usleep(1000);
    }
    // The result of the last save, once, as soon as it is complete.
    std::optional<Outcome> outcome() { return std::exchange(outcome_, {}); }

private:
    enum class Phase { make, write, read, publish, idle };

    NewDirectory directory() const { return NewDirectory(step_directory(settings_.out, state_.step)); }
    bool first() const { return !world_ || world_->rank() == 0; }
    // The trained tensors compute virtual tokens: these are the adapter, and the tensors are saved for resuming, only in fp32.
    bool encoded() const { return m_.c.virtual_tokens.encoded(); }
    bool has_masters() const { return has_lower_halves || encoded(); }
    bool everyone(bool mine) const {
        if (!world_) return mine;
        std::vector<char> all((size_t)world_->size());
        const char byte = mine;
        world_->all_gather(&byte, 1, all.data());
        return std::all_of(all.begin(), all.end(), [](char c) { return c != 0; });
    }

    double ticked() const {
        const std::lock_guard<std::mutex> lock(ticked_mutex_);
        return written_ ? written_->ticked() : monotonic_seconds();
    }
    void begin() {
        error_.clear();
        lost_ = taken_ = false;
        {
            const std::lock_guard<std::mutex> lock(ticked_mutex_);
            written_.emplace(directory().path());
        }
        phase_ = Phase::make;
        start_phase();
    }
    // Runs f, whose failure is the save's.
    template <class F>
    void guarded(F f) {
        try {
            f();
        } catch (const std::exception& e) {
            error_ = e.what();
            if (error_.empty()) error_ = "unknown error";
            lost_ = dynamic_cast<const LostBytes*>(&e);
            taken_ = dynamic_cast<const DirectoryTaken*>(&e);
        }
    }
    void start_phase() {
        written_->tick();
        done_ = false;
        const auto work = [this] {
            guarded([this] {
                run_phase(phase_);
                // A single rank runs all phases without synchronization.
                for (Phase phase = phase_; !world_ && phase < Phase::publish;) {
                    conclude(phase, report_);
                    phase = (Phase)((int)phase + 1);
                    run_phase(phase);
                }
            });
            done_ = true;
        };
        try {
            thread_ = std::thread([work] {
                cpu::op_threads() = 1;  // this thread only: the others belong to training
                omp_set_num_threads(1);
                work();
            });
        } catch (const std::system_error&) {  // no more threads: run here while training waits
            work();
        }
    }
    void run_phase(Phase phase) {
        const NewDirectory directory = this->directory();
        report_.clear();
        switch (phase) {
            case Phase::make: return make(directory);
            case Phase::write: return write(directory.path());
            case Phase::read: return read(directory.path());
            case Phase::publish: return publish(directory);
            case Phase::idle: return;
        }
    }
    // After a phase, with all ranks' reports, which are the same on each.
    void conclude(Phase phase, const std::string& reports) {
        const std::string dir = directory().path();
        if (phase == Phase::write) {
            WrittenFiles all(dir);
            all.add_lines(reports);
            given_ = all.sums();
        } else if (phase == Phase::read) check_against_disk(dir, given_, sums_of(reports));
    }
    void next_phase() {
        if (thread_.joinable()) thread_.join();
        if (world_) {  // exchange results and errors
            std::string errors, reports;
            const std::vector<std::string> all_errors = world_->all_gather(error_), all_reports = world_->all_gather(report_);
            for (size_t r = 0; r < all_errors.size(); r++) {
                if (errors.empty() && !all_errors[r].empty()) errors = format("rank %zu: %s", r, all_errors[r].c_str());
                reports += all_reports[r];
            }
            error_ = errors;
            lost_ = !everyone(!lost_);
            taken_ = !everyone(!taken_);
            if (error_.empty()) guarded([&] { conclude(phase_, reports); });
        }
        if (lost_ && tries_++ < 2) {
            if (first()) print_line(stderr, "warning: " + error_ + "; the checkpoint is written again");
            return begin();
        }
        phase_ = !world_ || !error_.empty() ? Phase::idle : (Phase)((int)phase_ + 1);
        if (phase_ != Phase::idle) return start_phase();
        if (!error_.empty() && first()) directory().remove();
        outcome_ = Outcome{state_.step, monotonic_seconds() - start_, error_, taken_};
    }

    // The files of a checkpoint; if the model's own weights are not fp32, fp32 weights are separate files.
    std::vector<TensorFiles> files(const std::string& dir) const {
        std::vector<TensorFiles> all;
        const char* const weights = m_.frozen ? "/adapter_model.safetensors" : "/model.safetensors";
        if (!encoded()) all.emplace_back(dir + weights, whole_, dtype_of<floatX>);
        if (has_masters()) all.emplace_back(dir + "/training/master.safetensors", whole_, dtype_of<real>);
        for (const Moment& moment : m_.moments())
            all.emplace_back(dir + "/training/" + moment.name + ".safetensors", whole_,
                             (parts_.*moment.of).rounded() ? dtype_of<bf16> : dtype_of<real>);
        if (m_.average) all.emplace_back(dir + "/ema" + weights, whole_, dtype_of<floatX>);
        if (m_.average && has_lower_halves) all.emplace_back(dir + "/training/ema.safetensors", whole_, dtype_of<real>);
        return all;
    }

    void make(const NewDirectory& directory) {
        if (!first()) return;
        if (settings_.lock) settings_.lock->hold();
        make_space(settings_.out, state_.step, settings_.kept,
                   checkpoint_bytes(whole_, settings_.texts, bytes_in_files(m_), m_.average) + settings_.reference.size());
        directory.create();
        try {
            make_directory(directory.path() + "/training");
            write_model_texts(directory.path(), m_.c, settings_.texts, *written_);
            if (m_.average) make_directory(directory.path() + "/ema");
            if (m_.average) write_model_texts(directory.path() + "/ema", m_.c, settings_.texts, *written_);
            written_->write(state_file(directory.path()), json_text(to_json(state_), 2) + "\n");
            if (!settings_.reference.empty()) written_->write(reference_file(directory.path()), settings_.reference);
            for (const TensorFiles& f : files(directory.path())) f.create(*written_);
            if (encoded()) write_virtual_tokens(directory.path() + "/adapter_model.safetensors");
        } catch (...) {
            directory.remove();
            throw;
        }
    }
    void write_virtual_tokens(const std::string& path) {
        ModelConfig c = m_.c;
        c.virtual_tokens = c.virtual_tokens.computed();
        const ParameterTable table = trained_table(c);
        const TensorFiles files(path, table, dtype_of<floatX>);
        files.create(*written_);
        const Shards whole(table, {}, false, table.size);
        virtual_tokens_.resize(table.size);
        write_parts(files, table, whole, whole.not_duplicated(table, {}), *written_,
                    [&](size_t i) { return virtual_tokens_[i]; });
    }
    // In parallel if training leaves the cores idle; on a CPU one after another.
    static void run_all(const std::vector<std::function<void()>>& parts) {
        constexpr auto any = std::launch::async | std::launch::deferred;  // deferred if there are no more threads
        constexpr auto launch = be::memory_is_host ? std::launch::deferred : any;
        std::vector<std::future<void>> running;
        for (const auto& part : parts) running.push_back(std::async(launch, part));
        for (auto& part : running) part.get();
    }
    void write(const std::string& dir) {
        const std::vector<TensorFiles> all = files(dir);
        std::vector<std::function<void()>> parts;
        const auto write = [&](auto part) {
            const TensorFiles& f = all[parts.size()];
            parts.push_back([&f, part, this] { write_parts(f, m_.table, m_.shards, m_.not_duplicated, *written_, part); });
        };
        if (!encoded()) write([&](size_t i) { return parts_.params[i]; });
        if (has_masters()) write([&](size_t i) { return load_weight(parts_.params, parts_.master_low_bits, i); });
        for (const Moment& moment : m_.moments())
            (parts_.*moment.of).visit_moment([&, n = moment.n](const auto* x) {
                using E = std::decay_t<decltype(*x)>;
                using Stored = std::conditional_t<std::is_same_v<E, real>, real, bf16>;
                write([x, n](size_t i) { return i < n ? Stored((real)x[i]) : Stored(0.0f); });
            });
        const real* const average = parts_.average;
        if (average) write([average](size_t i) { return nearest_weight(average[i]); });
        if (average && has_lower_halves) write([average](size_t i) { return average[i]; });
        run_all(parts);
        report_ = written_->lines();
    }
    void read(const std::string& dir) {
        constexpr int at_once = 4;
        const int rank = world_ ? world_->rank() : 0, ranks = world_ ? world_->size() : 1;
        const Strings names = names_of(given_);
        std::string sums[at_once];
        std::vector<std::function<void()>> parts;
        for (int k = 0; k < at_once; k++)
            parts.emplace_back([&, k] {
                sums[k] = sum_lines(dir, names, rank + ranks * k, ranks * at_once, true, [this] { written_->tick(); });
            });
        run_all(parts);
        for (const std::string& lines : sums) report_ += lines;
    }
    void publish(const NewDirectory& directory) const {
        if (!first()) return;
        if (settings_.lock) settings_.lock->hold();
        sync_file(settings_.out + "/log.jsonl");  // no checkpoint is ahead of the log, whatever happens to the power
        directory.publish(given_);
        std::exception_ptr problem;
        try {
            make_latest(settings_.out, step_directory(settings_.out, state_.step));
        } catch (...) {
            problem = std::current_exception();  // rethrown after prune(), so that the disk does not fill up
        }
        prune(settings_.out, state_.step, settings_.kept);
        if (problem) std::rethrow_exception(problem);
    }

    be::Ctx& ctx_;
    World* world_;  // null for one rank
    Settings settings_;
    const TrainingMemory& m_;
    ParameterTable whole_;                // of the files, which hold all tensors
    std::vector<floatX> virtual_tokens_;  // the virtual tokens, if they are computed

    // State of the save in progress; owned by its thread while it runs. report_: lines of this rank's files, for the others.
    Phase phase_ = Phase::idle;
    TrainingState state_;
    Parts parts_;
    std::string error_, report_;
    bool lost_ = false;                    // the data read back differed from the data written
    bool taken_ = false;                   // another run has taken the directory
    int tries_ = 0;                        // saves of this step that ended so
    std::optional<WrittenFiles> written_;  // by this rank
    mutable std::mutex ticked_mutex_;      // of written_, between begin() and the watchdog
    FileSums given_;                       // by all
    double start_ = 0;
    std::thread thread_;
    std::atomic<bool> done_{true};
    std::optional<Outcome> outcome_;
};

// ---- when ------------------------------------------------------------------------------------------------------------------
// "500": every 500 steps; "30m": every 30 minutes; "0": at the end; "never": not even then.
struct SaveInterval {
    int64_t steps = 0;
    double seconds = 0;
    bool never = false;
};
inline SaveInterval parse_save_interval(const std::string& text) {
    // A number alone is in steps; one with a unit of time is a duration, so that 30m is 30 minutes.
    const bool timed = text.find_first_of("smhdSMHD") != std::string::npos;
    if (const double steps = timed ? NAN : typed_count(text); steps >= 0 && steps <= 9e15 && steps == std::floor(steps))
        return {(int64_t)steps, 0};
    if (text == "never") return {0, 0, true};
    const double seconds = timed ? parse_duration(text) : NAN;
    if (!(seconds > 0))
        fail_usage("--save-every is '%s'; it must be a number of steps (500), a duration (90s, 30m, 2h), or never",
                   text.c_str());
    return {0, seconds};
}
