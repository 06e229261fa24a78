// Shared by the tests of attention on CPU and GPU: problems, sums in double as references, and requirements for every
// implementation. Allowed errors: one rounding per result plus a first order bound on the fp32 arithmetic inside, u = 2^-24. A
// score s has an absolute error e; p = exp(s - m) then a relative error exp(e) - 1; the sums over keys or queries add one
// rounding per term. The Arithmetic of each implementation describes the differences.
#pragma once
#include <gtest/gtest.h>

#include <utility>

#include "attention_cases.h"
#include "testing.h"

namespace test::attention {

constexpr double u = roundoff<real>;
template <class T>
constexpr double rounding = roundoff<T> * 1.01;  // of a value that was itself computed with small error
constexpr double tiny = 1e-30;                   // weights below e^-86.6 are 0

// ---- problems --------------------------------------------------------------------------------------------------------------
template <class T>
struct Problem {
    Case k;
    real scale;
    std::vector<T> qkv, dout, sinks = Rng(3).normals<T>(k.NH);
    std::vector<real> slopes;
    std::vector<int> doc_start;

    Problem(const Case& shape, std::vector<T> inp, std::vector<T> gradient, double factor)
        : k(shape), scale((real)factor), qkv(std::move(inp)), dout(std::move(gradient)), doc_start(k.first_keys()) {
        for (int h = 0; h < k.NH; h++) slopes.push_back((real)std::exp2(-8.0 * (h + 1) / k.NH));
    }
    Problem(const Case& shape, uint64_t seed)
        : Problem(shape, Rng(seed).normals<T>(shape.rows() * shape.width(), 1.5),
                  Rng(seed + 1).normals<T>(shape.rows() * shape.NH * shape.HS), 1 / std::sqrt((double)shape.HS)) {}

    int first_key(int row) const { return doc_start[row]; }
    AttentionShape shape() const { return k.shape(scale); }
};

template <class T>
struct Results {
    std::vector<T> out, dqkv;
    std::vector<real> lse, dsinks;  // dsinks: zeros without sinks, or none
};

// ---- reference -------------------------------------------------------------------------------------------------------------
// Bounds on the rounding errors of an implementation's arithmetic, first order, relative unless stated otherwise. Each test
// file derives its own.
struct Arithmetic {
    double operand = 0;    // a weight and its gradient, rounded as operands of a matrix unit
    int tile = 0;          // tokens per partial sum
    double logarithm = 0;  // lse's last steps, relative to its two parts: the largest score and the logarithm of the sum
    double division = 0;   // out's last steps: the sum over keys becomes a mean

    virtual ~Arithmetic() = default;
    // A weight exp(score - top) after `tiles` tiles, and exp(score - log_sum); the score has an absolute error.
    virtual double forward_weight(double score, double top, double score_error, int tiles) const = 0;
    virtual double backward_weight(double score, double log_sum, double score_error) const = 0;
    // ALiBi's bias, absolute: the slope times a distance in tokens.
    virtual double bias(double slope, int distance) const { return 4 * u * slope * distance; }
    // A capped score, absolute.
    virtual double cap(double /*cap*/, double value) const { return 6 * u * std::abs(value); }
    // A sink's contribution to the error of lse, absolute, and of out; and the steps of its gradient except sums.
    virtual double lse_with_sink(double /*top*/) const { return 0; }
    virtual double out_with_sink(double top) const { return lse_with_sink(top); }
    virtual double sink_gradient(double /*exponent*/) const { return 0; }
};

struct Bounded {
    Doubles value, allowed, usual;  // usual: the squared error to expect of independent roundings of results and operands
    explicit Bounded(size_t n) : value(n), allowed(n, tiny), usual(n) {}
    void add(size_t i, double x, double error, double rounded = 0) {
        value[i] += x;
        allowed[i] += error;
        usual[i] += rounded * rounded;
    }
};

struct Expected {
    Bounded out, lse, dqkv, dsinks;
};

// The score s of a soft cap, and the derivative; each with an error if s has the error `s_error`.
struct Capped {
    double value, error, derivative = 1, derivative_error = 0;
    Capped(double s, double s_error, double cap, const Arithmetic& arithmetic) : value(s), error(s_error) {
        if (cap == 0) return;
        const double t = std::tanh(s / cap);
        value = cap * t;
        error += arithmetic.cap(cap, value);
        derivative = 1 - t * t;
        derivative_error = 2 * std::abs(t) * error / cap + 4 * u;
    }
};

// Reads the problem and the arithmetic that it was made with during its lifetime.
template <class T>
class Reference {
public:
    // exact_scores: the numbers are such that fp32 computes every score without error.
    Reference(const Problem<T>& p, const Arithmetic& arithmetic, bool exact_scores = false)
        : p_(p), arithmetic_(arithmetic), qkv_(doubles(p.qkv)), dout_(doubles(p.dout)), exact_(exact_scores) {}

