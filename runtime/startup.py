"""From settings to an engine: select the device, load the model, size the KV pool, say what was chosen."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from device.config import DeviceConfig
from device.contract import Device, KVLayerSpec, KVSpec
from device.errors import ConfigError
from device.open import open_device
from device.probe import select
from runtime.blocks import BlockPool
from runtime.chat import chat_problem
from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.loaders.checkpoint import Checkpoint, open_checkpoint
from runtime.loaders.quantize import Quantizer
from runtime.model_config import ModelConfig
from runtime.models.build import Builder
from runtime.scheduler import Limits, Scheduler
from runtime.step import Model

if TYPE_CHECKING:
    from runtime.tokenizer import Tokenizer

Notice = Callable[[str], None]
Progress = Callable[[int, int], None]
_MIB = 1 << 20
_COLUMNS = 100
_BYTES_PER_TOKEN = 24
"""Of a step's inputs: id, position and slot, four bytes each, in both buffers."""


@dataclass(slots=True)
class Ledger:
    """Where the memory goes. Bytes. ``lines`` is what start-up prints.

    wanted_len: the length that was asked for or that the model was made for, where max_model_len is what fits.
    """

    free_before: int = 0
    source: str = ""
    weights: int = 0
    workspace: int = 0
    block_bytes: int = 0
    blocks: int = 0
    reserved: int = 0
    block_size: int = 0
    max_model_len: int = 0
    wanted_len: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Tokens that the pool holds."""
        return (self.blocks - self.reserved) * self.block_size

    def lines(self) -> list[str]:
        """For the log: one line a part."""
        sequences = self.tokens // self.max_model_len if self.max_model_len else 0
        return [
            f"free before loading  {_mib(self.free_before)} ({self.source})",
            f"weights              {_mib(self.weights)}",
            f"step workspace       {_mib(self.workspace)} (at most)",
            f"KV pool              {_mib(self.blocks * self.block_bytes)}: {self.blocks - self.reserved} blocks of "
            f"{self.block_size} tokens = {self.tokens} tokens, {sequences} sequence(s) of {self.max_model_len}",
            *self.notes,
        ]


def _mib(size: int) -> str:
    return f"{size / _MIB:9.1f} MiB"


def load_engine(model: str, **settings: Any) -> Engine:
    """A started engine with these settings (names of ``jumar.toml``) over the defaults; files and environment are not
    read. ConfigError for an unknown name."""
    from device.settings import resolve
    from runtime.config import PROFILES

    resolved = resolve(
        [DeviceConfig, EngineConfig],
        profiles=PROFILES,
        options={"model": model, **settings},
        environ={},
        cwd="/nonexistent",
    )
    engine = build_engine(
        resolved.of(DeviceConfig), resolved.of(EngineConfig), explicit_len=resolved.explicit("max_model_len")
    )
    engine.start()
    return engine


def build_engine(
    device_config: DeviceConfig,
    config: EngineConfig,
    notice: Notice | None = None,
    progress: Progress | None = None,
    *,
    explicit_len: bool | None = None,
) -> Engine:
    """An engine, not yet started. notice hears what was chosen and why, line by line; progress(done, total) of loading.

    explicit_len: whether max_model_len was asked for (default: when it is not 0); then a pool that cannot hold one
    such sequence is an error, and otherwise the length is lowered and said.
    Raises ConfigError, DeviceError, LoadError, UnsupportedModel.
    """
    say = notice or (lambda text: None)
    if not config.model:
        raise ConfigError("no model given; name a folder, a .gguf file or smollm2-135m")
    started = time.monotonic()
    selection = select(device_config)
    say(f"device: {selection.name}\n{selection.report()}")
    checkpoint = open_checkpoint(config.model, say)
    tokenizer = load_tokenizer(config, checkpoint)
    if (problem := chat_problem(tokenizer)) is not None:
        say(f"warning: chat is not available: {problem}")
    device = open_device(selection, device_config)
    for line in _op_lines(device):
        say(line)
    asked = config.max_model_len
    max_len = asked or checkpoint.config.max_position
    if asked > checkpoint.config.max_position:
        say(f"max_model_len {asked} is above the {checkpoint.config.max_position} that the model was made for")
    explicit = bool(asked) if explicit_len is None else explicit_len
    before = device.memory()
    quantizer = Quantizer(config.scheme, say) if config.scheme != "none" else None
    builder = Builder(checkpoint, device, quantizer)
    # The tables of positions are as long as a sequence may be: what no pool can hold is cut or refused before them.
    plan = Ledger(before.free, before.source, wanted_len=max_len)
    spec = _planned_kv(checkpoint.config, _kv_dtype(device, config))
    fits = size_pool(device, config, spec, checkpoint.config.vocab_size, max_len, explicit, plan).max_len
    model = builder.build(fits, progress)
    if quantizer is not None:
        say(quantizer.summary())
    ledger = Ledger(before.free, before.source, weights=model.nbytes, wanted_len=max_len)
    engine = make_engine(
        model,
        device,
        config,
        fits,
        explicit_len=explicit,
        ledger=ledger,
        model_id=checkpoint.name,
        tokenizer=tokenizer,
        eos_ids=checkpoint.config.eos_ids,
    )
    for line in (*ledger.lines(), *device.report.notices):
        say(line)
    say(f"loaded {checkpoint.name} in {time.monotonic() - started:.1f} s")
    return engine


def make_engine(
    model: Model,
    device: Device,
    config: EngineConfig,
    max_len: int,
    *,
    explicit_len: bool = False,
    ledger: Ledger | None = None,
    model_id: str = "model",
    tokenizer: Tokenizer | None = None,
    eos_ids: Iterable[int] = (),
) -> Engine:
    """An engine, not yet started, for a model that is on its device: sizes the pool, allocates it, binds it.

    max_len: longest sequence wanted; see ``size_pool`` for what becomes of it. Ends are the union of ``eos_ids`` and
    the tokenizer's; ids that the tokenizer does not know can never be drawn.
    """
    ledger = ledger or Ledger()
    spec = model.kv_spec(_kv_dtype(device, config))
    limits = size_pool(device, config, spec, model.vocab_size, max_len, explicit_len, ledger)
    kv = device.alloc_kv(spec, ledger.blocks, ledger.block_size)
    model.bind_kv(kv)
    return Engine(
        model,
        device,
        Scheduler(BlockPool(ledger.blocks, kv.reserved, kv.block_size), limits),
        config,
        model_id=model_id,
        vocab_size=tokenizer.vocab_size if tokenizer else None,
        eos_ids={*eos_ids, *(tokenizer.eos_ids if tokenizer else ())},
        tokenizer=tokenizer,
    )


def load_tokenizer(config: EngineConfig, checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer beside the weights, or the one the setting names. LoadError where there is none."""
    from runtime.tokenizer import Tokenizer

    if config.tokenizer:
        path = Path(config.tokenizer)
        return Tokenizer.from_folder(path.parent if path.name == "tokenizer.json" else path)
    if checkpoint.gguf is not None:
        return Tokenizer.from_gguf(checkpoint.gguf.metadata)
    return Tokenizer.from_folder(checkpoint.path)


