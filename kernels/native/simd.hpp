// Sixteen lanes: the few vector operations that the kernels are written in.
//
// With AVX-512 each is one instruction; elsewhere the compiler's own vector types stand in and lower to whatever the
// machine has. Sums of products have a fixed order on both, so a row's bits depend on the build, never on the batch.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define HEADRACE_AVX512 1
#include <immintrin.h>
#endif

#define HEADRACE_INLINE inline __attribute__((always_inline))

namespace headrace {

constexpr int LANES = 16;

#ifdef HEADRACE_AVX512

using F = __m512;
using I = __m512i;

HEADRACE_INLINE F zero() { return _mm512_setzero_ps(); }
HEADRACE_INLINE F splat(float x) { return _mm512_set1_ps(x); }
HEADRACE_INLINE F load(const float* p) { return _mm512_loadu_ps(p); }
HEADRACE_INLINE void store(float* p, F x) { _mm512_storeu_ps(p, x); }
HEADRACE_INLINE F add(F a, F b) { return _mm512_add_ps(a, b); }
HEADRACE_INLINE F sub(F a, F b) { return _mm512_sub_ps(a, b); }
HEADRACE_INLINE F mul(F a, F b) { return _mm512_mul_ps(a, b); }
HEADRACE_INLINE F div(F a, F b) { return _mm512_div_ps(a, b); }
HEADRACE_INLINE F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
HEADRACE_INLINE F max(F a, F b) { return _mm512_max_ps(a, b); }
HEADRACE_INLINE F min(F a, F b) { return _mm512_min_ps(a, b); }
HEADRACE_INLINE F abs(F a) { return _mm512_abs_ps(a); }
HEADRACE_INLINE F to_float(I a) { return _mm512_cvtepi32_ps(a); }
HEADRACE_INLINE I to_int(F a) { return _mm512_cvtps_epi32(a); }  // to the nearest, ties to even
HEADRACE_INLINE I izero() { return _mm512_setzero_si512(); }
HEADRACE_INLINE I isplat(int32_t x) { return _mm512_set1_epi32(x); }
HEADRACE_INLINE I iload(const void* p) { return _mm512_loadu_si512(p); }
HEADRACE_INLINE void istore(void* p, I x) { _mm512_storeu_si512(p, x); }
HEADRACE_INLINE I iadd(I a, I b) { return _mm512_add_epi32(a, b); }
HEADRACE_INLINE I isub(I a, I b) { return _mm512_sub_epi32(a, b); }
HEADRACE_INLINE I imul(I a, I b) { return _mm512_mullo_epi32(a, b); }
template <int N> HEADRACE_INLINE I shift_left(I a) { return _mm512_slli_epi32(a, N); }
template <int N> HEADRACE_INLINE I shift_right(I a) { return _mm512_srli_epi32(a, N); }
HEADRACE_INLINE I bit_and(I a, I b) { return _mm512_and_si512(a, b); }
HEADRACE_INLINE F as_float(I a) { return _mm512_castsi512_ps(a); }
HEADRACE_INLINE I as_int(F a) { return _mm512_castps_si512(a); }
HEADRACE_INLINE float sum(F a) { return _mm512_reduce_add_ps(a); }
HEADRACE_INLINE int32_t isum(I a) { return _mm512_reduce_add_epi32(a); }
HEADRACE_INLINE float highest(F a) { return _mm512_reduce_max_ps(a); }
HEADRACE_INLINE F half(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
// 2^n for whole n in [-126, 127].
HEADRACE_INLINE F power_of_two(F n) { return _mm512_scalef_ps(_mm512_set1_ps(1.0f), n); }
HEADRACE_INLINE F round_even(F a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// Keep the first n lanes, put `other` into the rest.
HEADRACE_INLINE F keep_first(F a, int n, F other) {
    const __mmask16 mask = n >= LANES ? 0xFFFF : n <= 0 ? 0 : static_cast<__mmask16>((1u << n) - 1);
    return _mm512_mask_blend_ps(mask, other, a);
}

#else

using F = float __attribute__((vector_size(64)));
using I = int32_t __attribute__((vector_size(64)));

template <typename V, typename Fn> HEADRACE_INLINE V each(Fn fn) {
    V out;
    for (int i = 0; i < LANES; i++) out[i] = fn(i);
    return out;
}
HEADRACE_INLINE F splat(float x) { return each<F>([&](int) { return x; }); }
HEADRACE_INLINE F zero() { return splat(0.0f); }
HEADRACE_INLINE F load(const float* p) { F x; std::memcpy(&x, p, 64); return x; }
HEADRACE_INLINE void store(float* p, F x) { std::memcpy(p, &x, 64); }
HEADRACE_INLINE F add(F a, F b) { return a + b; }
HEADRACE_INLINE F sub(F a, F b) { return a - b; }
HEADRACE_INLINE F mul(F a, F b) { return a * b; }
HEADRACE_INLINE F div(F a, F b) { return a / b; }
HEADRACE_INLINE F fma(F a, F b, F c) { return a * b + c; }
HEADRACE_INLINE F max(F a, F b) { return a > b ? a : b; }
HEADRACE_INLINE F min(F a, F b) { return a < b ? a : b; }
HEADRACE_INLINE F abs(F a) { return each<F>([&](int i) { return std::fabs(a[i]); }); }
HEADRACE_INLINE F to_float(I a) { return __builtin_convertvector(a, F); }
HEADRACE_INLINE I to_int(F a) { return each<I>([&](int i) { return static_cast<int32_t>(std::nearbyintf(a[i])); }); }
HEADRACE_INLINE I isplat(int32_t x) { return each<I>([&](int) { return x; }); }
HEADRACE_INLINE I izero() { return isplat(0); }
HEADRACE_INLINE I iload(const void* p) { I x; std::memcpy(&x, p, 64); return x; }
HEADRACE_INLINE void istore(void* p, I x) { std::memcpy(p, &x, 64); }
HEADRACE_INLINE I iadd(I a, I b) { return a + b; }
HEADRACE_INLINE I isub(I a, I b) { return a - b; }
HEADRACE_INLINE I imul(I a, I b) { return a * b; }
template <int N> HEADRACE_INLINE I shift_left(I a) { return a << N; }
template <int N> HEADRACE_INLINE I shift_right(I a) {
    using U = uint32_t __attribute__((vector_size(64)));
    return (I)((U)a >> N);
}
HEADRACE_INLINE I bit_and(I a, I b) { return a & b; }
HEADRACE_INLINE F as_float(I a) { return (F)a; }
HEADRACE_INLINE I as_int(F a) { return (I)a; }
HEADRACE_INLINE float sum(F a) {
    float part[8];
    for (int i = 0; i < 8; i++) part[i] = a[i] + a[i + 8];
    for (int i = 0; i < 4; i++) part[i] += part[i + 4];
    return (part[0] + part[2]) + (part[1] + part[3]);
}
HEADRACE_INLINE int32_t isum(I a) {
    int32_t total = 0;
    for (int i = 0; i < LANES; i++) total += a[i];
    return total;
}
HEADRACE_INLINE float highest(F a) {
    float best = a[0];
    for (int i = 1; i < LANES; i++) best = a[i] > best ? a[i] : best;
    return best;
}
HEADRACE_INLINE float half_to_float(uint16_t h) {
    const uint32_t sign = (h & 0x8000u) << 16, exponent = h >> 10 & 31, fraction = h & 1023;
    float value;
    if (exponent == 0) {
        value = static_cast<float>(fraction) * 0x1p-24f;
        return sign ? -value : value;
    }
    const uint32_t bits = sign | (exponent == 31 ? 0x7F800000u : (exponent + 112) << 23) | fraction << 13;
    std::memcpy(&value, &bits, 4);
    return value;
}
HEADRACE_INLINE F half(const uint16_t* p) { return each<F>([&](int i) { return half_to_float(p[i]); }); }
HEADRACE_INLINE F power_of_two(F n) { return as_float(shift_left<23>(iadd(to_int(n), isplat(127)))); }
HEADRACE_INLINE F round_even(F a) { return each<F>([&](int i) { return std::nearbyintf(a[i]); }); }
HEADRACE_INLINE F keep_first(F a, int n, F other) { return each<F>([&](int i) { return i < n ? a[i] : other[i]; }); }

#endif

// --- products of small integers, and of bfloat16 pairs ---------------------------------------------

// Lane i: acc + Σ over 4 bytes of (unsigned byte of a) · (signed byte of b). Exact.
HEADRACE_INLINE I dot4(I acc, I a, I b) {
#if defined(HEADRACE_AVX512) && defined(__AVX512VNNI__)
    return _mm512_dpbusd_epi32(acc, a, b);
#elif defined(HEADRACE_AVX512)
    // Even and odd bytes apart, in 16 bits: no product or sum of two can overflow 32.
    const I low = _mm512_set1_epi16(0x00FF);
    const I even = _mm512_madd_epi16(_mm512_and_si512(a, low), _mm512_srai_epi16(_mm512_slli_epi16(b, 8), 8));
    const I odd = _mm512_madd_epi16(_mm512_srli_epi16(a, 8), _mm512_srai_epi16(b, 8));
    return _mm512_add_epi32(acc, _mm512_add_epi32(even, odd));
#else
    I total = acc;
    total += ((a << 24 >> 24) & 255) * (b << 24 >> 24);
    total += ((a << 16 >> 24) & 255) * (b << 16 >> 24);
    total += ((a << 8 >> 24) & 255) * (b << 8 >> 24);
    total += ((a >> 24) & 255) * (b >> 24);
    return total;
#endif
}

HEADRACE_INLINE F bf16_low(I pair) { return as_float(shift_left<16>(pair)); }
HEADRACE_INLINE F bf16_high(I pair) { return as_float(bit_and(pair, isplat(static_cast<int32_t>(0xFFFF0000u)))); }

// Lane i: acc + a.low · b.low + a.high · b.high for pairs of bfloat16.
HEADRACE_INLINE F dot2(F acc, I a, I b) {
#if defined(HEADRACE_AVX512) && defined(__AVX512BF16__)
    return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b);
#else
    return fma(bf16_high(a), bf16_high(b), fma(bf16_low(a), bf16_low(b), acc));
#endif
}

// Round to bfloat16, to the nearest, ties to even; NaN stays NaN.
HEADRACE_INLINE uint16_t to_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<uint16_t>(bits >> 16 | 64);
    return static_cast<uint16_t>((bits + 0x7FFFu + (bits >> 16 & 1)) >> 16);
}

HEADRACE_INLINE float from_bf16(uint16_t x) {
    const uint32_t bits = static_cast<uint32_t>(x) << 16;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}

// --- exponential -----------------------------------------------------------------------------------

// e^x in every lane; relative error below 2e-7 for x in [-87, 88], 0 below -87, held at 88 above. NaN stays NaN.
HEADRACE_INLINE F exponential(F x) {
    const F held = min(max(x, splat(-88.0f)), splat(88.0f));
    const F n = round_even(mul(held, splat(1.44269504f)));
    F r = fma(n, splat(-0.693145752f), held);  // ln 2 in two parts: the first has zeros at its end
    r = fma(n, splat(-1.42860677e-6f), r);
    // Taylor's series: |r| <= ln 2 / 2, and the term after the last is below 4e-9.
    F p = splat(1.0f / 5040.0f);
    p = fma(p, r, splat(1.0f / 720.0f));
    p = fma(p, r, splat(1.0f / 120.0f));
    p = fma(p, r, splat(1.0f / 24.0f));
    p = fma(p, r, splat(1.0f / 6.0f));
    p = fma(p, r, splat(0.5f));
    p = fma(p, r, splat(1.0f));
    p = fma(p, r, splat(1.0f));
    const F y = mul(p, power_of_two(max(n, splat(-126.0f))));
#ifdef HEADRACE_AVX512
    const F flushed = _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, splat(-87.0f), _CMP_LT_OQ), y, zero());
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), flushed, x);
#else
    return each<F>([&](int i) { return x[i] < -87.0f ? 0.0f : x[i] != x[i] ? x[i] : y[i]; });
#endif
}

}  // namespace headrace
