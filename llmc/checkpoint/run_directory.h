// The output directory of a run, OUT: which process may write there, its checkpoints, and which files may be removed.
//   step_00000100/          a checkpoint (checkpoint.h), written as .step_00000100.tmp and renamed when it is complete
//   latest                  a symbolic link to the checkpoint from which a run resumes; a file with its name where the file
//                           system has no links
//   log.jsonl, report.html, loss.svg, .lock, .ranks (current activity of each of several ranks, world.h)
//
//   RunLock                 one run per directory
//   find_checkpoints, steps_to_try, checkpoints_to_try, model_directory, verify_checkpoint, make_latest, go_back_to, prune
//   remove_leftovers        removes the temporary files of killed processes of this program
//   make_room_for_new_run   renames files that have the names of a new run's files, without deleting
// The directory may also hold the user's files: only exact names of this program are ever removed.
#pragma once
#include <sys/file.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <random>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "../base/check.h"
#include "checkpoint.h"
#include "../options/options.h"
#include "../base/file.h"
#include "../base/text.h"
#include "gguf_directory.h"
#include "hub.h"

inline std::string step_name(int64_t step) { return format("step_%08lld", (long long)step); }
inline std::string step_directory(const std::string& out, int64_t step) { return out + "/" + step_name(step); }
inline std::string ranks_file(const std::string& out) { return out + "/.ranks"; }
inline std::string state_file(const std::string& dir) { return dir + "/training/state.json"; }
inline std::string reference_file(const std::string& dir) { return dir + "/training/reference.safetensors"; }

// The step in a checkpoint's name; -1 for any other name, even a similar one (step_7, step_00000007.bak).
inline int64_t step_of_name(const std::string& name) {
    long long step = -1;
    return sscanf(name.c_str(), "step_%lld", &step) == 1 && step >= 0 && name == step_name(step) ? step : -1;
}

// Steps of the directories OUT/step_*, newest first.
inline std::vector<int64_t> find_checkpoints(const std::string& out) {
    std::vector<int64_t> steps;
    for (const std::string& name : names_in(out))
        if (const int64_t step = step_of_name(name); step >= 0 && is_folder(out + "/" + name)) steps.push_back(step);
    std::sort(steps.rbegin(), steps.rend());
    return steps;
}

// Renames existing files that have the names of a new run's files.
inline void make_room_for_new_run(const std::string& out) {
    for (const char* file : {"/log.jsonl", "/report.html", "/loss.svg"}) set_aside(out + file);
}

// ---- which checkpoint ------------------------------------------------------------------------------------------------------
// The problem with a checkpoint, or "": it must match its manifest, and the manifest must list every file that a resumed run
// reads; bf16 weights must be the fp32 weights rounded. Called with `ranks`, each rank compares its share.
inline std::string verify_checkpoint(const std::string& dir, int rank = 0, int ranks = 1) {
    if (const std::string problem = verify_directory(dir, rank, ranks); !problem.empty()) return problem;
    const std::string manifest = dir + "/" + manifest_name;
    std::string file = manifest;  // the one that is being read
    try {
        const nlohmann::json files = read_json(manifest).at("files");
        const auto missing = [&](const std::string& name) {
            return manifest + " does not list " + name + ", which a resumed run reads";
        };
        const bool adapter = files.contains("adapter_config.json");
        for (const char* name : {adapter ? "adapter_config.json" : "config.json", "training/state.json"})
            if (!files.contains(name)) return missing(name);
        file = state_file(dir);
        const nlohmann::json state = read_json(file);
        if (const int64_t named = step_of_name(std::filesystem::path(dir).filename().string());
            named >= 0 && state.at("step") != named)
            return dir + " holds the checkpoint of step " + state.at("step").dump() + "; HINT: rename it";
        Strings tensors = {adapter ? "adapter_model" : "model"};
        const std::string optimizer = state.value("options", nlohmann::json::object()).value("optimizer", "adamw");
        for (int k = 0; k < optimizer_row(optimizer).moments; k++)
            tensors.push_back(std::string("training/") + names_of_moments[k]);
        if (state.contains("reference") && !state["reference"].is_null()) tensors.push_back("training/reference");
        if (state.at("layout").value("precision", "") == "bf16") tensors.push_back("training/master");
        for (const std::string& stem : tensors) {
            const std::string single = stem + ".safetensors", index = single + ".index.json";
            if (files.contains(single)) continue;
            if (!files.contains(index)) return missing(single);
            const std::string folder = stem.substr(0, stem.find_last_of('/') + 1);
            file = dir + "/" + index;
            const nlohmann::json map = read_json(file).at("weight_map");
            for (const auto& [tensor, part] : map.items())
                if (const std::string name = folder + part.get<std::string>(); !files.contains(name)) return missing(name);
        }
        const auto listed = [&](const std::string& path) {
            return files.contains(path + ".safetensors") || files.contains(path + ".safetensors.index.json");
        };
        const std::string weights = adapter ? "adapter_model" : "model";
        for (const auto& [rounded, masters] :
             {std::pair<std::string, const char*>{weights, "training/master"}, {"ema/" + weights, "training/ema"}})
            if (listed(rounded) && listed(masters))
                if (const std::string problem = rounding_problem(dir + "/" + rounded + ".safetensors",
                                                                 dir + "/" + masters + ".safetensors", rank, ranks);
                    !problem.empty())
                    return problem;
    } catch (const nlohmann::json::exception& e) {
        return file + " is damaged: " + json_problem(e);
    } catch (const Error& e) {
        return e.what();
    }
    return "";
}

