// Linear layers: the three matrix products of llmc/cpu/matmul.h (which derives them) through cuBLASLt.
//   forward          out  (N, OC)  = inp (N, IC) weight (OC, IC)^T (+ bias)
//   backward_input   dinp (N, IC)  = dout (N, OC) weight (OC, IC)
//   backward_weight  dweight (OC, IC) (+)= dout^T inp,  dbias (OC) (+)= column sums of dout
// cuBLASLt is column-major: to it a row-major (R, C) matrix is a (C, R) one with columns C apart. In this view each product D
// (m, n) = op(A) op(B) has its factors swapped, and D's rows run along our last dimension:
//   forward          m = OC, n = N,  k = IC    A = weight, transposed    B = inp     bias: one value per row of D (epilogue)
//   backward_input   m = IC, n = N,  k = OC    A = weight                B = dout
//   backward_weight  m = IC, n = OC, k = N     A = inp                   B = dout, transposed
//
// Precision: factors are floatX, sums fp32. out and dinp are rounded to floatX once; dweight is fp32 and is added to in fp32
// (beta = 1, in place), or it is bf16 and set, rounded once. In the fp32 build the products are fp32 too, never TF32. Split-K
// keeps its partial sums in fp32: sums in D's type are masked out, since in bf16 they would be rounded repeatedly.
//
// Epilogues: operations that the library fuses with a product save a kernel's pass over memory: the bias; GeLU, which also
// stores its input (bf16 only: its tanh has 11 bits); the product with GeLU's derivative (likewise); the sums of dout's
// columns. The last three are used where they are faster than a separate kernel (fuses() below): not all GPUs have them fused,
// they narrow the choice of algorithms, and the bias gradient is only set, never added to.
//
// Plans: descriptors and algorithm of a product are made once and kept, since a query to the library costs tens of
// microseconds. Without use_gemm_cache() the library's first suggestion is used. With it, all suggestions can be timed, and the
// winners are kept in a file if one is given.
//
// Determinism: one algorithm, one GPU model, one workspace per stream give the same bits in every run. Timing may choose
// differently from run to run, so choices are written to the file and not timed again. Without a file each run times again, and
// a resumed one may have other bits. The trainer times nothing if data-parallel ranks each compute the whole update of Muon:
// they must make the same choice.
//
// Cost: 2 N IC OC FLOPs each; bound by the tensor cores for N above a few hundred, below by reading the weight. Generation with
// a few rows uses the same path.
#pragma once
#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "../base/crc32c.h"
#include "../base/file.h"
#include "../base/shared_text.h"
#include "../fp8.h"
#include "../ops.h"
#include "device.cuh"
#include "mlp.cuh"
#include "rope.cuh"

namespace gpu {

// ---- which product ---------------------------------------------------------------------------------------------------------
template <class T>
constexpr cudaDataType cublas_type() {
    static_assert(std::is_same<T, bf16>::value || std::is_same<T, float>::value, "cuBLASLt multiplies bf16 and fp32 here");
    return std::is_same<T, bf16>::value ? CUDA_R_16BF : CUDA_R_32F;
}
constexpr cudaDataType cublas_type(Fp8 format) { return format == Fp8::e4m3 ? CUDA_R_8F_E4M3 : CUDA_R_8F_E5M2; }
constexpr bool is_fp8(cudaDataType type) { return type == CUDA_R_8F_E4M3 || type == CUDA_R_8F_E5M2; }
inline size_t bytes_of(cudaDataType type) { return type == CUDA_R_32F ? 4 : is_fp8(type) ? 1 : 2; }
inline const char* name_of(cudaDataType type) {
    return type == CUDA_R_32F ? "fp32" : type == CUDA_R_8F_E4M3 ? "e4m3" : type == CUDA_R_8F_E5M2 ? "e5m2" : "bf16";
}

struct GemmPointers {
    void* d;
    const void *a, *b;
    const void* bias = nullptr;                          // BIAS: read, one value per row of D; BGRADB: set, one per column
    const void* aux = nullptr;                           // like D; GELU_AUX: set to GeLU's input; DGELU: read
    const float *a_scale = nullptr, *b_scale = nullptr;  // fp8: the product is multiplied by both
    const void* c = nullptr;                             // like D; the addend; null: D itself
};

// The largest power of two, at most 16, that each address is a multiple of: no algorithm requires more. Null counts as 16.
struct GemmAlignment {
    int d, a, b, bias, aux;

    static int of(const void* pointer) {
        const uintptr_t bits = 16 | (uintptr_t)pointer;
        return (int)(bits & (~bits + 1));
    }
    GemmAlignment(const GemmPointers& p)
        : d(std::min(of(p.d), of(p.c))), a(of(p.a)), b(of(p.b)), bias(of(p.bias)), aux(of(p.aux)) {}
    auto fields() const { return std::make_tuple(d, a, b, bias, aux); }
};

// Everything that an algorithm may depend on. D (m, n) = op(A) op(B) [+ C], column-major and, except for B, packed.
struct GemmKey {
    int m, n, k;
    bool a_t, b_t;
    cudaDataType a, b, d;  // types
    cublasLtEpilogue_t epilogue;
    bool add;
    GemmAlignment alignment;
    bool fast = false;  // fp8: sums in the tensor cores' own registers throughout, with fewer bits than fp32
    int b_stride = 0;   // between columns of B; 0: packed

