"""Makes ``tests/data/models/<name>``: random tiny models saved by transformers, and what transformers says of them.

Weights are drawn as in make_tiny.py, large enough that logits differ clearly and small enough that attention looks
at several positions; rows of padding ids (512..519) are zero. Every folder is loaded again from its files, in
float32 with eager attention and no cache, before its reference (``reference.json``, ``reference.npz``) is made:
six prompts of 2 to 80 random ids, 64 greedy tokens each, end-of-text ignored. The folder ``tiny`` (make_tiny.py) gets a
reference too. Config files of ``llama2``, ``llama_linear`` and ``llama_yarn`` are rewritten in the form that
checkpoints had before ``rope_parameters``; that of ``qwen2`` names a window that ``use_sliding_window`` turns off.
``llama3_rope`` and ``gemma3`` keep the file of transformers and have the old form beside it, with the same meaning,
as ``config.old_form.json``. Seeds are chosen so that no two best logits are nearer than 1e-3.

Made with Python 3.11, torch 2.13.0 (CPU), transformers 5.23.0, safetensors 0.8.0.
Usage, in an environment with tests/reference/requirements.txt:
    python tests/data/make_tiny_models.py [NAME ...]
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.data.make_tiny import TOKENS, uniform  # noqa: E402
from tests.reference import forward  # noqa: E402
from tests.support.reference import MODELS, make_case, save_cases  # noqa: E402

NEW_TOKENS = 64
PROMPT_LENGTHS = (2, 5, 17, 33, 48, 80)
FULL_ROWS = {1: range(0, 64, 8), 5: range(7, 64, 8)}
COMMON: dict[str, Any] = {
    "vocab_size": 520,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}


@dataclass(frozen=True)
class Recipe:
    """How one folder is made: seed, configuration, stored dtype, largest shard.

    edit: changes the saved config.json; beside: makes the content of config.old_form.json instead.
    """

    seed: int
    config: Callable[..., PretrainedConfig]
    options: dict[str, Any]
    dtype: torch.dtype
    shard: str = "10MB"
    edit: Callable[[dict[str, Any]], None] | None = None
    beside: Callable[[dict[str, Any]], None] | None = None


def old_rope(config: dict[str, Any]) -> None:
    """rope_parameters -> rope_theta and rope_scaling (``type``, as first released)."""
    rope = config.pop("rope_parameters")
    theta = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    config["rope_theta"] = theta
    config["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    config["torch_dtype"] = config.pop("dtype")


def unused_window(config: dict[str, Any]) -> None:
    """Released Qwen2.5 files name a window and turn it off beside it; layer_types came later."""
    config.pop("layer_types")
    config.update(use_sliding_window=False, sliding_window=16, max_window_layers=1)


def old_gemma(config: dict[str, Any]) -> None:
    """As the first Gemma 3 files: a pattern for the layer types, two thetas, scaling of the full layers only."""
    config.pop("layer_types")
    config["sliding_window_pattern"] = config.pop("_sliding_window_pattern")
    rope = config.pop("rope_parameters")
    full = rope["full_attention"]
    config["rope_theta"] = full.pop("rope_theta")
    config["rope_scaling"] = full
    config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
    config["torch_dtype"] = config.pop("dtype")


RECIPES = {
    "qwen2": Recipe(7, Qwen2Config, {"rope_parameters": PLAIN_ROPE}, torch.bfloat16, edit=unused_window),
    "qwen3": Recipe(
        4,
        Qwen3Config,
        {"head_dim": 32, "intermediate_size": 48, "rope_parameters": {**PLAIN_ROPE, "rope_theta": 1e6}},
        torch.float32,
    ),
    "mistral_window": Recipe(
        5, MistralConfig, {"head_dim": 16, "sliding_window": 24, "rope_parameters": PLAIN_ROPE}, torch.bfloat16
    ),
    "llama2": Recipe(
        1,
        LlamaConfig,
        {"tie_word_embeddings": False, "num_key_value_heads": 4, "rope_parameters": PLAIN_ROPE},
        torch.float16,
        shard="100KB",
        edit=old_rope,
    ),
    "llama3_rope": Recipe(
        5,
        LlamaConfig,
        {
            "num_hidden_layers": 3,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
        torch.bfloat16,
        beside=old_rope,
    ),
    "llama_linear": Recipe(
        3,
        LlamaConfig,
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
        torch.bfloat16,
        edit=old_rope,
    ),
    "llama_yarn": Recipe(
        7,
        LlamaConfig,
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 32,
                "beta_fast": 4.0,
                "beta_slow": 0.5,
            }
        },
        torch.bfloat16,
        edit=old_rope,
    ),
    "gemma3": Recipe(
        4,
        Gemma3TextConfig,
        {
            "num_hidden_layers": 6,
            "sliding_window_pattern": 3,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "intermediate_size": 32,
            "query_pre_attn_scalar": 24,
            "sliding_window": 12,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
        torch.bfloat16,
        beside=old_gemma,
    ),
}


def _bound_and_centre(name: str, model_type: str) -> tuple[float, float]:
    gemma = model_type.startswith("gemma")
    if "norm" in name:
        # Gemma multiplies by 1 + w. Its post-norms set what a layer adds beside the embedding (scaled by 8).
        return (0.5, 3.5 if "post_" in name else 0.5) if gemma else (0.5, 1.0)
    if name.endswith("bias"):
        return 1.0, 0.0
    if "embed" in name or "lm_head" in name:
        return 0.5, 0.0
    part = name.split(".")[-2]
    return {"q_proj": 0.375, "k_proj": 0.375, "o_proj": 1.0}.get(part, 0.5), 0.0


def fill(model: Any, seed: int) -> None:
    """Random weights in place, in the order of their names."""
    state = np.random.RandomState(seed)
    for name, parameter in sorted(model.named_parameters()):
        values = uniform(state, tuple(parameter.shape), *_bound_and_centre(name, model.config.model_type))
        if "embed" in name or "lm_head" in name:
            values[TOKENS:] = 0
        parameter.data.copy_(torch.from_numpy(values))


def save(name: str, recipe: Recipe) -> None:
    """The model's folder, without reference."""
    folder = MODELS / name
    shutil.rmtree(folder, ignore_errors=True)
    model = AutoModelForCausalLM.from_config(recipe.config(**{**COMMON, **recipe.options}), dtype=torch.float32)
    fill(model, recipe.seed)
    model.to(recipe.dtype).save_pretrained(folder, max_shard_size=recipe.shard)
    for change, target in ((recipe.edit, "config.json"), (recipe.beside, "config.old_form.json")):
        if change:
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            change(config)
            (folder / target).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for file in folder.iterdir():
        file.chmod(0o644)


