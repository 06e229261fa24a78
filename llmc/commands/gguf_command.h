// train_gpt export --gguf FILE: saves a model as one file for llama.cpp; train_gpt import --gguf FILE: converts such a file to
// a model directory. Tensor by tensor, in single precision in between: only the file's type loses precision.
//   gguf_model.h        names of the configuration and tensors
//   gguf_tokenizer.h    the tokenizer
#pragma once
#include <algorithm>
#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "../base/check.h"
#include "../base/file.h"
#include "../base/progress.h"
#include "../base/terminal.h"
#include "../base/text.h"
#include "../base/utf8.h"
#include "../tokenizer/gguf_tokenizer.h"
#include "../model/gguf.h"
#include "../model/gguf_model.h"
#include "../checkpoint/checkpoint.h"
#include "../checkpoint/gguf_directory.h"
#include "../options/options.h"
#include "../checkpoint/model_texts.h"
#include "../checkpoint/run_directory.h"

namespace detail {

// The configuration in GGUF's form. A window that the architecture lacks is dropped, and sequences are limited to its length.
inline ModelConfig config_for_gguf(ModelConfig c, const GgufArchitecture& a) {
    if (c.window != 0 && a.window_interval == 0) {
        if (c.window < c.T) {
            print_line(stderr, format("note: llama.cpp has no sliding window for %s: the context is limited to the window's "
                                      "%d tokens, within which the model is the same",
                                      a.name, c.window));
            c.T = c.window;
        }
        c.window = c.full_interval = 0;
    }
    check_gguf_says(c, a);
    return c;
}

// The type with this name; empty: the type of the model's own files, which stores the matrices without loss.
inline const GgufFileType& file_type_of(const std::string& word, const TensorSource& source, const ParameterTable& table) {
    const std::string dtype = source.gguf() ? "" : source.get(table.rows[0], table.rows[0].hf[0]).dtype;
    const std::string own = dtype == "BF16" ? "bf16" : dtype == "F16" ? "f16" : "f32";
    for (const GgufFileType& type : gguf_file_types)
        if (type.word == (word.empty() ? own : word)) return type;
    fail("there is no type %s", word.c_str());
}

// Our tensor `rows` as a tensor of the file.
inline std::vector<float> rows_for_gguf(const ModelConfig& c, const TensorSpec& spec, const GgufPart& part,
                                        const std::vector<float>& ours) {
    const size_t columns = (size_t)spec.cols, size = (size_t)part.rows * columns;
    std::vector<float> rows(size * (size_t)part.matrices());
    for (int e = 0; e < part.matrices(); e++)
        std::copy_n(&ours[(size_t)(part.row + e * part.next) * columns], size, &rows[(size_t)e * size]);
    if (part.paired_heads > 0) reorder_pairs(&ours[(size_t)part.row * columns], rows.data(), part, spec.cols, false);
    if (is_one_more(c, spec))
        for (float& x : rows) x += 1;
    return rows;
}

// Finds the tokens that end a turn and a message: the end of an answer in the model's chat template, if known, and the first
// other end token in config.json and generation_config.json, which also ends a text in llama.cpp.
inline void find_ends(GgufTokenizer& t, const std::string& dir) {
    const auto tokenizer = usable_tokenizer(dir);
    if (!tokenizer) return;
    t.eot = turn_end_of(*tokenizer, t.chat_template);
    try {
        for (const int id : model_texts(dir, tokenizer.get()).end_ids)
            if (id >= 0 && id < (int)t.tokens.size() && id != t.eos && id != t.eot && t.eom < 0) t.eom = id;
    } catch (const Error& e) {
        print_line(stderr, format("warning: of the end-of-text tokens only the tokenizer's are written: %s", e.what()));
    }
}

struct WrittenTensor {
    const TensorSpec* spec;
    GgufPart part;
    GgufType type;
};

// Notes matrices that are stored in a larger type, because their rows are not whole blocks of the requested one.
inline void note_other_types(const std::vector<WrittenTensor>& all, const GgufFileType& type) {
    const int block = (int)gguf_type(type.most).elements;
    int64_t matrices = 0, others = 0;
    for (const WrittenTensor& w : all) {
        if (w.type == GgufType::F32) continue;
        matrices++;
        others += w.spec->whole_cols % block != 0;
    }
    if (others > 0)
        print_line(stderr,
                   format("note: %s of %s are in Q8_0 or F16: their rows are not multiples of %d, the block size of %s",
                          with_commas(others).c_str(), counted(matrices, "matrix", "matrices").c_str(), block, type.word));
}

inline void write_gguf(const std::string& path, const ModelConfig& c, const GgufArchitecture& a, const GgufFileType& type,
                       const GgufTokenizer& tokenizer, const TensorSource& source, const std::string& name) {
    const ParameterTable table(c);
    GgufHeader header;
    header.add("general.architecture", a.name);
    header.add("general.type", "model");
    if (!name.empty()) header.add("general.name", name);
    const nlohmann::ordered_json metadata = gguf_metadata(c, a);
    for (const auto& [key, value] : metadata.items())
        if (key != "general.architecture") header.add(key, nlohmann::json(value));
    header.add("general.quantization_version", 2);
    header.add("general.file_type", type.id);
    add_tokenizer(header, tokenizer);
    std::vector<WrittenTensor> all;
    for (const TensorSpec& spec : table.rows)
        for (const GgufPart& part : gguf_parts(c, a, spec))
            all.push_back({&spec, part, gguf_type_of(c, spec, part.name, type)});
    note_other_types(all, type);
    if (c.tied && a.needs_output) {
        all.push_back(all[0]);
        all.back().part.name = "output.weight";
        all.back().type = gguf_type_of(c, table.rows[0], "output.weight", type);
    }
    for (const WrittenTensor& w : all) header.add_tensor(w.part.name, w.type, w.part.shape(*w.spec));
    const bool scaled = c.rope_scaling.type == RopeScaling::Type::llama3;
    const std::vector<float> factors = scaled ? rope_factors(c) : std::vector<float>{};
    if (scaled) header.add_tensor(gguf_rope_factors, GgufType::F32, {(int64_t)factors.size()});
    const std::string start = header.bytes();
    FileWriter file(path);
    file.write(start);
    Progress progress("writing " + path, (int64_t)(start.size() + header.data_bytes()), "bytes");
    std::vector<float> ours;
    std::string bytes;
    const TensorSpec* read = nullptr;
    for (const WrittenTensor& w : all) {
        if (read != w.spec) {
            read = w.spec;
            ours.resize(read->size());
            source.read(*read, ours.data());
        }
        const std::vector<float> rows = rows_for_gguf(c, *w.spec, w.part, ours);
        const GgufTypeRow& row = gguf_type(w.type);
        bytes.assign(rows.size() / row.elements * row.bytes, '\0');
        if (!quantize(w.type, rows.data(), rows.size(), bytes.data()))
            fail("%s has numbers that %s cannot hold; HINT: --type bf16 has the range of fp32", w.spec->hf[0].name.c_str(),
                 row.name);
        bytes.append(GgufHeader::padding(bytes.size()), '\0');
        file.write(bytes);
        progress.update((int64_t)file.written());
    }
    bytes.assign((const char*)factors.data(), factors.size() * sizeof(float));
    bytes.append(GgufHeader::padding(bytes.size()), '\0');
    file.write(bytes);
    file.commit();
    progress.finish();
}

// The elements of HfTensor t, in its layout, from ours.
template <class E>
std::string in_file_layout(const TensorSpec& spec, const HfTensor& t, const std::vector<float>& ours) {
    std::string bytes((size_t)t.rows * spec.whole_cols * sizeof(E), '\0');
    for_each_run(spec, t, [&](const TensorRun& run) {
        for (size_t k = 0; k < run.n; k++) {
            const auto x = (E)ours[run.place(k)];
            memcpy(bytes.data() + (run.file + k) * sizeof(E), &x, sizeof(E));
        }
    });
    return bytes;
}

// True if BF16 loses nothing.
inline bool fits_bf16(const GgufReader& file, const ModelConfig& c, const GgufArchitecture& a) {
    for (const TensorSpec& spec : ParameterTable(c).rows) {
        bool is_bf16 = true;
        for (const GgufPart& part : gguf_parts(c, a, spec)) {
            const GgufTensor* t = file.find(part.name);
            const bool fits = t && (t->type == GgufType::BF16 || t->type == GgufType::MXFP4);
            if (t && !fits && t->type != GgufType::F32) return false;
            is_bf16 &= fits;
        }
        if (is_bf16) continue;
        for (const float x : rows_from_gguf(c, a, file, spec))
            if ((float)bf16(x) != x) return false;
    }
    return true;
}

template <class E>
void write_weights_of_gguf(const std::string& dir, const GgufReader& file, const ModelConfig& c, const GgufArchitecture& a,
                           WrittenFiles& written) {
    const ParameterTable table(c);
    const TensorFiles files(dir + "/model.safetensors", table, dtype_of<E>);
    files.create(written);
    PieceWriter writer(files, written);
    Progress progress("reading " + file.path(), (int64_t)table.trained, "parameters");
    int64_t done = 0;
    for (const TensorSpec& spec : table.rows) {
        const std::vector<float> ours = rows_from_gguf(c, a, file, spec);
        for (const HfTensor& t : spec.hf) {
            const TensorFiles::FileOffset place = files.place(t.name);
            const std::string bytes = in_file_layout<E>(spec, t, ours);
            for (size_t at = 0, n; at < bytes.size(); at += n) {
                n = std::min(PieceWriter::most, bytes.size() - at);
                memcpy(writer.at(place.file, place.offset + at, n), bytes.data() + at, n);
            }
        }
        progress.update(done += (int64_t)ours.size());
    }
    writer.finish();
    progress.finish();
}

}  // namespace detail

