"""Engines for tests: the tiny model and the scripted model on any device, and an oracle of what the cache holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from device.contract import Device, HostBuffer
from device.cpu import CpuDevice
from runtime.api import Event, GenerationRequest, SamplingParams
from runtime.config import EngineConfig
from runtime.engine import Engine, RequestHandle
from runtime.loaders.checkpoint import open_checkpoint
from runtime.models.build import build_model
from runtime.models.decoder import Decoder
from runtime.models.scripted import ScriptedModel, script_of_request
from runtime.scheduler import Plan
from runtime.sequence import Sequence as Seq
from runtime.startup import make_engine
from runtime.step import StepKey
from runtime.tokenizer import Tokenizer

DATA = Path(__file__).resolve().parent.parent / "data"
MODELS = DATA / "models"


def tiny_tokenizer() -> Tokenizer:
    """The byte-level tokenizer of 512 ids that goes with the tiny models (whose tables have 520 rows)."""
    return Tokenizer.from_folder(DATA / "tiny_tokenizer")


def load_tiny(device: Device, name: str = "tiny", max_len: int = 256) -> Decoder:
    """One of the tiny models of tests/data/models on a device."""
    return build_model(open_checkpoint(MODELS / name, lambda text: None), device, max_len)


def engine_for(
    model: Any, device: Device, *, max_len: int = 256, start: bool = True, tokenizer: Tokenizer | None = None,
    thread: bool = True, eos_ids: Sequence[int] = (), **settings: Any,
) -> Engine:  # fmt: skip
    """An engine whose scheduler is checked after every step."""
    settings.setdefault("kv_blocks", 64)
    engine = make_engine(
        model, device, EngineConfig(model="test", **settings), max_len, tokenizer=tokenizer, eos_ids=eos_ids
    )
    engine.check_each_step = True
    if start:
        engine.start(thread=thread)
    return engine


def tiny_engine(name: str = "tiny", *, dtype: str = "float64", max_len: int = 256, **settings: Any) -> Engine:
    """A started engine with a tiny model and its tokenizer on the CPU."""
    device = CpuDevice(dtype)
    return engine_for(load_tiny(device, name, max_len), device, max_len=max_len, tokenizer=tiny_tokenizer(), **settings)


def scripted_engine(
    script: Callable[[Seq], Sequence[int]] = script_of_request,
    *,
    on_step: Callable[[Plan], None] | None = None,
    max_len: int = 256,
    device: Device | None = None,
    tokenizer: Tokenizer | None = None,
    **settings: Any,
) -> Engine:
    """A started engine that says what ``script`` tells, with the tiny tokenizer or another; its end is ``</s>``."""
    device = device or CpuDevice("float32")
    tokenizer = tokenizer or tiny_tokenizer()
    end = tokenizer.token_id("</s>")
    assert end is not None
    model = ScriptedModel(device, 520, end, script, on_step)
    return engine_for(model, device, max_len=max_len, tokenizer=tokenizer, **settings)


def drain(handle: RequestHandle, timeout: float = 30.0) -> list[Event]:
    """All events of a request."""
    events = []
    while not handle.done:
        event = handle.get(timeout)
        assert event is not None, "no event came in time"
        events.append(event)
    return events


def run_alone(engine: Engine, prompt: Sequence[int], **params: Any) -> list[int]:
    """Output tokens of one request."""
    handle = engine.submit(GenerationRequest(tuple(prompt), SamplingParams(**params)))
    return [token for event in drain(handle) for token in event.tokens]


class KVOracle:
    """Remembers for every slot which prefix its KV was computed for, and checks every step that reads it.

    Attach it before the first request. It also checks that slots written in a step are pairwise different and lie in
    blocks that nobody else holds.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._written: dict[int, int] = {}
        self._fill = engine._inputs.fill
        engine._inputs.fill = self.fill  # type: ignore[method-assign]
        self._salts: dict[Seq, str] = {}
        make_sequences = engine._make_sequences

        def remembering(handle: RequestHandle, request: GenerationRequest) -> None:
            make_sequences(handle, request)
            self._salts.update(dict.fromkeys(handle.sequences, request.cache_salt))

        engine._make_sequences = remembering  # type: ignore[method-assign]
        self.reads = 0

    def fill(self, plan: Plan, buffer: HostBuffer) -> StepKey:
        key = self._fill(plan, buffer)
        pool = self._engine.scheduler.pool
        size = pool.block_size
        slots = buffer.views["slots"]
        at = 0
        new: set[int] = set()
        todo: list[tuple[int, int]] = []
        for seq, start, count in zip(plan.seqs, plan.starts, plan.counts, strict=True):
            prefix = hash(self._salts[seq])  # what the request said, not what became of it
            tokens = (seq.tokens + seq.drafts)[: start + count]
            for position, token in enumerate(tokens):
                prefix = hash((prefix, token))
                slot = seq.blocks[position // size] * size + position % size
                if position < start:
                    self.reads += 1
                    assert self._written.get(slot) == prefix, f"slot {slot} does not hold position {position}"
                else:
                    assert slots[at + position - start] == slot
                    assert slot not in new, f"slot {slot} is written twice in a step"
                    assert pool.ref[slot // size] == 1, "a shared block is written"
                    assert slot // size >= pool.reserved
                    new.add(slot)
                    todo.append((slot, prefix))
            at += count
        self._written.update(todo)
        return key
