// What every op function sees: the counts and buffers of a run, and its operands resolved.
#ifndef JUMAR_CALL_H
#define JUMAR_CALL_H

#include "jumar_cpu.h"

struct JkRun {
    const int32_t* counts;
    void* const* bases;
    char* scratch;
};

typedef void (*JkOpFn)(const JkRun&, const JkCall&, const JkTeam*, int tid);

// The ops of one object, by number; null where it has none.
struct JkOps {
    JkOpFn fn[JK_OP_COUNT];
};

namespace {

inline int rows_of(const JkRun& run, const JkArg& a) { return a.count < 0 ? a.rows : run.counts[a.count] + a.extra; }

template <class T>
inline T* at(const JkRun& run, const JkArg& a) {
    if (a.space == 0) return reinterpret_cast<T*>(a.at);
    if (a.space < 0) return nullptr;
    return reinterpret_cast<T*>(static_cast<char*>(run.bases[a.space]) + a.at);
}

inline int64_t align64(int64_t n) { return (n + 63) & ~int64_t{63}; }

// Rows up to this many are normed by every thread for itself: cheaper than waiting for one another.
constexpr int kOwnRows = 2;

// Most partial results of attention that are kept when the spans of a context are divided among threads.
constexpr int64_t kPartials = 16384;
// Tiles of a span: positions whose weights are summed before they are combined with those of other spans.
constexpr int kSpanTiles = 8;
// Queries (rows times query heads of a KV head) that go over a span together.
constexpr int kQueries = 48;

// Where norm_linear keeps normed rows, before the scratch of its linear.
inline int64_t norm_bytes(int cols, int64_t rows, int threads) {
    const int64_t row = align64(4 * (int64_t)cols);
    return rows <= kOwnRows ? threads * (kOwnRows + 1) * row : rows * row;
}

inline int64_t partial_floats(int vdim) { return vdim + 16; }  // maximum, sum, then the weighted values
// Of each thread, in floats: queries, scores, results of a span and of all spans, and pages turned into float32.
inline int64_t attention_floats(int dim, int vdim) {
    const int64_t span = kSpanTiles * JK_LANES;
    return kQueries * (align64(4 * (int64_t)dim) / 4 + span + 2 * partial_floats(vdim)) +
           kSpanTiles * JK_LANES * (int64_t)(dim + vdim);
}

}  // namespace

#endif