// The step that OUT/latest points to, however the link is spelled, or names, where it is a file; -1 if there is none.
inline int64_t latest_step(const std::string& out) {
    namespace fs = std::filesystem;
    const std::string latest = out + "/latest";
    if (is_regular(latest)) return step_of_name(named_by_file(latest));
    std::error_code error;
    fs::path named = fs::canonical(latest, error);
    if (error && !means_missing(error.value())) fail_to_read(latest, error.value());
    if (error || named.parent_path() != fs::canonical(out)) named = fs::read_symlink(latest, error);
    return step_of_name(named.filename().string());
}

// The checkpoints to resume from, best first: the one that OUT/latest points to, earlier ones, newest first, then later ones,
// newest first (--resume DIR abandoned them for an older one, or a kill kept them from becoming the latest).
inline std::vector<int64_t> steps_to_try(const std::string& out) {
    std::vector<int64_t> steps = find_checkpoints(out);
    const int64_t latest = latest_step(out);
    if (latest >= 0) std::stable_partition(steps.begin(), steps.end(), [&](int64_t step) { return step <= latest; });
    return steps;
}
inline Strings checkpoints_to_try(const std::string& out) {
    Strings directories;
    for (const int64_t step : steps_to_try(out)) directories.push_back(step_directory(out, step));
    return directories;
}

// The model (or adapters) at a path: the path itself, the checkpoint to resume from in a run's output directory, or a model of
// this name in Hugging Face's cache.
inline std::string model_directory(const std::string& path) {
    if (is_model_or_adapter(path)) return path;
    if (is_gguf_file(path)) return gguf_directory(path);
    if (const Strings checkpoints = checkpoints_to_try(path); !checkpoints.empty()) return checkpoints[0];
    const std::string directory = local_path(path);
    if (!file_exists(directory))
        fail("%s does not exist%s", path.c_str(),
             hint_on_missing_path(path, "a model is a Hugging Face directory, or the output directory of a run").c_str());
    if (!is_folder(directory))
        fail(
            "%s is not a directory; HINT: a model is a Hugging Face directory, the output directory of a run, or a "
            "file of llama.cpp (.gguf)",
            path.c_str());
    return directory;
}

