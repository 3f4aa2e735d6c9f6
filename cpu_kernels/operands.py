"""Operands of native calls: where a tensor lies, and how an op's arguments become a ``JkCall``.

Nothing here knows of devices: weights and cache layers are recognised by their classes, tensors come as ``Operand``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from cpu_kernels.cache import NativeKVLayer
from cpu_kernels.linear import PackedWeight
from cpu_kernels.native import OPS, Call

SIZES = {"float32": 4, "int32": 4, "bfloat16": 2, "float16": 2}
ADDRESS, ARENA, STEP, GROWING = 0, 1, 2, 3
"""Spaces: an address, the arena, the step buffer; from GROWING on the growing inputs of a step."""

_KINDS = {"silu": 0, "gelu_tanh": 1, "gelu": 2}


class NotNative(Exception):
    """These operands have no native version; the message says which."""


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor [rows, *tail] with contiguous rows.

    at: address, or offset in bytes in its space. stride: elements from row to row. count: index of the count that its
    rows follow (rows = count + extra), -1 for a fixed number.
    """

    dtype: str
    shape: tuple[int, ...]
    stride: int
    space: int
    at: int
    count: int = -1
    extra: int = 0

    @property
    def cols(self) -> int:
        return prod(self.shape[1:])

    def reshaped(self, tail: Sequence[int]) -> Operand:
        """[rows, *tail] of the same memory."""
        return replace(self, shape=(self.shape[0], *tail))

    def sliced(self, cuts: Sequence[slice]) -> Operand:
        """Slices of the dimensions after the first; NotNative where rows would no longer be contiguous."""
        spans = [cut.indices(n)[:2] for cut, n in zip(cuts, self.shape[1:], strict=False)]
        tail = [max(b - a, 0) for a, b in spans]
        if any(n != full for n, full in zip(tail[1:], self.shape[2:], strict=False)):
            raise NotNative("a slice of an inner dimension")
        inner = prod(self.shape[2:])
        start = spans[0][0] * inner if spans else 0
        shape = (self.shape[0], *tail, *self.shape[1 + len(tail) :])
        return replace(self, shape=shape, at=self.at + start * SIZES[self.dtype])


def call(op: str, outs: Sequence[Operand], args: Sequence[Any], kwargs: dict[str, Any]) -> Call:
    """The native call of an op on operands; NotNative where there is none."""
    make = _MAKERS.get(op)
    if make is None:
        raise NotNative(f"{op} has no native kernel")
    made: Call = make(outs, *args, **kwargs)
    return made


# ---------------------------------------------------------------- making calls


def _call(
    op: str, operands: Sequence[Operand | None], num: Sequence[int] = (), real: float = 0.0, ptr: Any = None
) -> Call:
    made = Call()
    made.op = OPS.index(op)
    for slot in made.arg:
        slot.space = -1
        slot.count = -1
    for slot, x in zip(made.arg, operands, strict=False):
        if x is None:
            continue
        slot.at, slot.stride, slot.space = x.at, x.stride, x.space
        slot.count, slot.extra, slot.rows = x.count, x.extra, x.shape[0]
        slot.cols, slot.size = x.cols, SIZES[x.dtype]
    for i, n in enumerate(num):
        made.num[i] = n
    made.real[0] = real
    made.ptr[0] = ptr
    return made


def _need(dtype: str, **operands: Any) -> None:
    for name, x in operands.items():
        if not isinstance(x, Operand) or x.dtype != dtype:
            raise NotNative(f"{name} of {getattr(x, 'dtype', type(x).__name__)}; {dtype} is native")


def _flat(x: Operand) -> Operand:
    """A vector whose elements are neighbours."""
    if len(x.shape) != 1 or x.stride != 1:
        raise NotNative("a vector with gaps")
    return x


def _maker(x: Any) -> str:
    impl = getattr(x, "impl", None)
    return str(impl.label) if impl is not None else type(x).__name__


def _weight(w: Any) -> int:
    if not isinstance(w, PackedWeight):
        raise NotNative(f"a weight of {_maker(w)}")
    assert w.handle is not None
    return w.handle


