// train_gpt tune: the fastest layout of a training run. Options of `train` describe the run; given options of its layout are
// fixed, the others are searched (layout_search.h), for --world N GPUs or for this machine. With --trials, the fastest by the
// plan are measured here. The five best are written to --out as files for `train --config`, with a page.
#pragma once
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "../base/check.h"
#include "../base/file.h"
#include "../base/clock.h"
#include "../base/table.h"
#include "../base/terminal.h"
#include "../base/text.h"
#include "../report/report.h"
#include "../options/options.h"
#include "../options/config_file.h"
#include "../plan/layout_search.h"
#include "../plan/machine.h"
#include "../plan/nccl_memory.h"
#include "../run/run.h"
#include "../infer/training_tasks.h"
#include "trials.h"

namespace detail {

// ---- the search problem ----------------------------------------------------------------------------------------------------
// Prepares the run like set_up (run.h), except for its layout.
inline void set_up_without_layout(Run& run, const TuneOptions& o) {
    if (run.world.size() > 1) fail_usage("tune is a single process; HINT: omit mpirun, --trials starts ranks itself");
    refuse_together(o.trials && o.world, "--trials", "--world", "trials measure this machine, --world plans for another one");
    refuse_together(o.search_fp8 && !o.fp8_format.empty(), "--fp8-format", "--search-fp8", "FP8 in all layouts, or in some");
    refuse_together(o.trials && o.dry_run, "--trials", "--dry-run", "trials measure");
    for (const char* name : {"resume", "time-budget"})
        if (o.given.count(name)) fail_usage("--%s applies to a single run and cannot be used with tune; HINT: omit it", name);
    run.o.quiet = true;
    adjust_options(run);
    load_tokenizer(run);
    check_options_of_backend(run);
    derive_from_size(run);
    set_up_model(run);
}
inline void check_training(const Run& run, const TuneOptions& o) {
    for (const char* name : {"batch", "max-new-tokens", "max-latency"})
        refuse_without(o.given.count(name), std::string("--") + name, "--inference");
    refuse_without(!o.trials && o.given.count("trial-steps"), "--trial-steps", "--trials");
    refuse_without(o.trials && o.data_path.empty(), "--trials", "data to train on", "--data-path PREFIX");
    refuse_missing(!run.o.global_batch_size, "the number of samples per step, the same for every layout,",
                   "--global-batch-size 512");
    refuse_missing(!run.o.train_iters && !run.o.train_samples, "the length of the run", "--train-iters or --train-samples");
}

// Figures of this machine, unless planning for another one: from the table of devices for a GPU, and for a CPU its measured
// peak and the rate at which it copies memory. Ranks on one CPU share these.
struct HereFigures {
    double tflops = 0, memory_gbs = 0, memory_bytes = 0;
};
inline HereFigures measure_cpu(const Run& run) {
    HereFigures here;
    here.tflops = peak_of(cpu::Ctx(run.ctx.threads)).flops / 1e12;
    here.memory_bytes = (double)be::available_memory();
    const size_t n = 64 << 20;
    std::vector<char> from(n, 1), to(n, 2);
    double best = INFINITY;
    for (int i = 0; i < 3; i++) {
        const double begin = monotonic_seconds();
        std::copy(from.begin(), from.end(), to.begin());
        best = std::min(best, monotonic_seconds() - begin);
    }
    here.memory_gbs = 2e-9 * (double)n / best;
    return here;
}

// For this machine's GPU, the figures of its kind: among devices with its peak, the one with the nearest memory size.
inline void take_gpu_figures(Run& run) {
    TrainOptions& o = run.o;
    if (o.given.count("device") || !run.ctx.has_device()) return;
    const std::string name = processor_of(run.ctx);
    const double has = (double)memory_of_device(run.ctx) / 1073741824.0;
    const Device* kind = nullptr;
    for (const Device& d : devices())
        if (d.tflops == gpu_tflops(name) && (!kind || std::abs(d.memory_gib - has) < std::abs(kind->memory_gib - has)))
            kind = &d;
    if (kind) {
        o.device = kind->name;
        o.device_memory_gib = o.device_memory_gib.value_or((double)be::available_memory() / 1073741824.0);
        return;
    }
    for (const auto& [option, value] : {std::pair("device-tflops", o.device_tflops),
                                        {"device-memory-gbs", o.device_memory_gbs},
                                        {"device-memory-gib", o.device_memory_gib}})
        if (!value)
            fail_usage("no figures are known for %s: --%s is missing; HINT: give it, or --device for another GPU's",
                       name.c_str(), option);
}

inline LayoutProblem problem_of(Run& run, const MemoryOfStage& memory_of_stage) {
    LayoutProblem problem;
    problem.model = [&run, known = std::make_shared<std::map<int, ModelConfig>>()](int tp) {
        if (const auto found = known->find(tp); found != known->end()) return found->second;
        TrainOptions p = run.o;
        p.tensor_model_parallel_size = tp;
        return known->emplace(tp, configure_model(p, run.tokenizer.get())).first->second;
    };
    problem.memory_of_stage = memory_of_stage;
    problem.ranks = {std::max(1, run.o.world)};
    if (run.plans_elsewhere() || !be::memory_is_host) {
        problem.may_offload = optimizer_row(run.o.optimizer).can_offload();
        if (!run.plans_elsewhere()) {
            take_gpu_figures(run);
            if (can_start_ranks()) problem.ranks = divisors(be::count_devices());
        }
        offloads_gradients(run.o, problem.ranks.front());  // refuses them on several ranks, or in fp32
        problem.memory = [&run](int) { return planned_memory_bytes(run.o); };
        problem.host_memory = [&run](int ranks) {
            return run.plans_elsewhere() ? planned_host_bytes(run.o, ranks) : (double)cpu::available_memory() / ranks;
        };
        problem.bytes_of_libraries = [&run](const ModelConfig& c, const Layout& l) {
            const Mesh mesh = make_mesh(l.ranks, 0, l.tp, l.pp, l.vpp, l.ep, l.cp);
            return nccl_memory(c, mesh, run.generates(), sends_all_to_all(run.o, c, l.ep), exchanges_heads(run.o)).bytes();
        };
    } else {
        const HereFigures here = measure_cpu(run);
        run.o.threads = run.ctx.threads;
        if (can_start_ranks()) problem.ranks = divisors(run.ctx.threads);
        run.o.device_memory_gib = run.o.device_memory_gib.value_or(here.memory_bytes / 1073741824.0);
        problem.memory = [&run](int ranks) { return planned_memory_bytes(run.o) / ranks - (double)resident_memory_bytes(); };
        problem.set_hardware = [here](TrainOptions& o, int ranks) {
            const auto share = [&](OptionalDouble& figure, double whole) { figure = figure.value_or(whole) / ranks; };
            share(o.device_tflops, here.tflops);
            share(o.device_memory_gbs, here.memory_gbs);
            share(o.intra_node_gbs, here.memory_gbs / 2);  // a message is written and read
            share(o.inter_node_gbs, here.memory_gbs / 2);
            o.node_size = std::max(o.node_size, ranks);
        };
    }
    problem.o = run.o;
    return problem;
}

// The given part of the layout must divide the ranks.
inline void check_divided(const LayoutProblem& problem, const TuneOptions& o) {
    make_mesh(problem.ranks.back(), 0, o.given.count("tensor-model-parallel-size") ? o.tensor_model_parallel_size : 1,
              o.given.count("pipeline-model-parallel-size") ? o.pipeline_model_parallel_size : 1, 1, 1);
}

// ---- files -----------------------------------------------------------------------------------------------------------------
constexpr size_t most_files = 5;  // of the fastest layouts, one each

// The options of a run in this layout: the user's, and the layout's.
inline TrainOptions options_in(const TrainOptions& o, const Layout& l) {
    TrainOptions p = o;
    l.apply(p);
    if (!o.world && l.ranks > 1 && o.threads) {  // ranks of this machine share its threads
        p.threads = std::max(1, o.threads / l.ranks);
        p.given.insert("threads");
    }
    for (const std::string& name : searched_options()) p.given.insert(name);
    if (!p.recompute_num_layers) p.given.erase("recompute-num-layers");
    if (p.recompute_other_layers == "none") p.given.erase("recompute-other-layers");
    if (!p.head_rows) p.given.erase("head-rows");
    if (p.fp8_format.empty())
        for (const char* name : {"fp8-format", "fp8-weight-transpose"}) p.given.erase(name);
    if (p.offload == "none") p.given.erase("offload");
    p.given.insert("global-batch-size");  // --size would choose another one for other ranks
    return p;
}

inline std::string options_in_words(const Layout& l) {
    std::string words = format("--tp %d --pp %d", l.tp, l.pp);
    if (l.vpp > 1) words += format(" --vpp %d", l.vpp);
    if (l.cp > 1) words += format(" --cp %d", l.cp);
    if (l.ep > 1) words += format(" --ep %d", l.ep);
    words += format(" --micro-batch-size %d --recompute %s", l.micro_batch, l.recompute.c_str());
    if (l.recompute_layers) words += format(" --recompute-num-layers %d", l.recompute_layers);
    if (l.recompute_others != "none") words += " --recompute-other-layers " + l.recompute_others;
    if (l.head_rows) words += format(" --head-rows %d", l.head_rows);
    if (!l.fp8.empty()) words += " --fp8-format " + l.fp8 + " --fp8-weight-transpose " + l.transposes;
    if (l.offloads()) words += " --offload " + l.offload;
    if (l.tp > 1 && !l.sequence_parallel) words += " --no-sequence-parallel";
    return words + (l.zero == 1 ? "" : format(" --zero %d", l.zero));
}

inline std::string layout_file(const std::string& out, size_t i) { return format("%s/tune-%zu.toml", out.c_str(), i + 1); }

// "gpt2-124m on 8 x h100"
inline std::string subject_of(const Run& run, const LayoutProblem& problem) {
    const std::string machine = run.plans_elsewhere() || !be::memory_is_host
                                    ? format("%d x %s", problem.ranks.back(), run.o.device.c_str())
                                    : format("this machine, %s", counted(run.ctx.threads, "thread").c_str());
    for (const std::string* name : {&run.o.preset, &run.o.size, &run.o.model})
        if (!name->empty()) return *name + " on " + machine;
    return "the model on " + machine;
}

// ---- output ----------------------------------------------------------------------------------------------------------------
inline std::string seconds_text(double s) {
    return s < 0.9995 ? format("%.3g ms", s * 1e3) : format(s < 99.95 ? "%.2f s" : "%.1f s", s);
}

template <class Row>
struct Column {
    const char* title;
    int width;  // negative: left-aligned
    std::function<std::string(const Row&)> text;
};
inline std::vector<Column<Candidate>> columns(bool several_ranks, bool measured, const FoundLayouts& found) {
    const auto any = [&](auto is) {
        return std::any_of(found.best.begin(), found.best.end(), is) || std::any_of(found.front.begin(), found.front.end(), is);
    };
    std::vector<Column<Candidate>> all;
    if (measured)
        all.push_back({"measured", 9, [](const Candidate& c) {
                           return std::isfinite(c.measured) ? seconds_text(c.measured) : std::string("-");
                       }});
    all.push_back({measured ? "planned" : "step", 8, [](const Candidate& c) { return seconds_text(c.seconds); }});
    all.push_back({"memory", 9, [](const Candidate& c) { return human_bytes(c.bytes); }});
    if (several_ranks) all.push_back({"ranks", 6, [](const Candidate& c) { return std::to_string(c.layout.ranks); }});
    all.push_back({"tp", 4, [](const Candidate& c) { return std::to_string(c.layout.tp); }});
    all.push_back({"pp", 4, [](const Candidate& c) { return std::to_string(c.layout.pp); }});
    all.push_back({"vpp", 4, [](const Candidate& c) { return std::to_string(c.layout.vpp); }});
    all.push_back({"dp", 5, [](const Candidate& c) { return std::to_string(c.layout.dp()); }});
    if (any([](const Candidate& c) { return c.layout.cp > 1; }))
        all.push_back({"cp", 4, [](const Candidate& c) { return std::to_string(c.layout.cp); }});
    if (any([](const Candidate& c) { return c.layout.ep > 1; }))
        all.push_back({"ep", 4, [](const Candidate& c) { return std::to_string(c.layout.ep); }});
    all.push_back({"micro", 6, [](const Candidate& c) { return std::to_string(c.layout.micro_batch); }});
    all.push_back({"sp", 4, [](const Candidate& c) {
                       return std::string(c.layout.tp == 1 ? "-" : c.layout.sequence_parallel ? "yes" : "no");
                   }});
    all.push_back({"zero", 5, [](const Candidate& c) { return std::to_string(c.layout.zero); }});
    if (any([](const Candidate& c) { return !c.layout.fp8.empty(); }))
        all.push_back({"fp8", 5, [](const Candidate& c) { return std::string(c.layout.fp8.empty() ? "no" : "yes"); }});
    if (any([](const Candidate& c) { return !c.layout.fp8.empty() && c.layout.transposes != "keep"; }))
        all.push_back({"transp", 7, [](const Candidate& c) {
                           return std::string(c.layout.fp8.empty() ? "-" : c.layout.transposes == "keep" ? "keep" : "fly");
                       }});
    if (any([](const Candidate& c) { return c.layout.offloads(); }))
        all.push_back({"state", 6, [](const Candidate& c) { return std::string(c.layout.offloads() ? "host" : "GPU"); }});
    if (any([](const Candidate& c) { return c.layout.head_rows > 0; }))
        all.push_back({"head", 6, [](const Candidate& c) {
                           return c.layout.head_rows ? std::to_string(c.layout.head_rows) : std::string("-");
                       }});
    all.push_back({"recompute", -16, [](const Candidate& c) { return "  " + c.layout.recompute_in_words(); }});
    return all;
}
template <class Row>
std::string text_table(const std::vector<Column<Row>>& columns, const std::vector<Row>& rows) {
    std::vector<int> widths;  // wider than a column's own if needed to separate numbers
    for (const Column<Row>& c : columns) {
        widths.push_back(std::abs(c.width));
        for (const Row& row : rows) widths.back() = std::max(widths.back(), display_width(c.text(row)) + (c.width > 0));
    }
    const auto cell = [&](const Column<Row>& c, const std::string& text) {
        const int width = widths[(size_t)(&c - columns.data())];
        return c.width < 0 ? pad_right(text, width) : pad_left(text, width);
    };
    std::string out;
    for (const Column<Row>& c : columns) out += cell(c, (c.width < 0 ? "  " : "") + std::string(c.title));
    for (const Row& row : rows) {
        out.erase(out.find_last_not_of(' ') + 1);
        out += "\n";
        for (const Column<Row>& c : columns) out += cell(c, c.text(row));
    }
    out.erase(out.find_last_not_of(' ') + 1);
    return out + "\n";
}

template <class Row>
std::string html_table(const std::vector<Column<Row>>& columns, const std::vector<Row>& rows) {
    std::string text = "<tr>";
    for (const Column<Row>& c : columns) text += format("<th>%s</th>", c.title);
    for (const Row& row : rows) {
        text += "</tr>\n<tr>";
        for (const Column<Row>& c : columns) text += "<td>" + xml_escape(c.text(row)) + "</td>";
    }
    return table("runs", text + "</tr>\n");
}

inline std::string search_in_words(const FoundLayouts& found) {
    return format("%s layouts in %.2f s (%s a second); %s fit, %s of them were simulated", with_commas(found.tried).c_str(),
                  found.seconds, with_commas((int64_t)((double)found.tried / std::max(found.seconds, 1e-6))).c_str(),
                  with_commas((int64_t)found.fit.size()).c_str(), with_commas(found.simulated).c_str());
}

inline std::string fixed_in_words(const TrainOptions& o) {
    Strings fixed;
    for (const std::string& name : searched_options())
        if (o.given.count(name)) fixed.push_back("--" + name);
    return fixed.empty() ? "nothing: the whole layout is searched" : joined(fixed);
}

inline nlohmann::ordered_json layout_json(const Candidate& c) {
    const Layout& l = c.layout;
    nlohmann::ordered_json j = {{"seconds", c.seconds},
                                {"bytes", c.bytes},
                                {"ranks", l.ranks},
                                {"tensor_parallel", l.tp},
                                {"pipeline_parallel", l.pp},
                                {"virtual_stages", l.vpp},
                                {"data_parallel", l.dp()},
                                {"context_parallel", l.cp},
                                {"expert_parallel", l.ep},
                                {"micro_batch", l.micro_batch},
                                {"sequence_parallel", l.tp > 1 && l.sequence_parallel},
                                {"zero", l.zero},
                                {"recompute", l.recompute},
                                {"recompute_layers", l.recompute_layers},
                                {"recompute_others", l.recompute_others},
                                {"head_rows", l.head_rows},
                                {"fp8_format", l.fp8},
                                {"fp8_weight_transpose", l.fp8.empty() ? "" : l.transposes},
                                {"offloads_optimizer", l.offloads()}};
    if (std::isfinite(c.measured)) j["measured_seconds"] = c.measured;
    return j;
}

inline std::string refused_in_words(const std::map<std::string, int64_t>& refused) {
    std::string reasons;
    for (const auto& [reason, n] : refused) reasons += format("\n  %s: %s", with_commas(n).c_str(), reason.c_str());
    return reasons;
}

// Options that store in bf16 tensors that the run stores in fp32; if the optimizer keeps them and can.
inline std::string narrower_types(const TrainOptions& o) {
    std::string words;
    if (o.main_grads_dtype == "fp32") words += " --main-grads-dtype bf16";
    if (o.exp_avg_dtype == "fp32") words += " --exp-avg-dtype bf16";
    if (o.exp_avg_sq_dtype == "fp32" && optimizer_row(o.optimizer).narrows_second_moment()) words += " --exp-avg-sq-dtype bf16";
    return words;
}

// Nothing fits: reports the reasons, and the layout that needs the least memory.
[[noreturn]] inline void refuse_all(const FoundLayouts& found, const TrainOptions& o, bool on_this_cpu) {
    const Layout& l = found.nearest.layout;
    std::string hint = "HINT: give fewer options of the layout, or another --world or --global-batch-size";
    if (found.nearest.bytes > 0) {
        const std::string types = narrower_types(o);
        hint = format("the closest layout needs %s on its fullest rank, which has %s: %s; HINT: %s%s",
                      human_bytes(found.nearest.bytes).c_str(), human_bytes(found.nearest.bytes - found.lacking).c_str(),
                      options_in_words(l).c_str(), on_this_cpu ? "a smaller model" : "more GPUs, a larger --device-memory-gib",
                      types.empty() ? "" : (", or" + types).c_str());
    }
    fail("no layout is possible; rejected were%s\n%s", refused_in_words(found.refused).c_str(), hint.c_str());
}

// ---- the page --------------------------------------------------------------------------------------------------------------
// The minimum time of a step over a rank's memory limit, by recomputation.
inline Chart tune_chart(const FoundLayouts& found) {
    Chart chart;
    chart.id = "tune";
    chart.title = "Seconds per step over GiB per rank";
    chart.x_title = "memory of a rank, GiB";
    chart.y_title = "time of a step, s";
    chart.width = 860;
    chart.height = 360;
    const std::pair<const char*, const char*> policies[] = {
        {"none", "train"}, {"selective", "valid"}, {"mlp", "baseline"}, {"full", "other"}};
    double low = INFINITY, high = 0;
    for (const auto& [policy, style] : policies) {
        std::vector<Candidate> of;
        for (const Candidate& c : found.fit)
            if (c.layout.recompute == policy && std::isfinite(c.seconds)) of.push_back(c);
        std::sort(of.begin(), of.end(), [](const Candidate& a, const Candidate& b) { return a.bytes < b.bytes; });
        Series series;
        series.name = policy;
        series.style = style;
        series.dots = series.steps = true;
        double least = INFINITY;
        for (const Candidate& c : of) {
            if (c.seconds >= least) continue;
            least = c.seconds;
            series.parts.push_back({c.bytes / 1073741824.0, c.seconds, c.seconds, c.seconds});
            low = std::min(low, c.seconds);
            high = std::max(high, c.seconds);
        }
        if (!series.parts.empty()) chart.series.push_back(std::move(series));
    }
    chart.lo = 0.95 * low;
    chart.hi = std::min(1.02 * high, 4 * low);  // slower ones are uninteresting
    chart.direct_labels = true;
    return chart;
}

// A page of a chart and some sections, each a title and its tables; a section without tables is omitted.
inline std::string search_page(const std::string& title, const std::string& what, const std::string& chart_title,
                               const Chart& chart, const std::vector<std::pair<std::string, std::string>>& sections) {
    std::string page = page_start + "<!-- " + written_by("tune") + " --><title>" + xml_escape(title) + "</title>\n<style>" +
                       report_colors + svg_style + report_style +
                       "figure svg { min-width: 600px; }</style></head>\n<body><main>\n<header><h1>" + xml_escape(title) +
                       "</h1><p>" + xml_escape(what) + "</p></header>\n";
    const auto part = [](const std::string& name) { return "<h2 class=\"part\">" + xml_escape(name) + "</h2>\n"; };
    page += part(chart_title) + "<figure>" + whole_svg(chart) + "</figure>\n";
    for (const auto& [name, tables] : sections)
        if (!tables.empty()) page += part(name) + tables;
    return page + "</main></body></html>\n";
}
inline std::string refused_table(const std::map<std::string, int64_t>& refused) {
    std::string rows;
    for (const auto& [reason, n] : refused)
        rows += "<tr><th>" + xml_escape(reason) + "</th><td>" + with_commas(n) + "</td></tr>\n";
    return rows.empty() ? "" : table("runs", rows);
}
inline std::string tune_page(const std::string& title, const FoundLayouts& found,
                             const std::vector<Column<Candidate>>& columns) {
    return search_page(title, search_in_words(found), "Time of a step over the memory of a rank", tune_chart(found),
                       {{"The fastest", html_table(columns, found.best)},
                        {"No other layout is faster with as little memory", html_table(columns, found.front)},
                        {"Refused", refused_table(found.refused)}});
}

// ---- trials ----------------------------------------------------------------------------------------------------------------
// A run of some steps without schedule, validation and samples, which do not affect its speed.
inline TrainOptions options_of_trial(const TrainOptions& o, const Layout& l, int steps) {
    TrainOptions p = options_in(o, l);
    leave_out_of_trials(p);
    for (const char* name : {"train-samples", "rampup-batch-size", "lr-decay-iters", "lr-decay-samples", "lr-warmup-iters",
                             "lr-warmup-samples", "lr-warmup-fraction", "lr-wsd-decay-iters", "lr-wsd-decay-samples",
                             "skip-batches", "iterations-to-skip", "skip-train-iteration-range"})
        p.given.erase(name);
    p.train_iters = steps;
    p.lr_decay_style = "constant";
    p.eval_iters = 0;
    for (const char* name : {"train-iters", "lr-decay-style", "eval-iters", "quiet"}) p.given.insert(name);
    return p;
}

// The median ratio of measured to planned step times; corrects the plan's times of all layouts by it.
inline double correct_plan(FoundLayouts& found) {
    std::vector<double> ratios;
    for (const Candidate& c : found.best)
        if (std::isfinite(c.measured)) ratios.push_back(c.measured / c.seconds);
    const double ratio = median(ratios);
    for (std::vector<Candidate>* list : {&found.best, &found.front, &found.fit})
        for (Candidate& c : *list) {
            c.seconds *= ratio;
            c.least_seconds *= ratio;
        }
    return ratio;
}

// Measures the fastest by the plan; measured layouts then come first, from the fastest on. Returns its findings in words.
inline std::string measure(Run& run, const TuneOptions& o, FoundLayouts& found) {
    const double begin = monotonic_seconds();
    const size_t trials = std::min((size_t)o.trials, found.best.size());
    size_t failed = 0;
    for (size_t i = 0; i < trials; i++) {
        Candidate& c = found.best[i];
        run.begin(format("trial %zu of %zu", i + 1, trials));
        const Trial trial = [&] {
            const TrialFolder folder(o.out);
            const std::string config = folder.path + "/trial.toml";
            write_file_atomically(config, config_text(options_of_trial(run.o, c.layout, o.trial_steps)));
            return run_trial(config, c.layout.ranks, folder.path, 60 + 20 * o.trial_steps * c.seconds);
        }();
        c.measured = trial.seconds;
        if (!std::isfinite(trial.seconds)) {
            failed++;
            run.phase.done();
            print_line(stderr,
                       format("note: trial %zu of %s: %s", i + 1, options_in_words(c.layout).c_str(), trial.why.c_str()));
        }
    }
    run.phase.done();
    if (failed == trials) fail("all %zu trials failed; HINT: the first reason is above", failed);
    std::stable_sort(found.best.begin(), found.best.end(), [](const Candidate& a, const Candidate& b) {
        if (std::isfinite(a.measured) != std::isfinite(b.measured)) return std::isfinite(a.measured);
        return a.measured < b.measured;
    });
    std::string words =
        format("%s in %s", counted((int64_t)trials, "trial").c_str(), seconds_text(monotonic_seconds() - begin).c_str());
    if (failed) words += format(", of which %zu failed", failed);
    return words +
           format("; a step takes %.2f times the planned time, and the plan is corrected by this factor", correct_plan(found));
}

// ---- the command -----------------------------------------------------------------------------------------------------------
// The shell command that runs `command` on `ranks` GPUs or processes.
inline std::string launched(int ranks, const std::string& command) {
    return ranks == 1 ? command : format("scripts/launch.sh mpirun -n %d --bind-to none %s", ranks, command.c_str());
}
// The command that trains in the layout of a file, with `ranks` GPUs or processes.
inline std::string command_of(const std::string& file, int ranks) {
    return launched(ranks, "./train_gpt train --config " + shell_word(file));
}

inline void write_files(const TrainOptions& o, const FoundLayouts& found, const std::string& title,
                        const std::vector<Column<Candidate>>& columns) {
    make_directory(o.out);
    const size_t files = std::min(most_files, found.best.size());
    for (size_t i = 0; i < files; i++) {
        const Candidate& c = found.best[i];
        Table plan;
        const double samples = o.train_samples ? (double)o.train_samples : (double)o.train_iters * o.global_batch_size;
        if (c.plan) add_rows(plan, *c.plan, samples * o.seq_length);
        std::string text = format("%s for %s: layout %zu of %zu\n%s\n%s", written_by("tune").c_str(), title.c_str(), i + 1,
                                  files, format("memory of the fullest rank: %s", human_bytes(c.bytes).c_str()).c_str(),
                                  plan.str(Paint{false}, 110).c_str());
        if (std::isfinite(c.measured)) text += "measured here: " + seconds_text(c.measured) + " a step\n";
        std::string comment;
        for (size_t begin = 0, end; begin < text.size(); begin = end + 1) {
            end = std::min(text.find('\n', begin), text.size());
            comment += "# " + text.substr(begin, end - begin) + "\n";
        }
        comment += "# " + command_of(layout_file(o.out, i), c.layout.ranks) + "\n";
        const TrainOptions all = options_in(o, c.layout);
        std::string unused;  // revokes values of an earlier file, such as a recipe
        for (const std::string& name : searched_options())
            if (!all.given.count(name)) unused += name + " = []\n";
        if (!unused.empty()) unused = "# in this layout with their defaults\n" + unused;
        write_file_atomically(layout_file(o.out, i), comment + config_text(all) + unused);
    }
    for (size_t i = files; i < most_files; i++)
        if (std::filesystem::exists(layout_file(o.out, i)))
            print_line(stderr, format("note: %s is from an earlier search", layout_file(o.out, i).c_str()));
    write_file_atomically(o.out + "/tune.html", tune_page(title, found, columns));
}

}  // namespace detail

