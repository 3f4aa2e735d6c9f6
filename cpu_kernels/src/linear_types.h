// What packed weights look like, shared by the packer and the kernels of every instruction set.
//
// A segment is the output rows of one canonical weight, cut into tiles of 16 rows. A tile holds, one after another:
//   scales  [groups][16] half or float    (halves only where every one of the segment is exact)
//   offsets [groups][16] likewise, where the weight has them
//   values  4 bits: lines of 64 bytes = 8 columns; byte 4*row + j holds column j low and column 4 + j high
//           8 bits: lines of 64 bytes = 4 columns; byte 4*row + j holds column j
//           floats: [columns][16]
// Integers are stored unsigned, `zero` added (int4: 8, int8: 128). Columns are padded to whole blocks: a block is what
// shares one scale of the input, 32 columns, or 16 where the group is no multiple of 32.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace jk {

constexpr int TILE = 16;
// How far ahead of what it reads a core asks for weights, where rows are few.
constexpr size_t AHEAD_BYTES = 16 << 10;

enum class Kind : int { U4, I4, I8, F32, F16, BF16 };

// One form of the input, a row of it: GROUPS, ROW, STATIC: int8 values [padded], then per block the scale (float), the
// scale times the sum of the values (float), the sum negated (int32). FLOATS: float32 values [padded].
struct View {
    enum Form : int { GROUPS, ROW, STATIC, FLOATS } form;
    int columns, padded, block;
    const int32_t* perm;  // or null
    float scale;          // STATIC only
    int zero;
    size_t at, bytes;    // of a row: where it starts among the views of a row, and its size
    size_t gathered_at;  // room for the row in float32, in its order and padded
    int blocks() const { return padded / block; }
    size_t scales_at() const { return (size_t(padded) + 63) / 64 * 64; }
};

struct Segment {
    Kind kind;
    int rows, first_row, tiles, first_tile;
    int columns, padded, block, groups, blocks_per_group;
    bool dot;   // integer products with a quantised view; otherwise float32 products
    bool half;  // scales and offsets are halves
    bool offset;
    bool full_range;      // its view may hold -128
    int view;             // -1: x as it is
    const int32_t* perm;  // or null
    const float* add;     // [tiles*16] or null: a constant of each output (static zero points)
    size_t offsets_at, values_at, tile_bytes;
    const uint8_t* data;
};

// Tiles tile … tile+tiles-1 of a segment against `rows` rows of its view (or of x). y and bias point at the segment's
// first output.
struct Piece {
    const Segment* segment;
    int tile, tiles, rows;
    const uint8_t* x;
    size_t x_stride;  // bytes
    float* y;
    int64_t ldy;
    const float* bias;
};

struct LinearKernels {
    void (*view)(const View*, const float* x, uint8_t* out);  // one row
    void (*dot)(const Piece*);
    void (*fma)(const Piece*);
    int64_t (*peak)(int64_t repeat);  // int8 multiply-adds done
};

const LinearKernels* linear_kernels(int isa);

}  // namespace jk
