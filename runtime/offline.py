"""Offline generation: many prompts through the engine from one thread, text out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import TYPE_CHECKING, TypeAlias

from device.errors import RequestRejected
from runtime.api import GenerationRequest, SamplingParams, TokenLogprob

if TYPE_CHECKING:
    from runtime.detokenizer import TextStream
    from runtime.engine import Engine, RequestHandle

Prompt: TypeAlias = "str | Sequence[int]"


@dataclass(slots=True)
class Choice:
    """One of the ``n`` outputs. token_ids: those that count, a stop token among them; text: without it."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str = ""
    error: str | None = None


@dataclass(slots=True)
class GenerationOutput:
    """The outputs of one prompt. prompt_logprobs: one per prompt token when asked for, None for the first."""

    prompt_token_ids: list[int]
    choices: list[Choice]
    prompt_logprobs: list[TokenLogprob | None] | None = None
    cached_tokens: int = 0

    @property
    def text(self) -> str:
        """Text of the first choice."""
        return self.choices[0].text


def generate(
    engine: Engine, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
) -> list[GenerationOutput]:
    """Continue each prompt (text, or a list of token ids); outputs in the order of the prompts.

    params: one for all, or one a prompt. All requests are queued at once: the engine batches them as it can.
    Raises RequestRejected for the first prompt that cannot be served; the others are not started.
    """
    many = _as_list(prompts)
    each = [params or SamplingParams()] * len(many) if params is None or isinstance(params, SamplingParams) else params
    if len(each) != len(many):
        raise RequestRejected(f"{len(many)} prompts, but {len(each)} sampling parameters", param="params")
    requests = [GenerationRequest(tuple(_ids(engine, p)), s) for p, s in zip(many, each, strict=True)]
    handles: list[RequestHandle] = []
    try:
        for request in requests:
            handles.append(engine.submit(request, queue_limit=False))
        return [collect(engine, handle, request) for handle, request in zip(handles, requests, strict=True)]
    finally:
        for handle in handles:
            if not handle.done:
                handle.abort()


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], Integral)):  # NumPy's integers too
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _ids(engine: Engine, prompt: Prompt) -> Sequence[int]:
    if not isinstance(prompt, str):
        return [int(token) for token in prompt]
    if engine.tokenizer is None:
        raise RequestRejected("this model has no tokenizer; give token ids", param="prompt")
    from runtime.chat import encode_prompt

    return encode_prompt(engine.tokenizer, prompt)


def collect(engine: Engine, handle: RequestHandle, request: GenerationRequest) -> GenerationOutput:
    """Wait for all choices of a request and put their text together; ends a choice whose stop string was found."""
    params = request.params
    out = GenerationOutput(list(request.prompt), [Choice(i) for i in range(params.n)])
    streams = [_stream(engine, request) for _ in range(params.n)]
    while not handle.done:
        event = handle.get()
        if event is None:
            continue
        choice, stream = out.choices[event.index], streams[event.index]
        out.cached_tokens = max(out.cached_tokens, event.cached_tokens)
        if event.prompt_logprobs is not None:
            out.prompt_logprobs = list(event.prompt_logprobs)
        if choice.finish_reason:
            continue
        used = len(event.tokens)
        if stream is not None:
            delta = stream.push(event.tokens, stop_token=event.stop_token is not None)
            choice.text += delta.text
            used = delta.tokens_used
            if delta.finished_by_stop is not None:
                choice.finish_reason = "stop"
                handle.abort_choice(event.index)
        choice.token_ids += event.tokens[:used]
        choice.logprobs += (event.logprobs or ())[:used]
        if event.finish_reason is not None and not choice.finish_reason:
            choice.finish_reason = event.finish_reason
            choice.error = event.error
            if stream is not None:
                choice.text += stream.finish().text
    return out


def _stream(engine: Engine, request: GenerationRequest) -> TextStream | None:
    if engine.tokenizer is None:
        return None
    from runtime.detokenizer import TextStream

    params = request.params
    return TextStream(engine.tokenizer, params.stop, min_tokens=params.min_tokens, prompt=request.prompt)
