// Pipeline schedules: the order in which each rank runs the passes of its micro-batches; the activations that it must hold, its
// layers, the duration of a step, and a picture of it. Pure functions of a few integers: nothing here communicates, and any
// rank can compute any other's schedule.
//
// The model is split into pp * vpp virtual stages of consecutive layers; stage s is chunk s / pp of rank s % pp. With vpp = 1
// every rank has one chunk, its stage. A step consists of m micro-batches, each forward through the stages in order, then
// backward.
//   1F1B (vpp 1)   rank r runs min(m, pp - r - 1) forward passes to warm up, then alternates forward and backward, then drains:
//                  min(m, pp - r) micro-batches are in flight, where GPipe (all forward, then all backward) holds m.
//   interleaved    (vpp > 1) the same with chunks: micro-batches advance in groups of pp, so that forward pass j runs chunk
//                  (j mod pp vpp) / pp, and backward passes run the chunks from the last to the first; the warm-up is
//                  2 (pp - r - 1) + (vpp - 1) pp passes, or all where m = pp. Needs m % pp == 0.
// With equal stages a step takes t_ideal + (pp - 1) (t_f + t_b), where t_f and t_b are the times of one pass of one chunk and
// t_ideal = m vpp (t_f + t_b), so the bubble is idle / ideal = (pp - 1) / (vpp m). The price of vpp: (pp vpp - 1) / (pp - 1)
// times as many messages, and rank 0 holds 1 + (pp - 1) / (pp vpp) times the activations of 1F1B (arXiv:2205.05198).
//
// Messages. Forward, rank r sends to r + 1, and the last rank to rank 0 between chunks; backward in the other direction. A rank
// sends to a peer in the order in which the peer uses the messages: first in, first out, so that tags only serve to detect
// errors. Backward has its own communicator (ranks.h), also at pp 2 with vpp > 1, where both directions lead to the same peer.
// A send must not wait for its receive: a rank that sends an activation forward and its neighbor that sends a gradient
// backward would deadlock.
//
// GPipe: arXiv:1811.06965. 1F1B: PipeDream, arXiv:1806.03377, and its flush in arXiv:2006.09503. Interleaved: Megatron-LM,
// arXiv:2104.04473, figures 3 and 4 and section 2.2.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "../base/check.h"
#include "../base/text.h"

enum class Direction { forward, backward };

struct PipelineEvent {
    Direction direction;
    int micro_batch;
    int chunk;  // index among this rank's chunks, 0 .. vpp - 1
};
inline bool operator==(const PipelineEvent& a, const PipelineEvent& b) {
    return a.direction == b.direction && a.micro_batch == b.micro_batch && a.chunk == b.chunk;
}

inline int virtual_stage(int pp, int rank, int chunk) { return chunk * pp + rank; }

// The reason why these sizes have no schedule, with a hint; empty if they have one.
inline std::string pipeline_problem(int pp, int vpp, int micro_batches) {
    if (pp < 1) return format("the pipeline has %d ranks; it needs 1 or more", pp);
    if (vpp < 1) return format("the pipeline has %d virtual stages per rank; it needs 1 or more", vpp);
    if (micro_batches < 1)
        return format(
            "a step has %d micro-batches; it needs 1 or more; HINT: their number is global batch / (micro-batch x "
            "data-parallel ranks)",
            micro_batches);
    if (vpp == 1) return "";
    if (pp == 1)
        return format("a pipeline of 1 rank cannot interleave %d virtual stages; HINT: omit them, or use 2 or more ranks", vpp);
    if (micro_batches % pp == 0) return "";
    const int below = micro_batches / pp * pp, above = below + pp;
    const std::string nearest = below ? format("the nearest are %d and %d", below, above) : format("the fewest are %d", above);
    return format(
        "%d micro-batches in a step are not a multiple of the %d ranks of the pipeline, as %d virtual stages per rank require; "
        "HINT: %s (change the global batch), or use 1 virtual stage per rank, which works with any number",
        micro_batches, pp, vpp, nearest.c_str());
}

