"""The engine: one thread that owns the device, and the queues between it and everybody else.

Step n+1 is planned when the ids of step n are known. While a step computes, the results of the one before it are
handed out. Callers validate, hash and detokenise in their own threads.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from device.contract import Device, HostBuffer, Program
from device.errors import JumarError, RequestRejected
from runtime.api import Event, GenerationRequest
from runtime.edits import EditState, needs_edits
from runtime.ngram import NgramIndex
from runtime.results import Result, StepResults
from runtime.scheduler import Scheduler
from runtime.sequence import Sequence, Status
from runtime.stats import EngineStats, FinishedRequest
from runtime.step import Model, StepInputs, step_function, step_layout
from runtime.validation import check_request, draw_seed, output_limit

if TYPE_CHECKING:
    from runtime.config import EngineConfig
    from runtime.offline import GenerationOutput
    from runtime.tokenizer import Tokenizer

_log = logging.getLogger("jumar.engine")
_IDLE = 3600.0
_DRAFTS_FROM_NGRAMS = "ngram"


class RequestHandle:
    """A submitted request, from its caller's side. Events of its choices come interleaved, each choice in order."""

    __slots__ = ("_engine", "_left", "_queue", "arrived", "cached", "first_token", "id", "label", "output_tokens",
                 "prompt_tokens", "reason", "running", "sequences")  # fmt: skip

    def __init__(self, engine: Engine, id: int, request: GenerationRequest) -> None:
        self._engine = engine
        self._queue: SimpleQueue[Event] = SimpleQueue()
        self._left = request.params.n
        self.id = id
        self.label = request.label
        self.prompt_tokens = len(request.prompt)
        # the engine thread's side of the book-keeping
        self.sequences: list[Sequence] = []
        self.running = request.params.n
        self.arrived = time.monotonic()
        self.first_token = 0.0
        self.output_tokens = 0
        self.cached = 0
        self.reason = ""

    @property
    def done(self) -> bool:
        """Whether the last event of every choice has been taken."""
        return self._left == 0

    def get(self, timeout: float | None = None) -> Event | None:
        """The next event; None when none came in time (seconds; None waits), or when the request is done."""
        if self._left == 0:
            return None
        try:
            event = self._queue.get(timeout=timeout)
        except Empty:
            return None
        if event.finish_reason is not None:
            self._left -= 1
        return event

    def put(self, event: Event) -> None:
        """For the engine thread."""
        self._queue.put(event)

    def abort(self) -> None:
        """End every choice; its blocks are free at the next step. From any thread, any number of times."""
        self._engine.abort(self, None)

    def abort_choice(self, index: int) -> None:
        """End one choice, because its text is complete for the caller."""
        self._engine.abort(self, index)


