"""Every rotary scaling in config.json gives the frequencies of its formula, and an unknown one stops the start.

Upstream: https://github.com/meta-llama/llama3/issues/299 (llama3 scaling read as plain),
https://github.com/foundation-model-stack/foundation-model-stack/issues/384,
https://github.com/NVIDIA-NeMo/Automodel/issues/2652 (yarn without original_max_position_embeddings),
https://github.com/huggingface/transformers/issues/45887, https://github.com/InternLM/lmdeploy/issues/3760.
Expected numbers: the formulas of transformers' modeling_rope_utils.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from device.cpu import CpuDevice
from device.errors import JumarError, UnsupportedModel
from runtime.api import GenerationRequest, SamplingParams
from runtime.engine import Engine
from runtime.loaders.checkpoint import open_checkpoint
from runtime.model_config import ModelConfig
from runtime.models.build import build_model
from runtime.rope import RopeConfig, cos_sin, inverse_frequencies
from tests.support.checkpoints import write_folder
from tests.support.engines import drain, engine_for
from tests.support.forward import Forward
from tests.support.textbook import random_tensors, textbook_logits

YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def config(dim: int, theta: float, position: int, **rope: Any) -> dict[str, Any]:
    """A config.json of a Llama with heads of ``dim``."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 512,
        "hidden_size": 4 * dim,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": position,
        "rope_theta": theta,
        **rope,
    }


def only_rope(raw: dict[str, Any]) -> RopeConfig:
    model = ModelConfig.from_hf(raw)
    assert model.rope_of_layer == (0, 0) and len(model.ropes) == 1
    return model.ropes[0]


def check(rope: RopeConfig, expected: dict[int, float], length: int | None = None) -> None:
    found = inverse_frequencies(rope, length)
    for i, value in expected.items():
        # The numbers are given with seven digits: half a unit of the last is up to 5e-7 of the value.
        assert found[i] == pytest.approx(value, rel=1e-6)


def test_llama3() -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8,
        "low_freq_factor": 1,
        "high_freq_factor": 4,
        "original_max_position_embeddings": 8192,
    }
    rope = only_rope(config(128, 500000.0, 131072, rope_scaling=scaling))
    expected = {
        0: 1.0,
        28: 3.211446e-3,
        29: 2.166571e-3,
        32: 5.248462e-4,
        34: 1.785078e-4,
        35: 9.556212e-5,
        63: 3.068926e-7,
    }
    check(rope, expected)
    plain = inverse_frequencies(RopeConfig("none", 500000.0, 128))
    assert inverse_frequencies(rope)[28] == pytest.approx(plain[28], rel=1e-12)
    assert inverse_frequencies(rope)[35] == pytest.approx(plain[35] / 8, rel=1e-12)


def test_yarn() -> None:
    # longer than the original length: what is read from the wrong key shows
    rope = only_rope(config(128, 1e6, 131072, rope_scaling=YARN))
    check(rope, {23: 6.978306e-3, 24: 5.375321e-3, 31: 8.029597e-4, 40: 4.445699e-5})
    plain = inverse_frequencies(RopeConfig("none", 1e6, 128))
    assert inverse_frequencies(rope)[23] == pytest.approx(plain[23], rel=1e-12)
    assert inverse_frequencies(rope)[40] == pytest.approx(plain[40] / 4, rel=1e-12)
    assert rope.attention_factor == pytest.approx(1.1386294, rel=1e-7)
    table = cos_sin(rope, 1, np.float64)
    assert table[0, 0] == pytest.approx(1.1386294, rel=1e-7)  # cos 0, with the factor in it


def test_dynamic() -> None:
    rope = only_rope(config(64, 1e4, 2048, rope_scaling={"type": "dynamic", "factor": 2}))
    grown = 31082.24
    check(rope, {i: grown ** (-2 * i / 64) for i in (0, 1, 16, 31)}, length=4096)
    plain = inverse_frequencies(RopeConfig("none", 1e4, 64))
    assert np.array_equal(inverse_frequencies(rope, 2048), plain)


def test_linear() -> None:
    rope = only_rope(config(64, 1e4, 2048, rope_scaling={"type": "linear", "factor": 4}))
    check(rope, {i: 1e4 ** (-2 * i / 64) / 4 for i in range(32)})


def test_null_means_none() -> None:
    rope = only_rope(config(64, 1e4, 2048, rope_scaling=None))
    assert rope == RopeConfig("none", 1e4, 64)


