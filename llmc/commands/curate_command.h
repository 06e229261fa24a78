// train_gpt curate: converts raw text to training data. The stages are in llmc/curate/; this file builds them from the options,
// runs them, and reports.
//
// The output directory holds data/part-00000.jsonl.zst and so on, curate.json (options, input, state, counts) and report.html;
// other commands can read the folder data. The same command resumes an interrupted curation; with other options or another
// input it fails, a finished output is never overwritten, and only this program's incomplete files are removed.
#pragma once
#include <fnmatch.h>

#include <algorithm>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "../base/check.h"
#include "../base/file.h"
#include "../base/table.h"
#include "../base/terminal.h"
#include "../base/text.h"
#include "../curate/curate_report.h"
#include "../curate/heuristics.h"
#include "../curate/language.h"
#include "../curate/mixing.h"
#include "../curate/normalize.h"
#include "../curate/pii.h"
#include "../curate/document_pipeline.h"
#include "../curate/quality.h"
#include "../curate/whole_corpus.h"
#include "../tokenizer/tokenizer.h"
#include "classifier_command.h"
#include "../options/options.h"
#include "../checkpoint/gguf_directory.h"
#include "text_commands.h"

namespace curation {

namespace fs = std::filesystem;

// Rejects an output in a folder that one of the input's names contains, or matches as a pattern.
inline void check_not_read(const std::string& output, const std::string& name) {
    std::error_code error;
    const fs::path place = fs::weakly_canonical(output, error), pattern = fs::absolute(name, error).lexically_normal();
    const std::string folder = fs::weakly_canonical(name, error).string() + "/";
    bool read = fs::is_directory(name, error) && begins_with(place.string(), folder);
    if (!fs::exists(name, error))
        for (fs::path p = fs::absolute(output, error).lexically_normal(); p.has_relative_path(); p = p.parent_path())
            read |= fnmatch(pattern.c_str(), p.c_str(), FNM_PATHNAME) == 0;
    if (read)
        fail_usage("--output %s is inside --input %s, so a resumed curation would read its own output; HINT: another --output",
                   output.c_str(), name.c_str());
}

// The files of --input, each with the source whose name matches it.
inline PassInput find_input(const CurateOptions& o) {
    PassInput input;
    input.text = text_input(o, o.input, "curate --input", o.split_documents);
    input.text.keep_fields = input.text.whole_documents = true;
    if (o.normalize && input.text.encoding.empty()) input.text.encoding = "auto";
    input.text.batch_bytes = (size_t)std::clamp<int64_t>(o.memory_limit / 16, 1 << 20, 16 << 20);
    input.text.invalid_bytes_become = o.normalize ? "were removed and read as Windows-1252"
                                                  : "were kept and became U+FFFD; HINT: --normalize reads Windows-1252";
    TextInput one = input.text;
    input.text.files.clear();
    for (const std::string& name : o.input) {
        one.files = {name};
        const DocumentReader found(one);
        for (const std::string& note : found.notes()) print_line(stderr, note);
        input.is_converted |= found.converts();
        for (const std::string& file : found.input().files) {
            input.text.files.push_back(file);
            input.source_of_file.push_back(input.sources.size());
        }
        input.sources.push_back(name);
        check_not_read(o.output, name);
    }
    if (!o.near_duplicates.empty() && input.sources.size() >= 1 << 15)
        fail_usage(
            "--input has %zu names, and --near-duplicates treats each as a source; HINT: a folder, or a pattern in quotes",
            input.sources.size());
    return input;
}

inline WholeCorpusOptions whole_corpus_options(const CurateOptions& o) {
    WholeCorpusOptions whole;
    whole.exact = o.exact_duplicates;
    whole.check();
    whole.folded = o.exact_folded;
    refuse_without(o.exact_folded && o.exact_duplicates.empty(), "--exact-folded", "--exact-duplicates");
    if (!o.near_duplicates.empty()) whole.near = NearDuplicateOptions::parse(o.near_duplicates);
    whole.task_files = o.decontaminate;
    return whole;
}

inline MixingOptions mixing_options(const CurateOptions& o) {
    refuse_together(!o.weights.empty() && o.temperature != 1, "--weights", "--temperature", "either sets the shares");
    MixingOptions mixing = {o.weights, o.temperature, (double)o.budget, (uint64_t)o.seed};
    refuse_without(!o.tokenizer.empty() && !mixing.wanted(), "--tokenizer", "--weights, --temperature or --budget",
                   "add one of them, or omit --tokenizer");
    return mixing;
}

// Rejects options that only affect a rule set or model that was not requested.
inline void check_options_without_effect(const CurateOptions& o) {
    const auto rules = [&](const char* set) { return std::count(o.heuristics.begin(), o.heuristics.end(), set) > 0; };
    const auto given = [&](const char* option) { return o.given.count(option) > 0; };
    refuse_idle(given("stop-words") && !rules("gopher"), "--stop-words", "--heuristics gopher");
    refuse_idle(given("bad-words") && !rules("c4"), "--bad-words", "--heuristics c4");
    refuse_idle(given("min-language-score") && o.language_model.empty(), "--min-language-score", "--language-model");
    refuse_idle(given("min-quality-score") && o.quality_model.empty(), "--min-quality-score", "--quality-model");
    refuse_without(!o.languages.empty() && o.language_model.empty(), "--languages", "--language-model");
    refuse_without(!o.set.empty() && o.heuristics.empty(), "--set", "--heuristics");
    refuse_without(o.quality_pareto && o.quality_model.empty(), "--quality-pareto", "--quality-model");
    refuse_without(!o.pii_kinds.empty() && o.pii.empty(), "--pii-kinds", "--pii mask or --pii drop");
    refuse_without(o.pii_private_addresses && o.pii.empty(), "--pii-private-addresses", "--pii mask or --pii drop");
    refuse_together(given("min-quality-score") && o.quality_pareto, "--quality-pareto", "--min-quality-score");
}

inline std::vector<Stage> make_stages(const CurateOptions& o) {
    check_options_without_effect(o);
    std::vector<Stage> stages;
    if (o.normalize) stages.push_back({"normalize", normalize});
    if (!o.language_model.empty()) {
        const auto filter = std::make_shared<LanguageFilter>(o.language_model, o.languages, o.min_language_score);
        stages.push_back({"language", [filter](Document& d, Changes&) { return filter->apply(d); }});
    }
    if (!o.heuristics.empty()) {
        for (const std::string& set : o.heuristics)
            refuse_value(set != "gopher" && set != "c4" && set != "fineweb", "--heuristics", set, "gopher, c4 or fineweb");
        HeuristicOptions rules = {o.heuristics, o.set, o.stop_words, {}};
        if (!o.bad_words.empty()) {
            InputStream in(o.bad_words);
            for (std::string line; in.read_line(line);) {
                line.erase(line.find_last_not_of("\r\n") + 1);
                if (!line.empty()) rules.bad_words.push_back(line);
            }
        }
        const auto heuristics = std::make_shared<Heuristics>(rules);
        stages.push_back({"heuristics", [heuristics](Document& d, Changes& c) { return heuristics->apply(d, c); }});
    }
    if (!o.quality_model.empty()) {
        const bool pareto = o.quality_pareto.has_value();
        const auto filter = std::make_shared<QualityFilter>(o.quality_model, pareto ? "pareto" : "threshold",
                                                            pareto ? *o.quality_pareto : o.min_quality_score, (uint64_t)o.seed);
        stages.push_back({"quality", [filter](Document& d, Changes&) { return filter->apply(d); }});
    }
    if (!o.pii.empty()) {
        PiiOptions kinds;
        for (const PiiKind& kind : pii_kinds)
            if (!o.pii_kinds.empty()) *kinds.of(kind.name) = false;
        for (const std::string& kind : o.pii_kinds) {
            bool* const one = kinds.of(kind);
            refuse_value(!one, "--pii-kinds", kind, "one of " + joined(pii_kinds, [](const PiiKind& k) { return k.name; }));
            *one = true;
        }
        kinds.private_addresses = o.pii_private_addresses;
        kinds.drop = o.pii == "drop";
        stages.push_back({"pii", [pii = Pii(kinds)](Document& d, Changes& c) { return pii.apply(d, c); }});
    }
    return stages;
}

// Names, sizes and times of files.
inline nlohmann::ordered_json describe_files(const std::vector<std::string>& names) {
    auto files = nlohmann::ordered_json::array();
    for (const std::string& file : names) {
        std::error_code error;
        const auto bytes = fs::file_size(file, error);
        const int64_t modified = error ? 0 : (int64_t)fs::last_write_time(file, error).time_since_epoch().count();
        files.push_back({{"file", file}, {"bytes", error ? -1 : (int64_t)bytes}, {"modified", modified}});
    }
    return files;
}

// The conditions for resuming a curation: all options except those that do not change the output, the files that they name, and
// the input's files must be unchanged.
inline nlohmann::json identity_of(const CurateOptions& o, const PassInput& input) {
    nlohmann::ordered_json options = options_to_json(o);
    for (const char* free : {"threads", "output", "memory-limit", "input-command"}) options.erase(free);
    std::vector<std::string> named = o.decontaminate;
    for (const std::string* file : {&o.language_model, &o.quality_model, &o.bad_words})
        if (!file->empty()) named.push_back(*file);
    if (!o.tokenizer.empty())
        named.push_back(is_gguf_file(o.tokenizer) ? o.tokenizer : Tokenizer::file_of(tokenizer_path(o.tokenizer)));
    const nlohmann::ordered_json identity = {
        {"options", options}, {"files of options", describe_files(named)}, {"input", describe_files(input.text.files)}};
    return nlohmann::json::parse(json_text(identity));
}

// The folder of a rank's intermediate set in .work: rank-0-of-2.
inline constexpr const char* ranks_folder = "rank-";
// The intermediate sets of earlier passes.
inline void remove_work(const std::string& work) {
    std::error_code error;
    Strings folders = {"/documents", "/kept"};
    for (const std::string& name : names_in(work))
        if (begins_with(name, ranks_folder)) folders.push_back("/" + name);
    for (const std::string& folder : folders) {
        fs::remove(work + folder + "/state.json", error);
        for (const auto& entry : fs::directory_iterator(work + folder, error))  // a missing folder has no entries
            if (entry.path().filename().string().rfind("part-", 0) == 0) fs::remove(entry.path(), error);
        fs::remove(work + folder, error);
    }
    fs::remove(work, error);
}

// Rejects an input that differs from when the curation started. Files not reached yet may have been fixed.
inline void check_same_input(const nlohmann::json& record, const nlohmann::json& now, const std::string& dir) {
    const nlohmann::json &before = record["input"], state = record.value("state", nlohmann::json::object());
    const size_t reached = state.value("file", (size_t)0);
    bool same = before.is_array() && before.size() == now.size();
    std::string changed;
    for (size_t i = 0; same && i < now.size(); i++) {
        for (const char* what : {"file", "bytes", "modified"})
            if (strcmp(what, "file") == 0 || i <= reached)
                same &= before[i].is_object() && before[i].value(what, nlohmann::json()) == now[i][what];
        if (!same) changed = ": " + now[i]["file"].get<std::string>();
    }
    if (!same)
        fail("the input of the curation in %s has changed since it started%s; HINT: start over with another --output",
             dir.c_str(), changed.c_str());
}

// The record in OUTPUT/curate.json, or null before the start. Fails if it cannot be resumed.
inline nlohmann::json find_record(const std::string& dir, const nlohmann::json& identity, int ranks) {
    const std::string path = dir + "/curate.json";
    std::error_code error;
    if (!fs::exists(path, error)) {
        for (const auto& entry : fs::directory_iterator(dir, error))  // a missing folder has no entries
            if (!is_unfinished(entry.path().filename().string()))
                fail("%s is not empty and does not contain a curation; HINT: give another --output", dir.c_str());
        return nullptr;
    }
    nlohmann::json record = parse_json(read_whole_file(path), path);
    if (!record.is_object() || !record.contains("options") || !record.contains("input") || !record.contains("finished"))
        fail("%s is not a record of a curation; HINT: give another --output", path.c_str());
    const auto started = record.find("state");
    const bool is_empty = started != record.end() && started->is_object() && started->value("documents", (int64_t)0) == 0;
    if (const int before = record.value("ranks", 1);
        before != ranks && !record.value("finished", false) && !(before == 1 && is_empty))
        fail("the curation in %s started on %s, now there are %d; HINT: mpirun -n %d, or another --output", dir.c_str(),
             counted(before, "rank").c_str(), ranks, before);
    if (is_empty && !record.value("finished", false)) return nullptr;
    if (record.value("finished", false)) {
        remove_work(dir + "/.work");  // if it was killed at its very end
        fail("the curation in %s is finished and is not overwritten; HINT: give another --output", dir.c_str());
    }
    for (const auto& [name, value] : identity["options"].items())
        if (const auto before = record["options"].value(name, nlohmann::json()); before != value && name != "max-bad-lines")
            fail(
                "the curation in %s started with --%s %s, now it is %s; HINT: resume it with the same options, or start over "
                "with another --output",
                dir.c_str(), name.c_str(), json_text(before).c_str(), json_text(value).c_str());
    const nlohmann::json &now = identity["files of options"], before = record.value("files of options", now);
    for (size_t i = 0; i < now.size(); i++)
        if (!before.is_array() || i >= before.size() || before[i] != now[i])
            fail("%s has changed since the curation in %s started; HINT: start over with another --output",
                 now[i]["file"].get<std::string>().c_str(), dir.c_str());
    check_same_input(record, identity["input"], dir);
    return record;
}

// Sizes of the sources in bytes or tokens, their shares and epochs.
inline void print_mixing(const std::vector<MixedSource>& sources, const char* unit) {
    Table table;
    table.section("mixing");
    for (const MixedSource& s : sources)
        table.row(s.name, format("%5.1f%%, %.2f epochs of %s %s", 100 * s.share, s.epochs, human_count(s.size).c_str(), unit));
    table.print();
}

// The remaining documents and bytes after each stage, and each rule's counts.
inline void print_summary(const Counts& counts) {
    const auto share = [](int64_t part, int64_t whole) {
        return format("%.1f%%", whole > 0 ? 100.0 * (double)part / (double)whole : 0.0);
    };
    Table table;
    for (const StageCounts& s : counts.stages) {
        table.section(format("%s: %s in, %s kept; %s in, %s kept (%s)", s.name.c_str(),
                             counted(s.documents_in, "document").c_str(), with_commas(s.documents_kept).c_str(),
                             human_bytes((double)s.bytes_in).c_str(), human_bytes((double)s.bytes_kept).c_str(),
                             share(s.bytes_kept, s.bytes_in).c_str()));
        for (const auto& [name, r] : s.rules) {
            std::string did;
            if (r.dropped > 0)
                did = format("dropped %s, %s", counted(r.dropped, "document").c_str(),
                             human_bytes((double)r.dropped_bytes).c_str());
            if (r.changed > 0)
                did += format("%schanged %s in %s", did.empty() ? "" : "; ", counted(r.places, "place").c_str(),
                              counted(r.changed, "document").c_str());
            table.row(name, did);
        }
    }
    table.print();
}

// A curation from its options to its output.
//
// On several ranks the first pass, of all stages that look at one document, is shared: each rank reads its files twice, to
// number its documents as one process would, and to write an intermediate set. Rank 0 reads these sets and does the rest.
class Curation {
public:
    explicit Curation(const CurateOptions& o, InputShare* share = nullptr)
        : o_(o),
          share_(share),
          stages_(make_stages(o)),
          whole_(whole_corpus_options(o)),
          mixing_(mixing_options(o)),
          input_(find_input(o)),
          identity_(identity_of(o, input_)),
          data_(o.output + "/data"),
          work_(o.output + "/.work") {
        // Pages, tables and archives become text even without a stage.
        if (stages_.empty() && !whole_.wanted() && !mixing_.wanted()) {
            if (!input_.is_converted)
                fail_usage(
                    "there is nothing to do; HINT: --normalize and --heuristics gopher are stages; train_gpt curate --help "
                    "lists all");
            stages_.push_back({"text", [](Document&, Changes&) { return DocumentVerdict(); }});
        }
        // Detects errors that later passes would otherwise report after hours.
        if (mixing_.wanted()) mix_sources(input_.sources, std::vector<double>(input_.sources.size(), 1), mixing_);
        if (!o.tokenizer.empty()) tokenizer_.emplace(Tokenizer::load(tokenizer_path(o.tokenizer)));
        for (const std::string& file : whole_.task_files) read_task(file);
    }

