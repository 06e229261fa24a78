// The commands that convert text to tokens on disk, or train a tokenizer on it: prepare, tokenizer. Documents come from
// document_reader.h in batches of bounded size, all threads encode each batch, and results are written in order.
#pragma once
#include <omp.h>

#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "../cpu/threads.h"
#include "../base/check.h"
#include "../base/progress.h"
#include "../base/terminal.h"
#include "../base/text.h"
#include "../tokenizer/chat_template.h"
#include "../tokenizer/fill_in_middle.h"
#include "../data/dataset.h"
#include "../text/document_reader.h"
#include "../tokenizer/tokenizer.h"
#include "../tokenizer/tokenizer_trainer.h"
#include "../tokenizer/unigram_trainer.h"
#include "../options/options.h"
#include "../parallel/shared_input.h"
#include "../plan/machine.h"
#include "../checkpoint/gguf_directory.h"
#include "prepare_state.h"

// For conversations, or pairs of answers, instead of texts: sets how they are read, and returns the encoder.
inline ChatEncoder prepare_conversations(const PrepareOptions& o, const Tokenizer& tokenizer, TextInput& input) {
    for (const auto& [given, option] : {std::pair(o.no_append_eod, "--no-append-eod"),
                                        {o.split_documents != "file", "--split-documents"},
                                        {o.format == "text", "--format text"}})
        refuse_together(given, option, o.chat ? "--chat" : "--preference", "the template ends each answer");
    refuse_together(o.chat && o.preference, "--chat", "--preference", "conversations, or pairs of answers");
    if (o.preference && o.json_keys != "text")
        fail_usage("--json-keys is '%s'; pairs of answers have the keys prompt, chosen and rejected", o.json_keys.c_str());
    const ChatTemplate chosen = find_chat_template(tokenizer, o.chat_template, "");
    const std::string key = o.json_keys == "text" ? "" : o.json_keys;
    auto checks = std::make_shared<ChatEncoder>(tokenizer, chosen);
    input.open_record = [key, checks, pairs = o.preference](const nlohmann::json& record, Chunk& chunk) {
        chunk.problem = pairs ? ConversationReader::read_pair(record, chunk.conversation, chunk.rejected)
                              : ConversationReader::read(record, key, chunk.conversation);
        if (chunk.problem.empty()) chunk.problem = checks->render(chunk.conversation, chunk.rendered);
        if (chunk.problem.empty() && pairs) chunk.problem = checks->render(chunk.rejected, chunk.rendered_rejected);
    };
    return *checks;
}

// A part of the input after encoding.
struct PreparedChunk {
    ChatTokens text;      // for a conversation with its mask
    ChatTokens rejected;  // for a pair of answers
    int64_t spelled = 0;  // places that spell a special token
    int64_t lost = 0;     // bytes without a token
};

inline void print_notes(const PrepareCounts& counts, const PrepareOptions& o, const Tokenizer& tokenizer) {
    if (!o.chat && !o.preference && !tokenizer.template_before().empty())
        print_line(stderr,
                   format("note: the tokenizer adds '%s' before a text, as do prompts and eval --text; documents are stored "
                          "without it",
                          tokenizer.decode(tokenizer.template_before()).c_str()));
    if (counts.spelled)
        print_line(stderr, format("note: %s a special token and %s",
                                  counted(counts.spelled, "place in the text spells", "places in the text spell").c_str(),
                                  o.parse_special_tokens
                                      ? "became that token"
                                      : "stayed text. HINT: --parse-special-tokens makes it that token, as in transformers"));
    if (counts.lost > 0) {
        const std::string places = tokenizer.of_bytes() ? counted(counts.lost, "byte")
                                                        : counted(counts.lost, "place in the text", "places in the text");
        print_line(stderr, format("note: %s without a token in this tokenizer: dropped or replaced by its unknown token, as in "
                                  "transformers",
                                  places.c_str()));
    }
}

