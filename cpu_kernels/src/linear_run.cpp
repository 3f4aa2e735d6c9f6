// Whole calls of the matrix ops for tests and benchmarks, and the ceilings that they are measured against.
#include <chrono>
#include <cstdint>
#include <cstring>

#include "linear_weight.h"

using namespace jk;

namespace {

struct LinearArgs {
    const JkWeight* const* w;
    int n_weights, rows, repeat;
    const float* x;
    int64_t ldx;
    float* y;
    int64_t ldy;
    const float* bias;
    void* scratch;
};

void linear_all(void* arg, const JkTeam* team, int tid) {
    const LinearArgs& a = *static_cast<LinearArgs*>(arg);
    for (int r = 0; r < a.repeat; r++) {
        for (int i = 0; i < a.n_weights; i++) {
            jk_linear(a.w[i], a.x, a.ldx, a.rows, a.y, a.ldy, a.bias, a.scratch, team, tid);
            jk_barrier(team, tid);
        }
    }
}

struct EmbedArgs {
    const JkWeight* w;
    const int32_t* ids;
    int rows;
    float scale;
    float* y;
    int64_t ldy;
};

void embed_all(void* arg, const JkTeam* team, int tid) {
    const EmbedArgs& a = *static_cast<EmbedArgs*>(arg);
    jk_embed(a.w, a.ids, a.rows, a.scale, a.y, a.ldy, team, tid);
}

struct MeasureArgs {
    const uint8_t* memory;
    size_t bytes;
    const LinearKernels* kernels;
    int64_t repeat;
    int64_t done[256];
};

typedef uint64_t Wide __attribute__((vector_size(64), aligned(64)));

void read_all(void* arg, const JkTeam* team, int tid) {
    MeasureArgs& a = *static_cast<MeasureArgs*>(arg);
    const size_t share = a.bytes / size_t(team->threads) / 512 * 512;
    const uint8_t* from = a.memory + share * size_t(tid);
    Wide sum[8] = {};
    for (int64_t r = 0; r < a.repeat; r++) {
        for (size_t at = 0; at < share; at += 512) {
            __builtin_prefetch(from + at + 4096);
            for (int i = 0; i < 8; i++) sum[i] ^= *reinterpret_cast<const Wide*>(from + at + 64 * size_t(i));
        }
        jk_barrier(team, tid);
    }
    for (int i = 1; i < 8; i++) sum[0] ^= sum[i];
    if (tid < 256) a.done[tid] = int64_t(sum[0][0] ^ sum[0][3]);
}

void dot_all(void* arg, const JkTeam*, int tid) {
    MeasureArgs& a = *static_cast<MeasureArgs*>(arg);
    if (tid < 256) a.done[tid] = a.kernels->peak(a.repeat);
}

double seconds(JkTeam* team, void (*fn)(void*, const JkTeam*, int), void* arg) {
    const auto begin = std::chrono::steady_clock::now();
    jk_team_run(team, fn, arg);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace

extern "C" {

void jk_linear_run(JkTeam* team, const JkWeight* const* w, int n_weights, const float* x, int64_t ldx, int rows,
                   float* y, int64_t ldy, const float* bias, void* scratch, int repeat) {
    LinearArgs a{w, n_weights, rows, repeat, x, ldx, y, ldy, bias, scratch};
    jk_team_run(team, linear_all, &a);
}

void jk_embed_run(JkTeam* team, const JkWeight* w, const int32_t* ids, int rows, float scale, float* y, int64_t ldy) {
    EmbedArgs a{w, ids, rows, scale, y, ldy};
    jk_team_run(team, embed_all, &a);
}

double jk_measure_read(JkTeam* team, const void* memory, size_t bytes, int repeat) {
    MeasureArgs a{static_cast<const uint8_t*>(memory), bytes, nullptr, repeat, {}};
    const double t = seconds(team, read_all, &a);
    return double(bytes / size_t(team->threads) / 512 * 512) * team->threads * repeat / t;
}

double jk_measure_dot(JkTeam* team, int isa, int64_t repeat) {
    MeasureArgs a{nullptr, 0, linear_kernels(isa), repeat, {}};
    if (!a.kernels) return 0;
    const double t = seconds(team, dot_all, &a);
    int64_t done = 0;
    for (int i = 0; i < team->threads && i < 256; i++) done += a.done[i];
    return double(done) / t;
}

}  // extern "C"
