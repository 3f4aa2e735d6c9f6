"""The two sides of a conformance run: a case on the float64 reference, and on a device, called or in a program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device import reference
from device.binding import Implementation, OpTable, bind
from device.cases import Cache, Case, Meta, Operand, Params, Weights, probe, rounded
from device.contract import AttnMeta, Device, HostBuffer, Inputs, InputSpec, Layout, Tensor
from device.dtypes import decode, encode
from device.errors import ConfigError, DeviceError, UnsupportedModel
from device.ops import OPS, SampleParams

Host = dict[str, NDArray[Any]]

# Columns (or heads) of a wider tensor on either side of a strided operand.
_SIDES = {2: (16, 32), 3: (1, 2)}
_FILLER = 77.0
_FIRST_CAPACITY = 4


class Refused(Exception):
    """The device does not take a weight or a cache of this kind."""


def oracle_table() -> OpTable:
    """The reference in float64 as an op table, composites composed."""
    return bind([Implementation("reference", reference.reference_table("float64"))]).table


class Oracle:
    """Runs cases on the reference. Weights and caches live as long as it does, so that stores add up."""

    def __init__(self, device: Device) -> None:
        self._dtype = device.dtype
        self._input_of = device.input_of
        self._ops = oracle_table()
        self._made: dict[int, tuple[Any, Any]] = {}

    def run(self, case: Case) -> Host:
        """The expected outputs, float64 or int32."""
        args = {name: self._operand(arg) for name, arg in (*case.args.items(), *case.extra.items())}
        with np.errstate(invalid="ignore"):
            return {name: self._decoded(x) for name, x in probe(case, self._ops, args).items()}

    @staticmethod
    def _decoded(x: NDArray[Any]) -> NDArray[Any]:
        if x.dtype == np.uint16:
            return decode(x, "bfloat16", np.float64)
        return x.astype(np.float64) if x.dtype.kind == "f" else x

    def _operand(self, arg: Any) -> Any:
        if isinstance(arg, Operand):
            return rounded(arg.values, self._dtype) if arg.role == "act" else arg.values.copy()
        if isinstance(arg, Meta):
            return reference.RefMeta(arg.q_start, arg.seq_lens, arg.block_table, arg.tree, arg.is_tree)
        if isinstance(arg, Params):
            return SampleParams(*(self._operand(o) for o in arg.operands().values()))
        if not isinstance(arg, Weights | Cache):
            return arg
        if id(arg) not in self._made:
            self._made[id(arg)] = (arg, self._make(arg))
        made = self._made[id(arg)][1]
        return made.layer(arg.layer) if isinstance(arg, Cache) and arg.layer is not None else made

    def _make(self, arg: Weights | Cache) -> Any:
        if isinstance(arg, Weights):
            # what a device does to the input by its own choice is its definition, not an error of it
            parts = [replace(w, activation=self._input_of(w)) for w in arg.parts]
            return reference.pack_weight(parts, arg.uses, "float64")
        kv = reference.RefKV(arg.spec, arg.blocks, arg.block_size, "float64")
        for layer, (k, v) in zip(kv.layers, arg.fill, strict=False):
            reference.store_kv(rounded(k, self._dtype), rounded(v, self._dtype), layer, arg.slots)
        return kv


class DeviceSide:
    """Gives the operands of cases to a device. Weights and caches live as long as it does."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._made: dict[int, tuple[Any, Any]] = {}

    def dtype(self, operand: Operand) -> str:
        """The dtype that an operand has on this device."""
        if operand.role == "act":
            return self.device.dtype
        if operand.role == "real":
            return "float64" if self.device.dtype == "float64" else "float32"
        return {"f32": "float32", "i32": "int32", "host": "int32"}[operand.role]

    def host(self, operand: Operand) -> NDArray[Any]:
        """The host array of an operand."""
        return encode(operand.values, self.dtype(operand))

    def tensor(self, operand: Operand, strided: bool) -> Any:
        """An operand on the device; strided: as a view of a wider tensor."""
        if operand.role == "host":
            return self.host(operand)
        if strided and (wide := widened(operand)) is not None:
            return self.device.tensor(self.host(wide[0]), self.dtype(operand))[wide[1]]
        return self.device.tensor(self.host(operand), self.dtype(operand))

    def constant(self, arg: Any) -> Any:
        """What is no input of a step: weights, caches, operands without a count, plain values."""
        if isinstance(arg, Operand):
            return self.tensor(arg, False)
        if not isinstance(arg, Weights | Cache):
            return arg
        if id(arg) not in self._made:
            self._made[id(arg)] = (arg, self._make(arg))
        made = self._made[id(arg)][1]
        return made.layer(arg.layer) if isinstance(arg, Cache) and arg.layer is not None else made

    def call_args(self, case: Case) -> dict[str, Any]:
        """All operands for a call outside a program."""
        args: dict[str, Any] = {}
        for name, arg in (*case.args.items(), *case.extra.items()):
            if isinstance(arg, Operand):
                args[name] = self.tensor(arg, case.strided)
            elif isinstance(arg, Meta):
                parts = {key: self.tensor(o, False) for key, o in arg.operands().items()}
                counts = np.array([arg.slots.size, arg.seq_lens.size], np.int32)
                args[name] = AttnMeta(
                    **parts,
                    counts=self.device.tensor(counts, "int32"),
                    q_lens=np.diff(arg.q_start).tolist(),
                    kv_lens=arg.seq_lens.tolist(),
                )
            elif isinstance(arg, Params):
                args[name] = SampleParams(*(self.tensor(o, False) for o in arg.operands().values()))
            else:
                args[name] = self.constant(arg)
        return args

    def outputs(self, tensors: Mapping[str, Tensor]) -> Host:
        """Host copies of tensors, floats as float64."""
        return {name: decoded(self.device.numpy(t), t.dtype) for name, t in tensors.items()}

    def _make(self, arg: Weights | Cache) -> Any:
        device = self.device
        try:
            if isinstance(arg, Weights):
                return device.ops.pack_weight(arg.parts, arg.uses)
            if arg.host:
                return device.host_kv(arg.spec, arg.blocks, arg.block_size)
            kv = device.alloc_kv(arg.spec, arg.blocks, arg.block_size)
        except (ConfigError, DeviceError, UnsupportedModel) as error:
            raise Refused(str(error)) from error
        slots = device.tensor(arg.slots, "int32")
        for i, pair in enumerate(arg.fill):
            k, v = (device.tensor(encode(x, device.dtype), device.dtype) for x in pair)
            device.ops.store_kv(k, v, kv.layer(i), slots)
        return kv


