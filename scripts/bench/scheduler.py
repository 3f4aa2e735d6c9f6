"""Engine overhead per step without the model: schedule, blocks, hashes, inputs, uniforms, stop checks, hand-over.

The engine runs unchanged over a device whose programs compute nothing: ``launch`` returns ids made beforehand. Half of
the requests are greedy, half are sampled with a seed. Printed per number of sequences: the median step, the limit
(30 us + 5 us a sequence), and how much more a step costs with 10,000 requests queued.

    python scripts/bench/scheduler.py [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from device.contract import HostBuffer, Layout, Pending, Program  # noqa: E402
from device.cpu import CpuDevice  # noqa: E402
from device.probe_cpu import cpu_name  # noqa: E402
from runtime.api import GenerationRequest, SamplingParams  # noqa: E402
from runtime.config import EngineConfig  # noqa: E402
from runtime.engine import Engine  # noqa: E402
from runtime.models.scripted import ScriptedModel  # noqa: E402
from runtime.startup import make_engine  # noqa: E402

SIZES = (1, 16, 64, 256)
PROMPT = 100
QUEUED = 10_000


class _Done(Pending):
    def __init__(self, ids: np.ndarray) -> None:
        self._ids = ids

    def wait(self) -> dict[str, Any]:
        return {"ids": self._ids}


class _NoProgram(Program):
    """Gives ids that end nothing."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._ids = np.full(layout.bound("R"), 7, np.int32)

    def buffer(self) -> HostBuffer:
        return HostBuffer(self.layout)

    def launch(self, buffer: HostBuffer, key: Any) -> Pending:
        return _Done(self._ids[: buffer.counts[2]])


class _NoDevice(CpuDevice):
    def program(self, fn: Any, layout: Layout) -> Program:
        return _NoProgram(layout)


class _NoModel(ScriptedModel):
    """No inputs of its own: what the script costs is not the engine's."""

    def extra_inputs(self, limits: Any) -> tuple[()]:
        return ()

    def fill(self, plan: Any, buffer: Any) -> None:
        return


def make(sequences: int, device: CpuDevice, queued: int) -> Engine:
    """An engine in the middle of decoding ``sequences`` requests, with so many more waiting."""
    length = 4096
    config = EngineConfig(
        model="none",
        max_num_seqs=sequences,
        max_num_batched_tokens=max(512, sequences),
        kv_blocks=sequences * (length // 16),
    )
    engine = make_engine(_NoModel(device, 49152, 2), device, config, length, eos_ids=[2])
    engine.start(thread=False)
    rng = np.random.default_rng(0)
    for i in range(sequences + queued):
        prompt = tuple(rng.integers(10, 40000, PROMPT).tolist())
        params = (
            SamplingParams(temperature=0, max_tokens=3900)
            if i % 2
            else SamplingParams(temperature=0.8, top_p=0.95, seed=i, max_tokens=3900)
        )
        engine.submit(GenerationRequest(prompt, params), queue_limit=False)
    while len(engine.scheduler.running) < sequences or any(s.computed < PROMPT for s in engine.scheduler.running):
        engine.step()
    return engine


def measure(engines: list[Engine], rounds: int, steps: int) -> list[list[float]]:
    """Microseconds a step for each engine, the engines interleaved."""
    times: list[list[float]] = [[] for _ in engines]
    for _ in range(rounds):
        for engine, into in zip(engines, times, strict=True):
            for _ in range(steps):
                begin = time.perf_counter()
                engine.step()
                into.append((time.perf_counter() - begin) * 1e6)
    return times


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    device = _NoDevice("float32")
    rows: list[dict[str, Any]] = []
    print(
        f"{'sequences':>9} {'median us':>10} {'limit us':>9} {'share':>6} {'p90 us':>8} {'+10k queued':>11} {'more':>7}"
    )
    for n in SIZES:
        plain, queued = measure([make(n, device, 0), make(n, device, QUEUED)], args.rounds, args.steps)
        median, with_queue = statistics.median(plain), statistics.median(queued)
        limit = 30 + 5 * n
        more = with_queue - median
        allowed = max(0.1 * median, 3.0)
        p90 = statistics.quantiles(plain, n=10)[8]
        share, added = median / limit, more / median
        print(f"{n:9d} {median:10.1f} {limit:9d} {share:6.2f} {p90:8.1f} {with_queue:11.1f} {added:+6.1%}")
        rows.append(
            {"metric": f"step_overhead:{n}", "ours": median, "unit": "us", "peer": "limit", "theirs": limit,
             "ratio": limit / median, "limit": limit, "spread": p90 - median, "cpu": cpu_name()}
        )  # fmt: skip
        rows.append(
            {"metric": f"step_overhead_queued:{n}", "ours": with_queue, "unit": "us", "peer": "without a queue",
             "theirs": median, "ratio": median / with_queue, "limit": median + allowed, "cpu": cpu_name()}
        )  # fmt: skip
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    over = [row["metric"] for row in rows if row["ours"] > row["limit"]]
    print("over the limit: " + ", ".join(over) if over else "all within the limits")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
