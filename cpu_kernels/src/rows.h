// One head of one row: rotation, and its place in a page.
#ifndef JUMAR_ROWS_H
#define JUMAR_ROWS_H

#include "call.h"
#include "simd.h"

namespace {

constexpr int kMaxDim = 1024;  // head sizes above it are refused when a cache is made

// The first `rot` of x by angles: cos in their first half, sin in the second; the rest is copied.
inline void rotate(const float* x, const float* angles, int dim, int rot, float* y) {
    const int half = rot / 2;
    const float *cos = angles, *sin = angles + half, *x2 = x + half;
    int i = 0;
    for (; i + W <= half; i += W) {
        V a = load(x + i), b = load(x2 + i), c = load(cos + i), s = load(sin + i);
        store(y + i, fma(a, c, -(b * s)));
        store(y + half + i, fma(b, c, a * s));
    }
    for (; i < half; i++) {
        y[i] = x[i] * cos[i] - x2[i] * sin[i];
        y[half + i] = x2[i] * cos[i] + x[i] * sin[i];
    }
    for (i = rot; i < dim; i++) y[i] = x[i];
}

// Where a slot's K or V of one head stands: element d at page + (start + d * step), and its scale.
struct Place {
    char* page;
    int64_t start, step;
    float* scale;
};

inline Place place_of(const JkKVLayer& l, bool value, int head, int slot) {
    const int64_t block = (int64_t)(slot / l.block_size) * l.stride, r = slot % l.block_size;
    char* page = static_cast<char*>(value ? l.v : l.k) + block;
    const int64_t own = (int64_t)head * l.tiles * JK_LANES + r;
    float* scales = value ? l.v_scale : l.k_scale;
    float* scale = scales ? reinterpret_cast<float*>(reinterpret_cast<char*>(scales) + block) + own : nullptr;
    if (value) return {page, own * l.vdim, 1, scale};
    return {page, ((int64_t)head * l.tiles + r / JK_LANES) * l.dim * JK_LANES + r % JK_LANES, JK_LANES, scale};
}

inline void store_head(const float* x, const JkKVLayer& l, bool value, int head, int slot) {
    if (slot < 0) return;
    const Place p = place_of(l, value, head, slot);
    if (l.dtype == JK_KV_F32) {
        float* to = reinterpret_cast<float*>(p.page) + p.start;
        for (int d = 0; d < l.dim; d++) to[d * p.step] = x[d];
    } else if (l.dtype == JK_KV_BF16) {
        uint16_t* to = reinterpret_cast<uint16_t*>(p.page) + p.start;
        for (int d = 0; d < l.dim; d++) to[d * p.step] = to_bf16(x[d]);
    } else if (l.dtype == JK_KV_F16) {
        uint16_t* to = reinterpret_cast<uint16_t*>(p.page) + p.start;
        for (int d = 0; d < l.dim; d++) to[d * p.step] = to_f16(x[d]);
    } else {
        float top = 0;
        for (int d = 0; d < l.dim; d++) top = fabsf(x[d]) > top ? fabsf(x[d]) : top;
        const float scale = top / 127.0f, by = scale == 0 ? 1.0f : scale;
        *p.scale = scale;
        int8_t* to = reinterpret_cast<int8_t*>(p.page) + p.start;
        for (int d = 0; d < l.dim; d++) {
            const float q = rintf(x[d] / by);
            to[d * p.step] = (int8_t)(q > 127 ? 127 : q < -127 ? -127 : q);
        }
    }
}

// As stored; int8 as float32.
inline void read_head(const JkKVLayer& l, bool value, int head, int slot, void* out) {
    const int size = l.dtype == JK_KV_F32 || l.dtype == JK_KV_INT8 ? 4 : 2;
    if (slot < 0) {
        memset(out, 0, (size_t)l.dim * size);
        return;
    }
    const Place p = place_of(l, value, head, slot);
    const void* page = p.page;
    if (l.dtype == JK_KV_INT8) {
        const float scale = *p.scale;
        for (int d = 0; d < l.dim; d++) {
            static_cast<float*>(out)[d] = static_cast<const int8_t*>(page)[p.start + d * p.step] * scale;
        }
    } else if (size == 4) {
        for (int d = 0; d < l.dim; d++)
            static_cast<float*>(out)[d] = static_cast<const float*>(page)[p.start + d * p.step];
    } else {
        for (int d = 0; d < l.dim; d++) {
            static_cast<uint16_t*>(out)[d] = static_cast<const uint16_t*>(page)[p.start + d * p.step];
        }
    }
}

}  // namespace

#endif
