"""Settings of the engine: the model, how requests are batched, the KV cache, speculation; and the profiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from device.schema import setting, validate
from device.settings import Adjustment

Scheme = Literal["none", "w8a8", "w8a16", "w4a16"]
_MODEL, _BATCH, _KV, _DRAFT = "model", "batching", "KV cache", "speculation"

PROFILES: dict[str, dict[str, Any]] = {
    # Few requests, each answered fast: small steps, so that no decode waits behind a long prefill, and drafts.
    "latency": {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 128,
        "speculate": "ngram",
        "draft_tokens": 4,
        "max_queue": 32,
    },
    # Many requests: large steps; drafts would take the place of other requests' tokens.
    "throughput": {"max_num_seqs": 64, "max_num_batched_tokens": 2048, "speculate": "off", "max_queue": 256},
    # A small machine that does other work too: little memory, short steps.
    "edge": {
        "max_num_seqs": 2,
        "max_num_batched_tokens": 128,
        "speculate": "off",
        "kv_share": 0.25,
        "max_queue": 8,
    },
}
"""Values that a profile puts in place of the defaults; anything set explicitly wins over them."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """See the ``help`` of each field. InvalidSetting (a ConfigError) for values that are not possible."""

    model: str = setting(
        "",
        "The model: a folder in Hugging Face layout, a .gguf file, or smollm2-135m for the embedded model.",
        group=_MODEL,
    )
    tokenizer: str = setting(
        "",
        "Where the tokenizer is, when it does not lie beside the weights: a folder or a tokenizer.json.",
        group=_MODEL,
    )
    max_model_len: int = setting(
        0,
        "Longest sequence, prompt and answer together. 0: as long as the model was made for, or what the KV pool"
        " can hold if that is less.",
        group=_MODEL,
        unit="tokens",
        minimum=0,
    )
    quantize: Literal["none", "w8a8", "w8a16", "w4a16", "int8", "int4"] = setting(
        "none",
        "Round the weights of a float checkpoint to the nearest integers while loading: 8 or 4 bits in groups of 64"
        " columns, the embedding table and the output head always 8. a8: what they are multiplied with is rounded to"
        " int8 too, by row and group of 32, which is faster; a16: it stays float. int8 is w8a8, int4 is w4a16. 4 bits"
        " cost a small model some of its quality. The portable kernels hold the rounded weights as float32: they save"
        " no memory.",
        group=_MODEL,
    )
    profile: Literal["latency", "throughput", "edge"] | None = setting(
        None,
        "A set of defaults for one purpose. Whatever is set explicitly, anywhere, wins over it.",
        group=_BATCH,
    )
    batching: Literal["continuous", "dynamic", "static"] = setting(
        "continuous",
        "When a waiting request may join. continuous: at every step. dynamic: in batches that close when max_batch"
        " requests wait or max_wait_ms after the first. static: a batch runs until its longest answer ends. The last"
        " two are baselines to compare with.",
        group=_BATCH,
    )
    max_num_seqs: int = setting(
        16, "Sequences that are computed at the same time.", group=_BATCH, unit="sequences", minimum=1, maximum=65536
    )
    max_num_batched_tokens: int = setting(
        256,
        "Tokens computed in one step at most: one per decoding sequence, the rest prefill. More is better for"
        " throughput, less for the time between two tokens while others prefill.",
        group=_BATCH,
        unit="tokens",
        minimum=1,
    )
    max_logit_rows: int = setting(
        256,
        "Rows that pass the output head in one step at most: it bounds the memory of logits. Prompts whose"
        " log-probabilities are asked for are cut by it.",
        group=_BATCH,
        unit="rows",
        minimum=1,
    )
    max_batch: int = setting(
        0,
        "Requests in a batch of dynamic or static batching. 0: max_num_seqs.",
        group=_BATCH,
        unit="requests",
        minimum=0,
    )
    max_wait_ms: float = setting(
        10.0,
        "How long dynamic batching waits after the first request of a batch for more.",
        group=_BATCH,
        unit="milliseconds",
        minimum=0,
        maximum=60000,
    )
    chunked_prefill: bool = setting(
        True,
        "Spread a long prompt over several steps, with other requests' decoding between. false: a prompt is computed"
        " in one step, so that no prompt may be longer than max_num_batched_tokens.",
        group=_BATCH,
    )
    chunk_size: int = setting(
        0,
        "Prompt tokens of one request in one step at most. 0: what the token budget leaves.",
        group=_BATCH,
        unit="tokens",
        minimum=0,
    )
    max_queue: int = setting(
        64,
        "Requests that may wait. One more is refused with status 429 and a time after which to try again. Each holds a"
        " thread of the service.",
        group=_BATCH,
        unit="requests",
        minimum=0,
        maximum=4096,
    )
    block_size: int = setting(
        0,
        "Tokens in a block of the KV cache. 0: the device's own size (16 on the CPU and CUDA, 128 on Ascend).",
        group=_KV,
        unit="tokens",
        minimum=0,
    )
    kv_blocks: int = setting(
        0,
        "Blocks in the KV pool. 0: as many as kv_share of the free memory holds, and no more than max_num_seqs"
        " sequences of max_model_len need.",
        group=_KV,
        unit="blocks",
        minimum=0,
    )
    kv_share: float = setting(
        0.5,
        "Share of the memory that is free after loading which the KV pool may take. On the CPU more than 0.5 is"
        " treated as 0.5: the machine needs the rest.",
        group=_KV,
        minimum=0.01,
        maximum=1.0,
    )
    kv_dtype: Literal["auto", "float64", "float32", "bfloat16", "float16", "int8"] = setting(
        "auto",
        "Type of the cached keys and values: what is half or a quarter as large holds two or four times the tokens,"
        " less exactly. int8 has a scale for each token and head. auto: the type of the activations. The native CPU"
        " kernels take all but float64, the portable ones float32, float64 and int8; another one is an error.",
        group=_KV,
    )
    prefix_cache: bool = setting(
        True, "Keep the blocks of finished requests and reuse them for prompts that begin alike.", group=_KV
    )
    speculate: Literal["off", "ngram"] = setting(
        "off",
        "Draft tokens that are verified several at a time; the answers stay the same, token for token. ngram: what"
        " followed the last tokens when they stood earlier in the text. Helps where answers repeat the prompt.",
        group=_DRAFT,
    )
    draft_tokens: int = setting(
        4, "Tokens drafted for a sequence in one step at most.", group=_DRAFT, unit="tokens", minimum=1, maximum=63
    )
    ngram_min: int = setting(
        2, "Shortest sequence of last tokens that is looked for.", group=_DRAFT, unit="tokens", minimum=1, maximum=64
    )
    ngram_max: int = setting(
        4, "Longest sequence of last tokens that is looked for.", group=_DRAFT, unit="tokens", minimum=1, maximum=64
    )

    def __post_init__(self) -> None:
        validate(self)

    @property
    def scheme(self) -> Scheme:
        """``quantize`` by its full name."""
        named: dict[str, Scheme] = {"int8": "w8a8", "int4": "w4a16"}
        return named.get(self.quantize) or cast(Scheme, self.quantize)

    @property
    def batch_limit(self) -> int:
        """Requests in one batch of dynamic or static batching."""
        return self.max_batch or self.max_num_seqs

    @property
    def prefill_chunk(self) -> int:
        """Prompt tokens of one request in one step at most."""
        return self.chunk_size or self.max_num_batched_tokens

    @property
    def rows_per_sequence(self) -> int:
        """Tokens, and logit rows, that a decoding sequence may want in one step: its last token and its drafts."""
        return 1 + (self.draft_tokens if self.speculate != "off" else 0)

    def problems(self) -> Iterator[tuple[list[str], str]]:
        """Values that do not go together: (names, text)."""
        if self.ngram_min > self.ngram_max:
            yield ["ngram_min", "ngram_max"], "ngram_min is larger than ngram_max"
        if self.max_batch > self.max_num_seqs:
            yield ["max_batch", "max_num_seqs"], "a batch cannot hold more requests than max_num_seqs"

    @classmethod
    def adjustments(cls, values: Mapping[str, Any], explicit: Callable[[str], bool]) -> Iterator[Adjustment]:
        """Budgets that nobody set grow with the number of sequences that somebody did set."""
        drafts = values["draft_tokens"] if values["speculate"] != "off" else 0
        rows = values["max_num_seqs"] * (1 + drafts)
        for name, what in (("max_num_batched_tokens", "tokens"), ("max_logit_rows", "logit rows")):
            if values[name] < rows and not explicit(name):
                why = f"{values['max_num_seqs']} sequences with {drafts} drafts each want {rows} {what} in a step"
                yield Adjustment(name, values[name], rows, why)
