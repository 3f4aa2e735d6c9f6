// The native CPU kernels: thread team, instruction sets, and the executor of recorded steps. Plain C ABI.
//
// Compute dtype is float32. A tensor is [rows, cols] with a row stride in elements; what stands within a row is
// contiguous. Rows of a recording are upper bounds: the counts of a step are read when it runs.
#ifndef JUMAR_CPU_H
#define JUMAR_CPU_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define JK_API __attribute__((visibility("default")))

// ---------------------------------------------------------------- instruction sets
// Every src/kernels_*.cpp is compiled once for each set, with -DJK_ISA=baseline|avx2|avx512|neon and that set's flags,
// and ends its symbols in the set's name: JK_FN(jk_rows) is jk_rows_avx2.

#define JK_JOIN_(a, b) a##_##b
#define JK_JOIN(a, b) JK_JOIN_(a, b)
#define JK_FN(name) JK_JOIN(name, JK_ISA)

enum { JK_BASELINE = 0, JK_AVX2 = 1, JK_AVX512 = 2, JK_NEON = 3, JK_ISA_COUNT = 4 };

// The set in use: the best that this CPU has and this library was built with, or the one that JUMAR_TEST_CPU_ISA names
// (which the CPU must have). Decided at the first call.
JK_API int jk_isa(void);
JK_API const char* jk_isa_name(int isa);
// Whether this CPU can run a set.
JK_API int jk_isa_runs(int isa);

// ---------------------------------------------------------------- the thread team

typedef struct JkTeam {
    int threads;
    void* state;
} JkTeam;

// threads >= 1, the caller among them. cpus: one CPU number for each thread, or NULL for no pinning. NULL on failure.
JK_API JkTeam* jk_team_new(int threads, const int* cpus);
JK_API void jk_team_free(JkTeam*);
// fn(arg, team, tid) on every thread; the caller is thread 0. Returns when all have returned. One caller at a time.
JK_API void jk_team_run(JkTeam*, void (*fn)(void*, const JkTeam*, int), void* arg);
// The same, by as many threads as are worth having beside what else runs on this machine, learnt from the runs before
// of the same kind (0 or 1). team->threads says in fn how many they are.
JK_API void jk_team_run_paced(JkTeam*, int kind, void (*fn)(void*, const JkTeam*, int), void* arg);
// Every thread of the team must call it; memory written before it is seen after it. Spins briefly, then sleeps.
void jk_barrier(const JkTeam*, int tid);
// The next n pieces of work that nobody has taken since the last barrier (the first of them; the caller checks
// against its total). Slow threads so get less work.
int64_t jk_take(const JkTeam*, int64_t n);

// ---------------------------------------------------------------- a recorded step

enum {
    JK_OP_EMBED,
    JK_OP_RMS_NORM,
    JK_OP_ADD_RMS_NORM,
    JK_OP_ADD,
    JK_OP_LINEAR,
    JK_OP_ROPE,
    JK_OP_GATED_ACT,
    JK_OP_STORE_KV,
    JK_OP_READ_KV,
    JK_OP_ATTENTION,
    JK_OP_GATHER_ROWS,
    JK_OP_EDIT_LOGITS,
    JK_OP_MASK_LOGITS,
    JK_OP_SAMPLE,
    JK_OP_LOGPROBS,
    JK_OP_NORM_LINEAR,
    JK_OP_ACT_LINEAR,
    JK_OP_QKV_ROPE_STORE,
    JK_OP_VERIFY,
    JK_OP_COUNT
};

// An operand. space 0: `at` is an address; space s > 0: `at` is an offset in bytes from bases[s] of the run.
// count >= 0: it has counts[count] + extra rows, otherwise `rows`. cols: elements of a row; stride: from row to row,
// in elements; size: bytes of an element. An absent operand has space -1.
typedef struct JkArg {
    int64_t at;
    int64_t stride;
    int32_t space, count, extra, rows, cols, size;
} JkArg;

enum { JK_MAX_ARGS = 12, JK_MAX_INTS = 8, JK_MAX_PTRS = 2 };

// One op call. Which operands, numbers and pointers an op takes stands beside its function in executor.cpp.
typedef struct JkCall {
    int32_t op, reserved;
    JkArg arg[JK_MAX_ARGS];
    int64_t num[JK_MAX_INTS];
    double real[2];
    void* ptr[JK_MAX_PTRS];
} JkCall;

enum { JK_KV_F32 = 0, JK_KV_BF16 = 1, JK_KV_F16 = 2, JK_KV_INT8 = 3 };
enum { JK_LANES = 16 };  // positions of a tile of K

// One layer's pages: of block b, stride * b bytes behind these addresses, k [heads][tiles][dim][16],
// v [heads][tiles*16][vdim], scales (int8 only) [heads][tiles*16] f32. tiles = ceil(block_size / 16), vdim = dim
// rounded up to 16; padding is never read.
typedef struct JkKVLayer {
    void *k, *v;
    float *k_scale, *v_scale;
    int64_t stride;
    int32_t dtype, heads, dim, vdim, block_size, tiles;
} JkKVLayer;

// Bytes of scratch that a call needs at most, with these rows as the bounds of its counts.
JK_API int64_t jk_call_scratch(const JkCall*, int threads, const int32_t* bounds);
// Runs n calls on the team. bases[0] is unused. times: NULL, or n numbers: nanoseconds of each call.
// scratch: 64-byte aligned, as large as the largest jk_call_scratch. 0, or the number of a call that cannot be run,
// + 1.
JK_API int jk_run(JkTeam*, const JkCall* calls, int n, const int32_t* counts, void* const* bases, void* scratch,
                  int64_t* times);

#ifdef __cplusplus
}
#endif
#endif
