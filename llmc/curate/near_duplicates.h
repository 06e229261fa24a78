// Documents that are nearly the same, in a corpus of any size: one document of each cluster is kept.
//
// A document is the set of its shingles: all n-grams of words or of characters, as hashes (words.h). The similarity of two
// documents is the Jaccard index J of their sets, shared shingles / all shingles.
//
// MinHash (Broder, 1997). A random permutation of all hashes has the same minimum on two sets with probability J. A signature
// is the minima of bands x rows permutations h(x) = a x + b modulo 2^64 or 2^32, a odd. With locality-sensitive hashing (Indyk
// and Motwani, 1998), documents are candidates if all rows of some band are equal:
//     P(candidates) = 1 - (1 - J^rows)^bands,
// a step near J = (1 / bands)^(1 / rows). Bands are compared by hashes of 64 bits: among a billion documents and 14 bands about
// five pairs are candidates by chance.
//
// SimHash (Charikar, 2002). Bit i of a signature of 64 bits is 1 if it is 1 in more than half of the shingles' hashes;
// documents are duplicates if at most k bits differ. All of them are found (Manku, Jain, Das Sarma, 2007): with d blocks of
// bits, k differing bits leave d - k equal. Each choice of d - k blocks is sorted, and neighbors with these blocks equal are
// compared. A bit differs with probability arccos(c) / pi, c being the cosine of the counts of shingles: about 2 J /
// (1 + J). If 1% of a text's words are replaced, 2% of its shingles of 6 characters change, and 4 bits are expected to
// differ; so a limit of 4 misses many. A wider limit finds them, and also documents that are only of the same kind, so its
// candidates are verified.
//
// Duplicates of duplicates are in one cluster: connected components by union-find. A cluster's representative is its document
// with the lowest priority number, and among equals the first.
//
// Three steps. sign: a pure function, on many threads. add: in the documents' order, on one thread. solve: sorts (band hash,
// document), where equal bands become neighbors, and unites each with the first of its run, so that a million equal documents
// cost a million steps per band. The result does not depend on threads.
//
// Memory: `memory_bytes` for sorting, 8 bytes per document for the clusters in pages of a file, and with verification at most
// five sets of 16 MB plus a batch of candidates. On the disk: 16 bytes per document and band, with verification 4 per distinct
// shingle.
#pragma once
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <exception>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "../base/check.h"
#include "../base/hash.h"
#include "../cpu/parallel.h"
#include "external_sort.h"
#include "words.h"

struct NearDuplicateOptions {
    std::string method = "minhash";  // or "simhash"
    int bands = 14, rows = 8;        // of a MinHash signature
    std::string shingle = "words";   // or "characters"
    int shingle_size = 5;            // n of the n-grams
    int hash_bits = 64;              // 32 or 64: of the permutations
    double verify_jaccard = 0;       // candidates are duplicates only if J is larger; 0: all are
    bool folded = true;              // characters in lower case, without punctuation; words always are
    int hamming = 4;                 // SimHash: differing bits allowed
    int64_t longest_characters = 0;  // longer documents are never duplicates; 0: any length

