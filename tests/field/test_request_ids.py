"""A client's request id is a label: it may be the same twice, absurdly long or unprintable.

https://github.com/vllm-project/vllm/issues/10583 (two live requests with one id), and
https://github.com/vllm-project/vllm-omni/issues/2048 (ids made from whole seconds: a request hung for ever).
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.service import Running, say, scripted_service

CHAT = "/v1/chat/completions"
HEAD = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def service() -> Iterator[Running]:
    with scripted_service() as running:
        yield running


def ask(service: Running, text: str, headers: dict[str, str], stream: bool) -> tuple[str, str]:
    """(text, id of the reply)."""
    body: dict[str, Any] = {"messages": USER, "extra": say(text)}
    if not stream:
        _, reply = service.post(CHAT, body, headers)
        return reply["choices"][0]["message"]["content"], reply["id"]
    chunks = service.stream(CHAT, body)[:-1]
    return "".join(c["choices"][0]["delta"].get("content", "") for c in chunks), chunks[0]["id"]


@pytest.mark.parametrize("stream", [False, True])
def test_the_same_id_at_the_same_time(service: Running, stream: bool) -> None:
    texts = [chr(ord("a") + i) * (60 + i) for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(lambda text: ask(service, text, {"X-Request-Id": "same"}, stream), texts))
    assert [text for text, _ in got] == texts
    assert len({id for _, id in got}) == len(texts)


def test_fifty_at_once_without_ids(service: Running) -> None:
    texts = [f"answer {i}" for i in range(50)]
    with ThreadPoolExecutor(50) as pool:
        got = list(pool.map(lambda text: ask(service, text, {}, False), texts))
    assert [text for text, _ in got] == texts
    assert len({id for _, id in got}) == 50


def test_the_label_comes_back(service: Running) -> None:
    body = {"messages": USER, "extra": say("ok")}
    assert service.call("POST", CHAT, body, {"X-Request-Id": "trace-7"})[1]["x-request-id"] == "trace-7"
    own = {service.call("POST", CHAT, body)[1]["x-request-id"] for _ in range(3)}
    assert len(own) == 3
    assert service.call("GET", "/nowhere", None, {"X-Request-Id": "trace-8"})[1]["x-request-id"] == "trace-8"


def test_long_and_unprintable_ids_are_cut(service: Running) -> None:
    body = {"messages": USER, "extra": say("ok")}
    status, headers, _ = service.call("POST", CHAT, body, {"X-Request-Id": "x" * 5000})
    assert status == 200 and headers["x-request-id"] == "x" * 128
    status, headers, _ = service.call("POST", CHAT, body, {"X-Request-Id": "a\tb\x80\xffc d"})
    assert status == 200 and headers["x-request-id"] == "abcd"


def test_an_id_of_a_mebibyte_is_refused(service: Running) -> None:
    status, headers, body = service.raw(f"{HEAD}X-Request-Id: {'x' * (1 << 20)}\r\n\r\n")
    assert status == 431 and headers["content-type"] == "application/json"
    assert b"xxxx" not in body and len(body) < 4096


@pytest.mark.parametrize("bad", ["a\x00b", "a\x07b", "a\nb", "a\rb"])
def test_control_characters_are_refused_or_gone(service: Running, bad: str) -> None:
    status, headers, body = service.raw(
        f"{HEAD}X-Request-Id: {bad}\r\nContent-Length: 2\r\nConnection: close\r\n\r\n", b"{}"
    )
    assert status == 400
    assert all(" " <= c <= "~" for c in headers.get("x-request-id", "")) and b"\x00" not in body
    assert service.post(CHAT, {"messages": USER, "extra": say("ok")})[0] == 200
