// A Linear of a block: out = inp w^T + b, and its backward pass. Its callers do not see the communication of tensor and
// sequence parallelism, FP8, and low-rank adapters.
//   linear_forward, linear_backward          the products
//   output_for, gradient_for                 destinations of ops that may write the next product's operand in FP8
//   gather_..., partial_sum, reduce_...      communication, also of the embedding and the head
//
// Tensor parallelism splits qkv and fc1 by columns of their output, proj and fc2 by rows of their input (Shoeybi et al., 2019):
// the outputs of the latter are partial sums over the ranks. Sequence parallelism (Korthikanti et al., 2022) splits the rows of
// the residual stream: inputs of the former are gathered, sums of the latter are scattered, and in reverse in backward.
//
// FP8: forward and both backward products have FP8 operands. Each has one scale per tensor (fp8_state.h): known in advance
// (delayed scaling), or computed from the tensor itself (current scaling). expert_layer.h has the products of experts.
#pragma once
#include <cstdint>

#include "../model/fp8_training.h"
#include "../model/recompute.h"
#include "../ops.h"
#include "../parallel/comm.h"
#include "model.h"
#include "pass.h"

// ---- tensor and sequence parallelism ----------------------------------------------------------------------------------------

// Gathers all rows of x (rows, columns) in a.all_rows; this rank has `rows` of them.
inline const floatX* gather_from_sequence_parallel(const Pass& p, const floatX* x, int rows, int columns) {
    if (rows == p.N()) return x;
    be::all_gather(p.ctx, p.m.ranks->tp, p.m.a.all_rows, x, (size_t)rows * columns);
    return p.m.a.all_rows;
}
// The same in FP8, gathered in `all`; x may be this rank's part of it.
inline const uint8_t* gather_fp8(const Pass& p, uint8_t* all, const uint8_t* x, int rows, int columns) {
    if (rows == p.N()) return x;
    be::all_gather(p.ctx, p.m.ranks->tp, all, x, (size_t)rows * columns);
    return all;
}
// The buffer for a rank's partial sum (N, C) of a sum over tp ranks: `out` itself, or a.all_rows where rows are split.
// reduce_from_tensor_parallel() then sets out (Nl, C) to this rank's rows of the sum.
inline floatX* partial_sum(const Pass& p, floatX* out) { return p.cut_rows() ? p.m.a.all_rows : out; }
inline void reduce_from_tensor_parallel(const Pass& p, floatX* out) {
    const size_t n = (size_t)p.local_rows() * p.m.c.C;
    if (p.cut_rows()) be::reduce_scatter(p.ctx, p.m.ranks->tp, out, p.m.a.all_rows, n);
    else be::all_reduce(p.ctx, p.m.ranks->tp, out, n);
}
// A bias that every rank would add to such a sum is added by the first rank only.
template <class E>
E* on_first_tp_rank(const Pass& p, E* bias) {
    return p.m.ranks->mesh.tp.rank == 0 ? bias : nullptr;
}

// True if a layer's backward gathers its input and sums dinp over ranks, and hides these transfers behind its two products.
inline bool overlaps(const Pass& p, const Linear& l) {
    return p.m.a.all_inputs && p.cut_rows() && !l.row_parallel() && l.dw && !l.lora;
}
// dinp and the weight's gradient of such a layer: gathers the input during to_input(product), and sums dinp during
// to_weight(all inputs).
template <class E, class ToInput, class ToWeight>
void backward_during_transfers(const Pass& p, const Linear& l, floatX* dinp, const E* inp, ToInput to_input,
                               ToWeight to_weight) {
    be::Comm& tp = p.m.ranks->tp;
    const size_t n = (size_t)p.local_rows() * l.in;
    E* all_inp = (E*)p.m.a.all_inputs;
    be::Pending gathered = be::start_all_gather(p.ctx, tp, all_inp, inp, n);
    to_input(p.m.a.all_rows);
    be::Pending summed = be::start_reduce_scatter(p.ctx, tp, dinp, (const floatX*)p.m.a.all_rows, n);
    be::finish(p.ctx, gathered);
    to_weight(all_inp);
    be::finish(p.ctx, summed);
}

// ---- quantized weights ------------------------------------------------------------------------------------------------------