    static const std::vector<std::pair<std::string, NearDuplicateOptions>>& presets() {
        static const std::vector<std::pair<std::string, NearDuplicateOptions>> all = [] {
            NearDuplicateOptions fineweb, nemo, llm_jp, mt_nlg, roots, roots_verified;
            nemo.bands = 20;
            nemo.rows = 13;
            nemo.shingle = "characters";
            nemo.shingle_size = 24;
            nemo.hash_bits = 32;
            nemo.folded = false;
            llm_jp.bands = 20;
            llm_jp.rows = 10;
            mt_nlg.bands = mt_nlg.rows = 10;
            mt_nlg.shingle = "characters";
            mt_nlg.hash_bits = 32;
            mt_nlg.verify_jaccard = 0.5;
            mt_nlg.folded = false;
            roots.method = "simhash";
            roots.shingle = "characters";
            roots.shingle_size = 6;
            roots.longest_characters = 6000;  // above this, SimHash found too many documents alike
            roots_verified = roots;
            roots_verified.hamming = 6;
            roots_verified.verify_jaccard = 0.7;
            return std::vector<std::pair<std::string, NearDuplicateOptions>>{
                {"fineweb", fineweb}, {"nemo", nemo},   {"llm-jp", llm_jp},
                {"mt-nlg", mt_nlg},   {"roots", roots}, {"roots-verified", roots_verified}};
        }();
        return all;
    }
    static NearDuplicateOptions preset(const std::string& name) {
        std::string names;
        for (const auto& [known, options] : presets()) {
            if (known == name) return options;
            names += (names.empty() ? "" : ", ") + known;
        }
        fail_usage("there is no preset '%s' for near duplicates; HINT: the presets are %s", name.c_str(), names.c_str());
    }
    // {"fineweb", "bands=20", "jaccard=0.8"}: a preset with changed values.
    static NearDuplicateOptions parse(const std::vector<std::string>& words) {
        CHECK(!words.empty(), "no preset");
        NearDuplicateOptions o = preset(words[0]);
        for (size_t i = 1; i < words.size(); i++) {
            const size_t equals = words[i].find('=');
            const std::string name = words[i].substr(0, equals),
                              value = equals < words[i].size() ? words[i].substr(equals + 1) : "";
            for (const auto& [setting, method] : {std::pair<const char*, const char*>{"bands", "minhash"},
                                                  {"rows", "minhash"},
                                                  {"hash-bits", "minhash"},
                                                  {"hamming", "simhash"}})
                if (name == setting && o.method != method)
                    fail_usage("%s is a setting for %s, but the preset '%s' uses %s", setting,
                               o.method == "minhash" ? "SimHash" : "MinHash", words[0].c_str(),
                               o.method == "minhash" ? "MinHash" : "SimHash");
            const auto number = [&](auto& field) {
                size_t used = 0;
                double x = 0;
                try {
                    x = std::stod(value, &used);
                } catch (const std::exception&) {
                }
                const bool fits = used > 0 && used == value.size() && std::abs(x) <= 1e9;
                field = (std::decay_t<decltype(field)>)(fits ? x : 0);
                refuse_value(!fits || (double)field != x, name + " of near duplicates", value, "a number");
            };
            if (name == "bands") number(o.bands);
            else if (name == "rows") number(o.rows);
            else if (name == "shingle") o.shingle = value;
            else if (name == "shingle-size") number(o.shingle_size);
            else if (name == "hash-bits") number(o.hash_bits);
            else if (name == "jaccard") number(o.verify_jaccard);
            else if (name == "folded") number(o.folded);
            else if (name == "hamming") number(o.hamming);
            else if (name == "longest") number(o.longest_characters);
            else
                fail_usage(
                    "near duplicates have no setting '%s'; HINT: bands, rows, shingle, shingle-size, hash-bits, jaccard, "
                    "folded, hamming, longest",
                    words[i].c_str());
        }
        o.check();
        return o;
    }
    void check() const {
        const auto in = [](const std::string& name, int64_t value, int64_t least, int64_t most) {
            refuse_value(value < least || value > most, name + " of near duplicates", value,
                         format("from %lld to %lld", (long long)least, (long long)most));
        };
        const auto of = [](const char* name) { return std::string(name) + " of near duplicates"; };
        refuse_value(method != "minhash" && method != "simhash", of("the method"), method, "minhash or simhash");
        refuse_value(shingle != "words" && shingle != "characters", of("the shingle"), shingle, "words or characters");
        refuse_value(hash_bits != 32 && hash_bits != 64, of("hash-bits"), hash_bits, "32 or 64");
        in("the number of bands", bands, 1, 1000);
        in("the number of rows", rows, 1, 100);
        in("the shingle's size", shingle_size, 1, 1000);
        in("the Hamming distance", hamming, 0, 8);
        in("the longest document", longest_characters, 0, (int64_t)1 << 60);
        refuse_value(!(verify_jaccard >= 0 && verify_jaccard < 1), of("the Jaccard index"), verify_jaccard,
                     "from 0 to below 1");
    }
    // The probability that documents of this Jaccard index are candidates.
    double candidate_probability(double jaccard) const { return 1 - std::pow(1 - std::pow(jaccard, rows), bands); }
};

