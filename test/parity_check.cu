// Compares every layout of ranks with one rank: the same gradients tensor by tensor, the same losses and weights over a
// run.
//   parity_check DIR reference                  one rank: writes the expected results to DIR
//   mpirun -n N parity_check DIR [all|main|some]  every layout of N ranks, the main ones, or some of these: all for the
//                                               first model; for each other one a sixth, from 4 ranks on a twelfth, by turns
// Small models of several families with many options: accumulation, clipping, z-loss, masked targets, documents, uneven
// layers, a padded vocabulary, tied and untied heads, all recompute policies, grouped queries (with more tensor-parallel
// ranks than key/value heads where N allows). Prints `ok: ` or `FAILED: ` for each model and layout.
//
// Tolerance. Layouts add the same numbers in different orders. An element of a gradient is a sum over a few hundred rows of
// products that passed through eight layers: the error is some roundings of the tensor's largest element. For the keys'
// bias it is relative to the queries' bias: attention ignores a common part of all keys, except through rotation and norms,
// so terms of that size cancel. Allowed are 48 u with u = 2^-24 in fp32 (maximum seen: 13); in bf16, where activations are
// rounded (at tensor-parallel sums in other places than on one rank), 8 roundings of 2^-8; 16 if a norm follows each
// branch, which makes the branch and its roundings as large as the residual stream, otherwise the larger of the two
// (maximum seen: 11), or if an LSTM computes virtual tokens, as the gradient of its recurrent weights accumulates all their
// roundings (14). Losses are means of many rows: 8 u (0.2) and 2 roundings after each step of the run; norms depend on
// later gradients: 64 u (8). AdamW divides gradients by their own size, so if these are tiny a weight moves by another
// fraction of lr; weights differ by 0.002 of the largest (0.0003), in bf16 by 0.2, and only matrices are compared: a key
// bias has only rounding errors as gradient.
#include "programs.h"
#include "trainer.h"

