// Top-p sampling without sorting draws the same tokens as with sorting, for any logits.
#include "../llmc/model/sampler.h"

#include <gtest/gtest.h>

#include "../llmc/base/json.h"
#include "../llmc/infer/json_prefix.h"

#include "testing.h"

namespace test_sampler {

// Any walk over allowed bytes ends in an object that a parser accepts, and never before.
TEST(JsonPrefix, AllowsOnlyObjects) {
    test::Rng rng(49);
    for (int walk = 0; walk < 3000; walk++) {
        JsonPrefix json;
        std::string text;
        while (!json.complete()) {
            std::string next;
            for (int c = 0; c < 256; c++) {
                JsonPrefix longer = json;
                if (longer.add({(const char*)&c, 1})) next += (char)c;
            }
            ASSERT_FALSE(next.empty()) << text;
            std::string likely;
            for (const char c : next)
                if (strchr("\"}]0e.\\ud:", c)) likely += c;
            if (text.size() > 200 && next.find_first_of("}]\"") != std::string::npos) likely = next[next.find_first_of("}]\"")];
            const std::string& from = likely.empty() || rng.below(10) == 0 ? next : likely;
            text += from[(size_t)rng.below((int)from.size())];
            ASSERT_TRUE(json.add({&text.back(), 1}));
            ASSERT_EQ(json.complete(), nlohmann::json::accept(text)) << text;
            ASSERT_LT(text.size(), 5000u);
        }
        ASSERT_TRUE(nlohmann::json::parse(text).is_object()) << text;
    }
}
TEST(JsonPrefix, AllowsWhatProgramsWrite) {
    for (const char* text :
         {"{}", " {\n  \"a\": [1, -2.5e+3, true, false, null, {\"b\": []}],\t\"\\u00e9\\n\": \"caf\u00e9 \U0001F600\"\r\n}",
          "{\"0\": 0, \"x\": 0.25, \"y\": [[], [0e1]]}"}) {
        JsonPrefix json;
        EXPECT_TRUE(json.add(text) && json.complete()) << text;
    }
    for (const char* text : {"[",          "1",           "\"",         "{,",        "{\"a\" 1",    "{\"a\":01", "{\"a\":1,}",
                             "{\"a\":[1}", "{\"a\":tru}", "{\"\x01",    "{\"\xc3\"", "{\"\xed\xa0", "{\"\\ud8",  "{\"\\x",
                             "{\"a\":-}",  "{\"a\":1.}",  "{\"a\":1e}", "{\"a\":.5", "{} ",         "{1"})
        EXPECT_FALSE(JsonPrefix().add(text)) << text;
}

// The definition: sort, keep, draw.
struct Sorted {
    std::vector<int> order;
    std::vector<double> p;
    size_t n_kept = 0;
    double kept = 0;  // their sum

    Sorted(const std::vector<float>& logits, const SamplingOptions& o) : order(logits.size()) {
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return logits[a] > logits[b]; });
        if (o.top_k > 0) order.resize(std::min(order.size(), (size_t)o.top_k));
        for (const int i : order) p.push_back(std::exp(((double)logits[i] - logits[order[0]]) / o.temperature));
        const double total = std::accumulate(p.begin(), p.end(), 0.0);
        while (n_kept < p.size() && (n_kept == 0 || kept < o.top_p * total)) kept += p[n_kept++];
    }
    size_t position_at(double uniform) const {
        double left = uniform * kept;
        size_t i = 0;
        for (const size_t end = uniform < 1 ? n_kept : p.size(); i + 1 < end && (left -= p[i]) >= 0;) i++;
        return i;
    }
    size_t position_of(int token) const { return (size_t)(std::find(order.begin(), order.end(), token) - order.begin()); }
};

TEST(Sampler, TopPDrawsWhatASortGives) {
    test::Rng rng(1);
    for (int round = 0; round < 400; round++) {
        const int V = 1 + rng.below(round % 4 ? 300 : 5000);
        std::vector<float> logits = rng.normals<float>((size_t)V);
        const float scale = std::vector<float>{0.f, 1.f, 3.f, 30.f}[(size_t)rng.below(4)];
        for (float& x : logits) x = round % 3 ? x * scale : std::round(x * scale);  // with ties
        if (round % 7 == 0) logits[(size_t)rng.below(V)] = 80;
        SamplingOptions o;
        o.temperature = std::vector<double>{0.1, 0.8, 1, 5}[(size_t)rng.below(4)];
        o.top_k = round % 5 ? 0 : 1 + rng.below(V);
        o.top_p = std::vector<double>{0, 0.1, 0.5, 0.9, 0.95, 0.999, 1 - 1e-12}[(size_t)rng.below(7)];
        const Sorted sorted(logits, o);
        // Sums of thousands of numbers in different orders differ in their last bits, which decide if almost everything is
        // kept.
        const double margin = o.top_p < 0.9999 ? 0 : 1e-12;
        for (int i = 0; i < 10; i++) {
            const double uniform = i == 0 ? 0 : i == 1 ? 1 - 0x1p-53 : rng.uniform();
            const size_t position = sorted.position_of(sample_token(logits.data(), V, o, uniform));
            ASSERT_TRUE(position >= sorted.position_at(uniform - margin) && position <= sorted.position_at(uniform + margin))
                << "V " << V << " top_p " << o.top_p << " top_k " << o.top_k << " uniform " << uniform;
        }
    }
}

// Rows of the vocabulary's padding may have any logits, even the largest.
TEST(Sampler, NeverDrawsAnIdWithoutAToken) {
    test::Rng rng(2);
    std::vector<float> logits = rng.normals<float>(100);
    for (int i = 60; i < 100; i++) logits[(size_t)i] += 50;
    for (const double temperature : {0.0, 0.5, 5.0})
        for (const int top_k : {0, 1, 80})
            for (const double top_p : {0.5, 1.0})
                for (int i = 0; i < 20; i++) {
                    const double uniform = i == 0 ? 0 : i == 1 ? 1 - 0x1p-53 : rng.uniform();
                    const SamplingOptions o = {temperature, top_k, top_p, 60};
                    const int token = sample_token(logits.data(), 100, o, uniform);
                    ASSERT_LT(token, 60);
                    ASSERT_EQ(token, sample_token(logits.data(), 60, {temperature, top_k, top_p}, uniform));
                }
}

}  // namespace test_sampler