// ---- minima of permutations ------------------------------------------------------------------------------------------------
// H: uint32_t or uint64_t.
template <class H>
class Permutations {
public:
    Permutations() = default;
    explicit Permutations(int n) : n_((size_t)n) {
        const size_t padded = (n_ + lanes - 1) / lanes * lanes;
        for (size_t i = 0; i < padded; i++) {
            multiplier_.push_back((H)mix64(2 * i + 1) | 1);
            addend_.push_back((H)mix64(2 * i + 2));
        }
    }
    size_t padded() const { return multiplier_.size(); }  // to whole registers
    size_t size() const { return n_; }

    // minima[i] = min(minima[i], h_i(x)) over the hashes, by definition.
    void lower_plain(const H* hashes, size_t n, H* minima) const {
        for (size_t i = 0; i < padded(); i++)
            for (size_t k = 0; k < n; k++) minima[i] = std::min<H>(minima[i], hashes[k] * multiplier_[i] + addend_[i]);
    }
    // The same, three or four registers of permutations at a time; bound by the multiplications.
    void lower(const H* hashes, size_t n, H* minima) const {
        size_t i = 0, left = padded() / lanes;
        for (size_t groups = (left + 3) / 4; groups > 0; groups--) {
            const size_t registers = (left + groups - 1) / groups;
            if (registers == 4) lower_some<4>(i, hashes, n, minima);
            else if (registers == 3) lower_some<3>(i, hashes, n, minima);
            else if (registers == 2) lower_some<2>(i, hashes, n, minima);
            else lower_some<1>(i, hashes, n, minima);
            i += registers * lanes;
            left -= registers;
        }
    }

private:
#if defined(__AVX512DQ__)
    static constexpr size_t bytes = 64;
#elif defined(__AVX2__)
    static constexpr size_t bytes = 32;
#else
    static constexpr size_t bytes = 16;
#endif
    typedef H Vector __attribute__((vector_size(bytes)));
    static constexpr size_t lanes = bytes / sizeof(H);

    template <size_t registers>
    void lower_some(size_t i, const H* hashes, size_t n, H* minima) const {
        Vector a[registers], b[registers], least[registers];
        for (size_t v = 0; v < registers; v++) {
            memcpy(&a[v], &multiplier_[i + v * lanes], sizeof(Vector));
            memcpy(&b[v], &addend_[i + v * lanes], sizeof(Vector));
            memcpy(&least[v], &minima[i + v * lanes], sizeof(Vector));
        }
        for (size_t k = 0; k < n; k++)
            for (size_t v = 0; v < registers; v++) {
                const Vector x = a[v] * hashes[k] + b[v];
                least[v] = x < least[v] ? x : least[v];
            }
        for (size_t v = 0; v < registers; v++) memcpy(&minima[i + v * lanes], &least[v], sizeof(Vector));
    }

    size_t n_ = 0;
    std::vector<H> multiplier_, addend_;
};

// ---- counts of bits --------------------------------------------------------------------------------------------------------
// Counts how often each of 64 bits was 1. Plane k holds bit k of all 64 counters; a number waits at its level until a second
// one arrives, and a carry-save adder turns both and the plane into the plane and one number of the next level (Harley and
// Seal): one adder of five operations per number.
class BitCounts {
public:
    void add(uint64_t x) {
        size_t k = 0;
        for (uint64_t waiting = n_++; waiting & 1; waiting >>= 1, k++) {
            const uint64_t odd = waiting_[k] ^ x, carry = (waiting_[k] & x) | (planes_[k] & odd);
            planes_[k] ^= odd;
            x = carry;
        }
        waiting_[k] = x;
    }
    uint64_t count(int bit) const {
        uint64_t c = 0;
        for (size_t k = 0; k < planes_.size(); k++) {
            c += (planes_[k] >> bit & 1) << k;
            if (n_ >> k & 1) c += (waiting_[k] >> bit & 1) << k;
        }
        return c;
    }
    // The bits that were 1 in more than half of the numbers.
    uint64_t majority() const {
        uint64_t bits = 0;
        for (int i = 0; i < 64; i++) bits |= (uint64_t)(2 * count(i) > n_) << i;
        return bits;
    }

private:
    std::array<uint64_t, 64> planes_{}, waiting_{};
    uint64_t n_ = 0;  // bit k: a number waits at level k
};