def _op_lines(device: Device) -> list[str]:
    """The op table, ops of the same implementation together; portable stand-ins are named as such."""
    groups: dict[str, list[str]] = {}
    for op, label, note in device.report.ops:
        groups.setdefault(f"{label} ({note})" if note else label, []).append(op)
    texts = (f"ops by {label}: {', '.join(ops)}" for label, ops in groups.items())
    return ["\n".join(textwrap.wrap(text, _COLUMNS, subsequent_indent="    ")) for text in texts]


def _planned_kv(config: ModelConfig, dtype: str) -> KVSpec:
    """The cache of a model that is not built yet."""
    c = config
    return KVSpec(tuple(KVLayerSpec(c.num_kv_heads, c.head_dim, c.num_heads, window) for window in c.windows), dtype)


def _kv_dtype(device: Device, config: EngineConfig) -> str:
    wanted = device.dtype if config.kv_dtype == "auto" else config.kv_dtype
    if wanted not in device.caps.kv_dtypes:
        raise ConfigError(
            f"kv_dtype {wanted!r} is not possible on {device.caps.name}; it takes {', '.join(device.caps.kv_dtypes)}"
        )
    return wanted


def step_workspace(rows: int, vocab_size: int, tokens: int) -> int:
    """Bytes that a step needs beside weights and KV, estimated from above: float32 logits and three copies of them
    (edited, sorted, exponentials), and the inputs of every token."""
    return 4 * rows * vocab_size * 4 + _BYTES_PER_TOKEN * tokens


