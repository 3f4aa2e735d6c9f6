"""The executor of ``_native.so``: its structures, its thread team, and a call of it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_double, c_int32, c_int64, c_void_p
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpu_kernels.library import Team, aligned, isa, library

OPS = (
    "embed", "rms_norm", "add_rms_norm", "add", "linear", "rope", "gated_act", "store_kv", "read_kv",
    "paged_attention", "gather_rows", "edit_logits", "mask_logits", "sample", "logprobs", "norm_linear", "act_linear",
    "qkv_rope_store", "verify",
)  # fmt: skip
"""The ops of the executor, by number (``JK_OP_…`` in jumar_cpu.h)."""

LANES = 16
MAX_GROUP = 48
"""Most query heads of a KV head."""
MAX_HEAD_DIM = 1024


class Arg(ctypes.Structure):
    """``JkArg``: an operand of a call."""

    _fields_ = [
        ("at", c_int64),
        ("stride", c_int64),
        ("space", c_int32),
        ("count", c_int32),
        ("extra", c_int32),
        ("rows", c_int32),
        ("cols", c_int32),
        ("size", c_int32),
    ]


class Call(ctypes.Structure):
    """``JkCall``: one op call."""

    _fields_ = [
        ("op", c_int32),
        ("reserved", c_int32),
        ("arg", Arg * 12),
        ("num", c_int64 * 8),
        ("real", c_double * 2),
        ("ptr", c_void_p * 2),
    ]


class KVLayerStruct(ctypes.Structure):
    """``JkKVLayer``: one layer's pages."""

    _fields_ = [
        ("k", c_void_p),
        ("v", c_void_p),
        ("k_scale", c_void_p),
        ("v_scale", c_void_p),
        ("stride", c_int64),
        ("dtype", c_int32),
        ("heads", c_int32),
        ("dim", c_int32),
        ("vdim", c_int32),
        ("block_size", c_int32),
        ("tiles", c_int32),
    ]


class Buffer:
    """Bytes that grow, 64-byte aligned. Contents are lost when it grows; memory that nobody writes to costs nothing."""

    def __init__(self) -> None:
        self.array: NDArray[np.uint8] = np.empty(0, np.uint8)
        self.address = 0

    def ensure(self, size: int) -> None:
        if size <= self.array.size:
            return
        self.array = aligned(size)
        self.address = self.array.ctypes.data


class Executor:
    """A thread team with its arena and scratch. One caller at a time. threads: the caller's own among them."""

    def __init__(self, threads: int, cpus: Sequence[int] | None = None) -> None:
        self._lib = library()
        self.isa = isa()
        self.threads = threads
        self.team = Team(threads, cpus)
        self.arena = Buffer()
        self.scratch = Buffer()

    def scratch_for(self, call: Call, bounds: Any) -> int:
        """Bytes of scratch that a call needs at most. bounds: array of the most that each count can be."""
        return int(self._lib.jk_call_scratch(ctypes.byref(call), self.threads, bounds))

    def run(self, calls: Any, n: int, counts: int, bases: Any, times: NDArray[np.int64] | None = None) -> None:
        """n calls. calls, bases: ctypes arrays; counts: address. times [n]: gets the nanoseconds of each call."""
        spent = None if times is None else times.ctypes.data
        bad = self._lib.jk_run(self.team.handle, calls, n, counts, bases, self.scratch.address, spent)
        if bad:
            raise RuntimeError(f"the native library has no kernel for {OPS[calls[bad - 1].op]} on {self.isa}")

    def ceilings(self, size: int) -> tuple[float, float]:
        """Bytes a second of reading ``size`` bytes, operations (a multiply-add counts as two) a second of the integer
        products that the kernels are made of: the better of three."""
        memory = np.ones(size, np.uint8)
        read = max(self.team.read_bandwidth(memory, 2) for _ in range(3))
        return read, 2 * max(self.team.dot_peak(self.isa) for _ in range(3))

    def close(self) -> None:
        """End the threads. The executor is not used afterwards."""
        self.team.close()
