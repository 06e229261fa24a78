// Every op of the model, declared once and included into namespace cpu (and gpu): the index of the kernels.
// A definition whose signature differs from its declaration here does not link.
//
// Conventions. N = B*T rows. Shapes are at the right, row-major, slowest first. Outputs come first after the context, then
// inputs, sizes, scalars; values that belong together are a struct of shapes.h. `d` prefixes a gradient. "sets" overwrites,
// "adds" accumulates; an `acc` selects one. Parameter gradients are `real` (fp32; gradients.h rounds them), and are accumulated
// unless there is an `acc`. A pointer marked `or null` may be null. Per-row statistics and sums are `real`.
// Results are deterministic: the same inputs give the same bits in every run on one kind of device (model of GPU, matrix unit
// of a CPU), on a CPU with any number of threads. Exceptions: attention_backward with dq_sums, and products whose algorithm is
// timed again (use_gemm_cache).
// An `Output` is a matrix of numbers, of codes, or both (fp8.h); codes are e4m3 and not transposed unless stated otherwise.

// ---- memory (memory.h) ----------------------------------------------------------------------------------------------------
// Ops work on the backend's memory: the GPU's, or on the CPU ordinary memory.
// Zero-filled; if memory does not suffice, fails with the requested and the available size.
void* allocate_memory(size_t bytes);
void release_memory(void* memory, size_t bytes);
size_t available_memory();
// The maximum number of rows, of row_bytes each, whose logits should be in memory at a time. It depends on the device's size,
// not on its free memory, so that the same run has the same bits.
size_t logits_rows(const Ctx& ctx, size_t row_bytes);
// These run in order with the ops on ctx. upload returns when `from` may be changed, download when `to` is complete.
void upload(Ctx& ctx, void* to, const void* from_host, size_t bytes);
void download(Ctx& ctx, void* to_host, const void* from, size_t bytes);
void clear(Ctx& ctx, void* memory, size_t bytes);
// Copies rows of row_bytes each; strides are in bytes.
void copy_rows(Ctx& ctx, void* to, size_t to_stride, const void* from, size_t from_stride, size_t row_bytes, size_t rows);
// Page-locks host memory and sets it to zero. Ops may then use it as the backend's memory, but at the rate of the link, and a
// HostLink copies it. unlock_memory first waits for all ops of the backend.
void lock_memory(void* memory, size_t bytes);
void unlock_memory(void* memory);
// Copies between page-locked memory and slots of the backend's memory, which overlap with ops on ctx (optimizer_state.h).
class HostLink;

// ---- embedding (embed.h) --------------------------------------------------------------------------------------------------
// out = scale wte[token - v0] (+ wpe[position]). A token outside the shard gives a zero row of wte. sets out.
void embedding_forward(Ctx& ctx, floatX* out /*(N, C)*/, const int* tokens /*(N)*/, const int* positions /*(N)*/,
                       const floatX* wte /*(Vp, C)*/, const floatX* wpe /*(P, C) or null*/, int N, int C,
                       const VocabularyShard& shard);
// adds to dwte rows [token - v0], times scale, and to dwpe rows [position]; rows of the same token are added in their order in
// the batch.
void embedding_backward(Ctx& ctx, real* dwte /*(Vp, C)*/, real* dwpe /*(P, C) or null*/, const floatX* dout /*(N, C)*/,
                        const int* tokens, const int* positions, int N, int C, const VocabularyShard& shard);
// The same for one table with gradients in bf16: each row that occurs (+)= the fp32 sum of its rows of dout, rounded as by
// accumulate(). `Set` clears the other rows. Only rows [0, shard.V) are accessed.
void embedding_backward_rounded(Ctx& ctx, bf16* table /*(V, C)*/, const floatX* dout /*(N, C)*/, const int* ids /*(N)*/, int N,
                                int C, const VocabularyShard& shard, Acc acc, const Rounding& rounding);

// ---- norms (norm.h) -------------------------------------------------------------------------------------------------------
// If add is given, normalizes and stores sum = inp + add (rounded to floatX), else normalizes inp. sets out, statistics, sum.
void layernorm_forward(Ctx& ctx, const Output& out /*(N, C)*/, const NormStatistics& statistics, floatX* sum /*(N, C) or null*/,
                       const floatX* inp /*(N, C)*/, const floatX* add /*(N, C) or null*/, const NormParams& params, int N);
// True if the backward ops below can also sum dinp's columns (NormGrads), for rows of C numbers.
bool norm_sums_columns(int C);
// inp is the normalized input (the sum, if there was one). sets or adds dinp; adds grads.
void layernorm_backward(Ctx& ctx, floatX* dinp /*(N, C)*/, const NormGrads& grads, const floatX* dout /*(N, C)*/,
                        const floatX* inp /*(N, C)*/, const NormParams& params, const NormStatistics& statistics, int N,
                        Acc acc);
// y = (offset + weight) * x * rsqrt(mean(x^2) + eps)
void rmsnorm_forward(Ctx& ctx, const Output& out /*(N, C)*/, const NormStatistics& statistics, floatX* sum /*(N, C) or null*/,
                     const floatX* inp /*(N, C)*/, const floatX* add /*(N, C) or null*/, const NormParams& params, int N);
