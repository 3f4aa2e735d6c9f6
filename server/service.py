"""The life of the service: port, model, HTTP, watchdog, signals, and an orderly end.

Three kinds of thread: the HTTP loop and its workers (waitress), the engine's own, and the caller's, which supervises.

* The port is bound before the model is loaded, and listened on after: a start that must fail, fails at once, and no
  client waits for a model.
* SIGTERM or SIGINT drains: new work gets 503 with ``Retry-After``, /health says so at once, what runs goes on to its
  end, then the exit code is 0. What has not ended after ``drain_timeout`` ends with an error event. A second signal
  exits at once.
* A step that is stuck for longer than ``watchdog_timeout``, or an engine that failed, turns /health to 503, ends what
  runs with an error, and the process with ``EXIT_FAILED``, for its supervisor to start it again.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.metadata
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING

from device.errors import ConfigError
from server.app import AppConfig, create_app
from server.channel import HttpServer, bind
from server.config import ServerConfig, is_loopback
from server.gate import Gate
from server.metrics import Metrics

if TYPE_CHECKING:
    from flask import Flask

    from runtime.engine import Engine

log = logging.getLogger("jumar.server")

EXIT_FAILED = 3
"""Exit code after the engine failed or got stuck."""

_TICK = 0.1
_FLUSH_SECONDS = 5.0
_SHOW_FAILURE_SECONDS = 1.0
"""How long a failed service stays up: streams get their error, and a probe can see the 503."""


def open_port(config: ServerConfig) -> socket.socket:
    """The bound socket of the service. ConfigError when the address cannot be had: what is wrong, what to do."""
    where = f"{config.host}:{config.port}"
    try:
        sock = bind(config.host, config.port)
    except socket.gaierror as error:
        raise ConfigError(f"the host {config.host!r} is not known ({error.strerror}); give an address") from None
    except PermissionError:
        raise ConfigError(f"{where} needs rights this user has not; take a port from 1024 on with --port") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"port {config.port} on {config.host} is taken; take another with --port") from None
        raise ConfigError(f"cannot listen on {where}: {error.strerror}; see --host and --port") from None
    # With SO_REUSEADDR two sockets may be bound as long as neither listens: one who loads too is seen only later.
    if config.port and _answers(config.host, config.port):
        sock.close()
        raise ConfigError(f"port {config.port} on {config.host} is taken; take another with --port")
    return sock


def _answers(host: str, port: int) -> bool:
    """Whether somebody listens there."""
    target = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host.strip("[]"), host.strip("[]"))
    try:
        with socket.create_connection((target, port), timeout=1):
            return True
    except OSError:
        return False


def version() -> str:
    """Jumar's version; that of a checkout that was not installed is unknown."""
    try:
        return importlib.metadata.version("jumar")
    except importlib.metadata.PackageNotFoundError:
        return "0.0.0+unknown"


def fingerprint(engine: Engine, model: str) -> str:
    """``system_fingerprint``: equal for services whose answers to a seeded request should be equal."""
    config = engine.config
    device = (type(engine.device).__name__, engine.device.dtype, config.kv_dtype, config.scheme)
    parts = (version(), model, *device, engine.vocab_size)
    return "fp_" + hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


