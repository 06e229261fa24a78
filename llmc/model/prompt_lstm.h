// The LSTM prompt encoder of PEFT and NeMo: computes virtual tokens (virtual_tokens.h) from an embedding of n rows x_1 ... x_n:
// two layers of a bidirectional LSTM (Hochreiter and Schmidhuber, 1997; Gers et al., 2000), then Linear, ReLU, Linear. One
// direction of a layer, of width H, with h_0 = c_0 = 0:
//   i, f, g, o = W_ih x_t + b_ih + W_hh h_(t-1) + b_hh      (4 H)
//   c_t = s(f) c_(t-1) + s(i) tanh(g),   h_t = s(o) tanh(c_t)     s(x) = 1 / (1 + exp(-x))
// The other direction reads the rows from the last to the first; a layer's output concatenates both h, (n, 2 H). torch.nn.LSTM
// has the same formulas, names and layouts.
//
// Backward runs through time: with dh_t, the gradient of the output plus W_hh^T times the gates' gradient of the row after,
//   dc_t = dh_t s(o) (1 - tanh(c_t)^2) + dc_(t+1) s(f_(t+1)),   and each gate's gradient follows from its factor in these sums.
//
// Tens of rows that depend on one another suit no accelerator: plain loops in fp32 on the host for all backends. The order of
// sums is fixed, so that threads change no bits.
#pragma once
#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "../base/types.h"
#include "../cpu/parallel.h"
#include "../cpu/reduce.h"

class PromptLstm {
public:
    using Tensors = std::vector<std::vector<real>>;
    struct Shape {
        std::string name;  // below "prompt_encoder."
        int rows, cols;    // cols 1: a vector
    };

    PromptLstm(int n, int C, int H) : n_(n), C_(C), H_(H) {}

    // The tensors, in the order that forward() and backward() expect.
    std::vector<Shape> shapes() const {
        std::vector<Shape> all = {{"embedding.weight", n_, C_}};
        for (int layer = 0; layer < 2; layer++)
            for (const char* direction : {"", "_reverse"}) {
                const std::string end = "_l" + std::to_string(layer) + direction;
                all.push_back({"lstm_head.weight_ih" + end, 4 * H_, inputs(layer)});
                all.push_back({"lstm_head.weight_hh" + end, 4 * H_, H_});
                all.push_back({"lstm_head.bias_ih" + end, 4 * H_, 1});
                all.push_back({"lstm_head.bias_hh" + end, 4 * H_, 1});
            }
        all.push_back({"mlp_head.0.weight", 2 * H_, 2 * H_});
        all.push_back({"mlp_head.0.bias", 2 * H_, 1});
        all.push_back({"mlp_head.2.weight", C_, 2 * H_});
        all.push_back({"mlp_head.2.bias", C_, 1});
        return all;
    }

    // The virtual tokens (n, C). Keeps activations for backward().
    std::vector<real> forward(const Tensors& w) {
        x_[0] = w[0];
        for (int layer = 0; layer < 2; layer++) {
            x_[layer + 1].assign((size_t)n_ * 2 * H_, 0);
            for (int direction = 0; direction < 2; direction++) forward(w, layer, direction);
        }
        hidden_ = linear(x_[2], w, linears, 2 * H_, 2 * H_);
        for (real& x : hidden_) x = std::max(x, real(0));
        return linear(hidden_, w, linears + 2, 2 * H_, C_);
    }
    // The gradients of the tensors, from the gradient of the virtual tokens (n, C), after forward().
    Tensors backward(const Tensors& w, const std::vector<real>& drows) const {
        Tensors d;
        for (const auto& tensor : w) d.emplace_back(tensor.size(), real(0));
        std::vector<real> dx = linear_backward(d, drows, hidden_, w, linears + 2, 2 * H_, C_);
        for (size_t i = 0; i < dx.size(); i++)
            if (hidden_[i] <= 0) dx[i] = 0;
        dx = linear_backward(d, dx, x_[2], w, linears, 2 * H_, 2 * H_);
        for (int layer = 1; layer >= 0; layer--) {
            std::vector<real> dinp((size_t)n_ * inputs(layer), 0);
            for (int direction = 0; direction < 2; direction++) backward(d, dinp, dx, w, layer, direction);
            dx = std::move(dinp);
        }
        d[0] = std::move(dx);
        return d;
    }

private:
    static constexpr size_t linears = 17;  // index of the first tensor of the linear layers

