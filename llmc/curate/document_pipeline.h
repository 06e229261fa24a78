// Documents through stages, from files to shards: the same output bytes for any number of threads, memory bounded by a batch,
// and an interrupted pass resumes after its last whole shard.
//
//   read -> stage, stage, ..., lines of JSON on all threads -> counts, in the documents' order -> part-00000.jsonl.zst, ...
//
// State. Whenever a shard is complete, a state file records the input position after its last document, the output so far, and
// all counts. A pass that finds such a file resumes from there: earlier files are skipped, and so are the completed documents
// of the current one. The incomplete shard is written again, to the same bytes.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "../base/check.h"
#include "../base/file.h"
#include "../base/json.h"
#include "../base/rng.h"
#include "../text/document_reader.h"
#include "../text/document_writer.h"
#include "document.h"

struct Stage {
    std::string name;                                           // as in the summary: "heuristics"
    std::function<DocumentVerdict(Document&, Changes&)> apply;  // a pure function of the document
};

// ---- counts ----------------------------------------------------------------------------------------------------------------
// A dropped document, as the report shows it.
struct DroppedSample {
    uint64_t lot = 0;  // samples with the lowest lots are shown: a fixed choice from the whole corpus
    int64_t number = 0;
    std::string source, detail, text;
};

// The counts of one rule.
struct RuleCount {
    int64_t dropped = 0, dropped_bytes = 0;  // documents
    int64_t changed = 0, places = 0;         // documents that it changed, and places
    std::vector<DroppedSample> samples;
};

// Documents by their length: bucket k counts lengths of 2^k to 2^(k+1) - 1 bytes.
using LengthCounts = std::array<int64_t, 40>;

struct StageCounts {
    std::string name;
    int64_t documents_in = 0, bytes_in = 0, documents_kept = 0, bytes_kept = 0;
    std::map<std::string, RuleCount> rules;
};

struct Counts {
    // Counts of later documents by the same stages. samples: the number of samples per rule.
    void add(const Counts& later, size_t n_samples) {
        for (size_t i = 0; i < before.size(); i++) before[i] += later.before[i];
        for (size_t i = 0; i < after.size(); i++) after[i] += later.after[i];
        for (size_t s = 0; s < stages.size(); s++) {
            StageCounts& mine = stages[s];
            const StageCounts& other = later.stages.at(s);
            mine.documents_in += other.documents_in;
            mine.bytes_in += other.bytes_in;
            mine.documents_kept += other.documents_kept;
            mine.bytes_kept += other.bytes_kept;
            for (const auto& [name, r] : other.rules) {
                RuleCount& rule = mine.rules[name];
                rule.dropped += r.dropped;
                rule.dropped_bytes += r.dropped_bytes;
                rule.changed += r.changed;
                rule.places += r.places;
                rule.samples.insert(rule.samples.end(), r.samples.begin(), r.samples.end());
                std::stable_sort(rule.samples.begin(), rule.samples.end(),
                                 [](const DroppedSample& a, const DroppedSample& b) { return a.lot < b.lot; });
                if (rule.samples.size() > n_samples) rule.samples.resize(n_samples);
            }
        }
    }
    std::vector<StageCounts> stages;
    LengthCounts before{}, after{};

    static size_t bucket(size_t bytes) { return bytes < 2 ? 0 : (size_t)(63 - __builtin_clzll(bytes)); }
};

inline nlohmann::ordered_json to_json(const Counts& counts) {
    nlohmann::ordered_json j = {{"lengths_before", counts.before}, {"lengths_after", counts.after}};
    auto& stages = j["stages"] = nlohmann::ordered_json::array();
    for (const StageCounts& s : counts.stages) {
        nlohmann::ordered_json rules = nlohmann::ordered_json::object();
        for (const auto& [name, r] : s.rules) {
            auto samples = nlohmann::ordered_json::array();
            for (const DroppedSample& d : r.samples)
                samples.push_back(
                    {{"lot", d.lot}, {"number", d.number}, {"source", d.source}, {"detail", d.detail}, {"text", d.text}});
            rules[name] = {{"dropped", r.dropped},
                           {"dropped_bytes", r.dropped_bytes},
                           {"changed", r.changed},
                           {"places", r.places},
                           {"samples", samples}};
        }
        stages.push_back({{"name", s.name},
                          {"documents_in", s.documents_in},
                          {"bytes_in", s.bytes_in},
                          {"documents_kept", s.documents_kept},
                          {"bytes_kept", s.bytes_kept},
                          {"rules", rules}});
    }
    return j;
}
inline Counts counts_from_json(const nlohmann::json& j) {
    Counts counts;
    counts.before = j.at("lengths_before").get<LengthCounts>();
    counts.after = j.at("lengths_after").get<LengthCounts>();
    for (const auto& s : j.at("stages")) {
        StageCounts stage = {s.at("name"),           s.at("documents_in"), s.at("bytes_in"),
                             s.at("documents_kept"), s.at("bytes_kept"),   {}};
        for (const auto& [name, r] : s.at("rules").items()) {
            RuleCount rule = {r.at("dropped"), r.at("dropped_bytes"), r.at("changed"), r.at("places"), {}};
            for (const auto& d : r.at("samples"))
                rule.samples.push_back({d.at("lot"), d.at("number"), d.at("source"), d.at("detail"), d.at("text")});
            stage.rules[name] = std::move(rule);
        }
        counts.stages.push_back(std::move(stage));
    }
    return counts;
}

