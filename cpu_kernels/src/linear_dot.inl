// y = x w^T from int8 views. Part of kernels_linear.cpp.
//
// Per block of 32 columns, L rows of w and one row of x: 8 integer products of four columns, one conversion, one
// multiplication (scale of w times scale of x), one multiply-add, one more where w has offsets.

struct Input {
    const int8_t* q;
    const float *scale, *weighted;  // per block: scale, scale times sum
    const int32_t* negated;
};

inline Input input_of(const Segment& s, const uint8_t* row) {
    const size_t at = (size_t(s.padded) + 63) / 64 * 64;
    const float* scale = reinterpret_cast<const float*>(row + at);
    const int blocks = s.padded / s.block;
    return {reinterpret_cast<const int8_t*>(row), scale, scale + blocks,
            reinterpret_cast<const int32_t*>(scale + 2 * blocks)};
}

inline F scale_at(const uint8_t* p, bool half, int g, int lane) {
    const int at = g * TILE + lane;
    return half ? f_half(reinterpret_cast<const uint16_t*>(p) + at) : f_load(reinterpret_cast<const float*>(p) + at);
}

inline void write_lanes(F v, float* y, int valid) {
    if (valid >= L) {
        f_store(y, v);
        return;
    }
    float all[L];
    f_store(all, v);
    for (int i = 0; i < valid; i++) y[i] = all[i];
}

// y = acc (+ the segment's constant) (+ bias), for MR rows and the lanes part*L … of a tile
template <int MR, int NS>
inline void finish_rows(const Piece& p, int tile, int part, int row, const F (&acc)[MR][NS]) {
    const Segment& s = *p.segment;
    for (int n = 0; n < NS; n++) {
        const int column = tile * TILE + (part + n) * L;
        const int valid = s.rows - column;
        if (valid <= 0) continue;
        F more = s.add ? f_load(s.add + column) : f_zero();
        F bias = f_zero();
        if (p.bias) {
            float padded[L] = {};
            for (int i = 0; i < L && i < valid; i++) padded[i] = p.bias[column + i];
            bias = f_load(padded);
        }
        for (int r = 0; r < MR; r++) {
            F v = acc[r][n];
            if (s.add) v = f_add(v, more);
            if (p.bias) v = f_add(v, bias);
            write_lanes(v, p.y + (row + r) * p.ldy + column, valid);
        }
    }
}

struct FourBits {  // lines of 8 columns
    static constexpr int COLUMNS = 8;
    template <class D, int MR>
    static inline void line(const uint8_t* w, D (&dot)[MR], const Input (&x)[MR], int k) {
        const B v = b_load(w);
        const B low = b_low(v), high = b_high(v);
        for (int r = 0; r < MR; r++) dot[r].add(low, x[r].q + k);
        for (int r = 0; r < MR; r++) dot[r].add(high, x[r].q + k + 4);
    }
};
struct EightBits {  // lines of 4 columns
    static constexpr int COLUMNS = 4;
    template <class D, int MR>
    static inline void line(const uint8_t* w, D (&dot)[MR], const Input (&x)[MR], int k) {
        const B v = b_load(w);
        for (int r = 0; r < MR; r++) dot[r].add(v, x[r].q + k);
    }
};