    // Gradients are computed from the op's out and lse.
    Expected of(const Results<T>& r) const {
        Expected e = {Bounded(r.out.size()), Bounded(r.lse.size()), Bounded(r.dqkv.size()), Bounded(r.dsinks.size())};
        const Doubles out = doubles(r.out), lse = doubles(r.lse);
        forward(e.out, e.lse);
        backward(e.dqkv, out, lse);
        if (k_.sinks) sinks_backward(e.dsinks, out, lse);
        return e;
    }

    void forward(Bounded& out, Bounded& lse) const {
        for (int row = 0; row < (int)k_.rows(); row++)
            for (int h = 0; h < k_.NH; h++) {
                const int b = row / k_.T, t = row % k_.T, first = p_.first_key(row);
                const Scores s = scores(b, h, t);
                const double sink = k_.sinks ? as_double(p_.sinks[h]) : -std::numeric_limits<double>::infinity();
                double top = sink, sum = 0;
                for (const double x : s.value) top = std::max(top, x);
                for (const double x : s.value) sum += std::exp(x - top);
                sum += std::exp(sink - top);
                Doubles weight, relative;
                double sum_error = (k_.T + 4) * u;
                for (size_t j = 0; j < s.value.size(); j++) {
                    weight.push_back(std::exp(s.value[j] - top) / sum);
                    relative.push_back(arithmetic_.forward_weight(s.value[j], top, s.error[j], k_.T / arithmetic_.tile + 1));
                    sum_error += weight[j] * relative[j];
                }
                const double lse_error = sum_error + (k_.sinks ? arithmetic_.lse_with_sink(top) : 0);
                const double out_error = sum_error + (k_.sinks ? arithmetic_.out_with_sink(top) : 0);
                lse.add(k_.statistic(b, t, h), top + std::log(sum),
                        lse_error + arithmetic_.logarithm * (std::abs(top) + std::log(sum)));
                for (int c = 0; c < k_.HS; c++) {
                    const size_t i = k_.output(b, t, h, c);
                    for (size_t j = 0; j < s.value.size(); j++) {
                        const double x = weight[j] * s.keep[j] * at(b, first + (int)j, k_.value_head(h), c);
                        out.add(i, x, std::abs(x) * (relative[j] + arithmetic_.operand + (k_.T + 4) * u),
                                x * arithmetic_.operand);
                    }
                    const double steps = arithmetic_.division + (k_.sinks ? 2 : 1) * rounding<T>;
                    const double value = out.value[i];
                    out.add(i, 0, std::abs(value) * (out_error + steps), value * rounding<T>);
                }
            }
    }

private:
    struct Scores {
        Doubles value, error, derivative, derivative_error, keep;
    };
    double at(int b, int t, int head, int c) const { return qkv_[k_.index(b, t, head, c)]; }

