"""``jumar chat``: talk to a model in the terminal, without a server."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from device.errors import JumarError, RequestRejected
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

if TYPE_CHECKING:
    from runtime.engine import Engine

_HELP = "Ctrl-C stops an answer, /reset begins anew, Ctrl-D or /quit leaves."


@click.command(cls=GroupedCommand)
@click.argument("model", required=False)
@click.option("--system", default=None, help="System message, instead of the template's own.")
@click.option("--temperature", type=float, default=0.7, show_default=True, help="0 always takes the likeliest token.")
@click.option("--top-p", type=float, default=0.95, show_default=True)
@click.option("--max-tokens", type=int, default=512, show_default=True, help="Longest answer.")
@click.option("--seed", type=int, default=None, help="Makes sampled answers repeatable.")
@click.option("--verbose", is_flag=True, help="Print what start-up chose and why.")
@with_settings(*ENGINE, leave_out=("model",))
def chat(
    model: str | None, system: str | None, temperature: float, top_p: float, max_tokens: int, seed: int | None,
    verbose: bool, **options: Any,
) -> None:  # fmt: skip
    """Chat with MODEL (a folder, a .gguf file or smollm2-135m) in the terminal.

    Answers are streamed. Ctrl-C stops an answer, /reset begins anew, Ctrl-D or /quit leaves.
    """
    from runtime.chat import chat_problem

    resolved = resolve_settings(options, chosen_model(options, model))
    engine = load(resolved, teller(verbose))
    problem = "it has no tokenizer" if engine.tokenizer is None else chat_problem(engine.tokenizer)
    if problem is not None:
        raise JumarError(f"no chat with {engine.model_id}: {problem}. Use: jumar generate MODEL --prompt TEXT")
    engine.start()
    say(f"{engine.model_id} on {engine.device.caps.name}. {_HELP}")
    beginning = [{"role": "system", "content": system}] if system else []
    messages: list[dict[str, Any]] = list(beginning)
    try:
        while (text := _read()) is not None:
            if text in ("/quit", "/exit"):
                break
            if text == "/reset":
                messages = list(beginning)
                say("(begun anew)")
            elif text:
                messages.append({"role": "user", "content": text})
                sampling = {"temperature": temperature, "top_p": top_p, "max_tokens": max_tokens, "seed": seed}
                try:
                    messages.append({"role": "assistant", "content": answer(engine, messages, sampling)})
                except RequestRejected as error:
                    messages.pop()
                    say(f"not possible: {error}")
    finally:
        engine.shutdown()


def _read() -> str | None:
    try:
        return input("> ").strip()
    except KeyboardInterrupt:
        say("")
        return ""
    except EOFError:
        say("")
        return None


def answer(engine: Engine, messages: list[dict[str, Any]], sampling: dict[str, Any]) -> str:
    """Stream one answer to stdout; Ctrl-C ends it early. Returns its text."""
    from runtime.api import GenerationRequest, SamplingParams
    from runtime.chat import encode_chat
    from runtime.detokenizer import TextStream

    assert engine.tokenizer is not None
    prompt = encode_chat(engine.tokenizer, messages)
    room = engine.max_model_len - len(prompt)
    wanted = min(sampling["max_tokens"], room) if room > 0 else sampling["max_tokens"]
    params = SamplingParams(**{**sampling, "max_tokens": wanted})
    started = time.monotonic()
    handle = engine.submit(GenerationRequest(tuple(prompt), params))
    stream = TextStream(engine.tokenizer, prompt=prompt)
    parts: list[str] = []
    first = 0.0
    try:
        while not handle.done:
            event = handle.get(timeout=0.5)
            if event is None:
                continue
            first = first or time.monotonic()
            delta = stream.push(event.tokens, stop_token=event.stop_token is not None)
            _show(parts, delta.text)
            if event.finish_reason == "error":
                raise JumarError(event.error or "the engine ended the answer")
    except KeyboardInterrupt:
        handle.abort()
        _show(parts, " (stopped)")
        parts.pop()
    _show(parts, stream.finish().text)
    click.echo()
    seconds = max(time.monotonic() - first, 1e-9)
    if stream.tokens > 1 and first:
        say(f"[{stream.tokens} tokens, {(stream.tokens - 1) / seconds:.1f} tokens/s, "
            f"first after {(first - started) * 1000:.0f} ms]")  # fmt: skip
    return "".join(parts)


def _show(parts: list[str], text: str) -> None:
    parts.append(text)
    click.echo(text, nl=False)
