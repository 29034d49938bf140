// Attention over KV pages.
//
// Keys are cut into blocks at fixed positions. A row attends over each block separately, and the
// partial results are merged in order. So a row's bits depend on that row alone, threads share the
// work evenly, and a block in the page tables of several sequences is read once for all of them.

#pragma once

#include <cmath>
#include <utility>

#include "threads.h"
#include "vectors.h"

namespace {

constexpr int KEYS = 256;  // a block of keys begins at each multiple of this position
constexpr int ROWS = 32;   // rows that attend over a block together: their scores stay in cache
constexpr int SPAN = 256;  // rows of a sequence that traverse its blocks together
constexpr int WIDE = 2 * W;  // columns of a panel of keys or values

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int SCORED = 8;  // rows of a product at once: their sums stay in registers
#else
constexpr int SCORED = 4;
#endif

struct Batch {  // as PagedBatch
    int32_t sequences, page_size;
    const int32_t *qo_indptr, *kv_indptr, *kv_indices, *kv_lens;
    const int32_t* first;  // tokens before each table; kv_lens count them
    const int64_t* slots;
    const int32_t* ahead;  // [T] keys behind its own that each row sees `both_ways`; or null
};

// What the tables of a batch say of its sequences and new tokens; `batch` has all but these.
//
// Returns: the pages that there must be; or, if the tables contradict each other, minus the number
// of the sentence in attention.py that says how.
inline int64_t plan_batch(const Batch& batch, const int32_t* last_page_len, const int32_t* before,
                          const int32_t* write_indices, int64_t indices, int32_t* kv_lens,
                          int32_t* first, int64_t* slots) {
    const int64_t count = batch.sequences, size = batch.page_size;
    if (batch.qo_indptr[0] || batch.kv_indptr[0]) return -1;
    for (int64_t s = 0; s < count; s++) {
        int64_t pages = (int64_t)batch.kv_indptr[s + 1] - batch.kv_indptr[s], last = last_page_len[s];
        int64_t rows = (int64_t)batch.qo_indptr[s + 1] - batch.qo_indptr[s];
        if (pages < 1 || batch.kv_indptr[s + 1] > indices) return -2;
        if (last < 1 || last > size || rows < 0) return -3;
        int64_t all = (pages - 1) * size + last, skipped = before ? before[s] : 0;
        if (skipped < 0 || all + skipped > INT32_MAX) return -3;
        if (rows > all) return -4;
        first[s] = skipped, kv_lens[s] = all + skipped;
    }
    if (batch.kv_indptr[count] != indices) return -2;
    int32_t most = -1;
    for (int64_t i = 0; i < indices; i++) {
        int32_t page = batch.kv_indices[i], to = write_indices ? write_indices[i] : page;
        if (page < 0 || to < 0) return -5;
        most = std::max(most, std::max(page, to));
    }
    for (int64_t s = 0; s < count; s++) {
        const int32_t* pages = (write_indices ? write_indices : batch.kv_indices) + batch.kv_indptr[s];
        int64_t end = kv_lens[s] - first[s], rows = batch.qo_indptr[s + 1] - batch.qo_indptr[s];
        for (int64_t i = 0; i < rows && batch.ahead; i++) {
            int32_t ahead = batch.ahead[batch.qo_indptr[s] + i];
            if (ahead < 0 || ahead >= rows - i) return -6;
        }
        for (int64_t at = end - rows; at < end; at++) *slots++ = pages[at / size] * size + at % size;
    }
    return (int64_t)most + 1;
}

struct Heads {  // of a layer; window: INT32_MAX for none; softcap: 0 for none
    int32_t heads, kv_heads, dim, value_dim, window;
    float scale, softcap;
    int32_t rotated = 0;  // MLA: a key is its value and so many numbers, which pages.v has
    int32_t both_ways = 0;  // rows see as far ahead as the batch says

