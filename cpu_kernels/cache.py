"""Paged KV in the layout of the native kernels.

K of a block and layer lies as [heads][tiles][head size][16 positions], V as [heads][positions][head size rounded up to
16]; a block's positions are rounded up to whole tiles of 16. An int8 cache has one float32 scale for each token and
head. All layers of a block are neighbours: what a sequence touches is then dense, and pages of 2 MiB cost it nothing.
"""

from __future__ import annotations

import ctypes
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpu_kernels.library import huge
from cpu_kernels.native import LANES, MAX_GROUP, MAX_HEAD_DIM, KVLayerStruct

Array = NDArray[Any]

DTYPES = ("float32", "bfloat16", "float16", "int8")
_LINE = 64
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
    return _plan(spec, block_size)[1]


def _plan(spec: Any, block_size: int) -> tuple[list[list[tuple[int, tuple[int, ...], Any]]], int]:
    """([(offset in a block, shape, dtype) of K, V and their scales] of each layer, bytes of a block)."""
    tiles, kind, at = _up(block_size) // LANES, np.dtype(_NUMPY[spec.dtype]), 0
    layers = []
    for x in spec.layers:
        shapes = [((x.heads, tiles, x.head_dim, LANES), kind), ((x.heads, tiles * LANES, _up(x.head_dim)), kind)]
        if spec.dtype == "int8":
            shapes += [((x.heads, tiles * LANES), np.dtype(np.float32))] * 2
        places = []
        for shape, dtype in shapes:
            places.append((at, shape, dtype))
            at += -(-prod(shape) * dtype.itemsize // _LINE) * _LINE
        layers.append(places)
    return layers, at


class NativeKVLayer:
    """One layer's pages. ``address``: of its ``JkKVLayer``. read_dtype: what ``read_kv`` gives.

    arrays: k, v, and the scales of an int8 cache, blocks first.
    """

    def __init__(self, impl: Any, heads: int, head_dim: int, dtype: str, block_size: int, arrays: list[Array]) -> None:
        self.impl, self.heads, self.head_dim, self.dtype, self.block_size = impl, heads, head_dim, dtype, block_size
        self.read_dtype = "float32" if dtype == "int8" else dtype
        self.k, self.v, *self.scales = arrays
        k_scale, v_scale = (s.ctypes.data for s in self.scales) if self.scales else (None, None)
        self._struct = KVLayerStruct(
            self.k.ctypes.data, self.v.ctypes.data, k_scale, v_scale, self.k.strides[0], DTYPES.index(dtype), heads,
            head_dim, _up(head_dim), block_size, _up(block_size) // LANES,
        )  # fmt: skip
        self.address = ctypes.addressof(self._struct)

    def arrays(self) -> list[Array]:
        """Everything that belongs to a block, blocks first."""
        return [self.k, self.v, *self.scales]


class NativeKV:
    """A cache. Block 0 is reserved: padding may point at it, and it is never read."""

    reserved = 1

    def __init__(self, impl: Any, spec: Any, blocks: int, block_size: int) -> None:
        self.impl, self.spec, self.blocks, self.block_size = impl, spec, blocks, block_size
        plan, size = _plan(spec, block_size)
        memory = huge(blocks * size)
        self.layers = [
            NativeKVLayer(
                impl, x.heads, x.head_dim, spec.dtype, block_size,
                [_blocks(memory, blocks, size, *place) for place in places],
            )
            for x, places in zip(spec.layers, plan, strict=True)
        ]  # fmt: skip

    def layer(self, index: int) -> NativeKVLayer:
        """The pages of one layer."""
        return self.layers[index]


def _blocks(memory: Array, blocks: int, size: int, at: int, shape: tuple[int, ...], dtype: Any) -> Array:
    """[blocks, *shape] that stands at an offset in each block."""
    return np.ndarray((blocks, *shape), dtype, memory, at, (size, *np.empty(shape, dtype).strides))


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