namespace parity_check {
namespace {

#ifdef BACKEND_EMU  // runs every thread of every kernel one after another
constexpr bool few = true;
#else
constexpr bool few = false;
#endif

struct Layout {
    int tp, pp, vpp, ep;
    bool sequence_parallel;
    int zero, cp;
    bool exchanges_heads = false;
    bool all_to_all() const { return ep > 1 && (zero + pp) % 2; }
    std::string text(int world) const {
        std::string s = format("dp %d, tp %d, pp %d", world / tp / pp / cp, tp, pp);
        if (vpp > 1) s += format(", vpp %d", vpp);
        if (tp > 1) s += sequence_parallel ? ", sequence parallel" : ", without sequence parallelism";
        if (ep > 1) s += format(", ep %d%s", ep, all_to_all() ? " all to all" : "");
        if (cp > 1) s += format(", cp %d%s", cp, exchanges_heads ? " all to all" : "");
        if (world / tp / pp > 1) s += format(", zero %d", zero);
        return s;
    }
};

constexpr bool fp32 = sizeof(floatX) == 4;

struct Case {
    std::string name;
    ModelConfig c;
    bool documents, rampup;
    std::string optimizer = "adamw";
    bool pairs = false;  // pairs of answers, for DPO
};

// Whether the model's sequences can be cut over ranks (check_context_parallel).
bool can_cut(const Case& k) { return !k.c.virtual_tokens.on() && !(k.c.lora.on() && k.c.mixture.on()); }

std::vector<Layout> layouts(int world, const std::string& what, size_t model, const Case& k) {
    if (what == "reference") return {{1, 1, 1, 1, true, 1, 1}};
    const int experts = k.c.mixture.on() ? k.c.mixture.experts : 0;
    std::vector<Layout> found;
    const size_t one_of = world == 2 ? 6 : 12;  // with "some", of a model other than the first
    size_t n_main = 0;
    for (const int tp : {1, 2, 4, 8})
        for (const int pp : {1, 2, 4, 8})
            for (const int vpp : {1, 2})
                for (const bool sp : {true, false})
                    for (const int zero_and_ep : {11, 21, 31, 1, 12, 22, 32, 2, 14, 24, 4}) {
                        const int zero = zero_and_ep / 10, ep = zero_and_ep % 10;
                        if (world % (tp * pp) || tp > 4 || pp > 4) continue;
                        const int dp = world / (tp * pp);
                        if (dp % ep || (ep > 1 && (!experts || experts % ep))) continue;
                        if ((vpp > 1 && pp == 1) || (!sp && tp == 1) || (zero != 1 && dp == 1)) continue;
                        if (zero == 3 && k.c.frozen()) continue;
                        const bool main = sp && zero && vpp == (pp == 2 && tp == 1 ? 2 : 1);
                        if ((what != "all" && !main) || pp * vpp > (few ? 4 : 8)) continue;
                        for (const int cp : {1, 2, 4, 8}) {
                            if (dp % cp || (cp > 1 && (!can_cut(k) || cp % ep || (!zero && what != "all")))) continue;
                            if (what == "some" && model > 0 && n_main++ % one_of != model % one_of) continue;
                            const bool can_exchange = cp > 1 && LocalSizes(k.c, {tp, 0}).NKVl % cp == 0;
                            const bool exchanges = can_exchange && (zero + tp + model) % 2;
                            found.push_back({tp, pp, vpp, ep, sp, zero, cp, exchanges});
                            if (what == "all" && can_exchange) found.push_back({tp, pp, vpp, ep, sp, zero, cp, !exchanges});
                        }
                    }
    return found;
}

std::vector<Case> cases() {
    std::vector<Case> all;
    const auto add = [&](const char* name, const char* family, int NKV, bool tied, bool documents,
                         bool rampup) -> ModelConfig& {
        ModelConfig c;
        set_family(c, family);
        c.L = few ? 4 : 8;
        c.C = 64;
        c.NH = 4;
        c.NKV = NKV;
        c.F = 96;
        c.T = 16;
        c.V = 119;
        c.tied = tied;
        pad_vocabulary(c, 64);  // 128: with tp 4 the last rank's shard is nearly all real, with tp 8 partly padding
        all.push_back({name, c, documents, rampup});
        return all.back().c;
    };
    add("gpt2", "gpt2", 4, true, false, false);
    add("llama", "llama", 2, false, true, !few);
    if (!few) add("olmo2, lion", "olmo2", 2, false, false, false), all.back().optimizer = "lion";
    if (fp32) {  // in bf16 a layout's roundings may change which experts a row chooses
        add("llama, mixture", "llama", 2, false, true, !few).mixture = {6, 2};
        ModelConfig& biased = add("llama, mixture with biases", "llama", 2, false, true, false);
        biased.mixture = {4, 3};
        biased.activation = Activation::clamped_swiglu;
        biased.sinks = biased.mlp_bias = true;
        ModelConfig& shared =
            add("olmo2, mixture with a shared expert, biases, dense layers, normuon", "olmo2", 2, false, false, false);
        shared.mlp_bias = true;
        MixtureConfig& mixture = shared.mixture;
        mixture = {4, 3};
        mixture.normalize = false;
        mixture.width = 48;
        mixture.shared = 40;
        mixture.shared_gate = true;
        mixture.dense_layers = {0, 2};
        all.back().optimizer = "normuon";
    }
    add("olmo2, normuon", "olmo2", 2, false, false, false).rope_scaling = {RopeScaling::Type::yarn, 4, 16};
    all.back().optimizer = "normuon";
    const auto adapt = [](ModelConfig& c) {
        c.lora.rank = 4;
        c.lora.alpha = 1;
        c.lora.dropout = 0.2;
        c.lora.modules = lora_modules(c, {"all"});
    };
    adapt(add("llama, adapters", "llama", 2, false, false, false));
    if (fp32) {
        ModelConfig& c = add("mixtral, adapters", "mixtral", 2, false, false, false);
        c.mixture.experts = 5;
        adapt(c);
    }
    add("llama, pairs of answers", "llama", 2, false, false, false);
    all.back().pairs = true;
    VirtualTokensConfig& lstm = add("bloom, virtual tokens of an LSTM", "bloom", 4, true, false, false).virtual_tokens;
    lstm.count = 4;
    lstm.encoder_width = 8;
    lstm.lstm = true;
    ModelConfig& encoded = add("llama, encoded virtual tokens", "llama", 2, false, false, false);
    encoded.embedding_dropout = 0.1;
    encoded.virtual_tokens.count = 8;
    encoded.virtual_tokens.encoder_width = 24;
    ModelConfig& many = add("many options", "gemma3_text", 2, true, true, false);
    many.window = 5;
    many.full_interval = 2;
    many.local_rope_base = 100;
    many.attention_softcap = 3;
    many.logit_softcap = 4;
    many.embedding_scale = 8;
    many.head_size = 8;
    many.sinks = many.qkv_bias = many.proj_bias = many.mlp_bias = many.head_bias = true;
    many.embedding_dropout = many.attention_dropout = many.hidden_dropout = 0.1;
    if (few) return all;
    ModelConfig& neox = add("gpt_neox", "gpt_neox", 4, false, false, false);
    neox.nope_interval = 4;
    neox.parametrization = {4, 2, 2};  // tensors of a bucket have different factors
    neox.hidden_dropout = 0.1;
    add("bloom", "bloom", 4, true, true, false);
    add("llama tied", "llama", 1, true, false, true);
    return all;
}

TrainOptions options(const Case& k, const Layout& l, const std::string& data) {
    TrainOptions o;
    o.tensor_model_parallel_size = l.tp;
    o.pipeline_model_parallel_size = l.pp;
    o.expert_model_parallel_size = l.ep;
    o.context_parallel_size = l.cp;
    o.context_parallel_method = l.exchanges_heads ? "alltoall" : "allgather";
    o.num_virtual_stages_per_pipeline_rank = l.vpp;
    o.no_sequence_parallel = !l.sequence_parallel;
    o.zero = l.zero;
    o.seq_length = k.c.room();
    o.prompt_tokens = k.c.virtual_tokens.count;
    o.micro_batch_size = few && !k.c.virtual_tokens.lstm ? 1 : 2;  // with fewer rows its roundings have more weight
    o.global_batch_size = o.micro_batch_size * (few ? 4 : 8);
    o.train_iters = few ? 2 : 6;
    o.lr = k.optimizer == "lion" ? 1e-4 : 1e-3;  // a sign that a rounding decides moves a weight by 2 lr
    o.lr_warmup_iters = few ? 1 : 2;
    o.z_loss_strength = k.pairs ? 0 : 1e-3;
    if (k.pairs) o.dpo_beta = 0.1;
    if (k.c.mixture.on()) o.moe_aux_loss_coeff = o.moe_z_loss_coeff = 0.01;
    o.clip_grad = 1.0;
    o.weight_decay = 0.1;
    o.optimizer = k.optimizer;
    o.ddp_bucket_size = 20000;  // for several buckets
    o.seed = 3;
    o.data_path = {k.pairs ? data + "-pairs" : data};
    o.reset_position_ids = o.reset_attention_mask = o.eod_mask_loss = k.documents;
    if (k.rampup)  // 3 steps of 8, with 4 micro-batches in total, then 3 of 16
    {
        o.rampup_batch_size = {"8", "8", "24"};
        o.train_samples = 3 * 8 + 3 * 16;
        o.train_iters = 0;
    }
    return o;
}

void write_data(const std::string& prefix, int V) {
    TokenDatasetWriter writer(prefix, V);
    uint32_t x = 12345;
    for (int document = 0; document < 150; document++) {
        std::vector<int> tokens;
        x = x * 1664525u + 1013904223u;
        const int n = 5 + (int)(x >> 27);
        for (int i = 0; i < n; i++) {
            x = x * 1664525u + 1013904223u;
            tokens.push_back(1 + (int)((x >> 8) % (uint32_t)(V - 1)));
        }
        tokens.push_back(0);  // end of document
        writer.add(tokens.data(), tokens.size());
        writer.end_document();
    }
    writer.commit();
}

// A sample of 16 tokens has one or two pairs.
void write_pairs(const std::string& prefix, int V) {
    TokenDatasetWriter writer(prefix, {"hash", "tokenizer", V}, {}, "plain", true);
    uint32_t x = 999;
    const auto below = [&](int n) {
        x = x * 1664525u + 1013904223u;
        return (int)((x >> 8) % (uint32_t)n);
    };
    for (int pair = 0; pair < 120; pair++) {
        std::vector<int> prompt;
        for (int n = 1 + below(3); n > 0; n--) prompt.push_back(1 + below(V - 1));
        for (int answer = 0; answer < 2; answer++) {
            std::vector<int> tokens = prompt;
            for (int n = 1 + below(5); n > 0; n--) tokens.push_back(1 + below(V - 1));
            std::vector<uint8_t> learned(tokens.size(), 1);
            std::fill_n(learned.begin(), prompt.size(), 0);
            writer.add(tokens.data(), tokens.size(), learned.data());
            writer.end_document();
        }
    }
    writer.commit();
}

// One model with one layout: its results, as whole tensors in files with this prefix.
struct Results {
    std::vector<double> losses, norms;
};
class Run {
public:
    Run(World& world, const Case& k, const Layout& l, const std::string& data)
        : world_(world),
          o_(options(k, l, data)),
          ctx_(1, world.local_rank()),
          ranks_(join_groups(ctx_, world, layout_of(o_), k.c)),
          m_(k.c, ranks_,
             split_layers(k.c.L, l.pp * l.vpp, l.vpp > 1, false,
                          l.pp == 2 && l.vpp == 1 ? std::vector<int>{1, k.c.L - 1} : std::vector<int>{})),
          schedule_(make_schedule(o_, ranks_->mesh.samples.size)),
          data_([&] {
              DataOptions d = data_options(o_, k.c, nullptr, DataSplit::whole, schedule_.total_samples);
              d.eod = 0;
              return d;
          }()),
          trainer_(ctx_, m_, o_, schedule_, data_, {}) {
        m_.optimizer = &optimizer_row(o_.optimizer);
        m_.muon.recipe = muon_recipe(o_);
        m_.preference = preference_of(o_);
        if (k.pairs) {
            std::vector<double> log_p;
            for (int64_t i = 0; i < 2 * data_.n_pairs(); i++) log_p.push_back(-(double)(12 + i * 7 % 11));
            data_.set_reference(log_p);
        }
        m_.all_to_all = l.all_to_all();
        plan_memory(m_, (Recompute)((l.tp + l.pp + l.vpp + l.ep + l.cp - 2) % 4), o_.micro_batch_size, o_.seq_length, 13, {},
                    schedule_.micro_batches());
        allocate(ctx_, m_);
        if (m_.frozen)  // B and biases, too: if B is zero, A has no gradient
            for (TensorSpec& t : m_.table.rows) t.init = Init::kaiming;
        initialize(ctx_, m_, 5);
    }

