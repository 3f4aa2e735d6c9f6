"""The block pool against a model of it, and whether its own check sees every way in which its books can go wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from runtime.blocks import BlockPool

RESERVED = 2
TOTAL = 6


def digest(n: int) -> bytes:
    return n.to_bytes(16, "little")


class PoolMachine(RuleBasedStateMachine):
    """The model: who holds what as lists, free blocks without content as a set, cached ones in order of release."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(RESERVED + TOTAL, RESERVED, 4)
        self.tables: list[list[int]] = []
        self.blank = set(range(RESERVED, RESERVED + TOTAL))
        self.cached: list[int] = []
        self.content: dict[int, bytes] = {}  # block -> the digest under which it is found

    def holders(self, block: int) -> int:
        return sum(table.count(block) for table in self.tables)

    def held(self) -> list[int]:
        return sorted({block for table in self.tables for block in table})

    @precondition(lambda self: self.blank or self.cached)
    @rule()
    def take(self) -> None:
        expected = self.blank or {self.cached[0]}  # content goes last, and of it the longest unused first
        block = self.pool.take()
        assert block in expected
        self.blank.discard(block)
        if block in self.cached:
            self.cached.remove(block)
            del self.content[block]
        self.tables.append([block])

    @precondition(lambda self: self.content)
    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        """A hit, on a block that others hold or on a free one."""
        block = data.draw(st.sampled_from(sorted(self.content)))
        found = self.pool.find(self.content[block])
        assert found == block
        self.pool.touch(block)
        if block in self.cached:
            self.cached.remove(block)
        self.tables.append([block])

    @precondition(lambda self: len(self.tables) > 1)
    @rule(data=st.data())
    def join(self, data: st.DataObject) -> None:
        """One table of several blocks, so that they are released together."""
        other = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 2)))
        if set(other) & set(self.tables[-1]):
            self.tables.append(other)  # a sequence never holds a block twice
        else:
            self.tables[-1] += other

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.release(reversed(table))
        for block in reversed(table):
            if self.holders(block):
                continue
            if block in self.content:
                self.cached.append(block)
            else:
                self.blank.add(block)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), n=st.integers(0, 7))
    def publish(self, data: st.DataObject, n: int) -> None:
        block = data.draw(st.sampled_from(self.held()))
        self.pool.publish(block, digest(n))
        if block not in self.content and digest(n) not in self.content.values():
            self.content[block] = digest(n)

    @rule()
    def clear_cache(self) -> None:
        self.pool.clear_cache()
        self.blank.update(self.cached)
        self.cached = []
        self.content = {}

    @invariant()
    def agrees(self) -> None:
        pool = self.pool
        pool.check_integrity(self.tables)
        assert pool.total == TOTAL
        assert pool.free == len(self.blank) + len(self.cached)
        where = {digest_: block for block, digest_ in self.content.items()}
        for n in range(8):
            assert pool.find(digest(n)) == where.get(digest(n))
        for block in range(RESERVED, RESERVED + TOTAL):
            assert pool.is_free(block) == (self.holders(block) == 0)
            assert pool.ref[block] == self.holders(block)


PoolMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestPoolMachine = PoolMachine.TestCase


def test_reserved_blocks_are_never_given() -> None:
    pool = BlockPool(8, 3, 16)
    assert sorted(pool.take() for _ in range(pool.free)) == [3, 4, 5, 6, 7]
    assert pool.free == 0


def test_a_pool_of_reserved_blocks_alone_is_refused() -> None:
    with pytest.raises(ValueError, match="2 blocks, of which 2 are reserved"):
        BlockPool(2, 2, 16)


def test_the_tail_of_a_sequence_is_evicted_before_its_head() -> None:
    """A head without its tail is still of use to others; a tail without its head is of none."""
    pool = BlockPool(5, 1, 4)
    table = [pool.take() for _ in range(4)]
    for n, block in enumerate(table):
        pool.publish(block, digest(n))
    pool.release(reversed(table))
    assert [pool.take() for _ in range(4)] == table[::-1]
    assert all(pool.find(digest(n)) is None for n in range(4))


def test_use_makes_a_cached_block_young_again() -> None:
    pool = BlockPool(4, 1, 4)
    a, b, c = (pool.take() for _ in range(3))
    for n, block in enumerate((a, b, c)):
        pool.publish(block, digest(n))
    pool.release([a, b, c])
    pool.touch(a)
    pool.release([a])
    assert [pool.take(), pool.take(), pool.take()] == [b, c, a]


