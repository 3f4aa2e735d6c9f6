"""Metadata of a GGUF file as a ModelConfig.

Key names: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Where a file is silent, the meaning is that of
llama.cpp (``src/llama-model.cpp`` and ``src/models``), for which such files are made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from device.errors import LoadError, UnsupportedModel
from runtime.loaders.fields import MAX_LAYERS, Fields
from runtime.model_config import ModelConfig, supported, unique_ropes
from runtime.rope import RopeConfig, yarn_attention_factor

# Mistral models are converted as "llama": they compute the same.
ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")
# llama.cpp rotates neighbouring elements of a head for "llama", so its converter interleaves the rows of q and k;
# for the others it rotates halves, as we do, and the rows are in the order of the original.
PERMUTED = ("llama",)
_NEUTRAL: tuple[tuple[str, float], ...] = (
    ("expert_count", 0),
    ("attn_logit_softcapping", 0),
    ("final_logit_softcapping", 0),
    ("attention.clamp_kqv", 0),
    ("attention.max_alibi_bias", 0),
    ("attention.temperature_length", 0),
    ("attention.temperature_scale", 0),
    ("logit_scale", 0),
    ("embedding_scale", 0),
    ("residual_scale", 0),
    ("rope.scaling.yarn_log_multiplier", 0),
    ("rope.scaling.alpha", 0),
)
_GEMMA3_27B_LAYERS = 62


def model_config(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], rope_divisors: tuple[float, ...] | None
) -> ModelConfig:
    """See ModelConfig.from_gguf."""
    architecture = Fields(metadata, "GGUF metadata").text("general.architecture")
    if architecture not in ARCHITECTURES:
        raise UnsupportedModel(
            f"GGUF architecture {architecture!r} is not supported; supported: {', '.join(ARCHITECTURES)} "
            f"({supported()})"
        )
    prefix = architecture + "."
    own = {k[len(prefix) :]: _plain(v) for k, v in metadata.items() if k.startswith(prefix)}
    fields = Fields(own, f"GGUF metadata of {architecture}")
    _refuse(fields, shapes)
    layers = fields.integer("block_count", maximum=MAX_LAYERS)
    hidden = fields.integer("embedding_length")
    heads = fields.integer("attention.head_count")
    head_dim = _head_dim(fields, hidden, heads)
    windows = _windows(fields, architecture, layers)
    ropes, rope_of_layer = unique_ropes(_ropes(fields, architecture, head_dim, windows, rope_divisors))
    return ModelConfig(
        architecture=architecture,
        vocab_size=_vocab_size(fields, metadata, shapes),
        hidden_size=hidden,
        intermediate_size=fields.integer("feed_forward_length"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=fields.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        rms_eps=fields.number("attention.layer_norm_rms_epsilon"),
        max_position=fields.integer("context_length"),
        tied="output.weight" not in shapes,
        windows=windows,
        ropes=ropes,
        rope_of_layer=rope_of_layer,
        attention_scale=_attention_scale(fields, architecture, hidden, heads, layers, head_dim),
        qkv_bias="blk.0.attn_q.bias" in shapes,
        o_bias="blk.0.attn_output.bias" in shapes,
        mlp_bias="blk.0.ffn_gate.bias" in shapes,
        qk_norm=architecture in ("qwen3", "gemma3"),
        activation="gelu_tanh" if architecture == "gemma3" else "silu",
        post_norms=architecture == "gemma3",
        embed_scale=float(np.sqrt(np.float32(hidden))) if architecture == "gemma3" else 1.0,
        eos_ids=_end_ids(metadata),
        bos_id=_token_id(metadata, "bos"),
    )


def _plain(value: Any) -> Any:
    """A per-layer array whose entries are all alike as that one number; others stay and fail the type check."""
    if isinstance(value, np.ndarray) and value.size and np.all(value == value[0]):
        return value[0].item()
    return value


def _refuse(fields: Fields, shapes: Mapping[str, tuple[int, ...]]) -> None:
    for key, neutral in _NEUTRAL:
        value = fields.get(key)
        if value is not None and value != neutral:
            raise UnsupportedModel(f"{fields.source}: {key}={value} is not supported")
    if not fields.flag("attention.causal", True):
        raise UnsupportedModel(f"{fields.source}: attention.causal is false; only decoders are supported")
    for name in ("rope_factors_long.weight", "rope_factors_short.weight"):
        if name in shapes:
            raise UnsupportedModel(f"GGUF tensor {name!r}: rope type longrope is not supported")


def _head_dim(fields: Fields, hidden: int, heads: int) -> int:
    if not fields.has("attention.key_length") and hidden % heads:
        raise LoadError(
            f"{fields.source}: {heads} heads do not divide the embedding length {hidden}, and no key_length"
        )
    key = fields.integer("attention.key_length", hidden // heads)
    value = fields.integer("attention.value_length", key)
    if key != value:
        raise UnsupportedModel(f"{fields.source}: keys of {key} and values of {value} per head; they must be equal")
    return key


def _windows(fields: Fields, architecture: str, layers: int) -> tuple[int | None, ...]:
    window = fields.integer("attention.sliding_window", 0, minimum=0)
    if architecture == "gemma3":
        if not window:
            return (None,) * layers
        pattern = fields.get("attention.sliding_window_pattern")
        if isinstance(pattern, np.ndarray):
            if pattern.size != layers:
                raise LoadError(f"{fields.source}: sliding_window_pattern has {pattern.size} entries, not {layers}")
            return tuple(window if slides else None for slides in pattern)
        if isinstance(pattern, bool):  # an array of equal entries
            return (window if pattern else None,) * layers
        period = fields.integer("attention.sliding_window_pattern", 6)
        return tuple(None if (i + 1) % period == 0 else window for i in range(layers))
    if not window or window >= fields.integer("context_length"):
        return (None,) * layers
    if architecture == "llama":  # a Mistral
        return (window,) * layers
    raise UnsupportedModel(
        f"{fields.source}: attention.sliding_window={window} does not say which layers slide; "
        "load the Hugging Face folder instead"
    )


def _ropes(
    fields: Fields,
    architecture: str,
    head_dim: int,
    windows: tuple[int | None, ...],
    divisors: tuple[float, ...] | None,
) -> list[RopeConfig]:
    dim = fields.integer("rope.dimension_count", head_dim)
    if architecture in PERMUTED and dim != head_dim:
        raise UnsupportedModel(f"{fields.source}: rope over {dim} of {head_dim} elements of a head is not supported")
    everywhere = _rope(fields, fields.number("rope.freq_base", 10000.0), dim, divisors)
    if architecture != "gemma3":
        return [everywhere] * len(windows)
    # Gemma 3's sliding layers keep the short context's base, never scaled.
    local = RopeConfig("none", fields.number("rope.freq_base_swa", 10000.0), dim)
    return [everywhere if w is None else local for w in windows]


def _rope(fields: Fields, theta: float, dim: int, divisors: tuple[float, ...] | None) -> RopeConfig:
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 1.0))
    # A factor without a type is linear.
    kind = fields.text("rope.scaling.type", "linear")
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return RopeConfig("none", theta, dim, divisors=divisors)
    if kind == "linear":
        return RopeConfig("linear", theta, dim, factor=factor, divisors=divisors)
    if kind != "yarn":
        raise UnsupportedModel(f"{fields.source}: rope.scaling.type {kind!r} is not supported (none, linear, yarn are)")
    if fields.number("rope.scaling.yarn_ext_factor", 1.0) != 1.0:
        raise UnsupportedModel(f"{fields.source}: rope.scaling.yarn_ext_factor other than 1 is not supported")
    # The converter stores config.json's attention_factor, which replaces the inferred one, as yarn_attn_factor;
    # attn_factor comes on top.
    attention = fields.number("rope.scaling.yarn_attn_factor", yarn_attention_factor(factor))
    return RopeConfig(
        "yarn",
        theta,
        dim,
        factor=factor,
        original_max_position=fields.integer("rope.scaling.original_context_length", fields.integer("context_length")),
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=attention * fields.number("rope.scaling.attn_factor", 1.0),
        divisors=divisors,
    )


def _attention_scale(fields: Fields, architecture: str, hidden: int, heads: int, layers: int, head_dim: int) -> float:
    if fields.has("attention.scale"):
        return fields.number("attention.scale")
    if architecture == "gemma3" and layers == _GEMMA3_27B_LAYERS:
        # The 27B model scales by its width per head instead of the head's size, and GGUF has no key for it:
        # https://github.com/google/gemma_pytorch/blob/main/gemma/config.py (get_config_for_27b_v3).
        return float((hidden // heads) ** -0.5)
    return float(head_dim**-0.5)


def _vocab_size(fields: Fields, metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Rows of the embedding table: the token list may be shorter than the table, never longer."""
    if "token_embd.weight" not in shapes:
        raise LoadError("GGUF file lacks tensor 'token_embd.weight'; is this a language model, and complete?")
    rows = shapes["token_embd.weight"][0]
    tokens = metadata.get("tokenizer.ggml.tokens")
    if tokens is not None and len(tokens) > rows:
        raise LoadError(f"GGUF file has {len(tokens)} tokens but only {rows} rows of embeddings; the file is damaged")
    stated = fields.integer("vocab_size", rows)
    if stated != rows:
        raise LoadError(f"{fields.source}: vocab_size is {stated}, but the embedding table has {rows} rows")
    return rows


def _end_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """End of text, of a turn, of a message: each ends an answer."""
    ids = (_token_id(metadata, kind) for kind in ("eos", "eot", "eom"))
    return tuple(dict.fromkeys(i for i in ids if i is not None))


def _token_id(metadata: Mapping[str, Any], kind: str) -> int | None:
    key = f"tokenizer.ggml.{kind}_token_id"
    value = metadata.get(key)
    if value is None or value == 0xFFFFFFFF:  # -1 as unsigned: none
        return None
    return Fields(metadata, "GGUF metadata").integer(key, minimum=0)


def rope_divisors(values: np.ndarray[Any, Any]) -> tuple[float, ...]:
    """``rope_freqs.weight`` as numbers. Raises LoadError where one is no positive number."""
    divisors = tuple(float(v) for v in values.reshape(-1))
    if not divisors or not all(math.isfinite(d) and d > 0 for d in divisors):
        raise LoadError("GGUF tensor 'rope_freqs.weight' must hold positive numbers; the file is damaged")
    return divisors
