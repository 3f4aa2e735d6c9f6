// The thread team: persistent threads, a barrier that spins briefly and then gives its core away.
#include <sched.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include "jumar_cpu.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define JK_PAUSE() _mm_pause()
#elif defined(__aarch64__)
#define JK_PAUSE() __asm__ __volatile__("isb" ::: "memory")
#else
#define JK_PAUSE() ((void)0)
#endif

namespace {

// About 20 us of waiting at full attention inside a step; whoever waits longer has a neighbour that needs the core.
constexpr int kBarrierSpins = 400;
// About 100 us between steps, then the threads sleep.
constexpr int kIdleSpins = 2000;

struct State {
    alignas(64) std::atomic<int> arrived{0};
    alignas(64) std::atomic<unsigned> phase{0};
    alignas(64) std::atomic<int64_t> cursor{0};
    alignas(64) std::atomic<unsigned> job{0};
    std::atomic<int> sleeping{0};
    std::atomic<bool> ending{false};
    void (*fn)(void*, const JkTeam*, int) = nullptr;
    void* arg = nullptr;
    std::mutex mutex;
    std::condition_variable wake;
    std::vector<std::thread> threads;
};

State& state_of(const JkTeam* team) { return *static_cast<State*>(team->state); }

void pin(int cpu) {
#ifdef __linux__
    if (cpu < 0) return;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    sched_setaffinity(0, sizeof set, &set);
#else
    (void)cpu;
#endif
}

void wait_for_job(State& s, unsigned seen) {
    for (int i = 0; i < kIdleSpins; i++) {
        if (s.job.load(std::memory_order_acquire) != seen) return;
        for (int j = 0; j < 4; j++) JK_PAUSE();
    }
    std::unique_lock<std::mutex> lock(s.mutex);
    s.sleeping.fetch_add(1);
    s.wake.wait(lock, [&] { return s.job.load() != seen; });
    s.sleeping.fetch_sub(1);
}

void work(const JkTeam* team, int tid, int cpu) {
    pin(cpu);
    State& s = state_of(team);
    unsigned seen = 0;
    for (;;) {
        wait_for_job(s, seen);
        seen = s.job.load(std::memory_order_acquire);
        if (s.ending.load()) return;
        s.fn(s.arg, team, tid);
        jk_barrier(team, tid);
    }
}

void post(State& s) {
    s.job.fetch_add(1);  // sequentially consistent, like the count of sleepers: one of the two sides sees the other
    if (s.sleeping.load() == 0) {
        // A thread between its last look and its sleep holds the mutex or is about to take it, and looks again in it.
        return;
    }
    std::lock_guard<std::mutex> lock(s.mutex);
    s.wake.notify_all();
}

}  // namespace

extern "C" {

JkTeam* jk_team_new(int threads, const int* cpus) {
    if (threads < 1) return nullptr;
    State* s = new (std::nothrow) State;
    if (!s) return nullptr;
    JkTeam* team = new JkTeam{threads, s};
    try {
        for (int t = 1; t < threads; t++) s->threads.emplace_back(work, team, t, cpus ? cpus[t] : -1);
    } catch (...) {
        team->threads = static_cast<int>(s->threads.size()) + 1;
        jk_team_free(team);
        return nullptr;
    }
    return team;
}

void jk_team_free(JkTeam* team) {
    if (!team) return;
    State& s = state_of(team);
    s.ending.store(true);
    post(s);
    for (auto& thread : s.threads) thread.join();
    delete &s;
    delete team;
}

void jk_team_run(JkTeam* team, void (*fn)(void*, const JkTeam*, int), void* arg) {
    State& s = state_of(team);
    s.cursor.store(0, std::memory_order_relaxed);
    if (team->threads == 1) {
        fn(arg, team, 0);
        return;
    }
    s.fn = fn;
    s.arg = arg;
    post(s);
    fn(arg, team, 0);
    jk_barrier(team, 0);
}

void jk_barrier(const JkTeam* team, int) {
    State& s = state_of(team);
    if (team->threads == 1) {
        s.cursor.store(0, std::memory_order_relaxed);
        return;
    }
    const unsigned phase = s.phase.load(std::memory_order_relaxed);
    if (s.arrived.fetch_add(1, std::memory_order_acq_rel) == team->threads - 1) {
        s.arrived.store(0, std::memory_order_relaxed);
        s.cursor.store(0, std::memory_order_relaxed);
        s.phase.store(phase + 1, std::memory_order_release);
        return;
    }
    for (int i = 0; i < kBarrierSpins; i++) {
        if (s.phase.load(std::memory_order_acquire) != phase) return;
        JK_PAUSE();
    }
    while (s.phase.load(std::memory_order_acquire) == phase) sched_yield();
}

int64_t jk_take(const JkTeam* team, int64_t n) { return state_of(team).cursor.fetch_add(n, std::memory_order_relaxed); }

}  // extern "C"
