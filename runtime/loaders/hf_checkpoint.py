"""A folder in Hugging Face layout as a Checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from device.dtypes import FLOATS, decode
from device.errors import LoadError, UnsupportedModel
from device.weights import CanonicalWeight, float_weight
from runtime.loaders.checkpoint import Checkpoint, Notice
from runtime.loaders.safetensors import SafetensorsFolder, read_json
from runtime.model_config import ModelConfig

# Where a model with eyes keeps its language model: transformers 5 writes the first form, files of before the others.
_TEXT_PREFIXES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("lm_head.", "lm_head."),
)


class HFCheckpoint(Checkpoint):
    """See Checkpoint. Matrices are views of the mapped files."""

    format: Literal["gguf", "safetensors"] = "safetensors"

    def __init__(self, path: Path, notice: Notice) -> None:
        config_file = path / "config.json"
        if not config_file.is_file():
            raise LoadError(_no_config(path))
        raw = read_json(config_file)
        generation_file = path / "generation_config.json"
        generation = read_json(generation_file) if generation_file.is_file() else None
        config = ModelConfig.from_hf(raw, generation)
        super().__init__(path, path.resolve().name, config, notice)
        self._files = SafetensorsFolder(path, notice)
        self._stored: dict[str, str] = {}
        self._map_names(nested=raw.get("text_config") is not None)

    def _map_names(self, nested: bool) -> None:
        aside = 0
        for stored in self._files.tensors:
            name = _text_name(stored) if nested else stored
            if name is None:
                aside += 1
                continue
            if name in self._stored:
                raise LoadError(
                    f"{self.path}: {self._stored[name]!r} and {stored!r} are both the text model's {name!r}"
                )
            self._stored[name] = stored
        if aside:
            self._notice(f"{self.path}: only the text model is loaded; {aside} tensors of other parts are left aside")

    @property
    def _names(self) -> Mapping[str, object]:
        return self._stored

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._stored:
            raise self._lack(name)
        return self._files.info(self._stored[name]).shape

    def stored(self, name: str) -> str:
        if name not in self._stored:
            raise self._lack(name)
        return self._files.info(self._stored[name]).kind

    def _array(self, name: str) -> tuple[NDArray[Any], str]:
        array, dtype = self._files.array(self._stored[name])
        if dtype not in FLOATS:
            raise UnsupportedModel(
                f"{self.path}: tensor {name!r} has element type {dtype}; quantised folders are not supported yet"
            )
        return array, dtype

    def _matrix(self, name: str) -> CanonicalWeight:
        return float_weight(*self._array(name))

    def _vector(self, name: str) -> NDArray[np.float32]:
        array, dtype = self._array(name)
        values = np.array(decode(array, dtype, np.float32))
        if self.config.architecture == "gemma3" and name.endswith("norm.weight"):
            # Gemma's classes store w and multiply by 1 + w (Gemma3RMSNorm).
            values += np.float32(1.0)
        return values


def _text_name(stored: str) -> str | None:
    for prefix, replacement in _TEXT_PREFIXES:
        if stored.startswith(prefix):
            return replacement + stored[len(prefix) :]
    return None


def _no_config(path: Path) -> str:
    ggufs = sorted(p.name for p in path.glob("*.gguf"))
    if ggufs:
        return f"{path}: has no config.json but GGUF files; give one of them: {', '.join(ggufs)}"
    return f"{path}: has no config.json; is this a model's folder in Hugging Face layout, and complete?"
