// Operators on single rows: RMS norm, add_norm, activation, RoPE and the KV write.

#pragma once

#include "attention.h"

namespace {

// `from` over its root mean square, times weight, if it is not null. `centred`: a LayerNorm without
// bias, which first subtracts the mean.
template <class S, class T>
void norm(const S* from, const float* weight, T* to, int width, float eps, bool centred = false) {
    float mean = 0;
    if (centred) {
        vec total = {};
        for (int d = 0; d < width; d += W) total += load(from + d, width - d);
        mean = sum(total) / width;
    }
    vec squares = {};
    for (int d = 0; d < width; d += W) {
        vec v = load(from + d, width - d) - mean;
        if (d + W > width) v = lanes() < width - d ? v : vec{};
        squares = fma(v, v, squares);
    }
    float factor = 1 / std::sqrt(sum(squares) / width + eps);
    for (int d = 0; d < width; d += W) {
        int n = width - d;
        vec v = (load(from + d, n) - mean) * factor;
        store(to + d, weight ? v * load(weight + d, n) : v, n);
    }
}

// What follows a sublayer: its result is normed (or not), scaled and added to the residual. The sum
// is scaled, and normed into the next sublayer's input, or copied.
struct Joint {
    const float *after, *before;  // weights of the two norms, [width]; null for none
    float scale, sum_scale;
    int32_t parallel;             // the next sublayer has the same input: it stays as it is
};

// The residual is float32, so that bfloat16 rounds each sublayer's result, and not their sum.
template <class T>
void add_norm(float* y, float* residual, T* x, int64_t rows, int width, const Joint& joint,
              float eps, bool centred, int threads) {
    parallel_rows(rows, width, threads, [&](int64_t row) {
        float *sum_to = residual + row * width, *from = y + row * width;
        if (joint.after) norm(from, joint.after, from, width, eps, centred);
        for (int d = 0; d < width; d += W) {
            int n = width - d;
            vec total = fma(load(from + d, n), all(joint.scale), load(sum_to + d, n));
            store(sum_to + d, total * joint.sum_scale, n);
        }
        if (joint.parallel) return;
        T* to = x + row * width;
        if (joint.before) return norm(sum_to, joint.before, to, width, eps, centred);
        for (int d = 0; d < width; d += W) store(to + d, load(sum_to + d, width - d), width - d);
    });
}

inline vec sigmoid(vec x) { return 1.0f / (1.0f + exp(-x)); }

// log(1 + e^x) as max(x, 0) + log(1 + y) with y = e^-|x|: twice the series of atanh(y / (2 + y)).
inline vec softplus(vec x) {
    vec y = exp(x < 0.0f ? x : -x), s = y / (2.0f + y), square = s * s, p = all(1 / 13.0f);
    for (float n : {11.0f, 9.0f, 7.0f, 5.0f, 3.0f, 1.0f}) p = fma(p, square, all(1 / n));
    return (x > 0.0f ? x : vec{}) + 2.0f * s * p;
}

// Half of the complementary error function for x >= 0, within 1e-7 (Abramowitz, Stegun, 7.1.26).
inline vec half_erfc(vec x) {
    vec t = 1.0f / (1.0f + 0.3275911f * x), p = all(0.5307027145f);
    for (float c : {-0.7265760135f, 0.7107068705f, -0.142248368f, 0.127414796f})
        p = fma(p, t, all(c));
    return p * t * exp(-x * x);
}

enum Activation : int32_t { SILU, GELU_TANH, GELU, RELU2, CLAMPED };

// The activation of x, times u.
inline vec activate(Activation kind, vec x, vec u) {
    vec z = x;
    switch (kind) {
        case SILU: break;
        case GELU_TANH:  // 0.5 x (1 + tanh(z / 2)), as x times the sigmoid of z
            z = fma(x * x, 0.0713548162f * x, 1.59576912f * x);
            break;
        case GELU: {
            vec below = half_erfc((x < 0.0f ? -x : x) * 0.70710678f);
            return x * (x < 0.0f ? below : 1.0f - below) * u;
        }
        case RELU2:
            x = x < 0.0f ? vec{} : x;
            return x * x * u;
        case CLAMPED:
            x = x > 7.0f ? all(7.0f) : x;
            u = u > 7.0f ? all(7.0f) : u < -7.0f ? all(-7.0f) : u;
            z = x * 1.702f, u += 1.0f;
    }
    return x / (1.0f + exp(-z)) * u;
}

// `up` may be null: there is no gate then, and `gate` alone is activated.
template <class T>
void activation(const T* gate, const T* up, T* out, int64_t rows, int width, int64_t gate_stride,
                int64_t up_stride, Activation kind, int threads) {
    parallel_rows(rows, width, threads, [&](int64_t row) {
        for (int d = 0; d < width; d += W) {
            int n = width - d;
            vec x = load(gate + row * gate_stride + d, n);
            vec u = up ? load(up + row * up_stride + d, n) : all(1);
            store(out + row * width + d, activate(kind, x, u), n);
        }
    });
}

// RoPE by halves: elements d and half + d of a head turn by the angle of pair d.
struct Rope {
    const float *cos = nullptr, *sin = nullptr;  // [T][half]
    int half = 0;