// ---- the state of a pass ---------------------------------------------------------------------------------------------------
struct PassState {
    size_t file = 0;        // the file of the next document
    int64_t in_file = 0;    // completed documents of it
    int64_t documents = 0;  // completed documents, total
    int shards = 0;
    bool finished = false;
    Counts counts;
    int64_t bad_lines = 0;  // of earlier files
};

inline nlohmann::ordered_json to_json(const PassState& s) {
    return {{"finished", s.finished}, {"shards", s.shards},          {"documents", s.documents}, {"file", s.file},
            {"in_file", s.in_file},   {"counts", to_json(s.counts)}, {"bad_lines", s.bad_lines}};
}
inline PassState pass_state_from_json(const nlohmann::json& j, const std::string& path) try {
    return {j.at("file"),
            j.at("in_file"),
            j.at("documents"),
            j.at("shards"),
            j.at("finished"),
            counts_from_json(j.at("counts")),
            j.value("bad_lines", (int64_t)0)};
} catch (const nlohmann::json::exception& e) {
    fail_damaged(path, json_problem(e) + "; HINT: start over with another --output");
}

// ---- shards ----------------------------------------------------------------------------------------------------------------
inline std::string shard_name(int index, const std::string& ending) { return format("part-%05d.", index) + ending; }

// Writes documents to shards of bounded size.
class ShardWriter {
public:
    ShardWriter(std::string dir, std::string ending, int64_t shard_bytes, int shards)
        : dir_(std::move(dir)), ending_(std::move(ending)), shard_bytes_(shard_bytes), shards_(shards) {}

    // Writes the lines of a document `times` times, and counts the bytes of all these texts. Completes a shard that is long
    // enough: it ends after a document, never between its texts.
    void write(const std::vector<std::string>& lines, int times, int64_t text_bytes) {
        if (!file_) file_ = std::make_unique<DocumentWriter>(dir_ + "/" + shard_name(shards_, ending_));
        for (int i = 0; i < times; i++)
            for (const std::string& line : lines) file_->write(line);
        bytes_ += text_bytes;
        if (bytes_ >= shard_bytes_) finish();
    }
    void finish() {
        if (!file_) return;
        file_->finish();
        file_.reset();
        bytes_ = 0;
        shards_++;
    }
    int shards() const { return shards_; }

private:
    std::string dir_, ending_;
    int64_t shard_bytes_, bytes_ = 0;
    int shards_;
    std::unique_ptr<DocumentWriter> file_;
};

// ---- a pass ----------------------------------------------------------------------------------------------------------------
struct PassInput {
    TextInput text;
    std::vector<std::string> sources;    // names
    std::vector<size_t> source_of_file;  // of text.files
    bool intermediate = false;           // output of an earlier pass
    bool is_converted = false;           // some of it is neither text nor JSON, or in another encoding

    // The shards of an earlier pass with the same sources.
    PassInput shards_of(const std::string& dir, const std::string& ending, int n) const {
        PassInput input = {{}, sources, {}, true, false};
        input.text.keep_fields = input.text.whole_documents = input.text.allow_binary = true;
        input.text.batch_bytes = text.batch_bytes;
        input.text.max_bad_lines = "0";
        input.text.most_bytes = 8 * most_document_bytes;  // a byte needs up to six in JSON
        for (int i = 0; i < n; i++) input.text.files.push_back(dir + "/" + shard_name(i, ending));
        return input;
    }
};

