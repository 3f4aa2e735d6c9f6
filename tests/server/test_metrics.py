"""Metrics: vLLM's names, values that agree with what happened, gauges that go back, a fixed number of series."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from runtime.stats import EngineStats, FinishedRequest
from server.metrics import Histogram, Metrics, token_bounds
from tests.support.service import Running, eventually, samples, say, scripted_service

# Names of vLLM's dashboards: https://docs.vllm.ai/en/stable/usage/metrics/
NAMES = {
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries",
    "prefix_cache_hits", "num_preemptions", "prompt_tokens", "generation_tokens", "request_success",
    "request_prompt_tokens", "request_generation_tokens", "iteration_tokens_total", "request_params_n",
    "request_params_max_tokens", "time_to_first_token_seconds", "inter_token_latency_seconds",
    "request_time_per_output_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds",
    "request_inference_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds",
    "spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens", "cache_config_info",
}  # fmt: skip


@pytest.fixture
def service() -> Iterator[Running]:
    with scripted_service(config={"vllm_metrics": True}) as running:
        yield running


def scrape(service: Running) -> str:
    return service.call("GET", "/metrics")[2].decode()


def test_names_are_vllms_under_both_prefixes(service: Running) -> None:
    found = {family.name for family in text_string_to_metric_families(scrape(service))}
    for prefix in ("jumar", "vllm"):
        assert {name.removeprefix(f"{prefix}:") for name in found if name.startswith(prefix)} >= NAMES


def test_no_vllm_names_unless_asked_for() -> None:
    with scripted_service() as service:
        assert "vllm:" not in scrape(service)


def test_values_agree_with_what_happened(service: Running) -> None:
    body = {"prompt": "p", "extra": say("abcd"), "max_tokens": 9}
    usage = [service.post("/v1/completions", body)[1]["usage"] for _ in range(3)]
    service.stream("/v1/completions", {**body, "max_tokens": 2})
    assert eventually(lambda: service.metric("request_success_total", finished_reason="stop") == 3)
    assert service.metric("request_success_total", finished_reason="length") == 1
    assert service.metric("request_success_total", finished_reason="abort") == 0
    assert service.metric("generation_tokens_total") == sum(u["completion_tokens"] for u in usage) + 2
    assert service.metric("prompt_tokens_total") == sum(u["prompt_tokens"] for u in usage) + usage[0]["prompt_tokens"]
    for name in ("e2e_request_latency_seconds", "time_to_first_token_seconds", "request_prompt_tokens",
                 "request_queue_time_seconds", "request_params_n", "request_params_max_tokens"):  # fmt: skip
        assert service.metric(f"{name}_count") == 4, name
    assert service.metric("request_generation_tokens_sum") == 17
    assert service.metric("inter_token_latency_seconds_count") == 17 - 4
    assert service.metric("iteration_tokens_total_sum") == service.engine.stats().step_tokens
    both = samples(scrape(service))
    assert all(
        both[(name.replace("jumar:", "vllm:"), labels)] == value
        for (name, labels), value in both.items()
        if name.startswith("jumar:")
    )


def test_series_do_not_grow_with_what_clients_send(service: Running) -> None:
    def ask(i: int) -> None:
        body = {"prompt": f"p{i}", "user": f"user {i}", "extra": say("x"), "max_tokens": 1, "n": 1 + i % 3}
        service.call("POST", "/v1/completions", body, {"X-Request-Id": f"id-{i}", "User-Agent": f"agent {i}"})
        service.call("POST", "/v1/completions", {**body, "model": f"typo-{i}"})
        service.call("GET", f"/nowhere/{i}")

    ask(0)
    before = set(samples(scrape(service)))
    for i in range(1, 60):
        ask(i)
    assert set(samples(scrape(service))) == before


def test_gauges_go_back_after_all_clients_left(service: Running) -> None:
    engine = service.engine
    socks = [
        service.send({"prompt": f"p{i}", "max_tokens": 200, "ignore_eos": True, "stream": True}) for i in range(20)
    ]
    for sock in socks:
        sock.recv(100)
    for sock in socks:
        sock.close()
    assert engine.wait_idle(5)
    gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    assert [service.metric(name) for name in gauges] == [0.0, 0.0, 0.0]
    done = {r: service.metric("request_success_total", finished_reason=r) for r in ("abort", "length", "stop", "error")}
    assert sum(done.values()) == 20 and done["error"] == 0


def test_open_metrics_format(service: Running) -> None:
    status, headers, body = service.call("GET", "/metrics", None, {"Accept": "application/openmetrics-text"})
    assert status == 200 and headers["content-type"].startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")


# ---------------------------------------------------------------- parts


def test_histogram() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        histogram.observe(value)
    assert histogram.snapshot() == ([("1.0", 2.0), ("2.0", 4.0), ("+Inf", 5.0)], 14.0)


def test_token_bounds() -> None:
    assert token_bounds(100) == [1, 2, 5, 10, 20, 50, 100]
    assert token_bounds(1) == [1]
    assert token_bounds(2048)[-1] == 2000


def finished(reason: str, first: float, output: int) -> FinishedRequest:
    return FinishedRequest("label", reason, 10, output, 0, 1, 100.0, 101.0 if first else 0.0, first, 106.0)


def test_times_of_finished_requests() -> None:
    metrics = Metrics(EngineStats, "m", 1000)
    metrics.finished(finished("stop", 103.0, 4))
    metrics.finished(finished("abort", 0.0, 0))  # never ran: it has no queue, prefill or decode time
    text = metrics.render()[0].decode()
    found = {name: value for (name, labels), value in samples(text).items() if name.endswith(("_sum", "_count"))}
    assert found["jumar:e2e_request_latency_seconds_sum"] == 12
    assert found["jumar:request_queue_time_seconds_sum"] == 1
    assert found["jumar:request_prefill_time_seconds_sum"] == 2
    assert found["jumar:request_decode_time_seconds_sum"] == 3
    assert found["jumar:request_time_per_output_token_seconds_sum"] == 1
    assert found["jumar:request_queue_time_seconds_count"] == 1


def test_the_engine_threads_part_is_short() -> None:
    """The observer only puts a record aside: it must not cost the engine a step."""
    metrics = Metrics(EngineStats, "m", 1000)
    record = finished("stop", 103.0, 4)
    started = time.perf_counter()
    for _ in range(10_000):
        metrics.finished(record)
    assert time.perf_counter() - started < 0.1  # 10 us each
    metrics.fold()
    assert (
        'request_success_total{engine="0",finished_reason="stop",model_name="m"} 10000.0'
        in metrics.render()[0].decode()
    )
