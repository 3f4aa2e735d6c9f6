"""Error replies in OpenAI's form: ``{"error": {"message", "type", "param", "code"}}``, all four keys always there.

No stack trace and no unbounded echo of the request ever leaves the process: a body stays under 4 KiB.
"""

from __future__ import annotations

import json
import logging
import math
from typing import TYPE_CHECKING, Any

from device.errors import JumarError, RequestRejected

if TYPE_CHECKING:
    from flask import Flask, Response

log = logging.getLogger("jumar.server")

MAX_MESSAGE = 1000
"""Characters of a message that reach the client; fewer when they need escapes (up to 12 bytes each in JSON)."""
_MAX_ESCAPED = 250

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_CODES = {
    401: "invalid_api_key",
    404: "not_found",
    405: "method_not_allowed",
    413: "request_too_large",
    415: "unsupported_media_type",
    429: "rate_limit_exceeded",
    431: "request_header_fields_too_large",
    500: "internal_error",
    503: "service_unavailable",
}


def error_body(
    status: int, message: str, *, param: str | None = None, code: str | None = None, kind: str | None = None
) -> dict[str, Any]:
    """The error object of a reply. ``type`` follows the status: 4xx ``invalid_request_error`` (401, 403 and 429 have
    types of their own), 5xx ``server_error``."""
    message = message[: MAX_MESSAGE + 1]
    limit = MAX_MESSAGE if len(json.dumps(message)) <= 3 * MAX_MESSAGE else _MAX_ESCAPED
    if len(message) > limit:
        message = message[: limit - 3] + "..."
    kind = kind or _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message or f"HTTP status {status}", "type": kind, "param": param, "code": code}}


def body_of(error: RequestRejected) -> dict[str, Any]:
    """The error object of a rejected request."""
    return error_body(error.status, error.message, param=error.param, code=error.code or default_code(error.status))


def default_code(status: int) -> str | None:
    """The ``code`` of an error that has none of its own; None for an ordinary 400."""
    return _CODES.get(status)


def shorten(value: Any, limit: int = 80) -> str:
    """``value`` for a message: printable, one line, cut."""
    if isinstance(value, str):
        value = value[: limit + 1]
    elif isinstance(value, (list, dict)):
        # repr of a large body would be built whole before it is cut.
        return f"a list of {len(value)}" if isinstance(value, list) else "an object"
    elif isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 256:
        return "an integer of more than 256 bits"
    text = ascii(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def reply(error: RequestRejected) -> Response:
    """The HTTP response for a rejected request, with ``Retry-After`` where trying again makes sense."""
    from flask import Response

    response = Response(json.dumps(body_of(error)), status=error.status, mimetype="application/json")
    if error.retry_after is not None:
        response.headers["Retry-After"] = str(max(1, math.ceil(error.retry_after)))
    if error.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


def install(app: Flask) -> None:
    """Error handlers of ``app``: every failure of a view or of the routing becomes an OpenAI error."""
    from flask import request
    from werkzeug.exceptions import HTTPException

    def rejected(error: RequestRejected) -> Response:
        return reply(error)

    def http(error: HTTPException) -> Response:
        status = error.code or 500
        if status == 404:
            message = f"there is no {request.method} {shorten(request.path)}; see the API in the documentation"
        elif status == 405:
            allowed = ", ".join(sorted(getattr(error, "valid_methods", None) or ()))
            message = f"{shorten(request.path)} does not take {shorten(request.method)}, only {allowed}"
        else:
            message = error.description or error.name
        response = reply(RequestRejected(message, code=default_code(status), status=status))
        if status == 405 and getattr(error, "valid_methods", None):
            response.headers["Allow"] = ", ".join(sorted(error.valid_methods))  # type: ignore[attr-defined]
        return response

    def broken(error: Exception) -> Response:
        # The client is told nothing about the inside; the log has the trace.
        log.error("%s %s failed", shorten(request.method), shorten(request.path), exc_info=error)
        text = str(error) if isinstance(error, JumarError) else "internal error; the server's log has the details"
        return reply(RequestRejected(text, code="internal_error", status=500))

    app.register_error_handler(RequestRejected, rejected)
    app.register_error_handler(HTTPException, http)
    app.register_error_handler(Exception, broken)
