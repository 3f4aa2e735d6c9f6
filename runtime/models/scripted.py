"""A model that says what it is told: the seam through which the engine and the service are tested.

It goes through the same scheduler, step buffers, ops and sampling as any other model; only its logits come from a
script: the scripted token of each row stands far above all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from device.contract import Device, HostBuffer, Inputs, InputSpec, KVCache, KVLayerSpec, KVSpec, Tensor
from device.weights import float_weight
from runtime.scheduler import Limits, Plan
from runtime.sequence import Sequence as Seq

Script = Callable[[Seq], Sequence[int]]
LOGIT = 50.0


def script_of_request(seq: Seq) -> Sequence[int]:
    """The token list that a request brings in ``extra["script"]``; nothing for one without."""
    script: Sequence[int] = (seq.extra or {}).get("script", ())
    return script


class ScriptedModel:
    """script(sequence) gives its output tokens; after them ``end`` is said for ever.

    on_step is called with each plan on the engine thread before it is launched: it may sleep (a slow model) or raise.
    """

    def __init__(
        self,
        device: Device,
        vocab_size: int,
        end: int,
        script: Script = script_of_request,
        on_step: Callable[[Plan], None] | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self._end = end
        self._script = script
        self._on_step = on_step
        zeros = float_weight(np.zeros((vocab_size, 1), np.float32), "float32")
        self._table = device.ops.pack_weight([zeros], frozenset({"embed", "linear"}))
        self.nbytes: int = self._table.nbytes

    def kv_spec(self, dtype: str) -> KVSpec:
        """One layer of one small head: blocks are accounted for as with any model."""
        return KVSpec((KVLayerSpec(1, 8, 1),), dtype)

    def bind_kv(self, kv: KVCache) -> None:
        return

    def extra_inputs(self, limits: Limits) -> Iterable[InputSpec]:
        rows = limits.max_rows
        return (
            InputSpec("script_row", "int32", "R", rows, pad=-1),
            InputSpec("script_id", "int32", "R", rows),
            InputSpec("script_factor", "float32", "R", rows, pad=1.0),
            InputSpec("script_bias", "float32", "R", rows),
        )

    def fill(self, plan: Plan, buffer: HostBuffer) -> None:
        if self._on_step is not None:
            self._on_step(plan)
        ids: list[int] = []
        for b, seq in enumerate(plan.seqs):
            sampled = plan.drafts[b] + 1 if plan.samples[b] else 0
            ids.extend([self._end] * (plan.rows[b] - sampled))
            if sampled:
                script, at = self._script(seq), len(seq.tokens) - seq.prompt_len
                ids.extend(script[i] if i < len(script) else self._end for i in range(at, at + sampled))
        n = len(ids)
        buffer.views["script_row"][:n] = np.arange(n)
        buffer.views["script_id"][:n] = ids
        buffer.views["script_factor"][:n] = 1.0
        buffer.views["script_bias"][:n] = LOGIT

    def hidden(self, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
        return inputs.ops.embed(inputs["ids"], self._table), None

    def logits(self, inputs: Inputs, x: Tensor, residual: Tensor | None, rows: Tensor) -> Tensor:
        ops = inputs.ops
        logits: Tensor = ops.linear(ops.gather_rows(x, rows), self._table, None, "float32")
        ops.edit_logits(
            logits, inputs["script_row"], inputs["script_id"], inputs["script_factor"], inputs["script_bias"]
        )
        return logits
