// Running a model without training it (train_gpt generate, eval and serve), except the model itself: the preparation before its
// weights are loaded, and the output of generate.
#pragma once
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "../base/check.h"
#include "../base/file.h"
#include "../base/json.h"
#include "../base/clock.h"
#include "../base/terminal.h"
#include "../base/text.h"
#include "../base/utf8.h"
#include "../tokenizer/chat_template.h"
#include "../tokenizer/tokenizer.h"
#include "../model/beam_search.h"
#include "../model/decoder.h"
#include "../model/model_config.h"
#include "../ops.h"
#include "../parallel/world.h"
#include "../checkpoint/adapter_files.h"
#include "../checkpoint/checkpoint.h"
#include "../options/options.h"
#include "../plan/from_options.h"
#include "../plan/machine.h"
#include "../checkpoint/model_texts.h"
#include "../checkpoint/run_directory.h"

// A model in a directory, before its weights are loaded. With several ranks, each will hold a part.
struct InferenceRun : AdaptedModel {
    World& world;
    be::Ctx ctx;
    RankLayout layout{};  // without sequence parallelism: passes have any number of rows
    std::unique_ptr<Tokenizer> tokenizer{};

    InferenceRun(World& w, int threads) : world(w), ctx(make_ctx(w, threads)) {}
    bool main_rank() const { return world.rank() == 0; }  // prints; the others hold their parts of the model
};
// For generate and eval.
template <class Options>
RankLayout layout_of_inference(const Options& o) {
    RankLayout layout;
    layout.tp = o.tensor_model_parallel_size;
    layout.pp = o.pipeline_model_parallel_size;
    layout.ep = o.expert_model_parallel_size;
    return layout;
}
// Reads the model's configuration. Rejects unsupported models.
template <class Options>
void open_model(InferenceRun& run, const Options& o, bool needs_tokenizer, const RankLayout& layout = {}) {
    run.ctx.plain = o.plain;
    choose_matrix_unit(run.world, run.ctx, o.matrix_unit, {});
    static_cast<AdaptedModel&>(run) = find_model(run.world, o);
    if (o.quantize_base != "auto") run.c.base_format = weight_format(o.quantize_base);
    refuse_without(run.c.base_format == WeightFormat::gguf && run.c.coded.empty(), "--quantize-base gguf",
                   "--model with a GGUF file");
    refuse_quantized_mixture(run.c);
    check_backend_takes(run.c);
    run.tokenizer = tokenizer_of_model(run.dir, run.c.V, needs_tokenizer, run.main_rank());
    run.layout = layout;
    pad_vocabulary(run.c, 16 * layout.tp);
}

struct Prompt {
    std::string text;
    std::vector<int> tokens;
};
struct Prompts {
    std::vector<Prompt> all;
    std::vector<int> ends;              // tokens that end a text
    std::optional<ChatEncoder> chat{};  // prompts are users' messages
    bool converses = false;             // each line of standard input is a message; all[0] is an empty one

    int longest() const {
        size_t most = 0;
        for (const Prompt& prompt : all) most = std::max(most, prompt.tokens.size());
        return (int)most;
    }
};

inline std::vector<ChatMessage> begin_conversation(const GenerateOptions& o) {
    return o.system.empty() ? std::vector<ChatMessage>() : std::vector<ChatMessage>{{"system", o.system}};
}
// The prompt for an answer to the last of the messages.
inline std::vector<int> chat_prompt(const ModelConfig& c, const ChatEncoder& chat, const std::vector<ChatMessage>& messages) {
    if (const std::string problem = chat.problem(messages); !problem.empty()) fail("%s", problem.c_str());
    const std::vector<int> tokens = chat.encode(messages, true).tokens;
    if (tokens.empty()) fail_usage("the message is empty, and the chat template adds nothing to it; HINT: write something");
    if ((int)tokens.size() >= c.room())
        fail("the conversation has %zu tokens; the model's context is %d; HINT: start a new one", tokens.size(), c.room());
    return tokens;
}

