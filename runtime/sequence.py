"""One sequence: a choice of a request on its way through the scheduler."""

from __future__ import annotations

import enum
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any

from runtime.api import SamplingParams, TokenLogprob

if TYPE_CHECKING:
    from runtime.edits import EditState
    from runtime.ngram import NgramIndex


class Status(enum.IntEnum):
    WAITING = 0
    RUNNING = 1
    FINISHED = 2


class Sequence:
    """Tokens, and how far their KV is computed.

    tokens: prompt and output. computed: how many of them have their KV in ``blocks``. drafts: proposed continuation,
    never part of ``tokens`` until accepted. hashes: chained hashes of the full blocks of ``tokens``. limit: length at
    which the output ends. id: unique and in order of arrival. arrived, scheduled: clock times, 0.0 for not yet.
    """

    __slots__ = (
        "arrived",
        "blocks",
        "cached",
        "computed",
        "drafts",
        "edits",
        "extra",
        "first_event",
        "hashes",
        "id",
        "index",
        "limit",
        "ngrams",
        "owner",
        "params",
        "preempted",
        "prompt_len",
        "prompt_logprobs",
        "published",
        "root",
        "row",
        "scheduled",
        "scored",
        "seed",
        "status",
        "stop_ids",
        "tokens",
    )

    def __init__(
        self,
        id: int,
        prompt: Seq[int],
        params: SamplingParams,
        *,
        limit: int,
        index: int = 0,
        owner: Any = None,
        seed: int = 0,
        stop_ids: frozenset[int] = frozenset(),
        root: bytes = b"",
        hashes: Seq[bytes] = (),
        edits: EditState | None = None,
        extra: Any = None,
        arrived: float = 0.0,
    ) -> None:
        self.id = id
        self.index = index
        self.owner = owner
        self.params = params
        self.tokens = list(prompt)
        self.prompt_len = len(prompt)
        self.limit = limit
        self.seed = seed
        self.stop_ids = stop_ids
        self.root = root
        self.hashes = list(hashes)
        self.edits = edits
        self.extra = extra
        self.arrived = arrived
        self.scheduled = 0.0
        self.computed = 0
        self.drafts: list[int] = []
        self.blocks: list[int] = []
        self.published = 0
        self.status = Status.WAITING
        self.row = -1
        self.cached = 0
        self.preempted = False
        self.first_event = True
        self.scored = 0
        """Prompt positions whose log-probabilities have been computed; survives a preemption."""
        self.prompt_logprobs: list[TokenLogprob | None] | None = (
            None if params.prompt_logprobs is None else [None] if prompt else []
        )
        self.ngrams: NgramIndex | None = None

    @property
    def output(self) -> list[int]:
        """The output tokens so far."""
        return self.tokens[self.prompt_len :]

    @property
    def wants_scores(self) -> bool:
        """Whether prompt positions still need logits for their log-probabilities."""
        return self.params.prompt_logprobs is not None and self.scored < self.prompt_len - 1
