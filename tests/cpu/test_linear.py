"""Packed weights and matrix kernels of the native library against the float64 reference, on every instruction set."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpu_kernels import build as native_build
from device import reference
from device.dtypes import encode
from device.weights import Activation, CanonicalWeight, pack_nibbles

if native_build.find_compiler() is None and not (native_build.HERE / native_build.LIBRARY).exists():
    pytest.skip("no C++ compiler, and no native library built", allow_module_level=True)

from cpu_kernels import library  # noqa: E402
from cpu_kernels import linear as native  # noqa: E402

ISAS = library.runnable_isas()
BATCH = 19  # not a multiple of any number of rows that a kernel takes at a time
FLOATS = ("float32", "float16", "bfloat16")
RANGES = {"int8": (-128, 128), "int4": (-8, 8), "uint4": (0, 16)}

# dtype, N, K, group, offset, exact in half precision, perm
CASES = [
    ("uint4", 64, 96, 32, True, True, False),
    ("uint4", 37, 576, 32, True, False, False),
    ("uint4", 33, 192, 64, True, True, True),
    ("uint4", 16, 256, 128, False, True, False),
    ("uint4", 50, 48, 16, True, True, False),
    ("uint4", 7, 144, 48, True, True, False),
    ("uint4", 20, 100, 100, True, False, True),
    ("int4", 64, 96, 32, False, True, False),
    ("int4", 19, 128, 128, False, False, True),
    ("int4", 40, 80, 16, True, True, False),
    ("int4", 5, 24, 24, False, True, False),
    ("int8", 64, 96, 32, False, True, False),
    ("int8", 31, 192, 64, True, False, True),
    ("int8", 17, 384, 128, False, True, False),
    ("int8", 70, 48, 16, False, False, False),
    ("int8", 33, 77, 77, False, False, False),
    ("int8", 1, 6, 6, True, False, True),
    ("float32", 50, 77, 0, False, False, False),
    ("float32", 16, 64, 0, False, False, True),
    ("float16", 35, 130, 0, False, False, False),
    ("bfloat16", 97, 64, 0, False, False, False),
]


@lru_cache(maxsize=4)
def team(threads: int = 2) -> library.Team:
    return library.Team(threads)


def weight(
    rng: np.random.Generator,
    dtype: str,
    n: int,
    k: int,
    group: int,
    offset: bool = False,
    half: bool = True,
    perm: bool = False,
    activation: Activation | None = None,
) -> CanonicalWeight:
    """Random, with the extreme values in it."""
    order = rng.permutation(k).astype(np.int32) if perm else None
    if dtype in FLOATS:
        return CanonicalWeight(dtype, encode(rng.standard_normal((n, k)), dtype), perm=order)
    low, high = RANGES[dtype]
    values = rng.integers(low, high, (n, k))
    values[:, 0], values[:, -1] = low, high - 1
    q = values.astype(np.int8) if dtype == "int8" else pack_nibbles(values)
    shape = (n, k // group)
    scale = rng.uniform(-1.5, 1.5, shape).astype(np.float32)
    shift = rng.standard_normal(shape).astype(np.float32)
    if half:
        scale, shift = scale.astype(np.float16).astype(np.float32), shift.astype(np.float16).astype(np.float32)
        scale[0, 0] = 3 * 2.0**-24  # a subnormal half
    return CanonicalWeight(dtype, q, scale, shift if offset else None, group, order, activation or Activation())


def tolerance(x: np.ndarray, weights: list[CanonicalWeight], activations: str) -> np.ndarray:
    """Bound of the error of each result [T,N].

    Float input: products and sums of float32, dequantising included. Quantised input: besides, each number of x is off
    by at most half a step of its group of 32 (16 where the group is no multiple of 32): max|x| / 254.
    """
    parts = []
    for w in weights:
        matrix = np.abs(w.dequantize(np.float64))
        size = np.abs(x).astype(np.float64) @ matrix.T
        if w.scale is not None:  # what is added up: values and offsets apart
            plain = CanonicalWeight(w.dtype, w.q, np.abs(w.scale), None, w.group, w.perm)
            size = np.abs(x).astype(np.float64) @ np.abs(plain.dequantize(np.float64)).T + size
        bound = size * (w.shape[1] + 8) * 2.0**-24
        if activations == "auto" and w.dtype not in FLOATS:
            block = 32 if w.group == w.shape[1] or w.group % 32 == 0 else 16
            order = np.arange(w.shape[1]) if w.perm is None else w.perm
            ordered = np.abs(x[:, order]).astype(np.float64)
            steps = np.zeros_like(ordered)
            for begin in range(0, w.shape[1], block):
                steps[:, begin : begin + block] = ordered[:, begin : begin + block].max(axis=1, keepdims=True) / 254
            bound += (steps * 1.0001) @ matrix[:, order].T
        parts.append(bound)
    return np.concatenate(parts, axis=1)


def expected(x: np.ndarray, weights: list[CanonicalWeight], bias: np.ndarray | None = None) -> np.ndarray:
    packed = reference.pack_weight(weights, {"linear"}, "float64")
    wide = None if bias is None else bias.astype(np.float64)
    return reference.linear(x.astype(np.float64), packed, wide)


def inputs(rng: np.random.Generator, rows: int, k: int) -> np.ndarray:
    x = rng.standard_normal((rows, k)).astype(np.float32)
    x[0, : k // 2] *= 100
    x[-1] = 0
    return x


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("activations", native.ACTIVATIONS)
@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c)))
def test_linear_agrees_with_the_reference(case: tuple[Any, ...], activations: str, isa: str) -> None:
    rng = np.random.default_rng(len(str(case)))
    w = weight(rng, *case)
    packed = native.pack([w], activations=activations, isa_name=isa)
    x = inputs(rng, BATCH, w.shape[1])
    bias = rng.standard_normal(w.shape[0]).astype(np.float32)
    y = native.linear(x, packed, bias, team=team())
    error = np.abs(y - expected(x, [w], bias))
    allowed = tolerance(x, [w], activations) + np.abs(bias) * 2.0**-22
    assert (error <= allowed).all(), (error / np.maximum(allowed, 1e-30)).max()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("activations", native.ACTIVATIONS)
@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c)))
def test_a_row_has_the_same_bits_in_any_company(case: tuple[Any, ...], activations: str, isa: str) -> None:
    """Alone, in batches of every size, with one thread or three, in another order."""
    rng = np.random.default_rng(1)
    w = weight(rng, *case)
    packed = native.pack([w], activations=activations, isa_name=isa)
    x = inputs(rng, BATCH, w.shape[1])
    whole = native.linear(x, packed, team=team())
    for rows in range(1, BATCH):
        assert np.array_equal(native.linear(x[:rows], packed, team=team()), whole[:rows])
    for threads in (1, 3):
        assert np.array_equal(native.linear(x[::-1].copy(), packed, team=team(threads)), whole[::-1])


@pytest.mark.parametrize("isa", ISAS)
def test_rows_beyond_a_panel(isa: str) -> None:
    """So many rows that they go through the tiles in several panels, and the views are divided among the threads."""
    rng = np.random.default_rng(2)
    w = weight(rng, "uint4", 40, 1536, 32, True)
    packed = native.pack([w], isa_name=isa)
    x = inputs(rng, 300, 1536)
    y = native.linear(x, packed, team=team())
    assert (np.abs(y - expected(x, [w])) <= tolerance(x, [w], "auto")).all()
    for row in (0, 17, 299):
        assert np.array_equal(native.linear(x[row : row + 1], packed, team=team())[0], y[row])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("activations", native.ACTIVATIONS)
def test_weights_of_different_kinds_are_packed_together(activations: str, isa: str) -> None:
    rng = np.random.default_rng(3)
    weights = [
        weight(rng, "uint4", 24, 192, 32, True),
        weight(rng, "int4", 9, 192, 64, perm=True),
        weight(rng, "float32", 5, 192, 0),
        weight(rng, "int8", 40, 192, 16, half=False),
        weight(rng, "int8", 3, 192, 192),
    ]
    packed = native.pack(weights, activations=activations, isa_name=isa)
    assert packed.shape == (81, 192)
    x = inputs(rng, BATCH, 192)
    bias = rng.standard_normal(81).astype(np.float32)
    y = native.linear(x, packed, bias, team=team())
    allowed = tolerance(x, weights, activations) + np.abs(bias) * 2.0**-22
    assert (np.abs(y - expected(x, weights, bias)) <= allowed).all()
    table = np.concatenate([w.dequantize() for w in weights])
    assert np.array_equal(native.embed(np.arange(81, dtype=np.int32), packed, team=team()), table)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    "activation", [Activation("dynamic"), Activation("static", 0.04, 0), Activation("static", 0.02, 17)]
)
@pytest.mark.parametrize("dtype", ["int8", "int4", "uint4"])
def test_the_input_is_quantised_as_a_checkpoint_asks(dtype: str, activation: Activation, isa: str) -> None:
    """Static inputs beyond the range are clipped to -128 and 127, and both ends are met here."""
    rng = np.random.default_rng(4)
    x = inputs(rng, BATCH, 96)
    for group, perm in ((96, False), (32, True)):
        w = weight(rng, dtype, 37, 96, group, dtype == "uint4", False, perm, activation)
        ours = native.linear(x, native.pack([w], activations="float", isa_name=isa), team=team())
        # the oracle rounds what the float32 division gives, so that no tie falls to the other side
        if activation.kind == "dynamic":
            scale = (np.abs(x).max(axis=1, keepdims=True) / np.float32(127)).astype(np.float32)
            xq = np.rint(x / np.where(scale == 0, np.float32(1), scale)).astype(np.float64)
        else:
            scale = np.float64(np.float32(activation.scale))
            xq = np.rint(x / np.float32(activation.scale)).astype(np.float64) + activation.zero
            xq = np.clip(xq, -128, 127) - activation.zero
        want = (xq @ w.dequantize(np.float64).T) * scale
        magnitude = ((np.abs(xq) + abs(activation.zero)) @ np.abs(w.dequantize(np.float64)).T) * scale
        assert (np.abs(ours - want) <= magnitude * 2.0**-17 + 1e-30).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c)))
def test_embedding_is_exact(case: tuple[Any, ...], isa: str) -> None:
    rng = np.random.default_rng(5)
    w = weight(rng, *case)
    packed = native.pack([w], {"embed", "linear"}, isa_name=isa)
    n = w.shape[0]
    ids = np.array([n - 1, 0, -1, n, 0, n // 2, 2**31 - 1, -(2**31)], np.int32)
    rows = native.embed(ids, packed, team=team())
    inside = (ids >= 0) & (ids < n)
    assert np.array_equal(rows[inside], w.dequantize()[ids[inside]])
    assert not rows[~inside].any()
    assert np.array_equal(native.embed(ids, packed, 24.0, team=team()), rows * np.float32(24))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("activations", native.ACTIVATIONS)
def test_what_is_not_finite_stays_so_and_in_its_row(activations: str, bad: float, isa: str) -> None:
    rng = np.random.default_rng(6)
    w = weight(rng, "uint4", 32, 64, 32, True)
    packed = native.pack([w], activations=activations, isa_name=isa)
    x = inputs(rng, 5, 64)
    clean = native.linear(x, packed, team=team())
    x[2, 7] = bad
    y = native.linear(x, packed, team=team())
    assert not np.isfinite(y[2]).any()
    keep = [0, 1, 3, 4]
    assert np.array_equal(y[keep], clean[keep])


@pytest.mark.parametrize("isa", ISAS)
def test_tiny_and_huge_inputs(isa: str) -> None:
    rng = np.random.default_rng(7)
    w = weight(rng, "uint4", 32, 64, 32, True)
    packed = native.pack([w], isa_name=isa)
    for size in (1e-38, 1e-25, 1e30):
        x = (inputs(rng, 4, 64) * np.float32(size)).astype(np.float32)
        y = native.linear(x, packed, team=team())
        assert (np.abs(y - expected(x, [w])) <= tolerance(x, [w], "auto") + 1e-27).all()


def test_rows_with_a_stride() -> None:
    rng = np.random.default_rng(8)
    w = weight(rng, "int4", 48, 64, 32)
    packed = native.pack([w])
    wide = rng.standard_normal((6, 100)).astype(np.float32)
    out = np.full((6, 64), 7, np.float32)
    native.linear(wide[:, :64], packed, team=team(), out=out)
    assert np.array_equal(out[:, :48], native.linear(wide[:, :64].copy(), packed, team=team()))
    assert (out[:, 48:] == 7).all()


def test_slices_of_a_weight_are_packed_without_copies_of_their_own() -> None:
    rng = np.random.default_rng(9)
    w = weight(rng, "uint4", 64, 96, 32, True)
    x = inputs(rng, 3, 96)
    whole = native.linear(x, native.pack([w]), team=team())
    part = native.linear(x, native.pack([w.rows(slice(16, 41))]), team=team())
    assert np.array_equal(part, whole[:, 16:41])


def test_packed_size_is_that_of_the_file() -> None:
    """5 bits a weight in Q4_1's form: nothing is padded, scales and offsets stay halves."""
    w = weight(np.random.default_rng(10), "uint4", 576, 576, 32, True)
    assert native.pack([w]).nbytes == 576 * 576 * 5 // 8
    w = weight(np.random.default_rng(10), "int8", 576, 576, 32)
    assert native.pack([w]).nbytes == 576 * 576 * 34 // 32


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_shape(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(sorted(RANGES)))
    group = data.draw(st.sampled_from([16, 32, 48, 64, 128]))
    whole = data.draw(st.booleans())
    k = 2 * data.draw(st.integers(1, 100)) if whole else group * data.draw(st.integers(1, 5))
    n, rows = data.draw(st.integers(1, 70)), data.draw(st.integers(1, 12))
    offset, half, perm = (data.draw(st.booleans()) for _ in range(3))
    activations, isa = data.draw(st.sampled_from(native.ACTIVATIONS)), data.draw(st.sampled_from(ISAS))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    w = weight(rng, dtype, n, k, k if whole else group, offset, half, perm)
    packed = native.pack([w], activations=activations, isa_name=isa)
    x = inputs(rng, rows, k)
    y = native.linear(x, packed, team=team())
    assert (np.abs(y - expected(x, [w])) <= tolerance(x, [w], activations)).all()
    one = data.draw(st.integers(0, rows - 1))
    assert np.array_equal(native.linear(x[one : one + 1], packed, team=team())[0], y[one])


