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
#include "../parallel/world.h"
#include "part_file.h"
#include "run_directory.h"

inline std::string snapshots_file(const std::string& out) { return out + "/.snapshots"; }

// A path below --snapshot-directory as this node sees it. Nodes that a test emulates on one machine have a folder each.
inline std::string on_this_node(const std::string& path) {
    const char* const node = world_detail::variable("TRAIN_GPT_TEST_NODE");
    const std::filesystem::path p(path);
    return node ? (p.parent_path() / node / p.filename()).string() : path;
}

// The directory that OUT names, on whichever node it is; "": none.
inline std::string snapshots_named_in(const std::string& out) {
    if (!is_regular(snapshots_file(out))) return "";
    const std::string root = read_whole_file(snapshots_file(out));
    return begins_with(std::filesystem::path(root).filename().string(), "train_gpt-") ? root : "";
}
inline std::string real_path(const std::string& out) {
    std::error_code error;
    const std::string real = std::filesystem::canonical(out, error).string();
    return error ? "" : real;
}
// The directory `named` on this node; "" if it is not there or another run's.
inline std::string snapshots_here(const std::string& named, const std::string& real_out) {
    const std::string root = named.empty() ? "" : on_this_node(named);
    return !root.empty() && is_regular(root + "/run") && read_whole_file(root + "/run") == real_out ? root : "";
}
inline std::string snapshots_of(const std::string& out) { return snapshots_here(snapshots_named_in(out), real_path(out)); }

// A new name below `parent`. Snapshots of several nodes get new ones in each run: a node that comes back later has no others.
inline std::string new_snapshots_name(const std::string& parent, bool of_nodes) {
    std::random_device random;
    const auto word = (unsigned long long)random() << 32 | random();
    return std::filesystem::canonical(parent).string() + format("/train_gpt-%s%016llx", of_nodes ? "nodes-" : "", word);
}
inline bool is_of_nodes(const std::string& root) {
    return begins_with(std::filesystem::path(root).filename().string(), "train_gpt-nodes-");
}
inline void make_snapshots_here(const std::string& named, const std::string& real_out) {
    const std::string root = on_this_node(named);
    std::filesystem::create_directories(root);
    write_file_atomically(root + "/run", real_out);
}
inline void remove_snapshots_here(const std::string& named, const std::string& real_out) {
    const std::string root = snapshots_here(named, real_out);
    if (root.empty()) return;
    std::error_code ignored;
    for (const std::string& name : names_in(root))
        if (name != "run") std::filesystem::remove_all(root + "/" + name, ignored);
    unlink((root + "/run").c_str());  // last: after a kill, the next run removes the rest
    std::filesystem::remove(root, ignored);
}

// Bytes of a directory's files.
inline double bytes_in(const std::string& root) {
    double bytes = 0;
    std::error_code error;
    for (std::filesystem::recursive_directory_iterator i(root, error), end; !error && i != end; i.increment(error))
        if (const auto size = i->file_size(error); !error) bytes += (double)size;
        else error.clear();  // a directory, or removed meanwhile
    return bytes;
}

// The directory of a run on one node, which keeps the one that it has.
inline std::string make_snapshots_of(const std::string& out, const std::string& parent) {
    if (const std::string root = snapshots_of(out); !root.empty() && !is_of_nodes(root)) {
        remove_leftovers(root);
        return root;
    }
    remove_snapshots_here(snapshots_named_in(out), real_path(out));
    const std::string named = new_snapshots_name(parent, false);
    make_snapshots_here(named, real_path(out));
    write_file_atomically(snapshots_file(out), named);
    return on_this_node(named);
}

// Parts of snapshots of several nodes (part_file.h) in a directory of this node.
inline Strings parts_in(const std::string& root) {
    Strings names;
    for (const std::string& name : root.empty() ? Strings() : names_in(root))
        if (part_of_name(name).step >= 0) names.push_back(name);
    return names;
}
