// Times our tokenizer for comparison with others (data.py). encode_bench TOKENIZER FILE THREADS PASSES encodes the
// documents of FILE, terminated by NUL bytes, and prints as JSON the seconds of each pass (the first with an empty word
// cache) and all tokens of the last.

#include <chrono>
#include <cstdio>

#include "../../llmc/tokenizer/tokenizer.h"

int main(int argc, char** argv) try {
    if (argc != 5) fail_usage("encode_bench TOKENIZER FILE THREADS PASSES");
    const Tokenizer tokenizer = Tokenizer::load(argv[1]);
    const MappedFile file(argv[2]);
    std::vector<std::string_view> documents;
    for (std::string_view text = file.text(); !text.empty();) {
        documents.push_back(text.substr(0, text.find('\0')));
        text.remove_prefix(std::min(text.size(), documents.back().size() + 1));
    }
    std::vector<std::vector<int>> tokens(documents.size());
    nlohmann::json seconds = nlohmann::json::array();
    for (int pass = 0; pass < atoi(argv[4]); pass++) {
        const auto start = std::chrono::steady_clock::now();
#pragma omp parallel for schedule(dynamic) num_threads(atoi(argv[3]))
        for (size_t i = 0; i < documents.size(); i++) {
            tokens[i].clear();
            tokenizer.encode_append(documents[i], tokens[i]);
        }
        seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
    printf("%s\n", nlohmann::json{{"seconds", seconds}, {"tokens", tokens}}.dump().c_str());
    return 0;
} catch (const Error& e) {
    fprintf(stderr, "error: %s\n", e.what());
    return 1;
}
