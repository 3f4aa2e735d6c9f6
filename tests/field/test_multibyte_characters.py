"""Characters whose bytes come in several tokens: never U+FFFD while they can be completed, never a frozen stream.

Decoding each byte token alone sends U+FFFD to the client; a server that had sent one suppressed every later delta.
waybarrios/vllm-mlx#109, Luce-Org/lucebox#641, penta2himajin/qwisp#134.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from runtime.detokenizer import TextStream
from runtime.tokenizer import Tokenizer
from tests.support.service import Running
from tests.support.tokenizers import byte_ids, sentencepiece, tiny


def fallback_ids(raw: bytes) -> list[int]:
    found = [sentencepiece("plain").token_id(f"<0x{b:02X}>") for b in raw]
    assert None not in found
    return [i for i in found if i is not None]


KINDS = [
    pytest.param(tiny(), byte_ids, id="byte level"),
    pytest.param(sentencepiece("plain"), fallback_ids, id="byte fallback"),
]


@pytest.mark.parametrize(("tokenizer", "ids_of"), KINDS)
@pytest.mark.parametrize("stops", [[], ["zzz"]])
def test_multibyte_characters_arrive_whole(tokenizer: Tokenizer, ids_of: type[list[int]], stops: list[str]) -> None:
    stream = TextStream(tokenizer, stops)
    ids = ids_of("a🌍b修复".encode())
    deltas = [stream.push((i,)).text for i in ids] + [stream.finish().text]
    assert not any("\ufffd" in delta for delta in deltas)
    assert "".join(deltas) == "a🌍b修复"
    assert deltas[1:5] == ["", "", "", "🌍"]
    assert stream.tokens == len(ids) == 12


@pytest.mark.parametrize(("tokenizer", "ids_of"), KINDS)
def test_a_character_cut_off_by_the_limit_is_one_replacement(tokenizer: Tokenizer, ids_of: type[list[int]]) -> None:
    stream = TextStream(tokenizer)
    ids = ids_of("a🌍".encode()[:3])
    deltas = [stream.push((i,)).text for i in ids]
    assert deltas == ["a", "", ""]
    assert stream.finish().text == "\ufffd"
    assert stream.tokens == 3


@pytest.mark.parametrize(("tokenizer", "ids_of"), KINDS)
def test_the_stream_goes_on_after_a_broken_character(tokenizer: Tokenizer, ids_of: type[list[int]]) -> None:
    stream = TextStream(tokenizer)
    deltas = [stream.push((i,)).text for i in ids_of(b"a\xf0\x9fbc\xff" + "d🌍".encode())]
    assert "".join(deltas) + stream.finish().text == "a\ufffdbc\ufffdd🌍"


# ---------------------------------------------------------------- over HTTP

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"


def body_of(path: str, raw: bytes, **fields: Any) -> dict[str, Any]:
    asked = {"prompt": "p"} if path == TEXT else {"messages": [{"role": "user", "content": "p"}]}
    return {**asked, "extra": {"script": byte_ids(raw)}, **fields}


def text_of(choice: dict[str, Any]) -> str:
    found: str = choice["text"] if "text" in choice else choice["delta"].get("content", "")
    return found


def lines_of(service: Running, path: str, body: dict[str, Any]) -> list[bytes]:
    """The data lines of a stream as they came over the wire."""
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    with service.open(path, asked) as response:
        assert response.status == 200
        return [line[6:].strip() for line in response if line.startswith(b"data: ")]


@pytest.mark.parametrize("path", [TEXT, CHAT])
@pytest.mark.parametrize(
    ("raw", "limit", "expected", "reason"),
    [
        ("a🌍b修复".encode(), None, "a🌍b修复", "stop"),
        ("修复".encode(), None, "修复", "stop"),
        ("a🌍".encode(), 3, "a\ufffd", "length"),  # two of the four bytes
        ("🌍".encode(), 1, "\ufffd", "length"),
        (b"a\xf0\x9fb" + "修".encode(), None, "a\ufffdb修", "stop"),
    ],
)
def test_streams(service: Running, path: str, raw: bytes, limit: int | None, expected: str, reason: str) -> None:
    body = body_of(path, raw, **({} if limit is None else {"max_tokens": limit}))
    lines = lines_of(service, path, body)
    assert lines[-1] == b"[DONE]"
    *chunks, usage = [json.loads(line.decode("utf-8", "strict")) for line in lines[:-1]]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    deltas = [text_of(choice) for choice in choices]
    assert "".join(deltas) == expected
    assert sum(delta.count("\ufffd") for delta in deltas) == expected.count("\ufffd")
    assert choices[-1]["finish_reason"] == reason
    tokens = len(raw) + 1 if limit is None else limit  # with the end-of-text token
    assert usage["usage"]["completion_tokens"] == tokens
    status, whole = service.post(path, body)
    assert status == 200
    choice = whole["choices"][0]
    assert (choice["text"] if path == TEXT else choice["message"]["content"]) == expected
    assert choice["finish_reason"] == reason and whole["usage"]["completion_tokens"] == tokens


def test_a_character_is_sent_when_its_last_byte_has_come(service: Running) -> None:
    lines = lines_of(service, TEXT, body_of(TEXT, "a🌍b".encode()))
    deltas = [text_of(c) for line in lines[:-2] for c in json.loads(line)["choices"] if text_of(c)]
    assert deltas == ["a", "🌍", "b"]
