// Published shapes, and small ones for machines without a GPU.
#pragma once
#include <cmath>
#include <string>
#include <vector>

#include "../base/check.h"
#include "../base/similar.h"
#include "../base/text.h"
#include "../base/utf8.h"
#include "families.h"

struct Preset {
    const char* name;
    const char* family;
    int L, C, NH, NKV, F, T, V;
    double init_std;
    void (*further)(ModelConfig&) = nullptr;  // sets further fields
};

// A table: long, but without branches.
inline const std::vector<Preset>& presets() {
    // V = 0: the vocabulary comes from the tokenizer (or --vocab-size).
    static const std::vector<Preset> rows = {
        // small ones, for machines without a GPU
        {"quickstart", "llama", 6, 192, 6, 2, 512, 256, 0, 0.02},
        {"llama-tiny", "llama", 2, 64, 4, 2, 192, 256, 0, 0.02},
        {"mixture-tiny", "mixtral", 2, 64, 4, 2, 96, 256, 0, 0.02, [](ModelConfig& c) { c.rope_base = 1e4; }},
        {"mixture-60m", "olmoe", 8, 640, 10, 10, 320, 512, 0, 0.02},
        {"gpt2-3m", "gpt2", 6, 192, 6, 6, 768, 256, 0, 0.02},
        {"bloom-3m", "bloom", 6, 192, 6, 6, 768, 256, 0, 0.02},
        {"llama-15m", "llama", 8, 384, 6, 2, 1024, 512, 0, 0.02},
        {"llama-60m", "llama", 12, 640, 10, 5, 1728, 512, 0, 0.02},
        // GPT-2 (Radford et al., 2019)
        {"gpt2-124m", "gpt2", 12, 768, 12, 12, 3072, 1024, 50257, 0.02},
        {"gpt2-350m", "gpt2", 24, 1024, 16, 16, 4096, 1024, 50257, 0.02},
        {"gpt2-774m", "gpt2", 36, 1280, 20, 20, 5120, 1024, 50257, 0.02},
        {"gpt2-1558m", "gpt2", 48, 1600, 25, 25, 6400, 1024, 50257, 0.02},
        // GPT-3 (Brown et al., 2020), head counts of NeMo's ladder; init 0.64/sqrt(C)
        {"gpt3-125m", "gpt2", 12, 768, 12, 12, 3072, 2048, 50257, 0.0231},
        {"gpt3-350m", "gpt2", 24, 1024, 16, 16, 4096, 2048, 50257, 0.02},
        {"gpt3-760m", "gpt2", 24, 1536, 16, 16, 6144, 2048, 50257, 0.0163},
        {"gpt3-1.3b", "gpt2", 24, 2048, 16, 16, 8192, 2048, 50257, 0.0141},
        {"gpt3-2.7b", "gpt2", 32, 2560, 32, 32, 10240, 2048, 50257, 0.0126},
        {"gpt3-5b", "gpt2", 24, 4096, 32, 32, 16384, 2048, 50257, 0.01},
        {"gpt3-6.7b", "gpt2", 32, 4096, 32, 32, 16384, 2048, 50257, 0.01},
        {"gpt3-13b", "gpt2", 40, 5120, 40, 40, 20480, 2048, 50257, 0.0089},
        {"gpt3-20b", "gpt2", 44, 6144, 48, 48, 24576, 2048, 50257, 0.008165},
        {"gpt3-40b", "gpt2", 48, 8192, 64, 64, 32768, 2048, 50257, 0.007},
        {"gpt3-175b", "gpt2", 96, 12288, 96, 96, 49152, 2048, 50257, 0.0058},
        // MT-NLG 530B (Smith et al., 2022)
        {"mt-nlg-530b", "gpt2", 105, 20480, 128, 128, 81920, 2048, 50257, 0.004},
        // Megatron-LM (Korthikanti et al., 2022, table 3); init 0.64/sqrt(C)
        {"megatron-22b", "gpt2", 48, 6144, 64, 64, 24576, 2048, 51200, 0.0082},
        {"megatron-175b", "gpt2", 96, 12288, 96, 96, 49152, 2048, 51200, 0.0058},
        {"megatron-530b", "gpt2", 105, 20480, 128, 128, 81920, 2048, 51200, 0.0045},
        {"megatron-1t", "gpt2", 128, 25600, 160, 160, 102400, 2048, 51200, 0.004},
        // BLOOM (Le Scao et al., 2022)
        {"bloom-560m", "bloom", 24, 1024, 16, 16, 4096, 2048, 250880, 0.0048},
        {"bloom-1b1", "bloom", 24, 1536, 16, 16, 6144, 2048, 250880, 0.0048},
        {"bloom-1b7", "bloom", 24, 2048, 16, 16, 8192, 2048, 250880, 0.0048},
        {"bloom-3b", "bloom", 30, 2560, 32, 32, 10240, 2048, 250880, 0.0048},
        {"bloom-7b1", "bloom", 30, 4096, 32, 32, 16384, 2048, 250880, 0.0048},
        {"bloom-176b", "bloom", 70, 14336, 112, 112, 57344, 2048, 250880, 0.0048},
        // Llama 2 (Touvron et al., 2023) and TinyLlama
        {"llama-1b", "llama", 22, 2048, 32, 4, 5632, 2048, 32000, 0.02},
        {"llama2-7b", "llama", 32, 4096, 32, 32, 11008, 4096, 32000, 0.02},
        {"llama2-13b", "llama", 40, 5120, 40, 40, 13824, 4096, 32000, 0.02},
        {"llama2-70b", "llama", 80, 8192, 64, 8, 28672, 4096, 32000, 0.02},
        // Llama 3, SmolLM2
        {"llama3-8b", "llama", 32, 4096, 32, 8, 14336, 8192, 128256, 0.02, [](ModelConfig& c) { c.rope_base = 5e5; }},
        {"llama3-70b", "llama", 80, 8192, 64, 8, 28672, 8192, 128256, 0.02, [](ModelConfig& c) { c.rope_base = 5e5; }},
        {"llama3-405b", "llama", 126, 16384, 128, 8, 53248, 8192, 128256, 0.02, [](ModelConfig& c) { c.rope_base = 5e5; }},
        {"smollm2-135m", "llama", 30, 576, 9, 3, 1536, 8192, 49152, 0.0417,
         [](ModelConfig& c) {
             c.rope_base = 1e5;
             c.tied = true;
         }},
        // Mistral, Qwen2.5, Qwen3, OLMo-2, Pythia, Gemma 3
        {"mistral-7b", "mistral", 32, 4096, 32, 8, 14336, 8192, 32000, 0.02, [](ModelConfig& c) { c.window = 4096; }},
        {"qwen2.5-7b", "qwen2", 28, 3584, 28, 4, 18944, 32768, 152064, 0.02,
         [](ModelConfig& c) {
             c.rope_base = 1e6;
             c.eps = 1e-6;
         }},
        {"qwen3-0.6b", "qwen3", 28, 1024, 16, 8, 3072, 4096, 151936, 0.02,
         [](ModelConfig& c) {
             c.head_size = 128;
             c.rope_base = 1e6;
             c.tied = true;
             c.eps = 1e-6;
         }},
        {"olmo2-1b", "olmo2", 16, 2048, 16, 16, 8192, 4096, 100352, 0.02,
         [](ModelConfig& c) {
             c.rope_base = 5e5;
             c.eps = 1e-6;
         }},
        {"pythia-160m", "gpt_neox", 12, 768, 12, 12, 3072, 2048, 50304, 0.02},
        {"gemma3-270m", "gemma3_text", 18, 640, 4, 1, 2048, 4096, 262144, 0.02,
         [](ModelConfig& c) {
             c.head_size = 256;
             c.embedding_scale = std::sqrt((double)c.C);
             c.rope_base = 1e6;
             c.local_rope_base = 1e4;
             c.window = 512;
             c.full_interval = 6;
             c.eps = 1e-6;
         }},
        // Mixtures of experts: Mixtral, OLMoE, Qwen, GPT-OSS
        {"mixtral-8x7b", "mixtral", 32, 4096, 32, 8, 14336, 32768, 32000, 0.02},
        {"olmoe-1b-7b", "olmoe", 16, 2048, 16, 16, 1024, 4096, 50304, 0.02},
        {"qwen1.5-moe-a2.7b", "qwen2_moe", 24, 2048, 16, 16, 1408, 8192, 151936, 0.02,
         [](ModelConfig& c) {
             c.rope_base = 1e6;
             c.eps = 1e-6;
         }},
        {"qwen3-30b-a3b", "qwen3_moe", 48, 2048, 32, 4, 768, 40960, 151936, 0.02,
         [](ModelConfig& c) {
             c.head_size = 128;
             c.rope_base = 1e6;
             c.eps = 1e-6;
         }},
        {"gpt-oss-20b", "gpt_oss", 24, 2880, 64, 8, 2880, 131072, 201088, 0.02,
         [](ModelConfig& c) {
             c.mixture.experts = 32;
             c.head_size = 64;
             c.window = 128;
             c.full_interval = 2;
             c.rope_base = 150000;
             c.rope_scaling = {RopeScaling::Type::yarn, 32, 4096};
             c.rope_scaling.truncate = false;
         }},
        // LLM-jp v3: two mixtures of 8 experts, then dense
        {"llm-jp-3-8x1.8b", "mixtral", 24, 2048, 16, 16, 7168, 4096, 99574, 0.02, [](ModelConfig& c) { c.rope_base = 1e4; }},
        {"llm-jp-3-8x13b", "mixtral", 40, 5120, 40, 40, 13824, 4096, 99574, 0.02, [](ModelConfig& c) { c.rope_base = 1e4; }},
        {"llm-jp-152m", "llama", 12, 512, 8, 8, 2048, 4096, 99574, 0.02},
        {"llm-jp-440m", "llama", 16, 1024, 8, 8, 3584, 4096, 99574, 0.02},
        {"llm-jp-980m", "llama", 20, 1536, 8, 8, 5376, 4096, 99574, 0.02},
        {"llm-jp-1.8b", "llama", 24, 2048, 16, 16, 7168, 4096, 99574, 0.02},
        {"llm-jp-3.8b", "llama", 28, 3072, 24, 24, 8192, 4096, 99574, 0.02},
        {"llm-jp-7.3b", "llama", 32, 4096, 32, 32, 11008, 4096, 99574, 0.02},
        {"llm-jp-13b", "llama", 40, 5120, 40, 40, 13824, 4096, 99574, 0.02},
        {"llm-jp-172b", "llama", 96, 12288, 96, 16, 38464, 4096, 99574, 0.02},
    };
    return rows;
}

inline ModelConfig config_from_preset(std::string name) {
    name = lower_ascii(name);
    std::vector<std::string> known;
    for (const Preset& p : presets()) {
        if (name == p.name) {
            ModelConfig c;
            set_family(c, p.family);
            c.L = p.L;
            c.C = p.C;
            c.NH = p.NH;
            c.NKV = p.NKV;
            c.F = p.F;
            c.T = p.T;
            c.V = p.V;
            c.init_std = p.init_std;
            if (p.further) p.further(c);
            return c;
        }
        known.emplace_back(p.name);
    }
    fail_usage("preset '%s' is unknown%s HINT: one of %s", name.c_str(), did_you_mean(name, known).c_str(),
               joined(known).c_str());
}
