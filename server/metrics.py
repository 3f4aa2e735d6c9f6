"""Prometheus metrics: vLLM's names and meanings under the prefix ``jumar:``, on request under ``vllm:`` as well.

Gauges and counters are read from the engine's statistics when somebody scrapes, so nothing is counted twice and a gauge
cannot be left behind by a cancelled request. Histograms are filled by HTTP worker threads. The labels are the served
model's name, ``engine="0"`` (there is one) and, for ``request_success``, the finish reason: nothing that a client sends
becomes a label, so the number of series is fixed.

Meanings that are easily mistaken:

* ``prompt_tokens_total`` counts prompt tokens whose KV was computed or taken from the prefix cache, those of requests
  that were aborted later included. ``request_prompt_tokens`` is observed once per finished request.
* ``request_success_total`` counts every finished request by its reason, ``abort`` and ``error`` too (vLLM's name).
* ``kv_cache_usage_perc`` is 0..1. Blocks that only the prefix cache keeps count as free.
* ``iteration_tokens_total`` has no buckets but +Inf: the engine sums, it does not sort. Its mean is right.
"""

from __future__ import annotations

import bisect
import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from runtime.stats import EngineStats, FinishedRequest

if TYPE_CHECKING:
    from prometheus_client.core import Metric

REASONS = ("stop", "length", "abort", "error")

_SHORT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0)
_FIRST_TOKEN = (*_SHORT, 40.0, 80.0, 160.0, 640.0, 2560.0)
_BETWEEN = (
    0.001,
    0.002,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    10.0,
    40.0,
)
_SECONDS = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0)
_REQUEST = (*_SECONDS, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)


