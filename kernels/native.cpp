// The CPU kernels: attention over KV pages, RoPE and KV write, RMSNorm, gated activations, products
// with small weights, and of one row.
//
// A row's bits depend on that row alone, not on the rows beside it, threads, chunks, or what was
// cached: each output is one chain of operations, written once, along one lane of a vector; ends of
// rows are filled up to whole vectors; attention cuts keys at fixed positions, and merges in order.
//
// native.py compiles this file for the machine that it runs on, and checks every argument.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <utility>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

// Of the OpenMP runtime that torch has loaded, so that there is one pool of threads. GNU's name for
// it, which the other runtimes have too.
extern "C" void GOMP_parallel(void (*)(void*), void*, unsigned threads, unsigned flags);

namespace {

// Calls f(0) ... f(count - 1) on threads that take the next as they get free. What one of them lacks
// memory for, the caller's thread throws.
template <class F>
void parallel(int64_t count, int threads, const F& f) {
    struct Shared {
        const F& f;
        int64_t count;
        std::atomic<int64_t> next{0};
        std::atomic<bool> failed{false};
    } shared{f, count};
    auto work = [](void* data) {
        Shared& s = *static_cast<Shared*>(data);
        try {
            for (int64_t i; (i = s.next.fetch_add(1)) < s.count;) s.f(i);
        } catch (const std::bad_alloc&) {
            s.failed = true;
        }
    };
    if (count > 1 && threads > 1) GOMP_parallel(work, &shared, threads, 0);
    else work(&shared);
    if (shared.failed) throw std::bad_alloc();
}

// ---- Vectors of W floats.

#if defined(__AVX512F__)
constexpr int W = 16, MOST_ROWS = 8;  // of a product at once: their sums stay in registers
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int W = 8, MOST_ROWS = 4;
#elif defined(__aarch64__)
constexpr int W = 4, MOST_ROWS = 8;
#else
constexpr int W = 4, MOST_ROWS = 4;
#endif

typedef float vec __attribute__((vector_size(4 * W)));
typedef int32_t ivec __attribute__((vector_size(4 * W)));
typedef uint32_t uvec __attribute__((vector_size(4 * W)));
typedef uint16_t hvec __attribute__((vector_size(2 * W)));

struct bf16 {
    uint16_t bits;
};

inline vec all(float x) { return x - vec{}; }

inline ivec lanes() {
    ivec v;
    for (int i = 0; i < W; i++) v[i] = i;
    return v;
}

inline vec load(const float* p) {
    vec v;
    memcpy(&v, p, sizeof v);
    return v;
}

inline vec load(const bf16* p) {
    hvec h;
    memcpy(&h, p, sizeof h);
    return (vec)(__builtin_convertvector(h, uvec) << 16);
}

inline void store(float* p, vec v) { memcpy(p, &v, sizeof v); }

inline void store(bf16* p, vec v) {  // to the nearest, ties to even
    uvec u = (uvec)v;
    u = v != v ? u | 0x400000 : u + 0x7fff + ((u >> 16) & 1);
    hvec h = __builtin_convertvector(u >> 16, hvec);
    memcpy(p, &h, sizeof h);
}

template <class T>
inline vec load(const T* p, int n) {  // the first n elements; zeros fill up the vector
    if (n >= W) return load(p);
    T part[W] = {};
    memcpy(part, p, n * sizeof(T));
    return load(part);
}

template <class T>
inline void store(T* p, vec v, int n) {
    if (n >= W) return store(p, v);
    T part[W];
    store(part, v);
    memcpy(p, part, n * sizeof(T));
}

inline vec fma(vec a, vec b, vec c) {  // a compiler fuses a * b + c here, but not there
#if defined(__AVX512F__)
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

// e^x within 2 units of the last place; 0 below -87, infinite above 88.
inline vec exp(vec x) {
    vec y = x > 88.0f ? all(88.0f) : x;
    vec n = y * 1.44269504f + 12582912.0f - 12582912.0f;  // the nearest whole power of 2
    y = fma(n, all(-0.693359375f), y);
    y = fma(n, all(2.12194440e-4f), y);
    vec p = all(1.9875691500e-4f);
    for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f,
                    5.0000001201e-1f, 1.0f, 1.0f})
        p = fma(p, y, all(c));
    p *= (vec)((__builtin_convertvector(n, ivec) + 127) << 23);
    p = x > 88.0f ? all(std::numeric_limits<float>::infinity()) : p;
    return x < -87.0f ? vec{} : p;
}

