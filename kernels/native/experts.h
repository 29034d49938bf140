// MLPs, and mixtures of experts. An expert's rows go through it together, whatever other rows the
// step has. A row's bits depend on that row alone: products are chains along the depth, and a row's
// experts are added in the order of their numbers.

#pragma once

#include "linear.h"
#include "operators.h"

namespace {

constexpr int64_t MLP_ROWS = 512;  // rows whose activations between the products are held at once

// Products with several weights, side by side in `out`; columns: 0 ends them.
template <class T>
void several(const Weight* weights, int most, const T* x, int64_t x_stride, T* out,
             int64_t out_stride, int64_t rows, int threads, Upcoming next = {}) {
    for (int i = 0; i < most && weights[i].columns; out += weights[i++].columns) {
        bool last = i + 1 == most || !weights[i + 1].columns;
        multiply(x, x_stride, weights[i], out, out_stride, rows, threads,
                 last ? next : panels_of(weights[i + 1], threads));
    }
}

struct MLP {
    Weight in[2];  // gate and up, joined where their formats agree; or up alone
    Weight down;
    int32_t inner, gated;
    Activation activation;

    int64_t wide() const { return (int64_t)inner * (1 + gated); }

    template <class T>
    void activate(const T* both, T* out, int64_t rows, int threads, const T* given = nullptr,
                  int64_t given_stride = 0) const {
        const T* up = gated ? both + inner : given;
        int64_t stride = gated ? wide() : given_stride;
        ::activation(both, up, out, rows, inner, wide(), stride, activation, threads);
    }

