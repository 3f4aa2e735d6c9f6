"""From a checkpoint to a model on a device: every weight takes its place, and none is lost, guessed or held twice."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from device.cpu import CpuDevice
from device.dtypes import decode, encode
from device.errors import LoadError
from runtime.loaders.checkpoint import EMBEDDING, Checkpoint, open_checkpoint
from runtime.models.build import Builder, build_model
from runtime.models.decoder import Decoder
from tests.support.checkpoints import write_folder, write_gguf
from tests.support.convert import gguf_architecture, gguf_metadata, gguf_tensors
from tests.support.forward import Forward
from tests.support.textbook import random_tensors, shapes, textbook_logits

ROOT = Path(__file__).resolve().parents[2]
CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
Array = NDArray[Any]
SILENT = lambda text: None  # noqa: E731


def configuration(kind: str, **changes: Any) -> dict[str, Any]:
    """A small config.json in the old form. rms_norm_eps has few bits, since GGUF keeps it in float32."""
    config: dict[str, Any] = {
        "architectures": [CLASSES[kind]],
        "model_type": kind,
        "vocab_size": 50,
        "hidden_size": 24,
        "intermediate_size": 20,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "rms_norm_eps": 2.0**-17,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
    if kind == "gemma3_text":
        config |= {
            "query_pre_attn_scalar": 16, "sliding_window": 5, "sliding_window_pattern": 2,
            "rope_local_base_freq": 500.0, "hidden_activation": "gelu_pytorch_tanh",
        }  # fmt: skip
    if kind == "mistral":
        config["sliding_window"] = None
    return config | changes


def build(path: Path, dtype: str = "float64") -> tuple[Decoder, CpuDevice]:
    device = CpuDevice(dtype)
    return build_model(open_checkpoint(path, SILENT), device, 64), device


def refusal(path: Path) -> str:
    with pytest.raises(LoadError) as caught:
        build(path)
    return str(caught.value)


# ---------------------------------------------------------------------------------------------- right weights


@st.composite
def configurations(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(st.sampled_from(sorted(CLASSES)))
    kv_heads = draw(st.integers(1, 3))
    changes: dict[str, Any] = {
        "vocab_size": draw(st.integers(2, 60)),
        "hidden_size": draw(st.integers(1, 20)) * 2,
        "intermediate_size": draw(st.integers(1, 30)),
        "num_hidden_layers": draw(st.integers(1, 4)),
        "num_attention_heads": kv_heads * draw(st.integers(1, 3)),
        "num_key_value_heads": kv_heads,
        "head_dim": draw(st.integers(1, 8)) * 2,
        "rope_theta": draw(st.sampled_from([10.0, 10000.0, 1e6])),
        "rope_scaling": draw(st.sampled_from([None, {"type": "linear", "factor": 4.0}])),
    }
    window = draw(st.integers(1, 20))
    if kind == "llama":
        changes |= {"attention_bias": draw(st.booleans()), "mlp_bias": draw(st.booleans())}
    if kind == "qwen3":
        changes["attention_bias"] = draw(st.booleans())
    if kind == "mistral":
        changes["sliding_window"] = draw(st.sampled_from([None, window]))
    if kind in ("qwen2", "qwen3"):
        first = draw(st.integers(0, changes["num_hidden_layers"]))
        changes |= {"use_sliding_window": draw(st.booleans()), "sliding_window": window, "max_window_layers": first}
    if kind == "gemma3_text":
        scalar = draw(st.sampled_from([4, 16, 64]))
        changes |= {"sliding_window": window, "sliding_window_pattern": draw(st.integers(1, 5)),
                    "query_pre_attn_scalar": scalar}  # fmt: skip
    return configuration(kind, **changes)


@given(
    config=configurations(),
    tied=st.sampled_from(["tied", "untied", "a head against the flag"]),
    dtype=st.sampled_from(["float32", "bfloat16", "float16", "float64"]),
    shards=st.integers(1, 3),
    length=st.integers(1, 40),
    chunk=st.integers(1, 40),
    seed=st.integers(0, 2**31),
)
def test_any_configuration_computes_what_the_textbook_says(
    config: dict[str, Any], tied: str, dtype: str, shards: int, length: int, chunk: int, seed: int
) -> None:
    """As a folder and, where GGUF can say it, as a GGUF file."""
    config["tie_word_embeddings"] = tied != "untied"
    values = random_tensors(config, seed, head=tied != "tied")
    values = {n: decode(encode(v, dtype), dtype, np.float32) for n, v in values.items()}
    ids = np.random.default_rng(seed).integers(0, config["vocab_size"], length).tolist()
    expected = textbook_logits(config, values, ids)
    with TemporaryDirectory() as folder:
        path = write_folder(Path(folder) / "hf", config, values, shards, dtype)
        sources = [open_checkpoint(path, SILENT)]
        if not (config.get("use_sliding_window") and any(sources[0].config.windows)):
            architecture = gguf_architecture(sources[0].config)
            file = Path(folder) / "model.gguf"
            write_gguf(file, architecture, gguf_metadata(sources[0]), gguf_tensors(sources[0]))
            sources.append(open_checkpoint(file, SILENT))
        for source in sources:
            device = CpuDevice("float64")
            found = Forward(build_model(source, device, 64), device, max_len=64, chunk=chunk, block_size=4).rows(ids)
            device.close()
            assert np.abs(found - expected).max() <= 1e-9 * np.abs(expected).max()


def test_gemma_s_norms_have_one_added_in_a_folder_and_not_in_a_gguf_file(tmp_path: Path) -> None:
    """A norm weight of zero is a factor of one in the folder, and a factor of zero in the file."""
    config = configuration("gemma3_text", tie_word_embeddings=True)
    values = random_tensors(config, 3, head=False)
    zeros = {n: np.zeros_like(v) if "norm" in n else v for n, v in values.items()}
    folder = write_folder(tmp_path / "hf", config, zeros)
    ids = [3, 1, 4, 1, 5]
    model, device = build(folder)
    np.testing.assert_allclose(
        Forward(model, device).rows(ids), textbook_logits(config, zeros, ids), rtol=1e-9, atol=1e-9
    )
    source = open_checkpoint(folder, SILENT)
    content = {n: np.zeros_like(v) if "norm" in n else v for n, v in gguf_tensors(source).items()}
    model, device = build(write_gguf(tmp_path / "model.gguf", "gemma3", gguf_metadata(source), content))
    assert not Forward(model, device).rows(ids).any()


@pytest.mark.parametrize("kind", sorted(CLASSES))
def test_every_weight_matters(kind: str, tmp_path: Path) -> None:
    """Another value in any tensor gives other logits: none is loaded and then forgotten."""
    config = configuration(kind)
    values = random_tensors(config, 1, head=True)
    ids = list(range(2, 14))

    def logits(tensors: Mapping[str, Array]) -> Array:
        model, device = build(write_folder(tmp_path, config, tensors))
        out = Forward(model, device).rows(ids)
        device.close()
        return out

    before = logits(values)
    for name, value in values.items():
        changed = value.copy()
        changed[..., -1] += 0.5
        if name.endswith("k_proj.bias"):  # softmax does not see what is added to all keys alike, before rotation
            changed = np.random.default_rng(0).uniform(-2, 2, value.shape).astype(np.float32)
        assert np.abs(logits(values | {name: changed}) - before).max() > 1e-4, name


def test_a_tied_table_is_held_once(tmp_path: Path) -> None:
    sizes = {}
    for tied in (True, False):
        config = configuration("llama", tie_word_embeddings=tied)
        folder = write_folder(tmp_path / str(tied), config, random_tensors(config, 0, head=not tied))
        sizes[tied] = build(folder, "float32")[0].nbytes
    assert sizes[False] - sizes[True] == 50 * 24 * 4
    matrices = [s for s in shapes(configuration("llama"), head=False).values() if len(s) == 2]
    assert sizes[True] == sum(4 * n * k for n, k in matrices)


def test_progress_counts_the_table_and_each_layer(tmp_path: Path) -> None:
    config = configuration("qwen3", num_hidden_layers=3)
    checkpoint = open_checkpoint(write_folder(tmp_path, config, random_tensors(config, 0, head=True)), SILENT)
    heard: list[tuple[int, int]] = []
    build_model(checkpoint, CpuDevice(), 64, lambda done, total: heard.append((done, total)))
    assert heard == [(1, 4), (2, 4), (3, 4), (4, 4)]


# ---------------------------------------------------------------------------------------------- refused


def every_parameter() -> Iterator[tuple[str, str]]:
    for kind in sorted(CLASSES):
        for name in shapes(configuration(kind, attention_bias=True, mlp_bias=kind == "llama"), head=True):
            if not (kind in ("mistral", "gemma3_text") and name.endswith("bias")):
                yield kind, name


@pytest.mark.parametrize(("kind", "name"), list(every_parameter()))
def test_a_parameter_without_data_is_fatal(kind: str, name: str, tmp_path: Path) -> None:
    config, values = _biased(kind)
    del values[name]
    message = refusal(write_folder(tmp_path, config, values))
    assert name in message and "incomplete download?" in message and str(tmp_path) in message


@pytest.mark.parametrize(("kind", "name"), list(every_parameter()))
def test_a_parameter_of_another_shape_is_refused(kind: str, name: str, tmp_path: Path) -> None:
    config, values = _biased(kind)
    rows = values[name].shape[0]
    values[name] = np.ones((rows + 1, *values[name].shape[1:]), np.float32)
    message = refusal(write_folder(tmp_path, config, values))
    assert name in message and str(rows + 1) in message and str(rows) in message


def _biased(kind: str) -> tuple[dict[str, Any], dict[str, Array]]:
    """All the biases that this kind can have."""
    config = configuration(kind)
    if kind in ("llama", "qwen3"):
        config["attention_bias"] = True
    if kind == "llama":
        config["mlp_bias"] = True
    return config, dict(random_tensors(config, 2, head=True))


@pytest.mark.parametrize("changes", [
    {"vocab_size": 10**9}, {"hidden_size": 10**9}, {"num_hidden_layers": 9999}, {"head_dim": 10**9},
    {"num_attention_heads": 10**9}, {"num_attention_heads": 10**9, "num_key_value_heads": 10**9},
])  # fmt: skip
def test_counts_that_the_tensors_deny_are_refused_before_memory_is_planned_by_them(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    config = configuration("llama", num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    checkpoint = open_checkpoint(
        write_folder(tmp_path, config | changes, dict(random_tensors(config, 0, head=True))), SILENT
    )
    with pytest.raises(LoadError, match="same model|are missing"):
        Builder(checkpoint, CpuDevice())


def test_all_missing_parameters_are_told_at_once(tmp_path: Path) -> None:
    config = configuration("llama")
    values = {n: v for n, v in random_tensors(config, 0, head=True).items() if "layers.1." not in n}
    message = refusal(write_folder(tmp_path, config, values))
    assert "9 of 21 tensors" in message and "and 3 more" in message and "model.layers.1.input_layernorm" in message


@pytest.mark.parametrize(
    ("kind", "extra"),
    [
        ("llama", "model.layers.1.self_attn.q_proj.bias"),
        ("llama", "model.layers.0.self_attn.o_proj.bias"),
        ("llama", "model.layers.0.mlp.down_proj.bias"),
        ("qwen2", "model.layers.0.self_attn.o_proj.bias"),
        ("mistral", "model.layers.0.self_attn.k_proj.bias"),
        ("qwen3", "model.layers.0.self_attn.v_proj.bias"),
        ("gemma3_text", "model.layers.0.mlp.up_proj.bias"),
        ("llama", "lm_head.bias"),
        ("llama", "model.layers.0.self_attn.q_norm.weight"),  # of a Qwen3
        ("qwen2", "model.layers.1.self_attn.k_norm.weight"),
        ("qwen3", "model.layers.0.post_feedforward_layernorm.weight"),  # of a Gemma
        ("llama", "model.layers.2.input_layernorm.weight"),  # a layer more than the configuration says
    ],
)
def test_a_weight_that_would_be_ignored_is_refused(kind: str, extra: str, tmp_path: Path) -> None:
    config = configuration(kind)
    values = random_tensors(config, 0, head=True) | {extra: np.ones(8, np.float32)}
    message = refusal(write_folder(tmp_path, config, values))
    assert extra in message and "would be ignored" in message


def test_a_gguf_weight_that_would_be_ignored_is_refused(tmp_path: Path) -> None:
    config = configuration("llama")
    source = open_checkpoint(write_folder(tmp_path / "hf", config, random_tensors(config, 0, head=True)), SILENT)
    content = gguf_tensors(source) | {"blk.0.ffn_gate_inp.weight": np.ones((4, 24), np.float32)}
    message = refusal(write_gguf(tmp_path / "model.gguf", "llama", gguf_metadata(source), content))
    assert "blk.0.ffn_gate_inp.weight" in message


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.rotary_emb.inv_freq", "score.weight"])
def test_what_is_no_weight_of_a_layer_does_not_matter(name: str, tmp_path: Path) -> None:
    config = configuration("llama")
    values = random_tensors(config, 0, head=True) | {name: np.ones((2, 4), np.float32)}
    assert build(write_folder(tmp_path, config, values))[0].vocab_size == 50


# ---------------------------------------------------------------------------------------------- memory

_MEASURE = """
import json, sys, tracemalloc
from device.cpu import CpuDevice
from runtime.loaders.checkpoint import open_checkpoint
from runtime.models.build import build_model

