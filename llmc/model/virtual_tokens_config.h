// Virtual tokens (virtual_tokens.h) as given by the options or an adapter_config.json.
#pragma once
#include <string>

#include "../base/check.h"

struct VirtualTokensConfig {
    int count = 0;          // in front of every sequence; 0: none
    int encoder_width = 0;  // width of the encoder (p-tuning); 0: the rows are trained directly (prompt tuning)
    std::string text;       // its tokens initialized them; empty: tokens drawn from the vocabulary
    bool lstm = false;      // the encoder is an LSTM (prompt_lstm.h), not an MLP

    bool on() const { return count > 0; }
    bool encoded() const { return encoder_width > 0; }
    bool operator!=(const VirtualTokensConfig& v) const {
        return count != v.count || encoder_width != v.encoder_width || text != v.text || lstm != v.lstm;
    }
    // After training: the encoder's output replaces the encoder.
    VirtualTokensConfig computed() const { return {count, 0, text}; }
    // The name as in the option and, in capitals, in PEFT.
    const char* encoder() const { return !encoded() ? "none" : lstm ? "lstm" : "mlp"; }
    std::string in_words() const {
        const std::string them = format("%d virtual token%s", count, count == 1 ? "" : "s");
        return encoded() ? them + format(", computed by an %s of width %d", lstm ? "LSTM" : "MLP", encoder_width) : them;
    }
};
