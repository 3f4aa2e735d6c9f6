// Lanes for the matrix kernels: L output rows side by side, float32 or int32, and integer dot products of four columns.
//
// Dot4 / Dot8: sums over one block of columns for L rows. start(negated sum of x), add(values of L rows x 4 columns,
// four columns of x), finish() -> int32. Every object has its own copy: anonymous namespace, no standard templates.
#pragma once
#include <stdint.h>
#include <string.h>

#if defined(JK_ISA_AVX512) || defined(JK_ISA_AVX2)
#include <immintrin.h>
#elif defined(JK_ISA_NEON)
#include <arm_neon.h>
#endif

#if defined(JK_ISA_AVX512) || defined(JK_ISA_AVX2) || defined(JK_ISA_NEON)
#define JK_UNROLL _Pragma("GCC unroll 8")
#endif

namespace {

inline int32_t load32(const int8_t* p) {
    int32_t v;
    memcpy(&v, p, 4);
    return v;
}

#if defined(JK_ISA_AVX512)

constexpr int L = 16;
constexpr int MANY = 12;  // products of a row of x with L outputs at a time
constexpr int WIDE = 2;   // vectors of outputs that each number of x is used for
using F = __m512;
using I = __m512i;
using B = __m512i;  // 4 columns of L rows, a byte each
inline F f_zero() { return _mm512_setzero_ps(); }
inline F f_set(float v) { return _mm512_set1_ps(v); }
inline F f_load(const float* p) { return _mm512_loadu_ps(p); }
inline void f_store(float* p, F v) { _mm512_storeu_ps(p, v); }
inline F f_add(F a, F b) { return _mm512_add_ps(a, b); }
inline F f_mul(F a, F b) { return _mm512_mul_ps(a, b); }
inline F f_fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
inline F f_of(I v) { return _mm512_cvtepi32_ps(v); }
inline F f_half(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline F f_brain(const uint16_t* p) {
    const I wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
inline B b_load(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline B b_low(B v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
inline B b_high(B v) { return _mm512_and_si512(_mm512_srli_epi16(v, 4), _mm512_set1_epi8(15)); }
template <int J>
inline I b_byte(B v) {  // byte J of each row, unsigned
    return _mm512_and_si512(_mm512_srli_epi32(v, 8 * J), _mm512_set1_epi32(255));
}

template <int SHIFT>  // zero point 2^SHIFT, or none where SHIFT < 0
struct Dot {
    I sum;
    void start(const int32_t* negated) {
        sum =
            SHIFT < 0 ? _mm512_setzero_si512() : _mm512_slli_epi32(_mm512_set1_epi32(*negated), SHIFT < 0 ? 0 : SHIFT);
    }
    void add(B w, const int8_t* x) { sum = _mm512_dpbusd_epi32(sum, w, _mm512_set1_epi32(load32(x))); }
    I finish() const { return sum; }
};
template <int SHIFT>
using Dot4 = Dot<SHIFT>;
using Dot8 = Dot<7>;

#elif defined(JK_ISA_AVX2)

constexpr int L = 8;
constexpr int MANY = 4;
constexpr int WIDE = 1;
using F = __m256;
using I = __m256i;
using B = __m256i;
inline F f_zero() { return _mm256_setzero_ps(); }
inline F f_set(float v) { return _mm256_set1_ps(v); }
inline F f_load(const float* p) { return _mm256_loadu_ps(p); }
inline void f_store(float* p, F v) { _mm256_storeu_ps(p, v); }
inline F f_add(F a, F b) { return _mm256_add_ps(a, b); }
inline F f_mul(F a, F b) { return _mm256_mul_ps(a, b); }
inline F f_fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
inline F f_of(I v) { return _mm256_cvtepi32_ps(v); }
inline F f_half(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline F f_brain(const uint16_t* p) {
    const I wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
inline B b_load(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline B b_low(B v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
inline B b_high(B v) { return _mm256_and_si256(_mm256_srli_epi16(v, 4), _mm256_set1_epi8(15)); }
template <int J>
inline I b_byte(B v) {
    return _mm256_and_si256(_mm256_srli_epi32(v, 8 * J), _mm256_set1_epi32(255));
}

// A block of 32 columns adds 16 products of at most 15 * 128 in each half of a lane: 30,720 fits in int16.
template <int SHIFT>
struct Dot4 {
    I sum;
    int32_t begin;
    void start(const int32_t* negated) {
        sum = _mm256_setzero_si256();
        begin = SHIFT < 0 ? 0 : static_cast<int32_t>(static_cast<uint32_t>(*negated) << (SHIFT < 0 ? 0 : SHIFT));
    }
    void add(B w, const int8_t* x) {
        sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(w, _mm256_set1_epi32(load32(x))));
    }
    I finish() const {
        const I wide = _mm256_madd_epi16(sum, _mm256_set1_epi16(1));
        return SHIFT < 0 ? wide : _mm256_add_epi32(wide, _mm256_set1_epi32(begin));
    }
};
// |w| <= 128 and |x| <= 127, so two products fit in int16. A static input may be -128, whose sign cannot be turned:
// two products of at most 255 * 128 do not fit, so those go through 16 bits (WideDot8).
struct Dot8 {
    I sum;
    void start(const int32_t*) { sum = _mm256_setzero_si256(); }
    void add(B w, const int8_t* x) {
        const I s = _mm256_xor_si256(w, _mm256_set1_epi8(-128));
        const I pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(s), _mm256_sign_epi8(_mm256_set1_epi32(load32(x)), s));
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
    I finish() const { return sum; }
};
#define JK_WIDE_DOT8 1
struct WideDot8 {
    I sum;
    void start(const int32_t* negated) {
        sum = _mm256_set1_epi32(static_cast<int32_t>(static_cast<uint32_t>(*negated) << 7));
    }
    void add(B w, const int8_t* x) {  // columns 0, 2 and 1, 3 of each row as pairs of 16 bits
        const I xs = _mm256_set1_epi32(load32(x));
        const I even = _mm256_srai_epi16(_mm256_slli_epi16(xs, 8), 8), odd = _mm256_srai_epi16(xs, 8);
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_and_si256(w, _mm256_set1_epi16(255)), even));
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_srli_epi16(w, 8), odd));
    }
    I finish() const { return sum; }
};

#elif defined(JK_ISA_NEON)

constexpr int L = 4;
constexpr int MANY = 4;
constexpr int WIDE = 1;
using F = float32x4_t;
using I = int32x4_t;
using B = uint8x16_t;
inline F f_zero() { return vdupq_n_f32(0); }
inline F f_set(float v) { return vdupq_n_f32(v); }
inline F f_load(const float* p) { return vld1q_f32(p); }
inline void f_store(float* p, F v) { vst1q_f32(p, v); }
inline F f_add(F a, F b) { return vaddq_f32(a, b); }
inline F f_mul(F a, F b) { return vmulq_f32(a, b); }
inline F f_fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }
inline F f_of(I v) { return vcvtq_f32_s32(v); }
inline F f_half(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
inline F f_brain(const uint16_t* p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }
inline B b_load(const uint8_t* p) { return vld1q_u8(p); }
inline B b_low(B v) { return vandq_u8(v, vdupq_n_u8(15)); }
inline B b_high(B v) { return vshrq_n_u8(v, 4); }
template <int J>
inline I b_byte(B v) {
    const uint32x4_t w = vreinterpretq_u32_u8(v);
    return vreinterpretq_s32_u32(vandq_u32(vshlq_u32(w, vdupq_n_s32(-8 * J)), vdupq_n_u32(255)));
}
template <int SHIFT>
struct Dot4 {
    I sum;
    void start(const int32_t* negated) {
        sum = SHIFT < 0 ? vdupq_n_s32(0) : vshlq_n_s32(vdupq_n_s32(*negated), SHIFT < 0 ? 0 : SHIFT);
    }
    void add(B w, const int8_t* x) {
        sum = vdotq_s32(sum, vreinterpretq_s8_u8(w), vreinterpretq_s8_s32(vdupq_n_s32(load32(x))));
    }
    I finish() const { return sum; }
};
struct Dot8 {
    I sum;
    void start(const int32_t*) { sum = vdupq_n_s32(0); }
    void add(B w, const int8_t* x) {
        const int8x16_t s = vreinterpretq_s8_u8(veorq_u8(w, vdupq_n_u8(128)));
        sum = vdotq_s32(sum, s, vreinterpretq_s8_s32(vdupq_n_s32(load32(x))));
    }
    I finish() const { return sum; }
};

#else  // any CPU: loops that the compiler may turn into what it has

#define JK_UNROLL

constexpr int L = 16;
constexpr int MANY = 2;
constexpr int WIDE = 1;
struct F {
    float v[L];
};
struct I {
    int32_t v[L];
};
struct B {
    uint8_t v[4 * L];
};
#define JK_EACH for (int i = 0; i < L; i++)
inline F f_set(float v) {
    F r;
    JK_EACH r.v[i] = v;
    return r;
}
inline F f_zero() { return f_set(0); }
inline F f_load(const float* p) {
    F r;
    memcpy(&r, p, sizeof r);
    return r;
}
inline void f_store(float* p, F v) { memcpy(p, &v, sizeof v); }
inline F f_add(F a, const F& b) {
    JK_EACH a.v[i] += b.v[i];
    return a;
}
inline F f_mul(F a, const F& b) {
    JK_EACH a.v[i] *= b.v[i];
    return a;
}
inline F f_fma(F a, const F& b, const F& c) {
    JK_EACH a.v[i] = a.v[i] * b.v[i] + c.v[i];
    return a;
}
inline F f_of(const I& a) {
    F r;
    JK_EACH r.v[i] = static_cast<float>(a.v[i]);
    return r;
}
inline F f_half(const uint16_t* p) {  // exponent moved by a multiplication, so that subnormals come out right
    F r;
    JK_EACH {
        const uint32_t magnitude = (p[i] & 0x7fffu) << 13, sign = (p[i] & 0x8000u) << 16;
        float f;
        memcpy(&f, &magnitude, 4);
        f *= 0x1p112f;
        uint32_t bits;
        memcpy(&bits, &f, 4);
        bits |= sign | ((p[i] & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0u);
        memcpy(&r.v[i], &bits, 4);
    }
    return r;
}
inline F f_brain(const uint16_t* p) {
    F r;
    JK_EACH {
        const uint32_t bits = static_cast<uint32_t>(p[i]) << 16;
        memcpy(&r.v[i], &bits, 4);
    }
    return r;
}
inline B b_load(const uint8_t* p) {
    B r;
    memcpy(&r, p, sizeof r);
    return r;
}
inline B b_low(B v) {
    for (int i = 0; i < 4 * L; i++) v.v[i] &= 15;
    return v;
}
inline B b_high(B v) {
    for (int i = 0; i < 4 * L; i++) v.v[i] >>= 4;
    return v;
}
template <int J>
inline I b_byte(const B& v) {
    I r;
    JK_EACH r.v[i] = v.v[4 * i + J];
    return r;
}
template <int SHIFT>
struct Dot {
    I sum;
    void start(const int32_t* negated) { JK_EACH sum.v[i] = SHIFT < 0 ? 0 : *negated * (1 << (SHIFT < 0 ? 0 : SHIFT)); }
    void add(const B& w, const int8_t* x) { JK_EACH for (int j = 0; j < 4; j++) sum.v[i] += w.v[4 * i + j] * x[j]; }
    I finish() const { return sum; }
};
template <int SHIFT>
using Dot4 = Dot<SHIFT>;
using Dot8 = Dot<7>;

#endif

constexpr int PARTS = 16 / L;  // vectors that make a tile

}  // namespace