inline vec tanh(vec x) {  // small ones by their series: as 1 - (1 - x) they would lose their digits
    vec square = x * x, p = all(-5.70498872745e-3f);
    for (float c : {2.06390887954e-2f, -5.37397155531e-2f, 1.33314422036e-1f, -3.33332819422e-1f})
        p = fma(p, square, all(c));
    vec small = fma(p * square, x, x), large = 1.0f - 2.0f / (exp(2.0f * x) + 1.0f);
    return square < 0.390625f ? small : large;
}

inline vec shuffle(vec a, vec b, ivec from) {  // lanes of a and b side by side
#ifdef __clang__
    vec v;
    for (int i = 0; i < W; i++) v[i] = from[i] < W ? a[from[i]] : b[from[i] - W];
    return v;
#else
    return __builtin_shuffle(a, b, from);
#endif
}

inline float sum(vec v) {
    for (int step = W / 2; step > 0; step /= 2) v += shuffle(v, v, lanes() ^ step);
    return v[0];
}

inline float max(vec v) {
    for (int step = W / 2; step > 0; step /= 2) {
        vec other = shuffle(v, v, lanes() ^ step);
        v = v > other ? v : other;
    }
    return v[0];
}

// Transposes W vectors, by swapping blocks off the diagonal, of half the size each time.
template <int S = W / 2>
inline void transpose(vec* r) {
    ivec lane = lanes(), right = (lane & S) != 0;
    for (int i = 0; i < W; i++)
        if (!(i & S)) {
            vec a = r[i], b = r[i + S];
            r[i] = shuffle(a, b, right ? lane - S + W : lane);
            r[i + S] = shuffle(a, b, right ? lane + W : lane + S);
        }
    if constexpr (S > 1) transpose<S / 2>(r);
}

// ---- Products with a panel of N columns, whose rows are contiguous.

constexpr int N = 2 * W;

inline int up(int n, int to) { return (n + to - 1) / to * to; }

// c[R][N] = a[R][depth] b[depth][N]; each sum is one chain of `depth` fused operations.
template <int R>
void product(const float* a, int lda, const float* b, int depth, float* c, int ldc) {
    vec sums[R][2] = {};
    for (int i = 0; i < depth; i++) {
        vec left = load(b + i * N), right = load(b + i * N + W);
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
        if (done >= MOST_ROWS) product<MOST_ROWS>(a, lda, b, depth, c, ldc), done = MOST_ROWS;
        else if (done >= 4) product<4>(a, lda, b, depth, c, ldc), done = 4;
        else if (done >= 2) product<2>(a, lda, b, depth, c, ldc), done = 2;
        else product<1>(a, lda, b, depth, c, ldc), done = 1;
    }
}

// ---- Attention.

constexpr int KEYS = 256;  // a block of keys begins at each multiple of this position
constexpr int ROWS = 32;   // rows that meet a block at once: their scores stay near
constexpr int SPAN = 256;  // rows of a sequence that go through its blocks together

struct Batch {  // as PagedBatch
    int32_t sequences, page_size;
    const int32_t *qo_indptr, *kv_indptr, *kv_indices, *kv_lens;
    const int64_t* slots;
};

struct Layer {  // window: INT32_MAX for none; softcap: 0 for none; half: of what RoPE turns, or 0
    int32_t heads, kv_heads, dim, value_dim, half, window;
    float scale, softcap;
};

template <class T>
struct Tokens {  // [T][heads][dim]; tokens may stand apart, as columns of a product do
    T* data;
    int64_t stride;

    T* operator[](int64_t token) const { return data + token * stride; }
};

// What a row has seen of some keys: the highest score `top`, the sum of all weights
// e^(score - top), and from element W on the weighted sum of the values.
using State = float*;

// Joins what a row saw of the next keys. If that is nothing, not a bit changes.
void merge(State seen, const float* next, int width) {
    if (next[1] == 0) return;  // not by its top: what is no number has none
    float top = std::max(seen[0], next[0]);
    vec before = exp(all(seen[0] - top)), after = exp(all(next[0] - top));
    seen[0] = top;
    seen[1] = seen[1] * before[0] + next[1] * after[0];
    for (int d = W; d < W + width; d += W)
        store(seen + d, load(seen + d) * before + load(next + d) * after);
}

