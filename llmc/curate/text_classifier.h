// A text classifier: softmax regression on hashed n-grams (text_features.h), trained here and fast enough to judge every
// document of a corpus.
//
//   score_k = sum over the n features i of the text of W[bucket_i, k] / sqrt(n)      p = softmax(score)
//
// The root makes longer texts give more confident answers, without counting each n-gram as independent evidence.
//
// Training minimizes the cross-entropy by AdaGrad (Duchi et al., JMLR 2011): W -= rate * g / sqrt(sum of g^2), where a
// feature's g is (p - label) / sqrt(n). In each epoch the order of texts is drawn and, for languages, the lengths of their
// pieces, so that short texts are learned as well as long ones. A batch's gradients use the weights before it and are applied
// in the texts' order, each thread to its own buckets: the model's bits do not depend on the number of threads.
//
// The weights are kept and stored as 8 bits each with one scale for all. File:
//   8 bytes "TGPTCLS1", uint32 CRC-32C of all that follows, uint32 length of the header, header, weights int8 (2^bits, labels)
// The header is JSON: labels, features, lengths of n-grams, bits, scale. All numbers are little-endian.
#pragma once
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <string_view>
#include <vector>

#include "../base/check.h"
#include "../base/crc32c.h"
#include "../base/file.h"
#include "../base/json.h"
#include "../base/rng.h"
#include "../base/text.h"
#include "text_features.h"

struct LabeledText {
    std::string_view text;
    int label;
};

// The input features of a model.
struct ClassifierShape {
    std::string features = "characters";  // or words
    int shortest = 1, longest = 4;        // n-grams
    int bits = 16;                        // 2^bits buckets
};
struct ClassifierTraining {
    int epochs = 3;
    double learning_rate = 0.3;
    size_t shortest_piece = 0, longest_piece = 0;  // bytes; 0: whole texts
    uint64_t seed = 1;
    int threads = 1;
};

class TextClassifier {
public:
    static constexpr std::string_view magic = "TGPTCLS1";  // at the start of a file

    struct Guess {
        std::string label;
        float probability;
    };

    static TextClassifier load(const std::string& path) {
        const MappedFile file(path);
        return from_bytes(file.text(), path);
    }
    // `name` is the file's, for messages.
    static TextClassifier from_bytes(std::string_view bytes, const std::string& name) {
        if (bytes.substr(0, 4) == "\xba\x16\x4f\x2f")
            fail(
                "%s is a fastText model, which is not supported; HINT: `train_gpt curate --train-language` trains a "
                "supported one",
                name.c_str());
        if (bytes.substr(0, magic.size()) != magic)
            fail("%s is not a classifier; HINT: `train_gpt curate --train-language` and `--train-quality` write them",
                 name.c_str());
        uint32_t checksum = 0, header_bytes = 0;
        constexpr size_t fixed = magic.size() + 8;
        if (bytes.size() >= fixed) {
            memcpy(&checksum, &bytes[magic.size()], 4);
            memcpy(&header_bytes, &bytes[magic.size() + 4], 4);
        }
        const bool whole =
            bytes.size() >= fixed && crc32c(&bytes[magic.size() + 4], bytes.size() - magic.size() - 4) == checksum;
        if (!whole || header_bytes > bytes.size() - fixed)
            fail("%s is damaged or truncated: its checksum does not match; HINT: copy it again, or train it again",
                 name.c_str());
        const nlohmann::json header = parse_json(bytes.substr(fixed, header_bytes), name);
        TextClassifier c;
        try {
            // A number outside int is refused by check().
            const auto number = [&](const char* key) {
                const double x = header.at(key).get<double>();
                return x >= 0 && x < 1e6 ? (int)x : -1;
            };
            header.at("labels").get_to(c.labels_);
            header.at("features").get_to(c.shape_.features);
            c.shape_.shortest = number("shortest");
            c.shape_.longest = number("longest");
            c.shape_.bits = number("bits");
            const double scale = header.at("scale").get<double>();
            c.scale_ = scale >= 0 && scale < 1e6 ? (float)scale : -1;
        } catch (const nlohmann::json::exception& e) {
            fail("%s is not a supported classifier: %s", name.c_str(), json_problem(e).c_str());
        }
        c.check(name);
        const std::string_view weights = bytes.substr(fixed + header_bytes);
        if (weights.size() != c.buckets() * c.labels_.size())
            fail("%s is not a classifier that this program reads: %zu labels and 2^%d buckets take %zu bytes; it has %zu",
                 name.c_str(), c.labels_.size(), c.shape_.bits, c.buckets() * c.labels_.size(), weights.size());
        c.set_weights((const int8_t*)weights.data());
        return c;
    }
    void save(const std::string& path) const {
        const nlohmann::ordered_json header = {{"labels", labels_},           {"features", shape_.features},
                                               {"shortest", shape_.shortest}, {"longest", shape_.longest},
                                               {"bits", shape_.bits},         {"scale", scale_}};
        const std::string text = json_text(header);
        const uint32_t header_bytes = (uint32_t)text.size();
        std::string body((const char*)&header_bytes, 4);
        body += text;
        for (size_t row = 0; row < buckets(); row++) body.append((const char*)&weights_[row * stride_], labels_.size());
        const uint32_t checksum = crc32c(body.data(), body.size());
        FileWriter file(path);
        file.write(magic);
        file.write(&checksum, 4);
        file.write(body);
        file.commit();
    }

