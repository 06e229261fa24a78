// The optimizers of --optimizer, one row each. Options, memory, plans and checkpoints read the row, so a new optimizer needs a
// row, its update (adamw.h, or a header like muon.h) and its op (ops.inl).
#pragma once
#include <string>
#include <vector>

#include "../base/check.h"
#include "../base/enum_table.h"

enum class OptimizerKind { adamw, muon, normuon, lion };

// The moments by their names in checkpoints, in order; an optimizer keeps the first one or both.
inline constexpr const char* names_of_moments[] = {"exp_avg", "exp_avg_sq"};

struct OptimizerRow {
    OptimizerKind value;
    const char *word, *alias;  // of --optimizer; alias: null, or Megatron's word
    const char* in_memory;     // the moments' name in the memory table
    int moments;               // of names_of_moments, for elements that it updates one by one
    bool whole_matrices;       // the matrices of blocks are updated as a whole (muon.h)
    bool neurons;              // NorMuon: exp_avg_sq has one element per row of a matrix, in fp32 on the device; no muP

    bool second_moment() const { return moments > 1; }
    bool narrows_second_moment() const { return second_moment() && !neurons; }  // exp_avg_sq may have fewer bits than fp32
    bool can_offload() const { return !neurons; }
};
inline constexpr OptimizerRow optimizers[] = {{OptimizerKind::adamw, "adamw", "adam", "Adam moments", 2, false, false},
                                              {OptimizerKind::muon, "muon", nullptr, "Adam moments", 2, true, false},
                                              {OptimizerKind::normuon, "normuon", nullptr, "Adam moments", 2, true, true},
                                              {OptimizerKind::lion, "lion", nullptr, "Lion momentum", 1, false, false}};
static_assert(is_table_of<OptimizerKind>(optimizers));

// The allowed values of --optimizer.
inline std::vector<std::string> optimizer_words() {
    std::vector<std::string> words;
    for (const OptimizerRow& row : optimizers) {
        words.emplace_back(row.word);
        if (row.alias) words.emplace_back(row.alias);
    }
    return words;
}
inline const OptimizerRow& optimizer_row(const std::string& word) {
    for (const OptimizerRow& row : optimizers)
        if (word == row.word || (row.alias && word == row.alias)) return row;
    fail("there is no optimizer '%s'", word.c_str());
}
