"""Configurations of every supported architecture, from config.json and from GGUF metadata, and what is refused."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from device.errors import LoadError, UnsupportedModel
from runtime.model_config import ModelConfig
from runtime.rope import RopeConfig
from tests.support.checkpoints import GGUF_LLAMA, TINY_GEMMA, TINY_LLAMA

MODELS = Path(__file__).resolve().parents[1] / "data" / "models"

MISTRAL = TINY_LLAMA | {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
QWEN2 = TINY_LLAMA | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
QWEN3 = TINY_LLAMA | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 8}


def hf(config: dict[str, Any], **changes: Any) -> ModelConfig:
    return ModelConfig.from_hf(config | changes)


def plain_rope(theta: float = 10000.0, dim: int = 8) -> RopeConfig:
    return RopeConfig("none", theta, dim)


# ---- config.json


def test_llama() -> None:
    config = hf(TINY_LLAMA, eos_token_id=2, bos_token_id=1, torch_dtype="bfloat16")
    assert config == ModelConfig(
        architecture="llama",
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        rms_eps=1e-5,
        max_position=128,
        tied=False,
        windows=(None, None),
        ropes=(plain_rope(),),
        rope_of_layer=(0, 0),
        attention_scale=8**-0.5,
        eos_ids=(2,),
        bos_id=1,
        dtype="bfloat16",
    )


def test_llama_options() -> None:
    config = hf(TINY_LLAMA, attention_bias=True, mlp_bias=True, head_dim=16, num_key_value_heads=None)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == (True, True, True)
    assert (config.head_dim, config.num_kv_heads, config.attention_scale) == (16, 4, 0.25)
    assert hf(TINY_LLAMA, tie_word_embeddings=True).tied
    assert hf(TINY_LLAMA, sliding_window=128).windows == (None, None)  # no narrower than the context


def test_mistral_windows() -> None:
    assert hf(MISTRAL, sliding_window=16).windows == (16, 16)
    assert hf(MISTRAL, sliding_window=None).windows == (None, None)
    assert hf(MISTRAL).windows == (4096, 4096)  # the class's default
    assert not hf(MISTRAL, attention_bias=True).qkv_bias  # the class has none


def test_qwen2() -> None:
    config = hf(QWEN2, sliding_window=16, use_sliding_window=False, max_window_layers=0)
    assert (config.qkv_bias, config.o_bias, config.qk_norm) == (True, False, False)
    assert config.windows == (None, None)
    assert hf(QWEN2, sliding_window=16, use_sliding_window=True, max_window_layers=1).windows == (None, 16)
    types = ["sliding_attention", "full_attention"]
    assert hf(QWEN2, sliding_window=16, use_sliding_window=True, layer_types=types).windows == (16, None)


def test_qwen3() -> None:
    config = hf(QWEN3)
    assert (config.qkv_bias, config.qk_norm, config.head_dim) == (False, True, 8)
    without = {k: v for k, v in QWEN3.items() if k != "head_dim"}
    assert hf(without).head_dim == 128  # the class's default, not hidden / heads
    assert hf(QWEN3, attention_bias=True).o_bias


def test_gemma_3() -> None:
    config = hf(TINY_GEMMA, num_hidden_layers=7, query_pre_attn_scalar=16, hidden_size=48)
    assert config.architecture == "gemma3" and config.tied and config.qk_norm and config.post_norms
    assert config.activation == "gelu_tanh" and config.attention_scale == 0.25
    assert config.embed_scale == float(np.sqrt(np.float32(48)))
    assert config.windows == (16, 16, 16, 16, 16, None, 16)
    assert config.ropes == (plain_rope(), plain_rope(1e6)) and config.rope_of_layer == (0, 0, 0, 0, 0, 1, 0)
    assert hf(TINY_GEMMA, sliding_window_pattern=2).windows == (16, None)
    assert hf(TINY_GEMMA, _sliding_window_pattern=1, sliding_window=None).windows == (None, None)


def test_gemma_3_with_eyes_relies_on_the_defaults() -> None:
    """The shape of google/gemma-3-4b-it's config.json, which leaves out whatever equals a default."""
    config = ModelConfig.from_hf(
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "model_type": "gemma3",
            "eos_token_id": [1, 106],
            "torch_dtype": "bfloat16",
            "text_config": {
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "model_type": "gemma3_text",
                "num_hidden_layers": 34,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024,
            },
            "vision_config": {"hidden_size": 1152},
        }
    )
    assert (config.vocab_size, config.num_heads, config.num_kv_heads, config.head_dim) == (262208, 8, 4, 256)
    assert (config.max_position, config.rms_eps, config.tied, config.dtype) == (131072, 1e-6, True, "bfloat16")
    assert config.ropes == (plain_rope(1e4, 256), RopeConfig("linear", 1e6, 256, factor=8.0))
    assert config.windows[:7] == (1024,) * 5 + (None, 1024) and config.rope_of_layer[:7] == (0,) * 5 + (1, 0)
    assert config.eos_ids == (1, 106) and config.attention_scale == 1 / 16


