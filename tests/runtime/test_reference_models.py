"""What the engine says against what transformers said of the same weights in float32.

Tokens run free through the engine as a user runs it: prompts together, prefill in chunks, blocks taken away and given
back. Logits are compared behind the reference's tokens. Equal and excused rows are printed (pytest -s).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpu_kernels.build import find_compiler
from device.cpu import CpuDevice
from runtime import Engine
from runtime.loaders.checkpoint import open_checkpoint
from runtime.models.build import build_model
from tests.support.forward import Forward, compare_engine, compare_logits
from tests.support.reference import (
    DATA,
    LOGIT_TOLERANCE,
    MODELS,
    TINY_TOLERANCE,
    compare_teacher_forced,
    smollm2_cases,
    tiny_model_cases,
    tiny_model_names,
)
from tests.support.textbook import textbook_logits

TINY_ROWS = 6 * 64
SMOLLM2 = "smollm2-135m"
EMBEDDED = smollm2_cases()


def started(model: Path | str, **settings: Any) -> Engine:
    if isinstance(model, Path):
        settings["tokenizer"] = str(DATA / "tiny_tokenizer")
    settings = {"kernels": "numpy", **settings}
    engine = Engine.load(str(model), device="cpu", dtype="float32", **settings)
    engine.check_each_step = True
    return engine


def forward_of(model: Path | str, **options: Any) -> Forward:
    device = CpuDevice("float32")
    return Forward(build_model(open_checkpoint(model, lambda _: None), device, 512), device, **options)


def test_the_tiny_models_are_those_that_we_claim_to_support() -> None:
    architectures = {json.loads((MODELS / n / "config.json").read_text())["model_type"] for n in tiny_model_names()}
    assert architectures == {"llama", "mistral", "qwen2", "qwen3", "gemma3_text"}


# ---------------------------------------------------------------------------------------------- tiny models

SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "chunks of seven tokens": {"chunk_size": 7, "max_num_batched_tokens": 24, "max_num_seqs": 4, "block_size": 8},
    "a small pool": {"kv_blocks": 22, "block_size": 8, "max_model_len": 176, "max_num_batched_tokens": 64},
    "drafts": {"speculate": "ngram", "ngram_min": 1, "ngram_max": 2, "draft_tokens": 3},
    "one after the other": {"max_num_seqs": 1, "chunked_prefill": False, "prefix_cache": False, "fusion": False},
    "static batches": {"batching": "static", "max_batch": 4},
    "native kernels": {"kernels": "native", "chunk_size": 7, "max_num_batched_tokens": 24, "max_num_seqs": 4},
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", tiny_model_names())
def test_tokens_of_tiny_models(name: str, setting: str) -> None:
    if setting == "native kernels" and find_compiler() is None:
        pytest.skip("no C++ compiler")
    engine = started(MODELS / name, **SETTINGS[setting])
    report = compare_engine(engine, tiny_model_cases(name))
    stats = engine.stats()
    engine.shutdown()
    print(f"{name}, {setting}: {report.equal} tokens equal, {report.excused} excused")
    assert report.equal == TINY_ROWS  # their best logits are never nearer than 1e-3
    assert (stats.preemptions > 0) == (setting == "a small pool")
    assert (stats.accepted_tokens > 0) == (setting == "drafts")


def test_tokens_are_the_same_from_the_prefix_cache() -> None:
    engine = started(MODELS / "mistral_window", block_size=8)
    cases = tiny_model_cases("mistral_window")
    assert compare_engine(engine, cases).equal == TINY_ROWS
    before = engine.stats().prefix_hits
    assert compare_engine(engine, cases).equal == TINY_ROWS
    # the whole of every prompt is in full blocks by now, up to the one token that is always computed
    expected = sum((len(case.prompt) - 1) // 8 * 8 for case in cases)
    assert engine.stats().prefix_hits - before == expected
    engine.shutdown()


@pytest.mark.parametrize("chunk", [0, 7, 1])
@pytest.mark.parametrize("name", tiny_model_names())
def test_logits_of_tiny_models(name: str, chunk: int) -> None:
    report = compare_logits(forward_of(MODELS / name, chunk=chunk), tiny_model_cases(name), TINY_TOLERANCE)
    print(f"{name}, chunk {chunk or 'whole'}: {report}")
    assert report.equal == TINY_ROWS


@pytest.mark.parametrize("name", [path.parent.name for path in sorted(MODELS.glob("*/config.old_form.json"))])
def test_logits_with_the_old_form_of_the_configuration(name: str, tmp_path: Path) -> None:
    folder = shutil.copytree(MODELS / name, tmp_path / name)
    (folder / "config.old_form.json").replace(folder / "config.json")
    report = compare_logits(forward_of(folder), tiny_model_cases(name), TINY_TOLERANCE)
    assert report.equal == TINY_ROWS


@pytest.mark.parametrize("name", ["gemma3", "llama2", "llama_linear", "mistral_window", "qwen2", "qwen3", "tiny"])
def test_the_textbook_decoder_agrees_with_transformers(name: str) -> None:
    """So it may stand in for transformers in tests that make models of their own."""
    old = MODELS / name / "config.old_form.json"
    config = json.loads((old if old.exists() else MODELS / name / "config.json").read_text())
    if "rope_parameters" in config:
        config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    checkpoint = open_checkpoint(MODELS / name, lambda _: None)
    tensors = {
        n: checkpoint.weight(n).dequantize(np.float64) if len(checkpoint.shape(n)) == 2 else checkpoint.vector(n)
        for n in checkpoint.names()
    }
    if name == "gemma3":  # the checkpoint gives what the norms multiply by, the textbook wants what the file holds
        tensors = {n: t - 1 if n.endswith("norm.weight") else t for n, t in tensors.items()}
    for case in tiny_model_cases(name):
        report = compare_teacher_forced(case, lambda ids: textbook_logits(config, tensors, ids), TINY_TOLERANCE)
        assert report.equal == 64


# ---------------------------------------------------------------------------------------------- the embedded model


@pytest.fixture(scope="module")
def embedded() -> Iterator[Engine]:
    engine = started(SMOLLM2, max_num_seqs=20, max_num_batched_tokens=256, max_model_len=512)
    yield engine
    engine.shutdown()


def test_tokens_of_the_embedded_model(embedded: Engine) -> None:
    """Twenty prompts of 5 to 374 tokens in one batch, 64 tokens each, free running."""
    assert len(EMBEDDED) == 20 and max(len(case.prompt) for case in EMBEDDED) > 256  # one at least goes in chunks
    report = compare_engine(embedded, EMBEDDED)
    print(f"{SMOLLM2}: {report.equal} tokens equal, {report.excused} excused")
    assert report.equal + report.excused == 20 * 64
    assert report.excused <= 5


def test_logits_of_the_embedded_model() -> None:
    report = compare_logits(forward_of(SMOLLM2, chunk=256), EMBEDDED, LOGIT_TOLERANCE)
    print(f"{SMOLLM2}: {report}")
    assert report.equal + report.excused == 20 * 64


def test_tokens_of_the_embedded_model_with_drafts() -> None:
    engine = started(SMOLLM2, speculate="ngram", max_model_len=512)
    some = [case for case in EMBEDDED if len(set(case.tokens)) < 30][:4]
    assert len(some) == 4
    report = compare_engine(engine, some)
    stats = engine.stats()
    engine.shutdown()
    print(f"{SMOLLM2}, drafts: {report.equal} tokens equal, {report.excused} excused; {stats.accepted_tokens} accepted")
    assert report.equal + report.excused == 4 * 64
    assert stats.accepted_tokens > 20
