// The two products of attention over tiles of K and V: scores, and values weighted by them. Compiled once for each
// instruction set; every sum runs in one order, however many queries and tiles are computed together.
#ifndef JUMAR_ATTENTION_PRODUCTS_H
#define JUMAR_ATTENTION_PRODUCTS_H

#include "call.h"
#include "simd.h"

namespace {

constexpr int kSpan = kSpanTiles * JK_LANES;
constexpr int kVecs = JK_LANES / W;  // vectors of a tile

// ---------------------------------------------------------------- the two products

// s[q][t*16 + lane] = sum over d of q[q][d] * k[t][d][lane], in order of d.
template <class L, int NQ, int NT>
void scores(const float* q, int64_t ldq, const typename L::T* const* k, int dim, float* s) {
    V sum[NQ][NT][kVecs];
    for (int i = 0; i < NQ; i++)
        for (int t = 0; t < NT; t++)
            for (int v = 0; v < kVecs; v++) sum[i][t][v] = V{};
    for (int d = 0; d < dim; d++) {
        V kv[NT][kVecs];
        for (int t = 0; t < NT; t++)
            for (int v = 0; v < kVecs; v++) kv[t][v] = L::get(k[t] + d * JK_LANES + v * W);
        for (int i = 0; i < NQ; i++) {
            const V x = splat(q[i * ldq + d]);
            for (int t = 0; t < NT; t++)
                for (int v = 0; v < kVecs; v++) sum[i][t][v] = fma(x, kv[t][v], sum[i][t][v]);
        }
    }
    for (int i = 0; i < NQ; i++)
        for (int t = 0; t < NT; t++)
            for (int v = 0; v < kVecs; v++) store(s + i * kSpan + t * JK_LANES + v * W, sum[i][t][v]);
}

// o[q][d] = sum over tiles and lanes, in order, of p[q][tile*16 + lane] * v[tile][lane][d], for ND vectors of d. more:
// on top of what o holds.
template <class L, int NQ, int ND>
void weighted(const float* p, const typename L::T* const* v, const int* lanes, int tiles, int vdim, float* o,
              int64_t ldo, bool more) {
    V sum[NQ][ND];
    for (int i = 0; i < NQ; i++)
        for (int n = 0; n < ND; n++) sum[i][n] = more ? load(o + i * ldo + n * W) : V{};
    for (int t = 0; t < tiles; t++) {
        const typename L::T* row = v[t];
        const float* weight = p + t * JK_LANES;
        for (int j = 0; j < lanes[t]; j++, row += vdim, weight++) {
            V x[ND];
            for (int n = 0; n < ND; n++) x[n] = L::get(row + n * W);
            for (int i = 0; i < NQ; i++) {
                const V w = splat(weight[i * kSpan]);
                for (int n = 0; n < ND; n++) sum[i][n] = fma(w, x[n], sum[i][n]);
            }
        }
    }
    for (int i = 0; i < NQ; i++)
        for (int n = 0; n < ND; n++) store(o + i * ldo + n * W, sum[i][n]);
}

// As many queries and tiles at a time as the set has registers for.
constexpr int kScoreQ = W == 16 ? 4 : W == 8 ? 4 : 2;
constexpr int kScoreT = W == 16 ? 4 : 1;
constexpr int kValueQ = W == 16 ? 4 : W == 8 ? 3 : 2;
constexpr int kValueD = 4;
constexpr int kValueT = 4;

template <class L, int NT>
void score_queries(const float* q, int64_t ldq, int nq, const typename L::T* const* k, int dim, float* s) {
    int i = 0;
    for (; i + kScoreQ <= nq; i += kScoreQ) scores<L, kScoreQ, NT>(q + i * ldq, ldq, k, dim, s + i * kSpan);
    q += i * ldq;
    s += i * kSpan;
    switch (nq - i) {
        case 3:
            scores<L, 3, NT>(q, ldq, k, dim, s);
            break;
        case 2:
            scores<L, 2, NT>(q, ldq, k, dim, s);
            break;
        case 1:
            scores<L, 1, NT>(q, ldq, k, dim, s);
            break;
    }
}

template <class L>
void score_tiles(const float* q, int64_t ldq, int nq, const typename L::T* const* k, int tiles, int dim, float* s) {
    int t = 0;
    for (; t + kScoreT <= tiles; t += kScoreT) score_queries<L, kScoreT>(q, ldq, nq, k + t, dim, s + t * JK_LANES);
    for (; t < tiles; t++) score_queries<L, 1>(q, ldq, nq, k + t, dim, s + t * JK_LANES);
}

template <class L, int ND>
void value_queries(const float* p, int nq, const typename L::T* const* v, const int* lanes, int tiles, int vdim,
                   float* o, int64_t ldo, bool more) {
    int i = 0;
    for (; i + kValueQ <= nq; i += kValueQ) {
        weighted<L, kValueQ, ND>(p + i * kSpan, v, lanes, tiles, vdim, o + i * ldo, ldo, more);
    }
    p += i * kSpan;
    o += i * ldo;
    switch (nq - i) {
        case 3:
            weighted<L, 3, ND>(p, v, lanes, tiles, vdim, o, ldo, more);
            break;
        case 2:
            weighted<L, 2, ND>(p, v, lanes, tiles, vdim, o, ldo, more);
            break;
        case 1:
            weighted<L, 1, ND>(p, v, lanes, tiles, vdim, o, ldo, more);
            break;
    }
}

template <class L>
void value_tiles(const float* p, int nq, const typename L::T* const* v, const int* lanes, int tiles, int vdim, float* o,
                 int64_t ldo) {
    const typename L::T* part[kSpanTiles];
    for (int d = 0; d < vdim;) {
        for (int t = 0; t < tiles; t++) part[t] = v[t] + d;
        const bool many = vdim - d >= kValueD * W;
        // so many tiles that they stay in a core's first cache while all queries go over them
        for (int t = 0; t < tiles; t += kValueT) {
            const int n = tiles - t < kValueT ? tiles - t : kValueT;
            const float* weights = p + t * JK_LANES;
            if (many)
                value_queries<L, kValueD>(weights, nq, part + t, lanes + t, n, vdim, o + d, ldo, t > 0);
            else
                value_queries<L, 1>(weights, nq, part + t, lanes + t, n, vdim, o + d, ldo, t > 0);
        }
        d += many ? kValueD * W : W;
    }
}

}  // namespace

#endif