// Rejects options that do not fit together, and removes an ending from the prefix.
inline void check_prepare_options(PrepareOptions& o) {
    refuse_missing(o.output_prefix.empty(), "the output", "--output-prefix PREFIX writes PREFIX.bin and PREFIX.idx");
    if (const std::string prefix = without_extension(o.output_prefix); prefix != o.output_prefix) {
        print_line(stderr, "note: --output-prefix has no ending: " + prefix + ".bin and " + prefix + ".idx are written");
        o.output_prefix = prefix;
    }
    if (const auto name = std::filesystem::path(o.output_prefix).filename(); name.empty() || name == "." || name == "..")
        fail_usage(
            "--output-prefix is '%s'; PREFIX must end with a name; HINT: --output-prefix DIR/text writes DIR/text.bin "
            "and DIR/text.idx",
            o.output_prefix.c_str());
    refuse_missing(o.tokenizer.empty(), "the tokenizer", "--tokenizer DIR, as written by train_gpt tokenizer");
    refuse_without(!o.chat && !o.preference && !o.chat_template.empty(), "--chat-template", "--chat or --preference");
    const bool fim = o.fim_rate > 0;
    refuse_idle(!fim && o.given.count("fim-spm-rate") > 0, "--fim-spm-rate", "--fim-rate");
    refuse_idle(!fim && o.given.count("seed") > 0, "--seed", "--fim-rate");
    refuse_together(fim && (o.chat || o.preference), "--fim-rate", o.chat ? "--chat" : "--preference",
                    "the middle of a text is moved, not of a conversation");
}

// What prepare makes of a document: tokens of its text, with its middle moved or not, or of the conversation in it.
struct DocumentEncoder {
    const PrepareOptions& o;
    const Tokenizer& tokenizer;
    const ChatEncoder* chat;  // or null
    const FillInMiddle* fim;  // or null

    void encode(const Chunk& chunk, PreparedChunk& p) const {
        std::vector<int>& tokens = p.text.tokens;
        tokens.clear();  // keeps its memory
        p.spelled = 0;
        if (!chat) {
            if (fim) move_middle(chunk, p);
            else {
                tokenizer.encode_append(chunk.text, tokens, o.parse_special_tokens, chunk.continues);
                p.lost = tokenizer.count_lost(chunk.text, tokens);
            }
            p.spelled = tokenizer.count_special(chunk.text);
            if (chunk.ends_document && !o.no_append_eod) tokens.push_back(tokenizer.eod_id());
            return;
        }
        p.text = chat->encode(chunk.rendered, chunk.conversation, o.parse_special_tokens);
        if (o.preference) p.rejected = chat->encode(chunk.rendered_rejected, chunk.rejected, o.parse_special_tokens);
        p.spelled = p.text.spelled + p.rejected.spelled;
    }

    // chunk: a whole document.
    void move_middle(const Chunk& chunk, PreparedChunk& p) const {
        p.lost = 0;
        fim->split(
            chunk.text, (uint32_t)chunk.file, (uint64_t)chunk.number, [&](int token) { p.text.tokens.push_back(token); },
            [&](std::string_view part, bool continues) {
                std::vector<int> tokens;
                tokenizer.encode_append(part, tokens, o.parse_special_tokens, continues);
                p.lost += tokenizer.count_lost(part, tokens);
                p.text.tokens.insert(p.text.tokens.end(), tokens.begin(), tokens.end());
            });
    }
};

// Encodes the reader's text and writes it. After an error, `state` (or null) keeps the written tokens.
inline void encode_and_write(const DocumentEncoder& encoder, DocumentReader& reader, PrepareState* state,
                             TokenDatasetWriter& writer, PrepareCounts& counts) {
    const PrepareOptions& o = encoder.o;
    std::vector<PreparedChunk> prepared;
    const auto write = [&](const ChatTokens& text, bool ends) {
        writer.add(text.tokens.data(), text.tokens.size(), encoder.chat ? text.in_loss.data() : nullptr);
        if (ends) writer.end_document();
        counts.tokens += (int64_t)text.tokens.size();
        counts.in_loss += std::count(text.in_loss.begin(), text.in_loss.end(), 1);
    };
    try {
        for_each_chunk(
            reader, cpu::thread_count(o.workers), "preparing",
            [&](const Chunk& chunk, size_t i) { encoder.encode(chunk, prepared[i]); },
            [&](const Chunk& chunk, size_t i) {
                if (state && state->is_known(chunk)) return;
                const auto& [text, rejected, spelled, lost] = prepared[i];
                write(text, chunk.ends_document);
                if (o.preference) write(rejected, true);
                counts.bytes += chunk.odd.bytes;
                counts.spelled += spelled;
                counts.lost += lost;
                if (state && chunk.ends_document) state->done(chunk, writer);
            },
            [&](size_t n) { prepared.resize(n); });
    } catch (const Error&) {
        try {
            if (state) state->save(writer);
        } catch (const Error&) {  // a full disk: the last saved position remains
        }
        throw;
    }
}

