"""What changes a sequence's logits before sampling: penalties, logit_bias, min_tokens, as one sparse list.

Per id one (factor, bias): ``z > 0 ? z/factor : z·factor``, then ``+ bias``. Repetition penalty is the factor, once per
id that stands in prompt or output (Keskar et al. 2019, as ``transformers`` applies it); presence and frequency
penalties count output tokens only (OpenAI: ``z - count·frequency - [count > 0]·presence``); logit_bias adds to it;
until ``min_tokens`` a stop id has bias -inf.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.api import SamplingParams


def needs_edits(params: SamplingParams) -> bool:
    """Whether requests with these parameters ever edit a row."""
    return bool(
        params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1.0
        or params.logit_bias
        or params.min_tokens
    )


class EditState:
    """The edit list of one sequence, kept up to date by its new tokens: O(1) a token, nothing rebuilt.

    ``ids`` i32, ``factor`` and ``bias`` float32 are parallel arrays, valid up to ``size``.
    """

    __slots__ = ("_count", "_place", "bias", "factor", "ids", "params", "size", "stop_ids")

    def __init__(self, params: SamplingParams, prompt: Iterable[int], stop_ids: Collection[int]) -> None:
        self.params = params
        self.stop_ids = sorted(stop_ids)
        self.size = 0
        self.ids = np.empty(16, np.int32)
        self.factor = np.empty(16, np.float32)
        self.bias = np.empty(16, np.float32)
        self._place: dict[int, int] = {}
        self._count: dict[int, int] = {}
        if params.repetition_penalty != 1.0:
            for token in prompt:
                at = self._entry(token)  # before the array is looked up: it may be replaced by a larger one
                self.factor[at] = params.repetition_penalty
        for token, bias in params.logit_bias.items():
            at = self._entry(token)
            self.bias[at] += bias
        if params.min_tokens > 0:
            for token in self.stop_ids:
                self._entry(token)

    def _entry(self, token: int) -> int:
        place = self._place.get(token)
        if place is not None:
            return place
        place = self.size
        if place == len(self.ids):
            self.ids, self.factor, self.bias = (np.concatenate([a, a]) for a in (self.ids, self.factor, self.bias))
        self._place[token] = place
        self.ids[place] = token
        self.factor[place] = 1.0
        self.bias[place] = 0.0
        self.size += 1
        return place

    def append(self, token: int) -> None:
        """A token has been put out."""
        p = self.params
        if not (p.presence_penalty or p.frequency_penalty or p.repetition_penalty != 1.0):
            return
        at = self._entry(token)
        count = self._count.get(token, 0) + 1
        self._count[token] = count
        self.factor[at] = p.repetition_penalty
        self.bias[at] = p.logit_bias.get(token, 0.0) - p.presence_penalty - count * p.frequency_penalty

    def _undo(self, token: int) -> None:
        """The reverse of ``append`` for a token that was only supposed."""
        p = self.params
        if token not in self._count:
            return
        at = self._place[token]
        count = self._count[token] - 1
        if count:
            self._count[token] = count
            self.bias[at] = p.logit_bias.get(token, 0.0) - p.presence_penalty - count * p.frequency_penalty
        else:
            del self._count[token]
            self.bias[at] = p.logit_bias.get(token, 0.0)

    def rows(
        self, output_len: int, drafts: list[int]
    ) -> list[tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.float32]]]:
        """(ids, factor, bias) for the next row and for the row after each draft; copies, at most one entry an id."""
        out = [self._row(output_len)]
        if not drafts:
            return out
        known = self.size
        factors = self.factor[:known].copy()
        for at, draft in enumerate(drafts):
            self.append(draft)
            out.append(self._row(output_len + at + 1))
        for draft in reversed(drafts):
            self._undo(draft)
        for token in self.ids[known : self.size].tolist():
            del self._place[token]
        self.size = known
        self.factor[:known] = factors
        return out

    def _row(self, output_len: int) -> tuple[Any, Any, Any]:
        n = self.size
        bias = self.bias[:n].copy()
        if output_len < self.params.min_tokens:
            for token in self.stop_ids:
                bias[self._place[token]] = -np.inf
        return self.ids[:n].copy(), self.factor[:n].copy(), bias
