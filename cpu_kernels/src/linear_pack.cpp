// Packing: canonical rows into interleaved tiles, every value written once, read straight from where the file is
// mapped.
#include <stdlib.h>
#include <string.h>

#include <mutex>
#include <new>

#ifdef __linux__
#include <sys/mman.h>
#endif

#include "linear_weight.h"

using namespace jk;

namespace {

size_t up(size_t n, size_t to) { return (n + to - 1) / to * to; }

// Whether v is a half exactly, and its bits.
bool to_half(float v, uint16_t* half) {
    uint32_t bits;
    memcpy(&bits, &v, 4);
    const uint32_t sign = bits >> 16 & 0x8000u, exponent = bits >> 23 & 255u, fraction = bits & 0x7fffffu;
    if (exponent >= 113 && exponent <= 142) {
        *half = uint16_t(sign | (exponent - 112) << 10 | fraction >> 13);
        return (fraction & 0x1fffu) == 0;
    }
    *half = uint16_t(sign);
    if ((bits & 0x7fffffffu) == 0) return true;
    if (exponent < 103 || exponent > 112) return false;
    const uint32_t full = fraction | 0x800000u,
                   shift = 126 - exponent;  // subnormal: full * 2^(exponent-150) = h * 2^-24
    *half = uint16_t(sign | full >> shift);
    return (full & ((1u << shift) - 1)) == 0;
}

bool all_half(const float* p, int64_t stride, int64_t n, int64_t groups) {
    uint16_t h;
    for (int64_t i = 0; i < n; i++)
        for (int64_t g = 0; g < groups; g++)
            if (!to_half(p[i * stride + g], &h)) return false;
    return true;
}

const uint8_t* source_row(const JkCanonical& c, int64_t row) {
    return static_cast<const uint8_t*>(c.q) + row * c.q_stride;
}

// Two nibbles a byte in order of columns -> low nibbles columns 0..3, high nibbles 4..7 of each eight; int4 gets + 8.
void pack_four_bits(const Segment& s, const JkCanonical& c, int64_t first, int valid, uint8_t* values) {
    const uint32_t flip = s.kind == Kind::I4 ? 0x88888888u : 0u;
    const int whole = s.columns / 8, rest = s.columns % 8 / 2;
    for (int lane = 0; lane < valid; lane++) {
        const uint8_t* from = source_row(c, first + lane);
        for (int i = 0; i < whole + (rest ? 1 : 0); i++) {
            uint32_t v = 0;
            memcpy(&v, from + 4 * i, i < whole ? 4 : size_t(rest));
            v ^= flip;
            const uint32_t even = v & 0x0f0f0f0fu, odd = v >> 4 & 0x0f0f0f0fu;
            // bytes 0, 1 of even and odd are columns 0 2, 1 3; bytes 2, 3 are columns 4 6, 5 7
            const uint32_t low = (even & 0xffu) | (odd & 0xffu) << 8 | (even & 0xff00u) << 8 | (odd & 0xff00u) << 16;
            const uint32_t he = even >> 16, ho = odd >> 16;
            const uint32_t high = (he & 0xffu) | (ho & 0xffu) << 8 | (he & 0xff00u) << 8 | (ho & 0xff00u) << 16;
            const uint32_t out = low | high << 4;
            memcpy(values + size_t(i) * 64 + lane * 4, &out, 4);
        }
    }
}

void pack_eight_bits(const Segment& s, const JkCanonical& c, int64_t first, int valid, uint8_t* values) {
    const int whole = s.columns / 4, rest = s.columns % 4;
    for (int lane = 0; lane < valid; lane++) {
        const uint8_t* from = source_row(c, first + lane);
        for (int i = 0; i < whole + (rest ? 1 : 0); i++) {
            uint32_t v = 0;
            memcpy(&v, from + 4 * i, i < whole ? 4 : size_t(rest));
            v ^= 0x80808080u;
            memcpy(values + size_t(i) * 64 + lane * 4, &v, 4);
        }
    }
}

template <class T>
void pack_floats(const Segment& s, const JkCanonical& c, int64_t first, int valid, uint8_t* values) {
    T* out = reinterpret_cast<T*>(values);
    for (int lane = 0; lane < valid; lane++) {
        const uint8_t* from = source_row(c, first + lane);
        for (int k = 0; k < s.columns; k++)
            memcpy(out + size_t(k) * TILE + lane, from + sizeof(T) * size_t(k), sizeof(T));
    }
}

void pack_scales(const Segment& s, const float* from, int64_t stride, int64_t first, int valid, uint8_t* out) {
    for (int lane = 0; lane < valid; lane++) {
        const float* row = from + (first + lane) * stride;
        for (int g = 0; g < s.groups; g++) {
            const size_t at = size_t(g) * TILE + size_t(lane);
            if (s.half) {
                uint16_t h;
                to_half(row[g], &h);
                memcpy(out + 2 * at, &h, 2);
            } else {
                memcpy(out + 4 * at, row + g, 4);
            }
        }
    }
}

void pack_tile(const Segment& s, const JkCanonical& c, int tile, uint8_t* out) {
    const int64_t first = int64_t(tile) * TILE;
    const int valid = int(s.rows - first < TILE ? s.rows - first : TILE);
    uint8_t* values = out + s.values_at;
    switch (s.kind) {
        case Kind::U4:
        case Kind::I4:
            pack_four_bits(s, c, first, valid, values);
            break;
        case Kind::I8:
            pack_eight_bits(s, c, first, valid, values);
            break;
        case Kind::F32:
            pack_floats<uint32_t>(s, c, first, valid, values);
            break;
        case Kind::F16:
        case Kind::BF16:
            pack_floats<uint16_t>(s, c, first, valid, values);
            break;
    }
    if (!s.groups) return;
    pack_scales(s, c.scale, c.scale_stride, first, valid, out);
    if (s.offset) pack_scales(s, c.offset, c.offset_stride, first, valid, out + s.offsets_at);
}

// -scale * zero * sum over columns of w, for the input's zero point: y = s * sum (xq - zero) * w
void pack_add(const Segment& s, const JkCanonical& c, float* add) {
    for (int n = 0; n < s.rows; n++) {
        const uint8_t* row = source_row(c, n);
        double sum = 0;
        for (int k = 0; k < s.columns; k++) {
            int q;
            if (s.kind == Kind::I8) {
                q = static_cast<int8_t>(row[k]);
            } else {
                q = row[k / 2] >> (k % 2 * 4) & 15;
                if (s.kind == Kind::I4) q = (q ^ 8) - 8;
            }
            const int g = int(k / c.group);
            sum += double(q) * double(c.scale[n * c.scale_stride + g]);
            if (s.offset) sum += double(c.offset[n * c.offset_stride + g]);
        }
        add[n] = float(-double(c.act_scale) * c.act_zero * sum);
    }
}

bool kind_of(int dtype, Kind* kind) {
    switch (dtype) {
        case JK_F32:
            *kind = Kind::F32;
            return true;
        case JK_F16:
            *kind = Kind::F16;
            return true;
        case JK_BF16:
            *kind = Kind::BF16;
            return true;
        case JK_I8:
            *kind = Kind::I8;
            return true;
        case JK_I4:
            *kind = Kind::I4;
            return true;
        case JK_U4:
            *kind = Kind::U4;
            return true;
    }
    return false;
}

int plan_segment(const JkCanonical& c, int activations, Segment* s) {
    if (!kind_of(c.dtype, &s->kind)) return JK_PACK_DTYPE;
    if (c.n <= 0 || c.k <= 0 || c.k > INT32_MAX / 2 || c.n > INT32_MAX / 2) return JK_PACK_SHAPE;
    s->rows = int(c.n);
    s->columns = int(c.k);
    s->tiles = int((c.n + TILE - 1) / TILE);
    s->block = 32;
    if (s->kind == Kind::F32 || s->kind == Kind::F16 || s->kind == Kind::BF16) {
        s->padded = s->columns;
        s->tile_bytes = size_t(s->columns) * TILE * (s->kind == Kind::F32 ? 4 : 2);
    } else {
        if (!c.scale || c.group <= 0 || c.k % c.group) return JK_PACK_GROUP;
        if (c.group != c.k && c.group % 16) return JK_PACK_GROUP;
        if (c.group != c.k && c.group % 32) s->block = 16;
        s->groups = int(c.k / c.group);
        s->padded = int(up(size_t(c.k), size_t(s->block)));
        s->blocks_per_group = s->padded / s->block / s->groups;
        s->offset = c.offset != nullptr;
        s->half = all_half(c.scale, c.scale_stride, c.n, s->groups) &&
                  (!s->offset || all_half(c.offset, c.offset_stride, c.n, s->groups));
        const size_t scales = size_t(s->groups) * TILE * (s->half ? 2 : 4);
        s->offsets_at = scales;
        s->values_at = up(scales * (s->offset ? 2 : 1), 64);
        s->tile_bytes = s->values_at + size_t(s->padded) * (s->kind == Kind::I8 ? 16 : 8);
        s->dot = c.activation == JK_ACT_NONE ? activations == JK_ACTIVATIONS_AUTO : c.activation != JK_ACT_AS_IS;
    }
    s->tile_bytes = up(s->tile_bytes, 64);
    return JK_PACK_OK;
}

// The view that a segment takes; one that an earlier segment takes too is shared.
void plan_view(const JkCanonical& c, JkWeight* w, Segment* s) {
    const bool as_is = !s->dot && !c.perm && s->padded == s->columns;
    s->view = -1;
    if (as_is) return;
    View v{};
    v.form = !s->dot                          ? View::FLOATS
             : c.activation == JK_ACT_DYNAMIC ? View::ROW
             : c.activation == JK_ACT_STATIC  ? View::STATIC
                                              : View::GROUPS;
    v.columns = s->columns;
    v.padded = s->padded;
    v.block = s->block;
    v.perm = c.perm;
    if (v.form == View::STATIC) {
        v.scale = c.act_scale;
        v.zero = c.act_zero;
        s->full_range = true;
    }
    for (int i = 0; i < w->n_views; i++) {
        const View& o = w->views[i];
        const bool order =
            o.perm == v.perm || (o.perm && v.perm && memcmp(o.perm, v.perm, sizeof(int32_t) * size_t(c.k)) == 0);
        if (o.form == v.form && o.padded == v.padded && o.block == v.block && o.scale == v.scale && o.zero == v.zero &&
            order) {
            s->view = i;
            return;
        }
    }
    if (v.form == View::FLOATS) {
        v.bytes = up(sizeof(float) * size_t(v.padded), 64);
    } else {
        v.gathered_at = up(v.scales_at() + 12 * size_t(v.blocks()), 64);
        v.bytes = v.gathered_at + (v.perm || v.padded != v.columns ? up(sizeof(float) * size_t(v.padded), 64) : 0);
    }
    v.at = w->view_bytes;
    w->view_bytes += v.bytes;
    s->view = w->n_views;
    w->views[w->n_views++] = v;
}

}  // namespace