// In a copy of a run that followed links (cp -rL, rsync -L), `latest` is a directory: the checkpoint itself, or a second copy
// of it. Renames it to its checkpoint's name if that is free, or else to an unused name, and replaces it by a link. Returns a
// description of the change, or "".
inline std::string adopt_copied_latest(const std::string& out) {
    namespace fs = std::filesystem;
    const std::string latest = out + "/latest";
    std::error_code error;
    const fs::file_status status = fs::symlink_status(latest, error);
    if (!fs::exists(status) || fs::is_symlink(status)) return "";
    if (fs::is_regular_file(status) && step_of_name(named_by_file(latest)) >= 0) return "";
    int64_t step = -1;
    try {
        step = read_json(state_file(latest)).value("step", (int64_t)-1);
    } catch (const Error&) {  // not a checkpoint
    } catch (const nlohmann::json::exception&) {
    }
    const std::string dir = step_directory(out, step);
    std::string done;
    if (step >= 0 && !fs::exists(fs::symlink_status(dir)) && verify_checkpoint(latest).empty() &&
        rename(latest.c_str(), dir.c_str()) == 0)
        done = latest + " was a copied checkpoint, and is now " + dir;
    else done = latest + " was not a link, and is now " + set_aside(latest);
    if (step >= 0 && file_exists(dir)) point_link(latest, step_name(step));
    return done;
}

// Points OUT/latest at a checkpoint of that directory, just saved or resumed from; later ones are ignored from then on.
inline void make_latest(const std::string& out, const std::string& dir) {
    const std::filesystem::path real = std::filesystem::canonical(dir);
    if (real.parent_path() != std::filesystem::canonical(out)) return;
    adopt_copied_latest(out);
    point_link(out + "/latest", real.filename().string());
}

// Before training continues from a checkpoint of `step`, after a resume or a rollback: renames the later checkpoints in OUT,
// which belong to an abandoned part of the run. The new part skips some of their steps, and one left in place would later be
// mistaken for its own. `latest` moves first: after a kill in between, the next resume uses the same checkpoint and renames the
// others. Returns a description of the changes, or "".
inline std::string go_back_to(const std::string& out, const std::string& dir, int64_t step) {
    namespace fs = std::filesystem;
    std::vector<int64_t> later = find_checkpoints(out);
    later.erase(
        std::remove_if(later.begin(), later.end(),
                       [&](int64_t s) { return s <= step || !file_exists(step_directory(out, s) + "/" + manifest_name); }),
        later.end());
    if (later.empty() || fs::canonical(dir).parent_path() == fs::canonical(out)) make_latest(out, dir);
    else unlink((out + "/latest").c_str());  // `dir` is another run's, where this one started
    const std::string names = joined(later, [&](int64_t s) { return set_aside(step_directory(out, s)); });
    return names.empty() ? ""
                         : format("checkpoints after step %lld, where training resumes, are now ", (long long)step) + names;
}

// ---- checkpoint removal ----------------------------------------------------------------------------------------------------
// The checkpoints that prune() keeps.
struct KeptCheckpoints {
    int64_t newest, every = 0;  // number of newest ones, 0: all; and multiples of `every`, 0: none
    int64_t way_back = -1;      // steps that a rollback may have to go back; -1: no rollbacks

    // The maximum number besides multiples of `every`, for a number above 0.
    int64_t most() const { return newest + (way_back >= 0 ? 2 : 0); }
};

// The checkpoints up to `step` that are not kept, oldest first. Later ones belong to an abandoned part of the run or are
// damaged: they do not count and are not touched; nor is a directory without a manifest, which is not a checkpoint. The target
// of `latest` is kept. For a rollback, the newest one that is far enough back is kept, and the oldest one that is not yet,
// which will replace it later.
inline std::vector<int64_t> superfluous(const std::string& out, int64_t step, const KeptCheckpoints& kept) {
    std::error_code ignored;
    const int64_t latest = latest_step(out);
    std::vector<int64_t> steps = find_checkpoints(out), others;
    steps.erase(std::remove_if(steps.begin(), steps.end(),
                               [&](int64_t s) {
                                   const std::string manifest = step_directory(out, s) + "/" + manifest_name;
                                   return s > step || !std::filesystem::exists(manifest, ignored);
                               }),
                steps.end());
    const auto near = [&](int64_t s) { return s > step - kept.way_back; };
    const size_t n_near = (size_t)std::count_if(steps.begin(), steps.end(), near);
    for (size_t i = (size_t)kept.newest; kept.newest > 0 && i < steps.size(); i++) {
        if ((kept.every > 0 && steps[i] % kept.every == 0) || steps[i] == latest) continue;
        if (kept.way_back >= 0 && (i == n_near || i + 1 == n_near)) continue;
        others.insert(others.begin(), steps[i]);
    }
    return others;
}

