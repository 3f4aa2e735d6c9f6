"""A reader of GGUF files, versions 2 and 3, over a memory map.

The layout is that of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Only the container is read here:
metadata and tensor descriptions; what the bytes of a tensor mean is in ``gguf_weights``. Arrays of strings (a
vocabulary has 50 000 to 260 000) are walked once for their offsets and decoded when somebody asks.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from device.errors import LoadError, UnsupportedModel

MAGIC = b"GGUF"
_STRING, _ARRAY, _BOOL = 8, 9, 7
# Type number in the file -> struct code; NumPy takes the same code in arrays.
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 10: "<Q", 11: "<q", 12: "<d"}
_MAX_DIMS = 4
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class TensorType:
    """A storage format: ``block`` values take ``size`` bytes."""

    name: str
    block: int
    size: int


# Number in the file -> format (https://github.com/ggml-org/ggml/blob/master/include/ggml.h, enum ggml_type).
TENSOR_TYPES = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    16: TensorType("IQ2_XXS", 256, 66),
    17: TensorType("IQ2_XS", 256, 74),
    18: TensorType("IQ3_XXS", 256, 98),
    19: TensorType("IQ1_S", 256, 50),
    20: TensorType("IQ4_NL", 32, 18),
    21: TensorType("IQ3_S", 256, 110),
    22: TensorType("IQ2_S", 256, 82),
    23: TensorType("IQ4_XS", 256, 136),
    24: TensorType("I8", 1, 1),
    25: TensorType("I16", 1, 2),
    26: TensorType("I32", 1, 4),
    27: TensorType("I64", 1, 8),
    28: TensorType("F64", 1, 8),
    29: TensorType("IQ1_M", 256, 56),
    30: TensorType("BF16", 1, 2),
    34: TensorType("TQ1_0", 256, 54),
    35: TensorType("TQ2_0", 256, 66),
    39: TensorType("MXFP4", 32, 17),
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies. shape: rows first (the file has it the other way round); start: bytes from the file's
    beginning; nbytes: its length."""

    name: str
    type: TensorType
    shape: tuple[int, ...]
    start: int
    nbytes: int


class StringArray(Sequence[str]):
    """An array of strings in the metadata, decoded when asked for. ``list(array)`` decodes all of it."""

    def __init__(self, data: mmap.mmap, starts: list[int], stop: int, label: str) -> None:
        # starts[i] is where the text of string i begins; the 8 bytes before it are its length.
        self._data = data
        self._starts = starts
        self._stop = stop
        self._label = label

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        start = self._starts[index]
        length = _U64.unpack_from(self._data, start - 8)[0]
        return self._decode(self._data[start : start + length])

    def __iter__(self) -> Any:
        ends = [s - 8 for s in self._starts[1:]] + [self._stop]
        data = self._data
        for start, end in zip(self._starts, ends, strict=True):
            yield self._decode(data[start:end])

    def _decode(self, raw: bytes) -> str:
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as e:
            raise LoadError(f"{self._label} holds a string that is not UTF-8: {raw[:40]!r}") from e


