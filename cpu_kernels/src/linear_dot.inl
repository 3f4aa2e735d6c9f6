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

// y = acc (+ the segment's constant) (+ bias), for MR rows and N vectors of outputs from `column` on
template <int MR, int N>
inline void finish_rows(const Piece& p, int column, int row, const F (&acc)[MR][N]) {
    const Segment& s = *p.segment;
    for (int n = 0; n < N; n++, column += L) {
        const int valid = s.rows - column;
        if (valid <= 0) return;
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

// Lines of a block: the values of N vectors of outputs against MR rows of x. What is read of x serves all N.
struct FourBits {  // lines of 8 columns
    static constexpr int COLUMNS = 8;
    template <class D, int MR, int N>
    static inline void line(const uint8_t* const (&w)[N], int at, D (&dot)[MR][N], const Input (&x)[MR], int k) {
        B low[N], high[N];
        for (int n = 0; n < N; n++) {
            const B v = b_load(w[n] + at);
            low[n] = b_low(v);
            high[n] = b_high(v);
        }
        for (int r = 0; r < MR; r++)
            for (int n = 0; n < N; n++) dot[r][n].add(low[n], x[r].q + k);
        for (int r = 0; r < MR; r++)
            for (int n = 0; n < N; n++) dot[r][n].add(high[n], x[r].q + k + 4);
    }
};
struct EightBits {  // lines of 4 columns
    static constexpr int COLUMNS = 4;
    template <class D, int MR, int N>
    static inline void line(const uint8_t* const (&w)[N], int at, D (&dot)[MR][N], const Input (&x)[MR], int k) {
        B v[N];
        for (int n = 0; n < N; n++) v[n] = b_load(w[n] + at);
        for (int r = 0; r < MR; r++)
            for (int n = 0; n < N; n++) dot[r][n].add(v[n], x[r].q + k);
    }
};

// Where the values of a tile lie; those of the next one `stride` bytes behind.
struct Values {
    const uint8_t* base;
    size_t stride;
};

inline Values packed_values(const Segment& s, int tile) {
    return {s.data + size_t(tile) * s.tile_bytes + s.values_at, s.tile_bytes};
}

// BLOCK columns share a scale of x; ONE: and of w. N vectors of outputs (from `part` on; whole tiles where they are
// more than one tile has), MR rows of x.
template <class Q, class D, int BLOCK, bool ONE, bool OFFSET, int MR, int N>
__attribute__((noinline)) void dot_tile(const Piece& p, const Values& v, int tile, int part, int row) {
    const Segment& s = *p.segment;
    const uint8_t* data[N];
    const uint8_t* w[N];
    int lane[N];
    for (int n = 0; n < N; n++) {
        const size_t t = size_t((part + n) / PARTS);
        data[n] = s.data + (size_t(tile) + t) * s.tile_bytes;
        lane[n] = (part + n) % PARTS * L;
        w[n] = v.base + t * v.stride + lane[n] * 4;
    }
    constexpr int LINES = BLOCK / Q::COLUMNS;
    Input x[MR];
    for (int r = 0; r < MR; r++) x[r] = input_of(s, p.x + (row + r) * p.x_stride);
    F acc[MR][N];
    for (int r = 0; r < MR; r++)
        for (int n = 0; n < N; n++) acc[r][n] = f_zero();
    const int per = ONE ? 1 : s.blocks_per_group;
    const bool half = s.half;
    // Few rows are bound by memory: what a core reads runs on through the tiles, so a fixed distance ahead is next. It is
    // asked into the second cache: the first is too small for that distance beside what is in use.
    constexpr int TILES = N > PARTS ? N / PARTS : 1;
    const uint8_t* ahead = data[0] + (TILES > 1 ? TILES * s.tile_bytes : AHEAD_BYTES);
    const bool first = row == 0 && part == 0 && p.rows <= 64;
    const size_t step = first ? (TILES * s.tile_bytes / (size_t(s.groups) * per) + 63) / 64 * 64 : 0;
    int b = 0;
    for (int g = 0; g < s.groups; g++) {
        F scale[N], offset[N];
        for (int n = 0; n < N; n++) {
            scale[n] = scale_at(data[n], half, g, lane[n]);
            if (OFFSET) offset[n] = scale_at(data[n] + s.offsets_at, half, g, lane[n]);
        }
        for (int j = 0; j < per; j++, b++) {
            for (size_t at = 0; at < step; at += 64) __builtin_prefetch(ahead + at, 0, 2);
            ahead += step;
            D dot[MR][N];
            for (int r = 0; r < MR; r++)
                for (int n = 0; n < N; n++) dot[r][n].start(x[r].negated + b);
JK_UNROLL
            for (int i = 0; i < LINES; i++) Q::line(w, b * LINES * 64 + i * 64, dot, x, b * BLOCK + i * Q::COLUMNS);
            for (int r = 0; r < MR; r++) {
                for (int n = 0; n < N; n++) {
                    const F both = f_mul(scale[n], f_set(x[r].scale[b]));
                    acc[r][n] = f_fma(f_of(dot[r][n].finish()), both, acc[r][n]);
                    if (OFFSET) acc[r][n] = f_fma(offset[n], f_set(x[r].weighted[b]), acc[r][n]);
                }
            }
        }
    }
    finish_rows<MR, N>(p, tile * TILE + part * L, row, acc);
}

// All rows against N vectors of outputs.
template <class Q, class D, int BLOCK, bool ONE, bool OFFSET, int N>
void dot_rows(const Piece& p, const Values& v, int tile, int part) {
    int row = 0;
    constexpr int MANY_ROWS = MANY / N, SOME = MANY_ROWS < 4 ? MANY_ROWS : 4, FEW = MANY_ROWS < 2 ? 1 : 2;
    for (; row + MANY_ROWS <= p.rows; row += MANY_ROWS)
        dot_tile<Q, D, BLOCK, ONE, OFFSET, MANY_ROWS, N>(p, v, tile, part, row);
    for (; row + SOME <= p.rows; row += SOME) dot_tile<Q, D, BLOCK, ONE, OFFSET, SOME, N>(p, v, tile, part, row);
    for (; row + FEW <= p.rows; row += FEW) dot_tile<Q, D, BLOCK, ONE, OFFSET, FEW, N>(p, v, tile, part, row);
    if (row < p.rows) dot_tile<Q, D, BLOCK, ONE, OFFSET, 1, N>(p, v, tile, part, row);
}

// From so many rows on, four-bit values are taken apart once for all of them, if two tiles of them find room here.
constexpr int ROWS_TO_UNPACK = 24;
constexpr size_t UNPACKED = 64 << 10;

// Lines of 8 four-bit columns as two lines of 4 columns, a byte each.
inline void unpack(const uint8_t* from, int columns, uint8_t* to) {
    for (int k = 0; k < columns; k += 8, from += 64, to += 128) {
        for (int i = 0; i < 64; i++) {
            to[i] = from[i] & 15;
            to[64 + i] = uint8_t(from[i] >> 4);
        }
    }
}

// TILES tiles, all rows.
template <class Q, class D, int BLOCK, bool ONE, bool OFFSET, int TILES>
void dot_some(const Piece& p, int tile, uint8_t* room) {
    constexpr int N = TILES * PARTS < WIDE ? TILES * PARTS : WIDE;
    const Segment& s = *p.segment;
    const size_t bytes = size_t(s.padded) * TILE;
    if (Q::COLUMNS == 8 && p.rows >= ROWS_TO_UNPACK && TILES * bytes <= UNPACKED) {
        for (int t = 0; t < TILES; t++) unpack(packed_values(s, tile + t).base, s.padded, room + t * bytes);
        for (int part = 0; part < TILES * PARTS; part += N)
            dot_rows<EightBits, D, BLOCK, ONE, OFFSET, N>(p, {room, bytes}, tile, part);
        return;
    }
    for (int part = 0; part < TILES * PARTS; part += N)
        dot_rows<Q, D, BLOCK, ONE, OFFSET, N>(p, packed_values(s, tile), tile, part);
}

template <class Q, class D, int BLOCK, bool ONE, bool OFFSET>
void dot_tiles(const Piece& p) {
    int t = p.tile;
    const int end = p.tile + p.tiles;
    if (p.rows == 1) {
        for (; t < end; t++)
            dot_tile<Q, D, BLOCK, ONE, OFFSET, 1, PARTS>(p, packed_values(*p.segment, t), t, 0, 0);
        return;
    }
    alignas(64) uint8_t room[Q::COLUMNS == 8 ? UNPACKED : 64];
    constexpr int TOGETHER = WIDE > PARTS ? WIDE / PARTS : 1;
    if (TOGETHER > 1)
        for (; t + TOGETHER <= end; t += TOGETHER) dot_some<Q, D, BLOCK, ONE, OFFSET, TOGETHER>(p, t, room);
    for (; t < end; t++) dot_some<Q, D, BLOCK, ONE, OFFSET, 1>(p, t, room);
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