    int run() {
        const int threads = cpu::thread_count(o_.threads);
        PassState state = share_ ? PassState() : begin();
        std::optional<PassInput> joined;  // the intermediate sets of all ranks
        if (share_) joined = first_pass_of_ranks(state, threads);
        if (share_ && share_->rank() > 0) {
            share_->gather("");
            return 0;
        }
        // Each pass but the last writes an intermediate set, which the next one reads. After an interruption the first one
        // resumes; the others start over.
        int passes_left = 1 + whole_.wanted() + mixing_.wanted() + (joined && !whole_.wanted() && !mixing_.wanted());
        const auto output = [&](const std::string& name) {
            const bool last = --passes_left == 0;
            PassOutput to = {
                last ? data_ : work_ + "/" + name, last ? o_.output_format : intermediate_ending(), o_.shard_size, !last, {}};
            make_directory(to.dir);
            return to;
        };
        PassOutput to;
        if (joined) passes_left--;
        else to = output("documents");
        to.save = [&](const PassState& s) { save(s); };
        if (!state.finished) run_pass(input_, to, stages_, state, threads, "curating");
        if (state.documents == 0) fail("the input is empty: no document was found in %s", o_.input[0].c_str());
        Counts counts = state.counts;
        const auto last_output = [&] { return joined ? *joined : input_.shards_of(to.dir, to.ending, state.shards); };
        if (whole_.wanted()) {
            const PassInput from = last_output();
            joined.reset();
            WholeCorpus whole(whole_, work_, (size_t)o_.memory_limit);
            whole.learn(from, threads);
            to = output("kept");
            state = PassState();
            run_pass(from, to, whole.stages(), state, threads, "writing the remaining documents");
            append(counts, state.counts);
        }
        if (mixing_.wanted()) {
            const PassInput from = last_output();
            joined.reset();
            to = output("");
            state = PassState();
            run_pass(from, to, {mixing_stage(from, threads)}, state, threads, "mixing");
            append(counts, state.counts);
        }
        if (joined) {
            to = output("");
            state = PassState();
            run_pass(*joined, to, {}, state, threads, "writing the output");
        }
        end(counts, state.shards);
        if (share_) share_->gather("");
        return 0;
    }

private:
    // zstd if available in this build: the intermediate set is read up to three times.
    static std::string intermediate_ending() {
#ifdef HAVE_ZSTD
        return "jsonl.zst";
#else
        return "jsonl";
#endif
    }
    // Measures the remaining text of each source, and sets how often each document is repeated.
    Stage mixing_stage(const PassInput& from, int threads) {
        std::vector<double> sizes(from.sources.size());
        std::vector<int64_t> batch;
        for_each_document(
            from, threads, tokenizer_ ? "counting tokens" : "measuring the sources",
            [&](const Document& d, size_t i) {
                batch[i] = (int64_t)(tokenizer_ ? tokenizer_->encode(d.text).size() : d.text.size());
            },
            [&](const Document& d, size_t i) { sizes[d.source] += (double)batch[i]; }, [&](size_t n) { batch.resize(n); });
        mixed_ = mix_sources(from.sources, sizes, mixing_);
        return {"mixing", [this](Document& d, Changes& changes) -> DocumentVerdict {
                    const int copies = copies_of(d.number, mixed_[d.source].epochs, mixing_.seed);
                    if (copies == 0) return {false, "left-out", format("%.3g epochs of its source", mixed_[d.source].epochs)};
                    d.copies = copies;
                    if (copies > 1) changes.push_back({"repeated", copies - 1});
                    return {};
                }};
    }
    // This rank's documents in the input, and the number of its first one.
    int64_t first_number(int threads) {
        DocumentReader reader(input_.text);
        reader.read_share(*share_);
        int64_t mine = 0, first = 0;
        for_each_chunk(
            reader, threads, "counting documents", [](const Chunk&, size_t) {}, [&](const Chunk&, size_t) { mine++; },
            [](size_t) {}, false);
        const Strings all = share_->gather(std::to_string(mine));
        for (int r = 0; r < share_->rank(); r++) first += std::stoll(all[(size_t)r]);
        return first;
    }
    // The first pass of this rank; on rank 0 `state` gets the counts of all ranks. Returns their intermediate sets.
    PassInput first_pass_of_ranks(PassState& state, int threads) {
        if (share_->rank() == 0) begin();
        share_->gather("");
        const auto folder = [&](int r) { return format("%s/%s%d-of-%d", work_.c_str(), ranks_folder, r, share_->size()); };
        const std::string mine = folder(share_->rank()), file = mine + "/state.json";
        make_directory(mine);
        remove_unfinished_in(mine, "part-");
        const nlohmann::json identity = nlohmann::json::parse(json_text(identity_));
        if (file_exists(file)) {
            const nlohmann::json before = parse_json(read_whole_file(file), file);
            if (!before.is_object() || before.value("identity", nlohmann::json()) != identity)
                fail("%s belongs to a curation with other options, or its input has changed; HINT: another --output",
                     file.c_str());
            state = pass_state_from_json(before.value("state", nlohmann::json()), file);
            print_line(stderr, format("continuing the curation in %s after %s of rank 0", o_.output.c_str(),
                                      counted(state.documents, "document").c_str()));
        }
        const int64_t first = first_number(threads);
        const PassOutput to = {mine, intermediate_ending(), o_.shard_size, true, [&](const PassState& s) {
                                   nlohmann::ordered_json j = {{"identity", identity}, {"state", to_json(s)}};
                                   write_file_atomically(file, json_text(j) + "\n");
                               }};
        CurationPass(input_, to, stages_, o_.samples, (uint64_t)o_.seed).run(state, threads, "curating", share_, first);
        const Strings all = share_->gather(json_text(to_json(state)));
        PassInput joined = input_.shards_of("", to.ending, 0);
        for (int r = 0; r < share_->size(); r++) {
            const PassState other = pass_state_from_json(nlohmann::json::parse(all[(size_t)r]), folder(r));
            const PassInput part = input_.shards_of(folder(r), to.ending, other.shards);
            joined.text.files.insert(joined.text.files.end(), part.text.files.begin(), part.text.files.end());
            if (r == 0) {
                state = other;
                continue;
            }
            state.documents += other.documents;
            state.counts.add(other.counts, (size_t)o_.samples);
        }
        return joined;
    }
    static void append(Counts& counts, const Counts& more) {
        counts.stages.insert(counts.stages.end(), more.stages.begin(), more.stages.end());
        counts.after = more.after;
    }
    void run_pass(const PassInput& from, const PassOutput& to, const std::vector<Stage>& stages, PassState& state, int threads,
                  const char* label) {
        CurationPass(from, to, stages, o_.samples, (uint64_t)o_.seed).run(state, threads, label);
    }
    void write_record(nlohmann::ordered_json record) const {
        for (const auto& [name, value] : identity_.items()) record[name] = value;
        write_file_atomically(o_.output + "/curate.json", json_text(record, 1) + "\n");
    }
    void save(const PassState& s) const {
        nlohmann::ordered_json record = {{"finished", false}, {"state", to_json(s)}};
        if (share_) record["ranks"] = share_->size();
        write_record(std::move(record));
    }