inline int import_command(const ImportOptions& o) {
    namespace fs = std::filesystem;
    refuse_missing(o.gguf.empty(), "the file to read", "--gguf FILE.gguf");
    refuse_missing(o.out.empty(), "the directory to write", "--out DIR");
    const std::string out = without_trailing_slashes(o.out);
    if (fs::exists(fs::symlink_status(out))) fail("%s exists; HINT: give the name of a directory that does not", out.c_str());
    const GgufModel model(o.gguf);
    const GgufReader& file = model.file;
    const GgufArchitecture& a = model.architecture;
    const ModelConfig& c = model.c;
    const GgufTokenizer tokenizer = o.weights_only ? GgufTokenizer{} : read_gguf_tokenizer(file.metadata(), o.gguf);
    const bool as_bf16 = detail::fits_bf16(file, c, a);
    const ModelTexts texts = texts_of_gguf(model, tokenizer, as_bf16 ? "bfloat16" : "float32");

    const NewDirectory directory(out);
    directory.write([&](WrittenFiles& written) {
        write_model_texts(directory.path(), c, texts, written);
        if (texts.has_tokenizer) Tokenizer::load(directory.path()).fit(c.V, true);
        if (as_bf16) detail::write_weights_of_gguf<bf16>(directory.path(), file, c, a, written);
        else detail::write_weights_of_gguf<float>(directory.path(), file, c, a, written);
    });
    print_line(stdout, format("%s: a %s model in %s, %s", out.c_str(), c.family.c_str(), as_bf16 ? "BF16" : "F32",
                              texts.has_tokenizer ? "tokenizer included" : "without a tokenizer"));
    return 0;
}

