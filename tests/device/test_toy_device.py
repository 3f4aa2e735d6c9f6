"""The toy device refuses what an accelerator refuses: without that, what passes on it would prove nothing."""

from __future__ import annotations

import gc
import operator
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from device.contract import AttnMeta, KVLayerSpec, KVSpec
from device.errors import ConfigError, DeviceError, OutOfDeviceMemory
from device.weights import Activation, CanonicalWeight, float_weight
from tests.support import toy_kv
from tests.support.toy_device import ToyDevice, make_toy_device

SPEC = KVSpec((KVLayerSpec(2, 5, 4),), "float64")


@pytest.fixture
def toy() -> Iterator[ToyDevice]:
    device = make_toy_device()
    yield device
    device.close()


def reals(*shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).normal(size=shape)


def ints(*values: int) -> np.ndarray[Any, Any]:
    return np.array(values, np.int32)


# ---------------------------------------------------------------- tensors


@pytest.mark.parametrize(
    "use",
    [
        *(lambda t, op=op: op(t, t) for op in (operator.add, operator.mul, operator.matmul, operator.eq, operator.lt)),
        lambda t: t + 1,
        lambda t: 2 * t,
        lambda t: np.ones(4) * t,
        lambda t: -t,
        lambda t: operator.iadd(t, t),
        lambda t: np.asarray(t),
        lambda t: np.add(np.ones(4), t),
        bool, len, list, float, int,
        lambda t: operator.setitem(t, slice(None), 0),
        lambda t: 1.0 in t,
        lambda t: t[0],
        lambda t: t[:, 1],
        lambda t: t[:, :, :],
    ],
)  # fmt: skip
def test_a_tensor_has_no_arithmetic_and_shows_no_value(toy: ToyDevice, use: Callable[[Any], Any]) -> None:
    t = toy.tensor(reals(3, 4))
    with pytest.raises(TypeError):
        use(t)


def test_the_host_cannot_look_into_device_memory(toy: ToyDevice) -> None:
    with pytest.raises(DeviceError, match="host looked into device memory"):
        toy.tensor(reals(2)).array()


def test_slices_are_strided_windows_on_one_storage(toy: ToyDevice) -> None:
    host = reals(3, 10)
    t = toy.tensor(host)
    window = t[:, 2:8]
    heads = window.reshape(3, 2, 3)
    assert window.storage is t.storage and heads.storage is t.storage
    assert (window.offset, window.strides) == (2, (10, 1))
    assert (heads.offset, heads.strides) == (2, (10, 3, 1))
    np.testing.assert_array_equal(toy.numpy(heads), host[:, 2:8].reshape(3, 2, 3))
    inner = heads[1:, :, 1:]
    assert inner.storage is t.storage and inner.strides == (10, 3, 1)
    np.testing.assert_array_equal(toy.numpy(inner), host[:, 2:8].reshape(3, 2, 3)[1:, :, 1:])
    # the trailing dimensions of this one lie in no single run: it is copied
    flat = inner.reshape(2, 4)
    assert flat.storage is not t.storage
    np.testing.assert_array_equal(toy.numpy(flat), host[:, 2:8].reshape(3, 2, 3)[1:, :, 1:].reshape(2, 4))
    toy.ops.edit_logits(window, *map(toy.tensor, (ints(1), ints(0), np.ones(1), np.full(1, 5.0))))
    assert toy.numpy(t)[1, 2] == host[1, 2] + 5


@pytest.mark.parametrize("shape", [(2, 5), (4, 4), (1, 12), (3, 5, -1)])
def test_reshape_keeps_the_first_dimension_and_the_size(toy: ToyDevice, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="first dimension"):
        toy.tensor(reals(3, 4)).reshape(*shape)


def test_a_slice_has_step_one(toy: ToyDevice) -> None:
    with pytest.raises(ValueError, match="step 1"):
        toy.tensor(reals(3, 4))[:, ::2]


def test_tensor_converts_and_refuses(toy: ToyDevice) -> None:
    assert toy.tensor(reals(2), "float32").dtype == "float32"
    bits = np.array([0x3F80, 0xC000], np.uint16)  # 1 and -2 in bfloat16
    np.testing.assert_array_equal(toy.numpy(toy.tensor(bits, "float64")), [1.0, -2.0])
    with pytest.raises(ConfigError, match="float16"):
        toy.tensor(reals(2), "float16")


