// A row of x in the form that a segment takes. Plain loops that the compiler turns into vectors; every instruction set
// gives the same bits. Part of kernels_linear.cpp.

inline uint32_t bits_of(float v) {
    uint32_t b;
    memcpy(&b, &v, 4);
    return b;
}
inline float float_of(uint32_t b) {
    float v;
    memcpy(&v, &b, 4);
    return v;
}

constexpr uint32_t INFINITE = 0x7f800000u, ABSOLUTE = 0x7fffffffu;
constexpr float NO_NUMBER = __builtin_nanf("");
// Adding it rounds to an integer, ties to even, which then stands in the low bits.
constexpr float ROUNDER = 12582912.0f;

// Largest magnitude; as bits, so that infinity and NaN are larger than all numbers.
inline __attribute__((always_inline)) int32_t largest(const float* x, int n) {
    int32_t m = 0;
    for (int i = 0; i < n; i++) {
        const int32_t b = int32_t(bits_of(x[i]) & ABSOLUTE);
        m = b > m ? b : m;
    }
    return m;
}

inline __attribute__((always_inline)) int32_t round_block(const float* x, int n, float inverse, int8_t* q) {
    int32_t sum = 0;
    for (int i = 0; i < n; i++) {
        const int32_t v = int32_t(bits_of(x[i] * inverse + ROUNDER)) - int32_t(bits_of(ROUNDER));
        q[i] = int8_t(v);
        sum += v;
    }
    return sum;
}

// As a reference divides, for the forms that a checkpoint asks for: round(x / scale) (+ zero, clipped).
inline int32_t divide_block(const float* x, int n, float scale, int zero, int8_t* q) {
    int32_t sum = 0;
    for (int i = 0; i < n; i++) {
        float v = x[i] / scale;
        v = v > 1024.0f ? 1024.0f : v;
        v = v < -1024.0f ? -1024.0f : v;
        int32_t r = int32_t(bits_of(v + ROUNDER)) - int32_t(bits_of(ROUNDER)) + zero;
        r = r > 127 ? 127 : r;
        r = r < -128 ? -128 : r;
        q[i] = int8_t(r);
        sum += r;
    }
    return sum;
}

// A row whose numbers are not finite gives NaN, not an answer.
inline void write_block(int b, int blocks, float scale, int32_t sum, float* scales) {
    scales[b] = scale;
    scales[blocks + b] = scale * float(sum);
    const int32_t negated = -sum;
    memcpy(scales + 2 * blocks + b, &negated, 4);
}

// N: the columns of a block, known to the compiler, which then leaves no loop.
template <int N>
void quantize_blocks(int blocks, const float* x, int8_t* q, float* scales) {
    for (int b = 0; b < blocks; b++, x += N, q += N) {
        const int32_t top = largest(x, N);
        const float most = float_of(uint32_t(top));
        // below 1e-30 the inverse could overflow; such a block is zero to every result that float32 can show
        const bool zero = !(most > 1e-30f), finite = uint32_t(top) < INFINITE;
        const float inverse = finite && !zero ? 127.0f / most : 0.0f;
        int32_t sum = 0;
        if (finite)
            sum = round_block(x, N, inverse, q);
        else
            memset(q, 0, N);
        write_block(b, blocks, finite ? (zero ? 0.0f : most / 127.0f) : NO_NUMBER, sum, scales);
    }
}

void quantize_groups(const View& v, const float* x, int8_t* q, float* scales) {
    v.block == 32 ? quantize_blocks<32>(v.blocks(), x, q, scales) : quantize_blocks<16>(v.blocks(), x, q, scales);
}

void quantize_row(const View& v, const float* x, int8_t* q, float* scales) {
    const int blocks = v.blocks();
    float scale = v.scale;
    bool good = true;
    const int32_t top = largest(x, v.columns);
    if (v.form == View::ROW) {
        good = uint32_t(top) < INFINITE;
        scale = float_of(uint32_t(top)) / 127.0f;
    } else {
        good = uint32_t(top) <= INFINITE;
    }
    for (int b = 0; b < blocks; b++) {
        const int begin = b * v.block;
        const int n = v.columns - begin < v.block ? v.columns - begin : v.block;
        int32_t sum = 0;
        if (good)
            sum = divide_block(x + begin, n, scale == 0.0f ? 1.0f : scale, v.zero, q + begin);
        else
            memset(q + begin, 0, size_t(n));
        for (int i = n; i < v.block; i++) q[begin + i] = 0;
        write_block(b, blocks, good ? scale : NO_NUMBER, sum, scales);
    }
}

void prepare(const View* view, const float* x, uint8_t* out) {
    const View& v = *view;
    if (v.form == View::FLOATS) {
        float* y = reinterpret_cast<float*>(out);
        if (v.perm)
            for (int i = 0; i < v.columns; i++) y[i] = x[v.perm[i]];
        else
            memcpy(y, x, sizeof(float) * size_t(v.columns));
        for (int i = v.columns; i < v.padded; i++) y[i] = 0.0f;
        return;
    }
    const float* from = x;
    if (v.perm || v.padded != v.columns) {  // gathered behind the view itself: its room is counted in v.bytes
        float* gathered = reinterpret_cast<float*>(out + v.gathered_at);
        for (int i = 0; i < v.columns; i++) gathered[i] = x[v.perm ? v.perm[i] : i];
        for (int i = v.columns; i < v.padded; i++) gathered[i] = 0.0f;
        from = gathered;
    }
    int8_t* q = reinterpret_cast<int8_t*>(out);
    float* scales = reinterpret_cast<float*>(out + v.scales_at());
    if (v.form == View::GROUPS)
        quantize_groups(v, from, q, scales);
    else
        quantize_row(v, from, q, scales);
}
