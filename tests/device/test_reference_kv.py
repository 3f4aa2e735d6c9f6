"""The reference of the cache ops: attention against a full softmax written out, caches against lists."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from device import reference, reference_kv
from device.contract import KVLayerSpec, KVSpec
from device.dtypes import bf16_to_f32, f32_to_bf16
from device.errors import ConfigError

Array = NDArray[Any]


class Sequence:
    """One sequence with all its K and V, placed in random blocks of a cache."""

    def __init__(self, rng: np.random.Generator, kv: reference.RefKV, blocks: list[int], length: int) -> None:
        layer = kv.layer(0)
        size = kv.block_size
        self.length = length
        self.table = [blocks.pop(int(rng.integers(len(blocks)))) for _ in range(-(-length // size))]
        self.k, self.v = (rng.standard_normal((length, layer.heads, layer.head_dim)) for _ in range(2))
        self.slots = np.array([self.table[p // size] * size + p % size for p in range(length)], np.int32)
        reference.store_kv(self.k, self.v, layer, self.slots)


def cache(
    blocks: int, size: int, heads: int, dim: int, dtype: str = "float64", fill: float = np.nan
) -> reference.RefKV:
    """A cache whose unused slots hold NaN: whoever reads one gives NaN."""
    kv = reference.RefKV(KVSpec((KVLayerSpec(heads, dim),), dtype), blocks, size, "float64")
    if dtype == "float64":
        kv.layer(0).k[:] = np.nan
        kv.layer(0).v[:] = np.nan
    return kv


def batch(sequences: list[Sequence], rows: list[int], **tree: Any) -> reference.RefMeta:
    width = max(len(s.table) for s in sequences) + 1
    table = np.zeros((len(sequences), width), np.int32)
    for b, s in enumerate(sequences):
        table[b, : len(s.table)] = s.table
    lengths = np.array([s.length for s in sequences], np.int32)
    return reference.RefMeta(np.cumsum([0, *rows]).astype(np.int32), lengths, table, **tree)


def softmax_row(q: Array, k: Array, v: Array, scale: float, visible: list[int]) -> Array:
    """One row of all heads: [Hq, D] over the visible positions."""
    group = q.shape[0] // k.shape[1]
    out = np.zeros_like(q)
    for h in range(q.shape[0]):
        scores = [scale * math.fsum((q[h] * k[p, h // group]).tolist()) for p in visible]
        weights = [math.exp(s - max(scores)) for s in scores]
        for w, p in zip(weights, visible, strict=True):
            out[h] += w / math.fsum(weights) * v[p, h // group]
    return out.reshape(-1)


@settings(max_examples=60)
@given(st.data())
def test_attention_equals_the_full_softmax(data: st.DataObject) -> None:
    draw = data.draw
    heads, group, dim = (
        draw(st.sampled_from([1, 2, 3])),
        draw(st.sampled_from([1, 2, 5])),
        draw(st.sampled_from([4, 8])),
    )
    size = draw(st.sampled_from([1, 3, 16]))
    window = draw(st.one_of(st.none(), st.integers(1, 12)))
    lengths = draw(st.lists(st.integers(1, 30), min_size=1, max_size=4))
    rows = [draw(st.integers(0, n)) for n in lengths]
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    kv = cache(1 + sum(-(-n // size) for n in lengths) + 2, size, heads, dim)
    free = list(range(1, kv.blocks))
    sequences = [Sequence(rng, kv, free, n) for n in lengths]
    q = rng.standard_normal((sum(rows) + 2, heads * group, dim))  # two rows of padding
    got = reference.paged_attention(q, kv.layer(0), batch(sequences, rows), 0.3, window)
    at = 0
    for s, n in zip(sequences, rows, strict=True):
        for position in range(s.length - n, s.length):
            low = 0 if window is None else max(0, position - window + 1)
            want = softmax_row(q[at], s.k, s.v, 0.3, list(range(low, position + 1)))
            np.testing.assert_allclose(got[at], want, rtol=1e-11, atol=1e-12)
            at += 1
    np.testing.assert_array_equal(got[at:], 0)


@pytest.mark.parametrize("window", [None, 5, 40])
def test_chunks_and_single_rows_give_what_the_whole_prompt_gives(window: int | None) -> None:
    rng = np.random.default_rng(1)
    kv = cache(20, 8, 2, 16)
    s = Sequence(rng, kv, list(range(1, 20)), 60)
    q = rng.standard_normal((60, 6, 16))

    def run(begin: int, end: int) -> Array:
        part = reference.RefMeta(np.array([0, end - begin]), np.array([end]), np.array([s.table]))
        return reference.paged_attention(q[begin:end], kv.layer(0), part, 0.25, window)

    whole = run(0, 60)
    for step in (1, 7, 32):
        parts = [run(a, min(60, a + step)) for a in range(0, 60, step)]
        np.testing.assert_allclose(np.concatenate(parts), whole, rtol=1e-11, atol=1e-12)


def test_long_prompts_are_taken_in_chunks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(2)
    kv = cache(12, 8, 2, 8)
    s = Sequence(rng, kv, list(range(1, 12)), 50)
    q = rng.standard_normal((41, 4, 8))
    want = reference.paged_attention(q, kv.layer(0), batch([s], [41]), 0.4)
    for scores, rows in ((1, 256), (4 * 50 * 7, 256), (1 << 22, 10)):
        monkeypatch.setattr(reference_kv, "_SCORES", scores)
        monkeypatch.setattr(reference_kv, "_CHUNK_ROWS", rows)
        got = reference.paged_attention(q, kv.layer(0), batch([s], [41]), 0.4)
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-13)


def test_a_window_never_reads_what_lies_before_it() -> None:
    rng = np.random.default_rng(3)
    kv = cache(12, 4, 1, 8)
    s = Sequence(rng, kv, list(range(1, 12)), 40)
    kv.layer(0).k.reshape(-1, 1, 8)[s.slots[:20]] = np.nan
    kv.layer(0).v.reshape(-1, 1, 8)[s.slots[:20]] = np.nan
    for rows, window in ((1, 20), (5, 16)):
        y = reference.paged_attention(rng.standard_normal((rows, 2, 8)), kv.layer(0), batch([s], [rows]), 1.0, window)
        assert np.isfinite(y).all()
    wide = reference.paged_attention(rng.standard_normal((1, 2, 8)), kv.layer(0), batch([s], [1]), 1.0, 21)
    assert np.isnan(wide).all()


def test_empty_sequences_and_rows_of_nobody_give_zero() -> None:
    kv = cache(3, 4, 1, 8)
    meta = reference.RefMeta(np.array([0, 0, 2, 2]), np.array([0, 0, 0]), np.zeros((3, 2), np.int32))
    np.testing.assert_array_equal(reference.paged_attention(np.ones((4, 2, 8)), kv.layer(0), meta, 1.0), 0)


# ---------------------------------------------------------------- trees


def masks(visible: list[list[int]]) -> Array:
    bits = [sum(1 << j for j in row) for row in visible]
    return np.array([[b & 0xFFFFFFFF, b >> 32] for b in bits], np.uint32).view(np.int32)


def test_a_chain_as_a_tree_is_the_causal_result() -> None:
    rng = np.random.default_rng(4)
    kv = cache(30, 4, 2, 8)
    free = list(range(1, 30))
    a, b = Sequence(rng, kv, free, 70), Sequence(rng, kv, free, 9)
    q = rng.standard_normal((64 + 3, 4, 8))
    chain = np.concatenate([masks([list(range(i + 1)) for i in range(n)]) for n in (64, 3)])
    for window in (None, 1, 6, 66):
        causal = reference.paged_attention(q, kv.layer(0), batch([a, b], [64, 3]), 0.5, window)
        as_tree = batch([a, b], [64, 3], tree=chain, is_tree=np.array([1, 1]))
        got = reference.paged_attention(q, kv.layer(0), as_tree, 0.5, window)
        np.testing.assert_allclose(got, causal, rtol=1e-12, atol=1e-13)
        half = batch([a, b], [64, 3], tree=chain * 0, is_tree=np.array([0, 0]))
        np.testing.assert_array_equal(reference.paged_attention(q, kv.layer(0), half, 0.5, window), causal)


def test_tree_rows_see_their_ancestors_and_all_context() -> None:
    rng = np.random.default_rng(5)
    kv = cache(12, 4, 1, 8)
    s = Sequence(rng, kv, list(range(1, 12)), 15)
    visible = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4]]  # two branches of depth 2
    meta = batch([s], [5], tree=masks(visible), is_tree=np.array([1]))
    q = rng.standard_normal((5, 2, 8))
    got = reference.paged_attention(q, kv.layer(0), meta, 0.5)
    for i, own in enumerate(visible):
        want = softmax_row(q[i], s.k, s.v, 0.5, [*range(10), *(10 + j for j in own)])
        np.testing.assert_allclose(got[i], want, rtol=1e-12)
    # rows 3 and 4 stand at position 12, that of their depth: a window of 4 begins at position 9
    narrow = reference.paged_attention(q, kv.layer(0), meta, 0.5, 4)
    np.testing.assert_allclose(narrow[4], softmax_row(q[4], s.k, s.v, 0.5, [9, 10, 12, 14]), rtol=1e-12)


def test_a_tree_row_that_sees_nothing_gives_zero() -> None:
    rng = np.random.default_rng(6)
    kv = cache(4, 4, 1, 8)
    s = Sequence(rng, kv, [1, 2, 3], 2)
    meta = batch([s], [2], tree=masks([[0], []]), is_tree=np.array([1]))
    y = reference.paged_attention(rng.standard_normal((2, 1, 8)), kv.layer(0), meta, 1.0)
    np.testing.assert_array_equal(y[1], 0)
    np.testing.assert_allclose(y[0], s.v[0, 0])


# ---------------------------------------------------------------- stores


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_float_cache_keeps_what_its_dtype_can_hold(dtype: str) -> None:
    rng = np.random.default_rng(7)
    kv = cache(3, 4, 2, 8, dtype)
    k, v = (rng.standard_normal((3, 2, 8)) for _ in range(2))
    reference.store_kv(k, v, kv.layer(0), np.array([5, -1, 9], np.int32))
    got, _ = reference.read_kv(kv.layer(0), np.array([9, -1, 5, 6], np.int32))
    if dtype == "bfloat16":
        assert kv.layer(0).read_dtype == "bfloat16"
        got, want = bf16_to_f32(got), bf16_to_f32(f32_to_bf16(k))
    else:
        want = k.astype(dtype)
    np.testing.assert_array_equal(got, [want[2], 0 * want[0], want[0], 0 * want[0]])
    assert not np.asarray(kv.layer(0).k[0]).any()  # the reserved block


def test_int8_has_one_scale_for_each_token_and_head() -> None:
    rng = np.random.default_rng(8)
    kv = cache(3, 4, 2, 8, "int8")
    k = rng.standard_normal((2, 2, 8)) * np.array([[[1.0], [50.0]], [[0.0], [1e-4]]])
    reference.store_kv(k, -k, kv.layer(0), np.array([4, 6], np.int32))
    got_k, got_v = reference.read_kv(kv.layer(0), np.array([4, 6], np.int32))
    for t in range(2):
        for h in range(2):
            step = float(np.float32(max(abs(x) for x in k[t, h]) / 127))
            want = [step * round(x / step) if step else 0.0 for x in k[t, h]]
            np.testing.assert_allclose(got_k[t, h], want, rtol=1e-12)
            np.testing.assert_allclose(got_v[t, h], [-x for x in want], rtol=1e-12)
            assert np.abs(got_k[t, h] - k[t, h]).max() <= 0.5001 * step


def test_attention_reads_an_int8_cache_as_it_is_stored() -> None:
    rng = np.random.default_rng(9)
    kv = cache(8, 4, 2, 16, "int8")
    s = Sequence(rng, kv, list(range(1, 8)), 21)
    k, v = reference.read_kv(kv.layer(0), s.slots)
    q = rng.standard_normal((3, 4, 16))
    got = reference.paged_attention(q, kv.layer(0), batch([s], [3]), 0.25)
    for i in range(3):
        np.testing.assert_allclose(got[i], softmax_row(q[i], k, v, 0.25, list(range(19 + i))), rtol=1e-11, atol=1e-12)


@given(st.lists(st.tuples(st.integers(-1, 11), st.integers(0, 11)), max_size=8, unique_by=lambda p: p[1]),
       st.sampled_from(["float32", "int8"]))  # fmt: skip
def test_move_reads_all_before_it_writes(pairs: list[tuple[int, int]], dtype: str) -> None:
    rng = np.random.default_rng(10)
    spec = KVSpec((KVLayerSpec(1, 4), KVLayerSpec(2, 4)), dtype)
    kv = reference.RefKV(spec, 3, 4)
    slots = np.arange(12, dtype=np.int32)
    for layer in kv.layers:
        reference.store_kv(*(rng.standard_normal((12, layer.heads, 4)) for _ in range(2)), layer, slots)
    before = [reference.read_kv(layer, slots) for layer in kv.layers]
    src, dst = (np.array([p[i] for p in pairs], np.int32) for i in (0, 1))
    reference.move_kv(kv, src, dst)
    order = list(range(12))
    for a, b in pairs:
        if a >= 0:
            order[b] = a
    for layer, old in zip(kv.layers, before, strict=True):
        for x, y in zip(reference.read_kv(layer, slots), old, strict=True):
            np.testing.assert_array_equal(x, y[order])


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_swap_brings_blocks_back_to_where_they_are_wanted(dtype: str) -> None:
    rng = np.random.default_rng(11)
    spec = KVSpec((KVLayerSpec(2, 4), KVLayerSpec(1, 8)), dtype)
    kv, host = reference.RefKV(spec, 5, 4), reference.RefKV(spec, 3, 4)
    slots = np.arange(4, 20, dtype=np.int32)
    for layer in kv.layers:
        reference.store_kv(*(rng.standard_normal((16, layer.heads, layer.head_dim)) for _ in range(2)), layer, slots)
    before = [reference.read_kv(layer, slots)[0] for layer in kv.layers]
    reference.swap_kv(kv, host, np.array([[1, 2], [4, 0]]), "out")
    reference.move_kv(kv, np.arange(8, 12), np.arange(4, 8))
    reference.swap_kv(kv, host, np.array([[3, 2], [1, 0]]), "in")
    for layer, old in zip(kv.layers, before, strict=True):
        now = reference.read_kv(layer, slots)[0].reshape(4, 4, layer.heads, layer.head_dim)
        blocks = old.reshape(now.shape)
        np.testing.assert_array_equal(now, np.stack((blocks[3], blocks[1], blocks[0], blocks[3])))
    with pytest.raises(ValueError, match="expected 'in' or 'out'"):
        reference.swap_kv(kv, host, np.zeros((0, 2), int), "back")  # type: ignore[arg-type]


def test_bytes_of_a_block_count_layers_and_scales() -> None:
    spec = KVSpec((KVLayerSpec(2, 64), KVLayerSpec(3, 32)), "int8")
    per_token = 2 * (2 * (64 + 4) + 3 * (32 + 4))
    assert reference.RefKV.block_bytes(spec, 16) == 16 * per_token
    assert reference.RefKV(spec, 7, 16).nbytes == 7 * 16 * per_token
    floats = KVSpec(spec.layers, "bfloat16")
    assert reference.RefKV.block_bytes(floats, 16) == 16 * 2 * 2 * (2 * 64 + 3 * 32)


def test_a_cache_refuses_an_unknown_dtype_and_no_blocks() -> None:
    layer = (KVLayerSpec(1, 8),)
    with pytest.raises(ConfigError, match="kv dtype 'fp8'"):
        reference.RefKV(KVSpec(layer, "fp8"), 2, 16)
    with pytest.raises(ConfigError, match="at least 1"):
        reference.RefKV(KVSpec(layer, "float32"), 0, 16)