// ---- sets of shingles ------------------------------------------------------------------------------------------------------
// Radix sort by 11, 11 and 10 bits: a quarter of std::sort's time on the thousands of shingles of a page.
inline void sort_hashes(std::vector<uint32_t>& hashes) {
    if (hashes.size() < 500) return std::sort(hashes.begin(), hashes.end());
    constexpr int bits = 11, passes = 3;
    constexpr uint32_t buckets = 1u << bits;
    std::array<std::array<size_t, buckets>, passes> begin{};
    for (const uint32_t hash : hashes)
        for (int pass = 0; pass < passes; pass++) begin[(size_t)pass][hash >> pass * bits & (buckets - 1)]++;
    std::vector<uint32_t> other(hashes.size());
    for (int pass = 0; pass < passes; pass++) {
        auto& place = begin[(size_t)pass];
        size_t sum = 0;
        for (size_t& n : place) sum += std::exchange(n, sum);
        for (const uint32_t hash : hashes) other[place[hash >> pass * bits & (buckets - 1)]++] = hash;
        hashes.swap(other);
    }
}

// Sorted hashes of 32 bits: among 400,000 shingles one in 10,000 collides. Sets above `most` keep the smallest hashes: a sketch
// (Broder's bottom-k) whose Jaccard index has a standard error of at most 0.0003.
class ShingleSet {
public:
    static constexpr size_t most = 4 << 20;
    void add(uint32_t hash) {
        if (hash > largest_) return;
        hashes_.push_back(hash);
        if (hashes_.size() == 2 * most) compact();
    }
    const std::vector<uint32_t>& sorted() {
        compact();
        return hashes_;
    }

private:
    void compact() {
        sort_hashes(hashes_);
        hashes_.erase(std::unique(hashes_.begin(), hashes_.end()), hashes_.end());
        if (hashes_.size() < most) return;
        hashes_.resize(most);
        largest_ = hashes_.back();
    }
    std::vector<uint32_t> hashes_;
    uint32_t largest_ = UINT32_MAX;
};

// Over the `most` smallest elements of the union.
inline double jaccard_index(const std::vector<uint32_t>& a, const std::vector<uint32_t>& b, size_t most = ShingleSet::most) {
    size_t i = 0, k = 0, all = 0, shared = 0;
    while (all < most && (i < a.size() || k < b.size())) {
        const bool from_a = k == b.size() || (i < a.size() && a[i] <= b[k]);
        const bool from_b = i == a.size() || (k < b.size() && b[k] <= a[i]);
        i += from_a;
        k += from_b;
        shared += from_a && from_b;
        all++;
    }
    return all == 0 ? 0 : (double)shared / (double)all;
}

// ---- clusters --------------------------------------------------------------------------------------------------------------
// A document as one number that orders by priority, then by position.
struct DocumentRank {
    static constexpr int number_bits = 48;
    static uint64_t of(int64_t number, int priority) { return (uint64_t)priority << number_bits | (uint64_t)number; }
    static size_t number(uint64_t rank) { return (size_t)(rank & (((uint64_t)1 << number_bits) - 1)); }
};

// Union-find: the root of a tree is its smallest rank.
class Clusters {
public:
    explicit Clusters(const std::string& directory) : parents_(directory) {}

    // The number of the document that is kept instead of this one; itself if it is kept.
    int64_t representative(int64_t number) const {
        if ((size_t)number >= parents_.size() || parents_[(size_t)number] == 0) return number;
        return (int64_t)DocumentRank::number(parents_[(size_t)number] - 1);
    }
    bool dropped(int64_t number) const { return representative(number) != number; }
    int64_t n_dropped() const { return n_dropped_; }
    int64_t n_clusters() const { return n_clusters_; }  // of two or more documents

private:
    friend class NearDuplicates;
    bool alone(uint64_t rank) const { return parents_[DocumentRank::number(rank)] == 0; }
    uint64_t parent(uint64_t rank) const { return alone(rank) ? rank : parents_[DocumentRank::number(rank)] - 1; }
    uint64_t root(uint64_t rank) const {
        for (uint64_t above; (above = parent(rank)) != rank;) rank = above;
        return rank;
    }
    // The same; halves the path.
    uint64_t find(uint64_t rank) {
        for (uint64_t above; (above = parent(rank)) != rank;) {
            const uint64_t next = parent(above);
            parents_[DocumentRank::number(rank)] = next + 1;
            rank = next;
        }
        return rank;
    }
    void unite(uint64_t a, uint64_t b) {
        const uint64_t root_a = find(a), root_b = find(b);
        if (root_a == root_b) return;
        n_clusters_ += (int)(alone(root_a) && alone(root_b)) - (int)(!alone(root_a) && !alone(root_b));
        n_dropped_++;
        const uint64_t root = std::min(root_a, root_b);
        for (const uint64_t rank : {root_a, root_b}) parents_[DocumentRank::number(rank)] = root + 1;
    }
    // Points every document at its root.
    void finish() {
        for (size_t i = 0; i < parents_.size(); i++)
            if (parents_[i] != 0) parents_[i] = find(parents_[i] - 1) + 1;
    }
    DiskArray<uint64_t> parents_;  // by document: 0 if single, else its parent's rank + 1; a root is its own parent
    int64_t n_dropped_ = 0, n_clusters_ = 0;
};

