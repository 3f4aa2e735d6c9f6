"""Cases of the ops on activations and weights: embed, norms, linear, rope, activations, rows, and two composites."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from device.cases import (
    Case,
    Generator,
    Operand,
    Profile,
    Rng,
    Values,
    Weights,
    act,
    clear_of_ties,
    clear_rows,
    i32,
    real,
    rounded,
)
from device.dtypes import encode
from device.weights import FLOAT_ACTIVATION, NO_ACTIVATION, Activation, CanonicalWeight, pack_nibbles

DYNAMIC = Activation("dynamic")
GROUPS = Activation("dynamic", group=32)
STATIC = Activation("static", scale=0.0317, zero=-5)

# (rows, hidden): one row, few, more than a vector or a tile holds, sizes that no tile divides.
SHAPES = ((1, 64), (5, 96), (17, 576), (2, 1040), (33, 128), (0, 64))


def _normal(rng: Rng, *shape: int) -> Values:
    return rng.standard_normal(shape)


def float_weights(rng: Rng, n: int, k: int, dtype: str) -> CanonicalWeight:
    """Random float weights [n, k] stored as ``dtype``, of a size that keeps outputs near 1."""
    return CanonicalWeight(dtype, encode(rng.standard_normal((n, k)) / np.sqrt(k), dtype))


def integer_weights(
    rng: Rng,
    n: int,
    k: int,
    dtype: str,
    group: int,
    *,
    offset: bool = False,
    perm: bool = False,
    activation: Activation = NO_ACTIVATION,
) -> CanonicalWeight:
    """Random int8, int4 or uint4 weights [n, k]; group 0 stands for k."""
    low, high = {"int8": (-128, 128), "int4": (-8, 8), "uint4": (0, 16)}[dtype]
    values = rng.integers(low, high, (n, k))
    group = group or k
    scale = ((0.5 + rng.random((n, k // group))) / (np.sqrt(k) * high / 2)).astype(np.float32)
    shift = (-(high + low) / 2 * scale + rng.standard_normal(scale.shape) * scale).astype(np.float32)
    return CanonicalWeight(
        dtype,
        values.astype(np.int8) if dtype == "int8" else pack_nibbles(values),
        scale,
        shift if offset or dtype == "uint4" else None,
        group,
        rng.permutation(k).astype(np.int32) if perm else None,
        activation,
    )


def weight_variants(rng: Rng, n: int) -> Iterator[tuple[str, tuple[CanonicalWeight, ...]]]:
    """(name, weights that share one input): every dtype, group, offset, permutation and activation, and mixtures."""
    for dtype in ("float32", "float16", "bfloat16"):
        yield dtype, (float_weights(rng, n, 160, dtype),)
    yield "bfloat16 q, k, v", tuple(float_weights(rng, m, 96, "bfloat16") for m in (n, 16, 16))
    for dtype in ("int8", "int4", "uint4"):
        for group in (16, 32, 64, 128, 0):
            w = integer_weights(rng, n, 256, dtype, group, offset=group == 32)
            yield f"{dtype} g{group or 'K'}{' offset' if w.offset is not None else ''}", (w,)
    yield "int4 g32 perm", (integer_weights(rng, n, 128, "int4", 32, perm=True),)
    yield "uint4 g64 perm", (integer_weights(rng, n, 128, "uint4", 64, perm=True),)
    for activation in (DYNAMIC, STATIC, GROUPS):
        kind = f"{activation.kind} groups" if activation.group else activation.kind
        yield f"int8 gK {kind}", (integer_weights(rng, n, 192, "int8", 0, activation=activation),)
        yield f"int4 g32 {kind}", (integer_weights(rng, n, 128, "int4", 32, activation=activation),)
    yield (
        "int8 gK dynamic q, k, v",
        tuple(integer_weights(rng, m, 128, "int8", 0, activation=DYNAMIC) for m in (n, 16, 16)),
    )
    yield "int8 g64 input as it is", (integer_weights(rng, n, 128, "int8", 64, activation=FLOAT_ACTIVATION),)
    yield (
        "uint4 g64 input as it is, int8 g64 whose input is free",
        (
            integer_weights(rng, n, 128, "uint4", 64, activation=FLOAT_ACTIVATION),
            integer_weights(rng, 16, 128, "int8", 64),
        ),
    )
    yield (
        "mixed: uint4 g32 perm, int8 dynamic, float16, int8 g64",
        (
            integer_weights(rng, n, 128, "uint4", 32, perm=True),
            integer_weights(rng, 16, 128, "int8", 0, activation=DYNAMIC),
            float_weights(rng, 24, 128, "float16"),
            integer_weights(rng, 8, 128, "int8", 64),
        ),
    )


def _input(rng: Rng, rows: int, parts: tuple[CanonicalWeight, ...], profile: Profile) -> Values:
    """An input [rows, K] whose quantised form, where there is one, does not hang on the last bit."""
    x = _normal(rng, rows, parts[0].shape[1])
    for part in parts if rows else ():
        given = profile.input_of(part)
        if given.kind == "dynamic":
            x = clear_rows(x, profile.dtype, given.group, part.perm if given.group else None)
        elif given.kind == "static":
            x = clear_of_ties(x, profile.dtype, STATIC.scale)
    return x


def _rows(index: int) -> int:
    return (1, 7, 2, 19, 4)[index % 5]


def linear(rng: Rng, profile: Profile) -> Iterator[Case]:
    for i, (name, parts) in enumerate(weight_variants(rng, 48)):
        rows = _rows(i)
        n, k = sum(p.shape[0] for p in parts), parts[0].shape[1]
        bias = real(_normal(rng, n)) if i % 3 == 1 else None
        out = "float32" if i % 4 == 3 else None
        x = act(_input(rng, rows, parts, profile))
        args: dict[str, Any] = {"x": x, "w": Weights(parts), "bias": bias, "out": out}
        yield Case("linear", f"{rows}x{k}->{n} {name}", args, strided=i % 5 == 2, bounds={"depth": k})
    for rows, n, k in ((1, 131, 64), (3, 1000, 32), (130, 40, 48), (0, 24, 64)):
        parts = (float_weights(rng, n, k, "float32"),)
        args = {"x": act(_normal(rng, rows, k)), "w": Weights(parts), "bias": None, "out": "float32"}
        yield Case("linear", f"{rows}x{k}->{n} head", args, bounds={"depth": k})


def pack_weight(rng: Rng, profile: Profile) -> Iterator[Case]:
    """Tied tables: held once, used by both embed and linear."""
    for name, parts in weight_variants(rng, 40):
        n, k = parts[0].shape
        if len(parts) > 1 or parts[0].perm is not None or parts[0].activation.kind != "none":
            continue
        yield Case(
            "pack_weight",
            f"{n}x{k} tied {name}",
            {"weights": Weights(parts, frozenset({"linear", "embed"}))},
            {"ids": i32(rng.permutation(n), "T", -1), "x": act(_input(rng, 3, parts, profile), "R")},
            rows=None,
            bounds={"depth": k},
        )


def embed(rng: Rng, profile: Profile) -> Iterator[Case]:
    tables = [
        float_weights(rng, 131, 64, "float32"),
        float_weights(rng, 40, 96, "bfloat16"),
        float_weights(rng, 64, 48, "float16"),
        integer_weights(rng, 72, 128, "int8", 32),
        integer_weights(rng, 72, 64, "int8", 0),
        integer_weights(rng, 56, 128, "int4", 64),
        integer_weights(rng, 56, 128, "uint4", 32),
    ]
    for i, table in enumerate(tables):
        n, h = table.shape
        for rows in (1, 9):
            ids = rng.integers(0, n, rows)
            if rows > 1:
                ids[[0, 3, 5]] = (n, -1, n + 1000)
            scale = 1.0 if i % 2 else float(np.float32(h**0.5))
            args = {"ids": i32(ids, "T"), "table": Weights((table,), frozenset({"embed"})), "scale": scale}
            yield Case("embed", f"{rows} of {n}x{h} {table.dtype} scale {scale:.3g}", args)


def rms_norm(rng: Rng, profile: Profile) -> Iterator[Case]:
    for i, (rows, h) in enumerate(SHAPES):
        args = {"x": act(3 * _normal(rng, rows, h)), "w": real(1 + 0.3 * _normal(rng, h)), "eps": (1e-5, 1e-6)[i % 2]}
        yield Case("rms_norm", f"{rows}x{h}", args, strided=i % 2 == 1, bounds={"depth": h})
    for i, (rows, heads, dim) in enumerate(((1, 3, 64), (6, 8, 128), (5, 1, 16), (2, 4, 256))):
        args = {"x": act(_normal(rng, rows, heads, dim)), "w": real(_normal(rng, dim)), "eps": 1e-6}
        yield Case("rms_norm", f"{rows}x{heads}x{dim}", args, strided=i % 2 == 1, bounds={"depth": dim})
    small = {"x": act(1e-4 * _normal(rng, 3, 64)), "w": real(_normal(rng, 64)), "eps": 1e-5}
    yield Case("rms_norm", "small values, eps decides", small, bounds={"depth": 64})
    zero = {"x": act(np.zeros((2, 64))), "w": real(_normal(rng, 64)), "eps": 1e-5}
    yield Case("rms_norm", "rows of zeros", zero)


def add_rms_norm(rng: Rng, profile: Profile) -> Iterator[Case]:
    for i, (rows, h) in enumerate(SHAPES):
        args = {
            "x": act(_normal(rng, rows, h)),
            "residual": act(4 * _normal(rng, rows, h)),
            "w": real(1 + 0.3 * _normal(rng, h)),
            "eps": 1e-5,
        }
        yield Case("add_rms_norm", f"{rows}x{h}", args, strided=i % 2 == 1, bounds={"depth": h})


def add(rng: Rng, profile: Profile) -> Iterator[Case]:
    for i, (rows, h) in enumerate(SHAPES):
        args = {"x": act(_normal(rng, rows, h)), "y": act(_normal(rng, rows, h))}
        yield Case("add", f"{rows}x{h}", args, strided=i % 2 == 1)


def split_qkv(rng: Rng, profile: Profile) -> Iterator[Case]:
    for i, (rows, hq, hkv, d) in enumerate(((1, 9, 3, 64), (5, 4, 4, 96), (3, 8, 1, 128), (2, 2, 2, 16))):
        args: dict[str, Any] = {"qkv": act(_normal(rng, rows, (hq + 2 * hkv) * d))}
        args |= {"heads": hq, "kv_heads": hkv, "dim": d}
        yield Case("split_qkv", f"{rows} rows {hq}+2·{hkv} heads of {d}", args, strided=i % 2 == 1)


def angles(positions: int, rot: int) -> Values:
    """cos_sin [positions, rot] of plain rotary embedding with base 10000."""
    at = np.arange(positions)[:, None] * 10000.0 ** (-np.arange(0, rot, 2) / rot)
    return np.concatenate((np.cos(at), np.sin(at)), axis=1)


def rope(rng: Rng, profile: Profile) -> Iterator[Case]:
    shapes = ((1, 9, 3, 64, 64), (6, 4, 4, 128, 128), (5, 8, 2, 96, 48), (3, 2, 1, 256, 64), (7, 4, 2, 16, 16))
    for i, (rows, hq, hkv, d, rot) in enumerate(shapes):
        args = {
            "q": act(_normal(rng, rows, hq, d)),
            "k": act(_normal(rng, rows, hkv, d)),
            "positions": i32(rng.integers(0, 200, rows), "T"),
            "cos_sin": real(angles(200, rot)),
        }
        yield Case("rope", f"{rows} rows {hq}/{hkv} heads of {d}, rot {rot}", args, strided=i % 2 == 1)


def gated_act(rng: Rng, profile: Profile) -> Iterator[Case]:
    for kind in ("silu", "gelu_tanh", "gelu"):
        for i, (rows, h) in enumerate(((1, 64), (5, 1536), (3, 43), (18, 96))):
            x = _normal(rng, rows, 2 * h) * (1.0, 3.0)[i % 2]
            yield Case("gated_act", f"{kind} {rows}x{h}", {"gate_up": act(x), "kind": kind}, strided=i % 2 == 1)
        far = np.tile(np.array([-200.0, -90.0, -20.0, -5.0, 0.0, 5.0, 20.0, 200.0] + [1.0] * 8), (2, 1))
        yield Case("gated_act", f"{kind} far out", {"gate_up": act(far), "kind": kind})


def gather_rows(rng: Rng, profile: Profile) -> Iterator[Case]:
    sources: list[tuple[str, Operand]] = [
        ("activations 9x96", act(_normal(rng, 9, 96))),
        ("one row", act(_normal(rng, 1, 64))),
        ("f32 logits", real(_normal(rng, 6, 1000), "T")),
        ("i32 ids", i32(rng.integers(0, 1 << 30, 11), "T")),
        ("heads", act(_normal(rng, 5, 3, 64))),
    ]
    for i, (name, x) in enumerate(sources):
        n = x.values.shape[0]
        for rows in (rng.permutation(n), np.array([n - 1, -1, 0, -1, 0]), np.array([-1]), np.zeros(0, int)):
            args = {"x": x, "rows": i32(rows, "R", -1)}
            strided = i % 2 == 0 and x.values.ndim > 1
            yield Case("gather_rows", f"{len(rows)} of {name}", args, strided=strided, rows="R")


def _collective(op: str) -> Generator:
    def make(rng: Rng, profile: Profile) -> Iterator[Case]:
        for i, (rows, h) in enumerate(((1, 64), (5, 96))):
            yield Case(op, f"{rows}x{h}, a world of one", {"x": act(_normal(rng, rows, h))}, strided=i == 1)

    return make


def _step(values: Values, parts: tuple[CanonicalWeight, ...], profile: Profile) -> float:
    """One int8 step of the input (at most) relative to its rms; 0 if it is quantised for no weight."""
    kinds = {profile.input_of(p).kind for p in parts}
    rms = float(np.sqrt((values * values).mean()))
    dynamic = float(np.abs(values).max()) / 127 / rms if "dynamic" in kinds else 0.0
    return max(dynamic, STATIC.scale / rms if "static" in kinds else 0.0)


def norm_linear(rng: Rng, profile: Profile) -> Iterator[Case]:
    for i, (name, parts) in enumerate(weight_variants(rng, 40)):
        rows = _rows(i)
        n, k = sum(p.shape[0] for p in parts), parts[0].shape[1]
        first = i % 3 == 0
        # One size for the weight of the norm: the input of linear has about an rms of 1.
        x, residual = rounded(_normal(rng, rows, k), profile.dtype), rounded(2 * _normal(rng, rows, k), profile.dtype)
        total = x if first else x + residual
        normed = total / np.sqrt((total * total).mean(axis=1, keepdims=True))
        args: dict[str, Any] = {
            "x": act(x),
            "residual": None if first else act(residual),
            "w_norm": real(1 + 0.1 * _normal(rng, k)),
            "eps": 1e-5,
            "w": Weights(parts),
            "bias": real(_normal(rng, n)) if i % 2 else None,
        }
        bounds = {"depth": k, "step": 1.3 * _step(normed, parts, profile), "elements": rows * k}
        label = f"{rows}x{k}->{n} {name}{' first' if first else ''}"
        yield Case("norm_linear", label, args, strided=i % 4 == 2, bounds=bounds)


def act_linear(rng: Rng, profile: Profile) -> Iterator[Case]:
    for i, (name, parts) in enumerate(weight_variants(rng, 40)):
        rows, kind = _rows(i), ("silu", "gelu_tanh", "gelu")[i % 3]
        n, k = sum(p.shape[0] for p in parts), parts[0].shape[1]
        gate_up = _normal(rng, rows, 2 * k) * 2
        hidden = np.maximum(gate_up[:, :k], 0) * gate_up[:, k:]  # near enough to the activation for its size
        args: dict[str, Any] = {
            "gate_up": act(gate_up),
            "kind": kind,
            "w": Weights(parts),
            "bias": real(_normal(rng, n)) if i % 2 else None,
        }
        bounds = {"depth": k, "step": _step(hidden, parts, profile), "elements": rows * k}
        yield Case("act_linear", f"{rows}x{k}->{n} {kind} {name}", args, strided=i % 4 == 2, bounds=bounds)


GENERATORS: dict[str, Generator] = {
    "embed": embed,
    "rms_norm": rms_norm,
    "add_rms_norm": add_rms_norm,
    "add": add,
    "pack_weight": pack_weight,
    "linear": linear,
    "split_qkv": split_qkv,
    "rope": rope,
    "gated_act": gated_act,
    "gather_rows": gather_rows,
    "all_reduce": _collective("all_reduce"),
    "all_gather": _collective("all_gather"),
    "norm_linear": norm_linear,
    "act_linear": act_linear,
}
