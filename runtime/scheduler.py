"""The scheduler: under a budget of tokens and of logit rows, let ``computed`` catch up with ``tokens + drafts``.

Decode, chunked prefill and verification of drafts are the same thing with different counts, in one step together.
Batching rules only say when waiting sequences may be admitted:

* continuous: at every step.
* dynamic: in closed batches; a batch closes at ``max_batch`` or ``max_wait`` after its first request.
* static: when nothing runs any more; a batch runs until its longest is done.

Preemption is by recomputation: the youngest sequence lets go of its blocks and waits at the front.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from runtime.blocks import BlockPool, PrefixHasher
from runtime.sequence import Sequence, Status

_MIN_SHARE = 32
"""Tokens of a step below which they are not divided among prompts."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a step may hold. chunk: most tokens of one sequence in a step. draft_tokens: most drafts of one."""

    max_seqs: int
    max_tokens: int
    max_rows: int
    max_len: int
    chunk: int
    batching: str = "continuous"
    max_batch: int = 0
    max_wait: float = 0.0
    prefix_cache: bool = True
    chunked_prefill: bool = True


class Plan:
    """What one step computes: per item a sequence, where it starts, how many tokens, and which rows need logits.

    first_row[i] is the first token of the item (counted from its start) that needs logits, rows[i] how many from
    there on. ``samples[i]``: the last drafts[i] + 1 of those rows are sampled; the ones before score the prompt.
    """

    __slots__ = ("counts", "drafts", "first_row", "logit_rows", "rows", "samples", "seqs", "starts", "tokens")

    def __init__(self) -> None:
        self.seqs: list[Sequence] = []
        self.starts: list[int] = []
        self.counts: list[int] = []
        self.drafts: list[int] = []
        self.first_row: list[int] = []
        self.rows: list[int] = []
        self.samples: list[bool] = []
        self.tokens = 0
        self.logit_rows = 0

    def __len__(self) -> int:
        return len(self.seqs)

    def add(self, seq: Sequence, count: int, drafts: int, samples: bool, scores: int) -> None:
        """scores: prompt rows to score. A prompt is sampled from only once it is scored, so the two are contiguous."""
        rows = scores + (drafts + 1 if samples else 0)
        start = seq.computed
        self.seqs.append(seq)
        self.starts.append(start)
        self.counts.append(count)
        self.drafts.append(drafts)
        self.samples.append(samples)
        self.rows.append(rows)
        self.first_row.append(max(start, seq.scored) - start if scores else count - rows)
        self.tokens += count
        self.logit_rows += rows

    def add_one(self, seq: Sequence, start: int) -> None:
        """``add`` for one token that is sampled from."""
        self.seqs.append(seq)
        self.starts.append(start)
        self.counts.append(1)
        self.drafts.append(0)
        self.samples.append(True)
        self.rows.append(1)
        self.first_row.append(0)
        self.tokens += 1
        self.logit_rows += 1


