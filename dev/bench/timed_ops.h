// Ops with a stopwatch, for bench --profile: namespace timed has the backend's ops; the ops of a training step record their
// time and their minimal work: FLOPs, and bytes to and from memory, every tensor once. On a GPU a stopwatch is two CUDA events
// from a pool, read after the last step: the host never waits between ops. The two cost the stream a few microseconds per op.
#pragma once
#include <chrono>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "../../llmc/ops.h"
#if defined(BACKEND_CUDA) || defined(BACKEND_EMU)
#include "../../llmc/gpu/ops.cuh"
#else
#include "../../llmc/cpu/attention.h"
#include "../../llmc/cpu/embed.h"
#include "../../llmc/cpu/experts.h"
#include "../../llmc/cpu/fp8.h"
#include "../../llmc/cpu/fp8_linear.h"
#include "../../llmc/cpu/loss.h"
#include "../../llmc/cpu/matmul.h"
#include "../../llmc/cpu/memory.h"
#include "../../llmc/cpu/mlp.h"
#include "../../llmc/cpu/norm.h"
#include "../../llmc/cpu/optimizer.h"
#include "../../llmc/cpu/reduce.h"
#include "../../llmc/cpu/rope.h"
#endif

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
inline bool recording = false;

#if defined(BACKEND_CUDA) || defined(BACKEND_EMU)
struct Span {
    Record* record;
    cudaEvent_t begin = nullptr, end = nullptr;
};
// Spans are reused by later profiles.
inline std::vector<Span> spans;
inline size_t spans_used = 0;

class Stopwatch {
public:
    Stopwatch(gpu::Ctx& ctx, Record& record) : stream_(ctx.stream), index_(spans_used++) {
        if (index_ == spans.size()) {
            spans.emplace_back();
            CUDA(cudaEventCreate(&spans[index_].begin));
            CUDA(cudaEventCreate(&spans[index_].end));
        }
        spans[index_].record = &record;
        CUDA(cudaEventRecord(spans[index_].begin, stream_));
    }
    ~Stopwatch() { (void)cudaEventRecord(spans[index_].end, stream_); }  // CUDA reports a failed op to the next call

private:
    cudaStream_t stream_;
    size_t index_;
};
// Adds the time of every op since the last call to its record; waits for the last one.
inline void read_stopwatches(gpu::Ctx& ctx) {
    CUDA(cudaStreamSynchronize(ctx.stream));
    for (size_t i = 0; i < spans_used; i++) {
        float ms = 0;
        CUDA(cudaEventElapsedTime(&ms, spans[i].begin, spans[i].end));
        spans[i].record->seconds += ms / 1e3;
    }
    spans_used = 0;
}
#else
class Stopwatch {
public:
    Stopwatch(cpu::Ctx&, Record& record) : record_(record) {}
    ~Stopwatch() { record_.seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count(); }

private:
    Record& record_;
    std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};
inline void read_stopwatches(cpu::Ctx&) {}
#endif

using namespace be;

constexpr double X = sizeof(floatX), R = sizeof(real);

