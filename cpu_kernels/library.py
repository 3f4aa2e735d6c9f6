"""The native library, loaded once: built in place first where the sources are newer and a compiler is there."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
from collections.abc import Sequence
from ctypes import c_char_p, c_double, c_float, c_int, c_int64, c_size_t, c_void_p
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpu_kernels.build import HERE, LIBRARY, build, made_from_these_sources

ISAS = ("baseline", "avx2", "avx512", "neon")
"""Instruction sets, by number (``JK_BASELINE`` … in jumar_cpu.h)."""

_ALIGN = 64
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "jk_isa": (c_int, []),
    "jk_isa_name": (c_char_p, [c_int]),
    "jk_isa_runs": (c_int, [c_int]),
    "jk_team_new": (c_void_p, [c_int, c_void_p]),
    "jk_team_free": (None, [c_void_p]),
    # pointers to structures are handed over as addresses or by reference
    "jk_call_scratch": (c_int64, [c_void_p, c_int, c_void_p]),
    "jk_run": (c_int, [c_void_p, c_void_p, c_int, c_void_p, c_void_p, c_void_p, c_void_p]),
    "jk_pack": (c_int, [c_void_p, c_int, c_int, c_int, c_int, c_void_p]),
    "jk_weight_free": (None, [c_void_p]),
    "jk_weight_bytes": (c_size_t, [c_void_p]),
    "jk_linear_scratch": (c_size_t, [c_void_p, c_int]),
    "jk_linear_run": (
        None,
        [c_void_p, c_void_p, c_int, c_void_p, c_int64, c_int, c_void_p, c_int64, c_void_p, c_void_p, c_int],
    ),
    "jk_embed_run": (None, [c_void_p, c_void_p, c_void_p, c_int, c_float, c_void_p, c_int64]),
    "jk_measure_read": (c_double, [c_void_p, c_void_p, c_size_t, c_int]),
    "jk_measure_dot": (c_double, [c_void_p, c_int, c_int64]),
}


class NativeUnavailable(Exception):
    """There is no native library on this machine; the message says why and what to do."""


@lru_cache(maxsize=1)
def _load() -> ctypes.CDLL | str:
    path = HERE / LIBRARY
    if os.access(HERE, os.W_OK):
        if not path.exists():
            print("jumar: building the native CPU kernels, once (about a minute)", file=sys.stderr, flush=True)
        built = build()
        # one that was built of other sources would be called with structures that it does not know
        if built.path is None and not made_from_these_sources():
            return built.reason
    elif not path.exists():
        return f"{path} is not there, and {HERE} is not writable: run python -m cpu_kernels.build as its owner"
    try:
        lib = ctypes.CDLL(str(path))
    except OSError as error:
        return f"{path} cannot be loaded: {error}"
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    return lib


def library() -> ctypes.CDLL:
    """The library of this process. NativeUnavailable where there is none."""
    loaded = _load()
    if isinstance(loaded, str):
        raise NativeUnavailable(loaded)
    return loaded


def runnable_isas() -> tuple[str, ...]:
    """Instruction sets that the library was built with and this CPU has, slowest first."""
    return tuple(name for i, name in enumerate(ISAS) if library().jk_isa_runs(i))


def isa() -> str:
    """The instruction set in use: the best that runs here, or the one that JUMAR_TEST_CPU_ISA names.

    NativeUnavailable where there is no library, or the variable names a set that this CPU or this build lacks.
    """
    number = library().jk_isa()
    if number < 0:
        those = ", ".join(runnable_isas())
        raise NativeUnavailable(f"JUMAR_TEST_CPU_ISA: expected one of {those}, which run on this CPU")
    return ISAS[number]


def aligned(shape: int | tuple[int, ...], dtype: Any = np.uint8) -> NDArray[Any]:
    """Zeros that begin at a multiple of 64 bytes. Pages that nobody writes to cost no memory."""
    dtype = np.dtype(dtype)
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.zeros(size + _ALIGN, np.uint8)
    at = -raw.ctypes.data % _ALIGN
    found: NDArray[Any] = raw[at : at + size].view(dtype).reshape(shape)
    return found


def huge(size: int) -> NDArray[np.uint8]:
    """Zeros, in pages of 2 MiB where the system gives them: they are touched, and found by a core, in fewer steps.
    Pages that nobody writes to cost no memory. MemoryError where there is no room for them."""
    try:
        memory = mmap.mmap(-1, max(size, 1))
    except OSError as error:
        raise MemoryError(f"{size} bytes: {error}") from None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # a system without them (EINVAL) gives small ones
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


class Team:
    """A thread team; the caller is one of its threads. cpus: a CPU number for each thread, None for no pinning."""

    def __init__(self, threads: int, cpus: Sequence[int] | None = None) -> None:
        self.threads = threads
        # kept: at the end of the process this module's names may be gone before the object is
        self._free = library().jk_team_free
        pinned = (c_int * threads)(*cpus) if cpus is not None else None
        self.handle: int | None = library().jk_team_new(threads, pinned)
        if not self.handle:
            raise NativeUnavailable(f"a team of {threads} threads could not be started")

    def close(self) -> None:
        handle, self.handle = self.handle, None
        if handle:
            self._free(handle)

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self.close()

    def read_bandwidth(self, memory: NDArray[Any], repeat: int = 1) -> float:
        """Bytes a second that all threads together read from ``memory``, each its own part, ``repeat`` times."""
        return float(library().jk_measure_read(self.handle, memory.ctypes.data, memory.nbytes, repeat))

    def dot_peak(self, isa_name: str, repeat: int = 10_000_000) -> float:
        """int8 multiply-adds a second of all threads together, with the integer product of an instruction set."""
        return float(library().jk_measure_dot(self.handle, ISAS.index(isa_name), repeat))
