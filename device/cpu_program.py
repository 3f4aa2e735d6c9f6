"""A step on the CPU as one native call: recorded once for each key at the layout's bounds, replayed with the counts
of each step, so that padding costs no compute and Python runs once a step."""

from __future__ import annotations

import ctypes
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpu_kernels.native import Call as NativeCall
from cpu_kernels.native import Executor
from cpu_kernels.operands import ADDRESS, ARENA, GROWING, SIZES, STEP, NotNative, Operand, call
from device.contract import AttnMeta, HostBuffer, Layout, StepFn, Tracer
from device.cpu_native import META, NATIVE
from device.cpu_trace import Traced
from device.dtypes import numpy_dtype
from device.host_tensor import HostTensor
from device.ops import SampleParams
from device.recorder import Call, MetaRef, Recording, Ref, View, record, refs

_ALIGN = 64


@dataclass(slots=True)
class Replay:
    """A recorded step, ready for the executor. outputs: name -> where it lies. keep: arrays that calls point at."""

    calls: Any
    traced: list[Traced]
    outputs: dict[str, Operand]
    arena: int
    scratch: int
    keep: list[Any]


class Recorded:
    """All recordings of one step function."""

    def __init__(self, fn: StepFn, layout: Layout, executor: Executor, *, fusion: bool) -> None:
        self._fn, self._layout, self._executor, self._fusion = fn, layout, executor, fusion
        self._grown = [spec.name for spec in layout.inputs if spec.grows]
        self._bases = (ctypes.c_void_p * (GROWING + len(self._grown)))()
        self._bounds = [_bound(layout, count) for count in layout.counts]
        self._replays: dict[Hashable, Replay] = {}

    def replay(self, key: Hashable) -> Replay:
        """The recording of a key, made at its first use; NotNative where a call has no native kernel."""
        found = self._replays.get(key)
        if found is None:
            bucket = dict(zip(self._layout.counts, self._bounds, strict=True))
            recording = record(self._fn, self._layout, key, bucket, fused=self._fused)
            found = self._replays[key] = _Planner(recording, self._layout, self._executor, self._bounds).plan()
            self._executor.arena.ensure(found.arena)
            self._executor.scratch.ensure(found.scratch)
        return found

    def _fused(self, op: str, carrier: Any) -> bool:
        return self._fusion and getattr(carrier.impl, "label", "") == NATIVE

    def run(self, buffer: HostBuffer, key: Hashable, tracer: Tracer | None = None) -> dict[str, NDArray[Any]]:
        """One step. Returns copies: the arena belongs to the next one."""
        replay, executor, bases = self.replay(key), self._executor, self._bases
        times = np.zeros(len(replay.traced), np.int64) if tracer else None
        bases[ARENA] = executor.arena.address
        bases[STEP] = buffer.address
        for i, name in enumerate(self._grown):
            bases[GROWING + i] = buffer.addresses[name]
        executor.run(replay.calls, len(replay.traced), buffer.address, bases, times)  # counts stand first in a buffer
        if tracer and times is not None:
            self._tell(tracer, replay, buffer, times)
        counts = buffer.counts
        return {name: _read(self._memory(x.space, buffer), x, _rows(x, counts)) for name, x in replay.outputs.items()}

    def _memory(self, space: int, buffer: HostBuffer) -> NDArray[np.uint8]:
        if space == ARENA:
            return self._executor.arena.array
        if space == STEP:
            return buffer.data
        return buffer.growing[self._grown[space - GROWING]].reshape(-1).view(np.uint8)

    def _tell(self, tracer: Tracer, replay: Replay, buffer: HostBuffer, times: NDArray[np.int64]) -> None:
        lengths = list(zip(buffer.lists["q_lens"], buffer.lists["kv_lens"], strict=True))
        spent = [
            traced.time(nanoseconds * 1e-9, lambda x: _rows(x, buffer.counts), lengths)
            for traced, nanoseconds in zip(replay.traced, times.tolist(), strict=True)
        ]
        tracer(dict(zip(self._layout.counts, buffer.counts.tolist(), strict=True)), spent)


