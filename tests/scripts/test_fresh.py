"""scripts/demo.sh with the real service and model: from an environment that stands, and from nothing."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.scripts.conftest import DEAD, NOT_COPIED, ROOT, Spawn, clean_environment
from tests.scripts.test_setup import tool_folder

NO_NETWORK = {
    "PIP_NO_INDEX": "1",
    "PIP_FIND_LINKS": "",
    "PIP_INDEX_URL": DEAD,
    **{name: DEAD for name in ("http_proxy", "https_proxy", "HTTPS_PROXY", "ALL_PROXY")},
}


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A folder to start from that holds packages of the same names as ours."""
    folder = tmp_path / "elsewhere"
    for name in ("server", "runtime", "device"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(f"raise RuntimeError('{name} of the working directory')\n")
    return folder


def answer_of(output: str) -> str:
    """What the model said; the demo's last lines say how fast."""
    found = re.search(
        r"\n> [^\n]+\n\n(.+?)\n\njumar: \d+ tokens, [\d.]+ tokens/s, first token after \d+ ms", output, re.S
    )
    assert found, output
    return found[1]


def test_a_second_run_answers_within_ten_seconds_without_a_network(
    prepared: Path, spawn: Spawn, elsewhere: Path
) -> None:
    """Started from another folder, at a path with a space, with a proxy in the environment that leads nowhere."""
    seconds = []
    for _ in range(3):  # Another process on the same cores can slow one run tenfold: the best one counts.
        began = time.monotonic()
        process = spawn([prepared / "scripts/demo.sh", "--once"], elsewhere, **NO_NETWORK)
        output, _ = process.communicate(timeout=120)
        seconds.append(time.monotonic() - began)
        assert process.returncode == 0, output
        assert "Paris" in answer_of(output)
        assert "installing" not in output
        if seconds[-1] < 10:
            break
    assert min(seconds) < 10, f"{seconds} s; the last:\n{output}"


def test_the_command_keeps_the_working_directory_off_the_import_path(prepared: Path, elsewhere: Path) -> None:
    done = subprocess.run(
        [prepared / ".venv/bin/jumar", "--help"], cwd=elsewhere, env=clean_environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "serve" in done.stdout


@pytest.mark.setup
@pytest.mark.timeout(1200)
def test_from_nothing_to_an_answer(tmp_path: Path, elsewhere: Path) -> None:
    """The whole way with the package index of this machine's pip settings: no compiler, interrupted inside pip once."""
    copy = tmp_path / "fresh copy"
    shutil.copytree(ROOT, copy, ignore=NOT_COPIED)
    tools = tmp_path / "tools"
    tools.mkdir()
    path = tool_folder(tools)
    (path / "python3").symlink_to(Path(sys.base_prefix) / "bin/python3")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("JUMAR_", "PYTHON"))} | {"PATH": str(path)}
    command = [copy / "scripts/demo.sh", "--once"]

    log = tmp_path / "first.log"
    with log.open("w") as out:
        first = subprocess.Popen(
            command, cwd=elsewhere, env=environment, stdout=out, stderr=out, start_new_session=True
        )
        while not list(copy.glob(".venv/lib/python*/site-packages/numpy")):
            assert first.poll() is None, log.read_text()
            time.sleep(0.02)
        os.killpg(first.pid, signal.SIGINT)
        assert first.wait(timeout=60) == 130, log.read_text()

    second = subprocess.run(
        command, cwd=elsewhere, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=900
    )
    output = second.stdout + second.stderr
    assert second.returncode == 0, output
    assert "anew: its set-up was interrupted" in output
    assert "MB to download" in output
    assert "Paris" in answer_of(output)
    installed = {p.name.split("-")[0].lower() for p in copy.glob(".venv/lib/python*/site-packages/*.dist-info")}
    assert "numpy" in installed
    assert not installed & {"torch", "mindspore", "tensorflow", "jax", "transformers"}

    third = subprocess.run(
        command,
        cwd=elsewhere,
        env=environment | NO_NETWORK,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert third.returncode == 0, third.stdout + third.stderr
    assert "installing" not in third.stdout
    assert answer_of(third.stdout) == answer_of(second.stdout)
