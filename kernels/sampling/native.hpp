// Sampling: greedy, or drawn at a given point of the filtered distribution. The contract is in kernels/sampling.
//
// A row is looked at by one thread, in a fixed order of operations: its result depends on that row alone. Exponentials
// for the log-probability are float32 (summed in float64); those of a draw are float64, so that a draw falls on another
// id than the reference's only where the point lies within rounding of a border.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "kernels/native/threads.hpp"
#include "kernels/sampling/passes.hpp"

namespace headrace::sampling {

// One draw; `kernels/sampling/native.py` writes it, eight bytes a field.
struct Draw {
    double temperature, top_p, min_p, point, presence, frequency, repetition;
    int64_t top_k, row;
    const int32_t* context;  // prompt, then outputs
    int64_t num_prompt, num_output;
    const int32_t* bias_ids;
    const double* bias;
    int64_t num_bias;
    const int32_t* allowed;
    int64_t num_allowed;
    const int32_t* forbidden;
    int64_t num_forbidden;
};
static_assert(sizeof(Draw) == 19 * 8);

struct Picked {
    double logprob;
    int32_t id, status;
};
static_assert(sizeof(Picked) == 16);

enum Status : int32_t { OK = 0, NOT_NUMBERS = 1, NOTHING_LEFT = 2, BAD_IDS = 3 };

constexpr double GREEDY_BELOW = 1e-5;
constexpr double LARGEST = 1e30;

// An id that may be drawn. Heavier ones come first, of equals the lower id.
struct Candidate {
    float logit;
    int32_t id;
    double weight;