// The prompts in a file's content: the non-empty lines or, for .jsonl, the text under "prompt" in each.
inline std::vector<std::string> prompts_in(const std::string& file, const std::string& content) {
    const bool json = std::filesystem::path(file).extension() == ".jsonl";
    std::vector<std::string> texts;
    std::istringstream lines{std::string(without_byte_order_mark(content))};
    int number = 0;
    for (std::string line; std::getline(lines, line);) {
        number++;
        if (!line.empty() && line.back() == '\r') line.pop_back();
        if (line.empty()) continue;
        if (json) {
            const nlohmann::json record = parse_json(line, format("%s, line %d,", file.c_str(), number));
            if (!record.is_object() || !record.contains("prompt") || !record["prompt"].is_string())
                fail_usage("%s, line %d, is not a JSON object with a string under \"prompt\"", file.c_str(), number);
            line = record["prompt"];
        }
        texts.push_back(line);
    }
    if (texts.empty()) fail_usage("--prompts %s has no prompts; HINT: one per line, or .jsonl with \"prompt\"", file.c_str());
    return texts;
}

// Options of sampling have no effect on a search.
inline void check_search(const GenerateOptions& o) {
    const bool searches = o.num_beams > 1;
    refuse_without(!searches && o.given.count("length-penalty"), "--length-penalty", "--num-beams above 1");
    for (const char* name : {"temperature", "top-k", "top-p", "seed"})
        refuse_together(searches && o.given.count(name), "--num-beams", std::string("--") + name, "a search draws nothing");
    refuse_together(searches && o.given.count("batch"), "--num-beams", "--batch", "the beams of a prompt are its batch");
    refuse_together(searches && o.measure_batches, "--num-beams", "--measure-batches", "it measures sampling");
    if (searches && o.num_samples > o.num_beams)
        fail_usage("--num-samples is %d; with --num-beams %d a search finds at most %d texts", o.num_samples, o.num_beams,
                   o.num_beams);
}

// The prompts of the options; rank 0 reads them from a file or, for "-", from standard input.
inline Prompts read_prompts(const InferenceRun& run, const GenerateOptions& o) {
    refuse_without(!o.chat && !o.chat_template.empty(), "--chat-template", "--chat");
    refuse_without(!o.chat && !o.system.empty(), "--system", "--chat");
    refuse_together(!o.prompts.empty() && !o.prompt.empty(), "--prompt", "--prompts", "one prompt, or a file of prompts");
    refuse_without(o.max_latency > 0 && !o.measure_batches, "--max-latency", "--measure-batches");
    if (o.measure_batches && o.max_new_tokens < 3)
        fail_usage("--measure-batches starts at the third token of a sequence; HINT: --max-new-tokens 50");
    if (o.measure_batches && (!o.prompts.empty() || (o.chat && o.prompt.empty()) || o.num_samples > 1))
        fail_usage("--measure-batches uses copies of one --prompt; HINT: omit --prompts and --num-samples");
    check_search(o);
    const auto of_rank_0 = [&](auto read) { return run.world.all_gather(run.main_rank() ? read() : std::string())[0]; };
    std::vector<std::string> texts = {o.prompt};
    if (!o.prompts.empty()) texts = prompts_in(o.prompts, of_rank_0([&] { return read_whole_file(o.prompts); }));
    else if (o.prompt == "-") texts = {of_rank_0(read_standard_input)};

    Prompts prompts;
    prompts.ends = adapted_texts(run.dir, run.tokenizer.get(), run.adapter).end_ids;
    prompts.converses = o.chat && !o.given.count("prompt") && !o.given.count("prompts");
    if (o.chat) {
        prompts.chat.emplace(*run.tokenizer, find_chat_template(*run.tokenizer, o.chat_template, run.adapter));
        prompts.ends.push_back(prompts.chat->end_token());
        refuse_without(prompts.converses && o.num_samples > 1, "--num-samples", "--prompt");
        refuse_without(prompts.converses && o.num_beams > 1, "--num-beams", "--prompt or --prompts");
    }
    for (const std::string& text : texts) {
        std::vector<ChatMessage> messages = begin_conversation(o);
        messages.push_back({"user", text});
        prompts.all.push_back({text, prompts.converses ? prompts.chat->encode(messages, true).tokens
                                     : o.chat          ? chat_prompt(run.c, *prompts.chat, messages)
                                                       : prompt_tokens(*run.tokenizer, text, run.c.room())});
    }
    return prompts;
}

