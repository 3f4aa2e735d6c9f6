// The thread team: persistent threads, a barrier that spins briefly and then sleeps.
#include <sched.h>
#include <time.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include "jumar_cpu.h"
#include "pace.h"

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if defined(__x86_64__)
#include <immintrin.h>
#define JK_PAUSE() _mm_pause()
#elif defined(__aarch64__)
#define JK_PAUSE() __asm__ __volatile__("isb" ::: "memory")
#else
#define JK_PAUSE() ((void)0)
#endif

namespace {

// About 20 us of waiting at a barrier are what divided work costs. Whoever waits longer waits for a thread that lost
// its core to somebody else: that is counted.
constexpr int kBarrierSpins = 400;
// After about 200 us more it sleeps, and leaves a core that the other can go on with. Sooner would cost more than it
// gives: to be woken takes about as long.
constexpr int kLostSpins = 4000;
// About 100 us between steps, then the threads sleep.
constexpr int kIdleSpins = 2000;

struct State {
    alignas(64) std::atomic<int> arrived{0};
    alignas(64) std::atomic<unsigned> phase{0};
    alignas(64) std::atomic<int64_t> cursor{0};
    alignas(64) std::atomic<uint64_t> job{0};  // its number, and in the last 16 bits how many threads it is for
    alignas(64) std::atomic<int> asleep{0};    // at the barrier
    std::atomic<int64_t> lost{0};              // nanoseconds of sleep at barriers, of all threads
    std::atomic<int> sleeping{0};              // between steps
    std::atomic<bool> ending{false};
    void (*fn)(void*, const JkTeam*, int) = nullptr;
    void* arg = nullptr;
    std::mutex mutex;
    std::condition_variable wake;
    std::vector<std::thread> threads;
    Pace pace[2];
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

static_assert(sizeof(std::atomic<unsigned>) == 4, "a futex is 32 bits");

void sleep_while(std::atomic<unsigned>& word, unsigned value) {
#ifdef __linux__
    syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
#else
    if (word.load() == value) sched_yield();
#endif
}

void wake_all(std::atomic<unsigned>& word) {
#ifdef __linux__
    syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, 1 << 30, nullptr, nullptr, 0);
#else
    (void)word;
#endif
}

int64_t now() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

bool is_for(uint64_t job, int tid) { return tid < int(job & 0xffff); }

// A job that this thread has not seen and takes part in.
uint64_t next_job(State& s, uint64_t seen, int tid) {
    uint64_t job = seen;
    auto found = [&] { return (job = s.job.load()) != seen && is_for(job, tid); };
    for (int i = 0; i < kIdleSpins; i++) {
        if (found()) return job;
        for (int j = 0; j < 4; j++) JK_PAUSE();
    }
    std::unique_lock<std::mutex> lock(s.mutex);
    s.sleeping.fetch_add(1);
    s.wake.wait(lock, found);
    s.sleeping.fetch_sub(1);
    return job;
}

void work(JkTeam team, int tid, int cpu) {
    pin(cpu);
    State& s = *static_cast<State*>(team.state);
    for (uint64_t job = 0;;) {
        job = next_job(s, job, tid);
        if (s.ending.load()) return;
        team.threads = int(job & 0xffff);
        s.fn(s.arg, &team, tid);
        jk_barrier(&team, tid);
    }
}

void post(State& s, int threads) {
    // sequentially consistent, like the count of sleepers: one of the two sides sees the other
    s.job.store(((s.job.load() >> 16) + 1) << 16 | uint64_t(threads));
    if (s.sleeping.load() == 0) {
        // A thread between its last look and its sleep holds the mutex or is about to take it, and looks again in it.
        return;
    }
    std::lock_guard<std::mutex> lock(s.mutex);
    s.wake.notify_all();
}

// By the first `threads` of the team. Nanoseconds that they waited too long at barriers, all together.
int64_t run_some(JkTeam* whole, int threads, void (*fn)(void*, const JkTeam*, int), void* arg) {
    State& s = state_of(whole);
    const JkTeam team{threads, whole->state};
    s.cursor.store(0, std::memory_order_relaxed);
    if (threads == 1) {
        fn(arg, &team, 0);
        return 0;
    }
    s.lost.store(0, std::memory_order_relaxed);
    s.fn = fn;
    s.arg = arg;
    post(s, threads);
    fn(arg, &team, 0);
    jk_barrier(&team, 0);
    return s.lost.load(std::memory_order_relaxed);
}

}  // namespace

extern "C" {

JkTeam* jk_team_new(int threads, const int* cpus) {
    if (threads < 1 || threads > 0xffff) return nullptr;
    State* s = new (std::nothrow) State;
    if (!s) return nullptr;
    JkTeam* team = new JkTeam{threads, s};
    try {
        for (int t = 1; t < threads; t++) s->threads.emplace_back(work, *team, t, cpus ? cpus[t] : -1);
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
    post(s, team->threads);
    for (auto& thread : s.threads) thread.join();
    delete &s;
    delete team;
}

void jk_team_run(JkTeam* team, void (*fn)(void*, const JkTeam*, int), void* arg) {
    run_some(team, team->threads, fn, arg);
}

void jk_team_run_paced(JkTeam* team, int kind, void (*fn)(void*, const JkTeam*, int), void* arg) {
    Pace& pace = state_of(team).pace[kind != 0];
    const int64_t begin = now();
    const int threads = pace.threads(begin, team->threads);
    const int64_t lost = run_some(team, threads, fn, arg), end = now();
    pace.took(end, threads, end - begin, lost);
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
        // sequentially consistent, like the count of sleepers: one of the two sides sees the other
        s.phase.store(phase + 1);
        if (s.asleep.load()) wake_all(s.phase);
        return;
    }
    for (int i = 0; i < kBarrierSpins; i++) {
        if (s.phase.load(std::memory_order_acquire) != phase) return;
        JK_PAUSE();
    }
    const int64_t begin = now();
    for (int i = 0; i < kLostSpins && s.phase.load(std::memory_order_acquire) == phase; i++) JK_PAUSE();
    if (s.phase.load(std::memory_order_acquire) == phase) {
        s.asleep.fetch_add(1);
        while (s.phase.load() == phase) sleep_while(s.phase, phase);
        s.asleep.fetch_sub(1);
    }
    s.lost.fetch_add(now() - begin, std::memory_order_relaxed);
}

int64_t jk_take(const JkTeam* team, int64_t n) { return state_of(team).cursor.fetch_add(n, std::memory_order_relaxed); }

}  // extern "C"
