"""NumPy reference of every op: with float64 arrays the oracle, with float32 arrays the portable path of the CPU.

Pure functions of the names and signatures in ``device.ops`` over host arrays; they compute in the dtype of what they
are given. The cache ops stand in ``device.reference_kv``, those on logits in ``device.reference_sampling``; all are
importable from here. The composite ops have no reference of their own: they must equal their composition
(``device.composite``) of the plain ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device.reference_kv import (
    RefKV,
    RefKVLayer,
    RefMeta,
    move_kv,
    paged_attention,
    read_kv,
    store_kv,
    swap_kv,
)
from device.reference_sampling import edit_logits, logprobs, mask_logits, sample, verify
from device.weights import Activation, CanonicalWeight

__all__ = [
    "BATCH_INVARIANT",
    "RefKV",
    "RefKVLayer",
    "RefMeta",
    "RefWeight",
    "Segment",
    "add",
    "add_rms_norm",
    "all_gather",
    "all_reduce",
    "edit_logits",
    "embed",
    "gated_act",
    "gather_rows",
    "linear",
    "logprobs",
    "mask_logits",
    "move_kv",
    "pack_weight",
    "paged_attention",
    "read_kv",
    "reference_table",
    "rms_norm",
    "rope",
    "sample",
    "split_qkv",
    "store_kv",
    "swap_kv",
    "verify",
]

Array = NDArray[Any]

# Numbers that are dequantised at a time: beside the packed matrix no more than this exists of it.
_DEQUANT = 1 << 20

BATCH_INVARIANT = frozenset(
    {"embed", "rms_norm", "add_rms_norm", "add", "split_qkv", "rope", "gated_act", "store_kv", "read_kv",
     "gather_rows", "edit_logits", "mask_logits", "sample", "logprobs", "verify", "all_reduce", "all_gather"}
)  # fmt: skip
"""Ops whose rows have the same bits whatever rows stand beside them. Not those with a matrix product: BLAS chooses
another order of summation for another number of rows."""


# ---------------------------------------------------------------- weights


@dataclass(frozen=True, slots=True)
class Segment:
    """Output rows start … stop-1 of a packed weight, whose input is quantised in the same way.

    perm: the order of the columns in which a grouped activation counts its groups.
    """

    start: int
    stop: int
    activation: Activation
    perm: Array | None = None

    def continues(self, w: CanonicalWeight) -> bool:
        """Whether ``w`` takes the same input."""
        same = self.perm is w.perm or (
            self.perm is not None and w.perm is not None and np.array_equal(self.perm, w.perm)
        )
        return self.activation == w.activation and (same or not self.activation.group)


class RefWeight:
    """A packed weight of the reference: one dequantised matrix [N, K] in checkpoint column order, and its segments.

    impl: the ``device.binding.Implementation`` that a device made it with, where it has several.
    """

    __slots__ = ("impl", "matrix", "segments")

    def __init__(self, matrix: Array, segments: tuple[Segment, ...]) -> None:
        self.matrix, self.segments = matrix, segments
        self.impl: Any = None

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        n, k = self.matrix.shape
        return n, k

    @property
    def dtype(self) -> str:
        """Name of the type that the matrix is held in."""
        return str(self.matrix.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the matrix."""
        return int(self.matrix.nbytes)


