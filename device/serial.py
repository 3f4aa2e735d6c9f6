"""Jobs in call order on a device whose work is the host's own: whoever needs a result computes it.

A worker thread would have to be woken, and to get the interpreter's lock, before a step can begin; the thread that
waits for the step is awake and has nothing else to do.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from device.errors import DeviceError


class Job:
    """A job that was given. ``result()`` runs it and all before it, unless that is done, and returns or raises what it
    did."""

    __slots__ = ("_error", "_fn", "_queue", "_value")

    def __init__(self, queue: SerialQueue, fn: Callable[[], Any]) -> None:
        self._queue = queue
        self._fn: Callable[[], Any] | None = fn
        self._value: Any = None
        self._error: BaseException | None = None

    @property
    def done(self) -> bool:
        return self._fn is None

    def run(self) -> None:
        """Once, by the queue."""
        assert self._fn is not None
        try:
            self._value = self._fn()
        except BaseException as error:  # handed to whoever waits
            self._error = error
        self._fn = None

    def result(self) -> Any:
        if self._fn is not None:
            self._queue.finish(self)
        if self._error is not None:
            raise self._error
        return self._value


class SerialQueue:
    """Jobs run in call order, one at a time, on the thread that waits for one of them or for one behind it."""

    def __init__(self) -> None:
        self._jobs: deque[Job] = deque()
        self._lock = threading.Lock()
        self._runner = 0
        self._closed = False

    def submit(self, fn: Callable[[], Any]) -> Job:
        """Returns at once. DeviceError after ``close``."""
        if self._closed:
            raise DeviceError("the device is closed")
        job = Job(self, fn)
        self._jobs.append(job)
        return job

    def run(self, fn: Callable[[], Any]) -> Any:
        """Run after the jobs given so far; at once when called from a job."""
        if self._runner == threading.get_ident():
            return fn()
        return self.submit(fn).result()

    def finish(self, job: Job) -> None:
        """Run jobs until this one is done."""
        with self._lock:
            self._runner = threading.get_ident()
            try:
                while not job.done:
                    self._jobs.popleft().run()
            finally:
                self._runner = 0

    def close(self, last: Callable[[], Any]) -> None:
        """Run the jobs given so far and then ``last``; take no more. Once."""
        if not self._closed:
            job = self.submit(last)
            self._closed = True
            job.result()
