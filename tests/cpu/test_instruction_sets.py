"""All ops against the float64 reference on every instruction set that this CPU has, not only on the best."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from cpu_kernels.build import find_compiler

if find_compiler() is None:
    pytest.skip("no C++ compiler", allow_module_level=True)

from cpu_kernels.library import ISAS, runnable_isas  # noqa: E402

VERIFY = ["verify", "--device", "cpu", "--kernels", "native", "--strict", "--no-bench"]


def run(isa: str, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "server.cli", *VERIFY, *more],
        env={**os.environ, "JUMAR_TEST_CPU_ISA": isa}, capture_output=True, text=True, timeout=200,
    )  # fmt: skip


@pytest.mark.parametrize("activations", ["auto", "float"])
@pytest.mark.parametrize("isa", runnable_isas())
def test_ops_agree_with_the_reference(isa: str, activations: str) -> None:
    """Strict: whole programs as one native call."""
    done = run(isa, "--activations", activations)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "25 of 25 ops agree" in done.stdout and "native" in done.stdout


def test_one_that_this_cpu_lacks_is_refused() -> None:
    missing = next(name for name in ISAS if name not in runnable_isas())
    done = run(missing)
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert "JUMAR_TEST_CPU_ISA: expected one of" in done.stderr
