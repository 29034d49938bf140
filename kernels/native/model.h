// All layers of a step in one call: Python between the kernels would take as long as they do.
//
// A model is a chain of sublayers, each a mixer or an MLP, between which the residual grows: Python
// makes it of the description of a model's layers (kernels/spec.py).

#pragma once

#include <list>

#include "experts.h"
#include "recurrence.h"

namespace {

struct AttentionLayer {
    Heads heads;
    Weight in[4];  // queries, their gates if `gated`, keys, values; joined where formats agree
    Weight out;
    const float *query_norm, *key_norm;  // [dim] each, or [heads * dim] if `whole_norms`; or null
    const float* sinks;                  // [heads]; or null
    int32_t pages;                       // the number of its pages
    int32_t shares;                      // no keys and values: the pages have those of a layer before
    int32_t rope;                        // the number of its table; -1 for none
    int32_t gated, whole_norms, value_norm;
    int32_t scaled_length;               // 0, or queries at position p are multiplied by
    float scaling;                       // 1 + scaling * log(1 + p / scaled_length)
};

struct LatentLayer {  // MLA, whose keys and values are absorbed
    Heads heads;                        // of the attention over latents
    Weight in[2];                       // queries or their latent, then the latent and key of pages
    Weight q_b, gate;                   // of the queries' latent, of a head each; columns: 0: none
    Weight out;
    const Weight *k_b, *v_b;            // [heads] each
    const float *q_a_norm, *kv_a_norm;  // of latents; q_a_norm: null for none
    int32_t pages, rope, nope, value, scaled_length;  // nope: a query's numbers that meet latents
    float scaling, eps;
};

enum SublayerKind : int32_t { ATTENTION, RECURRENT, DENSE, EXPERTS, LATENT };

// Experts beside an MLP: they and their router read the residual, each by a norm of its own.
struct Beside {
    Experts experts;
    const float *before, *router, *after, *mlp_after;  // norms [hidden]; two of results
};

struct Sublayer {
    const void* layer;     // an AttentionLayer, RecurrentLayer, MLP, Experts or LatentLayer
    const Beside* beside;  // of an MLP; or null
    Joint joint;
    SublayerKind kind;
    int32_t input;         // of an MLP without a gate: where its inputs stand in a row's; or -1
    int32_t layer_end;     // the number of the layer whose last sublayer this is; or -1
};

// Of the inputs of all layers, a row of them for each token.
struct PerLayer {
    Weight table, projection;  // [vocab, layers * size], [layers * size, hidden]
    const float* norm;         // [size]
    int32_t size;
};

struct RopeTable {
    const float* frequencies;  // [half]
    const int32_t* axes;       // [half] of three positions; or null
    float scale;
    int32_t half;
};

struct Model {
    const Sublayer* sublayers;
    const RopeTable* ropes;
    const PerLayer* per_layer;  // or null
    int32_t count, rope_count, last_mixer, hidden;
    int32_t mixer_in, mixer_out, inner;  // the most columns before and behind a mixer, in an MLP
    int32_t centred;
    float eps, logit_scale, logit_softcap;  // softcap: 0 for none
    Joint first;                            // behind the embedding
    Weight embedding, head;
};

// ImageRows of kernels/backend.py.
struct Images {
    const int64_t* rows;
    const float *embeddings, *deep;
    const int64_t* positions;  // [3][T]; or null
    int64_t count, layers;

    // For each of its rows f(the step's row, the image's).
    template <class F>
    void each(const F& f) const {
        for (int64_t i = 0; i < count; i++) f(rows[i], i);
    }
};

template <class T>
struct Step {
    const Model& model;
    const Batch& batch;
    const Batch& window;  // the tables of layers with a window
    const Pages* pages;   // of each layer that has some
    const States& states;
    const Images* images;  // or null
    int threads;

