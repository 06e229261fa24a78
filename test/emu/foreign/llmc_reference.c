// What llm.c's trainers on a GPU are compared with: its own train_gpt2.c (plain loops in fp32) trains a small random GPT-2 for
// ten steps on one batch, with the hyperparameters of test_gpt2.cu. Writes into the current directory, in llm.c's formats,
//   gpt2_124M.bin, gpt2_124M_bf16.bin   the model, whose weights are numbers of bf16 in both
//   gpt2_124M_debug_state.bin           the batch, and its logits, loss and gradients
//   tokens.bin                          a shard that begins with the batch
//   expected_losses.h                   the ten losses, as test_gpt2.cu spells them
// and prints "step loss norm" ten times.
#define TESTING
#include "train_gpt2.c"

#include "llmc/rand.h"

// T: several warps to a row of attention. A row of logits may not be shorter than a block of fused_classifier takes at once
// (1024 threads, 8 bf16 each).
enum { B = 2, T = 64, V = 8209, PADDED = 8320, L = 2, NH = 2, C = 64, STEPS = 10, TOKENS = 16 * B * T + 1 };

static void write_file(const char* name, const int* header, const void* data, size_t bytes, FILE** keep_open) {
    FILE* file = fopenCheck(name, "wb");
    fwrite(header, sizeof(int), 256, file);
    fwrite(data, 1, bytes, file);
    if (keep_open) *keep_open = file;
    else fcloseCheck(file);
}

int main(void) {
    // The model. Weights larger than GPT-2's, so that all of its parts have gradients to speak of.
    GPT2Config config = {
        .max_seq_len = T, .vocab_size = V, .padded_vocab_size = PADDED, .num_layers = L, .num_heads = NH, .channels = C};
    size_t sizes[NUM_PARAMETER_TENSORS], n = 0, at = 0;
    fill_in_parameter_sizes(sizes, config);
    for (int i = 0; i < NUM_PARAMETER_TENSORS; i++) n += sizes[i];
    float* weights = mallocCheck(n * sizeof(float));
    unsigned short* halves = mallocCheck(n * sizeof *halves);
    mt19937_state random;
    manual_seed(&random, 42);
    normal_(weights, n, 0.0f, 0.1f, &random);
    for (int i = 0; i < NUM_PARAMETER_TENSORS; at += sizes[i], i++)
        if (i == 2 || i == 8 || i == 14)  // of layer norms
            for (size_t j = 0; j < sizes[i]; j++) weights[at + j] += 1.0f;
    memset(weights + (size_t)V * C, 0, (size_t)(PADDED - V) * C * sizeof(float));
    for (size_t i = 0; i < n; i++) {
        unsigned bits;
        memcpy(&bits, &weights[i], 4);
        halves[i] = (unsigned short)((bits + 0x8000) >> 16), bits = (unsigned)halves[i] << 16;
        memcpy(&weights[i], &bits, 4);
    }
    int header[256] = {20240326, 3, T, V, L, NH, C, PADDED};
    write_file("gpt2_124M.bin", header, weights, n * sizeof(float), NULL);
    header[1] = 5;
    write_file("gpt2_124M_bf16.bin", header, halves, n * sizeof *halves, NULL);

    // The tokens: some of them often, so that wte's gradient has buckets of all sizes.
    unsigned short tokens[TOKENS];
    for (int i = 0; i < TOKENS; i++) tokens[i] = randint32(&random) % 3 ? randint32(&random) % V : randint32(&random) % 5;
    int shard[256] = {20240520, 1, TOKENS};
    write_file("tokens.bin", shard, tokens, sizeof tokens, NULL);
    int x[B * T], y[B * T];
    for (int i = 0; i < B * T; i++) x[i] = tokens[i], y[i] = tokens[i + 1];

    GPT2 model;
    FILE* log = stdout;
    stdout = stderr;  // what train_gpt2.c has to say
    gpt2_build_from_checkpoint(&model, "gpt2_124M.bin");
    FILE* losses = fopenCheck("expected_losses.h", "w");
    fprintf(losses, "float expected_losses[10] = {\n");
    for (int step = 1; step <= STEPS; step++) {
        gpt2_forward(&model, x, y, B, T);
        gpt2_zero_grad(&model);
        gpt2_backward(&model);
        if (step == 1) {
            int state[256] = {20240327, 2, B, T};
            FILE* file;
            write_file("gpt2_124M_debug_state.bin", state, x, sizeof x, &file);
            fwrite(y, 1, sizeof y, file);
            for (int i = 0; i < B * T; i++) fwrite(model.acts.logits + (size_t)i * PADDED, sizeof(float), V, file);
            fwrite(&model.mean_loss, sizeof(float), 1, file);
            fwrite(model.grads_memory, sizeof(float), n, file);
            fcloseCheck(file);
        }
        double square = 0;
        for (size_t i = 0; i < n; i++) square += (double)model.grads_memory[i] * model.grads_memory[i];
        const float norm = (float)sqrt(square);
        for (size_t i = 0; norm > 1 && i < n; i++) model.grads_memory[i] /= norm;
        fprintf(log, "%d %.6f %.4f\n", step, model.mean_loss, norm);
        fprintf(losses, "    %.6ff%s\n", model.mean_loss, step < STEPS ? "," : "};");
        gpt2_update(&model, 1e-4f, 0.9f, 0.95f, 1e-8f, 0.0f, step);
    }
    fcloseCheck(losses);
    return 0;
}
