"""One engine in a process of its own, which measures when it is told to. Started by ``peers.py``; runs in any of the
environments that it makes.

    python peers_worker.py ENGINE MODEL THREADS [KEY=VALUE ...]

Prints ``{"value": 0}`` when the model can run. Then, for each line ``METRIC`` on standard input, a line
``{"value": number}``: ``decode`` (tokens a second, 32 in, 128 out, after the first), ``prefill`` (tokens a second, 512
in, until the first token), ``batch16`` (16 streams, 128 in, 64 out, new tokens a second with their prefill), ``ttft``
(32 in, milliseconds to the first token). Greedy; end-of-text is ignored; the number of tokens is asserted. The n-th run
of a metric has the same random prompts with every engine, and no two runs share one.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Prompt = list[int]
VOCABULARY = 40_000  # ids below it are words in every tokenizer used here


class Ours:
    """Jumar itself, through its Python interface."""

    def __init__(self, model: str, threads: int, options: dict[str, str]) -> None:
        sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
        from runtime import Engine

        # 4,096 tokens of KV: as much as 16 streams need here, and soon all touched, as in a service that runs
        self.engine = Engine.load(model, threads=threads, max_model_len=2048, kv_blocks=257, **options)

    def run(self, prompts: Sequence[Prompt], tokens: int) -> tuple[float, float]:
        from server.commands.bench import run

        first, end, count = run(self.engine, [tuple(p) for p in prompts], tokens)
        assert count == tokens * len(prompts), count
        return first, end


class OnnxRuntime:
    """onnxruntime-genai; static batches."""

    def __init__(self, model: str, threads: int, options: dict[str, str]) -> None:
        import onnxruntime_genai as og  # type: ignore[import-not-found]

        self.og = og
        config = og.Config(model)
        config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}))
        self.model = og.Model(config)
        og.Tokenizer(self.model)  # not used here; whoever serves text loads it

    def run(self, prompts: Sequence[Prompt], tokens: int) -> tuple[float, float]:
        import numpy as np

        length = len(prompts[0]) + tokens
        params = self.og.GeneratorParams(self.model)
        params.set_search_options(
            max_length=length,
            min_length=length,
            batch_size=len(prompts),
            do_sample=False,
            past_present_share_buffer=True,
        )
        begin = time.perf_counter()
        generator = self.og.Generator(self.model, params)
        generator.append_tokens(np.array(prompts, np.int32))
        generator.generate_next_token()
        first = time.perf_counter() - begin
        for _ in range(tokens - 1):
            generator.generate_next_token()
        end = time.perf_counter() - begin
        for i in range(len(prompts)):
            assert len(generator.get_sequence(i)) == length
        return first, end


class OpenVino:
    """openvino-genai's continuous batching."""

    def __init__(self, model: str, threads: int, options: dict[str, str]) -> None:
        import openvino_genai as ov  # type: ignore[import-not-found]

        self.ov = ov
        schedule = ov.SchedulerConfig()
        schedule.max_num_batched_tokens = 2048
        schedule.max_num_seqs = 16
        schedule.enable_prefix_caching = False
        schedule.num_kv_blocks = 4096 // 32
        self.pipeline = ov.ContinuousBatchingPipeline(model, schedule, "CPU", openvino_settings(threads))

    def run(self, prompts: Sequence[Prompt], tokens: int) -> tuple[float, float]:
        import numpy as np
        import openvino  # type: ignore[import-not-found]

        config = self.ov.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = tokens, True, False
        begin, first = time.perf_counter(), 0.0
        handles = [
            self.pipeline.add_request(i, openvino.Tensor(np.array([p], np.int64)), config)
            for i, p in enumerate(prompts)
        ]
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
            first = first or time.perf_counter() - begin
        end = time.perf_counter() - begin
        assert all(len(h.read_all()[0].generated_ids) == tokens for h in handles)
        return first, end


class OpenVinoPlain:
    """openvino-genai's pipeline without a scheduler; static batches."""

    def __init__(self, model: str, threads: int, options: dict[str, str]) -> None:
        import openvino_genai as ov

        self.ov = ov
        self.pipeline = ov.LLMPipeline(model, "CPU", ATTENTION_BACKEND="SDPA", **openvino_settings(threads))

    def run(self, prompts: Sequence[Prompt], tokens: int) -> tuple[float, float]:
        import numpy as np
        import openvino

        config = self.ov.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = tokens, True, False
        ids = np.array(prompts, np.int64)
        begin = time.perf_counter()
        inputs = self.ov.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        result = self.pipeline.generate(inputs, config)
        end = time.perf_counter() - begin
        assert all(len(made) == tokens for made in result.tokens), [len(made) for made in result.tokens]
        return result.perf_metrics.get_ttft().mean / 1000, end


def openvino_settings(threads: int) -> dict[str, Any]:
    return {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}


class CTranslate2:
    """ctranslate2; static batches."""

    def __init__(self, model: str, threads: int, options: dict[str, str]) -> None:
        import ctranslate2  # type: ignore[import-not-found]

        self.generator = ctranslate2.Generator(
            model, device="cpu", compute_type=options.get("type", "int8"), intra_threads=threads
        )
        self.words = json.loads((Path(model) / "vocabulary.json").read_text(encoding="utf-8"))

    def run(self, prompts: Sequence[Prompt], tokens: int) -> tuple[float, float]:
        first = 0.0
        begin = time.perf_counter()

        def step(result: Any) -> bool:
            nonlocal first
            first = first or time.perf_counter() - begin
            return False

        words = [[self.words[i] for i in p] for p in prompts]
        begin = time.perf_counter()
        results = self.generator.generate_batch(
            words, max_length=tokens, min_length=tokens, include_prompt_in_result=False, beam_size=1, end_token=[],
            callback=step,
        )  # fmt: skip
        end = time.perf_counter() - begin
        assert all(len(r.sequences_ids[0]) == tokens for r in results), [len(r.sequences_ids[0]) for r in results]
        return first, end


ENGINES = {
    "jumar": Ours,
    "onnxruntime": OnnxRuntime,
    "openvino": OpenVino,
    "openvino-plain": OpenVinoPlain,
    "ctranslate2": CTranslate2,
}


def measure(engine: Any, metric: str, rng: random.Random) -> float:
    def prompts(count: int, size: int) -> list[Prompt]:
        return [[rng.randrange(100, VOCABULARY) for _ in range(size)] for _ in range(count)]

    if metric == "decode":
        first, end = engine.run(prompts(1, 32), 128)
        return 127 / (end - first)
    if metric == "prefill":
        return 512 / engine.run(prompts(1, 512), 1)[0]
    if metric == "ttft":
        return 1000 * engine.run(prompts(1, 32), 1)[0]  # type: ignore[no-any-return]
    if metric == "batch16":
        return 16 * 64 / engine.run(prompts(16, 128), 64)[1]
    raise ValueError(f"metric {metric!r}")


def main() -> None:
    name, model, threads, *rest = sys.argv[1:]
    engine = ENGINES[name](model, int(threads), dict(x.split("=", 1) for x in rest))
    print(json.dumps({"value": 0}), flush=True)
    runs: Counter[str] = Counter()
    for line in sys.stdin:
        metric = line.strip()
        runs[metric] += 1
        rng = random.Random(f"{metric} {runs[metric]}")
        print(json.dumps({"value": measure(engine, metric, rng)}), flush=True)


if __name__ == "__main__":
    main()