    // Reads weights (of any layout) and writes them with this layout.
    void reshard(const std::string& from, const std::string& to) {
        std::vector<real> whole(m_.table.size), parts(m_.shards.size);
        read_tensors(from + ".safetensors", m_.c, m_.table, whole.data());
        m_.shards.for_each_part(0, whole.size(), [&](size_t at, size_t shard, size_t n) {
            std::copy_n(whole.data() + at, n, parts.data() + shard);
        });
        write(to, parts);
    }
    // For the first global batch, in files with this prefix.
    void write_gradients(const std::string& prefix) {
        m_.router_losses = {(real)(o_.moe_aux_loss_coeff / 16), (real)(o_.moe_z_loss_coeff / 256)};
        accumulate_gradients(trainer_, schedule_.final_batch, (real)(1.0 / 256));
        std::vector<real> parts(m_.shards.size);
        for (const Bucket& b : m_.shards.buckets)
            be::download(ctx_, parts.data() + b.shard, m_.gradients_of(b).data, b.n * sizeof(real));
        write(prefix, parts);
    }
    Results train() {
        Results r;
        while (trainer_.state.step < schedule_.total_steps) {
            const StepStats s = *train_step(trainer_);
            r.losses.push_back(s.loss + s.z_loss);
            r.norms.push_back(s.grad_norm);
        }
        trainer_.gatherer.finish();
        return r;
    }
    void write_weights(const std::string& prefix) {
        std::vector<real> weights(m_.shards.size);
        copy_weights(ctx_, m_, weights.data());
        write(prefix, weights);
    }
    bool replicas_agree() { return trainer_.memory_check.difference().empty(); }

private:
    void write(const std::string& prefix, const std::vector<real>& parts) {
        const TensorFiles files(prefix + ".safetensors", trained_table(m_.c), "F32");
        WrittenFiles written(std::filesystem::path(prefix).parent_path().string());
        if (world_.rank() == 0) files.create(written);
        world_.barrier();
        write_parts(files, m_.table, m_.shards, m_.not_duplicated, written, [&](size_t i) { return (float)parts[i]; });
        world_.barrier();
    }

