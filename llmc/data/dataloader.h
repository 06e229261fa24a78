// Makes batches from token datasets, in exactly the order of Megatron-Core's GPT dataset, blend and sequential sampler, so that
// runs in both programs with the same data, sizes and seed see the same samples. Nothing is cached on disk: the indices are
// built in memory at the start, by one rank per node, and sample k is a function of only the options and k, so a resume needs
// only a number.
//
//   split.h             which documents are for training, validation and test
//   sample_order.h      the order of one dataset's samples
//   blend.h             several datasets as one
//   sequence_packing.h  conversations (data with a mask): a sample has whole ones, always masked as documents; for pairs
//                       of answers (model/preference.h) whole pairs
// Masks     reset_position_ids: positions restart at 0 after each end-of-document token (EOD). reset_attention_mask: a row
//           sees no key before its document. eod_mask_loss: no loss where the input is EOD, since the start of the
//           next document is unpredictable. The target EOD is always trained.
#pragma once
#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "../base/check.h"
#include "../base/crc32c.h"
#include "../base/text.h"
#include "../model/mesh.h"
#include "../model/preference.h"
#include "blend.h"
#include "dataset.h"
#include "sequence_packing.h"
#include "sample_order.h"
#include "split.h"

struct Batch {
    std::vector<int> tokens;           // (B, T)
    std::vector<int> targets;          // (B, T) the next token; -1: masked
    std::vector<int> positions;        // (B, T)
    std::vector<int> doc_start;        // (B, T) the first key that a row sees; empty if attention is not reset at documents
    std::vector<int> whole_doc_start;  // the same of all rows, if they are cut over ranks
    std::vector<AnswerPair> pairs;     // pairs of answers, in their rows of whole sequences
    int B = 0, T = 0;
    bool begins = true;  // sequences start here, and get the model's virtual tokens
    Zigzag part;         // T are this rank's rows of sequences that are cut over ranks

    // This rank's rows.
    Batch cut(const Axis& cp) const {
        Batch mine;
        mine.B = B;
        mine.T = T / cp.size;
        mine.begins = begins;
        mine.part = {cp};
        const auto take = [&](const std::vector<int>& all, std::vector<int>& some) {
            for (int b = 0; b < (all.empty() ? 0 : B); b++)
                for (int t = 0; t < mine.T; t++) some.push_back(all[(size_t)b * T + mine.part.row(t, mine.T)]);
        };
        take(tokens, mine.tokens);
        take(targets, mine.targets);
        take(positions, mine.positions);
        take(doc_start, mine.doc_start);
        mine.whole_doc_start = doc_start;
        mine.pairs = pairs;
        return mine;
    }

    // The same sequences, each after n virtual tokens: places without a token (-1) and without a target. Documents that are
    // masked from each other each get their own virtual tokens: their positions and doc_start count from them, from -n on.
    Batch behind(int n) const {
        const auto longer = [&](const std::vector<int>& x, int in_front, int moved) {
            std::vector<int> all((size_t)B * (n + T), in_front);
            for (size_t i = 0; i < x.size(); i++) all[i + n * (i / T + 1)] = x[i] + moved;
            return all;
        };
        Batch all;
        all.B = B;
        all.T = n + T;
        all.tokens = longer(tokens, -1, 0);
        all.positions = longer(positions, 0, n);
        if (!targets.empty()) all.targets = longer(targets, -1, 0);
        if (!doc_start.empty()) all.doc_start = longer(doc_start, 0, n);
        for (int b = 0; b < B; b++) std::iota(&all.positions[(size_t)b * all.T], &all.positions[(size_t)b * all.T] + n, 0);
        return all;
    }
    // The rows at which virtual tokens start.
    std::vector<int> virtual_rows() const {
        std::vector<int> rows;
        for (int i = 0; i < B * T; i++)
            if (tokens[i] < 0 && (i % T == 0 || tokens[i - 1] >= 0)) rows.push_back(i);
        return rows;
    }

