// A team of threads that works on one job at a time.
//
// Work is claimed piece by piece, so a thread that loses its core for a while does not hold the others up, and no result
// depends on who did what. A waiting thread looks for a few microseconds, then sleeps in the kernel: on a machine with
// more busy processes than cores, spinning would take the core from the very thread that is waited for.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

namespace headrace {

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

class Team {
  public:
    // `looks`: how often a waiting thread looks before it sleeps.
    explicit Team(int threads, int looks = 1500)
        : threads_(std::max(1, threads)), looks_(looks), active_(threads_), next_(threads_),
          calls_(static_cast<size_t>(threads_)) {
        for (int i = 1; i < threads_; i++) workers_.emplace_back([this, i] { serve(i); });
    }
    ~Team() {
        stopping_ = true;
        set_active(threads_);
        call();
        for (auto& worker : workers_) worker.join();
    }
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    // How many threads take part in jobs, the caller's included.
    int active() const { return active_; }
    int threads() const { return threads_; }
    void set_active(int n) { active_ = next_ = std::clamp(n, 1, threads_); }

    // In a job, by its caller: from the next meeting on only the first n threads go on. The others must end the job then.
    void shrink(int n) { next_ = std::clamp(n, 1, active_); }

    // Call fn(thread) once on every active thread, the caller's included; returns when all are done.
    template <typename Fn> void run(Fn&& fn) {
        const int active = active_;
        if (active == 1) {
            fn(0);
            return;
        }
        std::function<void(int)> body = std::ref(fn);
        body_ = &body;
        done_.store(0, std::memory_order_relaxed);
        call();
        fn(0);
        wait([&] { return done_.load(std::memory_order_acquire) == static_cast<uint32_t>(active - 1); }, done_);
    }

    // All active threads of a job meet here. What was written before is seen after.
    void meet() {
        if (active_ == 1) return;
        const uint32_t round = round_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == static_cast<uint32_t>(active_)) {
            arrived_.store(0, std::memory_order_relaxed);
            active_ = next_;
            round_.fetch_add(1, std::memory_order_release);
            round_.notify_all();
            return;
        }
        wait([&] { return round_.load(std::memory_order_acquire) != round; }, round_);
    }

  private:
    struct alignas(64) Call {
        std::atomic<uint32_t> number{0};
    };

    template <typename Ready> void wait(Ready ready, std::atomic<uint32_t>& word) {
        for (int i = 0; i < looks_; i++) {
            if (ready()) return;
            relax();
        }
        while (true) {
            const uint32_t seen = word.load(std::memory_order_acquire);
            if (ready()) return;
            word.wait(seen, std::memory_order_acquire);
        }
    }

    // Only those who take part are woken.
    void call() {
        for (int i = 1; i < active_; i++) {
            calls_[i].number.fetch_add(1, std::memory_order_release);
            calls_[i].number.notify_one();
        }
    }

    void serve(int index) {
        std::atomic<uint32_t>& mine = calls_[index].number;
        uint32_t last = 0;
        while (true) {
            wait([&] { return mine.load(std::memory_order_acquire) != last; }, mine);
            last = mine.load(std::memory_order_acquire);
            if (stopping_) return;
            (*body_)(index);
            done_.fetch_add(1, std::memory_order_release);
            done_.notify_all();
        }
    }

    const int threads_;
    const int looks_;
    int active_;
    int next_;  // active threads from the next meeting on
    std::vector<std::thread> workers_;
    std::vector<Call> calls_;
    std::function<void(int)>* body_ = nullptr;
    std::atomic<uint32_t> done_{0}, arrived_{0}, round_{0};
    std::atomic<bool> stopping_{false};
};

// Pieces 0 … n-1 of one phase of a job, handed out in order.
class Pieces {
  public:
    void reset() { next_.store(0, std::memory_order_relaxed); }
    int64_t take() { return next_.fetch_add(1, std::memory_order_relaxed); }

  private:
    alignas(64) std::atomic<int64_t> next_{0};
};

// Call fn(piece) for pieces 0 … n-1 on the team's threads.
template <typename Fn> void parallel(Team& team, int64_t n, Fn fn) {
    if (team.active() == 1 || n <= 1) {
        for (int64_t i = 0; i < n; i++) fn(i);
        return;
    }
    Pieces pieces;
    team.run([&](int) {
        for (int64_t i = pieces.take(); i < n; i = pieces.take()) fn(i);
    });
}

}  // namespace headrace
