"""Reads a GGUF file with transformers, dequantised, and saves it as a Hugging Face folder in float32.

python peers_export.py MODEL.gguf FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    # A model read from a GGUF file remembers how that was quantised and refuses to be saved: copied into a fresh one.
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    fresh = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    fresh.load_state_dict(model.state_dict())
    fresh.tie_weights()
    fresh.save_pretrained(target)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    main()
