"""Paged KV in the layout of the native kernels.

K of a block lies as [heads][tiles][head size][16 positions], V as [heads][positions][head size rounded up to 16]; a
block's positions are rounded up to whole tiles of 16. An int8 cache has one float32 scale for each token and head.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpu_kernels.native import LANES, MAX_GROUP, MAX_HEAD_DIM, KVLayerStruct

Array = NDArray[Any]

DTYPES = ("float32", "bfloat16", "float16", "int8")
_NUMPY = {"float32": np.float32, "bfloat16": np.uint16, "float16": np.float16, "int8": np.int8}


def _up(n: int) -> int:
    return -(-n // LANES) * LANES


def takes(spec: Any) -> bool:
    """Whether a cache of this ``KVSpec`` is native."""
    return spec.dtype in DTYPES and all(
        x.head_dim <= MAX_HEAD_DIM and x.q_heads // x.heads <= MAX_GROUP for x in spec.layers
    )


def block_bytes(spec: Any, block_size: int) -> int:
    """Bytes of one block in all layers, padding and scales included."""
    slots = _up(block_size)
    each = np.dtype(_NUMPY[spec.dtype]).itemsize
    scales = 8 if spec.dtype == "int8" else 0
    return sum(slots * x.heads * ((x.head_dim + _up(x.head_dim)) * each + scales) for x in spec.layers)


class NativeKVLayer:
    """One layer's pages. ``address``: of its ``JkKVLayer``. read_dtype: what ``read_kv`` gives."""

    def __init__(self, impl: Any, heads: int, head_dim: int, dtype: str, blocks: int, block_size: int) -> None:
        self.impl, self.heads, self.head_dim, self.dtype, self.block_size = impl, heads, head_dim, dtype, block_size
        self.read_dtype = "float32" if dtype == "int8" else dtype
        tiles = _up(block_size) // LANES
        kind = _NUMPY[dtype]
        self.k: Array = np.zeros((blocks, heads, tiles, head_dim, LANES), kind)
        self.v: Array = np.zeros((blocks, heads, tiles * LANES, _up(head_dim)), kind)
        self.scales: tuple[Array, ...] = ()
        if dtype == "int8":
            self.scales = tuple(np.zeros((blocks, heads, tiles * LANES), np.float32) for _ in "kv")
        k_scale, v_scale = (s.ctypes.data for s in self.scales) if self.scales else (None, None)
        self._struct = KVLayerStruct(
            self.k.ctypes.data, self.v.ctypes.data, k_scale, v_scale, DTYPES.index(dtype), heads, head_dim,
            _up(head_dim), block_size, tiles,
        )  # fmt: skip
        self.address = ctypes.addressof(self._struct)

    def arrays(self) -> tuple[Array, ...]:
        """Everything that belongs to a block, blocks first."""
        return self.k, self.v, *self.scales


class NativeKV:
    """A cache. Block 0 is reserved: padding may point at it, and it is never read."""

    reserved = 1

    def __init__(self, impl: Any, spec: Any, blocks: int, block_size: int) -> None:
        self.impl, self.spec, self.blocks, self.block_size = impl, spec, blocks, block_size
        self.layers = [NativeKVLayer(impl, x.heads, x.head_dim, spec.dtype, blocks, block_size) for x in spec.layers]

    def layer(self, index: int) -> NativeKVLayer:
        """The pages of one layer."""
        return self.layers[index]


def move_kv(kv: NativeKV, src: Array, dst: Array) -> None:
    """Copy slots src -> dst in all layers; all are read before any is written; -1 is skipped."""
    live = (src >= 0) & (dst >= 0)
    src, dst = src[live], dst[live]
    a, i = src // kv.block_size, src % kv.block_size
    b, j = dst // kv.block_size, dst % kv.block_size
    for layer in kv.layers:
        layer.k[b, :, j // LANES, :, j % LANES] = layer.k[a, :, i // LANES, :, i % LANES]
        for array in (layer.v, *layer.scales):
            array[b, :, j] = array[a, :, i]
