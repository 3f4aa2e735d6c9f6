"""JSON bodies and server-sent events of the two generation endpoints.

Field names and shapes follow OpenAI's specification (https://github.com/openai/openai-openapi). A stream sends one
write per engine event; what all its chunks share is serialised once.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from runtime.tokenizer import Tokenizer
from server.answers import Answers, Entry, Piece

LOWEST = -9999.0
"""What OpenAI sends for a log-probability too small to be told; JSON has no -Infinity."""

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment that event-stream readers skip: it keeps proxies from closing a connection that waits for its prefill."""


def dumps(value: Any) -> str:
    """Compact JSON without NaN or Infinity. Text stays readable, but for three line separators of Unicode that some
    clients take for the end of an event's line."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    if not text.isascii():
        text = text.replace("\u2028", "\\u2028").replace("\u2029", "\\u2029").replace("\x85", "\\u0085")
    return text


def event(value: Any) -> bytes:
    """One server-sent event with a JSON value."""
    return f"data: {dumps(value)}\n\n".encode()


def usage(answers: Answers) -> dict[str, Any]:
    """The usage object. A prompt counts once, however many choices continue it."""
    prompt, completion = answers.prompt_tokens, answers.completion_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": answers.cached_tokens},
    }


def chat_logprobs(tokenizer: Tokenizer, entries: Iterable[Entry]) -> dict[str, Any]:
    """``choice.logprobs`` of chat. ``token`` of a part of a character is U+FFFD; ``bytes`` are exact."""
    return {"content": [_chat_entry(tokenizer, entry) for entry in entries], "refusal": None}


def _chat_entry(tokenizer: Tokenizer, entry: Entry) -> dict[str, Any]:
    scores = entry.scores
    top = scores.top if scores else ()
    return {
        **_chat_token(tokenizer, entry.token, scores.logprob if scores else LOWEST),
        "top_logprobs": [_chat_token(tokenizer, token, value) for token, value in top],
    }


def _chat_token(tokenizer: Tokenizer, token: int, value: float) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token)
    return {"token": raw.decode("utf-8", "replace"), "logprob": _finite(value), "bytes": list(raw)}


def completion_logprobs(tokenizer: Tokenizer, entries: Sequence[Entry]) -> dict[str, Any]:
    """``choice.logprobs`` of completions: four lists, one place per token.

    ``tokens`` join to the text. The keys of ``top_logprobs`` are texts of single tokens; the chosen one's is as in
    ``tokens``, and a part of a character is written ``bytes:\\xe2\\x9c``. ``text_offset`` counts characters from the
    beginning of the choice's text (the echoed prompt included).
    """
    return {
        "tokens": [entry.text for entry in entries],
        "token_logprobs": [None if e.scores is None else _finite(e.scores.logprob) for e in entries],
        "top_logprobs": [_top(tokenizer, entry) for entry in entries],
        "text_offset": [entry.offset for entry in entries],
    }


def _top(tokenizer: Tokenizer, entry: Entry) -> dict[str, float] | None:
    if entry.scores is None:
        return None
    top = {entry.text: _finite(entry.scores.logprob)}
    for token, value in entry.scores.top:
        if token != entry.token:
            top.setdefault(_key(tokenizer, token), _finite(value))
    return top


def _key(tokenizer: Tokenizer, token: int) -> str:
    raw = tokenizer.token_bytes(token)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _finite(value: float) -> float:
    return value if value > LOWEST else LOWEST  # NaN compares false too


class Reply:
    """What one endpoint sends. Subclasses give the two shapes.

    fingerprint: OpenAI's ``system_fingerprint``. logprobs: whether choices have them.
    """

    prefix = ""
    whole = ""
    chunk = ""

    def __init__(self, tokenizer: Tokenizer, model: str, fingerprint: str, *, logprobs: bool) -> None:
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self.logprobs = logprobs
        self._tokenizer = tokenizer
        self._created = int(time.time())
        self._model = model
        self._fingerprint = fingerprint
        self._head = ""
        self._tail = ""

    def head(self, kind: str) -> dict[str, Any]:
        """The fields that every body or chunk has."""
        return {
            "id": self.id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": self._fingerprint,
        }

    def body(self, choices: int, pieces: Iterable[Piece], answers: Answers) -> dict[str, Any]:
        """The whole reply, made of all pieces of all choices. Runs the iterator to its end."""
        texts: list[list[str]] = [[] for _ in range(choices)]
        entries: list[list[Entry]] = [[] for _ in range(choices)]
        reasons: list[str | None] = [None] * choices
        for piece in pieces:
            texts[piece.choice].append(piece.text)
            entries[piece.choice] += piece.entries
            reasons[piece.choice] = piece.finish_reason or reasons[piece.choice]
        made = [self.choice(i, "".join(texts[i]), entries[i], reasons[i]) for i in range(choices)]
        return {**self.head(self.whole), "choices": made, "usage": usage(answers)}

    def begin_stream(self, include_usage: bool) -> None:
        """Serialise what the chunks share. With ``include_usage`` every chunk but the last carries a null usage."""
        self._head = dumps(self.head(self.chunk))[:-1] + ',"choices":['
        self._tail = '],"usage":null}' if include_usage else "]}"

    def event(self, choice: dict[str, Any]) -> str:
        """A chunk with one choice, as a server-sent event."""
        return f"data: {self._head}{dumps(choice)}{self._tail}\n\n"

    def usage_event(self, answers: Answers) -> bytes:
        """The extra chunk at the end: no choices, the usage."""
        return event({**self.head(self.chunk), "choices": [], "usage": usage(answers)})

    def first(self, choices: int) -> bytes:
        """What a stream opens with, before any token."""
        return b""

    def choice(self, index: int, text: str, entries: list[Entry], reason: str | None) -> dict[str, Any]:
        """One element of ``choices``."""
        raise NotImplementedError

    def write(self, pieces: Iterable[Piece]) -> bytes:
        """The chunks of some pieces; b"" when they show nothing."""
        raise NotImplementedError


class ChatReply(Reply):
    """``chat.completion`` and its chunks."""

    prefix, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def choice(self, index: int, text: str, entries: list[Entry], reason: str | None) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": chat_logprobs(self._tokenizer, entries) if self.logprobs else None,
            "finish_reason": reason,
        }

    def first(self, choices: int) -> bytes:
        return "".join(self._delta(i, {"role": "assistant", "content": ""}) for i in range(choices)).encode()

    def write(self, pieces: Iterable[Piece]) -> bytes:
        out = []
        for piece in pieces:
            if piece.text or piece.entries:
                out.append(self._delta(piece.choice, {"content": piece.text}, piece.entries))
            if piece.finish_reason is not None:
                out.append(self._delta(piece.choice, {}, reason=piece.finish_reason))
        return "".join(out).encode()

    def _delta(
        self, index: int, delta: dict[str, str], entries: Sequence[Entry] = (), reason: str | None = None
    ) -> str:
        scores = chat_logprobs(self._tokenizer, entries) if entries else None
        return self.event({"index": index, "delta": delta, "logprobs": scores, "finish_reason": reason})


class CompletionReply(Reply):
    """``text_completion``; its chunks have the same form."""

    prefix, whole, chunk = "cmpl", "text_completion", "text_completion"

    def choice(self, index: int, text: str, entries: list[Entry], reason: str | None) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": completion_logprobs(self._tokenizer, entries) if self.logprobs else None,
            "finish_reason": reason,
        }

    def write(self, pieces: Iterable[Piece]) -> bytes:
        shown = (p for p in pieces if p.text or p.entries or p.finish_reason is not None)
        return "".join(self.event(self.choice(p.choice, p.text, p.entries, p.finish_reason)) for p in shown).encode()
