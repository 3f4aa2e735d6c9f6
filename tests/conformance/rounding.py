"""A device in half precision, made of the float32 reference: what a good one would do, so that the tolerances are fair.

It rounds everything that a half-precision device may round: activations after every op, weights once packed,
intermediate results of a composite (which is composed of plain ops here). It accumulates in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device import reference
from device.binding import Implementation, bind
from device.contract import (
    AttnMeta,
    Caps,
    Device,
    HostBuffer,
    KVCache,
    KVSpec,
    Layout,
    MemoryInfo,
    Pending,
    Program,
    StepFn,
)
from device.dtypes import decode, encode
from device.ops import OPS, SampleParams
from device.recorder import record

HALF = ("bfloat16", "float16")


class RoundedTensor:
    """float32 (or integer) values that the named dtype can hold."""

    def __init__(self, array: NDArray[Any], dtype: str) -> None:
        self.array, self.dtype = array, dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def reshape(self, *shape: int) -> RoundedTensor:
        return RoundedTensor(self.array.reshape(shape), self.dtype)

    def __getitem__(self, index: Any) -> RoundedTensor:
        return RoundedTensor(self.array[index], self.dtype)


def rounded(array: NDArray[Any], dtype: str) -> NDArray[Any]:
    return decode(encode(array, dtype), dtype, np.float32) if dtype in HALF else array


class RoundingDevice(Device):
    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.caps = Caps("test", f"rounding to {dtype}", (dtype,), (dtype, "int8"), (16, 128))
        functions = {name: self._op(name, fn) for name, fn in reference.reference_table("float32").items()}
        invariant = reference.BATCH_INVARIANT
        self.bound = bind([Implementation("rounding", functions, batch_invariant=invariant)])
        self.report, self.ops = self.bound.report, self.bound.table

    def _op(self, name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        def op(*args: Any) -> Any:
            result = fn(*map(_raw, args))
            if name == "pack_weight":
                return RoundedWeight(result, self.dtype)
            if not OPS[name].step or result is None:
                return None
            outs = OPS[name].outputs(*args)
            parts = result if isinstance(result, tuple) else (result,)
            wrapped = tuple(self._out(name, x, out.dtype) for x, out in zip(parts, outs, strict=True))
            return wrapped if isinstance(result, tuple) else wrapped[0]

        return op

    @staticmethod
    def _out(name: str, x: NDArray[Any], dtype: str) -> RoundedTensor:
        if name == "read_kv":  # comes in the host form of what is stored
            return RoundedTensor(decode(x, dtype, np.float32), dtype)
        return RoundedTensor(rounded(x, dtype), dtype)

    def memory(self) -> MemoryInfo:
        return MemoryInfo(1 << 30, 1 << 30, "test")

    def kv_block_bytes(self, spec: KVSpec, block_size: int) -> int:
        return reference.RefKV.block_bytes(spec, block_size)

    def alloc_kv(self, spec: KVSpec, blocks: int, block_size: int | None = None) -> KVCache:
        return reference.RefKV(spec, blocks, self.caps.check_block_size(block_size or 0), self.dtype)

    def host_kv(self, spec: KVSpec, blocks: int, block_size: int) -> KVCache:
        return reference.RefKV(spec, blocks, block_size, self.dtype)

    def tensor(self, array: NDArray[Any], dtype: str | None = None) -> RoundedTensor:
        dtype = dtype or array.dtype.name
        return RoundedTensor(np.array(decode(array, dtype, np.float32) if dtype in HALF else array), dtype)

    def numpy(self, t: Any) -> NDArray[Any]:
        return np.array(encode(t.array, t.dtype))

    def program(self, fn: StepFn, layout: Layout) -> Program:
        return _RoundingProgram(self, fn, layout)


class RoundedWeight:
    def __init__(self, weight: reference.RefWeight, dtype: str) -> None:
        self.inner = reference.RefWeight(rounded(weight.matrix, dtype), weight.segments)
        self.impl: Any = None
        self.dtype, self.shape, self.nbytes = dtype, weight.shape, weight.nbytes // 2


def _raw(x: Any) -> Any:
    if isinstance(x, RoundedTensor):
        return x.array
    if isinstance(x, RoundedWeight):
        return x.inner
    if isinstance(x, SampleParams):
        return SampleParams(*map(_raw, x))
    if isinstance(x, AttnMeta):
        return reference.RefMeta(*map(_raw, (x.q_start, x.seq_lens, x.block_table, x.tree, x.is_tree)))
    return x


class _Done(Pending):
    def __init__(self, outputs: dict[str, NDArray[Any]]) -> None:
        self._outputs = outputs

    def wait(self) -> dict[str, NDArray[Any]]:
        return self._outputs


class _RoundingProgram(Program):
    """Records, and replays at once on all rows of the bounds: every op sees the padding that a recording brings."""

    def __init__(self, device: RoundingDevice, fn: StepFn, layout: Layout) -> None:
        self._device, self._fn, self.layout = device, fn, layout

    def buffer(self) -> HostBuffer:
        return HostBuffer(self.layout)

    def launch(self, buffer: HostBuffer, key: Hashable) -> Pending:
        layout, device = self.layout, self._device
        capacity = {s.count: buffer.array(s.name).shape[0] for s in layout.inputs if s.grows}
        bucket = {c: layout.bound(c) or capacity[c] for c in layout.counts}
        buffer.pad(bucket)
        recording = record(self._fn, layout, key, bucket)
        tensors: dict[str, Any] = {"counts": device.tensor(buffer.counts, "int32")}
        for spec in layout.inputs:
            array = buffer.array(spec.name)[: bucket[spec.count] + spec.extra]
            tensors[spec.name] = device.tensor(array, spec.dtype)
        outputs = recording.run(device.ops, tensors, buffer.lists)
        counts = {name: recording.values[index].count for name, index in recording.outputs.items()}
        return _Done({n: device.numpy(t)[: buffer.count(str(counts[n]))] for n, t in outputs.items()})