    template <class T>
    void rotate(T* head, int64_t token) const {
        for (int d = 0; d < half; d += W) {
            int n = half - d;
            vec x = load(head + d, n), y = load(head + half + d, n);
            vec c = load(cos + token * half + d, n), s = load(sin + token * half + d, n);
            store(head + d, fma(x, c, -(y * s)), n);
            store(head + half + d, fma(y, c, x * s), n);
        }
    }
};

struct HeadNorms {  // of queries, keys and values before RoPE
    const float *query = nullptr, *key = nullptr;  // [dim] each; or null
    float eps = 0;
    bool centred = false;
    bool whole = false;   // the weights are of all heads, which are normed at once
    bool values = false;  // values are normed, too, head by head and without weights

    // Norms `heads` adjacent heads in place.
    template <class T>
    void apply(const float* weight, T* at, int heads, int dim) const {
        if (!weight) return;
        if (whole) dim *= heads, heads = 1;
        for (int h = 0; h < heads; h++) norm(at + h * dim, weight, at + h * dim, dim, eps, centred);
    }
};

// Norms and rotates heads in place; K and V go into the pages, unless there are none.
template <class T>
void write_kv(const Batch& batch, const Heads& heads, Tokens<T> query, Tokens<T> key,
              Tokens<T> value, const Rope& rope, const HeadNorms& norms, const Pages& pages,
              int threads) {
    int dim = heads.dim, kv_heads = key.data ? heads.kv_heads : 0, value_dim = heads.value_dim;
    int k_dim = heads.k_dim(), v_dim = heads.v_dim(), no_key = heads.rotated ? 0 : 0xff;
    int width = (heads.heads + 2 * kv_heads) * dim;
    parallel_rows(batch.qo_indptr[batch.sequences], width, threads, [&](int64_t t) {
        int64_t page = batch.slots[t] / batch.page_size, slot = batch.slots[t] % batch.page_size;
        norms.apply(norms.key, key[t], kv_heads, dim);
        norms.apply(norms.query, query[t], heads.heads, dim);
        for (int h = 0; h < kv_heads && rope.half; h++) rope.rotate(key[t] + h * dim, t);
        for (int h = 0; h < heads.heads && rope.half; h++) rope.rotate(query[t] + h * dim, t);
        for (int h = 0; h < kv_heads && norms.values; h++) {
            T* head = value[t] + h * value_dim;
            norm(head, nullptr, head, value_dim, norms.eps, norms.centred);
        }
        with_format(pages.format, [&](auto* stored_as) {
            using S = std::remove_pointer_t<decltype(stored_as)>;
            S *k = (S*)pages.page(pages.k, pages.k_stride, page),
              *v = (S*)pages.page(pages.v, pages.v_stride, page);
            for (int64_t h = 0, to = slot * kv_heads; h < kv_heads; h++, to++) {
                S *k_row = k + to * stored<S>(k_dim), *v_row = v + to * stored<S>(v_dim);
                store_row(k_row, key[t] + h * k_dim, k_dim);
                store_row(v_row, value[t] + h * v_dim, v_dim);
                if (is_finite(k_row, k_dim) && is_finite(v_row, v_dim)) continue;
                // A mask replaces scores, but 0 * inf is NaN: only rows that see it become NaN.
                memset(k_row, no_key, stored<S>(k_dim) * sizeof(S));  // 0xff: NaN in every format
                memset(v_row, 0xff - no_key, stored<S>(v_dim) * sizeof(S));
            }
        });
    });
}

}  // namespace