    // The keys of the whole sequences that this batch has some rows of.
    Batch keys_of_all_rows() const {
        Batch all;
        all.B = B;
        all.T = T * part.cp.size;
        all.tokens.resize((size_t)B * (size_t)all.T);
        all.doc_start = whole_doc_start;
        return all;
    }
    // (B, T) the first key that a row sees if a query sees at most `window` keys, itself included.
    std::vector<int> first_keys(int window) const {
        std::vector<int> first = doc_start;
        first.resize(tokens.size());
        for (size_t i = 0; i < first.size(); i++) first[i] = std::max(first[i], part.row((int)(i % (size_t)T), T) - window + 1);
        return first;
    }
};

struct DataOptions {
    Blend blend;
    std::string split = "969, 30, 1";
    DataSplit part = DataSplit::train;  // whole: all documents, regardless of split
    bool validates = true;              // the run needs validation data
    int T = 0;
    uint32_t seed = 1234;
    int64_t n_samples = 0;  // number of samples that will be read; 0: one pass over the data, each sample once, for any weights
    bool reshuffle_each_epoch = false;
    bool reset_position_ids = false, reset_attention_mask = false, eod_mask_loss = false;
    bool pairs = false;           // compare answers: the data must hold pairs of answers, and otherwise must not
    int eod = -1;                 // needed by the three above
    int vocab_size = 0;           // larger tokens are refused when read; 0: not checked
    int virtual_tokens = 0;       // number in front of each sample, outside its T tokens, and of each conversation
    TokenizerIdentity tokenizer;  // the run's, or else the first dataset's if known
    // Holds the order. All ranks create a loader on the memory that they share.
    std::shared_ptr<NodeMemory> memory = std::make_shared<NodeMemory>();
};

// One row of the start-up table.
struct DataSummary {
    std::string name;
    std::string note;           // how it was split, if noteworthy
    double share;               // fraction of all samples
    int64_t documents, tokens;  // in this part of the split
    int64_t samples;            // to be read
    double epochs;              // passes over the tokens
    std::string packing;        // of conversations: how they were packed
    int64_t in_loss = 0;        // targets in an epoch
};

class DataLoader {
public:
    explicit DataLoader(const DataOptions& options) : DataLoader(options, open_all(options.blend.paths)) {}
    // Reads datasets that are already open, instead of the paths in options.
    DataLoader(const DataOptions& options, std::vector<TokenDataset> data) : o_(options) {
        CHECK(o_.T > 0 && o_.n_samples >= 0, "T %d, %lld samples", o_.T, (long long)o_.n_samples);
        if (o_.eod < 0 && (o_.reset_position_ids || o_.reset_attention_mask || o_.eod_mask_loss))
            fail_usage(
                "--reset-position-ids, --reset-attention-mask and --eod-mask-loss need to know the end-of-document token; "
                "HINT: give --tokenizer");
        refuse_missing(data.empty(), "the data", "--data-path PREFIX, as `train_gpt prepare` made it");
        CHECK(o_.blend.weights.empty() || o_.blend.weights.size() == data.size(), "weights and paths");
        for (const TokenDataset& d : data) check_tokenizer(d);
        for (TokenDataset& d : data) add(std::move(d));
        take_split();
        if (sources_.empty()) return;  // no validation
        for (Source& s : sources_) {
            s.first_pair = n_pairs_;
            if (o_.pairs) n_pairs_ += s.data.n_documents() / 2;
        }
        order(o_.n_samples);
    }

    // Orders n samples (0: one epoch), more or fewer than before, if the order does not depend on their number (order_problem).
    void order(int64_t n) {
        o_.n_samples = n;
        const std::vector<int64_t> wanted = samples_wanted(n);
        for (size_t j = 0; j < sources_.size(); j++) {
            Source& s = sources_[j];
            if (s.packing) s.packing->order(wanted[j]);
            else s.order.emplace(s.data, s.part, o_.T, wanted[j], o_.seed, o_.reshuffle_each_epoch, *o_.memory);
        }
        if (single()) n_samples_ = n > 0 ? n : sources_[0].n_ordered();
        else plan_blend();
    }