namespace jk {

// Weights lie one behind another in slabs of pages of 2 MiB, where the system gives them: a core that streams a model
// then misses no address. A slab is freed with the last of its weights.
struct Slab {
    char* base;
    size_t size, used;
    int weights;
};

namespace {
constexpr size_t LARGE_PAGE = size_t(2) << 20, SLAB = size_t(16) << 20;
std::mutex slabs;
Slab* open_slab = nullptr;

Slab* new_slab(size_t bytes) {
    const size_t size = up(bytes > SLAB / 2 ? bytes : SLAB, LARGE_PAGE);
    void* base = nullptr;
    if (posix_memalign(&base, LARGE_PAGE, size)) return nullptr;
#ifdef __linux__
    madvise(base, size, MADV_HUGEPAGE);
#endif
    Slab* made = new (std::nothrow) Slab{static_cast<char*>(base), size, 0, 0};
    if (!made) free(base);
    return made;
}
}  // namespace

Memory memory_take(size_t bytes) {
    const size_t size = up(bytes, 64);
    std::lock_guard<std::mutex> hold(slabs);
    Slab* slab = open_slab;
    if (!slab || slab->size - slab->used < size) {
        if (!(slab = new_slab(size))) return {nullptr, 0, nullptr};
        if (slab->size - size > LARGE_PAGE) open_slab = slab;  // room for more
    }
    void* base = slab->base + slab->used;
    slab->used += size;
    slab->weights++;
    memset(base, 0, size);
    return {base, size, slab};
}

void memory_give(Memory m) {
    std::lock_guard<std::mutex> hold(slabs);
    if (--m.slab->weights) return;
    if (m.slab == open_slab) open_slab = nullptr;
    free(m.slab->base);
    delete m.slab;
}

}  // namespace jk

