// Kernels of llm.c's trainer (llmc/*.cuh, bf16, Packed128) compared with plain loops.
#include "llmc/layernorm.cuh"
#include "llmc/gelu.cuh"
#include "llmc/global_norm.cuh"
#include "llmc/fused_classifier.cuh"

#include <cstdio>
#include <random>
#include <vector>

cudaDeviceProp deviceProp;

template <class T>
struct Array {
    T* device;
    std::vector<T> host;
    explicit Array(size_t n, float scale = 0) : host(n) {
        static std::mt19937 random(7);
        std::normal_distribution<float> normal;
        for (T& x : host) x = scale * normal(random);
        cudaCheck(cudaMalloc((void**)&device, n * sizeof(T)));
        cudaCheck(cudaMemcpy(device, host.data(), n * sizeof(T), cudaMemcpyHostToDevice));
    }
    float operator[](size_t i) const { return host[i]; }
    void fetch() { cudaCheck(cudaMemcpy(host.data(), device, host.size() * sizeof(T), cudaMemcpyDeviceToHost)); }
};

// Within 1/128 of the value (two roundings to bf16) and `absolute`.
bool near(const char* name, size_t i, float is, double should, double absolute) {
    if (std::fabs(is - should) <= std::fabs(should) / 128 + absolute) return true;
    return printf("%s: mismatch at %zu: %g, not %g\n", name, i, is, should), false;
}

int main() {
    cudaGetDeviceProperties(&deviceProp, 0);
    const int B = 2, T = 64, C = 768, N = B * T, V = 9001, P = 9024;  // a row may not be shorter than a block
    bool good = true;
    Array<floatX> x(N * C, 1), y(N * C, 1), sum(N * C), normed(N * C), weight(C, 1), bias(C, 1), gelu(N * C);
    Array<float> mean(N), rstd(N), norm(4096);
    fused_residual_forward5(sum.device, normed.device, mean.device, rstd.device, x.device, y.device, weight.device, bias.device, N,
                            C, nullptr);
    gelu_forward(gelu.device, x.device, N * C, nullptr);
    sum.fetch(), normed.fetch(), gelu.fetch();
    for (int i = 0; i < N; i++) {
        double m = 0, v = 0;
        for (int c = 0; c < C; c++) m += sum[i * C + c] / C;
        for (int c = 0; c < C; c++) v += (sum[i * C + c] - m) * (sum[i * C + c] - m) / C;
        for (int c = 0; c < C; c++) {
            const size_t k = i * C + c;
            const double value = x[k];
            good = good && near("residual", k, sum[k], x[k] + y[k], 0);
            good = good && near("layernorm", k, normed[k], (sum[k] - m) / std::sqrt(v + 1e-5) * weight[c] + bias[c], 0.02);
            good = good && near("gelu", k, gelu[k], value / 2 * (1 + std::tanh(0.7978845608 * (value + 0.044715 * value * value * value))), 1e-3);
        }
    }
    double square = 0;
    for (int i = 0; i < N * C; i++) square += (double)x[i] * x[i];
    int slices = 1;
    const int n_sums = get_max_num_block_sums(&slices, 1);
    global_norm_squared(norm.device, x.device, N * C, 0, 1, n_sums, true, nullptr);
    global_sum_deterministic(norm.device, norm.device, n_sums, nullptr);
    norm.fetch();
    good = good && near("global norm", 0, norm[0], square, 0);

    Array<floatX> logits(N * P, 3), dlogits = logits;  // in place
    Array<float> losses(N, 0);
    std::vector<int> target(N);
    int* targets;
    for (int i = 0; i < N; i++) target[i] = i * 7919 % V;
    cudaCheck(cudaMalloc((void**)&targets, N * sizeof(int)));
    cudaCheck(cudaMemcpy(targets, target.data(), N * sizeof(int), cudaMemcpyHostToDevice));
    fused_classifier(dlogits.device, losses.device, 1.0f / N, targets, B, T, V, P, True, nullptr);
    losses.fetch(), dlogits.fetch();
    for (int i = 0; i < N; i++) {
        double total = 0;
        for (int c = 0; c < V; c++) total += std::exp((double)logits[i * P + c]);
        good = good && near("loss", i, losses[i], std::log(total) - logits[i * P + target[i]], 1e-4);
        for (int c = 0; c < V; c++)
            good = good && near("dlogits", i * P + c, dlogits[i * P + c],
                                (std::exp((double)logits[i * P + c]) / total - (c == target[i])) / N, 1e-7);
    }
    return good ? 0 : 1;
}
