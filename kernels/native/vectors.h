// Vectors of W floats, as wide as this processor's, and functions of them.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float vec __attribute__((vector_size(4 * W)));
typedef int32_t ivec __attribute__((vector_size(4 * W)));
typedef uint32_t uvec __attribute__((vector_size(4 * W)));
typedef uint16_t hvec __attribute__((vector_size(2 * W)));

struct bf16 {
    uint16_t bits;
};

struct fp16 {
    uint16_t bits;
};

inline vec all(float x) { return x - vec{}; }

inline ivec lanes() {
    ivec v;
    for (int i = 0; i < W; i++) v[i] = i;
    return v;
}

template <class V>
inline V read(const void* p) {
    V v;
    memcpy(&v, p, sizeof v);
    return v;
}

inline vec load(const float* p) { return read<vec>(p); }

inline vec load(const bf16* p) {
    return (vec)(__builtin_convertvector(read<hvec>(p), uvec) << 16);
}

inline vec load(const fp16* p) {
#if defined(__AVX512F__)
    return (vec)_mm512_cvtph_ps(read<__m256i>(p));
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
    return (vec)_mm256_cvtph_ps(read<__m128i>(p));
#else
    ivec h = __builtin_convertvector(read<hvec>(p), ivec), rest = h & 0x7fff;
    ivec wide = (rest << 13) + (112 << 23);
    wide += (rest >= 0x7c00) & 112 << 23;  // infinite, or no number
    vec v = rest < 0x400 ? __builtin_convertvector(rest, vec) * 0x1p-24f : (vec)wide;
    return (vec)((ivec)v | (h & 0x8000) << 16);
#endif
}

inline void store(float* p, vec v) { memcpy(p, &v, sizeof v); }

inline void store(bf16* p, vec v) {  // to the nearest, ties to even
    uvec u = (uvec)v;
    u = v != v ? u | 0x400000 : u + 0x7fff + ((u >> 16) & 1);
    hvec h = __builtin_convertvector(u >> 16, hvec);
    memcpy(p, &h, sizeof h);
}

inline void store(fp16* p, vec v) {  // to the nearest, ties to even
    uvec u = (uvec)v, rest = u & 0x7fffffff;
    uvec h = ((rest + 0xfff + (rest >> 13 & 1)) >> 13) - (112 << 10);
    uvec small = (uvec)((vec)rest + 0.5f) - 0x3f000000;  // the last place of 0.5 is that of these
    h = rest < 0x38800000 ? small : h;
    h = rest >= 0x47800000 ? uvec{} + 0x7c00 : h;
    h = (rest > 0x7f800000 ? uvec{} + 0x7e00 : h) | (u >> 16 & 0x8000);
    hvec to = __builtin_convertvector(h, hvec);
    memcpy(p, &to, sizeof to);
}

inline float number(float x) { return x; }

inline float number(fp16 x) {
#if defined(__F16C__)
    return _cvtsh_ss(x.bits);
#else
    fp16 part[W] = {x};
    return load(part)[0];
#endif
}

inline float number(bf16 x) {
    uint32_t bits = (uint32_t)x.bits << 16;
    return read<float>(&bits);
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

// Keeps a value in a register: a compiler may assume that an operand in memory costs nothing.
template <class V>
inline void keep(V& v) {
#if defined(__x86_64__)
    asm("" : "+x"(v));
#elif defined(__aarch64__)
    asm("" : "+w"(v));
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

inline vec tanh(vec x) {  // small ones by their series: 1 - (1 - x) would lose their digits
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

}  // namespace