    // out [rows][hidden]. `both` and `activated` are room for MLP_ROWS rows. Without a gate, what is
    // activated is multiplied with the rows `given`, if they are not null.
    template <class T>
    void run(const T* x, T* both, T* activated, float* out, int64_t rows, int threads,
             Upcoming next, const T* given = nullptr, int64_t given_stride = 0) const {
        int64_t hidden = down.columns;
        for (int64_t n; rows > 0; rows -= n, x += n * hidden, out += n * hidden) {
            n = std::min(rows, MLP_ROWS);
            several(in, 2, x, hidden, both, wide(), n, threads, panels_of(down, threads));
            activate(both, activated, n, threads, given, given_stride);
            multiply(activated, inner, down, out, hidden, n, threads, next);
            if (given) given += n * given_stride;
        }
    }
};

enum Scores : int32_t { SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN };

struct Experts {
    const MLP *each, *shared;        // [count]; the expert of all rows, or null
    Weight router, shared_gate;      // shared_gate: columns 0 for none
    Weight latent_in, latent_out;    // around the experts of a latent space; columns 0 for none
    const float* correction;         // [count], added to the scores that choose; or null
    const float* each_scale;         // [count], what multiplies the scores last; or null
    Scores scores;
    int32_t count, active, groups, kept_groups, group_best, renormalise;  // group_best: 1 or 2
    float epsilon, scale;
};

struct Chosen {
    int expert;
    float weight;
};

// Moves the best `most` of `order` to its front; of equal ones, those with the lower numbers. Unlike
// std::sort, a heap stays within bounds if scores are NaNs.
inline void best_first(const float* by, std::vector<int>& order, int most) {
    for (size_t i = 0; i < order.size(); i++) order[i] = i;
    std::partial_sort(order.begin(), order.begin() + most, order.end(), [by](int a, int b) {
        return by[a] != by[b] ? by[a] > by[b] : a < b;
    });
}

// Rules out the experts outside of the groups whose best scores, one or two, add up to the most.
inline void keep_groups(const Experts& e, std::vector<float>& by) {
    static thread_local std::vector<float> sums;
    static thread_local std::vector<int> order;
    int size = e.count / e.groups;
    sums.resize(e.groups), order.resize(e.groups);
    for (int g = 0; g < e.groups; g++) {
        float best[2] = {};
        const float* from = by.data() + g * size;
        std::partial_sort_copy(from, from + size, best, best + e.group_best, std::greater<float>());
        sums[g] = best[0] + best[1];
    }
    best_first(sums.data(), order, e.kept_groups);
    for (int i = e.kept_groups; i < e.groups; i++)
        std::fill_n(by.begin() + order[i] * size, size, -INFINITY);
}

// A row's experts by its logits [count], in the order of their numbers.
inline void choose(const Experts& e, const float* logits, Chosen* to) {
    static thread_local std::vector<float> scores, by;
    static thread_local std::vector<int> order;
    scores.resize(e.count), by.resize(e.count), order.resize(e.count);
    float top = *std::max_element(logits, logits + e.count), total = 0;
    for (int i = 0; i < e.count; i++) {
        float x = logits[i];
        if (e.scores == SOFTMAX) x = std::exp(x - top);
        if (e.scores == SIGMOID) x = 1 / (1 + std::exp(-x));
        total += scores[i] = x;
    }
    for (int i = 0; i < e.count; i++) {
        if (e.scores == SOFTMAX) scores[i] /= total;
        by[i] = e.correction ? scores[i] + e.correction[i] : scores[i];
    }
    if (e.groups > 1) keep_groups(e, by);
    best_first(by.data(), order, e.active);
    std::sort(order.begin(), order.begin() + e.active);
    bool of_chosen = e.scores == SOFTMAX_OF_CHOSEN;
    float sum = of_chosen ? 0 : e.epsilon, highest = -INFINITY;
    for (int i = 0; i < e.active; i++) highest = std::max(highest, scores[order[i]]);
    for (int i = 0; i < e.active; i++) {
        float weight = scores[order[i]];
        if (of_chosen) weight = std::exp(weight - highest);
        to[i] = {order[i], weight};
        sum += weight;
    }
    for (int i = 0; i < e.active; i++) {
        if (of_chosen || e.renormalise) to[i].weight /= sum;
        to[i].weight *= e.each_scale ? e.scale * e.each_scale[order[i]] : e.scale;
    }
}

// Columns of a weight from panel `first` on, at most `panels` panels.
inline Weight part_of(const Weight& weight, int first, int panels) {
    Weight part = weight;
    part.panels += first * kernels_of(weight.format).words_of(weight.padded);
    if (weight.bias) part.bias += first * N;
    part.columns = std::min(weight.columns - first * N, panels * N);
    return part;
}

// The chosen experts of up to MLP_ROWS rows. Pairs of a row and an expert are sorted by expert: the
// places [starts[i], starts[i + 1]) are those of expert i.
template <class T>
struct Mixture {
    const Experts& e;
    const T *x, *routed;  // rows, and what the router reads
    int64_t rows;
    float* out;  // [rows][hidden], in the experts' space
    int threads;
    Upcoming next;
    int64_t hidden = e.each->down.columns, pairs = rows * e.active;
    std::vector<int> starts = std::vector<int>(e.count + 1), places = std::vector<int>(pairs);
    std::vector<Chosen> chosen = std::vector<Chosen>(pairs);
    T *gathered = nullptr, *both = nullptr, *activated = nullptr;  // by place
    float* results = nullptr;

    void run() {
        static thread_local Scratch memory;
        int64_t inner = e.each->inner, wide = e.each->wide();
        int64_t logit_count = (rows * e.count + 15) / 16 * 16;
        float* logits = memory.get(logit_count + pairs * (2 * hidden + wide + inner));
        results = logits + logit_count, gathered = (T*)(results + pairs * hidden);
        both = gathered + pairs * hidden, activated = both + pairs * wide;
        if (pairs * hidden * (wide + inner) < SMALL) threads = 1;
        multiply(routed, e.router.depth, e.router, logits, e.count, rows, threads);
        parallel_rows(rows, e.count * 16, threads, [&](int64_t r) {
            choose(e, logits + r * e.count, &chosen[r * e.active]);
        });
        sort();
        parallel_rows(pairs, hidden, threads, [&](int64_t i) {
            memcpy(gathered + places[i] * hidden, x + i / e.active * hidden, hidden * sizeof(T));
        });
        compute();
        parallel_rows(rows, hidden * e.active, threads, [&](int64_t r) {
            for (int64_t d = 0; d < hidden; d += W) {
                vec sum = {};
                for (int64_t i = r * e.active; i < (r + 1) * e.active; i++)
                    sum = fma(load(results + places[i] * hidden + d, hidden - d),
                              all(chosen[i].weight), sum);
                store(out + r * hidden + d, sum, hidden - d);
            }
        });
    }

