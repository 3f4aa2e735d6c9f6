"""The matrix kernels of the CPU on the shapes of the embedded model, against the ceilings of this machine.

Decode: all linears of one token, head included, one row: bytes of packed weights a second, as a share of the read
bandwidth at 1 GB of the same run. Prefill: all linears without the head, 512 rows: multiply-adds a second, as a share
of the integer products that all cores can do at most. Weights are random, in the dtypes of the embedded file.

    python scripts/bench/linear.py [--threads N] [--isa NAME ...] [--rounds N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from cpu_kernels import library  # noqa: E402
from cpu_kernels import linear as native  # noqa: E402
from device.probe_cpu import cpu_name  # noqa: E402
from device.weights import CanonicalWeight  # noqa: E402

# SmolLM2-135M: hidden 576, FFN 1536, 9 + 2*3 heads of 64, 30 layers, vocabulary 49152
LAYERS, VOCABULARY, HIDDEN, FFN = 30, 49152, 576, 1536
LAYER_SHAPES = ((15 * 64, HIDDEN), (HIDDEN, HIDDEN), (2 * FFN, HIDDEN), (HIDDEN, FFN))
PREFILL_ROWS = 512
READ_BYTES = 1 << 30


@dataclass
class Model:
    """Packed weights in the order of a step, the head last; macs of a row without the head."""

    weights: list[native.PackedWeight]
    macs: int

    @property
    def nbytes(self) -> int:
        return sum(w.nbytes for w in self.weights)


def random_weight(rng: np.random.Generator, dtype: str, n: int, k: int, offset: bool) -> CanonicalWeight:
    shape = (n, k) if dtype == "int8" else (n, k // 2)
    q = rng.integers(0, 256, shape, np.uint8)
    scale = rng.uniform(0.01, 0.02, (n, k // 32)).astype(np.float16).astype(np.float32)
    return CanonicalWeight(dtype, q.view(np.int8) if dtype == "int8" else q, scale, -scale if offset else None, 32)


def make_model(isa: str, activations: str) -> Model:
    rng = np.random.default_rng(0)
    shapes = [("uint4", n, k, True) for _ in range(LAYERS) for n, k in LAYER_SHAPES]
    weights = [
        native.pack([random_weight(rng, *shape)], activations=activations, isa_name=isa)
        for shape in [*shapes, ("int8", VOCABULARY, HIDDEN, False)]
    ]
    return Model(weights, sum(n * k for _, n, k, _ in shapes))


def seconds(model: Model, team: library.Team, rows: int, head: bool, repeat: int) -> float:
    """Of one pass."""
    x = library.aligned((rows, FFN), np.float32)
    x[...] = np.random.default_rng(1).standard_normal(x.shape)
    weights = model.weights if head else model.weights[:-1]
    y = library.aligned((rows, max(w.shape[0] for w in weights)), np.float32)
    native.linear(x, weights, team=team, out=y)
    begin = time.perf_counter()
    native.linear(x, weights, team=team, out=y, repeat=repeat)
    return (time.perf_counter() - begin) / repeat


def measure(args: argparse.Namespace, isas: list[str]) -> dict[str, list[float]]:
    """Interleaved: bandwidth, then per instruction set decode, prefill and 16 rows, again and again."""
    team = library.Team(args.threads)
    memory = np.ones(READ_BYTES, np.uint8)
    models = {isa: make_model(isa, args.activations) for isa in isas}
    times: dict[str, list[float]] = {"read": []}
    for _ in range(args.rounds):
        times["read"].append(team.read_bandwidth(memory, 2))
        for isa, model in models.items():
            slow = isa == "baseline" or args.activations == "float"
            for name, rows, head, repeat in (
                ("decode", 1, True, 5 if slow else 50), ("batch16", 16, True, 1 if slow else 10),
                ("prefill", PREFILL_ROWS, False, 1),
            ):  # fmt: skip
                times.setdefault(f"{name}:{isa}", []).append(seconds(model, team, rows, head, repeat))
            times.setdefault(f"peak:{isa}", []).append(team.dot_peak(isa))
    times["bytes"] = [float(models[isas[0]].nbytes)]
    times["macs"] = [float(models[isas[0]].macs)]
    return times


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--isa", nargs="+", choices=library.ISAS, help="default: all that run here")
    parser.add_argument("--activations", choices=native.ACTIVATIONS, default="auto")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    args = parser.parse_args()
    isas = list(args.isa or library.runnable_isas()[::-1])
    times = measure(args, isas)
    read, nbytes, macs = statistics.median(times["read"]), times["bytes"][0], times["macs"][0]
    print(f"read {read / 1e9:.1f} GB/s at 1 GB, {args.threads} threads; weights of a token {nbytes / 1e6:.1f} MB")
    rows: list[dict[str, Any]] = []
    for isa in isas:
        peak = statistics.median(times[f"peak:{isa}"])
        for name, tokens in (("decode", 1), ("batch16", 16), ("prefill", PREFILL_ROWS)):
            values = times[f"{name}:{isa}"]
            t = statistics.median(values)
            total = macs if name == "prefill" else macs + VOCABULARY * HIDDEN
            bandwidth, rate = nbytes / t, total * tokens / t
            share = bandwidth / read if name == "decode" else rate / peak
            what = (
                f"{bandwidth / 1e9:6.1f} GB/s" if name == "decode" else f"{rate / 1e9:6.1f} GMAC/s of {peak / 1e9:.0f}"
            )
            print(
                f"{isa:9} {name:8} {tokens / t:8.1f} tokens/s  {t * 1e3:8.2f} ms  {what:22} {share:6.1%} of the ceiling"
            )
            rows.append(
                {"metric": f"linear_{name}", "ours": tokens / t, "unit": "tokens/s", "roofline_share": share,
                 "spread": (max(values) - min(values)) / t, "cpu": cpu_name(),
                 "isa": isa, "activations": args.activations, "threads": args.threads}
            )  # fmt: skip
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
