"""The comparison with the outside reference: it must pass what is equal, excuse near ties, and fail the rest."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.data import make_tiny
from tests.support.reference import (
    MODELS,
    GreedyReport,
    ReferenceCase,
    compare_generation,
    compare_greedy,
    compare_row,
    compare_teacher_forced,
    load_cases,
    make_case,
    save_cases,
    smollm2_cases,
    tiny_model_cases,
    tiny_model_names,
)

VOCAB, ROWS = 50, 12
PROMPT = (3, 1, 4)


def rows_of(near_tie_at: int | None = None) -> NDArray[np.float32]:
    """Logits whose best id of row i is i + 5, by 2; at ``near_tie_at`` id 40 comes within 5e-5 of it."""
    rows = np.random.RandomState(0).uniform(-4, 4, (ROWS, VOCAB)).astype(np.float32)
    rows[np.arange(ROWS), np.arange(ROWS) + 5] = 6
    if near_tie_at is not None:
        rows[near_tie_at, 40] = 6 - 5e-5
    return rows


def case_of(rows: NDArray[Any], full: tuple[int, ...] = ()) -> ReferenceCase:
    return make_case("made up", 1, PROMPT, rows, full)


def stepper(rows: NDArray[Any], seen: list[list[int]] | None = None) -> Any:
    def step(prefix: list[int]) -> NDArray[Any]:
        if seen is not None:
            seen.append(prefix)
        row: NDArray[Any] = rows[len(prefix) - len(PROMPT)]
        return row

    return step


def generator(tokens: list[int], calls: list[tuple[list[int], int]]) -> Any:
    """Gives ``tokens`` from wherever the prefix ends."""

    def generate(prefix: list[int], count: int) -> list[int]:
        calls.append((prefix, count))
        start = len(prefix) - len(PROMPT)
        return tokens[start : start + count]

    return generate


def test_equal_rows_pass_and_are_counted() -> None:
    rows, seen = rows_of(), list[list[int]]()
    report = compare_greedy(case_of(rows), stepper(rows, seen))
    assert report == GreedyReport(equal=ROWS, excused=0, max_relative_delta=0.0)
    assert seen == [[*PROMPT, *range(5, 5 + row)] for row in range(ROWS)]


def test_noise_within_tolerance_is_reported() -> None:
    rows = rows_of()
    report = compare_greedy(case_of(rows), stepper(rows.astype(np.float64) + 6e-4))
    assert report.equal == ROWS
    assert report.max_relative_delta == pytest.approx(1e-4, rel=1e-2)


@pytest.mark.parametrize("row", [0, 5, ROWS - 1])
def test_planted_wrong_token_fails(row: int) -> None:
    rows = rows_of()
    ours = rows.copy()
    ours[row, 40] = 7
    with pytest.raises(AssertionError, match=rf"output token {row}\b"):
        compare_greedy(case_of(rows), stepper(ours))


def test_wrong_token_fails_by_the_token_alone() -> None:
    rows = rows_of()
    hidden = next(i for i in range(VOCAB) if i not in {*case_of(rows).sample_ids[5], *case_of(rows).top_ids[5]})
    ours = rows.copy()
    ours[5, hidden] = 7
    with pytest.raises(AssertionError, match=rf"output token 5 \(position 8\): got id {hidden}, the reference has 10"):
        compare_greedy(case_of(rows), stepper(ours))


def test_near_tie_is_excused_and_the_reference_is_followed() -> None:
    rows, seen = rows_of(near_tie_at=4), list[list[int]]()
    ours = rows.copy()
    ours[4, 40] = 6 + 1e-5
    report = compare_greedy(case_of(rows), stepper(ours, seen))
    assert (report.equal, report.excused) == (ROWS - 1, 1)
    assert seen[5] == [*PROMPT, 5, 6, 7, 8, 9]


def test_a_third_token_at_a_near_tie_fails() -> None:
    rows = rows_of(near_tie_at=4)
    ours = rows.copy()
    ours[4, 0] = 6.001
    with pytest.raises(AssertionError, match="output token 4"):
        compare_greedy(case_of(rows), stepper(ours))


def test_second_best_beyond_the_near_tie_fails() -> None:
    rows = rows_of(near_tie_at=4)
    rows[4, 40] = 6 - 2e-4
    ours = rows.copy()
    ours[4, 40] = 6 + 1e-4
    with pytest.raises(AssertionError, match="got id 40"):
        compare_greedy(case_of(rows), stepper(ours))


@pytest.mark.parametrize("which", ["sampled", "best", "second"])
def test_planted_wrong_logit_fails(which: str) -> None:
    rows = rows_of()
    case = case_of(rows)
    ids = {"sampled": case.sample_ids[7, 3], "best": case.top_ids[7, 0], "second": case.top_ids[7, 1]}
    ours = rows.copy()
    ours[7, ids[which]] -= 7e-3
    with pytest.raises(AssertionError, match=rf"output token 7: logit of id {ids[which]} .* off by 1.17e-03"):
        compare_greedy(case, stepper(ours))


def test_full_rows_see_every_id() -> None:
    rows = rows_of()
    hidden = next(i for i in range(VOCAB) if i not in {*case_of(rows).sample_ids[7], *case_of(rows).top_ids[7]})
    ours = rows.copy()
    ours[7, hidden] -= 7e-3
    assert compare_greedy(case_of(rows), stepper(ours)).equal == ROWS
    with pytest.raises(AssertionError, match=f"logit of id {hidden} "):
        compare_greedy(case_of(rows, full=(7,)), stepper(ours))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_logits_fail(bad: float) -> None:
    rows = rows_of()
    ours = rows.copy()
    ours[2, 30] = bad
    with pytest.raises(AssertionError, match="output token 2: 1 logits are not finite"):
        compare_greedy(case_of(rows), stepper(ours))


def test_wrong_shapes_fail() -> None:
    rows = rows_of()
    case = case_of(rows)
    with pytest.raises(AssertionError, match="shape"):
        compare_row(case, 0, rows[0, :-1])
    with pytest.raises(AssertionError, match="shape"):
        compare_row(case, 0, rows[:1])
    with pytest.raises(AssertionError, match="rows"):
        compare_teacher_forced(case, lambda ids: rows[:-1])


def test_teacher_forced_takes_all_rows_or_the_last() -> None:
    rows = rows_of()
    before = np.zeros((len(PROMPT) - 1, VOCAB), np.float32)
    asked: list[list[int]] = []

    def forward(ids: list[int]) -> NDArray[Any]:
        asked.append(ids)
        return np.concatenate([before, rows])

    assert compare_teacher_forced(case_of(rows), forward).equal == ROWS
    assert compare_teacher_forced(case_of(rows), lambda ids: rows).equal == ROWS
    assert asked == [[*PROMPT, *range(5, 5 + ROWS - 1)]]
    with pytest.raises(AssertionError):
        compare_teacher_forced(case_of(rows), lambda ids: np.roll(rows, 1, axis=0))


def test_generation_running_free() -> None:
    calls: list[tuple[list[int], int]] = []
    tokens = list(range(5, 5 + ROWS))
    assert compare_generation(case_of(rows_of()), generator(tokens, calls)).equal == ROWS
    assert calls == [(list(PROMPT), ROWS)]


def test_generation_goes_on_behind_the_reference_token() -> None:
    calls: list[tuple[list[int], int]] = []
    tokens = list(range(5, 5 + ROWS))
    tokens[4] = 40
    report = compare_generation(case_of(rows_of(near_tie_at=4)), generator(tokens, calls))
    assert (report.equal, report.excused) == (ROWS - 1, 1)
    assert calls == [(list(PROMPT), ROWS), ([*PROMPT, 5, 6, 7, 8, 9], ROWS - 5)]


@pytest.mark.parametrize("row", [0, 4, ROWS - 1])
def test_generation_with_a_planted_wrong_token_fails(row: int) -> None:
    tokens = list(range(5, 5 + ROWS))
    tokens[row] = 40
    with pytest.raises(AssertionError, match=f"output token {row} .*got id 40"):
        compare_generation(case_of(rows_of()), generator(tokens, []))


def test_generation_must_give_the_tokens_asked_for() -> None:
    with pytest.raises(AssertionError, match="11 tokens generated, 12 were asked for"):
        compare_generation(case_of(rows_of()), generator(list(range(5, 4 + ROWS)), []))


def test_reports_add_up() -> None:
    total = sum([GreedyReport(3, 0, 1e-5), GreedyReport(2, 1, 4e-5)], GreedyReport())
    assert total == GreedyReport(5, 1, 4e-5)
    assert str(total) == "5 equal, 1 excused, max |dlogit| 4.0e-05 of the row's max"


def test_files_round_trip(tmp_path: Path) -> None:
    made = [case_of(rows_of(), full=(0, 9)), dataclasses.replace(case_of(rows_of(2)), name="zwei", text="ä")]
    path = tmp_path / "some.json"
    save_cases(path, {"model": "none"}, made)
    first = path.read_bytes(), path.with_suffix(".npz").read_bytes()
    loaded = load_cases(path)
    for got, want in zip(loaded, made, strict=True):
        assert (got.name, got.text, got.vocab) == (want.name, want.text, VOCAB)
        assert (got.prompt, got.tokens) == (want.prompt, want.tokens)
        for key in ("top_ids", "top_logits", "max_abs", "sample_ids", "sample_logits"):
            np.testing.assert_array_equal(getattr(got, key), getattr(want, key))
        assert got.full.keys() == want.full.keys()
        for row, values in want.full.items():
            np.testing.assert_allclose(got.full[row], values, rtol=0, atol=6 / 65534 * 1.001)
    save_cases(path, {"model": "none"}, made)
    assert (path.read_bytes(), path.with_suffix(".npz").read_bytes()) == first


def test_tokens_that_are_not_the_best_ids_are_refused() -> None:
    case = case_of(rows_of())
    with pytest.raises(ValueError, match="best ids"):
        dataclasses.replace(case, tokens=(*case.tokens[:-1], 40))


# ---------------------------------------------------------------------------------------------- committed data


def _check_data(cases: list[ReferenceCase], vocab: int) -> None:
    for case in cases:
        assert case.vocab == vocab and len(case.tokens) == 64
        assert min(case.prompt) >= 0 and max(case.prompt) < vocab
        assert case.sample_ids.min() >= 0 and case.sample_ids.max() < vocab
        assert (case.top_logits[:, 0] >= case.top_logits[:, 1]).all()
        assert (np.abs(case.sample_logits).max(axis=1) <= case.max_abs).all()
        for row, values in case.full.items():
            assert int(values.argmax()) == case.tokens[row]
            np.testing.assert_allclose(
                values[case.sample_ids[row]], case.sample_logits[row], rtol=0, atol=2e-5 * case.max_abs[row]
            )


def test_committed_smollm2_data_are_sound() -> None:
    cases = smollm2_cases()
    _check_data(cases, 49152)
    assert len(cases) == 20 and sum(len(case.full) for case in cases) == 6
    assert {case.text is None for case in cases} == {False}


def test_committed_tiny_data_are_sound() -> None:
    names = tiny_model_names()
    variants = "gemma3 llama2 llama3_rope llama_linear llama_yarn mistral_window qwen2 qwen3 tiny"
    assert names == variants.split()
    for name in names:
        cases = tiny_model_cases(name)
        _check_data(cases, 520)
        assert [len(case.prompt) for case in cases] == [2, 5, 17, 33, 48, 80]
        assert max(max(case.tokens) for case in cases) < make_tiny.TOKENS  # never a padding id


def test_tiny_model_is_what_its_script_makes() -> None:
    for name, content in make_tiny.files().items():
        assert (MODELS / "tiny" / name).read_bytes() == content, f"run tests/data/make_tiny.py: {name} differs"
