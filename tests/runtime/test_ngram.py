"""The n-gram index against a search through the whole text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from runtime.ngram import NgramIndex


def search(tokens: list[int], shortest: int, longest: int, count: int) -> list[int]:
    """What followed the latest earlier occurrence of the longest suffix that occurs earlier at all."""
    for n in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        suffix = tokens[len(tokens) - n :]
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == suffix:
                return tokens[end : end + count]
    return []


@given(
    text=st.lists(st.integers(0, 2), min_size=1, max_size=60),
    first=st.integers(1, 30),
    growth=st.lists(st.integers(1, 5), max_size=60),
    shortest=st.integers(1, 4),
    more=st.integers(0, 3),
    count=st.integers(0, 6),
)
def test_the_index_says_what_a_search_says(
    text: list[int], first: int, growth: list[int], shortest: int, more: int, count: int
) -> None:
    """Asked again and again while the text grows by one or by several tokens."""
    index = NgramIndex(shortest, shortest + more)
    end = min(first, len(text))
    for step in [*growth, len(text)]:
        assert index.propose(text[:end], count) == search(text[:end], shortest, shortest + more, count)
        end = min(end + step, len(text))


def test_the_longest_match_wins_over_the_latest() -> None:
    text = [1, 2, 3, 9, 9, 3, 7, 1, 2, 3]
    assert NgramIndex(1, 3).propose(text, 2) == [9, 9]
    assert NgramIndex(1, 1).propose(text, 2) == [7, 1]


def test_the_latest_of_equal_matches_wins() -> None:
    assert NgramIndex(2, 2).propose([5, 6, 1, 5, 6, 2, 5, 6], 1) == [2]


def test_a_repeated_token_continues_itself() -> None:
    """The match may overlap the end of the text; a proposal never reaches beyond what is known."""
    assert NgramIndex(1, 3).propose([4, 4, 4, 4], 5) == [4]
    assert NgramIndex(1, 1).propose([4, 4], 5) == [4]


def test_nothing_to_propose() -> None:
    assert NgramIndex(2, 4).propose([1], 4) == []
    assert NgramIndex(2, 4).propose([1, 2, 3, 4], 4) == []
    index = NgramIndex(1, 2)
    assert index.propose([1, 1, 1], 0) == []
    assert index.propose([1, 1, 1], 1) == [1]  # asked with room for none, it still has read the text