void rmsnorm_backward(Ctx& ctx, floatX* dinp /*(N, C)*/, const NormGrads& grads, const floatX* dout /*(N, C)*/,
                      const floatX* inp /*(N, C)*/, const NormParams& params, const NormStatistics& statistics, int N, Acc acc);
// RMSNorm of each of `rows` of the fused projection, in place: of every query or key head (C = HS), or of all query or all key
// heads together (C = NH HS, NKV HS). sets these rows, kept (their values before) and rstd.
void head_norm_forward(Ctx& ctx, floatX* qkv, floatX* kept /*(rows, C)*/, real* rstd /*(rows)*/, const NormParams& params,
                       const HeadRows& rows);
// dqkv: replaces the gradient of the norms' outputs by the gradient of their inputs, in place; adds grads.
void head_norm_backward(Ctx& ctx, floatX* dqkv, const NormGrads& grads, const floatX* kept /*(rows, C)*/,
                        const NormParams& params, const real* rstd /*(rows)*/, const HeadRows& rows);
// For one norm that spans heads of several tp ranks. Both set this rank's sums; added over the ranks they are
// params.means.sums: of x^2 for head_norm_forward, of dout (offset + weight) kept rstd for head_norm_backward.
void head_norm_squares(Ctx& ctx, real* sums /*(rows)*/, const floatX* qkv, int C, const HeadRows& rows);
void head_norm_products(Ctx& ctx, real* sums /*(rows)*/, const floatX* dqkv, const floatX* kept /*(rows, C)*/,
                        const NormParams& params, const real* rstd /*(rows)*/, const HeadRows& rows);

// ---- linear (matmul.h) ----------------------------------------------------------------------------------------------------
// out = inp weight^T (+ bias). sets out.
void linear_forward(Ctx& ctx, floatX* out /*(N, OC)*/, const floatX* inp /*(N, IC)*/, const floatX* weight /*(OC, IC)*/,
                    const floatX* bias /*(OC) or null*/, int N, int IC, int OC);
// dinp = dout weight. sets dinp.
void linear_backward_input(Ctx& ctx, floatX* dinp /*(N, IC)*/, const floatX* dout /*(N, OC)*/,
                           const floatX* weight /*(OC, IC)*/, int N, int IC, int OC);
// dweight (+)= dout^T inp; dbias (+)= column sums of dout. sets or adds both. In bf16 dweight is only set, and only where
// sets_bf16_gradients is true.
void linear_backward_weight(Ctx& ctx, const Elements& dweight /*(OC, IC)*/, real* dbias /*(OC) or null*/,
                            const floatX* dout /*(N, OC)*/, const floatX* inp /*(N, IC)*/, int N, int IC, int OC, Acc acc);
// The same for some rows of dweight, and as many columns of the gradient.
void linear_backward_weight_rows(Ctx& ctx, const Elements& dweight /*(rows, IC)*/, real* dbias /*(rows) or null*/,
                                 const Columns& dout /*(N, rows)*/, const floatX* inp /*(N, IC)*/, int N, int IC, int rows,
                                 Acc acc);

// Fused products: the second operation as a separate op would be memory-bound.
// pre = inp weight^T (+ bias), out = gelu(pre). sets out, pre.
void linear_gelu_forward(Ctx& ctx, floatX* out /*(N, OC)*/, floatX* pre /*(N, OC)*/, const floatX* inp /*(N, IC)*/,
                         const floatX* weight /*(OC, IC)*/, const floatX* bias /*(OC) or null*/, int N, int IC, int OC);
// dpre = (dout weight) * gelu'(pre). sets dpre.
void linear_gelu_backward_input(Ctx& ctx, floatX* dpre /*(N, IC)*/, const floatX* dout /*(N, OC)*/,
                                const floatX* weight /*(OC, IC)*/, const floatX* pre /*(N, IC)*/, int N, int IC, int OC);
// gate_up = inp weight^T (+ bias), out = silu(gate) up. sets out, gate_up.
void linear_swiglu_forward(Ctx& ctx, floatX* out /*(N, F)*/, floatX* gate_up /*(N, 2F)*/, const floatX* inp /*(N, IC)*/,
                           const floatX* weight /*(2F, IC)*/, const floatX* bias /*(2F) or null*/, int N, int IC, int F);
// dgate_up = activation_backward of dact = dout weight. sets dgate_up; dact is scratch.
void linear_swiglu_backward_input(Ctx& ctx, floatX* dgate_up /*(N, 2F)*/, floatX* dact /*(N, F)*/,
                                  const floatX* dout /*(N, OC)*/, const floatX* weight /*(OC, F)*/,
                                  const floatX* gate_up /*(N, 2F)*/, int N, int F, int OC);