    bool operator<(const Candidate& other) const {
        return logit > other.logit || (logit == other.logit && id < other.id);
    }
};

// What one thread needs for a row; kept between rows, as large as the largest vocabulary so far.
struct Scratch {
    std::vector<float> values, kept;
    std::vector<int32_t> counts;  // zero between rows
    std::vector<double> sums;
    std::vector<int32_t> ids;  // of what may be drawn, in order; with their logits and weights
    std::vector<float> logits;
    std::vector<double> weights;
    std::vector<int32_t> slots;
    std::vector<Candidate> candidates;
};

// --- penalties, bias, masks --------------------------------------------------------------------------------------

inline bool within(const int32_t* ids, int64_t count, int64_t n) {
    bool good = true;
    for (int64_t i = 0; i < count; i++) good &= ids[i] >= 0 && ids[i] < n;
    return good;
}

inline float bounded(double value) {
    if (value == -std::numeric_limits<double>::infinity()) return LOWEST;
    return static_cast<float>(std::clamp(value, -LARGEST, LARGEST));
}

inline void penalize(float* x, const Draw& d, std::vector<int32_t>& counts) {
    // While a row is worked on: 0 not seen, else 1 + occurrences in the outputs.
    for (int64_t i = 0; i < d.num_prompt; i++) counts[d.context[i]] = 1;
    for (int64_t i = d.num_prompt; i < d.num_prompt + d.num_output; i++) {
        int32_t& count = counts[d.context[i]];
        count += count == 0 ? 2 : 1;
    }
    for (int64_t i = 0; i < d.num_prompt + d.num_output; i++) {
        const int32_t id = d.context[i], seen = counts[id];
        if (seen == 0) continue;  // done already
        counts[id] = 0;
        double value = static_cast<double>(x[id]);
        if (d.repetition != 1.0) value = value > 0.0 ? value / d.repetition : value * d.repetition;
        if (seen > 1) value = value - d.frequency * static_cast<double>(seen - 1) - d.presence;
        x[id] = bounded(value);
    }
}

inline bool edits(const Draw& d) {
    return d.num_prompt + d.num_output > 0 || d.num_bias > 0 || d.num_allowed > 0 || d.num_forbidden > 0;
}

// Write the row as it is drawn from to scratch.values; false if an id is outside the vocabulary.
inline bool adjust(const float* logits, int64_t n, const Draw& d, Scratch& s) {
    if (!within(d.context, d.num_prompt + d.num_output, n) || !within(d.bias_ids, d.num_bias, n) ||
        !within(d.allowed, d.num_allowed, n) || !within(d.forbidden, d.num_forbidden, n))
        return false;
    s.values.assign(logits, logits + n);
    if (s.counts.size() < static_cast<size_t>(n)) s.counts.resize(static_cast<size_t>(n));
    float* x = s.values.data();
    penalize(x, d, s.counts);
    for (int64_t i = 0; i < d.num_bias; i++) {
        float& value = x[d.bias_ids[i]];
        value = bounded(static_cast<double>(value) + d.bias[i]);
    }
    if (d.num_allowed > 0) {
        s.kept.clear();
        for (int64_t i = 0; i < d.num_allowed; i++) s.kept.push_back(x[d.allowed[i]]);
        std::fill(x, x + n, LOWEST);
        for (int64_t i = 0; i < d.num_allowed; i++) x[d.allowed[i]] = s.kept[static_cast<size_t>(i)];
    }
    for (int64_t i = 0; i < d.num_forbidden; i++) x[d.forbidden[i]] = LOWEST;
    return true;
}

// --- draws -------------------------------------------------------------------------------------------------------

// Draw from all ids, or from those that min-p keeps.
inline int32_t draw_from_all(const float* x, int64_t n, double top, const Draw& d, Scratch& s) {
    const double inverse = 1.0 / d.temperature;
    const double target = d.point * sum_weights(x, n, top, inverse, d.min_p, s.sums);
    double before = 0.0;
    size_t block = 0;
    while (block + 1 < s.sums.size() && before + s.sums[block] <= target) before += s.sums[block++];
    int64_t last = -1;
    for (int64_t i = static_cast<int64_t>(block) * BLOCK; i < n; i++) {
        const double w = weight(x[i], top, inverse, d.min_p);
        if (w == 0.0) continue;
        before += w;
        last = i;
        if (before > target) break;
    }
    if (last >= 0) return static_cast<int32_t>(last);
    // Rounding carried the point past the last id that has any weight.
    for (last = n - 1; weight(x[last], top, inverse, d.min_p) == 0.0;) last--;
    return static_cast<int32_t>(last);
}

// Order `c[0 … count)` so far that the ids to keep come first, the lightest of them last; returns how many there are:
// at least one, else those before which the heavier ones weigh less than `need`. Halves, so that little is sorted.
inline int64_t keep(Candidate* c, int64_t count, double need) {
    int64_t low = 0, high = count;
    double before = 0.0;
    while (high - low > 32) {
        const int64_t middle = low + (high - low) / 2;
        std::nth_element(c + low, c + middle, c + high);
        double mass = before;
        for (int64_t i = low; i < middle; i++) mass += c[i].weight;
        if (mass < need) {
            before = mass;
            low = middle;
        } else {
            high = middle;
        }
    }
    std::sort(c + low, c + high);
    int64_t kept = low;
    while (kept < high && before < need) before += c[kept++].weight;
    return std::max<int64_t>(kept, 1);
}

// Drop from the `count` first of ids, logits and weights, in place, those before which the heavier ones weigh `need` or
// more; returns how many are left, at least one. A histogram over logits finds the few that must be compared.
inline int64_t keep_heaviest(Scratch& s, int64_t count, float top, double need) {
    constexpr int32_t SLOTS = 1024;
    float lowest = top;
    for (int64_t i = 0; i < count; i++) lowest = s.logits[i] < lowest && s.logits[i] > LOWEST ? s.logits[i] : lowest;
    const float per_slot = top > lowest ? static_cast<float>(SLOTS - 1) / (top - lowest) : 0.0f;
    double mass[SLOTS] = {};
    s.slots.resize(std::max(s.slots.size(), static_cast<size_t>(count)));
    for (int64_t i = 0; i < count; i++) {
        const float depth = s.logits[i] > LOWEST ? (top - s.logits[i]) * per_slot : SLOTS - 1;
        s.slots[i] = std::min(static_cast<int32_t>(depth), SLOTS - 1);
    }
    for (int64_t i = 0; i < count; i++) mass[s.slots[i]] += s.weights[i];
    int32_t slot = 0;
    double before = 0.0;
    while (slot < SLOTS && before + mass[slot] < need) before += mass[slot++];
    if (slot == SLOTS) return count;  // by rounding at most
    s.candidates.clear();
    for (int64_t i = 0; i < count; i++)
        if (s.slots[i] == slot) s.candidates.push_back({s.logits[i], s.ids[i], s.weights[i]});
    const int64_t few = keep(s.candidates.data(), static_cast<int64_t>(s.candidates.size()), need - before);
    const Candidate last = s.candidates[few - 1];
    int64_t left = 0;
    for (int64_t i = 0; i < count; i++) {
        const float logit = s.logits[i];
        const int32_t id = s.ids[i];
        s.logits[left] = logit;
        s.ids[left] = id;
        s.weights[left] = s.weights[i];
        left += logit > last.logit || (logit == last.logit && id <= last.id);
    }
    return left;
}

// The weights of the first `count` logits, and their sum.
inline double weigh(Scratch& s, int64_t count, double top, double inverse) {
    s.weights.resize(std::max(s.weights.size(), static_cast<size_t>(count)));
    for (int64_t i = 0; i < count; i++) s.weights[i] = weight(s.logits[i], top, inverse, 0.0);
    double total = 0.0;
    for (int64_t i = 0; i < count; i++) total += s.weights[i];
    return total;
}

// Draw from what top-k and top-p keep. A bound that lets through enough is found by doubling its distance from the top.
inline int32_t draw_from_few(const float* x, int64_t n, float top, const Draw& d, Scratch& s) {
    const bool limited = d.top_k > 0 && d.top_k < n;
    const double inverse = 1.0 / d.temperature;
    double need = limited ? 0.0 : d.top_p * sum_weights(x, n, static_cast<double>(top), inverse, 0.0, s.sums);
    int64_t count = 0;
    for (double depth = 8.0;; depth *= 2.0) {
        const double bound = limited ? top - depth : top - depth * d.temperature;
        const bool all = depth > 1e3;
        count = collect(x, n, all ? LOWEST : static_cast<float>(bound), s.ids);
        if (limited && !all && count < d.top_k) continue;
        s.logits.resize(std::max(s.logits.size(), static_cast<size_t>(count)));
        for (int64_t i = 0; i < count; i++) s.logits[i] = x[s.ids[i]];
        if (limited || weigh(s, count, top, inverse) >= need || all) break;
    }
    if (limited) {
        s.weights.assign(std::max(s.weights.size(), static_cast<size_t>(count)), 1.0);
        count = keep_heaviest(s, count, top, static_cast<double>(d.top_k));
        need = d.top_p * weigh(s, count, top, inverse);
    }
    if (d.top_p < 1.0) count = keep_heaviest(s, count, top, need);
    double total = 0.0;
    for (int64_t i = 0; i < count; i++) {
        if (s.weights[i] < d.min_p) s.weights[i] = 0.0;
        total += s.weights[i];
    }
    const double target = d.point * total;
    double before = 0.0;
    int32_t last = 0;
    for (int64_t i = 0; i < count && before <= target; i++) {
        before += s.weights[i];
        if (s.weights[i] > 0.0) last = s.ids[i];
    }
    return last;
}

inline Picked sample_row(const float* logits, int64_t n, const Draw& d, Scratch& s) {
    const float model_top = greatest(logits, n);
    if (!std::isfinite(model_top)) return {0.0, -1, NOT_NUMBERS};
    const float* x = logits;
    float top = model_top;
    if (edits(d)) {
        if (!adjust(logits, n, d, s)) return {0.0, -1, BAD_IDS};
        x = s.values.data();
        top = greatest(x, n);
        if (top == LOWEST) return {0.0, -1, NOTHING_LEFT};
    }
    int64_t id;
    if (d.temperature < GREEDY_BELOW || d.top_k == 1)
        id = first_equal(x, n, top);
    else if ((d.top_k > 0 && d.top_k < n) || d.top_p < 1.0)
        id = draw_from_few(x, n, top, d, s);
    else
        id = draw_from_all(x, n, static_cast<double>(top), d, s);
    const double above = static_cast<double>(logits[id]) - static_cast<double>(model_top);
    return {above - std::log(sum_of_exponentials(logits, n, model_top)), static_cast<int32_t>(id), OK};
}

// Sample a batch; `loop(count, fn)` calls fn(i) for i in 0 … count-1, in any order and on any threads.
template <typename Loop>
void sample_batch(const float* logits, int64_t vocab, const Draw* draws, int64_t count, Picked* out, Loop&& loop) {
    loop(count, [=](int64_t i) {
        thread_local Scratch scratch;
        out[i] = sample_row(logits + draws[i].row * vocab, vocab, draws[i], scratch);
    });
}

}  // namespace headrace::sampling

// Sample `count` draws from contiguous logits `[rows, vocab]`, on the threads of a team (null: on the caller's alone).
// The caller has checked that every `row` is in range.
extern "C" void hr_sample(
    void* team, const float* logits, int64_t vocab, const headrace::sampling::Draw* draws, int64_t count,
    headrace::sampling::Picked* out) {
    headrace::sampling::sample_batch(logits, vocab, draws, count, out, [team](int64_t n, auto fn) {
        if (team != nullptr) return headrace::parallel(*static_cast<headrace::Team*>(team), n, fn);
        for (int64_t i = 0; i < n; i++) fn(i);
    });
}