    // The state of an interrupted curation, or a new one.
    PassState begin() {
        make_directory(o_.output);
        lock_.emplace(o_.output);
        const nlohmann::json record = find_record(o_.output, identity_, share_ ? share_->size() : 1);
        PassState state;
        for (const std::string& dir : {data_, work_ + "/documents"}) remove_unfinished_in(dir, "part-");
        if (record.is_null()) {
            save(state);
            return state;
        }
        state = pass_state_from_json(record.value("state", nlohmann::json()), o_.output + "/curate.json");
        print_line(stderr, format("continuing the curation in %s after %s, %s", o_.output.c_str(),
                                  counted(state.documents, "document").c_str(), counted(state.shards, "output file").c_str()));
        return state;
    }
    void end(const Counts& counts, int shards) {
        const fs::path name = fs::path(o_.output + "/.").lexically_normal().parent_path().filename();
        write_file_atomically(o_.output + "/report.html",
                              render_report(counts, "Curation: " + name.string(), identity_["options"]));
        write_record({{"finished", true}, {"shards", shards}, {"counts", to_json(counts)}});
        remove_work(work_);
        print_summary(counts);
        if (!mixed_.empty()) print_mixing(mixed_, o_.tokenizer.empty() ? "bytes" : "tokens");
        print_line(stdout, format("%s: %s; %s/report.html shows the dropped documents", data_.c_str(),
                                  counted(shards, "output file").c_str(), o_.output.c_str()));
    }

