"""The ops of the toy device, and its portable stand-ins. They run on the worker, in tensors of the toy's own class.

Left out on purpose: ``sample``, ``logprobs``, ``verify`` (the portable ones show up in the start-up table), weights
with a static activation (the portable family takes them, with a notice) and ``act_linear`` (composed of plain ops).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device import reference
from device.binding import Implementation
from device.errors import DeviceError
from device.ops import OPS, SampleParams
from tests.support import toy_kv, toy_weights
from tests.support.toy_tensor import Stream, ToyTensor

Array = NDArray[Any]
OpFn = Callable[..., Any]

NATIVE = "toy"
PORTABLE = "numpy on toy"


def native_implementation(stream: Stream, dtype: str) -> Implementation:
    """The toy's own package. Its functions know the ``Implementation`` that they belong to, to sign what they pack."""
    signed: list[Implementation] = []
    kernels = ToyKernels(stream, dtype, lambda: signed[0])
    functions: dict[str, OpFn] = {}
    for name in OPS:
        kernel = getattr(kernels, name, None)
        if kernel is not None:
            functions[name] = kernel
    own = {"linear", "norm_linear", "paged_attention"}  # a matrix product may be summed differently for other rows
    signed.append(Implementation(NATIVE, functions, supports=_supports, batch_invariant=frozenset(functions) - own))
    return signed[0]


def _supports(op: str, *args: Any) -> bool:
    return toy_weights.takes(args[0]) if op == "pack_weight" else True


