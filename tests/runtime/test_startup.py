"""From settings to an engine: how the KV pool is sized, what is said about it, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from device.config import DeviceConfig
from device.contract import KVLayerSpec, KVSpec, MemoryInfo
from device.cpu import CpuDevice
from device.errors import ConfigError, DeviceError, LoadError
from device.probe import Survey, select
from device.schema import settings_of
from runtime import Engine, startup
from runtime.config import EngineConfig
from runtime.scheduler import Limits
from runtime.startup import Ledger, build_engine, load_engine, make_engine, size_pool, step_workspace
from tests.device.fake_machine import machine
from tests.support.engines import DATA, MODELS, load_tiny

MIB = 1 << 20
SPEC = KVSpec((KVLayerSpec(2, 64), KVLayerSpec(2, 64)), "float32")
BLOCK = 16 * 2 * 2 * 2 * 64 * 4  # 16 tokens, K and V, two layers, two heads of 64, four bytes: 32 KiB
VOCAB = 1000


class Pretended(CpuDevice):
    """A device with so much memory, of another kind if wanted."""

    def __init__(self, free: int, **caps: Any) -> None:
        super().__init__()
        self.caps = replace(self.caps, **caps)
        self._free = free

    def memory(self) -> MemoryInfo:
        return MemoryInfo(2 * self._free, self._free, "a test")


def size(
    free: int, max_len: int = 256, *, explicit: bool = False, caps: dict[str, Any] | None = None, **settings: Any
) -> tuple[Ledger, Limits]:
    ledger = Ledger(free, "a test")
    device = Pretended(free, **(caps or {}))
    limits = size_pool(
        device, EngineConfig(model="m", **settings), SPEC, VOCAB, max_len, explicit=explicit, ledger=ledger
    )
    device.close()
    return ledger, limits


# ---------------------------------------------------------------- the pool


def test_a_card_gives_its_share_of_what_a_step_leaves_free() -> None:
    free = 200 * MIB
    ledger, _ = size(free, 1024, caps={"kind": "cuda", "reserved_blocks": 3}, kv_share=0.25, max_num_seqs=64)
    workspace = step_workspace(256, VOCAB, 256)
    assert ledger.workspace == workspace == 4 * 256 * 1000 * 4 + 24 * 256
    assert ledger.block_bytes == BLOCK and ledger.block_size == 16 and ledger.reserved == 3
    assert ledger.blocks == int((free - workspace) * 0.25) // BLOCK  # the reserved ones are part of the share
    assert ledger.tokens == (ledger.blocks - 3) * 16


@pytest.mark.parametrize(("share", "used"), [(0.9, 0.5), (0.5, 0.5), (0.1, 0.1)])
def test_a_host_keeps_half_for_itself(share: float, used: float) -> None:
    free = 100 * MIB
    ledger, _ = size(free, 4096, kv_share=share, max_num_seqs=64)
    assert ledger.blocks == int((free - ledger.workspace) * used) // BLOCK


def test_the_pool_is_no_larger_than_can_ever_be_used() -> None:
    ledger, limits = size(4096 * MIB, 100, max_num_seqs=3)
    assert ledger.blocks - ledger.reserved == 3 * 7 and limits.max_len == 100 and not ledger.notes


def test_a_number_of_blocks_may_be_set() -> None:
    ledger, _ = size(4096 * MIB, 100, kv_blocks=17)
    assert ledger.blocks == 17 + ledger.reserved


def test_block_size_and_reserved_blocks_are_the_device_s_matter() -> None:
    ledger, _ = size(4096 * MIB, 100, kv_blocks=17, block_size=32, caps={"reserved_blocks": 2})
    assert (ledger.block_size, ledger.block_bytes, ledger.blocks) == (32, 2 * BLOCK, 19)
    with pytest.raises(ConfigError, match="block_size 24 is not possible"):
        size(MIB, block_size=24, caps={"any_block_size": False})


def test_a_pool_too_small_for_one_sequence_lowers_its_length_and_says_so() -> None:
    ledger, limits = size(4096 * MIB, 300, kv_blocks=10)
    assert limits.max_len == ledger.max_model_len == 160
    assert any("max_model_len lowered from 300 to 160" in line for line in ledger.lines())


def test_a_length_that_was_asked_for_is_never_lowered() -> None:
    with pytest.raises(ConfigError, match=r"max_model_len 300 needs 19 blocks of 16 tokens, the pool has 10: .*160"):
        size(4096 * MIB, 300, kv_blocks=10, explicit=True)
    ledger, limits = size(4096 * MIB, 160, kv_blocks=10, explicit=True)
    assert limits.max_len == 160 and not ledger.notes
    assert size(4096 * MIB, 145, kv_blocks=10, explicit=True)[1].max_len == 145


def test_no_memory_at_all_is_an_error_that_says_what_a_block_takes() -> None:
    with pytest.raises(ConfigError, match=r"a block takes 0\.03 MiB; 4 MiB are free \(a test\)"):
        size(4 * MIB, caps={"kind": "cuda"}, kv_share=0.01, max_logit_rows=64)
    with pytest.raises(ConfigError, match="take a block_size below 4096"):
        size(4 * MIB, block_size=4096, max_logit_rows=64)


@pytest.mark.parametrize("blocks", [3200, 10**11, 1 << 70])
@pytest.mark.parametrize("caps", [{}, {"kind": "cuda", "kv_share_limit": 1.0, "reserved_blocks": 3}])
def test_blocks_that_were_asked_for_must_fit_into_what_is_free(blocks: int, caps: dict[str, Any]) -> None:
    most = (100 * MIB - step_workspace(256, VOCAB, 512)) // BLOCK - caps.get("reserved_blocks", 1)
    with pytest.raises(ConfigError, match=rf"kv_blocks {blocks} takes {blocks // 32} MiB; 100 MiB are free") as caught:
        size(100 * MIB, kv_blocks=blocks, caps=caps)
    assert f"at most {most}," in str(caught.value)
    assert size(100 * MIB, kv_blocks=most, caps=caps)[0].tokens == most * 16


@pytest.mark.parametrize(
    ("name", "value", "others"),
    [
        ("max_logit_rows", 100_000_000, {}),
        ("max_num_batched_tokens", 10**12, {}),
        ("max_num_seqs", 65536, {}),
        ("max_num_seqs", 65536, {"max_logit_rows": 65536, "max_num_batched_tokens": 65536}),  # as resolving raises them
        ("max_num_seqs", 65536, {"max_logit_rows": 5 * 65536, "speculate": "ngram", "draft_tokens": 4}),
        ("max_num_seqs", 65536, {"kv_blocks": 10}),
    ],
)
def test_a_step_that_takes_the_memory_names_the_setting_to_lower(name: str, value: int, others: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError, match=f"{name} {value} makes the step workspace .* MiB; 100 MiB are free"
    ) as caught:
        size(100 * MIB, **{name: value, **others})
    most = int(str(caught.value).rpartition(" ")[2])
    others = {k: v for k, v in others.items() if not k.startswith("max_")}
    assert size(100 * MIB, **{name: most, **others})[1].max_len > 0


def test_the_ledger_says_where_the_memory_goes() -> None:
    ledger = Ledger(
        512 * MIB, "the kernel", weights=100 * MIB, workspace=8 * MIB, block_bytes=MIB, blocks=41, reserved=1
    )
    ledger.block_size, ledger.max_model_len = 16, 200
    assert [" ".join(line.split()) for line in ledger.lines()] == [
        "free before loading 512.0 MiB (the kernel)",
        "weights 100.0 MiB",
        "step workspace 8.0 MiB (at most)",
        "KV pool 41.0 MiB: 40 blocks of 16 tokens = 640 tokens, 3 sequence(s) of 200",
    ]


# ---------------------------------------------------------------- limits


def test_limits_are_the_settings() -> None:
    ledger, limits = size(
        4096 * MIB, 200, max_num_seqs=6, max_num_batched_tokens=50, max_logit_rows=9, chunk_size=20,
        batching="dynamic", max_batch=4, max_wait_ms=25.0, prefix_cache=False,
    )  # fmt: skip
    assert limits == Limits(6, 50, 9, 200, 20, "dynamic", 4, 0.025, False, True)
    assert not ledger.notes
    assert size(4096 * MIB, 200, max_num_batched_tokens=50)[1].chunk == 50
    assert size(4096 * MIB, 200, max_num_seqs=6)[1].max_batch == 6


def test_budgets_below_one_token_a_sequence_are_raised_and_it_is_said() -> None:
    ledger, limits = size(4096 * MIB, 200, max_num_seqs=6, max_num_batched_tokens=3, max_logit_rows=2)
    assert (limits.max_tokens, limits.max_rows) == (6, 6)
    text = "\n".join(ledger.lines())
    assert "max_num_batched_tokens raised from 3 to 6" in text and "max_logit_rows raised from 2 to 6" in text


def test_whole_prompts_need_a_budget_for_the_longest_beside_all_decodes() -> None:
    ledger, limits = size(
        4096 * MIB,
        200,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        chunked_prefill=False,
        speculate="ngram",
        draft_tokens=3,
    )
    assert limits.max_tokens == limits.chunk == 200 + 4 * 4 and not limits.chunked_prefill
    assert "max_num_batched_tokens raised from 64 to 216" in "\n".join(ledger.lines())
    assert size(4096 * MIB, 200, max_num_batched_tokens=5000, chunked_prefill=False)[1].max_tokens == 5000


def test_a_device_may_take_fewer_sequences_in_a_step() -> None:
    assert size(4096 * MIB, max_num_seqs=16, caps={"max_seqs": 5})[1].max_seqs == 5
    assert size(4096 * MIB, max_num_seqs=3, caps={"max_seqs": 5})[1].max_seqs == 3


def test_a_kv_dtype_the_device_does_not_have_is_refused() -> None:
    device = CpuDevice()
    config = EngineConfig(model="m", kv_dtype="bfloat16")
    with pytest.raises(ConfigError, match=r"kv_dtype 'bfloat16' is not possible on cpu .*float32, float64, int8"):
        make_engine(load_tiny(device), device, config, 64)
    device.close()


# ---------------------------------------------------------------- the whole way


TINY = {"model": str(MODELS / "tiny"), "tokenizer": str(DATA / "tiny_tokenizer")}


@pytest.fixture
def closing() -> Iterator[list[Engine]]:
    engines: list[Engine] = []
    yield engines
    for engine in engines:
        engine.shutdown()


def built(closing: list[Engine], device: DeviceConfig | None = None, **settings: Any) -> tuple[Engine, str]:
    said: list[str] = []
    device = device or DeviceConfig(device="cpu")
    engine = build_engine(device, EngineConfig(**{**TINY, **settings}), said.append)
    closing.append(engine)
    return engine, "\n".join(said)


def test_start_up_says_what_was_chosen_and_why(closing: list[Engine], monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setattr(startup, "select", lambda config: select(config, Survey(machine(tmp_path))))
    engine, said = built(closing, DeviceConfig(device="auto"), max_num_seqs=2, max_model_len=128)
    assert said.startswith("device: cpu")
    for line in (
        "ascend",
        "cuda",
        "ops by",
        "free before loading",
        "weights",
        "step workspace",
        "KV pool",
        "loaded tiny in",
    ):
        assert line in said, said
    assert "16 blocks of 16 tokens = 256 tokens, 2 sequence(s) of 128" in said
    assert engine.state == "new" and engine.max_model_len == 128 and engine.model_id == "tiny"


def test_the_table_of_ops_is_complete_and_its_lines_are_short(closing: list[Engine]) -> None:
    engine, said = built(closing)
    start = said.index("ops by ")
    table = said[start : said.index("free before loading")]
    assert max(map(len, table.splitlines())) <= 100
    words = set(table.replace(",", " ").split())
    assert words >= {op for op, _, _ in engine.device.report.ops}


def test_a_named_device_is_never_replaced(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setattr(startup, "select", lambda config: select(config, Survey(machine(tmp_path))))
    with pytest.raises(DeviceError, match="device cuda was asked for and cannot be used"):
        build_engine(DeviceConfig(device="cuda"), EngineConfig(**TINY))


def test_progress_goes_to_its_end(closing: list[Engine]) -> None:
    seen: list[tuple[int, int]] = []
    engine = build_engine(DeviceConfig(device="cpu"), EngineConfig(**TINY), progress=lambda *at: seen.append(at))
    closing.append(engine)
    done, totals = zip(*seen, strict=True)
    assert list(done) == sorted(done) and len(set(totals)) == 1 and done[-1] == totals[0] == len(seen)


def test_the_longest_sequence_is_the_model_s_own_unless_said_otherwise(closing: list[Engine]) -> None:
    assert built(closing)[0].max_model_len == 2048
    engine, said = built(closing, max_model_len=4096)
    assert engine.max_model_len == 4096 and "max_model_len 4096 is above the 2048 that the model was made for" in said
    engine, said = built(closing, kv_blocks=4)
    assert engine.max_model_len == 64 and "max_model_len lowered from 2048 to 64" in said
    with pytest.raises(ConfigError, match="max_model_len 128 needs 8 blocks"):
        built(closing, kv_blocks=4, max_model_len=128)


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which nothing as large as the tests below ask for can be built by accident."""
    monkeypatch.setattr(CpuDevice, "memory", lambda self: MemoryInfo(128 * MIB, 64 * MIB, "a test"))


