"""Random numbers: Philox4x32-10 by its published answers, and draws that depend on nothing but what names them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.uniforms import ACCEPT, SAMPLE, philox, uniforms

# counter, key, answer: the lines "philox4x32 10" of kat_vectors in Random123
# (https://github.com/DEShawResearch/random123, tests/kat_vectors)
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
seeds = st.integers(-(2**63), 2**64 - 1)


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_philox_gives_the_known_answers(counter: str, key: str, answer: str) -> None:
    block = np.array(words(counter), np.uint64).reshape(4, 1)
    k0, k1 = words(key)
    assert philox(block, (k0, k1))[:, 0].tolist() == words(answer)


def test_philox_of_many_counters_is_philox_of_each() -> None:
    counters = np.array([words(counter) for counter, _, _ in KNOWN], np.uint64).T
    together = philox(counters, (7, 9))
    for at in range(len(KNOWN)):
        assert together[:, at].tolist() == philox(counters[:, at : at + 1], (7, 9))[:, 0].tolist()


def test_uniforms_are_philox_of_position_choice_and_purpose() -> None:
    """The layout of the counter is part of what a seed means: a change would change every seeded output."""
    seed, choice, position = 0x0123456789ABCDEF, 3, 17
    block = np.array([[position], [choice], [ACCEPT], [0]], np.uint64)
    word = int(philox(block, (0x89ABCDEF, 0x01234567))[0, 0])
    assert uniforms(seed, choice, position, 1, ACCEPT).tolist() == [(word >> 8) / 2**24]


@given(seed=seeds, choice=st.integers(0, 127), position=st.integers(0, 2**20), count=st.integers(1, 70))
def test_made_ahead_equals_one_by_one(seed: int, choice: int, position: int, count: int) -> None:
    ahead = uniforms(seed, choice, position, count)
    assert ahead.dtype == np.float32 and ahead.shape == (count,)
    assert ahead.tolist() == [uniforms(seed, choice, position + i, 1)[0] for i in range(count)]


@given(seed=seeds, choice=st.integers(0, 127), position=st.integers(0, 2**20))
def test_range_and_grid(seed: int, choice: int, position: int) -> None:
    draws = uniforms(seed, choice, position).astype(np.float64)
    assert (draws >= 0).all() and (draws < 1).all()
    assert (draws * 2**24 == np.floor(draws * 2**24)).all()


@pytest.mark.parametrize(
    "other", [{"seed": 6}, {"seed": 5 + 2**32}, {"choice": 1}, {"purpose": ACCEPT}, {"position": 1}]
)
def test_whatever_names_a_draw_changes_it(other: dict[str, int]) -> None:
    one = {"seed": 5, "choice": 0, "position": 0, "purpose": SAMPLE}
    a = uniforms(**one, count=4096).astype(np.float64)
    b = uniforms(**{**one, **other}, count=4096).astype(np.float64)
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.08  # five standard deviations of independent draws


def test_seeds_count_modulo_two_to_the_64() -> None:
    assert uniforms(-1, 0, 0, 8).tolist() == uniforms(2**64 - 1, 0, 0, 8).tolist()
    assert uniforms(2**64 + 3, 0, 0, 8).tolist() == uniforms(3, 0, 0, 8).tolist()


def test_they_are_uniform() -> None:
    """Chi-square over 64 bins of 2^18 draws; the bound is the 1 - 1e-6 quantile for 63 degrees of freedom."""
    draws = np.concatenate([uniforms(seed, 0, 1000 * seed, 1 << 14) for seed in range(16)])
    counts = np.histogram(draws, 64, (0, 1))[0]
    expected = len(draws) / 64
    assert ((counts - expected) ** 2 / expected).sum() < 128