    auto fields() const {
        return std::make_tuple(m, n, k, a_t, b_t, (int)a, (int)b, (int)d, (int)epilogue, add, alignment.fields(), fast,
                               b_stride);
    }
    bool operator<(const GemmKey& other) const { return fields() < other.fields(); }
    std::string text() const {
        const std::string factors = a == b ? name_of(a) : format("%s x %s", name_of(a), name_of(b));
        const std::string strided = b_stride ? format(" stride %d", b_stride) : "";
        return format("m %d n %d k %d %c%c %s to %s epilogue %d %s align %d %d %d %d %d%s%s", m, n, k, "NT"[a_t], "NT"[b_t],
                      factors.c_str(), name_of(d), (int)epilogue, add ? "add" : "set", alignment.a, alignment.b, alignment.d,
                      alignment.bias, alignment.aux, fast ? " fast" : "", strided.c_str());
    }
};

// ---- algorithms chosen by timing, and their file ---------------------------------------------------------------------------
// A text file, one line per product: GPU, version of cuBLASLt, product, microseconds of the winner and of the library's first
// suggestion, the algorithm as cuBLASLt stores it (valid for the same version only), CRC-32C of the preceding fields. Each
// choice is appended once, as many nodes share the file; of two lines for one product the later one is valid. Lines of other
// GPUs and versions are kept. A damaged line, or a file of another kind, causes a warning, not an error; a file of another kind
// is not overwritten either. An algorithm of zeros means that an epilogue was slower than a separate kernel, whose time is then
// the first.
struct GemmChoice {
    cublasLtMatmulAlgo_t algo = {};
    double us = 0, first_us = 0;
    bool same_algorithm(const GemmChoice& other) const { return !memcmp(&algo, &other.algo, sizeof algo); }
    bool apart() const {
        return std::all_of(std::begin(algo.data), std::end(algo.data), [](uint64_t word) { return word == 0; });
    }
};

struct GemmTuning {
    bool on = false;   // time products missing from `file`
    std::string file;  // empty: none
};

class GemmChoices {
public:
    void read(const std::string& path) {
        path_ = path;
        may_write_ = !path.empty();
        std::unique_ptr<FileLock> lock;  // others may be appending; a folder that cannot be written to has no others
        try {
            if (std::error_code none; !path.empty() && std::filesystem::exists(path, none))
                lock = std::make_unique<FileLock>(path + ".lock");
        } catch (const Error&) {
        }
        choices_ = read_file(true);
    }

    const GemmChoice* find(const std::string& product) const {
        const auto found = choices_.find(product);
        return found == choices_.end() ? nullptr : &found->second;
    }

    // The text that the ranks of this node share: their choices in this run, as lines of the file.
    void share(std::shared_ptr<SharedText> node) { node_ = std::move(node); }
    // The choice of another rank of this node, or null.
    const GemmChoice* find_in_node(const std::string& product) {
        if (!node_) return nullptr;
        const std::lock_guard<SharedText> lock(*node_);
        return read_node(product);
    }

    // The choice for the product from now on: this one, or another rank's if it was first, so that all use the same and find it
    // again after a resume. It replaces one that the library has refused. Only one rank of a node writes the file; it holds the
    // node's lock, and waits for nobody but the file.
    const GemmChoice& add(const std::string& product, const GemmChoice& choice) {
        if (!node_) return add_to_file(product, choice);
        const std::lock_guard<SharedText> lock(*node_);
        if (const GemmChoice* theirs = read_node(product)) return *theirs;
        const GemmChoice& chosen = add_to_file(product, choice);
        node_->append(line_of(product, chosen));
        return chosen;
    }
    int writes() const { return writes_; }  // to the file, by this rank

    static void warn(const std::string& what) { print_line(stderr, "warning: " + what); }

private:
    static constexpr const char* header = "# algorithms of matrix products, version 1";

    const GemmChoice* read_node(const std::string& product) {
        const std::string text = node_->text(node_read_);
        node_read_ += text.size();
        read_lines(in_node_, text, 0);
        const auto found = in_node_.find(product);
        return found == in_node_.end() ? nullptr : &(choices_[product] = found->second);
    }

    const GemmChoice& add_to_file(const std::string& product, const GemmChoice& choice) {
        const bool replaces = choices_.count(product);
        GemmChoice& mine = choices_[product];
        const GemmChoice before = std::exchange(mine, choice);
        if (!may_write_) return mine;
        try {
            const FileLock lock(path_ + ".lock");
            bool whole = false;
            std::map<std::string, GemmChoice> all = read_file(false, &whole);
            if (!may_write_) return mine;
            const auto other = all.find(product);
            if (other != all.end() && !(replaces && other->second.same_algorithm(before))) return mine = other->second;
            all[product] = choice;
            if (whole) {
                append_line(line_of(product, choice));
            } else {
                all.insert(choices_.begin(), choices_.end());  // in case the file was removed
                write_file_atomically(path_, text_of(all));
            }
            writes_++;
        } catch (const Error& e) {
            give_up(e.what());
        }
        return mine;
    }

    void give_up(const std::string& why) {
        warn(why + "; the algorithms of matrix products are not kept");
        may_write_ = false;
    }

    // Without fsync: a line that is lost with its machine is timed again.
    void append_line(const std::string& line) {
        const int fd = open(path_.c_str(), O_WRONLY | O_APPEND | O_CLOEXEC);
        if (fd < 0) fail_to_write(path_, errno);
        const ssize_t n = ::write(fd, line.data(), line.size());
        if (const int error = errno; close(fd) != 0 || n != (ssize_t)line.size())
            fail("cannot write %s: %s", path_.c_str(), n < 0 ? strerror(error) : "the disk is full");
    }

