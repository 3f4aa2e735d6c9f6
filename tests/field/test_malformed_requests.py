"""Malformed requests get a 4xx that says what is wrong; the next valid request is served.

https://github.com/vllm-project/vllm/issues/35438 (500 with an empty message), https://github.com/vllm-project/vllm/issues/17664
(/tokenize without messages, /detokenize with -1), https://github.com/ggml-org/llama.cpp/issues/23463.
"""  # noqa: E501

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.service import HOST, Running, say, scripted_service

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
LIMIT = 1 << 20


@pytest.fixture(scope="module")
def service() -> Iterator[Running]:
    with scripted_service(config={"max_body_bytes": LIMIT}) as running:
        yield running


@pytest.fixture(autouse=True)
def the_next_one_is_served(service: Running) -> Iterator[None]:
    yield
    status, reply = service.post(CHAT, {"messages": USER, "extra": say("fine")})
    assert status == 200 and reply["choices"][0]["message"]["content"] == "fine"
    assert service.engine.wait_idle(5)
    assert service.service.gate.active == 0


def refused(reply: tuple[int, dict[str, str], bytes], status: int, param: str | None, code: str | None = None) -> Any:
    assert reply[0] == status, reply
    assert reply[1]["content-type"].startswith("application/json")
    assert len(reply[2]) < 4096
    error = json.loads(reply[2])["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"].strip() and error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert error["code"] is None or isinstance(error["code"], str)
    if code is not None:
        assert error["code"] == code
    return error


@pytest.mark.parametrize("body", [b"{", b"", b"[]", b'"x"', b"\xff", b"[" * 5000, b"9" * 5000])
@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/tokenize", "/detokenize"])
def test_no_json_object(service: Running, path: str, body: bytes) -> None:
    refused(service.call("POST", path, body), 400, None)


def schema(value: Any) -> dict[str, Any]:
    return {"response_format": value}


@pytest.mark.parametrize(("fields", "param"), [
    ({"messages": []}, "messages"), ({"messages": "hi"}, "messages"), ({"messages": None}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"), ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"), ({"temperature": "0.5"}, "temperature"),
    ({"temperature": "warm"}, "temperature"), ({"temperature": float("nan")}, None), ({"top_p": 1.5}, "top_p"),
    ({"top_p": -0.1}, "top_p"),
    ({"n": 0}, "n"), ({"n": 129}, "n"), ({"max_tokens": -1}, "max_tokens"), ({"stop": ["a"] * 5}, "stop"),
    ({"stop": [""]}, "stop"), ({"stop": ""}, "stop"),
    (schema({"type": "json_schema", "schema": {}}), "response_format"), (schema({}), "response_format"),
    ({"top_logprobs": 5}, "top_logprobs"), ({"top_logprobs": 5, "logprobs": False}, "top_logprobs"),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"), ({"logit_bias": {"abc": 5}}, "logit_bias"),
    ({"logit_bias": {"-1": 5}}, "logit_bias"), ({"logit_bias": {"600": 5}}, "logit_bias"),
    ({"logit_bias": {"515": 100}}, "logit_bias"), ({"stop_token_ids": [99999]}, "stop_token_ids"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"presence_penalty": 3}, "presence_penalty"), ({"seed": "x"}, "seed"),
    ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"), ({"repetition_penalty": 1e300}, "repetition_penalty"),
    ({"top_k": 2**70}, "top_k"), ({"max_tokens": 10**30}, "max_tokens"),
])  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_wrong_fields_are_named(service: Running, fields: dict[str, Any], param: str, stream: bool) -> None:
    refused(service.call("POST", CHAT, {"messages": USER, "stream": stream, **fields}), 400, param)


@pytest.mark.parametrize("prompt", [[0, 99999], [-1], [0, 515], [], "", None, [[]], [0, 2**40]])
def test_wrong_prompts(service: Running, prompt: Any) -> None:
    body = {"prompt": prompt, "echo": True, "add_special_tokens": False}
    refused(service.call("POST", "/v1/completions", body), 400, "prompt")


def test_top_p_zero_is_greedy(service: Running) -> None:
    assert service.post(CHAT, {"messages": USER, "top_p": 0})[0] == 200


def test_unknown_model(service: Running) -> None:
    for path, body in (
        (CHAT, {"messages": USER}),
        ("/v1/completions", {"prompt": "x"}),
        ("/tokenize", {"prompt": "x"}),
    ):
        refused(service.call("POST", path, {**body, "model": "gpt-4"}), 404, "model", "model_not_found")
    refused(service.call("POST", CHAT, {"messages": USER, "model": "x" * 100_000}), 404, "model", "model_not_found")
    refused(service.call("GET", "/v1/models/a/b"), 404, "model", "model_not_found")


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_wrong_content_type(service: Running, kind: str) -> None:
    refused(service.call("POST", CHAT, {"messages": USER}, {"Content-Type": kind}), 415, None)


