"""The layered, strict configuration loader.

Sources, a later one wins: defaults, ``profile``, TOML file, environment (``JUMAR_PORT``), command line (``--port``).
All use the names of the schema's fields. An unknown name or a value that cannot be read is a ConfigError that says
where it stands; nothing is ignored. The file is flat: tables would be a second set of names.

A schema class may define ``problems(self)`` (see ``device.schema.validate``) and
``adjustments(cls, values, explicit)``, a classmethod that yields ``Adjustment``s of defaults that do not go together.
A value that somebody set is never adjusted: ``explicit(name)`` says whether one was.
"""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from device import toml
from device.errors import ConfigError
from device.schema import InvalidSetting, Setting, settings_of, suggestion

T = TypeVar("T")

DEFAULT_FILE = "jumar.toml"
RESERVED_ENV = {
    "JUMAR_CONFIG": "path of the configuration file, like --config",
    "JUMAR_PYTHON": "which Python the scripts make the environment with",
    "JUMAR_SMOLLM2_GGUF": "where the tests find the embedded model",
    "JUMAR_SCHEDULE_CASES": "how many cases a long test runs",
}
"""Variables named ``JUMAR_*`` that are not settings; besides them all that begin with ``JUMAR_TEST_``."""
_KUBERNETES = re.compile(r"JUMAR_(SERVICE_(HOST|PORT).*|PORT_\d+_.*)")


@dataclass(frozen=True, slots=True)
class Source:
    """Where a value came from. ``layer``: default, profile, file, environment, command line; ``text`` for people."""

    layer: str
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Adjustment:
    """A value that was changed because it did not go with the others."""

    name: str
    old: Any
    new: Any
    why: str

    def __str__(self) -> str:
        return f"{self.name}: {self.old} -> {self.new} ({self.why})"


@dataclass(frozen=True, slots=True)
class Resolved:
    """The outcome: a value and a source for every setting, and what was adjusted and why."""

    settings: tuple[Setting, ...]
    values: Mapping[str, Any]
    sources: Mapping[str, Source]
    adjustments: tuple[Adjustment, ...]
    configs: Mapping[type, Any]

    def of(self, schema: type[T]) -> T:
        """The config object of one schema. KeyError when it was not among those resolved."""
        return cast(T, self.configs[schema])

    def explicit(self, name: str) -> bool:
        """Whether somebody set it: in the file, the environment or on the command line."""
        return self.sources[name].layer in ("file", "environment", "command line")


def resolve(
    schemas: Sequence[type],
    *,
    profiles: Mapping[str, Mapping[str, Any]] | None = None,
    config_file: Path | str | None = None,
    options: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    cwd: Path | str | None = None,
) -> Resolved:
    """Read all sources.

    profiles: values by profile name; used when the schemas have a setting called ``profile``.
    config_file: must exist when given; else ``JUMAR_CONFIG``, else ``jumar.toml`` in ``cwd`` when there is one.
    options: the command line, by field name; None is "not given"; text is parsed as in the environment.
    environ, cwd: those of the process unless given. ConfigError as the module says.
    """
    settings = settings_of(*schemas)
    environ = os.environ if environ is None else environ
    layers = [
        _read_file(settings, config_file, environ, Path.cwd() if cwd is None else Path(cwd)),
        _read_environ(settings, environ),
        _read_options(settings, options or {}),
    ]
    values: dict[str, Any] = {s.name: s.default for s in settings}
    sources = {s.name: Source("default", "default") for s in settings}
    _apply(_profile_layer(settings, profiles or {}, layers), values, sources)
    for layer in layers:
        _apply(layer, values, sources)
    adjustments = _adjust(schemas, values, sources)
    configs = {schema: _build(schema, values, sources) for schema in schemas}
    return Resolved(settings, values, sources, adjustments, configs)


def format_config(resolved: Resolved) -> str:
    """The resolved configuration as TOML that can be pasted into ``jumar.toml``: ``key = value  # source``.

    What has no TOML form (not set) or must not be shown (secrets) stands in a comment.
    """
    lines: list[str] = []
    group = ""
    for item in resolved.settings:
        if item.group != group:
            lines += [""] if lines else []
            group = item.group
            lines.append(f"# {group}")
        value, source = resolved.values[item.name], resolved.sources[item.name]
        text = f"{item.name} = {item.shown(value)}"
        if value is None or (item.secret and value):
            text = "# " + text
        lines.append(f"{text:<40}  # {_one_line(str(source))}")
    if resolved.adjustments:
        lines += ["", "# adjusted"]
        lines += [f"# {_one_line(str(a))}" for a in resolved.adjustments]
    return "\n".join(lines) + "\n"


