"""What a caller hands to the engine and what it gets back. No tensors, no threads, no JSON here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

MAX_LOGPROBS = 20
MIN_PENALTY = 1e-3
"""Least repetition penalty: logits are divided by it, and must stay numbers."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the output tokens of one request are chosen. Names and meanings are OpenAI's, extended as vLLM does.

    max_tokens: output tokens at most; None: up to the context limit. 0 is allowed (score the prompt only).
    temperature: 0 is greedy. top_k: 0 is off. top_p: 1 is off. min_p: 0 is off (relative to the best token).
    presence_penalty, frequency_penalty: -2..2, over output tokens only. repetition_penalty: 0.001..10, 1 is off, over
        prompt and output, once per id.
    logit_bias: id -> -100..100. seed: None draws one at admission; the i-th choice of ``n`` derives its own.
    logprobs: None off; k >= 0: log-probability of each chosen token and of the k best (<= 20).
    prompt_logprobs: the same for every prompt token but the first.
    stop: strings that end the output and are not part of it. stop_token_ids: the same for ids (end-of-text ids
        of the model are added by the engine unless ignore_eos).
    min_tokens: until so many, no stop id can be drawn and no stop string is looked for.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One request: a prompt of token ids and how to continue it.

    label: the client's own id for logs; never a key. cache_salt: requests share cached prefixes only with equal salt.
    extra: inputs of particular models (the scripted model's token list, later adapters); opaque to the engine.
    """

    prompt: tuple[int, ...]
    params: SamplingParams
    label: str = ""
    cache_salt: str = ""
    extra: dict[str, Any] = field(default_factory=dict)


class TokenLogprob(NamedTuple):
    """log-probability of one token under the model's own distribution (before penalties and temperature)."""

    token: int
    logprob: float
    rank: int
    """1 is the most likely."""
    top: tuple[tuple[int, float], ...]
    """The k best as (id, logprob), best first."""


@dataclass(slots=True)
class Event:
    """What a step brought for one choice of one request. Not changed once it is handed out."""

    index: int
    """Which of the ``n`` choices."""
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    finish_reason: str | None
    """None while running; ``stop`` ``length`` ``abort`` ``error``."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """With the first event of choice 0, when asked for: one per prompt token, None for the first."""
    cached_tokens: int = 0
    """With the first event of a choice: prompt tokens whose KV came from the prefix cache."""
    error: str | None = None
    """Text for the client when finish_reason is ``error``."""
    stop_token: int | None = None
    """The id that ended the output (an end-of-text id or one of stop_token_ids): the last of ``tokens``, counted, but
    not part of the text."""
