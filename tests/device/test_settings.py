"""The layered loader, on a schema of its own: precedence, strictness, what its errors say, and what it writes."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from device import toml
from device.errors import ConfigError
from device.schema import InvalidSetting, setting, settings_of, validate
from device.settings import Adjustment, Resolved, example_toml, format_config, resolve


@dataclass(frozen=True, slots=True)
class Net:
    host: str = setting("localhost", "Where to listen.", group="net")
    port: int = setting(80, "Port.", group="net", minimum=1, maximum=65535)
    key: str | None = setting(None, "Key.", group="net", secret=True)
    names: tuple[str, ...] = setting((), "Names.", group="net")
    limit: int = setting(1 << 20, "Largest body.", group="net", unit="bytes", kind="size")

    def __post_init__(self) -> None:
        validate(self)


@dataclass(frozen=True, slots=True)
class Work:
    profile: Literal["big", "small"] | None = setting(None, "Profile.", group="work")
    mode: Literal["fast", "slow"] = setting("fast", "Mode.", group="work")
    low: int = setting(1, "Least.", group="work")
    high: int = setting(9, "Most.", group="work")
    share: float = setting(0.5, "Share.", group="work", minimum=0.0, maximum=1.0)
    wait: float = setting(2.0, "Wait.", group="work", unit="seconds", kind="duration")
    strict: bool = setting(False, "Strict.", group="work")
    rows: int = setting(4, "Rows.", group="work")

    def __post_init__(self) -> None:
        validate(self)

    def problems(self) -> Iterator[tuple[list[str], str]]:
        if self.low > self.high:
            yield ["low", "high"], "low is above high"

    @classmethod
    def adjustments(cls, values: Mapping[str, Any], explicit: Callable[[str], bool]) -> Iterator[Adjustment]:
        if values["rows"] < values["high"] and not explicit("rows") and explicit("high"):
            yield Adjustment("rows", values["rows"], values["high"], "rows follow high")


PROFILES = {"big": {"high": 100, "mode": "slow"}, "small": {"high": 2}}


def load(tmp: Path, text: str | None = None, env: Mapping[str, str] | None = None, **options: Any) -> Resolved:
    if text is not None:
        (tmp / "jumar.toml").write_text(text)
    return resolve((Net, Work), profiles=PROFILES, environ=env or {}, options=options, cwd=tmp)


def error(tmp: Path, text: str | None = None, env: Mapping[str, str] | None = None, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load(tmp, text, env, **options)
    return str(caught.value)


# ---------------------------------------------------------------- precedence


@given(st.sets(st.sampled_from(["profile", "file", "environment", "command line"])))
def test_the_later_source_wins(tmp_path_factory: pytest.TempPathFactory, given_in: set[str]) -> None:
    """Whatever subset of the sources sets a value, the last of them in the documented order holds."""
    tmp = tmp_path_factory.mktemp("layers")
    order = ["default", "profile", "file", "environment", "command line"]
    value = {"default": 9, "profile": 100, "file": 11, "environment": 12, "command line": 13}
    options: dict[str, Any] = {"profile": "big"} if "profile" in given_in else {}
    if "command line" in given_in:
        options["high"] = "13"
    resolved = load(
        tmp,
        "high = 11" if "file" in given_in else "",
        {"JUMAR_HIGH": "12"} if "environment" in given_in else {},
        **options,
    )
    winner = [s for s in order if s == "default" or s in given_in][-1]
    assert resolved.values["high"] == value[winner] == resolved.of(Work).high
    assert resolved.sources["high"].layer == winner
    assert resolved.explicit("high") == (winner in order[2:])


@given(st.data())
def test_every_setting_comes_from_its_last_source(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """All settings at once, each from an arbitrary subset of file, environment and command line."""
    tmp = tmp_path_factory.mktemp("layers")
    word = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)
    strategies: dict[str, st.SearchStrategy[Any]] = {
        "host": word,
        "port": st.integers(1, 65535),
        "key": word.filter(bool),
        "limit": st.integers(0, 1 << 50),
        "mode": st.sampled_from(["fast", "slow"]),
        "share": st.floats(0, 1),
        "wait": st.floats(0, 1e9),
        "strict": st.booleans(),
        "rows": st.integers(),
    }
    lines, env, options = [], {}, {}
    expected: dict[str, Any] = {}
    for item in settings_of(Net, Work):
        if item.name not in strategies:
            continue
        for layer in ("file", "environment", "command line"):
            if not data.draw(st.booleans()):
                continue
            expected[item.name] = value = data.draw(strategies[item.name])
            if layer == "file":
                lines.append(f"{item.name} = {item.toml(value)}")
            elif layer == "environment":
                env[item.env] = value if isinstance(value, str) else item.toml(value).strip('"')
            else:
                options[item.name] = value
    (tmp / "jumar.toml").write_text("\n".join(lines), encoding="utf-8")
    resolved = resolve((Net, Work), environ=env, options=options, cwd=tmp)
    for item in settings_of(Net, Work):
        assert resolved.values[item.name] == expected.get(item.name, item.default), item.name


def test_a_profile_yields_to_everything_set(tmp_path: Path) -> None:
    work = load(tmp_path, 'profile = "big"\nmode = "fast"').of(Work)
    assert (work.profile, work.mode, work.high) == ("big", "fast", 100)
    work = load(tmp_path, 'profile = "big"', {"JUMAR_PROFILE": "small"}).of(Work)
    assert (work.profile, work.mode, work.high) == ("small", "fast", 2)
    work = load(tmp_path, 'profile = "big"', {"JUMAR_PROFILE": ""}).of(Work)
    assert (work.profile, work.high) == (None, 9)


def test_which_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "other.toml").write_text("port = 81")
    assert load(tmp_path).of(Net).port == 80
    assert load(tmp_path, "port = 82").of(Net).port == 82
    assert load(tmp_path, env={"JUMAR_CONFIG": "other.toml"}).of(Net).port == 81
    both = resolve((Net,), config_file="other.toml", environ={"JUMAR_CONFIG": "jumar.toml"}, cwd=tmp_path)
    assert both.of(Net).port == 81
    assert str(both.sources["port"]) == "other.toml line 1"
    with pytest.raises(ConfigError, match=r"missing\.toml: .* cannot be read: No such file"):
        resolve((Net,), config_file="missing.toml", environ={}, cwd=tmp_path)


@pytest.mark.parametrize("kind", ["folder", "link to nothing", "link to itself", "link to a folder", "pipe"])
def test_whatever_has_the_name_of_the_file_is_never_passed_over(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "jumar.toml"
    if kind == "folder":
        file.mkdir()
    elif kind == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to({"link to nothing": "gone.toml", "link to itself": "jumar.toml"}.get(kind, "."))
    said = error(tmp_path)
    assert said.startswith("jumar.toml: the configuration file cannot be read: ")
    assert ("gone.toml" in said) == (kind == "link to nothing")
    with pytest.raises(ConfigError, match="--config '': it is empty"):
        resolve((Net,), config_file="", environ={}, cwd=tmp_path)


def test_a_file_from_a_windows_editor(tmp_path: Path) -> None:
    (tmp_path / "jumar.toml").write_bytes(b'\xef\xbb\xbfport = 83\r\nhost = "h"\r\n')
    assert load(tmp_path).of(Net) == Net(port=83, host="h")


# ---------------------------------------------------------------- strictness


def test_unknown_names_are_errors_that_say_where_and_suggest(tmp_path: Path) -> None:
    said = error(tmp_path, 'host = "a"\n\nprot = 1')
    assert said.startswith("jumar.toml line 3: unknown setting 'prot'; did you mean port?")
    assert "did you mean JUMAR_PORT" in error(tmp_path, "", {"JUMAR_PROT": "1"})
    said = error(tmp_path, "", {"JUMAR_NOTHINGLIKEIT": ""})
    assert said == "environment JUMAR_NOTHINGLIKEIT: there is no such setting"
    assert "JUMAR_PORT" in error(tmp_path, "", {"jumar_port": "1"})
    assert error(tmp_path, "", prot="1").startswith("command line: unknown setting 'prot'; did you mean port?")
    assert "[net] is a table" in error(tmp_path, "[net]\nport = 1")
    assert "line 1: [a] is a table" in error(tmp_path, "a.b = 1")
    (tmp_path / "jumar.toml").unlink()
    others = {"JUMARX": "1", "PATH": "/bin", "JUMAR": "x", "JUMAR_PYTHON": "python3.11", "JUMAR_TEST_LONG": "1"}
    assert load(tmp_path, env=others).of(Net) == Net()


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("port", "abc", "expected an integer from 1 to 65535"),
        ("port", "80.0", "expected an integer from 1 to 65535"),
        ("port", "0", "expected an integer from 1 to 65535"),
        ("port", "", "expected an integer from 1 to 65535"),
        ("share", "nan", "expected a number from 0 to 1"),
        ("share", "1e999", "expected a number from 0 to 1"),
        ("share", "1.01", "expected a number from 0 to 1"),
        ("strict", "maybe", "expected true or false"),
        ("strict", "", "expected true or false"),
        ("mode", "Fast", "expected one of fast, slow"),
        ("limit", "4G", "expected a size such as 512MB, 4GiB or a number of bytes"),
        ("limit", "-1", "expected a size such as 512MB, 4GiB or a number of bytes"),
        ("wait", "5 weeks", "expected a time such as 500ms, 30s, 5m or a number of seconds"),
        ("wait", "9" * 400, "expected a time such as 500ms, 30s, 5m or a number of seconds"),
        ("host", "a\udcff", "expected a string"),
    ],
)
def test_unparsable_values_name_their_source(tmp_path: Path, name: str, value: str, expected: str) -> None:
    env = f"JUMAR_{name.upper()}"
    assert error(tmp_path, env={env: value}) == f"environment {env}={value!r}: {expected}"
    assert error(tmp_path, **{name: value}) == f"command line --{name} {value!r}: {expected}"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('port = "80"', "port = '80': expected an integer from 1 to 65535"),
        ("port = true", "port = True: expected an integer from 1 to 65535"),
        ("port = 80.0", "port = 80.0: expected an integer from 1 to 65535"),
        ("strict = 1", "strict = 1: expected true or false"),
        ("share = inf", "share = inf: expected a number from 0 to 1"),
        ("host = 1", "host = 1: expected a string"),
        ('names = "a"', "names = 'a': expected a list of strings"),
        ("names = [1]", "names = [1]: expected a list of strings"),
        ("limit = 1.5", "limit = 1.5: expected a size"),
        ("share = " + "9" * 400, "expected a number from 0 to 1"),
        ("wait = 2026-01-01", "expected a time"),
        ("[mode]", "mode = {}: expected one of fast, slow"),
    ],
)
def test_the_file_is_typed(tmp_path: Path, line: str, expected: str) -> None:
    said = error(tmp_path, f"# first\n{line}\n")
    assert said.startswith("jumar.toml line 2: ") and expected in said


def test_broken_files(tmp_path: Path) -> None:
    assert error(tmp_path, "port = ").startswith("jumar.toml: not valid TOML: ")
    assert "not valid TOML" in error(tmp_path, "port = 1\nport = 2")
    assert "line 2" in error(tmp_path, "port = 1\nhost = oops\n")
    (tmp_path / "jumar.toml").write_bytes(b'host = "\xff"')
    assert "not UTF-8" in error(tmp_path)


def test_values_that_do_not_go_together_name_both_sources(tmp_path: Path) -> None:
    said = error(tmp_path, "low = 5", {"JUMAR_HIGH": "3"})
    assert said == "low is above high (low = 5 from jumar.toml line 1; high = 3 from environment JUMAR_HIGH)"
    assert "high = 2 from profile small" in error(tmp_path, "low = 5", profile="small")


def test_a_service_in_kubernetes_that_is_called_jumar(tmp_path: Path) -> None:
    """Kubernetes sets NAME_PORT=tcp://... and more for every service; the error says so."""
    for env in ({"JUMAR_PORT": "tcp://10.0.0.1:80"}, {"JUMAR_SERVICE_HOST": "10.0.0.1"}, {"JUMAR_PORT_80_TCP": "x"}):
        assert "enableServiceLinks" in error(tmp_path, env=env)