    // float32 logits of `wanted` rows; the last `pooled` of them go as the head would read them.
    void run(const int64_t* ids, const int64_t* positions, const int64_t* wanted, int64_t count,
             float* logits, float* pooled_rows, int64_t pooled) const {
        static thread_local Scratch memory;
        int64_t rows = batch.qo_indptr[batch.sequences], hidden = model.hidden;
        int64_t most = std::max(rows, count);  // a row's logits may be asked for more than once
        int64_t inner = std::min(most, MLP_ROWS) * model.inner, half = 0;
        for (int i = 0; i < model.rope_count; i++) half += model.ropes[i].half;
        int64_t width = model.per_layer ? model.per_layer->table.depth : 0;
        int64_t sizes[] = {2 * rows * half, most * hidden, most * hidden, most * hidden,
                           std::max(rows * model.mixer_in, 2 * inner),
                           std::max(most * model.mixer_out, inner), most * width};
        float* places[7];
        size_t total = 0;
        for (int64_t& size : sizes) total += size = (size + 15) / 16 * 16;
        places[0] = memory.get(total);
        for (int i = 1; i < 7; i++) places[i] = places[i - 1] + sizes[i - 1];
        float *residual = places[1], *y = places[2];
        T *x = (T*)places[3], *a = (T*)places[4], *b = (T*)places[5], *inputs = (T*)places[6];

        std::vector<Rope> ropes = rope_tables(positions, rows, places[0]);
        auto add = [&](const Joint& joint) {
            add_norm(y, residual, x, rows, hidden, joint, model.eps, model.centred, threads);
        };
        if (width) make_inputs(*model.per_layer, ids, x, inputs, rows);
        rows_of(model.embedding, ids, rows, y, threads);
        place_images(y);
        std::fill(residual, residual + rows * hidden, 0.0f);
        add(model.first);
        std::list<Plan> plans;
        float* const* state = states.tensors;
        for (int i = 0; i < model.count; i++) {
            const Sublayer& sublayer = model.sublayers[i];
            const Weight* out = nullptr;  // of a mixer
            if (sublayer.kind == ATTENTION) {
                auto& layer = *(const AttentionLayer*)sublayer.layer;
                const Plan& plan = plan_of(plans, layer.heads);
                attend(layer, ropes[layer.rope + 1], plan, pages[layer.pages], positions, x, a, b);
                out = &layer.out;
            } else if (sublayer.kind == LATENT) {
                auto& layer = *(const LatentLayer*)sublayer.layer;
                const Plan& plan = plan_of(plans, layer.heads);
                attend(layer, ropes[layer.rope + 1], plan, pages[layer.pages], positions, x, a, b);
                out = &layer.out;
            } else if (sublayer.kind == RECURRENT) {
                auto& layer = *(const RecurrentLayer*)sublayer.layer;
                int64_t stride = 0;
                for (const Weight& weight : layer.in) stride += weight.columns;
                T *to = a + stride, *latents = to;
                for (const Weight& w : layer.of_latents) stride += w.columns, latents -= w.depth;
                several(layer.in, 6, x, hidden, a, stride, rows, threads,
                        panels_of(layer.out, threads));
                for (const Weight& w : layer.of_latents) {
                    if (!w.columns) break;
                    multiply(latents, stride, w, to, stride, rows, threads);
                    latents += w.depth, to += w.columns;
                }
                Recurrent<T>{layer, batch, states, state, a, stride, model.eps, threads}.run(b);
                state += 2, out = &layer.out;
            }
            if (i == model.last_mixer) {  // K/V and states are written: the rest is for the logits
                pick(wanted, count, out->depth, b);
                pick(wanted, count, hidden, residual);
                if (sublayer.joint.parallel) pick(wanted, count, hidden, x);
                if (width) pick(wanted, count, width, inputs);
                rows = count;
            }
            const void* mlp = sublayer.layer;
            const Beside* beside = sublayer.beside;
            Upcoming behind = panels_of(first_of(i + 1), threads), next = behind;
            if (beside) next = panels_of(beside->experts.router, threads);
            if (out) multiply(b, out->depth, *out, y, hidden, rows, threads, next);
            else if (sublayer.kind == DENSE)
                ((const MLP*)mlp)->run(x, a, b, y, rows, threads, next,
                                       sublayer.input < 0 ? nullptr : inputs + sublayer.input, width);
            else run_experts(*(const Experts*)mlp, x, x, y, rows, threads, next);
            if (beside) add_beside(*beside, residual, x, y, rows, behind);
            if (images && sublayer.layer_end >= 0 && sublayer.layer_end < images->layers)
                images->each([&](int64_t row, int64_t i) {
                    const float* deep = images->deep + sublayer.layer_end * images->count * hidden;
                    for (int64_t d = 0; d < hidden; d++) y[row * hidden + d] += deep[i * hidden + d];
                });
            add(sublayer.joint);
        }
        rows -= pooled;
        for (int64_t i = 0; i < pooled; i++)
            store_row(pooled_rows + i * hidden, x + (rows + i) * hidden, hidden);
        multiply(x, hidden, model.head, logits, model.head.columns, rows, threads);
        if (model.logit_softcap != 0 || model.logit_scale != 1) softcap_logits(logits, rows);
    }

