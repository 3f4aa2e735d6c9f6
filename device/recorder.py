"""The recorder: a step function turned into a flat list of op calls with operands, views and last uses.

One recorder serves every device that captures: a native executor replays the list, another writes it out as source,
tests count it. Sizes are upper bounds (a bucket); the actual counts are an input. Every tensor of a recording knows
which count its first dimension follows.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from device.binding import OpTable
from device.composite import default_composites
from device.contract import AttnMeta, Inputs, Layout, StepFn
from device.ops import OPS, Out, SampleParams


class RecTensor:
    """A tensor of a recording: value number ``index``, an upper-bound shape, and the count its rows follow."""

    __slots__ = ("_recorder", "count", "dtype", "index", "shape")

    def __init__(self, recorder: _Recorder, index: int, out: Out) -> None:
        self._recorder = recorder
        self.index = index
        self.shape, self.dtype, self.count = out.shape, out.dtype, out.count

    def reshape(self, *shape: int) -> RecTensor:
        rest = 1
        for n in self.shape[1:]:
            rest *= n
        known = 1
        for n in shape[1:]:
            known *= n if n != -1 else 1
        full = (shape[0], *(n if n != -1 else rest // known for n in shape[1:]))
        total = 1
        for n in full[1:]:
            total *= n
        if full[0] not in (self.shape[0], -1) or total != rest:
            raise ValueError(f"reshape {self.shape} -> {shape}: a recorded tensor keeps its first dimension")
        return self._recorder.view(self, "reshape", full[1:], Out((self.shape[0], *full[1:]), self.dtype, self.count))

    def __getitem__(self, index: slice | tuple[slice, ...]) -> RecTensor:
        slices = index if isinstance(index, tuple) else (index,)
        if len(slices) > len(self.shape) or not all(isinstance(cut, slice) for cut in slices):
            raise ValueError(f"a tensor of {len(self.shape)} dimensions takes at most as many slices, not {index!r}")
        if slices[0] != slice(None):
            raise ValueError("rows of a recorded tensor cannot be sliced (their number is not known); use gather_rows")
        shape = list(self.shape)
        for axis, cut in enumerate(slices):
            start, stop, step = cut.indices(shape[axis])
            if step != 1:
                raise ValueError("a recorded tensor takes slices with step 1 only")
            shape[axis] = max(stop - start, 0)
        return self._recorder.view(self, "slice", tuple(slices[1:]), Out(tuple(shape), self.dtype, self.count))


@dataclass(frozen=True, slots=True)
class Ref:
    """Operand: value number ``index`` of the recording."""

    index: int


@dataclass(frozen=True, slots=True)
class Call:
    """One op call. ``args``: Ref for values of the recording, everything else as it was passed (weights, numbers)."""

    op: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class View:
    """``output`` is a view of ``source``: reshape to [rows, *spec], or slices of the dimensions after the first."""

    kind: str
    source: int
    spec: tuple[Any, ...]
    output: int


@dataclass(slots=True)
class Recording:
    """A step as a list.

    values: what each value number is (shape at the bucket, dtype, count). inputs, outputs: name -> value number.
    base[i]: the value whose memory value i views (itself if it is no view). last_use[i]: position in ``steps`` after
    which the memory of base value i is free (-1: never used; len(steps): an output or input).
    """

    bucket: Mapping[str, int]
    values: list[Out] = field(default_factory=list)
    steps: list[Call | View] = field(default_factory=list)
    inputs: dict[str, int] = field(default_factory=dict)
    outputs: dict[str, int] = field(default_factory=dict)
    base: list[int] = field(default_factory=list)
    last_use: list[int] = field(default_factory=list)

    def run(self, table: OpTable, tensors: Mapping[str, Any], lists: Mapping[str, Sequence[int]]) -> dict[str, Any]:
        """Replay call by call on real tensors of the bucket's sizes; frees each value after its last use."""
        live: dict[int, Any] = {index: tensors[name] for name, index in self.inputs.items()}
        dying: dict[int, list[int]] = {}
        for index, at in enumerate(self.last_use):
            dying.setdefault(at, []).append(index)
        for at, step in enumerate(self.steps):
            if isinstance(step, View):
                source = live[step.source]
                live[step.output] = (
                    source.reshape(source.shape[0], *step.spec)
                    if step.kind == "reshape"
                    else source[(slice(None), *step.spec)]
                )
            else:
                args = [_materialise(a, live, lists) for a in step.args]
                kwargs = {k: _materialise(a, live, lists) for k, a in step.kwargs.items()}
                result = getattr(table, step.op)(*args, **kwargs)
                if len(step.outputs) == 1:
                    result = (result,)
                for index, value in zip(step.outputs, result or (), strict=True):
                    live[index] = value
            for index in dying.get(at, ()):
                live.pop(index, None)
        return {name: live[index] for name, index in self.outputs.items()}

    def calls(self, op: str | None = None) -> int:
        """How many op calls (of one op) a replay makes."""
        return sum(isinstance(s, Call) and op in (None, s.op) for s in self.steps)


