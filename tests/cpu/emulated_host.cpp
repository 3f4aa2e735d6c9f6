// Runs the native library for a process of another architecture: requests on standard input, answers on standard
// output. Memory is this process's own; the other side allocates it, writes to it and reads from it.
//
// A request is a number of the list below and twelve integers, 8 bytes each. WRITE is followed by its bytes, READ is
// answered by bytes, all else by one integer. Ends at the end of its input.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "jumar_cpu.h"
#include "linear.h"

namespace {

// In the order of FUNCTIONS in tests/support/emulated.py.
enum Function : int64_t {
    ALLOC,
    FREE,
    WRITE,
    READ,
    ISA,
    ISA_RUNS,
    TEAM_NEW,
    TEAM_FREE,
    PACK,
    WEIGHT_FREE,
    WEIGHT_BYTES,
    WEIGHT_ROWS,
    WEIGHT_COLUMNS,
    LINEAR_SCRATCH,
    LINEAR_RUN,
    EMBED_RUN,
    CALL_SCRATCH,
    RUN
};

struct Request {
    int64_t function, arg[12];
};

template <class T>
T* at(int64_t address) {
    return reinterpret_cast<T*>(address);
}

[[noreturn]] void lost() {
    fprintf(stderr, "emulated_host: the other side is gone in the middle of a request\n");
    exit(1);
}

void send(const void* from, size_t bytes) {
    if (fwrite(from, 1, bytes, stdout) != bytes || fflush(stdout)) lost();
}

// The weight, or an error of jk_pack negated.
int64_t pack(const int64_t* a) {
    JkWeight* weight = nullptr;
    const int error = jk_pack(at<JkCanonical>(a[0]), int(a[1]), int(a[2]), int(a[3]), int(a[4]), &weight);
    return error ? -error : reinterpret_cast<int64_t>(weight);
}

int64_t answer(const Request& r) {
    const int64_t* a = r.arg;
    switch (r.function) {
        case ALLOC:
            return reinterpret_cast<int64_t>(aligned_alloc(64, size_t(a[0] + 63) / 64 * 64));
        case FREE:
            free(at<void>(a[0]));
            return 0;
        case WRITE:
            if (fread(at<void>(a[0]), 1, size_t(a[1]), stdin) != size_t(a[1])) lost();
            return 0;
        case ISA:
            return jk_isa();
        case ISA_RUNS:
            return jk_isa_runs(int(a[0]));
        case TEAM_NEW:
            return reinterpret_cast<int64_t>(jk_team_new(int(a[0]), nullptr));
        case TEAM_FREE:
            jk_team_free(at<JkTeam>(a[0]));
            return 0;
        case PACK:
            return pack(a);
        case WEIGHT_FREE:
            jk_weight_free(at<JkWeight>(a[0]));
            return 0;
        case WEIGHT_BYTES:
            return int64_t(jk_weight_bytes(at<JkWeight>(a[0])));
        case WEIGHT_ROWS:
            return jk_weight_rows(at<JkWeight>(a[0]));
        case WEIGHT_COLUMNS:
            return jk_weight_cols(at<JkWeight>(a[0]));
        case LINEAR_SCRATCH:
            return int64_t(jk_linear_scratch(at<JkWeight>(a[0]), int(a[1])));
        case LINEAR_RUN:
            jk_linear_run(at<JkTeam>(a[0]), at<const JkWeight*>(a[1]), int(a[2]), at<float>(a[3]), a[4], int(a[5]),
                          at<float>(a[6]), a[7], at<float>(a[8]), at<void>(a[9]), int(a[10]));
            return 0;
        case EMBED_RUN: {
            float scale;
            memcpy(&scale, &a[4], sizeof scale);
            jk_embed_run(at<JkTeam>(a[0]), at<JkWeight>(a[1]), at<int32_t>(a[2]), int(a[3]), scale, at<float>(a[5]),
                         a[6]);
            return 0;
        }
        case CALL_SCRATCH:
            return jk_call_scratch(at<JkCall>(a[0]), int(a[1]), at<int32_t>(a[2]));
        case RUN:
            return jk_run(at<JkTeam>(a[0]), at<JkCall>(a[1]), int(a[2]), at<int32_t>(a[3]), at<void*>(a[4]),
                          at<void>(a[5]), at<int64_t>(a[6]));
    }
    fprintf(stderr, "emulated_host: no function has the number %lld\n", static_cast<long long>(r.function));
    exit(1);
}

}  // namespace

int main() {
    for (Request r; fread(&r, sizeof r, 1, stdin) == 1;) {
        if (r.function == READ) {
            send(at<void>(r.arg[0]), size_t(r.arg[1]));
            continue;
        }
        const int64_t result = answer(r);
        send(&result, sizeof result);
    }
    return 0;
}