template <class T>
struct Attention {
    const Batch& batch;
    const Layer& layer;
    Tokens<T> query;
    const T *k_pages, *v_pages;
    T* out;
    int group = layer.heads / layer.kv_heads;
    int width = up(layer.value_dim, N), stride = W + width;  // floats of a state
    float* states = nullptr;

    int queries(int s) const { return batch.qo_indptr[s + 1] - batch.qo_indptr[s]; }
    int position(int s, int i) const { return batch.kv_lens[s] - queries(s) + i; }
    int first_key(int s, int i) const { return std::max(0, position(s, i) - layer.window + 1); }

    // Queries [from, to) of a sequence, and blocks [block, end) of the keys that they see.
    struct Part {
        int s, from, to, block, end;
        int apart;      // states of a query and head: one for each block of a sequence, or for all
        size_t offset;  // in `states`, which are [to - from][heads][apart][stride] of a sequence
    };

    State state_of(const Part& part, int i, int head) const {
        int64_t row = (int64_t)(i - part.from) * layer.heads + head;
        return states + part.offset + row * part.apart * stride;
    }

    // A thread's memory: a block of one KV head in panels, and up to ROWS rows that meet it.
    struct Room {
        float *keys, *values, *query, *scores, *seen;
        int first[ROWS], end[ROWS];  // the keys that each row sees, counted from the block's start
        State to[ROWS];

        explicit Room(const Attention& a) {
            static thread_local std::vector<float> memory;
            size_t dim = a.layer.dim, width = a.width, total = 16;
            std::pair<float**, size_t> parts[] = {{&keys, KEYS * dim}, {&values, KEYS * width},
                {&query, ROWS * dim}, {&scores, ROWS * KEYS}, {&seen, ROWS * a.stride}};
            for (auto& part : parts) total += part.second;
            if (memory.size() < total) memory.resize(total);
            float* p = (float*)(((uintptr_t)memory.data() + 63) / 64 * 64);
            for (auto& part : parts) *part.first = p, p += part.second;
        }
    };

    // Copies the first `count` keys and values of a block into panels, the keys transposed.
    void pack(int s, int kv_head, int block, int count, Room& room) const {
        int dim = layer.dim, value_dim = layer.value_dim, size = batch.page_size;
        const int32_t* table = batch.kv_indices + batch.kv_indptr[s];
        const T *keys[KEYS + W], *values[KEYS];
        for (int j = 0; j < count;) {  // page by page
            int at = block * KEYS + j, slot = at % size;
            int64_t row = ((int64_t)table[at / size] * size + slot) * layer.kv_heads + kv_head;
            for (; slot < size && j < count; slot++, j++, row += layer.kv_heads) {
                keys[j] = k_pages + row * dim;
                values[j] = v_pages + row * value_dim;
            }
        }
        int columns = up(count, N);
        std::fill(keys + count, keys + std::min(columns + W, KEYS + W), keys[count - 1]);
        for (int j = 0; j < columns; j += W)
            for (int d = 0; d < dim; d += W) {
                vec r[W];
                for (int i = 0; i < W; i++) {
                    __builtin_prefetch(keys[j + W + i] + d);
                    if (j + i < count) __builtin_prefetch(values[j + i] + d);
                    r[i] = load(keys[j + i] + d, dim - d);
                }
                transpose(r);
                float* to = room.keys + (j / N * dim + d) * N + j % N;
                for (int i = 0; i < std::min(W, dim - d); i++) store(to + i * N, r[i]);
            }
        for (int j = 0; j < count; j++)
            for (int d = 0; d < width; d += W) {
                vec x = d < value_dim ? load(values[j] + d, value_dim - d) : vec{};
                store(room.values + (d / N * KEYS + j) * N + d % N, x);
            }
    }

    // Makes query i of sequence s row r of those that meet the block.
    void place(int s, int i, int head, int block, int r, Room& room) const {
        room.first[r] = first_key(s, i) - block * KEYS;
        room.end[r] = position(s, i) + 1 - block * KEYS;
        const T* from = query[batch.qo_indptr[s] + i] + head * layer.dim;
        for (int d = 0, n = layer.dim; n > 0; d += W, n -= W)
            store(room.query + r * layer.dim + d, load(from + d, n) * layer.scale, n);
    }

