// train_gpt tune --inference: over how many ranks a model is divided to generate text, and the batch size. Searches tensor and
// pipeline parallelism, copies of the model if it needs fewer ranks than there are, and batches of 1, 2, 4, ... sequences; --tp
// and --pp are fixed if given. Times come from the plan (inference_plan.h), memory from the functions that allocate it. The
// output is the Pareto front of the time of a token and the tokens per second, and the maximum tokens per second within
// --max-latency. With --trials, the layouts of the best are measured here by `generate --measure-batches`.
#pragma once
#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "../base/table.h"
#include "../base/terminal.h"
#include "../base/text.h"
#include "../plan/inference_plan.h"
#include "tune.h"

// Bytes of the memory of a rank of a pipeline stage that generates `texts` sequences of up to T tokens, by options and ranks.
using BytesOfWriter = std::function<double(const TrainOptions&, const ModelConfig&, int ranks, int stage, int texts, int T)>;

namespace detail {

struct InferenceCandidate {
    int tp = 1, pp = 1, batch = 1, copies = 1;
    double bytes = 0;  // on the fullest rank
    InferencePlan plan;
    double measured_seconds = NAN;  // per token, the median; NaN: not measured
    double measured_p99 = NAN;
    int ranks() const { return tp * pp; }
    double bounded_seconds() const { return std::isfinite(measured_p99) ? measured_p99 : plan.token_seconds; }
    double token_seconds() const { return std::isfinite(measured_seconds) ? measured_seconds : plan.token_seconds; }
    double tokens_per_second() const { return copies * batch / token_seconds(); }
};

struct FoundInference {
    std::vector<InferenceCandidate> fit;
    std::map<std::string, int64_t> refused;  // by reason
    double least_bytes = INFINITY;           // minimum memory of a layout for one sequence
};

// The number of the --seq-length tokens that are generated, after a prompt of the others; and the number in a trial, at least
// one after the first two of a sequence.
inline int new_tokens(const Run& run, const TuneOptions& o) {
    return o.max_new_tokens ? o.max_new_tokens : std::max(1, run.o.seq_length / 2);
}
inline int new_tokens_of_trial(const Run& run, const TuneOptions& o) { return std::clamp(new_tokens(run, o), 3, 32); }

inline void check_inference(const Run& run, const TuneOptions& o) {
    for (const char* name : {"micro-batch-size", "global-batch-size", "num-virtual-stages-per-pipeline-rank", "zero",
                             "no-sequence-parallel", "recompute-granularity", "recompute-num-layers", "recompute-other-layers",
                             "trial-steps", "fp8-format", "fp8-weight-transpose", "search-fp8", "head-rows"})
        refuse_together(o.given.count(name), std::string("--") + name, "--inference", "it is for training only");
    refuse_together(o.expert_model_parallel_size > 1, "--expert-model-parallel-size", "--inference",
                    "it searches tensor and pipeline parallelism");
    refuse_without(o.trials && o.model.empty(), "--trials", "a model to generate with", "--model DIR");
    refuse_without(o.trials && !run.tokenizer, "--trials", "a tokenizer", "--model DIR of a model with one");
    if (const int n = std::max(new_tokens(run, o), o.trials ? new_tokens_of_trial(run, o) : 0); n >= run.o.seq_length)
        fail_usage(
            "--max-new-tokens %d leaves no room for a prompt in --seq-length %d; HINT: fewer tokens, or a longer sequence", n,
            run.o.seq_length);
}

// All batches of a model in one layout, until one does not fit.
inline void try_batches(const Run& run, const TuneOptions& o, LayoutProblem& problem, const BytesOfWriter& bytes_of,
                        InferenceCandidate one, FoundInference& found) {
    TrainOptions p = run.o;
    p.tensor_model_parallel_size = one.tp;
    p.pipeline_model_parallel_size = one.pp;
    p.no_sequence_parallel = true;
    p.micro_batch_size = p.global_batch_size = 1;
    problem.set_hardware(p, one.ranks());
    if (one.pp > run.c.L) return (void)found.refused["more pipeline stages than layers"]++;
    ModelConfig c;
    try {
        c = problem.model(one.tp);
        check_tensor_parallel(c, one.tp, false, 1);
    } catch (const Error&) {
        return (void)found.refused["tensor parallelism that does not divide heads or width"]++;
    }
    const PlanInput in = plan_input(p, c, one.ranks(), {}, 1, sizeof(floatX));
    for (; one.batch <= o.batch; one.batch *= 2) {
        one.bytes = 0;
        for (int stage = 0; stage < one.pp; stage++)
            one.bytes = std::max(one.bytes, bytes_of(p, c, one.ranks(), stage, one.batch, p.seq_length));
        if (one.batch == 1) found.least_bytes = std::min(found.least_bytes, one.bytes);
        if (one.bytes > problem.memory(one.ranks())) return (void)found.refused["too little memory"]++;
        one.plan = plan_inference(in, one.batch, p.seq_length - new_tokens(run, o));
        found.fit.push_back(one);
    }
}

inline FoundInference search_inference(const Run& run, const TuneOptions& o, LayoutProblem& problem,
                                       const BytesOfWriter& bytes_of) {
    FoundInference found;
    const bool elsewhere = problem.ranks.size() == 1;  // a copy may use a part of them; ranks here share one machine
    const std::vector<int> ranks = elsewhere ? divisors(problem.ranks[0]) : problem.ranks;
    const auto is_free = [&](const char* name, int value, int given) { return !o.given.count(name) || value == given; };
    for (const int n : ranks)
        for (const int tp : divisors(n)) {
            InferenceCandidate one;
            one.tp = tp;
            one.pp = n / tp;
            one.copies = elsewhere ? problem.ranks[0] / n : 1;
            if (is_free("tensor-model-parallel-size", tp, run.o.tensor_model_parallel_size) &&
                is_free("pipeline-model-parallel-size", one.pp, run.o.pipeline_model_parallel_size))
                try_batches(run, o, problem, bytes_of, one, found);
        }
    return found;
}

// The Pareto front, from the shortest time of a token on.
inline std::vector<InferenceCandidate> front_of(std::vector<InferenceCandidate> all) {
    std::stable_sort(all.begin(), all.end(),
                     [](const auto& a, const auto& b) { return a.token_seconds() < b.token_seconds(); });
    std::vector<InferenceCandidate> front;
    for (const InferenceCandidate& c : all)
        if (front.empty() || c.tokens_per_second() > front.back().tokens_per_second()) front.push_back(c);
    return front;
}
// The candidate of a front with the most tokens per second within the bound; null: none meets it.
inline const InferenceCandidate* best_of(const std::vector<InferenceCandidate>& front, double max_latency) {
    const InferenceCandidate* best = nullptr;
    for (const InferenceCandidate& c : front)
        if (!max_latency || 1e3 * c.bounded_seconds() <= max_latency) best = &c;
    return best;
}

// ---- trials ----------------------------------------------------------------------------------------------------------------
// A text of as many words as fit into n tokens.
inline std::string prompt_of(const Tokenizer& tokenizer, int n) {
    const auto text_of = [](int words) {
        std::string text = words ? "the" : "";
        for (int i = 1; i < words; i++) text += " the";
        return text;
    };
    int words = 0, more = 1;
    while (more < n) more *= 2;
    for (; more; more /= 2)
        if (words + more <= n && (int)tokenizer.encode_prompt(text_of(words + more)).size() <= n) words += more;
    return text_of(words);
}

// Measures the batches of up to o.trials layouts, the front's first; layouts that fail are left out with a note.
inline void measure_inference(Run& run, const TuneOptions& o, FoundInference& found) {
    std::vector<InferenceCandidate> layouts;
    for (const auto& all : {front_of(found.fit), found.fit})
        for (const InferenceCandidate& c : all) {
            const auto same = [&](const InferenceCandidate& l) { return l.tp == c.tp && l.pp == c.pp; };
            if (std::none_of(layouts.begin(), layouts.end(), same) && (int)layouts.size() < o.trials) layouts.push_back(c);
        }
    const int tokens = new_tokens_of_trial(run, o);
    const std::string prompt = prompt_of(*run.tokenizer, run.o.seq_length - tokens);
    std::vector<InferenceCandidate> measured;
    for (size_t i = 0; i < layouts.size(); i++) {
        const InferenceCandidate& l = layouts[i];
        std::vector<InferenceCandidate> of_layout;
        double seconds = 60;
        for (const InferenceCandidate& c : found.fit) {
            if (c.tp != l.tp || c.pp != l.pp) continue;
            of_layout.push_back(c);
            seconds += 20 * (c.plan.prefill_seconds + tokens * c.plan.token_seconds) + c.ranks() * c.bytes / 2e8;  // it is read
        }
        run.begin(format("trial %zu of %zu", i + 1, layouts.size()));
        const std::vector<std::string> words = words_on_ranks(
            l.ranks(), {"generate", "--model", o.model, "--tp", std::to_string(l.tp), "--pp", std::to_string(l.pp), "--threads",
                        std::to_string(std::max(1, run.ctx.threads / l.ranks())), "--measure-batches", "--batch",
                        std::to_string(of_layout.back().batch), "--prompt", "-", "--max-new-tokens", std::to_string(tokens)});
        const std::string why = [&] {
            const TrialFolder folder(o.out);
            const std::string output = folder.path + "/output.txt", input = folder.path + "/prompt.txt";
            write_file_atomically(input, prompt);
            Apart process(words, input, output, seconds);
            if (const int status = SignalsHeld::wait_for(process)) return why_failed(status, output, seconds);
            for_each_line(output, [&](std::string_view line, int64_t) {
                int batch = 0;
                double first = 0, p50 = 0, p99 = 0;
                if (sscanf(std::string(line).c_str(), "%d %lf ms %lf %lf", &batch, &first, &p50, &p99) != 4 || !(p50 > 0))
                    return;
                for (InferenceCandidate& c : of_layout)
                    if (c.batch == batch) {
                        c.measured_seconds = p50 / 1e3;
                        c.measured_p99 = p99 / 1e3;
                    }
            });
            return std::string();
        }();
        for (const InferenceCandidate& c : of_layout)
            if (std::isfinite(c.measured_seconds)) measured.push_back(c);
        if (why.empty()) continue;
        run.phase.done();
        print_line(stderr, format("note: the trial of --tp %d --pp %d: %s", l.tp, l.pp, why.c_str()));
    }
    run.phase.done();
    if (measured.empty()) fail("all %zu trials failed; HINT: the first reason is above", layouts.size());
    found.fit = measured;
}

// ---- output ----------------------------------------------------------------------------------------------------------------
inline std::vector<Column<InferenceCandidate>> inference_columns(bool copies, bool measured) {
    using Row = InferenceCandidate;
    std::vector<Column<Row>> all = {{"batch", 5, [](const Row& c) { return std::to_string(c.batch); }},
                                    {"tp", 4, [](const Row& c) { return std::to_string(c.tp); }},
                                    {"pp", 4, [](const Row& c) { return std::to_string(c.pp); }}};
    if (copies) all.push_back({"copies", 7, [](const Row& c) { return std::to_string(c.copies); }});
    all.push_back({"first tokens", 14, [](const Row& c) { return seconds_text(c.plan.prefill_seconds); }});
    if (measured) all.push_back({"planned", 9, [](const Row& c) { return seconds_text(c.plan.token_seconds); }});
    all.push_back({measured ? "measured" : "a token", 10, [](const Row& c) { return seconds_text(c.token_seconds()); }});
    if (measured) all.push_back({"p99", 10, [](const Row& c) { return seconds_text(c.measured_p99); }});
    all.push_back({"tokens/s", 11, [](const Row& c) { return with_commas((int64_t)c.tokens_per_second()); }});
    all.push_back({"memory", 11, [](const Row& c) { return human_bytes(c.bytes); }});
    return all;
}

// Tokens per second over the milliseconds of a token: all that fit, and the front.
inline Chart inference_chart(const FoundInference& found, const std::vector<InferenceCandidate>& front) {
    Chart chart;
    chart.id = "inference";
    chart.title = "Tokens per second over milliseconds per token";
    chart.x_title = "time of a token, ms";
    chart.y_title = "tokens per second";
    chart.width = 860;
    chart.height = 360;
    chart.log_x = chart.logarithmic = chart.direct_labels = true;
    chart.lo = INFINITY;
    const auto series = [&](const char* name, const char* style, std::vector<InferenceCandidate> of) {
        Series s;
        s.name = name;
        s.style = style;
        s.dots = true;
        s.scatter = of.size() != front.size();
        std::stable_sort(of.begin(), of.end(),
                         [](const auto& a, const auto& b) { return a.token_seconds() < b.token_seconds(); });
        for (const InferenceCandidate& c : of) {
            const double y = c.tokens_per_second();
            s.parts.push_back({1e3 * c.token_seconds(), y, y, y});
            chart.lo = std::min(chart.lo, 0.9 * y);
            chart.hi = std::max(chart.hi, 1.1 * y);
        }
        chart.series.push_back(std::move(s));
    };
    series("others", "other", found.fit);
    series("best", "train", front);
    return chart;
}

inline nlohmann::ordered_json inference_json(const InferenceCandidate& c) {
    nlohmann::ordered_json j = {{"batch", c.batch},
                                {"tensor_parallel", c.tp},
                                {"pipeline_parallel", c.pp},
                                {"copies", c.copies},
                                {"first_tokens_seconds", c.plan.prefill_seconds},
                                {"token_seconds", c.plan.token_seconds},
                                {"tokens_per_second", c.tokens_per_second()},
                                {"bytes", c.bytes}};
    if (std::isfinite(c.measured_seconds)) {
        j["measured_token_seconds"] = c.measured_seconds;
        j["measured_p99"] = c.measured_p99;
    }
    return j;
}

inline std::string writing_command(const TuneOptions& o, const InferenceCandidate& c) {
    const std::string layout = c.ranks() > 1 ? format(" --tp %d --pp %d", c.tp, c.pp) : "";
    const std::string generate = format("./train_gpt generate --model %s%s --batch %d --prompts FILE",
                                        o.model.empty() ? "RUN" : shell_word(o.model).c_str(), layout.c_str(), c.batch);
    return launched(c.ranks(), generate);
}

}  // namespace detail