// ---- the three steps -------------------------------------------------------------------------------------------------------
class NearDuplicates {
public:
    struct Signature {
        std::vector<uint64_t> bands;     // MinHash: a hash of each band; SimHash: the fingerprint; empty: no shingles
        std::vector<uint32_t> shingles;  // sorted, for verification
    };
    NearDuplicates(const NearDuplicateOptions& options, const std::string& work_directory, size_t memory_bytes)
        : options_(options),
          directory_(work_directory),
          memory_bytes_(memory_bytes),
          records_(work_directory, memory_bytes),
          sets_(work_directory),
          places_(work_directory) {
        options.check();
        if (options.hash_bits == 64) permutations64_ = Permutations<uint64_t>(options.bands * options.rows);
        else permutations32_ = Permutations<uint32_t>(options.bands * options.rows);
    }

    Signature sign(std::string_view text) const {
        Signature signature;
        if (options_.longest_characters > 0 && count_characters(text) > options_.longest_characters) return signature;
        if (options_.method == "simhash") {
            BitCounts counts;
            ShingleSet set;
            bool any = false;
            for_each_shingle(text, [&](uint64_t hash) {
                if (options_.verify_jaccard > 0) set.add((uint32_t)hash);
                counts.add(hash);
                any = true;
            });
            if (any) signature.bands.push_back(counts.majority());
            if (options_.verify_jaccard > 0) signature.shingles = set.sorted();
        } else if (options_.hash_bits == 64) {
            sign_bands(text, permutations64_, signature);
        } else {
            sign_bands(text, permutations32_, signature);
        }
        return signature;
    }

    // Documents in order; the one with the lowest priority number is kept.
    void add(int64_t number, int priority, const Signature& signature) {
        CHECK(number >= 0 && number < (int64_t)1 << DocumentRank::number_bits, "document %lld", (long long)number);
        CHECK(priority >= 0 && priority < 1 << 15, "priority %d", priority);
        n_documents_ = std::max(n_documents_, (size_t)number + 1);
        for (const uint64_t band : signature.bands) records_.add({band, DocumentRank::of(number, priority)});
        if (signature.shingles.empty()) return;
        if (places_.size() <= (size_t)number) places_.resize((size_t)number + 1);
        places_[(size_t)number] = sets_.size();
        const uint64_t n = signature.shingles.size();
        sets_.append(&n, sizeof n);
        sets_.append(signature.shingles.data(), n * sizeof(uint32_t));
    }

    Clusters solve(int threads) {
        Clusters clusters(directory_);
        clusters.parents_.resize(n_documents_);
        if (options_.method == "simhash") solve_simhash(clusters);
        else if (options_.verify_jaccard > 0) solve_verified(clusters, threads);
        else solve_bands(clusters);
        clusters.finish();
        return clusters;
    }

private:
    struct Record {
        uint64_t hash, rank;
        bool operator<(const Record& other) const { return hash != other.hash ? hash < other.hash : rank < other.rank; }
    };

