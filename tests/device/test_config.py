"""The real schemas: what is refused, what a profile sets, what is adjusted, and the committed example file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from device import toml
from device.config import DeviceConfig, parse_device
from device.errors import ConfigError
from device.schema import InvalidSetting, settings_of
from device.settings import format_config
from runtime.config import PROFILES, EngineConfig
from server.config import SCHEMAS, ServerConfig, example_config, is_loopback, load_config

EXAMPLE = Path(__file__).parents[2] / "scripts/jumar.example.toml"


def load(tmp: Path, env: dict[str, str] | None = None, **options: Any) -> Any:
    return load_config(options=options, environ=env or {}, cwd=tmp)


def test_defaults_stand(tmp_path: Path) -> None:
    resolved = load(tmp_path)
    assert resolved.of(DeviceConfig) == DeviceConfig()
    assert resolved.of(EngineConfig) == EngineConfig()
    assert resolved.of(ServerConfig) == ServerConfig()
    assert not resolved.adjustments
    assert {str(s) for s in resolved.sources.values()} == {"default"}


def test_every_setting_is_documented() -> None:
    for item in settings_of(*SCHEMAS):
        assert item.help.endswith(".") and len(item.help) > 20, item.name
        assert item.group, item.name
        assert item.default is None or item.check(item.default) == item.default, item.name


@pytest.mark.parametrize("name", PROFILES)
def test_profiles(tmp_path: Path, name: str) -> None:
    resolved = load(tmp_path, profile=name)
    assert resolved.of(EngineConfig).profile == name
    for key, value in PROFILES[name].items():
        assert resolved.values[key] == value and str(resolved.sources[key]) == f"profile {name}"
        assert value != EngineConfig.__dataclass_fields__[key].default or key in ("speculate", "draft_tokens")
    known = {s.name: s for s in settings_of(*SCHEMAS)}
    mine = "7" if known["max_queue"].kind == "int" else ""
    assert load(tmp_path, {"JUMAR_MAX_QUEUE": mine}, profile=name).values["max_queue"] == 7


def test_profiles_are_those_that_the_setting_offers() -> None:
    offered = next(s for s in settings_of(EngineConfig) if s.name == "profile").choices
    assert tuple(PROFILES) == offered


def test_budgets_grow_with_the_sequences_asked_for(tmp_path: Path) -> None:
    resolved = load(tmp_path, max_num_seqs="600")
    engine = resolved.of(EngineConfig)
    assert (engine.max_num_batched_tokens, engine.max_logit_rows) == (600, 600)
    assert [a.name for a in resolved.adjustments] == ["max_num_batched_tokens", "max_logit_rows"]
    engine = load(tmp_path, max_num_seqs="100", speculate="ngram", draft_tokens="7").of(EngineConfig)
    assert (engine.max_num_batched_tokens, engine.max_logit_rows, engine.rows_per_sequence) == (800, 800, 8)
    kept = load(tmp_path, max_num_seqs="600", max_num_batched_tokens="64", max_logit_rows="8")
    assert kept.of(EngineConfig).max_num_batched_tokens == 64 and not kept.adjustments


def test_zero_means(tmp_path: Path) -> None:
    engine = EngineConfig(max_num_seqs=8, max_num_batched_tokens=96)
    assert (engine.batch_limit, engine.prefill_chunk, engine.rows_per_sequence) == (8, 96, 1)
    engine = EngineConfig(max_num_seqs=8, max_batch=3, chunk_size=32)
    assert (engine.batch_limit, engine.prefill_chunk) == (3, 32)


def test_engine_settings_that_contradict(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ngram_min = 9 from command line --ngram-min; ngram_max = 4 from default"):
        load(tmp_path, ngram_min="9")
    with pytest.raises(InvalidSetting, match="more requests than max_num_seqs"):
        EngineConfig(max_batch=17)


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("auto", ("auto", 0)),
        ("cpu", ("cpu", 0)),
        ("cuda", ("cuda", 0)),
        ("cuda:3", ("cuda", 3)),
        ("ascend:15", ("ascend", 15)),
    ],
)
def test_device_names(text: str, parsed: tuple[str, int]) -> None:
    assert parse_device(text) == parsed
    assert DeviceConfig(device=text).device == text


@pytest.mark.parametrize(
    "text", ["", "gpu", "cpu:0", "cuda:", "cuda:-1", "cuda:a", "CUDA", "npu:0", "cuda:0,1", " cpu"]
)
def test_wrong_device_names(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="expected auto, cpu, cuda, cuda:N, ascend or ascend:N") as caught:
        load(tmp_path, {"JUMAR_DEVICE": text})
    assert "from environment JUMAR_DEVICE" in str(caught.value)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "myserver", "10.0.0.1"])
def test_an_open_address_wants_a_key_or_a_word(tmp_path: Path, host: str) -> None:
    with pytest.raises(ConfigError, match="JUMAR_API_KEY") as caught:
        load(tmp_path, host=host)
    assert "from command line --host" in str(caught.value)
    assert load(tmp_path, {"JUMAR_API_KEY": "abc"}, host=host).of(ServerConfig).api_key == "abc"
    assert load(tmp_path, host=host, no_api_key=True).of(ServerConfig).no_api_key


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "[::1]", "localhost", "LOCALHOST"])
def test_loopback_wants_none(host: str) -> None:
    assert is_loopback(host)
    assert ServerConfig(host=host).api_key is None


def test_keys_that_are_none(tmp_path: Path) -> None:
    """An empty one is a variable that somebody forgot to fill: no lock where one was wanted. A key of spaces would
    lock everybody out."""
    for host in ("127.0.0.1", "0.0.0.0"):
        with pytest.raises(ConfigError, match="environment JUMAR_API_KEY='': it is empty"):
            load(tmp_path, {"JUMAR_API_KEY": ""}, host=host)
        with pytest.raises(ConfigError, match="command line --api-key '': it is empty"):
            load(tmp_path, api_key="", host=host)
    for key in (" ", "abc ", "schlüssel", ""):
        with pytest.raises(InvalidSetting, match="ASCII") as caught:
            ServerConfig(api_key=key)
        assert not key.strip() or key not in str(caught.value)
    with pytest.raises(InvalidSetting, match="only one of the two"):
        ServerConfig(api_key="abc", no_api_key=True)


def test_contradicting_keys_stay_masked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, {"JUMAR_API_KEY": "topsecret"}, no_api_key=True)
    assert "topsecret" not in str(caught.value) and "api_key = '********' from environment" in str(caught.value)


def test_the_committed_example_is_the_generated_one(tmp_path: Path) -> None:
    text = EXAMPLE.read_text(encoding="utf-8")
    assert text == example_config(), "run: python -m server.config > scripts/jumar.example.toml"
    assert toml.loads(text) == {}
    live = re.sub(r"^#(\w+ = )", r"\1", text, flags=re.M)
    document = toml.loads(live)
    for item in settings_of(*SCHEMAS):
        if item.default is not None:
            assert item.check(document.pop(item.name)) == item.default
    assert set(document) == {"profile", "api_key"}


def test_print_config_reads_back(tmp_path: Path) -> None:
    resolved = load(tmp_path, profile="latency", drain_timeout="1m")
    (tmp_path / "jumar.toml").write_text(format_config(resolved))
    assert load(tmp_path).values == resolved.values