    // Numbers of a token's head in the two kinds of pages.
    int k_dim() const { return dim - rotated; }
    int v_dim() const { return rotated ? rotated : value_dim; }
};

enum class KVFormat : int32_t { FLOAT32, BFLOAT16, FLOAT16, INT8 };  // of pages

struct q8 {  // a byte of a head: its numbers of 8 bits, and behind them a float16 scale for each 32
    uint8_t byte;
};

// Elements that `dim` numbers take.
template <class S>
inline int64_t stored(int dim) { return std::is_same_v<S, q8> ? dim + dim / 32 * 2 : dim; }

// Number d of a stored head and the n - 1 behind it, its last. Exact: 8 bits times 11 fit a float.
template <class S>
inline vec load_stored(const S* row, int d, int n) { return load(row + d, n); }

inline vec load_stored(const q8* row, int d, int n) {
    typedef int8_t bvec __attribute__((vector_size(W)));
    typedef int16_t svec __attribute__((vector_size(2 * W)));
    bvec bytes = read<bvec>(row + d);  // in two steps, or GCC widens one by one
    ivec numbers = __builtin_convertvector(__builtin_convertvector(bytes, svec), ivec);
    return __builtin_convertvector(numbers, vec) * number(read<fp16>(row + d + n + d / 32 * 2));
}

template <class S, class T>
void store_row(S* to, const T* from, int n) {
    if (std::is_same_v<S, T>) memcpy(to, from, n * sizeof(T));
    else for (int d = 0; d < n; d += W) store(to + d, load(from + d, n - d), n - d);
}

template <class T>
void store_row(q8* to, const T* from, int n) {
    typedef int8_t bvec __attribute__((vector_size(W)));
    for (q8* scales = to + n; n > 0; n -= 32, from += 32, to += 32, scales += 2) {
        ivec sizes = {};
        for (int d = 0; d < 32; d += W) {
            ivec size = (ivec)load(from + d) & 0x7fffffff;  // as integers: a NaN is the largest
            sizes = size > sizes ? size : sizes;
        }
        int32_t most = 0;
        for (int i = 0; i < W; i++) most = std::max(most, sizes[i]);
        fp16 scale;
        store(&scale, all(read<float>(&most) / 127), 1);
        memcpy(scales, &scale, 2);
        float factor = number(scale) == 0 ? 0 : 1 / number(scale);
        for (int d = 0; d < 32; d += W) {
            vec x = load(from + d) * factor;
            x = x > 127.0f ? all(127) : x < -127.0f ? all(-127) : x;
            ivec nearest = __builtin_convertvector(x + 12582912.0f - 12582912.0f, ivec);
            bvec numbers = __builtin_convertvector(nearest, bvec);
            memcpy(to + d, &numbers, W);
        }
    }
}

template <class S>
bool is_finite(const S* row, int n) {
    vec zeros = {};
    for (int d = 0; d < n; d += W) zeros += load_stored(row, d, n - d) * 0.0f;  // or NaN
    return sum(zeros) == 0;
}

template <class F>
void with_format(KVFormat format, const F& f) {
    switch (format) {
        case KVFormat::FLOAT32: return f((float*)nullptr);
        case KVFormat::BFLOAT16: return f((bf16*)nullptr);
        case KVFormat::FLOAT16: return f((fp16*)nullptr);
        case KVFormat::INT8: return f((q8*)nullptr);
    }
}

struct Pages {  // of a layer: [page_size][kv_heads][stored dim] each, so many bytes apart
    char *k, *v;
    int64_t k_stride, v_stride;
    KVFormat format;

    static char* page(char* pages, int64_t stride, int64_t number) {
        return pages + number * stride;
    }
};

template <class T>
struct Tokens {  // [T][heads][dim]; tokens may have gaps between them, as columns of a product
    T* data;
    int64_t stride;

