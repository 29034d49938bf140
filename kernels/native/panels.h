// Panels of packed weights: their formats, and how a vector of weights is read from them.

#pragma once

#include "threads.h"
#include "vectors.h"

namespace {

// V: vectors in a row of a panel. Up to FEW rows, weights are expanded in registers; beyond that,
// MOST rows keep their sums in registers at once.
#if defined(__AVX512F__)
constexpr int V = 2, FEW = 8, MOST = 12;
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int V = 2, FEW = 4, MOST = 6;
#elif defined(__aarch64__)
constexpr int V = 4, FEW = 4, MOST = 5;
#else
constexpr int V = 2, FEW = 4, MOST = 4;
#endif
constexpr int N = W * V;           // columns of a panel
constexpr int DEEP = 4096 / N;     // depth of a block of a panel, expanded into 16 KiB of L1
constexpr int TALL = 8 * MOST;     // the most rows that use it together: a block of them stays in L2
constexpr int PANELS = 8;          // the most panels that a thread takes at once
constexpr int64_t SMALL = 1 << 17; // fewer multiplications take less time than waking a thread

// ---- Formats of a panel: 32-bit words [depth / PER][N]; a word holds PER successive weights of a
// column, the first in its lowest bits. Quantized weights have a scale for each BLOCK of them. They
// are unsigned NUMBERS times it plus a minimum, or times it alone INTS (in two's complement), the
// whole LEVELS or the FLOATS of codes of 4 bits, or floats of 8 bits (E4M3):
// [depth / BLOCK][scales, minimums if any, BLOCK / PER words][N].

enum Codes { NUMBERS, INTS, LEVELS, FLOATS, E4M3 };

struct Scales {
    vec scale, minimum;
};

// What the 16 codes of 4 bits stand for; if it is whole, as bytes, too, and as bytes that are moved up
// by 128, or by 16 if they are `narrow`: from -16 to 15.
struct Levels {
    float floats[16];
    int8_t bytes[16];
    uint8_t moved[16];
    int32_t narrow;
};

// The floats of codes, which are the lowest 4 bits of each element.
inline vec look_up(const float* floats, uvec codes) {
#if defined(__AVX512F__)
    return (vec)_mm512_permutexvar_ps((__m512i)codes, (__m512)load(floats));
#elif defined(__AVX2__) && defined(__FMA__)
    __m256 low = _mm256_permutevar8x32_ps((__m256)load(floats), (__m256i)codes);
    __m256 high = _mm256_permutevar8x32_ps((__m256)load(floats + 8), (__m256i)codes);
    return (vec)_mm256_blendv_ps(low, high, (__m256)(codes << 28));  // by the sign
#elif defined(__aarch64__)
    uvec bytes = (codes & 15) * 0x04040404 + 0x03020100;
    return (vec)vqtbl4q_u8(vld1q_u8_x4((const uint8_t*)floats), (uint8x16_t)bytes);
#else
    vec found;
    for (int i = 0; i < W; i++) found[i] = floats[codes[i] & 15];
    return found;
#endif
}

// The bytes of codes, which are the lower halves of bytes.
inline uvec look_up_bytes(const void* table, uvec codes) {
#if defined(__AVX512BW__)
    __m512i wide = _mm512_broadcast_i32x4(read<__m128i>(table));
    return (uvec)_mm512_shuffle_epi8(wide, (__m512i)codes);
#elif !defined(__AVX512F__) && defined(__AVX2__) && defined(__FMA__)
    __m256i wide = _mm256_broadcastsi128_si256(read<__m128i>(table));
    return (uvec)_mm256_shuffle_epi8(wide, (__m256i)codes);
#elif defined(__aarch64__)
    return (uvec)vqtbl1q_u8(vld1q_u8((const uint8_t*)table), (uint8x16_t)codes);
#else
    uint8_t each[4 * W];
    memcpy(each, &codes, sizeof each);
    for (uint8_t& code : each) code = ((const uint8_t*)table)[code];
    return read<uvec>(each);
#endif
}

#if defined(__AVX512F__)
constexpr float TO_15[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
constexpr float INT4[16] = {0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1};
#endif

template <int BITS, int BLOCK_, Codes CODES = NUMBERS>
struct Panels {
    using Element = float;  // of a row
    static constexpr int PER = 32 / BITS, BLOCK = BLOCK_;
    static constexpr int HEAD = BITS >= 16 ? 0 : CODES == NUMBERS ? 2 : 1;
    static constexpr bool NIBBLES = BITS == 4, TABLE = CODES == LEVELS, SIGNS = CODES == INTS;
    static constexpr int WORDS = HEAD + BLOCK / PER;  // of a column of a block
    static constexpr bool PLAIN = BITS == 32;
    static constexpr bool WHOLE = HEAD > 0 && CODES < FLOATS;  // rows of 8 bits can meet them

    const Levels* levels;  // or null

    static Scales scales(const uint32_t* block, int v) {
        if constexpr (!HEAD) return Scales();
        vec scale = read<vec>(block + v * W);
        if constexpr (CODES == E4M3) scale *= 0x1p120f;
        return {scale, HEAD == 2 ? read<vec>(block + N + v * W) : vec{}};
    }

    vec weight(uvec word, int j, const Scales& s) const {
        if constexpr (BITS == 32) return (vec)word;
        if constexpr (BITS == 16) return (vec)(j ? word & 0xffff0000 : word << 16);
        if constexpr (CODES == E4M3) {  // as it is in a float, it stands for 2^-120 of its value
            ivec code = (ivec)(word << (24 - j * 8)) >> 4 & (int32_t)0x87f00000;
            return (vec)code * s.scale;
        }
        uvec number = word >> j * BITS;
        if constexpr (CODES == FLOATS) return look_up(levels->floats, number) * s.scale;
#if defined(__AVX512F__)
        if constexpr (TABLE) return look_up(levels->floats, number) * s.scale;
        if constexpr (SIGNS && BITS == 4) return look_up(INT4, number) * s.scale;
        if constexpr (BITS == 4) return fma(look_up(TO_15, number), s.scale, s.minimum);
#endif
        if constexpr (TABLE || SIGNS) {  // levels are bytes: those of even codes, or of odd ones
            constexpr int SIZE = TABLE ? 8 : BITS;
            int at = TABLE ? j / 2 : j;
            if (TABLE) word = look_up_bytes(levels->bytes, (j % 2 ? word >> 4 : word) & 0x0f0f0f0f);
            ivec whole = (ivec)(word << (32 - (at + 1) * SIZE)) >> (32 - SIZE);
            return __builtin_convertvector(whole, vec) * s.scale;
        }
        if (j < PER - 1) number &= (1u << BITS % 32) - 1;
        return fma(__builtin_convertvector((ivec)number, vec), s.scale, s.minimum);
    }

    static vec add(vec sum, float x, vec weight) { return fma(all(x), weight, sum); }
};

// Two bfloat16 of a row times two of a column in one instruction: an element or word is a pair.
struct Pairs {
    using Element = uint32_t;
    static constexpr int PER = 1, BLOCK = 1, HEAD = 0, WORDS = 1;
    static constexpr bool PLAIN = true, NIBBLES = false, WHOLE = false;

    const Levels* levels;  // null

    static Scales scales(const uint32_t*, int) { return Scales(); }
    static vec weight(uvec word, int, const Scales&) { return (vec)word; }
#if defined(__AVX512BF16__)
    static constexpr bool HERE = true;
    static vec add(vec sum, uint32_t x, vec weight) {
        return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)(x - uvec{}), (__m512bh)weight);
    }
#else
    static constexpr bool HERE = false;
#endif
};

enum Format : int32_t {
    FLOAT32, BFLOAT16, BITS8, BITS4, BITS4_OF_16, INTS8, INTS8_OF_16, INTS4, LEVELS4, LEVELS4_OF_16,
    FLOATS4, FLOATS8
};

// A packed weight [columns][depth] and its bias, as Python passes them.
struct Weight {
    const uint32_t* panels;
    const float* bias;     // filled up to whole panels; or null
    int32_t depth, padded; // to whole blocks, with zeros
    int32_t columns;
    Format format;
    const int32_t* rounds;  // whether rows are rounded to 8 bits; or null for no
    const Levels* levels;   // of codes; or null
};

}  // namespace
