"""Every device of the registry passes the suite, op by op."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest

from device.cases import Profile, generate
from device.conformance import OpReport, claims, format_verify, run_op, verify
from device.contract import Device
from device.errors import ConfigError
from device.ops import OPS
from tests.conformance.devices import DEVICES, REFUSES


@cache
def device_of(name: str) -> Device:
    return DEVICES[name]()


@pytest.fixture(scope="module", autouse=True)
def closing() -> Iterator[None]:
    yield
    for name in DEVICES:
        device_of(name).close()


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", DEVICES)
def test_op_agrees_with_the_reference(name: str, op: str) -> None:
    results = run_op(device_of(name), op)
    wrong = [f"{r.mode}: {r.case}: {r.detail}" for r in results if r.status == "failed"]
    assert not wrong, "\n".join(wrong)
    refused = {r.case for r in results if r.status == "refused"}
    unexpected = [case for case in refused if not any(text in case for text in REFUSES.get(name, ()))]
    assert not unexpected, f"{name} refuses what it should take: {unexpected}"
    modes = {r.mode for r in results if r.status == "ok"}
    assert ("program" in modes) == OPS[op].step
    assert "call" in modes


@pytest.mark.parametrize("name", DEVICES)
def test_a_claim_of_batch_invariance_is_tested(name: str) -> None:
    device = device_of(name)
    for op in ("rms_norm", "sample", "gated_act"):
        if op in claims(device):
            assert any(r.mode == "invariance" for r in run_op(device, op)), op


def test_cases_are_the_same_for_the_same_seed_and_others_for_another() -> None:
    profile = Profile("float32", ("float32", "int8"), (16, 5))
    for op in OPS:
        first, again, other = (generate(op, profile, seed) for seed in (3, 3, 4))
        assert [c.name for c in first] == [c.name for c in again]
        values = [[o.values.tobytes() for c in cases for o in c.operands().values()] for cases in (first, again, other)]
        assert values[0] == values[1]
        assert values[0] != values[2]


def test_as_many_cases_as_asked_for() -> None:
    profile = Profile("float32", ("float32",), (16,))
    for count in (1, 7, 30):
        assert len(generate("add", profile, 0, count)) == count


def test_cases_keep_to_what_a_device_can_do() -> None:
    """Block sizes, cache dtypes, sequences, reserved blocks and trees of the profile, and no others."""
    profile = Profile("bfloat16", ("bfloat16",), (128,), reserved=3, tree=False, max_seqs=2)
    for op in ("store_kv", "read_kv", "paged_attention", "move_kv", "swap_kv", "qkv_rope_store"):
        for case in generate(op, profile):
            cache = next(case.args[name] for name in ("layer", "kv") if name in case.args)
            assert cache.block_size == 128
            assert cache.spec.dtype == "bfloat16"
            assert cache.first_slot == 3 * 128
            slots = case.operands().get("slots")
            assert slots is None or all(s == -1 or s >= 3 * 128 for s in slots.values.tolist())
            if "meta" in case.args:
                assert case.args["meta"].seq_lens.size <= 2
                assert case.args["meta"].tree is None
    for case in generate("verify", profile):
        assert case.args["row_start"].values.size <= 3


def test_attention_cases_cover_what_the_contract_promises() -> None:
    profile = Profile("float32", ("float32", "int8"), (16, 5))
    cases = generate("paged_attention", profile)
    dims = {c.args["layer"].spec.layers[0].head_dim for c in cases}
    groups = {c.args["q"].values.shape[1] // c.args["layer"].spec.layers[0].heads for c in cases}
    assert dims >= {64, 96, 128, 256}
    assert groups >= {1, 2, 3, 4, 5, 6, 7, 8}
    assert {c.args["layer"].spec.dtype for c in cases} == {"float32", "int8"}
    assert any(c.args["window"] for c in cases)
    assert any(c.args["meta"].tree is not None for c in cases)
    assert any(0 in c.args["meta"].seq_lens for c in cases)
    assert any(1 in c.args["meta"].seq_lens for c in cases)


def test_verify_reports_every_op() -> None:
    reports = verify(device_of("cpu-float32"), ["add", "mask_logits", "add"], bench=True)
    assert [r.op for r in reports] == ["add", "mask_logits"]
    assert all(r.ok for r in reports)
    assert all(t.seconds > 0 and t.share > 0 for r in reports for t in r.timings)
    text = format_verify(reports)
    assert "numpy (portable)" in text
    assert "2 of 2 ops agree" in text
    assert "roofline" in text


def test_verify_refuses_a_name_that_is_no_op() -> None:
    with pytest.raises(ConfigError, match=r"no op is called matmul; there are embed"):
        verify(device_of("cpu-float32"), ["matmul"])


def test_an_op_of_which_nothing_was_tried_is_not_ok() -> None:
    results = run_op(device_of("cpu-float32"), "store_kv")
    from dataclasses import replace

    refused = tuple(replace(r, status="refused") for r in results)
    assert not OpReport("store_kv", "numpy", refused).ok
