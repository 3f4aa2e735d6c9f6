"""NumPy reference of the cache ops: paged KV, store, read, attention, move and swap.

A cache layer holds ``k`` and ``v`` as [blocks, block_size, heads, head_dim], so that the tokens of one block lie
together and a run of neighbouring blocks is one view. An ``int8`` cache keeps one symmetric scale for each token and
head beside them: scale = max|x| / 127 in float32, q = round(x / scale).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from device.contract import KVLayerSpec, KVSpec
from device.dtypes import FLOATS, decode, encode, numpy_dtype
from device.errors import ConfigError

Array = NDArray[Any]

# Scores of one chunk of rows stay below this many numbers, so that a long prompt needs no matrix of length².
_SCORES = 1 << 22
_CHUNK_ROWS = 256


class RefKVLayer:
    """One layer's pages.

    read_dtype: what ``read_kv`` gives: as stored; int8 pages dequantised. impl: see ``device.binding``.
    """

    __slots__ = ("block_size", "dtype", "head_dim", "heads", "impl", "k", "k_scale", "read_dtype", "v", "v_scale")

    def __init__(self, spec: KVLayerSpec, dtype: str, blocks: int, block_size: int, compute: str) -> None:
        self.heads, self.head_dim = spec.heads, spec.head_dim
        self.dtype, self.block_size = dtype, block_size
        self.impl: Any = None
        self.read_dtype = compute if dtype == "int8" else dtype
        shape = (blocks, block_size, spec.heads, spec.head_dim)
        self.k = np.zeros(shape, numpy_dtype(dtype))
        self.v = np.zeros(shape, numpy_dtype(dtype))
        self.k_scale: Array | None = None
        self.v_scale: Array | None = None
        if dtype == "int8":
            self.k_scale = np.zeros(shape[:3], np.float32)
            self.v_scale = np.zeros(shape[:3], np.float32)

    def arrays(self) -> tuple[Array, ...]:
        """Everything that belongs to a token, each with [blocks, block_size] first."""
        if self.k_scale is None or self.v_scale is None:
            return self.k, self.v
        return self.k, self.v, self.k_scale, self.v_scale


class RefKV:
    """A paged cache on the host.

    spec.dtype: a float name or ``int8``. compute: what ``read_kv`` dequantises an int8 cache to.
    Block 0 is reserved: padding may point at it, and it is never read.
    """

    reserved = 1

    def __init__(self, spec: KVSpec, blocks: int, block_size: int, compute: str = "float32") -> None:
        if spec.dtype not in (*FLOATS, "int8"):
            raise ConfigError(f"kv dtype {spec.dtype!r} is not possible here; use one of {', '.join(FLOATS)}, int8")
        if blocks < 1 or block_size < 1:
            raise ConfigError(f"a cache needs blocks and a block size of at least 1, not {blocks} and {block_size}")
        self.spec, self.blocks, self.block_size = spec, blocks, block_size
        self.impl: Any = None
        self.layers = [RefKVLayer(layer, spec.dtype, blocks, block_size, compute) for layer in spec.layers]

    def layer(self, index: int) -> RefKVLayer:
        """The pages of one layer."""
        return self.layers[index]

    @property
    def nbytes(self) -> int:
        """Bytes of all pages and scales."""
        return sum(array.nbytes for layer in self.layers for array in layer.arrays())

    @staticmethod
    def block_bytes(spec: KVSpec, block_size: int) -> int:
        """Bytes that one block takes in all layers, scales included."""
        scale = 4 if spec.dtype == "int8" else 0
        each = numpy_dtype(spec.dtype).itemsize
        return sum(2 * block_size * x.heads * (x.head_dim * each + scale) for x in spec.layers)


class AttnArrays(Protocol):
    """What attention needs to know about the rows: q_start [B+1], seq_lens [B], block_table [B,M], all i32."""

    q_start: Any
    seq_lens: Any
    block_table: Any
    tree: Any
    is_tree: Any


@dataclass(slots=True)
class RefMeta:
    """``AttnArrays`` as host arrays: the reference's form of ``device.contract.AttnMeta``."""

    q_start: Array
    seq_lens: Array
    block_table: Array
    tree: Array | None = None
    is_tree: Array | None = None


def _flat(array: Array) -> Array:
    """[blocks, block_size, ...] as [slots, ...]; a view."""
    return array.reshape(-1, *array.shape[2:])


