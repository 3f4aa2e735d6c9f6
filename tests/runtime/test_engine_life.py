"""An engine's beginning, draining, end and failure; and what it counts."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from device.errors import JumarError, RequestRejected
from runtime.engine import RequestHandle
from runtime.stats import FinishedRequest
from tests.support.engine_calls import END, Gate, Make, engines, last, request, tokens, wait_until
from tests.support.engines import drain, run_alone, scripted_engine


@pytest.fixture
def make() -> Iterator[Make]:
    with engines() as build:
        yield build


def test_start_and_stop() -> None:
    engine = scripted_engine(start=False)
    with pytest.raises(RequestRejected, match="the engine is new") as refused:
        engine.submit(request())
    assert refused.value.status == 503
    engine.start()
    with pytest.raises(JumarError, match="started once"):
        engine.start()
    assert run_alone(engine, [1, 2], temperature=0.0, max_tokens=1) == [END]
    thread = engine._thread
    engine.shutdown()
    assert engine.state == "stopped" and thread is not None and not thread.is_alive()
    with pytest.raises(RequestRejected, match="the engine is stopped") as refused:
        engine.submit(request())
    assert refused.value.status == 503 and refused.value.retry_after
    engine.shutdown()


def test_draining_takes_nothing_new_and_ends_what_it_has(make: Make) -> None:
    gate = Gate()
    engine = make(gate=gate, max_num_seqs=1)
    running, waiting = engine.submit(request(script=(65,) * 5)), engine.submit(request(script=(66,) * 5))
    gate.arrive()
    engine.drain()
    assert engine.state == "draining"
    with pytest.raises(RequestRejected, match="draining") as refused:
        engine.submit(request())
    assert refused.value.status == 503
    assert not engine.wait_idle(0.02)
    gate.open()
    assert tokens(drain(running)) == [65] * 5 + [END] and tokens(drain(waiting)) == [66] * 5 + [END]
    assert engine.wait_idle(20)


def test_idle_means_that_nothing_runs_or_waits(make: Make) -> None:
    gate = Gate()
    engine = make(gate=gate)
    assert engine.wait_idle(0)
    handle = engine.submit(request(script=(65,)))
    assert not engine.wait_idle(0)
    gate.open()
    drain(handle)
    assert engine.wait_idle(20)


def test_shutdown_gives_everyone_a_last_event(make: Make) -> None:
    gate = Gate()
    engine = make(gate=gate, max_num_seqs=2, kv_blocks=20)
    told: list[FinishedRequest] = []
    engine.observers.append(told.append)
    handles = [engine.submit(request(script=(65,) * 200, n=1 + n % 2, label=str(n))) for n in range(4)]
    gate.arrive()
    gate.let(2)
    handles.append(engine.submit(request(script=(65,) * 9, label="4")))  # still in the inbox
    stopping = threading.Thread(target=engine.shutdown, args=("we close at six",))
    stopping.start()
    wait_until(lambda: engine._stop)
    gate.open()
    stopping.join(20)
    assert engine.state == "stopped"
    for n, handle in enumerate(handles):
        events = drain(handle, timeout=1)
        for index in range(1 + n % 2 if n < 4 else 1):
            assert (last(events, index).finish_reason, last(events, index).error) == ("error", "we close at six")
    assert sorted(done.label for done in told) == ["0", "1", "2", "3", "4"]
    assert engine.stats().blocks_free == engine.stats().blocks_total and engine._live == 0


def test_shutdown_of_an_engine_without_a_thread_gives_last_events_too() -> None:
    engine = scripted_engine(thread=False)
    handle = engine.submit(request(script=(65,) * 9))
    engine.step()
    waiting = engine.submit(request())
    engine.shutdown("enough")
    assert [e.error for e in (last(drain(handle, 1)), last(drain(waiting, 1)))] == ["enough", "enough"]


class Broken(Exception):
    """Planted in a step."""


@pytest.mark.parametrize("where", ["filling", "computing", "accounting"])
def test_a_step_that_fails_ends_every_request_and_the_engine(make: Make, where: str) -> None:
    gate = Gate()
    engine = make(gate=gate, max_num_seqs=2)
    told: list[FinishedRequest] = []
    engine.observers.append(told.append)
    handles = [engine.submit(request(script=(65,) * 9, label=str(n), n=1 + n % 2)) for n in range(4)]
    gate.arrive()
    gate.let(2)
    model: Any = engine.model

    def broken(*args: Any) -> Any:
        raise Broken("planted")

    if where == "filling":
        model.fill = broken
    elif where == "computing":
        model.hidden = broken
    else:
        engine._results.update = broken  # type: ignore[method-assign]
    gate.open()
    for n, handle in enumerate(handles):
        events = drain(handle)
        for index in range(1 + n % 2):
            assert last(events, index).finish_reason == "error"
            assert "the engine failed" in (last(events, index).error or "")
    wait_until(lambda: engine.state == "failed")
    assert engine.failure == "Broken: planted" and engine.stalled_for() == 0.0
    assert sorted(done.label for done in told) == ["0", "1", "2", "3"]
    with pytest.raises(RequestRejected, match="failed: Broken: planted") as refused:
        engine.submit(request())
    assert refused.value.status == 503
    assert engine.wait_idle(20)
    engine.shutdown()
    assert engine.state == "failed", "a failure is not forgotten at the end"


@pytest.mark.parametrize("fate", ["failed", "stopped"])
def test_a_request_that_meets_the_end_of_the_engine_gets_a_reply(make: Make, fate: str) -> None:
    """The engine ends between the first look at its state and the request's place in the queue."""
    engine = make()
    make_sequences = engine._make_sequences

    def meanwhile(*args: Any) -> None:
        make_sequences(*args)
        if fate == "failed":
            model: Any = engine.model
            model.fill = None
            engine._inbox.append(victim)
            engine._wake.set()
            wait_until(lambda: engine.state == "failed" and engine._idle.is_set())
        else:
            engine.shutdown("closing")

    victim = RequestHandle(engine, 10**6, request())
    make_sequences(victim, request())
    engine._make_sequences = meanwhile  # type: ignore[method-assign]
    try:
        handle = engine.submit(request())
    except RequestRejected as refused:
        assert refused.status == 503
    else:
        assert last(drain(handle, timeout=2)).finish_reason == "error"


