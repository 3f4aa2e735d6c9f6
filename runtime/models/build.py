"""From a checkpoint to a model on a device: every weight is read, packed and forgotten, one at a time."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from device.contract import Device, PackedWeight, Tensor
from device.errors import LoadError
from device.weights import CanonicalWeight
from runtime.linear import Linear
from runtime.loaders.checkpoint import EMBEDDING, Checkpoint
from runtime.loaders.quantize import Quantizer
from runtime.models.decoder import Decoder, Layer, parts
from runtime.rope import cos_sin

FINAL_NORM = "model.norm.weight"
_OF_LAYER = re.compile(r"(model\.layers|blk)\.\d+\.")
Progress = Callable[[int, int], None]


def build_model(
    checkpoint: Checkpoint,
    device: Device,
    max_model_len: int,
    progress: Progress | None = None,
    quantizer: Quantizer | None = None,
) -> Decoder:
    """Pack every weight for the device.

    max_model_len: positions that the rotary tables cover. progress(done, total) hears of each layer.
    quantizer: rounds every weight on its way to the device; for float checkpoints.
    Raises LoadError when a weight is missing, has the wrong shape, or is there and would be ignored; ConfigError when
    it is to be quantised and is already.
    """
    return Builder(checkpoint, device, quantizer).build(max_model_len, progress)


class Builder:
    """``build_model`` in two parts. Made: names and sizes are checked, so that memory can be planned by the
    configuration's counts. ``build``: the weights are packed. Errors as ``build_model``."""

    def __init__(self, checkpoint: Checkpoint, device: Device, quantizer: Quantizer | None = None) -> None:
        self.checkpoint = checkpoint
        self.config = checkpoint.config
        self.device = device
        self.quantizer = quantizer
        self.head_name = checkpoint.head()
        self.ropes: list[Tensor] = []
        self._check_names(self.head_name)
        self._check_sizes()
        if quantizer is not None:
            quantizer.check(checkpoint.path, {name: checkpoint.stored(name) for name in self._matrices()})

    def build(self, max_model_len: int, progress: Progress | None = None) -> Decoder:
        """See ``build_model``."""
        config, head_name = self.config, self.head_name
        progress = progress or (lambda done, total: None)
        self.ropes = [self._rope(i, max_model_len) for i in range(len(config.ropes))]
        total = config.num_layers + 1
        table_shape = (config.vocab_size, config.hidden_size)
        if head_name == EMBEDDING:
            embedding = self._pack([(EMBEDDING, table_shape)], {"embed", "linear"})
            head = Linear(embedding)
        else:
            embedding = self._pack([(EMBEDDING, table_shape)], {"embed"})
            head = Linear(self._pack([(head_name, table_shape)], {"linear"}))
        progress(1, total)
        layers = []
        for i in range(config.num_layers):
            layers.append(self._layer(i))
            progress(i + 2, total)
        return Decoder(config, embedding, layers, self._norm(FINAL_NORM, config.hidden_size), head)

    def _check_names(self, head_name: str) -> None:
        """Name all missing tensors at once, and all that would be ignored, before anything is read."""
        names = [EMBEDDING, FINAL_NORM, head_name]
        for i in range(self.config.num_layers):
            for field, part in parts(self.config, i).items():
                names += [part] if isinstance(part, str) else [f"{p}.weight" for p in part]
                if isinstance(part, list) and self._has_bias(field):
                    names += [f"{p}.bias" for p in part]
        missing = self.checkpoint.missing(names)
        if missing:
            raise LoadError(
                f"{self.checkpoint.path}: {len(missing)} of {len(names)} tensors of this model are missing: "
                f"{_some(missing)}; incomplete download?"
            )
        # A weight of a layer that nobody reads: the model that was trained is another one.
        own = set(names)
        ignored = [n for n in self.checkpoint.unused() if n not in own and (n.endswith(".bias") or _OF_LAYER.match(n))]
        if ignored:
            raise LoadError(
                f"{self.checkpoint.path}: {_some(ignored)} would be ignored: a {self.config.architecture} of "
                f"{self.config.num_layers} layer(s) with this configuration has no such weight; do configuration and "
                "weights belong to the same model?"
            )

    def _check_sizes(self) -> None:
        """The counts that rotary tables, cache and logits are sized by; the other shapes are checked as they are read.

        The layers are alike, so the first stands for all.
        """
        c = self.config
        self.checkpoint.check(EMBEDDING, (c.vocab_size, c.hidden_size))
        heads = (c.num_heads, c.num_kv_heads, c.num_kv_heads)
        for name, count in zip(parts(c, 0)["qkv"], heads, strict=True):
            self.checkpoint.check(f"{name}.weight", (count * c.head_dim, c.hidden_size))

    def _matrices(self) -> list[str]:
        """Names of all matrices, the table and the head among them."""
        names = list(dict.fromkeys((EMBEDDING, self.head_name)))
        for i in range(self.config.num_layers):
            for part in parts(self.config, i).values():
                names += [] if isinstance(part, str) else [f"{p}.weight" for p in part]
        return names

    def _has_bias(self, field: str) -> bool:
        config = self.config
        return {"qkv": config.qkv_bias, "o": config.o_bias}.get(field, config.mlp_bias)

    def _rope(self, index: int, max_model_len: int) -> Tensor:
        wide = self.device.dtype == "float64"
        table = cos_sin(self.config.ropes[index], max_model_len, np.float64 if wide else np.float32)
        return self.device.tensor(table, "float64" if wide else "float32")

    def _norm(self, name: str, size: int) -> Tensor:
        return self._float(self.checkpoint.vector(name, size))

    def _float(self, array: Any) -> Tensor:
        """Norm weights and biases: float32, in a float64 device float64."""
        return self.device.tensor(array, "float64" if self.device.dtype == "float64" else "float32")

    def _pack(self, named: list[tuple[str, tuple[int, int]]], uses: set[str]) -> PackedWeight:
        weights = [self._weight(name, shape) for name, shape in named]
        packed: PackedWeight = self.device.ops.pack_weight(weights, frozenset(uses))
        return packed

    def _weight(self, name: str, shape: tuple[int, int]) -> CanonicalWeight:
        weight = self.checkpoint.weight(name, shape)
        return weight if self.quantizer is None else self.quantizer(name, weight)

    def _linear(self, field: str, names: list[str], rows: list[int], columns: int) -> Linear:
        weight = self._pack([(f"{name}.weight", (n, columns)) for name, n in zip(names, rows, strict=True)], {"linear"})
        bias = None
        if self._has_bias(field):
            pieces = [self.checkpoint.vector(f"{name}.bias", n) for name, n in zip(names, rows, strict=True)]
            bias = self._float(np.concatenate(pieces))
        return Linear(weight, bias, reduce=field in ("o", "down"))

    def _layer(self, i: int) -> Layer:
        c = self.config
        names = parts(c, i)
        hidden, wide = c.hidden_size, c.intermediate_size
        q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim

        def norm(field: str, size: int) -> Tensor | None:
            return self._norm(names[field], size) if field in names else None

        return Layer(
            input_norm=self._norm(names["input_norm"], hidden),
            qkv=self._linear("qkv", names["qkv"], [q, kv, kv], hidden),
            q_norm=norm("q_norm", c.head_dim),
            k_norm=norm("k_norm", c.head_dim),
            o=self._linear("o", names["o"], [hidden], q),
            post_attention_norm=norm("post_attention_norm", hidden),
            mlp_norm=self._norm(names["mlp_norm"], hidden),
            gate_up=self._linear("gate_up", names["gate_up"], [wide, wide], hidden),
            down=self._linear("down", names["down"], [hidden], wide),
            post_mlp_norm=norm("post_mlp_norm", hidden),
            heads=(c.num_heads, c.num_kv_heads, c.head_dim),
            cos_sin=self.ropes[c.rope_of_layer[i]],
            window=c.windows[i],
        )


def _some(names: list[str], limit: int = 6) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
