"""A step: its inputs as one buffer, and the program from ``embed`` to sampled ids and log-probabilities."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from device.contract import HostBuffer, Inputs, InputSpec, KVCache, KVSpec, Layout, StepFn, Tensor
from device.ops import SampleParams
from runtime.scheduler import Limits, Plan, Scheduler
from runtime.sequence import Sequence
from runtime.uniforms import AHEAD, uniforms

COUNTS = ("T", "B", "R", "L", "P", "E")
"""Tokens, sequences, rows of logits, rows with log-probabilities, scored prompt rows, edits."""

_TOP_SIZES = (0, 1, 2, 5, 10, 20)
_FIRST_EDITS = 256


class StepKey(NamedTuple):
    """Whatever changes the list of op calls of a step.

    head: whether any row needs logits. greedy: no row is sampled by chance. edits: capacity of the edit list, 0 for
    none. logprobs, prompt_logprobs: how many best tokens are returned a row, -1 for no log-probabilities.
    """

    head: bool
    greedy: bool
    edits: int
    logprobs: int
    prompt_logprobs: int


class Model(Protocol):
    """What the engine needs of a model: a step function's middle part, and what its cache looks like."""

    vocab_size: int
    """Width of its logits."""

    def kv_spec(self, dtype: str) -> KVSpec: ...

    def bind_kv(self, kv: KVCache) -> None:
        """The cache that ``hidden`` writes and reads from now on."""
        ...

    def extra_inputs(self, limits: Limits) -> Iterable[InputSpec]:
        """Inputs of its own, beside those of every step."""
        ...

    def fill(self, plan: Plan, buffer: HostBuffer) -> None:
        """Write its own inputs for a step whose common inputs are already in the buffer."""
        ...

    def hidden(self, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
        """(x, residual) [T,H] after the last layer, not yet added and normed."""
        ...

    def logits(self, inputs: Inputs, x: Tensor, residual: Tensor | None, rows: Tensor) -> Tensor:
        """[R, vocab_size] float32 for the rows named."""
        ...


def step_layout(model: Model, limits: Limits, block_size: int) -> Layout:
    """The inputs of every step of this model under these limits."""
    t, b, r = limits.max_tokens, limits.max_seqs, limits.max_rows
    per_row = [
        InputSpec("rows", "int32", "R", r, pad=-1),
        InputSpec("temperature", "float32", "R", r),
        InputSpec("top_k", "int32", "R", r),
        InputSpec("top_p", "float32", "R", r, pad=1.0),
        InputSpec("min_p", "float32", "R", r),
        InputSpec("uniforms", "float32", "R", r),
    ]
    return Layout(
        COUNTS,
        (
            InputSpec("ids", "int32", "T", t),
            InputSpec("positions", "int32", "T", t),
            InputSpec("slots", "int32", "T", t, pad=-1),
            InputSpec("q_start", "int32", "B", b, extra=1, pad="last"),
            InputSpec("seq_lens", "int32", "B", b),
            *per_row,
            InputSpec("lp_rows", "int32", "L", r, pad=-1),
            InputSpec("score_rows", "int32", "P", r, pad=-1),
            InputSpec("score_ids", "int32", "P", r),
            *model.extra_inputs(limits),
            # the widest last: a device may copy the buffer only up to the live rows
            InputSpec("block_table", "int32", "B", b, tail=(-(-limits.max_len // block_size),)),
            InputSpec("edit_row", "int32", "E", _FIRST_EDITS, pad=-1, grows=True),
            InputSpec("edit_id", "int32", "E", _FIRST_EDITS, grows=True),
            InputSpec("edit_factor", "float32", "E", _FIRST_EDITS, pad=1.0, grows=True),
            InputSpec("edit_bias", "float32", "E", _FIRST_EDITS, grows=True),
        ),
    )


def step_function(model: Model, sample_width: int) -> StepFn:
    """The program of a step. sample_width: ids that may be drawn; the model's padding above it is only ever scored."""
    padded = sample_width < model.vocab_size

    def step(inputs: Inputs, key: Hashable) -> Mapping[str, Tensor]:
        assert isinstance(key, StepKey)
        ops = inputs.ops
        x, residual = model.hidden(inputs)
        if not key.head:
            return {}
        logits = model.logits(inputs, x, residual, inputs["rows"])
        out: dict[str, Tensor] = {}
        if key.prompt_logprobs >= 0:
            scored = ops.gather_rows(logits, inputs["score_rows"])
            out.update(_named("score", ops.logprobs(scored, inputs["score_ids"], key.prompt_logprobs)))
        # the model's own distribution, before anything is edited
        own = ops.gather_rows(logits, inputs["lp_rows"]) if key.logprobs >= 0 else None
        drawn = logits[:, :sample_width] if padded else logits
        if key.edits:
            ops.edit_logits(drawn, inputs["edit_row"], inputs["edit_id"], inputs["edit_factor"], inputs["edit_bias"])
        params = None
        if not key.greedy:
            params = SampleParams(inputs["temperature"], inputs["top_k"], inputs["top_p"], inputs["min_p"])
        out["ids"] = ops.sample(drawn, params, inputs["uniforms"])
        if own is not None:
            out.update(_named("lp", ops.logprobs(own, ops.gather_rows(out["ids"], inputs["lp_rows"]), key.logprobs)))
        return out

    return step


def _named(prefix: str, parts: tuple[Tensor, ...]) -> dict[str, Tensor]:
    return dict(zip((f"{prefix}_chosen", f"{prefix}_rank", f"{prefix}_top_ids", f"{prefix}_top"), parts, strict=True))


class StepInputs:
    """Writes a plan into a step buffer. Sampling parameters and uniforms stay per running row and are gathered."""

    def __init__(self, scheduler: Scheduler, model: Model) -> None:
        self._scheduler = scheduler
        self._model = model
        rows = scheduler.limits.max_seqs + 1  # the last row is that of scored prompt rows: greedy, nothing drawn
        self._plain = rows - 1
        self._owner: list[Sequence | None] = [None] * rows
        self._greedy = [True] * rows
        self._temperature = np.zeros(rows, np.float32)
        self._top_k = np.zeros(rows, np.int32)
        self._top_p = np.ones(rows, np.float32)
        self._min_p = np.zeros(rows, np.float32)
        self._ahead: list[list[float]] = [[] for _ in range(rows)]
        self._ahead_from = [0] * rows

    def _adopt(self, seq: Sequence) -> None:
        row, params = seq.row, seq.params
        self._owner[row] = seq
        self._greedy[row] = params.temperature == 0
        self._temperature[row] = params.temperature
        self._top_k[row] = params.top_k
        self._top_p[row] = params.top_p
        self._min_p[row] = params.min_p
        self._ahead[row] = []

    def _uniform(self, seq: Sequence, position: int) -> float:
        """The draw for the token at ``position``; made AHEAD at a time."""
        row = seq.row
        at = position - self._ahead_from[row]
        ahead = self._ahead[row]
        if not 0 <= at < len(ahead):
            ahead = self._ahead[row] = uniforms(seq.seed, seq.index, position, AHEAD).tolist()
            self._ahead_from[row] = position
            at = 0
        return ahead[at]

    def fill(self, plan: Plan, buffer: HostBuffer) -> StepKey:
        """Write all inputs of the step; its key is returned. The buffer must not belong to a step under way."""
        views = buffer.views
        ids, positions, slots = views["ids"], views["positions"], views["slots"]
        q_start, seq_lens = views["q_start"], views["seq_lens"]
        size = self._scheduler.pool.block_size
        owner = self._owner
        table_rows: list[int] = []
        logit_rows: list[int] = []
        param_rows: list[int] = []
        draws: list[float] = []
        kv_lens: list[int] = []
        special: list[tuple[int, int]] = []
        greedy = True
        t = 0
        for b, (seq, start, count, n_rows, first) in enumerate(
            zip(plan.seqs, plan.starts, plan.counts, plan.rows, plan.first_row, strict=True)
        ):
            row = seq.row
            if owner[row] is not seq:
                self._adopt(seq)
            end = start + count
            if count == 1:
                ids[t] = seq.tokens[start]
                positions[t] = start
                slots[t] = seq.blocks[start // size] * size + start % size
            else:
                ids[t : t + count] = (seq.tokens[start:end] + seq.drafts)[:count]
                at = np.arange(start, end, dtype=np.int32)
                positions[t : t + count] = at
                slots[t : t + count] = self._scheduler.table[row].take(at // size) * size + at % size
            seq_lens[b] = end
            kv_lens.append(end)
            table_rows.append(row)
            if n_rows == 1 and plan.samples[b]:
                logit_rows.append(t + first)
                param_rows.append(row)
                if self._greedy[row]:
                    draws.append(0.0)
                else:
                    greedy = False
                    draws.append(self._uniform(seq, end))
                if seq.edits is not None or seq.params.logprobs is not None:
                    special.append((b, len(logit_rows) - 1))
            elif n_rows:
                special.append((b, len(logit_rows)))
                greedy &= self._several_rows(plan, b, t, logit_rows, param_rows, draws)
            t += count
            q_start[b + 1] = t
        bs, rs = len(plan.seqs), len(logit_rows)
        self._scheduler.table.take(table_rows, axis=0, out=views["block_table"][:bs], mode="clip")
        if rs:
            views["rows"][:rs] = logit_rows
            if not greedy:
                views["uniforms"][:rs] = draws
                for name, source in (
                    ("temperature", self._temperature),
                    ("top_k", self._top_k),
                    ("top_p", self._top_p),
                    ("min_p", self._min_p),
                ):
                    source.take(param_rows, out=views[name][:rs], mode="clip")
        buffer.lists["q_lens"] = plan.counts
        buffer.lists["kv_lens"] = kv_lens
        counts = buffer.counts
        counts[0], counts[1], counts[2] = t, bs, rs
        counts[3] = counts[4] = counts[5] = 0
        key = StepKey(rs > 0, greedy, 0, -1, -1)
        if special:
            key = self._special(plan, buffer, special, key)
        self._model.fill(plan, buffer)
        return key

    def _several_rows(
        self, plan: Plan, b: int, t: int, logit_rows: list[int], param_rows: list[int], draws: list[float]
    ) -> bool:
        """Rows of one item that has more than one, or only scored ones. Returns whether all are greedy."""
        seq, n_rows, first = plan.seqs[b], plan.rows[b], plan.first_row[b]
        sampled = plan.drafts[b] + 1 if plan.samples[b] else 0
        scored = n_rows - sampled
        logit_rows.extend(range(t + first, t + first + n_rows))
        param_rows.extend([self._plain] * scored + [seq.row] * sampled)
        draws.extend([0.0] * scored)
        if self._greedy[seq.row]:
            draws.extend([0.0] * sampled)
            return True
        position = len(seq.tokens)
        draws.extend(self._uniform(seq, position + j) for j in range(sampled))
        return sampled == 0

    def _special(self, plan: Plan, buffer: HostBuffer, special: list[tuple[int, int]], key: StepKey) -> StepKey:
        """Edits, log-probabilities and prompt scores of the items (b, first logit row) that have any."""
        lp_rows: list[int] = []
        score_rows: list[int] = []
        score_ids: list[int] = []
        edits: list[tuple[int, Any]] = []
        top = score_top = -1
        for b, r in special:
            seq = plan.seqs[b]
            sampled = plan.drafts[b] + 1 if plan.samples[b] else 0
            scored = plan.rows[b] - sampled
            if scored:
                at = plan.starts[b] + plan.first_row[b]
                score_rows.extend(range(r, r + scored))
                score_ids.extend(seq.tokens[at + 1 : at + 1 + scored])
                score_top = max(score_top, seq.params.prompt_logprobs or 0)
            if sampled and seq.params.logprobs is not None:
                lp_rows.extend(range(r + scored, r + scored + sampled))
                top = max(top, seq.params.logprobs)
            if sampled and seq.edits is not None:
                drafts = seq.drafts[: plan.drafts[b]]
                output_len = len(seq.tokens) - seq.prompt_len
                for j, entry in enumerate(seq.edits.rows(output_len, drafts)):
                    edits.append((r + scored + j, entry))
        views, counts = buffer.views, buffer.counts
        if lp_rows:
            views["lp_rows"][: len(lp_rows)] = lp_rows
        if score_rows:
            views["score_rows"][: len(score_rows)] = score_rows
            views["score_ids"][: len(score_ids)] = score_ids
        counts[3], counts[4] = len(lp_rows), len(score_rows)
        capacity = self._write_edits(buffer, edits) if edits else 0
        return StepKey(key.head, key.greedy, capacity, _round_top(top), _round_top(score_top))

    @staticmethod
    def _write_edits(buffer: HostBuffer, edits: list[tuple[int, Any]]) -> int:
        total = sum(len(ids) for _, (ids, _, _) in edits)
        if total == 0:
            return 0
        capacity = buffer.ensure("E", total)
        at = 0
        rows, ids = buffer.growing["edit_row"], buffer.growing["edit_id"]
        factors, biases = buffer.growing["edit_factor"], buffer.growing["edit_bias"]
        for row, (token_ids, factor, bias) in edits:
            end = at + len(token_ids)
            rows[at:end] = row
            ids[at:end] = token_ids
            factors[at:end] = factor
            biases[at:end] = bias
            at = end
        buffer.counts[5] = total
        return capacity


def _round_top(n: int) -> int:
    """n rounded up to one of few sizes, so that a device records few variants."""
    return n if n < 0 else next(size for size in _TOP_SIZES if size >= n)
