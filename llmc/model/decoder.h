// Writes many texts at a time (continuous batching; Yu et al., "Orca", OSDI 2022): every step adds one token to each text, in
// one pass that reads the weights once. A text joins as soon as another has ended; its prompt is a pass of its own. Texts draw
// from random numbers of their own, so what one says does not depend on the others, where the kernels' bits do not.
#pragma once
#include <algorithm>
#include <cstdint>
#include <deque>
#include <functional>
#include <vector>

#include "../base/rng.h"
#include "../cpu/parallel.h"
#include "sampler.h"

// Capacity of the key/value cache: sequences generated at a time, and tokens of the longest, virtual ones included (0: the
// model's context).
struct TextRoom {
    int sequences = 0, tokens = 0;
};
// A token that continues one of the sequences.
struct NextToken {
    int sequence, token;
};

enum class TextEnd {
    token,      // one of its ends
    stopped,    // by emit
    length,     // of max_new_tokens
    context,    // that is full
    abandoned,  // that nobody wants any more
};

// A text to write: up to max_new_tokens after `prompt`, of at least one token.
struct TextRequest {
    std::vector<int> prompt;
    int max_new_tokens = 0;
    SamplingOptions sampling{};
    uint64_t seed = 0;  // draws are a function of seed, sample, and how many tokens came before
    uint32_t sample = 0;
    std::vector<int> ends{};                // tokens that end it, and are no part of it
    std::function<bool(int token)> emit{};  // gets each token, or is empty; false: the text ends here
    std::function<void(TextEnd)> ended{};   // is called once, or empty
    std::function<bool()> wanted{};         // asked before each step; empty: always
};

// Generator: as in train_gpt.cu: sequences(), capacity(), length(sequence), prompt(sequence, tokens), append(next tokens), and
// logits() of what these were about.
template <class Generator>
class Decoder {
public:
    explicit Decoder(Generator& generator) : generator_(generator), active_((size_t)generator.sequences()) {}

    void add(TextRequest request) { waiting_.push_back({std::move(request)}); }
    size_t waiting() const { return waiting_.size(); }
    int64_t tokens() const { return tokens_; }  // that were emitted so far

    // One token of each text. False: none is left.
    bool step() {
        drop_unwanted();
        for (size_t s = 0; s < active_.size(); s++)
            while (!active_[s].busy && !waiting_.empty()) begin((int)s);
        std::vector<NextToken> next;
        for (size_t s = 0; s < active_.size(); s++)
            if (active_[s].busy) next.push_back({(int)s, active_[s].last});
        if (next.empty()) return false;
        generator_.append(next);
        choose(next);
        return true;
    }

private:
    struct Text {
        TextRequest request;
        int n = 0, last = 0;  // tokens so far, the last of which
        bool busy = false;
    };

    void begin(int sequence) {
        Text& text = active_[(size_t)sequence];
        text = std::move(waiting_.front());
        waiting_.pop_front();
        text.busy = true;
        generator_.prompt(sequence, text.request.prompt);
        if (generator_.length(sequence) >= generator_.capacity()) return end(text, TextEnd::context);
        choose({{sequence, 0}});
    }

    // Continues the texts of these sequences from the logits of their last tokens.
    void choose(std::vector<NextToken> next) {
        const std::vector<float>& logits = generator_.logits();
        const size_t V = logits.size() / next.size();
        cpu::parallel_tasks(next.size(), [&](size_t i) {
            const Text& text = active_[(size_t)next[i].sequence];
            const TextRequest& r = text.request;
            const double uniform = uniform_at(r.seed, RngPurpose::sampling, r.sample, (uint64_t)text.n);
            next[i].token = sample_token(&logits[i * V], (int)V, r.sampling, uniform);
        });
        for (const auto& [sequence, token] : next) take(sequence, token);
    }

    void take(int sequence, int token) {
        Text& text = active_[(size_t)sequence];
        const TextRequest& r = text.request;
        if (std::find(r.ends.begin(), r.ends.end(), token) != r.ends.end()) return end(text, TextEnd::token);
        text.last = token;
        text.n++;
        tokens_++;
        if (r.emit && !r.emit(token)) return end(text, TextEnd::stopped);
        if (generator_.length(sequence) + 1 >= generator_.capacity()) return end(text, TextEnd::context);
        if (text.n >= r.max_new_tokens) return end(text, TextEnd::length);
    }

    void end(Text& text, TextEnd how) {
        text.busy = false;
        if (text.request.ended) text.request.ended(how);
        text.request = {};
    }

    void drop_unwanted() {
        const auto unwanted = [](const Text& text) { return text.request.wanted && !text.request.wanted(); };
        for (Text& text : active_)
            if (text.busy && unwanted(text)) end(text, TextEnd::abandoned);
        for (auto text = waiting_.begin(); text != waiting_.end();) {
            if (!unwanted(*text)) {
                ++text;
                continue;
            }
            end(*text, TextEnd::abandoned);
            text = waiting_.erase(text);
        }
    }

    Generator& generator_;
    std::vector<Text> active_;  // by sequence
    std::deque<Text> waiting_;
    int64_t tokens_ = 0;
};

// Writes one text; returns how it ended.
template <class Generator>
TextEnd write_text(Generator& generator, TextRequest request) {
    TextEnd how = TextEnd::length;
    request.ended = [&](TextEnd end) { how = end; };
    Decoder<Generator> decoder(generator);
    decoder.add(std::move(request));
    while (decoder.step()) {
    }
    return how;
}
