"""Binding the op table: who runs what, who stands in, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from device.binding import Bound, Implementation, OpTable, bind
from device.errors import DeviceError
from device.ops import COMPOSITES, OPS
from device.weights import CanonicalWeight, float_weight

PLAIN = [name for name, decl in OPS.items() if not decl.composite]
WEIGHT = [name for name in PLAIN if OPS[name].family == "weight"]
CACHE = [name for name in PLAIN if OPS[name].family == "cache"]
FLOAT = float_weight(np.zeros((2, 2), np.float32), "float32")
INT8 = CanonicalWeight("int8", np.zeros((2, 2), np.int8), np.ones((2, 1), np.float32), None, 2)


def made_by(label: str, names: Iterable[str], **settings: Any) -> Implementation:
    """Functions that answer (label, op name); ``pack_weight`` makes a carrier of this implementation."""
    signed: list[Implementation] = []

    def function(name: str) -> Callable[..., Any]:
        if name == "pack_weight":
            return lambda weights, uses: SimpleNamespace(impl=signed[0], weights=weights)
        return lambda *args, **kwargs: (label, name)

    signed.append(Implementation(label, {name: function(name) for name in names}, **settings))
    return signed[0]


def row(bound: Bound, op: str) -> tuple[str, str]:
    ((label, note),) = [(label, note) for name, label, note in bound.report.ops if name == op]
    return label, note


def floats_only(op: str, *args: Any) -> bool:
    return op != "pack_weight" or all(w.dtype == "float32" for w in args[0])


def portable() -> Implementation:
    return made_by("portable", PLAIN, portable=True)


# ---------------------------------------------------------------- plain ops


def test_the_first_implementation_that_has_an_op_runs_it_and_the_report_says_so() -> None:
    bound = bind([made_by("own", ["add", "rope"]), portable()])
    assert bound.table.add() == ("own", "add")
    assert bound.table.rms_norm() == ("portable", "rms_norm")
    assert row(bound, "add") == ("own", "") and row(bound, "rms_norm") == ("portable", "portable")
    assert [name for name, _, _ in bound.report.ops] == list(OPS)


def test_an_op_that_nobody_has_is_an_error_at_start_up() -> None:
    with pytest.raises(DeviceError, match="no implementation for add, sample"):
        bind([made_by("own", [name for name in PLAIN if name not in ("add", "sample")])])
    with pytest.raises(DeviceError, match="no implementation for act_linear"):
        OpTable({name: print for name in OPS if name != "act_linear"})


def test_strict_names_every_op_that_would_fall_back() -> None:
    own = made_by("own", [name for name in PLAIN if name not in ("rope", "verify")])
    with pytest.raises(DeviceError, match="--strict: .*: rope, verify; install the device's kernel package"):
        bind([own, portable()], strict=True)
    bound = bind([made_by("own", PLAIN), portable()], strict=True)
    assert not [name for name, _, note in bound.report.ops if note == "portable"]


def test_batch_invariance_is_claimed_only_where_all_that_may_run_claim_it() -> None:
    own = made_by("own", PLAIN, batch_invariant=frozenset(["add", "embed", "linear"]))
    other = made_by("other", [*WEIGHT, "add", "rope"], batch_invariant=frozenset(["embed", "rope"]))
    assert bind([own, other]).batch_invariant == {"add", "embed"}


# ---------------------------------------------------------------- families


def test_a_weight_is_run_by_the_implementation_that_packed_it() -> None:
    own = made_by("own", [*WEIGHT, "add"], supports=floats_only)
    bound = bind([own, portable()])
    ops = bound.table
    mine, theirs = ops.pack_weight([FLOAT], {"linear"}), ops.pack_weight([INT8], {"linear"})
    assert ops.linear("x", mine) == ("own", "linear")
    assert ops.linear("x", theirs) == ("portable", "linear")
    assert ops.embed("ids", mine, 2.0) == ("own", "embed")
    assert ops.embed("ids", theirs, scale=2.0) == ("portable", "embed")
    assert [impl.label for impl in bound.families["weight"]] == ["own", "portable"]
    assert row(bound, "linear") == ("own | portable", "")


def test_a_weight_that_has_to_go_to_a_stand_in_is_said_once() -> None:
    bound = bind([made_by("own", PLAIN, supports=floats_only), portable()])
    for _ in range(2):
        bound.table.pack_weight([INT8, FLOAT], {"linear"})
    assert bound.report.notices == [
        "own does not take a weight of int8 group 2 + float32; portable stands in for it",
    ]


def test_strict_refuses_a_weight_that_has_to_go_to_a_stand_in() -> None:
    bound = bind([made_by("own", PLAIN, supports=floats_only), portable()], strict=True)
    bound.table.pack_weight([FLOAT], {"linear"})
    with pytest.raises(DeviceError, match="--strict: own does not take a weight of int8 group 2; portable stands"):
        bound.table.pack_weight([INT8], {"linear"})


def test_a_second_implementation_of_the_device_itself_is_no_stand_in() -> None:
    first = made_by("fast", WEIGHT, supports=floats_only)
    bound = bind([first, made_by("general", PLAIN)], strict=True)
    assert bound.table.linear("x", bound.table.pack_weight([INT8], {"linear"})) == ("general", "linear")
    assert bound.report.notices == []
    alone = bind([portable()])
    alone.table.pack_weight([INT8], {"linear"})
    assert alone.report.notices == [], "it stands in for nobody"


def test_a_weight_that_nobody_takes() -> None:
    bound = bind([made_by("own", PLAIN, supports=floats_only)])
    with pytest.raises(DeviceError, match="no implementation packs a weight of int8 group 2"):
        bound.table.pack_weight([INT8], {"linear"})


def test_support_is_asked_when_a_weight_is_packed_and_never_in_a_step() -> None:
    asked: list[str] = []

    def supports(op: str, *args: Any) -> bool:
        asked.append(op)
        return True

    ops = bind([made_by("own", PLAIN, supports=supports), portable()]).table
    w = ops.pack_weight([FLOAT], {"linear"})
    assert asked == ["pack_weight"]
    ops.linear("x", w)
    ops.norm_linear("x", "r", "n", 1e-5, w)
    assert asked == ["pack_weight"]


@pytest.mark.parametrize("family", [WEIGHT, CACHE])
def test_half_a_family_is_not_offered(family: list[str]) -> None:
    """Its layout is opaque: who cannot do all with it can do nothing with it."""
    bound = bind([made_by("own", family[1:]), portable()])
    assert [impl.label for impl in bound.families[OPS[family[0]].family or ""]] == ["portable"]
    for name in family:
        assert row(bound, name) == ("portable", "portable")


def test_a_cache_layer_is_run_by_the_implementation_that_allocated_it() -> None:
    one, other = made_by("one", CACHE), made_by("other", PLAIN)
    ops = bind([one, other]).table
    for impl in (one, other):
        layer = SimpleNamespace(impl=impl)
        assert ops.paged_attention("q", layer, "meta", 1.0) == (impl.label, "paged_attention")
        assert ops.store_kv("k", "v", layer, "slots") == (impl.label, "store_kv")
        assert ops.move_kv(layer, "src", "dst") == (impl.label, "move_kv")


def test_an_operand_that_nobody_bound_made() -> None:
    ops = bind([made_by("one", CACHE), made_by("other", PLAIN)]).table
    with pytest.raises(DeviceError, match="read_kv: its operand was made by stranger"):
        ops.read_kv(SimpleNamespace(impl=made_by("stranger", CACHE)), "slots")


# ---------------------------------------------------------------- composites


def test_a_composite_is_fused_for_those_who_have_it_and_composed_for_the_others() -> None:
    own = made_by("own", [*WEIGHT, "norm_linear"], supports=floats_only)
    calls: list[str] = []

    def recorded(name: str) -> Callable[..., Any]:
        def op(*args: Any) -> Any:
            calls.append(name)
            return ("y", "residual") if name == "add_rms_norm" else name

        return op

    rest = made_by("portable", PLAIN, portable=True)
    rest.functions.update({n: recorded(n) for n in ("linear", "rms_norm", "add_rms_norm", "gated_act")})  # type: ignore[attr-defined]
    bound = bind([own, rest])
    ops = bound.table
    mine, theirs = ops.pack_weight([FLOAT], {"linear"}), ops.pack_weight([INT8], {"linear"})
    assert ops.norm_linear("x", "r", "n", 1e-5, mine) == ("own", "norm_linear")
    assert calls == []
    assert ops.norm_linear("x", "r", "n", 1e-5, theirs) == ("linear", "residual")
    assert ops.norm_linear("x", None, "n", 1e-5, theirs) == ("linear", "x")
    assert calls == ["add_rms_norm", "linear", "rms_norm", "linear"]
    assert row(bound, "norm_linear") == ("own", "fused")
    assert row(bound, "act_linear") == ("composed of plain ops", "")
    assert ops.act_linear("gate_up", "silu", mine) == ("own", "linear"), "its plain ops are the table's"


def test_without_fusion_every_composite_is_composed() -> None:
    bound = bind([made_by("own", OPS)], fusion=False)
    for name in COMPOSITES:
        assert row(bound, name) == ("composed of plain ops", "")
    w = bound.table.pack_weight([FLOAT], {"linear"})
    assert bound.table.act_linear("gate_up", "silu", w) == ("own", "linear")


def test_a_composite_alone_does_not_make_a_family() -> None:
    bound = bind([made_by("own", ["norm_linear", "act_linear", "qkv_rope_store"]), portable()])
    for name in COMPOSITES:
        assert row(bound, name) == ("composed of plain ops", "")
