"""The CPU as a device: the embedded default. Until native kernels are bound, every op is the portable NumPy one."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device import reference
from device.binding import Implementation, OpTable, bind
from device.contract import (
    AttnMeta,
    Caps,
    Device,
    HostBuffer,
    Inputs,
    KVSpec,
    Layout,
    MemoryInfo,
    Pending,
    Program,
    StepFn,
)
from device.dtypes import decode, itemsize, numpy_dtype
from device.errors import ConfigError
from device.memory import host_memory, usable_cores
from device.ops import OPS, SampleParams
from device.serial import Job, SerialQueue

PORTABLE = "numpy"


class HostTensor:
    """A NumPy array that shows only what the contract allows."""

    __slots__ = ("array",)

    def __init__(self, array: NDArray[Any]) -> None:
        self.array = array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> str:
        return self.array.dtype.name

    def reshape(self, *shape: int) -> HostTensor:
        return HostTensor(self.array.reshape(shape))

    def __getitem__(self, index: slice | tuple[slice, ...]) -> HostTensor:
        return HostTensor(self.array[index])


def _raw(x: Any) -> Any:
    """The arrays inside an operand of an op."""
    kind = type(x)
    if kind is HostTensor:
        return x.array
    if kind is AttnMeta:
        return _RawMeta(x)
    if kind is SampleParams:
        return SampleParams(*map(_raw, x))
    return x


class _RawMeta:
    """AttnMeta with arrays in place of tensors."""

    __slots__ = ("block_table", "is_tree", "kv_lens", "q_lens", "q_start", "seq_lens", "slots", "tree")

    def __init__(self, meta: AttnMeta) -> None:
        self.q_start = _raw(meta.q_start)
        self.seq_lens = _raw(meta.seq_lens)
        self.block_table = _raw(meta.block_table)
        self.slots = _raw(meta.slots)
        self.tree = _raw(meta.tree)
        self.is_tree = _raw(meta.is_tree)
        self.q_lens = meta.q_lens
        self.kv_lens = meta.kv_lens


def _wrapped(fn: Callable[..., Any]) -> Callable[..., Any]:
    """An op over arrays as an op over tensors."""

    def op(*args: Any, **kwargs: Any) -> Any:
        result = fn(*[_raw(a) for a in args], **{k: _raw(v) for k, v in kwargs.items()})
        if type(result) is tuple:
            return tuple(HostTensor(r) for r in result)
        return HostTensor(result) if isinstance(result, np.ndarray) else result

    return op


def portable_implementation(dtype: str) -> Implementation:
    """The NumPy versions of all plain ops over ``HostTensor``, computing in ``dtype`` (float32 or float64)."""
    functions = {name: _wrapped(fn) for name, fn in reference.reference_table(dtype).items()}
    # rows of one matrix product take different BLAS paths as their number changes; all else works row by row
    varying = {"linear", "paged_attention"}
    invariant = frozenset(OPS) - varying
    return Implementation(PORTABLE, functions, portable=True, batch_invariant=invariant)


class CpuDevice(Device):
    """Any CPU. dtype: float32, or float64 for tests that must not depend on rounding. threads: 0 for as many as the
    affinity mask and the container's CPU quota allow."""

    def __init__(self, dtype: str = "float32", *, fusion: bool = True, strict: bool = False, threads: int = 0) -> None:
        self.caps = Caps(
            kind="cpu",
            name=f"cpu ({platform.machine()})",
            dtypes=("float32", "float64"),
            kv_dtypes=("float64", "float32", "int8") if dtype == "float64" else ("float32", "float64", "int8"),
            block_sizes=(16, 8, 32, 64, 128),
            any_block_size=True,
            kv_share_limit=0.5,
        )
        if dtype not in self.caps.dtypes:
            raise ConfigError(
                f"dtype {dtype!r} is not possible on {self.caps.name}; it computes in {' or '.join(self.caps.dtypes)}"
            )
        self.dtype = dtype
        self.threads = threads or usable_cores()[0]
        if self.threads != os.cpu_count():
            _limit_blas(self.threads)
        self.bound = bind([portable_implementation(dtype)], fusion=fusion, strict=strict)
        self.report = self.bound.report
        self._inner = self.bound.table
        self._queue = SerialQueue("jumar-cpu-device")
        self.ops = OpTable({name: self._in_order(getattr(self._inner, name)) for name in OPS})

    def _in_order(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        def op(*args: Any, **kwargs: Any) -> Any:
            return self._queue.run(lambda: fn(*args, **kwargs))

        return op

    def memory(self) -> MemoryInfo:
        return host_memory()

    def kv_block_bytes(self, spec: KVSpec, block_size: int) -> int:
        scales = sum(2 * layer.heads * 4 for layer in spec.layers) if spec.dtype == "int8" else 0
        return block_size * (spec.elements_per_token * itemsize(spec.dtype) + scales)

    def alloc_kv(self, spec: KVSpec, blocks: int, block_size: int | None = None) -> reference.RefKV:
        if spec.dtype not in self.caps.kv_dtypes:
            raise ConfigError(f"kv_dtype {spec.dtype!r}: {self.caps.name} takes {', '.join(self.caps.kv_dtypes)}")
        return reference.RefKV(spec, blocks, self.caps.check_block_size(block_size or 0), self.dtype)

    def host_kv(self, spec: KVSpec, blocks: int, block_size: int) -> reference.RefKV:
        return reference.RefKV(spec, blocks, block_size, self.dtype)

    def tensor(self, array: NDArray[Any], dtype: str | None = None) -> HostTensor:
        if dtype is None:
            return HostTensor(np.array(array))
        if array.dtype == np.uint16:
            return HostTensor(decode(array, "bfloat16").astype(numpy_dtype(dtype)))
        return HostTensor(np.array(array, dtype=numpy_dtype(dtype)))

    def numpy(self, t: Any) -> NDArray[Any]:
        return np.array(self._queue.run(lambda: t.array))

    def program(self, fn: StepFn, layout: Layout) -> Program:
        return _CpuProgram(fn, layout, self._inner, self._queue)

    def close(self) -> None:
        self._queue.close()


def _limit_blas(threads: int) -> None:
    """NumPy's BLAS starts a thread for every core of the machine, also of one that may use only some of them."""
    from threadpoolctl import threadpool_limits

    threadpool_limits(threads, user_api="blas")


class _CpuPending(Pending):
    __slots__ = ("_job",)

    def __init__(self, job: Job) -> None:
        self._job = job

    def wait(self) -> dict[str, NDArray[Any]]:
        outputs: dict[str, NDArray[Any]] = self._job.result()
        return outputs


class _CpuProgram(Program):
    """Runs the step function call by call on the device's thread, on tensors of the actual counts: no padding."""

    def __init__(self, fn: StepFn, layout: Layout, table: OpTable, queue: SerialQueue) -> None:
        self.layout = layout
        self._fn = fn
        self._table = table
        self._queue = queue

    def buffer(self) -> HostBuffer:
        return HostBuffer(self.layout)

    def launch(self, buffer: HostBuffer, key: Hashable) -> Pending:
        return _CpuPending(self._queue.submit(lambda: self._run(buffer, key)))

    def _run(self, buffer: HostBuffer, key: Hashable) -> dict[str, NDArray[Any]]:
        counts = dict(zip(self.layout.counts, buffer.counts.tolist(), strict=True))
        tensors: dict[str, Any] = {"counts": HostTensor(buffer.counts)}
        for spec in self.layout.inputs:
            tensors[spec.name] = HostTensor(buffer.array(spec.name)[: counts[spec.count] + spec.extra])
        outputs: Mapping[str, Any] = self._fn(Inputs(self._table, tensors, buffer.lists), key)
        return {name: t.array for name, t in outputs.items()}
