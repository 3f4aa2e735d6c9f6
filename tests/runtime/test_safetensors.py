"""Our safetensors reader against files of the ``safetensors`` package, and against damaged ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from device.dtypes import bf16_to_f32, encode
from device.errors import JumarError, LoadError, UnsupportedModel
from runtime.loaders.safetensors import SafetensorsFile, SafetensorsFolder
from tests.support.checkpoints import safetensors_bytes


def _ignore(_: str) -> None:
    pass


def _file(folder: Path, data: bytes) -> Path:
    path = folder / "x.safetensors"
    path.write_bytes(data)
    return path


def _raw(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def _entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_reads_what_the_safetensors_package_writes(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    rng = np.random.default_rng(0)
    tensors = {
        "a": rng.standard_normal((3, 4)).astype(np.float32),
        "b": rng.standard_normal(7).astype(np.float16),
        "c": rng.integers(-9, 9, (2, 2, 2)).astype(np.int64),
        "d": np.array(3.5),
        "e": np.zeros((0, 4), np.float32),
    }
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    file = SafetensorsFile(tmp_path / "x.safetensors")
    assert set(file.tensors) == set(tensors)
    for name, expected in tensors.items():
        array, dtype = file.array(name)
        assert dtype == str(expected.dtype) and array.shape == expected.shape
        assert np.array_equal(array, expected)


def test_the_safetensors_package_reads_our_test_files(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    values = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    path = _file(tmp_path, safetensors_bytes({"a": (values, "float32")}))
    assert np.array_equal(load_file(path)["a"], values)


def test_bfloat16_comes_as_bits(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    bits = encode(values, "bfloat16")
    array, dtype = SafetensorsFile(_file(tmp_path, safetensors_bytes({"a": (bits, "bfloat16")}))).array("a")
    assert dtype == "bfloat16" and array.dtype == np.uint16
    assert np.array_equal(array, bits)
    assert np.abs(bf16_to_f32(array) - values).max() < 2**-7


def test_tensors_are_read_only_views_of_one_map(tmp_path: Path) -> None:
    values = np.ones((4, 4), np.float32)
    stored = {"a": (values, "float32"), "b": (values, "float32")}
    file = SafetensorsFile(_file(tmp_path, safetensors_bytes(stored)))
    first, again = file.array("a")[0], file.array("a")[0]
    assert np.shares_memory(first, again) and not first.flags.writeable and first.flags.aligned


@pytest.mark.parametrize("off", range(4))
def test_a_file_that_is_not_aligned_is_read_all_the_same(tmp_path: Path, off: int) -> None:
    values = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    array, _ = SafetensorsFile(_file(tmp_path, safetensors_bytes({"a": (values, "float32")}, off))).array("a")
    assert array.flags.aligned and np.array_equal(array, values)


def test_element_types_that_no_weight_has_are_refused_when_asked_for(tmp_path: Path) -> None:
    path = _file(tmp_path, _raw({"a": _entry("F8_E4M3", [4], 0, 4), "b": _entry("F4", [8], 4, 8)}, b"\0" * 8))
    file = SafetensorsFile(path)
    for name, dtype in (("a", "F8_E4M3"), ("b", "F4")):
        with pytest.raises(UnsupportedModel, match=dtype):
            file.array(name)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "incomplete download"),
        (b"\x10\0\0\0\0\0\0\0{}", "ends within its header"),
        (b"\xff" * 16, "no safetensors file"),
        (_raw(b"{not json"), "no JSON"),
        (_raw(b"\xff\xfe\xff"), "no JSON"),
        (_raw(b"[" * 100_000), "no JSON"),
        (_raw([]), "no JSON object"),
        (_raw({"a": {"dtype": "F32"}}), "'a' is described without"),
        (_raw({"a": 5}), "'a' is described without"),
        (_raw({"a": _entry("F32", [-1], 0, 4)}, b"\0" * 4), "'a' is described by"),
        (_raw({"a": _entry("F32", [1], 0, 8)}, b"\0" * 8), "8 bytes for shape"),
        (_raw({"a": _entry("F32", [2], 8, 0)}, b"\0" * 8), "'a'"),
        (_raw({"a": _entry("F32", [2], 0, 8)}, b"\0" * 7), "incomplete download"),
        (_raw({"a": _entry("F32", [2], 0, 8)}, b"\0" * 9), "its header describes"),
        (_raw({"a": _entry("F32", [1], 4, 8)}, b"\0" * 8), "'a' starts at"),
        (_raw({"a": _entry("F32", [2], 0, 8), "b": _entry("F32", [1], 4, 8)}, b"\0" * 8), "'b' starts at"),
        (_raw({"a": _entry("F32", [1 << 40, 1 << 40], 0, 4)}, b"\0" * 4), "'a'"),
    ],
)
def test_damaged_files_say_what_is_wrong(tmp_path: Path, data: bytes, words: str) -> None:
    path = _file(tmp_path, data)
    with pytest.raises(LoadError, match=words) as caught:
        SafetensorsFile(path)
    assert str(path) in str(caught.value)


@given(st.data())
def test_random_damage_never_escapes_as_another_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    values = np.ones((3, 4), np.float32)
    damaged = bytearray(safetensors_bytes({"a": (values, "float32"), "b": (values, "float32")}))
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    path.write_bytes(damaged[: data.draw(st.integers(0, len(damaged)))])
    try:
        file = SafetensorsFile(path)
        for name in file.tensors:
            file.array(name)
    except JumarError:
        pass


def _tensor(value: float) -> dict[str, tuple[Any, str]]:
    return {"a": (np.full(2, value, np.float32), "float32")}


def test_a_folder_takes_model_safetensors_and_says_what_it_leaves(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(_tensor(1)))
    (tmp_path / "adapter.safetensors").write_bytes(safetensors_bytes(_tensor(2)))
    notices: list[str] = []
    folder = SafetensorsFolder(tmp_path, notices.append)
    assert folder.array("a")[0].tolist() == [1, 1]
    assert len(notices) == 1 and "adapter.safetensors" in notices[0]


def test_a_folder_with_one_file_of_another_name(tmp_path: Path) -> None:
    (tmp_path / "weights.safetensors").write_bytes(safetensors_bytes(_tensor(3)))
    assert SafetensorsFolder(tmp_path, _ignore).array("a")[0].tolist() == [3, 3]


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ([], "has no .safetensors file; incomplete download"),
        (["pytorch_model.bin"], "pytorch_model.bin cannot be loaded"),
        (["a.safetensors", "b.safetensors"], "a.safetensors, b.safetensors"),
        (["model-00001-of-00002.safetensors"], "no model.safetensors.index.json"),
    ],
)
def test_a_folder_without_an_unambiguous_file(tmp_path: Path, files: list[str], words: str) -> None:
    for name in files:
        (tmp_path / name).write_bytes(safetensors_bytes(_tensor(1)))
    with pytest.raises(LoadError, match=words):
        SafetensorsFolder(tmp_path, _ignore)
