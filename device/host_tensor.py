"""Tensors that are NumPy arrays, and ops over arrays as ops over such tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device.contract import AttnMeta
from device.ops import SampleParams


class HostTensor:
    """A NumPy array that shows only what the contract allows."""

    __slots__ = ("array", "name")

    def __init__(self, array: NDArray[Any], name: str = "") -> None:
        self.array = array
        self.name = name
        """Of the dtype, where NumPy has none for it: bfloat16 lies in a uint16 array."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> str:
        return self.name or self.array.dtype.name

    def reshape(self, *shape: int) -> HostTensor:
        return HostTensor(self.array.reshape(shape), self.name)

    def __getitem__(self, index: slice | tuple[slice, ...]) -> HostTensor:
        return HostTensor(self.array[index], self.name)


def raw(x: Any) -> Any:
    """The arrays inside an operand of an op."""
    kind = type(x)
    if kind is HostTensor:
        return x.array
    if kind is AttnMeta:
        return RawMeta(x)
    if kind is SampleParams:
        return SampleParams(*map(raw, x))
    return x


class RawMeta:
    """AttnMeta with arrays in place of tensors."""

    __slots__ = ("block_table", "is_tree", "kv_lens", "q_lens", "q_start", "seq_lens", "slots", "tree")

    def __init__(self, meta: AttnMeta) -> None:
        self.q_start = raw(meta.q_start)
        self.seq_lens = raw(meta.seq_lens)
        self.block_table = raw(meta.block_table)
        self.slots = raw(meta.slots)
        self.tree = raw(meta.tree)
        self.is_tree = raw(meta.is_tree)
        self.q_lens = meta.q_lens
        self.kv_lens = meta.kv_lens


def wrapped(fn: Callable[..., Any]) -> Callable[..., Any]:
    """An op over arrays as an op over tensors."""

    def op(*args: Any, **kwargs: Any) -> Any:
        result = fn(*[raw(a) for a in args], **{k: raw(v) for k, v in kwargs.items()})
        if type(result) is tuple:
            return tuple(HostTensor(r) for r in result)
        return HostTensor(result) if isinstance(result, np.ndarray) else result

    return op
