"""The native library for aarch64, cross-compiled and run by QEMU: with its own tests, on a CPU that has dot products
(instruction set neon) and on one that has none (baseline).

Needs g++ for aarch64 and QEMU's user emulation (Debian, Ubuntu: g++-aarch64-linux-gnu, qemu-user). Without them it is
skipped, with JUMAR_TEST_AARCH64=1 it fails. On aarch64 itself there is nothing to emulate: all tests of the native
kernels run there as they are.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cpu_kernels import build as native_build
from cpu_kernels.library import ISAS
from tests.support.emulated import Block, Host, Mirror

CXX, QEMU = "aarch64-linux-gnu-g++", "qemu-aarch64"
ROOT = native_build.HERE.parent
DOTPROD, PLAIN = "max", "cortex-a72"
"""CPUs of QEMU: one with everything that it knows, one of ARMv8.0."""

if platform.machine().lower() in ("aarch64", "arm64"):
    pytest.skip("this is aarch64: the tests of the native kernels run on it as they are", allow_module_level=True)
_missing = [name for name in (CXX, QEMU) if not shutil.which(name)]
if _missing and os.environ.get("JUMAR_TEST_AARCH64") != "1":
    pytest.skip(f"no {' and no '.join(_missing)}: aarch64 is not tested", allow_module_level=True)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program that runs the library, beside the library."""
    assert not _missing, f"no {' and no '.join(_missing)}; Debian: apt-get install g++-aarch64-linux-gnu qemu-user"
    folder = tmp_path_factory.mktemp("aarch64")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", CXX)
        built = native_build.build(out=folder / "libjumar.so", machine="aarch64")
    assert built.path is not None, built.reason
    program = folder / "host"
    source = ROOT / "tests/cpu/emulated_host.cpp"
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{native_build.SOURCES}", "-Wl,-rpath,$ORIGIN"]
    command = [CXX, *flags, str(source), str(built.path), "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return program


def emulator(cpu: str, host: Path) -> list[str]:
    """The command that runs the host on an emulated CPU."""
    loader = subprocess.run([CXX, "-print-file-name=ld-linux-aarch64.so.1"], capture_output=True, text=True, check=True)
    system = Path(loader.stdout.strip()).resolve().parents[1]
    return [QEMU, "-cpu", cpu, "-L", str(system), str(host)]


def run(cpu: str, host: Path, module: str, *arguments: str) -> str:
    """Output of a module whose native calls are emulated."""
    command = [sys.executable, "-m", "tests.support.emulated", shlex.join(emulator(cpu, host)), module, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize(
    "cpu, asked, chosen",
    [(DOTPROD, "", "neon"), (DOTPROD, "baseline", "baseline"), (PLAIN, "", "baseline"), (PLAIN, "neon", None)],
)
def test_the_cpu_decides_the_instruction_set(
    monkeypatch: pytest.MonkeyPatch, host: Path, cpu: str, asked: str, chosen: str | None
) -> None:
    monkeypatch.setenv("JUMAR_TEST_CPU_ISA", asked)
    process = Host(emulator(cpu, host))
    try:
        assert process.call("isa") == (-1 if chosen is None else ISAS.index(chosen))
        runs = [name for i, name in enumerate(ISAS) if process.call("isa_runs", i)]
        assert runs == (["baseline", "neon"] if cpu == DOTPROD else ["baseline"])
    finally:
        process.close()


@pytest.mark.parametrize("offset", [-1, 0, 7, 8])
def test_what_is_written_beside_an_operand_is_noticed(host: Path, offset: int) -> None:
    """And what is written into it comes back: eight bytes here."""
    process, data = Host(emulator(PLAIN, host)), np.zeros(8, np.uint8)
    try:
        mirror = Mirror(process, Block(process))
        mirror.add(data.ctypes.data, data.nbytes)
        mirror.place()
        mirror.send()
        process.write(mirror.of(data.ctypes.data) + offset, b"\x01")
        if 0 <= offset < 8:
            mirror.fetch()
            assert data.tolist() == [int(i == offset) for i in range(8)]
        else:
            with pytest.raises(RuntimeError, match="wrote beside its operands"):
                mirror.fetch()
    finally:
        process.close()


@pytest.mark.parametrize("activations", ["auto", "float"])
@pytest.mark.parametrize("cpu", [DOTPROD, PLAIN])
def test_ops_agree_with_the_reference(host: Path, cpu: str, activations: str) -> None:
    """The conformance suite: every op with its own bound, every KV dtype, rows alone with the same bits."""
    verify = ("verify", "--device", "cpu", "--kernels", "native", "--strict", "--no-bench")
    assert "25 of 25 ops agree" in run(cpu, host, "server.cli", *verify, "--activations", activations)


def test_linear(host: Path) -> None:
    """Every weight dtype, on both instruction sets, against the reference, and rows in any company."""
    tests = "tests/cpu/test_linear.py"
    # it starts a process of its own, which would be no emulated one
    but = f"{tests}::test_the_environment_chooses_the_instruction_set"
    out = run(DOTPROD, host, "pytest", "-v", "-p", "no:cacheprovider", tests, "--deselect", but)
    assert "-neon] PASSED" in out and "-baseline] PASSED" in out and "SKIPPED" not in out


def test_a_model_gives_the_tokens_of_the_reference(host: Path) -> None:
    name = "tests/cpu/test_native_engine.py::test_first_tokens"
    assert "1 passed" in run(DOTPROD, host, "pytest", "-q", "-p", "no:cacheprovider", name)
