// cuDNN's fused attention, next to ours in the ladder and in bench --attention: causal, grouped queries, bf16, on the same
// arrays. Uses cudnn_frontend's graph API: header files (1.32 compiles; from its repository, or from the PyPI package
// nvidia-cudnn-frontend), which load the library, version 9, on first use: a program starts without it. A graph of one
// operation is built once per shape, then executed. Strides describe the position of heads in the fused projection, so nothing
// is copied. Its statistics are our lse: the natural logarithm of the sum of exponentials. Backward may sum dq in a different
// order each time, which is its default. HAVE_CUDNN is defined if the headers are available and nvcc compiles. Not yet run on a
// GPU.
#pragma once
#if defined(__CUDACC__) && __has_include(<cudnn_frontend.h>)
#define HAVE_CUDNN
#include <cstring>                    // cudnn_frontend.h uses it without asking for it
#define CUDNN_FRONTEND_SKIP_JSON_LIB  // no graphs as text, which halves the compile time
#define NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING
#include <cudnn_frontend.h>
#include <dlfcn.h>

#include <unordered_map>

#include "../../llmc/gpu/attention_simple.cuh"

namespace cudnn_frontend {
inline void* cudnn_dlhandle = nullptr;  // the frontend's functions look up the library's here
}

namespace cudnn_attention {

namespace fe = cudnn_frontend;

// Loads the library. Returns empty, or the reason why it cannot be used.
inline std::string lacks(const gpu::Ctx&) try {
    if (!fe::cudnn_dlhandle) fe::cudnn_dlhandle = dlopen("libcudnn.so.9", RTLD_NOW | RTLD_GLOBAL);
    if (!fe::cudnn_dlhandle) return std::string("cuDNN is not installed: ") + dlerror();
    cudnnHandle_t handle = nullptr;
    if (const cudnnStatus_t status = fe::detail::create_handle(&handle); status != CUDNN_STATUS_SUCCESS)
        return std::string("cuDNN cannot be started: ") + fe::detail::get_error_string(status);
    fe::detail::destroy_handle(handle);
    return "";
} catch (const std::exception& e) {
    return std::string("cuDNN cannot be used: ") + e.what();
}

class Plan {
public:
    Plan(gpu::Ctx& ctx, const AttentionShape& a, bool backward) : ctx_(ctx) {
        if (const cudnnStatus_t status = fe::detail::create_handle(&handle_); status != CUDNN_STATUS_SUCCESS)
            fail("cuDNN cannot be started: %s", fe::detail::get_error_string(status));
        fe::detail::set_stream(handle_, ctx.stream);
        graph_.set_io_data_type(fe::DataType_t::BFLOAT16)
            .set_intermediate_data_type(fe::DataType_t::FLOAT)
            .set_compute_data_type(fe::DataType_t::FLOAT);

        // (B, heads, T, HS), tokens a row apart
        const auto describe = [&](fe::graph::Tensor_attributes& tensor, Uid uid, int heads, size_t row) {
            tensor.set_uid(uid)
                .set_dim({a.B, heads, a.T, a.HS})
                .set_stride({(int64_t)(a.T * row), a.HS, (int64_t)row, 1})
                .set_data_type(fe::DataType_t::BFLOAT16);
        };
        const auto describe_lse = [&](fe::graph::Tensor_attributes& tensor) {
            tensor.set_uid(LSE).set_dim({a.B, a.NH, a.T, 1}).set_stride({(int64_t)a.NH * a.T, a.T, 1, 1});
            tensor.set_data_type(fe::DataType_t::FLOAT);
        };
        const auto input = [&](Uid uid, int heads, size_t row) {
            fe::graph::Tensor_attributes tensor;
            describe(tensor, uid, heads, row);
            return graph_.tensor(tensor);
        };
        const auto q = input(Q, a.NH, a.row()), k = input(K, a.NKV, a.row()), v = input(V, a.NKV, a.row());
        if (backward) {
            const auto out = input(OUT, a.NH, a.output_row()), dout = input(DOUT, a.NH, a.output_row());
            fe::graph::Tensor_attributes lse;
            describe_lse(lse);
            auto options = fe::graph::SDPA_backward_attributes().set_name("backward").set_attn_scale(a.scale);
            options.set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT).set_diagonal_band_right_bound(0);  // causal
            const auto [dq, dk, dv] = graph_.sdpa_backward(q, k, v, out, dout, graph_.tensor(lse), options);
            describe(dq->set_output(true), DQ, a.NH, a.row());
            describe(dk->set_output(true), DK, a.NKV, a.row());
            describe(dv->set_output(true), DV, a.NKV, a.row());
        } else {
            auto options = fe::graph::SDPA_attributes().set_name("forward").set_attn_scale(a.scale).set_generate_stats(true);
            options.set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT).set_diagonal_band_right_bound(0);
            const auto [out, lse] = graph_.sdpa(q, k, v, options);
            describe(out->set_output(true), OUT, a.NH, a.output_row());
            describe_lse(lse->set_output(true));
        }
        check(graph_.build(handle_, {fe::HeurMode_t::A}), "building its graph");
        int64_t bytes = 0;
        check(graph_.get_workspace_size(bytes), "asking for its memory");
        workspace_bytes_ = (size_t)bytes;
        key_offset_ = a.key(0, 0, 0);
        value_offset_ = a.value(0, 0, 0);
    }
    Plan(const Plan&) = delete;
    Plan& operator=(const Plan&) = delete;
    ~Plan() { fe::detail::destroy_handle(handle_); }

    void forward(floatX* out, float* lse, floatX* qkv) {
        execute({{Q, qkv}, {K, qkv + key_offset_}, {V, qkv + value_offset_}, {OUT, out}, {LSE, lse}});
    }
    void backward(floatX* dqkv, floatX* dout, floatX* out, float* lse, floatX* qkv) {
        execute({{Q, qkv},
                 {K, qkv + key_offset_},
                 {V, qkv + value_offset_},
                 {OUT, out},
                 {LSE, lse},
                 {DOUT, dout},
                 {DQ, dqkv},
                 {DK, dqkv + key_offset_},
                 {DV, dqkv + value_offset_}});
    }

private:
    enum Uid : int64_t { Q = 1, K, V, OUT, LSE, DOUT, DQ, DK, DV };

    static void check(fe::error_t error, const char* what) {
        if (error.is_bad()) fail("cuDNN failed at %s: %s", what, error.get_message().c_str());
    }
    void execute(std::unordered_map<int64_t, void*> arrays) {
        check(graph_.execute(handle_, arrays, ctx_.scratch(std::max<size_t>(workspace_bytes_, 1))), "execution");
    }

    gpu::Ctx& ctx_;
    cudnnHandle_t handle_ = nullptr;
    fe::graph::Graph graph_;
    size_t workspace_bytes_ = 0, key_offset_ = 0, value_offset_ = 0;
};

}  // namespace cudnn_attention
#endif
