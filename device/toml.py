"""TOML reading: the standard library's on Python 3.11 and later, ``tomli`` (the same code) on 3.10."""

from __future__ import annotations

import sys
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TOMLDecodeError = tomllib.TOMLDecodeError


def loads(text: str) -> dict[str, Any]:
    """The document as a dict. TOMLDecodeError (with line and column in its text) when it is not TOML."""
    return tomllib.loads(text)
