"""What rounding costs: the model's distributions with the fast settings, against the float32 forward of the same
weights; beside it llama.cpp's own, by its own tool, on the same file and text.

    python scripts/bench/quality.py [--chunks 80] [--activations auto] [--kv-dtype auto] [--llama] [--json FILE]

The text is Python's own documentation (``pydoc_data.topics``), cut into chunks of 512 tokens; counted are the last 255
predictions of each chunk, as llama-perplexity does it: 80 chunks are 20,400 predictions. ``kl``: mean of
KL(float32 || settings) in nats. ``top1``: how often the likeliest token is the same. ``ppl``: perplexities of both.

--llama needs ``scripts/bench/peers.py --install --only llama.cpp``; its reference is its own forward of the file
requantised to F32, on as many chunks (2 GB of logits in a temporary folder). Source of the measure: Kullback and
Leibler 1951, doi 10.1214/aoms/1177729694.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data import topics
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from device.cpu import CpuDevice  # noqa: E402
from device.probe_cpu import cpu_name  # noqa: E402
from runtime.config import EngineConfig  # noqa: E402
from runtime.loaders.checkpoint import open_checkpoint  # noqa: E402
from runtime.models.build import build_model  # noqa: E402
from runtime.startup import load_tokenizer  # noqa: E402
from scripts.bench.peers_engines import LlamaCpp, embedded, output  # noqa: E402
from tests.support.forward import Forward  # noqa: E402

CONTEXT = 512


def text() -> str:
    return "\n".join(topics.topics[name] for name in sorted(topics.topics))


@dataclass
class Sums:
    """Over predictions."""

    count: int = 0
    kl: float = 0.0
    same: int = 0
    nll: float = 0.0
    nll_reference: float = 0.0

    def add(self, reference: NDArray[np.float32], other: NDArray[np.float32], targets: Sequence[int]) -> None:
        """Logits [rows, vocabulary] of both, and the tokens that came."""
        p, q = log_softmax(reference), log_softmax(other)
        self.kl += float((np.exp(p) * (p - q)).sum())
        self.same += int((p.argmax(axis=1) == q.argmax(axis=1)).sum())
        at = np.arange(len(targets)), np.asarray(targets)
        self.nll -= float(q[at].sum())
        self.nll_reference -= float(p[at].sum())
        self.count += len(targets)


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    z = logits.astype(np.float64)
    z -= z.max(axis=1, keepdims=True)
    z -= np.log(np.exp(z).sum(axis=1, keepdims=True))
    return z


def forward(kv_dtype: str, **settings: Any) -> Forward:
    device = CpuDevice("float32", **settings)
    model = build_model(open_checkpoint(embedded(), lambda _: None), device, CONTEXT)
    return Forward(model, device, max_len=CONTEXT, kv_dtype=kv_dtype)


def ours(chunks: int, activations: str, kv_dtype: str) -> Sums:
    file = str(embedded())
    tokenizer = load_tokenizer(EngineConfig(model=file), open_checkpoint(file, lambda _: None))
    ids = list(tokenizer.encode(text(), add_special_tokens=False))
    exact = forward("float32", kernels="numpy")
    fast = forward(kv_dtype, kernels="native", activations=activations)
    sums, first, begin = Sums(), CONTEXT // 2, time.monotonic()
    if len(ids) < chunks * CONTEXT:
        raise SystemExit(f"the text has {len(ids)} tokens, {chunks} chunks need {chunks * CONTEXT}")
    for i in range(chunks):
        chunk = ids[i * CONTEXT : (i + 1) * CONTEXT]
        rows = CONTEXT - first
        sums.add(exact.rows(chunk, rows)[:-1], fast.rows(chunk, rows)[:-1], chunk[first + 1 :])
        print(f"\r{i + 1} of {chunks} chunks, {time.monotonic() - begin:.0f} s", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return sums


def llama(chunks: int, threads: int) -> dict[str, tuple[float, float]]:
    """Format -> (mean KL, share of equal likeliest tokens)."""
    engine = LlamaCpp(threads)
    engine.check()
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        corpus, base, whole = (Path(folder) / name for name in ("text.txt", "base.dat", "f32.gguf"))
        corpus.write_text(text(), encoding="utf-8")
        output(engine.tool("llama-quantize"), "--allow-requantize", embedded(), whole, "F32")
        common = ("-f", corpus, "-c", str(CONTEXT), "-b", str(CONTEXT), "--chunks", str(chunks), "-t", str(threads))
        output(engine.tool("llama-perplexity"), "-m", whole, *common, "--kl-divergence-base", base)
        for kind in ("q4_1", "q4_0", "q8_0"):
            said = output(engine.tool("llama-perplexity"), "-m", engine.model(kind), *common, "--kl-divergence",
                          "--kl-divergence-base", base)  # fmt: skip
            kl = re.search(r"Mean\s+KLD:\s*([\d.]+)", said)
            top = re.search(r"Same top p:\s*([\d.]+)", said)
            if kl is None or top is None:
                raise SystemExit(f"llama-perplexity said something else: {said[-500:]}")
            found[kind] = float(kl[1]), float(top[1]) / 100
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, default=80)
    parser.add_argument("--activations", choices=("auto", "float"), default="auto")
    parser.add_argument("--kv-dtype", default="float32", help="of the cache, as jumar serve takes it")
    parser.add_argument("--llama", action="store_true", help="llama.cpp too")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    args = parser.parse_args()
    sums = ours(args.chunks, args.activations, args.kv_dtype)
    kl, top = sums.kl / sums.count, sums.same / sums.count
    print(f"jumar {embedded().name}, activations {args.activations}, KV {args.kv_dtype}: mean KL {kl:.6f}, "
          f"same likeliest token {top:.2%}, perplexity {np.exp(sums.nll / sums.count):.4f} "
          f"(float32: {np.exp(sums.nll_reference / sums.count):.4f}), {sums.count} predictions")  # fmt: skip
    rows = [{"metric": "kl", "ours": kl, "unit": "nats"}, {"metric": "top1", "ours": top, "unit": "share"}]
    if args.llama:
        rows = []
        for kind, (their_kl, their_top) in llama(args.chunks, args.threads).items():
            print(f"llama.cpp {kind}: mean KL {their_kl:.6f} (ours is {kl / their_kl:.2f} of it), same likeliest token "
                  f"{their_top:.2%}")  # fmt: skip
            peer = {"peer": f"llama.cpp {kind}", "cpu": cpu_name()}
            rows.append(
                {"metric": "kl", "ours": kl, "unit": "nats", "theirs": their_kl, "ratio": their_kl / kl, **peer}
            )
            rows.append({"metric": "top1", "ours": top, "unit": "share", "theirs": their_top, "ratio": top / their_top,
                         **peer})  # fmt: skip
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