// out = residual + (inp weight^T (+ bias)). CPUs round the product to floatX before adding it, GPUs do not. sets out, which
// must not be residual.
void linear_residual_forward(Ctx& ctx, floatX* out /*(N, OC)*/, const floatX* residual /*(N, OC)*/,
                             const floatX* inp /*(N, IC)*/, const floatX* weight /*(OC, IC)*/,
                             const floatX* bias /*(OC) or null*/, int N, int IC, int OC);
// qkv = inp weight^T (+ bias), then rotates queries and keys like rope_forward. sets qkv.
void linear_rope_forward(Ctx& ctx, floatX* qkv /*(N, NH + 2*NKV, HS)*/, const floatX* inp /*(N, IC)*/, const floatX* weight,
                         const floatX* bias /*or null*/, int IC, const Rope& rope, const AttentionShape& shape);

// Called before the first product. On a GPU: sets the file that keeps the algorithm of each product (path empty: none), and
// whether products missing from it are timed (else: the library's first suggestion). If they are timed without a file, a
// resumed run may have other bits. Not defined on CPUs, which choose a matrix unit instead (unit_choice.h).
void use_gemm_cache(Ctx& ctx, const std::string& path, bool autotune);
// Called after use_gemm_cache by each rank of a node, with a text that they share: the first rank to choose an algorithm writes
// it to the file, and the others use it. Null: this is the node's only rank.
void share_gemm_choices(Ctx& ctx, std::shared_ptr<SharedText> node);

// ---- low-rank adapters (lora.h) ---------------------------------------------------------------------------------------------
// wide = scale times a matrix with the adapters' matrices b as blocks on its diagonal, so that one product applies all of them.
// sets wide.
void lora_spread(Ctx& ctx, floatX* wide /*(experts OC, width)*/, const floatX* b /*(rows, rank)*/, const LoraRows& rows,
                 real scale);
// The gradient of lora_spread: db (+)= scale times the blocks on the diagonal of dwide. sets or adds db.
void lora_collect(Ctx& ctx, real* db /*(rows, rank)*/, const real* dwide /*(experts OC, width)*/, const LoraRows& rows,
                  real scale, Acc acc);

// ---- quantized weights (quantized.h) --------------------------------------------------------------------------------------
// Decodes n numbers, in whole blocks. sets out, whose address is a multiple of 16.
void dequantize_weights(Ctx& ctx, floatX* out /*(n)*/, const QuantizedWeights& w, size_t n);
// linear_forward with the decoded weight, with the same bits: rows are decoded one at a time while they are multiplied. Only
// if decodes_rows(ctx, N). Rows of out are `stride` elements apart. sets out.
void quantized_linear_forward(Ctx& ctx, floatX* out /*(N, OC)*/, int stride, const floatX* inp /*(N, IC)*/,
                              const QuantizedWeights& weight /*(OC, IC)*/, const floatX* bias /*(OC) or null*/, int N, int IC,
                              int OC);
bool decodes_rows(const Ctx& ctx, int N);

// ---- FP8 matrix products (fp8_linear.h) ------------------------------------------------------------------------------------
// A code c (fp8.h) represents the number c / scale. Each tensor has one scale. Activations and weights are e4m3. C and all
// sizes of a product are multiples of 16; so is N where codes are transposed.
// The codes of x, and of its transpose where `out` has room for it. sets the codes; *out.amax becomes at least the largest |x|.
void quantize(Ctx& ctx, const Codes& out /*(N, C)*/, const floatX* x /*(N, C)*/, int N, int C);
// *amax = max(*amax, largest finite |x|) of n elements, without codes.
void absolute_max(Ctx& ctx, float* amax, const floatX* x, size_t n);
// scale = fp8_scale(amax), inverse = 1 / scale; both 1 if amax is 0. sets both.
void set_scale(Ctx& ctx, float* scale, float* inverse, const float* amax, Fp8 format, int margin);
// Empty if this device supports FP8 products, else the reason: lets a run fail before anything is allocated.
std::string fp8_limits(const Ctx& ctx);
void transpose_codes(Ctx& ctx, uint8_t* transposed /*(C, N)*/, const uint8_t* codes /*(N, C)*/, int N, int C);

// The three products of a linear layer; both factors are contiguous along the summed dimension. Sums are fp32; `fast`: GPUs may
// use fewer bits.
// out = inp weight^T (+ bias). sets out.
void fp8_linear_forward(Ctx& ctx, floatX* out /*(N, OC)*/, const Fp8Matrix& inp /*(N, IC)*/,
                        const Fp8Matrix& weight /*(OC, IC)*/, const floatX* bias /*(OC) or null*/, int N, int IC, int OC,
                        bool fast);
// out = residual + (inp weight^T (+ bias)). CPUs round the product to floatX before adding it, GPUs do not, except in fp32.
// sets out, which must not be the residual.
void fp8_linear_residual_forward(Ctx& ctx, floatX* out /*(N, OC)*/, const Addends& addends, const Fp8Matrix& inp /*(N, IC)*/,
                                 const Fp8Matrix& weight /*(OC, IC)*/, int N, int IC, int OC, bool fast);
