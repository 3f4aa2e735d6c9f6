"""A stop string that arrives in parts: no part of it is shown, it is found, and a false start loses nothing.

Servers compared each new piece of text with the stop list: the first part of the stop string had been sent when the
rest came, or it was never noticed. huggingface/text-generation-inference#1254, sgl-project/sglang#11446,
lm-sys/FastChat#3883.
"""

from __future__ import annotations

from typing import Any

import pytest

from runtime.detokenizer import StopStrings, TextStream
from tests.support.service import Running
from tests.support.tokenizers import byte_ids
from tests.support.tokenizers import tiny as tiny_tokens

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"


def stream(texts: list[str], stops: list[str]) -> tuple[list[str], str | None]:
    """Deltas and the stop string found, for texts that arrive one after the other, each of several tokens."""
    found = TextStream(tiny_tokens(), stops)
    deltas = []
    for text in texts:
        delta = found.push(tiny_tokens().encode(text, add_special_tokens=False))
        deltas.append(delta.text)
        if delta.finished_by_stop:
            return deltas, delta.finished_by_stop
    return [*deltas, found.finish().text], None


@pytest.mark.parametrize(
    ("texts", "stops", "expected", "matched"),
    [
        (["The quick br", "own f", "ox jumps"], ["own fox"], "The quick br", "own fox"),
        (["own f", "ish"], ["own fox"], "own fish", None),
        (["xxabcd"], ["abc", "bcd"], "xx", "abc"),
        (["own f"], ["own fox"], "own f", None),
        (["aab", "aac"], ["aabaac"], "", "aabaac"),
        (["aabaab", "aac"], ["aabaac"], "aab", "aabaac"),
        (["x🌍", "y"], ["🌍y"], "x", "🌍y"),
    ],
)
def test_stop_string_over_chunks(texts: list[str], stops: list[str], expected: str, matched: str | None) -> None:
    deltas, found = stream(texts, stops)
    assert "".join(deltas) == expected and found == matched
    whole, found_whole = stream(["".join(texts)], stops)
    assert "".join(whole) == expected and found_whole == matched


def test_only_what_can_still_become_a_stop_string_is_kept_back() -> None:
    finder = StopStrings(["own fox"])
    assert finder.push("The quick br") == ("The quick br", None)
    assert finder.push("own f") == ("", None)
    assert finder.push("ish") == ("own fish", None)
    assert finder.push("town") == ("t", None)
    assert finder.flush() == "own"


# ---------------------------------------------------------------- over HTTP

CASES = [
    (["The quick br", "own f", "ox jumps"], ["own fox"], "The quick br", "stop"),
    (["own f", "ish"], ["own fox"], "own fish", "length"),
    (["xxabcd"], ["abc", "bcd"], "xx", "stop"),
    (["own f"], "own fox", "own f", "length"),
    (["aab", "aac"], ["aabaac", "zz"], "", "stop"),
    (["ab\u4fee", "\u590dc"], ["\u4fee\u590d"], "ab", "stop"),
]


def body_of(path: str, script: list[int], stops: Any) -> dict[str, Any]:
    asked = {"prompt": "p"} if path == TEXT else {"messages": [{"role": "user", "content": "p"}]}
    # nothing but the stop string and the number of tokens ends it
    return {**asked, "extra": {"script": script}, "stop": stops, "max_tokens": len(script), "ignore_eos": True}


def text_of(choice: dict[str, Any]) -> str:
    found: str = choice["text"] if "text" in choice else choice["delta"].get("content", "")
    return found


@pytest.mark.parametrize("path", [TEXT, CHAT])
@pytest.mark.parametrize("by_bytes", [False, True], ids=["words", "bytes"])
@pytest.mark.parametrize(("texts", "stops", "expected", "reason"), CASES)
def test_streamed_and_whole_replies(
    service: Running, path: str, by_bytes: bool, texts: list[str], stops: Any, expected: str, reason: str
) -> None:
    encode = byte_ids if by_bytes else lambda text: tiny_tokens().encode(text, add_special_tokens=False)
    script = [token for text in texts for token in encode(text)]
    body = body_of(path, script, stops)
    chunks = service.stream(path, body)
    assert chunks[-1] == "[DONE]"
    choices = [choice for chunk in chunks[:-1] for choice in chunk["choices"]]
    deltas = [text_of(choice) for choice in choices]
    assert "".join(deltas) == expected
    assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + [reason]
    whole = service.post(path, body)[1]["choices"][0]
    assert (whole["text"] if path == TEXT else whole["message"]["content"]) == expected
    assert whole["finish_reason"] == reason
    assert service.engine.wait_idle(5), "the engine does not go on behind a stop string"


def test_what_cannot_become_a_stop_string_is_sent_at_once(service: Running) -> None:
    """Only what may still grow into one is kept back: at most its length less one."""
    body = body_of(TEXT, byte_ids("The quick brown fish"), "own fox")
    deltas = [text_of(c) for chunk in service.stream(TEXT, body)[:-1] for c in chunk["choices"] if text_of(c)]
    assert deltas == [*"The quick br", "own fi", *"sh"]


def test_n_choices_stop_each_for_itself(service: Running) -> None:
    body = {**body_of(CHAT, byte_ids("one two three"), ["two"]), "n": 3}
    chunks = service.stream(CHAT, body)[:-1]
    for index in range(3):
        choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert "".join(map(text_of, choices)) == "one " and choices[-1]["finish_reason"] == "stop"
