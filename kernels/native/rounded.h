// Products of rows that are rounded to 8 bits with quantized weights.
//
// A row is rounded by itself: each 32 elements become whole numbers of 8 bits and a scale. Products
// of whole numbers are added within a block of the weight, exactly in any order; blocks in order, by
// operations that are not fused. So a row has the same bits beside any others, on every processor.

#pragma once

#include "panels.h"

namespace {

typedef int16_t svec __attribute__((vector_size(4 * W)));
typedef int8_t cvec __attribute__((vector_size(W)));

// ---- Whole numbers. A word has 4 numbers of a column, or of a row; those of a column are below 32
// (SMALL), or signed where SIGNED says so, and else 128 above these. `add` adds 4
// products to `sum`; or the sums of 2 to `half`, which 16 bits hold (2 * 128 * 127 at most, or 8 of
// SMALL), and `settle` their sums.
// ROUNDED: rows whose sums are in registers at once, with those of BESIDE vectors of columns.

// Memory is asked for AHEAD words before they are needed: twice as fast for 4 to 12 rows.
constexpr int ROUNDED = W == 16 ? 6 : W == 8 ? 3 : 4, BESIDE = 2, AHEAD = 2048;

#if defined(__AVX512BW__) && defined(__AVX512VNNI__)
constexpr bool SIGNED = false, DOT = true;
template <bool>
inline void add(ivec& sum, svec&, uvec w, ivec x) {
    sum = (ivec)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)x);
}
#elif !defined(__AVX512F__) && defined(__FMA__) && defined(__AVXVNNI__)
constexpr bool SIGNED = false, DOT = true;
template <bool>
inline void add(ivec& sum, svec&, uvec w, ivec x) {
    sum = (ivec)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)w, (__m256i)x);
}
#elif defined(__ARM_FEATURE_DOTPROD)
constexpr bool SIGNED = true, DOT = true;
template <bool>
inline void add(ivec& sum, svec&, uvec w, ivec x) {
    sum = (ivec)vdotq_s32((int32x4_t)sum, (int8x16_t)w, (int8x16_t)x);
}
#else
constexpr bool SIGNED = true, DOT = false;
template <bool SMALL>
inline void add(ivec&, svec& half, uvec w, ivec x) {
#if defined(__AVX512BW__)
    __m512i a = (__m512i)w, b = (__m512i)x;
    if (!SMALL) b = _mm512_mask_sub_epi8(b, _mm512_movepi8_mask(a), _mm512_setzero_si512(), b);
    half += (svec)_mm512_maddubs_epi16(SMALL ? a : _mm512_abs_epi8(a), b);
#elif !defined(__AVX512F__) && defined(__AVX2__) && defined(__FMA__)
    __m256i a = (__m256i)w, b = (__m256i)x;
    if (!SMALL) b = _mm256_sign_epi8(b, a), a = _mm256_abs_epi8(a);
    half += (svec)_mm256_maddubs_epi16(a, b);
#else
    svec a = (svec)w, b = (svec)x;
    half += (a << 8 >> 8) * (b << 8 >> 8) + (a >> 8) * (b >> 8);
#endif
}
#endif

// Whether there are instructions for these products, so that they take less time than floats'.
#if defined(__AVX512BW__) || !defined(__AVX512F__) && defined(__AVX2__) && defined(__FMA__)
constexpr bool ROUNDS_FAST = true;
#else
constexpr bool ROUNDS_FAST = DOT;
#endif

inline void settle(ivec& sum, svec half) {
    if constexpr (DOT) return;
#if defined(__AVX512BW__)
    sum += (ivec)_mm512_madd_epi16((__m512i)half, _mm512_set1_epi16(1));
#elif !defined(__AVX512F__) && defined(__AVX2__) && defined(__FMA__)
    sum += (ivec)_mm256_madd_epi16((__m256i)half, _mm256_set1_epi16(1));
#else
    sum += ((ivec)half << 16 >> 16) + ((ivec)half >> 16);
#endif
}

// ---- Rows: for each block of the weight BLOCK / 4 words of numbers, then the scale and the sum of
// the numbers, as floats.

inline int rounded_words(int block) { return block / 4 + 2; }

// Puts the even ones of each 8 numbers first, as the words of panels of 4 bits have them.
inline void evens_first(ivec* numbers) {
    ivec lane = lanes(), from = lane & ~7 | (lane * 2 & 7) + ((lane & 4) != 0 & 1);
    for (int i = 0; i < 32 / W; i += W < 8 ? 2 : 1) {
        vec a = (vec)numbers[i], b = (vec)numbers[i + (W < 8)];
        if (W < 8) from = lane * 2;
        numbers[i] = (ivec)shuffle(a, b, from);
        if (W < 8) numbers[i + 1] = (ivec)shuffle(a, b, from + 1);
    }
}

