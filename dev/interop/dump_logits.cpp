// The logits that the trainer computes for given tokens, for comparison with other programs.
//   dump_logits MODEL_DIRECTORY TOKENS T LOGITS
// TOKENS: int32 (B, T), B follows from the file's size. LOGITS: float32 (B, T, V), rounded to the storage type before. Both in
// this machine's byte order.
#define TRAIN_GPT_NO_MAIN
#include "train_gpt.cu"

int main(int argc, char** argv) try {
    if (argc != 5) fail("usage: dump_logits MODEL_DIRECTORY TOKENS T LOGITS");
    const MappedFile file(argv[2]);
    const int T = atoi(argv[3]);
    if (T < 1 || file.size() == 0 || file.size() % (T * sizeof(int)))
        fail("%s has %zu bytes; sequences of %s tokens of 4 bytes are expected", argv[2], file.size(), argv[3]);
    const int B = (int)(file.size() / (T * sizeof(int))), N = B * T;
    Batch batch;
    batch.B = B;
    batch.T = T;
    batch.tokens.resize((size_t)N);
    memcpy(batch.tokens.data(), file.data(), file.size());
    for (int i = 0; i < N; i++) batch.positions.push_back(i % T);

    World world = World::join();
    EvalOptions options;
    options.model = argv[1];
    InferenceRun run(world, options, false);
    be::Ctx& ctx = run.ctx;
    const std::unique_ptr<Model> loaded = load_weights(run, options, B, T, N, false);
    Model& m = *loaded;
    const ModelConfig& c = m.c;
    for (int token : batch.tokens)
        if (token < 0 || token >= c.V) fail("token %d is outside the vocabulary of %d", token, c.V);
    const Pass pass = upload(ctx, m, batch, m.a.micro_batch());
    model_forward(pass);
    norm_forward(pass, m.final_norm, m.a.final_stats, m.a.final_norm, nullptr, pass.in.out(), nullptr);
    be::linear_forward(ctx, m.a.logits, m.a.final_norm, m.p.head, nullptr, N, c.C, c.Vp);

    HostSide<floatX> logits(ctx, m.a.logits, (size_t)N * c.Vp);
    logits.download();
    std::vector<float> row(c.V);  // without the padded vocabulary
    FileWriter out(argv[4]);
    for (int i = 0; i < N; i++) {
        row.assign(logits.data() + (size_t)i * c.Vp, logits.data() + (size_t)i * c.Vp + c.V);
        out.write(row.data(), row.size() * sizeof(float));
    }
    out.commit();
} catch (const std::exception& e) {
    fprintf(stderr, "error: %s\n", e.what());
    return 1;
}