    // The rows in the room attend over the block, and join what they see to their states.
    void meet(int rows, Room& room) const {
        int count = std::min(KEYS, *std::max_element(room.end, room.end + rows));
        int dim = layer.dim, columns = up(count, N);
        if (count <= 0) return;
        for (int j = 0; j < columns; j += N)
            product(rows, room.query, dim, room.keys + j * dim, dim, room.scores + j, KEYS);
        for (int r = 0; r < rows; r++) {
            float *scores = room.scores + r * KEYS, *seen = room.seen + r * stride;
            if (layer.softcap != 0)
                for (int j = 0; j < columns; j += W)
                    store(scores + j, tanh(load(scores + j) / layer.softcap) * layer.softcap);
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
            vec top = all(std::max(seen[0], -3e38f));  // a number, if it sees no key
            for (int j = 0; j < columns; j += W) {
                vec x = exp(load(scores + j) - top);
                totals += x;
                store(scores + j, x);
            }
            seen[1] = sum(totals);
        }
        for (int d = 0; d < width; d += N)
            product(rows, room.scores, KEYS, room.values + d * KEYS, count, room.seen + W + d,
                    stride);
        for (int r = 0; r < rows; r++) merge(room.to[r], room.seen + r * stride, width);
    }

    // Parts over the same pages, [begin, end), read them once.
    void attend(const Part* begin, const Part* end, int kv_head) const {
        Room room(*this);
        for (int block = begin->block; block < begin->end; block++) {
            int n = 0, count = 0;
            for (const Part* p = begin; p < end; p++)
                count = std::max(count, std::min(KEYS, position(p->s, p->to) - block * KEYS));
            pack(begin->s, kv_head, block, count, room);
            for (const Part* p = begin; p < end; p++)
                for (int row = p->from * group; row < p->to * group; row++) {
                    int i = row / group, head = kv_head * group + row % group;
                    State state = room.to[n] = state_of(*p, i, head);
                    if (block == p->block) {
                        std::fill(state, state + stride, 0.0f);
                        state[0] = -INFINITY;
                    }
                    place(p->s, i, head, block, n++, room);
                    if (n == ROWS) meet(std::exchange(n, 0), room);
                }
            if (n > 0) meet(n, room);
        }
    }

    // Merges the states of query i, in order, and writes what it has seen.
    void finish(const Part& part, int i) const {
        int64_t row = (int64_t)(batch.qo_indptr[part.s] + i) * layer.heads;
        for (int head = 0; head < layer.heads; head++) {
            State seen = state_of(part, i, head);
            for (int more = 1; more < part.apart; more++) merge(seen, seen + more * stride, width);
            T* to = out + (row + head) * layer.value_dim;
            for (int d = 0; d < layer.value_dim; d += W)  // + 0: keys unseen may turn -0 into 0
                store(to + d, load(seen + W + d) / seen[1] + 0.0f, layer.value_dim - d);
        }
    }

    // The longest parts first; those over the same pages stand together.
    bool before(const Part& a, const Part& b) const {
        int more = (a.end - a.block) - (b.end - b.block);
        if (more || a.block != b.block) return more ? more > 0 : a.block < b.block;
        auto pages = [this](const Part& p) {
            const int32_t* table = batch.kv_indices + batch.kv_indptr[p.s];
            int end = std::min(p.end * KEYS, position(p.s, p.to));
            return std::pair(table + p.block * KEYS / batch.page_size,
                             table + (end - 1) / batch.page_size + 1);
        };
        auto x = pages(a), y = pages(b);
        return std::lexicographical_compare(x.first, x.second, y.first, y.second);
    }

