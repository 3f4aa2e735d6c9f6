"""Names of element types, and bfloat16 on a host that has no such NumPy type.

A dtype is a string: ``float64 float32 float16 bfloat16 int32 int8 ...``. On the host bfloat16 is a
``uint16`` array of the bits, and whoever passes it says ``dtype="bfloat16"`` beside it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

FLOATS = ("float64", "float32", "float16", "bfloat16")

_NUMPY: dict[str, Any] = {
    "float64": np.float64,
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": np.uint16,
    "int64": np.int64,
    "int32": np.int32,
    "int8": np.int8,
    "uint8": np.uint8,
}


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy type that stores ``name`` on the host (bfloat16: uint16). KeyError for an unknown name."""
    dtype: np.dtype[Any] = np.dtype(_NUMPY[name])
    return dtype


def itemsize(name: str) -> int:
    """Bytes of one element."""
    return numpy_dtype(name).itemsize


def bf16_to_f32(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Exact: a bfloat16 is the upper half of a float32."""
    wide = bits.astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)


def f32_to_bf16(values: NDArray[Any]) -> NDArray[np.uint16]:
    """Round to nearest, ties to even; NaN stays a (quiet) NaN, overflow becomes infinity."""
    f32 = np.ascontiguousarray(values, dtype=np.float32)
    bits = f32.view(np.uint32)
    rounded = bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))
    out = (rounded >> 16).astype(np.uint16)
    nan = np.isnan(f32)
    if nan.any():
        out[nan] = ((bits[nan] >> 16) | 0x0040).astype(np.uint16)
    return out


def decode(array: NDArray[Any], dtype: str, to: Any = np.float32) -> NDArray[Any]:
    """Host array of ``dtype`` as a NumPy array of real type ``to`` (no copy where none is needed)."""
    if dtype == "bfloat16":
        return bf16_to_f32(array).astype(to, copy=False)
    return array.astype(to, copy=False)


def encode(array: NDArray[Any], dtype: str) -> NDArray[Any]:
    """NumPy array of a real type as the host form of ``dtype``."""
    if dtype == "bfloat16":
        return f32_to_bf16(array)
    return np.asarray(array).astype(numpy_dtype(dtype), copy=False)