// Forward passes of a rank before its first backward pass, less the one that always goes before a backward pass.
inline int warmup_passes(int pp, int rank, int vpp, int micro_batches) {
    if (vpp > 1 && micro_batches == pp) return micro_batches * vpp;
    return std::min(vpp > 1 ? 2 * (pp - rank - 1) + (vpp - 1) * pp : pp - rank - 1, micro_batches * vpp);
}

// The order in which a rank runs its passes: forward and backward of every chunk and micro-batch, once.
inline std::vector<PipelineEvent> pipeline_schedule(int pp, int rank, int vpp, int micro_batches) {
    CHECK(pipeline_problem(pp, vpp, micro_batches).empty(), "%s", pipeline_problem(pp, vpp, micro_batches).c_str());
    CHECK(rank >= 0 && rank < pp, "rank %d of %d", rank, pp);
    const int passes = micro_batches * vpp;  // in each direction
    const int warmup = warmup_passes(pp, rank, vpp, micro_batches);

    const auto event = [&](Direction pass, int step) {
        const int group = step / (pp * vpp), within = step % (pp * vpp);
        const int chunk = within / pp, micro_batch = group * pp + within % pp;  // with vpp = 1: chunk 0, micro-batch `step`
        return PipelineEvent{pass, micro_batch, pass == Direction::forward ? chunk : vpp - 1 - chunk};
    };
    std::vector<PipelineEvent> events;
    events.reserve(2 * (size_t)passes);
    for (int i = 0; i < warmup; i++) events.push_back(event(Direction::forward, i));
    for (int i = 0; i < passes; i++) {
        if (warmup + i < passes) events.push_back(event(Direction::forward, warmup + i));
        events.push_back(event(Direction::backward, i));
    }
    return events;
}

// ---- memory ----------------------------------------------------------------------------------------------------------------
// The maximum number of passes of one chunk (or of all, chunk -1) with forward done and backward pending.
inline int most_in_flight(const std::vector<PipelineEvent>& events, int chunk) {
    int now = 0, most = 0;
    for (const PipelineEvent& e : events)
        if (chunk < 0 || e.chunk == chunk) most = std::max(most, now += e.direction == Direction::forward ? 1 : -1);
    return most;
}

// The number n of micro-batches whose activations a chunk holds at a time, for steps of each of these numbers of micro-batches;
// micro-batch i uses the memory of i % n. No two live ones collide: a chunk runs its micro-batches in order, forward and
// backward, so the live ones are consecutive, and there are never more than n. With several chunks, fewer micro-batches may
// need more memory: if there are as many as ranks, all run forward before any runs backward.
inline int micro_batches_in_flight(int pp, int rank, int vpp, const std::vector<int>& micro_batches, int chunk) {
    CHECK(chunk >= 0 && chunk < vpp, "chunk %d of %d", chunk, vpp);
    std::set<int> sizes;
    for (const int n : micro_batches) sizes.insert(std::min(n, 3 * pp));  // beyond that the pattern repeats
    int most = 0;
    for (const int n : sizes) most = std::max(most, most_in_flight(pipeline_schedule(pp, rank, vpp, n), chunk));
    return most;
}

// ---- layers ----------------------------------------------------------------------------------------------------------------
namespace detail {

// split_layers for layers with different costs: stage after stage, for each number of layers so far, the split with the
// smallest cost of its most expensive stage, then with the smallest sum of squares. With equal splits the last stage is the
// shortest.
inline std::vector<int> split_by_cost(const std::vector<double>& costs, int n_stages, bool count_embedding, bool count_head) {
    using Cost = std::pair<double, double>;
    const int L = (int)costs.size();
    const double average = std::accumulate(costs.begin(), costs.end(), 0.0) / L;
    std::vector<Cost> best((size_t)L + 1, {INFINITY, INFINITY});  // of the first stages, with this many layers
    std::vector<std::vector<int>> last_stage;                     // its number of layers in the best split
    best[0] = {0, 0};
    for (int s = 0; s < n_stages; s++) {
        const bool embedding = s == 0 && count_embedding, head = s == n_stages - 1 && count_head;
        std::vector<Cost> now((size_t)L + 1, {INFINITY, INFINITY});
        last_stage.emplace_back((size_t)L + 1, 0);
        for (int end = 0; end <= L; end++) {
            double cost = (embedding + head) * average;
            for (int n = 0; n <= end; n++) {
                if (n > 0) cost += costs[(size_t)(end - n)];
                const Cost before = best[(size_t)(end - n)], with = {std::max(before.first, cost), before.second + cost * cost};
                if (n == 0 && !embedding && !head) continue;
                if (with < now[(size_t)end]) {
                    now[(size_t)end] = with;
                    last_stage.back()[(size_t)end] = n;
                }
                if (cost > now[(size_t)end].first) break;
            }
        }
        best = now;
    }
    std::vector<int> layers((size_t)n_stages);
    for (int s = n_stages - 1, end = L; s >= 0; s--) end -= layers[(size_t)s] = last_stage[(size_t)s][(size_t)end];
    return layers;
}

}  // namespace detail