struct PassOutput {
    std::string dir, ending;
    int64_t shard_bytes = 256 << 20;
    bool intermediate = false;                   // for another pass: with number and source
    std::function<void(const PassState&)> save;  // saves the state; empty: an interrupted pass starts over
};

// A document's fields in an intermediate set.
inline JsonFields intermediate_fields(const Document& d) {
    JsonFields fields;
    fields.add("number", std::to_string(d.number));
    fields.add("source", std::to_string(d.source));
    for (const auto& [name, value] : d.fields.members()) fields.add(name, value);
    return fields;
}
inline Document document_of(const Chunk& chunk, const PassInput& input, size_t file, int64_t number) {
    Document d;
    d.text = chunk.text;
    d.fields = chunk.fields;
    if (!input.intermediate) {
        d.number = number;
        d.source = input.source_of_file[file];
        return d;
    }
    d.number = std::stoll(d.fields.take_first());
    d.source = std::stoull(d.fields.take_first());
    return d;
}

// Reads an intermediate set: work(document, index) on all threads, then finish(document, index) in order, batch by batch.
inline void for_each_document(const PassInput& input, int threads, const std::string& label,
                              const std::function<void(const Document&, size_t)>& work,
                              const std::function<void(const Document&, size_t)>& finish,
                              const std::function<void(size_t)>& resize) {
    if (input.text.files.empty()) return;
    DocumentReader reader(input.text);
    std::vector<Document> batch;
    for_each_chunk(
        reader, threads, label,
        [&](const Chunk& chunk, size_t i) {
            batch[i] = document_of(chunk, input, chunk.file, 0);
            work(batch[i], i);
        },
        [&](const Chunk&, size_t i) { finish(batch[i], i); },
        [&](size_t n) {
            batch.resize(n);
            resize(n);
        },
        false);
}

class CurationPass {
public:
    CurationPass(PassInput input, PassOutput output, std::vector<Stage> stages, int samples, uint64_t seed)
        : input_(std::move(input)), output_(std::move(output)), stages_(std::move(stages)), samples_(samples), seed_(seed) {}

    // From the state, new or of an interrupted pass, to the end of the input; or of this rank's files, whose first document has
    // the number `first`.
    void run(PassState& state, int threads, const std::string& label, InputShare* share = nullptr, int64_t first = 0) {
        if (state.counts.stages.empty())
            for (const Stage& s : stages_) state.counts.stages.push_back({s.name, 0, 0, 0, 0, {}});
        CHECK(state.counts.stages.size() == stages_.size(), "the state has other stages");
        ShardWriter shards(output_.dir, output_.ending, output_.shard_bytes, state.shards);
        if (share || state.file < input_.text.files.size()) {
            DocumentReader reader(input_.text);
            if (share) reader.read_share(*share);
            if (share && state.finished)
                state.file = reader.files_of_share().second;  // only the other ranks' counts are missing
            else if (share && state.documents == 0) state.file = reader.files_of_share().first;
            reader.begin_at(state.file, 0, {{}, 0, 0, state.bad_lines});
            const int64_t passed_over = state.in_file, first_number = first + state.documents;
            int64_t batch_begin = 0;  // chunks of all earlier batches
            std::vector<Worked> batch;
            const auto n_of = [&](size_t i) { return batch_begin + (int64_t)i - passed_over; };  // negative: already done
            for_each_chunk(
                reader, threads, label,
                [&](const Chunk& chunk, size_t i) {
                    if (n_of(i) < 0) return;
                    batch[i].document = document_of(chunk, input_, chunk.file, first_number + n_of(i));
                    work(batch[i]);
                },
                [&](const Chunk& chunk, size_t i) {
                    if (n_of(i) < 0) return;
                    if (chunk.file != state.file) state.in_file = 0;
                    state.bad_lines = chunk.before.bad_of_all - chunk.before.bad;
                    state.file = chunk.file;
                    state.in_file++;
                    state.documents++;
                    if (!take(batch[i], state.counts)) return;
                    shards.write(batch[i].lines, batch[i].document.copies, written_bytes_of(batch[i].document));
                    if (shards.shards() == state.shards) return;
                    state.shards = shards.shards();
                    if (output_.save) output_.save(state);
                },
                [&](size_t n) {
                    batch_begin += (int64_t)batch.size();
                    batch.clear();
                    batch.resize(n);
                },
                !input_.intermediate);
        }
        shards.finish();
        state.shards = shards.shards();
        state.finished = true;
        if (output_.save) output_.save(state);
    }

private:
    // A document and each stage's verdict.
    struct Worked {
        struct Step {
            int64_t bytes_in;
            DocumentVerdict verdict;
            Changes changes;
        };
        Document document;
        size_t bytes_before = 0;
        std::vector<Step> steps;
        bool keep = true;
        std::vector<std::string> lines;  // as written, if the document is kept
    };

