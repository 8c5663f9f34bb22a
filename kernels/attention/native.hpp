// Causal attention over paged keys and values, for prompts and single tokens alike.
//
// A row is one query head at one position. Keys are taken in tiles of 64 absolute positions from 0 on, with a running
// maximum; so a row goes through the same operations whether it is computed alone or in a prompt, in whatever chunk.
#pragma once

#include "kernels/kv_write/native.hpp"
#include "kernels/native/simd.hpp"

namespace headrace {

constexpr int TILE_BLOCKS = 4;  // 64 positions
constexpr int64_t TILE_TOKENS = TILE_BLOCKS * BLOCK_TOKENS;
constexpr int MOST_ROWS = 12;  // in one pass
constexpr int64_t MOST_DIM = 256;

// Buffers of one thread.
struct AttentionScratch {
    alignas(64) int32_t query[MOST_ROWS * MOST_DIM / 2];  // [row][dim / 2] pairs of bfloat16
    alignas(64) float scores[MOST_ROWS * TILE_TOKENS];
    alignas(64) int32_t weights[MOST_ROWS * TILE_TOKENS / 2];  // [row][32] pairs of bfloat16
    alignas(64) float out[MOST_ROWS * MOST_DIM];
    float most[MOST_ROWS], total[MOST_ROWS], fade[MOST_ROWS];
};

// Scores of ROWS rows with the 16 keys of a block.
template <int ROWS>
HEADRACE_INLINE void score_block(const uint16_t* keys, int64_t pairs, const int32_t* query, float* scores) {
    F acc[ROWS];
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++) acc[r] = zero();
    for (int64_t i = 0; i < pairs; i++) {
        const I k = iload(keys + i * 2 * BLOCK_TOKENS);
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++) acc[r] = dot2(acc[r], k, isplat(query[r * (MOST_DIM / 2) + i]));
    }
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++) store(scores + r * TILE_TOKENS, acc[r]);
}

// Fade what is there, and add 16 elements of the tile's values, weighted.
template <int ROWS>
HEADRACE_INLINE void add_values(const uint16_t* const* values, int64_t dim, int64_t at, int64_t tokens,
                                const int32_t* weights, const float* fade, float* out) {
    F acc[ROWS];
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++) acc[r] = mul(load(out + r * MOST_DIM + at), splat(fade[r]));
    const int64_t whole = tokens / 2;
    for (int64_t p = 0; p < whole; p++) {
        const I v = iload(values[p / 8] + (p % 8 * dim + at) * 2);
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++) acc[r] = dot2(acc[r], v, isplat(weights[r * (TILE_TOKENS / 2) + p]));
    }
    if (tokens % 2) {
        // The second token of the last pair is not there yet: whatever lies in its place must not count, not even by 0.
        const I v = bit_and(iload(values[whole / 8] + (whole % 8 * dim + at) * 2), isplat(0xFFFF));
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++) acc[r] = dot2(acc[r], v, isplat(weights[r * (TILE_TOKENS / 2) + whole]));
    }
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++) store(out + r * MOST_DIM + at, acc[r]);
}

// Where a sequence's keys and values of one layer lie.
struct Pages {
    const uint16_t* pool;
    const int32_t* blocks;
    int64_t block_elements, layer_offset;  // of a block, and of this layer in it
    int64_t kv_heads, dim;

    const uint16_t* keys(int64_t block, int64_t head) const {
        return pool + blocks[block] * block_elements + layer_offset + head * BLOCK_TOKENS * dim;
    }
    const uint16_t* values(int64_t block, int64_t head) const {
        return pool + blocks[block] * block_elements + layer_offset + (kv_heads + head) * BLOCK_TOKENS * dim;
    }
};

// Ask for the keys and values of a tile's blocks. With few rows the time goes into waiting for them.
inline void expect_tile(const Pages& pages, int64_t head, int64_t block, int64_t last_block) {
    for (int64_t b = block; b < std::min(block + TILE_BLOCKS, last_block + 1); b++) {
        const uint16_t *keys = pages.keys(b, head), *values = pages.values(b, head);
        for (int64_t i = 0; i < BLOCK_TOKENS * pages.dim; i += 32) {
            __builtin_prefetch(keys + i);
            __builtin_prefetch(values + i);
        }
    }
}

