"""What a step's outputs mean for its sequences: tokens accepted, drafts verified, ends found, log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from numpy.typing import NDArray

from runtime.api import TokenLogprob
from runtime.scheduler import Plan, Scheduler
from runtime.sequence import Sequence

NO_FINITE = "the model gave no finite logits for this request"


class Result:
    """What a step brought for one sequence. reason: None while it goes on. drafted: drafts that were verified."""

    __slots__ = ("drafted", "error", "logprobs", "reason", "seq", "tokens")

    def __init__(self, seq: Sequence, tokens: tuple[int, ...], reason: str | None) -> None:
        self.seq = seq
        self.tokens = tokens
        self.reason = reason
        self.logprobs: tuple[TokenLogprob, ...] | None = None
        self.drafted = 0
        self.error: str | None = None


class StepResults:
    """Applies the outputs of a step to the scheduler's sequences."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def update(self, plan: Plan, outputs: Mapping[str, NDArray[Any]]) -> list[Result]:
        """Advance every sequence of the plan. A result for each that has new tokens or has ended."""
        advance = self._scheduler.advance
        ids: list[int] = outputs["ids"].tolist() if "ids" in outputs else []
        logprobs = _rows(outputs, "lp")
        scores = _rows(outputs, "score")
        results: list[Result] = []
        row = 0
        for b, seq in enumerate(plan.seqs):
            n_rows = plan.rows[b]
            if not plan.samples[b]:
                if n_rows and not self._score(seq, ids[row : row + n_rows], scores):
                    results.append(self._failed(seq))
                    row += n_rows
                    continue
                advance(seq, plan.counts[b], 0)
                if len(seq.tokens) >= seq.limit and seq.computed == len(seq.tokens):
                    results.append(Result(seq, (), "length"))  # max_tokens = 0: only the prompt was wanted
            elif n_rows == 1 and seq.params.logprobs is None:
                results.append(self._one(seq, ids[row], plan.counts[b]))
            else:
                drafts = plan.drafts[b]
                scored = n_rows - drafts - 1
                sampled = ids[row + scored : row + n_rows]
                if scored and not self._score(seq, ids[row : row + scored], scores):
                    sampled[0] = -1
                results.append(self._several(plan, b, sampled, logprobs))
            row += n_rows
        return results

    def _one(self, seq: Sequence, token: int, count: int) -> Result:
        """The common case: one token, no drafts, no log-probabilities."""
        if token < 0:
            return self._failed(seq)
        tokens = seq.tokens
        tokens.append(token)
        if seq.edits is not None:
            seq.edits.append(token)
        self._scheduler.advance(seq, count, 0)
        reason = None
        if token in seq.stop_ids and len(tokens) - seq.prompt_len > seq.params.min_tokens:
            reason = "stop"
        elif len(tokens) >= seq.limit:
            reason = "length"
        return Result(seq, (token,), reason)

    @staticmethod
    def _failed(seq: Sequence) -> Result:
        """Not advanced: KV that leads to no finite logits must not get into the prefix cache."""
        result = Result(seq, (), "error")
        result.error = NO_FINITE
        return result

    def _several(self, plan: Plan, b: int, sampled: list[int], logprobs: Iterator[_Row]) -> Result:
        """Verify the drafts by what was sampled at their positions: accept while they are equal."""
        seq, drafts = plan.seqs[b], plan.seqs[b].drafts[: plan.drafts[b]]
        wants = seq.params.logprobs
        rows = [next(logprobs) for _ in sampled] if wants is not None else []
        tokens: list[int] = []
        reason = None
        for at, token in enumerate(sampled):
            if token < 0:
                if not tokens:
                    return self._failed(seq)
                break  # the next step meets it at its own position
            tokens.append(token)
            seq.tokens.append(token)
            if seq.edits is not None:
                seq.edits.append(token)
            if token in seq.stop_ids and len(seq.tokens) - seq.prompt_len > seq.params.min_tokens:
                reason = "stop"
            elif len(seq.tokens) >= seq.limit:
                reason = "length"
            if reason or at == len(drafts) or token != drafts[at]:
                break
        # of the drafts, those whose token was put out have valid KV, except that the last token's is never computed
        self._scheduler.advance(seq, plan.counts[b], len(drafts) - (len(tokens) - 1))
        seq.drafts = []
        result = Result(seq, tuple(tokens), reason)
        result.drafted = len(drafts)
        if wants is not None:
            result.logprobs = tuple(row.as_logprob(token, wants) for row, token in zip(rows, tokens, strict=False))
        return result

    @staticmethod
    def _score(seq: Sequence, ids: list[int], scores: Iterator[_Row]) -> bool:
        """Take over the scores of these rows. False if one had no finite logits: ``sample`` gave it the id -1."""
        wants = seq.params.prompt_logprobs
        assert wants is not None and seq.prompt_logprobs is not None
        for _ in ids:
            position = len(seq.prompt_logprobs)
            seq.prompt_logprobs.append(next(scores).as_logprob(seq.tokens[position], wants))
        seq.scored = len(seq.prompt_logprobs) - 1
        return min(ids) >= 0


class _Row:
    """One row of the outputs of ``logprobs``."""

    __slots__ = ("chosen", "rank", "top", "top_ids")

    def __init__(self, chosen: float, rank: int, top_ids: list[int], top: list[float]) -> None:
        self.chosen = chosen
        self.rank = rank
        self.top_ids = top_ids
        self.top = top

    def as_logprob(self, token: int, n: int) -> TokenLogprob:
        return TokenLogprob(token, self.chosen, self.rank, tuple(zip(self.top_ids[:n], self.top[:n], strict=True)))


def _rows(outputs: Mapping[str, NDArray[Any]], prefix: str) -> Iterator[_Row]:
    if f"{prefix}_chosen" not in outputs:
        return iter(())
    parts = (outputs[f"{prefix}_{part}"].tolist() for part in ("chosen", "rank", "top_ids", "top"))
    return (_Row(*row) for row in zip(*parts, strict=True))
