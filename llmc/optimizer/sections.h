// The sections of the parameter buffer: the matrices of a block, of the head or of the embedding. ZeRO-2 has whole gradients,
// and ZeRO-3 whole weights, of at most two sections in memory, in two areas that sections use in turn: a section's place is
// known when memory is planned. A tied embedding has an area of its own, because head and embedding are both in use in a pass.
#pragma once
#include <algorithm>
#include <array>
#include <vector>

#include "../model/parameters.h"
#include "shard.h"

// Elements [begin, end) of the buffer.
struct Section {
    int block;  // as TensorSpec::block
    size_t begin, end;
    size_t area = 0;
    size_t end_of_embedding = 0;  // of the tokens
    std::vector<Range> gaps = {};
    bool has(const Bucket& b) const { return b.begin >= begin && b.end <= end; }
};

struct Sections {
    std::vector<Section> all;       // in the order of the buffer
    std::array<size_t, 3> sizes{};  // elements of the areas: two in turn; of a tied embedding
    bool keeps_embedding = false;   // head and embedding are the same matrix on this rank

    Sections() = default;
    Sections(const ParameterTable& table, bool tied) : keeps_embedding(tied && table.part.first && table.part.last) {
        for (const TensorSpec& t : table.rows) {
            if (t.vector()) continue;
            if (all.empty() || all.back().block != t.block) all.push_back({t.block, t.offset, t.offset});
            Section& s = all.back();
            CHECK(t.offset == s.end, "%s does not follow the tensors of its block", t.name.c_str());
            s.end = round_up(t.offset + t.size(), (size_t)64);
            if (s.end > t.offset + t.size()) s.gaps.push_back({t.offset + t.size(), s.end});
            if (t.id == 0) s.end_of_embedding = s.end;
        }
        if (!all.empty() && all.back().end < table.decayed) {
            all.back().gaps.push_back({all.back().end, table.decayed});
            all.back().end = table.decayed;
        }
        for (size_t i = 0; i < all.size(); i++) {
            Section& s = all[i];
            s.area = keeps_embedding && s.block == TensorSpec::embedding ? 2 : i % 2;
            sizes[s.area] = std::max(sizes[s.area], s.end - s.begin);
        }
    }
    // The section of a block, the head or the embedding; null: none is on this rank.
    const Section* of(int block) const {
        if (keeps_embedding && block == TensorSpec::head) block = TensorSpec::embedding;
        for (const Section& s : all)
            if (s.block == block) return &s;
        return nullptr;
    }
};
