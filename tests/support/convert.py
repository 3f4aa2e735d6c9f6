"""An opened checkpoint as the content of a GGUF file, as llama.cpp's converter would write it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.loaders.checkpoint import Checkpoint
from runtime.model_config import ModelConfig
from runtime.rope import RopeConfig, inverse_frequencies
from tests.support.checkpoints import gguf_name, permute

Array = NDArray[Any]


def real_values(checkpoint: Checkpoint, name: str) -> Array:
    """A tensor as float32; Gemma's norms as what they multiply by."""
    if len(checkpoint.shape(name)) == 2:
        return checkpoint.weight(name).dequantize()
    return checkpoint.vector(name)


def gguf_architecture(config: ModelConfig) -> str:
    """Mistral models are converted as llama."""
    return "llama" if config.architecture == "mistral" else config.architecture


def permuted(config: ModelConfig, name: str, values: Array) -> Array:
    """Rows of a tensor (by Hugging Face's name; real values or raw blocks) in the order of the file."""
    if gguf_architecture(config) == "llama" and ".q_proj." in name:
        return permute(values, config.num_heads)
    if gguf_architecture(config) == "llama" and ".k_proj." in name:
        return permute(values, config.num_kv_heads)
    return values


def gguf_metadata(checkpoint: Checkpoint) -> dict[str, Any]:
    """Keys without the architecture in front; what its tests read from a file, no tokenizer."""
    c = checkpoint.config
    full = next((i for i, window in enumerate(c.windows) if window is None), 0)
    rope = c.ropes[c.rope_of_layer[full]]
    out: dict[str, Any] = {
        "block_count": c.num_layers,
        "context_length": c.max_position,
        "embedding_length": c.hidden_size,
        "feed_forward_length": c.intermediate_size,
        "attention.head_count": c.num_heads,
        "attention.head_count_kv": c.num_kv_heads,
        "attention.key_length": c.head_dim,
        "attention.value_length": c.head_dim,
        "attention.layer_norm_rms_epsilon": c.rms_eps,
        "rope.freq_base": rope.theta,
    }
    if any(c.windows):
        out["attention.sliding_window"] = next(w for w in c.windows if w)
    if c.architecture == "gemma3":
        out["attention.sliding_window_pattern"] = [w is not None for w in c.windows]
        out["attention.scale"] = c.attention_scale
        out["rope.freq_base_swa"] = next(
            (c.ropes[r].theta for r, w in zip(c.rope_of_layer, c.windows, strict=True) if w), 1e4
        )
    if rope.type in ("linear", "yarn"):
        out |= {"rope.scaling.type": rope.type, "rope.scaling.factor": rope.factor}
    if rope.type == "yarn":
        out["rope.scaling.original_context_length"] = rope.original_max_position
        out["rope.scaling.yarn_beta_fast"] = rope.beta_fast
        out["rope.scaling.yarn_beta_slow"] = rope.beta_slow
    return out


def gguf_tensors(checkpoint: Checkpoint) -> dict[str, Array]:
    """By GGUF's names, q and k of a llama permuted, Gemma's norms with their 1 added."""
    c = checkpoint.config
    out = {
        gguf_name(n, c.architecture == "gemma3"): permuted(c, n, real_values(checkpoint, n)) for n in checkpoint.names()
    }
    rope = c.ropes[0]
    if rope.type == "llama3":
        plain = inverse_frequencies(RopeConfig("none", rope.theta, rope.dim))
        out["rope_freqs.weight"] = (plain / inverse_frequencies(rope)).astype(np.float32)
    return out