    // whole: set to whether lines can be appended to the file.
    std::map<std::string, GemmChoice> read_file(bool warns, bool* whole = nullptr) {
        std::map<std::string, GemmChoice> all;
        std::error_code none;
        if (path_.empty() || !std::filesystem::exists(path_, none)) return all;
        std::string text;
        try {
            text = read_whole_file(path_);
        } catch (const Error& e) {
            give_up(e.what());
            return all;
        }
        if (text.empty()) return all;
        const std::string first_line = std::string(header) + "\n";
        if (text.compare(0, first_line.size(), first_line) != 0) {
            give_up(path_ + " is not a list of matrix products");
            return all;
        }
        const size_t damaged = read_lines(all, text, first_line.size());
        if (whole) *whole = damaged == 0 && text.back() == '\n';
        if (damaged > 0 && warns) warn(format("%s: %zu damaged lines are ignored", path_.c_str(), damaged));
        return all;
    }

    // Adds the lines from byte `at` on; returns the number of damaged ones.
    static size_t read_lines(std::map<std::string, GemmChoice>& all, const std::string& text, size_t at) {
        size_t damaged = 0;
        while (at < text.size()) {
            const size_t end = std::min(text.find('\n', at), text.size());
            if (!read_line(all, text.substr(at, end - at))) damaged++;
            at = end + 1;
        }
        return damaged;
    }
    static bool read_line(std::map<std::string, GemmChoice>& all, const std::string& line) {
        std::vector<std::string> fields(1);
        for (const char c : line) {
            if (c == '\t') fields.emplace_back();
            else fields.back() += c;
        }
        if (fields.size() != 7 || fields[5].size() != 8 * 16 || fields[6].size() != 8) return false;
        if (format("%08x", crc32c(line.data(), line.size() - 9)) != fields[6]) return false;
        GemmChoice choice;
        choice.us = strtod(fields[3].c_str(), nullptr);
        choice.first_us = strtod(fields[4].c_str(), nullptr);
        for (int i = 0; i < 8; i++) choice.algo.data[i] = strtoull(fields[5].substr(i * 16, 16).c_str(), nullptr, 16);
        all[fields[0] + "\t" + fields[1] + "\t" + fields[2]] = choice;
        return true;
    }

    static std::string text_of(const std::map<std::string, GemmChoice>& all) {
        std::string text = std::string(header) + "\n";
        for (const auto& [name, chosen] : all) text += line_of(name, chosen);
        return text;
    }
    static std::string line_of(const std::string& name, const GemmChoice& chosen) {
        std::string line = name + format("\t%.2f\t%.2f\t", chosen.us, chosen.first_us);
        for (const uint64_t word : chosen.algo.data) line += format("%016llx", (unsigned long long)word);
        return line + format("\t%08x\n", crc32c(line.data(), line.size()));
    }

    std::map<std::string, GemmChoice> choices_, in_node_;
    std::shared_ptr<SharedText> node_;
    size_t node_read_ = 0;  // bytes of its text
    std::string path_;
    bool may_write_ = false;
    int writes_ = 0;
};

// ---- plans -----------------------------------------------------------------------------------------------------------------
struct GemmPlan {
    cublasLtMatmulDescOpaque_t product;
    cublasLtMatrixLayoutOpaque_t a, b, d;
    cublasLtMatmulAlgo_t algo;
    float beta;
    bool apart = false;  // a separate kernel is faster than its epilogue: do not use this plan
};

enum class Fusion { if_faster, never, always };  // always: if the library can

struct GemmPlans {
    GemmTuning tuning;
    Fusion fusion = Fusion::if_faster;
    GemmChoices choices;
    std::map<GemmKey, std::unique_ptr<GemmPlan>> plans;
    int timed = 0, timed_in_place = 0;  // plans timed in this run; the ones timed with the caller's data
};

// Call before the first product. With autotune, products missing from the file at `path` are timed when they first occur, and
// added to it; the others use the file's choice. An empty path keeps nothing: with autotune, each run times them again.
inline void use_gemm_cache(Ctx& ctx, const std::string& path, bool autotune) {
    ctx.plans = std::make_shared<GemmPlans>();
    ctx.plans->tuning = {autotune, path};
    ctx.plans->choices.read(path);
}

inline void share_gemm_choices(Ctx& ctx, std::shared_ptr<SharedText> node) { ctx.plans->choices.share(std::move(node)); }

namespace detail {

constexpr bool has_bias(cublasLtEpilogue_t e) { return (e & CUBLASLT_EPILOGUE_BIAS) || e == CUBLASLT_EPILOGUE_BGRADB; }
constexpr bool has_aux(cublasLtEpilogue_t e) { return e & 128; }

template <class T>
void set_attribute(GemmPlan& plan, cublasLtMatmulDescAttributes_t attribute, T value) {
    CUBLAS(cublasLtMatmulDescSetAttribute(&plan.product, attribute, &value, sizeof value));
}

inline void describe(GemmPlan& plan, const GemmKey& key) {
    CUBLAS(cublasLtMatmulDescInit(&plan.product, CUBLAS_COMPUTE_32F, CUDA_R_32F));  // TF32 has its own compute type
    set_attribute(plan, CUBLASLT_MATMUL_DESC_TRANSA, key.a_t ? CUBLAS_OP_T : CUBLAS_OP_N);
    set_attribute(plan, CUBLASLT_MATMUL_DESC_TRANSB, key.b_t ? CUBLAS_OP_T : CUBLAS_OP_N);
    set_attribute(plan, CUBLASLT_MATMUL_DESC_EPILOGUE, key.epilogue);
    if (has_aux(key.epilogue)) set_attribute(plan, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, (int64_t)key.m);
    if (key.fast) set_attribute(plan, CUBLASLT_MATMUL_DESC_FAST_ACCUM, (int8_t)1);
    const int a_rows = key.a_t ? key.k : key.m, a_columns = key.a_t ? key.m : key.k;
    const int b_rows = key.b_t ? key.n : key.k, b_columns = key.b_t ? key.k : key.n;
    CUBLAS(cublasLtMatrixLayoutInit(&plan.a, key.a, (uint64_t)a_rows, (uint64_t)a_columns, a_rows));
    CUBLAS(cublasLtMatrixLayoutInit(&plan.b, key.b, (uint64_t)b_rows, (uint64_t)b_columns, std::max(b_rows, key.b_stride)));
    CUBLAS(cublasLtMatrixLayoutInit(&plan.d, key.d, (uint64_t)key.m, (uint64_t)key.n, key.m));
    plan.beta = key.add ? 1.0f : 0.0f;
}

inline cublasStatus_t start(Ctx& ctx, GemmPlan& plan, const cublasLtMatmulAlgo_t& algo, const GemmPointers& p) {
    if (p.bias) set_attribute(plan, CUBLASLT_MATMUL_DESC_BIAS_POINTER, p.bias);
    if (p.aux) set_attribute(plan, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, p.aux);
    if (p.a_scale) set_attribute(plan, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, p.a_scale);
    if (p.b_scale) set_attribute(plan, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, p.b_scale);
    const float alpha = 1;
    return cublasLtMatmul(ctx.cublas, &plan.product, &alpha, p.a, &plan.a, p.b, &plan.b, &plan.beta, p.c ? p.c : p.d, &plan.d,
                          p.d, &plan.d, &algo, ctx.workspace, Ctx::workspace_bytes, ctx.stream);
}

// The library's suggestions, fastest first by its estimate; none if it cannot compute the product.
inline std::vector<cublasLtMatmulAlgo_t> suggestions(Ctx& ctx, GemmPlan& plan, const GemmKey& key, int most) {
    cublasLtMatmulPreferenceOpaque_t preference;
    CUBLAS(cublasLtMatmulPreferenceInit(&preference));
    const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
        CUBLAS(cublasLtMatmulPreferenceSetAttribute(&preference, attribute, &value, sizeof value));
    };
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, (uint64_t)Ctx::workspace_bytes);
    prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, (uint32_t)CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE);  // or none at all
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, (uint32_t)key.alignment.a);
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, (uint32_t)key.alignment.b);
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, (uint32_t)key.alignment.d);
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, (uint32_t)key.alignment.d);
    // An epilogue's pointers have no preference; they imply their own alignment, and are not dereferenced here.
    const auto aligned = [&](int bytes) { return (const void*)((const char*)ctx.workspace + bytes); };
    if (has_bias(key.epilogue)) set_attribute(plan, CUBLASLT_MATMUL_DESC_BIAS_POINTER, aligned(key.alignment.bias));
    if (has_aux(key.epilogue)) set_attribute(plan, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, aligned(key.alignment.aux));
    if (is_fp8(key.a)) set_attribute(plan, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, aligned(16));
    if (is_fp8(key.b)) set_attribute(plan, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, aligned(16));
    std::vector<cublasLtMatmulHeuristicResult_t> results((size_t)most);
    int n = 0;
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(ctx.cublas, &plan.product, &plan.a, &plan.b, &plan.d, &plan.d,
                                                                 &preference, most, results.data(), &n);
    std::vector<cublasLtMatmulAlgo_t> algorithms;
    for (int i = 0; i < n && status == CUBLAS_STATUS_SUCCESS; i++)
        if (results[(size_t)i].state == CUBLAS_STATUS_SUCCESS) algorithms.push_back(results[(size_t)i].algo);
    return algorithms;
}

