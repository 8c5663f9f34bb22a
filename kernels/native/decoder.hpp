// One step of a decoder-only transformer: the ops of the neighbouring folders, one after the other, on a team of threads.
//
// The residual stream, queries and all sums are float32; keys and values are bfloat16. Every op treats a row by itself
// and in one order, so a row's logits are the same bits whatever else the step computes, and however it is cut.
#pragma once

#include <vector>

#include "kernels/attention/native.hpp"
#include "kernels/kv_format/native.hpp"
#include "kernels/kv_write/native.hpp"
#include "kernels/linear/native.hpp"
#include "kernels/native/share.hpp"
#include "kernels/native/threads.hpp"
#include "kernels/rms_norm/native.hpp"
#include "kernels/rope/native.hpp"
#include "kernels/silu_mul/native.hpp"

namespace headrace {

struct LayerWeights {
    const float* attn_norm;  // [hidden]
    const float* ffn_norm;  // [hidden]
    const float* qkv_bias;  // [(heads + 2 kv_heads) · dim] or null
    const float* q_norm;  // [dim] or null
    const float* k_norm;  // [dim] or null
    Packed qkv, out, gate_up, down;  // gate_up: tiles alternate
};

struct Model {
    int32_t layers, heads, kv_heads, dim, hidden, ffn, vocab, interleaved;
    float eps;
    int32_t positions;  // rows of the tables
    int32_t kv_format;  // what keys and values are rounded to
    const float* cosines;  // [positions, dim / 2]
    const float* sines;
    const float* norm;  // [hidden]
    const LayerWeights* layer;
    Packed embedding, head;
};

// Consecutive tokens of one sequence.
struct Run {
    int64_t start;  // position of the first
    int32_t tokens;
    int32_t wanted;  // logits of the last so many
    const int32_t* blocks;  // cover positions from 0 on
};

class Decoder {
  public:
    Decoder(const Model& model, int threads, int looks) : model_(model), team_(threads, looks), scratch_(threads) {
        for (auto& s : scratch_) s = std::make_unique<AttentionScratch>();
    }

    Team& team() { return team_; }
    void share(const CoreShare& cores) { cores_ = cores; }

    // Compute runs: write their keys and values, and logits [Σ wanted, vocab].
    void step(const Run* runs, int num_runs, const int32_t* ids, uint16_t* pool, float* logits) {
        place(runs, num_runs);
        if (rows_ == 0) return;
        grow();
        for (auto& p : pieces_) p.reset();
        team_.run([&](int thread) { work(thread, ids, pool, logits); });
    }

  private:
    struct Row {
        int32_t run;
        int64_t position;
    };
    struct Chunk {  // a piece of attention work: rows [first, last) of a run, in one KV head
        int32_t run, head, first, last;
    };

    const Model model_;
    Team team_;
    CoreShare cores_;
    std::vector<std::unique_ptr<AttentionScratch>> scratch_;
    const Run* runs_ = nullptr;
    std::vector<Row> row_;
    std::vector<Chunk> chunks_, last_chunks_;  // of all rows, and of those whose logits are wanted
    std::vector<int64_t> wanted_;
    int64_t rows_ = 0;
    std::vector<float> x_, qkv_, mixed_, gated_, last_, normed_;
    std::vector<int32_t> words_, private_words_;
    std::vector<Pieces> pieces_{PHASES * MOST_LAYERS + 8};

    static constexpr int PHASES = 10;
    static constexpr int MOST_LAYERS = 256;

    int64_t width() const { return static_cast<int64_t>(model_.heads + 2 * model_.kv_heads) * model_.dim; }
    int64_t inner() const { return static_cast<int64_t>(model_.heads) * model_.dim; }
    int64_t widest() const { return std::max<int64_t>({model_.hidden, model_.ffn, inner()}); }

