"""The soak script for a few seconds: nothing leaks, crosses or fails. (The long run is the script's own; the time that
/health takes is printed there and decides nothing here, on a machine that may be busy.)"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).resolve().parents[2] / "scripts" / "soak.py"


@pytest.mark.timeout(120)
def test_many_connections_with_hang_ups_leave_nothing_behind() -> None:
    done = subprocess.run(
        [sys.executable, str(SOAK), "--minutes", "0.12", "--connections", "32", "--health-limit", "30"],
        capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 failed" in done.stdout and "hung up on" in done.stdout


def test_a_service_that_answers_differently_is_found() -> None:
    """The script can fail: sampled answers without a seed are not repeatable."""
    code = (
        "import random, sys; sys.argv = ['soak', '--minutes', '0.05', '--connections', '4', '--health-limit', '30'];"
        f"sys.path.insert(0, {str(SOAK.parent)!r}); import soak; plain = soak.bodies;"
        "soak.bodies = lambda rng: [(path, {k: v for k, v in body.items() if k != 'seed'} | {'temperature': 2.0})"
        " for path, body in plain(rng)]; sys.exit(soak.main())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=110)
    assert done.returncode == 1 and "before" in done.stdout, done.stdout + done.stderr
