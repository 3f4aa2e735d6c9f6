"""Random schedules of the same requests, for the property that a request's output does not depend on its schedule.

A ``World`` is a model on a device and the requests that are sent to it; ``check`` runs some of them in one
configuration, with aborts, and compares what each brings with what it brings alone. An oracle checks every read of the
cache; the scheduler's invariants are checked every step.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from hypothesis import strategies as st

from device.contract import Device
from runtime.api import GenerationRequest, SamplingParams, TokenLogprob
from runtime.engine import Engine, RequestHandle
from runtime.models.decoder import Decoder
from runtime.sequence import Sequence
from runtime.tokenizer import Tokenizer
from tests.support.engines import KVOracle, engine_for

MAX_LEN = 96


@dataclass
class Outcome:
    """What one request brought, choice by choice."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    scores: tuple[TokenLogprob | None, ...] | None = None


class World:
    """A model on its device, sixty requests, and what each of them brings alone.

    close: by how much a log-probability may differ (0: the same bits).
    """

    def __init__(self, device: Device, model: Decoder, tokenizer: Tokenizer, vocab: int, close: float) -> None:
        self.device, self.model, self.tokenizer, self.vocab, self.close = device, model, tokenizer, vocab, close
        self.requests = catalogue(vocab)
        self._alone: dict[int, Outcome] = {}

    def engine(self, **settings: object) -> Engine:
        """An engine that is stepped by hand."""
        return engine_for(
            self.model, self.device, max_len=MAX_LEN, tokenizer=self.tokenizer, thread=False, max_queue=100, **settings
        )  # fmt: skip

    def reference(self, index: int) -> Outcome:
        """The request alone, with room for everything and every mechanism off."""
        if index not in self._alone:
            engine = self.engine(kv_blocks=200, prefix_cache=False, max_num_batched_tokens=512, block_size=16)
            handle = engine.submit(self.requests[index])
            finish(engine)
            outcome = self._alone[index] = Outcome()
            collect(handle, outcome)
            assert handle.done
        return self._alone[index]


def _params(rng: random.Random, vocab: int) -> SamplingParams:
    kind = rng.randrange(8)
    common = {"max_tokens": rng.randrange(1, 24), "ignore_eos": rng.random() < 0.7}
    if kind < 2:
        return SamplingParams(temperature=0, **common)
    if kind == 2:
        return SamplingParams(
            temperature=0, presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.3, min_tokens=1, **common
        )
    if kind == 3:
        wanted = rng.choice([0, 1, 3])
        return SamplingParams(temperature=0.0, prompt_logprobs=wanted, logprobs=wanted, **common)
    if kind == 4:
        return SamplingParams(temperature=0, prompt_logprobs=1, max_tokens=0)
    stops = tuple(rng.sample(range(vocab), 60)) if rng.random() < 0.4 else ()
    return SamplingParams(
        temperature=rng.choice([0.3, 1.0, 1.8]),
        top_k=rng.choice([0, 0, 5, 40]),
        top_p=rng.choice([1.0, 0.9, 0.4]),
        min_p=rng.choice([0.0, 0.05]),
        seed=rng.randrange(2**63),
        n=rng.choice([1, 1, 2, 3]),
        logprobs=rng.choice([None, None, 2]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.7]),
        stop_token_ids=stops,
        min_tokens=rng.choice([0, 0, 1]),
        logit_bias={3: 5.0, 77: -100.0} if rng.random() < 0.3 else {},
        **common,
    )


def catalogue(vocab: int) -> list[GenerationRequest]:
    """Requests with prompts that begin alike, repeat themselves, and differ in their salt."""
    rng = random.Random(20260101)
    stem = [rng.randrange(vocab) for _ in range(64)]
    requests = []
    for _ in range(60):
        shape = rng.randrange(4)
        if shape == 0:
            prompt = stem[: rng.randrange(1, 64)]
        elif shape == 1:
            prompt = stem[: rng.choice([16, 31, 32, 33, 48])] + [rng.randrange(vocab) for _ in range(rng.randrange(6))]
        elif shape == 2:  # repetitive: drafts will hit
            prompt = [rng.randrange(vocab) for _ in range(rng.randrange(2, 5))] * rng.randrange(3, 12)
        else:
            prompt = [rng.randrange(vocab) for _ in range(rng.randrange(1, 40))]
        salt = rng.choice(["", "", "", "other"])
        requests.append(GenerationRequest(tuple(prompt[:68]), _params(rng, vocab), cache_salt=salt))
    return requests


def collect(handle: RequestHandle, outcome: Outcome) -> None:
    """Take the events that have come."""
    while not handle.done and (event := handle.get(timeout=0)) is not None:
        outcome.tokens.setdefault(event.index, []).extend(event.tokens)
        outcome.logprobs.setdefault(event.index, []).extend(event.logprobs or ())
        if event.prompt_logprobs is not None:
            assert outcome.scores is None, "prompt log-probabilities came twice"
            outcome.scores = event.prompt_logprobs
        if event.finish_reason is not None:
            outcome.reasons[event.index] = event.finish_reason


def finish(engine: Engine) -> None:
    """Step until nothing is left; a schedule that makes no progress fails."""
    for _ in range(5000):
        if not engine.step():
            engine._hand_out()
            if not engine.scheduler.running and not engine.scheduler.waiting_count:
                return
    raise AssertionError("no end in 5000 steps")


