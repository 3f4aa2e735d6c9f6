"""waitress, tuned: errors that never reach Flask are JSON too, and an over-long body is refused before it is read.

waitress itself answers malformed requests (bad headers, a body above the limit) as plain text and closes the socket
while the client is still sending, so that the kernel resets the connection and the reply may be lost. Here the reply
is an OpenAI error, and what still arrives is thrown away for a moment (a lingering close, RFC 9112 section 9.6).
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from waitress import wasyncore
from waitress.channel import HTTPChannel
from waitress.parser import HTTPRequestParser
from waitress.server import create_server
from waitress.task import ErrorTask, WSGITask
from waitress.utilities import BadRequest

from server.errors import default_code, error_body

if TYPE_CHECKING:
    from flask import Flask

LINGER_SECONDS = 2.0
MAX_HEADER_BYTES = 64 << 10
RESERVED_THREADS = 16
"""Threads beyond one per stream: they answer /health, /metrics, and the refusals, when every stream is taken."""


class Parser(HTTPRequestParser):
    """Stops at the first error: what follows it on the connection is not another request."""

    def received(self, data: bytes) -> int:
        try:
            consumed = super().received(data)
        except ValueError:  # of urlsplit, for a request target that is no URI: waitress does not expect it
            self.error = BadRequest("the request line cannot be read")
            self.completed = True
            return len(data)
        if self.error is None:
            return consumed
        # waitress would ask for the refused body with "100 Continue" and go on reading it.
        self.expect_continue = False
        return len(data)


class JsonErrorTask(ErrorTask):
    """The reply to a request that waitress could not parse, in OpenAI's form."""

    def execute(self) -> None:
        request: Any = self.request  # the stubs take it for an error
        error = request.error
        message = f"{error.reason}: {error.body}"
        if error.code == 413:  # waitress names its own limit, one byte more than ours
            limit = self.channel.server.adj.max_request_body_size - 1
            message = f"the body is larger than max_body_bytes, {limit} bytes; send less at once"
        body = json.dumps(error_body(error.code, message, code=default_code(error.code))).encode()
        self.status = f"{error.code} {error.reason}"
        self.response_headers = [*self.response_headers, ("Content-Type", "application/json")]
        self.set_close_on_finish()
        self.content_length = len(body)
        self.write(body)


ON_HANG_UP = "jumar.on_hang_up"
"""In the WSGI environment: a function that takes what to call, once and soon, when the client hangs up; None for
nothing any more. It is called in the HTTP loop, so it must be quick, or at once when the client is gone already."""


class Task(WSGITask):
    """A request, which may ask to be told of the client's hanging up."""

    def get_environment(self) -> Any:
        environ: Any = super().get_environment()
        channel: Any = self.channel
        environ[ON_HANG_UP] = channel.on_hang_up
        return environ


class Channel(HTTPChannel):
    """A connection. After a parse error it throws away what arrives and, the reply sent, lingers before it closes."""

    parser_class = Parser
    task_class = Task
    error_task_class = JsonErrorTask
    _refused = False
    _linger_until = 0.0
    _hang_up: Callable[[], None] | None = None

    def on_hang_up(self, call: Callable[[], None] | None) -> None:
        """See ``ON_HANG_UP``."""
        self._hang_up = call
        if call is not None and not self.connected:
            call()

    def handle_close(self) -> None:
        super().handle_close()
        if (call := self._hang_up) is not None:
            call()

    def received(self, data: bytes) -> bool:
        if self._refused:
            return True
        result = bool(super().received(data))
        if self.requests and self.requests[-1].error is not None:
            self._refused = True
        return result

    def handle_read(self) -> None:
        if self._linger_until and time.monotonic() > self._linger_until:
            self.handle_close()
        else:
            super().handle_read()

    def handle_write(self) -> None:
        if not (self._refused and self.close_when_flushed):
            super().handle_write()
            return
        channel: Any = self  # the stubs leave these two out
        channel._flush_exception(channel._flush_some)
        if self.will_close:
            self.handle_close()
        elif not self.total_outbufs_len:
            self.close_when_flushed = False
            self._linger_until = time.monotonic() + LINGER_SECONDS
            with contextlib.suppress(OSError):
                channel.socket.shutdown(socket.SHUT_WR)


class HttpServer:
    """A waitress server on a socket that is bound already; ``run`` blocks, ``stop`` ends it from another thread.

    streams: requests that may hold a thread for long; threads and connections are sized from it.
    """

    def __init__(self, app: Flask, sock: socket.socket, *, streams: int, max_body_bytes: int) -> None:
        self._map: dict[int, Any] = {}
        self._stopping = False
        connections = _connection_limit(streams)
        make: Any = create_server  # its type leaves out what a single server has
        self._server = make(
            app,
            map=self._map,
            sockets=[sock],
            threads=streams + RESERVED_THREADS,
            connection_limit=connections,
            # Without lookahead waitress does not read while it serves, and so cannot see that a client hung up.
            channel_request_lookahead=1,
            asyncore_use_poll=True,
            recv_bytes=64 << 10,
            max_request_body_size=max_body_bytes + 1,  # waitress refuses what is equal to its limit
            max_request_header_size=MAX_HEADER_BYTES,
            backlog=max(1024, streams),
            ident="jumar",
            clear_untrusted_proxy_headers=True,
        )
        self._server.channel_class = Channel
        # A queue is normal here: the refusals wait a moment for a reserved thread.
        logging.getLogger("waitress.queue").setLevel(logging.ERROR)

    def run(self) -> None:
        """Serve until ``stop``; then end the worker threads and close every connection."""
        while not self._stopping:
            wasyncore.loop(timeout=1.0, use_poll=True, map=self._map, count=1)
        self._server.task_dispatcher.shutdown(timeout=1)
        wasyncore.close_all(self._map)

    def busy(self) -> bool:
        """Whether a worker still writes a reply, or bytes of one are not handed to the kernel yet."""
        channels = list(self._server.active_channels.values())
        return any(channel.requests or channel.total_outbufs_len for channel in channels)

    def stop(self) -> None:
        """Make ``run`` return."""
        self._stopping = True
        self._server.pull_trigger()


def bind(host: str, port: int) -> socket.socket:
    """A TCP socket bound to the address, not listening yet (until the model is loaded clients are refused, not kept
    waiting). OSError when it is not possible."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    sock = socket.socket(family, kind, protocol)
    try:
        # A port whose last connections are in TIME_WAIT is free; one where somebody listens is not.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError:
        sock.close()
        raise
    return sock


def _connection_limit(streams: int) -> int:
    """Connections to accept: idle ones count too. Raises the process's file limit where that is allowed."""
    wanted = max(1024, 4 * streams)
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return wanted
    spare = 256
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted + spare:
        target = wanted + spare if hard == resource.RLIM_INFINITY else min(hard, wanted + spare)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
            soft = target
    return wanted if soft == resource.RLIM_INFINITY else max(streams + 64, min(wanted, soft - spare))
