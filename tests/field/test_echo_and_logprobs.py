"""``echo`` with ``logprobs`` and ``max_tokens: 0``: the prompt's own log-probabilities, what evaluation tools score by.

Servers crashed on it, or returned generated tokens only, so that every choice scored 0.0 and evaluations reported exact
chance. vllm-project/vllm#6521, vllm-project/vllm#9336, vllm-project/vllm#5334, vllm-project/vllm#3707,
ggml-org/llama.cpp#27174, EleutherAI/lm-evaluation-harness#1411.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from device.cpu import CpuDevice
from tests.support.engines import load_tiny, tiny_engine
from tests.support.forward import Forward
from tests.support.service import Running

TEXT = "/v1/completions"
PROMPTS = ["The cat sat", "The quick brown fox jumps over the lazy dog. " * 2, "\u4fee\u590d \U0001f30d", "<s>The cat"]
TOLERANCE = 1e-4
COLUMNS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


@pytest.fixture(scope="module")
def forward() -> Forward:
    """A plain forward pass in float64, without scheduler, cache hits or chunks."""
    device = CpuDevice("float64")
    return Forward(load_tiny(device), device)


@pytest.fixture(scope="module", params=["whole", "chunked"])
def served(request: pytest.FixtureRequest) -> Iterator[Running]:
    """float32; once with prompts computed in pieces of 7 tokens and at most 5 logit rows a step."""
    pieces = {"chunk_size": 7, "max_logit_rows": 5, "max_num_seqs": 4} if request.param == "chunked" else {}
    with Running(tiny_engine(dtype="float32", **pieces)) as running:
        yield running


def scores_of(forward: Forward, ids: Sequence[int]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(log-probability of every token but the first, that of the likeliest token there)."""
    logits = forward.rows(ids).astype(np.float64)
    shifted = logits - logits.max(axis=1, keepdims=True)
    table = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return table[np.arange(len(ids) - 1), list(ids[1:])], table.max(axis=1)


def ids_of(service: Running, text: str) -> list[int]:
    ids: list[int] = service.post("/tokenize", {"prompt": text})[1]["tokens"]
    return ids


def ask(service: Running, **fields: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """(choice, usage) of a greedy completion."""
    status, reply = service.post(TEXT, {"temperature": 0, "ignore_eos": True, **fields})
    assert status == 200, reply
    return reply["choices"][0], reply["usage"]


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("max_tokens", [0, 1])
def test_the_prompt_is_scored_as_by_a_plain_forward(
    served: Running, forward: Forward, prompt: str, max_tokens: int
) -> None:
    ids = ids_of(served, prompt)
    choice, usage = ask(served, prompt=prompt, max_tokens=max_tokens, echo=True, logprobs=1)
    scores = choice["logprobs"]
    assert (choice["text"] == prompt) if max_tokens == 0 else choice["text"].startswith(prompt)
    assert usage["completion_tokens"] == max_tokens and usage["prompt_tokens"] == len(ids)
    assert choice["finish_reason"] == "length"
    assert set(scores) == set(COLUMNS)
    assert {len(scores[name]) for name in COLUMNS} == {len(ids) + max_tokens}
    assert "".join(scores["tokens"]) == choice["text"]
    assert all(choice["text"][o:].startswith(t) for o, t in zip(scores["text_offset"], scores["tokens"], strict=True))
    assert scores["token_logprobs"][0] is None and scores["top_logprobs"][0] is None
    expected, best = scores_of(forward, ids)
    found = scores["token_logprobs"]
    assert np.abs(np.array(found[1 : len(ids)]) - expected).max() < TOLERANCE
    assert np.ptp(expected) > 1, "the prompt must tell right values from wrong ones"
    for place, top in enumerate(scores["top_logprobs"][1:], 1):
        assert top[scores["tokens"][place]] == found[place]
        assert max(top.values()) == pytest.approx(best[place - 1], abs=TOLERANCE)
        assert 1 <= len(top) <= 2
    if max_tokens:  # greedy: the generated token is the likeliest
        assert found[-1] == pytest.approx(best[-1], abs=TOLERANCE)


def test_a_cached_prompt_is_scored_as_the_first_time(served: Running) -> None:
    """Cached positions have no logits any more: such a request takes no prefix hit."""
    asked = {"prompt": PROMPTS[1], "max_tokens": 0, "echo": True, "logprobs": 1}
    ask(served, prompt=PROMPTS[1], max_tokens=1)
    first, _ = ask(served, **asked)
    again, usage = ask(served, **asked)
    assert again == first and usage["prompt_tokens_details"]["cached_tokens"] == 0
    assert None not in again["logprobs"]["token_logprobs"][1:]


def test_no_best_tokens_still_gives_the_chosen_ones_value(served: Running, forward: Forward) -> None:
    ids = ids_of(served, PROMPTS[0])
    expected, best = scores_of(forward, ids)
    choice, _ = ask(served, prompt=PROMPTS[0], max_tokens=1, echo=True, logprobs=0)
    values = choice["logprobs"]["token_logprobs"]
    assert values[0] is None
    assert values[1:] == pytest.approx([*expected, best[-1]], abs=TOLERANCE)
    choice, _ = ask(served, prompt=PROMPTS[0], max_tokens=1, logprobs=0)
    assert choice["logprobs"]["token_logprobs"] == pytest.approx([best[-1]], abs=TOLERANCE)


def test_one_token_of_prompt(served: Running) -> None:
    choice, usage = ask(served, prompt=[77], max_tokens=0, echo=True, logprobs=1)
    assert choice["logprobs"]["token_logprobs"] == [None] and usage["completion_tokens"] == 0


def test_nothing_is_asked_for(served: Running) -> None:
    """max_tokens 0 without echo: an empty answer, not an endless one."""
    choice, usage = ask(served, prompt=PROMPTS[0], max_tokens=0)
    assert choice["text"] == "" and choice["finish_reason"] == "length" and choice["logprobs"] is None
    assert usage["completion_tokens"] == 0
    choice, _ = ask(served, prompt=PROMPTS[0], max_tokens=0, logprobs=1)
    assert choice["logprobs"] == {name: [] for name in COLUMNS}


def test_many_prompts_at_once_as_evaluation_tools_send_them(served: Running, forward: Forward) -> None:
    """Each pair of context and continuation is a prompt of ids; what counts is the sum over the continuation."""
    prompts = [ids_of(served, text) for text in PROMPTS * 3]
    status, reply = served.post(
        TEXT, {"prompt": prompts, "temperature": 0, "max_tokens": 0, "echo": True, "logprobs": 1}
    )
    assert status == 200 and len(reply["choices"]) == len(prompts)
    for ids, choice in zip(prompts, reply["choices"], strict=True):
        expected, _ = scores_of(forward, ids)
        assert sum(choice["logprobs"]["token_logprobs"][1:]) == pytest.approx(expected.sum(), abs=TOLERANCE * len(ids))
