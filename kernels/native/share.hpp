// What the engines of a machine tell each other, as a step sees it: the shared file of engine/cores.py.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>

namespace headrace {

// Slots of two float64: begin and end (0: not yet) of each engine's last step, in monotonic seconds; begin 0: nobody's.
struct CoreShare {
    const double* slots = nullptr;
    int32_t count = 0, own = 0, cores = 1;
    double idle_after_s = 0.0, dead_after_s = 0.0;

    // Threads that this engine's step should take now; as many as you like without a shared file.
    int threads() const {
        if (!slots) return INT32_MAX;
        const double now = std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
        int busy = 1;
        for (int32_t i = 0; i < count; i++) {
            const double begun = read(2 * i), ended = read(2 * i + 1);
            if (i == own || begun == 0.0) continue;
            busy += ended != 0.0 ? now - ended < idle_after_s : now - begun < dead_after_s;
        }
        return std::max(1, cores / busy);
    }

  private:
    // Another process writes them: a torn or late value only costs a wrong guess.
    double read(int64_t i) const { return *static_cast<const volatile double*>(slots + i); }
};

}  // namespace headrace