def test_an_empty_secret_is_a_mistake_and_not_none(tmp_path: Path) -> None:
    assert error(tmp_path, env={"JUMAR_KEY": ""}).startswith("environment JUMAR_KEY='': it is empty; leave it out")
    assert error(tmp_path, "", {"JUMAR_KEY": "k"}, key="").startswith("command line --key '': it is empty")
    assert load(tmp_path).of(Net).key is None


def test_secrets_are_never_shown(tmp_path: Path) -> None:
    said = error(tmp_path, env={"JUMAR_KEY": "s3cret\udcff"}) + error(tmp_path, "key = 12345")
    assert "s3cret" not in said and "12345" not in said and said.count("********") == 2
    with pytest.raises(InvalidSetting) as caught:
        Net(key=12345)  # type: ignore[arg-type]
    assert "12345" not in str(caught.value)
    shown = format_config(load(tmp_path, "", {"JUMAR_KEY": "s3cret"}))
    assert "s3cret" not in shown and '# key = "********"' in shown


# ---------------------------------------------------------------- types


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("4096", 4096),
        ("1KB", 1000),
        ("1 KiB", 1024),
        ("4GiB", 4 << 30),
        ("1.5gib", 3 << 29),
        ("2TB", 2 * 10**12),
    ],
)
def test_sizes(tmp_path: Path, text: str, value: int) -> None:
    assert load(tmp_path, f'limit = "{text}"').of(Net).limit == value
    assert load(tmp_path, "", {"JUMAR_LIMIT": text}).of(Net).limit == value


