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

// With few rows, how many vectors beside each other keep the multipliers busy: a sum waits for its last product.
template <int ROWS> constexpr int ABREAST = ROWS <= 3 ? 4 : ROWS <= 6 ? 2 : 1;

// Scores of ROWS rows with the 16 keys of each of N blocks.
template <int ROWS, int N>
HEADRACE_INLINE void score_blocks(const uint16_t* const* keys, int64_t pairs, const int32_t* query, float* scores) {
    F acc[N][ROWS];
#pragma GCC unroll 4
    for (int n = 0; n < N; n++)
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++) acc[n][r] = zero();
    for (int64_t i = 0; i < pairs; i++) {
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) {
            const I k = iload(keys[n] + i * 2 * BLOCK_TOKENS);
#pragma GCC unroll 12
            for (int r = 0; r < ROWS; r++) acc[n][r] = dot2(acc[n][r], k, isplat(query[r * (MOST_DIM / 2) + i]));
        }
    }
#pragma GCC unroll 4
    for (int n = 0; n < N; n++)
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++) store(scores + r * TILE_TOKENS + n * BLOCK_TOKENS, acc[n][r]);
}

// Fade what is there, and add 16 · N elements of the tile's values, weighted.
template <int ROWS, int N>
HEADRACE_INLINE void add_values(const uint16_t* const* values, int64_t dim, int64_t at, int64_t tokens,
                                const int32_t* weights, const float* fade, float* out) {
    F acc[N][ROWS];
#pragma GCC unroll 4
    for (int n = 0; n < N; n++)
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++) acc[n][r] = mul(load(out + r * MOST_DIM + at + n * LANES), splat(fade[r]));
    const int64_t whole = tokens / 2;
    for (int64_t p = 0; p < whole; p++) {
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) {
            const I v = iload(values[p / 8] + (p % 8 * dim + at + n * LANES) * 2);
#pragma GCC unroll 12
            for (int r = 0; r < ROWS; r++) acc[n][r] = dot2(acc[n][r], v, isplat(weights[r * (TILE_TOKENS / 2) + p]));
        }
    }
    if (tokens % 2) {
        // The second token of the last pair is not there yet: whatever lies in its place must not count, not even by 0.
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) {
            const I v = bit_and(iload(values[whole / 8] + (whole % 8 * dim + at + n * LANES) * 2), isplat(0xFFFF));
#pragma GCC unroll 12
            for (int r = 0; r < ROWS; r++)
                acc[n][r] = dot2(acc[n][r], v, isplat(weights[r * (TILE_TOKENS / 2) + whole]));
        }
    }
#pragma GCC unroll 4
    for (int n = 0; n < N; n++)
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++) store(out + r * MOST_DIM + at + n * LANES, acc[n][r]);
}