def refer(name: str) -> None:
    """``reference.json`` and ``.npz`` of a folder that holds a model."""
    folder = MODELS / name
    model = forward.load_folder(folder)
    state = np.random.RandomState(7)
    cases = []
    for index, length in enumerate(PROMPT_LENGTHS):
        prompt = state.randint(4, TOKENS, size=length).tolist()
        tokens = forward.greedy_uncached(model, prompt, NEW_TOKENS)
        rows = forward.greedy_rows(model, prompt, tokens)
        cases.append(make_case(f"{name}, {length} tokens", index, prompt, rows, FULL_ROWS.get(index, ())))
    meta = {"model": name, "made_by": "tests/data/make_tiny_models.py", "versions": forward.versions()}
    save_cases(folder / "reference.json", meta, cases)
    gap = min(case.gap(row) for case in cases for row in range(NEW_TOKENS))
    kinds = [len(set(case.tokens)) for case in cases]
    print(f"{name}: least gap {gap:.1e}, distinct tokens of 64: {kinds}, max |logit| {cases[0].max_abs.max():.1f}")


def main(names: list[str]) -> None:
    for name in names or [*RECIPES, "tiny"]:
        began = time.perf_counter()
        if name != "tiny":
            save(name, RECIPES[name])
        refer(name)
        sizes = {path.name: path.stat().st_size for path in sorted((MODELS / name).iterdir())}
        print(f"   {sum(sizes.values())} bytes {sizes}, {time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