// The number of layers in each of n_stages = pp * vpp virtual stages, in the order of the model. A non-empty `given` is checked
// and used. Otherwise the split is balanced; the embedding and the head may each count as one layer of the first and the last
// stage, as in BLOOM and Megatron-LM (--account-for-embedding-in-pipeline-split, --account-for-loss-in-pipeline-split): right
// where V C of the head is near 12 C^2 of a layer.
//
// Remaining layers go one each to the stages before the last, from back to front, never to the last: the longest stage sets the
// pace, and the last one also has the head; the first stages hold the most micro-batches in flight, so a layer needs the least
// memory at the back. (Longer stages in front fill and drain the pipeline faster, but only by a few layers' time per step.)
// Consecutive stages are on different ranks, so with vpp > 1, too, ranks differ by at most one layer.
//
// If layers have different costs, the most expensive stage is as cheap as possible, where the embedding and the head have the
// cost of an average layer.
inline std::vector<int> split_layers(const std::vector<double>& costs, int n_stages, bool count_embedding, bool count_head,
                                     const std::vector<int>& given) {
    const int L = (int)costs.size();
    CHECK(L >= 1 && n_stages >= 1, "%d layers, %d stages", L, n_stages);
    if (given.empty()) {
        const int units = L + count_embedding + count_head;
        if (units < n_stages)
            fail(
                "%d layers%s are too few for %d pipeline stages, each of which needs one; HINT: use at most %d stages "
                "(--pipeline-model-parallel-size x --num-virtual-stages-per-pipeline-rank)",
                L, units == L ? "" : ", even with the embedding or the head counted,", n_stages, units);
        if (std::any_of(costs.begin(), costs.end(), [&](double cost) { return cost != costs[0]; }))
            return detail::split_by_cost(costs, n_stages, count_embedding, count_head);
        std::vector<int> layers(n_stages, units / n_stages);
        for (int i = 0; i < units % n_stages; i++) layers[n_stages - 2 - i]++;
        layers.front() -= count_embedding;
        layers.back() -= count_head;
        return layers;
    }

    std::string list;
    for (const int n : given) list += (list.empty() ? "" : ",") + std::to_string(n);
    refuse_together(count_embedding || count_head, "--pipeline-layers (" + list + ")",
                    format("--account-for-%s-in-pipeline-split", count_embedding ? "embedding" : "loss"),
                    "it changes the balanced split");
    if ((int)given.size() != n_stages)
        fail(
            "--pipeline-layers has %zu stages (%s); the pipeline has %d; HINT: one number for each of ranks x virtual stages "
            "per rank, in the order of the model",
            given.size(), list.c_str(), n_stages);
    for (int s = 0; s < n_stages; s++) {
        const bool end = s == 0 || s == n_stages - 1;  // computes the embedding or the head
        if (given[s] < (end ? 0 : 1))
            fail("--pipeline-layers (%s): stage %d has %d layers; the minimum is %d%s", list.c_str(), s, given[s], end ? 0 : 1,
                 end ? ""
                     : "; HINT: only the first and the last stage, which have the embedding and the head, may have no "
                       "layers");
    }
    const long long sum = std::accumulate(given.begin(), given.end(), 0LL);
    if (sum != L)
        fail("--pipeline-layers (%s) adds up to %lld; the model has %d layers; HINT: %s %lld", list.c_str(), sum, L,
             sum < L ? "add" : "take away", sum < L ? L - sum : sum - L);
    return given;
}
// The same for layers of equal cost.
inline std::vector<int> split_layers(int L, int n_stages, bool count_embedding, bool count_head,
                                     const std::vector<int>& given) {
    return split_layers(std::vector<double>((size_t)L, 1), n_stages, count_embedding, count_head, given);
}

