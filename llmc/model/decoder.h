// Generates many sequences at a time (continuous batching; Yu et al., "Orca", OSDI 2022): every step adds one token to each, in
// one pass that reads the weights once. A request starts as soon as another one ends; its prompt is a separate pass. Each
// request has its own random numbers, so its output does not depend on the others, provided the kernels' bits do not.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <numeric>
#include <utility>
#include <vector>

#include "../base/rng.h"
#include "../cpu/parallel.h"
#include "sampler.h"

// Capacity of the key/value cache: sequences generated at a time, and tokens of the longest, virtual ones included (0: the
// model's context).
struct KvCacheShape {
    int sequences = 0, tokens = 0;
};
// A token that continues one of the sequences.
struct NextToken {
    int sequence, token;
};

enum class TextEnd {
    token,      // one of `ends`
    stopped,    // by emit
    length,     // max_new_tokens reached
    context,    // that is full
    abandoned,  // no longer wanted
};

// The log-probability of a token after the ones before it, at temperature 1, and the most likely tokens with theirs.
struct TokenScore {
    int token = 0;
    double log_probability = 0;
    std::vector<std::pair<int, double>> best{};  // (token, log-probability), the most likely first
};

// A generation request: up to max_new_tokens after `prompt`, which has at least one token.
struct TextRequest {
    std::vector<int> prompt;
    int max_new_tokens = 0;
    SamplingOptions sampling{};
    uint64_t seed = 0;  // draws are a function of seed, sample, and the number of earlier tokens
    uint32_t sample = 0;
    std::vector<int> ends{};                   // tokens that end the sequence; not part of the output
    std::function<bool(int token)> emit{};     // called with each token, unless empty; false ends the sequence
    std::function<void(TextEnd)> ended{};      // called once, unless empty
    std::function<bool()> wanted{};            // called before each step; empty: always wanted
    std::function<bool(int token)> allowed{};  // tokens that may be drawn; empty: all
    std::vector<int> forced{};  // follow the prompt instead of sampled tokens; neither emitted nor counted in max_new_tokens
    std::function<void(const TokenScore&)> scored{};  // called with each token, even a forced or an ending one, unless empty
    int alternatives = 0;                             // the number of most likely tokens in a score
};

// Generator, as in train_gpt.cu, provides sequences(), capacity(), length(sequence), prompt(sequence, tokens), append(next
// tokens), and logits() for the last prompt() or append().
template <class Generator>
class Decoder {
public:
    // prompts_per_step: most prompts that a step reads; 0: as many as there is room for. Each is a pass of its own, for which
    // the other texts wait.
    explicit Decoder(Generator& generator, int prompts_per_step = 0)
        : generator_(generator), active_((size_t)generator.sequences()), prompts_per_step_(prompts_per_step) {}

    void add(TextRequest request) { waiting_.push_back({std::move(request)}); }
    size_t waiting() const { return waiting_.size(); }
    int64_t tokens() const { return tokens_; }  // emitted or forced so far

    // Generates one token of each sequence. Returns false if no request is left.
    bool step() {
        drop_unwanted();
        int prompts = 0;
        for (size_t s = 0; s < active_.size(); s++)
            while (!active_[s].busy && !waiting_.empty() && (!prompts_per_step_ || prompts < prompts_per_step_)) {
                begin((int)s);
                prompts++;
            }
        std::vector<NextToken> next;
        for (size_t s = 0; s < active_.size(); s++)
            if (active_[s].busy) next.push_back({(int)s, active_[s].last});
        if (next.empty()) return !waiting_.empty();
        generator_.append(next);
        choose(next);
        return true;
    }

private:
    struct Text {
        TextRequest request;
        int n = 0, last = 0;  // tokens so far, and the last one
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

    // Samples the next tokens of these sequences from the logits of their last tokens.
    void choose(std::vector<NextToken> next) {
        const std::vector<float>& logits = generator_.logits();
        const size_t V = logits.size() / next.size();
        std::vector<TokenScore> scores(next.size());
        cpu::parallel_tasks(next.size(), [&](size_t i) {
            const Text& text = active_[(size_t)next[i].sequence];
            const TextRequest& r = text.request;
            const float* row = &logits[i * V];
            if ((size_t)text.n < r.forced.size()) next[i].token = r.forced[(size_t)text.n];
            else {
                const double uniform = uniform_at(r.seed, RngPurpose::sampling, r.sample, (uint64_t)text.n - r.forced.size());
                next[i].token =
                    r.allowed ? sample_allowed(row, (int)V, r, uniform) : sample_token(row, (int)V, r.sampling, uniform);
            }
            if (r.scored && next[i].token >= 0) scores[i] = score(row, (int)V, r, next[i].token);
        });
        for (size_t i = 0; i < next.size(); i++) take(next[i].sequence, next[i].token, scores[i]);
    }
    // The other tokens get probability 0. Returns -1 if no token is allowed.
    static int sample_allowed(const float* row, int V, const TextRequest& r, double uniform) {
        std::vector<float> logits(row, row + V);
        int n = 0;
        for (int i = 0; i < V; i++)
            if (const bool allowed = r.allowed(i); allowed) n++;
            else logits[(size_t)i] = -INFINITY;
        return n > 0 ? sample_token(logits.data(), V, r.sampling, uniform) : -1;
    }
    static TokenScore score(const float* row, int V, const TextRequest& r, int token) {
        const double log_sum = log_sum_exp(row, V);
        TokenScore s;
        s.token = token;
        s.log_probability = row[token] - log_sum;
        for (const int id : most_likely(row, r.sampling.known(V), r.alternatives)) s.best.emplace_back(id, row[id] - log_sum);
        return s;
    }

    void take(int sequence, int token, const TokenScore& score) {
        Text& text = active_[(size_t)sequence];
        const TextRequest& r = text.request;
        if (token < 0) return end(text, TextEnd::stopped);
        if (r.scored) r.scored(score);
        const bool forced = (size_t)text.n < r.forced.size();
        if (!forced && std::find(r.ends.begin(), r.ends.end(), token) != r.ends.end()) return end(text, TextEnd::token);
        text.last = token;
        text.n++;
        tokens_++;
        if (!forced && r.emit && !r.emit(token)) return end(text, TextEnd::stopped);
        if (generator_.length(sequence) + 1 >= generator_.capacity()) return end(text, TextEnd::context);
        if (text.n >= r.max_new_tokens + (int)r.forced.size()) return end(text, TextEnd::length);
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
    int prompts_per_step_;
    std::deque<Text> waiting_;
    int64_t tokens_ = 0;
};

// Generates one sequence; returns how it ended.
template <class Generator>
TextEnd generate(Generator& generator, TextRequest request) {
    TextEnd how = TextEnd::length;
    request.ended = [&](TextEnd end) { how = end; };
    Decoder<Generator> decoder(generator);
    decoder.add(std::move(request));
    while (decoder.step()) {
    }
    return how;
}
