"""The CPU as a device: the embedded default, on the portable NumPy ops or on the native kernels (``cpu_kernels``)."""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device import reference
from device.binding import Implementation, OpTable, bind
from device.contract import (
    Caps,
    Ceilings,
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
from device.dtypes import decode, numpy_dtype
from device.errors import ConfigError, DeviceError
from device.host_tensor import HostTensor, wrapped
from device.memory import host_memory, usable_cores
from device.ops import OPS
from device.serial import Job, SerialQueue
from device.weights import Activation, CanonicalWeight

log = logging.getLogger(__name__)

PORTABLE = "numpy"


def portable_implementation(dtype: str) -> Implementation:
    """The NumPy versions of all plain ops over ``HostTensor``, computing in ``dtype`` (float32 or float64)."""
    functions = {name: wrapped(fn) for name, fn in reference.reference_table(dtype).items()}
    # rows of one matrix product take different BLAS paths as their number changes; all else works row by row
    varying = {"linear", "paged_attention"}
    invariant = frozenset(OPS) - varying
    pack = functions["pack_weight"]

    def pack_weight(*args: Any, **kwargs: Any) -> Any:
        packed = pack(*args, **kwargs)
        packed.impl = made
        return packed

    functions["pack_weight"] = pack_weight
    made = Implementation(PORTABLE, functions, portable=True, batch_invariant=invariant)
    return made


class CpuDevice(Device):
    """Any CPU. dtype: float32, or float64 for tests that must not depend on rounding. threads: 0 for as many as the
    affinity mask and the container's CPU quota allow. kernels: ``numpy``, ``native``, which computes in float32 and
    replays each step as one native call, or ``auto``: native where that is possible. activations: ``auto`` or
    ``float``, of the native kernels: whether the input of quantised weights is quantised too. capture: whether their
    steps are replayed; otherwise their ops are called one by one."""

    def __init__(
        self,
        dtype: str = "float32",
        *,
        fusion: bool = True,
        strict: bool = False,
        threads: int = 0,
        kernels: str = "numpy",
        activations: str = "auto",
        capture: bool = True,
    ) -> None:
        self.threads = threads or usable_cores()[0]
        self._executor, without = _executor(kernels, dtype, self.threads)
        self.caps = Caps(
            kind="cpu",
            name=f"cpu ({platform.machine()})",
            dtypes=("float32", "float64"),
            kv_dtypes=_kv_dtypes(dtype, native=self._executor is not None),
            capture="recorded" if capture and self._executor is not None else "none",
            traces=capture and self._executor is not None,
            # the native attention sums over tiles of 16 positions: whole ones, or the block size would show in the bits
            block_sizes=(16, 32, 64, 128) if self._executor is not None else (16, 8, 32, 64, 128),
            any_block_size=self._executor is None,
            kv_share_limit=0.5,
        )
        if dtype not in self.caps.dtypes:
            raise ConfigError(
                f"dtype {dtype!r} is not possible on {self.caps.name}; it computes in {' or '.join(self.caps.dtypes)}"
            )
        self.dtype = dtype
        if self.threads != os.cpu_count():
            _limit_blas(self.threads)
        self._fusion, self._strict, self._activations = fusion, strict, activations
        implementations = [portable_implementation(dtype)]
        self._native: Implementation | None = None
        if self._executor is not None:
            from device.cpu_native import native_implementation

            self._native = native_implementation(self._executor, activations)
            implementations.insert(0, self._native)
        self.bound = bind(implementations, fusion=fusion, strict=strict)
        self.report = self.bound.report
        self.report.notices += without
        self._inner = self.bound.table
        self._queue = SerialQueue()
        self.ops = OpTable({name: self._in_order(getattr(self._inner, name)) for name in OPS})

    def _in_order(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        def op(*args: Any, **kwargs: Any) -> Any:
            return self._queue.run(lambda: fn(*args, **kwargs))

        return op

    def memory(self) -> MemoryInfo:
        return host_memory()

    def input_of(self, w: CanonicalWeight) -> Activation:
        if self._native is None:
            return w.activation
        from device.cpu_native import input_of

        return input_of(w, self._activations)

    def kv_block_bytes(self, spec: KVSpec, block_size: int) -> int:
        if self._native is not None:
            from cpu_kernels import cache

            if cache.takes(spec):
                return cache.block_bytes(spec, block_size)
        return reference.RefKV.block_bytes(spec, block_size)

    def alloc_kv(self, spec: KVSpec, blocks: int, block_size: int | None = None) -> Any:
        if spec.dtype not in self.caps.kv_dtypes:
            raise ConfigError(f"kv_dtype {spec.dtype!r}: {self.caps.name} takes {', '.join(self.caps.kv_dtypes)}")
        return self.host_kv(spec, blocks, self.caps.check_block_size(block_size or 0))

    def host_kv(self, spec: KVSpec, blocks: int, block_size: int) -> Any:
        if self._native is not None:
            from cpu_kernels import cache

            if cache.takes(spec):
                return cache.NativeKV(self._native, spec, blocks, block_size)
        kv = reference.RefKV(spec, blocks, block_size, self.dtype)
        parts: list[Any] = [kv, *kv.layers]
        for part in parts:
            part.impl = self.bound.families["cache"][-1]
        return kv

    def tensor(self, array: NDArray[Any], dtype: str | None = None) -> HostTensor:
        if dtype is None:
            return HostTensor(np.array(array))
        if array.dtype == np.uint16:
            return HostTensor(decode(array, "bfloat16").astype(numpy_dtype(dtype)))
        return HostTensor(np.array(array, dtype=numpy_dtype(dtype)))

    def numpy(self, t: Any) -> NDArray[Any]:
        return np.array(self._queue.run(lambda: t.array))

    def program(self, fn: StepFn, layout: Layout) -> Program:
        recorded = None
        if self.caps.capture == "recorded":
            from device.cpu_program import Recorded

            recorded = Recorded(fn, layout, self._executor, fusion=self._fusion)
        return _CpuProgram(fn, layout, self, recorded)

    def ceilings(self) -> Ceilings | None:
        if self._executor is None:
            return None
        size = min(1 << 30, self.memory().free // 4)
        return Ceilings(*self._queue.run(lambda: self._executor.ceilings(size)))

    def submit(self, fn: Callable[[], Any]) -> Job:
        """Work behind what was given before."""
        return self._queue.submit(fn)

    def not_recorded(self, why: str) -> None:
        """A step that cannot be one native call. Found out in its first launch, so the log says it too."""
        text = f"steps run op by op, not as one native call: {why} is not native"
        if self._strict:
            raise DeviceError(f"--strict: {text}")
        log.warning("%s", text)
        self.report.notices.append(text)

    def close(self) -> None:
        self._queue.close(self._executor.close if self._executor is not None else lambda: None)


def _executor(kernels: str, dtype: str, threads: int) -> tuple[Any, list[str]]:
    """The executor of the native kernels, or None, and what is to be said about its absence. ConfigError where they
    were asked for by name and cannot be had."""
    if kernels == "numpy":
        return None, []
    if dtype != "float32":
        why = f"the native kernels compute in float32, not {dtype}"
    else:
        from cpu_kernels.library import NativeUnavailable
        from cpu_kernels.native import Executor

        try:
            return Executor(threads), []
        except NativeUnavailable as error:
            why = str(error)
    if kernels == "native":
        raise ConfigError(f"kernels = 'native': {why}")
    return None, [f"warning: the portable NumPy kernels run, several times slower than the native ones: {why}"]


def _kv_dtypes(dtype: str, *, native: bool) -> tuple[str, ...]:
    if native:
        from device.cpu_native import KV_DTYPES

        return KV_DTYPES
    return ("float64", "float32", "int8") if dtype == "float64" else ("float32", "float64", "int8")


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
    """Steps, run by whoever waits for them: replayed as one native call where they were recorded, otherwise call by
    call on tensors of the actual counts. Neither computes padding."""

    def __init__(self, fn: StepFn, layout: Layout, device: CpuDevice, recorded: Any) -> None:
        self.layout = layout
        self._recorded = recorded
        self._fn = fn
        self._device = device

    def buffer(self) -> HostBuffer:
        return HostBuffer(self.layout)

    def launch(self, buffer: HostBuffer, key: Hashable) -> Pending:
        return _CpuPending(self._device.submit(lambda: self._run(buffer, key)))

    def _run(self, buffer: HostBuffer, key: Hashable) -> dict[str, NDArray[Any]]:
        if self._recorded is not None:
            from cpu_kernels.operands import NotNative

            try:
                found: dict[str, NDArray[Any]] = self._recorded.run(buffer, key, self._device.tracer)
                return found
            except NotNative as error:
                self._device.not_recorded(str(error))
                self._recorded = None
        counts = dict(zip(self.layout.counts, buffer.counts.tolist(), strict=True))
        tensors: dict[str, Any] = {"counts": HostTensor(buffer.counts)}
        for spec in self.layout.inputs:
            tensors[spec.name] = HostTensor(buffer.array(spec.name)[: counts[spec.count] + spec.extra])
        outputs: Mapping[str, Any] = self._fn(Inputs(self._device.bound.table, tensors, buffer.lists), key)
        return {name: t.array for name, t in outputs.items()}