extern "C" {

int jk_pack(const JkCanonical* parts, int n_parts, int uses, int activations, int isa, JkWeight** out) {
    if (n_parts < 1 || n_parts > MAX_SEGMENTS) return JK_PACK_SHAPE;
    JkWeight* w = new (std::nothrow) JkWeight();
    if (!w) return JK_PACK_MEMORY;
    size_t bytes = 0, tail = 0, at[MAX_SEGMENTS];
    int error = JK_PACK_OK;
    for (int i = 0; i < n_parts && !error; i++) {
        Segment& s = w->segments[i];
        error = parts[i].k == parts[0].k ? plan_segment(parts[i], activations, &s) : JK_PACK_SHAPE;
        if (error) break;
        plan_view(parts[i], w, &s);
        s.first_row = int(w->rows);
        s.first_tile = w->tiles;
        w->rows += s.rows;
        w->tiles += s.tiles;
        at[i] = bytes;
        bytes += s.tile_bytes * size_t(s.tiles);
        if (s.full_range && parts[i].act_zero) tail += up(sizeof(float) * TILE * size_t(s.tiles), 64);
        if (parts[i].perm) tail += up(sizeof(int32_t) * size_t(s.columns), 64);
    }
    w->columns = parts[0].k;
    w->n_segments = n_parts;
    w->uses = uses;
    w->kernels = linear_kernels(isa < 0 ? jk_isa() : isa);
    if (!error && !w->kernels) error = JK_PACK_DTYPE;
    // behind the last tile a kernel may ask for what comes next: asking ahead reads nothing, so no room is needed
    if (!error && !(w->memory = memory_take(bytes + tail)).base) error = JK_PACK_MEMORY;
    if (error) {
        delete w;
        return error;
    }
    uint8_t* base = static_cast<uint8_t*>(w->memory.base);
    uint8_t* end = base + bytes;
    for (int i = 0; i < n_parts; i++) {
        Segment& s = w->segments[i];
        s.data = base + at[i];
        for (int t = 0; t < s.tiles; t++) pack_tile(s, parts[i], t, base + at[i] + s.tile_bytes * size_t(t));
        if (s.full_range && parts[i].act_zero) {
            s.add = reinterpret_cast<float*>(end);
            pack_add(s, parts[i], reinterpret_cast<float*>(end));
            end += up(sizeof(float) * TILE * size_t(s.tiles), 64);
        }
        if (parts[i].perm) {
            memcpy(end, parts[i].perm, sizeof(int32_t) * size_t(s.columns));
            s.perm = reinterpret_cast<int32_t*>(end);
            end += up(sizeof(int32_t) * size_t(s.columns), 64);
            if (w->views[s.view].perm == parts[i].perm) w->views[s.view].perm = s.perm;
        }
    }
    *out = w;
    return JK_PACK_OK;
}

void jk_weight_free(JkWeight* w) {
    if (!w) return;
    memory_give(w->memory);
    delete w;
}

size_t jk_weight_bytes(const JkWeight* w) { return w->memory.bytes; }
int64_t jk_weight_rows(const JkWeight* w) { return w->rows; }
int64_t jk_weight_cols(const JkWeight* w) { return w->columns; }

}  // extern "C"
