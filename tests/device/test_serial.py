"""The CPU's queue of jobs: call order, whoever waits, and errors that reach the right one."""

from __future__ import annotations

import threading
import time

import pytest

from device.errors import DeviceError
from device.serial import SerialQueue


def test_jobs_run_in_call_order_on_the_thread_that_waits() -> None:
    queue, ran = SerialQueue(), []
    jobs = [queue.submit(lambda i=i: ran.append((i, threading.get_ident()))) for i in range(4)]  # type: ignore[misc]
    assert ran == []
    jobs[2].result()
    assert ran == [(i, threading.get_ident()) for i in range(3)] and not jobs[3].done
    assert queue.run(lambda: len(ran)) == 4  # what came before, first
    jobs[0].result()
    assert len(ran) == 4


def test_an_error_is_raised_by_its_own_job_each_time_and_others_go_on() -> None:
    queue = SerialQueue()
    bad = queue.submit(lambda: 1 // 0)
    assert queue.submit(lambda: 7).result() == 7
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            bad.result()


def test_a_job_may_run_another() -> None:
    queue = SerialQueue()
    assert queue.run(lambda: queue.run(lambda: 5) + 1) == 6


def test_many_threads_wait_at_once() -> None:
    queue, ran, active = SerialQueue(), [], [0]

    def job(i: int) -> int:
        active[0] += 1
        assert active[0] == 1, "two jobs at a time"
        time.sleep(0.0005)
        ran.append(i)
        active[0] -= 1
        return i

    given = [queue.submit(lambda i=i: job(i)) for i in range(60)]  # type: ignore[misc]
    found: list[int] = []
    threads = [threading.Thread(target=lambda j=j: found.append(j.result())) for j in reversed(given)]  # type: ignore[misc]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert ran == list(range(60)) and sorted(found) == ran


def test_close_runs_what_was_given_and_takes_no_more() -> None:
    queue, ran = SerialQueue(), []
    job = queue.submit(lambda: ran.append("job"))
    queue.close(lambda: ran.append("last"))
    queue.close(lambda: ran.append("again"))
    assert ran == ["job", "last"] and job.done
    with pytest.raises(DeviceError, match="closed"):
        queue.submit(lambda: None)
