"""What the engine hands out, in which order; and aborts at any time."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from runtime.api import GenerationRequest, SamplingParams
from tests.support.engine_calls import END, Gate, Make, engines, last, request, tokens
from tests.support.engines import drain


@pytest.fixture
def make() -> Iterator[Make]:
    with engines() as build:
        yield build


def test_tokens_come_one_by_one_and_the_end_token_is_named(make: Make) -> None:
    handle = make().submit(request(script=(65, 66, 67)))
    events = drain(handle)
    assert [event.tokens for event in events] == [(65,), (66,), (67,), (END,)]
    assert [event.finish_reason for event in events] == [None, None, None, "stop"]
    assert [event.stop_token for event in events] == [None, None, None, END]
    assert handle.done and handle.get(timeout=0) is None and handle.prompt_tokens == 3


def test_ends(make: Make) -> None:
    engine = make(eos_ids=(70,))
    endless = (65,) * 300

    def outcome(**params: Any) -> tuple[int, str | None, int | None]:
        events = drain(engine.submit(request(**{"script": endless, "max_tokens": 5, **params})))
        return len(tokens(events)), last(events).finish_reason, last(events).stop_token

    assert outcome() == (5, "length", None)
    assert outcome(max_tokens=0) == (0, "length", None)
    assert outcome(max_tokens=None, prompt=(1,) * 250) == (6, "length", None)  # the context is full
    assert outcome(script=(65, END, 65)) == (2, "stop", END)
    assert outcome(script=(65, 70, 65)) == (2, "stop", 70)
    assert outcome(script=(65, 66, 65), stop_token_ids=(66,)) == (2, "stop", 66)
    assert outcome(script=(65, END, 70, 66), ignore_eos=True) == (5, "length", None)
    assert outcome(script=(65, END, 66), ignore_eos=True, stop_token_ids=(66,)) == (3, "stop", 66)


def test_no_event_in_time_is_none(make: Make) -> None:
    gate = Gate()
    handle = make(gate=gate).submit(request(script=(65,)))
    gate.arrive()
    assert handle.get(timeout=0) is None and handle.get(timeout=0.01) is None and not handle.done
    gate.open()
    assert tokens(drain(handle)) == [65, END]


def test_choices_have_their_own_order_and_end(make: Make) -> None:
    engine = make(script=lambda seq: [80 + seq.index] * (3 - seq.index))
    events = drain(engine.submit(request(n=3)))
    for index in range(3):
        assert tokens(events, index) == [80 + index] * (3 - index) + [END]
        assert last(events, index).finish_reason == "stop"


def test_logprobs_come_with_their_tokens(make: Make) -> None:
    events = drain(make().submit(request(script=(65, 66), logprobs=2, prompt_logprobs=0)))
    for event in events:
        assert event.logprobs is not None
        assert [lp.token for lp in event.logprobs] == list(event.tokens)
        assert all(len(lp.top) == 2 and lp.rank == 1 and lp.top[0][0] == lp.token for lp in event.logprobs)
    assert events[0].prompt_logprobs is not None and len(events[0].prompt_logprobs) == 3
    assert all(event.prompt_logprobs is None for event in events[1:])


def test_seeds_and_choices(make: Make) -> None:
    engine = make(tiny=True)

    def sample(n: int = 1, **params: Any) -> list[list[int]]:
        params = {"temperature": 1.0, "max_tokens": 8, "ignore_eos": True, **params}
        events = drain(engine.submit(request((5, 6, 7), n=n, **params)))
        return [tokens(events, index) for index in range(n)]

    three = sample(3, seed=11)
    assert three == sample(3, seed=11)
    assert three[:1] == sample(1, seed=11), "a choice does not depend on how many were asked for"
    assert len({tuple(choice) for choice in three}) == 3, "choices of one seed draw for themselves"
    assert sample(seed=12) != sample(seed=11)
    assert sample() != sample(), "without a seed each request draws one"
    assert sample(temperature=0.0) == sample(temperature=0.0, seed=5)


def test_drafts_change_nothing_but_the_number_of_steps(make: Make) -> None:
    script = (65, 66, 67, 68) * 12
    plain, drafting = make(), make(speculate="ngram", draft_tokens=4)
    expected = drain(plain.submit(request(script=script)))
    found = drain(drafting.submit(request(script=script)))
    assert tokens(found) == tokens(expected) == [*script, END]
    stats = drafting.stats()
    assert stats.steps < plain.stats().steps / 2
    assert 0 < stats.accepted_tokens <= stats.draft_tokens and 0 < stats.drafts <= stats.steps
    assert stats.generated_tokens == len(script) + 1 and plain.stats().draft_tokens == 0
    assert last(found).stop_token == END


def test_a_row_without_finite_logits_fails_its_own_request_alone(make: Make) -> None:
    engine = make()
    model: Any = engine.model
    fill = model.fill

    def poisoned(plan: Any, buffer: Any) -> None:
        fill(plan, buffer)
        row = 0
        for at, seq in enumerate(plan.seqs):
            if len(seq.tokens) - seq.prompt_len >= seq.extra.get("nan_at", 99):
                buffer.views["script_bias"][row : row + plan.rows[at]] = float("nan")
            row += plan.rows[at]

    model.fill = poisoned
    bad = GenerationRequest((1,) * 20, SamplingParams(temperature=0.0), extra={"script": (65,) * 9, "nan_at": 2})
    handles = [engine.submit(request(script=(65,) * 9)), engine.submit(bad), engine.submit(request(script=(66,) * 9))]
    good, failed, other = (drain(handle) for handle in handles)
    assert tokens(good) == [65] * 9 + [END] and tokens(other) == [66] * 9 + [END]
    assert tokens(failed) == [65, 65] and last(failed).finish_reason == "error"
    assert "no finite logits" in (last(failed).error or "")
    assert engine.state == "ready" and engine.wait_idle(20)
    assert engine.stats().blocks_free == engine.stats().blocks_total


# ---------------------------------------------------------------- prefix cache


def test_cached_tokens_are_told_with_the_first_event(make: Make) -> None:
    engine = make(block_size=16)
    prompt = tuple(range(100, 140))
    first, second = (drain(engine.submit(request(prompt, script=(65, 66)))) for _ in range(2))
    assert [event.cached_tokens for event in first] == [0, 0, 0]
    assert [event.cached_tokens for event in second] == [32, 0, 0]
    salted = GenerationRequest(prompt, SamplingParams(temperature=0.0), cache_salt="mine")
    assert drain(engine.submit(salted))[0].cached_tokens == 0
    assert drain(make(prefix_cache=False).submit(request(prompt)))[0].cached_tokens == 0


@pytest.mark.parametrize(("length", "cached"), [(32, 16), (33, 32), (31, 16), (16, 0)])
def test_a_prompt_that_is_cached_whole(make: Make, length: int, cached: int) -> None:
    engine = make(tiny=True, block_size=16)
    prompt = tuple(range(10, 10 + length))
    first, second = (drain(engine.submit(request(prompt, max_tokens=4, logprobs=0))) for _ in range(2))
    assert tokens(first) == tokens(second)
    assert second[0].cached_tokens == cached
    for a, b in zip(first, second, strict=True):
        assert a.logprobs is not None and b.logprobs is not None
        assert abs(a.logprobs[0].logprob - b.logprobs[0].logprob) < 1e-12


# ---------------------------------------------------------------- aborts


def test_an_abort_in_the_queue(make: Make) -> None:
    gate = Gate()
    engine = make(gate=gate, max_num_seqs=1)
    first = engine.submit(request(script=(65, 65)))
    gate.arrive()
    second, third = engine.submit(request(script=(66,))), engine.submit(request(script=(67,)))
    gate.let()
    second.abort()
    gate.open()
    assert [(e.tokens, e.finish_reason) for e in drain(second)] == [((), "abort")]
    assert tokens(drain(first)) == [65, 65, END] and tokens(drain(third)) == [67, END]


def test_an_abort_before_the_engine_has_seen_the_request(make: Make) -> None:
    gate = Gate()
    engine = make(gate=gate)
    engine.submit(request(script=(65,)))
    gate.arrive()
    handle = engine.submit(request(n=2))
    handle.abort()
    handle.abort()
    gate.open()
    events = drain(handle)
    assert [(e.index, e.tokens, e.finish_reason) for e in events] == [(0, (), "abort"), (1, (), "abort")]
    assert engine.wait_idle(20) and engine.stats().blocks_free == engine.stats().blocks_total


def test_an_abort_within_the_prompt_frees_its_blocks(make: Make) -> None:
    gate = Gate()
    engine = make(gate=gate, chunk_size=16, block_size=16)
    handle = engine.submit(request((7,) * 100))
    gate.arrive()
    gate.let(2)
    assert engine.stats().blocks_total - engine.stats().blocks_free == 3
    handle.abort()
    gate.open()
    assert [(e.tokens, e.finish_reason) for e in drain(handle)] == [((), "abort")]
    assert engine.wait_idle(20)
    assert engine.stats().blocks_free == engine.stats().blocks_total
    assert engine.stats().prompt_tokens == 48, "what was computed counts"


def test_an_abort_while_tokens_come(make: Make) -> None:
    gate = Gate()
    engine = make(gate=gate)
    handle, other = engine.submit(request(script=(65,) * 50)), engine.submit(request(script=(66,) * 5))
    gate.arrive()
    gate.let(3)
    handle.abort()
    gate.open()
    events = drain(handle)
    assert 3 <= len(tokens(events)) <= 5 and last(events).finish_reason == "abort"
    assert tokens(drain(other)) == [66] * 5 + [END]
    assert engine.wait_idle(20) and engine.stats().blocks_free == engine.stats().blocks_total


def test_an_abort_after_the_end_is_nothing(make: Make) -> None:
    engine = make()
    handle = engine.submit(request(script=(65,)))
    events = drain(handle)
    handle.abort()
    handle.abort_choice(0)
    assert tokens(drain(engine.submit(request(script=(66,))))) == [66, END]
    assert handle.get(timeout=0.01) is None and last(events).finish_reason == "stop"


def test_one_choice_is_ended_the_others_go_on(make: Make) -> None:
    gate = Gate()
    engine = make(gate=gate)
    handle = engine.submit(request(script=(65,) * 6, n=3))
    gate.arrive()
    gate.let(2)
    handle.abort_choice(1)
    handle.abort_choice(7)
    gate.open()
    events = drain(handle)
    assert [last(events, i).finish_reason for i in range(3)] == ["stop", "abort", "stop"]
    assert len(tokens(events, 1)) < 6 and tokens(events, 0) == tokens(events, 2) == [65] * 6 + [END]


def test_aborts_from_many_threads(make: Make) -> None:
    """Every handle gets exactly one end a choice, whenever its abort comes."""
    engine = make(max_num_seqs=4, max_queue=1000, kv_blocks=30)
    problems: list[str] = []

    def client(n: int) -> None:
        for i in range(12):
            handle = engine.submit(request((n, i, 1), script=(65,) * (i % 7), n=1 + i % 2))
            if i % 3:
                time.sleep(0.0005 * (i % 4))
                handle.abort()
            events = drain(handle)
            reasons = {last(events, index).finish_reason for index in range(1 + i % 2)}
            if not reasons <= {"stop", "abort"} or (i % 3 == 0 and reasons != {"stop"}):
                problems.append(f"{n}.{i}: {reasons}")

    threads = [threading.Thread(target=client, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not problems and engine.state == "ready", engine.failure
    assert engine.wait_idle(20)
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.blocks_free) == (0, 0, stats.blocks_total)
