"""Cases of the ops on logits: edit, mask, sample, logprobs, verify."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from device import reference_sampling as reference
from device.cases import Case, Generator, Params, Profile, Rng, Values, f32, i32, real
from device.ops import SampleParams

BELOW_ONE = 1 - 2.0**-24  # the largest float32 below 1
# How far a case keeps from where its answer would change: far above the rounding of float32, far below what matters.
_MARGIN = 1e-4
_TRIES = 200


def _logits(rng: Rng, rows: int, size: int) -> Values:
    """Peaked like a language model's: a few ids stand out of a broad field. Values that float32 holds."""
    z = 2 * rng.standard_normal((rows, size))
    for r in range(rows):
        z[r, rng.integers(0, size, 6)] += 2 + np.log(size) * rng.uniform(0.5, 1.2, 6)
    return z.astype(np.float32).astype(np.float64)


def _wide(rng: Rng, z: Values, pad: tuple[int, int]) -> Values:
    """Logits with columns before and after that no op may touch."""
    left, right = (rng.standard_normal((z.shape[0], n)).astype(np.float32) for n in pad)
    return np.concatenate((left, z, right), axis=1)


# ---------------------------------------------------------------- edit and mask


def edit_logits(rng: Rng, profile: Profile) -> Iterator[Case]:
    for i, (rows, size, entries) in enumerate(((1, 64, 1), (4, 520, 37), (3, 1000, 300), (2, 8, 16), (2, 32, 0))):
        z = _logits(rng, rows, size)
        pad = (0, 0) if i % 2 == 0 else (3, 5)
        places = rng.permutation(rows * size)[:entries]
        row, ids = places // size, places % size
        factor = np.where(rng.random(entries) < 0.5, 1.0, rng.uniform(0.5, 2.0, entries))
        bias = np.where(rng.random(entries) < 0.3, 0.0, rng.uniform(-20, 20, entries))
        if entries > 2:
            row[1] = -1
            bias[2] = -np.inf
        if entries > 20:
            z[row[5], ids[5]] = 0.0
            z[row[6], ids[6]] = -np.inf
            row[7:11] = -1
        args = {
            "logits": real(_wide(rng, z, pad), "R"),
            "row": i32(row, "E", -1, grows=True),
            "id": i32(ids, "E", grows=True),
            "factor": f32(factor, "E", pad=1.0, grows=True),
            "bias": f32(bias, "E", grows=True),
            "columns": (pad[0], pad[0] + size) if sum(pad) else None,
        }
        extra = {"all_rows": i32(np.arange(rows), "R", -1)}
        yield Case("edit_logits", f"{entries} entries in {rows}x{size}", args, extra, rows="E")