// Uniform in [low, low + span). Zeros would not do: they switch no transistors, so the clock stays higher than it ever is in
// training.
__global__ void __launch_bounds__(256) fill_random(void* x, cudaDataType type, size_t n, float low, float span) {
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
        uint32_t bits = (uint32_t)i * 2654435761u;
        bits = (bits ^ bits >> 15) * 2246822519u;
        bits = (bits ^ bits >> 13) * 3266489917u;
        const float value = low + span * ((float)(bits >> 8) * 0x1p-24f);
        if (type == CUDA_R_32F) ((float*)x)[i] = value;
        else if (type == CUDA_R_16BF) ((bf16*)x)[i] = (bf16)value;
        else ((uint8_t*)x)[i] = fp8_encode(value, type == CUDA_R_8F_E4M3 ? Fp8::e4m3 : Fp8::e5m2);
    }
}

// The memory for timing a product, separate so that timing changes no data; each pointer is aligned exactly as the key says. If
// a model leaves no room for that, uses the caller's inputs, which are only read, and the caller's outputs, which the product
// sets afterwards anyway; then only a product that is added to its outputs has separate ones.
class GemmScratch {
public:
    GemmScratch(Ctx& ctx, const GemmKey& key, const GemmPointers& callers) : callers_(callers) {
        const bool adds = key.add && (!callers.c || callers.c == callers.d);
        if (allocate(ctx, key, [](int) { return true; })) return;
        if (!callers.d) return;  // there are none
        in_place_ = true;
        if (adds && !allocate(ctx, key, [](int i) { return i == 2 || i == 3; })) in_place_ = false;  // D, bias
        obtained_ = in_place_;
    }
    ~GemmScratch() { cudaFree(memory_); }
    GemmScratch(const GemmScratch&) = delete;
    GemmScratch& operator=(const GemmScratch&) = delete;
    bool obtained() const { return obtained_; }
    bool in_place() const { return in_place_; }
    GemmPointers pointers(cublasLtEpilogue_t epilogue) const {
        void* const* const x = matrices_;
        const float* const scale = (const float*)x[5];
        if (!in_place_)
            return {x[2], x[0], x[1], has_bias(epilogue) ? x[3] : nullptr, has_aux(epilogue) ? x[4] : nullptr, scale, scale};
        GemmPointers p = callers_;
        if (!memory_) return p;
        p.d = x[2];
        p.c = nullptr;
        if (has_bias(epilogue)) p.bias = x[3];
        return p;
    }

private:
    static constexpr int n_matrices = 6;  // a, b, d, bias, aux, the scale of both factors
    GemmPointers callers_;
    bool obtained_ = false, in_place_ = false;
    void* memory_ = nullptr;
    void* matrices_[n_matrices] = {};