    // Few queries go through each block apart, many through all of them in order: the same sums.
    void run(int threads) {
        static thread_local std::vector<float> memory;
        std::vector<Part> parts;
        std::vector<std::pair<Part, int>> rows;  // each query, and where its states are
        std::vector<size_t> starts;              // of parts over the same pages
        int most = std::max(SPAN / group, 1);
        size_t size = 0;
        for (int s = 0; s < batch.sequences; s++)
            for (int from = 0; from < queries(s); from += most) {
                Part part{s, from, std::min(from + most, queries(s)), 0, 0, 1, size};
                part.block = first_key(s, from) / KEYS;
                part.end = (position(s, part.to) - 1) / KEYS + 1;
                if (queries(s) <= most) part.apart = part.end - part.block;
                for (int i = from; i < part.to; i++) rows.push_back({part, i});
                size += (size_t)(part.to - from) * layer.heads * part.apart * stride;
                for (int left = part.apart; left > 0; left--, part.block++, part.offset += stride) {
                    parts.push_back(part);
                    if (part.apart > 1) parts.back().end = part.block + 1;
                }
            }
        if (memory.size() < size) memory.resize(size);
        states = memory.data();
        std::sort(parts.begin(), parts.end(), [this](auto& a, auto& b) { return before(a, b); });
        for (size_t i = 0; i < parts.size(); i++)
            if (!i || parts[i].end - parts[i].block > 1 || before(parts[i - 1], parts[i]))
                starts.push_back(i);
        int64_t tasks = (int64_t)starts.size() * layer.kv_heads;
        starts.push_back(parts.size());
        parallel(tasks, threads, [&](int64_t task) {
            const size_t* bounds = &starts[task / layer.kv_heads];
            attend(parts.data() + bounds[0], parts.data() + bounds[1], task % layer.kv_heads);
        });
        parallel(rows.size(), threads, [&](int64_t i) { finish(rows[i].first, rows[i].second); });
    }
};

// ---- Row by row. A few short rows stay on the caller's thread.

template <class F>
void parallel_rows(int64_t rows, int width, int threads, const F& f) {
    int64_t step = std::max(1, (1 << 14) / width);
    parallel((rows + step - 1) / step, threads, [&](int64_t i) {
        for (int64_t row = i * step; row < std::min(rows, (i + 1) * step); row++) f(row);
    });
}

