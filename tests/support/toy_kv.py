"""The paged cache of the toy device: [blocks, heads, D, 128], so that the tokens of a block are the fastest dimension.

``scatter`` is what the vendor offers: it refuses -1 and repeated slots. The binding around it sends rows that are to
be skipped to slots of the reserved blocks, one for each row. A slot that nobody wrote holds NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from device.contract import AttnMeta, KVLayerSpec, KVSpec
from device.dtypes import itemsize
from device.errors import DeviceError
from tests.support.toy_tensor import Stream, ToyTensor

Array = NDArray[Any]

BLOCK = 128
RESERVED = 2
"""Blocks for padding: enough for so many skipped rows in one call of ``scatter``; longer steps take several calls."""
_PAD = 16


def _padded(dim: int) -> int:
    """Head sizes are rounded up to 16."""
    return -(-dim // _PAD) * _PAD


def block_bytes(spec: KVSpec) -> int:
    """Bytes of one block in all layers, padding and scales included."""
    scale = 4 if spec.dtype == "int8" else 0
    return sum(2 * BLOCK * x.heads * (_padded(x.head_dim) * itemsize(spec.dtype) + scale) for x in spec.layers)


class ToyKVLayer:
    """One layer: pages of k and v, and for int8 their scales [blocks, heads, 128]."""

    def __init__(self, stream: Stream, impl: Any, spec: KVLayerSpec, dtype: str, blocks: int, compute: str) -> None:
        self.impl, self.heads, self.head_dim, self.dtype = impl, spec.heads, spec.head_dim, dtype
        self.read_dtype = compute if dtype == "int8" else dtype
        shape = (blocks, spec.heads, _padded(spec.head_dim), BLOCK)
        self.pages = tuple(ToyTensor.empty(stream, shape, dtype) for _ in "kv")
        self.scales: tuple[ToyTensor, ...] = ()
        if dtype == "int8":
            self.scales = tuple(ToyTensor.empty(stream, (*shape[:2], BLOCK), "float32") for _ in "kv")

    def everything(self) -> tuple[Array, ...]:
        """All that belongs to a token, blocks first and slots of a block last; on the worker."""
        return tuple(t.array() for t in (*self.pages, *self.scales))


class ToyKV:
    """A cache. On the host (``host_kv``) nothing is reserved, and no layer can be attended to."""

    block_size = BLOCK

    def __init__(
        self, stream: Stream, impl: Any, spec: KVSpec, blocks: int, compute: str, *, on_host: bool = False
    ) -> None:
        self.impl, self.spec, self.blocks, self.on_host = impl, spec, blocks, on_host
        self.reserved = 0 if on_host else RESERVED
        self.layers = [ToyKVLayer(stream, impl, layer, spec.dtype, blocks, compute) for layer in spec.layers]

    def layer(self, index: int) -> ToyKVLayer:
        if self.on_host:
            raise DeviceError("a cache in host memory is only for swap_kv")
        return self.layers[index]


# ---------------------------------------------------------------- store and read


def scatter(page: Array, slots: Array, rows: Array) -> None:
    """The vendor's scatter: rows [T, ...] to slots of page [blocks, ..., 128]. Refuses -1 and a slot given twice."""
    if slots.size and (slots.min() < 0 or slots.max() >= page.shape[0] * BLOCK):
        raise DeviceError(f"scatter: slots {slots.min()} … {slots.max()} of {page.shape[0] * BLOCK}")
    if np.unique(slots).size != slots.size:
        raise DeviceError("scatter: a slot was given twice")
    page[slots // BLOCK, ..., slots % BLOCK] = rows


def store(k: Array, v: Array, layer: ToyKVLayer, slots: Array) -> None:
    """``scatter`` in pieces of as many rows as there are reserved slots; a skipped row goes to the one of its own."""
    spare = RESERVED * BLOCK
    if ((slots >= 0) & (slots < spare)).any():
        raise DeviceError("store_kv: a slot of a reserved block holds no token of a sequence")
    if (slots < -1).any():
        raise DeviceError("store_kv: a slot is -1 (skip) or a place in the cache")
    for start in range(0, slots.size, spare):
        piece = slice(start, start + spare)
        mine = slots[piece]
        places = np.where(mine < 0, np.arange(mine.size, dtype=mine.dtype), mine)
        for at, x in enumerate((k[piece], v[piece])):
            page = layer.pages[at].array()[:, :, : layer.head_dim]
            if layer.scales:
                scale = (np.abs(x).max(axis=-1) / 127).astype(np.float32)
                safe = np.where(scale == 0, np.float32(1), scale)
                scatter(page, places, np.clip(np.rint(x / safe[..., None]), -127, 127).astype(np.int8))
                scatter(layer.scales[at].array(), places, scale)
            else:
                scatter(page, places, x.astype(page.dtype, copy=False))


def read(layer: ToyKVLayer, slots: Array) -> tuple[Array, Array]:
    """k, v [T, heads, D] of slots; zeros where -1."""
    if ((slots >= 0) & (slots < RESERVED * BLOCK)).any():
        raise DeviceError("read_kv: reserved blocks are never read")
    block, place = np.maximum(slots, 0) // BLOCK, np.maximum(slots, 0) % BLOCK
    out = []
    for at, pages in enumerate(layer.pages):
        x = pages.array()[block, :, : layer.head_dim, place].astype(layer.read_dtype)
        if layer.scales:
            x *= layer.scales[at].array()[block, :, place][..., None]
        x[slots < 0] = 0
        out.append(x)
    return out[0], out[1]


def move(kv: ToyKV, src: Array, dst: Array) -> None:
    """Slots src -> dst in all layers; the binding leaves out pairs with a -1, since these slots are on the host."""
    live = (src >= 0) & (dst >= 0)
    src, dst = src[live], dst[live]
    if src.size and min(src.min(), dst.min()) < kv.reserved * BLOCK:
        raise DeviceError("move_kv: reserved blocks hold nothing")
    for layer in kv.layers:
        for array in layer.everything():
            scatter(array, dst, array[src // BLOCK, ..., src % BLOCK])


def swap(kv: ToyKV, host: ToyKV, pairs: Array, direction: Literal["in", "out"]) -> None:
    """Whole blocks between a cache and one in host memory: pairs [n, 2] (block of kv, block of host)."""
    if direction not in ("in", "out"):
        raise ValueError(f"direction {direction!r}; expected 'in' or 'out'")
    if not host.on_host or kv.on_host or (pairs.size and pairs[:, 0].min() < kv.reserved):
        raise DeviceError("swap_kv: between blocks of a cache that are not reserved and a host cache")
    for near, far in zip(kv.layers, host.layers, strict=True):
        for a, b in zip(near.everything(), far.everything(), strict=True):
            if direction == "out":
                b[pairs[:, 1]] = a[pairs[:, 0]]
            else:
                a[pairs[:, 0]] = b[pairs[:, 1]]


# ---------------------------------------------------------------- attention


def attend(q: Array, layer: ToyKVLayer, meta: AttnMeta, scale: float, window: int | None) -> Array:
    """[T, Hq, D] -> [T, Hq·D]. Lengths are taken from the host lists, as the vendor's operator wants them; the tensors
    must say the same, and sequences beyond the lists (padding) must be empty."""
    table: Any = meta.block_table
    lengths = _checked_lengths(meta)
    blocks = table.array()
    tree, is_tree = _raw(meta.tree), _raw(meta.is_tree)
    out = np.zeros(q.shape, q.dtype)
    start = 0
    for b, (rows, length) in enumerate(lengths):
        mine = slice(start, start + rows)
        start += rows
        if rows == 0 or length == 0:
            continue
        used = blocks[b, : -(-length // BLOCK)]
        if used.min() < RESERVED:
            raise DeviceError(f"paged_attention: sequence {b} has a reserved block in its table")
        own = tree[mine] if tree is not None and is_tree is not None and is_tree[b] else None
        seen = _visible(rows, length, window, own)
        out[mine] = _softmax_sum(q[mine], layer, used, seen, scale)
    return out.reshape(q.shape[0], -1)


def _checked_lengths(meta: AttnMeta) -> list[tuple[int, int]]:
    q_start, seq_lens = _raw(meta.q_start), _raw(meta.seq_lens)
    count = len(meta.q_lens)
    same = len(meta.kv_lens) == count <= seq_lens.size and q_start[0] == 0
    same = same and np.array_equal(np.diff(q_start[: count + 1]), meta.q_lens)
    same = same and np.array_equal(seq_lens[:count], meta.kv_lens) and not seq_lens[count:].any()
    if not same:
        raise DeviceError(
            f"paged_attention: host lists {list(meta.q_lens)}, {list(meta.kv_lens)} and the device's q_start "
            f"{q_start.tolist()}, seq_lens {seq_lens.tolist()} differ"
        )
    return list(zip(meta.q_lens, meta.kv_lens, strict=True))


def _raw(t: Any) -> Any:
    return None if t is None else t.array()


def _visible(rows: int, length: int, window: int | None, tree: Array | None) -> Array:
    """[rows, length] bool: what each row sees of the positions 0 … length - 1."""
    first = length - rows
    seen = np.ones((rows, length), bool)
    at, own = np.arange(length), np.arange(first, length)
    if tree is None:
        seen &= at[None, :] <= own[:, None]
    else:
        words = tree.astype(np.int64) & 0xFFFFFFFF
        bits = (words[:, :1] | (words[:, 1:] << 32)) >> np.arange(rows) & 1 == 1
        seen[:, first:] = bits
        own = first + np.maximum(bits.sum(axis=1) - 1, 0)
        at = np.concatenate((at[:first], own))
    if window is not None:
        seen &= at[None, :] > own[:, None] - window
    return seen


def _softmax_sum(q: Array, layer: ToyKVLayer, blocks: Sequence[int] | Array, seen: Array, scale: float) -> Array:
    """Block by block with a running maximum and sum, as in arXiv 2205.14135; a row that sees nothing gives zeros.

    A position that no row may see is not read: it may hold NaN.
    """
    rows, heads, dim = q.shape
    group = heads // layer.heads
    grouped = q.reshape(rows, layer.heads, group, dim)
    top = np.full((rows, layer.heads, group), -np.inf, q.dtype)
    total = np.zeros_like(top)
    mixed = np.zeros(grouped.shape, q.dtype)
    for at, block in enumerate(blocks):
        mask = seen[:, at * BLOCK : (at + 1) * BLOCK]
        wanted = np.flatnonzero(mask.any(axis=0))
        if not wanted.size:
            continue
        k, v = (_positions(layer, kind, int(block), wanted, q.dtype) for kind in (0, 1))
        score = np.einsum("thgd,hdl->thgl", grouped, k) * scale
        score = np.where(mask[:, None, None, wanted], score, -np.inf)
        new = np.maximum(top, score.max(axis=-1))
        finite = np.where(np.isneginf(new), 0, new)
        weight = np.exp(score - finite[..., None])
        fade = np.exp(top - finite)
        total = total * fade + weight.sum(axis=-1)
        mixed = mixed * fade[..., None] + np.einsum("thgl,hdl->thgd", weight, v)
        top = new
    result: Array = mixed / np.where(total == 0, 1, total)[..., None]
    return result.reshape(q.shape)


def _positions(layer: ToyKVLayer, kind: int, block: int, wanted: Array, real: Any) -> Array:
    """Some slots of one block as [heads, D, n] in the type that attention computes in."""
    x = layer.pages[kind].array()[block, :, : layer.head_dim, wanted].astype(real)
    if layer.scales:
        x *= layer.scales[kind].array()[block][:, wanted].T[..., None]
    return x.transpose(1, 2, 0)
