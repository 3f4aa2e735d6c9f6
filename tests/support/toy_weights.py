"""Packed weights of the toy device: tiles of 32 columns by 16 rows, transposed and padded; integers stay integers.

A weight is a list of segments, one for each canonical weight. Scales lie transposed, [groups, N].
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device.dtypes import FLOATS, decode
from device.weights import FOUR_BIT, CanonicalWeight
from tests.support.toy_tensor import Stream, ToyTensor

Array = NDArray[Any]

_ROWS, _COLUMNS = 16, 32
# Stands in the padding of every tile, where no correct result can come from.
_GARBAGE = 99


@dataclass(frozen=True)
class ToySegment:
    """Rows start … start + n - 1. tiles [n/16, K/32, 32, 16], 4-bit: [n/16, K/32, 16, 16] bytes: column c of a tile in
    the low nibble of byte c, column c + 16 in its high nibble; int4 lies shifted by 8."""

    start: int
    n: int
    k: int
    kind: str
    tiles: ToyTensor
    scale: ToyTensor | None
    offset: ToyTensor | None
    group: int
    perm: ToyTensor | None
    dynamic: bool

    def columns(self, real: Any) -> Array:
        """The whole segment, dequantised, as [K, n]; on the worker."""
        matrix = _untile(self._unpacked(self.tiles.array()))[: self.k, : self.n]
        return self._scaled(matrix, real, slice(None))

    def rows(self, index: Array, real: Any) -> Array:
        """Some rows, dequantised, as [len(index), K] in the order in which the checkpoint has its columns."""
        tiles = self._unpacked(self.tiles.array()[index // _ROWS])
        picked = tiles[np.arange(index.size), :, :, index % _ROWS].reshape(index.size, -1)[:, : self.k]
        w = self._scaled(picked.T, real, index).T
        if self.perm is None:
            return w
        out = np.empty_like(w)
        out[:, self.perm.array()] = w
        return out

    def _unpacked(self, tiles: Array) -> Array:
        if self.kind not in FOUR_BIT:
            return tiles
        both = np.concatenate((tiles & 15, tiles >> 4), axis=2).astype(np.int8)
        return both - 8 if self.kind == "int4" else both

    def _scaled(self, matrix: Array, real: Any, columns: Any) -> Array:
        """Stored numbers [K, m] -> real ones; ``columns`` picks the scales that belong to the m columns."""
        if self.scale is None:
            return matrix.astype(real, copy=False)
        out = matrix.astype(real, order="C").reshape(-1, self.group, matrix.shape[1])
        out *= self.scale.array()[:, None, columns]
        if self.offset is not None:
            out += self.offset.array()[:, None, columns]
        return out.reshape(matrix.shape)


class ToyWeight:
    """A packed weight. impl: the implementation that made it."""

    def __init__(self, impl: Any, dtype: str, shape: tuple[int, int], segments: list[ToySegment]) -> None:
        self.impl, self.dtype, self.shape, self.segments = impl, dtype, shape, segments

    @property
    def nbytes(self) -> int:
        parts = [t for s in self.segments for t in (s.tiles, s.scale, s.offset, s.perm)]
        return sum(t.nbytes for t in parts if t is not None)


def takes(weights: Sequence[CanonicalWeight]) -> bool:
    """The toy's matrix unit quantises its input by row or not at all: weights with static scales are not for it."""
    return all(w.activation.kind != "static" and not w.activation.group for w in weights)


def pack(
    stream: Stream, impl: Any, dtype: str, weights: Sequence[CanonicalWeight], uses: AbstractSet[str]
) -> ToyWeight:
    """Re-tiled on the host while the caller waits; the copy to the device comes late."""
    if not weights or {w.shape[1] for w in weights} != {weights[0].shape[1]}:
        raise ValueError(f"weights to pack together need equal columns, not {[w.shape for w in weights]}")
    if not uses <= {"linear", "embed"}:
        raise ValueError(f"uses {sorted(uses)}; expected linear, embed or both")
    segments = []
    at = 0
    for w in weights:
        n, k = w.shape
        if w.dtype in FLOATS:
            tiles = _tile(decode(w.q, w.dtype, np.dtype(dtype)))
        elif w.dtype == "int8":
            tiles = _tile(w.values())
        else:
            wide = _tile((w.values() + (8 if w.dtype == "int4" else 0)).astype(np.uint8)) & 15
            tiles = wide[:, :, : _COLUMNS // 2] | (wide[:, :, _COLUMNS // 2 :] << 4)
        segments.append(
            ToySegment(
                at, n, k, w.dtype, upload(stream, tiles),
                None if w.scale is None else upload(stream, w.scale.T),
                None if w.offset is None else upload(stream, w.offset.T),
                w.group, None if w.perm is None else upload(stream, w.perm), w.activation.kind == "dynamic",
            )
        )  # fmt: skip
        at += n
    return ToyWeight(impl, dtype, (at, weights[0].shape[1]), segments)


def upload(stream: Stream, array: Array) -> ToyTensor:
    """A device tensor with these numbers: taken now, written late."""
    staged = np.array(array)
    out = ToyTensor.empty(stream, staged.shape, staged.dtype.name)
    stream.enqueue(lambda: out.array().__setitem__(..., staged))
    return out


def linear(x: Array, w: ToyWeight) -> Array:
    """x [T, K] times the packed weight -> [T, N]; on the worker."""
    y = np.empty((x.shape[0], w.shape[0]), x.dtype)
    for s in w.segments:
        own = x if s.perm is None else x[:, s.perm.array()]
        part = y[:, s.start : s.start + s.n]
        if s.dynamic:
            step = np.abs(own).max(axis=1, keepdims=True) / 127
            levels = np.rint(own / np.where(step == 0, 1, step))
            part[...] = (levels @ s.columns(x.dtype)) * step
        else:
            part[...] = own @ s.columns(x.dtype)
    return y


def embed(ids: Array, table: ToyWeight) -> Array:
    """Rows of the table; zeros for an id that it does not have."""
    out = np.zeros((ids.size, table.shape[1]), np.dtype(table.dtype))
    for s in table.segments:
        mine = np.flatnonzero((ids >= s.start) & (ids < s.start + s.n))
        if mine.size:
            out[mine] = s.rows(ids[mine] - s.start, out.dtype)
    return out


def _tile(matrix: Array) -> Array:
    """[n, K] -> [n/16, K/32, 32, 16], the padding full of garbage."""
    n, k = matrix.shape
    padded = np.full((-(-n // _ROWS) * _ROWS, -(-k // _COLUMNS) * _COLUMNS), _GARBAGE, matrix.dtype)
    padded[:n, :k] = matrix
    split = padded.reshape(padded.shape[0] // _ROWS, _ROWS, padded.shape[1] // _COLUMNS, _COLUMNS)
    return np.ascontiguousarray(split.transpose(0, 2, 3, 1))


def _untile(tiles: Array) -> Array:
    """[a, b, 32, 16] -> [32·b, 16·a]: the matrix transposed, padding included."""
    a, b = tiles.shape[:2]
    return np.ascontiguousarray(tiles.transpose(1, 2, 0, 3)).reshape(b * _COLUMNS, a * _ROWS)
