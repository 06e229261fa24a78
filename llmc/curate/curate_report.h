// report.html of a curation: the input, the output of each stage, the documents that each rule dropped or changed, samples of
// them with reasons, and document lengths before and after. One file without scripts, in the colors of a training run's
// report.
#pragma once
#include <string>

#include "../report/report.h"
#include "heuristics.h"
#include "document_pipeline.h"

namespace curation {

inline const std::string report_style = R"css(
.bar { height: 9px; border-radius: 3px; background: var(--train); min-width: 1px; margin: 6px 0; }
.bar.after { background: var(--valid); }
.bars { min-width: 7em; width: 40%; } .runs td.bars { white-space: normal; } .number { text-align: right; }
summary small { color: var(--soft); font-weight: 400; }
.key i.box { height: 9px; border: 0; background: var(--c); vertical-align: 0; }
)css";

inline std::string bar(int64_t part, int64_t whole, const char* style = "") {
    return format("<div class=\"bar %s\" style=\"width:%.2f%%\"></div>", style,
                  whole > 0 ? 100.0 * (double)part / (double)whole : 0.0);
}
inline std::string percent(int64_t part, int64_t whole) {
    return format("%.1f%%", whole > 0 ? 100.0 * (double)part / (double)whole : 0.0);
}
inline std::string cell(const std::string& text) { return "<td>" + xml_escape(text) + "</td>"; }

// Describes a rule, if it is a published one.
inline std::string explained(const std::string& rule) {
    std::string measured;
    for (const HeuristicRule& r : heuristic_rules()) {
        if (std::string(r.measured) != "the same") measured = r.measured;
        if (rule == r.name) return measured + " (" + r.source + ")";
    }
    return "";
}

inline std::string stage_table(const Counts& counts) {
    std::string rows =
        "<tr><th>stage</th><td>documents</td><td>kept</td><td>text</td><td>kept</td><td class=\"bars\"></td></tr>\n";
    const int64_t all = counts.stages.empty() ? 0 : counts.stages[0].bytes_in;
    for (const StageCounts& s : counts.stages)
        rows += "<tr><th>" + xml_escape(s.name) + "</th>" + cell(with_commas(s.documents_in)) +
                cell(percent(s.documents_kept, s.documents_in)) + cell(human_bytes((double)s.bytes_in)) +
                cell(percent(s.bytes_kept, s.bytes_in)) + "<td class=\"bars\">" + bar(s.bytes_kept, all) + "</td></tr>\n";
    return table("runs", rows);
}

inline std::string rule_table(const StageCounts& s) {
    int64_t most = 1;
    for (const auto& [name, r] : s.rules) most = std::max({most, r.dropped, r.changed});
    std::string rows;
    for (const auto& [name, r] : s.rules) {
        std::string did =
            r.dropped > 0 ? "dropped " + counted(r.dropped, "document") + ", " + human_bytes((double)r.dropped_bytes) : "";
        if (r.changed > 0)
            did += (did.empty() ? "changed " : "; changed ") + counted(r.places, "place") + " in " +
                   counted(r.changed, "document");
        const std::string about = explained(name);
        rows += "<tr><th>" + xml_escape(name) + "</th><td>" + xml_escape(did) +
                (about.empty() ? "" : "<br /><small>" + xml_escape(about) + "</small>") +
                bar(std::max(r.dropped, r.changed), most) + "</td></tr>\n";
    }
    return rows.empty() ? "" : table("facts", rows);
}

inline std::string dropped_samples(const StageCounts& s) {
    std::string out;
    for (const auto& [name, r] : s.rules) {
        if (r.samples.empty()) continue;
        std::string cards;
        for (const DroppedSample& d : r.samples)
            cards += format(
                "<article class=\"card\"><h3>%s</h3><blockquote tabindex=\"0\">%s</blockquote></article>\n",
                xml_escape(format("document %s of %s: ", with_commas(d.number).c_str(), d.source.c_str()) + d.detail).c_str(),
                xml_escape(d.text).c_str());
        out += "<details><summary>" + xml_escape(name) + " <small>" + counted(r.dropped, "document") + "</small></summary>\n" +
               "<section class=\"samples\">\n" + cards + "</section></details>\n";
    }
    return out;
}

inline std::string length_table(const Counts& counts) {
    size_t first = counts.before.size(), last = 0;
    int64_t most = 1;
    for (size_t k = 0; k < counts.before.size(); k++) {
        if (counts.before[k] + counts.after[k] == 0) continue;
        first = std::min(first, k);
        last = k;
        most = std::max({most, counts.before[k], counts.after[k]});
    }
    std::string rows;
    for (size_t k = first; k <= last && first < counts.before.size(); k++)
        rows += "<tr><th>from " + human_bytes(std::pow(2.0, (double)k)) + "</th>" + cell(with_commas(counts.before[k])) +
                cell(with_commas(counts.after[k])) + "<td class=\"bars\">" + bar(counts.before[k], most) +
                bar(counts.after[k], most, "after") + "</td></tr>\n";
    return table("runs", "<tr><th>length</th><td>before</td><td>after</td><td class=\"bars\"></td></tr>\n" + rows);
}

inline std::string render_report(const Counts& counts, const std::string& name, const nlohmann::json& options) {
    const StageCounts none, &begin = counts.stages.empty() ? none : counts.stages.front(),
                            &end = counts.stages.empty() ? none : counts.stages.back();
    std::string out = page_start + "<!-- " + written_by("curate") + " --><title>" + xml_escape(name) + "</title>\n<style>" +
                      report_colors + ::report_style + report_style + "</style></head>\n<body><main>\n<header><h1>" +
                      xml_escape(name) + "</h1></header>\n";
    out += "<section class=\"tiles\">\n" +
           tile("Documents", with_commas(end.documents_kept),
                percent(end.documents_kept, begin.documents_in) + " of " + with_commas(begin.documents_in)) +
           tile("Text", human_bytes((double)end.bytes_kept),
                percent(end.bytes_kept, begin.bytes_in) + " of " + human_bytes((double)begin.bytes_in)) +
           "</section>\n<h2 class=\"part\">Stages</h2>\n" + stage_table(counts);
    for (const StageCounts& s : counts.stages) {
        const std::string rules = rule_table(s), samples = dropped_samples(s);
        if (rules.empty()) continue;
        out += "<h2 class=\"part\">" + xml_escape(s.name) + "</h2>\n" + rules + samples;
    }
    out += "<h2 class=\"part\">Documents by their length</h2>\n" + length_table(counts);
    return out + "<details><summary>All options</summary>" +
           table("facts options", table_rows(nlohmann::ordered_json(options))) + "</details>\n</main></body></html>\n";
}

}  // namespace curation
