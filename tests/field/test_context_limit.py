"""A request over the context limit is a 400 that names both numbers, streamed or not, before anything is answered.

Streaming answered 200 with an error inside while the plain call answered 400, and elsewhere it was a 500.
sgl-project/sglang#19996, sgl-project/sglang#20027, vllm-project/vllm#12165, vllm-project/vllm#13067,
kserve/kserve#3886.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.service import Running, scripted_service

LIMIT = 64
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
MODES = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
PATHS = pytest.mark.parametrize("path", [TEXT, CHAT])


@pytest.fixture(scope="module")
def short() -> Iterator[Running]:
    """A model with a context of 64 that never ends by itself."""
    with scripted_service(text="x" * 200, max_len=LIMIT) as running:
        yield running


def messages_of(service: Running, tokens: int) -> list[dict[str, str]]:
    """A conversation of exactly so many tokens."""
    for length in range(2 * tokens):
        messages = [{"role": "user", "content": "x" * length}]
        if service.post("/tokenize", {"messages": messages})[1]["count"] == tokens:
            return messages
    raise AssertionError(f"no conversation of {tokens} tokens")


def body_of(service: Running, path: str, tokens: int, **fields: Any) -> dict[str, Any]:
    """A request whose prompt has exactly so many tokens."""
    if path == TEXT:
        return {"prompt": [5] * tokens, **fields}
    return {"messages": messages_of(service, tokens), **fields}


def reply_of(service: Running, path: str, body: dict[str, Any]) -> tuple[int, str]:
    """(output tokens, finish reason) of a request that is served, by usage."""
    if not body.get("stream"):
        status, reply = service.post(path, body)
        assert status == 200, reply
        return reply["usage"]["completion_tokens"], reply["choices"][0]["finish_reason"]
    chunks = service.stream(path, {**body, "stream_options": {"include_usage": True}})
    assert chunks[-1] == "[DONE]"
    reasons = [choice["finish_reason"] for chunk in chunks[:-1] for choice in chunk["choices"]]
    assert reasons[:-1] == [None] * (len(reasons) - 1)
    return chunks[-2]["usage"]["completion_tokens"], reasons[-1]


def check_refused(service: Running, path: str, body: dict[str, Any], asked: int) -> None:
    status, headers, raw = service.call("POST", path, body)
    assert status == 400
    assert headers["content-type"] == "application/json" and b"data:" not in raw
    error = json.loads(raw)["error"]
    assert error["code"] == "context_length_exceeded" and error["type"] == "invalid_request_error"
    assert error["param"] in ("prompt", "messages", "max_tokens")
    assert {str(LIMIT), str(asked)} <= set(re.findall(r"\d+", error["message"])), error["message"]


@MODES
@PATHS
def test_one_token_short_of_the_limit_has_room_for_one(short: Running, path: str, stream: bool) -> None:
    assert reply_of(short, path, body_of(short, path, LIMIT - 1, max_tokens=1, stream=stream)) == (1, "length")


@MODES
@PATHS
@pytest.mark.parametrize("tokens", [LIMIT, LIMIT + 1])
def test_a_prompt_that_leaves_no_room_is_refused(short: Running, path: str, tokens: int, stream: bool) -> None:
    body = body_of(short, path, tokens, max_tokens=1, stream=stream)
    check_refused(short, path, body, tokens)
    assert short.post(path, body)[1]["error"]["param"] == ("prompt" if path == TEXT else "messages")
    if path == CHAT:
        del body["max_tokens"]
        check_refused(short, path, body, tokens)
    assert reply_of(short, path, body_of(short, path, 40, max_tokens=2)) == (2, "length")  # the next one is served


@MODES
def test_a_full_context_can_be_scored(short: Running, stream: bool) -> None:
    assert reply_of(short, TEXT, {"prompt": [5] * LIMIT, "max_tokens": 0, "stream": stream}) == (0, "length")
    check_refused(short, TEXT, {"prompt": [5] * (LIMIT + 1), "max_tokens": 0, "stream": stream}, LIMIT + 1)


@MODES
@PATHS
def test_prompt_and_output_together(short: Running, path: str, stream: bool) -> None:
    body = body_of(short, path, 60, max_tokens=10, stream=stream)
    check_refused(short, path, body, 70)
    assert short.post(path, body)[1]["error"]["param"] == "max_tokens"
    assert reply_of(short, path, {**body, "max_tokens": 4}) == (4, "length")


@MODES
def test_without_max_tokens_the_context_is_filled(short: Running, stream: bool) -> None:
    assert reply_of(short, CHAT, body_of(short, CHAT, 60, stream=stream)) == (4, "length")


@MODES
def test_one_prompt_of_a_list_is_enough(short: Running, stream: bool) -> None:
    """The first of the list fits; it is not answered alone, and leaves nothing behind."""
    check_refused(short, TEXT, {"prompt": [[5] * 3, [5] * LIMIT], "max_tokens": 1, "stream": stream}, LIMIT)
    assert short.engine.wait_idle(5)
    stats = short.engine.stats()
    assert stats.running == stats.waiting == 0 and stats.blocks_free == stats.blocks_total