    void backward(Bounded& d, const Doubles& out, const Doubles& lse) const {
        const int HS = k_.HS;
        const double operand = arithmetic_.operand, scale = (double)p_.scale;
        const double terms = (double)k_.T * k_.group() + k_.T / arithmetic_.tile + 8;  // of the longest sum
        for (int row = 0; row < (int)k_.rows(); row++)
            for (int h = 0; h < k_.NH; h++) {
                const int b = row / k_.T, t = row % k_.T, first = p_.first_key(row);
                const Scores s = scores(b, h, t);
                const double *dy = &dout_[k_.output(b, t, h, 0)], *y = &out[k_.output(b, t, h, 0)];
                const double log_sum = lse[k_.statistic(b, t, h)];
                double correction = 0, correction_magnitude = 0;
                for (int c = 0; c < HS; c++) {
                    correction += dy[c] * y[c];
                    correction_magnitude += std::abs(dy[c] * y[c]);
                }
                for (int j = first; j <= t; j++) {
                    const double score = s.value[j - first], keep = s.keep[j - first], slope = s.derivative[j - first];
                    const double w = std::exp(score - log_sum);
                    const double w_error = w * arithmetic_.backward_weight(score, log_sum, s.error[j - first]);
                    double dw = 0, dw_magnitude = 0;
                    for (int c = 0; c < HS; c++) {
                        const double x = keep * dy[c] * at(b, j, k_.value_head(h), c);
                        dw += x;
                        dw_magnitude += std::abs(x);
                    }
                    const double ds = scale * slope * w * (dw - correction);
                    const double ds_error =
                        scale * ((slope * (w_error + (4 * u + operand) * w) + s.derivative_error[j - first] * w) *
                                     std::abs(dw - correction) +
                                 (w + w_error) * (HS + 2) * u * (dw_magnitude + correction_magnitude));
                    for (int c = 0; c < HS; c++) {
                        const double q = at(b, t, h, c), key = at(b, j, k_.key_head(h), c), dv = keep * w * dy[c];
                        d.add(k_.index(b, j, k_.value_head(h), c), dv,
                              keep * std::abs(dy[c]) * (w_error + (terms * u + operand) * w), dv * operand);
                        d.add(k_.index(b, t, h, c), ds * key, std::abs(key) * (ds_error + terms * u * std::abs(ds)),
                              ds * key * operand);
                        d.add(k_.index(b, j, k_.key_head(h), c), ds * q, std::abs(q) * (ds_error + terms * u * std::abs(ds)),
                              ds * q * operand);
                    }
                }
            }
        for (size_t i = 0; i < d.value.size(); i++) {
            const double rounded = rounding<T> * std::abs(d.value[i]);
            d.add(i, 0, rounded, rounded);
        }
    }

    void sinks_backward(Bounded& d, const Doubles& out, const Doubles& lse) const {
        for (size_t i = 0; i < out.size(); i++) {
            const size_t h = i / k_.HS % k_.NH, row = i / k_.HS / k_.NH;
            const double exponent = as_double(p_.sinks[h]) - lse[(row / k_.T * k_.NH + h) * k_.T + row % k_.T];
            const double term = std::exp(exponent) * dout_[i] * out[i];
            d.add(h, -term, std::abs(term) * (arithmetic_.sink_gradient(exponent) + (k_.HS + (double)k_.rows()) * u));
        }
    }

    Scores scores(int b, int h, int t) const {
        Scores s;
        const double slope = k_.alibi ? (double)p_.slopes[h] : 0, scale = (double)p_.scale;
        for (int j = p_.first_key(b * k_.T + t); j <= t; j++) {
            double dot = 0, magnitude = 0;
            for (int c = 0; c < k_.HS; c++) {
                const double x = at(b, t, h, c) * at(b, j, k_.key_head(h), c);
                dot += x;
                magnitude += std::abs(x);
            }
            const Capped score(scale * dot, exact_ ? 0 : u * (k_.HS + 3) * scale * magnitude, k_.softcap, arithmetic_);
            s.value.push_back(score.value + slope * (j - t));
            s.error.push_back(exact_ ? 0 : score.error + arithmetic_.bias(slope, t - j));
            s.derivative.push_back(score.derivative);
            s.derivative_error.push_back(score.derivative_error);
            s.keep.push_back((double)shape_.dropout.of(shape_.weight(b, h, t, j)));
        }
        return s;
    }