    // Returns false if memory does not suffice.
    template <class Wanted>
    bool allocate(Ctx& ctx, const GemmKey& key, Wanted wanted) {
        const size_t m = (size_t)key.m, n = (size_t)key.n, k = (size_t)key.k;
        const size_t n_of_b = std::max(n, (size_t)key.b_stride);  // only a transposed B has a stride
        const struct {
            cudaDataType type;
            size_t elements;
            int alignment;
            float low, span;
        } matrices[n_matrices] = {{key.a, m * k, key.alignment.a, -1, 2},
                                  {key.b, k * n_of_b, key.alignment.b, -1, 2},
                                  {key.d, m * n, key.alignment.d, -1, 2},
                                  {key.d, std::max(m, n), key.alignment.bias, -1, 2},
                                  {key.d, has_aux(key.epilogue) ? m * n : 1, key.alignment.aux, -1, 2},
                                  {CUDA_R_32F, 1, 16, 1, 0}};
        size_t at[n_matrices + 1] = {};
        for (int i = 0; i < n_matrices; i++) {
            const size_t bytes = ceil_div(matrices[i].elements * bytes_of(matrices[i].type) + 16, (size_t)256) * 256;
            at[i + 1] = at[i] + (wanted(i) ? bytes : 0);
        }
        const cudaError_t error = cudaMalloc(&memory_, at[n_matrices]);
        if (error == cudaErrorMemoryAllocation) {
            (void)cudaGetLastError();
            memory_ = nullptr;
            return false;
        }
        CUDA(error);
        for (int i = 0; i < n_matrices; i++) {
            if (!wanted(i)) continue;
            const auto& x = matrices[i];
            matrices_[i] = (char*)memory_ + at[i] + x.alignment;
            const unsigned blocks = (unsigned)std::min(ceil_div(x.elements, (size_t)256), (size_t)ctx.multiprocessors * 8);
            LAUNCH(fill_random, blocks, 256, 0, ctx, matrices_[i], x.type, x.elements, x.low, x.span);
        }
        if (!is_fp8(key.a)) matrices_[5] = nullptr;
        return obtained_ = true;
    }
};

class Stopwatch {
public:
    explicit Stopwatch(Ctx& ctx) : ctx_(ctx) {
        CUDA(cudaEventCreate(&before_));
        CUDA(cudaEventCreate(&after_));
    }
    ~Stopwatch() {
        cudaEventDestroy(before_);
        cudaEventDestroy(after_);
    }
    Stopwatch(const Stopwatch&) = delete;
    Stopwatch& operator=(const Stopwatch&) = delete;

    // Microseconds per call, for `runs` consecutive calls.
    template <class F>
    double time(int runs, F&& call) {
        CUDA(cudaEventRecord(before_, ctx_.stream));
        for (int i = 0; i < runs; i++) call();
        CUDA(cudaEventRecord(after_, ctx_.stream));
        CUDA(cudaEventSynchronize(after_));
        float ms = 0;
        CUDA(cudaEventElapsedTime(&ms, before_, after_));
        return (double)ms * 1000 / runs;
    }
    // Microseconds of something that takes about `us`: the median of five measurements, each over at least 0.2 ms.
    template <class F>
    double median(double us, F&& call) {
        const int runs = std::max(1, std::min(20, (int)(200 / std::max(us, 1.0))));
        std::array<double, 5> times;
        for (double& t : times) t = time(runs, call);
        std::sort(times.begin(), times.end());
        return times[2];
    }

private:
    Ctx& ctx_;
    cudaEvent_t before_ = nullptr, after_ = nullptr;
};

// The fastest of the suggestions. Each runs once to load its code and once for a first estimate; the ones close to the best are
// measured five times for at least 0.2 ms, and the median counts. At equal times the library's order decides.
inline bool fastest(Ctx& ctx, GemmPlan& plan, const GemmScratch& scratch, const GemmKey& key,
                    const std::vector<cublasLtMatmulAlgo_t>& algorithms, GemmChoice& best) {
    const GemmPointers pointers = scratch.pointers(key.epilogue);
    Stopwatch stopwatch(ctx);
    best.us = best.first_us = 0;
    bool found = false;
    for (size_t i = 0; i < algorithms.size(); i++) {
        const auto run = [&] { return start(ctx, plan, algorithms[i], pointers); };
        if (run() != CUBLAS_STATUS_SUCCESS) continue;
        double us = stopwatch.time(1, run);
        if (!found || us < 1.5 * best.us) us = stopwatch.median(us, run);
        if (i == 0) best.first_us = us;
        if (!found || us < best.us) {
            best.us = us;
            best.algo = algorithms[i];
            found = true;
        }
    }
    return found;
}