// Prints texts that are generated concurrently, in their order: the first unfinished one immediately, the others when the
// earlier ones have ended.
class OrderedOutput {
public:
    explicit OrderedOutput(bool prints) : prints_(prints), output_(stdout) {}
    void write(int64_t text, const std::string& bytes) {
        if (!prints_) return;
        if (text == now_) output_.write(bytes);
        else later_[text].bytes += bytes;
    }
    void end(int64_t text) {
        later_[text].ended = true;
        while (!later_.empty() && later_.begin()->first == now_ && later_.begin()->second.ended) {
            later_.erase(later_.begin());
            now_++;
            if (const auto next = later_.find(now_); next != later_.end()) output_.write(std::exchange(next->second.bytes, ""));
        }
    }

private:
    struct Later {
        std::string bytes;
        bool ended = false;
    };
    bool prints_;
    TextOutput output_;
    std::map<int64_t, Later> later_;
    int64_t now_ = 0;
};

// Measures token times of concurrent generation.
class GenerationSpeed {
public:
    // Runs one step of a Decoder, or a BeamSearch. Returns whether texts are left.
    template <class Steps>
    bool step(Steps& decoder) {
        const double start = monotonic_seconds();
        const int64_t before = decoder.tokens();
        const bool more = decoder.step();
        const double seconds = monotonic_seconds() - start;
        const int64_t tokens = decoder.tokens() - before;
        if (tokens > 0) steps_.emplace_back(seconds, tokens);
        seconds_ += seconds;
        tokens_ += tokens;
        return more;
    }
    double seconds() const { return seconds_; }
    double tokens_per_second() const { return seconds_ > 0 ? (double)tokens_ / seconds_ : 0; }
    // In seconds: this fraction of tokens takes less time.
    double percentile(double share) {
        std::sort(steps_.begin(), steps_.end());
        double before = 0;
        for (const auto& [seconds, tokens] : steps_)
            if ((before += (double)tokens) >= share * (double)tokens_) return seconds;
        return 0;
    }
    std::string text() {
        return format("%s in %s, %.0f tokens/s; milliseconds per token of a sequence: p50 %.2f, p99 %.2f",
                      counted(tokens_, "token").c_str(), human_duration(seconds_).c_str(), tokens_per_second(),
                      1e3 * percentile(0.5), 1e3 * percentile(0.99));
    }

private:
    std::vector<std::pair<double, int64_t>> steps_;  // seconds, and tokens completed in them
    double seconds_ = 0;
    int64_t tokens_ = 0;
};

// The speed of generation in batches (generate --measure-batches).
struct BatchSpeed {
    int batch;
    double first_ms, p50_ms, p99_ms;  // until all texts have their first tokens; time of a text's later tokens
    double tokens_per_second;         // excluding the first ones
    size_t bytes;                     // per rank
};

// Generates as many texts at a time as fit in the generator (as for a Decoder, on all ranks), each with exactly max_new_tokens,
// ignoring their ends.
template <class Generator>
BatchSpeed measure_batch(Generator& generator, const std::vector<int>& prompt, size_t bytes, const GenerateOptions& o) {
    Decoder<Generator> decoder(generator);
    const int batch = generator.sequences();
    for (int i = 0; i < batch; i++) {
        const SamplingOptions sampling = {o.temperature, o.top_k, o.top_p};
        decoder.add({prompt, o.max_new_tokens, sampling, (uint64_t)o.seed, (uint32_t)i});
    }
    GenerationSpeed first, later;
    for (bool more = first.step(decoder); more;) more = later.step(decoder);
    return {batch, 1e3 * first.seconds(), 1e3 * later.percentile(0.5), 1e3 * later.percentile(0.99), later.tokens_per_second(),
            bytes};
}

