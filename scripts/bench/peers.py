"""Jumar beside the engines that a user would pick instead, on the embedded model, in one interleaved run.

    python scripts/bench/peers.py --install            # into .venvs/peers; 15 minutes and 6 GB for all of them
    python scripts/bench/peers.py [--only llama.cpp,...] [--rounds N] [--metrics decode,...] [--json FILE]

Each round runs ours, then every peer, each in a process of its own with the same number of threads, on random token
ids, greedily, with end-of-text ignored and the number of tokens asserted. In the first round a peer runs in all its
configurations, twice; in the others in the one that was best at that metric then. The ratio is ours over theirs of the
same round (the larger the better, also for times and memory), the median over the rounds.

    decode   tokens a second of one stream: 32 in, 128 out, after the first
    prefill  tokens a second of a prompt of 512, until its first token
    batch16  new tokens a second of 16 streams: 128 in, 64 out, their prefill included
    ttft     milliseconds from a prompt of 32 tokens to its first token
    load     seconds from the start of a process to a model that can run, the file in the page cache; tokenizer
             included, which CTranslate2 does not have
    memory   MiB of such a process that were resident at most, after the work of batch16

Roofline: for decode the bytes of weights that a token needs (ours as packed; llama.cpp's as in its file, in the row's
their_roofline_share) over the read bandwidth at 1 GB, for prefill the multiply-adds of the linears over the int8
products that the cores can do at most, both measured before and after the rounds. llama.cpp is measured by its own
tools, which count no sampling and choose random ids themselves, its load and memory by its server. Exit status 1 where
an engine is absent that was not left out with --only.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from cpu_kernels import library  # noqa: E402
from cpu_kernels.native import Executor  # noqa: E402
from device.memory import usable_cores  # noqa: E402
from device.probe_cpu import cpu_name  # noqa: E402
from scripts.bench.linear import READ_BYTES, make_model  # noqa: E402
from scripts.bench.peers_engines import METRICS, PEERS, RATE, Engine, Jumar, Missing, embedded  # noqa: E402


@dataclass
class Series:
    """Measurements of one metric: ours, and each peer's by configuration, round by round."""

    metric: str
    ours: list[float] = field(default_factory=list)
    theirs: dict[str, dict[str, list[float]]] = field(default_factory=dict)


def better(metric: str, a: float, b: float) -> float:
    """How many times better a is than b."""
    return a / b if METRICS[metric] == RATE else b / a


def best_config(metric: str, configs: dict[str, list[float]]) -> str:
    """The best one, by its median."""
    choose = max if METRICS[metric] == RATE else min
    return choose(configs, key=lambda name: statistics.median(configs[name]))


def rows_of(series: Series, share: float | None) -> list[dict[str, Any]]:
    """A row for each peer, the hardest to beat first. Ratios are of the same round."""
    metric, rows = series.metric, []
    for peer, configs in series.theirs.items():
        complete = {name: values for name, values in configs.items() if len(values) == len(series.ours)}
        config = best_config(metric, complete)
        theirs = configs[config]
        ratios = [better(metric, a, b) for a, b in zip(series.ours, theirs, strict=True)]
        rows.append(
            {
                "metric": metric, "ours": statistics.median(series.ours), "unit": METRICS[metric],
                "peer": f"{peer} {config}", "theirs": statistics.median(theirs), "ratio": statistics.median(ratios),
                "spread": (max(ratios) - min(ratios)) / statistics.median(ratios), "roofline_share": share,
            }
        )  # fmt: skip
    return sorted(rows, key=lambda row: float(row["ratio"]))


def try_all(peer: Engine, metric: str) -> tuple[str, dict[str, list[float]]]:
    """(the best configuration, by the better of two runs; of each its second run: the first may find nothing ready)."""
    runs = {config: [peer.measure(config, metric) for _ in range(2)] for config in peer.configs}
    choose = max if METRICS[metric] == RATE else min
    best = best_config(metric, {config: [choose(values)] for config, values in runs.items()})
    return best, {config: values[1:] for config, values in runs.items()}


def measure(ours: Engine, peers: Sequence[Engine], metrics: Sequence[str], rounds: int) -> list[Series]:
    """Interleaved: in each round all engines, one after the other; see the module."""
    found = []
    for metric in metrics:
        series, best = Series(metric), {}
        ours.measure(ours.configs[0], metric)  # the first run pays for what later ones find ready
        for number in range(rounds):
            series.ours.append(ours.measure(ours.configs[0], metric))
            for peer in peers:
                if number == 0:
                    best[peer.name], series.theirs[peer.name] = try_all(peer, metric)
                else:
                    config = best[peer.name]
                    series.theirs[peer.name][config].append(peer.measure(config, metric))
            print(f"{metric}, round {number + 1} of {rounds}", file=sys.stderr)
        found.append(series)
    return found