// Chooses plan.algo. Without `apart` the product must be possible; with it, plan.apart may be the answer: if the library cannot
// fuse the epilogue, or if apart(pointers), which computes the same in several launches, takes less time. Without tuning,
// `preferred` decides.
template <class Apart>
void choose_algorithm(Ctx& ctx, GemmPlan& plan, const GemmKey& key, const GemmPointers& callers, bool may_be_apart,
                      bool preferred, const Apart& apart) {
    GemmPlans& all = *ctx.plans;
    const std::string product = format("%s, %d multiprocessors\tcuBLASLt %zu\t%s", ctx.name.c_str(), ctx.multiprocessors,
                                       cublasLtGetVersion(), key.text().c_str());
    const GemmChoice* kept = all.choices.find(product);
    if (kept && kept->apart() && may_be_apart) {
        plan.apart = true;
        return;
    }
    if (kept) {
        cublasLtMatmulHeuristicResult_t result = {};
        const cublasStatus_t status =
            cublasLtMatmulAlgoCheck(ctx.cublas, &plan.product, &plan.a, &plan.b, &plan.d, &plan.d, &kept->algo, &result);
        plan.algo = kept->algo;
        if (status == CUBLAS_STATUS_SUCCESS && result.workspaceSize <= Ctx::workspace_bytes) return;
        GemmChoices::warn(format("%s has an algorithm that cuBLASLt refuses; it is ignored: %s", all.tuning.file.c_str(),
                                 key.text().c_str()));
    }
    constexpr int most = 32;
    const bool tunes = all.tuning.on && ctx.autotune;
    const std::vector<cublasLtMatmulAlgo_t> algorithms = suggestions(ctx, plan, key, tunes ? most : 1);
    if (algorithms.empty() && may_be_apart) {
        plan.apart = true;
        return;
    }
    if (algorithms.empty())
        fail("cuBLASLt %zu knows no algorithm for a matrix product on %s: %s", cublasLtGetVersion(), ctx.name.c_str(),
             key.text().c_str());
    plan.algo = algorithms[0];
    plan.apart = may_be_apart && !preferred;
    if (!tunes) return;

    if (const GemmChoice* theirs = all.choices.find_in_node(product)) {
        plan.algo = theirs->algo;
        plan.apart = may_be_apart && theirs->apart();
        return;
    }
    GemmChoice choice;
    const GemmScratch scratch(ctx, key, callers);
    if (!scratch.obtained() || !fastest(ctx, plan, scratch, key, algorithms, choice)) {
        GemmChoices::warn(format("%s, so the library's first suggestion is used: %s",
                                 scratch.obtained() ? "no algorithm runs that cuBLASLt suggests for a matrix product"
                                                    : "no GPU memory left to time a matrix product",
                                 key.text().c_str()));
        return;
    }
    all.timed++;
    all.timed_in_place += scratch.in_place();
    if (may_be_apart) {
        const auto run = [&] { apart(scratch.pointers(key.epilogue)); };
        run();
        Stopwatch stopwatch(ctx);
        const double us = stopwatch.median(stopwatch.time(1, run), run);
        if (us < choice.us) choice = {{}, us, choice.us};
    }
    choice = all.choices.add(product, choice);
    plan.algo = choice.algo;
    plan.apart = may_be_apart && choice.apart();
}

template <class Apart>
GemmPlan& plan_of(Ctx& ctx, const GemmKey& key, const GemmPointers& callers, bool may_be_apart, bool preferred,
                  const Apart& apart) {
    CHECK(key.m > 0 && key.n > 0 && key.k > 0, "an empty matrix product: %s", key.text().c_str());
    if (!ctx.plans) ctx.plans = std::make_shared<GemmPlans>();
    const auto found = ctx.plans->plans.find(key);
    if (found != ctx.plans->plans.end()) return *found->second;
    auto plan = std::make_unique<GemmPlan>();
    describe(*plan, key);
    choose_algorithm(ctx, *plan, key, callers, may_be_apart, preferred, apart);
    return *ctx.plans->plans.emplace(key, std::move(plan)).first->second;
}

// True if the product should use the epilogue of `key` instead of apart(pointers). `preferred` decides without tuning. The
// library's GeLU has the GPU's tanh of 11 bits (measured on an H100), which bf16 hides and fp32 does not: in fp32 it is
// separate.
template <class Apart>
bool fuses(Ctx& ctx, const GemmKey& key, const GemmPointers& callers, bool preferred, const Apart& apart) {
    const Fusion fusion = ctx.plans ? ctx.plans->fusion : Fusion::if_faster;
    if (fusion == Fusion::never || (has_aux(key.epilogue) && key.d == CUDA_R_32F)) return false;
    return !plan_of(ctx, key, callers, true, preferred || fusion == Fusion::always, apart).apart;
}

// D (m, n) = epilogue(op(A) op(B)), or epilogue(C + op(A) op(B)).
inline void gemm(Ctx& ctx, const GemmPointers& p, const GemmKey& key) {
    GemmPlan& plan = plan_of(ctx, key, p, false, false, [](const GemmPointers&) {});
    const cublasStatus_t status = start(ctx, plan, plan.algo, p);
    if (status != CUBLAS_STATUS_SUCCESS)
        fail("cuBLASLt refused a matrix product on %s (%s): %s", ctx.name.c_str(), cublasLtGetStatusName(status),
             key.text().c_str());
}

// ---- bias gradient ---------------------------------------------------------------------------------------------------------
// The kernel separate from the product: it adds as well as sets, and is bound by reading dout once: N OC sizeof(floatX) bytes.
// At 700 TFLOP/s and 4.3 TB/s that is 163/IC of the product's time in bf16: 21% at IC = 768, 4% at 4096 (not yet measured on a
// GPU).
//
// A block of 16 warps processes 32 packs of columns (blockIdx.x) of one part of the rows (blockIdx.y): each lane adds one
// pack's columns over every 16th row, then the warps' sums are added, warp by warp. out (gridDim.y, columns) is summed by a
// second launch with one block per column tile, unless there is only one part.
constexpr int sums_warps = 16, sums_blocks = 3;  // of a block; of a multiprocessor