def test_a_step_that_hangs_is_seen_from_outside(make: Make) -> None:
    gate = Gate()
    engine = make(gate=gate)
    assert engine.stalled_for() == 0.0
    handle = engine.submit(request(script=(65,)))
    gate.arrive()
    first = engine.stalled_for()
    time.sleep(0.2)
    before = engine.stalled_for()
    assert before >= first + 0.2
    gate.let()
    assert engine.stalled_for() < before, "every step counts from its own beginning"
    gate.open()
    drain(handle)
    assert engine.wait_idle(20) and engine.stalled_for() == 0.0


def test_two_engines_in_one_process(make: Make) -> None:
    """Neither sees anything of the other: queues, caches, seeds, failure."""
    one = make(script=lambda seq: [65] * 20, block_size=16)
    two = make(script=lambda seq: [66] * 20, block_size=8, max_num_seqs=2)
    prompt = tuple(range(40))
    handles = [(engine.submit(request(prompt)), token) for _ in range(6) for engine, token in ((one, 65), (two, 66))]
    for handle, token in handles:
        assert tokens(drain(handle)) == [token] * 20 + [END]
    root = [engine.scheduler.hasher.root("") for engine in (one, two)]
    assert root[0] != root[1]
    model: Any = one.model
    model.fill = None
    assert last(drain(one.submit(request()))).finish_reason == "error"
    assert two.state == "ready" and tokens(drain(two.submit(request(prompt)))) == [66] * 20 + [END]


# ---------------------------------------------------------------- counting


def test_observers_hear_of_every_request_once(make: Make) -> None:
    engine = make(block_size=16)
    told: list[FinishedRequest] = []
    engine.observers.append(told.append)
    prompt = tuple(range(20))
    before = time.monotonic()
    drain(engine.submit(request(prompt, script=(65, 66), n=2, label="a")))
    drain(engine.submit(request(prompt, script=(65,) * 9, max_tokens=3, label="b")))
    assert engine.wait_idle(20)
    a, b = told
    assert (a.label, a.reason, a.prompt_tokens, a.output_tokens, a.cached_tokens, a.choices) == (
        "a",
        "stop",
        20,
        6,
        0,
        2,
    )
    assert (b.label, b.reason, b.prompt_tokens, b.output_tokens, b.cached_tokens, b.choices) == (
        "b",
        "length",
        20,
        3,
        16,
        1,
    )
    for done in told:
        assert before <= done.arrived <= done.scheduled <= done.first_token <= done.finished <= time.monotonic()