class GGUFFile:
    """An opened GGUF file.

    metadata: key -> int, float, bool, str, NumPy array (of numbers, read-only view) or StringArray.
    tensors: name -> TensorInfo, in the file's order.
    Raises LoadError for a file that is damaged, truncated or no GGUF, UnsupportedModel for a storage format or a
    variant of the container that is not read.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        try:
            with self.path.open("rb") as f:
                self.size = f.seek(0, 2)
                if self.size < 24:
                    raise LoadError(f"{self.path}: {self.size} bytes are no GGUF file; incomplete download?")
                self._map = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as e:
            raise LoadError(f"{self.path}: cannot be read: {e.strerror or e}") from e
        self._at = 0
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self._read()

    def raw(self, info: TensorInfo) -> NDArray[np.uint8]:
        """The bytes of a tensor, a read-only view of the file."""
        return np.frombuffer(self._map, np.uint8, info.nbytes, info.start)

    def _read(self) -> None:
        if self._map[:4] != MAGIC:
            raise LoadError(f"{self.path}: starts with {self._map[:4]!r}, not {MAGIC!r}: this is no GGUF file")
        self._at = 4
        self.version = self._u32()
        if self.version & 0xFFFF == 0:
            raise UnsupportedModel(f"{self.path}: big-endian GGUF is not supported; convert it to little endian")
        if self.version not in (2, 3):
            raise UnsupportedModel(f"{self.path}: GGUF version {self.version} is not supported; 2 and 3 are")
        tensors, pairs = self._u64(), self._u64()
        # The smallest possible entry bounds the count, so that a damaged one cannot keep us busy for hours.
        self._check_count(pairs, 13, "metadata entries")
        self._check_count(tensors, 24, "tensors")
        for _ in range(pairs):
            self._read_pair()
        infos = [self._read_info() for _ in range(tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise LoadError(f"{self.path}: general.alignment is {alignment!r}; a power of two is expected")
        data_start = -(-self._at // alignment) * alignment
        for name, kind, shape, offset in infos:
            self._add_tensor(name, kind, shape, offset, alignment, data_start)

    def _read_pair(self) -> None:
        key = self._string()
        value = self._value(self._u32(), key)
        if key in self.metadata:
            raise LoadError(f"{self.path}: metadata key {key!r} occurs twice; the file is damaged")
        self.metadata[key] = value

    def _read_info(self) -> tuple[str, int, tuple[int, ...], int]:
        name = self._string()
        dims = self._u32()
        if dims > _MAX_DIMS:
            raise LoadError(f"{self.path}: tensor {name!r} has {dims} dimensions; the file is damaged")
        shape = tuple(self._u64() for _ in range(dims))[::-1]
        return name, self._u32(), shape, self._u64()

    def _add_tensor(
        self, name: str, kind: int, shape: tuple[int, ...], offset: int, alignment: int, data_start: int
    ) -> None:
        if name in self.tensors:
            raise LoadError(f"{self.path}: tensor {name!r} occurs twice; the file is damaged")
        tensor_type = TENSOR_TYPES.get(kind)
        if tensor_type is None:
            raise UnsupportedModel(f"{self.path}: tensor {name!r} has storage format number {kind}, which is not known")
        count = 1
        for d in shape:
            count *= d
        row = shape[-1] if shape else 1
        if row % tensor_type.block:
            raise LoadError(
                f"{self.path}: tensor {name!r} has rows of {row} values, no multiple of the {tensor_type.block} "
                f"of {tensor_type.name}; the file is damaged"
            )
        nbytes = count // tensor_type.block * tensor_type.size
        start = data_start + offset
        if offset % alignment:
            raise LoadError(f"{self.path}: tensor {name!r} is not aligned to {alignment} bytes; the file is damaged")
        if start + nbytes > self.size:
            raise LoadError(
                f"{self.path}: tensor {name!r} ends at byte {start + nbytes}, but the file has {self.size}; "
                "incomplete download? Fetch the file again"
            )
        self.tensors[name] = TensorInfo(name, tensor_type, shape, start, nbytes)

    def _check_count(self, count: int, smallest: int, what: str) -> None:
        if count * smallest > self.size - self._at:
            raise LoadError(
                f"{self.path}: claims {count} {what}, more than its {self.size} bytes can hold; "
                "the file is damaged or incomplete, fetch it again"
            )

    def _truncated(self) -> LoadError:
        return LoadError(
            f"{self.path}: ends within its header ({self.size} bytes); incomplete download? Fetch it again"
        )

    def _u32(self) -> int:
        if self._at + 4 > self.size:
            raise self._truncated()
        value: int = _U32.unpack_from(self._map, self._at)[0]
        self._at += 4
        return value

    def _u64(self) -> int:
        if self._at + 8 > self.size:
            raise self._truncated()
        value: int = _U64.unpack_from(self._map, self._at)[0]
        self._at += 8
        return value

    def _string(self) -> str:
        length = self._u64()
        if length > self.size - self._at:
            raise self._truncated()
        raw = self._map[self._at : self._at + length]
        self._at += length
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as e:
            raise LoadError(f"{self.path}: a string of its header is not UTF-8: {raw[:40]!r}; damaged file") from e

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(key)
        if kind == _BOOL:
            self._need(1)
            self._at += 1
            return self._map[self._at - 1] != 0
        code = _SCALARS.get(kind)
        if code is None:
            raise LoadError(
                f"{self.path}: metadata key {key!r} has value type {kind}, which does not exist; damaged file"
            )
        size = struct.calcsize(code)
        self._need(size)
        value = struct.unpack_from(code, self._map, self._at)[0]
        self._at += size
        return value

    def _need(self, size: int) -> None:
        if size > self.size - self._at:
            raise self._truncated()

    def _array(self, key: str) -> Any:
        kind, count = self._u32(), self._u64()
        if kind == _STRING:
            return self._strings(count, key)
        if kind == _ARRAY:
            raise UnsupportedModel(f"{self.path}: metadata key {key!r} is an array of arrays, which is not supported")
        code = "?" if kind == _BOOL else _SCALARS.get(kind)
        if code is None:
            raise LoadError(f"{self.path}: metadata key {key!r} has element type {kind}, which does not exist")
        dtype = np.dtype(code)
        self._check_count(count, dtype.itemsize, f"elements of {key!r}")
        array = np.frombuffer(self._map, dtype, count, self._at)
        self._at += array.nbytes
        return array

    def _strings(self, count: int, key: str) -> StringArray:
        self._check_count(count, 8, f"strings of {key!r}")
        # The hot loop of opening a file: one length per token of the vocabulary and per merge.
        starts: list[int] = []
        at, data, unpack = self._at, self._map, _U64.unpack_from
        append = starts.append
        try:
            for _ in range(count):
                (length,) = unpack(data, at)
                at += 8
                append(at)
                at += length
        except (struct.error, OverflowError) as e:
            raise self._truncated() from e
        if at > self.size:
            raise self._truncated()
        self._at = at
        return StringArray(data, starts, at, f"{self.path}: {key!r}")