    int64_t n_samples() const { return n_samples_; }  // 0: no data has enough tokens for validation
    int64_t samples_of_one_pass() const {
        const std::vector<double> one_epoch = samples_of_one_epoch();
        return (int64_t)std::accumulate(one_epoch.begin(), one_epoch.end(), 0.0);
    }
    const TokenizerIdentity& tokenizer() const { return o_.tokenizer; }
    // True if the split was by tokens, unlike Megatron's, because a split by documents was not possible.
    bool split_by_tokens() const {
        return std::any_of(sources_.begin(), sources_.end(), [](const Source& s) { return !s.note.empty(); });
    }
    int T() const { return o_.T; }
    // The number of pairs of answers in the whole data, before any split.
    int64_t n_pairs() const { return n_pairs_; }
    // The reference's log-probabilities of chosen and rejected answers, which batches then have; NaN: unknown.
    void set_reference(std::vector<double> log_p /*(n_pairs, 2)*/) {
        CHECK(log_p.size() == 2 * (size_t)n_pairs_, "%zu log-probabilities of %lld pairs", log_p.size(), (long long)n_pairs_);
        reference_ = std::move(log_p);
    }
    uint32_t checksum_of_pairs() const {
        uint32_t sum = 0;
        std::vector<int> text;
        for (const Source& s : sources_)
            for (int64_t d = 0; d < s.data.n_documents(); d++) {
                const auto n = (size_t)s.data.length(d);
                text.resize(n);
                s.data.read(d, 0, (int64_t)n, text.data());
                sum = crc32c(s.data.loss_mask(d), n, crc32c(text.data(), n * sizeof(int), sum));
            }
        return sum;
    }
    // The template of each dataset; empty: running text.
    Strings chat_templates() const {
        Strings templates;
        for (const Source& s : sources_) templates.push_back(s.data.chat_template());
        return templates;
    }
    bool has_conversations() const {
        return std::any_of(sources_.begin(), sources_.end(), [](const Source& s) { return s.packing.has_value(); });
    }

    // The name of each dataset in logs: the last component of its path if these differ, else the path.
    std::vector<std::string> set_names() const {
        std::vector<std::string> paths, names;
        for (const Source& s : sources_) {
            paths.push_back(s.data.name());
            names.push_back(std::filesystem::path(s.data.name()).filename().string());
        }
        std::vector<std::string> sorted = names;
        std::sort(sorted.begin(), sorted.end());
        return std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end() ? names : paths;
    }
    // The samples [first, first + n), grouped by dataset, in their order.
    std::vector<std::vector<int64_t>> samples_by_set(int64_t first, int64_t n) const {
        std::vector<std::vector<int64_t>> samples(sources_.size());
        for (int64_t i = first; i < first + n; i++) samples[locate(i).dataset].push_back(i);
        return samples;
    }

    // Reads samples [first, first + B). Thread-safe.
    void fetch(int64_t first, int B, Batch& out) const {
        std::vector<int64_t> samples((size_t)B);
        std::iota(samples.begin(), samples.end(), first);
        gather(samples.data(), B, out);
    }
    void gather(const int64_t* samples, int B, Batch& out) const {
        const int T = o_.T;
        out.B = B;
        out.T = T;
        out.pairs.clear();
        for (std::vector<int>* x : {&out.tokens, &out.targets, &out.positions}) x->resize((size_t)B * T);
        out.doc_start.resize(o_.reset_attention_mask || has_conversations() ? (size_t)B * T : 0);
        std::vector<int> text(T + 1);
        for (int b = 0; b < B; b++) {
            const BlendEntry e = locate(samples[b]);
            const Source& source = sources_[e.dataset];
            const size_t row = (size_t)b * T;
            if (source.packing) {
                read_conversations(source, e.index, out, row);
                continue;
            }
            source.order->read(source.data, e.index, text.data());
            check_tokens(source, e.index, text);
            std::copy_n(text.begin(), T, out.tokens.begin() + row);
            std::copy_n(text.begin() + 1, T, out.targets.begin() + row);
            mask(out, row);
        }
    }

    // Unmasked targets in the samples [first, first + n).
    int64_t unmasked(int64_t first, int64_t n) const {
        int64_t count = n * o_.T;
        if (!o_.eod_mask_loss && !has_conversations()) return count;
        std::vector<int> text(o_.T + 1);
        for (int64_t i = first; i < first + n; i++) {
            const BlendEntry e = locate(i);
            const Source& source = sources_[e.dataset];
            if (source.packing) count -= o_.T - source.packing->in_loss(e.index);
            if (source.packing || !o_.eod_mask_loss) continue;
            source.order->read(source.data, e.index, text.data());
            count -= std::count(text.begin(), text.end() - 1, o_.eod);
        }
        return count;
    }