    template <class F>
    void for_each_shingle(std::string_view text, F f) const {
        RollingHash shingle(options_.shingle_size);
        const auto add = [&](uint64_t hash) {
            if (shingle.add(hash)) f(shingle.value());
        };
        if (options_.shingle == "characters") return for_each_character(text, options_.folded, add);
        for_each_word<Punctuation::spaces, Digits::as_zero>(text, [&](uint64_t hash, size_t, size_t) { add(hash); });
    }
    template <class H>
    void sign_bands(std::string_view text, const Permutations<H>& permutations, Signature& signature) const {
        constexpr size_t most = 1024;
        std::array<H, most> hashes;
        std::vector<H> minima(permutations.padded(), (H)-1);
        ShingleSet set;
        size_t n = 0;
        bool any = false;
        const auto flush = [&] {
            permutations.lower(hashes.data(), n, minima.data());
            any |= n > 0;
            n = 0;
        };
        for_each_shingle(text, [&](uint64_t hash) {
            if (options_.verify_jaccard > 0) set.add((uint32_t)hash);
            hashes[n++] = (H)(hash >> (64 - 8 * sizeof(H)));
            if (n == most) flush();
        });
        flush();
        if (!any) return;
        const size_t band_bytes = (size_t)options_.rows * sizeof(H);
        for (int band = 0; band < options_.bands; band++) {
            const std::string_view rows((const char*)minima.data() + (size_t)band * band_bytes, band_bytes);
            signature.bands.push_back(murmur3_128(rows, (uint64_t)band).low);
        }
        if (options_.verify_jaccard > 0) signature.shingles = set.sorted();
    }

    void solve_bands(Clusters& clusters) {
        Record first{};
        bool any = false;
        records_.drain([&](const Record& record) {
            if (any && record.hash == first.hash) return clusters.unite(first.rank, record.rank);
            first = record;
            any = true;
        });
    }

    // ---- verified candidates ----
    std::vector<uint32_t> shingles_of(uint64_t rank) const {
        const size_t place = places_[DocumentRank::number(rank)];
        uint64_t n;
        sets_.read(place, &n, sizeof n);
        std::vector<uint32_t> shingles(n);
        sets_.read(place + sizeof n, shingles.data(), n * sizeof(uint32_t));
        return shingles;
    }
    bool resemble(const std::vector<uint32_t>& a, uint64_t b) const {
        return jaccard_index(a, shingles_of(b)) > options_.verify_jaccard;
    }
    // Each document is compared with the first of its band and, if it is not similar to that, with up to three others that were
    // not either: linear in the size of a band. Comparisons with the first are made in batches, which threads share.
    void solve_verified(Clusters& clusters, int threads) {
        constexpr size_t batch = 1 << 14, most_leaders = 4;
        std::vector<Record> some;
        std::vector<uint64_t> leaders;
        uint64_t hash = 0;
        const auto process = [&] {
            std::vector<uint64_t> first(some.size());  // of each one's band
            for (size_t i = 0; i < some.size(); i++)
                first[i] = i > 0 && some[i].hash == some[i - 1].hash            ? first[i - 1]
                           : i == 0 && !leaders.empty() && some[i].hash == hash ? leaders[0]
                                                                                : some[i].rank;
            std::vector<char> alike(some.size());
            std::mutex mutex;
            std::exception_ptr problem;  // the first one: no exception may leave a task
            constexpr size_t slice = 64;
            const auto compare = [&](size_t task) {
                std::vector<uint32_t> shingles;
                uint64_t whose = UINT64_MAX;
                for (size_t i = task * slice; i < std::min(some.size(), (task + 1) * slice); i++) {
                    if (clusters.root(first[i]) == clusters.root(some[i].rank)) continue;
                    if (whose != first[i]) shingles = shingles_of(whose = first[i]);
                    alike[i] = resemble(shingles, some[i].rank);
                }
            };
            const auto try_to_compare = [&](size_t task) {
                try {
                    compare(task);
                } catch (...) {
                    const std::lock_guard<std::mutex> lock(mutex);
                    if (!problem) problem = std::current_exception();
                }
            };
            cpu::parallel_tasks(ceil_div(some.size(), slice), try_to_compare, threads);
            if (problem) std::rethrow_exception(problem);
            for (size_t i = 0; i < some.size(); i++) {
                if (leaders.empty() || some[i].hash != hash) {
                    hash = some[i].hash;
                    leaders = {some[i].rank};
                    continue;
                }
                bool found = alike[i];
                if (found) clusters.unite(leaders[0], some[i].rank);
                for (size_t k = 0; k < leaders.size() && !found; k++)
                    found = clusters.root(leaders[k]) == clusters.root(some[i].rank);
                for (size_t k = 1; k < leaders.size() && !found; k++) {
                    found = resemble(shingles_of(leaders[k]), some[i].rank);
                    if (found) clusters.unite(leaders[k], some[i].rank);
                }
                if (!found && leaders.size() < most_leaders) leaders.push_back(some[i].rank);
            }
            some.clear();
        };
        records_.drain([&](const Record& record) {
            some.push_back(record);
            if (some.size() == batch) process();
        });
        process();
    }

