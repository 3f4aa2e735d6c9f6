"""Cases of the cache ops: store, read, attention, move, swap, and the composite that ends in a store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from device.cases import Cache, Case, Generator, Meta, Profile, Rng, Values, act, clear_rows, host, i32, real, rounded
from device.cases_dense import angles
from device.contract import KVLayerSpec, KVSpec

# What lies in slots of no sequence: a stale value that would be seen at once if attention read it.
_STALE = 40.0

# (kv heads, query heads for each, head size)
HEADS = ((3, 3, 64), (2, 1, 128), (1, 8, 64), (2, 4, 96), (2, 2, 256), (1, 6, 128), (2, 5, 32), (4, 1, 16), (1, 7, 64))


def _fill(rng: Rng, profile: Profile, spec: KVSpec, slots: int, live: Values | None) -> tuple[Any, ...]:
    """Contents of every layer; slots outside ``live`` (None: all) hold stale values."""
    out = []
    for layer in spec.layers:
        pair = []
        for _ in range(2):
            x = rng.standard_normal((slots, layer.heads, layer.head_dim))
            if live is not None:
                dead = np.ones(slots, bool)
                dead[live] = False
                x[dead] *= _STALE
            pair.append(_storable(x, profile.dtype, spec.dtype))
        out.append((pair[0], pair[1]))
    return tuple(out)


def _storable(x: Values, dtype: str, kv_dtype: str) -> Values:
    """Values whose int8 form does not hang on the last bit."""
    return clear_rows(x, dtype) if kv_dtype == "int8" else rounded(x, dtype)


def _cache(
    rng: Rng, profile: Profile, spec: KVSpec, blocks: int, size: int, layer: int | None, live: Values | None = None
) -> Cache:
    """A cache of ``blocks`` blocks beside the reserved ones; live: slot numbers, counted from slot 0 of the device."""
    first = profile.reserved * size
    total = profile.reserved + blocks
    inner = None if live is None else live - first
    return Cache(spec, total, size, first, _fill(rng, profile, spec, blocks * size, inner), layer)


def scratch_cache(
    rng: Rng, profile: Profile, kv_dtype: str, shape: tuple[int, int], blocks: int, size: int, layer: int | None = 0
) -> Cache:
    """A filled cache of one layer, shape (heads, head size)."""
    return _cache(rng, profile, _spec(kv_dtype, shape), blocks, size, layer)


def _spec(kv_dtype: str, *shapes: tuple[int, int], group: int = 1, window: int | None = None) -> KVSpec:
    return KVSpec(tuple(KVLayerSpec(heads, dim, heads * group, window) for heads, dim in shapes), kv_dtype)


def _pick(options: Sequence[Any], index: int) -> Any:
    return options[index % len(options)]


def _all_slots(cache: Cache) -> dict[str, Any]:
    return {"all_slots": i32(cache.slots, "S", -1)}


# ---------------------------------------------------------------- store, read, move, swap


def store_kv(rng: Rng, profile: Profile) -> Iterator[Case]:
    for i, (heads, _, dim) in enumerate(HEADS[: 2 + 2 * len(profile.kv_dtypes)]):
        kv_dtype, size = _pick(profile.kv_dtypes, i), _pick(profile.block_sizes, i // 2)
        cache = _cache(rng, profile, _spec(kv_dtype, (heads, dim), (heads + 1, dim)), 3, size, i % 2)
        heads += i % 2
        rows = (1, 4, 7, 3)[i % 4]
        slots = rng.permutation(cache.slots)[:rows]
        if rows > 1:
            slots[rows // 2] = -1
        k, v = (rng.standard_normal((rows, heads, dim)) for _ in range(2))
        k[0, 0] = 0  # a head of zeros has an int8 scale of 0
        args = {
            "k": act(_storable(k, profile.dtype, kv_dtype)),
            "v": act(_storable(5 * v, profile.dtype, kv_dtype)),
            "layer": cache,
            "slots": i32(slots, "T", -1),
        }
        name = f"{rows} rows {heads}x{dim} {kv_dtype} block {size}"
        yield Case("store_kv", name, args, _all_slots(cache), strided=i % 2 == 1, bounds={"kv": kv_dtype})


def read_kv(rng: Rng, profile: Profile) -> Iterator[Case]:
    for i, (heads, _, dim) in enumerate(HEADS[: 2 + 2 * len(profile.kv_dtypes)]):
        kv_dtype, size = _pick(profile.kv_dtypes, i), _pick(profile.block_sizes, i // 2)
        cache = _cache(rng, profile, _spec(kv_dtype, (heads + 1, dim), (heads, dim)), 4, size, 1)
        slots = rng.permutation(cache.slots)[: (1, 9)[i % 2]]
        if i % 2:
            slots[2:4] = -1
        args = {"layer": cache, "slots": i32(slots, "T", -1)}
        yield Case("read_kv", f"{len(slots)} rows {heads}x{dim} {kv_dtype} block {size}", args, bounds={"kv": kv_dtype})


def move_kv(rng: Rng, profile: Profile) -> Iterator[Case]:
    for i, kv_dtype in enumerate(profile.kv_dtypes):
        size = _pick(profile.block_sizes, i)
        cache = _cache(rng, profile, _spec(kv_dtype, (2, 64), (1, 32)), 4, size, None)
        first = cache.first_slot
        apart = rng.permutation(cache.slots)
        moves = {
            "apart": (apart[:5], apart[5:10]),
            "overlapping, down": (np.arange(first + 3, first + 10), np.arange(first, first + 7)),
            "overlapping, up": (np.arange(first, first + 7), np.arange(first + 2, first + 9)),
            "with padding": (np.array([first + 4, -1, first + 1]), np.array([first, -1, first + 9])),
        }
        for name, (src, dst) in moves.items():
            args = {"kv": cache, "src": host(src), "dst": host(dst)}
            yield Case("move_kv", f"{name} {kv_dtype} block {size}", args, _all_slots(cache), rows=None,
                       bounds={"kv": kv_dtype})  # fmt: skip


def swap_kv(rng: Rng, profile: Profile) -> Iterator[Case]:
    for i, kv_dtype in enumerate(profile.kv_dtypes):
        size = _pick(profile.block_sizes, i)
        cache = _cache(rng, profile, _spec(kv_dtype, (2, 64), (1, 32)), 5, size, None)
        away = Cache(cache.spec, 4, size, 0, (), None, host=True)
        ours, theirs = profile.reserved + rng.permutation(5), rng.permutation(4)
        args = {
            "kv": cache,
            "host": away,
            "out_pairs": host(np.stack((ours[:3], theirs[:3]), 1)),
            # what was taken out is overwritten before it comes back, to other blocks
            "src": host(ours[4] * size + np.arange(size)),
            "dst": host(ours[0] * size + np.arange(size)),
            "in_pairs": host(np.stack((ours[1:4], theirs[:3]), 1)),
        }
        yield Case("swap_kv", f"out and back {kv_dtype} block {size}", args, _all_slots(cache), rows=None,
                   bounds={"kv": kv_dtype})  # fmt: skip


# ---------------------------------------------------------------- attention


@dataclass(frozen=True, slots=True)
class Batch:
    """Which sequences a step holds: (rows of this step, length with them) each; window; tree for every second one."""

    name: str
    sequences: tuple[tuple[int, int], ...]
    window: int | None = None
    tree: bool = False


BATCHES = (
    Batch("decode", ((1, 37), (1, 1), (1, 16), (1, 90))),
    Batch("one decode", ((1, 130),)),
    Batch("prefill", ((23, 23),)),
    Batch("chunk", ((11, 48),)),
    Batch("ragged", ((1, 33), (7, 7), (0, 0), (5, 21), (1, 1))),
    Batch("window decode", ((1, 70), (1, 5), (1, 33)), window=16),
    Batch("window ragged", ((9, 40), (1, 100), (20, 20)), window=7),
    Batch("window of one", ((4, 12), (1, 9)), window=1),
    Batch("verify", ((5, 64), (3, 18), (1, 40))),
    Batch("tree", ((9, 30), (4, 20), (12, 12), (1, 17)), tree=True),
    Batch("big tree", ((64, 80),), tree=True),
    Batch("tree, window", ((8, 40), (3, 9)), window=12, tree=True),
    Batch("long decode", ((1, 301), (1, 260))),
    Batch("long chunk", ((70, 280),)),
)


def tree_masks(rng: Rng, rows: int) -> Values:
    """[rows, 2] i32 visibility of a random tree: every row sees itself and its ancestors, among them row 0."""
    bits = [1]
    for i in range(1, rows):
        bits.append(bits[int(rng.integers(max(0, i - 5), i))] | 1 << i)
    return np.array([(b & 0xFFFFFFFF, b >> 32) for b in bits], np.uint32).view(np.int32).reshape(rows, 2)


def batch_meta(rng: Rng, profile: Profile, batch: Batch, size: int) -> tuple[Meta, Values, int]:
    """(metadata with block tables in random order, the slots that hold context, how many blocks are needed)."""
    sequences = batch.sequences[: profile.max_seqs]
    needs = [-(-length // size) for _, length in sequences]
    blocks = sum(needs) + 2
    order = profile.reserved + rng.permutation(blocks)
    width = max(needs) + 1
    table = np.zeros((len(sequences), width), np.int32)
    live, slots, trees, at = [], [], [], 0
    for b, ((rows, length), need) in enumerate(zip(sequences, needs, strict=True)):
        table[b, :need] = order[at : at + need]
        at += need
        positions = np.arange(length)
        own = table[b, positions // size] * size + positions % size
        live.append(own)
        slots.append(own[length - rows :])
        is_tree = batch.tree and b % 2 == 0
        trees.append(tree_masks(rng, rows) if is_tree else np.zeros((rows, 2), np.int32))
    q_start = np.cumsum([0, *(rows for rows, _ in sequences)]).astype(np.int32)
    meta = Meta(
        q_start,
        np.array([length for _, length in sequences], np.int32),
        table,
        np.concatenate(slots).astype(np.int32),
        np.concatenate(trees) if batch.tree else None,
        np.array([b % 2 == 0 for b in range(len(sequences))], np.int32) if batch.tree else None,
    )
    return meta, np.concatenate(live), blocks


def paged_attention(rng: Rng, profile: Profile) -> Iterator[Case]:
    batches = [b for b in BATCHES if profile.tree or not b.tree]
    for i in range(max(len(batches), len(HEADS) * len(profile.kv_dtypes))):
        batch, (heads, group, dim) = _pick(batches, i), _pick(HEADS, i)
        kv_dtype, size = _pick(profile.kv_dtypes, i), _pick(profile.block_sizes, i)
        yield attention_case(rng, profile, batch, (heads, group, dim), kv_dtype, size, strided=i % 3 == 1)


def attention_case(
    rng: Rng,
    profile: Profile,
    batch: Batch,
    heads: tuple[int, int, int],
    kv_dtype: str,
    size: int,
    *,
    strided: bool = False,
) -> Case:
    """One call of attention over a filled cache; heads: (kv heads, query heads for each, head size)."""
    kv_heads, group, dim = heads
    meta, live, blocks = batch_meta(rng, profile, batch, size)
    spec = _spec(kv_dtype, (kv_heads, dim), group=group, window=batch.window)
    cache = _cache(rng, profile, spec, blocks, size, 0, live)
    rows = int(meta.q_start[-1])
    # Scores with a deviation of about 2: neither uniform weights nor a single one.
    q = 2 * rng.standard_normal((rows, kv_heads * group, dim))
    args = {"q": act(q), "layer": cache, "meta": meta, "scale": dim**-0.5, "window": batch.window}
    name = f"{batch.name} {kv_heads * group}/{kv_heads} heads of {dim} {kv_dtype} block {size}"
    return Case("paged_attention", name, args, strided=strided, bounds={"depth": int(meta.seq_lens.max()) + dim})


# ---------------------------------------------------------------- the composite


def qkv_rope_store(rng: Rng, profile: Profile) -> Iterator[Case]:
    for i in range(max(6, 2 * len(profile.kv_dtypes))):
        hkv, group, d = _pick(HEADS, i)
        kv_dtype, size = _pick(profile.kv_dtypes, i // 2), _pick(profile.block_sizes, i)
        heads, rows, rot = (hkv * group, hkv, d), (1, 6, 3)[i % 3], d if i % 4 else d // 2
        cache = _cache(rng, profile, _spec(kv_dtype, (hkv, d), group=group), 3, size, 0)
        slots = rng.permutation(cache.slots)[:rows]
        if rows > 1:
            slots[-1] = -1
        normed = i % 2 == 1
        args: dict[str, Any] = {
            "qkv": act(rng.standard_normal((rows, (heads[0] + 2 * hkv) * d))),
            "heads": heads,
            "q_norm": real(1 + 0.2 * rng.standard_normal(d)) if normed else None,
            "k_norm": real(1 + 0.2 * rng.standard_normal(d)) if normed else None,
            "eps": 1e-6,
            "positions": i32(rng.integers(0, 300, rows), "T"),
            "cos_sin": real(angles(300, rot)),
            "layer": cache,
            "slots": i32(slots, "T", -1),
        }
        # The largest of d normal numbers is about sqrt(2 ln d), seldom 1.6 times that; it is 127 steps.
        step = 1.6 * float(np.sqrt(2 * np.log(d))) / 127 if kv_dtype == "int8" else 0.0
        name = f"{rows} rows {heads[0]}+2·{hkv} heads of {d} rot {rot} {kv_dtype} block {size}{' normed' * normed}"
        yield Case("qkv_rope_store", name, args, _all_slots(cache), strided=i % 3 == 1,
                   bounds={"depth": d, "step": step, "elements": rows * hkv * d, "kv": kv_dtype})  # fmt: skip


GENERATORS: dict[str, Generator] = {
    "store_kv": store_kv,
    "read_kv": read_kv,
    "paged_attention": paged_attention,
    "move_kv": move_kv,
    "swap_kv": swap_kv,
    "qkv_rope_store": qkv_rope_store,
}
