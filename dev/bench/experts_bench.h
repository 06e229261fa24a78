// bench --experts: mixtures of experts with SwiGLU next to a dense MLP of as many rows: the products of all experts, and the
// layer forward and backward. Random routing.
#pragma once
#include <functional>

#include "measure.h"

namespace bench {

class ExpertsBench {
public:
    ExpertsBench(be::Ctx& ctx, const Machine& machine, Figures& figures) : ctx_(ctx), machine_(machine), figures_(figures) {}

    void run() {
        if (emulated) return layer({1, 24, 4, 2}, 16, 24);
        if (!on_gpu) return layer({1, 1024, 64, 8}, 512, 256);
        layer({1, 32768, 64, 8}, 2048, 1024);  // OLMoE-1B-7B: 4096 and 512 rows per expert
        layer({1, 4096, 64, 8}, 2048, 1024);
        layer({1, 8192, 8, 2}, 4096, 14336);  // Mixtral-8x7B
    }

private:
    void layer(const MixtureShape& s, int C, int F) {
        const std::string name = format("%d of %d experts, %d rows, %dx%d", s.K, s.E, s.N(), C, F);
        if (!figures_.begin(name)) return;
        const size_t N = (size_t)s.N(), slots = (size_t)s.slots(), E = (size_t)s.E, H = 2 * (size_t)F;
        const Numbers<floatX> x(ctx_, N * C), out(ctx_, N * C), dx(ctx_, N * C), w_router(ctx_, E * C), h(ctx_, slots * H),
            dh(ctx_, slots * H), act(ctx_, slots * F), dense_x(ctx_, slots * C), y(ctx_, slots * C), w1(ctx_, E * H * C),
            w2(ctx_, E * C * F);
        const Numbers<real> logits(ctx_, N * E), dlogits(ctx_, N * E), weights(ctx_, slots), drouting(ctx_, slots),
            dw_router(ctx_, E * C), dw1(ctx_, E * H * C), dw2(ctx_, E * C * F);
        const Numbers<int> experts(ctx_, slots), slot_of(ctx_, slots), choices(ctx_, slots), offsets(ctx_, E + 1),
            counts(ctx_, (size_t)s.B * E);
        const Routing r = {logits, experts, weights, slot_of, choices, offsets, counts};
        const ExpertGroups groups = {offsets, s.E, s.slots()};
        const ExpertRows x_rows = {x, choices, s.K}, out_rows = {out, choices, s.K}, dh_rows = {dh}, act_rows = {act};
        const StackedRows all1 = {dw1, 0, (int)(E * H)}, all2 = {dw2, 0, (int)(E * C)};

        const auto route = [&] {
            be::router_logits(ctx_, logits, x, w_router, nullptr, s, C);
            be::route(ctx_, r, s, {});
        };
        const auto fc1 = [&] { be::expert_linear_forward(ctx_, h, x_rows, w1, {}, groups, C, (int)H, Acc::Set); };
        const auto fc2 = [&] { be::expert_linear_forward(ctx_, y, act_rows, w2, {}, groups, F, C, Acc::Set); };
        const auto fc1_input = [&] { be::expert_linear_backward_input(ctx_, y, dh_rows, w1, groups, C, (int)H, Acc::Set); };
        const auto fc2_input = [&] { be::expert_linear_backward_input(ctx_, act, out_rows, w2, groups, F, C, Acc::Set); };
        const auto fc1_weight = [&] {
            be::expert_linear_backward_weight(ctx_, all1, dh_rows, x_rows, groups, C, (int)H, Acc::Add);
        };
        const auto fc2_weight = [&] {
            be::expert_linear_backward_weight(ctx_, all2, out_rows, act_rows, groups, F, C, Acc::Add);
        };
        const auto forward = [&] {
            route();
            fc1();
            be::expert_activation_forward(ctx_, act, h, r, s, F, Activation::swiglu);
            fc2();
            be::expert_combine(ctx_, out, y, r, s, C);
        };
        const auto backward = [&] {
            fc2_weight();
            fc2_input();
            be::expert_activation_backward(ctx_, dh, drouting, act, h, r, s, F, Activation::swiglu);
            fc1_weight();
            fc1_input();
            be::expert_combine(ctx_, dx, y, r, s, C);
            be::router_backward(ctx_, dlogits, nullptr, drouting, r, s, {}, {});
            be::router_backward_input(ctx_, dx, dlogits, w_router, s, C);
            be::router_backward_weight(ctx_, dw_router, dlogits, x, s, C, Acc::Add);
        };
        const int n = s.slots();
        const auto dense_fc1 = [&] { be::linear_forward(ctx_, h, dense_x, w1, nullptr, n, C, (int)H); };
        const auto dense = [&] {
            be::linear_swiglu_forward(ctx_, act, h, dense_x, w1, nullptr, n, C, F);
            be::linear_forward(ctx_, y, act, w2, nullptr, n, F, C);
        };
        const auto dense_backward = [&] {
            be::linear_backward_weight(ctx_, (real*)dw2, nullptr, dense_x, act, n, F, C, Acc::Add);
            be::linear_swiglu_backward_input(ctx_, dh, act, dense_x, w2, h, n, F, C);
            be::linear_backward_weight(ctx_, (real*)dw1, nullptr, dh, dense_x, n, C, (int)H, Acc::Add);
            be::linear_backward_input(ctx_, y, dh, w1, n, C, (int)H);
        };
        const double of_fc2 = 2.0 * (double)slots * C * F, of_fc1 = 2 * of_fc2;
        const auto time = [&](const char* variant, double flops, auto f) {
            if (figures_.begin(name)) figures_.add(name, variant, median_seconds(ctx_, f), flops, machine_);
        };
        route();
        time("forward", of_fc1 + of_fc2, forward);
        time("dense forward", of_fc1 + of_fc2, dense);
        time("backward", 2 * (of_fc1 + of_fc2), backward);
        time("dense backward", 2 * (of_fc1 + of_fc2), dense_backward);
        time("fc1", of_fc1, fc1);
        time("dense fc1", of_fc1, dense_fc1);
        time("fc2", of_fc2, fc2);
        time("fc1 backward input", of_fc1, fc1_input);
        time("fc2 backward input", of_fc2, fc2_input);
        time("fc1 backward weight", of_fc1, fc1_weight);
        time("fc2 backward weight", of_fc2, fc2_weight);
    }

    be::Ctx& ctx_;
    const Machine& machine_;
    Figures& figures_;
};

}  // namespace bench
