"""The declaration of every op: its operands, what comes out, what it writes, which family it belongs to.

T rows of tokens in a step, B sequences, R rows that need logits; H hidden size, V vocabulary, D head size. The
reference of an op is the function of the same name in ``device.reference``, its generated cases and tolerances stand
in ``device.cases``. ``outputs`` infers shapes from operands that may be real or recorded: anything with ``shape``,
``dtype`` and, in a recording, ``count`` (the name of the count that the first dimension follows).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from device.contract import Tensor


class SampleParams(NamedTuple):
    """Per row of logits, on the device. All [R]; top_k i32 (0: off), the others float32."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor


@dataclass(frozen=True, slots=True)
class Out:
    """One output of an op: shape, dtype, and the count that its first dimension follows (None outside recordings)."""

    shape: tuple[int, ...]
    dtype: str
    count: str | None


@dataclass(frozen=True, slots=True)
class OpDecl:
    """One op. ``outputs`` has the op's own signature. ``writes`` names operands that it changes in place.

    family: ``weight`` and ``cache`` ops share an opaque layout and are bound together: the packed weight or the cache
    layer (operand number ``carrier``) carries the implementation that made it in its attribute ``impl``.
    A carrier is passed by position. composite: has a default composed of plain ops. step: may be called inside a step
    program (the others only outside). aliases: output number -> operand number whose memory it may share.

    Operands of the ops outside a step (slots, block pairs, canonical weights) are host arrays, consumed before the call
    returns; ``move_kv`` reads all sources before it writes.
    """

    name: str
    outputs: Callable[..., tuple[Out, ...]]
    summary: str
    writes: tuple[str, ...] = ()
    family: str | None = None
    carrier: int = 0
    composite: bool = False
    step: bool = True
    aliases: Mapping[int, int] = field(default_factory=dict)


def _count(x: Any) -> str | None:
    return getattr(x, "count", None)


def _like(x: Any) -> Out:
    return Out(tuple(x.shape), x.dtype, _count(x))


def _embed(ids: Any, table: Any, scale: float = 1.0) -> tuple[Out, ...]:
    return (Out((ids.shape[0], table.shape[1]), table.dtype, _count(ids)),)


def _rms_norm(x: Any, w: Any, eps: float) -> tuple[Out, ...]:
    return (_like(x),)


def _add_rms_norm(x: Any, residual: Any, w: Any, eps: float) -> tuple[Out, ...]:
    return _like(x), _like(x)


def _add(x: Any, y: Any) -> tuple[Out, ...]:
    return (_like(x),)


def _linear(x: Any, w: Any, bias: Any = None, out: str | None = None) -> tuple[Out, ...]:
    return (Out((x.shape[0], w.shape[0]), out or x.dtype, _count(x)),)


def _split_qkv(qkv: Any, heads: int, kv_heads: int, dim: int) -> tuple[Out, ...]:
    rows, count = qkv.shape[0], _count(qkv)
    return tuple(Out((rows, n, dim), qkv.dtype, count) for n in (heads, kv_heads, kv_heads))


def _rope(q: Any, k: Any, positions: Any, cos_sin: Any) -> tuple[Out, ...]:
    return _like(q), _like(k)