    World& world_;
    TrainOptions o_;
    be::Ctx ctx_;
    std::shared_ptr<Ranks> ranks_;
    Model m_;
    Schedule schedule_;
    DataLoader data_;
    Trainer trainer_;
};

constexpr double u = 0x1p-24, rounding = 0x1p-8;

std::vector<double> read_tensor(const SafetensorsReader& file, const std::string& name) {
    const TensorView* view = file.find(name);
    CHECK(view, "no tensor %s", name.c_str());
    std::vector<double> x(view->elements());
    file.read_as(*view, x.data());
    return x;
}

double largest_of(const std::vector<double>& x) {
    double largest = 0;
    for (double e : x) largest = std::max(largest, std::abs(e));
    return largest;
}

// Whether a tensor computes or scales queries or keys, and one norm covers all their heads. Its gradient is a difference of
// terms as large as the values' gradients, but 25 to 50 times smaller (measured on OLMo-2), so its tolerance is relative to
// a fraction of these.
bool of_one_norm(const SafetensorsReader& file, const std::string& name) {
    const size_t at = name.find("self_attn.");
    if (at == std::string::npos) return false;
    const std::string block = name.substr(0, at + 10), rest = name.substr(at + 10, 2);
    const TensorView *norm = file.find(block + "q_norm.weight"), *queries = file.find(block + "q_proj.weight");
    return (rest == "q_" || rest == "k_") && norm && queries && norm->shape[0] == queries->shape[0];
}

// Whether a tensor is the norm of each head's queries or keys. Its few elements sum over all rows and heads terms of the
// preceding projection's gradient, and most of that cancels (a thirtieth remains in layer 5 of "many options"), so its
// tolerance is relative to a fraction of that gradient.
bool of_each_head(const std::string& name) { return ends_with(name, "q_norm.weight") || ends_with(name, "k_norm.weight"); }

// The largest difference between two files' tensors, each relative to the tensor's largest element; for a key bias to the
// query bias's.
double worst_difference(const std::string& a, const std::string& b, bool vectors, std::string& where) {
    const SafetensorsReader x = SafetensorsReader::open(a + ".safetensors"), y = SafetensorsReader::open(b + ".safetensors");
    double worst = 0;
    for (const auto& [name, view] : x.tensors()) {
        const TensorView* other = y.find(name);
        if (!vectors && view.shape.size() == 1) continue;
        CHECK(other && other->shape == view.shape, "%s has no such tensor %s", b.c_str(), name.c_str());
        const std::vector<double> p = read_tensor(x, name), q = read_tensor(y, name);
        std::string measure = name;
        const size_t of_keys = name.find("k_proj.bias");
        if (of_keys != std::string::npos) measure[of_keys] = 'q';
        double largest = largest_of(measure == name ? p : read_tensor(x, measure));
        if (of_one_norm(x, name)) {
            const std::string values = name.substr(0, name.find("self_attn.")) + "self_attn.v_proj.weight";
            largest = std::max(largest, largest_of(read_tensor(x, values)) / 4);
        } else if (of_each_head(name)) {
            std::string projection = name;
            largest = std::max(largest, largest_of(read_tensor(x, projection.replace(name.find("_norm"), 5, "_proj"))) / 4);
        }
        double difference = 0;
        for (size_t i = 0; i < p.size(); i++) {
            const double d = std::abs(p[i] - q[i]);
            difference = std::isfinite(d) ? std::max(difference, d) : INFINITY;
        }
        if (!(largest > 0)) fail("%s: %s is zero", a.c_str(), name.c_str());
        if (difference / largest > worst) {
            worst = difference / largest;
            where = name;
        }
    }
    return worst;
}

std::vector<double> read_numbers(const std::string& path) {
    std::istringstream text(read_whole_file(path));
    std::vector<double> x;
    for (double number; text >> number;) x.push_back(number);
    return x;
}

int failures = 0;
void report(World& world, const std::string& name, bool ok, const std::string& detail) {
    if (world.rank() > 0) return;
    printf("%s: %s%s%s\n", ok ? "ok" : "FAILED", name.c_str(), detail.empty() ? "" : ": ", detail.c_str());
    fflush(stdout);
    failures += !ok;
}

void check_all(World& world, const std::string& dir, const std::string& what) {
    if (what == "reference") {
        CHECK(world.size() == 1, "the reference is one rank's");
        write_data(dir + "/data", 119);
        write_pairs(dir + "/data-pairs", 119);
    }
    const std::vector<Case> models = cases();
    for (size_t model = 0; model < models.size(); model++)
        for (const Layout& l : layouts(world.size(), what, model, models[model])) {
            const Case& k = models[model];
            if (k.rampup && world.size() / (l.tp * l.pp) > 4) continue;  // too few micro-batches in the first steps
            const std::string reference = dir + "/" + k.name, mine = what == "reference" ? reference : reference + "-mine";
            Run run(world, k, l, dir + "/data");
            run.write_weights(mine + "-initial");
            run.write_gradients(mine + "-gradients");
            const Results r = run.train();
            run.write_weights(mine + "-weights");
            const std::string name = k.name + ", " + l.text(world.size());
            if (what == "reference") {
                std::string text;
                for (size_t i = 0; i < r.losses.size(); i++) text += format("%.17g %.17g\n", r.losses[i], r.norms[i]);
                write_file_atomically(reference + ".txt", text);
                report(world, name + ": reference", std::isfinite(r.losses.back()), "");
                continue;
            }
            report(world, name + ": replicas have the same bits", run.replicas_agree(), "");
            run.reshard(reference + "-weights", mine + "-resharded");
            if (world.rank() == 0) {
                const auto same_file = [&](const std::string& a, const std::string& b) {
                    return read_whole_file(a + ".safetensors") == read_whole_file(b + ".safetensors");
                };
                report(world, name + ": initial weights have one rank's bits",
                       same_file(reference + "-initial", mine + "-initial"), "");
                report(world, name + ": one rank's weights, read and written",
                       same_file(reference + "-weights", mine + "-resharded"), "");
                std::string where;
                const bool passes_on = k.c.norm_after() || k.c.virtual_tokens.lstm;
                const double allowed = fp32 ? 48 * u : (passes_on ? 16 : 8) * rounding;
                const double gradients = worst_difference(reference + "-gradients", mine + "-gradients", true, where);
                report(world, name + ": gradients", gradients <= allowed,
                       format("%.2g of the largest element (%s), %.2g allowed", gradients, where.c_str(), allowed));
                const std::vector<double> expected = read_numbers(reference + ".txt");
                double losses = 0, norms = 0;
                for (size_t i = 0; i < r.losses.size(); i++) {
                    losses = std::max(losses, std::abs(r.losses[i] / expected[2 * i] - 1));
                    norms = std::max(norms, std::abs(r.norms[i] / expected[2 * i + 1] - 1));
                    if (!std::isfinite(r.losses[i] + r.norms[i])) losses = INFINITY;
                }
                const double allowed_loss = fp32 ? 8 * u : 2 * rounding, allowed_norm = fp32 ? 64 * u : 8 * rounding;
                report(world, name + ": losses and norms", losses <= allowed_loss && norms <= allowed_norm,
                       format("%.2g and %.2g, %.2g and %.2g allowed", losses, norms, allowed_loss, allowed_norm));
                const double weights = worst_difference(reference + "-weights", mine + "-weights", fp32, where);
                const double allowed_weights = fp32 ? 0.002 : 0.2;
                report(world, name + ": weights", weights <= allowed_weights,
                       format("%.2g of the largest element (%s), %.2g allowed", weights, where.c_str(), allowed_weights));
            }
            world.barrier();
        }
}

int run(int argc, char** argv) {
    World world = World::join();
    try {
        if (argc < 2) fail("parity_check DIR [reference|all|main|some]");
        world.watch(60, "");
        check_all(world, argv[1], argc > 2 ? argv[2] : "all");
        std::vector<int> of_all((size_t)world.size());
        world.all_gather(&failures, sizeof failures, of_all.data());
        return of_all[0] > 0;
    } catch (const std::exception& e) {
        fprintf(stderr, "error on %s: %s\n", world.description().c_str(), e.what());
        world.abort(1);
    }
}

const bool added = test::add_program("parity_check", run);

}  // namespace
}  // namespace parity_check
