"""A request that loses its blocks to others resumes as if nothing had happened.

Engines lost a token at block boundaries, streamed tokens twice, took earlier output for prompt (so that penalties and
usage changed), or looped for ever on a request that fits nowhere. GeeeekExplorer/nano-vllm#211,
GeeeekExplorer/nano-vllm#217, GeeeekExplorer/nano-vllm#233, vllm-project/vllm-gaudi#524, vllm-project/vllm#16832,
vllm-project/vllm-ascend#11334.
"""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from device.errors import RequestRejected
from runtime.api import Event, GenerationRequest, SamplingParams
from runtime.blocks import BlockPool
from runtime.engine import Engine
from runtime.scheduler import Limits, Scheduler
from runtime.sequence import Sequence
from runtime.validation import check_request
from tests.support.engines import KVOracle, drain, tiny_engine
from tests.support.pace import Pace
from tests.support.service import Running, eventually

BLOCK, BLOCKS = 16, 8
OUTPUT = 60
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"

Answer = tuple[list[int], str | None]
"""Tokens and finish reason."""

GREEDY: dict[str, Any] = {"temperature": 0}
PARAMS = {
    "greedy": GREEDY,
    "penalties": {"temperature": 0, "frequency_penalty": 0.6, "presence_penalty": 0.4, "repetition_penalty": 1.1},
    "sampled": {"temperature": 1.0, "seed": 7},
    "min_tokens": {"temperature": 0, "min_tokens": 50, "logit_bias": {1: 20.0}, "ignore_eos": False},
}


def prompt_of(length: int, which: int) -> tuple[int, ...]:
    return (0, *((i * 31 + which * 101 + 7) % 500 + 5 for i in range(length - 1)))


