"""The arithmetic of scripts/bench/peers.py and quality.py: what counts as better, and sums over predictions."""

from __future__ import annotations

import numpy as np
import pytest

from scripts.bench.peers import Series, best_config, better, measure, rows_of
from scripts.bench.peers_engines import METRICS, Engine
from scripts.bench.quality import Sums


class Fake(Engine):
    """Says what it is told, and remembers what it was asked."""

    def __init__(self, name: str, speeds: dict[str, list[float]]) -> None:
        self.name, self.configs, self.speeds = name, tuple(speeds), speeds
        super().__init__(1)
        self.asked: list[str] = []

    def measure(self, config: str, metric: str) -> float:
        self.asked.append(config)
        return self.speeds[config][self.asked.count(config) % len(self.speeds[config])]


def test_larger_rates_and_shorter_times_are_better() -> None:
    assert better("decode", 300.0, 150.0) == 2 and better("ttft", 0.1, 0.2) == 2
    assert best_config("prefill", {"a": [1.0, 9.0, 2.0], "b": [3.0]}) == "b"  # by the median
    assert best_config("ttft", {"a": [1.0], "b": [3.0]}) == "a"


def test_after_the_first_round_only_the_fastest_configuration_runs() -> None:
    ours, peer = Fake("jumar", {"x": [100.0]}), Fake("peer", {"slow": [10.0], "fast": [50.0]})
    (series,) = measure(ours, [peer], ["decode"], 3)
    assert series.ours == [100.0] * 3 and series.theirs == {"peer": {"slow": [10.0], "fast": [50.0] * 3}}
    assert peer.asked == ["slow", "slow", "fast", "fast", "fast", "fast"]  # twice in the first round: one warms up


@pytest.mark.parametrize("metric", METRICS)
def test_ratios_are_of_the_same_round(metric: str) -> None:
    """A machine that slows down for both sides changes no ratio."""
    theirs = [10.0, 20.0, 5.0]
    factor = 0.5 if METRICS[metric] == "s" else 2.0
    series = Series(metric, [x * factor for x in theirs], {"peer": {"only": theirs}, "other": {"c": [1.0, 1.0, 1.0]}})
    row = next(row for row in rows_of(series, 0.5) if row["peer"] == "peer only")
    assert row["ratio"] == 2 and row["spread"] == 0 and row["roofline_share"] == 0.5
    assert [r["ratio"] for r in rows_of(series, None)] == sorted(r["ratio"] for r in rows_of(series, None))


def test_divergence_against_one_counted_by_hand() -> None:
    p, q = np.array([[0.5, 0.25, 0.25]]), np.array([[0.25, 0.5, 0.25]])
    sums = Sums()
    sums.add(np.log(p).astype(np.float32) + 7, np.log(q).astype(np.float32) - 3, [1])  # logits have no level
    assert sums.kl == pytest.approx(0.5 * np.log(2) - 0.25 * np.log(2), rel=1e-6)
    assert sums.same == 0 and sums.count == 1
    assert sums.nll == pytest.approx(np.log(2)) and sums.nll_reference == pytest.approx(np.log(4))
    sums.add(np.log(p).astype(np.float32), np.log(p).astype(np.float32), [0])
    assert sums.same == 1 and sums.kl == pytest.approx(0.25 * np.log(2), rel=1e-6)
