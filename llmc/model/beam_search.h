// Beam search: finds a likely text instead of drawing tokens. Each step extends the N most likely beginnings of a text, the
// beams, by one token each, and keeps the N most likely results; texts that end are compared by log-probability / length^P. As
// in transformers (early_stopping=False): the search ends when N texts have ended and the best beam, at its present length,
// scores no more than the worst of them.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "../base/check.h"
#include "../cpu/parallel.h"
#include "decoder.h"

struct BeamOptions {
    int beams = 1;
    double length_penalty = 1;  // P
};
struct FoundText {
    std::vector<int> tokens;
    double score;
    TextEnd end;
};

// Generator: as for a Decoder, with room for all beams, and copy(from, to): sequence `to` becomes a copy of `from`. Uses the
// prompt, max_new_tokens, ends and sampling.tokens of the request.
template <class Generator>
class BeamSearch {
public:
    BeamSearch(Generator& generator, TextRequest request, const BeamOptions& options)
        : generator_(generator), request_(std::move(request)), options_(options) {
        CHECK(options.beams >= 1 && options.beams <= generator.sequences(), "%d beams", options.beams);
    }

    // Adds a token to all beams. Returns false if the search is over.
    bool step() {
        if (length_ == 0) generator_.prompt(0, request_.prompt);
        else append_last_tokens();
        const int room = generator_.capacity() - generator_.length(beams_[0].sequence);
        if (room <= 0) return false;
        extend(best_candidates(), length_ + 1 == request_.max_new_tokens || room == 1);
        return !is_over();
    }
    int64_t tokens() const { return length_; }  // of the longest texts so far

    // The texts that have ended, at most N, the best first.
    const std::vector<FoundText>& found() const { return found_; }

private:
    struct Beam {
        int sequence = 0;  // of the generator
        std::vector<int> tokens{};
        double log_probability = 0;
    };
    struct Candidate {  // a beam and its next token
        size_t beam;
        int token;
        double log_probability;
    };

    void append_last_tokens() {
        std::vector<NextToken> next;
        for (const Beam& beam : beams_) next.push_back({beam.sequence, beam.tokens.back()});
        generator_.append(next);
    }

    // Enough of them that N do not end the text, the most likely first.
    std::vector<Candidate> best_candidates() {
        const std::vector<float>& logits = generator_.logits();
        const auto V = (int)(logits.size() / beams_.size()), n_ends = (int)request_.ends.size();
        const int wanted = std::max(2, 1 + n_ends) * options_.beams;
        std::vector<std::vector<Candidate>> of_beams(beams_.size());
        cpu::parallel_tasks(beams_.size(), [&](size_t b) {
            const float* const row = &logits[b * (size_t)V];
            const double before = beams_[b].log_probability - log_sum_exp(row, V);
            for (const int id : most_likely(row, request_.sampling.known(V), wanted))
                of_beams[b].push_back({b, id, before + row[id]});
        });
        std::vector<Candidate> all;
        for (const auto& candidates : of_beams) all.insert(all.end(), candidates.begin(), candidates.end());
        std::stable_sort(all.begin(), all.end(),
                         [](const Candidate& x, const Candidate& y) { return x.log_probability > y.log_probability; });
        all.resize(std::min(all.size(), (size_t)wanted));
        return all;
    }

    // Makes the candidates that do not end the new beams. last: every text ends here.
    void extend(const std::vector<Candidate>& candidates, bool last) {
        length_++;
        const auto N = (size_t)options_.beams;
        std::vector<Candidate> kept;
        for (size_t i = 0; i < candidates.size(); i++) {
            const Candidate& c = candidates[i];
            const bool ends = std::count(request_.ends.begin(), request_.ends.end(), c.token) > 0;
            if (!ends && !last && kept.size() < N) kept.push_back(c);
            if ((ends || last) && i < N) finish(c, ends);
        }
        std::vector<Beam> next;
        for (const Candidate& c : kept) {
            next.push_back({-1, beams_[c.beam].tokens, c.log_probability});
            next.back().tokens.push_back(c.token);
        }
        assign_sequences(kept, next);
        beams_ = std::move(next);
    }
    void finish(const Candidate& c, bool ends) {
        FoundText text = {beams_[c.beam].tokens, score(c.log_probability), ends ? TextEnd::token : end_of_room()};
        if (!ends) text.tokens.push_back(c.token);
        const auto worse = [](const FoundText& x, const FoundText& y) { return x.score > y.score; };
        found_.insert(std::upper_bound(found_.begin(), found_.end(), text, worse), std::move(text));
        if ((int)found_.size() > options_.beams) found_.pop_back();
    }
    TextEnd end_of_room() const { return length_ == request_.max_new_tokens ? TextEnd::length : TextEnd::context; }
    double score(double log_probability) const { return log_probability / std::pow((double)length_, options_.length_penalty); }

    // The first beam that continues a sequence keeps it; the others copy theirs to sequences that no beam continues.
    void assign_sequences(const std::vector<Candidate>& kept, std::vector<Beam>& next) {
        std::vector<bool> taken((size_t)options_.beams, false);
        for (size_t i = 0; i < next.size(); i++)
            if (const int own = beams_[kept[i].beam].sequence; !taken[(size_t)own]) {
                next[i].sequence = own;
                taken[(size_t)own] = true;
            }
        size_t free = 0;
        for (size_t i = 0; i < next.size(); i++) {
            if (next[i].sequence >= 0) continue;
            while (taken[free]) free++;
            next[i].sequence = (int)free;
            taken[free] = true;
            generator_.copy(beams_[kept[i].beam].sequence, (int)free);
        }
    }

    bool is_over() const {
        if (beams_.empty()) return true;
        return (int)found_.size() == options_.beams && score(beams_[0].log_probability) <= found_.back().score;
    }

    Generator& generator_;
    TextRequest request_;
    BeamOptions options_;
    std::vector<Beam> beams_ = std::vector<Beam>(1);  // the most likely first
    std::vector<FoundText> found_;
    int length_ = 0;  // tokens of each beam
};
