// The layers of a mixture of experts (mixture_forward and mixture_backward in train_gpt.cu show how they are put together): the
// experts' matrices with adapters and biases, the router's gradients, and the shared expert.
#pragma once
#include "../ops.h"
#include "expert_parallel.h"
#include "linear.h"
#include "model.h"
#include "model_memory.h"
#include "pass.h"

// ---- experts in FP8 ---------------------------------------------------------------------------------------------------------

// Experts multiply the numbers that FP8 codes represent, in floatX, which is exact: the result is the same as from products of
// codes, for which tensor cores would need each expert's rows padded. The numbers are computed before each product, from
// tensors that are kept as in bf16. Each of the six tensors of fc1 and fc2 has one scale for all experts; rows are measured
// before they are sent to experts, so that scales do not depend on the layout.

// Rows of experts: of the mixture's input or output, or slots.
inline FilledRows filled_rows(const ExpertRows& x, const MixtureShape& shape, const ExpertGroups& groups, int columns) {
    if (x.choices) return {shape.N(), columns};
    return {groups.slots, columns, groups.offsets + groups.E};
}
inline void scale_of_slots(const Pass& p, const Linear& l, const Fp8Tensor& t, const ExpertRows& x, const FilledRows& rows,
                           Measured measured = Measured::now) {
    if (x.choices) return;  // rows_for_experts measured them
    scale_of_experts(
        p, l, t, [&](float* amax) { be::absolute_max_of_rows(p.ctx, amax, x.x, rows); }, measured);
}
inline const floatX* numbers_of(const Pass& p, const Fp8Tensor& t, floatX* to, const floatX* x, const FilledRows& rows) {
    Fp8Training& f = p.m.fp8;
    be::fp8_numbers(p.ctx, to, x, rows, t.scale, t.format);
    if (!f.counts.empty()) count_numbers(p.ctx, f.counts[t.index], to, rows, t.format);
    return to;
}
// The numbers of a factor's rows; factor: 0 input, 1 gradient of the output.
inline ExpertRows in_fp8(const Pass& p, const Fp8Tensor& t, int factor, const ExpertRows& x, const FilledRows& rows) {
    return {numbers_of(p, t, p.m.a.fp8_experts[factor], x.x, rows), x.choices, x.K};
}
inline const floatX* weights_in_fp8(const Pass& p, const Linear& l) {
    return numbers_of(p, l.fp8_w, p.m.a.fp8_expert_weights, l.w, {l.tensor->rows, l.tensor->cols});
}
inline Fp8Scales scales_of(const Fp8Tensor& a, const Fp8Tensor& b) { return {&a.inverse->value, &b.inverse->value}; }

// ---- experts ----------------------------------------------------------------------------------------------------------------