// dinp = dout weight. dout may have either format. sets dinp.
void fp8_linear_backward_input(Ctx& ctx, floatX* dinp /*(N, IC)*/, const Fp8Matrix& dout /*(N, OC)*/,
                               const Fp8Matrix& weight_transposed /*(IC, OC)*/, int N, int IC, int OC, bool fast);
// dweight (+)= dout^T inp. dout may have either format. sets or adds dweight, like linear_backward_weight.
void fp8_linear_backward_weight(Ctx& ctx, const Elements& dweight /*(OC, IC)*/, const Fp8Matrix& dout_transposed /*(OC, N)*/,
                                const Fp8Matrix& inp_transposed /*(IC, N)*/, int N, int IC, int OC, Acc acc, bool fast);
// The numbers that the codes of x represent before the inverse scale: decode(encode(x * scale)). floatX represents them
// exactly. out may be x. sets out.
void fp8_numbers(Ctx& ctx, floatX* out, const floatX* x, const FilledRows& rows, const float* scale, Fp8 format);
// absolute_max of the rows that have values.
void absolute_max_of_rows(Ctx& ctx, float* amax, const floatX* x, const FilledRows& rows);
// dbias += column sums of dout.
void bias_backward(Ctx& ctx, real* dbias /*(OC)*/, const floatX* dout /*(N, OC)*/, int N, int OC);

// ---- rotary positions (rope.h) --------------------------------------------------------------------------------------------
// Rotates the first `rotated` numbers of the NH query and NKV key heads of qkv in place, with rotate-half pairing
// (j, j + rotated/2); the others and the values are unchanged.
// backward rotates gradients by the opposite angle.
void rope_forward(Ctx& ctx, floatX* qkv /*(N, NH + 2*NKV, HS)*/, const Rope& rope, const AttentionShape& shape);
void rope_backward(Ctx& ctx, floatX* dqkv /*(N, NH + 2*NKV, HS)*/, const Rope& rope, const AttentionShape& shape);

// ---- attention (attention.h) ----------------------------------------------------------------------------------------------
// Causal flash attention with grouped queries: query head h uses key/value head h / (NH / NKV). Row t sees keys
// doc_start[t] .. t (doc_start null: 0 .. t). score = cap(scale q.k) + slope[h] (j - t) (slopes null: no ALiBi), where cap is
// the soft cap, if there is one. Dropout applies to the attention probabilities. Soft caps and dropout use slower kernels.
// lse is the natural log-sum-exp of a row's scores. No T x T matrix is stored. sets out, lse.
void attention_forward(Ctx& ctx, floatX* out /*(B, T, NH, HS)*/, real* lse /*(B, NH, T)*/,
                       const floatX* qkv /*(B, T, NH + 2*NKV, HS)*/, const AttentionMask& mask, const AttentionShape& shape);
// Elements of attention_backward's dq_sums; 0 where no kernel uses them.
size_t attention_sums(const Ctx& ctx, const AttentionShape& shape);
// Bytes of the context's own memory that attention uses, forward and backward; 0 on a GPU.
size_t attention_scratch(const Ctx& ctx, const AttentionShape& shape);
// sets all of dqkv. dq_sums: null, or attention_sums() elements in which the queries' gradients are summed in no fixed order:
// less work, but the last bits differ from run to run.
void attention_backward(Ctx& ctx, floatX* dqkv /*(B, T, NH + 2*NKV, HS)*/, const floatX* dout /*(B, T, NH, HS)*/,
                        const AttentionActs& acts, const AttentionMask& mask, const AttentionShape& shape,
                        real* dq_sums /*or null*/);
// attention_backward, then rope_backward: gradients of queries and keys before their rotation.
void attention_rope_backward(Ctx& ctx, floatX* dqkv /*(B, T, NH + 2*NKV, HS)*/, const floatX* dout /*(B, T, NH, HS)*/,
                             const AttentionActs& acts, const AttentionMask& mask, const Rope& rope,
                             const AttentionShape& shape, real* dq_sums /*or null*/);
// Attention of some rows of sequences, whose keys and values are apart (AttentionShape). sets out, lse.
void attention_rows_forward(Ctx& ctx, floatX* out /*(B, queries, NH, HS)*/, real* lse /*(B, NH, queries)*/,
                            const floatX* qkv /*(B, queries, NH + 2*NKV, HS)*/, const floatX* kv /*(B, T, 2*NKV, HS)*/,
                            const AttentionMask& mask, const AttentionShape& shape);
// sets dkv, and the queries' part of dqkv.
void attention_rows_backward(Ctx& ctx, floatX* dqkv /*(B, queries, NH + 2*NKV, HS)*/, floatX* dkv /*(B, T, 2*NKV, HS)*/,
                             const floatX* dout /*(B, queries, NH, HS)*/, const AttentionActs& acts, const AttentionMask& mask,
                             const AttentionShape& shape);
// One new token in each of B rows (T is 1), of sequences of any lengths: writes its key and value into its sequence's cache at
// row t and attends as the mask says. The bits of a row do not depend on the others. sets out.
void attention_decode(Ctx& ctx, floatX* out /*(B, NH, HS)*/, const AttentionCache& cache,
                      const floatX* qkv /*(B, NH + 2*NKV, HS)*/, const DecodeMask& mask, const AttentionShape& shape);