    const Problem<T>& p_;
    const Arithmetic& arithmetic_;
    const Case& k_ = p_.k;
    const AttentionShape shape_ = p_.shape();
    const Doubles qkv_, dout_;
    const bool exact_;
};

// ---- comparisons -----------------------------------------------------------------------------------------------------------
// Returns the expected values.
template <class T>
Expected check(const Problem<T>& p, const Results<T>& r, const Arithmetic& arithmetic, bool exact_scores = false) {
    const Expected expected = Reference<T>(p, arithmetic, exact_scores).of(r);
    expect_close(r.out, expected.out.value, expected.out.allowed, "out");
    expect_close(r.lse, expected.lse.value, expected.lse.allowed, "lse");
    expect_close(r.dqkv, expected.dqkv.value, expected.dqkv.allowed, "dqkv");
    expect_close(r.dsinks, expected.dsinks.value, expected.dsinks.allowed, "dsinks");
    return expected;
}

// A row that sees only itself has weight 1: its value is unchanged, or has the given relative error.
template <class T>
void expect_first_tokens_unchanged(const Problem<T>& p, const Results<T>& r, double error = 0) {
    const Case& k = p.k;
    for (int b = 0; b < k.B; b++)
        for (int t = 0; t < k.T; t++)
            for (int h = 0; h < k.NH && p.first_key(b * k.T + t) == t && !k.sinks && k.dropout == 0; h++)
                for (int c = 0; c < k.HS; c++) {
                    const double x = as_double(p.qkv[k.index(b, t, k.value_head(h), c)]);
                    ASSERT_NEAR(as_double(r.out[k.output(b, t, h, c)]), x, error * std::abs(x))
                        << "sequence " << b << ", row " << t << ", head " << h;
                }
}

template <class T>
void expect_same_results(const Results<T>& a, const Results<T>& b) {
    expect_same_bits(a.out, b.out, "out");
    expect_same_bits(a.lse, b.lse, "lse");
    expect_same_bits(a.dqkv, b.dqkv, "dqkv");
    expect_same_bits(a.dsinks, b.dsinks, "dsinks");
}

// ---- some rows --------------------------------------------------------------------------------------------------------------
// A chunk of a sequence's queries, and all keys and values up to its end, as attention_rows_forward and _backward read them.
template <class T>
struct QueryChunk {
    std::vector<T> qkv, kv, dout;
    std::vector<int> doc_start;
    AttentionShape shape;
    QueryChunk(const Problem<T>& p, int b, int first, int end) : shape(p.shape()) {
        const Case& k = p.k;
        const auto rows = [&](const auto& x, int from, int to) {
            const size_t row = x.size() / k.rows();
            return std::vector(x.begin() + (b * k.T + from) * row, x.begin() + (b * k.T + to) * row);
        };
        qkv = rows(p.qkv, first, end);
        dout = rows(p.dout, first, end);
        doc_start = rows(p.doc_start, first, end);
        const size_t queries = (size_t)k.NH * k.HS;
        for (int t = 0; t < end; t++) {
            const T* row = &p.qkv[k.index(b, t, 0, 0)];
            kv.insert(kv.end(), row + queries, row + k.width());
        }
        for (int t = first; t < end; t++)  // a rank has these, but attention must not read them
            std::fill_n(&qkv[(t - first) * k.width() + queries], k.width() - queries, from_double<T>(std::nan("")));
        shape.B = 1;
        shape.first = first;
        shape.T = end;
        shape.whole_T = k.T;
        shape.apart = true;
        shape.dropout = shape.dropout.from((size_t)b * shape.all_heads * k.T * k.T);
    }
};

// The chunks that start at each of `starts` have the results of the whole sequences. run(chunk) returns out, lse, the
// gradient of queries in dqkv, and of keys and values in dkv.
template <class T>
struct ChunkResults {
    std::vector<T> out, dqkv, dkv;
    std::vector<real> lse;
};
template <class T, class Run>
void expect_whole_from_chunks(const Problem<T>& p, const Results<T>& whole, const std::vector<int>& starts, Run run) {
    const Case& k = p.k;
    const size_t queries = (size_t)k.NH * k.HS, keys = k.width() - queries;
    const auto close = [](double x, double expected, double scale, const char* what) {
        ASSERT_NEAR(x, expected, (8 * rounding<T> + 64 * u) * std::max(scale, std::abs(expected))) << what;
    };
    for (int b = 0; b < k.B; b++) {
        Doubles dkv(k.T * keys), largest(k.T * keys);
        for (size_t i = 0; i < starts.size(); i++) {
            const int first = starts[i], end = i + 1 < starts.size() ? starts[i + 1] : k.T;
            SCOPED_TRACE(testing::Message() << "sequence " << b << ", rows " << first << " to " << end);
            const QueryChunk<T> chunk(p, b, first, end);
            const ChunkResults<T> r = run(chunk);
            ASSERT_EQ(r.dkv.size(), end * keys);
            for (int t = first; t < end; t++)
                for (int h = 0; h < k.NH; h++) {
                    close(r.lse[chunk.shape.statistic(0, t, h)], whole.lse[k.statistic(b, t, h)], 1, "lse");
                    for (int c = 0; c < k.HS; c++) {
                        close(as_double(r.out[chunk.shape.output(0, t, h) + c]), as_double(whole.out[k.output(b, t, h, c)]), 1,
                              "out");
                        close(as_double(r.dqkv[chunk.shape.query(0, t, h) + c]), as_double(whole.dqkv[k.index(b, t, h, c)]), 1,
                              "gradient of queries");
                    }
                }
            for (size_t j = 0; j < r.dkv.size(); j++) {
                dkv[j] += as_double(r.dkv[j]);
                largest[j] = std::max(largest[j], std::abs(as_double(r.dkv[j])));
            }
        }
        for (size_t j = 0; j < dkv.size(); j++)
            close(dkv[j], as_double(whole.dqkv[k.index(b, (int)(j / keys), 0, 0) + queries + j % keys]), 2 + 2 * largest[j],
                  "gradient of keys and values");
    }
}

// ---- equal scores ----------------------------------------------------------------------------------------------------------
// Each row is the mean of the values so far, lse the logarithm of their number. One sequence, one key/value head.
template <class T>
Problem<T> equal_scores(const Case& k) {
    std::vector<T> qkv(k.rows() * k.width(), from_double<T>(0));
    for (int t = 0; t < k.T; t++)
        for (int c = 0; c < k.HS; c++) qkv[k.index(0, t, k.value_head(0), c)] = from_double<T>(t % 8 - c);
    return Problem<T>(k, qkv, Rng(6).normals<T>(k.rows() * k.NH * k.HS), 1);
}

template <class T>
void expect_means(const Case& k, const Results<T>& r, const Arithmetic& arithmetic) {
    double sum = 0;
    for (int t = 0; t < k.T; t++) {
        sum += t % 8;
        for (int h = 0; h < k.NH; h++) {
            EXPECT_NEAR(r.lse[k.statistic(0, t, h)], std::log(t + 1.0), 8 * u * (1 + std::log(t + 1.0)));
            for (int c = 0; c < k.HS; c++) {
                const double mean = sum / (t + 1) - c;  // the sums are whole numbers, weights are 1, both exact
                EXPECT_NEAR(as_double(r.out[k.output(0, t, h, c)]), mean, (rounding<T> + arithmetic.division) * std::abs(mean));
            }
        }
    }
}

// ---- masking ---------------------------------------------------------------------------------------------------------------
// Replaces tokens from one on by others, a million million times larger: earlier rows keep their bits, out and lse and their
// queries' gradients. One sequence; run(problem) returns the results.
template <class T, class Run>
void expect_later_tokens_change_nothing(const Problem<T>& p, const std::vector<int>& changes, Run run) {
    const Case& k = p.k;
    const Results<T> before = run(p);
    for (const int changed : changes) {
        SCOPED_TRACE(testing::Message() << "tokens from " << changed << " on changed");
        Problem<T> other = p;
        const std::vector<T> noise = Rng(9).normals<T>(other.qkv.size(), 1e12);
        std::copy(noise.begin() + changed * k.width(), noise.end(), other.qkv.begin() + changed * k.width());
        const Results<T> after = run(other);
        const auto until = [&](const auto& x, size_t row) { return std::vector(x.begin(), x.begin() + changed * row); };
        expect_same_bits(until(after.out, k.NH * k.HS), until(before.out, k.NH * k.HS), "out");
        for (int t = 0; t < changed; t++)
            for (int h = 0; h < k.NH; h++) {
                ASSERT_EQ(after.lse[k.statistic(0, t, h)], before.lse[k.statistic(0, t, h)]) << "lse of row " << t;
                for (int c = 0; c < k.HS; c++)
                    ASSERT_EQ(as_double(after.dqkv[k.index(0, t, h, c)]), as_double(before.dqkv[k.index(0, t, h, c)]))
                        << "query gradient of row " << t;
            }
        ASSERT_NE(as_double(after.out[k.output(0, changed, 0, 0)]), as_double(before.out[k.output(0, changed, 0, 0)]))
            << "the change shows";
    }
}

// Changes the tokens and gradients of the document of the first sequence that starts at a token: all others keep their bits,
// gradients included, and so does the other sequence.
template <class T, class Run>
void expect_documents_apart(const Problem<T>& p, const std::vector<int>& starts, Run run) {
    const Case& k = p.k;
    const Results<T> before = run(p);
    for (const int start : starts) {
        SCOPED_TRACE(testing::Message() << "document at " << start << " changed");
        Problem<T> other = p;
        Rng rng(11);
        const auto touched = [&](size_t row) { return row < (size_t)k.T && p.doc_start[row] == start; };
        for (size_t i = 0; i < other.qkv.size(); i++)
            if (touched(i / k.width())) other.qkv[i] = from_double<T>(100 * rng.normal());
        for (size_t i = 0; i < other.dout.size(); i++)
            if (touched(i / (k.NH * k.HS))) other.dout[i] = from_double<T>(100 * rng.normal());
        const Results<T> after = run(other);
        const auto kept = [&](const std::vector<T>& x) {
            std::vector<T> y;
            for (size_t i = 0; i < x.size(); i++)
                if (!touched(i / (x.size() / k.rows()))) y.push_back(x[i]);
            return y;
        };
        expect_same_bits(kept(after.out), kept(before.out), "out");
        expect_same_bits(kept(after.dqkv), kept(before.dqkv), "dqkv");
    }
}

// ---- decoding --------------------------------------------------------------------------------------------------------------
// Decodes a problem token by token, in caches whose rows are NaN until they are written, and compares with the same attention
// over whole sequences. These start one after another (DecodedRows); place 0 of the caches must not change.
template <class T>
struct Decoding {
    const Problem<T>& p;
    const Case& k = p.k;
    const int P = k.T + 3;  // rows of the caches
    const size_t cached = (size_t)k.NKV * k.HS, produced = (size_t)k.NH * k.HS;
    std::vector<T> keys, values;  // content of the caches, (B + 1, P, NKV, HS)
    std::vector<T> out;           // of all tokens

