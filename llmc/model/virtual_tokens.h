// Virtual tokens: n rows in front of every sequence that are parameters instead of token embeddings, and the only parameters to
// be trained (prompt tuning; Lester et al., 2021). They count as tokens in positions and attention, and have no targets. If a
// sequence packs several conversations, which do not see each other, each one gets them.
//
// With an encoder (p-tuning; Liu et al., 2021) the rows are computed: an embedding of n rows through Linear, ReLU, Linear,
// ReLU, Linear, all trained. This is PEFT's (and NeMo's) PromptEncoder; after training only its output is needed. prompt_lstm.h
// has the other kind, an LSTM.
//
// The gradient of the rows is a sum over all their places in a micro-batch. The encoder recomputes the rows for every place, so
// its weight gradients sum over them in fp32, as in any layer, and only the embedding's rows are summed separately; as many
// places at a time as a micro-batch has sequences. Like the adapters' x A^T (lora.h), all of it is recomputed in the backward
// pass. An LSTM computes the rows once, and receives the sum of their gradients.
//
// Only the first pipeline stage has these parameters. Every tensor-parallel rank has all of them and computes their whole
// gradient from the gradient of all rows, as for learned positions; sequence parallelism gathers these rows anyway.
#pragma once
#include <algorithm>
#include <array>
#include <string>
#include <utility>
#include <vector>

#include "../ops.h"
#include "arena.h"
#include "gradients.h"
#include "parameters.h"
#include "prompt_lstm.h"

namespace detail {

// The sizes of the encoder's layers, from its input to its output.
inline std::array<int, 4> encoder_sizes(const ModelConfig& c) {
    return {c.C, c.virtual_tokens.encoder_width, c.virtual_tokens.encoder_width, c.C};
}

}  // namespace detail

// The trained tensors: the rows, or the encoder's. Biases, whose whole gradient each tensor-parallel rank has, are in the group
// of vectors whose gradients are not summed over these ranks.
inline std::vector<TensorSpec> virtual_token_tensors(const ModelConfig& c, const Part& part) {
    std::vector<TensorSpec> tensors;
    if (!part.first) return tensors;
    const auto add = [&](const std::string& name, int rows, int cols, Group group, Init init) {
        TensorSpec t{name, rows, cols, group, init, {{name, 0, rows}}};
        t.whole_rows = rows;
        t.whole_cols = cols;
        t.blocks = {{0, 0, rows}};
        t.replicated = true;
        t.id = (int)tensors.size() + 1;  // 0 is the token embedding
        tensors.push_back(t);
    };
    if (!c.virtual_tokens.encoded()) {
        add("prompt_embeddings", c.virtual_tokens.count, c.C, Group::matrix, Init::standard_normal);
        return tensors;
    }
    const std::string encoder = "prompt_encoder.";
    if (c.virtual_tokens.lstm) {
        for (const auto& [name, rows, cols] : PromptLstm(c.virtual_tokens.count, c.C, c.virtual_tokens.encoder_width).shapes())
            add(encoder + name, rows, cols, cols == 1 ? Group::cut : Group::matrix,
                cols == 1         ? Init::zeros
                : tensors.empty() ? Init::standard_normal
                                  : Init::kaiming);
        return tensors;
    }
    add(encoder + "embedding.weight", c.virtual_tokens.count, c.C, Group::matrix, Init::standard_normal);
    const auto sizes = detail::encoder_sizes(c);
    for (size_t i = 0; i + 1 < sizes.size(); i++) {
        const std::string layer = encoder + "mlp_head." + std::to_string(2 * i);  // PEFT counts the ReLU between two of them
        add(layer + ".weight", sizes[i + 1], sizes[i], Group::matrix, Init::kaiming);
        add(layer + ".bias", sizes[i + 1], 1, Group::cut, Init::zeros);
    }
    return tensors;
}

// Computes the virtual tokens from these tensors, and the tensors' gradients.
class VirtualTokens {
public:
    // True on ranks that hold the embedding; others have nothing to do.
    bool on() const { return count_ > 0; }

