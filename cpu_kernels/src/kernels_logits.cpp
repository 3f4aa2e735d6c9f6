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
    float top_p, min_p;
};

// Of row r; temperature 0 where no row has any.
Settings settings_of(const JkRun& run, const JkArg* four, int64_t r) {
    const float* temperature = at<float>(run, four[0]);
    if (!temperature) return {};
    return {temperature[r], at<int32_t>(run, four[1])[r], at<float>(run, four[2])[r], at<float>(run, four[3])[r]};
}

// Room for n numbers each.
struct Room {
    float* w;
    uint32_t* keys;
    int *ids, *places;
};

Room room_of(char* memory, int n) {
    const int64_t each = align64(4 * (int64_t)n);
    return {(float*)memory, (uint32_t*)(memory + each), (int*)(memory + 2 * each), (int*)(memory + 3 * each)};
}

// What may be drawn: ids (NULL: all, in order) ascending, and their weights, unnormalised.
struct Kept {
    const int* ids;
    float* w;
    int n;

    int id(int place) const { return ids ? ids[place] : place; }
};

// best: the largest of z, which is finite.
Kept kept_of(const float* z, int n, const JkBest& best, const Settings& p, const Room& room) {
    Kept kept{nullptr, room.w, n};
    if (!(p.temperature > 0)) {
        room.ids[0] = best.id;
        room.w[0] = 1;
        return {room.ids, room.w, 1};
    }
    if (p.top_k > 0 && p.top_k < n) {
        largest(z, n, kept.n = p.top_k, room.keys, room.ids);
        kept.ids = room.ids;
    }
    exponentials(z, kept.ids, kept.n, best.value, p.temperature, room.w);
    auto keep = [&](int count) {
        // places ascend, so that nothing is overwritten before it is read
        for (int i = 0; i < count; i++) {
            room.w[i] = room.w[room.places[i]];
            room.ids[i] = kept.id(room.places[i]);
        }
        kept.ids = room.ids;
        kept.n = count;
    };
    if (p.top_p < 1) keep(nucleus(room.w, kept.n, p.top_p, room.keys, room.places));
    if (p.min_p > 0) {
        int count = 0;
        for (int i = 0; i < kept.n; i++) {
            if (room.w[i] >= p.min_p) room.places[count++] = i;
        }
        keep(count);
    }
    return kept;
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
    const int64_t found_bytes = align64(rows * pieces * (int64_t)sizeof(JkBest));
    const Room room = room_of(run.scratch + found_bytes + tid * sample_bytes(n), n);
    for (int64_t r; (r = jk_take(team, 1)) < rows;) {
        JkBest found = best[r * pieces];
        for (int64_t piece = 1; piece < pieces && found.id >= 0; piece++) {
            const JkBest& other = best[r * pieces + piece];
            if (other.id < 0 || other.value > found.value) found = other;
        }
        const Settings p = settings_of(run, c.arg + 2, r);
        if (found.id < 0 || !std::isfinite(found.value)) {
            ids[r] = -1;
        } else if (!(p.temperature > 0)) {
            ids[r] = found.id;
        } else {
            const Kept kept = kept_of(z + r * az.stride, n, found, p, room);
            ids[r] = kept.id(draw(kept.w, kept.n, at<float>(run, c.arg[6])[r]));
        }
    }
}

// ---------------------------------------------------------------- drafts with probabilities

// Whether the draft x is accepted; otherwise kept.w becomes what is left of p when q is taken off, if anything is.
bool accepts(const Kept& kept, int x, const float* q, float uniform) {
    const double total = total_of(kept.w, kept.n);
    double own = 0;
    if (kept.ids) {
        const int* place = std::lower_bound(kept.ids, kept.ids + kept.n, x);
        if (place != kept.ids + kept.n && *place == x) own = kept.w[place - kept.ids];
    } else {
        own = kept.w[x];
    }
    if ((double)uniform * q[x] < (double)(float)(own / total)) return true;
    bool any = false;
    for (int i = 0; i < kept.n; i++) any |= (float)(kept.w[i] / total) > q[kept.id(i)];
    if (!any) return false;
    for (int i = 0; i < kept.n; i++) kept.w[i] = std::max((float)(kept.w[i] / total) - q[kept.id(i)], 0.0f);
    return false;
}

// arg: logits, draft_ids, draft_probs, row_start, uniforms, accepted, next_id, and where not all rows are greedy
// temperature, top_k, top_p, min_p.
void verify(const JkRun& run, const JkCall& c, const JkTeam* team, int tid) {
    const JkArg &az = c.arg[0], &aq = c.arg[2], &au = c.arg[4];
    const int n = az.cols, sequences = rows_of(run, c.arg[5]);
    const int32_t *drafts = at<int32_t>(run, c.arg[1]), *start = at<int32_t>(run, c.arg[3]);
    const Room room = room_of(run.scratch + tid * sample_bytes(n), n);
    for (int64_t b; (b = jk_take(team, 1)) < sequences;) {
        int accepted = 0, next = -1;
        for (int r = start[b]; r < start[b + 1]; r++) {
            const float* z = at<float>(run, az) + r * az.stride;
            const float* u = at<float>(run, au) + r * au.stride;
            const JkBest best = best_of(z, n);
            if (best.id < 0 || !std::isfinite(best.value)) break;
            const Kept kept = kept_of(z, n, best, settings_of(run, c.arg + 7, r), room);
            const int x = r + 1 < start[b + 1] ? drafts[r] : -1;
            if (x >= 0 && accepts(kept, x, at<float>(run, aq) + r * aq.stride, u[0])) {
                accepted++;
                continue;
            }
            next = kept.id(draw(kept.w, kept.n, u[1]));
            break;
        }
        at<int32_t>(run, c.arg[5])[b] = accepted;
        at<int32_t>(run, c.arg[6])[b] = next;
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
    ops->fn[JK_OP_VERIFY] = verify;
}
