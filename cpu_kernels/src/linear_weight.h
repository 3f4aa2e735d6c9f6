// The packed weight itself. One block of memory: the tiles of all segments, then constants and permutations.
#pragma once
#include "linear.h"
#include "linear_types.h"

namespace jk {
constexpr int MAX_SEGMENTS = 8;
struct Slab;
struct Memory {
    void* base;
    size_t bytes;
    Slab* slab;
};
Memory memory_take(size_t bytes);  // zeroed, 64-byte aligned; base null on failure
void memory_give(Memory);
}  // namespace jk

struct JkWeight {
    int64_t rows, columns;
    int uses, n_segments, n_views, tiles;
    size_t view_bytes;  // of all views of a row
    const jk::LinearKernels* kernels;
    jk::Memory memory;
    jk::Segment segments[jk::MAX_SEGMENTS];
    jk::View views[jk::MAX_SEGMENTS];
};
