"""One setting: its name, type, default, help and limits, and how its value is read and written.

A schema is a frozen dataclass whose fields are made with ``setting(...)``. ``settings_of`` turns one or more of them
into a flat list of ``Setting`` that the loader (``device.settings``), the command line and the example file iterate.

Types: ``bool``, ``int``, ``float``, ``str``, ``Literal`` of strings, ``tuple[str, ...]`` and any of them ``| None``;
with ``kind="size"`` an ``int`` of bytes that may be written ``4GiB``, with ``kind="duration"`` a ``float`` of seconds
that may be written ``500ms``, ``30s``, ``5m`` or ``1h``.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import math
import re
import types
import typing
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from device.errors import ConfigError

_SIZES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SIZES |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_SECONDS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_BOOLS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
_NUMBER = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)")


class InvalidSetting(ConfigError):
    """A value that its schema refuses. ``names``: the settings involved, for whoever knows where they came from."""

    def __init__(self, message: str, names: Sequence[str]) -> None:
        super().__init__(message)
        self.names = tuple(names)


def setting(
    default: Any,
    help: str,
    *,
    group: str,
    choices: Sequence[str] = (),
    unit: str = "",
    kind: str = "",
    minimum: float | None = None,
    maximum: float | None = None,
    secret: bool = False,
) -> Any:
    """A dataclass field that is a setting. ``help`` is a full sentence or two; ``group`` the heading above it; ``unit``
    what a number counts; ``kind`` "size" or "duration"; ``secret`` values are never shown."""
    meta = {
        "help": help,
        "group": group,
        "choices": tuple(choices),
        "unit": unit,
        "kind": kind,
        "minimum": minimum,
        "maximum": maximum,
        "secret": secret,
    }
    return dataclasses.field(default=default, metadata={"setting": meta})


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting. ``kind``: bool int float str list size duration. ``schema``: the dataclass that it belongs to."""

    name: str
    kind: str
    default: Any
    help: str
    group: str
    unit: str
    choices: tuple[str, ...]
    optional: bool
    minimum: float | None
    maximum: float | None
    secret: bool
    schema: type

    @property
    def env(self) -> str:
        """Name of the environment variable."""
        return "JUMAR_" + self.name.upper()

    @property
    def option(self) -> str:
        """Name of the command line option."""
        return "--" + self.name.replace("_", "-")

    @property
    def expected(self) -> str:
        """What a value must look like, to complete "expected ..."."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        what = {
            "bool": "true or false",
            "int": "an integer",
            "float": "a number",
            "str": "a string",
            "list": "a list of strings (separated by commas outside TOML)",
            "size": "a size such as 512MB, 4GiB or a number of bytes",
            "duration": "a time such as 500ms, 30s, 5m or a number of seconds",
        }[self.kind]
        if self.minimum is not None and self.maximum is not None:
            return f"{what} from {self.minimum:g} to {self.maximum:g}"
        if self.minimum is not None:
            return f"{what}, at least {self.minimum:g}"
        if self.maximum is not None:
            return f"{what}, at most {self.maximum:g}"
        return what

    def parse(self, text: str) -> Any:
        """The value that ``text`` (environment, command line) means. ValueError with ``expected`` otherwise.
        Empty text unsets an optional setting, but for a secret: there it is a variable that somebody forgot to set,
        and none would be a lock left open."""
        if self.secret and not text:
            raise ValueError("it is empty; leave it out if there is to be none")
        if self.kind == "str":
            if self.optional and not text:
                return None
            return self.check(text)
        text = text.strip()
        if self.optional and not text:
            return None
        if self.kind == "list":
            return self.check([part.strip() for part in text.split(",") if part.strip()])
        if self.kind == "bool":
            if text.lower() not in _BOOLS:
                raise self._refused()
            return _BOOLS[text.lower()]
        try:
            return self.check(int(text) if self.kind in ("int", "size") else float(text))
        except ValueError:
            return self.check(text)  # with a unit, or refused

    def check(self, value: Any) -> Any:
        """``value`` (from TOML or Python) in the setting's own type. ValueError with ``expected`` otherwise."""
        if value is None and self.optional:
            return None
        try:
            value = self._typed(value)
        except OverflowError:
            raise self._refused() from None
        if self.choices and value not in self.choices:
            raise self._refused()
        if self.kind in ("int", "float", "size", "duration") and (
            (self.minimum is not None and value < self.minimum) or (self.maximum is not None and value > self.maximum)
        ):
            raise self._refused()
        return value

    def toml(self, value: Any) -> str:
        """``value`` as TOML text that reads back as the same value. None (not set) has no TOML form: ValueError."""
        if value is None:
            raise ValueError(f"{self.name} is not set")
        if self.kind == "bool":
            return "true" if value else "false"
        if self.kind == "list":
            return "[" + ", ".join(_quoted(v) for v in value) + "]"
        if self.kind == "size":
            for unit in ("TiB", "GiB", "MiB"):
                if value and value % _SIZES[unit.upper()] == 0:
                    return _quoted(f"{value // _SIZES[unit.upper()]}{unit}")
        return _quoted(value) if isinstance(value, str) else repr(value)

    def shown(self, value: Any) -> str:
        """``value`` for people: secrets are masked, unset is said."""
        if value is None:
            return "(not set)"
        return '"********"' if self.secret and value else self.toml(value)

    def _typed(self, value: Any) -> Any:
        if self.kind == "size" and isinstance(value, str):
            return self._measure(value.upper(), _SIZES, whole=True)
        if self.kind == "duration" and isinstance(value, str):
            return self._measure(value, _SECONDS, whole=False)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if self.kind == "bool" and isinstance(value, bool):
            return value
        if self.kind in ("int", "size") and number and isinstance(value, int) and (self.kind == "int" or value >= 0):
            return value
        if self.kind in ("float", "duration") and number and math.isfinite(value):
            return float(value)
        if self.kind == "list" and isinstance(value, (list, tuple)) and all(map(_is_text, value)):
            return tuple(value)
        if self.kind == "str" and _is_text(value):
            return value
        raise self._refused()

    def _measure(self, text: str, units: dict[str, Any], *, whole: bool) -> int | float:
        found = _NUMBER.fullmatch(text.strip())
        if not found or found[2] not in units:
            raise self._refused()
        amount = float(found[1]) * units[found[2]] if "." in found[1] else int(found[1]) * units[found[2]]
        return int(amount) if whole else float(amount)

    def _refused(self) -> ValueError:
        return ValueError(f"expected {self.expected}")