// ---- time ------------------------------------------------------------------------------------------------------------------
// Idle time over working time, for equal stages and instant messages.
inline double bubble_fraction(int pp, int vpp, int micro_batches) { return (double)(pp - 1) / ((double)vpp * micro_batches); }

struct Timeline {
    std::vector<std::vector<double>> start, duration;  // [rank][event], in the order of the rank's schedule
    double total = 0;
    double bubble = 0;  // idle time of all ranks over their working time
};

// Simulates schedules, one per rank: a pass starts when its rank is free and its input has arrived, `p2p` after the end of the
// producing pass: forward of the previous stage, backward of the next one; the last stage's backward needs its own forward.
// `forward` and `backward` are the durations by virtual stage. Schedules that deadlock fail a check.
inline Timeline simulate_schedules(const std::vector<std::vector<PipelineEvent>>& schedules, const std::vector<double>& forward,
                                   const std::vector<double>& backward, double p2p) {
    const int pp = (int)schedules.size(), n_stages = (int)forward.size();
    CHECK(pp >= 1 && n_stages % pp == 0 && n_stages > 0 && backward.size() == forward.size(),
          "%d ranks, %d forward and %zu backward durations", pp, n_stages, backward.size());
    int micro_batches = 0;
    for (const auto& events : schedules)
        for (const PipelineEvent& e : events) micro_batches = std::max(micro_batches, e.micro_batch + 1);
    const double never = -1;
    std::vector<std::vector<double>> forward_end(n_stages, std::vector<double>(micro_batches, never)),
        backward_end = forward_end;

    Timeline t;
    t.start.resize(pp);
    t.duration.resize(pp);
    for (int rank = 0; rank < pp; rank++)
        for (auto* times : {&t.start[rank], &t.duration[rank]}) times->reserve(schedules[rank].size());
    std::vector<double> free_at(pp, 0);
    double work = 0;
    for (bool progress = true; progress;) {
        progress = false;
        for (int rank = 0; rank < pp; rank++) {
            while (t.start[rank].size() < schedules[rank].size()) {
                const PipelineEvent& e = schedules[rank][t.start[rank].size()];
                const int stage = virtual_stage(pp, rank, e.chunk), i = e.micro_batch, last = n_stages - 1;
                const bool is_forward = e.direction == Direction::forward, local = is_forward ? stage == 0 : stage == last;
                double input = 0;  // the first stage reads tokens, available from the start
                if (!is_forward) input = stage == last ? forward_end[stage][i] : backward_end[stage + 1][i];
                else if (stage > 0) input = forward_end[stage - 1][i];
                if (input == never) break;
                const double start = std::max(free_at[rank], input + (local ? 0 : p2p));
                const double duration = is_forward ? forward[stage] : backward[stage];
                t.start[rank].push_back(start);
                t.duration[rank].push_back(duration);
                (is_forward ? forward_end : backward_end)[stage][i] = free_at[rank] = start + duration;
                t.total = std::max(t.total, start + duration);
                work += duration;
                progress = true;
            }
        }
    }
    for (int rank = 0; rank < pp; rank++)
        CHECK(t.start[rank].size() == schedules[rank].size(), "deadlock: rank %d of %d never ends its pass %zu of %zu", rank,
              pp, t.start[rank].size(), schedules[rank].size());
    t.bubble = work > 0 ? (pp * t.total - work) / work : 0;
    return t;
}

inline Timeline simulate_pipeline(int pp, int vpp, int micro_batches, const std::vector<double>& forward,
                                  const std::vector<double>& backward, double p2p) {
    CHECK((int)forward.size() == pp * vpp, "%zu durations for %d x %d stages", forward.size(), pp, vpp);
    std::vector<std::vector<PipelineEvent>> schedules;
    for (int rank = 0; rank < pp; rank++) schedules.push_back(pipeline_schedule(pp, rank, vpp, micro_batches));
    return simulate_schedules(schedules, forward, backward, p2p);
}