inline void remove_checkpoint(const std::string& out, int64_t step) {
    std::error_code ignored;
    // Renamed first, so that a kill in between leaves no directory that looks like a checkpoint.
    const std::string gone = out + "/" + hidden(step_name(step), ".old");
    std::filesystem::remove_all(gone, ignored);
    std::filesystem::rename(step_directory(out, step), gone, ignored);
    std::filesystem::remove_all(gone, ignored);
}

// After the checkpoint of `step` was saved: removes the superfluous ones.
inline void prune(const std::string& out, int64_t step, const KeptCheckpoints& kept) {
    for (const int64_t other : superfluous(out, step, kept)) remove_checkpoint(out, other);
}

// True if a name in OUT belongs to a temporary file or directory of this program, left by a killed process.
inline bool is_leftover(const std::string& name, std::filesystem::file_type type) {
    const auto without = [&](const std::string& start, const std::string& end) -> std::string {
        const bool both = name.size() > start.size() + end.size() && name.compare(0, start.size(), start) == 0 &&
                          name.compare(name.size() - end.size(), end.size(), end) == 0;
        return both ? name.substr(start.size(), name.size() - start.size() - end.size()) : "";
    };
    if (type == std::filesystem::file_type::directory)
        return step_of_name(without(".", ".tmp")) >= 0 || step_of_name(without(".", ".old")) >= 0;
    const bool link = type == std::filesystem::file_type::symlink;
    if (!link && type != std::filesystem::file_type::regular) return false;
    for (const std::string& file : link ? Strings{"latest"} : Strings{"report.html", "log.jsonl", "loss.svg"})
        if (const std::string pid = without(file + temporary_mark, ""); !pid.empty())
            return pid.find_first_not_of("0123456789") == std::string::npos;
    return false;
}

inline void remove_leftovers(const std::string& out) {
    std::vector<std::filesystem::path> leftovers;
    for (const auto& entry : std::filesystem::directory_iterator(out))
        if (is_leftover(entry.path().filename().string(), entry.symlink_status().type())) leftovers.push_back(entry.path());
    std::error_code ignored;
    for (const auto& path : leftovers) std::filesystem::remove_all(path, ignored);
}

// ---- one run per directory -------------------------------------------------------------------------------------------------
// Another run writes to this run's directory.
struct DirectoryTaken : Error {
    using Error::Error;
};

// Holds OUT/.lock for the life of the process; a second run in the same directory fails. If the run fails to start, a directory
// that was created for it is removed again.
//
// On some network file systems locks do nothing. So the file also has a line that identifies this run: its process, a random
// word, when it was started, and the host. Another living process of this host is rejected; of two hosts, the run that was
// started last keeps the directory, and the other one finds the new line before its next record or save, and ends.
class RunLock {
public:
    explicit RunLock(const std::string& out) : out_(out), path_(out + "/.lock"), mine_(line_of_process()) {
        made_ = !file_exists(out);
        acquire();
    }
    RunLock(const RunLock&) = delete;
    RunLock& operator=(const RunLock&) = delete;
    ~RunLock() {
        namespace fs = std::filesystem;
        std::error_code ignored;
        bool empty = made_ && is_path();  // except for the files of every start
        for (const auto& entry : fs::directory_iterator(out_, ignored))
            empty = empty && (entry.path().filename() == ".lock" || entry.path().filename() == ".ranks");
        if (empty) {
            unlink(path_.c_str());
            unlink(ranks_file(out_).c_str());
            rmdir(out_.c_str());
        }
        release();
    }