// The weights of a layer (out, in). Quantized ones are decoded into a buffer that all layers share: valid until the next call.
inline const floatX* weights_of(const Pass& p, const Linear& l) {
    if (l.coded.empty()) return l.w;
    for (const QuantizedRows& r : l.coded)
        be::dequantize_weights(p.ctx, p.m.a.dequantized + (size_t)r.row * l.in, r.weights, (size_t)r.rows * l.in);
    return p.m.a.dequantized;
}
// True if the product of a pass decodes rows while it multiplies.
inline bool decodes_rows(const Pass& p, const Linear& l) { return !l.coded.empty() && be::decodes_rows(p.ctx, p.N()); }

// ---- gradients of weights (gradients.h) -------------------------------------------------------------------------------------

// Whether the gradient of a matrix is set or added to: with ZeRO-2 it is always one micro-batch's.
inline Acc acc_of_matrices(const Pass& p) { return p.m.sharded_grads.used() ? Acc::Set : p.in.gradients; }
// The same for products. With gradients in bf16 they always set a micro-batch's contribution, which is then added.
inline Acc acc_of_products(const Pass& p) { return p.m.micro_grads.used() ? Acc::Set : acc_of_matrices(p); }
// Sets a weight's gradient or adds to it. product(dweight, row, rows, acc) does that for some rows, of which dweight is the
// first. dw: the gradient as ops write it.
template <class Product>
void add_weight_gradient(const Pass& p, const TensorSpec& t, real* dw, Acc acc, uint64_t key, Product product) {
    const BlockGradients& rounded = p.m.micro_grads;
    if (!rounded.used()) return product(Elements(dw), 0, t.rows, acc);
    if (rounded.set_by_products(t, acc)) return product(p.m.grads.from(t.offset), 0, t.rows, acc);
    rounded.add_product(p.ctx, t, p.m.grads, acc, key,
                        [&](const real* sums, int row, int rows) { product(Elements(sums), row, rows, Acc::Set); });
}
template <class Product>
void add_weight_gradient(const Pass& p, const Linear& l, Product product) {
    add_weight_gradient(p, *l.tensor, l.dw, acc_of_matrices(p), p.in.rounding_key, product);
}
// The same for a layer in bf16 or fp32, with its bias, from all rows of dout and of the input. db may be null.
inline void add_gradients(const Pass& p, const Linear& l, real* db, const floatX* dout, const floatX* inp) {
    if (db && p.m.sharded_grads.used() && p.in.gradients == Acc::Add) {  // the product sets, and vectors keep their sums
        be::bias_backward(p.ctx, db, dout, p.N(), l.out);
        db = nullptr;
    }
    add_weight_gradient(p, l, [&](const Elements& dweight, int row, int rows, Acc acc) {
        be::linear_backward_weight_rows(p.ctx, dweight, db ? db + row : nullptr, Columns{dout + row, l.out}, inp, p.N(), l.in,
                                        rows, acc);
    });
}

// ---- FP8 --------------------------------------------------------------------------------------------------------------------

// True if the op that computes a tensor writes it in FP8: if the scale is known in advance, and no other op reads its bf16.
// (Adapters read bf16. Other ops read the input of proj, see Storage, and the residual stream, which is the input of qkv and
// fc1 if no norm precedes them; the output gradient of proj and fc2 is the gradient of the residual stream or passes through a
// norm.)
inline bool writes_fp8(const Pass& p, const Linear& l, const Fp8Tensor& t) {
    if (!p.fp8(l.block) || p.m.fp8.current || t.operand == Operand::weight || l.lora || l.of_experts) return false;
    if (t.operand == Operand::gradient) return l.matrix == Matrix::fc1;
    return l.matrix == Matrix::fc2 || (l.matrix != Matrix::proj && p.m.c.norm_before());
}
// The destination of an op that computes the input of the next layer.
inline Output output_for(const Pass& p, const Linear& next, const LinearInput& inp) {
    if (!writes_fp8(p, next, next.fp8_inp)) return inp.bf16;
    return next.fp8_inp.codes(inp.fp8, nullptr);
}
// The same in backward, for an op that computes the gradient of a layer's output.
inline Output gradient_for(const Pass& p, const Linear& l, floatX* dout) {
    if (!writes_fp8(p, l, l.fp8_dout)) return dout;
    return {l.fp8_dout.codes(p.m.a.fp8_codes, p.m.a.fp8_gradients), l.db ? dout : nullptr};
}

