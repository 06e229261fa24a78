// Rows of options (options.h) for the commands that read or make texts, datasets and tokenizers: prepare, curate, tokenizer and
// the classifiers.
#pragma once

// Options of all commands that read texts.
#define READING_OPTIONS(X)                                                                                            \
    X(std::string, format, "", "", one_of({"text", "jsonl", "html", "csv", "tsv"}), "Input",                          \
      "format of all files; default: detected from each file's name and first bytes")                                 \
    X(std::string, json_keys, "", "text", word("KEY"), "Input",                                                       \
      "key of the text in JSON, or its column in Parquet, CSV and TSV")                                               \
    X(std::string, on_bad_line, "", "skip", one_of({"skip", "fail"}), "Input",                                        \
      "response to a line of JSON that cannot be read or has no text: skip, count and show it; or end with an error") \
    X(std::string, max_bad_lines, "", "1%", word("N|N%"), "Input",                                                    \
      "end with an error if more lines than this are skipped: 20 in total, or 1% of a file (one is always "           \
      "allowed)")                                                                                                     \
    X(bool, allow_binary, "", false, anything(), "Input",                                                             \
      "accept any bytes as text; default: refuse binary formats, and files with over 0.5% NUL or invalid UTF-8")      \
    X(std::string, encoding, "", "", word("NAME"), "Input",                                                           \
      "encoding of texts that are not UTF-8, named as in iconv: latin1, cp932, utf-16; auto: detected in each file")  \
    X(std::string, input_command, "", "", word("COMMAND"), "Input",                                                   \
      "command, run without a shell, that writes the bytes of the address {} to its standard output, as in 'aws s3 "  \
      "cp {} -'; default: curl for http and https")                                                                   \
    X(bool, skip_bad_files, "", false, anything(), "Input",                                                           \
      "skip unreadable files and the rest of damaged ones; default: refuse the input")

// Options of the commands that read large texts.
#define TEXT_OPTIONS(X)                                                                                             \
    X(Strings, input, "", {}, list(0, "FILE"), "Input",                                                             \
      "files of text, JSON, CSV, TSV, HTML or WARC (plain, .gz, .zst) or Parquet; folders; patterns in quotes; -: " \
      "standard input; https:// and other addresses; @FILE: a list of these, one per line")                         \
    READING_OPTIONS(X)

#define PREPARE_OPTIONS(X)                                                                                                \
    TEXT_OPTIONS(X)                                                                                                       \
    X(std::string, split_documents, "", "file", one_of({"file", "blank", "line"}), "Input",                               \
      "the documents of a text file: the whole file, its parts between blank lines, or its lines")                        \
    X(bool, chat, "", false, anything(), "Input",                                                                         \
      "the input holds conversations: JSON with messages, prompt and completion, or instruction and output; only their "  \
      "answers are in the loss")                                                                                          \
    X(bool, preference, "", false, anything(), "Input",                                                                   \
      "the input holds pairs of answers: JSON with prompt, chosen and rejected, each a string or a list of messages")     \
    X(std::string, chat_template, "", "", word("NAME"), "Input",                                                          \
      "chat template: chatml, llama-2, llama-3, llama-3.1, mistral, mistral-v0.1, gemma, gemma-3, qwen3, olmo-2, plain; " \
      "default: the one next to the tokenizer")                                                                           \
    X(std::string, output_prefix, "output", "", word("PREFIX"), "Output",                                                 \
      "output files: PREFIX.bin, PREFIX.idx and PREFIX.meta.json, which names the tokenizer")                             \
    X(std::string, tokenizer, "", "", word("DIR"), "Output",                                                              \
      "tokenizer: its directory or file: tokenizer.json (`train_gpt tokenizer`, Hugging Face), tokenizer.model "          \
      "(SentencePiece); or the name of a model in Hugging Face's cache")                                                  \
    X(bool, no_append_eod, "", false, anything(), "Output", "omit the end-of-document token after each document")         \
    X(bool, parse_special_tokens, "", false, anything(), "Output",                                                        \
      "text that spells a special token (<|im_start|>) becomes that token; default: it stays text")                       \
    X(double, fim_rate, "", 0, between(0, 1), "Fill-in-the-middle",                                                       \
      "share of the documents whose middle is moved to the end, so that the model learns to fill gaps")                   \
    X(double, fim_spm_rate, "", 0.5, between(0, 1), "Fill-in-the-middle",                                                 \
      "share of these documents that have the suffix before the prefix")                                                  \
    X(int64_t, seed, "", 1234, at_least(0), "Fill-in-the-middle", "seed for drawing these documents and their parts")     \
    X(int, workers, "threads", 0, between(1, 4096), "Run", "CPU threads; default: all cores")                             \
    X(bool, resume, "", false, anything(), "Run",                                                                         \
      "keep PREFIX.*.partial when interrupted, and resume from it if it exists; must be set from the start")