def test_what_has_no_kernel_is_refused() -> None:
    rng = np.random.default_rng(11)
    with pytest.raises(ValueError, match="multiple of 16"):
        native.pack([weight(rng, "int8", 16, 48, 8)])
    with pytest.raises(ValueError, match="equal columns"):
        native.pack([weight(rng, "int8", 16, 64, 32), weight(rng, "int8", 16, 32, 32)])
    with pytest.raises(ValueError, match="expected one of auto, float"):
        native.pack([weight(rng, "int8", 16, 64, 32)], activations="fast")
    with pytest.raises(ValueError, match="x must be float32"):
        native.linear(np.zeros((1, 64)), native.pack([weight(rng, "int8", 16, 64, 32)]), team=team())


@pytest.mark.parametrize("name", [*ISAS, "avx1024"])
def test_the_environment_chooses_the_instruction_set(name: str) -> None:
    code = "from cpu_kernels import library; print(library.isa())"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=native_build.HERE.parent,
        env={**os.environ, "JUMAR_TEST_CPU_ISA": name},
    )  # fmt: skip
    if name in ISAS:
        assert done.stdout.strip() == name
    else:
        assert "JUMAR_TEST_CPU_ISA: expected one of" in done.stderr


def test_float64_weights_are_held_as_float32() -> None:
    rng = np.random.default_rng(12)
    w = CanonicalWeight("float64", rng.standard_normal((20, 30)))
    x = inputs(rng, 3, 30)
    assert np.allclose(native.linear(x, native.pack([w]), team=team()), x @ w.q.T, atol=1e-4, rtol=1e-5)