inline int export_command(World& world, const ExportOptions& o) {
    namespace fs = std::filesystem;
    refuse_missing(o.model.empty(), "the model", "--model DIR");
    refuse_missing(o.gguf.empty(), "the output", "--gguf FILE.gguf, or --out DIR for a copy without the training state");
    if (o.gguf == "-") fail_usage("--gguf - is not supported: tensors are not written sequentially; HINT: --gguf FILE.gguf");
    if (fs::exists(fs::symlink_status(o.gguf)) && !o.overwrite)
        fail("%s exists; HINT: give another name, or --overwrite to replace it", o.gguf.c_str());
    const std::string dir = model_directory(o.model);
    ModelConfig c = read_config(dir);
    note_odd_keys(dir);
    check_weights(world, dir);
    pad_vocabulary(c, 1);
    const GgufArchitecture& a = gguf_architecture_of(c);
    const TensorSource source(dir, c);
    ModelConfig written = detail::config_for_gguf(c, a);
    const GgufFileType& type = detail::file_type_of(o.type, source, ParameterTable(c));
    GgufTokenizer tokenizer = o.weights_only ? GgufTokenizer{} : read_hf_tokenizer(dir, c.V);
    if (!tokenizer.model.empty()) detail::find_ends(tokenizer, dir);
    const std::string name = fs::path(fs::absolute(o.model).lexically_normal()).filename().string();
    detail::write_gguf(o.gguf, written, a, type, tokenizer, source, name);
    print_line(stdout,
               format("%s: %s of architecture %s, %s, %s", o.gguf.c_str(), human_bytes((double)fs::file_size(o.gguf)).c_str(),
                      a.name, type.word, tokenizer.model.empty() ? "without a tokenizer" : "tokenizer included"));
    return 0;
}
