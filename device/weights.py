"""The canonical weight: what every loader produces and every kernel package consumes.

``w[n, k] = q[n, k] * scale[n, g] + offset[n, g]`` with g the group of column k *after* the columns are put
in the order of ``perm``. Column j of ``q`` is column ``perm[j]`` of the checkpoint, so ``x`` is gathered by
``perm`` once: ``y = x[:, perm] @ w.T``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from device.dtypes import FLOATS, decode

FOUR_BIT = ("int4", "uint4")
WEIGHT_DTYPES = (*FLOATS, "int8", *FOUR_BIT)


@dataclass(frozen=True, slots=True)
class Activation:
    """How the input of a quantised weight is to be quantised: not, per row when it runs, or by fixed (scale, zero).

    group: of ``dynamic``, the columns (in the order of ``perm``) that share a scale; 0: the whole row.
    as_is: of ``none``, that no device may quantise the input; otherwise it may choose to (``Device.input_of``).
    """

    kind: Literal["none", "dynamic", "static"] = "none"
    scale: float = 1.0
    zero: int = 0
    group: int = 0
    as_is: bool = False

    def __post_init__(self) -> None:
        if self.as_is and self.kind != "none":
            raise ValueError(f"an input that stays as it is cannot be {self.kind}")


NO_ACTIVATION = Activation()
FLOAT_ACTIVATION = Activation(as_is=True)


@dataclass(frozen=True, slots=True, eq=False)
class CanonicalWeight:
    """One weight matrix [N, K] (output rows, input columns) as the checkpoint means it.

    dtype: a float name, ``int8``, ``int4`` (-8..7) or ``uint4`` (0..15).
    q: floats [N, K] (bfloat16 as uint16 bits); int8 [N, K]; 4-bit [N, K/2] uint8, two a byte, the even column in
        the low nibble (int4 in two's complement).
    scale, offset: [N, K/group] float32; absent for float weights; offset also absent when symmetric.
    group: columns that share a scale (K for one scale a row); 0 for float weights.
    perm: [K] int32 or None.
    activation: what the checkpoint asks for the input.
    """

    dtype: str
    q: NDArray[Any]
    scale: NDArray[np.float32] | None = None
    offset: NDArray[np.float32] | None = None
    group: int = 0
    perm: NDArray[np.int32] | None = None
    activation: Activation = field(default=NO_ACTIVATION)

    def __post_init__(self) -> None:
        n, k = self.shape
        if self.dtype not in WEIGHT_DTYPES:
            raise ValueError(f"weight dtype {self.dtype!r}; expected one of {', '.join(WEIGHT_DTYPES)}")
        if self.dtype in FLOATS:
            if self.scale is not None or self.offset is not None or self.group:
                raise ValueError("a float weight carries no scale, offset or group")
        else:
            if self.group <= 0 or k % self.group:
                raise ValueError(f"group {self.group} does not divide the {k} columns")
            want = (n, k // self.group)
            for name, part in (("scale", self.scale), ("offset", self.offset)):
                if part is None and name == "offset":
                    continue
                if part is None or part.shape != want or part.dtype != np.float32:
                    got = None if part is None else (part.shape, str(part.dtype))
                    raise ValueError(f"{name} must be float32 {want}, not {got}")
        if self.perm is not None and self.perm.shape != (k,):
            raise ValueError(f"perm must have the {k} columns, not shape {self.perm.shape}")

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        n, k = self.q.shape
        return (n, 2 * k) if self.dtype in FOUR_BIT else (n, k)

    @property
    def nbytes(self) -> int:
        """Bytes of values, scales and offsets: what a kernel has to stream."""
        parts = (self.q, self.scale, self.offset)
        return sum(p.nbytes for p in parts if p is not None)

    def values(self) -> NDArray[Any]:
        """q as one number an element, [N, K]: int8 or uint8 for integers, the host form for floats."""
        if self.dtype not in FOUR_BIT:
            return self.q
        n, half = self.q.shape
        out = np.empty((n, half, 2), np.uint8)
        np.bitwise_and(self.q, 15, out=out[:, :, 0])
        np.right_shift(self.q, 4, out=out[:, :, 1])
        if self.dtype == "uint4":
            return out.reshape(n, 2 * half)
        signed = (out ^ 8).view(np.int8)
        signed -= 8
        return signed.reshape(n, 2 * half)

    def dequantize(self, to: Any = np.float32) -> NDArray[Any]:
        """The matrix [N, K] in the checkpoint's column order, computed in ``to`` (float32 or float64)."""
        n, k = self.shape
        if self.dtype in FLOATS:
            w = decode(self.q, self.dtype, to)
        else:
            assert self.scale is not None
            groups = k // self.group
            w = self.values().astype(to).reshape(n, groups, self.group)
            w *= self.scale.astype(to)[:, :, None]
            if self.offset is not None:
                w += self.offset.astype(to)[:, :, None]
            w = w.reshape(n, k)
        if self.perm is None:
            return w
        out = np.empty_like(w)
        out[:, self.perm] = w
        return out

    def rows(self, index: slice | NDArray[Any]) -> CanonicalWeight:
        """Some output rows, as a weight of their own (views where ``index`` is a slice)."""
        return CanonicalWeight(
            self.dtype,
            self.q[index],
            None if self.scale is None else self.scale[index],
            None if self.offset is None else self.offset[index],
            self.group,
            self.perm,
            self.activation,
        )


def pack_nibbles(values: NDArray[Any]) -> NDArray[np.uint8]:
    """[N, K] small integers (int4 or uint4) -> [N, K/2] bytes, the even column in the low nibble."""
    low = values[:, 0::2].astype(np.uint8) & np.uint8(15)
    high = values[:, 1::2].astype(np.uint8) & np.uint8(15)
    return low | (high << np.uint8(4))


def float_weight(array: NDArray[Any], dtype: str) -> CanonicalWeight:
    """A float matrix as a canonical weight (no copy)."""
    return CanonicalWeight(dtype, array)
