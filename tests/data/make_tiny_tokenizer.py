"""Makes ``tests/data/tiny_tokenizer``: byte-level BPE, vocabulary 512, a ChatML template. Needs ``tokenizers``.

Ids 0 to 3 are ``<s>``, ``</s>``, ``<|im_start|>``, ``<|im_end|>``, then the 256 bytes, then 252 merges learnt from the
text below. The file is the same on every run.

Usage: python tests/data/make_tiny_tokenizer.py
"""

from __future__ import annotations

import json
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "tiny_tokenizer"
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
VOCABULARY = 512
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TEXT = """
The cat sat on the mat. The quick brown fox jumps over the lazy dog, and the dog does not mind at all.
A climber ascends a rope with a clamp; the clamp holds when it is loaded and slides when it is not.
Once upon a time there was a small house at the end of a long road. Nobody lived there but an old user of computers
and his assistant, who answered every question with a short story about the weather.
What is the capital of France? The capital of France is Paris. What is two and two? Two and two is four.
To be counted: one, two, three, four, five, six, seven, eight, nine, ten; 1, 2, 3, 10, 100, 1000, 2026.
def add(a, b): return a + b
for i in range(10): print(i, add(i, 1))
system user assistant system user assistant system user assistant
Language models read tokens and write tokens; a token is a piece of a word, a word or some words together.
They said that this would never work. It works, and it is the only thing here that always works.
"""


def main() -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT.splitlines(keepends=True), trainer)
    if tokenizer.get_vocab_size() != VOCABULARY:
        raise SystemExit(f"the text gives {tokenizer.get_vocab_size()} tokens, not {VOCABULARY}: lengthen it")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    FOLDER.mkdir(exist_ok=True)
    tokenizer.save(str(FOLDER / "tokenizer.json"))
    config = {
        "add_bos_token": True,
        "bos_token": "<s>",
        "chat_template": TEMPLATE,
        "eos_token": "</s>",
        "model_max_length": 2048,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (FOLDER / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    print(f"{FOLDER}: {VOCABULARY} tokens")


if __name__ == "__main__":
    main()
