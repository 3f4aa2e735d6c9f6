"""NumPy reference of the ops on logits: edit, mask, sample, logprobs, verify.

Weights of a distribution are computed in the dtype of the logits and summed in float64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from device.ops import SampleParams

Array = NDArray[Any]

# Rows of logits whose exponentials are held at a time.
_ROWS = 16


def edit_logits(logits: Array, row: Array, id: Array, factor: Array, bias: Array) -> None:
    """In place, for each entry [E]: z > 0 ? z/factor : z·factor, then + bias (which may be -inf). Row -1 is skipped.

    At most one entry for a (row, id).
    """
    live = np.flatnonzero(row >= 0)
    if not live.size:
        return
    r, i, f = row[live], id[live], factor[live]
    z = logits[r, i]
    logits[r, i] = np.where(z > 0, z / f, z * f) + bias[live]


def mask_logits(logits: Array, bitmask: Array) -> None:
    """In place: -inf where bit id % 32 of word id // 32 of bitmask [R, ceil(V/32)] i32 is 0."""
    words = np.ascontiguousarray(bitmask, dtype="<i4").view(np.uint8)
    if not words.size:
        return
    allowed = np.unpackbits(words, axis=1, count=logits.shape[1], bitorder="little")
    np.copyto(logits, -np.inf, where=allowed == 0)


# ---------------------------------------------------------------- sampling


def _largest(z: Array, k: int) -> Array:
    """The ids of the k largest of z, ascending; of equals at the edge the lowest ids."""
    edge = np.partition(z, z.size - k)[z.size - k]
    above = np.flatnonzero(z > edge)
    equal = np.flatnonzero(z == edge)[: k - above.size]
    return np.sort(np.concatenate((above, equal)))


def _nucleus(weights: Array, top_p: float) -> Array:
    """Places (ascending) of the smallest set of the heaviest weights that reaches top_p of their sum; one at least."""
    target = top_p * float(weights.sum(dtype=np.float64))
    size = 256
    while True:
        if size < weights.size:
            # All that equal the edge belong to the pool, so that the lowest ids among equals are found in it.
            pool = np.flatnonzero(weights >= np.partition(weights, weights.size - size)[weights.size - size])
        else:
            pool = np.arange(weights.size)
        order = pool[np.argsort(-weights[pool], kind="stable")]
        sums = np.cumsum(weights[order], dtype=np.float64)
        if sums[-1] >= target or pool.size == weights.size:
            return np.sort(order[: int(np.searchsorted(sums, target, side="left")) + 1])
        size *= 8


def _draw(weights: Array, uniform: float) -> int:
    """The first place whose running sum exceeds uniform · total; a weight of 0 is never drawn."""
    sums = np.cumsum(weights, dtype=np.float64)
    at = int(np.searchsorted(sums, uniform * sums[-1], side="right"))
    if at == sums.size:
        at = int(np.searchsorted(sums, sums[-1], side="left"))
    return at