// Prints their table, and the fastest within the bound.
inline void print_batches(const std::vector<BatchSpeed>& all, const GenerateOptions& o) {
    print_line(stdout, "batch  first tokens  ms a token: p50      p99  tokens/s  memory of a rank");
    const BatchSpeed *best = nullptr, *soonest = all.data();
    for (const BatchSpeed& s : all) {
        print_line(stdout, format("%5d  %9.1f ms  %15.3f  %7.3f  %8.0f  %16s", s.batch, s.first_ms, s.p50_ms, s.p99_ms,
                                  s.tokens_per_second, human_bytes(s.bytes).c_str()));
        if (s.p99_ms < soonest->p99_ms) soonest = &s;
        if ((!o.max_latency || s.p99_ms <= o.max_latency) && (!best || s.tokens_per_second > best->tokens_per_second))
            best = &s;
    }
    if (!best)
        fail("no batch size meets --max-latency %g: the closest is --batch %d with %.2f ms for 99%% of its tokens",
             o.max_latency, soonest->batch, soonest->p99_ms);
    print_line(stdout, format("highest throughput%s: --batch %d, %.0f tokens/s",
                              o.max_latency > 0 ? " within --max-latency" : "", best->batch, best->tokens_per_second));
}

// Continues prompts, prints the texts as they arrive, and the speed at the end. generator: as for a Decoder, on all ranks.
template <class Generator>
class TextWriter {
public:
    TextWriter(const InferenceRun& run, Generator& generator, const Prompts& prompts, const GenerateOptions& o)
        : run_(run), generator_(generator), prompts_(prompts), o_(o), decoder_(generator), output_(run.main_rank()) {}