  private:
    // The weight that sublayer i reads first; behind the last there is the head.
    const Weight& first_of(int i) const {
        if (i == model.count) return model.head;
        const void* layer = model.sublayers[i].layer;
        switch (model.sublayers[i].kind) {
            case ATTENTION: return *((const AttentionLayer*)layer)->in;
            case LATENT: return *((const LatentLayer*)layer)->in;
            case RECURRENT: return *((const RecurrentLayer*)layer)->in;
            case DENSE: return *((const MLP*)layer)->in;
            default: return ((const Experts*)layer)->router;
        }
    }

    // Puts the embeddings of images in place of those of tokens, which are scaled later.
    template <class E>
    void place_images(E* x) const {
        if (images)
            images->each([&](int64_t row, int64_t i) {
                for (int64_t d = 0, n = model.hidden; n > 0; d += W, n -= W)
                    store(x + row * model.hidden + d,
                          load(images->embeddings + i * model.hidden + d, n) / model.first.scale, n);
            });
    }

    // The inputs of all layers; x is room for rows of the embedding.
    void make_inputs(const PerLayer& of, const int64_t* ids, T* x, T* inputs, int64_t rows) const {
        static thread_local Scratch memory;
        int64_t width = of.table.depth, size = of.size, hidden = model.hidden;
        float *context = memory.get(std::min(rows, MLP_ROWS) * width), factor = std::sqrt(size);
        rows_of(model.embedding, ids, rows, x, threads);
        place_images(x);
        rows_of(of.table, ids, rows, inputs, threads);
        for (int64_t n; rows > 0; rows -= n, x += n * hidden, inputs += n * width) {
            n = std::min(rows, MLP_ROWS);
            multiply(x, hidden, of.projection, context, width, n, threads);
            parallel_rows(n * width / size, size, threads, [&](int64_t i) {
                float* from = context + i * size;
                T* to = inputs + i * size;
                norm(from, of.norm, from, size, model.eps, model.centred);
                for (int64_t d = 0; d < size; d += W) {
                    vec sum = fma(load(to + d, size - d), all(factor), load(from + d, size - d));
                    store(to + d, sum * (float)M_SQRT1_2, size - d);
                }
            });
        }
    }

    // Norms the MLP's result y, and adds that of the experts beside it; x is overwritten.
    void add_beside(const Beside& beside, const float* residual, T* x, float* y, int64_t rows,
                    Upcoming next) const {
        static thread_local Scratch memory;
        int64_t hidden = model.hidden;
        float* found = memory.get(2 * rows * hidden);
        T* routed = (T*)(found + rows * hidden);
        auto norm_row = [&](const auto* from, const float* weight, auto* to, int64_t row) {
            norm(from + row * hidden, weight, to + row * hidden, hidden, model.eps, model.centred);
        };
        parallel_rows(rows, 2 * hidden, threads, [&](int64_t row) {
            norm_row(residual, beside.before, x, row);
            norm_row(residual, beside.router, routed, row);
        });
        run_experts(beside.experts, x, routed, found, rows, threads, next);
        parallel_rows(rows, 3 * hidden, threads, [&](int64_t row) {
            norm_row(found, beside.after, found, row);
            norm_row(y, beside.mlp_after, y, row);
            for (int64_t d = row * hidden, n = hidden; n > 0; d += W, n -= W)
                store(y + d, load(y + d, n) + load(found + d, n), n);
        });
    }