@pytest.mark.parametrize("claimed", [10**8, 0xFFFFFFFF, 1 << 53])
@pytest.mark.usefixtures("little_memory")
def test_a_model_that_claims_an_endless_context_gets_what_fits(
    closing: list[Engine], tmp_path: Path, claimed: int
) -> None:
    folder = shutil.copytree(MODELS / "tiny", tmp_path / "tiny")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": claimed}))
    engine, said = built(closing, model=str(folder))
    assert 256 < engine.max_model_len < 10**6
    assert f"max_model_len lowered from {claimed} to {engine.max_model_len}: " in said


@pytest.mark.parametrize("value", [10**8, 10**11, 1 << 63, 10**100])
@pytest.mark.parametrize("name", [s.name for s in settings_of(EngineConfig) if s.kind == "int" and s.maximum is None])
@pytest.mark.usefixtures("little_memory")
def test_no_number_however_large_ends_otherwise_than_typed(closing: list[Engine], name: str, value: int) -> None:
    """Each either runs (a bound that nothing is built by) or is refused before the weights are read, by its name."""
    read: list[Any] = []
    try:
        config = EngineConfig(**{**TINY, name: value})
        closing.append(build_engine(DeviceConfig(device="cpu"), config, progress=lambda *at: read.append(at)))
    except ConfigError as error:
        assert (name in str(error) or name in getattr(error, "names", ())) and not read
    else:
        assert name == "chunk_size"