    // B: maximum number of sequences in a micro-batch.
    void plan(Arena& arena, const ModelConfig& c, const Part& part, int B, bool training) {
        if (!c.virtual_tokens.on() || !part.first) return;
        count_ = c.virtual_tokens.count;
        C_ = c.C;
        at_once_ = B;
        lstm_width_ = c.virtual_tokens.lstm ? c.virtual_tokens.encoder_width : 0;
        const size_t rows = (size_t)B * count_;
        const char* const purpose = "adapters: activations";
        const auto sizes = detail::encoder_sizes(c);
        layers_.assign(c.virtual_tokens.encoded() && !lstm_width_ ? sizes.size() - 1 : 0, {});
        arena.add(purpose, &rows_, lstm_width_ ? size() : 0);
        for (size_t i = 0; i < layers_.size(); i++) {
            Layer& l = layers_[i];
            l.IC = sizes[i];
            l.OC = sizes[i + 1];
            arena.add(purpose, &l.inp, rows * l.IC);
            arena.add(purpose, &l.out, rows * l.OC);
        }
        for (floatX** gradient : {&dout_, &dinp_})
            if (training) arena.add(purpose, gradient, rows * std::max(c.C, c.virtual_tokens.encoder_width));
    }
    // After allocation: sets pointers to the parameters and their gradients.
    template <class GradientOf>
    void bind(const ParameterTable& table, const floatX* params, GradientOf gradient_of) {
        if (!on()) return;
        size_t row = 0;
        const auto next = [&](const floatX*& tensor, real*& gradient) {
            tensor = params + table.rows[row].offset;
            gradient = gradient_of(row++);
        };
        of_lstm_.assign(lstm_width_ ? table.rows.size() : 0, {});
        for (LstmTensor& t : of_lstm_) {
            t.n = table.rows[row].size();
            next(t.w, t.dw);
        }
        if (lstm_width_) return;
        next(embedding_, dembedding_);
        for (Layer& l : layers_) {
            next(l.w, l.dw);
            next(l.b, l.db);
        }
    }

    // Adds the virtual tokens to the rows from each of `places` on, which so far hold only positions.
    void forward(be::Ctx& ctx, floatX* x /*(N, C)*/, const std::vector<int>& places) const {
        const floatX* rows = encode(ctx, 1);
        for (const int place : places) {
            floatX* first = x + (size_t)place * C_;
            be::residual_forward(ctx, first, first, rows, size());
        }
    }
    // Adds to the gradients of the tensors.
    void backward(be::Ctx& ctx, const floatX* dx /*(N, C)*/, const std::vector<int>& places) const {
        const size_t bytes = size() * sizeof(floatX);
        std::vector<real> sum(lstm_width_ ? size() : 0);
        for (size_t i = 0; i < places.size(); i += (size_t)at_once_) {
            const int n = (int)std::min(places.size() - i, (size_t)at_once_);
            for (int k = 0; k < n; k++)
                be::copy_rows(ctx, dout_ + k * size(), bytes, dx + (size_t)places[i + k] * C_, bytes, bytes, 1);
            if (!lstm_width_) mlp_backward(ctx, n);
            else {
                const std::vector<real> each = fetch(ctx, dout_, n * size());
                for (size_t j = 0; j < each.size(); j++) sum[j % size()] += each[j];
            }
        }
        if (lstm_width_) lstm_backward(ctx, sum);
    }
    // The virtual tokens, for files without an encoder.
    std::vector<floatX> computed(be::Ctx& ctx) const {
        std::vector<floatX> rows(on() ? size() : 0);
        if (on()) be::download(ctx, rows.data(), encode(ctx, 1), rows.size() * sizeof(floatX));
        return rows;
    }

private:
    struct Layer {
        int IC, OC;
        const floatX *w, *b;  // (OC, IC) (OC)
        real *dw, *db;
        floatX *inp, *out;  // (B tokens, IC) (B tokens, OC); a ReLU of the output is the next layer's input
    };

    size_t size() const { return (size_t)count_ * C_; }

