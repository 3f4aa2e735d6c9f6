"""A second device in miniature: the proof that the contract carries an accelerator that is unlike the host.

Opaque tensors with strided windows, packed weights and cache in layouts of their own, blocks of 128 tokens only, a
scatter without -1, recordings with upper bounds (a power of two for every count), and a worker that does everything
late: ``launch`` and the ops return before anything was read. What the contract forbids is found: a step buffer that is
written to while it belongs to the device, outputs read after the program's next launch, tensors used after their end,
memory shared by ops that did not declare it.
"""

from __future__ import annotations

import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device.binding import Bound, Implementation, OpTable, bind
from device.contract import (
    AttnMeta,
    Caps,
    Device,
    HostBuffer,
    KVSpec,
    Layout,
    MemoryInfo,
    Pending,
    Program,
    StepFn,
)
from device.dtypes import decode, numpy_dtype
from device.errors import ConfigError, DeviceError, OutOfDeviceMemory
from device.ops import OPS, SampleParams
from device.recorder import Call, MetaRef, Recording, Ref, record
from tests.support import toy_kv
from tests.support.toy_kernels import native_implementation, portable_implementation
from tests.support.toy_tensor import Storage, Stream, ToyTensor, poison
from tests.support.toy_weights import upload

_DTYPES = ("float32", "float64", "int32", "int8", "uint8", "int64")


def make_toy_device(
    dtype: str = "float64",
    seed: int = 0,
    jitter: float = 0.0,
    *,
    fusion: bool = True,
    strict: bool = False,
    memory: int = 1 << 30,
) -> ToyDevice:
    """jitter: seconds, the most that any job starts late (drawn from ``seed``). memory: bytes of weights and caches."""
    return ToyDevice(dtype, seed, jitter, fusion=fusion, strict=strict, memory=memory)


