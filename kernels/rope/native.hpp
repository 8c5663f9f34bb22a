// Rotary position embedding of one head.
#pragma once

#include <cstdint>

namespace headrace {

// Turn the pairs of x [dim] in place: (2i, 2i + 1) when interleaved, else (i, i + dim / 2); cosines, sines [dim / 2].
inline void rope_head(float* x, const float* cosines, const float* sines, int64_t dim, bool interleaved) {
    const int64_t pairs = dim / 2;
    if (interleaved) {
        for (int64_t i = 0; i < pairs; i++) {
            const float a = x[2 * i], b = x[2 * i + 1];
            x[2 * i] = a * cosines[i] - b * sines[i];
            x[2 * i + 1] = a * sines[i] + b * cosines[i];
        }
        return;
    }
    for (int64_t i = 0; i < pairs; i++) {
        const float a = x[i], b = x[i + pairs];
        x[i] = a * cosines[i] - b * sines[i];
        x[i + pairs] = a * sines[i] + b * cosines[i];
    }
}

}  // namespace headrace
