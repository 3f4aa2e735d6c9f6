"""From the engine's events to text: what an HTTP worker thread does while its request runs.

One HTTP request may be several engine requests (a list of prompts) of ``n`` choices each. ``Answers`` submits them,
follows their queues, turns tokens into text, ends a choice at a stop string, and gives out ``Piece``s. It notices a
client that hung up, a service that failed, and an engine that ended the work, and it always gives the blocks back.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from device.errors import RequestRejected
from runtime.api import Event, GenerationRequest, TokenLogprob
from runtime.detokenizer import Detokenizer, TextStream
from runtime.tokenizer import Tokenizer
from server.gate import Gate

if TYPE_CHECKING:
    from runtime.engine import Engine, RequestHandle
    from server.metrics import Metrics

POLL_SECONDS = 0.25
"""How often a waiting thread looks whether its client is still there, if it is not told (``Answers.abort``)."""
SEVERAL_POLL_SECONDS = 0.02
"""The same when it waits on several queues in turn: the others' tokens are this late at most."""


class ClientGone(Exception):
    """The client closed the connection; there is nobody to answer."""


class Entry(NamedTuple):
    """One token of the reply for ``logprobs``. ``offset``: where its text begins in the choice's text, in characters.

    The texts of a choice's entries join to its text: a token that begins a character has "", the one that ends it the
    whole character; what a stop string cut off is gone here too. scores: None for the first token of a prompt.
    """

    token: int
    text: str
    offset: int
    scores: TokenLogprob | None


class Piece(NamedTuple):
    """What one event added to one choice. ``finish_reason``: ``stop`` or ``length`` with the last piece."""

    choice: int
    text: str
    entries: list[Entry]
    finish_reason: str | None


class Choice:
    """The text of one choice, and the entries whose text is not out yet.

    index: among all choices of the reply. echo: the prompt that stands before its output.
    """

    def __init__(self, index: int, stream: TextStream, wants_entries: bool, echo: Echo | None = None) -> None:
        self.index = index
        self.done = False
        self._stream = stream
        self._wants_entries = wants_entries
        self._echo = echo
        self._base = len(echo.text) if echo else 0
        self._text = ""
        self._pending: deque[tuple[int, int, int, TokenLogprob]] = deque()  # token, start, end, scores
        self._last = 0.0

    @property
    def tokens(self) -> int:
        """Output tokens that count."""
        return self._stream.tokens

    def gap(self, now: float) -> float | None:
        """Seconds since the last event, None for the first."""
        last, self._last = self._last, now
        return now - last if last else None

    def take(self, event: Event) -> Piece:
        """The piece that ``event`` adds. Its ``finish_reason`` is ``stop`` when a stop string was found in it."""
        echoed, entries = "", []
        if self._echo is not None:
            echoed, entries = self._echo.text, self._echo.entries() if self._wants_entries else []
            self._echo = None
        text, stopped = self._push(event)
        reason = "stop" if stopped else event.finish_reason
        if reason is not None:
            text += self._stream.finish().text
            self.done = True
        if self._wants_entries:
            self._text += text
            entries += self._release(self.done)
        return Piece(self.index, echoed + text, entries, reason)

    def _push(self, event: Event) -> tuple[str, bool]:
        """(text of the tokens, whether a stop string was found)."""
        ends = event.stop_token is not None
        if not self._wants_entries or event.logprobs is None:
            delta = self._stream.push(event.tokens, stop_token=ends)
            return delta.text, delta.finished_by_stop is not None
        texts: list[str] = []
        for i, token in enumerate(event.tokens):
            start = self._stream.length
            delta = self._stream.push((token,), stop_token=ends and i == len(event.tokens) - 1)
            texts.append(delta.text)
            self._pending.append((token, start, self._stream.length, event.logprobs[i]))
            if delta.finished_by_stop is not None:
                return "".join(texts), True
        return "".join(texts), False

    def _release(self, final: bool) -> list[Entry]:
        """The entries whose text is out."""
        entries = []
        out = len(self._text)
        while self._pending and (final or self._pending[0][2] <= out):
            token, start, end, scores = self._pending.popleft()
            if final and not self._pending:
                end = out  # a character that was never finished came out at the end
            start = min(start, out)
            entries.append(Entry(token, self._text[start:end], self._base + start, scores))
        return entries


class Echo:
    """An echoed prompt: its text and where each token's part of it begins.

    text: the prompt as it was sent, None for one of token ids, which is decoded. What the tokenizer put in front (BOS)
    has no text.
    """

    def __init__(self, tokenizer: Tokenizer, ids: Sequence[int], text: str | None, *, closed: bool) -> None:
        prefix = tokenizer.prefix_ids
        unseen = 0
        if prefix and tuple(ids[: len(prefix)]) == prefix:
            written = "".join(tokenizer.token_text(i) for i in prefix)
            unseen = 0 if text is not None and text.startswith(written) else len(prefix)
        decoder = Detokenizer(tokenizer, skip_special_tokens=False)
        parts = ["" if i < unseen else decoder.push((token,)) for i, token in enumerate(ids)]
        if closed and parts:
            parts[-1] += decoder.flush()
        joined = "".join(parts)
        self.text = joined if text is None else text
        self.scores: Sequence[TokenLogprob | None] | None = None
        """Of the prompt's tokens, once the engine has told them."""
        self._ids = ids
        self._parts = parts

    def copy(self) -> Echo:
        """The same prompt, for another choice that echoes it."""
        other = Echo.__new__(Echo)
        other.text, other.scores, other._ids, other._parts = self.text, None, self._ids, self._parts
        return other

    def entries(self) -> list[Entry]:
        """One entry per prompt token."""
        entries = []
        offset = 0
        for i, (token, part) in enumerate(zip(self._ids, self._parts, strict=True)):
            entries.append(Entry(token, part, offset, self.scores[i] if self.scores else None))
            offset += len(part)
        return entries


