// Finds clusters of near duplicates in JSON lines and measures the cost, for dev/bench/duplicates.py.
//   near_duplicates PRESET FILE.jsonl WORK_DIRECTORY [--threads 1] [--memory-mb 256] [--key text]
// Prints a line "document representative" per duplicate; the last line on standard error is JSON: documents, bytes of text,
// CPU seconds for reading, signatures and clusters, and the peak memory of the process.
#include <sys/resource.h>
#include <time.h>

#include <atomic>
#include <cstdio>
#include <map>
#include <string>
#include <vector>

#include "../../llmc/curate/near_duplicates.h"
#include "../../llmc/text/document_reader.h"

static double seconds(clockid_t clock) {
    timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

int main(int argc, char** argv) try {
    std::vector<std::string> names;
    std::map<std::string, std::string> options = {{"--threads", "1"}, {"--memory-mb", "256"}, {"--key", "text"}};
    for (int i = 1; i < argc; i++) {
        if (argv[i][0] != '-') names.emplace_back(argv[i]);
        else if (options.count(argv[i]) && i + 1 < argc) options[argv[i]] = argv[i + 1], i++;
        else fail_usage("option %s is unknown or has no value", argv[i]);
    }
    if (names.size() != 3) fail_usage("three names are needed: PRESET FILE.jsonl WORK_DIRECTORY");
    const int threads = std::stoi(options["--threads"]);

    TextInput input;
    input.files = {names[1]};
    input.json_key = options["--key"];
    DocumentReader reader(input);
    NearDuplicates near(NearDuplicateOptions::preset(names[0]), names[2], (size_t)std::stoi(options["--memory-mb"]) << 20);
    std::vector<NearDuplicates::Signature> signatures;
    std::atomic<int64_t> signing_ns{0};
    int64_t n = 0, bytes = 0;
    for_each_chunk(
        reader, threads, "reading",
        [&](const Chunk& chunk, size_t i) {
            const double before = seconds(CLOCK_THREAD_CPUTIME_ID);
            signatures[i] = near.sign(chunk.text);
            signing_ns += (int64_t)(1e9 * (seconds(CLOCK_THREAD_CPUTIME_ID) - before));
        },
        [&](const Chunk& chunk, size_t i) {
            near.add(n++, 0, signatures[i]);
            bytes += (int64_t)chunk.text.size();
            signatures[i] = {};
        },
        [&](size_t size) { signatures.resize(size); }, false);
    const double read = seconds(CLOCK_PROCESS_CPUTIME_ID);
    const Clusters clusters = near.solve(threads);
    const double solved = seconds(CLOCK_PROCESS_CPUTIME_ID);
    for (int64_t i = 0; i < n; i++)
        if (clusters.dropped(i)) printf("%lld %lld\n", (long long)i, (long long)clusters.representative(i));
    rusage used;
    getrusage(RUSAGE_SELF, &used);
    const double signing = 1e-9 * (double)signing_ns;
    fprintf(stderr,
            "{\"documents\": %lld, \"bytes\": %lld, \"reading\": %.4f, \"signatures\": %.4f, \"clusters\": %.4f, "
            "\"memory_mib\": %.1f}\n",
            (long long)n, (long long)bytes, read - signing, signing, solved - read, (double)used.ru_maxrss / 1024);
} catch (const std::exception& e) {
    fprintf(stderr, "error: %s\n", e.what());
    return exit_status(e);
}
