"""The one decoder definition: RMS norms, grouped-query attention with rotary positions, a gated MLP.

Llama, Mistral, Qwen2, Qwen3, SmolLM2 and Gemma 3 are configurations of it. A model calls ops and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from device.contract import HostBuffer, Inputs, InputSpec, KVCache, KVLayer, KVLayerSpec, KVSpec, PackedWeight, Tensor
from runtime.linear import Linear
from runtime.model_config import ModelConfig
from runtime.scheduler import Limits, Plan


@dataclass(slots=True)
class Layer:
    """The weights of one layer. Optional parts are None in models without them."""

    input_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Linear
    post_attention_norm: Tensor | None
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    post_mlp_norm: Tensor | None
    heads: tuple[int, int, int]
    """Query heads, key/value heads, head size: of this layer, since pruned models differ by layer."""
    cos_sin: Tensor
    window: int | None


class Decoder:
    """A decoder model on a device. Built by ``runtime.models.build``."""

    def __init__(
        self,
        config: ModelConfig,
        embedding: PackedWeight,
        layers: list[Layer],
        final_norm: Tensor,
        head: Linear,
    ) -> None:
        self.config = config
        self.vocab_size = head.weight.shape[0]
        self._embedding = embedding
        self._layers = layers
        self._final_norm = final_norm
        self._head = head
        self._kv: list[KVLayer] = []
        self.nbytes = _distinct_bytes([embedding, head.weight, *_weights(layers)])
        """Bytes of the packed weights."""

    def kv_spec(self, dtype: str) -> KVSpec:
        return KVSpec(
            tuple(KVLayerSpec(kv, dim, q, layer.window) for layer in self._layers for q, kv, dim in [layer.heads]),
            dtype,
        )

    def bind_kv(self, kv: KVCache) -> None:
        self._kv = [kv.layer(i) for i in range(len(self._layers))]

    def extra_inputs(self, limits: Limits) -> Iterable[InputSpec]:
        return ()

    def fill(self, plan: Plan, buffer: HostBuffer) -> None:
        return

    def hidden(self, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
        x: Tensor = inputs.ops.embed(inputs["ids"], self._embedding, self.config.embed_scale)
        residual: Tensor | None = None
        for layer, kv in zip(self._layers, self._kv, strict=True):
            x, residual = self._layer(layer, kv, inputs, x, residual)
        return x, residual

    def _layer(
        self, layer: Layer, kv: KVLayer, inputs: Inputs, x: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        ops, meta, config = inputs.ops, inputs.meta, self.config
        eps = config.rms_eps
        qkv, residual = layer.qkv.after_norm(ops, x, residual, layer.input_norm, eps)
        q = ops.qkv_rope_store(
            qkv,
            layer.heads,
            layer.q_norm,
            layer.k_norm,
            eps,
            inputs["positions"],
            layer.cos_sin,
            kv,
            meta.slots,
        )
        x = layer.o(ops, ops.paged_attention(q, kv, meta, config.attention_scale, layer.window))
        if layer.post_attention_norm is not None:
            x = ops.rms_norm(x, layer.post_attention_norm, eps)
        gate_up, residual = layer.gate_up.after_norm(ops, x, residual, layer.mlp_norm, eps)
        x = layer.down.after_gate(ops, gate_up, config.activation)
        if layer.post_mlp_norm is not None:
            x = ops.rms_norm(x, layer.post_mlp_norm, eps)
        return x, residual

    def logits(self, inputs: Inputs, x: Tensor, residual: Tensor | None, rows: Tensor) -> Tensor:
        ops = inputs.ops
        x = ops.gather_rows(x, rows)
        if residual is None:
            x = ops.rms_norm(x, self._final_norm, self.config.rms_eps)
        else:
            x, _ = ops.add_rms_norm(x, ops.gather_rows(residual, rows), self._final_norm, self.config.rms_eps)
        logits: Tensor = ops.all_gather(self._head(ops, x, "float32"))
        return logits


def _weights(layers: list[Layer]) -> Iterable[PackedWeight]:
    for layer in layers:
        for linear in (layer.qkv, layer.o, layer.gate_up, layer.down):
            yield linear.weight


def _distinct_bytes(weights: list[PackedWeight]) -> int:
    return sum(w.nbytes for w in {id(w): w for w in weights}.values())


def parts(config: ModelConfig, layer: int) -> dict[str, Any]:
    """The tensor names of one layer, by the field of ``Layer`` that they belong to; lists share one input."""
    at = f"model.layers.{layer}."
    attention, mlp = at + "self_attn.", at + "mlp."
    names: dict[str, Any] = {
        "input_norm": at + "input_layernorm.weight",
        "qkv": [attention + f"{x}_proj" for x in "qkv"],
        "o": [attention + "o_proj"],
        "gate_up": [mlp + "gate_proj", mlp + "up_proj"],
        "down": [mlp + "down_proj"],
        "mlp_norm": at + "post_attention_layernorm.weight",
    }
    if config.qk_norm:
        names |= {"q_norm": attention + "q_norm.weight", "k_norm": attention + "k_norm.weight"}
    if config.post_norms:
        names |= {
            "post_attention_norm": at + "post_attention_layernorm.weight",
            "mlp_norm": at + "pre_feedforward_layernorm.weight",
            "post_mlp_norm": at + "post_feedforward_layernorm.weight",
        }
    return names
