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

// The op with a stopwatch, of the op's own type; Op::work says from its arguments what it had to do.
template <class Op, auto op>
struct Timed;
template <class Op, class Result, class... A, Result (*op)(Ctx&, A...)>
struct Timed<Op, op> {
    struct Stopwatch {
        Record& record;
        std::chrono::steady_clock::time_point start = std::chrono::steady_clock::now();
        ~Stopwatch() { record.seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(); }
    };
    static Result call(Ctx& ctx, A... arguments) {
        const Work work = Op::work(std::tuple<std::decay_t<A>...>(arguments...));
        Record& record = records[Op::name];
        record.calls++;
        record.work.flops += work.flops;
        record.work.bytes += work.bytes;
        const Stopwatch stopwatch{record};
        return op(ctx, arguments...);
    }
};

// Argument number i of the last `count`.
template <int count, int i, class Arguments>
double from_last(const Arguments& arguments) {
    return (double)std::get<std::tuple_size_v<Arguments> - count + i>(arguments);
}

inline Work product(double N, double IC, double OC, int outputs = 1) {
    return {2 * N * IC * OC, X * (N * IC + IC * OC + outputs * N * OC)};
}
// So many products of half of T^2 scores, and tensors of both kinds of heads.
inline Work attention(const AttentionShape& a, int products, int tensors) {
    return {(double)products * a.B * a.T * a.T * a.NH * a.HS, X * a.B * a.T * a.HS * tensors * (a.NH + a.NKV)};
}
inline Work rotation(const AttentionShape& a) { return {0, (double)a.N() * (a.NH + a.NKV) * a.HS * 2 * X}; }

#define TIMED(op, work_of)                             \
    struct op##_work {                                 \
        static constexpr const char* name = #op;       \
        template <class Arguments>                     \
        static Work work(const Arguments& arguments) { \
            return work_of;                            \
        }                                              \
    };                                                 \
    inline constexpr auto op = &Timed<op##_work, &cpu::op>::call;
#define NUMBER(count, i) from_last<count, i>(arguments)
#define THE(type) std::get<type>(arguments)
#define ROWS(count, i, bytes_each) \
    Work { 0, NUMBER(count, i) * NUMBER(count, i + 1) * (bytes_each) }
#define NORMALISED \
    Work { 0, (double)THE(int) * THE(NormParams).C * 4 * X }

TIMED(linear_forward, product(NUMBER(3, 0), NUMBER(3, 1), NUMBER(3, 2)))
TIMED(linear_backward_input, product(NUMBER(3, 0), NUMBER(3, 1), NUMBER(3, 2)))
TIMED(linear_gelu_forward, product(NUMBER(3, 0), NUMBER(3, 1), NUMBER(3, 2), 2))
TIMED(linear_gelu_backward_input, product(NUMBER(3, 0), NUMBER(3, 1), NUMBER(3, 2)))
TIMED(linear_residual_forward, product(NUMBER(3, 0), NUMBER(3, 1), NUMBER(3, 2), 2))
// N, IC, F: gate, up and what becomes of them
TIMED(linear_swiglu_forward,
      Work({2 * NUMBER(3, 0) * NUMBER(3, 1) * 2 * NUMBER(3, 2),
            X*(NUMBER(3, 0) * NUMBER(3, 1) + 2 * NUMBER(3, 1) * NUMBER(3, 2) + 3 * NUMBER(3, 0) * NUMBER(3, 2))}))
// N, F, OC: gate, up and their gradients
TIMED(linear_swiglu_backward_input,
      Work({2 * NUMBER(3, 0) * NUMBER(3, 1) * NUMBER(3, 2),
            X*(NUMBER(3, 0) * NUMBER(3, 2) + NUMBER(3, 1) * NUMBER(3, 2) + 4 * NUMBER(3, 0) * NUMBER(3, 1))}))
TIMED(linear_rope_forward, product(THE(AttentionShape).N(), THE(int), (double)THE(AttentionShape).row()))
// N, IC, OC, acc: gradients that are added to are read, too
TIMED(linear_backward_weight, Work({2 * NUMBER(4, 0) * NUMBER(4, 1) * NUMBER(4, 2),
                                    X* NUMBER(4, 0) * (NUMBER(4, 1) + NUMBER(4, 2)) +
                                        R* NUMBER(4, 1) * NUMBER(4, 2) * (1 + (NUMBER(4, 3) == (double)Acc::Add))}))
TIMED(layernorm_forward, NORMALISED)
TIMED(layernorm_backward, NORMALISED)
TIMED(rmsnorm_forward, NORMALISED)
TIMED(rmsnorm_backward, NORMALISED)
TIMED(activation_forward, ROWS(3, 0, (gated(THE(Activation)) ? 3 : 2) * X))
TIMED(activation_backward, ROWS(3, 0, (gated(THE(Activation)) ? 5 : 3) * X))
TIMED(residual_forward, Work({0, NUMBER(1, 0) * 3 * X}))
TIMED(rope_forward, rotation(THE(AttentionShape)))
TIMED(rope_backward, rotation(THE(AttentionShape)))
TIMED(embedding_forward, ROWS(3, 0, 2 * X))
TIMED(embedding_backward, ROWS(3, 0, X + 2 * R))
TIMED(attention_forward, attention(THE(AttentionShape), 2, 2))
TIMED(attention_backward, attention(THE(AttentionShape), 5, 4))
TIMED(attention_rope_backward, attention(THE(AttentionShape), 5, 4))
// Logits are read and written once.
TIMED(classifier, Work({0, (double)THE(int) * THE(VocabularyShard).Vp * 2 * X}))
TIMED(adamw, Work({0, (double)THE(size_t) * (7 * R + X)}))
TIMED(average_weights, Work({0, (double)THE(size_t) * 3 * R}))
TIMED(sum_of_squares, Work({0, NUMBER(1, 0) * R}))
TIMED(clear, Work({0, NUMBER(1, 0)}))

#undef TIMED
#undef NUMBER
#undef ROWS
#undef THE
#undef NORMALISED

}  // namespace timed
