"""Each composite op composed of plain ones: what ``--no-fusion`` runs and what a fusion must equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from device.binding import OpTable


def default_composites(table: Callable[[], OpTable]) -> dict[str, Callable[..., Any]]:
    """Composites over the plain ops of ``table()`` (asked at each call, since the table is still being bound)."""

    def norm_linear(x: Any, residual: Any, w_norm: Any, eps: float, w: Any, bias: Any = None) -> tuple[Any, Any]:
        ops = table()
        if residual is None:
            return ops.linear(ops.rms_norm(x, w_norm, eps), w, bias), x
        y, residual = ops.add_rms_norm(x, residual, w_norm, eps)
        return ops.linear(y, w, bias), residual

    def act_linear(gate_up: Any, kind: str, w: Any, bias: Any = None) -> Any:
        ops = table()
        return ops.linear(ops.gated_act(gate_up, kind), w, bias)

    def qkv_rope_store(
        qkv: Any,
        heads: tuple[int, int, int],
        q_norm: Any,
        k_norm: Any,
        eps: float,
        positions: Any,
        cos_sin: Any,
        layer: Any,
        slots: Any,
    ) -> Any:
        ops = table()
        q, k, v = ops.split_qkv(qkv, *heads)
        if q_norm is not None:
            q = ops.rms_norm(q, q_norm, eps)
        if k_norm is not None:
            k = ops.rms_norm(k, k_norm, eps)
        q, k = ops.rope(q, k, positions, cos_sin)
        ops.store_kv(k, v, layer, slots)
        return q

    return {"norm_linear": norm_linear, "act_linear": act_linear, "qkv_rope_store": qkv_rope_store}
