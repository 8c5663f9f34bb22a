// The compiled kernels behind a plain C interface. Sizes are checked by the callers in Python.
#include "kernels/kv_format/native.hpp"
#include "kernels/native/decoder.hpp"
#if __has_include("kernels/sampling/native.hpp")
#include "kernels/sampling/native.hpp"
#endif

using namespace headrace;

extern "C" {

// "avx512-vnni-bf16", "avx512" or "portable": part of what names the numerics of this build.
const char* hr_instruction_set() {
#if defined(HEADRACE_AVX512) && defined(__AVX512VNNI__) && defined(__AVX512BF16__)
    return "avx512-vnni-bf16";
#elif defined(HEADRACE_AVX512) && defined(__AVX512BF16__)
    return "avx512-bf16";
#elif defined(HEADRACE_AVX512)
    return "avx512";
#else
    return "portable";
#endif
}

void* hr_team_new(int threads, int looks) { return new Team(threads, looks); }
int hr_team_active(void* team) { return static_cast<Team*>(team)->active(); }
void hr_team_free(void* team) { delete static_cast<Team*>(team); }

void hr_linear(void* team, const Packed* w, const float* x, int64_t rows, float* y) {
    linear(*static_cast<Team*>(team), *w, x, rows, y);
}

void hr_weight_row(const Packed* w, int64_t row, float* out) { weight_row(*w, row, out); }

void hr_rms_norm(const float* x, const float* weight, int64_t rows, int64_t size, float eps, float* out) {
    for (int64_t row = 0; row < rows; row++) rms_norm_row(x + row * size, weight, size, eps, out + row * size);
}

// x [rows, heads, dim] in place; cosines, sines [rows, dim / 2].
void hr_rope(float* x, const float* cosines, const float* sines, int64_t rows, int64_t heads, int64_t dim, int interleaved) {
    for (int64_t row = 0; row < rows; row++)
        for (int64_t head = 0; head < heads; head++)
            rope_head(x + (row * heads + head) * dim, cosines + row * dim / 2, sines + row * dim / 2, dim, interleaved);
}

// gate, up, out [size], a multiple of 16.
void hr_silu_mul(const float* gate, const float* up, int64_t size, float* out) {
    for (int64_t i = 0; i < size; i += LANES) store(out + i, silu_mul(load(gate + i), load(up + i)));
}

// One token's keys and values [kv_heads, dim] into a layer of a block.
void hr_kv_write(uint16_t* layer, int64_t kv_heads, int64_t dim, int64_t offset, const float* keys, const float* values) {
    for (int64_t h = 0; h < kv_heads; h++) {
        write_key(layer, h, offset, dim, keys + h * dim);
        write_value(layer, kv_heads, h, offset, dim, values + h * dim);
    }
}

// Groups of neighbouring elements in place, n of them, a multiple of the group.
void hr_kv_round(float* x, int64_t n, int64_t group, int32_t format) { round_groups(x, n, group, format); }

// Blocks of a pool, one after another, into packed ones and back.
void hr_kv_pack(const KvOrder* order, int32_t format, int64_t blocks, const uint16_t* from, uint8_t* to) {
    const int64_t elements = order->elements(), packed = order->groups() + elements;
    for (int64_t b = 0; b < blocks; b++) {
        if (format == KV_INT8) pack_block<KV_INT8>(*order, from + b * elements, to + b * packed);
        if (format == KV_FP8) pack_block<KV_FP8>(*order, from + b * elements, to + b * packed);
    }
}

void hr_kv_unpack(const KvOrder* order, int32_t format, int64_t blocks, const uint8_t* from, uint16_t* to) {
    const int64_t elements = order->elements(), packed = order->groups() + elements;
    for (int64_t b = 0; b < blocks; b++) {
        if (format == KV_INT8) unpack_block<KV_INT8>(*order, from + b * packed, to + b * elements);
        if (format == KV_FP8) unpack_block<KV_FP8>(*order, from + b * packed, to + b * elements);
    }
}

// The first of these blocks that its packed one does not give back bit by bit; -1 if there is none.
int64_t hr_kv_first_unequal(const KvOrder* order, int32_t format, int64_t blocks, const uint16_t* pool,
                            const uint8_t* packed) {
    const int64_t elements = order->elements(), nbytes = order->groups() + elements;
    for (int64_t b = 0; b < blocks; b++) {
        const bool same = format == KV_INT8 ? unpacks_to<KV_INT8>(*order, packed + b * nbytes, pool + b * elements)
                                            : unpacks_to<KV_FP8>(*order, packed + b * nbytes, pool + b * elements);
        if (!same) return b;
    }
    return -1;
}

// Rows q [count, dim] of one KV head at their positions over a pool of one layer; out [count, dim].
void hr_attention(const uint16_t* pool, const int32_t* blocks, int64_t kv_heads, int64_t dim, int64_t head, int count,
                  const int64_t* positions, const float* q, float* out) {
    const auto scratch = std::make_unique<AttentionScratch>();
    const Pages pages{pool, blocks, layer_elements(kv_heads, dim), 0, kv_heads, dim};
    const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
    for (int at = 0; at < count; at += MOST_ROWS)
        attend(
            pages, head, std::min(MOST_ROWS, count - at), positions + at, scale,
            [&](int r) { return q + (at + r) * dim; }, [&](int r) { return out + (at + r) * dim; }, *scratch);
}

void* hr_decoder_new(const Model* model, int threads, int looks) { return new Decoder(*model, threads, looks); }
void hr_decoder_free(void* decoder) { delete static_cast<Decoder*>(decoder); }
void* hr_decoder_team(void* decoder) { return &static_cast<Decoder*>(decoder)->team(); }

// Long steps look into this file of engines that compute, and give cores up; see share.hpp.
void hr_decoder_share(void* decoder, const double* slots, int count, int own, int cores, double idle_after_s,
                      double dead_after_s) {
    static_cast<Decoder*>(decoder)->share({slots, count, own, cores, idle_after_s, dead_after_s});
}

// On `threads` of the decoder's threads, also for what the team does after it.
void hr_decoder_step(void* decoder, const Run* runs, int num_runs, const int32_t* ids, uint16_t* pool, float* logits,
                     int threads) {
    static_cast<Decoder*>(decoder)->team().set_active(threads);
    static_cast<Decoder*>(decoder)->step(runs, num_runs, ids, pool, logits);
}
}
