// Resuming and rollback: finds the checkpoint, and checks that the ranks and the checkpoint agree. Every function here is
// called by all ranks and gives the same result on each.
#pragma once
#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "../base/check.h"
#include "../base/file.h"
#include "../base/json.h"
#include "../base/terminal.h"
#include "../base/text.h"
#include "../data/dataloader.h"
#include "../parallel/world.h"
#include "../options/options.h"
#include "../plan/from_options.h"
#include "../plan/guard.h"
#include "../checkpoint/hub.h"
#include "../checkpoint/run_directory.h"
#include "../checkpoint/node_snapshots.h"
#include "../checkpoint/training_state.h"

// The problem with a checkpoint, or empty; each rank reads a share of it.
inline std::string verify_together(World& world, const std::string& dir) {
    return judge_together(world, [&] { return verify_checkpoint(dir, world.rank(), world.size()); });
}

// Where a run could resume, best first; the same on every rank. Snapshots of this node only if all ranks are on it.
inline std::vector<Resumable> places_to_resume(World& world, const TrainOptions& o, const FoundParts& parts) {
    std::vector<Resumable> snapshots;
    const NodeRing ring(world.nodes());
    if (const std::string root = ring.size() == 1 ? snapshots_of(o.out) : ""; !root.empty())
        for (const int64_t step : find_checkpoints(root)) snapshots.push_back({step, Resumable::node});
    if (!o.dry_run)  // a plan writes nothing
        for (size_t i = 0; i < parts.saves().size(); i++) snapshots.push_back({parts.saves()[i].step, Resumable::nodes, i});
    std::string lines;
    for (const Resumable& r : order_to_resume(steps_to_try(o.out), snapshots))
        lines += format("%lld %d %zu\n", (long long)r.step, (int)r.where, r.save);
    std::istringstream in(world.all_gather(world.rank() == 0 ? lines : "")[0]);
    std::vector<Resumable> places;
    Resumable place;
    for (int where; in >> place.step >> where >> place.save; places.push_back(place)) place.where = (Resumable::Where)where;
    return places;
}

// The directory of such a place, if it is intact, and the problem otherwise. Snapshots of several nodes become a checkpoint of
// OUT.
inline std::pair<std::string, std::string> resumable_directory(World& world, const TrainOptions& o, const Resumable& place,
                                                               FoundParts& parts) {
    const std::string in_out = step_directory(o.out, place.step);
    const std::string dir = place.where == Resumable::node ? step_directory(snapshots_of(o.out), place.step) : in_out;
    if (place.where == Resumable::nodes) {
        const std::string problem =
            parts.assemble(parts.saves()[place.save], o.out, {o.keep, o.keep_every, Guard(guard_options(o)).way_back()});
        if (!problem.empty()) return {dir, problem};
        if (world.rank() == 0)
            print_line(stderr, "note: " + in_out + " was assembled from snapshots in the memory of the nodes");
    }
    return {dir, verify_together(world, dir)};
}

// The checkpoint to resume from; empty: a new run. Rank 0 searches, all ranks verify.
inline std::string find_resumed(World& world, const TrainOptions& o) {
    if (o.resume.empty()) return "";
    const bool main_rank = world.rank() == 0;
    FoundParts parts(world, o.out);
    const std::vector<Resumable> found = places_to_resume(world, o, parts);
    if (o.resume != "auto") {
        if (!file_exists(through_latest(o.resume)) && hub_snapshot(o.resume).empty())
            fail("--resume is '%s', which does not exist%s", o.resume.c_str(),
                 hint_on_missing_path(o.resume, "--resume auto resumes the newest checkpoint in --out").c_str());
        const std::string dir = world.all_gather(model_directory(o.resume))[0], problem = verify_together(world, dir);
        if (!problem.empty()) fail("cannot resume from %s: %s", dir.c_str(), problem.c_str());
        namespace fs = std::filesystem;
        if (!o.dry_run && !found.empty() && fs::canonical(dir).parent_path() != fs::canonical(o.out))
            fail(
                "%s holds the checkpoints of another run than %s, which this one would replace; HINT: give another --out, or "
                "--resume auto to resume the run in it",
                o.out.c_str(), dir.c_str());
        return dir;
    }
    for (const Resumable& place : found) {
        const auto [dir, problem] = resumable_directory(world, o, place, parts);
        if (problem.empty()) return dir;
        if (main_rank) print_line(stderr, "warning: " + problem + "; trying an older checkpoint");
    }
    if (!found.empty())
        fail(
            "none of the %zu checkpoints in %s is intact; HINT: start over with another --out, or --resume DIR from another "
            "run's",
            found.size(), o.out.c_str());
    return "";
}

