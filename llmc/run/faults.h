// Injects faults, to test a run's reactions: TRAIN_GPT_FAULTS="KIND=BATCH[-LAST][:RANK] ..."
//   noise=100-102      the batches 100 to 102 are random tokens, on all ranks
//   nan-gradient=50:1  on rank 1, an element of batch 50's gradient is NaN (default: rank 0)
//   flip-weight=80     before batch 80 the highest exponent bit of an fp32 weight flips; once, as a cosmic ray would
//   flip-norm, flip-lower, flip-exp-avg, flip-exp-avg-sq=80    flips the last bit of a norm's weight, of the lower half of an
//                      fp32 weight, or of a moment, before batch 80; once
//   wrong-update=80    batch 80's update stores a moment that is off by up to one hundredth; once. Detected only if another
//                      rank also holds that moment (--zero 0, or a norm's under tensor parallelism)
//   flaky-gradient=70  flips the last bit of an element when batch 70's gradient is computed; once
//   flip-product, flip-memory, flip-disk, flip-link=1    a wrong bit in a check of check-node
//   slow=1-40:1        rank 1 sleeps for half a second in each of the batches 1 to 40
// A batch that training repeats after a rollback has the same fault, unless it is skipped.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <sstream>
#include <string>
#include <vector>

#include "../base/check.h"

class Faults {
public:
    static Faults from_environment() {
        Faults f;
        const char* text = getenv("TRAIN_GPT_FAULTS");
        std::istringstream words(text ? text : "");
        for (std::string word; words >> word;) {
            Fault fault;
            const char* at = word.c_str() + std::min(word.find('='), word.size() - 1) + 1;  // after the '='
            fault.kind = word.substr(0, word.find('='));
            fault.first = fault.last = number(at);
            if (*at == '-') fault.last = number(++at);
            if (*at == ':') fault.rank = number(++at);
            std::string kinds;
            bool known = false;
            for (const char* k :
                 {"noise", "nan-gradient", "flip-weight", "flip-norm", "flip-lower", "flip-exp-avg", "flip-exp-avg-sq",
                  "wrong-update", "flaky-gradient", "slow", "flip-product", "flip-memory", "flip-disk", "flip-link"}) {
                known |= fault.kind == k;
                kinds += std::string(k) + ", ";
            }
            if (!known || *at || fault.first < 1 || fault.last < fault.first || fault.rank < 0)
                fail("TRAIN_GPT_FAULTS has '%s'; it must be one of %sthen =BATCH[-LAST][:RANK]", word.c_str(), kinds.c_str());
            f.faults_.push_back(fault);
        }
        return f;
    }

    bool none() const { return faults_.empty(); }
    bool noise(int64_t batch) { return find("noise", batch, -1); }
    bool nan_gradient(int64_t batch, int rank) { return find("nan-gradient", batch, rank); }
    bool slow(int64_t batch, int rank) { return find("slow", batch, rank); }
    // For the other kinds: returns true once.
    bool once(const char* kind, int64_t batch, int rank) {
        Fault* f = find(kind, batch, rank);
        if (f) f->last = f->first - 1;
        return f;
    }

private:
    struct Fault {
        std::string kind;
        int64_t first = 0, last = 0, rank = 0;
    };
    // Parses the digits from `at` on, which moves past them; -1 if there are none, or more than 15.
    static int64_t number(const char*& at) {
        int64_t value = 0;
        const char* const begin = at;
        while (*at >= '0' && *at <= '9' && at - begin < 16) value = 10 * value + (*at++ - '0');
        return at == begin || at - begin > 15 ? -1 : value;
    }
    Fault* find(const char* kind, int64_t batch, int rank) {
        for (Fault& f : faults_)
            if (f.kind == kind && f.first <= batch && batch <= f.last && (rank < 0 || rank == f.rank)) return &f;
        return nullptr;
    }
    std::vector<Fault> faults_;
};