    // Terms of the loss in samples [first, first + n): pairs of answers, if compared, else targets.
    int64_t terms(int64_t first, int64_t n) const {
        if (!o_.pairs) return unmasked(first, n);
        int64_t pairs = 0;
        for (int64_t i = first; i < first + n; i++) {
            const BlendEntry e = locate(i);
            pairs += sources_[e.dataset].packing->pieces(e.index);
        }
        return pairs;
    }

    // The reason why the order of the samples differs from a run planned for n samples; empty if it does not. Megatron's order
    // depends on how often each dataset is read over the whole run, so extending a run may change it.
    std::string order_problem(int64_t n) const {
        const std::vector<Epochs> before = epochs(n), now = epochs(o_.n_samples);
        for (size_t j = 0; j < sources_.size(); j++) {
            if (before[j] == now[j]) continue;
            int64_t kept = n, lost = o_.n_samples;  // the order is preserved up (or down) to a number between them
            while (std::abs(lost - kept) > 1) {
                const int64_t middle = kept + (lost - kept) / 2;
                (epochs(middle) == before ? kept : lost) = middle;
            }
            return format(
                "the order of samples would change: %s is now read in %s for %lld samples, the checkpoint's %lld used %s; "
                "some samples would be repeated, others never used. HINT: with at %s %lld samples the order is kept",
                sources_[j].data.name().c_str(), now[j].text().c_str(), (long long)o_.n_samples, (long long)n,
                before[j].text().c_str(), lost > kept ? "most" : "least", (long long)kept);
        }
        return "";
    }

    // Checksum of the first and last tokens of a dataset, by its row in summary(), for any split.
    uint32_t checksum(size_t row) const { return sources_[row].data.checksum_of_ends(); }
    std::vector<DataSummary> summary() const {
        std::vector<int64_t> used(sources_.size(), 0);
        if (!blend_) used[0] = n_samples_;
        for (int64_t i = 0; blend_ && i < n_samples_; i++) used[blend()[i].dataset]++;
        std::vector<DataSummary> rows;
        for (size_t j = 0; j < sources_.size(); j++) {
            const Source& s = sources_[j];
            const double epochs =
                s.packing ? (double)used[j] / (double)s.packing->n_samples() : (double)used[j] * o_.T / (double)s.tokens;
            rows.push_back({s.data.name(), s.note, (double)used[j] / (double)n_samples_, s.part.end - s.part.begin, s.tokens,
                            used[j], epochs, s.packing ? s.packing->text() : "",
                            s.packing ? s.packing->in_loss_of_epoch() : 0});
        }
        return rows;
    }

private:
    struct Source {
        TokenDataset data;
        DocumentRange part{};
        int64_t tokens = 0;  // in this part of the split
        std::string note{};
        std::optional<SampleOrder> order{};  // of text
        std::optional<Packing> packing{};    // of conversations
        int64_t first_pair = 0;              // number of its first pair of answers

        int64_t n_ordered() const { return packing ? packing->n_ordered() : order->n_samples(); }
    };

    static std::vector<TokenDataset> open_all(const std::vector<std::string>& paths) {
        std::vector<TokenDataset> data;
        for (const std::string& path : paths) data.push_back(TokenDataset::open(path));
        return data;
    }

    void check_tokenizer(const TokenDataset& data) {
        const TokenizerIdentity& made = data.tokenizer();
        if (!o_.tokenizer.known()) o_.tokenizer = made;
        if (!made.known() || made.hash == o_.tokenizer.hash) return;
        fail(
            "%s was prepared with another tokenizer than this run's, so its ids mean other text:\n  the data's  %s\n  the "
            "run's   %s\nHINT: train_gpt prepare --tokenizer %s ... prepares data for this run, or train a new model with the "
            "data's tokenizer. If the ids are known to agree, remove the data's %s to skip the check",
            data.name().c_str(), made.text().c_str(), o_.tokenizer.text().c_str(), shell_word(o_.tokenizer.path).c_str(),
            origin_ending);
    }

