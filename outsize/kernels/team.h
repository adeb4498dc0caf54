// Threads that make the passes of a step together: of each pass a share.

#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace outsize {

// Who makes a pass: so many threads that it starts itself, or, as one of a team, the share of one.
struct Team {
    int count, index;

    Team(int threads, int own = -1) : count(threads), index(own) {}
    bool starts() const { return index < 0 && count > 1; }
    std::int64_t first(std::int64_t things) const { return index < 0 ? 0 : things * index / count; }
    std::int64_t last(std::int64_t things) const {
        return index < 0 ? things : things * (index + 1) / count;
    }
};

// Where all of a team wait for one another: briefly at work, then giving way.
class Meeting {
  public:
    void of(int count) { count_ = count; }

    void meet() {
        const int turn = turn_.load(std::memory_order_relaxed);
        if (came_.fetch_add(1, std::memory_order_acq_rel) == count_ - 1) {
            came_.store(0, std::memory_order_relaxed);
            turn_.store(turn + 1, std::memory_order_release);
            return;
        }
        for (int n = 0; turn_.load(std::memory_order_acquire) == turn; ++n)
            if (n < SPINS) {
#if defined(__x86_64__)
                _mm_pause();
#endif
            } else {
                std::this_thread::yield();
            }
    }

  private:
    static constexpr int SPINS = 4000;  // some tens of microseconds
    int count_ = 1;
    std::atomic<int> came_{0}, turn_{0};
};

// What a team has where it makes one thing together.
struct Joint {
    Meeting meeting;
    std::vector<float> room;
};

}  // namespace outsize
