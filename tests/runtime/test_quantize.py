"""Weights that are rounded while they are loaded: how far a number moves, what is refused, and the model they make."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from cpu_kernels.build import find_compiler
from device.cpu import CpuDevice
from device.dtypes import decode, encode
from device.errors import ConfigError, LoadError
from device.weights import Activation, CanonicalWeight, float_weight
from runtime.config import EngineConfig, Scheme
from runtime.loaders.checkpoint import EMBEDDING, HEAD, open_checkpoint
from runtime.loaders.quantize import Quantizer, group_of, quantize
from runtime.models.build import build_model
from runtime.models.decoder import Decoder
from tests.support.checkpoints import write_folder
from tests.support.engines import engine_for, run_alone
from tests.support.forward import Forward
from tests.support.textbook import random_tensors

Kind = Literal["int8", "uint4"]
SCHEMES: tuple[Scheme, ...] = ("w8a8", "w8a16", "w4a16")
KINDS: tuple[Kind, ...] = ("int8", "uint4")
SILENT = lambda text: None  # noqa: E731
PROJECTION = "model.layers.0.mlp.up_proj.weight"
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


# ---------------------------------------------------------------- one weight


@st.composite
def weights(draw: st.DrawFn) -> tuple[NDArray[np.float32], int]:
    """Numbers of any size that a float32 can have below 1e38, in groups of 2 to 64 columns."""
    group = draw(st.sampled_from([2, 4, 16, 64]))
    shape = (draw(st.integers(1, 4)), group * draw(st.integers(1, 3)))
    largest = float(np.float32(10.0) ** draw(st.sampled_from([-40, -20, -5, 0, 3, 6, 37])))
    numbers = st.floats(-largest, largest, width=32) if largest else st.just(0.0)
    kinds = st.one_of(numbers, st.sampled_from([0.0, largest, -largest, largest / 3]).map(np.float32))
    return draw(arrays(np.float32, shape, elements=kinds)), group


def moved(values: NDArray[np.float32], w: CanonicalWeight) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """By how much each number moved, and half its group's scale."""
    assert w.scale is not None
    error = np.abs(w.dequantize(np.float64) - values)
    return error, np.repeat(w.scale.astype(np.float64) / 2, w.group, axis=1)


@given(case=weights(), kind=st.sampled_from(KINDS))
def test_no_number_moves_by_more_than_half_a_scale(case: tuple[NDArray[np.float32], int], kind: Kind) -> None:
    values, group = case
    w = quantize(float_weight(values, "float32"), kind, group)
    error, half = moved(values, w)
    assert (error <= half * (1 + 1e-4) + np.abs(values) * 2.0**-24).all()
    most = w.values().astype(int)
    assert most.min() >= (-127 if kind == "int8" else 0) and most.max() <= (127 if kind == "int8" else 15)
    assert (w.offset is None) == (kind == "int8")


@given(case=weights())
def test_a_group_spends_all_its_levels(case: tuple[NDArray[np.float32], int]) -> None:
    """No scale is larger than the range of the group needs (a hundredth for half precision), so no level is wasted."""
    values, group = case
    parts = values.astype(np.float64).reshape(values.shape[0], -1, group)
    low, high = parts.min(axis=2), parts.max(axis=2)
    tiny = float(np.finfo(np.float32).tiny)
    for kind, needed in (("int8", np.maximum(high, -low) / 127), ("uint4", (high - low) / 15)):
        scale = quantize(float_weight(values, "float32"), kind, group).scale  # type: ignore[arg-type]
        assert scale is not None
        assert ((scale <= 1.0101 * np.maximum(needed, tiny)) | (low == high)).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [0.0, 1.0, -0.1, 1e-42, -3e37, 1 / 3])
def test_groups_of_one_value_are_exact(kind: Kind, value: float) -> None:
    """Beside others, which lose nothing by it."""
    values = np.random.default_rng(0).standard_normal((5, 192)).astype(np.float32)
    values[1:4, 64:128] = np.float32(value)
    w = quantize(float_weight(values, "float32"), kind, 64)
    assert np.array_equal(w.dequantize()[1:4, 64:128], values[1:4, 64:128])
    error, half = moved(values, w)
    assert (error <= half * (1 + 1e-4) + np.abs(values) * 2.0**-24).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_float_type_is_read_and_scales_are_of_half_precision(kind: Kind, dtype: str) -> None:
    """Also with more rows than are rounded at a time."""
    values = encode(np.random.default_rng(1).standard_normal((700, 256)) / 16, dtype)
    w = quantize(float_weight(values, dtype), kind, 64)
    error, half = moved(decode(values, dtype, np.float32), w)
    assert (error <= half * (1 + 1e-4)).all() and error.max() > 0.99 * half.min()
    for part in (w.scale, w.offset):
        assert part is None or np.array_equal(part, part.astype(np.float16).astype(np.float32))


