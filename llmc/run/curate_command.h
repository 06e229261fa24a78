// train_gpt curate: from raw text to training data. The stages are in llmc/curate/; here they are made from the options, run, and
// told about.
//
// The output directory holds data/part-00000.jsonl.zst and so on, curate.json (options, input, state, counts) and report.html:
// other commands read the folder data as it is. The same command continues an interrupted curation; other options or another
// input are refused, a finished output is never written again, and nothing is removed but what this program left unfinished.
#pragma once
#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "../base/check.h"
#include "../base/file.h"
#include "../base/terminal.h"
#include "../curate/curate_report.h"
#include "../curate/heuristics.h"
#include "../curate/language.h"
#include "../curate/normalise.h"
#include "../curate/pii.h"
#include "../curate/pipeline.h"
#include "../curate/quality.h"
#include "classifier_command.h"
#include "config.h"
#include "text_commands.h"

namespace curation {

namespace fs = std::filesystem;

// The files of --input with the source that each belongs to: what one of its names stands for.
inline PassInput find_input(const CurateOptions& o) {
    PassInput input;
    input.text = text_input(o, "curate --input", o.split_documents);
    input.text.keep_fields = input.text.whole_documents = true;
    TextInput one = input.text;
    input.text.files.clear();
    for (const std::string& name : o.input) {
        one.files = {name};
        const DocumentReader found(one);
        for (const std::string& note : found.notes()) print_line(stderr, note);
        for (const std::string& file : found.input().files) {
            input.text.files.push_back(file);
            input.source_of_file.push_back(input.sources.size());
        }
        input.sources.push_back(name);
    }
    return input;
}

inline std::vector<Stage> make_stages(const CurateOptions& o) {
    std::vector<Stage> stages;
    if (o.normalize) stages.push_back({"normalize", normalise});
    if (!o.language_model.empty()) {
        const auto filter = std::make_shared<LanguageFilter>(o.language_model, o.languages, o.min_language_score);
        stages.push_back({"language", [filter](Document& d, Changes&) { return filter->apply(d); }});
    } else if (!o.languages.empty())
        fail_usage("--languages chooses languages that --language-model finds, which is not given");
    if (!o.heuristics.empty()) {
        for (const std::string& set : o.heuristics)
            if (set != "gopher" && set != "c4" && set != "fineweb")
                fail_usage("--heuristics has '%s'; the sets of rules are gopher, c4, fineweb", set.c_str());
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
    } else if (!o.set.empty() || !o.stop_words.empty() || !o.bad_words.empty())
        fail_usage("--set, --stop-words and --bad-words are for the rules of --heuristics, which is not given");
    if (!o.quality_model.empty()) {
        const bool pareto = o.quality_pareto.has_value();
        const auto filter = std::make_shared<QualityFilter>(o.quality_model, pareto ? "pareto" : "threshold",
                                                            pareto ? *o.quality_pareto : o.min_quality_score, (uint64_t)o.seed);
        stages.push_back({"quality", [filter](Document& d, Changes&) { return filter->apply(d); }});
    } else if (o.quality_pareto) fail_usage("--quality-pareto draws by the score of --quality-model, which is not given");
    if (!o.pii.empty()) {
        PiiOptions kinds;
        if (!o.pii_kinds.empty()) kinds = {false, false, false, false};
        for (const std::string& kind : o.pii_kinds) {
            bool* const one = kind == "email"   ? &kinds.email
                              : kind == "phone" ? &kinds.phone
                              : kind == "card"  ? &kinds.card
                              : kind == "ip"    ? &kinds.ip
                                                : nullptr;
            if (!one) fail_usage("--pii-kinds has '%s'; the kinds are email, phone, card, ip", kind.c_str());
            *one = true;
        }
        kinds.private_addresses = o.pii_private_addresses;
        kinds.drop = o.pii == "drop";
        stages.push_back({"pii", [pii = Pii(kinds)](Document& d, Changes& c) { return pii.apply(d, c); }});
    } else if (!o.pii_kinds.empty() || o.pii_private_addresses)
        fail_usage("--pii-kinds and --pii-private-addresses are for --pii mask or --pii drop, which is not given");
    if (stages.empty())
        fail_usage(
            "there is nothing to do; HINT: --normalize and --heuristics gopher are stages; train_gpt curate --help lists all");
    return stages;
}

// What must be the same when a curation goes on: all options but those that do not change the output, and the input's files.
inline nlohmann::json identity_of(const CurateOptions& o, const PassInput& input) {
    nlohmann::ordered_json options = options_to_json(o);
    for (const char* free : {"threads", "output"}) options.erase(free);
    auto files = nlohmann::ordered_json::array();
    for (const std::string& file : input.text.files) {
        std::error_code error;
        const auto bytes = fs::file_size(file, error);
        files.push_back({{"file", file}, {"bytes", error ? -1 : (int64_t)bytes}});
    }
    return nlohmann::json::parse(json_text(nlohmann::ordered_json{{"options", options}, {"input", files}}));
}

// The record in OUTPUT/curate.json, or null where nothing has begun. Refuses what cannot be continued.
inline nlohmann::json find_record(const std::string& dir, const nlohmann::json& identity) {
    const std::string path = dir + "/curate.json";
    std::error_code error;
    if (!fs::exists(path, error)) {
        if (fs::exists(dir, error) && !fs::is_empty(dir, error))
            fail("%s is not empty and holds no curation; HINT: give another --output", dir.c_str());
        return nullptr;
    }
    nlohmann::json record = parse_json(read_whole_file(path), path);
    if (!record.is_object() || !record.contains("options") || !record.contains("input") || !record.contains("state"))
        fail("%s is not a record of a curation; HINT: give another --output", path.c_str());
    if (record["state"].value("finished", false))
        fail("the curation in %s is finished; it is not written again; HINT: give another --output", dir.c_str());
    for (const auto& [name, value] : identity["options"].items())
        if (const auto before = record["options"].value(name, nlohmann::json()); before != value)
            fail(
                "the curation in %s began with --%s %s, now it is %s; HINT: the same options continue it, another --output begins "
                "anew",
                dir.c_str(), name.c_str(), json_text(before).c_str(), json_text(value).c_str());
    if (record["input"] != identity["input"])
        fail("the input of the curation in %s has changed since it began; HINT: another --output begins anew", dir.c_str());
    return record;
}

// Output files that a killed process left under their temporary names.
inline void remove_unfinished(const std::string& dir) {
    for (const auto& entry : fs::directory_iterator(dir)) {
        const std::string name = entry.path().filename().string();
        std::error_code error;
        if (name.rfind("part-", 0) == 0 && name.find(temporary_mark) != std::string::npos) fs::remove(entry.path(), error);
    }
}

// What is left of documents and bytes after each stage, and what each rule did.
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

}  // namespace curation

