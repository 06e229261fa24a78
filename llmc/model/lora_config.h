// Low-rank adapters (lora.h) as given by the options or an adapter_config.json.
#pragma once
#include <cmath>
#include <string>
#include <vector>

// The adapter of one matrix in files where adapters differ.
struct LoraInFile {
    std::string matrix;  // the end of its name: "3.self_attn.q_proj"
    int rank = 0;        // 0: it has none
    double factor = 1;   // its scale, as a multiple of LoraConfig::scale()
};

struct LoraConfig {
    int rank = 0;  // 0: no adapters, all parameters are trained; the largest one, if files have several
    double alpha = 0;
    double dropout = 0;                // fraction of the adapters' input that training sets to 0
    bool rank_stabilized = false;      // scale by alpha / sqrt(rank) (Kalajdzievski, 2023)
    std::vector<LoraInFile> in_files;  // every matrix, if they differ: each is read as one of `rank`, padded with zeros
    std::vector<std::string> modules;  // names in the model's files, below a layer's: "self_attn.q_proj"; in the layer's order

    bool on() const { return rank > 0; }
    bool operator!=(const LoraConfig& l) const {
        return rank != l.rank || alpha != l.alpha || dropout != l.dropout || rank_stabilized != l.rank_stabilized ||
               modules != l.modules;
    }
    double scale() const { return alpha / (rank_stabilized ? std::sqrt((double)rank) : (double)rank); }
};
