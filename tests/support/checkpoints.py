"""Small checkpoints written for tests: safetensors folders by hand, GGUF files with the ``gguf`` package."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device.dtypes import encode

HEADER_NAMES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int32": "I32", "int8": "I8"}

TINY_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
TINY_GEMMA: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "sliding_window": 16,
}

Tensors = dict[str, NDArray[Any]]


def tiny_tensors(config: Mapping[str, Any], seed: int = 0, head: bool = True, bias: bool = False) -> Tensors:
    """Random float32 tensors by Hugging Face's names for a configuration like TINY_LLAMA or TINY_GEMMA."""
    rng = np.random.default_rng(seed)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    gemma = "gemma3" in config["model_type"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        for name, rows, columns in (
            ("self_attn.q_proj", q, hidden),
            ("self_attn.k_proj", kv, hidden),
            ("self_attn.v_proj", kv, hidden),
            ("self_attn.o_proj", hidden, q),
            ("mlp.gate_proj", inner, hidden),
            ("mlp.up_proj", inner, hidden),
            ("mlp.down_proj", hidden, inner),
        ):
            shapes[f"{at}{name}.weight"] = (rows, columns)
            if bias and name[:11] in ("self_attn.q", "self_attn.k", "self_attn.v"):
                shapes[f"{at}{name}.bias"] = (rows,)
        norms = ["input_layernorm", "post_attention_layernorm"]
        if gemma:
            norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
            shapes |= {f"{at}self_attn.{n}_norm.weight": (head_dim,) for n in "qk"}
        shapes |= {f"{at}{n}.weight": (hidden,) for n in norms}
    shapes["model.norm.weight"] = (hidden,)
    if head:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}


def safetensors_bytes(tensors: Mapping[str, tuple[NDArray[Any], str]], misalign: int = 0) -> bytes:
    """A file's bytes; each tensor is (host array, dtype name). Data start at 8 n + ``misalign``."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, (array, dtype) in tensors.items():
        raw = np.ascontiguousarray(array).tobytes()
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": HEADER_NAMES[dtype], "shape": list(array.shape), "data_offsets": offsets}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8 + misalign)
    return len(text).to_bytes(8, "little") + text + data


def write_folder(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, NDArray[Any]],
    shards: int = 1,
    dtype: str = "float32",
) -> Path:
    """A folder in Hugging Face layout, in one file or in ``shards`` files with an index. tensors: real values."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config)))
    stored = {n: (encode(a, dtype), dtype) for n, a in tensors.items()}
    if shards == 1:
        (folder / "model.safetensors").write_bytes(safetensors_bytes(stored))
        return folder
    names = list(stored)
    weight_map: dict[str, str] = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        own = names[i::shards]
        (folder / file).write_bytes(safetensors_bytes({n: stored[n] for n in own}))
        weight_map |= dict.fromkeys(own, file)
    write_index(folder, weight_map)
    return folder


def index_of(folder: Path) -> dict[str, str]:
    content = json.loads((folder / "model.safetensors.index.json").read_text())
    return dict(content["weight_map"])


def write_index(folder: Path, weight_map: Mapping[str, str]) -> None:
    text = json.dumps({"metadata": {"total_size": 0}, "weight_map": dict(weight_map)})
    (folder / "model.safetensors.index.json").write_text(text)


def write_gguf(
    path: Path,
    architecture: str,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, NDArray[Any] | tuple[NDArray[np.uint8], str]],
) -> Path:
    """A GGUF file. metadata: keys without the architecture get it in front unless they have a known root.

    tensors: float arrays, or (raw bytes [N, bytes of a row], format name).
    """
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        full = key if key.startswith(("general.", "tokenizer.", "split.")) else f"{architecture}.{key}"
        _add(writer, full, value)
    for name, data in tensors.items():
        if isinstance(data, tuple):
            writer.add_tensor(name, data[0], raw_dtype=gguf.GGMLQuantizationType[data[1]])
        else:
            writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


GGUF_LLAMA: dict[str, Any] = {
    "block_count": 2,
    "embedding_length": 32,
    "feed_forward_length": 64,
    "context_length": 128,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 10000.0,
}

_GGUF_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GGUF_NORMS = {
    False: {"post_attention_layernorm": "ffn_norm"},
    True: {
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
}
_GGUF_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def gguf_name(name: str, gemma: bool = False) -> str:
    """GGUF's name of a tensor by Hugging Face's (gguf-py's tensor_mapping.py)."""
    if name in _GGUF_TOP:
        return _GGUF_TOP[name]
    _, _, layer, rest = name.split(".", 3)
    part, suffix = rest.rsplit(".", 1)
    return f"blk.{layer}.{(_GGUF_PARTS | _GGUF_NORMS[gemma])[part]}.{suffix}"


def permute(weights: NDArray[Any], heads: int) -> NDArray[Any]:
    """What llama.cpp's converter does to the rows of a Llama's q and k (LlamaModel.permute), biases included."""
    half = weights.shape[0] // heads // 2
    return weights.reshape(heads, 2, half, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)
