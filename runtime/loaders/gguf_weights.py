"""The storage formats of GGUF as canonical weights.

Exactly (the same float32 values as ggml's dequantisation): F64, F32, F16, BF16; Q8_0, Q4_0, Q4_1, Q5_0, Q4_K, Q6_K.
The block layouts are those of https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h. A scale that is a
product (Q4_K, Q6_K: a half-precision number times a small integer) has at most 19 significant bits, so float32 holds
it exactly. All other formats are dequantised with the ``gguf`` package.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device.dtypes import decode
from device.errors import UnsupportedModel
from device.weights import CanonicalWeight, float_weight
from runtime.loaders.gguf import GGUFFile, TensorInfo

FLOAT_TYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# Rows are converted in pieces of about this many bytes, so that temporaries stay in the cache.
_CHUNK_BYTES = 1 << 18
_F16_MAX = 65504.0

_Q4_0 = np.dtype([("d", "<f2"), ("qs", "u1", 16)])
_Q4_1 = np.dtype([("d", "<f2"), ("m", "<f2"), ("qs", "u1", 16)])
_Q5_0 = np.dtype([("d", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16)])
_Q8_0 = np.dtype([("d", "<f2"), ("qs", "i1", 32)])
_Q4_K = np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qs", "u1", (4, 32))])
_Q6_K = np.dtype([("ql", "u1", (2, 2, 32)), ("qh", "u1", (2, 32)), ("scales", "i1", 16), ("d", "<f2")])

Blocks = NDArray[Any]


class _Target:
    """The arrays a format fills: q [N, nb, bytes of a block], scale and offset [N, nb, groups of a block]."""

    def __init__(self, dtype: str, group: int, rows: int, blocks: int, block: int, offset: bool) -> None:
        self.dtype = dtype
        self.group = group
        per_block = block // 2 if dtype in ("int4", "uint4") else block
        self.q: NDArray[Any] = np.empty((rows, blocks, per_block), np.int8 if dtype == "int8" else np.uint8)
        self.scale = np.empty((rows, blocks, block // group), np.float32)
        self.offset = np.empty_like(self.scale) if offset else None

    def part(self, rows: slice) -> _Target:
        piece = object.__new__(_Target)
        piece.dtype, piece.group = self.dtype, self.group
        piece.q, piece.scale = self.q[rows], self.scale[rows]
        piece.offset = None if self.offset is None else self.offset[rows]
        return piece

    def weight(self) -> CanonicalWeight:
        n = self.q.shape[0]
        offset = None if self.offset is None else self.offset.reshape(n, -1)
        return CanonicalWeight(self.dtype, self.q.reshape(n, -1), self.scale.reshape(n, -1), offset, self.group)


def _pair_nibbles(qs: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
    """qs [..., 2m]: low nibbles are values 0…2m-1, high nibbles values 2m…4m-1; out [..., 2m]: neighbours share a byte.

    Two source bytes are one little-endian 16-bit word, so shifting the word pairs their nibbles at once.
    """
    word = np.ascontiguousarray(qs).view("<u2")
    half = word.shape[-1]
    high = word >> 4
    word = (word & 0x000F) | (high & 0x00F0)
    out[..., :half] = word
    word = (high & 0x000F) | ((high >> 4) & 0x00F0)
    out[..., half:] = word


def _q4_0(blocks: Blocks, to: _Target) -> None:
    _pair_nibbles(blocks["qs"], to.q)
    # w = (q - 8) d: flipping bit 3 turns 0…15 into two's complement of -8…7.
    np.bitwise_xor(to.q, 0x88, out=to.q)
    to.scale[..., 0] = blocks["d"]


def _q4_1(blocks: Blocks, to: _Target) -> None:
    assert to.offset is not None
    _pair_nibbles(blocks["qs"], to.q)
    to.scale[..., 0] = blocks["d"]
    to.offset[..., 0] = blocks["m"]


def _q5_0(blocks: Blocks, to: _Target) -> None:
    qs = blocks["qs"]
    fifth = np.unpackbits(np.ascontiguousarray(blocks["qh"]), axis=-1, bitorder="little")
    fifth <<= 4
    np.bitwise_and(qs, 15, out=to.q[..., :16], casting="unsafe")
    np.right_shift(qs, 4, out=to.q[..., 16:], casting="unsafe")
    to.q |= fifth.view(np.int8)
    to.q -= 16
    to.scale[..., 0] = blocks["d"]


def _q8_0(blocks: Blocks, to: _Target) -> None:
    to.q[...] = blocks["qs"]
    to.scale[..., 0] = blocks["d"]


def _q4_k(blocks: Blocks, to: _Target) -> None:
    assert to.offset is not None
    n, nb, _ = to.q.shape
    _pair_nibbles(blocks["qs"], to.q.reshape(n, nb, 4, 32))
    # Twelve bytes hold eight 6-bit scales and eight 6-bit minima: a, b whole in the low six bits of the first eight
    # bytes for groups 0-3; for groups 4-7 four bits in the last four bytes and two on top of the first eight.
    packed = blocks["scales"]
    a, b, c = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    scale, minimum = to.scale, to.offset
    scale[..., :4] = a & 63
    scale[..., 4:] = (c & 15) | ((a >> 2) & 48)
    minimum[..., :4] = b & 63
    minimum[..., 4:] = (c >> 4) | ((b >> 2) & 48)
    scale *= blocks["d"].astype(np.float32)[..., None]
    minimum *= -blocks["dmin"].astype(np.float32)[..., None]


def _q6_k(blocks: Blocks, to: _Target) -> None:
    n, nb, _ = to.q.shape
    ql, qh = blocks["ql"], blocks["qh"]  # [n, nb, 2, 2, 32], [n, nb, 2, 32]: two halves of 128 values
    q = to.q.view(np.uint8).reshape(n, nb, 2, 4, 32)
    np.bitwise_and(ql, 15, out=q[..., 0:2, :])
    np.right_shift(ql, 4, out=q[..., 2:4, :])
    for quarter in range(4):
        top = (qh << 4) if quarter == 0 else (qh << 2) if quarter == 1 else qh if quarter == 2 else (qh >> 2)
        q[..., quarter, :] |= top & 48
    to.q -= 32
    to.scale[...] = blocks["scales"]
    to.scale *= blocks["d"].astype(np.float32)[..., None]


# Format -> (block layout, canonical dtype, columns that share a scale, has offsets, conversion).
_EXACT: dict[str, tuple[np.dtype[Any], str, int, bool, Callable[[Blocks, _Target], None]]] = {
    "Q4_0": (_Q4_0, "int4", 32, False, _q4_0),
    "Q4_1": (_Q4_1, "uint4", 32, True, _q4_1),
    "Q5_0": (_Q5_0, "int8", 32, False, _q5_0),
    "Q8_0": (_Q8_0, "int8", 32, False, _q8_0),
    "Q4_K": (_Q4_K, "uint4", 32, True, _q4_k),
    "Q6_K": (_Q6_K, "int8", 16, False, _q6_k),
}
KEPT_TYPES = (*FLOAT_TYPES, *_EXACT)


def matrix(file: GGUFFile, info: TensorInfo, rows: NDArray[np.intp] | None = None) -> CanonicalWeight:
    """A tensor of two dimensions as a canonical weight [N, K]; ``rows`` reorders its output rows.

    Floats are views of the file unless rows are reordered. Formats outside of KEPT_TYPES come back as float16, or as
    float32 where float16 would overflow. Raises UnsupportedModel for a format that nobody can dequantise.
    """
    n, k = info.shape
    kind = info.type
    raw = file.raw(info)
    if kind.name in FLOAT_TYPES:
        dtype = FLOAT_TYPES[kind.name]
        weight = float_weight(raw.view(_little_endian(dtype)).reshape(n, k), dtype)
        return weight if rows is None else weight.rows(rows)
    raw = raw.reshape(n, k // kind.block * kind.size)
    if kind.name not in _EXACT:
        weight = _dequantised(file, info, raw)
        return weight if rows is None else weight.rows(rows)
    layout, dtype, group, has_offset, convert = _EXACT[kind.name]
    if rows is not None:
        raw = raw[rows]
    blocks = raw.view(layout)
    to = _Target(dtype, group, n, k // kind.block, kind.block, has_offset)
    step = max(1, _CHUNK_BYTES // max(1, raw.shape[1]))
    for start in range(0, n, step):
        part = slice(start, start + step)
        convert(blocks[part], to.part(part))
    return to.weight()


def vector(file: GGUFFile, info: TensorInfo) -> NDArray[np.float32]:
    """A tensor as float32 in its own shape, always a copy: norm weights, biases, rope divisors."""
    raw = file.raw(info)
    if info.type.name in FLOAT_TYPES:
        dtype = FLOAT_TYPES[info.type.name]
        values = decode(raw.view(_little_endian(dtype)), dtype, np.float32)
        return np.array(values, np.float32).reshape(info.shape)
    row = info.shape[-1] // info.type.block * info.type.size
    return _dequantise(file, info, raw.reshape(-1, row)).reshape(info.shape)


def _little_endian(dtype: str) -> np.dtype[Any]:
    return np.dtype({"float64": "<f8", "float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}[dtype])


def _dequantised(file: GGUFFile, info: TensorInfo, raw: NDArray[np.uint8]) -> CanonicalWeight:
    """Formats that we do not keep, piece by piece so that float32 never exists as a whole unless it must."""
    n, k = info.shape
    step = max(1, (1 << 22) // k)
    out: NDArray[Any] = np.empty((n, k), np.float16)
    for start in range(0, n, step):
        piece = _dequantise(file, info, raw[start : start + step])
        if out.dtype == np.float16 and np.abs(piece).max(initial=0.0) > _F16_MAX:
            out = out.astype(np.float32)
            for again in range(0, start, step):
                out[again : again + step] = _dequantise(file, info, raw[again : again + step])
        out[start : start + step] = piece
    return float_weight(out, str(out.dtype))


def _dequantise(file: GGUFFile, info: TensorInfo, raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    try:
        values = dequantize(raw, GGMLQuantizationType[info.type.name])
    except (KeyError, NotImplementedError) as e:
        raise UnsupportedModel(
            f"{file.path}: tensor {info.name!r} is stored as {info.type.name}, which cannot be dequantised; "
            f"use a file with {', '.join(KEPT_TYPES)}"
        ) from e
    return np.asarray(values, np.float32)
