"""Writes pre_tokenizer_ids.json: how llama.cpp cuts texts with each kind of pre-tokenizer that a GGUF file can name.

    python -m venv V && V/bin/pip install xllamacpp gguf tokenizers
    V/bin/python tests/data/make_pre_tokenizer_ids.py

For each name a tiny random model is written with one and the same vocabulary, whose merges were learnt across word
boundaries: the ids then show where a text was cut. A few words are tokens that no merges make, so that ids also show
who takes whole words from the vocabulary.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from make_smollm2_token_ids import ask, serve  # noqa: E402
from make_tiny_tokenizer import TEXT  # noqa: E402
from token_texts import WRITTEN, texts  # noqa: E402

NAMES = ["gpt-2", "smollm", "llama-bpe", "dbrx", "qwen2", "tekken", "gpt-4o", "deepseek-coder", "default"]
WHOLE = ["\u0120jumps", "World", "\u0120lazy", "\u0120rope", "class"]
MORE = [
    "a rope, the lazy lazy jumps class World",
    "WordsInCamelCase HTMLParser iPhone \u0394\u03b4 McDonald's O'Brien'S",
    "x=1;y==22;z+=333;w**4444 $5,000.00 50% #12 @a ^b ~c `d` |e|",
    "\u3042\u3044\u3046 123\uff11\uff12\uff13 \u00bd\u00bc \u2167 end",
    "a\n b\n\n c\r\n\r\nd \n \n e\t\n",
    "path/to/file.txt // comment /* x */ <a href='b'>",
]


def learn() -> tuple[list[str], list[str]]:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=900, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), max_token_length=6, show_progress=False
    )
    tokenizer.train_from_iterator([line + "\n" for line in (TEXT + "\n".join(WRITTEN + MORE)).split("\n")] * 2, trainer)
    vocabulary = tokenizer.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    merges = [" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]
    return tokens + [word for word in WHOLE if word not in vocabulary], merges


def write_model(path: Path, pre: str, tokens: list[str], merges: list[str]) -> None:
    import gguf

    size, hidden = len(tokens), 32
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(512)
    writer.add_embedding_length(hidden)
    writer.add_block_count(1)
    writer.add_feed_forward_length(hidden)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([1] * size)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    draw = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (size, hidden), "output_norm.weight": (hidden,)}
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        shapes[f"blk.0.{name}.weight"] = (hidden, hidden)
    for name in ("attn_norm", "ffn_norm"):
        shapes[f"blk.0.{name}.weight"] = (hidden,)
    for name, shape in shapes.items():
        writer.add_tensor(name, draw.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    import xllamacpp

    tokens, merges = learn()
    asked = WRITTEN + MORE + texts()[len(WRITTEN) :][:12]
    found: dict[str, Any] = {
        "made_with": f"xllamacpp {xllamacpp.__version__}",
        "tokens": tokens,
        "merges": merges,
        "texts": asked,
        "ids": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        for name in NAMES:
            path = Path(folder) / f"{name}.gguf"
            write_model(path, name, tokens, merges)
            server = serve(str(path))
            found["ids"][name] = [ask(server.listening_address, text) for text in asked]
            del server
    target = Path(__file__).with_name("pre_tokenizer_ids.json")
    target.write_text(json.dumps(found, separators=(",", ":")) + "\n", encoding="utf-8")
    print(f"{target}: {len(NAMES)} kinds, {len(asked)} texts")


if __name__ == "__main__":
    main()