def _quantize(x: Array) -> tuple[Array, Array]:
    """[T, heads, D] -> int8 values and [T, heads] float32 scales; a head of zeros has scale 0."""
    scale = (np.abs(x).max(axis=-1) / 127).astype(np.float32)
    q = np.rint(x / np.where(scale == 0, np.float32(1), scale)[..., None])
    return np.clip(q, -127, 127).astype(np.int8), scale


def store_kv(k: Array, v: Array, layer: RefKVLayer, slots: Array) -> None:
    """Write k, v [T, heads, D] to slots [T]; slot -1 is skipped."""
    if not slots.size:
        return
    if slots.min() < 0:
        live = slots >= 0
        k, v, slots = k[live], v[live], slots[live]
    if layer.k_scale is None or layer.v_scale is None:
        _flat(layer.k)[slots] = encode(k, layer.dtype)
        _flat(layer.v)[slots] = encode(v, layer.dtype)
        return
    for x, page, scales in ((k, layer.k, layer.k_scale), (v, layer.v, layer.v_scale)):
        _flat(page)[slots], _flat(scales)[slots] = _quantize(x)


def read_kv(layer: RefKVLayer, slots: Array) -> tuple[Array, Array]:
    """k, v [T, heads, D] of slots [T] in the layer's ``read_dtype`` (bfloat16: uint16 bits); slot -1 gives zeros."""
    index = np.maximum(slots, 0)
    dead = slots < 0
    out = []
    for page, scales in ((layer.k, layer.k_scale), (layer.v, layer.v_scale)):
        x = _flat(page)[index]
        if scales is not None:
            real = np.float64 if layer.read_dtype == "float64" else np.float32
            x = encode(x.astype(real) * _flat(scales)[index][..., None], layer.read_dtype)
        if dead.any():
            x[dead] = 0
        out.append(x)
    return out[0], out[1]


def move_kv(kv: RefKV, src: Array, dst: Array) -> None:
    """Copy slots src -> dst in all layers; src may overlap dst (all are read before any is written); -1 is skipped."""
    live = (src >= 0) & (dst >= 0)
    src, dst = src[live], dst[live]
    for layer in kv.layers:
        for array in layer.arrays():
            _flat(array)[dst] = _flat(array)[src]


def swap_kv(kv: RefKV, host: RefKV, pairs: Array, direction: Literal["in", "out"]) -> None:
    """Copy whole blocks: ``out``: block pairs[:,0] of kv to block pairs[:,1] of host; ``in``: back. pairs [n,2] i32."""
    if direction not in ("in", "out"):
        raise ValueError(f"direction {direction!r}; expected 'in' or 'out'")
    ours, theirs = pairs[:, 0], pairs[:, 1]
    for near, far in zip(kv.layers, host.layers, strict=True):
        for a, b in zip(near.arrays(), far.arrays(), strict=True):
            if direction == "out":
                b[theirs] = a[ours]
            else:
                a[ours] = b[theirs]


# ---------------------------------------------------------------- attention