# ---------------------------------------------------------------- lateness


def test_copies_and_ops_run_late_and_in_order(toy: ToyDevice) -> None:
    host = reals(2, 4)
    want = 4 * host
    with toy.hold():
        t = toy.tensor(host)
        host[:] = np.nan  # the copy was taken when the call returned
        for _ in range(2):
            t = toy.ops.add(t, t)
        assert toy.calls["add"] == 0
        assert (t.shape, t.dtype) == ((2, 4), "float64")
    np.testing.assert_array_equal(toy.numpy(t), want)
    assert toy.calls["add"] == 2


def test_operands_on_the_host_are_taken_at_the_call(toy: ToyDevice) -> None:
    kv = toy.alloc_kv(SPEC, 4)
    k = reals(2, 2, 5)
    slots = ints(300, 400)
    toy.ops.store_kv(toy.tensor(k), toy.tensor(k), kv.layer(0), toy.tensor(slots))
    with toy.hold():
        dst = ints(301, 401)
        toy.ops.move_kv(kv, slots, dst)
        dst[:] = slots[:] = -1
        lists = [2], [3]
        meta = AttnMeta(*map(toy.tensor, (ints(0, 2), ints(3), ints(2)[None], ints(-1, -1), ints(2, 1))), *lists)
        q = toy.ops.paged_attention(toy.tensor(reals(2, 4, 5)), kv.layer(0), meta, 1.0)
        lists[0][0] = lists[1][0] = 77
    np.testing.assert_array_equal(toy.numpy(toy.ops.read_kv(kv.layer(0), toy.tensor(ints(301, 401)))[0]), k)
    assert toy.numpy(q).shape == (2, 20)


@pytest.mark.parametrize("what", ["float", "four_bit", "portable"])
def test_a_packed_weight_keeps_nothing_of_the_host(toy: ToyDevice, what: str) -> None:
    values = reals(6, 32)
    weight = float_weight(values, "float64")
    if what == "four_bit":
        values = np.random.default_rng(1).integers(0, 255, (6, 16)).astype(np.uint8)
        weight = CanonicalWeight("int4", values, np.ones((6, 1), np.float32), None, 32)
    if what == "portable":
        weight = CanonicalWeight("float64", values, activation=Activation("static", 0.1, 3))
    want = weight.dequantize(np.float64).copy()
    with toy.hold():
        packed = toy.ops.pack_weight([weight], frozenset({"embed"}))
        values[:] = 0
    np.testing.assert_array_equal(toy.numpy(toy.ops.embed(toy.tensor(np.arange(6, dtype=np.int32)), packed)), want)


def test_weights_lie_in_padded_transposed_tiles_and_integers_stay_integers(toy: ToyDevice) -> None:
    rng = np.random.default_rng(0)
    q = rng.integers(0, 256, (17, 32)).astype(np.uint8)
    four = CanonicalWeight("uint4", q, np.ones((17, 2), np.float32), None, 32)
    eight = CanonicalWeight("int8", four.values().astype(np.int8), np.ones((17, 2), np.float32), None, 32)
    packed, wide = (toy.ops.pack_weight([w], frozenset({"linear"})) for w in (four, eight))
    tiles, bytes_ = toy.numpy(packed.segments[0].tiles), toy.numpy(wide.segments[0].tiles)
    assert tiles.shape == (2, 2, 16, 16) and bytes_.shape == (2, 2, 32, 16)
    assert tiles.dtype == np.uint8 and bytes_.dtype == np.int8
    row, column = 16, 32 + 5
    assert bytes_[1, 1, 5, 0] == four.values()[row, column]
    assert tiles[1, 1, 5, 0] == four.values()[row, column] + 16 * four.values()[row, column + 16]
    assert packed.nbytes == 2 * 2 * 16 * 16 + 2 * 17 * 4