// 2^x for x <= 0, good to 2e-6; NaN stays NaN.
HEADRACE_INLINE F decay(F x) {
    x = max(splat(-150.0f), x);
    const F n = round_even(x), r = sub(x, n);
    F p = splat(1.3333558e-3f);
    p = fma(p, r, splat(9.6181291e-3f));
    p = fma(p, r, splat(5.5504109e-2f));
    p = fma(p, r, splat(2.4022651e-1f));
    p = fma(p, r, splat(6.9314718e-1f));
    p = fma(p, r, splat(1.0f));
    return mul(p, power_of_two(max(splat(-126.0f), n)));
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

// Turn a row's scores for the tile that begins at `start` into weights, and keep its maximum, sum and fade up to date.
HEADRACE_INLINE void weigh_tile(int64_t known, float scale, float* scores, int32_t* weights, float& most, F& total,
                                float& fade) {
    if (known <= 0) {
        // The row ends before this tile: nothing of it changes.
        fade = 1.0f;
        for (int64_t i = 0; i < TILE_TOKENS / 2; i += LANES) istore(weights + i, izero());
        return;
    }
    const F low = splat(-std::numeric_limits<float>::infinity());
    F x[TILE_BLOCKS], top = low;
    for (int b = 0; b < TILE_BLOCKS; b++) {
        const int left = static_cast<int>(std::min<int64_t>(known - b * BLOCK_TOKENS, LANES));
        x[b] = mul(load(scores + b * BLOCK_TOKENS), splat(scale));
        if (left < LANES) x[b] = keep_first(x[b], left, low);
        top = max(top, x[b]);
    }
    const float highest_yet = std::max(most, highest(top));
    fade = highest_yet == most ? 1.0f : std::exp2(most - highest_yet);  // 0 in the first tile
    most = highest_yet;
    total = mul(total, splat(fade));
    for (int b = 0; b < TILE_BLOCKS; b++) {
        const F p = decay(sub(x[b], splat(most)));
        total = add(total, p);
#if defined(HEADRACE_AVX512) && defined(__AVX512BF16__)
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(weights + b * BLOCK_TOKENS / 2), (__m256i)_mm512_cvtneps_pbh(p));
#else
        alignas(64) float lanes[LANES];
        uint16_t rounded[LANES];
        store(lanes, p);
        for (int i = 0; i < LANES; i++) rounded[i] = to_bf16(lanes[i]);
        std::memcpy(weights + b * BLOCK_TOKENS / 2, rounded, sizeof rounded);
#endif
    }
}

template <int ROWS>
inline void attend_rows(const Pages& pages, int64_t head, const int64_t* positions, float scale, AttentionScratch& s) {
    constexpr int N = ABREAST<ROWS>;
    F totals[ROWS];
    int64_t last = 0;
    for (int r = 0; r < ROWS; r++) {
        last = std::max(last, positions[r]);
        s.most[r] = -std::numeric_limits<float>::infinity();
        totals[r] = zero();
        for (int64_t i = 0; i < pages.dim; i += LANES) store(s.out + r * MOST_DIM + i, zero());
    }
    for (int64_t start = 0; start <= last; start += TILE_TOKENS) {
        const int64_t tokens = std::min(TILE_TOKENS, last + 1 - start);
        const int num_blocks = static_cast<int>((tokens + BLOCK_TOKENS - 1) / BLOCK_TOKENS);
        const uint16_t *keys[TILE_BLOCKS], *values[TILE_BLOCKS];
        for (int b = 0; b < num_blocks; b++) {
            keys[b] = pages.keys(start / BLOCK_TOKENS + b, head);
            values[b] = pages.values(start / BLOCK_TOKENS + b, head);
        }
        int b = 0;
        for (; b + N <= num_blocks; b += N)
            score_blocks<ROWS, N>(keys + b, pages.dim / 2, s.query, s.scores + b * BLOCK_TOKENS);
        for (; b < num_blocks; b++)
            score_blocks<ROWS, 1>(keys + b, pages.dim / 2, s.query, s.scores + b * BLOCK_TOKENS);
        for (int r = 0; r < ROWS; r++)
            weigh_tile(positions[r] + 1 - start, scale, s.scores + r * TILE_TOKENS, s.weights + r * (TILE_TOKENS / 2),
                       s.most[r], totals[r], s.fade[r]);
        int64_t at = 0;
        for (; at + N * LANES <= pages.dim; at += N * LANES)
            add_values<ROWS, N>(values, pages.dim, at, tokens, s.weights, s.fade, s.out);
        for (; at < pages.dim; at += LANES)
            add_values<ROWS, 1>(values, pages.dim, at, tokens, s.weights, s.fade, s.out);
    }
    for (int r = 0; r < ROWS; r++) s.total[r] = sum(totals[r]);
}

// Attend with `count` rows of one KV head. Row i: query(i) → float32 [dim], positions[i], and out(i) ← float32 [dim].
template <typename Query, typename Out>
inline void attend(const Pages& pages, int64_t head, int count, const int64_t* positions, float scale, Query query,
                   Out out, AttentionScratch& s) {
    scale *= 1.44269504f;  // weights are powers of two
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
