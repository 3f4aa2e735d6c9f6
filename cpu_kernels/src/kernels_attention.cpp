// Attention over paged K and V.
//
// A sequence's positions lie in tiles of up to 16 (a block has a whole number of them), kSpanTiles of which are a span,
// counted from the start of the sequence. Within a span weights are relative to the span's maximum, and spans are
// combined in order. None of that depends on which rows, sequences or threads there are: a row's result has the same
// bits in a decode step, in a chunk and beside others. Source of the combination: arXiv 2205.14135.
#include <string.h>

#include "attention_products.h"
#include "call.h"
#include "simd.h"

namespace {

// ---------------------------------------------------------------- a block of queries

// What one thread works with. A result is its maximum, its sum, and from 16 on the weighted values.
struct Space {
    float *q, *s, *part, *total, *pages;
    int64_t ldq, ldr;
};

Space space_of(float* memory, const JkKVLayer& l) {
    Space m;
    m.ldq = align64(4 * (int64_t)l.dim) / 4;
    m.ldr = partial_floats(l.vdim);
    m.q = memory;
    m.s = m.q + kQueries * m.ldq;
    m.part = m.s + kQueries * kSpan;
    m.total = m.part + kQueries * m.ldr;
    m.pages = m.total + kQueries * m.ldr;
    return m;
}

// Rows a … z-1 of a sequence at one KV head, with what each of them sees.
struct Item {
    int b, head, first_row, rows;  // first_row: of the step
    int context;                   // position of the sequence's first row of this step
    int low[kQueries], high[kQueries];
    uint64_t tree[kQueries];  // bits of own rows, from position `context` on
    bool is_tree;
    int least, most;  // over all rows
};

struct Op {
    const JkKVLayer* layer;
    const float* q;
    float* out;
    int64_t ldq, ldo, ld_table;
    const int32_t *q_start, *seq_lens, *table, *tree, *is_tree;
    int sequences, rows, group, window;
    int rows_at_once;
    float scale;
};

int tile_of(const JkKVLayer& l, int position) {
    return position / l.block_size * l.tiles + position % l.block_size / JK_LANES;
}
int tile_start(const JkKVLayer& l, int tile) { return tile / l.tiles * l.block_size + tile % l.tiles * JK_LANES; }
int tile_width(const JkKVLayer& l, int tile) {
    const int rest = l.block_size - tile % l.tiles * JK_LANES;
    return rest < JK_LANES ? rest : JK_LANES;
}

void see(const Op& op, Item& item) {
    const int start = op.q_start[item.b], n = op.q_start[item.b + 1] - start;
    item.context = op.seq_lens[item.b] - n;
    item.is_tree = op.is_tree && op.is_tree[item.b];
    item.least = INT32_MAX;
    item.most = -1;
    for (int i = 0; i < item.rows; i++) {
        const int row = item.first_row + i;
        int own = item.context + row - start;
        item.high[i] = own;
        item.tree[i] = 0;
        if (item.is_tree) {
            auto bits_of = [&](int r) {
                return (uint64_t)(uint32_t)op.tree[2 * r] | (uint64_t)(uint32_t)op.tree[2 * r + 1] << 32;
            };
            auto depth_of = [&](uint64_t bits) { return bits ? __builtin_popcountll(bits) - 1 : 0; };
            const uint64_t valid = n >= 64 ? ~uint64_t{0} : (uint64_t{1} << n) - 1;
            uint64_t bits = bits_of(row) & valid;
            const int depth = depth_of(bits);
            own = item.context + depth;
            item.high[i] = item.context + n - 1;
            if (op.window > 0) {
                for (int j = 0; j < n && j < 64; j++) {
                    if (depth_of(bits_of(start + j) & valid) <= depth - op.window) bits &= ~(uint64_t{1} << j);
                }
            }
            item.tree[i] = bits;
        }
        const int low = op.window > 0 ? own - op.window + 1 : 0;
        item.low[i] = low < 0 ? 0 : low;
        if (item.low[i] < item.least) item.least = item.low[i];
        if (item.high[i] > item.most) item.most = item.high[i];
    }
    if (item.is_tree && item.least > item.context) item.least = item.context;
}

// Which lanes of a tile that starts at `position` a row sees.
uint32_t lanes_seen(const Item& item, int row, int position, int width) {
    const int low = item.low[row], high = item.high[row];
    int from = low - position, to = high - position + 1;
    if (to > width) to = width;
    if (to <= 0) return 0;
    if (!item.is_tree) {
        if (from < 0) from = 0;
        return from >= to ? 0 : ((1u << to) - 1) & ~((1u << from) - 1);
    }
    uint32_t seen = 0;
    for (int lane = 0; lane < to; lane++) {
        const int at = position + lane;
        const bool ok = at < item.context ? at >= low : (item.tree[row] >> (at - item.context)) & 1;
        seen |= (uint32_t)ok << lane;
    }
    return seen;
}

void load_queries(const Op& op, const Item& item, const Space& m) {
    const int dim = op.layer->dim;
    for (int i = 0; i < item.rows; i++) {
        for (int g = 0; g < op.group; g++) {
            const float* q = op.q + (item.first_row + i) * op.ldq + ((int64_t)item.head * op.group + g) * dim;
            float* to = m.q + (i * op.group + g) * m.ldq;
            for (int d = 0; d < dim; d++) to[d] = q[d] * op.scale;
        }
    }
}

template <class T>
const T* in_block(const void* base, int64_t offset) {
    return reinterpret_cast<const T*>(static_cast<const char*>(base) + offset);
}

// Pages that are read by many queries are turned into float32 once.
template <class L>
void widen(const typename L::T* from, int64_t n, float* to) {
    for (int64_t i = 0; i < n; i += W) store(to + i, L::get(from + i));
}

// Maximum and sum of each query's scores; the scores become weights.
void softmax(const Op& op, const Item& item, const Space& m, int tiles, const int* start, const int* width,
             const float* const* v_scale) {
    for (int i = 0; i < item.rows; i++) {
        for (int t = 0; t < tiles; t++) {
            const uint32_t seen = lanes_seen(item, i, start[t], width[t]);
            if (seen == 0xFFFF) continue;
            for (int g = 0; g < op.group; g++) {
                float* s = m.s + (i * op.group + g) * kSpan + t * JK_LANES;
                for (int lane = 0; lane < JK_LANES; lane++) {
                    if (!(seen >> lane & 1)) s[lane] = -INFINITY;
                }
            }
        }
        for (int g = 0; g < op.group; g++) {
            const int query = i * op.group + g;
            float* s = m.s + query * kSpan;
            V top = splat(-INFINITY);
            for (int x = 0; x < tiles * JK_LANES; x += W) {
                const V y = load(s + x);
                top = y > top || y != y ? y : top;
            }
            float most = hmax(top);
            if (most == -INFINITY) most = 0;
            V sum[kVecs];
            for (int v = 0; v < kVecs; v++) sum[v] = V{};
            for (int t = 0; t < tiles; t++) {
                for (int v = 0; v < kVecs; v++) {
                    float* at = s + t * JK_LANES + v * W;
                    V p = vexp(load(at) - splat(most));
                    sum[v] += p;
                    if (v_scale) p *= load(v_scale[t] + v * W);
                    store(at, p);
                }
            }
            for (int v = 1; v < kVecs; v++) sum[0] += sum[v];
            m.part[query * m.ldr] = most;
            m.part[query * m.ldr + 1] = hsum(sum[0]);
        }
    }
}

// The results of one span, into m.part.
template <class L>
void span(const Op& op, const Item& item, const Space& m, int number) {
    typedef typename L::T T;
    const JkKVLayer& l = *op.layer;
    const int nq = item.rows * op.group;
    int first = number * kSpanTiles, last = first + kSpanTiles - 1;
    const int low = tile_of(l, item.least), high = tile_of(l, item.most);
    if (first < low) first = low;
    if (last > high) last = high;
    const int tiles = last - first + 1;
    const T *k[kSpanTiles], *v[kSpanTiles];
    const float *k_scale[kSpanTiles], *v_scale[kSpanTiles];
    int start[kSpanTiles] = {}, width[kSpanTiles] = {}, lanes[kSpanTiles] = {};
    for (int t = 0; t < tiles; t++) {
        const int tile = first + t;
        const int64_t block = op.table[item.b * op.ld_table + tile / l.tiles] * l.stride;
        const int64_t page = (int64_t)item.head * l.tiles + tile % l.tiles;
        k[t] = in_block<T>(l.k, block) + page * l.dim * JK_LANES;
        v[t] = in_block<T>(l.v, block) + page * JK_LANES * l.vdim;
        k_scale[t] = l.k_scale ? in_block<float>(l.k_scale, block) + page * JK_LANES : nullptr;
        v_scale[t] = l.v_scale ? in_block<float>(l.v_scale, block) + page * JK_LANES : nullptr;
        start[t] = tile_start(l, tile);
        width[t] = tile_width(l, tile);
        const int live = item.most - start[t] + 1;
        lanes[t] = live < width[t] ? live : width[t];
    }
    const bool quantised = sizeof(T) == 1;
    const bool wide = sizeof(T) == 4 || nq <= 2 * kScoreQ;
    const float *kf[kSpanTiles], *vf[kSpanTiles];
    if (wide) {
        score_tiles<L>(m.q, m.ldq, nq, k, tiles, l.dim, m.s);
    } else {
        float* to = m.pages;
        for (int t = 0; t < tiles; t++, to += JK_LANES * l.dim) {
            widen<L>(k[t], JK_LANES * l.dim, to);
            kf[t] = to;
        }
        score_tiles<F32>(m.q, m.ldq, nq, kf, tiles, l.dim, m.s);
    }
    if (quantised) {
        for (int query = 0; query < nq; query++) {
            for (int t = 0; t < tiles; t++) {
                for (int x = 0; x < JK_LANES; x += W) {
                    float* at = m.s + query * kSpan + t * JK_LANES + x;
                    store(at, load(at) * load(k_scale[t] + x));
                }
            }
        }
    }
    softmax(op, item, m, tiles, start, width, quantised ? v_scale : nullptr);
    if (wide) {
        value_tiles<L>(m.s, nq, v, lanes, tiles, l.vdim, m.part + 16, m.ldr);
    } else {
        float* to = m.pages + kSpanTiles * JK_LANES * l.dim;
        for (int t = 0; t < tiles; t++, to += JK_LANES * l.vdim) {
            widen<L>(v[t], JK_LANES * l.vdim, to);
            vf[t] = to;
        }
        value_tiles<F32>(m.s, nq, vf, lanes, tiles, l.vdim, m.part + 16, m.ldr);
    }
}

void any_span(const Op& op, const Item& item, const Space& m, int number) {
    switch (op.layer->dtype) {
        case JK_KV_F32:
            span<F32>(op, item, m, number);
            break;
        case JK_KV_BF16:
            span<BF16>(op, item, m, number);
            break;
        case JK_KV_F16:
            span<F16>(op, item, m, number);
            break;
        default:
            span<S8>(op, item, m, number);
    }
}

float exp_of(float x) {
    float y[W];
    store(y, vexp(splat(x)));
    return y[0];
}

void clear(float* total, int vdim) {
    total[0] = -INFINITY;
    total[1] = 0;
    for (int d = 0; d < vdim; d += W) store(total + 16 + d, V{});
}

// A span's result added to those of the spans before it; one that saw nothing leaves them as they are.
void combine(float* total, const float* part, int vdim) {
    if (part[1] == 0) return;
    const float most = total[0] > part[0] ? total[0] : part[0];
    const V a = splat(exp_of(total[0] - most)), b = splat(exp_of(part[0] - most));
    V sum = fma(splat(total[1]), a, splat(part[1]) * b);
    float sums[W];
    store(sums, sum);
    total[0] = most;
    total[1] = sums[0];
    for (int d = 0; d < vdim; d += W) {
        store(total + 16 + d, fma(load(total + 16 + d), a, load(part + 16 + d) * b));
    }
}

void finish(const Op& op, const Item& item, int query, const float* total) {
    const int dim = op.layer->dim;
    float* out = op.out + (item.first_row + query / op.group) * op.ldo +
                 ((int64_t)item.head * op.group + query % op.group) * dim;
    const float sum = total[1];
    if (sum == 0) {
        memset(out, 0, sizeof(float) * dim);
        return;
    }
    for (int d = 0; d < dim; d++) out[d] = total[16 + d] / sum;
}

// ---------------------------------------------------------------- dividing the work

// Goes through the items of a step in order: sequences, in each its rows from the last block on (the longest first),
// in each the KV heads.
struct Walk {
    const Op& op;
    int64_t done = 0;  // items of the sequences before b
    int b = 0;