def test_pages_hold_the_slots_of_a_block_in_the_fastest_dimension(toy: ToyDevice) -> None:
    kv = toy.alloc_kv(SPEC, 4)
    k = reals(1, 2, 5)
    toy.ops.store_kv(toy.tensor(k), toy.tensor(k), kv.layer(0), toy.tensor(ints(3 * 128 + 9)))
    page = toy.numpy(kv.layer(0).pages[0])
    assert page.shape == (4, 2, 16, 128)
    np.testing.assert_array_equal(page[3, :, :5, 9], k[0])
    assert np.count_nonzero(~np.isnan(page)) == k.size


def test_the_error_of_an_op_comes_out_at_the_next_synchronisation_once(toy: ToyDevice) -> None:
    table = toy.tensor(reals(4, 6))
    x = toy.tensor(reals(2, 3, 6))
    turned = toy.ops.rope(x, x, toy.tensor(ints(1, 4)), table)
    with pytest.raises(DeviceError, match="positions 1 … 4 of 4"):
        toy.numpy(turned[0])
    assert np.isnan(toy.numpy(turned[0])).all()
    toy.numpy(toy.ops.rope(x, x, toy.tensor(ints(1, 3)), table)[0])


# ---------------------------------------------------------------- cache


def test_the_scatter_refuses_minus_one_and_repeated_slots() -> None:
    page = np.zeros((3, 2, 5, toy_kv.BLOCK))
    for bad in (ints(5, -1), ints(5, 5), ints(0, 384)):
        with pytest.raises(DeviceError, match="scatter"):
            toy_kv.scatter(page, bad, np.ones((2, 2, 5)))
    assert not page.any()


def test_rows_to_be_skipped_go_to_the_reserved_blocks(toy: ToyDevice) -> None:
    """More of them than reserved slots, so that the binding has to scatter in pieces."""
    kv = toy.alloc_kv(SPEC, 6)
    assert kv.reserved == toy.caps.reserved_blocks == 2
    rows = 3 * kv.reserved * toy_kv.BLOCK + 5
    k, v = reals(rows, 2, 5), reals(rows, 2, 5, seed=1)
    slots = np.full(rows, -1, np.int32)
    places = np.random.default_rng(2).permutation(np.arange(2 * 128, 6 * 128))[:100]
    live = np.random.default_rng(3).permutation(rows)[:100]
    slots[live] = places
    toy.ops.store_kv(toy.tensor(k), toy.tensor(v), kv.layer(0), toy.tensor(slots))
    everything = toy.tensor(np.arange(2 * 128, 6 * 128, dtype=np.int32))
    got_k, got_v = map(toy.numpy, toy.ops.read_kv(kv.layer(0), everything))
    written = np.zeros(4 * 128, bool)
    written[places - 2 * 128] = True
    np.testing.assert_array_equal(got_k[places - 2 * 128], k[live])
    np.testing.assert_array_equal(got_v[places - 2 * 128], v[live])
    assert np.isnan(got_k[~written]).all(), "a slot that nobody wrote holds NaN"


@pytest.mark.parametrize("slots", [ints(300, 300), ints(3, 300), ints(-2, 300), ints(300, 512)])
def test_store_kv_refuses_slots_that_no_sequence_may_have(toy: ToyDevice, slots: Any) -> None:
    kv = toy.alloc_kv(SPEC, 4)
    x = toy.tensor(reals(2, 2, 5))
    toy.ops.store_kv(x, x, kv.layer(0), toy.tensor(slots))
    with pytest.raises(DeviceError, match="slot"):
        toy.numpy(x)


def test_reserved_blocks_are_never_read_moved_or_attended_to(toy: ToyDevice) -> None:
    kv, host = toy.alloc_kv(SPEC, 4), toy.host_kv(SPEC, 2, 128)
    layer = kv.layer(0)
    q = toy.tensor(reals(1, 4, 5))
    meta = AttnMeta(*map(toy.tensor, (ints(0, 1), ints(1), ints(1)[None], ints(-1), ints(1, 1))), [1], [1])
    for misuse in (
        lambda: toy.ops.read_kv(layer, toy.tensor(ints(255))),
        lambda: toy.ops.move_kv(kv, ints(300), ints(0)),
        lambda: toy.ops.swap_kv(kv, host, ints(1, 0)[None], "out"),
        lambda: toy.ops.paged_attention(q, layer, meta, 1.0),
    ):
        misuse()
        with pytest.raises(DeviceError, match="reserved"):
            toy.numpy(q)
    with pytest.raises(DeviceError, match="only for swap_kv"):
        host.layer(0)


