"""What the engine counts. The engine thread writes, anyone reads; the server turns it into metrics when asked."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class EngineStats:
    """A snapshot. Counters only grow; gauges are of now. Prompt tokens count when their KV is computed or taken from
    the cache, aborted work included."""

    # gauges
    running: int = 0
    waiting: int = 0
    blocks_total: int = 0
    blocks_free: int = 0
    """Blocks that a new request could take; cached blocks nobody holds are free."""
    # counters
    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    """Prompt tokens for which the prefix cache was asked."""
    prefix_hits: int = 0
    """Prompt tokens whose KV came from it."""
    drafts: int = 0
    """Draft rounds."""
    draft_tokens: int = 0
    accepted_tokens: int = 0
    step_tokens: int = 0
    """Tokens computed in all steps, drafts and recomputation included."""
    last_step_tokens: int = 0
    rejected: int = 0

    @property
    def kv_usage(self) -> float:
        """Share of the pool in use, 0..1."""
        return 1.0 - self.blocks_free / self.blocks_total if self.blocks_total else 0.0


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """Told to observers once, when the last choice of a request has ended. Times are seconds of ``time.monotonic``."""

    label: str
    reason: str
    """``stop`` ``length`` ``abort`` ``error`` of the last choice to end."""
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    choices: int
    arrived: float
    scheduled: float
    """0.0 when it never ran."""
    first_token: float
    """0.0 when none came."""
    finished: float
