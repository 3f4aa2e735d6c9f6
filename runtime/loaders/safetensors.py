"""Safetensors files, one or many, over memory maps.

The layout is that of https://huggingface.co/docs/safetensors: eight bytes with the length of a JSON header, the
header, the data. The header is read here since the package's NumPy interface has no bfloat16. A tensor is a view of
the file until somebody copies it, so the weights are never in memory twice.
"""

from __future__ import annotations

import json
import mmap
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device.dtypes import numpy_dtype
from device.errors import LoadError, UnsupportedModel

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_HEADER_LIMIT = 100_000_000  # the format's own bound
# Name in the header -> (bytes of an element, our dtype or None where no weight can have it).
_DTYPES: dict[str, tuple[int, str | None]] = {
    "F64": (8, "float64"),
    "F32": (4, "float32"),
    "F16": (2, "float16"),
    "BF16": (2, "bfloat16"),
    "I64": (8, "int64"),
    "I32": (4, "int32"),
    "I8": (1, "int8"),
    "U8": (1, "uint8"),
    "I16": (2, None),
    "U16": (2, None),
    "U32": (4, None),
    "U64": (8, None),
    "BOOL": (1, None),
    "F8_E4M3": (1, None),
    "F8_E5M2": (1, None),
}
_SHARD = re.compile(r"^(?P<stem>.+)-(?P<part>\d+)-of-(?P<count>\d+)\.safetensors$")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file. dtype: the header's name; start: bytes from the file's beginning."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int

    @property
    def kind(self) -> str:
        """Our name of the dtype, or the header's where no weight can have it."""
        return _DTYPES.get(self.dtype, (0, None))[1] or self.dtype


