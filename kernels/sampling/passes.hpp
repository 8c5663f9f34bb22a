// Passes over one row of logits, each in a fixed order: what they return depends on that row alone.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "kernels/native/simd.hpp"

namespace headrace::sampling {

constexpr int64_t BLOCK = 256;  // ids whose weights are summed together
constexpr float LOWEST = -std::numeric_limits<float>::infinity();

// The greatest value, or NaN if there is one.
inline float greatest(const float* x, int64_t n) {
    F best[4] = {splat(LOWEST), splat(LOWEST), splat(LOWEST), splat(LOWEST)};
    uint32_t bad = 0;
    int64_t i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES) {
        const F v[4] = {load(x + i), load(x + i + LANES), load(x + i + 2 * LANES), load(x + i + 3 * LANES)};
        for (int j = 0; j < 4; j++) best[j] = max(best[j], v[j]);
#ifdef HEADRACE_AVX512
        bad |= _mm512_cmp_ps_mask(v[0], v[1], _CMP_UNORD_Q) | _mm512_cmp_ps_mask(v[2], v[3], _CMP_UNORD_Q);
#else
        for (int j = 0; j < 4 * LANES; j++) bad |= x[i + j] != x[i + j];
#endif
    }
    float top = highest(max(max(best[0], best[1]), max(best[2], best[3])));
    for (; i < n; i++) {
        top = x[i] > top ? x[i] : top;
        bad |= x[i] != x[i];
    }
    return bad ? std::numeric_limits<float>::quiet_NaN() : top;
}

inline int64_t first_equal(const float* x, int64_t n, float value) {
    int64_t i = 0;
    for (; i + 64 <= n; i += 64) {
        int found = 0;
        for (int j = 0; j < 64; j++) found |= x[i + j] == value;
        if (found) break;
    }
    while (i < n && x[i] != value) i++;
    return i;
}

// e^x for x <= 0; what is below e^-86 is about 1e-37. Taylor's series of 2^f for |f| <= 1/2: within 2e-7.
HEADRACE_INLINE F exponential_of_negative(F x) {
    const F whole = splat(12582912.0f);  // 1.5 · 2^23: adding it leaves a whole number in the low bits
    const F y = max(mul(x, splat(1.44269504f)), splat(-124.0f));
    const F shifted = add(y, whole);
    const F f = sub(y, sub(shifted, whole));
    F p = splat(1.540353039e-04f);
    p = fma(p, f, splat(1.333355815e-03f));
    p = fma(p, f, splat(9.618129108e-03f));
    p = fma(p, f, splat(5.550410866e-02f));
    p = fma(p, f, splat(2.402265070e-01f));
    p = fma(p, f, splat(6.931471806e-01f));
    p = fma(p, f, splat(1.0f));
    return as_float(iadd(as_int(p), shift_left<23>(as_int(shifted))));
}

// Σ exp(x - top): float32 exponentials, float64 sums in sixteen lanes that are added at the end.
inline double sum_of_exponentials(const float* x, int64_t n, float top) {
    double lanes[LANES] = {};
    const F shift = splat(top);
    int64_t i = 0;
#ifdef HEADRACE_AVX512
    __m512d low = _mm512_setzero_pd(), high = _mm512_setzero_pd();
    for (; i + LANES <= n; i += LANES) {
        const F y = exponential_of_negative(sub(load(x + i), shift));
        low = _mm512_add_pd(low, _mm512_cvtps_pd(_mm512_castps512_ps256(y)));
        high = _mm512_add_pd(high, _mm512_cvtps_pd(_mm512_extractf32x8_ps(y, 1)));
    }
    _mm512_storeu_pd(lanes, low);
    _mm512_storeu_pd(lanes + 8, high);
#endif
    float y[LANES], rest[LANES];
    for (; i < n; i += LANES) {
        for (int j = 0; j < LANES; j++) rest[j] = i + j < n ? x[i + j] : LOWEST;
        store(y, exponential_of_negative(sub(load(rest), shift)));
        for (int j = 0; j < LANES; j++) lanes[j] += static_cast<double>(y[j]);
    }
    double total = 0.0;
    for (double lane : lanes) total += lane;
    return total;
}

