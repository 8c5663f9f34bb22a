// Matrix product with packed weights.
//
// Integer weights: value = scale · (q − zero) + offset, in groups of 32 (or 16) along the input. Activations are
// quantized per row and group to 16 bits, held as a high and a low signed byte, so that two passes of byte products give
// an exact integer sum; only the sum of groups is in floating point, in the order of the groups. A row's result is thus
// the same bits for every number of rows. A group without a value that stands out of its row may get 8 bits: its low
// bytes are zeros and their products are left out, which changes no sum.
// Float weights are widened to float32 and multiplied by float32 activations.
//
// Weights lie in tiles of 16 outputs; a tile holds its groups one after the other:
//   q4: 4 × 64 bytes; byte (j, lane, i) holds input 4j + i in its low and 4(j + 4) + i in its high nibble
//   q8: steps × 64 bytes; byte (step, lane, i) holds input 4·step + i
//   scales: 16 × float16 or float32, then offsets likewise
// Float weights: input-major, 16 lanes each.
#pragma once

#include <cmath>
#include <cstdlib>

#include "kernels/native/simd.hpp"
#include "kernels/native/threads.hpp"

namespace headrace {

enum Kind : int32_t { Q4 = 4, Q8 = 8, BF16 = 16, F16 = 17, F32 = 32 };

struct Packed {
    const uint8_t* data;
    int32_t outputs;  // a multiple of 16 (padded with zeros)
    int32_t inputs;
    int32_t kind;
    int32_t group;  // inputs per scale
    int32_t scale_bits;  // 16 or 32
    int32_t has_offset;
    int32_t zero;
    float coarse_below;  // groups of activations below so many root mean squares of their row get 8 bits; 0: none

    int64_t groups() const { return kind >= BF16 ? 1 : inputs / group; }
    int64_t group_bytes() const {
        if (kind >= BF16) return static_cast<int64_t>(inputs) * LANES * (kind == F32 ? 4 : 2);
        return LANES * (group * kind + scale_bits * (has_offset ? 2 : 1)) / 8;
    }
    int64_t tile_bytes() const { return groups() * group_bytes(); }
    int64_t tiles() const { return outputs / LANES; }
};

// --- activations -----------------------------------------------------------------------------------

// Rows stand in blocks of `width` (1, 4 or 8). Integer weights: per block and group `2 · steps` words of four bytes for
// each row (high bytes, then low ones), then scale, scale · Σq, −zero · Σq (of the weights' zero), and a word that has
// the bit of the row's place if its low bytes count. Float weights: the inputs themselves, row by row.
struct Activations {
    int32_t* words = nullptr;
    int64_t rows = 0;
    int32_t width = 1, group = 32, inputs = 0, zero = 0;
    float coarse_below = 0.0f;
    bool floats = false;

