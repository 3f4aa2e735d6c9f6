"""Writes smollm2_token_ids.json: what llama.cpp makes of `token_texts` with the embedded model's tokenizer.

    python -m venv V && V/bin/pip install xllamacpp
    V/bin/python tests/data/make_smollm2_token_ids.py PATH/SmolLM2-135M-Instruct.Q4_1.gguf

xllamacpp is llama.cpp as a Python wheel; its server's ``/tokenize`` is asked, special tokens parsed, none added.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from token_texts import texts  # noqa: E402


def serve(model: str) -> Any:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_ctx = 512
    params.cpuparams.n_threads = 1
    return xllamacpp.Server(params)


def ask(address: str, text: str) -> list[int]:
    body = json.dumps({"content": text, "add_special": False, "parse_special": True}).encode()
    request = urllib.request.Request(address + "/tokenize", body, {"Content-Type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    ids: list[int] = json.loads(opener.open(request).read())["tokens"]
    return ids


def main() -> None:
    import xllamacpp

    server = serve(sys.argv[1])
    cases = [{"text": text, "ids": ask(server.listening_address, text)} for text in texts()]
    found = {"made_with": f"xllamacpp {xllamacpp.__version__}", "cases": cases}
    target = Path(__file__).with_name("smollm2_token_ids.json")
    target.write_text(json.dumps(found, ensure_ascii=True, separators=(",", ":")) + "\n", encoding="utf-8")
    print(f"{target}: {len(cases)} texts")


if __name__ == "__main__":
    main()