// a · b + c, in one rounding where the machine has an instruction for it.
HEADRACE_INLINE double fused(double a, double b, double c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
    return __builtin_fma(a, b, c);
#else
    return a * b + c;
#endif
}

// e^x for x <= 0, float64; 0 below -700. Taylor's series: |r| <= ln 2 / 2, the term after the last is below 2e-16.
HEADRACE_INLINE double exponential64(double x) {
    constexpr double WHOLE = 6755399441055744.0;  // 1.5 · 2^52: adding it leaves a whole number in the low bits
    const double held = x > -700.0 ? x : -700.0;
    const double shifted = fused(held, 1.4426950408889634, WHOLE);
    const double n = shifted - WHOLE;
    double r = fused(n, -0x1.62e42feep-1, held);  // ln 2 in two parts: the first has zeros at its end
    r = fused(n, -0x1.a39ef35793c76p-33, r);
    double p = 1.0 / 479001600.0;
    p = fused(p, r, 1.0 / 39916800.0);
    p = fused(p, r, 1.0 / 3628800.0);
    p = fused(p, r, 1.0 / 362880.0);
    p = fused(p, r, 1.0 / 40320.0);
    p = fused(p, r, 1.0 / 5040.0);
    p = fused(p, r, 1.0 / 720.0);
    p = fused(p, r, 1.0 / 120.0);
    p = fused(p, r, 1.0 / 24.0);
    p = fused(p, r, 1.0 / 6.0);
    p = fused(p, r, 0.5);
    p = fused(p, r, 1.0);
    p = fused(p, r, 1.0);
    int64_t bits;
    std::memcpy(&bits, &shifted, 8);
    bits = static_cast<int64_t>(static_cast<uint64_t>(bits + 1023) << 52);  // 2^n
    double power;
    std::memcpy(&power, &bits, 8);
    return x > -700.0 ? p * power : 0.0;
}

HEADRACE_INLINE double weight(float logit, double top, double inverse, double min_p) {
    const double w = exponential64((static_cast<double>(logit) - top) * inverse);
    return w >= min_p ? w : 0.0;
}

// The weights of each block of ids, and of all.
inline double sum_weights(
    const float* x, int64_t n, double top, double inverse, double min_p, std::vector<double>& sums) {
    sums.clear();
    double total = 0.0;
    for (int64_t first = 0; first < n; first += BLOCK) {
        double lanes[LANES] = {};
        const int64_t end = std::min(first + BLOCK, n);
        int64_t i = first;
        for (; i + LANES <= end; i += LANES)
            for (int j = 0; j < LANES; j++) lanes[j] += weight(x[i + j], top, inverse, min_p);
        for (int j = 0; i < end; i++, j++) lanes[j] += weight(x[i], top, inverse, min_p);
        double block = 0.0;
        for (double lane : lanes) block += lane;
        sums.push_back(block);
        total += block;
    }
    return total;
}

// Write the ids of logits at or above a bound, in order, to the head of `ids`; returns how many.
inline int64_t collect(const float* x, int64_t n, float bound, std::vector<int32_t>& ids) {
    if (ids.size() < static_cast<size_t>(n) + LANES) ids.resize(static_cast<size_t>(n) + LANES);
    int32_t* out = ids.data();
    int64_t i = 0;
#ifdef HEADRACE_AVX512
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (; i + LANES <= n; i += LANES) {
        const __mmask16 mask = _mm512_cmp_ps_mask(load(x + i), splat(bound), _CMP_GE_OQ);
        if (!mask) continue;
        // Compressed in the register and stored whole: a compressing store is slow on some machines.
        istore(out, _mm512_maskz_compress_epi32(mask, iadd(isplat(static_cast<int32_t>(i)), lane)));
        out += __builtin_popcount(mask);
    }
#endif
    for (; i < n; i++) {
        *out = static_cast<int32_t>(i);
        out += x[i] >= bound;
    }
    return out - ids.data();
}

}  // namespace headrace::sampling