// Attention sinks: a learned score per query head takes part in the softmax of its rows, without a value. Changes the results
// of attention_forward in place, to which attention_backward is then applied.
void sinks_forward(Ctx& ctx, floatX* out /*(B, T, NH, HS)*/, real* lse /*(B, NH, T)*/, const floatX* sinks /*(NH)*/,
                   const AttentionShape& shape);
// adds to dsinks. acts include the sinks.
void sinks_backward(Ctx& ctx, real* dsinks /*(NH)*/, const floatX* dout /*(B, T, NH, HS)*/, const AttentionActs& acts,
                    const floatX* sinks /*(NH)*/, const AttentionShape& shape);

// Empty if these ops support heads of this size, else the reason: lets a model be refused before anything is allocated.
std::string attention_limits(int HS);

// ---- activations, residual, dropout (mlp.h) -------------------------------------------------------------------------------
// out = activation(inp), elementwise; for gated activations inp is (N, 2F) with rows [gate | up]. sets. Codes of gradients may
// have either format, and be transposed.
void activation_forward(Ctx& ctx, const Output& out /*(N, F)*/, const floatX* inp /*(N, F) or (N, 2F)*/, int N, int F,
                        Activation activation);
void activation_backward(Ctx& ctx, const Output& dinp /*as inp*/, const floatX* dout /*(N, F)*/, const floatX* inp, int N,
                         int F, Activation activation);
// out = a + b. sets.
void residual_forward(Ctx& ctx, floatX* out, const floatX* a, const floatX* b, size_t n);
// x *= factor, rounded once. sets.
void scale_elements(Ctx& ctx, floatX* x, size_t n, real factor);
// out = inp / (1 - rate) where an element is kept, else 0 (dropout.h). out may be inp. The backward op is the same. sets.
void dropout_forward(Ctx& ctx, floatX* out, const floatX* inp, size_t n, const Dropout& dropout);

// ---- mixtures of experts (experts.h; train_gpt.cu has the whole layer) ----------------------------------------------------
// logits = inp weight^T (+ bias), in fp32. sets.
void router_logits(Ctx& ctx, real* logits /*(N, E)*/, const floatX* inp /*(N, C)*/, const floatX* weight /*(E, C)*/,
                   const floatX* bias /*(E) or null*/, const MixtureShape& shape, int C);
// Chooses the experts of each row from r.logits, and sorts the choices by expert. sets all of r but the logits.
void route(Ctx& ctx, const Routing& r, const MixtureShape& shape, const RouterRule& rule);
// The second half of route, from r.experts, for experts [first, first + shape.E) of a mixture: choices of others get no slot.
void sort_choices(Ctx& ctx, const Routing& r, const MixtureShape& shape, int first);
// The gradient of the logits: through the weights, and of the two losses
//   balance  sum over sequences of E / (K T^2) sum_e counts_e sum_t p_te (Fedus et al., 2021, "Switch Transformers"), where p
//            are the scores, divided by a row's sum if they are sigmoids; counts are constants
//   z        sum over rows of (log sum_e exp(logit_e))^2
// each times its factor. Weights of dropped choices have no gradient. sets dlogits, adds to sums.
void router_backward(Ctx& ctx, real* dlogits /*(N, E)*/, double* sums /*(RouterSums::size(E)) or null*/,
                     const real* drouting /*(N, K)*/, const Routing& r, const MixtureShape& shape, const RouterRule& rule,
                     const RouterLossFactors& factors);
// Both backward products of router_logits. dinp += dlogits weight; dweight (+)= dlogits^T inp.
void router_backward_input(Ctx& ctx, floatX* dinp /*(N, C)*/, const real* dlogits /*(N, E)*/, const floatX* weight /*(E, C)*/,
                           const MixtureShape& shape, int C);
void router_backward_weight(Ctx& ctx, real* dweight /*(E, C)*/, const real* dlogits /*(N, E)*/, const floatX* inp /*(N, C)*/,
                            const MixtureShape& shape, int C, Acc acc);
// adds the column sums of dlogits to dbias.
void router_backward_bias(Ctx& ctx, real* dbias /*(E)*/, const real* dlogits /*(N, E)*/, const MixtureShape& shape);

// Linear layers of E experts, each with its own weight and bias, on the rows of its slots: the products of matmul.h per expert,
// with the same rounding. Rows after the last slot are neither read nor set. sets or adds.
void expert_linear_forward(Ctx& ctx, floatX* out /*(slots, OC)*/, const ExpertRows& inp /*(slots, IC)*/,
                           const floatX* weight /*(E, OC, IC)*/, const ExpertBias& bias, const ExpertGroups& groups, int IC,
                           int OC, Acc acc);
void expert_linear_backward_input(Ctx& ctx, floatX* dinp /*(slots, IC)*/, const ExpertRows& dout /*(slots, OC)*/,
                                  const floatX* weight /*(E, OC, IC)*/, const ExpertGroups& groups, int IC, int OC, Acc acc);