def pack_weight(weights: Sequence[CanonicalWeight], uses: Set[str], dtype: str = "float32") -> RefWeight:
    """Canonical weights [N_i, K] that share one input -> one weight [ΣN_i, K], dequantised to ``dtype``.

    uses ⊆ {"linear", "embed"}. A single float weight that has ``dtype`` already is kept without a copy.
    """
    if not weights or {w.shape[1] for w in weights} != {weights[0].shape[1]}:
        raise ValueError(f"weights to pack together need equal columns, not {[w.shape for w in weights]}")
    if not uses <= {"linear", "embed"}:
        raise ValueError(f"uses {sorted(uses)}; expected linear, embed or both")
    segments: list[Segment] = []
    at = 0
    for w in weights:
        stop = at + w.shape[0]
        if segments and segments[-1].continues(w):
            segments[-1] = Segment(segments[-1].start, stop, w.activation, w.perm)
        else:
            segments.append(Segment(at, stop, w.activation, w.perm))
        at = stop
    first = weights[0]
    if len(weights) == 1 and first.dtype == dtype and first.perm is None:
        flags = first.q.flags
        if flags.c_contiguous and flags.aligned:
            return RefWeight(first.q, tuple(segments))
    matrix = np.empty((at, first.shape[1]), np.dtype(dtype))
    rows = max(1, _DEQUANT // max(1, first.shape[1]))
    at = 0
    for w in weights:
        for a in range(0, w.shape[0], rows):
            part = w.rows(slice(a, a + rows))
            matrix[at : at + part.shape[0]] = part.dequantize(matrix.dtype)
            at += part.shape[0]
    return RefWeight(matrix, tuple(segments))


def _quantized_groups(x: Array, group: int, perm: Array | None) -> Array:
    """x as it is after ``group`` columns at a time were rounded to int8 by a scale of their own."""
    rows, columns = x.shape
    padded = np.zeros((rows, -(-columns // group) * group), x.dtype)
    padded[:, :columns] = x if perm is None else x[:, perm]
    parts = padded.reshape(rows, -1, group)
    scale = np.abs(parts).max(axis=2, keepdims=True) / 127
    np.rint(parts / np.where(scale == 0, 1, scale), out=parts)
    parts *= scale
    if perm is None:
        return padded[:, :columns]
    out = np.empty_like(x)
    out[:, perm] = padded[:, :columns]
    return out


def _quantized_input(x: Array, segment: Segment) -> tuple[Array, Array | float]:
    """x as the numbers that an int8 input has, and what to multiply the product with ([T,1], or one number)."""
    activation = segment.activation
    if activation.group:
        return _quantized_groups(x, activation.group, segment.perm), 1.0
    if activation.kind == "dynamic":
        scale = np.abs(x).max(axis=1, keepdims=True) / 127
        return np.rint(x / np.where(scale == 0, 1, scale)), scale
    xq = np.rint(x / activation.scale)
    xq += activation.zero
    np.clip(xq, -128, 127, out=xq)
    xq -= activation.zero
    return xq, activation.scale


def linear(x: Array, w: RefWeight, bias: Array | None = None, out: str | None = None) -> Array:
    """x [T,K] · wᵀ + bias [N] -> [T,N] in x's dtype (``out`` is for devices that round: here nothing is).

    Where a weight asks for it the input is quantised to int8 first: ``dynamic`` by row (or by each group of columns),
    scale = max|x| / 127, xq = round(x / scale); ``static`` xq = clip(round(x / s) + zero, -128, 127), taken back as
    (xq - zero) · s.
    """
    if len(w.segments) == 1 and w.segments[0].activation.kind == "none":
        y = x @ w.matrix.T
    else:
        y = np.empty((x.shape[0], w.shape[0]), x.dtype)
        for segment in w.segments:
            part = y[:, segment.start : segment.stop]
            matrix = w.matrix[segment.start : segment.stop].T
            if segment.activation.kind == "none":
                part[...] = x @ matrix
            else:
                xq, scale = _quantized_input(x, segment)
                np.multiply(xq @ matrix, scale, out=part)
    if bias is not None:
        y += bias
    return y


def embed(ids: Array, table: RefWeight, scale: float = 1.0) -> Array:
    """Rows ids [T] of the table [V,H], times ``scale``; an id outside [0, V) gives a row of zeros."""
    x = gather_rows(table.matrix, np.where(ids < table.shape[0], ids, -1))
    if scale != 1.0:
        x *= scale
    return x


# ---------------------------------------------------------------- norms and element-wise ops


def rms_norm(x: Array, w: Array, eps: float) -> Array:
    """x / sqrt(mean(x²) + eps) · w over the last dimension of [T,H] or [T,heads,D]; arXiv 1910.07467."""
    r: Array = np.einsum("...i,...i->...", x, x)
    r /= x.shape[-1]
    r += eps
    np.sqrt(r, out=r)
    y: Array = x / r[..., None]
    y *= w
    return y


def add_rms_norm(x: Array, residual: Array, w: Array, eps: float) -> tuple[Array, Array]:
    """(rms_norm(x + residual), x + residual)."""
    total = x + residual
    return rms_norm(total, w, eps), total


def add(x: Array, y: Array) -> Array:
    """x + y."""
    return x + y


def split_qkv(qkv: Array, heads: int, kv_heads: int, dim: int) -> tuple[Array, Array, Array]:
    """[T,(Hq+2Hkv)·D] -> views q [T,Hq,D], k, v [T,Hkv,D]."""
    rows, a, b = qkv.shape[0], heads * dim, (heads + kv_heads) * dim
    return (
        qkv[:, :a].reshape(rows, heads, dim),
        qkv[:, a:b].reshape(rows, kv_heads, dim),
        qkv[:, b : b + kv_heads * dim].reshape(rows, kv_heads, dim),
    )


def rope(q: Array, k: Array, positions: Array, cos_sin: Array) -> tuple[Array, Array]:
    """Rotate the first ``rot`` of D by the angles of positions [T]; cos_sin [P,rot], cos in its first half, then sin.

    (x1, x2) -> (x1·cos - x2·sin, x2·cos + x1·sin), x1 the first half of rot, x2 the second; arXiv 2104.09864 with the
    pairing of Llama checkpoints in Hugging Face layout.
    """
    table = cos_sin[positions][:, None, :]
    half = table.shape[-1] // 2
    cos, sin = table[..., :half], table[..., half:]
    return _rotate(q, cos, sin, half), _rotate(k, cos, sin, half)


def _rotate(x: Array, cos: Array, sin: Array, half: int) -> Array:
    out = np.empty(x.shape, x.dtype)
    x1, x2 = x[..., :half], x[..., half : 2 * half]
    y1, y2 = out[..., :half], out[..., half : 2 * half]
    np.multiply(x1, cos, out=y1)
    y1 -= x2 * sin
    np.multiply(x2, cos, out=y2)
    y2 += x1 * sin
    if 2 * half < x.shape[-1]:
        out[..., 2 * half :] = x[..., 2 * half :]
    return out


def gated_act(gate_up: Array, kind: str) -> Array:
    """[T,2I] -> act(first half) · second half [T,I]; kind: silu, gelu_tanh (arXiv 1606.08415, eq. 2), gelu (exact)."""
    size = gate_up.shape[1] // 2
    gate, up = gate_up[:, :size], gate_up[:, size:]
    if kind == "silu":
        # exp(-x) may overflow to infinity; x / infinity is the right answer then.
        with np.errstate(over="ignore"):
            y = np.exp(np.negative(gate))
        y += 1
        np.divide(gate, y, out=y)
    elif kind == "gelu_tanh":
        y = gate * gate
        y *= 0.044715
        y += 1
        y *= gate
        y *= math.sqrt(2 / math.pi)
        np.tanh(y, out=y)
        y += 1
        y *= gate
        y *= 0.5
    elif kind == "gelu":
        y = erf(gate * math.sqrt(0.5))
        y += 1
        y *= gate
        y *= 0.5
    else:
        raise ValueError(f"activation {kind!r}; expected silu, gelu_tanh or gelu")
    y *= up
    return y


_ERF_END = 6.0  # 1 - erf(6) is 2e-17


@lru_cache(maxsize=1)
def _erfcx_series() -> tuple[float, ...]:
    """Chebyshev coefficients of exp(x²)·erfc(x) on 0 ≤ x ≤ 6 as a function of t = ``_to_t(x)``."""
    degree = 20
    nodes = np.cos(np.pi * (np.arange(degree + 1) + 0.5) / (degree + 1))
    values = [math.exp(x * x) * math.erfc(x) for x in _from_t(nodes).tolist()]
    return tuple(np.polynomial.chebyshev.chebfit(nodes, values, degree).tolist())


def _to_t(x: Array) -> Array:
    """0 … 6 -> -1 … 1, denser near 0, where erfc(x)·exp(x²) bends most."""
    t: Array = 2 * (x / (x + 2)) * ((_ERF_END + 2) / _ERF_END) - 1
    return t


def _from_t(t: Array) -> Array:
    s = (t + 1) / 2 * _ERF_END / (_ERF_END + 2)
    return 2 * s / (1 - s)


def erf(x: Array) -> Array:
    """The error function to about 3e-15 (NumPy has none): 1 - exp(-x²) · a Chebyshev series of exp(x²)·erfc(x)."""
    a = np.minimum(np.abs(x), _ERF_END)
    t = _to_t(a)
    series = _erfcx_series()
    now, before = np.full_like(t, series[-1]), np.zeros_like(t)
    for c in series[-2:0:-1]:  # Clenshaw's recurrence
        now, before = 2 * t * now - before + c, now
    y = t * now - before + series[0]
    y *= np.exp(-a * a)
    return np.copysign(1 - y, x)


def gather_rows(x: Array, rows: Array) -> Array:
    """x[rows]; a row of -1 gives zeros."""
    if rows.size and rows.min() < 0:
        if not x.shape[0]:
            return np.zeros((rows.size, *x.shape[1:]), x.dtype)
        out = x[np.maximum(rows, 0)]
        out[rows < 0] = 0
        return out
    return x[rows]


def all_reduce(x: Array) -> Array:
    """The identity: a world of one."""
    return x


def all_gather(x: Array) -> Array:
    """The identity: a world of one."""
    return x


def reference_table(dtype: str) -> dict[str, Callable[..., Any]]:
    """Every plain op by name over host arrays; ``pack_weight`` makes matrices of ``dtype`` (float32 or float64)."""
    return {
        "embed": embed,
        "rms_norm": rms_norm,
        "add_rms_norm": add_rms_norm,
        "add": add,
        "pack_weight": partial(pack_weight, dtype=dtype),
        "linear": linear,
        "split_qkv": split_qkv,
        "rope": rope,
        "gated_act": gated_act,
        "store_kv": store_kv,
        "read_kv": read_kv,
        "paged_attention": paged_attention,
        "move_kv": move_kv,
        "swap_kv": swap_kv,
        "gather_rows": gather_rows,
        "edit_logits": edit_logits,
        "mask_logits": mask_logits,
        "sample": sample,
        "logprobs": logprobs,
        "verify": verify,
        "all_reduce": all_reduce,
        "all_gather": all_gather,
    }
