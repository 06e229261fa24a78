// Virtual tokens (virtual_tokens.h) as the options or an adapter_config.json describe them.
#pragma once
#include <string>

#include "../base/check.h"

struct VirtualTokensConfig {
    int count = 0;          // in front of every sequence; 0: there are none
    int encoder_width = 0;  // of what computes them (p-tuning); 0: they are trained themselves (prompt tuning)
    std::string text;       // whose tokens they began as; empty: tokens drawn from the vocabulary
    bool lstm = false;      // what computes them is an LSTM (prompt_lstm.h), not an MLP

    bool on() const { return count > 0; }
    bool encoded() const { return encoder_width > 0; }
    bool operator!=(const VirtualTokensConfig& v) const {
        return count != v.count || encoder_width != v.encoder_width || text != v.text || lstm != v.lstm;
    }
    // What remains after training: the encoder's output stands for the encoder.
    VirtualTokensConfig computed() const { return {count, 0, text}; }
    // As the option and, in capitals, PEFT call it.
    const char* encoder() const { return !encoded() ? "none" : lstm ? "lstm" : "mlp"; }
    std::string in_words() const {
        const std::string them = format("%d virtual token%s", count, count == 1 ? "" : "s");
        return encoded() ? them + format(", computed by an %s of width %d", lstm ? "LSTM" : "MLP", encoder_width) : them;
    }
};
