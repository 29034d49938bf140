// Draws a token from each row of logits: a pass for the highest, one for the weights, no full sort.

#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "threads.h"
#include "vectors.h"

namespace {

// How a token is drawn; as `SamplingParams`. With temperature 0 it is the first of the highest.
struct Draw {
    double top_p, uniform;  // noise in [0, 1)
    float temperature, min_p;
    int32_t top_k;  // 0 for no limit
};

constexpr int64_t PART = 1024;  // numbers that are added in float32

// f(place, vector) for all numbers; zeros fill up the last vector.
template <class F>
inline void each_vector(const float* x, int64_t count, const F& f) {
    int64_t i = 0;
    for (; i + W <= count; i += W) f(i, load(x + i));
    if (i < count) f(i, load(x + i, count - i));
}

// The first of the highest; or the first that is not a number.
inline int64_t first_highest(const float* x, int64_t count) {
    auto is_none = [](float v) { return v != v; };
    float highest = x[0];
    vec top = all(highest);
    ivec none{};
    int64_t i = 0;
    for (; i + W <= count; i += W) {
        vec v = load(x + i);
        none |= v != v;
        top = v > top ? v : top;
    }
    bool any = std::any_of(x + i, x + count, is_none);
    for (int lane = 0; lane < W; lane++) any |= none[lane] != 0;
    if (any) return std::find_if(x, x + count, is_none) - x;
    highest = max(top);
    for (; i < count; i++) highest = std::max(highest, x[i]);
    return std::find(x, x + count, highest) - x;
}

// The sum of what is at least `bar`, and of each part of it if `parts` are asked for; `found`: how
// many they are.
inline double sum_from(float bar, const float* weights, int64_t count, double* parts,
                       int64_t* found) {
    double total = 0;
    ivec above{};
    for (int64_t first = 0; first < count; first += PART) {
        vec part{};
        each_vector(weights + first, std::min(PART, count - first), [&](int64_t, vec w) {
            ivec in = w >= bar;
            part += in ? w : vec{};
            above -= in;
        });
        double part_sum = sum(part);
        if (parts) parts[first / PART] = part_sum;
        total += part_sum;
    }
    *found = 0;
    for (int i = 0; i < W; i++) *found += above[i];
    return total;
}

// The place at which the sum of weights exceeds `target`; never one whose weight is 0.
template <class Weight>
inline int64_t reach(double target, int64_t count, const Weight& weight) {
    int64_t last = 0;
    for (int64_t i = 0; i < count; i++) {
        if (!(weight(i) > 0)) continue;
        last = i, target -= weight(i);
        if (target < 0) break;
    }
    return last;
}

class Sampler {
  public:
    Sampler(const float* logits, int64_t vocab) : logits(logits), vocab(vocab) {}

    int64_t draw(const Draw& how, float* highest) const {
        int64_t best = first_highest(logits, vocab), above;
        *highest = logits[best];
        if (how.temperature <= 0 || !std::isfinite(*highest)) return best;
        static thread_local Scratch memory;
        static thread_local std::vector<double> parts;
        float* weights = memory.get(vocab + W);
        parts.resize((vocab + PART - 1) / PART);
        each_vector(logits, vocab, [&](int64_t i, vec v) {
            store(weights + i, exp((v - *highest) / how.temperature));
        });
        double total = sum_from(0, weights, vocab, parts.data(), &above);
        bool limited = how.top_p < 1 || (how.top_k > 0 && how.top_k < vocab);
        if (limited || how.min_p > 0) return draw_filtered(how, weights, total, limited);
        double target = how.uniform * total;
        int64_t part = reach(target, parts.size(), [&](int64_t i) { return parts[i]; });
        for (int64_t i = 0; i < part; i++) target -= parts[i];
        int64_t first = part * PART;
        auto weight = [&](int64_t i) { return weights[first + i]; };
        return first + reach(target, std::min(PART, vocab - first), weight);
    }

  private:
    const float* logits;
    int64_t vocab;

    // Among the likeliest: a bar is lowered until all that stay are above it.
    int64_t draw_filtered(const Draw& how, const float* weights, double total,
                          bool limited) const {
        struct Token {
            float weight;
            int32_t id;
            bool operator<(const Token& other) const {
                return weight > other.weight || (weight == other.weight && id < other.id);
            }
        };
        static thread_local std::vector<Token> kept;
        double wanted = how.top_p < 1 ? how.top_p * total : total * 2;
        int64_t most = how.top_k > 0 ? std::min<int64_t>(how.top_k, vocab) : vocab, above = 0;
        float least = std::max(how.min_p, std::numeric_limits<float>::min());
        float bar = limited ? std::max(0.5f, least) : least;
        while (bar > least && sum_from(bar, weights, vocab, nullptr, &above) < wanted
               && above < most)
            bar = std::max(bar / 8, least);
        kept.clear();
        each_vector(weights, vocab, [&](int64_t at, vec w) {
            if (max(w) >= bar)
                for (int i = 0; i < W; i++)
                    if (w[i] >= bar) kept.push_back({w[i], (int32_t)(at + i)});
        });
        if ((int64_t)kept.size() > most) {
            std::nth_element(kept.begin(), kept.begin() + most, kept.end());
            kept.resize(most);
        }
        size_t count = kept.size();
        double sum = 0;
        if (how.top_p < 1) {
            std::sort(kept.begin(), kept.end());
            count = 0;
            do sum += kept[count++].weight;
            while (count < kept.size() && sum < wanted);
        } else {
            for (const Token& token : kept) sum += token.weight;
        }
        auto weight = [&](int64_t i) { return kept[i].weight; };
        return kept[reach(how.uniform * sum, count, weight)].id;
    }
};

inline void sample(const float* logits, int64_t stride, int64_t rows, int64_t vocab,
                   const Draw* draws, int64_t* tokens, float* highest, int threads) {
    parallel(rows, threads, [&](int64_t row) {
        tokens[row] = Sampler{logits + row * stride, vocab}.draw(draws[row], highest + row);
    });
}

}  // namespace
