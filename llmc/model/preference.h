// Direct preference optimization (DPO; Rafailov et al., 2023): of two answers to a prompt, the model learns to prefer the
// chosen one to the rejected one. The measure is the likelihood of an answer relative to the reference, the model before
// training:
//   ratio = log p(answer) - log p_reference(answer),  reward = beta ratio,  d = ratio(chosen) - ratio(rejected)
//   sigmoid   loss = -(1 - s) log sigmoid(beta d) - s log sigmoid(-beta d)   s: fraction of wrong labels (conservative DPO)
//   ipo       loss = (d - 1 / (2 beta))^2, with ratios per token (Azar et al., 2023)
// Rewards and losses match TRL's DPOTrainer. log p is the sum over the answer's tokens, so the gradient of a pair's loss is the
// gradient of its tokens' cross-entropies, each times its answer's weight -dloss/dlog p: +w in the chosen, -w in the rejected
// answer, with w = -dloss/dd, for ipo divided by the answer's number of tokens. Weights are known after a forward pass.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "../base/types.h"
#include "../shapes.h"

// An answer with its prompt, in the rows [row, row + rows) of a micro-batch of whole sequences.
struct Answer {
    int row = 0, rows = 0;
    int targets = 0;       // the answer's tokens in the loss
    double reference = 0;  // log-probability by the reference
    double log_p = 0;      // log-probability by the model, after a forward pass

    double ratio() const { return log_p - reference; }
};
struct AnswerPair {
    int64_t number;  // in the data
    Answer chosen, rejected;
};

struct Preference {
    double beta = 0;  // 0: no pairs of answers
    double label_smoothing = 0;
    bool ipo = false;

    bool on() const { return beta > 0; }

    struct Loss {
        double loss, derivative;  // by d
    };
    Loss of(double d) const {
        if (ipo) {
            const double off = d - 0.5 / beta;
            return {off * off, 2 * off};
        }
        // log sigmoid(x) = min(x, 0) - log(1 + exp(-|x|)), and its derivative is sigmoid(-x).
        const double x = beta * d, tail = std::log1p(std::exp(-std::abs(x))), s = label_smoothing;
        const double loss = -(1 - s) * (std::min(x, 0.0) - tail) - s * (std::min(-x, 0.0) - tail);
        return {loss, beta * (s / (1 + std::exp(-x)) - (1 - s) / (1 + std::exp(x)))};
    }

    // Computes the weights of the rows' gradients from the rows' cross-entropies: sets log_p in pairs, and the weights of their
    // rows; adds to sums.
    void compare(std::vector<AnswerPair>& pairs, const real* loss /*(N)*/, real* weight /*(N)*/, PreferenceSums& sums) const {
        for (AnswerPair& pair : pairs) {
            for (Answer* a : {&pair.chosen, &pair.rejected}) {
                a->log_p = 0;
                for (int n = a->row; n < a->row + a->rows; n++) a->log_p -= (double)loss[n];  // 0 in rows outside the loss
            }
            const Answer &chosen = pair.chosen, &rejected = pair.rejected;
            const Loss of_pair = of(chosen.ratio() / per(chosen) - rejected.ratio() / per(rejected));
            std::fill_n(weight + chosen.row, chosen.rows, (real)(-of_pair.derivative / per(chosen)));
            std::fill_n(weight + rejected.row, rejected.rows, (real)(of_pair.derivative / per(rejected)));
            sums.loss += of_pair.loss;
            sums.chosen += beta * chosen.ratio();
            sums.rejected += beta * rejected.ratio();
            sums.right += chosen.ratio() > rejected.ratio();
            sums.n++;
        }
    }

private:
    double per(const Answer& a) const { return ipo ? (double)a.targets : 1; }
};