// Rounds a row to the nearest numbers, ties to even. A NaN or infinity makes its block's scale one.
template <class T>
void round_row(const T* from, int depth, int block, bool nibbles, int32_t* to) {
    constexpr int M = 32 / W;
    for (int k = 0; k < depth; k += 32) {
        vec x[M];
        ivec top = {};
        for (int i = 0; i < M; i++) {
            int left = depth - k - i * W;
            x[i] = left > 0 ? load(from + k + i * W, left) : vec{};
            ivec size = (ivec)x[i] & 0x7fffffff;  // a NaN is above infinity
            top = size > top ? size : top;
        }
        int32_t most = 0;
        for (int i = 0; i < W; i++) most = std::max(most, top[i]);
        float largest = read<float>(&most), factor = largest > 1e-30f ? 127 / largest : 0;
        float scale = largest / 127;
        ivec numbers[M];
        for (int i = 0; i < M; i++) {
            vec moved = x[i] * factor + 12582912.0f;  // the lowest bits are the nearest number
            numbers[i] = (ivec)moved;
            x[i] = moved - 12582912.0f;
        }
        if (nibbles) evens_first(numbers);
        int8_t bytes[32];
        for (int i = 0; i < M; i++) {
            cvec part = __builtin_convertvector(numbers[i], cvec);
            memcpy(bytes + i * W, &part, sizeof part);
        }
        for (int at = 0; at < 32 && k + at < depth; at += block, to += rounded_words(block)) {
            vec total = {};
            for (int i = at / W; i < (at + block) / W; i++) total += x[i];
            float sums = sum(total);
            memcpy(to, bytes + at, block);
            memcpy(to + block / 4, &scale, 4);
            memcpy(to + block / 4 + 1, &sums, 4);
        }
    }
}

// ---- Products.

// Sums [R][N] of R rows with a panel's C vectors of columns.
template <class P, bool SMALL, int R, int C>
void rounded(const P& p, const int32_t* x, int64_t stride, const uint32_t* panel, int depth,
             float* to) {
    constexpr bool HAS_SIGNS = P::HEAD == 1, MOVED = SMALL ? HAS_SIGNS : HAS_SIGNS != SIGNED;
    constexpr int BY = !SMALL ? 128 : P::TABLE ? 16 : 8;
    constexpr int WORDS = P::BLOCK / 4, COUNT = P::NIBBLES && DOT ? 2 : SMALL ? 4 : 1;
    vec sums[R][C] = {};
    for (int k = 0; k < depth; k += P::BLOCK, panel += P::WORDS * N, x += WORDS + 2) {
        for (int at = 0; at < P::WORDS * N; at += 16) __builtin_prefetch(panel + AHEAD + at);
        ivec found[R][C] = {};
#pragma GCC unroll 8
        for (int i = 0; i < WORDS; i += COUNT) {
            uvec w[COUNT][C];
#pragma GCC unroll 8
            for (int n = 0; n < COUNT * C; n++) {
                int c = n % C, at = i + n / C;
                uvec word = read<uvec>(panel + (P::HEAD + at / (P::NIBBLES + 1)) * N + c * W);
                if (P::NIBBLES) word = (at % 2 ? word >> 4 : word) & 0x0f0f0f0f;
                if constexpr (P::TABLE) {
                    const Levels& of = *p.levels;
                    word = look_up_bytes(MOVED ? (const void*)of.moved : of.bytes, word);
                } else if (MOVED) {
                    word ^= BY * 0x01010101u;
                }
                w[n / C][c] = word;
            }
#pragma GCC unroll 16
            for (int r = 0; r < R; r++) {
                svec half[C] = {};
#pragma GCC unroll 4
                for (int j = 0; j < COUNT; j++) {
                    ivec own = x[r * stride + i + j] - ivec{};
                    keep(own);  // for all columns
#pragma GCC unroll 8
                    for (int c = 0; c < C; c++)
                        add<SMALL>(found[r][c], half[c], w[j][c], own);
                }
#pragma GCC unroll 8
                for (int c = 0; c < C; c++) settle(found[r][c], half[c]);
            }
        }
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) {
            Scales s = P::scales(panel, c);
#pragma GCC unroll 16
            for (int r = 0; r < R; r++) {
                const int32_t* of = x + r * stride + WORDS;
                float factor = read<float>(of), total = read<float>(of + 1);
                vec whole = __builtin_convertvector(found[r][c], vec);
                if (MOVED) whole += (HAS_SIGNS ? -BY : BY) * total;  // exact
                whole *= s.scale;
                if (!HAS_SIGNS) whole += all(total) * s.minimum;
                sums[r][c] += whole * factor;
            }
        }
    }
#pragma GCC unroll 32
    for (int i = 0; i < R * C; i++) store(to + i / C * N + i % C * W, sums[i / C][i % C]);
}

// The same of up to ROUNDED rows, and of all columns.
template <class P, bool SMALL, int R = ROUNDED>
void rounded(const P& p, int rows, const int32_t* x, int64_t stride, const uint32_t* panel, int depth,
             float* to) {
    if (rows == R)
        for (int v = 0; v < V; v += BESIDE)
            rounded<P, SMALL, R, BESIDE>(p, x, stride, panel + v * W, depth, to + v * W);
    else if constexpr (R > 1) rounded<P, SMALL, R - 1>(p, rows, x, stride, panel, depth, to);
}

}  // namespace