    int inputs(int layer) const { return layer ? 2 * H_ : C_; }
    // Index of the first of a direction's tensors: W_ih, W_hh, b_ih, b_hh.
    static size_t of(int layer, int direction) { return 1 + 4 * (size_t)(2 * layer + direction); }
    // The t-th row that a direction reads.
    size_t row(int direction, int t) const { return (size_t)(direction ? n_ - 1 - t : t); }

    // y (n, OC) += x (n, IC) w^T
    static void add_product(real* y, const real* x, const std::vector<real>& w, int n, int IC, int OC) {
        cpu::parallel_for(OC, [&](int o) {
            const real* weights = &w[(size_t)o * IC];
            for (int t = 0; t < n; t++) {
                const real* inp = x + (size_t)t * IC;
                y[(size_t)t * OC + o] += cpu::detail::lane_sum(IC, [=](int i) { return weights[i] * inp[i]; });
            }
        });
    }
    // dx (n, IC) += dy (n, OC) w, for a few columns at a time, which stay in the cache
    static void add_input_gradient(real* dx, const real* dy, const std::vector<real>& w, int n, int IC, int OC) {
        const auto columns = [&](size_t first, size_t last) {
            for (int o = 0; o < OC; o++)
                for (int t = 0; t < n; t++) {
                    const real d = dy[(size_t)t * OC + o], *weights = &w[(size_t)o * IC];
                    real* to = dx + (size_t)t * IC;
                    INDEPENDENT_ITERATIONS
                    for (size_t i = first; i < last; i++) to[i] += d * weights[i];
                }
        };
        cpu::parallel_ranges((size_t)IC, columns, 128);
    }
    // dw (OC, IC) += dy (n, OC)^T x (n, IC)
    static void add_weight_gradient(std::vector<real>& dw, const real* dy, const real* x, int n, int IC, int OC) {
        cpu::parallel_for(OC, [&](int o) {
            real* to = &dw[(size_t)o * IC];
            for (int t = 0; t < n; t++) {
                const real d = dy[(size_t)t * OC + o], *inp = x + (size_t)t * IC;
                INDEPENDENT_ITERATIONS
                for (int i = 0; i < IC; i++) to[i] += d * inp[i];
            }
        });
    }
    static void add_sum_of_rows(std::vector<real>& db, const real* dy, int n, int OC) {
        for (int t = 0; t < n; t++)
            for (int o = 0; o < OC; o++) db[(size_t)o] += dy[(size_t)t * OC + o];
    }

    // k: index of the weight; its bias follows.
    std::vector<real> linear(const std::vector<real>& x, const Tensors& w, size_t k, int IC, int OC) const {
        std::vector<real> y;
        for (int t = 0; t < n_; t++) y.insert(y.end(), w[k + 1].begin(), w[k + 1].end());
        add_product(y.data(), x.data(), w[k], n_, IC, OC);
        return y;
    }
    std::vector<real> linear_backward(Tensors& d, const std::vector<real>& dy, const std::vector<real>& x, const Tensors& w,
                                      size_t k, int IC, int OC) const {
        std::vector<real> dx((size_t)n_ * IC, 0);
        add_weight_gradient(d[k], dy.data(), x.data(), n_, IC, OC);
        add_sum_of_rows(d[k + 1], dy.data(), n_, OC);
        add_input_gradient(dx.data(), dy.data(), w[k], n_, IC, OC);
        return dx;
    }

    // Activations of one direction of a layer.
    struct Direction {
        std::vector<real> gates;  // (n, 4, H) s(i), s(f), tanh(g), s(o)
        std::vector<real> c, h;   // (n, H)
    };

