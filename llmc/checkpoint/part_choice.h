// The decisions about snapshots on several nodes (node_snapshots.h), without processes, files or messages: test/simulate.cpp
// applies them to simulated jobs.
//   NodeRing          which rank keeps the copy of which
//   PartsOfNodes      which snapshots are complete on the nodes that are there
//   choose_readers    which rank reads which part
//   order_to_resume   in which order a resume tries checkpoints and snapshots
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

// The nodes in the order of their first ranks; each keeps a copy of the parts of the node before it.
class NodeRing {
public:
    // node: a number for each rank's node.
    explicit NodeRing(const std::vector<int>& node) {
        std::map<int, size_t> places;
        for (size_t r = 0; r < node.size(); r++) {
            const size_t place = places.try_emplace(node[r], nodes_.size()).first->second;
            if (place == nodes_.size()) nodes_.emplace_back();
            nodes_[place].push_back((int)r);
            node_of_.push_back(place);
        }
    }
    size_t size() const { return nodes_.size(); }
    size_t node_of(int r) const { return node_of_[(size_t)r]; }
    // The ranks of r's node, and of the node before.
    const std::vector<int>& with(int r) const { return nodes_[node_of(r)]; }
    const std::vector<int>& before(int r) const { return nodes_[(node_of(r) + size() - 1) % size()]; }
    // The rank of the next node that keeps the copy of rank r's part; of several nodes.
    int partner(int r) const {
        const std::vector<int>&mine = with(r), &next = nodes_[(node_of(r) + 1) % size()];
        return next[(size_t)(std::find(mine.begin(), mine.end(), r) - mine.begin()) % next.size()];
    }
    // The ranks whose copies rank r keeps.
    std::vector<int> senders(int r) const {
        std::vector<int> ranks;
        for (const int other : before(r))
            if (partner(other) == r) ranks.push_back(other);
        return ranks;
    }

private:
    std::vector<std::vector<int>> nodes_;  // their ranks
    std::vector<size_t> node_of_;
};

// One save of a step, of all ranks. Its random number distinguishes it from another save of the step.
struct PartSave {
    int64_t step = 0;
    uint64_t number = 0;
    uint32_t parts = 0;
    bool operator<(const PartSave& o) const { return std::tie(step, number, parts) < std::tie(o.step, o.number, o.parts); }
};

// The parts that nodes have: their own ranks', copies, of any save.
class PartsOfNodes {
public:
    void add(const PartSave& save, uint32_t part, size_t node) { nodes_[save][part].insert(node); }
    // The saves of which the nodes have all parts, if these are intact.
    std::vector<PartSave> complete() const {
        std::vector<PartSave> saves;
        for (const auto& [save, parts] : nodes_)
            if (parts.size() == save.parts) saves.push_back(save);
        return saves;
    }
    // The nodes with each part.
    const std::map<uint32_t, std::set<size_t>>& of(const PartSave& save) const { return nodes_.at(save); }

private:
    std::map<PartSave, std::map<uint32_t, std::set<size_t>>> nodes_;
};

// The reader of each part, among the ranks with an intact one and its size, so that all read about equally much. Fewer readers
// than parts: a part is missing.
inline std::map<uint32_t, int> choose_readers(const std::map<uint32_t, std::map<int, size_t>>& intact) {
    std::map<uint32_t, int> readers;
    std::map<int, size_t> work;
    for (const bool single : {true, false})
        for (const auto& [part, ranks] : intact) {
            if (ranks.empty() || single != (ranks.size() == 1)) continue;
            const auto least = [&](const auto& a, const auto& b) { return work[a.first] < work[b.first]; };
            const auto [rank, bytes] = *std::min_element(ranks.begin(), ranks.end(), least);
            readers[part] = rank;
            work[rank] += bytes;
        }
    return readers;
}

// Where a resume reads: a checkpoint of OUT, or a snapshot of one node or of several.
struct Resumable {
    enum Where { disk, node, nodes };
    int64_t step = 0;
    Where where = disk;
    size_t save = 0;  // nodes: index in PartsOfNodes::complete()
};
// The checkpoints in the given order (steps_to_try), and each snapshot before the first checkpoint that is older.
inline std::vector<Resumable> order_to_resume(const std::vector<int64_t>& checkpoints,
                                              const std::vector<Resumable>& snapshots) {
    std::vector<Resumable> all;
    for (const int64_t step : checkpoints) all.push_back({step});
    for (const Resumable& s : snapshots)
        all.insert(std::find_if(all.begin(), all.end(), [&](const Resumable& r) { return r.step < s.step; }), s);
    return all;
}
