"""The services that the tests of this room talk to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.engines import tiny_engine
from tests.support.service import Running, scripted_service


@pytest.fixture(scope="module")
def service() -> Iterator[Running]:
    """Says what it is told."""
    with scripted_service() as running:
        yield running


@pytest.fixture(scope="module")
def tiny() -> Iterator[Running]:
    """A real (random) model: sampling, seeds and log-probabilities mean something."""
    with Running(tiny_engine()) as running:
        yield running
