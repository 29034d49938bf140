// Linear layers: multiplies rows by weights that were packed once, at load, into panels of columns.
//
// Each sum is one chain of fused operations along the depth, first element to last, whatever the
// number of rows, the tile, the block of the depth or the thread: a row's bits depend on that row
// alone. Quantized weights are expanded to their exact float32 values, so they give the same
// bits as panels of these float32.

#pragma once

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "rounded.h"

namespace {

// ---- Products.

// Sums [R][C][N] of R rows with C panels, `apart` words apart; weights expand in registers.
template <class P, int R, int C>
void few(const P& p, const typename P::Element* x, int64_t stride, const uint32_t* panel,
         int64_t apart, int depth, float* to) {
    vec sums[R][C * V] = {};
    for (int k = 0; k < depth; k += P::BLOCK, panel += P::WORDS * N) {
        if constexpr (R == 1 && P::HEAD)  // prefetch the next panels
#pragma GCC unroll 16
            for (int at = 0; at < C * P::WORDS * N; at += 16)
                __builtin_prefetch(panel + (C + at / (P::WORDS * N)) * apart + at % (P::WORDS * N));
        Scales scales[C * V];
#pragma GCC unroll 8
        for (int v = 0; v < C * V; v++) scales[v] = P::scales(panel + v / V * apart, v % V);
        for (int i = 0; i < P::BLOCK / P::PER; i++) {
            uvec words[C * V];
#pragma GCC unroll 8
            for (int v = 0; v < C * V; v++)
                words[v] = read<uvec>(panel + v / V * apart + (P::HEAD + i) * N + v % V * W);
#pragma GCC unroll 8
            for (int j = 0; j < P::PER; j++) {
                const typename P::Element* at = x + k + i * P::PER + j;
#pragma GCC unroll 8
                for (int v = 0; v < C * V; v++) {
                    vec w = p.weight(words[v], j, scales[v]);
                    if (R > 1) keep(w);
#pragma GCC unroll 8
                    for (int r = 0; r < R; r++) sums[r][v] = P::add(sums[r][v], at[r * stride], w);
                }
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int v = 0; v < C * V; v++) store(to + (r * C * V + v) * W, sums[r][v]);
}

template <class P, int R = FEW>
void few(const P& p, int rows, const typename P::Element* x, int64_t stride, const uint32_t* panel,
         int depth, float* to) {
    if (rows == R) return few<P, R, 1>(p, x, stride, panel, 0, depth, to);
    if constexpr (R > 1) few<P, R - 1>(p, rows, x, stride, panel, depth, to);
}

// Adds x[depth][R] times weights[depth][N] to sums[R][N] (0 if `first`); one element a word.
template <class P, int R>
void tile(const typename P::Element* x, const float* weights, int depth, float* to, bool first) {
    vec sums[R][V] = {};
    if (!first)
#pragma GCC unroll 24
        for (int i = 0; i < R * V; i++) sums[i / V][i % V] = load(to + i * W);
    for (int k = 0; k < depth; k++, x += R, weights += N) {
        vec w[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) keep(w[v] = load(weights + v * W));
#pragma GCC unroll 12
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) sums[r][v] = P::add(sums[r][v], x[r], w[v]);
    }
#pragma GCC unroll 24
    for (int i = 0; i < R * V; i++) store(to + i * W, sums[i / V][i % V]);
}

template <class P, int R = MOST>
void tile(int rows, const typename P::Element* x, const float* weights, int depth, float* to,
          bool first) {
    if (rows == R) return tile<P, R>(x, weights, depth, to, first);
    if constexpr (R > 1) tile<P, R - 1>(rows, x, weights, depth, to, first);
}

// Expands a panel's block to float32 [depth][N].
template <class P>
void expand(const Levels* levels, const uint32_t* block, int depth, float* to) {
    const P p{levels};
    for (const float* end = to + depth * N; to < end; block += P::WORDS * N) {
        Scales scales[V];
        for (int v = 0; v < V; v++) scales[v] = P::scales(block, v);
#pragma GCC unroll 1
        for (int i = 0; i < P::BLOCK / P::PER; i++, to += P::PER * N)
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) {
                uvec word = read<uvec>(block + (P::HEAD + i) * N + v * W);
#pragma GCC unroll 8
                for (int j = 0; j < P::PER; j++)
                    store(to + j * N + v * W, p.weight(word, j, scales[v]));
            }
    }
}

// Rows whose numbers are rounded, in groups of up to ROUNDED, times a panel.
template <class P>
void rounded_rows(const Levels* levels, int rows, const int32_t* x, int64_t stride,
                  const uint32_t* panel, int depth, float* to) {
    if constexpr (P::TABLE)
        if (!levels->narrow) return rounded<P, false>(P{levels}, rows, x, stride, panel, depth, to);
    rounded<P, P::NIBBLES>(P{levels}, rows, x, stride, panel, depth, to);
}

// Up to FEW rows times a panel, or one row times two that are `apart` words apart.
template <class P>
void few_rows(const Levels* levels, int rows, const void* x, int64_t stride, const uint32_t* panel,
              int64_t apart, int depth, float* to) {
    auto from = (const typename P::Element*)x;
    if (apart) few<P, 1, 2>(P{levels}, from, stride, panel, apart, depth, to);
    else few<P>(P{levels}, rows, from, stride, panel, depth, to);
}

// The weights of one column of a panel.
template <class P>
void expand_column(const Levels* levels, const uint32_t* panel, int column, int depth, float* to) {
    int lane = column % W, v = column / W;
    for (float* end = to + depth; to < end; panel += P::WORDS * N) {
        Scales scales = P::scales(panel, v);
        for (int w = 0; w < P::BLOCK / P::PER; w++)
            for (int j = 0; j < P::PER; j++)
                *to++ = P{levels}.weight(read<uvec>(panel + (P::HEAD + w) * N + v * W), j,
                                         scales)[lane];
    }
}

// What is compiled for each format. What stands below is compiled for the types of rows alone.
struct Kernels {
    int block, words;  // weights of a block, and the words of its columns
    bool nibbles;
    decltype(&few_rows<Pairs>) few;
    decltype(&::expand<Pairs>) expand;  // null where a panel's words are floats
    decltype(&expand_column<Pairs>) column;
    decltype(&rounded_rows<Panels<8, 32>>) rounded;  // null where rows of 8 bits cannot meet it