// Quantizes x (rows, columns), unless its codes exist already; also transposed if requested. With current scaling, sets
// *inverse to the inverse scale of the codes.
inline void quantize(const Pass& p, const Linear& l, const Fp8Tensor& t, const Codes& to, ScaleInverse* inverse,
                     const floatX* x, int rows, int columns) {
    Fp8Training& f = p.m.fp8;
    const size_t n = (size_t)rows * columns;
    if (f.current) {
        be::clear(p.ctx, f.now, sizeof *f.now);
        be::absolute_max(p.ctx, f.now, x, n);
        be::all_reduce_max(p.ctx, p.m.ranks->tp, f.now, 1);
        be::set_scale(p.ctx, t.scale, &inverse->value, f.now, t.format, f.recipe.margin);
    }
    if (!writes_fp8(p, l, t)) be::quantize(p.ctx, to, x, rows, columns);
    if (!f.counts.empty()) count_codes(p.ctx, f.counts[t.index], to.codes, n, t.format);
}
// With current scaling each micro-batch has its own inverse scale of an input.
inline ScaleInverse* input_inverse(const Pass& p, const Linear& l, const LinearInput& inp) {
    return p.m.fp8.current ? inp.inverse : l.fp8_inp.inverse;
}
inline void quantize_input(const Pass& p, const Linear& l, const LinearInput& inp) {
    quantize(p, l, l.fp8_inp, l.fp8_inp.codes(inp.fp8, nullptr), input_inverse(p, l, inp), inp.bf16, p.input_rows(l), l.in);
}
// In the bf16 steps before FP8: measures the amax of tensors that FP8 will quantize.
inline void measure(const Pass& p, const Linear& l, const Fp8Tensor& t, const floatX* x, size_t n) {
    if (p.m.fp8.measuring && p.m.fp8.blocks[l.block]) be::absolute_max(p.ctx, t.amax, x, n);
}
// When a tensor's amax was recorded: forward's inputs have theirs before backward, where only current scaling measures again.
enum class Measured { now, before };
// In FP8 or before it: records the amax of a tensor of a mixture's experts, which largest(amax) raises to its own. With current
// scaling sets the scale, for all experts and the rows of all expert-parallel ranks.
template <class Largest>
void scale_of_experts(const Pass& p, const Linear& l, const Fp8Tensor& t, Largest largest, Measured measured = Measured::now) {
    Fp8Training& f = p.m.fp8;
    if (!(f.on || f.measuring) || !f.blocks[l.block]) return;
    if (measured == Measured::now) largest(t.amax);
    if (!f.on || !f.current) return;
    be::clear(p.ctx, f.now, sizeof *f.now);
    largest(f.now);
    for (be::Comm* ranks : {&p.m.ranks->tp, &p.m.ranks->ep}) be::all_reduce_max(p.ctx, *ranks, f.now, 1);
    be::set_scale(p.ctx, t.scale, &t.inverse->value, f.now, t.format, f.recipe.margin);
}
// Quantizes or measures a block's weights, once per step.
inline void prepare_weights(const Pass& p, int block) {
    Fp8Training& f = p.m.fp8;
    if (!(f.on || f.measuring) || !f.blocks[block] || f.prepared[block]) return;
    f.prepared[block] = true;
    for (const Linear& l : p.m.blocks[block].linears) {
        if (l.of_experts) {
            const SharedExpert& shared = p.m.blocks[block].shared;
            const Linear* also = !shared.exists() ? nullptr : l.matrix == Matrix::fc1 ? &shared.fc1 : &shared.fc2;
            scale_of_experts(p, l, l.fp8_w, [&](float* amax) {
                be::absolute_max(p.ctx, amax, l.w, l.tensor->size());
                if (also) be::absolute_max(p.ctx, amax, also->w, also->tensor->size());
            });
            continue;
        }
        measure(p, l, l.fp8_w, l.w, (size_t)l.out * l.in);
        if (f.on) quantize(p, l, l.fp8_w, l.fp8_w.codes(l.fp8, l.fp8_t), l.fp8_w.inverse, l.w, l.out, l.in);
    }
}

// out = (residual +) inp w^T (+ bias); residual and bias may be null.
inline void fp8_forward(const Pass& p, const Linear& l, floatX* out, const floatX* residual, const LinearInput& inp,
                        const floatX* bias) {
    quantize_input(p, l, inp);
    const uint8_t* all_inp = gather_fp8(p, (uint8_t*)p.m.a.all_rows, inp.fp8, p.input_rows(l), l.in);
    const Fp8Matrix input = {all_inp, &input_inverse(p, l, inp)->value}, weight = {l.fp8, &l.fp8_w.inverse->value};
    const bool fast = p.m.fp8.fast_accumulation;
    if (!residual) return be::fp8_linear_forward(p.ctx, out, input, weight, bias, p.N(), l.in, l.out, fast);
    be::fp8_linear_residual_forward(p.ctx, out, Addends{residual, bias}, input, weight, p.N(), l.in, l.out, fast);
}

