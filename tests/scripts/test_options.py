"""What the scripts say about their options: at once, before an environment is made or anything is downloaded."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.scripts.conftest import ROOT, clean_environment


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts alone; whoever goes on to set something up ends with another message."""
    folder = tmp_path_factory.mktemp("bare")
    shutil.copytree(ROOT / "scripts", folder / "scripts")
    return folder


def call(bare: Path, *command: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        ["bash", f"scripts/{command[0]}", *command[1:]],
        cwd=bare,
        env=clean_environment(JUMAR_PYTHON="/no/python"),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert not (bare / ".venv").exists()
    return done


@pytest.mark.parametrize("script", ["demo.sh", "lint.sh", "test.sh"])
@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_needs_no_environment(bare: Path, script: str, option: str) -> None:
    done = call(bare, script, option)
    assert done.returncode == 0 and not done.stderr
    assert done.stdout.startswith(f"usage: scripts/{script}")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["test.sh", "--bogus"], "unknown option --bogus"),
        (["test.sh", "--long", "--al"], "unknown option --al"),
        (["lint.sh", "--fix"], "unknown argument --fix"),
        (["lint.sh", "runtime"], "unknown argument runtime"),
        (["demo.sh", "--twice"], "unknown option --twice"),
        (["demo.sh", "here"], "unknown option here"),
        (["demo.sh", "--port"], "--port (nothing): expected a number"),
        *(
            (["demo.sh", "--port", port], f"--port {port}: expected a number from 1 to 65535")
            for port in ("abc", "80a", "-1", "0", "65536", "99999999999999999999", "8 0")
        ),
    ],
)
def test_a_wrong_option_is_told_at_once(bare: Path, command: list[str], words: str) -> None:
    done = call(bare, *command)
    assert done.returncode == 1 and not done.stdout
    assert done.stderr.startswith(f"jumar: error: {words}")


@pytest.mark.parametrize("arguments", [["tests/runtime", "--lf"], ["-k", "prefix"], ["--", "--lf"], ["--long"]])
def test_what_is_pytest_s_passes(bare: Path, arguments: list[str]) -> None:
    assert "JUMAR_PYTHON=/no/python cannot be used" in call(bare, "test.sh", *arguments).stderr
