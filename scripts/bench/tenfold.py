"""Ten times, by compression, fusion and scheduling: what each technique adds to the same work on the same machine.

The start is naive on purpose: NumPy kernels, float32 weights, one op at a time, static batches, and KV memory reserved
for the longest possible sequence. Each row switches ONE technique on and keeps those above it. Float32 weights are
those of the embedded 4/8-bit file, dequantised while loading, so that every row computes the same model. The native
kernels come before the packed weights because nothing else can read those; fusion, and the recording of a step as one
native call, exist for the native kernels only.

The work: ``--requests`` requests of 16 to 256 prompt tokens and 16 to 128 new tokens, which arrive by a Poisson process
of ``--rate`` a second, faster than any row serves them: the throughput is what a row can do at most, and the time to
the first token is mostly that of waiting. Three of four prompts begin with the same conversation (98 tokens), for the
prefix cache. Two of five go on with code or repetitive text, on which n-gram drafts have a chance, the others with
prose: slices at random places of the texts in tests/data/smollm2_prompts.py. Every other request is greedy, the rest
sampled (temperature 0.8, top_p 0.95). Everything is drawn with ``--seed``; end-of-text tokens are ignored, so that each
row makes the same number of tokens. Greedy text of a small model repeats itself, which favours the drafts. Afterwards
``--alone`` requests of the same kind run one at a time: the latencies without a queue.

Every row has the same KV memory, ``--kv-tokens`` tokens. Without paging a sequence reserves ``--max-model-len`` of
them, so that only as many run together as that leaves room for; this limit is what the row models, the blocks below it
are the same. With paging ``--streams`` sequences run together.

Columns: new tokens a second from the first arrival to the last token; its gain over the row above; time to the first
token from the arrival; time between two tokens (each request's mean, over requests the median); the same two for a
request alone; largest resident memory of the process. Each row runs in a process of its own, the rows one after the
other, ``--rounds`` times; shown are the medians. A run in which a virtual machine was stopped is made again. The gains
multiply to the total, also those below 1: a technique that does not help this work is shown as it is.

    python scripts/bench/tenfold.py [--rounds N] [--quick] [--markdown] [--json FILE]

Exit status 1: the total is below 10 (not asked with --quick).
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from cpu_kernels.library import isa  # noqa: E402
from device.probe_cpu import cpu_name  # noqa: E402
from scripts.bench.tenfold_work import (  # noqa: E402
    NEW_TOKENS,
    PROMPT_TOKENS,
    Request,
    load_texts,
    make_workload,
    play,
)

if TYPE_CHECKING:
    from device.weights import CanonicalWeight
    from runtime.engine import Engine
    from runtime.loaders.checkpoint import Checkpoint
    from runtime.stats import FinishedRequest

MODEL = "smollm2-135m"
GOAL = 10.0
STALL, TRIES = 1.0, 3
"""Seconds for which the machine may stand still while a row runs; how often the row is run until it does not."""
START: dict[str, Any] = {
    "kernels": "numpy",
    "float_weights": True,
    "activations": "float",
    "fusion": False,
    "capture": False,
    "paged": False,
    "batching": "static",
    "chunked_prefill": False,
    "prefix_cache": False,
    "speculate": "off",
}
"""Settings of the device and the engine, and two of this script: float_weights and paged."""


@dataclass(frozen=True, slots=True)
class Technique:
    """A row: its name, which kind of technique it is, and the settings that it changes in those of the row above."""

    name: str
    kind: str
    changes: Mapping[str, Any]


KERNELS, COMPRESSION, FUSION, SCHEDULING = "kernels", "compression", "fusion", "scheduling"
ROWS = (
    Technique("start: NumPy, float32 weights, op by op, static batches", "", {}),
    Technique("native kernels", KERNELS, {"kernels": "native"}),
    Technique("4/8-bit weights, packed", COMPRESSION, {"float_weights": False}),
    Technique("int8 activations", COMPRESSION, {"activations": "auto"}),
    Technique("fused ops", FUSION, {"fusion": True}),
    Technique("recorded step (one native call)", FUSION, {"capture": True}),
    Technique("paged KV cache", SCHEDULING, {"paged": True}),
    Technique("dynamic batching", SCHEDULING, {"batching": "dynamic"}),
    Technique("continuous batching", SCHEDULING, {"batching": "continuous"}),
    Technique("chunked prefill", SCHEDULING, {"chunked_prefill": True}),
    Technique("prefix cache", SCHEDULING, {"prefix_cache": True}),
    Technique("n-gram speculation", SCHEDULING, {"speculate": "ngram"}),
)


def settings_of(index: int) -> dict[str, Any]:
    """All settings of a row: those of the start and every change down to this row's."""
    merged = dict(START)
    for row in ROWS[: index + 1]:
        merged |= row.changes
    return merged


