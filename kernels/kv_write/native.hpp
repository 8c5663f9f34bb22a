// New keys and values into their block.
//
// A block holds 16 tokens of all layers. Per layer and KV head, in bfloat16: keys as [dim / 2][16 tokens][2], so that one
// vector holds a pair of elements of all 16; values as [8 pairs of tokens][dim][2], so that one vector holds 16 elements
// of two tokens. All keys of a layer come before its values.
#pragma once

#include "kernels/native/simd.hpp"

namespace headrace {

constexpr int64_t BLOCK_TOKENS = 16;

// Elements of one layer in a block: keys and values.
inline int64_t layer_elements(int64_t kv_heads, int64_t dim) { return 2 * BLOCK_TOKENS * kv_heads * dim; }

// Ask for the lines that a token will be written to: each lies elsewhere, and waiting for one after the other is slow.
inline void expect_token(const uint16_t* layer, int64_t kv_heads, int64_t offset, int64_t dim) {
    for (int64_t head = 0; head < kv_heads; head++) {
        const uint16_t* keys = layer + head * BLOCK_TOKENS * dim + offset * 2;
        for (int64_t i = 0; i < dim / 2; i++) __builtin_prefetch(keys + i * 2 * BLOCK_TOKENS, 1);
        const uint16_t* values = layer + (kv_heads + head) * BLOCK_TOKENS * dim + offset / 2 * dim * 2;
        for (int64_t i = 0; i < dim * 2; i += 32) __builtin_prefetch(values + i, 1);
    }
}

inline void write_key(uint16_t* layer, int64_t head, int64_t offset, int64_t dim, const float* key) {
    uint16_t* out = layer + head * BLOCK_TOKENS * dim + offset * 2;
    for (int64_t i = 0; i < dim / 2; i++) {
        out[i * 2 * BLOCK_TOKENS] = to_bf16(key[2 * i]);
        out[i * 2 * BLOCK_TOKENS + 1] = to_bf16(key[2 * i + 1]);
    }
}

inline void write_value(uint16_t* layer, int64_t kv_heads, int64_t head, int64_t offset, int64_t dim, const float* value) {
    uint16_t* out = layer + (kv_heads + head) * BLOCK_TOKENS * dim + offset / 2 * dim * 2 + offset % 2;
    for (int64_t i = 0; i < dim; i++) out[2 * i] = to_bf16(value[i]);
}

}  // namespace headrace
