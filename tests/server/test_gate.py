"""The gate: how many may work at once, and who is told what when nobody may."""

from __future__ import annotations

import threading

import pytest

from device.errors import RequestRejected
from server.gate import Gate


def refusal(gate: Gate) -> RequestRejected:
    with pytest.raises(RequestRejected) as caught:
        gate.enter()
    return caught.value


def test_places_are_bounded_and_given_back() -> None:
    gate = Gate(2)
    gate.enter()
    gate.enter()
    assert gate.active == 2
    full = refusal(gate)
    assert full.status == 429 and full.retry_after and full.code == "rate_limit_exceeded"
    gate.leave()
    gate.enter()


def test_no_new_work_while_draining_or_failed() -> None:
    gate = Gate(2)
    assert gate.ready
    gate.draining = True
    assert not gate.ready and refusal(gate).status == 503 and "shutting down" in refusal(gate).message
    gate.failure = "it broke"
    assert refusal(gate).status == 503 and "it broke" in refusal(gate).message
    assert refusal(gate).retry_after and gate.active == 0


def test_waiting_until_all_have_left() -> None:
    gate = Gate(2)
    assert gate.wait_idle(0)
    gate.enter()
    assert not gate.wait_idle(0.01)
    timer = threading.Timer(0.05, gate.leave)
    timer.start()
    assert gate.wait_idle(5)
    timer.join()