class Task:
    """One engine request, the choices of the reply that it fills, and the prompt they echo."""

    def __init__(self, request: GenerationRequest, choices: Sequence[Choice], echo: Echo | None = None) -> None:
        self.request = request
        self.choices = tuple(choices)
        self.echo = echo
        self.held: list[Event] = []
        """Events that came before the prompt's scores, which the engine tells with the first choice."""

    @property
    def done(self) -> bool:
        """Every choice has ended."""
        return all(choice.done for choice in self.choices)

    def ready(self, event: Event) -> list[Event]:
        """The events that can be answered now that ``event`` has come."""
        if self.echo is None or self.request.params.prompt_logprobs is None or self.echo.scores is not None:
            return [event]
        if event.prompt_logprobs is None and event.finish_reason not in ("error", "abort"):
            self.held.append(event)
            return []
        self.echo.scores = event.prompt_logprobs
        events, self.held = [event, *self.held], []
        return events


class Answers:
    """The engine requests of one HTTP request. Submits on construction; RequestRejected before anything is sent.

    alive: False once the client has hung up. queue_limit: whether the engine may refuse because many wait. ``close``
    must be called, at the end or instead of it.
    """

    def __init__(
        self,
        engine: Engine,
        gate: Gate,
        tasks: Sequence[Task],
        *,
        alive: Callable[[], bool] = lambda: True,
        metrics: Metrics | None = None,
        queue_limit: bool = True,
    ) -> None:
        self._engine = engine
        self._gate = gate
        self._alive = alive
        self._metrics = metrics
        self._queue_limit = queue_limit
        self._waiting = deque(tasks)
        self._live: list[tuple[RequestHandle, Task]] = []
        self._tasks = tuple(tasks)
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self._submitted = time.monotonic()
        try:
            self._submit()
        except BaseException:
            self.close()
            raise

    @property
    def completion_tokens(self) -> int:
        """Output tokens of all choices so far."""
        return sum(choice.tokens for task in self._tasks for choice in task.choices)

    def close(self) -> None:
        """Give up what still runs: its blocks are free at the engine's next step. May be called again."""
        self._waiting.clear()
        live, self._live = self._live, []
        for handle, _ in live:
            handle.abort()
        if self._metrics is not None:
            self._metrics.fold()

    def abort(self) -> None:
        """End what runs; the thread that follows it notices by the events. From any thread."""
        for handle, _ in list(self._live):
            handle.abort()

    def pieces(self) -> Iterator[list[Piece]]:
        """Pieces as they come, the choices interleaved; an empty list when nothing came for a while.

        Ends when every choice has ended. ClientGone, or RequestRejected when the engine ends the work (status 500 or
        503) or refuses a prompt that had to wait.
        """
        while self._live:
            events = self._wait()
            if not self._alive():
                raise ClientGone
            yield [self._piece(handle, task, event) for handle, task, came in events for event in task.ready(came)]
            if events:
                self._retire()
            elif self._gate.failure is not None:
                raise _ended(f"the engine has failed: {self._gate.failure}", 503)

    # ------------------------------------------------------------ queues

    def _submit(self) -> None:
        """Hand over as many requests as the engine takes; the rest follow when earlier ones are done."""
        while self._waiting:
            task = self._waiting[0]
            try:
                handle = self._engine.submit(task.request, queue_limit=self._queue_limit, follow_up=bool(self._live))
            except RequestRejected as error:
                if error.status == 429 and self._live:
                    return
                raise
            self._waiting.popleft()
            self._live.append((handle, task))
            self.prompt_tokens += handle.prompt_tokens
            if self._metrics is not None:
                self._metrics.observe_params(task.request.params.n, task.request.params.max_tokens)

    def _wait(self) -> list[tuple[RequestHandle, Task, Event]]:
        """What has come on any queue, waiting a moment if nothing has."""
        found: list[tuple[RequestHandle, Task, Event]] = []
        if len(self._live) > 1:
            for handle, task in self._live:
                while (event := handle.get(0)) is not None:
                    found.append((handle, task, event))
            if found:
                return found
        handle, task = self._live[0]
        alone = handle.get(POLL_SECONDS if len(self._live) == 1 else SEVERAL_POLL_SECONDS)
        return [] if alone is None else [(handle, task, alone)]

    def _retire(self) -> None:
        live = [(handle, task) for handle, task in self._live if not task.done]
        if len(live) < len(self._live):
            self._live = live
            self._submit()

    def _piece(self, handle: RequestHandle, task: Task, event: Event) -> Piece:
        choice = task.choices[event.index]
        if choice.done:  # it ended at a stop string; the engine had not heard of it yet
            return Piece(choice.index, "", [], None)
        if event.finish_reason in ("error", "abort"):
            text = event.error or "the engine ended the request before it was finished"
            raise _ended(text, 500 if event.finish_reason == "error" and self._engine.state == "ready" else 503)
        self._observe(choice, task, event)
        piece = choice.take(event)
        if choice.done and event.finish_reason is None:
            handle.abort_choice(event.index)
        return piece

    def _observe(self, choice: Choice, task: Task, event: Event) -> None:
        now = time.monotonic()
        gap = choice.gap(now)
        if gap is None and choice is task.choices[0]:
            self.cached_tokens += event.cached_tokens
        if self._metrics is None or not event.tokens:
            return
        if gap is not None:
            self._metrics.observe("inter_token_latency_seconds", gap)
        elif choice is task.choices[0]:
            self._metrics.observe("time_to_first_token_seconds", now - self._submitted)


def _ended(message: str, status: int) -> RequestRejected:
    return RequestRejected(message, code="generation_ended", status=status)