    // Cosines and sines of the rows by table; the first is for layers without RoPE.
    std::vector<Rope> rope_tables(const int64_t* positions, int64_t rows, float* to) const {
        std::vector<Rope> ropes(1);
        for (int i = 0; i < model.rope_count; i++) {
            const RopeTable& table = model.ropes[i];
            int half = table.half;
            float *cos = to, *sin = to + rows * half;
            to += 2 * rows * half;
            parallel_rows(rows, 64 * half, threads, [&](int64_t row) {
                for (int d = 0; d < half; d++) {
                    const int64_t* of = positions;
                    if (images && images->positions && table.axes)
                        of = images->positions + table.axes[d] * rows;
                    float angle = (float)of[row] * table.frequencies[d];
                    cos[row * half + d] = std::cos(angle) * table.scale;
                    sin[row * half + d] = std::sin(angle) * table.scale;
                }
            });
            ropes.push_back({cos, sin, half});
        }
        return ropes;
    }

    // The plan for these heads, which all layers of the step with such heads share.
    const Plan& plan_of(std::list<Plan>& plans, const Heads& heads) const {
        for (const Plan& plan : plans)
            if (!memcmp(&plan.heads, &heads, sizeof(Heads))) return plan;
        return plans.emplace_back(heads.window == INT32_MAX ? batch : window, heads);
    }

    void attend(const AttentionLayer& layer, const Rope& rope, const Plan& plan,
                const Pages& pages, const int64_t* positions, const T* x, T* both, T* out) const {
        const Heads& h = layer.heads;
        int64_t rows = batch.qo_indptr[batch.sequences], width = h.heads * h.value_dim;
        int64_t query = h.heads * h.dim, gates = layer.gated ? width : 0;
        int64_t kv_heads = layer.shares ? 0 : h.kv_heads, key = kv_heads * h.dim;
        int64_t stride = query + gates + key + kv_heads * h.value_dim;
        Upcoming next = panels_of(layer.out, threads);
        several(layer.in, 4, x, model.hidden, both, stride, rows, threads, next);
        T *gate = both + query, *key_at = gate + gates;
        Tokens<T> q{both, stride}, k{kv_heads ? key_at : nullptr, stride}, v{key_at + key, stride};
        HeadNorms norms{layer.query_norm,       layer.key_norm,          model.eps,
                        (bool)model.centred,    (bool)layer.whole_norms, (bool)layer.value_norm};
        write_kv(plan.batch, h, q, k, v, rope, norms, pages, threads);
        scale(layer, q, rows, query, positions);
        Attention<T>{plan, q, pages, out, layer.sinks}.run(threads, next);
        if (gates)
            parallel_rows(rows, width, threads, [&](int64_t t) {
                T* to = out + t * width;
                for (int64_t d = 0; d < width; d += W) {
                    vec z = load(gate + t * stride + d, width - d);
                    store(to + d, load(to + d, width - d) * sigmoid(z), width - d);
                }
            });
    }

