"""Makes ``smollm2_greedy.json`` and ``.npz``: what transformers says of SmolLM2-135M-Instruct.Q4_1.gguf.

The file is dequantised to float32 twice, by transformers itself and by the gguf package with q/k rows put back by
hand; both must give the same weights bit for bit. Twenty prompts are continued greedily by 64 tokens (end-of-text
ignored); the logits come from one full forward behind each, without a cache, in float32 with eager attention.

Made with Python 3.11, torch 2.13.0 (CPU), transformers 5.23.0, accelerate 1.15.0, gguf 0.19.0, tokenizers 0.23.3.
Usage, in an environment with tests/reference/requirements.txt:
    python tests/data/make_smollm2_reference.py
"""

from __future__ import annotations

import sys
import time
from importlib.metadata import version
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.data.smollm2_prompts import PROMPTS  # noqa: E402
from tests.reference import forward  # noqa: E402
from tests.support.reference import SMOLLM2, make_case, save_cases  # noqa: E402

NEW_TOKENS = 64
FULL_ROWS = {"prose, five tokens": (0, 63), "chat, two turns": (0, 63), "prose, long": (0, 63)}


def main() -> None:
    path = forward.find_gguf()
    model = forward.smollm2_by_transformers(path)
    by_hand = forward.smollm2_by_gguf(path).state_dict()
    for name, weight in model.state_dict().items():
        if not torch.equal(weight, by_hand.pop(name)):
            raise SystemExit(f"{name}: transformers and gguf dequantise differently")
    if by_hand:
        raise SystemExit(f"transformers did not load {sorted(by_hand)}")
    tokenizer = forward.smollm2_tokenizer(path)
    cases = []
    for index, (name, text) in enumerate(PROMPTS.items()):
        began = time.perf_counter()
        prompt = tokenizer.encode(text, add_special_tokens=False).ids
        tokens = forward.greedy(model, prompt, NEW_TOKENS)
        rows = forward.greedy_rows(model, prompt, tokens)
        case = make_case(name, index, prompt, rows, FULL_ROWS.get(name, ()), text)
        cases.append(case)
        gap = min(case.gap(row) for row in range(NEW_TOKENS))
        print(f"{name}: {len(prompt)} tokens, least gap {gap:.1e}, {time.perf_counter() - began:.1f} s")
        print("   ", repr(tokenizer.decode(tokens)[:100]))
    meta = {
        "model": path.name,
        "sha256": forward.sha256(path),
        "made_by": "tests/data/make_smollm2_reference.py",
        "versions": {**forward.versions(), "gguf": version("gguf")},
    }
    save_cases(SMOLLM2, meta, cases)
    for file in (SMOLLM2, SMOLLM2.with_suffix(".npz")):
        print(f"{file}: {file.stat().st_size} bytes")


if __name__ == "__main__":
    main()
