"""One suite for every device: each op on generated cases against the float64 reference, called and inside a program.

Every case is run (1) by calling the op outside a program, where shape and dtype are compared with the declaration and
the operands are looked at again afterwards: only declared ones may change; (2) inside a program of this one op whose
inputs are its operands, with buffers larger than the counts and stale values behind them, launched for all rows, then
for some of them, then for all again from the other of two buffers, the next one being filled while the first is under
way; a pure op is called twice in the program, so that an input whose memory is reused too early shows. (3) Where a
device claims that an op is batch-invariant, single rows must have the same bits on their own.

Composite ops are compared with their composition over the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from device.cases import Case, Profile, cut, generate, lone_row, probe
from device.contract import AttnMeta, Device, Tensor
from device.errors import ConfigError
from device.ops import OPS, SampleParams
from device.roofline import Timing, measure, measure_ceilings
from device.tolerance import Tolerance, compare, tolerance
from device.trial import DeviceSide, Host, OneOp, Oracle, Refused, decoded

Mode = Literal["call", "program", "invariance"]

# By how much the bounds of a program's inputs exceed the counts, taking turns.
_SLACK = (3, 0, 9)


@dataclass(frozen=True, slots=True)
class CaseResult:
    """What one case in one mode came to.

    ratio: the worst error over its bound (passes up to 1). nmse, error: normalised mean square and largest absolute
    error. status ``refused``: the device does not take such a weight or cache, and said so.
    """

    op: str
    case: str
    mode: Mode
    status: Literal["ok", "failed", "refused"]
    ratio: float = 0.0
    nmse: float = 0.0
    error: float = 0.0
    detail: str = ""
    bound: Tolerance | None = None


# ---------------------------------------------------------------- running


def _bound(case: Case, device: Device, output: str) -> Tolerance:
    return tolerance(case.op, device.dtype, output.removeprefix("again "), **case.bounds)


def _compare(case: Case, device: Device, mode: Mode, got: Host, want: Host, what: str = "") -> CaseResult:
    """The worst of all outputs."""
    results = []
    for name, expected in want.items():
        bound = _bound(case, device, name)
        if name not in got:
            return _failed(case, mode, f"{what}{name} is missing")
        ratio, nmse, error, text = compare(got[name], expected, bound)
        detail = f"{what}{name}: {text}" if text else ""
        results.append(
            CaseResult(case.op, case.name, mode, "failed" if text else "ok", ratio, nmse, error, detail, bound)
        )
    return max(results, key=_badness)


def _badness(result: CaseResult) -> tuple[bool, float]:
    return result.status == "failed", result.ratio


def _same_bits(a: NDArray[Any], b: NDArray[Any]) -> bool:
    return a.shape == b.shape and np.array_equal(a, b, equal_nan=a.dtype.kind == "f")


def _failed(case: Case, mode: Mode, detail: str) -> CaseResult:
    return CaseResult(case.op, case.name, mode, "failed", float("inf"), float("inf"), float("inf"), detail)


def run_call(device: Device, case: Case) -> CaseResult:
    """The op outside a program: result, declared shape and dtype, operands left alone."""
    side = DeviceSide(device)
    args = side.call_args(case)
    before = _snapshot(side, args)
    tensors = probe(case, device.ops, args)
    got = side.outputs(tensors)
    for name, value in _snapshot(side, args).items():
        if not _same_bits(value, before[name]):
            return _failed(case, "call", f"the operand {name} was changed; {case.op} may write to no tensor")
    if OPS[case.op].step and "out0" in tensors:
        wrong = _declared(case, device, args, list(tensors.values()))
        if wrong:
            return _failed(case, "call", wrong)
    return _compare(case, device, "call", got, Oracle(device).run(case))


def _snapshot(side: DeviceSide, args: Mapping[str, Any]) -> Host:
    flat: dict[str, Any] = {}
    for name, arg in args.items():
        if isinstance(arg, AttnMeta):
            parts = ("q_start", "seq_lens", "block_table", "slots", "tree", "is_tree")
            flat |= {f"{name}.{p}": getattr(arg, p) for p in parts if getattr(arg, p) is not None}
        elif isinstance(arg, SampleParams):
            flat |= {f"{name}.{p}": t for p, t in arg._asdict().items()}
        elif hasattr(arg, "reshape"):
            flat[name] = arg
    return {n: np.array(t) if isinstance(t, np.ndarray) else np.array(side.device.numpy(t)) for n, t in flat.items()}


def _declared(case: Case, device: Device, args: Mapping[str, Any], outputs: Sequence[Tensor]) -> str:
    """What differs from the declaration's shapes and dtypes; a float64 device may give float64 for float32."""
    declared = OPS[case.op].outputs(*(args[name] for name in case.args))
    for i, (want, got) in enumerate(zip(declared, outputs, strict=True)):
        if tuple(got.shape) != tuple(want.shape):
            return f"output {i} has shape {tuple(got.shape)}, declared is {tuple(want.shape)}"
        wide = device.dtype == "float64" and (got.dtype, want.dtype) == ("float64", "float32")
        if got.dtype != want.dtype and not wide:
            return f"output {i} has dtype {got.dtype}, declared is {want.dtype}"
    return ""