    int64_t group_words() const { return floats ? static_cast<int64_t>(inputs) * width : (group / 2 + 4) * width; }
    int64_t block_words() const { return floats ? group_words() : inputs / group * group_words(); }
    int32_t* block(int64_t index) const { return words + index * block_words(); }
    int64_t blocks() const { return (rows + width - 1) / width; }
};

inline int width_for(int64_t rows) { return rows == 1 ? 1 : rows <= 4 ? 4 : 8; }

// A bound on the words that `rows` rows of `inputs` values take, whatever the weights.
inline int64_t activation_words(int64_t rows, int64_t inputs) {
    const int64_t width = width_for(rows), blocks = (rows + width - 1) / width;
    return blocks * width * (inputs / 16 + 1) * 20;
}

inline Activations shape_for(const Packed& w, int64_t rows, int32_t* words) {
    Activations a;
    a.words = words;
    a.rows = rows;
    a.width = width_for(rows);
    a.floats = w.kind >= BF16;
    a.group = w.group;
    a.inputs = w.inputs;
    a.zero = w.zero;
    a.coarse_below = w.coarse_below;
    return a;
}

// Split 16 values into signed bytes, value = 256 · high + low, four to a word.
HEADRACE_INLINE void split_bytes(I q, int32_t* high, int32_t* low) {
#ifdef HEADRACE_AVX512
    const __m512i up = _mm512_srai_epi32(_mm512_add_epi32(q, _mm512_set1_epi32(128)), 8);
    _mm_store_si128(reinterpret_cast<__m128i*>(high), _mm512_cvtepi32_epi8(up));
    _mm_store_si128(reinterpret_cast<__m128i*>(low), _mm512_cvtepi32_epi8(q));
#else
    for (int word = 0; word < LANES / 4; word++) {
        uint32_t ups = 0, downs = 0;
        for (int i = 0; i < 4; i++) {
            const int32_t value = q[4 * word + i], up = (value + 128) >> 8;
            ups |= static_cast<uint32_t>(up & 255) << (8 * i);
            downs |= static_cast<uint32_t>((value - up * 256) & 255) << (8 * i);
        }
        high[word] = static_cast<int32_t>(ups);
        low[word] = static_cast<int32_t>(downs);
    }
#endif
}

// Quantize one row of float32 into its place.
inline void quantize_row(const float* x, const Activations& a, int64_t row) {
    int32_t* out = a.block(row / a.width) + row % a.width;
    if (a.floats) {
        for (int32_t k = 0; k < a.inputs; k++) std::memcpy(out + static_cast<int64_t>(k) * a.width, x + k, 4);
        return;
    }
    const int steps = a.group / 4, width = a.width;
    F squares = zero(), wrong = zero();  // `wrong`: 0, or NaN where a value is no number: maxima pass over those
    for (int32_t k = 0; k < a.inputs; k += LANES) {
        const F values = load(x + k);
        squares = fma(values, values, squares);
        wrong = add(wrong, sub(values, values));
    }
    const float bound = a.coarse_below * std::sqrt(sum(squares) / static_cast<float>(a.inputs));
    // A row that is not numbers must stay so: NaN in the scales reaches every output.
    const float mark = sum(wrong);
    for (int32_t at = 0; at < a.inputs; at += a.group, out += a.group_words()) {
        F top = abs(load(x + at));
        if (a.group == 32) top = max(top, abs(load(x + at + LANES)));
        const float most = highest(top);
        const bool fine = !(most < bound);
        const float levels = fine ? 32512.0f : 127.0f;
        const F inverse = splat(most > 1e-33f ? levels / most : 0.0f);  // else the quotient may be infinite
        alignas(64) int32_t high[8], low[8];
        I totals = izero();
        for (int i = 0; i < a.group; i += LANES) {
            I q = to_int(mul(load(x + at + i), inverse));
            if (mark != mark) q = izero();
            if (!fine) q = shift_left<8>(q);
            totals = iadd(totals, q);
            split_bytes(q, high + i / 4, low + i / 4);
        }
        const int32_t total = isum(totals);
        const float scale = most / 32512.0f + mark, weighted = scale * static_cast<float>(total);
        for (int step = 0; step < steps; step++) {
            out[step * width] = high[step];
            out[(steps + step) * width] = low[step];
        }
        std::memcpy(out + 2 * steps * width, &scale, 4);
        std::memcpy(out + (2 * steps + 1) * width, &weighted, 4);
        out[(2 * steps + 2) * width] = -a.zero * total;
        out[(2 * steps + 3) * width] = static_cast<int32_t>(fine) << (row % width);
    }
}

// --- products --------------------------------------------------------------------------------------

HEADRACE_INLINE float word_float(const int32_t* p) {
    float x;
    std::memcpy(&x, p, 4);
    return x;
}

template <int ROWS, bool FINE> HEADRACE_INLINE void products(I q, const int32_t* high, const int32_t* low, I* up, I* down) {
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
        up[r] = dot4(up[r], q, isplat(high[r]));
        if constexpr (FINE) down[r] = dot4(down[r], q, isplat(low[r]));
    }
}

// One group of a tile times ROWS rows: sums of the high bytes in `up`, of the low ones in `down`.
template <int BITS, int STEPS, int CHAINS, int WIDTH, int ROWS, bool FINE>
HEADRACE_INLINE void group_products(const uint8_t* tile, const int32_t* high, const int32_t* low, I (*up)[ROWS],
                                    I (*down)[ROWS]) {
    if constexpr (BITS == 4) {
        const I mask = isplat(0x0F0F0F0F);
#pragma GCC unroll 4
        for (int j = 0; j < STEPS / 2; j++) {
            const I q = iload(tile + 64 * j);
            const int k = j + STEPS / 2;
            products<ROWS, FINE>(bit_and(q, mask), high + j * WIDTH, low + j * WIDTH, up[0], down[0]);
            products<ROWS, FINE>(bit_and(shift_right<4>(q), mask), high + k * WIDTH, low + k * WIDTH, up[CHAINS - 1],
                                 down[CHAINS - 1]);
        }
    } else {
#pragma GCC unroll 8
        for (int j = 0; j < STEPS; j++) {
            const int c = j % CHAINS;
            products<ROWS, FINE>(iload(tile + 64 * j), high + j * WIDTH, low + j * WIDTH, up[c], down[c]);
        }
    }
}

// With so few of eight rows, their low bytes are multiplied row by row rather than for all.
constexpr int SPARSE = 4;