def _gather(page: Array, scales: Array | None, layer: RefKVLayer, table: Array, lo: int, hi: int, to: Any) -> Array:
    """Positions lo … hi-1 of one sequence as [hi-lo, heads, D] in type ``to``; a view where blocks are neighbours."""
    size = layer.block_size
    first = lo // size
    ids = table[first : -(-hi // size)]
    begin = lo - first * size
    end = begin + hi - lo
    if ids.size == 1 or (ids[-1] - ids[0] == ids.size - 1 and bool((ids[1:] - ids[:-1] == 1).all())):
        at = int(ids[0]) * size
        x = _flat(page)[at + begin : at + end]
        s = None if scales is None else _flat(scales)[at + begin : at + end]
    else:
        x = _flat(page.take(ids, axis=0))[begin:end]
        s = None if scales is None else _flat(scales.take(ids, axis=0))[begin:end]
    if s is None:
        return decode(x, layer.dtype, to)
    out = x.astype(to)
    out *= s[..., None]
    return out


def paged_attention(q: Array, layer: RefKVLayer, meta: AttnArrays, scale: float, window: int | None = None) -> Array:
    """softmax(scale · q Kᵀ + mask) V over the cached K and V of each row's sequence; [T,Hq,D] -> [T,Hq·D].

    Sequence b owns rows q_start[b] … q_start[b+1]-1, and the last of them stands at position seq_lens[b]-1. A row at
    position p sees positions 0 … p, or p-window+1 … p. With ``is_tree[b]``: of the sequence's own rows of this step a
    row sees those whose bits are set in its mask, and all context before them; its position, which only the window
    needs, is then that of its depth (bits set before its own). Rows of no sequence, and of one of length 0, give zero.
    """
    rows, heads, dim = q.shape
    out = np.zeros((rows, heads * dim), q.dtype)
    starts, lens = meta.q_start.tolist(), meta.seq_lens.tolist()
    trees = meta.is_tree.tolist() if meta.tree is not None and meta.is_tree is not None else None
    groups = heads // layer.heads
    for b, length in enumerate(lens):
        begin, end = starts[b], starts[b + 1]
        if begin >= end or length <= 0:
            continue
        base = length - (end - begin)
        low = 0 if window is None else max(0, base - window + 1)
        table = meta.block_table[b]
        k = _gather(layer.k, layer.k_scale, layer, table, low, length, q.dtype)
        v = _gather(layer.v, layer.v_scale, layer, table, low, length, q.dtype)
        bits = None
        if trees is not None and trees[b]:
            bits = tree_bits(meta.tree[begin:end])
        for a, z, lo, hi, mask in _chunks(end - begin, base, window, heads, bits):
            part = q[begin + a : begin + z].reshape(z - a, layer.heads, groups, dim)
            _attend(part, k[lo - low : hi - low], v[lo - low : hi - low], scale, mask, out[begin + a : begin + z])
    return out


def tree_bits(tree: Array) -> Array:
    """[n, 2] i32 masks -> [n, n] bool: row i sees row j of its own sequence."""
    n = tree.shape[0]
    words = np.ascontiguousarray(tree).view(np.uint32)
    return (words[:, np.arange(n) // 32] >> (np.arange(n) % 32).astype(np.uint32) & 1).astype(bool)


def _chunks(
    rows: int, base: int, window: int | None, heads: int, bits: Array | None
) -> Iterator[tuple[int, int, int, int, Array | None]]:
    """(first row, end row, first position, end position, mask [rows, positions] or None for all visible)."""
    if bits is not None:
        low = 0 if window is None else max(0, base - window + 1)
        mask = np.ones((rows, base - low + rows), bool)
        mask[:, base - low :] = bits
        if window is not None:
            depth = np.maximum(bits.sum(1) - 1, 0)
            at = np.concatenate((np.arange(low, base), base + depth))
            mask &= at[None, :] > (base + depth - window)[:, None]
        yield 0, rows, low, base + rows, mask
        return
    step = min(_CHUNK_ROWS, max(1, _SCORES // (heads * (base + rows))))
    for a in range(0, rows, step):
        z = min(rows, a + step)
        lo = 0 if window is None else max(0, base + a - window + 1)
        hi = base + z
        if z - a == 1:
            yield a, z, lo, hi, None
            continue
        at, mine = np.arange(lo, hi), np.arange(base + a, base + z)[:, None]
        mask = at <= mine
        if window is not None:
            mask &= at > mine - window
        yield a, z, lo, hi, mask


def _attend(q: Array, k: Array, v: Array, scale: float, mask: Array | None, out: Array) -> None:
    """q [n, heads, group, D] over k, v [L, heads, D] -> out [n, heads·group·D]."""
    n, heads, group, dim = q.shape
    scaled = np.empty((heads, group, n, dim), q.dtype)
    np.multiply(q.transpose(1, 2, 0, 3), scale, out=scaled)
    s = np.matmul(scaled.reshape(heads, group * n, dim), k.transpose(1, 2, 0))
    if mask is not None:
        np.copyto(s.reshape(heads, group, n, -1), -np.inf, where=~mask)
    top = s.max(axis=-1, keepdims=True)
    if mask is not None:
        # A tree row whose mask is empty, with no context before it, sees nothing: its result is zero, not NaN.
        top[np.isneginf(top)] = 0
    s -= top
    np.exp(s, out=s)
    total = s.sum(axis=-1, keepdims=True)
    if mask is not None:
        total[total == 0] = 1
    y = np.matmul(s, v.transpose(1, 0, 2))
    y /= total
    out.reshape(n, heads, group, dim)[...] = y.reshape(heads, group, n, dim).transpose(2, 0, 1, 3)