def test_scales_that_half_precision_would_spoil_stay_exact() -> None:
    values = np.random.default_rng(2).standard_normal((4, 128)).astype(np.float32)
    for kind in KINDS:
        plain = quantize(float_weight(values, "float32"), kind, 64)
        for factor in (2.0**-30, 2.0**30):  # nothing of a half's range
            w = quantize(float_weight(values * np.float32(factor), "float32"), kind, 64)
            assert w.scale is not None and plain.scale is not None
            assert np.allclose(w.scale / factor, plain.scale, rtol=1e-2)  # as much as a rounded offset costs
    near = quantize(float_weight(1000 + values / 1000, "float32"), "uint4", 64)  # an offset needs its digits
    assert near.scale is not None and near.scale.max() < 1e-3


def test_with_an_offset_four_bits_lose_less_than_without() -> None:
    """What the choice of uint4 rests on, for weights of a normal distribution and for skewed ones."""
    rng = np.random.default_rng(3)
    for values in (rng.standard_normal((64, 256)), rng.exponential(1, (64, 256)) - 0.7):
        ours, _ = moved(
            values.astype(np.float32), quantize(float_weight(values.astype(np.float32), "float32"), "uint4", 64)
        )
        parts = values.reshape(64, 4, 64)
        scale = np.abs(parts).max(axis=2, keepdims=True) / 7
        symmetric = np.abs(np.rint(parts / scale) * scale - parts)
        assert (ours**2).mean() < 0.9 * (symmetric**2).mean()


def test_the_order_of_columns_goes_along() -> None:
    order = np.random.default_rng(4).permutation(64).astype(np.int32)
    values = np.random.default_rng(5).standard_normal((3, 64)).astype(np.float32)
    w = quantize(CanonicalWeight("float32", values, perm=order), "int8", 16)
    given_as = np.empty_like(values)
    given_as[:, order] = values
    assert np.abs(w.dequantize() - given_as).max() < 0.02


# ---------------------------------------------------------------- by name and scheme


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 2e38])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_no_number_is_refused_by_name(scheme: Scheme, bad: float) -> None:
    values = np.zeros((3, 64), np.float32)
    values[2, 17] = bad
    with pytest.raises(LoadError, match=rf"weight '{re.escape(PROJECTION)}' holds NaN, infinity or numbers beyond"):
        Quantizer(scheme, SILENT)(PROJECTION, float_weight(values, "float32"))