// With many micro-batches a pipeline soon reaches a steady state: all ranks repeat their schedule every few passes, some
// seconds later. More micro-batches then only add repetitions.
struct Repetition {
    int passes = 0;  // in each direction; 0: not found
    double seconds = 0;
};
// The repetition at the end of this step's steady state. Part of the step is enough to detect it: a pass depends on the
// previous one on its rank, and on one of another rank that is less than pp passes of the same direction away in that rank's
// order. So if 3 pp vpp passes of all ranks repeat themselves, so do later ones, until the drain, which starts at most 2 pp vpp
// passes before the end.
inline Repetition find_repetition(int pp, int vpp, int micro_batches, const Timeline& t) {
    CHECK(micro_batches >= 16 * pp, "%d micro-batches on %d ranks are too few", micro_batches, pp);
    const int group = pp * vpp, unit = vpp > 1 ? group : 1;  // passes after which the order of chunks repeats
    const int end = micro_batches * vpp - 2 * group;
    const auto start = [&](int rank, int pass, bool of_backward) {  // or start of the backward pass that follows
        const int warmup = warmup_passes(pp, rank, vpp, micro_batches);
        const int at = warmup + 2 * (pass - warmup) + of_backward;
        return t.start[(size_t)rank][(size_t)at];
    };
    for (int passes = unit; passes <= micro_batches * vpp / 4; passes += unit) {
        const int to = end - passes, from = to - 3 * group;
        const double seconds = start(0, to, false) - start(0, to - passes, false);
        const auto repeats = [&](int rank, int pass, bool of_backward) {
            const double later = start(rank, pass + passes, of_backward) - start(rank, pass, of_backward);
            return std::abs(later - seconds) <= 1e-13 * t.total;  // sums are rounded
        };
        bool all = true;
        for (int rank = 0; rank < pp; rank++)
            for (int pass = from; all && pass < to; pass++) all = repeats(rank, pass, false) && repeats(rank, pass, true);
        if (all) return {passes, seconds};
    }
    return {};
}

// The duration of a step, as from simulate_pipeline: simulates some of many micro-batches, more while no repetition is found,
// and adds the repetitions of the others.
struct StepTime {
    double total = 0, bubble = 0;
};
inline StepTime step_time(int pp, int vpp, int micro_batches, const std::vector<double>& forward,
                          const std::vector<double>& backward, double p2p) {
    for (int few = 16 * pp; few < micro_batches / 2; few *= 2) {
        const Timeline some = simulate_pipeline(pp, vpp, few, forward, backward, p2p);
        const Repetition r = find_repetition(pp, vpp, few, some);
        if (!r.passes) continue;
        const int of_each = r.passes / vpp, n = (micro_batches - few) / of_each;  // repetitions that are not simulated
        const int others = micro_batches - n * of_each;
        const double of_others = others == few ? some.total : simulate_pipeline(pp, vpp, others, forward, backward, p2p).total;
        const double total = of_others + n * r.seconds;
        const double work = micro_batches * (std::accumulate(forward.begin(), forward.end(), 0.0) +
                                             std::accumulate(backward.begin(), backward.end(), 0.0));
        return {total, work > 0 ? (pp * total - work) / work : 0};
    }
    const Timeline t = simulate_pipeline(pp, vpp, micro_batches, forward, backward, p2p);
    return {t.total, t.bubble};
}