class SafetensorsFile:
    """One opened file. tensors: name -> TensorInfo. Raises LoadError for a damaged or truncated file."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        try:
            with self.path.open("rb") as f:
                self.size = f.seek(0, 2)
                if self.size < 8:
                    raise self._broken(f"{self.size} bytes are no safetensors file; incomplete download?")
                self._map = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as e:
            raise LoadError(f"{self.path}: cannot be read: {e.strerror or e}") from e
        header, data_start = self._header()
        self.tensors: dict[str, TensorInfo] = {}
        for name, entry in header.items():
            if name != "__metadata__":
                self.tensors[name] = self._info(name, entry, data_start)
        self._check_coverage(data_start)

    def array(self, name: str) -> tuple[NDArray[Any], str]:
        """(view of the file in the tensor's shape, dtype name); bfloat16 as uint16 bits.

        A tensor that the file does not align to its element size is copied.
        """
        info = self.tensors[name]
        dtype = _DTYPES.get(info.dtype, (0, None))[1]
        if dtype is None:
            raise UnsupportedModel(
                f"{self.path}: tensor {name!r} has element type {info.dtype}, which is not supported"
            )
        element = numpy_dtype(dtype).newbyteorder("<")
        view = np.frombuffer(self._map, element, info.nbytes // element.itemsize, info.start)
        return np.require(view.reshape(info.shape), requirements="A"), dtype

    def _broken(self, why: str) -> LoadError:
        return LoadError(f"{self.path}: {why}")

    def _header(self) -> tuple[dict[str, Any], int]:
        length = int.from_bytes(self._map[:8], "little")
        if length > _HEADER_LIMIT:
            raise self._broken(f"claims a header of {length} bytes; this is no safetensors file")
        if 8 + length > self.size:
            raise self._broken(f"ends within its header ({self.size} bytes of {8 + length}); incomplete download?")
        try:
            header = json.loads(self._map[8 : 8 + length])
        except (ValueError, RecursionError) as e:
            raise self._broken(f"its header is no JSON ({e}); the file is damaged, fetch it again") from e
        if not isinstance(header, dict):
            raise self._broken("its header is no JSON object; the file is damaged, fetch it again")
        return header, 8 + length

    def _info(self, name: str, entry: Any, data_start: int) -> TensorInfo:
        try:
            dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        except (KeyError, TypeError, ValueError) as e:
            raise self._broken(
                f"tensor {name!r} is described without dtype, shape and data_offsets; damaged file"
            ) from e
        if not isinstance(dtype, str) or not all(type(v) is int and v >= 0 for v in (*shape, begin, end)):
            raise self._broken(f"tensor {name!r} is described by {entry!r}; damaged file")
        count = 1
        for d in shape:
            count *= d
        if dtype in _DTYPES and end - begin != count * _DTYPES[dtype][0] or end < begin:
            raise self._broken(f"tensor {name!r}: {end - begin} bytes for shape {list(shape)} of {dtype}; damaged file")
        if data_start + end > self.size:
            raise self._broken(
                f"tensor {name!r} ends at byte {data_start + end}, but the file has {self.size}; incomplete download? "
                "Fetch the file again"
            )
        return TensorInfo(name, dtype, shape, data_start + begin, end - begin)

    def _check_coverage(self, data_start: int) -> None:
        """The tensors must follow one another and fill the file: neither holes nor overlaps are allowed."""
        at = data_start
        for info in sorted(self.tensors.values(), key=lambda i: (i.start, i.nbytes)):
            if info.start != at:
                raise self._broken(f"tensor {info.name!r} starts at byte {info.start}, not {at}; damaged file")
            at += info.nbytes
        if at != self.size:
            raise self._broken(f"has {self.size} bytes, its header describes {at}; damaged file, fetch it again")


class SafetensorsFolder:
    """All safetensors files of a model's folder as one set of tensors.

    The files are those of ``model.safetensors.index.json`` where it exists, else the only ``.safetensors`` file.
    tensors: name -> its file. Everything that does not fit together raises LoadError: a shard that is missing or
    truncated, a tensor that the index promises and no shard has, a tensor in two shards, a shard of the same series
    that the index does not name, a path out of the folder. ``notice`` hears of what is left aside.
    """

    def __init__(self, folder: Path | str, notice: Callable[[str], None]) -> None:
        self.folder = Path(folder)
        self.tensors: dict[str, SafetensorsFile] = {}
        index = self.folder / INDEX
        if index.exists():
            self._open_sharded(_read_index(index), notice)
        else:
            self._add(SafetensorsFile(self._single(notice)))

    def info(self, name: str) -> TensorInfo:
        return self.tensors[name].tensors[name]

    def array(self, name: str) -> tuple[NDArray[Any], str]:
        """(view, dtype name) of a tensor; see SafetensorsFile.array."""
        return self.tensors[name].array(name)

    def _present(self) -> list[str]:
        return sorted(p.name for p in self.folder.glob("*.safetensors"))

    def _single(self, notice: Callable[[str], None]) -> Path:
        present = self._present()
        if SINGLE in present:
            others = [p for p in present if p != SINGLE]
            if others:
                notice(f"{self.folder}: {SINGLE} is taken, left aside: {', '.join(others)}")
            return self.folder / SINGLE
        shards = [m for m in map(_SHARD.match, present) if m]
        if shards:
            raise LoadError(
                f"{self.folder}: has shards ({', '.join(present)}) but no {INDEX}; incomplete download? "
                "Fetch the index file too"
            )
        if len(present) == 1:
            return self.folder / present[0]
        if present:
            raise LoadError(f"{self.folder}: has several weight files and no {INDEX}: {', '.join(present)}")
        pickles = sorted(p.name for p in self.folder.glob("*.bin"))
        hint = f" ({', '.join(pickles)} cannot be loaded: convert to safetensors)" if pickles else ""
        raise LoadError(f"{self.folder}: has no .safetensors file{hint}; incomplete download?")

    def _open_sharded(self, weight_map: dict[str, str], notice: Callable[[str], None]) -> None:
        shards = sorted(set(weight_map.values()))
        missing = [s for s in shards if not (self.folder / s).is_file()]
        if missing:
            raise LoadError(
                f"{self.folder}: {INDEX} names files that are not there: {', '.join(missing)}; incomplete download? "
                "Fetch them again"
            )
        self._check_strays(shards, notice)
        for shard in shards:
            self._add(SafetensorsFile(self.folder / shard))
        lost = [n for n, s in weight_map.items() if n not in self.tensors]
        if lost:
            files = sorted({weight_map[n] for n in lost})
            raise LoadError(
                f"{self.folder}: {INDEX} names tensors that no shard has: {_some(lost)}, expected in "
                f"{', '.join(files)}; incomplete download, or an index of another version of the model?"
            )
        moved = [n for n, s in weight_map.items() if self.tensors[n].path != self.folder / s]
        if moved:
            raise LoadError(
                f"{self.folder}: {INDEX} looks for tensors in other shards than those that hold them: {_some(moved)}; "
                "an index of another version of the model?"
            )
        extra = sorted(set(self.tensors) - set(weight_map))
        if extra:
            notice(f"{self.folder}: tensors that {INDEX} does not name: {_some(extra)}")

    def _check_strays(self, shards: list[str], notice: Callable[[str], None]) -> None:
        stems = {m["stem"] for m in map(_SHARD.match, shards) if m}
        strays = [p for p in self._present() if p not in shards]
        same_series = [p for p in strays if (m := _SHARD.match(p)) and m["stem"] in stems]
        if same_series:
            raise LoadError(
                f"{self.folder}: {', '.join(same_series)} look like shards of this model, but {INDEX} does not name "
                "them; incomplete download, or two versions in one folder? Remove them, or fetch the index again"
            )
        if strays:
            notice(f"{self.folder}: not named in {INDEX} and left aside: {', '.join(strays)}")

    def _add(self, file: SafetensorsFile) -> None:
        for name in file.tensors:
            if name in self.tensors:
                first = self.tensors[name].path.name
                raise LoadError(
                    f"{self.folder}: tensor {name!r} is both in {first} and in {file.path.name}; files of two versions "
                    "in one folder?"
                )
            self.tensors[name] = file


def _read_index(index: Path) -> dict[str, str]:
    content = read_json(index)
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()) or not weight_map:
        raise LoadError(f"{index}: has no weight_map of tensor names to file names; fetch it again")
    for shard in set(weight_map.values()):
        path = PurePosixPath(shard)
        if path.is_absolute() or ".." in path.parts or "\\" in shard or ":" in shard or not path.name:
            raise LoadError(f"{index}: names {shard!r}, a path out of the model's folder; refused")
    return weight_map


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises LoadError where there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise LoadError(f"{path}: cannot be read: {e.strerror or e}") from e
    except (ValueError, RecursionError) as e:
        raise LoadError(f"{path}: is no JSON ({e}); damaged or incomplete download?") from e
    if not isinstance(content, dict):
        raise LoadError(f"{path}: must hold a JSON object, not a {type(content).__name__}")
    return content


def _some(names: list[str], limit: int = 8) -> str:
    shown = ", ".join(names[:limit])
    return f"{shown} and {len(names) - limit} more" if len(names) > limit else shown