    // Adds a dataset; shards without weights are joined into one stream of tokens.
    void add(TokenDataset data) {
        if (data.has_pairs() && !o_.pairs)
            fail_usage("%s contains pairs of answers for preference training; HINT: train --model DIR --dpo-beta 0.1",
                       data.name().c_str());
        if (!data.has_pairs() && o_.pairs)
            fail_usage(
                "%s contains no pairs of answers, which --dpo-beta needs; HINT: train_gpt prepare --preference creates them",
                data.name().c_str());
        if (o_.blend.weights.empty() && !sources_.empty() && data.is_shards() && sources_.back().data.is_shards())
            sources_.back().data.append_shards(std::move(data));
        else sources_.push_back({std::move(data)});
    }

    // Selects this part of the split in every source. A source without samples is refused; one with too few tokens for training
    // and validation is left out of validation.
    void take_split() {
        for (Source& s : sources_) {
            const char* name = s.data.name().c_str();
            const int64_t n = s.data.n_documents();
            if (s.data.n_tokens() == 0) fail("%s is empty: it holds no tokens", name);
            if (o_.part == DataSplit::whole) s.part = {0, n};
            else {
                const SplitParts split = s.data.has_mask() ? split_conversations(s.data, o_.split, o_.validates)
                                                           : split_data(s.data, o_.split, o_.T, o_.validates);
                s.part = split.parts[(int)o_.part];
                s.note = split.note;
            }
            s.tokens = s.part.tokens(s.data);
            if (s.part.empty() && !s.note.empty()) continue;
            if (s.part.empty())
                fail("%s has no data for %s: its share in --split \"%s\" is 0; HINT: another --split", name,
                     split_name(o_.part), o_.split.c_str());
            if (s.data.has_mask()) {
                s.packing.emplace(s.data, s.part.begin, s.part.end, o_.T, o_.virtual_tokens, o_.seed);
                if (s.packing->n_samples() == 0 && o_.pairs)
                    fail("%s has no pair of answers for %s of at most %d tokens; HINT: all fit in --seq-length %lld", name,
                         split_name(o_.part), o_.T, (long long)s.packing->longest());
                if (s.packing->n_samples() == 0)
                    fail("%s has no conversation%s with an answer in its first %d tokens; HINT: a longer --seq-length", name,
                         o_.part == DataSplit::whole ? "" : format(" for %s", split_name(o_.part)).c_str(), o_.T + 1);
                continue;
            }
            if (s.tokens <= o_.T)
                fail("%s has %s token%s, fewer than one sample of --seq-length %d and the token after it; HINT: %s", name,
                     with_commas(s.tokens).c_str(), s.tokens == 1 ? "" : "s", o_.T,
                     s.tokens < 2 ? "more text" : format("more text, or --seq-length %lld", (long long)s.tokens - 1).c_str());
        }
        for (size_t j = sources_.size(); j-- > 0;) {
            if (!sources_[j].part.empty()) continue;
            sources_.erase(sources_.begin() + (ptrdiff_t)j);
            if (!o_.blend.weights.empty()) o_.blend.weights.erase(o_.blend.weights.begin() + (ptrdiff_t)j);
        }
    }

    bool single() const { return sources_.size() == 1 && o_.blend.weights.empty(); }
    bool weighted(int64_t n) const { return !o_.blend.weights.empty() && n > 0; }
    std::vector<double> samples_of_one_epoch() const {
        std::vector<double> samples;
        for (const Source& s : sources_) {
            const int64_t whole = s.packing ? s.packing->n_samples() : (s.tokens - 1) / o_.T;
            samples.push_back((double)whole);
        }
        return samples;
    }
    // The sources' shares of n samples. Megatron normalizes given weights twice; the second time can change the last bit.
    std::vector<double> shares(int64_t n) const { return normalized(weighted(n) ? o_.blend.weights : samples_of_one_epoch()); }