// Backward in FP8 has three steps. The first quantizes dout: returns the codes of all rows, transposed also in a.fp8_gradients.
//
// The bias gradient needs a separate pass over this rank's rows: with sequence parallelism each rank then has a partial sum of
// a row-parallel layer's bias gradient, and reduce_shared sums it over tp together with the norms' gradients. (In bf16 the
// product of the weight gradient computes it as well, from all rows: one rank has the whole sum.)
inline const uint8_t* fp8_quantize_gradient(const Pass& p, const Linear& l, const floatX* dout) {
    const Activations& a = p.m.a;
    const int N = p.N(), rows = p.output_rows(l);
    if (l.db && !p.summed_bias(l)) be::bias_backward(p.ctx, l.db, dout, rows, l.out);
    const bool whole = rows == N;  // then the codes are transposed when they are made, else after the gather
    uint8_t* mine = a.fp8_codes + (whole ? 0 : (size_t)p.m.ranks->mesh.tp.rank * rows * l.out);
    const Codes to = l.fp8_dout.codes(mine, l.dw && whole ? a.fp8_gradients : nullptr);
    quantize(p, l, l.fp8_dout, to, l.fp8_dout.inverse, dout, rows, l.out);
    return gather_fp8(p, a.fp8_codes, mine, rows, l.out);
}
// The second: dw = dout^T inp, from all rows of both.
inline void fp8_backward_weight(const Pass& p, const Linear& l, const uint8_t* dout, const uint8_t* all_inp,
                                const LinearInput& inp) {
    const Activations& a = p.m.a;
    const int N = p.N();
    be::transpose_codes(p.ctx, a.fp8_inputs, all_inp, N, l.in);
    if (p.output_rows(l) != N) be::transpose_codes(p.ctx, a.fp8_gradients, dout, N, l.out);
    const Fp8Matrix inp_transposed = {a.fp8_inputs, &input_inverse(p, l, inp)->value};
    add_weight_gradient(p, l, [&](const Elements& dweight, int row, int rows, Acc acc) {
        const Fp8Matrix dout_rows = {a.fp8_gradients + (size_t)row * N, &l.fp8_dout.inverse->value, l.fp8_dout.format};
        be::fp8_linear_backward_weight(p.ctx, dweight, dout_rows, inp_transposed, N, l.in, rows, acc, p.m.fp8.fast_backward);
    });
}
// The third: dinp = dout w, with the codes of w^T (in, out): stored, or computed in a buffer that all layers share, which costs
// 1 byte read and 1 written per weight.
inline void fp8_backward_input(const Pass& p, const Linear& l, floatX* dinp, const uint8_t* dout) {
    uint8_t* const transposed = l.fp8_t ? l.fp8_t : p.m.fp8.transposed;
    if (!l.fp8_t) be::transpose_codes(p.ctx, transposed, l.fp8, l.out, l.in);
    const Fp8Matrix gradient = {dout, &l.fp8_dout.inverse->value, l.fp8_dout.format};
    be::fp8_linear_backward_input(p.ctx, dinp, gradient, {transposed, &l.fp8_w.inverse->value}, p.N(), l.in, l.out,
                                  p.m.fp8.fast_backward);
}

// ---- linear layers ----------------------------------------------------------------------------------------------------------

// All rows of a layer's input.
inline const floatX* whole_input(const Pass& p, const Linear& l, const LinearInput& inp) {
    measure(p, l, l.fp8_inp, inp.bf16, (size_t)p.input_rows(l) * l.in);
    return gather_from_sequence_parallel(p, inp.bf16, p.input_rows(l), l.in);
}

inline void adapters_forward(const Pass& p, const Linear& l, floatX* product, const floatX* all_inp) {
    p.m.lora.forward(p.ctx, *l.lora, product, all_inp, p.N(), p.adapter_dropout(l));
}

