"""The work of ``tenfold.py``: requests of mixed length and kind, and their way through an engine."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime.engine import Engine
    from runtime.loaders.checkpoint import Checkpoint
    from runtime.stats import FinishedRequest

PROMPT_TOKENS, NEW_TOKENS = (16, 256), (16, 128)
SHARED_SHARE, REPETITIVE_SHARE = 0.75, 0.4
SHARED = "chat, two turns"
REPETITIVE = ("repeated lines", "code, python", "json", "code, c", "repeated words", "numbers, table", "code, sql")
PROSE = ("prose, long", "numbers, report", "german", "french", "fact")
LEAST_OWN = 16
"""Tokens of a prompt's own after the shared ones."""


@dataclass(frozen=True, slots=True)
class Request:
    """arrival: seconds after the beginning. prompt: token ids. new_tokens: how many are generated. seed: of the
    sampling; None: greedy."""

    arrival: float
    prompt: tuple[int, ...]
    new_tokens: int
    seed: int | None = None


def make_workload(texts: Mapping[str, Sequence[int]], count: int, rate: float, seed: int) -> list[Request]:
    """``count`` requests in order of arrival. texts: token ids by the names in SHARED, REPETITIVE and PROSE."""
    rng = random.Random(seed)
    shared = tuple(texts[SHARED])
    pools = [[token for name in names for token in texts[name]] for names in (PROSE, REPETITIVE)]
    at = 0.0
    made = []
    for i in range(count):
        at += rng.expovariate(rate)
        prefix = shared if rng.random() < SHARED_SHARE else ()
        pool = pools[rng.random() < REPETITIVE_SHARE]
        length = rng.randint(max(PROMPT_TOKENS[0], len(prefix) + LEAST_OWN if prefix else 0), PROMPT_TOKENS[1])
        begin = rng.randrange(len(pool))
        own = tuple(pool[(begin + j) % len(pool)] for j in range(length - len(prefix)))
        made.append(Request(at, prefix + own, rng.randint(*NEW_TOKENS), i if i % 2 else None))
    return made


def load_texts(checkpoint: Checkpoint) -> dict[str, list[int]]:
    """The texts of the repository in the ids of this model's own tokenizer."""
    from runtime.config import EngineConfig
    from runtime.startup import load_tokenizer
    from tests.data.smollm2_prompts import PROMPTS

    tokenizer = load_tokenizer(EngineConfig(), checkpoint)
    return {name: tokenizer.encode(PROMPTS[name]) for name in (SHARED, *REPETITIVE, *PROSE)}


def play(engine: Engine, requests: Sequence[Request], *, alone: bool = False) -> list[FinishedRequest]:
    """Submit each at its arrival, or (alone) when the one before it is done; returned in order, ``arrived`` being when
    it was to arrive. RuntimeError when one did not end with all its tokens."""
    from runtime.api import GenerationRequest, SamplingParams

    finished: list[FinishedRequest] = []
    engine.observers.append(finished.append)
    began = time.monotonic()
    handles = []
    arrivals = []
    for i, request in enumerate(requests):
        if not alone:
            time.sleep(max(0.0, began + request.arrival - time.monotonic()))
        arrivals.append(time.monotonic() if alone else began + request.arrival)
        chance: dict[str, Any] = {"temperature": 0.0} if request.seed is None else {"temperature": 0.8, "top_p": 0.95}
        params = SamplingParams(max_tokens=request.new_tokens, seed=request.seed, ignore_eos=True, **chance)
        handles.append(engine.submit(GenerationRequest(request.prompt, params, label=str(i)), queue_limit=False))
        if alone:
            _drain(handles[-1])
    for handle in handles:
        _drain(handle)
    engine.observers.remove(finished.append)
    finished.sort(key=lambda one: int(one.label))
    for one, request in zip(finished, requests, strict=True):
        if one.output_tokens != request.new_tokens:
            raise RuntimeError(f"{one} has not its {request.new_tokens} tokens")
    return [replace(one, arrived=at) for one, at in zip(finished, arrivals, strict=True)]


def _drain(handle: Any) -> None:
    while not handle.done:
        event = handle.get()
        if event is not None and event.finish_reason in ("error", "abort"):
            raise RuntimeError(event.error or "the engine ended the measurement")
