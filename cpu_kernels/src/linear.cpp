// The matrix ops: views of the input, tiles divided among the threads, rows of a table.
#include "linear.h"

#include <string.h>

#include "linear_weight.h"

using namespace jk;

#define JK_TABLE(set) extern "C" __attribute__((weak)) const LinearKernels jk_linear_kernels_##set
JK_TABLE(baseline);
JK_TABLE(avx2);
JK_TABLE(avx512);
JK_TABLE(neon);

namespace jk {

const LinearKernels* linear_kernels(int isa) {
    if (!jk_isa_runs(isa)) return nullptr;
    switch (isa) {
        case JK_BASELINE:
            return &jk_linear_kernels_baseline;
        case JK_AVX2:
            return &jk_linear_kernels_avx2;
        case JK_AVX512:
            return &jk_linear_kernels_avx512;
        case JK_NEON:
            return &jk_linear_kernels_neon;
    }
    return nullptr;
}

}  // namespace jk

namespace {

// So few bytes of views that each thread makes them for itself: cheaper than to divide the work and wait.
constexpr size_t OWN_VIEWS = 8192;
// Rows of x at a time against a run of tiles: what they take has room in a core's second cache.
constexpr size_t PANEL_BYTES = 256 << 10;
// What a thread takes at a time once its own share is done.
constexpr size_t TAKE_BYTES = 16 << 10;

struct Call {
    const JkWeight* w;
    const float* x;
    int64_t ldx;
    int rows;
    float* y;
    int64_t ldy;
    const float* bias;
    const uint8_t* views;
};

void make_views(const JkWeight& w, const float* x, uint8_t* out) {
    for (int v = 0; v < w.n_views; v++) w.kernels->view(&w.views[v], x, out + w.views[v].at);
}

void segment_tiles(const Call& c, const Segment& s, int first, int end) {
    Piece p{};
    p.segment = &s;
    p.tile = first;
    p.tiles = end - first;
    p.bias = c.bias ? c.bias + s.first_row : nullptr;
    p.ldy = c.ldy;
    const bool own = s.view >= 0;
    const uint8_t* x = own ? c.views + c.w->views[s.view].at : reinterpret_cast<const uint8_t*>(c.x);
    p.x_stride = own ? c.w->view_bytes : sizeof(float) * size_t(c.ldx);
    int panel = int(PANEL_BYTES / (own ? c.w->views[s.view].bytes : sizeof(float) * size_t(s.columns)) / 8 * 8);
    if (panel < 8) panel = 8;
    for (int row = 0; row < c.rows; row += panel) {
        p.rows = c.rows - row < panel ? c.rows - row : panel;
        p.x = x + size_t(row) * p.x_stride;
        p.y = c.y + int64_t(row) * c.ldy + s.first_row;
        (s.dot ? c.w->kernels->dot : c.w->kernels->fma)(&p);
    }
}

void tiles(const Call& c, int first, int end) {
    for (int i = 0; i < c.w->n_segments; i++) {
        const Segment& s = c.w->segments[i];
        const int a = first > s.first_tile ? first - s.first_tile : 0;
        const int b = end - s.first_tile < s.tiles ? end - s.first_tile : s.tiles;
        if (a < b) segment_tiles(c, s, a, b);
    }
}

// Few rows: one run of tiles for each thread, which streams them from memory; a change of place costs more than a
// thread that is late. Many rows: five eighths so, the rest by whoever has time.
void divide(const Call& c, const JkTeam* team, int tid) {
    const int all = c.w->tiles, threads = team->threads;
    if (c.rows <= JK_FEW_ROWS || threads == 1) {
        return tiles(c, int(int64_t(all) * tid / threads), int(int64_t(all) * (tid + 1) / threads));
    }
    const int own = all * 5 / 8 / threads / 2 * 2;  // pairs of tiles are computed together
    if (own) tiles(c, tid * own, (tid + 1) * own);
    const int begin = own * threads, left = all - begin;
    int take = int(TAKE_BYTES / c.w->segments[0].tile_bytes);
    if (take > left / (threads * 2)) take = left / (threads * 2);
    take = take < 2 ? 2 : take / 2 * 2;
    for (;;) {
        const int64_t at = jk_take(team, take);
        if (at >= left) return;
        tiles(c, begin + int(at), begin + int(at + take < left ? at + take : left));
    }
}

// ---------------------------------------------------------------- embedding

float half_value(uint16_t h) {
    const uint32_t magnitude = (h & 0x7fffu) << 13, sign = (h & 0x8000u) << 16;
    float f;
    memcpy(&f, &magnitude, 4);
    f *= 0x1p112f;
    uint32_t bits;
    memcpy(&bits, &f, 4);
    bits |= sign | ((h & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0u);
    memcpy(&f, &bits, 4);
    return f;
}

float number(const uint8_t* p, bool half, size_t at) {
    if (half) {
        uint16_t h;
        memcpy(&h, p + 2 * at, 2);
        return half_value(h);
    }
    float f;
    memcpy(&f, p + 4 * at, 4);
    return f;
}

float float_value(const Segment& s, const uint8_t* values, size_t at) {
    if (s.kind == Kind::F32) return number(values, false, at);
    uint16_t h;
    memcpy(&h, values + 2 * at, 2);
    if (s.kind == Kind::F16) return half_value(h);
    const uint32_t bits = uint32_t(h) << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

int integer_value(const Segment& s, const uint8_t* values, int lane, int k) {
    if (s.kind == Kind::I8) return values[k / 4 * 64 + lane * 4 + k % 4] - 128;
    const int q = values[k / 8 * 64 + lane * 4 + k % 4] >> (k % 8 / 4 * 4) & 15;
    return s.kind == Kind::I4 ? q - 8 : q;
}

// value * scale, then + offset, each rounded: what dequantising in float32 gives, to the bit
void embed_row(const Segment& s, const int32_t* perm, int row, float scale, float* y) {
    const int lane = row % TILE;
    const uint8_t* tile = s.data + size_t(row / TILE) * s.tile_bytes;
    const uint8_t* values = tile + s.values_at;
    if (!s.groups) {
        for (int k = 0; k < s.columns; k++) {
            y[perm ? perm[k] : k] = float_value(s, values, size_t(k) * TILE + size_t(lane)) * scale;
        }
        return;
    }
    const int group = s.columns / s.groups;
    for (int g = 0; g < s.groups; g++) {
        const size_t at = size_t(g) * TILE + size_t(lane);
        const float by = number(tile, s.half, at);
        const float offset = s.offset ? number(tile + s.offsets_at, s.half, at) : 0.0f;
        for (int k = g * group; k < (g + 1) * group; k++) {
            float v = float(integer_value(s, values, lane, k)) * by;
            if (s.offset) v += offset;
            y[perm ? perm[k] : k] = v * scale;
        }
    }
}

const Segment* segment_of(const JkWeight& w, int32_t id) {
    if (id < 0 || id >= w.rows) return nullptr;
    for (int i = w.n_segments - 1; i >= 0; i--)
        if (id >= w.segments[i].first_row) return &w.segments[i];
    return nullptr;
}

}  // namespace

extern "C" {

size_t jk_linear_scratch(const JkWeight* w, int rows) {
    const size_t bytes = w->view_bytes * size_t(rows);
    return bytes <= OWN_VIEWS ? 0 : bytes;
}

void jk_linear(const JkWeight* w, const float* x, int64_t ldx, int rows, float* y, int64_t ldy, const float* bias,
               void* scratch, const JkTeam* team, int tid) {
    if (rows <= 0) return;
    alignas(64) uint8_t own[OWN_VIEWS];
    Call c{w, x, ldx, rows, y, ldy, bias, nullptr};
    if (w->n_views) {
        const bool mine = w->view_bytes * size_t(rows) <= OWN_VIEWS;
        uint8_t* views = mine ? own : static_cast<uint8_t*>(scratch);
        const int first = mine ? 0 : int(int64_t(rows) * tid / team->threads);
        const int end = mine ? rows : int(int64_t(rows) * (tid + 1) / team->threads);
        for (int r = first; r < end; r++) make_views(*w, x + r * ldx, views + size_t(r) * w->view_bytes);
        if (!mine) jk_barrier(team, tid);
        c.views = views;
    }
    divide(c, team, tid);
}

void jk_linear_ahead(const JkWeight* w, int rows, const JkTeam* team, int tid) {
    if (rows > JK_FEW_ROWS) return;
    const int first = int(int64_t(w->tiles) * tid / team->threads);
    for (int i = 0; i < w->n_segments; i++) {
        const Segment& s = w->segments[i];
        if (first < s.first_tile || first >= s.first_tile + s.tiles) continue;
        const uint8_t* data = s.data + size_t(first - s.first_tile) * s.tile_bytes;
        for (size_t at = 0; at < AHEAD_BYTES; at += 64) __builtin_prefetch(data + at, 0, 2);
    }
}

void jk_embed(const JkWeight* w, const int32_t* ids, int rows, float scale, float* y, int64_t ldy, const JkTeam* team,
              int tid) {
    const int first = int(int64_t(rows) * tid / team->threads), end = int(int64_t(rows) * (tid + 1) / team->threads);
    for (int r = first; r < end; r++) {
        float* out = y + r * ldy;
        const Segment* s = segment_of(*w, ids[r]);
        if (!s)
            memset(out, 0, sizeof(float) * size_t(w->columns));
        else
            embed_row(*s, s->perm, ids[r] - s->first_row, scale, out);
    }
}

}  // extern "C"
