"""Binding the op table: for every op the first implementation that has it, printed, never chosen again in a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from device.composite import default_composites
from device.contract import StartReport
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


def _always(op: str, *args: Any) -> bool:
    return True


@dataclass(frozen=True)
class Implementation:
    """One package's functions by op name. ``portable``: it stands in for ops that the device's own package lacks.

    supports(op, *args): whether it takes these arguments; asked when a weight is packed, a cache allocated or a model
        bound, never in a step.
    batch_invariant: ops whose result for a row has the same bits whatever rows stand beside it.
    """

    label: str
    functions: Mapping[str, OpFn]
    portable: bool = False
    supports: Callable[..., bool] = _always
    batch_invariant: frozenset[str] = frozenset()


@dataclass
class Bound:
    """The table and the start-up report.

    families: the implementations of each family that a weight or a cache may be given to, the preferred first.
    """

    table: OpTable
    report: StartReport
    families: dict[str, list[Implementation]] = field(default_factory=dict)
    batch_invariant: frozenset[str] = frozenset()


def bind(implementations: Sequence[Implementation], *, fusion: bool = True, strict: bool = False) -> Bound:
    """Choose the first implementation of every plain op; composites that nobody fuses are composed of plain ops.

    A family whole is offered by every implementation that has all its ops; the carrier says which one made it.
    strict: a portable version in place of the device's own is a DeviceError. An op with no version always is.
    """
    families = {
        family: [impl for impl in implementations if _has_family(impl, family)] for family in ("weight", "cache")
    }
    table_ref: list[OpTable] = []
    composed = default_composites(lambda: table_ref[0])
    functions: dict[str, OpFn] = {}
    rows: list[tuple[str, str, str]] = []
    invariant: set[str] = set()
    fallbacks = []
    notices: list[str] = []
    for name, decl in OPS.items():
        makers = [impl for impl in implementations if name in impl.functions]
        if decl.family:
            makers = [impl for impl in makers if impl in families[decl.family]]
        if decl.composite:
            default = composed[name]
            fused = makers if fusion else []
            functions[name] = _dispatch(decl.carrier, name, fused, default) if fused else default
            label = " | ".join(impl.label for impl in fused) if fused else "composed of plain ops"
            rows.append((name, label, "fused" if fused else ""))
            continue
        if not makers:
            continue
        first = makers[0]
        if name == "pack_weight":
            functions[name] = _packer(makers, strict, notices)
        elif decl.family and len(makers) > 1:
            functions[name] = _dispatch(decl.carrier, name, makers, None)
        else:
            functions[name] = first.functions[name]
        rows.append((name, " | ".join(i.label for i in makers) if decl.family else first.label,
                     "portable" if first.portable else ""))  # fmt: skip
        if first.portable:
            fallbacks.append(name)
        if all(name in impl.batch_invariant for impl in (makers if decl.family else makers[:1])):
            invariant.add(name)
    if strict and fallbacks:
        raise DeviceError(
            f"--strict: these ops would run on the portable version: {', '.join(fallbacks)}; "
            "install the device's kernel package, or leave out --strict"
        )
    table = OpTable(functions)
    table_ref.append(table)
    return Bound(table, StartReport(rows, notices), families, frozenset(invariant))


def _has_family(impl: Implementation, family: str) -> bool:
    return all(name in impl.functions for name, decl in OPS.items() if decl.family == family and not decl.composite)


def _dispatch(carrier: int, name: str, makers: Sequence[Implementation], default: OpFn | None) -> OpFn:
    """The op as a call to the implementation that its carrier names, or the default where that one does not fuse it."""
    fused = {id(impl): impl.functions[name] for impl in makers}

    def call(*args: Any, **kwargs: Any) -> Any:
        fn = fused.get(id(args[carrier].impl), default)
        if fn is None:
            raise DeviceError(f"{name}: its operand was made by {args[carrier].impl.label}, which has no such op")
        return fn(*args, **kwargs)

    return call


def _packer(makers: Sequence[Implementation], strict: bool, notices: list[str]) -> OpFn:
    def pack_weight(weights: Any, uses: Any) -> Any:
        kinds = " + ".join(f"{w.dtype} group {w.group}" if w.group else w.dtype for w in weights)
        for impl in makers:
            if not impl.supports("pack_weight", weights, uses):
                continue
            if impl.portable and impl is not makers[0]:
                text = f"{makers[0].label} does not take a weight of {kinds}; {impl.label} stands in for it"
                if strict:
                    raise DeviceError(f"--strict: {text}")
                if text not in notices:
                    notices.append(text)
            return impl.functions["pack_weight"](weights, uses)
        raise DeviceError(f"no implementation packs a weight of {kinds}")

    return pack_weight