// For some rows of the gradient (E OC, IC): of whole experts, or of one expert. An expert without slots has a gradient of zero.
// sets or adds.
void expert_linear_backward_weight(Ctx& ctx, const StackedRows& dweight /*(rows, IC)*/, const ExpertRows& dout /*(slots, OC)*/,
                                   const ExpertRows& inp /*(slots, IC)*/, const ExpertGroups& groups, int IC, int OC, Acc acc);
// The same products in FP8: both factors are numbers of codes (fp8_numbers), and sums are multiplied by both inverse scales
// before the bias is added. forward and backward_input set.
void fp8_expert_linear_forward(Ctx& ctx, floatX* out /*(slots, OC)*/, const ExpertRows& inp /*(slots, IC)*/,
                               const floatX* weight /*(E, OC, IC)*/, const Fp8Scales& scales, const ExpertBias& bias,
                               const ExpertGroups& groups, int IC, int OC);
void fp8_expert_linear_backward_input(Ctx& ctx, floatX* dinp /*(slots, IC)*/, const ExpertRows& dout /*(slots, OC)*/,
                                      const floatX* weight /*(E, OC, IC)*/, const Fp8Scales& scales, const ExpertGroups& groups,
                                      int IC, int OC);
void fp8_expert_linear_backward_weight(Ctx& ctx, const StackedRows& dweight /*(rows, IC)*/,
                                       const ExpertRows& dout /*(slots, OC)*/, const ExpertRows& inp /*(slots, IC)*/,
                                       const Fp8Scales& scales, const ExpertGroups& groups, int IC, int OC, Acc acc);
// The gradient of ExpertBias: dbias += the sum of each expert's rows of dout, times their factors.
void expert_bias_backward(Ctx& ctx, real* dbias /*(E, OC)*/, const ExpertRows& dout /*(slots, OC)*/, const ExpertBias& bias,
                          const ExpertGroups& groups, int OC);
// drouting of the choice of each slot += its row of dout times the expert's bias.
void expert_bias_backward_routing(Ctx& ctx, real* drouting /*(N, K)*/, const ExpertRows& dout /*(slots, OC)*/,
                                  const ExpertBias& bias, const ExpertGroups& groups, int OC);
// out = weight of the slot's choice times activation(inp), so that the sum over a row's slots of the next product is the
// mixture's output. sets out.
void expert_activation_forward(Ctx& ctx, floatX* out /*(slots, F)*/, const floatX* inp /*(slots, F) or (slots, 2F)*/,
                               const Routing& r, const MixtureShape& shape, int F, Activation activation);
// sets dinp, and drouting of every choice that has a slot.
void expert_activation_backward(Ctx& ctx, floatX* dinp /*as inp*/, real* drouting /*(N, K)*/, const floatX* dout /*(slots, F)*/,
                                const floatX* inp, const Routing& r, const MixtureShape& shape, int F, Activation activation);
// dropout_forward for slots: slot s has the mask of row place.row(s). (place.x is not used.) sets or adds.
void expert_dropout(Ctx& ctx, floatX* out /*(slots, columns)*/, const floatX* inp /*(slots, columns)*/, const ExpertRows& place,
                    const ExpertGroups& groups, int columns, const Dropout& dropout, Acc acc);
// out = the sum of a row's slots, in the order of its choices, rounded once; 0 if it has none. sets out.
void expert_combine(Ctx& ctx, floatX* out /*(N, C)*/, const floatX* inp /*(slots, C)*/, const Routing& r,
                    const MixtureShape& shape, int C);
// The same for numbers of type real.
void expert_combine_real(Ctx& ctx, real* out /*(N, columns)*/, const real* inp /*(slots, columns)*/, const Routing& r,
                         const MixtureShape& shape, int columns);
// The ranks of each row's experts, if rank i has experts i * each to (i + 1) * each - 1: different ones, in ascending order,
// then -1. An expert of -1 is skipped. ranks.K >= the number of different ranks. sets out.
void ranks_of_experts(Ctx& ctx, int* out /*(N, ranks.K)*/, const int* experts /*(N, K)*/, const MixtureShape& ranks, int K,
                      int each);
// The experts of choices that have a slot; -1 for dropped ones. sets out.
void kept_experts(Ctx& ctx, int* out /*(N, K)*/, const Routing& r, const MixtureShape& shape);
// out row i = inp row choices[i] / K, for rows of any type. sets out.
void gather_rows(Ctx& ctx, void* out /*(n, row_bytes)*/, const void* inp, const int* choices /*(n)*/, int K, int n,
                 size_t row_bytes);

