"""Processes of the engines that ``peers.py`` measures: a worker that is asked over a pipe, and a llama-server."""

from __future__ import annotations

import http.client
import json
import os
import random
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

READY_SECONDS = 120.0


def vm_hwm(status: str) -> int:
    """KiB, of the text of /proc/PID/status. ValueError without it."""
    for line in status.splitlines():
        name, _, value = line.partition(":")
        if name == "VmHWM":
            return int(value.split()[0])
    raise ValueError("no VmHWM in the status of a process")


class Process:
    """A child whose messages go to a file, so that it never waits for a reader."""

    def __init__(self, name: str, command: Sequence[str | Path], threads: int) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  # closed in close()
        self._begin = time.perf_counter()
        self.popen = subprocess.Popen(
            [str(c) for c in command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        )  # fmt: skip
        self.load_seconds = 0.0

    def ready(self) -> None:
        """To be called when it can run: notes the seconds since its start."""
        self.load_seconds = time.perf_counter() - self._begin

    def peak_memory(self) -> float:
        """MiB: the most that was resident at once."""
        path = Path(f"/proc/{self.popen.pid}/status")
        if not path.exists():
            raise RuntimeError(f"{path} is not there: memory is measured on Linux only; leave it out with --metrics")
        return vm_hwm(path.read_text(encoding="utf-8")) / 1024

    def failure(self, what: str) -> RuntimeError:
        """With the end of what it wrote."""
        self._log.seek(0)
        return RuntimeError(f"{self.name} {what}: {self._log.read()[-800:]}")

    def close(self) -> None:
        self.popen.kill()
        self.popen.communicate()
        self._log.close()


class Worker(Process):
    """``peers_worker.py`` with one engine; ready when constructed."""

    def __init__(self, name: str, command: Sequence[str | Path], threads: int) -> None:
        super().__init__(name, command, threads)
        try:
            self._answer()
        except RuntimeError:
            self.close()
            raise
        self.ready()

    def ask(self, metric: str) -> float:
        assert self.popen.stdin is not None
        self.popen.stdin.write(metric + "\n")
        self.popen.stdin.flush()
        return self._answer()

    def _answer(self) -> float:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            if line.startswith('{"value":'):  # some engines print greetings
                return float(json.loads(line)["value"])
        raise self.failure("ended")


class LlamaServer(Process):
    """A llama-server with room for 16 streams; ready when constructed."""

    def __init__(self, command: Sequence[str | Path], threads: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = int(free.getsockname()[1])
        super().__init__("llama-server", [*command, "--host", "127.0.0.1", "--port", str(self._port)], threads)
        try:
            self._wait()
        except RuntimeError:
            self.close()
            raise
        self.ready()

    def _wait(self) -> None:
        while self.popen.poll() is None and time.perf_counter() - self._begin < READY_SECONDS:
            try:
                if self._request("GET", "/health")[0] == 200:
                    return
            except OSError:
                pass  # does not listen yet
            time.sleep(0.005)
        raise self.failure(f"did not answer within {READY_SECONDS:.0f} s")

    def run(self, streams: int, size: int, tokens: int) -> None:
        """Random prompts of this size, at the same time; RuntimeError unless all tokens are there."""
        rng = random.Random(0)
        prompts = [[rng.randrange(100, 40_000) for _ in range(size)] for _ in range(streams)]
        with ThreadPoolExecutor(streams) as pool:
            counts = list(pool.map(lambda prompt: self._complete(prompt, tokens), prompts))
        if counts != [tokens] * streams:
            raise self.failure(f"made {counts} tokens, not {tokens} each")

    def _complete(self, prompt: list[int], tokens: int) -> int:
        body = {"prompt": prompt, "n_predict": tokens, "ignore_eos": True, "temperature": 0, "cache_prompt": False}
        status, answer = self._request("POST", "/completion", json.dumps(body))
        return int(json.loads(answer)["tokens_predicted"]) if status == 200 else 0

    def _request(self, method: str, path: str, body: str | None = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=600)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"} if body else {})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()
