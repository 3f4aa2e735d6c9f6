"""A linear layer as an object that owns its packed weight.

Adapters, shards and weights that are fetched before their layer plug in here, so that no model has to know of them.
"""

from __future__ import annotations

from typing import Any

from device.binding import OpTable
from device.contract import PackedWeight, Tensor


class Linear:
    """y = x wᵀ + bias, and the two composites in which a device may fuse what stands before it.

    reduce: its input is spread over tensor-parallel ranks, so its output is summed over them (the bias is then held
    by rank 0 only).
    """

    __slots__ = ("bias", "reduce", "weight")

    def __init__(self, weight: PackedWeight, bias: Tensor | None = None, *, reduce: bool = False) -> None:
        self.weight = weight
        self.bias = bias
        self.reduce = reduce

    def __call__(self, ops: OpTable, x: Tensor, out: str | None = None) -> Tensor:
        """[T,K] -> [T,N]; out: dtype of the result, default that of x."""
        y: Tensor = self._summed(ops, ops.linear(x, self.weight, self.bias, out))
        return y

    def after_norm(
        self, ops: OpTable, x: Tensor, residual: Tensor | None, w_norm: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """(linear(rms_norm(x + residual)), x + residual); without a residual x becomes it."""
        y, residual = ops.norm_linear(x, residual, w_norm, eps, self.weight, self.bias)
        return self._summed(ops, y), residual

    def after_gate(self, ops: OpTable, gate_up: Tensor, kind: str) -> Tensor:
        """linear(gated_act(gate_up)): [T,2K] -> [T,N]."""
        y: Tensor = self._summed(ops, ops.act_linear(gate_up, kind, self.weight, self.bias))
        return y

    def _summed(self, ops: OpTable, y: Any) -> Any:
        return ops.all_reduce(y) if self.reduce else y