# ---------------------------------------------------------------- one row, in a process of its own


class Dequantizer:
    """In the place of the loader's quantizer: every weight as float32."""

    def check(self, path: Path, stored: Mapping[str, str]) -> None:
        """Any weight can be dequantised."""

    def __call__(self, name: str, w: CanonicalWeight) -> CanonicalWeight:
        from device.weights import float_weight

        return float_weight(w.dequantize(), "float32")


def build(settings: Mapping[str, Any], args: argparse.Namespace, checkpoint: Checkpoint) -> Engine:
    """A started engine with a row's settings."""
    from device.config import DeviceConfig
    from device.open import open_device
    from device.probe import select
    from runtime.config import EngineConfig
    from runtime.models.build import Builder
    from runtime.startup import make_engine

    chosen = {name: settings[name] for name in ("kernels", "activations", "fusion", "capture")}
    device_config = DeviceConfig(device="cpu", threads=args.threads, **chosen)
    device = open_device(select(device_config), device_config)
    quantizer: Any = Dequantizer() if settings["float_weights"] else None
    config = EngineConfig(
        model=args.model,
        max_model_len=args.max_model_len,
        kv_blocks=args.kv_tokens // device.caps.check_block_size(0),
        max_num_seqs=args.streams if settings["paged"] else min(args.streams, args.kv_tokens // args.max_model_len),
        max_queue=0,  # nobody is refused: requests are submitted without the limit
        **{name: settings[name] for name in ("batching", "chunked_prefill", "prefix_cache", "speculate")},
    )
    model = Builder(checkpoint, device, quantizer).build(args.max_model_len)
    engine = make_engine(model, device, config, args.max_model_len, explicit_len=True)
    engine.start()
    return engine


def first_token_ms(done: Sequence[FinishedRequest]) -> list[float]:
    """From arrival."""
    return [1000 * (r.first_token - r.arrived) for r in done]


def between_ms(done: Sequence[FinishedRequest]) -> list[float]:
    """The mean time between two tokens of each request."""
    return [1000 * (r.finished - r.first_token) / (r.output_tokens - 1) for r in done]


def run_row(index: int, args: argparse.Namespace) -> dict[str, float]:
    """Everything that is measured of one row. Times in milliseconds, memory in MiB, shares 0..1."""
    from runtime.loaders.checkpoint import open_checkpoint
    from server.commands.bench import peak_memory

    checkpoint = open_checkpoint(args.model, lambda text: None)
    texts = load_texts(checkpoint)
    requests = make_workload(texts, args.requests, args.rate, args.seed)
    others = make_workload(texts, args.alone, args.rate, args.seed + 1)
    engine = build(settings_of(index), args, checkpoint)
    try:
        rng = random.Random(args.seed)  # the first steps pay for what later ones find ready
        play(engine, [Request(0.0, tuple(rng.randrange(engine.vocab_size) for _ in range(32)), 4)])
        before = engine.stats()
        done = play(engine, requests)
        after = engine.stats()
        single = play(engine, others, alone=True)
    finally:
        engine.shutdown()
    begin = done[0].arrived - requests[0].arrival
    first = first_token_ms(done)
    drafted = after.draft_tokens - before.draft_tokens
    span = max(r.finished for r in done) - begin
    return {
        "throughput": sum(r.new_tokens for r in requests) / span,
        "first_token_ms": statistics.median(first),
        "first_token_p95_ms": percentile(first, 0.95),
        "inter_token_ms": statistics.median(between_ms(done)),
        "alone_first_token_ms": statistics.median(first_token_ms(single)),
        "alone_inter_token_ms": statistics.median(between_ms(single)),
        "memory_mib": peak_memory() / (1 << 20),
        "load": span / requests[-1].arrival,
        "prefix_share": (after.prefix_hits - before.prefix_hits) / sum(len(r.prompt) for r in requests),
        "drafted": float(drafted),
        "accepted_share": (after.accepted_tokens - before.accepted_tokens) / drafted if drafted else 0.0,
    }


def percentile(values: Sequence[float], share: float) -> float:
    """The least of the values that so large a share of them do not exceed."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


# ---------------------------------------------------------------- all rows


def in_own_process(index: int, args: argparse.Namespace) -> dict[str, float]:
    """``run_row`` in a fresh process with the same arguments."""
    names = ("model", "requests", "alone", "rate", "seed", "streams", "kv_tokens", "max_model_len", "threads")
    options = [f"--{name.replace('_', '-')}={getattr(args, name)}" for name in names]
    command = [sys.executable, str(Path(__file__).resolve()), f"--only-row={index}", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        stall = longest_stall(lambda: process.poll() is None)
        text = process.stdout.read() if process.stdout else ""
    if process.returncode != 0:
        raise SystemExit(f"the row {ROWS[index].name!r} failed; see above")
    found: dict[str, float] = json.loads(text.splitlines()[-1])
    return found | {"stall_s": stall}


def longest_stall(going: Callable[[], bool]) -> float:
    """Seconds, while ``going()``, by which a short sleep overran at most: a virtual machine may be stopped for a while,
    and whatever is measured then is the host's doing."""
    nap, longest, last = 0.05, 0.0, time.monotonic()
    while going():
        time.sleep(nap)
        now = time.monotonic()
        longest, last = max(longest, now - last - nap), now
    return longest


def without_stall(index: int, args: argparse.Namespace) -> dict[str, float]:
    """``in_own_process``, at most TRIES times until the machine did not stand still meanwhile; else the last."""
    for _ in range(TRIES):
        found = in_own_process(index, args)
        if found["stall_s"] <= STALL:
            break
        print(f"the machine stood still for {found['stall_s']:.0f} s: {ROWS[index].name}", file=sys.stderr, flush=True)
    return found


def measure(args: argparse.Namespace) -> list[list[dict[str, float]]]:
    """What each round measured, by row; the rows interleaved, so that a slow minute of the machine hits them alike."""
    found: list[list[dict[str, float]]] = [[] for _ in ROWS]
    for number in range(args.rounds):
        for index, row in enumerate(ROWS):
            found[index].append(without_stall(index, args))
            rate = found[index][-1]["throughput"]
            print(f"round {number + 1} of {args.rounds}: {row.name}: {rate:.1f} tokens/s", file=sys.stderr, flush=True)
    return found


def summarise(found: Sequence[Sequence[Mapping[str, float]]]) -> list[dict[str, Any]]:
    """One dict a row: the medians over rounds; its ``name`` and ``kind``; ``spread`` of the throughput (largest less
    smallest, over the median); ``gain`` over the row above (1 in the first)."""
    rows: list[dict[str, Any]] = []
    for technique, rounds in zip(ROWS, found, strict=True):
        row: dict[str, Any] = {key: statistics.median(r[key] for r in rounds) for key in rounds[0]}
        rates = [r["throughput"] for r in rounds]
        row["name"], row["kind"] = technique.name, technique.kind
        row["spread"] = (max(rates) - min(rates)) / row["throughput"]
        row["gain"] = row["throughput"] / rows[-1]["throughput"] if rows else 1.0
        rows.append(row)
    return rows


def total(rows: Sequence[Mapping[str, Any]]) -> float:
    """The product of all gains."""
    product: float = math.prod(row["gain"] for row in rows)
    return product


def by_kind(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The product of the gains of each kind of technique."""
    return {kind: total([r for r in rows if r["kind"] == kind]) for kind in (KERNELS, COMPRESSION, FUSION, SCHEDULING)}


def verdict(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the table does not say: the goal reached or what is missing, which kind of technique brought how much, the
    fastest row, rows that cost, a load too low to be the most that a row can do."""
    product = total(rows)
    best = max(rows, key=lambda row: row["throughput"])
    lines = [f"total {product:.2f}x, goal {GOAL:.0f}x: reached"]
    if product < GOAL:
        lines = [f"total {product:.2f}x, goal {GOAL:.0f}x: a factor of {GOAL / product:.2f} is missing"]
    kinds = by_kind(rows)
    lines.append("of that " + ", ".join(f"{kind} {gain:.2f}x" for kind, gain in kinds.items()))
    lines.append(f"without the step from NumPy to native kernels: {product / kinds[KERNELS]:.2f}x")
    if best is not rows[-1]:
        lines.append(f"fastest: with {best['name']}, {best['throughput'] / rows[0]['throughput']:.2f}x the start")
    for row in rows[1:]:
        if row["gain"] < 1:
            lines.append(f"no gain here: {row['name']}, {row['gain']:.2f}x")
    for row in rows:
        if row["load"] < 1.2:
            lines.append(f"not saturated: {row['name']} kept up with the arrivals; raise --rate")
    for row in rows:
        if row["stall_s"] > STALL:
            lines.append(f"not to be trusted: {row['name']}, the machine stood still for {row['stall_s']:.0f} s")
    if any(row["prefix_share"] for row in rows):
        lines.append(f"prompt tokens from the prefix cache: {max(row['prefix_share'] for row in rows):.0%}")
    for row in rows:
        if row["drafted"]:
            lines.append(f"drafted tokens accepted: {row['accepted_share']:.0%} of {row['drafted']:.0f}")
    return lines


COLUMNS = (
    ("tokens/s", "throughput", "{:.1f}"),
    ("gain", "gain", "{:.2f}x"),
    ("first token ms", "first_token_ms", "{:.0f}"),
    ("p95 ms", "first_token_p95_ms", "{:.0f}"),
    ("between tokens ms", "inter_token_ms", "{:.1f}"),
    ("alone: first ms", "alone_first_token_ms", "{:.0f}"),
    ("alone: between ms", "alone_inter_token_ms", "{:.1f}"),
    ("memory MiB", "memory_mib", "{:.0f}"),
)


def table(rows: Sequence[Mapping[str, Any]], *, markdown: bool) -> list[str]:
    """Lines of the table, the total last."""
    cells = [["each row adds", *(title for title, _, _ in COLUMNS)]]
    for i, row in enumerate(rows):
        shown = [form.format(row[key]) for _, key, form in COLUMNS]
        if i == 0:
            shown[1] = ""
        cells.append([row["name"], *shown])
    cells.append(["total", "", f"{total(rows):.2f}x", *[""] * (len(COLUMNS) - 2)])
    if markdown:
        lines = ["| " + " | ".join(line) + " |" for line in cells]
        lines.insert(1, "|---|" + "---:|" * len(COLUMNS))
        return lines
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    return [
        "  ".join(cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True)))
        for line in cells
    ]


