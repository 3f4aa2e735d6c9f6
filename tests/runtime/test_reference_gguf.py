"""The same weights as a GGUF file say the same, from the container to the token.

Float formats hold the tiny models exactly, so the tokens are those that transformers said of the folder. A quantised
file is compared with a folder that holds what the ``gguf`` package makes of its blocks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from device.cpu import CpuDevice
from device.dtypes import encode
from runtime.loaders.checkpoint import Checkpoint, open_checkpoint
from runtime.models.build import build_model
from tests.support.checkpoints import gguf_name, write_folder, write_gguf
from tests.support.convert import gguf_architecture, gguf_metadata, gguf_tensors, permuted, real_values
from tests.support.engines import engine_for
from tests.support.forward import Forward, compare_engine, compare_logits, generate_greedily
from tests.support.reference import (
    MODELS,
    TINY_TOLERANCE,
    tiny_model_cases,
    tiny_model_names,
)
from tests.support.textbook import random_tensors

QUANTISED = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
Array = NDArray[Any]


def opened(path: Path) -> Checkpoint:
    return open_checkpoint(path, lambda _: None)


def stored(values: Array, kind: str) -> Array | tuple[NDArray[np.uint8], str]:
    """A matrix as it stands in a file of this kind; vectors are always F32."""
    import gguf

    if values.ndim == 1 or kind == "F32":
        return values
    if kind == "F16":
        return values.astype(np.float16)
    if kind == "BF16":
        return encode(values, "bfloat16").view(np.uint8), kind
    return gguf.quantize(values, gguf.GGMLQuantizationType[kind]), kind


def as_gguf(name: str, kind: str, path: Path) -> Path:
    source = opened(MODELS / name)
    content = {n: stored(v, kind) for n, v in gguf_tensors(source).items()}
    return write_gguf(path, gguf_architecture(source.config), gguf_metadata(source), content)


EXACT = [(name, "F32") for name in tiny_model_names()]
EXACT += [(name, "BF16") for name in ("qwen2", "gemma3", "llama3_rope", "mistral_window")] + [("llama2", "F16")]


@pytest.mark.parametrize(("name", "kind"), EXACT)
def test_a_file_with_all_bits_says_what_transformers_said_of_the_folder(name: str, kind: str, tmp_path: Path) -> None:
    checkpoint = opened(as_gguf(name, kind, tmp_path / "model.gguf"))
    assert checkpoint.format == "gguf"
    device = CpuDevice("float32")
    model = build_model(checkpoint, device, 256)
    cases = tiny_model_cases(name)
    assert compare_logits(Forward(model, device, max_len=256), cases, TINY_TOLERANCE).equal == 6 * 64
    engine = engine_for(model, device, max_num_batched_tokens=48)
    assert compare_engine(engine, cases).equal == 6 * 64
    engine.shutdown()


@pytest.mark.parametrize("kind", QUANTISED)
@pytest.mark.parametrize("name", ["tiny", "qwen2"])
def test_a_quantised_file_says_what_its_dequantised_weights_say(name: str, kind: str, tmp_path: Path) -> None:
    """Bit for bit: both are one float32 matrix in the end."""
    import gguf

    source = opened(MODELS / name)
    quantised = {
        n: gguf.dequantize(gguf.quantize(v, gguf.GGMLQuantizationType[kind]), gguf.GGMLQuantizationType[kind])
        for n in source.names()
        if (v := real_values(source, n)).ndim == 2
    }
    assert any(not np.array_equal(quantised[n], real_values(source, n)) for n in quantised)
    config = json.loads((MODELS / name / "config.json").read_text())
    folder = write_folder(
        tmp_path / "folder", config, {n: quantised.get(n, real_values(source, n)) for n in source.names()}
    )
    prompts = [case.prompt for case in tiny_model_cases(name)]
    tokens, logits = zip(
        *(_say(opened(path), prompts) for path in (folder, as_gguf(name, kind, tmp_path / "model.gguf"))), strict=True
    )
    if kind == "Q5_1":  # not kept: it goes through float16
        assert np.abs(logits[0] - logits[1]).max() < 2e-2 * np.abs(logits[0]).max()
    else:
        assert np.array_equal(logits[0], logits[1])
        assert tokens[0] == tokens[1]


def _say(checkpoint: Checkpoint, prompts: list[tuple[int, ...]]) -> tuple[list[list[int]], Array]:
    device = CpuDevice("float32")
    model = build_model(checkpoint, device, 256)
    logits = Forward(model, device, max_len=256).rows(prompts[-1])
    engine = engine_for(model, device)
    tokens = generate_greedily(engine, prompts, [16] * len(prompts))
    engine.shutdown()
    return tokens, logits


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
def test_formats_of_256_columns(kind: str, tmp_path: Path) -> None:
    """The gguf package cannot quantise to these, so the blocks are random bytes with scales of a sane size."""
    import gguf

    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64, "hidden_size": 256,
        "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 4,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
    }  # fmt: skip
    state = np.random.default_rng(5)
    raw: dict[str, NDArray[np.uint8]] = {}
    folder: dict[str, Array] = {}
    for name, values in random_tensors(config, 5, head=True).items():
        folder[name] = values
        if values.ndim == 2:
            raw[name] = _random_blocks(state, kind, values.shape[0])
            folder[name] = gguf.dequantize(raw[name], gguf.GGMLQuantizationType[kind])
    source = opened(write_folder(tmp_path / "folder", config, folder))
    content: dict[str, Any] = dict(gguf_tensors(source))
    content |= {gguf_name(name): (permuted(source.config, name, blocks), kind) for name, blocks in raw.items()}
    path = write_gguf(tmp_path / "model.gguf", "llama", gguf_metadata(source), content)
    prompts = [tuple(range(2, 30))]
    tokens, logits = _say(source, prompts)
    tokens_gguf, logits_gguf = _say(opened(path), prompts)
    assert np.isfinite(logits).all() and logits.std() > 0.01
    assert np.array_equal(logits, logits_gguf) and tokens == tokens_gguf


def _random_blocks(state: np.random.Generator, kind: str, rows: int) -> NDArray[np.uint8]:
    """[rows, one block of 256 columns]; layouts: ggml-common.h, block_q4_K and block_q6_K."""
    size, scales = {"Q4_K": (144, {0: 3e-4, 2: 2e-3}), "Q6_K": (210, {208: 3e-5})}[kind]
    raw = state.integers(0, 256, (rows, size), dtype=np.uint8)
    for at, scale in scales.items():
        raw[:, at : at + 2] = np.array([scale], "<f2").view(np.uint8)
    return raw
