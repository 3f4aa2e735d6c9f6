"""The engine beside transformers, both running now: other prompts and other weights than those of tests/data.

So a new version of transformers, or of our reader, that understands a model differently is found out even where the
stored references would not show it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from cpu_kernels.build import find_compiler
from device.cpu import CpuDevice
from runtime import Engine
from runtime.loaders.checkpoint import open_checkpoint
from runtime.models.build import build_model
from tests.data import make_tiny_models
from tests.reference import forward
from tests.support.forward import Forward, compare_engine, compare_logits
from tests.support.reference import (
    DATA,
    LOGIT_TOLERANCE,
    MODELS,
    TINY_TOLERANCE,
    GreedyReport,
    ReferenceCase,
    make_case,
    smollm2_cases,
    tiny_model_names,
)

# Of quantised weights, only where activations stay float can tokens be those of a float32 forward.
KERNELS = ("numpy",) if find_compiler() is None else ("numpy", "native")
LENGTHS = (1, 9, 24, 63, 120)
TOKENS = 40


def live_case(model: Any, name: str, index: int, prompt: list[int], count: int) -> ReferenceCase:
    """What transformers says now: tokens with its own cache, logits by one full forward behind them."""
    tokens = forward.greedy(model, prompt, count)
    return make_case(name, index, prompt, forward.greedy_rows(model, prompt, tokens))


def live_cases(model: Any, name: str, seed: int = 11) -> list[ReferenceCase]:
    state = np.random.RandomState(seed)
    prompts = [state.randint(4, 512, size=length).tolist() for length in LENGTHS]
    return [live_case(model, f"{name}, {len(p)} tokens", i, p, TOKENS) for i, p in enumerate(prompts)]


def compare(folder: Path | str, cases: list[ReferenceCase], tolerance: float, **settings: Any) -> GreedyReport:
    """Logits behind the reference's tokens, then tokens running free through an engine."""
    device = CpuDevice("float32")
    model = build_model(open_checkpoint(folder, lambda _: None), device, 512)
    report = compare_logits(Forward(model, device, chunk=50), cases, tolerance)
    device.close()
    if isinstance(folder, Path):
        settings["tokenizer"] = str(DATA / "tiny_tokenizer")
    total = sum(len(case.tokens) for case in cases)
    assert report.equal + report.excused == total
    for kernels in KERNELS:
        engine = Engine.load(
            str(folder), device="cpu", dtype="float32", activations="float", kernels=kernels, **settings
        )
        free = compare_engine(engine, cases)
        engine.shutdown()
        print(f"{folder}: {report}; free, {kernels} kernels: {free.equal} equal, {free.excused} excused")
        assert free.equal + free.excused == total
    return report


@pytest.mark.parametrize("name", tiny_model_names())
def test_stored_models_with_other_prompts(name: str) -> None:
    cases = live_cases(forward.load_folder(MODELS / name), name)
    compare(MODELS / name, cases, TINY_TOLERANCE, max_num_batched_tokens=32)


def plain(theta: float = 10000.0, **scaling: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta, **scaling}


_COMMON = make_tiny_models.COMMON
_RECIPES = make_tiny_models.RECIPES
FRESH: dict[str, Any] = {
    **{name: recipe.config(**{**_COMMON, **recipe.options}) for name, recipe in _RECIPES.items()},
    "llama with all biases": LlamaConfig(**_COMMON, attention_bias=True, mlp_bias=True, rope_parameters=plain()),
    "llama, heads wider than hidden": LlamaConfig(
        **{**_COMMON, "num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": False},
        head_dim=32,
        rope_parameters=plain(500.0),
    ),
    "llama, yarn with an attention factor": LlamaConfig(
        **_COMMON,
        rope_parameters=plain(
            rope_type="yarn", factor=4.0, original_max_position_embeddings=64, attention_factor=1.3, truncate=False
        ),
    ),
    "mistral without a window": MistralConfig(**_COMMON, head_dim=8, sliding_window=None, rope_parameters=plain()),
    "qwen2, upper layers slide": Qwen2Config(
        **{**_COMMON, "num_hidden_layers": 3},
        use_sliding_window=True,
        sliding_window=10,
        max_window_layers=1,
        rope_parameters=plain(),
    ),
    "qwen3 with biases, upper layer slides": Qwen3Config(
        **_COMMON,
        head_dim=16,
        attention_bias=True,
        use_sliding_window=True,
        sliding_window=7,
        max_window_layers=1,
        rope_parameters=plain(),
    ),
}