inline void print_prepared(const PrepareOptions& o, const ChatEncoder* chat, const TokenDatasetWriter& writer,
                           const PrepareCounts& counts) {
    const std::string files = o.output_prefix + ".bin, " + o.output_prefix + ".idx";
    const std::string tokens = counted(counts.tokens, "token");
    if (chat)
        print_line(stdout,
                   format("%s, %s%s: %s with the template %s, %s, %s of them in the loss (%.1f%%)", files.c_str(),
                          o.output_prefix.c_str(), mask_ending,
                          o.preference ? counted(writer.n_documents() / 2, "pair of answers", "pairs of answers").c_str()
                                       : counted(writer.n_documents(), "conversation").c_str(),
                          chat->name().c_str(), tokens.c_str(), with_commas(counts.in_loss).c_str(),
                          100.0 * (double)counts.in_loss / (double)counts.tokens));
    else
        print_line(stdout,
                   format("%s: %s, %s, %.3f bytes per token", files.c_str(), counted(writer.n_documents(), "document").c_str(),
                          tokens.c_str(), (double)counts.bytes / (double)std::max<int64_t>(1, counts.tokens)));
}

// One process, or the first of several ranks.
inline bool is_first(const InputShare* share) { return !share || share->rank() == 0; }

// Runs a command on text: as one process, or with a share of the input for each rank. threads: the option for their number, by
// default this rank's part of the machine.
template <class Options>
int run_on_ranks(World& world, Options o, int Options::*threads, int (*command)(const Options&, InputShare*)) {
    if (world.size() == 1) return command(o, nullptr);
    if (!(o.*threads)) o.*threads = share_of_machine(world);
    SharedInput share(world);
    return share.run([&] { command(o, &share); });
}

// What rank 0 needs to append a rank's part of the data.
struct PreparedPart {
    TokenDatasetWriter::Kept kept;
    PrepareCounts counts;
};

// Fails on all ranks unless they see the same files, including those that they write. written: this rank's, or empty.
inline void check_same_files(InputShare& share, const DocumentReader& reader, const std::string& written) {
    std::string list;
    for (size_t i = 0; i < reader.file_sizes().size(); i++)
        list += reader.input().files[i] + '\0' + std::to_string(reader.file_sizes()[i]) + '\n';
    const std::string sum = format("%08x", crc32c(list.data(), list.size()));
    const Strings all = share.gather(sum + written);
    for (size_t r = 1; r < all.size(); r++) {
        if (all[r].compare(0, 8, sum) != 0)
            fail("rank %zu sees other input files, or other sizes of them; HINT: all ranks need the same file system", r);
        const std::string part = all[r].substr(8);
        if (share.rank() == 0 && !part.empty() && !file_exists(part))
            fail("rank %zu writes %s, which rank 0 does not see; HINT: all ranks need the same file system", r, part.c_str());
    }
}

// Rank 0 appends the documents of the other ranks, in order, and their counts.
inline void join_parts(InputShare& share, const std::string& prefix, TokenDatasetWriter& writer, PrepareCounts& counts) {
    writer.keep();
    const PreparedPart mine = {writer.place(), counts};
    const Strings parts = share.gather(std::string((const char*)&mine, sizeof mine) + writer.unfinished_ending());
    if (share.rank() > 0) return;
    int64_t bytes = 0;
    std::vector<PreparedPart> all(parts.size());
    for (size_t r = 0; r < parts.size(); r++) {
        memcpy(&all[r], parts[r].data(), sizeof mine);
        bytes += r > 0 ? (int64_t)all[r].kept.bin.bytes : 0;
    }
    Progress progress("joining the parts", bytes, "B");
    int64_t done = 0;
    for (size_t r = 1; r < parts.size(); r++) {
        writer.append({part_prefix(prefix, (int)r, share.size()), parts[r].substr(sizeof mine), all[r].kept},
                      [&](size_t n) { progress.update(done += (int64_t)n); });
        counts += all[r].counts;
    }
    progress.finish();
}

