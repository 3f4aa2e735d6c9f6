"""Packed weights of the native library: packing canonical weights, and the matrix ops on NumPy arrays.

A canonical weight is anything with the attributes of ``device.weights.CanonicalWeight``; its arrays are read once, from
wherever they are mapped.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from ctypes import c_float, c_int32, c_int64, c_void_p
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpu_kernels.library import ISAS, Team, aligned, isa, library

ACTIVATIONS = ("auto", "float")
MAX_PARTS = 8
_DTYPES = {"float32": 0, "float16": 1, "bfloat16": 2, "int8": 3, "int4": 4, "uint4": 5}
_INPUTS = {"none": 0, "dynamic": 1, "static": 2, "groups": 3, "as_is": 4}
_USES = {"linear": 1, "embed": 2}
_ERRORS = {
    1: "not enough memory",
    2: f"one to {MAX_PARTS} weights of equal columns are packed together, none of them empty",
    3: "no kernel for this dtype or instruction set",
    4: "a group must be a multiple of 16 that divides the columns, or all of them",
}


class _Canonical(ctypes.Structure):
    _fields_ = [
        ("dtype", c_int32), ("activation", c_int32), ("act_zero", c_int32), ("act_scale", c_float),
        ("n", c_int64), ("k", c_int64), ("group", c_int64),
        ("q_stride", c_int64), ("scale_stride", c_int64), ("offset_stride", c_int64),
        ("q", c_void_p), ("scale", c_void_p), ("offset", c_void_p), ("perm", c_void_p),
    ]  # fmt: skip


class PackedWeight:
    """A packed weight [N, K]. ``handle`` is the native pointer that a recorded step carries."""

    def __init__(self, handle: int, shape: tuple[int, int]) -> None:
        self.handle: int | None = handle
        self._free = library().jk_weight_free  # as in Team
        self.shape, self.dtype = shape, "float32"
        self.impl: Any = None
        """Whose it is, where a caller has several kinds of weights."""
        self.nbytes = int(library().jk_weight_bytes(handle))

    def scratch(self, rows: int) -> int:
        """Bytes of scratch for a call with so many rows."""
        return int(library().jk_linear_scratch(self.handle, rows))

    def __del__(self) -> None:
        handle, self.handle = self.handle, None
        if handle:
            self._free(handle)


def _rows(array: NDArray[Any], dtype: Any, keep: list[Any]) -> NDArray[Any]:
    """As it is where its rows are contiguous, otherwise a copy that lives until the packing is done."""
    array = np.asarray(array)
    if array.dtype != dtype or array.strides[-1] != array.itemsize or not array.flags.aligned:
        array = np.ascontiguousarray(array, dtype)
    keep.append(array)
    return array


def _canonical(w: Any, keep: list[Any]) -> _Canonical:
    dtype, q = w.dtype, w.q
    if dtype == "float64":
        dtype, q = "float32", q.astype(np.float32)
    if dtype not in _DTYPES:
        raise ValueError(f"weight dtype {dtype!r}; expected float64 or one of {', '.join(_DTYPES)}")
    q = _rows(q, q.dtype, keep)
    n, k = w.shape
    part = _Canonical(dtype=_DTYPES[dtype], n=n, k=k, group=w.group, q=q.ctypes.data, q_stride=q.strides[0])
    asked = w.activation
    part.activation = _INPUTS["as_is" if asked.as_is else "groups" if asked.group else asked.kind]
    part.act_scale, part.act_zero = w.activation.scale, w.activation.zero
    for name in ("scale", "offset"):
        array = getattr(w, name)
        if array is not None:
            array = _rows(array, np.float32, keep)
            setattr(part, name, array.ctypes.data)
            setattr(part, f"{name}_stride", array.strides[0] // 4)
    if w.perm is not None:
        part.perm = _rows(w.perm, np.int32, keep).ctypes.data
    return part


def pack(
    weights: Sequence[Any],
    uses: Iterable[str] = ("linear",),
    activations: str = "auto",
    isa_name: str | None = None,
) -> PackedWeight:
    """Canonical weights [N_i, K] that share one input -> one packed weight [sum N_i, K].

    activations: ``auto`` quantises the input of quantised weights to int8 by row and group of 32, ``float`` leaves it
    float32; what a checkpoint asks for the input (``activation``) holds either way. isa_name: for tests and benchmarks.
    ValueError for a dtype, group or shape that has no kernel.
    """
    lib = library()
    if activations not in ACTIVATIONS:
        raise ValueError(f"activations {activations!r}; expected one of {', '.join(ACTIVATIONS)}")
    number = ISAS.index(isa_name or isa())
    keep: list[Any] = []
    parts = (_Canonical * len(weights))(*[_canonical(w, keep) for w in weights])
    use = sum(_USES[name] for name in set(uses))
    out = c_void_p()
    error = lib.jk_pack(parts, len(weights), use, ACTIVATIONS.index(activations), number, ctypes.byref(out))
    if error == 1:
        raise MemoryError(f"packing {[w.shape for w in weights]}: {_ERRORS[error]}")
    if error:
        what = [(w.dtype, w.shape, w.group) for w in weights]
        raise ValueError(f"weights (dtype, shape, group) {what}: {_ERRORS[error]}")
    assert out.value is not None
    total = sum(w.shape[0] for w in weights)
    return PackedWeight(out.value, (total, weights[0].shape[1]))


def linear(
    x: NDArray[np.float32],
    w: PackedWeight | Sequence[PackedWeight],
    bias: NDArray[np.float32] | None = None,
    *,
    team: Team,
    out: NDArray[np.float32] | None = None,
    repeat: int = 1,
) -> NDArray[np.float32]:
    """x [T,K] float32 -> x wᵀ + bias [T,N] float32. Several weights of equal K are run one after another into one y."""
    weights = [w] if isinstance(w, PackedWeight) else list(w)
    rows, columns = x.shape
    widest = max(p.shape[0] for p in weights)
    if x.dtype != np.float32 or x.strides[1] != 4 or any(p.shape[1] > columns for p in weights):
        raise ValueError(f"x must be float32 [T, {weights[0].shape[1]}] with contiguous rows, not {x.dtype} {x.shape}")
    y = np.empty((rows, widest), np.float32) if out is None else out
    scratch = aligned(max([p.scratch(rows) for p in weights]), np.uint8)
    handles = (c_void_p * len(weights))(*[p.handle for p in weights])
    library().jk_linear_run(
        team.handle, handles, len(weights), x.ctypes.data, x.strides[0] // 4, rows, y.ctypes.data, y.strides[0] // 4,
        None if bias is None else bias.ctypes.data, scratch.ctypes.data, repeat,
    )  # fmt: skip
    return y


def embed(ids: NDArray[np.int32], table: PackedWeight, scale: float = 1.0, *, team: Team) -> NDArray[np.float32]:
    """Rows ids [T] of the table [V,H], dequantised, times ``scale`` -> [T,H]; an id outside 0 … V-1 gives zeros."""
    ids = np.ascontiguousarray(ids, np.int32)
    y = np.empty((ids.size, table.shape[1]), np.float32)
    library().jk_embed_run(team.handle, table.handle, ids.ctypes.data, ids.size, scale, y.ctypes.data, table.shape[1])
    return y