// Options of the language and quality classifiers.
#define CLASSIFIER_OPTIONS(X)                                                                                                \
    X(std::string, language_model, "", "", word("FILE"), "Stages",                                                           \
      "drop documents by language, detected by this model from --train-language; each document gets the keys language and "  \
      "language_score")                                                                                                      \
    X(Strings, languages, "", {}, list(0, "LANGUAGE"), "Stages",                                                             \
      "languages to keep, by their names in the model, such as en ja; default: all of the model's")                          \
    X(double, min_language_score, "", 0.65, between(0, 1), "Stages",                                                         \
      "minimum probability of a document's language (FineWeb: 0.65)")                                                        \
    X(std::string, quality_model, "", "", word("FILE"), "Stages",                                                            \
      "drop documents by quality, scored from 0 to 1 by this model from --train-quality; each document gets the key "        \
      "quality_score")                                                                                                       \
    X(double, min_quality_score, "", 0.5, between(0, 1), "Stages", "minimum score of a document")                            \
    X(OptionalDouble, quality_pareto, "", {}, between(0.001, 1000), "Stages",                                                \
      "instead of a minimum score: keep a document if a draw from Pareto(ALPHA) exceeds 1 - score (GPT-3: 9, MT-NLG: 3)")    \
    X(Strings, train_language, "", {}, list(0, "LABEL:FILE"), "Classifiers",                                                 \
      "train a language classifier on these texts, one per line, and write it to --output: en:FILE ja:FILE, or a folder of " \
      "en.txt, ja.txt and so on")                                                                                            \
    X(Strings, train_quality, "", {}, list(0, "LABEL:FILE"), "Classifiers",                                                  \
      "train a quality classifier on these documents, separated by blank lines in text files: good:FILE bad:FILE")           \
    X(Strings, measure_on, "", {}, list(0, "LABEL:FILE"), "Classifiers",                                                     \
      "labeled texts on which a model is measured: the newly trained one (default: every twentieth of its texts) or, "       \
      "without training, --language-model or --quality-model")

