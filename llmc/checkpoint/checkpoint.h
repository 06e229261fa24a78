// A checkpoint is a model directory in Hugging Face's format: transformers opens it unchanged, and directories that
// transformers wrote are read here:
//   config.json, generation_config.json, tokenizer.json, tokenizer_config.json
//   model.safetensors                     or model-0000i-of-0000n.safetensors with model.safetensors.index.json
//   training/master.safetensors           fp32 weights (unless the model's are fp32)
//   training/exp_avg.safetensors, training/exp_avg_sq.safetensors     AdamW's moments
//   training/state.json                   counters, options and everything that a resumed run must agree with
//   manifest.json                         size and CRC-32C of every other file
// Every tensor is stored whole, under its Hugging Face name and in that layout, for any machine or number of ranks. A run that
// trains adapters (adapters.h) saves an adapter directory in PEFT's format (adapter_files.h): adapter_config.json and
// adapter_model.safetensors replace config.json and model.safetensors, and all tensors are the adapters'.
//   NewDirectory        writes under a temporary name, syncs, renames: never an incomplete directory under its final name
//   verify_directory    compares a directory with its manifest
//   read_config, read_parameters, read_tensors   reject, by name, tensors or keys that are missing, have another shape, or are
//                       not supported
#pragma once
#include <fcntl.h>
#include <unistd.h>

#include <filesystem>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "../base/check.h"
#include "../base/crc32c.h"
#include "../base/file.h"
#include "../base/json.h"
#include "../model/adapters.h"
#include "../model/hf_config.h"
#include "../model/parameters.h"
#include "../model/quantize.h"
#include "../base/safetensors.h"
#include "../optimizer/shard.h"
#include "../parallel/world.h"
#include "../base/types.h"
#include "bitsandbytes.h"
#include "file_sums.h"
#include "gguf_weights.h"

inline nlohmann::json read_json(const std::string& path) { return parse_json(read_whole_file(path), path); }

// ---- reading ---------------------------------------------------------------------------------------------------------------
inline constexpr const char* adapter_config_file = "/adapter_config.json";
inline bool is_adapter(const std::string& dir) { return file_exists(dir + adapter_config_file); }
inline bool is_model_or_adapter(const std::string& dir) { return file_exists(dir + "/config.json") || is_adapter(dir); }

inline ModelConfig read_config(const std::string& dir) {
    if (!is_folder(dir)) fail("model directory %s does not exist", dir.c_str());
    if (is_adapter(dir) && !file_exists(dir + "/config.json")) {
        const nlohmann::json adapter = read_json(dir + adapter_config_file);
        const bool lora = adapter.is_object() && adapter.value("peft_type", nlohmann::json()) == "LORA";
        const std::string merge = "; train_gpt export --merge --adapter " + dir + " --out MERGED merges them into one model";
        fail("%s holds adapters, not a model; HINT: generate, eval and serve take --model BASE --adapter %s%s", dir.c_str(),
             dir.c_str(), lora ? merge.c_str() : "");
    }
    const std::string path = dir + "/config.json";
    if (!file_exists(path))
        fail(
            "%s holds no model: it has no config.json; HINT: --model takes a directory of Hugging Face's form, the output "
            "directory of a run with a checkpoint, or a .gguf file",
            dir.c_str());
    const nlohmann::json file = read_json(path);
    ModelConfig c = from_hf_config(file, path);
    check_config_of(file, path, c);
    if (const auto gguf = gguf_model_in(dir)) c.coded = gguf->formats();
    return c;
}

// Keys of a model's config.json that this program does not know, or "".
inline std::string unknown_keys_of(const std::string& dir) {
    const std::string path = dir + "/config.json";
    return joined(unknown_keys(read_json(path), path));
}
inline void note_odd_keys(const std::string& dir) {
    const std::string path = dir + "/config.json";
    const nlohmann::json file = read_json(path);
    if (const std::string keys = joined(unknown_keys(file, path)); !keys.empty())
        print_line(stderr,
                   format("note: %s has unsupported keys: %s; HINT: if the model needs one of them, results will be wrong",
                          path.c_str(), keys.c_str()));
    if (const std::string ids = joined(ids_outside_vocabulary(file, path)); !ids.empty())
        print_line(stderr, format("note: %s has ids of tokens that its vocabulary lacks: %s", path.c_str(), ids.c_str()));
}

// Shape of a tensor in a file.
inline std::vector<int64_t> file_shape(const TensorSpec& spec, const HfTensor& t) {
    std::vector<int64_t> shape = {t.rows_of_matrix(), spec.whole_cols};
    if (spec.vector()) shape.pop_back();
    else if (t.transposed) std::swap(shape[0], shape[1]);
    if (t.stacked) shape.insert(shape.begin(), t.stacked);
    if (t.alternating) shape[1] *= t.alternating;
    return shape;
}

inline std::string expert_biases_name(const ModelConfig& c, int layer) {
    const TensorNames& names = family_of(c).names;
    return std::string(names.top) + names.layer + std::to_string(layer) + "." + names.expert_biases;
}

