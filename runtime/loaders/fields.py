"""Typed access to the key-value part of a checkpoint, with errors that name file and key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from device.errors import LoadError

LARGEST = 1 << 53
"""Of any integer: float64 holds each one up to it, and nothing that a model counts is near it."""
MAX_LAYERS = 10_000
"""Lists are made with an entry for each layer before a tensor is looked at; no model has a tenth of it."""


class Fields:
    """A mapping of untrusted values. ``source`` says in messages where they come from.

    A key whose value is None counts as absent. Without a default an absent key raises LoadError.
    """

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self.values = values
        self.source = source

    def get(self, key: str) -> Any:
        """The raw value, or None."""
        return self.values.get(key)

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def _missing(self, key: str) -> LoadError:
        return LoadError(f"{self.source} lacks {key!r}, which the model needs; is this file complete?")

    def _wrong(self, key: str, expected: str) -> LoadError:
        shown = repr(self.values[key])
        shown = shown if len(shown) <= 100 else shown[:100] + "..."
        return LoadError(f"{self.source}: {key} must be {expected}, not {shown}")

    def integer(self, key: str, default: int | None = None, minimum: int = 1, maximum: int = LARGEST) -> int:
        """An integer of at least ``minimum`` and at most ``maximum``."""
        value = self.values.get(key)
        if value is None:
            if default is None:
                raise self._missing(key)
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self._wrong(key, f"an integer of at least {minimum}")
        if value > maximum:
            raise self._wrong(key, f"at most {maximum}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive, finite number."""
        value = self.values.get(key)
        if value is None:
            if default is None:
                raise self._missing(key)
            return default
        found = finite(value)
        if found is None or found <= 0:
            raise self._wrong(key, "a positive number")
        return found

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self.values.get(key)
        if value is None:
            if default is None:
                raise self._missing(key)
            return default
        if not isinstance(value, str):
            raise self._wrong(key, "a string")
        return value

    def ids(self, key: str) -> tuple[int, ...]:
        """A token id, a list of them, or nothing."""
        value = self.values.get(key)
        if value is None:
            return ()
        items = value if isinstance(value, (list, tuple)) else [value]
        if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in items):
            raise self._wrong(key, "a token id or a list of them")
        return tuple(items)


def finite(value: Any) -> float | None:
    """A number as a float. None for what is no number, is not finite, or is an integer that no float reaches."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None
