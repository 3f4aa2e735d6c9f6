"""The table of ``scripts/bench/tenfold.py``: its work, its settings and its arithmetic. Nothing here is timed."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from device.config import DeviceConfig
from device.schema import settings_of
from runtime.config import EngineConfig
from scripts.bench import tenfold
from scripts.bench.tenfold_work import PROSE, REPETITIVE, SHARED, make_workload


@pytest.fixture
def texts() -> dict[str, list[int]]:
    """Ids that say which text they are of: the n-th text has n00, n01, …"""
    names = (SHARED, *REPETITIVE, *PROSE)
    return {name: [100 * i + j for j in range(60)] for i, name in enumerate(names, 1)}


def measured(rates: list[list[float]], **more: float) -> list[list[dict[str, float]]]:
    """What rounds found, by row, with these throughputs."""
    keys = [key for _, key, _ in tenfold.COLUMNS if key not in ("gain", "throughput")]
    plain = dict.fromkeys(keys, 1.0) | {"load": 9.0, "prefix_share": 0.0, "drafted": 0.0, "accepted_share": 0.0}
    plain["stall_s"] = 0.0
    return [[{**plain, **more, "throughput": rate} for rate in row] for row in rates]


def test_the_texts_are_those_of_the_repository() -> None:
    from tests.data.smollm2_prompts import PROMPTS

    assert {SHARED, *REPETITIVE, *PROSE} <= set(PROMPTS)


def test_the_work_is_the_same_each_time_and_another_with_another_seed(texts: dict[str, list[int]]) -> None:
    made = make_workload(texts, 40, 100.0, 7)
    assert made == make_workload(texts, 40, 100.0, 7)
    assert made != make_workload(texts, 40, 100.0, 8)
    assert made[:10] == make_workload(texts, 10, 100.0, 7)


def test_the_work_is_what_the_script_says(texts: dict[str, list[int]]) -> None:
    made = make_workload(texts, 400, 100.0, 0)
    shared = tuple(texts[SHARED])
    arrivals = [request.arrival for request in made]
    assert arrivals == sorted(arrivals) and arrivals[0] > 0
    assert arrivals[-1] == pytest.approx(4.0, rel=0.2)
    assert all(16 <= len(request.prompt) <= 256 and 16 <= request.new_tokens <= 128 for request in made)
    assert min(len(request.prompt) for request in made) < 40 and max(len(request.prompt) for request in made) > 240
    assert [request.seed for request in made[:4]] == [None, 1, None, 3]
    begins = [request.prompt[: len(shared)] == shared for request in made]
    assert sum(begins) / len(made) == pytest.approx(0.75, abs=0.07)
    repetitive = {token for name in REPETITIVE for token in texts[name]}
    assert sum(request.prompt[-1] in repetitive for request in made) / len(made) == pytest.approx(0.4, abs=0.07)


def test_a_row_changes_one_technique_and_keeps_those_above() -> None:
    seen = [tenfold.settings_of(i) for i in range(len(tenfold.ROWS))]
    assert seen[0] == tenfold.START
    for above, row, technique in zip(seen, seen[1:], tenfold.ROWS[1:], strict=False):
        assert {key for key in row if row[key] != above[key]} == set(technique.changes)
        assert len(technique.changes) == 1
    known = {setting.name for setting in settings_of(DeviceConfig, EngineConfig)}
    assert set(seen[-1]) - known == {"float_weights", "paged"}


def test_the_last_row_is_what_is_served_by_default_and_speculation() -> None:
    last, engine, device = tenfold.settings_of(len(tenfold.ROWS) - 1), EngineConfig(), DeviceConfig()
    assert last.pop("speculate") == "ngram" and last.pop("kernels") == "native"
    assert not last.pop("float_weights") and last.pop("paged")
    for name, value in last.items():
        assert value == getattr(engine if hasattr(engine, name) else device, name), name


def test_gains_are_of_medians_and_multiply_to_the_total() -> None:
    rates = [[2.0, 4.0, 99.0], *([10.0 * i, 8.0 * i, 12.0 * i] for i in range(1, len(tenfold.ROWS)))]
    rows = tenfold.summarise(measured(rates))
    assert [row["throughput"] for row in rows] == [4.0, *(10.0 * i for i in range(1, len(rows)))]
    assert rows[0]["gain"] == 1.0 and rows[1]["gain"] == 2.5 and rows[2]["gain"] == 2.0
    assert rows[1]["spread"] == pytest.approx(0.4)
    assert tenfold.total(rows) == pytest.approx(rows[-1]["throughput"] / 4.0)
    kinds = tenfold.by_kind(rows)
    assert kinds["kernels"] == 2.5
    assert math.prod(kinds.values()) == pytest.approx(tenfold.total(rows))


def test_what_is_missing_and_what_costs_is_said() -> None:
    rates = [[1.0], [6.0], *([8.0] for _ in tenfold.ROWS[2:-1]), [4.0]]
    lines = "\n".join(tenfold.verdict(tenfold.summarise(measured(rates))))
    assert "total 4.00x, goal 10x: a factor of 2.50 is missing" in lines
    assert "without the step from NumPy to native kernels: 0.67x" in lines
    assert "fastest: with 4/8-bit weights, packed, 8.00x the start" in lines
    assert "no gain here: n-gram speculation, 0.50x" in lines
    assert "not saturated" not in lines and "accepted" not in lines


def test_a_load_that_a_row_keeps_up_with_is_said() -> None:
    rates = [[float(i)] for i in range(1, len(tenfold.ROWS) + 1)]
    rows = tenfold.summarise(measured(rates, load=1.01, drafted=200.0, accepted_share=0.25))
    lines = tenfold.verdict(rows)
    assert lines[0] == "total 12.00x, goal 10x: reached"
    assert sum("not saturated" in line for line in lines) == len(rows)
    assert "drafted tokens accepted: 25% of 200" in lines


def test_a_row_is_run_again_when_the_machine_stood_still(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stalls = [14.0, 85.0, 0.1, 20.0, 20.0, 20.0, 0.0]
    monkeypatch.setattr(tenfold, "in_own_process", lambda index, args: {"stall_s": stalls.pop(0)})
    assert tenfold.without_stall(0, tenfold.parse([])) == {"stall_s": 0.1}
    assert tenfold.without_stall(0, tenfold.parse([])) == {"stall_s": 20.0} and stalls == [0.0]
    assert capsys.readouterr().err.count("stood still") == 5
    rates = [[float(i)] for i in range(1, len(tenfold.ROWS) + 1)]
    lines = tenfold.verdict(tenfold.summarise(measured(rates, stall_s=20.0)))
    assert sum("not to be trusted" in line for line in lines) == len(tenfold.ROWS)


@pytest.mark.parametrize("markdown", [False, True])
def test_the_table_has_every_row_and_the_total(markdown: bool) -> None:
    rates = [[float(i)] for i in range(1, len(tenfold.ROWS) + 1)]
    lines = tenfold.table(tenfold.summarise(measured(rates)), markdown=markdown)
    assert len(lines) == len(tenfold.ROWS) + 2 + markdown
    for line, technique in zip(lines[1 + markdown :], tenfold.ROWS, strict=False):
        assert technique.name in line
    assert "total" in lines[-1] and "12.00x" in lines[-1]
    if markdown:
        assert {line.count("|") for line in lines} == {len(tenfold.COLUMNS) + 2}


def test_rows_as_json_name_the_row_above_as_their_peer() -> None:
    rates = [[2.0 * i] for i in range(1, len(tenfold.ROWS) + 1)]
    rows = tenfold.summarise(measured(rates))
    written: list[dict[str, Any]] = json.loads(json.dumps(tenfold.json_rows(rows, tenfold.parse([]), "a CPU", "none")))
    assert len(written) == len(rows) + 1
    assert written[0]["peer"] is None and written[0]["ratio"] is None
    for above, row in zip(written, written[1:-1], strict=False):
        assert above["metric"] == f"tenfold:{row['peer']}"
        assert row["theirs"] == above["ours"] and row["ratio"] == pytest.approx(row["ours"] / row["theirs"])
    total = written[-1]
    assert (total["metric"], total["ours"], total["theirs"], total["limit"]) == ("tenfold:total", 24.0, 2.0, 10.0)
    assert total["ratio"] == pytest.approx(12.0)
    assert all(row["unit"] == "tokens/s" and row["cpu"] == "a CPU" for row in written)


@pytest.mark.parametrize(
    "options", [["--rounds=0"], ["--max-model-len=300"], ["--kv-tokens=1024"], ["--only-row=99"], ["--bogus"]]
)
def test_options_that_make_no_sense_are_refused(options: list[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        tenfold.parse(options)
    assert refused.value.code == 2


@pytest.mark.parametrize(("values", "share", "expected"), [([3, 1, 2], 0.95, 3), (range(100), 0.95, 95), ([5], 0.5, 5)])
def test_percentiles(values: Any, share: float, expected: float) -> None:
    assert tenfold.percentile(values, share) == expected
