// The gate of a feed-forward layer.
#pragma once

#include "kernels/native/simd.hpp"

namespace headrace {

HEADRACE_INLINE F silu_mul(F gate, F up) {
    return mul(div(gate, add(splat(1.0f), exponential(sub(zero(), gate)))), up);
}

}  // namespace headrace