class ToyKernels:
    """One method an op."""

    def __init__(self, stream: Stream, dtype: str, impl: Callable[[], Implementation]) -> None:
        self._stream, self._dtype, self._impl = stream, dtype, impl

    def _out(self, array: Array) -> ToyTensor:
        return ToyTensor.of(self._stream, array)

    # ------------------------------------------------------------ weights

    def pack_weight(self, weights: Any, uses: Any) -> toy_weights.ToyWeight:
        return toy_weights.pack(self._stream, self._impl(), self._dtype, weights, uses)

    def embed(self, ids: ToyTensor, table: toy_weights.ToyWeight, scale: float = 1.0) -> ToyTensor:
        return self._out(toy_weights.embed(ids.array(), table) * np.dtype(self._dtype).type(scale))

    def linear(self, x: ToyTensor, w: toy_weights.ToyWeight, bias: ToyTensor | None = None,
               out: str | None = None) -> ToyTensor:  # fmt: skip
        y = toy_weights.linear(x.array(), w)
        return self._out(y if bias is None else y + bias.array())

    def norm_linear(
        self, x: ToyTensor, residual: ToyTensor | None, w_norm: ToyTensor, eps: float, w: toy_weights.ToyWeight,
        bias: ToyTensor | None = None,
    ) -> tuple[ToyTensor, ToyTensor]:  # fmt: skip
        """The product first, the rows' norms after it; a quantised input has to be normed before."""
        total = x if residual is None else self._out(x.array() + residual.array())
        rows = total.array()
        norm = np.sqrt(np.square(rows).mean(axis=1, keepdims=True) + eps)
        if any(s.dynamic for s in w.segments):
            y = toy_weights.linear(rows / norm * w_norm.array(), w)
        else:
            y = toy_weights.linear(rows * w_norm.array(), w) / norm
        return self._out(y if bias is None else y + bias.array()), total

    # ------------------------------------------------------------ rows

    def rms_norm(self, x: ToyTensor, w: ToyTensor, eps: float) -> ToyTensor:
        return self._out(_normed(x.array(), w.array(), eps))

    def add_rms_norm(self, x: ToyTensor, residual: ToyTensor, w: ToyTensor, eps: float) -> tuple[ToyTensor, ToyTensor]:
        total = x.array() + residual.array()
        return self._out(_normed(total, w.array(), eps)), self._out(total)

    def add(self, x: ToyTensor, y: ToyTensor) -> ToyTensor:
        return self._out(x.array() + y.array())

    def split_qkv(self, qkv: ToyTensor, heads: int, kv_heads: int, dim: int) -> tuple[ToyTensor, ...]:
        """Three windows on qkv."""
        at, parts = 0, []
        for n in (heads, kv_heads, kv_heads):
            parts.append(qkv[:, at : at + n * dim].reshape(qkv.shape[0], n, dim))
            at += n * dim
        return tuple(parts)

    def rope(self, q: ToyTensor, k: ToyTensor, positions: ToyTensor, cos_sin: ToyTensor) -> tuple[ToyTensor, ToyTensor]:
        at, table = positions.array(), cos_sin.array()
        return self._out(_rotated(q.array(), at, table)), self._out(_rotated(k.array(), at, table))

    def gated_act(self, gate_up: ToyTensor, kind: str) -> ToyTensor:
        half = gate_up.shape[1] // 2
        x, up = gate_up.array()[:, :half], gate_up.array()[:, half:]
        if kind == "silu":
            gate = x * 0.5 * (1 + np.tanh(x * 0.5))
        elif kind == "gelu_tanh":
            gate = x * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        elif kind == "gelu":
            erf = np.vectorize(math.erf, otypes=[x.dtype])
            gate = x * 0.5 * (1 + erf(x * math.sqrt(0.5)))
        else:
            raise DeviceError(f"gated_act {kind!r}; expected silu, gelu_tanh or gelu")
        return self._out(gate * up)

    def gather_rows(self, x: ToyTensor, rows: ToyTensor) -> ToyTensor:
        at = rows.array()
        if at.size and (at.min() < -1 or at.max() >= x.shape[0]):
            raise DeviceError(f"gather_rows: rows {at.min()} … {at.max()} of {x.shape[0]}")
        out = np.zeros((at.size, *x.shape[1:]), x.array().dtype)
        out[at >= 0] = x.array()[at[at >= 0]]
        return self._out(out)

    def all_reduce(self, x: ToyTensor) -> ToyTensor:
        return x

    def all_gather(self, x: ToyTensor) -> ToyTensor:
        return x

    # ------------------------------------------------------------ cache

    def store_kv(self, k: ToyTensor, v: ToyTensor, layer: toy_kv.ToyKVLayer, slots: ToyTensor) -> None:
        toy_kv.store(k.array(), v.array(), layer, slots.array())

    def read_kv(self, layer: toy_kv.ToyKVLayer, slots: ToyTensor) -> tuple[ToyTensor, ToyTensor]:
        k, v = toy_kv.read(layer, slots.array())
        return self._out(k), self._out(v)

    def paged_attention(self, q: ToyTensor, layer: toy_kv.ToyKVLayer, meta: Any, scale: float,
                        window: int | None = None) -> ToyTensor:  # fmt: skip
        return self._out(toy_kv.attend(q.array(), layer, meta, scale, window))

    def move_kv(self, kv: toy_kv.ToyKV, src: Array, dst: Array) -> None:
        toy_kv.move(kv, src, dst)

    def swap_kv(self, kv: toy_kv.ToyKV, host: toy_kv.ToyKV, pairs: Array, direction: Any) -> None:
        toy_kv.swap(kv, host, pairs, direction)

    def qkv_rope_store(self, qkv: ToyTensor, heads: tuple[int, int, int], q_norm: ToyTensor | None,
                       k_norm: ToyTensor | None, eps: float, positions: ToyTensor, cos_sin: ToyTensor,
                       layer: toy_kv.ToyKVLayer, slots: ToyTensor) -> ToyTensor:  # fmt: skip
        """q and k side by side through norm and rotation, k and v into the cache."""
        q_heads, kv_heads, dim = heads
        x = qkv.array().reshape(qkv.shape[0], q_heads + 2 * kv_heads, dim)
        turning = x[:, : q_heads + kv_heads].copy()
        for part, norm in ((turning[:, :q_heads], q_norm), (turning[:, q_heads:], k_norm)):
            if norm is not None:
                part[...] = _normed(part, norm.array(), eps)
        turned = _rotated(turning, positions.array(), cos_sin.array())
        toy_kv.store(turned[:, q_heads:], x[:, q_heads + kv_heads :], layer, slots.array())
        return self._out(turned[:, :q_heads])

    # ------------------------------------------------------------ logits

    def edit_logits(self, logits: ToyTensor, row: ToyTensor, id: ToyTensor, factor: ToyTensor, bias: ToyTensor) -> None:
        live = row.array() >= 0
        at = (row.array()[live], id.array()[live])
        z = logits.array()[at]
        f = factor.array()[live].astype(z.dtype)
        logits.array()[at] = z * np.where(z > 0, 1 / f, f) + bias.array()[live]

    def mask_logits(self, logits: ToyTensor, bitmask: ToyTensor) -> None:
        ids = np.arange(logits.shape[1])
        bits = bitmask.array()[:, ids // 32] >> (ids % 32).astype(np.int32) & 1
        logits.array()[bits == 0] = -np.inf


def _normed(x: Array, w: Array, eps: float) -> Array:
    out: Array = x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + eps) * w
    return out.astype(x.dtype, copy=False)