    // The number of samples to plan from each source, for a total of n samples (0: one epoch).
    std::vector<int64_t> samples_wanted(int64_t n) const {
        if (single()) return {n};
        const std::vector<double> one_epoch = samples_of_one_epoch(), share = shares(n);
        const double all = std::accumulate(one_epoch.begin(), one_epoch.end(), 0.0);
        const bool once = n == 0 || (!weighted(n) && (double)n <= all);
        std::vector<int64_t> wanted;
        for (const double x : share) wanted.push_back(once ? 0 : (int64_t)std::ceil(std::ceil((double)n * x) * (1 + 0.005)));
        return wanted;
    }
    std::vector<Epochs> epochs(int64_t n) const {
        std::vector<Epochs> epochs;
        const std::vector<int64_t> wanted = samples_wanted(n);
        for (size_t j = 0; j < sources_.size(); j++)
            epochs.push_back(sources_[j].packing || o_.reshuffle_each_epoch
                                 ? Epochs()  // their order does not depend on the number of epochs
                                 : epochs_for(sources_[j].tokens, o_.T, wanted[j], sources_[j].data.name()));
        return epochs;
    }

    void plan_blend() {
        const std::vector<double> share = shares(o_.n_samples);
        n_samples_ = o_.n_samples > 0 ? o_.n_samples : samples_of_one_pass();
        std::vector<int64_t> available;
        for (const Source& s : sources_) available.push_back(s.n_ordered());
        blend_.reset();
        blend_ = o_.memory->filled((size_t)n_samples_ * sizeof(BlendEntry),
                                   format("the blend of %s samples", with_commas(n_samples_).c_str()),
                                   [&](char* memory, const std::function<void()>& tick) {
                                       blend_samples(weighted(o_.n_samples) ? normalized(share) : share, available, n_samples_,
                                                     (BlendEntry*)memory, tick);
                                   });
    }
    const BlendEntry* blend() const { return (const BlendEntry*)blend_.get(); }

    // The dataset of a sample and the sample's index there.
    BlendEntry locate(int64_t sample) const {
        if (sample < 0 || sample >= n_samples_)
            fail("sample %lld was requested, but the data has %lld; HINT: the counters in training/state.json are damaged",
                 (long long)sample, (long long)n_samples_);
        return blend_ ? blend()[sample] : BlendEntry{0, (uint32_t)sample};
    }
    // The conversations of a sample, each from position 0, followed by padding, which is never a target.
    void read_conversations(const Source& source, int64_t sample, Batch& out, size_t row) const {
        std::vector<int> text;
        // A conversation starts with the virtual tokens before it; the sample's first conversation's are not in the batch yet.
        const auto fill = [&](int place, int places, int before) {
            for (int t = std::max(0, place - before); t < place + places; t++) {
                out.positions[row + t] = t - place;
                out.doc_start[row + t] = place - before;
                if (t < place) out.tokens[row + t] = out.targets[row + t] = -1;
            }
        };
        const int used = source.packing->each_conversation(sample, [&](int64_t document, int place, int places) {
            text.resize((size_t)places + 1);
            source.data.read(document, 0, places + 1, text.data());
            check_tokens(source, document, 0, text);
            const char* mask = source.data.loss_mask(document) + 1;
            fill(place, places, o_.virtual_tokens);
            if (o_.pairs) add_answer(source, document, (int)row + place, places, out.pairs);
            for (int t = 0; t < places; t++) {
                out.tokens[row + place + t] = text[(size_t)t];
                out.targets[row + place + t] = mask[t] ? text[(size_t)t + 1] : -1;
            }
        });
        fill(used, o_.T - used, 0);
        std::fill_n(out.tokens.begin() + (std::ptrdiff_t)(row + used), o_.T - used, 0);
        std::fill_n(out.targets.begin() + (std::ptrdiff_t)(row + used), o_.T - used, -1);
    }

