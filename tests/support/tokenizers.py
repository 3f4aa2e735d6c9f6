"""Tokenizers that several tests use. Each is built once."""

from __future__ import annotations

import functools
import json
import os
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

from runtime.loaders.gguf import GGUFFile
from runtime.loaders.registry import resolve
from runtime.tokenizer import CHAR_OF_BYTE, Tokenizer

DATA = Path(__file__).resolve().parents[1] / "data"
TINY = DATA / "tiny_tokenizer"
GGML = "tokenizer.ggml."


def read(name: str) -> Any:
    """A JSON file of tests/data."""
    return json.loads((DATA / name).read_text(encoding="utf-8"))


@functools.lru_cache(maxsize=1)
def tiny() -> Tokenizer:
    """Byte-level BPE, vocabulary 512, every byte a token, BOS added."""
    return Tokenizer.from_folder(TINY)


@functools.lru_cache(maxsize=1)
def smollm2() -> Tokenizer:
    """The embedded model's: byte-level BPE from GGUF metadata, no BOS added. Some control bytes have no token."""
    return Tokenizer.from_gguf(GGUFFile(resolve("smollm2-135m")).metadata)


@functools.lru_cache(maxsize=2)
def sentencepiece(name: str) -> Tokenizer:
    """``prefix`` (Llama 2's kind: a space before the text) or ``plain`` (Gemma's kind); BOS added."""
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, {"XDG_CACHE_HOME": folder}):
        return Tokenizer.from_gguf(read(f"sentencepiece_{name}.json")["metadata"])


def byte_ids(text: str | bytes) -> list[int]:
    """One token of `tiny` for each byte."""
    raw = text.encode() if isinstance(text, str) else text
    found = [tiny().token_id(CHAR_OF_BYTE[b]) for b in raw]
    assert None not in found
    return [i for i in found if i is not None]


def byte_level_metadata(pre: str | None = "gpt-2", **changes: Any) -> dict[str, Any]:
    """256 byte tokens and one merge; ``changes`` by the last part of the key (None: absent)."""
    tokens = [*CHAR_OF_BYTE.values(), "ab", "<|endoftext|>", "<|im_end|>", "<tool>"]
    found = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": [1] * 257 + [3, 3, 4],
        "merges": ["a b"],
        "eos_token_id": 257,
        **changes,
    }
    return {GGML + k: v for k, v in found.items() if v is not None}
