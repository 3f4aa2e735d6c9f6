"""The engine on the native kernels: equal tokens with the reference, and the same output whatever the schedule."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from cpu_kernels.build import find_compiler
from runtime import Engine, SamplingParams
from runtime.api import GenerationRequest
from tests.support.engines import drain
from tests.support.forward import compare_engine, generate_greedily
from tests.support.reference import smollm2_cases

if find_compiler() is None:
    pytest.skip("no C++ compiler", allow_module_level=True)

MODEL = "smollm2-135m"
CASES = smollm2_cases()


def started(**settings: Any) -> Engine:
    engine = Engine.load(MODEL, device="cpu", kernels="native", max_model_len=512, **settings)
    engine.check_each_step = True
    return engine


def test_tokens_with_float_activations_are_those_of_the_reference() -> None:
    """Twenty prompts of 5 to 374 tokens in one batch, 64 tokens each, free running, against transformers in float32."""
    engine = started(activations="float", max_num_seqs=20, max_num_batched_tokens=256)
    try:
        report = compare_engine(engine, CASES)
    finally:
        engine.shutdown()
    print(f"{MODEL}, native: {report.equal} tokens equal, {report.excused} excused")
    assert report.equal + report.excused == 20 * 64
    assert report.excused <= 5


def test_first_tokens() -> None:
    """Six behind a prompt of five tokens: few enough for an emulated CPU too."""
    engine = started(activations="float", max_num_seqs=1, kv_blocks=40)
    try:
        (tokens,) = generate_greedily(engine, [CASES[0].prompt], [6])
        assert tokens == list(CASES[0].tokens[:6])
    finally:
        engine.shutdown()


SCHEDULES: dict[str, dict[str, Any]] = {
    "alone": {"max_num_seqs": 1},
    "together": {"max_num_seqs": 12},
    "chunks": {"max_num_seqs": 12, "max_num_batched_tokens": 48, "block_size": 64},
    "preempted": {"max_num_seqs": 12, "kv_blocks": 40, "prefix_cache": False},
    "drafts": {"max_num_seqs": 5, "speculate": "ngram"},
    "one thread": {"max_num_seqs": 12, "threads": 1},
    "op by op": {"max_num_seqs": 12, "capture": False},
    "composed": {"max_num_seqs": 12, "fusion": False},
}
"""The last runs other kernels: its answers are its own, but must not depend on the company either."""


def outputs(**settings: Any) -> list[list[int]]:
    """Tokens of twelve requests, half of them sampled."""
    engine = started(**settings)
    try:
        handles = []
        for i, case in enumerate(CASES[:12]):
            params = SamplingParams(
                max_tokens=20, temperature=0.9 if i % 2 else 0.0, seed=i, top_p=0.95, ignore_eos=True
            )
            handles.append(engine.submit(GenerationRequest(tuple(case.prompt), params)))
        return [[token for event in drain(handle) for token in event.tokens] for handle in handles]
    finally:
        engine.shutdown()


@pytest.fixture(scope="module")
def alone() -> Iterator[list[list[int]]]:
    yield outputs(**SCHEDULES["alone"])


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name not in ("alone", "composed")])
def test_output_does_not_depend_on_the_schedule(alone: list[list[int]], name: str) -> None:
    """With quantised activations too: every kernel gives a row the same bits whatever stands beside it."""
    assert outputs(**SCHEDULES[name]) == alone


def test_nor_does_that_of_the_plain_ops() -> None:
    composed = {"fusion": False}
    assert outputs(max_num_seqs=12, **composed) == outputs(max_num_seqs=3, max_num_batched_tokens=64, **composed)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16"])
def test_half_precision_caches(kv_dtype: str) -> None:
    assert outputs(max_num_seqs=12, kv_dtype=kv_dtype) == outputs(max_num_seqs=2, kv_dtype=kv_dtype)


def test_steps_are_one_native_call() -> None:
    engine = started()
    try:
        params = SamplingParams(max_tokens=4, temperature=1.0, logprobs=3, presence_penalty=0.5, prompt_logprobs=2)
        drain(engine.submit(GenerationRequest(tuple(CASES[0].prompt), params)))
        drain(engine.submit(GenerationRequest(tuple(CASES[1].prompt), SamplingParams(max_tokens=4, temperature=0))))
        assert not [text for text in engine.device.report.notices if "op by op" in text]
    finally:
        engine.shutdown()
