// Recurrent layers: short convolutions, gated delta nets and Mamba 2, strictly token by token, so
// that a row's bits do not depend on how its sequence is cut.
//
// A token's convolution reads the inputs of a few tokens, so tokens are computed in parallel. A
// recurrent state's columns do not depend on each other: a task is some columns of a head in one
// sequence, which stay in L1 over all new tokens.

#pragma once

#include "linear.h"
#include "operators.h"

namespace {

enum Recurrence : int32_t { SHORT_CONV, DELTA_NET, MAMBA2 };

struct RecurrentLayer {
    Weight in[6], out;
    Weight of_latents[2];              // products of the last numbers that `in` gives; or none
    const float *conv, *conv_bias;     // [width][channels], the oldest tap first; bias or null
    const float *rate, *rate_bias;     // [decays] each; not of SHORT_CONV
    const float *skip, *norm;          // skip [heads] of MAMBA2; norm [value], of MAMBA2
                                       // [heads * value], in key_heads parts
    float least, most;                 // limits of a token's step
    float bound;                       // of a decay's logarithm, below 0; 0 for none
    Recurrence kind;
    int32_t width, channels;           // of the convolution
    int32_t key_heads, heads, key, value;  // a state is [heads][key][value]
    int32_t by_channel;                // each row of a state fades by itself

    int64_t values() const { return (int64_t)heads * value; }
    int64_t decays() const { return by_channel ? (int64_t)heads * key : heads; }
};

// The slots that a step reads (-1: zeros) and writes for each sequence. The state after the first
// keep_counts[i] new tokens of sequence s also goes to keep_slots[i], for i in
// [keep_starts[s], keep_starts[s + 1]), in ascending order.
struct States {
    const int64_t *read, *write, *keep_starts, *keep_counts, *keep_slots;
    float* const* tensors;  // of each recurrent layer: conv [slots][width - 1][channels], and the
};                          // states [slots][heads][key][value]; or null

// Rows of `x` are what the layer's products give. SHORT_CONV: B, C, x. DELTA_NET: q, k, v, beta,
// latents, if there are some, alpha, z. MAMBA2: z, x, B, C, dt.
template <class T>
struct Recurrent {
    const RecurrentLayer& m;
    const Batch& batch;
    const States& states;
    float* const* tensors;  // of this layer
    const T* x;
    int64_t stride;
    float eps;
    int threads;
    int64_t rows = batch.qo_indptr[batch.sequences], before = m.width - 1;
    float *conv = tensors[0], *state = tensors[1];
    bool delta = m.kind == DELTA_NET, is_conv = m.kind == SHORT_CONV;
    int64_t inputs_at = m.kind == MAMBA2 ? m.values() : 0;  // of the convolution
    int64_t z_at = delta ? stride - m.values() : 0, decays = m.decays();
    int64_t alpha_at = delta ? z_at - decays : inputs_at + m.channels;

    // out [rows][channels] of SHORT_CONV, else [rows][heads * value].
    void run(T* out) const {
        static thread_local Scratch memory;
        int64_t channels = is_conv ? 0 : m.channels, values = is_conv ? 0 : m.values();
        int64_t heads = is_conv ? 0 : m.heads;
        float* mixed = memory.get(rows * (channels + values + decays + heads));
        float *y = mixed + rows * channels, *fade = y + rows * values, *gain = fade + rows * decays;
        convolve(mixed, out);
        parallel_rows(batch.sequences, before * m.channels, threads, [&](int64_t s) {
            for (int64_t i = states.keep_starts[s]; i < states.keep_starts[s + 1]; i++)
                write_conv(s, states.keep_counts[i], states.keep_slots[i]);
            write_conv(s, batch.qo_indptr[s + 1] - batch.qo_indptr[s], states.write[s]);
        });
        if (is_conv) return;
        parallel_rows(rows, 8 * channels, threads, [&](int64_t t) {
            prepare(t, mixed + t * channels, fade + t * decays, gain + t * heads);
        });
        int64_t parts = (m.value + COLUMNS - 1) / COLUMNS;
        parallel(batch.sequences * heads * parts, threads, [&](int64_t task) {
            int64_t s = task / (heads * parts), head = task / parts % heads;
            recur(s, head, task % parts * COLUMNS, mixed, fade, gain, y);
        }, false, panels_of(m.out, threads));
        parallel_rows(rows, 4 * values, threads,
                      [&](int64_t t) { finish(y + t * values, x + t * stride, out + t * values); });
    }

