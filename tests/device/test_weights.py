"""The canonical weight: packing, values, dequantisation and row slices agree with the definition, elementwise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from device.dtypes import bf16_to_f32, encode
from device.weights import CanonicalWeight, float_weight, pack_nibbles

RANGES = {"int4": (-8, 7), "uint4": (0, 15), "int8": (-128, 127)}


@st.composite
def quantised(draw: st.DrawFn) -> tuple[CanonicalWeight, NDArray[Any]]:
    """A random quantised weight and its values, one number an element."""
    dtype = draw(st.sampled_from(sorted(RANGES)))
    group = draw(st.sampled_from((2, 16, 32)))
    n, groups = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    k = group * groups
    if draw(st.booleans()):
        group = k  # one scale a row
    low, high = RANGES[dtype]
    values = draw(hnp.arrays(np.int16, (n, k), elements=st.integers(low, high)))
    numbers = st.floats(-4, 4, width=16, allow_subnormal=False)
    scale = draw(hnp.arrays(np.float32, (n, k // group), elements=numbers))
    offset = draw(st.none() | hnp.arrays(np.float32, (n, k // group), elements=numbers))
    perm = draw(st.none() | st.permutations(range(k)).map(lambda p: np.array(p, np.int32)))
    q = values.astype(np.int8) if dtype == "int8" else pack_nibbles(values)
    return CanonicalWeight(dtype, q, scale, offset, group, perm), values


def definition(w: CanonicalWeight, values: NDArray[Any]) -> NDArray[np.float64]:
    """``w[n, perm[j]] = q[n, j] * scale[n, j // group] + offset[n, j // group]``, written out."""
    n, k = values.shape
    out = np.empty((n, k))
    assert w.scale is not None
    for row in range(n):
        for j in range(k):
            column = j if w.perm is None else int(w.perm[j])
            g = j // w.group
            out[row, column] = float(values[row, j]) * float(w.scale[row, g])
            if w.offset is not None:
                out[row, column] += float(w.offset[row, g])
    return out


@given(quantised())
def test_values_and_dequantize_follow_the_definition(case: tuple[CanonicalWeight, NDArray[Any]]) -> None:
    weight, values = case
    assert weight.shape == values.shape
    assert np.array_equal(weight.values().astype(np.int16), values)
    exact = definition(weight, values)
    assert np.array_equal(weight.dequantize(np.float64), exact)
    assert np.allclose(weight.dequantize(np.float32), exact, rtol=1e-6, atol=1e-5)


@given(quantised())
def test_a_gathered_input_needs_no_reordered_weight(case: tuple[CanonicalWeight, NDArray[Any]]) -> None:
    """``y = x[:, perm] @ w.T`` with the columns as stored equals ``x @ dequantised.T``."""
    weight, _ = case
    k = weight.shape[1]
    x = np.arange(k, dtype=np.float64)[None] - k / 2
    gathered = x if weight.perm is None else x[:, weight.perm]
    stored = CanonicalWeight(weight.dtype, weight.q, weight.scale, weight.offset, weight.group)
    assert np.allclose(gathered @ stored.dequantize(np.float64).T, x @ weight.dequantize(np.float64).T, rtol=1e-12)


@given(quantised(), st.data())
def test_rows_of_a_weight_are_the_rows_of_its_matrix(
    case: tuple[CanonicalWeight, NDArray[Any]], data: st.DataObject
) -> None:
    weight, _ = case
    n = weight.shape[0]
    order = np.array(data.draw(st.permutations(range(n))), np.intp)
    whole = weight.dequantize()
    assert np.array_equal(weight.rows(order).dequantize(), whole[order])
    assert np.array_equal(weight.rows(slice(0, 1)).dequantize(), whole[:1])
    assert np.shares_memory(weight.rows(slice(0, 1)).q, weight.q)


@given(st.sampled_from(("int4", "uint4")), st.data())
def test_pack_nibbles_puts_the_even_column_in_the_low_nibble(dtype: str, data: st.DataObject) -> None:
    low, high = RANGES[dtype]
    values = data.draw(hnp.arrays(np.int8, (2, 6), elements=st.integers(low, high)))
    packed = pack_nibbles(values)
    assert packed.dtype == np.uint8 and packed.shape == (2, 3)
    for row in range(2):
        for byte in range(3):
            assert packed[row, byte] & 15 == values[row, 2 * byte] & 15
            assert packed[row, byte] >> 4 == values[row, 2 * byte + 1] & 15


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_float_weights_are_held_as_they_are(dtype: str) -> None:
    values = np.random.default_rng(1).standard_normal((3, 4))
    stored = encode(values, dtype)
    weight = float_weight(stored, dtype)
    assert weight.q is stored and weight.shape == (3, 4) and weight.nbytes == stored.nbytes
    expected = bf16_to_f32(stored) if dtype == "bfloat16" else stored
    assert np.array_equal(weight.dequantize(np.float64), expected.astype(np.float64))


def test_a_weight_that_contradicts_itself_is_refused() -> None:
    q = np.zeros((2, 32), np.int8)
    scale = np.ones((2, 1), np.float32)
    with pytest.raises(ValueError, match="dtype"):
        CanonicalWeight("int3", q, scale, None, 32)
    with pytest.raises(ValueError, match="does not divide"):
        CanonicalWeight("int8", q, scale, None, 24)
    with pytest.raises(ValueError, match="scale must be float32"):
        CanonicalWeight("int8", q, scale.astype(np.float64), None, 32)
    with pytest.raises(ValueError, match="scale must be float32"):
        CanonicalWeight("int8", q, None, None, 32)
    with pytest.raises(ValueError, match="offset must be float32"):
        CanonicalWeight("int8", q, scale, np.ones((2, 2), np.float32), 32)
    with pytest.raises(ValueError, match="perm"):
        CanonicalWeight("int8", q, scale, None, 32, np.arange(5, dtype=np.int32))
    with pytest.raises(ValueError, match="no scale"):
        CanonicalWeight("float32", q.astype(np.float32), scale, None, 0)
