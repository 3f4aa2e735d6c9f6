"""Strict reading of JSON: a value of the wrong type or out of range is a 400 that names its field.

Python's ``bool`` is an ``int`` and its ``json`` accepts NaN; neither passes here.
"""

from __future__ import annotations

import gc
import json
import math
import sys
from typing import Any

from device.errors import RequestRejected
from server.errors import shorten

MAX_IDS = 1 << 19
"""Token ids in one array: more than any context, few enough that no single pass over them keeps /health waiting."""
_LARGE_BODY = 1 << 18


def bad(param: str | None, message: str, code: str | None = None) -> RequestRejected:
    """A 400 about one field."""
    return RequestRejected(message, param=param, code=code, status=400)


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in a request body. RequestRejected (400) for anything else."""
    try:
        value = _loads(body.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise bad(None, f"the body is not UTF-8: byte {error.start} cannot be decoded; send JSON in UTF-8") from None
    except RecursionError:
        raise bad(None, "the body is nested too deeply; send one flat JSON object") from None
    except ValueError as error:  # JSONDecodeError, or an integer of thousands of digits
        raise bad(None, f"the body is not valid JSON: {shorten(str(error), 160)}") from None
    if not isinstance(value, dict):
        raise bad(None, f"the body must be a JSON object, not {type_name(value)}")
    return value


def _loads(text: str) -> Any:
    """``json.loads`` without NaN and Infinity, and for a large body without the collector.

    A body of a million empty arrays would be walked again and again while it grows, all other threads waiting.
    """
    if len(text) < _LARGE_BODY or not gc.isenabled():
        return json.loads(text, parse_constant=_refuse_constant)
    gc.disable()
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    finally:
        gc.enable()


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON value")


def type_name(value: Any) -> str:
    """JSON's name for the type of a value."""
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


class Fields:
    """A JSON object whose fields are taken out one at a time. ``null`` counts as absent, as OpenAI's clients mean it.

    prefix: put in front of a field's name in errors (``stream_options.``).
    """

    def __init__(self, values: dict[str, Any], prefix: str = "") -> None:
        self.values = values
        self.prefix = prefix

    def raw(self, name: str) -> Any:
        """The value as it is, None when absent."""
        return self.values.get(name)

    def refuse(self, name: str, message: str) -> RequestRejected:
        """A 400 about the field ``name``."""
        return bad(self.prefix + name, f"{self.prefix}{name} {message}")

    def boolean(self, name: str, default: bool = False) -> bool:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refuse(name, f"must be true or false, not {shorten(value)}")
        return value

    def integer(self, name: str, low: int, high: int | None, default: int | None = None) -> int | None:
        """An integer from ``low`` to ``high`` (None: no upper bound). 1.0 is not an integer here."""
        value = self.values.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.refuse(name, f"must be an integer, not {shorten(value)}")
        if value < low or (high is not None and value > high):
            limits = f"from {low} to {high}" if high is not None else f"of at least {low}"
            raise self.refuse(name, f"must be an integer {limits}, not {shorten(value)}")
        return value

    def number(
        self, name: str, low: float, high: float, default: float, *, above: bool = False, below: bool = False
    ) -> float:
        """A finite number from ``low`` to ``high``; ``above``/``below`` exclude the limit itself."""
        value = self.values.get(name)
        if value is None:
            return default
        return check_number(value, self.prefix + name, low, high, above=above, below=below)

    def string(self, name: str) -> str | None:
        """A string that is valid Unicode (a lone surrogate cannot be tokenised or sent back)."""
        value = self.values.get(name)
        return None if value is None else check_string(value, self.prefix + name)

    def mapping(self, name: str) -> dict[str, Any] | None:
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.refuse(name, f"must be an object, not {type_name(value)}")
        return value

    def token_ids(self, name: str, most: int | None = None) -> tuple[int, ...]:
        """A list of (at most ``most``) token ids; whether the model has them is the engine's to say."""
        value = self.values.get(name)
        if most is not None and isinstance(value, list) and len(value) > most:
            raise self.refuse(name, f"may hold at most {most} token ids, not {len(value)}")
        return () if value is None else check_ids(value, self.prefix + name)


def check_string(value: Any, param: str) -> str:
    """``value`` if it is a string of valid Unicode; 400 otherwise."""
    if not isinstance(value, str):
        raise bad(param, f"{param} must be a string, not {type_name(value)}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise bad(param, f"{param} has a lone surrogate; send valid Unicode") from None
    return value


def check_number(value: Any, param: str, low: float, high: float, *, above: bool = False, below: bool = False) -> float:
    """``value`` as a float if it is a finite number in the range; 400 otherwise."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise bad(param, f"{param} must be a number, not {shorten(value)}")
    # Compared before conversion: float() of a long integer overflows. NaN fails every comparison.
    fits = (value > low if above else value >= low) and (value < high if below else value <= high)
    if not fits or abs(value) > sys.float_info.max:
        lower = f"above {low:g}" if above else f"at least {low:g}"
        upper = "" if high == math.inf else f" and {'below' if below else 'at most'} {high:g}"
        raise bad(param, f"{param} must be a number {lower}{upper}, not {shorten(value)}")
    return float(value)


def check_ids(value: Any, param: str) -> tuple[int, ...]:
    """``value`` as token ids: a list of integers that fit 32 bits (so that an array can hold them); 400 otherwise."""
    if not isinstance(value, list):
        raise bad(param, f"{param} must be an array of token ids, not {type_name(value)}")
    if len(value) > MAX_IDS:
        raise bad(param, f"{param} may hold at most {MAX_IDS} token ids, not {len(value)}")
    for item in value:
        # type() and not isinstance(): a prompt has thousands of ids, and True is an int.
        if type(item) is not int or not -(2**31) <= item < 2**31:
            raise bad(param, f"{param} must hold token ids (integers), not {shorten(item)}")
    return tuple(value)
