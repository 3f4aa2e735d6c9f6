"""Rotary frequencies and tables against formulas written out in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from device.errors import LoadError, UnsupportedModel
from runtime.rope import RopeConfig, cos_sin, inverse_frequencies, rope_from_hf, yarn_attention_factor

LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def parse(options: dict[str, Any] | None, dim: int = 16, position: int = 256) -> RopeConfig:
    return rope_from_hf(options, theta=10000.0, dim=dim, max_position=position)


@pytest.mark.parametrize(
    "cfg",
    [
        RopeConfig("none", 10000.0, 8),
        RopeConfig("linear", 500.0, 6, factor=3.0),
        RopeConfig("yarn", 10000.0, 8, factor=4.0, original_max_position=32, attention_factor=1.25),
        RopeConfig("none", 10000.0, 4, divisors=(1.0, 8.0)),
    ],
)
def test_the_table_is_cosines_then_sines(cfg: RopeConfig) -> None:
    table = cos_sin(cfg, 5, np.float64)
    frequencies = inverse_frequencies(cfg, 5)
    assert table.shape == (5, cfg.dim) and table.dtype == np.float64
    for p in range(5):
        for i in range(cfg.dim // 2):
            angle = p * frequencies[i]
            assert table[p, i] == pytest.approx(cfg.attention_factor * math.cos(angle), abs=1e-15)
            assert table[p, cfg.dim // 2 + i] == pytest.approx(cfg.attention_factor * math.sin(angle), abs=1e-15)


def test_a_float32_table_is_the_float64_one_rounded_once() -> None:
    """Angles in float32 would be off by about position * 6e-8: visible at these positions."""
    cfg = RopeConfig("none", 500000.0, 16)
    wide, narrow = cos_sin(cfg, 20000, np.float64), cos_sin(cfg, 20000)
    assert narrow.dtype == np.float32
    assert np.array_equal(narrow, wide.astype(np.float32))
    assert wide[19999, 0] == pytest.approx(math.cos(19999.0), abs=1e-12)


def test_divisors_apply_before_the_scaling() -> None:
    plain = inverse_frequencies(RopeConfig("none", 10000.0, 4))
    both = inverse_frequencies(RopeConfig("linear", 10000.0, 4, factor=2.0, divisors=(1.0, 5.0)))
    assert np.allclose(both, plain / [2.0, 10.0], rtol=1e-15)


def test_llama3_divisors_equal_the_formula() -> None:
    """GGUF files of Llama 3 store plain/scaled per pair instead of the options."""
    scaled = inverse_frequencies(parse(LLAMA3))
    plain = inverse_frequencies(parse(None))
    divisors = tuple(float(d) for d in plain / scaled)
    assert np.allclose(inverse_frequencies(RopeConfig("none", 10000.0, 16, divisors=divisors)), scaled, rtol=1e-14)
    assert divisors[0] == 1.0 and divisors[-1] == pytest.approx(8.0)


@given(
    st.sampled_from(("linear", "llama3", "yarn", "dynamic")),
    st.floats(1.0, 64.0),
    st.sampled_from((8, 16, 64, 128)),
    st.sampled_from((1e4, 5e5, 1e6)),
)
def test_scaling_only_slows_pairs_down_and_at_most_by_the_factor(
    kind: str, factor: float, dim: int, theta: float
) -> None:
    cfg = RopeConfig(kind, theta, dim, factor=factor, original_max_position=4096)
    length = int(4096 * factor)
    ratio = inverse_frequencies(RopeConfig("none", theta, dim)) / inverse_frequencies(cfg, length)
    assert np.all(ratio >= 1 - 1e-12)
    # dynamic turns the slowest pair by the factor that the length needs: (f*f - (f - 1)) for length f * trained
    limit = factor * factor - factor + 1 if kind == "dynamic" else factor
    assert np.all(ratio <= limit * (1 + 1e-9))
    assert np.all(np.diff(inverse_frequencies(cfg, length)) < 0)


def test_dynamic_has_one_table_for_every_sequence() -> None:
    """The base follows the longest sequence served, never a sequence's own length: keys in the cache stay valid."""
    cfg = parse({"type": "dynamic", "factor": 2.0}, position=128)
    short, long = cos_sin(cfg, 128), cos_sin(cfg, 512)
    assert np.array_equal(short, cos_sin(parse(None), 128))  # as trained while nothing is stretched
    assert not np.allclose(short, long[:128])
    assert np.array_equal(long, cos_sin(cfg, 512))
    assert np.array_equal(inverse_frequencies(cfg), inverse_frequencies(cfg, 5))


