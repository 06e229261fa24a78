// Snapshots: checkpoints in the memory of this node (--snapshot-every), in a directory of the run's own below
// --snapshot-directory. A run that is killed resumes from the newest of them if it is newer than the checkpoints in OUT; a run
// that ends well removes them. OUT/.snapshots names the directory, whose file `run` names OUT: a run neither reads nor removes
// another run's snapshots, even if OUT is a copy of that run.
#pragma once
#include <filesystem>
#include <random>
#include <string>
#include <vector>

#include "../base/check.h"
#include "../base/file.h"
#include "../base/text.h"
#include "run_directory.h"

inline std::string snapshots_file(const std::string& out) { return out + "/.snapshots"; }

// The directory of OUT's snapshots; "" if there is none.
inline std::string snapshots_of(const std::string& out) {
    std::error_code error;
    const std::filesystem::path real = std::filesystem::canonical(out, error);
    if (error || !is_regular(snapshots_file(out))) return "";
    const std::string root = read_whole_file(snapshots_file(out));
    if (!begins_with(std::filesystem::path(root).filename().string(), "train_gpt-") || !is_regular(root + "/run")) return "";
    return read_whole_file(root + "/run") == real.string() ? root : "";
}

// The same, made below `parent` if there is none.
inline std::string make_snapshots_of(const std::string& out, const std::string& parent) {
    if (const std::string root = snapshots_of(out); !root.empty()) {
        remove_leftovers(root);
        return root;
    }
    std::random_device random;
    const auto word = (unsigned long long)random() << 32 | random();
    const std::string root = std::filesystem::canonical(parent).string() + format("/train_gpt-%016llx", word);
    make_directory(root);
    write_file_atomically(root + "/run", std::filesystem::canonical(out).string());
    write_file_atomically(snapshots_file(out), root);
    return root;
}

inline void remove_snapshots(const std::string& out) {
    const std::string root = snapshots_of(out);
    if (root.empty()) return;
    std::error_code ignored;
    for (const int64_t step : find_checkpoints(root)) remove_checkpoint(root, step);
    remove_leftovers(root);
    for (const char* name : {"/latest", "/run"}) unlink((root + name).c_str());
    std::filesystem::remove(root, ignored);
    unlink(snapshots_file(out).c_str());
}

// Before training continues from `step`: later snapshots belong to an abandoned part of the run.
inline void remove_snapshots_after(const std::string& out, int64_t step) {
    const std::string root = snapshots_of(out);
    if (root.empty()) return;
    for (const int64_t later : find_checkpoints(root))
        if (later > step) remove_checkpoint(root, later);
}

// Where a resume reads: a checkpoint of OUT or a snapshot.
struct Resumable {
    int64_t step;
    bool snapshot;
};
// The order in which a resume tries them: the checkpoints in the given order (steps_to_try), and each snapshot before the
// first checkpoint that is older.
inline std::vector<Resumable> order_to_resume(const std::vector<int64_t>& checkpoints, std::vector<int64_t> snapshots) {
    std::vector<Resumable> all;
    for (const int64_t step : checkpoints) all.push_back({step, false});
    std::sort(snapshots.begin(), snapshots.end());
    for (const int64_t step : snapshots)
        all.insert(std::find_if(all.begin(), all.end(), [&](const Resumable& r) { return r.step < step; }), {step, true});
    return all;
}

// The directories of both.
inline Strings places_to_resume(const std::string& out) {
    const std::string root = snapshots_of(out);
    Strings places;
    for (const Resumable& r :
         order_to_resume(steps_to_try(out), root.empty() ? std::vector<int64_t>() : find_checkpoints(root)))
        places.push_back(step_directory(r.snapshot ? root : out, r.step));
    return places;
}