    void place(const Run* runs, int num_runs) {
        runs_ = runs;
        row_.clear();
        chunks_.clear();
        last_chunks_.clear();
        wanted_.clear();
        for (int32_t r = 0; r < num_runs; r++) {
            const Run& run = runs[r];
            const int32_t first = static_cast<int32_t>(row_.size()), end = first + run.tokens;
            for (int32_t t = 0; t < run.tokens; t++) row_.push_back({r, run.start + t});
            for (int32_t row = end - run.wanted; row < end; row++) wanted_.push_back(row);
            cut_attention(chunks_, r, first, end);
            cut_attention(last_chunks_, r, end - run.wanted, end);
        }
        for (auto* chunks : {&chunks_, &last_chunks_}) {
            // Long contexts first: a thread that takes one last would keep the others waiting.
            std::stable_sort(chunks->begin(), chunks->end(), [&](const Chunk& a, const Chunk& b) {
                return row_[a.last - 1].position > row_[b.last - 1].position;
            });
        }
        rows_ = static_cast<int64_t>(row_.size());
    }

    void cut_attention(std::vector<Chunk>& to, int32_t run, int32_t first, int32_t end) const {
        const int tokens_at_once = std::max(1, MOST_ROWS / (model_.heads / model_.kv_heads));
        for (int32_t head = 0; head < model_.kv_heads; head++)
            for (int32_t at = first; at < end; at += tokens_at_once)
                to.push_back({run, head, at, std::min(end, at + tokens_at_once)});
    }

    void grow() {
        const auto fit = [](auto& v, int64_t n) {
            if (static_cast<int64_t>(v.size()) < n) v.resize(static_cast<size_t>(n));
        };
        const int64_t lasts = static_cast<int64_t>(wanted_.size());
        fit(x_, rows_ * model_.hidden);
        fit(qkv_, rows_ * width());
        fit(mixed_, rows_ * inner());
        fit(gated_, rows_ * model_.ffn);
        fit(last_, lasts * model_.hidden);
        fit(words_, activation_words(std::max(rows_, lasts), widest()));
        // Few rows are prepared by every thread for itself: cheaper than to meet.
        fit(private_words_, team_.threads() * private_stride());
        fit(normed_, team_.threads() * widest());
    }

    int64_t private_stride() const { return activation_words(FEW, widest()) + 64; }

    static constexpr int64_t FEW = 2;
    static constexpr int64_t LONG_STEP = 32;  // rows

    template <typename Fn> void shared(int& phase, int64_t n, Fn fn) {
        Pieces& pieces = pieces_[phase++];
        for (int64_t i = pieces.take(); i < n; i = pieces.take()) fn(i);
    }

    // Prepare `rows` of activations for a product: `fill(row, buffer)` returns the row's values.
    template <typename Fill> Activations prepare(int thread, int& phase, const Packed& w, int64_t rows, Fill fill) {
        float* buffer = normed_.data() + thread * widest();
        if (rows <= FEW || team_.active() == 1) {
            int32_t* words = team_.active() == 1 ? words_.data() : private_words_.data() + thread * private_stride();
            const Activations a = shape_for(w, rows, words);
            for (int64_t row = 0; row < rows; row++) quantize_row(fill(row, buffer), a, row);
            return a;
        }
        const Activations a = shape_for(w, rows, words_.data());
        // Rows of a block lie interleaved: one thread fills it, or two would take its cache lines from each other.
        shared(phase, a.blocks(), [&](int64_t block) {
            for (int64_t row = block * a.width; row < std::min(rows, (block + 1) * a.width); row++)
                quantize_row(fill(row, buffer), a, row);
        });
        team_.meet();
        return a;
    }

    // A product; `place(row)` is where a row's outputs go, `done(place, tile, value)` puts 16 of them there.
    template <typename Place, typename Done>
    void multiply(int& phase, const Packed& w, const Activations& a, Place place, Done done) {
        const Cut cut = cut_product(w, a, team_.active(), 1);
        shared(phase, cut.pieces(), [&](int64_t piece) {
            product_piece(
                w, a, cut, piece,
                [&](int64_t tile, int64_t row) { __builtin_prefetch(place(row) + tile * LANES, 1); },
                [&](int64_t tile, int64_t row, F value) { done(place(row) + tile * LANES, tile, value); });
        });
        team_.meet();
    }

