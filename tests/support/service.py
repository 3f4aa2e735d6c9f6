"""A service in this process over any engine, on a real socket, and the plain ways to talk to it."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

from runtime.engine import Engine
from runtime.sequence import Sequence as Seq
from server.config import ServerConfig
from server.service import Service, open_port
from tests.support.engines import scripted_engine
from tests.support.tokenizers import byte_ids

HOST = "127.0.0.1"


class Running:
    """A started service; a context manager that stops it, and its engine with it.

    The model's output is told by the request: ``extra={"script": [ids]}``; see ``say``.
    """

    def __init__(self, engine: Engine, **config: Any) -> None:
        self.engine = engine
        settings = ServerConfig(host=HOST, port=0, **config)
        self.service = Service(engine, settings, open_port(settings), allow_extra=True)
        self.model = self.service.model
        self.url = self.service.url
        self.port = int(self.url.rsplit(":", 1)[1])
        self.service.start()
        self.exit_code: int | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self.exit_code = self.service.run()

    def stop(self, timeout: float = 30.0) -> int | None:
        """Drain and end; the exit code, None when it did not end in time."""
        self.service.request_stop()
        return self.wait(timeout)

    def wait(self, timeout: float = 30.0) -> int | None:
        """The exit code once the service has ended."""
        self._thread.join(timeout)
        return self.exit_code

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.service.config = ServerConfig(host=HOST, port=0, drain_timeout=0)
        self.stop()
        self.engine.shutdown()

    # ------------------------------------------------------------ plain HTTP

    def call(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None, timeout: float = 30
    ) -> tuple[int, dict[str, str], bytes]:
        """(status, headers with lower-case names, body). A dict or list is sent as JSON, bytes as they are."""
        connection = http.client.HTTPConnection(HOST, self.port, timeout=timeout)
        sent = {} if body is None else {"Content-Type": "application/json"}
        data = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
        try:
            connection.request(method, path, data, {**sent, **(headers or {})})
            response = connection.getresponse()
            return response.status, {k.lower(): v for k, v in response.getheaders()}, response.read()
        finally:
            connection.close()

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        """(status, parsed JSON)."""
        status, _, raw = self.call("POST", path, body, headers)
        return status, json.loads(raw)

    def get(self, path: str, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        """(status, parsed JSON)."""
        status, _, raw = self.call("GET", path, None, headers)
        return status, json.loads(raw)

    def open(self, path: str, body: Any) -> http.client.HTTPResponse:
        """A response whose body is read by the caller, who closes it."""
        connection = http.client.HTTPConnection(HOST, self.port, timeout=30)
        connection.request("POST", path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        return connection.getresponse()

    def raw(self, head: str, body: bytes = b"", timeout: float = 10) -> tuple[int, dict[str, str], bytes]:
        """Send bytes as they are, whatever becomes of them; the reply as ``call`` gives it."""
        with socket.create_connection((HOST, self.port), timeout=timeout) as sock:
            sock.sendall(head.encode("latin-1"))
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                sock.sendall(body)
            received = b""
            while chunk := sock.recv(65536):
                received += chunk
        top, _, rest = received.partition(b"\r\n\r\n")
        lines = top.decode().split("\r\n")
        headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines[1:])}
        return int(lines[0].split()[1]), headers, rest

    def send(self, body: Any, path: str = "/v1/completions") -> socket.socket:
        """A request sent on a raw socket, nothing read."""
        data = json.dumps(body).encode()
        sock = socket.create_connection((HOST, self.port), timeout=30)
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
        sock.sendall(head.encode() + b"\r\n" + data)
        return sock

    def stream(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The events of a streamed request, parsed; ``[DONE]`` as text."""
        response = self.open(path, {**body, "stream": True})
        assert response.status == 200, response.read()
        with response:
            return list(events(response))

    def metric(self, name: str, **labels: str) -> float:
        """The value of one sample of /metrics, ``jumar:`` left out. KeyError when there is none."""
        return samples(self.call("GET", "/metrics")[2].decode())[_key(f"jumar:{name}", labels)]


def events(response: http.client.HTTPResponse) -> Iterator[Any]:
    """Server-sent events as they come."""
    for line in response:
        if line.startswith(b"data: "):
            data = line[6:].strip()
            yield "[DONE]" if data == b"[DONE]" else json.loads(data)


def samples(text: str) -> dict[Any, float]:
    """Every sample of a Prometheus text: (name, labels without model_name and engine) -> value."""
    from prometheus_client.parser import text_string_to_metric_families

    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            found[_key(sample.name, labels)] = sample.value
    return found


def _key(name: str, labels: dict[str, str]) -> Any:
    return name, tuple(sorted(labels.items()))


def say(text: str | bytes | Sequence[str]) -> dict[str, Any]:
    """``extra`` that makes the scripted model say a text: a token a byte, or for a list of texts a token each."""
    return {"script": byte_ids(text if isinstance(text, (str, bytes)) else "".join(text))}


def script_or(text: str) -> Callable[[Seq], Sequence[int]]:
    """A script for the scripted model: what the request brings, else ``text``."""
    ids = byte_ids(text)

    def script(seq: Seq) -> Sequence[int]:
        given: Sequence[int] | None = (seq.extra or {}).get("script")
        return ids if given is None else given

    return script


def scripted_service(*, text: str = "Hello, world.", config: dict[str, Any] | None = None, **engine: Any) -> Running:
    """A service whose model says what the request's ``extra`` tells, or ``text``."""
    return Running(scripted_engine(script_or(text), **engine), **(config or {}))


def eventually(check: Callable[[], bool], timeout: float = 5.0) -> bool:
    """Whether ``check`` becomes true in time."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if check():
            return True
        time.sleep(0.01)
    return check()