// Rejects ranks that were started with different options, data or programs: each compares its texts with rank 0's.
inline void check_same_everywhere(World& world, TrainOptions o, int head_rows, const nlohmann::ordered_json& data) {
    if (world.size() == 1) return;
    o.head_rows = head_rows;
    const FileSum program = sum_file("/proc/self/exe");
    const nlohmann::ordered_json mine = {
        {"options", options_to_json(o)}, {"data", data}, {"program", format("%08x", program.crc)}};
    const std::vector<std::string> all = world.all_gather(json_text(mine));
    const auto first = nlohmann::ordered_json::parse(all[0]);
    for (int r = 1; r < world.size(); r++) {
        const auto other = nlohmann::ordered_json::parse(all[r]);
        for (const auto& [name, value] : first["options"].items())
            if (other["options"].value(name, nlohmann::ordered_json()) != value)
                fail("ranks were started with different options: --%s is %s on rank 0 and %s on rank %d", name.c_str(),
                     value.dump().c_str(), other["options"].value(name, nlohmann::ordered_json()).dump().c_str(), r);
        if (other["data"] != first["data"])
            fail("ranks see different data: %s on rank 0, %s on rank %d", first["data"].dump().c_str(),
                 other["data"].dump().c_str(), r);
        if (other["program"] != first["program"])
            fail("ranks run different programs: rank %d's is not rank 0's; HINT: one build for all", r);
    }
}

// The data properties that a resumed run must share: each dataset's weight, documents and tokens, for conversations the tokens
// in the loss; a checksum of its first and last tokens.
inline nlohmann::ordered_json data_identity(const DataLoader& data, const DataOptions& options) {
    nlohmann::ordered_json rows = nlohmann::ordered_json::array();
    size_t i = 0;
    for (const DataSummary& s : data.summary()) {
        rows.push_back({{"crc32c", format("%08x", data.checksum(i))}, {"documents", s.documents}});  // sorted, as they are read
        if (s.in_loss > 0) rows.back()["learned"] = s.in_loss;
        rows.back()["tokens"] = s.tokens;
        if (i < options.blend.weights.size()) rows.back()["weight"] = options.blend.weights[i];
        i++;
    }
    return rows;
}

// Rollback after a spike, as in PaLM: the intact checkpoint before the first outlier that the guard chooses, among those in OUT
// and the one that this process resumed from, which may be in another directory (its step and path; the path may be empty).
// `step`: the last outlier's.
inline std::string checkpoint_to_go_back_to(World& world, const std::string& out,
                                            const std::pair<int64_t, std::string>& resumed, const Guard& guard,
                                            const Verdict& v, int64_t step) {
    std::map<int64_t, std::string> found;
    if (world.rank() == 0)
        for (const int64_t s : find_checkpoints(out)) found[s] = step_directory(out, s);
    if (world.rank() == 0 && !resumed.second.empty()) found.insert(resumed);
    for (;;) {
        std::vector<int64_t> steps;
        for (const auto& [s, dir] : found) steps.push_back(s);
        const auto chosen = guard.plan_rollback(steps, v.first_outlier_step);
        const std::string dir = world.all_gather(chosen ? found[*chosen] : "")[0];
        if (dir.empty())
            fail(
                "the run ends at step %lld: %s, but there is no intact checkpoint before step %lld; HINT: a shorter "
                "--save-every",
                (long long)step, v.reason.c_str(), (long long)v.first_outlier_step);
        if (verify_together(world, dir).empty()) return dir;
        if (chosen) found.erase(*chosen);
    }
}

// The state of a run that rolls back from `now` to the checkpoint `dir`: the checkpoint's counters and scales, but the run's
// options, data and layout. In addition to the batches skipped so far, it skips the ones around the first outlier.
inline TrainingState state_after_rollback(const TrainingState& now, const std::string& dir,
                                          const BatchRanges::Range& outliers) {
    TrainingState state = read_state(dir);
    state.options = now.options;
    state.data = now.data;
    state.layout = now.layout;
    state.planned = now.planned;
    state.iterations = now.iterations;
    state.skips.add(now.skips);
    state.skips.add(outliers.first, outliers.last);
    return state;
}
