// Generates a model's answers to the questions of a task, many at a time (model/decoder.h): greedy, as the examples require.
#pragma once
#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "../base/progress.h"
#include "../tokenizer/stopping_text.h"
#include "../data/tasks.h"
#include "../model/decoder.h"
#include "../parallel/ranks.h"

namespace detail {
// Packs texts into one, each after its length.
inline std::string packed_texts(const std::vector<std::string>& texts) {
    std::string all;
    for (const std::string& text : texts) all += std::to_string(text.size()) + ":" + text;
    return all;
}
inline std::vector<std::string> unpacked_texts(const std::string& all) {
    std::vector<std::string> texts;
    for (size_t at = 0; at < all.size();) {
        const size_t colon = all.find(':', at), length = std::stoull(all.substr(at, colon - at));
        texts.push_back(all.substr(colon + 1, length));
        at = colon + 1 + length;
    }
    return texts;
}
}  // namespace detail

// One answer for each prompt of `all`; each copy of the model processes every n-th; the same result on all ranks. generator: as
// for a Decoder. ends: tokens that end a text. progress counts answers, and may be null. All ranks call stop before each step
// of the decoder, equally often; if it returns true, there are no answers.
template <class Generator, class Stop>
std::optional<std::vector<std::string>> generate_answers(const Ranks& ranks, Generator& generator, const Tokenizer& tokenizer,
                                                         const std::vector<int>& ends, const Task& task,
                                                         const TaskRequests& all, Progress* progress, Stop stop) {
    const Mesh& mesh = ranks.mesh;
    const size_t n = all.requests.size(), replicas = (size_t)mesh.edp.size;
    std::vector<std::string> mine;
    for (size_t i = (size_t)mesh.edp.rank; i < n; i += replicas) mine.emplace_back();
    Decoder<Generator> decoder(generator);
    int64_t done = 0;
    for (size_t k = 0; k < mine.size(); k++) {
        const size_t i = (size_t)mesh.edp.rank + k * replicas;
        const TaskExample& e = task.examples[all.examples[i]];
        const auto text = std::make_shared<StoppingText>(e.stops);
        TextRequest r;
        r.prompt = all.requests[i].tokens;
        r.max_new_tokens = e.max_new_tokens;
        r.sampling.temperature = 0;
        r.sampling.tokens = tokenizer.vocab_size();
        r.ends = ends;
        r.emit = [&tokenizer, text](int token) { return !text->add(tokenizer.token_bytes(token)); };
        r.ended = [&mine, &done, k, text, progress, replicas](TextEnd) {
            text->end();
            mine[k] = text->take();
            if (progress) progress->update(++done * (int64_t)replicas);
        };
        decoder.add(std::move(r));
    }
    std::vector<char> writing = {1};  // each rank
    while (std::count(writing.begin(), writing.end(), 1) > 0) {
        if (stop()) return {};
        const char writes = decoder.step();
        writing.assign(replicas > 1 ? (size_t)mesh.world.size : 1, writes);
        if (replicas > 1) ranks.world->all_gather(&writes, 1, writing.data());
    }
    if (mesh.world.size == 1) return mine;
    const std::vector<std::string> parts = ranks.world->all_gather(detail::packed_texts(mine));
    std::vector<std::string> answers(n);
    for (size_t replica = 0; replica < replicas; replica++) {
        const auto texts = detail::unpacked_texts(parts[(size_t)mesh.rank_of(0, (int)replica * mesh.ep.size, 0)]);
        for (size_t k = 0; k < texts.size(); k++) answers[replica + k * replicas] = texts[k];
    }
    return answers;
}
