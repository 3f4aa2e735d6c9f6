// Scratch of the ops on logits.
#ifndef JUMAR_LOGITS_H
#define JUMAR_LOGITS_H

#include "call.h"

// The largest of a piece of a row and its id; id -1: a NaN stands in it.
struct JkBest {
    float value;
    int32_t id;
};

namespace {

constexpr int kPiece = 8192;

// Of each thread: four arrays of n numbers.
inline int64_t sample_bytes(int n) { return 4 * align64(4 * (int64_t)n); }

}  // namespace

#endif
