"""Typed errors of Jumar.

Every error that a user can cause says three things: what was wrong, what was expected, what to do.
"""

from __future__ import annotations


class JumarError(Exception):
    """Base of every error that Jumar raises on purpose. Its text is meant for the user."""


class ConfigError(JumarError):
    """A setting is unknown, unparsable or contradicts another; the message names the source."""


class DeviceError(JumarError):
    """A device that was asked for is not usable, or failed while it worked.

    fatal: nothing more can run on it; every running request gets an error and the service ends.
    """

    def __init__(self, message: str, *, fatal: bool = False) -> None:
        super().__init__(message)
        self.fatal = fatal


class OutOfDeviceMemory(DeviceError):
    """An allocation did not fit; a smaller one may."""


class UnsupportedModel(JumarError):
    """An architecture, option or format that Jumar does not implement, refused by name at load."""


class LoadError(JumarError):
    """A checkpoint is incomplete, damaged or contradicts itself; the message names file and tensor."""


class RequestRejected(JumarError):
    """A request that cannot be served. It always gets a reply.

    code: a short machine-readable word or None (``context_length_exceeded``), as OpenAI's ``error.code``.
    param: the name of the offending request field, or None.
    status: the HTTP status that fits (400 bad input, 404 no such model, 429 over capacity, 503 not serving).
    retry_after: seconds after which trying again makes sense, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        status: int = 400,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.param = param
        self.status = status
        self.retry_after = retry_after