// ---- picture ---------------------------------------------------------------------------------------------------------------
// Draws the schedule as text of at most `width` columns (40 or more), one row per rank, time to the right, for equal stages; if
// too long, its start and end. Widths are chosen for legibility: a backward pass is drawn longer, but not twice as long; the
// idle share of the picture is still the bubble, which does not depend on their ratio. `simulated` is the bubble of the actual
// stages, shown next to the formula's.
inline std::string draw_pipeline(int pp, int vpp, int micro_batches, double simulated, int width) {
    width = std::max(width, 40);
    // Style of a pass: its columns, the marks of a backward pass, whole numbers or their last digits. The first style that
    // fits is used, else the last. Letters end a name, so with chunks names may touch: "0a1a" but "0 1".
    struct Style {
        int forward, backward;
        const char *open, *close;
        bool last_digit;
    };
    const int letter = vpp > 1, longest = (int)std::to_string(micro_batches - 1).size() + letter, digit = 1 + letter;
    std::vector<Style> styles = {{longest + 1, longest + 2, "[", "]", false}};
    if (vpp > 1) {
        styles.push_back({longest, longest + 2, "[", "]", false});
        styles.push_back({longest, longest + 1, "<", "", false});
    }
    if (longest > digit) {
        styles.push_back({digit + 1, digit + 2, "[", "]", true});
        styles.push_back({digit, digit + 2, "[", "]", true});
    }
    const int label = (int)std::to_string(pp - 1).size() + 2, room = width - label;
    const auto columns = [&](const Style& s) { return (micro_batches * vpp + pp - 1) * (s.forward + s.backward); };
    const auto found = std::find_if(styles.begin(), styles.end(), [&](const Style& s) { return columns(s) <= room; });
    const Style style = found == styles.end() ? styles.back() : *found;

    const auto chunk_letter = [](int chunk) {  // a mark for chunks beyond the alphabet
        const std::string letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
        return std::string(1, chunk < (int)letters.size() ? letters[chunk] : '+');
    };
    const auto text = [&](Direction pass, int micro_batch, int chunk) {
        const std::string number = std::to_string(style.last_digit ? micro_batch % 10 : micro_batch);
        const std::string name = number + (vpp > 1 ? chunk_letter(chunk) : "");
        return pass == Direction::forward ? name : style.open + name + style.close;
    };

    // [0, head) and [tail, total) are shown: everything, or three fifths of the width for the start and the rest for the end.
    const std::string gap = " ... ";
    const int total = columns(style), shown = room - (int)gap.size();
    const int head = total <= room ? total : shown * 3 / 5, tail = total <= room ? total : total - (shown - head);
    const Timeline t = simulate_pipeline(pp, vpp, micro_batches, std::vector<double>(pp * vpp, style.forward),
                                         std::vector<double>(pp * vpp, style.backward), 0);

    std::string out;
    const auto paragraph = [&](const std::string& words) {
        for (const std::string& s : wrap_text(words, width)) out += s + "\n";
    };
    paragraph(format("Pipeline: %d rank%s, ", pp, pp == 1 ? "" : "s") +
              (vpp == 1 ? "" : format("%d chunks of layers each (a-%s), ", vpp, chunk_letter(vpp - 1).c_str())) +
              format("%d micro-batch%s per step", micro_batches, micro_batches == 1 ? "" : "es"));
    const int rows = 16;  // with more ranks, the first and the last 8 are drawn
    for (int rank = 0; rank < pp; rank++) {
        if (pp > rows && rank == rows / 2) {
            out += "...\n";
            rank = pp - rows / 2;
        }
        std::string row(total, '.');
        const std::vector<PipelineEvent> events = pipeline_schedule(pp, rank, vpp, micro_batches);
        for (size_t i = 0; i < events.size(); i++) {
            const PipelineEvent& e = events[i];
            const int start = (int)t.start[rank][i], length = (int)t.duration[rank][i];
            const auto cut = [&](int at) { return start < at && at < start + length; };  // a cut number would be misread
            const bool whole = !cut(head) && !cut(tail);
            row.replace(start, length, pad_right(whole ? text(e.direction, e.micro_batch, e.chunk) : "", length));
        }
        if (head < total) row = row.substr(0, head) + gap + row.substr(tail);
        out += pad_right("r" + std::to_string(rank), label) + row + "\n";
    }
    paragraph(text(Direction::forward, 0, 0) + " forward, " + text(Direction::backward, 0, 0) + " backward of micro-batch 0" +
              (style.last_digit ? " (last digit)" : "") + (vpp > 1 ? " in chunk a" : "") + "; . idle; not to scale");
    paragraph(format("Bubble (idle / work): %.1f%% = (ranks - 1) / %s; simulated %.1f%%",
                     100 * bubble_fraction(pp, vpp, micro_batches), vpp == 1 ? "micro-batches" : "(chunks x micro-batches)",
                     100 * simulated));
    return out;
}
