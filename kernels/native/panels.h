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
// column, the first in its lowest bits. Quantized weights are unsigned numbers (E2M1: codes of floats
// of 4 bits, 2 of them exponent) times a scale plus a minimum, one of each per BLOCK weights:
// [depth / BLOCK][scales, minimums, BLOCK / PER words][N].

struct Scales {
    vec scale, minimum;
};

// Twice the value of each code of E2M1, plus 12.
constexpr uint8_t E2M1_NUMBERS[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

#if defined(__AVX512F__)
constexpr vec NUMBERS = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
constexpr vec FLOATS = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
#else
// Twice the value of each code below 16, plus 12.
inline vec e2m1(uvec code) {
    ivec exponent = (ivec)code >> 1 & 3, twice = ((2 | ((ivec)code & 1)) << exponent) >> 1;
    twice += (code & 7) == 0;  // a comparison that holds is -1
    return __builtin_convertvector(12 + ((code & 8) != 0 ? -twice : twice), vec);
}
#endif

template <int BITS, int BLOCK_, bool E2M1 = false>
struct Panels {
    using Element = float;  // of a row
    static constexpr int PER = 32 / BITS, BLOCK = BLOCK_, HEAD = BITS < 16 ? 2 : 0;
    static constexpr bool SMALL = BITS == 4, CODES = E2M1;  // numbers below 32; by E2M1_NUMBERS
    static constexpr int WORDS = HEAD + BLOCK / PER;  // of a column of a block
    static constexpr bool PLAIN = BITS == 32;

    static Scales scales(const uint32_t* block, int v) {
        if constexpr (!HEAD) return Scales();
        return {read<vec>(block + v * W), read<vec>(block + N + v * W)};
    }

    static vec weight(uvec word, int j, const Scales& s) {
        if constexpr (BITS == 32) return (vec)word;
        if constexpr (BITS == 16) return (vec)(j ? word & 0xffff0000 : word << 16);
        uvec number = word >> j * BITS;
#if defined(__AVX512F__)
        if constexpr (BITS == 4)  // a table of the 16 numbers, looked up by the lowest 4 bits
            return fma((vec)_mm512_permutexvar_ps((__m512i)number,
                                                  (__m512)(E2M1 ? FLOATS : NUMBERS)),
                       s.scale, s.minimum);
#endif
        if (j < PER - 1) number &= (1u << BITS % 32) - 1;
#if !defined(__AVX512F__)
        if constexpr (E2M1) return fma(e2m1(number), s.scale, s.minimum);
#endif
        return fma(__builtin_convertvector((ivec)number, vec), s.scale, s.minimum);
    }

    static vec add(vec sum, float x, vec weight) { return fma(all(x), weight, sum); }
};

// Two bfloat16 of a row times two of a column in one instruction: an element or word is a pair.
struct Pairs {
    using Element = uint32_t;
    static constexpr int PER = 1, BLOCK = 1, HEAD = 0, WORDS = 1;
    static constexpr bool PLAIN = true;

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

enum Format : int32_t { FLOAT32, BFLOAT16, BITS8, BITS8_OF_16, BITS4, BITS4_E2M1 };

// Calls f with an object of the panel type for `format`.
template <class F>
void with_panels(Format format, const F& f) {
    switch (format) {
        case FLOAT32: return f(Panels<32, 1>());
        case BFLOAT16: return f(Panels<16, 2>());
        case BITS8: return f(Panels<8, 32>());
        case BITS8_OF_16: return f(Panels<8, 16>());
        case BITS4: return f(Panels<4, 32>());
        case BITS4_E2M1: return f(Panels<4, 32, true>());
    }
}

// A packed weight [columns][depth] and its bias, as Python passes them.
struct Weight {
    const uint32_t* panels;
    const float* bias;     // filled up to whole panels; or null
    int32_t depth, padded; // to whole blocks, with zeros
    int32_t columns;
    Format format;
    const int32_t* rounds;  // whether rows are rounded to 8 bits; or null for no
};

}  // namespace