// ---- loss (loss.h) --------------------------------------------------------------------------------------------------------
// Fused classifier over rows of logits: logZ = log sum_{i<V} exp(x_i), loss = logZ - x_target, z = z_coef * logZ^2, and, if
// write_gradient, the logits are overwritten with dlogits = loss_scale * weight * (p_i (1 + 2 z_coef logZ) - [i = target]),
// where weight is the row's, of any sign, or 1; columns V .. Vp-1 are padding: never read, gradient 0. A target < 0 is masked:
// loss, z and gradient 0. No softmax is stored. With a soft cap, x_i is the capped logit, and the gradient is with respect to
// the uncapped logit.
// sets losses, which are unscaled.
void classifier(Ctx& ctx, floatX* logits /*(N, Vp)*/, const RowLosses& losses, const int* targets /*(N)*/, int N,
                const VocabularyShard& shard, const LossConstants& constants);
// classifier for one shard of the logits: logZ and the target's logit come from the statistics of all shards.
void classifier_shard(Ctx& ctx, floatX* logits /*(N, Vp)*/, const RowLosses& losses, const int* targets /*(N)*/,
                      const real* statistics /*(shards, 2, N)*/, int shards, int N, const VocabularyShard& shard,
                      const LossConstants& constants);
// One shard's log-sum-exp of its columns (-infinity if it has none), and the target's logit, 0 if it is in another shard. sets.
void classifier_statistics(Ctx& ctx, real* statistics /*(2, N)*/, const floatX* logits /*(N, Vp)*/, const int* targets /*(N)*/,
                           int N, const VocabularyShard& shard, real softcap);

// Adds the contributions of rows with a target >= 0 to *sums; a NaN lse makes lse_max NaN. Does not wait for the result: *sums
// is in the backend's memory.
void loss_sums(Ctx& ctx, LossSums* sums, const RowLosses& losses, const int* targets /*(N)*/, int N);

// ---- optimizer (optimizer.h, reduce.h) ------------------------------------------------------------------------------------
// Sum of squares in fixed blocks: the same bits for any number of threads. The blocks' sums are added in double.
double sum_of_squares(Ctx& ctx, const Elements& x, size_t n);
// Adds the sum of squares to *sum, which is in the backend's memory; does not wait for the result.
void add_squares(Ctx& ctx, double* sum, const Elements& x, size_t n);
// The sum of 32-bit words, each times an odd number that depends on its index, modulo 2^64 (memory_check.h). first: index of
// x[0].
uint64_t word_sum(Ctx& ctx, const void* x, size_t n, size_t first);
// AdamW (Loshchilov & Hutter, 2019; decoupled decay, bias correction): g = grad_scale * grad;
// m = b1 m + (1-b1) g; v = b2 v + (1-b2) g^2; w -= lr (m/c1 / (sqrt(v/c2) + eps) + wd w),
// with m = exp_avg, v = exp_avg_sq, c1 = 1 - b1^step, c2 = 1 - b2^step. In bf16 param and lower are the halves of fp32 weights
// w (math.h); else param is w, and lower null. m and v in bf16 are rounded as in elements.h, after w has been updated; then all
// elements belong to one tensor, the one of `rounding`.
void adamw(Ctx& ctx, floatX* param, LowerHalf* lower /*or null*/, const Elements& exp_avg, const Elements& exp_avg_sq,
           const Elements& grad, size_t n, const AdamW& constants, const Rounding& rounding);
// Lion (Chen et al., 2023, "Symbolic Discovery of Optimization Algorithms", arXiv 2302.06675): g = grad_scale * grad;
// w -= lr (sign(b1 m + (1-b1) g) + wd w); m = b2 m + (1-b2) g, with m = exp_avg, sign(0) = 0, and weights and rounding as in
// adamw. eps and step of the constants are not used.
void lion(Ctx& ctx, floatX* param, LowerHalf* lower /*or null*/, const Elements& exp_avg, const Elements& grad, size_t n,
          const AdamW& constants, const Rounding& rounding);
// average += (1 - keep) (w - average) for the fp32 weights w of param and lower.
void average_weights(Ctx& ctx, real* average /*(n)*/, const floatX* param, const LowerHalf* lower /*or null*/, size_t n,
                     real keep);
// Exchanges the weights w of param and lower, exactly, with `other`.
void swap_weights(Ctx& ctx, real* other /*(n)*/, floatX* param, LowerHalf* lower /*or null*/, size_t n);
// sum (+)= x, for elements of one tensor. sets: rounded to the nearest bf16; adds: the sum is rounded once, as in elements.h.
void accumulate(Ctx& ctx, bf16* sum /*(n)*/, const real* x /*(n)*/, size_t n, Acc acc, const Rounding& rounding);
// sum (+)= x
void accumulate_real(Ctx& ctx, real* sum /*(n)*/, const real* x /*(n)*/, size_t n, Acc acc);

// ---- Muon (optimizer.h; optimizer/muon.h has the whole update) --------------------------------------------------------------
// g = grad_scale * grad; m = momentum m + (1 - momentum) g, with m = exp_avg; update = (1 - momentum) g + momentum m
// (Nesterov). sets exp_avg and update. exp_avg in bf16 is rounded as in elements.h; then the elements belong to the tensor of
// `rounding`.
void muon_momentum(Ctx& ctx, floatX* update /*(n)*/, const Elements& exp_avg, const Elements& grad, size_t n,
                   const MuonMomentum& constants, const Rounding& rounding);