def _gated_act(gate_up: Any, kind: str) -> tuple[Out, ...]:
    return (Out((gate_up.shape[0], gate_up.shape[1] // 2), gate_up.dtype, _count(gate_up)),)


def _store_kv(k: Any, v: Any, layer: Any, slots: Any) -> tuple[Out, ...]:
    return ()


def _read_kv(layer: Any, slots: Any) -> tuple[Out, ...]:
    one = Out((slots.shape[0], layer.heads, layer.head_dim), layer.read_dtype, _count(slots))
    return one, one


def _paged_attention(q: Any, layer: Any, meta: Any, scale: float, window: int | None = None) -> tuple[Out, ...]:
    return (Out((q.shape[0], q.shape[1] * q.shape[2]), q.dtype, _count(q)),)


def _gather_rows(x: Any, rows: Any) -> tuple[Out, ...]:
    return (Out((rows.shape[0], *x.shape[1:]), x.dtype, _count(rows)),)


def _edit_logits(logits: Any, row: Any, id: Any, factor: Any, bias: Any) -> tuple[Out, ...]:
    return ()


def _mask_logits(logits: Any, bitmask: Any) -> tuple[Out, ...]:
    return ()


def _sample(logits: Any, params: SampleParams | None, uniforms: Any) -> tuple[Out, ...]:
    return (Out((logits.shape[0],), "int32", _count(logits)),)


def _logprobs(logits: Any, ids: Any, n: int) -> tuple[Out, ...]:
    rows, count = logits.shape[0], _count(logits)
    return (
        Out((rows,), logits.dtype, count),
        Out((rows,), "int32", count),
        Out((rows, n), "int32", count),
        Out((rows, n), logits.dtype, count),
    )


def _verify(
    logits: Any, draft_ids: Any, draft_probs: Any, row_start: Any, params: SampleParams | None, uniforms: Any
) -> tuple[Out, ...]:
    one = Out((row_start.shape[0] - 1,), "int32", _count(row_start))
    return one, one


def _identity(x: Any) -> tuple[Out, ...]:
    return (_like(x),)


def _nothing(*args: Any, **kwargs: Any) -> tuple[Out, ...]:
    return ()


def _norm_linear(x: Any, residual: Any, w_norm: Any, eps: float, w: Any, bias: Any = None) -> tuple[Out, ...]:
    return Out((x.shape[0], w.shape[0]), x.dtype, _count(x)), _like(x)


def _act_linear(gate_up: Any, kind: str, w: Any, bias: Any = None) -> tuple[Out, ...]:
    return (Out((gate_up.shape[0], w.shape[0]), gate_up.dtype, _count(gate_up)),)


def _qkv_rope_store(
    qkv: Any,
    heads: tuple[int, int, int],
    q_norm: Any,
    k_norm: Any,
    eps: float,
    positions: Any,
    cos_sin: Any,
    layer: Any,
    slots: Any,
) -> tuple[Out, ...]:
    return (Out((qkv.shape[0], heads[0], heads[2]), qkv.dtype, _count(qkv)),)


_DECLS = (
    OpDecl("embed", _embed, "[T] i32 ids, packed table [V,H] -> [T,H] · scale; an id outside the shard gives zeros",
           family="weight", carrier=1),
    OpDecl("rms_norm", _rms_norm, "x / sqrt(mean(x²) + eps) · w over the last dimension; [T,H] or [T,heads,D]"),
    OpDecl("add_rms_norm", _add_rms_norm, "residual' = x + residual; y = rms_norm(residual'); -> (y, residual')"),
    OpDecl("add", _add, "x + y"),
    OpDecl("pack_weight", _nothing, "canonical weights that share one input -> packed weight", family="weight",
           step=False),
    OpDecl("linear", _linear, "[T,K] -> [T,N]: x wᵀ + bias; out='float32' leaves the accumulator unrounded",
           family="weight", carrier=1),
    OpDecl("split_qkv", _split_qkv, "[T,(Hq+2Hkv)·D] -> q [T,Hq,D], k, v [T,Hkv,D]; may be views",
           aliases={0: 0, 1: 0, 2: 0}),
    OpDecl("rope", _rope, "rotary embedding, first half of rot paired with the second; cos_sin [P,rot] f32, rot <= D"),
    OpDecl("gated_act", _gated_act, "[T,2I] -> [T,I]: act(gate) · up; silu, gelu_tanh, gelu"),
    OpDecl("store_kv", _store_kv, "k, v [T,Hkv,D] to slots [T] i32 of a cache layer; -1 skips", writes=("layer",),
           family="cache", carrier=2),
    OpDecl("read_kv", _read_kv, "slots [T] -> k, v [T,Hkv,D] as stored", family="cache", carrier=0),
    OpDecl("paged_attention", _paged_attention, "[T,Hq,D] -> [T,Hq·D] over the cached K and V of each sequence",
           family="cache", carrier=1),
    OpDecl("move_kv", _nothing, "copy slots src -> dst in every layer", writes=("kv",), family="cache", carrier=0,
           step=False),
    OpDecl("swap_kv", _nothing, "copy block pairs between a cache and a host cache", writes=("kv", "host"),
           family="cache", carrier=0, step=False),
    OpDecl("gather_rows", _gather_rows, "x[rows]; row -1 gives zeros; activations, f32 logits, i32 ids"),
    OpDecl("edit_logits", _edit_logits, "in place: z > 0 ? z/factor : z·factor, then + bias; row -1 skips",
           writes=("logits",)),
    OpDecl("mask_logits", _mask_logits, "in place: -inf where the id's bit [R,ceil(V/32)] i32 is 0",
           writes=("logits",)),
    OpDecl("sample", _sample, "[R,V] -> ids [R]: inverse CDF over the kept set; params None: argmax; -1: no answer"),
    OpDecl("logprobs", _logprobs, "(chosen [R], rank [R], top_ids [R,n], top [R,n]) of log softmax(logits)"),
    OpDecl("verify", _verify, "exact rejection sampling of drafts with probabilities -> (accepted [B], next_id [B])"),
    OpDecl("all_reduce", _identity, "sum over ranks; identity in a world of one", aliases={0: 0}),
    OpDecl("all_gather", _identity, "concatenation over ranks; identity in a world of one", aliases={0: 0}),
    OpDecl("norm_linear", _norm_linear, "(linear(rms_norm(x + residual)), x + residual); residual None: x becomes it",
           family="weight", carrier=4, composite=True, aliases={1: 0}),
    OpDecl("act_linear", _act_linear, "linear(gated_act(gate_up))", family="weight", carrier=2, composite=True),
    OpDecl("qkv_rope_store", _qkv_rope_store, "split, q/k norm, rope, store -> q [T,Hq,D]", writes=("layer",),
           family="cache", carrier=7, composite=True),
)  # fmt: skip

OPS: dict[str, OpDecl] = {decl.name: decl for decl in _DECLS}
COMPOSITES = tuple(name for name, decl in OPS.items() if decl.composite)
