"""Generated cases for every op: operands on the host with their roles, from a seed.

A case says nothing about a device. The runner (``device.conformance``) gives its operands to a device and, as float64
arrays, to the reference, calls both through the op's probe and compares what comes out. Values are made so that
no decision hangs on the last bit: inputs that are quantised keep clear of rounding ties, uniforms of the edges of the
cumulative distribution. So integers and quantised values must agree exactly.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from device.contract import Device, KVSpec
from device.dtypes import decode, encode
from device.ops import OPS
from device.weights import Activation, CanonicalWeight

Rng = np.random.Generator
Values = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Profile:
    """What cases are made for: the parts of a device's capabilities that they depend on."""

    dtype: str
    kv_dtypes: tuple[str, ...]
    block_sizes: tuple[int, ...]
    reserved: int = 1
    tree: bool = True
    max_seqs: int = 8
    input_of: Callable[[CanonicalWeight], Activation] = attrgetter("activation")
    """``Device.input_of``."""

    @classmethod
    def of(cls, device: Device) -> Profile:
        """The profile of a device: its first two block sizes, and an odd one where it takes any."""
        caps = device.caps
        sizes = caps.block_sizes[:2] + ((5,) if caps.any_block_size else ())
        most = 8 if caps.max_seqs is None else min(8, caps.max_seqs)
        limits = caps.reserved_blocks, caps.tree_attention, most
        return cls(device.dtype, caps.kv_dtypes, sizes, *limits, input_of=device.input_of)


@dataclass(frozen=True, slots=True, eq=False)
class Operand:
    """A tensor of a case.

    values: float64 or int32. role: ``act`` has the device's compute dtype; ``real`` (norm weights, biases, cos_sin,
    logits) is float32, and float64 on a float64 device; ``f32`` and ``i32`` (what the host writes into a step's buffer)
    are that everywhere; ``host`` stays an int32 host array (operands of the ops outside a step).
    count: the count that the first dimension follows, None for a constant of the model. extra, pad: as in
    ``device.contract.InputSpec``. grows: lies in the growing buffer.
    """

    values: Values
    role: Literal["act", "real", "f32", "i32", "host"]
    count: str | None = None
    extra: int = 0
    pad: int | float | Literal["last"] = 0
    grows: bool = False


def act(values: Values, count: str = "T") -> Operand:
    """An activation."""
    return Operand(np.asarray(values, np.float64), "act", count)


def real(values: Any, count: str | None = None) -> Operand:
    """A norm weight, bias, table or logits: the values are rounded to float32 here."""
    return Operand(np.asarray(values, np.float32).astype(np.float64), "real", count)


def host(values: Any) -> Operand:
    """Integers that stay on the host."""
    return Operand(np.asarray(values, np.int32), "host")


def f32(values: Any, count: str, pad: float = 0.0, grows: bool = False) -> Operand:
    """Float32 that the host writes for each step: the values are rounded to float32 here."""
    return Operand(np.asarray(values, np.float32).astype(np.float64), "f32", count, 0, pad, grows)


def i32(values: Any, count: str, pad: int | Literal["last"] = 0, extra: int = 0, grows: bool = False) -> Operand:
    """Integers."""
    return Operand(np.asarray(values, np.int32), "i32", count, extra, pad, grows)


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """An operand that ``pack_weight(parts, uses)`` makes."""

    parts: tuple[CanonicalWeight, ...]
    uses: frozenset[str] = frozenset({"linear"})