def _rows(x: Operand, counts: NDArray[np.int32]) -> int:
    return x.shape[0] if x.count < 0 else int(counts[x.count]) + x.extra


def _read(memory: NDArray[np.uint8], x: Operand, rows: int) -> NDArray[Any]:
    dtype = numpy_dtype(x.dtype)
    if rows == 0:
        return np.empty((0, *x.shape[1:]), dtype)
    size = ((rows - 1) * x.stride + x.cols) * dtype.itemsize
    flat = memory[x.at : x.at + size].view(dtype)
    if x.stride == x.cols:
        return flat.reshape(rows, *x.shape[1:]).copy()
    strided = np.ndarray((rows, x.cols), dtype, flat, 0, (x.stride * dtype.itemsize, dtype.itemsize))
    return strided.reshape(rows, *x.shape[1:]).copy()


def _bound(layout: Layout, count: str) -> int:
    """The most that a count can be; of inputs that grow, their first capacity."""
    return layout.bound(count) or max((s.bound for s in layout.inputs if s.count == count), default=0)


class _Planner:
    """Gives every value of a recording its place, and makes the native calls."""

    def __init__(self, recording: Recording, layout: Layout, executor: Executor, bounds: list[int]) -> None:
        self._recording, self._layout, self._executor = recording, layout, executor
        self._bounds = (ctypes.c_int32 * len(bounds))(*bounds)
        self._places: dict[int, Operand] = {}
        self._arena = _Arena()
        self._keep: list[Any] = []
        self._owner = self._owners()
        self._last = self._last_uses()

    def plan(self) -> Replay:
        self._place_inputs()
        calls: list[NativeCall] = []
        traced: list[Traced] = []
        for at, step in enumerate(self._recording.steps):
            if isinstance(step, View):
                source = self._places[step.source]
                viewed = source.reshaped(step.spec) if step.kind == "reshape" else source.sliced(step.spec)
                self._places[step.output] = viewed
            elif step.op == "split_qkv":
                self._split(step)
            elif step.op in ("all_reduce", "all_gather"):
                self._places[step.outputs[0]] = self._places[step.args[0].index]
            else:
                made, operands = self._call(step)
                calls.append(made)
                traced.append(Traced(step.op, operands))
            self._free(at)
        return Replay(
            (NativeCall * max(len(calls), 1))(*calls),
            traced,
            {name: self._output(name, index) for name, index in self._recording.outputs.items()},
            self._arena.size,
            max((self._executor.scratch_for(c, self._bounds) for c in calls), default=0),
            self._keep,
        )

    # ------------------------------------------------------------ who owns memory, and how long

    def _owners(self) -> list[int]:
        """For each value the one whose memory it is: views and what passes through own none."""
        owner = list(range(len(self._recording.values)))
        for step in self._recording.steps:
            if isinstance(step, View):
                owner[step.output] = owner[step.source]
            elif step.op in ("split_qkv", "all_reduce", "all_gather"):
                for index in step.outputs:
                    owner[index] = owner[step.args[0].index]
            elif step.op == "norm_linear" and step.args[1] is None:
                owner[step.outputs[1]] = owner[step.args[0].index]
        return owner

    def _last_uses(self) -> dict[int, int]:
        last: dict[int, int] = {}
        for at, step in enumerate(self._recording.steps):
            used = [step.source, step.output] if isinstance(step, View) else [*_refs(step), *step.outputs]
            for index in used:
                last[self._owner[index]] = at
        for index in (*self._recording.outputs.values(), *self._recording.inputs.values()):
            last[self._owner[index]] = len(self._recording.steps)
        return last

    def _free(self, at: int) -> None:
        for index in [i for i in self._arena.used if self._last[i] == at]:
            self._arena.free(index)

    # ------------------------------------------------------------ places

    def _place_inputs(self) -> None:
        offsets = HostBuffer(self._layout, lambda size: np.zeros(size, np.uint8)).offsets
        grown = [spec.name for spec in self._layout.inputs if spec.grows]
        for spec in self._layout.inputs:
            index = self._recording.inputs[spec.name]
            shape = self._recording.values[index].shape
            stride = int(np.prod(spec.tail, dtype=np.int64))
            count = self._layout.counts.index(spec.count)
            space = GROWING + grown.index(spec.name) if spec.grows else STEP
            at = 0 if spec.grows else offsets[spec.name]
            self._places[index] = Operand(spec.dtype, shape, stride, space, at, count, spec.extra)
        index = self._recording.inputs["counts"]
        self._places[index] = Operand("int32", self._recording.values[index].shape, 1, STEP, 0)

    def _new(self, index: int) -> Operand:
        out = self._recording.values[index]
        if out.dtype not in SIZES:
            raise NotNative(f"a result of {out.dtype}")
        cols = int(np.prod(out.shape[1:], dtype=np.int64))
        # rows begin at cache lines where that costs little: neighbours of another thread are not touched
        stride = cols if cols * SIZES[out.dtype] < _ALIGN else -(-cols * SIZES[out.dtype] // _ALIGN) * _ALIGN // 4
        if SIZES[out.dtype] != 4 or len(out.shape) == 1:
            stride = cols
        at = self._arena.take(index, max(out.shape[0], 1) * stride * SIZES[out.dtype])
        count = -1 if out.count is None else self._layout.counts.index(out.count)
        extra = 0 if count < 0 else out.shape[0] - self._bounds[count]
        return Operand(out.dtype, out.shape, stride, ARENA, at, count, extra)

    def _split(self, step: Call) -> None:
        source = self._places[step.args[0].index]
        _, heads, kv_heads, dim = step.args
        start = 0
        for index, n in zip(step.outputs, (heads, kv_heads, kv_heads), strict=True):
            cut = source.sliced((slice(start, start + n * dim),))
            self._places[index] = cut.reshaped((n, dim))
            start += n * dim

    def _output(self, name: str, index: int) -> Operand:
        place = self._places[index]
        if place.space == ADDRESS:
            raise NotNative(f"output {name}, which is a constant of the model,")
        return place

    # ------------------------------------------------------------ calls

    def _call(self, step: Call) -> tuple[NativeCall, tuple[Any, ...]]:
        args = [self._operand(a) for a in step.args]
        named = {k: self._operand(a) for k, a in step.kwargs.items()}
        outs = []
        for index in step.outputs:
            if self._owner[index] != index:  # norm_linear's residual that is its input
                self._places[index] = args[0]
            else:
                self._places[index] = self._new(index)
            outs.append(self._places[index])
        return call(step.op, outs, args, named), (*outs, *args, *named.values())

    def _operand(self, x: Any) -> Any:
        if isinstance(x, Ref):
            return self._places[x.index]
        if isinstance(x, SampleParams):
            return SampleParams(*map(self._operand, x))
        if isinstance(x, MetaRef):
            tensors = {name: self._places[x.tensors[name]] if name in x.tensors else None for name in META}
            return AttnMeta(**tensors, q_lens=(), kv_lens=())  # type: ignore[arg-type]
        if isinstance(x, HostTensor):
            array = np.ascontiguousarray(x.array)
            self._keep.append(array)
            stride = array.strides[0] // array.itemsize if array.size else 1
            return Operand(x.dtype, array.shape, stride, ADDRESS, array.ctypes.data)
        self._keep.append(x)
        return x


def _refs(step: Call) -> Sequence[int]:
    return [i for a in (*step.args, *step.kwargs.values()) for i in refs(a)]


class _Arena:
    """First fit among the gaps that values leave when they die. used: value -> (offset, size)."""

    def __init__(self) -> None:
        self.used: dict[int, tuple[int, int]] = {}
        self.size = 0

    def take(self, index: int, size: int) -> int:
        size = -(-size // _ALIGN) * _ALIGN
        at = 0
        for start, length in sorted(self.used.values()):
            if start - at >= size:
                break
            at = max(at, start + length)
        self.used[index] = (at, size)
        self.size = max(self.size, at + size)
        return at

    def free(self, index: int) -> None:
        del self.used[index]