    void work(int thread, const int32_t* ids, uint16_t* pool, float* logits) {
        const Model& m = model_;
        const int64_t hidden = m.hidden, lasts = static_cast<int64_t>(wanted_.size());
        int phase = 0;
        shared(phase, rows_, [&](int64_t row) { weight_row(m.embedding, ids[row], x_.data() + row * hidden); });
        team_.meet();
        for (int32_t l = 0; l < m.layers; l++) {
            const LayerWeights& w = m.layer[l];
            Activations a = prepare(thread, phase, w.qkv, rows_, [&](int64_t row, float* buffer) {
                rms_norm_row(x_.data() + row * hidden, w.attn_norm, hidden, m.eps, buffer);
                return buffer;
            });
            multiply(
                phase, w.qkv, a, [&](int64_t row) { return qkv_.data() + row * width(); },
                [&](float* to, int64_t tile, F value) {
                    if (w.qkv_bias) value = add(value, load(w.qkv_bias + tile * LANES));
                    store(to, value);
                });
            turn_and_write(phase, l, pool);
            // Of the last layer, the keys and values of all rows are wanted, but its output only where logits are.
            const bool last = l == m.layers - 1;
            const int64_t rows = last ? lasts : rows_;
            if (rows == 0) return;
            const auto row_at = [&](int64_t i) { return last ? wanted_[i] : i; };
            const auto residual = [&](int64_t i) { return x_.data() + row_at(i) * hidden; };
            const auto add_to = [](float* to, int64_t, F value) { store(to, add(load(to), value)); };
            attend_all(thread, phase, last ? last_chunks_ : chunks_, l, pool);
            a = prepare(thread, phase, w.out, rows, [&](int64_t i, float*) { return mixed_.data() + row_at(i) * inner(); });
            multiply(phase, w.out, a, residual, add_to);
            a = prepare(thread, phase, w.gate_up, rows, [&](int64_t i, float* buffer) {
                rms_norm_row(residual(i), w.ffn_norm, hidden, m.eps, buffer);
                return buffer;
            });
            const Cut cut = cut_product(w.gate_up, a, team_.active(), 2);
            const auto gated = [&](int64_t pair, int64_t i) { return gated_.data() + i * m.ffn + pair * LANES; };
            shared(phase, cut.pieces(), [&](int64_t piece) {
                paired_piece(
                    w.gate_up, a, cut, piece, [&](int64_t pair, int64_t i) { __builtin_prefetch(gated(pair, i), 1); },
                    [&](int64_t pair, int64_t i, F gate, F up) { store(gated(pair, i), silu_mul(gate, up)); });
            });
            team_.meet();
            a = prepare(thread, phase, w.down, rows, [&](int64_t i, float*) { return gated_.data() + i * m.ffn; });
            // A long step gives cores up when others begin theirs: a team on too few waits for its sleeping threads.
            if (thread == 0 && team_.active() > 1 && rows_ >= LONG_STEP) team_.shrink(cores_.threads());
            multiply(phase, w.down, a, residual, add_to);
            if (thread >= team_.active()) return;
        }
        const Activations a = prepare(thread, phase, m.head, lasts, [&](int64_t i, float* buffer) {
            rms_norm_row(x_.data() + wanted_[i] * hidden, m.norm, hidden, m.eps, buffer);
            return buffer;
        });
        const Cut cut = cut_product(m.head, a, team_.active(), 1);
        shared(phase, cut.pieces(), [&](int64_t piece) {
            const auto nothing = [](int64_t, int64_t) {};  // logits are written once and not read before
            product_piece(m.head, a, cut, piece, nothing, [&](int64_t tile, int64_t row, F value) {
                float* to = logits + row * m.vocab + tile * LANES;
                if ((tile + 1) * LANES <= m.vocab) {
                    store(to, value);
                } else {
                    alignas(64) float part[LANES];
                    store(part, value);
                    std::memcpy(to, part, static_cast<size_t>(m.vocab - tile * LANES) * 4);
                }
            });
        });
    }