@dataclass(frozen=True, slots=True, eq=False)
class Cache:
    """An operand made by ``alloc_kv`` and filled by ``store_kv``: layer ``layer`` of it, or all of it (None).

    fill: k, v [slots, heads, D] of every layer, for all slots but those of the reserved blocks.
    host: a cache in host memory (``host_kv``), filled through ``swap_kv``'s own doing only.
    """

    spec: KVSpec
    blocks: int
    block_size: int
    first_slot: int
    fill: tuple[tuple[Values, Values], ...]
    layer: int | None = 0
    host: bool = False

    @property
    def slots(self) -> Values:
        """The numbers of all filled slots."""
        return np.arange(self.first_slot, self.blocks * self.block_size, dtype=np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class Meta:
    """The attention metadata of a step (``device.contract.AttnMeta``), all int32."""

    q_start: Values
    seq_lens: Values
    block_table: Values
    slots: Values
    tree: Values | None = None
    is_tree: Values | None = None

    def operands(self) -> dict[str, Operand]:
        """As inputs of a step."""
        parts = {
            "q_start": i32(self.q_start, "B", "last", extra=1),
            "seq_lens": i32(self.seq_lens, "B"),
            "block_table": i32(self.block_table, "B"),
            "slots": i32(self.slots, "T", -1),
        }
        if self.tree is not None and self.is_tree is not None:
            parts |= {"tree": i32(self.tree, "T"), "is_tree": i32(self.is_tree, "B")}
        return parts


@dataclass(frozen=True, slots=True, eq=False)
class Params:
    """``device.ops.SampleParams`` of R rows."""

    temperature: Operand
    top_k: Operand
    top_p: Operand
    min_p: Operand

    def operands(self) -> dict[str, Operand]:
        """As inputs of a step."""
        return {name: getattr(self, name) for name in ("temperature", "top_k", "top_p", "min_p")}


Arg = Any  # Operand, Weights, Cache, Meta, Params, or a plain Python value


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """One call of one op.

    args: operands by the names of the op's signature, in its order. extra: further operands that the probe needs.
    strided: activations and logits are handed over as views of columns (or heads) of wider tensors.
    rows: the count along which the op works row by row, so that rows can be left out (None: it does not).
    bounds: further arguments for ``device.tolerance.tolerance``.
    """

    op: str
    name: str
    args: Mapping[str, Arg]
    extra: Mapping[str, Operand] = field(default_factory=dict)
    strided: bool = False
    rows: str | None = "T"
    bounds: Mapping[str, Any] = field(default_factory=dict)

    def operands(self) -> dict[str, Operand]:
        """Every tensor of the case by a unique name."""
        found: dict[str, Operand] = {}
        for name, arg in (*self.args.items(), *self.extra.items()):
            if isinstance(arg, Operand):
                found[name] = arg
            elif isinstance(arg, Meta | Params):
                found |= arg.operands()
        return found

    def counts(self) -> dict[str, int]:
        """The actual counts."""
        return {o.count: o.values.shape[0] - o.extra for o in self.operands().values() if o.count}


# ---------------------------------------------------------------- leaving rows out


def cut(case: Case, keep: Sequence[int]) -> Case:
    """The same call with only some of the rows (or, for ops over sequences, some of the sequences)."""
    if "meta" in case.args:
        return _cut_meta(case, keep)
    if "row_start" in case.args:
        return _cut_verify(case, keep)
    if case.rows is None:
        raise ValueError(f"{case.op} has no rows to leave out")
    return _with(case, case.rows, np.asarray(keep, np.int64))


def _with(case: Case, count: str, keep: Values) -> Case:
    """Operands that follow ``count`` reduced to the rows ``keep``."""

    def pick(arg: Arg) -> Arg:
        if isinstance(arg, Operand) and arg.count == count:
            return replace(arg, values=arg.values[keep])
        if isinstance(arg, Params):
            return Params(*(pick(o) for o in arg.operands().values()))
        return arg

    return replace(
        case,
        name=f"{case.name} cut",
        args={k: pick(v) for k, v in case.args.items()},
        extra={k: pick(v) for k, v in case.extra.items()},
    )


def _spans(start: Values, keep: Sequence[int]) -> tuple[Values, Values]:
    """(rows of the kept sequences, their new start [n+1])."""
    rows = [np.arange(start[b], start[b + 1]) for b in keep]
    lengths = [len(r) for r in rows]
    return np.concatenate([*rows, np.zeros(0, np.int64)]).astype(np.int64), np.cumsum([0, *lengths]).astype(np.int32)


def _cut_meta(case: Case, keep: Sequence[int]) -> Case:
    meta: Meta = case.args["meta"]
    rows, start = _spans(meta.q_start, keep)
    index = np.asarray(keep, np.int64)
    smaller = Meta(
        start,
        meta.seq_lens[index],
        meta.block_table[index],
        meta.slots[rows],
        None if meta.tree is None else meta.tree[rows],
        None if meta.is_tree is None else meta.is_tree[index],
    )
    reduced = _with(case, "T", rows)
    return replace(reduced, args={**reduced.args, "meta": smaller})


def _cut_verify(case: Case, keep: Sequence[int]) -> Case:
    start: Operand = case.args["row_start"]
    rows, new = _spans(start.values, keep)
    reduced = _with(case, "R", rows)
    return replace(reduced, args={**reduced.args, "row_start": replace(start, values=new)})


def lone_row(case: Case, row: int) -> Case | None:
    """An attention case of one causal row on its own, as a decode step would run it; None where there is none."""
    meta: Meta = case.args["meta"]
    b = int(np.searchsorted(meta.q_start, row, side="right")) - 1
    if b >= meta.seq_lens.size or (meta.is_tree is not None and meta.is_tree[b]):
        return None
    length = int(meta.seq_lens[b]) - (int(meta.q_start[b + 1]) - 1 - row)
    alone = Meta(np.array([0, 1], np.int32), np.array([length], np.int32), meta.block_table[b : b + 1],
                 meta.slots[row : row + 1])  # fmt: skip
    reduced = _with(case, "T", np.array([row]))
    return replace(reduced, args={**reduced.args, "meta": alone})


# ---------------------------------------------------------------- probes


def probe(case: Case, ops: Any, a: Mapping[str, Any]) -> dict[str, Any]:
    """Call the op of ``case`` through the table ``ops`` with real operands ``a``; the tensors to compare, by name."""
    special = _PROBES.get(case.op)
    if special is not None:
        return special(ops, a)
    result = getattr(ops, case.op)(*(a[name] for name in case.args))
    parts = result if isinstance(result, tuple) else (result,)
    return {f"out{i}": part for i, part in enumerate(parts)}


def _store(ops: Any, a: Mapping[str, Any]) -> dict[str, Any]:
    ops.store_kv(a["k"], a["v"], a["layer"], a["slots"])
    k, v = ops.read_kv(a["layer"], a["all_slots"])
    return {"k": k, "v": v}


def _qkv_rope_store(ops: Any, a: Mapping[str, Any]) -> dict[str, Any]:
    names = ("qkv", "heads", "q_norm", "k_norm", "eps", "positions", "cos_sin", "layer", "slots")
    q = ops.qkv_rope_store(*(a[name] for name in names))
    k, v = ops.read_kv(a["layer"], a["all_slots"])
    return {"q": q, "k": k, "v": v}


def _move(ops: Any, a: Mapping[str, Any]) -> dict[str, Any]:
    ops.move_kv(a["kv"], a["src"], a["dst"])
    return _read_all(ops, a["kv"], a["all_slots"])


def _swap(ops: Any, a: Mapping[str, Any]) -> dict[str, Any]:
    """Out, then overwrite by moving, then back in to other blocks."""
    ops.swap_kv(a["kv"], a["host"], a["out_pairs"], "out")
    ops.move_kv(a["kv"], a["src"], a["dst"])
    ops.swap_kv(a["kv"], a["host"], a["in_pairs"], "in")
    return _read_all(ops, a["kv"], a["all_slots"])


def _read_all(ops: Any, kv: Any, slots: Any) -> dict[str, Any]:
    out = {}
    for i in range(len(kv.spec.layers)):
        out[f"k{i}"], out[f"v{i}"] = ops.read_kv(kv.layer(i), slots)
    return out


def _columns(a: Mapping[str, Any], z: Any) -> Any:
    cut = a["columns"]
    return z if cut is None else z[:, cut[0] : cut[1]]


def _edit(ops: Any, a: Mapping[str, Any]) -> dict[str, Any]:
    """On a copy of the logits that the step owns; the whole of it is compared, also columns beside the view."""
    z = ops.gather_rows(a["logits"], a["all_rows"])
    ops.edit_logits(_columns(a, z), a["row"], a["id"], a["factor"], a["bias"])
    return {"logits": z}


def _mask(ops: Any, a: Mapping[str, Any]) -> dict[str, Any]:
    z = ops.gather_rows(a["logits"], a["all_rows"])
    ops.mask_logits(_columns(a, z), a["bitmask"])
    return {"logits": z}


def _pack(ops: Any, a: Mapping[str, Any]) -> dict[str, Any]:
    """A packed weight cannot be looked into: read it back through both of its uses."""
    return {"rows": ops.embed(a["ids"], a["weights"]), "product": ops.linear(a["x"], a["weights"])}


_PROBES: dict[str, Callable[[Any, Mapping[str, Any]], dict[str, Any]]] = {
    "store_kv": _store,
    "qkv_rope_store": _qkv_rope_store,
    "move_kv": _move,
    "swap_kv": _swap,
    "edit_logits": _edit,
    "mask_logits": _mask,
    "pack_weight": _pack,
}


# ---------------------------------------------------------------- making values


def rounded(values: Values, dtype: str) -> Values:
    """float64 values as ``dtype`` would hold them."""
    return decode(encode(values, dtype), dtype, np.float64)


def clear_of_ties(values: Values, dtype: str, step: float) -> Values:
    """Values, rounded to ``dtype``, without those within 1 % of half way between two multiples of ``step``: 0 there."""
    x = rounded(values, dtype)
    at = x / step
    return np.where(np.abs(np.abs(at - np.trunc(at)) - 0.5) < 0.01, 0.0, x)


def clear_rows(values: Values, dtype: str, group: int = 0, perm: NDArray[np.int32] | None = None) -> Values:
    """``clear_of_ties`` for a symmetric int8 quantisation along the last dimension, where max|x| is 127 steps; by
    groups of columns in the order of ``perm`` where ``group`` is given."""
    x = rounded(values, dtype)
    order = np.arange(x.shape[-1]) if perm is None else perm
    size = group or x.shape[-1]
    for start in range(0, x.shape[-1], size):
        part = order[start : start + size]
        step = np.abs(x[..., part]).max(axis=-1, keepdims=True) / 127
        at = x[..., part] / np.where(step == 0, 1, step)
        x[..., part] = np.where(np.abs(np.abs(at - np.trunc(at)) - 0.5) < 0.01, 0.0, x[..., part])
    return x


# ---------------------------------------------------------------- all generators

Generator = Callable[[Rng, Profile], Iterable[Case]]


def generators() -> dict[str, Generator]:
    """A generator for every op of the contract."""
    from device import cases_dense, cases_kv, cases_sampling

    table: dict[str, Generator] = {**cases_dense.GENERATORS, **cases_kv.GENERATORS, **cases_sampling.GENERATORS}
    missing = set(OPS) - set(table)
    if missing:
        raise KeyError(f"no cases for {', '.join(sorted(missing))}")
    return table


def generate(op: str, profile: Profile, seed: int = 0, count: int | None = None) -> list[Case]:
    """Cases of one op. One pass has each of its variants once, in random sizes; count: that many, in as many passes."""
    make = generators()[op]
    cases: list[Case] = []
    turn = 0
    while not cases or (count is not None and len(cases) < count):
        cases += make(np.random.default_rng([seed, turn, zlib.crc32(op.encode())]), profile)
        turn += 1
    return cases if count is None else cases[:count]