def params_of(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": OUTPUT, "ignore_eos": True, **fields})


def answer_of(events: list[Event]) -> Answer:
    return [token for event in events for token in event.tokens], events[-1].finish_reason


@functools.lru_cache
def large() -> Engine:
    """Room for everything; runs for the whole file."""
    return tiny_engine(kv_blocks=64)


_alone: dict[str, Answer] = {}


def alone(prompt: tuple[int, ...], params: SamplingParams) -> Answer:
    """The answer to a request that has the machine for itself."""
    key = repr((prompt, params))
    if key not in _alone:
        _alone[key] = answer_of(drain(large().submit(GenerationRequest(prompt, params))))
    return _alone[key]


class Small:
    """A service with a pool of 8 blocks of 16; remembers at what lengths sequences were preempted."""

    def __init__(self, **settings: Any) -> None:
        self.engine = tiny_engine(
            start=False, max_len=BLOCK * BLOCKS, kv_blocks=BLOCKS, block_size=BLOCK, max_num_seqs=4, **settings
        )
        self.oracle = KVOracle(self.engine)
        self.pace = Pace().attach(self.engine)
        self.preempted: list[int] = []
        preempt = self.engine.scheduler._preempt

        def watched() -> Sequence:
            victim = preempt()
            self.preempted.append(len(victim.tokens))
            return victim

        self.engine.scheduler._preempt = watched  # type: ignore[method-assign]
        self.engine.start()

    def check_free(self) -> None:
        assert self.engine.wait_idle(10)
        stats = self.engine.stats()
        assert stats.blocks_free == stats.blocks_total == BLOCKS and stats.running == stats.waiting == 0

    def together(self, prompts: list[tuple[int, ...]], params: list[SamplingParams]) -> list[Answer]:
        """As ``alone``, all at once."""
        self.pace.hold()
        handles = [self.engine.submit(GenerationRequest(p, q)) for p, q in zip(prompts, params, strict=True)]
        self.pace.release()
        found = []
        for handle, prompt in zip(handles, prompts, strict=True):
            events = drain(handle)
            assert handle.prompt_tokens == len(prompt)
            assert all(event.tokens for event in events), "an event without a token"
            found.append(answer_of(events))
        return found


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize(
    ("kind", "length"), [*((kind, 30) for kind in PARAMS), ("greedy", 32), ("penalties", 33), ("sampled", 17)]
)
def test_outputs_are_those_of_a_large_pool(kind: str, prefix_cache: bool, length: int) -> None:
    """30 + 60 tokens are 6 blocks each: two of three cannot stay. In lock-step, the first to be thrown out has exactly
    33 tokens, 2 * 16 + 1."""
    small = Small(prefix_cache=prefix_cache)
    prompts = [prompt_of(length, i) for i in range(3)]
    params = params_of(**PARAMS[kind])
    try:
        found = small.together(prompts, [params] * 3)
        assert found == [alone(prompt, params) for prompt in prompts]
        if kind != "min_tokens":
            assert [(len(tokens), reason) for tokens, reason in found] == [(OUTPUT, "length")] * 3
        small.check_free()
        stats = small.engine.stats()
        assert stats.preemptions == len(small.preempted) > 0
        assert any(n % BLOCK == 1 for n in small.preempted), small.preempted
        assert small.oracle.reads > 0
        assert stats.prompt_tokens == 3 * length, "a prompt counts once"
        assert stats.generated_tokens == sum(len(tokens) for tokens, _ in found)
    finally:
        small.engine.shutdown()


def test_the_penalties_depend_on_what_was_put_out() -> None:
    """Otherwise the test above could not see earlier output taken for prompt: the same continuation, once as output and
    once as a longer prompt, goes on differently."""
    prompt, params = prompt_of(30, 0), params_of(**PARAMS["penalties"])
    whole, _ = alone(prompt, params)
    rest, _ = alone(prompt + tuple(whole[:20]), params_of(**PARAMS["penalties"], max_tokens=OUTPUT - 20))
    assert whole[20:] != rest
    assert whole != alone(prompt, params_of(**GREEDY))[0]


@pytest.mark.parametrize("kind", ["greedy", "penalties", "sampled"])
@pytest.mark.parametrize("speculate", ["off", "ngram"])
def test_over_http_nothing_is_lost_doubled_or_sent_again(kind: str, speculate: str) -> None:
    small = Small(speculate=speculate)
    prompts = [prompt_of(30, i) for i in range(3)]
    body = {"max_tokens": OUTPUT, "ignore_eos": True, "logprobs": 0, **PARAMS[kind]}

    def ask(service: Running, prompt: tuple[int, ...]) -> tuple[str, list[str], dict[str, Any]]:
        *chunks, last, done = service.stream(
            TEXT, {"prompt": list(prompt), **body, "stream_options": {"include_usage": True}}
        )
        assert done == "[DONE]"
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + ["length"]
        tokens = [token for c in choices if c["logprobs"] for token in c["logprobs"]["tokens"]]
        return "".join(c["text"] for c in choices), tokens, last["usage"]

    with Running(small.engine) as service, ThreadPoolExecutor(3) as pool:
        small.pace.hold()
        waiting = [pool.submit(ask, service, prompt) for prompt in prompts]
        assert eventually(lambda: small.engine.stats().running + small.engine.stats().waiting == 3)
        small.pace.release()
        for prompt, future in zip(prompts, waiting, strict=True):
            text, tokens, usage = future.result(30)
            expected, _ = alone(prompt, params_of(**PARAMS[kind]))
            assert small.engine.tokenizer is not None
            assert text == "".join(tokens) == small.engine.tokenizer.decode(expected)
            assert len(tokens) == OUTPUT
            assert usage["prompt_tokens"] == 30 and usage["completion_tokens"] == OUTPUT
            assert usage["prompt_tokens_details"]["cached_tokens"] == 0, "what was cached when it first ran"
        assert service.metric("num_preemptions_total") == len(small.preempted) > 0
        assert service.metric("kv_cache_usage_perc") == 0
        assert service.metric("prompt_tokens_total") == 90
        small.check_free()


def test_a_prompt_being_scored_is_preempted() -> None:
    """Its first positions have been scored when it loses its blocks; each is told once all the same."""
    small = Small(chunk_size=4)
    scored = prompt_of(60, 5)
    body = {"prompt": list(scored), "max_tokens": 3, "temperature": 0, "ignore_eos": True, "echo": True, "logprobs": 1}
    with Running(small.engine) as service, ThreadPoolExecutor(1) as pool:
        expected = service.post(TEXT, body)[1]["choices"][0]
        assert not small.preempted
        small.pace.hold()
        older = [small.engine.submit(GenerationRequest(prompt_of(30, i), params_of(**GREEDY))) for i in range(2)]
        assert eventually(lambda: small.engine.stats().running + small.engine.stats().waiting == 2)
        waiting = pool.submit(service.post, TEXT, body)
        assert eventually(lambda: small.engine.stats().running + small.engine.stats().waiting == 3)
        small.pace.release()
        status, reply = waiting.result(30)
        assert status == 200 and small.preempted[0] == 60, small.preempted
        choice = reply["choices"][0]
        assert choice["text"] == expected["text"]
        assert choice["logprobs"]["tokens"] == expected["logprobs"]["tokens"]
        assert choice["logprobs"]["text_offset"] == expected["logprobs"]["text_offset"]
        values, wanted = choice["logprobs"]["token_logprobs"], expected["logprobs"]["token_logprobs"]
        assert values[0] is None and len(values) == 63
        assert values[1:] == pytest.approx(wanted[1:], abs=1e-9)
        assert reply["usage"]["prompt_tokens"] == 60
        for i, handle in enumerate(older):
            tokens = [token for event in drain(handle) for token in event.tokens]
            assert tokens == alone(prompt_of(30, i), params_of(**GREEDY))[0]
        small.check_free()


def test_what_can_never_fit_is_refused_and_what_just_fits_is_served() -> None:
    small = Small()
    with Running(small.engine) as service:
        room = BLOCK * BLOCKS - 30
        asked = {"prompt": list(prompt_of(30, 0)), "ignore_eos": True, "temperature": 0}
        for stream in (False, True):
            status, reply = service.post(TEXT, {**asked, "max_tokens": room + 1, "stream": stream})
            assert status == 400 and reply["error"]["code"] == "context_length_exceeded"
        status, reply = service.post(TEXT, {**asked, "max_tokens": room})
        assert status == 200 and reply["choices"][0]["finish_reason"] == "length"
        assert reply["usage"]["completion_tokens"] == room
        chat = {"messages": [{"role": "user", "content": "hi"}], "ignore_eos": True}
        status, reply = service.post(CHAT, chat)
        assert status == 200 and reply["choices"][0]["finish_reason"] == "length"
        assert reply["usage"]["total_tokens"] == BLOCK * BLOCKS
        with pytest.raises(RequestRejected):
            small.engine.submit(GenerationRequest(tuple([5] * (BLOCK * BLOCKS + 1)), SamplingParams(max_tokens=0)))
        small.check_free()


def test_a_pool_smaller_than_the_context() -> None:
    """A request within the context that no empty pool could hold is refused too, with the size of the cache."""
    limits = Limits(max_seqs=4, max_tokens=64, max_rows=4, max_len=256, chunk=64)
    scheduler = Scheduler(BlockPool(BLOCKS + 1, 1, BLOCK), limits)
    prompt = prompt_of(30, 0)
    check_request(GenerationRequest(prompt, params_of(max_tokens=99)), 512, scheduler)  # the last one's KV is not kept
    with pytest.raises(RequestRejected, match="KV cache holds 128 tokens") as caught:
        check_request(GenerationRequest(prompt, params_of(max_tokens=100)), 512, scheduler)
    assert caught.value.code == "context_length_exceeded" and caught.value.param == "max_tokens"


def test_a_crowd_gets_through() -> None:
    """Twelve requests of up to 6 blocks through a pool of 8: every one ends, in bounded time, with its own output."""
    small = Small(prefix_cache=True)
    prompts = [prompt_of(20 + 3 * i, i) for i in range(12)]
    kinds = ["greedy", "penalties", "sampled"] * 4
    params = [params_of(**PARAMS[kind], max_tokens=20 + 3 * i) for i, kind in enumerate(kinds)]
    try:
        assert small.together(prompts, params) == [alone(p, q) for p, q in zip(prompts, params, strict=True)]
        assert small.preempted
        small.check_free()
        assert small.engine.stats().steps < 12 * 100
    finally:
        small.engine.shutdown()
