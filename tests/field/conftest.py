"""The services that the field cases talk to, over real sockets."""

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
    """A real (random) model of 520 rows, 8 of them padding."""
    with Running(tiny_engine(dtype="float32")) as running:
        yield running