def test_yarn_temperature() -> None:
    assert yarn_attention_factor(4.0) == pytest.approx(0.1 * math.log(4) + 1)
    assert yarn_attention_factor(1.0) == 1.0
    expected = (0.0707 * math.log(40) + 1) / (0.1 * math.log(40) + 1)
    assert yarn_attention_factor(40.0, 0.707, 1.0) == pytest.approx(expected)
    options = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert parse(options | {"attention_factor": 1.5}).attention_factor == 1.5
    assert parse(options | {"mscale": 0.5, "mscale_all_dim": 1.0}).attention_factor < 1


def test_yarn_options() -> None:
    options = {"type": "yarn", "factor": None, "original_max_position_embeddings": 64, "beta_fast": 16, "beta_slow": 2}
    cfg = parse(options | {"truncate": False})
    assert (cfg.factor, cfg.beta_fast, cfg.beta_slow, cfg.truncate) == (4.0, 16.0, 2.0, False)
    assert not np.array_equal(inverse_frequencies(cfg), inverse_frequencies(parse(options)))


def test_an_original_length_at_the_top_of_the_file_wins() -> None:
    cfg = rope_from_hf(LLAMA3, theta=10000.0, dim=16, max_position=256, original=32)
    assert cfg.original_max_position == 32


def test_the_object_s_own_base_wins() -> None:
    assert parse({"rope_type": "default", "rope_theta": 77.0}).theta == 77.0


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"type": "yarn", "rope_type": "linear", "factor": 2}, UnsupportedModel, "two kinds"),
        ({"type": "longrope", "factor": 2}, UnsupportedModel, "'longrope'"),
        ({"factor": 2}, LoadError, "no type"),
        ({"type": "linear"}, LoadError, "lack 'factor'"),
        ({"type": "linear", "factor": "2"}, LoadError, "factor must be a number"),
        ({"type": "linear", "factor": True}, LoadError, "factor must be a number"),
        ({"type": "linear", "factor": math.inf}, LoadError, "factor must be a number"),
        ({"type": "linear", "factor": 0}, LoadError, "must be positive"),
        ({"type": "default", "mrope_section": [8, 4, 4]}, UnsupportedModel, "mrope_section"),
        ({"type": "default", "partial_rotary_factor": 0.5}, UnsupportedModel, "partial_rotary_factor=0.5"),
        ({"type": "yarn", "factor": 2, "attn_factor": 2}, UnsupportedModel, "attn_factor=2"),
        (LLAMA3 | {"low_freq_factor": None}, LoadError, "lack 'low_freq_factor'"),
        (LLAMA3 | {"low_freq_factor": 4}, LoadError, "must be above"),
        ({"type": "yarn", "factor": 2, "beta_slow": -1}, LoadError, "beta_slow"),
        ({"type": "yarn", "factor": 2, "original_max_position_embeddings": 0}, LoadError, "positive"),
    ],
)
def test_options_that_cannot_be_honoured_are_refused(
    options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        parse(options)


def test_neutral_options_are_accepted() -> None:
    plain = parse(None)
    assert parse({}) == plain
    assert parse({"rope_type": "default", "partial_rotary_factor": 1.0, "mrope_section": None}) == plain


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"dim": 7}, "even"),
        ({"dim": 0}, "even"),
        ({"theta": 0.0}, "positive"),
        ({"theta": math.nan}, "positive"),
        ({"type": "dynamic", "dim": 2, "original_max_position": 8}, "more than 2"),
        ({"type": "llama3"}, "context length"),
        ({"divisors": (1.0, 2.0)}, "divisors"),
        ({"dim": 4, "divisors": (1.0, 0.0)}, "divisors"),
    ],
)
def test_configurations_that_compute_nonsense_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(LoadError, match=words):
        RopeConfig(**fields)


def test_an_unknown_type_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match="'foo'.*supported"):
        RopeConfig("foo")
