"""How fast each op runs on a device, and how near to what that device can do at all.

The ceilings are measured on the device itself, with ops that it has: bytes per second of a large copy or of reading a
large weight, operations per second of a large matrix product. Of each op the bytes that it must move and the operations
that it must do are counted from its shapes; the least time is the larger of bytes / bandwidth and operations / rate;
its share of the measured time is the share of the roofline (Williams et al., doi 10.1145/1498765.1498785), above 100 %
where the operands fit in a cache: the bandwidth is that of memory. Shapes are those of a model of about one billion
parameters.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from device.cases import Case, Operand, Profile, Rng, Weights, act, f32, host, i32, real
from device.cases_dense import DYNAMIC, angles, float_weights, integer_weights
from device.cases_kv import Batch, attention_case, scratch_cache
from device.cases_sampling import sampling_params
from device.contract import Ceilings, Device
from device.dtypes import itemsize, numpy_dtype
from device.trial import DeviceSide, Refused
from device.weights import CanonicalWeight

HIDDEN, INNER, WIDE, VOCAB = 2048, 5632, 16384, 32768
HEADS = (4, 8, 64)  # kv heads, query heads for each, head size
PREFILL, DECODE, CONTEXT = 256, 8, 1024

_SECONDS = 0.02  # of measuring, three times, the best of which counts
_MAX_CALLS = 4096


@dataclass(frozen=True, slots=True)
class Timing:
    """One op at one shape. seconds: of a call. moved: bytes at least. operations: at least. share: of the roofline."""

    op: str
    shape: str
    seconds: float
    moved: int
    operations: int
    share: float


@dataclass(frozen=True, slots=True)
class Load:
    """A call to time: its case, and what it has to move and to do."""

    case: Case
    moved: int
    operations: int = 0


def time_call(device: Device, call: Callable[[], Any], seconds: float = _SECONDS) -> float:
    """Seconds of a call, many in a row, until the device has done the last; the best of three."""
    tiny = device.tensor(np.zeros(1, np.int32), "int32")
    best, count = math.inf, 1
    call()
    device.numpy(tiny)
    for _ in range(3):
        while True:
            begin = time.perf_counter()
            for _ in range(count):
                call()
            device.numpy(tiny)  # all calls before it have run: they run in call order
            spent = time.perf_counter() - begin
            if spent >= seconds or count >= _MAX_CALLS:
                break
            count = min(_MAX_CALLS, max(2 * count, int(count * seconds / max(spent, 1e-6))))
        best = min(best, spent / count)
    return best


def measure_ceilings(device: Device) -> Ceilings:
    """The best of ``gather_rows``, ``add`` and a product with one row over 64 MiB; square products, ever larger."""
    size, free = itemsize(device.dtype), device.memory().free
    width = 4096
    rows = max(64, min(64 << 20, free // 16) // (width * size))
    ops = device.ops
    x = device.tensor(np.zeros((rows, width), numpy_dtype(device.dtype)), device.dtype)
    order = device.tensor(np.arange(rows, dtype=np.int32), "int32")
    copied = 2 * rows * width * size / time_call(device, lambda: ops.gather_rows(x, order))
    added = 3 * rows * width * size / time_call(device, lambda: ops.add(x, x))
    few = float_weights(np.random.default_rng(0), 64, width, device.dtype)
    w = ops.pack_weight((few.rows(np.arange(rows) % 64),), frozenset({"linear"}))
    one = device.tensor(np.zeros((1, width), numpy_dtype(device.dtype)), device.dtype)
    streamed = rows * width * size / time_call(device, partial(ops.linear, one, w, None, None))
    return Ceilings(max(copied, added, streamed), max(_products(device, free, size), default=0.0))


def _products(device: Device, free: int, size: int) -> Iterator[float]:
    """Operations per second of products of n x n."""
    n, seconds = 512, 0.0
    while seconds < 0.1 and n <= 8192 and 4 * n * n * size < free // 4:
        part = float_weights(np.random.default_rng(0), 64, n, device.dtype)
        w = device.ops.pack_weight((part.rows(np.arange(n) % 64),), frozenset({"linear"}))
        x = device.tensor(np.zeros((n, n), numpy_dtype(device.dtype)), device.dtype)
        seconds = time_call(device, partial(device.ops.linear, x, w, None, None))
        yield 2 * n**3 / seconds
        n *= 2


# ---------------------------------------------------------------- loads


def _normal(rng: Rng, *shape: int) -> Any:
    return rng.standard_normal(shape)


def _dense(rng: Rng, profile: Profile) -> Iterator[Load]:
    s, t, h = itemsize(profile.dtype), PREFILL, HIDDEN
    x, y, w = act(_normal(rng, t, h)), act(_normal(rng, t, h)), real(np.ones(h))
    name = f"{t}x{h}"
    yield Load(Case("rms_norm", name, {"x": x, "w": w, "eps": 1e-5}), 2 * t * h * s, 4 * t * h)
    yield Load(Case("add_rms_norm", name, {"x": x, "residual": y, "w": w, "eps": 1e-5}), 4 * t * h * s, 5 * t * h)
    yield Load(Case("add", name, {"x": x, "y": y}), 3 * t * h * s, t * h)
    rows = i32(rng.permutation(t), "R", -1)
    yield Load(Case("gather_rows", name, {"x": x, "rows": rows}), 2 * t * h * s)
    up = act(_normal(rng, t, 2 * INNER))
    yield Load(
        Case("gated_act", f"{t}x{INNER} silu", {"gate_up": up, "kind": "silu"}), 3 * t * INNER * s, 6 * t * INNER
    )
    kv, group, d = HEADS
    q, k = act(_normal(rng, t, kv * group, d)), act(_normal(rng, t, kv, d))
    table = real(angles(CONTEXT, d))
    args = {"q": q, "k": k, "positions": i32(np.arange(t), "T"), "cos_sin": table}
    moved = 2 * t * kv * (group + 1) * d * s + t * d * 4
    yield Load(Case("rope", f"{t} rows {kv * group}/{kv} heads of {d}", args), moved, 3 * t * kv * (group + 1) * d)
    big = Weights((float_weights(rng, 4096, h, profile.dtype),), frozenset({"embed"}))
    ids = i32(rng.integers(0, 4096, t), "T")
    yield Load(Case("embed", name, {"ids": ids, "table": big, "scale": 1.0}), 2 * t * h * s)


def _kinds(rng: Rng, dtype: str, n: int, k: int) -> dict[str, CanonicalWeight]:
    """Weights [n, k] of the kinds to time; 512 random rows, repeated."""
    few = {
        dtype: float_weights(rng, 512, k, dtype),
        "int8 gK": integer_weights(rng, 512, k, "int8", 0),
        "int8 gK dynamic": integer_weights(rng, 512, k, "int8", 0, activation=DYNAMIC),
        "int4 g128": integer_weights(rng, 512, k, "int4", 128),
        "uint4 g32": integer_weights(rng, 512, k, "uint4", 32),
    }
    rows = np.arange(n) % 512
    return {kind: weight.rows(rows) for kind, weight in few.items()}


def _linear(rng: Rng, profile: Profile) -> Iterator[Load]:
    """One row through a weight that no cache holds, many rows through a smaller one."""
    s, h = itemsize(profile.dtype), HIDDEN
    for t, n in ((1, WIDE), (PREFILL, HIDDEN)):
        for kind, weight in _kinds(rng, profile.dtype, n, h).items():
            args = {"x": act(_normal(rng, t, h)), "w": Weights((weight,)), "bias": None, "out": None}
            moved = weight.nbytes + t * (h + n) * s
            yield Load(Case("linear", f"{t}x{h}->{n} {kind}", args), moved, 2 * t * h * n)


def _composites(rng: Rng, profile: Profile) -> Iterator[Load]:
    s, h, n = itemsize(profile.dtype), HIDDEN, WIDE
    for kind, w in _kinds(rng, profile.dtype, n, h).items():
        if kind not in (profile.dtype, "int4 g128"):
            continue
        x = act(_normal(rng, 1, h))
        args = {"x": x, "residual": x, "w_norm": real(np.ones(h)), "eps": 1e-5, "w": Weights((w,)), "bias": None}
        yield Load(Case("norm_linear", f"1x{h}->{n} {kind}", args), w.nbytes + (3 * h + n) * s, 2 * h * n)
        args = {"gate_up": act(_normal(rng, 1, 2 * h)), "kind": "silu", "w": Weights((w,)), "bias": None}
        yield Load(Case("act_linear", f"1x{h}->{n} {kind}", args), w.nbytes + (2 * h + n) * s, 2 * h * n)


def _kv(rng: Rng, profile: Profile) -> Iterator[Load]:
    s, (kv, group, d) = itemsize(profile.dtype), HEADS
    size = profile.block_sizes[0]
    batches = (
        Batch(f"decode {DECODE} of {CONTEXT}", ((1, CONTEXT),) * min(DECODE, profile.max_seqs)),
        Batch(f"prefill {PREFILL}", ((PREFILL, PREFILL),)),
    )
    for kv_dtype in dict.fromkeys((profile.kv_dtypes[0], *(k for k in profile.kv_dtypes if k == "int8"))):
        each = kv * (d * itemsize(kv_dtype) + (4 if kv_dtype == "int8" else 0))
        for batch in batches:
            case = attention_case(rng, profile, batch, HEADS, kv_dtype, size)
            seen = sum(sum(range(length - rows + 1, length + 1)) for rows, length in batch.sequences)
            context = sum(length for _, length in batch.sequences)
            moved = 2 * context * each + 2 * case.args["q"].values.size * s
            yield Load(case, moved, 4 * seen * kv * group * d)
        t = PREFILL
        cache = scratch_cache(rng, profile, kv_dtype, (kv, d), t // size + 2, size)
        slots = rng.permutation(cache.slots)[:t]
        k, v = act(_normal(rng, t, kv, d)), act(_normal(rng, t, kv, d))
        args: dict[str, Any] = {"k": k, "v": v, "layer": cache, "slots": i32(slots, "T", -1)}
        yield Load(Case("store_kv", f"{t} rows {kv}x{d} {kv_dtype}", args), 2 * t * (kv * d * s + each))
        args = {"layer": cache, "slots": i32(slots, "T", -1)}
        yield Load(Case("read_kv", f"{t} rows {kv}x{d} {kv_dtype}", args), 2 * t * (kv * d * s + each))
        heads = (kv * group, kv, d)
        args = {
            "qkv": act(_normal(rng, t, kv * (group + 2) * d)), "heads": heads, "q_norm": None, "k_norm": None,
            "eps": 1e-6, "positions": i32(np.arange(t), "T"), "cos_sin": real(angles(CONTEXT, d)), "layer": cache,
            "slots": i32(slots, "T", -1),
        }  # fmt: skip
        moved = t * (kv * (2 * group + 2) * d * s + 2 * each)
        yield Load(Case("qkv_rope_store", f"{t} rows {kv * group}/{kv}x{d} {kv_dtype}", args), moved)
        whole = scratch_cache(rng, profile, kv_dtype, (kv, d), t // size + 2, size, layer=None)
        args = {"kv": whole, "src": host(whole.slots[: t // 2]), "dst": host(whole.slots[t // 2 : t // 2 * 2])}
        yield Load(Case("move_kv", f"{t // 2} slots {kv_dtype}", args, rows=None), 2 * (t // 2) * 2 * each)


def _logits(rng: Rng, profile: Profile) -> Iterator[Load]:
    r, v = min(DECODE, profile.max_seqs), VOCAB
    s = 8 if profile.dtype == "float64" else 4
    z = real(3 * _normal(rng, r, v), "R")
    u = f32(rng.random(r), "R")
    args: dict[str, Any] = {"logits": z, "params": None, "uniforms": u}
    yield Load(Case("sample", f"{r}x{v} argmax", args, rows="R"), r * v * s)
    settings = {"plain": (0.8, 0, 1.0, 0.0), "top_k 50": (0.8, 50, 1.0, 0.0), "top_p 0.9": (0.8, 0, 0.9, 0.0)}
    for name, values in settings.items():
        args = {"logits": z, "params": sampling_params([values] * r), "uniforms": u}
        yield Load(Case("sample", f"{r}x{v} {name}", args, rows="R"), r * v * s)
    ids = i32(rng.integers(0, v, r), "R", -1)
    yield Load(Case("logprobs", f"{r}x{v}, 5 best", {"logits": z, "ids": ids, "n": 5}, rows="R"), r * v * s)
    entries = 256 * r
    args = {
        "logits": z,
        "row": i32(np.repeat(np.arange(r), 256), "E", -1),
        "id": i32(np.tile(rng.permutation(v)[:256], r), "E"),
        "factor": f32(np.ones(entries), "E"),
        "bias": f32(np.zeros(entries), "E"),
    }
    yield Load(Case("edit_logits", f"{entries} entries in {r}x{v}", args, rows="E"), entries * (16 + 2 * s))
    args = {"logits": z, "bitmask": Operand(np.full((r, v // 32), -1, np.int32), "i32", "R")}
    yield Load(Case("mask_logits", f"{r}x{v}", args, rows="R"), r * v * (2 * s) + r * v // 8)
    q = np.full((r, v), 1.0 / v)
    args = {
        "logits": z,
        "draft_ids": i32([*rng.integers(0, v, r - 1), -1], "R", -1),
        "draft_probs": real(q, "R"),
        "row_start": i32([0, r], "B", "last", extra=1),
        "params": sampling_params([(0.8, 0, 1.0, 0.0)] * r),
        "uniforms": f32(rng.random((r, 2)), "R"),
    }
    yield Load(Case("verify", f"{r} rows of one sequence, {v}", args, rows="B"), 2 * r * v * s)


def loads(profile: Profile, ops: frozenset[str]) -> Iterator[Load]:
    """The calls to time of the ops named, made one after another."""
    rng = np.random.default_rng(0)
    groups: dict[Callable[[Rng, Profile], Iterator[Load]], set[str]] = {
        _dense: {"rms_norm", "add_rms_norm", "add", "gather_rows", "gated_act", "rope", "embed"},
        _linear: {"linear"},
        _composites: {"norm_linear", "act_linear"},
        _kv: {"paged_attention", "store_kv", "read_kv", "qkv_rope_store", "move_kv"},
        _logits: {"sample", "logprobs", "edit_logits", "mask_logits", "verify"},
    }
    for make, names in groups.items():
        if names & ops:
            yield from (load for load in make(rng, profile) if load.case.op in ops)


def measure(device: Device, ops: frozenset[str], ceilings: Ceilings) -> Iterator[Timing]:
    """A timing for each load; those of weights or caches that the device does not take are left out."""
    for load in loads(Profile.of(device), ops):
        case = load.case
        try:
            args = DeviceSide(device).call_args(case)
        except Refused:
            continue
        operands = [args[name] for name in case.args]
        op = getattr(device.ops, case.op)
        seconds = time_call(device, partial(op, *operands))
        least = max(load.moved / ceilings.bandwidth, load.operations / ceilings.rate if ceilings.rate else 0.0)
        yield Timing(case.op, case.name, seconds, load.moved, load.operations, least / seconds)
