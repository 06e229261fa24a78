// Running a model without training it (train_gpt generate and eval), except for the model itself: what both prepare before its
// weights are loaded, and the texts that generate writes.
#pragma once
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "../base/check.h"
#include "../base/file.h"
#include "../base/terminal.h"
#include "../data/tokenizer.h"
#include "../model/model_config.h"
#include "../model/sampler.h"
#include "../ops.h"
#include "../parallel/world.h"
#include "checkpoint.h"
#include "config.h"
#include "from_options.h"
#include "machine.h"
#include "model_texts.h"
#include "run_directory.h"

// A model in a directory, before its weights are loaded. With several ranks, each will hold a part.
struct InferenceRun {
    World& world;
    be::Ctx ctx;
    std::string dir{};
    ModelConfig c{};
    std::unique_ptr<Tokenizer> tokenizer{};

    // Refuses models that are not supported.
    template <class Options>
    InferenceRun(World& w, const Options& o, bool needs_tokenizer) : world(w), ctx(make_ctx(w, o.threads)) {
        ctx.plain = o.plain;
        choose_matrix_unit(world, ctx, o.matrix_unit, {});
        if (o.model.empty()) fail_usage("the model is missing; HINT: --model DIR");
        dir = model_directory(o.model);
        c = read_config(dir);
        check_config(c);
        check_backend_takes(c);
        tokenizer = tokenizer_of_model(dir, c.V, needs_tokenizer, main_rank());
        pad_vocabulary(c, 16 * o.tensor_model_parallel_size);
    }
    bool main_rank() const { return world.rank() == 0; }  // prints; the others hold their parts of the model
};

struct Prompt {
    std::string text;
    std::vector<int> tokens;
    std::vector<int> ends;  // tokens that end a text
};
// The prompt of the options, or, for "-", of rank 0's standard input.
inline Prompt read_prompt(const InferenceRun& run, const GenerateOptions& o) {
    Prompt prompt;
    prompt.text = o.prompt != "-" ? o.prompt : run.world.all_gather(run.main_rank() ? read_standard_input() : std::string())[0];
    prompt.tokens = prompt_tokens(*run.tokenizer, prompt.text, run.c.T);
    prompt.ends = model_texts(run.dir, run.tokenizer.get()).end_ids;
    return prompt;
}

// Writes the texts that `generator` continues the prompt with, as they come, and at the end their speed. generator: as for
// sample_text(), on all ranks.
template <class Generator>
void write_texts(const InferenceRun& run, Generator& generator, const Prompt& prompt, const GenerateOptions& o) {
    TextOutput output(stdout);
    const auto print = [&](const std::string& bytes) {
        if (run.main_rank()) output.write(bytes);
    };
    double seconds = 0;
    int tokens = 0;
    for (int k = 0; k < o.num_samples; k++) {
        print((k > 0 ? "\n---\n" : "") + prompt.text);
        const double start = monotonic_seconds();
        tokens += sample_text(generator, prompt.tokens, o.max_new_tokens, {o.temperature, o.top_k, o.top_p}, (uint64_t)o.seed,
                              (uint32_t)k, prompt.ends, [&](int token) {
                                  print(run.tokenizer->token_bytes(token));
                                  return true;
                              });
        seconds += monotonic_seconds() - start;
        print("\n");
        if (run.main_rank() && generator.length() == generator.capacity())
            fprintf(stderr, "(the model's context of %d tokens is full)\n", generator.capacity());
    }
    if (run.main_rank())
        fprintf(stderr, "%s in %s, %.0f tokens/s\n", counted(tokens, "token").c_str(), human_duration(seconds).c_str(),
                tokens / seconds);
}