def _layer(layer: Any) -> int:
    if not isinstance(layer, NativeKVLayer):
        raise NotNative(
            f"a cache layer of {layer.impl.label if getattr(layer, 'impl', None) else type(layer).__name__}"
        )
    return layer.address


def _embed(outs: Sequence[Operand], ids: Operand, table: Any, scale: float = 1.0) -> Call:
    _need("int32", ids=ids)
    return _call("embed", (_flat(ids), outs[0]), real=scale, ptr=_weight(table))


def _rms_norm(outs: Sequence[Operand], x: Operand, w: Operand, eps: float) -> Call:
    _need("float32", x=x, w=w)
    return _call("rms_norm", (x, _flat(w), outs[0]), (x.cols // w.shape[0] or 1,), eps)


def _add_rms_norm(outs: Sequence[Operand], x: Operand, residual: Operand, w: Operand, eps: float) -> Call:
    _need("float32", x=x, residual=residual, w=w)
    return _call("add_rms_norm", (x, residual, _flat(w), *outs), real=eps)


def _add(outs: Sequence[Operand], x: Operand, y: Operand) -> Call:
    _need("float32", x=x, y=y)
    return _call("add", (x, y, outs[0]))


def _linear(outs: Sequence[Operand], x: Operand, w: Any, bias: Operand | None = None, out: str | None = None) -> Call:
    _need("float32", x=x, **({"bias": bias} if bias is not None else {}))
    return _call("linear", (x, bias, outs[0]), ptr=_weight(w))


def _norm_linear(outs: Sequence[Operand], x: Operand, residual: Operand | None, w_norm: Operand, eps: float, w: Any,
                 bias: Operand | None = None) -> Call:  # fmt: skip
    _need("float32", x=x, w_norm=w_norm)
    total = None if residual is None else outs[1]
    return _call("norm_linear", (x, residual, _flat(w_norm), bias, outs[0], total), real=eps, ptr=_weight(w))


def _act_linear(outs: Sequence[Operand], gate_up: Operand, kind: str, w: Any, bias: Operand | None = None) -> Call:
    _need("float32", gate_up=gate_up)
    return _call("act_linear", (gate_up, bias, outs[0]), (_kind(kind),), ptr=_weight(w))


def _kind(kind: str) -> int:
    if kind not in _KINDS:
        raise ValueError(f"activation {kind!r}; expected silu, gelu_tanh or gelu")
    return _KINDS[kind]


def _gated_act(outs: Sequence[Operand], gate_up: Operand, kind: str) -> Call:
    _need("float32", gate_up=gate_up)
    return _call("gated_act", (gate_up, outs[0]), (_kind(kind),))


def _rope(outs: Sequence[Operand], q: Operand, k: Operand, positions: Operand, cos_sin: Operand) -> Call:
    _need("float32", q=q, k=k, cos_sin=cos_sin)
    _need("int32", positions=positions)
    return _call("rope", (q, k, _flat(positions), cos_sin, *outs), (q.shape[2], cos_sin.shape[1]))


def _qkv_rope_store(
    outs: Sequence[Operand], qkv: Operand, heads: tuple[int, int, int], q_norm: Operand | None, k_norm: Operand | None,
    eps: float, positions: Operand, cos_sin: Operand, layer: Any, slots: Operand,
) -> Call:  # fmt: skip
    _need("float32", qkv=qkv, cos_sin=cos_sin)
    _need("int32", positions=positions, slots=slots)
    operands = (qkv, q_norm, k_norm, _flat(positions), cos_sin, _flat(slots), outs[0])
    return _call("qkv_rope_store", operands, (*heads, cos_sin.shape[1]), eps, _layer(layer))


def _store_kv(outs: Sequence[Operand], k: Operand, v: Operand, layer: Any, slots: Operand) -> Call:
    _need("float32", k=k, v=v)
    _need("int32", slots=slots)
    return _call("store_kv", (k, v, _flat(slots)), ptr=_layer(layer))


def _read_kv(outs: Sequence[Operand], layer: Any, slots: Operand) -> Call:
    _need("int32", slots=slots)
    return _call("read_kv", (_flat(slots), *outs), ptr=_layer(layer))


def _paged_attention(outs: Sequence[Operand], q: Operand, layer: Any, meta: Any, scale: float,
                     window: int | None = None) -> Call:  # fmt: skip
    _need("float32", q=q)
    _need("int32", q_start=meta.q_start, seq_lens=meta.seq_lens, block_table=meta.block_table)
    tree = meta.tree if meta.is_tree is not None else None
    operands = (q, _flat(meta.q_start), _flat(meta.seq_lens), meta.block_table, tree,
                meta.is_tree if tree is not None else None, outs[0])  # fmt: skip
    return _call("paged_attention", operands, (window or 0,), scale, _layer(layer))


def _gather_rows(outs: Sequence[Operand], x: Operand, rows: Operand) -> Call:
    _need("int32", rows=rows)
    return _call("gather_rows", (x, _flat(rows), outs[0]))


def _edit_logits(
    outs: Sequence[Operand], logits: Operand, row: Operand, id: Operand, factor: Operand, bias: Operand
) -> Call:
    _need("float32", logits=logits, factor=factor, bias=bias)
    _need("int32", row=row, id=id)
    return _call("edit_logits", (logits, _flat(row), _flat(id), _flat(factor), _flat(bias)))


def _mask_logits(outs: Sequence[Operand], logits: Operand, bitmask: Operand) -> Call:
    _need("float32", logits=logits)
    _need("int32", bitmask=bitmask)
    return _call("mask_logits", (logits, bitmask))


def _sample(outs: Sequence[Operand], logits: Operand, params: Any, uniforms: Operand) -> Call:
    _need("float32", logits=logits)
    if params is None:
        return _call("sample", (logits, _flat(outs[0])))
    _need("float32", temperature=params.temperature, top_p=params.top_p, min_p=params.min_p, uniforms=uniforms)
    _need("int32", top_k=params.top_k)
    return _call("sample", (logits, outs[0], *map(_flat, params), _flat(uniforms)))


def _logprobs(outs: Sequence[Operand], logits: Operand, ids: Operand, n: int) -> Call:
    _need("float32", logits=logits)
    _need("int32", ids=ids)
    if n > logits.shape[1]:
        raise ValueError(f"{n} best of {logits.shape[1]} logits; ask for at most {logits.shape[1]}")
    return _call("logprobs", (logits, _flat(ids), *outs), (n,))


def _verify(
    outs: Sequence[Operand], logits: Operand, draft_ids: Operand, draft_probs: Operand, row_start: Operand, params: Any,
    uniforms: Operand,
) -> Call:  # fmt: skip
    _need("float32", logits=logits, draft_probs=draft_probs, uniforms=uniforms)
    _need("int32", draft_ids=draft_ids, row_start=row_start)
    operands = (logits, _flat(draft_ids), draft_probs, _flat(row_start), uniforms, *map(_flat, outs))
    if params is not None:
        _need("float32", temperature=params.temperature, top_p=params.top_p, min_p=params.min_p)
        _need("int32", top_k=params.top_k)
        operands += tuple(map(_flat, params))
    return _call("verify", operands)


_MAKERS: dict[str, Callable[..., Call]] = {
    "embed": _embed,
    "rms_norm": _rms_norm,
    "add_rms_norm": _add_rms_norm,
    "add": _add,
    "linear": _linear,
    "norm_linear": _norm_linear,
    "act_linear": _act_linear,
    "gated_act": _gated_act,
    "rope": _rope,
    "qkv_rope_store": _qkv_rope_store,
    "store_kv": _store_kv,
    "read_kv": _read_kv,
    "paged_attention": _paged_attention,
    "gather_rows": _gather_rows,
    "edit_logits": _edit_logits,
    "mask_logits": _mask_logits,
    "sample": _sample,
    "logprobs": _logprobs,
    "verify": _verify,
}