// One tile of integer weights times ROWS rows of one block.
template <int BITS, int GROUP, bool HALF_SCALE, bool OFFSET, bool ZERO, int WIDTH, int ROWS>
HEADRACE_INLINE void integer_tile(const Packed& w, const uint8_t* tile, const int32_t* words, F* result) {
    constexpr int STEPS = GROUP / 4, QUANTS = LANES * GROUP * BITS / 8, SCALES = LANES * (HALF_SCALE ? 2 : 4);
    constexpr int GROUP_BYTES = QUANTS + SCALES * (OFFSET ? 2 : 1), GROUP_WORDS = (2 * STEPS + 4) * WIDTH;
    constexpr int CHAINS = ROWS == 1 ? 2 : 1;  // a single row alone would wait for each product
    F out[ROWS];  // not `result` itself: bytes of the tile may alias it, and every sum would go through memory
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) out[r] = zero();
    const int64_t groups = w.inputs / GROUP;
    for (int64_t g = 0; g < groups; g++, tile += GROUP_BYTES, words += GROUP_WORDS) {
        const int32_t *high = words, *low = words + STEPS * WIDTH;
        const int32_t *scales = words + 2 * STEPS * WIDTH, *sums = scales + WIDTH, *totals = sums + WIDTH;
        // The same group of the next tile, which follows in memory: by the time it is needed it is here.
        for (int line = 0; line < GROUP_BYTES; line += 64) __builtin_prefetch(tile + groups * GROUP_BYTES + line);
        I up[CHAINS][ROWS], down[CHAINS][ROWS];
        uint32_t fine = 0;  // a bit for each row
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            for (int c = 0; c < CHAINS; c++) up[c][r] = down[c][r] = izero();
            if constexpr (ZERO) down[0][r] = isplat(totals[r]);
            fine |= static_cast<uint32_t>(totals[WIDTH + r]);
        }
        if (fine == 0) {
            group_products<BITS, STEPS, CHAINS, WIDTH, ROWS, false>(tile, high, low, up, down);
        } else if (ROWS == 8 && __builtin_popcount(fine) <= SPARSE) {
            group_products<BITS, STEPS, CHAINS, WIDTH, ROWS, false>(tile, high, low, up, down);
            alignas(64) I extra[ROWS];
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) extra[r] = izero();
            for (uint32_t left = fine; left; left &= left - 1) {
                const int r = __builtin_ctz(left);
                I sums[2][1] = {{izero()}, {izero()}};
                group_products<BITS, STEPS, 2, WIDTH, 1, false>(tile, low + r, low + r, sums, sums);
                extra[r] = iadd(sums[0][0], sums[1][0]);
            }
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) down[0][r] = iadd(down[0][r], extra[r]);
        } else {
            group_products<BITS, STEPS, CHAINS, WIDTH, ROWS, true>(tile, high, low, up, down);
        }
        const uint8_t* at = tile + QUANTS;
        const F scale = HALF_SCALE ? half(reinterpret_cast<const uint16_t*>(at)) : load(reinterpret_cast<const float*>(at));
        F offset = zero();
        if constexpr (OFFSET) {
            at += SCALES;
            offset = HALF_SCALE ? half(reinterpret_cast<const uint16_t*>(at)) : load(reinterpret_cast<const float*>(at));
        }
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            I total = iadd(shift_left<8>(up[0][r]), down[0][r]);
            if constexpr (CHAINS == 2) total = iadd(total, iadd(shift_left<8>(up[1][r]), down[1][r]));
            out[r] = fma(to_float(total), mul(scale, splat(word_float(scales + r))), out[r]);
            if constexpr (OFFSET) out[r] = fma(offset, splat(word_float(sums + r)), out[r]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) result[r] = out[r];
}

template <int KIND> HEADRACE_INLINE F float_weight(const uint8_t* tile, int64_t k) {
    if constexpr (KIND == F32) return load(reinterpret_cast<const float*>(tile) + k * LANES);
    const uint16_t* p = reinterpret_cast<const uint16_t*>(tile) + k * LANES;
    if constexpr (KIND == F16) return half(p);
#ifdef HEADRACE_AVX512
    return as_float(shift_left<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))));
#else
    return each<F>([&](int i) { return from_bf16(p[i]); });
#endif
}

