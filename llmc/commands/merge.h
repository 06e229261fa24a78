// Adapters merged into their matrices: W + (alpha / r) B A (lora.h), for models to be used without adapters (train_gpt export
// --merge).
#pragma once
#include <vector>

#include "../cpu/parallel.h"
#include "../cpu/quantized.h"
#include "../model/adapters.h"
#include "../optimizer/shard.h"
#include "../checkpoint/adapter_files.h"
#include "../base/progress.h"
#include "../checkpoint/load_state.h"
#include "../checkpoint/checkpoint.h"
#include "../checkpoint/model_texts.h"

// Adds the adapters of c, laid out by trained_table(c, model.part), to the weights of the model, laid out by `model`: the part
// of one tensor-parallel rank, some layers or all.
template <class E>
void merge_adapters(const ModelConfig& c, const ParameterTable& model, E* weights, const E* adapters) {
    const ParameterTable table = trained_table(c, model.part);
    size_t row = 0;
    detail::walk_adapters(c, model.part, [&](const TensorSpec&, const TensorSpec&, const LoraLayer& layer) {
        const E *a = adapters + table.rows[row].offset, *b = adapters + table.rows[row + 1].offset;
        const TensorSpec& w = model.rows[layer.of];
        row += 2;
        for (int k = 0; k < layer.rows.blocks; k++) {
            const LoraRows::Block& block = layer.rows.block[k];
            const size_t rank = (size_t)layer.rows.rank, cols = (size_t)w.cols;
            cpu::parallel_for(layer.rows.experts * block.rows, [&](int task) {
                const size_t e = (size_t)(task / block.rows), r = (size_t)(task % block.rows);
                E* to = weights + w.offset + (e * layer.rows.OC + block.row + r) * cols;
                for (size_t i = 0; i < rank; i++) {
                    const E factor = layer.scale * b[(e * layer.rows.packed + block.packed + r) * rank + i];
                    const E* from = a + ((e * layer.rows.parts + block.part) * rank + i) * cols;
                    for (size_t j = 0; j < cols; j++) to[j] += factor * from[j];
                }
            });
        }
    });
}

// Replaces the matrices that a run has quantized by their decoded values, in floatX as its products read them: the adapters
// were trained on these. As in PEFT, which merges into the dequantized weights.
template <class E>
void round_to_format(const ModelConfig& c, const Part& part, const ParameterTable& model, E* weights) {
    const ParameterTable frozen = frozen_table(c, part);
    cpu::Ctx ctx;
    for (size_t i = 0; i < frozen.rows.size(); i++) {
        const TensorSpec& t = frozen.rows[i];
        if (!t.quantized()) continue;
        E* const at = weights + model.rows[i].offset;
        const std::vector<float> numbers(at, at + t.size());
        std::vector<floatX> decoded(numbers.begin(), numbers.end());  // of a GGUF file, whose numbers are decoded
        if (c.base_format != WeightFormat::gguf) {
            std::vector<uint8_t> codes(coded_bytes(t));
            CHECK(quantize_tensor(t, numbers.data(), codes.data()), "%s", t.name.c_str());
            dequantize_tensor(ctx, decoded.data(), t, codes.data());
        }
        std::copy(decoded.begin(), decoded.end(), at);
    }
}

// train_gpt export --model DIR --out NEW: the files of a model or of adapters, without the state of their training (training/,
// ema/): a directory to upload.
inline int export_model_files(World& world, const ExportOptions& o) {
    refuse_missing(o.model.empty(), "the model", "--model DIR");
    refuse_together(is_gguf_file(o.model), "--model " + o.model, "--out", "it is one file, which can be copied",
                    "train_gpt import --gguf " + o.model + " --out " + o.out + " writes a model directory");
    const std::string dir = model_directory(o.model);
    if (!is_adapter(dir)) read_config(dir);
    if (file_exists(o.out)) fail("%s already exists; HINT: another --out", o.out.c_str());
    check_weights(world, dir);
    const NewDirectory directory(o.out);
    size_t bytes = 0;
    directory.write([&](WrittenFiles& written) {
        for (const std::string& name : names_in(dir)) {
            if (name == manifest_name || !is_regular(dir + "/" + name)) continue;
            const MappedFile file(dir + "/" + name);
            written.write(directory.path() + "/" + name, file.text());
            bytes += file.size();
        }
    });
    print_line(stdout, format("%s: the files of %s, %s", o.out.c_str(), dir.c_str(), human_bytes((double)bytes).c_str()));
    return 0;
}

// train_gpt export --merge: the model with the adapters in its matrices, as a directory that transformers opens. Layer by
// layer, so that the memory is the largest layer's in fp32. A model in fp32 or fp16, whose weights bf16 would round, is
// exported in fp32.
inline int export_merged(World& world, const ExportOptions& o) {
    refuse_without(o.adapter.empty(), "--merge", "--adapter DIR");
    refuse_missing(o.out.empty(), "the directory to write", "--out DIR");
    const AdaptedModel found = find_model(world, o);
    if (found.c.virtual_tokens.on())
        fail("%s contains virtual tokens, which cannot be merged into matrices; HINT: --adapter with the model",
             found.adapter.c_str());
    if (file_exists(o.out)) fail("%s already exists; HINT: another --out", o.out.c_str());
    PhaseStatus phase;
    phase.begin("merging " + found.adapter + " into " + found.dir);
    ModelConfig c = found.c;
    pad_vocabulary(c, 1);
    const ModelConfig plain = without_adapters(c);
    const NewDirectory directory(o.out);
    directory.write([&](WrittenFiles& written) {
        const bool finer = finer_than_floatX(found.dir);
        ModelTexts texts = adapted_texts(found.dir, usable_tokenizer(found.dir).get(), found.adapter);
        if (finer) texts.dtype = "float32";
        write_model_texts(directory.path(), plain, texts, written);
        const TensorFiles files(directory.path() + "/model.safetensors", ParameterTable(plain),
                                finer ? dtype_of<real> : dtype_of<floatX>, TensorFiles::most_bytes,
                                expert_biases_in_file(plain, read_expert_biases(found.dir, plain)));
        files.create(written);
        for (int layer = 0; layer < c.L; layer++) {
            Part part;
            part.layers = {layer};
            part.first = layer == 0;
            part.last = layer == c.L - 1;
            const ParameterTable model(plain, part), adapters = trained_table(c, part);
            std::vector<real> weights(model.size), low_rank(adapters.size);
            read_tensors(found.dir, plain, model, weights.data());
            read_tensors(weights_path(found.adapter, c), c, adapters, low_rank.data());
            round_to_format(c, part, model, weights.data());
            merge_adapters(c, model, weights.data(), low_rank.data());
            const Shards whole(model, {}, false, model.size);
            const std::vector<Range> all = whole.not_duplicated(model);
            if (finer) write_parts(files, model, whole, all, written, [&](size_t i) { return weights[i]; });
            else write_parts(files, model, whole, all, written, [&](size_t i) { return (floatX)weights[i]; });
        }
    });
    phase.done();
    const bool quantized = c.quantized();
    printf("%s contains the merged model%s\n", o.out.c_str(),
           quantized ? format(": the adapters in the weights after %s, on which they were trained",
                              weight_format_row(c.base_format).word)
                           .c_str()
                     : "");
    return 0;
}