class ToyDevice(Device):
    """calls: op calls done so far by name, those of steps among them. launches: steps begun. recordings: made."""

    def __init__(self, dtype: str, seed: int, jitter: float, *, fusion: bool, strict: bool, memory: int) -> None:
        if dtype not in ("float32", "float64"):
            raise ConfigError(f"dtype {dtype!r} is not possible on toy; it computes in float32 or float64")
        other = "float32" if dtype == "float64" else "float64"
        self.caps = Caps(
            kind="toy",
            name="toy",
            dtypes=("float32", "float64"),
            kv_dtypes=(dtype, other, "int8"),
            block_sizes=(toy_kv.BLOCK,),
            reserved_blocks=toy_kv.RESERVED,
            capture="recorded",
        )
        self.dtype = dtype
        self.calls: Counter[str] = Counter()
        self.launches = 0
        self.recordings = 0
        self.stream = Stream(seed, jitter)
        self._fusion = fusion
        self._memory, self._taken = memory, 0
        self._native = native_implementation(self.stream, dtype)
        try:
            self.bound: Bound = bind(
                [self._native, portable_implementation(self.stream, dtype)], fusion=fusion, strict=strict
            )
        except DeviceError:
            self.stream.close()
            raise
        self.report = self.bound.report
        self.ops = OpTable({name: self._late(name) for name in OPS})

    # ------------------------------------------------------------ ops outside a program

    def _late(self, name: str) -> Callable[..., Any]:
        """The op as the host calls it: shapes at once, numbers later."""
        fn = getattr(self.bound.table, name)
        decl = OPS[name]

        def pack_weight(weights: Any, uses: Any) -> Any:
            self.calls[name] += 1
            packed = fn(weights, uses)
            self._take(packed, packed.nbytes)
            return packed

        def op(*args: Any, **kwargs: Any) -> Any:
            args = tuple(map(_now, args))
            kwargs = {key: _now(x) for key, x in kwargs.items()}
            outs = [
                ToyTensor.empty(self.stream, out.shape, self._real(out.dtype, args[0]))
                for out in decl.outputs(*args, **kwargs)
            ]
            self.stream.enqueue(lambda: self._run_into(name, fn, outs, args, kwargs))
            return None if not outs else outs[0] if len(outs) == 1 else tuple(outs)

        return pack_weight if name == "pack_weight" else op

    def _run_into(self, name: str, fn: Callable[..., Any], outs: list[ToyTensor], args: Any, kwargs: Any) -> None:
        self.calls[name] += 1
        for out, result in zip(outs, _listed(fn(*args, **kwargs)), strict=True):
            out.array()[...] = result.array()

    def _real(self, declared: str, operand: Any) -> str:
        """In float64 ``out="float32"`` keeps the operand's type: nothing is rounded there."""
        return "float64" if declared == "float32" and operand.dtype == "float64" == self.dtype else declared

    def fuses(self, op: str, carrier: Any) -> bool:
        """Whether a composite op is one call for this weight or cache layer."""
        impl: Implementation = carrier.impl
        return self._fusion and op in impl.functions

    # ------------------------------------------------------------ memory and copies

    def _take(self, owner: Any, size: int) -> None:
        if self._taken + size > self._memory:
            raise OutOfDeviceMemory(f"{size} bytes asked for, {self._memory - self._taken} free of {self._memory}")
        self._taken += size
        weakref.finalize(owner, self._give_back, size).atexit = False

    def _give_back(self, size: int) -> None:
        self._taken -= size

    def memory(self) -> MemoryInfo:
        return MemoryInfo(self._memory, self._memory - self._taken, "toy")

    def kv_block_bytes(self, spec: KVSpec, block_size: int) -> int:
        self.caps.check_block_size(block_size)
        return toy_kv.block_bytes(spec)

    def alloc_kv(self, spec: KVSpec, blocks: int, block_size: int | None = None) -> toy_kv.ToyKV:
        self.caps.check_block_size(block_size or 0)
        self._check_kv(spec)
        if blocks <= toy_kv.RESERVED:
            raise ConfigError(f"{blocks} KV blocks; toy reserves {toy_kv.RESERVED} of them, so take more")
        kv = toy_kv.ToyKV(self.stream, self._native, spec, blocks, self.dtype)
        self._take(kv, blocks * toy_kv.block_bytes(spec))
        return kv

    def host_kv(self, spec: KVSpec, blocks: int, block_size: int) -> toy_kv.ToyKV:
        self.caps.check_block_size(block_size)
        self._check_kv(spec)
        return toy_kv.ToyKV(self.stream, self._native, spec, blocks, self.dtype, on_host=True)

    def _check_kv(self, spec: KVSpec) -> None:
        if spec.dtype not in self.caps.kv_dtypes:
            raise ConfigError(f"kv_dtype {spec.dtype!r}: toy takes {', '.join(self.caps.kv_dtypes)}")

    def tensor(self, array: NDArray[Any], dtype: str | None = None) -> ToyTensor:
        """Copied on the host at once, to the device later."""
        name = dtype or array.dtype.name
        if name not in _DTYPES:
            raise ConfigError(f"a tensor of {name} is not possible on toy; it takes {', '.join(_DTYPES)}")
        if array.dtype == np.uint16:
            array = decode(array, "bfloat16")
        return upload(self.stream, array.astype(numpy_dtype(name), copy=False))

    def numpy(self, t: Any) -> NDArray[Any]:
        copy: NDArray[Any] = self.stream.synchronise(lambda: np.array(t.array()))
        return copy

    def program(self, fn: StepFn, layout: Layout) -> ToyProgram:
        return ToyProgram(self, fn, layout)

    def hold(self) -> AbstractContextManager[None]:
        """Nothing runs on the worker inside: for tests that must be certain of lateness."""
        return self.stream.hold()

    def close(self) -> None:
        self.stream.close()