@pytest.mark.parametrize(("text", "value"), [("0", 0), ("500ms", 0.5), ("1.5s", 1.5), ("2m", 120), ("1h", 3600)])
def test_durations(tmp_path: Path, text: str, value: float) -> None:
    assert load(tmp_path, wait=text).of(Work).wait == pytest.approx(value)


def test_lists_optionals_and_bools(tmp_path: Path) -> None:
    assert load(tmp_path, 'names = ["a", "b,c"]').of(Net).names == ("a", "b,c")
    assert load(tmp_path, "", {"JUMAR_NAMES": " a, b ,"}).of(Net).names == ("a", "b")
    assert load(tmp_path, "", names=("x",)).of(Net).names == ("x",)
    assert load(tmp_path, 'profile = "big"', {"JUMAR_PROFILE": ""}).of(Work).profile is None
    assert load(tmp_path, "", {"JUMAR_HOST": ""}).of(Net).host == ""
    for word in ("TRUE", "1", "yes", "on"):
        assert load(tmp_path, "", {"JUMAR_STRICT": word}).of(Work).strict is True
    assert load(tmp_path, "strict = true", strict="off").of(Work).strict is False
    assert load(tmp_path, "share = 1").of(Work).share == 1.0


def test_configs_check_themselves_without_the_loader() -> None:
    with pytest.raises(InvalidSetting, match="port = 0: expected an integer from 1 to 65535"):
        Net(port=0)
    with pytest.raises(InvalidSetting, match="low is above high") as caught:
        Work(low=10)
    assert caught.value.names == ("low", "high")
    assert Net(limit="2KiB").limit == 2048  # type: ignore[arg-type]
    assert isinstance(Work(share=1).share, float)