def test_ids_and_ends_are_those_of_tokenizer_and_checkpoint_together(closing: list[Engine]) -> None:
    engine, _ = built(closing)
    assert engine.vocab_size == 512 and engine.model.vocab_size == 520
    assert engine.tokenizer is not None
    assert engine.eos_ids == {1, *engine.tokenizer.eos_ids} and len(engine.eos_ids) > 1


def test_the_tokenizer_may_be_named_by_its_file(closing: list[Engine]) -> None:
    engine, _ = built(closing, tokenizer=str(DATA / "tiny_tokenizer" / "tokenizer.json"))
    assert engine.tokenizer is not None and engine.vocab_size == 512


@pytest.mark.parametrize("template", ["{% for %}", "{{ x | no_such_filter }}", None])
def test_a_model_without_a_usable_chat_template_starts_and_says_so(
    closing: list[Engine], tmp_path: Path, template: str | None
) -> None:
    folder = shutil.copytree(DATA / "tiny_tokenizer", tmp_path / "tokenizer")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    _, said = built(closing, tokenizer=str(folder))
    assert "warning: chat is not available: " in said and "chat template" in said
    assert "chat is not available" not in built(closing)[1]


def test_a_folder_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(LoadError, match=r"tokenizer\.json is missing"):
        build_engine(DeviceConfig(device="cpu"), EngineConfig(model=TINY["model"]))


