// y = x w^T with float input: weights dequantised in registers. Part of kernels_linear.cpp.

// Values of L rows, columns ascending, from float tiles.
template <F (*GET)(const void*), int SIZE>
struct FloatColumns {
    static constexpr int COLUMNS = 1;
    static constexpr bool SCALED = false;
    template <class U>
    static inline void line(const uint8_t* w, int lane, F, F, const U& use) {
        use(0, GET(w + lane * SIZE));
    }
    static constexpr int BYTES = TILE * SIZE;
};
inline F get_f32(const void* p) { return f_load(static_cast<const float*>(p)); }
inline F get_f16(const void* p) { return f_half(static_cast<const uint16_t*>(p)); }
inline F get_bf16(const void* p) { return f_brain(static_cast<const uint16_t*>(p)); }

template <int ZERO>
struct FourBitColumns {
    static constexpr int COLUMNS = 8, BYTES = 64;
    static constexpr bool SCALED = true;
    template <class U>
    static inline void line(const uint8_t* w, int lane, F scale, F offset, const U& use) {
        const B v = b_load(w + lane * 4);
        const B half[2] = {b_low(v), b_high(v)};
        for (int h = 0; h < 2; h++) {
            use(4 * h + 0, value(b_byte<0>(half[h]), scale, offset));
            use(4 * h + 1, value(b_byte<1>(half[h]), scale, offset));
            use(4 * h + 2, value(b_byte<2>(half[h]), scale, offset));
            use(4 * h + 3, value(b_byte<3>(half[h]), scale, offset));
        }
    }
    static inline F value(I q, F scale, F offset) {
        F f = f_of(q);
        if (ZERO) f = f_add(f, f_set(-ZERO));
        return f_fma(f, scale, offset);
    }
};
struct EightBitColumns {
    static constexpr int COLUMNS = 4, BYTES = 64;
    static constexpr bool SCALED = true;
    template <class U>
    static inline void line(const uint8_t* w, int lane, F scale, F offset, const U& use) {
        const B v = b_load(w + lane * 4);
        use(0, FourBitColumns<128>::value(b_byte<0>(v), scale, offset));
        use(1, FourBitColumns<128>::value(b_byte<1>(v), scale, offset));
        use(2, FourBitColumns<128>::value(b_byte<2>(v), scale, offset));
        use(3, FourBitColumns<128>::value(b_byte<3>(v), scale, offset));
    }
};

template <class C, int MR>
__attribute__((noinline)) void fma_tile(const Piece& p, int tile, int part, int row) {
    const Segment& s = *p.segment;
    const uint8_t* data = s.data + size_t(tile) * s.tile_bytes;
    const uint8_t* w = data + s.values_at;
    const float* x[MR];
    for (int r = 0; r < MR; r++) x[r] = reinterpret_cast<const float*>(p.x + (row + r) * p.x_stride);
    F acc[MR][1];
    for (int r = 0; r < MR; r++) acc[r][0] = f_zero();
    const int groups = C::SCALED ? s.groups : 1;
    const int lines = (C::SCALED ? s.padded / s.groups : s.columns) / C::COLUMNS;
    int k = 0;
    for (int g = 0; g < groups; g++) {
        F scale = f_zero(), offset = f_zero();
        if (C::SCALED) {
            scale = scale_at(data, s.half, g, part * L);
            if (s.offset) offset = scale_at(data + s.offsets_at, s.half, g, part * L);
        }
        for (int i = 0; i < lines; i++, w += C::BYTES, k += C::COLUMNS) {
            C::line(w, part * L, scale, offset, [&](int j, F v) {
                for (int r = 0; r < MR; r++) acc[r][0] = f_fma(v, f_set(x[r][k + j]), acc[r][0]);
            });
        }
    }
    finish_rows<MR, 1>(p, tile * TILE + part * L, row, acc);
}

template <class C>
void fma_tiles(const Piece& p) {
    for (int t = p.tile; t < p.tile + p.tiles; t++) {
        int row = 0;
        for (; row + 8 <= p.rows; row += 8)
            for (int part = 0; part < PARTS; part++) fma_tile<C, 8>(p, t, part, row);
        for (; row + 2 <= p.rows; row += 2)
            for (int part = 0; part < PARTS; part++) fma_tile<C, 2>(p, t, part, row);
        if (row < p.rows)
            for (int part = 0; part < PARTS; part++) fma_tile<C, 1>(p, t, part, row);
    }
}

void fma_piece(const Piece* p) {
    switch (p->segment->kind) {
        case Kind::U4: return fma_tiles<FourBitColumns<0>>(*p);
        case Kind::I4: return fma_tiles<FourBitColumns<8>>(*p);
        case Kind::I8: return fma_tiles<EightBitColumns>(*p);
        case Kind::F32: return fma_tiles<FloatColumns<get_f32, 4>>(*p);
        case Kind::F16: return fma_tiles<FloatColumns<get_f16, 2>>(*p);
        case Kind::BF16: return fma_tiles<FloatColumns<get_bf16, 2>>(*p);
    }
}
