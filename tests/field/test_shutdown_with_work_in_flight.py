"""SIGTERM with work in flight, and an engine that breaks or hangs.

https://github.com/vllm-project/vllm/issues/24885 and https://github.com/vllm-project/vllm/pull/34730 (drain on
SIGTERM), https://github.com/kserve/kserve/issues/5496, https://github.com/sgl-project/sglang/issues/1838.
"""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.process import Child, Stream, until
from tests.support.serve_scripted import FAULTY_PROMPT


def test_running_streams_finish_and_the_exit_is_clean() -> None:
    with Child(step=0.01) as child:
        streams = [Stream(child, 200, f"prompt {i}") for i in range(4)]
        assert all(stream.first.wait(10) for stream in streams)
        assert child.health() == 200
        child.terminate()
        assert until(lambda: child.health() == 503, 1.0), "not ready at once"
        assert child.request("GET", "/health/live").status == 200
        refused = child.request("POST", "/v1/completions", {"prompt": "late"})
        assert refused.status == 503
        assert int(refused.headers["Retry-After"]) >= 1
        assert set(json.loads(refused.read())["error"]) == {"message", "type", "param", "code"}
        for stream in streams:
            stream.wait()
            assert stream.done and stream.error is None
            assert stream.text == "x" * 200
        assert child.wait() == 0


def test_past_the_limit_the_rest_ends_with_an_error_event() -> None:
    with Child(step=0.01, server={"drain_timeout": 0.5}) as child:
        streams = [Stream(child, 900, f"prompt {i}") for i in range(4)]
        assert all(stream.first.wait(10) for stream in streams)
        started = time.monotonic()
        child.terminate()
        for stream in streams:
            stream.wait(5)
            assert stream.error is not None and "shutting down" in stream.error["message"]
            assert stream.done, "an error event and an end, no silent cut"
            assert 0 < len(stream.text) < 900
        assert child.wait(5) == 0
        assert time.monotonic() - started < 4


def test_a_request_that_waits_for_its_whole_reply_gets_503_past_the_limit() -> None:
    with Child(step=0.02, server={"drain_timeout": 0.3}) as child, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(child.request, "POST", "/v1/completions", {"prompt": "p", "max_tokens": 900})
        assert until(lambda: b'num_requests_running{engine="0",model_name="model"} 1' in child.metrics())
        child.terminate()
        response = waiting.result(10)
        assert response.status == 503
        assert "shutting down" in json.loads(response.read())["error"]["message"]
        assert child.wait(5) == 0


def test_a_second_signal_ends_at_once() -> None:
    with Child(step=0.01) as child:
        stream = Stream(child, 900)
        assert stream.first.wait(10)
        child.terminate()
        assert until(lambda: child.health() == 503)
        started = time.monotonic()
        child.terminate()
        assert child.wait(3) == 128 + 15
        assert time.monotonic() - started < 1


def test_idle_ends_at_once() -> None:
    with Child() as child:
        started = time.monotonic()
        child.terminate()
        assert child.wait(5) == 0
        assert time.monotonic() - started < 2


@pytest.mark.parametrize("fault", ["raise", "hang"])
def test_a_step_that_fails_or_hangs(fault: str) -> None:
    """/health turns to 503, every stream ends with an error, and the exit code tells the supervisor."""
    with Child(step=0.01, fault=fault, server={"watchdog_timeout": 1.0}) as child:
        streams = [Stream(child, 900, f"prompt {i}") for i in range(3)]
        assert all(stream.first.wait(10) for stream in streams)
        streams.append(Stream(child, 5, FAULTY_PROMPT))
        started = time.monotonic()
        assert until(lambda: child.health() == 503, 5.0)
        live = child.request("GET", "/health/live")
        assert live.status == 503 and b"planted" not in live.read()
        for stream in streams:
            stream.wait(5)
            assert stream.error is not None and stream.error["message"]
        assert child.wait(5) == 3
        assert time.monotonic() - started < 1.0 + 4
        assert "planted fault" in child.log if fault == "raise" else "watchdog_timeout" in child.log
        assert all("planted" not in s.error["message"] for s in streams), "a client is told nothing about the inside"