    T* operator[](int64_t token) const { return data + token * stride; }
};

inline int up(int n, int to) { return (n + to - 1) / to * to; }

// c[R][WIDE] = a[R][depth] b[depth][WIDE]; each sum is one chain of `depth` fused operations.
template <int R>
void product(const float* a, int lda, const float* b, int depth, float* c, int ldc) {
    vec sums[R][2] = {};
    for (int i = 0; i < depth; i++) {
        vec left = load(b + i * WIDE), right = load(b + i * WIDE + W);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            vec x = all(a[r * lda + i]);
            sums[r][0] = fma(x, left, sums[r][0]);
            sums[r][1] = fma(x, right, sums[r][1]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
        store(c + r * ldc, sums[r][0]);
        store(c + r * ldc + W, sums[r][1]);
    }
}

void product(int rows, const float* a, int lda, const float* b, int depth, float* c, int ldc) {
    for (int r = 0, done; r < rows; r += done, a += done * lda, c += done * ldc) {
        done = rows - r;
        if (done >= SCORED) product<SCORED>(a, lda, b, depth, c, ldc), done = SCORED;
        else if (done >= 4) product<4>(a, lda, b, depth, c, ldc), done = 4;
        else if (done >= 2) product<2>(a, lda, b, depth, c, ldc), done = 2;
        else product<1>(a, lda, b, depth, c, ldc), done = 1;
    }
}

// A row's state after some keys: the highest score `top`, the sum of all weights
// e^(score - top), and from element W on the weighted sum of the values.
using State = float*;

// Merges a row's state after the next keys into its state. A state of no keys changes no bit.
void merge(State seen, const float* next, int width) {
    if (next[1] == 0) return;  // not by its top: a NaN has none
    float top = std::max(seen[0], next[0]);
    vec before = exp(all(seen[0] - top)), after = exp(all(next[0] - top));
    seen[0] = top;
    seen[1] = seen[1] * before[0] + next[1] * after[0];
    for (int d = W; d < W + width; d += W)
        store(seen + d, load(seen + d) * before + load(next + d) * after);
}

// Queries [from, to) of a sequence, and blocks [block, end) of the keys that they see.
struct Part {
    int s, from, to, block, end;
    int seen;       // keys of the sequence that some of them see
    int apart;      // states per query and head: one for each block of a sequence, or one for all
    size_t offset;  // into the states, a sequence's are [to - from][heads][apart][stride]
};

// The distribution of a batch's work; the same for all layers with these heads.
struct Plan {
    const Batch& batch;
    Heads heads;
    int group = heads.heads / heads.kv_heads;
    int width = up(heads.value_dim, WIDE), stride = W + width;  // floats of a state
    std::vector<Part> parts;
    std::vector<size_t> starts;              // of parts over the same pages
    std::vector<std::pair<Part, int>> rows;  // queries to be merged, and the places of their states
    size_t size = 0;                         // floats of all states

    // Few queries attend over each block separately, many over all in order: the sums are the same.
    Plan(const Batch& batch, const Heads& heads) : batch(batch), heads(heads) {
        int most = std::max(SPAN / group, 1);
        for (int s = 0; s < batch.sequences; s++)
            for (int from = 0; from < queries(s); from += most) {
                Part part{s, from, std::min(from + most, queries(s)), 0, 0, 0, 1, size};
                part.block = first_key(s, from) / KEYS;
                for (int i = ahead() ? from : part.to - 1; i < part.to; i++)
                    part.seen = std::max(part.seen, end_key(s, i));
                part.end = (part.seen - 1) / KEYS + 1;
                if (queries(s) <= most) part.apart = part.end - part.block;
                for (int i = from; i < part.to && part.apart > 1; i++) rows.push_back({part, i});
                size += (size_t)(part.to - from) * heads.heads * part.apart * stride;
                for (int left = part.apart; left > 0; left--, part.block++, part.offset += stride) {
                    parts.push_back(part);
                    if (part.apart > 1) parts.back().end = part.block + 1;
                }
            }
        std::sort(parts.begin(), parts.end(), [this](auto& a, auto& b) { return before(a, b); });
        for (size_t i = 0; i < parts.size(); i++)
            if (!i || parts[i].end - parts[i].block > 1 || before(parts[i - 1], parts[i]))
                starts.push_back(i);
        starts.push_back(parts.size());
    }

    int queries(int s) const { return batch.qo_indptr[s + 1] - batch.qo_indptr[s]; }
    int position(int s, int i) const { return batch.kv_lens[s] - queries(s) + i; }
    int first_key(int s, int i) const {
        return std::max(batch.first[s], position(s, i) - heads.window + 1);
    }
    int end_key(int s, int i) const {
        return position(s, i) + 1 + (ahead() ? ahead()[batch.qo_indptr[s] + i] : 0);
    }
    const int32_t* ahead() const { return heads.both_ways ? batch.ahead : nullptr; }

  private:
    // The longest parts first; parts over the same pages are adjacent.
    bool before(const Part& a, const Part& b) const {
        int more = (a.end - a.block) - (b.end - b.block);
        if (more || a.block != b.block) return more ? more > 0 : a.block < b.block;
        auto pages = [this](const Part& p) {
            const int32_t* table = batch.kv_indices + batch.kv_indptr[p.s];
            int first = batch.first[p.s], begin = std::max(p.block * KEYS, first);
            int end = std::min(p.end * KEYS, p.seen);
            return std::pair(table + (begin - first) / batch.page_size,
                             table + (end - 1 - first) / batch.page_size + 1);
        };
        if (batch.first[a.s] != batch.first[b.s]) return batch.first[a.s] < batch.first[b.s];
        auto x = pages(a), y = pages(b);
        return std::lexicographical_compare(x.first, x.second, y.first, y.second);
    }
};

template <class T>
struct Attention {
    const Plan& plan;
    Tokens<T> query;
    const Pages& pages;
    T* out;
    const float* sinks = nullptr;  // each head's score for an extra key without a value
    const Batch& batch = plan.batch;
    const Heads& heads = plan.heads;
    float* states = nullptr;

    // Threads without work prefetch what is read `next`.
    void run(int threads, Upcoming next = {}) {
        static thread_local Scratch memory;
        states = memory.get(plan.size);
        // Query heads of a KV head are cut only if there are threads without work.
        int64_t tasks = (plan.starts.size() - 1) * heads.kv_heads;
        int cuts = std::clamp<int64_t>(threads / std::max<int64_t>(tasks, 1), 1, plan.group);
        parallel(tasks * cuts, threads, [&](int64_t task) {
            int64_t each = heads.kv_heads * cuts, cut = task % each;
            const size_t* bounds = &plan.starts[task / each];
            attend(&plan.parts[bounds[0]], plan.parts.data() + bounds[1],
                   heads.heads * cut / each, heads.heads * (cut + 1) / each);
        }, false, next);
        parallel(plan.rows.size(), threads, [&](int64_t i) {
            finish(plan.rows[i].first, plan.rows[i].second, 0, heads.heads);
        });
    }

  private:
    State state_of(const Part& part, int i, int head) const {
        int64_t row = (int64_t)(i - part.from) * heads.heads + head;
        return states + part.offset + row * part.apart * plan.stride;
    }

    // A thread's memory: a block of one KV head in panels, and up to ROWS rows that attend over it.
    struct Room {
        float *keys, *values, *query, *scores, *seen;
        int first[ROWS], end[ROWS];  // the keys that each row sees, counted from the block's start
        State to[ROWS];

        explicit Room(const Plan& plan) {
            static thread_local Scratch memory;
            size_t dim = up(plan.heads.dim, W), width = plan.width, total = 0;
            std::pair<float**, size_t> parts[] = {{&keys, KEYS * dim}, {&values, KEYS * width},
                {&query, ROWS * dim}, {&scores, ROWS * KEYS}, {&seen, ROWS * plan.stride}};
            for (auto& part : parts) total += part.second;
            float* p = memory.get(total);
            for (auto& part : parts) *part.first = p, p += part.second;
        }
    };

    // Copies the first `count` keys and values of a block into panels, the keys transposed.
    template <class S>
    void pack(int s, int kv_head, int block, int count, Room& room) const {
        int dim = heads.dim, value_dim = heads.value_dim, size = batch.page_size;
        int k_dim = heads.k_dim(), v_dim = heads.v_dim();
        const int32_t* table = batch.kv_indices + batch.kv_indptr[s];
        const S *keys[KEYS + W], *values[KEYS + W];
        int first = std::max(0, batch.first[s] - block * KEYS);
        for (int j = first; j < count;) {  // page by page
            int at = block * KEYS + j - batch.first[s], slot = at % size;
            const S *k = (const S*)pages.page(pages.k, pages.k_stride, table[at / size]),
                    *v = (const S*)pages.page(pages.v, pages.v_stride, table[at / size]);
            for (int row = slot * heads.kv_heads + kv_head; slot < size && j < count;
                 slot++, j++, row += heads.kv_heads) {
                keys[j] = k + row * stored<S>(k_dim);
                values[j] = v + row * stored<S>(v_dim);
            }
        }
        std::fill(keys, keys + first, keys[first]);  // no row sees these: any will do
        std::fill(values, values + first, values[first]);
        int columns = up(count, WIDE);
        std::fill(keys + count, keys + std::min(columns + W, KEYS + W), keys[count - 1]);
        std::fill(values + count, values + std::min(columns + W, KEYS + W), values[count - 1]);
        auto transposed = [&](const S* const* rows, int n, int first) {
            for (int j = 0; j < columns; j += W)
                for (int d = 0; d < n; d += W) {
                    vec r[W];
                    for (int i = 0; i < W; i++) {
                        __builtin_prefetch(rows[j + W + i] + stored<S>(d));
                        if (j + i < count) __builtin_prefetch(values[j + i] + stored<S>(d));
                        r[i] = load_stored(rows[j + i], d, n - d);
                    }
                    transpose(r);
                    float* to = room.keys + (j / WIDE * dim + first + d) * WIDE + j % WIDE;
                    for (int i = 0; i < std::min(W, n - d); i++) store(to + i * WIDE, r[i]);
                }
        };
        transposed(keys, k_dim, 0);
        if (heads.rotated) transposed(values, v_dim, k_dim);
        const S* const* of = heads.rotated ? keys : values;
        for (int j = 0; j < count; j++)
            for (int d = 0; d < plan.width; d += W) {
                vec x = d < value_dim ? load_stored(of[j], d, value_dim - d) : vec{};
                store(room.values + (d / WIDE * KEYS + j) * WIDE + d % WIDE, x);
            }
    }

    // Makes query i of sequence s the r-th row that attends over the block.
    void place(int s, int i, int head, int block, int r, Room& room) const {
        room.first[r] = plan.first_key(s, i) - block * KEYS;
        room.end[r] = plan.end_key(s, i) - block * KEYS;
        const T* from = query[batch.qo_indptr[s] + i] + head * heads.dim;
        for (int d = 0, n = heads.dim; n > 0; d += W, n -= W)
            store(room.query + r * heads.dim + d, load(from + d, n) * heads.scale, n);
    }

    // The rows attend over the block, and merge the results into their states.
    void meet(int rows, Room& room) const {
        int count = std::min(KEYS, *std::max_element(room.end, room.end + rows));
        int dim = heads.dim, columns = up(count, WIDE);
        if (count <= 0) return;
        for (int j = 0; j < columns; j += WIDE)
            product(rows, room.query, dim, room.keys + j * dim, dim, room.scores + j, KEYS);
        for (int r = 0; r < rows; r++) {
            float *scores = room.scores + r * KEYS, *seen = room.seen + r * plan.stride;
            if (heads.softcap != 0)
                for (int j = 0; j < columns; j += W)
                    store(scores + j, tanh(load(scores + j) / heads.softcap) * heads.softcap);
            if (room.first[r] > 0 || room.end[r] < columns)
                for (int j = 0; j < columns; j += W) {
                    ivec key = lanes() + j, sees = (key >= room.first[r]) & (key < room.end[r]);
                    store(scores + j, sees ? load(scores + j) : all(-INFINITY));
                }
            vec tops = all(-INFINITY), totals = {};
            for (int j = 0; j < columns; j += W) {
                vec x = load(scores + j);
                tops = x > tops ? x : tops;
            }
            seen[0] = max(tops);
            vec top = all(std::max(seen[0], -3e38f));  // finite even if the row sees no key
            for (int j = 0; j < columns; j += W) {
                vec x = exp(load(scores + j) - top);
                totals += x;
                store(scores + j, x);
            }
            seen[1] = sum(totals);
        }
        for (int d = 0; d < plan.width; d += WIDE)
            product(rows, room.scores, KEYS, room.values + d * KEYS, count, room.seen + W + d,
                    plan.stride);
        for (int r = 0; r < rows; r++) merge(room.to[r], room.seen + r * plan.stride, plan.width);
    }

    // Heads [first, last) of one KV head; parts over the same pages, [begin, end), read them once.
    void attend(const Part* begin, const Part* end, int first, int last) const {
        Room room(plan);
        for (int block = begin->block; block < begin->end; block++) {
            int n = 0, count = 0;
            for (const Part* p = begin; p < end; p++)
                count = std::max(count, std::min(KEYS, p->seen - block * KEYS));
            with_format(pages.format, [&](auto* stored_as) {
                pack<std::remove_pointer_t<decltype(stored_as)>>(begin->s, first / plan.group,
                                                                 block, count, room);
            });
            for (const Part* p = begin; p < end; p++)
                for (int row = 0; row < (p->to - p->from) * (last - first); row++) {
                    int i = p->from + row / (last - first), head = first + row % (last - first);
                    State state = room.to[n] = state_of(*p, i, head);
                    if (block == p->block) {
                        std::fill(state, state + plan.stride, 0.0f);
                        state[0] = -INFINITY;
                    }
                    place(p->s, i, head, block, n++, room);
                    if (n == ROWS) meet(std::exchange(n, 0), room);
                }
            if (n > 0) meet(n, room);
        }
        for (const Part* p = begin; p < end; p++)
            for (int i = p->from; i < p->to && p->apart == 1; i++)
                finish(*p, i, first, last - first);
    }

    // Merges the states of query i, in order, and writes the output of these heads.
    void finish(const Part& part, int i, int first, int count) const {
        int64_t row = (int64_t)(batch.qo_indptr[part.s] + i) * heads.heads;
        for (int head = first; head < first + count; head++) {
            State seen = state_of(part, i, head);
            for (int more = 1; more < part.apart; more++)
                merge(seen, seen + more * plan.stride, plan.width);
            float total = sinks ? seen[1] + std::exp(sinks[head] - seen[0]) : seen[1];
            T* to = out + (row + head) * heads.value_dim;
            for (int d = 0; d < heads.value_dim; d += W)  // + 0: keys unseen may turn -0 into 0
                store(to + d, load(seen + W + d) / total + 0.0f, heads.value_dim - d);
        }
    }
};

}  // namespace