template <class T>
__global__ void __launch_bounds__(32 * sums_warps, sums_blocks)
    column_sums(float* out, const T* x, int stride, int rows, int columns, int rows_per_block, bool whole_packs, bool add) {
    constexpr int width = Pack<T>::size, unroll = 4;
    __shared__ float sums[sums_warps][width][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, column = ((int)blockIdx.x * 32 + lane) * width;
    const int first = (int)blockIdx.y * rows_per_block;
    const int last = rows - first < rows_per_block ? rows : first + rows_per_block;
    float sum[width] = {};
    if (column < columns && whole_packs) {
        const T* p = x + (size_t)(first + warp) * stride + column;
        const size_t step = (size_t)sums_warps * stride;
        int left = last - first > warp ? (last - first - warp + sums_warps - 1) / sums_warps : 0;
        for (; left >= unroll; left -= unroll, p += unroll * step) {
            Pack<T> packs[unroll];
#pragma unroll
            for (int u = 0; u < unroll; u++) packs[u] = load(p + u * step);
#pragma unroll
            for (int u = 0; u < unroll; u++)
#pragma unroll
                for (int i = 0; i < width; i++) sum[i] += (float)packs[u][i];
        }
        for (; left > 0; left--, p += step) {
            const Pack<T> pack = load(p);
#pragma unroll
            for (int i = 0; i < width; i++) sum[i] += (float)pack[i];
        }
    } else if (column < columns) {
        for (int row = first + warp; row < last; row += sums_warps)
#pragma unroll
            for (int i = 0; i < width; i++)
                if (column + i < columns) sum[i] += (float)x[(size_t)row * stride + column + i];
    }
#pragma unroll
    for (int i = 0; i < width; i++) sums[warp][i][lane] = sum[i];  // in this order a warp's 32 stores hit 32 banks
    __syncthreads();
    if (warp >= width) return;
    const int i = warp;  // each warp finishes one column of each pack
    if (column + i >= columns) return;
    float total = 0;
#pragma unroll
    for (int w = 0; w < sums_warps; w++) total += sums[w][i][lane];
    float* to = out + (size_t)blockIdx.y * columns + column + i;
    *to = add ? *to + total : total;
}

template <class T>
void launch_column_sums(Ctx& ctx, float* out, const T* x, int stride, int rows, int columns, int parts, bool add) {
    const bool whole_packs = columns % Pack<T>::size == 0 && stride % Pack<T>::size == 0 && (uintptr_t)x % sizeof(Pack<T>) == 0;
    const dim3 grid((unsigned)ceil_div(columns, 32 * Pack<T>::size), (unsigned)parts);
    LAUNCH(column_sums<T>, grid, 32 * sums_warps, 0, ctx, out, x, stride, rows, columns, ceil_div(rows, parts), whole_packs,
           add);
}

// The rows of dout (N, OC) are `stride` apart.
inline void bias_backward(Ctx& ctx, real* dbias, const floatX* dout, int stride, int N, int OC, Acc acc) {
    // As many parts as fill the GPU once, of at least 64 rows, which is one turn of the unrolled loop.
    const int tiles = ceil_div(OC, 32 * Pack<floatX>::size);
    const int wanted = std::max(1, std::min(sums_blocks * ctx.multiprocessors / tiles, N / (4 * sums_warps)));
    const int parts = ceil_div(N, ceil_div(N, wanted));  // none is empty
    const bool add = acc == Acc::Add;
    if (parts == 1) return launch_column_sums(ctx, dbias, dout, stride, N, OC, 1, add);
    float* partial = (float*)ctx.scratch(sizeof(float) * (size_t)parts * (size_t)OC);
    launch_column_sums(ctx, partial, dout, stride, N, OC, parts, false);
    launch_column_sums(ctx, dbias, partial, OC, parts, OC, 1, add);
}

}  // namespace detail

// ---- the ops ---------------------------------------------------------------------------------------------------------------
namespace detail {

constexpr cudaDataType x_type = cublas_type<floatX>();

// The three products' keys.
inline GemmKey forward_key(const GemmPointers& p, int N, int IC, int OC, cublasLtEpilogue_t epilogue) {
    return {OC, N, IC, true, false, x_type, x_type, x_type, epilogue, false, p};
}
inline GemmKey backward_input_key(const GemmPointers& p, int N, int IC, int OC, cublasLtEpilogue_t epilogue) {
    return {IC, N, OC, false, false, x_type, x_type, x_type, epilogue, false, p};
}
inline GemmKey backward_weight_key(const GemmPointers& p, int stride, int N, int IC, int rows, cudaDataType d, Acc acc,
                                   cublasLtEpilogue_t epilogue) {
    return {IC, rows, N, false, true, x_type, x_type, d, epilogue, acc == Acc::Add, p, false, rows == stride ? 0 : stride};
}
// The type of a weight's gradient.
inline cudaDataType gradient_type(const Elements& dweight, Acc acc) {
    CHECK(!dweight.is_bf16() || (sets_bf16_gradients && acc == Acc::Set), "a product that adds to a gradient in bf16");
    return dweight.is_bf16() ? CUDA_R_16BF : cublas_type<real>();
}

// From Hopper on the library computes GeLU and its derivative in the product itself; on other GPUs in a second kernel.
inline bool fuses_gelu(const Ctx& ctx) { return ctx.capability >= 90; }

}  // namespace detail

inline void linear_forward(Ctx& ctx, floatX* out, const floatX* inp, const floatX* weight, const floatX* bias, int N, int IC,
                           int OC) {
    const GemmPointers p = {out, weight, inp, bias};
    detail::gemm(ctx, p, detail::forward_key(p, N, IC, OC, bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT));
}

inline void linear_backward_input(Ctx& ctx, floatX* dinp, const floatX* dout, const floatX* weight, int N, int IC, int OC) {
    const GemmPointers p = {dinp, weight, dout};
    detail::gemm(ctx, p, detail::backward_input_key(p, N, IC, OC, CUBLASLT_EPILOGUE_DEFAULT));
}

