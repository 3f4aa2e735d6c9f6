"""What the calls of a recorded step cost: the bytes each must move, the operations it must do, the time it took."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from cpu_kernels.cache import NativeKVLayer
from cpu_kernels.linear import PackedWeight
from cpu_kernels.operands import ADDRESS, SIZES, Operand
from device.contract import AttnMeta, OpTime
from device.ops import SampleParams


@dataclass(frozen=True, slots=True)
class Traced:
    """A call of a recording. operands: outputs and arguments, weights and cache layers among them."""

    op: str
    operands: tuple[Any, ...]

    def time(self, seconds: float, rows: Callable[[Operand], int], lengths: Sequence[tuple[int, int]]) -> OpTime:
        """rows: of an operand in this step. lengths: (rows of this step, tokens with them) of each sequence."""
        found = list(_flat(self.operands))
        tensors = [x for x in found if isinstance(x, Operand)]
        moved = sum(rows(x) * x.cols * SIZES[x.dtype] for x in tensors if not _table(x))
        detail, operations = "", 0
        for x in found:
            if isinstance(x, PackedWeight):
                n, k = x.shape
                detail = f"{k}->{n}"
                if self.op == "embed":
                    moved += rows(tensors[0]) * x.nbytes // n
                else:
                    moved += x.nbytes
                    operations += 2 * rows(tensors[0]) * n * k
            elif isinstance(x, NativeKVLayer) and self.op == "paged_attention":
                window = _window(self.operands)
                each = sum(a.nbytes // (a.shape[0] * x.block_size) for a in x.arrays())
                seen = sum(min(window, length - i) for count, length in lengths for i in range(count))
                moved += each * sum(min(window + count - 1, length) for count, length in lengths)
                operations += 4 * seen * tensors[0].cols
        return OpTime(self.op, detail, seconds, moved, operations)


def _flat(values: Sequence[Any]) -> Iterator[Any]:
    for x in values:
        if isinstance(x, SampleParams):
            yield from x
        elif not isinstance(x, AttnMeta):
            yield x


def _table(x: Operand) -> bool:
    """A constant of which a step reads a few rows: angles."""
    return x.space == ADDRESS and len(x.shape) > 1


def _window(operands: Sequence[Any]) -> int:
    """What a row may see at most: the last operand of the op, None for all."""
    last = operands[-1]
    return last if isinstance(last, int) else 1 << 62
