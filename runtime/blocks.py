"""The block pool and the prefix cache.

A block is ``block_size`` slots of KV in every layer. A block is free when nobody holds it; a free block that is full
and hashed stays findable until it is taken for something else, so the prefix cache costs no memory of its own.

    free ──take──> held (ref 1) ──share──> held (ref n) ──release──> free, at the front without a hash,
      ^                                                             at the back with one (evicted last)
      └── touch: a hit on a free cached block takes it out of the free queue
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Iterable, Sequence

ROOT_BYTES = 16


class BlockPool:
    """Who holds which block. Ids run from ``reserved`` to ``blocks`` - 1; the reserved ones are the device's."""

    def __init__(self, blocks: int, reserved: int, block_size: int) -> None:
        if blocks <= reserved:
            raise ValueError(f"{blocks} blocks, of which {reserved} are reserved, hold nothing")
        self.block_size = block_size
        self.reserved = reserved
        self.total = blocks - reserved
        self.ref = [0] * blocks
        self.hash_of: list[bytes | None] = [None] * blocks
        self.by_hash: dict[bytes, int] = {}
        # A dict keeps insertion order and removes from the middle in O(1). Two queues: blocks without a hash are
        # taken first, then cached ones, the longest unused first.
        self._blank: dict[int, None] = dict.fromkeys(range(reserved, blocks))
        self._cached: dict[int, None] = {}

    @property
    def free(self) -> int:
        """Blocks that can be taken, cached ones included."""
        return len(self._blank) + len(self._cached)

    def take(self) -> int:
        """One free block, now held once; its old content is forgotten. Only when ``free`` > 0."""
        if self._blank:
            block, _ = self._blank.popitem()
        else:
            block = next(iter(self._cached))
            del self._cached[block]
            self._forget(block)
        self.ref[block] = 1
        return block

    def touch(self, block: int) -> None:
        """Hold a cached block once more (a prefix hit)."""
        if self.ref[block] == 0:
            del self._cached[block]
        self.ref[block] += 1

    def is_free(self, block: int) -> bool:
        return self.ref[block] == 0

    def release(self, blocks: Iterable[int]) -> None:
        """Let go of blocks. Give a sequence's blocks in reverse, so that its tail is evicted before its head."""
        for block in blocks:
            self.ref[block] -= 1
            if self.ref[block] == 0:
                if self.hash_of[block] is None:
                    self._blank[block] = None
                else:
                    self._cached[block] = None

    def publish(self, block: int, digest: bytes) -> None:
        """Make a full block findable. If the same content is cached already the older block stays the one found."""
        if self.hash_of[block] is None and digest not in self.by_hash:
            self.hash_of[block] = digest
            self.by_hash[digest] = block

    def find(self, digest: bytes) -> int | None:
        """The block that holds this prefix, if any."""
        return self.by_hash.get(digest)

    def clear_cache(self) -> None:
        """Forget all cached content. Held blocks stay held."""
        for block in list(self._cached):
            del self._cached[block]
            self._blank[block] = None
        for block in list(self.by_hash.values()):
            self._forget(block)

    def _forget(self, block: int) -> None:
        digest = self.hash_of[block]
        if digest is not None:
            del self.by_hash[digest]
            self.hash_of[block] = None

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless counts, queues and hashes agree with the live block tables."""
        held = [0] * len(self.ref)
        for table in tables:
            for block in table:
                held[block] += 1
        for block in range(len(self.ref)):
            queued = (block in self._blank) + (block in self._cached)
            if block < self.reserved:
                problem = held[block] or queued
            else:
                problem = held[block] != self.ref[block] or queued != (self.ref[block] == 0)
            if not problem and block in self._cached:
                problem = self.hash_of[block] is None
            if not problem and block in self._blank:
                problem = self.hash_of[block] is not None
            if problem:
                raise AssertionError(
                    f"block {block}: held by {held[block]} tables, ref {self.ref[block]}, queued {queued}, "
                    f"hashed {self.hash_of[block] is not None}"
                )
        for digest, block in self.by_hash.items():
            if self.hash_of[block] != digest:
                raise AssertionError(f"block {block} is found under a hash that it does not carry")
        if sum(digest is not None for digest in self.hash_of) != len(self.by_hash):
            raise AssertionError("a block carries a hash under which it is not found")
        if self.free + sum(r > 0 for r in self.ref[self.reserved :]) != self.total:
            raise AssertionError("free and held blocks do not add up to the pool")


class PrefixHasher:
    """Chained hashes over full blocks: hash(i) = H(hash(i-1), tokens of block i).

    The chain starts from a secret of this process, so that nobody can construct a collision from outside, and from
    salt and adapter, so that only requests of the same salt and adapter share. BLAKE2b with 16-byte digests: a
    collision among 2^40 blocks has probability 2^-49.
    """

    def __init__(self) -> None:
        self._secret = os.urandom(32)

    def root(self, salt: str = "", adapter: str = "") -> bytes:
        h = hashlib.blake2b(digest_size=ROOT_BYTES, key=self._secret)
        for part in (salt.encode(), adapter.encode()):
            h.update(len(part).to_bytes(8, "little") + part)
        return h.digest()

    @staticmethod
    def extend(parent: bytes, tokens: Sequence[int]) -> bytes:
        """The hash of the block with these tokens whose prefix has hash ``parent``."""
        return hashlib.blake2b(array("i", tokens).tobytes(), digest_size=ROOT_BYTES, key=parent).digest()
