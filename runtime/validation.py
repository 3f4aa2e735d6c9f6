"""What a request may ask for. Everything that becomes an index on the device is checked here, before it is queued."""

from __future__ import annotations

import os
from collections.abc import Iterable

from device.errors import RequestRejected
from runtime.api import MAX_LOGPROBS, MIN_PENALTY, GenerationRequest, SamplingParams
from runtime.scheduler import Scheduler

MAX_CHOICES = 128
MAX_STOPS = 4


def draw_seed() -> int:
    """A seed for a request that brings none."""
    return int.from_bytes(os.urandom(8), "little")


def output_limit(request: GenerationRequest, max_model_len: int) -> int:
    """Total length at which the output ends."""
    wanted = request.params.max_tokens
    prompt = len(request.prompt)
    return max_model_len if wanted is None else prompt + wanted


def check_request(request: GenerationRequest, vocab_size: int, scheduler: Scheduler) -> None:
    """RequestRejected naming the field, unless the request can be served as it is."""
    check_params(request.params, vocab_size)
    if not request.prompt:
        raise RequestRejected("the prompt is empty; at least one token is needed", param="prompt")
    _check_ids("prompt", request.prompt, vocab_size)
    _check_length(request, scheduler)


def _check_length(request: GenerationRequest, scheduler: Scheduler) -> None:
    prompt, wanted = len(request.prompt), request.params.max_tokens
    max_len = scheduler.limits.max_len
    needed = prompt + (1 if wanted is None else wanted)
    if needed > max_len:
        output = "at least 1" if wanted is None else str(wanted)
        raise RequestRejected(
            f"this model's maximum context length is {max_len} tokens, but {needed} were asked for: {prompt} in the "
            f"prompt, {output} for the output; shorten the prompt or max_tokens",
            code="context_length_exceeded",
            param="prompt" if prompt >= max_len or wanted is None else "max_tokens",
        )
    limit = output_limit(request, max_len)
    if not scheduler.fits(prompt, limit):
        held = scheduler.pool.total * scheduler.pool.block_size
        raise RequestRejected(
            f"the KV cache holds {held} tokens, and this request needs up to {limit}; lower max_tokens",
            code="context_length_exceeded", param="max_tokens",
        )  # fmt: skip


def check_params(params: SamplingParams, vocab_size: int) -> None:
    """RequestRejected naming the field for a value out of its range."""
    _range("temperature", params.temperature, 0, 2)
    _range("top_p", params.top_p, 0, 1, low_open=True)
    _range("min_p", params.min_p, 0, 1)
    _range("presence_penalty", params.presence_penalty, -2, 2)
    _range("frequency_penalty", params.frequency_penalty, -2, 2)
    _range("repetition_penalty", params.repetition_penalty, MIN_PENALTY, 10)
    _range("top_k", params.top_k, 0, 2**31 - 1)
    _range("n", params.n, 1, MAX_CHOICES)
    _range("min_tokens", params.min_tokens, 0, 2**31 - 1)
    if params.max_tokens is not None:
        _range("max_tokens", params.max_tokens, 0, 2**31 - 1)
        if params.min_tokens > params.max_tokens:
            raise RequestRejected("min_tokens is more than max_tokens", param="min_tokens")
    for name in ("logprobs", "prompt_logprobs"):
        if (value := getattr(params, name)) is not None:
            _range(name, value, 0, MAX_LOGPROBS)
    if len(params.stop) > MAX_STOPS or not all(params.stop):
        raise RequestRejected(f"stop takes up to {MAX_STOPS} strings, none of them empty", param="stop")
    _check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    _check_ids("logit_bias", params.logit_bias, vocab_size)
    for bias in params.logit_bias.values():
        _range("logit_bias", bias, -100, 100)


def _range(name: str, value: float, low: float, high: float, *, low_open: bool = False) -> None:
    above = value > low if low_open else value >= low
    # an integer may be too large for isnan
    if value != value or not above or value > high:
        raise RequestRejected(
            f"{name} is {value}; expected {'more than' if low_open else 'at least'} {low} and at most {high}",
            param=name,
        )


def _check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise RequestRejected(
                f"{name} has token id {token}; this model's ids run from 0 to {vocab_size - 1}", param=name
            )