// One tile of float weights times ROWS rows of one block: even and odd inputs are summed apart, then together.
template <int KIND, int WIDTH, int ROWS>
HEADRACE_INLINE void float_tile(const Packed& w, const uint8_t* tile, const int32_t* words, F* result) {
    F out[ROWS], odd[ROWS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) out[r] = odd[r] = zero();
    for (int64_t k = 0; k < w.inputs; k += 2) {
        const F a = float_weight<KIND>(tile, k), b = float_weight<KIND>(tile, k + 1);
        const int32_t *x = words + k * WIDTH, *y = x + WIDTH;
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            out[r] = fma(a, splat(word_float(x + r)), out[r]);
            odd[r] = fma(b, splat(word_float(y + r)), odd[r]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) result[r] = add(out[r], odd[r]);
}

template <int WIDTH, int ROWS>
inline void tile_rows(const Packed& w, const uint8_t* tile, const int32_t* words, F* out) {
    switch (w.kind) {
        case Q4:
            if (w.scale_bits == 16 && w.has_offset)
                return integer_tile<4, 32, true, true, false, WIDTH, ROWS>(w, tile, words, out);
            if (w.scale_bits == 16) return integer_tile<4, 32, true, false, true, WIDTH, ROWS>(w, tile, words, out);
            return integer_tile<4, 32, false, true, false, WIDTH, ROWS>(w, tile, words, out);
        case Q8:
            if (w.group == 16 && w.has_offset)
                return integer_tile<8, 16, false, true, false, WIDTH, ROWS>(w, tile, words, out);
            if (w.group == 16) return integer_tile<8, 16, false, false, true, WIDTH, ROWS>(w, tile, words, out);
            if (w.has_offset) return integer_tile<8, 32, false, true, false, WIDTH, ROWS>(w, tile, words, out);
            return integer_tile<8, 32, false, false, true, WIDTH, ROWS>(w, tile, words, out);
        case BF16: return float_tile<BF16, WIDTH, ROWS>(w, tile, words, out);
        case F16: return float_tile<F16, WIDTH, ROWS>(w, tile, words, out);
        default: return float_tile<F32, WIDTH, ROWS>(w, tile, words, out);
    }
}

// `rows` of the rows of a block (those past the last are not computed).
inline void tile_block(const Packed& w, const uint8_t* tile, const int32_t* words, int width, int rows, F* out) {
    if (width == 1) return tile_rows<1, 1>(w, tile, words, out);
    if (width == 4) {
        switch (rows) {
            case 1: return tile_rows<4, 1>(w, tile, words, out);
            case 2: return tile_rows<4, 2>(w, tile, words, out);
            case 3: return tile_rows<4, 3>(w, tile, words, out);
            default: return tile_rows<4, 4>(w, tile, words, out);
        }
    }
    switch (rows) {
        case 1: return tile_rows<8, 1>(w, tile, words, out);
        case 2: return tile_rows<8, 2>(w, tile, words, out);
        case 3: return tile_rows<8, 3>(w, tile, words, out);
        case 4: return tile_rows<8, 4>(w, tile, words, out);
        case 5: return tile_rows<8, 5>(w, tile, words, out);
        case 6: return tile_rows<8, 6>(w, tile, words, out);
        case 7: return tile_rows<8, 7>(w, tile, words, out);
        default: return tile_rows<8, 8>(w, tile, words, out);
    }
}

// How a product is cut into pieces for the threads: some tiles by some blocks of rows.
struct Cut {
    int64_t tiles, blocks;  // in a piece
    int64_t tile_pieces, block_pieces;
    int64_t pieces() const { return tile_pieces * block_pieces; }
};

inline Cut cut_product(const Packed& w, const Activations& a, int threads, int unit) {
    constexpr int64_t MOST_BLOCKS = 16;  // 128 rows of activations stay in the second-level cache
    Cut cut;
    const int64_t units = w.tiles() / unit;
    cut.blocks = std::min(a.blocks(), MOST_BLOCKS);
    cut.block_pieces = (a.blocks() + cut.blocks - 1) / cut.blocks;
    const int64_t wanted = threads == 1 ? 1 : std::max<int64_t>(1, 6 * threads / cut.block_pieces);
    const int64_t per_piece = std::max<int64_t>(1, (units + wanted - 1) / wanted);
    cut.tiles = per_piece * unit;
    cut.tile_pieces = (units + per_piece - 1) / per_piece;
    return cut;
}

// Compute one piece; `done(tile, row, value)` gets 16 outputs of a row, `soon(tile, row)` is called some time before.
template <typename Soon, typename Done>
inline void product_piece(const Packed& w, const Activations& a, const Cut& cut, int64_t piece, Soon soon, Done done) {
    const int64_t first_tile = piece % cut.tile_pieces * cut.tiles, first_block = piece / cut.tile_pieces * cut.blocks;
    const int64_t last_tile = std::min(first_tile + cut.tiles, w.tiles());
    const int64_t last_block = std::min(first_block + cut.blocks, a.blocks()), stride = w.tile_bytes();
    for (int64_t t = first_tile; t < last_tile; t++) {
        for (int64_t b = first_block; b < last_block; b++) {
            F out[8];
            const int rows = static_cast<int>(std::min<int64_t>(a.width, a.rows - b * a.width));
            for (int r = 0; r < rows; r++) soon(t, b * a.width + r);
            tile_block(w, w.data + t * stride, a.block(b), a.width, rows, out);
            for (int r = 0; r < rows; r++) done(t, b * a.width + r, out[r]);
        }
    }
}

// Like product_piece for weights whose tiles alternate between a gate and its partner: `done(pair, row, gate, up)`.
template <typename Soon, typename Done>
inline void paired_piece(const Packed& w, const Activations& a, const Cut& cut, int64_t piece, Soon soon, Done done) {
    const int64_t first_tile = piece % cut.tile_pieces * cut.tiles, first_block = piece / cut.tile_pieces * cut.blocks;
    const int64_t last_tile = std::min(first_tile + cut.tiles, w.tiles());
    const int64_t last_block = std::min(first_block + cut.blocks, a.blocks()), stride = w.tile_bytes();
    for (int64_t t = first_tile; t < last_tile; t += 2) {
        for (int64_t b = first_block; b < last_block; b++) {
            F gate[8], up[8];
            const int rows = static_cast<int>(std::min<int64_t>(a.width, a.rows - b * a.width));
            for (int r = 0; r < rows; r++) soon(t / 2, b * a.width + r);
            tile_block(w, w.data + t * stride, a.block(b), a.width, rows, gate);
            tile_block(w, w.data + (t + 1) * stride, a.block(b), a.width, rows, up);
            for (int r = 0; r < rows; r++) done(t / 2, b * a.width + r, gate[r], up[r]);
        }
    }
}

// One row of the weights as float32 [inputs]: what an embedding looks up.
inline void weight_row(const Packed& w, int64_t row, float* out) {
    const uint8_t* tile = w.data + row / LANES * w.tile_bytes();
    const int64_t lane = row % LANES;
    if (w.kind >= BF16) {
        for (int64_t k = 0; k < w.inputs; k++) {
            alignas(64) float lanes[LANES];
            store(lanes, w.kind == BF16 ? float_weight<BF16>(tile, k)
                                        : w.kind == F16 ? float_weight<F16>(tile, k) : float_weight<F32>(tile, k));
            out[k] = lanes[lane];
        }
        return;
    }
    const int64_t quants = LANES * w.group * w.kind / 8;
    for (int64_t g = 0; g < w.groups(); g++, tile += w.group_bytes()) {
        alignas(64) float scale[LANES], offset[LANES] = {};
        const uint8_t* at = tile + quants;
        if (w.scale_bits == 16) {
            store(scale, half(reinterpret_cast<const uint16_t*>(at)));
            if (w.has_offset) store(offset, half(reinterpret_cast<const uint16_t*>(at) + LANES));
        } else {
            store(scale, load(reinterpret_cast<const float*>(at)));
            if (w.has_offset) store(offset, load(reinterpret_cast<const float*>(at) + LANES));
        }
        for (int k = 0; k < w.group; k++) {
            const int step = k / 4, half_steps = w.group / 8;
            int q;
            if (w.kind == Q4) {
                const uint8_t byte = tile[64 * (step % half_steps) + 4 * lane + k % 4];
                q = step < half_steps ? byte & 15 : byte >> 4;
            } else {
                q = tile[64 * step + 4 * lane + k % 4];
            }
            *out++ = scale[lane] * static_cast<float>(q - w.zero) + offset[lane];
        }
    }
}

// y [rows, outputs] = x [rows, inputs] · weightᵀ, float32.
inline void linear(Team& team, const Packed& w, const float* x, int64_t rows, float* y) {
    std::vector<int32_t> words(static_cast<size_t>(activation_words(rows, w.inputs)));
    const Activations a = shape_for(w, rows, words.data());
    parallel(team, rows, [&](int64_t row) { quantize_row(x + row * w.inputs, a, row); });
    const Cut cut = cut_product(w, a, team.active(), 1);
    parallel(team, cut.pieces(), [&](int64_t piece) {
        const auto place = [&](int64_t tile, int64_t row) { return y + row * w.outputs + tile * LANES; };
        product_piece(
            w, a, cut, piece, [&](int64_t tile, int64_t row) { __builtin_prefetch(place(tile, row), 1); },
            [&](int64_t tile, int64_t row, F value) { store(place(tile, row), value); });
    });
}

}  // namespace headrace
