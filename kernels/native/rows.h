// Operations on single rows: RMSNorm, gated activations, RoPE and the KV write.

#pragma once

#include "attention.h"

namespace {

// `from` over its root mean square, times weight.
template <class S, class T>
void norm(const S* from, const T* weight, T* to, int width, float eps) {
    vec squares = {};
    for (int d = 0; d < width; d += W) {
        vec v = load(from + d, width - d);
        squares = fma(v, v, squares);
    }
    float factor = 1 / std::sqrt(sum(squares) / width + eps);
    for (int d = 0; d < width; d += W) {
        int n = width - d;
        store(to + d, load(from + d, n) * factor * load(weight + d, n), n);
    }
}

// Adds y to the residual, in place, and norms the sum. The residual is float32, so that bfloat16
// rounds each layer's output, and not their sum.
template <class T>
void add_norm(const float* y, float* residual, const T* weight, T* out, int64_t rows, int width,
              float eps, int threads) {
    parallel_rows(rows, width, threads, [&](int64_t row) {
        float* sum_to = residual + row * width;
        for (int d = 0; d < width; d += W) {
            int n = width - d;
            store(sum_to + d, load(y + row * width + d, n) + load(sum_to + d, n), n);
        }
        norm(sum_to, weight, out + row * width, width, eps);
    });
}

template <class T>
void gated(const T* gate, const T* up, T* out, int64_t rows, int width, int64_t gate_stride,
           int64_t up_stride, int gelu, int threads) {
    parallel_rows(rows, width, threads, [&](int64_t row) {
        for (int d = 0; d < width; d += W) {
            int n = width - d;
            vec x = load(gate + row * gate_stride + d, n), z = x;
            // 0.5 x (1 + tanh(z / 2)), as x times the sigmoid of z
            if (gelu) z = fma(x * x, 0.0713548162f * x, 1.59576912f * x);
            x /= 1.0f + exp(-z);
            store(out + row * width + d, x * load(up + row * up_stride + d, n), n);
        }
    });
}

// RoPE by halves: elements d and half + d of a head turn by the angle of pair d.
struct Rope {
    const float *cos = nullptr, *sin = nullptr;  // [T][half]
    int half = 0;

    template <class T>
    void turn(const T* from, T* to, int64_t token, int dim) const {
        for (int d = 0; d < half; d += W) {
            int n = half - d;
            vec x = load(from + d, n), y = load(from + half + d, n);
            vec c = load(cos + token * half + d, n), s = load(sin + token * half + d, n);
            store(to + d, fma(x, c, -(y * s)), n);
            store(to + half + d, fma(y, c, x * s), n);
        }
        if (to != from) memcpy(to + 2 * half, from + 2 * half, (dim - 2 * half) * sizeof(T));
    }
};

template <class T>
struct HeadNorms {  // [dim] each; or null
    const T *query = nullptr, *key = nullptr;
    float eps = 0;
};

// Norms and rotates heads, queries in place; K and V go into the pages.
template <class T>
void write_kv(const Batch& batch, const Heads& heads, Tokens<T> query, Tokens<T> key,
              Tokens<T> value, const Rope& rope, const HeadNorms<T>& norms, T* k_pages, T* v_pages,
              int threads) {
    int dim = heads.dim, kv_heads = heads.kv_heads, values = kv_heads * heads.value_dim;
    int width = (heads.heads + 2 * kv_heads) * dim;
    parallel_rows(batch.qo_indptr[batch.sequences], width, threads, [&](int64_t t) {
        T* to = k_pages + batch.slots[t] * kv_heads * dim;
        for (int h = 0; h < kv_heads; h++) {
            T* from = key[t] + h * dim;
            if (norms.key) norm(from, norms.key, from, dim, norms.eps);
            rope.turn(from, to + h * dim, t, dim);
        }
        for (int h = 0; h < heads.heads; h++) {
            T* at = query[t] + h * dim;
            if (norms.query) norm(at, norms.query, at, dim, norms.eps);
            if (rope.half) rope.turn(at, at, t, dim);
        }
        memcpy(v_pages + batch.slots[t] * values, value[t], values * sizeof(T));
    });
}

}  // namespace
