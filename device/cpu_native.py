"""The native kernels of the CPU (``cpu_kernels``) as an implementation of the op table over ``HostTensor``.

Here each op is one call of the executor; ``device.cpu_program`` hands it a whole step at once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cpu_kernels import cache
from cpu_kernels.linear import PackedWeight, pack
from cpu_kernels.native import Executor
from cpu_kernels.operands import ADDRESS, SIZES, Operand, call
from device.binding import Implementation
from device.contract import AttnMeta
from device.dtypes import FLOATS, numpy_dtype
from device.host_tensor import HostTensor
from device.ops import OPS, SampleParams
from device.reference_kv import swap_kv
from device.weights import Activation, CanonicalWeight

NATIVE = "native"
KV_DTYPES = cache.DTYPES

_CALLS = (
    "embed", "rms_norm", "add_rms_norm", "add", "linear", "rope", "gated_act", "store_kv", "read_kv",
    "paged_attention", "gather_rows", "edit_logits", "mask_logits", "sample", "logprobs", "norm_linear", "act_linear",
    "qkv_rope_store", "verify",
)  # fmt: skip


def native_implementation(executor: Executor, activations: str) -> Implementation:
    """All native ops, in float32. activations: as ``cpu_kernels.linear.pack`` takes it."""
    functions: dict[str, Callable[..., Any]] = {name: _eager(executor, name) for name in _CALLS}
    functions |= {
        "split_qkv": split_qkv,
        "all_reduce": _identity,
        "all_gather": _identity,
        "move_kv": cache.move_kv,
        "swap_kv": swap_kv,  # whole blocks: their layout does not matter
    }

    def pack_weight(weights: Sequence[Any], uses: Any) -> PackedWeight:
        packed = pack(weights, uses, activations)
        packed.impl = made
        return packed

    functions["pack_weight"] = pack_weight
    made = Implementation(NATIVE, functions, supports=_supports, batch_invariant=frozenset(functions))
    return made


def input_of(w: CanonicalWeight, activations: str) -> Activation:
    """``Device.input_of``: ``auto`` rounds the input of integer weights to int8 by groups of 32 columns, or of 16
    where the weight's own groups are no multiples of 32."""
    asked = w.activation.kind != "none" or w.activation.as_is
    if w.dtype in FLOATS or asked or activations == "float":
        return w.activation
    return Activation("dynamic", group=_block(w))


def _block(w: CanonicalWeight) -> int:
    return 16 if w.group % 32 and w.group != w.shape[1] else 32


def _supports(op: str, *args: Any) -> bool:
    if op != "pack_weight":
        return True
    weights, _ = args
    return len(weights) <= 8 and all(_packs(w) for w in weights)


def _packs(w: Any) -> bool:
    columns = w.shape[1]
    whole = w.group in (0, columns)
    if w.activation.group not in (0, _block(w)):
        return False
    return w.dtype != "float64" and (whole or (w.group % 16 == 0 and columns % w.group == 0))


def split_qkv(qkv: HostTensor, heads: int, kv_heads: int, dim: int) -> tuple[HostTensor, ...]:
    """Views."""
    parts = []
    start = 0
    for n in (heads, kv_heads, kv_heads):
        end = start + n * dim
        parts.append(HostTensor(qkv.array[:, start:end].reshape(qkv.shape[0], n, dim), qkv.name))
        start = end
    return tuple(parts)


def _identity(x: HostTensor) -> HostTensor:
    return x


def _eager(executor: Executor, name: str) -> Callable[..., Any]:
    """One op as one call of the executor, on operands of any strides."""
    decl = OPS[name]
    no_counts = np.zeros(1, np.int32)

    def op(*args: Any, **kwargs: Any) -> Any:
        outs = [_empty(out.shape, out.dtype) for out in decl.outputs(*args, **kwargs)]
        if name == "norm_linear" and args[1] is None:
            outs[1] = args[0]
        keep: list[Any] = []
        writes = decl.writes == ("logits",)
        operands = [operand(x, keep, writes and i == 0) for i, x in enumerate(args)]
        named = {k: operand(x, keep, False) for k, x in kwargs.items()}
        made = call(name, [operand(x, keep, True) for x in outs], operands, named)
        if any(x.shape[0] for x in outs) or not outs:
            executor.scratch.ensure(executor.scratch_for(made, None))
            bases = (ctypes.c_void_p * 1)()
            executor.run(ctypes.pointer(made), 1, no_counts.ctypes.data, bases)
        return None if not outs else outs[0] if len(outs) == 1 else tuple(outs)

    return op


def _empty(shape: tuple[int, ...], dtype: str) -> HostTensor:
    return HostTensor(np.empty(shape, numpy_dtype(dtype)), dtype if dtype == "bfloat16" else "")


def operand(x: Any, keep: list[Any], written: bool) -> Any:
    """What the executor takes for an argument of an op. keep: gets what must live until the call has run."""
    if isinstance(x, HostTensor):
        array = x.array
        if array.size and not _rows_contiguous(array):
            if written:
                raise ValueError(f"a tensor of strides {array.strides} cannot be written in place")
            array = np.ascontiguousarray(array)
        keep.append(array)
        stride = array.strides[0] // array.itemsize if array.ndim > 1 or array.size else 1
        if x.dtype not in SIZES:
            raise ValueError(f"a tensor of {x.dtype} is none that the native kernels know: {', '.join(SIZES)}")
        return Operand(x.dtype, array.shape, stride, ADDRESS, array.ctypes.data)
    if isinstance(x, SampleParams):
        return SampleParams(*(operand(part, keep, False) for part in x))
    if isinstance(x, AttnMeta):
        tensors = {name: operand(getattr(x, name), keep, False) for name in META}
        return AttnMeta(**tensors, q_lens=x.q_lens, kv_lens=x.kv_lens)
    return x


META = ("q_start", "seq_lens", "block_table", "slots", "counts", "tree", "is_tree")


def _rows_contiguous(array: Any) -> bool:
    """Whether what stands in a row is neighbours, and rows lie whole elements apart."""
    expected = array.itemsize
    for n, stride in zip(array.shape[:0:-1], array.strides[:0:-1], strict=True):
        if n != 1 and stride != expected:
            return False
        expected *= n
    return bool(array.strides[0] % array.itemsize == 0)
