// Which instruction set the kernels run with.
#include <stdlib.h>
#include <string.h>

#include <initializer_list>

#include "jumar_cpu.h"

#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace {

const char* const kNames[JK_ISA_COUNT] = {"baseline", "avx2", "avx512", "neon"};

bool built(int isa) {
    switch (isa) {
#ifdef JK_HAVE_BASELINE
        case JK_BASELINE:
            return true;
#endif
#ifdef JK_HAVE_AVX2
        case JK_AVX2:
            return true;
#endif
#ifdef JK_HAVE_AVX512
        case JK_AVX512:
            return true;
#endif
#ifdef JK_HAVE_NEON
        case JK_NEON:
            return true;
#endif
    }
    return false;
}

int choose() {
    if (const char* name = getenv("JUMAR_TEST_CPU_ISA")) {
        for (int isa = 0; isa < JK_ISA_COUNT; isa++) {
            if (strcmp(name, kNames[isa]) == 0 && jk_isa_runs(isa)) return isa;
        }
        if (*name) return -1;
    }
    for (int isa : {JK_AVX512, JK_AVX2, JK_NEON, JK_BASELINE}) {
        if (jk_isa_runs(isa)) return isa;
    }
    return -1;
}

}  // namespace

extern "C" {

int jk_isa_runs(int isa) {
    if (!built(isa)) return 0;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (isa == JK_AVX2) {
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    }
    if (isa == JK_AVX512) {
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
    }
    return isa == JK_BASELINE;
#elif defined(__aarch64__)
    if (isa == JK_NEON) {
#if defined(__linux__)
        // all that its flags let the compiler use: dot products, half precision, and what ARMv8.2 brings besides
        const unsigned long needed =
            HWCAP_ASIMDDP | HWCAP_FPHP | HWCAP_ASIMDHP | HWCAP_ASIMDRDM | HWCAP_ATOMICS | HWCAP_CRC32;
        return (getauxval(AT_HWCAP) & needed) == needed;
#else
        return 1;  // Apple's all have it
#endif
    }
    return isa == JK_BASELINE;
#else
    return isa == JK_BASELINE;
#endif
}

int jk_isa(void) {
    static const int isa = choose();
    return isa;
}

const char* jk_isa_name(int isa) { return isa < 0 || isa >= JK_ISA_COUNT ? "none" : kNames[isa]; }

}  // extern "C"
