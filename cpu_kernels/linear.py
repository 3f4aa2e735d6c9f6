"""Packed weights of the native library: packing canonical weights, and the matrix ops on NumPy arrays.

A canonical weight is anything with the attributes of ``device.weights.CanonicalWeight``; its arrays are read once, from
wherever they are mapped.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from ctypes import POINTER, c_double, c_float, c_int, c_int32, c_int64, c_size_t, c_void_p
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpu_kernels.library import library

ISAS = ("baseline", "avx2", "avx512", "neon")
ACTIVATIONS = ("auto", "float")
MAX_PARTS = 8
_DTYPES = {"float32": 0, "float16": 1, "bfloat16": 2, "int8": 3, "int4": 4, "uint4": 5}
_INPUTS = {"none": 0, "dynamic": 1, "static": 2}
_USES = {"linear": 1, "embed": 2}
_ERRORS = {
    1: "not enough memory",
    2: f"one to {MAX_PARTS} weights of equal columns are packed together, none of them empty",
    3: "no kernel for this dtype or instruction set",
    4: "a group must be a multiple of 16 that divides the columns, or all of them",
}
_ALIGN = 64


class _Canonical(ctypes.Structure):
    _fields_ = [
        ("dtype", c_int32), ("activation", c_int32), ("act_zero", c_int32), ("act_scale", c_float),
        ("n", c_int64), ("k", c_int64), ("group", c_int64),
        ("q_stride", c_int64), ("scale_stride", c_int64), ("offset_stride", c_int64),
        ("q", c_void_p), ("scale", c_void_p), ("offset", c_void_p), ("perm", c_void_p),
    ]  # fmt: skip


@lru_cache(maxsize=1)
def _lib() -> ctypes.CDLL:
    lib = library()
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "jk_isa": (c_int, []),
        "jk_isa_runs": (c_int, [c_int]),
        "jk_team_new": (c_void_p, [c_int, c_void_p]),
        "jk_team_free": (None, [c_void_p]),
        "jk_pack": (c_int, [POINTER(_Canonical), c_int, c_int, c_int, c_int, POINTER(c_void_p)]),
        "jk_weight_free": (None, [c_void_p]),
        "jk_weight_bytes": (c_size_t, [c_void_p]),
        "jk_linear_scratch": (c_size_t, [c_void_p, c_int]),
        "jk_linear_run": (
            None,
            [
                c_void_p,
                POINTER(c_void_p),
                c_int,
                c_void_p,
                c_int64,
                c_int,
                c_void_p,
                c_int64,
                c_void_p,
                c_void_p,
                c_int,
            ],
        ),
        "jk_embed_run": (None, [c_void_p, c_void_p, c_void_p, c_int, c_float, c_void_p, c_int64]),
        "jk_measure_read": (c_double, [c_void_p, c_void_p, c_size_t, c_int]),
        "jk_measure_dot": (c_double, [c_void_p, c_int, c_int64]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    return lib


def isa() -> str:
    """Name of the instruction set in use: the best that runs here, or the one that JUMAR_TEST_CPU_ISA names.

    ValueError when the variable names one that this CPU or this build lacks.
    """
    number = _lib().jk_isa()
    if number < 0:
        raise ValueError(f"JUMAR_TEST_CPU_ISA: expected one of {', '.join(runnable_isas())}, which run on this CPU")
    return ISAS[number]


def runnable_isas() -> tuple[str, ...]:
    """Instruction sets that the library was built with and this CPU has, slowest first."""
    return tuple(name for i, name in enumerate(ISAS) if _lib().jk_isa_runs(i))


def aligned(shape: int | tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """Zeros that begin at a multiple of 64 bytes."""
    dtype = np.dtype(dtype)
    count = int(np.prod(shape))
    raw = np.zeros(count * dtype.itemsize + _ALIGN, np.uint8)
    at = -raw.ctypes.data % _ALIGN
    found: NDArray[Any] = raw[at : at + count * dtype.itemsize].view(dtype).reshape(shape)
    return found


class Team:
    """A thread team of its own, for calls outside a recorded step."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        # kept: at the end of the process this module's names may be gone before the object is
        self._free = _lib().jk_team_free
        self.handle: int | None = _lib().jk_team_new(threads, None)
        if not self.handle:
            raise MemoryError(f"no team of {threads} threads could be started")

    def close(self) -> None:
        handle, self.handle = self.handle, None
        if handle:
            self._free(handle)

    def __del__(self) -> None:
        self.close()

    def read_bandwidth(self, memory: NDArray[Any], repeat: int = 1) -> float:
        """Bytes a second that all threads together read from ``memory``, each its own part, ``repeat`` times."""
        return float(_lib().jk_measure_read(self.handle, memory.ctypes.data, memory.nbytes, repeat))

    def dot_peak(self, isa_name: str, repeat: int = 10_000_000) -> float:
        """int8 multiply-adds a second of all threads together, with the integer product of an instruction set."""
        return float(_lib().jk_measure_dot(self.handle, ISAS.index(isa_name), repeat))


class PackedWeight:
    """A packed weight [N, K]. ``handle`` is the native pointer that a recorded step carries."""

    def __init__(self, handle: int, shape: tuple[int, int]) -> None:
        self.handle: int | None = handle
        self._free = _lib().jk_weight_free  # as in Team
        self.shape, self.dtype = shape, "float32"
        self.impl: Any = None
        """Whose it is, where a caller has several kinds of weights."""
        self.nbytes = int(_lib().jk_weight_bytes(handle))

    def scratch(self, rows: int) -> int:
        """Bytes of scratch for a call with so many rows."""
        return int(_lib().jk_linear_scratch(self.handle, rows))

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
    part.activation = _INPUTS[w.activation.kind]
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
    lib = _lib()
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
    scratch = aligned(max([p.scratch(rows) for p in weights]) + _ALIGN, np.uint8)
    handles = (c_void_p * len(weights))(*[p.handle for p in weights])
    _lib().jk_linear_run(
        team.handle, handles, len(weights), x.ctypes.data, x.strides[0] // 4, rows, y.ctypes.data, y.strides[0] // 4,
        None if bias is None else bias.ctypes.data, scratch.ctypes.data, repeat,
    )  # fmt: skip
    return y


def embed(ids: NDArray[np.int32], table: PackedWeight, scale: float = 1.0, *, team: Team) -> NDArray[np.float32]:
    """Rows ids [T] of the table [V,H], dequantised, times ``scale`` -> [T,H]; an id outside 0 … V-1 gives zeros."""
    ids = np.ascontiguousarray(ids, np.int32)
    y = np.empty((ids.size, table.shape[1]), np.float32)
    _lib().jk_embed_run(team.handle, table.handle, ids.ctypes.data, ids.size, scale, y.ctypes.data, table.shape[1])
    return y
