"""Step buffers: layout, padding, growth. Capabilities."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from device.contract import Caps, Device, HostBuffer, InputSpec, KVLayerSpec, KVSpec, Layout, SingleRank, World
from device.dtypes import numpy_dtype
from device.errors import ConfigError

LAYOUT = Layout(
    ("T", "B", "R", "E"),
    (
        InputSpec("ids", "int32", "T", 8),
        InputSpec("slots", "int32", "T", 8, pad=-1),
        InputSpec("q_start", "int32", "B", 3, extra=1, pad="last"),
        InputSpec("block_table", "int32", "B", 3, tail=(5,)),
        InputSpec("top_p", "float32", "R", 4, pad=1.0),
        InputSpec("edit_row", "int32", "E", 2, pad=-1, grows=True),
        InputSpec("edit_bias", "float32", "E", 2, grows=True),
        InputSpec("bitmask", "int32", "R", 1, tail=(3,), pad=-1, grows=True),
    ),
)
BUCKET = {"T": 6, "B": 3, "R": 2, "E": 2}


def filled() -> HostBuffer:
    """Every byte behind the live rows is rubbish."""
    buffer = HostBuffer(LAYOUT)
    for spec in LAYOUT.inputs:
        buffer.array(spec.name)[:] = 77
    buffer.counts[:] = 5, 2, 1, 1
    buffer.views["q_start"][:3] = 0, 4, 5
    return buffer


# ---------------------------------------------------------------- layout


def test_fixed_inputs_share_one_allocation_and_growing_ones_have_their_own() -> None:
    sizes: list[int] = []

    def alloc(size: int) -> np.ndarray[Any, Any]:
        sizes.append(size)
        return np.zeros(size, np.uint8)

    buffer = HostBuffer(LAYOUT, alloc)
    assert sorted(sizes) == sorted([buffer.data.nbytes, 8, 8, 12])
    assert set(buffer.views) == {"ids", "slots", "q_start", "block_table", "top_p"}
    for name, view in buffer.views.items():
        assert np.shares_memory(view, buffer.data), name
        at = view.__array_interface__["data"][0] - buffer.data.__array_interface__["data"][0]
        assert at == buffer.offsets[name]
    assert {name: a.shape for name, a in buffer.growing.items()} == {
        "edit_row": (2,),
        "edit_bias": (2,),
        "bitmask": (1, 3),
    }
    assert (buffer.growing["edit_row"] == -1).all() and (buffer.growing["bitmask"] == -1).all()
    buffer.ensure("E", 3)
    assert sizes[-2:] == [16, 16], "growth goes through the device's allocator as well"


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["float32", "float64", "int32", "int8", "bfloat16"]),
            st.integers(1, 9),
            st.lists(st.integers(1, 4), max_size=2),
            st.integers(0, 2),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_views_are_aligned_and_never_overlap(parts: list[tuple[str, int, list[int], int]]) -> None:
    specs = [InputSpec(f"x{i}", t, "T", n, tuple(tail), extra) for i, (t, n, tail, extra) in enumerate(parts)]
    buffer = HostBuffer(Layout(("T", "U"), tuple(specs)))
    buffer.counts[:] = 3, 4
    for i, spec in enumerate(specs):
        view = buffer.views[spec.name]
        assert view.shape == (spec.bound + spec.extra, *spec.tail)
        assert view.dtype == numpy_dtype(spec.dtype)
        assert buffer.offsets[spec.name] % 64 == 0
        view[:] = i + 1
    for i, spec in enumerate(specs):
        assert (buffer.views[spec.name] == i + 1).all()
    assert (buffer.count("T"), buffer.count("U")) == (3, 4)


@pytest.mark.parametrize(
    ("specs", "text"),
    [
        ([InputSpec("x", "int32", "T", 1), InputSpec("x", "int32", "T", 1)], "unique"),
        ([InputSpec("counts", "int32", "T", 1)], "counts"),
        ([InputSpec("x", "int32", "S", 1)], "follows 'S'"),
        ([InputSpec("x", "int32", "T", 0, grows=True)], "at least one row"),
    ],
)
def test_layouts_that_cannot_be(specs: list[InputSpec], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Layout(("T",), tuple(specs))


def test_the_bound_of_a_count_is_the_least_of_its_fixed_inputs() -> None:
    layout = Layout(
        ("T", "E", "N"),
        (
            InputSpec("a", "int32", "T", 9),
            InputSpec("b", "int32", "T", 7),
            InputSpec("c", "int32", "T", 1, grows=True),
            InputSpec("e", "int32", "E", 4, grows=True),
        ),
    )
    assert [layout.bound(c) for c in layout.counts] == [7, 0, 0]


# ---------------------------------------------------------------- padding and growth


def test_padding_fills_from_the_count_to_the_bucket() -> None:
    buffer = filled()
    buffer.pad(BUCKET)
    views = buffer.views
    assert views["ids"].tolist() == [77] * 5 + [0] + [77] * 2
    assert views["slots"].tolist() == [77] * 5 + [-1] + [77] * 2
    assert views["q_start"].tolist() == [0, 4, 5, 5], "the last real entry is that after the last sequence"
    assert (views["block_table"][:2] == 77).all() and not views["block_table"][2].any()
    assert views["top_p"].tolist() == [77, 1, 77, 77]
    assert buffer.growing["edit_row"].tolist() == [77, -1]
    assert buffer.growing["edit_bias"].tolist() == [77, 0]
    assert buffer.counts.tolist() == [5, 2, 1, 1]


def test_padding_a_full_bucket_changes_nothing() -> None:
    buffer = filled()
    buffer.counts[:] = 8, 3, 4, 2
    buffer.ensure("R", 4)
    before = buffer.data.copy(), {n: a.copy() for n, a in buffer.growing.items()}
    buffer.pad({"T": 8, "B": 3, "R": 4, "E": 2})
    np.testing.assert_array_equal(buffer.data, before[0])
    for name, array in buffer.growing.items():
        np.testing.assert_array_equal(array, before[1][name])


def test_padding_an_empty_step_leaves_nothing_of_the_last() -> None:
    buffer = filled()
    buffer.counts[:] = 0
    buffer.views["q_start"][0] = 0
    buffer.pad({"T": 8, "B": 3, "R": 4, "E": 2})
    assert not buffer.views["ids"].any() and not buffer.views["q_start"].any()
    assert (buffer.growing["edit_row"] == -1).all()


def test_inputs_of_a_count_grow_together_by_doubling_and_keep_what_they_hold() -> None:
    buffer = filled()
    buffer.growing["edit_row"][:] = 4, 5
    assert buffer.ensure("E", 2) == 2
    assert buffer.growing["edit_row"].shape == (2,)
    assert buffer.ensure("E", 5) == 8
    assert buffer.growing["edit_row"].tolist() == [4, 5] + [-1] * 6
    assert buffer.growing["edit_bias"].tolist() == [77, 77] + [0] * 6
    assert buffer.ensure("E", 1) == 8, "it never shrinks: the capacity is part of a recording's key"
    assert buffer.array("edit_row") is buffer.growing["edit_row"]
    assert buffer.growing["bitmask"].shape == (1, 3)
    assert buffer.ensure("T", 100) == 0, "nothing that follows T grows"


def test_a_growing_input_of_a_bucketed_count_grows_to_the_bucket() -> None:
    buffer = filled()
    buffer.pad({**BUCKET, "R": 4})
    mask = buffer.growing["bitmask"]
    assert mask.shape == (4, 3)
    assert (mask[0] == 77).all() and (mask[1:] == -1).all()
    buffer.pad({**BUCKET, "R": 2})
    assert buffer.growing["bitmask"].shape == (4, 3)


# ---------------------------------------------------------------- capabilities


def test_block_sizes() -> None:
    caps = Caps("toy", "toy", ("float32",), ("float32",), (128, 64))
    assert caps.check_block_size(0) == 128
    assert caps.check_block_size(64) == 64
    with pytest.raises(ConfigError, match="block_size 16 is not possible on toy; it takes 128, 64"):
        caps.check_block_size(16)
    free = Caps("cpu", "cpu", ("float32",), ("float32",), (16,), any_block_size=True)
    assert free.check_block_size(5) == 5
    with pytest.raises(ConfigError):
        free.check_block_size(-1)


def test_elements_per_token_counts_layers_of_unequal_width() -> None:
    assert KVSpec((KVLayerSpec(2, 16), KVLayerSpec(1, 8)), "int8").elements_per_token == 2 * (32 + 8)


def test_a_world_of_one_needs_no_collectives_and_a_larger_one_is_refused() -> None:
    class Bare(Device):
        memory = kv_block_bytes = alloc_kv = host_kv = tensor = numpy = program = None  # type: ignore[assignment]
        caps = Caps("bare", "bare", (), (), (1,))

    device = Bare()  # type: ignore[abstract]
    one = device.communicator(World())
    assert isinstance(one, SingleRank)
    x = object()
    assert one.all_reduce(x) is x and one.all_gather(x) is x  # type: ignore[arg-type, comparison-overlap]
    with pytest.raises(ConfigError, match="bare has no collectives for 2 ranks"):
        device.communicator(World(0, 2))