// out = inp w^T + b
inline void linear_forward(const Pass& p, const Linear& l, floatX* out, const LinearInput& inp) {
    floatX* product = l.row_parallel() ? partial_sum(p, out) : out;
    const floatX* bias = l.row_parallel() ? on_first_tp_rank(p, l.b) : l.b;
    if (p.fp8(l.block)) {
        fp8_forward(p, l, product, nullptr, inp, bias);
        if (l.lora) adapters_forward(p, l, product, gather_from_sequence_parallel(p, inp.bf16, p.input_rows(l), l.in));
    } else {
        const floatX* all_inp = whole_input(p, l, inp);
        if (decodes_rows(p, l))
            for (const QuantizedRows& r : l.coded)
                be::quantized_linear_forward(p.ctx, product + r.row, l.out, all_inp, r.weights, bias ? bias + r.row : nullptr,
                                             p.N(), l.in, r.rows);
        else be::linear_forward(p.ctx, product, all_inp, weights_of(p, l), bias, p.N(), l.in, l.out);
        if (l.lora) adapters_forward(p, l, product, all_inp);
    }
    if (l.row_parallel()) reduce_from_tensor_parallel(p, out);
}

// Sets or adds gradients of weight and bias; returns all rows of dout. With sequence parallelism, reduce_shared sums a
// row-parallel layer's bias gradient over tp; since it is computed from all rows, only one rank computes it.
inline const floatX* linear_backward_weight(const Pass& p, const Linear& l, const floatX* dout, const LinearInput& inp) {
    measure(p, l, l.fp8_dout, dout, (size_t)p.output_rows(l) * l.out);
    const floatX* all_dout = gather_from_sequence_parallel(p, dout, p.output_rows(l), l.out);
    if (!l.dw && !l.lora) return all_dout;
    const floatX* all_inp = gather_from_sequence_parallel(p, inp.bf16, p.input_rows(l), l.in);
    real* db = p.summed_bias(l) ? nullptr : l.row_parallel() && p.cut_rows() ? on_first_tp_rank(p, l.db) : l.db;
    if (l.dw) add_gradients(p, l, db, all_dout, all_inp);
    if (l.lora) p.m.lora.backward_weight(p.ctx, *l.lora, all_dout, all_inp, p.N(), p.adapter_dropout(l), acc_of_products(p));
    return all_dout;
}

inline void linear_backward_overlapped(const Pass& p, const Linear& l, floatX* dinp, const floatX* dout,
                                       const LinearInput& inp) {
    const int N = p.N();
    if (p.fp8(l.block)) {
        const uint8_t* all_dout = fp8_quantize_gradient(p, l, dout);
        return backward_during_transfers(
            p, l, dinp, (const uint8_t*)inp.fp8, [&](floatX* product) { fp8_backward_input(p, l, product, all_dout); },
            [&](const uint8_t* all_inp) { fp8_backward_weight(p, l, all_dout, all_inp, inp); });
    }
    measure(p, l, l.fp8_dout, dout, (size_t)N * l.out);
    backward_during_transfers(
        p, l, dinp, (const floatX*)inp.bf16,
        [&](floatX* product) { be::linear_backward_input(p.ctx, product, dout, weights_of(p, l), N, l.in, l.out); },
        [&](const floatX* all_inp) { add_gradients(p, l, l.db, dout, all_inp); });
}

inline void fp8_backward(const Pass& p, const Linear& l, floatX* dinp, const floatX* dout, const LinearInput& inp) {
    const uint8_t* all_dout = fp8_quantize_gradient(p, l, dout);
    if (l.dw) {
        const uint8_t* all_inp = gather_fp8(p, (uint8_t*)p.m.a.all_rows, inp.fp8, p.input_rows(l), l.in);
        fp8_backward_weight(p, l, all_dout, all_inp, inp);
    }
    fp8_backward_input(p, l, dinp, all_dout);
}

// dinp = dout w, and the gradients of w and b.
inline void linear_backward(const Pass& p, const Linear& l, floatX* dinp, const floatX* dout, const LinearInput& inp) {
    if (overlaps(p, l)) return linear_backward_overlapped(p, l, dinp, dout, inp);
    floatX* product = l.row_parallel() ? dinp : partial_sum(p, dinp);
    if (p.fp8(l.block)) {
        if (l.lora) linear_backward_weight(p, l, dout, inp);  // the adapters' gradients; the weight is frozen
        fp8_backward(p, l, product, dout, inp);
    } else {
        const floatX* all_dout = linear_backward_weight(p, l, dout, inp);
        be::linear_backward_input(p.ctx, product, all_dout, weights_of(p, l), p.N(), l.in, l.out);
    }
    if (l.lora) p.m.lora.backward_input(p.ctx, *l.lora, product, p.N(), p.adapter_dropout(l));
    if (!l.row_parallel()) reduce_from_tensor_parallel(p, dinp);
}

// True if a layer's product can be fused with another op: it is in bf16, and nothing else adds to it.
inline bool fuses(const Pass& p, const Linear& l) { return !p.fp8(l.block) && !l.lora && !decodes_rows(p, l); }
