"""A copy of the checkout at a path with a space, and environments for it that need no network.

``python_for`` writes a Python that makes its virtual environments see the packages of the running one: pip then finds
every requirement satisfied, so the real scripts and the real pip run in a second or two.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOT_COPIED = shutil.ignore_patterns(
    ".git", ".venv", ".venvs", "__pycache__", "*.egg-info", "build", "dist", "tests", ".*_cache", ".hypothesis"
)
DEAD = "http://127.0.0.1:9"  # the discard port: nothing answers


def python_for(folder: Path, site_packages: Sequence[Path]) -> Path:
    """A Python executable whose ``-m venv DIR`` makes DIR without pip of its own, with ``site_packages`` added."""
    path = folder / "python3"
    lines = "\n".join(str(p) for p in site_packages)
    path.write_text(
        f"""#!{sys.executable}
import glob, os, subprocess, sys
arguments = sys.argv[1:]
if "venv" in arguments:
    subprocess.run([{sys.executable!r}, "-m", "venv", "--without-pip", arguments[-1]], check=True)
    (site,) = glob.glob(os.path.join(arguments[-1], "lib", "python*", "site-packages"))
    with open(os.path.join(site, "borrowed.pth"), "w") as f:
        f.write({lines!r})
else:
    os.execv({sys.executable!r}, [{sys.executable!r}, *arguments])
"""
    )
    path.chmod(0o755)
    return path


def borrowed_packages() -> list[Path]:
    """Where the packages of this process lie."""
    paths = sysconfig.get_paths()
    return sorted({Path(paths["purelib"]), Path(paths["platlib"])})


def clean_environment(**changes: str) -> dict[str, str]:
    """This environment without what would steer the scripts, with no index, and the changes."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JUMAR_", "PIP_", "PYTHON"))}
    return {**kept, "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, **changes}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working tree without tests, at a path with a space."""
    copy = tmp_path_factory.mktemp("a folder") / "jumar copy"
    shutil.copytree(ROOT, copy, ignore=NOT_COPIED)
    return copy


@pytest.fixture(scope="module")
def offline_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return python_for(tmp_path_factory.mktemp("offline python"), borrowed_packages())


@pytest.fixture(scope="module")
def prepared(checkout: Path, offline_python: Path) -> Path:
    """The checkout with its .venv set up by the scripts' own functions, from nothing and without a network."""
    done = run_lib(checkout, "env_prepare $V; env_core $V; env_model $V", JUMAR_PYTHON=str(offline_python))
    assert done.returncode == 0, done.stdout + done.stderr
    return checkout


def run_lib(checkout: Path, commands: str, **changes: str) -> subprocess.CompletedProcess[str]:
    """Runs functions of scripts/lib.sh; $V is the checkout's .venv."""
    script = (
        f'set -euo pipefail; . "$0/scripts/lib.sh"; V="$ROOT/.venv"; {commands.replace("$V", chr(34) + "$V" + chr(34))}'
    )
    return subprocess.run(
        ["bash", "-c", script, str(checkout)],
        env=clean_environment(**changes),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )


Spawn = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    """Starts a command in a process group of its own; whatever is left of the group is killed at the end."""
    started: list[subprocess.Popen[str]] = []

    def start(command: Sequence[str | Path], cwd: Path, **changes: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [str(part) for part in command],
            cwd=cwd,
            env=clean_environment(**changes),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
