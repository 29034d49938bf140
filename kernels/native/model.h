// All layers of a step of a pre-norm decoder with RMSNorm, RoPE and a gated MLP, in one call:
// Python between the kernels would take as long as they do.

#pragma once

#include <optional>

#include "linear.h"
#include "rows.h"

namespace {

template <class T>
struct Layer {
    Heads heads;
    Weight qkv[3];  // of Q, K and V, joined where their formats agree; columns: 0 for none
    Weight out;
    Weight gate_up[2];  // likewise
    Weight down;
    const T *query_norm, *key_norm;    // [dim] each; or null
    const T *mlp_norm, *norm_after;    // [hidden]; the next layer's first, or the model's last
};

template <class T>
struct Model {
    const Layer<T>* layers;
    int32_t count, hidden, inner, half;
    float eps, rope_scale;
    const float* frequencies;  // [half]
    const T* first_norm;
    Weight embedding, head;
};

constexpr int64_t MLP_ROWS = 512;  // rows whose activations between the products are held at once

template <class T>
struct Step {
    const Model<T>& model;
    const Batch& batch;
    T* const* pages;  // of keys and of values, layer by layer
    int threads;

    // float32 logits of `wanted` rows.
    void run(const int64_t* ids, const int64_t* positions, const int64_t* wanted, int64_t count,
             float* logits) const {
        static thread_local Scratch memory;
        int64_t rows = batch.qo_indptr[batch.sequences], hidden = model.hidden, half = model.half;
        int64_t most = std::max(rows, count);  // a row's logits may be asked for more than once
        int64_t wide = 0, out = 0;  // columns of Q, K and V together, and of attention's output
        for (int i = 0; i < model.count; i++) {
            const Heads& h = model.layers[i].heads;
            wide = std::max<int64_t>(wide, (h.heads + h.kv_heads) * h.dim + h.kv_heads * h.value_dim);
            out = std::max<int64_t>(out, h.heads * h.value_dim);
        }
        int64_t inner = std::min(most, MLP_ROWS) * model.inner, qkv = rows * wide;
        int64_t sizes[] = {2 * rows * half, most * hidden, most * hidden, most * hidden,
                           std::max(qkv, 2 * inner), std::max(most * out, inner)};
        float* places[6];
        size_t total = 0;
        for (int64_t& size : sizes) total += size = (size + 15) / 16 * 16;
        places[0] = memory.get(total);
        for (int i = 1; i < 6; i++) places[i] = places[i - 1] + sizes[i - 1];
        float *cos = places[0], *sin = cos + rows * half, *residual = places[1], *y = places[2];
        T *x = (T*)places[3], *a = (T*)places[4], *b = (T*)places[5];

        parallel_rows(rows, 64 * half, threads, [&](int64_t row) {
            for (int d = 0; d < half; d++) {
                float angle = (float)positions[row] * model.frequencies[d];
                cos[row * half + d] = std::cos(angle) * model.rope_scale;
                sin[row * half + d] = std::sin(angle) * model.rope_scale;
            }
        });
        Rope rope{cos, sin, (int)half};
        rows_of(model.embedding, ids, rows, residual, threads);
        parallel_rows(rows, hidden, threads, [&](int64_t row) {
            norm(residual + row * hidden, model.first_norm, x + row * hidden, hidden, model.eps);
        });
        std::optional<Plan> plan;
        for (int i = 0; i < model.count; i++) {
            const Layer<T>& layer = model.layers[i];
            if (!plan || memcmp(&plan->heads, &layer.heads, sizeof(Heads)))
                plan.emplace(batch, layer.heads);
            int64_t attended = layer.heads.heads * layer.heads.value_dim;
            attend(layer, rope, *plan, pages + 2 * i, x, a, b);
            if (i == model.count - 1) {  // all K/V are written: the rest is for the logits alone
                pick(wanted, count, attended, b);
                pick(wanted, count, hidden, residual);
                rows = count;
            }
            multiply(b, attended, layer.out, y, hidden, rows, threads);
            add_norm(y, residual, layer.mlp_norm, x, rows, hidden, model.eps, threads);
            for (int64_t row = 0; row < rows; row += MLP_ROWS)
                mlp(layer, std::min(rows - row, MLP_ROWS), x + row * hidden, a, b, y + row * hidden);
            add_norm(y, residual, layer.norm_after, x, rows, hidden, model.eps, threads);
        }
        multiply(x, hidden, model.head, logits, model.head.columns, rows, threads);
    }

  private:
    // Products with several weights, side by side in `out`.
    void several(const Weight* weights, int most, const T* x, int64_t depth, T* out, int64_t stride,
                 int64_t rows) const {
        for (int i = 0; i < most && weights[i].columns; out += weights[i++].columns)
            multiply(x, depth, weights[i], out, stride, rows, threads);
    }

    void attend(const Layer<T>& layer, const Rope& rope, const Plan& plan, T* const* pages,
                const T* x, T* qkv, T* out) const {
        const Heads& h = layer.heads;
        int64_t query = h.heads * h.dim, key = h.kv_heads * h.dim;
        int64_t stride = query + key + h.kv_heads * h.value_dim;
        several(layer.qkv, 3, x, model.hidden, qkv, stride, batch.qo_indptr[batch.sequences]);
        Tokens<T> q{qkv, stride}, k{qkv + query, stride}, v{qkv + query + key, stride};
        HeadNorms<T> norms{layer.query_norm, layer.key_norm, model.eps};
        write_kv(batch, h, q, k, v, rope, norms, pages[0], pages[1], threads);
        Attention<T>{plan, q, pages[0], pages[1], out}.run(threads);
    }

    void mlp(const Layer<T>& layer, int64_t rows, const T* x, T* both, T* activated,
             float* out) const {
        int64_t inner = model.inner;
        several(layer.gate_up, 2, x, model.hidden, both, 2 * inner, rows);
        gated(both, both + inner, activated, rows, inner, 2 * inner, 2 * inner, false, threads);
        multiply(activated, inner, layer.down, out, model.hidden, rows, threads);
    }

    // Moves the rows of the logits to the front, in place; they may be in any order.
    template <class E>
    static void pick(const int64_t* wanted, int64_t count, int64_t width, E* x) {
        static thread_local std::vector<E> picked;
        picked.resize(count * width);
        for (int64_t i = 0; i < count; i++)
            memcpy(&picked[i * width], x + wanted[i] * width, width * sizeof(E));
        memcpy(x, picked.data(), picked.size() * sizeof(E));
    }
};

}  // namespace
