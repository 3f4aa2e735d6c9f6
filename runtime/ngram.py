"""Drafts without a model: continue as the text did the last time its latest n-gram stood there.

Prompt lookup decoding (Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding). The index is kept up to
date by new tokens, so that a proposal costs O(longest n), not a search through the text.
"""

from __future__ import annotations


class NgramIndex:
    """For every n-gram (shortest <= n <= longest) of one sequence: where its last occurrence but the latest ended."""

    __slots__ = ("_done", "_last", "longest", "shortest")

    def __init__(self, shortest: int, longest: int) -> None:
        self.shortest = shortest
        self.longest = longest
        self._last: dict[tuple[int, ...], int] = {}
        self._done = 0
        """Tokens whose n-grams are in the index: all but the very last, which has no continuation yet."""

    def propose(self, tokens: list[int], count: int) -> list[int]:
        """At most ``count`` tokens that followed the longest n-gram that ends ``tokens`` when it last stood before."""
        end = len(tokens)
        last = self._last
        for stop in range(max(self._done, self.shortest), end):
            for n in range(self.shortest, min(self.longest, stop) + 1):
                last[tuple(tokens[stop - n : stop])] = stop
        self._done = max(self._done, end)
        if count <= 0:
            return []
        for n in range(min(self.longest, end), self.shortest - 1, -1):
            at = last.get(tuple(tokens[end - n :]))
            if at is not None:
                return tokens[at : at + count]
        return []