  private:
    struct Task {
        const Weight* weight;
        int64_t at, n;  // places
        int panel, column;
    };

    void sort() {
        for (const Chosen& c : chosen) starts[c.expert + 1]++;
        for (int i = 0; i < e.count; i++) starts[i + 1] += starts[i];
        std::vector<int> next(starts.begin(), starts.end() - 1);
        for (int64_t i = 0; i < pairs; i++) places[i] = next[chosen[i].expert]++;
    }

    // The products of all experts in two rounds; each is cut by columns, and by rows if many.
    void compute() const {
        std::vector<Task> in, down;
        for (int i = 0; i < e.count; i++)
            for (int64_t at = starts[i], n; at < starts[i + 1]; at += n) {
                n = std::min<int64_t>(TALL, starts[i + 1] - at);
                const MLP& mlp = e.each[i];
                cut({mlp.in, at, n, 0, 0}, in);
                cut({mlp.in + 1, at, n, 0, mlp.in[0].columns}, in);
                cut({&mlp.down, at, n, 0, 0}, down);
            }
        int64_t inner = e.each->inner, wide = e.each->wide();
        run(in, gathered, hidden, both, wide, {});
        e.each->activate(both, activated, pairs, threads);
        run(down, activated, inner, results, hidden, next);
    }

    static void cut(Task task, std::vector<Task>& to) {
        for (; task.panel * N < task.weight->columns; task.panel += PANELS) to.push_back(task);
    }

    template <class U>
    void run(const std::vector<Task>& tasks, const T* from, int64_t depth, U* to,
             int64_t width, Upcoming next) const {
        parallel(tasks.size(), threads, [&](int64_t i) {
            const Task& t = tasks[i];
            multiply(from + t.at * depth, depth, part_of(*t.weight, t.panel, PANELS),
                     to + t.at * width + t.column + t.panel * N, width, t.n, 1);
        }, true, next);
    }
};

// out [rows][hidden] of the experts that are chosen by `routed`, and the shared one.
template <class T>
void run_experts(const Experts& e, const T* x, const T* routed, float* out, int64_t rows,
                 int threads, Upcoming next) {
    static thread_local Scratch memory;
    int64_t hidden = e.router.depth;
    for (int64_t n; rows > 0;
         rows -= n, x += n * hidden, routed += n * hidden, out += n * hidden) {
        n = std::min(rows, MLP_ROWS);
        const Upcoming behind = e.shared ? panels_of(e.shared->in[0], threads) : next;
        if (e.latent_in.columns) {
            static thread_local Scratch of_latents;
            int64_t size = e.latent_in.columns;
            float* sums = of_latents.get(2 * n * size);
            T* rows_in = (T*)(sums + n * size);
            multiply(x, hidden, e.latent_in, rows_in, size, n, threads);
            Mixture<T>{e, rows_in, routed, n, sums, threads, panels_of(e.latent_out, threads)}.run();
            parallel_rows(n, size, threads,
                          [&](int64_t r) { store_row(rows_in + r * size, sums + r * size, size); });
            multiply(rows_in, size, e.latent_out, out, hidden, n, threads, behind);
        } else Mixture<T>{e, x, routed, n, out, threads, behind}.run();
        if (!e.shared) continue;
        float* y = memory.get(n * (hidden + e.shared->wide() + e.shared->inner + 1));
        float* gates = y + n * hidden;
        T* both = (T*)(gates + n);
        e.shared->run(x, both, both + n * e.shared->wide(), y, n, threads, next);
        if (e.shared_gate.columns) multiply(x, hidden, e.shared_gate, gates, 1, n, threads);
        parallel_rows(n, hidden, threads, [&](int64_t r) {
            vec gate = e.shared_gate.columns ? sigmoid(all(gates[r])) : all(1);
            for (int64_t d = r * hidden, left = hidden; left > 0; d += W, left -= W)
                store(out + d, fma(load(y + d, left), gate, load(out + d, left)), left);
        });
    }
}

}  // namespace
