"""The native library, loaded once: built in place first where the sources are newer and a compiler is there."""

from __future__ import annotations

import ctypes
import os
import sys
from functools import lru_cache

from cpu_kernels.build import HERE, LIBRARY, build


class NativeUnavailable(Exception):
    """There is no native library on this machine; the message says why and what to do."""


@lru_cache(maxsize=1)
def _load() -> ctypes.CDLL | str:
    path = HERE / LIBRARY
    if (HERE / "src").is_dir() and os.access(HERE, os.W_OK):
        if not path.exists():
            print("jumar: building the native CPU kernels, once (about a minute)", file=sys.stderr, flush=True)
        built = build()
        if built.path is None and not path.exists():
            return built.reason
    elif not path.exists():
        return f"{path} is not there: the package was installed without a C++ compiler"
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        return f"{path} cannot be loaded: {error}"


def library() -> ctypes.CDLL:
    """The library of this process. NativeUnavailable where there is none."""
    loaded = _load()
    if isinstance(loaded, str):
        raise NativeUnavailable(loaded)
    return loaded