// One of the two matrices of all experts, with its adapters.
inline void expert_layer_forward(const Pass& p, const Linear& l, floatX* out, const ExpertRows& inp, const ExpertBias& bias,
                                 const Routing& routing) {
    const MixtureShape shape = p.experts(l.block);
    const ExpertGroups groups = routing.groups(shape);
    const FilledRows rows = filled_rows(inp, shape, groups, l.in);
    scale_of_slots(p, l, l.fp8_inp, inp, rows);
    if (p.fp8(l.block)) {
        const ExpertRows x = in_fp8(p, l.fp8_inp, 0, inp, rows);
        be::fp8_expert_linear_forward(p.ctx, out, x, weights_in_fp8(p, l), scales_of(l.fp8_inp, l.fp8_w), bias, groups, l.in,
                                      l.out);
    } else {
        be::expert_linear_forward(p.ctx, out, inp, l.w, bias, groups, l.in, l.out, Acc::Set);
    }
    if (l.lora) p.m.lora.experts_forward(p.ctx, *l.lora, out, inp, routing, shape, p.adapter_dropout(l));
}
// The products of backward, of the numbers of dout. With current scaling the input gets its scale of forward again.
inline void expert_weight_in_fp8(const Pass& p, const Linear& l, const ExpertRows& dout, const ExpertRows& inp,
                                 const FilledRows& inp_rows, const ExpertGroups& groups) {
    scale_of_slots(p, l, l.fp8_inp, inp, inp_rows, Measured::before);
    const ExpertRows x = in_fp8(p, l.fp8_inp, 0, inp, inp_rows);
    add_weight_gradient(p, l, [&](const Elements& dw, int row, int rows, Acc acc) {
        be::fp8_expert_linear_backward_weight(p.ctx, {(real*)dw.data, row, rows}, dout, x, scales_of(l.fp8_dout, l.fp8_inp),
                                              groups, l.in, l.out, acc);
    });
}
inline void expert_input_in_fp8(const Pass& p, const Linear& l, floatX* dinp, const ExpertRows& dout,
                                const ExpertGroups& groups) {
    be::fp8_expert_linear_backward_input(p.ctx, dinp, dout, weights_in_fp8(p, l), scales_of(l.fp8_dout, l.fp8_w), groups, l.in,
                                         l.out);
}
// Sets dinp, and adds to the gradients of the weight or of its adapters.
inline void expert_layer_backward(const Pass& p, const Linear& l, floatX* dinp, const ExpertRows& dout, const ExpertRows& inp,
                                  const Routing& routing) {
    const MixtureShape shape = p.experts(l.block);
    const ExpertGroups groups = routing.groups(shape);
    const FilledRows dout_rows = filled_rows(dout, shape, groups, l.out);
    scale_of_slots(p, l, l.fp8_dout, dout, dout_rows);
    if (p.fp8(l.block)) {
        const ExpertRows numbers = in_fp8(p, l.fp8_dout, 1, dout, dout_rows);
        if (l.dw) expert_weight_in_fp8(p, l, numbers, inp, filled_rows(inp, shape, groups, l.in), groups);
        expert_input_in_fp8(p, l, dinp, numbers, groups);
    } else {
        if (l.dw)
            add_weight_gradient(p, l, [&](const Elements& dw, int row, int rows, Acc acc) {
                be::expert_linear_backward_weight(p.ctx, {(real*)dw.data, row, rows}, dout, inp, groups, l.in, l.out, acc);
            });
        be::expert_linear_backward_input(p.ctx, dinp, dout, l.w, groups, l.in, l.out, Acc::Set);
    }
    if (l.lora)
        p.m.lora.experts_backward(p.ctx, *l.lora, dinp, dout, inp, routing, shape, p.adapter_dropout(l), acc_of_products(p));
}

// The rows that the experts of this rank process, from `own` (N, C); null stays null. t: their tensor in FP8.
inline ExpertRows rows_for_experts(const Pass& p, const Block& b, const MlpActivations& s, const Fp8Tensor& t,
                                   const floatX* own, Measured measured = Measured::now) {
    if (own) {
        const size_t n = (size_t)p.N() * p.m.c.C;
        scale_of_experts(
            p, b.fc1(), t, [&](float* amax) { be::absolute_max(p.ctx, amax, own, n); }, measured);
    }
    return {own ? gather_for_experts(p, b, s, own) : nullptr, routing_of_experts(p, s).choices, p.m.c.mixture.topk};
}
inline void expert_fc1_forward(const Pass& p, const Block& b, const MlpActivations& s, const floatX* all_inp) {
    const Routing& routing = routing_of_experts(p, s);
    const Linear& l = b.fc1();
    expert_layer_forward(p, l, s.fc1, rows_for_experts(p, b, s, l.fp8_inp, all_inp), {l.b}, routing);
}
inline ExpertBias fc2_bias(const Pass& p, const Block& b, const Routing& routing) {
    return {on_first_tp_rank(p, b.fc2().b), routing.weights, routing.choices};
}
inline void expert_activation_forward(const Pass& p, const Block& b, const MlpActivations& s) {
    be::expert_activation_forward(p.ctx, s.act.bf16, s.fc1, routing_of_experts(p, s), p.experts(b.fc2().block), b.fc2().in,
                                  p.m.c.activation);
}

