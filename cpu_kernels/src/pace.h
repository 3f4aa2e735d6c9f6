// How many threads are worth having. A thread whose core is taken by another process makes all others wait at every
// barrier: then the step is faster without it. Every now and then one more is tried.
#ifndef JUMAR_PACE_H
#define JUMAR_PACE_H

#include <stdint.h>

class Pace {
  public:
    // Threads for a step that begins now (nanoseconds).
    int threads(int64_t now, int all) {
        if (active_ == 0) active_ = all;
        trial_ = active_ < all && now >= until_;
        return trial_ ? active_ + 1 : active_;
    }

    // That step took so many nanoseconds; lost: how long its threads waited in vain at barriers, all together.
    void took(int64_t now, int threads, int64_t nanoseconds, int64_t lost) {
        const bool slow = threads > 1 && lost > nanoseconds / 4 * (threads - 1);
        slow_ = slow ? slow_ + 1 : 0;
        if (trial_ && !slow) {
            active_ = threads;
            hold_ = kFirstHold;
        } else if (trial_) {
            hold_ = hold_ * 2 < kLongestHold ? hold_ * 2 : kLongestHold;
            until_ = now + hold_;
        } else if (slow_ == kPatience) {
            active_ = threads - 1;
            until_ = now + hold_;
            slow_ = 0;
        }
    }

  private:
    static constexpr int kPatience = 3;  // slow steps in a row: one or two may be accidents
    static constexpr int64_t kFirstHold = 50'000'000, kLongestHold = 1'000'000'000;
    int active_ = 0, slow_ = 0;
    bool trial_ = false;
    int64_t until_ = 0, hold_ = kFirstHold;
};

#endif