    void forward(const Tensors& w, int layer, int direction) {
        const size_t k = of(layer, direction), H = (size_t)H_;
        Direction& kept = kept_[layer][direction];
        kept.c.assign(n_ * H, 0);
        kept.h.assign(n_ * H, 0);
        kept.gates.clear();
        for (int t = 0; t < n_; t++)
            for (size_t j = 0; j < 4 * H; j++) kept.gates.push_back(w[k + 2][j] + w[k + 3][j]);
        add_product(kept.gates.data(), x_[layer].data(), w[k], n_, inputs(layer), 4 * H_);
        const std::vector<real> zeros(H, 0);
        const real *h_before = zeros.data(), *c_before = zeros.data();
        for (int t = 0; t < n_; t++) {
            const size_t r = row(direction, t);
            real *gates = &kept.gates[r * 4 * H], *c = &kept.c[r * H], *h = &kept.h[r * H];
            add_product(gates, h_before, w[k + 1], 1, H_, 4 * H_);
            for (size_t j = 0; j < 4 * H; j++) gates[j] = j / H == 2 ? std::tanh(gates[j]) : 1 / (1 + std::exp(-gates[j]));
            for (size_t j = 0; j < H; j++) {
                c[j] = gates[H + j] * c_before[j] + gates[j] * gates[2 * H + j];
                h[j] = gates[3 * H + j] * std::tanh(c[j]);
            }
            std::copy_n(h, H, &x_[layer + 1][r * 2 * H + direction * H]);
            h_before = h;
            c_before = c;
        }
    }

    // Adds to dinp (n, inputs) and sets the gradients of the direction's tensors, from dout (n, 2 H).
    void backward(Tensors& d, std::vector<real>& dinp, const std::vector<real>& dout, const Tensors& w, int layer,
                  int direction) const {
        const size_t k = of(layer, direction), H = (size_t)H_;
        const Direction& kept = kept_[layer][direction];
        const std::vector<real> zeros(H, 0);
        std::vector<real> dgates(kept.gates.size()), dh(H, 0), dc(H, 0);  // dh, dc: from the row that is read next
        for (int t = n_ - 1; t >= 0; t--) {
            const size_t r = row(direction, t), before = t ? row(direction, t - 1) : 0;
            const real *s = &kept.gates[r * 4 * H], *c = &kept.c[r * H];
            const real* c_before = t ? &kept.c[before * H] : zeros.data();
            real* ds = &dgates[r * 4 * H];
            for (size_t j = 0; j < H; j++) {
                const real i = s[j], f = s[H + j], g = s[2 * H + j], o = s[3 * H + j], tanh_c = std::tanh(c[j]);
                const real dh_j = dh[j] + dout[r * 2 * H + direction * H + j];
                const real dc_j = dc[j] + dh_j * o * (1 - tanh_c * tanh_c);
                ds[j] = dc_j * g * i * (1 - i);
                ds[H + j] = dc_j * c_before[j] * f * (1 - f);
                ds[2 * H + j] = dc_j * i * (1 - g * g);
                ds[3 * H + j] = dh_j * tanh_c * o * (1 - o);
                dc[j] = dc_j * f;
            }
            if (t == 0) break;
            std::fill(dh.begin(), dh.end(), real(0));
            add_input_gradient(dh.data(), ds, w[k + 1], 1, H_, 4 * H_);
        }
        if (n_ > 1) {  // each row's gates with the h before it
            const size_t gates = direction ? 0 : 1, h = direction ? 1 : 0;
            add_weight_gradient(d[k + 1], &dgates[gates * 4 * H], &kept.h[h * H], n_ - 1, H_, 4 * H_);
        }
        add_weight_gradient(d[k], dgates.data(), x_[layer].data(), n_, inputs(layer), 4 * H_);
        for (const size_t bias : {k + 2, k + 3}) add_sum_of_rows(d[bias], dgates.data(), n_, 4 * H_);
        add_input_gradient(dinp.data(), dgates.data(), w[k], n_, inputs(layer), 4 * H_);
    }

    int n_, C_, H_;
    std::vector<real> x_[3];    // (n, inputs) of each layer, and (n, 2 H) the output of the last
    Direction kept_[2][2];      // [layer][direction]
    std::vector<real> hidden_;  // (n, 2 H) after the ReLU
};