// The gradients of fc2's bias and, through it, of the routing weights. With sequence parallelism reduce_shared sums the bias's
// over tp, so only the first rank computes it.
inline void fc2_bias_backward(const Pass& p, const Block& b, real* drouting, const ExpertRows& dout, const Routing& routing) {
    const Linear& l = b.fc2();
    const ExpertGroups groups = routing.groups(p.experts(l.block));
    const ExpertBias bias = fc2_bias(p, b, routing);
    real* const db = p.cut_rows() ? on_first_tp_rank(p, l.db) : l.db;
    if (db) be::expert_bias_backward(p.ctx, db, dout, bias, groups, l.out);
    if (bias.x) be::expert_bias_backward_routing(p.ctx, drouting, dout, bias, groups, l.out);
}

// ---- the router's gradients -------------------------------------------------------------------------------------------------

// (B, E) rows of whole sequences, which are cut over ranks, that chose each expert.
inline int* counts_of_sequences(const Pass& p, const Routing& routing) {
    const Routing& all = p.m.a.of_sequences;
    MixtureShape shape = p.mixture();
    const size_t choices = (size_t)shape.T * shape.K, bytes = choices * sizeof(int);
    for (int b = 0; b < shape.B; b++)
        be::all_gather(p.ctx, p.m.ranks->cp, (uint8_t*)(all.experts + b * choices * shape.cut),
                       (const uint8_t*)(routing.experts + b * choices), bytes);
    shape.T *= shape.cut;
    be::sort_choices(p.ctx, all, shape, 0);
    return all.counts;
}

// Sets dlogits, from the gradients of the routing weights and, on the first tp rank only, from the router's two losses, whose
// values it adds to router_sums.
inline void router_backward(const Pass& p, const Block& b, const Routing& routing) {
    const Model& m = p.m;
    const MixtureShape shape = p.mixture();
    const bool first = m.ranks->mesh.tp.rank == 0;
    const int block = b.fc1().block;
    double* const sums = m.a.router_sums + (size_t)block * RouterSums::size(shape.E);
    Routing counted = routing;
    if (first && p.cut_context()) counted.counts = counts_of_sequences(p, routing);
    be::router_backward(p.ctx, m.a.dlogits, first ? sums : nullptr, m.a.drouting, counted, shape, p.router_rule(block),
                        first ? m.router_losses : RouterLossFactors());
}

inline void add_router_gradient(const Pass& p, const Router& router, const real* dlogits, const floatX* all_inp,
                                const MixtureShape& shape) {
    if (router.db) be::router_backward_bias(p.ctx, router.db, dlogits, shape);
    add_weight_gradient(p, *router.tensor, router.dw, acc_of_matrices(p), p.in.rounding_key,
                        [&](const Elements& dw, int, int rows, Acc acc) {
                            CHECK(rows == router.tensor->rows, "%d of %d rows", rows, router.tensor->rows);
                            be::router_backward_weight(p.ctx, (real*)dw.data, dlogits, all_inp, shape, p.m.c.C, acc);
                        });
}

// ---- the shared expert ------------------------------------------------------------------------------------------------------

