// Samples of text that a run generates while it trains.
#pragma once
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "../gpt/generator.h"
#include "../infer/inference.h"
#include "../model/decoder.h"
#include "run.h"
#include "trainer.h"
#include "training_log.h"

// The prompt of the samples that a run generates.
inline std::vector<int> sample_prompt(const Run& run, const Model& m) {
    return prompt_tokens(*run.tokenizer, run.o.sample_prompt, std::min(m.c.room(), m.a.B * m.a.T), "--sample-prompt");
}

// Generates --sample-tokens tokens into the log. Returns false if the run is to stop.
inline bool generate_sample(const Run& run, const TrainerBase& t, const Model& m, TrainingLog& log, Generator& generator) {
    const TrainOptions& o = run.o;
    std::string text;
    bool stop = false;
    int votes = 0;
    const auto vote = [&] {  // true: continue
        votes++;
        return !(stop = t.stop());
    };
    const auto emit = [&](int token) {
        text += run.tokenizer->token_bytes(token);
        return vote();
    };
    const SamplingOptions sampling = {0.8, 0, 0.95, run.tokenizer->vocab_size()};
    const auto sample = (uint32_t)t.state.step;
    generate(generator, {sample_prompt(run, m), o.sample_tokens, sampling, (uint64_t)o.seed, sample, run.texts.end_ids, emit});
    // All ranks vote equally often, including ranks of a replica whose text ended before another one's.
    while (!stop && votes < o.sample_tokens) vote();
    if (!stop) log.sample(t.state.step, o.sample_prompt, text);
    return !stop;
}
