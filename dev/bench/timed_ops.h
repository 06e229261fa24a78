// The CPU's ops with a stopwatch, for bench --profile: namespace timed has cpu's, of which those of a training step note how
// long they took and what they had to do at least: FLOPs, and bytes to and from memory, every tensor once. (On a GPU: nsys.)
#pragma once
#include <chrono>
#include <map>
#include <string>
#include <tuple>

#include "../../llmc/cpu/attention.h"
#include "../../llmc/cpu/embed.h"
#include "../../llmc/cpu/loss.h"
#include "../../llmc/cpu/matmul.h"
#include "../../llmc/cpu/memory.h"
#include "../../llmc/cpu/mlp.h"
#include "../../llmc/cpu/norm.h"
#include "../../llmc/cpu/optimizer.h"
#include "../../llmc/cpu/reduce.h"
#include "../../llmc/cpu/rope.h"

namespace timed {

struct Work {
    double flops = 0, bytes = 0;
};
struct Record {
    int calls = 0;
    double seconds = 0;
    Work work;
};
inline std::map<std::string, Record> records;

using namespace cpu;

constexpr double X = sizeof(floatX), R = sizeof(real);

// What the last `count` arguments of an op are; called with At<0>() it gives the first of these.
template <int count, class Arguments>
auto from_last(const Arguments& arguments) {
    return
        [&arguments](auto i) { return (double)std::get<std::tuple_size_v<Arguments> - count + decltype(i)::value>(arguments); };
}
template <int i>
using At = std::integral_constant<int, i>;

template <class Arguments>
Work matrices(const Arguments& a, int outputs = 1) {  // .., N, IC, OC
    const auto last = from_last<3>(a);
    const double N = last(At<0>()), IC = last(At<1>()), OC = last(At<2>());
    return {2 * N * IC * OC, X * (N * IC + IC * OC + outputs * N * OC)};
}
// .., B, T, NH, NKV, HS, scale, and so many more: so many products of half of T^2 scores, and tensors of both kinds of heads.
template <int more = 0, class Arguments>
Work attention(const Arguments& a, int products, int tensors) {
    const auto last = from_last<6 + more>(a);
    const double B = last(At<0>()), T = last(At<1>()), NH = last(At<2>()), NKV = last(At<3>()), HS = last(At<4>());
    return {products * B * T * T * NH * HS, X * B * T * HS * tensors * (NH + NKV)};
}

#define TIMED(op, work_of)                                                                                         \
    template <class... A>                                                                                          \
    auto op(cpu::Ctx& ctx, A... a) {                                                                               \
        const Work work = [](const auto& arguments) -> Work { return work_of; }(std::make_tuple(a...));            \
        struct Stopwatch {                                                                                         \
            Record& record;                                                                                        \
            std::chrono::steady_clock::time_point start = std::chrono::steady_clock::now();                        \
            ~Stopwatch() {                                                                                         \
                record.seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(); \
            }                                                                                                      \
        };                                                                                                         \
        Record& record = records[#op];                                                                             \
        record.calls++, record.work.flops += work.flops, record.work.bytes += work.bytes;                          \
        const Stopwatch stopwatch{record};                                                                         \
        return cpu::op(ctx, a...);                                                                                 \
    }
#define NUMBER(count, i) from_last<count>(arguments)(At<i>())
#define ROWS(count, i, bytes_each) \
    Work { 0, NUMBER(count, i) * NUMBER(count, i + 1) * (bytes_each) }

TIMED(linear_forward, matrices(arguments))
TIMED(linear_backward_input, matrices(arguments))
TIMED(linear_gelu_forward, matrices(arguments, 2))
TIMED(linear_gelu_backward_input, matrices(arguments))
TIMED(linear_residual_forward, matrices(arguments, 2))
// N, IC, F: gate, up and what becomes of them
TIMED(linear_swiglu_forward,
      Work({2 * NUMBER(3, 0) * NUMBER(3, 1) * 2 * NUMBER(3, 2),
            X*(NUMBER(3, 0) * NUMBER(3, 1) + 2 * NUMBER(3, 1) * NUMBER(3, 2) + 3 * NUMBER(3, 0) * NUMBER(3, 2))}))
// N, F, OC: gate, up and their gradients
TIMED(linear_swiglu_backward_input,
      Work({2 * NUMBER(3, 0) * NUMBER(3, 1) * NUMBER(3, 2),
            X*(NUMBER(3, 0) * NUMBER(3, 2) + NUMBER(3, 1) * NUMBER(3, 2) + 4 * NUMBER(3, 0) * NUMBER(3, 1))}))
// N, IC, NH, NKV, HS
TIMED(linear_rope_forward,
      matrices(std::make_tuple(NUMBER(5, 0), NUMBER(5, 1), (NUMBER(5, 2) + 2 * NUMBER(5, 3)) * NUMBER(5, 4))))
// N, IC, OC, acc: gradients that are added to are read, too
TIMED(linear_backward_weight, Work({2 * NUMBER(4, 0) * NUMBER(4, 1) * NUMBER(4, 2),
                                    X* NUMBER(4, 0) * (NUMBER(4, 1) + NUMBER(4, 2)) +
                                        R* NUMBER(4, 1) * NUMBER(4, 2) * (1 + (NUMBER(4, 3) == (double)Acc::Add))}))
TIMED(layernorm_forward, ROWS(3, 0, 4 * X))
TIMED(layernorm_backward, ROWS(3, 0, 4 * X))
TIMED(rmsnorm_forward, ROWS(3, 0, 4 * X))
TIMED(rmsnorm_backward, ROWS(3, 0, 4 * X))
TIMED(gelu_forward, ROWS(2, 0, 2 * X))
TIMED(gelu_backward, ROWS(2, 0, 3 * X))
TIMED(swiglu_forward, ROWS(2, 0, 3 * X))
TIMED(swiglu_backward, ROWS(2, 0, 5 * X))
TIMED(residual_forward, Work({0, NUMBER(1, 0) * 3 * X}))
TIMED(rope_forward, Work({0, NUMBER(4, 0) * (NUMBER(4, 1) + NUMBER(4, 2)) * NUMBER(4, 3) * 2 * X}))
TIMED(rope_backward, Work({0, NUMBER(4, 0) * (NUMBER(4, 1) + NUMBER(4, 2)) * NUMBER(4, 3) * 2 * X}))
TIMED(embedding_forward, ROWS(4, 0, 2 * X))
TIMED(embedding_backward, ROWS(4, 0, X + 2 * R))
TIMED(attention_forward, attention(arguments, 2, 2))
TIMED(attention_backward, attention<1>(arguments, 5, 4))
TIMED(attention_rope_backward, attention<1>(arguments, 5, 4))
// N, V, Vp, loss_scale, z_coef, write_gradient: read and written once
TIMED(classifier, Work({0, NUMBER(6, 0) * NUMBER(6, 2) * 2 * X}))
// n, seven scalars, and how to round
TIMED(adamw, Work({0, NUMBER(9, 0) * (7 * R + X)}))
TIMED(sum_of_squares, Work({0, NUMBER(1, 0) * R}))
TIMED(clear, Work({0, NUMBER(1, 0)}))

#undef TIMED
#undef NUMBER
#undef ROWS

}  // namespace timed