GEMMA_NEW = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 7e3},
}


def test_gemma_3_rope_in_old_and_new_form() -> None:
    new = hf(TINY_GEMMA, sliding_window_pattern=2, rope_parameters=GEMMA_NEW)
    old = hf(
        TINY_GEMMA,
        sliding_window_pattern=2,
        rope_theta=5e5,
        rope_local_base_freq=7e3,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )
    assert new == old
    assert new.ropes == (plain_rope(7e3), RopeConfig("linear", 5e5, 8, factor=8.0))


def test_rope_parameters_nested_per_layer_type() -> None:
    types = ["full_attention", "sliding_attention"]
    config = hf(QWEN2, sliding_window=16, use_sliding_window=True, layer_types=types, rope_parameters=GEMMA_NEW)
    assert config.ropes == (RopeConfig("linear", 5e5, 8, factor=8.0), plain_rope(7e3))
    assert config.rope_of_layer == (0, 1)
    with pytest.raises(LoadError, match="lacks full_attention"):
        hf(QWEN2, rope_parameters={"sliding_attention": {"rope_type": "default"}})


def test_both_forms_of_the_rope_options_at_once() -> None:
    scaling = {"rope_type": "linear", "factor": 2.0}
    both = hf(TINY_LLAMA, rope_scaling=scaling, rope_parameters=scaling | {"rope_theta": 10000.0})
    assert both == hf(TINY_LLAMA, rope_scaling=scaling)
    with pytest.raises(LoadError, match="contradict"):
        hf(TINY_LLAMA, rope_scaling=scaling, rope_parameters={"rope_type": "default"})


@pytest.mark.parametrize("place", ["object", "top"])
def test_yarn_stretches_the_longest_context(place: str) -> None:
    scaling: dict[str, Any] = {"type": "yarn", "factor": 4.0}
    original = {"original_max_position_embeddings": 128}
    top = original if place == "top" else {}
    scaling |= original if place == "object" else {}
    assert hf(TINY_LLAMA, rope_scaling=scaling, **top).max_position == 512
    assert hf(TINY_LLAMA, max_position_embeddings=512, rope_scaling=scaling, **top).max_position == 512
    assert hf(TINY_LLAMA, rope_scaling={"type": "yarn", "factor": 4.0}).max_position == 128


@pytest.mark.parametrize("old", sorted(MODELS.glob("*/config.old_form.json")), ids=lambda p: p.parent.name)
def test_saved_models_read_the_same_in_both_forms(old: Path) -> None:
    new = json.loads((old.parent / "config.json").read_text())
    assert ModelConfig.from_hf(json.loads(old.read_text())) == ModelConfig.from_hf(new)


def test_end_ids_of_all_files_are_united() -> None:
    config = TINY_LLAMA | {"eos_token_id": 2}
    assert ModelConfig.from_hf(config, {"eos_token_id": [5, 2, 7]}).eos_ids == (2, 5, 7)
    assert ModelConfig.from_hf(TINY_LLAMA, {"eos_token_id": 5}).eos_ids == (5,)
    assert ModelConfig.from_hf(TINY_LLAMA).eos_ids == ()
    outer = {"model_type": "gemma3", "eos_token_id": [1, 6], "text_config": TINY_GEMMA | {"eos_token_id": 3}}
    assert ModelConfig.from_hf(outer).eos_ids == (1, 6, 3)
    with pytest.raises(LoadError, match=r"generation_config\.json: eos_token_id"):
        ModelConfig.from_hf(TINY_LLAMA, {"eos_token_id": "</s>"})