class Histogram:
    """Counts in buckets and a sum. Thread-safe; one observation costs about a microsecond."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self._counts = [0] * (len(self.bounds) + 1)
        self._sum = 0.0
        self._lock = threading.Lock()

    def observe(self, value: float) -> None:
        place = bisect.bisect_left(self.bounds, value)
        with self._lock:
            self._counts[place] += 1
            self._sum += value

    def snapshot(self) -> tuple[list[tuple[str, float]], float]:
        """(cumulative buckets as (le, count), sum)."""
        with self._lock:
            counts, total = list(self._counts), self._sum
        running = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*self.bounds, math.inf), counts, strict=True):
            running += count
            buckets.append(("+Inf" if bound == math.inf else repr(float(bound)), float(running)))
        return buckets, total


def token_bounds(limit: int) -> list[float]:
    """1, 2, 5, 10, 20, 50, ... up to ``limit``: bucket bounds for counts of tokens."""
    bounds = [float(m * 10**e) for e in range(len(str(limit))) for m in (1, 2, 5)]
    return [b for b in bounds if b <= limit]


class Metrics:
    """Collects what ``/metrics`` shows. ``stats`` is called at each scrape.

    prefixes: name prefixes, each of which gets the whole set.
    """

    def __init__(
        self,
        stats: Callable[[], EngineStats],
        model: str,
        max_model_len: int,
        prefixes: Sequence[str] = ("jumar",),
        info: dict[str, str] | None = None,
    ) -> None:
        self._stats = stats
        self._model = model
        self._prefixes = tuple(prefixes)
        self._info = dict(info or {})
        self._finished: deque[FinishedRequest] = deque()
        self._fold = threading.Lock()
        self._reasons = dict.fromkeys(REASONS, 0)
        tokens = token_bounds(max_model_len)
        self._histograms: dict[str, tuple[str, Histogram]] = {
            "time_to_first_token_seconds": (
                "Time from a request's arrival to its first token.",
                Histogram(_FIRST_TOKEN),
            ),
            "inter_token_latency_seconds": (
                "Time between two deliveries of tokens to one choice.",
                Histogram(_BETWEEN),
            ),
            "request_time_per_output_token_seconds": (
                "Mean time per output token of a request, the first left out.",
                Histogram(_BETWEEN),
            ),
            "e2e_request_latency_seconds": ("Time from a request's arrival to its end.", Histogram(_REQUEST)),
            "request_queue_time_seconds": ("Time a request waited before it first ran.", Histogram(_REQUEST)),
            "request_inference_time_seconds": ("Time from first running to the end.", Histogram(_REQUEST)),
            "request_prefill_time_seconds": ("Time from first running to the first token.", Histogram(_REQUEST)),
            "request_decode_time_seconds": ("Time from the first token to the end.", Histogram(_REQUEST)),
            "request_prompt_tokens": ("Prompt tokens of a finished request.", Histogram(tokens)),
            "request_generation_tokens": ("Output tokens of a finished request, all choices.", Histogram(tokens)),
            "request_params_n": ("Choices asked for.", Histogram((1.0, 2.0, 5.0, 10.0, 20.0))),
            "request_params_max_tokens": ("max_tokens asked for.", Histogram(tokens)),
        }

    # ------------------------------------------------------------ observing

    def finished(self, request: FinishedRequest) -> None:
        """An engine observer: runs on the engine thread, so it only puts the record aside."""
        self._finished.append(request)

    def observe(self, name: str, value: float) -> None:
        """One observation of the histogram ``name`` (without prefix)."""
        self._histograms[name][1].observe(value)

    def observe_params(self, n: int, max_tokens: int | None) -> None:
        """What an accepted request asked for."""
        self.observe("request_params_n", n)
        if max_tokens is not None:
            self.observe("request_params_max_tokens", max_tokens)

    def fold(self) -> None:
        """Count the finished requests put aside; called by worker threads and at a scrape."""
        with self._fold:
            while self._finished:
                self._count(self._finished.popleft())

    def _count(self, request: FinishedRequest) -> None:
        reason = request.reason if request.reason in self._reasons else "error"
        self._reasons[reason] += 1
        self.observe("e2e_request_latency_seconds", request.finished - request.arrived)
        self.observe("request_prompt_tokens", request.prompt_tokens)
        self.observe("request_generation_tokens", request.output_tokens)
        if request.scheduled:
            self.observe("request_queue_time_seconds", request.scheduled - request.arrived)
            self.observe("request_inference_time_seconds", request.finished - request.scheduled)
        if request.scheduled and request.first_token:
            decode = request.finished - request.first_token
            self.observe("request_prefill_time_seconds", request.first_token - request.scheduled)
            self.observe("request_decode_time_seconds", decode)
            per_choice = request.output_tokens / max(1, request.choices)
            if per_choice > 1:
                self.observe("request_time_per_output_token_seconds", decode / (per_choice - 1))

    # ------------------------------------------------------------ scraping

    def collect(self) -> Iterator[Metric]:
        """The protocol of a prometheus_client collector."""
        self.fold()
        stats = self._stats()
        for prefix in self._prefixes:
            yield from self._families(prefix, stats)

    def render(self, accept: str | None = None) -> tuple[bytes, str]:
        """(body, content type) of ``/metrics``, in the format that the Accept header prefers."""
        from prometheus_client import CollectorRegistry
        from prometheus_client.exposition import choose_encoder

        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)  # any object with collect() is a collector
        encoder, content_type = choose_encoder(accept or "")
        return encoder(registry), content_type

    def _families(self, prefix: str, stats: EngineStats) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        names, values = ["model_name", "engine"], [self._model, "0"]
        gauges = {
            "num_requests_running": ("Requests that are being computed.", float(stats.running)),
            "num_requests_waiting": ("Requests that wait to be computed.", float(stats.waiting)),
            "kv_cache_usage_perc": ("Share of the KV blocks in use; 1 is all of them.", stats.kv_usage),
        }
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(f"{prefix}:{name}", text, labels=names)
            gauge.add_metric(values, value)
            yield gauge
        counters = {
            "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", stats.prefix_queries),
            "prefix_cache_hits": ("Prompt tokens found in the prefix cache.", stats.prefix_hits),
            "num_preemptions": ("Times a request lost its blocks to others.", stats.preemptions),
            "prompt_tokens": ("Prompt tokens processed, those of aborted requests included.", stats.prompt_tokens),
            "generation_tokens": ("Tokens generated.", stats.generated_tokens),
            "spec_decode_num_drafts": ("Rounds of drafting.", stats.drafts),
            "spec_decode_num_draft_tokens": ("Tokens drafted.", stats.draft_tokens),
            "spec_decode_num_accepted_tokens": ("Drafted tokens that were accepted.", stats.accepted_tokens),
            "requests_rejected": ("Requests the engine refused to admit.", stats.rejected),
        }
        for name, (text, count) in counters.items():
            counter = CounterMetricFamily(f"{prefix}:{name}", text, labels=names)
            counter.add_metric(values, float(count))
            yield counter
        success = CounterMetricFamily(
            f"{prefix}:request_success", "Finished requests by reason.", labels=[*names, "finished_reason"]
        )
        for reason, count in self._reasons.items():
            success.add_metric([*values, reason], float(count))
        yield success
        for name, (text, histogram) in self._histograms.items():
            buckets, total = histogram.snapshot()
            family = HistogramMetricFamily(f"{prefix}:{name}", text, labels=names)
            family.add_metric(values, buckets, total)
            yield family
        steps = HistogramMetricFamily(f"{prefix}:iteration_tokens_total", "Tokens computed in a step.", labels=names)
        steps.add_metric(values, [("+Inf", float(stats.steps))], float(stats.step_tokens))
        yield steps
        if self._info:
            cache = {"engine": "0", "num_gpu_blocks": str(stats.blocks_total), **self._info}
            info = GaugeMetricFamily(f"{prefix}:cache_config_info", "The KV cache's settings.", labels=list(cache))
            info.add_metric(list(cache.values()), 1.0)
            yield info
