"""Steps of an engine let through one by one, so that a test of its thread depends on no clock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from runtime.scheduler import Plan


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
