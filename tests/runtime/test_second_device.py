"""The engine on a device that shares nothing with the CPU's: the proof that the contract carries an accelerator.

The toy device has opaque tensors and weights of its own, blocks of 128, a scatter that refuses -1 and repeated slots,
recordings with upper bounds, and runs everything late. Nothing in ``runtime/`` knows of it.
"""

from __future__ import annotations

from typing import Any

import pytest

from runtime.api import GenerationRequest, SamplingParams
from runtime.engine import Engine
from tests.runtime.test_schedule_independence import tiny
from tests.support.engines import drain, engine_for, load_tiny, scripted_engine, tiny_engine, tiny_tokenizer
from tests.support.schedules import Outcome, collect
from tests.support.toy_device import make_toy_device

LATE = 0.0005


def toy_engine(name: str = "tiny", **settings: Any) -> Engine:
    device = make_toy_device("float64", seed=3, jitter=LATE, fusion=settings.pop("fusion", True))
    settings.setdefault("kv_blocks", 8)
    return engine_for(
        load_tiny(device, name, 256), device, max_len=256, tokenizer=tiny_tokenizer(), max_queue=200, **settings
    )


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"fusion": False, "prefix_cache": False},
        {"speculate": "ngram", "ngram_min": 1, "max_num_batched_tokens": 24},
        {"max_num_seqs": 7, "chunk_size": 9, "max_logit_rows": 8},
        {"batching": "static", "max_num_seqs": 4, "kv_blocks": 2},
    ],
    ids=["plain", "composed", "drafts", "chunks", "static"],
)
def test_outputs_are_those_of_the_cpu(settings: dict[str, Any]) -> None:
    engine = toy_engine(**settings)
    picks = range(0, 60, 2)
    handles = [engine.submit(tiny().requests[i]) for i in picks]
    for i, handle in zip(picks, handles, strict=True):
        outcome = Outcome()
        while not handle.done:
            collect(handle, outcome)
        expected = tiny().reference(i)
        assert (outcome.tokens, outcome.reasons) == (expected.tokens, expected.reasons)
        assert (outcome.scores is None) == (expected.scores is None)
    stats = engine.stats()
    assert stats.blocks_free == stats.blocks_total and engine.wait_idle(5)
    assert engine.failure is None
    engine.shutdown()


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "mistral_window", "llama3_rope"])
def test_every_model_kind_runs_on_it(name: str) -> None:
    prompts = [tuple(range(5, 45)), tuple(range(100, 130)) * 3, (7,)]
    outputs = []
    for engine in (toy_engine(name), tiny_engine(name)):
        handles = [
            engine.submit(GenerationRequest(p, SamplingParams(temperature=0.9, seed=5, max_tokens=12, ignore_eos=True)))
            for p in prompts
        ]
        outputs.append([[t for event in drain(h) for t in event.tokens] for h in handles])
        engine.shutdown()
    assert outputs[0] == outputs[1]
    assert all(len(tokens) == 12 for tokens in outputs[0])


def test_a_model_with_inputs_of_its_own_runs_on_it() -> None:
    engine = scripted_engine(device=make_toy_device("float32", seed=1, jitter=LATE), kv_blocks=4)
    script = [17, 300, 42, 5]
    handle = engine.submit(
        GenerationRequest((1, 2, 3), SamplingParams(temperature=0, max_tokens=10), extra={"script": script})
    )
    events = drain(handle)
    assert [t for event in events for t in event.tokens][:4] == script
    assert events[-1].finish_reason == "stop"
    engine.shutdown()
