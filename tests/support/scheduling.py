"""The scheduler without a model: a fake cache, a fake sampler, and every rule of a plan checked from outside.

The KV of a slot is the hash of the whole prefix that it was computed from, read through the block table of the step as
a model would; the token drawn at a position is a function of it. So a wrong block, a stale one or a rejected draft
that was kept changes the output, which must be that of ``alone``.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence as Seq
from dataclasses import replace

from runtime.api import SamplingParams
from runtime.blocks import BlockPool
from runtime.edits import EditState, needs_edits
from runtime.scheduler import Limits, Plan, Scheduler
from runtime.sequence import Sequence, Status

VOCAB = 5
STOP = 4
"""The token that ends an output early."""


class FakeClock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def limits(**changes: object) -> Limits:
    """Roomy limits, changed where a test says so."""
    roomy = Limits(max_seqs=8, max_tokens=64, max_rows=64, max_len=64, chunk=64)
    return replace(roomy, **changes)  # type: ignore[arg-type]


def start_of(salt: str) -> int:
    """What the chain of hashes of a sequence begins with. (``hash`` of a string differs from run to run.)"""
    return zlib.crc32(salt.encode())


def drawn(kv: int) -> int:
    """The token that follows a prefix. One in ten ends the output."""
    return STOP if kv % 10 == 0 else (kv >> 8) % STOP


def alone(prompt: Seq[int], limit: int, salt: str = "", stop: int = STOP) -> list[int]:
    """Output tokens of a sequence that nothing disturbs. stop: the token that ends it."""
    tokens, kv = list(prompt), start_of(salt)
    for token in prompt:
        kv = hash((kv, token))
    while len(tokens) < limit:
        tokens.append(drawn(kv))
        kv = hash((kv, tokens[-1]))
        if tokens[-1] == stop:
            break
    return tokens[len(prompt) :]


class World:
    """A scheduler, and everything around it that the engine and the device would be."""

    def __init__(
        self,
        blocks: int,
        block_size: int,
        limits: Limits,
        seed: int = 0,
        *,
        drafting: bool = False,
        stops: bool = False,
    ) -> None:
        """drafting: sequences have drafts, mostly right ones. stops: ``STOP`` ends an output."""
        self.clock = FakeClock()
        self.pool = BlockPool(blocks + 1, 1, block_size)
        self.scheduler = Scheduler(self.pool, limits, clock=self.clock)
        self.limits = limits
        self.rng = random.Random(seed)
        self.drafting = drafting
        self.stop = STOP if stops else -1
        self.kv: dict[int, int] = {}
        self.sequences: list[Sequence] = []
        self.salts: dict[int, str] = {}
        self.batch: set[int] = set()
        self.saved = 0
        """Tokens that were not computed because of a prefix hit."""

    # ------------------------------------------------------------ requests

    def submit(self, prompt: Seq[int], max_tokens: int = 8, *, salt: str = "", **params: object) -> Sequence:
        s = self.scheduler
        sampling = SamplingParams(max_tokens=max_tokens, **params)  # type: ignore[arg-type]
        limit = len(prompt) + max_tokens
        assert s.fits(len(prompt), limit)
        root = s.hasher.root(salt)
        stops = frozenset(sampling.stop_token_ids) | (frozenset() if self.stop < 0 else {self.stop})
        seq = Sequence(
            len(self.sequences), prompt, sampling, limit=limit, stop_ids=stops, root=root,
            seed=sampling.seed or 0, hashes=s.prompt_hashes(root, list(prompt)), arrived=self.clock.now,
            edits=EditState(sampling, prompt, stops) if needs_edits(sampling) else None,
        )  # fmt: skip
        self.sequences.append(seq)
        self.salts[seq.id] = salt
        s.add(seq)
        return seq

    def abort(self, seq: Sequence) -> None:
        if seq.status is not Status.FINISHED:
            self.scheduler.finish(seq)
            self.check_books()

    def expected(self, seq: Sequence) -> list[int]:
        """What the whole output of a sequence has to be."""
        return alone(seq.tokens[: seq.prompt_len], seq.limit, self.salts[seq.id], self.stop)

    def live(self) -> list[Sequence]:
        return [seq for seq in self.sequences if seq.status is not Status.FINISHED]

    def waiting(self) -> list[Sequence]:
        return [seq for seq in self.scheduler.waiting if seq.status is Status.WAITING]

    # ------------------------------------------------------------ steps

    def step(self) -> Plan:
        """One step, with everything checked."""
        plan = self.plan()
        self.compute_and_update(plan)
        return plan

    def plan(self) -> Plan:
        """Plan a step and check the plan."""
        s = self.scheduler
        running, preemptions = list(s.running), s.preemptions
        started = {seq.id for seq in self.sequences if seq.scheduled}
        plan = s.schedule()
        self._check_budgets(plan)
        self._check_order(plan, running, s.preemptions > preemptions)
        self._check_batching([seq for seq in plan.seqs if seq.id not in started], started)
        if s.preemptions == preemptions:
            self._check_nothing_left_out(plan)
        return plan

    def run(self, steps: int = 4000) -> None:
        """Until nothing is left."""
        for _ in range(steps):
            if not self.live():
                break
            if not self.step().seqs:
                at = self.scheduler.next_admission()
                assert at is not None and at > self.clock.now, "nothing is planned and nothing will be"
                self.clock.now = at
        assert not self.live(), f"no end in {steps} steps"
        assert self.pool.free == self.pool.total
        self.check_books()

    def compute_and_update(self, plan: Plan) -> None:
        """What device, results and engine do: fill slots, draw, verify drafts, end sequences, draft anew."""
        rows = self._compute(plan)
        for at, seq in enumerate(plan.seqs):
            self._update(seq, plan.counts[at], plan.drafts[at], rows[at] if plan.samples[at] else [])
            scored = plan.rows[at] - len(rows[at]) if plan.samples[at] else plan.rows[at]
            seq.scored += scored
            if scored and seq.prompt_logprobs is not None:
                seq.prompt_logprobs += [None] * scored
        self.check_books()

    def _compute(self, plan: Plan) -> list[list[int]]:
        """Store the KV of every planned token and draw after the rows that are sampled."""
        size = self.pool.block_size
        new: dict[int, int] = {}
        rows = []
        for at, seq in enumerate(plan.seqs):
            start, count = plan.starts[at], plan.counts[at]
            assert start == seq.computed
            tokens = (seq.tokens + seq.drafts)[: start + count]
            table = self.scheduler.table[seq.row].tolist()
            kv = start_of(self.salts[seq.id])
            results = []
            for position, token in enumerate(tokens):
                kv = hash((kv, token))
                block = table[position // size]
                slot = block * size + position % size
                if position < start:
                    assert self.kv.get(slot) == kv, f"slot {slot} does not hold position {position} of {seq.id}"
                    continue
                assert block >= self.pool.reserved and self.pool.ref[block] == 1, "a block is written that is shared"
                assert slot not in new, "a slot is written twice"
                new[slot] = kv
                results.append(drawn(kv))
            rows.append(results[count - plan.drafts[at] - 1 :] if plan.samples[at] else results)
        self.kv.update(new)
        return rows

    def _update(self, seq: Sequence, count: int, drafts: int, sampled: list[int]) -> None:
        """Accept drafts while they are what was drawn. An independent reading of what StepResults does."""
        new: list[int] = []
        ended = False
        for at, token in enumerate(sampled):
            new.append(token)
            seq.tokens.append(token)
            if seq.edits is not None:
                seq.edits.append(token)
            ended = token in seq.stop_ids or len(seq.tokens) == seq.limit
            if ended or at == drafts or token != seq.drafts[at]:
                break
        self.scheduler.advance(seq, count, drafts - (len(new) - 1) if new else 0)
        if not sampled:
            ended = seq.limit == seq.prompt_len == seq.computed
        else:
            seq.drafts = []
        if ended:
            self.scheduler.finish(seq)
        elif sampled and self.drafting:
            seq.drafts = self._guess(seq)

    def _guess(self, seq: Sequence) -> list[int]:
        """The next tokens, often with a mistake."""
        right = alone(seq.tokens, len(seq.tokens) + self.rng.randrange(7), self.salts[seq.id], -1)
        return [t if self.rng.random() < 0.85 else self.rng.randrange(VOCAB) for t in right]

    # ------------------------------------------------------------ rules of a plan

    def _check_budgets(self, plan: Plan) -> None:
        """Tokens, rows, rows of the block table; what each item may hold and which of its rows it needs."""
        lim = self.limits
        assert sum(plan.counts) == plan.tokens <= lim.max_tokens
        assert sum(plan.rows) == plan.logit_rows <= lim.max_rows
        assert len(self.scheduler.running) <= lim.max_seqs
        for at, seq in enumerate(plan.seqs):
            start, count, drafts = plan.starts[at], plan.counts[at], plan.drafts[at]
            assert start == seq.computed and count >= 1 and 0 <= drafts <= min(len(seq.drafts), count - 1)
            assert count <= lim.chunk or not lim.chunked_prefill
            end = start + count
            assert end - drafts <= len(seq.tokens)
            assert plan.samples[at] or drafts == 0
            first, scores = start + plan.first_row[at], plan.rows[at] - (drafts + 1 if plan.samples[at] else 0)
            if plan.samples[at]:  # the rows end with the one after the last draft, and the output has room for all
                assert end - drafts == len(seq.tokens) and len(seq.tokens) + drafts < seq.limit
                assert first + plan.rows[at] == end
            if scores:  # each prompt position once, in order, as soon as it is computed
                assert seq.params.prompt_logprobs is not None
                assert first == seq.scored and start <= first and first + scores <= min(end, seq.prompt_len - 1)
            elif seq.params.prompt_logprobs is not None:
                assert seq.scored >= min(end, seq.prompt_len - 1), "a position is computed and not scored"
            if not lim.chunked_prefill and seq.params.prompt_logprobs is None:
                whole = end - drafts == len(seq.tokens)
                rowless = end == len(seq.tokens) - 1 and plan.logit_rows == lim.max_rows
                assert whole or rowless, "a prompt is cut although prompts are to be whole"

    def _check_order(self, plan: Plan, running: list[Sequence], preempted: bool) -> None:
        s = self.scheduler
        assert len({id(seq) for seq in plan.seqs}) == len(plan.seqs)
        assert all(seq.status is Status.RUNNING for seq in plan.seqs), "planned and preempted"
        if preempted:
            assert all(seq in running for seq in plan.seqs), "admitted in a step that preempted"
        ids = [seq.id for seq in s.running] + [seq.id for seq in self.waiting()]
        assert ids == sorted(ids), "out of order of arrival"
        assert [seq.id for seq in plan.seqs] == sorted(seq.id for seq in plan.seqs)
        if s.running and not preempted:
            assert plan.seqs and plan.seqs[0] is s.running[0], "the oldest does not go on"
        if self.limits.batching == "continuous" or any(seq.preempted for seq in self.waiting()):
            assert plan.seqs or not self.live(), "no progress"

    def _check_batching(self, admitted: list[Sequence], started: set[int]) -> None:
        """Static: new ones come only together, and only when all of those before are done."""
        self.saved += sum(seq.cached for seq in admitted)
        if self.limits.batching != "static":
            return
        if admitted and not any(seq.id in started for seq in self.live()):
            self.batch = set()
        for seq in admitted:
            self.batch.add(seq.id)
        assert len(self.batch) <= (self.limits.max_batch or self.limits.max_seqs), "more than a batch"

    def _check_nothing_left_out(self, plan: Plan) -> None:
        """Whoever is not planned had no room: of tokens, of rows, of blocks, or the batching rule holds it back."""
        s, lim = self.scheduler, self.limits
        tokens_left, rows_left = lim.max_tokens - plan.tokens, lim.max_rows - plan.logit_rows
        if tokens_left <= 0 or rows_left <= 0 or not lim.chunked_prefill:
            return
        scoring = any(seq.params.prompt_logprobs is not None for seq in self.live())
        if not scoring:
            assert len(plan) == len(s.running), "a running sequence is left out"
        waiting = self.waiting()
        if lim.batching != "continuous" or not waiting or len(s.running) == lim.max_seqs or scoring:
            return
        front = waiting[0]
        hits = self.cached_prefix(front)
        need = -(-len(front.tokens) // self.pool.block_size) - len(hits) + sum(self.pool.is_free(b) for b in hits)
        assert need > self.pool.free, "a sequence that fits is kept waiting"

    def cached_prefix(self, seq: Sequence) -> list[int]:
        """Blocks that a sequence could take from the cache, found by hashing its tokens anew."""
        if not self.limits.prefix_cache or seq.params.prompt_logprobs is not None:
            return []
        size, parent, hits = self.pool.block_size, seq.root, []
        for end in range(size, len(seq.tokens), size):
            parent = self.scheduler.hasher.extend(parent, seq.tokens[end - size : end])
            block = self.pool.find(parent)
            if block is None:
                break
            hits.append(block)
        return hits

    def check_books(self) -> None:
        """The invariants that hold between steps, counted here and not by the code under test; then its own check."""
        s, pool, size = self.scheduler, self.pool, self.pool.block_size
        held: dict[int, int] = {}
        for seq in s.running:
            assert seq.status is Status.RUNNING
            assert len(seq.blocks) == -(-seq.computed // size), "blocks and computed tokens differ"
            assert seq.computed <= len(seq.tokens)
            assert s.table[seq.row, : len(seq.blocks)].tolist() == seq.blocks
            for at, block in enumerate(seq.blocks):
                held[block] = held.get(block, 0) + 1
                if pool.ref[block] > 1:
                    assert (at + 1) * size <= seq.computed and pool.hash_of[block] is not None
        for block in range(pool.reserved, pool.reserved + pool.total):
            assert pool.ref[block] == held.get(block, 0)
            digest = pool.hash_of[block]
            assert digest is None or pool.find(digest) == block
        assert pool.free == pool.total - len(held)
        assert len({seq.row for seq in s.running}) == len(s.running)
        for seq in self.waiting():
            assert not seq.blocks and seq.computed == 0 and not seq.drafts
        assert len(self.waiting()) == s.waiting_count
        for seq in self.sequences:
            if seq.status is Status.FINISHED:
                assert not seq.blocks and seq.row == -1
        s.check_integrity()
