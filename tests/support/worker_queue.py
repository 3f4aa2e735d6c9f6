"""One worker thread that runs jobs in the order they were given: the stream of the toy device."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from device.errors import DeviceError


class Job:
    """A job under way. ``result()`` waits for it, without the GIL, and returns or raises what it did."""

    __slots__ = ("_done", "_error", "_fn", "_value")

    def __init__(self, fn: Callable[[], Any]) -> None:
        self._fn: Callable[[], Any] | None = fn
        self._value: Any = None
        self._error: BaseException | None = None
        self._done = threading.Lock()
        self._done.acquire()

    def run(self) -> None:
        fn = self._fn
        self._fn = None
        try:
            assert fn is not None
            self._value = fn()
        except BaseException as error:  # handed to whoever waits
            self._error = error
        self._done.release()

    def result(self) -> Any:
        with self._done:
            if self._error is not None:
                raise self._error
            return self._value


class SerialQueue:
    """Jobs run in call order on one daemon thread."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, fn: Callable[[], Any]) -> Job:
        if self._closed:
            raise DeviceError("the device is closed")
        job = Job(fn)
        self._jobs.put(job)
        return job

    def run(self, fn: Callable[[], Any]) -> Any:
        """Run after the jobs given so far, and wait for it; at once when called from a job."""
        if threading.current_thread() is self._thread:
            return fn()
        return self.submit(fn).result()

    def close(self) -> None:
        """End the thread after the jobs given so far."""
        self._closed = True
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run()
            del job
