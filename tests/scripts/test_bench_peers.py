"""The arithmetic of scripts/bench/peers.py and quality.py: what counts as better, and sums over predictions; and what
peers.py reads from others. Nothing here is timed."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scripts.bench import peers, peers_engines
from scripts.bench.peers import Series, best_config, better, line_of, measure, rows_of, try_all
from scripts.bench.peers_engines import METRICS, RATE, Engine, LlamaCpp, Missing, WorkerEngine
from scripts.bench.peers_process import Worker, vm_hwm
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
    assert better("decode", 300.0, 150.0) == 2
    assert better("ttft", 10.0, 20.0) == better("load", 0.1, 0.2) == better("memory", 100.0, 200.0) == 2
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
    factor = 2.0 if METRICS[metric] == RATE else 0.5
    series = Series(metric, [x * factor for x in theirs], {"peer": {"only": theirs}, "other": {"c": [1.0, 1.0, 1.0]}})
    row = next(row for row in rows_of(series, 0.5) if row["peer"] == "peer only")
    assert row["ratio"] == 2 and row["spread"] == 0 and row["roofline_share"] == 0.5
    assert [r["ratio"] for r in rows_of(series, None)] == sorted(r["ratio"] for r in rows_of(series, None))


def test_a_configuration_that_ran_in_one_round_only_is_in_no_row() -> None:
    series = Series("decode", [100.0, 50.0], {"peer": {"once": [99.0], "always": [50.0, 25.0]}})
    (row,) = rows_of(series, None)
    assert (row["peer"], row["theirs"], row["ratio"]) == ("peer always", 37.5, 2.0)


@pytest.mark.parametrize(("metric", "best"), [("decode", "b"), ("load", "a")])
def test_the_better_of_two_runs_chooses_the_configuration(metric: str, best: str) -> None:
    """A neighbour that disturbs one run does not choose for the peer."""
    peer = Fake("peer", {"a": [6.0, 5.0], "b": [7.0, 99.0]})
    assert try_all(peer, metric) == (best, {"a": [6.0], "b": [7.0]})


def test_a_line_says_what_a_row_says() -> None:
    series = Series("decode", [100.0], {"peer": {"c": [50.0]}})
    row = {**rows_of(series, 0.75)[0], "their_roofline_share": 0.25}
    line = " ".join(line_of(row).split())
    assert line == "decode ours 100.000 peer c 50.000 tokens/s ratio 2.00 ± 0% 75% of the roofline, theirs 25%"
    assert "roofline" not in line_of({**row, "roofline_share": None, "their_roofline_share": None})


def answers(metric: str) -> str:
    """What the tools of llama.cpp write, shortened."""
    if metric == "batch16":
        row = {"n_kv_max": 4096, "pp": 128, "tg": 64, "pl": 16, "t_pp": 2.0, "speed_pp": 1024.0, "t_tg": 3.0, "t": 5.0}
        return "main: n_kv_max = 4096\n\n" + json.dumps(row) + "\n"
    return json.dumps([{"n_prompt": 0, "n_gen": 128, "avg_ns": 1000, "avg_ts": 160.0}])


@pytest.mark.parametrize(
    ("metric", "value"), [("decode", 160.0), ("prefill", 160.0), ("ttft", 200.0), ("batch16", 16 * 64 / 5.0)]
)
def test_what_llama_cpp_writes_is_read(monkeypatch: pytest.MonkeyPatch, metric: str, value: float) -> None:
    asked: list[str] = []

    def output(*command: Any) -> str:
        asked.extend(str(part) for part in command)
        return answers(metric)

    monkeypatch.setattr(peers_engines, "output", output)
    assert LlamaCpp(3).measure("q4_0 fa", metric) == pytest.approx(value)
    assert asked[asked.index("-t") + 1] == "3" and asked[asked.index("-fa") + 1] in ("1", "on")
    assert asked[asked.index("-m") + 1].endswith("smollm2.q4_0.gguf")


def test_peak_memory_is_read_in_kib() -> None:
    assert vm_hwm("Name:\tpython\nVmPeak:\t  9 kB\nVmHWM:\t  2048 kB\nVmRSS:\t 1 kB\n") == 2048
    with pytest.raises(ValueError, match="VmHWM"):
        vm_hwm("Name:\tpython\n")


WORKER = """
import sys
print("a greeting", flush=True)
print('{"value": 0}', flush=True)
for line in sys.stdin:
    if line == "decode\\n":
        print('{"value": 12.5}', flush=True)
    else:
        sys.exit("no such metric: " + line)
"""


def worker_command(folder: Path) -> list[str | Path]:
    script = folder / "worker.py"
    script.write_text(WORKER)
    return [sys.executable, script]


def test_a_worker_is_asked_over_a_pipe_and_says_why_it_ended(tmp_path: Path) -> None:
    worker = Worker("peer", worker_command(tmp_path), 1)
    try:
        assert worker.load_seconds > 0
        assert worker.ask("decode") == worker.ask("decode") == 12.5
        if os.path.exists("/proc/self/status"):
            assert 1 < worker.peak_memory() < 1000
        with pytest.raises(RuntimeError, match="peer ended: no such metric: bogus"):
            worker.ask("bogus")
    finally:
        worker.close()


def test_load_is_of_a_process_that_did_nothing_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Peer(WorkerEngine):
        name = worker = "peer"
        version, configs = "1", ("c",)

    started: list[Worker] = []

    def start(self: Peer, config: str) -> Worker:
        started.append(Worker(self.name, worker_command(tmp_path), self.threads))
        return started[-1]

    monkeypatch.setattr(Peer, "_start", start)
    peer = Peer(1)
    assert peer.measure("c", "decode") == peer.measure("c", "decode") == 12.5 and len(started) == 1
    assert peer.measure("c", "load") > 0 and len(started) == 2
    assert started[0].popen.poll() is None and started[1].popen.poll() is not None
    peer.close()
    assert started[0].popen.poll() is not None


def test_what_is_absent_is_named_with_what_lacks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(peers_engines, "HOME", tmp_path)
    there, absent = peers.present(["ctranslate2", "llama.cpp"], 1)
    assert not there and [line.split()[0] for line in absent] == ["llama.cpp", "ctranslate2"]
    assert all("--install" in line and str(tmp_path) in line for line in absent)
    with pytest.raises(Missing):
        LlamaCpp(1).check()


def test_divergence_against_one_counted_by_hand() -> None:
    p, q = np.array([[0.5, 0.25, 0.25]]), np.array([[0.25, 0.5, 0.25]])
    sums = Sums()
    sums.add(np.log(p).astype(np.float32) + 7, np.log(q).astype(np.float32) - 3, [1])  # logits have no level
    assert sums.kl == pytest.approx(0.5 * np.log(2) - 0.25 * np.log(2), rel=1e-6)
    assert sums.same == 0 and sums.count == 1
    assert sums.nll == pytest.approx(np.log(2)) and sums.nll_reference == pytest.approx(np.log(4))
    sums.add(np.log(p).astype(np.float32), np.log(p).astype(np.float32), [0])
    assert sums.same == 1 and sums.kl == pytest.approx(0.25 * np.log(2), rel=1e-6)