// x /= max(sqrt(*squares), 1e-7). *squares is in the backend's memory.
void divide_by_norm(Ctx& ctx, floatX* x, size_t n, const double* squares);
// square = a I + b gram + c square. sets square.
void newton_schulz_polynomial(Ctx& ctx, floatX* square /*(n, n)*/, const floatX* gram /*(n, n)*/, int n);
// NorMuon: v = beta2 v + (1 - beta2) (mean of the row's squares); rows are divided by sqrt(v) + 1e-10, then everything is
// scaled to the norm of an orthogonal matrix, sqrt(min(rows, cols)). sets v = second_moment and x.
void normalize_neurons(Ctx& ctx, floatX* x /*(rows, cols)*/, real* second_moment /*(rows)*/, int rows, int cols, real beta2);
// w = (1 - decay) w - rate * update, for weights w as in adamw.
void apply_update(Ctx& ctx, floatX* param, LowerHalf* lower /*or null*/, const floatX* update, size_t n, real rate, real decay);

// param[i] and lower[i] = element first + i of the weights that w describes. lower may be null.
void initialize_weights(Ctx& ctx, floatX* param, LowerHalf* lower, const InitialWeights& w, size_t first, size_t n);

// ---- communication (comm.h) -----------------------------------------------------------------------------------------------
// All ranks of a Comm call the same operations on it in the same order. E is floatX, real, or for all_gather uint8_t. With one
// rank, operations return at once and copy only if they are not in place. Results have the same bits on all ranks and in every
// run.
class Comm;     // a group of ranks for collectives or, with a Route, for messages; Comm() contains only this rank
class Pending;  // an operation that was started; finish() must follow

// Sums over the ranks, in place.
template <class E>
void all_reduce(Ctx& ctx, Comm& comm, E* x, size_t n);
// The elementwise maximum over the ranks, of n floats in the backend's memory, in place. NaNs are ignored.
void all_reduce_max(Ctx& ctx, Comm& comm, float* x, size_t n);
// Bytes of memory, other than the operands, in which a sum over `size` ranks receives the others' contributions to this rank's
// block of the sum, of so many bytes; 0 on GPUs (plan/nccl_memory.h).
size_t contribution_bytes(int size, size_t block);
// Gathers every rank's part, in the order of ranks. mine may be out + rank * n.
template <class E>
void all_gather(Ctx& ctx, Comm& comm, E* out /*(size, n)*/, const E* mine /*(n)*/, size_t n);
// Sets out to this rank's part of the sums over the ranks. out may be all + rank * n.
template <class E>
void reduce_scatter(Ctx& ctx, Comm& comm, E* out /*(n)*/, const E* all /*(size, n)*/, size_t n);

// Rows of row_bytes each: rows sent[r] .. sent[r + 1] - 1 of `in` go to rank r, and rows received[r] .. received[r + 1] - 1 of
// out come from it. Every rank knows the numbers of rows from all others.
void all_to_all(Ctx& ctx, Comm& comm, void* out, const std::vector<int>& received, const void* in, const std::vector<int>& sent,
                size_t row_bytes);

// Asynchronous collectives: they start after the ops now on ctx and overlap with later ones. Until finish(), do not use a
// buffer that they set, and do not write one that they read.
template <class E>
Pending start_all_gather(Ctx& ctx, Comm& comm, E* out /*(size, n)*/, const E* mine /*(n)*/, size_t n);
template <class E>
Pending start_reduce_scatter(Ctx& ctx, Comm& comm, E* out /*(n)*/, const E* all /*(size, n)*/, size_t n);
// The same, in place.
template <class E>
Pending start_reduce_scatter(Ctx& ctx, Comm& comm, E* all /*(size, n)*/, size_t n);  // part `rank` becomes the sum
template <class E>
Pending start_all_gather(Ctx& ctx, Comm& comm, E* all /*(size, n)*/, size_t n);  // part `rank` is there already
// Reduce to and broadcast from one rank, `root`, also asynchronous: its x becomes the sum over the ranks, and the others' x is
// undefined; x of all ranks becomes a copy of the root's.
template <class E>
Pending start_reduce(Ctx& ctx, Comm& comm, E* x, size_t n, int root);
template <class E>
Pending start_broadcast(Ctx& ctx, Comm& comm, E* x, size_t n, int root);
// Later ops on ctx see the result.
void finish(Ctx& ctx, Pending& pending);

// Point-to-point messages. A send never waits for its receive; after finish(), x may be written again. recv: later ops on ctx
// see x. Messages between two ranks arrive in the order in which they were sent; tags must agree, and only serve to detect
// errors. A rank sends to its successor on the Comm's Route and receives from its predecessor.
Pending start_send(Ctx& ctx, Comm& comm, const floatX* x, size_t n, int peer, int tag);
void recv(Ctx& ctx, Comm& comm, floatX* x, size_t n, int peer, int tag);
// Called between other work, so that sends that were started progress without waiting for finish().
void progress(Ctx& ctx, Comm& comm);
