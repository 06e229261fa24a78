// Log-likelihoods of continuations by a GPT, and the callbacks for measuring it on tasks.
#pragma once
#include <algorithm>
#include <functional>
#include <optional>
#include <vector>

#include "../base/check.h"
#include "../base/progress.h"
#include "../data/tasks.h"
#include "../gpt/generator.h"
#include "../gpt/gpt.h"
#include "../model/arena.h"
#include "../ops.h"
#include "../parallel/comm.h"
#include "../tokenizer/tokenizer.h"
#include "evaluation.h"
#include "written_answers.h"

// Moves n scored rows to the front of the head's input, `to`. They must ascend: then a row's destination never lies after its
// source, and none is overwritten before it is read. With sequence parallelism each rank copies the rows that it has, and a sum
// over the ranks, which leave the others zero, gives all of them to each; `to` must then be other memory.
inline void move_scored_rows(const Pass& p, floatX* to, const ScoredRow* rows, size_t n) {
    const size_t C = p.m.c.C, row_bytes = C * sizeof(floatX);
    const auto copy = [&](floatX* out, const floatX* inp, size_t count) {
        if (out != inp) be::copy_rows(p.ctx, out, row_bytes, inp, row_bytes, row_bytes, count);
    };
    if (!p.m.ranks->sequence_parallel) {
        for (size_t i = 0; i < n; i++) copy(to + i * C, p.in.out() + rows[i].row * C, 1);
        return;
    }
    const size_t held = (size_t)p.local_rows(), rank = (size_t)p.m.ranks->mesh.tp.rank, tp = (size_t)p.m.local.tp_size;
    CHECK(p.cut_rows(), "%d rows are not divided over %zu ranks", p.N(), tp);
    be::clear(p.ctx, p.m.a.all_rows, n * row_bytes);
    for (size_t i = 0; i < n; i++)
        if (rows[i].row / held == rank) copy(p.m.a.all_rows + i * C, p.in.out() + rows[i].row % held * C, 1);
    be::all_reduce(p.ctx, p.m.ranks->tp, p.m.a.all_rows, n * C);
    const bool cut = n % tp == 0;  // as the head's pass will be
    copy(to, p.m.a.all_rows + (cut ? rank * (n / tp) * C : 0), cut ? n / tp : n);
}

// Only the scored rows go through the head, at most head_rows at a time.
inline void score_rows(const Pass& p, const std::vector<ScoredRow>& rows, std::vector<Score>& scores) {
    be::Ctx& ctx = p.ctx;
    Model& m = p.m;
    const bool cut = m.ranks->sequence_parallel;
    const size_t most = cut ? std::min(m.a.head_rows, p.local_rows()) : m.a.head_rows;
    MicroBatch scored = p.in;
    if (cut) scored.x.back() = m.a.branch_out;
    Batch batch;
    batch.begins = false;
    batch.B = 1;
    std::vector<int>& targets = batch.targets;
    for (size_t first = 0; first < rows.size(); first += targets.size()) {
        const size_t n = std::min(most, rows.size() - first);
        move_scored_rows(p, scored.out(), &rows[first], n);
        targets.clear();
        for (size_t i = 0; i < n; i++) targets.push_back(rows[first + i].target);
        batch.T = (int)n;
        head(upload(ctx, m, batch, scored), 0, 0, false);
        HostSide<real> loss(ctx, m.a.loss, n);
        loss.download();
        const std::vector<int> best = most_likely_tokens(ctx, *m.ranks, m.local, m.a.logits, m.a.statistics, n);
        for (size_t i = 0; i < n; i++) {
            Score& s = scores[rows[first + i].request];
            s.log_likelihood -= loss.data()[i];
            s.tokens++;
            s.greedy = s.greedy && best[i] == targets[i];
        }
    }
}

// The log-likelihoods of the requests' continuations; updates a progress line, if there is one.
inline std::optional<std::vector<Score>> score_requests(be::Ctx& ctx, Model& m, const std::vector<Request>& requests,
                                                        Progress* progress, const std::function<bool()>& stop) {
    PipelineLinks links = pipeline_links(ctx, m);
    const Axis& cp = m.ranks->mesh.cp;
    int i = 0;
    const auto run = [&](const ScoringPass& whole, std::vector<Score>& scores) {
        const bool cut = cp.size > 1;
        const ScoringPass scored = cut ? whole.cut(cp) : whole;
        forward_only(ctx, m, links, scored.batch, cut, i++, [&](const Pass& pass) { score_rows(pass, scored.rows, scores); });
    };
    return score_requests(*m.ranks, m.a.B, m.whole_T(), m.c.virtual_tokens.count, requests, progress, run, stop);
}

// Callbacks for measuring a model on tasks: one scores given continuations, the other generates answers, each up to a token of
// `ends`. Only the other uses tokenizer and generator. ctx, m, generator and tokenizer must outlive the result. stop: as for
// TrainerBase.
inline TaskFunctions task_functions(be::Ctx& ctx, Model& m, std::optional<Generator>& generator, const Tokenizer* tokenizer,
                                    const std::vector<int>& ends, const std::function<bool()>& stop) {
    TaskFunctions functions;
    functions.score = [&ctx, &m, stop](const std::vector<Request>& requests, Progress* progress) {
        return score_requests(ctx, m, requests, progress, stop);
    };
    functions.answer = [&m, &generator, tokenizer, ends, stop](const Task& task, const TaskRequests& all, Progress* progress) {
        return generate_answers(*m.ranks, *generator, *tokenizer, ends, task, all, progress, stop);
    };
    return functions;
}
