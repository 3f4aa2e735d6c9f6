"""The reference of the dense ops against plain loops, the standard library's functions and complex numbers."""

from __future__ import annotations

import math
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from device import reference
from device.cases_dense import DYNAMIC, STATIC, angles, float_weights, integer_weights
from device.dtypes import bf16_to_f32
from device.weights import Activation, CanonicalWeight, float_weight

Array = NDArray[Any]


def _rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def element(w: CanonicalWeight, n: int, k: int) -> float:
    """w[n, k] in the checkpoint's column order, from the definition."""
    j = k if w.perm is None else w.perm.tolist().index(k)
    if w.dtype == "bfloat16":
        return float(bf16_to_f32(w.q)[n, j])
    if w.scale is None:
        return float(w.q[n, j])
    if w.dtype == "int8":
        q = int(w.q[n, j])
    else:
        nibble = int(w.q[n, j // 2]) >> (4 * (j % 2)) & 15
        q = nibble - 16 if w.dtype == "int4" and nibble > 7 else nibble
    g = j // w.group
    return q * float(w.scale[n, g]) + (0.0 if w.offset is None else float(w.offset[n, g]))


def matrix(w: CanonicalWeight) -> list[list[float]]:
    rows, columns = w.shape
    return [[element(w, n, k) for k in range(columns)] for n in range(rows)]


WEIGHTS = {
    "float32": lambda r: float_weights(r, 6, 32, "float32"),
    "bfloat16": lambda r: float_weights(r, 6, 32, "bfloat16"),
    "int8": lambda r: integer_weights(r, 6, 32, "int8", 0),
    "int8 g16 offset": lambda r: integer_weights(r, 6, 32, "int8", 16, offset=True),
    "int4 g16": lambda r: integer_weights(r, 6, 32, "int4", 16),
    "uint4 g16": lambda r: integer_weights(r, 6, 32, "uint4", 16),
    "uint4 g16 perm": lambda r: integer_weights(r, 6, 32, "uint4", 16, perm=True),
}


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("rows", [1, 5])
def test_linear_is_the_sum_over_the_definition_of_the_weight(kind: str, rows: int) -> None:
    r = _rng(1)
    w = WEIGHTS[kind](r)
    x, bias = r.standard_normal((rows, 32)), r.standard_normal(6)
    lines = matrix(w)
    want = [[math.fsum(map(math.prod, zip(row, line, strict=True))) for line in lines] for row in x.tolist()] + bias
    packed = reference.pack_weight([w], {"linear"}, "float64")
    assert packed.shape == (6, 32)
    assert packed.dtype == "float64"
    np.testing.assert_allclose(reference.linear(x, packed, bias), want, rtol=1e-13, atol=1e-13)
    single = reference.pack_weight([w], {"linear"}, "float32")
    got = reference.linear(x.astype(np.float32), single, bias.astype(np.float32), "float32")
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_linear_takes_rows_of_a_wider_matrix() -> None:
    r = _rng(2)
    wide = r.standard_normal((4, 96))
    packed = reference.pack_weight([float_weights(r, 8, 32, "float32")], {"linear"}, "float64")
    np.testing.assert_array_equal(
        reference.linear(wide[:, 32:64], packed), reference.linear(wide[:, 32:64].copy(), packed)
    )


def test_dynamic_activation_quantises_each_row_to_127_steps() -> None:
    r = _rng(3)
    w = integer_weights(r, 5, 16, "int8", 0, activation=DYNAMIC)
    x = r.standard_normal((4, 16)) * np.array([[1.0], [100.0], [1e-3], [0.0]])
    want = np.zeros((4, 5))
    for t in range(4):
        step = max(abs(v) for v in x[t]) / 127
        for n in range(5):
            assert w.scale is not None
            total = sum(round(v / step) * int(q) for v, q in zip(x[t], w.q[n], strict=True)) if step else 0
            want[t, n] = total * step * float(w.scale[n, 0])
    np.testing.assert_allclose(reference.linear(x, reference.pack_weight([w], {"linear"}, "float64")), want, rtol=1e-12)


def test_static_activation_rounds_shifts_and_clips() -> None:
    """With s = 0.5 and zero = -5: 0.6 is 1 step, 100 is clipped at 127 and stands for 132 steps of 0.5."""
    w = CanonicalWeight("int8", np.array([[1, 0], [0, 2]], np.int8), np.ones((2, 1), np.float32), None, 2, None,
                        Activation("static", 0.5, -5))  # fmt: skip
    y = reference.linear(np.array([[0.6, 100.0], [-100.0, -0.24]]), reference.pack_weight([w], {"linear"}, "float64"))
    np.testing.assert_array_equal(y, [[0.5, 132.0], [-61.5, 0.0]])


def test_weights_packed_together_give_the_columns_of_each_alone() -> None:
    r = _rng(4)
    parts = [
        float_weights(r, 3, 32, "float16"),
        integer_weights(r, 4, 32, "uint4", 16, perm=True),
        integer_weights(r, 2, 32, "int8", 0, activation=DYNAMIC),
        integer_weights(r, 2, 32, "int8", 0, activation=STATIC),
        float_weights(r, 5, 32, "bfloat16"),
    ]
    x = r.standard_normal((3, 32))
    packed = reference.pack_weight(parts, {"linear"}, "float64")
    assert [s.activation.kind for s in packed.segments] == ["none", "dynamic", "static", "none"]
    alone = [reference.linear(x, reference.pack_weight([p], {"linear"}, "float64")) for p in parts]
    np.testing.assert_allclose(reference.linear(x, packed), np.concatenate(alone, axis=1), rtol=1e-13, atol=1e-14)


def test_packing_holds_no_second_copy() -> None:
    r = _rng(5)
    part = integer_weights(r, 512, 1024, "int4", 32)
    parts = [part.rows(np.arange(4096) % 512), part.rows(np.arange(2048) % 512)]
    whole = 6144 * 1024 * 4
    tracemalloc.start()
    packed = reference.pack_weight(parts, {"linear"}, "float32")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert packed.nbytes == whole
    assert peak < 1.6 * whole  # the block being dequantised, as numbers and as a product


def test_a_float_weight_of_the_right_dtype_is_not_copied() -> None:
    data = np.ones((4, 8), np.float32)
    assert reference.pack_weight([float_weight(data, "float32")], {"linear"}, "float32").matrix is data
    odd = np.frombuffer(b"\0" + data.tobytes(), np.uint8)[1:].view(np.float32).reshape(4, 8)
    assert not odd.flags.aligned or odd.ctypes.data % 4 == 0
    packed = reference.pack_weight([float_weight(odd, "float32")], {"linear"}, "float32").matrix
    assert packed.flags.aligned
    np.testing.assert_array_equal(packed, data)


def test_pack_weight_refuses_what_it_cannot_mean() -> None:
    a, b = float_weights(_rng(), 4, 32, "float32"), float_weights(_rng(), 4, 64, "float32")
    with pytest.raises(ValueError, match="equal columns"):
        reference.pack_weight([a, b], {"linear"})
    with pytest.raises(ValueError, match="equal columns"):
        reference.pack_weight([], {"linear"})
    with pytest.raises(ValueError, match="expected linear, embed or both"):
        reference.pack_weight([a], {"conv"})


def test_embed_gives_rows_of_the_table_and_zeros_outside_it() -> None:
    w = integer_weights(_rng(6), 8, 32, "int4", 16)
    table = reference.pack_weight([w], {"embed", "linear"}, "float64")
    y = reference.embed(np.array([3, 8, -1, 0, 3], np.int32), table, 2.5)
    want = np.array(matrix(w))
    np.testing.assert_allclose(y, np.stack([want[3], 0 * want[0], 0 * want[0], want[0], want[3]]) * 2.5, rtol=1e-15)
    y[:] = 7  # no view of the table
    np.testing.assert_allclose(table.matrix, want, rtol=1e-15)


def test_rms_norm_from_its_formula() -> None:
    r = _rng(7)
    x, w = r.standard_normal((3, 4, 24)), r.standard_normal(24)
    y = reference.rms_norm(x, w, 1e-3)
    for t in range(3):
        for h in range(4):
            size = math.sqrt(math.fsum(v * v for v in x[t, h]) / 24 + 1e-3)
            np.testing.assert_allclose(y[t, h], [v / size * g for v, g in zip(x[t, h], w, strict=True)], rtol=1e-14)


def test_add_rms_norm_gives_the_norm_of_the_sum_and_the_sum() -> None:
    r = _rng(8)
    x, residual, w = r.standard_normal((2, 16)), r.standard_normal((2, 16)), r.standard_normal(16)
    y, total = reference.add_rms_norm(x, residual, w, 1e-5)
    np.testing.assert_array_equal(total, x + residual)
    np.testing.assert_array_equal(y, reference.rms_norm(x + residual, w, 1e-5))


@given(st.sampled_from([(8, 8), (16, 8), (64, 64), (6, 2)]), st.integers(0, 1000))
def test_rope_turns_pairs_like_complex_numbers(shape: tuple[int, int], seed: int) -> None:
    dim, rot = shape
    r = _rng(seed)
    q, k, positions = r.standard_normal((5, 3, dim)), r.standard_normal((5, 1, dim)), r.integers(0, 500, 5)
    table = angles(500, rot)
    half = rot // 2
    turn = np.exp(1j * positions[:, None] * 10000.0 ** (-np.arange(half) * 2 / rot))[:, None, :]
    for x, y in zip((q, k), reference.rope(q, k, positions, table), strict=True):
        z = (x[..., :half] + 1j * x[..., half:rot]) * turn
        np.testing.assert_allclose(y, np.concatenate((z.real, z.imag, x[..., rot:]), axis=-1), atol=1e-12)


def test_rope_keeps_the_product_of_q_and_k_at_equal_distance() -> None:
    r = _rng(9)
    q, k = r.standard_normal((1, 1, 32)), r.standard_normal((1, 1, 32))
    table = angles(100, 32)

    def product(i: int, j: int) -> float:
        a, _ = reference.rope(q, k, np.array([i]), table)
        _, b = reference.rope(q, k, np.array([j]), table)
        return float((a * b).sum())

    assert product(3, 7) == pytest.approx(product(63, 67), rel=1e-12)
    assert product(3, 7) != pytest.approx(product(3, 8), rel=1e-3)


ACTIVATIONS = {
    "silu": lambda v: v / (1 + math.exp(-v)) if v > -700 else 0.0,
    "gelu": lambda v: 0.5 * v * (1 + math.erf(v / math.sqrt(2))),
    "gelu_tanh": lambda v: 0.5 * v * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))),
}


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_gated_act_from_its_formula(kind: str) -> None:
    gate = np.concatenate((np.linspace(-12, 12, 97), [-800.0, -100.0, 100.0, 800.0, 0.0, -0.0, 1e-12]))
    up = _rng(10).standard_normal(gate.size)
    want = [ACTIVATIONS[kind](g) * u for g, u in zip(gate.tolist(), up.tolist(), strict=True)]
    x = np.concatenate((gate, up))[None]
    np.testing.assert_allclose(reference.gated_act(x, kind)[0], want, rtol=1e-12, atol=1e-14)
    single = reference.gated_act(x.astype(np.float32), kind)
    assert single.dtype == np.float32
    np.testing.assert_allclose(single[0], want, rtol=3e-6, atol=1e-6)
    with pytest.raises(ValueError, match="expected silu, gelu_tanh or gelu"):
        reference.gated_act(x, "relu")


