"""A decoder as a textbook writes it: NumPy float64, all positions at once, no cache, no code of ours.

From a config.json of the old form (``rope_theta``, ``rope_scaling``) and tensors by Hugging Face's names. It is checked
against logits of transformers, and then stands in for transformers where a test makes a model of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Tensors = Mapping[str, NDArray[Any]]


def head_dim(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def shapes(config: Mapping[str, Any], head: bool) -> dict[str, tuple[int, ...]]:
    """Every tensor that a model of this configuration has. head: with an output head of its own."""
    kind, hidden, inner = config["model_type"], config["hidden_size"], config["intermediate_size"]
    size = head_dim(config)
    q, kv = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    biased = config.get("attention_bias", False)
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        for part, rows, columns, bias in (
            ("self_attn.q_proj", q, hidden, biased or kind == "qwen2"),
            ("self_attn.k_proj", kv, hidden, biased or kind == "qwen2"),
            ("self_attn.v_proj", kv, hidden, biased or kind == "qwen2"),
            ("self_attn.o_proj", hidden, q, biased and kind != "qwen2"),
            ("mlp.gate_proj", inner, hidden, config.get("mlp_bias", False)),
            ("mlp.up_proj", inner, hidden, config.get("mlp_bias", False)),
            ("mlp.down_proj", hidden, inner, config.get("mlp_bias", False)),
        ):
            out[f"{at}{part}.weight"] = (rows, columns)
            if bias:
                out[f"{at}{part}.bias"] = (rows,)
        norms = ["input_layernorm", "post_attention_layernorm"]
        if kind == "gemma3_text":
            norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        out |= {f"{at}{norm}.weight": (hidden,) for norm in norms}
        if kind in ("gemma3_text", "qwen3"):
            out |= {f"{at}self_attn.{x}_norm.weight": (size,) for x in "qk"}
    out["model.norm.weight"] = (hidden,)
    if head:
        out["lm_head.weight"] = (config["vocab_size"], hidden)
    return out


def random_tensors(config: Mapping[str, Any], seed: int, head: bool) -> dict[str, NDArray[np.float32]]:
    """Weights of a size at which attention looks at several positions and every part changes the logits."""
    rng = np.random.default_rng(seed)
    out = {}
    for name, shape in shapes(config, head).items():
        values = rng.uniform(-1, 1, shape)
        if "norm" in name:
            values = values / 2 + (0 if config["model_type"] == "gemma3_text" else 1)
        elif "proj.weight" in name:
            values *= 2 / np.sqrt(shape[1])
        out[name] = values.astype(np.float32)
    return out


def textbook_logits(config: Mapping[str, Any], tensors: Tensors, ids: Sequence[int], rope_length: int = 0) -> Array:
    """Logits [len(ids), vocab]. tensors: real values. rope_length: what ``dynamic`` rope stretches its base to."""
    return _Textbook(config, tensors, rope_length).logits(ids)


class _Textbook:
    def __init__(self, config: Mapping[str, Any], tensors: Tensors, rope_length: int) -> None:
        self.config, self.tensors, self.rope_length = config, tensors, rope_length
        self.gemma = config["model_type"] == "gemma3_text"
        self.size = head_dim(config)

    def weight(self, name: str) -> Array:
        return self.tensors[name].astype(np.float64)

    def linear(self, x: Array, name: str) -> Array:
        y: Array = x @ self.weight(f"{name}.weight").T
        return y + self.weight(f"{name}.bias") if f"{name}.bias" in self.tensors else y

    def norm(self, x: Array, name: str) -> Array:
        w = self.tensors[f"{name}.weight"]
        if self.gemma:  # where transformers computes in float32 it rounds here too
            w = np.float32(1) + w.astype(np.float32)
        y: Array = x / np.sqrt((x * x).mean(-1, keepdims=True) + self.config["rms_norm_eps"]) * w
        return y

    def logits(self, ids: Sequence[int]) -> Array:
        table = self.weight("model.embed_tokens.weight")
        x = table[list(ids)]
        if self.gemma:
            x = x * np.float64(np.sqrt(np.float32(self.config["hidden_size"])))
        for i in range(self.config["num_hidden_layers"]):
            at = f"model.layers.{i}."
            y = self.attention(i, self.norm(x, f"{at}input_layernorm"))
            if self.gemma:
                x = x + self.norm(y, f"{at}post_attention_layernorm")
                y = self.mlp(at, self.norm(x, f"{at}pre_feedforward_layernorm"))
                x = x + self.norm(y, f"{at}post_feedforward_layernorm")
            else:
                x = x + y
                x = x + self.mlp(at, self.norm(x, f"{at}post_attention_layernorm"))
        x = self.norm(x, "model.norm")
        y = x @ (self.weight("lm_head.weight") if "lm_head.weight" in self.tensors else table).T
        return y

    def mlp(self, at: str, x: Array) -> Array:
        gate, up = self.linear(x, f"{at}mlp.gate_proj"), self.linear(x, f"{at}mlp.up_proj")
        if self.gemma:
            act = gate / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
        else:
            act = gate / (1 + np.exp(-gate))
        return self.linear(act * up, f"{at}mlp.down_proj")

    def attention(self, layer: int, x: Array) -> Array:
        at = f"model.layers.{layer}.self_attn."
        count, size = len(x), self.size
        q, k, v = (self.linear(x, f"{at}{p}_proj").reshape(count, -1, size) for p in "qkv")
        if f"{at}q_norm.weight" in self.tensors:
            q, k = self.norm(q, f"{at}q_norm"), self.norm(k, f"{at}k_norm")
        window = self.window(layer)
        angles = np.arange(count)[:, None, None] * self.frequencies(window)
        q, k = _turn(q, angles), _turn(k, angles)
        scale = float(self.config["query_pre_attn_scalar"] if self.gemma else size) ** -0.5
        row, column = np.arange(count)[:, None], np.arange(count)
        seen = (column <= row) & (column > row - (window or count))
        out = np.empty_like(q)
        for h in range(q.shape[1]):
            shared = h // (q.shape[1] // k.shape[1])
            score = np.where(seen, q[:, h] @ k[:, shared].T * scale, -np.inf)
            p = np.exp(score - score.max(-1, keepdims=True))
            out[:, h] = p / p.sum(-1, keepdims=True) @ v[:, shared]
        return self.linear(out.reshape(count, -1), f"{at}o_proj")

    def window(self, layer: int) -> int | None:
        config, window = self.config, self.config.get("sliding_window")
        if config["model_type"] == "mistral":
            return window
        if config["model_type"] == "gemma3_text":
            return window if (layer + 1) % config["sliding_window_pattern"] else None
        if config.get("use_sliding_window") and layer >= config["max_window_layers"]:
            return window
        return None

    def frequencies(self, window: int | None) -> Array:
        config = self.config
        local = self.gemma and window is not None
        theta = config["rope_local_base_freq"] if local else config["rope_theta"]
        scaling = None if local else config.get("rope_scaling")
        factor = 1.0
        if scaling is not None:
            kind = scaling.get("type") or scaling["rope_type"]
            if kind == "dynamic":
                trained = config["max_position_embeddings"]
                stretch = scaling["factor"] * max(self.rope_length, trained) / trained - (scaling["factor"] - 1)
                theta = theta * stretch ** (self.size / (self.size - 2))
            elif kind == "linear":
                factor = scaling["factor"]
            else:
                raise ValueError(f"this textbook has no rope type {kind!r}")
        out: Array = theta ** (-np.arange(0, self.size, 2) / self.size) / factor
        return out


def _turn(x: Array, angles: Array) -> Array:
    """[T, heads, size] by [T, 1, size/2]: element i and element i + size/2 are a pair."""
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], -1)