    // The rows, repeated B times; without an MLP, once.
    const floatX* encode(be::Ctx& ctx, int B) const {
        if (lstm_width_) {
            send(ctx, rows_, PromptLstm(count_, C_, lstm_width_).forward(lstm_tensors(ctx)));
            return rows_;
        }
        if (layers_.empty()) return embedding_;
        const size_t bytes = size() * sizeof(floatX);
        for (int b = 0; b < B; b++) be::copy_rows(ctx, layers_[0].inp + b * size(), bytes, embedding_, bytes, bytes, 1);
        for (size_t i = 0; i < layers_.size(); i++) {
            const Layer& l = layers_[i];
            be::linear_forward(ctx, l.out, l.inp, l.w, l.b, B * count_, l.IC, l.OC);
            if (i + 1 < layers_.size())
                be::activation_forward(ctx, layers_[i + 1].inp, l.out, B * count_, l.OC, Activation::relu);
        }
        return layers_.back().out;
    }

    // Backward from dout_, the gradients of the rows at n places.
    void mlp_backward(be::Ctx& ctx, int n) const {
        floatX *dout = dout_, *dinp = dinp_;
        encode(ctx, n);
        for (size_t i = layers_.size(); i-- > 0;) {
            const Layer& l = layers_[i];
            be::linear_backward_weight(ctx, l.dw, l.db, dout, l.inp, n * count_, l.IC, l.OC, Acc::Add);
            be::linear_backward_input(ctx, dinp, dout, l.w, n * count_, l.IC, l.OC);
            std::swap(dout, dinp);
            if (i > 0) be::activation_backward(ctx, dout, dout, layers_[i - 1].out, n * count_, l.IC, Activation::relu);
        }
        be::bias_backward(ctx, dembedding_, dout, n, (int)size());
    }

    // ---- the LSTM, which computes on the host ----

    struct LstmTensor {
        size_t n;
        const floatX* w;
        real* dw;
    };
    template <class E>
    static std::vector<real> fetch(be::Ctx& ctx, const E* from, size_t n) {
        std::vector<E> values(n);
        be::download(ctx, values.data(), from, n * sizeof(E));
        return std::vector<real>(values.begin(), values.end());
    }
    template <class E>
    static void send(be::Ctx& ctx, E* to, const std::vector<real>& values) {
        const std::vector<E> sent(values.begin(), values.end());
        be::upload(ctx, to, sent.data(), sent.size() * sizeof(E));
    }
    PromptLstm::Tensors lstm_tensors(be::Ctx& ctx) const {
        PromptLstm::Tensors tensors;
        for (const LstmTensor& t : of_lstm_) tensors.push_back(fetch(ctx, t.w, t.n));
        return tensors;
    }
    void lstm_backward(be::Ctx& ctx, const std::vector<real>& sum) const {
        PromptLstm lstm(count_, C_, lstm_width_);
        const PromptLstm::Tensors tensors = lstm_tensors(ctx);
        lstm.forward(tensors);
        const PromptLstm::Tensors gradients = lstm.backward(tensors, sum);
        for (size_t k = 0; k < of_lstm_.size(); k++) {
            std::vector<real> total = fetch(ctx, of_lstm_[k].dw, of_lstm_[k].n);
            for (size_t i = 0; i < total.size(); i++) total[i] += gradients[k][i];
            send(ctx, of_lstm_[k].dw, total);
        }
    }

    int count_ = 0, C_ = 0, at_once_ = 0;
    int lstm_width_ = 0;                 // 0: there is no LSTM
    std::vector<LstmTensor> of_lstm_;    // in the order of PromptLstm::shapes()
    floatX* rows_ = nullptr;             // (tokens, C) output of the LSTM
    const floatX* embedding_ = nullptr;  // (tokens, C)
    real* dembedding_ = nullptr;
    std::vector<Layer> layers_;                 // empty: there is no MLP
    floatX *dout_ = nullptr, *dinp_ = nullptr;  // (B tokens, widest) of the current layer; B: at_once_
};