// share: null, or of this rank, whose part of the data rank 0 gets. Returns the exit status.
inline int prepare(const PrepareOptions& given, InputShare* share) {
    PrepareOptions o = given;
    check_prepare_options(o);
    const bool chats = o.chat || o.preference;
    const Tokenizer tokenizer = Tokenizer::load(tokenizer_path(o.tokenizer));
    tokenizer.warn_of_missing_end();
    if (!chats && !o.no_append_eod && tokenizer.eod_id() < 0)
        fail("%s has no end-of-document token (<|endoftext|>, <|end_of_text|>, <eos> or </s>); HINT: --no-append-eod omits it",
             tokenizer.source().c_str());
    TextInput input = text_input(o, o.input, "prepare --input", o.split_documents);
    input.writes = o.output_prefix;
    std::optional<FillInMiddle> fim;
    if (o.fim_rate > 0) fim.emplace(tokenizer, o.fim_rate, o.fim_spm_rate, (uint64_t)o.seed);
    input.whole_documents = fim.has_value();
    std::optional<ChatEncoder> chat;
    if (chats) chat.emplace(prepare_conversations(o, tokenizer, input));
    DocumentReader reader(std::move(input));
    const std::string prefix = o.output_prefix;
    if (share) {
        reader.read_share(*share);
        o.output_prefix = part_prefix(prefix, share->rank(), share->size());
    }
    if (const auto parent = std::filesystem::path(prefix).parent_path(); !parent.empty()) make_directory(parent.string());
    PrepareCounts counts;
    std::optional<PrepareState> state;
    if (o.resume) {
        const std::vector<ChatMessage> probe = {{"user", "a"}, {"assistant", "b"}};
        const std::vector<int> frame = chat ? chat->encode(probe, true).tokens : std::vector<int>{tokenizer.eod_id()};
        state.emplace(o, tokenizer.identity().hash, frame, reader, counts);
    }
    const bool complete = state && (share ? share->gather(state->is_complete() ? "y" : "n")[0] == "y" : state->is_complete());
    if (complete) {
        if (share && share->rank() > 0) state->remove_part();
        if (share) share->gather("");  // rank 0's state is the last file to go
        state->finish();
        print_line(stdout, "note: " + prefix + ".bin is complete already; nothing was left to do");
        return 0;
    }
    TokenDatasetWriter writer(o.output_prefix, tokenizer.identity(), state ? std::optional(state->kept()) : std::nullopt,
                              chat ? chat->recorded() : "", o.preference);
    if (share) check_same_files(*share, reader, o.output_prefix + ".bin" + writer.unfinished_ending());
    const auto [dir, name] = folder_and_name(prefix + rank_mark);
    if (is_first(share)) remove_unfinished_in(dir, name);  // parts of killed ranks
    const DocumentEncoder encoder = {o, tokenizer, chat ? &*chat : nullptr, fim ? &*fim : nullptr};
    encode_and_write(encoder, reader, state ? &*state : nullptr, writer, counts);
    if (state) state->check_reached();
    if (share) {
        if (state) state->save(writer);
        join_parts(*share, prefix, writer, counts);
    }
    if (share && share->rank() > 0) {
        share->gather("");  // rank 0 has the documents
        writer.discard();
        if (state) state->finish();
        share->gather("");
        return 0;
    }
    if (writer.n_documents() == 0)
        fail("the input is empty: no document was found in %s%s", o.input[0].c_str(),
             o.input.size() > 1 ? " and the others" : "");
    writer.commit();
    for (int i = 0; share && i < 2; i++) share->gather("");  // the other ranks remove their parts in between
    if (state) state->finish();
    print_notes(counts, o, tokenizer);
    print_prepared(o, chat ? &*chat : nullptr, writer, counts);
    return 0;
}

inline int prepare_on_ranks(World& world, const PrepareOptions& o) {
    return run_on_ranks(world, o, &PrepareOptions::workers, prepare);
}

