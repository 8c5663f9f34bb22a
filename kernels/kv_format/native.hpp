// Keys and values rounded to 8 bits with a scale per group, and blocks of them packed. `__init__.py` has the contract.
//
// A block is cut into chunks of neighbouring elements whose groups lie interleaved, the same pattern again and again:
// with G elements to a group, 16·G keys of one head (16 tokens, two elements each in turn), 2·G values (two tokens in
// turn), or, where a token's elements lie together, one group. Lane i of a pattern belongs to one group throughout, so
// a chunk is worked on in whole vectors. Plain loops over 16 lanes, for the compiler to make vectors of.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "kernels/kv_write/native.hpp"

namespace headrace {

enum KvFormat : int32_t { KV_RAW = 0, KV_INT8 = 1, KV_FP8 = 2 };

inline int64_t kv_group(int64_t dim) { return dim % 32 == 0 ? 32 : 16; }

HEADRACE_INLINE float power(int32_t exponent) {
    const uint32_t bits = static_cast<uint32_t>(exponent + 127) << 23;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}

HEADRACE_INLINE uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}

HEADRACE_INLINE float float_of(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

// Exponent of the scale of a group whose largest magnitude has this exponent field.
template <int FORMAT> HEADRACE_INLINE int32_t scale_exponent(uint32_t field) {
    return std::max(static_cast<int32_t>(field) - 127 - (FORMAT == KV_INT8 ? 6 : 8), -100);
}

// Round y (a value over its scale) to what the format holds. Adding a number so large that its last place is the wanted
// one, and taking it away, rounds to even and makes -0 into +0.
template <int FORMAT> HEADRACE_INLINE float rounded(float y) {
    if constexpr (FORMAT == KV_INT8) {
        const float big = 12582912.0f;  // 1.5 · 2^23
        return std::min(std::max((y + big) - big, -127.0f), 127.0f);
    } else {
        y = std::min(std::max(y, -448.0f), 448.0f);
        const uint32_t field = std::max(bits_of(y) & 0x7F800000u, 0x3C800000u);  // below 2^-6 the places are those of it
        const float big = float_of((field + (20u << 23)) | 0x400000u);
        return (y + big) - big;
    }
}

template <int FORMAT> HEADRACE_INLINE void round_group(float* x, int64_t group) {
    uint32_t most = 0;
    for (int64_t i = 0; i < group; i++) most = std::max(most, bits_of(x[i]) & 0x7FFFFFFFu);
    if (most >= 0x7F800000u) return;  // no number to round to: it stays to be found
    const int32_t exponent = scale_exponent<FORMAT>(most >> 23);
    const float scale = power(exponent), inverse = power(-exponent);
    for (int64_t i = 0; i < group; i++) x[i] = rounded<FORMAT>(x[i] * inverse) * scale;
}

// Round groups of neighbouring elements in place; n is a multiple of the group.
inline void round_groups(float* x, int64_t n, int64_t group, int32_t format) {
    for (int64_t at = 0; at < n; at += group) {
        if (format == KV_INT8) round_group<KV_INT8>(x + at, group);
        if (format == KV_FP8) round_group<KV_FP8>(x + at, group);
    }
}

template <int FORMAT> HEADRACE_INLINE uint8_t code_of(float y) {
    if constexpr (FORMAT == KV_INT8) {
        return static_cast<uint8_t>(static_cast<int8_t>(static_cast<int32_t>(std::min(std::max(y, -127.0f), 127.0f))));
    } else {
        const uint32_t bits = bits_of(y), size = bits & 0x7FFFFFFFu;
        const uint32_t normal = (size >> 20) - (120u << 3);
        const uint32_t small = static_cast<uint32_t>(static_cast<int32_t>(std::min(float_of(size), 1.0f) * 512.0f));
        return static_cast<uint8_t>((size >= 0x3C800000u ? normal & 0x7Fu : small) | (bits >> 24 & 0x80u));
    }
}

template <int FORMAT> HEADRACE_INLINE float value_of(uint8_t code) {
    if constexpr (FORMAT == KV_INT8) {
        return static_cast<float>(static_cast<int8_t>(code));
    } else {
        // One without an exponent is read as if it had the next one, which adds 2^-6. Masks, since a choice is no vector.
        const uint32_t size = code & 0x7Fu, none = 0u - static_cast<uint32_t>(size < 8);
        const float value = float_of((size << 20) + (120u << 23) + (none & 1u << 23)) - float_of(none & 0x3C800000u);
        return float_of(bits_of(value) | static_cast<uint32_t>(code & 0x80u) << 24);
    }
}

// How a block's elements lie: its chunks, and per chunk how many lanes make the pattern and how many groups are in it.
struct KvOrder {
    int64_t layers, kv_heads, dim;
    int32_t tokens_apart;  // 1: keys and values as in kv_write/native.hpp; 0: each token's elements together

    int64_t elements() const { return layers * layer_elements(kv_heads, dim); }
    int64_t groups() const { return elements() / kv_group(dim); }
};

// A kind of chunk: how many groups are in it, and how many vectors of 16 lanes make its pattern.
template <int GROUPS> struct Chunk {
    static constexpr int groups = GROUPS, period = GROUPS == 16 ? 2 : 1;
    int64_t size;

    static constexpr int group_of(int lane) { return GROUPS == 16 ? lane / 2 : GROUPS == 2 ? lane % 2 : 0; }
};

// Call fn(chunk, first element, first group) for each chunk of a block.
template <typename Fn> HEADRACE_INLINE void each_chunk(const KvOrder& order, Fn fn) {
    const int64_t group = kv_group(order.dim), half = layer_elements(order.kv_heads, order.dim) / 2;
    int64_t at = 0, scale = 0;
    const auto cut = [&](auto chunk) {
        for (int64_t i = 0; i < half; i += chunk.size, at += chunk.size, scale += chunk.groups) fn(chunk, at, scale);
    };
    for (int64_t layer = 0; layer < order.layers; layer++) {
        if (order.tokens_apart) {
            cut(Chunk<16>{16 * group});
            cut(Chunk<2>{2 * group});
        } else {
            cut(Chunk<1>{group});
            cut(Chunk<1>{group});
        }
    }
}

template <int FORMAT, typename C> HEADRACE_INLINE void pack_chunk(C c, const uint16_t* from, uint8_t* scales, uint8_t* codes) {
    constexpr int lanes = C::period * LANES;
    uint16_t most[lanes] = {}, top[C::groups] = {};
    for (int64_t at = 0; at < c.size; at += lanes)
        for (int i = 0; i < lanes; i++) most[i] = std::max(most[i], static_cast<uint16_t>(from[at + i] & 0x7FFF));
    for (int i = 0; i < lanes; i++) top[C::group_of(i)] = std::max(top[C::group_of(i)], most[i]);
    float by[C::groups], inverse[lanes];
    for (int g = 0; g < C::groups; g++) {
        const int32_t exponent = scale_exponent<FORMAT>(top[g] >> 7);
        scales[g] = static_cast<uint8_t>(exponent + 127);
        by[g] = power(-exponent);
    }
    for (int i = 0; i < lanes; i++) inverse[i] = by[C::group_of(i)];
    for (int64_t at = 0; at < c.size; at += lanes)
        for (int i = 0; i < lanes; i++)
            codes[at + i] = code_of<FORMAT>(float_of(static_cast<uint32_t>(from[at + i]) << 16) * inverse[i]);
}

template <int FORMAT, typename C> HEADRACE_INLINE void unpack_chunk(C c, const uint8_t* scales, const uint8_t* codes, uint16_t* to) {
    constexpr int lanes = C::period * LANES;
    float scale[lanes];
    for (int i = 0; i < lanes; i++) scale[i] = power(scales[C::group_of(i)] - 127);
    for (int64_t at = 0; at < c.size; at += lanes)
        for (int i = 0; i < lanes; i++)
            to[at + i] = static_cast<uint16_t>(bits_of(value_of<FORMAT>(codes[at + i]) * scale[i]) >> 16);
}

template <int FORMAT> void pack_block(const KvOrder& order, const uint16_t* from, uint8_t* to) {
    uint8_t *scales = to, *codes = to + order.groups();
    each_chunk(order, [&](auto c, int64_t at, int64_t scale) {
        pack_chunk<FORMAT>(c, from + at, scales + scale, codes + at);
    });
}

template <int FORMAT> void unpack_block(const KvOrder& order, const uint8_t* from, uint16_t* to) {
    const uint8_t *scales = from, *codes = from + order.groups();
    each_chunk(order, [&](auto c, int64_t at, int64_t scale) {
        unpack_chunk<FORMAT>(c, scales + scale, codes + at, to + at);
    });
}

template <int FORMAT> bool unpacks_to(const KvOrder& order, const uint8_t* from, const uint16_t* wanted) {
    const uint8_t *scales = from, *codes = from + order.groups();
    uint16_t part[16 * 32];
    bool same = true;
    each_chunk(order, [&](auto c, int64_t at, int64_t scale) {
        if (!same) return;
        unpack_chunk<FORMAT>(c, scales + scale, codes + at, part);
        same = std::memcmp(part, wanted + at, static_cast<size_t>(c.size) * 2) == 0;
    });
    return same;
}

}  // namespace headrace