    int64_t words_of(int depth) const { return (int64_t)(depth / block) * words; }
};

template <class P>
constexpr Kernels make_kernels() {
    Kernels made{P::BLOCK, P::WORDS * N, P::NIBBLES, few_rows<P>, nullptr, expand_column<P>, nullptr};
    if constexpr (!P::PLAIN) made.expand = expand<P>;
    if constexpr (P::WHOLE) made.rounded = rounded_rows<P>;
    return made;
}

template <class P>
constexpr Kernels KERNELS = make_kernels<P>();

inline const Kernels& kernels_of(Format format) {
    switch (format) {
        default: return KERNELS<Panels<32, 1>>;
        case BFLOAT16: return KERNELS<Panels<16, 2>>;
        case BITS8: return KERNELS<Panels<8, 32>>;
        case BITS4: return KERNELS<Panels<4, 32>>;
        case BITS4_OF_16: return KERNELS<Panels<4, 16>>;
        case INTS8: return KERNELS<Panels<8, 32, INTS>>;
        case INTS8_OF_16: return KERNELS<Panels<8, 16, INTS>>;
        case INTS4: return KERNELS<Panels<4, 32, INTS>>;
        case LEVELS4: return KERNELS<Panels<4, 32, LEVELS>>;
        case LEVELS4_OF_16: return KERNELS<Panels<4, 16, LEVELS>>;
        case FLOATS4: return KERNELS<Panels<4, 32, FLOATS>>;
        case FLOATS8: return KERNELS<Panels<8, 32, E4M3>>;
    }
}

// out = x weight^T + bias; rows of `x` and `out` may have gaps between them.
template <class T, class U>
struct Product {
    const T* x;
    int64_t x_stride;
    const Weight& weight;
    U* out;
    int64_t out_stride, rows;
    int threads;
    Upcoming next;
    int panels = (weight.columns + N - 1) / N;