def example_toml(
    schemas: Sequence[type], *, profiles: Mapping[str, Mapping[str, Any]] | None = None, title: str = ""
) -> str:
    """A commented file with every setting at its default, each commented out, grouped, with help, unit and choices."""
    lines = [*_comment(title), ""]
    group = ""
    for item in settings_of(*schemas):
        if item.group != group:
            group = item.group
            lines += [f"# ---- {group} " + "-" * max(4, 100 - len(group)), ""]
        lines += _comment(item.help)
        if item.name == "profile":
            lines += _profile_comment(settings_of(*schemas), profiles or {})
        facts = [f"one of: {', '.join(item.choices)}"] if item.choices else []
        facts += [f"unit: {item.unit}"] if item.unit else []
        if not item.choices and (item.minimum is not None or item.maximum is not None):
            facts.append(item.expected)
        lines += _comment("; ".join(facts)) if facts else []
        lines += ["# not set by default"] if item.default is None else []
        lines += [f"#{item.name} = {item.toml(item.default) if item.default is not None else _sample(item)}", ""]
    return "\n".join(lines).strip() + "\n"


# ---------------------------------------------------------------- layers

Layer = dict[str, tuple[Any, Source]]


def _read_file(settings: Sequence[Setting], given: Path | str | None, environ: Mapping[str, str], cwd: Path) -> Layer:
    if given == "":
        raise ConfigError("command line --config '': it is empty; expected the path of a file")
    asked = given or environ.get("JUMAR_CONFIG") or None
    path = cwd / (asked or DEFAULT_FILE)
    if asked is None and not os.path.lexists(path):
        return {}
    shown = str(asked or DEFAULT_FILE)
    if path.is_symlink() and not path.exists():
        raise ConfigError(
            f"{shown}: the configuration file cannot be read: it is a link to {os.readlink(path)}, which "
            "cannot be found"
        )
    if asked is None and not path.is_file():  # a folder; or a pipe, at which one would wait
        raise ConfigError(f"{shown}: the configuration file cannot be read: it is no regular file")
    try:
        text = path.read_text(encoding="utf-8-sig")  # Windows editors put a byte order mark in front
    except (OSError, UnicodeDecodeError) as error:
        why = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise ConfigError(f"{shown}: the configuration file cannot be read: {why}") from None
    try:
        document = toml.loads(text)
    except toml.TOMLDecodeError as error:
        raise ConfigError(f"{shown}: not valid TOML: {error}") from None
    known = {s.name: s for s in settings}
    layer: Layer = {}
    for key, value in document.items():
        where = _at_line(shown, text, key)
        if key not in known:
            if isinstance(value, dict):
                raise ConfigError(f"{where}: [{key}] is a table; settings are written without tables, name = value")
            raise ConfigError(f"{where}: unknown setting {key!r}{suggestion(key, known)} (all: jumar serve --help)")
        item = known[key]
        try:
            layer[key] = item.check(value), Source("file", where)
        except ValueError as error:
            raise ConfigError(f"{where}: {key} = {_masked(item, value)}: {error}") from None
    return layer


def _read_environ(settings: Sequence[Setting], environ: Mapping[str, str]) -> Layer:
    known = {s.env: s for s in settings}
    layer: Layer = {}
    for name in sorted(environ):
        if not name.upper().startswith("JUMAR_") or name in RESERVED_ENV or name.startswith("JUMAR_TEST_"):
            continue
        value = environ[name]
        hint = ""
        if _KUBERNETES.fullmatch(name) or (name == "JUMAR_PORT" and value.startswith("tcp://")):
            hint = (
                " (Kubernetes sets such variables for a service called jumar: give the service another name, or set"
                " enableServiceLinks: false in the pod)"
            )
        if name not in known:
            more = hint or suggestion(name, [*known, *RESERVED_ENV])
            raise ConfigError(f"environment {name}: there is no such setting{more}")
        item = known[name]
        try:
            layer[item.name] = item.parse(value), Source("environment", f"environment {name}")
        except ValueError as error:
            raise ConfigError(f"environment {name}={_masked(item, value)}: {error}{hint}") from None
    return layer


