"""Token ids to text while they arrive: whole characters only, and never a part of a stop string.

Everything here works token by token, so the joined pieces are the same however the ids were split into pushes, and
a whole output is the special case of one push.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from device.errors import RequestRejected
from runtime.tokenizer import Tokenizer


class Detokenizer:
    """Turns ids into text as far as it is certain; O(bytes of the token) each, whatever came before.

    Bytes that may still become a character are kept back. Bytes that no continuation can save come out as U+FFFD at
    once. Ids without a token (a model's padding) give nothing.

    prompt_tail: the ids that stand before the first pushed one, all or the last of them. They give no text, but they
        say whether a leading space belongs to the output, and begin a character that the output may finish.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True, prompt_tail: Sequence[int] = ()) -> None:
        self._bytes_of = tokenizer.token_bytes
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = tokenizer.strips_leading_space
        tail = b""
        for token in reversed(prompt_tail):
            if token not in self._skipped:
                tail = self._bytes_of(token) + tail
                if len(tail) > 2:
                    break
        if tail:
            self._strip = False
            self._decoder.decode(_begun_character(tail))

    def push(self, ids: Iterable[int]) -> str:
        """The text that became certain with these ids, often "" within a character."""
        raw = b"".join([self._bytes_of(token) for token in ids if token not in self._skipped])
        if self._strip and raw:
            self._strip = False
            if raw[0] == 0x20:
                raw = raw[1:]
        return self._decoder.decode(raw)

    def flush(self) -> str:
        """The end: one U+FFFD if the last character was never finished, otherwise ""."""
        return self._decoder.decode(b"", True)


def _begun_character(raw: bytes) -> bytes:
    """The last one to three bytes if they are the valid beginning of an unfinished character, otherwise b""."""
    for length in range(min(3, len(raw)), 0, -1):
        end = raw[-length:]
        if end[0] >= 0xC2 and codecs.getincrementaldecoder("utf-8")("replace").decode(end) == "":
            return end
    return b""


class _Pattern:
    """One stop string and how much of it the text so far ends with (Knuth, Morris and Pratt 1977)."""

    __slots__ = ("border", "matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self.border = [0] * len(text)
        length = 0
        for i in range(1, len(text)):
            while length and text[i] != text[length]:
                length = self.border[length - 1]
            length += text[i] == text[length]
            self.border[i] = length

    def feed(self, char: str) -> bool:
        """Takes one character; True if the stop string ends with it."""
        matched, text = self.matched, self.text
        while matched and text[matched] != char:
            matched = self.border[matched - 1]
        matched += text[matched] == char
        complete = matched == len(text)
        self.matched = self.border[-1] if complete else matched
        return complete


class StopStrings:
    """Looks for stop strings in a growing text and keeps back only what may still become one.

    The stop string that is complete first ends the text; of two that are complete with the same character, the
    longer. So the result does not depend on how the text arrives. Each character costs O(number of stop strings).

    include: whether the matched stop string stays in the text.
    Raises RequestRejected(param="stop") for an empty stop string.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        if any(not stop for stop in stops):
            raise RequestRejected(
                "stop holds an empty string; leave it out or give at least one character", param="stop"
            )
        self._patterns = [_Pattern(stop) for stop in dict.fromkeys(stops)]
        self._firsts = frozenset(stop[0] for stop in stops)
        self._include = include
        self._held = ""

    def push(self, text: str, armed: bool = True) -> tuple[str, str | None]:
        """(text that is safe to show, the stop string that ended it or None). After a match push no more.

        armed: whether a stop string that is complete within this text counts. What was pushed unarmed may still be
            the beginning of one that counts.
        """
        if not self._patterns or (not self._held and self._firsts.isdisjoint(text)):
            return text, None
        start = len(self._held)
        text = self._held + text
        for end in range(start, len(text)):
            char = text[end]
            complete = [p for p in self._patterns if p.feed(char)]
            if complete and armed:
                stop = max((p.text for p in complete), key=len)
                self._held = ""
                return text[: end + 1 - (0 if self._include else len(stop))], stop
        keep = max(p.matched for p in self._patterns)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush(self) -> str:
        """The end without a match: what was kept back."""
        held, self._held = self._held, ""
        return held


class TextDelta(NamedTuple):
    """What some tokens added to the text of a choice."""

    text: str
    """Safe to show: joins with the other deltas to the whole output."""
    finished_by_stop: str | None
    """The stop string that ended the output; tokens after it do not count."""
    tokens_used: int
    """How many of the pushed tokens belong to the output, the one that completed the stop string included."""
    offsets: tuple[int, ...]
    """For each used token, where its text begins: characters from the start of the choice's text, before stop strings
    cut it. A token that starts inside a character has that character's place."""


class TextStream:
    """The text of one choice: `Detokenizer` and `StopStrings` together.

    stops, include_stop: see `StopStrings`. min_tokens: a stop string counts only if it is complete with a later
    token than that many. prompt: the ids before the output.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        *,
        include_stop: bool = False,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
        prompt: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._prompt = prompt
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens, prompt)
        self._stops = StopStrings(stops, include_stop)
        self._min_tokens = min_tokens
        self._tokens = 0
        self._length = 0
        self._stopped: str | None = None

    @property
    def tokens(self) -> int:
        """Output tokens so far: what usage counts."""
        return self._tokens

    @property
    def length(self) -> int:
        """Characters so far, those kept back included: where the text of the next token begins."""
        return self._length

    def echo(self) -> TextDelta:
        """The prompt itself as the beginning of the text (OpenAI's ``echo``). Only before the first push.

        Stop strings are not looked for in it, and its tokens are not output tokens.
        """
        if self._tokens or self._length:
            raise ValueError("echo() comes before the first push()")
        self._detokenizer = Detokenizer(self._tokenizer, self._skip)
        parts: list[str] = []
        offsets: list[int] = []
        for token in self._prompt:
            offsets.append(self._length)
            text = self._detokenizer.push((token,))
            self._length += len(text)
            parts.append(text)
        return TextDelta("".join(parts), None, len(offsets), tuple(offsets))

    def push(self, ids: Sequence[int], stop_token: bool = False) -> TextDelta:
        """Takes the next tokens. After a stop string was found, takes none and says so again.

        stop_token: the last of these ids ended the output and is no part of its text (end of text, stop_token_ids);
            it is counted.
        """
        parts: list[str] = []
        offsets: list[int] = []
        last = len(ids) - 1
        for i, token in enumerate(ids):
            if self._stopped is not None:
                break
            offsets.append(self._length)
            self._tokens += 1
            text = "" if stop_token and i == last else self._detokenizer.push((token,))
            if text:
                self._length += len(text)
                safe, self._stopped = self._stops.push(text, self._tokens > self._min_tokens)
                parts.append(safe)
        return TextDelta("".join(parts), self._stopped, len(offsets), tuple(offsets))

    def finish(self) -> TextDelta:
        """The end of the output: whatever was kept back, which holds no stop string."""
        if self._stopped is not None:
            return TextDelta("", self._stopped, 0, ())
        rest = self._detokenizer.flush()
        self._length += len(rest)
        return TextDelta(self._stops.flush() + rest, None, 0, ())