    void run() {
        if (rows * weight.depth * weight.columns < SMALL) threads = 1;
        if constexpr (Pairs::HERE && sizeof(T) == 2)
            if (weight.format == BFLOAT16) return by<Pairs>(KERNELS<Pairs>, weight.padded / 2);
        const Kernels& of = kernels_of(weight.format);
        if (of.rounded && weight.rounds && *weight.rounds) by_rounded(of);
        else by<Singles>(of, weight.padded);
    }

  private:
    using Singles = Panels<32, 1>;

    template <class P>
    void by(const Kernels& of, int depth) const {
        if (rows <= FEW) by_few<P>(of, depth);
        else by_many<P>(of, depth);
    }

    // Elements k to k + W of a row, with zeros behind its end.
    template <class P>
    vec elements(const T* row, int k) const {
        if constexpr (std::is_same_v<P, Pairs>) {
            int left = weight.depth - 2 * k;
            if (left >= 2 * W) return read<vec>(row + 2 * k);
            bf16 part[2 * W] = {};
            memcpy(part, row + 2 * k, left * sizeof(bf16));
            return read<vec>(part);
        } else {
            return load(row + k, weight.depth - k);
        }
    }

    void finish(const float* sums, int64_t row, int64_t column) const {
        U* to = out + row * out_stride + column;
        for (int v = 0; v < V && column + v * W < weight.columns; v++) {
            vec y = load(sums + v * W);
            if (weight.bias) y += load(weight.bias + column + v * W);
            store(to + v * W, y, weight.columns - column - v * W);
        }
    }

    template <class P>
    void by_few(const Kernels& of, int depth) const {
        using E = typename P::Element;
        static thread_local Scratch memory;
        const E* a = (const E*)x;
        int64_t stride = x_stride;
        if (sizeof(T) != sizeof(E) || weight.depth != weight.padded) {
            stride = (depth + W - 1) / W * W;
            float* copy = memory.get(rows * stride);
            for (int r = 0; r < rows; r++)
                for (int k = 0; k < depth; k += W)
                    store(copy + r * stride + k, elements<P>(x + r * x_stride, k));
            a = (const E*)copy;
        }
        // One row takes two panels at once, so that enough sums are in flight. Each thread takes
        // some ten shares, so that their sum differs little between threads.
        int64_t apart = of.words_of(depth);
        int step = rows == 1 ? 2 : 1;
        int share = std::max(step, std::min(PANELS, panels / (8 * threads)) / step * step);
        parallel((panels + share - 1) / share, threads, [&](int64_t i) {
            float sums[std::max(2, FEW) * N];
            int panel = i * share, end = std::min(panel + share, panels);
            for (; panel < end; panel += step) {
                int count = std::min(step, end - panel);
                of.few(weight.levels, rows, a, stride, weight.panels + panel * apart,
                       count == 2 ? apart : 0, depth, sums);
                for (int r = 0; r < rows; r++)
                    for (int c = 0; c < count; c++)
                        finish(sums + (r * count + c) * N, r, (panel + c) * (int64_t)N);
            }
        }, true, next);
    }