def record(fn: StepFn, layout: Layout, key: Hashable, bucket: Mapping[str, int],
           *, fused: Callable[[str, Any], bool] | None = None) -> Recording:  # fmt: skip
    """Run ``fn`` once on recorded tensors.

    bucket: the upper bound of every count. fused(op, carrier): whether a composite op is recorded as one call for this
    packed weight or cache layer; otherwise it is recorded as its plain ops.
    """
    recorder = _Recorder(bucket)
    tensors = {}
    for spec in layout.inputs:
        rows = bucket[spec.count] + spec.extra
        tensors[spec.name] = recorder.input(spec.name, Out((rows, *spec.tail), spec.dtype, spec.count))
    tensors["counts"] = recorder.input("counts", Out((len(layout.counts),), "int32", None))
    ops = recorder.table(fused or (lambda op, carrier: False))
    lists: dict[str, list[int]] = {"q_lens": [], "kv_lens": []}
    outputs = fn(Inputs(ops, tensors, lists), key)
    return recorder.finish(outputs)


class _Recorder:
    def __init__(self, bucket: Mapping[str, int]) -> None:
        self.recording = Recording(dict(bucket))

    def new(self, out: Out, base: int | None = None) -> RecTensor:
        index = len(self.recording.values)
        self.recording.values.append(out)
        self.recording.base.append(index if base is None else self.recording.base[base])
        return RecTensor(self, index, out)

    def input(self, name: str, out: Out) -> RecTensor:
        tensor = self.new(out)
        self.recording.inputs[name] = tensor.index
        return tensor

    def view(self, source: RecTensor, kind: str, spec: tuple[Any, ...], out: Out) -> RecTensor:
        tensor = self.new(out, source.index)
        self.recording.steps.append(View(kind, source.index, spec, tensor.index))
        return tensor

    def call(self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        outs = []
        for operand in (*args, *kwargs.values()):
            self.check_own(operand)
        for at, out in enumerate(OPS[op].outputs(*args, **kwargs)):
            shared = args[OPS[op].aliases[at]] if at in OPS[op].aliases else None
            outs.append(self.new(out, shared.index if isinstance(shared, RecTensor) else None))
        self.recording.steps.append(
            Call(op, tuple(map(_symbolic, args)), {k: _symbolic(v) for k, v in kwargs.items()},
                 tuple(t.index for t in outs))
        )  # fmt: skip
        return None if not outs else outs[0] if len(outs) == 1 else tuple(outs)

    def check_own(self, x: Any) -> None:
        """A tensor kept from another recording would name some other value of this one."""
        if isinstance(x, RecTensor) and x._recorder is not self:
            raise ValueError("a step function used a tensor of an earlier step; only weights and caches outlive one")
        if isinstance(x, SampleParams):
            for part in x:
                self.check_own(part)

    def table(self, fused: Callable[[str, Any], bool]) -> OpTable:
        functions: dict[str, Callable[..., Any]] = {}
        ref: list[OpTable] = []
        composed = default_composites(lambda: ref[0])

        def recorder_of(name: str) -> Callable[..., Any]:
            decl = OPS[name]

            def op(*args: Any, **kwargs: Any) -> Any:
                if not decl.step:
                    raise ValueError(f"{name} cannot be called inside a step program")
                if decl.composite and not fused(name, args[decl.carrier]):
                    return composed[name](*args, **kwargs)
                return self.call(name, args, kwargs)

            return op

        for name in OPS:
            functions[name] = recorder_of(name)
        table = OpTable(functions)
        ref.append(table)
        return table

    def finish(self, outputs: Mapping[str, Any]) -> Recording:
        rec = self.recording
        for tensor in outputs.values():
            self.check_own(tensor)
        rec.outputs = {name: tensor.index for name, tensor in outputs.items()}
        rec.last_use = [-1] * len(rec.values)
        for at, step in enumerate(rec.steps):
            used = [step.source] if isinstance(step, View) else [i for a in step.args for i in refs(a)]
            if isinstance(step, Call):
                used += [i for a in step.kwargs.values() for i in refs(a)]
                used += step.outputs
            for index in used:
                rec.last_use[rec.base[index]] = max(rec.last_use[rec.base[index]], at)
        for index in (*rec.outputs.values(), *rec.inputs.values()):
            rec.last_use[rec.base[index]] = len(rec.steps)
        for index, base in enumerate(rec.base):
            rec.last_use[index] = rec.last_use[base]
        return rec


@dataclass(frozen=True, slots=True)
class MetaRef:
    """AttnMeta of a recording: value numbers of its tensors; the host lists come with each replay."""

    tensors: Mapping[str, int]


_META = ("q_start", "seq_lens", "block_table", "slots", "counts", "tree", "is_tree")


def _symbolic(x: Any) -> Any:
    if isinstance(x, RecTensor):
        return Ref(x.index)
    if isinstance(x, SampleParams):
        return SampleParams(*map(_symbolic, x))
    if isinstance(x, AttnMeta):
        return MetaRef({n: t.index for n in _META if isinstance(t := getattr(x, n), RecTensor)})
    return x


def refs(x: Any) -> list[int]:
    """Value numbers that an operand of a recorded call refers to."""
    if isinstance(x, Ref):
        return [x.index]
    if isinstance(x, SampleParams):
        return [i for part in x for i in refs(part)]
    if isinstance(x, MetaRef):
        return list(x.tensors.values())
    return []


def _materialise(x: Any, live: Mapping[int, Any], lists: Mapping[str, Sequence[int]]) -> Any:
    if isinstance(x, Ref):
        return live[x.index]
    if isinstance(x, SampleParams):
        return SampleParams(*(_materialise(part, live, lists) for part in x))
    if isinstance(x, MetaRef):
        tensors = {name: live[index] for name, index in x.tensors.items()}
        return AttnMeta(**tensors, q_lens=lists["q_lens"], kv_lens=lists["kv_lens"])
    return x


__all__ = ["Call", "MetaRef", "RecTensor", "Recording", "Ref", "View", "record", "refs"]