    int blocks(int seq) const {
        const int n = op.q_start[seq + 1] - op.q_start[seq];
        return n > 0 && op.seq_lens[seq] > 0 ? (n + op.rows_at_once - 1) / op.rows_at_once : 0;
    }
    // Numbers must not fall. False behind the last item.
    bool to(int64_t number, Item* item) {
        for (; b < op.sequences; b++) {
            const int64_t here = (int64_t)blocks(b) * op.layer->heads;
            if (number < done + here) {
                const int block = blocks(b) - 1 - (int)((number - done) / op.layer->heads);
                const int n = op.q_start[b + 1] - op.q_start[b], a = block * op.rows_at_once;
                item->b = b;
                item->head = (int)((number - done) % op.layer->heads);
                item->first_row = op.q_start[b] + a;
                item->rows = n - a < op.rows_at_once ? n - a : op.rows_at_once;
                see(op, *item);
                return true;
            }
            done += here;
        }
        return false;
    }
};

int first_span(const Op& op, const Item& item) { return tile_of(*op.layer, item.least) / kSpanTiles; }
int last_span(const Op& op, const Item& item) { return tile_of(*op.layer, item.most) / kSpanTiles; }

// Every item whole.
void whole_items(const Op& op, const Space& m, const JkTeam* team) {
    Walk walk{op};
    Item item;
    for (int64_t number; walk.to(number = jk_take(team, 1), &item);) {
        const int nq = item.rows * op.group;
        load_queries(op, item, m);
        for (int query = 0; query < nq; query++) clear(m.total + query * m.ldr, op.layer->vdim);
        for (int s = first_span(op, item); s <= last_span(op, item); s++) {
            any_span(op, item, m, s);
            for (int query = 0; query < nq; query++) {
                combine(m.total + query * m.ldr, m.part + query * m.ldr, op.layer->vdim);
            }
        }
        for (int query = 0; query < nq; query++) finish(op, item, query, m.total + query * m.ldr);
    }
}

// Span by span into `partials`, then combined: for few items with long contexts.
void by_spans(const Op& op, const Space& m, float* partials, int64_t items, const JkTeam* team, int tid) {
    Item item;
    int64_t place = 0, unit = 0, mine = jk_take(team, 1);
    {
        Walk walk{op};
        for (int64_t number = 0; number < items; number++) {
            walk.to(number, &item);
            const int nq = item.rows * op.group;
            bool loaded = false;
            for (int s = first_span(op, item); s <= last_span(op, item); s++, unit++, place += nq) {
                if (unit != mine) continue;
                if (!loaded) load_queries(op, item, m);
                loaded = true;
                any_span(op, item, m, s);
                memcpy(partials + place * m.ldr, m.part, sizeof(float) * nq * m.ldr);
                mine = jk_take(team, 1);
            }
        }
    }
    jk_barrier(team, tid);
    place = 0;
    int64_t number_of_query = 0;
    Walk walk{op};
    for (int64_t number = 0; number < items; number++) {
        walk.to(number, &item);
        const int nq = item.rows * op.group, spans = last_span(op, item) - first_span(op, item) + 1;
        for (int query = 0; query < nq; query++) {
            if (number_of_query++ % team->threads != tid) continue;
            clear(m.total, op.layer->vdim);
            for (int s = 0; s < spans; s++) {
                combine(m.total, partials + (place + (int64_t)s * nq + query) * m.ldr, op.layer->vdim);
            }
            finish(op, item, query, m.total);
        }
        place += (int64_t)spans * nq;
    }
}

// How many partial results a division by spans would keep; -1 where it does not pay or they do not fit.
int64_t partial_results(const Op& op, int64_t items, int threads) {
    if (threads == 1 || items >= 4 * (int64_t)threads) return -1;
    Walk walk{op};
    Item item;
    int64_t results = 0;
    int most = 0;
    for (int64_t number = 0; number < items; number++) {
        walk.to(number, &item);
        const int spans = last_span(op, item) - first_span(op, item) + 1;
        results += (int64_t)spans * item.rows * op.group;
        most = spans > most ? spans : most;
    }
    return most > 1 && results <= kPartials ? results : -1;
}

// arg: q, q_start, seq_lens, block_table, tree or none, is_tree or none, out. num: window (0: none). real: scale.
// ptr: layer.
void attention(const JkRun& run, const JkCall& c, const JkTeam* team, int tid) {
    const JkKVLayer& layer = *static_cast<const JkKVLayer*>(c.ptr[0]);
    Op op;
    op.layer = &layer;
    op.q = at<float>(run, c.arg[0]);
    op.ldq = c.arg[0].stride;
    op.rows = rows_of(run, c.arg[0]);
    op.q_start = at<int32_t>(run, c.arg[1]);
    op.seq_lens = at<int32_t>(run, c.arg[2]);
    op.sequences = rows_of(run, c.arg[2]);
    op.table = at<int32_t>(run, c.arg[3]);
    op.ld_table = c.arg[3].stride;
    op.tree = at<int32_t>(run, c.arg[4]);
    op.is_tree = op.tree ? at<int32_t>(run, c.arg[5]) : nullptr;
    op.out = at<float>(run, c.arg[6]);
    op.ldo = c.arg[6].stride;
    op.window = (int)c.num[0];
    op.scale = (float)c.real[0];
    op.group = c.arg[0].cols / (layer.heads * layer.dim);
    op.rows_at_once = op.group >= kQueries ? 1 : kQueries / op.group;
    if (op.sequences == 1 && op.rows_at_once > 1 && op.rows > 1) {
        // A short prompt should occupy all threads.
        const int wanted = (op.rows * layer.heads + 2 * team->threads - 1) / (2 * team->threads);
        if (wanted < op.rows_at_once) op.rows_at_once = wanted < 1 ? 1 : wanted;
    }
    float* memory = reinterpret_cast<float*>(run.scratch);
    const int64_t own = align64(4 * attention_floats(layer.dim, layer.vdim)) / 4;
    const Space m = space_of(memory + own * tid, layer);
    int64_t items = 0;
    {
        Walk walk{op};
        for (int b = 0; b < op.sequences; b++) {
            items += (int64_t)walk.blocks(b) * layer.heads;
            if (tid == 0 && walk.blocks(b) == 0) {
                for (int r = op.q_start[b]; r < op.q_start[b + 1]; r++) {
                    memset(op.out + r * op.ldo, 0, sizeof(float) * c.arg[0].cols);
                }
            }
        }
    }
    if (tid == 0) {
        for (int r = op.sequences ? op.q_start[op.sequences] : 0; r < op.rows; r++) {
            memset(op.out + r * op.ldo, 0, sizeof(float) * c.arg[0].cols);
        }
    }
    if (partial_results(op, items, team->threads) > 0) {
        by_spans(op, m, memory + own * team->threads, items, team, tid);
    } else {
        whole_items(op, m, team);
    }
}

}  // namespace

extern "C" void JK_FN(jk_attention_ops)(JkOps* ops) { ops->fn[JK_OP_ATTENTION] = attention; }