  private:
    static constexpr int C = 2, COLUMNS = C * W;  // vectors and columns of a task

    // ---- The convolution.

    // Channels c to c + W of the convolution's input for a row of sequence s, or for one of the
    // tokens before it, whose inputs are in its state.
    vec input(int64_t s, int64_t row, int64_t c) const {
        int64_t n = m.channels - c, at = row - batch.qo_indptr[s] + before;
        if (at < before) {
            if (states.read[s] < 0) return vec{};
            return load(conv + (states.read[s] * before + at) * m.channels + c, n);
        }
        const T* from = x + row * stride + inputs_at + c;
        vec v = load(from, n);
        return is_conv ? v * load(from + 2 * m.channels, n) : v;
    }

    void convolve(float* mixed, T* out) const {
        parallel_rows(rows, m.channels * m.width, threads, [&](int64_t row) {
            const int32_t* starts = batch.qo_indptr;
            int64_t s = std::upper_bound(starts, starts + batch.sequences, row) - starts - 1;
            for (int64_t c = 0, n = m.channels; n > 0; c += W, n -= W) {
                vec sum = m.conv_bias ? load(m.conv_bias + c, n) : vec{};
                for (int i = 0; i < m.width; i++) {
                    vec tap = load(m.conv + i * m.channels + c, n);
                    sum = fma(input(s, row - before + i, c), tap, sum);
                }
                int64_t to = row * m.channels + c;
                if (is_conv) store(out + to, sum * load(x + row * stride + m.channels + c, n), n);
                else store(mixed + to, sum * sigmoid(sum), n);
            }
        });
    }

    // The convolution's state after `count` new tokens: its last inputs. In ascending order, as it
    // may take the place of the state that is read.
    void write_conv(int64_t s, int64_t count, int64_t slot) const {
        int64_t end = batch.qo_indptr[s] + count;
        for (int64_t i = 0; i < before; i++)
            for (int64_t c = 0; c < m.channels; c += W)
                store(conv + (slot * before + i) * m.channels + c, input(s, end - before + i, c),
                      m.channels - c);
    }

    // ---- The recurrence. For each token the state fades, key times value is added to it, and the
    // query reads it.

    int64_t keys() const { return (int64_t)m.key_heads * m.key; }

    // Of a token: how the state fades, and what values gain, by head; queries and keys of a delta
    // net are normed.
    void prepare(int64_t t, float* mixed, float* fade, float* gain) const {
        const T* row = x + t * stride;
        for (int c = 0, n = decays; n > 0; c += W, n -= W) {
            vec step = load(row + alpha_at + c, n) + load(m.rate_bias + c, n);
            vec rate = load(m.rate + c, n);  // times the step: the logarithm of a decay
            if (m.bound < 0) {
                step = sigmoid(-rate * step), rate = all(m.bound);
            } else {
                step = softplus(step);
                step = step < m.least ? all(m.least) : step > m.most ? all(m.most) : step;
            }
            store(fade + c, exp(rate * step), n);
            if (!delta) store(gain + c, step, n);
        }
        for (int h = 0, n = m.heads; n > 0 && delta; h += W, n -= W)
            store(gain + h, sigmoid(load(row + m.channels + h, n)), n);
        for (int h = 0; h < 2 * m.key_heads && delta; h++) {
            float* at = mixed + h * m.key;
            vec squares = {};
            for (int d = 0; d < m.key; d += W) {
                vec v = load(at + d, m.key - d);
                squares = fma(v, v, squares);
            }
            float factor = 1 / std::sqrt(sum(squares) + 1e-6f);
            if (h < m.key_heads) factor /= std::sqrt((float)m.key);
            for (int d = 0, n = m.key; n > 0; d += W, n -= W)
                store(at + d, load(at + d, n) * factor, n);
        }
    }