    // The first of a pair's two documents is the chosen answer with its prompt.
    void add_answer(const Source& source, int64_t document, int row, int rows, std::vector<AnswerPair>& pairs) const {
        const bool chosen = document % 2 == 0;
        if (chosen) pairs.push_back({source.first_pair + document / 2, {}, {}});
        AnswerPair& pair = pairs.back();
        Answer& answer = chosen ? pair.chosen : pair.rejected;
        const char* mask = source.data.loss_mask(document) + 1;
        answer = {row, rows, (int)std::count(mask, mask + rows, 1), 0, 0};
        if (reference_.empty()) return;
        answer.reference = reference_[2 * (size_t)pair.number + (chosen ? 0 : 1)];
        if (std::isnan(answer.reference))
            fail(
                "the reference's log-probability of answers in %s is missing: the pair was dropped when the run started with "
                "a shorter --seq-length; HINT: use that --seq-length, or start a new run",
                source.data.describe_position(document, 0).c_str());
    }

    // The first token outside the vocabulary; the number of tokens if there is none.
    size_t find_foreign(const std::vector<int>& text) const {
        unsigned largest = 0;  // unsigned: a negative token counts as larger than any
        for (const int token : text) largest = std::max(largest, (unsigned)token);
        if (largest < limit()) return text.size();
        return (size_t)(std::find_if(text.begin(), text.end(), [&](int token) { return (unsigned)token >= limit(); }) -
                        text.begin());
    }
    unsigned limit() const { return o_.vocab_size > 0 ? (unsigned)o_.vocab_size : (unsigned)INT_MAX; }
    // Checks `text`, which starts with this token of the document.
    void check_tokens(const Source& source, int64_t document, int64_t token, const std::vector<int>& text) const {
        const size_t i = find_foreign(text);
        if (i == text.size()) return;
        fail("%s is %d, outside the vocabulary of %u tokens; HINT: the data must be prepared with the model's own tokenizer",
             source.data.describe_position(document, token + (int64_t)i).c_str(), text[i], limit());
    }
    // Checks a sample's text, which crosses documents.
    void check_tokens(const Source& source, int64_t sample, const std::vector<int>& text) const {
        const size_t i = find_foreign(text);
        if (i == text.size()) return;
        const SampleOrder& order = *source.order;
        const auto [entry, token] = order.place_of(source.data, order.shuffled(sample) * o_.T + (int64_t)i);
        const int64_t document = order.document(entry);
        check_tokens(source, document, source.part.first_token(document) + token, {text[i]});
    }

    // Positions, masked targets and the start of each token's document, for the T tokens at `row`.
    void mask(Batch& out, size_t row) const {
        const int* tokens = out.tokens.data() + row;
        int start = 0;  // first token of the current document
        for (int t = 0; t < o_.T; t++) {
            const bool ends = o_.eod >= 0 && tokens[t] == o_.eod;
            out.positions[row + t] = o_.reset_position_ids ? t - start : t;
            if (!out.doc_start.empty()) out.doc_start[row + t] = o_.reset_attention_mask ? start : -o_.virtual_tokens;
            if (o_.eod_mask_loss && ends) out.targets[row + t] = -1;
            if (ends) start = t + 1;
        }
    }

    DataOptions o_;
    std::vector<Source> sources_;
    std::shared_ptr<const char> blend_;  // BlendEntry of each sample; null: the samples of the only source
    int64_t n_samples_ = 0, n_pairs_ = 0;
    std::vector<double> reference_;  // (n_pairs, 2), or empty
};

// Cross-entropy of the validation tokens under the frequencies of the training tokens (each count plus one): the loss of a
// model without any context. Reads at most 2000 samples of each, spread evenly.
inline double unigram_loss(const DataLoader& train, const DataLoader& valid, int64_t valid_samples, int V) {
    std::vector<double> count(V, 1.0);
    double total = V;
    Batch batch;
    int64_t reads = std::min<int64_t>(2000, train.n_samples());
    for (int64_t i = 0; i < reads; i++) {
        train.fetch(i * train.n_samples() / reads, 1, batch);
        for (const int token : train.has_conversations() ? batch.targets : batch.tokens) {
            if (token < 0) continue;
            count[token]++;
            total++;
        }
    }
    double loss = 0, n = 0;
    reads = std::min<int64_t>(2000, valid_samples);
    for (int64_t i = 0; i < reads; i++) {
        valid.fetch(i * valid_samples / reads, 1, batch);
        for (int target : batch.targets)
            if (target >= 0) {
                loss -= std::log(count[target] / total);
                n++;
            }
    }
    return loss / n;
}
