"""What a request gets does not depend on how it was scheduled, on the native kernels: the same bits.

The property of tests/runtime/test_schedule_independence.py in float32, where it holds because every kernel sums in an
order that does not depend on the batch: with float weights on the tiny model, with INT4 and INT8 weights and inputs
rounded to int8 on the embedded one.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from cpu_kernels.build import find_compiler
from device.cpu import CpuDevice
from runtime.config import EngineConfig
from runtime.loaders.checkpoint import open_checkpoint
from runtime.models.build import build_model
from runtime.startup import load_tokenizer
from tests.support.engines import load_tiny, tiny_tokenizer
from tests.support.schedules import CASE, MAX_LEN, World, check, configurations

if find_compiler() is None:
    pytest.skip("no C++ compiler", allow_module_level=True)

LONG = bool(os.environ.get("JUMAR_TEST_LONG"))
CASES = int(os.environ.get("JUMAR_SCHEDULE_CASES", "2000" if LONG else "1000"))
BLOCKS = (16, 32, 64)


@functools.cache
def world(name: str) -> World:
    device = CpuDevice("float32", kernels="native")
    if name == "tiny":
        return World(device, load_tiny(device, max_len=MAX_LEN), tiny_tokenizer(), 512, close=0.0)
    checkpoint = open_checkpoint("smollm2-135m", lambda text: None)
    return World(
        device,
        build_model(checkpoint, device, MAX_LEN),
        load_tokenizer(EngineConfig(model=checkpoint.name), checkpoint),
        49152,
        close=0.0,
    )


@settings(max_examples=CASES, deadline=None, suppress_health_check=list(HealthCheck))
@given(config=configurations(BLOCKS), **CASE)
@pytest.mark.timeout(3600)
def test_of_a_tiny_model(config: dict[str, object], **case: Any) -> None:
    check(world("tiny"), config, **case)


@settings(max_examples=300 if LONG else 60, deadline=None, suppress_health_check=list(HealthCheck))
@given(config=configurations(BLOCKS), **CASE)
@pytest.mark.timeout(3600)
def test_of_the_embedded_model(config: dict[str, object], **case: Any) -> None:
    check(world("smollm2-135m"), config, **case)
