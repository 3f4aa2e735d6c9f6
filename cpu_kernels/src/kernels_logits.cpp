// Ops on rows of logits: edits, masks, sampling, log-probabilities. A row's result depends on nothing beside it.
#include <math.h>
#include <string.h>

#include <algorithm>

#include "call.h"
#include "logits.h"
#include "simd.h"

namespace {

// arg: logits, row, id, factor, bias.
void edit_logits(const JkRun& run, const JkCall& c, const JkTeam* team, int tid) {
    float* z = at<float>(run, c.arg[0]);
    const int32_t *row = at<int32_t>(run, c.arg[1]), *id = at<int32_t>(run, c.arg[2]);
    const float *factor = at<float>(run, c.arg[3]), *bias = at<float>(run, c.arg[4]);
    int64_t first, end;
    share(rows_of(run, c.arg[1]), team->threads, tid, &first, &end);
    for (int64_t e = first; e < end; e++) {
        if (row[e] < 0) continue;
        float& x = z[row[e] * c.arg[0].stride + id[e]];
        x = (x > 0 ? x / factor[e] : x * factor[e]) + bias[e];
    }
}

// arg: logits, bitmask.
void mask_logits(const JkRun& run, const JkCall& c, const JkTeam* team, int tid) {
    float* z = at<float>(run, c.arg[0]);
    const uint32_t* mask = at<uint32_t>(run, c.arg[1]);
    const int columns = c.arg[0].cols, words = (columns + 31) / 32;
    int64_t first, end;
    share((int64_t)rows_of(run, c.arg[0]) * words, team->threads, tid, &first, &end);
    for (int64_t u = first; u < end; u++) {
        const int64_t row = u / words;
        const int word = (int)(u % words), stop = std::min(32, columns - 32 * word);
        const uint32_t bits = mask[row * c.arg[1].stride + word];
        if (bits == 0xFFFFFFFFu) continue;
        float* x = z + row * c.arg[0].stride + 32 * word;
        for (int i = 0; i < stop; i++) {
            if (!(bits >> i & 1)) x[i] = -INFINITY;
        }
    }
}

// ---------------------------------------------------------------- the largest

// The largest of z and where it first stands; id -1 where a NaN stands anywhere.
JkBest best_of(const float* z, int n) {
    V top = splat(-INFINITY);
    I bad = {};
    int i = 0;
    for (; i + W <= n; i += W) {
        V x = load(z + i);
        bad |= (I)(x != x);
        top = vmax(top, x);
    }
    if (i < n) {
        V x = load_part(z + i, n - i, -INFINITY);
        bad |= (I)(x != x);
        top = vmax(top, x);
    }
    for (int lane = 0; lane < W; lane++) {
        if (bad[lane]) return {NAN, -1};
    }
    const float most = hmax(top);
    for (i = 0; z[i] != most; i++) {
    }
    return {most, i};
}

// Order-preserving: a < b as floats where key(a) < key(b).
uint32_t key_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The k-th largest of n (1 <= k <= n, no NaN); keys: room for n.
float kth_largest(const float* z, int n, int k, uint32_t* keys) {
    constexpr int kBits = 11;
    int counts[1 << kBits] = {};
    for (int i = 0; i < n; i++) counts[key_of(z[i]) >> (32 - kBits)]++;
    int bin = (1 << kBits) - 1;
    while (counts[bin] < k) k -= counts[bin--];
    int found = 0;
    for (int i = 0; i < n; i++) {
        const uint32_t key = key_of(z[i]);
        if ((int)(key >> (32 - kBits)) == bin) keys[found++] = key;
    }
    std::nth_element(keys, keys + (k - 1), keys + found, [](uint32_t a, uint32_t b) { return a > b; });
    const uint32_t key = keys[k - 1], bits = key & 0x80000000u ? key & 0x7FFFFFFFu : ~key;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

// The ids of the k largest, ascending; of equals at the edge the lowest.
void largest(const float* z, int n, int k, uint32_t* keys, int* ids) {
    if (k == 0) return;
    const float edge = kth_largest(z, n, k, keys);
    int above = 0;
    for (int i = 0; i < n; i++) above += z[i] > edge;
    int equal = k - above, found = 0;
    for (int i = 0; i < n && found < k; i++) {
        if (z[i] > edge || (z[i] == edge && equal-- > 0)) ids[found++] = i;
    }
}

// ---------------------------------------------------------------- sampling

double total_of(const float* w, int n) {
    D sum = {};
    int i = 0;
    for (; i + W <= n; i += W) sum += __builtin_convertvector(load(w + i), D);
    double total = 0;
    for (int lane = 0; lane < W; lane++) total += sum[lane];
    for (; i < n; i++) total += w[i];
    return total;
}

// The places of the smallest set of the heaviest of n weights that reaches top_p of their sum, ascending; how many.
int nucleus(const float* w, int n, float top_p, uint32_t* keys, int* places) {
    const double target = (double)top_p * total_of(w, n);
    for (int64_t size = 256;; size *= 8) {
        int pool = 0;
        const bool all = size >= n;
        const float edge = all ? 0 : kth_largest(w, n, (int)size, keys);
        for (int i = 0; i < n; i++) {
            if (all || w[i] >= edge) places[pool++] = i;
        }
        std::sort(places, places + pool, [w](int a, int b) { return w[a] != w[b] ? w[a] > w[b] : a < b; });
        double sum = 0;
        int kept = 0;
        while (kept < pool && sum < target) sum += w[places[kept++]];
        if (sum >= target || pool == n) {
            kept = std::max(kept, 1);
            std::sort(places, places + kept);
            return kept;
        }
    }
}

// The first place whose running sum exceeds u * total.
int draw(const float* w, int n, float u) {
    constexpr int kPart = 512;
    const double target = (double)u * total_of(w, n);
    double sum = 0;
    int last = 0;
    for (int first = 0; first < n; first += kPart) {
        const int size = std::min(kPart, n - first);
        const double part = total_of(w + first, size);
        if (sum + part > target) {
            double run = sum;
            for (int i = first; i < first + size; i++) {
                run += w[i];
                if (w[i] > 0) last = i;
                if (run > target) return i;
            }
        }
        sum += part;
        if (part > 0) {
            for (int i = first + size - 1; i >= first; i--) {
                if (w[i] > 0) {
                    last = i;
                    break;
                }
            }
        }
    }
    return last;  // a rounding away from the end: the last that has a weight
}

void exponentials(const float* z, const int* ids, int n, float best, float temperature, float* w) {
    const V top = splat(best), by = splat(temperature);
    for (int i = 0; i < n; i += W) {
        const int part = std::min(W, n - i);
        V x;
        if (ids) {
            float picked[W] = {};
            for (int j = 0; j < part; j++) picked[j] = z[ids[i + j]];
            x = load(picked);
        } else {
            x = part == W ? load(z + i) : load_part(z + i, part, 0);
        }
        V y = vexp((x - top) / by);
        if (part == W)
            store(w + i, y);
        else
            store_part(w + i, y, part);
    }
}

struct Settings {
    float temperature;
    int top_k;
    float top_p, min_p, uniform;
};

// Room for n numbers each.
struct Room {
    float* w;
    uint32_t* keys;
    int *ids, *places;
};

int sampled(const float* z, int n, float best, const Settings& p, const Room& room) {
    const int* ids = nullptr;
    int kept = n;
    if (p.top_k > 0 && p.top_k < n) {
        largest(z, n, kept = p.top_k, room.keys, room.ids);
        ids = room.ids;
    }
    exponentials(z, ids, kept, best, p.temperature, room.w);
    auto keep = [&](int count) {
        // places ascend, so that nothing is overwritten before it is read
        for (int i = 0; i < count; i++) {
            room.w[i] = room.w[room.places[i]];
            room.ids[i] = ids ? ids[room.places[i]] : room.places[i];
        }
        ids = room.ids;
        kept = count;
    };
    if (p.top_p < 1) keep(nucleus(room.w, kept, p.top_p, room.keys, room.places));
    if (p.min_p > 0) {
        int count = 0;
        for (int i = 0; i < kept; i++) {
            if (room.w[i] >= p.min_p) room.places[count++] = i;
        }
        keep(count);
    }
    const int place = draw(room.w, kept, p.uniform);
    return ids ? ids[place] : place;
}

// arg: logits, ids, and where not all rows are greedy temperature, top_k, top_p, min_p, uniforms.
void sample(const JkRun& run, const JkCall& c, const JkTeam* team, int tid) {
    const JkArg& az = c.arg[0];
    const float* z = at<float>(run, az);
    const int n = az.cols, rows = rows_of(run, az);
    const int64_t pieces = (n + kPiece - 1) / kPiece;
    int32_t* ids = at<int32_t>(run, c.arg[1]);
    JkBest* best = reinterpret_cast<JkBest*>(run.scratch);
    int64_t first, end;
    share(rows * pieces, team->threads, tid, &first, &end);
    for (int64_t u = first; u < end; u++) {
        const int from = (int)(u % pieces) * kPiece;
        best[u] = best_of(z + u / pieces * az.stride + from, std::min(kPiece, n - from));
        if (best[u].id >= 0) best[u].id += from;
    }
    jk_barrier(team, tid);
    const float* temperature = at<float>(run, c.arg[2]);
    char* memory = run.scratch + align64(rows * pieces * (int64_t)sizeof(JkBest)) + tid * sample_bytes(n);
    const int64_t each = align64(4 * (int64_t)n);
    Room room{(float*)memory, (uint32_t*)(memory + each), (int*)(memory + 2 * each), (int*)(memory + 3 * each)};
    for (int64_t r; (r = jk_take(team, 1)) < rows;) {
        JkBest found = best[r * pieces];
        for (int64_t piece = 1; piece < pieces && found.id >= 0; piece++) {
            const JkBest& other = best[r * pieces + piece];
            if (other.id < 0 || other.value > found.value) found = other;
        }
        if (found.id < 0 || !std::isfinite(found.value)) {
            ids[r] = -1;
        } else if (!temperature || !(temperature[r] > 0)) {
            ids[r] = found.id;
        } else {
            const Settings p{temperature[r], at<int32_t>(run, c.arg[3])[r], at<float>(run, c.arg[4])[r],
                             at<float>(run, c.arg[5])[r], at<float>(run, c.arg[6])[r]};
            ids[r] = sampled(z + r * az.stride, n, found.value, p, room);
        }
    }
}

// ---------------------------------------------------------------- log-probabilities

double log_sum(const float* z, int n, float best) {
    double sum = 0;
    const V top = splat(best);
    for (int first = 0; first < n; first += 1024) {
        const int end = std::min(n, first + 1024);
        V part = {};
        int i = first;
        for (; i + W <= end; i += W) part += vexp(load(z + i) - top);
        if (i < end) part += vexp(load_part(z + i, end - i, -INFINITY) - top);
        sum += hsum(part);
    }
    return (double)best + log(sum);
}

// arg: logits, ids, chosen, rank, top_ids, top. num: how many best.
void logprobs(const JkRun& run, const JkCall& c, const JkTeam* team, int tid) {
    const JkArg &az = c.arg[0], &at_ids = c.arg[4], &at_top = c.arg[5];
    const int size = az.cols, n = (int)c.num[0], rows = rows_of(run, az);
    const int32_t* ids = at<int32_t>(run, c.arg[1]);
    float* chosen = at<float>(run, c.arg[2]);
    int32_t* rank = at<int32_t>(run, c.arg[3]);
    uint32_t* keys = reinterpret_cast<uint32_t*>(run.scratch + tid * sample_bytes(size));
    for (int64_t r; (r = jk_take(team, 1)) < rows;) {
        const float* z = at<float>(run, az) + r * az.stride;
        int32_t* top_ids = at<int32_t>(run, at_ids) + r * at_ids.stride;
        float* top = at<float>(run, at_top) + r * at_top.stride;
        const JkBest best = best_of(z, size);
        const int id = ids[r];
        const bool inside = id >= 0 && id < size;
        chosen[r] = 0;
        rank[r] = 0;
        if (best.id < 0 || !std::isfinite(best.value)) {
            if (inside) chosen[r] = NAN;
            for (int i = 0; i < n; i++) {
                top_ids[i] = 0;
                top[i] = NAN;
            }
            continue;
        }
        const double lse = log_sum(z, size, best.value);
        if (inside) {
            const float own = z[id];
            int before = 0;
            for (int i = 0; i < size; i++) before += z[i] > own;
            for (int i = 0; i < id; i++) before += z[i] == own;
            chosen[r] = (float)(own - lse);
            rank[r] = before + 1;
        }
        largest(z, size, n, keys, top_ids);
        std::sort(top_ids, top_ids + n, [z](int a, int b) { return z[a] != z[b] ? z[a] > z[b] : a < b; });
        for (int i = 0; i < n; i++) top[i] = (float)(z[top_ids[i]] - lse);
    }
}

}  // namespace

extern "C" void JK_FN(jk_logit_ops)(JkOps* ops) {
    ops->fn[JK_OP_EDIT_LOGITS] = edit_logits;
    ops->fn[JK_OP_MASK_LOGITS] = mask_logits;
    ops->fn[JK_OP_SAMPLE] = sample;
    ops->fn[JK_OP_LOGPROBS] = logprobs;
}