    explicit Decoding(const Problem<T>& problem)
        : p(problem), keys((k.B + 1) * P * cached, from_double<T>(std::nan(""))), values(keys), out(k.rows() * produced) {}

    int steps() const { return k.T + k.B - 1; }
    AttentionShape shape(const DecodedRows& rows) const {
        AttentionShape s = p.shape();
        s.B = (int)rows.t.size();
        s.T = 1;
        return s;
    }
    // A step's input. After the step the caches hold these tokens' keys and values.
    std::vector<T> tokens(const DecodedRows& rows) {
        std::vector<T> qkv(rows.t.size() * k.width());
        for (size_t i = 0; i < rows.t.size(); i++) {
            const size_t at = (size_t)(rows.sequences[i] * P + rows.t[i]) * cached;
            const T* row = &p.qkv[rows.row((int)i) * k.width()];
            std::copy_n(row, k.width(), &qkv[i * k.width()]);
            std::copy_n(row + produced, cached, &keys[at]);
            std::copy_n(row + produced + cached, cached, &values[at]);
        }
        return qkv;
    }
    void keep(const DecodedRows& rows, const std::vector<T>& step_out) {
        for (size_t i = 0; i < rows.t.size(); i++)
            std::copy_n(&step_out[i * produced], produced, &out[rows.row((int)i) * produced]);
    }
    void check(const std::vector<T>& given_keys, const std::vector<T>& given_values, const Arithmetic& arithmetic) const {
        expect_same_bits(given_keys, keys, "keys");
        expect_same_bits(given_values, values, "values");
        Bounded expected(out.size()), lse(k.rows() * k.NH);
        Reference<T>(p, arithmetic).forward(expected, lse);
        expect_close(out, expected.value, expected.allowed, "out");
    }
};

}  // namespace test::attention
