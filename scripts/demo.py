"""Start ``jumar serve`` with the embedded model, ask it one question, show the answer and its speed.

``scripts/demo.sh`` calls this once the environment stands. Standard library only; ``http.client`` talks to 127.0.0.1
directly, whatever proxy the environment names.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from types import FrameType

HOST = "127.0.0.1"
MODEL = "smollm2-135m"
QUESTION = "What is the capital of France, and what is it famous for?"
MAX_TOKENS = 100
READY_SECONDS = 180.0
STOP_SECONDS = 20.0


class Stopped(Exception):
    """A signal asked this process to end."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class DemoError(Exception):
    """Something did not work; the text says what to look at."""


def _stop(signum: int, _frame: FrameType | None) -> None:
    raise Stopped(signum)


def is_free(port: int) -> bool:
    """Whether a server can listen on the port: nobody answers there, and binding works."""
    with socket.socket() as probe:
        probe.settimeout(1.0)
        if probe.connect_ex((HOST, port)) == 0:
            return False
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
            raise
    return True


def free_port(first: int) -> int:
    """The first free port from ``first`` on; says which were passed over."""
    for port in range(first, min(first + 100, 65536)):
        if is_free(port):
            if port != first:
                print(f"jumar: port {first} is taken; using {port}", flush=True)
            return port
    raise DemoError(f"no free port in {first}..{min(first + 99, 65535)}; name another start with --port")


def _die_with_parent() -> None:
    """In the new process: on Linux, ask for SIGTERM when the demo is gone, even if that was killed outright."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


def start(jumar: str, port: int) -> subprocess.Popen[bytes]:
    """The server as a child in a session of its own, so that Ctrl-C reaches it through us, once."""
    command = [jumar, "serve", MODEL, "--host", HOST, "--port", str(port), "--log-level", "warning"]
    print(f"jumar: starting: jumar {' '.join(command[1:])}", flush=True)
    preexec = _die_with_parent if sys.platform == "linux" else None
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=preexec)


def stop(server: subprocess.Popen[bytes]) -> None:
    """End the server: it may finish what it does for a while, then it is killed; a second signal kills it at once."""
    if server.poll() is not None:
        return
    try:
        server.terminate()
        server.wait(STOP_SECONDS)
    except (subprocess.TimeoutExpired, Stopped):
        server.kill()
        server.wait()


def wait_ready(server: subprocess.Popen[bytes], port: int) -> None:
    """Until /health answers 200."""
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise DemoError(f"the server ended with exit code {server.returncode} before it was ready; see above")
        connection = http.client.HTTPConnection(HOST, port, timeout=5)
        try:
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        except (OSError, http.client.HTTPException):
            pass  # Not listening yet.
        finally:
            connection.close()
        time.sleep(0.05)
    raise DemoError(f"the server was not ready after {READY_SECONDS:.0f} s; see above")


def ask(port: int) -> None:
    """One streamed chat request; prints the text as it comes, then what it cost."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    headers = {"Content-Type": "application/json"}
    if os.environ.get("JUMAR_API_KEY"):
        headers["Authorization"] = f"Bearer {os.environ['JUMAR_API_KEY']}"
    connection = http.client.HTTPConnection(HOST, port, timeout=120)
    print(f"\n> {QUESTION}\n", flush=True)
    sent = time.perf_counter()
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    response = connection.getresponse()
    if response.status != 200:
        raise DemoError(f"the server answered {response.status}: {response.read().decode(errors='replace')}")
    first = last = 0.0
    text, usage = "", None
    for line in response:
        if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
            continue
        chunk = json.loads(line[6:])
        if "error" in chunk:
            raise DemoError(f"the server broke off: {chunk['error'].get('message')}")
        usage = chunk.get("usage") or usage
        piece = "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
        if piece:
            last = time.perf_counter()
            first = first or last
            text += piece
            print(piece, end="", flush=True)
    connection.close()
    if not text or usage is None:
        raise DemoError("the answer was empty or came without usage")
    tokens = usage["completion_tokens"]
    rate = f"{(tokens - 1) / (last - first):.1f} tokens/s" if last > first else "one piece"
    print(
        f"\n\njumar: {tokens} tokens, {rate}, first token after {1000 * (first - sent):.0f} ms "
        f"({usage['prompt_tokens']} prompt tokens)",
        flush=True,
    )


def farewell(port: int) -> None:
    """How to go on."""
    proxied = any(os.environ.get(name) for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"))
    curl = f"curl {'--noproxy 127.0.0.1 ' if proxied else ''}http://{HOST}:{port}/v1/chat/completions"
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 100, "temperature": 0}
    message = json.dumps(body)
    print(
        f"\njumar: serving on http://{HOST}:{port}/v1 until Ctrl-C. From another terminal:\n"
        f"  {curl} -H 'Content-Type: application/json' -d '{message}'",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("jumar", help="path of the jumar command")
    parser.add_argument("--once", action="store_true", help="end after the answer")
    parser.add_argument("--port", type=int, default=8000, help="first port to try")
    options = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _stop)
    server = None
    answered = False
    try:
        if not 0 < options.port < 65536:
            raise DemoError(f"--port {options.port}: a port is a number from 1 to 65535")
        port = free_port(options.port)
        server = start(options.jumar, port)
        wait_ready(server, port)
        ask(port)
        answered = True
        if options.once:
            return 0
        farewell(port)
        code = server.wait()
        raise DemoError(f"the server ended with exit code {code}; see above")
    except Stopped as stopped:
        print("\njumar: stopping", flush=True)
        return 0 if answered and stopped.signum == signal.SIGINT else 128 + stopped.signum
    except (DemoError, OSError, http.client.HTTPException) as error:
        print(f"jumar: error: {error}", file=sys.stderr, flush=True)
        return 1
    finally:
        if server is not None:
            stop(server)


if __name__ == "__main__":
    sys.exit(main())
