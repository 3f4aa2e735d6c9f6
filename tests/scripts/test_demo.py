"""scripts/demo.sh in ordinary trouble, with a small stand-in for the service (the real one: test_fresh.py)."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.scripts.conftest import DEAD, Spawn

# Speaks just enough of the protocol. What it does wrong is told by the environment variable FAKE.
STAND_IN = f"""#!{sys.executable}
import http.server, json, os, sys, time
port = int(sys.argv[sys.argv.index("--port") + 1])
fake = os.environ.get("FAKE", "")
print("stand-in", os.getpid(), *sys.argv[1:], flush=True)
if fake == "dies":
    sys.exit(3)
if fake == "never ready":
    time.sleep(300)

class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(500 if fake == "refuses" else 200)
        self.end_headers()
        if fake == "refuses":
            self.wfile.write(b'{{"error": {{"message": "out of order"}}}}')
            return
        usage = {{"prompt_tokens": 9, "completion_tokens": 3}}
        pieces = [[{{"delta": {{"content": text}}}}] for text in ("Paris ", "is ", "nice.")]
        for choices, extra in [(p, {{}}) for p in pieces] + [([], {{"usage": usage}})]:
            if fake == "breaks off":
                self.wfile.write(b'data: {{"error": {{"message": "lost it"}}}}\\n\\n')
                return
            self.wfile.write(b"data: " + json.dumps({{"choices": choices, **extra}}).encode() + b"\\n\\n")
            time.sleep(0.01)
        self.wfile.write(b"data: [DONE]\\n\\n")

http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture(scope="module")
def demo(prepared: Path) -> list[str | Path]:
    """The demo of a finished set-up whose ``jumar`` is the stand-in."""
    command = prepared / ".venv/bin/jumar"
    command.unlink()
    command.write_text(STAND_IN)
    command.chmod(0o755)
    return ["bash", prepared / "scripts/demo.sh"]


@pytest.fixture
def taken_port() -> Iterator[int]:
    """A port that somebody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def read_until(process: subprocess.Popen[str], text: str) -> str:
    """Output up to the line with ``text``."""
    assert process.stdout
    seen = ""
    for line in process.stdout:
        seen += line
        if text in line:
            return seen
    raise AssertionError(f"ended without {text!r}:\n{seen}")


def server_of(output: str) -> int:
    found = re.search(r"stand-in (\d+)", output)
    assert found, output
    return int(found[1])


def gone(pid: int, within: float = 5.0) -> bool:
    """Whether the process ends (an orphan's zombie counts as ended)."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


def test_answer_speed_and_a_clean_end(demo: list[str | Path], spawn: Spawn, tmp_path: Path) -> None:
    process = spawn([*demo, "--once"], tmp_path)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert "Paris is nice." in output
    assert re.search(r"3 tokens, [\d.]+ tokens/s, first token after \d+ ms \(9 prompt tokens\)", output)
    assert "installing" not in output
    assert gone(server_of(output))


def test_port_taken_takes_the_next_one_and_says_so(
    demo: list[str | Path], spawn: Spawn, tmp_path: Path, taken_port: int
) -> None:
    process = spawn([*demo, "--once", "--port", str(taken_port)], tmp_path)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    said = re.search(rf"port {taken_port} is taken; using (\d+)", output)
    assert said and int(said[1]) > taken_port, output
    assert f"--port {said[1]}" in output


def test_a_proxy_in_the_environment_is_bypassed_for_local_calls(
    demo: list[str | Path], spawn: Spawn, tmp_path: Path
) -> None:
    proxies = {name: DEAD for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy", "ALL_PROXY")}
    process = spawn(demo, tmp_path, **proxies)
    output = read_until(process, "curl")
    assert "Paris is nice." in output
    assert "curl --noproxy 127.0.0.1 http://127.0.0.1:" in output, "the line to copy must bypass it as well"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("how", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 128 + 15), (signal.SIGHUP, 128 + 1), (signal.SIGKILL, -9)]
)
def test_no_server_is_left_behind(
    demo: list[str | Path], spawn: Spawn, tmp_path: Path, how: signal.Signals, code: int
) -> None:
    process = spawn(demo, tmp_path)
    output = read_until(process, "until Ctrl-C")
    process.send_signal(how)
    assert process.wait(timeout=30) == code
    assert gone(server_of(output))


def test_ctrl_c_before_the_server_is_ready(demo: list[str | Path], spawn: Spawn, tmp_path: Path) -> None:
    process = spawn(demo, tmp_path, FAKE="never ready")
    output = read_until(process, "stand-in")
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=30) == 128 + signal.SIGINT
    assert gone(server_of(output))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("dies", "the server ended with exit code 3 before it was ready; see above"),
        ("refuses", 'the server answered 500: {"error": {"message": "out of order"}}'),
        ("breaks off", "the server broke off: lost it"),
    ],
)
def test_what_goes_wrong_in_the_server_is_told(
    demo: list[str | Path], spawn: Spawn, tmp_path: Path, fault: str, message: str
) -> None:
    process = spawn([*demo, "--once"], tmp_path, FAKE=fault)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert f"jumar: error: {message}" in output
    assert gone(server_of(output))


@pytest.mark.parametrize("wrong", [["--twice"], ["--port"], ["--port", "0"], ["--port", "70000"]])
def test_wrong_options_are_refused(demo: list[str | Path], spawn: Spawn, tmp_path: Path, wrong: list[str]) -> None:
    process = spawn([*demo, *wrong], tmp_path)
    output, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "jumar: error:" in output
    assert "stand-in" not in output
