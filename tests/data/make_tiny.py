"""Makes ``tests/data/models/tiny``: config.json and model.safetensors of a random Llama of two layers. NumPy only.

Every weight is a multiple of 2^-15 drawn by ``RandomState.randint`` (a stream that NumPy keeps frozen), so the file
has the same bytes on every machine. Embedding rows are small beside what the layers add, or a tied model would
only repeat its last token; the padding rows (ids 512..519) are zero, so that no greedy token falls there.

Usage: python tests/data/make_tiny.py     (its reference logits: make_tiny_models.py)
File format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

FOLDER = Path(__file__).resolve().parent / "models" / "tiny"
SEED = 20
TOKENS = 512
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 2048,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "vocab_size": 520,
}


def uniform(state: np.random.RandomState, shape: tuple[int, ...], bound: float, centre: float = 0.0) -> NDArray[Any]:
    """Float32 in centre - bound .. centre + bound, exact: 2^15 even steps each way."""
    return (centre + state.randint(-(2**15), 2**15, size=shape) * (bound / 2**15)).astype(np.float32)


def weights(config: dict[str, Any], seed: int) -> dict[str, NDArray[np.float32]]:
    """The tensors of a Llama of ``config``, named as Hugging Face does; lm_head only where untied."""
    state = np.random.RandomState(seed)
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q_rows = config["num_attention_heads"] * config["head_dim"]
    kv_rows = config["num_key_value_heads"] * config["head_dim"]

    def vocabulary() -> NDArray[Any]:
        table = uniform(state, (vocab, hidden), 0.5)
        table[TOKENS:] = 0
        return table

    out = {"model.embed_tokens.weight": vocabulary()}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        out[f"{at}.input_layernorm.weight"] = uniform(state, (hidden,), 0.5, 1.0)
        out[f"{at}.post_attention_layernorm.weight"] = uniform(state, (hidden,), 0.5, 1.0)
        out[f"{at}.self_attn.q_proj.weight"] = uniform(state, (q_rows, hidden), 0.375)
        out[f"{at}.self_attn.k_proj.weight"] = uniform(state, (kv_rows, hidden), 0.375)
        out[f"{at}.self_attn.v_proj.weight"] = uniform(state, (kv_rows, hidden), 0.5)
        out[f"{at}.self_attn.o_proj.weight"] = uniform(state, (hidden, q_rows), 1.0)
        out[f"{at}.mlp.gate_proj.weight"] = uniform(state, (inner, hidden), 0.5)
        out[f"{at}.mlp.up_proj.weight"] = uniform(state, (inner, hidden), 0.5)
        out[f"{at}.mlp.down_proj.weight"] = uniform(state, (hidden, inner), 0.5)
    out["model.norm.weight"] = uniform(state, (hidden,), 0.5, 1.0)
    if not config["tie_word_embeddings"]:
        out["lm_head.weight"] = vocabulary()
    return out


def safetensors_bytes(tensors: dict[str, NDArray[np.float32]]) -> bytes:
    """A safetensors file of float32 tensors, in the order given; the header padded to eight bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [offset, offset + tensor.nbytes]}
        offset += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(t.astype("<f4").tobytes() for t in tensors.values())


def files() -> dict[str, bytes]:
    """File name -> content of the model's folder."""
    config = json.dumps(CONFIG, indent=2) + "\n"
    return {"config.json": config.encode(), "model.safetensors": safetensors_bytes(weights(CONFIG, SEED))}


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, content in files().items():
        (FOLDER / name).write_bytes(content)
        print(f"{FOLDER / name}: {len(content)} bytes")


if __name__ == "__main__":
    main()
