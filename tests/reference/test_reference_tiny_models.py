"""Are the references of the tiny models what transformers says today, and would they notice a feature left out?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.data import make_tiny_models
from tests.reference import forward
from tests.support.reference import (
    MODELS,
    TINY_TOLERANCE,
    GreedyReport,
    compare_teacher_forced,
    tiny_model_cases,
    tiny_model_names,
)


def compare(name: str, model: Any) -> GreedyReport:
    report = GreedyReport()
    for case in tiny_model_cases(name):
        report += compare_teacher_forced(case, lambda ids: forward.last_rows(model, ids, 64), TINY_TOLERANCE)
    return report


def test_every_recipe_has_a_folder() -> None:
    assert tiny_model_names() == sorted([*make_tiny_models.RECIPES, "tiny"])


@pytest.mark.parametrize("name", tiny_model_names())
def test_greedy_tokens_and_logits(name: str) -> None:
    assert compare(name, forward.load_folder(MODELS / name)).equal == 6 * 64


@pytest.mark.parametrize("name", tiny_model_names())
def test_greedy_tokens_with_a_cache(name: str) -> None:
    """transformers' own incremental decoding agrees, windows and rotary scaling included."""
    model = forward.load_folder(MODELS / name)
    for case in tiny_model_cases(name):
        assert forward.greedy(model, case.prompt, len(case.tokens)) == list(case.tokens)


@pytest.mark.parametrize("name", sorted(make_tiny_models.RECIPES))
def test_weights_are_those_of_the_recipe(name: str) -> None:
    recipe = make_tiny_models.RECIPES[name]
    config = recipe.config(**{**make_tiny_models.COMMON, **recipe.options})
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    make_tiny_models.fill(made, recipe.seed)
    wanted = made.to(recipe.dtype).state_dict()
    stored = forward.load_folder(MODELS / name).state_dict()
    assert stored.keys() == wanted.keys()
    assert [key for key in stored if not torch.equal(stored[key], wanted[key].float())] == []


@pytest.mark.parametrize("name", [path.parent.name for path in sorted(MODELS.glob("*/config.old_form.json"))])
def test_old_form_of_the_configuration_means_the_same(name: str) -> None:
    old = forward.load_folder(MODELS / name, "config.old_form.json")
    assert "rope_parameters" not in (MODELS / name / "config.old_form.json").read_text(encoding="utf-8")
    assert compare(name, old).equal == 6 * 64


# ------------------------------------------------------------- a reader that gets one thing wrong must be found out


def _zero(part: str) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        hit = [p.data.zero_() for n, p in model.named_parameters() if part in n]
        assert hit

    return change


def _ones(part: str) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        hit = [p.data.fill_(1.0) for n, p in model.named_parameters() if part in n]
        assert hit

    return change


def _tie(model: Any) -> None:
    model.lm_head.weight.data = model.model.embed_tokens.weight.data


def _rope(**changes: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default", **changes}}


_YARN = make_tiny_models.RECIPES["llama_yarn"].options["rope_parameters"]
_LLAMA3 = make_tiny_models.RECIPES["llama3_rope"].options["rope_parameters"]
_GEMMA = make_tiny_models.RECIPES["gemma3"].options["rope_parameters"]
_SLIDING, _FULL = "sliding_attention", "full_attention"
WRONG: dict[str, tuple[str, dict[str, Any], Callable[[Any], None] | None]] = {
    "qwen2 without q bias": ("qwen2", {}, _zero("q_proj.bias")),
    "qwen2 without k bias": ("qwen2", {}, _zero("k_proj.bias")),
    "qwen2 without v bias": ("qwen2", {}, _zero("v_proj.bias")),
    "qwen2 with the window that is off": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 16, "layer_types": [_SLIDING] * 2},
        None,
    ),
    "qwen3 without q norm": ("qwen3", {}, _ones("q_norm")),
    "qwen3 without k norm": ("qwen3", {}, _ones("k_norm")),
    "qwen3 with another theta": ("qwen3", _rope(), None),
    "mistral without window": ("mistral_window", {"sliding_window": None}, None),
    "mistral, window one short": ("mistral_window", {"sliding_window": 23}, None),
    "mistral, window one long": ("mistral_window", {"sliding_window": 25}, None),
    "llama2 with a tied head": ("llama2", {}, _tie),
    "llama3 rope not scaled": ("llama3_rope", _rope(), None),
    "llama3 rope, all divided": ("llama3_rope", _rope(rope_type="linear", factor=8.0), None),
    "llama3 rope, another band": ("llama3_rope", _rope(**{**_LLAMA3, "high_freq_factor": 2.0}), None),
    "linear rope not scaled": ("llama_linear", _rope(), None),
    "yarn not scaled": ("llama_yarn", _rope(), None),
    "yarn without attention factor": ("llama_yarn", _rope(**_YARN, attention_factor=1.0), None),
    "yarn with default betas": ("llama_yarn", _rope(**{**_YARN, "beta_fast": 32.0, "beta_slow": 1.0}), None),
    "yarn from another length": ("llama_yarn", _rope(**{**_YARN, "original_max_position_embeddings": 256}), None),
    "gemma3 scaled by the head size": ("gemma3", {"query_pre_attn_scalar": 32}, None),
    "gemma3 with exact gelu": ("gemma3", {"hidden_activation": "gelu"}, None),
    "gemma3 with silu": ("gemma3", {"hidden_activation": "silu"}, None),
    "gemma3, window one short": ("gemma3", {"sliding_window": 11}, None),
    "gemma3, all layers full": ("gemma3", {"layer_types": [_FULL] * 6}, None),
    "gemma3, all layers sliding": ("gemma3", {"layer_types": [_SLIDING] * 6}, None),
    "gemma3, local theta everywhere": (
        "gemma3",
        {"rope_parameters": {_SLIDING: _GEMMA[_SLIDING], _FULL: _GEMMA[_SLIDING]}},
        None,
    ),
    "gemma3, full layers not scaled": (
        "gemma3",
        {"rope_parameters": {_SLIDING: _GEMMA[_SLIDING], _FULL: {"rope_type": "default", "rope_theta": 1e6}}},
        None,
    ),
    "gemma3 without norm behind attention": ("gemma3", {}, _zero("post_attention_layernorm")),
    "gemma3 without q norm": ("gemma3", {}, _zero("q_norm")),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_reading_is_noticed(wrong: str) -> None:
    name, overrides, change = WRONG[wrong]
    model = forward.load_folder(MODELS / name, **overrides)
    if change:
        change(model)
    with pytest.raises(AssertionError, match=r"off by|got id"):
        compare(name, model)
