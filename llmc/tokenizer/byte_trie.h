// Strings as a tree of their bytes: finds all of them that are prefixes of a text, in one step per byte of the longest one. A
// node is a place in an array. Its children are at its offset + their byte; all nodes' children are interleaved (a double
// array; Aoe, 1989), and a place names its parent.
#pragma once
#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "../base/check.h"

class ByteTrie {
public:
    ByteTrie() = default;
    // Strings, non-empty and distinct, and their values, which are not negative.
    explicit ByteTrie(std::vector<std::pair<std::string, int>> strings) {
        std::sort(strings.begin(), strings.end());
        places_.resize(512);
        add_children(strings, 0, strings.size(), 0, root);
        places_.resize(places_.size() + 256);  // any byte added to a node's offset is a valid place
        places_.shrink_to_fit();
        empty_ = strings.empty();
    }

    bool empty() const { return empty_; }

    // Calls found(value, length) for each string that is a prefix of the text, the shortest first.
    template <class F>
    void prefixes(std::string_view text, F found) const {
        if (places_.empty()) return;
        int32_t node = root, offset = 0;
        for (size_t i = 0; i < text.size(); i++) {
            const int32_t next = offset + (unsigned char)text[i];
            const TrieSlot& place = places_[(size_t)next];
            if (place.parent != node) return;
            node = next;
            offset = place.offset;
            if (place.value >= 0) found(place.value, i + 1);
        }
    }
    // The value of a string; -1 if it is missing.
    int find(std::string_view text) const {
        int result = -1;
        prefixes(text, [&](int value, size_t length) {
            if (length == text.size()) result = value;
        });
        return result;
    }

private:
    static constexpr int32_t no_node = -1, root = -2;  // the root has no place; its offset is 0
    struct alignas(16) TrieSlot {
        int32_t parent = no_node, offset = 0, value = -1;
    };

    // Adds the strings [begin, end), which share their first `depth` bytes; these lead to `node`.
    void add_children(const std::vector<std::pair<std::string, int>>& strings, size_t begin, size_t end, size_t depth,
                      int32_t node) {
        if (begin < end && strings[begin].first.size() == depth) {
            CHECK(node != root && places_[(size_t)node].value < 0, "'%s' twice", strings[begin].first.c_str());
            places_[(size_t)node].value = strings[begin++].second;
        }
        std::vector<std::pair<unsigned char, size_t>> children;  // byte, first string
        for (size_t i = begin; i < end; i++) {
            const auto byte = (unsigned char)strings[i].first[depth];
            if (children.empty() || children.back().first != byte) children.emplace_back(byte, i);
        }
        if (children.empty()) return;
        const size_t offset = node == root ? 0 : free_offset(children);
        if (node != root) places_[(size_t)node].offset = (int32_t)offset;
        for (const auto& [byte, first] : children) places_[offset + byte].parent = node;
        for (size_t c = 0; c < children.size(); c++)
            add_children(strings, children[c].second, c + 1 < children.size() ? children[c + 1].second : end, depth + 1,
                         (int32_t)(offset + children[c].first));
    }

    // The first offset at which all children have free places. Nearly full parts of the array are not searched again.
    size_t free_offset(const std::vector<std::pair<unsigned char, size_t>>& children) {
        while (places_[first_free_].parent != no_node) grow(++first_free_);
        const size_t lowest = children.front().first;
        size_t tries = 0;
        for (size_t place = std::max(first_free_, lowest);; place++) {
            const size_t offset = place - lowest;
            grow(offset + 256);
            if (std::all_of(children.begin(), children.end(),
                            [&](const auto& child) { return places_[offset + child.first].parent == no_node; })) {
                if (tries > 256) first_free_ = std::max(first_free_, place - 128);
                return offset;
            }
            tries++;
        }
    }
    void grow(size_t place) {
        if (place >= places_.size()) places_.resize(2 * place + 1);
    }

    std::vector<TrieSlot> places_;
    bool empty_ = true;
    size_t first_free_ = 0;
};
