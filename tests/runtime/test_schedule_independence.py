"""What a request gets does not depend on how it was scheduled.

The output of every request, sampled ones included, is the same token for token, whatever the token budget, block size,
chunk size, batching rule, companions, prefix cache, preemptions and drafts. The tiny model runs in float64, so that
near-ties cannot flip (the native kernels promise the same bits: tests/cpu/test_native_schedules.py).
"""

from __future__ import annotations

import functools
import os
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from device.cpu import CpuDevice
from tests.support.engines import KVOracle, load_tiny, tiny_tokenizer
from tests.support.schedules import CASE, MAX_LEN, World, check, configurations, finish

CASES = int(os.environ.get("JUMAR_SCHEDULE_CASES", "10000" if os.environ.get("JUMAR_TEST_LONG") else "2000"))


@functools.cache
def tiny() -> World:
    device = CpuDevice("float64")
    return World(device, load_tiny(device, max_len=MAX_LEN), tiny_tokenizer(), 512, close=1e-9)


@settings(max_examples=CASES, deadline=None, suppress_health_check=list(HealthCheck))
@given(config=configurations((1, 2, 4, 8, 16, 32)), **CASE)
@pytest.mark.timeout(3600)
def test_output_does_not_depend_on_the_schedule(config: dict[str, object], **case: Any) -> None:
    check(tiny(), config, **case)


def test_the_mechanisms_are_all_at_work() -> None:
    """The property would hold trivially if nothing was ever preempted, shared or accepted."""
    engine = tiny().engine(kv_blocks=14, block_size=8, speculate="ngram", ngram_min=1)
    oracle = KVOracle(engine)
    for request in tiny().requests[:40]:
        engine.submit(request)
    finish(engine)
    stats = engine.stats()
    assert stats.preemptions > 0 and stats.prefix_hits > 0 and stats.accepted_tokens > 0 and oracle.reads > 1000
    assert stats.accepted_tokens < stats.draft_tokens
