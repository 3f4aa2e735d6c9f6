"""Binding the op table: for every op the first implementation that has it, printed, never chosen again in a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from device.composite import default_composites
from device.errors import DeviceError
from device.ops import OPS

OpFn = Callable[..., Any]


class OpTable:
    """The bound ops as attributes (``table.linear(x, w, bias)``). Signatures stand in ``device.ops``.

    Ops of a family dispatch through their operand: a packed weight and a cache layer carry ``family``, the functions
    of the implementation that made them.
    """

    embed: OpFn
    rms_norm: OpFn
    add_rms_norm: OpFn
    add: OpFn
    pack_weight: OpFn
    linear: OpFn
    split_qkv: OpFn
    rope: OpFn
    gated_act: OpFn
    store_kv: OpFn
    read_kv: OpFn
    paged_attention: OpFn
    move_kv: OpFn
    swap_kv: OpFn
    gather_rows: OpFn
    edit_logits: OpFn
    mask_logits: OpFn
    sample: OpFn
    logprobs: OpFn
    verify: OpFn
    all_reduce: OpFn
    all_gather: OpFn
    norm_linear: OpFn
    act_linear: OpFn
    qkv_rope_store: OpFn

    def __init__(self, functions: Mapping[str, OpFn]) -> None:
        missing = [name for name in OPS if name not in functions]
        if missing:
            raise DeviceError(f"no implementation for {', '.join(missing)}: this build of the device is incomplete")
        for name in OPS:
            setattr(self, name, functions[name])


@dataclass(frozen=True)
class Implementation:
    """One package's functions by op name. ``portable``: it stands in for ops that the device's own package lacks.

    batch_invariant: ops whose result for a row has the same bits whatever rows stand beside it.
    """

    label: str
    functions: Mapping[str, OpFn]
    portable: bool = False
    batch_invariant: frozenset[str] = frozenset()


@dataclass
class Bound:
    """The table, and a row (op, implementation, note) for each op, for the start-up report."""

    table: OpTable
    rows: list[tuple[str, str, str]] = field(default_factory=list)
    batch_invariant: frozenset[str] = frozenset()


def bind(implementations: Sequence[Implementation], *, fusion: bool = True, strict: bool = False) -> Bound:
    """Choose the first implementation of every plain op; composites that nobody fuses are composed of plain ops.

    strict: a portable version in place of the device's own is a DeviceError. An op with no version always is.
    """
    functions: dict[str, OpFn] = {}
    rows: list[tuple[str, str, str]] = []
    invariant: set[str] = set()
    fallbacks = []
    for name, decl in OPS.items():
        if decl.composite:
            continue
        for impl in implementations:
            if name in impl.functions:
                functions[name] = impl.functions[name]
                rows.append((name, impl.label, "portable" if impl.portable else ""))
                if impl.portable:
                    fallbacks.append(name)
                if name in impl.batch_invariant:
                    invariant.add(name)
                break
    if strict and fallbacks:
        raise DeviceError(
            f"--strict: these ops would run on the portable version: {', '.join(fallbacks)}; "
            "install the device's kernel package, or leave out --strict"
        )
    table_ref: list[OpTable] = []
    composed = default_composites(lambda: table_ref[0])
    for name, default in composed.items():
        fused = next((i for i in implementations if name in i.functions), None) if fusion else None
        functions[name] = fused.functions[name] if fused else default
        rows.append((name, fused.label if fused else "composed of plain ops", "fused" if fused else ""))
    table = OpTable(functions)
    table_ref.append(table)
    return Bound(table, rows, frozenset(invariant))
