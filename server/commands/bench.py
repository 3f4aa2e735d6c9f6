"""``jumar bench``: how fast a model runs here, through the same engine that serves it."""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from device.errors import JumarError
from device.probe_cpu import cpu_name
from server.commands.options import (
    ENGINE,
    GroupedCommand,
    chosen_model,
    load,
    resolve_settings,
    say,
    teller,
    with_settings,
)
from server.commands.trace import Line, Trace, as_row, table

if TYPE_CHECKING:
    from runtime.engine import Engine

PREFILL_TOKENS = 512
PROMPT_TOKENS = 32
STREAMS = 16


@click.command(cls=GroupedCommand)
@click.argument("model", required=False)
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Also write the rows here.")
@click.option("--repeat", type=click.IntRange(1, 100), default=3, show_default=True, help="Runs of each measurement.")
@click.option("--tokens", type=click.IntRange(2, 4096), default=64, show_default=True, help="Tokens decoded in a run.")
@click.option("--trace", is_flag=True, help="Also show one decode step and one prefill step, op by op.")
@click.option("--verbose", is_flag=True, help="Print what start-up chose and why.")
@with_settings(*ENGINE, leave_out=("model",))
def bench(
    model: str | None, json_file: Path | None, repeat: int, tokens: int, trace: bool, verbose: bool, **options: Any
) -> None:
    """Measure MODEL (default smollm2-135m): loading, prefill, decoding by one stream and by 16, first token, memory.

    \b
    load         seconds from the command to a model that can run
    prefill      tokens/s of one prompt of 512 tokens
    first_token  milliseconds from a request of 32 prompt tokens to its first token
    decode       tokens/s of one stream, after its first token
    batch16      tokens/s of 16 streams together, their prefill included
    memory       largest resident memory of the process, in MiB

    Prompts are random ids and no two are alike, so that the prefix cache has no part in it. Shown is the median of
    --repeat runs, and how far they lie apart (largest less smallest, over the median).

    --trace shows where a step's time goes: each op's calls, and the least time for the bytes they move and the products
    they compute, at the read bandwidth and the integer rate measured on this machine just now.
    """
    resolved = resolve_settings(options, chosen_model(options, model))
    say(f"loading {resolved.values['model']}")
    started = time.monotonic()
    engine = load(resolved, teller(verbose))
    loaded = time.monotonic() - started
    engine.start()
    try:
        traced = Trace(engine.device) if trace else None
        rows = [_row("load", [loaded], "s"), *measure(engine, repeat, tokens)]
        profiles = profile(engine, traced, tokens) if traced else {}
    finally:
        engine.shutdown()
    shown = list(rows)
    rows += [as_row(name, line) for name, lines in profiles.items() for line in lines]
    for row in rows:
        row["device"], row["cpu"] = engine.device.caps.name, cpu_name()
        if engine.model_id != "smollm2-135m":
            row["metric"] = f"{row['metric']}:{engine.model_id}"
    if json_file is not None:
        json_file.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    click.echo(f"{engine.model_id} on {engine.device.caps.name}, median of {repeat}")
    width = max(len(row["metric"]) for row in shown)
    for row in shown:
        spread = f"  ±{100 * row['spread'] / 2:.0f} %" if repeat > 1 and row["spread"] is not None else ""
        click.echo(f"  {row['metric']:<{width}}  {row['ours']:>10.1f} {row['unit']}{spread}")
    for name, lines in profiles.items():
        click.echo("\n".join(["", *table(name, lines)]))


def measure(engine: Engine, repeat: int, tokens: int) -> list[dict[str, Any]]:
    """The rows of everything that runs on a loaded model."""
    rng = random.Random(0)
    length = min(PREFILL_TOKENS, engine.max_model_len - 1)
    short = min(PROMPT_TOKENS, engine.max_model_len // 2)
    tokens = min(tokens, engine.max_model_len - short)

    def prompt(size: int) -> tuple[int, ...]:
        return tuple(rng.randrange(engine.vocab_size) for _ in range(size))

    def prefill() -> float:
        first, _, _ = run(engine, [prompt(length)], 1)
        return length / first

    def first_token() -> float:
        return 1000 * run(engine, [prompt(short)], 1)[0]

    def decode() -> float:
        first, last, count = run(engine, [prompt(short)], tokens)
        return (count - 1) / (last - first)

    def batch() -> float:
        _, last, count = run(engine, [prompt(short) for _ in range(STREAMS)], tokens)
        return count / last

    jobs: list[tuple[str, Callable[[], float], str]] = [
        (f"prefill{length}", prefill, "tokens/s"),
        ("first_token", first_token, "ms"),
        ("decode", decode, "tokens/s"),
        (f"batch{STREAMS}", batch, "tokens/s"),
    ]
    run(engine, [prompt(short)], 2)  # the first step pays for what later ones find ready
    rows = []
    for number, (name, job, unit) in enumerate(jobs, 1):
        say(f"measuring {name} ({number} of {len(jobs)}), {repeat} time(s)")
        rows.append(_row(name, [job() for _ in range(repeat)], unit))
    return [*rows, _row("memory", [peak_memory() / (1 << 20)], "MiB")]


def profile(engine: Engine, trace: Trace, tokens: int) -> dict[str, list[Line]]:
    """The ops of a decode step of one stream, of one of 16, and of the largest prefill step."""
    from device.roofline import measure_ceilings

    rng = random.Random(1)

    def prompts(count: int, size: int) -> list[tuple[int, ...]]:
        return [tuple(rng.randrange(engine.vocab_size) for _ in range(size)) for _ in range(count)]

    short = min(PROMPT_TOKENS, engine.max_model_len // 2)
    tokens = min(tokens, engine.max_model_len - short)
    ceilings = engine.device.ceilings() or measure_ceilings(engine.device)
    found = {}
    with trace:
        run(engine, prompts(1, short), tokens)
    found["decode"] = trace.lines(1, ceilings)
    with trace:
        run(engine, prompts(STREAMS, short), tokens)
    found[f"batch{STREAMS}"] = trace.lines(STREAMS, ceilings)
    with trace:
        for prompt in prompts(3, min(PREFILL_TOKENS, engine.max_model_len - 1)):
            run(engine, [prompt], 1)
    found["prefill"] = trace.lines(trace.most_rows(), ceilings)
    return found


def run(engine: Engine, prompts: list[tuple[int, ...]], tokens: int) -> tuple[float, float, int]:
    """Decode greedily; (seconds to the first token of all, seconds to the last, tokens). JumarError on a failure."""
    from runtime.api import GenerationRequest, SamplingParams

    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    started = time.perf_counter()
    handles = [engine.submit(GenerationRequest(prompt, params), queue_limit=False) for prompt in prompts]
    first = count = 0.0
    for handle in handles:
        while not handle.done:
            event = handle.get()
            if event is None:
                continue
            if event.finish_reason in ("error", "abort"):
                raise JumarError(event.error or "the engine ended the measurement")
            first = first or time.perf_counter() - started
            count += len(event.tokens)
    return first, time.perf_counter() - started, int(count)


def _row(metric: str, values: list[float], unit: str) -> dict[str, Any]:
    middle = statistics.median(values)
    spread = (max(values) - min(values)) / middle if len(values) > 1 and middle else None
    return {"metric": metric, "ours": middle, "unit": unit, "spread": spread}


def peak_memory() -> int:
    """Bytes. 0 where the system does not tell."""
    try:
        import resource
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