def anonymous():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

device, seen = CpuDevice("float32"), []
checkpoint = open_checkpoint(sys.argv[1], print)
before = anonymous()
tracemalloc.start()
model = build_model(checkpoint, device, 64, lambda done, total: seen.append(anonymous() - before))
print(json.dumps({"weights": model.nbytes, "heap": tracemalloc.get_traced_memory()[1], "anonymous": max(seen)}))
"""
_MIB = 1 << 20
_LARGE = {
    "vocab_size": 8192, "hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 128, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "limit"),
    [
        # embedding, o and down stay views of the file, the others are put together into one matrix for each input
        ("float32", 0.75),
        ("float16", 1.0),
        ("bfloat16", 1.0),
    ],
)
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's account of a process's memory")
def test_weights_are_never_in_memory_twice(dtype: str, limit: float, tmp_path: Path) -> None:
    """Beside the packed weights (104 MiB) there is only the file, mapped, and a small piece under conversion."""
    config = configuration("llama", **_LARGE)
    path = write_folder(tmp_path, config, {n: _cheap(s) for n, s in shapes(config, head=False).items()}, dtype=dtype)
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(path)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    assert found["weights"] == 104 * _MIB
    assert found["heap"] < limit * found["weights"] + 16 * _MIB
    assert found["anonymous"] < limit * found["weights"] + 32 * _MIB


def _cheap(shape: tuple[int, ...]) -> Array:
    return np.resize(np.linspace(-1, 1, 9973, dtype=np.float32), shape)


def test_a_checkpoint_is_read_tensor_by_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each weight is asked for once: the loader converts anew at every call."""
    config = configuration("gemma3_text", tie_word_embeddings=True)
    checkpoint = open_checkpoint(write_folder(tmp_path, config, random_tensors(config, 0, head=False)), SILENT)
    asked: list[str] = []
    for method in ("weight", "vector"):
        original = getattr(Checkpoint, method)

        def spy(self: Checkpoint, name: str, size: Any = None, original: Any = original) -> Any:
            asked.append(name)
            return original(self, name, size)

        monkeypatch.setattr(Checkpoint, method, spy)
    build_model(checkpoint, CpuDevice(), 64)
    assert sorted(asked) == sorted(checkpoint.names()) and asked[0] == EMBEDDING