def size_pool(
    device: Device,
    config: EngineConfig,
    spec: KVSpec,
    vocab_size: int,
    max_len: int,
    explicit: bool,
    ledger: Ledger,
) -> Limits:
    """Decide blocks and lengths, and note them in the ledger. Nothing is allocated.

    The pool is the least of ``kv_share`` of the free memory and what max_num_seqs sequences of max_model_len can ever
    hold. If it cannot hold one sequence of max_model_len, that is lowered with a note, or a ConfigError if it was
    asked for. A ConfigError too for what does not fit into the free memory, naming the setting that wants it.
    """
    size = device.caps.check_block_size(config.block_size)
    ledger.block_size, ledger.reserved = size, device.caps.reserved_blocks
    ledger.block_bytes = device.kv_block_bytes(spec, size)
    rows = max(config.max_logit_rows, config.max_num_seqs)
    ledger.workspace = step_workspace(rows, vocab_size, max(config.max_num_batched_tokens, config.max_num_seqs))
    needed = -(-max_len // size)
    blocks = _pool_blocks(device, config, ledger, vocab_size, needed)
    wanted, ledger.wanted_len = ledger.wanted_len or max_len, 0
    if blocks < needed:
        fits = blocks * size
        if explicit:
            raise ConfigError(
                f"max_model_len {max_len} needs {needed} blocks of {size} tokens, the pool has {blocks}: raise "
                f"kv_share or kv_blocks, or set max_model_len to at most {fits}"
            )
        max_len = fits
    if max_len < wanted:
        ledger.notes.append(f"max_model_len lowered from {wanted} to {max_len}: the KV pool holds no longer sequence")
    ledger.blocks = blocks + ledger.reserved
    ledger.max_model_len = max_len
    limits = _limits(config, device, max_len, rows)
    beside = "" if config.chunked_prefill else ", beside the longest prompt"
    for name, asked, got, why in (
        ("max_num_batched_tokens", config.max_num_batched_tokens, limits.max_tokens, beside),
        ("max_logit_rows", config.max_logit_rows, limits.max_rows, ""),
    ):
        if got > asked:
            ledger.notes.append(f"{name} raised from {asked} to {got}: each sequence wants one in a step{why}")
    return limits


def _pool_blocks(device: Device, config: EngineConfig, ledger: Ledger, vocab_size: int, needed: int) -> int:
    """Blocks of the pool beside the reserved ones, at least one; needed: for the longest sequence. ConfigError."""
    memory = device.memory()
    free, block = memory.free - ledger.workspace, max(ledger.block_bytes, 1)
    there = f"{memory.free / _MIB:.0f} MiB are free ({memory.source})"
    if config.kv_blocks:
        most = free // block - ledger.reserved
        if config.kv_blocks <= most:
            return config.kv_blocks
        if most > 0:
            raise ConfigError(
                f"kv_blocks {config.kv_blocks} takes {config.kv_blocks * block / _MIB:.0f} MiB; {there}, of which a "
                f"step wants {ledger.workspace / _MIB:.0f}: set kv_blocks to at most {most}, or to 0 to have it chosen"
            )
    share = min(config.kv_share, device.caps.kv_share_limit)
    blocks = min(int(max(free, 0) * share) // block - ledger.reserved, config.max_num_seqs * needed)
    if blocks > 0:
        return blocks
    if ledger.workspace > memory.free // 2:
        name, value, most = _largest_wish(config, vocab_size, memory.free // 2)
        raise ConfigError(
            f"no memory is left for a KV pool: {name} {value} makes the step workspace {ledger.workspace / _MIB:.0f} "
            f"MiB; {there}. Set {name} to at most {most}"
        )
    smaller = f"a block_size below {config.block_size}" if config.block_size else "a smaller model"
    raise ConfigError(
        f"not enough memory for a KV pool: a block takes {ledger.block_bytes / _MIB:.2f} MiB; {there}. "
        f"Free memory, or take {smaller}"
    )


def _largest_wish(config: EngineConfig, vocab_size: int, budget: int) -> tuple[str, int, int]:
    """The setting that a step's workspace is large for, its value, and the largest with which it takes ``budget``."""
    per_row, sequences = step_workspace(1, vocab_size, 0), config.max_num_seqs
    if config.max_logit_rows * per_row < config.max_num_batched_tokens * _BYTES_PER_TOKEN:
        name, value, each = "max_num_batched_tokens", config.max_num_batched_tokens, _BYTES_PER_TOKEN
    else:
        name, value, each = "max_logit_rows", config.max_logit_rows, per_row
    if sequences * config.rows_per_sequence >= value:  # the budget was raised for the sequences
        return "max_num_seqs", sequences, max(budget // (each * config.rows_per_sequence), 1)
    return name, value, max(budget // each, 1)


def _limits(config: EngineConfig, device: Device, max_len: int, rows: int) -> Limits:
    tokens = max(config.max_num_batched_tokens, config.max_num_seqs)
    if not config.chunked_prefill:
        tokens = max(tokens, max_len + config.max_num_seqs * config.rows_per_sequence)
    most = device.caps.max_seqs
    return Limits(
        max_seqs=config.max_num_seqs if most is None else min(config.max_num_seqs, most),
        max_tokens=tokens,
        max_rows=rows,
        max_len=max_len,
        chunk=(config.chunk_size or tokens) if config.chunked_prefill else tokens,
        batching=config.batching,
        max_batch=config.batch_limit,
        max_wait=config.max_wait_ms / 1000,
        prefix_cache=config.prefix_cache,
        chunked_prefill=config.chunked_prefill,
    )