// The weights of a model (or its moments) in a .safetensors file or a directory with model.safetensors, of any float type:
// exactly the ones that the model, or the adapters on it, need.
class TensorSource {
public:
    TensorSource(const std::string& path, const ModelConfig& c) : path_(path), c_(c), gguf_(gguf_model_in(path)) {
        if (gguf_) return;
        files_ = SafetensorsReader::open(path);
        unwrap();
        const TensorNames& names = family_of(c).names;
        if (names.transposes_experts) unpack_mxfp4();
        unpack_bitsandbytes();
        std::set<const TensorView*> used;
        for (const TensorSpec& spec : trained_table(c).rows)
            for (const HfTensor& t : spec.hf)
                if (const LoraInFile* adapter = in_file(t); !adapter || adapter->rank > 0) used.insert(&get(spec, t));
        // An unknown weight means that the file holds another model. Masks and rotary angles are not weights; a tied head is a
        // copy, but its adapters are not.
        if (c.tied && !c.adapted()) used.insert(find(names.head + std::string(".weight")));
        for (const auto& [name, packed] : packed_)
            if (used.count(&packed.tensor)) used.insert(packed.parts.begin(), packed.parts.end());
        for (int layer = 0; layer < c.L && c.mixture.bias; layer++)
            if (c.has_mixture(layer)) used.insert(find(expert_biases_name(c, layer)));  // not in files of moments
        for (const auto& [name, tensor] : files_.tensors()) {
            const auto has = [&, &n = name](const std::string& part) { return n.find(part) != std::string::npos; };
            bool known = used.count(&tensor) || has(".inv_freq");
            for (const char* part : names.not_ours) known = known || has(part);
            if (!known)
                fail("%s contains the tensor '%s', which %s does not have%s", path.c_str(), name.c_str(), described(c).c_str(),
                     hint(c));
        }
    }

