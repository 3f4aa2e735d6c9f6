"""Rotary position embedding: which frequencies a checkpoint asks for, and the table of cosines and sines.

All kinds are functions of one idea: pair i of a head (element i with element i + dim/2) turns by ``p * f_i`` at
position p. The kinds differ in f. Sources:

* none: RoFormer, https://arxiv.org/abs/2104.09864
* linear: position interpolation, https://arxiv.org/abs/2306.15595
* dynamic: NTK-aware base, https://www.reddit.com/r/LocalLLaMA/comments/14mrgpr
* yarn: https://arxiv.org/abs/2309.00071
* llama3: https://github.com/meta-llama/llama-models/blob/main/models/llama3/model.py (``apply_scaling``)

The meaning of the option names is that of transformers' ``modeling_rope_utils.py``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device.errors import LoadError, UnsupportedModel
from runtime.loaders.fields import finite

ROPE_TYPES = ("none", "linear", "dynamic", "llama3", "yarn")

# "default" is what transformers writes for no scaling at all.
_ALIASES = {"default": "none", "none": "none"}
# Options that some kind reads. A kind ignores those of the others, as transformers does with a warning.
_KNOWN_KEYS = {
    "type",
    "rope_type",
    "rope_theta",
    "factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
    "finetuned",
}
# Options that change the result when they are not at this neutral value, and that we do not implement.
_NEUTRAL = {"partial_rotary_factor": 1.0, "attn_factor": 1.0, "extrapolation_factor": 1.0}
_TABLE_CHUNK = 8192


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """One kind of rotary embedding, ready to compute.

    type: ``none linear dynamic llama3 yarn``.
    theta: the base. dim: elements of a head that turn (even, at most the head size; the rest pass unchanged).
    factor: how much longer than in training the context may be. original_max_position: the context of training.
    low_freq_factor, high_freq_factor: llama3's bounds. beta_fast, beta_slow, truncate: yarn's ramp.
    attention_factor: multiplied into cosines and sines (yarn; else 1).
    divisors: one per pair, divides its frequency first (the ``rope_freqs.weight`` tensor of GGUF files).
    """

    type: str = "none"
    theta: float = 10000.0
    dim: int = 128
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    divisors: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.type not in ROPE_TYPES:
            raise UnsupportedModel(f"rope type {self.type!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
        if self.dim <= 0 or self.dim % 2:
            raise LoadError(f"rope over {self.dim} elements of a head; an even, positive number is needed")
        if not self.theta > 0 or not self.factor > 0:
            raise LoadError(f"rope base {self.theta} and factor {self.factor} must be positive")
        if self.type in ("dynamic", "llama3", "yarn") and self.original_max_position <= 0:
            raise LoadError(f"rope type {self.type} needs the context length of the training, got none")
        if self.type == "dynamic" and self.dim <= 2:
            raise LoadError("rope type dynamic needs more than 2 elements of a head")
        if self.type == "llama3" and not self.high_freq_factor > self.low_freq_factor:
            raise LoadError(
                f"rope type llama3: high_freq_factor {self.high_freq_factor} must be above "
                f"low_freq_factor {self.low_freq_factor}"
            )
        if self.type == "yarn" and (self.theta == 1.0 or self.beta_slow <= 0 or self.beta_fast <= 0):
            raise LoadError("rope type yarn: rope_theta must not be 1, beta_fast and beta_slow must be positive")
        if self.divisors is not None and (len(self.divisors) != self.dim // 2 or min(self.divisors) <= 0):
            raise LoadError(f"rope divisors: {self.dim // 2} positive numbers are needed, got {len(self.divisors)}")


def inverse_frequencies(cfg: RopeConfig, length: int | None = None) -> NDArray[np.float64]:
    """Radians per position, [dim/2] float64, highest first.

    length: the longest sequence that will be served; only ``dynamic`` depends on it (its base grows once it is
    above ``original_max_position``; None means the training's own length).
    """
    pair = np.arange(0, cfg.dim, 2, dtype=np.float64) / cfg.dim
    theta = cfg.theta
    if cfg.type == "dynamic":
        longest = max(length or 0, cfg.original_max_position)
        stretch = cfg.factor * longest / cfg.original_max_position - (cfg.factor - 1)
        theta *= stretch ** (cfg.dim / (cfg.dim - 2))
    frequencies = theta**-pair
    if cfg.divisors is not None:
        frequencies /= np.asarray(cfg.divisors, np.float64)
    if cfg.type == "linear":
        frequencies /= cfg.factor
    elif cfg.type == "llama3":
        frequencies = _llama3(frequencies, cfg)
    elif cfg.type == "yarn":
        keep = 1 - _yarn_ramp(cfg)
        frequencies = frequencies / cfg.factor * (1 - keep) + frequencies * keep
    return frequencies


def _llama3(frequencies: NDArray[np.float64], cfg: RopeConfig) -> NDArray[np.float64]:
    """Short waves stay, long waves are stretched by ``factor``, a linear blend lies between."""
    waves = cfg.original_max_position * frequencies / (2 * math.pi)  # full turns within the training's context
    blend = (waves - cfg.low_freq_factor) / (cfg.high_freq_factor - cfg.low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)
    return (1 - blend) * frequencies / cfg.factor + blend * frequencies


def _yarn_ramp(cfg: RopeConfig) -> NDArray[np.float64]:
    """0 where a pair keeps its frequency, 1 where it is stretched, [dim/2]."""

    def pair_of(turns: float) -> float:
        # The pair that makes so many turns within the training's context.
        return cfg.dim * math.log(cfg.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(cfg.theta))

    low, high = pair_of(cfg.beta_fast), pair_of(cfg.beta_slow)
    if cfg.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, cfg.dim - 1)
    if low == high:
        high += 0.001
    ramp = (np.arange(cfg.dim // 2, dtype=np.float64) - low) / (high - low)
    return np.clip(ramp, 0.0, 1.0)


def cos_sin(cfg: RopeConfig, positions_count: int, dtype: Any = np.float32) -> NDArray[Any]:
    """The table [positions_count, dim] for positions 0…: cosines in the first half, sines in the second.

    Computed in float64, rounded once to ``dtype``, ``attention_factor`` multiplied in. ``positions_count`` is the
    longest sequence that will be served (max_model_len). ``dynamic`` takes its base from it, once for all: a base
    that follows each sequence's length would disagree with the keys that are already in the cache. So a sequence
    turns alike whatever its length, and as in training when max_model_len is not above the training's context.
    """
    frequencies = inverse_frequencies(cfg, positions_count)
    half = cfg.dim // 2
    table = np.empty((positions_count, cfg.dim), dtype)
    for start in range(0, positions_count, _TABLE_CHUNK):
        stop = min(start + _TABLE_CHUNK, positions_count)
        angles = np.arange(start, stop, dtype=np.float64)[:, None] * frequencies
        table[start:stop, :half] = np.cos(angles) * cfg.attention_factor
        table[start:stop, half:] = np.sin(angles) * cfg.attention_factor
    return table


def yarn_attention_factor(factor: float, mscale: float = 0.0, mscale_all_dim: float = 0.0) -> float:
    """Yarn's temperature, as a factor on cosines and sines (equation 22 of the paper; mscale: DeepSeek's form)."""

    def grow(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if mscale and mscale_all_dim:
        return grow(mscale) / grow(mscale_all_dim)
    return grow(1.0)


def rope_from_hf(
    options: Mapping[str, Any] | None, *, theta: float, dim: int, max_position: int, original: int | None = None
) -> RopeConfig:
    """The ``rope_scaling`` or ``rope_parameters`` object of a config.json as a RopeConfig.

    options: the object, None for no scaling. theta: the base unless the object has its own ``rope_theta``.
    max_position: ``max_position_embeddings``. original: ``original_max_position_embeddings`` where it stands at the
    top of the file (it wins over the one in the object).
    Raises UnsupportedModel for a kind or an option that is not implemented, LoadError for a value that is no number.
    """
    options = dict(options or {})
    kind = _type_of(options)
    unknown = [k for k, v in options.items() if k not in _KNOWN_KEYS and k not in _NEUTRAL and v is not None]
    if unknown:
        raise UnsupportedModel(
            f"rope options {', '.join(sorted(unknown))} are not supported (rope type {kind}); they change the positions"
        )
    for key, neutral in _NEUTRAL.items():
        if options.get(key) is not None and _number(options, key, neutral) != neutral:
            raise UnsupportedModel(f"rope option {key}={options[key]} is not supported; only {neutral} is")
    theta = _number(options, "rope_theta", theta)
    trained = original or int(_number(options, "original_max_position_embeddings", max_position))
    if kind == "none":
        return RopeConfig("none", theta, dim)
    if kind == "linear":
        return RopeConfig("linear", theta, dim, factor=_number(options, "factor"))
    if kind == "dynamic":
        # Here transformers reads max_position_embeddings whatever else the object says.
        return RopeConfig("dynamic", theta, dim, factor=_number(options, "factor"), original_max_position=max_position)
    if kind == "llama3":
        return RopeConfig(
            "llama3",
            theta,
            dim,
            factor=_number(options, "factor"),
            original_max_position=trained,
            low_freq_factor=_number(options, "low_freq_factor"),
            high_freq_factor=_number(options, "high_freq_factor"),
        )
    return _yarn_from_hf(options, theta, dim, max_position, trained)


def _yarn_from_hf(options: Mapping[str, Any], theta: float, dim: int, max_position: int, trained: int) -> RopeConfig:
    if trained <= 0:
        raise LoadError(f"rope type yarn: original_max_position_embeddings is {trained}; a positive number is needed")
    factor = _number(options, "factor", max_position / trained)
    inferred = yarn_attention_factor(factor, _number(options, "mscale", 0.0), _number(options, "mscale_all_dim", 0.0))
    truncate = options.get("truncate")
    return RopeConfig(
        "yarn",
        theta,
        dim,
        factor=factor,
        original_max_position=trained,
        beta_fast=_number(options, "beta_fast", 32.0) or 32.0,
        beta_slow=_number(options, "beta_slow", 1.0) or 1.0,
        truncate=True if truncate is None else bool(truncate),
        attention_factor=_number(options, "attention_factor", inferred),
    )


def _type_of(options: Mapping[str, Any]) -> str:
    """``type`` and ``rope_type`` are the same key, old and new."""
    named = {str(options[k]).lower() for k in ("rope_type", "type") if options.get(k) is not None}
    kinds = {_ALIASES.get(name, name) for name in named}
    if len(kinds) > 1:
        raise UnsupportedModel(
            f"rope options name two kinds: type={options['type']!r}, rope_type={options['rope_type']!r}; "
            "they must be the same"
        )
    if not kinds:
        if options.get("factor") is not None:
            raise LoadError('rope options have a factor but no type; add "rope_type" to config.json')
        return "none"
    kind = kinds.pop()
    if kind not in ROPE_TYPES:
        raise UnsupportedModel(f"rope type {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
    return kind


def _number(options: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = options.get(key)
    if value is None:
        if default is None:
            raise LoadError(f"rope options lack {key!r}, which their type needs")
        return default
    found = finite(value)
    if found is None:
        raise LoadError(f"rope option {key} must be a number, not {str(value)[:100]!r}")
    return found