// The op with a stopwatch, with the op's own type; Op::work derives its work from its arguments.
template <class Op, auto op>
struct Timed;
template <class Op, class Result, class... A, Result (*op)(Ctx&, A...)>
struct Timed<Op, op> {
    static Result call(Ctx& ctx, A... arguments) {
        if (!recording) return op(ctx, arguments...);
        const Work work = Op::work(std::tuple<std::decay_t<A>...>(arguments...));
        Record& record = records[Op::name];
        record.calls++;
        record.work.flops += work.flops;
        record.work.bytes += work.bytes;
        const Stopwatch stopwatch(ctx, record);
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
// `products` products of half of T^2 scores, and `tensors` tensors of both kinds of heads.
inline Work attention(const AttentionShape& a, int products, int tensors) {
    return {(double)products * a.B * a.T * a.T * a.NH * a.HS, X * a.B * a.T * a.HS * tensors * (a.NH + a.NKV)};
}
inline Work rotation(const AttentionShape& a) { return {0, (double)a.N() * (a.NH + a.NKV) * a.HS * 2 * X}; }

// The products of all experts' rows with their own matrices.
inline Work experts_product(const ExpertGroups& g, double IC, double OC, double bytes_of_weight = X) {
    return {2.0 * g.slots * IC * OC, X * g.slots * (IC + OC) + bytes_of_weight * g.E * IC * OC};
}

#define TIMED(op, work_of)                             \
    struct op##_work {                                 \
        static constexpr const char* name = #op;       \
        template <class Arguments>                     \
        static Work work(const Arguments& arguments) { \
            return work_of;                            \
        }                                              \
    };                                                 \
    inline constexpr auto op = &Timed<op##_work, &be::op>::call;
#define NUMBER(count, i) from_last<count, i>(arguments)
#define THE(type) std::get<type>(arguments)
#define ROWS(count, i, bytes_each) \
    Work { 0, NUMBER(count, i) * NUMBER(count, i + 1) * (bytes_each) }
#define NORMALIZED \
    Work { 0, (double)THE(int) * THE(NormParams).C * 4 * X }

TIMED(linear_forward, product(NUMBER(3, 0), NUMBER(3, 1), NUMBER(3, 2)))
TIMED(linear_backward_input, product(NUMBER(3, 0), NUMBER(3, 1), NUMBER(3, 2)))
TIMED(linear_gelu_forward, product(NUMBER(3, 0), NUMBER(3, 1), NUMBER(3, 2), 2))
TIMED(linear_gelu_backward_input, product(NUMBER(3, 0), NUMBER(3, 1), NUMBER(3, 2)))
TIMED(linear_residual_forward, product(NUMBER(3, 0), NUMBER(3, 1), NUMBER(3, 2), 2))
// N, IC, F: gate, up and their product
TIMED(linear_swiglu_forward,
      Work({2 * NUMBER(3, 0) * NUMBER(3, 1) * 2 * NUMBER(3, 2),
            X*(NUMBER(3, 0) * NUMBER(3, 1) + 2 * NUMBER(3, 1) * NUMBER(3, 2) + 3 * NUMBER(3, 0) * NUMBER(3, 2))}))
// N, F, OC: gate, up and their gradients
TIMED(linear_swiglu_backward_input,
      Work({2 * NUMBER(3, 0) * NUMBER(3, 1) * NUMBER(3, 2),
            X*(NUMBER(3, 0) * NUMBER(3, 2) + NUMBER(3, 1) * NUMBER(3, 2) + 4 * NUMBER(3, 0) * NUMBER(3, 1))}))
TIMED(linear_rope_forward, product(THE(AttentionShape).N(), THE(int), (double)THE(AttentionShape).row()))
// N, IC, OC, acc: accumulated gradients are also read
TIMED(linear_backward_weight, Work({2 * NUMBER(4, 0) * NUMBER(4, 1) * NUMBER(4, 2),
                                    X* NUMBER(4, 0) * (NUMBER(4, 1) + NUMBER(4, 2)) +
                                        R* NUMBER(4, 1) * NUMBER(4, 2) * (1 + (NUMBER(4, 3) == (double)Acc::Add))}))
TIMED(linear_backward_weight_rows, Work({2 * NUMBER(4, 0) * NUMBER(4, 1) * NUMBER(4, 2),
                                         X* NUMBER(4, 0) * (NUMBER(4, 1) + NUMBER(4, 2)) +
                                             R* NUMBER(4, 1) * NUMBER(4, 2) * (1 + (NUMBER(4, 3) == (double)Acc::Add))}))
TIMED(accumulate, Work({0, NUMBER(3, 0) * (R + 2 * (1 + (NUMBER(3, 1) == (double)Acc::Add)))}))
TIMED(accumulate_real, Work({0, NUMBER(2, 0) * R*(2 + (NUMBER(2, 1) == (double)Acc::Add))}))
TIMED(layernorm_forward, NORMALIZED)
TIMED(layernorm_backward, NORMALIZED)
TIMED(rmsnorm_forward, NORMALIZED)
TIMED(rmsnorm_backward, NORMALIZED)
TIMED(activation_forward, ROWS(3, 0, (gated(THE(Activation)) ? 3 : 2) * X))
TIMED(activation_backward, ROWS(3, 0, (gated(THE(Activation)) ? 5 : 3) * X))
TIMED(scale_elements, Work({0, NUMBER(1, 0) * 2 * X}))
TIMED(residual_forward, Work({0, NUMBER(1, 0) * 3 * X}))
TIMED(rope_forward, rotation(THE(AttentionShape)))
TIMED(rope_backward, rotation(THE(AttentionShape)))
TIMED(expert_linear_forward, experts_product(THE(ExpertGroups), NUMBER(3, 0), NUMBER(3, 1)))
TIMED(expert_linear_backward_input, experts_product(THE(ExpertGroups), NUMBER(3, 0), NUMBER(3, 1)))
TIMED(expert_linear_backward_weight,
      experts_product(THE(ExpertGroups), NUMBER(3, 0), NUMBER(3, 1), R*(1 + (NUMBER(3, 2) == (double)Acc::Add))))
TIMED(fp8_expert_linear_forward, experts_product(THE(ExpertGroups), NUMBER(2, 0), NUMBER(2, 1)))
TIMED(fp8_expert_linear_backward_input, experts_product(THE(ExpertGroups), NUMBER(2, 0), NUMBER(2, 1)))
TIMED(fp8_expert_linear_backward_weight,
      experts_product(THE(ExpertGroups), NUMBER(3, 0), NUMBER(3, 1), R*(1 + (NUMBER(3, 2) == (double)Acc::Add))))
TIMED(expert_activation_forward, Work({0, THE(MixtureShape).slots() * NUMBER(2, 0) * (gated(THE(Activation)) ? 3 : 2) * X}))
TIMED(expert_activation_backward, Work({0, THE(MixtureShape).slots() * NUMBER(2, 0) * (gated(THE(Activation)) ? 5 : 3) * X}))
TIMED(expert_combine, Work({0, (double)THE(MixtureShape).N() * (THE(MixtureShape).K + 1) * THE(int) * X}))
TIMED(router_logits, product(THE(MixtureShape).N(), THE(int), THE(MixtureShape).E))
TIMED(router_backward_input,
      Work({2.0 * THE(MixtureShape).N() * THE(int) * THE(MixtureShape).E, 2.0 * THE(MixtureShape).N() * THE(int) * X}))
TIMED(router_backward_weight, product(THE(MixtureShape).N(), NUMBER(2, 0), THE(MixtureShape).E))
TIMED(route, Work({0, (double)THE(MixtureShape).N() * THE(MixtureShape).E* R}))
TIMED(router_backward, Work({0, 2.0 * THE(MixtureShape).N() * THE(MixtureShape).E* R}))
TIMED(embedding_forward, ROWS(3, 0, 2 * X))
TIMED(embedding_backward, ROWS(3, 0, X + 2 * R))
TIMED(embedding_backward_rounded, ROWS(5, 0, X + 4))
TIMED(attention_forward, attention(THE(AttentionShape), 2, 2))
TIMED(attention_backward, attention(THE(AttentionShape), 5, 4))
TIMED(attention_rope_backward, attention(THE(AttentionShape), 5, 4))
// FP8: the two operands of a product are codes of one byte.
#define FP8_PRODUCT(count, code_bytes, result_bytes) \
    Work({2 * NUMBER(count, 0) * NUMBER(count, 1) * NUMBER(count, 2), (code_bytes) + (result_bytes)})
TIMED(fp8_linear_forward, FP8_PRODUCT(4, NUMBER(4, 1) * (NUMBER(4, 0) + NUMBER(4, 2)), NUMBER(4, 0) * NUMBER(4, 2) * X))
TIMED(fp8_linear_residual_forward,
      FP8_PRODUCT(4, NUMBER(4, 1) * (NUMBER(4, 0) + NUMBER(4, 2)), NUMBER(4, 0) * NUMBER(4, 2) * 2 * X))
TIMED(fp8_linear_backward_input, FP8_PRODUCT(4, NUMBER(4, 2) * (NUMBER(4, 0) + NUMBER(4, 1)), NUMBER(4, 0) * NUMBER(4, 1) * X))
TIMED(fp8_linear_backward_weight, FP8_PRODUCT(5, NUMBER(5, 0) * (NUMBER(5, 1) + NUMBER(5, 2)),
                                              NUMBER(5, 1) * NUMBER(5, 2) * (1 + (NUMBER(5, 3) == (double)Acc::Add)) * R))
TIMED(quantize, ROWS(2, 0, X + 1 + (THE(Codes).transposed != nullptr)))
TIMED(transpose_codes, ROWS(2, 0, 2))
TIMED(absolute_max, Work({0, NUMBER(1, 0) * X}))
TIMED(absolute_max_of_rows, Work({0, (double)THE(FilledRows).rows* THE(FilledRows).columns* X}))
TIMED(fp8_numbers, Work({0, (double)THE(FilledRows).rows* THE(FilledRows).columns * 2 * X}))
TIMED(bias_backward, ROWS(2, 0, X))
// Logits are read and written once.
TIMED(classifier, Work({0, (double)THE(int) * THE(VocabularyShard).Vp * 2 * X}))
TIMED(adamw, Work({0, (double)THE(size_t) * (7 * R + X)}))
TIMED(average_weights, Work({0, (double)THE(size_t) * 3 * R}))
TIMED(sum_of_squares, Work({0, NUMBER(1, 0) * R}))
TIMED(clear, Work({0, NUMBER(1, 0)}))

#undef TIMED
#undef FP8_PRODUCT
#undef NUMBER
#undef ROWS
#undef THE
#undef NORMALIZED

}  // namespace timed
