"""The engine's thread and its callers: order of events, aborts at any time, capacity, draining, counting."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from device.errors import JumarError, RequestRejected
from runtime.api import Event, GenerationRequest, SamplingParams
from runtime.engine import Engine, RequestHandle
from runtime.stats import FinishedRequest
from tests.support.engines import drain, run_alone, scripted_engine, tiny_engine, tiny_tokenizer
from tests.support.gate import Gate, wait_until

END = tiny_tokenizer().token_id("</s>")
Make = Callable[..., Engine]


@pytest.fixture
def make() -> Iterator[Make]:
    """Scripted engines that are shut down at the end; at most one gate each, opened before that."""
    engines: list[tuple[Engine, Gate | None]] = []

    def build(*, gate: Gate | None = None, tiny: bool = False, **settings: Any) -> Engine:
        if gate is not None:
            settings["on_step"] = gate
        engine = tiny_engine(**settings) if tiny else scripted_engine(**settings)
        engines.append((engine, gate))
        return engine

    yield build
    for engine, gate in engines:
        if gate is not None:
            gate.open()
        engine.shutdown()


def request(prompt: tuple[int, ...] = (1, 2, 3), script: tuple[int, ...] = (), **params: Any) -> GenerationRequest:
    params.setdefault("temperature", 0.0)
    label = params.pop("label", "")
    return GenerationRequest(prompt, SamplingParams(**params), label=label, extra={"script": script})


def tokens(events: list[Event], index: int = 0) -> list[int]:
    return [t for event in events if event.index == index for t in event.tokens]


def last(events: list[Event], index: int = 0) -> Event:
    ends = [event for event in events if event.index == index and event.finish_reason is not None]
    assert len(ends) == 1, "each choice ends once"
    assert [event for event in events if event.index == index][-1] is ends[0], "something came after the end"
    return ends[0]


# ---------------------------------------------------------------- what comes out


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


# ---------------------------------------------------------------- admission


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


# ---------------------------------------------------------------- life and death


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
    time.sleep(0.05)
    assert engine.stalled_for() >= first + 0.05
    gate.let()
    assert engine.stalled_for() < 0.05, "every step counts from its own beginning"
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
