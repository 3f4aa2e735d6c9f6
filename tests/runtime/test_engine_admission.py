"""Which requests the engine takes, which it refuses and how, and when a batch closes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from device.errors import RequestRejected
from runtime.engine import Engine
from tests.support.engine_calls import END, Gate, Make, engines, request, tokens
from tests.support.engines import drain, scripted_engine


@pytest.fixture
def make() -> Iterator[Make]:
    with engines() as build:
        yield build


def test_requests_over_capacity_are_told_to_come_back(make: Make) -> None:
    gate = Gate()
    engine = make(gate=gate, max_num_seqs=2, max_queue=1)
    handles = [engine.submit(request(script=(65,))) for _ in range(2)]
    gate.arrive()
    with pytest.raises(RequestRejected, match="at capacity") as refused:
        engine.submit(request(n=2))
    assert (refused.value.status, refused.value.code) == (429, "rate_limit_exceeded")
    assert refused.value.retry_after is not None and refused.value.retry_after > 0
    handles.append(engine.submit(request(script=(65,))))
    with pytest.raises(RequestRejected):
        engine.submit(request())
    assert engine.stats().rejected == 2
    handles.append(engine.submit(request(script=(65,)), queue_limit=False))
    gate.open()
    for handle in handles:
        assert tokens(drain(handle)) == [65, END]
    assert tokens(drain(engine.submit(request(script=(66,))))) == [66, END]


def test_a_request_of_many_choices_is_taken_when_nothing_else_is_there(make: Make) -> None:
    """It could never be served otherwise."""
    engine = make(max_num_seqs=2, max_queue=1)
    events = drain(engine.submit(request(script=(65,), n=8)))
    assert all(tokens(events, i) == [65, END] for i in range(8))


@pytest.mark.parametrize(
    ("params", "param", "code"),
    [
        ({"prompt": ()}, "prompt", None),
        ({"prompt": (1, 99999)}, "prompt", None),
        ({"prompt": (-1,)}, "prompt", None),
        ({"prompt": (515,)}, "prompt", None),  # padding of the model's table, no token of the tokenizer
        ({"logit_bias": {515: 1.0}}, "logit_bias", None),
        ({"logit_bias": {3: 101.0}}, "logit_bias", None),
        ({"stop_token_ids": (512,)}, "stop_token_ids", None),
        ({"temperature": float("nan")}, "temperature", None),
        ({"temperature": 2.1}, "temperature", None),
        ({"top_p": 0.0}, "top_p", None),
        ({"min_p": 1.5}, "min_p", None),
        ({"top_k": -1}, "top_k", None),
        ({"presence_penalty": 2.5}, "presence_penalty", None),
        ({"frequency_penalty": -2.5}, "frequency_penalty", None),
        ({"repetition_penalty": 0.0}, "repetition_penalty", None),
        ({"n": 0}, "n", None),
        ({"n": 129}, "n", None),
        ({"logprobs": 21}, "logprobs", None),
        ({"prompt_logprobs": -1}, "prompt_logprobs", None),
        ({"stop": ("a", "")}, "stop", None),
        ({"stop": ("a", "b", "c", "d", "e")}, "stop", None),
        ({"max_tokens": -1}, "max_tokens", None),
        ({"max_tokens": 2, "min_tokens": 3}, "min_tokens", None),
        ({"prompt": (1,) * 256}, "prompt", "context_length_exceeded"),
        ({"prompt": (1,) * 257, "max_tokens": 0}, "prompt", "context_length_exceeded"),
        ({"prompt": (1,) * 200, "max_tokens": 57}, "max_tokens", "context_length_exceeded"),
    ],
)
def test_impossible_requests_are_refused_by_name(
    shared: Engine, params: dict[str, Any], param: str, code: str | None
) -> None:
    with pytest.raises(RequestRejected) as refused:
        shared.submit(request(**params))
    assert (refused.value.status, refused.value.param, refused.value.code) == (400, param, code)
    assert tokens(drain(shared.submit(request(script=(65,))))) == [65, END]


@pytest.fixture(scope="module")
def shared() -> Iterator[Engine]:
    engine = scripted_engine()
    yield engine
    engine.shutdown()


@pytest.mark.parametrize("params", [{"prompt": (1,) * 255, "max_tokens": 1}, {"prompt": (1,) * 256, "max_tokens": 0}])
def test_the_longest_requests_are_served(shared: Engine, params: dict[str, Any]) -> None:
    assert len(tokens(drain(shared.submit(request(script=(65,) * 9, **params))))) == params["max_tokens"]


def test_a_request_that_the_pool_can_never_hold_is_refused(make: Make) -> None:
    engine = make(kv_blocks=16, block_size=16, max_len=256)
    engine.scheduler.pool.total = 3  # the length of a model is lowered to what its pool holds; here it was not
    with pytest.raises(RequestRejected, match="KV cache holds 48 tokens") as refused:
        engine.submit(request(max_tokens=60))
    assert refused.value.code == "context_length_exceeded" and refused.value.param == "max_tokens"
    engine.scheduler.pool.total = 16


def test_a_dynamic_batch_closes_by_itself(make: Make) -> None:
    engine = make(batching="dynamic", max_batch=4, max_wait_ms=60.0, max_num_seqs=8)
    start = time.monotonic()
    handles = [engine.submit(request(script=(65,))) for _ in range(2)]
    assert all(tokens(drain(handle)) == [65, END] for handle in handles)
    assert 0.06 <= time.monotonic() - start < 5
    start = time.monotonic()
    handles = [engine.submit(request(script=(65,))) for _ in range(4)]
    assert all(tokens(drain(handle)) == [65, END] for handle in handles)
    assert engine.wait_idle(20)