def json_rows(rows: Sequence[Mapping[str, Any]], args: argparse.Namespace, cpu: str, isa: str) -> list[dict[str, Any]]:
    """As all benchmarks write them; the peer of a row is the one above, that of the total the start."""
    suffix = "" if args.model == MODEL else f":{Path(args.model).stem}"
    where = {"unit": "tokens/s", "cpu": cpu, "isa": isa, "threads": args.threads}
    written_above = ("throughput", "name", "gain", "spread")
    written: list[dict[str, Any]] = []
    for above, row in zip([None, *rows], rows, strict=False):
        written.append(
            {"metric": f"tenfold:{row['name']}{suffix}", "ours": row["throughput"],
             "peer": above and above["name"], "theirs": above and above["throughput"],
             "ratio": row["gain"] if above else None, "spread": row["spread"], **where,
             **{key: value for key, value in row.items() if key not in written_above}}
        )  # fmt: skip
    first, last = rows[0], rows[-1]
    written.append(
        {"metric": f"tenfold:total{suffix}", "ours": last["throughput"], "peer": first["name"],
         "theirs": first["throughput"], "ratio": total(rows), "limit": GOAL, "spread": last["spread"], **where}
    )  # fmt: skip
    return written


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL, help="or a quantised .gguf file")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--alone", type=int, default=6, help="requests that run one at a time")
    parser.add_argument("--rate", type=float, default=100.0, help="arrivals a second")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--streams", type=int, default=16, help="sequences together, where the KV memory allows")
    parser.add_argument("--kv-tokens", type=int, default=8192, help="tokens that the KV memory holds")
    parser.add_argument("--max-model-len", type=int, default=2048, help="longest sequence a client may ask for")
    parser.add_argument("--threads", type=int, default=0, help="0: all cores")
    parser.add_argument("--quick", action="store_true", help="one round of few requests, to see that everything runs")
    parser.add_argument("--markdown", action="store_true", help="print the table in Markdown")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--only-row", type=int, choices=range(len(ROWS)), help="measure one row here, print it as JSON")
    args = parser.parse_args(argv)
    if args.quick:
        args.rounds, args.requests, args.alone = 1, 6, 1
    if min(args.rounds, args.requests, args.alone, args.streams) < 1:
        parser.error("--rounds, --requests, --alone and --streams: at least 1")
    longest = PROMPT_TOKENS[1] + NEW_TOKENS[1]
    if not longest <= args.max_model_len <= args.kv_tokens:
        parser.error(f"--max-model-len: at least {longest}, what a request takes, and at most --kv-tokens")
    return args


def main() -> int:
    args = parse()
    if args.only_row is not None:
        print(json.dumps(run_row(args.only_row, args)))
        return 0
    rows = summarise(measure(args))
    naive = min(args.streams, args.kv_tokens // args.max_model_len)
    print(
        f"{args.requests} requests, {args.rounds} round(s); KV memory of {args.kv_tokens} tokens: {naive} sequences of "
        f"{args.max_model_len} reserved, {args.streams} paged"
    )
    print("\n".join(table(rows, markdown=args.markdown)))
    print("\n".join(verdict(rows)))
    if args.json:
        args.json.write_text(json.dumps(json_rows(rows, args, cpu_name(), isa()), indent=1) + "\n")
    return 1 if total(rows) < GOAL and not args.quick else 0


if __name__ == "__main__":
    sys.exit(main())
