// Vectors of float32 in the width of the instruction set that a kernel is compiled for, and exact conversions.
//
// Everything is in an anonymous namespace: each set's object has its own copy.
#ifndef JUMAR_SIMD_H
#define JUMAR_SIMD_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "jumar_cpu.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float V __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef int32_t I __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef double D __attribute__((vector_size(8 * W), aligned(8), may_alias));

inline V load(const float* p) { return *reinterpret_cast<const V*>(p); }
inline void store(float* p, V v) { *reinterpret_cast<V*>(p) = v; }
inline V splat(float x) { return x - V{}; }
inline I isplat(int32_t x) { return x - I{}; }

// a * b + c, rounded once where the set can: the same in every kernel of a set, whatever the compiler makes of it.
inline V fma(V a, V b, V c) {
#if defined(__AVX512F__)
    return (V)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
    return (V)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (V)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

inline V vmax(V a, V b) { return a > b ? a : b; }
inline V vmin(V a, V b) { return a < b ? a : b; }

// Fixed trees over the lanes.
inline float hsum(V v) {
    float x[W];
    memcpy(x, &v, sizeof x);
    for (int step = W / 2; step; step /= 2) {
        for (int i = 0; i < step; i++) x[i] += x[i + step];
    }
    return x[0];
}

inline float hmax(V v) {
    float x[W];
    memcpy(x, &v, sizeof x);
    float m = x[0];
    for (int i = 1; i < W; i++) m = x[i] > m ? x[i] : m;
    return m;
}

// The first n lanes of what stands at p, others `rest`.
inline V load_part(const float* p, int n, float rest) {
    float x[W];
    for (int i = 0; i < W; i++) x[i] = i < n ? p[i] : rest;
    return load(x);
}

inline void store_part(float* p, V v, int n) {
    float x[W];
    memcpy(x, &v, sizeof x);
    memcpy(p, x, sizeof(float) * n);
}

// exp to about 1 ulp: 2^n * polynomial on [-ln2/2, ln2/2] (Cephes' expf coefficients). 0 below -87.3, inf above 88.7.
inline V vexp(V x) {
    const V high = splat(88.72283f), low = splat(-87.33654f);
    V y = vmin(vmax(x, low), high);
    V shifted = fma(y, splat(1.44269504088896341f), splat(12582912.0f));  // 1.5 * 2^23: rounds to an integer
    V n = shifted - splat(12582912.0f);
    V r = fma(n, splat(-0.693359375f), y);
    r = fma(n, splat(2.12194440e-4f), r);
    V p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    p = fma(p, r * r, r) + splat(1.0f);
    I bits = (I)shifted - isplat(0x4B400000);  // n as an integer: 0x4B400000 is 12582912.0f
    // In two steps, so that neither 2^128 nor a subnormal power is needed.
    I half = bits >> 1;
    V scaled = p * (V)((half + 127) << 23) * (V)((bits - half + 127) << 23);
    scaled = x < low ? splat(0.0f) : scaled;
    scaled = x > high ? splat(INFINITY) : scaled;
    return x != x ? x : scaled;
}

inline V vtanh(V x) {
    // |x| < 0.625: odd polynomial (Cephes' tanhf); above: 1 - 2 / (exp(2|x|) + 1)
    V a = x < 0.0f ? -x : x;
    V z = x * x;
    V p = splat(-5.70498872745e-3f);
    p = fma(p, z, splat(2.06390887954e-2f));
    p = fma(p, z, splat(-5.37397155531e-2f));
    p = fma(p, z, splat(1.33314422036e-1f));
    p = fma(p, z, splat(-3.33332819422e-1f));
    V small = fma(p * z, x, x);
    V large = splat(1.0f) - splat(2.0f) / (vexp(a + a) + splat(1.0f));
    large = x < 0.0f ? -large : large;
    V y = a < 0.625f ? small : large;
    return x != x ? x : y;
}

// ---------------------------------------------------------------- 16-bit floats

inline uint16_t to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (x != x) return (uint16_t)((bits >> 16) | 0x40);
    return (uint16_t)((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

// gcc knows _Float16 in C++ on aarch64 only from version 13 on.
#if defined(__aarch64__)
typedef __fp16 Half;
#elif !defined(__F16C__)
typedef _Float16 Half;
#endif

inline uint16_t to_f16(float x) {
#if defined(__F16C__)
    return (uint16_t)_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
#else
    const Half h = (Half)x;
    uint16_t bits;
    memcpy(&bits, &h, 2);
    return bits;
#endif
}

typedef uint16_t H __attribute__((vector_size(2 * W), aligned(2), may_alias));
typedef int8_t B __attribute__((vector_size(W), aligned(1), may_alias));
typedef uint32_t U __attribute__((vector_size(4 * W), aligned(4), may_alias));

// What a page holds, as float32.
struct F32 {
    typedef float T;
    static V get(const float* p) { return load(p); }
};
struct BF16 {
    typedef uint16_t T;
    static V get(const uint16_t* p) { return (V)(__builtin_convertvector(*reinterpret_cast<const H*>(p), U) << 16); }
};
struct F16 {
    typedef uint16_t T;
    static V get(const uint16_t* p) {
#if defined(__AVX512F__)
        return (V)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX2__)
        return (V)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#elif defined(__aarch64__)
        return (V)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
#else
        float x[W];
        for (int i = 0; i < W; i++) {
            Half h;
            memcpy(&h, p + i, 2);
            x[i] = (float)h;
        }
        return load(x);
#endif
    }
};
struct S8 {
    typedef int8_t T;
    static V get(const int8_t* p) {
#if defined(__AVX512F__)
        return (V)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__)
        return (V)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
        float x[W];
        for (int i = 0; i < W; i++) x[i] = p[i];
        return load(x);
#endif
    }
};

// ---------------------------------------------------------------- dividing work

// Part tid of n: first and end.
inline void share(int64_t n, int threads, int tid, int64_t* first, int64_t* end) {
    *first = n * tid / threads;
    *end = n * (tid + 1) / threads;
}

}  // namespace

#endif