    // Columns from c on of a head's state, over all new tokens of sequence s.
    void recur(int64_t s, int64_t head, int64_t c, const float* mixed, const float* fades,
               const float* gains, float* y) const {
        static thread_local Scratch memory;
        int64_t first = batch.qo_indptr[s], end = batch.qo_indptr[s + 1];
        int64_t keep = states.keep_starts[s], last_keep = states.keep_starts[s + 1];
        int64_t values = m.values(), of_group = head / (m.heads / m.key_heads) * m.key;
        // `mixed` has q, k, v of a delta net, and v, k, q of Mamba 2.
        int64_t query_at = of_group + (delta ? 0 : values + keys());
        int64_t key_at = of_group + (delta ? keys() : values);
        int64_t column = head * m.value + c, value_at = column + (delta ? 2 * keys() : 0);
        float* held = memory.get(m.key * COLUMNS);
        auto read = [&](const float* from, int j) {
            int64_t n = m.value - c - j * W;
            return n > 0 ? load(from + j * W, n) : vec{};
        };
        auto write = [&](float* to, int j, vec v) {
            int64_t n = m.value - c - j * W;
            if (n > 0) store(to + j * W, v, n);
        };
        auto place = [&](int64_t slot, int i) {
            return state + ((slot * m.heads + head) * m.key + i) * m.value + c;
        };
        auto save = [&](int64_t slot) {
            for (int i = 0; i < m.key; i++)
                for (int j = 0; j < C; j++)
                    write(place(slot, i), j, load(held + (i * C + j) * W));
        };
        int64_t from = states.read[s];
        for (int i = 0; i < m.key; i++)
            for (int j = 0; j < C; j++)
                store(held + (i * C + j) * W, from < 0 ? vec{} : read(place(from, i), j));
        for (int64_t t = first;; t++) {
            for (; keep < last_keep && states.keep_counts[keep] == t - first; keep++)
                save(states.keep_slots[keep]);
            if (t == end) break;
            const float* row = mixed + t * m.channels;
            float gain = gains[t * m.heads + head], skip = m.skip ? m.skip[head] : 0;
            const float* own = fades + (t * m.heads + head) * (m.by_channel ? m.key : 1);
            vec fade = all(m.by_channel ? 1 : *own), add[C], sums[C];
            for (int j = 0; j < C; j++) add[j] = read(row + value_at, j), sums[j] = add[j] * skip;
            if (delta) {  // what the state already gives for this key is taken off
                vec found[C];
                predict(held, row + key_at, m.by_channel ? own : nullptr, found);
                for (int j = 0; j < C; j++) add[j] -= found[j] * fade;
            }
            for (int j = 0; j < C; j++) add[j] *= gain;
            update(held, row + key_at, row + query_at, fade, add, sums);
            for (int j = 0; j < C; j++) write(y + t * values + column, j, sums[j]);
        }
        save(states.write[s]);
    }

    // found = state^T key, in two sums for each vector: a single chain would wait for itself. The
    // state's rows fade first, unless `fades` is null.
    void predict(float* held, const float* key, const float* fades, vec* found) const {
        vec even[C] = {}, odd[C] = {};
        auto read = [&](int i, int j) {
            float* from = held + (i * C + j) * W;
            vec v = load(from);
            if (fades) store(from, v *= fades[i]);
            return v;
        };
        int i = 0;
        for (; i + 1 < m.key; i += 2)
            for (int j = 0; j < C; j++) {
                even[j] = fma(all(key[i]), read(i, j), even[j]);
                odd[j] = fma(all(key[i + 1]), read(i + 1, j), odd[j]);
            }
        for (int j = 0; j < C; j++) {
            if (i < m.key) even[j] = fma(all(key[i]), read(i, j), even[j]);
            found[j] = even[j] + odd[j];
        }
    }

    // state = fade * state + key add^T; sums += state^T query.
    void update(float* held, const float* key, const float* query, vec fade, const vec* add,
                vec* sums) const {
        for (int i = 0; i < m.key; i++, held += C * W)
#pragma GCC unroll 2
            for (int j = 0; j < C; j++) {
                vec v = fma(all(key[i]), add[j], load(held + j * W) * fade);
                store(held + j * W, v);
                sums[j] = fma(all(query[i]), v, sums[j]);
            }
    }

    // ---- The output of a token: normed and gated.

    void finish(float* y, const T* row, T* out) const {
        const T* z = row + z_at;
        int64_t values = m.values(), size = values / m.key_heads;
        for (int h = 0; h < m.heads && delta; h++)
            norm(y + h * m.value, m.norm, y + h * m.value, m.value, eps);
        for (int64_t d = 0, n = values; n > 0; d += W, n -= W) {
            vec gate = load(z + d, n), part = m.by_channel ? all(1) : gate;
            vec v = load(y + d, n) * (part * sigmoid(gate));
            delta ? store(out + d, v, n) : store(y + d, v, n);
        }
        for (int g = 0; g < m.key_heads && !delta; g++)
            norm(y + g * size, m.norm + g * size, out + g * size, size, eps);
    }
};

}  // namespace