inline void linear_gelu_forward(Ctx& ctx, floatX* out, floatX* pre, const floatX* inp, const floatX* weight, const floatX* bias,
                                int N, int IC, int OC) {
    const GemmPointers pointers = {out, weight, inp, bias, pre};
    const auto key =
        detail::forward_key(pointers, N, IC, OC, bias ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX);
    const auto apart = [&](const GemmPointers& p) {
        linear_forward(ctx, (floatX*)p.aux, (const floatX*)p.b, (const floatX*)p.a, (const floatX*)p.bias, N, IC, OC);
        activation_forward(ctx, (floatX*)p.d, (const floatX*)p.aux, N, OC, Activation::gelu);
    };
    if (detail::fuses(ctx, key, pointers, detail::fuses_gelu(ctx), apart)) detail::gemm(ctx, pointers, key);
    else apart(pointers);
}

inline void linear_gelu_backward_input(Ctx& ctx, floatX* dpre, const floatX* dout, const floatX* weight, const floatX* pre,
                                       int N, int IC, int OC) {
    const GemmPointers pointers = {dpre, weight, dout, nullptr, pre};
    const auto key = detail::backward_input_key(pointers, N, IC, OC, CUBLASLT_EPILOGUE_DGELU);
    const auto apart = [&](const GemmPointers& p) {
        linear_backward_input(ctx, (floatX*)p.d, (const floatX*)p.b, (const floatX*)p.a, N, IC, OC);
        activation_backward(ctx, (floatX*)p.d, (const floatX*)p.d, (const floatX*)p.aux, N, IC, Activation::gelu);
    };
    if (detail::fuses(ctx, key, pointers, detail::fuses_gelu(ctx), apart)) detail::gemm(ctx, pointers, key);
    else apart(pointers);
}

// The product is added to the residual stream.
inline void linear_residual_forward(Ctx& ctx, floatX* out, const floatX* residual, const floatX* inp, const floatX* weight,
                                    const floatX* bias, int N, int IC, int OC) {
    GemmPointers pointers = {out, weight, inp, bias};
    pointers.c = residual;
    GemmKey key = detail::forward_key(pointers, N, IC, OC, bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT);
    key.add = true;
    const auto apart = [&](const GemmPointers& p) {
        linear_forward(ctx, (floatX*)p.d, (const floatX*)p.b, (const floatX*)p.a, (const floatX*)p.bias, N, IC, OC);
        residual_forward(ctx, (floatX*)p.d, (const floatX*)(p.c ? p.c : p.d), (const floatX*)p.d, (size_t)N * OC);
    };
    if (detail::fuses(ctx, key, pointers, true, apart)) detail::gemm(ctx, pointers, key);
    else apart(pointers);
}

// The library cannot fuse these: kernels after the product.
inline void linear_swiglu_forward(Ctx& ctx, floatX* out, floatX* gate_up, const floatX* inp, const floatX* weight,
                                  const floatX* bias, int N, int IC, int F) {
    linear_forward(ctx, gate_up, inp, weight, bias, N, IC, 2 * F);
    activation_forward(ctx, out, gate_up, N, F, Activation::swiglu);
}
inline void linear_swiglu_backward_input(Ctx& ctx, floatX* dgate_up, floatX* dact, const floatX* dout, const floatX* weight,
                                         const floatX* gate_up, int N, int F, int OC) {
    linear_backward_input(ctx, dact, dout, weight, N, F, OC);
    activation_backward(ctx, dgate_up, dact, gate_up, N, F, Activation::swiglu);
}
inline void linear_rope_forward(Ctx& ctx, floatX* qkv, const floatX* inp, const floatX* weight, const floatX* bias, int IC,
                                const Rope& rope, const AttentionShape& shape) {
    linear_forward(ctx, qkv, inp, weight, bias, shape.N(), IC, (int)shape.row());
    rope_forward(ctx, qkv, rope, shape);
}

inline void linear_backward_weight_rows(Ctx& ctx, const Elements& dweight, real* dbias, const Columns& columns,
                                        const floatX* inp, int N, int IC, int rows, Acc acc) {
    const floatX* const dout = columns.x;
    const int stride = columns.stride;
    const cudaDataType type = detail::gradient_type(dweight, acc);
    void* const dw = dweight.data;
    const auto apart = [&](const GemmPointers& p) {
        const GemmPointers product = {p.d, p.a, p.b};
        detail::gemm(ctx, product,
                     detail::backward_weight_key(product, stride, N, IC, rows, type, acc, CUBLASLT_EPILOGUE_DEFAULT));
        if (p.bias) detail::bias_backward(ctx, (real*)p.bias, (const floatX*)p.b, stride, N, rows, acc);
    };
    const GemmPointers pointers = {dw, inp, dout, dbias};
    if (!dbias || dweight.is_bf16()) return apart(pointers);  // the library's sums have the product's type
    // Added to: the sums are set in scratch memory first.
    const GemmPointers fused = {dw, inp, dout, acc == Acc::Set ? dbias : nullptr};
    const auto key = detail::backward_weight_key(fused, stride, N, IC, rows, type, acc, CUBLASLT_EPILOGUE_BGRADB);
    if (!detail::fuses(ctx, key, fused, false, apart)) return apart(pointers);
    real* sums = acc == Acc::Set ? dbias : (real*)ctx.scratch(sizeof(real) * (size_t)rows);
    detail::gemm(ctx, {dw, inp, dout, sums}, key);
    if (acc == Acc::Add) detail::launch_column_sums(ctx, dbias, sums, rows, 1, rows, 1, true);
}

inline void linear_backward_weight(Ctx& ctx, const Elements& dweight, real* dbias, const floatX* dout, const floatX* inp, int N,
                                   int IC, int OC, Acc acc) {
    linear_backward_weight_rows(ctx, dweight, dbias, {dout, OC}, inp, N, IC, OC, acc);
}

}  // namespace gpu
