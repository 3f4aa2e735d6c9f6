"""Writes sentencepiece_prefix.json and sentencepiece_plain.json: two small SentencePiece BPE vocabularies, as GGUF
metadata would hold them, and the ids that the ``sentencepiece`` library gives for `token_texts`.

    python -m venv V && V/bin/pip install sentencepiece
    V/bin/python tests/data/make_sentencepiece.py

``prefix`` is Llama 2's kind (a space is put before the text), ``plain`` Gemma's (none, and runs of spaces and
newlines are user-defined symbols, whose spaces a GGUF file writes as spaces).
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from make_tiny_tokenizer import TEXT  # noqa: E402
from token_texts import WRITTEN, texts  # noqa: E402

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
PREFIX = "tokenizer.ggml."


def train(prefix: bool) -> Any:
    import sentencepiece

    lines = [line for line in (TEXT + "\n".join(WRITTEN)).splitlines() if line]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines * 3),
        model_writer=model,
        model_type="bpe",
        vocab_size=1000,
        character_coverage=0.98,
        byte_fallback=True,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        add_dummy_prefix=prefix,
        user_defined_symbols=[] if prefix else ["\n", "\n\n", "\n\n\n", "\u2581\u2581", "\u2581" * 3, "\u2581" * 4],
        num_threads=1,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def type_of(processor: Any, i: int) -> int:
    if processor.is_unknown(i):
        return UNKNOWN
    if processor.is_control(i):
        return CONTROL
    if processor.is_byte(i):
        return BYTE
    if processor.is_unused(i):
        return UNUSED
    return NORMAL


def metadata(processor: Any, prefix: bool) -> dict[str, Any]:
    size = processor.get_piece_size()
    types = [type_of(processor, i) for i in range(size)]
    tokens = [processor.id_to_piece(i) for i in range(size)]
    if not prefix:
        # The library does not tell user-defined symbols from the others: they follow the control tokens, score 0.
        for i in range(processor.piece_to_id("\n"), processor.piece_to_id("\u2581" * 4) + 1):
            types[i], tokens[i] = USER_DEFINED, tokens[i].replace("\u2581", " ")
    return {
        PREFIX + "model": "llama",
        PREFIX + "tokens": tokens,
        PREFIX + "scores": [processor.get_score(i) for i in range(size)],
        PREFIX + "token_type": types,
        PREFIX + "bos_token_id": processor.bos_id(),
        PREFIX + "eos_token_id": processor.eos_id(),
        PREFIX + "unknown_token_id": processor.unk_id(),
        PREFIX + "add_space_prefix": prefix,
    }


def main() -> None:
    import sentencepiece

    for name, prefix in (("prefix", True), ("plain", False)):
        processor = train(prefix)
        cases = [{"text": text, "ids": processor.encode(text)} for text in texts()]
        found = {
            "made_with": f"sentencepiece {sentencepiece.__version__}",
            "metadata": metadata(processor, prefix),
            "cases": cases,
        }
        target = Path(__file__).with_name(f"sentencepiece_{name}.json")
        target.write_text(json.dumps(found, separators=(",", ":")) + "\n", encoding="utf-8")
        print(f"{target}: {processor.get_piece_size()} pieces, {len(cases)} texts")


if __name__ == "__main__":
    main()
