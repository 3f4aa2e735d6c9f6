"""Calls of an engine that runs in its thread, and a gate that lets its steps through one by one, so that such a test
depends on no clock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from runtime.api import Event, GenerationRequest, SamplingParams
from runtime.engine import Engine
from runtime.scheduler import Plan
from tests.support.engines import scripted_engine, tiny_engine, tiny_tokenizer

END = tiny_tokenizer().token_id("</s>")
Make = Callable[..., Engine]


class Gate:
    """``on_step`` of a scripted model: each step waits here until it is let through.

    plans: (sequence ids, tokens of each) of the steps that have come this far, the one at the gate included.
    """

    def __init__(self) -> None:
        self.plans: list[tuple[list[int], list[int]]] = []
        self._open = threading.Event()
        self._permits = threading.Semaphore(0)
        self._arrived = threading.Semaphore(0)

    def __call__(self, plan: Plan) -> None:
        self.plans.append(([seq.id for seq in plan.seqs], list(plan.counts)))
        self._arrived.release()
        while not self._open.is_set():
            if self._permits.acquire(timeout=0.01):
                return

    def arrive(self, timeout: float = 20.0) -> None:
        """Wait until the next step stands at the gate."""
        assert self._arrived.acquire(timeout=timeout), "no step came"

    def let(self, steps: int = 1) -> None:
        """Let the step at the gate through and wait for the next, ``steps`` times. The last stays at the gate."""
        for _ in range(steps):
            self._permits.release()
            self.arrive()

    def open(self) -> None:
        """From now on nobody waits."""
        self._open.set()


def wait_until(condition: Callable[[], bool], timeout: float = 20.0) -> None:
    """Poll until it holds; fail when it does not in time (seconds)."""
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "it did not come to hold in time"
        time.sleep(0.001)


@contextmanager
def engines() -> Iterator[Make]:
    """Makes engines (scripted ones, ``tiny=True`` for the tiny model) and shuts them down at the end.

    gate: their ``on_step``, opened before that.
    """
    made: list[tuple[Engine, Gate | None]] = []

    def make(*, gate: Gate | None = None, tiny: bool = False, **settings: Any) -> Engine:
        if gate is not None:
            settings["on_step"] = gate
        engine = tiny_engine(**settings) if tiny else scripted_engine(**settings)
        made.append((engine, gate))
        return engine

    try:
        yield make
    finally:
        for engine, gate in made:
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