    // Positions into queries and keys; keys and values into the pool.
    void turn_and_write(int& phase, int32_t layer, uint16_t* pool) {
        const Model& m = model_;
        const LayerWeights& w = m.layer[layer];
        const int64_t dim = m.dim;
        constexpr int64_t AT_ONCE = 2;  // both tokens of a pair share cache lines of the values
        shared(phase, (rows_ + AT_ONCE - 1) / AT_ONCE, [&](int64_t piece) {
            const int64_t last = std::min(rows_, (piece + 1) * AT_ONCE);
            for (int64_t row = piece * AT_ONCE; row < last; row++)
                expect_token(place_of(row, layer, pool), m.kv_heads, row_[row].position % BLOCK_TOKENS, dim);
            for (int64_t row = piece * AT_ONCE; row < last; row++) {
                float* line = qkv_.data() + row * width();
                const int64_t position = row_[row].position;
                const float *cosines = m.cosines + position * dim / 2, *sines = m.sines + position * dim / 2;
                for (int32_t h = 0; h < m.heads + m.kv_heads; h++) {
                    const float* norm = h < m.heads ? w.q_norm : w.k_norm;
                    if (norm) rms_norm_row(line + h * dim, norm, dim, m.eps, line + h * dim);
                    rope_head(line + h * dim, cosines, sines, dim, m.interleaved);
                }
                uint16_t* to = place_of(row, layer, pool);
                const float *keys = line + m.heads * dim, *values = keys + m.kv_heads * dim;
                // Before anybody reads them: whoever computes, recomputes or loads them attends to the same values.
                round_groups(line + m.heads * dim, 2 * m.kv_heads * dim, kv_group(dim), m.kv_format);
                for (int32_t h = 0; h < m.kv_heads; h++) {
                    write_key(to, h, position % BLOCK_TOKENS, dim, keys + h * dim);
                    write_value(to, m.kv_heads, h, position % BLOCK_TOKENS, dim, values + h * dim);
                }
            }
        });
        team_.meet();
    }

    // The layer of the block that a row is written to.
    uint16_t* place_of(int64_t row, int32_t layer, uint16_t* pool) const {
        const int32_t block = runs_[row_[row].run].blocks[row_[row].position / BLOCK_TOKENS];
        return pool + (static_cast<int64_t>(block) * model_.layers + layer) * layer_elements(model_.kv_heads, model_.dim);
    }

    void attend_all(int thread, int& phase, const std::vector<Chunk>& chunks, int32_t layer, const uint16_t* pool) {
        const Model& m = model_;
        const int64_t dim = m.dim, elements = layer_elements(m.kv_heads, dim);
        const int group = m.heads / m.kv_heads;
        const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
        AttentionScratch& scratch = *scratch_[thread];
        shared(phase, static_cast<int64_t>(chunks.size()), [&](int64_t piece) {
            const Chunk& chunk = chunks[piece];
            const Pages pages{pool, runs_[chunk.run].blocks, m.layers * elements, layer * elements, m.kv_heads, dim};
            const int count = (chunk.last - chunk.first) * group;
            for (int at = 0; at < count; at += MOST_ROWS) {
                const int rows = std::min(MOST_ROWS, count - at);
                int64_t positions[MOST_ROWS];
                for (int r = 0; r < rows; r++) positions[r] = row_[chunk.first + (at + r) / group].position;
                const auto place = [&](int r) {
                    return std::pair<int64_t, int64_t>{chunk.first + (at + r) / group, chunk.head * group + (at + r) % group};
                };
                attend(
                    pages, chunk.head, rows, positions, scale,
                    [&](int r) {
                        const auto [row, head] = place(r);
                        return qkv_.data() + row * width() + head * dim;
                    },
                    [&](int r) {
                        const auto [row, head] = place(r);
                        return mixed_.data() + row * inner() + head * dim;
                    },
                    scratch);
            }
        });
        team_.meet();
    }
};

}  // namespace headrace
