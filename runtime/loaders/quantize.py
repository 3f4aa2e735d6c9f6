"""Rounding a float checkpoint to integer weights while it is loaded: nearest value, no calibration data.

``w8a8`` and ``w8a16`` make symmetric int8, ``w4a16`` makes asymmetric uint4, in groups of 64 columns. The 4-bit weights
are asymmetric because 16 levels from a group's least to its largest number stand at most 14/15 as far apart as the 15
levels of a symmetric int4 that clips nothing; the price is an offset a group, a quarter of a bit a weight. The
embedding table and the output head become int8 in every scheme: a token's row is read alone, and an error in the head
goes straight into the logits.

``w8a8`` asks that the input is rounded to int8 too, by row and group of 32 columns (with one scale a row the outliers
of a few columns cost the others their precision); the ``a16`` schemes forbid it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from device.dtypes import FLOATS, decode
from device.errors import ConfigError, LoadError
from device.weights import FLOAT_ACTIVATION, NO_ACTIVATION, Activation, CanonicalWeight, pack_nibbles
from runtime.config import Scheme
from runtime.loaders.checkpoint import EMBEDDING, HEAD

GROUPS = (64, 32, 16)
"""Columns that share a scale, best first; where none divides the columns, a row has one scale."""
INPUT_GROUP = 32

Floats = NDArray[np.float32]
# Numbers that are rounded at a time, so that temporaries stay in the cache and no second copy of a weight exists.
_CHUNK = 1 << 17
# Differences of two numbers below it are finite, and no model has larger weights.
_LARGEST = 1e38
_SMALLEST = np.finfo(np.float32).tiny
# A scale is stored as a half-precision number where this costs no more than so much of it.
_HALF_COST = 1.01
_MIB = 1 << 20


class Quantizer:
    """Rounds the weights of one checkpoint, one at a time. notice: hears, once a size, where groups are not of 64."""

    def __init__(self, scheme: Scheme, notice: Callable[[str], None]) -> None:
        self.scheme = scheme
        self._notice = notice
        self._told: set[int] = set()
        self._count = self._before = self._after = 0

    def check(self, path: Path, stored: Mapping[str, str]) -> None:
        """ConfigError where some of these weights (name -> type in the file) are quantised already."""
        found = {name: kind for name, kind in stored.items() if kind not in FLOATS}
        if not found:
            return
        first = next(iter(found))
        kinds = ", ".join(sorted(set(found.values())))
        raise ConfigError(
            f"quantize = {self.scheme!r} rounds float weights, but {len(found)} of the {len(stored)} weights of {path} "
            f"are quantised already, as {kinds} ({first} is {found[first]}); leave quantize at none, or take the "
            "model's float checkpoint"
        )

    def __call__(self, name: str, w: CanonicalWeight) -> CanonicalWeight:
        """A float weight [N, K] as an integer one. LoadError, with its name, where ``quantize`` refuses it."""
        columns = w.shape[1]
        group = group_of(columns)
        if group != GROUPS[0] and columns not in self._told:
            self._told.add(columns)
            what = "with one scale a row" if group == columns else f"in groups of {group}"
            self._notice(
                f"quantize {self.scheme}: {GROUPS[0]} does not divide the {columns} columns of {name}: "
                f"weights of that width are rounded {what}"
            )
        four_bit = self.scheme == "w4a16" and name not in (EMBEDDING, HEAD)
        activation = FLOAT_ACTIVATION
        if self.scheme == "w8a8":
            activation = Activation("dynamic", group=group if group % INPUT_GROUP and group != columns else INPUT_GROUP)
        try:
            rounded = quantize(w, "uint4" if four_bit else "int8", group, activation)
        except ValueError as error:
            raise LoadError(f"quantize {self.scheme}: weight {name!r} {error}") from None
        self._count += 1
        self._before += w.nbytes
        self._after += rounded.nbytes
        return rounded

    def summary(self) -> str:
        """One line about what was done."""
        return (
            f"quantize {self.scheme}: {self._count} weights rounded while loading, "
            f"{self._before / _MIB:.1f} -> {self._after / _MIB:.1f} MiB before packing"
        )


def group_of(columns: int) -> int:
    """Columns that share a scale, for a weight of so many."""
    return next((g for g in GROUPS if columns % g == 0), columns)


def quantize(
    w: CanonicalWeight, dtype: Literal["int8", "uint4"], group: int, activation: Activation = NO_ACTIVATION
) -> CanonicalWeight:
    """A float weight [N, K] to the nearest: int8 symmetric (-127 … 127) or uint4 with an offset; [N, K/group] scales.

    No number moves by more than half its group's scale (and rounding of float32); a group of one value is exact.
    ValueError, to follow a weight's name, where it holds NaN, infinity or numbers beyond 1e38, or ``group`` or the two
    values of a byte do not divide K.
    """
    n, columns = w.shape
    if dtype == "uint4" and columns % 2:
        raise ValueError(
            f"has {columns} columns: 4-bit weights are packed two a byte and need an even number; use w8a8"
        )
    low, high = _ranges(w, group)
    offset: Floats | None = None
    if dtype == "int8":
        scale = _symmetric(low, high)
        least, most = -127, 127
    else:
        scale, offset = _asymmetric(low, high)
        least, most = 0, 15
    q: NDArray[Any] = np.empty(
        (n, columns) if dtype == "int8" else (n, columns // 2), np.int8 if offset is None else np.uint8
    )
    divisor = np.where(scale == 0, np.float32(1), scale)
    for rows, values in _pieces(w, group):
        levels = values.copy() if offset is None else values - offset[rows, :, None]
        levels /= divisor[rows, :, None]
        np.rint(levels, out=levels)
        np.clip(levels, least, most, out=levels)
        whole = levels.reshape(-1, columns)
        q[rows] = whole if offset is None else pack_nibbles(whole)
    return CanonicalWeight(dtype, q, scale, offset, group, w.perm, activation)


def _pieces(w: CanonicalWeight, group: int) -> Iterator[tuple[slice, Floats]]:
    """Some rows at a time, as float32 [rows, K/group, group]; not to be written to."""
    n, columns = w.shape
    step = max(1, _CHUNK // columns)
    for start in range(0, n, step):
        rows = slice(start, start + step)
        yield rows, decode(w.q[rows], w.dtype, np.float32).reshape(-1, columns // group, group)


def _ranges(w: CanonicalWeight, group: int) -> tuple[Floats, Floats]:
    """Least and largest number of every group, [N, K/group] each. ValueError where one is not finite."""
    n, columns = w.shape
    low = np.empty((n, columns // group), np.float32)
    high = np.empty_like(low)
    with np.errstate(invalid="ignore", over="ignore"):
        for rows, values in _pieces(w, group):
            values.min(axis=2, out=low[rows])
            values.max(axis=2, out=high[rows])
    if not ((low >= -_LARGEST) & (high <= _LARGEST)).all():  # false for NaN
        raise ValueError(f"holds NaN, infinity or numbers beyond {_LARGEST:g}: the checkpoint is damaged")
    return low, high


def _symmetric(low: Floats, high: Floats) -> Floats:
    """Scales of int8. A group of one value c has scale |c|, so that ±1 is exactly it."""
    most = np.maximum(high, -low)
    flat = low == high
    scale = np.maximum(most / np.float32(127), _SMALLEST)
    half = _half_above(scale)
    return np.where(flat, most, half if _cheap(half, scale, flat) else scale)


def _asymmetric(low: Floats, high: Floats) -> tuple[Floats, Floats]:
    """Scales and offsets of uint4. A group of one value c is offset c and scale 0."""
    flat = low == high
    scale = np.maximum((high - low) / np.float32(15), _SMALLEST)
    offset = -_half_above(-low)
    with np.errstate(over="ignore", invalid="ignore"):
        half = _half_above(np.maximum((high - offset) / np.float32(15), _SMALLEST))
    if _cheap(half, scale, flat):
        return np.where(flat, np.float32(0), half), np.where(flat, low, offset)
    return np.where(flat, np.float32(0), scale), low


def _half_above(values: Floats) -> Floats:
    """The least half-precision numbers that are no less, infinity where there is none."""
    with np.errstate(over="ignore", under="ignore"):
        half = values.astype(np.float16)
        short = half.astype(np.float32) < values
        half[short] = np.nextafter(half[short], np.float16(np.inf))
    return half.astype(np.float32)


def _cheap(half: Floats, exact: Floats, flat: NDArray[np.bool_]) -> bool:
    """Whether every scale that is needed may be stored in half precision. Kernels then stream two bytes, not four."""
    return bool((flat | (half <= np.float32(_HALF_COST) * exact)).all())
