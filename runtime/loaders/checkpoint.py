"""The one interface through which a model is built, whatever file it comes from.

Tensors have the names of Hugging Face's Llama, Qwen and Gemma classes (``model.layers.3.self_attn.q_proj.weight``),
q and k are in the half-split order of the rotary embedding, norm weights are what the norm multiplies by.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from device.errors import LoadError
from device.weights import CanonicalWeight
from runtime.loaders import registry
from runtime.model_config import ModelConfig

if TYPE_CHECKING:
    from runtime.loaders.gguf import GGUFFile

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
Notice = Callable[[str], None]


class Checkpoint(ABC):
    """An opened checkpoint. Nothing is cached: every call reads (and converts) anew, so keep what you need.

    format: ``gguf`` or ``safetensors``. path: the file or folder. name: the model id to serve it by.
    gguf: the container, for the tokenizer in its metadata; None for a folder.
    """

    format: Literal["gguf", "safetensors"]
    gguf: GGUFFile | None = None

    def __init__(self, path: Path, name: str, config: ModelConfig, notice: Notice) -> None:
        self.path = path
        self.name = name
        self.config = config
        self._notice = notice
        self._asked: set[str] = set()

    @property
    @abstractmethod
    def _names(self) -> Mapping[str, object]:
        """Every tensor by Hugging Face's name, in the checkpoint's order."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Rows first. LoadError where the tensor is missing."""

    @abstractmethod
    def stored(self, name: str) -> str:
        """How the file holds a tensor: a float dtype's name, or that of a quantised format. LoadError if missing."""

    @abstractmethod
    def _matrix(self, name: str) -> CanonicalWeight: ...

    @abstractmethod
    def _vector(self, name: str) -> NDArray[np.float32]: ...

    def names(self) -> tuple[str, ...]:
        """Every tensor, in the checkpoint's order."""
        return tuple(self._names)

    def has(self, name: str) -> bool:
        return name in self._names

    def missing(self, names: Iterable[str]) -> list[str]:
        """Those of ``names`` that the checkpoint lacks."""
        return [n for n in names if n not in self._names]

    def weight(self, name: str, shape: tuple[int, int] | None = None) -> CanonicalWeight:
        """A matrix [N, K]. LoadError where it is missing, is no matrix or has not the ``shape`` that is asked for."""
        self._ask(name, 2, shape)
        return self._matrix(name)

    def vector(self, name: str, size: int | None = None) -> NDArray[np.float32]:
        """A norm weight or bias [N], a float32 copy; Gemma's norm weights are 1 + w already. Errors as ``weight``."""
        self._ask(name, 1, None if size is None else (size,))
        return self._vector(name)

    def unused(self) -> list[str]:
        """Tensors that neither ``weight``, ``vector`` nor ``head`` has touched, without what is known to be no weight.

        A bias in this list means that the model computes something else than the checkpoint says.
        """
        return [n for n in self.names() if n not in self._asked and not n.endswith(".rotary_emb.inv_freq")]

    def head(self, tied: bool | None = None) -> str:
        """Name of the tensor that is the output head. tied: as config.json says (default: ``config.tied``).

        Tied and no head: the embedding table. Tied and a head that equals it: the same, the copy is ignored. Tied and a
        head that differs: the head, with a warning, as transformers 5 does (the file's own data beats one flag).
        Untied: the head. Untied and no head: LoadError naming the tensor.
        """
        tied = self.config.tied if tied is None else tied
        if not tied:
            if not self.has(HEAD):
                raise LoadError(
                    f"{self.path}: the configuration says tie_word_embeddings=false, but there is no {HEAD!r}; "
                    "incomplete download?"
                )
            return HEAD
        if not self.has(HEAD):
            return EMBEDDING
        if _same(self.weight(HEAD), self.weight(EMBEDDING)):
            return EMBEDDING
        self._notice(
            f"{self.path}: the configuration says that the output head is the embedding table, but {HEAD!r} is another "
            "matrix; it is used as the head. Set tie_word_embeddings to false if that is right, or remove the tensor"
        )
        return HEAD

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """LoadError where the tensor is missing or has another shape. Its values are not touched."""
        self._check(name, len(shape), shape)

    def _ask(self, name: str, dims: int, shape: tuple[int, ...] | None) -> None:
        self._check(name, dims, shape)
        self._asked.add(name)

    def _check(self, name: str, dims: int, shape: tuple[int, ...] | None) -> None:
        found = self.shape(name)
        if len(found) != dims or (shape is not None and found != shape):
            expected = "x".join(map(str, shape)) if shape is not None else f"{dims} dimension(s)"
            raise LoadError(
                f"{self.path}: tensor {name!r} has shape {'x'.join(map(str, found))}, expected {expected}; "
                "do configuration and weights belong to the same model?"
            )

    def _lack(self, name: str) -> LoadError:
        return LoadError(f"{self.path}: tensor {name!r} is missing; incomplete download, or another architecture?")


def open_checkpoint(path: Path | str, notice: Notice) -> Checkpoint:
    """Open a folder in Hugging Face layout, a .gguf file, or a model by its registered name (``smollm2-135m``).

    A registered name wins over a file of that name in the working directory (write ``./smollm2-135m`` for that).
    notice: hears, in one line each, what the user should know (tensors left aside, formats that are dequantised).
    Raises LoadError and UnsupportedModel; nothing large is read yet.
    """
    from runtime.loaders.gguf_checkpoint import GGUFCheckpoint
    from runtime.loaders.hf_checkpoint import HFCheckpoint

    text = str(path)
    if text in registry.MODELS:
        return GGUFCheckpoint(registry.resolve(text), text, notice)
    target = Path(path).expanduser()
    if target.is_dir():
        return HFCheckpoint(target, notice)
    if target.is_file():
        if target.suffix == ".safetensors":
            raise LoadError(f"{target}: give the model's folder, with its config.json, instead of one weight file")
        return GGUFCheckpoint(target, target.stem, notice)
    known = ", ".join(registry.MODELS)
    hint = ""
    if text.count("/") == 1 and not text.startswith((".", "/", "~")):
        hint = f" To fetch it from the Hugging Face Hub: hf download {text} --local-dir {text.split('/')[1]}"
    raise LoadError(
        f"{text}: no such file or folder, and no known model name ({known}). Give a folder in Hugging Face layout or a "
        f".gguf file.{hint}"
    )


def _same(a: CanonicalWeight, b: CanonicalWeight) -> bool:
    """Bit for bit, piece by piece: neither matrix is copied as a whole."""
    if (a.dtype, a.shape, a.group) != (b.dtype, b.shape, b.group):
        return False
    for x, y in ((a.q, b.q), (a.scale, b.scale), (a.offset, b.offset)):
        if x is None or y is None:
            if x is not y:
                return False
            continue
        for start in range(0, x.shape[0], 1024):
            if x[start : start + 1024].tobytes() != y[start : start + 1024].tobytes():
                return False
    return True
