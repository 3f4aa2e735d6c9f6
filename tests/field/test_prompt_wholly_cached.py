"""A prompt whose blocks are all cached still computes at least one token: there must be logits to sample from.

With a length that is a multiple of the block size a full hit left nothing to run: a query of length 0, an exception,
or a block counted wrongly. GeeeekExplorer/nano-vllm#144, GeeeekExplorer/nano-vllm#199, vllm-project/vllm#7753.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from runtime.scheduler import Plan
from tests.support.engines import KVOracle, tiny_engine
from tests.support.pace import Pace
from tests.support.service import Running, events

BLOCK = 16
TEXT = "/v1/completions"


class Watched:
    """A service with the tiny model, and what its steps computed: (start, count) of each item."""

    def __init__(self) -> None:
        engine = tiny_engine(block_size=BLOCK, start=False)
        KVOracle(engine)  # what a step reads was computed for the prefix it is read as
        self.items: list[tuple[int, int]] = []
        Pace(look=self._look).attach(engine)
        engine.start()
        self.service = Running(engine)

    def _look(self, plan: Plan) -> None:
        self.items.extend(zip(plan.starts, plan.counts, strict=True))

    def ask(self, prompt: list[int], **fields: Any) -> tuple[Any, int]:
        """(choice, cached tokens)."""
        self.items.clear()
        body = {"prompt": prompt, "temperature": 0, "max_tokens": 4, "ignore_eos": True, "logprobs": 3, **fields}
        status, reply = self.service.post(TEXT, body)
        assert status == 200, reply
        assert all(count >= 1 for _, count in self.items)
        return reply["choices"][0], reply["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.fixture
def watched() -> Iterator[Watched]:
    found = Watched()
    with found.service:
        yield found


def prompt_of(length: int) -> list[int]:
    return [0, *((i * 37 + 11) % 500 + 5 for i in range(length - 1))]


def check_same(found: Any, expected: Any) -> None:
    scores, wanted = found["logprobs"], expected["logprobs"]
    assert found["text"] == expected["text"] and scores["tokens"] == wanted["tokens"]
    assert scores["token_logprobs"] == pytest.approx(wanted["token_logprobs"], abs=1e-9)
    for top, wanted_top in zip(scores["top_logprobs"], wanted["top_logprobs"], strict=True):
        assert top == pytest.approx(wanted_top, abs=1e-9)
    assert found["finish_reason"] == expected["finish_reason"] == "length"


@pytest.mark.parametrize(("length", "cached"), [(32, 16), (31, 16), (33, 32), (16, 0), (17, 16), (1, 0)])
def test_the_second_time_gives_the_same(watched: Watched, length: int, cached: int) -> None:
    prompt = prompt_of(length)
    first, hits = watched.ask(prompt)
    assert hits == 0 and watched.items[0] == (0, length)
    for _ in range(2):
        again, hits = watched.ask(prompt)
        check_same(again, first)
        assert hits == cached <= length - 1
        assert watched.items[0] == (cached, length - cached)
    stats = watched.service.engine.stats()
    assert stats.prefix_hits == 2 * cached and stats.prefix_queries == 3 * length
    assert stats.blocks_free == stats.blocks_total


def test_longer_and_shorter_prompts_over_the_same_blocks(watched: Watched) -> None:
    """The lengths one after the other, all with one common beginning; each as it is without a cache."""
    lengths = [32, 31, 33, 16, 48, 17, 32, 15, 64, 33]
    fresh = {n: watched.ask(prompt_of(n), cache_salt=f"alone {n}")[0] for n in set(lengths)}
    longest = 0
    for n in lengths:
        choice, hits = watched.ask(prompt_of(n))
        check_same(choice, fresh[n])
        assert hits <= n - 1 and hits == min((n - 1) // BLOCK, longest // BLOCK) * BLOCK
        longest = max(longest, n)


def test_two_at_once_share_what_is_cached(watched: Watched) -> None:
    """Both hit the same blocks in one step; each computes its own last token."""
    prompt = prompt_of(32)
    first, _ = watched.ask(prompt)
    body = {"prompt": [prompt, prompt], "temperature": 0, "max_tokens": 4, "ignore_eos": True, "logprobs": 3}
    status, reply = watched.service.post(TEXT, body)
    assert status == 200
    for choice in reply["choices"]:
        check_same(choice, first)
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 2 * BLOCK


def test_streamed(watched: Watched) -> None:
    prompt = prompt_of(32)
    first, _ = watched.ask(prompt)
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 4, "ignore_eos": True, "stream": True}
    with watched.service.open(TEXT, body | {"stream_options": {"include_usage": True}}) as response:
        *chunks, last, done = events(response)
    assert done == "[DONE]" and "".join(c["choices"][0]["text"] for c in chunks) == first["text"]
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] == 16


def test_salts_do_not_share(watched: Watched) -> None:
    prompt = prompt_of(33)
    watched.ask(prompt, cache_salt="a")
    assert watched.ask(prompt, cache_salt="b")[1] == 0
    assert watched.ask(prompt)[1] == 0
    assert watched.ask(prompt, cache_salt="a")[1] == 32