// Measures how well a tokenizer fits texts: bytes and characters per token, tokens per word (words are separated by white
// space); for each file, or some of many, and in total. With shares, rank 0 reports the files of all ranks.
inline void report_tokenizer(const Tokenizer& tokenizer, DocumentReader& reader, int threads, bool tells) {
    using Counts = std::array<int64_t, 4>;  // tokens, bytes, characters, words
    std::vector<Counts> counts;
    std::map<size_t, Counts> of_files;
    for_each_chunk(
        reader, threads, "measuring",
        [&](const Chunk& chunk, size_t i) {
            std::vector<int> tokens;
            tokenizer.encode_append(chunk.text, tokens, false, chunk.continues);
            int64_t characters = 0, words = 0;
            bool space = true;
            for (unsigned char c : chunk.text) {
                characters += begins_character((char)c);
                const bool now = isspace(c);
                words += space && !now;
                space = now;
            }
            counts[i] = {(int64_t)tokens.size(), (int64_t)chunk.text.size(), characters, words};
        },
        [&](const Chunk& chunk, size_t i) {
            for (size_t k = 0; k < 4; k++) of_files[chunk.file][k] += counts[i][k];
        },
        [&](size_t n) { counts.resize(n); }, tells);
    if (InputShare* const share = reader.share()) {
        const Strings all = share->gather(json_text(nlohmann::json(of_files)));
        if (share->rank() > 0) return;
        of_files.clear();
        for (const std::string& of_rank : all) of_files.merge(nlohmann::json::parse(of_rank).get<std::map<size_t, Counts>>());
    }
    Counts total{};
    for (const auto& [file, n] : of_files)
        for (size_t k = 0; k < 4; k++) total[k] += n[k];
    if (total[0] == 0) fail("the input is empty");
    const auto fertility = [](const Counts& n) {
        const auto tokens = (double)std::max<int64_t>(1, n[0]);
        return format("%.3f bytes per token, %.3f characters per token, %.3f tokens per word", (double)n[1] / tokens,
                      (double)n[2] / tokens, (double)n[0] / (double)std::max<int64_t>(1, n[3]));
    };
    std::vector<std::pair<size_t, Counts>> listed(of_files.begin(), of_files.end());
    const size_t most = 20;  // of more files, those are listed that fit worst
    if (listed.size() > most) {
        const auto fits_worse = [](const auto& x, const auto& y) {
            return (double)x.second[1] * (double)y.second[0] < (double)y.second[1] * (double)x.second[0];
        };
        std::stable_sort(listed.begin(), listed.end(), fits_worse);
        listed.resize(most);
        print_line(stdout, format("the %zu of %s files with the fewest bytes per token:", most,
                                  with_commas((int64_t)of_files.size()).c_str()));
    }
    if (of_files.size() > 1)
        for (const auto& [file, n] : listed)
            print_line(stdout, format("  %s; %s", fertility(n).c_str(), input_name(reader.input().files[file]).c_str()));
    print_line(stdout, format("%s: %s tokens; %s", tokenizer.source().c_str(), with_commas(tokenizer.vocab_size()).c_str(),
                              fertility(total).c_str()));
}

inline void check_tokenizer_options(const TokenizerOptions& o) {
    const bool unigram = o.type == "unigram";
    refuse_missing(o.output.empty(), "the output", "--output DIR gets tokenizer.json (or --report TOKENIZER measures one)");
    if (std::string end = std::filesystem::path(o.output).extension(); end == ".json" || end == ".model")
        fail_usage("--output %s names a file; it must be a directory, which gets tokenizer.json; HINT: --output tok",
                   o.output.c_str());
    if (o.vocab_size < 256 + (int)o.special_tokens.size() + (unigram ? 2 : 1))
        fail_usage("--vocab-size is %d; 256 bytes and %zu special tokens leave no room for a %s", o.vocab_size,
                   o.special_tokens.size(), unigram ? "piece" : "merge");
    refuse_without(unigram && o.pre_tokenizer != "gpt2", "--pre-tokenizer", "--type bpe");
    refuse_without(unigram && o.min_frequency != 2, "--min-frequency", "--type bpe");
    for (size_t i = 0; i < o.special_tokens.size(); i++) {
        const std::string& token = o.special_tokens[i];
        if (token.size() < 2)
            fail_usage(
                "--special-tokens has '%s'; a special token needs at least two bytes: every single byte is already a token",
                token.c_str());
        if (count_odd_bytes(token).invalid)
            fail_usage("--special-tokens has '%s', which is not UTF-8; tokenizer.json holds UTF-8 only",
                       printable(token).c_str());
        std::string bytes;  // represented by its characters in a vocabulary of bytes
        if (unigram ? first_character(token).length == token.size() || byte_of_token(token) >= 0
                    : characters_to_bytes(token, bytes) && bytes != token)
            fail_usage("--special-tokens has '%s', tokenizer.json's name for a %s; HINT: a name like <|end|>", token.c_str(),
                       unigram ? "character or byte" : "sequence of bytes");
        if (std::find(o.special_tokens.begin(), o.special_tokens.begin() + (long)i, token) !=
            o.special_tokens.begin() + (long)i)
            fail_usage("--special-tokens has '%s' twice", token.c_str());
    }
}