    // Fills ours (rows x cols of the row of the table). Padded vocabulary rows become zero. Non-finite numbers are rejected: a
    // model with one generates nonsense and cannot be trained.
    template <class E>
    void read(const TensorSpec& spec, E* ours) const {
        if (gguf_) return gguf_->read(spec, ours);
        std::vector<E> strided;
        std::fill(ours, ours + spec.size(), E(0));
        for (const HfTensor& t : spec.hf) {
            if (const LoraInFile* adapter = in_file(t)) {
                read_padded(spec, t, *adapter, ours);
                continue;
            }
            const TensorView& view = get(spec, t);
            for_each_run(spec, as_stored(t, view), [&](const TensorRun& run) {
                if (run.stride == 1 && !run.half) return files_.read_as(view, run.file, run.n, ours + run.ours);
                strided.resize(run.n);
                files_.read_as(view, run.file, run.n, strided.data());
                for (size_t k = 0; k < run.n; k++) ours[run.place(k)] = strided[k];
            });
        }
        if (!all_finite(ours, spec.size()))
            fail("%s: tensor '%s' holds numbers that are not finite; HINT: download or copy it again", path_.c_str(),
                 spec.hf[0].name.c_str());
        if (c_.tied && spec.id == 0) check_head(spec, ours);
    }
    const GgufModel* gguf() const { return gguf_.get(); }  // null: the weights are not in a GGUF file
    // (L, E) of all layers.
    std::vector<real> expert_biases() const {
        const auto E = (size_t)c_.mixture.experts;
        std::vector<real> biases((size_t)c_.L * E);
        for (int layer = 0; layer < c_.L; layer++) {
            if (!c_.has_mixture(layer)) continue;
            const std::string name = expert_biases_name(c_, layer);
            const TensorView* view = find(name);
            if (!view) fail("%s has no tensor '%s', which its config.json requires", path_.c_str(), name.c_str());
            if (view->shape != std::vector<int64_t>{(int64_t)E})
                fail("%s: tensor '%s' has shape %s; config.json requires [%zu]", path_.c_str(), name.c_str(),
                     shape_string(view->shape).c_str(), E);
            files_.read_as(*view, &biases[(size_t)layer * E]);
        }
        if (!all_finite(biases.data(), biases.size()))
            fail("%s: the biases of experts are not all finite; HINT: download or copy it again", path_.c_str());
        return biases;
    }
    static std::string described(const ModelConfig& c) {
        return format("a %s model of %s", c.family.c_str(), counted(c.L, "layer").c_str());
    }
    static const char* hint(const ModelConfig& c) {
        return c.adapted() ? "" : "; HINT: config.json describes another model, or a number in it is wrong";
    }
    // Fails if it is missing or has another shape.
    const TensorView& get(const TensorSpec& spec, const HfTensor& t) const {
        CHECK(!gguf_, "tensors of GGUF files are not stored as '%s'", t.name.c_str());
        const TensorView* view = find(t.name);
        if (!view)
            fail("%s has no tensor '%s', which %s needs%s", path_.c_str(), t.name.c_str(), described(c_).c_str(), hint(c_));
        std::vector<int64_t> shape = file_shape(spec, as_stored(t, *view));
        if (const LoraInFile* adapter = in_file(t))
            shape[is_lora_a(t) ? 0 : 1] = (int64_t)adapter->rank * std::max(1, t.below + t.alternating);
        if (view->shape != shape)
            fail("%s: tensor '%s' has shape %s; config.json requires %s", path_.c_str(), t.name.c_str(),
                 shape_string(view->shape).c_str(), shape_string(shape).c_str());
        return *view;
    }

private:
    // Rows of codes are contiguous.
    static HfTensor as_stored(HfTensor t, const TensorView& view) {
        if (view.decode) t.transposed = false;
        return t;
    }
    static bool is_lora_a(const HfTensor& t) { return t.name.find(".lora_A.") != std::string::npos; }
    // The matrix's adapter, if adapters differ; else null.
    const LoraInFile* in_file(const HfTensor& t) const {
        const std::string matrix = t.name.substr(0, t.name.find(".lora_"));
        for (const LoraInFile& adapter : c_.lora.in_files)
            if (ends_with(matrix, "." + adapter.matrix)) return &adapter;
        return nullptr;
    }
    // An adapter's A or B of a smaller rank: rows of A and columns of B are missing. Its scale is folded into B.
    template <class E>
    void read_padded(const TensorSpec& spec, const HfTensor& t, const LoraInFile& adapter, E* ours) const {
        if (adapter.rank == 0) return;
        const TensorView& view = get(spec, t);
        const std::vector<int64_t> shape = file_shape(spec, t);
        const bool a = is_lora_a(t);
        // Matrices of `rows` rows below each other, of which the file has the first `has` rows.
        const auto n = (size_t)std::max(1, t.below), rows = (size_t)shape[0] / n, has = (size_t)view.shape[0] / n;
        const auto to = (size_t)shape[1], from = (size_t)view.shape[1];
        std::vector<E> stored(n * has * from), padded(n * rows * to, E(0));
        files_.read_as(view, stored.data());
        for (size_t r = 0; r < n * has; r++)
            for (size_t i = 0; i < from; i++)
                padded[(r / has * rows + r % has) * to + i] =
                    (E)((float)stored[r * from + i] * (a ? 1 : (float)adapter.factor));
        for_each_run(spec, t, [&](const TensorRun& run) {
            for (size_t k = 0; k < run.n; k++) ours[run.place(k)] = padded[run.file + k];
        });
    }
    // Rejects a head that is stored next to the embedding it is tied to, unless both hold the same numbers: transformers 5 then
    // uses the file's head, although config.json declares them tied.
    template <class E>
    void check_head(const TensorSpec& spec, const E* embedding) const {
        const std::string name = family_of(c_).names.head + std::string(".weight");
        const TensorView* head = find(name);
        if (!head) return;
        const HfTensor& t = spec.hf[0];
        bool same = head->shape == file_shape(spec, t);
        std::vector<E> part((size_t)1 << 20);
        const auto compare = [&](const TensorRun& run) {
            for (size_t done = 0, k = 0; same && done < run.n; done += k) {
                k = std::min(part.size(), run.n - done);
                files_.read_as(*head, run.file + done, k, part.data());
                same = !memcmp(part.data(), embedding + run.ours + done, k * sizeof(E));
            }
        };
        if (same) for_each_run(spec, t, compare);
        if (!same)
            fail(
                "%s: 'tie_word_embeddings' is true, but the tensor '%s' differs from the embedding; HINT: set it to false in "
                "config.json to load the file's head",
                path_.c_str(), name.c_str());
    }
    // The tensor with this name or an alternative form of it; null if there is none.
    const TensorView* find(const std::string& name) const {
        const TensorView* view = by_name(name);
        for (const auto& [ours, theirs] : family_of(c_).names.other_prefixes)
            if (const size_t n = strlen(ours); !view && name.compare(0, n, ours) == 0) view = by_name(theirs + name.substr(n));
        return view;
    }
    const TensorView* by_name(const std::string& name) const {
        if (const auto packed = packed_.find(name); packed != packed_.end()) return &packed->second.tensor;
        if (const TensorView* view = files_.find(name)) return view;
        const auto found = unwrapped_.find(name);
        return found == unwrapped_.end() ? nullptr : found->second;
    }
    // Makes tensors of the pairs NAME_blocks, NAME_scales.
    void unpack_mxfp4() {
        const std::string ending = "_blocks";
        for (const auto& [blocks, view] : files_.tensors()) {
            if (!ends_with(blocks, ending)) continue;
            const std::string name = blocks.substr(0, blocks.size() - ending.size());
            if (files_.find(name)) continue;  // the file contains it as numbers, too
            const TensorView* scales = files_.find(name + "_scales");
            if (!scales || !are_mxfp4(view, *scales))
                fail("%s: the tensor '%s' has no scale for each 16 bytes, as MXFP4 has; HINT: download or copy it again",
                     path_.c_str(), blocks.c_str());
            packed_[name] = {mxfp4_tensor(view, *scales), {&view, scales}};
        }
    }
    // Makes tensors of the matrices that bitsandbytes stores in 4 bits.
    void unpack_bitsandbytes() {
        for (const auto& tensor : files_.tensors()) {
            const std::string& state = tensor.first;
            const size_t n = state.find(bitsandbytes_state);
            if (n == std::string::npos) continue;
            const std::string name = state.substr(0, n);
            PackedTensor packed = {{}, {&tensor.second}};
            const auto part = [&](const char* ending) -> const TensorView& {
                const TensorView* found = files_.find(name + ending);
                if (!found)
                    fail("%s has no tensor '%s%s', which '%s' needs; HINT: download or copy it again", path_.c_str(),
                         name.c_str(), ending, state.c_str());
                packed.parts.push_back(found);
                return *found;
            };
            packed.tensor = bitsandbytes_tensor(tensor.second, part, path_ + ": tensor '" + name + "'");
            packed_[name] = packed;
        }
    }
    // Removes the parts of names that torch.compile, DistributedDataParallel and FSDP insert into a saved module's.
    void unwrap() {
        for (const auto& [name, view] : files_.tensors()) {
            std::string plain = name;
            for (size_t n; (n = wrapper_at(plain, 0)) > 0;) plain.erase(0, n);
            for (size_t dot = plain.find('.'); dot != std::string::npos; dot = plain.find('.', dot + 1))
                while (const size_t n = wrapper_at(plain, dot + 1)) plain.erase(dot + 1, n);
            if (plain != name && (files_.find(plain) || !unwrapped_.emplace(plain, &view).second))
                fail("%s holds the tensor '%s' twice, once as '%s'", path_.c_str(), plain.c_str(), name.c_str());
        }
    }
    static size_t wrapper_at(const std::string& name, size_t at) {
        for (const std::string word : {"_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "module."})
            if (name.compare(at, word.size(), word) == 0 && (at == 0 || word[0] == '_')) return word.size();
        return 0;
    }

    std::string path_;
    ModelConfig c_;
    std::shared_ptr<const GgufModel> gguf_;
    SafetensorsReader files_;
    std::map<std::string, const TensorView*> unwrapped_;  // by their names without wrappers
    struct PackedTensor {
        TensorView tensor;
        std::vector<const TensorView*> parts;  // in the files
    };
    std::map<std::string, PackedTensor> packed_;  // stored as codes: MXFP4, bitsandbytes
};

// Encodes a tensor from its numbers. Returns false if one of them is too large for the format.
inline bool quantize_tensor(const TensorSpec& spec, const float* numbers, uint8_t* to) {
    bool fits = true;
    for (const CodedRows& r : coded_rows(spec))
        fits &= quantize_weights(r.format, numbers + (size_t)r.row * spec.cols, (size_t)r.rows * spec.cols, to + r.offset);
    return fits;
}

// The numbers of a tensor whose codes are at `from`.
inline void dequantize_tensor(cpu::Ctx& ctx, floatX* numbers, const TensorSpec& spec, const uint8_t* from) {
    for (const CodedRows& r : coded_rows(spec))
        cpu::dequantize_weights(ctx, numbers + (size_t)r.row * spec.cols, {r.format, from + r.offset},
                                (size_t)r.rows * spec.cols);
}

// Fills buffer (table.size) and, with the tensors to be quantized, `quantized` (table.quantized_bytes).
template <class E>
void read_tensors(const std::string& path, const ModelConfig& c, const ParameterTable& table, E* buffer,
                  uint8_t* quantized = nullptr) {
    const TensorSource source(path, c);
    const bool keeps_codes = table.base_format == WeightFormat::gguf;
    std::vector<float> numbers;
    for (const TensorSpec& spec : table.rows) {
        if (!spec.quantized()) {
            source.read(spec, buffer + spec.offset);
            continue;
        }
        if (keeps_codes) {
            source.gguf()->read_codes(spec, quantized + spec.offset);
            continue;
        }
        numbers.resize(spec.size());
        source.read(spec, numbers.data());
        if (!quantize_tensor(spec, numbers.data(), quantized + spec.offset))
            fail("%s: tensor '%s' has numbers that are too large for %s; HINT: --quantize-base nf4, or none", path.c_str(),
                 spec.hf[0].name.c_str(), weight_format_row(spec.formats[0]).word);
    }
}

// The configuration that determines the names of a directory's tensors: the directory's family, not c's, which options may have
// changed.
inline ModelConfig as_stored(const std::string& dir, const ModelConfig& c) {
    ModelConfig stored = without_adapters(c);
    if (!file_exists(dir + "/config.json")) return stored;
    const ModelConfig read = read_config(dir);
    stored.family = read.family;
    if (!read.mixture.on()) stored.mixture = {};
    stored.mixture.bias = read.mixture.bias;
    return stored;
}

// The biases of c's experts (L, E): the directory's, or zeros if its model has none.
inline std::vector<real> read_expert_biases(const std::string& dir, const ModelConfig& c) {
    const ModelConfig stored = as_stored(dir, c);
    if (stored.mixture.bias) return TensorSource(dir, stored).expert_biases();
    return std::vector<real>((size_t)c.L * (size_t)c.mixture.experts);
}

// The model's own parameters. If c is a mixture and the directory has a dense model, each expert becomes a copy of its MLP
// ("sparse upcycling", Komatsuzaki et al., 2023), and the routers are not set.
template <class E>
void read_parameters(const std::string& dir, const ModelConfig& c, const ParameterTable& table, E* params,
                     uint8_t* quantized = nullptr) {
    const ModelConfig stored = as_stored(dir, c);
    const std::vector<TensorSpec> named = ParameterTable(stored, table.part).rows;
    ParameterTable in_files = table;
    in_files.rows.clear();
    for (TensorSpec t : table.rows) {
        const TensorSpec& dense = named[in_files.rows.size()];
        if (dense.name != t.name) continue;  // a router
        t.hf = dense.hf;
        for (int e = 1; e < t.whole_rows / dense.whole_rows; e++)
            for (HfTensor copy : dense.hf) {
                copy.row += e * dense.whole_rows;
                t.hf.push_back(copy);
            }
        in_files.rows.push_back(t);
    }
    read_tensors(dir, stored, in_files, params, quantized);
}

// True if a model's files have weights that floatX would round.
inline bool finer_than_floatX(const std::string& dir) {
    if (const auto gguf = gguf_model_in(dir))
        return has_lower_halves && std::any_of(gguf->file.tensors().begin(), gguf->file.tensors().end(),
                                               [](const GgufTensor& t) { return t.type != GgufType::BF16; });
    const SafetensorsReader files = SafetensorsReader::open(dir);
    return has_lower_halves && std::any_of(files.tensors().begin(), files.tensors().end(), [](const auto& tensor) {
               return tensor.second.dtype != "BF16" && tensor.second.dtype != "U8";
           });
}

// ---- writing ---------------------------------------------------------------------------------------------------------------
// A vector that is stored in fp32, whatever the type of the other tensors.
struct VectorInFile {
    std::string name;
    std::vector<float> values;
};
// The biases of experts; empty if the model has none.
inline std::vector<VectorInFile> expert_biases_in_file(const ModelConfig& c, const std::vector<real>& biases) {
    std::vector<VectorInFile> all;
    const int E = c.mixture.experts;
    for (int i = 0; c.mixture.bias && i < c.L; i++)
        if (const auto from = biases.begin() + i * E; c.has_mixture(i))
            all.push_back({expert_biases_name(c, i), {from, from + E}});
    return all;
}

// The files that hold one value per parameter (weights or a moment): `path`, or, above shard_bytes, several files next to it
// with an index, named as in transformers. The position of each tensor depends only on the model, so any number of ranks can
// write into them.
class TensorFiles {
public:
    static constexpr size_t most_bytes = 5000000000;  // of tensors in a file
    struct File {
        std::string path, start;  // start: its header and vectors
        size_t bytes = 0;
    };
    struct FileOffset {
        size_t file, offset;  // offset in bytes
    };

    // whole: the table of a rank that holds everything. dtype: BF16, F32, F64. vectors: tensors at the start of the first file.
    TensorFiles(const std::string& path, const ParameterTable& whole, const std::string& dtype, size_t shard_bytes = most_bytes,
                const std::vector<VectorInFile>& vectors = {})
        : element_bytes(dtype_bytes(dtype)) {
        namespace fs = std::filesystem;
        using Part = std::pair<const TensorSpec*, const HfTensor*>;
        const auto bytes_of = [&](const Part& p) { return (size_t)p.second->rows * p.first->whole_cols * element_bytes; };
        std::vector<std::vector<Part>> shards(1);
        size_t in_shard = 0, total = 0;
        for (const VectorInFile& v : vectors) total += v.values.size() * sizeof(float);
        for (const TensorSpec& spec : whole.rows)
            for (const HfTensor& t : spec.hf) {
                const Part part = {&spec, &t};
                if (in_shard > 0 && in_shard + bytes_of(part) > shard_bytes) {
                    shards.emplace_back();
                    in_shard = 0;
                }
                shards.back().push_back(part);
                in_shard += bytes_of(part);
                total += bytes_of(part);
            }
        nlohmann::ordered_json index = {{"metadata", {{"total_size", total}}},
                                        {"weight_map", nlohmann::ordered_json::object()}};
        const fs::path stem = fs::path(path).parent_path() / fs::path(path).stem();
        for (size_t i = 0; i < shards.size(); i++) {
            File file;
            file.path = shards.size() == 1 ? path : format("%s-%05zu-of-%05zu.safetensors", stem.c_str(), i + 1, shards.size());
            nlohmann::ordered_json header = {{"__metadata__", {{"format", "pt"}}}};  // required by transformers
            size_t at = 0;
            std::string in_start;
            const std::string name = fs::path(file.path).filename().string();
            for (const VectorInFile& v : i == 0 ? vectors : std::vector<VectorInFile>()) {
                const size_t bytes = v.values.size() * sizeof(float);
                header[v.name] = {{"dtype", "F32"}, {"shape", {v.values.size()}}, {"data_offsets", {at, at + bytes}}};
                index["weight_map"][v.name] = name;
                in_start.append((const char*)v.values.data(), bytes);
                at += bytes;
            }
            for (const Part& part : shards[i]) {
                const auto& [spec, t] = part;
                header[t->name] = {
                    {"dtype", dtype}, {"shape", file_shape(*spec, *t)}, {"data_offsets", {at, at + bytes_of(part)}}};
                index["weight_map"][t->name] = name;
                places_[t->name] = {i, at};
                at += bytes_of(part);
            }
            const std::string start = safetensors_start(header);
            file.start = start + in_start;
            file.bytes = start.size() + at;
            for (const Part& part : shards[i]) places_[part.second->name].offset += start.size();
            files.push_back(file);
        }
        if (files.size() > 1) {
            index_path = path + ".index.json";
            index_text = index.dump(2) + "\n";
        }
    }

    // Creates the files with their full size, for tensors to be written into.
    void create(WrittenFiles& written) const {
        for (const File& file : files) {
            written.add(file.path, 0, file.start.data(), file.start.size(), file.bytes - file.start.size());
            if (written.in_part()) continue;
            const int fd = create_new_file(file.path);
            if (fd < 0) fail_to_write(file.path, errno);
            const auto some = [&](size_t n) { return pwrite(fd, file.start.data() + n, file.start.size() - n, (off_t)n); };
            const bool done = move_all(file.start.size(), some) && ftruncate(fd, (off_t)file.bytes) == 0;
            const int error = errno;
            close(fd);
            if (!done) fail_to_write(file.path, error);
        }
        if (!index_path.empty()) written.write(index_path, index_text);
    }

    const FileOffset& place(const std::string& name) const { return places_.at(name); }

    std::vector<File> files;
    size_t element_bytes;
    std::string index_path, index_text;  // if there are several files

private:
    std::map<std::string, FileOffset> places_;
};

// Writes into TensorFiles at any offset; consecutive pieces are written together.
class PieceWriter {
public:
    PieceWriter(const TensorFiles& files, WrittenFiles& written)
        : files_(files), written_(written), fds_(files.files.size(), -1) {}
    PieceWriter(const PieceWriter&) = delete;
    PieceWriter& operator=(const PieceWriter&) = delete;
    ~PieceWriter() {
        for (const int fd : fds_)
            if (fd >= 0) close(fd);
    }

    static constexpr size_t most = 4 << 20;

    // A buffer for `bytes`, at most `most`, at this offset, which the caller must fill immediately.
    char* at(size_t file, size_t offset, size_t bytes) {
        if (file != file_ || offset != offset_ + buffer_.size() || buffer_.size() + bytes > most) {
            flush();
            file_ = file;
            offset_ = offset;
        }
        buffer_.resize(buffer_.size() + bytes);
        return buffer_.data() + buffer_.size() - bytes;
    }
    // Writes and syncs everything.
    void finish() {
        flush();
        for (size_t i = 0; i < fds_.size(); i++) sync(i);
    }

private:
    [[noreturn]] void failed(size_t file) const { fail_to_write(files_.files[file].path, errno); }
    void sync(size_t file) {
        if (fds_[file] >= 0 && fsync(fds_[file]) != 0 && errno != EINVAL) failed(file);
        written_.tick();
        unsynced_ = 0;
    }
    void flush() {
        if (buffer_.empty()) return;
        const TensorFiles::File& file = files_.files[file_];
        written_.add(file.path, offset_, buffer_.data(), buffer_.size(), file.bytes - offset_ - buffer_.size());
        if (written_.in_part()) return buffer_.clear();
        int& fd = fds_[file_];
        if (fd < 0) fd = open(file.path.c_str(), O_WRONLY | O_NOFOLLOW | O_CLOEXEC);
        if (fd < 0) failed(file_);
        const auto some = [&](size_t done) {
            return pwrite(fd, buffer_.data() + done, buffer_.size() - done, (off_t)(offset_ + done));
        };
        if (!move_all(buffer_.size(), some)) failed(file_);
        // Now and then, so that no sync takes as long as a disk needs for all of a file.
        if ((unsynced_ += buffer_.size()) >= most_unsynced) sync(file_);
        buffer_.clear();
    }

    static constexpr size_t most_unsynced = 1 << 30;
    const TensorFiles& files_;
    WrittenFiles& written_;
    std::vector<int> fds_;
    size_t file_ = 0, offset_ = 0, unsynced_ = 0;
    std::vector<char> buffer_;
};

// Writes the elements that a rank counts in its shards: part(i) is element i of them in the layout of `shards`, of the files'
// type; `counted` are elements of the table. Non-finite numbers are an error with the tensor's name: a checkpoint with them
// would be useless and would replace a good one.
template <class Part>
void write_parts(const TensorFiles& files, const ParameterTable& table, const Shards& shards, const std::vector<Range>& counted,
                 WrittenFiles& written, Part part) {
    using E = decltype(part(0));
    PieceWriter writer(files, written);
    for (const TensorSpec& spec : table.rows)
        for (const HfTensor& t : spec.hf) {
            const TensorFiles::FileOffset place = files.place(t.name);
            // Elements [begin, end) of a run, of which element k is element value(k) of the shards.
            const auto write = [&](size_t in_file, size_t begin, size_t end, auto value) {
                for (size_t piece = begin, last; piece < end; piece = last) {
                    last = std::min(end, piece + PieceWriter::most / sizeof(E));
                    char* to = writer.at(place.file, place.offset + (in_file + piece) * sizeof(E), (last - piece) * sizeof(E));
                    bool finite = true;
                    for (size_t k = piece; k < last; k++, to += sizeof(E)) {
                        const E x = part(value(k));
                        finite &= std::isfinite((real)x);
                        memcpy(to, &x, sizeof(E));
                    }
                    if (!finite)
                        fail(
                            "%s of %s is not finite; HINT: training diverged: resume from an older checkpoint with a "
                            "lower --lr, or with --on-spike rollback",
                            t.name.c_str(), std::filesystem::path(files.files[place.file].path).filename().c_str());
                }
            };
            // Calls visit(begin, end, value) for the counted ones of n elements first + k stride of the table.
            const auto for_counted = [&](size_t first, size_t stride, size_t n, auto visit) {
                const auto index = [&](size_t element) {
                    return element <= first ? 0 : (element - first + stride - 1) / stride;
                };
                for (const Range& r : counted) {
                    const size_t k0 = index(r.begin), k1 = std::min(n, index(r.end));
                    if (r.end <= first || k0 >= k1) continue;
                    shards.for_each_part(first, (n - 1) * stride + 1, [&](size_t from, size_t shard, size_t elements) {
                        const size_t begin = std::max(k0, (from + stride - 1) / stride),
                                     end = std::min(k1, (from + elements + stride - 1) / stride);
                        if (begin < end) visit(begin, end, [=](size_t k) { return shard + (k * stride - from); });
                    });
                }
            };
            std::vector<size_t> values;  // of gate and up in turn
            for_each_run(spec, t, [&](const TensorRun& run) {
                if (!run.half)
                    return for_counted(spec.offset + run.ours, run.stride, run.n,
                                       [&](size_t begin, size_t end, auto value) { write(run.file, begin, end, value); });
                values.assign(run.n, SIZE_MAX);
                for (const size_t half : {0, 1})
                    for_counted(spec.offset + run.ours + half * run.half, run.stride, run.n / 2,
                                [&](size_t begin, size_t end, auto value) {
                                    for (size_t k = begin; k < end; k++) values[2 * k + half] = value(k);
                                });
                for (size_t begin = 0, end; begin < run.n; begin = end) {
                    const bool ours = values[begin] != SIZE_MAX;
                    for (end = begin + 1; end < run.n && (values[end] != SIZE_MAX) == ours;) end++;
                    if (ours) write(run.file, begin, end, [&](size_t k) { return values[k]; });
                }
            });
        }
    writer.finish();
}

template <class E>
constexpr const char* dtype_of = std::is_same_v<E, bf16> ? "BF16"
                                 : sizeof(E) == 8        ? "F64"
                                                         : "F32";

// ---- directories -----------------------------------------------------------------------------------------------------------
inline constexpr const char* manifest_name = "manifest.json";

// All files below dir except the manifest, as sorted relative paths.
inline std::vector<std::string> files_below(const std::string& dir) {
    namespace fs = std::filesystem;
    std::vector<std::string> files;
    for (const auto& entry : fs::recursive_directory_iterator(dir))
        if (entry.is_regular_file()) files.push_back(fs::relative(entry.path(), dir).string());
    files.erase(std::remove(files.begin(), files.end(), manifest_name), files.end());
    std::sort(files.begin(), files.end());
    return files;
}

// The manifest's list: {"name": {"bytes": ..., "crc32c": ...}, ...}, sorted by name.
inline nlohmann::ordered_json to_json(const FileSums& sums) {
    nlohmann::ordered_json files = nlohmann::ordered_json::object();
    for (const auto& [name, sum] : sums) files[name] = {{"bytes", sum.bytes}, {"crc32c", format("%08x", sum.crc)}};
    return files;
}

// Writes the manifest and reads it back from the disk.
inline void write_manifest(const std::string& dir, const FileSums& sums) {
    const nlohmann::ordered_json manifest = {{"checksum", "crc32c"}, {"files", to_json(sums)}};
    WrittenFiles written(dir);
    written.write(dir + "/" + manifest_name, manifest.dump(2) + "\n");
    check_against_disk(dir, written.sums());
}

// Compares a directory with its manifest; returns the difference, with the file's name, or an empty string. Files may be links
// to files, as in a directory made with cp -s; reads no more than the manifest's sizes. Called with `ranks`, each rank compares
// its share of the files. wanted: selects files by name; null: all.
inline std::string verify_directory(const std::string& dir, int rank = 0, int ranks = 1,
                                    const std::function<bool(const std::string& name)>& wanted = nullptr) {
    int file = 0;
    try {
        const nlohmann::json manifest = read_json(dir + "/" + manifest_name);
        const nlohmann::json& files = manifest.at("files");
        if (!files.is_object() || files.empty()) return dir + "/" + manifest_name + " is damaged: it lists no files";
        for (const auto& [name, entry] : files.items()) {
            if ((wanted && !wanted(name)) || file++ % ranks != rank) continue;
            const std::string path = inside(dir, name, dir + "/" + manifest_name);
            if (!entry.at("bytes").is_number_unsigned())
                return dir + "/" + manifest_name + " is damaged: the size of " + name + " is " + entry.at("bytes").dump();
            const size_t bytes = entry.at("bytes").get<size_t>();
            const FileSum sum = sum_file(path, bytes);
            if (sum.bytes != bytes) return format("%s has %zu bytes; it was written with %zu", path.c_str(), sum.bytes, bytes);
            if (format("%08x", sum.crc) != entry.at("crc32c").get<std::string>())
                return path + " is damaged: its checksum differs from the manifest";
        }
    } catch (const nlohmann::json::exception& e) {
        return dir + "/" + manifest_name + " is damaged: " + json_problem(e);
    } catch (const Error& e) {
        return e.what();
    }
    return "";
}

// The problem with bf16 weights that a checkpoint keeps next to the fp32 weights of the same names, of which they are the
// roundings (to the nearest; ties to even in an average), or "". Paths of .safetensors files, which may be split. Each rank
// compares its share of the tensors.
inline std::string rounding_problem(const std::string& rounded, const std::string& masters, int rank, int ranks) {
    const SafetensorsReader models = SafetensorsReader::open(rounded), weights = SafetensorsReader::open(masters);
    std::vector<std::string> names;
    for (const auto& [name, model] : models.tensors())
        if (const TensorView* fine = weights.find(name); fine && model.dtype == "BF16" && fine->dtype == "F32")
            names.push_back(name);
    std::sort(names.begin(), names.end());
    for (size_t i = (size_t)rank; i < names.size(); i += (size_t)ranks) {
        const TensorView &model = *models.find(names[i]), &fine = *weights.find(names[i]);
        if (model.shape != fine.shape)
            return format("%s and %s: '%s' differ in shape", rounded.c_str(), masters.c_str(), names[i].c_str());
        const auto n = (int64_t)model.elements();
        int64_t others = 0;
#pragma omp parallel for schedule(static) reduction(+ : others) if (n > 1 << 15)
        for (int64_t k = 0; k < n; k++) {
            bf16 stored;
            float x;
            memcpy(&stored, model.data + 2 * k, 2);
            memcpy(&x, fine.data + 4 * k, 4);
            others += stored.bits != bf16(weight_halves(x).upper).bits && stored.bits != bf16(x).bits;
        }
        if (others)
            return format("%s is damaged, or %s: %lld numbers of '%s' are not the fp32 weights rounded to bf16",
                          rounded.c_str(), masters.c_str(), (long long)others, names[i].c_str());
    }
    return "";
}

// The problem with the weights of a model or of adapters according to their checkpoint's manifest, or empty, also if there is
// no manifest of ours. The average of the weights (ema/) is in the manifest of the folder around it.
inline std::string verify_weights(const std::string& model, int rank, int ranks) {
    namespace fs = std::filesystem;
    std::string dir = without_trailing_slashes(model), below;
    if (fs::path(dir).filename() == "ema") {
        dir = fs::path(dir).parent_path().string();
        below = "ema/";
    }
    if (dir.empty()) dir = ".";
    const std::string path = dir + "/" + manifest_name;
    if (!file_exists(path)) return "";
    try {
        const nlohmann::json manifest = read_json(path);
        if (!manifest.is_object() || manifest.value("checksum", nlohmann::json()) != "crc32c") return "";
    } catch (const Error& e) {
        return e.what();
    }
    return verify_directory(dir, rank, ranks, [&](const std::string& name) {
        if (!begins_with(name, below)) return false;
        const std::string file = name.substr(below.size());
        return begins_with(file, "model.") || begins_with(file, "model-") || begins_with(file, "adapter_model");
    });
}
// Returns the first problem that judge() finds on a rank, or "". If a rank cannot read a file, all ranks throw.
template <class Judge>
std::string judge_together(World& world, Judge judge) {
    std::string problem, unreadable;
    int error = 0;
    try {
        problem = judge();
    } catch (const Unreadable& e) {
        unreadable = e.what();
        error = e.error;
    }
    if (const std::string first = first_problem(world, unreadable); !first.empty()) throw Unreadable(first, error);
    return first_problem(world, problem);
}
// Rejects damaged weights. All ranks call it, and read a share each.
inline void check_weights(World& world, const std::string& dir) {
    if (const std::string problem = judge_together(world, [&] { return verify_weights(dir, world.rank(), world.size()); });
        !problem.empty())
        fail("%s; HINT: another checkpoint; without %s the weights are used unchecked, but no run can resume from them",
             problem.c_str(), manifest_name);
}

// A directory that is written under another name and renamed when it is complete: only then is an old one under that name
// replaced. On an error, everything is as before.
class NewDirectory {
public:
    explicit NewDirectory(const std::string& dir)
        : dir_(without_trailing_slashes(dir)),
          temporary_((parent() / hidden(name(), ".tmp")).string()),
          old_((parent() / hidden(name(), ".old")).string()) {}
    const std::string& path() const { return temporary_; }  // where to write

    void create() const {
        guarded([&] {
            std::filesystem::remove_all(temporary_);
            std::filesystem::remove_all(old_);
            std::filesystem::create_directories(temporary_);
        });
    }
    // Creates the directory, lets fill(written) write its files, and publishes them.
    template <class F>
    void write(F fill) const {
        create();
        WrittenFiles written(temporary_);
        try {
            fill(written);
        } catch (...) {
            remove();
            throw;
        }
        publish(written);
    }
    // written: everything that was written into it. Reads it back, then adds the manifest, syncs, renames.
    void publish(const WrittenFiles& written) const {
        const FileSums sums = written.sums();
        guarded([&] { check_against_disk(temporary_, sums); });
        publish(sums);
    }
    // sums: of all files, already compared with the disk's contents.
    void publish(const FileSums& sums) const {
        namespace fs = std::filesystem;
        guarded([&] {
            std::error_code ignored;
            write_manifest(temporary_, sums);
            for (const auto& entry : fs::recursive_directory_iterator(temporary_))
                if (entry.is_directory()) sync_directory(entry.path().string());
            sync_directory(temporary_);
            // A directory with this name but without a manifest is not a checkpoint but the user's.
            if (fs::exists(dir_) && !fs::exists(dir_ + "/" + manifest_name)) set_aside(dir_);
            const bool replaces = fs::exists(dir_);
            if (replaces) fs::rename(dir_, old_);
            try {
                fs::rename(temporary_, dir_);
            } catch (...) {
                if (replaces) fs::rename(old_, dir_, ignored);
                throw;
            }
            sync_directory(parent().string());
            fs::remove_all(old_, ignored);
        });
    }
    void remove() const {
        std::error_code ignored;
        std::filesystem::remove_all(temporary_, ignored);
    }

private:
    std::filesystem::path parent() const { return std::filesystem::path(dir_).parent_path(); }
    std::string name() const { return std::filesystem::path(dir_).filename().string(); }
    template <class F>
    void guarded(F f) const {
        try {
            f();
        } catch (const std::filesystem::filesystem_error& e) {
            remove();
            fail("cannot write %s: %s; HINT: give another name", dir_.c_str(), e.code().message().c_str());
        } catch (...) {
            remove();
            throw;
        }
    }
    std::string dir_, temporary_, old_;
};

// Makes `link` a symbolic link to `target`, replacing an old one atomically; where the file system has no links (FAT, exFAT,
// some of FUSE), a file that holds the name `target` (named_by_file).
inline void point_link(const std::string& link, const std::string& target) {
    const std::string temporary = temporary_name(link);
    unlink(temporary.c_str());
    if (symlink(target.c_str(), temporary.c_str()) != 0 || rename(temporary.c_str(), link.c_str()) != 0) {
        const int error = errno;
        unlink(temporary.c_str());
        const auto all = {EPERM, EOPNOTSUPP, ENOSYS, EINVAL, EXDEV, ENOTTY, EACCES};
        if (std::find(all.begin(), all.end(), error) == all.end())
            fail("cannot point %s to %s: %s", link.c_str(), target.c_str(), strerror(error));
        return write_file_atomically(link, target + "\n");
    }
    sync_directory(std::filesystem::path(link).parent_path().string());
}