def test_an_unwritten_slot_shows_when_it_is_read_and_only_then(toy: ToyDevice) -> None:
    kv = toy.alloc_kv(SPEC, 4)
    x = toy.tensor(reals(3, 2, 5))
    toy.ops.store_kv(x, x, kv.layer(0), toy.tensor(ints(256, 257, 258)))
    q = toy.tensor(reals(1, 4, 5))
    for length, whole in ((3, True), (4, False)):
        meta = AttnMeta(
            *map(toy.tensor, (ints(0, 1), ints(length), ints(2, 3)[None], ints(-1), ints(1, 1))), [1], [length]
        )
        assert np.isfinite(toy.numpy(toy.ops.paged_attention(q, kv.layer(0), meta, 1.0))).all() == whole


def test_attention_wants_host_lists_that_say_the_same_as_the_tensors(toy: ToyDevice) -> None:
    kv = toy.alloc_kv(SPEC, 4)
    q = toy.tensor(reals(2, 4, 5))
    tensors = [toy.tensor(x) for x in (ints(0, 1, 2), ints(1, 1), ints(2, 3)[:, None], ints(-1, -1), ints(2, 2))]
    for q_lens, kv_lens in (([1], [1]), ([1, 1], [1, 2]), ([2, 0], [1, 1]), ([], [])):
        toy.ops.paged_attention(q, kv.layer(0), AttnMeta(*tensors, q_lens, kv_lens), 1.0)
        with pytest.raises(DeviceError, match="host lists"):
            toy.numpy(q)


def test_sizes_and_dtypes_that_it_does_not_take(toy: ToyDevice) -> None:
    with pytest.raises(ConfigError, match="block_size 16 is not possible on toy; it takes 128"):
        toy.alloc_kv(SPEC, 4, 16)
    with pytest.raises(ConfigError, match="block_size 64"):
        toy.host_kv(SPEC, 4, 64)
    with pytest.raises(ConfigError, match="block_size 127"):
        toy.kv_block_bytes(SPEC, 127)
    with pytest.raises(ConfigError, match="bfloat16"):
        toy.alloc_kv(KVSpec(SPEC.layers, "bfloat16"), 4)
    with pytest.raises(ConfigError, match="reserves 2"):
        toy.alloc_kv(SPEC, 2)
    with pytest.raises(ConfigError, match="float16"):
        make_toy_device("float16")


def test_memory_is_counted_and_comes_back() -> None:
    # head size 5 is padded to 16: 2 (k, v) · 2 heads · 16 · 128 slots · 8 bytes
    block = 2 * 2 * 16 * 128 * 8
    toy = make_toy_device(memory=5 * block)
    assert toy.kv_block_bytes(SPEC, 128) == block
    assert toy.kv_block_bytes(KVSpec(SPEC.layers, "int8"), 128) == 2 * 2 * 128 * (16 + 4)
    kv = toy.alloc_kv(SPEC, 4)
    assert toy.memory().free == block
    with pytest.raises(OutOfDeviceMemory, match="free"):
        toy.alloc_kv(SPEC, 3)
    del kv
    gc.collect()
    assert toy.memory().free == toy.memory().total
    toy.close()


# ---------------------------------------------------------------- start-up


def test_the_report_shows_what_stands_in(toy: ToyDevice) -> None:
    rows = {op: (label, note) for op, label, note in toy.report.ops}
    assert rows["sample"] == rows["logprobs"] == rows["verify"] == ("numpy on toy", "portable")
    assert rows["linear"] == ("toy | numpy on toy", "") and rows["paged_attention"] == ("toy", "")
    assert rows["norm_linear"] == rows["qkv_rope_store"] == ("toy", "fused")
    assert rows["act_linear"] == ("composed of plain ops", "")


def test_strict_refuses_its_stand_ins() -> None:
    before = threading.active_count()
    with pytest.raises(DeviceError, match="--strict: .*sample, logprobs, verify"):
        make_toy_device(strict=True)
    for thread in threading.enumerate():
        if thread.name == "toy-device":
            thread.join(5)
    assert threading.active_count() <= before
