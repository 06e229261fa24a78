// The time of a training step on this machine, measured with random tokens.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "../base/clock.h"
#include "../data/dataloader.h"
#include "../gpt/gpt.h"
#include "../model/arena.h"
#include "../model/fp8_training.h"
#include "../ops.h"
#include "measured_step.h"

// A whole step on random tokens, for timing: forward, backward, norm, clipping, AdamW.
class RandomStep {
public:
    double forward = 0, backward = 0, update = 0;  // seconds of the last step

    // random: initializes the weights. Otherwise they are zero, which saves drawing them and does not change the time of a
    // step.
    // fp8: every step is in FP8 (hybrid), the first one with current scales, later ones with delayed scales, as in training.
    RandomStep(be::Ctx& ctx, const ModelConfig& c, int B, int T, Recompute recompute, bool random = true, bool fp8 = false)
        : ctx_(ctx), m_(c) {
        m_.fp8.recipe.on = fp8;
        if (fp8) m_.fp8.blocks.assign((size_t)c.L, true);
        if (fp8) scales_ = Fp8State(m_.fp8.recipe, c.L);
        plan_memory(m_, recompute, B, T, choose_head_rows(ctx, m_.local, (int64_t)B * T));
        allocate(ctx, m_);
        if (random) initialize(ctx, m_, 1);
        batch_.B = B;
        batch_.T = T;
        for (int i = 0; i < B * T; i++) {
            batch_.tokens.push_back((int)(i * 2654435761u % c.V));
            batch_.targets.push_back((int)((i + 1) * 2654435761u % c.V));
            batch_.positions.push_back(i % T);
        }
    }

    // One micro-batch; the first of a step sets the gradients, later ones add to them.
    void micro_batch(Acc gradients = Acc::Set) {
        double start = monotonic_seconds();
        const Pass pass = upload(ctx_, m_, batch_, m_.a.micro_batch());
        pass.in.gradients = gradients;
        pass.in.drops = true;
        if (gradients == Acc::Set) begin_gradients(ctx_, m_);
        clear_sums(ctx_, m_);
        model_forward(pass);
        lap(forward, start);
        head(pass, real(1.0 / (batch_.B * batch_.T)), 0, true);
        model_backward(pass);
        lap(backward, start);
    }
    void run() {
        const std::vector<int>& layers = m_.table.part.layers;
        begin_step_in_fp8(ctx_, m_.fp8, scales_, layers, steps_, 0, 0);
        micro_batch();
        double start = monotonic_seconds();
        const double norm = std::sqrt(be::sum_of_squares(ctx_, m_.grads, m_.table.size));
        be::adamw(ctx_, m_.params, m_.master_low_bits, m_.exp_avg, m_.exp_avg_sq, m_.grads, m_.table.size,
                  {1e-4f, 0.9f, 0.95f, 1e-8f, 0.1f, (real)std::min(1.0, 1 / norm), ++steps_}, Rounding());
        if (m_.fp8.recipe.on) scales_.update(measured_amax(ctx_, m_.fp8, layers, scales_.scales.size()));
        lap(update, start);
    }

    // The bytes that a RandomStep on micro-batches of this shape would allocate.
    static size_t planned_bytes(be::Ctx& ctx, const MicroBatchShape& shape, Recompute recompute) {
        Model m(shape.c);
        plan_memory(m, recompute, shape.B, shape.T, choose_head_rows(ctx, m.local, (int64_t)shape.B * shape.T));
        return m.arena.bytes();
    }
    size_t planned_bytes() const { return m_.arena.bytes(); }
    size_t parameters() const { return m_.table.size; }

private:
    void lap(double& part, double& start) {  // also waits, which costs a GPU some microseconds of a step
        wait_for_device(ctx_);
        part = monotonic_seconds() - start;
        start = monotonic_seconds();
    }

    be::Ctx& ctx_;
    Model m_;
    Fp8State scales_;
    Batch batch_;
    int64_t steps_ = 0;
};
