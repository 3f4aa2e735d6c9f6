"""What the outputs of a step mean: drafts verified, ends found, log-probabilities attached, rows without an answer."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.results import NO_FINITE, Result, StepResults
from runtime.scheduler import Plan
from runtime.sequence import Sequence
from tests.support.scheduling import World, limits

BLOCK = 4


def world() -> World:
    return World(40, BLOCK, limits())


def drafted(
    w: World, drafts: list[int], max_tokens: int = 20, prompt: tuple[int, ...] = (1, 2, 3), **params: Any
) -> Sequence:
    """A sequence that runs and has drafts for its next step."""
    seq = w.submit(prompt, max_tokens, **params)
    w.step()
    seq.drafts = drafts
    return seq


def apply(w: World, plan: Plan, ids: list[int], **outputs: Any) -> list[Result]:
    """Results of a step with these sampled ids, one a logit row."""
    assert len(ids) == plan.logit_rows
    arrays: dict[str, Any] = {"ids": np.array(ids, np.int32)} if ids else {}
    arrays.update({name: np.array(value) for name, value in outputs.items()})
    return StepResults(w.scheduler).update(plan, arrays)


def rows_of(prefix: str, chosen: list[float], top: int = 3) -> dict[str, Any]:
    """Outputs of ``logprobs`` that name their own row: everything in row i is made of chosen[i]."""
    return {
        f"{prefix}_chosen": chosen,
        f"{prefix}_rank": [round(-c) for c in chosen],
        f"{prefix}_top_ids": [[round(-c) * 10 + k for k in range(top)] for c in chosen],
        f"{prefix}_top": [[c - k for k in range(top)] for c in chosen],
    }


# ---------------------------------------------------------------- drafts


@settings(max_examples=300)
@given(
    drafts=st.lists(st.integers(0, 2), max_size=6),
    sampled=st.lists(st.integers(0, 2), min_size=7, max_size=7),
    max_tokens=st.integers(2, 12),
    stops=st.sampled_from([(), (), (2,)]),
    min_tokens=st.integers(0, 2),
    logprobs=st.sampled_from([None, 1]),
)
def test_tokens_are_accepted_while_drafts_equal_what_was_drawn(
    drafts: list[int],
    sampled: list[int],
    max_tokens: int,
    stops: tuple[int, ...],
    min_tokens: int,
    logprobs: int | None,
) -> None:
    w = world()
    seq = drafted(
        w, drafts, max_tokens, stop_token_ids=stops, min_tokens=min_tokens, logprobs=logprobs, frequency_penalty=0.5
    )
    assert seq.edits is not None
    before = list(seq.tokens)
    plan = w.plan()
    planned = plan.drafts[0]
    assert planned == min(len(drafts), max_tokens - 2)
    outputs = rows_of("lp", [-1.0 - at for at in range(planned + 1)]) if logprobs is not None else {}
    (result,) = apply(w, plan, sampled[: planned + 1], **outputs)
    expected: list[int] = []
    reason = None
    for at in range(planned + 1):  # as if the tokens had been drawn one by one
        expected.append(sampled[at])
        if sampled[at] in stops and 1 + len(expected) > min_tokens:
            reason = "stop"
        elif 1 + len(expected) == max_tokens:
            reason = "length"
        if reason or at == planned or drafts[at] != sampled[at]:
            break
    assert (list(result.tokens), result.reason, result.error) == (expected, reason, None)
    assert seq.tokens == before + expected and result.drafted == planned
    assert seq.drafts == [] or (planned == 0 and logprobs is None)
    assert seq.computed == len(seq.tokens) - 1, "all but the last token have their KV"
    assert len(seq.blocks) == -(-seq.computed // BLOCK)
    for at in range(seq.computed // BLOCK):
        assert w.pool.hash_of[seq.blocks[at]] is not None
    assert seq.edits._count == {t: seq.output.count(t) for t in set(seq.output)}
    if logprobs is None:
        assert result.logprobs is None
    else:
        assert result.logprobs is not None and len(result.logprobs) == len(expected)
        for at, lp in enumerate(result.logprobs):
            assert (lp.token, lp.logprob, lp.rank) == (expected[at], -1.0 - at, 1 + at)
            assert lp.top == (((1 + at) * 10, -1.0 - at),)
    w.abort(seq)


def test_a_sequence_that_ends_within_its_drafts_puts_out_nothing_after() -> None:
    w = world()
    seq = drafted(w, [7, 8, 9], stop_token_ids=(8,))
    (result,) = apply(w, w.plan(), [7, 8, 9, 1])
    assert result.tokens == (7, 8) and result.reason == "stop"
    w.abort(seq)
    assert w.pool.free == w.pool.total


def test_every_sequence_meets_its_own_rows() -> None:
    """Items with no row, one row, drafts, scores and log-probabilities in one step."""
    w = World(60, BLOCK, limits(max_tokens=40))
    plain, guessing, wordy = drafted(w, []), drafted(w, []), drafted(w, [], logprobs=2)
    guessing.drafts, wordy.drafts = [7, 8, 9], [5]
    scoring = w.submit([1, 2, 3, 0], 4, prompt_logprobs=1)
    both = w.submit([3, 2], 4, prompt_logprobs=2, logprobs=0)
    long = w.submit([1] * 38, 4)
    plan = w.plan()
    assert plan.seqs == [plain, guessing, wordy, scoring, both, long]
    assert plan.rows == [1, 4, 2, 4, 2, 0]
    ids = [6, 7, 8, 1, 0, 5, 4, 0, 0, 0, 3, 0, 2]  # ids of scored rows are nobody's
    results = apply(w, plan, ids, **rows_of("lp", [-1.0, -2.0, -3.0]), **rows_of("score", [-4.0, -5.0, -6.0, -7.0]))
    by_seq = {r.seq: r for r in results}
    assert long not in by_seq and long.computed == plan.counts[-1]
    assert {s: by_seq[s].tokens for s in (plain, guessing, wordy, scoring, both)} == {
        plain: (6,), guessing: (7, 8, 1), wordy: (5, 4), scoring: (3,), both: (2,),
    }  # fmt: skip
    assert [lp.logprob for lp in by_seq[wordy].logprobs or ()] == [-1.0, -2.0]
    assert [len(lp.top) for lp in by_seq[wordy].logprobs or ()] == [2, 2]
    assert [lp.logprob for lp in by_seq[both].logprobs or ()] == [-3.0]
    assert [lp.top for lp in by_seq[both].logprobs or ()] == [()]
    assert scoring.prompt_logprobs is not None and both.prompt_logprobs is not None
    assert scoring.prompt_logprobs[0] is None
    assert [(lp.token, lp.logprob) for lp in scoring.prompt_logprobs[1:] if lp] == [(2, -4.0), (3, -5.0), (0, -6.0)]
    assert [(lp.token, lp.logprob, len(lp.top)) for lp in both.prompt_logprobs[1:] if lp] == [(2, -7.0, 2)]
    w.check_books()


# ---------------------------------------------------------------- ends


def test_stop_ids_count_only_after_min_tokens() -> None:
    w = world()
    seq = w.submit([1, 2], 9, stop_token_ids=(8,), min_tokens=2)
    reasons = [apply(w, w.plan(), [8])[0].reason for _ in range(3)]
    assert reasons == [None, None, "stop"]
    w.abort(seq)


def test_the_last_allowed_token_ends_with_length_and_a_stop_id_there_with_stop() -> None:
    for last, reason in ((5, "length"), (8, "stop")):
        w = world()
        w.submit([1, 2], 2, stop_token_ids=(8,))
        assert apply(w, w.plan(), [5])[0].reason is None
        assert apply(w, w.plan(), [last])[0].reason == reason


def test_a_request_for_no_tokens_ends_when_its_prompt_is_computed() -> None:
    w = World(40, BLOCK, limits(max_tokens=4))
    seq = w.submit([1, 2, 3, 0, 1, 2], 0)
    assert apply(w, w.plan(), []) == []
    (result,) = apply(w, w.plan(), [])
    assert (result.seq, result.tokens, result.reason) == (seq, (), "length")


# ---------------------------------------------------------------- prompt scores


def test_each_position_is_scored_once_whatever_comes_between() -> None:
    """Chunks, and a preemption half-way: after it the scored part is computed again without being scored."""
    w = World(40, BLOCK, limits(max_rows=2))
    seq = w.submit([1, 2, 3, 0, 1, 2, 3], 3, prompt_logprobs=0)
    value = 0.0
    starts = []
    for turn in range(20):
        if turn == 2:
            w.scheduler._preempt()
        plan = w.plan()
        scores = sum(plan.rows) - sum(d + 1 for d, s in zip(plan.drafts, plan.samples, strict=True) if s)
        starts.append(plan.starts[0])
        outputs = rows_of("score", [value - at for at in range(scores)]) if scores else {}
        value -= scores
        results = apply(w, plan, [0] * plan.logit_rows, **outputs)
        if results and results[0].reason:
            break
    assert starts[2] == 0
    assert seq.prompt_logprobs is not None and seq.prompt_logprobs[0] is None
    assert [(lp.token, lp.logprob) for lp in seq.prompt_logprobs[1:] if lp] == [
        (2, 0.0), (3, -1.0), (0, -2.0), (1, -3.0), (2, -4.0), (3, -5.0),
    ]  # fmt: skip


# ---------------------------------------------------------------- no finite logits


def test_a_row_without_finite_logits_fails_its_own_request_alone() -> None:
    w = world()
    a, b, c = w.submit([1, 2, 3, 0], 5), w.submit([2, 2, 3, 0], 5), w.submit([3, 2, 3, 0], 5)
    results = apply(w, w.plan(), [4, -1, 3])
    assert [(r.seq, r.tokens, r.reason, r.error) for r in results] == [
        (a, (4,), None, None), (b, (), "error", NO_FINITE), (c, (3,), None, None),
    ]  # fmt: skip
    assert b.output == []
    w.abort(b)
    w.check_books()
    hashes = {w.pool.find(s.hashes[0]) is not None: s for s in (a, c)}
    assert set(hashes) == {True}
    assert w.pool.find(b.hashes[0]) is None, "its KV got into the prefix cache"


def test_a_failed_row_among_several_fails_when_its_turn_comes() -> None:
    """Drafts before it were right, so their tokens stand; the next step meets the failure at its own position."""
    w = world()
    seq = drafted(w, [7, 8, 9])
    (result,) = apply(w, w.plan(), [7, 8, -1, 2])
    assert (result.tokens, result.reason, result.error) == ((7, 8), None, None)
    assert seq.computed == len(seq.tokens) - 1
    w.check_books()
    (result,) = apply(w, w.plan(), [-1])
    assert (result.tokens, result.reason, result.error) == ((), "error", NO_FINITE)


def test_a_failure_in_the_first_of_several_rows() -> None:
    w = world()
    seq = drafted(w, [7, 8, 9], logprobs=1, prompt=(1, 2, 3, 0, 2, 1, 1))
    other = w.submit([2], 4, logprobs=1)
    results = apply(w, w.plan(), [-1, 8, 9, 2, 3], **rows_of("lp", [-1.0, -2.0, -3.0, -4.0, -5.0]))
    assert [(r.tokens, r.reason) for r in results] == [((), "error"), ((3,), None)]
    assert [lp.logprob for lp in results[1].logprobs or ()] == [-5.0], "rows of the failed one were not passed over"
    assert len(w.pool.by_hash) == 1, "only the first block of the prompt, which the step before computed"
    w.abort(seq)
    w.abort(other)


def test_a_draft_after_a_failed_row_is_of_no_account() -> None:
    """A wrong draft before the failed row: the failure belongs to a position that was never reached."""
    w = world()
    seq = drafted(w, [7, 8])
    (result,) = apply(w, w.plan(), [6, -1, -1])
    assert (result.tokens, result.reason) == ((6,), None)
    w.abort(seq)


def test_scores_without_finite_logits_fail_the_request() -> None:
    """Otherwise NaN would be handed out as log-probabilities, and the KV behind it would be shared."""
    w = world()
    scoring = w.submit([1, 2, 3, 0, 1], 0, prompt_logprobs=1)
    other = w.submit([3, 2], 0, prompt_logprobs=1)
    results = apply(w, w.plan(), [2, -1, 0, 1, 2], **rows_of("score", [-1.0, -2.0, -3.0, -4.0, -5.0]))
    for seq in (scoring, other):
        w.abort(seq)
    assert [(r.seq, r.reason, r.error) for r in results] == [(scoring, "error", NO_FINITE), (other, "length", None)]
    assert not w.pool.by_hash

    sampling = w.submit([1, 2, 3, 0, 1], 4, prompt_logprobs=1, logprobs=1)
    (result,) = apply(w, w.plan(), [2, -1, 0, 1, 2], **rows_of("score", [-1.0] * 4), **rows_of("lp", [-5.0]))
    assert (result.seq, result.tokens, result.error) == (sampling, (), NO_FINITE)
    assert not w.pool.by_hash
    assert other.prompt_logprobs is not None and other.prompt_logprobs[1] is not None
    assert other.prompt_logprobs[1].logprob == -5.0
