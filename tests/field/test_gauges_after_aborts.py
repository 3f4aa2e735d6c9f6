"""Metrics tell the truth after every client has gone at once, and do not grow with what clients send.

Gauges froze at 106 running requests and 90 % of the KV cache, and routers sent no traffic ever again; aborted requests
were never counted; totals and histograms disagreed. vllm-project/vllm#29928, vllm-project/vllm#22545,
vllm-project/vllm#31503, vllm-project/vllm#55634.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any

import pytest

from runtime.scheduler import Plan
from server.metrics import REASONS
from tests.support.engines import scripted_engine
from tests.support.pace import Pace
from tests.support.service import HOST, Running, eventually, samples, say, script_or

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


class Work:
    """What the steps were given to compute."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.seen: set[int] = set()

    def __call__(self, plan: Plan) -> None:
        for seq, start, count in zip(plan.seqs, plan.starts, plan.counts, strict=True):
            self.seen.add(seq.id)
            self.prompt_tokens += max(0, min(start + count, seq.prompt_len) - start)


@pytest.fixture
def pace() -> Pace:
    return Pace()


@pytest.fixture
def service(pace: Pace) -> Iterator[Running]:
    """At most 8 run at once, in pieces of 8 prompt tokens."""
    engine = scripted_engine(
        script_or("x" * 1000), on_step=pace, max_len=1200, kv_blocks=400, max_num_seqs=8, chunk_size=8,
        max_num_batched_tokens=16,
    )  # fmt: skip
    with Running(engine) as running:
        yield running


def scrape(service: Running) -> str:
    return service.call("GET", "/metrics")[2].decode()


def gauges(service: Running) -> list[float]:
    return [service.metric(name) for name in GAUGES]


def reasons(service: Running) -> dict[str, float]:
    return {reason: service.metric("request_success_total", finished_reason=reason) for reason in REASONS}


@pytest.mark.parametrize("stream", [True, False])
def test_all_clients_gone_at_once(service: Running, pace: Pace, stream: bool) -> None:
    """Some run, one is in its prefill, most wait. Nothing is sent afterwards that could put the gauges right."""
    status, reply = service.post(TEXT, {"prompt": [7] * 40, "max_tokens": 5})
    assert status == 200
    before, prompts = reasons(service), service.metric("prompt_tokens_total")
    assert prompts == reply["usage"]["prompt_tokens"] == 40
    work = Work()
    pace.look, pace.delay = work, 0.01
    length = 33
    socks = [service.send({"prompt": [9 + i] * length, "max_tokens": 1000, "stream": stream}) for i in range(20)]
    assert eventually(lambda: gauges(service)[:2] == [8, 12])
    assert gauges(service)[2] > 0
    for sock in socks:
        sock.close()
    assert eventually(lambda: gauges(service) == [0, 0, 0], 5), gauges(service)
    assert reasons(service) == before | {"abort": before["abort"] + 20}
    # prompt tokens that were computed before the abort count
    assert service.metric("prompt_tokens_total") - prompts == work.prompt_tokens > 7 * length
    families = ("e2e_request_latency_seconds_count", "request_prompt_tokens_count", "request_generation_tokens_count")
    assert {service.metric(name) for name in families} == {21}
    assert service.metric("request_prompt_tokens_sum") == 40 + 20 * length
    assert service.metric("request_generation_tokens_sum") == service.metric("generation_tokens_total")
    assert service.metric("request_queue_time_seconds_count") == 1 + len(work.seen), "only those that ran"


def test_the_documentation_says_what_prompt_tokens_counts(service: Running) -> None:
    line = next(x for x in scrape(service).splitlines() if x.startswith("# HELP jumar:prompt_tokens_total"))
    assert "aborted requests included" in line


def test_an_aborted_prompt_counts_as_far_as_it_was_computed(service: Running, pace: Pace) -> None:
    pace.delay = 0.03
    sock = service.send({"prompt": [5 + i for i in range(400)], "max_tokens": 5, "stream": True})  # 50 steps
    assert eventually(lambda: service.metric("kv_cache_usage_perc") > 2 / 400)
    sock.close()
    assert eventually(lambda: gauges(service) == [0, 0, 0], 5)
    tokens = service.metric("prompt_tokens_total")
    assert 0 < tokens < 400 and tokens % 8 == 0
    assert tokens == service.metric("iteration_tokens_total_sum")


@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_string_is_no_abort(service: Running, stream: bool) -> None:
    """The server finds it and ends the engine's work early; for the client, and the count, the request is done."""
    body = {"prompt": "p", "extra": say("one two three"), "stop": "two", "max_tokens": 900}
    for fields in ({}, {"n": 3}, {"ignore_eos": True}):
        if stream:
            service.stream(TEXT, {**body, **fields})
        else:
            assert service.post(TEXT, {**body, **fields})[0] == 200
    assert eventually(lambda: gauges(service) == [0, 0, 0])
    assert reasons(service) == {"stop": 3, "length": 0, "abort": 0, "error": 0}


def test_a_thousand_requests_make_no_new_series(service: Running) -> None:
    """Users, ids, agents, and model names that do not exist, all different."""
    connection = http.client.HTTPConnection(HOST, service.port, timeout=30)

    def ask(i: int) -> int:
        body: dict[str, Any] = {"user": f"user-{i}", "max_tokens": 1, "extra": say("x"), "metadata": {"k": f"v{i}"}}
        path = CHAT if i % 4 == 0 else TEXT
        body |= {"messages": [{"role": "user", "content": f"hi {i}"}]} if path == CHAT else {"prompt": f"hi {i}"}
        if i % 2:
            body["model"] = f"typo-{i}"
        headers = {"Content-Type": "application/json", "X-Request-Id": f"id-{i}", "User-Agent": f"agent/{i}"}
        connection.request("POST", path, json.dumps(body), headers)
        response = connection.getresponse()
        response.read()
        return response.status

    assert ask(0) == 200 and ask(1) == 404
    before = set(samples(scrape(service)))
    size = len(scrape(service))
    for i in range(2, 1000):
        assert ask(i) == (404 if i % 2 else 200)
    connection.close()
    text = scrape(service)
    assert set(samples(text)) == before
    assert len(text) < size + 2000, "only the numbers got longer"
    assert service.metric("request_success_total", finished_reason="length") == 500
    assert gauges(service) == [0, 0, 0]
