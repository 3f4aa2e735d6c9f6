"""The recorder: what a step function becomes, and that its replay is the step function."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from device.binding import OpTable, bind
from device.contract import Inputs, InputSpec, Layout
from device.cpu import HostTensor, portable_implementation
from device.ops import OPS, SampleParams
from device.recorder import Call, MetaRef, Recording, RecTensor, Ref, View, record, refs
from device.weights import float_weight
from tests.support.toy_device import make_toy_device

TABLE = bind([portable_implementation("float64")]).table
HIDDEN, BOUND = 12, 8

LAYOUT = Layout(
    ("T", "R"),
    (
        InputSpec("x", "float64", "T", BOUND, tail=(HIDDEN,)),
        InputSpec("ids", "int32", "T", BOUND),
        InputSpec("rows", "int32", "R", BOUND, pad=-1),
    ),
)
ATTENTION = Layout(
    ("T", "B"),
    (
        InputSpec("qkv", "float64", "T", 4, tail=(16,)),
        InputSpec("positions", "int32", "T", 4),
        InputSpec("slots", "int32", "T", 4, pad=-1),
        InputSpec("q_start", "int32", "B", 2, extra=1, pad="last"),
        InputSpec("seq_lens", "int32", "B", 2),
        InputSpec("block_table", "int32", "B", 2, tail=(3,)),
    ),
)
BUCKET = {"T": 4, "R": 2}


def packed(n: int = HIDDEN, k: int = HIDDEN, seed: int = 0) -> Any:
    """A weight of the portable implementation."""
    values = np.random.default_rng(seed).normal(size=(n, k))
    return TABLE.pack_weight([float_weight(values, "float64")], frozenset({"linear", "embed"}))


def make(fn: Callable[..., Any], layout: Layout = LAYOUT, **settings: Any) -> Recording:
    """A recording of fn(inputs), which may return one tensor, in BUCKET."""

    def step(inputs: Inputs, key: Any) -> Mapping[str, Any]:
        out = fn(inputs)
        return out if isinstance(out, dict) else {} if out is None else {"out": out}

    return record(step, layout, None, {"T": 4, "R": 2, "B": 2}, **settings)


def ops_of(recording: Recording) -> list[str]:
    return [step.op if isinstance(step, Call) else step.kind for step in recording.steps]


# ---------------------------------------------------------------- the list


def test_a_step_is_a_flat_list_of_calls_with_numbered_operands() -> None:
    weight = packed(20)
    norm = HostTensor(np.ones(HIDDEN))

    def step(inputs: Inputs) -> Any:
        ops = inputs.ops
        return ops.linear(ops.rms_norm(inputs["x"], norm, 1e-5), weight, None, out="float32")

    recording = make(step)
    x = recording.inputs["x"]
    first, second = recording.steps
    assert isinstance(first, Call) and isinstance(second, Call)
    assert (first.op, first.args, dict(first.kwargs)) == ("rms_norm", (Ref(x), norm, 1e-5), {})
    assert second.args == (Ref(first.outputs[0]), weight, None) and dict(second.kwargs) == {"out": "float32"}
    assert recording.outputs == {"out": second.outputs[0]}
    out = recording.values[second.outputs[0]]
    assert (out.shape, out.dtype, out.count) == ((4, 20), "float32", "T")
    assert (recording.calls(), recording.calls("linear"), recording.calls("add")) == (2, 1, 0)


def test_inputs_have_the_sizes_of_the_bucket_and_know_their_count() -> None:
    recording = make(lambda inputs: None, ATTENTION)
    said = {name: recording.values[i] for name, i in recording.inputs.items()}
    assert {name: (v.shape, v.dtype, v.count) for name, v in said.items()} == {
        "qkv": ((4, 16), "float64", "T"),
        "positions": ((4,), "int32", "T"),
        "slots": ((4,), "int32", "T"),
        "q_start": ((3,), "int32", "B"),
        "seq_lens": ((2,), "int32", "B"),
        "block_table": ((2, 3), "int32", "B"),
        "counts": ((2,), "int32", None),
    }


def test_the_count_of_rows_is_followed_through_the_ops() -> None:
    def step(inputs: Inputs) -> Any:
        ops = inputs.ops
        picked = ops.gather_rows(ops.add(inputs["x"], inputs["x"]), inputs["rows"])
        chosen, rank, top_ids, top = ops.logprobs(picked, ops.gather_rows(inputs["ids"], inputs["rows"]), 3)
        return {"picked": picked, "rank": rank, "top": top, "x": inputs["x"]}

    recording = make(step)
    said = {name: recording.values[i] for name, i in recording.outputs.items()}
    assert {name: (v.shape, v.dtype, v.count) for name, v in said.items()} == {
        "picked": ((2, HIDDEN), "float64", "R"),
        "rank": ((2,), "int32", "R"),
        "top": ((2, 3), "float64", "R"),
        "x": ((4, HIDDEN), "float64", "T"),
    }


def test_attention_metadata_and_sampling_parameters_are_operands_too() -> None:
    layer = SimpleNamespace(impl=None)

    def step(inputs: Inputs) -> Any:
        q, _, _ = inputs.ops.split_qkv(inputs["qkv"], 2, 1, 4)
        out = inputs.ops.paged_attention(q, layer, inputs.meta, 0.5, window=7)
        part = inputs["positions"]
        return inputs.ops.sample(out, SampleParams(part, part, part, part), part)

    recording = make(step, ATTENTION)
    attention, sample = (s for s in recording.steps if isinstance(s, Call) and s.op in ("paged_attention", "sample"))
    names = ("q_start", "seq_lens", "block_table", "slots", "counts")
    assert attention.args[2] == MetaRef({name: recording.inputs[name] for name in names})
    assert attention.args[1] is layer and dict(attention.kwargs) == {"window": 7}
    assert sample.args[1] == SampleParams(*[Ref(recording.inputs["positions"])] * 4)
    assert refs(attention.args[2]) == [recording.inputs[name] for name in names]
    assert refs(sample.args[1]) == [recording.inputs["positions"]] * 4 and refs(0.5) == []


def test_a_step_without_attention_inputs_has_no_metadata() -> None:
    with pytest.raises(KeyError, match="no attention inputs"):
        make(lambda inputs: inputs.meta)


@pytest.mark.parametrize("op", [name for name, decl in OPS.items() if not decl.step])
def test_ops_outside_a_step_are_refused_in_one(op: str) -> None:
    with pytest.raises(ValueError, match=f"{op} cannot be called inside a step program"):
        make(lambda inputs: getattr(inputs.ops, op)(None, None))


def test_a_tensor_of_an_earlier_step_is_refused() -> None:
    kept: list[Any] = []

    def step(inputs: Inputs) -> Any:
        kept.append(inputs["x"])
        return inputs.ops.add(kept[0], inputs["x"])

    make(step)
    with pytest.raises(ValueError, match="of an earlier step"):
        make(step)
    with pytest.raises(ValueError, match="of an earlier step"):
        make(lambda inputs: kept[0])
    with pytest.raises(ValueError, match="of an earlier step"):
        make(lambda inputs: inputs.ops.sample(inputs["x"], SampleParams(*kept[:1] * 4), inputs["x"]))


# ---------------------------------------------------------------- views, aliases, last uses


def test_views_keep_the_first_dimension() -> None:
    recording = make(lambda inputs: inputs["x"][:, 2:10].reshape(4, 2, -1)[:, :, 1:3])
    x = recording.inputs["x"]
    one, two, three = recording.steps
    assert isinstance(one, View) and isinstance(two, View) and isinstance(three, View)
    assert (one.kind, one.source, one.spec) == ("slice", x, (slice(2, 10),))
    assert (two.kind, two.source, two.spec) == ("reshape", one.output, (2, 4))
    assert (three.kind, three.source, three.spec) == ("slice", two.output, (slice(None), slice(1, 3)))
    assert recording.values[three.output].shape == (4, 2, 2) and recording.values[three.output].count == "T"
    assert {recording.base[step.output] for step in (one, two, three)} == {x}


@pytest.mark.parametrize("shape", [(-1, 3, 4), (4, -1, 4), (4, 3, 4), (4, 12), (4, 1, 12), (4, -1)])
def test_reshapes_that_are_possible(shape: tuple[int, ...]) -> None:
    recording = make(lambda inputs: inputs["x"].reshape(*shape))
    assert recording.values[recording.outputs["out"]].shape == np.empty((4, HIDDEN)).reshape(shape).shape


@pytest.mark.parametrize("shape", [(12, 4), (2, 24), (48,), (4, 5), (4, 5, -1), (-1, 11), (1, 4, 12)])
def test_reshapes_that_are_not(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="keeps its first dimension"):
        make(lambda inputs: inputs["x"].reshape(*shape))


@pytest.mark.parametrize(
    ("index", "text"),
    [
        (np.s_[1:], "rows of a recorded tensor cannot be sliced"),
        (np.s_[:3, :], "rows of a recorded tensor cannot be sliced"),
        (np.s_[:, ::2], "step 1"),
        (np.s_[:, 3], "slices"),
        (np.s_[2], "slices"),
        (np.s_[:, :, :], "slices"),
    ],
)
def test_slices_that_are_not_possible(index: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make(lambda inputs: inputs["x"][index])


@pytest.mark.parametrize("index", [np.s_[:], np.s_[:, :], np.s_[:, -5:], np.s_[:, 3:99], np.s_[:, 9:4]])
def test_slices_have_the_shape_that_numpy_gives(index: Any) -> None:
    recording = make(lambda inputs: inputs["x"][index])
    assert recording.values[recording.outputs["out"]].shape == np.empty((4, HIDDEN))[index].shape


def test_outputs_that_may_share_memory_have_the_base_of_their_operand() -> None:
    weight = packed()

    def step(inputs: Inputs) -> Any:
        ops = inputs.ops
        q, k, v = ops.split_qkv(ops.all_reduce(inputs["qkv"]), 2, 1, 4)
        return {"q": q, "k": k, "v": v, "other": ops.add(inputs["qkv"], inputs["qkv"])}

    recording = make(step, ATTENTION)
    base = {name: recording.base[i] for name, i in recording.outputs.items()}
    assert base["q"] == base["k"] == base["v"] == recording.inputs["qkv"]
    assert base["other"] == recording.outputs["other"]

    fused = make(
        lambda inputs: inputs.ops.norm_linear(inputs["x"], None, None, 1e-5, weight)[1], fused=lambda op, carrier: True
    )
    assert fused.base[fused.outputs["out"]] == fused.inputs["x"]


def test_memory_is_free_after_the_last_use_of_any_view_on_it() -> None:
    def step(inputs: Inputs) -> Any:
        ops = inputs.ops
        a = ops.add(inputs["x"], inputs["x"])  # step 0
        left, right = a[:, :6], a[:, 6:]  # steps 1, 2
        b = ops.add(left, left)  # step 3
        ops.gather_rows(b, inputs["rows"])  # step 4: nobody looks at the result
        return ops.add(b, right)  # step 5

    recording = make(step)
    a, left, right, b, unused, out = (
        step.output if isinstance(step, View) else step.outputs[0] for step in recording.steps
    )
    last = recording.last_use
    assert last[a] == last[left] == last[right] == 5
    assert last[b] == 5 and last[unused] == 4
    assert last[out] == len(recording.steps)
    assert last[recording.inputs["x"]] == last[recording.inputs["ids"]] == len(recording.steps)


def test_what_an_op_writes_in_place_counts_as_a_use() -> None:
    def step(inputs: Inputs) -> Any:
        y = inputs.ops.add(inputs["x"], inputs["x"])
        z = inputs.ops.add(y, y)
        inputs.ops.mask_logits(y[:, :4], inputs["ids"])
        return z

    recording = make(step)
    first = recording.steps[0]
    assert isinstance(first, Call)
    assert recording.last_use[first.outputs[0]] == len(recording.steps) - 1


@dataclass
class Watched:
    """A tensor whose memory tells whether it is alive."""

    array: Any

    @property
    def shape(self) -> tuple[int, ...]:
        shape: tuple[int, ...] = self.array.shape
        return shape


def test_a_replay_frees_each_value_after_its_last_use() -> None:
    made: list[weakref.ref[Watched]] = []
    alive: list[int] = []

    def add(x: Watched, y: Watched) -> Watched:
        alive.append(sum(ref() is not None for ref in made))
        out = Watched(x.array + y.array)
        made.append(weakref.ref(out))
        return out

    table = OpTable({name: add for name in OPS})

    def chain(inputs: Inputs) -> Any:
        x = inputs["x"]
        for _ in range(5):
            x = inputs.ops.add(x, x)
        return x

    recording = make(chain)
    tensors = {name: Watched(np.ones(2)) for name in recording.inputs}
    out = recording.run(table, tensors, {})["out"]
    assert out.array.tolist() == [32.0, 32.0]
    assert alive == [0, 1, 1, 1, 1]


# ---------------------------------------------------------------- composites


def calls_with(fused: Callable[[str, Any], bool] | None) -> list[str]:
    weight, other, layer = packed(24), packed(), SimpleNamespace(impl=None)

    def step(inputs: Inputs) -> Any:
        ops, norm = inputs.ops, HostTensor(np.ones(16))
        x, residual = ops.norm_linear(inputs["qkv"], None, norm, 1e-5, weight)
        x = ops.act_linear(x, "silu", other)
        y, _ = ops.norm_linear(x, residual, norm, 1e-5, weight)
        q = ops.qkv_rope_store(
            inputs["qkv"], (2, 1, 4), norm, None, 1e-5, inputs["positions"], norm, layer, inputs.meta.slots
        )
        return {"y": y, "q": q}

    return ops_of(make(step, ATTENTION, fused=fused))


def test_composites_are_recorded_as_plain_ops_unless_they_are_fused() -> None:
    plain = [
        "rms_norm", "linear", "gated_act", "linear", "add_rms_norm", "linear", "split_qkv", "rms_norm", "rope",
        "store_kv",
    ]  # fmt: skip
    assert calls_with(None) == plain
    assert calls_with(lambda op, carrier: False) == plain
    assert calls_with(lambda op, carrier: True) == ["norm_linear", "act_linear", "norm_linear", "qkv_rope_store"]


def test_fusion_is_asked_with_the_operand_that_decides() -> None:
    asked: list[tuple[str, tuple[int, ...] | None]] = []

    def fused(op: str, carrier: Any) -> bool:
        asked.append((op, getattr(carrier, "shape", None)))
        return op == "norm_linear"

    assert calls_with(fused)[:4] == ["norm_linear", "gated_act", "linear", "norm_linear"]
    assert asked == [("norm_linear", (24, 12)), ("act_linear", (12, 12)), ("norm_linear", (24, 12)),
                     ("qkv_rope_store", None)]  # fmt: skip


# ---------------------------------------------------------------- replay


class Constants:
    """What the steps below compute with, packed by one device."""

    def __init__(self, pack: Callable[..., Any], tensor: Callable[..., Any]) -> None:
        def weight(n: int, k: int) -> Any:
            values = np.random.default_rng(n * k).normal(size=(n, k)) / k**0.5
            return pack([float_weight(values, "float64")], frozenset({"linear", "embed"}))

        self.wide, self.table, self.head = weight(2 * HIDDEN, HIDDEN), weight(7, HIDDEN), weight(HIDDEN, HIDDEN // 3)
        self.norm = tensor(np.linspace(0.5, 1.5, HIDDEN))


def steps_of(plan: list[tuple[int, int, int]], c: Constants) -> Callable[[Inputs, Any], dict[str, Any]]:
    """A step function from numbers: each triple picks an op or view, and the earlier values [T, HIDDEN] it takes."""

    def step(inputs: Inputs, key: Any) -> dict[str, Any]:
        ops = inputs.ops
        values = [inputs["x"], ops.embed(inputs["ids"], c.table, 2.0)]
        for kind, i, j in plan:
            x, y = values[i % len(values)], values[j % len(values)]
            if kind == 0:
                values.append(ops.add(x, y))
            elif kind == 1:
                values.extend(ops.add_rms_norm(x, y, c.norm, 1e-3))
            elif kind == 2:
                gate_up, residual = ops.norm_linear(x, y if i % 2 else None, c.norm, 1e-3, c.wide)
                values.extend((ops.gated_act(gate_up, "silu"), residual))
            elif kind == 3:
                both = ops.linear(x, c.wide)
                values.extend((both[:, :HIDDEN], both[:, HIDDEN:]))
            elif kind == 4:
                _, k, _ = ops.split_qkv(ops.all_reduce(x), 1, 1, HIDDEN // 3)
                values.append(ops.add(ops.linear(k.reshape(-1, HIDDEN // 3), c.head), y))
            else:
                heads = [t.reshape(-1, 3, HIDDEN // 3) for t in (x, y)]
                values.append(ops.add(*heads).reshape(x.shape[0], HIDDEN))
        last = ops.gather_rows(values[-1], inputs["rows"])
        return {"last": last, "best": ops.sample(last, None, None), "all": values[len(values) // 2]}

    return step


PLANS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=12)
ON_HOST = Constants(TABLE.pack_weight, HostTensor)


def host_inputs(rows: int, picked: int, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "x": rng.normal(size=(rows, HIDDEN)),
        "ids": rng.integers(0, 7, rows).astype(np.int32),
        "rows": rng.integers(0, rows, picked).astype(np.int32),
    }


def directly(plan: Any, host: Mapping[str, Any]) -> dict[str, Any]:
    """The step call by call, on tensors without padding."""
    tensors = {name: HostTensor(array) for name, array in host.items()}
    outputs = steps_of(plan, ON_HOST)(Inputs(TABLE, tensors, {}), None)
    return {name: t.array for name, t in outputs.items()}


@given(PLANS, st.integers(1, BOUND), st.integers(1, BOUND), st.integers(0, 99))
@settings(max_examples=60)
def test_a_replay_on_padded_inputs_is_the_step_function(plan: Any, rows: int, picked: int, seed: int) -> None:
    host = host_inputs(rows, picked, seed)
    recording = record(steps_of(plan, ON_HOST), LAYOUT, None, {"T": BOUND, "R": BOUND})
    tensors = {"counts": HostTensor(np.array([rows, picked], np.int32))}
    for name, array in host.items():
        rest = np.full((BOUND - array.shape[0], *array.shape[1:]), -1 if name == "rows" else 0, array.dtype)
        tensors[name] = HostTensor(np.concatenate((array, rest)))
    out = recording.run(TABLE, tensors, {"q_lens": [], "kv_lens": []})
    for name, value in directly(plan, host).items():
        live = rows if recording.values[recording.outputs[name]].count == "T" else picked
        np.testing.assert_allclose(out[name].array[:live], value, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("fusion", [True, False])
def test_replays_on_the_toy_device_are_the_step_function(fusion: bool) -> None:
    """The toy replays the list itself, poisons each value after its last use and checks who shares memory."""
    toy = make_toy_device(fusion=fusion, jitter=1e-4)
    on_toy = Constants(toy.ops.pack_weight, toy.tensor)

    @given(PLANS, st.lists(st.tuples(st.integers(1, BOUND), st.integers(1, BOUND)), min_size=1, max_size=3))
    @settings(max_examples=40)
    def check(plan: Any, sizes: list[tuple[int, int]]) -> None:
        program = toy.program(steps_of(plan, on_toy), LAYOUT)
        buffer = program.buffer()
        for seed, (rows, picked) in enumerate(sizes):
            host = host_inputs(rows, picked, seed)
            buffer.counts[:] = rows, picked
            for name, array in host.items():
                buffer.views[name][: array.shape[0]] = array
            out = program.launch(buffer, None).wait()
            for name, value in directly(plan, host).items():
                np.testing.assert_allclose(out[name], value, rtol=1e-9, atol=1e-9)

    check()
    assert (toy.calls["norm_linear"] > 0) == fusion
    toy.close()


def test_a_recorded_tensor_is_opaque() -> None:
    def step(inputs: Inputs) -> Any:
        assert isinstance(inputs["x"], RecTensor)
        with pytest.raises(TypeError):
            inputs["x"] + inputs["x"]  # type: ignore[operator]
        return None

    make(step)