def _listed(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else () if result is None else (result,)


def _now(x: Any) -> Any:
    """An operand whose host part no longer changes when the caller goes on."""
    if isinstance(x, np.ndarray):
        return x.copy()
    return replace(x, q_lens=tuple(x.q_lens), kv_lens=tuple(x.kv_lens)) if isinstance(x, AttnMeta) else x


# ---------------------------------------------------------------- programs


class ToyProgram(Program):
    """Records the step function for every key and bucket, replays the list on padded inputs."""

    def __init__(self, device: ToyDevice, fn: StepFn, layout: Layout) -> None:
        self.layout = layout
        self.recordings: dict[Hashable, Recording] = {}
        self._device, self._fn = device, fn
        self._buffers: dict[int, HostBuffer] = {}
        self._busy: set[int] = set()
        self._last: ToyPending | None = None

    def prepare(self, keys: Any) -> None:
        """Record every key at the bounds of all counts."""
        fresh = HostBuffer(self.layout)
        for key in keys:
            self._recording(key, {c: self._rows(fresh, c, self.layout.bound(c)) for c in self.layout.counts})

    def buffer(self) -> HostBuffer:
        buffer = HostBuffer(self.layout, lambda size: np.zeros(size, np.uint8))
        self._buffers[id(buffer)] = buffer
        return buffer

    def launch(self, buffer: HostBuffer, key: Hashable) -> ToyPending:
        if id(buffer) not in self._buffers:
            raise DeviceError("launch takes a buffer that this program's buffer() made")
        if id(buffer) in self._busy:
            raise DeviceError("this step buffer belongs to a launch that nobody has waited for")
        bucket = {c: self._rows(buffer, c, buffer.count(c)) for c in self.layout.counts}
        buffer.pad(bucket)
        recording = self._recording(key, bucket)
        if self._last is not None:
            self._last.expire()
        self._busy.add(id(buffer))
        self._device.launches += 1
        self._last = ToyPending(self._device, self, recording, buffer)
        return self._last

    def release(self, buffer: HostBuffer) -> None:
        self._busy.discard(id(buffer))

    def _rows(self, buffer: HostBuffer, count: str, actual: int) -> int:
        """The bucket of a count: the next power of two, the bound at most; for growing inputs alone their capacity."""
        specs = [s for s in self.layout.inputs if s.count == count]
        only_growing = bool(specs) and all(s.grows for s in specs)
        bound = self.layout.bound(count)
        if only_growing:
            bound = min(buffer.array(s.name).shape[0] for s in specs)
        if specs and not 0 <= actual <= bound:
            raise DeviceError(f"launch: count {count} is {actual}, its bound {bound}")
        bucket = 1 << max(0, actual - 1).bit_length()
        return bound if only_growing else min(bucket, bound) if specs else bucket

    def _recording(self, key: Hashable, bucket: Mapping[str, int]) -> Recording:
        place = (key, tuple(sorted(bucket.items())))
        found = self.recordings.get(place)
        if found is None:
            found = record(self._fn, self.layout, key, bucket, fused=self._device.fuses)
            self.recordings[place] = found
            self._device.recordings += 1
        return found


class ToyPending(Pending):
    def __init__(self, device: ToyDevice, program: ToyProgram, recording: Recording, buffer: HostBuffer) -> None:
        self._device, self._program, self._buffer = device, program, buffer
        self._outputs: dict[str, NDArray[Any]] | None = None
        self._expired = False
        self._checksum = _checksum(buffer)
        self._job = device.stream.submit(lambda: _Replay(device, recording).run(buffer, self._check))

    def _check(self) -> None:
        if _checksum(self._buffer) != self._checksum:
            raise DeviceError("the step buffer was written to between launch and wait, while it belonged to the device")

    def wait(self) -> dict[str, NDArray[Any]]:
        if self._outputs is None:
            try:
                outputs = self._job.result()
                self._check()
            finally:
                self._program.release(self._buffer)
            self._device.stream.raise_late_error()
            self._outputs = outputs
        if self._expired:
            raise DeviceError("the outputs of this launch ended with the program's next launch")
        return dict(self._outputs)

    def expire(self) -> None:
        """The program is launched again: whoever kept the outputs without copying them finds poison."""
        self._expired = True
        for array in (self._outputs or {}).values():
            poison(array)


def _checksum(buffer: HostBuffer) -> int:
    crc = zlib.crc32(buffer.data.data)
    for spec in buffer.layout.inputs:
        if spec.grows:
            crc = zlib.crc32(buffer.array(spec.name).tobytes(), crc)
    return zlib.crc32(repr(buffer.lists).encode(), crc)


class _Replay:
    """One step on the worker, from the recording's list."""

    def __init__(self, device: ToyDevice, recording: Recording) -> None:
        self._device, self._recording = device, recording
        self._live: dict[int, ToyTensor] = {}
        self._owner: dict[int, int] = {}
        self._storages: dict[int, list[Storage]] = {}
        self._lists: dict[str, list[int]] = {}

    def run(self, buffer: HostBuffer, check: Callable[[], None]) -> dict[str, NDArray[Any]]:
        check()
        recording = self._recording
        self._lists = buffer.lists
        for name, index in recording.inputs.items():
            host = buffer.counts if name == "counts" else buffer.array(name)[: recording.values[index].shape[0]]
            self._keep(index, ToyTensor.of(self._device.stream, host), name)
        ends: dict[int, list[int]] = {}
        for base in set(recording.base):
            ends.setdefault(recording.last_use[base], []).append(base)
        for at, step in enumerate(recording.steps):
            if isinstance(step, Call):
                self._call(step)
            else:
                source = self._live[step.source]
                view = (
                    source.reshape(source.shape[0], *step.spec)
                    if step.kind == "reshape"
                    else source[(slice(None), *step.spec)]
                )
                self._keep(step.output, view, step.kind)
            self._end(ends.get(at, ()))
        result = {name: self._output(index, buffer) for name, index in recording.outputs.items()}
        self._end(list(self._storages))
        return result

    def _call(self, step: Call) -> None:
        args = [self._operand(x) for x in step.args]
        kwargs = {name: self._operand(x) for name, x in step.kwargs.items()}
        self._device.calls[step.op] += 1
        results = _listed(getattr(self._device.bound.table, step.op)(*args, **kwargs))
        for index, result in zip(step.outputs, results, strict=True):
            self._keep(index, result, step.op)

    def _keep(self, index: int, t: ToyTensor, what: str) -> None:
        """Check a value against the recording, and note whose memory it is."""
        said = self._recording.values[index]
        kinds = {np.dtype(numpy_dtype(x)).kind for x in (said.dtype, t.dtype)}
        exact = said.dtype == t.dtype or (self._device.dtype == "float64" and kinds == {"f"})
        if t.shape != said.shape or not exact:
            raise DeviceError(f"{what}: value {index} is {t!r}, recorded as {said.dtype} {list(said.shape)}")
        base = self._recording.base[index]
        owner = self._owner.setdefault(id(t.storage), base)
        if owner != base:
            raise DeviceError(f"{what}: value {index} lies in the memory of value {owner}, which no alias declares")
        held = self._storages.setdefault(base, [])
        if t.storage not in held:
            held.append(t.storage)
        self._live[index] = t

    def _operand(self, x: Any) -> Any:
        if isinstance(x, Ref):
            return self._live[x.index]
        if isinstance(x, SampleParams):
            return SampleParams(*map(self._operand, x))
        if isinstance(x, MetaRef):
            tensors = {name: self._live[index] for name, index in x.tensors.items()}
            return AttnMeta(**tensors, q_lens=self._lists["q_lens"], kv_lens=self._lists["kv_lens"])
        return x

    def _output(self, index: int, buffer: HostBuffer) -> NDArray[Any]:
        """A host copy of the rows that are no padding."""
        said = self._recording.values[index]
        host = np.array(self._live[index].array())
        if said.count is None:
            return host
        return host[: said.shape[0] - self._recording.bucket[said.count] + buffer.count(said.count)]

    def _end(self, bases: Any) -> None:
        """The storages stay in the books, so that an id is not given out twice."""
        for base in bases:
            for storage in self._storages.get(base, ()):
                storage.kill()
