// Runs a recorded step: its calls one after another, each by all threads of the team.
#include <algorithm>
#include <chrono>

#include "call.h"
#include "linear.h"
#include "logits.h"

#define JK_DECLARE(isa)                             \
    extern "C" void jk_row_ops_##isa(JkOps*);       \
    extern "C" void jk_attention_ops_##isa(JkOps*); \
    extern "C" void jk_logit_ops_##isa(JkOps*);
#define JK_TABLE(isa)                 \
    {                                 \
        jk_row_ops_##isa(&ops);       \
        jk_attention_ops_##isa(&ops); \
        jk_logit_ops_##isa(&ops);     \
    }

#ifdef JK_HAVE_BASELINE
JK_DECLARE(baseline)
#endif
#ifdef JK_HAVE_AVX2
JK_DECLARE(avx2)
#endif
#ifdef JK_HAVE_AVX512
JK_DECLARE(avx512)
#endif
#ifdef JK_HAVE_NEON
JK_DECLARE(neon)
#endif

namespace {

JkOps choose() {
    JkOps ops = {};
    switch (jk_isa()) {
#ifdef JK_HAVE_BASELINE
        case JK_BASELINE:
            JK_TABLE(baseline) break;
#endif
#ifdef JK_HAVE_AVX2
        case JK_AVX2:
            JK_TABLE(avx2) break;
#endif
#ifdef JK_HAVE_AVX512
        case JK_AVX512:
            JK_TABLE(avx512) break;
#endif
#ifdef JK_HAVE_NEON
        case JK_NEON:
            JK_TABLE(neon) break;
#endif
    }
    return ops;
}

const JkOps& table() {
    static const JkOps ops = choose();
    return ops;
}

int64_t now() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

struct Job {
    JkRun run;
    const JkCall* calls;
    int n;
    int64_t* times;
};

bool has_weight(const JkCall& c) {
    return c.op == JK_OP_LINEAR || c.op == JK_OP_NORM_LINEAR || c.op == JK_OP_ACT_LINEAR;
}

// Behind call `done`: the next weight is asked for while this thread waits, and in calls that leave the memory idle.
// last: the call whose weight was asked for.
void look_ahead(const Job& job, int done, int* last, const JkTeam* team, int tid) {
    for (int i = done + 1; i < job.n && i <= done + 2; i++) {
        const JkCall& c = job.calls[i];
        if (!has_weight(c)) continue;
        if (i != *last) jk_linear_ahead(static_cast<const JkWeight*>(c.ptr[0]), rows_of(job.run, c.arg[0]), team, tid);
        *last = i;
        return;
    }
}

void run_calls(void* arg, const JkTeam* team, int tid) {
    const Job& job = *static_cast<Job*>(arg);
    const JkOps& ops = table();
    int last = -1;
    int64_t begin = job.times && tid == 0 ? now() : 0;
    for (int i = 0; i < job.n; i++) {
        ops.fn[job.calls[i].op](job.run, job.calls[i], team, tid);
        look_ahead(job, i, &last, team, tid);
        if (i + 1 < job.n || job.times) jk_barrier(team, tid);
        if (job.times && tid == 0) {
            const int64_t end = now();
            job.times[i] = end - begin;
            begin = end;
        }
    }
}

int64_t bound_of(const JkArg& a, const int32_t* bounds) {
    return a.count < 0 ? a.rows : (int64_t)bounds[a.count] + a.extra;
}

}  // namespace

extern "C" {

int64_t jk_call_scratch(const JkCall* c, int threads, const int32_t* bounds) {
    const int64_t rows = bound_of(c->arg[0], bounds);
    const JkWeight* w = static_cast<const JkWeight*>(c->ptr[0]);
    switch (c->op) {
        case JK_OP_LINEAR:
            return jk_linear_scratch(w, (int)rows);
        case JK_OP_NORM_LINEAR: {
            const int n = c->arg[0].cols;
            return std::max(norm_bytes(n, rows, threads), norm_bytes(n, 1, threads)) + jk_linear_scratch(w, (int)rows);
        }
        case JK_OP_ACT_LINEAR:
            return rows * align64(2 * (int64_t)c->arg[0].cols) + jk_linear_scratch(w, (int)rows);
        case JK_OP_ATTENTION: {
            const JkKVLayer* l = static_cast<const JkKVLayer*>(c->ptr[0]);
            return threads * align64(4 * attention_floats(l->dim, l->vdim)) + 4 * kPartials * partial_floats(l->vdim);
        }
        case JK_OP_SAMPLE: {
            const int n = c->arg[0].cols;
            const int64_t pieces = (n + kPiece - 1) / kPiece;
            return align64(rows * pieces * (int64_t)sizeof(JkBest)) + threads * sample_bytes(n);
        }
        case JK_OP_LOGPROBS:
        case JK_OP_VERIFY:
            return threads * sample_bytes(c->arg[0].cols);
        default:
            return 0;
    }
}

int jk_run(JkTeam* team, const JkCall* calls, int n, const int32_t* counts, void* const* bases, void* scratch,
           int64_t* times) {
    for (int i = 0; i < n; i++) {
        if (calls[i].op < 0 || calls[i].op >= JK_OP_COUNT || !table().fn[calls[i].op]) return i + 1;
    }
    Job job{{counts, bases, static_cast<char*>(scratch)}, calls, n, times};
    // Steps of few rows are short against the time that a core is taken away for; in long ones the faster threads take
    // over what the others leave.
    jk_team_run_paced(team, n > 0 && rows_of(job.run, calls[0].arg[0]) > JK_FEW_ROWS, run_calls, &job);
    return 0;
}

}  // extern "C"
