// Byte-pair encoding of a long text: a linked list of symbols and a priority queue of candidate pairs, O(n log n).
#pragma once
#include <array>
#include <climits>
#include <functional>
#include <queue>
#include <vector>

// A merge of two neighbors: among all possible ones the one of lowest rank comes first, at equal ranks the leftmost.
struct Merge {
    int rank = -1, symbol = 0;  // rank -1: these two do not merge
};

// Merges `symbols` until no pair is left for which find(i, j) returns a Merge of the symbols at i and j. Calls merged(rank, i,
// j) before the symbol at i becomes the pair's. Returns for each remaining symbol the position of the next one; the first is at
// 0, and after the last comes the initial number of symbols.
template <class Find, class Merged>
std::vector<int> merge_by_rank(std::vector<int>& symbols, Find find, Merged merged) {
    const int n = (int)symbols.size();
    std::vector<int> next(symbols.size()), previous(symbols.size());
    constexpr int gone = INT_MIN;
    using Candidate = std::array<int, 5>;  // rank, position, left symbol, right symbol, the pair's symbol
    std::priority_queue<Candidate, std::vector<Candidate>, std::greater<Candidate>> queue;
    const auto consider = [&](int i) {
        if (i < 0 || next[i] >= n) return;
        const Merge merge = find(i, next[i]);
        if (merge.rank >= 0) queue.push({merge.rank, i, symbols[i], symbols[next[i]], merge.symbol});
    };
    for (int i = 0; i < n; i++) {
        next[i] = i + 1;
        previous[i] = i - 1;
    }
    for (int i = 0; i < n; i++) consider(i);
    while (!queue.empty()) {
        const auto [rank, i, left, right, symbol] = queue.top();
        queue.pop();
        const int j = next[i];
        if (symbols[i] != left || j >= n || symbols[j] != right) continue;  // outdated: one of the two was merged
        merged(rank, i, j);
        symbols[i] = symbol;
        symbols[j] = gone;
        next[i] = next[j];
        if (next[i] < n) previous[next[i]] = i;
        consider(previous[i]);
        consider(i);
    }
    return next;
}