template <class T>
void rms_norm(const T* x, T* residual, const T* weight, T* out, int64_t rows, int width, float eps,
              float offset, int threads) {
    parallel_rows(rows, width, threads, [&](int64_t row) {
        const T* from = x + row * width;
        T *sum_to = residual + row * width, *to = out + row * width;
        if (residual) {
            for (int d = 0; d < width; d += W) {
                int n = width - d;
                store(sum_to + d, load(from + d, n) + load(sum_to + d, n), n);
            }
            from = sum_to;
        }
        vec squares = {};
        for (int d = 0; d < width; d += W) {
            vec v = load(from + d, width - d);
            squares = fma(v, v, squares);
        }
        float factor = 1 / std::sqrt(sum(squares) / width + eps);
        for (int d = 0; d < width; d += W) {
            int n = width - d;
            store(to + d, load(from + d, n) * factor * (load(weight + d, n) + offset), n);
        }
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

// out = x weight^T + bias, by weight^T in panels [columns / N][depth][N] filled up with zeros.
void multiply(const float* x, const float* panels, const float* bias, float* out, int64_t rows,
              int depth, int columns, int threads) {
    int64_t strips = (columns + N - 1) / N, wide = (rows + ROWS - 1) / ROWS;
    if (rows * depth * columns < 1 << 19) threads = 1;  // less than it takes to wake another
    parallel(strips * wide, threads, [&](int64_t i) {
        int64_t row = i / strips * ROWS, column = i % strips * N;
        int count = std::min<int64_t>(ROWS, rows - row);
        float sums[ROWS * N];
        product(count, x + row * depth, depth, panels + column * depth, depth, sums, N);
        for (int r = 0; r < count; r++)
            for (int d = 0; d < N && column + d < columns; d += W) {
                int n = columns - column - d;
                vec y = load(sums + r * N + d) + (bias ? load(bias + column + d, n) : vec{});
                store(out + (row + r) * columns + column + d, y, n);
            }
    });
}

// ---- One row by weights as oneDNN packs them: panels of 64 columns [depth][64], or, of bfloat16,
// [depth / 2][64][2], filled up with zeros. Each panel is read from its start to its end, once.

constexpr int PANEL = 64;

void add_products(const float* x, const float* panel, int depth, vec* sums) {
    for (int i = 0; i < depth; i++, panel += PANEL)
        for (int c = 0; c < PANEL / W; c++) sums[c] = fma(all(x[i]), load(panel + c * W), sums[c]);
}

void add_products(const bf16* x, const bf16* panel, int depth, vec* sums) {
    for (int i = 0; i < depth; i += 2, panel += 2 * PANEL) {
        uint32_t first = x[i].bits, second = i + 1 < depth ? x[i + 1].bits : 0;
        uvec pair = (second << 16 | first) - uvec{};
        for (int c = 0; c < PANEL / W; c++) {
            uvec both;
            memcpy(&both, panel + 2 * c * W, sizeof both);
#if defined(__AVX512BF16__)  // the second of each pair is added before the first
            sums[c] = (vec)_mm512_dpbf16_ps((__m512)sums[c], (__m512bh)pair, (__m512bh)both);
#else
            uvec high = uvec{} + 0xffff0000;
            sums[c] = fma((vec)(pair & high), (vec)(both & high), sums[c]);
            sums[c] = fma((vec)(pair << 16), (vec)(both << 16), sums[c]);
#endif
        }
    }
}

// out = silu?(x weight^T + bias); `padded` is the depth of the panels. Each `block` of the depth is
// one chain, as oneDNN sums more rows than one.
template <class T>
void multiply_row(const T* x, const T* panels, const T* bias, T* out, int depth, int padded,
                  int block, int columns, int silu, int threads) {
    parallel((columns + PANEL - 1) / PANEL, threads, [&](int64_t i) {
        vec sums[PANEL / W] = {};
        const T* panel = panels + i * padded * PANEL;
        add_products(x, panel, std::min(block, depth), sums);
        for (int from = block; from < depth; from += block) {
            vec more[PANEL / W] = {};
            add_products(x + from, panel + from * PANEL, std::min(block, depth - from), more);
            for (int c = 0; c < PANEL / W; c++) sums[c] += more[c];
        }
        for (int64_t d = i * PANEL, c = 0; c < PANEL / W && d < columns; d += W, c++) {
            int n = columns - d;
            vec y = bias ? sums[c] + load(bias + d, n) : sums[c];  // -0 + 0 would be 0
            if (silu) y /= 1.0f + exp(-y);
            store(out + d, y, n);
        }
    });
}

// Turns element d and half + d of a head by the angle of d; what is beyond 2 * half stays.
template <class T>
void rotate(const T* from, T* to, const float* cos, const float* sin, int half, int dim) {
    for (int d = 0; d < half; d += W) {
        int n = half - d;
        vec x = load(from + d, n), y = load(from + half + d, n);
        vec c = load(cos + d, n), s = load(sin + d, n);
        store(to + d, fma(x, c, -(y * s)), n);
        store(to + half + d, fma(y, c, x * s), n);
    }
    if (to != from) memcpy(to + 2 * half, from + 2 * half, (dim - 2 * half) * sizeof(T));
}

// RoPE of query, in place, and key; K and V go into the pages.
template <class T>
void turn_and_write(const Batch& batch, const Layer& layer, Tokens<T> query, Tokens<T> key,
                    Tokens<T> value, const float* cos, const float* sin, T* k_pages, T* v_pages,
                    int threads) {
    int dim = layer.dim, half = layer.half, kv_heads = layer.kv_heads;
    int values = kv_heads * layer.value_dim, width = (layer.heads + 2 * kv_heads) * dim;
    parallel_rows(batch.qo_indptr[batch.sequences], width, threads, [&](int64_t t) {
        const float *c = cos + t * half, *s = sin + t * half;
        T* to = k_pages + batch.slots[t] * kv_heads * dim;
        for (int h = 0; h < kv_heads; h++)
            rotate(key[t] + h * dim, to + h * dim, c, s, half, dim);
        for (int h = 0; half && h < layer.heads; h++)
            rotate(query[t] + h * dim, query[t] + h * dim, c, s, half, dim);
        memcpy(v_pages + batch.slots[t] * values, value[t], values * sizeof(T));
    });
}

template <class T>
int32_t attend(const Batch& batch, const Layer& layer, T* query, int64_t query_stride, T* key,
               int64_t key_stride, T* value, int64_t value_stride, const float* cos,
               const float* sin, T* k_pages, T* v_pages, T* out, int threads) try {
    Tokens<T> queries{query, query_stride}, keys{key, key_stride}, values{value, value_stride};
    turn_and_write(batch, layer, queries, keys, values, cos, sin, k_pages, v_pages, threads);
    Attention<T>{batch, layer, queries, k_pages, v_pages, out}.run(threads);
    return true;
} catch (const std::bad_alloc&) {
    return false;
}

#define KERNELS(T) (void*)attend<T>, (void*)rms_norm<T>, (void*)gated<T>, (void*)multiply_row<T>

}  // namespace

extern "C" {
void* radixcache_float32[] = {KERNELS(float), (void*)multiply};
void* radixcache_bfloat16[] = {KERNELS(bf16), nullptr};
int32_t radixcache_panel = N;
}
