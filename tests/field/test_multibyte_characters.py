"""Characters whose bytes come in several tokens: never U+FFFD while they can be completed, never a frozen stream.

Decoding each byte token alone sends U+FFFD to the client; a server that had sent one suppressed every later delta.
waybarrios/vllm-mlx#109, Luce-Org/lucebox#641, penta2himajin/qwisp#134.
"""

from __future__ import annotations

import pytest

from runtime.detokenizer import TextStream
from runtime.tokenizer import Tokenizer
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
