// RMS normalization of one row.
#pragma once

#include "kernels/native/simd.hpp"

namespace headrace {

// out = x / sqrt(mean(x²) + eps) · weight for `size` values, a multiple of 16.
inline void rms_norm_row(const float* x, const float* weight, int64_t size, float eps, float* out) {
    F squares = zero();
    for (int64_t i = 0; i < size; i += LANES) {
        const F v = load(x + i);
        squares = fma(v, v, squares);
    }
    const F scale = splat(1.0f / std::sqrt(sum(squares) / static_cast<float>(size) + eps));
    for (int64_t i = 0; i < size; i += LANES) store(out + i, mul(mul(load(x + i), scale), load(weight + i)));
}

}  // namespace headrace
