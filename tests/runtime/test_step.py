"""The inputs of a step against a naive recomputation, and the step function on logits that are given."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from device.contract import HostBuffer, Inputs, InputSpec, KVCache, KVSpec, Tensor
from device.cpu import CpuDevice
from runtime.scheduler import Limits, Plan
from runtime.step import COUNTS, StepInputs, StepKey, step_function, step_layout
from runtime.uniforms import uniforms
from tests.support.edits import edited
from tests.support.scheduling import World, limits

WIDE = 12
"""Vocabulary of the model; the tokens of ``World`` are its first ones."""


class Bare:
    """A model without inputs of its own. ``table`` [T, V]: the logits after each token of the step."""

    vocab_size = WIDE

    def __init__(self) -> None:
        self.filled: list[Plan] = []
        self.table: Any = None

    def kv_spec(self, dtype: str) -> KVSpec:
        return KVSpec((), dtype)

    def bind_kv(self, kv: KVCache) -> None:
        return

    def extra_inputs(self, limits: Limits) -> Iterable[InputSpec]:
        return ()

    def fill(self, plan: Plan, buffer: HostBuffer) -> None:
        self.filled.append(plan)

    def hidden(self, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
        return self.table, None

    def logits(self, inputs: Inputs, x: Tensor, residual: Tensor | None, rows: Tensor) -> Tensor:
        logits: Tensor = inputs.ops.gather_rows(x, rows)
        return logits


# ---------------------------------------------------------------- inputs


@dataclass
class Naive:
    """What a plan should become, token by token and row by row."""

    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    q_start: list[int] = field(default_factory=lambda: [0])
    seq_lens: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    params: list[tuple[float, int, float, float]] = field(default_factory=list)
    uniforms: list[float] = field(default_factory=list)
    lp_rows: list[int] = field(default_factory=list)
    score_rows: list[int] = field(default_factory=list)
    score_ids: list[int] = field(default_factory=list)
    logprobs: int = -1
    prompt_logprobs: int = -1
    edited_rows: list[tuple[int, Any]] = field(default_factory=list)


def naive(plan: Plan, block_size: int, logits: np.ndarray) -> Naive:
    n = Naive()
    for at, seq in enumerate(plan.seqs):
        drafts = seq.drafts[: plan.drafts[at]]
        text = seq.tokens + drafts
        start, count = plan.starts[at], plan.counts[at]
        sampled_from = len(seq.tokens) - 1 if plan.samples[at] else len(text)
        p = seq.params
        for position in range(start, start + count):
            n.ids.append(text[position])
            n.positions.append(position)
            n.slots.append(seq.blocks[position // block_size] * block_size + position % block_size)
            row = len(n.rows)
            scores = p.prompt_logprobs is not None and seq.scored <= position < seq.prompt_len - 1
            if scores:
                n.score_rows.append(row)
                n.score_ids.append(seq.tokens[position + 1])
                n.prompt_logprobs = max(n.prompt_logprobs, p.prompt_logprobs or 0)
                n.params.append((0.0, 0, 1.0, 0.0))
                n.uniforms.append(0.0)
            elif position >= sampled_from:
                n.params.append((p.temperature, p.top_k, p.top_p, p.min_p))
                draw = float(uniforms(seq.seed, seq.index, position + 1, 1)[0]) if p.temperature else 0.0
                n.uniforms.append(draw)
                if p.logprobs is not None:
                    n.lp_rows.append(row)
                    n.logprobs = max(n.logprobs, p.logprobs)
                if seq.edits is not None:
                    output = text[seq.prompt_len : position + 1]
                    prompt = text[: seq.prompt_len]
                    n.edited_rows.append((row, edited(logits[row], p, prompt, output, seq.stop_ids)))
            if scores or position >= sampled_from:
                n.rows.append(len(n.ids) - 1)
        n.q_start.append(len(n.ids))
        n.seq_lens.append(start + count)
    return n


def poison(buffer: HostBuffer) -> None:
    """What an earlier step left must not matter. (The first entry of q_start is 0 for ever.)"""
    for array in [*buffer.views.values(), *buffer.growing.values()]:
        array[:] = -77 if array.dtype == np.int32 else np.nan
    buffer.views["q_start"][0] = 0
    buffer.counts[:] = -77


def check(plan: Plan, buffer: HostBuffer, key: StepKey, world: World) -> None:
    views = buffer.views
    logits = np.random.default_rng(plan.tokens).normal(0, 2, (max(plan.logit_rows, 1), WIDE))
    n = naive(plan, world.pool.block_size, logits)
    for name in ("ids", "positions", "slots", "q_start", "seq_lens", "rows", "lp_rows", "score_rows", "score_ids"):
        expected = getattr(n, name)
        assert views[name][: len(expected)].tolist() == expected, name
    for b, seq in enumerate(plan.seqs):
        assert views["block_table"][b, : len(seq.blocks)].tolist() == seq.blocks
    assert buffer.lists == {"q_lens": list(np.diff(n.q_start)), "kv_lens": n.seq_lens}
    size = int(buffer.counts[COUNTS.index("E")])
    assert buffer.counts.tolist() == [
        len(n.ids), len(plan.seqs), len(n.rows), len(n.lp_rows), len(n.score_rows), size,
    ]  # fmt: skip
    assert key.head == bool(n.rows)
    assert key.greedy == all(params[0] == 0 for params in n.params)
    if not key.greedy:
        names = ("temperature", "top_k", "top_p", "min_p")
        found = [tuple(views[name][i].item() for name in names) for i in range(len(n.rows))]
        assert np.allclose(found, n.params)
        drawn = [views["uniforms"][i].item() for i, params in enumerate(n.params) if params[0]]
        assert drawn == [u for u, params in zip(n.uniforms, n.params, strict=True) if params[0]]
    for wanted, got in ((n.logprobs, key.logprobs), (n.prompt_logprobs, key.prompt_logprobs)):
        assert got == (-1 if wanted < 0 else min(k for k in (0, 1, 2, 5, 10, 20) if k >= wanted))
    _check_edits(buffer, key, size, logits, n)


def _check_edits(buffer: HostBuffer, key: StepKey, size: int, logits: np.ndarray, n: Naive) -> None:
    row, token, factor, bias = (buffer.growing[f"edit_{part}"] for part in ("row", "id", "factor", "bias"))
    assert key.edits == (len(row) if size else 0) and key.edits >= size
    assert len({(r, t) for r, t in zip(row[:size].tolist(), token[:size].tolist(), strict=True)}) == size
    z = logits.copy()
    for i in range(size):
        old = z[row[i], token[i]]
        z[row[i], token[i]] = (old / factor[i] if old > 0 else old * factor[i]) + bias[i]
    expected = logits.copy()
    for at, values in n.edited_rows:
        expected[at] = values
    np.testing.assert_allclose(z, expected, rtol=1e-5, atol=1e-5)


@st.composite
def sampling(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(st.integers(0, 4))
    params: dict[str, Any] = {"temperature": draw(st.sampled_from([0.0, 0.7]))}
    if kind == 1:
        params.update(top_k=3, top_p=0.5, min_p=0.125, seed=draw(st.integers(0, 2**64 - 1)), temperature=1.5)
    if kind == 2:
        params["logprobs"] = draw(st.sampled_from([0, 2, 3, 20]))
    if kind == 3:
        params.update(
            presence_penalty=0.5, frequency_penalty=draw(st.sampled_from([0.0, 0.25])),
            repetition_penalty=draw(st.sampled_from([1.0, 1.5])), min_tokens=draw(st.integers(0, 3)),
            logit_bias=draw(st.sampled_from([{}, {3: 2.0, 9: -5.0}])), logprobs=draw(st.sampled_from([None, 1])),
            stop_token_ids=draw(st.sampled_from([(), (4, 11)])),
        )  # fmt: skip
    if kind == 4:
        params.update(prompt_logprobs=draw(st.sampled_from([0, 1, 4])), logprobs=draw(st.sampled_from([None, 6])))
    return params


items = st.tuples(
    st.lists(st.integers(0, 4), min_size=1, max_size=14), sampling(), st.integers(1, 9), st.integers(0, 3)
)


@settings(max_examples=250, suppress_health_check=list(HealthCheck))
@given(
    block_size=st.sampled_from([1, 2, 4, 16]),
    spare=st.sampled_from([0, 3, 40]),
    tokens=st.sampled_from([3, 8, 40]),
    rows=st.sampled_from([1, 3, 40]),
    chunk=st.sampled_from([2, 40]),
    seed=st.integers(0, 2**16),
    many=st.lists(items, min_size=1, max_size=6),
)
def test_buffers_hold_what_a_naive_reading_of_the_plan_says(
    block_size: int, spare: int, tokens: int, rows: int, chunk: int, seed: int, many: list[Any]
) -> None:
    made = limits(max_seqs=4, max_tokens=tokens, max_rows=rows, max_len=24, chunk=chunk)
    world = World(-(-24 // block_size) + spare, block_size, made, seed, drafting=True)
    model = Bare()
    filler = StepInputs(world.scheduler, model)
    buffers = [HostBuffer(step_layout(model, made, block_size)) for _ in range(2)]
    for at, (prompt, params, wanted, index) in enumerate(many):
        seq = world.submit(prompt, wanted, **params)
        seq.index = index
        seq.seed ^= at
    for _ in range(400):
        if not world.live():
            return
        plan = world.plan()
        buffer = buffers.pop(0)
        poison(buffer)
        key = filler.fill(plan, buffer)
        assert model.filled[-1] is plan
        check(plan, buffer, key, world)
        buffers.append(buffer)
        world.compute_and_update(plan)
    raise AssertionError("no end in 400 steps")


def _filled(world: World) -> tuple[Plan, HostBuffer, StepKey]:
    model = Bare()
    buffer = HostBuffer(step_layout(model, world.limits, world.pool.block_size))
    poison(buffer)
    plan = world.plan()
    return plan, buffer, StepInputs(world.scheduler, model).fill(plan, buffer)


def test_a_long_edit_list_makes_the_buffer_grow_by_doubling() -> None:
    world = World(40, 4, limits())
    for n in range(3):
        world.submit([1, n], 4, logit_bias={token: 1.0 for token in range(5000, 5100 + n)})
    _, buffer, key = _filled(world)
    size = 300 + 1 + 2
    assert buffer.counts[COUNTS.index("E")] == size and key.edits == 512
    assert buffer.growing["edit_row"][:size].tolist() == [0] * 100 + [1] * 101 + [2] * 102
    assert buffer.growing["edit_id"][200] == 5100
    assert (buffer.growing["edit_bias"][:size] == 1.0).all() and (buffer.growing["edit_factor"][:size] == 1.0).all()


def test_a_request_whose_list_is_still_empty_edits_nothing() -> None:
    world = World(40, 4, limits())
    world.submit([1, 2], 4, presence_penalty=1.0)
    _, _, key = _filled(world)
    assert key.edits == 0


def test_a_step_without_rows_says_so() -> None:
    world = World(40, 4, limits(chunk=2))
    world.submit([1, 2, 3], 4, temperature=0.5)
    _, buffer, key = _filled(world)
    assert key == StepKey(False, True, 0, -1, -1) and buffer.counts.tolist() == [2, 1, 0, 0, 0, 0]


def test_what_stood_in_a_row_before_does_not_come_through() -> None:
    """A new sequence in the row of one that has ended: other parameters, another seed."""
    world = World(40, 4, limits(max_seqs=1))
    model = Bare()
    filler = StepInputs(world.scheduler, model)
    buffer = HostBuffer(step_layout(model, world.limits, 4))
    for n in range(3):
        world.submit([1, 2], 2, temperature=0.5 + n, seed=n, top_k=n)
        while world.live():
            plan = world.plan()
            poison(buffer)
            check(plan, buffer, filler.fill(plan, buffer), world)
            world.compute_and_update(plan)


def test_the_layout_bounds_every_input_by_the_limits() -> None:
    made = limits(max_seqs=3, max_tokens=10, max_rows=7, max_len=33)
    layout = step_layout(Bare(), made, 16)
    assert [layout.bound(count) for count in ("T", "B", "R", "L", "P")] == [10, 3, 7, 7, 7]
    shapes = {name: view.shape for name, view in HostBuffer(layout).views.items()}
    assert shapes["block_table"] == (3, 3) and shapes["q_start"] == (4,)


# ---------------------------------------------------------------- the program


def run(world: World, table: np.ndarray, sample_width: int = WIDE) -> tuple[Plan, dict[str, np.ndarray]]:
    """Outputs of the next step when the logits after its tokens are ``table``."""
    device = CpuDevice("float64")
    model = Bare()
    plan = world.plan()
    model.table = device.tensor(table[: plan.tokens], "float64")
    program = device.program(step_function(model, sample_width), step_layout(model, world.limits, 4))
    buffer = program.buffer()
    key = StepInputs(world.scheduler, model).fill(plan, buffer)
    outputs = program.launch(buffer, key).wait()
    device.close()
    return plan, outputs


def log_softmax(rows: np.ndarray) -> np.ndarray:
    shifted = rows - rows.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))


@pytest.fixture
def table() -> np.ndarray:
    return np.random.default_rng(3).normal(0, 2, (16, WIDE))


def test_logprobs_are_those_of_the_model_before_anything_is_edited(table: np.ndarray) -> None:
    world = World(40, 4, limits())
    best, second = np.argsort(-table[2])[:2].tolist()
    world.submit([1, 2, 3], 4, temperature=0.0, logprobs=2, logit_bias={best: -100.0})
    _, out = run(world, table)
    assert out["ids"].tolist() == [second]
    expected = log_softmax(table[2])
    assert out["lp_chosen"][0] == pytest.approx(expected[second]) and out["lp_rank"].tolist() == [2]
    assert out["lp_top_ids"][0].tolist() == [best, second]
    assert out["lp_top"][0].tolist() == pytest.approx([expected[best], expected[second]])


def test_prompt_scores_stand_beside_sampled_rows(table: np.ndarray) -> None:
    world = World(40, 4, limits())
    world.submit([1, 2, 3], 4, temperature=0.0, presence_penalty=0.5)
    world.submit([0, 3, 1, 4], 4, temperature=0.0, prompt_logprobs=1)
    _, out = run(world, table)
    expected = log_softmax(table)
    assert out["score_chosen"].tolist() == pytest.approx([expected[3, 3], expected[4, 1], expected[5, 4]])
    assert out["score_top_ids"][:, 0].tolist() == [table[i].argmax() for i in (3, 4, 5)]
    assert out["ids"][0] == table[2].argmax() and out["ids"][-1] == table[6].argmax()
    assert "lp_chosen" not in out


def test_padding_of_the_vocabulary_is_scored_and_never_drawn(table: np.ndarray) -> None:
    table[2, 10] = 50.0
    world = World(40, 4, limits())
    world.submit([1, 2, 3], 4, temperature=0.0, logprobs=1, presence_penalty=0.5)
    _, out = run(world, table, sample_width=10)
    assert out["ids"].tolist() == [table[2, :10].argmax()]
    assert out["lp_top_ids"].tolist() == [[10]] and out["lp_rank"].tolist() == [2]


def test_a_row_of_nan_is_told_by_its_id_alone(table: np.ndarray) -> None:
    table[0] = np.nan
    world = World(40, 4, limits())
    world.submit([1], 4, temperature=0.0), world.submit([2], 4, temperature=0.0)
    _, out = run(world, table)
    assert out["ids"].tolist() == [-1, table[1].argmax()]


def test_a_step_without_rows_gives_nothing(table: np.ndarray) -> None:
    world = World(40, 4, limits(chunk=2))
    world.submit([1, 2, 3], 4)
    assert run(world, table)[1] == {}