    // Searches for the best texts after each prompt.
    void search_all() {
        for (size_t i = 0; i < prompts_.all.size(); i++) {
            BeamSearch<Generator> search(generator_, request(prompts_.all[i].tokens, 0), {o_.num_beams, o_.length_penalty});
            while (speed_.step(search)) {
            }
            for (int sample = 0; sample < o_.num_samples; sample++) {
                // An empty one if the prompt fills the context.
                const FoundText text = (size_t)sample < search.found().size() ? search.found()[(size_t)sample]
                                                                              : FoundText{{}, 0, TextEnd::context};
                const int64_t number = (int64_t)i * o_.num_samples + sample;
                open_sample(number, [&](auto write, auto ended) {
                    for (const int token : text.tokens) write(run_.tokenizer->token_bytes(token));
                    ended(text.end);
                });
                output_.end(number);
            }
        }
    }
    // Generates every sample of every prompt.
    void write_all() {
        const int64_t all = (int64_t)prompts_.all.size() * o_.num_samples;
        for (int64_t next = 0;;) {
            // Queue no more than can start in one step, since there may be many.
            for (; next < all && (int)decoder_.waiting() < generator_.sequences(); next++) add_sample(next);
            if (!speed_.step(decoder_)) break;
        }
    }
    // Answers each line of standard input, in one conversation. /clear starts a new one, /system TEXT with another system
    // message. When the context is full, the oldest turns are dropped.
    void converse() {
        std::vector<ChatMessage> messages = begin_conversation(o_);
        for (int turn = 0;;) {
            // Rank 0 reads; a line is sent with its newline, the end of the input without one.
            const std::string line = run_.world.all_gather(run_.main_rank() ? read_line() : std::string())[0];
            if (line.empty()) return;
            if (line == "\n" || is_command(line.substr(0, line.size() - 1), messages)) continue;
            messages.push_back({"user", line.substr(0, line.size() - 1)});
            drop_oldest(messages);
            std::string answer;
            add(
                turn, turn, chat_prompt(run_.c, *prompts_.chat, messages),
                [&](const std::string& bytes) {
                    answer += bytes;
                    output_.write(turn, bytes);
                },
                [&, turn](TextEnd end) { end_line(turn, end); });
            while (speed_.step(decoder_)) {
            }
            messages.push_back({"assistant", answer});
            turn++;  // only here: the output waits for every number in turn
        }
    }
    void print_speed() {
        if (run_.main_rank()) print_line(stderr, speed_.text());
    }

private:
    void note(const std::string& text) const {
        if (run_.main_rank()) print_line(stderr, "(" + text + ")");
    }
    // Obeys a command of the user, if the line is one.
    bool is_command(const std::string& line, std::vector<ChatMessage>& messages) const {
        const std::string name = line.substr(0, line.find(' '));
        if (line == "/clear") {
            if (!messages.empty() && messages[0].role == "system") messages.resize(1);
            else messages.clear();
            note("a new conversation");
            return true;
        }
        if (name != "/system") return false;
        std::vector<ChatMessage> changed;
        if (line.size() > name.size() + 1) changed.push_back({"system", line.substr(name.size() + 1)});
        std::vector<ChatMessage> first = changed;
        first.push_back({"user", "x"});
        if (const std::string problem = prompts_.chat->problem(first); !problem.empty()) note(problem);
        else {
            messages = changed;
            note(changed.empty() ? "a new conversation without a system message"
                                 : "a new conversation with this system message");
        }
        return true;
    }
    // Drops the oldest turns after the system message until the conversation leaves room for an answer.
    void drop_oldest(std::vector<ChatMessage>& messages) const {
        const size_t first = messages[0].role == "system" ? 1 : 0;
        size_t dropped = 0;
        const int least_answer = std::min(o_.max_new_tokens, run_.c.room() / 4);
        const auto tokens = [&] { return (int)prompts_.chat->encode(messages, true).tokens.size(); };
        while (messages.size() > first + 2 && tokens() + least_answer > run_.c.room()) {
            messages.erase(messages.begin() + (std::ptrdiff_t)first, messages.begin() + (std::ptrdiff_t)first + 2);
            dropped += 2;
        }
        if (dropped)
            note(format("the context of %d tokens is full: the %zu oldest messages were dropped", run_.c.room(), dropped));
    }
    TextRequest request(std::vector<int> tokens, int sample) const {
        return {std::move(tokens), o_.max_new_tokens, {o_.temperature, o_.top_k, o_.top_p, run_.tokenizer->vocab_size()},
                (uint64_t)o_.seed, (uint32_t)sample,  prompts_.ends};
    }
    template <class Write, class Ended>
    void add(int64_t number, int sample, std::vector<int> tokens, Write write, Ended ended) {
        TextRequest r = request(std::move(tokens), sample);
        r.emit = [this, write](int token) {
            write(run_.tokenizer->token_bytes(token));
            return true;
        };
        r.ended = [this, number, ended](TextEnd end) {
            ended(end);
            output_.end(number);
        };
        decoder_.add(std::move(r));
    }
    void add_sample(int64_t number) {
        const int sample = (int)(number % o_.num_samples);
        const Prompt& prompt = prompts_.all[(size_t)(number / o_.num_samples)];
        open_sample(number, [&](auto write, auto ended) { add(number, sample, prompt.tokens, write, ended); });
    }
    // Calls f(write, ended): write(bytes) adds to the output of a sample, ended(TextEnd) ends it.
    template <class F>
    void open_sample(int64_t number, F f) {
        const Prompt& prompt = prompts_.all[(size_t)(number / o_.num_samples)];
        if (!o_.prompts.empty()) {
            auto text = std::make_shared<std::string>();
            return f([text](const std::string& bytes) { *text += bytes; },
                     [this, text, number, &prompt](TextEnd end) {
                         const nlohmann::ordered_json record = {{"prompt", prompt.text},
                                                                {"sample", number % o_.num_samples},
                                                                {"text", *text},
                                                                {"end", end == TextEnd::token ? "stop" : "length"}};
                         output_.write(number, json_text(record) + "\n");
                     });
        }
        output_.write(number, (number > 0 ? "\n---\n" : "") + (prompts_.chat ? std::string() : prompt.text));
        f([this, number](const std::string& bytes) { output_.write(number, bytes); },
          [this, number](TextEnd end) { end_line(number, end); });
    }
    void end_line(int64_t number, TextEnd end) {
        output_.write(number, "\n");
        if (run_.main_rank() && end == TextEnd::context && generator_.capacity() == run_.c.T)
            fprintf(stderr, "(the model's context of %d tokens is full)\n", generator_.capacity());
    }
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
    const Prompts& prompts_;
    const GenerateOptions& o_;
    Decoder<Generator> decoder_;
    OrderedOutput output_;
    GenerationSpeed speed_;
};

template <class Generator>
void generate_completions(const InferenceRun& run, Generator& generator, const Prompts& prompts, const GenerateOptions& o) {
    TextWriter<Generator> writer(run, generator, prompts, o);
    if (prompts.converses) writer.converse();
    else if (o.num_beams > 1) writer.search_all();
    else writer.write_all();
    writer.print_speed();
}
