// Norms, element-wise ops and row copies. Sums over a row run in one fixed order, whatever stands beside the row.
#include <string.h>

#include "call.h"
#include "linear.h"
#include "rows.h"
#include "simd.h"

namespace {

// ---------------------------------------------------------------- norms

void norm_row(const float* x, const float* residual, const float* w, float eps, int n, float* y, float* total) {
    const float* source = x;
    V squares = {};
    int i = 0;
    if (residual) {
        for (; i + W <= n; i += W) {
            V t = load(x + i) + load(residual + i);
            store(total + i, t);
            squares = fma(t, t, squares);
        }
        if (i < n) {
            V t = load_part(x + i, n - i, 0) + load_part(residual + i, n - i, 0);
            store_part(total + i, t, n - i);
            squares = fma(t, t, squares);
        }
        source = total;
    } else {
        for (; i + W <= n; i += W) {
            V t = load(x + i);
            squares = fma(t, t, squares);
        }
        if (i < n) {
            V t = load_part(x + i, n - i, 0);
            squares = fma(t, t, squares);
        }
    }
    const V r = splat(1.0f / sqrtf(hsum(squares) / n + eps));
    for (i = 0; i + W <= n; i += W) store(y + i, load(source + i) * r * load(w + i));
    if (i < n) store_part(y + i, load_part(source + i, n - i, 0) * r * load_part(w + i, n - i, 0), n - i);
}

// arg: x, w, y. num: parts of a row that are normed each on its own. real: eps.
void rms_norm(const JkRun& run, const JkCall& c, const JkTeam* team, int tid) {
    const JkArg &ax = c.arg[0], &ay = c.arg[2];
    const int parts = (int)c.num[0], n = ax.cols / parts;
    const float *x = at<float>(run, ax), *w = at<float>(run, c.arg[1]);
    float* y = at<float>(run, ay);
    int64_t first, end;
    share((int64_t)rows_of(run, ax) * parts, team->threads, tid, &first, &end);
    for (int64_t u = first; u < end; u++) {
        const int64_t row = u / parts, part = u % parts * n;
        norm_row(x + row * ax.stride + part, nullptr, w, (float)c.real[0], n, y + row * ay.stride + part, nullptr);
    }
}

// arg: x, residual, w, y, total. real: eps.
void add_rms_norm(const JkRun& run, const JkCall& c, const JkTeam* team, int tid) {
    const JkArg &ax = c.arg[0], &ar = c.arg[1], &ay = c.arg[3], &at_ = c.arg[4];
    const float *x = at<float>(run, ax), *residual = at<float>(run, ar), *w = at<float>(run, c.arg[2]);
    float *y = at<float>(run, ay), *total = at<float>(run, at_);
    int64_t first, end;
    share(rows_of(run, ax), team->threads, tid, &first, &end);
    for (int64_t r = first; r < end; r++) {
        norm_row(x + r * ax.stride, residual + r * ar.stride, w, (float)c.real[0], ax.cols, y + r * ay.stride,
                 total + r * at_.stride);
    }
}

// ---------------------------------------------------------------- linear and what is fused before it

// arg: x, bias or none, y. ptr: weight.
void linear(const JkRun& run, const JkCall& c, const JkTeam* team, int tid) {
    const JkArg &ax = c.arg[0], &ay = c.arg[2];
    const int rows = rows_of(run, ax);
    if (rows == 0) return;
    jk_linear(static_cast<const JkWeight*>(c.ptr[0]), at<float>(run, ax), ax.stride, rows, at<float>(run, ay),
              ay.stride, at<float>(run, c.arg[1]), run.scratch, team, tid);
}

// arg: x, residual or none, w_norm, bias or none, y, total (none without a residual). ptr: weight. real: eps.
void norm_linear(const JkRun& run, const JkCall& c, const JkTeam* team, int tid) {
    const JkArg &ax = c.arg[0], &ar = c.arg[1], &ay = c.arg[4], &at_ = c.arg[5];
    const int rows = rows_of(run, ax), n = ax.cols;
    if (rows == 0) return;
    const float *x = at<float>(run, ax), *residual = at<float>(run, ar), *w = at<float>(run, c.arg[2]);
    float* total = at<float>(run, at_);
    const float eps = (float)c.real[0];
    const int64_t ld = align64(4 * (int64_t)n) / 4;
    float* normed = reinterpret_cast<float*>(run.scratch);
    const bool own = rows <= kOwnRows;
    // Where every thread norms all rows, each has a place of its own for what the others would write too.
    float* spare = normed + (int64_t)team->threads * kOwnRows * ld + tid * ld;
    int64_t first = 0, end = rows;
    if (own)
        normed += (int64_t)tid * kOwnRows * ld;
    else
        share(rows, team->threads, tid, &first, &end);
    for (int64_t r = first; r < end; r++) {
        float* sum = own && tid != 0 ? spare : total + r * at_.stride;
        norm_row(x + r * ax.stride, residual ? residual + r * ar.stride : nullptr, w, eps, n, normed + r * ld, sum);
    }
    if (!own) jk_barrier(team, tid);
    jk_linear(static_cast<const JkWeight*>(c.ptr[0]), normed, ld, rows, at<float>(run, ay), ay.stride,
              at<float>(run, c.arg[3]), run.scratch + norm_bytes(n, rows, team->threads), team, tid);
}

enum { SILU, GELU_TANH, GELU };

// The error function: x * P(x^2) below 1, 1 - exp(-x^2) * Q(1 / (1 + 0.5 |x|)) above (Numerical Recipes' erfc).
V verf(V x) {
    V a = x < 0.0f ? -x : x;
    V z = a * a;
    // 2/sqrt(pi) * sum (-1)^n z^n / (n! (2n+1))
    static const float series[12] = {1.1283791671f, -0.3761263890f, 0.1128379167f, -0.0268661706f,
                                     0.0052239776f, -0.0008548327f, 0.0001205533f, -1.4925650e-5f,
                                     1.6462114e-6f, -1.6365844e-7f, 1.4807193e-8f, -1.2290556e-9f};
    V p = splat(series[11]);
    for (int i = 10; i >= 0; i--) p = fma(p, z, splat(series[i]));
    V near = p * a;
    static const float q[10] = {0.17087277f,  -0.82215223f, 1.48851587f, -1.13520398f, 0.27886807f,
                                -0.18628806f, 0.09678418f,  0.37409196f, 1.00002368f,  -1.26551223f};
    V t = splat(1.0f) / fma(splat(0.5f), a, splat(1.0f));
    V s = splat(q[0]);
    for (int i = 1; i < 10; i++) s = fma(s, t, splat(q[i]));
    V far = splat(1.0f) - t * vexp(s - z);
    V y = a < 1.0f ? near : far;
    return x < 0.0f ? -y : y;
}

V activated(V g, int kind) {
    if (kind == SILU) return g / (splat(1.0f) + vexp(-g));
    if (kind == GELU_TANH) {
        V inner = g * fma(splat(0.044715f) * g, g, splat(1.0f)) * splat(0.7978845608028654f);
        return splat(0.5f) * g * (splat(1.0f) + vtanh(inner));
    }
    return splat(0.5f) * g * (splat(1.0f) + verf(g * splat(0.70710678118654752f)));
}

void gate_part(const float* gate, const float* up, float* y, int64_t first, int64_t end, int kind) {
    int64_t i = first;
    for (; i + W <= end; i += W) store(y + i, activated(load(gate + i), kind) * load(up + i));
    if (i < end) {
        int n = (int)(end - i);
        store_part(y + i, activated(load_part(gate + i, n, 0), kind) * load_part(up + i, n, 0), n);
    }
}

// Pieces of 16 columns are divided, so that few rows occupy all threads too.
void gate_rows(const float* x, int64_t ldx, int rows, int inner, float* y, int64_t ldy, int kind, int threads,
               int tid) {
    const int64_t pieces = (inner + 15) / 16;
    int64_t first, end;
    share(rows * pieces, threads, tid, &first, &end);
    while (first < end) {
        const int64_t row = first / pieces, piece = first % pieces;
        const int64_t last = piece + (end - first) < pieces ? piece + (end - first) : pieces;
        const int64_t stop = last * 16 < inner ? last * 16 : inner;
        gate_part(x + row * ldx, x + row * ldx + inner, y + row * ldy, piece * 16, stop, kind);
        first += last - piece;
    }
}

// arg: gate_up, y. num: kind.
void gated_act(const JkRun& run, const JkCall& c, const JkTeam* team, int tid) {
    const JkArg &ax = c.arg[0], &ay = c.arg[1];
    gate_rows(at<float>(run, ax), ax.stride, rows_of(run, ax), ax.cols / 2, at<float>(run, ay), ay.stride,
              (int)c.num[0], team->threads, tid);
}

// arg: gate_up, bias or none, y. num: kind. ptr: weight.
void act_linear(const JkRun& run, const JkCall& c, const JkTeam* team, int tid) {
    const JkArg &ax = c.arg[0], &ay = c.arg[2];
    const int rows = rows_of(run, ax), inner = ax.cols / 2;
    if (rows == 0) return;
    float* hidden = reinterpret_cast<float*>(run.scratch);
    const int64_t ld = align64(4 * (int64_t)inner) / 4;
    gate_rows(at<float>(run, ax), ax.stride, rows, inner, hidden, ld, (int)c.num[0], team->threads, tid);
    jk_barrier(team, tid);
    jk_linear(static_cast<const JkWeight*>(c.ptr[0]), hidden, ld, rows, at<float>(run, ay), ay.stride,
              at<float>(run, c.arg[1]), run.scratch + rows * ld * 4, team, tid);
}

// arg: ids, y. ptr: table. real: scale.
void embed(const JkRun& run, const JkCall& c, const JkTeam* team, int tid) {
    const int rows = rows_of(run, c.arg[0]);
    if (rows == 0) return;
    jk_embed(static_cast<const JkWeight*>(c.ptr[0]), at<int>(run, c.arg[0]), rows, (float)c.real[0],
             at<float>(run, c.arg[1]), c.arg[1].stride, team, tid);
}

// ---------------------------------------------------------------- the rest

// arg: x, y, sum.
void add(const JkRun& run, const JkCall& c, const JkTeam* team, int tid) {
    const JkArg &ax = c.arg[0], &ay = c.arg[1], &az = c.arg[2];
    const float *x = at<float>(run, ax), *y = at<float>(run, ay);
    float* z = at<float>(run, az);
    int64_t first, end;
    share(rows_of(run, ax), team->threads, tid, &first, &end);
    for (int64_t r = first; r < end; r++) {
        for (int i = 0; i < ax.cols; i++) z[r * az.stride + i] = x[r * ax.stride + i] + y[r * ay.stride + i];
    }
}

// arg: x, rows, y.
void gather_rows(const JkRun& run, const JkCall& c, const JkTeam* team, int tid) {
    const JkArg &ax = c.arg[0], &ay = c.arg[2];
    const char* x = at<char>(run, ax);
    const int32_t* rows = at<int32_t>(run, c.arg[1]);
    char* y = at<char>(run, ay);
    const int64_t bytes = (int64_t)ax.cols * ax.size;
    int64_t first, end;
    share(rows_of(run, c.arg[1]), team->threads, tid, &first, &end);
    for (int64_t r = first; r < end; r++) {
        char* to = y + r * ay.stride * ay.size;
        if (rows[r] < 0)
            memset(to, 0, bytes);
        else
            memcpy(to, x + rows[r] * ax.stride * ax.size, bytes);
    }
}

// arg: q, k, positions, cos_sin, q', k'. num: head size, rot.
void rope(const JkRun& run, const JkCall& c, const JkTeam* team, int tid) {
    const int dim = (int)c.num[0], rot = (int)c.num[1];
    const int32_t* positions = at<int32_t>(run, c.arg[2]);
    const float* table = at<float>(run, c.arg[3]);
    for (int which = 0; which < 2; which++) {
        const JkArg &ax = c.arg[which], &ay = c.arg[4 + which];
        const float* x = at<float>(run, ax);
        float* y = at<float>(run, ay);
        const int heads = ax.cols / dim;
        int64_t first, end;
        share((int64_t)rows_of(run, ax) * heads, team->threads, tid, &first, &end);
        for (int64_t u = first; u < end; u++) {
            const int64_t row = u / heads, offset = u % heads * dim;
            rotate(x + row * ax.stride + offset, table + positions[row] * c.arg[3].stride, dim, rot,
                   y + row * ay.stride + offset);
        }
    }
}

// arg: qkv, q_norm or none, k_norm or none, positions, cos_sin, slots, q. num: query heads, KV heads, head size, rot.
// real: eps. ptr: layer.
void qkv_rope_store(const JkRun& run, const JkCall& c, const JkTeam* team, int tid) {
    const JkArg &ax = c.arg[0], &aq = c.arg[6];
    const int hq = (int)c.num[0], hkv = (int)c.num[1], dim = (int)c.num[2], rot = (int)c.num[3];
    const float *x = at<float>(run, ax), *q_norm = at<float>(run, c.arg[1]), *k_norm = at<float>(run, c.arg[2]);
    const int32_t *positions = at<int32_t>(run, c.arg[3]), *slots = at<int32_t>(run, c.arg[5]);
    const float* table = at<float>(run, c.arg[4]);
    float* q = at<float>(run, aq);
    const JkKVLayer& layer = *static_cast<const JkKVLayer*>(c.ptr[0]);
    const int heads = hq + 2 * hkv;
    int64_t first, end;
    share((int64_t)rows_of(run, ax) * heads, team->threads, tid, &first, &end);
    alignas(64) float normed[kMaxDim], turned[kMaxDim];
    for (int64_t u = first; u < end; u++) {
        const int64_t row = u / heads;
        const int h = (int)(u % heads);
        const float* source = x + row * ax.stride + (int64_t)h * dim;
        if (h >= hq + hkv) {
            store_head(source, layer, true, h - hq - hkv, slots[row]);
            continue;
        }
        if (const float* norm = h < hq ? q_norm : k_norm) {
            norm_row(source, nullptr, norm, (float)c.real[0], dim, normed, nullptr);
            source = normed;
        }
        const float* angles = table + positions[row] * c.arg[4].stride;
        if (h < hq) {
            rotate(source, angles, dim, rot, q + row * aq.stride + (int64_t)h * dim);
        } else if (slots[row] >= 0) {
            rotate(source, angles, dim, rot, turned);
            store_head(turned, layer, false, h - hq, slots[row]);
        }
    }
}

// arg: k, v, slots. ptr: layer.
void store_kv(const JkRun& run, const JkCall& c, const JkTeam* team, int tid) {
    const JkKVLayer& layer = *static_cast<const JkKVLayer*>(c.ptr[0]);
    const int32_t* slots = at<int32_t>(run, c.arg[2]);
    int64_t first, end;
    share((int64_t)rows_of(run, c.arg[2]) * layer.heads, team->threads, tid, &first, &end);
    for (int64_t u = first; u < end; u++) {
        const int64_t row = u / layer.heads;
        const int h = (int)(u % layer.heads);
        for (int which = 0; which < 2; which++) {
            const JkArg& a = c.arg[which];
            store_head(at<float>(run, a) + row * a.stride + h * layer.dim, layer, which == 1, h, slots[row]);
        }
    }
}

// arg: slots, k, v. ptr: layer.
void read_kv(const JkRun& run, const JkCall& c, const JkTeam* team, int tid) {
    const JkKVLayer& layer = *static_cast<const JkKVLayer*>(c.ptr[0]);
    const int32_t* slots = at<int32_t>(run, c.arg[0]);
    int64_t first, end;
    share((int64_t)rows_of(run, c.arg[0]) * layer.heads, team->threads, tid, &first, &end);
    for (int64_t u = first; u < end; u++) {
        const int64_t row = u / layer.heads;
        const int h = (int)(u % layer.heads);
        for (int which = 0; which < 2; which++) {
            const JkArg& a = c.arg[1 + which];
            read_head(layer, which == 1, h, slots[row],
                      at<char>(run, a) + (row * a.stride + (int64_t)h * layer.dim) * a.size);
        }
    }
}

}  // namespace

extern "C" void JK_FN(jk_row_ops)(JkOps* ops) {
    ops->fn[JK_OP_EMBED] = embed;
    ops->fn[JK_OP_RMS_NORM] = rms_norm;
    ops->fn[JK_OP_ADD_RMS_NORM] = add_rms_norm;
    ops->fn[JK_OP_ADD] = add;
    ops->fn[JK_OP_LINEAR] = linear;
    ops->fn[JK_OP_ROPE] = rope;
    ops->fn[JK_OP_GATED_ACT] = gated_act;
    ops->fn[JK_OP_STORE_KV] = store_kv;
    ops->fn[JK_OP_READ_KV] = read_kv;
    ops->fn[JK_OP_GATHER_ROWS] = gather_rows;
    ops->fn[JK_OP_NORM_LINEAR] = norm_linear;
    ops->fn[JK_OP_ACT_LINEAR] = act_linear;
    ops->fn[JK_OP_QKV_ROPE_STORE] = qkv_rope_store;
}
