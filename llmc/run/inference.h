// Running a model without training it (train_gpt generate and eval), except for the model itself: what both prepare before its
// weights are loaded, and the texts that generate writes.
#pragma once
#include <unistd.h>

#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "../base/check.h"
#include "../base/file.h"
#include "../base/terminal.h"
#include "../data/chat_template.h"
#include "../data/tokenizer.h"
#include "../model/model_config.h"
#include "../model/sampler.h"
#include "../ops.h"
#include "../parallel/world.h"
#include "adapter.h"
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
    std::string adapter{};  // the directory of the adapters; empty: none
    ModelConfig c{};
    std::unique_ptr<Tokenizer> tokenizer{};

    // Refuses models that are not supported.
    template <class Options>
    InferenceRun(World& w, const Options& o, bool needs_tokenizer) : world(w), ctx(make_ctx(w, o.threads)) {
        ctx.plain = o.plain;
        choose_matrix_unit(world, ctx, o.matrix_unit, {});
        const AdaptedModel found(world, o);
        dir = found.dir;
        adapter = found.adapter;
        c = found.c;
        check_backend_takes(c);
        tokenizer = tokenizer_of_model(dir, c.V, needs_tokenizer, main_rank());
        pad_vocabulary(c, 16 * o.tensor_model_parallel_size);
    }
    bool main_rank() const { return world.rank() == 0; }  // prints; the others hold their parts of the model
};

struct Prompt {
    std::string text;
    std::vector<int> tokens;
    std::vector<int> ends;              // tokens that end a text
    std::optional<ChatEncoder> chat{};  // the text is a user's message; empty: each line of standard input is one
};

inline std::vector<ChatMessage> begin_conversation(const GenerateOptions& o) {
    return o.system.empty() ? std::vector<ChatMessage>() : std::vector<ChatMessage>{{"system", o.system}};
}
// The prompt for an answer to the last of the messages.
inline std::vector<int> chat_prompt(const InferenceRun& run, const ChatEncoder& chat,
                                    const std::vector<ChatMessage>& messages) {
    if (const std::string problem = chat.problem(messages); !problem.empty()) fail("%s", problem.c_str());
    const std::vector<int> tokens = chat.encode(messages, true).tokens;
    if ((int)tokens.size() >= run.c.room())
        fail("the conversation has %zu tokens, the model's context holds %d; HINT: begin a new one", tokens.size(),
             run.c.room());
    return tokens;
}

// The prompt of the options, or, for "-", of rank 0's standard input.
inline Prompt read_prompt(const InferenceRun& run, const GenerateOptions& o) {
    if (!o.chat && !(o.chat_template + o.system).empty())
        fail_usage("--chat-template and --system are for conversations; HINT: add --chat");
    Prompt prompt;
    prompt.text = o.prompt != "-" ? o.prompt : run.world.all_gather(run.main_rank() ? read_standard_input() : std::string())[0];
    prompt.ends = model_texts(run.dir, run.tokenizer.get()).end_ids;
    if (!o.chat) {
        prompt.tokens = prompt_tokens(*run.tokenizer, prompt.text, run.c.room());
        return prompt;
    }
    prompt.chat.emplace(*run.tokenizer, find_chat_template(*run.tokenizer, o.chat_template));
    prompt.ends.push_back(prompt.chat->end_token());
    if (prompt.text.empty() && o.num_samples > 1)
        fail_usage("--num-samples is for one --prompt; a conversation has one answer each");
    std::vector<ChatMessage> messages = begin_conversation(o);
    messages.push_back({"user", prompt.text});
    prompt.tokens = chat_prompt(run, *prompt.chat, messages);  // refused before the weights are loaded
    return prompt;
}

// Continues prompts, prints the texts as they come, and at the end their speed. generator: as for sample_text(), on all ranks.
template <class Generator>
class TextWriter {
public:
    TextWriter(const InferenceRun& run, Generator& generator, const Prompt& prompt, const GenerateOptions& o)
        : run_(run), generator_(generator), prompt_(prompt), o_(o), output_(stdout) {}

    void print(const std::string& bytes) {
        if (run_.main_rank()) output_.write(bytes);
    }
    std::string continuation(const std::vector<int>& tokens, int sample) {
        const double start = monotonic_seconds();
        std::string text;
        tokens_ += sample_text(generator_, tokens, o_.max_new_tokens, {o_.temperature, o_.top_k, o_.top_p}, (uint64_t)o_.seed,
                               (uint32_t)sample, prompt_.ends, [&](int token) {
                                   const std::string bytes = run_.tokenizer->token_bytes(token);
                                   text += bytes;
                                   print(bytes);
                                   return true;
                               });
        seconds_ += monotonic_seconds() - start;
        print("\n");
        if (run_.main_rank() && generator_.length() == generator_.capacity())
            fprintf(stderr, "(the model's context of %d tokens is full)\n", generator_.capacity());
        return text;
    }
    // Answers each line of standard input, in one conversation.
    void converse() {
        std::vector<ChatMessage> messages = begin_conversation(o_);
        for (int turn = 0;; turn++) {
            // Rank 0 reads; a line is sent with its newline, the end of the input without one.
            const std::string line = run_.world.all_gather(run_.main_rank() ? read_line() : std::string())[0];
            if (line.empty()) return;
            messages.push_back({"user", line.substr(0, line.size() - 1)});
            messages.push_back({"assistant", continuation(chat_prompt(run_, *prompt_.chat, messages), turn)});
        }
    }
    void tell_speed() const {
        if (run_.main_rank())
            fprintf(stderr, "%s in %s, %.0f tokens/s\n", counted(tokens_, "token").c_str(), human_duration(seconds_).c_str(),
                    seconds_ > 0 ? tokens_ / seconds_ : 0);
    }

private:
    static std::string read_line() {
        if (isatty(STDIN_FILENO)) fputs("> ", stderr);
        std::string line;
        for (int c = getchar(); c != EOF; c = getchar()) {
            line += (char)c;
            if (c == '\n') return line;
        }
        return line.empty() ? line : line + '\n';
    }

    const InferenceRun& run_;
    Generator& generator_;
    const Prompt& prompt_;
    const GenerateOptions& o_;
    TextOutput output_;
    double seconds_ = 0;
    int tokens_ = 0;
};

template <class Generator>
void write_texts(const InferenceRun& run, Generator& generator, const Prompt& prompt, const GenerateOptions& o) {
    TextWriter<Generator> writer(run, generator, prompt, o);
    if (prompt.chat && prompt.text.empty()) writer.converse();
    else
        for (int k = 0; k < o.num_samples; k++) {
            writer.print((k > 0 ? "\n---\n" : "") + (prompt.chat ? std::string() : prompt.text));
            writer.continuation(prompt.tokens, k);
        }
    writer.tell_speed();
}
