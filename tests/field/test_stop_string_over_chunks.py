"""A stop string that arrives in parts: no part of it is shown, it is found, and a false start loses nothing.

Servers compared each new piece of text with the stop list: the first part of the stop string had been sent when the
rest came, or it was never noticed. huggingface/text-generation-inference#1254, sgl-project/sglang#11446,
lm-sys/FastChat#3883.
"""

from __future__ import annotations

import pytest

from runtime.detokenizer import StopStrings, TextStream
from tests.support.tokenizers import tiny


def stream(texts: list[str], stops: list[str]) -> tuple[list[str], str | None]:
    """Deltas and the stop string found, for texts that arrive one after the other, each of several tokens."""
    found = TextStream(tiny(), stops)
    deltas = []
    for text in texts:
        delta = found.push(tiny().encode(text, add_special_tokens=False))
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