def mask_logits(rng: Rng, profile: Profile) -> Iterator[Case]:
    for i, (rows, size) in enumerate(((1, 64), (5, 520), (3, 1001), (2, 31))):
        z = _logits(rng, rows, size)
        pad = (0, 0) if i % 2 == 0 else (2, 6)
        bits = rng.integers(0, 1 << 32, (rows, -(-size // 32)), dtype=np.uint64).astype(np.uint32)
        if rows > 1:
            bits[1] = 0xFFFFFFFF
        if rows > 2:
            bits[2] = 0
        args = {
            "logits": real(_wide(rng, z, pad), "L"),
            "bitmask": i32(bits.view(np.int32), "R", -1, grows=True),
            "columns": (pad[0], pad[0] + size) if sum(pad) else None,
        }
        extra = {"all_rows": i32(np.arange(rows), "R", -1)}
        yield Case("mask_logits", f"{rows}x{size}", args, extra, rows="R")


# ---------------------------------------------------------------- sample

# (name, temperature, top_k, top_p, min_p)
SETTINGS = (
    ("plain", 1.0, 0, 1.0, 0.0),
    ("hot", 1.7, 0, 1.0, 0.0),
    ("cold", 0.05, 0, 1.0, 0.0),
    ("greedy", 0.0, 5, 0.5, 0.0),
    ("top_k", 1.0, 7, 1.0, 0.0),
    ("top_k 1", 1.3, 1, 1.0, 0.0),
    ("top_k of all", 1.0, 1 << 20, 1.0, 0.0),
    ("top_p", 1.0, 0, 0.9, 0.0),
    ("top_p low", 1.2, 0, 0.001, 0.0),
    ("top_p high", 1.5, 0, 0.995, 0.0),
    ("min_p", 1.5, 0, 1.0, 0.02),
    ("all", 0.8, 40, 0.95, 0.01),
)


def _settings(rows: int, start: int) -> tuple[Values, Values, Values, Values]:
    chosen = [SETTINGS[(start + r) % len(SETTINGS)] for r in range(rows)]
    columns = [np.array([c[j] for c in chosen]) for j in (1, 2, 3, 4)]
    t, k, p, m = columns
    return (
        t.astype(np.float32).astype(np.float64),
        k.astype(np.int32),
        p.astype(np.float32).astype(np.float64),
        m.astype(np.float32).astype(np.float64),
    )


def _host_params(columns: Iterable[Values]) -> SampleParams:
    """Parameters as the reference takes them: host arrays in place of tensors."""
    arrays: Any = tuple(columns)
    return SampleParams(*arrays)


def _nearby(params: SampleParams | None, uniforms: Values) -> Iterator[tuple[SampleParams | None, Values]]:
    """The same question with every real number in it moved by the margin, one at a time."""
    for shift in (_MARGIN, -_MARGIN):
        yield params, np.clip(uniforms + shift, 0, BELOW_ONE)
        if params is not None:
            t, k, p, m = (np.asarray(x) for x in params)
            yield _host_params((t * (1 + shift), k, p, m)), uniforms
            yield _host_params((t, k, np.where(p < 1, np.clip(p + shift, 0, BELOW_ONE), p), m)), uniforms
            yield _host_params((t, k, p, m * (1 + shift))), uniforms


def _steady(
    rng: Rng, ask: Callable[[SampleParams | None, Values], Values], params: SampleParams | None, uniforms: Values
) -> Values:
    """Uniforms (those not 0 or ``BELOW_ONE`` drawn anew where need be) whose answers do not change within the margin.

    ask -> one array, whose first dimension is that of ``uniforms``.
    """
    fixed = (uniforms == 0) | (uniforms == BELOW_ONE)
    for _ in range(_TRIES):
        answer = ask(params, uniforms)
        shaky = np.zeros(answer.shape[0], bool)
        for other, moved in _nearby(params, uniforms):
            differs = ask(other, moved) != answer
            shaky |= differs if differs.ndim == 1 else differs.any(axis=1)
        if not shaky.any():
            return uniforms
        fresh = rng.random(uniforms.shape).astype(np.float32).astype(np.float64)
        again = shaky.reshape(-1, *[1] * (uniforms.ndim - 1)) & ~fixed
        if not again.any():
            break
        uniforms = np.where(again, np.minimum(fresh, BELOW_ONE), uniforms)
    raise ValueError("no steady uniforms found for a sampling case; its logits lie too close together")


def _uniforms(rng: Rng, *shape: int) -> Values:
    return np.minimum(rng.random(shape).astype(np.float32).astype(np.float64), BELOW_ONE)


def _params(columns: tuple[Values, Values, Values, Values]) -> Params:
    t, k, p, m = columns
    return Params(f32(t, "R"), i32(k, "R"), f32(p, "R", pad=1.0), f32(m, "R"))


def sampling_params(rows: Sequence[tuple[float, int, float, float]]) -> Params:
    """(temperature, top_k, top_p, min_p) of each row as an operand."""
    t, k, p, m = (np.array(column) for column in zip(*rows, strict=True))
    return _params((t, k, p, m))


def _sample_case(
    rng: Rng, name: str, z: Values, columns: tuple[Values, Values, Values, Values] | None, uniforms: Values,
    strided: bool = False,
) -> Case:  # fmt: skip
    params = None if columns is None else _host_params(columns)
    uniforms = _steady(rng, lambda p, u: reference.sample(z, p, u), params, uniforms)
    args = {
        "logits": real(z, "R"),
        "params": None if columns is None else _params(columns),
        "uniforms": f32(uniforms, "R"),
    }
    return Case("sample", name, args, strided=strided, rows="R")


def sample(rng: Rng, profile: Profile) -> Iterator[Case]:
    for rows, size in ((1, 64), (5, 520), (3, 1001), (0, 64)):
        yield _sample_case(rng, f"argmax {rows}x{size}", _logits(rng, rows, size), None, _uniforms(rng, rows))
    for i, (rows, size) in enumerate(((12, 64), (12, 520), (12, 1001), (12, 4096), (3, 49152), (1, 17), (0, 64))):
        z = _logits(rng, rows, size)
        columns = _settings(rows, 7 if rows == 3 else i)
        yield _sample_case(rng, f"all settings {rows}x{size}", z, columns, _uniforms(rng, rows), strided=i % 2 == 1)
    yield from _edges(rng)


def _edges(rng: Rng) -> Iterator[Case]:
    size = 96
    # Ids of equal logits: kept in order of id, also where a filter cuts through them.
    tied = np.round(_logits(rng, 12, size)).clip(-3, 3)
    yield _sample_case(rng, "ties", tied, _settings(12, 0), _uniforms(rng, 12))
    greedy = np.zeros((3, size))
    greedy[1, [40, 7, 90]] = 2.5
    greedy[2] = -3
    yield _sample_case(rng, "ties, argmax", greedy, None, _uniforms(rng, 3))

    few = np.full((8, size), -np.inf)
    few[:, [5, 30, 31, 80]] = np.array([1.0, 2.0, 0.5, 1.5])
    ends = np.array([0.0, BELOW_ONE] * 4)
    columns = _settings(8, 0)
    columns[0][:] = 1
    yield _sample_case(rng, "first and last uniform, masked ids", few, columns, ends)

    broken = _logits(rng, 10, size)
    broken[0, 3] = np.nan
    broken[2] = -np.inf
    broken[4] = np.nan
    broken[6, 95] = np.inf
    broken[8, 1:] = -np.inf
    columns = _settings(10, 0)
    columns[0][:] = (1, 1, 1, 1, 0, 1, 0, 0, 1, 1)
    yield _sample_case(rng, "rows without an answer beside rows with one", broken, columns, _uniforms(rng, 10))
    yield _sample_case(rng, "rows without an answer, argmax", broken, None, _uniforms(rng, 10))
    tiny = _settings(4, 0)
    tiny[0][:] = np.float32(1e-6)
    yield _sample_case(rng, "temperature close to 0", _logits(rng, 4, size), tiny, _uniforms(rng, 4))


# ---------------------------------------------------------------- logprobs


def logprobs(rng: Rng, profile: Profile) -> Iterator[Case]:
    for i, (rows, size, n) in enumerate(
        ((1, 64, 0), (4, 520, 5), (3, 1001, 20), (20, 33, 1), (2, 49152, 3), (0, 64, 2))
    ):
        z = _logits(rng, rows, size)
        if i == 1:
            z = np.round(z)  # equals rank in order of id
            z[2, 100:] = -np.inf
        ids = rng.integers(0, size, rows)
        if rows > 2:
            ids[0] = int(np.argmax(z[0]))
            ids[1] = -1
        args = {"logits": real(z, "R"), "ids": i32(ids, "R", -1), "n": n}
        largest = float(np.abs(z[np.isfinite(z)]).max()) if rows else 0.0
        bounds = {"depth": size, "size": largest}
        yield Case("logprobs", f"{n} best of {rows}x{size}", args, strided=i % 2 == 1, rows="R", bounds=bounds)


# ---------------------------------------------------------------- verify


def _draft_case(rng: Rng, name: str, lengths: tuple[int, ...], size: int, start: int | None, strided: bool) -> Case:
    """lengths: rows of each sequence, the last of which has no draft; start: of ``SETTINGS``, None: all greedy."""
    row_start = np.cumsum([0, *lengths]).astype(np.int32)
    rows = int(row_start[-1])
    z = _logits(rng, rows, size)
    columns = None if start is None else _settings(rows, start)
    params = None if columns is None else _host_params(columns)
    # A draft that knows something: the target's logits, disturbed.
    guess = z + 1.5 * rng.standard_normal(z.shape)
    q = np.exp(guess - guess.max(axis=1, keepdims=True)) if rows else guess
    q = (q / q.sum(axis=1, keepdims=True)).astype(np.float32).astype(np.float64)
    # A third each: what the draft likes best, what it likes more than the target does (often refused), a draw.
    p = np.exp(z - z.max(axis=1, keepdims=True)) if rows else z
    kinds = [np.argmax(q, axis=1), np.argmax(q - p / p.sum(axis=1, keepdims=True), axis=1)] if rows else [q[:, 0]] * 2
    kinds.append(np.array([int(rng.choice(size, p=row / row.sum())) for row in q], np.int64))
    drafts = np.choose(rng.integers(0, 3, rows), kinds).astype(np.int32)
    ends = row_start[1:][np.diff(row_start) > 0] - 1
    drafts[ends] = -1

    def ask(p: SampleParams | None, u: Values) -> Values:
        return _each_row(z, drafts, q, row_start, p, u)

    uniforms = _steady(rng, ask, params, _uniforms(rng, rows, 2))
    args: dict[str, Any] = {
        "logits": real(z, "R"),
        "draft_ids": i32(drafts, "R", -1),
        "draft_probs": real(q, "R"),
        "row_start": i32(row_start, "B", "last", extra=1),
        "params": None if columns is None else _params(columns),
        "uniforms": f32(uniforms, "R"),
    }
    return Case("verify", name, args, strided=strided, rows="B")


def _each_row(
    z: Values, drafts: Values, q: Values, row_start: Values, params: SampleParams | None, uniforms: Values
) -> Values:
    """[R, 2]: for every row, reached or not, whether its draft is accepted, and what would be drawn in its place."""
    out = np.zeros((z.shape[0], 2), np.int64)
    for r in range(z.shape[0]):
        # A row on its own and one more behind it, so that its draft is judged; the bonus row is the row itself.
        pair = np.array([drafts[r], -1]) if drafts[r] >= 0 else np.array([-1])
        n = pair.size
        many = None if params is None else _host_params(np.repeat(np.asarray(x)[r : r + 1], n) for x in params)
        accepted, next_id = reference.verify(
            np.repeat(z[r : r + 1], n, 0), pair, np.repeat(q[r : r + 1], n, 0), np.array([0, n]), many,
            np.repeat(uniforms[r : r + 1], n, 0),
        )  # fmt: skip
        out[r] = accepted[0], next_id[0]
    return out


def verify(rng: Rng, profile: Profile) -> Iterator[Case]:
    most = profile.max_seqs
    lengths = ((4, 1, 6, 0, 2, 3)[:most], (5,), (1, 1, 1)[:most], (3, 3, 3, 3)[:most])
    for i, rows in enumerate(lengths):
        name = f"rows {'+'.join(map(str, rows))}"
        yield _draft_case(rng, f"{name} greedy", rows, 64 + 100 * i, None, i % 2 == 1)
        yield _draft_case(rng, f"{name} sampled", rows, 64 + 100 * i, 3 * i, i % 2 == 0)
    broken = _draft_case(rng, "a row without an answer", (3, 2), 64, 0, False)
    z = broken.args["logits"].values
    z[1, 5] = np.nan
    yield broken


GENERATORS: dict[str, Generator] = {
    "edit_logits": edit_logits,
    "mask_logits": mask_logits,
    "sample": sample,
    "logprobs": logprobs,
    "verify": verify,
}