def test_token_endpoints(service: Running) -> None:
    refused(service.call("POST", "/tokenize", {}), 400, "prompt")
    refused(service.call("POST", "/tokenize", {"messages": []}), 400, "messages")
    refused(service.call("POST", "/detokenize", {}), 400, "tokens")
    for tokens in ([-1], [512], [0.5], "x", [None]):
        refused(service.call("POST", "/detokenize", {"tokens": tokens}), 400, "tokens")


def test_unknown_url_and_method(service: Running) -> None:
    refused(service.call("GET", "/v1/nothing/" + "x" * 3000), 404, None, "not_found")
    reply = service.call("GET", CHAT)
    refused(reply, 405, None, "method_not_allowed")
    assert "POST" in reply[1]["allow"]


# ---------------------------------------------------------------- bodies and headers that waitress refuses


HEAD = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


def test_a_body_of_64_mib_is_refused_while_it_is_sent(service: Running) -> None:
    """The client gets its 413 although it is still sending: the connection is not reset under it."""
    started = time.monotonic()
    refused(service.raw(f"{HEAD}Content-Length: {64 << 20}\r\n\r\n", b" " * (64 << 20)), 413, None, "request_too_large")
    assert time.monotonic() - started < 10


def test_an_absurd_length_is_refused_unread(service: Running) -> None:
    started = time.monotonic()
    refused(service.raw(f"{HEAD}Content-Length: 99999999999\r\n\r\n"), 413, None, "request_too_large")
    assert time.monotonic() - started < 1 + 2  # the reply is at once; the socket closes after the lingering


def test_a_refused_body_is_not_asked_for(service: Running) -> None:
    """With Expect: 100-continue the client holds its body back until it hears; it hears 413."""
    reply = service.raw(f"{HEAD}Expect: 100-continue\r\nContent-Length: {64 << 20}\r\n\r\n")
    refused(reply, 413, None)


def test_a_chunked_body_is_cut_at_the_limit(service: Running) -> None:
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    refused(service.raw(f"{HEAD}Transfer-Encoding: chunked\r\n\r\n", chunk * 64), 413, None)


def test_the_largest_body_that_fits(service: Running) -> None:
    body = json.dumps({"messages": USER, "extra": say("ok")}).encode()
    assert service.call("POST", CHAT, body + b" " * (LIMIT - len(body)))[0] == 200
    reply = service.call("POST", CHAT, body + b" " * (LIMIT + 1 - len(body)))
    refused(reply, 413, None)
    assert f"max_body_bytes, {LIMIT} bytes" in reply[2].decode()


@pytest.mark.parametrize("line", ["Content-Length: x", "Content-Length: -1", "bad header", "Transfer-Encoding: gzip"])
def test_malformed_headers(service: Running, line: str) -> None:
    status, headers, body = service.raw(f"{HEAD}{line}\r\n\r\n")
    assert status in (400, 501)
    assert headers["content-type"] == "application/json"
    assert json.loads(body)["error"]["message"]


@pytest.mark.parametrize("target", ["http://[", "http://[::1/v1/models"])
def test_a_target_that_is_no_uri(service: Running, target: str) -> None:
    with socket.create_connection((HOST, service.port), timeout=10) as sock:
        sock.sendall(f"GET {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert sock.recv(100).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize("name", ["top_k", "min_tokens", "max_tokens", "repetition_penalty"])
def test_an_integer_too_large_for_a_float(service: Running, name: str) -> None:
    status, answer = service.post("/v1/completions", {"prompt": "p", name: 10**400})
    assert status == 400 and answer["error"]["param"] == name


def test_few_bytes_do_not_ask_for_a_quarter_of_a_million_sequences(service: Running) -> None:
    status, answer = service.post("/v1/completions", {"prompt": ["a"] * 2048, "n": 128, "max_tokens": 1})
    assert status == 400 and answer["error"]["param"] == "n"


@pytest.mark.parametrize("penalty", [5e-324, 1e-46, 1e-39, 1e-10])
def test_a_penalty_that_would_leave_no_finite_logit(service: Running, penalty: float) -> None:
    status, answer = service.post("/v1/completions", {"prompt": "p", "repetition_penalty": penalty})
    assert status == 400 and answer["error"]["param"] == "repetition_penalty"


def test_stop_ids_that_leave_nothing_to_say(service: Running) -> None:
    every = list(range(service.engine.vocab_size))
    status, answer = service.post("/v1/completions", {"prompt": "p", "stop_token_ids": every, "min_tokens": 1})
    assert status == 400 and answer["error"]["param"] == "stop_token_ids"