    static int64_t bytes_of(const Document& d) {
        int64_t bytes = (int64_t)d.text.size();
        for (const std::string& text : d.more) bytes += (int64_t)text.size();
        return bytes * d.copies;
    }
    // The same of the text as JSON has it, with U+FFFD for invalid bytes: shards end at the same documents if the text has been
    // in an intermediate set.
    static int64_t written_bytes_of(const Document& d) {
        const auto size = [](const std::string& s) {
            return (int64_t)(is_utf8(s) ? s.size() : as_written(nlohmann::json(s)).get_ref<const std::string&>().size());
        };
        int64_t bytes = size(d.text);
        for (const std::string& text : d.more) bytes += size(text);
        return bytes * d.copies;
    }
    void apply(const Stage& stage, Worked& w) const {
        w.steps.push_back({bytes_of(w.document), {}, {}});
        w.steps.back().verdict = stage.apply(w.document, w.steps.back().changes);
        w.keep = w.steps.back().verdict.keep;
    }
    void work(Worked& w) const {
        w.bytes_before = w.document.text.size();
        for (const Stage& stage : stages_) {
            if (!w.keep) return;
            apply(stage, w);
        }
        if (!w.keep) return;
        const Document& d = w.document;
        const JsonFields fields = output_.intermediate ? intermediate_fields(d) : d.fields;
        w.lines.push_back(document_line(d.text, fields));
        for (const std::string& text : d.more) w.lines.push_back(document_line(text, fields));
    }
    // Adds the stages' verdicts to the counts. Returns whether the document is kept.
    bool take(const Worked& w, Counts& counts) const {
        counts.before[Counts::bucket(w.bytes_before)]++;
        if (w.keep) {
            counts.after[Counts::bucket(w.document.text.size())] += w.document.copies;
            for (const std::string& text : w.document.more) counts.after[Counts::bucket(text.size())] += w.document.copies;
        }
        for (size_t s = 0; s < w.steps.size(); s++) {
            const Worked::Step& step = w.steps[s];
            StageCounts& stage = counts.stages[s];
            stage.documents_in++;
            stage.bytes_in += step.bytes_in;
            std::map<std::string, int64_t> places;  // a rule may be named several times
            for (const auto& [rule, times] : step.changes) places[rule] += times;
            if (step.verdict.keep) {
                stage.documents_kept++;
                stage.bytes_kept += s + 1 < w.steps.size() ? w.steps[s + 1].bytes_in : bytes_of(w.document);
                for (const auto& [rule, times] : places) {
                    stage.rules[rule].changed++;
                    stage.rules[rule].places += times;
                }
                continue;
            }
            RuleCount& rule = stage.rules[step.verdict.rule];
            rule.dropped++;
            rule.dropped_bytes += step.bytes_in;
            add_sample(rule, w.document, step.verdict);
        }
        return w.keep;
    }
    void add_sample(RuleCount& rule, const Document& d, const DocumentVerdict& j) const {
        constexpr size_t shown_bytes = 600;
        const auto bits = random_bits(seed_, RngPurpose::documents, 1, (uint64_t)d.number);
        DroppedSample sample = {(uint64_t)bits[0] << 20 | bits[1] >> 12, d.number, input_.sources[d.source], j.detail, {}};
        const auto by_lot = [](const DroppedSample& a, const DroppedSample& b) { return a.lot < b.lot; };
        if (rule.samples.size() == (size_t)samples_) {
            if (samples_ == 0 || !by_lot(sample, rule.samples.back())) return;
            rule.samples.pop_back();
        }
        sample.text = d.text.substr(0, shown_bytes);
        sample.text.resize(whole_characters(sample.text));
        sample.text = as_written(nlohmann::json(sample.text)).get<std::string>();  // as after an interruption
        if (sample.text.size() < d.text.size()) sample.text += " …";
        rule.samples.insert(std::upper_bound(rule.samples.begin(), rule.samples.end(), sample, by_lot), sample);
    }

    PassInput input_;
    PassOutput output_;
    std::vector<Stage> stages_;
    int samples_;
    uint64_t seed_;
};
