"""``jumar generate``: text without a server, from one prompt or a file of requests."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from device.errors import ConfigError, JumarError
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
from server.config import ServerConfig

if TYPE_CHECKING:
    from runtime.engine import Engine
    from server.batch import Tally


@click.command(cls=GroupedCommand)
@click.argument("model", required=False)
@click.argument("prompt_text", metavar="[PROMPT]", required=False)
@click.option("--prompt", default=None, help="Text to continue; - reads it from standard input.")
@click.option("--input", "input_file", help="File of requests, one OpenAI batch line each; - is stdin.",
              type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path))  # fmt: skip
@click.option("--output", "output_file", type=click.Path(dir_okay=False, path_type=Path),
              help="File that the answers are appended to, in order.")  # fmt: skip
@click.option("--temperature", type=float, default=0.7, show_default=True, help="0 always takes the likeliest token.")
@click.option(
    "--top-p", type=float, default=0.95, show_default=True, help="Keep the likeliest tokens up to this share."
)
@click.option("--max-tokens", type=int, default=256, show_default=True, help="Longest answer.")
@click.option("--stop", multiple=True, help="End before this text; up to four.")
@click.option("--seed", type=int, default=None, help="Makes sampled answers repeatable.")
@click.option("--served-model-name", default=None, help="Name of the model in the requests of --input.")
@click.option("--verbose", is_flag=True, help="Print what start-up chose and why.")
@with_settings(*ENGINE, leave_out=("model",))
def generate(
    model: str | None, prompt_text: str | None, prompt: str | None, input_file: Path | None, output_file: Path | None,
    temperature: float, top_p: float, max_tokens: int, stop: tuple[str, ...], seed: int | None,
    served_model_name: str | None, verbose: bool, **options: Any,
) -> None:  # fmt: skip
    """Generate with MODEL (a folder, a .gguf file or smollm2-135m), without a server.

    \b
    jumar generate smollm2-135m "Once upon a time"
    jumar generate smollm2-135m --input requests.jsonl --output answers.jsonl

    PROMPT is continued as it stands, without a chat template (see: jumar chat).

    A file has one OpenAI batch line per request, {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions",
    "body": {...}}; /v1/completions is possible too. Answers are written in the order of the requests. A run that was
    broken off is continued by the same command: what is answered already is not computed again, and a torn last line
    is repaired. A request that cannot be served becomes a line with an error; the exit code is then still 0.
    """
    if prompt is not None and prompt_text is not None:
        raise click.UsageError("the prompt is given twice: as an argument and with --prompt")
    prompt = prompt_text if prompt is None else prompt
    if (input_file is None) != (output_file is None):
        raise click.UsageError("--input and --output go together")
    if (prompt is None) == (input_file is None):
        raise click.UsageError('give a prompt or a file: jumar generate MODEL "text", or --input FILE --output FILE')
    if input_file is not None and output_file is not None:
        from server.batch import check_files

        check_files(input_file, output_file)
    if prompt == "-":
        prompt = sys.stdin.read()
    if served_model_name is not None:
        options["served_model_name"] = served_model_name
    resolved = resolve_settings(options, chosen_model(options, model))
    engine = load(resolved, teller(verbose))
    if engine.tokenizer is None:
        raise ConfigError(f"{engine.model_id} has no tokenizer; name one with --tokenizer")
    engine.start()
    try:
        if input_file is not None and output_file is not None:
            run_file(engine, resolved.of(ServerConfig).served_model_name or engine.model_id, input_file, output_file)
        else:
            sampling = {"temperature": temperature, "top_p": top_p, "max_tokens": max_tokens, "seed": seed}
            continue_text(engine, prompt or "", {**sampling, "stop": stop})
    finally:
        engine.shutdown()


def continue_text(engine: Engine, prompt: str, sampling: dict[str, Any]) -> None:
    """Stream the continuation of a prompt to stdout. RequestRejected."""
    from runtime.api import GenerationRequest, SamplingParams
    from runtime.chat import encode_prompt
    from runtime.detokenizer import TextStream

    assert engine.tokenizer is not None
    ids = tuple(encode_prompt(engine.tokenizer, prompt))
    room = engine.max_model_len - len(ids)
    if 0 < room < sampling["max_tokens"]:
        sampling = {**sampling, "max_tokens": room}
    handle = engine.submit(GenerationRequest(ids, SamplingParams(**sampling)))
    stream = TextStream(engine.tokenizer, sampling["stop"], prompt=ids)
    while not handle.done:
        event = handle.get(timeout=0.5)
        if event is None:
            continue
        if event.finish_reason == "error":
            raise JumarError(event.error or "the engine ended the answer")
        delta = stream.push(event.tokens, stop_token=event.stop_token is not None)
        click.echo(delta.text, nl=False)
        if delta.finished_by_stop is not None:
            handle.abort()
            break
    click.echo(stream.finish().text)


def run_file(engine: Engine, model: str, input_file: Path, output_file: Path) -> None:
    """Answer a file of requests; says at the end what was done."""
    from tqdm import tqdm

    from server.batch import Batch, read_lines
    from server.service import fingerprint

    lines = read_lines(input_file)
    started = time.monotonic()
    with tqdm(desc="answers", total=len(lines), file=sys.stderr, disable=not sys.stderr.isatty()) as bar:

        def progress(tally: Tally) -> None:
            bar.update(tally.skipped + tally.answered + tally.failed - bar.n)

        try:
            tally = Batch(engine, model, fingerprint(engine, model)).run(lines, output_file, progress)
        except KeyboardInterrupt:
            say(f"broken off; the same command goes on after the last line of {output_file}")
            sys.exit(130)
    seconds = max(time.monotonic() - started, 1e-9)
    say(
        f"{tally.answered} answered, {tally.failed} failed, {tally.skipped} were answered already;"
        f" {tally.tokens} tokens in {seconds:.1f} s ({tally.tokens / seconds:.1f} tokens/s)"
    )