    // ---- SimHash ----
    static uint64_t block_bits(int block, int blocks) {
        const int begin = 64 * block / blocks, length = 64 * (block + 1) / blocks - begin;
        return (((uint64_t)1 << length) - 1) << begin;
    }
    // Bits of a fingerprint with the chosen blocks first.
    static uint64_t permuted(uint64_t bits, int blocks, uint32_t chosen, int& key_bits) {
        uint64_t out = 0;
        key_bits = 0;
        for (const uint32_t wanted : {1u, 0u})
            for (int block = 0; block < blocks; block++) {
                if ((chosen >> block & 1) != wanted) continue;
                const int begin = 64 * block / blocks, length = 64 * (block + 1) / blocks - begin;
                out = out << length | (bits & block_bits(block, blocks)) >> begin;
                if (wanted) key_bits += length;
            }
        return out;
    }
    void solve_simhash(Clusters& clusters) {
        const auto unite = [&](uint64_t a, uint64_t b) {
            if (clusters.find(a) == clusters.find(b)) return true;
            if (options_.verify_jaccard > 0 && !resemble(shingles_of(a), b)) return false;
            clusters.unite(a, b);
            return true;
        };
        // Keeps one of several equal fingerprints, or as many as are not similar to each other, up to a limit, for linear time.
        constexpr size_t most_equal = 64;
        Spool<Record> different(directory_);
        std::vector<Record> equal;
        records_.drain([&](const Record& record) {
            if (!equal.empty() && equal[0].hash != record.hash) equal.clear();
            if (equal.size() == most_equal ||
                std::any_of(equal.begin(), equal.end(), [&](const Record& leader) { return unite(leader.rank, record.rank); }))
                return;
            equal.push_back(record);
            different.add(record);
        });
        const int k = options_.hamming;
        if (k == 0) return;
        int blocks = k + 2;  // more if too many documents would share the bits of two
        while (blocks < k + 6 && 64 * (blocks - k) / blocks < 62 &&
               (size_t)1 << (64 * (blocks - k) / blocks) < different.size())
            blocks++;
        for (uint32_t chosen = 0; chosen < 1u << blocks; chosen++) {
            if (__builtin_popcount(chosen) != blocks - k) continue;
            int key_bits = 0;
            ExternalSort<Record> sorted(directory_, memory_bytes_);
            different.for_each([&](const Record& r) { sorted.add({permuted(r.hash, blocks, chosen, key_bits), r.rank}); });
            // A pair with more equal blocks occurs several times: it is compared at the first choice, with its lowest equal
            // blocks.
            std::vector<uint64_t> lower;
            for (int block = 0, ignored; chosen >> block != 0; block++)
                if (!(chosen >> block & 1)) lower.push_back(permuted(block_bits(block, blocks), blocks, chosen, ignored));
            const auto met_before = [&](uint64_t bits) {
                return std::any_of(lower.begin(), lower.end(), [&](uint64_t block) { return (bits & block) == 0; });
            };
            std::vector<Record> group;
            sorted.drain([&](const Record& record) {
                if (!group.empty() && group[0].hash >> (64 - key_bits) != record.hash >> (64 - key_bits)) group.clear();
                for (const Record& other : group) {
                    const uint64_t bits = other.hash ^ record.hash;
                    if (__builtin_popcountll(bits) <= k && !met_before(bits)) unite(other.rank, record.rank);
                }
                group.push_back(record);
            });
        }
    }

    const NearDuplicateOptions options_;
    const std::string directory_;
    const size_t memory_bytes_;
    Permutations<uint64_t> permutations64_;
    Permutations<uint32_t> permutations32_;
    ExternalSort<Record> records_;
    WorkFile sets_;               // of each document with bands: the number of shingles, their hashes
    DiskArray<uint64_t> places_;  // of a document's set
    size_t n_documents_ = 0;
};