def kept_weights(
    z: Array, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[Array | None, Array] | None:
    """The kept ids (ascending; None: all) and their weights exp((z - max)/temperature); None if the row has no answer.

    Temperature first, then top_k (0: off), then top_p over what is left (>= 1: off), then min_p relative to the best.
    A row has an answer if its maximum is finite: no NaN, no +inf (an overflow), not all -inf. temperature > 0.
    """
    best = z.max()
    if not np.isfinite(best):
        return None
    ids: Array | None = None
    if 0 < top_k < z.size:
        ids = _largest(z, top_k)
        z = z[ids]
    with np.errstate(over="ignore"):
        w = np.exp((z - best) / z.dtype.type(temperature))
    if top_p < 1:
        kept = _nucleus(w, top_p)
        ids, w = kept if ids is None else ids[kept], w[kept]
    if min_p > 0:
        kept = np.flatnonzero(w >= min_p)
        ids, w = kept if ids is None else ids[kept], w[kept]
    return ids, w


def _greedy(logits: Array) -> Array:
    """[R] i32: the lowest id of the largest logit, -1 where that is not finite."""
    if not logits.shape[0]:
        return np.zeros(0, np.int32)
    ids: Array = np.argmax(logits, axis=1).astype(np.int32)
    ids[~np.isfinite(logits[np.arange(ids.size), ids])] = -1
    return ids


def sample(logits: Array, params: SampleParams | None, uniforms: Array) -> Array:
    """[R,V] -> ids [R] i32: inverse CDF, in order of id, over the kept set (``kept_weights``) at uniforms [R] in [0,1).

    The drawn id is the first whose cumulative weight exceeds u · total. params None, and temperature 0: argmax, the
    lowest id on a tie. -1 where the row's maximum is not finite.
    """
    out = _greedy(logits)
    if params is None:
        return out
    hot = np.flatnonzero(np.asarray(params.temperature) > 0)
    for r in hot.tolist():
        if out[r] < 0:
            continue
        found = kept_weights(logits[r], *_row(params, r))
        assert found is not None
        ids, w = found
        at = _draw(w, float(uniforms[r]))
        out[r] = at if ids is None else ids[at]
    return out


def _row(params: SampleParams, r: int) -> tuple[float, int, float, float]:
    p: Any = params
    return float(p.temperature[r]), int(p.top_k[r]), float(p.top_p[r]), float(p.min_p[r])


def _distribution(z: Array, params: SampleParams | None, r: int) -> Array | None:
    """Probabilities [V] of row r after its parameters; one-hot when greedy; None if the row has no answer."""
    p = np.zeros(z.size, z.dtype)
    if params is None or not _row(params, r)[0] > 0:
        best = int(_greedy(z[None])[0])
        if best < 0:
            return None
        p[best] = 1
        return p
    found = kept_weights(z, *_row(params, r))
    if found is None:
        return None
    ids, w = found
    p[slice(None) if ids is None else ids] = w / w.sum(dtype=np.float64)
    return p


def verify(
    logits: Array,
    draft_ids: Array,
    draft_probs: Array,
    row_start: Array,
    params: SampleParams | None,
    uniforms: Array,
) -> tuple[Array, Array]:
    """Rejection sampling of drafts that came with probabilities -> (accepted [B], next_id [B]) i32.

    Rows row_start[b] … row_start[b+1]-1 are those of sequence b; draft_ids [R] holds what the draft proposed for the
    token that a row predicts, -1 in the last. p: the target's probabilities of a row after ``params`` (as in
    ``sample``), q: draft_probs [R,V]. Draft x is accepted if uniforms[r,0] · q(x) < p(x); at the first refusal the
    next token is drawn at uniforms[r,1] from max(p - q, 0), after the last acceptance from the last row's p at
    uniforms[r,1]. Where max(p - q, 0) has no mass (only by rounding) p takes its place. A row without an answer gives
    next_id -1; so does a sequence without rows.

    Source: Leviathan et al., arXiv 2211.17192, algorithm 1; Chen et al., arXiv 2302.01318.
    """
    starts, drafts = row_start.tolist(), draft_ids.tolist()
    count = len(starts) - 1
    accepted, next_id = np.zeros(count, np.int32), np.full(count, -1, np.int32)
    for b in range(count):
        for r in range(starts[b], starts[b + 1]):
            p = _distribution(logits[r], params, r)
            if p is None:
                break
            x = drafts[r] if r + 1 < starts[b + 1] else -1
            if x >= 0:
                q = draft_probs[r]
                if float(uniforms[r, 0]) * float(q[x]) < float(p[x]):
                    accepted[b] += 1
                    continue
                rest = np.maximum(p - q, 0)
                p = rest if rest.any() else p
            next_id[b] = _draw(p, float(uniforms[r, 1]))
            break
    return accepted, next_id


# ---------------------------------------------------------------- log-probabilities


def logprobs(logits: Array, ids: Array, n: int) -> tuple[Array, Array, Array, Array]:
    """(chosen [R], rank [R] i32, top_ids [R,n] i32, top [R,n]) of log softmax(logits).

    Rank 1 is the most likely; equals rank in order of id, as they stand in top_ids. An id outside [0, V) (-1 is
    padding) gives 0 and rank 0. A row whose maximum is not finite has no answer: NaN, ranks and ids 0. n <= V.
    """
    rows, size = logits.shape
    if n > size:
        raise ValueError(f"{n} best of {size} logits; ask for at most {size}")
    chosen, rank = np.zeros(rows, logits.dtype), np.zeros(rows, np.int32)
    top_ids, top = np.zeros((rows, n), np.int32), np.zeros((rows, n), logits.dtype)
    for a in range(0, rows, _ROWS):
        z = logits[a : a + _ROWS]
        best = z.max(axis=1, keepdims=True)
        with np.errstate(invalid="ignore"):
            lse = best[:, 0] + np.log(np.exp(z - best).sum(axis=1))
        for j in range(z.shape[0]):
            r, id_ = a + j, int(ids[a + j])
            if not np.isfinite(best[j, 0]):
                chosen[r], top[r] = (np.nan if 0 <= id_ < size else 0), np.nan
                continue
            if 0 <= id_ < size:
                own = z[j, id_]
                chosen[r] = own - lse[j]
                rank[r] = 1 + np.count_nonzero(z[j] > own) + np.count_nonzero(z[j, :id_] == own)
            if n:
                found = _largest(z[j], n)
                found = found[np.argsort(-z[j, found], kind="stable")]
                top_ids[r] = found
                top[r] = z[j, found] - lse[j]
    return chosen, rank, top_ids, top
