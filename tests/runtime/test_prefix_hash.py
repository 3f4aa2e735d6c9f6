"""Hashes of prefixes: equal exactly for equal tokens after equal tokens, of one salt, one adapter and one process."""

from __future__ import annotations

import threading

from hypothesis import assume, given
from hypothesis import strategies as st

from runtime.blocks import ROOT_BYTES, BlockPool, PrefixHasher
from runtime.scheduler import Limits, Scheduler

tokens = st.lists(st.integers(0, 2**31 - 1), max_size=12)
names = st.text(max_size=6)


def scheduler(block_size: int, prefix_cache: bool = True) -> Scheduler:
    limits = Limits(max_seqs=2, max_tokens=8, max_rows=8, max_len=64, chunk=8, prefix_cache=prefix_cache)
    return Scheduler(BlockPool(8, 1, block_size), limits)


@given(a=tokens, b=tokens)
def test_equal_blocks_after_equal_prefixes_and_no_others(a: list[int], b: list[int]) -> None:
    hasher = PrefixHasher()
    root = hasher.root()
    assert (hasher.extend(root, a) == hasher.extend(root, b)) == (a == b)
    assert len(hasher.extend(root, a)) == ROOT_BYTES


@given(a=tokens, b=tokens, block=tokens)
def test_the_whole_prefix_counts(a: list[int], b: list[int], block: list[int]) -> None:
    assume(a != b)
    hasher = PrefixHasher()
    root = hasher.root()
    assert hasher.extend(hasher.extend(root, a), block) != hasher.extend(hasher.extend(root, b), block)


@given(a=st.tuples(names, names), b=st.tuples(names, names), block=tokens)
def test_salt_and_adapter_count_each_in_its_place(a: tuple[str, str], b: tuple[str, str], block: list[int]) -> None:
    hasher = PrefixHasher()
    first, second = hasher.root(*a), hasher.root(*b)
    assert (first == second) == (a == b)
    assert (hasher.extend(first, block) == hasher.extend(second, block)) == (a == b)


def test_salt_and_adapter_cannot_be_shifted_into_one_another() -> None:
    hasher = PrefixHasher()
    roots = [hasher.root("ab", ""), hasher.root("a", "b"), hasher.root("", "ab"), hasher.root("ab", "ab")]
    assert len(set(roots)) == 4


def test_two_processes_have_nothing_in_common() -> None:
    """Otherwise a hash could be computed from outside."""
    one, two = PrefixHasher(), PrefixHasher()
    assert one.root("salt") != two.root("salt")
    assert one.root("salt") == one.root("salt")
    assert one.extend(one.root(), [1, 2]) != two.extend(two.root(), [1, 2])


def test_ids_are_hashed_as_numbers() -> None:
    """Digits run together and bytes cut off would both make these equal."""
    hasher = PrefixHasher()
    root = hasher.root()
    blocks = [[1, 12], [11, 2], [112], [1, 12 + 256], [1, 12 + 65536], [12, 1], [1, 12, 0]]
    assert len({hasher.extend(root, block) for block in blocks}) == len(blocks)


@given(size=st.integers(1, 5), prompt=st.lists(st.integers(0, 3), max_size=20), salt=names)
def test_prompt_hashes_are_the_chain_over_full_blocks(size: int, prompt: list[int], salt: str) -> None:
    s = scheduler(size)
    root = s.hasher.root(salt)
    hashes = s.prompt_hashes(root, prompt)
    assert len(hashes) == len(prompt) // size
    parent = root
    for at, found in enumerate(hashes):
        parent = s.hasher.extend(parent, prompt[at * size : (at + 1) * size])
        assert found == parent
    assert s.prompt_hashes(root, tuple(prompt)) == hashes


def test_nothing_is_hashed_without_a_prefix_cache() -> None:
    s = scheduler(2, prefix_cache=False)
    assert s.prompt_hashes(s.hasher.root(), [1, 2, 3, 4]) == []


def test_hashes_may_be_made_in_any_thread() -> None:
    s = scheduler(2)
    prompts = [[n, n + 1, n + 2, n + 3] * 8 for n in range(8)]
    root = s.hasher.root("x")
    alone = [s.prompt_hashes(root, prompt) for prompt in prompts]
    results: list[list[list[bytes]]] = [[] for _ in prompts]

    def work(at: int) -> None:
        for _ in range(50):
            results[at].append(s.prompt_hashes(s.hasher.root("x"), prompts[at]))

    threads = [threading.Thread(target=work, args=(at,)) for at in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for at, found in enumerate(results):
        assert found == [alone[at]] * 50