@pytest.mark.parametrize(
    ("given", "expected"),
    [("silu", "silu"), ("gelu", "gelu"), ("gelu_new", "gelu_tanh"), ("gelu_pytorch_tanh", "gelu_tanh")],
)
def test_activations(given: str, expected: str) -> None:
    assert hf(TINY_LLAMA, hidden_act=given).activation == expected


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}, "'mamba'.*supported: llama"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification.*supported: llama"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "'awq' is not supported yet"),
        ({"quantization_config": {"quant_method": "gptq"}}, "'gptq' is not supported yet"),
        ({"compression_config": {"format": "int"}}, "compression_config is not supported yet"),
        ({"num_local_experts": 8}, "num_local_experts=8: mixture-of-experts"),
        ({"num_experts": 128, "num_experts_per_tok": 8}, "mixture-of-experts"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"hidden_act": "relu2"}, "hidden_act='relu2'"),
        ({"rope_scaling": {"type": "foo", "factor": 2}}, "'foo'"),
        ({"sliding_window": 16}, "sliding_window=16 with model_type llama"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "no sliding window"),
        ({"layer_types": ["chunked_attention", "full_attention"]}, "'chunked_attention'"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"is_causal": False}, "is_causal"),
        ({"no_rope_layers": [1, 0]}, "no_rope_layers"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        hf(TINY_LLAMA, **changes)


@pytest.mark.parametrize(
    ("base", "changes", "words"),
    [
        (TINY_GEMMA, {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        (TINY_GEMMA, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, "full_attention"),
        (TINY_GEMMA, {"sliding_window": None}, "no sliding window"),
        (TINY_GEMMA, {"hidden_activation": "relu"}, "hidden_activation='relu'"),
        (QWEN2, {"layer_types": ["sliding_attention"] * 2, "sliding_window": 16}, "no sliding window"),
        (MISTRAL, {"layer_types": ["full_attention"] * 2, "sliding_window": 16}, "sliding and full"),
        ({"model_type": "gemma3", "text_config": TINY_GEMMA}, {"quantization_config": {"quant_method": "x"}}, "'x'"),
    ],
)
def test_refusals_of_other_architectures(base: dict[str, Any], changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        hf(base, **changes)


def test_neutral_values_of_refused_options_are_accepted() -> None:
    neutral = {
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "quantization_config": None,
        "partial_rotary_factor": 1.0,
        "num_experts": 0,
        "use_mrope": False,
        "rope_scaling": None,
    }
    assert hf(TINY_LLAMA, **neutral) == hf(TINY_LLAMA)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": None, "architectures": None}, "neither model_type nor architectures"),
        ({"architectures": "LlamaForCausalLM"}, "architectures must be a list"),
        ({"architectures": ["Qwen2ForCausalLM"]}, "contradicts itself"),
        ({"hidden_size": None}, "lacks 'hidden_size'"),
        ({"hidden_size": "32"}, "hidden_size must be an integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be an integer of at least 1"),
        ({"hidden_size": 33}, "no multiple"),
        ({"num_key_value_heads": 3}, "4 query heads cannot share 3"),
        ({"rms_norm_eps": -1}, "rms_norm_eps must be a positive number"),
        ({"rms_norm_eps": True}, "rms_norm_eps"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"hidden_act": 3}, "hidden_act must be a string"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object"),
        ({"text_config": []}, "text_config must be an object"),
        ({"eos_token_id": -1}, "eos_token_id"),
    ],
)
def test_bad_values_are_load_errors(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(LoadError, match=words):
        hf(TINY_LLAMA, **changes)


HUGE = (10**9, 0xFFFFFFFF, (1 << 64) - 1, 10**400)
"""The last: more than a float holds. Metadata of GGUF end before it."""


@pytest.mark.parametrize("value", HUGE)
@pytest.mark.parametrize("key", sorted(k for k, v in TINY_LLAMA.items() if type(v) in (int, float)))
@pytest.mark.parametrize("base", [TINY_LLAMA, TINY_GEMMA])
def test_no_number_of_a_config_json_keeps_it_busy(base: dict[str, Any], key: str, value: int) -> None:
    """It is taken as it is (whether tensors agree is checked before anything is sized by it) or refused; never a
    list as long as it, and never an error of arithmetic."""
    try:
        hf(base, **{key: value})
    except LoadError as error:
        assert len(str(error)) < 400
    else:
        assert key != "num_hidden_layers"


@pytest.mark.parametrize("value", [10**400, 10**9, 1e308])
@pytest.mark.parametrize("key", ["factor", "rope_theta", "original_max_position_embeddings", "beta_fast"])
@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn"])
def test_no_number_of_the_rope_options_is_an_error_of_arithmetic(kind: str, key: str, value: float) -> None:
    with contextlib.suppress(LoadError):
        hf(TINY_LLAMA, rope_scaling={"type": kind, "factor": 2.0, key: value})


def test_a_configuration_checks_itself() -> None:
    config = hf(TINY_LLAMA)
    fields = {f: getattr(config, f) for f in config.__dataclass_fields__}
    for changes, words in (
        ({"windows": (None,)}, "2 layers, but 1 windows"),
        ({"windows": (0, None)}, "window must be positive"),
        ({"rope_of_layer": (0, 1)}, "does not exist"),
        ({"ropes": (plain_rope(dim=16),)}, "wider than a head"),
        ({"vocab_size": 0}, "vocab_size is 0"),
    ):
        with pytest.raises(LoadError, match=words):
            ModelConfig(**(fields | changes))


# ---- GGUF

SHAPES = {"token_embd.weight": (64, 32), "output.weight": (64, 32)}


def gguf(architecture: str = "llama", shapes: dict[str, tuple[int, ...]] | None = None, **changes: Any) -> ModelConfig:
    own = {**GGUF_LLAMA, **{k.replace("__", "."): v for k, v in changes.items()}}
    metadata = {f"{architecture}.{k}": v for k, v in own.items() if v is not None}
    tokenizer = {"tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.bos_token_id": 1}
    return ModelConfig.from_gguf({"general.architecture": architecture, **tokenizer, **metadata}, shapes or SHAPES)


def test_gguf_and_config_json_of_the_same_llama() -> None:
    assert gguf() == hf(TINY_LLAMA, eos_token_id=2, bos_token_id=1)


def test_gguf_tells_by_tensors_what_the_metadata_leaves_out() -> None:
    shapes = {"token_embd.weight": (70, 32), "blk.0.attn_q.bias": (32,), "blk.0.attn_output.bias": (32,)}
    config = gguf(shapes=shapes)
    assert (config.vocab_size, config.tied, config.qkv_bias, config.o_bias, config.mlp_bias) == (
        70,
        True,
        True,
        True,
        False,
    )


def test_gguf_mistral_window() -> None:
    assert gguf(attention__sliding_window=16).windows == (16, 16)
    assert gguf(attention__sliding_window=128).windows == (None, None)
    with pytest.raises(UnsupportedModel, match="which layers slide"):
        gguf("qwen2", attention__sliding_window=16)


def test_gguf_gemma_3() -> None:
    keys: dict[str, Any] = {"attention__sliding_window": 16, "attention__key_length": 16, "block_count": 7}
    config = gguf("gemma3", rope__freq_base=1e6, rope__scaling__type="linear", rope__scaling__factor=8.0, **keys)
    assert config.windows == (16,) * 5 + (None, 16)
    assert config.ropes == (plain_rope(1e4, 16), RopeConfig("linear", 1e6, 16, factor=8.0))
    assert config.rope_of_layer == (0,) * 5 + (1, 0) and config.head_dim == 16
    assert config.activation == "gelu_tanh" and config.post_norms and config.qk_norm
    assert config.embed_scale == float(np.sqrt(np.float32(32))) and config.attention_scale == 0.25
    assert gguf("gemma3", rope__freq_base_swa=5e3, **keys).ropes[0] == plain_rope(5e3, 16)
    pattern = np.array([True, False, True, True, True, True, False])
    keys["attention__sliding_window_pattern"] = pattern
    assert gguf("gemma3", **keys).windows == tuple(16 if s else None for s in pattern)
    keys["attention__sliding_window_pattern"] = 2
    assert gguf("gemma3", **keys).windows == (16, None, 16, None, 16, None, 16)
    assert gguf("gemma3").windows == (None, None)


def test_gguf_gemma_3_27b_scales_by_its_width_per_head() -> None:
    assert gguf("gemma3", block_count=62, attention__key_length=16).attention_scale == 8**-0.5
    assert gguf("gemma3", block_count=62, attention__scale=0.5).attention_scale == 0.5


def test_gguf_rope_scaling() -> None:
    assert gguf(rope__scaling__factor=4.0).ropes == (RopeConfig("linear", 10000.0, 8, factor=4.0),)
    assert gguf(rope__scale_linear=4.0).ropes == (RopeConfig("linear", 10000.0, 8, factor=4.0),)
    assert gguf(rope__scaling__type="none", rope__scaling__factor=4.0).ropes == (plain_rope(),)
    assert gguf(rope__freq_base=None).ropes == (plain_rope(),)
    keys: dict[str, Any] = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}
    written = gguf(rope__scaling__original_context_length=32, **keys)
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    assert written.ropes == hf(TINY_LLAMA, rope_scaling=scaling).ropes
    assert gguf(rope__scaling__yarn_attn_factor=1.5, **keys).ropes[0].attention_factor == 1.5
    with pytest.raises(UnsupportedModel, match="longrope"):
        gguf(rope__scaling__type="longrope")
    with pytest.raises(UnsupportedModel, match="longrope"):
        gguf(shapes=SHAPES | {"rope_factors_long.weight": (4,)})


def test_gguf_rope_over_a_part_of_a_head() -> None:
    assert gguf("qwen2", rope__dimension_count=4).ropes == (plain_rope(dim=4),)
    with pytest.raises(UnsupportedModel, match="rope over 4 of 8"):
        gguf(rope__dimension_count=4)


def test_gguf_end_ids() -> None:
    base = {"general.architecture": "llama", **{f"llama.{k}": v for k, v in GGUF_LLAMA.items()}}
    ids = {"eos": 2, "eot": 5, "eom": 2}
    metadata = base | {f"tokenizer.ggml.{k}_token_id": v for k, v in ids.items()}
    assert ModelConfig.from_gguf(metadata, SHAPES).eos_ids == (2, 5)
    none = ModelConfig.from_gguf(base | {"tokenizer.ggml.bos_token_id": 0xFFFFFFFF}, SHAPES)
    assert none.eos_ids == () and none.bos_id is None


def test_gguf_per_layer_arrays() -> None:
    assert gguf(attention__head_count_kv=np.array([2, 2], np.int32)).num_kv_heads == 2
    with pytest.raises(LoadError, match="head_count_kv must be an integer"):
        gguf(attention__head_count_kv=np.array([2, 1], np.int32))


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"expert_count": 8}, UnsupportedModel, "expert_count=8"),
        ({"final_logit_softcapping": 30.0}, UnsupportedModel, "final_logit_softcapping"),
        ({"attention__causal": False}, UnsupportedModel, "causal"),
        ({"attention__key_length": 8, "attention__value_length": 16}, UnsupportedModel, "must be equal"),
        ({"rope__scaling__type": "yarn", "rope__scaling__yarn_ext_factor": 2.0}, UnsupportedModel, "yarn_ext_factor"),
        ({"block_count": None}, LoadError, "lacks 'block_count'"),
        ({"vocab_size": 65}, LoadError, "vocab_size is 65"),
        ({"embedding_length": 33}, LoadError, "do not divide"),
    ],
)
def test_gguf_refusals(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        gguf(**changes)


@pytest.mark.parametrize("value", HUGE[:3])
@pytest.mark.parametrize("key", sorted(k for k, v in GGUF_LLAMA.items() if isinstance(v, int)))
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_no_number_of_gguf_metadata_keeps_it_busy(architecture: str, key: str, value: int) -> None:
    try:
        gguf(architecture, **{key: value})
    except LoadError:
        pass
    else:
        assert key != "block_count"


def test_gguf_of_an_unknown_architecture() -> None:
    with pytest.raises(UnsupportedModel, match="'mamba' is not supported; supported: llama, qwen2"):
        ModelConfig.from_gguf({"general.architecture": "mamba"}, {})
    with pytest.raises(LoadError, match=r"lacks 'general\.architecture'"):
        ModelConfig.from_gguf({}, {})
    with pytest.raises(LoadError, match=r"token_embd\.weight"):
        gguf(shapes={"x": (1,)})