    // Rows are rounded once, then multiplied in groups of equal size, or nearly so.
    void by_rounded(const Kernels& of) const {
        static thread_local Scratch memory;
        int depth = weight.depth;
        int64_t words = depth / of.block * rounded_words(of.block), apart = of.words_of(depth);
        int32_t* a = (int32_t*)memory.get(rows * words);
        parallel_rows(rows, depth, threads, [&](int64_t r) {
            round_row(x + r * x_stride, depth, of.block, of.nibbles, a + r * words);
        });
        int64_t groups = (rows + ROUNDED - 1) / ROUNDED, blocks = (rows + TALL - 1) / TALL;
        int64_t share = std::clamp<int64_t>(panels * blocks / (8 * threads), 1, PANELS);
        int64_t shares = (panels + share - 1) / share;
        parallel(shares * blocks, threads, [&](int64_t i) {
            float sums[ROUNDED * N];
            int64_t first = i % blocks * groups / blocks, last = (i % blocks + 1) * groups / blocks;
            int64_t panel = i / blocks * share, end = std::min<int64_t>(panel + share, panels);
            for (; panel < end; panel++)
                for (int64_t g = first; g < last; g++) {
                    int64_t from = g * rows / groups, n = (g + 1) * rows / groups - from;
                    of.rounded(weight.levels, n, a + from * words, words,
                               weight.panels + panel * apart, depth, sums);
                    for (int64_t r = 0; r < n; r++) finish(sums + r * N, from + r, panel * N);
                }
        }, blocks == 1, next);
    }

