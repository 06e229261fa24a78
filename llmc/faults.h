// Faults on purpose, to try what a run does about them before it matters: TRAIN_GPT_FAULTS="KIND=BATCH[-LAST][:RANK] ..."
//   noise=100-102      the batches 100 to 102 are random tokens, on all ranks
//   nan-gradient=50:1  on rank 1 an element of batch 50's gradient is NaN (without a rank: on the first)
//   flip-weight=80     before batch 80 the highest exponent bit of an fp32 weight flips; once, as a cosmic ray would
//   flaky-gradient=70  when batch 70's gradient is computed, the last bit of an element is wrong; once
// A batch that training comes to again after a rollback is as bad as before, unless it is left out.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <sstream>
#include <string>
#include <vector>

#include "check.h"

class Faults {
public:
    static Faults from_environment() {
        Faults f;
        const char* text = getenv("TRAIN_GPT_FAULTS");
        std::istringstream words(text ? text : "");
        for (std::string word; words >> word;) {
            Fault fault;
            char kind[32] = "";
            long long first = 0, last = 0;
            int rank = 0;
            if (sscanf(word.c_str(), "%31[a-z-]=%lld-%lld:%d", kind, &first, &last, &rank) < 3) {
                last = 0;
                if (sscanf(word.c_str(), "%31[a-z-]=%lld:%d", kind, &first, &rank) < 2) first = 0;
            }
            fault.kind = kind, fault.first = first, fault.last = last ? last : first, fault.rank = rank;
            const bool known = fault.kind == "noise" || fault.kind == "nan-gradient" || fault.kind == "flip-weight" ||
                               fault.kind == "flaky-gradient";
            if (!known || fault.first < 1 || fault.last < fault.first || rank < 0)
                fail(
                    "TRAIN_GPT_FAULTS has '%s'; it must be noise, nan-gradient, flip-weight or flaky-gradient, then "
                    "=BATCH[-LAST][:RANK]",
                    word.c_str());
            f.faults_.push_back(fault);
        }
        return f;
    }

    bool none() const { return faults_.empty(); }
    bool noise(int64_t batch) { return find("noise", batch, -1); }
    bool nan_gradient(int64_t batch, int rank) { return find("nan-gradient", batch, rank); }
    // True once.
    bool flip_weight(int64_t batch, int rank) { return once("flip-weight", batch, rank); }
    bool flaky_gradient(int64_t batch, int rank) { return once("flaky-gradient", batch, rank); }

private:
    struct Fault {
        std::string kind;
        int64_t first = 0, last = 0;
        int rank = 0;
    };
    bool once(const char* kind, int64_t batch, int rank) {
        Fault* f = find(kind, batch, rank);
        if (f) f->last = f->first - 1;
        return f;
    }
    Fault* find(const char* kind, int64_t batch, int rank) {
        for (Fault& f : faults_)
            if (f.kind == kind && f.first <= batch && batch <= f.last && (rank < 0 || rank == f.rank)) return &f;
        return nullptr;
    }
    std::vector<Fault> faults_;
};