@pytest.mark.parametrize("name", FRESH)
def test_fresh_weights(name: str, tmp_path: Path) -> None:
    """Saved by the transformers that is installed, in the form that it writes today; every other one in bfloat16."""
    dtype = torch.float32 if list(FRESH).index(name) % 2 else torch.bfloat16
    made = AutoModelForCausalLM.from_config(FRESH[name], dtype=torch.float32)
    make_tiny_models.fill(made, 1000 + len(name))
    made.to(dtype).save_pretrained(tmp_path)
    cases = live_cases(forward.load_folder(tmp_path), name)
    compare(tmp_path, cases, TINY_TOLERANCE, speculate="ngram", ngram_min=1)


def test_the_text_part_of_gemma_with_eyes(tmp_path: Path) -> None:
    """Gemma 3 from 4B on comes as Gemma3ForConditionalGeneration: nested configuration, other tensor names."""
    text = _RECIPES["gemma3"].config(**{**_COMMON, **_RECIPES["gemma3"].options})
    vision = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
        "patch_size": 8,
    }  # fmt: skip
    config = Gemma3Config(text_config=text.to_dict(), vision_config=vision, mm_tokens_per_image=4, eos_token_id=[1])
    made = Gemma3ForConditionalGeneration(config).to(torch.float32).eval()
    make_tiny_models.fill(made.model.language_model, 4)
    made.lm_head.weight = made.model.language_model.embed_tokens.weight
    made.save_pretrained(tmp_path)
    cases = live_cases(made, "gemma3 with eyes")
    assert compare(tmp_path, cases, TINY_TOLERANCE).equal > 0


def test_dynamic_rope_where_the_length_is_the_longest_served(tmp_path: Path) -> None:
    """transformers stretches the base with each sequence's length; we take max_model_len once, so that cached keys
    stay right. Both are the same for a sequence of that length, and for every one within the training's context."""
    scaling = plain(rope_type="dynamic", factor=2.0)
    config = LlamaConfig(**{**_COMMON, "max_position_embeddings": 64}, rope_parameters=scaling)
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    make_tiny_models.fill(made, 5)
    made.save_pretrained(tmp_path)
    ids = np.random.RandomState(3).randint(4, 512, size=200).tolist()
    for count, longest in ((64, 64), (30, 64), (65, 65), (200, 200)):
        device = CpuDevice("float32")
        ours = Forward(build_model(open_checkpoint(tmp_path, lambda _: None), device, longest), device).rows(
            ids[:count]
        )
        device.close()
        # a model anew each time: transformers keeps a stretched base in the module
        theirs = forward.last_rows(forward.load_folder(tmp_path), ids[:count], count)
        assert np.abs(ours - theirs).max() <= TINY_TOLERANCE * np.abs(theirs).max()
    assert not np.allclose(forward.last_rows(forward.load_folder(tmp_path), ids[:65], 1)[0], ours[64], atol=1e-2)


@pytest.fixture(scope="module")
def embedded() -> Iterator[Any]:
    yield forward.smollm2_by_transformers(forward.find_gguf())


def test_the_embedded_model(embedded: Any) -> None:
    """The file, not the name: the reference's environment may have the model from the other one."""
    stored = {case.name: case for case in smollm2_cases()}
    prompts = [list(stored[name].prompt) for name in ("chat, question", "code, sql")]
    cases = [live_case(embedded, f"smollm2 {i}", i, prompt, 32) for i, prompt in enumerate(prompts)]
    report = compare(str(forward.find_gguf()), cases, LOGIT_TOLERANCE, max_model_len=256, max_num_batched_tokens=32)
    assert report.max_relative_delta < 1e-4
