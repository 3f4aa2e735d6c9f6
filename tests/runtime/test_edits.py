"""Edit lists, kept up to date token by token, against a recomputation over the whole vocabulary."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.api import SamplingParams
from runtime.edits import EditState, needs_edits
from tests.support.edits import applied, edited

VOCAB = 40
ids = st.integers(0, VOCAB - 1)
few = st.integers(0, 4)  # tokens that come again
token = st.one_of(few, ids)


@st.composite
def parameters(draw: st.DrawFn) -> SamplingParams:
    return SamplingParams(
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 1.5, -0.5])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.25, -2.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3, 0.5])),
        logit_bias=draw(st.dictionaries(token, st.sampled_from([-100.0, -1.0, 0.5, 7.0]), max_size=5)),
        min_tokens=draw(st.sampled_from([0, 0, 1, 3, 8])),
    )


def check(
    state: EditState, params: SamplingParams, prompt: list[int], output: list[int], stops: set[int], drafts: list[int]
) -> list[tuple[np.ndarray, ...]]:
    logits = np.random.default_rng(len(output)).normal(0, 3, VOCAB)
    rows = state.rows(len(output), drafts)
    assert len(rows) == len(drafts) + 1
    for at, row in enumerate(rows):
        assert [part.dtype for part in row] == [np.int32, np.float32, np.float32]
        expected = edited(logits, params, prompt, output + drafts[:at], stops)
        np.testing.assert_allclose(applied(logits, row), expected, rtol=1e-6, atol=1e-5)
    return rows


@settings(max_examples=300)
@given(
    params=parameters(),
    prompt=st.lists(token, max_size=30),
    stops=st.sets(ids, max_size=3),
    rounds=st.lists(st.tuples(st.lists(token, max_size=5), st.lists(token, max_size=3)), max_size=12),
)
def test_every_row_is_what_a_recomputation_gives(
    params: SamplingParams, prompt: list[int], stops: set[int], rounds: list[tuple[list[int], list[int]]]
) -> None:
    """Each round asks for the rows of some drafts, then puts out some tokens, which need not be the drafts."""
    state = EditState(params, prompt, stops)
    output: list[int] = []
    kept = []
    for drafts, new in rounds:
        rows = check(state, params, prompt, output, stops, drafts)
        kept.append((rows, [[part.copy() for part in row] for row in rows]))
        check(state, params, prompt, output, stops, [])  # the drafts have left no trace
        for t in new:
            state.append(t)
            output.append(t)
    check(state, params, prompt, output, stops, [])
    for rows, copies in kept:  # what was handed out does not change afterwards
        for row, copy in zip(rows, copies, strict=True):
            for part, old in zip(row, copy, strict=True):
                assert np.array_equal(part, old)


@pytest.mark.parametrize("known", [0, 1, 15, 16, 17, 31, 32, 33])
def test_the_arrays_grow(known: int) -> None:
    """By the prompt, by the bias, by output, and within supposed tokens that are taken back again."""
    params = SamplingParams(repetition_penalty=1.5, presence_penalty=0.5, logit_bias={known: 2.0}, min_tokens=50)
    prompt, stops = list(range(known)), {39}
    state = EditState(params, prompt, stops)
    fresh = list(range(known + 1, min(known + 8, VOCAB)))
    check(state, params, prompt, [], stops, fresh)
    check(state, params, prompt, [], stops, fresh[::-1])
    output = []
    for t in fresh + fresh:
        state.append(t)
        output.append(t)
        check(state, params, prompt, output, stops, [t, 0])


def test_a_draft_that_comes_twice_counts_twice() -> None:
    params = SamplingParams(frequency_penalty=1.0, presence_penalty=0.25)
    state = EditState(params, [7], ())
    state.append(7)
    biases = [dict(zip(i.tolist(), b.tolist(), strict=True)) for i, _, b in state.rows(1, [7, 8, 7])]
    assert biases == [{7: -1.25}, {7: -2.25}, {7: -2.25, 8: -1.25}, {7: -3.25, 8: -1.25}]
    assert [part.tolist() for part in state.rows(1, [])[0]] == [[7], [1.0], [-1.25]]


def test_prompt_tokens_meet_the_repetition_penalty_alone_and_once() -> None:
    """The example of the vocabulary of eight: presence and frequency look at output only."""
    logits = np.array([2.0, 1.0, 0.0, -1.0, 0, 0, 0, 0])
    cases = [
        ({"presence_penalty": 0.5}, [0, 0, 0], [1, 1], [2.0, 0.5, 0.0, -1.0]),
        ({"frequency_penalty": 0.5}, [0, 0, 0], [1, 1], [2.0, 0.0, 0.0, -1.0]),
        ({"frequency_penalty": -0.5}, [0, 0, 0], [1, 1], [2.0, 2.0, 0.0, -1.0]),
        ({"repetition_penalty": 2.0}, [0, 0, 3], [1, 1, 1], [1.0, 0.5, 0.0, -2.0]),
    ]
    for penalty, prompt, output, expected in cases:
        state = EditState(SamplingParams(**penalty), prompt, ())  # type: ignore[arg-type]
        for t in output:
            state.append(t)
        assert applied(logits, state.rows(len(output), [])[0])[:4].tolist() == expected


def test_stop_ids_become_possible_at_min_tokens_and_not_before() -> None:
    params = SamplingParams(min_tokens=2, logit_bias={5: 3.0})
    state = EditState(params, [1], {5, 6})
    for length, drafts, expected in ((0, [9, 9], [True, True, False]), (1, [9], [True, False]), (2, [], [False])):
        rows = state.rows(length, drafts)
        biases = [dict(zip(i.tolist(), b.tolist(), strict=True)) for i, _, b in rows]
        assert [bias[5] == -np.inf and bias[6] == -np.inf for bias in biases] == expected
        assert biases[-1][5] == (3.0 if not expected[-1] else -np.inf)


@pytest.mark.parametrize(
    ("params", "needed"),
    [
        (SamplingParams(), False),
        (SamplingParams(temperature=0, top_k=3, seed=1, stop_token_ids=(4,)), False),
        (SamplingParams(presence_penalty=-0.1), True),
        (SamplingParams(frequency_penalty=0.1), True),
        (SamplingParams(repetition_penalty=0.9), True),
        (SamplingParams(logit_bias={1: 0.0}), True),
        (SamplingParams(min_tokens=1), True),
    ],
)
def test_only_requests_that_edit_have_a_list(params: SamplingParams, needed: bool) -> None:
    assert needs_edits(params) is needed