inline int curate_command(const CurateOptions& o) {
    using namespace curation;
    if (wants_classifier(o)) return classifier_command(o);
    if (o.input.empty()) fail_usage("there is no text to read; HINT: --input FILE|DIR ...");
    if (o.output.empty()) fail_usage("the output is missing; HINT: --output DIR");
    const std::vector<Stage> stages = make_stages(o);
    const PassInput input = find_input(o);
    const nlohmann::json identity = identity_of(o, input);
    const nlohmann::json record = find_record(o.output, identity);
    PassState state;
    if (!record.is_null()) {
        state = pass_state_from_json(record["state"], o.output + "/curate.json");
        print_line(stderr, format("continuing the curation in %s after %s, %s", o.output.c_str(),
                                  counted(state.documents, "document").c_str(), counted(state.shards, "output file").c_str()));
    }
    const std::string data = o.output + "/data";
    make_directory(data);
    remove_unfinished(data);
    const auto save = [&](const PassState& s) {
        const nlohmann::ordered_json whole = {
            {"options", identity["options"]}, {"input", identity["input"]}, {"state", to_json(s)}};
        write_file_atomically(o.output + "/curate.json", json_text(whole, 1) + "\n");
    };
    if (record.is_null()) save(state);
    CurationPass pass(input, {data, o.output_format, o.shard_size, save}, stages, o.samples, (uint64_t)o.seed);
    pass.run(state, thread_count(o.threads), "curating");
    write_file_atomically(
        o.output + "/report.html",
        render_report(state.counts, "Curation: " + fs::path(o.output).filename().string(), identity["options"]));
    print_summary(state.counts);
    print_line(stdout, format("%s: %s; %s/report.html shows what was dropped", data.c_str(),
                              counted(state.shards, "output file").c_str(), o.output.c_str()));
    return 0;
}