def settings_of(*schemas: type) -> tuple[Setting, ...]:
    """Every setting of the schemas, in order. TypeError for a field that is not one, or a name that is used twice."""
    return _settings_of(schemas)


@functools.cache
def _settings_of(schemas: tuple[type, ...]) -> tuple[Setting, ...]:
    found: dict[str, Setting] = {}
    for schema in schemas:
        hints = typing.get_type_hints(schema)
        for field in dataclasses.fields(schema):
            if "setting" not in field.metadata:
                raise TypeError(f"{schema.__name__}.{field.name} is not made with setting()")
            if field.name in found:
                raise TypeError(f"{field.name} is in {found[field.name].schema.__name__} and in {schema.__name__}")
            meta = dict(field.metadata["setting"])
            kind, optional, choices = _kind(hints[field.name], f"{schema.__name__}.{field.name}")
            meta["kind"] = meta["kind"] or kind
            meta["choices"] = meta["choices"] or choices
            found[field.name] = Setting(
                name=field.name, default=field.default, optional=optional, schema=schema, **meta
            )
    return tuple(found.values())


def validate(config: Any) -> None:
    """Check every field of a config object, then its own ``problems()``; call it from ``__post_init__``.

    ``problems()`` yields (names, text) for values that are fine alone and wrong together. InvalidSetting names them.
    """
    for item in settings_of(type(config)):
        try:
            object.__setattr__(config, item.name, item.check(getattr(config, item.name)))
        except ValueError as error:
            value = "********" if item.secret else repr(getattr(config, item.name))
            raise InvalidSetting(f"{item.name} = {value}: {error}", [item.name]) from None
    for names, text in getattr(config, "problems", lambda: ())():
        raise InvalidSetting(text, names)


def suggestion(name: str, known: Iterable[str]) -> str:
    """ "; did you mean ...?" or nothing."""
    known = list(known)
    plain = {k.lower().replace("-", "_"): k for k in known}
    close = difflib.get_close_matches(name.lower().replace("-", "_"), list(plain), n=1, cutoff=0.7)
    return f"; did you mean {plain[close[0]]}?" if close else ""


def _kind(hint: Any, where: str) -> tuple[str, bool, tuple[str, ...]]:
    """(kind, optional, choices) of a type annotation."""
    optional = False
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        rest = [a for a in typing.get_args(hint) if a is not type(None)]
        if len(rest) != 1 or len(rest) == len(typing.get_args(hint)):
            raise TypeError(f"{where}: a setting cannot have the type {hint}")
        hint, optional = rest[0], True
    if typing.get_origin(hint) is typing.Literal and all(isinstance(a, str) for a in typing.get_args(hint)):
        return "str", optional, typing.get_args(hint)
    if typing.get_origin(hint) is tuple and typing.get_args(hint) == (str, Ellipsis):
        return "list", optional, ()
    if hint in (bool, int, float, str):
        return str(hint.__name__), optional, ()
    raise TypeError(f"{where}: a setting cannot have the type {hint}")


def _is_text(value: Any) -> bool:
    """A string. Undecodable bytes of the environment arrive as lone surrogates, which no file or reply can carry."""
    return isinstance(value, str) and not any("\ud800" <= c <= "\udfff" for c in value)


def _quoted(text: str) -> str:
    # A JSON string is a TOML basic string but for DEL, which TOML wants escaped.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