def test_a_choice_that_its_caller_ended_is_no_request_given_up(make: Make) -> None:
    """A stop string in the text of the last choice: the request stopped. Only an abort of all of it is one."""
    gate = Gate()
    engine = make(gate=gate)
    told: dict[str, str] = {}
    engine.observers.append(lambda done: told.update({done.label: done.reason}))
    complete, dropped = (engine.submit(request(script=(65,) * 50, n=2, label=name)) for name in ("complete", "dropped"))
    gate.arrive()
    gate.let(2)
    for index in range(2):
        complete.abort_choice(index)
    dropped.abort()
    gate.open()
    drain(complete), drain(dropped)
    assert engine.wait_idle(20) and told == {"complete": "stop", "dropped": "abort"}


def test_a_request_that_never_ran_says_so(make: Make) -> None:
    gate = Gate()
    engine = make(gate=gate, max_num_seqs=1)
    told: dict[str, FinishedRequest] = {}
    engine.observers.append(lambda done: told.update({done.label: done}))
    first = engine.submit(request(script=(65,) * 4, n=2, label="half"))
    gate.arrive()
    second = engine.submit(request(label="never"))
    second.abort()
    first.abort_choice(1)
    gate.open()
    drain(first), drain(second)
    assert engine.wait_idle(20)
    assert (told["never"].scheduled, told["never"].first_token, told["never"].reason) == (0.0, 0.0, "abort")
    half = told["half"]
    assert half.arrived <= half.scheduled <= half.first_token, "one of its choices never ran, the request did"


def test_there_is_no_first_token_where_none_was_wanted(make: Make) -> None:
    engine = make()
    told: list[FinishedRequest] = []
    engine.observers.append(told.append)
    drain(engine.submit(request(max_tokens=0)))
    assert engine.wait_idle(20)
    assert told[0].first_token == 0.0 and told[0].scheduled > 0.0


def test_an_observer_that_fails_does_not_end_the_engine(make: Make) -> None:
    engine = make()
    told: list[str] = []

    def faulty(done: FinishedRequest) -> None:
        told.append(done.label)
        raise Broken("in a metric")

    engine.observers += [faulty, lambda done: told.append(done.label)]
    assert tokens(drain(engine.submit(request(script=(65,), label="a")))) == [65, END]
    assert tokens(drain(engine.submit(request(script=(66,), label="b")))) == [66, END]
    assert engine.wait_idle(20) and engine.state == "ready" and told == ["a", "a", "b", "b"]


def test_counters_and_gauges(make: Make) -> None:
    gate = Gate()
    engine = make(gate=gate, block_size=16, max_num_seqs=2)
    empty = engine.stats()
    assert (empty.running, empty.waiting, empty.blocks_free, empty.kv_usage) == (0, 0, empty.blocks_total, 0.0)
    prompt = tuple(range(20))
    handles = [engine.submit(request(prompt, script=(65,) * 4)) for _ in range(3)]
    gate.arrive()
    gate.let(2)
    busy = engine.stats()
    assert (busy.running, busy.waiting) == (2, 1)
    assert busy.blocks_total - busy.blocks_free == 4 and busy.kv_usage == pytest.approx(4 / 64)
    assert busy.steps == 2 and busy.last_step_tokens == 2 and busy.step_tokens == 42
    assert busy.prompt_tokens == 40 and busy.generated_tokens == 4
    gate.open()
    for handle in handles:
        drain(handle)
    assert engine.wait_idle(20)
    done = engine.stats()
    assert (done.running, done.waiting, done.blocks_free) == (0, 0, done.blocks_total)
    assert done.prompt_tokens == 60 and done.generated_tokens == 15
    assert done.prefix_queries == 60 and done.prefix_hits == 16 and done.step_tokens == 60 - 16 + 12
    assert (empty.steps, busy.steps) == (0, 2), "a snapshot does not change"


def test_waiting_counts_what_the_engine_has_not_seen_yet(make: Make) -> None:
    gate = Gate()
    engine = make(gate=gate)
    engine.submit(request(script=(65,)))
    gate.arrive()
    engine.submit(request(n=3))
    assert engine.stats().waiting == 3
