// The GPT of train_gpt.cu, for the headers that train, time, evaluate or generate with it: its memory, and its passes.
#pragma once
#include <functional>
#include <optional>
#include <vector>

#include "../data/dataloader.h"
#include "../model/preference.h"
#include "../model/recompute.h"
#include "../ops.h"
#include "../parallel/pipeline_links.h"
#include "model.h"
#include "model_memory.h"
#include "pass.h"

void initialize(be::Ctx& ctx, Model& m, uint64_t seed, bool only_routers = false);

// The input of the head, from rows of the residual stream, into a.final_norm.
void final_norm_forward(const Pass& p, const floatX* inp);
void block_forward(const Pass& p, int i);
void embed_forward(const Pass& p);
void head(const Pass& p, real loss_scale, real z_coef, bool training);
void model_forward(const Pass& p);
void model_backward(const Pass& p);
void begin_gradients(be::Ctx& ctx, Model& m);

// Losses over samples [first, first + n), one per dataset, forward only; data-parallel ranks process micro-batches in turn.
// stop() is called before each, and must return the same on every rank: if it is true, nothing is returned. compared(pairs)
// receives the pairs of each micro-batch on the ranks that have the head.
std::optional<std::vector<LossSums>> evaluate(be::Ctx& ctx, Model& m, const DataLoader& data, int64_t first, int64_t n,
                                              const std::function<bool()>& stop,
                                              const std::function<void(const std::vector<AnswerPair>&)>& compared = {});

inline PipelineLinks pipeline_links(be::Ctx& ctx, Model& m) {
    std::vector<size_t> in_flight;  // micro-batches, by chunk
    for (const auto& chunk : m.a.micro_batches) in_flight.push_back(chunk.size());
    return PipelineLinks(ctx, *m.ranks, (int)m.stages.size(), in_flight);
}

// For a rank without a micro-batch while others have one: with ZeRO-3 it takes part in gathering the parameters.
inline void gather_only(be::Ctx& ctx, Model& m, int i) {
    for (int chunk = 0; chunk < m.ranks->mesh.vpp; chunk++) {
        const Pass pass = {ctx, m, m.a.micro_batch(chunk, i)};
        if (pass.in.first) pass.need_embedding();
        for (int k = 0; k < (int)pass.in.blocks.size(); k++) pass.need_block_forward(k);
        if (pass.in.last) pass.need_head();
    }
}

// The forward pass of micro-batch i through this rank's chunks; then last(pass) on the ranks that have the model's last chunk.
// own_rows: expert-parallel ranks have different ones.
template <class Last>
void forward_only(be::Ctx& ctx, Model& m, PipelineLinks& links, const Batch& batch, bool own_rows, int i, Last last) {
    for (int chunk = 0; chunk < m.ranks->mesh.vpp; chunk++) {
        const Pass pass = upload(ctx, m, batch, m.a.micro_batch(chunk, i));
        pass.in.own_rows = own_rows;
        links.receive_input(pass.in.x[0], pass.stream_size(), chunk, i);
        model_forward(pass);
        links.send_output(pass.in.out(), pass.stream_size(), chunk, i);
        if (pass.in.last) last(pass);
    }
}
