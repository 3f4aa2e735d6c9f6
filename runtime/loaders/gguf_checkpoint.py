"""A GGUF file as a Checkpoint."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from device.errors import UnsupportedModel
from device.weights import CanonicalWeight
from runtime.loaders import gguf_weights
from runtime.loaders.checkpoint import EMBEDDING, HEAD, Checkpoint, Notice
from runtime.loaders.gguf import GGUFFile, TensorInfo
from runtime.loaders.gguf_config import PERMUTED, rope_divisors
from runtime.model_config import ModelConfig

_ROPE_DIVISORS = "rope_freqs.weight"
_GLOBAL = {
    "token_embd.weight": EMBEDDING,
    "output_norm.weight": "model.norm.weight",
    "output.weight": HEAD,
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Gemma has four norms a layer; the one before the MLP keeps GGUF's name for it.
_GEMMA_LAYER = _LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_BLOCK = re.compile(r"^blk\.(\d+)\.([a-z_]+)\.(weight|bias)$")


def hf_name(name: str, architecture: str) -> str:
    """Hugging Face's name of a GGUF tensor; unchanged where there is none."""
    if name in _GLOBAL:
        return _GLOBAL[name]
    match = _BLOCK.match(name)
    part = (_GEMMA_LAYER if architecture == "gemma3" else _LAYER).get(match[2]) if match else None
    return f"model.layers.{match[1]}.{part}.{match[3]}" if match and part else name


def unpermuted_rows(heads: int, head_dim: int) -> NDArray[np.intp]:
    """Which row of a llama file's q or k is row r of the original, [heads * head_dim].

    The converter (``LlamaModel.permute`` in llama.cpp's convert_hf_to_gguf.py) puts row i of a head's second half
    right after row i of its first half; here they are taken apart again.
    """
    file_order = np.arange(heads * head_dim).reshape(heads, head_dim // 2, 2)
    return file_order.swapaxes(1, 2).reshape(-1)


class GGUFCheckpoint(Checkpoint):
    """See Checkpoint. Quantised formats stay as they are (``gguf_weights.KEPT_TYPES``); a notice names the others."""

    format: Literal["gguf", "safetensors"] = "gguf"

    def __init__(self, path: Path, name: str, notice: Notice) -> None:
        file = GGUFFile(path)
        parts = file.metadata.get("split.count", 1)
        if parts > 1:
            raise UnsupportedModel(
                f"{path}: is one of {parts} parts of a model; join them first: llama-gguf-split --merge FIRST_PART OUT"
            )
        divisors = None
        if _ROPE_DIVISORS in file.tensors:
            divisors = rope_divisors(gguf_weights.vector(file, file.tensors[_ROPE_DIVISORS]))
        shapes = {n: t.shape for n, t in file.tensors.items()}
        config = ModelConfig.from_gguf(file.metadata, shapes, divisors)
        super().__init__(path, name, config, notice)
        self.gguf: GGUFFile = file
        self._tensors: dict[str, TensorInfo] = {hf_name(n, config.architecture): t for n, t in file.tensors.items()}
        self._asked.add(_ROPE_DIVISORS)
        self._tell_formats()

    @property
    def _names(self) -> Mapping[str, object]:
        return self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._tensors:
            raise self._lack(name)
        return self._tensors[name].shape

    def stored(self, name: str) -> str:
        if name not in self._tensors:
            raise self._lack(name)
        kind = self._tensors[name].type.name
        return gguf_weights.FLOAT_TYPES.get(kind, kind)

    def _matrix(self, name: str) -> CanonicalWeight:
        return gguf_weights.matrix(self.gguf, self._tensors[name], self._rows(name))

    def _vector(self, name: str) -> NDArray[np.float32]:
        values = gguf_weights.vector(self.gguf, self._tensors[name])
        rows = self._rows(name)
        return values if rows is None else values[rows]

    def _rows(self, name: str) -> NDArray[np.intp] | None:
        """The order of output rows that undoes the converter's, for weights and biases of q and k."""
        if self.config.architecture not in PERMUTED:
            return None
        if ".self_attn.q_proj." in name:
            return unpermuted_rows(self.config.num_heads, self.config.head_dim)
        if ".self_attn.k_proj." in name:
            return unpermuted_rows(self.config.num_kv_heads, self.config.head_dim)
        return None

    def _tell_formats(self) -> None:
        others = Counter(
            t.type.name
            for t in self._tensors.values()
            if len(t.shape) == 2 and t.type.name not in gguf_weights.KEPT_TYPES
        )
        for kind, count in others.items():
            self._notice(
                f"{self.path}: {count} tensors are stored as {kind}, which is not kept here; they are dequantised "
                f"to float16 and take more memory. Kept as they are: {', '.join(gguf_weights.KEPT_TYPES)}"
            )