// The shared expert processes every row: it adds g fc2(act(fc1(x))), where g is 1 or, with a gate, sigmoid(gate x). Like
// routing weights, g multiplies the activation, and fc2's bias: the gate is a router, which chooses the one expert that it has.
inline constexpr RouterRule gate_rule = {/*sigmoid*/ true, /*normalize*/ false};
inline MixtureShape shape_of_gate(const Pass& p) {
    const MixtureShape shape = p.mixture();
    return {shape.B, shape.T, 1, 1};
}
// In FP8 it is a mixture of one expert, with the other experts' scales; with current scaling fc2's input and fc1's gradient
// have their own.
inline ExpertGroups one_group(const Pass& p) { return {p.m.a.one_group, 1, p.N()}; }
inline void shared_forward_in_fp8(const Pass& p, const Linear& l, floatX* out, const floatX* inp, const ExpertBias& bias) {
    const ExpertRows x = in_fp8(p, l.fp8_inp, 0, {inp}, {p.N(), l.in});
    be::fp8_expert_linear_forward(p.ctx, out, x, weights_in_fp8(p, l), scales_of(l.fp8_inp, l.fp8_w), bias, one_group(p), l.in,
                                  l.out);
}
inline void shared_fc1_forward(const Pass& p, const SharedExpert& e, const SharedExpertActivations& s, const floatX* all_inp) {
    if (p.fp8(e.fc1.block)) return shared_forward_in_fp8(p, e.fc1, s.fc1, all_inp, {e.fc1.b});  // input as the others
    be::linear_forward(p.ctx, s.fc1, all_inp, e.fc1.w, e.fc1.b, p.N(), e.fc1.in, e.fc1.out);
}
inline void shared_activation_forward(const Pass& p, const SharedExpert& e, const SharedExpertActivations& s) {
    const Activation activation = p.m.c.activation;
    if (!e.gate.w) return be::activation_forward(p.ctx, s.act, s.fc1, p.N(), e.fc2.in, activation);
    be::expert_activation_forward(p.ctx, s.act, s.fc1, s.gate, shape_of_gate(p), e.fc2.in, activation);
}
inline void shared_gate_forward(const Pass& p, const SharedExpert& e, const Routing& gate, const floatX* all_inp) {
    if (!e.gate.w) return;
    be::router_logits(p.ctx, gate.logits, all_inp, e.gate.w, nullptr, shape_of_gate(p), p.m.c.C);
    be::route(p.ctx, gate, shape_of_gate(p), gate_rule);
}
inline void shared_hidden_forward(const Pass& p, const SharedExpert& e, const SharedExpertActivations& s,
                                  const floatX* all_inp) {
    shared_fc1_forward(p, e, s, all_inp);
    shared_gate_forward(p, e, s.gate, all_inp);
    shared_activation_forward(p, e, s);
}
inline void shared_fc2_forward(const Pass& p, const SharedExpert& e, const SharedExpertActivations& s, floatX* out) {
    const Linear& l = e.fc2;
    const floatX* const bias = on_first_tp_rank(p, l.b);
    scale_of_slots(p, l, l.fp8_inp, {s.act}, {p.N(), l.in});
    if (p.fp8(l.block)) {
        const Routing& gate = s.gate;
        return shared_forward_in_fp8(p, l, out, s.act,
                                     e.gate.w ? ExpertBias{bias, gate.weights, gate.choices} : ExpertBias{bias});
    }
    if (!e.gate.w || !bias) return be::linear_forward(p.ctx, out, s.act, l.w, bias, p.N(), l.in, l.out);
    be::expert_linear_forward(p.ctx, out, {s.act}, l.w, {bias, s.gate.weights, s.gate.choices}, s.gate.groups(shape_of_gate(p)),
                              l.in, l.out, Acc::Set);
}
// sum += x, with x computed in the memory of the experts' outputs.
template <class Compute>
inline void add_shared(const Pass& p, floatX* sum, Compute compute) {
    floatX* const x = p.m.a.expert_rows;
    compute(x);
    be::residual_forward(p.ctx, sum, sum, x, (size_t)p.N() * p.m.c.C);
}
inline void add_shared_output(const Pass& p, const SharedExpert& e, const SharedExpertActivations& s, floatX* sum) {
    add_shared(p, sum, [&](floatX* x) { shared_fc2_forward(p, e, s, x); });
}