def _read_options(settings: Sequence[Setting], options: Mapping[str, Any]) -> Layer:
    known = {s.name: s for s in settings}
    layer: Layer = {}
    for name, value in options.items():
        if value is None:
            continue
        if name not in known:
            raise ConfigError(f"command line: unknown setting {name!r}{suggestion(name, known)}")
        item = known[name]
        try:
            parsed = item.parse(value) if isinstance(value, str) else item.check(value)
        except ValueError as error:
            raise ConfigError(f"command line {item.option} {_masked(item, value)}: {error}") from None
        layer[name] = parsed, Source("command line", f"command line {item.option}")
    return layer


def _profile_layer(
    settings: Sequence[Setting], profiles: Mapping[str, Mapping[str, Any]], layers: Sequence[Layer]
) -> Layer:
    known = {s.name: s for s in settings}
    if "profile" not in known:
        return {}
    chosen = known["profile"].default
    for layer in layers:
        chosen = layer["profile"][0] if "profile" in layer else chosen
    if not chosen:
        return {}
    source = Source("profile", f"profile {chosen}")
    return {name: (known[name].check(value), source) for name, value in profiles[chosen].items()}


def _apply(layer: Layer, values: dict[str, Any], sources: dict[str, Source]) -> None:
    for name, (value, source) in layer.items():
        values[name], sources[name] = value, source


def _adjust(schemas: Sequence[type], values: dict[str, Any], sources: dict[str, Source]) -> tuple[Adjustment, ...]:
    def explicit(name: str) -> bool:
        return sources[name].layer not in ("default", "profile")

    done: list[Adjustment] = []
    for schema in schemas:
        hook = getattr(schema, "adjustments", None)
        for change in hook(values, explicit) if hook else ():
            if explicit(change.name):
                raise TypeError(f"{schema.__name__}.adjustments must not change {change.name}, which was set")
            values[change.name] = change.new
            sources[change.name] = Source("default", f"{sources[change.name]}, adjusted: {change.why}")
            done.append(change)
    return tuple(done)


def _build(schema: type, values: Mapping[str, Any], sources: Mapping[str, Source]) -> Any:
    names = [s.name for s in settings_of(schema)]
    secret = {s.name for s in settings_of(schema) if s.secret}
    try:
        return schema(**{name: values[name] for name in names})
    except InvalidSetting as error:
        shown = {n: "'********'" if n in secret and values[n] else repr(values[n]) for n in error.names}
        involved = [f"{n} = {shown[n]} from {sources[n]}" for n in error.names]
        raise InvalidSetting(f"{error} ({'; '.join(involved)})", error.names) from None


# ---------------------------------------------------------------- words


def _at_line(shown: str, text: str, key: str) -> str:
    """ "jumar.toml line 7". The parser keeps no positions: the line is the first that assigns the key."""
    pattern = re.compile(rf"""\s*\[*\s*["']?{re.escape(key)}["']?\s*[=.\]]""")
    for number, line in enumerate(text.splitlines(), 1):
        if pattern.match(line):
            return f"{shown} line {number}"
    return shown


def _masked(item: Setting, value: Any) -> str:
    return "'********'" if item.secret and value else repr(value)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _comment(text: str) -> list[str]:
    if not text:
        return []
    return [f"# {line}".rstrip() for part in text.split("\n") for line in textwrap.wrap(part, 116) or [""]]


def _sample(item: Setting) -> str:
    """What a value of a setting without default looks like."""
    if item.choices:
        return item.toml(item.choices[0])
    return {"str": '"..."', "list": '["..."]', "bool": "true"}.get(item.kind, "0")


def _profile_comment(settings: Sequence[Setting], profiles: Mapping[str, Mapping[str, Any]]) -> list[str]:
    known = {s.name: s for s in settings}
    lines = []
    for name, values in profiles.items():
        pairs = ", ".join(f"{key} = {known[key].toml(value)}" for key, value in values.items())
        wrapped = textwrap.wrap(f"{name}: {pairs}", 112, subsequent_indent="    ")
        lines += [f"#   {line}" for line in wrapped]
    return lines