def smaller(case: Case) -> Case | None:
    """The case without every second row (or sequence); None where that leaves nothing to leave out."""
    if case.rows is None:
        return None
    count = "B" if "meta" in case.args else case.rows
    n = case.counts()[count]
    return cut(case, range(0, n, 2)) if n > 1 else None


def run_program(device: Device, case: Case, slack: int) -> CaseResult:
    """The op inside a program of its own, launched three times from two buffers."""
    side, oracle = DeviceSide(device), Oracle(device)
    one = OneOp(side, case, slack)
    first, second = one.program.buffer(), one.program.buffer()
    fewer = smaller(case) or case
    worst: CaseResult | None = None
    key = one.fill(first, case)
    pending = one.program.launch(first, key)
    key = one.fill(second, fewer)  # while the first is under way
    for launch, (now, label) in enumerate(((case, ""), (fewer, "fewer rows: "), (case, "all rows again: "))):
        got = {name: decoded(x) for name, x in pending.wait().items()}
        want = oracle.run(now)
        result = _compare(case, device, "program", got, want, label)
        again = {name.removeprefix("again "): x for name, x in got.items() if name.startswith("again ")}
        if result.status == "ok" and again:
            result = _compare(case, device, "program", again, want, f"{label}second call in the program: ")
        worst = result if worst is None else max(worst, result, key=_badness)
        if launch == 0:
            pending = one.program.launch(second, key)
            key = one.fill(first, case)
        elif launch == 1:
            pending = one.program.launch(first, key)
    assert worst is not None
    return worst


# ---------------------------------------------------------------- batch invariance

# What these give does not follow their rows one by one.
_NO_ROWS = ("store_kv", "edit_logits", "pack_weight", "move_kv", "swap_kv")


def run_invariance(device: Device, case: Case) -> CaseResult | None:
    """Rows (for attention also sequences) on their own, bit for bit as in the batch; None where there is no other."""
    if case.op in _NO_ROWS or case.rows is None or min(case.counts().values(), default=0) < 1:
        return None
    side = DeviceSide(device)
    whole = _bits(side, case)
    compared = 0
    for label, part, rows in _parts(case):
        compared += 1
        for name, value in _bits(side, part).items():
            if not _same_bits(value, whole[name][rows]):
                where = np.argwhere(np.atleast_1d(value != whole[name][rows]))
                return _failed(case, "invariance", f"{name} of {label} alone has other bits, first at {where[:1]}")
    return CaseResult(case.op, case.name, "invariance", "ok") if compared else None


def _bits(side: DeviceSide, case: Case) -> Host:
    tensors = probe(case, side.device.ops, side.call_args(case))
    return {name: np.array(side.device.numpy(t)) for name, t in tensors.items()}