class Service:
    """An engine on the network. ``start`` begins, ``run`` supervises until the end and returns the exit code.

    The engine must have been started. ``make_app`` builds the WSGI application (tests replace it).
    """

    def __init__(
        self,
        engine: Engine,
        config: ServerConfig,
        sock: socket.socket,
        *,
        allow_extra: bool = False,
        make_app: Callable[..., Flask] = create_app,
    ) -> None:
        self.engine = engine
        self.config = config
        self.model = config.served_model_name or engine.model_id
        settings = engine.config
        streams = settings.max_num_seqs + settings.max_queue
        self.gate = Gate(streams)
        self.gate.retry_after = max(1.0, config.drain_timeout)
        prefixes = ("jumar", "vllm") if config.vllm_metrics else ("jumar",)
        info = {"block_size": str(engine.scheduler.pool.block_size), "cache_dtype": settings.kv_dtype}
        info["enable_prefix_caching"] = str(settings.prefix_cache)
        self.metrics = Metrics(engine.stats, self.model, engine.max_model_len, prefixes, info)
        engine.observers.append(self.metrics.finished)
        app_config = AppConfig(
            model=self.model,
            version=version(),
            fingerprint=fingerprint(engine, self.model),
            api_key=config.api_key,
            max_body_bytes=config.max_body_bytes,
            allow_extra=allow_extra,
        )
        app = make_app(engine, self.gate, self.metrics, app_config)
        self._http = HttpServer(app, sock, streams=streams, max_body_bytes=config.max_body_bytes)
        host, port = sock.getsockname()[:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self._thread = threading.Thread(target=self._run_http, name="jumar-http", daemon=True)
        self._end = threading.Event()
        self._http_error = ""

    def start(self) -> None:
        """Accept connections."""
        self._thread.start()

    def request_stop(self) -> None:
        """Begin to drain; what a first SIGTERM does. From any thread."""
        self._end.set()

    def run(self) -> int:
        """Supervise until a stop was asked for or something failed; the exit code."""
        while not self._end.wait(_TICK):
            if (failure := self._failure()) is not None:
                return self._fail(*failure)
        return self._drain()

    # ------------------------------------------------------------ inside

    def _run_http(self) -> None:
        try:
            self._http.run()
        except BaseException as error:
            log.exception("the HTTP loop failed")
            self._http_error = f"{type(error).__name__}: {error}"

    def _failure(self) -> tuple[str, str] | None:
        """(what clients and probes are told, what the log says) once the service cannot go on."""
        limit = self.config.watchdog_timeout
        if self.engine.state == "failed":
            return "a step of the engine failed", self.engine.failure or "unknown"
        if limit and (stalled := self.engine.stalled_for()) > limit:
            return "a step of the engine is stuck", f"a step takes {stalled:.0f} s, watchdog_timeout is {limit:g} s"
        return ("the HTTP loop failed", self._http_error) if self._http_error else None

    def _fail(self, failure: str, detail: str) -> int:
        log.critical("the service ends: %s: %s", failure, detail)
        self.gate.failure = failure
        until = time.monotonic() + _SHOW_FAILURE_SECONDS
        self.gate.wait_idle(_SHOW_FAILURE_SECONDS)
        time.sleep(max(0.0, until - time.monotonic()))
        self._stop_http()
        return EXIT_FAILED

    def _drain(self) -> int:
        """Let what runs come to its end, within the limit."""
        self.gate.draining = True
        self.engine.drain()
        limit = self.config.drain_timeout
        log.info("draining: %d requests may take %g s to finish", self.gate.active, limit)
        until = time.monotonic() + limit
        while self.gate.active and time.monotonic() < until:
            if (failure := self._failure()) is not None:
                return self._fail(*failure)
            self.gate.wait_idle(min(_TICK, max(0.0, until - time.monotonic())))
        left = self.gate.active
        if left:
            log.warning("drain_timeout is over; %d requests end with an error", left)
        self.engine.shutdown("the service is shutting down and this request was not finished in time", timeout=_TICK)
        if not self.gate.wait_idle(_FLUSH_SECONDS):  # the engine is stuck in a step: the workers end by themselves
            self.gate.failure = "the service ended before the engine's step did"
            self.gate.wait_idle(_FLUSH_SECONDS)
        self._stop_http()
        log.info("ended")
        return 0

    def _stop_http(self) -> None:
        """Send what is not written or not sent yet, then close every connection."""
        until = time.monotonic() + _FLUSH_SECONDS
        while self._http.busy() and time.monotonic() < until:
            time.sleep(0.01)
        self._http.stop()
        self._thread.join(_FLUSH_SECONDS)


@contextlib.contextmanager
def signals(stop: Callable[[], None]) -> Iterator[None]:
    """SIGTERM and SIGINT call ``stop`` once; a second one ends the process at once (128 + its number)."""
    asked = False

    def handle(number: int, _frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            with contextlib.suppress(Exception):
                sys.stderr.flush()
            os._exit(128 + number)
        asked = True
        stop()

    old = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def warnings_for(config: ServerConfig) -> list[str]:
    """What an operator should read at start-up."""
    found = []
    if not is_loopback(config.host) and config.api_key is None:
        found.append(f"{config.host} can be reached from other machines and no API key is asked for (no_api_key)")
    return found
