// The trainer's logits for given tokens, and the gradients of its loss, for comparison with other programs.
//   dump_logits MODEL_DIRECTORY TOKENS T LOGITS [GRADIENTS]
//   dump_logits MODEL_DIRECTORY TOKENS T LOGITS --adapter ADAPTER_DIRECTORY
// TOKENS: int32 (B, T), with B from the file's size. LOGITS: float32 (B, T, V), after rounding to the storage type, with
// virtual tokens among the T. Both in this machine's byte order. GRADIENTS: output folder; its model.safetensors has the
// gradient of every parameter for the mean cross-entropy of each sequence's tokens after the first.
#define TRAIN_GPT_NO_MAIN
#include "train_gpt.cu"
#include "test/model_files.h"

static Batch read_batch(const std::string& path, int T) {
    const MappedFile file(path);
    if (T < 1 || file.size() == 0 || file.size() % (T * sizeof(int)))
        fail("%s has %zu bytes; sequences of %d tokens of 4 bytes are expected", path.c_str(), file.size(), T);
    Batch batch;
    batch.B = (int)(file.size() / (T * sizeof(int)));
    batch.T = T;
    batch.tokens.resize((size_t)batch.B * T);
    memcpy(batch.tokens.data(), file.data(), file.size());
    for (int i = 0; i < batch.B * T; i++) {
        batch.positions.push_back(i % T);
        batch.targets.push_back((i + 1) % T ? batch.tokens[(size_t)i + 1] : -1);
    }
    return batch;
}

static void write_logits(be::Ctx& ctx, const Model& m, int N, const std::string& path) {
    HostSide<floatX> logits(ctx, m.a.logits, (size_t)N * m.c.Vp);
    logits.download();
    std::vector<float> row(m.c.V);  // without the padded vocabulary
    FileWriter out(path);
    for (int i = 0; i < N; i++) {
        row.assign(logits.data() + (size_t)i * m.c.Vp, logits.data() + (size_t)i * m.c.Vp + m.c.V);
        for (float& x : row)
            if (const float cap = (float)m.c.logit_softcap; cap > 0) x = cap * std::tanh(x / cap);
        out.write(row.data(), row.size() * sizeof(float));
    }
    out.commit();
}

static void write_gradients(be::Ctx& ctx, const std::string& directory, const Batch& batch, const std::string& path) {
    ModelConfig c = read_config(directory);
    check_config(c);
    pad_vocabulary(c, 16);
    Model m(c);
    const int N = batch.B * batch.T;
    plan_memory(m, Recompute::none, batch.B, batch.T, N);
    allocate(ctx, m);
    load_parameters(ctx, m, directory);
    const Pass pass = upload(ctx, m, batch, m.a.micro_batch());
    clear_sums(ctx, m);
    model_forward(pass);
    be::clear(ctx, m.grads.data, m.table.size * sizeof(real));
    head(pass, (real)(1.0 / (batch.B * (batch.T - 1))), 0, true);
    model_backward(pass, [](int) {});
    HostSide<real> gradients(ctx, (real*)m.grads.data, m.table.size);
    gradients.download();
    write_tensors(path + "/model.safetensors", m.table, gradients.data());
}

int main(int argc, char** argv) try {
    const bool adapts = argc == 7 && argv[5] == std::string("--adapter");
    if (argc != 5 && argc != 6 && !adapts)
        fail("usage: dump_logits MODEL_DIRECTORY TOKENS T LOGITS [GRADIENTS | --adapter ADAPTER_DIRECTORY]");
    const Batch batch = read_batch(argv[2], atoi(argv[3]));
    World world = World::join();
    EvalOptions options;
    options.model = argv[1];
    if (adapts) options.adapter = argv[6];
    InferenceRun run(world, options.threads);
    open_model(run, options, false);
    const std::unique_ptr<Model> loaded = load_weights(run, batch.B, batch.T, INT_MAX);
    Model& m = *loaded;
    for (int token : batch.tokens)
        if (token < 0 || token >= m.c.V) fail("token %d is outside the vocabulary of %d", token, m.c.V);
    const Pass pass = upload(run.ctx, m, batch, m.a.micro_batch());
    model_forward(pass);
    const int N = pass.N();
    final_norm_forward(pass, pass.in.out());
    be::linear_forward(run.ctx, m.a.logits, m.a.final_norm, m.p.head, m.p.head_b, N, m.c.C, m.c.Vp);
    write_logits(run.ctx, m, N, argv[4]);
    if (argc == 6) write_gradients(run.ctx, run.dir, batch, argv[5]);
} catch (const std::exception& e) {
    fprintf(stderr, "error: %s\n", e.what());
    return 1;
}