inline void tune_inference(Run& run, const TuneOptions& o, const BytesOfWriter& bytes_of) {
    detail::set_up_without_layout(run, o);
    detail::check_inference(run, o);
    const std::string page = o.out + "/inference.html";
    check_replaceable(page, "tune");
    LayoutProblem problem = detail::problem_of(run, {});
    detail::check_divided(problem, o);
    detail::FoundInference found = detail::search_inference(run, o, problem, bytes_of);
    if (found.fit.empty()) {
        const std::string reasons = detail::refused_in_words(found.refused);
        if (!std::isfinite(found.least_bytes))
            fail("no layout can generate; rejected were%s\nHINT: other ranks (--world), or fewer options of the layout",
                 reasons.c_str());
        fail(
            "no layout can generate; rejected were%s\nHINT: more or other ranks (--world), a shorter --seq-length, or a "
            "larger --device-memory-gib; one sequence needs at least %s per rank",
            reasons.c_str(), human_bytes(found.least_bytes).c_str());
    }
    if (o.trials) detail::measure_inference(run, o, found);
    const std::vector<detail::InferenceCandidate> front = detail::front_of(found.fit);
    const detail::InferenceCandidate* best = detail::best_of(front, o.max_latency);
    if (!best)
        fail("no batch size meets --max-latency %g: the shortest time per token is %s, with --tp %d --pp %d", o.max_latency,
             detail::seconds_text(front[0].bounded_seconds()).c_str(), front[0].tp, front[0].pp);

    const std::string title = "Writing with " + detail::subject_of(run, problem);
    const auto columns = detail::inference_columns(problem.ranks.size() == 1 && problem.ranks[0] > 1, o.trials > 0);
    const int prompt = run.o.seq_length - detail::new_tokens(run, o);
    const std::string what = format("prompts of %s, at the end of a context of %s", counted(prompt, "token").c_str(),
                                    with_commas(run.o.seq_length).c_str());
    if (!o.dry_run) {
        make_directory(o.out);
        write_file_atomically(
            page, detail::search_page(title, what, "Tokens per second over the milliseconds per token of a sequence",
                                      detail::inference_chart(found, front),
                                      {{"No other choice is better in both", detail::html_table(columns, front)},
                                       {"All that fit", detail::html_table(columns, found.fit)},
                                       {"Refused", detail::refused_table(found.refused)}}));
    }
    const std::string command = detail::writing_command(o, *best);
    if (o.json) {
        nlohmann::ordered_json j = {{"refused", found.refused}, {"best", detail::inference_json(*best)}};
        j["front"] = nlohmann::ordered_json::array();
        for (const detail::InferenceCandidate& c : front) j["front"].push_back(detail::inference_json(c));
        j["command"] = command;
        return print_json(j);
    }
    Table table;
    table.section(title);
    table.row("texts", what);
    table.row("searched",
              format("%s fit", counted((int64_t)found.fit.size(), "batch and layout", "batches and layouts").c_str()));
    for (const auto& [reason, n] : found.refused) table.row("refused", with_commas(n) + ": " + reason);
    table.print();
    printf("\nNo other choice is better in both latency and throughput%s\n%s", o.trials ? ", measured here" : "",
           detail::text_table(columns, front).c_str());
    const std::string bound = o.max_latency > 0 ? format(" within %g ms per token", o.max_latency) : "";
    const std::string copies = best->copies > 1 ? " " + with_commas(best->copies) + " copies of" : "";
    printf("\nHighest throughput%s, %s tokens/s, by%s\n  %s\n", bound.c_str(),
           with_commas((int64_t)best->tokens_per_second()).c_str(), copies.c_str(), command.c_str());
    if (!o.dry_run) printf("%s has a chart.\n", page.c_str());
}