// Moves the counts of all ranks to rank 0, in messages of a few MiB.
inline void gather_counts(InputShare& share, PieceCounts& counts) {
    const size_t most = std::max<size_t>(1 << 16, ((size_t)64 << 20) / (size_t)share.size());
    struct Entry {
        int64_t count;
        uint64_t size;  // of the piece, whose bytes follow
    };
    for (bool more = true; more;) {
        std::string mine;
        while (share.rank() > 0 && !counts.empty() && mine.size() < most) {
            const auto& [piece, count] = *counts.begin();
            const Entry entry = {count, piece.size()};
            mine.append((const char*)&entry, sizeof entry) += piece;
            counts.erase(counts.begin());
        }
        more = false;
        for (const std::string& sent : share.gather(mine)) {
            more |= !sent.empty();
            if (share.rank() > 0) continue;
            Entry entry;
            for (size_t i = 0; i < sent.size(); i += sizeof entry + entry.size) {
                memcpy(&entry, &sent[i], sizeof entry);
                counts[sent.substr(i + sizeof entry, entry.size)] += entry.count;
            }
        }
    }
}

// Counts the words of all texts; split(chunk, word) calls word(string_view, end of readable memory) for each of them. With
// shares, rank 0 gets the counts of all ranks, and the others get none.
template <class F>
PieceCounts count_words(DocumentReader& reader, int threads, F split) {
    constexpr size_t most_of_a_thread = 1 << 16;  // distinct words, before all threads' counts take them
    PieceCounts counts;
    std::vector<PieceCounter> counters((size_t)threads);
    std::mutex collecting;
    const auto collect = [&](PieceCounter& counter) {
        const std::lock_guard<std::mutex> lock(collecting);
        counter.move_to(counts);
    };
    for_each_chunk(
        reader, threads, "counting words",
        [&](const Chunk& chunk, size_t) {
            PieceCounter& mine = counters[(size_t)omp_get_thread_num()];
            split(chunk, [&](std::string_view word, const char* end) { mine.add(word, end); });
            if (mine.others() > most_of_a_thread) collect(mine);
        },
        [](const Chunk&, size_t) {}, [](size_t) {});
    for (PieceCounter& counter : counters) collect(counter);
    if (reader.share()) gather_counts(*reader.share(), counts);
    if (counts.empty() && is_first(reader.share()))
        fail("the input is empty: nothing to learn a tokenizer from in %s", reader.taken().c_str());
    return counts;
}
inline PieceCounts count_bpe_words(const TokenizerOptions& o, DocumentReader& reader, int threads) {
    const PreTokenizer pre_tokenizer(pretokenizer_pattern(o.pre_tokenizer));
    return count_words(reader, threads, [&](const Chunk& chunk, auto word) {
        const char* end = chunk.text.data() + chunk.text.size();
        pre_tokenizer.split(chunk.text, [&](std::string_view piece) { word(piece, end); });
    });
}
inline PieceCounts count_unigram_words(const TokenizerOptions&, DocumentReader& reader, int threads) {
    const TextSteps steps{nlohmann::json(unigram_pre_tokenizer())};
    return count_words(reader, threads, [&](const Chunk& chunk, auto word) {
        steps.split(chunk.text, !chunk.continues, chunk.continues,
                    [&](std::string_view piece) { word(piece, piece.data() + piece.size()); });
    });
}