def test_wrong_schemas_are_refused() -> None:
    @dataclass
    class Bare:
        port: int = 1

    with pytest.raises(TypeError, match="not made with setting"):
        settings_of(Bare)
    with pytest.raises(TypeError, match="is in Net and in Net"):
        settings_of(Net, Net)

    @dataclass
    class Odd:
        table: dict[str, int] = setting(None, "Table.", group="g")

    with pytest.raises(TypeError, match="cannot have the type"):
        settings_of(Odd)


def test_the_schema_is_enough_for_a_command_line() -> None:
    items = {s.name: s for s in settings_of(Net, Work)}
    mode, profile, limit = items["mode"], items["profile"], items["limit"]
    assert (mode.option, mode.env, mode.kind, mode.default, mode.choices, mode.help, mode.group) == (
        "--mode", "JUMAR_MODE", "str", "fast", ("fast", "slow"), "Mode.", "work",
    )  # fmt: skip
    assert profile.optional and profile.choices == ("big", "small")
    assert (limit.kind, limit.unit, limit.schema) == ("size", "bytes", Net)


# ---------------------------------------------------------------- adjustments and text


def test_adjustments_change_defaults_only(tmp_path: Path) -> None:
    resolved = load(tmp_path, "high = 50")
    assert resolved.of(Work).rows == 50
    assert resolved.adjustments == (Adjustment("rows", 4, 50, "rows follow high"),)
    assert not resolved.explicit("rows")
    assert "# rows: 4 -> 50 (rows follow high)" in format_config(resolved)
    kept = load(tmp_path, "high = 50\nrows = 4")
    assert kept.of(Work).rows == 4 and not kept.adjustments


def test_print_config_can_be_pasted(tmp_path: Path) -> None:
    resolved = load(tmp_path, 'host = "a # \\"b\\"\\u007f"\nlimit = "3GiB"', {"JUMAR_NAMES": "x,y"}, share="0.25")
    text = format_config(resolved)
    assert re.search(r"^port = 80 +# default$", text, re.M)
    assert re.search(r'^limit = "3GiB" +# jumar.toml line 2$', text, re.M)
    assert re.search(r"^share = 0.25 +# command line --share$", text, re.M)
    assert re.search(r"^# profile = \(not set\) +# default$", text, re.M)
    (tmp_path / "pasted").mkdir()
    again = load(tmp_path / "pasted", text)
    assert again.values == resolved.values


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_string_survives_toml(text: str) -> None:
    item = next(s for s in settings_of(Net) if s.name == "host")
    assert toml.loads(f"host = {item.toml(text)}")["host"] == text


@given(st.floats(0, 1), st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**62))
def test_any_number_survives_toml(share: float, rows: int, limit: int) -> None:
    items = {s.name: s for s in settings_of(Net, Work)}
    for name, value in (("share", share), ("rows", rows), ("limit", limit)):
        assert items[name].check(toml.loads(f"v = {items[name].toml(value)}")["v"]) == value


def test_example_file(tmp_path: Path) -> None:
    text = example_toml((Net, Work), profiles=PROFILES, title="Title.")
    assert toml.loads(text) == {}
    assert '#   big: high = 100, mode = "slow"' in text
    live = re.sub(r"^#(\w+ = )", r"\1", text, flags=re.M)
    document = toml.loads(live)
    assert set(document) == {s.name for s in settings_of(Net, Work)}
    resolved = load(tmp_path, live)
    for item in settings_of(Net, Work):
        if item.default is not None and item.name not in PROFILES["big"]:
            assert resolved.values[item.name] == item.default, item.name
