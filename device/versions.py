"""Version numbers: enough of them to compare what is installed with ``versions.toml``. (``packaging`` is not a
dependency, and vendors write versions that it refuses: ``8.3.RC1``.)"""

from __future__ import annotations

import re
from importlib import resources
from typing import Any

from device import toml

_CLAUSE = re.compile(r"(>=|<=|==|!=|>|<)\s*(\d+(?:\.\d+)*)(\.\*)?")


def release(version: str) -> tuple[int, ...]:
    """The leading numbers: ``2.13.0+cpu`` -> (2, 13, 0), ``8.3.RC1`` -> (8, 3). Empty when there is none."""
    found = re.match(r"\D{0,1}(\d+(?:\.\d+)*)", version)
    return tuple(int(part) for part in found[1].split(".")) if found else ()


def short(version: str) -> str:
    """The first two numbers, ``9.1``: what vendors pair."""
    return ".".join(map(str, release(version)[:2]))


def matches(version: str, specifier: str) -> bool:
    """Whether ``version`` fulfils every comma-separated clause of ``specifier``. ValueError for a specifier that cannot
    be read; a version without numbers fulfils nothing."""
    have = release(version)
    good = bool(have)
    for clause in specifier.split(","):
        found = _CLAUSE.fullmatch(clause.strip())
        if not found or (found[3] and found[1] not in ("==", "!=")):
            raise ValueError(f"not a version specifier: {clause!r}")
        want = release(found[2])
        size = len(want) if found[3] else max(len(have), len(want))
        left, right = _padded(have, size), _padded(want, size)
        good &= {
            ">=": left >= right,
            "<=": left <= right,
            "==": left == right,
            "!=": left != right,
            ">": left > right,
            "<": left < right,
        }[found[1]]
    return good


def version_matrix() -> dict[str, Any]:
    """The content of ``versions.toml``."""
    return toml.loads(resources.files("device").joinpath("versions.toml").read_text(encoding="utf-8"))


def _padded(numbers: tuple[int, ...], size: int) -> tuple[int, ...]:
    return (numbers + (0,) * size)[:size]