    const CurateOptions& o_;
    InputShare* share_;  // null: one process
    std::vector<Stage> stages_;
    WholeCorpusOptions whole_;
    std::optional<const Tokenizer> tokenizer_;  // counts tokens for mixing_
    MixingOptions mixing_;
    PassInput input_;
    nlohmann::json identity_;
    std::string data_, work_;
    std::optional<DirectoryLock> lock_;  // of the output
    std::vector<MixedSource> mixed_;
};

}  // namespace curation

inline int curate(const CurateOptions& o, InputShare* share) {
    if (wants_classifier(o)) {
        if (share) fail_usage("a classifier is trained or measured by a single process; HINT: omit mpirun");
        return classifier_command(o);
    }
    refuse_missing(o.input.empty(), "the text to read", "--input FILE|DIR ...");
    refuse_missing(o.output.empty(), "the output", "--output DIR");
    if (const std::filesystem::path path(o.output);
        path.extension() == ".jsonl" || path.extension() == ".zst" || path.extension() == ".gz")
        fail_usage("--output %s names a file; it must be a directory, for several files; HINT: --output clean",
                   o.output.c_str());
    return curation::Curation(o, share).run();
}
inline int curate_on_ranks(World& world, const CurateOptions& o) {
    return run_on_ranks(world, o, &CurateOptions::threads, curate);
}