// BLOCK columns share a scale of x; ONE: and of w. NS vectors of outputs (from `part` on), MR rows of x.
template <class Q, class D, int BLOCK, bool ONE, bool OFFSET, int MR, int NS>
__attribute__((noinline)) void dot_tile(const Piece& p, int tile, int part, int row) {
    const Segment& s = *p.segment;
    const uint8_t* data = s.data + size_t(tile) * s.tile_bytes;
    const uint8_t* w = data + s.values_at + part * L * 4;
    const uint8_t* offsets = data + s.offsets_at;
    constexpr int LINES = BLOCK / Q::COLUMNS;
    Input x[MR];
    for (int r = 0; r < MR; r++) x[r] = input_of(s, p.x + (row + r) * p.x_stride);
    F acc[MR][NS];
    for (int r = 0; r < MR; r++)
        for (int n = 0; n < NS; n++) acc[r][n] = f_zero();
    const int per = ONE ? 1 : s.blocks_per_group;
    const bool half = s.half;
    // a row alone is bound by memory: what a core reads runs on through the tiles, so a fixed distance ahead is next
    const uint8_t* ahead = data + 4096;
    const size_t step = MR <= 2 ? (s.tile_bytes / (size_t(s.groups) * per) + 63) / 64 * 64 : 0;
    int b = 0;
    for (int g = 0; g < s.groups; g++) {
        F scale[NS], offset[NS];
        for (int n = 0; n < NS; n++) {
            scale[n] = scale_at(data, half, g, (part + n) * L);
            if (OFFSET) offset[n] = scale_at(offsets, half, g, (part + n) * L);
        }
        for (int j = 0; j < per; j++, b++) {
            if (MR <= 2) {
                for (size_t at = 0; at < step; at += 64) __builtin_prefetch(ahead + at);
                ahead += step;
            }
            for (int n = 0; n < NS; n++) {
                D dot[MR];
                for (int r = 0; r < MR; r++) dot[r].start(x[r].negated + b);
JK_UNROLL
                for (int i = 0; i < LINES; i++) {
                    Q::line(w + i * 64 + n * L * 4, dot, x, b * BLOCK + i * Q::COLUMNS);
                }
                for (int r = 0; r < MR; r++) {
                    const F both = f_mul(scale[n], f_set(x[r].scale[b]));
                    acc[r][n] = f_fma(f_of(dot[r].finish()), both, acc[r][n]);
                    if (OFFSET) acc[r][n] = f_fma(offset[n], f_set(x[r].weighted[b]), acc[r][n]);
                }
            }
            w += LINES * 64;
        }
    }
    finish_rows<MR, NS>(p, tile, part, row, acc);
}

template <class Q, class D, int BLOCK, bool ONE, bool OFFSET>
void dot_tiles(const Piece& p) {
    for (int t = p.tile; t < p.tile + p.tiles; t++) {
        int row = 0;
        for (; row + MANY <= p.rows; row += MANY)
            for (int part = 0; part < PARTS; part++) dot_tile<Q, D, BLOCK, ONE, OFFSET, MANY, 1>(p, t, part, row);
        if (MANY > 4 && row + 4 <= p.rows) {
            for (int part = 0; part < PARTS; part++) dot_tile<Q, D, BLOCK, ONE, OFFSET, 4, 1>(p, t, part, row);
            row += 4;
        }
        if (MANY > 2 && row + 2 <= p.rows) {
            for (int part = 0; part < PARTS; part++) dot_tile<Q, D, BLOCK, ONE, OFFSET, 2, 1>(p, t, part, row);
            row += 2;
        }
        if (row < p.rows) dot_tile<Q, D, BLOCK, ONE, OFFSET, 1, PARTS>(p, t, 0, row);
    }
}

template <class Q, class D, int BLOCK, bool ONE>
void dot_offset(const Piece& p) {
    p.segment->offset ? dot_tiles<Q, D, BLOCK, ONE, true>(p) : dot_tiles<Q, D, BLOCK, ONE, false>(p);
}

template <class Q, class D>
void dot_block(const Piece& p) {
    const Segment& s = *p.segment;
    if (s.block == 16)
        dot_offset<Q, D, 16, false>(p);
    else if (s.blocks_per_group == 1)
        dot_offset<Q, D, 32, true>(p);
    else
        dot_offset<Q, D, 32, false>(p);
}

void dot_piece(const Piece* p) {
    switch (p->segment->kind) {
        case Kind::U4: return dot_block<FourBits, Dot4<-1>>(*p);
        case Kind::I4: return dot_block<FourBits, Dot4<3>>(*p);
        default: break;
    }
#ifdef JK_WIDE_DOT8
    if (p->segment->full_range) return dot_block<EightBits, WideDot8>(*p);
#endif
    dot_block<EightBits, Dot8>(*p);
}