template <int ROWS>
inline void attend_rows(const Pages& pages, int64_t head, const int64_t* positions, float scale, AttentionScratch& s) {
    int64_t last = 0;
    for (int r = 0; r < ROWS; r++) {
        last = std::max(last, positions[r]);
        s.most[r] = -std::numeric_limits<float>::infinity();
        s.total[r] = 0.0f;
        for (int64_t i = 0; i < pages.dim; i += LANES) store(s.out + r * MOST_DIM + i, zero());
    }
    const F low = splat(-std::numeric_limits<float>::infinity());
    for (int64_t start = 0; start <= last; start += TILE_TOKENS) {
        const int64_t tokens = std::min(TILE_TOKENS, last + 1 - start);
        const int64_t num_blocks = (tokens + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
        const uint16_t* values[TILE_BLOCKS];
        if constexpr (ROWS <= MOST_ROWS / 2) {
            if (start == 0) expect_tile(pages, head, 0, last / BLOCK_TOKENS);
            expect_tile(pages, head, start / BLOCK_TOKENS + TILE_BLOCKS, last / BLOCK_TOKENS);
        }
        for (int64_t b = 0; b < num_blocks; b++) {
            const int64_t block = start / BLOCK_TOKENS + b;
            values[b] = pages.values(block, head);
            score_block<ROWS>(pages.keys(block, head), pages.dim / 2, s.query, s.scores + b * BLOCK_TOKENS);
        }
        for (int r = 0; r < ROWS; r++) {
            float* scores = s.scores + r * TILE_TOKENS;
            const int64_t known = positions[r] + 1 - start;  // keys of this tile that the row may see
            if (known <= 0) {
                // The row ends before this tile: nothing of it changes.
                s.fade[r] = 1.0f;
                for (int64_t i = 0; i < TILE_TOKENS / 2; i += LANES) istore(s.weights + r * (TILE_TOKENS / 2) + i, izero());
                continue;
            }
            F x[TILE_BLOCKS], top = low;
            for (int b = 0; b < TILE_BLOCKS; b++) {
                const int left = static_cast<int>(std::min<int64_t>(known - b * BLOCK_TOKENS, LANES));
                x[b] = left <= 0 ? low : keep_first(mul(load(scores + b * BLOCK_TOKENS), splat(scale)), left, low);
                top = max(top, x[b]);
            }
            const float most = std::max(s.most[r], highest(top));
            s.fade[r] = s.total[r] == 0.0f ? 0.0f : std::exp(s.most[r] - most);
            F total = zero();
            int32_t* weights = s.weights + r * (TILE_TOKENS / 2);
            for (int b = 0; b < TILE_BLOCKS; b++) {
                alignas(64) float p[LANES];
                uint16_t rounded[LANES];
                store(p, exponential(sub(x[b], splat(most))));
#if defined(HEADRACE_AVX512) && defined(__AVX512BF16__)
                const __m256bh pairs = _mm512_cvtneps_pbh(load(p));
                std::memcpy(rounded, &pairs, sizeof rounded);
#else
                for (int i = 0; i < LANES; i++) rounded[i] = to_bf16(p[i]);
#endif
                std::memcpy(weights + b * BLOCK_TOKENS / 2, rounded, sizeof rounded);
                total = add(total, load(p));
            }
            s.total[r] = s.total[r] * s.fade[r] + sum(total);
            s.most[r] = most;
        }
        for (int64_t at = 0; at < pages.dim; at += LANES)
            add_values<ROWS>(values, pages.dim, at, tokens, s.weights, s.fade, s.out);
    }
}

// Attend with `count` rows of one KV head. Row i: query(i) → float32 [dim], positions[i], and out(i) ← float32 [dim].
template <typename Query, typename Out>
inline void attend(const Pages& pages, int64_t head, int count, const int64_t* positions, float scale, Query query,
                   Out out, AttentionScratch& s) {
    for (int r = 0; r < count; r++) {
        const float* q = query(r);
        int32_t* pairs = s.query + r * (MOST_DIM / 2);
        for (int64_t i = 0; i < pages.dim / 2; i++)
            pairs[i] = static_cast<int32_t>(to_bf16(q[2 * i]) | static_cast<uint32_t>(to_bf16(q[2 * i + 1])) << 16);
    }
    switch (count) {
        case 1: attend_rows<1>(pages, head, positions, scale, s); break;
        case 2: attend_rows<2>(pages, head, positions, scale, s); break;
        case 3: attend_rows<3>(pages, head, positions, scale, s); break;
        case 4: attend_rows<4>(pages, head, positions, scale, s); break;
        case 5: attend_rows<5>(pages, head, positions, scale, s); break;
        case 6: attend_rows<6>(pages, head, positions, scale, s); break;
        case 7: attend_rows<7>(pages, head, positions, scale, s); break;
        case 8: attend_rows<8>(pages, head, positions, scale, s); break;
        case 9: attend_rows<9>(pages, head, positions, scale, s); break;
        case 10: attend_rows<10>(pages, head, positions, scale, s); break;
        case 11: attend_rows<11>(pages, head, positions, scale, s); break;
        default: attend_rows<12>(pages, head, positions, scale, s); break;
    }
    for (int r = 0; r < count; r++) {
        const F scale_back = splat(1.0f / s.total[r]);
        float* to = out(r);
        for (int64_t i = 0; i < pages.dim; i += LANES) store(to + i, mul(load(s.out + r * MOST_DIM + i), scale_back));
    }
}

}  // namespace headrace