def test_blocks_without_content_go_before_cached_ones() -> None:
    pool = BlockPool(4, 1, 4)
    a, b, c = (pool.take() for _ in range(3))
    pool.publish(a, digest(1))
    pool.release([a, b, c])
    assert {pool.take(), pool.take()} == {b, c}
    assert pool.find(digest(1)) == a
    assert pool.take() == a
    assert pool.find(digest(1)) is None


def test_equal_content_is_found_once_and_may_be_published_again_later() -> None:
    pool = BlockPool(4, 1, 4)
    a, b = pool.take(), pool.take()
    pool.publish(a, digest(1))
    pool.publish(b, digest(1))
    assert pool.find(digest(1)) == a and pool.hash_of[b] is None
    pool.publish(a, digest(2))  # a block keeps the content it was published with
    assert pool.find(digest(2)) is None
    pool.clear_cache()
    pool.publish(b, digest(1))
    assert pool.find(digest(1)) == b
    pool.check_integrity([[a], [b]])


def books() -> tuple[BlockPool, list[list[int]]]:
    """Block 1 is reserved, 2 shared by two tables and hashed, 3 held once, 4 free and cached, 5 and 6 free."""
    pool = BlockPool(7, 2, 4)
    blocks = [pool.take() for _ in range(5)]
    order = sorted(blocks)
    assert order == [2, 3, 4, 5, 6]
    pool.publish(2, digest(2))
    pool.touch(2)
    pool.publish(4, digest(4))
    pool.release([4, 5, 6])
    tables = [[2, 3], [2]]
    pool.check_integrity(tables)
    return pool, tables


def ref_of_held_too_high(pool: BlockPool) -> None:
    pool.ref[3] += 1


def ref_of_shared_too_low(pool: BlockPool) -> None:
    pool.ref[2] -= 1


def ref_of_free_not_zero(pool: BlockPool) -> None:
    pool.ref[5] = 1


def held_block_also_free(pool: BlockPool) -> None:
    pool._blank[3] = None


def free_block_lost(pool: BlockPool) -> None:
    del pool._blank[5]


def cached_block_lost(pool: BlockPool) -> None:
    del pool._cached[4]


def free_in_both_queues(pool: BlockPool) -> None:
    pool._blank[4] = None


def cached_without_hash(pool: BlockPool) -> None:
    pool.hash_of[4] = None
    del pool.by_hash[digest(4)]


def blank_with_hash(pool: BlockPool) -> None:
    pool.hash_of[5] = digest(5)
    pool.by_hash[digest(5)] = 5


def found_under_a_foreign_hash(pool: BlockPool) -> None:
    pool.by_hash[digest(9)] = 4


def found_but_not_hashed(pool: BlockPool) -> None:
    pool.hash_of[2] = None


def hashed_but_not_found(pool: BlockPool) -> None:
    del pool.by_hash[digest(4)]


def held_hashed_but_not_found(pool: BlockPool) -> None:
    pool.hash_of[3] = digest(2)


def reserved_block_free(pool: BlockPool) -> None:
    pool._blank[1] = None


def reserved_block_cached(pool: BlockPool) -> None:
    pool._cached[0] = None
    pool.hash_of[0] = digest(0)
    pool.by_hash[digest(0)] = 0


def total_wrong(pool: BlockPool) -> None:
    pool.total += 1


@pytest.mark.parametrize(
    "corrupt",
    [
        ref_of_held_too_high, ref_of_shared_too_low, ref_of_free_not_zero, held_block_also_free, free_block_lost,
        cached_block_lost, free_in_both_queues, cached_without_hash, blank_with_hash, found_under_a_foreign_hash,
        found_but_not_hashed, hashed_but_not_found, held_hashed_but_not_found, reserved_block_free,
        reserved_block_cached, total_wrong,
    ],
    ids=lambda corrupt: corrupt.__name__,
)  # fmt: skip
def test_check_integrity_sees(corrupt: Callable[[BlockPool], None]) -> None:
    pool, tables = books()
    corrupt(pool)
    with pytest.raises(AssertionError):
        pool.check_integrity(tables)


@pytest.mark.parametrize("tables", [[[2, 3]], [[2, 3], [2], [3]], [[2, 3], [2, 5]], [[2, 3], [2, 1]]])
def test_check_integrity_sees_tables_that_do_not_fit(tables: list[list[int]]) -> None:
    pool, _ = books()
    with pytest.raises(AssertionError):
        pool.check_integrity(tables)
