// Generation with a GPT: several sequences at a time, with a key/value cache.
#pragma once
#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "../base/check.h"
#include "../cpu/parallel.h"
#include "../data/dataloader.h"
#include "../model/arena.h"
#include "../model/decoder.h"
#include "../ops.h"
#include "../parallel/comm.h"
#include "../parallel/pipeline_links.h"
#include "gpt.h"
#include "linear.h"
#include "model.h"
#include "pass.h"

// Generates several sequences at a time, one token each per step, for a Decoder. The activations of `m` serve as scratch. All
// ranks that share a model take part and get the same logits.
class Generator {
public:
    Generator(be::Ctx& ctx, Model& m)
        : ctx_(ctx), m_(m), links_(pipeline_links(ctx, m)), cache_(m.cache), lengths_((size_t)cache_.shape.sequences) {
        CHECK(cache_.keys, "no key/value cache was planned");
        CHECK(sequences() == 1 || !m.ranks->sequence_parallel, "rows of several sequences are not cut");
    }

    int sequences() const { return cache_.shape.sequences; }
    int capacity() const { return cache_.shape.tokens; }
    int length(int sequence) const { return lengths_[(size_t)sequence]; }

    // Restarts a sequence with a prompt that fits the context (if it fills it, nothing can be appended): one pass over the
    // virtual tokens and as many prompt tokens as the activations hold, then the others one by one.
    void prompt(int sequence, const std::vector<int>& tokens) {
        const int n = (int)tokens.size(), before = m_.c.virtual_tokens.count;
        int at_once = std::min(before + n, m_.a.B * m_.a.T);
        if (m_.ranks->sequence_parallel) at_once = std::max(1, at_once - at_once % m_.local.tp_size);  // rows that can be split
        CHECK(n >= 1 && before + n <= capacity() && at_once >= before, "a prompt of %d tokens", n);
        batch_.begins = true;
        batch_.B = 1;
        batch_.T = at_once - before;
        batch_.tokens.assign(tokens.begin(), tokens.begin() + batch_.T);
        batch_.positions.resize((size_t)batch_.T);
        std::iota(batch_.positions.begin(), batch_.positions.end(), 0);
        pass(nullptr, sequence);
        lengths_[(size_t)sequence] = at_once;
        for (int i = batch_.T; i < n; i++) append({{sequence, tokens[(size_t)i]}});
    }

    // Appends one token to each of some sequences, in one pass.
    void append(const std::vector<NextToken>& next) {
        batch_.begins = false;
        batch_.B = (int)next.size();
        batch_.T = 1;
        batch_.tokens.clear();
        batch_.positions.clear();
        std::vector<int> sequences;
        for (const auto& [sequence, token] : next) {
            CHECK(length(sequence) < capacity(), "the context is full");
            sequences.push_back(sequence);
            batch_.tokens.push_back(token);
            batch_.positions.push_back(lengths_[(size_t)sequence]++);
        }
        be::upload(ctx_, cache_.sequences, sequences.data(), sequences.size() * sizeof(int));
        pass(&cache_, 0);
    }

    // Makes a sequence a copy of another one.
    void copy(int from, int to) {
        const size_t bytes = cache_.row * sizeof(floatX), tokens = (size_t)length(from);
        for (int layer = 0; layer < (int)m_.blocks.size(); layer++) {
            const AttentionCache source = cache_.of(layer, from), copy = cache_.of(layer, to);
            be::copy_rows(ctx_, copy.keys, bytes, source.keys, bytes, bytes, tokens);
            be::copy_rows(ctx_, copy.values, bytes, source.values, bytes, bytes, tokens);
        }
        lengths_[(size_t)to] = lengths_[(size_t)from];
    }

