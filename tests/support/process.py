"""The scripted service as a child process, for what can only be seen from outside: signals and exit codes."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.service import HOST, events

ROOT = Path(__file__).resolve().parents[2]


class Child:
    """``python -m tests.support.serve_scripted``; killed at the end if it still runs."""

    def __init__(self, **options: Any) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.serve_scripted", json.dumps(options)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert self.process.stdout is not None and self.process.stderr is not None
        line = self.process.stdout.readline()
        assert line.startswith("http://"), line + (self.process.stderr.read() if self.process.poll() else "")
        self.port = int(line.rsplit(":", 1)[1])
        self.log = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.log = self.process.stderr.read()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.wait()

    def terminate(self) -> None:
        """SIGTERM."""
        self.process.send_signal(signal.SIGTERM)

    def wait(self, timeout: float = 20) -> int:
        """The exit code."""
        code = self.process.wait(timeout)
        self._reader.join(5)
        return code

    def request(self, method: str, path: str, body: Any = None) -> http.client.HTTPResponse:
        """The response, its body unread."""
        connection = http.client.HTTPConnection(HOST, self.port, timeout=20)
        headers = {} if body is None else {"Content-Type": "application/json"}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        return connection.getresponse()

    def metrics(self) -> bytes:
        """The text of /metrics."""
        return self.request("GET", "/metrics").read()

    def health(self) -> int:
        """Status of /health; 0 when nobody answers."""
        try:
            return self.request("GET", "/health").status
        except (OSError, http.client.HTTPException):
            return 0


class Stream:
    """A streamed completion that a thread reads to its end. ``text``, ``error`` and ``done`` when it has."""

    def __init__(self, child: Child, tokens: int, prompt: Any = "p") -> None:
        self.text = ""
        self.error: Any = None
        self.done = False
        self.status = 0
        self.first = threading.Event()
        body = {"prompt": prompt, "max_tokens": tokens, "stream": True}
        self._response = child.request("POST", "/v1/completions", body)
        self.status = self._response.status
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _events(self) -> Iterator[Any]:
        try:
            yield from events(self._response)
        except (OSError, http.client.HTTPException) as error:
            self.error = error

    def _read(self) -> None:
        for event in self._events():
            if event == "[DONE]":
                self.done = True
            elif "error" in event:
                self.error = event["error"]
            else:
                self.text += "".join(choice["text"] for choice in event["choices"])
            self.first.set()

    def wait(self, timeout: float = 20) -> Stream:
        """Read to the end."""
        self._thread.join(timeout)
        assert not self._thread.is_alive(), "the stream did not end"
        return self


def until(check: Any, timeout: float = 5.0) -> bool:
    """Whether ``check`` becomes true in time."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if check():
            return True
        time.sleep(0.02)
    return bool(check())