def test_erf_is_that_of_the_standard_library() -> None:
    x = np.concatenate((np.linspace(-8, 8, 4001), np.linspace(-1e-3, 1e-3, 101), [np.inf, -np.inf]))
    want = [math.erf(v) for v in x.tolist()]
    np.testing.assert_allclose(reference.erf(x), want, rtol=0, atol=4e-15)
    assert math.isnan(float(reference.erf(np.array([np.nan]))[0]))


def test_split_qkv_gives_views() -> None:
    qkv = np.arange(2 * 40, dtype=np.float64).reshape(2, 40)
    q, k, v = reference.split_qkv(qkv, 3, 1, 8)
    assert q.shape == (2, 3, 8)
    assert k.shape == v.shape == (2, 1, 8)
    np.testing.assert_array_equal(q[1, 2], qkv[1, 16:24])
    np.testing.assert_array_equal(k[1, 0], qkv[1, 24:32])
    np.testing.assert_array_equal(v[0, 0], qkv[0, 32:40])
    assert all(np.shares_memory(x, qkv) for x in (q, k, v))


def test_gather_rows_copies_and_leaves_zeros_for_padding() -> None:
    x = np.arange(12.0).reshape(4, 3)
    y = reference.gather_rows(x, np.array([2, -1, 0], np.int32))
    np.testing.assert_array_equal(y, [x[2], [0, 0, 0], x[0]])
    whole = reference.gather_rows(x, np.arange(4, dtype=np.int32))
    assert not np.shares_memory(whole, x)
    ids = reference.gather_rows(np.array([5, 6], np.int32), np.array([-1, 1], np.int32))
    assert ids.dtype == np.int32
    np.testing.assert_array_equal(ids, [0, 6])
    assert reference.gather_rows(np.zeros((0, 3)), np.array([-1], np.int32)).tolist() == [[0, 0, 0]]


def test_the_table_has_every_plain_op() -> None:
    from device.ops import OPS

    assert set(reference.reference_table("float64")) == {n for n, decl in OPS.items() if not decl.composite}
    assert set(OPS) >= reference.BATCH_INVARIANT