def _rotated(x: Array, positions: Array, cos_sin: Array) -> Array:
    """x·cos + (the halves exchanged, the first negated)·sin over the first rot numbers of each head."""
    if positions.size and (positions.min() < 0 or positions.max() >= cos_sin.shape[0]):
        raise DeviceError(f"rope: positions {positions.min()} … {positions.max()} of {cos_sin.shape[0]}")
    rot = cos_sin.shape[1]
    cos, sin = (np.tile(part, 2)[:, None] for part in np.split(cos_sin[positions], 2, axis=1))
    turning = x[..., :rot]
    exchanged = np.concatenate((-turning[..., rot // 2 :], turning[..., : rot // 2]), axis=-1)
    out = x.copy()
    out[..., :rot] = turning * cos + exchanged * sin
    return out


# ---------------------------------------------------------------- portable stand-ins


class PortableWeight(reference.RefWeight):
    """A weight that the toy's own package does not take."""

    __slots__ = ("__weakref__",)


def portable_implementation(stream: Stream, dtype: str) -> Implementation:
    """``device.reference`` over this device's tensors: all ops but those of the cache, whose layout is the toy's."""
    table = reference.reference_table(dtype)
    names = [name for name, decl in OPS.items() if not decl.composite and decl.family != "cache"]
    signed: list[Implementation] = []
    functions: dict[str, OpFn] = {name: partial(_on_tensors, stream, table[name]) for name in names}

    def pack_weight(weights: Any, uses: Any) -> PortableWeight:
        made = reference.pack_weight(weights, uses, dtype)
        packed = PortableWeight(made.matrix.copy(), made.segments)  # the host's array may go when the call returns
        packed.impl = signed[0]
        return packed

    functions["pack_weight"] = pack_weight
    invariant = reference.BATCH_INVARIANT & functions.keys()
    signed.append(Implementation(PORTABLE, functions, portable=True, batch_invariant=frozenset(invariant)))
    return signed[0]


def _on_tensors(stream: Stream, fn: OpFn, *args: Any, **kwargs: Any) -> Any:
    result = fn(*map(_array, args), **{name: _array(x) for name, x in kwargs.items()})
    if isinstance(result, tuple):
        return tuple(ToyTensor.of(stream, x) for x in result)
    return None if result is None else ToyTensor.of(stream, result)


def _array(x: Any) -> Any:
    if isinstance(x, ToyTensor):
        return x.array()
    return SampleParams(*map(_array, x)) if isinstance(x, SampleParams) else x
