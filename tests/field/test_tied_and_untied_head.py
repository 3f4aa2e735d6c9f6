"""The output head: the embedding table where the model says so, the head's own matrix otherwise, never a guess.

Upstream: https://github.com/sgl-project/sglang/issues/2935 (KeyError: lm_head.weight),
https://github.com/vllm-project/vllm/issues/6758 and https://github.com/vllm-project/vllm/issues/5621 (tied, but the
file has a head too), https://github.com/pegainfer-project/pegainfer/issues/544 (an untied head was ignored: repeated
tokens),
https://github.com/QwenLM/Qwen3-VL-Embedding/issues/89 (says untied, has no head).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from device.cpu import CpuDevice
from device.errors import LoadError
from runtime.loaders.checkpoint import EMBEDDING, HEAD, Checkpoint, open_checkpoint
from runtime.models.build import build_model
from tests.support.checkpoints import (
    GGUF_LLAMA,
    TINY_GEMMA,
    TINY_LLAMA,
    gguf_name,
    permute,
    tiny_tensors,
    write_folder,
    write_gguf,
)
from tests.support.forward import Forward
from tests.support.textbook import random_tensors, textbook_logits


class Opened:
    """A checkpoint in one of the four forms and what was said about it."""

    def __init__(self, folder: Path, config: dict[str, Any], head: np.ndarray[Any, Any] | None) -> None:
        self.tensors = tiny_tensors(config.get("text_config", config), head=False)
        if head is not None:
            self.tensors[HEAD] = head
        stored = self.tensors
        if "text_config" in config:
            stored = {n.replace("model.", "model.language_model.", 1): t for n, t in stored.items()}
        self.notices: list[str] = []
        self.checkpoint: Checkpoint = open_checkpoint(write_folder(folder, config, stored), self.notices.append)

    def logits_weight(self) -> np.ndarray[Any, Any]:
        return self.checkpoint.weight(self.checkpoint.head()).dequantize()


def configuration(tied: bool, nested: bool) -> dict[str, Any]:
    if not nested:
        return TINY_LLAMA | {"tie_word_embeddings": tied}
    return {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": TINY_GEMMA | {"tie_word_embeddings": tied},
    }


def other_head() -> np.ndarray[Any, Any]:
    return np.random.default_rng(99).standard_normal((64, 32)).astype(np.float32)


nesting = pytest.mark.parametrize("nested", [False, True], ids=["top", "text_config"])


@nesting
def test_tied_without_a_head_uses_the_embedding(tmp_path: Path, nested: bool) -> None:
    opened = Opened(tmp_path, configuration(True, nested), None)
    assert opened.checkpoint.config.tied and opened.checkpoint.head() == EMBEDDING
    assert np.array_equal(opened.logits_weight(), opened.tensors[EMBEDDING])
    assert not opened.notices


@nesting
def test_tied_with_an_equal_head_ignores_the_copy(tmp_path: Path, nested: bool) -> None:
    config = configuration(True, nested)
    embedding = tiny_tensors(config.get("text_config", config), head=False)[EMBEDDING]
    opened = Opened(tmp_path, config, embedding.copy())
    assert opened.checkpoint.head() == EMBEDDING and not opened.notices
    assert HEAD not in opened.checkpoint.unused()


@nesting
def test_tied_with_another_head_warns_and_uses_it(tmp_path: Path, nested: bool) -> None:
    opened = Opened(tmp_path, configuration(True, nested), other_head())
    assert opened.checkpoint.head() == HEAD
    assert np.array_equal(opened.logits_weight(), other_head())
    assert opened.notices and HEAD in opened.notices[0] and "tie_word_embeddings" in opened.notices[0]


def test_tied_with_a_head_that_differs_in_its_last_value_only(tmp_path: Path) -> None:
    config = TINY_LLAMA | {"tie_word_embeddings": True, "vocab_size": 3000}
    head = tiny_tensors(config, head=False)[EMBEDDING].copy()
    head[-1, -1] += 1
    opened = Opened(tmp_path, config, head)
    assert opened.checkpoint.head() == HEAD and len(opened.notices) == 1


@nesting
def test_untied_uses_the_head(tmp_path: Path, nested: bool) -> None:
    opened = Opened(tmp_path, configuration(False, nested), other_head())
    assert not opened.checkpoint.config.tied and opened.checkpoint.head() == HEAD
    assert np.array_equal(opened.logits_weight(), other_head())
    assert not opened.notices


@nesting
def test_untied_without_a_head_fails_and_names_it(tmp_path: Path, nested: bool) -> None:
    opened = Opened(tmp_path, configuration(False, nested), None)
    with pytest.raises(LoadError, match=r"tie_word_embeddings=false.*'lm_head\.weight'.*incomplete download"):
        opened.checkpoint.head()


def test_the_flag_at_the_top_counts_where_text_config_has_none(tmp_path: Path) -> None:
    config = configuration(False, nested=True)
    del config["text_config"]["tie_word_embeddings"]
    assert Opened(tmp_path / "a", config, None).checkpoint.config.tied  # Gemma's default
    opened = Opened(tmp_path / "b", config | {"tie_word_embeddings": False}, None)
    assert not opened.checkpoint.config.tied


@pytest.mark.parametrize("head", [False, True])
def test_a_gguf_file_is_tied_when_it_has_no_output_tensor(tmp_path: Path, head: bool) -> None:
    tensors = tiny_tensors(TINY_LLAMA, head=head)
    stored = {gguf_name(n): t for n, t in tensors.items()}
    for i in range(2):
        stored[f"blk.{i}.attn_q.weight"] = permute(stored[f"blk.{i}.attn_q.weight"], 4)
        stored[f"blk.{i}.attn_k.weight"] = permute(stored[f"blk.{i}.attn_k.weight"], 2)
    notices: list[str] = []
    checkpoint = open_checkpoint(write_gguf(tmp_path / "x.gguf", "llama", GGUF_LLAMA, stored), notices.append)
    assert checkpoint.config.tied is not head and checkpoint.head() == (HEAD if head else EMBEDDING)
    expected = tensors[HEAD if head else EMBEDDING]
    assert np.array_equal(checkpoint.weight(checkpoint.head()).q, expected) and not notices


# ---------------------------------------------------------------------------------------------- the model

IDS = [7, 3, 60, 12, 12, 5, 33, 1]
TEXTBOOK = {"rms_norm_eps": 1e-6, "rope_theta": 1e4, "rope_local_base_freq": 1e4, "sliding_window_pattern": 2,
            "query_pre_attn_scalar": 8}  # fmt: skip


def text_config(nested: bool, tied: bool) -> dict[str, Any]:
    """The configuration of the text model alone, with everything spelt out that the textbook wants."""
    return TEXTBOOK | (TINY_GEMMA if nested else TINY_LLAMA) | {"tie_word_embeddings": tied}


def our_logits(folder: Path, text: dict[str, Any], nested: bool, tensors: dict[str, Any]) -> np.ndarray[Any, Any]:
    config, stored = text, tensors
    if nested:
        config = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
        stored = {n.replace("model.", "model.language_model.", 1): t for n, t in tensors.items()}
    checkpoint = open_checkpoint(write_folder(folder, config, stored), lambda _: None)
    device = CpuDevice("float32")
    return Forward(build_model(checkpoint, device, 128), device).rows(IDS)


@nesting
@pytest.mark.parametrize(
    ("tied", "head"), [(True, "none"), (True, "equal"), (True, "other"), (False, "other"), (False, "equal")]
)
def test_logits_match_a_reference(tmp_path: Path, nested: bool, tied: bool, head: str) -> None:
    text = text_config(nested, tied)
    tensors = random_tensors(text, 8, head=head == "other")
    if head == "equal":
        tensors[HEAD] = tensors[EMBEDDING].copy()
    expected = textbook_logits(text, tensors, IDS)
    assert np.abs(our_logits(tmp_path, text, nested, tensors) - expected).max() <= 1e-5 * np.abs(expected).max()


@nesting
def test_no_model_is_built_without_its_head(tmp_path: Path, nested: bool) -> None:
    text = text_config(nested, tied=False)
    with pytest.raises(LoadError, match=r"lm_head\.weight"):
        our_logits(tmp_path, text, nested, random_tensors(text, 8, head=False))