@pytest.mark.parametrize(
    ("columns", "group", "said"),
    [
        (128, 64, ""), (96, 32, "groups of 32"), (48, 16, "groups of 16"), (40, 40, "one scale a row"),
        (16, 16, "one scale a row"), (32, 32, "one scale a row"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("scheme", SCHEMES)
def test_groups_that_do_not_divide_give_way_with_a_notice(scheme: Scheme, columns: int, group: int, said: str) -> None:
    heard: list[str] = []
    quantizer = Quantizer(scheme, heard.append)
    values = np.random.default_rng(0).standard_normal((2, columns)).astype(np.float32)
    for _ in range(2):
        w = quantizer(PROJECTION, float_weight(values, "float32"))
        assert w.group == group == group_of(columns)
    assert len(heard) == bool(said) and all(f"{columns} columns of {PROJECTION}" in t and said in t for t in heard)
    if scheme == "w8a8":  # blocks of the input that no group's boundary cuts
        assert w.activation == Activation("dynamic", group=16 if columns == 48 else 32)
    else:
        assert w.activation.kind == "none" and w.activation.as_is


def test_tables_are_always_of_eight_bits() -> None:
    quantizer = Quantizer("w4a16", SILENT)
    w = float_weight(np.ones((4, 64), np.float32), "float32")
    assert [quantizer(n, w).dtype for n in (PROJECTION, EMBEDDING, HEAD)] == ["uint4", "int8", "int8"]
    assert "3 weights rounded while loading" in quantizer.summary()


def test_odd_columns_cannot_be_packed_in_four_bits() -> None:
    w = float_weight(np.ones((4, 33), np.float32), "float32")
    with pytest.raises(LoadError, match=f"{re.escape(PROJECTION)}' has 33 columns.*use w8a8"):
        Quantizer("w4a16", SILENT)(PROJECTION, w)
    assert Quantizer("w8a16", SILENT)(PROJECTION, w).group == 33


def test_short_names_are_schemes() -> None:
    named = {"none": "none", "int8": "w8a8", "int4": "w4a16", "w8a8": "w8a8", "w8a16": "w8a16", "w4a16": "w4a16"}
    for name, scheme in named.items():
        assert EngineConfig(model="m", quantize=name).scheme == scheme  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="quantize"):
        EngineConfig(model="m", quantize="w2")  # type: ignore[arg-type]


def test_a_checkpoint_that_is_quantised_already_is_refused() -> None:
    """Before anything is read; what it is stands in the error."""
    device = CpuDevice()
    checkpoint = open_checkpoint("smollm2-135m", SILENT)
    with pytest.raises(ConfigError, match=r"211 of the 211 weights of .*gguf are quantised already, as Q4_1, Q8_0 \("):
        build_model(checkpoint, device, 64, quantizer=Quantizer("w4a16", SILENT))
    device.close()


# ---------------------------------------------------------------- a model


@pytest.fixture(scope="module", params=["untied", "tied"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    config = CONFIG | {"tie_word_embeddings": request.param == "tied"}
    tensors = random_tensors(config, 7, head=request.param == "untied")
    yield write_folder(tmp_path_factory.mktemp("models") / request.param, config, tensors, dtype="bfloat16")


def build(folder: Path, scheme: Scheme, **device: Any) -> tuple[Decoder, CpuDevice]:
    made = CpuDevice(**device)
    quantizer = None if scheme == "none" else Quantizer(scheme, SILENT)
    return build_model(open_checkpoint(folder, SILENT), made, 64, quantizer=quantizer), made


IDS = np.random.default_rng(11).integers(0, 96, 40).tolist()


def logits(folder: Path, scheme: Scheme, **device: Any) -> NDArray[np.float64]:
    model, made = build(folder, scheme, **device)
    try:
        return np.asarray(Forward(model, made, max_len=64).rows(IDS), np.float64)
    finally:
        made.close()


def each_alone(folder: Path, scheme: Scheme, **device: Any) -> NDArray[np.float64]:
    """Logits [96, 96] behind every token of the vocabulary, with nothing before it."""
    model, made = build(folder, scheme, **device)
    try:
        return np.stack([np.asarray(Forward(model, made, max_len=64).rows([i])[0], np.float64) for i in range(96)])
    finally:
        made.close()


KERNELS = [
    "numpy",
    pytest.param("native", marks=pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")),
]
# Of the spread of the logits; int8 has 254 levels in a group's range, uint4 has 16.
ALLOWED = {"w8a8": 0.03, "w8a16": 0.02, "w4a16": 0.25}


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_logits_stay_close_to_those_of_the_float_model(folder: Path, scheme: Scheme, kernels: str) -> None:
    exact = logits(folder, "none", dtype="float64")
    rounded = logits(folder, scheme, kernels=kernels)
    error = np.sqrt(((rounded - exact) ** 2).mean()) / exact.std()
    print(f"{scheme} {kernels}: {error:.4f} of the spread of the logits")
    assert 1e-4 < error < ALLOWED[scheme]


@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_scheme_means_the_same_on_every_device(folder: Path, scheme: Scheme) -> None:
    """The weights, and whether the input is rounded: by default the native kernels would, the portable ones not.

    Every token alone: a number near a half may be rounded to the other side in float32, seldom, and then all tokens
    behind it differ by as much as rounding costs.
    """
    oracle = each_alone(folder, scheme, dtype="float64")
    for settings in ({}, {"activations": "float"}):
        native = each_alone(folder, scheme, kernels="native", **settings)
        equal = np.abs(native - oracle).max(axis=1) < 1e-5 * oracle.std()
        assert equal.mean() > 0.8 if scheme == "w8a8" else equal.all()


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_greedy_answers(folder: Path, scheme: Scheme, kernels: str) -> None:
    model, device = build(folder, scheme, kernels=kernels)
    engine = engine_for(model, device, max_len=64)
    try:
        tokens = run_alone(engine, IDS[:9], max_tokens=12, temperature=0)
        assert len(tokens) == 12 and tokens == run_alone(engine, IDS[:9], max_tokens=12, temperature=0)
    finally:
        engine.shutdown()


@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
def test_packed_weights_are_smaller(folder: Path) -> None:
    """Against bfloat16: 8 bits are half, and 4 bits a quarter where it is no table; then scales and offsets."""
    sizes = {}
    for scheme in ("none", *SCHEMES):
        model, device = build(folder, scheme, kernels="native")
        sizes[scheme] = model.nbytes
        device.close()
    print(sizes)
    assert sizes["w8a8"] == sizes["w8a16"] < 0.56 * sizes["none"]
    assert sizes["w4a16"] < 0.40 * sizes["none"]