def decoded(array: NDArray[Any], dtype: str | None = None) -> NDArray[Any]:
    """A device's host array with floats as float64 (uint16 is bfloat16: no op gives that integer)."""
    if array.dtype == np.uint16:
        return decode(array, "bfloat16", np.float64)
    return array.astype(np.float64) if array.dtype.kind == "f" else np.array(array)


def widened(operand: Operand) -> tuple[Operand, tuple[slice, ...]] | None:
    """A wider tensor around an activation or logits, and the slices that give them back; None for others."""
    dims = operand.values.ndim
    if operand.role not in ("act", "real") or operand.count is None or dims not in _SIDES:
        return None
    left, right = _SIDES[dims]
    pads = [(0, 0), (left, right), *[(0, 0)] * (dims - 2)]
    values = np.pad(operand.values, pads, constant_values=_FILLER)
    cuts = (slice(None), slice(left, left + operand.values.shape[1]))
    return Operand(values, operand.role, operand.count, operand.extra, operand.pad), cuts


# ---------------------------------------------------------------- a program of one op


class OneOp:
    """A program of one op, and the filling of its buffers from a case or from parts of it."""

    def __init__(self, side: DeviceSide, case: Case, slack: int) -> None:
        self._side, self._case = side, case
        self._inputs = {name: o for name, o in case.operands().items() if o.count is not None}
        self.layout = self._make_layout(slack)
        self._twice = not OPS[case.op].writes
        self._constants = {
            name: side.constant(arg)
            for name, arg in (*case.args.items(), *case.extra.items())
            if not isinstance(arg, Meta | Params) and name not in self._inputs
        }
        self.program = side.device.program(self._step, self.layout)

    def _wide(self, operand: Operand) -> tuple[Operand, tuple[slice, ...] | None]:
        found = widened(operand) if self._case.strided else None
        return found if found is not None else (operand, None)

    def _make_layout(self, slack: int) -> Layout:
        counts = self._case.counts()
        specs = []
        for name, operand in self._inputs.items():
            assert operand.count is not None
            bound = _FIRST_CAPACITY if operand.grows else max(1, counts[operand.count] + slack)
            tail = self._wide(operand)[0].values.shape[1:]
            specs.append(InputSpec(name, self._side.dtype(operand), operand.count, bound, tail, operand.extra,
                                   operand.pad, operand.grows))  # fmt: skip
        return Layout(tuple(counts), tuple(specs))

    def _step(self, inputs: Inputs, key: Any) -> dict[str, Tensor]:
        args: dict[str, Any] = {}
        for name, arg in (*self._case.args.items(), *self._case.extra.items()):
            if name in self._inputs:
                cuts = self._wide(self._inputs[name])[1]
                args[name] = inputs[name] if cuts is None else inputs[name][cuts]
            elif isinstance(arg, Meta):
                args[name] = inputs.meta
            elif isinstance(arg, Params):
                args[name] = SampleParams(*(inputs[part] for part in arg.operands()))
            else:
                args[name] = self._constants[name]
        out = probe(self._case, inputs.ops, args)
        if self._twice:
            out |= {f"again {name}": t for name, t in probe(self._case, inputs.ops, args).items()}
        return out

    def fill(self, buffer: HostBuffer, case: Case) -> tuple[int, ...]:
        """Write a case's operands into a buffer, stale values behind them; the key of the launch."""
        counts = case.counts()
        capacities = tuple(
            buffer.ensure(count, counts[count])
            for count in {o.count for o in self._inputs.values() if o.grows and o.count}
        )
        for name, operand in case.operands().items():
            if operand.count is None:
                continue
            array = buffer.array(name)
            live = operand.values.shape[0]
            array[:live] = self._side.host(self._wide(operand)[0])
            # What a former step left: real places and other values, so that who forgets to pad overwrites something.
            array[live:] = array[0 if operand.role == "i32" else live - 1] if live else 0
        for i, count in enumerate(self.layout.counts):
            buffer.counts[i] = counts[count]
        meta = next((arg for arg in case.args.values() if isinstance(arg, Meta)), None)
        if meta is not None:
            buffer.lists["q_lens"] = np.diff(meta.q_start).tolist()
            buffer.lists["kv_lens"] = meta.seq_lens.tolist()
        return capacities
