// The tensors that a run trains: the model's parameters or, with these frozen, adapters: low-rank ones on its matrices
// (lora.h), or virtual tokens in front of its sequences (virtual_tokens.h).
#pragma once

#include "lora.h"
#include "model_config.h"
#include "parameters.h"
#include "virtual_tokens.h"

// The table of trained tensors; of a quantized model without adapters, which is only for inference: none.
inline ParameterTable trained_table(const ModelConfig& c, const Part& part, size_t multiple = 64) {
    if (c.virtual_tokens.on()) return ParameterTable(part, virtual_token_tensors(c, part), multiple);
    if (c.lora.on()) return ParameterTable(part, lora_tensors(c, part), multiple);
    if (c.quantized()) return ParameterTable(part, std::vector<TensorSpec>(), multiple);
    return ParameterTable(c, part, multiple);
}
inline ParameterTable trained_table(const ModelConfig& c) { return trained_table(c, whole_model(c)); }

// The table of a frozen model. The matrices of its blocks may be quantized (llmc/quantized.h) and are then in another buffer.
inline ParameterTable frozen_table(const ModelConfig& c, const Part& part) {
    std::vector<TensorSpec> tensors = tensors_of_model(c, part);
    for (TensorSpec& t : tensors) {
        if (t.block < 0 || t.vector() || t.of_mixture || !c.quantized()) continue;
        if (c.base_format != WeightFormat::gguf) t.formats.assign(t.hf.size(), c.base_format);
        else if (const auto found = c.coded.find(t.name); found != c.coded.end()) t.formats = found->second;
    }
    ParameterTable table(part, tensors, 64);
    table.base_format = c.base_format;
    return table;
}

// The configuration of the model without its adapters.
inline ModelConfig without_adapters(ModelConfig c) {
    c.lora = {};
    c.virtual_tokens = {};
    c.base_format = WeightFormat::none;
    return c;
}