#define CURATE_OPTIONS(X)                                                                                                   \
    TEXT_OPTIONS(X)                                                                                                         \
    X(std::string, split_documents, "", "file", one_of({"file", "blank", "line"}), "Input",                                 \
      "the documents of a text file: the whole file, its parts between blank lines, or its lines")                          \
    X(std::string, output, "", "", word("DIR"), "Output",                                                                   \
      "directory for data/part-00000.jsonl.zst and so on, curate.json and report.html; the same command resumes an "        \
      "interrupted curation")                                                                                               \
    X(std::string, output_format, "", "jsonl.zst", one_of({"jsonl.zst", "jsonl.gz", "jsonl"}), "Output",                    \
      "format of the files")                                                                                                \
    X(int64_t, shard_size, "", 256000000, between(1, 1e12), "Output", "bytes of text after which a new output file starts") \
    X(bool, normalize, "", false, anything(), "Stages",                                                                     \
      "fix encodings, remove control characters, normalize line ends and blank lines, apply Unicode's form NFC")            \
    X(Strings, heuristics, "", {}, list(0, "SET"), "Stages",                                                                \
      "drop documents by published rules, in this order: gopher, c4, fineweb; train_gpt help rules lists them")             \
    X(Strings, set, "", {}, list(0, "RULE=VALUE"), "Stages",                                                                \
      "other thresholds for these rules, such as gopher-min-words=100; off disables a rule")                                \
    X(Strings, stop_words, "", {}, list(0, "WORD"), "Stages", "words for gopher-stop-words; default: Gopher's eight")       \
    X(std::string, bad_words, "", "", word("FILE"), "Stages", "words and phrases for c4-bad-words, one per line")           \
    X(std::string, pii, "", "", one_of({"mask", "drop"}), "Stages",                                                         \
      "personal data: mask it, as <EMAIL> and so on, or drop the document")                                                 \
    X(Strings, pii_kinds, "", {}, list(0, "KIND"), "Stages",                                                                \
      "kinds of personal data: email, phone, card, ip, iban, id, key, user; default: all but user")                         \
    X(bool, pii_private_addresses, "", false, anything(), "Stages",                                                         \
      "also non-public IP addresses: private, loopback, documentation")                                                     \
    CLASSIFIER_OPTIONS(X)                                                                                                   \
    X(Strings, exact_duplicates, "", {}, list(0, "UNIT"), "Whole corpus",                                                   \
      "drop repetitions of these units: documents, paragraphs, lines")                                                      \
    X(bool, exact_folded, "", false, anything(), "Whole corpus", "with --exact-duplicates: ignore case and punctuation")    \
    X(Strings, near_duplicates, "", {}, list(0, "PRESET [SETTING=VALUE]"), "Whole corpus",                                  \
      "drop near duplicates, by the MinHash-LSH or SimHash of fineweb, nemo, llm-jp, mt-nlg, roots, roots-verified; "       \
      "other settings follow the name: fineweb jaccard=0.8 bands=20; documents of earlier --input names are kept")          \
    X(Strings, decontaminate, "", {}, list(0, "FILE"), "Whole corpus",                                                      \
      "cut out the questions of these task files (of eval --tasks), matched by n-grams of 8 to 13 words, as for MT-NLG")    \
    X(Strings, weights, "", {}, list(0, "SOURCE=W"), "Mixing",                                                              \
      "share of each --input in the output: web=0.7 books=0.3; documents are repeated or dropped")                          \
    X(double, temperature, "", 1, between(1, 1000), "Mixing",                                                               \
      "set the shares by size^(1/T) instead: above 1, small sources get more")                                              \
    X(int64_t, budget, "", 0, at_least(0), "Mixing",                                                                        \
      "size of the mixed output in bytes, or in tokens with --tokenizer; default: as much as there is")                     \
    X(std::string, tokenizer, "", "", word("DIR"), "Mixing",                                                                \
      "count sizes in tokens of this tokenizer: its directory or tokenizer.json")                                           \
    X(int64_t, memory_limit, "", 1000000000, between(1e6, 1e15), "Run",                                                     \
      "bytes of memory for tables and sorting, beyond which the disk is used; batches of documents are not included")       \
    X(int, samples, "", 5, between(0, 1000), "Output", "number of dropped documents per rule in the report")                \
    X(int64_t, seed, "", 1234, at_least(0), "Run", "seed of random choices")                                                \
    X(int, threads, "workers", 0, between(1, 4096), "Run", "CPU threads; default: all cores")

#define TOKENIZER_OPTIONS(X)                                                                                                \
    TEXT_OPTIONS(X)                                                                                                         \
    X(int, vocab_size, "", 32000, between(257, 10000000), "Tokenizer",                                                      \
      "number of tokens in the vocabulary, including special ones and the 256 bytes")                                       \
    X(std::string, type, "", "bpe", one_of({"bpe", "unigram"}), "Tokenizer",                                                \
      "byte-level byte-pair encoding, or a unigram model of characters that falls back to bytes")                           \
    X(std::string, pre_tokenizer, "", "gpt2", one_of({"gpt2", "llama3", "bloom"}), "Tokenizer",                             \
      "how text is split into words before pairs are merged, as in these models")                                           \
    X(Strings, special_tokens, "", (Strings{"<|endoftext|>", "<|im_start|>", "<|im_end|>"}), list(0, "TOKEN"), "Tokenizer", \
      "special tokens, which get the first ids; one of <|endoftext|>, <|end_of_text|>, <eos> and </s> ends documents")      \
    X(int, min_frequency, "", 2, between(1, 1000000000), "Tokenizer",                                                       \
      "minimum number of occurrences of a pair that is merged")                                                             \
    X(int, reserved_tokens, "", 0, between(0, 1000000), "Tokenizer",                                                        \
      "number of unused tokens reserved after the vocabulary for later special tokens (BLOOM has 200)")                     \
    X(int, pad_vocab_to_multiple, "", 1, between(1, 1000000), "Tokenizer",                                                  \
      "add unused tokens until the size of the vocabulary is a multiple of this (such as 128)")                             \
    X(std::string, output, "", "", word("DIR"), "Output", "directory for tokenizer.json")                                   \
    X(std::string, report, "", "", word("DIR"), "Output",                                                                   \
      "tokenizer to measure on --input (bytes per token and so on) instead of training one: its directory or file")         \
    X(int, threads, "", 0, between(1, 4096), "Run", "CPU threads; default: all cores")
