// Packed weights and the matrix ops on them. Plain C ABI.
//
// y = x w^T + bias with w[n,k] = q[n,k] * scale[n,g] + offset[n,g], columns in the order of perm. A row of y has the
// same bits whatever rows are computed beside it and whichever thread computes it.
#ifndef JUMAR_LINEAR_H
#define JUMAR_LINEAR_H

#include "jumar_cpu.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { JK_F32 = 0, JK_F16 = 1, JK_BF16 = 2, JK_I8 = 3, JK_I4 = 4, JK_U4 = 5 };
enum {
    JK_ACT_NONE = 0,
    JK_ACT_DYNAMIC = 1,
    JK_ACT_STATIC = 2,
    JK_ACT_GROUPS = 3,
    JK_ACT_AS_IS = 4
};  // what the checkpoint asks for the input
enum { JK_USE_LINEAR = 1, JK_USE_EMBED = 2 };
// AUTO: the input of a quantised weight is quantised to int8 by row and group of 32; FLOAT: it stays float32.
enum { JK_ACTIVATIONS_AUTO = 0, JK_ACTIVATIONS_FLOAT = 1 };

// One canonical weight [n, k]; only read while it is packed. q: rows of q_stride bytes; 4 bits: two a byte, the even
// column low. scale, offset: [n, k/group], rows of scale_stride and offset_stride elements; offset may be NULL.
// perm: [k] or NULL. Float weights: group 0, no scale.
typedef struct JkCanonical {
    int32_t dtype, activation, act_zero;
    float act_scale;
    int64_t n, k, group, q_stride, scale_stride, offset_stride;
    const void* q;
    const float *scale, *offset;
    const int32_t* perm;
} JkCanonical;

typedef struct JkWeight JkWeight;

enum { JK_PACK_OK = 0, JK_PACK_MEMORY = 1, JK_PACK_SHAPE = 2, JK_PACK_DTYPE = 3, JK_PACK_GROUP = 4 };

// Weights of equal k that share one input, outputs concatenated. isa: the instruction set whose kernels will run it,
// or -1 for jk_isa(). Groups: a multiple of 16, or k.
JK_API int jk_pack(const JkCanonical* parts, int n_parts, int uses, int activations, int isa, JkWeight** out);
JK_API void jk_weight_free(JkWeight*);
JK_API size_t jk_weight_bytes(const JkWeight*);  // of packed values, scales and offsets
JK_API int64_t jk_weight_rows(const JkWeight*);  // N, all parts together
JK_API int64_t jk_weight_cols(const JkWeight*);  // K
// Bytes of scratch, to be 64-byte aligned, that jk_linear needs for so many rows.
JK_API size_t jk_linear_scratch(const JkWeight*, int rows);

// Every thread of the team calls it; at most one barrier inside, none after. x [rows, K] and y [rows, N] with row
// strides in elements; bias [N] or NULL.
void jk_linear(const JkWeight*, const float* x, int64_t ldx, int rows, float* y, int64_t ldy, const float* bias,
               void* scratch, const JkTeam*, int tid);
// Up to so many rows a step is bound by memory: each thread streams one run of tiles.
enum { JK_FEW_ROWS = 16 };
// Asks for the beginning of what this thread will read of a weight, where rows are few enough to be bound by memory.
void jk_linear_ahead(const JkWeight*, int rows, const JkTeam*, int tid);
// y [rows, K] = the rows ids, dequantised, times scale; an id outside 0..N-1 gives zeros. No barrier.
void jk_embed(const JkWeight*, const int32_t* ids, int rows, float scale, float* y, int64_t ldy, const JkTeam*,
              int tid);

// The same as whole calls, for tests and benchmarks: the team is run inside. repeat: how often, for timing.
JK_API void jk_linear_run(JkTeam*, const JkWeight* const* w, int n_weights, const float* x, int64_t ldx, int rows,
                          float* y, int64_t ldy, const float* bias, void* scratch, int repeat);
JK_API void jk_embed_run(JkTeam*, const JkWeight*, const int32_t* ids, int rows, float scale, float* y, int64_t ldy);
// Measured ceilings, all threads together: bytes read, or int8 multiply-adds done, a second.
JK_API double jk_measure_read(JkTeam*, const void* memory, size_t bytes, int repeat);
JK_API double jk_measure_dot(JkTeam*, int isa, int64_t repeat);

#ifdef __cplusplus
}
#endif
#endif
