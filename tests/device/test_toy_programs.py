"""Step programs of the toy device: late, padded, recorded; and what it finds of misuse."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from device.contract import HostBuffer, InputSpec, Layout
from device.errors import DeviceError
from tests.support.toy_device import ToyDevice, ToyProgram, make_toy_device
from tests.support.toy_tensor import POISON_INT, ToyTensor


@pytest.fixture
def toy() -> Iterator[ToyDevice]:
    device = make_toy_device()
    yield device
    device.close()


def reals(*shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).normal(size=shape)


LAYOUT = Layout(
    ("T", "E"),
    (
        InputSpec("x", "float64", "T", 6, tail=(4,)),
        InputSpec("row", "int32", "E", 2, pad=-1, grows=True),
        InputSpec("id", "int32", "E", 2, grows=True),
        InputSpec("factor", "float64", "E", 2, pad=1.0, grows=True),
        InputSpec("bias", "float64", "E", 2, grows=True),
    ),
)


def step(inputs: Any, key: Any) -> dict[str, Any]:
    y = inputs.ops.add(inputs["x"], inputs["x"])
    inputs.ops.edit_logits(y, inputs["row"], inputs["id"], inputs["factor"], inputs["bias"])
    return {"y": y, "ids": inputs.ops.sample(y, None, None)}


def filled(program: ToyProgram, rows: int = 3, seed: int = 0) -> HostBuffer:
    buffer = program.buffer()
    buffer.views["x"][:rows] = reals(rows, 4, seed=seed)
    buffer.counts[:] = rows, 1
    buffer.growing["row"][0], buffer.growing["id"][0] = 1, 2
    buffer.growing["factor"][0], buffer.growing["bias"][0] = 1.0, 100.0
    return buffer


def wanted(rows: int = 3, seed: int = 0) -> np.ndarray[Any, Any]:
    y = 2 * reals(rows, 4, seed=seed)
    y[1, 2] += 100
    return y


def test_launch_reads_the_buffer_late_and_pads_it_to_the_bucket(toy: ToyDevice) -> None:
    program = toy.program(step, LAYOUT)
    buffer = filled(program)
    buffer.views["x"][3] = 777  # rubbish behind the live rows
    with toy.hold():
        pending = program.launch(buffer, None)
        assert toy.launches == 1 and toy.calls["add"] == 0
    out = pending.wait()
    np.testing.assert_array_equal(out["y"], wanted())
    np.testing.assert_array_equal(out["ids"], wanted().argmax(1))
    assert not buffer.views["x"][3].any()
    (recording,) = program.recordings.values()
    assert recording.bucket == {"T": 4, "E": 2}


def test_one_recording_for_each_key_and_bucket(toy: ToyDevice) -> None:
    program = toy.program(step, LAYOUT)
    program.prepare(["a"])
    assert [r.bucket for r in program.recordings.values()] == [{"T": 6, "E": 2}]
    for rows in (6, 5, 3, 4, 2):
        np.testing.assert_array_equal(program.launch(filled(program, rows), "a").wait()["y"], wanted(rows))
    assert [r.bucket["T"] for r in program.recordings.values()] == [6, 4, 2]
    buffer = filled(program)
    buffer.ensure("E", 5)
    program.launch(buffer, "a").wait()
    program.launch(filled(program), "b").wait()
    assert toy.recordings == len(program.recordings) == 5


def change_data(buffer: HostBuffer) -> None:
    buffer.views["x"][5, 3] += 1


def change_counts(buffer: HostBuffer) -> None:
    buffer.counts[0] = 2


def change_growing(buffer: HostBuffer) -> None:
    buffer.growing["bias"][0] = 0


def grow(buffer: HostBuffer) -> None:
    buffer.ensure("E", 3)


def change_lists(buffer: HostBuffer) -> None:
    buffer.lists["q_lens"].append(1)


CHANGES = [change_data, change_counts, change_growing, grow, change_lists]


@pytest.mark.parametrize("change", CHANGES)
def test_a_buffer_written_to_before_the_device_read_it(toy: ToyDevice, change: Callable[[HostBuffer], None]) -> None:
    program = toy.program(step, LAYOUT)
    buffer = filled(program)
    with toy.hold():
        pending = program.launch(buffer, None)
        change(buffer)
    with pytest.raises(DeviceError, match="written to between launch and wait"):
        pending.wait()
    assert toy.calls["add"] == 0


@pytest.mark.parametrize("change", CHANGES)
def test_a_buffer_written_to_before_wait(toy: ToyDevice, change: Callable[[HostBuffer], None]) -> None:
    program = toy.program(step, LAYOUT)
    buffer = filled(program)
    pending = program.launch(buffer, None)
    toy.stream.synchronise(lambda: None)  # the step is done, but nobody has waited for it
    change(buffer)
    with pytest.raises(DeviceError, match="written to between launch and wait"):
        pending.wait()


def test_a_buffer_is_free_again_after_wait(toy: ToyDevice) -> None:
    program = toy.program(step, LAYOUT)
    buffer = filled(program)
    pending = program.launch(buffer, None)
    with pytest.raises(DeviceError, match="belongs to a launch"):
        program.launch(buffer, None)
    pending.wait()
    buffer.views["x"][:] = 5
    np.testing.assert_array_equal(pending.wait()["y"], wanted())
    assert program.launch(buffer, None).wait()["y"][0, 0] == 10


def test_launch_takes_its_own_buffers_and_counts_below_the_bounds(toy: ToyDevice) -> None:
    program = toy.program(step, LAYOUT)
    with pytest.raises(DeviceError, match="buffer"):
        program.launch(HostBuffer(LAYOUT), None)
    buffer = filled(program)
    for counts, text in (((7, 0), "count T is 7, its bound 6"), ((1, 3), "count E is 3"), ((-1, 0), "T is -1")):
        buffer.counts[:] = counts
        with pytest.raises(DeviceError, match=text):
            program.launch(buffer, None)


def test_outputs_end_with_the_next_launch(toy: ToyDevice) -> None:
    program = toy.program(step, LAYOUT)
    first, second = filled(program), filled(program, seed=1)
    pending = program.launch(first, None)
    out = pending.wait()
    copy = out["y"].copy()
    later = program.launch(second, None)
    assert np.isnan(out["y"]).all() and (out["ids"] == POISON_INT).all()
    np.testing.assert_array_equal(copy, wanted())
    with pytest.raises(DeviceError, match="ended with the program's next launch"):
        pending.wait()
    np.testing.assert_array_equal(later.wait()["y"], wanted(seed=1))
    # never waited for: the outputs are gone all the same, the buffer comes back
    lost = program.launch(first, None)
    program.launch(second, None).wait()
    with pytest.raises(DeviceError, match="ended"):
        lost.wait()
    program.launch(first, None).wait()


def test_an_error_in_a_step_comes_from_its_wait(toy: ToyDevice) -> None:
    layout = Layout(("R",), (InputSpec("rows", "int32", "R", 4, pad=-1),))
    table = toy.tensor(reals(3, 2))
    program = toy.program(lambda inputs, key: {"y": inputs.ops.gather_rows(table, inputs["rows"])}, layout)
    bad, good = program.buffer(), program.buffer()
    bad.counts[0] = good.counts[0] = 1
    bad.views["rows"][0], good.views["rows"][0] = 3, 2
    pending = program.launch(bad, None)
    with pytest.raises(DeviceError, match="gather_rows: rows -?[0-9]+ … 3 of 3"):
        pending.wait()
    np.testing.assert_array_equal(program.launch(good, None).wait()["y"], reals(3, 2)[2:])


def test_step_tensors_end_after_their_last_use(toy: ToyDevice) -> None:
    """A kernel that keeps an operand gets an error, not the number that happens to lie there."""
    kept: list[ToyTensor] = []
    add = toy.bound.table.add

    def keeping(x: ToyTensor, y: ToyTensor) -> ToyTensor:
        for t in kept:
            t.array()
        kept.append(x)
        return add(x, y)

    toy.bound.table.add = keeping
    weight = toy.tensor(np.ones(4))

    def longer(inputs: Any, key: Any) -> dict[str, Any]:
        x = inputs.ops.rms_norm(inputs["x"], weight, 1.0)
        return {"y": inputs.ops.add(inputs.ops.add(x, x), inputs["x"])}

    program = toy.program(longer, LAYOUT)
    pending = program.launch(filled(program), None)
    with pytest.raises(DeviceError, match="after the end of its life"):
        pending.wait()


def test_memory_shared_without_a_declaration_is_found(toy: ToyDevice) -> None:
    toy.bound.table.add = lambda x, y: x
    program = toy.program(step, LAYOUT)
    pending = program.launch(filled(program), None)
    with pytest.raises(DeviceError, match="which no alias declares"):
        pending.wait()


def test_a_kernel_of_another_shape_than_declared_is_found(toy: ToyDevice) -> None:
    toy.bound.table.add = lambda x, y: ToyTensor.of(toy.stream, np.zeros((4, 5)))
    program = toy.program(step, LAYOUT)
    pending = program.launch(filled(program), None)
    with pytest.raises(DeviceError, match="recorded as"):
        pending.wait()


def test_wait_leaves_other_threads_running() -> None:
    toy = make_toy_device(jitter=0.05, seed=3)
    program = toy.program(step, LAYOUT)
    ticks = 0
    done = threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not done.wait(0.001):
            ticks += 1

    thread = threading.Thread(target=tick)
    thread.start()
    for _ in range(5):
        program.launch(filled(program), None).wait()
    done.set()
    thread.join()
    toy.close()
    assert ticks > 5
