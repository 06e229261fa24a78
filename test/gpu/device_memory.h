// DeviceMemory memory for the tests of kernels: between guard bytes, poisoned (NaN) until written, compared on the host.
//   DeviceMemory<floatX> x(values);                 // uploaded
//   DeviceMemory<floatX> out(N * C, "out");         // all NaN
//   gpu::some_op(ctx, out.p(), x.p(), N, C);
//   expect_close(out.get(), expected, ...);   // get() waits, checks the guards, downloads
#pragma once
#include <string>
#include <vector>

#include "../../llmc/gpu/launch.cuh"
#include "../testing.h"

namespace test {

template <class T>
class DeviceMemory {
public:
    explicit DeviceMemory(size_t n, std::string name = "buffer") : n_(n), name_(std::move(name)) {
        CUDA(cudaMalloc(&memory_, n * sizeof(T) + 2 * guard));
        CUDA(cudaMemset(memory_, pattern, n * sizeof(T) + 2 * guard));
        CUDA(cudaDeviceSynchronize());
    }
    explicit DeviceMemory(const std::vector<T>& values, std::string name = "buffer")
        : DeviceMemory(values.size(), std::move(name)) {
        set(values);
    }
    DeviceMemory(const DeviceMemory&) = delete;
    DeviceMemory& operator=(const DeviceMemory&) = delete;
    ~DeviceMemory() {
        get();
        cudaFree(memory_);
    }

    T* p() { return (T*)(memory_ + guard); }
    const T* p() const { return (const T*)(memory_ + guard); }
    size_t size() const { return n_; }

    void set(const std::vector<T>& values) {
        ASSERT_EQ(values.size(), n_) << name_;
        if (n_) CUDA(cudaMemcpy(p(), values.data(), n_ * sizeof(T), cudaMemcpyHostToDevice));
        // A copy from pageable memory may still be in flight, on a stream with which ops do not synchronize.
        CUDA(cudaDeviceSynchronize());
    }
    std::vector<T> get() const {
        CUDA(cudaDeviceSynchronize());
        std::vector<uint8_t> bytes(n_ * sizeof(T) + 2 * guard);
        CUDA(cudaMemcpy(bytes.data(), memory_, bytes.size(), cudaMemcpyDeviceToHost));
        for (size_t i = 0; i < guard; i++) {
            EXPECT_EQ(bytes[i], pattern) << name_ << ": written " << guard - i << " bytes before its start";
            EXPECT_EQ(bytes[bytes.size() - guard + i], pattern) << name_ << ": written " << i << " bytes after its end";
            if (bytes[i] != pattern || bytes[bytes.size() - guard + i] != pattern) break;
        }
        std::vector<T> values(n_);
        if (n_) memcpy((void*)values.data(), bytes.data() + guard, n_ * sizeof(T));
        return values;
    }

private:
    static constexpr size_t guard = 256;
    static constexpr uint8_t pattern = 0xff;  // NaN in every float type
    size_t n_;
    std::string name_;
    uint8_t* memory_ = nullptr;
};

}  // namespace test