def ceilings(threads: int) -> tuple[float, float]:
    """(bytes a second of reading 1 GB, int8 multiply-adds a second)."""
    executor = Executor(threads)
    try:
        read, operations = executor.ceilings(READ_BYTES)
    finally:
        executor.close()
    return read, operations / 2


def all_rows(found: Sequence[Series], peers: Sequence[Engine], read: float, dot: float) -> list[dict[str, Any]]:
    """read: bytes a second; dot: int8 multiply-adds a second."""
    model = make_model(library.isa(), "auto")  # random weights in the embedded file's shapes and dtypes, as packed
    per_token = {f"{peer.name} {config}": peer.token_bytes(config) for peer in peers for config in peer.configs}
    rows = []
    for series in found:
        middle = statistics.median(series.ours)
        shares = {"decode": middle * model.nbytes / read, "prefill": middle * model.macs / dot}
        rows += rows_of(series, shares.get(series.metric))
    for row in rows:
        theirs = per_token[row["peer"]] if row["metric"] == "decode" else None
        row["their_roofline_share"] = row["theirs"] * theirs / read if theirs else None
    return rows


def line_of(row: dict[str, Any]) -> str:
    """The same for people."""
    text = (
        f"{row['metric']:8} ours {row['ours']:9.3f}  {row['peer']:26} {row['theirs']:9.3f} {row['unit']:8} "
        f"ratio {row['ratio']:5.2f} ±{row['spread'] / 2:4.0%}"
    )
    if row["roofline_share"]:
        text += f"  {row['roofline_share']:5.0%} of the roofline"
    if row["their_roofline_share"]:
        text += f", theirs {row['their_roofline_share']:5.0%}"
    return text


def install(names: Sequence[str], threads: int) -> int:
    failed = 0
    for kind in PEERS:
        if kind.name in names:
            try:
                kind(threads).install()
            except Exception as error:  # one that cannot be had does not keep the others away
                print(f"{kind.name}: not installed: {error}", file=sys.stderr)
                failed = 1
    return failed


def present(names: Sequence[str], threads: int) -> tuple[list[Engine], list[str]]:
    """(engines that can run, those that lack something)."""
    there: list[Engine] = []
    absent = []
    for kind in PEERS:
        if kind.name not in names:
            continue
        engine = kind(threads)
        try:
            engine.check()
            there.append(engine)
        except Missing as error:
            absent.append(f"{kind.name} {kind.version}: absent: {error}; --install installs it")
    return there, absent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [kind.name for kind in PEERS]
    parser.add_argument("--install", action="store_true", help="install the peers first")
    parser.add_argument("--only", default=",".join(known), help=f"of {', '.join(known)}; default: all")
    parser.add_argument("--metrics", default=",".join(METRICS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=usable_cores()[0])
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    args = parser.parse_args()
    names, metrics = args.only.split(","), args.metrics.split(",")
    for given, allowed in ((names, known), (metrics, list(METRICS))):
        unknown = [x for x in given if x not in allowed]
        if unknown:
            parser.error(f"{', '.join(unknown)}: expected {', '.join(allowed)}")
    if args.install and install(names, args.threads):
        return 1
    peers, absent = present(names, args.threads)
    for line in absent:
        print(line, file=sys.stderr)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what runs is ended too
    ours = Jumar(args.threads)
    before = ceilings(args.threads)
    try:
        found = measure(ours, peers, metrics, args.rounds)
    finally:
        for engine in (ours, *peers):
            engine.close()
    read, dot = (statistics.mean(pair) for pair in zip(before, ceilings(args.threads), strict=True))
    print(f"{cpu_name()}, {library.isa()}, {args.threads} threads; read {read / 1e9:.1f} GB/s at 1 GB, "
          f"int8 {dot / 1e9:.0f} GMAC/s; {embedded().name}")  # fmt: skip
    rows = all_rows(found, peers, read, dot)
    for row in rows:
        row |= {"cpu": cpu_name(), "isa": library.isa(), "threads": args.threads}
        print(line_of(row))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 1 if absent else 0


if __name__ == "__main__":
    sys.exit(main())