class Engine:
    """Model, device, scheduler and the thread that steps them. ``Engine.load`` builds one from a model's name or path.

    state: ``new`` ``ready`` ``draining`` ``failed`` ``stopped``. failure: why, once it has failed. observers are
    called on the engine thread, once for each request that ended.
    """

    def __init__(
        self,
        model: Model,
        device: Device,
        scheduler: Scheduler,
        config: EngineConfig,
        *,
        model_id: str = "model",
        vocab_size: int | None = None,
        eos_ids: Iterable[int] = (),
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self.model = model
        self.device = device
        self.scheduler = scheduler
        self.config = config
        self.model_id = model_id
        self.tokenizer = tokenizer
        self.vocab_size = min(vocab_size or model.vocab_size, model.vocab_size)
        self.eos_ids = frozenset(i for i in eos_ids if 0 <= i < self.vocab_size)
        self.max_model_len = scheduler.limits.max_len
        self.observers: list[Callable[[FinishedRequest], None]] = []
        self.state = "new"
        self.failure: str | None = None
        self.check_each_step = False
        self.notices: list[str] = []
        layout = step_layout(model, scheduler.limits, scheduler.pool.block_size)
        self._program: Program = device.program(step_function(model, self.vocab_size), layout)
        self._buffers: list[HostBuffer] = [self._program.buffer() for _ in range(2)]
        self._inputs = StepInputs(scheduler, model)
        self._results = StepResults(scheduler)
        self._ids = itertools.count()
        self._lock = threading.Lock()
        self._live = 0
        self._inbox: deque[RequestHandle] = deque()
        self._aborts: deque[tuple[RequestHandle, int | None]] = deque()
        self._outbox: list[tuple[RequestHandle, Event]] = []
        self._wake = threading.Event()
        self._idle = threading.Event()
        self._idle.set()
        self._stop = False
        self._stop_reason = ""
        self._busy_since = 0.0
        self._stats = EngineStats(blocks_total=scheduler.pool.total)
        self._thread: threading.Thread | None = None

    @classmethod
    def load(cls, model: str, **settings: Any) -> Engine:
        """An engine for a model's name, folder or file, started. Settings have the names of ``jumar.toml``."""
        from runtime.startup import load_engine

        return load_engine(model, **settings)

    # ------------------------------------------------------------ any thread

    def start(self, *, thread: bool = True) -> None:
        """Start the engine thread. Once. thread=False: the caller steps it itself with ``step``."""
        if self.state != "new":
            raise JumarError(f"the engine is {self.state}; it can be started once")
        self.state = "ready"
        if not thread:
            return
        self._thread = threading.Thread(target=self._run, name="jumar-engine", daemon=True)
        self._thread.start()

    def submit(self, request: GenerationRequest, *, queue_limit: bool = True, follow_up: bool = False) -> RequestHandle:
        """Queue a request. RequestRejected when it is impossible, or not possible now (queue_limit=False: waits).

        follow_up: one more of a client that is being served; it leaves half of the queue to others, so that a long
        list of prompts does not shut them out.
        """
        self._check_ready()
        check_request(request, self.vocab_size, self.scheduler)
        handle = RequestHandle(self, next(self._ids), request)
        self._make_sequences(handle, request)
        with self._lock:
            self._check_ready()  # again: whoever ends the engine changes its state first, and then empties the inbox
            room = self.config.max_num_seqs + self.config.max_queue - self._live
            if follow_up:
                room -= self.config.max_queue // 2
            if queue_limit and request.params.n > room and self._live:
                self._stats.rejected += not follow_up
                raise RequestRejected(
                    f"at capacity: {self._live} sequences run or wait, {self.config.max_num_seqs} may run and "
                    f"{self.config.max_queue} may wait",
                    code="rate_limit_exceeded", status=429, retry_after=1.0,
                )  # fmt: skip
            self._live += request.params.n
            self._idle.clear()
            # order of arrival is the order of ids, so they are given where the order is decided
            for seq in handle.sequences:
                seq.id = next(self._ids)
            self._inbox.append(handle)
        self._wake.set()
        return handle

    def _check_ready(self) -> None:
        if self.state != "ready":
            raise RequestRejected(
                f"the engine is {self.state}" + (f": {self.failure}" if self.failure else ""),
                code="service_unavailable", status=503, retry_after=5.0,
            )  # fmt: skip

    def _make_sequences(self, handle: RequestHandle, request: GenerationRequest) -> None:
        params = request.params
        limit = output_limit(request, self.max_model_len)
        seed = draw_seed() if params.seed is None else params.seed
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos_ids)
        if params.min_tokens and len(stop_ids) >= self.vocab_size:
            raise RequestRejected(
                "until min_tokens are generated the stop ids cannot be, and they are the whole vocabulary; shorten "
                "stop_token_ids", param="stop_token_ids",
            )  # fmt: skip
        root = self.scheduler.hasher.root(request.cache_salt)
        hashes = self.scheduler.prompt_hashes(root, request.prompt)
        for index in range(params.n):
            edits = EditState(params, request.prompt, stop_ids) if needs_edits(params) else None
            handle.sequences.append(
                Sequence(
                    0, request.prompt, params, limit=limit, index=index, owner=handle, seed=seed, stop_ids=stop_ids,
                    root=root, hashes=hashes, edits=edits, extra=request.extra, arrived=handle.arrived,
                )
            )  # fmt: skip

    def abort(self, handle: RequestHandle, index: int | None) -> None:
        """See ``RequestHandle.abort`` and ``abort_choice``."""
        self._aborts.append((handle, index))
        self._wake.set()

    def stats(self) -> EngineStats:
        """Counters and gauges as they are now."""
        s, scheduler = replace(self._stats), self.scheduler
        s.running = len(scheduler.running)
        s.waiting = scheduler.waiting_count + sum(h.running for h in list(self._inbox))
        s.blocks_free = scheduler.pool.free
        s.preemptions = scheduler.preemptions
        s.prefix_queries, s.prefix_hits = scheduler.prefix_queries, scheduler.prefix_hits
        return s

    def drain(self) -> None:
        """Take no new requests; those that run or wait go on to their end."""
        with self._lock:
            if self.state == "ready":
                self.state = "draining"

    def wait_idle(self, timeout: float) -> bool:
        """Whether nothing runs or waits, at the latest after ``timeout`` seconds."""
        return self._idle.wait(timeout)

    def shutdown(self, reason: str = "the service is shutting down", timeout: float = 10.0) -> None:
        """End the thread. Whatever still runs gets a last event with finish_reason ``error`` and this reason."""
        self.drain()
        self._stop_reason = reason
        self._stop = True
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)
        if self._thread is None:
            self._end_all(reason)
        if self._thread is None or not self._thread.is_alive():
            self.device.close()
        if self.state != "failed":
            self.state = "stopped"

    def stalled_for(self) -> float:
        """Seconds since the step under way began; 0.0 when none is."""
        since = self._busy_since
        return time.monotonic() - since if since else 0.0

    def generate(self, prompts: Any, params: Any = None) -> list[GenerationOutput]:
        """Offline: text or token ids in, text out, in order. See ``runtime.offline.generate``."""
        from runtime.offline import generate

        return generate(self, prompts, params)

    # ------------------------------------------------------------ the engine thread

    def _run(self) -> None:
        try:
            while not self._stop:
                if not self.step():
                    self._rest()
            self._end_all(self._stop_reason)
        except BaseException as error:  # a failed step: nothing on this device can be trusted any more
            _log.exception("a step failed; the engine stops")
            self.failure = f"{type(error).__name__}: {error}"
            self.state = "failed"
            self._busy_since = 0.0
            self._end_all("the engine failed; see its log")

    def step(self) -> bool:
        """Take messages, plan, compute and account one step. False when there was nothing to compute."""
        self._busy_since = time.monotonic()
        if self._inbox or self._aborts:
            self._take_messages()
        scheduler = self.scheduler
        plan = scheduler.schedule()
        if not plan.seqs:
            self._busy_since = 0.0
            return False
        buffer = self._buffers[0]
        self._buffers.reverse()
        pending = self._program.launch(buffer, self._inputs.fill(plan, buffer))
        self._hand_out()
        outputs = pending.wait()
        for result in self._results.update(plan, outputs):
            self._account(result)
        stats = self._stats
        stats.steps += 1
        stats.step_tokens += plan.tokens
        stats.last_step_tokens = plan.tokens
        self._busy_since = 0.0
        if self.check_each_step:
            scheduler.check_integrity()
        return True

    def _rest(self) -> None:
        """Nothing to compute: hand out what is left and wait for work."""
        self._hand_out()
        scheduler = self.scheduler
        at = scheduler.next_admission()
        if at is None and not scheduler.running:
            scheduler.check_integrity()
            with self._lock:
                if not self._inbox and self._live == 0:
                    self._idle.set()
        self._wake.wait(_IDLE if at is None else max(at - time.monotonic(), 0.0) + 0.0002)
        self._wake.clear()

    def _take_messages(self) -> None:
        aborts = len(self._aborts)  # counted first: the requests of these have all arrived
        while self._inbox:
            handle = self._inbox.popleft()
            for seq in handle.sequences:
                self.scheduler.add(seq)
        for _ in range(aborts):
            handle, index = self._aborts.popleft()
            for seq in handle.sequences:
                if index in (None, seq.index) and seq.status is not Status.FINISHED:
                    # one choice is ended by a caller that has its whole text: that is no request given up
                    self._finish(seq, Event(seq.index, (), None, "abort"), "abort" if index is None else "stop")

    def _account(self, result: Result) -> None:
        """Turn what a step brought for one sequence into an event, and end the sequence when it is over."""
        seq, handle, stats = result.seq, result.seq.owner, self._stats
        stats.generated_tokens += len(result.tokens)
        if result.drafted:
            stats.drafts += 1
            stats.draft_tokens += result.drafted
            stats.accepted_tokens += len(result.tokens) - 1
        event = Event(seq.index, result.tokens, result.logprobs, result.reason)
        if seq.first_event:
            self._first_event(seq, event)
        handle.output_tokens += len(result.tokens)
        if result.reason is not None:
            event.error = result.error
            event.stop_token = result.tokens[-1] if result.reason == "stop" else None
            self._finish(seq, event)
            return
        self._outbox.append((handle, event))
        if self.config.speculate == _DRAFTS_FROM_NGRAMS:
            if seq.ngrams is None:
                seq.ngrams = NgramIndex(self.config.ngram_min, self.config.ngram_max)
            seq.drafts = seq.ngrams.propose(seq.tokens, self.config.draft_tokens)

    def _first_event(self, seq: Sequence, event: Event) -> None:
        handle = seq.owner
        seq.first_event = False
        event.cached_tokens = seq.cached
        handle.cached = max(handle.cached, seq.cached)
        self._stats.prompt_tokens += seq.prompt_len
        if seq.index == 0 and seq.prompt_logprobs is not None:
            event.prompt_logprobs = tuple(seq.prompt_logprobs)
        if event.tokens and not handle.first_token:
            handle.first_token = time.monotonic()

    def _finish(self, seq: Sequence, event: Event, reason: str | None = None) -> None:
        """reason: what observers are told, where it is not the event's."""
        handle = seq.owner
        self.scheduler.finish(seq)
        self._outbox.append((handle, event))
        if seq.first_event:  # ended before it had any: what was computed of its prompt still counts
            seq.first_event = False
            self._stats.prompt_tokens += seq.computed
        handle.running -= 1
        handle.reason = reason or event.finish_reason or ""
        with self._lock:
            self._live -= 1
        if handle.running == 0 and self.observers:
            self._tell(handle)

    def _tell(self, handle: RequestHandle) -> None:
        scheduled = min((seq.scheduled for seq in handle.sequences if seq.scheduled), default=0.0)
        done = FinishedRequest(
            handle.label, handle.reason, handle.prompt_tokens, handle.output_tokens, handle.cached,
            len(handle.sequences), handle.arrived, scheduled,
            handle.first_token, time.monotonic(),
        )  # fmt: skip
        for observer in self.observers:
            try:
                observer(done)
            except Exception:  # a faulty metric is no reason to end everybody's requests
                _log.exception("an observer of finished requests failed")

    def _hand_out(self) -> None:
        outbox = self._outbox
        if outbox:
            self._outbox = []
            for handle, event in outbox:
                handle.put(event)

    def _end_all(self, reason: str) -> None:
        """Every request that is left gets its last event."""
        with self._lock:
            left = list(self._inbox)
            self._inbox.clear()
        for handle in left:
            for seq in handle.sequences:
                self.scheduler.add(seq)
        for seq in [*self.scheduler.running, *self.scheduler.waiting]:
            if seq.status is Status.FINISHED:
                continue
            event = Event(seq.index, (), None, "error", error=reason)
            try:
                self._finish(seq, event)
            except Exception:  # after a failure the books may be wrong; the caller gets its reply all the same
                _log.exception("could not free a sequence after the failure")
                seq.owner.put(event)
        self._hand_out()
        self._idle.set()