def _parts(case: Case) -> Iterable[tuple[str, Case, slice]]:
    """(what, the smaller case, which rows of the whole result it gives)."""
    meta = case.args.get("meta")
    if meta is None:
        n = case.counts()[str(case.rows)]
        for i in sorted({0, n // 2, n - 1}) if n > 1 else ():
            yield f"row {i}", cut(case, [i]), slice(i, i + 1)
        return
    spans = [(b, int(meta.q_start[b]), int(meta.q_start[b + 1])) for b in range(meta.seq_lens.size)]
    for b, begin, end in spans:
        if end > begin and len(spans) > 1:
            yield f"sequence {b}", cut(case, [b]), slice(begin, end)
    for _, begin, end in spans:
        row = (begin + end) // 2
        if end - begin > 1 and (alone := lone_row(case, row)) is not None:
            yield f"row {row}", alone, slice(row, row + 1)


# ---------------------------------------------------------------- the suite


def claims(device: Device) -> frozenset[str]:
    """Ops that the device says are batch-invariant."""
    return device.bound.batch_invariant


def run_op(device: Device, op: str, seed: int = 0, cases: int | None = None) -> list[CaseResult]:
    """All results of one op. cases: how many (None: each variant once). Nothing is raised: an exception is a failure.

    KeyError for an op that the contract does not have.
    """
    if op not in OPS:
        raise KeyError(f"no op is called {op!r}; there are {', '.join(OPS)}")
    results: list[CaseResult] = []
    for i, case in enumerate(generate(op, Profile.of(device), seed, cases)):
        runs: list[tuple[Mode, Callable[[], CaseResult | None]]] = []
        if min(case.counts().values(), default=1) > 0:
            runs.append(("call", partial(run_call, device, case)))
        if OPS[op].step:
            runs.append(("program", partial(run_program, device, case, _SLACK[i % len(_SLACK)])))
        if op in claims(device):
            runs.append(("invariance", partial(run_invariance, device, case)))
        for mode, run in runs:
            try:
                result = run()
            except Refused as refusal:
                results.append(CaseResult(op, case.name, mode, "refused", detail=str(refusal)))
                break
            except Exception as error:
                result = _failed(case, mode, f"{type(error).__name__}: {error}")
            if result is not None:
                results.append(result)
    return results


# ---------------------------------------------------------------- what a user sees


@dataclass(frozen=True, slots=True)
class OpReport:
    """One op of ``jumar verify``. worst: the result nearest to (or furthest over) its bound. refused: what the device
    does not take, said so, and so was not tried."""

    op: str
    implementation: str
    results: tuple[CaseResult, ...]
    timings: tuple[Timing, ...] = ()

    @property
    def failed(self) -> tuple[CaseResult, ...]:
        """Results that are wrong."""
        return tuple(r for r in self.results if r.status == "failed")

    @property
    def refused(self) -> tuple[CaseResult, ...]:
        """Cases that the device does not take."""
        return tuple(r for r in self.results if r.status == "refused")

    @property
    def ok(self) -> bool:
        """Nothing wrong, and something tried."""
        return not self.failed and len(self.refused) < len(self.results)

    @property
    def worst(self) -> CaseResult:
        """The result that is nearest to its bound."""
        return max(self.results, key=_badness)


def verify(
    device: Device,
    ops: Sequence[str] | None = None,
    seed: int = 0,
    bench: bool = True,
    progress: Callable[[str], None] | None = None,
) -> list[OpReport]:
    """Run the suite for some or all ops; with ``bench`` also time them against ceilings measured once.

    ConfigError for a name that is no op. progress: told each op's name before it runs.
    """
    names = list(OPS) if ops is None else list(dict.fromkeys(ops))
    unknown = [name for name in names if name not in OPS]
    if unknown:
        raise ConfigError(f"no op is called {', '.join(unknown)}; there are {', '.join(OPS)}")
    labels = {op: f"{label} ({note})" if note else label for op, label, note in device.report.ops}
    results = {}
    for name in names:
        if progress:
            progress(name)
        results[name] = tuple(run_op(device, name, seed))
    timings: dict[str, list[Timing]] = {}
    if bench:
        if progress:
            progress("bandwidth and rate of the device")
        for timing in measure(device, frozenset(names), measure_ceilings(device)):
            timings.setdefault(timing.op, []).append(timing)
    return [OpReport(n, labels.get(n, "?"), results[n], tuple(timings.get(n, ()))) for n in names]


def format_verify(reports: Sequence[OpReport]) -> str:
    """The reports as a table, what failed, and the timings."""
    rows: list[tuple[str, ...]] = [("op", "implementation", "runs", "error/bound", "nmse", "tolerance", "")]
    for r in reports:
        w = r.worst
        refused = f", {len(r.refused)} refused" if r.refused else ""
        verdict = "ok" if r.ok else "NOTHING TRIED" if not r.failed else f"{len(r.failed)} FAILED"
        rows.append((r.op, r.implementation, str(len(r.results)), f"{w.ratio:.2g}", f"{w.nmse:.1e}",
                     str(w.bound) if w.bound else "", verdict + refused))  # fmt: skip
    lines = _table(rows)
    for r in reports:
        lines += [f"{r.op}, {x.mode}, {x.case}: {x.detail}" for x in r.failed[:5]]
        lines += [f"{r.op}: {len(r.failed) - 5} more failures"] if len(r.failed) > 5 else []
        lines += sorted({f"{r.op} refuses {x.case}: {x.detail}" for x in r.refused})
    timed = [t for r in reports for t in r.timings]
    if timed:
        rows = [("op", "shape", "time", "GB/s", "Gop/s", "roofline")]
        for t in timed:
            rate = f"{t.operations / t.seconds / 1e9:.1f}" if t.operations else ""
            rows.append((t.op, t.shape, f"{t.seconds * 1e6:.1f} us", f"{t.moved / t.seconds / 1e9:.1f}", rate,
                         f"{100 * t.share:.0f} %"))  # fmt: skip
        lines += ["", *_table(rows), "roofline: above 100 % where the operands fit in a cache"]
    good = sum(r.ok for r in reports)
    lines += ["", f"{good} of {len(reports)} ops agree with the float64 reference"]
    return "\n".join(lines)


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