// Trains a tokenizer.json; sets `size` to the number of its tokens.
inline nlohmann::ordered_json learn_bpe(const TokenizerOptions& o, const PieceCounts& counts, int& size) {
    BpeTrainer trainer(counts, o.special_tokens, o.pre_tokenizer);
    Progress progress("learning merges", o.vocab_size, "tokens");
    trainer.train(o.vocab_size, o.min_frequency, &progress);
    progress.finish();
    size = trainer.vocab_size();
    return trainer.to_json();
}
inline nlohmann::ordered_json learn_unigram(const TokenizerOptions& o, const PieceCounts& counts, int threads, int& size) {
    UnigramTrainer trainer(counts, threads);
    trainer.leave_out(o.special_tokens);
    const auto others = (int)UnigramTrainer::other_tokens(o.special_tokens);
    Progress progress("learning pieces", 100, "%");
    trainer.train(o.vocab_size - others, &progress);
    progress.finish();
    size = others + (int)trainer.pieces().size();
    return trainer.to_json(o.special_tokens);
}

// Trains a tokenizer on the counted words, and writes it to `file`.
inline void write_tokenizer(const TokenizerOptions& o, const PieceCounts& counts, int threads, const std::string& file) {
    int size = 0;
    nlohmann::ordered_json learned = o.type == "bpe" ? learn_bpe(o, counts, size) : learn_unigram(o, counts, threads, size);
    if (size < o.vocab_size)
        print_line(stdout,
                   format("note: the text has only %s of the requested %s tokens; HINT: more text%s", with_commas(size).c_str(),
                          with_commas(o.vocab_size).c_str(), o.type == "bpe" ? ", or a smaller --min-frequency" : ""));
    if (size > o.vocab_size)
        print_line(stdout,
                   format("note: %s tokens instead of the requested %s: the text has that many characters (99.95%% of it)",
                          with_commas(size).c_str(), with_commas(o.vocab_size).c_str()));
    reserve_tokens(learned, size, o.reserved_tokens, o.pad_vocab_to_multiple);
    const std::string text = learned.dump(1) + "\n";
    std::error_code error;
    const auto is_same = [&] {
        try {
            return read_whole_file(file) == text;
        } catch (const Error&) {  // unreadable files are different
            return false;
        }
    };
    FileWriter writer(file);
    writer.write(text);
    writer.check();
    if (std::filesystem::exists(std::filesystem::symlink_status(file, error)) && !is_same())
        print_line(stderr, "note: another " + file + " was there and is now " + set_aside(file));
    writer.commit();
}

// share: null, or of this rank. Returns the exit status.
inline int tokenizer_command(const TokenizerOptions& o, InputShare* share) {
    const int threads = cpu::thread_count(o.threads);
    DocumentReader reader(
        text_input(o, o.input, o.report.empty() ? "tokenizer --input" : "tokenizer --report DIR --input", "file"));
    if (share) {
        reader.read_share(*share);
        check_same_files(*share, reader, "");
    }
    if (!o.report.empty()) {
        for (const char* name : {"vocab-size", "type", "pre-tokenizer", "special-tokens", "min-frequency", "reserved-tokens",
                                 "pad-vocab-to-multiple", "output"})
            if (o.given.count(name))
                fail_usage("--report measures a tokenizer; --%s only applies when training one; HINT: omit one of them", name);
        report_tokenizer(Tokenizer::load(tokenizer_path(o.report)), reader, threads, true);
        return 0;
    }
    check_tokenizer_options(o);
    make_directory(o.output);
    const std::string file = o.output + "/tokenizer.json";
    const PieceCounts counts = (o.type == "bpe" ? count_bpe_words : count_unigram_words)(o, reader, threads);
    const int to_learn = o.given.count("threads") ? threads : cpu::thread_count(0);  // the other ranks wait meanwhile
    if (is_first(share)) write_tokenizer(o, counts, to_learn, file);
    if (share) share->gather("");  // it is written
    if (reader.is_local()) {
        DocumentReader again(reader.input());
        if (share) again.read_share(*share);
        report_tokenizer(Tokenizer::load(file), again, threads, false);
    }
    return 0;
}
inline int tokenizer_on_ranks(World& world, const TokenizerOptions& o) {
    return run_on_ranks(world, o, &TokenizerOptions::threads, tokenizer_command);
}