// From dout, the gradient of the mixture's output: the gradients of fc2's weight, of fc1's output, and of the gate's logits.
inline void shared_output_backward(const Pass& p, const SharedExpert& e, const SharedExpertActivations& s, const floatX* dout) {
    const Activations& a = p.m.a;
    const Linear& l = e.fc2;
    const Activation activation = p.m.c.activation;
    real* const db = p.cut_rows() ? on_first_tp_rank(p, l.db) : l.db;  // as in fc2_bias_backward
    if (p.fp8(l.block)) {
        const ExpertRows numbers = in_fp8(p, l.fp8_dout, 1, {dout}, {p.N(), l.out});  // with the scale of the others'
        if (db && !e.gate.w) be::bias_backward(p.ctx, db, dout, p.N(), l.out);
        if (l.dw) expert_weight_in_fp8(p, l, numbers, {s.act}, {p.N(), l.in}, one_group(p));
        expert_input_in_fp8(p, l, a.dact, numbers, one_group(p));
    } else {
        if (l.dw) add_gradients(p, l, e.gate.w ? nullptr : db, dout, s.act);
        be::linear_backward_input(p.ctx, a.dact, dout, l.w, p.N(), l.in, l.out);
    }
    if (!e.gate.w) return be::activation_backward(p.ctx, a.dshared_fc1, a.dact, s.fc1, p.N(), l.in, activation);
    const MixtureShape shape = shape_of_gate(p);
    be::expert_activation_backward(p.ctx, a.dshared_fc1, a.drouting, a.dact, s.fc1, s.gate, shape, l.in, activation);
    const ExpertBias bias = {on_first_tp_rank(p, l.b), s.gate.weights, s.gate.choices};
    if (db) be::expert_bias_backward(p.ctx, db, {dout}, bias, s.gate.groups(shape), l.out);
    if (bias.x) be::expert_bias_backward_routing(p.ctx, a.drouting, {dout}, bias, s.gate.groups(shape), l.out);
    be::router_backward(p.ctx, a.dshared_gate, nullptr, a.drouting, s.gate, shape, gate_rule, {});
}
// The gradient of fc1's output in FP8; in bf16 only measured.
inline ExpertRows shared_dfc1(const Pass& p, const Linear& l) {
    const ExpertRows dout = {p.m.a.dshared_fc1};
    scale_of_slots(p, l, l.fp8_dout, dout, {p.N(), l.out});
    return p.fp8(l.block) ? in_fp8(p, l.fp8_dout, 1, dout, {p.N(), l.out}) : dout;
}
inline void shared_weights_backward(const Pass& p, const SharedExpert& e, const floatX* all_inp) {
    const Linear& l = e.fc1;
    if (p.fp8(l.block)) {
        if (l.db) be::bias_backward(p.ctx, l.db, p.m.a.dshared_fc1, p.N(), l.out);
        expert_weight_in_fp8(p, l, shared_dfc1(p, l), {all_inp}, {p.N(), l.in}, one_group(p));
    } else {
        add_gradients(p, l, l.db, p.m.a.dshared_fc1, all_inp);
    }
    if (e.gate.w) add_router_gradient(p, e.gate, p.m.a.dshared_gate, all_inp, shape_of_gate(p));
}
// Adds to dinp.
inline void shared_input_backward(const Pass& p, const SharedExpert& e, floatX* dinp) {
    const Activations& a = p.m.a;
    const Linear& l = e.fc1;
    const ExpertRows dout = shared_dfc1(p, l);
    add_shared(p, dinp, [&](floatX* x) {
        if (p.fp8(l.block)) expert_input_in_fp8(p, l, x, dout, one_group(p));
        else be::linear_backward_input(p.ctx, x, dout.x, l.w, p.N(), l.in, l.out);
    });
    if (e.gate.w) be::router_backward_input(p.ctx, dinp, a.dshared_gate, e.gate.w, shape_of_gate(p), p.m.c.C);
}
