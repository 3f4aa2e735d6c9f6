"""What a decoder model is, in numbers: one frozen dataclass for every supported architecture and file format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from device.errors import LoadError
from runtime.rope import RopeConfig

Activation = Literal["silu", "gelu_tanh", "gelu"]

# Name in error messages -> what it covers.
ARCHITECTURES = {
    "llama": "Llama 2 and 3.x, SmolLM2",
    "mistral": "Mistral 7B and Nemo",
    "qwen2": "Qwen2, Qwen2.5",
    "qwen3": "Qwen3 (dense)",
    "gemma3": "Gemma 3 (text)",
}


def supported() -> str:
    """The supported architectures in one line, for messages."""
    return "; ".join(f"{name} ({covers})" for name, covers in ARCHITECTURES.items())


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer with RMS norms, grouped-query attention, rotary positions and a gated MLP.

    architecture: a key of ARCHITECTURES.
    vocab_size: rows of the embedding table, padding rows included.
    hidden_size H, intermediate_size I, num_layers, num_heads Hq, num_kv_heads Hkv, head_dim D (need not be H / Hq).
    rms_eps: of every norm. max_position: the longest context the checkpoint claims, in tokens.
    tied: the output head is the embedding table.
    qkv_bias, o_bias, mlp_bias: which linear layers have biases (mlp: gate, up and down).
    qk_norm: RMS norm over D of each head of q and k, before the rotation.
    activation: of the gate. post_norms: norms also after attention and MLP, before they join the residual (Gemma).
    embed_scale: factor on embeddings, sqrt(H) for Gemma in float32, else 1. transformers rounds it to the dtype of
        the weights before it multiplies (bfloat16: 33.94 becomes 34), so a device that computes in bfloat16 should
        round it too; a GGUF runtime multiplies by the float32.
    attention_scale: factor on q·k.
    windows: per layer the sliding window in tokens, or None; a row at p sees p-window+1 … p.
    ropes, rope_of_layer: the distinct rotary embeddings, and which of them each layer uses.
    eos_ids: every id that the model's files call an end (without those of the tokenizer's files). bos_id: or None.
    dtype: element type the checkpoint was saved in, or None where it does not say.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    max_position: int
    tied: bool
    windows: tuple[int | None, ...]
    ropes: tuple[RopeConfig, ...]
    rope_of_layer: tuple[int, ...]
    attention_scale: float
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    activation: Activation = "silu"
    post_norms: bool = False
    embed_scale: float = 1.0
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    dtype: str | None = None

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position",
        ):
            if getattr(self, name) <= 0:
                raise LoadError(f"model configuration: {name} is {getattr(self, name)}; it must be positive")
        if self.num_heads % self.num_kv_heads:
            raise LoadError(
                f"model configuration: {self.num_heads} query heads cannot share {self.num_kv_heads} key/value heads; "
                "the first must be a multiple of the second"
            )
        if len(self.windows) != self.num_layers or len(self.rope_of_layer) != self.num_layers:
            raise LoadError(
                f"model configuration: {self.num_layers} layers, but {len(self.windows)} windows and "
                f"{len(self.rope_of_layer)} rotary embeddings"
            )
        if any(w is not None and w <= 0 for w in self.windows):
            raise LoadError("model configuration: a sliding window must be positive")
        if any(not 0 <= r < len(self.ropes) for r in self.rope_of_layer):
            raise LoadError("model configuration: a layer names a rotary embedding that does not exist")
        if any(r.dim > self.head_dim for r in self.ropes):
            raise LoadError(f"model configuration: a rotary embedding is wider than a head ({self.head_dim})")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
        """From the objects of config.json and, for more end ids, generation_config.json.

        Raises UnsupportedModel for an architecture or option that is not implemented, LoadError for a bad value.
        """
        from runtime.loaders.hf_config import model_config

        return model_config(config, generation)

    @classmethod
    def from_gguf(
        cls,
        metadata: Mapping[str, Any],
        shapes: Mapping[str, tuple[int, ...]],
        rope_divisors: tuple[float, ...] | None = None,
    ) -> ModelConfig:
        """From the metadata of a GGUF file and the shapes of its tensors by GGUF name (rows first).

        The shapes tell what the metadata leaves out: the vocabulary, a separate head, biases. rope_divisors: the
        values of ``rope_freqs.weight`` where the file has it. Errors as ``from_hf``.
        """
        from runtime.loaders.gguf_config import model_config

        return model_config(metadata, shapes, rope_divisors)


def unique_ropes(per_layer: list[RopeConfig]) -> tuple[tuple[RopeConfig, ...], tuple[int, ...]]:
    """(distinct embeddings in order of first use, index of each layer's)."""
    distinct = list(dict.fromkeys(per_layer))
    return tuple(distinct), tuple(distinct.index(r) for r in per_layer)