    // Rows are cut into groups of equal size, or nearly so, of at most MOST rows, copied as
    // [depth][rows of the group].
    template <class P>
    void by_many(const Kernels& of, int depth) const {
        using E = typename P::Element;
        static thread_local Scratch copies, room;
        int64_t groups = (rows + MOST - 1) / MOST, blocks = (rows + TALL - 1) / TALL;
        auto start = [&](int64_t group) { return group * rows / groups; };
        E* a = (E*)copies.get(rows * depth);
        parallel_rows(groups, MOST * depth, threads, [&](int64_t g) {
            int64_t from = start(g), n = start(g + 1) - from;
            for (int r = 0; r < n; r += W) {
                float* to = (float*)a + from * depth + r;
                for (int k = 0; k < depth; k += W) {
                    vec v[W];
                    for (int i = 0; i < W; i++)
                        v[i] = r + i < n ? elements<P>(x + (from + r + i) * x_stride, k) : vec{};
                    transpose(v);
                    // The next store overwrites a vector's excess; other groups are never touched.
                    for (int64_t i = 0, left = depth - k; i < W && left > 0; i++, left--, to += n)
                        store(to, v[i], r ? n - r : std::min<int64_t>(W, left * n));
                }
            }
        });
        int share = std::clamp<int64_t>(panels * blocks / (4 * threads), 1, PANELS);
        int64_t shares = (panels + share - 1) / share;
        parallel(shares * blocks, threads, [&](int64_t i) {
            int64_t first = i % blocks * groups / blocks, last = (i % blocks + 1) * groups / blocks;
            int64_t from = start(first), height = start(last) - from;
            int panel = i / blocks * share, end = std::min(panel + share, panels);
            float* weights = room.get(DEEP * N + share * height * N);
            float* sums = weights + DEEP * N;
            for (int k = 0; k < depth; k += DEEP)
                for (int column = panel; column < end; column++) {
                    int deep = std::min(DEEP, depth - k);
                    const uint32_t* at
                        = weight.panels + column * of.words_of(depth) + of.words_of(k);
                    const float* b = (const float*)at;
                    if (of.expand) of.expand(weight.levels, at, deep, weights), b = weights;
                    for (int64_t g = first; g < last; g++) {
                        int64_t row = start(g), n = start(g + 1) - row;
                        float* to = sums + ((column - panel) * height + row - from) * N;
                        tile<P>(n, a + row * depth + k * n, b, deep, to, k == 0);
                    }
                }
            for (int64_t r = 0; r < height; r++)
                for (int column = panel; column < end; column++)
                    finish(sums + ((column - panel) * height + r) * N, from + r,
                           column * (int64_t)N);
        });
    }
};

// What a product with this weight reads.
inline Upcoming panels_of(const Weight& weight, int threads) {
    int64_t words = kernels_of(weight.format).words_of(weight.padded);
    return {(const char*)weight.panels, (weight.columns + N - 1) / N, 4 * words, threads};
}

// Threads that have done their part prefetch what is read `next`.
template <class T, class U>
void multiply(const T* x, int64_t x_stride, const Weight& weight, U* out, int64_t out_stride,
              int64_t rows, int threads, Upcoming next = {}) {
    if (rows > 0) Product<T, U>{x, x_stride, weight, out, out_stride, rows, threads, next}.run();
}

// Unpacks rows `ids` of a weight: of an embedding, or of an output layer tied to it.
template <class T>
void rows_of(const Weight& weight, const int64_t* ids, int64_t count, T* out, int threads) {
    const Kernels& of = kernels_of(weight.format);
    parallel_rows(count, weight.depth * 8, threads, [&](int64_t i) {
        static thread_local Scratch memory;
        float* row = memory.get(weight.padded + W);
        const uint32_t* panel = weight.panels + ids[i] / N * of.words_of(weight.padded);
        of.column(weight.levels, panel, ids[i] % N, weight.padded, row);
        for (int d = 0; d < weight.depth; d += W)
            store(out + i * weight.depth + d, load(row + d), weight.depth - d);
    });
}

// ---- At load: rows into panels.

// Advises the kernel to back memory with huge pages before it is written, so that it need not
// merge small pages later.
void use_huge_pages(void* memory, int64_t bytes) {
#if defined(MADV_HUGEPAGE)
    constexpr uintptr_t HUGE = 2 << 20;
    uintptr_t first = ((uintptr_t)memory + HUGE - 1) / HUGE * HUGE;
    uintptr_t last = ((uintptr_t)memory + bytes) / HUGE * HUGE;
    if (first < last) madvise((void*)first, last - first, MADV_HUGEPAGE);
#endif
}

// Packs rows into panels; `words_of(row, to)` writes a row's words, which become a column.
template <class F>
void pack(int64_t rows, int64_t words, uint32_t* panels, int threads, const F& words_of) {
    use_huge_pages(panels, (rows + N - 1) / N * N * words * 4);
    parallel((rows + N - 1) / N, threads, [&](int64_t p) {
        std::vector<uint32_t> taken(N * words);
        for (int64_t r = 0; r < N && p * N + r < rows; r++)
            words_of(p * N + r, taken.data() + r * words);
        uint32_t* to = panels + p * N * words;
        for (int64_t i = 0; i < words; i++)
            for (int r = 0; r < N; r++) to[i * N + r] = taken[r * words + i];
    });
}

// Packs rows of `depth` elements of `size` bytes each, `stride` bytes apart.
void pack_elements(const uint8_t* data, int64_t stride, int size, int64_t rows, int64_t depth,
                   uint32_t* panels, int threads) {
    int64_t words = (depth * size + 3) / 4;
    pack(rows, words, panels, threads, [&](int64_t row, uint32_t* to) {
        memcpy(to, data + row * stride, depth * size);
    });
}

// Writes blocks of numbers, each behind its scale and its minimum, if they have any; returns the end.
inline uint32_t* write_blocks(const uint8_t* number, const float* scales, const float* minimums,
                              int bits, int block, int64_t count, uint32_t* to) {
    for (int64_t b = 0; b < count; b++) {
        memcpy(to++, scales + b, 4);
        if (minimums) memcpy(to++, minimums + b, 4);
        for (int i = 0; i < block * bits / 32; i++) {
            uint32_t word = 0;
            for (int j = 0; j < 32; j += bits) word |= (uint32_t)*number++ << j;
            *to++ = word;
        }
    }
    return to;
}

// Packs numbers [rows][depth], with scales and minimums (null for none) [rows][depth / block].
void pack_blocks(const uint8_t* numbers, const float* scales, const float* minimums, int bits,
                 int block, int64_t rows, int64_t depth, uint32_t* panels, int threads) {
    int64_t blocks = depth / block, words = blocks * (minimums ? 2 : 1) + depth * bits / 32;
    pack(rows, words, panels, threads, [&](int64_t row, uint32_t* to) {
        const float* least = minimums ? minimums + row * blocks : nullptr;
        write_blocks(numbers + row * depth, scales + row * blocks, least, bits, block, blocks, to);
    });
}

}  // namespace
