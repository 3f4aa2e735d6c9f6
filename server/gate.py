"""Who may come in: a bounded number of requests that do work, none while the service drains or has failed."""

from __future__ import annotations

import threading

from device.errors import RequestRejected


class Gate:
    """Counts the requests that hold a thread for long (generation, tokenisation). Thread-safe.

    capacity: at most so many at once; one more is refused with 429, so that the threads beyond them stay free for
        /health. ``draining`` and ``failure`` are set by the service and read by everyone.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.draining = False
        self.failure: str | None = None
        self.retry_after = 5.0
        """Seconds that a refused client is told to wait while the service drains."""
        self._active = 0
        self._changed = threading.Condition()

    @property
    def active(self) -> int:
        """Requests inside."""
        return self._active

    @property
    def ready(self) -> bool:
        """Whether new work is taken."""
        return not self.draining and self.failure is None

    def enter(self) -> None:
        """Take a place, to be given back with ``leave``. RequestRejected 503 or 429 when there is none."""
        self.check()
        with self._changed:
            if self._active >= self.capacity:
                raise RequestRejected(
                    f"all {self.capacity} places for requests are taken; try again later",
                    code="rate_limit_exceeded",
                    status=429,
                    retry_after=1.0,
                )
            self._active += 1

    def check(self) -> None:
        """RequestRejected 503 when no new work is taken."""
        if self.failure is not None:
            raise RequestRejected(f"the engine has failed: {self.failure}", status=503, retry_after=self.retry_after)
        if self.draining:
            raise RequestRejected(
                "the service is shutting down and takes no new requests", status=503, retry_after=self.retry_after
            )

    def leave(self) -> None:
        """Give a place back."""
        with self._changed:
            self._active -= 1
            self._changed.notify_all()

    def wait_idle(self, timeout: float) -> bool:
        """Wait until nobody is inside; False after ``timeout`` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._active == 0, timeout)