    // `room` has [heads][dim] of the queries that meet pages, and behind all of these what `in` and
    // `q_b` give, and later [heads][value_dim] of means of latents.
    void attend(const LatentLayer& layer, const Rope& rope, const Plan& plan, const Pages& pages,
                const int64_t* positions, const T* x, T* room, T* out) const {
        const Heads& h = layer.heads;
        int64_t rows = batch.qo_indptr[batch.sequences], rank = h.value_dim, turned = h.rotated;
        int64_t each = layer.nope + turned, width = h.heads * each, q_stride = width;
        int64_t first = layer.q_b.columns ? layer.q_b.depth : width, stride = first + h.dim;
        T *latents = room + rows * h.heads * h.dim, *q = latents + rows * stride;
        Tokens<T> query{room, h.heads * h.dim};
        Tokens<T> latent{latents + first, stride}, key{latents + first + rank, stride};
        several(layer.in, 2, x, model.hidden, latents, stride, rows, threads,
                panels_of(layer.q_b.columns ? layer.q_b : *layer.k_b, threads));
        parallel_rows(rows, stride, threads, [&](int64_t t) {
            T* of_query = latents + t * stride;
            norm(latent[t], layer.kv_a_norm, latent[t], rank, layer.eps, model.centred);
            rope.rotate(key[t], t);
            if (layer.q_a_norm)
                norm(of_query, layer.q_a_norm, of_query, first, layer.eps, model.centred);
        });
        if (layer.q_b.columns)
            multiply(latents, stride, layer.q_b, q, width, rows, threads,
                     panels_of(*layer.k_b, threads));
        else q = latents, q_stride = stride;
        parallel_rows(rows, width, threads, [&](int64_t t) {
            for (int i = 0; i < h.heads; i++) {
                T* to = query[t] + i * h.dim + rank;
                memcpy(to, q + t * q_stride + i * each + layer.nope, turned * sizeof(T));
                rope.rotate(to, t);
            }
        });
        by_head(layer.k_b, Tokens<T>{q, q_stride}, each, query, h.dim, h.heads, rows);
        scale(layer, query, rows, query.stride, positions);
        write_kv(plan.batch, h, query, latent, key, Rope{}, HeadNorms{}, pages, threads);
        Attention<T>{plan, query, pages, latents}.run(threads, panels_of(*layer.v_b, threads));
        Tokens<T> means{latents, h.heads * rank}, to{out, h.heads * layer.value};
        by_head(layer.v_b, means, rank, to, layer.value, h.heads, rows, panels_of(layer.out, threads));
        if (!layer.gate.columns) return;
        static thread_local Scratch memory;
        float* gates = memory.get(rows * h.heads);
        multiply(x, model.hidden, layer.gate, gates, h.heads, rows, threads);
        parallel_rows(rows, to.stride, threads, [&](int64_t t) {
            for (int i = 0; i < h.heads; i++)
                for (int d = 0, n = layer.value; n > 0; d += W, n -= W) {
                    T* head = to[t] + i * layer.value + d;
                    store(head, load(head, n) * sigmoid(all(gates[t * h.heads + i])), n);
                }
        });
    }

    // The products of all heads as one list of tasks; the heads of a row are so many numbers apart.
    void by_head(const Weight* weights, Tokens<T> x, int64_t apart, Tokens<T> out,
                 int64_t out_apart, int heads, int64_t rows, Upcoming next = {}) const {
        int64_t columns = weights->columns, each = PANELS * N;
        int64_t parts = (columns + each - 1) / each, blocks = (rows + TALL - 1) / TALL;
        bool few = rows * heads * weights->depth * columns < SMALL;
        parallel(heads * parts * blocks, few ? 1 : threads, [&](int64_t i) {
            int64_t head = i / (parts * blocks), part = i / blocks % parts, row = i % blocks * TALL;
            multiply(x[row] + head * apart, x.stride, part_of(weights[head], part * PANELS, PANELS),
                     out[row] + head * out_apart + part * each, out.stride,
                     std::min<int64_t>(TALL, rows - row), 1);
        }, true, next);
    }

    // Scales queries by the positions of their rows, if the layer says so.
    template <class L>
    void scale(const L& layer, Tokens<T> q, int64_t rows, int64_t width,
               const int64_t* positions) const {
        if (!layer.scaled_length) return;
        parallel_rows(rows, width, threads, [&](int64_t t) {
            float steps = positions[t] / layer.scaled_length;
            float factor = 1 + layer.scaling * std::log1p(steps);
            for (int64_t d = 0; d < width; d += W)
                store(q[t] + d, load(q[t] + d, width - d) * factor, width - d);
        });
    }

    void softcap_logits(float* logits, int64_t rows) const {
        int64_t width = model.head.columns;
        float cap = model.logit_softcap;
        parallel_rows(rows, width, threads, [&](int64_t row) {
            for (int64_t d = row * width, n = width; n > 0; d += W, n -= W) {
                vec v = load(logits + d, n) * model.logit_scale;
                store(logits + d, cap != 0 ? tanh(v / cap) * cap : v, n);
            }
        });
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