// Frees the layout options that a config file has, such as a recipe's, for the search. Options of the command line stay fixed,
// and so does FP8, which changes the numbers.
inline TuneOptions without_layout_of_files(TuneOptions o, bool main_rank) {
    std::string names;
    TuneOptions defaults;
    const std::vector<Option> before = options_in(defaults), options = options_in(o);
    for (size_t i = 0; i < options.size(); i++) {
        const std::string name = option_name(options[i].field);
        const Strings& searched = searched_options();
        if (!o.from_files.count(name) || name == "fp8-format" || !std::count(searched.begin(), searched.end(), name)) continue;
        copy_value(before[i], options[i]);
        o.given.erase(name);
        names += (names.empty() ? "--" : ", --") + name;
    }
    if (!names.empty() && main_rank)
        print_line(stderr, "note: the search also chooses these options of the config file: " + names +
                               "; to keep one, give it on the command line");
    return o;
}

inline void tune_layouts(Run& run, const TuneOptions& o, const MemoryOfStage& memory_of_stage) {
    detail::set_up_without_layout(run, o);
    detail::check_training(run, o);
    TrainOptions of_tasks = run.o;  // without a layout: the search checks whether each can run the tasks
    of_tasks.tensor_model_parallel_size = 1;
    run.tasks = read_training_tasks(of_tasks, run.tokenizer.get(), run.o.seq_length);
    for (size_t i = 0; i < detail::most_files; i++) check_replaceable(detail::layout_file(o.out, i), "tune");
    check_replaceable(o.out + "/tune.html", "tune");
    LayoutProblem problem = detail::problem_of(run, memory_of_stage);
    problem.best = std::max(detail::most_files, (size_t)o.trials);
    problem.search_fp8 = o.search_fp8;
    detail::check_divided(problem, o);
    FoundLayouts found = search_layouts(problem);
    if (found.fit.empty()) detail::refuse_all(found, run.o, be::memory_is_host && !run.plans_elsewhere());
    const std::string trials = o.trials ? detail::measure(run, o, found) : "";

    const bool here = problem.ranks.size() > 1;
    const std::vector<detail::Column<Candidate>> columns = detail::columns(here, o.trials > 0, found);
    const std::string title = detail::subject_of(run, problem);
    if (!o.dry_run) detail::write_files(run.o, found, title, columns);
    const std::string command =
        detail::command_of(o.dry_run ? "..." : detail::layout_file(o.out, 0), found.best[0].layout.ranks);
    if (o.json) {
        nlohmann::ordered_json j = {{"tried", found.tried}, {"search_seconds", found.seconds}, {"refused", found.refused}};
        for (const auto& [key, list] : {std::pair("best", &found.best), {"front", &found.front}}) {
            j[key] = nlohmann::ordered_json::array();
            for (const Candidate& c : *list) j[key].push_back(detail::layout_json(c));
        }
        j["command"] = command;
        return print_json(j);
    }
    Table table;
    table.section("Layouts of " + title);
    table.row("searched", detail::search_in_words(found));
    table.row("fixed", detail::fixed_in_words(problem.o));
    if (o.trials) table.row("measured", trials);
    for (const auto& [reason, n] : found.refused) table.row("refused", with_commas(n) + ": " + reason);
    table.print();
    printf("\n%s\n%s", o.trials ? "The fastest by the plan, measured here" : "The fastest",
           detail::text_table(columns, found.best).c_str());
    std::vector<Candidate> front = found.front;
    const size_t most = 12;  // rows; the page has all
    if (front.size() > most) front.erase(front.begin() + (int)most, front.end());
    printf("\nNo other layout is faster with as little memory%s\n%s",
           found.front.size() > most ? format(" (%zu of %zu; tune.html has all)", most, found.front.size()).c_str() : "",
           detail::text_table(columns, front).c_str());
    if (o.dry_run)
        return (void)printf("\nNo files are written (--dry-run). The fastest: %s\n",
                            detail::options_in_words(found.best[0].layout).c_str());
    printf("\n%s has a chart. The best runs by\n  %s\n", (o.out + "/tune.html").c_str(), command.c_str());
}