    // (rows, V) logits of the next token after each row of the last append(), or after the last prompt.
    const std::vector<float>& logits() {
        const ModelConfig& c = m_.c;
        Activations& a = m_.a;
        const int Vpl = m_.local.Vpl;
        const size_t rows = (size_t)rows_, all = rows * (size_t)c.Vp;
        const SteadyRows steady(ctx_, sequences());
        if (m_.table.part.last) {
            MicroBatch in;
            in.B = rows_;
            in.T = 1;
            floatX* mine = a.next_logits + (size_t)m_.ranks->mesh.tp.rank * rows * Vpl;
            const Pass pass = {ctx_, m_, in};
            final_norm_forward(pass, a.branch_out);
            pass.need_head();
            be::linear_forward(ctx_, mine, a.final_norm, m_.p.head, m_.p.head_b, rows_, c.C, Vpl);
            be::all_gather(ctx_, m_.ranks->tp, a.next_logits, mine, rows * Vpl);
        } else be::clear(ctx_, a.next_logits, all * sizeof(floatX));
        be::all_reduce(ctx_, m_.ranks->pp, a.next_logits, all);  // the other stages add zero
        if (m_.sharded_params.used()) {  // ranks that gather parameters together must choose the same tokens
            be::Pending sent = be::start_broadcast(ctx_, m_.ranks->dp, a.next_logits, all, 0);
            be::finish(ctx_, sent);
        }
        HostSide<floatX> host(ctx_, a.next_logits, all);
        host.download();
        logits_.resize(rows * c.V);
        const float cap = (float)c.logit_softcap;
        cpu::parallel_tasks(rows, [&](size_t row) {
            float* out = &logits_[row * c.V];
            for (int first = 0; first < c.V; first += Vpl)
                std::copy_n(host.data() + first / Vpl * rows * Vpl + row * Vpl, std::min(Vpl, c.V - first), out + first);
            for (int i = 0; cap > 0 && i < c.V; i++) out[i] = cap * std::tanh(out[i] / cap);
        });
        return logits_;
    }

private:
    // While this exists, a row of several sequences has the same bits regardless of the other rows; and products of new shapes,
    // which few prompts share, are not timed.
    struct SteadyRows {
        SteadyRows(be::Ctx& c, int sequences) : ctx(c) {
            ctx.steady_rows = sequences > 1 ? sequences : 0;
            ctx.autotune = false;
        }
        ~SteadyRows() {
            ctx.steady_rows = 0;
            ctx.autotune = true;
        }
        be::Ctx& ctx;
    };

    // Runs the batch through all layers; leaves the last row of a prompt, or every row, of the residual stream in
    // branch_out, on the last stage. cache: null for a prompt of `sequence`.
    void pass(KeyValueCache* cache, int sequence) {
        rows_ = cache ? batch_.B : 1;
        const SteadyRows steady(ctx_, sequences());
        for (int chunk = 0; chunk < (int)m_.a.micro_batches.size(); chunk++) {
            const Pass pass = upload(ctx_, m_, batch_, m_.a.micro_batch(chunk, passes_));
            MicroBatch& in = pass.in;
            in.cache = cache;
            links_.receive_input(in.x[0], pass.stream_size(), chunk, passes_);
            if (in.first) embed_forward(pass);
            for (int i = 0; i < (int)in.blocks.size(); i++) {
                pass.need_block_forward(i);
                block_forward(pass, i);
                if (!cache) keep_keys_and_values(in, i, sequence);
            }
            links_.send_output(in.out(), pass.stream_size(), chunk, passes_);
            if (in.last) keep_last_rows(pass);
        }
        passes_ = (passes_ + 1) % 1000;
    }

    void keep_keys_and_values(const MicroBatch& in, int i, int sequence) {
        const size_t bytes = cache_.row * sizeof(floatX), stride = m_.local.QKVl * sizeof(floatX);
        const floatX* keys = in.blocks[i].qkv + (size_t)m_.local.NHl * m_.c.HS();
        const AttentionCache to = cache_.of(in.first_block + i, sequence);
        be::copy_rows(ctx_, to.keys, bytes, keys, stride, bytes, in.N());
        be::copy_rows(ctx_, to.values, bytes, keys + cache_.row, stride, bytes, in.N());
    }

    void keep_last_rows(const Pass& p) {
        const size_t C = (size_t)m_.c.C, bytes = C * sizeof(floatX);
        const floatX* last = gather_from_sequence_parallel(p, p.in.out(), p.local_rows(), m_.c.C) + (size_t)(p.N() - rows_) * C;
        be::copy_rows(ctx_, m_.a.branch_out, bytes, last, bytes, bytes, (size_t)rows_);
    }

    be::Ctx& ctx_;
    Model& m_;
    PipelineLinks links_;
    KeyValueCache& cache_;
    std::vector<int> lengths_;  // tokens in each sequence
    int rows_ = 0;              // rows whose logits logits() returns
    int passes_ = 0;
    Batch batch_;
    std::vector<float> logits_;
};
