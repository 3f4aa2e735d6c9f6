"""The reference of the ops on logits: kept sets against sorted lists, draws against the distribution they promise."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from device import reference
from device.ops import SampleParams
from device.reference_sampling import kept_weights

Array = NDArray[Any]
BELOW_ONE = 1 - 2.0**-24


def params(rows: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> SampleParams:
    arrays: Any = (
        np.full(rows, temperature),
        np.full(rows, top_k, np.int32),
        np.full(rows, top_p),
        np.full(rows, min_p),
    )
    return SampleParams(*arrays)


def naive(z: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> dict[int, float]:
    """Kept ids and their probabilities, with sorted lists: temperature, top_k, top_p of what is left, min_p."""
    best = max(z)
    weight = {i: math.exp((x - best) / temperature) for i, x in enumerate(z)}
    order = sorted(weight, key=lambda i: (-weight[i], i))
    if top_k:
        order = order[:top_k]
    if top_p < 1:
        total, kept, mass = math.fsum(weight[i] for i in order), [], 0.0
        for i in order:
            kept.append(i)
            mass += weight[i]
            if mass >= top_p * total:
                break
        order = kept
    order = [i for i in order if weight[i] >= min_p * weight[order[0]]]
    total = math.fsum(weight[i] for i in order)
    return {i: weight[i] / total for i in order}


def bound(dof: int) -> float:
    """The chi-squared value that is exceeded with probability 1e-4 (Wilson and Hilferty 1931)."""
    return dof * (1 - 2 / (9 * dof) + 3.719 * math.sqrt(2 / (9 * dof))) ** 3


def chi_squared(counts: Array, probabilities: Array) -> float:
    expected = probabilities * counts.sum()
    assert not counts[expected == 0].any(), "something impossible was drawn"
    live = expected > 0
    return float((np.square(counts - expected)[live] / expected[live]).sum())


# ---------------------------------------------------------------- the kept set

# Few different values, so that there are many ties; no share of their sums equals one of the top_p below.
LOGITS = st.lists(st.integers(-12, 12).map(lambda n: n * math.log(2) / 2), min_size=1, max_size=40)


TOP_P = st.sampled_from([0.0, 0.3137, 0.6171, 0.9713, 1.0])


@given(LOGITS, st.sampled_from([0.5, 1.0, 2.0]), st.integers(0, 45), TOP_P, st.sampled_from([0.0, 0.01, 0.3]))
def test_the_kept_set_is_that_of_sorted_lists(z: list[float], t: float, k: int, p: float, m: float) -> None:
    want = naive(z, t, k, p, m)
    found = kept_weights(np.array(z), t, k, p, m)
    assert found is not None
    ids = list(range(len(z))) if found[0] is None else found[0].tolist()
    assert ids == sorted(want)
    np.testing.assert_allclose(found[1] / found[1].sum(), [want[i] for i in ids], rtol=1e-12)


@pytest.mark.parametrize("p", [0.05, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("spread", [0.0, 0.02, 3.0])
def test_a_nucleus_of_thousands_equals_the_sorted_one(p: float, spread: float) -> None:
    """The set grows past the first pools; with spread 0 all are equal and the lowest ids are kept."""
    z = np.random.default_rng(0).standard_normal(6000) * spread
    found = kept_weights(z, 1.0, 0, p, 0.0)
    assert found is not None
    assert found[0] is not None
    assert found[0].tolist() == sorted(naive(z.tolist(), 1.0, 0, p, 0.0))


def test_ties_at_the_edge_keep_the_lowest_ids() -> None:
    z = np.array([0.0, 1.0, 1.0, 5.0, 1.0, 1.0])
    for k, want in ((1, [3]), (2, [1, 3]), (3, [1, 2, 3]), (4, [1, 2, 3, 4])):
        found = kept_weights(z, 1.0, k, 1.0, 0.0)
        assert found is not None
        assert found[0] is not None
        assert found[0].tolist() == want


def test_top_p_at_zero_keeps_one() -> None:
    found = kept_weights(np.array([1.0, 3.0, 2.0]), 1.0, 0, 0.0, 0.0)
    assert found is not None
    assert found[0] is not None
    assert found[0].tolist() == [1]


# ---------------------------------------------------------------- draws


@given(LOGITS, st.floats(0, BELOW_ONE), st.sampled_from([0.0, 0.7]), st.integers(0, 9), st.sampled_from([0.6171, 1.0]))
def test_a_draw_is_the_first_id_whose_sum_exceeds_the_uniform(
    z: list[float], u: float, t: float, k: int, p: float
) -> None:
    got = int(reference.sample(np.array([z]), params(1, t, k, p), np.array([u]))[0])
    if t == 0:
        assert got == z.index(max(z))
        return
    want = naive(z, t, k, p, 0.0)
    below = math.fsum(want[i] for i in want if i < got)
    assert got in want
    assert below <= u + 1e-9
    assert u <= below + want[got] + 1e-9


def test_the_edges_of_the_uniform_draw_the_first_and_the_last_kept_id() -> None:
    z = np.full((1, 50), -np.inf, np.float32)
    z[0, [7, 9, 31]] = 1.0
    for u, want in ((0.0, 7), (1 / 3 - 1e-6, 7), (1 / 3 + 1e-6, 9), (BELOW_ONE, 31)):
        assert reference.sample(z, params(1), np.array([u], np.float32)).tolist() == [want]
    z[0, 40] = -200.0  # a weight of 0 after the last that counts
    assert reference.sample(z, params(1), np.array([BELOW_ONE], np.float32)).tolist() == [31]
    z[0, 40] = -20.0  # a uniform that a device rounded to 1 takes the last, not one beyond it
    assert reference.sample(z, params(1), np.array([1.0], np.float64)).tolist() == [40]


def test_greedy_takes_the_lowest_of_equals() -> None:
    z = np.array([[0.0, 2.0, 2.0], [-1.0, -1.0, -1.0]])
    assert reference.sample(z, None, np.zeros(2)).tolist() == [1, 0]
    assert reference.sample(z, params(2, 0.0, 5, 0.5), np.full(2, 0.99)).tolist() == [1, 0]


@pytest.mark.parametrize("hot", [True, False])
def test_a_row_without_an_answer_fails_alone(hot: bool) -> None:
    z = np.zeros((6, 8), np.float32)
    z[:, 3] = 50.0
    z[0, 6] = np.nan
    z[2] = -np.inf
    z[4, 1] = np.inf
    z[5, :3] = -np.inf
    got = reference.sample(z, params(6, float(hot)) if hot else None, np.full(6, 0.5))
    assert got.tolist() == [-1, 3, -1, 3, -1, 3]


def test_a_view_of_columns_is_sampled_like_its_copy() -> None:
    rng = np.random.default_rng(1)
    wide = rng.standard_normal((5, 64))
    u = rng.random(5)
    for p in (None, params(5, 0.9, 10, 0.9)):
        view = reference.sample(wide[:, 8:40], p, u)
        assert view.tolist() == reference.sample(wide[:, 8:40].copy(), p, u).tolist()


def test_no_rows_give_no_ids() -> None:
    for p in (None, params(0)):
        assert reference.sample(np.zeros((0, 9)), p, np.zeros(0)).shape == (0,)


@pytest.mark.parametrize("settings", [(1.0, 0, 1.0, 0.0), (0.6, 0, 1.0, 0.0), (1.0, 4, 1.0, 0.0), (1.3, 0, 0.8, 0.0),
                                      (1.0, 0, 1.0, 0.1), (0.9, 6, 0.9, 0.05)])  # fmt: skip
def test_fifty_thousand_draws_follow_the_distribution(settings: tuple[float, int, float, float]) -> None:
    z = np.array([1.0, -0.5, 2.0, 0.3, -2.0, 1.7, 0.0, 0.9])
    count = 50_000
    u = np.random.default_rng(2).random(count)
    ids = reference.sample(np.broadcast_to(z, (count, 8)), params(count, *settings), u)
    want = np.zeros(8)
    for i, p in naive(z.tolist(), *settings).items():
        want[i] = p
    counts = np.bincount(ids, minlength=8)
    assert chi_squared(counts, want) < bound(int((want > 0).sum()) - 1)
    other = np.roll(want, 1)
    assert chi_squared(np.where(other > 0, counts, 0), other) > bound(7)  # the test sees another distribution


# ---------------------------------------------------------------- verification of drafts


class Chain:
    """A toy target and a toy draft over 8 tokens, each knowing the last token only."""

    def __init__(self, seed: int, settings: tuple[float, int, float, float]) -> None:
        rng = np.random.default_rng(seed)
        self.settings = settings
        self.target = 1.2 * rng.standard_normal((8, 8))
        guess = np.exp(self.target + 1.0 * rng.standard_normal((8, 8)))
        self.draft = guess / guess.sum(axis=1, keepdims=True)
        self.p = np.zeros((8, 8))
        for c in range(8):
            for i, p in naive(self.target[c].tolist(), *settings).items():
                self.p[c, i] = p

    def run(self, count: int, seed: int, same_uniform: bool = False) -> tuple[Array, Array]:
        """The first two tokens after token 0 of ``count`` runs, two drafted at a time, and how many were accepted."""
        rng = np.random.default_rng(seed)
        sums = np.cumsum(self.draft, axis=1)

        def propose(context: Array) -> Array:
            return np.minimum((rng.random((count, 1)) > sums[context]).sum(axis=1), 7)

        first = propose(np.zeros(count, int))
        second = propose(first)
        contexts = np.stack((np.zeros(count, int), first, second), axis=1).reshape(-1)
        drafts = np.stack((first, second, np.full(count, -1)), axis=1).reshape(-1).astype(np.int32)
        u = rng.random((3 * count, 2))
        accepted, next_id = reference.verify(
            self.target[contexts],
            drafts,
            self.draft[contexts],
            np.arange(count + 1) * 3,
            params(3 * count, *self.settings),
            u[:, [0, 0]] if same_uniform else u,
        )
        one = np.where(accepted > 0, first, next_id)
        two = np.where(accepted > 1, second, next_id)
        short = np.flatnonzero(accepted == 0)  # no second token yet: one ordinary step
        two[short] = reference.sample(
            self.target[one[short]], params(short.size, *self.settings), rng.random(short.size)
        )
        return np.stack((one, two), axis=1), accepted


@pytest.mark.parametrize("settings", [(1.0, 0, 1.0, 0.0), (0.7, 5, 0.95, 0.02)])
def test_drafts_leave_the_distribution_of_the_target(settings: tuple[float, int, float, float]) -> None:
    chain = Chain(3, settings)
    tokens, accepted = chain.run(20_000, 4)
    assert 0.2 < (accepted == 0).mean() < 0.8  # both ways are taken often
    assert (accepted == 2).mean() > 0.05
    first = np.bincount(tokens[:, 0], minlength=8)
    assert chi_squared(first, chain.p[0]) < bound(int((chain.p[0] > 0).sum()) - 1)
    joint = chain.p[0][:, None] * chain.p
    pairs = np.bincount(tokens[:, 0] * 8 + tokens[:, 1], minlength=64)
    assert chi_squared(pairs, joint.reshape(-1)) < bound(int((joint > 0).sum()) - 1)


def test_one_uniform_for_both_decisions_would_be_seen() -> None:
    chain = Chain(3, (1.0, 0, 1.0, 0.0))
    tokens, _ = chain.run(20_000, 4, same_uniform=True)
    assert chi_squared(np.bincount(tokens[:, 0], minlength=8), chain.p[0]) > bound(7)


def test_a_good_draft_is_always_accepted_and_an_impossible_one_never() -> None:
    z = np.log(np.array([[0.5, 0.25, 0.25, 1e-30]] * 3))
    q = np.exp(z)
    u = np.full((3, 2), BELOW_ONE)
    accepted, next_id = reference.verify(z, np.array([1, 0, -1]), q, np.array([0, 3]), params(3), u)
    assert (accepted.tolist(), next_id.tolist()) == ([2], [2])
    # top_k 1 leaves id 0; a draft of another id is refused whatever the uniform, and 0 comes in its place
    accepted, next_id = reference.verify(z, np.array([1, 0, -1]), q, np.array([0, 3]), params(3, top_k=1), u * 0)
    assert (accepted.tolist(), next_id.tolist()) == ([0], [0])


def test_greedy_verification_compares_with_the_argmax() -> None:
    z = np.array([[0, 1, 0], [2, 0, 2], [0, 0, 3], [0, 5, 0]], np.float64)
    q = np.full((4, 3), 1 / 3)
    for p in (None, params(4, 0.0)):
        accepted, next_id = reference.verify(
            z, np.array([1, 0, 2, -1]), q, np.array([0, 4]), p, np.full((4, 2), BELOW_ONE)
        )
        assert (accepted.tolist(), next_id.tolist()) == ([3], [1])
        accepted, next_id = reference.verify(z, np.array([1, 2, 2, -1]), q, np.array([0, 4]), p, np.zeros((4, 2)))
        assert (accepted.tolist(), next_id.tolist()) == ([1], [0])


def test_sequences_of_verification_do_not_mix_and_empty_ones_give_nothing() -> None:
    z = np.zeros((4, 3))
    z[np.arange(4), [0, 1, 2, 0]] = 9
    z[3, 1] = np.nan
    accepted, next_id = reference.verify(
        z, np.array([0, -1, -1, -1]), np.full((4, 3), 1 / 3), np.array([0, 2, 2, 3, 4]), None, np.zeros((4, 2))
    )
    assert accepted.tolist() == [1, 0, 0, 0]
    assert next_id.tolist() == [1, -1, 2, -1]


def test_a_residual_without_mass_falls_back_to_the_target() -> None:
    """Rounding may leave q >= p everywhere though a draft was refused."""
    z = np.log(np.array([[0.5, 0.5], [0.5, 0.5]]))
    accepted, next_id = reference.verify(
        z, np.array([0, -1]), np.array([[0.6, 0.6], [0.5, 0.5]]), np.array([0, 2]), params(2), np.full((2, 2), 0.9)
    )
    assert (accepted.tolist(), next_id.tolist()) == ([0], [1])


# ---------------------------------------------------------------- log-probabilities, edits, masks


@given(st.lists(st.integers(-20, 20), min_size=1, max_size=30), st.data())
def test_logprobs_and_ranks_of_a_log_softmax(z: list[int], data: st.DataObject) -> None:
    id_ = data.draw(st.integers(-1, len(z) - 1))
    n = data.draw(st.integers(0, len(z)))
    total = math.log(math.fsum(math.exp(x - max(z)) for x in z)) + max(z)
    order = sorted(range(len(z)), key=lambda i: (-z[i], i))
    chosen, rank, top_ids, top = reference.logprobs(np.array([z], np.float64), np.array([id_]), n)
    assert rank.tolist() == [0 if id_ < 0 else order.index(id_) + 1]
    np.testing.assert_allclose(chosen, [0.0 if id_ < 0 else z[id_] - total], rtol=1e-12, atol=1e-13)
    assert top_ids.tolist() == [order[:n]]
    np.testing.assert_allclose(top[0], [z[i] - total for i in order[:n]], rtol=1e-12, atol=1e-13)


def test_logprobs_of_many_rows_equal_those_of_each() -> None:
    rng = np.random.default_rng(5)
    z, ids = rng.standard_normal((40, 100)).astype(np.float32), rng.integers(0, 100, 40)
    whole = reference.logprobs(z, ids, 3)
    assert [x.dtype for x in whole] == [np.float32, np.int32, np.int32, np.float32]
    for r in range(40):
        for all_rows, one in zip(whole, reference.logprobs(z[r : r + 1], ids[r : r + 1], 3), strict=True):
            np.testing.assert_array_equal(all_rows[r], one[0])


def test_logprobs_of_a_row_without_an_answer_are_nan_and_its_neighbours_are_not() -> None:
    z = np.zeros((3, 4))
    z[1, 2] = np.nan
    chosen, rank, top_ids, top = reference.logprobs(z, np.array([0, 0, -1]), 2)
    assert np.isnan(chosen).tolist() == [False, True, False]
    assert np.isnan(top).all(axis=1).tolist() == [False, True, False]
    assert rank.tolist() == [1, 0, 0]
    assert top_ids.tolist() == [[0, 1], [0, 0], [0, 1]]
    with pytest.raises(ValueError, match="5 best of 4"):
        reference.logprobs(z, np.zeros(3, int), 5)


def test_edits_scale_towards_the_unlikely_and_then_add() -> None:
    z = np.array([[2.0, -2.0, 0.0, 5.0], [1.0, 1.0, 1.0, 1.0]])
    row, ids = np.array([0, 0, -1, 0, 1, 0], np.int32), np.array([0, 1, 3, 2, 1, 3], np.int32)
    reference.edit_logits(z, row, ids, np.array([4.0, 4, 4, 4, 0.5, 1]), np.array([0.0, 1, 9, -1, 0, -np.inf]))
    np.testing.assert_array_equal(z, [[0.5, -7.0, -1.0, -np.inf], [1.0, 2.0, 1.0, 1.0]])


def test_an_edit_of_an_id_outside_the_vocabulary_is_an_error_not_a_write() -> None:
    z = np.zeros((2, 4))
    with pytest.raises(IndexError):
        reference.edit_logits(z, np.array([0]), np.array([4]), np.array([1.0]), np.array([1.0]))
    assert not z.any()


@given(st.integers(1, 70), st.integers(0, 2**32 - 1))
def test_masks_take_bit_i_of_word_i_over_32(size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    allowed = rng.random((2, size)) < 0.5
    words = np.zeros((2, -(-size // 32)), np.uint32)
    for r in range(2):
        for i in range(size):
            words[r, i // 32] |= np.uint32(int(allowed[r, i]) << (i % 32))
    wide = rng.standard_normal((2, size + 3))
    before = wide.copy()
    reference.mask_logits(wide[:, 1 : 1 + size], words.view(np.int32))
    np.testing.assert_array_equal(wide[:, 1 : 1 + size], np.where(allowed, before[:, 1 : 1 + size], -np.inf))
    np.testing.assert_array_equal(wide[:, [0, -2, -1]], before[:, [0, -2, -1]])
