// Messages between neighboring pipeline stages: activations forward and their gradients backward, for this rank's rows. A send
// never waits: forward, the data is unchanged until backward, or until a later micro-batch reuses the memory; backward, the
// gradient replaces the stage's input, which is no longer needed. Receiving the input of that later micro-batch first completes
// both sends: so a micro-batch's number here is the one that determines its memory (Activations::micro_batch).
#pragma once
#include <exception>
#include <vector>

#include "pipeline_schedule.h"
#include "ranks.h"

class PipelineLinks {
public:
    // stages: in the whole pipeline. in_flight: per chunk of this rank, the number of micro-batches in flight.
    PipelineLinks(be::Ctx& ctx, Ranks& ranks, int stages, const std::vector<size_t>& in_flight)
        : ctx_(ctx), ranks_(ranks), pp_(ranks.mesh.pp), stages_(stages) {
        for (const size_t n : in_flight) sent_.emplace_back(n);
    }
    ~PipelineLinks() {
        if (std::uncaught_exceptions() == 0) finish();  // after an error, do not wait
    }
    PipelineLinks(const PipelineLinks&) = delete;
    PipelineLinks& operator=(const PipelineLinks&) = delete;

    // x: n elements, the input or output of a chunk. At the ends of the pipeline these do nothing.
    void receive_input(floatX* x, size_t n, int chunk, int micro_batch) {
        finish(sent(chunk, micro_batch));
        if (!first(chunk)) be::recv(ctx_, ranks_.forward, x, n, previous(), tag(stage(chunk) - 1, micro_batch));
    }
    void send_output(const floatX* x, size_t n, int chunk, int micro_batch) {
        if (last(chunk)) return;
        sent(chunk, micro_batch).output = be::start_send(ctx_, ranks_.forward, x, n, next(), tag(stage(chunk), micro_batch));
    }
    void receive_gradient(floatX* dx, size_t n, int chunk, int micro_batch) {
        if (!last(chunk)) be::recv(ctx_, ranks_.backward, dx, n, next(), tag(stage(chunk) + 1, micro_batch));
    }
    // dx replaces the chunk's input x, which must not change until the send is complete.
    void send_gradient(floatX* x, const floatX* dx, size_t n, int chunk, int micro_batch) {
        if (first(chunk)) return;
        const size_t bytes = n * sizeof(floatX);
        be::copy_rows(ctx_, x, bytes, dx, bytes, bytes, 1);
        sent(chunk, micro_batch).gradient =
            be::start_send(ctx_, ranks_.backward, x, n, previous(), tag(stage(chunk), micro_batch));
    }
    // Called between two blocks, so that pending sends progress.
    void progress() { be::progress(ctx_, ranks_.forward); }
    void finish() {
        for (auto& chunk : sent_)
            for (Sent& s : chunk) finish(s);
    }

private:
    struct Sent {
        be::Pending output, gradient;
    };
    void finish(Sent& s) {
        be::finish(ctx_, s.output);
        be::finish(ctx_, s.gradient);
    }
    Sent& sent(int chunk, int micro_batch) {
        auto& of_chunk = sent_[chunk];
        return of_chunk[(size_t)micro_batch % of_chunk.size()];
    }
    int stage(int chunk) const { return virtual_stage(pp_.size, pp_.rank, chunk); }
    bool first(int chunk) const { return stage(chunk) == 0; }
    bool last(int chunk) const { return stage(chunk) == stages_ - 1; }
    int next() const { return (pp_.rank + 1) % pp_.size; }
    int previous() const { return (pp_.rank + pp_.size - 1) % pp_.size; }
    int tag(int from_stage, int micro_batch) const { return (micro_batch * stages_ + from_stage) % 32768; }

    be::Ctx& ctx_;
    Ranks& ranks_;
    Axis pp_;
    int stages_;
    std::vector<std::vector<Sent>> sent_;  // [chunk][micro-batch % number in flight]
};
