"""A model's logits without scheduler and sampling, and an engine's greedy output against a reference."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from device.contract import Device, Inputs, InputSpec, Layout, Tensor
from runtime.api import SamplingParams
from runtime.engine import Engine
from runtime.models.decoder import Decoder
from tests.support.reference import GreedyReport, ReferenceCase, compare_generation, compare_teacher_forced


class Forward:
    """Runs a model's step function on one sequence at a time, ``chunk`` tokens a step (0: all in one).

    It binds a cache of its own to the model: an engine that has the same model cannot be used afterwards. Blocks are
    handed out last first, so that a block table that is not looked at gives other logits.
    """

    def __init__(
        self, model: Decoder, device: Device, *, max_len: int = 512, chunk: int = 0, block_size: int = 0,
        kv_dtype: str = "",
    ) -> None:  # fmt: skip
        self._model = model
        self._chunk = chunk or max_len
        self._size = device.caps.check_block_size(block_size)
        self._count = -(-max_len // self._size)
        reserved = device.caps.reserved_blocks
        kv = device.alloc_kv(model.kv_spec(kv_dtype or device.dtype), self._count + reserved, self._size)
        model.bind_kv(kv)
        self._table = np.arange(self._count + reserved - 1, reserved - 1, -1, dtype=np.int32)
        self._program = device.program(self._step, self._layout(min(self._chunk, max_len)))
        self._buffer = self._program.buffer()

    def _layout(self, rows: int) -> Layout:
        return Layout(
            ("T", "B", "R"),
            (
                InputSpec("ids", "int32", "T", rows),
                InputSpec("positions", "int32", "T", rows),
                InputSpec("slots", "int32", "T", rows, pad=-1),
                InputSpec("q_start", "int32", "B", 1, extra=1, pad="last"),
                InputSpec("seq_lens", "int32", "B", 1),
                InputSpec("rows", "int32", "R", rows, pad=-1),
                InputSpec("block_table", "int32", "B", 1, tail=(self._count,)),
            ),
        )

    def _step(self, inputs: Inputs, key: Hashable) -> Mapping[str, Tensor]:
        x, residual = self._model.hidden(inputs)
        return {"logits": self._model.logits(inputs, x, residual, inputs["rows"])} if key else {}

    def rows(self, ids: Sequence[int], count: int = 0) -> NDArray[np.float32]:
        """Logits [count, vocab] of the last ``count`` positions; 0: of all."""
        first = len(ids) - (count or len(ids))
        parts = [
            part
            for start in range(0, len(ids), self._chunk)
            if (part := self._run(ids, start, min(start + self._chunk, len(ids)), first)) is not None
        ]
        return np.concatenate(parts)

    def _run(self, ids: Sequence[int], start: int, end: int, first: int) -> NDArray[np.float32] | None:
        buffer, n = self._buffer, end - start
        wanted = np.arange(max(first - start, 0), n, dtype=np.int32)
        at = np.arange(start, end, dtype=np.int32)
        views = buffer.views
        views["ids"][:n] = ids[start:end]
        views["positions"][:n] = at
        views["slots"][:n] = self._table[at // self._size] * self._size + at % self._size
        views["q_start"][:2] = 0, n
        views["seq_lens"][0] = end
        views["block_table"][0] = self._table[: self._count]
        views["rows"][: len(wanted)] = wanted
        buffer.lists["q_lens"], buffer.lists["kv_lens"] = [n], [end]
        buffer.counts[:] = n, 1, len(wanted)
        out = self._program.launch(buffer, bool(len(wanted))).wait()
        return np.array(out["logits"]) if len(wanted) else None


def generate_greedily(engine: Engine, prompts: Sequence[Sequence[int]], counts: Sequence[int]) -> list[list[int]]:
    """Output ids of all prompts, run together; end-of-text ids do not end them."""
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in counts]
    outputs = engine.generate([list(prompt) for prompt in prompts], params)
    failed = [out.choices[0].error for out in outputs if out.choices[0].finish_reason != "length"]
    assert not failed, failed
    return [out.choices[0].token_ids for out in outputs]


def compare_engine(engine: Engine, cases: Sequence[ReferenceCase]) -> GreedyReport:
    """All cases together through the engine, token for token against the reference; see ``compare_generation``."""
    free = generate_greedily(engine, [case.prompt for case in cases], [len(case.tokens) for case in cases])
    report = GreedyReport()
    for case, tokens in zip(cases, free, strict=True):

        def generate(
            prefix: list[int], count: int, case: ReferenceCase = case, tokens: list[int] = tokens
        ) -> list[int]:
            if len(prefix) == len(case.prompt):
                return tokens
            return generate_greedily(engine, [prefix], [count])[0]

        report += compare_generation(case, generate)
    return report


def compare_logits(forward: Forward, cases: Sequence[ReferenceCase], tolerance: float) -> GreedyReport:
    """The logits of every case behind the reference's tokens; see ``compare_teacher_forced``."""
    return sum((_compare_case(forward, case, tolerance) for case in cases), GreedyReport())


def _compare_case(forward: Forward, case: ReferenceCase, tolerance: float) -> GreedyReport:
    return compare_teacher_forced(case, lambda ids: forward.rows(ids, len(case.tokens)), tolerance)
