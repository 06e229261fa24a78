// Compares texts with references, for comparison with other programs.
//   build/cpu-fp32/dump_scores PAIRS RESULT
// PAIRS: {"text": str, "references": [str, ...]} per line. RESULT: {"pairs": [{metric: number, ..., "stems": its words}, ...],
// "bleu": of all texts together}.
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>

#include "../../llmc/base/file.h"
#include "../../llmc/base/json.h"
#include "../../llmc/data/text_metrics.h"

static void run(int argc, char** argv) {
    if (argc != 3) fail_usage("usage: dump_scores PAIRS RESULT");
    nlohmann::ordered_json pairs = nlohmann::ordered_json::array();
    BleuCounts all;
    std::ifstream lines(argv[1]);
    for (std::string line; std::getline(lines, line);) {
        const auto j = nlohmann::json::parse(line);
        const std::string text = j["text"];
        const std::vector<std::string> references = j["references"];
        nlohmann::ordered_json found = {{"exact_match", exact_match(text, references)}, {"f1", word_f1(text, references)}};
        const BleuCounts counts = bleu_counts(text, references);
        all += counts;
        found["bleu"] = bleu(counts);
        for (const bool stem : {false, true}) {
            const std::string end = stem ? " stemmed" : "";
            found["rouge1" + end] = rouge_n(text, references, 1, stem);
            found["rouge2" + end] = rouge_n(text, references, 2, stem);
            found["rougeL" + end] = rouge_l(text, references, stem);
            found["rougeLsum" + end] = rouge_lsum(text, references, stem);
        }
        found["stems"] = rouge_words(text, true);
        pairs.push_back(found);
    }
    write_file_atomically(argv[2], json_text(nlohmann::ordered_json{{"pairs", pairs}, {"bleu", bleu(all)}}));
}

int main(int argc, char** argv) {
    try {
        run(argc, argv);
    } catch (const std::exception& e) {
        fprintf(stderr, "error: %s\n", e.what());
        return exit_status(e);
    }
}