class Scheduler:
    """Sequences waiting and running, and the blocks they hold. Not thread-safe: one thread owns it.

    table [max_seqs, blocks per sequence] i32: the block table by row; a running sequence owns a row.
    """

    def __init__(self, pool: BlockPool, limits: Limits, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.pool = pool
        self.limits = limits
        self.hasher = PrefixHasher()
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.waiting_count = 0
        self.preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.table = np.zeros((limits.max_seqs, -(-limits.max_len // pool.block_size)), np.int32)
        self._rows = list(range(limits.max_seqs - 1, -1, -1))
        self._clock = clock
        self._open = 0

    # ------------------------------------------------------------ arrivals and departures

    def fits(self, prompt_len: int, limit: int) -> bool:
        """Whether a sequence that ends at ``limit`` tokens could run alone (the last output's KV is never stored)."""
        stored = max(prompt_len, limit - 1)
        return limit <= self.limits.max_len and -(-stored // self.pool.block_size) <= self.pool.total

    def prompt_hashes(self, root: bytes, tokens: list[int] | tuple[int, ...]) -> list[bytes]:
        """Chained hashes of the full blocks of a prompt. Safe from any thread, so that admission has none to do."""
        if not self.limits.prefix_cache:
            return []
        size = self.pool.block_size
        out: list[bytes] = []
        for end in range(size, len(tokens) + 1, size):
            root = self.hasher.extend(root, tokens[end - size : end])
            out.append(root)
        return out

    def add(self, seq: Sequence) -> None:
        """Queue a sequence that ``fits``."""
        self.waiting.append(seq)
        self.waiting_count += 1

    def finish(self, seq: Sequence) -> None:
        """The sequence ends now, wherever it is: its blocks and its row are free."""
        if seq.status is Status.RUNNING:
            self.running.remove(seq)
            self._let_go(seq)
        elif seq.status is Status.WAITING:
            self.waiting_count -= 1  # it leaves the queue when it comes to the front, or at the next sweep
            if len(self.waiting) > 2 * self.waiting_count + 64:
                self.waiting = deque(s for s in self.waiting if s is not seq and s.status is Status.WAITING)
        seq.status = Status.FINISHED

    def _let_go(self, seq: Sequence) -> None:
        self.pool.release(reversed(seq.blocks))
        seq.blocks = []
        seq.published = 0
        self._rows.append(seq.row)
        seq.row = -1

    def _preempt(self) -> Sequence:
        """The youngest running sequence goes back to the front of the queue, to be computed anew."""
        victim = self.running.pop()
        self._let_go(victim)
        victim.computed = 0
        victim.drafts = []
        victim.status = Status.WAITING
        victim.preempted = True
        self.waiting.appendleft(victim)
        self.waiting_count += 1
        self.preemptions += 1
        return victim

    # ------------------------------------------------------------ planning

    def schedule(self) -> Plan:
        """Plan the next step. An empty plan means that nothing can be done now."""
        plan = Plan()
        limits = self.limits
        before = self.preemptions
        running = self.running
        size = self.pool.block_size
        at = 0
        while at < len(running):
            left = limits.max_tokens - plan.tokens
            rows_left = limits.max_rows - plan.logit_rows
            if left <= 0:
                break
            seq = running[at]
            start = seq.computed
            if (
                start + 1 == len(seq.tokens) < seq.limit
                and not seq.drafts
                and seq.prompt_logprobs is None
                and rows_left > 0
                and start < len(seq.blocks) * size
            ):  # the common case, one token into a block that it holds: what the general case below would decide
                plan.add_one(seq, start)
                at += 1
                continue
            count, drafts, samples, scores = self._want(seq, self._share(at, left), rows_left)
            if count == 0:
                at += 1
                continue
            if drafts and not self._can_grow(seq, count):
                count, drafts = count - drafts, 0  # never preempt a neighbour for the sake of a guess
            gone = False
            while not self._can_grow(seq, count):
                if self._preempt() is seq:
                    gone = True
                    break
            if gone:
                break
            self._grow(seq, seq.computed + count)
            plan.add(seq, count, drafts, samples, scores)
            at += 1
        if self.preemptions == before and self.waiting_count:
            self._admit(plan)
        return plan

    def _share(self, at: int, left: int) -> int:
        """What the running sequence ``at`` may take of the tokens that are left.

        A long prompt leaves younger sequences that decode what they need, and half of the rest to prompts that are
        younger still: a short one would wait until it is done. What nobody else wants is its own.
        """
        limits, running = self.limits, self.running
        pending = len(running[at].tokens) - running[at].computed
        if pending <= min(left // 2, _MIN_SHARE) or not limits.chunked_prefill:
            return left
        prompts = self.waiting_count > 0 and limits.batching == "continuous" and len(running) < limits.max_seqs
        for seq in running[at + 1 :]:
            if len(seq.tokens) - seq.computed == 1:
                left -= 1 + len(seq.drafts)
            else:
                prompts = True
        return max(1, left // 2 if prompts and left >= 2 * _MIN_SHARE else left)

    def _want(self, seq: Sequence, left: int, rows_left: int) -> tuple[int, int, bool, int]:
        """(tokens, drafts among them, whether it samples, prompt rows to score) within what is left of the budgets."""
        known = len(seq.tokens)
        pending = known - seq.computed
        cap = min(left, self.limits.chunk)
        if not self.limits.chunked_prefill and pending > 1:
            cap = left if pending <= left else 0  # whole prompts only; the budget holds the longest beside all decodes
        if pending <= cap and not seq.wants_scores and known < seq.limit:
            if rows_left <= 0:
                return (pending - 1, 0, False, 0)
            drafts = min(len(seq.drafts), cap - pending, rows_left - 1, seq.limit - known - 1)
            return (pending + drafts, drafts, True, 0)
        count = min(pending, cap)
        if count <= 0:
            return (0, 0, False, 0)
        if not seq.wants_scores:
            return (count, 0, False, 0)
        return self._want_scores(seq, count, rows_left)

    def _want_scores(self, seq: Sequence, count: int, rows_left: int) -> tuple[int, int, bool, int]:
        """As ``_want`` for a prompt that is scored: position p gives the log-probability of token p + 1."""
        start = seq.computed
        last = min(start + count, seq.prompt_len - 1)  # one past the last position that scores
        scores = max(0, last - max(start, seq.scored))
        if scores > rows_left:
            count = max(start, seq.scored) + rows_left - start
            return (count, 0, False, rows_left) if count > 0 else (0, 0, False, 0)
        samples = start + count == len(seq.tokens) and len(seq.tokens) < seq.limit
        if samples and scores == rows_left:  # no row left to sample from: stop one token short
            return (count - 1, 0, False, scores) if count > 1 else (0, 0, False, 0)
        return (count, 0, samples, scores)

    def _can_grow(self, seq: Sequence, count: int) -> bool:
        need = -(-(seq.computed + count) // self.pool.block_size) - len(seq.blocks)
        return need <= self.pool.free

    def _grow(self, seq: Sequence, tokens: int) -> None:
        have = len(seq.blocks)
        for at in range(have, -(-tokens // self.pool.block_size)):
            block = self.pool.take()
            seq.blocks.append(block)
            self.table[seq.row, at] = block

    def _may_admit(self) -> int:
        """How many waiting sequences the batching rule lets in now."""
        limits = self.limits
        room = limits.max_seqs - len(self.running)
        if limits.batching == "continuous":
            return room
        batch = limits.max_batch or limits.max_seqs
        self._open = min(self._open, self.waiting_count)
        first = self._front()
        if first is None or first.preempted:  # that one belongs to the batch before, which is not done without it
            closed = False
        elif limits.batching == "static":
            closed = not self.running
        else:
            closed = self.waiting_count >= batch or self._clock() - first.arrived >= limits.max_wait
        if self._open <= 0 and closed:
            self._open = min(self.waiting_count, batch)
        return min(room, self._open)

    def _front(self) -> Sequence | None:
        """The first that still waits; those that were aborted in the queue are dropped on the way."""
        while self.waiting and self.waiting[0].status is not Status.WAITING:
            self.waiting.popleft()
        return self.waiting[0] if self.waiting else None

    def _admit(self, plan: Plan) -> None:
        limits, pool = self.limits, self.pool
        room = limits.max_seqs - len(self.running)
        allowed = self._may_admit()
        while room > 0:
            seq = self._front()
            if seq is None or (allowed <= 0 and not seq.preempted):
                return
            left, rows_left = limits.max_tokens - plan.tokens, limits.max_rows - plan.logit_rows
            if left <= 0:
                return
            hits = self._cached_prefix(seq)
            free_hits = sum(pool.is_free(block) for block in hits)
            # the whole of what it has must fit, or it would be admitted only to be preempted again
            need = -(-len(seq.tokens) // pool.block_size) - len(hits)
            if need + free_hits > pool.free:
                return
            seq.computed = len(hits) * pool.block_size
            count, drafts, samples, scores = self._want(seq, left, rows_left)
            if count == 0:
                seq.computed = 0
                return
            self.waiting.popleft()
            self.waiting_count -= 1
            self._start(seq, hits)
            self._grow(seq, seq.computed + count)
            plan.add(seq, count, drafts, samples, scores)
            room -= 1
            if not seq.preempted:
                allowed -= 1
                self._open -= 1
            seq.preempted = False

    def _start(self, seq: Sequence, hits: list[int]) -> None:
        for block in hits:
            self.pool.touch(block)
        if self.limits.prefix_cache and seq.params.prompt_logprobs is None:
            self.prefix_queries += len(seq.tokens)
            self.prefix_hits += seq.computed
        seq.row = self._rows.pop()
        seq.blocks = hits
        seq.published = len(hits)
        if not seq.preempted:
            seq.cached = seq.computed
            seq.scheduled = self._clock()
        if hits:
            self.table[seq.row, : len(hits)] = hits
        seq.status = Status.RUNNING
        self.running.append(seq)

    def _cached_prefix(self, seq: Sequence) -> list[int]:
        """Blocks of the longest cached prefix that leaves at least one token to compute."""
        if not self.limits.prefix_cache or seq.params.prompt_logprobs is not None:
            return []
        hits: list[int] = []
        for digest in seq.hashes[: (len(seq.tokens) - 1) // self.pool.block_size]:
            block = self.pool.find(digest)
            if block is None:
                break
            hits.append(block)
        return hits

    def next_admission(self) -> float | None:
        """Clock time at which a waiting batch closes by itself, or None."""
        first = self._front()
        return None if first is None or self.limits.batching != "dynamic" else first.arrived + self.limits.max_wait

    # ------------------------------------------------------------ after the step

    def advance(self, seq: Sequence, count: int, rejected: int) -> None:
        """The step has computed ``count`` tokens, of which the last ``rejected`` were drafts that did not hold.

        New tokens must have been appended to ``seq.tokens`` before. Full blocks of confirmed tokens are published,
        blocks that held only rejected drafts are let go.
        """
        computed = seq.computed + count - rejected
        seq.computed = computed
        pool = self.pool
        size = pool.block_size
        if self.limits.prefix_cache:
            full = computed // size
            if seq.published < full:
                self._publish(seq, full)
        if rejected:
            keep = -(-computed // size)
            if keep < len(seq.blocks):
                pool.release(reversed(seq.blocks[keep:]))
                del seq.blocks[keep:]

    def _publish(self, seq: Sequence, full: int) -> None:
        size = self.pool.block_size
        hashes = seq.hashes
        for at in range(len(hashes), full):
            parent = hashes[-1] if hashes else seq.root
            hashes.append(self.hasher.extend(parent, seq.tokens[at * size : (at + 1) * size]))
        for at in range(seq.published, full):
            self.pool.publish(seq.blocks[at], hashes[at])
        seq.published = full

    def check_integrity(self) -> None:
        """Raise AssertionError if any invariant of the queues, rows and blocks is broken."""
        size = self.pool.block_size
        self.pool.check_integrity(seq.blocks for seq in self.running)
        rows = [seq.row for seq in self.running]
        problems = []
        if len(rows) > self.limits.max_seqs or len(set(rows)) != len(rows) or set(rows) & set(self._rows):
            problems.append("rows of the running sequences are not their own")
        if len(rows) + len(self._rows) != self.limits.max_seqs:
            problems.append("rows were lost")
        live = [seq for seq in self.waiting if seq.status is Status.WAITING]
        if len(live) != self.waiting_count:
            problems.append(f"{len(live)} wait, {self.waiting_count} are counted")
        if any(seq.blocks or seq.computed for seq in live):
            problems.append("a waiting sequence holds blocks")
        order = [seq.id for seq in self.running] + [seq.id for seq in live]
        if order != sorted(order):
            problems.append("sequences are out of order of arrival")
        for seq in self.running:
            if seq.status is not Status.RUNNING or len(seq.blocks) != -(-seq.computed // size):
                problems.append(f"sequence {seq.id}: {len(seq.blocks)} blocks for {seq.computed} computed tokens")
            if seq.blocks != self.table[seq.row, : len(seq.blocks)].tolist():
                problems.append(f"sequence {seq.id}: its block table differs from its blocks")
            for at, block in enumerate(seq.blocks):
                if self.pool.ref[block] > 1 and (self.pool.hash_of[block] is None or (at + 1) * size > seq.computed):
                    problems.append(f"block {block} is shared but not full and hashed")
        if problems:
            raise AssertionError("; ".join(problems))
