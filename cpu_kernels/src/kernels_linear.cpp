// Matrix kernels over packed tiles, compiled once for each instruction set: quantised input (integer products, one
// float multiply-add a block and row) and float input (weights dequantised in registers).
//
// One order of accumulation everywhere: blocks (or columns) ascending, in one float accumulator a result. How many rows
// or tiles are computed together changes no bit.
#include "jumar_cpu.h"
#include "linear_lanes.h"
#include "linear_types.h"

using namespace jk;

namespace {

#include "linear_dot.inl"
#include "linear_fma.inl"
#include "linear_view.inl"

// Independent chains of the product that the dot kernels are made of: what this core can do at most.
int64_t peak(int64_t repeat) {
    alignas(64) uint8_t w[64];
    alignas(64) int8_t x[64];
    for (int i = 0; i < 64; i++) w[i] = uint8_t(i % 16), x[i] = int8_t(i % 3);
    constexpr int CHAINS = 12;
    Dot4<-1> dots[CHAINS];
    const int32_t zero = 0;
    for (auto& d : dots) d.start(&zero);
    B v = b_load(w);
    for (int64_t r = 0; r < repeat; r++) {
        for (int c = 0; c < CHAINS; c++) dots[c].add(v, x + 4 * c);
#if defined(JK_ISA_AVX512) || defined(JK_ISA_AVX2)
        asm volatile("" : "+v"(v));
#else
        asm volatile("" : : "r"(&v) : "memory");
#endif
    }
    volatile float keep = 0;
    for (auto& d : dots) {
        float out[L];
        f_store(out, f_of(d.finish()));
        keep = keep + out[0];
    }
    return repeat * CHAINS * L * 4;
}

}  // namespace

extern "C" const LinearKernels JK_FN(jk_linear_kernels);
const LinearKernels JK_FN(jk_linear_kernels) = {prepare, dot_piece, fma_piece, peak};