    const std::vector<std::string>& labels() const { return labels_; }
    const ClassifierShape& shape() const { return shape_; }

    // The probability of each label, all equal for an empty text.
    std::vector<float> probabilities(std::string_view text) const {
        std::vector<int64_t> sums(stride_);
        int64_t n = 0;
        constexpr size_t block = 128;  // the sum of this many 8-bit weights fits in 16 bits
        uint32_t rows[block];
        size_t waiting = 0;
        const auto flush = [&] {
            add_rows(rows, waiting, sums.data());
            n += (int64_t)waiting;
            waiting = 0;
        };
        for_each_feature(text, shape_, [&](uint32_t row) {
            rows[waiting++] = row;
            if (waiting == block) flush();
        });
        flush();
        std::vector<float> p(labels_.size());
        const double root = n > 0 ? 1 / std::sqrt((double)n) : 0;
        for (size_t k = 0; k < p.size(); k++) p[k] = (float)((double)sums[k] * scale_ * root);
        softmax(p);
        return p;
    }
    Guess classify(std::string_view text) const {
        const std::vector<float> p = probabilities(text);
        const size_t best = (size_t)(std::max_element(p.begin(), p.end()) - p.begin());
        return {labels_[best], p[best]};
    }

    bool has(const std::string& label) const { return std::find(labels_.begin(), labels_.end(), label) != labels_.end(); }
    float probability_of(const std::string& label, std::string_view text) const {
        return probabilities(text)[(size_t)(std::find(labels_.begin(), labels_.end(), label) - labels_.begin())];
    }
    std::string label_list() const { return joined(labels_); }

    // Occasionally calls progress(texts read, counted in each epoch).
    static TextClassifier train(std::vector<std::string> labels, const ClassifierShape& shape, const ClassifierTraining& how,
                                const std::vector<LabeledText>& texts, const std::function<void(int64_t)>& progress = nullptr);

private:
    template <class Add>
    static void for_each_feature(std::string_view text, const ClassifierShape& shape, const Add& add) {
        const auto of = shape.features == "words" ? features::of_words<Add> : features::of_characters<Add>;
        of(text, shape.shortest, shape.longest, shape.bits, add);
    }
    size_t buckets() const { return (size_t)1 << shape_.bits; }
    void check(const std::string& name) const {
        const bool words = shape_.features == "words";
        if (labels_.size() < 2 || labels_.size() > 1000 || (!words && shape_.features != "characters") || shape_.shortest < 1 ||
            shape_.shortest > shape_.longest || shape_.longest > (words ? 3 : 5) || shape_.bits < 1 || shape_.bits > 26 ||
            scale_ < 0)
            fail(
                "%s is not a supported classifier: its header exceeds the limits (2 to 1,000 labels, n-grams of 1 to 5 "
                "characters or 1 to 3 words, 2^1 to 2^26 buckets)",
                name.c_str());
    }
    // Rows are padded, so that whole vectors are added.
    void set_weights(const int8_t* from) {
        const size_t n = labels_.size();
        stride_ = n <= 2 ? 2 : n <= 16 ? 16 : (n + 31) / 32 * 32;
        weights_.assign(buckets() * stride_, 0);
        for (size_t row = 0; row < buckets(); row++) std::copy_n(from + row * n, n, &weights_[row * stride_]);
    }

    // Adds columns of the rows, in vectors of 16, which compilers do not generate from the plain loop.
    typedef int8_t Codes __attribute__((vector_size(16)));
    typedef int16_t Sums __attribute__((vector_size(32)));
    template <size_t vectors>
    void add_columns(const uint32_t* rows, size_t n, size_t column, int64_t* sums) const {
        Sums acc[vectors] = {};
        for (size_t i = 0; i < n; i++)
            for (size_t v = 0; v < vectors; v++) {
                Codes codes;
                memcpy(&codes, &weights_[rows[i] * stride_ + column + 16 * v], 16);
                acc[v] += __builtin_convertvector(codes, Sums);
            }
        for (size_t k = 0; k < 16 * vectors; k++) sums[column + k] += acc[k / 16][k % 16];
    }
    void add_rows(const uint32_t* rows, size_t n, int64_t* sums) const {
        if (stride_ == 2)
            for (size_t i = 0; i < n; i++)
                for (size_t k = 0; k < 2; k++) sums[k] += weights_[rows[i] * 2 + k];
        else if (stride_ == 16) add_columns<1>(rows, n, 0, sums);
        else
            for (size_t column = 0; column < stride_; column += 32) add_columns<2>(rows, n, column, sums);
    }
    static void softmax(std::vector<float>& x) {
        const float highest = *std::max_element(x.begin(), x.end());
        float sum = 0;
        for (float& value : x) sum += value = std::exp(value - highest);
        for (float& value : x) value /= sum;
    }