@st.composite
def configurations(draw: st.DrawFn, blocks: tuple[int, ...]) -> dict[str, object]:
    """Settings of an engine that runs a world's requests. blocks: the sizes that its device takes."""
    block = draw(st.sampled_from(blocks))
    longest = -(-MAX_LEN // block)
    speculate = draw(st.sampled_from(["off", "off", "ngram", "ngram", "oracle"]))
    return {
        "block_size": block,
        "kv_blocks": longest + draw(st.sampled_from([0, 0, 1, longest // 2, 2 * longest, 6 * longest])),
        "max_num_seqs": draw(st.integers(1, 8)),
        "max_num_batched_tokens": draw(st.sampled_from([1, 3, 8, 9, 17, 64, 200])),
        "max_logit_rows": draw(st.sampled_from([1, 2, 5, 64])),
        "chunk_size": draw(st.sampled_from([0, 0, 1, 5, 16])),
        "chunked_prefill": draw(st.sampled_from([True, True, True, False])),
        "batching": draw(st.sampled_from(["continuous", "continuous", "dynamic", "static"])),
        "max_wait_ms": 0.0,
        "prefix_cache": draw(st.sampled_from([True, True, False])),
        "speculate": speculate,
        "draft_tokens": draw(st.integers(1, 6)),
        "ngram_min": 1,
        "ngram_max": 3,
    }


def plant_drafts(world: World, engine: Engine, rng: random.Random) -> None:
    """Drafts that are right more often than n-grams are: the known answer, sometimes broken at a random place."""
    answers = {}
    for index in range(len(world.requests)):
        for choice, tokens in world.reference(index).tokens.items():
            answers[(index, choice)] = tokens
    account = engine._account

    def drafting(result: object) -> None:
        account(result)  # type: ignore[arg-type]
        seq: Sequence = result.seq  # type: ignore[attr-defined]
        if seq.row < 0:
            return
        done = len(seq.tokens) - seq.prompt_len
        drafts = list(answers[(seq.extra["pick"], seq.index)][done : done + rng.randrange(1, 7)])
        if drafts and rng.random() < 0.5:
            drafts[rng.randrange(len(drafts))] = rng.randrange(world.vocab)
        seq.drafts = drafts

    engine._account = drafting  # type: ignore[method-assign]


CASE = {
    "picks": st.lists(st.integers(0, 59), min_size=1, max_size=7),
    "gaps": st.lists(st.integers(0, 6), min_size=7, max_size=7),
    "aborted": st.sets(st.integers(0, 6), max_size=2),
    "seed": st.integers(0, 2**16),
}
"""Which requests, how many steps after each, which are aborted."""


def check(
    world: World, config: dict[str, object], picks: list[int], gaps: list[int], aborted: set[int], seed: int
) -> None:
    """AssertionError if any request brings something else than alone, or anything is left behind."""
    planted = config["speculate"] == "oracle"
    for index in range(len(world.requests)) if planted else picks:
        world.reference(index)  # before there is the engine: a model has one cache at a time
    engine = world.engine(**{**config, "speculate": "off" if planted else config["speculate"]})
    assert engine.max_model_len == MAX_LEN
    KVOracle(engine)
    rng = random.Random(seed)
    if planted:
        plant_drafts(world, engine, rng)
    handles, outcomes = [], [Outcome() for _ in picks]
    for pick, gap in zip(picks, gaps, strict=False):
        request = world.requests[pick]
        extra = {"pick": pick}
        handles.append(
            engine.submit(GenerationRequest(request.prompt, request.params, cache_salt=request.cache_salt, extra=extra))
        )
        for _ in range(gap):
            engine.step()
    dropped = {i for i in aborted if i < len(handles)}
    for i in dropped:
        for _ in range(rng.randrange(5)):
            engine.step()
        handles[i].abort()
    finish(engine)
    for i, (handle, outcome) in enumerate(zip(handles, outcomes, strict=True)):
        collect(handle, outcome)
        assert handle.done
        _compare(outcome, world.reference(picks[i]), i in dropped, world.close)
    stats = engine.stats()
    assert stats.running == stats.waiting == 0
    assert stats.blocks_free == stats.blocks_total
    assert engine._live == 0


def _compare(outcome: Outcome, expected: Outcome, dropped: bool, close: float) -> None:
    if dropped:
        for choice, tokens in outcome.tokens.items():
            assert tokens == expected.tokens[choice][: len(tokens)]
        return
    assert outcome.tokens == expected.tokens
    assert outcome.reasons == expected.reasons
    for choice, rows in expected.logprobs.items():
        _same_logprobs(outcome.logprobs[choice], rows, close)
    assert (outcome.scores is None) == (expected.scores is None)
    if expected.scores is not None and outcome.scores is not None:
        assert outcome.scores[0] is None
        _same_logprobs(list(outcome.scores[1:]), list(expected.scores[1:]), close)


def _same_logprobs(ours: list[TokenLogprob | None], theirs: list[TokenLogprob | None], close: float) -> None:
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert a is not None and b is not None
        assert (a.token, a.rank, [t for t, _ in a.top]) == (b.token, b.rank, [t for t, _ in b.top])
        assert abs(a.logprob - b.logprob) <= close