def test_type_and_rope_type_are_the_same_key() -> None:
    old = only_rope(config(128, 1e6, 32768, rope_scaling=YARN))
    new = {k: v for k, v in YARN.items() if k != "type"} | {"rope_type": "yarn"}
    assert only_rope(config(128, 1e6, 32768, rope_scaling=new)) == old
    assert only_rope(config(128, 1e6, 32768, rope_scaling=YARN | {"rope_type": "yarn"})) == old


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        YARN,
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    ],
)
def test_rope_parameters_are_the_new_form_of_both_keys(scaling: dict[str, Any] | None) -> None:
    old = config(128, 1e6, 32768, rope_scaling=scaling)
    new = config(128, 1e6, 32768, rope_parameters={"rope_theta": 1e6, **(scaling or {"rope_type": "default"})})
    del new["rope_theta"]
    assert only_rope(new) == only_rope(old)
    types = {"layer_types": ["full_attention"] * 2}
    nested = new | types | {"rope_parameters": {"full_attention": new["rope_parameters"]}}
    assert only_rope(nested) == only_rope(old)


def test_yarn_without_the_original_length_takes_max_position_embeddings() -> None:
    bare = {"type": "yarn", "factor": 4.0}
    assert only_rope(config(128, 1e6, 32768, rope_scaling=bare)) == only_rope(
        config(128, 1e6, 32768, rope_scaling=YARN)
    )


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
def test_an_unknown_type_is_fatal(key: str, place: str) -> None:
    with pytest.raises(UnsupportedModel, match="'foo'") as caught:
        ModelConfig.from_hf(config(64, 1e4, 2048, **{place: {key: "foo", "factor": 2}}))
    assert isinstance(caught.value, JumarError) and "yarn" in str(caught.value)


# ---------------------------------------------------------------------------------------------- dynamic, in a model

DYNAMIC = config(16, 1e4, 32, rope_scaling={"type": "dynamic", "factor": 2.0}) | {"rms_norm_eps": 1e-6}
PROMPT = np.random.RandomState(1).randint(0, 512, 80).tolist()


def dynamic_logits(folder: Path, ids: list[int], longest: int, chunk: int = 0) -> np.ndarray[Any, Any]:
    device = CpuDevice("float64")
    model = build_model(open_checkpoint(folder, lambda _: None), device, longest)
    return Forward(model, device, max_len=128, chunk=chunk).rows(ids)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path, DYNAMIC, random_tensors(DYNAMIC, 1, head=True))


@pytest.mark.parametrize("longest", [32, 33, 64, 128])
def test_dynamic_takes_its_base_from_max_model_len_once(folder: Path, longest: int) -> None:
    """Also for a prompt that is shorter: a base that follows each length would disagree with keys in the cache."""
    tensors = random_tensors(DYNAMIC, 1, head=True)
    for count in (5, 32, min(longest, 80)):
        expected = textbook_logits(DYNAMIC, tensors, PROMPT[:count], rope_length=longest)
        np.testing.assert_allclose(dynamic_logits(folder, PROMPT[:count], longest), expected, rtol=1e-9, atol=1e-9)
    plain = textbook_logits(DYNAMIC | {"rope_scaling": None}, tensors, PROMPT[:32])
    assert np.allclose(dynamic_logits(folder, PROMPT[:32], longest), plain) is (longest == 32)


def test_dynamic_is_the_same_in_chunks(folder: Path) -> None:
    whole = dynamic_logits(folder, PROMPT, 128)
    for chunk in (1, 16, 33):
        np.testing.assert_allclose(dynamic_logits(folder, PROMPT, 128, chunk), whole, rtol=1e-9, atol=1e-9)


def test_dynamic_and_the_prefix_cache_agree(folder: Path) -> None:
    """Keys cached by a short request serve one that grows over the training's context of 32 tokens."""

    def engine(**settings: Any) -> Engine:
        device = CpuDevice("float64")
        model = build_model(open_checkpoint(folder, lambda _: None), device, 128)
        return engine_for(model, device, max_len=128, block_size=8, **settings)

    def run(engine: Engine, prompt: list[int]) -> tuple[list[int], list[float], int]:
        params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=0)
        events = drain(engine.submit(GenerationRequest(tuple(prompt), params)))
        rows = [row for event in events for row in event.logprobs or ()]
        return [row.token for row in rows], [row.logprob for row in rows], events[0].cached_tokens

    fresh, cached = engine(prefix_cache=False), engine()
    run(cached, PROMPT[:16])
    for length, hits in ((20, 16), (60, 16), (78, 56)):
        tokens, logprobs, _ = run(fresh, PROMPT[:length])
        again, again_logprobs, found = run(cached, PROMPT[:length])
        assert found == hits and len(tokens) == 30
        assert again == tokens
        np.testing.assert_allclose(again_logprobs, logprobs, rtol=0, atol=1e-9)
    fresh.shutdown()
    cached.shutdown()