    std::vector<std::string> labels_;
    ClassifierShape shape_;
    float scale_ = 0;  // of a weight's unit
    size_t stride_ = 0;
    std::vector<int8_t> weights_;  // (2^bits, labels padded to stride_)
};

// ---- training --------------------------------------------------------------------------------------------------------------
// The steps of training: weights; a batch's changes; epochs of shuffled pieces; rounding to codes.
inline TextClassifier TextClassifier::train(std::vector<std::string> labels, const ClassifierShape& shape,
                                            const ClassifierTraining& how, const std::vector<LabeledText>& texts,
                                            const std::function<void(int64_t)>& progress) {
    TextClassifier c;
    c.labels_ = std::move(labels);
    c.shape_ = shape;
    c.check("the requested model");
    const size_t n_labels = c.labels_.size(), n_weights = c.buckets() * n_labels;
    std::vector<float> weights(n_weights), squares(n_weights, 1e-2f);  // (buckets, labels): W, and the sums of g^2
    const float rate = (float)how.learning_rate;

    struct Example {
        std::vector<uint32_t> rows;
        std::vector<float> error;  // (labels): (p - label) / sqrt(n)
        std::string_view text;
        int label = 0;
    };
    constexpr size_t batch_size = 32;
    std::vector<Example> batch(batch_size);
    std::vector<uint64_t> keys(texts.size());
    std::vector<uint32_t> order(texts.size());
    const auto learn = [&](size_t n_pieces) {
#pragma omp parallel num_threads(how.threads)
        {
#pragma omp for schedule(static)
            for (size_t i = 0; i < n_pieces; i++) {
                Example& piece = batch[i];
                piece.rows.clear();
                for_each_feature(piece.text, c.shape_, [&](uint32_t row) { piece.rows.push_back(row); });
                piece.error.assign(n_labels, 0);
                if (piece.rows.empty()) continue;
                const float root = 1 / std::sqrt((float)piece.rows.size());
                for (const uint32_t row : piece.rows)
                    for (size_t k = 0; k < n_labels; k++) piece.error[k] += weights[row * n_labels + k];
                for (float& score : piece.error) score *= root;
                softmax(piece.error);
                piece.error[(size_t)piece.label] -= 1;
                for (float& value : piece.error) value *= root;
            }
            const uint32_t thread = (uint32_t)omp_get_thread_num(), n_threads = (uint32_t)omp_get_num_threads();
            for (size_t i = 0; i < n_pieces; i++)
                for (const uint32_t row : batch[i].rows) {
                    if (n_threads > 1 && row % n_threads != thread) continue;
                    float *w = &weights[row * n_labels], *s = &squares[row * n_labels];
                    const float* g = batch[i].error.data();
                    for (size_t k = 0; k < n_labels; k++) {
                        s[k] += g[k] * g[k];
                        w[k] -= rate * g[k] / std::sqrt(s[k]);
                    }
                }
        }
    };
    for (int epoch = 0; epoch < how.epochs; epoch++) {
        for (size_t i = 0; i < texts.size(); i++) {
            const auto r = random_bits(how.seed, RngPurpose::classifier, (uint32_t)epoch, i);
            keys[i] = (uint64_t)r[0] << 32 | r[1];
        }
        std::iota(order.begin(), order.end(), 0);
        std::sort(order.begin(), order.end(),
                  [&](uint32_t a, uint32_t b) { return std::pair(keys[a], a) < std::pair(keys[b], b); });
        size_t waiting = 0;
        for (size_t i = 0; i < order.size(); i++) {
            const LabeledText& whole = texts[order[i]];
            std::string_view left = whole.text;
            for (uint64_t cut = 0; !left.empty(); cut++) {
                size_t length = left.size();
                if (how.longest_piece > 0) {  // log-uniform
                    const double u = uniform_at(how.seed ^ keys[order[i]], RngPurpose::classifier, (uint32_t)epoch + 1000, cut);
                    const double drawn =
                        (double)how.shortest_piece * std::pow((double)how.longest_piece / (double)how.shortest_piece, u);
                    length = std::min(length, (size_t)drawn + 1);
                    while (length < left.size() && !begins_character(left[length])) length++;
                }
                batch[waiting].text = left.substr(0, length);
                batch[waiting++].label = whole.label;
                left.remove_prefix(length);
                if (waiting == batch_size) {
                    learn(waiting);
                    waiting = 0;
                }
            }
            if (progress && i % 1024 == 0) progress((int64_t)((size_t)epoch * order.size() + i));
        }
        learn(waiting);
    }

    float largest = 0;
    for (const float w : weights) largest = std::max(largest, std::fabs(w));
    c.scale_ = largest / 127;
    std::vector<int8_t> codes(n_weights);
    for (size_t i = 0; i < n_weights; i++) codes[i] = (int8_t)std::lround(largest > 0 ? weights[i] / c.scale_ : 0);
    c.set_weights(codes.data());
    return c;
}