    // Takes the lock again if its file or the directory was deleted in the meantime. Throws DirectoryTaken if another run has
    // the lock or has had it since: then the directory belongs to that run.
    void hold() {
        const std::lock_guard<std::mutex> guard(mutex_);
        const bool same = fd_ >= 0 && is_path();
        const std::string line = last_line();
        if (!line.empty() && line != mine_)
            throw DirectoryTaken("another run " + owner_of(line) + " has been writing to " + out_ +
                                 " since this one took it; HINT: stop that run first, or give another --out");
        if (same && !line.empty()) return;
        release();
        acquire();
    }

private:
    // "PID WORD START HOST"
    static std::string line_of_process() {
        std::random_device random;
        const auto word = (uint64_t)random() << 32 | random();
        return format("%d %016llx %s %s", (int)getpid(), (unsigned long long)word, start_of_process(getpid()).c_str(),
                      world_detail::host_name().c_str());
    }
    // When this machine started the process, in its clock's ticks since it was booted; "" if there is no such process or it has
    // ended, and its parent (after a kill, mpirun's) has not noticed yet.
    static std::string start_of_process(int pid) {
        std::string text;
        std::getline(std::ifstream("/proc/" + std::to_string(pid) + "/stat"), text);
        std::istringstream fields(text.substr(std::min(text.size(), text.rfind(')') + 1)));
        std::string field;
        for (int i = 3; i <= 22; i++)  // numbers of proc(5); the second is the name, in parentheses, the third the state
            if (!(fields >> field) || (i == 3 && (field == "Z" || field == "X"))) return "";
        return field;
    }
    static Strings words_of(const std::string& line) {
        std::istringstream in(line);
        Strings words;
        for (std::string word; in >> word;) words.push_back(word);
        return words;
    }
    // "(process 12)" or, of another host, "(process 12 on HOST)"; earlier versions wrote only the process.
    static std::string owner_of(const std::string& line) {
        const Strings words = words_of(line);
        return "(process " + (words.empty() ? "unknown" : words[0]) +
               (words.size() > 3 && words[3] != world_detail::host_name() ? " on " + words[3] : "") + ")";
    }
    // Whether the line names a live process of this host.
    static bool is_alive(const std::string& line) {
        const Strings words = words_of(line);
        if (words.size() != 4 || words[3] != world_detail::host_name() ||
            words[0].find_first_not_of("0123456789") != std::string::npos)
            return false;
        return start_of_process(atoi(words[0].c_str())) == words[2];
    }
    static bool has_no_locks(int error) { return error == ENOLCK || error == ENOSYS || error == EOPNOTSUPP || error == EINVAL; }

    void acquire() {
        make_directory(out_);
        for (;;) {
            fd_ = patiently([&] {
                const int fd = open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0644);
                if (fd < 0 && may_pass(errno)) fail_to_read(path_, errno);
                if (fd < 0) fail_to_write(path_, errno);
                return fd;
            });
            const int error = flock(fd_, LOCK_EX | LOCK_NB) == 0 ? 0 : errno;
            const std::string line = last_line();
            if (error == EWOULDBLOCK || (line != mine_ && is_alive(line))) {
                release();
                fail("another run is writing to %s %s; HINT: give another --out, or stop that one", out_.c_str(),
                     owner_of(line).c_str());
            }
            if (error && !has_no_locks(error)) {
                release();
                fail("cannot lock %s: %s", path_.c_str(), strerror(error));
            }
            if (is_path()) break;  // otherwise its last owner has removed it in the meantime
            release();
        }
        // Never empty in between: the run before would read that as a lock that was deleted, and take it again.
        if (pwrite(fd_, mine_.data(), mine_.size(), 0) != (ssize_t)mine_.size() || ftruncate(fd_, (off_t)mine_.size()) != 0) {
            const int error = errno;
            release();
            fail_to_write(path_, error);
        }
    }
    // The line in the lock file; empty if there is none.
    std::string last_line() const {
        const int fd = open(path_.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
        if (fd < 0) return "";
        char text[512] = {};
        (void)!read(fd, text, sizeof text - 1);
        close(fd);
        return text;
    }
    void release() {
        if (fd_ >= 0) close(std::exchange(fd_, -1));
    }
    // True if the locked file still has its name.
    bool is_path() const {
        struct stat locked, named;
        return fd_ >= 0 && fstat(fd_, &locked) == 0 && lstat(path_.c_str(), &named) == 0 && locked.st_dev == named.st_dev &&
               locked.st_ino == named.st_ino;
    }

    std::string out_, path_, mine_;
    bool made_ = false;
    int fd_ = -1;
    std::mutex mutex_;
};
