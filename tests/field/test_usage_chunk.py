"""Usage in a stream: one extra chunk when asked for, none otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.service import Running, say, scripted_service

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
ASKED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    COMPLETIONS: {"prompt": "hi"},
}


@pytest.fixture(scope="module")
def service() -> Iterator[Running]:
    with scripted_service() as running:
        yield running


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_no_usage_unless_asked_for(service: Running, path: str) -> None:
    """https://github.com/Arthur-Ficial/apfel/issues/100: a usage chunk that nobody asked for broke clients."""
    for options in ({}, {"stream_options": None}, {"stream_options": {"include_usage": False}}):
        chunks = service.stream(path, {**ASKED[path], **options, "extra": say("abc")})
        assert chunks[-1] == "[DONE]"
        assert all(chunk["choices"] for chunk in chunks[:-1])
        assert all("usage" not in chunk for chunk in chunks[:-1])


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("n", [1, 3])
def test_one_usage_chunk_before_the_end(service: Running, path: str, n: int) -> None:
    """https://github.com/ROCm/ATOM/issues/1711: no ``choices`` key. https://github.com/InternLM/lmdeploy/issues/3859:
    usage in every chunk."""
    asked = {**ASKED[path], "n": n, "extra": say("abc")}
    chunks = service.stream(path, {**asked, "stream_options": {"include_usage": True}})
    assert chunks[-1] == "[DONE]"
    *earlier, last = chunks[:-1]
    assert last["choices"] == []
    assert all(chunk["choices"] and chunk["usage"] is None for chunk in earlier)
    whole = service.post(path, asked)[1]["usage"]
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [last["usage"][name] for name in counts] == [whole[name] for name in counts]
    assert whole["completion_tokens"] == 4 * n


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_stream_options_are_only_for_streams(service: Running, path: str) -> None:
    for stream in ({}, {"stream": False}):
        status, reply = service.post(path, {**ASKED[path], **stream, "stream_options": {"include_usage": True}})
        assert (status, reply["error"]["param"]) == (400, "stream_options")