def test_no_model_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no model given"):
        build_engine(DeviceConfig(), EngineConfig())


# ---------------------------------------------------------------- from Python


def test_load_takes_settings_by_name_and_nothing_from_outside(
    closing: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUMAR_MAX_NUM_SEQS", "99")
    engine = load_engine(**TINY, device="cpu", block_size=32, max_model_len=64)
    closing.append(engine)
    assert engine.state == "ready" and engine.scheduler.pool.block_size == 32
    assert engine.config.max_num_seqs == 16


def test_load_refuses_an_unknown_name() -> None:
    with pytest.raises(ConfigError, match="max_seqz"):
        load_engine(**TINY, device="cpu", max_seqz=3)


def test_load_knows_what_was_asked_for(closing: list[Engine]) -> None:
    with pytest.raises(ConfigError, match="needs 8 blocks"):
        load_engine(**TINY, device="cpu", max_model_len=128, kv_blocks=4)
    engine = load_engine(**TINY, device="cpu", kv_blocks=4)
    closing.append(engine)
    assert engine.max_model_len == 64


def test_a_profile_yields_to_what_is_set(closing: list[Engine]) -> None:
    engine = load_engine(**TINY, device="cpu", profile="edge", max_num_seqs=5, max_model_len=64)
    closing.append(engine)
    assert engine.config.max_num_seqs == 5 and engine.config.max_queue == 8
